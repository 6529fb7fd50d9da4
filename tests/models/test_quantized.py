"""Weights of 8 and 4 bits: products against float64, and tiny models in every published layout that is read.

Each layout is written here once more, the other way round: numbers chosen for a dense weight, packed as the format has
it. The twin of a model is what its numbers stand for, in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec_kernels.engine import Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.layers.fp8 import QuantizedActivations, column_major, matches_definition, scaled_by_rows
from specdec_kernels.models.layers.head_layout import HeadLayout, PermutedProjection
from specdec_kernels.models.layers.linear import fused, linear_of
from specdec_kernels.models.layers.moe import MoE, routing_of
from specdec_kernels.models.layers.norm import RMSNormQuant
from specdec_kernels.models.layers.quantized import (
    ConcatenatedWeights,
    Fp8Weight,
    Int4Weight,
    QuantizedLinear,
    QuantizedWeight,
)
from specdec_kernels.models.layers.rope import Rope
from specdec_kernels.models.weights.model_config import FP8_EXPERTS
from specdec_kernels.models.weights.quantized_loading import of_any_expert
from support.exhaustive import thinned
from support.hybrid_cases import DELTA, MAMBA
from support.hybrid_cases import EXPERTS as HYBRID_EXPERTS
from support.latent_cases import LATENT
from support.latent_cases import SIZES as LATENT_SIZES
from support.quantized_checkpoints import (
    BLOCKS,
    EXPERTS,
    FORMATS,
    FP8,
    Tensors,
    fp8_rows,
    write_model,
)
from support.random_checkpoints import random_prompts
from support.tiny_checkpoint import Comparison, greedy_by_transformers
from support.tiny_random_models import NATIVE, published, tiny_model

WEIGHTS_ALONE = ["fp8 weights alone", "gptq", "gptq shuffled", "awq", "packed"]
ROUNDED = [name for name in FORMATS if name not in WEIGHTS_ALONE]


def engine_of(model: Any, draft: Any = None, **options: Any) -> Engine:
    defaults = {"max_len": 256, "num_slots": 4, "page_size": 3, "dtype": torch.float32, "adaptive": False}
    return Engine(model, draft=draft, **(defaults | options))


# --- models


HYBRID: dict[str, Any] = DELTA | HYBRID_EXPERTS | {
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0,
}  # fmt: skip
MOVED = {
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *((name, "llama") for name in WEIGHTS_ALONE),
        *(("awq", "qwen3_moe"), ("gptq", "mixtral"), ("packed", "glm4_moe")),
        *(("awq", "qwen3_next"), ("gptq", "bamba"), ("fp8 weights alone", "lfm2")),
        *(("awq", "glm"), ("fp8 weights alone", "cohere")),  # whose heads' numbers are moved
        ("fp8 weights alone", "deepseek_v3"),
    ],
)
def test_greedy_text_is_that_of_the_dequantized_model(
    name: str, model_type: str, tmp_path: Path, device: torch.device
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "qwen3_moe": EXPERTS, "cohere": {"hidden_size": 256}, "glm": MOVED, "qwen3_next": HYBRID,
        "bamba": {"attn_layer_indices": [1], "head_dim": 64, "hidden_size": 256} | MAMBA | {"mamba_n_heads": 32},
        "lfm2": {"layer_types": ["conv", "full_attention"], "hidden_size": 256},
        "deepseek_v3": LATENT_SIZES | LATENT["deepseek_v3"][1],
    }  # fmt: skip
    folder, twin = write_model(tmp_path, name, model_type, **changes.get(model_type, {}))
    reference = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    prompts = random_prompts(4)
    outputs = engine_of(folder, Ngram(num_nodes=9), device=device).generate(prompts, SamplingParams(20))
    comparison = Comparison(reference)
    for prompt, output, want in zip(prompts, outputs, greedy_by_transformers(reference, prompts, 20), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("awq", "qwen2_5_vl"), ("gptq", "llava"), ("packed", "mistral3"), ("fp8 weights alone", "gemma3")],
)
def test_language_models_beside_other_senses(name: str, model_type: str, tmp_path: Path, device: torch.device) -> None:
    """Quantized tensors have the names that published checkpoints have, which are not the model's own."""
    module = tiny_model(model_type, **NATIVE)
    module.save_pretrained(tmp_path)
    config, write = FORMATS[name]
    tensors, state = {}, module.state_dict()
    for key, tensor in state.items():
        known = published(key, model_type)
        tensors[known] = tensor.clone()
        if re.search(r"language_model\..*_proj\.weight$", key):
            written = write(tensors.pop(known))
            tensors |= {known.removesuffix("weight") + part: t.contiguous() for part, t in written.tensors.items()}
            state[key] = written.means
    module.load_state_dict(state)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = [torch.randint(20, 150, (length,)).tolist() for length in (5, 19)]  # above Mistral 3's image token
    with engine_of(tmp_path, Ngram(num_nodes=9), device=device) as engine:
        assert engine.config.implementation == "native"
        assert isinstance(engine.target.model.get_decoder().layers[0].self_attn.q_proj, QuantizedLinear)
        outputs = engine.generate(prompts, SamplingParams(12, ignore_eos=True))
    comparison = Comparison(module)
    for prompt, output in zip(prompts, outputs, strict=True):
        (want,) = greedy_by_transformers(module, [prompt], 12, eos_token_id=None)
        comparison.check(prompt, output.tokens, want)


def by_definition(x: Tensor, means: Tensor, kind: str) -> Tensor:
    """In float64, of rounded activations."""
    wide = x.double()
    if kind == "group":
        largest = nn.functional.pad(wide, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).abs().amax(-1)
        scales = (largest / 448).repeat_interleave(128, 1)[:, : x.shape[1]]
    elif kind == "token":
        scales = wide.abs().amax(1, keepdim=True) / 448
    else:
        scales = torch.full((1, 1), 0.01, dtype=torch.float64)
    rounded = (wide / scales).clamp(-448, 448).float().to(FP8).double() * scales
    return rounded @ means.double().t()


@pytest.mark.parametrize("name", ROUNDED)
def test_products_with_rounded_activations(name: str, tmp_path: Path, device: torch.device) -> None:
    """Within what activations cost that lie at the border of two numbers of 8 bits, in float32 as in float64."""
    folder, twin = write_model(tmp_path, name)
    model = engine_of(folder, device=device).target.model
    kind = {"fp8 rows": "token", "fp8 static": "static"}.get(name, "group")
    for path, module in AutoModelForCausalLM.from_pretrained(twin).named_modules():
        if path.endswith("_proj"):
            x = torch.randn(7, module.in_features)
            got = linear_of(model.get_submodule(path))(x.to(device)).double().cpu()
            want = by_definition(x, module.weight.detach(), kind)
            assert (got - want).norm() <= 2e-3 * want.norm()
            assert (want - x.double() @ module.weight.detach().double().t()).norm() > 5e-3 * want.norm()


@pytest.mark.parametrize("model_type", [kind for kind in FP8_EXPERTS if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_families_round_what_enters_their_experts(model_type: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 64, "layer_types": None}
    if model_type in ("qwen3_next", "qwen3_5_moe_text"):
        sizes |= HYBRID
    if model_type in LATENT:
        sizes = LATENT_SIZES | LATENT[model_type][1]
    folder, _ = write_model(tmp_path, "fp8 rows", model_type, **sizes)
    parts = [layer.feed_forward for layer in engine_of(folder, device="cpu").target.decoder.layers]
    assert {part.experts.activations for part in parts if isinstance(part, MoE)} == {"token"}


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 rows"])
def test_experts_with_rounded_activations(name: str, tmp_path: Path, device: torch.device) -> None:
    """Their weights stay in FP8, and the inputs of each of their GEMMs are quantized."""
    folder, twin = write_model(tmp_path, name, "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], **EXPERTS)
    model = engine_of(folder, device=device).target
    module = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).model.layers[0].mlp.experts
    experts = model.decoder.layers[0].feed_forward.experts  # type: ignore[attr-defined]
    assert experts.gate_up.dtype == experts.down.dtype == FP8
    assert not [name for name, parameter in model.model.named_parameters() if "experts" in name and parameter.ndim > 2]
    for number in range(4):
        gate_up, down = (weight.mT.cpu() for weight in experts.weights_of(number, torch.float32))
        torch.testing.assert_close(gate_up, module.gate_up_proj[number].detach(), rtol=0, atol=0)
        torch.testing.assert_close(down, module.down_proj[number].detach(), rtol=0, atol=0)
    x, kind = torch.randn(7, 192), {"fp8 rows": "token"}.get(name, "group")
    chosen = torch.rand(7, 4).topk(2).indices
    want = torch.zeros(7, 192, dtype=torch.float64)
    for row, of_row in enumerate(chosen.tolist()):
        for expert in of_row:
            gate, up = by_definition(x[row : row + 1], module.gate_up_proj[expert], kind).chunk(2, 1)
            want[row] += 0.5 * by_definition(nn.functional.silu(gate) * up, module.down_proj[expert], kind)[0]
    got = experts(x.to(device), routing_of(chosen.to(device), torch.full((7, 2), 0.5, device=device), 4))
    assert (got.double().cpu() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.parametrize("name", [name for name in ROUNDED if name != "fp8 static"])
def test_norms_round_for_the_product_behind_them(name: str, tmp_path: Path, device: torch.device) -> None:
    """Two of a layer's four GEMMs get FP8 inputs that equal what they would quantize themselves."""
    folder, _ = write_model(tmp_path, name)
    target = engine_of(folder, device=device).target
    layers = target.decoder.layers  # type: ignore[attr-defined]
    for layer in layers:
        for norm, reader in (
            (layer.input_norm, layer.mixer.qkv),
            (layer.pre_feed_forward_norm, layer.feed_forward.gate_up),
        ):
            assert isinstance(norm, RMSNormQuant)
            x, residual = (torch.randn(5, 192, device=device) for _ in range(2))
            rows, total = norm.add_norm(x, residual.clone())
            normed, want = norm.norm.add_norm(x, residual.clone())
            assert isinstance(rows, QuantizedActivations) and torch.equal(total, want)
            assert torch.equal(reader(rows), reader(normed))
            assert torch.equal(norm(x), norm.norm(x))


@pytest.mark.parametrize("name", thinned(ROUNDED, ("fp8 blocks", "fp8 static").__contains__))
def test_text_does_not_depend_on_drafts(name: str, tmp_path: Path, device: torch.device) -> None:
    """Rows are quantized one by one, so those of trees, prompts and single tokens have the same scales.

    The draft is the model itself, in another engine.
    """
    folder, _ = write_model(tmp_path, name, "qwen2", hidden_size=256, num_key_value_heads=1)
    prompts = random_prompts(4)
    plain, *drafted = (
        [output.tokens for output in engine.generate(prompts, SamplingParams(24))]
        for draft in (None, Ngram(num_nodes=9), Standalone(folder, num_steps=3, topk=2, num_nodes=7))
        for engine in [engine_of(folder, draft, device=device)]
    )
    equal = sum(tokens == want for texts in drafted for tokens, want in zip(texts, plain, strict=True))
    assert equal >= 6  # of 8: sums of other orders may round an activation to the next number of 8 bits


def test_the_module_computes_what_the_engine_does(tmp_path: Path, device: torch.device) -> None:
    """Its projections stand in transformers' own forward pass, too."""
    folder, twin = write_model(tmp_path, "awq")
    model = engine_of(folder, device=device).target.model
    tokens = torch.randint(199, (1, 9))
    want = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(model(tokens.to(device)).logits.cpu(), want, rtol=1e-3, atol=1e-3)
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer")


# --- products of one input


def quantized_linear(weight: QuantizedWeight, bias: bool) -> QuantizedLinear:
    outs, ins = weight.shape
    linear = QuantizedLinear(nn.Linear(ins, outs, bias=bias))
    linear.store(weight)
    return linear


def test_rows_of_heads_are_moved_without_a_copy_of_the_weight(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A rotation of adjacent pairs, in 16 of a head's 64 elements, permutes the rows of quantized heads at load time.

    The kernel rotates pairs that are 32 apart. No call copies the weight, which a CUDA graph would refuse.
    """
    linears = [
        quantized_linear(int4_weight(outs), bias).to(device) for outs, bias in ((128, True), (64, True), (64, True))
    ]
    for linear in linears:
        linear.bias.data.normal_()
    angles = torch.randn(5, 8, device=device)
    heads = HeadLayout(64, Rope(angles.cos(), angles.sin(), interleaved=True))
    moved = heads.qkv(1, *linears)
    assert isinstance(moved, PermutedProjection)
    x = torch.randn(3, 256, device=device)
    rows = fused(*linears)(x).unflatten(-1, (4, 64))
    order = [*range(0, 16, 2), *range(16, 40), *range(1, 16, 2), *range(40, 64)]
    want = torch.cat([rows[:, :3, order], rows[:, 3:]], 1).flatten(1)

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("a tensor of numbers from the host")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert torch.equal(moved(x), want)


def fp8_weight(outs: int, activations: str = "token", input_scale: float | None = None) -> Fp8Weight:
    columns = 2 if activations == "group" else 1
    given = None if input_scale is None else torch.tensor([input_scale])
    return Fp8Weight(torch.randn(outs, 256).to(FP8), torch.rand(outs, columns) + 0.5, activations, input_scale=given)


def int4_weight(outs: int, columns: Tensor | None = None) -> Int4Weight:
    numbers, zeros = (torch.randint(16, (outs, n), dtype=torch.uint8) for n in (256, 2))
    return Int4Weight.pack(numbers, zeros, torch.rand(outs, 2), columns)


@pytest.mark.parametrize(
    "parts",
    [
        [fp8_weight(6), fp8_weight(2), fp8_weight(4)],
        [fp8_weight(6, "group"), fp8_weight(4, "group")],
        [fp8_weight(6, "static", 0.1), fp8_weight(2, "static", 0.1)],
        [int4_weight(6), int4_weight(2)],
    ],
)
def test_merged_weights_keep_their_scales(parts: list[QuantizedWeight]) -> None:
    linears = [quantized_linear(part, bias=True) for part in parts]
    x = torch.randn(5, 256)
    want = torch.cat([linear(x) for linear in linears], 1)
    whole = fused(*linears)
    assert isinstance(whole.weight, type(parts[0]))
    torch.testing.assert_close(whole(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([linear(x) for linear in linears], 1), want)
    assert linears[1].weight.qweight.data_ptr() == whole.weight.qweight[parts[0].shape[0] :].data_ptr()  # type: ignore[attr-defined]
    gate, up = want.chunk(2, 1)
    torch.testing.assert_close(whole.swiglu(x), nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "parts",
    [
        [fp8_weight(6, "static", 0.1), fp8_weight(2, "static", 0.2)],
        [fp8_weight(6), int4_weight(2)],
        [int4_weight(6), int4_weight(2, torch.arange(256) % 2)],
        [fp8_weight(6), None],
    ],
)
def test_weights_that_are_no_single_one_stand_side_by_side(parts: list[QuantizedWeight | None]) -> None:
    linears: list[Any] = [nn.Linear(256, 4) if part is None else quantized_linear(part, bias=True) for part in parts]
    x = torch.randn(5, 256)
    whole = fused(*linears)
    assert isinstance(whole.weight, ConcatenatedWeights)
    torch.testing.assert_close(whole(x), torch.cat([linear(x) for linear in linears], 1))
    means = whole.weight.dequantize()
    assert list(means.shape) == list(whole.weight.shape) == [sum(linear.out_features for linear in linears), 256]


def test_rows_of_zeros_and_large_numbers() -> None:
    weight = fp8_weight(6)
    x = torch.stack([torch.zeros(256), torch.full((256,), 1e30), torch.full((256,), 1e-30)])
    got = weight.linear(x)
    assert got.isfinite().all() and (got[0] == 0).all() and (got[1] != 0).all()


@pytest.mark.parametrize("ins", [96, 256, 768])
@pytest.mark.parametrize("shuffled", [False, True])
def test_numbers_of_4_bits_are_what_they_were(ins: int, shuffled: bool, device: torch.device) -> None:
    """Columns in any order give the same result, by either kernel."""
    groups = max(ins // 128, 1)
    numbers, zeros = (torch.randint(16, (32, n), dtype=torch.uint8) for n in (ins, groups))
    scales = torch.rand(32, groups).half()
    columns = (torch.randperm(ins) % groups if shuffled else torch.arange(ins) * groups // ins).int()
    weight = Int4Weight.pack(numbers, zeros, scales, columns if shuffled else None)
    of_columns = columns.long()
    want = (numbers.float() - zeros.float()[:, of_columns]) * scales.float()[:, of_columns]
    assert torch.equal(weight.dequantize(), want)
    assert torch.equal(weight.slice_rows(16, 32).dequantize(), want[16:])
    linear = quantized_linear(weight, bias=False).to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, ins, device=device).to(dtype)
        error = linear.weight.linear(x).double().cpu() - x.double().cpu() @ want.double().t()
        assert error.norm() <= 1e-2 * (x.double().cpu() @ want.double().t()).norm()


# --- kernels


def by_hand(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Of rows and weights that have one scale each."""
    return ((numbers.double() * scales.t()) @ (weight.double() * weight_scales).t()).to(torch.bfloat16)


def without_scales(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return (numbers.double() @ weight.double().t()).to(torch.bfloat16)


def that_fails(*_tensors: Tensor) -> Tensor:
    raise RuntimeError("not on this GPU")


def test_a_kernel_is_taken_where_it_gives_the_definition() -> None:
    cpu = torch.device("cpu")
    assert matches_definition(by_hand, cpu)
    if torch.__version__ >= (2, 13):  # type: ignore[operator]
        assert matches_definition(scaled_by_rows, cpu)  # which has that one for CPUs, too
    assert not matches_definition(without_scales, cpu)
    assert not matches_definition(that_fails, cpu)


@pytest.mark.parametrize("activations", ["token", "group"])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_products_in_bfloat16(rows: int, activations: str, device: torch.device) -> None:
    """By kernels where there are some."""
    weight = Fp8Weight(
        (torch.randn(272, 640, device=device) * 20).to(FP8),
        column_major(torch.rand(272, 5 if activations == "group" else 1, device=device) + 0.5),
        activations,
    )
    x = torch.randn(rows, 640, device=device).bfloat16()
    got = weight.linear(x)
    want = by_definition(x.float().cpu(), weight.dequantize().cpu(), activations)
    assert got.dtype == torch.bfloat16
    assert (got.double().cpu() - want).norm() <= 1e-2 * want.norm()


# --- what is refused


def refusal(model: Any) -> str:
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=64, device="cpu")
    return str(error.value)


ROWS = FORMATS["fp8 rows"][0]


def changed(config: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {part: group[part] | values}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BLOCKS | {"weight_block_size": [64, 64]}, "fp8 (e4m3), weight_block_size is [64, 64], expected [128, 128]"),
        (
            BLOCKS | {"activation_scheme": "static"},
            "fp8 (e4m3), activation_scheme is 'static', expected 'dynamic' or None",
        ),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "fp8 (e4m3), scale_fmt is 'ue8m0', expected 'float' or None"),
        (
            ROWS | {"config_groups": {}},
            "compressed-tensors (float-quantized), config_groups has 0 groups, expected one",
        ),
        (
            changed(ROWS, "input_activations", strategy="tensor"),
            "compressed-tensors (float-quantized), input_activations: strategy is 'tensor' and dynamic is True, expected "
            "'tensor' and False, or 'token' or 'group' and True (what depends on other rows would depend on the drafts)",
        ),
        (
            changed(ROWS, "weights", type="int"),
            "compressed-tensors (float-quantized), format is 'float-quantized', expected 'pack-quantized'",
        ),
        (
            ROWS | {"transform_config": {"config_groups": {"R1": {}}}},
            "compressed-tensors (float-quantized), transform_config is given, expected none",
        ),
        ({"quant_method": "gptq", "bits": 8}, "gptq, bits is 8, expected 4"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "awq, zero_point is False, expected True"),
        (
            {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemv"},
            "awq, version is 'gemv', expected 'gemm'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_ways_are_refused_before_weights_are_read(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "fp8 rows")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"model: {folder} is quantized by {message}"


PROJECTION = "model.layers.1.mlp.up_proj"


def without_scale(tensors: Tensors) -> None:
    del tensors[f"{PROJECTION}.weight"]


def of_another_shape(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.weight"] = tensors[f"{PROJECTION}.weight"][:-1].clone()
    tensors[f"{PROJECTION}.weight_scale"] = tensors[f"{PROJECTION}.weight_scale"][:-1].clone()


def in_other_numbers(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.weight"] = tensors[f"{PROJECTION}.weight"].to(torch.float8_e5m2)


def head_too(tensors: Tensors) -> None:
    written = fp8_rows(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{name}": tensor for name, tensor in written.tensors.items()}


def one_more(tensors: Tensors) -> None:
    written = fp8_rows(torch.randn(8, 8))
    tensors |= {f"model.layers.1.mlp.experts.0.up_proj.{name}": tensor for name, tensor in written.tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scale, f"lacks {PROJECTION}.weight, expected every tensor of the model and no other"),
        (of_another_shape, f"has {PROJECTION} of shape [319, 192], expected [320, 192]"),
        (
            in_other_numbers,
            f"has a quantized {PROJECTION} that does not fit (a weight of torch.float8_e5m2, expected "
            "torch.float8_e4m3fn)",
        ),
        (head_too, "has a quantized lm_head, expected one of float32, float16 or bfloat16"),
        (
            one_more,
            "has a quantized model.layers.1.mlp.experts.0.up_proj, expected quantized projections and experts alone",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "fp8 rows")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder) == f"model: {folder} {message}"


def test_groups_of_different_lengths_are_refused(tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "gptq shuffled")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{PROJECTION}.g_idx"][0] = 1 - tensors[f"{PROJECTION}.g_idx"][0].clamp(max=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder) == (
        f"model: {folder} has a quantized {PROJECTION} that does not fit (groups of different lengths, expected equal "
        "ones)"
    )


@pytest.mark.parametrize("zeros", [True, False])
def test_a_bias_that_the_model_has_not(zeros: bool, tmp_path: Path) -> None:
    """Early GPTQ wrote them for all products, of zeros."""
    folder, _ = write_model(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{PROJECTION}.bias"] = torch.zeros(320) if zeros else torch.ones(320)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if zeros:
        assert engine_of(folder, device="cpu").generate([[1, 2]], SamplingParams(3))[0].tokens
    else:
        assert refusal(folder) == (
            f"model: {folder} has {PROJECTION}.bias, unknown to LlamaForCausalLM, expected every tensor of the model "
            "and no other"
        )


@pytest.mark.parametrize("change", ["one is missing", "static"])
def test_experts_that_do_not_fit(change: str, tmp_path: Path) -> None:
    folder, _ = write_model(
        tmp_path, "fp8 rows" if change == "one is missing" else "fp8 static", "qwen3_moe", **EXPERTS
    )
    tensors = load_file(folder / "model.safetensors")
    if change == "one is missing":
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if "layers.0.mlp.experts.2.up_proj.weight_scale" not in name
        }
        message = "has quantized experts in model.layers.0.mlp.experts, but not up of 2, expected all"
    else:
        path = "model.layers.0.mlp.experts.0.down_proj"
        message = f"has a quantized {path} whose activations are rounded (static), expected those of all experts alike"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(folder) == f"model: {folder} {message}"


@pytest.mark.parametrize("tensors", ["all", "weight", "weight_scale"])
def test_an_expert_too_many(tensors: str, tmp_path: Path) -> None:
    """Names of experts are matched by one pattern for each layer, which knows no number."""
    folder, _ = write_model(tmp_path, "fp8 rows", "qwen3_moe", **EXPERTS)
    stored = load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.experts"
    for part in ("gate_proj", "up_proj", "down_proj"):
        for name in ("weight", "weight_scale") if tensors == "all" else (tensors,):
            stored[f"{path}.4.{part}.{name}"] = stored[f"{path}.0.{part}.{name}"].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    shape = f" and has {path}.down_proj of shape [5, 192, 160], expected [4, 192, 160]"
    if transformers.__version__.startswith("5.17."):  # which makes room for it and does not tell
        shape = ""
    message = {
        "all": f"has a quantized {path}.4.down_proj, expected quantized projections and experts alone",
        "weight": f"has {path}.4.down_proj.weight, {path}.4.gate_proj.weight, {path}.4.up_proj.weight, unknown to "
        f"Qwen3MoeForCausalLM{shape}, expected every tensor of the model and no other",
        "weight_scale": f"has a quantized {path}.4.down_proj, expected quantized projections and experts alone",
    }[tensors]
    assert refusal(folder) == f"model: {folder} {message}"


def test_one_pattern_for_the_experts_of_a_layer() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight" for layer in (1, 12) for number in (0, 37)]
    patterns = {of_any_expert(name) for name in names}
    assert patterns == {rf"model\.layers\.{layer}\.mlp\.experts\.\d+\.up_proj\.weight" for layer in (1, 12)}
    assert all(sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1 for name in names)
    assert of_any_expert("model.layers.3.mlp.shared_experts.up_proj.weight_scale") == (
        r"model\.layers\.3\.mlp\.shared_experts\.up_proj\.weight_scale"
    )


@pytest.mark.parametrize(
    ("name", "scale"),
    [("fp8 blocks", "weight_scale_inv"), ("fp8 rows", "weight_scale"), ("fp8 static", "weight_scale")],
)
def test_float8_weight_without_its_scale_is_a_missing_tensor(name: str, scale: str, tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{PROJECTION}.{scale}"]
    tensors.pop(f"{PROJECTION}.input_scale", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = f"model: {folder} lacks {PROJECTION}.{scale}, expected every tensor of the model and no other"
    assert refusal(folder) == message
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert refusal(folder) == message
