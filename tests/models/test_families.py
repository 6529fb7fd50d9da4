"""How modules become parts: what engines share with a module, what they leave of it, and families from outside."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaMLP

from specdec_kernels import hf
from specdec_kernels.engine import Eagle3, Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.families import Llama, base, family_of, register
from specdec_kernels.models.heads.eagle3 import Eagle3Head
from specdec_kernels.models.heads.loading import load_head
from specdec_kernels.models.layers.linear import fused
from specdec_kernels.tiny import tiny_model
from support.random_checkpoints import VOCAB, random_prompts, save_random_model
from support.tiny_checkpoint import Comparison, held_out, target_with_features

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def module(tmp_path: Path, device: torch.device) -> Any:
    """Return a random Qwen2, whose projections have biases."""
    folder = save_random_model(tmp_path / "module", "qwen2")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def engine_of(module: Any, **options: Any) -> Engine:
    defaults = {"max_len": 128, "num_slots": 2, "dtype": torch.float32, "device": module.device, "adaptive": False}
    return Engine(module, **defaults | options)


def texts(engine: Engine) -> list[list[int]]:
    """Of the same random prompts every time."""
    torch.manual_seed(3)
    return [output.tokens for output in engine.generate(random_prompts(3), GREEDY)]


# --- products of one input


def linears(bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(8, outs, bias=bias) for outs in (6, 2, 4)]


@pytest.mark.parametrize("bias", [False, True])
def test_merged_products_share_their_weights_with_the_modules(bias: bool) -> None:
    parts = linears(bias)
    before = deepcopy(parts)
    parameters = [part.weight for part in parts]
    whole = fused(*parts)
    x = torch.randn(3, 8)
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in before], -1))
    for part, old, parameter in zip(parts, before, parameters, strict=True):
        assert part.weight is parameter and parameter.requires_grad
        torch.testing.assert_close(part(x), old(x))
    with torch.no_grad():
        parts[1].weight.fill_(7)  # as an in-place update of a model's weights does
    assert (whole.weight[6:8] == 7).all() and not whole.weight.requires_grad
    again = fused(*parts)
    assert again.weight.data_ptr() == whole.weight.data_ptr() and torch.equal(again.weight, whole.weight)
    assert (again.bias is None) == (whole.bias is None)


def test_products_that_only_seem_to_be_rows_of_one_are_copied() -> None:
    parts = linears()
    whole = fused(*parts)
    other = fused(parts[1], parts[0], parts[2])  # of one tensor, in another order
    x = torch.randn(3, 8)
    torch.testing.assert_close(other(x), whole(x)[:, [6, 7, *range(6), *range(8, 12)]])
    assert other.weight.data_ptr() != whole.weight.data_ptr()
    strided = linears()
    strided[0].weight.data = torch.randn(8, 6).t()
    torch.testing.assert_close(fused(*strided)(x), torch.cat([part(x) for part in strided], -1))


def test_projections_of_which_some_have_a_bias_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        fused(*linears()[:2], nn.Linear(8, 4, bias=False))
    assert str(error.value) == (
        "model: bias is missing in some of the projections that are fused, expected all or none"
    )


# --- a module and its engines


@pytest.mark.parametrize("inference", [False, True])
def test_an_engine_leaves_the_module_as_it_was(module: Any, inference: bool) -> None:
    module.train()
    before = deepcopy(module)
    with torch.inference_mode(inference):
        texts(engine_of(module))
    assert module.training and all(parameter.requires_grad for parameter in module.parameters())
    assert dict(module.named_buffers()).keys() == dict(before.named_buffers()).keys()
    for (name, new), old in zip(module.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(new, old), name
    tokens = torch.randint(VOCAB, (1, 9), device=module.device)
    torch.testing.assert_close(module(tokens).logits, before(tokens).logits)
    loss = module(tokens, labels=tokens).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_engines_of_one_module_do_not_know_each_other(module: Any) -> None:
    """They share the weights and nothing else, also where the second is in another dtype."""
    first = engine_of(module)
    want = texts(first)
    second = engine_of(module, draft=Ngram())
    qkv = [engine.target.decoder.layers[1].mixer.qkv.weight for engine in (first, second)]
    assert qkv[0].data_ptr() == qkv[1].data_ptr()
    assert texts(second) == want == texts(first)
    third = engine_of(module, dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    texts(third)
    assert texts(second) == want == texts(first)


def test_engines_of_one_head_do_not_know_each_other(device: torch.device) -> None:
    target = target_with_features((1, 2, 3), device)
    head = load_head(Eagle3Head, tiny_model("eagle3"), target, num_pages=8, page_size=16)
    options = {"adaptive": False, "max_len": 256, "dtype": torch.float32, "device": device}
    alone, first, second = (
        Engine(tiny_model("target"), draft=Eagle3(head, num_steps=3, topk=2, num_nodes=8), **options) for _ in range(3)
    )
    prompts = held_out("repeat")[:3]
    want = alone.generate(prompts, GREEDY)
    for engine in (first, second, first):
        outputs = engine.generate(prompts, GREEDY)
        assert [(o.tokens, o.stats.rounds) for o in outputs] == [(o.tokens, o.stats.rounds) for o in want]


def test_an_engine_that_fails_half_way_leaves_the_module_usable(module: Any, tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (1, 9), device=module.device)
    logits = module(tokens).logits
    bad = save_random_model(tmp_path / "draft", "qwen2", vocab_size=VOCAB + 1)
    failing: list[dict[str, Any]] = [
        {"draft": Standalone(bad)},
        {"draft": Eagle3(tiny_model("eagle3"))},
        {"max_len": 513},
        {"draft": Ngram(corpus=[tmp_path / "none"])},  # found out when the target is there
    ]
    for options in failing:
        with pytest.raises((ValueError, OSError)):
            engine_of(module, **options)
        torch.testing.assert_close(module(tokens).logits, logits)
    want = texts(engine_of(deepcopy(module)))
    assert texts(engine_of(module)) == want


def test_a_module_serves_hf_generate_after_engines_of_its_own(module: Any) -> None:
    engine = engine_of(module)
    tokens = torch.randint(VOCAB, (1, 9), device=module.device)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = module.generate(tokens, **options)
    assert torch.equal(module.generate(tokens, **options, custom_generate=hf.generate), want)
    (output,) = engine.generate([tokens[0].tolist()], SamplingParams(max_new_tokens=8))
    assert output.tokens == want[0, 9:].tolist()
    hf.release(module)
    (again,) = engine.generate([tokens[0].tolist()], SamplingParams(max_new_tokens=8))
    assert again.tokens == output.tokens


# --- families from outside


class LoudConfig(LlamaConfig):
    model_type = "loud"


class LoudMLP(LlamaMLP):
    pass


class LoudForCausalLM(LlamaForCausalLM):
    """A Llama with classes of its own, another factor of the scores, and windows of two lengths."""

    config_class = LoudConfig

    def __init__(self, config: LoudConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = LoudMLP(config)
        self.post_init()


SCALE, SOFT_CAP, WINDOWS = 0.2, 3.0, (5, None, 9, None)


class Loud(Llama):
    model_type = "loud"
    packages = (__name__,)

    def window(self, index: int) -> int | None:
        return WINDOWS[index]

    def attention(self, index: int, module: Any, heads: Any) -> Any:
        part = super().attention(index, module, heads)
        part.scale, part.soft_cap = SCALE, SOFT_CAP
        return part


def loud_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute causal attention over capped scores in a window, as the module's layers do."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = SOFT_CAP * torch.tanh(query @ key.transpose(-1, -2) * SCALE / SOFT_CAP)
    columns = torch.arange(key.shape[-2], device=key.device)
    own = columns[-query.shape[-2] :, None]
    window = WINDOWS[module.layer_idx] or len(columns)
    hidden = (columns > own) | (columns <= own - window)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a random model of a family that this package does not know; forget what the test registers."""
    monkeypatch.setattr(base, "_FAMILIES", dict(base._FAMILIES))
    AttentionInterface.register("loud", loud_attention)
    AttentionMaskInterface.register("loud", lambda *args, **kwargs: None)
    config = LoudConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        attn_implementation="loud",
    )  # fmt: skip
    return LoudForCausalLM(config).eval()


@pytest.mark.parametrize("algorithm", ["none", "ngram", "standalone"])
def test_a_family_from_outside(loud: Any, algorithm: str, device: torch.device) -> None:
    """Scale, soft cap and a window of each layer are the parts' own."""
    with pytest.raises(ValueError, match="model: model_type is 'loud', expected one of"):
        engine_of(loud, implementation="native")
    register(Loud)
    assert isinstance(family_of(loud.config), Loud)
    prompts = random_prompts(4)
    want = [greedy_alone(loud, prompt, 16) for prompt in prompts]
    drafts = {"ngram": Ngram(num_nodes=9), "standalone": Standalone(deepcopy(loud), num_steps=3, topk=3, num_nodes=9)}
    engine = engine_of(deepcopy(loud).to(device), draft=drafts.get(algorithm))
    assert [(g.layout.window, g.layers) for g in engine.target.pools.groups] == [(5, (0,)), (None, (1, 3)), (9, (2,))]
    comparison = Comparison(loud)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=16))
    for prompt, output, text in zip(prompts, outputs, want, strict=True):
        comparison.check(prompt, output.tokens, text)
    assert len(comparison.near_ties) <= 1
    if algorithm == "standalone":  # it is the model itself, over the same windows
        assert sum(o.stats.accepted for o in outputs) > 0.7 * sum(o.stats.rounds for o in outputs) * 3


@torch.no_grad()
def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
