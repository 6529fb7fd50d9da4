"""compat.sglang.rounds: the wrappers against the results of SGLang's own functions."""

from __future__ import annotations

import re
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.compat.sglang import attention as sglang_attention
from specdec_kernels.compat.sglang import functions as sglang
from specdec_kernels.compat.sglang import rounds as sglang_rounds
from specdec_kernels.compat.sglang.contracts import VERSIONS, host_of

BF16 = torch.bfloat16
HEAD_SETTINGS = host_of(VERSIONS[-1]).head_settings


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a stub of SGLang with the names that are imported within calls."""
    module = ModuleType("sglang")
    spec = SimpleNamespace(
        speculative_algorithm="EAGLE3", speculative_attention_mode="prefill", speculative_eagle_topk=4,
        speculative_num_steps=2, speculative_draft_attention_backend=None, enable_multi_layer_eagle=False,
    )  # fmt: skip
    kernel = SimpleNamespace(
        prefill_attention_backend=None, decode_attention_backend="fa3", attention_backend="specdec"
    )  # fmt: skip
    args = object()

    def require_mlp_sync(*given: Any) -> bool:
        assert given == ((args,) if module.mlp_sync_takes_args else ())
        return bool(module.mlp_sync)

    found: dict[str, Any] = {
        "spec": spec,
        "kernel": kernel,
        "mlp_sync": False,
        "mlp_sync_takes_args": False,
        "get_spec": lambda: spec,
        "get_exec": lambda: SimpleNamespace(kernel=kernel),
        "get_server_args": lambda: args,
        "require_mlp_sync": require_mlp_sync,
        "should_apply_lm_head_quant_method": lambda head, method: method is not None,
        "MHATokenToKVPool": Pool,
    }
    for name, value in found.items():
        setattr(module, name, value)
    names = (
        "", ".srt", ".srt.utils", ".srt.utils.common", ".srt.runtime_context", ".srt.layers", ".srt.layers.logits_processor",
        ".srt.mem_cache", ".srt.mem_cache.memory_pool",
    )  # fmt: skip
    for name in names:
        monkeypatch.setitem(sys.modules, f"sglang{name}", module)
    return module


class Pool:
    """A stub of SGLang's KV pool: a tensor of K and one of V for each layer."""

    use_hnd = False
    use_native_move_kv_cache = False

    def __init__(self, layers: int, rows: int, dim: int, device: torch.device) -> None:
        self.k_buffer = [torch.randn(rows, 2, dim, device=device).to(BF16) for _ in range(layers)]
        self.v_buffer = [torch.randn(rows, 2, dim, device=device).to(BF16) for _ in range(layers)]
        self.data_ptrs = torch.tensor([each.data_ptr() for each in self.buffers()], device=device).view(torch.uint64)

    def buffers(self) -> list[Tensor]:
        return [*self.k_buffer, *self.v_buffer]

    def row_bytes(self) -> int:
        return self.k_buffer[0][0].numel() * 2

    def whole(self) -> Tensor:
        return torch.stack(self.buffers()).cpu()


# --- KV rows of accepted tokens ---------------------------------------------------------------------------------------


class Accepted:
    """Accepted paths in trees of `nodes`, whose rows are scattered over the pool."""

    def __init__(self, bs: int, nodes: int, width: int, rows: int, device: torch.device, longest: int = 30) -> None:
        places = longest + nodes
        self.lens = torch.randint(0, longest + 1, (bs,), device=device)
        self.req_to_token = torch.randperm(rows)[: (bs + 2) * places].view(bs + 2, places).int().to(device)
        self.slots = torch.randperm(bs + 2)[:bs].to(device)
        columns = self.lens[:, None] + torch.arange(nodes, device=device)
        self.out_cache_loc = self.req_to_token[self.slots].gather(1, columns).long().flatten()
        self.num_correct = torch.randint(0, width, (bs,), device=device).int()
        self.index = torch.full((bs, width), -1, dtype=torch.int32)
        for b, count in enumerate(self.num_correct.tolist()):
            path = [0, *sorted((torch.randperm(nodes - 1)[:count] + 1).tolist())]
            self.index[b, : count + 1] = torch.tensor(path) + b * nodes
        self.index = self.index.to(device)

    def arguments(self, pool: Pool) -> tuple[Any, ...]:
        return (
            pool.data_ptrs.view(torch.int64), pool.row_bytes(), len(pool.k_buffer[0]), self.req_to_token, self.slots,
            self.lens, self.out_cache_loc, self.index, self.num_correct,
        )  # fmt: skip

    def expected(self, before: Tensor) -> Tensor:
        """Move rows as SGLang does: read all rows of all paths, then write them."""
        after = before.clone()
        for b, count in enumerate(self.num_correct.tolist()):
            for j in range(count + 1):
                source = self.out_cache_loc[int(self.index[b, j])]
                after[:, self.req_to_token[self.slots[b], self.lens[b] + j].long()] = before[:, source]
        return after


@pytest.mark.sanitize
@pytest.mark.parametrize("bs, nodes, width, layers", [(1, 32, 6, 36), (5, 9, 9, 1), (3, 70, 40, 2), (64, 8, 3, 3)])
def test_move_accept_tokens_compacts_paths(device: torch.device, bs: int, nodes: int, width: int, layers: int) -> None:
    rows = (bs + 2) * (30 + nodes) + 5
    pool, accepted = Pool(layers, rows, 16, device), Accepted(bs, nodes, width, rows, device)
    before = pool.whole()
    sglang.move_accept_tokens(*accepted.arguments(pool))
    assert torch.equal(pool.whole(), accepted.expected(before))


@pytest.mark.sanitize
def test_move_accept_tokens_skips_rows_out_of_range(device: torch.device) -> None:
    """With any indices, rows go to rows of the pool, and nothing outside it is read or written."""
    for _ in range(10):
        pool, accepted = Pool(2, 200, 8, device), Accepted(4, 9, 5, 300, device)
        before = pool.whole()
        wild = torch.tensor([-(2**31), -1, 200, 2**31 - 1], device=device)
        for tensor in (accepted.index, accepted.lens, accepted.slots, accepted.out_cache_loc, accepted.num_correct):
            is_wild = torch.rand(tensor.shape, device=device) < 0.2
            tensor[is_wild] = wild[torch.randint(4, tensor.shape, device=device)][is_wild].to(tensor.dtype)
        sglang.move_accept_tokens(*accepted.arguments(pool))
        after = pool.whole()
        known = {row.numpy().tobytes() for row in before.view(torch.int16).flatten(0, 1)}
        assert all(row.numpy().tobytes() in known for row in after.view(torch.int16).flatten(0, 1))


def test_move_accept_tokens_accepts_empty_batch(device: torch.device) -> None:
    pool, accepted = Pool(1, 200, 8, device), Accepted(1, 9, 5, 200, device)
    before = pool.whole()
    accepted.index, accepted.num_correct = accepted.index[:0], accepted.num_correct[:0]
    accepted.slots, accepted.lens = accepted.slots[:0], accepted.lens[:0]
    sglang.move_accept_tokens(*accepted.arguments(pool))
    assert torch.equal(pool.whole(), before)


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, torch.zeros(2), "move_accept_tokens: data_ptrs is float32, expected int64"),
        (1, 24, "move_accept_tokens: row_bytes is 24, expected a multiple of 16"),
        (2, -1, "move_accept_tokens: num_rows is -1, expected 0 to 2147483647"),
        (5, torch.zeros(3, dtype=torch.int64), "move_accept_tokens: seq_lens has shape [3], expected [batch=2]"),
        (7, torch.zeros(2, 3), "move_accept_tokens: accept_index is float32, expected int32"),
    ],
)
def test_move_accept_tokens_error_messages(at: int, value: Any, message: str) -> None:
    cpu = torch.device("cpu")
    pool, accepted = Pool(1, 200, 8, cpu), Accepted(2, 9, 5, 200, cpu)
    arguments = list(accepted.arguments(pool))
    arguments[at] = value
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sglang.move_accept_tokens(*arguments)


@pytest.mark.parametrize("within_window", [False, True])
def test_accepted_rows_go_to_the_front_of_their_tree(within_window: bool, device: torch.device) -> None:
    pool, accepted = Pool(2, 300, 8, device), Accepted(3, 9, 5, 300, device)
    before = pool.whole()
    batch = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=accepted.req_to_token), req_pool_indices=accepted.slots,
        seq_lens=accepted.lens, out_cache_loc=accepted.out_cache_loc,
    )  # fmt: skip
    pointers, row_bytes, rows, _, _, _, *rest = accepted.arguments(pool)
    where = sglang_rounds.destinations(batch, within_window)
    if within_window:  # also when the requests have lost their rows of the table
        accepted.req_to_token = accepted.req_to_token.clone()
        batch.req_to_token_pool.req_to_token.zero_()
    sglang.move_accept_tokens(pointers, row_bytes, rows, *where, *rest)
    assert torch.equal(pool.whole(), accepted.expected(before))


def test_move_accepted_leaves_other_pools_to_sglang(engine: Any, device: torch.device) -> None:
    accepted = Accepted(2, 9, 5, 200, device)
    within_window = False
    batch = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=accepted.req_to_token), req_pool_indices=accepted.slots,
        seq_lens=accepted.lens, out_cache_loc=accepted.out_cache_loc,
    )  # fmt: skip

    def moved(pool: Any) -> bool:
        """Return whether ours moved the rows, correctly; otherwise SGLang's function ran."""
        asked: list[Any] = []
        before = pool.whole()
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        sglang_rounds.move_accepted(
            lambda *given: asked.append(given), batch, accepted.index, accepted.num_correct, allocator,
            within_window=within_window,
        )  # fmt: skip
        if asked:
            assert asked == [(batch, accepted.index, accepted.num_correct, allocator)]
            return False
        assert torch.equal(pool.whole(), accepted.expected(before))
        return True

    cuda = device.type == "cuda"
    assert moved(Pool(2, 200, 8, device)) is cuda  # SGLang's own where there is no GPU
    within_window = True
    assert moved(Pool(2, 200, 8, device)) is cuda
    pool = Pool(2, 200, 8, device)
    pool.use_hnd = True
    assert not moved(pool)
    assert not moved(type("OtherPool", (Pool,), {})(2, 200, 8, device))
    assert not moved(Pool(2, 200, 6, device))  # rows of 24 bytes
    pool = Pool(2, 200, 8, device)
    pool.v_buffer = [torch.zeros(200, 2, 4, device=device, dtype=BF16) for _ in range(2)]
    assert not sglang_rounds.plain_rows(pool)
    assert not sglang_rounds.plain_rows(Pool(0, 200, 8, device))


# --- draft-extend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [True, False], ids=["0.5.17", "0.5.23"])
def test_accepted_width_is_that_of_a_path(engine: Any, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first versions pass their arguments, also to `require_mlp_sync`."""
    engine.mlp_sync_takes_args = old
    given = {"server_args": object()} if old else {}

    def original(*, phase: str, **others: Any) -> int:
        assert others == given
        return 8

    def width(phase: str = "draft_extend", *, kernel: Any = None, **changes: Any) -> int:
        with monkeypatch.context() as patch:
            for where, values in ((engine.spec, changes), (engine.kernel, kernel or {})):
                for name, value in values.items():
                    patch.setattr(where, name, value)
            return sglang_rounds.accepted_width(original, phase=phase, mlp_sync_takes_args=old, **given)

    assert width() == 3
    assert width(speculative_num_steps=9) == 8
    assert width("target_verify") == 8 and width("draft_decode") == 8
    assert width(speculative_eagle_topk=1) == 8 and width(speculative_eagle_topk=None) == 8
    other = {"attention_backend": "fa3"}
    assert width(kernel=other) == 8 and width(kernel={"prefill_attention_backend": "triton"}) == 8
    assert width(kernel=other, speculative_draft_attention_backend="specdec") == 3
    assert width(enable_multi_layer_eagle=True) == 8
    decode = {"speculative_attention_mode": "decode"}
    assert width(**decode) == 8 and width(kernel={"decode_attention_backend": "specdec"}, **decode) == 3
    engine.mlp_sync = True
    assert width() == 8


class DraftExtend(sglang_attention.TreeAttention):
    def __init__(self) -> None:
        """Without an engine."""


def test_extend_accepted_passes_accepted_rows_only(engine: Any) -> None:
    bs, nodes, width, dim = 3, 8, 3, 4
    hidden, tokens, places = torch.randn(bs * nodes, dim), torch.arange(bs * nodes).int(), torch.arange(bs * nodes) + 50
    worker = SimpleNamespace(
        speculative_num_draft_tokens=nodes, speculative_num_steps=width - 1,
        draft_extend_attn_backend=DraftExtend(), cuda_graph_runner_for_draft_extend=None,
    )  # fmt: skip
    batch = SimpleNamespace(seq_lens=torch.ones(bs), out_cache_loc=places)
    result = SimpleNamespace(next_token_ids=tokens, logits_output=SimpleNamespace(hidden_states=hidden))
    seen: list[Any] = []

    def original(worker: Any, batch: Any, result: Any, **others: Any) -> str:
        rows = batch.out_cache_loc, result.next_token_ids, result.logits_output.hidden_states
        seen.append((worker.speculative_num_draft_tokens, *rows))
        if engine.kernel.attention_backend == "broken":
            raise RuntimeError("broken")
        return "done"

    def rows_seen(**others: Any) -> int:
        seen.clear()
        extend = partial(sglang_rounds.extend_accepted, mlp_sync_takes_args=False)
        assert extend(original, worker, batch, result, **others) == "done"
        assert worker.speculative_num_draft_tokens == nodes and batch.out_cache_loc is places
        assert result.next_token_ids is tokens and result.logits_output.hidden_states is hidden
        return int(seen[0][0])

    first = torch.cat([torch.arange(width) + b * nodes for b in range(bs)])
    assert rows_seen() == width
    assert torch.equal(seen[0][1], places[first]) and torch.equal(seen[0][2], tokens[first])
    assert torch.equal(seen[0][3], hidden[first])
    worker.cuda_graph_runner_for_draft_extend = SimpleNamespace(captured_req_width=width)
    assert rows_seen() == width
    worker.cuda_graph_runner_for_draft_extend = SimpleNamespace(captured_req_width=nodes)
    assert rows_seen() == nodes
    worker.cuda_graph_runner_for_draft_extend = None
    worker.draft_extend_attn_backend = None
    assert rows_seen() == nodes  # another backend's
    worker.draft_extend_attn_backend = DraftExtend()
    assert rows_seen(kv_loc_plan=None) == width
    assert rows_seen(kv_loc_plan=object()) == nodes  # locations for all rows
    result.prepared_draft_extend_inputs = None
    assert rows_seen() == width
    result.prepared_draft_extend_inputs = object()
    assert rows_seen() == nodes
    result.prepared_draft_extend_inputs = None
    engine.spec.speculative_eagle_topk = 1
    assert rows_seen() == nodes
    engine.spec.speculative_eagle_topk, engine.spec.speculative_draft_attention_backend = 4, "specdec"
    engine.kernel.attention_backend = "broken"
    with pytest.raises(RuntimeError, match="broken"):
        sglang_rounds.extend_accepted(original, worker, batch, result, mlp_sync_takes_args=False)
    assert worker.speculative_num_draft_tokens == nodes and batch.out_cache_loc is places


# --- the target's logits ----------------------------------------------------------------------------------------------


class Logits:
    """A stub of SGLang's head, its logits processor and the buffer of its graphs."""

    def __init__(self, device: torch.device, rows: int = 6, vocab: int = 40, dim: int = 16) -> None:
        self.head = SimpleNamespace(weight=torch.randn(vocab, dim, device=device).to(BF16), quant_method=None)
        self.processor = SimpleNamespace(
            do_tensor_parallel_all_gather=False, logit_scale=None, final_logit_softcapping=None, use_fp32_lm_head=False,
            rl_on_policy_target=None, vocab_size=vocab, use_fp32_lm_head_output=False,
        )  # fmt: skip
        self.hidden = torch.randn(rows, dim, device=device).to(BF16)
        self.buffer = torch.zeros(9, vocab, device=device)
        self.metadata = SimpleNamespace(
            next_token_logits_buffer=self.buffer[:rows], forward_mode=SimpleNamespace(is_target_verify=lambda: True)
        )

    def original(self, processor: Any, hidden: Tensor, head: Any, metadata: Any, bias: Any, use_buffer: bool) -> Tensor:
        return (hidden @ head.weight.T).float()

    def get(self) -> Tensor:
        found: Tensor = sglang_rounds.verify_logits(
            self.original, self.processor, self.hidden, self.head, self.metadata, head_settings=HEAD_SETTINGS
        )
        return found


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_rounds, "is_capturing", lambda: True)


def sampling_info(**changes: Any) -> Any:
    fields = {
        "is_all_greedy": True, "acc_additive_penalties": None, "acc_scaling_penalties": None, "logit_bias": None
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def sampled(
    logits: Tensor, mask: Any = None, return_logprob: bool = False, watermark: Any = None, **changes: Any
) -> Tensor:
    """Return the logits that SGLang's function gets."""
    batch = SimpleNamespace(sampling_info=sampling_info(**changes), return_logprob=return_logprob)
    output = SimpleNamespace(next_token_logits=logits)

    def original(tree: Any, batch: Any, output: Any, mask: Any, *, watermark_state: Any) -> Any:
        return output.next_token_logits

    got: Tensor = sglang_rounds.sample(original, None, batch, output, mask, watermark_state=watermark)
    return got


def test_verify_logits_keeps_dtype_in_capture(engine: Any, capturing: None, device: torch.device) -> None:
    logits = Logits(device)
    want = logits.hidden @ logits.head.weight.T
    got = logits.get()
    assert got.dtype == BF16 and got.is_contiguous() and torch.equal(got, want)
    assert got.data_ptr() == logits.buffer.data_ptr()  # no memory of its own
    assert torch.equal(got.argmax(-1), want.float().argmax(-1))
    assert sampled(got[:4]) is not None and sampled(got[:4]).dtype == BF16
    # Every other batch gets SGLang's logits: the same values in its buffer, in float32.
    for changes in (
        {"is_all_greedy": False}, {"acc_additive_penalties": 1}, {"acc_scaling_penalties": 1}, {"logit_bias": 1},
        {"mask": object()}, {"return_logprob": True}, {"watermark": object()},
    ):  # fmt: skip
        wide = sampled(logits.get()[:4], **changes)
        assert wide.dtype == torch.float32 and torch.equal(wide, want[:4].float())
        assert wide.data_ptr() == logits.buffer.data_ptr()
    # A smaller graph of the same buffer, then the larger again.
    few = Logits(device)
    few.head, few.buffer = logits.head, logits.buffer
    few.metadata.next_token_logits_buffer, few.hidden = logits.buffer[:2], logits.hidden[:2]
    assert torch.equal(sampled(few.get(), is_all_greedy=False), want[:2].float())
    assert torch.equal(sampled(logits.get(), is_all_greedy=False), want.float())


def test_verify_logits_leaves_other_cases_to_sglang(
    engine: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    assert Logits(device).get().dtype == torch.float32  # no capture
    monkeypatch.setattr(sglang_rounds, "is_capturing", lambda: True)
    for name, value in {
        "do_tensor_parallel_all_gather": True, "logit_scale": 2.0, "final_logit_softcapping": 30.0,
        "use_fp32_lm_head": True, "use_fp32_lm_head_output": True, "rl_on_policy_target": "fsdp", "vocab_size": 39,
    }.items():  # fmt: skip
        logits = Logits(device)
        setattr(logits.processor, name, value)
        assert logits.get().dtype == torch.float32, name
    logits = Logits(device)
    logits.head.quant_method = "fp8"
    assert logits.get().dtype == torch.float32
    logits = Logits(device)
    logits.head.set_lora = None
    assert logits.get().dtype == torch.float32
    logits = Logits(device)
    logits.metadata.forward_mode = SimpleNamespace(is_target_verify=lambda: False)
    assert logits.get().dtype == torch.float32
    logits = Logits(device)
    logits.metadata.next_token_logits_buffer = None
    assert logits.get().dtype == torch.float32
    logits = Logits(device)
    logits.metadata.next_token_logits_buffer = logits.buffer  # of more rows
    assert logits.get().dtype == torch.float32
    engine.spec.speculative_algorithm = "DFLASH"
    assert Logits(device).get().dtype == torch.float32
    foreign = torch.randn(3, 8).to(BF16)  # not marked: stays as it is
    assert sampled(foreign, is_all_greedy=False) is foreign


def test_verify_greedy_leaves_other_candidates_to_sglang() -> None:
    tree = {
        "candidates": torch.tensor([[1, 5]]), "retrive_index": torch.arange(2).view(1, 2),
        "retrive_next_token": torch.tensor([[1, -1]]), "retrive_next_sibling": torch.full((1, 2), -1),
        "target_predict": torch.tensor([[5, 9]]),
    }  # fmt: skip
    outputs = {
        "predicts": torch.zeros(2, dtype=torch.int32), "accept_index": torch.full((1, 2), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    asked: list[Any] = []
    sglang_rounds.verify_greedy(lambda **named: asked.append(named), **outputs, **tree)
    assert not asked and outputs["predicts"].tolist() == [5, 9] and outputs["accept_token_num"].tolist() == [1]
    tree["candidates"] = tree["candidates"].int()  # the bonus tokens of a draft without steps
    sglang_rounds.verify_greedy(lambda **named: asked.append(named), **outputs, **tree)
    assert [set(named) for named in asked] == [{*outputs, *tree}]
