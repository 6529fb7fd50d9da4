"""SGLang's tree kernels, called as its EAGLE worker calls them (sglang/srt/speculative/eagle_utils.py).

Its trees are links between flat rows, `b * N + node`: `next_token` is a node's first child. Everything is int64. The
kernels are compiled when they are first called, which takes nvcc and half a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels as sd

from ..check import WrongResult, expect_equal
from ..harness import Baseline
from . import module
from .sampling import Sampling

QLEN_ONLY = 1  # mask layout: [B, N, N] bytes, the smallest for any N


class Links(NamedTuple):
    """The links of trees, int64 [B, N] each."""

    retrieve_index: Tensor
    next_token: Tensor
    next_sibling: Tensor


class BuiltTrees(NamedTuple):
    """Trees as SGLang builds them."""

    tokens: Tensor  # [B, N]
    positions: Tensor  # [B, N]
    mask: Tensor  # [B, N, N] bool
    links: Links


class AcceptBuffers(NamedTuple):
    """The outputs of the kernels that verify, int32."""

    predicts: Tensor  # [B * N]
    accept_index: Tensor  # [B, width]
    accept_token_num: Tensor  # [B]


def kernels(name: str, device: torch.device) -> Any:
    return module(f"sglang.kernels.ops.speculative.{name}", device)


def build_tree(
    candidates: sd.Candidates,
    root_tokens: Tensor,
    seq_lens: Tensor,
    nodes: int,
    num_steps: int,
    want: Callable[[], sd.Tree],
) -> Sequence[Baseline]:
    """Return the builder of a tree of the `nodes` best candidates, and its kernel alone, on sorted candidates."""
    tree, device = kernels("tree", root_tokens.device), root_tokens.device
    batch, count = candidates.tokens.shape
    if tree is None or count < nodes - 1:
        return ()
    k = 1 if count == num_steps else next(k for k in range(2, count) if k + (num_steps - 1) * k * k == count)
    tokens, roots, lens = candidates.tokens.long(), root_tokens.long(), seq_lens.long()
    # The parent of each run of k candidates; that of the first run is the root.
    parents = torch.cat([torch.full_like(roots[:, None], -1), candidates.parents[:, k::k].long()], 1).contiguous()

    def select() -> tuple[Tensor, Tensor]:
        selected = torch.sort(torch.topk(candidates.scores, nodes - 1, dim=-1).indices).values
        return selected, torch.gather(tokens, 1, selected)

    def build(selected: Tensor, drafts: Tensor) -> BuiltTrees:
        tokens = torch.cat([roots[:, None], drafts], 1)
        mask = torch.full((batch * nodes * nodes,), True, device=device)
        links = Links(*torch.full((3, batch, nodes), -1, dtype=torch.int64, device=device))
        positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
        tree.build_tree_kernel_efficient(
            parents, selected, lens, mask, positions, *links, k, num_steps, nodes, QLEN_ONLY
        )  # fmt: skip
        return BuiltTrees(tokens, positions.view(batch, nodes), mask.view(batch, nodes, nodes), links)

    def check(got: BuiltTrees) -> None:
        expect_same_trees(got, want())

    selected = select()
    return (
        Baseline("sglang", lambda: build(*select()), check),
        Baseline("sglang kernel", lambda: build(*selected), check),
    )


def build_tree_from_mask(tree: sd.Tree) -> Sequence[Baseline]:
    """Return the baseline: positions and links from a mask of bytes, without parents and bit masks."""
    ops, device = kernels("tree", tree.tokens.device), tree.tokens.device
    if ops is None:
        return ()
    batch, nodes = tree.tokens.shape
    mask, lens = tree.dense_mask().flatten(), tree.positions[:, 0].long()

    def call() -> tuple[Tensor, ...]:
        positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
        links = torch.empty(3, batch, nodes, dtype=torch.int64, device=device)
        ops.reconstruct_indices_from_tree_mask(mask, lens, positions, *links, batch, nodes)
        return positions, *links

    def check(got: tuple[Tensor, ...]) -> None:
        positions, _, next_token, next_sibling = got
        expect_equal("positions", positions.view(batch, nodes), tree.positions)
        expect_equal("next_token", next_token, tree.first_child)
        expect_equal("next_sibling", next_sibling, tree.next_sibling)

    return (Baseline("sglang", call, check),)


def verify_greedy(
    logits: Tensor, tree: sd.Tree, width: int, check: Callable[[tuple[Tensor, ...]], None]
) -> Sequence[Baseline]:
    """Return the baseline: argmax of every node, then the walk."""
    ops = kernels("tree", logits.device)
    if ops is None:
        return ()
    tokens, links = tree.tokens.long(), links_of(tree)

    def call() -> AcceptBuffers:
        out = accept_buffers(tree, width)
        ops.verify_tree_greedy(*out, tokens, *links, torch.argmax(logits, -1))
        return out

    return (Baseline("sglang", call, lambda out: check(accepted(out, tree))),)


def verify_sampled(
    logits: Tensor,
    tree: sd.Tree,
    width: int,
    sampling: Sampling,
    check: Callable[[tuple[Tensor, ...]], None],
) -> Sequence[Baseline]:
    """Return the baseline: softmax, top-k and top-p of every node, then the walk with its own coins.

    Its `accept` thresholds are 1.
    """
    ops = kernels("sampling", logits.device)
    renorm = module("flashinfer.sampling", logits.device)
    if ops is None or renorm is None:
        return ()
    (batch, nodes, vocab), device = logits.shape, logits.device
    tokens, links = tree.tokens.long(), links_of(tree)
    temperatures = torch.full((batch, 1), sampling.temperature, device=device)
    top_ks = torch.full((batch,), sampling.top_k, dtype=torch.int32, device=device)
    top_ps = torch.full((batch,), sampling.top_p, device=device)

    def call() -> AcceptBuffers:
        out = accept_buffers(tree, width)
        rows = logits.view(batch * nodes, vocab).float() / temperatures.repeat_interleave(nodes, 0)
        probs = torch.softmax(rows, -1)
        if sampling.top_k > 0:
            probs = renorm.top_k_renorm_probs(probs, top_ks.repeat_interleave(nodes, 0))
        if sampling.top_p < 1:
            probs = renorm.top_p_renorm_probs(probs, top_ps.repeat_interleave(nodes, 0))
        probs = probs.view(batch, nodes, vocab)
        coins, last_coin = torch.rand(batch, nodes, device=device), torch.rand(batch, device=device)
        ops.tree_speculative_sampling_target_only(
            *out, tokens, *links, coins, last_coin, probs, torch.zeros_like(probs), 1.0, 1.0, True
        )
        return out

    return (Baseline("sglang", call, lambda out: check(accepted(out, tree))),)


def links_of(tree: sd.Tree) -> Links:
    rows = torch.arange(tree.tokens.numel(), device=tree.tokens.device).view(tree.tokens.shape)
    return Links(rows, tree.first_child.long(), tree.next_sibling.long())


def accept_buffers(tree: sd.Tree, width: int) -> AcceptBuffers:
    """Allocate the outputs of a kernel."""
    batch, device = len(tree.tokens), tree.tokens.device
    return AcceptBuffers(
        predicts=torch.zeros(tree.tokens.numel(), dtype=torch.int32, device=device),
        accept_index=torch.full((batch, width), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(batch, dtype=torch.int32, device=device),
    )


def accepted(out: AcceptBuffers, tree: sd.Tree) -> tuple[Tensor, ...]:
    """Convert SGLang's result to verify_tree's: tokens, lengths (including the bonus token), path."""
    nodes = tree.tokens.shape[1]
    lengths = out.accept_token_num + 1
    columns = torch.arange(out.accept_index.shape[1], device=out.predicts.device)
    rows = out.accept_index.gather(1, torch.minimum(columns, lengths[:, None] - 1)).long()
    tokens = out.predicts[rows].where(columns < lengths[:, None], torch.full_like(rows, -1).int())
    return tokens, lengths, (rows % nodes).int()


def expect_same_trees(got: BuiltTrees, want: sd.Tree) -> None:
    """Compare nodes regardless of order, by their tokens from the root on: by the links, and by the mask."""
    visible = want.dense_mask()
    for b in range(len(got.tokens)):
        theirs, ours = got.tokens[b].tolist(), want.tokens[b].tolist()
        same = (
            paths_by_links(theirs, got.links.next_token[b].tolist(), got.links.next_sibling[b].tolist())
            == paths_by_links(ours, want.first_child[b].tolist(), want.next_sibling[b].tolist())
            and paths_by_mask(theirs, got.positions[b].tolist(), got.mask[b].tolist())
            == paths_by_mask(ours, want.positions[b].tolist(), visible[b].tolist())
        )  # fmt: skip
        if not same:
            raise WrongResult(f"tree {b} differs")


def paths_by_links(tokens: list[int], first_child: list[int], next_sibling: list[int]) -> Counter[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    open_nodes: list[tuple[int, tuple[int, ...]]] = [(0, (tokens[0],))]
    while open_nodes and len(paths) <= len(tokens):
        node, path = open_nodes.pop()
        paths.append(path)
        child = first_child[node]
        while child >= 0 and len(open_nodes) <= len(tokens):
            open_nodes.append((child, (*path, tokens[child])))
            child = next_sibling[child]
    return Counter(paths)


def paths_by_mask(tokens: list[int], positions: list[int], visible: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(
        (position, *(token for token, seen in zip(tokens, row, strict=True) if seen))
        for position, row in zip(positions, visible, strict=True)
    )
