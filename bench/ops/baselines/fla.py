"""flash-linear-attention's kernels of delta rules (written for 0.4).

They know no trees: they are baselines of chains, and of plain steps, which are trees of one node. They read and write
states as we do; q and k are repeated for all value heads before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..harness import Baseline
from . import module, that_run

MODULES = {"gated-delta": ("fla.ops.gated_delta_rule", "gated_delta_rule"), "kda": ("fla.ops.kda", "kda")}
CHUNKED_ROWS = 64  # from this many rows on, FLA has a kernel that works on chunks


class RecurrentRows(NamedTuple):
    """The rows of a recurrence, [M, ...] each, or [B, N, ...]."""

    q: Tensor  # [M, Hk, dk]
    k: Tensor  # [M, Hk, dk]
    v: Tensor  # [M, Hv, dv]
    g: Tensor  # [M, Hv] or [M, Hv, dk]
    beta: Tensor  # [M, Hv]


def tree_recurrence(
    recurrence: str,
    rows: RecurrentRows,
    state: Tensor,
    scale: float,
    check: Callable[[Tensor], None],
) -> Sequence[Baseline]:
    """Return the baselines that run here.

    Args:
        recurrence: as the parameter of the benchmark.
        rows: [B, N, ...].
        state: [B, Hv, dv, dk], after the pending paths.
        scale: factor of q.
        check: compares outputs [B * N, Hv, dv].
    """
    name, suffix = MODULES.get(recurrence, ("", ""))
    kernels = module(name, state.device) if name else None
    if kernels is None:
        return ()
    q, k, v, g, beta = rows
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    initial = state.transpose(2, 3).contiguous()

    def baseline(kind: str) -> Baseline:
        function = getattr(kernels, f"{kind}_{suffix}")

        def call() -> Any:
            out, _ = function(
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return out.flatten(0, 1)

        return Baseline(f"fla {kind}", call, check)

    return that_run(*(baseline(kind) for kind in ("fused_recurrent", *["chunk"][: q.shape[1] >= CHUNKED_ROWS])))
