"""apply_commands: records in order, each once, whatever they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import round as reference

INT = torch.int32
R, M, B, DEPTH = 5, 3, 4, 3  # slots, stop tokens, most rows, records


def state_of(device: torch.device | str = "cpu", slots: int = R, stops: int = M) -> dict[str, torch.Tensor]:
    ints = ("seq_lens", "root_tokens", "remaining", "top_k", "stops_from", "num_logprobs", "finish_reasons", "status")
    state = {name: torch.randint(1, 99, (slots,), dtype=INT) for name in ints}
    state["stop_tokens"] = torch.randint(0, 99, (slots, stops), dtype=INT)
    state |= {name: torch.rand(slots) for name in ("temperature", "top_p", "min_p")}
    state["seeds"] = torch.randint(-(2**62), 2**62, (slots,))
    return {name: tensor.to(device) for name, tensor in state.items()}


def record(
    slots: list[int],
    activated: list[int] | None = None,
    given_back: list[int] | None = None,
    sizes: tuple[int, int, int] = (R, M, B),
) -> torch.Tensor:
    """Behind the activations named stand others, which are none."""
    num_slots, stops, batch = sizes
    active, gone = activated or [], given_back or []
    words = torch.full((2 + batch + num_slots * (13 + stops),), -1, dtype=INT)
    words[1] = len(active)
    words[2 : 2 + len(slots)] = torch.tensor(slots, dtype=INT)
    words[2 + batch :][: len(gone)] = torch.tensor(gone, dtype=INT)
    activations = words[2 + batch + num_slots :].view(num_slots, 12 + stops)
    activations[:, 0] = torch.randint(num_slots, (num_slots,))
    activations[: len(active), 0] = torch.tensor(active, dtype=INT)
    activations[:, 1:12] = torch.randint(-(2**31), 2**31, (num_slots, 11))
    for word in (4, 6, 7):  # floats
        activations[:, word] = torch.rand(num_slots).view(INT)
    activations[:, 12:] = torch.randint(-1, 99, (num_slots, stops))
    return words


def counters(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)


def shared(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def expect_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        assert torch.equal(got[name].cpu(), tensor), name


@pytest.mark.sanitize
@pytest.mark.parametrize(("slots", "stops", "batch"), [(R, M, B), (1, 0, 1), (300, 70, 300)])
def test_records_in_order(device: torch.device, slots: int, stops: int, batch: int) -> None:
    """Round the ring and on; rows are free once they are applied."""
    sizes = (slots, stops, batch)
    want = state_of(slots=slots, stops=stops)
    got = {name: tensor.to(device) for name, tensor in want.items()}
    commands = shared(torch.stack([record([], sizes=sizes)] * DEPTH), device)
    num_applied, started_at = counters(device)
    count = torch.zeros(1, dtype=torch.int64)
    for number in range(2 * DEPTH + 1):
        named = torch.randperm(slots)[: torch.randint(0, batch + 1, ())].tolist()
        gone = torch.randperm(slots)[: torch.randint(0, slots + 1, ())].tolist()
        active = torch.randperm(slots)[: torch.randint(0, slots + 1, ())].tolist()
        commands[number % DEPTH] = record(named, active, gone, sizes)
        host = commands.clone()
        outputs = sd.apply_commands(commands, num_applied, started_at, **got)
        expected = reference.apply_commands(host, count, want)
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a.cpu(), b)
        expect_same(got, want)
        assert int(num_applied) == number + 1 == int(commands[number % DEPTH, 0])
        assert torch.equal(commands[:, 1:], host[:, 1:])


def test_a_slot_given_back_and_activated_at_once(device: torch.device) -> None:
    state = state_of(device)
    commands = shared(record([2], [2], [2])[None].clone(), device)
    seq_len = int(commands[0, 2 + B + R + 1])
    sd.apply_commands(commands, *counters(device), **state)
    assert int(state["seq_lens"][2]) == seq_len and int(state["status"][2]) == 0


def test_status_survives_activation(device: torch.device) -> None:
    """Prefill may have set it."""
    state = state_of(device)
    state["status"][1] = sd.Status.BAD_LENGTH
    before = state["status"].clone()
    sd.apply_commands(shared(record([1], [1])[None].clone(), device), *counters(device), **state)
    assert torch.equal(state["status"], before) and int(state["finish_reasons"][1]) == 0


def test_a_slot_without_pages_does_not_start(device: torch.device) -> None:
    """Its prefill was written nowhere, and pages that it gets later would hide that."""
    state = state_of(device)
    state["status"][1] = sd.Status.STALLED
    sd.apply_commands(shared(record([1], [1])[None].clone(), device), *counters(device), **state)
    assert int(state["status"][1]) == sd.Status.STALLED | sd.Status.BAD_PAGE


@pytest.mark.parametrize("bad", [R, -2, 2**31 - 1, -(2**31)])
def test_slots_out_of_range_change_nothing(device: torch.device, bad: int) -> None:
    state = state_of(device)
    before = {name: tensor.cpu().clone() for name, tensor in state.items()}
    slots, given_back = sd.apply_commands(
        shared(record([bad], [bad], [bad])[None].clone(), device), *counters(device), **state
    )
    expect_same(state, before)
    assert int(slots[0]) == int(given_back[0]) == bad


@pytest.mark.parametrize("count", [-(2**31), -1, 0, R + 1, 2**31 - 1])
def test_any_count_of_activations(device: torch.device, count: int) -> None:
    """As many as there is room for, or none."""
    want = state_of()
    got = {name: tensor.to(device) for name, tensor in want.items()}
    words = record([], [3, 1, -5, 0, 2])
    words[1] = count
    commands = shared(words[None].clone(), device)
    reference.apply_commands(words[None].clone(), torch.zeros(1, dtype=torch.int64), want)
    sd.apply_commands(commands, *counters(device), **got)
    expect_same(got, want)


def test_any_count_names_a_record(device: torch.device) -> None:
    state = state_of(device)
    num_applied, started_at = counters(device)
    for count in (-1, -(2**63), 2**63 - 1, 2**31 - 1):
        num_applied.fill_(count)
        commands = shared(torch.stack([record([3])] * DEPTH), device)
        slots, _ = sd.apply_commands(commands, num_applied, started_at, **state)
        assert slots.tolist() == [3, -1, -1, -1]
        assert int(commands[count % 2**64 % DEPTH, 0]) == ((count + 1 + 2**31) % 2**32) - 2**31


def test_the_clock_goes_forward(device: torch.device) -> None:
    state, (num_applied, started_at) = state_of(device), counters(device)
    commands = shared(torch.stack([record([])] * DEPTH), device)
    times = []
    for _ in range(3):
        sd.apply_commands(commands, num_applied, started_at, **state)
        times.append(int(started_at))
    assert 0 < times[0] <= times[1] <= times[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commands": torch.zeros(2, 85, dtype=INT), "out_slots": torch.zeros(4, dtype=INT)}, "apply_commands: commands has shape [2, 85], expected [depth, words=86]"),
        ({"commands": torch.zeros(0, 86, dtype=INT)}, "apply_commands: depth is 0, expected 1 to 2147483647"),
        ({"commands": torch.zeros(2, 86)}, "apply_commands: commands is float32, expected int32"),
        ({"seeds": torch.zeros(5, dtype=INT)}, "apply_commands: seeds is int32, expected int64"),
        ({"status": torch.zeros(4, dtype=INT)}, "apply_commands: status has shape [4], expected [num_slots=5]"),
        ({"num_applied": torch.zeros(1, dtype=INT)}, "apply_commands: num_applied is int32, expected int64"),
    ],
    ids=["words", "depth", "dtype", "seeds", "status", "counter"],
)  # fmt: skip
def test_messages(change: dict[str, Any], message: str) -> None:
    num_applied, started_at = counters(torch.device("cpu"))
    arguments = {"commands": record([])[None], "num_applied": num_applied, "started_at": started_at, **state_of()}
    with pytest.raises(ValueError) as error:
        sd.apply_commands(**(arguments | change))
    assert str(error.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_what_the_device_cannot_reach() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="apply_commands: commands is not pinned, expected a pinned or cuda tensor"):
        sd.apply_commands(record([])[None], *counters(cuda), **state_of(cuda))
    with pytest.raises(ValueError, match="apply_commands: commands is on cuda, expected a cpu tensor like num_applied"):
        sd.apply_commands(record([])[None].cuda(), *counters(torch.device("cpu")), **state_of())
