"""KV buckets of captured rounds: a graph for each range of KV lengths in which attention runs the same plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...plans import HEAD_DIMS, Gpu, attention_plan, mla_plan
from ..drafts.needs import AttentionCall

MOST_BOUNDS = 4  # of rounds of one batch size and number of rows
# Calls that are rarer than the most frequent one by more than this factor decide no bounds: a head's one layer next to
# the target's many.
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
    """Return increasing bounds of KV rows, the last one `max_kv_len`, that separate KV lengths with different plans.

    At every length up to a bound, and above the one before it, the calls of a round with `num_rows` rows in all and at
    most `most_nodes` nodes of a request run the plans that they run at the bound. Rare calls do not count. If there are
    more than `MOST_BOUNDS`, bounds closest to the next one are dropped.
    """
    most = max(call.per_round for call in calls)
    # Other head sizes have no plan.
    counting = [
        call
        for call in calls
        if FEWEST * call.per_round >= most and (call.latent_dim is not None or call.head_dim in HEAD_DIMS)
    ]

    def plan(call: AttentionCall, length: int) -> str:
        """Return the name of a call's plan for KV of up to `length` rows."""
        q_rows = num_rows if call.q_rows is None else min(call.q_rows, most_nodes)
        in_8_bits = call.in_8_bits or (fp8 and call.follows_kv_dtype)
        if call.latent_dim is not None:
            return mla_plan(
                batch=batch,
                q_rows=q_rows,
                packed=call.q_rows is None,
                q_heads=call.q_heads,
                latent_dim=call.latent_dim,
                rope_dim=call.head_dim - call.latent_dim,
                max_kv_len=length,
                rows="fp8" if in_8_bits else "16-bit",
                tensor_cores=tensor_cores,
                gpu=gpu,
            ).name
        return attention_plan(
            batch=batch,
            q_rows=q_rows,
            packed=call.q_rows is None,
            q_heads=call.q_heads,
            kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            max_kv_len=length,
            page_size=page_size,
            fp8=in_8_bits,
            tensor_cores=tensor_cores,
            gpu=gpu,
        ).name

    def plans(length: int) -> list[str]:
        return [plan(call, length) for call in counting]

    bounds = plan_boundaries(plans, max_kv_len)
    while len(bounds) > MOST_BOUNDS:
        nearest = min(range(len(bounds) - 1), key=lambda i: bounds[i + 1] / bounds[i])
        del bounds[nearest]
    return tuple(bounds)


def plan_boundaries(plans: Callable[[int], list[str]], most: int) -> list[int]:
    """Return the last length of each range with the same plans, and `most`."""
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
