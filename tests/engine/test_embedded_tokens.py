"""What embeddings read: tokens of the vocabulary alone, whatever drafts propose and however rounds are padded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import Candidates
from specdec_kernels.engine import MTP, Draft, DraftBudget, Engine, Needs, Ngram, Proposal, SamplingParams, Union
from specdec_kernels.models.heads.mtp import MtpHead
from specdec_kernels.models.layers.embedding import Embedding
from support.exhaustive import exhaustive
from support.mtp_checkpoints import write_target_with_chain, write_target_with_mtp
from support.random_checkpoints import VOCAB, random_prompts

TREE: dict[str, Any] = {"num_steps": 2, "topk": 2, "num_nodes": 5}
GREEDY = SamplingParams(20, ignore_eos=True)


class Foreign(Draft):
    """Drafts a token that is none of the vocabulary in the first slot."""

    def __init__(self, token: int) -> None:
        self.token = token

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=3, accept_width=3)

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        steps = torch.arange(2, dtype=torch.int32, device=slots.device)[None]  # copied from no host tensor: captured
        chain = 5 + steps
        tokens = torch.where((slots == 0)[:, None], self.token, chain)
        parents = (steps - 1).expand_as(tokens).contiguous()
        scores = (-0.1 * (1 + steps)).expand_as(tokens).contiguous()
        return Proposal(Candidates(tokens, parents, scores))


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Tensor:
    """Return the smallest and the largest token that embeddings have read, which captured rounds update as well."""
    limits = torch.tensor([0, 0], dtype=torch.int64, device=device)

    def watch(kind: type, method: str) -> None:
        original: Callable[..., Any] = getattr(kind, method)

        def watched(self: Any, tokens: Tensor, *arguments: Any) -> Any:
            limits[0].copy_(torch.minimum(limits[0], tokens.min()))
            limits[1].copy_(torch.maximum(limits[1], tokens.max()))
            return original(self, tokens, *arguments)

        monkeypatch.setattr(kind, method, watched)

    watch(Embedding, "__call__")
    watch(MtpHead, "enter")
    return limits


def make_engine(folder: Path, draft: Draft | None, device: torch.device) -> Engine:
    options: dict[str, Any] = {"max_len": 128, "num_slots": 3, "page_size": 4, "prefill_chunk": 24, "adaptive": False}
    return Engine(folder, draft=draft, device=device, dtype=torch.float32, batch_sizes=(3,), **options)


def expect_tokens_of_the_vocabulary(embedded: Tensor) -> None:
    low, high = embedded.tolist()
    assert low == 0 and 100 < high < VOCAB


@pytest.mark.parametrize("token", [-1, VOCAB, *exhaustive(-(2**31), 2**31 - 1)])
@pytest.mark.parametrize("case", ["qwen3_next hybrid", *exhaustive("glm4_moe", "mimo")])
def test_drafts_outside_the_vocabulary_reach_no_embedding(
    case: str, token: int, embedded: Tensor, tmp_path: Path, device: torch.device
) -> None:
    folder, prompts = write_target_with_mtp(tmp_path / "target", case), random_prompts(3)
    with make_engine(folder, None, device) as engine:
        want = [output.tokens for output in engine.generate(prompts, GREEDY)]
    with make_engine(folder, Union(Foreign(token), MTP(**TREE), num_nodes=6), device) as engine:
        requests = engine.submit_many(prompts, GREEDY)
        with pytest.raises(RuntimeError, match="BAD_TREE"):
            requests[0].result()
        assert [request.result().tokens for request in requests[1:]] == want[1:]
    expect_tokens_of_the_vocabulary(embedded)


@pytest.mark.parametrize("num_layers", [1, *exhaustive(2)])
def test_padding_of_rounds_reaches_no_embedding(
    num_layers: int, embedded: Tensor, tmp_path: Path, device: torch.device
) -> None:
    """Slots are empty, texts shorter than a chain of layers has steps, and requests leave in mid-text."""
    if num_layers == 1:
        folder = write_target_with_mtp(tmp_path / "target", "qwen3_5 hybrid")
    else:
        folder = write_target_with_chain(tmp_path / "target", num_layers)
    prompts = [[7], [9, 3], *random_prompts(4)]
    with make_engine(folder, Union(MTP(**TREE), Ngram(num_nodes=4), num_nodes=8), device) as engine:
        assert len(engine.generate(prompts[:1], GREEDY)[0].tokens) == 20
        requests = engine.submit_many(prompts, GREEDY)
        for request in requests[1::2]:
            next(iter(request))
            request.cancel()
        assert all(request.result().tokens for request in requests)
    expect_tokens_of_the_vocabulary(embedded)
