"""compat.sglang.attention: passes over SGLang's pools and tables, against masked attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.compat.sglang import attention as sglang_attention
from specdec_kernels.compat.sglang.attention import TreeAttention, TreeAttentionSteps

HEADS, KV_HEADS, DIM, PLACES = 4, 2, 64, 48


class Mode:
    """A stub of SGLang's ForwardMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "draft_extend"


class Pool:
    """A stub of SGLang's KV pool of one layer, filled with random rows."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.randn(rows, KV_HEADS, DIM).to(dtype).to(device)
        self.v = torch.randn(rows, KV_HEADS, DIM).to(dtype).to(device)
        self.written: list[Tensor] = []

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> None:
        self.k[loc] = (k / (k_scale or 1)).to(self.k.dtype)
        self.v[loc] = (v / (v_scale or 1)).to(self.v.dtype)
        self.written.append(loc)


class MHATokenToKVPool(Pool):
    """The same by the name of SGLang's class, in which layers are numbered from 0."""

    def get_key_buffer(self, layer: int) -> Tensor:
        assert layer == 0
        return self.k

    def get_value_buffer(self, layer: int) -> Tensor:
        assert layer == 0
        return self.v


class HybridPool:
    """A stub of SGLang's HybridLinearKVPool, where layer 3 alone has attention."""

    def __init__(self, full: Pool) -> None:
        self.full_kv_pool, self.page_size = full, 1
        self.full_attention_layer_id_mapping = {3: 0}

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.full_kv_pool.get_key_buffer(self.full_attention_layer_id_mapping[layer])

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.full_kv_pool.get_value_buffer(self.full_attention_layer_id_mapping[layer])

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> None:
        assert layer.layer_id == 3
        self.full_kv_pool.set_kv_buffer(layer, loc, k, v, k_scale, v_scale)


class Hybrid:
    """A stub of SGLang's HybridLinearAttnBackend: it calls the attention that it holds as SGLang's does."""

    def __init__(self, full: TreeAttention) -> None:
        self.full = full
        self.read = full.token_to_kv_pool, full.req_to_token_pool, full.max_context_len, full.needs_cpu_seq_lens

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.full.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.full.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.full.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.full.init_forward_metadata_in_graph(forward_batch)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        self.full.update_verify_buffers_to_fill_after_draft(spec_info=spec_info, cuda_graph_bs=cuda_graph_bs)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        return self.full.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        return self.full.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)


class Engine:
    """A stub of SGLang's model runner with some requests, whose tokens are scattered over the pool."""

    def __init__(self, lens: list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.pool = Pool(8 * PLACES, dtype, device)
        places = torch.randperm(8 * PLACES - 1)[: 7 * PLACES].view(7, PLACES) + 1
        self.req_to_token = torch.cat([torch.zeros(1, PLACES, dtype=torch.long), places]).int().to(device)
        self.rows = (torch.randperm(7)[: len(lens)] + 1).to(device)
        self.lens = torch.tensor(lens, device=device)

    def runner(self, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "token_to_kv_pool": self.pool,
            "req_to_token_pool": SimpleNamespace(req_to_token=self.req_to_token),
            "model_config": SimpleNamespace(context_len=PLACES, is_encoder_decoder=False),
            "use_mla_backend": False,
        }
        return SimpleNamespace(**fields | changes)

    def places(self, first: Tensor, count: int) -> Tensor:
        """Return [requests * count] pool indices of rows first to first + count of each request."""
        columns = first[:, None] + torch.arange(count, device=self.device)
        return self.req_to_token[self.rows].gather(1, columns).long().flatten()

    def batch(self, mode: str, **fields: Any) -> Any:
        return SimpleNamespace(forward_mode=Mode(mode), batch_size=len(self.lens), req_pool_indices=self.rows, **fields)


def layer(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "layer_id": 0, "tp_q_head_num": HEADS, "qk_head_dim": DIM, "scaling": DIM**-0.5, "sliding_window_size": -1,
        "logit_cap": 0.0, "logit_capping_method": "tanh", "k_scale": None, "v_scale": None, "k_scale_float": None,
        "v_scale_float": None, "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"),
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def inputs(rows: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(rows, HEADS * DIM).to(dtype).to(device)
    return q, *(torch.randn(rows, KV_HEADS, DIM).to(dtype).to(device) for _ in range(2))


def expected(engine: Engine, q: Tensor, sees: list[Tensor], cap: float = 0.0, scale: float = 1.0) -> Tensor:
    """Compute float64 attention of each query row over the pool rows that it sees."""
    out = []
    for row, places in zip(q.double().view(-1, HEADS, DIM), sees, strict=True):
        k, v = (
            (t[places.long()].double() * scale).repeat_interleave(HEADS // KV_HEADS, 1)
            for t in (engine.pool.k, engine.pool.v)
        )
        scores = torch.einsum("hd,nhd->hn", row, k) * DIM**-0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten())
    return torch.stack(out)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5)


def run(backend: Any, batch: Any, q: Tensor, k: Tensor, v: Tensor, which: Any = None) -> Tensor:
    forward = backend.forward_decode if batch.forward_mode.is_decode_or_idle() else backend.forward_extend
    result: Tensor = forward(q, k, v, which or layer(), batch, save_kv_cache=True)
    assert result.shape == q.shape and result.dtype == q.dtype
    return result


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("window", "cap"), [(-1, 0.0), (5, 0.0), (-1, 3.0)], ids=["plain", "window", "cap"])
def test_decode_matches_float64(device: torch.device, graph: bool, window: int, cap: float) -> None:
    engine = Engine([1, 17, 30], device)
    backend = TreeAttention(engine.runner())
    batch = engine.batch(
        "decode", seq_lens=engine.lens, spec_info=None, out_cache_loc=engine.places(engine.lens - 1, 1)
    )
    prepare(backend, batch, graph)
    q, k, v = inputs(3, device)
    got = run(backend, batch, q, k, v, layer(sliding_window_size=window, logit_cap=cap))
    sees = [engine.req_to_token[r, :n] for r, n in zip(engine.rows, engine.lens.tolist(), strict=True)]
    close(got, expected(engine, q, [s[-(window + 1) :] if window >= 0 else s for s in sees], cap))


def prepare(backend: Any, batch: Any, graph: bool, replayed: Any = None) -> None:
    """Call what SGLang calls before a pass: eagerly, or for a capture and then, with the batch's values, a replay."""
    if not graph:
        backend.init_forward_metadata(batch)
        return
    backend.init_cuda_graph_state(5, 80)
    dummy = {"seq_lens": torch.ones_like(batch.seq_lens), "req_pool_indices": torch.zeros_like(batch.req_pool_indices)}
    backend.init_forward_metadata_out_graph(SimpleNamespace(**vars(batch) | dummy), in_capture=True)
    backend.init_forward_metadata_out_graph(replayed or batch)
    backend.init_forward_metadata_in_graph(batch)  # part of the graph, so it runs with the replay


def test_prefill_matches_float64(device: torch.device) -> None:
    """Requests with and without a cached prefix, and one that decodes among them."""
    engine = Engine([9, 20, 4, 13], device)
    prefix, new = torch.tensor([0, 12, 3, 6], device=device), torch.tensor([9, 8, 1, 7], device=device)
    places = [engine.req_to_token[r, a : a + n] for r, a, n in zip(engine.rows, prefix, new, strict=True)]
    batch = engine.batch(
        "extend", extend_prefix_lens=prefix.int(), extend_seq_lens=new.int(), out_cache_loc=torch.cat(places).long()
    )
    backend = TreeAttention(engine.runner())
    backend.init_forward_metadata(batch)
    q, k, v = inputs(25, device)
    got = run(backend, batch, q, k, v)
    sees = [
        engine.req_to_token[r, : a + j + 1]
        for r, a, n in zip(engine.rows, prefix.tolist(), new.tolist(), strict=True)
        for j in range(n)
    ]
    close(got, expected(engine, q, sees))


def test_preparation_of_a_replay_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may capture what precedes a replay; it does without if that raises."""
    engine = Engine([4], torch.device("cpu"))
    backend = TreeAttention(engine.runner())
    backend.init_cuda_graph_state(2, 2)
    batch = engine.batch("decode", seq_lens=engine.lens, spec_info=None)
    monkeypatch.setattr(sglang_attention, "is_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"^specdec: replays cannot be prepared in a graph \(SGLANG_ENABLE_METADATA_GLUE"
    ):
        backend.init_forward_metadata_out_graph(batch)
    monkeypatch.setattr(sglang_attention, "is_capturing", lambda: False)
    backend.init_forward_metadata_out_graph(batch)


def random_trees(requests: int, nodes: int) -> Tensor:
    """Return [requests, nodes, nodes] bool: each node sees its ancestors and itself."""
    seen = torch.zeros(requests, nodes, nodes, dtype=torch.bool)
    for tree in seen:
        for node in range(nodes):
            if node:
                tree[node] = tree[int(torch.randint(node, ()))]
            tree[node, node] = True
    return seen


def full_mask(seen: Tensor, lens: Tensor) -> Tensor:
    """Return SGLang's other mask layout: rows over the sequence and then the tree, with unused entries at the end."""
    parts = [
        torch.cat([torch.ones(len(s), n, dtype=torch.bool), s.cpu()], 1).flatten()
        for s, n in zip(seen, lens.tolist(), strict=True)
    ]
    return torch.cat([*parts, torch.ones(11, dtype=torch.bool)]).to(lens.device)


@pytest.mark.parametrize("nodes", [7, 64, 70])
@pytest.mark.parametrize("layout", ["own", "tree", "full"])
@pytest.mark.parametrize("graph", [False, True])
def test_verification_of_trees_matches_float64(device: torch.device, nodes: int, layout: str, graph: bool) -> None:
    engine = Engine([3, 21, 11], device)
    engine.req_to_token = torch.cat([engine.req_to_token, engine.req_to_token.flip(0), engine.req_to_token], 1)
    seen = random_trees(3, nodes).to(device)
    backend = TreeAttention(engine.runner(), num_draft_tokens=nodes)
    if layout == "own" and not graph:
        backend.init_cuda_graph_state(5, 5 * nodes)
    spec_info = SimpleNamespace(draft_token_num=nodes, tree_topk=4, draft_token=torch.zeros(3 * nodes))
    spec_info.custom_mask = full_mask(seen, engine.lens) if layout == "full" else seen.flatten()
    batch = engine.batch(
        "verify", seq_lens=engine.lens, spec_info=spec_info, out_cache_loc=engine.places(engine.lens, nodes)
    )
    if layout == "own":  # what drafting writes in place
        if graph:
            backend.init_cuda_graph_state(5, 5 * nodes)
            backend.init_cuda_graph_state = lambda *sizes: None  # type: ignore[method-assign]
        assert backend._mask_bytes is not None
        backend._mask_bytes[: seen.numel()] = seen.flatten()
        spec_info.custom_mask = backend._mask_bytes
    prepare(backend, batch, graph)
    q, k, v = inputs(3 * nodes, device)
    got = run(backend, batch, q, k, v)
    sees = []
    for request, (row, length) in enumerate(zip(engine.rows, engine.lens.tolist(), strict=True)):
        table = engine.req_to_token[row]
        for node in range(nodes):
            tail = table[length : length + nodes][seen[request, node]]
            sees.append(torch.cat([table[:length], tail]))
    close(got, expected(engine, q, sees))


@pytest.mark.parametrize("graph", [False, True])
def test_layers_with_attention_of_a_hybrid_model_match_float64(
    device: torch.device, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree and a decoding pass through SGLang's wrapper, over a pool that numbers its layers itself."""
    monkeypatch.setattr(TreeAttention, "serves_hybrids", True)
    engine, nodes = Engine([3, 21, 11], device), 6
    engine.pool = MHATokenToKVPool(8 * PLACES, torch.float32, device)
    pool, third = HybridPool(engine.pool), layer(layer_id=3)
    backend = Hybrid(TreeAttention(engine.runner(token_to_kv_pool=pool), num_draft_tokens=nodes))
    assert backend.read[0] is pool and torch.equal(backend.read[1].req_to_token, engine.req_to_token)
    seen = random_trees(3, nodes).to(device)
    spec_info = SimpleNamespace(
        draft_token_num=nodes, tree_topk=4, draft_token=torch.zeros(3 * nodes), custom_mask=seen.flatten()
    )
    tables = [engine.req_to_token[row] for row in engine.rows]
    trees = engine.batch(
        "verify", seq_lens=engine.lens, spec_info=spec_info, out_cache_loc=engine.places(engine.lens, nodes)
    )
    prepare(backend, trees, graph)
    backend.update_verify_buffers_to_fill_after_draft(spec_info, 3 if graph else None)
    q, k, v = inputs(3 * nodes, device)
    got = run(backend, trees, q, k, v, third)
    sees = [
        torch.cat([table[:length], table[length : length + nodes][tree[node]]])
        for table, length, tree in zip(tables, engine.lens.tolist(), seen, strict=True)
        for node in range(nodes)
    ]
    close(got, expected(engine, q, sees))
    decoded = engine.batch(
        "decode", seq_lens=engine.lens, spec_info=None, out_cache_loc=engine.places(engine.lens - 1, 1)
    )
    prepare(backend, decoded, graph)
    q, k, v = inputs(3, device)
    got = run(backend, decoded, q, k, v, third)
    close(got, expected(engine, q, [t[:n] for t, n in zip(tables, engine.lens.tolist(), strict=True)]))
    TreeAttentionSteps(engine.runner(token_to_kv_pool=pool), 4, 3)  # a draft's pool has the same kind


def test_verification_ignores_padding_requests(device: torch.device) -> None:
    """Replay a graph of four requests for two, with masks in the layout of the n-gram corpus."""
    engine, nodes = Engine([8, 15], device), 6
    seen = random_trees(2, nodes).to(device)
    backend = TreeAttention(engine.runner(), num_draft_tokens=nodes)
    spec_info = SimpleNamespace(draft_token_num=nodes, tree_topk=-1, draft_token=torch.zeros(2 * nodes))
    spec_info.custom_mask = full_mask(seen, engine.lens)
    real = engine.batch("verify", out_cache_loc=engine.places(engine.lens, nodes))
    padded = {
        "seq_lens": torch.cat([engine.lens, torch.ones(2, dtype=torch.long, device=device)]),
        "req_pool_indices": torch.cat([engine.rows, torch.zeros(2, dtype=torch.long, device=device)]),
        "batch_size": 4,
        "out_cache_loc": torch.cat([real.out_cache_loc, torch.zeros(2 * nodes, dtype=torch.long, device=device)]),
    }
    batch = SimpleNamespace(forward_mode=Mode("verify"), spec_info=spec_info, **padded)
    prepare(backend, batch, True)
    q, k, v = inputs(4 * nodes, device)
    got = run(backend, batch, q, k, v)[: 2 * nodes]
    sees = []
    for request, (row, length) in enumerate(zip(engine.rows, engine.lens.tolist(), strict=True)):
        table = engine.req_to_token[row]
        sees += [torch.cat([table[:length], table[length : length + nodes][s]]) for s in seen[request]]
    close(got, expected(engine, q[: 2 * nodes], sees))


@pytest.mark.parametrize("graph", [False, True])
def test_draft_extend_matches_float64(device: torch.device, graph: bool) -> None:
    engine, width = Engine([10, 5, 22], device), 4
    backend = TreeAttention(engine.runner())
    batch = engine.batch(
        "draft_extend",
        seq_lens=engine.lens + width,  # SGLang counts the rows of the pass
        spec_info=SimpleNamespace(num_tokens_per_req=width),
        out_cache_loc=engine.places(engine.lens, width),
    )
    if not graph:
        backend.init_forward_metadata(batch)
    else:
        prepare(backend, batch, True)
    q, k, v = inputs(3 * width, device)
    got = run(backend, batch, q, k, v)
    sees = [
        engine.req_to_token[r, : n + j + 1]
        for r, n in zip(engine.rows, engine.lens.tolist(), strict=True)
        for j in range(width)
    ]
    close(got, expected(engine, q, sees))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (3, 4), (13, 6)])
def test_draft_steps_match_float64(device: torch.device, graph: bool, topk: int, steps: int) -> None:
    """Each branch sees the prefix and its own rows, and none of other branches."""
    engine = Engine([6, 19], device)
    engine.req_to_token = torch.cat([engine.req_to_token, engine.req_to_token.flip(0), engine.req_to_token], 1)
    container = TreeAttentionSteps(engine.runner(), topk, steps)
    assert len(container.attn_backends) == steps - 1
    batch = engine.batch("decode", seq_lens=engine.lens, spec_info=SimpleNamespace())
    prepare(container, batch, graph)
    places = engine.places(engine.lens, topk * steps).view(2, topk, steps)
    for step, backend in enumerate(container.attn_backends):
        batch.out_cache_loc = places[:, :, step].flatten()
        q, k, v = inputs(2 * topk, device)
        got = run(backend, batch, q, k, v)
        sees = [
            torch.cat([engine.req_to_token[engine.rows[r], : int(engine.lens[r])], places[r, b, : step + 1]])
            for r in range(2)
            for b in range(topk)
        ]
        close(got, expected(engine, q, sees))


def test_decode_with_fp8_pool(device: torch.device) -> None:
    engine = Engine([12, 20], device, torch.float8_e4m3fn)
    backend = TreeAttention(engine.runner())
    batch = engine.batch(
        "decode", seq_lens=engine.lens, spec_info=None, out_cache_loc=engine.places(engine.lens - 1, 1)
    )
    backend.init_forward_metadata(batch)
    q, k, v = inputs(2, device)
    scaled = layer(k_scale=0.5, v_scale=0.5, k_scale_float=0.5, v_scale_float=0.5)
    got = run(backend, batch, q, k, v, scaled)
    sees = [engine.req_to_token[r, :n] for r, n in zip(engine.rows, engine.lens.tolist(), strict=True)]
    torch.testing.assert_close(got.double(), expected(engine, q, sees, scale=0.5), rtol=2e-2, atol=2e-2)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_attention_refuses_unsupported_models_and_layers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([4], torch.device("cpu"))
    assert message_of(lambda: TreeAttention(engine.runner(use_mla_backend=True))) == (
        "specdec: the model has latent attention (MLA), expected heads of keys and values "
        "(sglang: choose another --attention-backend)"
    )
    encoder = SimpleNamespace(context_len=8, is_encoder_decoder=True)
    assert message_of(lambda: TreeAttention(engine.runner(model_config=encoder))) == (
        "specdec: the model has an encoder, expected a decoder alone"
    )
    windows = SimpleNamespace(swa_kv_pool=None, full_kv_pool=None)
    assert message_of(lambda: TreeAttention(engine.runner(token_to_kv_pool=windows))) == (
        "specdec: layers with windows have a pool of their own, expected one pool (sglang: --disable-hybrid-swa-memory)"
    )
    several = (
        "specdec: layers of several kinds share the KV pool, expected attention alone "
        "(sglang: choose another --attention-backend)"
    )
    plain = HybridPool(MHATokenToKVPool(4, torch.float32, torch.device("cpu")))
    for known, hybrid in ((False, plain), (True, HybridPool(engine.pool)), (True, SimpleNamespace(full_kv_pool=None))):
        monkeypatch.setattr(TreeAttention, "serves_hybrids", known)
        assert message_of(lambda pool=hybrid: TreeAttention(engine.runner(token_to_kv_pool=pool))) == several
    virtual = SimpleNamespace(translate_kv_loc=lambda loc: loc)
    assert several == message_of(
        lambda: TreeAttention(engine.runner(token_to_kv_pool=plain, token_to_kv_pool_allocator=virtual))
    )

    def with_pool(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
        pool = Pool(4, torch.float32, torch.device("cpu"))
        pool.k = pool.v = torch.zeros(shape, dtype=dtype)
        return message_of(lambda: TreeAttention(engine.runner(token_to_kv_pool=pool)))

    def with_attributes(**attributes: Any) -> Any:
        pool = Pool(4, torch.float32, torch.device("cpu"))
        vars(pool).update(attributes)
        return pool

    for given in ({"k_scale_buffer": []}, {"native_k_scale_buffer": []}, {"is_quantized_kv_cache": True}):
        assert message_of(
            lambda kept=given: TreeAttention(engine.runner(token_to_kv_pool=with_attributes(**kept)))
        ) == ("specdec: the KV pool has scales for its rows, expected at most one for each layer")
    translator = SimpleNamespace(is_translating=True)
    assert message_of(lambda: TreeAttention(engine.runner(kv_index_translator=translator))) == (
        "specdec: the KV pool has virtual indices (--enable-unified-memory), expected those of its rows"
    )
    chunked = SimpleNamespace(context_len=8, attention_chunk_size=4)
    assert message_of(lambda: TreeAttention(engine.runner(model_config=chunked))) == (
        "specdec: layers attend within chunks of 4 tokens, expected windows"
    )
    dual = SimpleNamespace(context_len=8, hf_config=SimpleNamespace(dual_chunk_attention_config={"chunk_size": 4}))
    assert message_of(lambda: TreeAttention(engine.runner(model_config=dual))) == (
        "specdec: the model has dual chunk attention, expected plain attention"
    )

    assert with_pool((4, 2, 96)) == (
        "specdec: keys have dimension 96 and values 96, expected one of (64, 128, 256) for both"
    )
    assert (
        with_pool((4, 2, 16, 64))
        == "specdec: the KV pool has shape [4, 2, 16, 64], expected [tokens, heads, dimension]"
    )
    assert with_pool((4, 2, 64), torch.float8_e5m2) == (
        "specdec: the KV pool holds float8_e5m2, expected float16, bfloat16, float32 or float8_e4m3fn"
    )
    assert (
        message_of(lambda: TreeAttentionSteps(engine.runner(token_to_kv_pool=with_attributes(page_size=16)), 4, 3))
        == "specdec: speculative_eagle_topk is 4 with page_size 16, expected page_size 1"
    )

    backend = TreeAttention(engine.runner())
    batch = engine.batch(
        "decode", seq_lens=engine.lens, spec_info=None, out_cache_loc=engine.places(engine.lens - 1, 1)
    )
    backend.init_forward_metadata(batch)

    def with_layer(*, sinks: Any = None, **changes: Any) -> str:
        q, k, v = inputs(1, torch.device("cpu"))
        return message_of(lambda: backend.forward_decode(q, k, v, layer(**changes), batch, sinks=sinks))

    assert with_layer(sinks=torch.zeros(4)) == "specdec: layer 0 has sinks, expected plain attention"
    assert with_layer(is_cross_attention=True) == (
        "specdec: layer 0 attends to more than what came before, expected a decoder"
    )
    assert with_layer(logit_cap=1.0, logit_capping_method="softplus") == (
        "specdec: layer 0 caps scores by 'softplus', expected 'tanh'"
    )
    assert with_layer(xai_temperature_len=8) == "specdec: layer 0 has a temperature by length, expected none"
