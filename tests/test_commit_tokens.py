"""commit_tokens against its token-by-token reference, and each rule by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

INT = torch.int32
State = dict[str, torch.Tensor]


def ints(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device=device)


def one_request(tokens: list[int], device: torch.device, width: int = 5, **state: Any) -> State:
    """The arguments for one running request with ample limits, some of its state overridden."""
    garbage = [2**31 - 1, -5, 7, 7, 7][: width - len(tokens)]
    given = {
        "out_tokens": [tokens + garbage],
        "out_len": [len(tokens)],
        "stop_tokens": [[-1, -1]],
        "remaining": [100],
        "max_lens": [1000],
        "seq_lens": [10],
        "seq_lens_before": [-77],
        "root_tokens": [55],
        "finish_reasons": [0],
    } | state
    return {name: ints(value, device) for name, value in given.items()}


def random_requests(batch: int, width: int, num_slots: int, max_stops: int) -> State:
    """Small vocabularies and tight limits, so that every reason to finish occurs and they often coincide."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=INT)

    lengths = draw(0, width + 1, batch)
    tokens = draw(0, 12, batch, width)
    tokens[torch.arange(width)[None] >= lengths[:, None]] = -1
    seq_lens = draw(0, 9, num_slots)
    slots = torch.cat([torch.randperm(num_slots, dtype=INT), torch.tensor([-1, num_slots], dtype=INT)])
    return {
        "out_tokens": tokens,
        "out_len": lengths,
        "stop_tokens": draw(-1, 12, num_slots, max_stops),
        "remaining": draw(0, width + 3, num_slots),
        "max_lens": seq_lens + 1 + draw(0, width + 3, num_slots),
        "seq_lens": seq_lens,
        "seq_lens_before": draw(-99, 0, num_slots),
        "root_tokens": draw(0, 12, num_slots),
        "finish_reasons": draw(-6, 4, num_slots).clamp(min=0),
        "slots": slots[torch.randperm(num_slots + 2)][:batch].contiguous(),
        "status": draw(-5, 4, num_slots).clamp(min=0),
    }


def check(arguments: State, device: torch.device) -> None:
    want = {name: x.clone() for name, x in arguments.items()}
    got = {name: x.to(device, copy=True) for name, x in arguments.items()}
    want_valid = reference.commit_tokens(**want)
    poison = torch.full_like(want_valid, -77, device=device)
    got_valid = sd.commit_tokens(**got, out_num_valid=poison)
    assert got_valid is poison
    assert torch.equal(got_valid.cpu(), want_valid)
    for name in want:
        assert torch.equal(got[name].cpu(), want[name]), name


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
def test_matches_reference(device: torch.device, batch: int, width: int, num_slots: int, max_stops: int) -> None:
    for _ in range(20):
        check(random_requests(batch, width, num_slots, max_stops), device)


@pytest.mark.sanitize
def test_small(device: torch.device) -> None:
    check(random_requests(5, 3, 4, 2), device)


RUNNING, STOP, LENGTH, CONTEXT = list(sd.FinishReason)[:4]  # the device's; the rest are the scheduler's


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
        ([7, 8, 9], {"max_lens": [15]}, 3, RUNNING),
        ([7, 8, 9], {"max_lens": [14]}, 3, CONTEXT),
        ([7, 8, 9], {"max_lens": [12]}, 1, CONTEXT),
        ([7, 8, 9], {"max_lens": [-(2**31)]}, 0, CONTEXT),
        ([7, 8, 9], {"max_lens": [13], "remaining": [2], "stop_tokens": [[8, -1]]}, 2, STOP),
        ([7, 8, 9], {"max_lens": [13], "remaining": [2], "stop_tokens": [[9, -1]]}, 2, LENGTH),
        ([7, 8, 9], {"max_lens": [12], "remaining": [2], "stop_tokens": [[9, -1]]}, 1, CONTEXT),
        ([], {}, 0, RUNNING),
    ],
    ids=str,
)
def test_rules(
    device: torch.device, tokens: list[int], state: dict[str, Any], kept: int, reason: sd.FinishReason
) -> None:
    arguments = one_request(tokens, device, **state)
    remaining = int(arguments["remaining"])
    num_valid = sd.commit_tokens(**arguments)
    assert arguments["out_tokens"].tolist() == [tokens[:kept] + [-1] * (5 - kept)]
    assert arguments["out_len"].tolist() == [kept]
    assert arguments["finish_reasons"].tolist() == [reason]
    assert arguments["seq_lens_before"].tolist() == [10]
    assert arguments["seq_lens"].tolist() == [10 + kept]
    assert arguments["remaining"].tolist() == [remaining - kept]
    assert arguments["root_tokens"].tolist() == [tokens[kept - 1] if kept else 55]
    assert num_valid.tolist() == [kept if reason == RUNNING else 0]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("state", "bits"),
    [
        ({"finish_reasons": [2]}, 0),
        ({"finish_reasons": [-9]}, 0),
        ({"status": [sd.Status.STALLED | 4]}, sd.Status.STALLED | 4),
        ({"out_len": [6]}, sd.Status.BAD_LENGTH),
        ({"out_len": [2**31 - 1]}, sd.Status.BAD_LENGTH),
        ({"out_len": [-1]}, sd.Status.BAD_LENGTH),
        ({"seq_lens": [-3]}, sd.Status.BAD_LENGTH),
        ({"slots": [-1], "seq_lens_before": [-3], "seq_lens": [-3]}, 0),
        ({"slots": [1], "seq_lens_before": [-3], "seq_lens": [-3]}, 0),
    ],
    ids=str,
)
def test_rows_that_emit_nothing(device: torch.device, state: dict[str, Any], bits: int) -> None:
    arguments = one_request([7, 8, 9], device, **({"status": [0]} | state))
    before = {name: x.clone() for name, x in arguments.items()}
    assert sd.commit_tokens(**arguments).tolist() == [0]
    assert arguments["out_tokens"].tolist() == [[-1] * 5] and arguments["out_len"].tolist() == [0]
    assert arguments["seq_lens_before"].tolist() == before["seq_lens"].tolist()
    assert arguments["status"].tolist() == [bits]
    for name in ("seq_lens", "remaining", "root_tokens", "finish_reasons", "max_lens", "stop_tokens"):
        assert torch.equal(arguments[name], before[name]), name


def test_longest_sequence(device: torch.device) -> None:
    largest = 2**31 - 1
    arguments = one_request([7, 8], device, seq_lens=[largest - 2], max_lens=[largest])
    sd.commit_tokens(**arguments)
    assert arguments["seq_lens"].tolist() == [largest - 1]
    assert arguments["finish_reasons"].tolist() == [CONTEXT]


def test_empty_batch(device: torch.device) -> None:
    arguments = one_request([1], device)
    arguments |= {"out_tokens": arguments["out_tokens"][:0], "out_len": arguments["out_len"][:0]}
    assert sd.commit_tokens(**arguments).shape == (0,)
    assert arguments["seq_lens_before"].tolist() == [-77]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_graph_replay_with_changed_inputs() -> None:
    device = torch.device("cuda")
    state = {name: x.to(device) for name, x in random_requests(9, 4, 11, 2).items()}
    num_valid = sd.commit_tokens(**state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sd.commit_tokens(**state, out_num_valid=num_valid)
    fresh = random_requests(9, 4, 11, 2)
    for name, x in fresh.items():
        state[name].copy_(x)
    graph.replay()
    assert torch.equal(num_valid.cpu(), reference.commit_tokens(**fresh))
    for name, x in fresh.items():
        assert torch.equal(state[name].cpu(), x), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_tokens": torch.zeros(1, 5)}, "commit_tokens: out_tokens is float32, expected int32"),
        ({"out_tokens": torch.zeros(1, 0, dtype=INT)}, "commit_tokens: accept_width is 0, expected 1 to 2147483647"),
        ({"out_tokens": torch.zeros(1, 10, dtype=INT)[:, ::2]}, "commit_tokens: out_tokens has shape [1, 5] and is not contiguous, expected a contiguous tensor"),
        ({"out_len": torch.zeros(2, dtype=INT)}, "commit_tokens: out_len has shape [2], expected [batch=1]"),
        ({"remaining": torch.zeros(2, dtype=INT)}, "commit_tokens: remaining has shape [2], expected [num_slots=1]"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "commit_tokens: slots is int64, expected int32"),
        ({"out_num_valid": torch.zeros(2, dtype=INT)}, "commit_tokens: out_num_valid has shape [2], expected [batch=1]"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.commit_tokens(**(one_request([1], torch.device("cpu")) | change))
    assert str(error.value) == message
