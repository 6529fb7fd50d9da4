"""Step-3.5 in FP8, as StepFun publishes it: the routed experts of a layer in one tensor, all other weights in 16 bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specdec_kernels.engine import MTP, Draft, Engine, Ngram, SamplingParams
from specdec_kernels.models.layers.moe import Fp8Experts, MoE, routing_of
from support.exhaustive import exhaustive
from support.quantized_checkpoints import FP8, quantize
from support.random_checkpoints import random_prompts
from support.recorded_chains import record_chains
from support.step_cases import LIMITS, NUM_LAYERS, write_step
from support.tiny_checkpoint import Comparison, greedy_by_transformers

LAYERS, NUM_EXPERTS = 3, 6
SIZES: dict[str, Any] = {"hidden_size": 192, "moe_intermediate_size": 160}  # a block of scales and a part of one
ROUTED = r"model\.layers\.1\.moe\.(gate|up|down)_proj\.weight"
MTP_TOO = rf"{ROUTED}|model\.layers\.[234]\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.weight"
KEPT = [  # by the names of their parts, and of what is fused from them
    *(f"self_attn.{name}" for name in ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "g_proj")),
    *("moe.gate", *(f"share_expert.{name}" for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj"))),
]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def write_quantized(folder: Path, linears: str, scheme: str = "fp8 blocks") -> dict[str, Tensor]:
    """Write a checkpoint with these linears in FP8; return all tensors with dequantized weights."""
    means = quantize(write_step(folder, LAYERS, **SIZES), scheme, linears)
    values = json.loads((folder / "config.json").read_text())
    kept = [f"model.layers.{layer}.{module}" for layer in range(NUM_LAYERS) for module in KEPT]
    values["quantization_config"] |= {"modules_to_not_convert": [*kept, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(values))
    return means


def engine_of(folder: Path, draft: Draft | None = None, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"adaptive": False, "max_len": 128, "page_size": 4}
    return Engine(folder, draft=draft, dtype=torch.float32, device="cpu", **(defaults | options))


def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [output.tokens for output in engine.generate(prompts, GREEDY)]


def rounded(x: Tensor) -> Tensor:
    """Return rows as FP8 with a scale for each 128 elements has them."""
    groups = nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).float().to(FP8).double() * scales).flatten(1)[:, : x.shape[1]]


def test_routed_experts_stay_in_fp8_and_clamp(tmp_path: Path) -> None:
    means = write_quantized(tmp_path, ROUTED)
    with engine_of(tmp_path) as engine:
        moe: Any = engine.target.decoder.layers[1].feed_forward  # type: ignore[attr-defined]
        assert isinstance(moe, MoE) and isinstance(moe.experts, Fp8Experts)
        assert moe.experts.gate_up.dtype == moe.experts.down.dtype == FP8 and moe.experts.activations == "group"
        gates, ups, downs = (means[f"model.layers.1.moe.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for number in range(NUM_EXPERTS):
            gate_up, down = (weight.mT for weight in moe.experts.weights_of(number, torch.float32))
            torch.testing.assert_close(gate_up, torch.cat([gates[number], ups[number]]), rtol=0, atol=0)
            torch.testing.assert_close(down, downs[number], rtol=0, atol=0)
        x, chosen, limit = 3 * torch.randn(7, 192), torch.rand(7, NUM_EXPERTS).topk(2).indices, LIMITS[1][0]
        want, clamped = torch.zeros(7, 192, dtype=torch.float64), 0
        for row, of_row in enumerate(chosen.tolist()):
            for expert in of_row:
                given = rounded(x[row : row + 1].double())
                gate, up = (given @ weight[expert].double().T for weight in (gates, ups))
                gate = nn.functional.silu(gate)
                clamped += int((gate > limit).sum())
                wide = gate.clamp(max=limit) * up.clamp(-limit, limit)
                want[row] += 0.5 * (rounded(wide) @ downs[expert].double().T)[0]
        assert clamped > 100
        got = moe.experts(x, routing_of(chosen, torch.full((7, 2), 0.5), NUM_EXPERTS))
        assert (got.double() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.parametrize(
    "linears", [pytest.param(ROUTED, id="MTP layers in 16 bits"), pytest.param(MTP_TOO, id="MTP layers in FP8")]
)
def test_text_does_not_depend_on_drafts(linears: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, linears)
    prompts, texts_of = random_prompts(3), list[list[list[int]]]()
    for draft in (None, MTP(num_steps=LAYERS, topk=1), MTP(num_steps=LAYERS, topk=2, num_nodes=9), Ngram(num_nodes=9)):
        with engine_of(tmp_path, draft) as engine:
            texts_of.append(texts(engine, prompts))
    plain, *drafted = texts_of
    equal = sum(text == want for each in drafted for text, want in zip(each, plain, strict=True))
    assert equal >= 7  # of 9: sums of other orders may round an activation to the next FP8 value


@pytest.mark.parametrize("linears", [pytest.param(MTP_TOO, id="all"), *exhaustive(ROUTED)])
def test_text_is_that_of_the_dequantized_model(linears: str, tmp_path: Path) -> None:
    means = write_quantized(tmp_path / "quantized", linears, "fp8 weights alone")
    twin = write_step(tmp_path / "twin", LAYERS, **SIZES)
    save_file(means, twin / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    comparison, prompts = Comparison(reference), random_prompts(3)
    theirs = greedy_by_transformers(reference, prompts, 12, eos_token_id=None)
    drafted = []
    for folder in (tmp_path / "quantized", twin):
        draft = MTP(num_steps=LAYERS, topk=1)
        with engine_of(folder, draft, rounds_in_flight=1) as engine, pytest.MonkeyPatch.context() as patch:
            drafted.append(record_chains(engine, patch))
            for prompt, ours, text in zip(prompts, texts(engine, prompts), theirs, strict=True):
                comparison.check(prompt, ours, text)
    assert len(comparison.near_ties) <= 1
    other = [chain for chain in drafted[0] if chain not in drafted[1]]
    assert len(drafted[0]) > 20 and len(other) <= 1  # a near-tie


@pytest.mark.parametrize("scheme", ["fp8 weights alone", *exhaustive("packed")])
def test_experts_may_have_tensors_of_their_own(scheme: str, tmp_path: Path) -> None:
    """Quantizers that take experts for linears write them so; `step3p5.py` of vLLM 0.33 reads both."""
    means = write_quantized(tmp_path / "quantized", ROUTED, scheme)
    twin = write_step(tmp_path / "twin", LAYERS, **SIZES)
    save_file(means, twin / "model.safetensors", {"format": "pt"})
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    for name in [name for name in tensors if re.match(r"model\.layers\.1\.moe\.\w+_proj\.", name)]:
        layer, part = name.split(".moe.")
        stacked = tensors.pop(name)
        tensors |= {f"{layer}.moe.experts.{number}.{part}": each.clone() for number, each in enumerate(stacked)}
    save_file(tensors, tmp_path / "quantized" / "model.safetensors", {"format": "pt"})
    prompts = random_prompts(2)
    with engine_of(twin) as engine:
        expected = texts(engine, prompts)
    with engine_of(tmp_path / "quantized", MTP(num_steps=LAYERS, topk=1)) as engine:
        kept = isinstance(engine.target.decoder.layers[1].feed_forward.experts, Fp8Experts)  # type: ignore[attr-defined]
        assert kept == (scheme != "packed")  # else dequantized
        assert texts(engine, prompts) == expected


def test_updates_replace_experts_that_are_stored_together(tmp_path: Path) -> None:
    write_quantized(tmp_path / "one", ROUTED)
    write_quantized(tmp_path / "other", ROUTED)
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    for part in ("gate", "up", "down"):
        weight = f"model.layers.1.moe.{part}_proj.weight"
        tensors[weight] = tensors[weight].view(torch.uint8).flip(0).view(FP8)
        tensors[f"{weight}_scale_inv"] = tensors[f"{weight}_scale_inv"].flip(0).contiguous()
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    prompts = random_prompts(2)
    with engine_of(tmp_path / "other") as engine:
        expected = texts(engine, prompts)
    with engine_of(tmp_path / "one") as engine:
        before = texts(engine, prompts)
        engine.update_weights({key: tensor for key, tensor in tensors.items() if ".moe." in key})
        assert texts(engine, prompts) == expected != before


GATES = "model.layers.1.moe.gate_proj"


def without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{GATES}.weight_scale_inv"]


def without_weight(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{GATES}.weight"]


def fewer_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{GATES}.weight_scale_inv"] = tensors[f"{GATES}.weight_scale_inv"][:-1].clone()


def of_no_module(tensors: dict[str, Tensor]) -> None:
    for name in ("weight", "weight_scale_inv"):
        tensors[f"model.layers.0.moe.other_proj.{name}"] = tensors[f"{GATES}.{name}"].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scales, "has quantized experts in model.layers.1.mlp.experts, but not gate of 0, expected all"),
        (without_weight, f"lacks {GATES}.weight, expected every tensor of the model and no other"),
        (fewer_scales, f"has {GATES}.weight_scale_inv of 5 experts, expected 6"),
        (
            of_no_module,
            "has a quantized model.layers.0.moe.other_proj, expected quantized projections and experts alone",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_experts_that_do_not_fit_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, ROUTED)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as error:
        engine_of(tmp_path)
    assert str(error.value) == f"model: {tmp_path} {message}"
