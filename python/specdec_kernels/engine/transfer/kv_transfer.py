"""KV rows and states of one request, packed into tensors by one engine and unpacked into the pools of another.

Rows are transferred, not pages: the pages of the two engines may differ in size and place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...models.cache_division import CacheDivision, DividedDim
from ...models.kv_pools import KvGroup, KvPools
from ...models.language_model import LanguageModel
from ...ops import PagePool
from ..device.state import EngineState
from ..drafts import Draft
from ..drafts.composition import catch_up, pools_of, save_slot

SLOT_PREFIX = "slot."  # of the names of tensors that the draft keeps for a slot
STATE_PREFIX = "state."  # of those that the target's recurrent layers keep

Value = TypeVar("Value")


class Group(NamedTuple):
    """Layers of the target or the draft whose rows are one tensor of keys and one of values."""

    name: str  # of these tensors, without the suffix of the pool, .k or .v
    kv: KvGroup
    num_rows: int  # of the request
    caches: CacheDivision | None  # of the target, if ranks divide it


class TensorSpec(NamedTuple):
    """A tensor of a request: as a whole, and on this rank.

    Attributes:
        shape: of the whole tensor.
        like: a tensor of this dtype and device.
        divided: the dimension that ranks divide; None: there are no other ranks, or all have the same tensor.
        by_layer: whether the first dimension is layers, which ranks exchange one by one.
    """

    shape: list[int]
    like: Tensor
    divided: DividedDim | None
    by_layer: bool = False

    @classmethod
    def of(cls, own: Sequence[int], like: Tensor, divided: DividedDim | None, *, by_layer: bool = False) -> TensorSpec:
        """Return the spec of a tensor that has the shape `own` on this rank."""
        return cls(list(own) if divided is None else divided.whole_shape(own), like, divided, by_layer)

    def gathered(self, own: Tensor, caches: CacheDivision) -> Tensor | None:
        """Return the whole tensor on rank 0, of all ranks' parts (`CacheDivision.gather`)."""
        if not self.by_layer:
            return caches.gather(own, self.divided)
        layers = [caches.gather(layer, self.divided) for layer in own]
        return None if caches.shard.rank else torch.stack([layer for layer in layers if layer is not None])

    def received(self, whole: Tensor | None, caches: CacheDivision) -> Tensor:
        """Return this rank's part of a tensor that rank 0 has (`CacheDivision.scatter`)."""
        if not self.by_layer:
            return caches.scatter(whole, self.shape, self.like, self.divided)
        layers: Sequence[Tensor | None] = [None] * self.shape[0] if whole is None else whole.unbind()
        return torch.stack([caches.scatter(layer, self.shape[1:], self.like, self.divided) for layer in layers])


class MigratedKv:
    """KV rows and states that a request brings to the first slot that it gets in an engine.

    Args:
        tensors: as `pack_slot` gives them, on the engine's device; None on ranks other than 0.
        first_rows: by name of the group, the first row that its tensors have.
        stream: of the engine, which reads the tensors.

    Attributes:
        first_rows: as given.
        is_pending: whether the rows have not been written.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor] | None, first_rows: Mapping[str, int], stream: torch.cuda.Stream | None
    ) -> None:
        record_stream(stream, tensors or {})
        self._tensors = tensors
        self.first_rows, self.is_pending = first_rows, True

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
        if not self.is_pending:
            return None
        given, self._tensors, self.is_pending = self._tensors, None, False
        if target.caches is not None:
            specs = specs_of(target, draft, num_rows, self.first_rows)
            tensors: Mapping[str, Tensor] = {
                name: spec.received(None if given is None else given[name], target.caches)
                for name, spec in specs.items()
            }
        else:
            assert given is not None
            tensors = given
        target_groups, draft_groups = groups_of(target, draft, num_rows)
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
        first = self.first_rows.get(group.name, 0)
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


def named(values: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the values whose names begin with a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


@torch.no_grad()
def pack_slot(
    state: EngineState, target: LanguageModel, draft: Draft, slot: int, num_rows: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Copy what a slot with `num_rows` target rows keeps. Waits for the device.

    These are the KV rows, the recurrent state of the target, and the draft's state. Ranks call it together, and get
    the tensors of the whole model on rank 0, and none on the others.

    Returns:
        Tensors by name, rows as [layers, rows, heads, dim] in the pools' dtype; and by name of the group the first row
        in its tensors, above 0 where earlier pages were given back.
    """
    with torch.inference_mode():
        if draft.context.catches_up:
            catch_up(draft, torch.tensor([slot], dtype=torch.int32, device=state.seq_lens.device))
    tensors: dict[str, Tensor] = {}
    first_rows: dict[str, int] = {}
    target_groups, draft_groups = groups_of(target, draft, num_rows)
    for name, group, count, _ in target_groups + draft_groups:
        pool = pool_of(state, group.window)
        page_size, begin = pool.page_size, int(pool.page_starts[slot])
        pages = pool.page_table[slot, begin : -(-count // page_size)].long()
        first_rows[name] = first = begin * page_size
        for part, kv in group.named_pools.items():
            tensors[f"{name}.{part}"] = kv[:, pages].flatten(1, 2)[:, : count - first].contiguous()
    if target.states is not None:
        tensors |= {f"{STATE_PREFIX}{name}": tensor for name, tensor in target.states.save(slot).items()}
    tensors |= {f"{SLOT_PREFIX}{name}": tensor.clone() for name, tensor in save_slot(draft, slot).items()}
    if target.caches is not None:
        specs = specs_of(target, draft, num_rows, first_rows)
        wholes = {name: spec.gathered(tensors.pop(name), target.caches) for name, spec in specs.items()}
        tensors = {name: whole for name, whole in wholes.items() if whole is not None}
    return tensors, first_rows


def groups_of(target: LanguageModel, draft: Draft, num_rows: int) -> tuple[list[Group], list[Group]]:
    """Return the groups of the target, with `num_rows` rows, and of the draft, which has one row more."""
    draft_groups = [
        Group(f"draft.{part}.{number}", group, num_rows + 1, None)
        for part, pools in enumerate(pools_of(draft))
        for number, group in enumerate(pools.groups)
    ]
    target_groups = [
        Group(f"target.{number}", group, num_rows, target.caches) for number, group in enumerate(target.pools.groups)
    ]
    return target_groups, draft_groups


def specs_of(
    target: LanguageModel, draft: Draft, num_rows: int, first_rows: Mapping[str, int]
) -> dict[str, TensorSpec]:
    """Return the tensors of a request with `num_rows` target rows, by name; `first_rows` is as of `pack_slot`."""
    specs: dict[str, TensorSpec] = {}
    target_groups, draft_groups = groups_of(target, draft, num_rows)
    for name, group, count, caches in target_groups + draft_groups:
        divided = None if caches is None else caches.of_rows(group.layout)
        for part, kv in group.named_pools.items():
            own = [len(kv), count - first_rows.get(name, 0), *kv.shape[3:]]
            specs[f"{name}.{part}"] = TensorSpec.of(own, kv, divided, by_layer=True)
    for name, tensor in ({} if target.states is None else target.states.kept).items():
        divided = None if target.caches is None else target.caches.of_state(tensor)
        specs[f"{STATE_PREFIX}{name}"] = TensorSpec.of(tensor.shape[1:], tensor, divided)
    kept = save_slot(draft, 0).items()
    return specs | {f"{SLOT_PREFIX}{name}": TensorSpec.of(tensor.shape, tensor, None) for name, tensor in kept}


def pool_of(state: EngineState, window: int | None) -> PagePool:
    """Return the pages of groups whose page table is that of this window; None: the table of all other groups."""
    return state.pool if window is None else state.window_pools[window]


def layout_of(target: LanguageModel, draft: Draft) -> dict[str, Any]:
    """Return the layout of a request's tensors in this engine as JSON values: those of the whole model."""

    def of_pools(pools: KvPools, caches: CacheDivision | None = None) -> list[Any]:
        return [
            [
                *astuple(group.layout if caches is None else caches.whole(group.layout)),
                list(group.layers),
                str(pools.dtype),
                [list(scales) for scales in group.scales],
            ]
            for group in pools.groups
        ]

    def of_tensors(prefix: str) -> dict[str, Any]:
        return {name: [str(spec.like.dtype), *spec.shape] for name, spec in named(specs, prefix).items()}

    specs = specs_of(target, draft, 0, {})
    states = {f"{STATE_PREFIX}{name}": values for name, values in of_tensors(STATE_PREFIX).items()}
    return ({"recurrent state": states} if states else {}) | {
        "kv": of_pools(target.pools, target.caches),
        "kv of the draft": [of_pools(pools) for pools in pools_of(draft)],
        "state of the draft": dict(sorted(of_tensors(SLOT_PREFIX).items())),
    }


def record_stream(stream: torch.cuda.Stream | None, tensors: Mapping[str, Tensor]) -> None:
    """Keep the memory of tensors allocated on another stream until this stream has read them."""
    if stream is not None:
        for tensor in tensors.values():
            tensor.record_stream(stream)
