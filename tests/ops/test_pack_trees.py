"""pack_trees against its reference: cut trees are trees, and their nodes are contiguous."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference
from support.random_drafts import on, random_draft
from support.trees import assert_is_tree, assert_same_tree

INT = torch.int32


def shares_of(counts: list[int], ends: list[int] | None = None) -> sd.NodeAllocation:
    starts = torch.tensor([0, *counts]).cumsum(0).to(INT) if ends is None else torch.tensor(ends, dtype=INT)
    return sd.NodeAllocation(torch.tensor(counts, dtype=INT), starts, torch.empty(0), torch.empty(0))


def check(
    device: torch.device, tree: sd.Tree, scores: torch.Tensor, shares: sd.NodeAllocation, num_rows: int
) -> tuple[sd.Tree, sd.PackedNodes]:
    cut, want_tree = (sd.Tree(*(field.clone() for field in tree)) for _ in range(2))
    want = reference.pack_trees(want_tree, scores, shares, num_rows)
    cut = on(device, cut)
    words = tree.mask.shape[2]
    out = sd.PackedNodes(
        torch.full((num_rows,), -77, dtype=INT, device=device),
        torch.full((num_rows,), -77, dtype=INT, device=device),
        torch.full((num_rows, words), -77, device=device),
        torch.full((num_rows,), torch.nan, device=device),
    )
    there = sd.NodeAllocation(*(field.to(device) for field in shares))
    got = sd.pack_trees(cut, scores.to(device), there, num_rows, out=out)
    assert_same_tree(cut, want_tree)
    for name, g, w in zip(sd.PackedNodes._fields, got, want, strict=True):
        assert torch.equal(g.cpu(), w), name
    return want_tree, want


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 5), (4, 64), (2, 65), (5, 256)])
def test_pack_trees_matches_reference(device: torch.device, batch: int, nodes: int) -> None:
    tree, scores = random_draft(batch, nodes, 50)
    counts = [int(torch.randint(0, n + 1, ())) for n in tree.num_nodes.tolist()]
    cut, packed = check(device, tree, scores, shares_of(counts), sum(counts) + 3)
    for b, count in enumerate(counts):
        if count:
            assert_is_tree(cut, b, int(tree.positions[b, 0]))
    assert packed.mask[sum(counts) :].count_nonzero() == 0
    check(device, tree, scores, shares_of(tree.num_nodes.tolist()), int(tree.num_nodes.sum()))


@pytest.mark.sanitize
def test_pack_trees_of_a_worked_example(device: torch.device) -> None:
    tokens = torch.tensor([[7, 3, 5, 9], [8, 1, 2, 4]], dtype=INT)
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], dtype=INT)
    tree = sd.build_tree_from_parents(tokens, parents, torch.tensor([10, 20], dtype=INT))
    scores = torch.tensor([[0.0, -1, -2, -3], [0.0, -1, -2, -3]])
    cut, packed = check(device, tree, scores, shares_of([2, 3]), 6)
    assert packed.tokens.tolist() == [7, 3, 8, 1, 2, 0] and packed.positions.tolist() == [10, 11, 20, 21, 22, 0]
    assert packed.mask.flatten().tolist() == [1, 3, 1, 3, 7, 0]
    assert cut.first_child.tolist() == [[1, -1, -1, -1], [1, 2, -1, -1]]
    assert cut.next_sibling.tolist() == [[-1, -1, -1, -1]] * 2


@pytest.mark.parametrize("num_rows", [0, 3])
def test_pack_trees_accepts_empty_batch(device: torch.device, num_rows: int) -> None:
    tree, scores = random_draft(1, 4, 50)
    check(device, sd.Tree(*(field[:0] for field in tree)), scores[:0], shares_of([]), num_rows)


@pytest.mark.sanitize
def test_pack_trees_skips_rows_out_of_range(device: torch.device) -> None:
    tree, scores = random_draft(3, 6, 50)
    wild = [-(2**31), -4, 3, 2**31 - 1]
    for ends in (wild, wild[::-1], [0, 9, 2, 4]):
        cut = on(device, sd.Tree(*(field.clone() for field in tree)))
        shares = sd.NodeAllocation(*(field.to(device) for field in shares_of([2**31 - 1, -5, 3], ends)))
        out = sd.PackedNodes(
            *(
                torch.full((5, *shape), -77, dtype=dtype, device=device)
                for shape, dtype in (((), INT), ((), INT), ((1,), torch.int64), ((), torch.float32))
            )
        )
        sd.pack_trees(cut, scores.to(device), shares, 5, out=out)
        assert all(not bool((field == -77).any()) for field in out)
        assert cut.num_nodes.tolist() == [int(tree.num_nodes[0]), 0, min(3, int(tree.num_nodes[2]))]


def test_pack_trees_after_allocate_nodes_keeps_best_nodes(device: torch.device) -> None:
    """Trees in best-first order (merged, n-gram, from candidates) lose their least likely nodes."""
    batch, nodes = 4, 24
    k, steps = 3, 4
    logprobs = -torch.rand(batch, k).sort(1).values
    candidates, frontier = sd.expand_root(
        torch.randint(0, 99, (batch, k), dtype=INT), logprobs, torch.full((batch,), 5, dtype=INT), steps
    )
    for step in range(2, steps + 1):
        ids = torch.randint(0, 99, (batch, k, k), dtype=INT)
        logprobs = -torch.rand(batch, k, k).sort(2).values
        inputs = sd.expand_tree(ids, logprobs, step, candidates, frontier, torch.full((batch,), 5, dtype=INT))
        frontier = frontier._replace(tokens=inputs.tokens, positions=inputs.positions)
    lens = torch.full((batch,), 5, dtype=INT)
    built = sd.build_tree(candidates, torch.zeros(batch, dtype=INT), lens, nodes)
    scores = torch.cat([torch.zeros(batch, 1), candidates.scores.topk(nodes - 1).values], 1)
    given = sd.build_tree(candidates, torch.zeros(batch, dtype=INT), lens, nodes, order="given")
    given_scores = torch.cat([torch.zeros(batch, 1), candidates.scores[:, : nodes - 1]], 1)
    ordered = sd.merge_trees(given, given_scores, given, given_scores, nodes)
    index = sd.NgramIndex(max_tokens=999, num_slots=batch, max_len=99)
    index.insert(torch.randint(0, 3, (300,), dtype=INT))
    for slot in range(batch):
        index.begin(slot)
        index.insert(torch.randint(0, 3, (9,), dtype=INT), slot, start=0)
    found, found_scores, _ = index.draft(torch.arange(batch).int(), torch.full((batch,), 8, dtype=INT), nodes)
    merged = sd.merge_trees(built, scores, found, found_scores, nodes)
    for tree, listed in ((built, scores), ordered, (found, found_scores), merged):
        assert bool((listed.diff(dim=1).nan_to_num(nan=0) <= 0).all())
        for budget in (batch, 2 * batch + 1, 40, batch * nodes):
            shares = sd.allocate_nodes(listed, budget)
            cut, packed = check(device, tree, listed, shares, budget)
            for b in range(batch):
                assert_is_tree(cut, b, int(tree.positions[b, 0]))
            left = [float(listed[b, n]) for b, n in enumerate(shares.num_nodes.tolist()) if n < nodes]
            assert max(left, default=-torch.inf) <= float(packed.scores[: int(shares.cu_seqlens[-1])].min())


def test_pack_trees_error_messages() -> None:
    tree, scores = random_draft(2, 4, 50)
    for call, message in (
        (lambda: sd.pack_trees(tree, scores, shares_of([1, 1]), -1), "pack_trees: num_rows is -1, expected 0 to 2147483647"),
        (lambda: sd.pack_trees(tree, scores, shares_of([1]), 3), "pack_trees: allocation.num_nodes has shape [1], expected [batch=2]"),
        (lambda: sd.pack_trees(tree, scores[:, 1:], shares_of([1, 1]), 3), "pack_trees: scores has shape [2, 3], expected [batch=2, num_nodes=4]"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message
    for arguments, message in (
        ((None, scores, shares_of([1, 1]), 3), "pack_trees: tree is a NoneType, expected a Tree"),
        ((tree, scores, None, 3), "pack_trees: allocation is a NoneType, expected a NodeAllocation"),
    ):
        with pytest.raises(TypeError) as wrong:
            sd.pack_trees(*arguments)
        assert str(wrong.value) == message
