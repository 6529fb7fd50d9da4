"""References of the tree ops."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ..ops import Candidates, NodeAllocation, PackedNodes, Tree
from ..status import Status
from .draft import mask_bits, mask_words, slot_list


def build_tree(
    candidates: Candidates,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_nodes: int,
    slots: Tensor | None = None,
    order: str = "score",
    status: Tensor | None = None,
    out_scores: Tensor | None = None,
) -> Tree:
    """Grow the whole tree in order, then truncate it to N nodes. Update `status` in place."""
    if out_scores is not None:
        out_scores.fill_(-torch.inf)[:, 0] = 0
    rows = []
    for b, slot in enumerate(slot_list(slots, len(seq_lens), len(candidates.tokens))):
        if slot < 0:
            rows.append(tree_row([], [], 0, 0, num_nodes))
            continue
        tokens, parents, scores = (t[b].tolist() for t in candidates)
        ordered = [c for c in range(len(tokens)) if scores[c] > -torch.inf]
        if order == "score":
            ordered.sort(key=lambda c: (-scores[c], c))

        node_of, node_parents, node_tokens = {-1: 0}, [-1], [int(root_tokens[slot])]
        for c in ordered:
            if parents[c] < c and parents[c] in node_of:
                node_of[c] = len(node_parents)
                node_parents.append(node_of[parents[c]])
                node_tokens.append(tokens[c])
                if out_scores is not None and node_of[c] < num_nodes:
                    out_scores[b, node_of[c]] = scores[c]
            elif status is not None:
                status[slot] |= int(Status.BAD_TREE)
        kept = min(num_nodes, len(node_parents))
        rows.append(tree_row(node_parents[:kept], node_tokens, node_tokens[0], int(seq_lens[slot]), num_nodes))
    return stack(rows, num_nodes)


def build_tree_from_parents(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
) -> Tree:
    """Check each row, then build its tree. Update `status` in place."""
    batch, nodes = tokens.shape
    rows = []
    for b, slot in enumerate(slot_list(slots, len(seq_lens), batch)):
        if slot < 0:
            rows.append(tree_row([], [], 0, 0, nodes))
            continue
        count = nodes if num_nodes is None else int(num_nodes[b])
        row = parents[b].tolist()[: max(count, 0)]
        if not 1 <= count <= nodes or row[0] != -1 or not all(0 <= row[i] < i for i in range(1, count)):
            row = [-1]
            if status is not None:
                status[slot] |= int(Status.BAD_TREE)
        rows.append(tree_row(row, tokens[b].tolist(), int(tokens[b, 0]), int(seq_lens[slot]), nodes))
    return stack(rows, nodes)


def build_tree_from_mask(
    tokens: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor | None = None,
    slots: Tensor | None = None,
    status: Tensor | None = None,
) -> Tree:
    """Derive the parents from the mask; a mask that is no tree gives invalid parents. Update `status` in place."""
    batch, nodes = tokens.shape
    parents = torch.full((batch, nodes), nodes, dtype=torch.int32)
    for b in range(batch):
        rows = [mask_bits(words) for words in mask[b].tolist()]
        for i, bits in enumerate(rows):
            ancestors = bits & ((1 << i) - 1)
            parent = ancestors.bit_length() - 1
            if bits == (1 if i == 0 else rows[parent] | 1 << i) and (parent >= 0) == (i > 0):
                parents[b, i] = parent
    return build_tree_from_parents(tokens, parents, seq_lens, num_nodes, slots, status)


def merge_trees(a: Tree, a_scores: Tensor, b: Tree, b_scores: Tensor, num_nodes: int) -> tuple[Tree, Tensor]:
    """Compare nodes by their paths: tuples of tokens, the root excluded."""
    rows, out_scores = [], torch.full((len(a_scores), num_nodes), -torch.inf)
    for row in range(len(a_scores)):
        best: dict[tuple[int, ...], float] = {}  # by path, in order of candidate indices
        heads: list[tuple[int, int]] = []  # root token and position
        for tree, scores in ((a, a_scores), (b, b_scores)):
            tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
            if not tree.num_nodes[row] or (heads and heads[0][0] != tokens[0]):
                continue
            heads.append((tokens[0], int(tree.positions[row, 0])))
            nodes: dict[int, tuple[tuple[int, ...], float]] = {0: ((), torch.inf)}
            for i in range(1, int(tree.num_nodes[row])):
                score = float(scores[row, i])
                if parents[i] < i and parents[i] in nodes and score > -torch.inf:
                    path, above = nodes[parents[i]]
                    nodes[i] = ((*path, tokens[i]), min(score, above))
                    path, score = nodes[i]
                    best[path] = max(score, best.get(path, score))
        chosen = sorted(best, key=lambda path: -best[path])[: num_nodes - 1]
        index_of = {(): 0} | {path: i for i, path in enumerate(chosen, 1)}
        root, position = heads[0] if heads else (0, 0)
        parents = [-1] + [index_of[path[:-1]] for path in chosen] if heads else []
        rows.append(tree_row(parents, [root, *(path[-1] for path in chosen)], root, position, num_nodes))
        if heads:
            out_scores[row, : len(chosen) + 1] = torch.tensor([0.0, *(best[path] for path in chosen)])
    return stack(rows, num_nodes), out_scores


def allocate_nodes(
    scores: Tensor,
    budget: int,
    slots: Tensor | None = None,
    max_nodes: Tensor | None = None,
    finish_reasons: Tensor | None = None,
    status: Tensor | None = None,
    budget_levels: Tensor | None = None,
    level_limits: Tensor | None = None,
) -> NodeAllocation:
    """Sort all nodes of the batch. The sort is stable, so ties keep the order of requests and nodes."""
    batch, nodes = scores.shape
    state = [tensor for tensor in (max_nodes, finish_reasons, status) if tensor is not None]
    limits = []  # nodes of each row, the root included
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        there = slot >= 0 and all(slot < len(tensor) for tensor in state)
        there = there and (finish_reasons is None or int(finish_reasons[slot]) == 0)
        there = there and (status is None or not int(status[slot]) & Status.STALLED)
        limits.append(0 if not there else nodes if max_nodes is None else min(max(int(max_nodes[slot]), 1), nodes))
    rows = scores.double().nan_to_num(nan=-torch.inf, posinf=0, neginf=-torch.inf).clamp(max=0)

    def ranked(limit: int) -> list[tuple[float, int]]:
        listed = [(float(rows[b, i]), b) for b in range(batch) for i in range(1, min(limits[b], limit))]
        return sorted((node for node in listed if node[0] > -torch.inf), key=lambda node: -node[0])

    roots = sum(count > 0 for count in limits)
    selected = [b for _, b in ranked(nodes)[: budget - roots]]
    num_nodes = torch.tensor([(limits[b] > 0) + selected.count(b) for b in range(batch)], dtype=torch.int32)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), num_nodes.cumsum(0)]).to(torch.int32)
    expected, cuts = [], []
    for r, level in enumerate([] if budget_levels is None else budget_levels.tolist()):
        room = max(level - roots, 0)
        of_level = ranked(nodes if level_limits is None else int(level_limits[r]))
        best = [score for score, _ in of_level[:room]]
        expected.append(roots + math.fsum(math.exp(score) for score in best))
        cuts.append(torch.inf if room == 0 else -torch.inf if room >= len(of_level) else best[-1])
    return NodeAllocation(num_nodes, ends, torch.tensor(expected).float(), torch.tensor(cuts).float())


def pack_trees(tree: Tree, scores: Tensor, allocation: NodeAllocation, num_rows: int) -> PackedNodes:
    """Rebuild the truncated trees in place of the whole ones, and concatenate their nodes."""
    nodes = tree.tokens.shape[1]
    kept = [min(int(n), int(m)) for n, m in zip(allocation.num_nodes, tree.num_nodes, strict=True)]
    heads = [(int(tree.tokens[b, 0]), int(tree.positions[b, 0])) if n else (0, 0) for b, n in enumerate(kept)]
    cut = stack(
        [
            tree_row(tree.parents[b, :n].tolist(), tree.tokens[b, :n].tolist(), *heads[b], nodes)
            for b, n in enumerate(kept)
        ],
        nodes,
    )
    packed = PackedNodes(
        torch.zeros(num_rows, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.zeros(num_rows, tree.mask.shape[2], dtype=torch.int64),
        torch.full((num_rows,), -torch.inf),
    )
    for b, n in enumerate(kept):
        first = int(allocation.cu_seqlens[b])
        for out, of in zip(packed, (cut.tokens, cut.positions, cut.mask, scores), strict=True):
            out[first : first + n] = of[b, :n]
    for whole, part in zip(tree, cut, strict=True):
        whole.copy_(part)
    return packed


Row = tuple[list[int], list[int], list[int], list[int], list[int], list[list[int]], int]


def tree_row(parents: list[int], tokens: list[int], root_token: int, seq_len: int, nodes: int) -> Row:
    """Compute all outputs of one row from its nodes' parents."""
    count, words = len(parents), (nodes + 63) // 64
    unused = nodes - count
    paths: list[list[int]] = []  # of each node, from the root to the node
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if i > 0 else []), i])
    children = [[j for j in range(1, count) if parents[j] == i] for i in range(count)]
    next_sibling = [-1] * nodes
    for siblings in children:
        for left, right in pairwise(siblings):
            next_sibling[left] = right
    masks = [sum(1 << j for j in path) for path in paths] + [1 << i for i in range(count, nodes)]
    return (
        tokens[:count] + [root_token] * unused,
        parents + [-1] * unused,
        [seq_len + len(path) - 1 for path in paths] + [seq_len] * unused,
        [c[0] if c else -1 for c in children] + [-1] * unused,
        next_sibling,
        [mask_words(bits, words) for bits in masks],
        count,
    )


def stack(rows: list[Row], nodes: int) -> Tree:
    shapes = [(nodes,)] * 5 + [(nodes, (nodes + 63) // 64), ()]
    return Tree(
        *(
            torch.tensor([row[field] for row in rows], dtype=torch.int64)
            .to(torch.int64 if name == "mask" else torch.int32)
            .reshape(len(rows), *shapes[field])
            for field, name in enumerate(Tree._fields)
        )
    )
