"""Helpers of the tree builders' tests: random trees, poisoned outputs, and properties of any tree."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import specdec_kernels as sd

WILD = [-1, 2**31 - 1]
BAD_TREE = 2


def poisoned_tree(batch: int, nodes: int, device: torch.device) -> sd.Tree:
    """Return outputs full of garbage: an element that the op does not write shows."""
    row = (batch, nodes)
    shapes = [row, row, row, row, row, (batch, nodes, (nodes + 63) // 64), (batch,)]
    return sd.Tree(
        *(
            torch.full(shape, -77, dtype=torch.int64 if name == "mask" else torch.int32, device=device)
            for name, shape in zip(sd.Tree._fields, shapes, strict=True)
        )
    )


def assert_same_tree(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> None:
    for name, g, w in zip(sd.Tree._fields, got, want, strict=True):
        assert g.dtype == w.dtype, name
        assert torch.equal(g.cpu(), w.cpu()), name


def mask_rows(mask: torch.Tensor) -> list[list[int]]:
    """Return the nodes named by each row of one request's mask."""
    nodes = range(64 * mask.shape[1])
    return [[j for j in nodes if words[j // 64] >> (j % 64) & 1] for words in mask.tolist()]


def assert_is_tree(tree: sd.Tree, b: int, seq_len: int) -> None:
    """Check row b by walking: parents come first, masks are walks to the root, links list exactly the children."""
    count, parents = int(tree.num_nodes[b]), tree.parents[b].tolist()
    first_child, next_sibling = tree.first_child[b].tolist(), tree.next_sibling[b].tolist()
    masks = mask_rows(tree.mask[b])
    assert parents[0] == -1 and all(0 <= parents[i] < i for i in range(1, count))
    for i in range(count):
        path, node = [], i
        while node >= 0:
            path.append(node)
            node = parents[node]
        assert masks[i] == sorted(path)
        assert tree.positions[b, i] == seq_len + len(path) - 1
        linked, child = [], first_child[i]
        while child >= 0:
            linked.append(child)
            child = next_sibling[child]
        assert linked == [j for j in range(1, count) if parents[j] == i]
    assert next_sibling[0] == -1


def random_parents(batch: int, nodes: int) -> torch.Tensor:
    """Return parents that precede their children, of every shape from stars to chains."""
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for i in range(1, nodes):
        reach = torch.randint(1, i + 1, (batch,))
        parents[:, i] = i - 1 - (torch.rand(batch) * reach).long()
    return parents
