"""Cases of the verify ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

from ..baselines import flashinfer, sglang
from ..baselines.sampling import Sampling
from ..check import bytes_of, expect_close, expect_equal, poisoned
from ..harness import Baseline, Case, Params, Work
from .trees import random_tree

WIDTH = 6  # accept row: five draft steps and the bonus token
ACCEPTED = 3  # drafts of each path that is scored

# Sampling parameters of all requests, by the name of the benchmark's `sampling`; None: greedy.
SAMPLING: dict[str, Sampling | None] = {
    "greedy": None,
    "top_k+top_p": Sampling(temperature=0.8, top_k=50, top_p=0.95),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "temperature": Sampling(temperature=0.8),
}

# Logit edits of requests, by the name of the `edit` they are benchmarked under.
EDITS: dict[str, int] = {"penalties": sd.Edit.PENALTIES, "mask": sd.Edit.MASK, "none": 0}


def accept_length(b: int) -> int:
    """Return the accept length of request b if its tree is deep enough: 4, 5, 6, 1, 2, 3, repeated, 3.5 on average."""
    return (b + WIDTH // 2) % WIDTH + 1


def accept_path(logits: Tensor, tree: sd.Tree) -> int:
    """Make the target accept a path of each tree and then choose another token; return the number of visited nodes."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    visited = 0
    for b, row in enumerate(parents):
        depth = [0] * len(row)
        for node in range(1, len(row)):
            depth[node] = depth[row[node]] + 1
        wanted = min(accept_length(b) - 1, max(depth))
        node = depth.index(wanted)
        logits[b, node, (tokens[b][0] + 1) % logits.shape[2]] = 50
        visited += wanted + 1
        while node > 0:
            logits[b, row[node], tokens[b][node]] = 50
            node = row[node]
    return visited


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of all requests, [B] each; None where `verify_tree` is given none."""

    temperature: Tensor | None = None  # None: greedy
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    seeds: Tensor | None = None

    @classmethod
    def of(cls, sampling: Sampling | None, batch: int, device: torch.device) -> SamplingTensors:
        """Return the parameters of `batch` requests that all sample alike."""
        if sampling is None:
            return cls()

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(sampling.temperature, torch.float32),
            top_k=full(sampling.top_k, torch.int32) if sampling.top_k else None,
            top_p=full(sampling.top_p, torch.float32) if sampling.top_p < 1 else None,
            seeds=torch.arange(batch, device=device),
        )


def walk(choice: Tensor, tree: sd.Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Walk along the tokens chosen at every node [B, N], level by level: fixed shapes, no synchronization."""
    batch, device = len(choice), choice.device
    node = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    going = torch.ones(batch, 1, dtype=torch.bool, device=device)
    tokens, path, length = [], [], torch.zeros(batch, dtype=torch.int32, device=device)
    for _ in range(WIDTH):
        y = choice.gather(1, node)
        tokens.append(y.where(going, torch.full_like(y, -1)))
        path.append(node.int())
        length += going[:, 0]
        accepted = (tree.parents == node) & (tree.tokens == y)
        going = going & accepted.any(1, keepdim=True)
        node = accepted.int().argmax(1, keepdim=True).where(going, node)
    return torch.cat(tokens, 1), length, torch.cat(path, 1)


def verify_tree(device: torch.device, p: Params) -> Work:
    batch, nodes, vocab = p["batch"], p["nodes"], p["vocab"]
    tree = random_tree(batch, nodes, vocab, device)
    logits = torch.randn(batch, nodes, vocab, dtype=getattr(torch, p["dtype"]), device=device)
    chosen = SAMPLING[p["sampling"]]
    sampling = SamplingTensors.of(chosen, batch, device)
    visited = accept_path(logits, tree)
    out = sd.Accepted(
        poisoned(batch, WIDTH, dtype=torch.int32, device=device),
        poisoned(batch, dtype=torch.int32, device=device),
        poisoned(batch, WIDTH, dtype=torch.int32, device=device),
    )

    size = sd.verify_tree_workspace(logits, temperature=sampling.temperature)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)

    @cache
    def want() -> sd.Accepted:
        return reference.verify_tree(logits.cpu(), sd.Tree(*(field.cpu() for field in tree)), WIDTH)

    # The accepted tokens are so likely that sampled requests get them as well.
    def check(got: tuple[Tensor, ...] = out) -> None:
        for name, x, y in zip(sd.Accepted._fields, got, want(), strict=True):
            expect_equal(name, x, y)

    def others() -> list[Baseline]:
        if chosen is None:
            return [
                Baseline("torch", lambda: walk(logits.argmax(-1).int(), tree), check),
                *sglang.verify_greedy(logits, tree, WIDTH, check),
            ]
        packages = [*sglang.verify_sampled(logits, tree, WIDTH, chosen, check)]
        sample = flashinfer.sample_every_node(logits, chosen)
        if sample is not None:
            packages.append(Baseline("flashinfer", lambda: walk(sample(), tree), check))
        return packages

    links = (tree.tokens, tree.parents, tree.first_child, tree.next_sibling, tree.num_nodes)
    return Work(
        call=lambda: sd.verify_tree(
            logits,
            tree,
            WIDTH,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seeds=sampling.seeds,
            workspace=workspace,
            out=out,
        ),
        check=check,
        bytes_moved=visited * vocab * logits.element_size() + bytes_of(*links, *out),
        just_written=[logits],
        packages=others(),
    )


def mask_stops(device: torch.device, p: Params) -> Work:
    """Mask 16 stop tokens per request; one request has a minimum length."""
    batch, vocab, nodes, stops = p["batch"], p["vocab"], p["nodes"], 16
    logits = torch.randn(batch, nodes, vocab, device=device).to(torch.bfloat16)
    positions = torch.randint(0, 99, (batch, nodes), dtype=torch.int32, device=device)
    stop_tokens = torch.randint(0, vocab, (batch, stops), dtype=torch.int32, device=device)
    stops_from = torch.zeros(batch, dtype=torch.int32, device=device)
    stops_from[0] = 50
    before = logits.cpu().clone()

    def check() -> None:
        reference.mask_stops(before, positions.cpu(), stop_tokens.cpu(), stops_from.cpu())
        expect_equal("logits", logits, before)

    call = lambda: sd.mask_stops(logits, positions, stop_tokens, stops_from)  # noqa: E731
    moved = bytes_of(positions[:1], stop_tokens[:1], stops_from) + nodes * stops * logits.element_size()
    return Work(call, check, moved, just_written=[logits])


def edit_logits(device: torch.device, p: Params) -> Work:
    """Edit logits for no request, or for all: penalties with 500 tokens in the text, or a grammar's mask."""
    batch, vocab, nodes, kind = p["batch"], p["vocab"], p["nodes"], EDITS[p["edit"]]
    logits = torch.randn(batch, nodes, vocab, device=device).to(torch.bfloat16)
    tree = random_tree(batch, nodes, vocab, device)
    edits = sd.make_logit_edits(batch, vocab, like=logits)
    edits.kinds.fill_(kind)
    edits.presence.fill_(0.5)
    edits.counts.scatter_(1, torch.randint(0, vocab, (batch, 500), device=device), 2)
    vocab_mask = torch.randint(0, 2, (batch, nodes, -(-vocab // 32)), dtype=torch.int32, device=device) - 1
    before = logits.cpu().clone()

    def check() -> None:
        reference.edit_logits(
            before, tree.mask.cpu(), tree.tokens.cpu(), sd.LogitEdits(*(each.cpu() for each in edits)), vocab_mask.cpu()
        )
        expect_equal("logits", logits, before)

    call = lambda: sd.edit_logits(logits, tree.mask, tree.tokens, edits, vocab_mask=vocab_mask)  # noqa: E731
    changed = {0: 0, sd.Edit.PENALTIES: bytes_of(edits.counts) + 32 * batch * nodes * 500}  # a sector for each token
    moved = bytes_of(edits.kinds) + changed.get(kind, bytes_of(vocab_mask, logits) // 2)
    return Work(call, check, moved, just_written=[logits])


def score_tokens(device: torch.device, p: Params) -> Work:
    """Score a verified path of ACCEPTED drafts and the bonus token, in logits of 8 nodes per request."""
    batch, vocab, top_n, nodes = p["batch"], p["vocab"], p["top_n"], 8
    logits = torch.randn(batch, nodes, vocab, device=device).to(torch.bfloat16)
    path = torch.arange(WIDTH, dtype=torch.int32, device=device).clamp(max=ACCEPTED).repeat(batch, 1)
    tokens = torch.randint(0, vocab, (batch, WIDTH), dtype=torch.int32, device=device)
    accepted = sd.Accepted(tokens, torch.full((batch,), ACCEPTED + 1, dtype=torch.int32, device=device), path)
    out = sd.TokenScores(
        poisoned(batch, WIDTH, dtype=torch.float32, device=device),
        poisoned(batch, WIDTH, top_n, dtype=torch.int32, device=device),
        poisoned(batch, WIDTH, top_n, dtype=torch.float32, device=device),
    )

    def check() -> None:
        want = reference.score_tokens(logits.cpu(), sd.Accepted(*(tensor.cpu() for tensor in accepted)), top_n)
        expect_equal("top_ids", out.top_ids, want.top_ids)
        expect_close("logprobs", out.logprobs, want.logprobs, atol=2e-5)
        expect_close("top_logprobs", out.top_logprobs, want.top_logprobs, atol=2e-5)

    def call() -> object:
        return sd.score_tokens(logits, accepted, top_n=top_n, out=out)

    moved = batch * (ACCEPTED + 1) * vocab * logits.element_size() + bytes_of(*accepted, *out)
    return Work(call, check, moved)


def commit_tokens(device: torch.device, p: Params) -> Work:
    """Advance every slot without finishing any, so that all calls do the same work."""
    batch = p["batch"]

    def ints(*shape: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, device=device)

    num_valid = ints(batch, low=1, high=WIDTH + 1)
    tokens = ints(batch, WIDTH, low=0, high=32000)
    tokens[torch.arange(WIDTH, device=device)[None] >= num_valid[:, None]] = -1
    accepted = sd.Accepted(tokens, num_valid, torch.zeros_like(tokens))
    state = sd.make_slot_state(batch, 2**30, 4, like=tokens)
    state.stop_tokens.copy_(ints(batch, 4, low=32000, high=32100))
    state.remaining.copy_(ints(batch, low=2**30, high=2**30 + 100))
    state.seq_lens.copy_(ints(batch, low=0, high=4096))
    out = poisoned(batch, dtype=torch.int32, device=device)
    before = sd.SlotState(*(tensor.cpu().clone() for tensor in state))

    def check() -> None:
        want = sd.SlotState(*(tensor.clone() for tensor in before))
        row = sd.Accepted(*(tensor.cpu() for tensor in accepted))
        expect_equal("num_valid", out, reference.commit_tokens(row, want))
        for struct, expected in ((accepted, row), (state, want)):
            for name, got, tensor in zip(struct._fields, struct, expected, strict=True):
                expect_equal(name, got, tensor)

    changed = (state.remaining, state.seq_lens)  # read and written
    written = (state.prefix_lens, state.root_tokens, state.finish_reasons)
    moved = bytes_of(tokens, num_valid, state.stop_tokens, state.max_seq_lens, *changed, *changed, *written, out)
    return Work(lambda: sd.commit_tokens(accepted, state, out=out), check, moved)


CASES = [
    Case(
        "verify_tree",
        grid={
            "batch": (1, 4, 16, 64, 256),
            "nodes": (4, 8, 16, 32, 64, 128, 256),
            "vocab": (32000, 128256, 151936),
            "sampling": tuple(SAMPLING),
            "dtype": ("bfloat16", "float32"),
        },
        base={"batch": 16, "nodes": 32, "vocab": 128256, "sampling": "greedy", "dtype": "bfloat16"},
        cpu_grid={
            "batch": (1, 4),
            "nodes": (8, 32),
            "vocab": (32000,),
            "sampling": tuple(SAMPLING),
            "dtype": ("bfloat16", "float32"),
        },
        make=verify_tree,
    ),
    Case(
        "edit_logits",
        grid={"batch": (1, 64), "vocab": (151936,), "nodes": (6, 32), "edit": tuple(EDITS)},
        make=edit_logits,
    ),
    Case("mask_stops", grid={"batch": (1, 64), "vocab": (128256,), "nodes": (6, 32)}, make=mask_stops),
    Case(
        "score_tokens",
        grid={"batch": (1, 8, 64), "vocab": (32000, 128256, 151936), "top_n": (5, 0)},
        make=score_tokens,
    ),
    Case("commit_tokens", grid={"batch": (1, 8, 64, 256)}, make=commit_tokens),
]
