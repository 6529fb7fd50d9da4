"""Recurrent ops: trees of drafts on layers that keep a state instead of KV rows.

A layer keeps one committed state for each slot, and a small record for each node of the slot's last tree. All outputs
of a tree follow from the committed state, so no node has a state of its own. After verification the accepted path is
*pending* (`set_pending_paths`); the next pass over the slot folds it into the state first.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _C
from ._alloc import empty, empty_like, shape_of, wrong_type
from ._tensor import Tensor
from .structs import PendingPaths


class RecurrentRecords(NamedTuple):
    """The records of one recurrent layer: two buffers of N nodes for each slot. See `tree_recurrence`."""

    k: Tensor  # [2, num_slots, N, Hk, dk] float32: keys, normalized
    u: Tensor  # [2, num_slots, N, Hv, dv] float32: values, corrected by the delta rule
    g: Tensor  # [2, num_slots, N, Hv] or [..., dk] float32: log decay from the committed state to the node, included


def _check_structs(op: str, paths: PendingPaths, records: RecurrentRecords | None = None) -> None:
    if records is not None and not isinstance(records, RecurrentRecords):
        raise wrong_type(op, "records", records, RecurrentRecords)
    if not isinstance(paths, PendingPaths):
        raise wrong_type(op, "paths", paths, PendingPaths)


def set_pending_paths(
    paths: PendingPaths,
    path: Tensor,
    num_valid: Tensor,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Make the accepted path of each request pending; one call serves all recurrent layers.

    For the slot of row b: nodes = path[b, :num_valid[b]], num_nodes = num_valid[b], and parity changes, because the
    records of the tree are in the other buffer. Empty rows change nothing. A stalled slot keeps its pending path, as
    the pass over the tree skipped it. A bad path sets status bits, and nothing is pending.

    After a pass without a mask, which commits its rows, call it with num_valid 0.

    Args:
        paths: changed in place.
        path: [B, S] int32, from `verify_tree`: starts at 0 and increases strictly over the valid entries.
        num_valid: [B] int32, from `commit_tokens`.
        slots: [B] int32, distinct.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH if num_valid is not in 0..S, BAD_TREE if path does
            not start at 0 or does not increase.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
    """
    _check_structs("set_pending_paths", paths)
    _C.set_pending_paths(stream, *paths, path, num_valid, slots, status)


def compute_gates(
    a: Tensor,
    b: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    *,
    dt_min: float | None = None,
    dt_max: float | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log decays and betas of `tree_recurrence` from what a layer projects, in float32.

    The time step is dt = softplus(a + dt_bias), within dt_min and dt_max. Then g = decay dt, and beta = sigmoid(b), as
    in gated delta nets and KDA. Without b, beta is dt, as in Mamba 2.

    On a GPU the op reads decay and dt_bias before the previous kernel on the stream has finished: that kernel must not
    write them.

    Args:
        a: [M, Hv] float32, float16 or bfloat16, or [M, Hv, dk], one for each channel (KDA); only the last dimension
            must be contiguous.
        b: [M, Hv] of a's dtype, logits of beta; only the last dimension must be contiguous. None: beta is dt.
        decay: [Hv] float32, -exp(A_log).
        dt_bias: [Hv], or [Hv, dk], float32 or of a's dtype.
        dt_min: least time step. None: 0.
        dt_max: largest time step. None: no limit.
        out: preallocated results, None for each one to allocate.
        stream: CUDA stream; None: the current one.

    Returns:
        g of a's shape and beta [M, Hv], both float32.

    Raises:
        ValueError: wrong dtype, shape, device or stride; b is None for a with channels; dt_min below 0 or above dt_max.
    """
    g, beta = out
    op = "compute_gates"
    if g is None or beta is None:
        shape = shape_of(op, "a", a, 3 if len(getattr(a, "shape", ())) == 3 else 2)
        g = empty(op, a, shape, "float32") if g is None else g
        beta = empty(op, a, shape[:2], "float32") if beta is None else beta
    _C.compute_gates(stream, a, b, decay, dt_bias, dt_min, dt_max, g, beta)
    return g, beta


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
    out: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Run a linear recurrence over every path of a tree, from one committed state.

    In a value head, node i with parent p has the state and output

        S_i = exp(g_i) S_p + u_i k_i^T,    u_i = beta_i (v_i - exp(g_i) S_p k_i),    o_i = S_i q_i

    where the parent of a node without ancestors is the committed state. This is the gated delta rule of Gated DeltaNet
    (arXiv 2412.06464), and with g per channel of the key that of Kimi Delta Attention (arXiv 2510.26692). Without the
    delta rule u_i is beta_i v_i, or v_i without beta: the recurrence of Mamba 2 (arXiv 2405.21060) with beta = dt,
    k = B, q = C and v = x. States of nodes are never stored. All outputs come from the committed state by one
    triangular solve over ancestors, the WY form of the delta rule; STree (arXiv 2505.14969) does so for state space
    models.

    With a mask the rows are the nodes of a tree. The op first folds the slot's pending path into the state, and stores
    that state; then it writes the outputs of all nodes, and their records to the buffer that holds no pending nodes.
    Without a mask the rows of a request are a chain of any length, which is committed: the state becomes that after the
    last row, and no records are written. A pending path is folded first; afterwards nothing is pending, and the caller
    changes `paths` so, once for all layers.

    With prefix_lens 0 the state counts as zeros and nothing as pending, whatever memory holds. A request with bad
    lengths, a bad pending path or a bad mask is refused. Rows of refused requests, of empty and stalled slots, and
    after the last request are zeros, and such a slot is not changed.

    Computes in float32. On one device a row's bits depend only on its own request. On a GPU a NaN or an infinity in one
    row may reach all outputs of its request.

    Args:
        q: [M, Hk, dk] float32, float16 or bfloat16, packed rows; only the last dimension must be contiguous. dk is at
            most 256.
        k: like q.
        v: [M, Hv, dv] of q's dtype, Hv a multiple of Hk: value head h has key head h // (Hv // Hk). Only the last
            dimension must be contiguous. dv is at most 256.
        g: [M, Hv] float32, log decay of each row, at most 0; or [M, Hv, dk], one for each channel (KDA). Only the last
            dimension must be contiguous.
        beta: [M, Hv] float32; only the last dimension must be contiguous. None: no factor, and no delta rule.
        state: [num_slots, Hv, dv, dk] float32, changed in place.
        records: N is 1 to 64; changed in place. g has a last dimension dk if the argument g has.
        paths: pending paths.
        prefix_lens: [num_slots] int32; only whether it is 0 matters.
        cu_seqlens: [B + 1] int32, starting at 0: rows of request b are cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        mask: [M, W] int64 as 64-bit patterns: bit j of row i, node j of the request is i or an ancestor of i. A parent
            comes before its children. A request has at most N nodes, so words after the first are 0.
        slots: [B] int32, distinct.
        scale: factor of q, above 0. None: 1.
        l2norm_eps: first divide each q and k by sqrt(its sum of squares + l2norm_eps). None: they stay.
        delta_rule: subtract from each value what the state has for its key. False: Mamba 2.
        out: like v; only the last dimension must be contiguous.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH if prefix_lens is negative, cu_seqlens leaves the
            rows, a tree has more than N nodes or num_nodes of paths does not fit; BAD_TREE if the mask is no tree whose
            parents come first, or the pending path does not increase below N.
        stream: CUDA stream; None: the current one.

    Returns:
        [M, Hv, dv] in v's dtype.

    Raises:
        ValueError: wrong dtype, shape, device or stride; scale or l2norm_eps is no positive finite float32; on a GPU, N
            for which keys do not fit into shared memory. With dk 128, N 64 takes 106 KB for 16-bit rows and 151 KB for
            float32 rows, and with KDA's decays 147 and 192 KB.
        TypeError: records or paths is another type.
    """
    op = "tree_recurrence"
    _check_structs(op, paths, records)
    if out is None:
        out = empty_like(op, v, shape_of(op, "v", v, 3))
    _C.tree_recurrence(
        stream, q, k, v, g, beta, state, *records, *paths, prefix_lens, cu_seqlens, mask, slots, scale, l2norm_eps,
        delta_rule, out, status,
    )  # fmt: skip
    return out


def commit_recurrence(
    state: Tensor,
    records: RecurrentRecords,
    paths: PendingPaths,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Fold the pending paths of slots into the state of one layer: before it is saved, exported or copied.

    `paths` is not changed: once all layers are done, set num_nodes of these slots to 0. Empty rows and stalled slots
    change nothing, nor does a slot with a bad path.

    Args:
        state: [num_slots, Hv, dv, dk] float32, changed in place.
        records: records of the layer.
        paths: pending paths.
        slots: [B] int32, distinct. None: all slots.
        status: [num_slots] int32. STALLED is read. Gains BAD_LENGTH if num_nodes of paths does not fit, BAD_TREE if a
            path does not increase below N.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
        TypeError: records or paths is another type.
    """
    _check_structs("commit_recurrence", paths, records)
    _C.commit_recurrence(stream, state, *records, *paths, slots, status)


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
    out: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> Tensor:
    """Run a causal depthwise convolution over every path of a tree, after a window of committed inputs.

    The taps of a node are its own input, those of its ancestors, nearest first, then the slot's window. Pending paths,
    masks, chains, prefix_lens 0 and refused requests are as in `tree_recurrence`: with a mask the window becomes that
    after the pending path, and the inputs of all nodes are recorded; without one it becomes that after the last row.

    Args:
        x: [M, C] float32, float16 or bfloat16, packed rows; only the last dimension must be contiguous.
        weight: [C, K] of x's dtype, K 2 to 8; the last tap is the row's own input, as in `torch.nn.Conv1d`.
        bias: [C] of x's dtype. None: zeros.
        window: [num_slots, K - 1, C] of x's dtype, oldest first, changed in place.
        records: [2, num_slots, N, C] of x's dtype, N 1 to 64, changed in place.
        paths: pending paths.
        prefix_lens: [num_slots] int32; only whether it is 0 matters.
        cu_seqlens: [B + 1] int32, starting at 0: rows of request b are cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        mask: [M, W] int64 as 64-bit patterns: bit j of row i, node j of the request is i or an ancestor of i.
        slots: [B] int32, distinct.
        activation: "silu", or None.
        out: like x; only the last dimension must be contiguous. It must not overlap x.
        status: [num_slots] int32, as for `tree_recurrence`.
        stream: CUDA stream; None: the current one.

    Returns:
        [M, C] in x's dtype. Sums are in float32.

    Raises:
        ValueError: wrong dtype, shape, device, stride or activation.
        TypeError: paths is another type.
    """
    op = "tree_conv1d"
    _check_structs(op, paths)
    if out is None:
        out = empty_like(op, x, shape_of(op, "x", x, 2))
    _C.tree_conv1d(
        stream, x, weight, bias, window, records, *paths, prefix_lens, cu_seqlens, mask, slots, activation, out, status
    )
    return out


def commit_conv1d(
    window: Tensor,
    records: Tensor,
    paths: PendingPaths,
    *,
    slots: Tensor | None = None,
    status: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Fold the pending paths of slots into the convolution windows of one layer; see `commit_recurrence`.

    Args:
        window: [num_slots, K - 1, C] float32, float16 or bfloat16, changed in place.
        records: [2, num_slots, N, C] of window's dtype.
        paths: pending paths.
        slots: [B] int32, distinct. None: all slots.
        status: [num_slots] int32, as for `commit_recurrence`.
        stream: CUDA stream; None: the current one.

    Raises:
        ValueError: wrong dtype, shape, device or stride.
        TypeError: paths is another type.
    """
    _check_structs("commit_conv1d", paths)
    _C.commit_conv1d(stream, window, records, *paths, slots, status)
