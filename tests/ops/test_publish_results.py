"""publish_results: records in order, each complete before its number is published."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.reference import round as reference

INT = torch.int32
DEPTH = 3


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(INT)


def rings_of(slots: int, batch: int, width: int, device: torch.device, top_n: int = -1, num_levels: int = 0) -> Rings:
    state = sd.make_slot_state(slots, 99, 0, like=torch.empty(0, device=device))
    sizes = {"max_batch": batch, "accept_width": width, "num_levels": num_levels, "top_n": top_n}
    rings = Rings.create(state, **sizes, depth=DEPTH)
    rings.results.fill_(-77)
    return rings


def rows(batch: int, width: int, slots: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the arguments of `Rings.publish_results`, without slots and scores."""
    state = sd.make_slot_state(slots, 99, 0, like=torch.empty(0))
    state.finish_reasons.copy_(ints(slots)), state.status.copy_(ints(slots))
    state.num_logprobs.copy_(torch.randint(-2, 3, (slots,)))
    return on(
        device,
        {
            "accepted": sd.Accepted(ints(batch, width), ints(batch), ints(batch, width)),
            "num_nodes": ints(batch),
            "state": state,
        },
    )


def on(device: torch.device | str, arguments: dict[str, Any]) -> dict[str, Any]:
    def move(value: Any) -> Any:
        return type(value)(*map(move, value)) if isinstance(value, tuple) else value.to(device)

    return {name: move(value) for name, value in arguments.items()}


@pytest.mark.sanitize
@pytest.mark.parametrize(("batch", "width", "slots"), [(3, 2, 5), (1, 1, 1), (0, 4, 2), (70, 33, 300)])
def test_publish_results_writes_records_in_order(device: torch.device, batch: int, width: int, slots: int) -> None:
    top_n = 3
    rings = rings_of(slots, batch + 1, width, device, top_n)
    rings.started_at.fill_(5 * 2**33 + 9)
    want, count = rings.results.cpu().clone(), torch.zeros(1, dtype=torch.int64)
    for number in range(2 * DEPTH + 1):
        given = rows(batch, width, slots) | {"slots": torch.randint(-2, slots + 1, (batch,), dtype=INT)}
        if number % 2:
            listed = (batch, width, top_n)
            given["scores"] = sd.TokenScores(torch.randn(batch, width), ints(*listed), torch.randn(*listed))
        rings.publish_results(**on(device, given))
        reference.publish_results(want, count, **given)
        if device.type == "cuda":
            torch.cuda.synchronize()
        record = rings.results[number % DEPTH]
        assert int(record[2:4].view(torch.int64)) == 5 * 2**33 + 9 and int(record[4:6].view(torch.int64)) > 0
        want[number % DEPTH, 2:6] = record[2:6]
        assert torch.equal(rings.results, want) and int(rings.num_published) == number + 1


@pytest.mark.sanitize
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(("batch", "width", "nodes", "num_levels"), [(5, 3, 9, 3), (64, 6, 48, 11), (1, 1, 1, 32)])
def test_publish_results_counts_tokens_of_every_budget_level(
    device: torch.device, batch: int, width: int, nodes: int, num_levels: int, drawn: bool
) -> None:
    """Counts cover running rows only, whatever else the tensors hold."""
    slots = batch + 2
    rings = rings_of(slots, batch, width, device, num_levels=num_levels)
    want = rings.results.cpu().clone()
    given = rows(batch, width, slots)
    given["state"].finish_reasons.copy_(torch.randint(0, 5, (slots,)) // 4)
    given["state"].max_nodes.copy_(torch.randint(-1, nodes + 3, (slots,)))
    paths = torch.randint(-1, nodes + 1, (batch, width), dtype=INT)
    given["accepted"] = given["accepted"]._replace(
        num_valid=torch.randint(-1, width + 1, (batch,), dtype=INT), path=paths
    )
    given |= {"slots": torch.randint(-1, slots + 1, (batch,), dtype=INT)}
    given |= {"level_limits": torch.randint(0, nodes + 2, (num_levels,), dtype=INT).sort().values}
    if not drawn:
        scores = -torch.rand(batch, nodes).cumsum(1)
        scores[torch.rand(batch, nodes) < 0.1] = torch.nan
        cuts = -torch.rand(num_levels).cumsum(0) * nodes / num_levels
        cuts[-1] = -torch.inf
        given |= {"node_scores": scores, "cuts": cuts}
    rings.publish_results(**on(device, given))
    reference.publish_results(want, torch.zeros(1, dtype=torch.int64), **given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    got, want = rings.results[0], want[0]
    floats = slice(8, 8 + num_levels)
    torch.testing.assert_close(got[floats].view(torch.float32), want[floats].view(torch.float32), rtol=1e-6, atol=1e-7)
    assert torch.equal(got[8 + num_levels :], want[8 + num_levels :]) and int(got[6]) == int(want[6])


def test_publish_results_without_slots(device: torch.device) -> None:
    given, rings = rows(2, 1, 3, device), rings_of(3, 2, 1, device)
    rings.publish_results(**given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    state = given["state"]
    assert rings.results[0, [9, 10, 14, 15]].tolist() == [
        int(tensor[slot]) for slot in (0, 1) for tensor in (state.finish_reasons, state.status)
    ]


@pytest.mark.parametrize("count", [-1, -(2**63), 2**63 - 1])
def test_publish_results_wraps_any_record_count(device: torch.device, count: int) -> None:
    rings = rings_of(1, 1, 1, device)
    rings.num_published.fill_(count)
    rings.publish_results(**rows(1, 1, 1, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(rings.results[count % 2**64 % DEPTH, 0]) == ((count + 1 + 2**31) % 2**32) - 2**31


@pytest.mark.parametrize(
    ("max_batch", "accept_width", "num_levels", "max_logprobs", "words"),
    [
        (1, 1, 0, -1, 14),
        (2, 3, 0, -1, 22),
        (2, 3, 5, -1, 32),
        (2, 3, 0, 0, 28),
        (1, 1, 0, 1, 16),
        (1, 2, 1, 20, 98),
        (64, 6, 9, 20, 8 + 18 + 64 * 256),
    ],
)
def test_publish_results_writes_record_layout(
    max_batch: int, accept_width: int, num_levels: int, max_logprobs: int, words: int
) -> None:
    """The layout of csrc/round/records.h: 8 words, 2 per level, then per row 4, tokens and scores; padded to even."""
    assert _C.result_words(max_batch, accept_width, num_levels, max_logprobs) == words


SCORES = sd.TokenScores(torch.zeros(2, 2), torch.zeros(2, 2, 1, dtype=INT), torch.zeros(2, 2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": torch.zeros(3, 18, dtype=INT)}, "publish_results: words is 18, expected 20 to 2147483647"),
        ({"results": torch.zeros(0, 20, dtype=INT)}, "publish_results: depth is 0, expected 1 to 2147483647"),
        ({"results": torch.zeros(3, 21, dtype=INT)}, "publish_results: results has rows that start between two multiples of 8 bytes, expected an aligned tensor with an even number of words"),
        ({"num_valid": torch.zeros(3, dtype=INT)}, "publish_results: num_valid has shape [3], expected [batch=2]"),
        ({"status": torch.zeros(4, dtype=INT)}, "publish_results: status has shape [4], expected [num_slots=3]"),
        ({"scores": SCORES}, "publish_results: words is 20, expected 32 to 2147483647"),
        ({"num_published": torch.zeros(1, dtype=INT)}, "publish_results: num_published is int32, expected int64"),
    ],
    ids=["words", "depth", "alignment", "num_valid", "status", "words of scores", "counter"],
)  # fmt: skip
def test_publish_results_error_messages(change: dict[str, Any], message: str) -> None:
    rings, given = rings_of(3, 2, 2, torch.device("cpu")), rows(2, 2, 3)
    for name, value in change.items():
        if hasattr(rings, name):
            setattr(rings, name, value)
        for struct in ("accepted", "state"):
            if name in given[struct]._fields:
                given[struct] = given[struct]._replace(**{name: value})
    scores = change.get("scores")
    with pytest.raises(ValueError) as error:
        rings.publish_results(**given, scores=scores)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("logprobs", "num_logprobs", "message"),
    [
        (SCORES.logprobs, None, "publish_results: num_logprobs is None, expected a tensor, since logprobs is given"),
        (None, torch.zeros(3, dtype=INT), "publish_results: num_logprobs is given, expected None, since logprobs is None"),
    ],
    ids=["scores alone", "no scores"],
)  # fmt: skip
def test_publish_results_refuses_scores_without_num_logprobs(
    logprobs: torch.Tensor | None, num_logprobs: torch.Tensor | None, message: str
) -> None:
    rings, given = rings_of(3, 2, 2, torch.device("cpu")), rows(2, 2, 3)
    others = (None, None) if logprobs is None else SCORES[1:]
    state = given["state"]
    with pytest.raises(ValueError) as error:
        _C.publish_results(
            None, rings.results, rings.num_published, rings.started_at, *given["accepted"][:2], given["num_nodes"],
            state.finish_reasons, state.status, None, logprobs, *others, num_logprobs, None, None, None, None, None,
        )  # fmt: skip
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_scores": torch.zeros(2, 4)}, "publish_results: cuts is None, expected a tensor, since node_scores is given"),
        ({"cuts": torch.zeros(2)}, "publish_results: cuts is given, expected None, since node_scores is None"),
        ({"level_limits": None, "node_scores": torch.zeros(2, 4), "cuts": torch.zeros(2)}, "publish_results: node_scores is given, expected None, since level_limits is None"),
        ({"level_limits": torch.zeros(33, dtype=INT)}, "publish_results: num_levels is 33, expected 0 to 32"),
        ({"node_scores": torch.zeros(2, 4), "cuts": torch.zeros(3)}, "publish_results: cuts has shape [3], expected [num_levels=2]"),
        ({"level_limits": torch.zeros(3, dtype=INT)}, "publish_results: words is 24, expected 26 to 2147483647"),
    ],
    ids=["no cuts", "cuts alone", "no limits", "many", "shape", "words"],
)  # fmt: skip
def test_publish_results_error_messages_of_levels(change: dict[str, Any], message: str) -> None:
    rings, given = rings_of(3, 2, 2, torch.device("cpu"), num_levels=2), rows(2, 2, 3)
    with pytest.raises(ValueError) as error:
        rings.publish_results(**(given | {"level_limits": torch.tensor([1, 4], dtype=INT)} | change))
    assert str(error.value) == message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_publish_results_refuses_memory_the_device_cannot_reach() -> None:
    rings = rings_of(1, 1, 1, torch.device("cuda"))
    rings.results = torch.zeros(3, 14, dtype=INT)
    with pytest.raises(ValueError, match="publish_results: results is not pinned, expected a pinned or cuda tensor"):
        rings.publish_results(**rows(1, 1, 1, "cuda"))


def test_publish_results_of_the_last_number_wraps(device: torch.device) -> None:
    """UBSan (./build.sh dev --sanitize) reports a number that is not wrapped."""
    rings = rings_of(2, 2, 3, device)
    rings.num_published.fill_(2**63 - 1)
    rings.publish_results(**on(device, rows(2, 3, 2)))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(rings.num_published) == -(2**63)
