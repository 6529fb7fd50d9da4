"""From a `Speculation` to the draft it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...models.causal_lm import CausalLM
from ...models.checkpoint import expect_folder
from ...models.eagle import load_eagle
from ...models.eagle3 import Eagle3Head, load_eagle3
from ..params import Speculation
from ..state import SlotState
from .base import Draft
from .eagle import EagleDraft
from .model import ModelDraft
from .ngram import NgramDraft
from .standalone import StandaloneDraft
from .union import UnionDraft


def build_draft(speculation: Speculation, state: SlotState, target: CausalLM, *, num_pages: int, max_len: int) -> Draft:
    """Load whatever the algorithm needs, beside the target (same dtype and device, pools of the same pages)."""
    page_size = state.pool.page_size
    steps, topk, nodes = speculation.num_steps, speculation.topk, speculation.num_nodes
    draws = speculation.sampled_drafts
    if speculation.algorithm == "NGRAM":
        return NgramDraft(state, nodes, speculation.ngram_max_tokens, max_len)
    if speculation.algorithm == "EAGLE3+NGRAM":
        model = build_draft(
            replace(speculation, algorithm="EAGLE3", ngram_corpus=(), num_draft_tokens=nodes),
            state,
            target,
            num_pages=num_pages,
            max_len=max_len,
        )
        assert isinstance(model, ModelDraft)
        return UnionDraft(state, model, NgramDraft(state, nodes, speculation.ngram_max_tokens, max_len), nodes)
    if speculation.algorithm == "EAGLE3":
        assert isinstance(speculation.draft_model, str | Path | Eagle3Head)
        head = load_eagle3(speculation.draft_model, target, num_pages=num_pages, page_size=page_size)
        return EagleDraft(state, head, steps, topk, nodes, draws)
    if speculation.algorithm == "EAGLE":
        assert speculation.draft_model is not None
        eagle = load_eagle(speculation.draft_model, target, num_pages=num_pages, page_size=page_size)
        return EagleDraft(state, eagle, steps, topk, nodes, draws)
    if speculation.algorithm == "STANDALONE":
        assert speculation.draft_model is not None
        expect_folder(speculation.draft_model, "Speculation: draft_model")
        weight = target.embedding.weight
        small = CausalLM(
            speculation.draft_model,
            max_len=max_len,
            num_pages=num_pages,
            page_size=page_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        if small.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"Speculation: draft_model has vocab_size {small.config.vocab_size}, "
                f"expected the target's {target.config.vocab_size}"
            )
        return StandaloneDraft(state, small, steps, topk, nodes, draws)
    return Draft(state)
