"""Cases of the round's first and last op, on rings in pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import round as reference

from ..compare import bytes_of, expect_equal
from ..harness import Case, Params, Work

MAX_STOPS = 16
WIDTH = 6  # tokens of a row: chains of five drafts


def ring(words: int, device: torch.device) -> Tensor:
    return torch.full((1, words), -1, dtype=torch.int32, pin_memory=device.type == "cuda")


def counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def apply_commands(device: torch.device, p: Params) -> Work:
    """A steady round: slots, and nothing else."""
    batch = p["batch"]
    state = {
        name: torch.randint(0, 99, (batch,), dtype=torch.int32, device=device)
        for name in (
            "seq_lens",
            "root_tokens",
            "remaining",
            "top_k",
            "stops_from",
            "num_logprobs",
            "finish_reasons",
            "status",
        )
    }
    state["stop_tokens"] = torch.randint(0, 99, (batch, MAX_STOPS), dtype=torch.int32, device=device)
    state |= {name: torch.rand(batch, device=device) for name in ("temperature", "top_p", "min_p")}
    state["seeds"] = torch.randint(0, 2**62, (batch,), device=device)
    commands = ring(2 + batch + batch * (13 + MAX_STOPS), device)
    commands[0, 2 : 2 + batch] = torch.randperm(batch)
    num_applied, started_at = counter(device), counter(device)
    outputs = {
        name: torch.full((batch,), -7, dtype=torch.int32, device=device) for name in ("out_slots", "out_given_back")
    }
    before = {name: tensor.cpu().clone() for name, tensor in state.items()}

    def check() -> None:
        want = reference.apply_commands(commands.clone(), torch.zeros(1, dtype=torch.int64), before)
        for (name, got), expected in zip(outputs.items(), want, strict=True):
            expect_equal(name, got, expected)
        for name, expected in before.items():
            expect_equal(name, state[name], expected)

    call = lambda: sd.apply_commands(commands, num_applied, started_at, **state, **outputs)  # noqa: E731
    return Work(call, check, 2 * bytes_of(*outputs.values()))  # of the record, what says that nobody is activated


def publish_results(device: torch.device, p: Params) -> Work:
    batch = p["batch"]
    given = {
        "out_tokens": torch.randint(0, 32000, (batch, WIDTH), dtype=torch.int32, device=device),
        "out_len": torch.randint(1, WIDTH + 1, (batch,), dtype=torch.int32, device=device),
        "out_path": torch.randint(0, 32, (batch, WIDTH), dtype=torch.int32, device=device),
        "num_nodes": torch.randint(1, 33, (batch,), dtype=torch.int32, device=device),
        "finish_reasons": torch.randint(0, 3, (batch,), dtype=torch.int32, device=device),
        "status": torch.randint(0, 3, (batch,), dtype=torch.int32, device=device),
        "slots": torch.randperm(batch, device=device).int(),
    }
    results = ring(8 + batch * (4 + 2 * WIDTH), device)
    num_published, started_at = counter(device), counter(device)

    def check() -> None:
        host = {name: tensor.cpu() for name, tensor in given.items()}
        want = results.clone()
        reference.publish_results(want, torch.zeros(1, dtype=torch.int64), **host)
        expect_equal("results", results[:, 8:], want[:, 8:])

    call = lambda: sd.publish_results(results, num_published, started_at, **given)  # noqa: E731
    return Work(call, check, bytes_of(results, *given.values()))


CASES = [
    Case("apply_commands", grid={"batch": (1, 8, 64, 256)}, make=apply_commands),
    Case("publish_results", grid={"batch": (1, 8, 64, 256)}, make=publish_results),
]
