"""The case of tree_attention: verification of a tree behind a paged prefix, in the shape of an 8B model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import specdec_kernels as sd

from ..compare import bytes_of, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from .trees import mask_words, random_parents, visible_nodes

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
ERRORS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """float64, one request at a time: q [B, N, Hq, D], k and v [B, rows, Hkv, D], visible [B, N, rows]."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(len(q)):
        keys, values = (x[b].double().repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("nhd,rhd->hnr", q[b].double(), keys) / HEAD_DIM**0.5
        weights = scores.masked_fill(~visible[b], -torch.inf).softmax(-1)
        out[b] = torch.einsum("hnr,rhd->nhd", weights, values)
    return out


def tree_attention(device: torch.device, p: Params) -> Work:
    batch, nodes, prefix, dtype = p["batch"], p["nodes"], p["prefix"], getattr(torch, p["dtype"])
    even = p["lengths"] == "even"
    prefix_lens = torch.tensor(
        [prefix if even else prefix // 4 + int(torch.randint(0, prefix, ())) * 3 // 2 for _ in range(batch)],
        dtype=torch.int32,
    )
    pages_each = -(-(int(prefix_lens.max()) + nodes) // PAGE_SIZE)
    page_table = torch.randperm(batch * pages_each).view(batch, pages_each)
    pool_shape = (batch * pages_each, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k_pool, v_pool = (torch.randn(pool_shape, device=device).to(dtype) for _ in "kv")
    q = torch.randn(batch, nodes, Q_HEADS, HEAD_DIM, device=device).to(dtype)
    tree = visible_nodes(random_parents(batch, nodes))
    mask = mask_words(tree).to(device)
    out = poisoned(*q.shape, dtype=dtype, device=device)
    lengths, table = prefix_lens.to(device), page_table.int().to(device)

    # The same KV without pages, and which row sees what: the reference's and the baseline's inputs.
    rows = pages_each * PAGE_SIZE
    k, v = (pool[page_table.to(device)].view(batch, rows, KV_HEADS, HEAD_DIM) for pool in (k_pool, v_pool))
    visible = torch.zeros(batch, nodes, rows, dtype=torch.bool)
    for b, length in enumerate(prefix_lens.tolist()):
        visible[b, :, :length] = True
        visible[b, :, length : length + nodes] = tree[b]
    visible = visible.to(device)

    def check(got: Tensor = out) -> None:
        expect_near("out", got, dense_attention(q, k, v, visible), ERRORS[p["dtype"]])

    def plain_torch() -> Tensor:
        by_head = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible[:, None], enable_gqa=True
        )
        return by_head.transpose(1, 2)

    kv_rows = int(prefix_lens.sum()) + batch * nodes
    return Work(
        call=lambda: sd.tree_attention(q, k_pool, v_pool, table, lengths, mask=mask, out=out),
        check=check,
        bytes_moved=2 * kv_rows * KV_HEADS * HEAD_DIM * q.element_size() + bytes_of(q, out, mask, lengths),
        flops=4 * int(visible.sum()) * Q_HEADS * HEAD_DIM,
        baseline=Baseline("torch sdpa, KV without pages", plain_torch, check),
    )


CASES = [
    Case(
        "tree_attention",
        grid={
            "batch": (1, 16, 64),
            "prefix": (512, 4096),
            "nodes": (4, 16, 64),
            "lengths": ("even", "uneven"),
            "dtype": ("bfloat16",),
        },
        cpu_grid={
            "batch": (1, 4),
            "prefix": (128, 512),
            "nodes": (4, 16),
            "lengths": ("even", "uneven"),
            "dtype": ("float32", "bfloat16"),
        },
        make=tree_attention,
    )
]
