"""Each family of one file, on a small random checkpoint, against the module that it is made of."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from specdec_kernels.engine import Draft, Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.backends.native import CausalLM, supported_family
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from support.exhaustive import exhaustive
from support.family_cases import (
    CASES,
    VOCAB,
    random_module,
)
from support.random_checkpoints import EXPERTS, random_prompts
from support.tiny_checkpoint import Comparison


@torch.no_grad()
def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    text = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out: list[int] = model.generate(text, attention_mask=torch.ones_like(text), **options)[0, len(prompt) :].tolist()
    return out


# Each case drafts for itself; of four, one writes a text without drafts before, and one with n-grams.
FIRST = [*zip(CASES, itertools.cycle(["none", "", "ngram", ""]))]


@pytest.mark.parametrize(
    ("case", "draft"), [*FIRST, *exhaustive(*((case, "ngram") for case, first in FIRST if first != "ngram"))]
)
def test_greedy_text_is_that_of_transformers(case: str, draft: str, device: torch.device) -> None:
    module = random_module(case)
    reference = deepcopy(module)
    prompts = [*random_prompts(1), [5, 3, 9] * 8]
    want = [greedy_alone(reference, prompt, 12) for prompt in prompts]
    comparison = Comparison(reference)
    drafts: list[Draft | None] = [Standalone(deepcopy(module), num_steps=3, topk=3, num_nodes=9)]
    if draft:
        drafts.insert(0, Ngram(num_nodes=9) if draft == "ngram" else None)
    options: dict[str, Any] = {"max_len": 96, "num_slots": 2, "page_size": 16, "dtype": torch.float32}
    for each in drafts:
        engine = Engine(module.to(device), draft=each, device=device, adaptive=False, **options)
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        for prompt, output, text in zip(prompts, outputs, want, strict=True):
            comparison.check(prompt, output.tokens, text)
    assert len(comparison.near_ties) <= 1
    assert sum(output.stats.accept_length for output in outputs) / len(outputs) > 2  # it drafts for itself
    tokens = torch.randint(VOCAB, (1, 40), device=device)
    for new, old in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(new.cpu(), old)
    with torch.no_grad():
        close(module(tokens).logits.cpu(), reference(tokens.cpu()).logits)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to what sums in float32 in another order differ by."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("case", [*CASES, *EXPERTS])
@torch.inference_mode()
def test_logits_and_states_are_those_of_the_module(case: str, device: torch.device) -> None:
    """Return logits of a prompt, and of two tokens after it that do not see each other."""
    module = random_module(case)
    layers = (1, 0, 3, 2)
    options = ModelOptions(
        max_len=64, num_pages=4, page_size=16, dtype=torch.float32, device=device,
        feature_layers=layers,
    )  # fmt: skip
    lm = CausalLM(deepcopy(module), options)

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    text, ends = torch.randint(VOCAB, (30,)).tolist(), [7, 9]
    table = int32([[2, 0, 3, 1]])
    rows = PagedBatch(int32([0]), table, int32([0]), tail_len=30)
    prompt = lm.forward(int32([text]), int32([list(range(30))]), rows)
    tree = PagedBatch(int32([0]), table, int32([30]), tail_len=2, mask=torch.tensor([[[1], [2]]], device=device))
    leaves = lm.forward(int32([ends]), int32([[30, 30]]), tree)
    for i, end in enumerate(ends):
        out = module(torch.tensor([[*text, end]]), output_hidden_states=True, use_cache=False)
        logits = torch.cat([lm.logits(prompt.hidden)[0], lm.logits(leaves.hidden)[0, i : i + 1]])
        close(logits.cpu(), out.logits[0])
        assert prompt.features is not None and leaves.features is not None
        features = torch.cat([prompt.features[0], leaves.features[0, i : i + 1]])
        states = torch.cat([out.hidden_states[layer][0] for layer in layers], -1)
        close(features.cpu(), states)


@pytest.mark.parametrize("case", EXPERTS)
@torch.inference_mode()
def test_experts_have_the_activation_of_their_config(case: str, device: torch.device) -> None:
    module = random_module(case)
    for part in module.modules():
        if hasattr(part, "act_fn"):
            part.act_fn = ACT2FN["gelu"]
    options = ModelOptions(max_len=64, num_pages=4, page_size=16, dtype=torch.float32, device=device)
    lm, tokens = CausalLM(deepcopy(module), options), torch.randint(VOCAB, (1, 20), device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    rows = PagedBatch(zero, torch.arange(4, dtype=torch.int32, device=device)[None], zero, tail_len=20)
    hidden = lm.forward(tokens.int(), torch.arange(20, dtype=torch.int32, device=device)[None], rows).hidden
    close(lm.logits(hidden)[0].cpu(), module(tokens.cpu(), use_cache=False).logits[0])


@pytest.mark.parametrize(
    ("case", "changes", "max_len", "message"),
    [
        ("llama 80", {"head_dim": 264}, 64, "model: head_dim is 264, expected at most 256"),
        ("falcon", {"alibi": True}, 64, "model: alibi is True, expected False (scores that fall with the distance)"),
        ("gemma3", {"use_bidirectional_attention": True}, 64,
         "model: use_bidirectional_attention is set, expected causal attention"),
        ("gemma", {"use_bidirectional_attention": True}, 64,
         "model: use_bidirectional_attention is set, expected causal attention"),
        ("smollm3", {"use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"] * 2}, 64,
         "model: use_sliding_window is False next to layer_types with 'sliding_attention', expected True or "
         "'full_attention' alone"),
        ("phi3 longrope", {}, 129,
         "model: rope_type is 'longrope', whose angles depend on a sequence's length beyond "
         "original_max_position_embeddings=128, expected max_len of at most that (it is 129)"),
    ],
)  # fmt: skip
def test_what_families_cannot_express_is_refused(case: str, changes: Any, max_len: int, message: str) -> None:
    config = random_module(case).config
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as error:
        supported_family(config, max_len)
    assert str(error.value) == message
