"""Cases of the recurrent ops in shapes of Qwen3-Next (gated delta rule), Kimi-Linear (KDA) and Nemotron-H (Mamba 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import recurrent as reference

from ..baselines import fla
from ..baselines.fla import RecurrentRows
from ..check import bytes_of, expect_equal, expect_near, poisoned
from ..harness import Baseline, Case, Params, Work
from .trees import mask_words, random_parents, visible_nodes

ACCEPTED = 3  # nodes of each pending path
CHECKED_REQUESTS = 2
ERRORS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class Shape(NamedTuple):
    """Sizes of a layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int  # of the convolution
    taps: int = 4


SHAPES = {
    "gated-delta": Shape(16, 32, 128, 128, 8192),
    "kda": Shape(32, 32, 128, 128, 12288),
    "mamba2": Shape(8, 128, 128, 64, 10240),
}


class Requests(NamedTuple):
    """Requests in the slots of the same number, each with a pending path."""

    paths: sd.PendingPaths
    prefix_lens: Tensor
    cu_seqlens: Tensor
    mask: Tensor | None

    def first(self, count: int) -> Requests:
        """Return the first `count` requests, on the CPU; slots stay."""
        ends = self.cu_seqlens[: count + 1].cpu()
        mask = None if self.mask is None else self.mask[: int(ends[-1])].cpu()
        return Requests(sd.PendingPaths(*(x.cpu() for x in self.paths)), self.prefix_lens.cpu(), ends, mask)


def make_requests(device: torch.device, p: Params) -> Requests:
    batch, nodes, is_tree = p["batch"], p["nodes"], p["mode"] == "tree"
    length = min(ACCEPTED, nodes)
    path = torch.arange(length, dtype=torch.int32).repeat(batch, 1)
    counts = torch.full((batch,), length if is_tree else 0, dtype=torch.int32)
    paths = sd.PendingPaths(path, counts, torch.zeros(batch, dtype=torch.int32))
    mask = mask_words(visible_nodes(random_parents(batch, nodes))).flatten(0, 1).to(device) if is_tree else None
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    lens = torch.full((batch,), 100, dtype=torch.int32, device=device)
    return Requests(sd.PendingPaths(*(x.to(device) for x in paths)), lens, ends, mask)


def record_nodes(p: Params) -> int:
    """Return the nodes that records have room for; a chain has none."""
    return p["nodes"] if p["mode"] == "tree" else 1


def make_layer(device: torch.device, p: Params) -> tuple[Shape, Tensor, sd.RecurrentRecords]:
    shape, batch, nodes = SHAPES[p["recurrence"]], p["batch"], record_nodes(p)
    decays = (shape.value_heads, shape.key_dim) if p["recurrence"] == "kda" else (shape.value_heads,)
    state = torch.randn(batch, shape.value_heads, shape.value_dim, shape.key_dim, device=device)
    where = (2, batch, nodes)
    records = sd.RecurrentRecords(
        k=torch.randn(*where, shape.key_heads, shape.key_dim, device=device) / shape.key_dim**0.5,
        u=torch.randn(*where, shape.value_heads, shape.value_dim, device=device),
        g=-torch.rand(*where, *decays, device=device).cumsum(2),
    )
    return shape, state, records


def record_bytes(records: sd.RecurrentRecords, nodes: int) -> int:
    """Return the bytes of the first `nodes` records of each slot."""
    return sum(x[0, :, :nodes].nbytes for x in records)


def tree_recurrence(device: torch.device, p: Params) -> Work:
    shape, state, records = make_layer(device, p)
    requests, dtype = make_requests(device, p), getattr(torch, p["dtype"])
    num_rows = p["batch"] * p["nodes"]
    q, k = (
        (torch.randn(num_rows, shape.key_heads, shape.key_dim, device=device) / shape.key_dim**0.5).to(dtype)
        for _ in "qk"
    )
    v = torch.randn(num_rows, shape.value_heads, shape.value_dim, device=device).to(dtype)
    g = -torch.rand(num_rows, *records.g.shape[3:], device=device)
    beta = torch.rand(num_rows, shape.value_heads, device=device)
    out = poisoned(*v.shape, dtype=dtype, device=device)
    rows = RecurrentRows(q, k, v, g, beta)
    scale, delta_rule = shape.key_dim**-0.5, p["recurrence"] != "mamba2"
    l2norm_eps = 1e-6 if delta_rule else None
    checked = min(p["batch"], CHECKED_REQUESTS)
    before, records_before = (
        state[:checked].cpu().clone(),
        sd.RecurrentRecords(*(x[:, :checked].cpu() for x in records)),
    )

    def check_out(got: Tensor, with_state: bool = False) -> None:
        want_state, own = before.double(), requests.first(checked)
        count = int(own.cu_seqlens[-1])
        host = RecurrentRows(*(x[:count].cpu() for x in rows))
        want_records = sd.RecurrentRecords(*(x.double() for x in records_before))
        want = reference.tree_recurrence(
            host.q, host.k, host.v, host.g, host.beta, want_state, want_records,
            own.paths, own.prefix_lens, own.cu_seqlens,
            mask=own.mask, scale=scale, l2norm_eps=l2norm_eps, delta_rule=delta_rule,
        )  # fmt: skip
        expect_near("out", got[:count], want, ERRORS[p["dtype"]])
        if not with_state:
            return
        expect_near("state", state[:checked], want_state, 1e-5)
        if requests.mask is not None:
            expect_near("records.u", records.u[1, :checked], want_records.u[1], 1e-5)

    moved = 2 * state.nbytes + bytes_of(*rows, out)
    if requests.mask is not None:
        accepted = min(ACCEPTED, p["nodes"])
        moved += requests.mask.nbytes + record_bytes(records, accepted) + record_bytes(records, p["nodes"])
    paths, lens, ends, mask = requests

    def call() -> object:
        return sd.tree_recurrence(
            q, k, v, g, beta, state, records, paths, lens, ends,
            mask=mask, scale=scale, l2norm_eps=l2norm_eps, delta_rule=delta_rule, out=out,
        )  # fmt: skip

    packages: Sequence[Baseline] = ()
    if delta_rule and (mask is None or p["nodes"] == 1):
        committed = state.clone()
        sd.commit_recurrence(committed, records, paths)
        by_request = RecurrentRows(*(x.unflatten(0, (p["batch"], p["nodes"])) for x in rows))
        packages = fla.tree_recurrence(p["recurrence"], by_request, committed, scale, check_out)
    return Work(
        call=call,
        check=lambda: check_out(out, with_state=True),
        bytes_moved=moved,
        packages=packages,
    )


def commit_recurrence(device: torch.device, p: Params) -> Work:
    _, state, records = make_layer(device, p)
    paths, checked = make_requests(device, p).paths, min(p["batch"], CHECKED_REQUESTS)
    want, parts = state[:checked].cpu().double(), sd.RecurrentRecords(*(x[:, :checked].cpu() for x in records))
    host_paths = sd.PendingPaths(*(x[:checked].cpu() for x in paths))
    reference.commit_recurrence(want, parts, host_paths)
    return Work(
        call=lambda: sd.commit_recurrence(state, records, paths),
        check=lambda: expect_near("state", state[:checked], want, 1e-5),
        bytes_moved=2 * state.nbytes + record_bytes(records, min(ACCEPTED, p["nodes"])),
    )


def make_conv(device: torch.device, p: Params) -> tuple[Tensor, Tensor]:
    """Return a window and records."""
    shape, dtype = SHAPES[p["recurrence"]], getattr(torch, p["dtype"])
    window = torch.randn(p["batch"], shape.taps - 1, shape.channels, device=device).to(dtype)
    records = torch.randn(2, p["batch"], record_nodes(p), shape.channels, device=device).to(dtype)
    return window, records


def tree_conv1d(device: torch.device, p: Params) -> Work:
    shape, dtype = SHAPES[p["recurrence"]], getattr(torch, p["dtype"])
    window, records = make_conv(device, p)
    requests, rows = make_requests(device, p), p["batch"] * p["nodes"]
    x = torch.randn(rows, shape.channels, device=device).to(dtype)
    weight = torch.randn(shape.channels, shape.taps, device=device).to(dtype)
    out = poisoned(*x.shape, dtype=dtype, device=device)
    checked = min(p["batch"], CHECKED_REQUESTS)
    want_window, want_records = window[:checked].cpu().clone(), records[:, :checked].cpu().clone()
    before = want_window.clone(), want_records.clone()

    def check() -> None:
        for to, value in zip((want_window, want_records), before, strict=True):
            to.copy_(value)
        own = requests.first(checked)
        count = int(own.cu_seqlens[-1])
        want = reference.tree_conv1d(
            x[:count].cpu(), weight.cpu(), None, want_window, want_records,
            own.paths, own.prefix_lens, own.cu_seqlens, mask=own.mask, activation="silu",
        )  # fmt: skip
        expect_near("out", out[:count], want, ERRORS[p["dtype"]])
        expect_equal("window", window[:checked], want_window)
        expect_equal("records", records[:, :checked], want_records)

    moved = 2 * window.nbytes + bytes_of(x, out, weight)
    if requests.mask is not None:
        moved += requests.mask.nbytes + x.nbytes + records[0, :, : min(ACCEPTED, shape.taps - 1)].nbytes
    paths, lens, ends, mask = requests
    return Work(
        call=lambda: sd.tree_conv1d(
            x, weight, None, window, records, paths, lens, ends, mask=mask, activation="silu", out=out
        ),
        check=check,
        bytes_moved=moved,
    )


def commit_conv1d(device: torch.device, p: Params) -> Work:
    window, records = make_conv(device, p)
    paths = make_requests(device, p).paths
    want = window.cpu().clone()
    reference.commit_conv1d(want, records.cpu(), sd.PendingPaths(*(x.cpu() for x in paths)))
    length = min(ACCEPTED, p["nodes"])
    return Work(
        call=lambda: sd.commit_conv1d(window, records, paths),
        check=lambda: expect_equal("window", window, want),
        bytes_moved=2 * window.nbytes + records[0, :, :length].nbytes,
    )


def compute_gates(device: torch.device, p: Params) -> Work:
    shape, dtype, rows = SHAPES[p["recurrence"]], getattr(torch, p["dtype"]), p["rows"]
    sizes = (shape.value_heads, shape.key_dim) if p["recurrence"] == "kda" else (shape.value_heads,)
    a, b = (torch.randn(rows, *size, device=device).to(dtype) for size in (sizes, sizes[:1]))
    logits = None if p["recurrence"] == "mamba2" else b
    decay = -torch.rand(shape.value_heads, device=device)
    dt_bias = torch.randn(*sizes, device=device).to(dtype)
    g, beta = (poisoned(*x.shape, dtype=torch.float32, device=device) for x in (a, b))
    want_g, want_beta = reference.compute_gates(
        a.cpu(), None if logits is None else logits.cpu(), decay.cpu(), dt_bias.cpu()
    )

    def check() -> None:
        expect_near("g", g, want_g, ERRORS["float32"])
        expect_near("beta", beta, want_beta, ERRORS["float32"])

    return Work(
        call=lambda: sd.compute_gates(a, logits, decay, dt_bias, out=(g, beta)),
        check=check,
        bytes_moved=bytes_of(a, decay, dt_bias, g, beta) + (0 if logits is None else logits.nbytes),
    )


def set_pending_paths(device: torch.device, p: Params) -> Work:
    batch, width = p["batch"], p["nodes"]
    paths = sd.PendingPaths(
        *(torch.zeros(*size, dtype=torch.int32, device=device) for size in ((batch, width), (batch,), (batch,)))
    )
    path = torch.arange(width, dtype=torch.int32, device=device).repeat(batch, 1)
    num_valid = torch.full((batch,), width, dtype=torch.int32, device=device)

    def check() -> None:
        expect_equal("paths.nodes", paths.nodes, path)
        expect_equal("paths.num_nodes", paths.num_nodes, num_valid)

    return Work(
        call=lambda: sd.set_pending_paths(paths, path, num_valid),
        check=check,
        bytes_moved=bytes_of(path, num_valid, *paths) + paths.parity.nbytes,
    )


BATCHES = (1, 8, 32, 64)
GRID: dict[str, Sequence[Any]] = {
    "recurrence": ("gated-delta", "mamba2", "kda"),
    "mode": ("tree", "chain"),
    "batch": BATCHES,
    "nodes": (1, 16, 64),
    "dtype": ("bfloat16",),
}
BASE = {"recurrence": "gated-delta", "mode": "tree", "batch": 1, "nodes": 16, "dtype": "bfloat16"}
CPU_GRID = GRID | {"batch": (1, 4), "nodes": (1, 16), "dtype": ("float32", "bfloat16")}
TREES: dict[str, Sequence[Any]] = {"mode": ("tree",)}
CASES = [
    Case("set_pending_paths", grid={"batch": BATCHES, "nodes": (8,)}, make=set_pending_paths),
    Case(
        "compute_gates",
        grid={"recurrence": GRID["recurrence"], "rows": (1, 16, 512, 4096), "dtype": ("bfloat16",)},
        base={"recurrence": "gated-delta", "rows": 16, "dtype": "bfloat16"},
        make=compute_gates,
    ),
    Case("tree_recurrence", grid=GRID, cpu_grid=CPU_GRID, base=BASE, make=tree_recurrence),
    Case("commit_recurrence", grid=GRID | TREES, cpu_grid=CPU_GRID | TREES, base=BASE, make=commit_recurrence),
    Case("tree_conv1d", grid=GRID, cpu_grid=CPU_GRID, base=BASE, make=tree_conv1d),
    Case("commit_conv1d", grid=GRID | TREES, cpu_grid=CPU_GRID | TREES, base=BASE, make=commit_conv1d),
]
