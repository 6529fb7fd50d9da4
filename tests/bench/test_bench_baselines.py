"""Adapters of other packages' kernels, with emulated kernels: what they pass and how results are compared.

On a GPU with the packages installed, every `specdec bench` checks the packages themselves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.bench.ops import baselines
from specdec_kernels.bench.ops.baselines import sglang
from specdec_kernels.bench.ops.cases import CASES
from specdec_kernels.bench.ops.check import WrongResult
from specdec_kernels.bench.ops.harness import Baseline, Work, check

CPU = torch.device("cpu")


def walk_links(
    predicts: Tensor, index: Tensor, count: Tensor, candidates: Tensor, links: list[Tensor], chosen: Tensor
) -> None:
    """Emulate verify_tree_greedy: walk along the chosen tokens, through flat rows."""
    rows, next_token, next_sibling = links
    for b in range(len(candidates)):
        last = int(rows[b, 0])
        index[b, 0], node, accepted = last, 0, 0
        for _ in range(1, index.shape[1]):
            node = int(next_token[b, node])
            while node != -1 and candidates[b, node] != chosen.flatten()[last]:
                node = int(next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = candidates[b, node]
            accepted, last = accepted + 1, int(rows[b, node])
            index[b, accepted] = last
        count[b], predicts[last] = accepted, chosen.flatten()[last]


def greedy(*arguments: Tensor) -> None:
    predicts, index, count, candidates, *links, chosen = arguments
    walk_links(predicts, index, count, candidates, links, chosen)


def sampled(*arguments: Any) -> None:
    predicts, index, count, candidates, *links, coins, last_coin, probs, scratch, _, _, _ = arguments
    assert coins.shape == candidates.shape and last_coin.shape == count.shape and not scratch.any()
    assert torch.allclose(probs.sum(-1), torch.ones(()))
    walk_links(predicts, index, count, candidates, links, probs.argmax(-1))


def build(
    parents: Tensor, chosen: Tensor, lens: Tensor, mask: Tensor, positions: Tensor, rows: Tensor, next_token: Tensor,
    next_sibling: Tensor, k: int, depth: int, nodes: int, mode: int,
) -> None:  # fmt: skip
    """Emulate build_tree_kernel_efficient with the smallest mask, node by node."""
    assert mode == 1 and parents.shape[1] == k * (depth - 1) + 1
    assert (next_token == -1).all() and (next_sibling == -1).all()
    batch = len(chosen)
    masks, places = mask.view(batch, nodes, nodes), positions.view(batch, nodes)
    masks[:] = False
    rows[:] = torch.arange(batch * nodes).view(batch, nodes)
    for b in range(batch):
        ids = chosen[b].tolist()
        assert ids == sorted(ids)
        masks[b, 0, 0], places[b, 0] = True, lens[b]
        for node, candidate in enumerate(ids, 1):
            group = candidate // k
            parent = 0 if group == 0 else 1 + ids.index(int(parents[b, group]))
            masks[b, node] = masks[b, parent]
            masks[b, node, node] = True
            places[b, node] = places[b, parent] + 1
            if next_token[b, parent] == -1:
                next_token[b, parent] = node
            else:
                last = int(next_token[b, parent])
                while next_sibling[b, last] != -1:
                    last = int(next_sibling[b, last])
                next_sibling[b, last] = node


def from_mask(
    mask: Tensor, lens: Tensor, positions: Tensor, rows: Tensor, next_token: Tensor, next_sibling: Tensor, batch: int, nodes: int
) -> None:  # fmt: skip
    masks = mask.view(batch, nodes, nodes)
    positions.view(batch, nodes)[:] = lens[:, None] + masks.sum(-1) - 1
    next_token[:], next_sibling[:] = -1, -1
    for b in range(batch):
        parents = [max((j for j in range(i) if masks[b, i, j]), default=-1) for i in range(nodes)]
        for i in range(nodes - 1, 0, -1):
            next_sibling[b, i], next_token[b, parents[i]] = next_token[b, parents[i]].item(), i


def only(probs: Tensor, _limit: Tensor) -> Tensor:
    return probs


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse [n, Hq] of one request: q [n, Hq, D], k and v [rows, Hkv, D], mask `seen` [n, rows]."""
    keys, values = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,rhd->nhr", q.float(), keys) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("nhr,rhd->nhd", scores.softmax(-1), values).to(q.dtype), scores.logsumexp(-1)


def paged_rows(pool: Tensor, pages: Tensor, count: int) -> Tensor:
    return pool[pages.long()].flatten(0, 1)[:count]


class PrefillWrapper:
    """BatchPrefillWithPagedKVCacheWrapper: a mask bit for each query row and KV row, requests concatenated."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.numel() > 0 and layout == "NHD"

    def plan(self, *arguments: Any, custom_mask: Tensor, **_dtypes: Any) -> None:
        *self.where, _heads, _kv_heads, self.head_dim, self.page_size = arguments
        self.mask = custom_mask

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
        q_ends, page_ends, pages, last = (x.tolist() for x in self.where)
        out, bit = torch.empty_like(q), 0
        for b, last_rows in enumerate(last):
            rows, mine = slice(q_ends[b], q_ends[b + 1]), torch.tensor(pages[page_ends[b] : page_ends[b + 1]])
            count, n = (len(mine) - 1) * self.page_size + last_rows, q_ends[b + 1] - q_ends[b]
            seen = self.mask[bit : bit + n * count].view(n, count)
            k, v = (paged_rows(pool, mine, count) for pool in pools)
            out[rows], _ = attend(q[rows], k, v, seen, self.head_dim**-0.5)
            bit += n * count
        assert bit == len(self.mask)
        return out


def xqa(
    q: Tensor, pools: tuple[Tensor, Tensor], workspace: Tensor, table: Tensor, lens: Tensor, max_len: int, *,
    bmm1_scale: float, kv_layout: str, q_len_per_req: int, mask: Tensor,
) -> Tensor:  # fmt: skip
    """Check a mask of 16-bit words over the tree alone."""
    assert kv_layout == "NHD" and not workspace.any() and lens.dtype == torch.uint32 and mask.dtype == torch.uint16
    assert mask.shape[2] == -(-q_len_per_req // 32) * 2
    out, n, node = torch.empty_like(q), q_len_per_req, torch.arange(q_len_per_req)
    for b, count in enumerate(lens.tolist()):
        assert count <= max_len
        tree = (mask[b].int()[:, node // 16] >> (node % 16) & 1).bool()
        seen = torch.cat([torch.ones(n, count - n, dtype=torch.bool), tree], 1)
        k, v = (paged_rows(pool, table[b], count) for pool in pools)
        out[b * n : (b + 1) * n], _ = attend(q[b * n : (b + 1) * n], k, v, seen, bmm1_scale)
    return out


def flash_attn_with_kvcache(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool,
    return_softmax_lse: bool = False, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    scheduler_metadata: Tensor | None = None, qv: Tensor | None = None, softmax_scale: float | None = None,
) -> Any:  # fmt: skip
    if qv is not None:  # the latent part of queries, whose keys are the values
        q, k_pool = torch.cat([qv, q], -1), torch.cat([v_pool, k_pool], -1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    if cu_seqlens_q is not None:
        assert max_seqlen_q == 1 and torch.equal(cu_seqlens_q, torch.arange(len(q) + 1)) and q.dim() == 3
        assert scheduler_metadata is not None and torch.equal(scheduler_metadata, cache_seqlens)
        q = q[:, None]
    results, n = [], q.shape[1]
    for b, count in enumerate(cache_seqlens.tolist()):
        seen = torch.ones(n, count, dtype=torch.bool).tril(count - n if causal else count)
        k, v = (paged_rows(pool, page_table[b], count) for pool in (k_pool, v_pool))
        results.append(attend(q[b], k, v, seen, scale))
    out, lse = (torch.stack(parts) for parts in zip(*results, strict=True))
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out


def get_mla_decoding_metadata(lens: Tensor, rows: int, heads_k: int, *, use_legacy: bool) -> tuple[Tensor, Tensor]:
    assert use_legacy and heads_k == 1
    return lens * rows, lens


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int, schedule: SimpleNamespace,
    *, softmax_scale: float, causal: bool, use_legacy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = q.shape[1] * q.shape[2]
    assert causal and use_legacy and torch.equal(schedule.num_splits, cache_seqlens)
    assert torch.equal(schedule.tile_scheduler_metadata, cache_seqlens * rows)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, k_cache[..., :head_dim_v], cache_seqlens=cache_seqlens, page_table=block_table, causal=True,
        return_softmax_lse=True, softmax_scale=softmax_scale,
    )  # fmt: skip
    return out, lse


def get_scheduler_metadata(*, cache_seqlens: Tensor, **_sizes: Any) -> Tensor:
    return cache_seqlens.clone()


def merge_state_v2(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.stack([s_a, s_b]).softmax(0)[..., None]
    return (weights[0] * v_a + weights[1] * v_b).to(v_a.dtype), torch.logaddexp(s_a, s_b)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Emulate FLA's kernels, whose states are [B, Hv, dk, dv]."""
    assert output_final_state and use_qk_l2norm_in_kernel and q.shape[2] == v.shape[2]
    q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = initial_state.clone(), torch.empty_like(v)
    for i in range(q.shape[1]):
        state = state * g[:, i].exp().view(*state.shape[:2], -1, 1)
        u = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhd,bhdv->bhv", k[:, i], state))
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, i], u)
        out[:, i] = torch.einsum("bhd,bhdv->bhv", q[:, i] * scale, state)
    return out, state


DOUBLES = {
    "fla.ops.gated_delta_rule": SimpleNamespace(
        fused_recurrent_gated_delta_rule=delta_rule, chunk_gated_delta_rule=delta_rule
    ),
    "fla.ops.kda": SimpleNamespace(fused_recurrent_kda=delta_rule, chunk_kda=delta_rule),
    "flashinfer.prefill": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper),
    "flashinfer.decode": SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa),
    "sgl_kernel.flash_attn": SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache, get_scheduler_metadata=get_scheduler_metadata
    ),
    "flash_mla": SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_decoding_metadata=get_mla_decoding_metadata,
        get_mla_metadata=lambda: (SimpleNamespace(), None),
    ),
    "sgl_kernel": SimpleNamespace(merge_state_v2=merge_state_v2),
    "sglang.kernels.ops.speculative.tree": SimpleNamespace(
        verify_tree_greedy=greedy, build_tree_kernel_efficient=build, reconstruct_indices_from_tree_mask=from_mask
    ),
    "sglang.kernels.ops.speculative.sampling": SimpleNamespace(tree_speculative_sampling_target_only=sampled),
    "flashinfer.sampling": SimpleNamespace(
        top_k_renorm_probs=only,
        top_p_renorm_probs=only,
        top_k_mask_logits=only,
        softmax=lambda rows, temperature: torch.softmax(rows / temperature[:, None], -1),
        top_p_sampling_from_probs=lambda probs, top_p, seed, offset: probs.argmax(-1).int(),
        sampling_from_probs=lambda probs, seed, offset: probs.argmax(-1).int(),
    ),
}


@pytest.fixture
def baseline_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sglang, baselines.flashinfer, baselines.flash_attention, baselines.latent_attention, baselines.fla):
        monkeypatch.setattr(module, "module", lambda name, _device: DOUBLES[name])


def verify_work(sampling: str) -> Work:
    params = {"batch": 7, "nodes": 9, "vocab": 300, "sampling": sampling, "dtype": "bfloat16"}
    return CASES["verify_tree"].make(CPU, params)


def test_baselines_without_gpu_are_empty() -> None:
    assert baselines.module("torch", CPU) is None
    assert [other.name for other in verify_work("greedy").others] == ["torch"]
    assert not verify_work("top_p").others


@pytest.mark.parametrize("sampling", ["greedy", "top_k+top_p", "top_p", "temperature"])
def test_sglang_baseline_of_verify_tree(sampling: str, baseline_doubles: None) -> None:
    work = verify_work(sampling)
    check(work)
    assert [other.name for other in work.others][-1] == ("sglang" if sampling == "greedy" else "flashinfer")


@pytest.mark.parametrize(("nodes", "k", "others"), [(12, 4, 2), (6, 1, 2), (8, 1, 0)])
def test_sglang_baseline_of_build_tree(nodes: int, k: int, others: int, baseline_doubles: None) -> None:
    """A chain of five steps has candidates for six nodes: SGLang asks for that many."""
    work = CASES["build_tree"].make(CPU, {"batch": 5, "nodes": nodes, "k": k})
    check(work)
    assert len(work.others) == others


def test_sglang_baseline_of_build_tree_from_mask(baseline_doubles: None) -> None:
    work = CASES["build_tree_from_mask"].make(CPU, {"batch": 5, "nodes": 12})
    check(work)
    assert len(work.others) == 1


def test_sglang_baseline_check_finds_another_tree() -> None:
    lens, parents = torch.tensor([3], dtype=torch.int32), torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)
    tree = sd.build_tree_from_parents(torch.tensor([[5, 6, 7, 8]], dtype=torch.int32), parents, lens)

    def compare(tokens: list[int], first_child: list[int], next_sibling: list[int]) -> None:
        built = sglang.BuiltTrees(
            tokens=torch.tensor([tokens]),
            positions=torch.tensor([[3, 4, 4, 5]]),
            mask=torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]),
            links=sglang.Links(torch.arange(4)[None], torch.tensor([first_child]), torch.tensor([next_sibling])),
        )
        sglang.expect_same_trees(built, tree)

    compare([5, 7, 6, 8], [1, -1, 3, -1], [-1, 2, -1, -1])  # siblings in the other order
    for tokens, first_child, next_sibling in (
        ([5, 6, 7, 8], [1, -1, 3, -1], [-1, 2, -1, -1]),  # 8 follows 7
        ([5, 7, 6, 8], [1, -1, 3, -1], [-1, -1, -1, -1]),  # a sibling is lost
    ):
        with pytest.raises(WrongResult, match="tree 0 differs"):
            compare(tokens, first_child, next_sibling)


@pytest.mark.parametrize(
    ("recurrence", "mode", "nodes", "others"),
    [
        ("gated-delta", "tree", 1, ["fla fused_recurrent"]),
        ("gated-delta", "tree", 4, []),
        ("gated-delta", "chain", 64, ["fla fused_recurrent", "fla chunk"]),
        ("kda", "chain", 3, ["fla fused_recurrent"]),
        ("mamba2", "chain", 3, []),
    ],
)
def test_fla_baselines_of_tree_recurrence(
    recurrence: str, mode: str, nodes: int, others: list[str], baseline_doubles: None
) -> None:
    params = {"recurrence": recurrence, "mode": mode, "batch": 2, "nodes": nodes, "dtype": "bfloat16"}
    work = CASES["tree_recurrence"].make(CPU, params)
    check(work)
    assert [other.name for other in work.others] == others


MASKED, XQA, CHAIN, PASSES = "flashinfer custom mask", "flashinfer xqa", "fa3 causal chain", "fa3 two passes"


@pytest.mark.parametrize(("nodes", "mode", "page_size", "kv", "others"), [
    (9, "tree", 16, "same", [MASKED, XQA, CHAIN, PASSES]),
    (40, "tree", 64, "same", [MASKED, XQA, CHAIN, PASSES]),
    (9, "tree", 3, "same", [MASKED, CHAIN, PASSES]),
    (9, "tree", 16, "fp8", []),
    (6, "chain", 16, "same", [MASKED, XQA, CHAIN]),
    (1, "chain", 16, "same", [MASKED, CHAIN, "fa3 decode"]),
])  # fmt: skip
def test_baselines_of_tree_attention(
    nodes: int, mode: str, page_size: int, kv: str, others: list[str], baseline_doubles: None
) -> None:
    """XQA has pages of 16 and more, and none takes 8-bit KV with 16-bit queries here."""
    params = {
        "batch": 3,
        "prefix": 50,
        "nodes": nodes,
        "mode": mode,
        "page_size": page_size,
        "lengths": "uneven",
        "kv": kv,
    }
    work = CASES["tree_attention"].make(CPU, params | {"dtype": "bfloat16", "max_len": 0})
    check(work)
    assert [other.name for other in work.packages] == others


@pytest.mark.parametrize(("page_size", "rows", "others"), [
    (64, "same", ["flashmla causal chain", PASSES]),
    (16, "same", [PASSES]),
    (64, "fp8", []),
])  # fmt: skip
def test_baselines_of_mla_tree_attention(page_size: int, rows: str, others: list[str], baseline_doubles: None) -> None:
    """FlashMLA has pages of 64 rows."""
    params = {"batch": 2, "prefix": 50, "heads": 3, "nodes": 6, "mode": "tree", "dtype": "bfloat16"}
    work = CASES["mla_tree_attention"].make(CPU, params | {"page_size": page_size, "rows": rows})
    check(work)
    assert [other.name for other in work.packages] == others


def test_run_skips_failing_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("no such page size")

    works = Baseline("works", lambda: None, lambda _: None)
    assert baselines.that_run(works, Baseline("fails", fail, lambda _: None)) == [works]
    assert capsys.readouterr().err == "specdec bench: fails is left out: RuntimeError: no such page size\n"
