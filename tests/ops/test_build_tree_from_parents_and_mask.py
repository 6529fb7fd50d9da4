"""build_tree_from_parents and build_tree_from_mask against their references: accepted and refused inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference
from support.trees import BAD_TREE, WILD, assert_is_tree, assert_same_tree, mask_rows, poisoned_tree, random_parents

OPS = ["parents", "mask"]


def as_mask(parents: torch.Tensor) -> torch.Tensor:
    """Return the ancestor mask of well-formed parents."""
    tokens, seq_lens = torch.zeros_like(parents), torch.zeros(len(parents), dtype=torch.int32)
    return reference.build_tree_from_parents(tokens, parents, seq_lens).mask


def check(
    op: str,
    device: torch.device,
    links: torch.Tensor,
    num_nodes: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    num_slots: int | None = None,
) -> tuple[sd.Tree, list[int]]:
    """Return the tree and the status, equal to the reference's in every element; `links` is parents or a mask."""
    batch, nodes = links.shape[:2]
    num_slots = batch if num_slots is None else num_slots
    tokens = torch.randint(0, 5, (batch, nodes), dtype=torch.int32)  # few, so that siblings repeat
    seq_lens = torch.randint(0, 500, (num_slots,), dtype=torch.int32)
    status = torch.full((num_slots,), 16, dtype=torch.int32)
    want_status = status.clone()
    want = getattr(reference, f"build_tree_from_{op}")(tokens, links, seq_lens, num_nodes, slots, want_status)
    status = status.to(device)
    got = getattr(sd, f"build_tree_from_{op}")(
        tokens.to(device),
        links.to(device),
        seq_lens.to(device),
        num_nodes=None if num_nodes is None else num_nodes.to(device),
        slots=None if slots is None else slots.to(device),
        status=status,
        out=poisoned_tree(batch, nodes, device),
    )
    assert_same_tree(got, want)
    assert torch.equal(status.cpu(), want_status)
    got = sd.Tree(*(t.cpu() for t in got))
    if slots is None:
        for b in range(batch):
            assert_is_tree(got, b, int(seq_lens[b]))
    return got, status.tolist()


def make_links(op: str, parents: torch.Tensor) -> torch.Tensor:
    return parents if op == "parents" else as_mask(parents)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 2), (4, 17), (3, 64), (3, 65), (2, 129), (2, 256)])
def test_build_trees_match_reference(device: torch.device, op: str, batch: int, nodes: int) -> None:
    parents = random_parents(batch, nodes)
    tree, status = check(op, device, make_links(op, parents))
    assert torch.equal(tree.parents, parents)
    assert status == [16] * batch


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("parents_of", [lambda i: i - 1, lambda i: 0, lambda i: (i - 1) // 2], ids=["chain", "star", "binary"])  # fmt: skip
def test_build_trees_of_plain_shapes_match_reference(
    device: torch.device, op: str, parents_of: Callable[[int], int]
) -> None:
    parents = torch.tensor([[-1] + [parents_of(i) for i in range(1, 100)]], dtype=torch.int32)
    tree, status = check(op, device, make_links(op, parents))
    assert torch.equal(tree.parents, parents) and status == [16]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nodes", [1, 2, 6, 7, 8, 13, 14, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256])
def test_build_trees_of_chains_of_every_depth_match_reference(device: torch.device, op: str, nodes: int) -> None:
    """Random trees stand next to the chains; walks up the tree must end correctly at every power of their steps."""
    parents = random_parents(3, nodes)
    parents[0] = torch.arange(-1, nodes - 1)
    parents[1] = torch.arange(-2, nodes - 2).clamp(min=0)
    parents[1, 0] = -1
    tree, status = check(op, device, make_links(op, parents))
    assert torch.equal(tree.parents, parents) and status == [16] * 3


@settings(max_examples=60)
@given(data=st.data())
def test_builders_agree_on_one_tree(device: torch.device, data: st.DataObject) -> None:
    """build_tree's parents and mask give back the same tree."""
    columns, nodes = data.draw(st.integers(0, 90)), data.draw(st.integers(1, 80))
    links = [data.draw(st.integers(-1, c - 1)) for c in range(columns)]
    steps = data.draw(st.lists(st.sampled_from([0.0, -0.25, -1.0, -torch.inf]), min_size=columns, max_size=columns))
    scores: list[float] = []
    for parent, step in zip(links, steps, strict=True):
        scores.append(step + (scores[parent] if parent >= 0 else 0.0))
    tokens = torch.arange(columns, dtype=torch.int32, device=device)[None]
    parents = torch.tensor([links], dtype=torch.int32, device=device)
    root_tokens, seq_lens = torch.tensor([[5], [70]], dtype=torch.int32, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    order = data.draw(st.sampled_from(["score", "given"]))
    candidates = sd.Candidates(tokens, parents, torch.tensor([scores], device=device).float())
    tree = sd.build_tree(candidates, root_tokens, seq_lens, nodes, order=order, status=status)
    for op in OPS:
        build = getattr(sd, f"build_tree_from_{op}")
        again = build(
            tree.tokens, getattr(tree, op), seq_lens, num_nodes=tree.num_nodes, status=status,
            out=poisoned_tree(1, nodes, device),
        )  # fmt: skip
        assert_same_tree(again, tree)
    assert status.tolist() == [0]


@pytest.mark.parametrize("op", OPS)
def test_build_trees_ignore_rows_after_num_nodes(device: torch.device, op: str) -> None:
    nodes = 70
    parents = random_parents(6, nodes)
    num_nodes = torch.tensor([1, 2, 63, 64, 65, 70], dtype=torch.int32)
    links = make_links(op, parents).clone()
    for b, count in enumerate(num_nodes.tolist()):
        links[b, count:] = torch.randint(-(2**31), 2**31 - 1, links[b, count:].shape).to(links.dtype)
    tree, status = check(op, device, links, num_nodes)
    assert torch.equal(tree.num_nodes, num_nodes) and status == [16] * 6


@pytest.mark.parametrize("op", OPS)
def test_build_trees_clamp_invalid_num_nodes(device: torch.device, op: str) -> None:
    num_nodes = torch.tensor([0, 10, *WILD, -(2**31), 9], dtype=torch.int32)
    tree, status = check(op, device, make_links(op, random_parents(6, 9)), num_nodes)
    assert tree.num_nodes.tolist() == [1, 1, 1, 1, 1, 9]
    assert status == [16 | BAD_TREE] * 5 + [16]


@pytest.mark.sanitize
@pytest.mark.parametrize("op", OPS)
def test_build_trees_with_slots_and_empty_rows_match_reference(device: torch.device, op: str) -> None:
    links = make_links(op, random_parents(5, 6)).clone()
    links[2, 3] = 99
    num_nodes = torch.tensor([6, 77, 6, -1, 4], dtype=torch.int32)
    slots = torch.tensor([3, -1, 0, 2**31 - 1, 1], dtype=torch.int32)
    tree, status = check(op, device, links, num_nodes, slots, num_slots=4)
    assert tree.num_nodes.tolist() == [6, 0, 1, 0, 4]
    assert status == [16 | BAD_TREE, 16, 16, 16]


@pytest.mark.parametrize("op", OPS)
def test_build_trees_accept_empty_batch(device: torch.device, op: str) -> None:
    check(op, device, make_links(op, random_parents(0, 4)))


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param([-1, 2, 1, 0], id="cycle"),
        pytest.param([-1, 0, 3, 0], id="child before parent"),
        pytest.param([-1, 0, 2, 0], id="own parent"),
        pytest.param([-1, 0, -1, 0], id="second root"),
        pytest.param([-1, 0, 0, -2], id="below -1"),
        pytest.param([-1, 0, 0, 4], id="beyond the row"),
        pytest.param([-1, 0, 0, 2**31 - 1], id="wild"),
        pytest.param([0, 0, 0, 0], id="root with a parent"),
        pytest.param([-(2**31), 0, 0, 0], id="root with a wild parent"),
    ],
)
def test_build_tree_from_parents_refuses_invalid_parents(device: torch.device, parents: list[int]) -> None:
    tree, status = check("parents", device, torch.tensor([parents, [-1, 0, 1, 2]], dtype=torch.int32))
    assert tree.num_nodes.tolist() == [1, 4] and status == [16 | BAD_TREE, 16]
    assert tree.mask[0, :, 0].tolist() == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("row", "bits"),
    [
        pytest.param(3, 0b0011, id="own bit missing"),
        pytest.param(3, 0b1010, id="root bit missing"),
        pytest.param(3, 0b1000, id="second root"),
        pytest.param(3, 0b11001, id="bit above the diagonal"),
        pytest.param(3, 0b1101, id="closed under ancestors it is not"),
        pytest.param(3, 0b0000, id="empty row"),
        pytest.param(3, -1, id="all bits"),
        pytest.param(0, 0b0000, id="root without itself"),
        pytest.param(0, 0b0011, id="root with a parent"),
        pytest.param(1, 0b0010, id="first child without root"),
    ],
)
@pytest.mark.parametrize("nodes", [4, 70])
def test_build_tree_from_mask_refuses_invalid_masks(device: torch.device, nodes: int, row: int, bits: int) -> None:
    # Nodes 0 - 1 - 2 and 0 - 3, then a chain from 3 on.
    parents = torch.tensor([[-1, 0, 1, 0, *range(3, nodes - 1)]] * 2, dtype=torch.int32)
    mask = as_mask(parents)
    mask[0, row, 0] = bits
    tree, status = check("mask", device, mask)
    assert tree.num_nodes.tolist() == [1, nodes] and status == [16 | BAD_TREE, 16]


@pytest.mark.parametrize("nodes", [64, 65, 200])
def test_build_tree_from_mask_detects_every_flipped_bit(device: torch.device, nodes: int) -> None:
    """A mask with a flipped bit either names another tree or is refused."""
    parents = random_parents(60, nodes)
    mask = as_mask(parents)
    for b in range(60):
        row, word, bit = (int(torch.randint(0, n, ())) for n in (nodes, mask.shape[2], 64))
        mask[b, row, word] ^= torch.tensor(1 << bit if bit < 63 else -(2**63), dtype=torch.int64)
    tree, status = check("mask", device, mask)
    for b, count in enumerate(tree.num_nodes.tolist()):
        assert count == 1 or torch.equal(tree.mask[b], mask[b])
    assert all((s == 16 | BAD_TREE) == (int(n) == 1) for s, n in zip(status, tree.num_nodes, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_build_trees_commute_with_batch_permutation(device: torch.device, op: str) -> None:
    links = make_links(op, random_parents(5, 12)).to(device)
    build = getattr(sd, f"build_tree_from_{op}")
    tokens = torch.randint(0, 99, (5, 12), dtype=torch.int32, device=device)
    seq_lens = torch.arange(5, dtype=torch.int32, device=device)
    order = torch.tensor([4, 2, 0, 1, 3], device=device)
    permuted = build(tokens[order], links[order], seq_lens, slots=order.to(torch.int32))
    assert_same_tree(permuted, [t[order] for t in build(tokens, links, seq_lens)])


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


OUT = poisoned_tree(2, 5, torch.device("cpu"))


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("parents", {"tokens": torch.zeros(2, 5)}, "build_tree_from_parents: tokens is float32, expected int32"),
        ("parents", {"tokens": int32(2, 0)}, "build_tree_from_parents: nodes is 0, expected 1 to 256"),
        ("mask", {"tokens": int32(2, 257)}, "build_tree_from_mask: nodes is 257, expected 1 to 256"),
        ("parents", {"parents": int32(2, 4)}, "build_tree_from_parents: parents has shape [2, 4], expected [batch=2, nodes=5]"),
        ("mask", {"mask": int32(2, 5, 1)}, "build_tree_from_mask: mask is int32, expected int64"),
        ("mask", {"mask": torch.zeros(2, 5, 2, dtype=torch.int64)}, "build_tree_from_mask: mask has shape [2, 5, 2], expected [batch=2, nodes=5, mask_words=1]"),
        ("parents", {"num_nodes": int32(3)}, "build_tree_from_parents: num_nodes has shape [3], expected [batch=2]"),
        ("mask", {"seq_lens": int32(1)}, "build_tree_from_mask: slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ("parents", {"status": torch.zeros(2)}, "build_tree_from_parents: status is float32, expected int32"),
        ("mask", {"out": OUT._replace(positions=int32(2, 4))}, "build_tree_from_mask: out.positions has shape [2, 4], expected [batch=2, nodes=5]"),
        ("mask", {"out": OUT._replace(first_child=int32(5, 2).t())}, "build_tree_from_mask: out.first_child has shape [2, 5] and is not contiguous, expected a contiguous tensor"),
    ],
)  # fmt: skip
def test_build_trees_error_messages(op: str, change: dict[str, object], message: str) -> None:
    arguments = {
        "tokens": int32(2, 5),
        "parents": int32(2, 5),
        "mask": torch.zeros(2, 5, 1, dtype=torch.int64),
        "seq_lens": int32(2),
    }
    del arguments["mask" if op == "parents" else "parents"]
    with pytest.raises(ValueError) as error:
        getattr(sd, f"build_tree_from_{op}")(**(arguments | change))
    assert str(error.value) == message


@pytest.mark.parametrize("nodes", [1, 5, 64, 65, 130])
def test_dense_mask_matches_mask_rows(device: torch.device, nodes: int) -> None:
    """One bool per pair of nodes, equal to the bits of `mask_rows`."""
    tokens, parents = torch.zeros(3, nodes).int(), random_parents(3, nodes)
    tree = sd.build_tree_from_parents(tokens.to(device), parents.to(device), torch.zeros(3).int().to(device))
    dense = tree.dense_mask()
    assert dense.dtype == torch.bool and dense.device == tree.mask.device and dense.shape == (3, nodes, nodes)
    for b in range(3):
        assert [row.nonzero().flatten().tolist() for row in dense[b]] == mask_rows(tree.mask[b])


def test_dense_mask_accepts_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    parents = np.array([[-1, 0, 0, 1]], np.int32)
    dense = sd.build_tree_from_parents(np.zeros((1, 4), np.int32), parents, np.zeros(1, np.int32)).dense_mask()
    assert dense.dtype == bool and dense.astype(int).tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    ]


def test_dense_mask_in_torch_attention_matches_tree_attention(device: torch.device) -> None:
    """`tree_attention` runs without a prefix, with the tree alone as the tail."""
    nodes = 9
    zeros = torch.zeros(2, nodes).int().to(device)
    tree = sd.build_tree_from_parents(zeros, random_parents(2, nodes).to(device), zeros[:, 0].contiguous())
    q, k, v = torch.randn(3, 2, nodes, 2, 64, device=device)
    pools, table = torch.zeros(2, 2, 16, 2, 64, device=device), torch.tensor([[1], [0]]).int().to(device)
    sd.write_kv(k, v, *pools, table, zeros[:, 0].contiguous())
    got = sd.tree_attention(q, *pools, table, zeros[:, 0].contiguous(), mask=tree.mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tree.dense_mask()[:, None])
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-4, atol=1e-5)
