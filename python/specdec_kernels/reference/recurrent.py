"""References of the recurrent ops: node by node along its path, in place on CPU tensors, for valid inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..ops import PendingPaths, RecurrentRecords
from ..status import Status
from .kv import working_rows


def active_rows(slots: Tensor | None, num_slots: int, batch: int, status: Tensor | None) -> Iterator[tuple[int, int]]:
    """Yield (row, slot) of the rows whose slots are not stalled."""
    for b, slot in working_rows(slots, num_slots, batch):
        if status is None or not int(status[slot]) & Status.STALLED:
            yield b, slot


def pending_nodes(paths: PendingPaths, slot: int) -> tuple[int, list[int]]:
    """Return the buffer of a slot's pending nodes, and these nodes."""
    return int(paths.parity[slot]), paths.nodes[slot, : int(paths.num_nodes[slot])].tolist()


def parents_of(mask: Tensor | None, rows: int) -> list[int]:
    """Return the parent of each row, -1 if it follows the committed state; without a mask the rows are a chain."""
    if mask is None:
        return [i - 1 for i in range(rows)]
    return [max((j for j in range(i) if int(mask[i, 0]) >> j & 1), default=-1) for i in range(rows)]


def set_pending_paths(
    paths: PendingPaths, path: Tensor, num_valid: Tensor, slots: Tensor | None = None, status: Tensor | None = None
) -> None:
    for b, slot in active_rows(slots, len(paths.num_nodes), len(path), status):
        count = int(num_valid[b])
        paths.nodes[slot, :count] = path[b, :count]
        paths.num_nodes[slot] = count
        paths.parity[slot] = 1 - paths.parity[slot]


def compute_gates(
    a: Tensor,
    b: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    *,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return g and beta in float64."""
    dt = softplus(a.double() + dt_bias.double()).clamp(0 if dt_min is None else dt_min, dt_max)
    g = decay.double().view(-1, *[1] * (a.ndim - 2)) * dt
    return g, dt if b is None else b.double().sigmoid()


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, delta_rule: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the state [Hv, dv, dk] by one token; return it, the output and u."""
    state = state * g.exp().view(len(state), 1, -1)
    u = v
    if beta is not None:
        u = beta[:, None] * (v - torch.einsum("hvd,hd->hv", state, k) if delta_rule else v)
    state = state + torch.einsum("hv,hd->hvd", u, k)
    return state, torch.einsum("hvd,hd->hv", state, q), u


def tree_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    records: RecurrentRecords,
    paths: PendingPaths,
    prefix_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    mask: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float | None = None,
    l2norm_eps: float | None = None,
    delta_rule: bool = True,
    status: Tensor | None = None,
) -> Tensor:
    """Return `out` in float64; every node has a state of its own."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    beta = None if beta is None else beta.double()
    if l2norm_eps is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + l2norm_eps).sqrt() for x in (q, k))
    q = q * (1.0 if scale is None else scale)
    values_per_key = v.shape[1] // k.shape[1]
    out = torch.zeros_like(v)

    for b, slot in active_rows(slots, len(state), len(cu_seqlens) - 1, status):
        first, rows = int(cu_seqlens[b]), int(cu_seqlens[b + 1] - cu_seqlens[b])
        if rows == 0:
            continue
        committed = state[slot].double()
        if prefix_lens[slot] == 0:
            committed = torch.zeros_like(committed)
        else:
            committed = with_pending_path(committed, records, paths, slot)
        states, decays = {-1: committed}, {-1: torch.zeros_like(g[0])}
        written = records_of(records, 1 - int(paths.parity[slot]), slot)
        for i, parent in enumerate(parents_of(None if mask is None else mask[first : first + rows], rows)):
            at = first + i
            keys, queries = (x[at].repeat_interleave(values_per_key, 0) for x in (k, q))
            own_beta = None if beta is None else beta[at]
            states[i], out[at], u = step(states[parent], queries, keys, v[at], g[at], own_beta, delta_rule)
            decays[i] = decays[parent] + g[at]
            if mask is None:
                del states[parent], decays[parent]
            else:
                written.k[i], written.u[i], written.g[i] = k[at], u, decays[i]
        state[slot] = committed if mask is not None else states[rows - 1]
    return out


def records_of(records: RecurrentRecords, buffer: int, slot: int) -> RecurrentRecords:
    """Return a view of the records of one slot, [N, ...]."""
    return RecurrentRecords(*(x[buffer, slot] for x in records))


def with_pending_path(state: Tensor, records: RecurrentRecords, paths: PendingPaths, slot: int) -> Tensor:
    """Return the state [Hv, dv, dk] after a slot's pending path: one update of the path's rank."""
    buffer, nodes = pending_nodes(paths, slot)
    if not nodes:
        return state
    k, u, g = (x[nodes].double() for x in records_of(records, buffer, slot))
    g = g.view(*g.shape[:2], -1)  # [m, Hv, dk or 1]
    keys = k.repeat_interleave(u.shape[1] // k.shape[1], 1)
    folded: Tensor = state * g[-1].exp()[:, None] + torch.einsum("mhv,mhd->hvd", u, keys * (g[-1] - g).exp())
    return folded


def commit_recurrence(
    state: Tensor,
    records: RecurrentRecords,
    paths: PendingPaths,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    for _, slot in active_rows(slots, len(state), len(state) if slots is None else len(slots), status):
        state[slot] = with_pending_path(state[slot].double(), records, paths, slot)


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    records: Tensor,
    paths: PendingPaths,
    prefix_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    mask: Tensor | None = None,
    slots: Tensor | None = None,
    activation: str | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """Return `out` in float64."""
    taps = weight.shape[1]
    out = torch.zeros_like(x, dtype=torch.float64)
    for b, slot in active_rows(slots, len(window), len(cu_seqlens) - 1, status):
        first, rows = int(cu_seqlens[b]), int(cu_seqlens[b + 1] - cu_seqlens[b])
        if rows == 0:
            continue
        if prefix_lens[slot] == 0:
            committed = torch.zeros_like(window[slot])
        else:
            committed = window_after(window, records, paths, slot)
        own = x[first : first + rows]
        parents = parents_of(None if mask is None else mask[first : first + rows], rows)
        for i in range(rows):
            inputs: list[Tensor] = []
            node = i
            while node >= 0 and len(inputs) < taps:
                inputs.insert(0, own[node])
                node = parents[node]
            seen = torch.cat([committed, torch.stack(inputs)])[-taps:].double()
            out[first + i] = (seen * weight.T.double()).sum(0) + (0 if bias is None else bias.double())
        if mask is None:
            committed = torch.cat([committed, own])[-(taps - 1) :]
        else:
            records[1 - int(paths.parity[slot]), slot, :rows] = own
        window[slot] = committed
    return silu(out) if activation == "silu" else out


def window_after(window: Tensor, records: Tensor, paths: PendingPaths, slot: int) -> Tensor:
    """Return the window [K - 1, C] after a slot's pending path."""
    buffer, nodes = pending_nodes(paths, slot)
    return torch.cat([window[slot], records[buffer, slot][nodes]])[-window.shape[1] :]


def commit_conv1d(
    window: Tensor,
    records: Tensor,
    paths: PendingPaths,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    for _, slot in active_rows(slots, len(window), len(window) if slots is None else len(slots), status):
        window[slot] = window_after(window, records, paths, slot)
