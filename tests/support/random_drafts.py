"""Random drafts for the ops that merge and pack trees."""

from __future__ import annotations

import torch

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference
from support.trees import random_parents


def random_draft(batch: int, nodes: int, vocab: int, levels: int = 0) -> tuple[sd.Tree, torch.Tensor]:
    """Return trees with falling scores, drawn from `levels` values if given; siblings may repeat, some end early."""
    tokens = torch.randint(0, vocab, (batch, nodes), dtype=torch.int32)
    tokens[:, 0] = 9
    counts = torch.randint(0, nodes + 1, (batch,)) * (torch.rand(batch) < 0.5) + nodes * (torch.rand(batch) < 0.7)
    counts = counts.clamp(1, nodes).int()
    lens = 10 * torch.arange(1, batch + 1, dtype=torch.int32)
    tree = reference.build_tree_from_parents(tokens, random_parents(batch, nodes), lens, counts)
    steps = torch.randint(0, levels, (batch, nodes)) / levels if levels else torch.rand(batch, nodes)
    scores = torch.zeros(batch, nodes)
    for b in range(batch):
        for i in range(1, int(tree.num_nodes[b])):
            scores[b, i] = scores[b, tree.parents[b, i]] - steps[b, i]
        scores[b, int(tree.num_nodes[b]) :] = -torch.inf
    return tree, scores


def on(device: torch.device, tree: sd.Tree) -> sd.Tree:
    return sd.Tree(*(field.to(device) for field in tree))
