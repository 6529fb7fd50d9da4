"""How much KV a captured round is made for: a graph for each range of lengths in which attention runs other plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...plans import HEAD_DIMS, Gpu, attention_plan
from ..drafts.needs import AttentionCall

MOST_BOUNDS = 4  # of rounds of one batch size and as many rows
# Calls that are fewer than one in so many of the most frequent decide no bounds: a head's one layer beside a target's.
FEWEST = 4
FIRST_STEP = 1024  # plans are compared there, and at every power of two from there on


def kv_bounds(
    calls: Sequence[AttentionCall],
    batch: int,
    num_rows: int,
    most_nodes: int,
    max_kv_len: int,
    gpu: Gpu,
    *,
    page_size: int,
    fp8: bool,
    tensor_cores: bool,
) -> tuple[int, ...]:
    """Rising bounds of KV rows, the last one `max_kv_len`: up to each, and beyond the one before, the calls of a round
    with so many rows in all, and nodes of a request at most, run the plans that they run at the bound itself.

    Calls that are few beside others do not count. Of more than `MOST_BOUNDS` those go that are nearest to the next one.
    """
    most = max(call.per_round for call in calls)
    # Heads of other sizes are attended to without a plan.
    counting = [call for call in calls if FEWEST * call.per_round >= most and call.head_dim in HEAD_DIMS]

    def plans(length: int) -> list[str]:
        return [
            attention_plan(
                batch=batch,
                q_rows=num_rows if call.q_rows is None else min(call.q_rows, most_nodes),
                packed=call.q_rows is None,
                q_heads=call.q_heads,
                kv_heads=call.kv_heads,
                head_dim=call.head_dim,
                max_kv_len=length,
                page_size=page_size,
                fp8=fp8 and call.follows_kv_dtype,
                tensor_cores=tensor_cores,
                gpu=gpu,
            ).name
            for call in counting
        ]

    bounds = last_alike(plans, max_kv_len)
    while len(bounds) > MOST_BOUNDS:
        nearest = min(range(len(bounds) - 1), key=lambda i: bounds[i + 1] / bounds[i])
        del bounds[nearest]
    return tuple(bounds)


def last_alike(plans: Callable[[int], list[str]], most: int) -> list[int]:
    """The lengths before which and at which plans are the same, and behind which they are others; and `most`."""
    steps = (FIRST_STEP << power for power in range(most.bit_length()))
    low, bounds = 1, []
    for high in (*(step for step in steps if step < most), most):
        while plans(low) != plans(high):
            last, other = low, high
            while other - last > 1:
                middle = (last + other) // 2
                if plans(middle) == plans(low):
                    last = middle
                else:
                    other = middle
            bounds.append(last)
            low = other
    return [*bounds, most]
