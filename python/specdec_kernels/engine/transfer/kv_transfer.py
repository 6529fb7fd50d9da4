"""KV rows and states of one request, packed into tensors by one engine and unpacked into the pools of another.

Rows are transferred, not pages: the pages of the two engines may differ in size and place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.kv_pools import KvGroup, KvPools
from ...models.language_model import LanguageModel
from ...ops import PagePool
from ..device.state import EngineState
from ..drafts import Draft
from ..drafts.composition import catch_up, pools_of, save_slot

SLOT_PREFIX = "slot."  # of the names of tensors that the draft keeps for a slot
STATE_PREFIX = "state."  # of those that the target's recurrent layers keep


class Group(NamedTuple):
    """Layers of the target or the draft whose rows are one tensor of keys and one of values."""

    name: str  # of these tensors, without the suffix of the pool, .k or .v
    kv: KvGroup
    num_rows: int  # of the request


class MigratedKv:
    """KV rows and states that a request brings to the first slot that it gets in an engine.

    Args:
        tensors: as `pack_slot` gives them, on the engine's device.
        first_rows: by name of the group, the first row that its tensors have.
        stream: of the engine, which reads the tensors.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int], stream: torch.cuda.Stream | None
    ) -> None:
        record_stream(stream, tensors)
        self._tensors: Mapping[str, Tensor] | None = tensors
        self._first_rows = first_rows

    def unpack(
        self, state: EngineState, target: LanguageModel, draft: Draft, slot: Tensor, chunk: int, num_rows: int
    ) -> dict[str, Tensor] | None:
        """Write the rows to the slot's pages, and the recurrent state to the slot's, once.

        Args:
            state: the engine's tensors of all slots.
            target: the target.
            draft: whose pools have rows too.
            slot: [1] int32.
            chunk: rows at a time, for pools that give back pages below a sliding window.
            num_rows: rows of the request in the target.

        Returns:
            The tensors for `restore_slot` when the slot is activated, by name. None if the rows were written before: a
            request that comes back from the queue is prefilled like any other.
        """
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            return None
        target_groups, draft_groups = groups_of(target.pools, draft, num_rows)
        if target.states is not None:
            target.states.restore(slot.long(), named(tensors, STATE_PREFIX))
        for begin in range(0, num_rows, chunk):
            end = min(begin + chunk, num_rows)
            ends = torch.full_like(slot, end)
            state.make_room_for_chunks(slot, ends)
            for group in target_groups:
                self._write(tensors, group, state, slot, begin, end)
            state.seq_lens[slot] = ends
            state.free_behind(slot)
        for group in draft_groups:
            self._write(tensors, group, state, slot, 0, group.num_rows)
        return named(tensors, SLOT_PREFIX)

    def _write(
        self, tensors: Mapping[str, Tensor], group: Group, state: EngineState, slot: Tensor, begin: int, end: int
    ) -> None:
        """Write rows `begin` to `end` of a group, except leading rows that its tensors do not have."""
        first = self._first_rows.get(group.name, 0)
        start = max(begin, first)
        if start >= end:
            return
        table = pool_of(state, group.kv.window).page_table
        layout = group.kv.layout
        rows = [tensors[f"{group.name}.{part}"][:, start - first : end - first] for part in layout.row_shapes]
        for index in range(len(group.kv.layers)):
            layout.write(
                group.kv.layer(index, layout.unit_scales),
                [part[index][None] for part in rows],
                page_table=table,
                prefix_lens=state.no_rows,
                row_offset=start,
                slots=slot,
                status=state.status,
            )


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def pack_slot(
    state: EngineState, target: LanguageModel, draft: Draft, slot: int, num_rows: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Copy what a slot with `num_rows` target rows keeps. Waits for the device.

    These are the KV rows, the recurrent state of the target, and the draft's state.

    Returns:
        Tensors by name, rows as [layers, rows, heads, dim] in the pools' dtype; and by name of the group the first row
        in its tensors, above 0 where earlier pages were given back.
    """
    with torch.inference_mode():
        if draft.context.catches_up:
            catch_up(draft, torch.tensor([slot], dtype=torch.int32, device=state.seq_lens.device))
    tensors: dict[str, Tensor] = {}
    first_rows: dict[str, int] = {}
    target_groups, draft_groups = groups_of(target.pools, draft, num_rows)
    for name, group, count in target_groups + draft_groups:
        pool = pool_of(state, group.window)
        page_size, begin = pool.page_size, int(pool.page_starts[slot])
        pages = pool.page_table[slot, begin : -(-count // page_size)].long()
        first_rows[name] = first = begin * page_size
        for part, kv in group.named_pools.items():
            tensors[f"{name}.{part}"] = kv[:, pages].flatten(1, 2)[:, : count - first].contiguous()
    if target.states is not None:
        tensors |= {f"{STATE_PREFIX}{name}": tensor for name, tensor in target.states.save(slot).items()}
    kept = save_slot(draft, slot).items()
    return tensors | {f"{SLOT_PREFIX}{name}": tensor.clone() for name, tensor in kept}, first_rows


def groups_of(target: KvPools, draft: Draft, num_rows: int) -> tuple[list[Group], list[Group]]:
    """Return the groups of the target, with `num_rows` rows, and of the draft, which has one row more."""
    draft_groups = [
        Group(f"draft.{part}.{number}", group, num_rows + 1)
        for part, pools in enumerate(pools_of(draft))
        for number, group in enumerate(pools.groups)
    ]
    return [Group(f"target.{number}", group, num_rows) for number, group in enumerate(target.groups)], draft_groups


def pool_of(state: EngineState, window: int | None) -> PagePool:
    """Return the pages of groups whose page table is that of this window; None: the table of all other groups."""
    return state.pool if window is None else state.window_pools[window]


def state_layout(target: LanguageModel) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of each tensor that the target's recurrent layers keep of a request, by name."""
    kept = {} if target.states is None else target.states.kept
    return {f"{STATE_PREFIX}{name}": (list(tensor.shape[1:]), tensor.dtype) for name, tensor in kept.items()}


def layout_of(target: LanguageModel, draft: Draft) -> dict[str, Any]:
    """Return the layout of a request's tensors in this engine as JSON values."""

    def of_pools(pools: KvPools) -> list[Any]:
        return [
            [*astuple(group.layout), list(group.layers), str(pools.dtype), [list(scales) for scales in group.scales]]
            for group in pools.groups
        ]

    kept = save_slot(draft, 0)
    states = {name: [str(dtype), *shape] for name, (shape, dtype) in state_layout(target).items()}
    return ({"recurrent state": states} if states else {}) | {
        "kv": of_pools(target.pools),
        "kv of the draft": [of_pools(pools) for pools in pools_of(draft)],
        "state of the draft": {name: [str(t.dtype), *t.shape] for name, t in sorted(kept.items())},
    }


def record_stream(stream: torch.cuda.Stream | None, tensors: Mapping[str, Tensor]) -> None:
    """Keep the memory of tensors allocated on another stream until this stream has read them."""
    if stream is not None:
        for tensor in tensors.values():
            tensor.record_stream(stream)
