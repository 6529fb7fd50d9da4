"""Engines with adaptive drafts, and their expected texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Draft, Eagle, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.tiny import tiny_model
from support.eagle_heads import random_tensors, write_head
from support.exhaustive import representative
from support.tiny_checkpoint import Comparison, held_out, reference_model, reference_texts

MAX_LEN, NEW_TOKENS = 128, 24
HEAD = tiny_model("eagle3")


def eagle_head(folder: Path) -> Path:
    return folder if folder.exists() else write_head(folder, random_tensors(False))


DRAFTS: dict[str, Callable[[Path], Draft]] = {
    "ngram": lambda _: Ngram(num_nodes=12),
    "eagle-chain": lambda path: Eagle(eagle_head(path / "head"), topk=1),
    "eagle3-chain": lambda _: Eagle3(HEAD, num_steps=5, topk=1),
    "eagle3-tree": lambda _: Eagle3(HEAD, num_steps=4, topk=4, num_nodes=32),
    "standalone": lambda _: Standalone(tiny_model("target"), num_steps=3, topk=2, num_nodes=8),
    "eagle3+ngram": lambda _: Union(Eagle3(HEAD, num_steps=3, topk=3, num_nodes=24), Ngram(num_nodes=24), num_nodes=24),
}

every_draft = pytest.mark.parametrize("name", representative(DRAFTS))


@functools.cache
def prompts() -> list[list[int]]:
    return [*(prompt[:40] for prompt in held_out("code")[:6]), *(prompt[-60:] for prompt in held_out("repeat")[:6])]


@functools.cache
def plain_texts() -> list[list[int]]:
    return reference_texts(prompts(), NEW_TOKENS)


def make_engine(draft: Draft | None, device: torch.device, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 4, "page_size": 4, "dtype": torch.float32}
    return Engine(tiny_model("target"), draft=draft, device=device, **(sizes | options))


def expect_plain_texts(engine: Engine) -> None:
    comparison = Comparison(reference_model())
    outputs = engine.generate(prompts(), SamplingParams(NEW_TOKENS))
    for prompt, output, want in zip(prompts(), outputs, plain_texts(), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1
    pool = engine.state.pool
    assert int(pool.num_free[0]) == len(pool.free_stack) and not pool.page_refs.any()
