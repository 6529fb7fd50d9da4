"""Rounds of an engine run by hand, without its scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import _C, free_pages
from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, Standalone, Union
from specdec_kernels.tiny import tiny_model
from support.exhaustive import representative
from support.tiny_checkpoint import held_out

MAX_LEN = 128

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "ngram": lambda: Ngram(),
    "eagle3-chain": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=1),
    "eagle3-tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=3, num_nodes=12),
    "eagle3+ngram": lambda: Union(
        Eagle3(tiny_model("eagle3"), num_steps=3, topk=3, num_nodes=12), Ngram(num_nodes=12), num_nodes=12
    ),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=3, topk=2, num_nodes=8),
}

every_draft = pytest.mark.parametrize("name", representative(DRAFTS))


def make_engine(name: str, device: torch.device | str = "cpu", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 3, "page_size": 4, "dtype": torch.float32}
    if torch.device(device).type == "cpu":
        defaults["adaptive"] = False
    return Engine(tiny_model("target"), draft=DRAFTS[name](), device=device, **(defaults | options))


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:length] for prompt, length in zip(held_out("code"), [23, 40, 9, 31, 17, 60, 2, 48], strict=False)]


def begin(engine: Engine, slot: int, text: list[int], chunk: int = 1000, budget: int = 100) -> list[int]:
    """Do what the scheduler does for a request that gets a slot; return the token of its first round."""
    executor, state, rows = engine.core.executor, engine.state, len(text)
    give_back(engine, slot)
    executor.begin(slot, _C.AdmittedRequest(id=slot, tokens=text))
    for start in range(0, rows, chunk):
        count = min(chunk, rows - start)
        tokens = [*text, text[-1]][start : start + count + 1]
        executor.prefill([_C.PrefillChunk(slot=slot, start=start, tokens=tokens)])
    state.seq_lens[slot], state.root_tokens[slot], state.remaining[slot] = rows - 1, text[-1], budget
    executor.activate([slot])
    return run(engine, [slot], _C.FIRST_ROUND)[slot]


def give_back(engine: Engine, slot: int) -> None:
    state = engine.state
    state.seq_lens[slot] = state.finish_reasons[slot] = state.status[slot] = 0
    slots = torch.tensor([slot], dtype=torch.int32, device=engine.device)
    free_pages(state.pool, torch.zeros_like(state.seq_lens), slots=slots)


def run(engine: Engine, slots: list[int], num_nodes: int | None = None) -> dict[int, list[int]]:
    """Run a round of all nodes or of `nodes` for each, or a first round; return the new tokens of each slot."""
    num_rows = len(slots) * (num_nodes or engine.config.needs.num_nodes)
    if num_nodes == _C.FIRST_ROUND:
        num_rows = num_nodes
    round = engine.core.executor.round
    with torch.inference_mode():
        result = round.commit(round.run_target(torch.tensor(slots, dtype=torch.int32, device=engine.device), num_rows))
    lengths = result.accepted.num_valid.tolist()
    return {
        slot: row[:length]
        for slot, row, length in zip(slots, result.accepted.tokens.tolist(), lengths, strict=True)
        if slot >= 0 or length > 0
    }


def slot_state(engine: Engine, slot: int) -> dict[str, Any]:
    state, draft = engine.state, getattr(engine.draft, "first", engine.draft)  # of a union, the model
    kept = {"length": state.seq_lens, "root": state.root_tokens, "remaining": state.remaining}
    kept |= {"reason": state.finish_reasons, "pages": state.pool.page_table, "count": state.pool.page_counts}
    for name in ("child_ids", "child_logprobs", "last_hidden"):
        if hasattr(draft, name):
            kept[name] = getattr(draft, name)
    return {name: tensor[slot].tolist() for name, tensor in kept.items()}


def kv_of(engine: Engine, slot: int) -> torch.Tensor:
    """Return the pages that a slot holds, in all target layers."""
    count = int(engine.state.pool.page_counts[slot])
    pages = engine.state.pool.page_table[slot, :count].long()
    (group,) = engine.target.pools.groups
    return torch.stack([pool[:, pages] for pool in group.pools])
