"""verify_tree against its reference, with bad logits and malformed trees too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.reference import verify as reference
from support.devices import HAS_CUDA
from support.verification import WILD, tree_of


@pytest.fixture
def device(verifier: tuple[torch.device, str | None]) -> torch.device:
    return verifier[0]


@pytest.fixture
def plan(verifier: tuple[torch.device, str | None]) -> str | None:
    return verifier[1]


def stack(trees: list[sd.Tree], device: torch.device) -> sd.Tree:
    return sd.Tree(*(torch.cat(field).to(device) for field in zip(*trees, strict=True)))


def random_trees(logits: torch.Tensor, hit_rate: float = 0.8) -> list[sd.Tree]:
    """Return trees of 1..N nodes for logits [B, N, V]; nodes often carry their parent's target token, also twice."""
    batch, width, vocab = logits.shape
    trees = []
    for b in range(batch):
        nodes = int(torch.randint(1, width + 1, ()))
        parents = [-1] + [int(torch.randint(max(0, i - 4), i, ())) for i in range(1, nodes)]
        tokens = torch.randint(0, vocab, (nodes,)).tolist()
        for i in range(1, nodes):
            y = reference.target_token(logits[b, parents[i]].cpu())
            if y is not None and torch.rand(()) < hit_rate:
                tokens[i] = y
        trees.append(tree_of(parents, tokens, width))
    return trees


def verify_into_poison(logits: torch.Tensor, tree: sd.Tree, width: int, **arguments: Any) -> sd.Accepted:
    """Run verify_tree on outputs full of garbage, so that an element left unwritten shows."""

    def garbage(*shape: int) -> torch.Tensor:
        return torch.full(shape, -77, dtype=torch.int32, device=logits.device)

    batch = logits.shape[0]
    out = sd.Accepted(garbage(batch, width), garbage(batch), garbage(batch, width))
    assert sd.verify_tree(logits, tree, width, out=out, **arguments) is out
    return out


def assert_same(got: sd.Accepted, want: sd.Accepted) -> None:
    for name, a, b in zip(sd.Accepted._fields, got, want, strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name


def check(logits: torch.Tensor, trees: list[sd.Tree], width: int, plan: str | None) -> sd.Accepted:
    got = verify_into_poison(logits, stack(trees, logits.device), width, plan=plan)
    assert_same(got, reference.verify_tree(logits.cpu(), stack(trees, torch.device("cpu")), width))
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "vocab", "width"),
    [(1, 1, 1, 1), (3, 1, 5, 4), (7, 8, 31, 3), (16, 17, 127, 17), (5, 32, 1024, 6), (1, 64, 4099, 9)],
)
def test_verify_tree_matches_reference(
    device: torch.device, plan: str | None, dtype: torch.dtype, batch: int, nodes: int, vocab: int, width: int
) -> None:
    logits = torch.randn(batch, nodes, vocab, device=device).to(dtype)
    check(logits, random_trees(logits), width, plan=plan)


@pytest.mark.parametrize("vocab", [128256, 151936])
def test_verify_tree_of_large_vocabularies_with_ties(device: torch.device, plan: str | None, vocab: int) -> None:
    logits = torch.randint(-3, 4, (1, 6, vocab), device=device).to(torch.bfloat16)
    got = check(logits, [tree_of([-1, 0, 0, 1, 2, 4], [5, 3, 9, 1, 4, 7])], 4, plan=plan)
    assert got.tokens[0, 0] == (logits[0, 0] == 3).nonzero()[0, 0]


@pytest.mark.sanitize
def test_verify_tree_matches_reference_on_small_inputs(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(3, 4, 37, device=device)
    check(logits, random_trees(logits), 3, plan=plan)


def test_verify_tree_reads_visited_rows_only(device: torch.device, plan: str | None) -> None:
    logits = torch.full((1, 5, 11), torch.nan, device=device)  # all rows are bad except those of the path 0, 2, 4
    for node, y in [(0, 7), (2, 3), (4, 10)]:
        logits[0, node, y] = 0.0
    tree = stack([tree_of([-1, 0, 0, 1, 2], [0, 6, 7, 3, 3])], device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    got = verify_into_poison(logits, tree, 5, status=status, plan=plan)
    assert got.tokens.tolist() == [[7, 3, 10, -1, -1]]
    assert got.num_valid.tolist() == [3]
    assert got.path.tolist() == [[0, 2, 4, 4, 4]]
    assert status.tolist() == [0]


def test_verify_tree_takes_first_of_duplicate_siblings_and_equal_logits(device: torch.device, plan: str | None) -> None:
    logits = torch.zeros(1, 4, 6, device=device)
    logits[0, 0] = torch.tensor([-1.0, 2.0, -0.0, 2.0, 1.0, torch.nan])
    logits[0, 2] = torch.tensor([-torch.inf, -0.0, 0.0, 0.0, -1.0, -2.0])  # -0.0 equals 0.0: the lower id
    tree = stack([tree_of([-1, 0, 0, 0], [0, 3, 1, 1])], device)
    got = verify_into_poison(logits, tree, 4, plan=plan)
    assert got.tokens.tolist() == [[1, 1, -1, -1]]
    assert got.path.tolist() == [[0, 2, 2, 2]]


def test_verify_tree_selects_positive_infinity(device: torch.device, plan: str | None) -> None:
    logits = torch.zeros(1, 1, 9, device=device)
    logits[0, 0, 4:6] = torch.inf
    assert check(logits, [tree_of([-1], [0])], 1, plan=plan).tokens.tolist() == [[4]]


def test_verify_tree_ends_at_accept_width_with_bonus(device: torch.device, plan: str | None) -> None:
    logits = torch.zeros(1, 6, 8, device=device)
    for node in range(6):
        logits[0, node, node + 1] = 1.0
    tree = stack([tree_of([-1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])], device)
    got = verify_into_poison(logits, tree, 3, plan=plan)
    assert got.tokens.tolist() == [[1, 2, 3]] and got.path.tolist() == [[0, 1, 2]] and got.num_valid.tolist() == [3]


@pytest.mark.parametrize("misaligned", range(5))
def test_verify_tree_of_strided_and_unaligned_logits(device: torch.device, plan: str | None, misaligned: int) -> None:
    wide = torch.randn(6, 9, 140, device=device).to(torch.bfloat16)
    logits = wide[::2, 1::2, misaligned : misaligned + 127]
    logits[:, :, 0] = torch.where(torch.rand(3, 4, device=device) < 0.2, 9.0, -9.0)
    logits[:, :, -1] = torch.where(torch.rand(3, 4, device=device) < 0.2, 9.0, -9.0)
    check(logits, random_trees(logits), 4, plan=plan)


def test_verify_tree_emits_nothing_at_bad_logits(device: torch.device, plan: str | None) -> None:
    """A row with nothing above -inf emits no token at the root, and no bonus further down."""
    logits = torch.zeros(3, 3, 5, device=device)
    logits[0, 0] = torch.nan
    logits[1, 0, 2], logits[1, 1] = 1.0, -torch.inf
    logits[2, 0, 2], logits[2, 1, 4], logits[2, 2] = 1.0, 1.0, torch.nan  # a bad row off the path is not read
    tree = stack([tree_of([-1, 0, 0], [0, 2, 3])] * 3, device)
    status = torch.tensor([4, 0, 0], dtype=torch.int32, device=device)
    got = verify_into_poison(logits, tree, 3, status=status, plan=plan)
    assert got.tokens.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 4, -1]]
    assert got.num_valid.tolist() == [0, 1, 2]
    assert got.path.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert status.tolist() == [4 | sd.Status.BAD_LOGITS, sd.Status.BAD_LOGITS, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize("field", ["first_child", "next_sibling", "parents", "num_nodes"])
@pytest.mark.parametrize("bad", [0, 1, 3, *WILD[1:], 1000], ids=str)
def test_verify_tree_ends_walk_at_malformed_link(device: torch.device, plan: str | None, field: str, bad: int) -> None:
    """Node 0 has children 1 and 2; node 2 carries the target's token, and one link of the tree is invalid."""
    logits = torch.zeros(2, 3, 5, device=device)
    logits[:, :, 4] = 1.0
    tree = stack([tree_of([-1, 0, 0], [0, 1, 4])] * 2, device)
    if field == "num_nodes":
        tree.num_nodes[0] = bad
    else:
        getattr(tree, field)[0, {"first_child": 0, "next_sibling": 1, "parents": 2}[field]] = bad
    status = torch.zeros(2, dtype=torch.int32, device=device)
    got = verify_into_poison(logits, tree, 3, status=status, plan=plan)

    harmless = (field, bad) in {("first_child", 1), ("parents", 0), ("num_nodes", 3)}
    empty = field == "num_nodes" and bad <= 0
    # num_nodes = 1 is a valid tree of one node, whose links must end there.
    assert status.tolist() == [0 if harmless or empty else sd.Status.BAD_TREE, 0]
    assert got.tokens[0].tolist() == ([4, 4, -1] if harmless else [-1] * 3 if empty else [4, -1, -1])
    assert got.path[0].tolist() == ([0, 2, 2] if harmless else [0, 0, 0])
    assert got.tokens[1].tolist() == [4, 4, -1]


@pytest.mark.sanitize
def test_verify_tree_of_invalid_links_stays_in_bounds(device: torch.device, plan: str | None) -> None:
    values = torch.tensor([-2, -1, 0, 1, 2, 3, 5, 7, 8, *WILD], dtype=torch.int32)

    def wild(*shape: int) -> torch.Tensor:
        return values[torch.randint(len(values), shape)].to(device)

    logits = torch.randn(64, 8, 3, device=device)
    links = [wild(64, 8) for _ in range(5)]
    tree = sd.Tree(*links, mask=torch.zeros(64, 8, 1, dtype=torch.int64), num_nodes=wild(64))
    got = verify_into_poison(logits, tree, 5, status=torch.zeros(64, dtype=torch.int32, device=device), plan=plan)
    for length, path in zip(got.num_valid.tolist(), got.path.tolist(), strict=True):
        assert 0 <= length <= 5
        assert all(0 <= a < b < 8 for a, b in itertools.pairwise(path[:length]))


def test_verify_tree_with_empty_rows_and_slots(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(4, 3, 8, device=device)
    tree = stack([tree_of([-1, 0, 1], [1, 2, 3])] * 4, device)
    tree.num_nodes[1] = 0
    logits[3] = torch.nan
    status = torch.zeros(6, dtype=torch.int32, device=device)
    slots = torch.tensor([-1, 2, 6, 5], dtype=torch.int32, device=device)
    got = verify_into_poison(logits, tree, 2, slots=slots, status=status, plan=plan)
    assert got.num_valid.tolist() == [0, 0, 0, 0]
    assert (got.tokens == -1).all() and (got.path == 0).all()
    assert status.tolist() == [0, 0, 0, 0, 0, sd.Status.BAD_LOGITS]

    without_status = verify_into_poison(
        logits, tree, 2, slots=slots, plan=plan
    )  # without the option, no slot number is out of range
    assert without_status.num_valid.tolist()[2] > 0


def test_verify_tree_requests_do_not_depend_on_batch(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(9, 12, 50, device=device)
    trees = random_trees(logits)
    order = torch.randperm(9).tolist()
    together = verify_into_poison(logits, stack(trees, device), 5, plan=plan)
    permuted = verify_into_poison(logits[order], stack([trees[i] for i in order], device), 5, plan=plan)
    assert_same(permuted, sd.Accepted(*(x[order] for x in together)))


def test_verify_tree_accepts_empty_batch(device: torch.device, plan: str | None) -> None:
    tree = sd.Tree(*(x[:0] for x in stack([tree_of([-1, 0], [1, 2])], device)))
    got = sd.verify_tree(torch.empty(0, 2, 7, device=device), tree, 2, plan=plan)
    assert got.tokens.shape == got.path.shape == (0, 2) and got.num_valid.shape == (0,)


def test_verify_tree_workspace_may_hold_garbage(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(2, 9, 40, device=device)
    trees = stack(random_trees(logits), device)
    want = verify_into_poison(logits, trees, 4, plan=plan)
    size = sd.verify_tree_workspace(logits, plan=plan)
    assert (size > 0) == (plan == "at_once")
    workspace = torch.randint(-(2**63), 2**63 - 1, (size // 8 + 1,), device=device)
    for _ in range(2):
        assert_same(verify_into_poison(logits, trees, 4, workspace=workspace, plan=plan), want)


def test_verify_tree_of_more_row_parts_than_block_threads(device: torch.device, plan: str | None) -> None:
    """With fewer nodes, two blocks would share each row of so large a vocabulary."""
    logits = torch.randn(1, 300, 16384, device=device).to(torch.bfloat16)
    check(logits, random_trees(logits), 7, plan=plan)


# The plan and the number of blocks per row, from sizes alone:
# [batch, nodes, vocab, bytes of a logit, sampled, candidates were sampled, SMs, Hopper or later].
PLANS = {
    ("at_once", 8): [
        (1, 6, 128256, 2, False, False, 132, True),
        (1, 8, 128256, 2, True, False, 132, True),
        (1, 32, 128256, 2, False, False, 132, True),  # two on each SM
    ],
    ("at_once", 4): [
        (4, 6, 128256, 2, False, False, 132, True),
        (1, 16, 128256, 2, True, False, 132, True),
    ],
    ("at_once", 2): [
        (1, 64, 128256, 2, True, False, 132, True),
        (4, 32, 16384, 2, False, False, 132, True),
    ],
    ("at_once", 1): [
        (1, 1, 100, 4, False, False, 132, True),
        (16, 6, 32000, 2, False, False, 132, True),
        (16, 6, 128256, 2, True, False, 132, True),
        (2, 32, 128256, 2, True, False, 108, False),
    ],
    ("walk", 0): [
        (1, 33, 128256, 2, False, False, 132, True),  # many nodes
        (1, 65, 128256, 2, True, False, 132, True),
        (4, 32, 128256, 2, False, False, 132, True),  # many bytes
        (1, 32, 262144, 4, False, False, 132, True),
        (5, 32, 128256, 2, True, False, 132, True),
        (64, 6, 1000, 2, False, False, 132, True),  # more rows than SMs
        (4, 32, 1000, 2, False, False, 108, False),
    ],
    ("rejection", 0): [
        (1, 6, 128256, 2, True, True, 132, True),
        (64, 6, 32000, 4, True, True, 132, True),
        (1, 6, 32000, 4, True, True, 108, False),
    ],
}


@pytest.mark.parametrize(("plan", "parts"), PLANS)
def test_verify_tree_plan_follows_from_sizes(plan: str, parts: int) -> None:
    for sizes in PLANS[plan, parts]:
        assert _C.verify_plan(*sizes) == (plan, parts), sizes


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_verify_tree_refuses_plans_that_do_not_fit() -> None:
    logits = torch.zeros(2, 3, 4, device="cuda")
    tree = stack([tree_of([-1, 0, 1], [1, 2, 3])] * 2, logits.device)
    for arguments, message in (
        ({"plan": "run"}, "verify_tree: plan is run, expected walk, at_once or rejection"),
        ({"plan": "rejection"}, "verify_tree: plan is rejection, expected walk or at_once, since draft_logits is None"),
        (
            {"plan": "at_once", "workspace": torch.zeros(1, device="cuda")},
            "verify_tree: workspace has 4 bytes, expected 48 or more",
        ),
    ):
        with pytest.raises(ValueError) as error:
            sd.verify_tree(logits, tree, 3, **arguments)
        assert str(error.value) == message


INT = torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4, dtype=INT)}, "verify_tree: logits is int32, expected float32 or float16 or bfloat16"),
        ({"logits": torch.zeros(2, 5)}, "verify_tree: logits has 2 dimensions, expected 3 dimensions"),
        ({"logits": torch.zeros(2, 3, 0)}, "verify_tree: vocab is 0, expected 1 to 4194304"),
        ({"parents": torch.zeros(2, 4, dtype=INT)}, "verify_tree: tree.parents has shape [2, 4], expected [batch=2, num_nodes=3]"),
        ({"num_nodes": torch.zeros(2)}, "verify_tree: tree.num_nodes is float32, expected int32"),
        ({"tokens": torch.zeros(2, 6, dtype=INT)[:, ::2]}, "verify_tree: tree.tokens has shape [2, 3] and is not contiguous, expected a contiguous tensor"),
        ({"accept_width": 0}, "verify_tree: accept_width is 0, expected 1 to 2147483647"),
        ({"temperature": torch.zeros(2)}, "verify_tree: seeds is None, expected a tensor, since temperature is given"),
        ({"top_p": torch.zeros(2)}, "verify_tree: top_p is given, expected None, since temperature is None"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, "verify_tree: seeds is given, expected None, since temperature is None"),
        ({"vocab_mask": torch.zeros(2, 3, 2, dtype=INT)}, "verify_tree: vocab_mask has shape [2, 3, 2], expected [batch=2, num_nodes=3, 1]"),
        ({"logit_bias": torch.zeros(2, 5)}, "verify_tree: logit_bias has shape [2, 5], expected [num_slots, vocab=4]"),
        ({"slots": torch.zeros(3, dtype=INT)}, "verify_tree: slots has shape [3], expected [batch=2]"),
        ({"workspace": torch.zeros(4, 8)[:, ::2]}, "verify_tree: workspace has shape [4, 4] and is not contiguous, expected a contiguous tensor"),
        ({"plan": "walk"}, "verify_tree: plan is walk, expected None on cpu"),
        ({"status": torch.zeros(1, dtype=INT)}, "verify_tree: slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"out": sd.Accepted(torch.zeros(2, 3, dtype=INT), torch.zeros(2, dtype=INT), torch.zeros(2, 4, dtype=INT))}, "verify_tree: out.path has shape [2, 4], expected [batch=2, accept_width=3]"),
    ],
)  # fmt: skip
def test_verify_tree_error_messages(change: dict[str, object], message: str) -> None:
    tree = stack([tree_of([-1, 0, 1], [1, 2, 3])] * 2, torch.device("cpu"))
    fields = {name: change.pop(name) for name in list(change) if name in sd.Tree._fields}
    arguments = {"logits": torch.zeros(2, 3, 4), "tree": tree._replace(**fields), "accept_width": 3} | change
    with pytest.raises(ValueError) as error:
        sd.verify_tree(**arguments)
    assert str(error.value) == message
