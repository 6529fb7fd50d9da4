"""Every op on CUDA: ordered on any stream, replayed in a graph with changed inputs; equal to the CPU op.

CASES has one entry for each op: small inputs from a seed, and a call that returns every tensor the op wrote. Ops that
work in place return their own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.ops._op_list import native_halves, public_ops
from support.devices import HAS_CUDA
from support.trees import random_parents

Tensor = torch.Tensor
Inputs = dict[str, Tensor]
B, N, K, STEPS, VOCAB = 3, 9, 3, 3, 50  # rows = slots, tree nodes, topk, depth of drafting, vocabulary
PAGES, PAGE, HEADS, D = 12, 4, 2, 64  # four pages for each slot

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def logprobs(*shape: int) -> Tensor:
    return -torch.rand(shape) - 0.1


def lens() -> Tensor:
    return ints(1, 5, B)


def pages() -> Tensor:
    return torch.randperm(PAGES).to(torch.int32).reshape(B, PAGES // B)


def kv(*shape: int) -> Tensor:
    return torch.randn(*shape, HEADS, D)


def given_tree() -> sd.Tree:
    return sd.build_tree_from_parents(ints(0, 4, B, N), random_parents(B, N), lens())


def pool(full: bool) -> Inputs:
    """Return a page pool as tensors; if `full`, slots hold 1 to 3 pages each, in random order."""
    made = sd.make_page_pool(PAGES, B, PAGES // B, PAGE, like=torch.empty(0))
    made.free_stack.copy_(torch.randperm(PAGES))
    if full:
        sd.alloc_pages(made, ints(1, 13, B), 0)
    return {name: value for name, value in made._asdict().items() if name != "page_size"}


def as_pool(t: Inputs) -> sd.PagePool:
    return sd.PagePool(**{name: t[name] for name in sd.PagePool._fields if name != "page_size"}, page_size=PAGE)


def struct(kind: Any, t: Inputs) -> Any:
    return kind(*(t[name] for name in kind._fields))


class Case(NamedTuple):
    inputs: Callable[[], Inputs]
    call: Callable[..., Iterable[Tensor]]  # (inputs, stream=...)


def select_topk(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.select_topk(t["logits"], K, **stream)


def sample_draft(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    state = {name: t[name] for name in ("seeds", "positions", "temperature")}
    return sd.sample_draft(t["logits"], K, **state, **stream)


def expand_root(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    candidates, frontier = sd.expand_root(t["ids"], t["logprobs"], t["lens"], STEPS, **stream)
    return [*candidates, *frontier]


def expand_tree_inputs() -> Inputs:
    candidates, frontier = sd.expand_root(ints(0, VOCAB, B, K), logprobs(B, K), lens(), STEPS)
    return {
        "ids": ints(0, VOCAB, B, K, K),
        "logprobs": logprobs(B, K, K),
        **{f"cand_{name}": value for name, value in candidates._asdict().items()},
        **{f"frontier_{name}": value for name, value in frontier._asdict().items()},
        "lens": lens(),
    }


def expand_tree(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    candidates = sd.Candidates(*(t[f"cand_{name}"] for name in sd.Candidates._fields))
    frontier = sd.Frontier(*(t[f"frontier_{name}"] for name in sd.Frontier._fields))
    inputs = sd.expand_tree(t["ids"], t["logprobs"], 2, candidates, frontier, t["lens"], **stream)
    return [*inputs, *candidates, frontier.nodes, frontier.mask]


def draft_extend_inputs(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.draft_extend_inputs(*t.values(), N, **stream)


def append_draft_backlog(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.append_draft_backlog(
        *(t[name] for name in list(t)[:5]), features=t["features"], backlog_features=t["kept"], **stream
    )
    return [t["backlog_lens"], t["rings"], t["kept"]]


def learn_inputs() -> Inputs:
    tree = given_tree()
    accepted = sd.verify_tree(torch.randn(B, N, VOCAB), tree, 3)
    calibration = sd.make_calibration(2, like=torch.empty(0))
    scores = -(tree.positions - tree.positions[:, :1]).float()
    return {
        **{f"t_{name}": field for name, field in tree._asdict().items()},
        **{f"a_{name}": field for name, field in accepted._asdict().items()},
        **calibration._asdict(),
        "scores": scores,
    }


def update_calibration(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    tree = sd.Tree(*(t[f"t_{name}"] for name in sd.Tree._fields))
    accepted = sd.Accepted(*(t[f"a_{name}"] for name in sd.Accepted._fields))
    calibration = struct(sd.Calibration, t)
    sd.update_calibration(calibration, tree, t["scores"], accepted, **stream)
    return calibration


def build_tree_inputs() -> Inputs:
    candidates, _ = sd.expand_root(ints(0, VOCAB, B, K), logprobs(B, K), lens(), 1)
    return {**candidates._asdict(), "roots": ints(0, VOCAB, B), "lens": lens()}


def build_tree(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.build_tree(struct(sd.Candidates, t), t["roots"], t["lens"], N, **stream)


def build_tree_from_parents(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.build_tree_from_parents(t["tokens"], t["parents"], t["lens"], **stream)


def build_tree_from_mask(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.build_tree_from_mask(t["tokens"], t["mask"], t["lens"], **stream)


def add_rms_norm(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.add_rms_norm(t["x"], t["weight"], 1e-6, residual=t["residual"], **stream)


def rms_norm_concat(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.rms_norm_concat(**t, eps=1e-6, **stream)


def silu_and_mul(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.silu_and_mul(t["x"], **stream)]


def small_m_gemm(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.small_m_gemm(t["x"], t["weight"], t["bias"], **stream)]


def dequantize(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.dequantize(t["numbers"], t["scales"], **stream)]


def moe_grouped_gemm(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.moe_grouped_gemm(t["x"], t["weight"], t["order"], t["ends"], weight_scales=t["scales"], **stream)]


def moe_route(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.moe_route(t["scores"], 3, **stream)


def moe_combine(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.moe_combine(t["made"], t["shares"], **stream)]


def quantize_fp8(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    quantized, scales = sd.quantize_fp8(t["x"], group_size=128, **stream)
    return [quantized.view(torch.uint8), scales]  # a view: a copy would run on the current stream


def rope_qkv_write_kv(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    out = sd.rope_qkv_write_kv(
        t["qkv"], t["rotations"], t["positions"], t["k_pool"], t["v_pool"], t["table"], t["lens"], **stream
    )
    return [out, t["k_pool"], t["v_pool"]]


def tree_attention(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    out = sd.tree_attention(t["q"], t["k_pool"], t["v_pool"], t["table"], t["lens"], mask=t["mask"], **stream)
    return [out]


def verify_tree(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.verify_tree(t["logits"], struct(sd.Tree, t), N, **stream)


def edit_logits(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    edits = struct(sd.LogitEdits, t)
    sd.edit_logits(t["logits"], t["mask"], t["tokens"], edits, vocab_mask=t["vocab_mask"], **stream)
    return [t["logits"]]


def mask_stops(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.mask_stops(*t.values(), **stream)
    return [t["logits"]]


def score_tokens(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.score_tokens(t["logits"], struct(sd.Accepted, t), top_n=2, **stream)


def commit_tokens(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [
        sd.commit_tokens(struct(sd.Accepted, t), struct(sd.SlotState, t), counts=t["counts"], **stream),
        *t.values(),
    ]


def alloc_pages(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.alloc_pages(as_pool(t), t["lens"], 2, **stream)
    return t.values()


def free_pages(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.free_pages(as_pool(t), t["lens"], **stream)
    return t.values()


def fork_inputs() -> Inputs:
    """Return inputs with three pages in slot 0, which is forked into slots 1 and 2."""
    made = as_pool(pool(full=False))
    sd.alloc_pages(made, ints(9, 13, B), 0, slots=torch.tensor([0], dtype=torch.int32))
    return {
        **{name: value for name, value in made._asdict().items() if name != "page_size"},
        "sources": torch.zeros(B, dtype=torch.int32),
        "targets": torch.arange(B).to(torch.int32),
        "lens": ints(0, 10, B),
    }


def fork_pages(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return [sd.fork_pages(as_pool(t), t["sources"], t["targets"], t["lens"], **stream), *t.values()]


def assign_inputs() -> Inputs:
    """Return inputs that move pages of slot 0 to slot 1 and release others."""
    made = as_pool(pool(full=False))
    sd.alloc_pages(made, ints(9, 13, B), 0)
    width = made.page_table.shape[1]
    return {
        **{name: value for name, value in made._asdict().items() if name != "page_size"},
        "sources": torch.tensor([0, 1, -1], dtype=torch.int32),
        "destinations": torch.tensor([width, width + 2, width + 1], dtype=torch.int32),
    }


def assign_pages(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.assign_pages(as_pool(t), t["sources"], t["destinations"], **stream)
    return t.values()


def write_kv(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.write_kv(*t.values(), **stream)
    return [t["k_pool"], t["v_pool"]]


def move_kv(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.move_kv(*t.values(), **stream)
    return [t["k_pools"], t["v_pools"]]


def copy_kv(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    sd.copy_kv(*t.values(), **stream)
    return list(t.values())[:2]


def merge_trees_inputs() -> Inputs:
    fields = {f"a_{name}": field for name, field in given_tree()._asdict().items()}
    fields |= {f"b_{name}": field for name, field in given_tree()._asdict().items()}
    return {**fields, "a_scores": logprobs(B, N), "b_scores": logprobs(B, N)}


def merge_trees(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    a, b = (sd.Tree(*(t[f"{side}_{name}"] for name in sd.Tree._fields)) for side in "ab")
    tree, scores = sd.merge_trees(a, t["a_scores"], b, t["b_scores"], N, **stream)
    return *tree, scores


def allocate_nodes(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    return sd.allocate_nodes(t["scores"], 2 * B, max_nodes=t["max_nodes"], budget_levels=t["budget_levels"], **stream)


def shares_inputs() -> Inputs:
    shares = sd.allocate_nodes(-torch.rand(B, N).cumsum(1), 2 * B)
    return {**given_tree()._asdict(), "scores": logprobs(B, N), **{f"s_{k}": v for k, v in shares._asdict().items()}}


def pack_trees(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    tree, shares = struct(sd.Tree, t), sd.NodeAllocation(*(t[f"s_{name}"] for name in sd.NodeAllocation._fields))
    return [*sd.pack_trees(tree, t["scores"], shares, 2 * B, **stream), *tree]


def state_inputs() -> Inputs:
    """Return the state of running slots, with two stop tokens each."""
    state = sd.make_slot_state(B, 40, 2, like=torch.empty(0))
    state.stop_tokens.copy_(ints(0, VOCAB, B, 2))
    for tensor in (state.seq_lens, state.remaining, state.top_k, state.stops_from, state.num_logprobs, state.max_nodes):
        tensor.copy_(ints(1, 9, B))
    for tensor in (state.temperature, state.top_p, state.min_p):
        tensor.copy_(torch.rand(B))
    state.seeds.copy_(torch.randint(0, 2**62, (B,)))
    return state._asdict()


def apply_commands_inputs() -> Inputs:
    floats = torch.rand(3, B, 1).view(torch.int32)
    ids, top_k, seeds = ints(0, VOCAB, B, 3), ints(0, VOCAB, B, 1), ints(0, 99, B, 2)
    activations = [torch.randperm(B, dtype=torch.int32)[:, None], ids, floats[0], top_k, *floats[1:], seeds]
    activations += [ints(0, 9, B, 3), ints(0, VOCAB, B, 2)]
    record = [
        torch.tensor([0, B], dtype=torch.int32),
        ints(-1, B, B),
        ints(-1, B, B),
        torch.cat(activations, 1).flatten(),
    ]
    return {
        "commands": torch.cat(record)[None],
        "num_applied": torch.randint(0, 99, (1,)),
        "started_at": torch.zeros(1, dtype=torch.int64),
        **state_inputs(),
    }


def rings(t: Inputs) -> Rings:
    """Return rings of the given tensors; the op does not read those of the other op."""
    names = ("commands", "results", "num_applied", "num_published", "started_at")
    like = t["seq_lens"]
    tensors = {name: t.get(name, like) for name in names}
    return Rings(**tensors, slots=torch.empty_like(like), given_back=torch.empty_like(like), top_n=-1)


def apply_commands(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    made = rings(t)
    made.apply_commands(struct(sd.SlotState, t), **stream)
    return [made.slots, made.given_back, *(value for name, value in t.items() if name != "started_at")]


def publish_results_inputs() -> Inputs:
    return {
        "results": torch.zeros(1, _C.result_words(B, STEPS, 2, -1), dtype=torch.int32),
        "num_published": torch.randint(0, 99, (1,)),
        "started_at": torch.zeros(1, dtype=torch.int64),
        "tokens": ints(0, VOCAB, B, STEPS),
        "num_valid": ints(0, STEPS, B),
        "path": ints(0, 9, B, STEPS),
        "num_nodes": ints(1, 9, B),
        **state_inputs(),
        "finish_reasons": ints(0, 2, B),
        "status": ints(0, 4, B),
        "level_limits": torch.tensor([3, 9], dtype=torch.int32),
        "node_scores": -torch.rand(B, 9).cumsum(1),
        "cuts": torch.tensor([-0.5, -1.5]),
    }


def publish_results(t: Inputs, **stream: Any) -> Iterable[Tensor]:
    accepted, state = struct(sd.Accepted, t), struct(sd.SlotState, t)
    compared = {name: t[name] for name in ("level_limits", "node_scores", "cuts")}
    rings(t).publish_results(accepted, t["num_nodes"], state, **compared, **stream)
    return [t["results"][:, :2], t["results"][:, 6:], t["num_published"]]  # without the timestamps


CASES = {
    "select_topk": Case(lambda: {"logits": torch.randn(B, VOCAB)}, select_topk),
    "sample_draft": Case(
        lambda: {
            "logits": torch.randn(B, VOCAB),
            "seeds": torch.randint(0, 2**62, (B,)),
            "positions": ints(0, 99, B),
            "temperature": torch.rand(B) + 0.5,
        },
        sample_draft,
    ),
    "expand_root": Case(lambda: {"ids": ints(0, VOCAB, B, K), "logprobs": logprobs(B, K), "lens": lens()}, expand_root),
    "expand_tree": Case(expand_tree_inputs, expand_tree),
    "update_calibration": Case(learn_inputs, update_calibration),
    "draft_extend_inputs": Case(
        lambda: {
            "tokens": ints(-1, VOCAB, B, K),
            "path": ints(0, N, B, K),
            "num_valid": ints(0, K + 1, B),
            "prefix_lens": lens(),
        },
        draft_extend_inputs,
    ),
    "append_draft_backlog": Case(
        lambda: {
            "tokens": ints(-1, VOCAB, B, K),
            "path": ints(0, N, B, K),
            "num_valid": ints(0, K + 1, B),
            "backlog_lens": ints(0, 9, B),
            "rings": ints(0, VOCAB, B, 4),
            "features": torch.randn(B, N, D),
            "kept": torch.randn(B, 4, D),
        },
        append_draft_backlog,
    ),
    "build_tree": Case(build_tree_inputs, build_tree),
    "build_tree_from_parents": Case(
        lambda: {"tokens": ints(0, VOCAB, B, N), "parents": random_parents(B, N), "lens": lens()},
        build_tree_from_parents,
    ),
    "build_tree_from_mask": Case(
        lambda: {"tokens": ints(0, VOCAB, B, N), "mask": given_tree().mask, "lens": lens()}, build_tree_from_mask
    ),
    "merge_trees": Case(merge_trees_inputs, merge_trees),
    "allocate_nodes": Case(
        lambda: {
            "scores": -torch.rand(B, N).cumsum(1),
            "max_nodes": ints(1, N + 1, B),
            "budget_levels": ints(B, B * N, 3),
        },
        allocate_nodes,
    ),
    "pack_trees": Case(shares_inputs, pack_trees),
    "add_rms_norm": Case(
        lambda: {"x": torch.randn(N, D), "residual": torch.randn(N, D), "weight": torch.randn(D)}, add_rms_norm
    ),
    "rms_norm_concat": Case(
        lambda: {
            "embeddings": torch.randn(VOCAB, D),
            "tokens": ints(0, VOCAB, N),
            "embedding_weight": torch.randn(D),
            "features": torch.randn(B, D),
            "feature_rows": ints(0, B, N),
            "feature_weight": torch.randn(D),
        },
        rms_norm_concat,
    ),
    "silu_and_mul": Case(lambda: {"x": torch.randn(N, 2 * D)}, silu_and_mul),
    "small_m_gemm": Case(
        lambda: {
            "x": torch.randn(B, 64).bfloat16(),
            "weight": torch.randn(VOCAB, 64).bfloat16(),
            "bias": torch.randn(VOCAB).bfloat16(),
        },
        small_m_gemm,
    ),
    "moe_grouped_gemm": Case(
        lambda: {
            "x": torch.randn(B, 128).bfloat16(),
            "weight": torch.randn(3, 16, 128).to(torch.float8_e4m3fn),
            "order": torch.randperm(2 * B),
            "ends": torch.tensor([B, B, 2 * B], dtype=torch.int32),
            "scales": torch.rand(3, 1, 16),
        },
        moe_grouped_gemm,
    ),
    "moe_route": Case(lambda: {"scores": torch.randn(N, VOCAB)}, moe_route),
    "moe_combine": Case(lambda: {"made": torch.randn(3 * N, D), "shares": torch.rand(N, 3)}, moe_combine),
    "quantize_fp8": Case(lambda: {"x": torch.randn(N, 300)}, quantize_fp8),
    "dequantize": Case(
        lambda: {"numbers": torch.randint(256, (N, 128), dtype=torch.uint8), "scales": torch.rand(2, N)}, dequantize
    ),
    "rope_qkv_write_kv": Case(
        lambda: {
            "qkv": torch.randn(B, N, 3 * HEADS, D),
            "rotations": torch.randn(32, D),
            "positions": ints(0, 32, B, N),
            "k_pool": kv(PAGES, PAGE),
            "v_pool": kv(PAGES, PAGE),
            "table": pages(),
            "lens": lens(),
        },
        rope_qkv_write_kv,
    ),
    "tree_attention": Case(
        lambda: {
            "q": kv(B, N),
            "k_pool": kv(PAGES, PAGE),
            "v_pool": kv(PAGES, PAGE),
            "table": pages(),
            "lens": lens(),
            "mask": given_tree().mask,
        },
        tree_attention,
    ),
    "verify_tree": Case(lambda: {"logits": torch.randn(B, N, 4), **given_tree()._asdict()}, verify_tree),
    "edit_logits": Case(
        lambda: {
            "logits": torch.randn(B, N, VOCAB),
            **{name: getattr(given_tree(), name) for name in ("mask", "tokens")},
            "vocab_mask": ints(-9999, 9999, B, N, -(-VOCAB // 32)),
            "kinds": ints(1, 8, B),
            "bias": torch.randn(B, VOCAB),
            "counts": ints(0, 5, B, VOCAB),
            **{name: torch.rand(B) for name in ("presence", "frequency", "repetition")},
        },
        edit_logits,
    ),
    "mask_stops": Case(
        lambda: {
            "logits": torch.randn(B, N, VOCAB),
            "positions": ints(0, 9, B, N),
            "stop_tokens": ints(-1, VOCAB, B, 3),
            "stops_from": ints(0, 9, B),
        },
        mask_stops,
    ),
    "score_tokens": Case(
        lambda: {
            "logits": torch.randn(B, N, VOCAB),
            "path": ints(0, N, B, STEPS),
            "tokens": ints(0, VOCAB, B, STEPS),
            "num_valid": ints(1, STEPS + 1, B),
        },
        score_tokens,
    ),
    "commit_tokens": Case(
        lambda: {
            "tokens": ints(0, VOCAB, B, 4),
            "num_valid": ints(1, 5, B),
            "path": ints(0, 9, B, 4),
            **state_inputs(),
            "max_seq_lens": ints(5, 20, B),
            "counts": ints(0, 5, B, VOCAB),
        },
        commit_tokens,
    ),
    "alloc_pages": Case(lambda: {**pool(full=False), "lens": ints(0, 14, B)}, alloc_pages),
    "free_pages": Case(lambda: {**pool(full=True), "lens": ints(0, 14, B)}, free_pages),
    "fork_pages": Case(fork_inputs, fork_pages),
    "assign_pages": Case(assign_inputs, assign_pages),
    "write_kv": Case(
        lambda: {
            "k": kv(B, N),
            "v": kv(B, N),
            "k_pool": kv(PAGES, PAGE),
            "v_pool": kv(PAGES, PAGE),
            "table": pages(),
            "lens": lens(),
        },
        write_kv,
    ),
    "move_kv": Case(
        lambda: {
            "k_pools": kv(2, PAGES, PAGE),
            "v_pools": kv(2, PAGES, PAGE),
            "table": pages(),
            "path": torch.cat([ints(0, 1, B, 1), ints(1, 4, B, 1), ints(5, 9, B, 1)], 1),
            "num_valid": ints(1, 4, B),
            "prefix_lens": lens(),
        },
        move_kv,
    ),
    "copy_kv": Case(
        lambda: {
            "k_pools": kv(2, PAGES, PAGE),
            "v_pools": kv(2, PAGES, PAGE),
            "table": pages(),
            "sources": torch.zeros(B, dtype=torch.int32),
            "targets": torch.arange(B).to(torch.int32),
            "lens": ints(9, 13, B),
            "num_rows": ints(1, 9, B),
        },
        copy_kv,
    ),
    "apply_commands": Case(apply_commands_inputs, apply_commands),
    "publish_results": Case(publish_results_inputs, publish_results),
}

every_op = pytest.mark.parametrize("op", CASES)


def seeded(op: str, seed: int) -> Inputs:
    torch.manual_seed(seed)
    return CASES[op].inputs()


def right(op: str, seed: int) -> list[Tensor]:
    return [tensor.clone() for tensor in CASES[op].call(seeded(op, seed))]


def fill(buffers: Inputs, values: Inputs) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(values[name])


def assert_right(op: str, got: Iterable[Tensor], seed: int) -> None:
    for g, want in zip(got, right(op, seed), strict=True):
        torch.testing.assert_close(g.cpu(), want, rtol=1e-5 if want.is_floating_point() else 0, atol=1e-5)


def test_cases_cover_every_op() -> None:
    assert list(CASES) == [*(op for op in public_ops() if native_halves(op)), "apply_commands", "publish_results"]


@every_op
def test_cases_of_different_seeds_write_different_results(op: str) -> None:
    """Otherwise a replay that ignored its changed inputs would pass."""
    assert any(not torch.equal(a, b) for a, b in zip(right(op, 0), right(op, 1), strict=True))


@needs_cuda
@every_op
@pytest.mark.parametrize("named", [False, True], ids=["current-stream", "stream-keyword"])
def test_op_runs_in_stream_order(op: str, named: bool) -> None:
    """Inputs arrive late on a side stream: an op on any other stream would read those of seed 0."""
    buffers = {name: tensor.cuda() for name, tensor in seeded(op, 0).items()}
    late = {name: tensor.cuda() for name, tensor in seeded(op, 1).items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        fill(buffers, late)
        if not named:
            got = [tensor.clone() for tensor in CASES[op].call(buffers)]
    if named:
        torch.cuda._sleep(100_000_000)  # work on the current stream would run after this kernel
        got = list(CASES[op].call(buffers, stream=side.cuda_stream))
    side.synchronize()
    assert_right(op, got, seed=1)


@needs_cuda
@every_op
def test_op_graph_replay_reads_changed_inputs(op: str) -> None:
    buffers = {name: tensor.cuda() for name, tensor in seeded(op, 0).items()}
    CASES[op].call(buffers)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = list(CASES[op].call(buffers))
    for seed in (1, 2, 1):
        fill(buffers, seeded(op, seed))
        graph.replay()
        assert_right(op, got, seed)
