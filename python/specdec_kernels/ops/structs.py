"""Structs that several groups of ops share: draft candidates, token trees, accepted tokens, pending paths."""

from __future__ import annotations

from typing import NamedTuple

from ._alloc import empty, range_on_device, shape_of
from ._tensor import Tensor


class Candidates(NamedTuple):
    """All tokens that a draft proposed: k of step 1, then k * k of each later step. A parent precedes its children."""

    tokens: Tensor  # [B, C] int32, C = k + (num_steps - 1) * k * k
    parents: Tensor  # [B, C] int32 candidate indices, -1: the root
    scores: Tensor  # [B, C] float32 cumulative log-probabilities, -inf where there is no candidate (yet)


class Tree(NamedTuple):
    """A token tree per row: node 0 is the root, parents come before children, N is 1 to 256.

    Entries at and after `num_nodes` have the root's token, position L, their own mask bit, and -1 in all links. An
    empty row has no nodes; its tokens and positions are 0.
    """

    tokens: Tensor  # [B, N] int32
    parents: Tensor  # [B, N] int32, -1: none
    positions: Tensor  # [B, N] int32, L + depth
    first_child: Tensor  # [B, N] int32, the first child, -1: none
    next_sibling: Tensor  # [B, N] int32, the next node of the same parent, -1: none
    mask: Tensor  # [B, N, W] int64 bit patterns: bit j of row i, node j is i or an ancestor of i
    num_nodes: Tensor  # [B] int32, including the root

    def dense_mask(self) -> Tensor:
        """Return the mask with one bool per pair of nodes, for attention that takes a dense mask.

        Returns:
            [B, N, N] bool, torch or NumPy as the tree is: node i sees node j. It is the tree's part of `attn_mask` for
            `torch.nn.functional.scaled_dot_product_attention`, and the lookup table of a `mask_mod` for FlexAttention.
        """
        batch, nodes, words = self.mask.shape
        bits = (self.mask[..., None] >> range_on_device(self.mask, 64)) & 1
        return (bits != 0).reshape(batch, nodes, 64 * words)[:, :, :nodes]


class Accepted(NamedTuple):
    """The tokens that verification of a round emitted, in rows of width S."""

    tokens: Tensor  # [B, S] int32: accepted drafts, then the bonus token, then -1
    num_valid: Tensor  # [B] int32, valid entries of each row
    path: Tensor  # [B, S] int32: the tree node whose logits gave each token (root first, increasing); the last repeats


class PendingPaths(NamedTuple):
    """The accepted path of each slot's last tree, which the recurrent states do not contain yet.

    One set serves all recurrent layers of a model; all zeros is a valid start. Records of a layer have two buffers:
    the pending nodes are in buffer `parity` of their slot, and a pass over a tree writes its own nodes to the other.
    """

    nodes: Tensor  # [num_slots, S] int32: tree nodes, increasing, 0 first
    num_nodes: Tensor  # [num_slots] int32, valid entries of each row; 0: nothing is pending
    parity: Tensor  # [num_slots] int32, 0 or 1: the buffer of records that `nodes` refers to


def tree_outputs(op: str, name: str, like: Tensor, nodes: int | None, ndim: int = 2) -> Tree:
    """Allocate a tree with as many rows as `like`, of `nodes` nodes (None: as many as `like` has columns)."""
    batch, *columns = shape_of(op, name, like, ndim)
    nodes = max(columns[0] if nodes is None else nodes, 0)  # the op itself refuses a size out of range
    per_node = {field: empty(op, like, (batch, nodes), "int32") for field in Tree._fields[:5]}
    mask = empty(op, like, (batch, nodes, (nodes + 63) // 64), "int64")
    return Tree(**per_node, mask=mask, num_nodes=empty(op, like, (batch,), "int32"))
