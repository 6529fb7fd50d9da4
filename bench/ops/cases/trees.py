"""Random draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sd

from ..check import poisoned


def random_parents(batch: int, nodes: int) -> list[list[int]]:
    """Return random parents: node 0 is the root, and every other node is the child of an earlier one."""
    return [[-1, *(int(x * i) for i, x in enumerate(row[1:], 1))] for row in torch.rand(batch, nodes).tolist()]


def visible_nodes(parents: list[list[int]]) -> Tensor:
    """Return bool [B, N, N]: element [i, j] is true if j is an ancestor of i, or i itself."""
    batch, nodes = len(parents), len(parents[0])
    visible = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    rows, links = torch.arange(batch), torch.tensor(parents)
    for i in range(1, nodes):
        visible[:, i] |= visible[rows, links[:, i]]
    return visible


def mask_words(visible: Tensor) -> Tensor:
    """Pack bool [..., N] into int64 [..., W]."""
    nodes = visible.shape[-1]
    words = torch.zeros(*visible.shape[:-1], -(-nodes // 64), dtype=torch.int64)
    for j in range(nodes):
        words[..., j // 64] |= visible[..., j].long() << (j % 64)
    return words


def random_tree(batch: int, nodes: int, vocab: int, device: torch.device) -> sd.Tree:
    """Return trees of `nodes` nodes with distinct tokens, after prefixes of up to 4096 tokens."""
    parents = random_parents(batch, nodes)
    first_child = [[-1] * nodes for _ in range(batch)]
    next_sibling = [[-1] * nodes for _ in range(batch)]
    for b, row in enumerate(parents):
        for child in range(nodes - 1, 0, -1):
            next_sibling[b][child] = first_child[b][row[child]]
            first_child[b][row[child]] = child
    visible = visible_nodes(parents)
    prefix = torch.randint(0, 4096, (batch, 1))
    tokens = torch.stack([torch.randperm(vocab)[:nodes] for _ in range(batch)])
    tree = sd.Tree(
        tokens=tokens.int(),
        parents=torch.tensor(parents, dtype=torch.int32),
        positions=(prefix + visible.sum(-1) - 1).int(),
        first_child=torch.tensor(first_child, dtype=torch.int32),
        next_sibling=torch.tensor(next_sibling, dtype=torch.int32),
        mask=mask_words(visible),
        num_nodes=torch.full((batch,), nodes, dtype=torch.int32),
    )
    return sd.Tree(*(field.to(device) for field in tree))


def poisoned_tree(batch: int, nodes: int, device: torch.device) -> sd.Tree:
    """Return the output of an op that writes trees, filled with garbage."""
    tokens, parents, positions, first_child, next_sibling = (
        poisoned(batch, nodes, dtype=torch.int32, device=device) for _ in range(5)
    )
    return sd.Tree(
        tokens=tokens,
        parents=parents,
        positions=positions,
        first_child=first_child,
        next_sibling=next_sibling,
        mask=poisoned(batch, nodes, -(-nodes // 64), dtype=torch.int64, device=device),
        num_nodes=poisoned(batch, dtype=torch.int32, device=device),
    )
