"""Cases of the round's first and last op, on rings in pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.engine.config import budget_levels
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.reference import round as reference

from ..check import bytes_of, expect_equal
from ..harness import Case, Params, Work

MAX_STOPS = 16
WIDTH, NODES = 6, 32  # tokens of a row, nodes of its tree


def random_state(batch: int, device: torch.device) -> sd.SlotState:
    state = sd.make_slot_state(batch, 4096, MAX_STOPS, like=torch.empty(0, device=device))
    for tensor in state:
        tensor.copy_(torch.randint(0, 3, tensor.shape))
    return state


def on_cpu(state: sd.SlotState) -> sd.SlotState:
    return sd.SlotState(*(tensor.cpu().clone() for tensor in state))


def rings_of(state: sd.SlotState, num_levels: int = 0) -> Rings:
    return Rings.create(
        state, max_batch=len(state.seq_lens), accept_width=WIDTH, num_levels=num_levels, top_n=-1, depth=1
    )


def apply_commands(device: torch.device, p: Params) -> Work:
    """Apply the commands of a steady round: slots only."""
    state = random_state(p["batch"], device)
    rings = rings_of(state)
    rings.commands[0, 2 : 2 + p["batch"]] = torch.randperm(p["batch"])
    before = on_cpu(state)

    def check() -> None:
        want = reference.apply_commands(rings.commands.clone(), torch.zeros(1, dtype=torch.int64), before)
        for name, got, expected in zip(("slots", "given_back"), (rings.slots, rings.given_back), want, strict=True):
            expect_equal(name, got, expected)
        for name, got, expected in zip(state._fields, state, before, strict=True):
            expect_equal(name, got, expected)

    # The part of the record that activates no slot.
    return Work(lambda: rings.apply_commands(state), check, 2 * bytes_of(rings.slots, rings.given_back))


def publish_results(device: torch.device, p: Params) -> Work:
    batch = p["batch"]

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, device=device)

    accepted = sd.Accepted(ints(0, 32000, batch, WIDTH), ints(1, WIDTH + 1, batch), ints(0, 32, batch, WIDTH))
    num_nodes, state = ints(1, 33, batch), random_state(batch, device)
    slots = torch.randperm(batch, device=device).int()
    levels = torch.tensor(budget_levels(batch, NODES), dtype=torch.int32, device=device)
    level_limits = 2 * levels // batch
    node_scores = -torch.rand(batch, NODES, device=device).cumsum(1)
    allocation = sd.allocate_nodes(node_scores, batch * 8, budget_levels=levels, level_limits=level_limits)
    compared = {"level_limits": level_limits, "node_scores": node_scores, "cuts": allocation.cuts}
    rings = rings_of(state, len(levels))

    def check() -> None:
        want = rings.results.clone()
        there = sd.Accepted(*(tensor.cpu() for tensor in accepted))
        of_levels = {name: tensor.cpu() for name, tensor in compared.items()}
        count = torch.zeros(1, dtype=torch.int64)
        reference.publish_results(want, count, there, num_nodes.cpu(), on_cpu(state), slots.cpu(), **of_levels)
        expect_equal("results", rings.results[:, 8 + len(levels) :], want[:, 8 + len(levels) :])

    return Work(
        lambda: rings.publish_results(accepted, num_nodes, state, slots=slots, **compared),
        check,
        bytes_of(rings.results, *accepted, num_nodes, state.finish_reasons, state.status, slots, node_scores),
    )


CASES = [
    Case("apply_commands", grid={"batch": (1, 8, 64, 256)}, make=apply_commands),
    Case("publish_results", grid={"batch": (1, 8, 64, 256)}, make=publish_results),
]
