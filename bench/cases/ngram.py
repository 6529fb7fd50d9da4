"""The case of NgramIndex.draft: one round's lookups, on text that repeats itself as code and chat do."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import ngram as reference

from ..compare import bytes_of, expect_close, expect_equal, poisoned
from ..harness import Case, Params, Work

DOCUMENT, STREAM = 40_000, 300


def repetitive_text(phrases: list[Tensor], length: int) -> Tensor:
    chosen = [phrases[int(torch.randint(0, len(phrases), ()))] for _ in range(length // 8 + 1)]
    return torch.cat(chosen)[:length].contiguous()


def ngram_draft(device: torch.device, p: Params) -> Work:
    batch, nodes = p["batch"], p["nodes"]
    phrases = [torch.randint(0, 32000, (int(torch.randint(8, 24, ())),), dtype=torch.int32) for _ in range(600)]
    index = sd.NgramIndex(max_tokens=1 << 20, num_slots=batch)
    plain = reference.NgramIndex()
    for slot in (None, *range(batch)):
        text = repetitive_text(phrases, DOCUMENT if slot is None else STREAM)
        index.insert(text, slot)
        plain.insert(text.tolist(), slot)

    seq_lens = torch.full((batch,), STREAM - 1, dtype=torch.int32)
    rows = ("tokens", "parents", "positions", "first_child", "next_sibling")
    out = {f"out_{name}": poisoned(batch, nodes, dtype=torch.int32, device=device) for name in rows}
    out["out_mask"] = poisoned(batch, nodes, -(-nodes // 64), dtype=torch.int64, device=device)
    out["out_num_nodes"] = poisoned(batch, dtype=torch.int32, device=device)
    out["out_scores"] = poisoned(batch, nodes, dtype=torch.float32, device=device)
    out["out_match_len"] = poisoned(batch, dtype=torch.int32, device=device)

    def check() -> None:
        for b in range(batch):
            want = plain.draft(b, nodes, mode=p["mode"])
            assert want is not None
            length = len(want.tokens)
            expect_equal(f"out_num_nodes[{b}]", out["out_num_nodes"][b], torch.tensor(length))
            expect_equal(f"out_match_len[{b}]", out["out_match_len"][b], torch.tensor(want.match_len))
            expect_equal(f"out_tokens[{b}]", out["out_tokens"][b, :length], torch.tensor(want.tokens))
            expect_equal(f"out_parents[{b}]", out["out_parents"][b, :length], torch.tensor(want.parents))
            expect_close(f"out_scores[{b}]", out["out_scores"][b, :length], torch.tensor(want.scores), atol=1e-5)

    return Work(
        call=lambda: index.draft(None, seq_lens, nodes, mode=p["mode"], **out),
        check=check,
        bytes_moved=bytes_of(seq_lens, *out.values()),
    )


CASES = [
    Case(
        "ngram_draft",
        grid={"batch": (1, 8, 64), "nodes": (8, 16), "mode": ("tree", "chain")},
        make=ngram_draft,
        devices=("cpu",),
    )
]
