"""Cases of the tree ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import tree as reference

from ..baselines import sglang
from ..check import bytes_of, expect_equal, poisoned
from ..harness import Case, Params, Work
from .trees import poisoned_tree, random_parents, random_tree

NUM_STEPS = 5


def drafted_candidates(batch: int, k: int, device: torch.device) -> tuple[sd.Candidates, Tensor]:
    """Return the candidates of NUM_STEPS draft steps, and the sequence lengths."""

    def draw(*shape: int) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(torch.randn(shape, device=device), -1).sort(-1, descending=True).values
        return torch.randint(0, 32000, shape, dtype=torch.int32, device=device), logprobs

    seq_lens = torch.randint(0, 4096, (batch,), dtype=torch.int32, device=device)
    candidates, frontier = sd.expand_root(*draw(batch, k), seq_lens, NUM_STEPS)
    for step in range(2, NUM_STEPS + 1):
        sd.expand_tree(*draw(batch, k, k), step, candidates, frontier, seq_lens)
    return candidates, seq_lens


def expect_tree(out: sd.Tree, want: sd.Tree) -> None:
    for name, got, expected in zip(sd.Tree._fields, out, want, strict=True):
        expect_equal(name, got, expected)


def build_tree(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    candidates, seq_lens = drafted_candidates(batch, p["k"], device)
    root_tokens = torch.randint(0, 32000, (batch,), dtype=torch.int32, device=device)
    out = poisoned_tree(batch, nodes, device)

    def want() -> sd.Tree:
        proposed = sd.Candidates(*(tensor.cpu() for tensor in candidates))
        return reference.build_tree(proposed, root_tokens.cpu(), seq_lens.cpu(), nodes)

    return Work(
        call=lambda: sd.build_tree(candidates, root_tokens, seq_lens, nodes, out=out),
        check=lambda: expect_tree(out, want()),
        bytes_moved=bytes_of(*candidates, root_tokens, seq_lens, *out),
        packages=sglang.build_tree(candidates, root_tokens, seq_lens, nodes, NUM_STEPS, want),
    )


def from_elsewhere(build: Callable[..., sd.Tree], topology: str) -> Callable[[torch.device, Params], Work]:
    """Return the case of a builder whose answer is known: the tree that its input was derived from."""

    def make(device: torch.device, p: Params) -> Work:
        tree = random_tree(p["batch"], p["nodes"], 32000, device)
        inputs = (tree.tokens, getattr(tree, topology), tree.positions[:, 0].contiguous())
        out = poisoned_tree(p["batch"], p["nodes"], device)
        return Work(
            call=lambda: build(*inputs, out=out),
            check=lambda: expect_tree(out, tree),
            bytes_moved=bytes_of(*inputs, *out),
            packages=sglang.build_tree_from_mask(tree) if topology == "mask" else (),
        )

    return make


def scored_tree(batch: int, nodes: int, device: torch.device) -> tuple[sd.Tree, Tensor]:
    """Return a drafted tree and its scores, with few different tokens, so that two trees share paths."""
    parents = torch.tensor(random_parents(batch, nodes), dtype=torch.int32)
    scores = torch.zeros(batch, nodes)
    rows = torch.arange(batch)
    for i in range(1, nodes):
        scores[:, i] = scores[rows, parents[:, i].long()] - torch.rand(batch)
    tokens = torch.randint(0, 8, (batch, nodes), dtype=torch.int32)
    tokens[:, 0] = 9
    tree = sd.build_tree_from_parents(tokens, parents, torch.full((batch,), 100, dtype=torch.int32))
    return sd.Tree(*(field.to(device) for field in tree)), scores.to(device)


def merge_trees(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    drafts = (*scored_tree(batch, nodes, device), *scored_tree(batch, nodes, device))
    out = poisoned_tree(batch, nodes, device), poisoned(batch, nodes, dtype=torch.float32, device=device)

    def check() -> None:
        (a, a_scores, b, b_scores) = drafts
        cpu = [sd.Tree(*(field.cpu() for field in tree)) for tree in (a, b)]
        want, scores = reference.merge_trees(cpu[0], a_scores.cpu(), cpu[1], b_scores.cpu(), nodes)
        expect_tree(out[0], want)
        expect_equal("scores", out[1], scores)

    read = [t for tree, scores in (drafts[:2], drafts[2:]) for t in (tree.tokens, tree.parents, tree.num_nodes, scores)]
    return Work(
        call=lambda: sd.merge_trees(*drafts, nodes, out=out),
        check=check,
        bytes_moved=bytes_of(*read, *out[0], out[1]),
    )


def allocate_nodes(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    scores = -torch.rand(batch, nodes, device=device).cumsum(1)
    budget_levels = torch.tensor([batch * n // 2 for n in range(2, 18)], dtype=torch.int32, device=device)
    budget = batch * max(nodes // 4, 1)
    out = sd.NodeAllocation(
        poisoned(batch, dtype=torch.int32, device=device),
        poisoned(batch + 1, dtype=torch.int32, device=device),
        poisoned(len(budget_levels), dtype=torch.float32, device=device),
        poisoned(len(budget_levels), dtype=torch.float32, device=device),
    )

    def check() -> None:
        want = reference.allocate_nodes(scores.cpu(), budget, budget_levels=budget_levels.cpu())
        expect_equal("num_nodes", out.num_nodes, want.num_nodes)
        expect_equal("cu_seqlens", out.cu_seqlens, want.cu_seqlens)
        expect_equal("cuts", out.cuts, want.cuts)

    return Work(
        call=lambda: sd.allocate_nodes(scores, budget, budget_levels=budget_levels, out=out),
        check=check,
        bytes_moved=bytes_of(scores, *out),
    )


def pack_trees(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    tree, scores = scored_tree(batch, nodes, device)
    counts = tree.num_nodes // 2
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    allocation = sd.NodeAllocation(counts, ends, scores[0, :0], scores[0, :0])
    rows = batch * max(nodes // 2, 1)
    want_tree = sd.Tree(*(field.to("cpu", copy=True) for field in tree))
    want = reference.pack_trees(
        want_tree, scores.cpu(), sd.NodeAllocation(*(field.cpu() for field in allocation)), rows
    )
    out = sd.PackedNodes(*(poisoned(*field.shape, dtype=field.dtype, device=device) for field in want))

    def check() -> None:
        expect_tree(tree, want_tree)
        for name, got, field in zip(out._fields, out, want, strict=True):
            expect_equal(name, got, field)

    return Work(
        call=lambda: sd.pack_trees(tree, scores, allocation, rows, out=out),
        check=check,
        bytes_moved=bytes_of(*tree, scores, *out),
    )


SIZES = {"batch": (1, 8, 64, 256), "nodes": (4, 8, 32, 64, 128, 256)}

CASES = [
    Case("build_tree", grid={**SIZES, "k": (10, 1)}, make=build_tree),
    Case("build_tree_from_parents", grid=SIZES, make=from_elsewhere(sd.build_tree_from_parents, "parents")),
    Case("build_tree_from_mask", grid=SIZES, make=from_elsewhere(sd.build_tree_from_mask, "mask")),
    Case("merge_trees", grid=SIZES, make=merge_trees),
    Case("allocate_nodes", grid=SIZES, make=allocate_nodes),
    Case("pack_trees", grid=SIZES, make=pack_trees),
]
