"""apply_commands: records are applied in order, each once, whatever they hold."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.reference import round as reference

INT = torch.int32
R, M, B, DEPTH = 5, 3, 4, 3  # slots, stop tokens, largest batch, records


def state_of(device: torch.device | str = "cpu", slots: int = R, stops: int = M) -> sd.SlotState:
    state = sd.make_slot_state(slots, 99, stops, like=torch.empty(0))
    for tensor in state:
        tensor.copy_(torch.rand(tensor.shape) if tensor.is_floating_point() else torch.randint(1, 99, tensor.shape))
    state.seeds.copy_(torch.randint(-(2**62), 2**62, (slots,)))
    return copied(state, device)


def copied(state: sd.SlotState, device: torch.device | str = "cpu") -> sd.SlotState:
    return sd.SlotState(*(tensor.to(device, copy=True) for tensor in state))


def record(
    slots: list[int],
    activated: list[int] | None = None,
    given_back: list[int] | None = None,
    sizes: tuple[int, int, int] = (R, M, B),
) -> torch.Tensor:
    """Return a record; the entries after the given activations hold garbage, which must be ignored."""
    num_slots, stops, batch = sizes
    active, gone = activated or [], given_back or []
    words = torch.full((2 + batch + num_slots * (14 + stops),), -1, dtype=INT)
    words[1] = len(active)
    words[2 : 2 + len(slots)] = torch.tensor(slots, dtype=INT)
    words[2 + batch :][: len(gone)] = torch.tensor(gone, dtype=INT)
    activations = words[2 + batch + num_slots :].view(num_slots, 13 + stops)
    activations[:, 0] = torch.randint(num_slots, (num_slots,))
    activations[: len(active), 0] = torch.tensor(active, dtype=INT)
    activations[:, 1:13] = torch.randint(-(2**31), 2**31, (num_slots, 12))
    for word in (4, 6, 7):  # floats
        activations[:, word] = torch.rand(num_slots).view(INT)
    activations[:, 13:] = torch.randint(-1, 99, (num_slots, stops))
    return words


def rings_of(records: torch.Tensor, state: sd.SlotState, batch: int = B) -> Rings:
    """Return rings whose commands are the given record or records."""
    records = records if records.ndim == 2 else records[None]
    rings = Rings.create(state, max_batch=batch, accept_width=1, num_levels=0, top_n=-1, depth=len(records))
    rings.commands.copy_(records)
    return rings


def expect_same(got: sd.SlotState, want: sd.SlotState) -> None:
    for name, tensor, expected in zip(want._fields, got, want, strict=True):
        assert torch.equal(tensor.cpu(), expected), name


@pytest.mark.sanitize
@pytest.mark.parametrize(("slots", "stops", "batch"), [(R, M, B), (1, 0, 1), (300, 70, 300), (700, 20, 600)])
def test_apply_commands_applies_records_in_order(device: torch.device, slots: int, stops: int, batch: int) -> None:
    """The ring wraps around; a record's entry is free once the record is applied."""
    sizes = (slots, stops, batch)
    want = state_of(slots=slots, stops=stops)
    got = copied(want, device)
    rings = rings_of(torch.stack([record([], sizes=sizes)] * DEPTH), got, batch)
    count = torch.zeros(1, dtype=torch.int64)
    for number in range(2 * DEPTH + 1):
        named = torch.randperm(slots)[: torch.randint(0, batch + 1, ())].tolist()
        gone = torch.randperm(slots)[: torch.randint(0, slots + 1, ())].tolist()
        active = torch.randperm(slots)[: torch.randint(0, slots + 1, ())].tolist()
        rings.commands[number % DEPTH] = record(named, active, gone, sizes)
        host = rings.commands.clone()
        rings.apply_commands(got)
        expected = reference.apply_commands(host, count, want)
        for a, b in zip((rings.slots, rings.given_back), expected, strict=True):
            assert torch.equal(a.cpu(), b)
        expect_same(got, want)
        assert int(rings.num_applied) == number + 1 == int(rings.commands[number % DEPTH, 0])
        assert torch.equal(rings.commands[:, 1:], host[:, 1:])


@pytest.mark.parametrize(("max_batch", "num_slots", "max_stops", "words"), [(1, 1, 0, 17), (4, 5, 3, 91)])
def test_apply_commands_reads_record_layout(max_batch: int, num_slots: int, max_stops: int, words: int) -> None:
    """The layout of csrc/round/records.h: 2 words, slots, released slots, 13 words and stop tokens per activation."""
    assert (
        _C.command_words(max_batch, num_slots, max_stops)
        == words
        == len(record([], sizes=(num_slots, max_stops, max_batch)))
    )


def test_apply_commands_releases_and_activates_a_slot_in_one_record(device: torch.device) -> None:
    state = state_of(device)
    rings = rings_of(record([2], [2], [2]), state)
    seq_len = int(rings.commands[0, 2 + B + R + 1])
    rings.apply_commands(state)
    assert int(state.seq_lens[2]) == seq_len and int(state.status[2]) == 0


def test_apply_commands_keeps_status_on_activation(device: torch.device) -> None:
    """Prefill may have set the status already."""
    state = state_of(device)
    state.status[1] = sd.Status.BAD_LENGTH
    before = state.status.clone()
    rings_of(record([1], [1]), state).apply_commands(state)
    assert torch.equal(state.status, before) and int(state.finish_reasons[1]) == 0


def test_apply_commands_does_not_start_slot_without_pages(device: torch.device) -> None:
    """Its prefill wrote no KV; pages that it gets later would hide that."""
    state = state_of(device)
    state.status[1] = sd.Status.STALLED
    rings_of(record([1], [1]), state).apply_commands(state)
    assert int(state.status[1]) == sd.Status.STALLED | sd.Status.BAD_PAGE


@pytest.mark.parametrize("bad", [R, -2, 2**31 - 1, -(2**31)])
def test_apply_commands_ignores_slots_out_of_range(device: torch.device, bad: int) -> None:
    state = state_of(device)
    before, rings = copied(state), rings_of(record([bad], [bad], [bad]), state)
    rings.apply_commands(state)
    expect_same(state, before)
    assert int(rings.slots[0]) == int(rings.given_back[0]) == bad


@pytest.mark.parametrize("count", [-(2**31), -1, 0, R + 1, 2**31 - 1])
def test_apply_commands_accepts_zero_to_all_activations(device: torch.device, count: int) -> None:
    want = state_of()
    got = copied(want, device)
    words = record([], [3, 1, -5, 0, 2])
    words[1] = count
    reference.apply_commands(words[None].clone(), torch.zeros(1, dtype=torch.int64), want)
    rings_of(words, got).apply_commands(got)
    expect_same(got, want)


def test_apply_commands_wraps_any_record_count(device: torch.device) -> None:
    state = state_of(device)
    for count in (-1, -(2**63), 2**63 - 1, 2**31 - 1):
        rings = rings_of(torch.stack([record([3])] * DEPTH), state)
        rings.num_applied.fill_(count)
        rings.apply_commands(state)
        assert rings.slots.tolist() == [3, -1, -1, -1]
        assert int(rings.commands[count % 2**64 % DEPTH, 0]) == ((count + 1 + 2**31) % 2**32) - 2**31


def test_apply_commands_clock_increases(device: torch.device) -> None:
    state = state_of(device)
    rings = rings_of(torch.stack([record([])] * DEPTH), state)
    times = []
    for _ in range(3):
        rings.apply_commands(state)
        times.append(int(rings.started_at))
    assert 0 < times[0] <= times[1] <= times[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commands": torch.zeros(2, 90, dtype=INT)}, "apply_commands: commands has shape [2, 90], expected [depth, words=91]"),
        ({"commands": torch.zeros(0, 91, dtype=INT)}, "apply_commands: depth is 0, expected 1 to 2147483647"),
        ({"commands": torch.zeros(2, 91)}, "apply_commands: commands is float32, expected int32"),
        ({"seeds": torch.zeros(5, dtype=INT)}, "apply_commands: seeds is int32, expected int64"),
        ({"status": torch.zeros(4, dtype=INT)}, "apply_commands: status has shape [4], expected [num_slots=5]"),
        ({"num_applied": torch.zeros(1, dtype=INT)}, "apply_commands: num_applied is int32, expected int64"),
    ],
    ids=["words", "depth", "dtype", "seeds", "status", "counter"],
)  # fmt: skip
def test_apply_commands_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    state = state_of()
    rings = rings_of(record([]), state)
    for name, tensor in change.items():
        if name in state._fields:
            state = state._replace(**{name: tensor})
        else:
            setattr(rings, name, tensor)
    with pytest.raises(ValueError) as error:
        rings.apply_commands(state)
    assert str(error.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_apply_commands_refuses_memory_the_device_cannot_reach() -> None:
    state = state_of("cuda")
    rings = rings_of(record([]), state)
    rings.commands = record([])[None]
    with pytest.raises(ValueError, match="apply_commands: commands is not pinned, expected a pinned or cuda tensor"):
        rings.apply_commands(state)
    state = state_of()
    rings = rings_of(record([]), state)
    rings.commands = record([])[None].cuda()
    with pytest.raises(ValueError, match="apply_commands: commands is on cuda, expected a cpu tensor like num_applied"):
        rings.apply_commands(state)
