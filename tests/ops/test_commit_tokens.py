"""commit_tokens against its token-by-token reference, and each rule in a worked example."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

INT = torch.int32
Arguments = dict[str, Any]  # of commit_tokens


def arguments_of(given: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> Arguments:
    """Return the call's arguments from named tensors: emitted rows, fields of the slot state, and `slots`."""
    given = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
    tokens, num_valid = given.pop("tokens"), given.pop("num_valid")
    state = sd.make_slot_state(len(given["seq_lens"]), 1000, 2, like=tokens)
    slots = given.pop("slots", None)
    return {
        "accepted": sd.Accepted(tokens, num_valid, torch.zeros_like(tokens)),
        "state": state._replace(**given),
        "slots": slots,
    }


def changed(arguments: Arguments) -> dict[str, torch.Tensor]:
    return arguments["accepted"]._asdict() | arguments["state"]._asdict()


def ints(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


def one_request(tokens: list[int], device: torch.device, width: int = 5, **state: Any) -> dict[str, torch.Tensor]:
    """Return tensors of one running request with ample limits; `state` overrides fields of its slot state."""
    garbage = [2**31 - 1, -5, 7, 7, 7][: width - len(tokens)]
    given = {
        "tokens": [tokens + garbage],
        "num_valid": [len(tokens)],
        "stop_tokens": [[-1, -1]],
        "remaining": [100],
        "max_seq_lens": [1000],
        "seq_lens": [10],
        "prefix_lens": [-77],
        "root_tokens": [55],
        "finish_reasons": [0],
    } | state
    return {name: ints(value, device) for name, value in given.items()}


def random_requests(batch: int, width: int, num_slots: int, max_stops: int) -> dict[str, torch.Tensor]:
    """Return requests with small vocabularies and tight limits: every finish reason occurs, and several coincide."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=INT)

    num_valid = draw(0, width + 1, batch)
    tokens = draw(0, 12, batch, width)
    tokens[torch.arange(width)[None] >= num_valid[:, None]] = -1
    seq_lens = draw(0, 9, num_slots)
    slots = torch.cat([torch.randperm(num_slots, dtype=INT), torch.tensor([-1, num_slots], dtype=INT)])
    return {
        "tokens": tokens,
        "num_valid": num_valid,
        "stop_tokens": draw(-1, 12, num_slots, max_stops),
        "remaining": draw(0, width + 3, num_slots),
        "max_seq_lens": seq_lens + 1 + draw(0, width + 3, num_slots),
        "seq_lens": seq_lens,
        "prefix_lens": draw(-99, 0, num_slots),
        "root_tokens": draw(0, 12, num_slots),
        "finish_reasons": draw(-6, 4, num_slots).clamp(min=0),
        "slots": slots[torch.randperm(num_slots + 2)][:batch].contiguous(),
        "status": draw(-5, 4, num_slots).clamp(min=0),
    }


def check(given: dict[str, torch.Tensor], device: torch.device) -> None:
    want, got = arguments_of(given), arguments_of(given, device)
    want_valid = reference.commit_tokens(**want)
    poison = torch.full_like(want_valid, -77, device=device)
    got_valid = sd.commit_tokens(**got, out=poison)
    assert got_valid is poison
    assert torch.equal(got_valid.cpu(), want_valid)
    for name, expected in changed(want).items():
        assert torch.equal(changed(got)[name].cpu(), expected), name


@pytest.mark.parametrize(
    ("batch", "width", "num_slots", "max_stops"),
    [
        (1, 1, 1, 0),
        (2, 1, 3, 1),
        (7, 4, 11, 2),
        (64, 6, 67, 1),
        (131, 5, 131, 3),
        (6, 32, 7, 1),
        (9, 33, 9, 1),
        (5, 70, 8, 40),
    ],
)
def test_commit_tokens_matches_reference(
    device: torch.device, batch: int, width: int, num_slots: int, max_stops: int
) -> None:
    for _ in range(20):
        check(random_requests(batch, width, num_slots, max_stops), device)


@pytest.mark.sanitize
def test_commit_tokens_matches_reference_on_small_inputs(device: torch.device) -> None:
    check(random_requests(5, 3, 4, 2), device)


RUNNING, STOP, LENGTH, CONTEXT = list(sd.FinishReason)[:4]  # written by the op; the scheduler owns the others


@pytest.mark.parametrize(
    ("tokens", "state", "kept", "reason"),
    [
        ([7, 8, 9], {}, 3, RUNNING),
        ([7, 8, 9], {"stop_tokens": [[-1, 8]]}, 2, STOP),
        ([7, 8, 9], {"stop_tokens": [[9, 7]]}, 1, STOP),
        ([7, 8, 9], {"stop_tokens": [[]]}, 3, RUNNING),
        ([7, 8, 9], {"remaining": [4]}, 3, RUNNING),
        ([7, 8, 9], {"remaining": [3]}, 3, LENGTH),
        ([7, 8, 9], {"remaining": [2]}, 2, LENGTH),
        ([7, 8, 9], {"remaining": [0]}, 0, LENGTH),
        ([7, 8, 9], {"remaining": [-4]}, 0, LENGTH),
        ([7, 8, 9], {"max_seq_lens": [15]}, 3, RUNNING),
        ([7, 8, 9], {"max_seq_lens": [14]}, 3, CONTEXT),
        ([7, 8, 9], {"max_seq_lens": [12]}, 1, CONTEXT),
        ([7, 8, 9], {"max_seq_lens": [-(2**31)]}, 0, CONTEXT),
        ([7, 8, 9], {"max_seq_lens": [13], "remaining": [2], "stop_tokens": [[8, -1]]}, 2, STOP),
        ([7, 8, 9], {"max_seq_lens": [13], "remaining": [2], "stop_tokens": [[9, -1]]}, 2, LENGTH),
        ([7, 8, 9], {"max_seq_lens": [12], "remaining": [2], "stop_tokens": [[9, -1]]}, 1, CONTEXT),
        ([], {}, 0, RUNNING),
    ],
    ids=str,
)
def test_commit_tokens_applies_each_finish_rule(
    device: torch.device, tokens: list[int], state: dict[str, Any], kept: int, reason: sd.FinishReason
) -> None:
    arguments = arguments_of(one_request(tokens, device, **state), device)
    accepted, slot = arguments["accepted"], arguments["state"]
    remaining = int(slot.remaining)
    num_valid = sd.commit_tokens(**arguments)
    assert accepted.tokens.tolist() == [tokens[:kept] + [-1] * (5 - kept)]
    assert accepted.num_valid.tolist() == [kept]
    assert slot.finish_reasons.tolist() == [reason]
    assert slot.prefix_lens.tolist() == [10]
    assert slot.seq_lens.tolist() == [10 + kept]
    assert slot.remaining.tolist() == [remaining - kept]
    assert slot.root_tokens.tolist() == [tokens[kept - 1] if kept else 55]
    assert num_valid.tolist() == [kept if reason == RUNNING else 0]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("state", "bits"),
    [
        ({"finish_reasons": [2]}, 0),
        ({"finish_reasons": [-9]}, 0),
        ({"status": [sd.Status.STALLED | 4]}, sd.Status.STALLED | 4),
        ({"num_valid": [6]}, sd.Status.BAD_LENGTH),
        ({"num_valid": [2**31 - 1]}, sd.Status.BAD_LENGTH),
        ({"num_valid": [-1]}, sd.Status.BAD_LENGTH),
        ({"seq_lens": [-3]}, sd.Status.BAD_LENGTH),
        ({"slots": [-1], "prefix_lens": [-3], "seq_lens": [-3]}, 0),
        ({"slots": [1], "prefix_lens": [-3], "seq_lens": [-3]}, 0),
    ],
    ids=str,
)
def test_commit_tokens_of_rows_without_tokens(device: torch.device, state: dict[str, Any], bits: int) -> None:
    arguments = arguments_of(one_request([7, 8, 9], device, **({"status": [0]} | state)), device)
    accepted, slot = arguments["accepted"], arguments["state"]
    before = sd.SlotState(*(tensor.clone() for tensor in slot))
    assert sd.commit_tokens(**arguments).tolist() == [0]
    assert accepted.tokens.tolist() == [[-1] * 5] and accepted.num_valid.tolist() == [0]
    assert slot.prefix_lens.tolist() == before.seq_lens.tolist()
    assert slot.status.tolist() == [bits]
    for name in set(sd.SlotState._fields) - {"prefix_lens", "status"}:
        assert torch.equal(getattr(slot, name), getattr(before, name)), name


def test_commit_tokens_at_longest_sequence(device: torch.device) -> None:
    largest = 2**31 - 1
    arguments = arguments_of(one_request([7, 8], device, seq_lens=[largest - 2], max_seq_lens=[largest]), device)
    sd.commit_tokens(**arguments)
    assert arguments["state"].seq_lens.tolist() == [largest - 1]
    assert arguments["state"].finish_reasons.tolist() == [CONTEXT]


def test_commit_tokens_accepts_empty_batch(device: torch.device) -> None:
    arguments = arguments_of(one_request([1], device), device)
    accepted = sd.Accepted(*(tensor[:0] for tensor in arguments["accepted"]))
    assert sd.commit_tokens(accepted, arguments["state"]).shape == (0,)
    assert arguments["state"].prefix_lens.tolist() == [-77]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(1, 5)}, "commit_tokens: accepted.tokens is float32, expected int32"),
        ({"tokens": torch.zeros(1, 0, dtype=INT)}, "commit_tokens: accept_width is 0, expected 1 to 2147483647"),
        ({"tokens": torch.zeros(1, 10, dtype=INT)[:, ::2]}, "commit_tokens: accepted.tokens has shape [1, 5] and is not contiguous, expected a contiguous tensor"),
        ({"num_valid": torch.zeros(2, dtype=INT)}, "commit_tokens: accepted.num_valid has shape [2], expected [batch=1]"),
        ({"remaining": torch.zeros(2, dtype=INT)}, "commit_tokens: state.remaining has shape [2], expected [num_slots=1]"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "commit_tokens: slots is int64, expected int32"),
        ({"out": torch.zeros(2, dtype=INT)}, "commit_tokens: out has shape [2], expected [batch=1]"),
    ],
)  # fmt: skip
def test_commit_tokens_error_messages(change: dict[str, torch.Tensor], message: str) -> None:
    given = arguments_of(one_request([1], torch.device("cpu")))
    for name in ("accepted", "state"):
        fields = given[name]._asdict()
        given[name] = given[name]._replace(**{field: change.pop(field) for field in fields if field in change})
    with pytest.raises(ValueError) as error:
        sd.commit_tokens(**(given | change))
    assert str(error.value) == message


# --- the state of slots


def test_make_slot_state_defaults_to_greedy(device: torch.device) -> None:
    state = sd.make_slot_state(3, 100, 2, like=torch.empty(0, device=device))
    assert state.stop_tokens.tolist() == [[-1, -1]] * 3 and state.max_seq_lens.tolist() == [100] * 3
    assert (
        state.seeds.dtype == torch.int64
        and state.top_p.tolist() == [1.0] * 3
        and state.num_logprobs.tolist() == [-1] * 3
        and state.max_nodes.tolist() == [256] * 3
    )
    others = set(sd.SlotState._fields) - {"stop_tokens", "max_seq_lens", "top_p", "num_logprobs", "max_nodes"}
    assert not any(getattr(state, name).any() for name in others)
    assert {tensor.device for tensor in state} == {state.seq_lens.device} and state.seq_lens.device.type == device.type


def test_slot_state_accepts_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    state = sd.make_slot_state(1, 50, 0, like=np.zeros(0))
    state.remaining[0], state.seq_lens[0] = 2, 10
    accepted = sd.Accepted(np.array([[7, 8, 9]], np.int32), np.array([3], np.int32), np.zeros((1, 3), np.int32))
    num_valid = sd.commit_tokens(accepted, state)
    assert type(num_valid) is np.ndarray and num_valid.tolist() == [0] and accepted.tokens.tolist() == [[7, 8, -1]]
    assert state.seq_lens.tolist() == [12] and state.finish_reasons.tolist() == [LENGTH]


@pytest.mark.parametrize(("sizes", "name"), [((-1, 5, 0), "num_slots"), ((1, 5, -1), "max_stops")])
def test_make_slot_state_error_messages(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.make_slot_state(*sizes, like=torch.empty(0))
    assert str(error.value) == f"make_slot_state: {name} is -1, expected at least 0"


def test_commit_tokens_of_extreme_counts_wraps(device: torch.device) -> None:
    """UBSan (./build.sh dev --sanitize) reports a sum that is not wrapped."""
    arguments = arguments_of(one_request([7, 8], device), device)
    counts = torch.full((1, 9), 2**31 - 1, dtype=INT, device=device)
    sd.commit_tokens(**arguments, counts=counts)
    assert counts.tolist() == [[2**31 - 1] * 7 + [-(2**31) + 1] * 2]
