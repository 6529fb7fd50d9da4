"""expand_root and expand_tree against their references, which process one candidate at a time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

WILD = [-1, 2**31 - 1]


def quantized_logprobs(*shape: int) -> torch.Tensor:
    """Return log-probabilities of few values that add exactly, so that most scores tie; some are -inf."""
    x = -torch.randint(0, 6, shape) / 4
    return torch.where(torch.rand(shape) < 0.1, -torch.inf, x)


def random_state(num_slots: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randint(0, 1000, (num_slots, k), dtype=torch.int32),
        quantized_logprobs(num_slots, k),
        torch.randint(0, 500, (num_slots,), dtype=torch.int32),
    )


def poisoned_root_outputs(
    batch: int, k: int, num_steps: int, device: torch.device
) -> tuple[sd.Candidates, sd.Frontier]:
    columns, words = k + (num_steps - 1) * k * k, max(1, -(-k * (num_steps - 1) // 64))
    int32 = {"dtype": torch.int32, "device": device}
    candidates = sd.Candidates(
        tokens=torch.full((batch, columns), -77, **int32),
        parents=torch.full((batch, columns), -77, **int32),
        scores=torch.full((batch, columns), torch.nan, device=device),
    )
    frontier = sd.Frontier(
        nodes=torch.full((batch, k), -77, **int32),
        tokens=torch.full((batch, k), -77, **int32),
        positions=torch.full((batch, k), -77, **int32),
        mask=torch.full((batch, k, words), -77, dtype=torch.int64, device=device),
    )
    return candidates, frontier


def assert_same(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g.cpu(), w)


def check_steps(
    device: torch.device, num_slots: int, k: int, num_steps: int, slots: torch.Tensor | None, position_offset: int = 0
) -> None:
    """Compare every step of a draft with the reference; scores compare bitwise."""
    ids, logprobs, seq_lens = random_state(num_slots, k)
    on_device = lambda t: None if t is None else t.to(device)  # noqa: E731
    batch = num_slots if slots is None else len(slots)
    slots_there, seq_lens_there = on_device(slots), seq_lens.to(device)

    candidates, frontier = sd.expand_root(
        ids.to(device),
        logprobs.to(device),
        seq_lens_there,
        num_steps,
        slots=slots_there,
        position_offset=position_offset,
        out=poisoned_root_outputs(batch, k, num_steps, device),
    )
    want, want_frontier = reference.expand_root(ids, logprobs, seq_lens, num_steps, slots, position_offset)
    assert_same(candidates, want)
    assert_same(frontier, want_frontier)

    for step in range(2, num_steps + 1):
        ids = torch.randint(0, 1000, (batch, k, k), dtype=torch.int32)
        logprobs = quantized_logprobs(batch, k, k)
        poison = sd.DraftInputs(*(torch.full((batch, k), -77, dtype=torch.int32, device=device) for _ in range(3)))
        inputs = sd.expand_tree(
            ids.to(device),
            logprobs.to(device),
            step,
            candidates,
            frontier,
            seq_lens_there,
            slots=slots_there,
            position_offset=position_offset,
            out=poison,
        )
        want, nodes, mask, want_inputs = reference.expand_tree(
            ids, logprobs, step, want, want_frontier, seq_lens, slots, position_offset
        )
        want_frontier = want_frontier._replace(nodes=nodes, mask=mask)
        assert inputs is poison
        assert_same(candidates, want)
        assert_same((frontier.nodes, frontier.mask), (nodes, mask))
        assert_same(inputs, want_inputs)


@pytest.mark.parametrize(
    ("num_slots", "k", "num_steps"),
    [
        (1, 1, 1),
        (2, 1, 7),
        (3, 2, 5),
        (4, 3, 4),
        (2, 10, 5),
        (2, 11, 3),
        (1, 12, 3),
        (1, 13, 7),
        (2, 40, 3),
        (1, 64, 2),
    ],
)
def test_expand_ops_match_reference_in_every_step(device: torch.device, num_slots: int, k: int, num_steps: int) -> None:
    check_steps(device, num_slots, k, num_steps, None)


def test_expand_ops_with_slots_and_empty_rows_match_reference(device: torch.device) -> None:
    slots = torch.tensor([4, -1, 0, *WILD, 2], dtype=torch.int32)
    check_steps(device, 5, 3, 4, slots, position_offset=1)


@pytest.mark.sanitize
def test_expand_ops_match_reference_on_small_inputs(device: torch.device) -> None:
    check_steps(device, 2, 2, 3, torch.tensor([1, -1, 0], dtype=torch.int32))


def test_expand_ops_accept_empty_batch(device: torch.device) -> None:
    check_steps(device, 0, 3, 2, None)
    check_steps(device, 2, 3, 2, torch.empty(0, dtype=torch.int32))


def two_parents(device: torch.device) -> tuple[sd.Candidates, sd.Frontier, torch.Tensor]:
    """Return the inputs of the second step, with K = 2 and parents of score 0 and -1."""
    seq_lens = torch.tensor([7], dtype=torch.int32, device=device)
    ids = torch.tensor([[5, 6]], dtype=torch.int32, device=device)
    candidates, frontier = sd.expand_root(ids, torch.tensor([[0.0, -1.0]], device=device), seq_lens, 2)
    return candidates, frontier, seq_lens


def expand(device: torch.device, logprobs: list[list[float]], nodes: list[int] | None = None) -> tuple[list[float], list[int]]:  # fmt: skip
    """Return the children's scores and the new frontier of `two_parents`."""
    candidates, frontier, seq_lens = two_parents(device)
    if nodes is not None:
        frontier.nodes.copy_(torch.tensor([nodes], dtype=torch.int32))
    ids = torch.arange(4, dtype=torch.int32, device=device).view(1, 2, 2)
    sd.expand_tree(ids, torch.tensor([logprobs], device=device), 2, candidates, frontier, seq_lens)
    return candidates.scores[0, 2:].tolist(), frontier.nodes[0].tolist()


def test_expand_tree_breaks_ties_by_candidate_index(device: torch.device) -> None:
    assert expand(device, [[-2.0, -1.5], [-0.5, -0.5]]) == ([-2.0, -1.5, -1.5, -1.5], [3, 4])


@pytest.mark.parametrize("k", [11, 12, 64])
@pytest.mark.parametrize("logprob", [-1.0, -torch.inf])
def test_expand_tree_of_equal_scores(device: torch.device, k: int, logprob: float) -> None:
    seq_lens = torch.tensor([7], dtype=torch.int32, device=device)
    ids = torch.zeros(1, k, k, dtype=torch.int32, device=device)
    candidates, frontier = sd.expand_root(ids[0, :1], torch.zeros(1, k, device=device), seq_lens, 2)
    logprobs = torch.full((1, k, k), logprob, device=device)
    sd.expand_tree(ids, logprobs, 2, candidates, frontier, seq_lens)
    assert frontier.nodes[0].tolist() == list(range(k, 2 * k))


def test_expand_tree_caps_scores_at_parent(device: torch.device) -> None:
    assert expand(device, [[0.5, -2.0], [3.0, torch.inf]])[0] == [0.0, -2.0, -1.0, -1.0]


def test_expand_tree_treats_nan_as_minus_infinity(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    assert expand(device, [[nan, -inf], [nan, -3.0]]) == ([-inf, -inf, -inf, -4.0], [5, 2])


@pytest.mark.parametrize("wild", [*WILD, -(2**31), 2], ids=str)
def test_expand_tree_of_invalid_frontier_node_gives_impossible_children(device: torch.device, wild: int) -> None:
    inf = torch.inf
    assert expand(device, [[-1.0, -2.0], [-3.0, -4.0]], [wild, 1]) == ([-inf, -inf, -4.0, -5.0], [4, 5])


def test_expand_root_of_special_logprobs(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    logprobs = torch.tensor([[nan, -inf, inf, 0.25, -0.5]], device=device)
    ids = torch.arange(5, dtype=torch.int32, device=device).view(1, 5)
    candidates, _ = sd.expand_root(ids, logprobs, torch.zeros(1, dtype=torch.int32, device=device), 1)
    assert candidates.scores.tolist() == [[-inf, -inf, 0.0, 0.0, -0.5]]


def test_expand_ops_commute_with_batch_permutation(device: torch.device) -> None:
    k, steps = 4, 3
    ids, logprobs, seq_lens = (t.to(device) for t in random_state(5, k))
    child_ids = torch.randint(0, 99, (5, k, k), dtype=torch.int32, device=device)
    child_logprobs = quantized_logprobs(5, k, k).to(device)
    results = []
    for order in (torch.arange(5), torch.tensor([3, 0, 4, 2, 1])):
        slots = order.to(torch.int32).to(device)
        candidates, frontier = sd.expand_root(ids, logprobs, seq_lens, steps, slots=slots)
        inputs = sd.expand_tree(
            child_ids[slots], child_logprobs[slots], 2, candidates, frontier, seq_lens, slots=slots
        )  # fmt: skip
        back = torch.argsort(order).to(device)
        local_rows = inputs.parent_rows % k
        results.append([t[back].cpu() for t in (*candidates, *frontier, inputs.tokens, local_rows)])
    assert_same(*results)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.zeros(3, 2)}, "expand_root: topk_ids is float32, expected int32"),
        ({"topk_ids": int32(3, 65)}, "expand_root: k is 65, expected 1 to 64"),
        ({"topk_logprobs": torch.zeros(2, 2)}, "expand_root: topk_logprobs has shape [2, 2], expected [num_slots=3, k=2]"),
        ({"num_steps": 0}, "expand_root: num_steps is 0, expected 1 to 1024"),
        ({"slots": torch.zeros(3)}, "expand_root: slots is float32, expected int32"),
        ({"position_offset": 2**40}, "expand_root: position_offset is 1099511627776, expected -1048576 to 1048576"),
        ({"scores": torch.zeros(3, 5)}, "expand_root: out[0].scores has shape [3, 5], expected [batch=3, candidates=6]"),
        ({"mask": torch.zeros(3, 2, 2, dtype=torch.int64)}, "expand_root: out[1].mask has shape [3, 2, 2], expected [batch=3, k=2, mask_words=1]"),
        ({"frontier_tokens": int32(2, 3).t()}, "expand_root: out[1].tokens has shape [3, 2] and is not contiguous, expected a contiguous tensor"),
    ],
)  # fmt: skip
def test_expand_root_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {"topk_ids": int32(3, 2), "topk_logprobs": torch.zeros(3, 2), "seq_lens": int32(3), "num_steps": 2}
    outputs = {"scores": torch.zeros(3, 6), "frontier_tokens": int32(3, 2), "mask": torch.zeros(3, 2, 1).long()}
    given = arguments | outputs | change
    scores, tokens, mask = (given.pop(name) for name in outputs)
    if change.keys() & outputs.keys():
        given["out"] = (
            sd.Candidates(int32(3, 6), int32(3, 6), scores),
            sd.Frontier(int32(3, 2), tokens, int32(3, 2), mask),
        )
    with pytest.raises(ValueError) as error:
        sd.expand_root(**given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": int32(3, 3, 2)}, "expand_tree: topk_ids has shape [3, 3, 2], expected [batch, k, k]"),
        ({"topk_ids": int32(3, 2)}, "expand_tree: topk_ids has 2 dimensions, expected 3 dimensions"),
        ({"step": 1}, "expand_tree: step is 1, expected 2 to 3"),
        ({"step": 4}, "expand_tree: step is 4, expected 2 to 3"),
        ({"tokens": int32(3, 9)}, "expand_tree: candidates.tokens has 9 candidates, expected k + (num_steps - 1) * k * k with k=2"),
        ({"parents": int32(3, 6)}, "expand_tree: candidates.parents has shape [3, 6], expected [batch=3, candidates=10]"),
        ({"mask": torch.zeros(3, 2, 1)}, "expand_tree: frontier.mask is float32, expected int64"),
        ({"seq_lens": int32(2)}, "expand_tree: slots is None for batch=3, expected a tensor, or batch <= num_slots=2"),
        ({"out": sd.DraftInputs(int32(3, 2), int32(3), int32(3, 2))}, "expand_tree: out.parent_rows has shape [3], expected [batch=3, k=2]"),
    ],
)  # fmt: skip
def test_expand_tree_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {
        "topk_ids": int32(3, 2, 2),
        "topk_logprobs": torch.zeros(3, 2, 2),
        "step": 2,
        "tokens": int32(3, 10),
        "parents": int32(3, 10),
        "scores": torch.zeros(3, 10),
        "mask": torch.zeros(3, 2, 1, dtype=torch.int64),
        "seq_lens": int32(3),
    } | change
    candidates = sd.Candidates(*(arguments.pop(name) for name in sd.Candidates._fields))
    frontier = sd.Frontier(int32(3, 2), int32(3, 2), int32(3, 2), arguments.pop("mask"))
    with pytest.raises(ValueError) as error:
        sd.expand_tree(**arguments, candidates=candidates, frontier=frontier)
    assert str(error.value) == message


def test_expand_tree_refuses_read_only_in_place_arguments() -> None:
    np = pytest.importorskip("numpy")
    ids = np.zeros((1, 1, 1), np.int32)
    columns = sd.Candidates(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
    columns.parents.flags.writeable = False
    frontier = sd.Frontier(ids[0], ids[0], ids[0], np.zeros((1, 1, 1), np.int64))
    with pytest.raises(ValueError) as error:
        sd.expand_tree(ids, ids.astype(np.float32), 2, columns, frontier, ids[0, 0])
    assert str(error.value) == "expand_tree: candidates.parents is read-only, expected a writable tensor"
