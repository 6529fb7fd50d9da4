"""merge_trees against its reference, and properties of every union."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference
from support.random_drafts import on, random_draft
from support.trees import WILD, assert_is_tree, assert_same_tree, poisoned_tree


def check(
    device: torch.device, a: sd.Tree, a_scores: torch.Tensor, b: sd.Tree, b_scores: torch.Tensor, nodes: int
) -> tuple[sd.Tree, torch.Tensor]:
    want, want_scores = reference.merge_trees(a, a_scores, b, b_scores, nodes)
    batch = len(a_scores)
    got, scores = sd.merge_trees(
        on(device, a),
        a_scores.to(device),
        on(device, b),
        b_scores.to(device),
        nodes,
        out=(poisoned_tree(batch, nodes, device), torch.full((batch, nodes), 77.0, device=device)),
    )
    assert_same_tree(got, want)
    assert torch.equal(scores.cpu(), want_scores)
    got = on(torch.device("cpu"), got)
    for row in range(batch):
        if got.num_nodes[row]:
            assert_is_tree(got, row, int(got.positions[row, 0]))
    return got, scores.cpu()


SIZES = [(1, 1, 1, 1), (3, 1, 5, 4), (3, 16, 32, 32), (2, 64, 64, 64), (2, 65, 30, 65), (2, 256, 256, 256), (2, 256, 256, 17)]  # fmt: skip


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("vocab", [2, 9])
@pytest.mark.parametrize(("batch", "a_nodes", "b_nodes", "nodes"), SIZES)
def test_merge_trees_matches_reference(
    device: torch.device, batch: int, a_nodes: int, b_nodes: int, nodes: int, vocab: int, levels: int
) -> None:
    check(device, *random_draft(batch, a_nodes, vocab, levels), *random_draft(batch, b_nodes, vocab, levels), nodes)


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32))
def test_merge_trees_of_garbage_matches_reference(
    device: torch.device, a_nodes: int, b_nodes: int, nodes: int, vocab: int, seed: int
) -> None:
    """Fewer nodes give a prefix of the union; garbage in scores and parents still gives a tree."""
    torch.manual_seed(seed)
    a, b = random_draft(4, a_nodes, vocab, 3), random_draft(4, b_nodes, vocab, 3)
    tree, _ = check(device, *a, *b, nodes)
    smaller, _ = check(device, *a, *b, max(nodes - 3, 1))
    for row, count in enumerate(smaller.num_nodes.tolist()):
        assert torch.equal(smaller.tokens[row, :count], tree.tokens[row, :count])
    for drafted, scores in (a, b):
        spoilt = torch.rand_like(scores) < 0.1
        scores[spoilt] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5, -0.0])[torch.randint(5, (1,))]
        drafted.parents[torch.rand(scores.shape) < 0.1] = int(
            torch.tensor([*WILD, 0, 3, -(2**31)])[torch.randint(5, (1,))]
        )
        drafted.num_nodes[torch.rand(4) < 0.2] = 0
        drafted.tokens[torch.rand(4) < 0.1, 0] = 5
    check(device, *a, *b, nodes)


def draft_of(paths: dict[tuple[int, ...], float]) -> tuple[sd.Tree, torch.Tensor]:
    numbers = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
    tokens = torch.tensor([[4, *(path[-1] for path in paths)]], dtype=torch.int32)
    parents = torch.tensor([[-1, *(numbers[path[:-1]] for path in paths)]], dtype=torch.int32)
    tree = sd.build_tree_from_parents(tokens, parents, torch.tensor([7], dtype=torch.int32))
    return tree, torch.tensor([[0.0, *paths.values()]])


def test_merge_trees_of_a_worked_example() -> None:
    a = draft_of({(1,): -1.0, (2,): -2.0, (1, 3): -2.0})
    b = draft_of({(2,): -0.5, (2, 6): -0.7, (1,): -3.0, (1, 5): -3.5})
    tree, scores = sd.merge_trees(*a, *b, 6)
    assert tree.tokens.tolist() == [[4, 2, 6, 1, 3, 5]] and tree.parents.tolist() == [[-1, 0, 1, 0, 3, 3]]
    assert tree.positions.tolist() == [[7, 8, 9, 8, 9, 9]]
    assert scores[0].tolist() == pytest.approx([0.0, -0.5, -0.7, -1.0, -2.0, -3.5])


def test_merge_trees_with_itself_and_with_empty_trees() -> None:
    a, scores = random_draft(5, 12, 100)
    want = reference.merge_trees(a, scores, a, scores, 12)
    root = sd.Tree(*(field[:, :1].clone() if field.ndim > 1 else torch.zeros_like(field) for field in a))
    for other in (a, scores), (root, scores[:, :1].contiguous()):
        for pair in ((a, scores, *other), (*other, a, scores)):
            tree, merged = sd.merge_trees(*pair, 12)
            assert_same_tree(tree, want[0])
            assert torch.equal(merged, want[1])


def test_merge_trees_accepts_empty_batch(device: torch.device) -> None:
    tree, scores = random_draft(1, 3, 5)
    tree, scores = on(device, sd.Tree(*(field[:0] for field in tree))), scores[:0].to(device)
    merged, merged_scores = sd.merge_trees(tree, scores, tree, scores, 4)
    assert merged.tokens.shape == merged_scores.shape == (0, 4)


@pytest.mark.sanitize
def test_merge_trees_of_one_node(device: torch.device) -> None:
    check(device, *random_draft(2, 5, 3), *random_draft(2, 4, 3), 6)
    check(device, *random_draft(1, 70, 3), *random_draft(1, 4, 3), 66)


def test_merge_trees_error_messages() -> None:
    tree, scores = random_draft(2, 5, 9)
    other, other_scores = random_draft(3, 4, 9)
    for call, message in (
        (lambda: sd.merge_trees(tree, scores, tree, scores, 0), "merge_trees: num_nodes is 0, expected 1 to 256"),
        (lambda: sd.merge_trees(tree, scores, tree, scores, 257), "merge_trees: num_nodes is 257, expected 1 to 256"),
        (lambda: sd.merge_trees(tree, scores, other, other_scores, 4), "merge_trees: b.tokens has shape [3, 4], expected [batch=2, b_nodes]"),
        (lambda: sd.merge_trees(tree, other_scores, tree, scores, 4), "merge_trees: a_scores has shape [3, 4], expected [batch=2, a_nodes=5]"),
        (lambda: sd.merge_trees(tree, scores, tree, scores.double(), 4), "merge_trees: b_scores is float64, expected float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message
