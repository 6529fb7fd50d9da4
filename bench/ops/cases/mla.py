"""The cases of latent attention, with rows of 512 + 64 elements: verification of a tree or chain, and their writes."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import mla as reference
from specdec_kernels.reference.mla import latent_rows

from ..baselines import latent_attention
from ..baselines.paged import PagedTrees
from ..check import bytes_of, expect_near, poisoned
from ..harness import Case, Params, Work
from .attention import ERRORS, FP8_SCALE, check_rows, workspace_of
from .trees import mask_words, random_parents, visible_nodes

LATENT, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5  # of DeepSeek's heads, unabsorbed
TILE_ROWS = 64  # what tensor cores multiply at least


def random_rows(shape: tuple[int, ...], rows: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a pool of latent rows in one of the three formats."""
    if rows == "fp8":
        return torch.randn(*shape, LATENT + ROPE, device=device).to(torch.float8_e4m3fn)
    if rows == "656":
        pool = torch.empty(*shape, 656, dtype=torch.uint8, device=device)
        pool[..., :512] = torch.randn(*shape, 512, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        pool[..., 512:528] = (0.5 + torch.rand(*shape, 4, device=device)).view(torch.uint8)
        pool[..., 528:] = torch.randn(*shape, 64, device=device).bfloat16().view(torch.uint8)
        return pool
    return torch.randn(*shape, LATENT + ROPE, device=device, dtype=dtype)


def mla_tree_attention(device: torch.device, p: Params) -> Work:
    batch, nodes, heads, prefix, page_size = p["batch"], p["nodes"], p["heads"], p["prefix"], p["page_size"]
    dtype = getattr(torch, p["dtype"])
    pages_each = -(-(prefix + nodes) // page_size)
    page_table = torch.randperm(batch * pages_each).view(batch, pages_each).int().to(device)
    pool = random_rows((batch * pages_each, page_size), p["rows"], dtype, device)
    keys = (latent_rows(pool).to(dtype) if p["rows"] == "656" else pool).unsqueeze(2)
    parents = random_parents(batch, nodes) if p["mode"] == "tree" else [list(range(-1, nodes - 1))] * batch
    tree = visible_nodes(parents)
    x = PagedTrees(
        q=torch.randn(batch, nodes, heads, LATENT + ROPE, device=device, dtype=dtype),
        k_pool=keys,
        v_pool=keys[..., :LATENT],
        page_table=page_table,
        prefix_lens=torch.full((batch,), prefix, dtype=torch.int32, device=device),
        tree=tree.to(device),
        mask=mask_words(tree).to(device),
    )
    out = poisoned(batch, nodes, heads, LATENT, dtype=dtype, device=device)
    workspace = workspace_of(device, sd.mla_tree_attention_workspace(x.q, pool, page_table, max_kv_len=prefix + nodes))
    mask = x.mask if p["mode"] == "tree" else None
    kv_scale = FP8_SCALE if p["rows"] == "fp8" else 1.0
    error = ERRORS[p["dtype"]]

    def check(got: Tensor = out) -> None:
        check_rows(x, x.tree, got, error, SCALE)

    def check_chain(got: Tensor) -> None:
        check_rows(x, torch.ones_like(x.tree).tril(), got, error, SCALE)

    kv_rows = int(x.seq_lens.sum())
    row_bytes = pool.shape[-1] * pool.element_size()
    padded_rows = -(-nodes * heads // TILE_ROWS) * TILE_ROWS
    return Work(
        call=lambda: sd.mla_tree_attention(
            x.q,
            pool,
            page_table,
            x.prefix_lens,
            mask=mask,
            scale=SCALE,
            kv_scale=kv_scale,
            max_kv_len=prefix + nodes,
            out=out,
            workspace=workspace,
        ),
        check=check,
        facts={"plan": sd.mla_tree_attention_plan(x.q, pool, page_table, max_kv_len=prefix + nodes)},
        bytes_moved=kv_rows * row_bytes + bytes_of(x.q, out, x.prefix_lens, x.mask) + 4 * (kv_rows // page_size),
        flops=2 * (2 * LATENT + ROPE) * padded_rows * kv_rows,
        just_written=[x.q],
        packages=latent_attention.mla_tree_attention(x, SCALE, check, check_chain),
    )


def write_latent(device: torch.device, p: Params) -> Work:
    """Write the rows of a round, which are parts of a fused projection next to the queries' part."""
    batch, nodes, width = p["batch"], p["nodes"], p["q_width"]
    dtype = getattr(torch, p["dtype"])
    projected = torch.randn(batch, nodes, width + LATENT + ROPE, device=device).to(dtype)
    q, x = projected.split([width, LATENT + ROPE], -1)
    pool = torch.zeros(batch * 2, 64, LATENT + ROPE, dtype=dtype, device=device)
    table = torch.arange(batch * 2, dtype=torch.int32, device=device).view(batch, 2)
    lens = torch.full((batch,), 7, dtype=torch.int32, device=device)
    norm, q_norm = (torch.rand(size, device=device).to(dtype) for size in (LATENT, width))
    turn = torch.rand(100, ROPE, device=device)
    positions = torch.randint(100, (batch, nodes), dtype=torch.int32, device=device)
    q_out, want_q = (poisoned(batch, nodes, width, dtype=dtype, device=device) for _ in range(2))
    want = pool.clone()
    reference.write_latent(
        x, norm, want, table, lens,
        cos_sin=turn, positions=positions, interleaved=True, q=q, q_norm=q_norm, q_out=want_q,
    )  # fmt: skip

    def check() -> None:
        expect_near("kv_pool", pool, want, ERRORS[p["dtype"]])
        expect_near("q_out", q_out, want_q, ERRORS[p["dtype"]])

    rows = 2 * batch * nodes * (LATENT + ROPE) * pool.element_size()
    return Work(
        call=lambda: sd.write_latent(
            x,
            norm,
            pool,
            table,
            lens,
            cos_sin=turn,
            positions=positions,
            interleaved=True,
            q=q,
            q_norm=q_norm,
            q_out=q_out,
        ),
        check=check,
        bytes_moved=2 * bytes_of(q) + rows + bytes_of(norm, q_norm),
        just_written=[projected],
    )


def rope_heads(device: torch.device, p: Params) -> Work:
    dtype = getattr(torch, p["dtype"])
    x = torch.randn(p["rows"], p["heads"], 128 + ROPE, device=device).to(dtype)[..., 128:]
    turn = torch.rand(100, ROPE, device=device)
    positions = torch.randint(100, (p["rows"],), dtype=torch.int32, device=device)
    whole = poisoned(p["rows"], p["heads"], LATENT + ROPE, dtype=dtype, device=device)
    want = reference.rope_heads(x, turn, positions, interleaved=True)
    return Work(
        call=lambda: sd.rope_heads(x, turn, positions, interleaved=True, out=whole[..., LATENT:]),
        check=lambda: expect_near("out", whole[..., LATENT:], want, ERRORS[p["dtype"]]),
        bytes_moved=2 * p["rows"] * p["heads"] * ROPE * x.element_size() + bytes_of(positions),
        just_written=[x],
    )


CASES = [
    Case(
        "mla_tree_attention",
        # Chains, other pages and 8-bit rows only on request.
        grid={
            "prefix": (4096, 32768),
            "batch": (1, 16, 64),
            "heads": (16, 20, 128),
            "nodes": (1, 4, 16, 32),
            "mode": ("tree",),
            "page_size": (64,),
            "rows": ("same",),
            "dtype": ("bfloat16",),
        },
        cpu_grid={
            "prefix": (64, 512),
            "batch": (1, 4),
            "heads": (4, 16),
            "nodes": (4, 16),
            "mode": ("tree",),
            "page_size": (16,),
            "rows": ("same", "fp8", "656"),
            "dtype": ("float32", "bfloat16"),
        },
        make=mla_tree_attention,
    ),
    Case(
        "write_latent",
        grid={"batch": (1, 16, 64), "nodes": (1, 16), "q_width": (768, 1536), "dtype": ("bfloat16",)},
        make=write_latent,
    ),
    Case(
        "rope_heads",
        grid={"rows": (1, 16, 64, 1024), "heads": (16, 128), "dtype": ("bfloat16",)},
        make=rope_heads,
    ),
]
