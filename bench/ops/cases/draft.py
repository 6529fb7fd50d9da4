"""Cases of the draft ops."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

from ..check import bytes_of, expect_close, expect_equal, poisoned
from ..harness import Baseline, Case, Params, Work

VOCABULARIES = (32000, 128256, 151936)


def select_topk(device: torch.device, p: Params) -> Work:
    batch, vocab, k = p["batch"], p["vocab"], p["k"]
    logits = torch.randn(batch, vocab, device=device).to(getattr(torch, p["dtype"]))
    out = sd.TopK(
        poisoned(batch, k, dtype=torch.int32, device=device), poisoned(batch, k, dtype=torch.float32, device=device)
    )

    def check() -> None:
        want_ids, want_logprobs = reference.select_topk(logits.cpu(), k)
        expect_equal("ids", out.ids, want_ids)
        expect_close("logprobs", out.logprobs, want_logprobs, atol=2e-5)

    def plain_torch() -> torch.Tensor:
        return torch.log_softmax(logits.float(), -1).topk(k).values

    def check_torch(logprobs: torch.Tensor) -> None:  # torch.topk does not order ties: compare values only
        expect_close("values", logprobs, reference.select_topk(logits.cpu(), k)[1], atol=2e-5)

    return Work(
        call=lambda: sd.select_topk(logits, k, out=out),
        check=check,
        bytes_moved=bytes_of(logits, *out),
        just_written=[logits],
        baseline=Baseline("torch", plain_torch, check_torch),
    )


def sample_draft(device: torch.device, p: Params) -> Work:
    """Sample drafts: one row per request, every third of them greedy."""
    batch, vocab, k = p["batch"], p["vocab"], p["k"]
    logits = (2 * torch.randn(batch, vocab, device=device)).to(getattr(torch, p["dtype"]))
    seeds = torch.randint(0, 2**62, (batch,), device=device)
    positions = torch.randint(0, 4096, (batch,), dtype=torch.int32, device=device)
    temperature = (0.3 * (torch.arange(1, batch + 1) % 3)).to(device)
    out = sd.TopK(
        poisoned(batch, k, dtype=torch.int32, device=device), poisoned(batch, k, dtype=torch.float32, device=device)
    )

    def check() -> None:
        want_ids, want_logprobs = reference.sample_draft(
            logits.cpu(), k, seeds.cpu(), positions.cpu(), temperature.cpu()
        )
        expect_equal("ids", out.ids, want_ids)
        expect_close("logprobs", out.logprobs, want_logprobs, atol=1e-4)

    return Work(
        call=lambda: sd.sample_draft(logits, k, seeds=seeds, positions=positions, temperature=temperature, out=out),
        check=check,
        bytes_moved=bytes_of(logits, seeds, positions, temperature, *out),
        just_written=[logits],
    )


def depth_one(batch: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the draft state of `batch` slots: the root's best k, best first, and the lengths."""
    ids = torch.randint(0, 32000, (batch, k), dtype=torch.int32, device=device)
    logprobs = torch.log_softmax(torch.randn(batch, k, device=device), -1).sort(-1, descending=True).values
    return ids, logprobs, torch.randint(0, 4096, (batch,), dtype=torch.int32, device=device)


def expand_root(device: torch.device, p: Params) -> Work:
    batch, k, num_steps = p["batch"], p["k"], p["num_steps"]
    ids, logprobs, seq_lens = depth_one(batch, k, device)
    candidates, frontier = sd.expand_root(ids, logprobs, seq_lens, num_steps)  # for the shapes
    candidates = sd.Candidates(*(poisoned(*t.shape, dtype=t.dtype, device=device) for t in candidates))
    frontier = sd.Frontier(*(poisoned(*t.shape, dtype=t.dtype, device=device) for t in frontier))

    def call() -> object:
        return sd.expand_root(ids, logprobs, seq_lens, num_steps, out=(candidates, frontier))

    def check() -> None:
        want_candidates, want_frontier = reference.expand_root(ids.cpu(), logprobs.cpu(), seq_lens.cpu(), num_steps)
        for name, got, want in zip(candidates._fields, candidates, want_candidates, strict=True):
            expect_equal(f"candidates.{name}", got, want)
        for name, got, want in zip(frontier._fields, frontier, want_frontier, strict=True):
            expect_equal(f"frontier.{name}", got, want)

    return Work(call, check, bytes_of(ids, logprobs, seq_lens, *candidates, *frontier))


def expand_tree(device: torch.device, p: Params) -> Work:
    """Expand the second step: later steps differ only in the column that they write."""
    batch, k, num_steps = p["batch"], p["k"], p["num_steps"]
    ids, logprobs, seq_lens = depth_one(batch, k, device)
    candidates, frontier = sd.expand_root(ids, logprobs, seq_lens, num_steps)
    nodes, mask, proposed = frontier.nodes.clone(), frontier.mask.clone(), [tensor.clone() for tensor in candidates]
    child_ids = torch.randint(0, 32000, (batch, k, k), dtype=torch.int32, device=device)
    child_logprobs = torch.log_softmax(torch.randn(batch, k, k, device=device), -1).sort(-1, descending=True).values
    inputs = sd.DraftInputs(*(poisoned(batch, k, dtype=torch.int32, device=device) for _ in sd.DraftInputs._fields))

    def call() -> object:
        return sd.expand_tree(child_ids, child_logprobs, 2, candidates, frontier, seq_lens, out=inputs)

    def check() -> None:
        want_candidates, want_nodes, want_mask, want_inputs = reference.expand_tree(
            child_ids.cpu(),
            child_logprobs.cpu(),
            2,
            sd.Candidates(*(tensor.cpu() for tensor in proposed)),
            frontier._replace(nodes=nodes.cpu(), mask=mask.cpu()),
            seq_lens.cpu(),
        )
        for name, got, expected in zip(candidates._fields, candidates, want_candidates, strict=True):
            expect_equal(f"candidates.{name}", got, expected)
        expect_equal("frontier", frontier.nodes, want_nodes)
        expect_equal("mask", frontier.mask, want_mask)
        for name, got, expected in zip(inputs._fields, inputs, want_inputs, strict=True):
            expect_equal(name, got, expected)

    def restore() -> None:
        frontier.nodes.copy_(nodes)
        frontier.mask.copy_(mask)

    # The parents' scores are read and the children's written; frontier and mask are read and written.
    moved = bytes_of(child_ids, child_logprobs, seq_lens, nodes, nodes, nodes, mask, mask, *inputs) + 12 * batch * k * k
    return Work(call, check, moved, restore=restore)


def expand_trellis(device: torch.device, p: Params) -> Work:
    """Expand the candidates of a block drafter; `rank` 0: without transitions."""
    batch, depth, k, count, rank, vocab = p["batch"], p["depth"], p["k"], p["candidates"], p["rank"], 151936
    ids = torch.rand(batch * depth, vocab, device=device).topk(k).indices.view(batch, depth, k).to(torch.int32)
    logits = torch.randn(batch, depth, 4 * k, device=device).sort(-1, descending=True).values
    logprobs = (2 * logits).log_softmax(-1)[..., :k].contiguous()
    tables: dict[str, Any] = {}
    if rank:
        tables = {
            "predecessors": (rank**-0.25 * torch.randn(vocab, rank, device=device)).bfloat16(),
            "successors": (rank**-0.25 * torch.randn(vocab, rank, device=device)).bfloat16(),
            "root_tokens": torch.randint(0, vocab, (batch,), dtype=torch.int32, device=device),
        }
    shape = batch, count
    out = sd.Candidates(
        poisoned(*shape, dtype=torch.int32, device=device),
        poisoned(*shape, dtype=torch.int32, device=device),
        poisoned(*shape, dtype=torch.float32, device=device),
    )

    def check() -> None:  # sums of another order may swap nodes of nearly equal scores: compare scores only
        few = slice(0, 2)
        there = {name: each[few] if name == "root_tokens" else each for name, each in tables.items()}
        there = {name: each.cpu() for name, each in there.items()}
        want = reference.expand_trellis(ids[few].cpu(), logprobs[few].cpu(), count, **there)
        expect_close("scores", out.scores[few], want.scores, atol=1e-4)

    rows = 2 * batch * depth * k * rank * 2  # of both tables
    return Work(
        call=lambda: sd.expand_trellis(ids, logprobs, count, **tables, out=out),
        check=check,
        bytes_moved=bytes_of(ids, logprobs, *out) + rows,
        just_written=[ids, logprobs],
    )


def draft_extend_inputs(device: torch.device, p: Params) -> Work:
    batch, width, nodes = p["batch"], p["accept_width"], p["nodes"]
    tokens, path, num_valid, prefix_lens = (
        torch.randint(low, high, shape, dtype=torch.int32, device=device)
        for low, high, shape in (
            (-1, 32000, (batch, width)), (0, nodes, (batch, width)), (0, width + 1, (batch,)), (0, 4096, (batch,)),
        )
    )  # fmt: skip
    want = reference.draft_extend_inputs(tokens.cpu(), path.cpu(), num_valid.cpu(), prefix_lens.cpu(), nodes)
    outputs = sd.DraftExtendInputs(*(poisoned(*t.shape, dtype=t.dtype, device=device) for t in want))

    def check() -> None:
        for name, got, expected in zip(want._fields, outputs, want, strict=True):
            expect_equal(name, got, expected)

    moved = bytes_of(tokens, path, num_valid, prefix_lens, *outputs)
    return Work(lambda: sd.draft_extend_inputs(tokens, path, num_valid, prefix_lens, nodes, out=outputs), check, moved)


def append_draft_backlog(device: torch.device, p: Params) -> Work:
    """Append the rows of a round without drafting: one row per request."""
    batch, width, ring = p["batch"], p["width"], 16
    tokens = torch.randint(0, 32000, (batch, 6), dtype=torch.int32, device=device)
    ones, path = torch.ones(batch, dtype=torch.int32, device=device), torch.zeros_like(tokens)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    features = torch.randn(batch, width, device=device).bfloat16()
    backlog_lens = torch.randint(0, 100, (batch,), dtype=torch.int32, device=device)
    before = (
        backlog_lens,
        torch.zeros(batch, ring, dtype=torch.int32, device=device),
        features.new_zeros(batch, ring, width),
    )
    kept = [tensor.clone() for tensor in before]

    def check() -> None:
        want = [tensor.cpu() for tensor in before]
        reference.append_draft_backlog(
            tokens.cpu(), path.cpu(), ones.cpu(), want[0], want[1], features.cpu(), want[2], None, ends.cpu()
        )
        for name, got, expected in zip(("backlog_lens", "backlog_tokens", "backlog_features"), kept, want, strict=True):
            expect_equal(name, got, expected)

    def plain_torch() -> None:
        slots = torch.arange(batch, device=device)
        at = slots, kept[0] % ring
        kept[1][at] = tokens[:, 0]
        kept[2][at] = features[ends[:-1] + path[:, 0]]
        kept[0].index_add_(0, slots, ones)

    def restore() -> None:
        for tensor, given in zip(kept, before, strict=True):
            tensor.copy_(given)

    return Work(
        call=lambda: sd.append_draft_backlog(
            tokens, path, ones, kept[0], kept[1], features=features, backlog_features=kept[2], cu_seqlens_q=ends
        ),
        check=check,
        bytes_moved=2 * bytes_of(features) + bytes_of(ones, backlog_lens, backlog_lens) + 16 * batch,
        baseline=Baseline("torch", plain_torch, lambda _: check()),
        restore=restore,
    )


def update_calibration(device: torch.device, p: Params) -> Work:
    batch, nodes, depths = p["batch"], p["nodes"], 5
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32).div(2, rounding_mode="floor").repeat(batch, 1)
    parents[:, 0] = -1
    tokens = torch.randint(0, 4, (batch, nodes), dtype=torch.int32)
    tree = sd.build_tree_from_parents(tokens, parents, torch.zeros(batch, dtype=torch.int32))
    scores = -(tree.positions * torch.rand(1)).float()
    accepted = sd.verify_tree(torch.randn(batch, nodes, 4), tree, 6)
    want = sd.make_calibration(depths, scores)
    reference.update_calibration(want, tree, scores, accepted)
    calibration = sd.make_calibration(depths, scores.to(device))
    calibration.table.fill_(torch.nan)
    drafted, drafted_scores = sd.Tree(*(field.to(device) for field in tree)), scores.to(device)
    kept = sd.Accepted(*(field.to(device) for field in accepted))

    def call() -> None:
        calibration.counts.zero_()
        calibration.table.copy_(identity)
        sd.update_calibration(calibration, drafted, drafted_scores, kept)

    identity = torch.tensor([[1.0, 0.0]] * depths, device=device)

    def check() -> None:
        expect_equal("nodes counted", calibration.counts[..., 0].sum(1), want.counts[..., 0].sum(1))
        expect_equal("hits", calibration.counts[..., 1].sum(1), want.counts[..., 1].sum(1))

    read = drafted.tokens, drafted.parents, drafted.positions, drafted_scores, kept.tokens, kept.num_valid
    return Work(call=call, check=check, bytes_moved=bytes_of(*read, *calibration, *calibration))


CASES = [
    Case(
        "select_topk",
        grid={"batch": (1, 8, 64), "vocab": VOCABULARIES, "k": (1, 10), "dtype": ("bfloat16", "float32")},
        make=select_topk,
    ),
    Case(
        "sample_draft",
        grid={"batch": (1, 8, 64), "vocab": VOCABULARIES, "k": (1, 10), "dtype": ("bfloat16",)},
        make=sample_draft,
    ),
    Case("expand_root", grid={"batch": (1, 8, 64), "k": (1, 10), "num_steps": (5,)}, make=expand_root),
    Case("expand_tree", grid={"batch": (1, 8, 64), "k": (1, 10), "num_steps": (5,)}, make=expand_tree),
    Case(
        "expand_trellis",
        grid={"batch": (1, 8, 64), "depth": (7,), "k": (16,), "candidates": (32,), "rank": (0, 256)},
        make=expand_trellis,
    ),
    Case("update_calibration", grid={"batch": (1, 8, 64), "nodes": (32,)}, make=update_calibration),
    Case("append_draft_backlog", grid={"batch": (1, 8, 64, 256), "width": (12288,)}, make=append_draft_backlog),
    Case(
        "draft_extend_inputs",
        grid={"batch": (1, 8, 64), "accept_width": (6,), "nodes": (32,)},
        make=draft_extend_inputs,
    ),
]
