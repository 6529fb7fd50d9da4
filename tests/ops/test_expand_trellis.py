"""expand_trellis against its float64 reference, and against all paths of small trellises."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference
from support.exhaustive import covering

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEAR = 1e-4  # scores this close may be ordered either way


def unary(batch: int, depth: int, k: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best k tokens of random logits."""
    top = sd.select_topk(2 * torch.randn(batch * depth, vocab), k)
    return top.ids.view(batch, depth, k), top.logprobs.view(batch, depth, k)


def tables(vocab: int, rank: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "predecessors": (scale * torch.randn(vocab, rank)).to(dtype),
        "successors": (scale * torch.randn(vocab, rank)).to(dtype),
    }


def expand(
    device: torch.device, ids: torch.Tensor, logprobs: torch.Tensor, count: int, **options: Any
) -> sd.Candidates:
    """Call the op with outputs full of garbage, and return its result on the CPU."""
    shape = len(ids), count
    out = sd.Candidates(
        torch.full(shape, -77, dtype=torch.int32, device=device),
        torch.full(shape, -77, dtype=torch.int32, device=device),
        torch.full(shape, torch.nan, device=device),
    )
    there = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    assert sd.expand_trellis(ids.to(device), logprobs.to(device), count, out=out, **there) is out
    return sd.Candidates(*(tensor.cpu() for tensor in out))


def paths_of(nodes: sd.Candidates, b: int) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node; parents come first."""
    paths: list[tuple[int, ...]] = []
    for token, parent, score in zip(*(field[b].tolist() for field in nodes), strict=True):
        if score == -math.inf:
            assert (token, parent) == (0, -1)
            continue
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def check(device: torch.device, ids: torch.Tensor, logprobs: torch.Tensor, count: int, **options: Any) -> None:
    """Compare with the reference: the same nodes with the same scores, except where scores are too near to order."""
    got, want = (
        expand(device, ids, logprobs, count, **options),
        reference.expand_trellis(ids, logprobs, count, **options),
    )
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=NEAR / 2)
    assert (got.scores[:, 1:] <= got.scores[:, :-1]).all()
    for b in range(len(ids)):
        ours, theirs = paths_of(got, b), paths_of(want, b)
        assert len(ours) == len(theirs)
        least = float(want.scores[b, len(theirs) - 1]) if theirs else 0.0
        scores = dict(zip(theirs, want.scores[b].tolist(), strict=False))
        for path, score in zip(ours, got.scores[b].tolist(), strict=False):
            assert abs(scores.get(path, least) - score) <= NEAR, path


SHAPES = [  # batch, depth, k, count, rank
    (1, 1, 1, 1, 1),
    (3, 3, 5, 9, 7),
    (2, 7, 16, 31, 256),
    (1, 16, 8, 40, 32),
    (1, 3, 20, 100, 32),
    (2, 2, 40, 50, 288),
    (1, 5, 64, 256, 64),
    (1, 16, 64, 20, 32),
]


@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES), ids=str)
def test_expand_trellis_with_transitions_matches_reference(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch, depth, k, count, rank = shape
    ids, logprobs = unary(batch, depth, k, 100)
    options = tables(100, rank, dtype, scale=1.5 * rank**-0.25)
    check(device, ids, logprobs, count, root_tokens=torch.randint(0, 100, (batch,), dtype=torch.int32), **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["gates", "rows", "map", "calibration", "width"])
def test_expand_trellis_options_match_reference(device: torch.device, kind: str) -> None:
    batch, depth, k, rank, vocab = 2, 4, 6, 32, 50
    ids, logprobs = unary(batch, depth, k, vocab)
    options: dict[str, Any] = tables(vocab, rank, torch.bfloat16, scale=0.6)
    options["root_tokens"] = torch.tensor([-1, 7], dtype=torch.int32)  # the first has no factor
    match kind:
        case "gates":
            options["gates"] = torch.rand(batch, depth, rank).bfloat16()
        case "rows":
            del options["root_tokens"]
            options["predecessors"] = torch.randn(batch, depth, k, rank).bfloat16()
        case "map":
            options["id_map"] = torch.randperm(2 * vocab)[:vocab].to(torch.int32)
            options["predecessors"] = torch.randn(2 * vocab, rank).bfloat16()
        case "calibration":
            options["calibration"] = torch.tensor([[0.8, 0.1], [1.2, -0.3]])
        case "width":
            options["width"] = 3
    check(device, ids, logprobs, 20, **options)


def test_expand_trellis_breaks_ties_as_documented(device: torch.device) -> None:
    # Few values that add exactly, so that most sums tie, or that differ by less than sums are rounded to; some candidates
    # have no probability.
    for depth, k, count in ((1, 3, 5), (4, 5, 30), (16, 2, 100), (3, 64, 256), (3, 20, 70)):
        ids = torch.stack([torch.randperm(100)[:k] for _ in range(3 * depth)]).view(3, depth, k).to(torch.int32)
        logprobs = -torch.randint(0, 5, (3, depth, k)) / 4
        logprobs[2] -= torch.randint(0, 4, (depth, k)) * 2.0**-25
        logprobs = torch.where(torch.rand(3, depth, k) < 0.1, -torch.inf, logprobs)
        for width in (1, 2, 256):
            got = expand(device, ids, logprobs, count, width=width)
            want = reference.expand_trellis(ids, logprobs, count, width=width)
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g, w)


def test_expand_trellis_finds_the_best_of_all_paths(device: torch.device) -> None:
    for depth, k, count in ((1, 4, 3), (2, 3, 20), (4, 3, 30), (5, 2, 62)):
        ids, logprobs = unary(1, depth, k, 12)
        options: dict[str, Any] = {**tables(12, 4, torch.float32), "root_tokens": torch.tensor([3], dtype=torch.int32)}
        of_steps = reference.trellis_logprobs(ids, logprobs, **options)[0]
        scores = {}
        for length in range(1, depth + 1):
            for path in itertools.product(range(k), repeat=length):
                steps = [of_steps[d, path[d - 1] if d else 0, c] for d, c in enumerate(path)]
                scores[tuple(int(ids[0, d, c]) for d, c in enumerate(path))] = float(torch.stack(steps).sum())
        best = sorted(scores, key=lambda path: -scores[path])[:count]
        got = expand(device, ids, logprobs, count, **options)
        paths = paths_of(got, 0)
        assert len(paths) == len(best)
        for path, score, other in zip(paths, got.scores[0].tolist(), best, strict=False):
            assert scores[path] == pytest.approx(score, abs=1e-5)
            assert scores[path] == pytest.approx(scores[other], abs=1e-5)


def test_expand_trellis_probabilities_of_all_tokens_sum_to_one(device: torch.device) -> None:
    # With the whole vocabulary as candidates nothing is left over, whatever the transitions.
    ids, logprobs = unary(1, 1, 40, 40)
    options: dict[str, Any] = {
        **tables(40, 8, torch.float32, scale=2.0),
        "root_tokens": torch.tensor([5], dtype=torch.int32),
    }
    all_of_it = expand(device, ids, logprobs, 40, **options)
    assert float(all_of_it.scores.exp().sum()) == pytest.approx(1, abs=1e-4)
    some = expand(device, ids[..., :10], logprobs[..., :10], 10, **options)
    assert float(some.scores.exp().sum()) < 1


def test_expand_trellis_fewer_nodes_are_the_first_of_more(device: torch.device) -> None:
    ids, logprobs = unary(2, 5, 8, 60)
    logprobs = (4 * logprobs).round() / 4  # ties
    many = expand(device, ids, logprobs, 60)
    for count in (1, 7, 31):
        for few, all_of_it in zip(expand(device, ids, logprobs, count), many, strict=True):
            assert torch.equal(few, all_of_it[:, :count])


def test_expand_trellis_of_bad_values_stays_in_bounds(device: torch.device) -> None:
    ids = torch.tensor([[[-1, 5, 2**31 - 1], [3, 1, 99]]], dtype=torch.int32)
    logprobs = torch.tensor([[[-0.5, torch.nan, -1.0], [torch.inf, -torch.inf, -2.0]]])
    options: dict[str, Any] = {**tables(6, 4, torch.float32), "root_tokens": torch.tensor([-9], dtype=torch.int32)}
    options["successors"][3] = torch.nan
    got = expand(device, ids, logprobs, 12, **options, id_map=torch.arange(6, dtype=torch.int32))
    assert 5 not in got.tokens and 1 not in got.tokens and not got.scores.isnan().any()
    assert len(paths_of(got, 0)) == 4  # token 99 after each of two, and these; 3 and 5 are no candidates


def test_expand_trellis_nodes_become_a_tree(device: torch.device) -> None:
    ids, logprobs = unary(2, 4, 8, 50)
    nodes = sd.expand_trellis(ids.to(device), logprobs.to(device), 15)
    lens = torch.tensor([10, 20], dtype=torch.int32, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    tree = sd.build_tree(nodes, lens, lens, 16, status=status)
    assert tree.num_nodes.tolist() == [16, 16] and status.tolist() == [0, 0]
    assert torch.equal(tree.tokens[:, 1:], nodes.tokens) and torch.equal(tree.parents[:, 1:], nodes.parents + 1)


def test_expand_trellis_of_no_rows(device: torch.device) -> None:
    nodes = sd.expand_trellis(
        torch.zeros(0, 2, 3, dtype=torch.int32, device=device), torch.zeros(0, 2, 3, device=device), 4
    )
    assert [list(field.shape) for field in nodes] == [[0, 4]] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_candidates": 257}, "num_candidates is 257, expected 1 to 256"),
        ({"width": 0}, "width is 0, expected 1 to 256"),
        ({"topk_ids": torch.zeros(1, 17, 3, dtype=torch.int32)}, "depth is 17, expected 1 to 16"),
        ({"predecessors": torch.zeros(5, 4)}, "successors is None, expected a table next to predecessors"),
        ({"successors": torch.zeros(5, 4)}, "successors is given, expected None without predecessors"),
        ({"gates": torch.zeros(1, 2, 4)}, "gates is given, expected None without a table of predecessors"),
        (
            {"predecessors": torch.zeros(5, 4), "successors": torch.zeros(5, 4)},
            "root_tokens is None, expected tokens next to a table of predecessors",
        ),
        (
            {"predecessors": torch.zeros(1, 2, 3, 4), "successors": torch.zeros(5, 6)},
            "successors has shape [5, 6], expected [successor_rows, rank=4]",
        ),
        (
            {"predecessors": torch.zeros(1, 2, 3, 4), "successors": torch.zeros(5, 4).half()},
            "successors is float16, expected float32",
        ),
    ],
)
def test_expand_trellis_refuses_by_name(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "topk_ids": torch.zeros(1, 2, 3, dtype=torch.int32),
        "topk_logprobs": torch.zeros(1, 2, 3),
        "num_candidates": 4,
    }
    with pytest.raises(ValueError) as error:
        sd.expand_trellis(**(arguments | changes))
    assert str(error.value) == f"expand_trellis: {message}"
