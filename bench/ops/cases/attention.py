"""The case of tree_attention: verification of a tree or chain after a paged prefix, in the shape of an 8B model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import specdec_kernels as sd

from ..baselines import flash_attention, flashinfer
from ..baselines.paged import PagedTrees
from ..check import WrongResult, bytes_of, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from .trees import mask_words, random_parents, visible_nodes

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ERRORS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
FP8_SCALE = 0.5

# Nodes and requests compared with the reference, whose float64 copies of long prefixes are large.
CHECKED_REQUESTS, CHECKED_NODES = 8, 4
# KV rows of a batch up to which plain torch is a baseline: it needs a second copy without pages.
PLAIN_TORCH_ROWS = 2**17


@cache
def workspace_of(device: torch.device, size: int) -> Tensor | None:
    """Return one workspace for all calls, as an engine does."""
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


def make_trees(device: torch.device, p: Params) -> PagedTrees:
    batch, nodes, prefix, page_size = p["batch"], p["nodes"], p["prefix"], p["page_size"]
    dtype = getattr(torch, p["dtype"])
    shortest = prefix if p["lengths"] == "even" else prefix // 2
    pages_each = -(-(prefix + nodes) // page_size)
    spare = max(-(-p["max_len"] // page_size) - pages_each, 0)  # table entries that no request needs
    page_table = torch.randperm(batch * pages_each).view(batch, pages_each).int()
    pool_shape = (batch * pages_each, page_size, KV_HEADS, HEAD_DIM)
    k_pool, v_pool = (torch.randn(pool_shape, device=device, dtype=dtype) for _ in "kv")
    if p["kv"] == "fp8":
        k_pool, v_pool = k_pool.to(torch.float8_e4m3fn), v_pool.to(torch.float8_e4m3fn)
    parents = random_parents(batch, nodes) if p["mode"] == "tree" else [list(range(-1, nodes - 1))] * batch
    tree = visible_nodes(parents)
    return PagedTrees(
        q=torch.randn(batch, nodes, Q_HEADS, HEAD_DIM, device=device, dtype=dtype),
        k_pool=k_pool,
        v_pool=v_pool,
        page_table=torch.nn.functional.pad(page_table, (0, spare)).to(device),
        prefix_lens=torch.randint(shortest, prefix + 1, (batch,), dtype=torch.int32).to(device),
        tree=tree.to(device),
        mask=mask_words(tree).to(device),
    )


def rows_of(x: PagedTrees, b: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a request without pages: [rows, Hkv, D] each."""
    at = torch.arange(int(x.seq_lens[b]), device=x.q.device)
    page = x.page_table[b, at // x.page_size].long()
    scale = FP8_SCALE if x.k_pool.dtype == torch.float8_e4m3fn else 1.0
    k, v = (pool[page, at % x.page_size].double() * scale for pool in (x.k_pool, x.v_pool))
    return k, v


def check_rows(x: PagedTrees, tree: Tensor, got: Tensor, error: float, scale: float) -> None:
    """Compare some nodes of some requests with float64, including the first and last of each."""
    if not bool(got.isfinite().all()):
        raise WrongResult("out holds NaN or infinity")
    batch, nodes = x.q.shape[:2]
    picked = torch.linspace(0, nodes - 1, min(nodes, CHECKED_NODES)).long().to(x.q.device)
    requests = torch.linspace(0, batch - 1, min(batch, CHECKED_REQUESTS)).long().tolist()
    want = []
    for b in requests:
        k, v = rows_of(x, b)
        heads = x.q[b, picked].double().unflatten(1, (x.k_pool.shape[2], -1))
        scores = torch.einsum("nhgd,rhd->nhgr", heads, k) * scale
        seen = torch.cat([tree.new_ones(len(picked), len(k) - nodes), tree[b, picked]], 1)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        want.append(torch.einsum("nhgr,rhd->nhgd", weights, v).flatten(1, 2))
    expect_near("out", got[requests][:, picked], torch.stack(want), error)


def plain_torch(x: PagedTrees, check: Callable[[Tensor], None]) -> Baseline:
    """Return a baseline without pages, whose KV is gathered before the clock starts."""
    longest = int(x.seq_lens.max())
    at = torch.arange(longest, device=x.q.device)
    page = x.page_table[:, at // x.page_size].long()
    k, v = (pool[page, at % x.page_size].transpose(1, 2) for pool in (x.k_pool, x.v_pool))
    tail = at - x.prefix_lens[:, None]
    nodes = x.q.shape[1]
    in_tail = x.tree.gather(2, tail.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1))
    visible = (tail < 0)[:, None] | (in_tail & ((tail >= 0) & (tail < nodes))[:, None])

    def call() -> Tensor:
        by_head = scaled_dot_product_attention(x.q.transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=True)
        return by_head.transpose(1, 2)

    return Baseline("torch sdpa, KV without pages", call, check)


def tree_attention(device: torch.device, p: Params) -> Work:
    x, error = make_trees(device, p), ERRORS[p["dtype"]]
    batch, nodes = x.q.shape[:2]
    out = poisoned(*x.q.shape, dtype=x.q.dtype, device=device)
    workspace = workspace_of(device, sd.tree_attention_workspace(x.q, x.k_pool, x.page_table))
    scale = FP8_SCALE if p["kv"] == "fp8" else 1.0
    mask = x.mask if p["mode"] == "tree" else None  # a causal chain needs none

    def check(got: Tensor = out) -> None:
        check_rows(x, x.tree, got, error, HEAD_DIM**-0.5)

    def check_chain(got: Tensor) -> None:
        check_rows(x, torch.ones_like(x.tree).tril(), got, error, HEAD_DIM**-0.5)

    baseline = None
    if p["kv"] == "same" and batch * p["prefix"] <= PLAIN_TORCH_ROWS:
        baseline = plain_torch(x, check)
    kv_rows = int(x.seq_lens.sum())
    return Work(
        call=lambda: sd.tree_attention(
            x.q,
            x.k_pool,
            x.v_pool,
            x.page_table,
            x.prefix_lens,
            mask=mask,
            k_scale=scale,
            v_scale=scale,
            out=out,
            workspace=workspace,
        ),
        check=check,
        facts={"plan": sd.tree_attention_plan(x.q, x.k_pool, x.page_table)},
        bytes_moved=2 * kv_rows * KV_HEADS * HEAD_DIM * x.k_pool.element_size()
        + bytes_of(x.q, out, x.prefix_lens)
        + (bytes_of(mask) if mask is not None else 0)
        + 4 * (kv_rows // x.page_size),
        flops=4 * (int(x.prefix_lens.sum()) * nodes + int(x.tree.sum())) * Q_HEADS * HEAD_DIM,
        baseline=baseline,
        just_written=[x.q],
        packages=(*flashinfer.tree_attention(x, check), *flash_attention.tree_attention(x, check, check_chain)),
    )


CASES = [
    Case(
        "tree_attention",
        # Chains, other page sizes, uneven lengths (uniform in half to full), FP8 KV and tables with room for longer
        # texts only on request; max_len 0 is a table as wide as its text.
        grid={
            "prefix": (512, 4096, 32768),
            "batch": (1, 16, 64),
            "nodes": (4, 16, 64),
            "mode": ("tree",),
            "page_size": (16,),
            "lengths": ("even",),
            "kv": ("same",),
            "dtype": ("bfloat16",),
            "max_len": (0,),
        },
        cpu_grid={
            "prefix": (128, 512),
            "batch": (1, 4),
            "nodes": (4, 16),
            "mode": ("tree",),
            "page_size": (16,),
            "lengths": ("even",),
            "kv": ("same",),
            "dtype": ("float32", "bfloat16"),
            "max_len": (0,),
        },
        make=tree_attention,
    )
]
