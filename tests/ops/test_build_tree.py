"""build_tree against its reference, by its properties, and at the end of a full draft."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference_draft
from specdec_kernels.reference import tree as reference
from support.devices import HAS_CUDA
from support.trees import BAD_TREE, WILD, assert_is_tree, assert_same_tree, poisoned_tree

ORDERS = ["score", "given"]


def random_candidates(batch: int, columns: int, missing: float = 0.1) -> sd.Candidates:
    """Return well-formed candidates with many equal scores; some are missing with all their descendants."""
    earlier = (torch.rand(batch, columns) * torch.arange(columns)).to(torch.int32)
    from_root = (torch.rand(batch, columns) < 0.3) | (torch.arange(columns) == 0)
    parents = earlier.where(~from_root, torch.full_like(earlier, -1))
    # What a candidate adds to its parent's score, summed up to the root by pointer doubling; column 0 is the root.
    scores = -torch.randint(0, 3, (batch, columns + 1)) / 4
    scores[torch.rand(batch, columns + 1) < missing] = -torch.inf
    scores[:, 0] = 0
    up = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), parents.long() + 1], 1)
    while up.any():
        scores, up = scores + scores.gather(1, up), up.gather(1, up)
    return sd.Candidates(
        torch.randint(0, 1000, (batch, columns), dtype=torch.int32), parents, scores[:, 1:].contiguous()
    )


def scramble(candidates: sd.Candidates, share: float = 0.1) -> None:
    """Corrupt some of the parents and scores in every possible form."""
    batch, columns = candidates.parents.shape
    wild = torch.tensor([*WILD, -2, -(2**31), 0, 1, columns, columns - 1], dtype=torch.int32)
    hit = torch.rand(batch, columns) < share
    candidates.parents[hit] = wild[torch.randint(0, len(wild), (int(hit.sum()),))]
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.25])
    hit = torch.rand(batch, columns) < share
    candidates.scores[hit] = odd[torch.randint(0, len(odd), (int(hit.sum()),))]


def slot_state(num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    root_tokens = torch.randint(0, 1000, (num_slots,), dtype=torch.int32)
    return root_tokens, torch.randint(0, 500, (num_slots,), dtype=torch.int32)


def check(
    device: torch.device,
    candidates: sd.Candidates,
    nodes: int,
    order: str = "score",
    slots: torch.Tensor | None = None,
    num_slots: int | None = None,
) -> tuple[sd.Tree, torch.Tensor]:
    """Return the tree and the status, equal to the reference's in every element."""
    batch = len(candidates.tokens)
    num_slots = batch if num_slots is None else num_slots
    root_tokens, seq_lens = slot_state(num_slots)
    status = torch.full((num_slots,), 16, dtype=torch.int32)
    want_status = status.clone()
    want_scores, scores = (torch.full((batch, nodes), torch.nan, device=where) for where in ("cpu", device))
    want = reference.build_tree(candidates, root_tokens, seq_lens, nodes, slots, order, want_status, want_scores)
    status = status.to(device)
    got = sd.build_tree(
        sd.Candidates(*(t.to(device) for t in candidates)),
        root_tokens.to(device),
        seq_lens.to(device),
        nodes,
        slots=None if slots is None else slots.to(device),
        order=order,
        status=status,
        out=poisoned_tree(batch, nodes, device),
        out_scores=scores,
    )
    assert_same_tree(got, want)
    assert torch.equal(scores.cpu(), want_scores)
    assert torch.equal(status.cpu(), want_status)
    got = sd.Tree(*(t.cpu() for t in got))
    if slots is None:
        for b in range(batch):
            assert_is_tree(got, b, int(seq_lens[b]))
    return got, want_status


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("batch", "columns", "nodes"),
    [(1, 0, 1), (2, 0, 5), (3, 1, 2), (2, 9, 1), (4, 20, 8), (3, 53, 64), (2, 300, 65), (2, 410, 129), (2, 700, 256)],
)  # fmt: skip
def test_build_tree_matches_reference(device: torch.device, batch: int, columns: int, nodes: int, order: str) -> None:
    _, status = check(device, random_candidates(batch, columns, missing=0.0), nodes, order)
    assert (status == 16).all()


@pytest.mark.parametrize("order", ORDERS)
def test_build_tree_drops_malformed_candidates_and_descendants(device: torch.device, order: str) -> None:
    for nodes in (2, 7, 33, 200):
        candidates = random_candidates(8, 60)
        scramble(candidates)
        _, status = check(device, candidates, nodes, order)
        assert (status & BAD_TREE).any() and (status & 16).all()


NODES = [1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 128, 255, 256]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nodes", NODES)
def test_build_tree_at_size_boundaries_matches_reference(device: torch.device, nodes: int, order: str) -> None:
    for columns in {1, max(nodes - 2, 0), nodes - 1, nodes, 410, 512, 513, 1025}:
        check(device, random_candidates(2, columns, missing=0.05), nodes, order)
    candidates = random_candidates(2, 600)
    scramble(candidates)
    check(device, candidates, nodes, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nodes", [8, 64, 256])
@pytest.mark.parametrize("spread", ["falling", "rising", "equal", "two"])
def test_build_tree_of_thousands_of_candidates_matches_reference(
    device: torch.device, spread: str, nodes: int, order: str
) -> None:
    """Several tiles on the GPU, the last one partial; rising scores replace all held candidates with each tile."""
    columns = 64 + 4 * 64 * 64 + 37
    numbers = torch.arange(columns)
    scores = {
        "falling": -numbers / 8,
        "rising": numbers / 8,
        "equal": torch.full((columns,), -1.0),
        "two": -(numbers % 1024 < 1000).float(),
    }[spread][None]
    tokens, parents = numbers.to(torch.int32)[None], torch.full((1, columns), -1, dtype=torch.int32)
    tree, _ = check(device, sd.Candidates(tokens, parents, scores), nodes, order)
    best = sorted(range(columns), key=lambda c: (0 if order == "given" else -float(scores[0, c]), c))[: nodes - 1]
    assert tree.tokens[0, 1:].tolist() == best


@pytest.mark.parametrize("columns", [16448, 20000])
def test_build_tree_of_thousands_of_related_candidates_matches_reference(device: torch.device, columns: int) -> None:
    candidates = random_candidates(2, columns, missing=0.01)
    for nodes in (8, 65, 256):
        check(device, candidates, nodes)
        check(device, candidates, nodes, "given")
    scramble(candidates)
    check(device, candidates, 64)


def test_build_tree_orders_special_scores(device: torch.device) -> None:
    """Infinities, both zeros (which are equal), the smallest and the largest floats, NaN."""
    kinds = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan]
    for columns in (30, 400, 700):
        scores = torch.tensor(kinds)[torch.randint(0, len(kinds), (20, columns))]
        tokens = torch.arange(columns, dtype=torch.int32).repeat(20, 1)
        for nodes in (5, 64, 256):
            check(device, sd.Candidates(tokens, torch.full_like(tokens, -1), scores), nodes)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("scrambled", [False, True], ids=["well-formed", "malformed"])
@pytest.mark.parametrize("order", ORDERS)
def test_build_tree_is_equal_on_both_devices(order: str, scrambled: bool) -> None:
    for columns, nodes in [(5, 6), (40, 8), (150, 33), (410, 64), (700, 20), (410, 256)]:
        candidates = random_candidates(2000, columns, missing=0.02)
        if scrambled:
            scramble(candidates, share=2 / columns)
        arguments = slot_state(2000)
        candidates_there = sd.Candidates(*(t.cuda() for t in candidates))
        status = torch.zeros(2000, dtype=torch.int32)
        there = status.cuda()
        want = sd.build_tree(candidates, *arguments, nodes, order=order, status=status)
        got = sd.build_tree(candidates_there, *(t.cuda() for t in arguments), nodes, order=order, status=there)
        assert_same_tree(got, want)
        assert torch.equal(there.cpu(), status)
        assert not scrambled or int((status != 0).sum()) > 0


def test_build_tree_drops_malformed_chain_deeper_than_tree(device: torch.device) -> None:
    columns = 600
    parents = torch.arange(-1, columns - 1, dtype=torch.int32)[None].clone()
    parents[0, 450] = 500
    tokens = torch.arange(columns, dtype=torch.int32)[None]
    for nodes in (1, 100, 256):
        tree, status = check(device, sd.Candidates(tokens, parents, torch.full((1, columns), -1.0)), nodes)
        assert int(tree.num_nodes) == nodes and status.tolist() == [16 | BAD_TREE]


@pytest.mark.sanitize
@pytest.mark.parametrize(("columns", "nodes"), [(300, 9), (520, 9), (1100, 70), (300, 200)])
def test_build_tree_of_few_columns_matches_reference(device: torch.device, columns: int, nodes: int) -> None:
    candidates = random_candidates(2, columns)
    check(device, candidates, nodes)
    scramble(candidates, share=0.01)
    check(device, candidates, nodes, "given")


@pytest.mark.sanitize
def test_build_tree_with_slots_and_empty_rows_matches_reference(device: torch.device) -> None:
    slots = torch.tensor([2, -1, 0, *WILD], dtype=torch.int32)
    candidates = random_candidates(5, 12)
    check(device, candidates, 5, slots=slots, num_slots=3)
    scramble(candidates)
    check(device, candidates, 9, slots=slots, num_slots=3)


def test_build_tree_accepts_empty_batch(device: torch.device) -> None:
    check(device, random_candidates(0, 4), 3)


def test_build_tree_ignores_garbage_in_rows_without_candidates(device: torch.device) -> None:
    candidates = sd.Candidates(
        torch.full((2, 3), -5, dtype=torch.int32),
        torch.full((2, 3), 2**31 - 1, dtype=torch.int32),
        torch.full((2, 3), torch.nan),
    )
    tree, status = check(device, candidates, 4, slots=torch.tensor([-1, 0], dtype=torch.int32), num_slots=1)
    assert tree.num_nodes.tolist() == [0, 1] and status.tolist() == [16]


@pytest.mark.parametrize("seq_len", [-1, -(2**31), 2**31 - 1], ids=str)
def test_build_tree_of_extreme_seq_len_wraps_positions_only(device: torch.device, seq_len: int) -> None:
    candidates = sd.Candidates(*(t.to(device) for t in random_candidates(1, 9, missing=0.0)))
    root = torch.tensor([3], dtype=torch.int32, device=device)
    wild = sd.build_tree(candidates, root, torch.full_like(root, seq_len), 6)
    sane = sd.build_tree(candidates, root, torch.zeros_like(root), 6)
    wrapped = (sane.positions.long() + seq_len + 2**31) % 2**32 - 2**31
    assert_same_tree(wild, sane._replace(positions=wrapped.to(torch.int32)))


def test_build_tree_of_a_chain(device: torch.device) -> None:
    tokens = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    tree, _ = check(device, sd.Candidates(tokens, parents, torch.tensor([[0.0, 0.0, -1.0]])), 5)
    assert tree.num_nodes.tolist() == [4]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1]]
    assert tree.mask[0, :, 0].tolist() == [1, 3, 7, 15, 16]


@pytest.mark.parametrize("scrambled", [False, True], ids=["well-formed", "malformed"])
@pytest.mark.parametrize("order", ORDERS)
def test_build_tree_of_fewer_nodes_is_a_prefix(device: torch.device, order: str, scrambled: bool) -> None:
    candidates = random_candidates(6, 90)
    if scrambled:
        scramble(candidates)
    candidates = sd.Candidates(*(t.to(device) for t in candidates))
    root_tokens, seq_lens = (t.to(device) for t in slot_state(6))
    large = sd.build_tree(candidates, root_tokens, seq_lens, 100, order=order)
    for nodes in (1, 2, 17, 64, 65):
        small = sd.build_tree(candidates, root_tokens, seq_lens, nodes, order=order)
        assert torch.equal(small.num_nodes, large.num_nodes.clamp(max=nodes))
        for b, count in enumerate(small.num_nodes.tolist()):
            for name in ("tokens", "parents", "positions"):
                assert torch.equal(getattr(small, name)[b, :count], getattr(large, name)[b, :count])


@pytest.mark.parametrize("seed", range(20))
def test_build_tree_selects_best_candidates_and_their_ancestors(device: torch.device, seed: int) -> None:
    """Scores are distinct or tied at random: the nodes are exactly the best by score, then by index."""
    torch.manual_seed(seed)
    columns, nodes = int(torch.randint(1, 120, ())), int(torch.randint(1, 70, ()))
    candidates = random_candidates(1, columns, missing=0.0)
    # Tokens are candidate numbers, so that the chosen set can be read off.
    candidates = candidates._replace(tokens=torch.arange(columns, dtype=torch.int32)[None])
    tree, _ = check(device, candidates, nodes)
    count = int(tree.num_nodes)
    chosen = tree.tokens[0, 1:count].tolist()
    scores, parents = candidates.scores[0].tolist(), candidates.parents[0].tolist()
    assert chosen == sorted(range(columns), key=lambda c: (-scores[c], c))[: nodes - 1]
    for i, c in enumerate(chosen, start=1):
        parent = tree.parents[0, i]
        assert parents[c] == (-1 if parent == 0 else chosen[parent - 1])


@pytest.mark.parametrize(
    ("k", "num_steps", "nodes"),
    [(1, 6, 6), (1, 255, 256), (2, 4, 8), (4, 5, 32), (10, 5, 64), (8, 3, 200), (64, 3, 64)],
)
def test_draft_ops_in_sequence_match_references(device: torch.device, k: int, num_steps: int, nodes: int) -> None:
    """expand_root, expand_tree and build_tree in sequence, with ties in every step."""
    num_slots, slots = 3, torch.tensor([2, -1, 0], dtype=torch.int32)
    root_tokens, seq_lens = slot_state(num_slots)
    logprobs = lambda *shape: -torch.randint(0, 4, shape) / 8  # noqa: E731
    there = {"slots": slots.to(device)}
    seq_lens_there = seq_lens.to(device)

    ids, scores = torch.randint(0, 99, (num_slots, k), dtype=torch.int32), logprobs(num_slots, k)
    candidates, frontier = sd.expand_root(ids.to(device), scores.to(device), seq_lens_there, num_steps, **there)
    want, want_frontier = reference_draft.expand_root(ids, scores, seq_lens, num_steps, slots)
    for step in range(2, num_steps + 1):
        ids, scores = torch.randint(0, 99, (3, k, k), dtype=torch.int32), logprobs(3, k, k)
        sd.expand_tree(
            ids.to(device), scores.to(device), step, candidates, frontier, seq_lens_there, **there
        )  # fmt: skip
        want, nodes_of_step, mask, _ = reference_draft.expand_tree(
            ids, scores, step, want, want_frontier, seq_lens, slots
        )
        want_frontier = want_frontier._replace(nodes=nodes_of_step, mask=mask)
    status = torch.zeros(num_slots, dtype=torch.int32, device=device)
    tree = sd.build_tree(candidates, root_tokens.to(device), seq_lens_there, nodes, status=status, **there)
    assert_same_tree(tree, reference.build_tree(want, root_tokens, seq_lens, nodes, slots))
    assert status.tolist() == [0] * num_slots
    tree = sd.Tree(*(t.cpu() for t in tree))
    assert tree.num_nodes.tolist() == [min(nodes, 1 + k + (num_steps - 1) * k * k), 0, int(tree.num_nodes[0])]
    for b in (0, 2):
        assert_is_tree(tree, b, int(seq_lens[slots[b]]))


def test_build_tree_commutes_with_batch_permutation(device: torch.device) -> None:
    candidates = sd.Candidates(*(t.to(device) for t in random_candidates(7, 40)))
    root_tokens, seq_lens = (t.to(device) for t in slot_state(7))
    order = torch.randperm(7, device=device)
    plain = sd.build_tree(candidates, root_tokens, seq_lens, 16)
    permuted = sd.build_tree(
        sd.Candidates(*(t[order] for t in candidates)), root_tokens, seq_lens, 16, slots=order.to(torch.int32)
    )  # fmt: skip
    assert_same_tree(permuted, [t[order] for t in plain])


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


OUT = poisoned_tree(2, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(2, 6)}, "build_tree: candidates.tokens is float32, expected int32"),
        ({"parents": int32(2, 5)}, "build_tree: candidates.parents has shape [2, 5], expected [batch=2, candidates=6]"),
        ({"scores": torch.zeros(6, 2).t()}, "build_tree: candidates.scores has shape [2, 6] and is not contiguous, expected a contiguous tensor"),
        ({"seq_lens": int32(3)}, "build_tree: seq_lens has shape [3], expected [num_slots=2]"),
        ({"num_nodes": 0}, "build_tree: num_nodes is 0, expected 1 to 256"),
        ({"num_nodes": -3}, "build_tree: num_nodes is -3, expected 1 to 256"),
        ({"num_nodes": 257}, "build_tree: num_nodes is 257, expected 1 to 256"),
        ({"slots": int32(3)}, "build_tree: slots has shape [3], expected [batch=2]"),
        ({"root_tokens": int32(1), "seq_lens": int32(1)}, "build_tree: slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"order": "best"}, "build_tree: order is 'best', expected 'score' or 'given'"),
        ({"status": int32(3)}, "build_tree: status has shape [3], expected [num_slots=2]"),
        ({"out": OUT._replace(parents=int32(2, 5))}, "build_tree: out.parents has shape [2, 5], expected [batch=2, num_nodes=4]"),
        ({"out": OUT._replace(mask=int32(2, 4, 1))}, "build_tree: out.mask is int32, expected int64"),
        ({"out": OUT._replace(num_nodes=int32(2, 1))}, "build_tree: out.num_nodes has shape [2, 1], expected [batch=2]"),
    ],
)  # fmt: skip
def test_build_tree_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {
        "tokens": int32(2, 6),
        "parents": int32(2, 6),
        "scores": torch.zeros(2, 6),
        "root_tokens": int32(2),
        "seq_lens": int32(2),
        "num_nodes": 4,
    } | change
    candidates = sd.Candidates(*(arguments.pop(name) for name in sd.Candidates._fields))
    with pytest.raises(ValueError) as error:
        sd.build_tree(candidates, **arguments)
    assert str(error.value) == message
