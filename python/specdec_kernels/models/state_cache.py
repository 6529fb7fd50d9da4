"""The recurrent state of layers that keep one for each sequence instead of KV rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import PendingPaths, RecurrentRecords, commit_conv1d, commit_recurrence, set_pending_paths

MOST_TREE_NODES = 64  # that a pass over recurrent layers takes of a request


@dataclass(frozen=True)
class ConvSpec:
    """A causal convolution over the tokens, whose last inputs a layer keeps."""

    channels: int
    width: int  # taps, the row's own included
    dtype: torch.dtype  # of the inputs


@dataclass(frozen=True)
class RecurrenceSpec:
    """A linear recurrence, whose matrices a layer keeps in float32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decays_by_channel: bool = False  # one decay for each element of a key, not one for each head

    @property
    def largest_dim(self) -> int:
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class StateSpec:
    """The state that a layer keeps of each sequence, of any length."""

    conv: ConvSpec
    recurrence: RecurrenceSpec | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of a sequence's state."""
        window = (self.conv.width - 1) * self.conv.channels * self.conv.dtype.itemsize
        each = self.recurrence
        return window + (0 if each is None else 4 * each.value_heads * each.value_dim * each.key_dim)


class LayerState(NamedTuple):
    """The state of one layer in all slots, and what it recorded of the last two trees.

    Tensors of the recurrence are None in a layer without one.
    """

    window: Tensor  # [num_slots, width - 1, channels], the last committed inputs, oldest first
    inputs: Tensor  # [2, num_slots, N, channels], the inputs of the nodes
    state: Tensor | None  # [num_slots, value_heads, value_dim, key_dim] float32, after the committed tokens
    records: RecurrentRecords | None
    paths: PendingPaths  # of all layers


@dataclass(frozen=True)
class StateCache:
    """The recurrent states of a model's layers, for each slot.

    A slot has one committed state, whatever its trees look like. A pass over a tree records a little of each node; of
    these records the next pass adds those of the accepted path to the state, in the kernel that reads it anyway. Until
    then the path is *pending*. A pass without a mask (a prompt) changes the states at once.

    Each pass over a tree must be followed by one `move`: the pass has added the pending path to the state, and another
    pass would add it again.

    `snapshots` are copies of committed states that no slot reads or writes, for the prefix cache.
    """

    specs: tuple[StateSpec, ...]
    layers: tuple[LayerState, ...]
    paths: PendingPaths
    snapshots: Mapping[str, Tensor]  # [num_snapshots, ...], as `kept`

    @classmethod
    def allocate(
        cls,
        specs: Sequence[StateSpec],
        num_slots: int,
        max_nodes: int,
        path_width: int,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> StateCache:
        """Return states for a layer of each of these specs.

        Args:
            specs: of the layers.
            num_slots: sequences.
            max_nodes: of a request's tree.
            path_width: of accepted paths.
            device: of all tensors.
            num_snapshots: states that can be kept next to those of the slots.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        paths = PendingPaths(
            nodes=zeros(num_slots, path_width, dtype=torch.int32),
            num_nodes=zeros(num_slots, dtype=torch.int32),
            parity=zeros(num_slots, dtype=torch.int32),
        )

        def layer(spec: StateSpec) -> LayerState:
            conv, each = spec.conv, spec.recurrence
            window = zeros(num_slots, conv.width - 1, conv.channels, dtype=conv.dtype)
            inputs = zeros(2, num_slots, max_nodes, conv.channels, dtype=conv.dtype)
            if each is None:
                return LayerState(window, inputs, None, None, paths)
            nodes = 2, num_slots, max_nodes
            decays = (each.value_heads, each.key_dim) if each.decays_by_channel else (each.value_heads,)
            records = RecurrentRecords(
                k=zeros(*nodes, each.key_heads, each.key_dim),
                u=zeros(*nodes, each.value_heads, each.value_dim),
                g=zeros(*nodes, *decays),
            )
            state = zeros(num_slots, each.value_heads, each.value_dim, each.key_dim)
            return LayerState(window, inputs, state, records, paths)

        layers = tuple(map(layer, specs))
        snapshots = {
            name: zeros(num_snapshots, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in kept_of(layers).items()
        }
        return cls(tuple(specs), layers, paths, snapshots)

    def with_slots(self, num_slots: int, num_snapshots: int = 0) -> StateCache:
        """Return states for the same layers and trees, with other numbers of slots and of snapshots."""
        max_nodes, path_width = self.layers[0].inputs.shape[2], self.paths.nodes.shape[1]
        return self.allocate(self.specs, num_slots, max_nodes, path_width, self.paths.nodes.device, num_snapshots)

    @property
    def num_slots(self) -> int:
        return len(self.paths.num_nodes)

    @property
    def num_snapshots(self) -> int:
        return len(next(iter(self.snapshots.values())))

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, records and snapshots."""
        of_slots = (tensor for layer in self.layers for tensor in tensors_of(layer))
        return sum(tensor.nbytes for tensor in (*of_slots, *self.snapshots.values()))

    def begin(self, slot: int) -> None:
        """Drop the path that a slot's last request left pending; its first pass starts from zeros."""
        self.paths.num_nodes[slot] = 0

    def move(self, path: Tensor, num_valid: Tensor, *, slots: Tensor, status: Tensor) -> None:
        """Make the accepted path of each request's tree its pending path, in one launch for all layers.

        Args:
            path: [B, L] int32, the accepted nodes in order.
            num_valid: [B] int32, how many there are; of 0 nodes nothing is committed.
            slots: [B] int32.
            status: [num_slots] int32; a stalled slot keeps its pending path, since its pass was skipped.
        """
        set_pending_paths(self.paths, path, num_valid, slots=slots, status=status)

    def settle(self, slots: Tensor) -> None:
        """Add the pending paths of these slots [B] to their states, so that the states are those of all tokens."""
        for layer in self.layers:
            commit_conv1d(layer.window, layer.inputs, layer.paths, slots=slots)
            if layer.state is not None and layer.records is not None:
                commit_recurrence(layer.state, layer.records, layer.paths, slots=slots)
        self.paths.num_nodes[slots.long()] = 0

    def save(self, slot: int) -> dict[str, Tensor]:
        """Return a copy of a slot's state after its committed tokens, as tensors by layer and name."""
        self.settle(torch.tensor([slot], dtype=torch.int32, device=self.paths.nodes.device))
        return {name: tensor[slot].clone() for name, tensor in self.kept.items()}

    def restore(self, slot: int | Tensor, saved: Mapping[str, Tensor]) -> None:
        """Make a saved state the slot's; the slot may be a tensor [1]."""
        self.paths.num_nodes[slot] = 0
        for name, tensor in self.kept.items():
            tensor[slot] = saved[name]

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy the state of a slot that has no pending path to a snapshot: one that a prompt's pass has left."""
        for name, tensor in self.kept.items():
            self.snapshots[name][snapshot] = tensor[slot]

    def restore_snapshot(self, slot: int, snapshot: int) -> None:
        """Make a snapshot the slot's state."""
        self.restore(slot, {name: tensor[snapshot] for name, tensor in self.snapshots.items()})

    def fork(self, source: int, target: int) -> None:
        """Copy a slot's state to another slot, which then shares nothing with it."""
        self.restore(target, self.save(source))

    @property
    def kept(self) -> dict[str, Tensor]:
        """The tensors [num_slots, ...] that are a slot's state once it is settled, by layer and name."""
        return kept_of(self.layers)


def kept_of(layers: Sequence[LayerState]) -> dict[str, Tensor]:
    """Return the tensors that are the settled states of these layers, by layer and name."""
    each = {
        f"{index}.{name}": getattr(layer, name) for index, layer in enumerate(layers) for name in ("window", "state")
    }
    return {name: tensor for name, tensor in each.items() if tensor is not None}


def tensors_of(layer: LayerState) -> list[Tensor]:
    """Return the tensors that a layer does not share with others."""
    return [each for each in (layer.window, layer.inputs, layer.state, *(layer.records or ())) if each is not None]


def bytes_of(spec: StateSpec, num_slots: int, max_nodes: int) -> int:
    """Return the bytes that a layer of this spec takes."""
    conv, each = spec.conv, spec.recurrence
    total = conv.channels * conv.dtype.itemsize * (conv.width - 1 + 2 * max_nodes)
    if each is not None:
        keys, values = each.key_heads * each.key_dim, each.value_heads * each.value_dim
        decays = each.value_heads * (each.key_dim if each.decays_by_channel else 1)
        total += 4 * (values * each.key_dim + 2 * max_nodes * (keys + values + decays))
    return num_slots * total
