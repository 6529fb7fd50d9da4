"""compat.vllm.attention: passes with vLLM's metadata over its cache, against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.compat.vllm.attention import PagedAttention, Rows, RowsBuilder, refusal

DIM, MAX_REQUESTS, MAX_TOKENS, MAX_LEN, BLOCKS = 64, 6, 64, 128, 64
LAYER = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25)


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "model_config": SimpleNamespace(rswa_window=None, max_model_len=MAX_LEN),
    }
    return SimpleNamespace(**fields | changes)


def spec(page_size: int = 16, **changes: Any) -> Any:
    return SimpleNamespace(**{"block_size": page_size, "head_size": DIM, "head_size_v": DIM} | changes)


def empty_cache(layout: str, page_size: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [blocks, kv_heads, page_size, 2 D] of NaN in a layout of vLLM: by rows, by heads, or with padded pages."""
    row = 2 * DIM
    page = page_size * kv_heads * row + (64 if layout == "padded" else 0)
    memory = torch.full((BLOCKS * page,), torch.nan, device=device).to(dtype)
    inner = (page_size * row, row) if layout == "HND" else (row, kv_heads * row)
    return memory.as_strided((BLOCKS, kv_heads, page_size, row), (page, *inner, 1))


class Runner:
    """A stub of vLLM's model runner: its buffers, and requests with KV in a cache."""

    def __init__(
        self,
        device: torch.device,
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        layout: str = "NHD",
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> None:
        self.device, self.page_size, self.heads, self.kv_heads, self.dtype = device, page_size, heads, kv_heads, dtype
        self.is_fp8 = kv_cache_dtype.startswith("fp8")
        stored = torch.float8_e4m3fn if self.is_fp8 else dtype
        self.cache = empty_cache(layout, page_size, kv_heads, stored, device)
        blocks = -(-MAX_LEN // page_size)
        self.query_start_loc = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(MAX_REQUESTS, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(MAX_REQUESTS, blocks, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((MAX_TOKENS,), -1, dtype=torch.int64, device=device)
        self.builder = RowsBuilder(spec(page_size), ["layer"], config(), device)
        self.options = options
        self.attention = PagedAttention(
            heads, DIM, DIM**-0.5, kv_heads, kv_cache_dtype=kv_cache_dtype,
            sliding_window=options.get("window"), logits_soft_cap=options.get("cap"),
        )  # fmt: skip

    def batch(self, lens: list[tuple[int, int]], *, tokens: int | None = None, requests: int | None = None) -> Any:
        """Return the metadata of a pass: cached and new tokens of each request, padded to `tokens` and `requests`."""
        batch, new = len(lens), sum(n for _, n in lens)
        tokens, requests = tokens or new, requests or batch
        blocks = iter((torch.randperm(BLOCKS - 1) + 1).tolist())  # block 0 is unused
        self.query_start_loc.fill_(new)
        self.seq_lens.zero_()
        self.block_table.fill_(0)
        self.slot_mapping.fill_(-1)
        start = 0
        for b, (has, count) in enumerate(lens):
            self.query_start_loc[b] = start
            self.seq_lens[b] = has + count
            used = -(-(has + count) // self.page_size)
            self.block_table[b, :used] = torch.tensor([next(blocks) for _ in range(used)])
            self.block_table[b, used:] = BLOCKS + 7  # stale entries after its blocks
            self.slot_mapping[start : start + count] = self.slots(b)[has:].long()
            start += count
        for b in range(batch):
            before = self.slots(b)[: lens[b][0]]
            self.store(before, *(self.floats(len(before), self.kv_heads) for _ in range(2)))
        return self.metadata(tokens, requests, max(has + count for has, count in lens))

    def metadata(self, tokens: int, requests: int, longest: int) -> Any:
        """Return vLLM's CommonAttentionMetadata, without host values that a pass must not wait for."""
        return SimpleNamespace(
            query_start_loc=self.query_start_loc[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            block_table_tensor=self.block_table[:requests],
            slot_mapping=self.slot_mapping[:tokens],
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_seq_len=longest,
            causal=True,
        )

    def floats(self, rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, DIM).to(self.dtype).to(self.device)

    def slots(self, b: int) -> Tensor:
        """Return the slot of each token of a request."""
        place = torch.arange(int(self.seq_lens[b]), device=self.device)
        return self.block_table[b, place // self.page_size] * self.page_size + place % self.page_size

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if self.is_fp8:
            k, v = (k.float() / LAYER._k_scale_float), (v.float() / LAYER._v_scale_float)
        rows = torch.cat([k, v], -1).to(self.cache.dtype)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self.cache[slot // self.page_size, :, slot % self.page_size] = row

    def stored(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [tokens, kv_heads, D] in float64."""
        rows = torch.stack([self.cache[s // self.page_size, :, s % self.page_size] for s in slots.tolist()]).double()
        k, v = rows.split(DIM, -1)
        return (k * LAYER._k_scale_float, v * LAYER._v_scale_float) if self.is_fp8 else (k, v)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of `tokens` rows, as views of one fused projection."""
        rows = self.floats(tokens, self.heads + 2 * self.kv_heads)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return q, k, v

    def run(self, rows: Rows, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        out = torch.full((len(q), self.heads, DIM), 77.0).to(self.dtype).to(self.device)
        cache = self.cache.view(torch.uint8) if self.is_fp8 else self.cache
        got = self.attention.forward(LAYER, q, k, v, cache, rows, out)
        assert got is out
        return out

    def expected(self, q: Tensor, k: Tensor, v: Tensor, lens: list[tuple[int, int]]) -> Tensor:
        """Check the written KV, and return float64 attention of each row over the cache."""
        out, start = [], 0
        window, cap = self.options.get("window"), self.options.get("cap")
        for b, (has, count) in enumerate(lens):
            keys, values = self.stored(self.slots(b))
            new = slice(start, start + count)
            bound = {"rtol": 0.07, "atol": 0.01} if self.is_fp8 else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(keys[has:], k[new].double(), **bound)
            torch.testing.assert_close(values[has:], v[new].double(), **bound)
            for j in range(count):
                sees = slice(max(has + j + 1 - window, 0) if window else 0, has + j + 1)
                group = self.heads // self.kv_heads
                seen_k, seen_v = (t[sees].repeat_interleave(group, 1) for t in (keys, values))
                scores = torch.einsum("hd,nhd->hn", q[start + j].double(), seen_k) * DIM**-0.5
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), seen_v))
            start += count
        return torch.stack(out)


def check(runner: Runner, lens: list[tuple[int, int]]) -> None:
    """Check one pass with padding rows at the end; only its own slots are written."""
    common = runner.batch(lens)
    rows = runner.builder.build(0, common)
    before, tokens = runner.cache.clone().float(), common.num_actual_tokens
    q, k, v = runner.inputs(tokens + 3)
    got = runner.run(rows, q, k, v)
    close(runner, got[:tokens], runner.expected(q, k, v, lens))
    assert (got[tokens:] == 77).all()
    written = torch.zeros(BLOCKS, runner.page_size, dtype=torch.bool, device=runner.device).view(-1)
    written[common.slot_mapping] = True
    same = torch.isclose(before, runner.cache.float(), rtol=0, atol=0, equal_nan=True).all(-1).all(1)
    assert same.view(-1)[~written].all()


def close(runner: Runner, got: Tensor, want: Tensor) -> None:
    bound = {torch.float32: (2e-4, 2e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 4e-3)}[runner.dtype]
    torch.testing.assert_close(got.double(), want, rtol=bound[0], atol=bound[1])


MIXED = [(0, 9), (40, 1), (17, 5), (31, 1), (12, 12)]  # prefill, decode, verification, a prompt's second chunk


@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
def test_attention_of_mixed_batches(device: torch.device, page_size: int, layout: str) -> None:
    check(Runner(device, page_size=page_size, layout=layout), MIXED)


def test_attention_over_large_padded_blocks_of_hybrid_models(device: torch.device) -> None:
    check(Runner(device, page_size=528, layout="padded"), MIXED)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (7, 1), (12, 4)])
def test_attention_with_grouped_heads(device: torch.device, heads: int, kv_heads: int) -> None:
    check(Runner(device, heads=heads, kv_heads=kv_heads), MIXED)


@pytest.mark.parametrize(
    "lens", [[(21, 1)], [(0, 30)], [(33, 6)], [(5, 1), (60, 1), (1, 1)], [(9, 4), (50, 4)], [(0, 1)]], ids=str
)
def test_attention_of_uniform_batches(device: torch.device, lens: list[tuple[int, int]]) -> None:
    check(Runner(device), lens)


@pytest.mark.parametrize(("window", "cap"), [(1, None), (8, None), (20, None), (None, 3.0), (8, 3.0)])
def test_attention_with_windows_and_soft_caps(device: torch.device, window: int | None, cap: float | None) -> None:
    check(Runner(device, window=window, cap=cap), MIXED)


def test_attention_ignores_freed_blocks_before_window(device: torch.device) -> None:
    """In vLLM's tables, block 0, whose content is arbitrary, replaces freed blocks."""
    runner = Runner(device, window=8)
    common = runner.batch([(60, 2), (100, 1)])
    rows = runner.builder.build(0, common)
    q, k, v = runner.inputs(3)
    want = runner.run(rows, q, k, v)
    runner.block_table[0, :3], runner.block_table[1, :5] = 0, 0
    assert torch.equal(runner.run(rows, q, k, v), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_16_bit_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    check(Runner(device, dtype=dtype), MIXED)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
def test_attention_with_fp8_caches(device: torch.device, kv_cache_dtype: str) -> None:
    check(Runner(device, kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16), MIXED)


@pytest.mark.parametrize("replayed", [[(21, 1), (5, 1)], [(3, 2), (40, 6)], [(0, 11)], MIXED[:3]], ids=str)
def test_captured_metadata_serves_smaller_batches(device: torch.device, replayed: list[tuple[int, int]]) -> None:
    """A graph keeps its captured metadata; a replay finds new values at the same addresses."""
    runner = Runner(device)
    tokens, requests = 16, 4
    runner.query_start_loc.copy_(torch.tensor([0, 4, 8, 12, 16, 16, 16]))
    runner.seq_lens[:requests] = 4
    captured = runner.builder.build(0, runner.metadata(tokens, requests, MAX_LEN))
    common = runner.batch(replayed, tokens=tokens, requests=requests)
    runner.builder.build(0, common)
    q, k, v = runner.inputs(tokens)
    got = runner.run(captured, q, k, v)
    new = sum(count for _, count in replayed)
    close(runner, got[:new], runner.expected(q, k, v, replayed))
    assert (got[new:] == 0).all()


def test_captured_metadata_serves_one_request_and_none(device: torch.device) -> None:
    runner = Runner(device)
    captured = runner.builder.build(0, runner.metadata(8, 1, MAX_LEN))
    assert captured.max_kv_len is None  # a capture's bound says nothing about later batches
    common = runner.batch([(30, 5)], tokens=8, requests=1)
    runner.builder.build(0, common)
    q, k, v = runner.inputs(8)
    got = runner.run(captured, q, k, v)
    close(runner, got[:5], runner.expected(q, k, v, [(30, 5)]))
    assert (got[5:] == 0).all()
    runner.query_start_loc.zero_()
    runner.seq_lens.zero_()
    runner.slot_mapping.fill_(-1)
    runner.builder.build(0, common)
    assert (runner.run(captured, q, k, v) == 0).all()


def test_draft_steps_update_metadata_in_place(device: torch.device) -> None:
    """Since 0.28, vLLM captures them in one graph: its kernels change lengths and slots, then it calls the builder."""
    runner = Runner(device)
    lens = [(20, 1), (37, 1)]
    rows = runner.builder.build(0, runner.batch(lens))
    for step in range(3):
        q, k, v = runner.inputs(2)
        runner.attention.forward(LAYER, q, k, v, runner.cache, rows, out := torch.empty(2, runner.heads, DIM).to(q))
        close(runner, out, runner.expected(q, k, v, [(has + step, 1) for has, _ in lens]))
        runner.seq_lens[:2] += 1
        runner.slot_mapping[:2] = torch.stack([runner.slots(b)[-1] for b in range(2)]).long()
        rows.max_kv_len += 1
        runner.builder.update_draft_decode_metadata(rows)


def test_draft_beyond_max_model_len_is_not_written(device: torch.device) -> None:
    """The length is 1 and the slot -1 in vLLM's buffers."""
    runner = Runner(device)
    common = runner.batch([(20, 1), (30, 1)])
    runner.seq_lens[1], runner.slot_mapping[1] = 1, -1
    before = runner.cache.clone()
    q, k, v = runner.inputs(2)
    got = runner.run(runner.builder.build(0, common), q, k, v)
    at = int(runner.block_table[1, 0])
    assert torch.equal(runner.cache[at], before[at])
    _, first = runner.stored(runner.slots(1))
    torch.testing.assert_close(got[1].double(), first[0].repeat_interleave(2, 0), rtol=2e-4, atol=2e-5)


def test_attention_of_shared_cache_writes_nothing(device: torch.device) -> None:
    runner = Runner(device)
    lens = [(20, 2), (3, 1)]
    rows = runner.builder.build(0, runner.batch(lens))
    q, k, v = runner.inputs(3)
    want = runner.run(rows, q, k, v)
    before = runner.cache.clone()
    assert torch.equal(runner.run(rows, q, None, None), want)
    runner.attention.kv_sharing_target_layer_name = "layer"
    other = runner.inputs(3)
    assert torch.equal(runner.run(rows, q, *other[1:]), want)
    assert torch.equal(runner.cache.nan_to_num(), before.nan_to_num())


def test_builder_serves_more_rows_than_its_buffers(device: torch.device) -> None:
    """Chunked local attention makes a request of each chunk, and a drafter adds rows."""
    runner = Runner(device)
    runner.builder = RowsBuilder(
        spec(), ["layer"],
        config(scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=8)), device,
    )  # fmt: skip
    kept = runner.builder.build(0, runner.batch([(1, 1), (2, 1)]))
    check(runner, MIXED)
    again = runner.builder.build(0, runner.batch([(1, 1), (2, 1)]))
    assert again.prefix_lens.data_ptr() == kept.prefix_lens.data_ptr()


def test_attention_without_metadata_gives_zeros(device: torch.device) -> None:
    runner = Runner(device)
    q, k, v = runner.inputs(4)
    out = torch.full_like(q, 5.0)
    assert (runner.attention.forward(LAYER, q, k, v, torch.empty(0, device=device), None, out) == 0).all()


def test_workspace_keeps_earlier_buffers() -> None:
    workspace = RowsBuilder(spec(), [], config(), torch.device("cpu")).workspace
    small, large = workspace.get(100), workspace.get(1000)
    assert workspace.get(10) is large and large.numel() >= 1000 and small.numel() >= 100
    assert any(each is small for each in workspace._buffers)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_builder_refuses_unsupported_engines_by_name() -> None:
    def builder(kv_cache_spec: Any = None, **changes: Any) -> str:
        return message_of(lambda: RowsBuilder(kv_cache_spec or spec(), [], config(**changes), torch.device("cpu")))

    assert builder(spec(head_size_v=32)) == "specdec: keys have dimension 64 and values 32, expected one for both"
    several = SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)
    assert builder(parallel_config=several) == "specdec: decode_context_parallel_size is 2, expected 1"
    several = SimpleNamespace(prefill_context_parallel_size=4)
    assert builder(parallel_config=several) == "specdec: prefill_context_parallel_size is 4, expected 1"
    assert builder(cache_config=SimpleNamespace(calculate_kv_scales=True)) == (
        "specdec: calculate_kv_scales is True, expected False: graphs keep the scales that they were captured with"
    )
    assert builder(model_config=SimpleNamespace(rswa_window=128)) == (
        "specdec: the model has a reference sliding window (R-SWA), expected plain windows"
    )


def test_attention_refuses_unsupported_layers_and_passes_by_name() -> None:
    def layer(**changes: Any) -> str:
        return message_of(lambda: PagedAttention(4, DIM, 1.0, 2, **changes))

    assert layer(sinks=torch.zeros(4)) == "specdec: a layer has sinks, expected plain attention"
    assert layer(alibi_slopes=[0.5] * 4) == "specdec: a layer has alibi_slopes, expected plain attention"
    assert layer(attn_type="encoder") == ("specdec: a layer attends to more than what came before, expected a decoder")
    PagedAttention(4, DIM, 1.0, 2, sinks=None)

    runner = Runner(torch.device("cpu"))
    common = runner.batch([(4, 1)])
    rows = runner.builder.build(0, common)
    q, k, v = runner.inputs(1)
    scale = torch.ones(())
    assert message_of(lambda: runner.attention.forward(LAYER, q, k, v, runner.cache, rows, q.clone(), scale)) == (
        "specdec: output_scale is given, expected None"
    )
    runner.cache = runner.cache[:, :, :8]
    assert message_of(lambda: runner.run(rows, q, k, v)) == (
        "specdec: the KV cache has shape [64, 2, 8, 128], expected [blocks, 2, 16, 128], keys and values side by side"
    )
    for causal in (False, torch.ones(1, dtype=torch.bool)):
        common.causal = causal
        assert message_of(lambda: runner.builder.build(0, common)) == (
            "specdec: attention is not causal, expected rows that see what is before them"
        )


def test_refusal_names_unsupported_combinations() -> None:
    assert refusal(torch.bfloat16, "auto", "13.0") is None
    assert refusal(torch.bfloat16, "bfloat16", "13.0") is None
    assert refusal(torch.bfloat16, "fp8", "13.0") is None
    assert refusal(torch.bfloat16, None, "13.0") is None
    assert refusal(torch.bfloat16, "float16", "13.0") == "kv_cache_dtype float16 not supported for bfloat16 queries"
    assert refusal(torch.bfloat16, "auto", None) == "this build of specdec_kernels has no CUDA kernels"
