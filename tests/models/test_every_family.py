"""Each family of one file, on a small random checkpoint, against the module that it is made of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, set_seed

from specdec_kernels.engine import Draft, Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.backends.native import CausalLM, check_supported
from specdec_kernels.models.layers.attention import Rows
from support.random_checkpoints import EXPERTS, random_prompts
from support.tiny_checkpoint import Comparison

VOCAB = 200
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LOCAL: dict[str, Any] = {"sliding_window": 7, "layer_types": SLIDING}
ANGLES = {"rope_type": "default", "rope_theta": 1e4}
HALF = {"rope_parameters": ANGLES | {"partial_rotary_factor": 0.5}}
LONG = ANGLES | {
    "rope_type": "longrope", "original_max_position_embeddings": 128, "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [2.0] * 12,
}  # fmt: skip
TWO_KINDS = {"full_attention": ANGLES | {"rope_theta": 1e6}, "sliding_attention": ANGLES}
GEMMA = {"query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}
GRANITE = {
    "hidden_size": 256, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.05,
    "logits_scaling": 2.5,
}  # fmt: skip
STRETCHED = ANGLES | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ONE_MORE = ("gemma", "gemma2", "gemma3_text", "vaultgemma")  # whose norms multiply by 1 + weight

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 32": ("llama", {"head_dim": 32, "attention_bias": True}),
    "llama 80": ("llama", {"head_dim": 80, "hidden_act": "gelu"}),
    "llama 160": ("llama", {"head_dim": 160}),
    "qwen3 96": ("qwen3", {"head_dim": 96}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": (
        "gemma2",
        GEMMA | LOCAL | {"head_dim": 64, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", GEMMA | LOCAL | {"head_dim": 112, "rope_parameters": TWO_KINDS}),
    "phi3": ("phi3", {"hidden_size": 96, "sliding_window": 9}),
    "phi3 longrope": (
        "phi3",
        {"hidden_size": 96, "rope_parameters": LONG, "original_max_position_embeddings": 128},
    ),
    "phi4 mini": ("phi3", {"hidden_size": 256} | HALF),
    "olmo2": ("olmo2", {"hidden_size": 256}),
    "olmo2 32": ("olmo2", {"hidden_size": 128}),
    "olmo3": ("olmo3", LOCAL | {"hidden_size": 256}),
    "granite": ("granite", GRANITE),
    "smollm3": ("smollm3", {"hidden_size": 256, "no_rope_layers": [1, 0, 1, 0]}),
    "glm": ("glm", {"head_dim": 64, "attention_bias": True} | HALF),
    "glm4": ("glm4", {"head_dim": 128, "attention_bias": True} | HALF),
    "cohere": ("cohere", {"hidden_size": 256, "logit_scale": 0.3}),
    "cohere normed": ("cohere", {"hidden_size": 256, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", LOCAL | {"head_dim": 64, "logit_scale": 0.3}),
    "starcoder2": ("starcoder2", {"hidden_size": 128, "sliding_window": 9, "hidden_act": "gelu_pytorch_tanh"}),
    "seed_oss": ("seed_oss", {"head_dim": 64, "attention_bias": True, "attention_out_bias": True}),
    "ministral": ("ministral", LOCAL | {"head_dim": 64}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 64,
            "rope_parameters": ANGLES | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16},
        },
    ),
    "arcee": ("arcee", {"head_dim": 64}),
    "nemotron": ("nemotron", {"head_dim": 64} | HALF),
    "helium": ("helium", {"hidden_size": 256, "head_dim": 64}),
    "ernie4_5": ("ernie4_5", {"head_dim": 64, "use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 64, "attention_bias": True}),
    "hunyuan 80": ("hunyuan_v1_dense", {"head_dim": 80, "rope_parameters": STRETCHED}),
    "exaone4": ("exaone4", LOCAL | {"head_dim": 64}),
    "exaone4 32": ("exaone4", {"hidden_size": 128, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 256, "rope_parameters": ANGLES | {"partial_rotary_factor": 0.25}}),
    "gpt_neox 80": ("gpt_neox", {"hidden_size": 320, "use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "gpt_neox 64": ("gpt_neox", {"hidden_size": 256, "rope_parameters": ANGLES, "attention_bias": False}),
    "gptj": ("gptj", {"rotary_dim": 16}),
    "gptj 96": ("gptj", {"hidden_size": 384, "rotary_dim": 24}),
    "codegen": ("codegen", {"hidden_size": 128, "num_attention_heads": 8, "rotary_dim": 8}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 2]], "window_size": 7}),
    "falcon": ("falcon", {"hidden_size": 256, "ffn_hidden_size": 96}),
    "falcon groups": ("falcon", {"hidden_size": 256, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon one norm": (
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon serial": ("falcon", {"num_kv_heads": 4, "multi_query": False, "parallel_attn": False, "bias": True}),
    "internlm3": ("internlm3", {"hidden_size": 256}),
    "iquestcoder": ("iquestcoder", {"hidden_size": 256}),
    "cwm": ("cwm", LOCAL | {"head_dim": 64, "rope_parameters": ANGLES, "bos_token_id": 1, "eos_token_id": 2}),
    "jais2": ("jais2", {"head_dim": 64, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": ("hyperclovax", GRANITE | {"head_dim": 64, "logits_scaling": 0.4}),
    "hyperclovax normed": ("hyperclovax", GRANITE | {"head_dim": 64, "use_post_norm": True}),
    "vaultgemma": (
        "vaultgemma",
        GEMMA | LOCAL | {"head_dim": 64, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "olmo": ("olmo", {"hidden_size": 256, "clip_qkv": 1.2}),
    "apertus": ("apertus", {"hidden_size": 256, "attention_bias": True}),
    "stablelm": ("stablelm", {"hidden_size": 256, "use_qkv_bias": True} | HALF),
    "stablelm parallel": ("stablelm", {"hidden_size": 128, "use_parallel_residual": True} | HALF),
    "stablelm normed": ("stablelm", {"hidden_size": 320, "qk_layernorm": True} | HALF),
    "phi normed": ("phi", {"hidden_size": 256, "qk_layernorm": True} | HALF),
    "phi": ("phi", {"hidden_size": 256} | HALF),
    "phi 80": ("phi", {"hidden_size": 320, "hidden_act": "gelu_new", "num_key_value_heads": 4} | HALF),
}


def random_module(case: str) -> Any:
    """In which no norm is 1 and no bias 0. Its attention is the one that knows soft caps in every release."""
    # Wide weights magnify what the order of sums brings, in those of experts beyond what is compared.
    model_type, changes = CASES.get(case) or (case, EXPERTS[case] | {"initializer_range": 0.1})
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    options = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    set_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(options | changes)), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name:
            centre = 0.0 if name.endswith("bias") or model_type in ONE_MORE else 1.0
            parameter.data = centre + 0.3 * torch.randn_like(parameter)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.3)
    return model.eval()


@torch.no_grad()
def greedy_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    text = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out: list[int] = model.generate(text, attention_mask=torch.ones_like(text), **options)[0, len(prompt) :].tolist()
    return out


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_transformers(case: str, device: torch.device) -> None:
    module = random_module(case)
    reference = deepcopy(module)
    prompts = [*random_prompts(3), [5, 3, 9] * 8]
    want = [greedy_alone(reference, prompt, 12) for prompt in prompts]
    comparison = Comparison(reference)
    drafts: list[Draft | None] = [
        None, Ngram(num_nodes=9), Standalone(deepcopy(module), num_steps=3, topk=3, num_nodes=9),
    ]  # fmt: skip
    options: dict[str, Any] = {"max_len": 96, "num_slots": 2, "page_size": 16, "dtype": torch.float32}
    for draft in drafts:
        engine = Engine(module.to(device), draft=draft, device=device, adaptive=False, **options)
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
    """Of a prompt, and of two tokens behind it that do not see each other."""
    module = random_module(case)
    layers = (1, 0, 3, 2)
    lm = CausalLM(
        deepcopy(module), max_len=64, num_pages=4, page_size=16, dtype=torch.float32, device=device,
        feature_layers=layers,
    )  # fmt: skip

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    text, ends = torch.randint(VOCAB, (30,)).tolist(), [7, 9]
    table = int32([[2, 0, 3, 1]])
    rows = Rows(int32([0]), table, int32([0]), tail_len=30)
    prompt = lm.forward(int32([text]), int32([list(range(30))]), rows)
    tree = Rows(int32([0]), table, int32([30]), tail_len=2, mask=torch.tensor([[[1], [2]]], device=device))
    leaves = lm.forward(int32([ends]), int32([[30, 30]]), tree)
    for i, end in enumerate(ends):
        out = module(torch.tensor([[*text, end]]), output_hidden_states=True, use_cache=False)
        logits = torch.cat([lm.logits(prompt.hidden)[0], lm.logits(leaves.hidden)[0, i : i + 1]])
        close(logits.cpu(), out.logits[0])
        assert prompt.features is not None and leaves.features is not None
        features = torch.cat([prompt.features[0], leaves.features[0, i : i + 1]])
        states = torch.cat([out.hidden_states[layer][0] for layer in layers], -1)
        close(features.cpu(), states)


@pytest.mark.parametrize(
    ("case", "changes", "max_len", "message"),
    [
        ("llama 80", {"head_dim": 264}, 64, "model: head_dim is 264, expected at most 256"),
        ("falcon", {"alibi": True}, 64, "model: alibi is True, expected False (scores that fall with the distance)"),
        ("gemma3", {"use_bidirectional_attention": True}, 64,
         "model: use_bidirectional_attention is set, expected causal attention"),
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
        check_supported(config, max_len)
    assert str(error.value) == message
