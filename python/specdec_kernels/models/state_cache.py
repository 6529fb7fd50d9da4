"""The recurrent state of layers that keep one for each sequence instead of KV rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """The tensors that a layer keeps for each sequence, whatever its length."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class LayerState(NamedTuple):
    """The state of one layer in all slots, one tensor for each shape of its spec."""

    committed: tuple[Tensor, ...]  # [num_slots, *shape], after each slot's committed tokens
    nodes: tuple[Tensor, ...]  # [num_slots, max_nodes, *shape], after each node of the slot's last tree


Snapshot = tuple[tuple[Tensor, ...], ...]  # copies of a slot's committed state in all layers


@dataclass(frozen=True)
class StateCache:
    """The recurrent states of a model's layers, for each slot.

    A pass without a mask (a prompt) changes committed states. A pass over a tree writes the state after each node, and
    `move` commits the one after the last accepted node.
    """

    layers: tuple[LayerState, ...]

    @classmethod
    def allocate(cls, specs: Sequence[StateSpec], num_slots: int, max_nodes: int, device: torch.device) -> StateCache:
        """Return states of zeros for a layer of each of these specs."""

        def zeros(spec: StateSpec, *sizes: int) -> tuple[Tensor, ...]:
            pairs = zip(spec.shapes, spec.dtypes, strict=True)
            return tuple(torch.zeros(*sizes, *shape, dtype=dtype, device=device) for shape, dtype in pairs)

        return cls(tuple(LayerState(zeros(spec, num_slots), zeros(spec, num_slots, max_nodes)) for spec in specs))

    def save(self, slot: int) -> Snapshot:
        """Return a copy of a slot's committed state."""
        return tuple(tuple(state[slot].clone() for state in layer.committed) for layer in self.layers)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Make a saved state the slot's committed one."""
        for layer, saved in zip(self.layers, snapshot, strict=True):
            for state, value in zip(layer.committed, saved, strict=True):
                state[slot] = value

    def fork(self, source: int, target: int) -> None:
        """Copy a slot's committed state to another slot, which then shares nothing with it."""
        self.restore(target, self.save(source))

    def move(self, path: Tensor, num_valid: Tensor, slots: Tensor) -> None:
        """Commit the state after the last accepted node of each request; without accepted nodes the state stays.

        Args:
            path: [B, L] int32, the accepted nodes in order.
            num_valid: [B] int32, how many there are.
            slots: [B] int32.
        """
        slots = slots.long()
        last = path.gather(1, (num_valid.long() - 1).clamp(min=0)[:, None])[:, 0].long().clamp(min=0)
        for layer in self.layers:
            for state, nodes in zip(layer.committed, layer.nodes, strict=True):
                keep = (num_valid <= 0).view(-1, *[1] * (state.dim() - 1))
                state[slots] = torch.where(keep, state[slots], nodes[slots, last])
