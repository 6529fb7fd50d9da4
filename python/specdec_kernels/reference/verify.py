"""References of the verify ops: one request at a time, on lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import Accepted, Tree
from ..status import Status


def target_token(logits: Tensor) -> int | None:
    """The lowest id with the largest logit; None when nothing is above -inf. NaN counts as -inf."""
    x = logits.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    largest = x.max()
    return int((x == largest).nonzero()[0]) if largest > -math.inf else None


def verify_tree(
    logits: Tensor, tree: Tree, accept_width: int, slots: Tensor | None = None, status: Tensor | None = None
) -> Accepted:
    """Greedy verification of well-formed trees; `status` gains BAD_LOGITS."""
    batch = logits.shape[0]
    tokens = torch.full((batch, accept_width), -1, dtype=torch.int32)
    path = torch.zeros((batch, accept_width), dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if slot < 0 or tree.num_nodes[b] <= 0:
            continue
        emitted: list[int] = []
        visited: list[int] = []
        node: int | None = 0
        while node is not None and len(emitted) < accept_width:
            y = target_token(logits[b, node])
            if y is None:
                if status is not None:
                    status[slot] |= int(Status.BAD_LOGITS)
                break
            emitted.append(y)
            visited.append(node)
            children = [c for c in range(1, int(tree.num_nodes[b])) if tree.parents[b, c] == node]
            node = next((c for c in children if tree.tokens[b, c] == y), None)
        lengths[b] = len(emitted)
        tokens[b, : len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        path[b] = visited[-1] if visited else 0
        path[b, : len(visited)] = torch.tensor(visited, dtype=torch.int32)
    return Accepted(tokens, lengths, path)
