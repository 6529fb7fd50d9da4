"""Cases of NgramIndex: lookups and insertions of a round, and bulk insertion.

Texts repeat themselves, as code and chats do. On a GPU the index is not in the L2 cache when a call starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import ngram as reference

from ..check import bytes_of, expect_close, expect_equal, poisoned
from ..harness import Case, Params, Work
from .trees import poisoned_tree

DOCUMENT, STREAM, CHUNK = 40_000, 300, 1 << 16
ROUND = 4  # accepted tokens of a round
VOCAB = 32_000


def repetitive_text(length: int, first_id: int = 0) -> Tensor:
    """Return a text of equally likely phrases of 8 to 23 tokens, one different phrase per 60 tokens."""
    count = max(length // 60, 600)
    lengths = torch.randint(8, 24, (count,))
    tokens = torch.randint(first_id, first_id + VOCAB, (int(lengths.sum()),), dtype=torch.int32)
    phrases = tokens.split(lengths.tolist())
    chosen = torch.randint(0, count, (length // 8 + 1,)).tolist()
    return torch.cat([phrases[i] for i in chosen])[:length].contiguous()


def filled_index(held: int, batch: int, device: torch.device) -> sd.NgramIndex:
    """Return an index with `held` tokens that no other text shares, so that they do not change any draft."""
    tokens = held + DOCUMENT + (batch + 1) * STREAM
    index = sd.NgramIndex(tokens, num_slots=batch, max_len=2**31 - 1, device=device)
    for start in range(0, held, 1 << 20):
        index.insert(repetitive_text(min(held - start, 1 << 20), first_id=10 * VOCAB).to(device))
    return index


def emptied_cache(device: torch.device) -> Callable[[], object] | None:
    """Return a call that evicts a GPU's L2 cache."""
    if device.type == "cpu":
        return None
    other = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    return other.zero_


def outputs(batch: int, nodes: int, device: torch.device) -> sd.NgramDraft:
    scores = poisoned(batch, nodes, dtype=torch.float32, device=device)
    match_len = poisoned(batch, dtype=torch.int32, device=device)
    return sd.NgramDraft(poisoned_tree(batch, nodes, device), scores, match_len)


def expect_drafts(plain: reference.NgramIndex, out: sd.NgramDraft, mode: str) -> None:
    tree, scores, match_len = out
    batch, nodes = scores.shape
    for b in range(batch):
        want: Any = plain.draft(b, nodes, mode=mode)
        length = len(want.tokens)
        expect_equal(f"num_nodes[{b}]", tree.num_nodes[b], torch.tensor(length))
        expect_equal(f"match_len[{b}]", match_len[b], torch.tensor(want.match_len))
        expect_equal(f"tokens[{b}]", tree.tokens[b, :length], torch.tensor(want.tokens))
        expect_equal(f"parents[{b}]", tree.parents[b, :length], torch.tensor(want.parents))
        expect_close(f"scores[{b}]", scores[b, :length], torch.tensor(want.scores), atol=1e-5)


def ngram_draft(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    index, plain = filled_index(p["held"], batch, device), reference.NgramIndex()
    text = repetitive_text(DOCUMENT)
    seq_lens = torch.full((batch,), STREAM - 1, dtype=torch.int32, device=device)
    out = outputs(batch, nodes, device)
    starts = torch.randint(0, DOCUMENT - STREAM, (batch,)).tolist()

    def insert(part: Tensor, slot: int | None) -> None:
        index.insert(part.contiguous().to(device), slot)
        plain.insert(part.tolist(), slot)

    insert(text, None)
    for slot, start in enumerate(starts):
        insert(text[start : start + STREAM - ROUND], slot)
    index.draft(None, seq_lens, nodes, mode=p["mode"], out=out)  # the previous round
    for slot, start in enumerate(starts):
        plain.draft(slot, nodes, mode=p["mode"])
        insert(text[start : start + STREAM][-ROUND:], slot)
    return Work(
        call=lambda: index.draft(None, seq_lens, nodes, mode=p["mode"], out=out),
        check=lambda: expect_drafts(plain, out, p["mode"]),
        bytes_moved=bytes_of(seq_lens, *out.tree, out.scores, out.match_len),
        restore=emptied_cache(device),
    )


def ngram_extend(device: torch.device, p: Params) -> Work:
    """Insert accepted tokens of a round, 1 to 7 per row."""
    batch, width = p["batch"], p["width"]
    index = filled_index(p["held"], batch, device)
    plain = reference.NgramIndex()
    text = repetitive_text(DOCUMENT + batch * width)
    index.insert(text.to(device))
    plain.insert(text.tolist())
    lengths = torch.randint(1, min(width, 7) + 1, (batch,), dtype=torch.int32)
    rows = text[: batch * width].reshape(batch, width)
    tokens, num_valid = rows.to(device), lengths.to(device)

    def check() -> None:
        for slot, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            plain.insert(row[:length], slot)
        out = outputs(batch, 16, device)
        index.draft(None, torch.zeros_like(num_valid), 16, out=out)
        expect_drafts(plain, out, "tree")

    return Work(
        call=lambda: index.extend(tokens, num_valid, None),
        check=check,
        bytes_moved=bytes_of(tokens, num_valid) + int(lengths.sum()) * 4 * 2 * 64,
        restore=emptied_cache(device),
    )


def ngram_insert(device: torch.device, p: Params) -> Work:
    """Insert a document of 65536 tokens into a full index, which drops its oldest text."""
    index = filled_index(p["held"], 1, device)
    text = repetitive_text(CHUNK)
    on_device = text.to(device)

    def check() -> None:
        plain = reference.NgramIndex()
        for slot, part in ((None, text), (0, text[100:200].contiguous())):
            plain.insert(part.tolist(), slot)
            if slot is not None:
                index.insert(part.to(device), slot)
        out = outputs(1, 16, device)
        index.draft(None, torch.zeros(1, dtype=torch.int32, device=device), 16, out=out)
        expect_drafts(plain, out, "tree")

    return Work(call=lambda: index.insert(on_device), check=check, bytes_moved=bytes_of(text) * 18)  # 68 bytes a token


HELD = (100_000, 1_000_000, 10_000_000)
CASES = [
    Case(
        "ngram_draft",
        grid={"batch": (1, 8, 64, 128), "nodes": (8, 16, 64), "mode": ("tree", "chain"), "held": HELD},
        base={"batch": 1, "nodes": 16, "mode": "tree", "held": 1_000_000},
        make=ngram_draft,
    ),
    Case(
        "ngram_extend",
        grid={"batch": (1, 16, 64, 128), "width": (16, 64), "held": HELD},
        base={"batch": 64, "width": 16, "held": 1_000_000},
        make=ngram_extend,
    ),
    Case("ngram_insert", grid={"held": HELD}, make=ngram_insert),
]
