"""Random checkpoints in every quantized format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.random_checkpoints import save_random_model

FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]


class Written(NamedTuple):
    tensors: Tensors  # tensors of one linear, by the last part of their names
    means: Tensor  # [out, in] float32


def eights(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn elements for scales that broadcast over the weight, and the dequantized weight."""
    numbers = (weight / scales).to(FP8)
    return numbers, numbers.float() * scales


def of_each(write: Callable[[Tensor], Written], weights: Tensor) -> Written:
    """Return the tensors of a weight, or those of experts [experts, out, in] that are stored together."""
    if weights.dim() == 2:
        return write(weights)
    written = [write(weight) for weight in weights]
    tensors = {name: torch.stack([each.tensors[name] for each in written]) for name in written[0].tensors}
    return Written(tensors, torch.stack([each.means for each in written]))


def fp8_blocks(name: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        outs, ins = weight.shape
        padded = nn.functional.pad(weight, (0, -ins % 128, 0, -outs % 128))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
        scales = blocks.repeat_interleave(128, 0)[:outs].repeat_interleave(128, 1)[:, :ins]
        numbers, means = eights(weight, scales)
        return Written({"weight": numbers, name: blocks}, means)

    return write


def fp8_rows(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers, means = eights(weight, scales)
    return Written({"weight": numbers, "weight_scale": scales}, means)


def fp8_static(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    numbers, means = eights(weight, scale)
    return Written({"weight": numbers, "weight_scale": scale.view(1), "input_scale": torch.tensor([0.01])}, means)


def fours(weight: Tensor, size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return INT4 elements [out, in], zeros and scales [out, groups], and the dequantized weight."""
    grouped = weight.unflatten(1, (-1, size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((grouped.abs().amax(-1) / 7) if symmetric else (high - low) / 15).half().float()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    numbers = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    means = (numbers - zeros[..., None]) * scales[..., None]
    return numbers.flatten(1).int(), zeros.int(), scales, means.flatten(1)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight 4-bit elements into each word of [rows, n / 8] int32, `order` naming the element of each four bits."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= numbers[:, column::8].long() << 4 * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def gptq(weight: Tensor) -> Written:
    numbers, zeros, scales, means = fours(weight, 32, symmetric=False)
    tensors = {
        "qweight": words(numbers).t(),  # a word holds eight rows of [in, out]
        "qzeros": words(zeros.t() - 1),
        "scales": scales.t().half(),
        "g_idx": (torch.arange(weight.shape[1]) // 32).int(),
    }
    return Written(tensors, means)


def gptq_shuffled(weight: Tensor) -> Written:
    """Return columns in activation order: those of a group lie apart."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    numbers, zeros, scales, means = fours(weight[:, order], 32, symmetric=True)
    back = order.argsort()
    tensors = {
        "qweight": words(numbers[:, back]).t(),
        "qzeros": words(zeros.t()),
        "scales": scales.t().half(),
        "g_idx": (torch.arange(weight.shape[1]) // 32).int()[back],
    }
    return Written(tensors, means[:, back])


def awq(weight: Tensor) -> Written:
    numbers, zeros, scales, means = fours(weight, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(numbers.t(), order), "qzeros": words(zeros.t(), order), "scales": scales.t().half()}
    return Written(tensors, means)


def packed(weight: Tensor) -> Written:
    numbers, _, scales, means = fours(weight, 32, symmetric=True)
    tensors = {"weight_packed": words(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return Written(tensors, means)


def compressed(format: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False} | weights,
        "input_activations": inputs and {"num_bits": 8, "type": "float", "symmetric": True} | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EIGHT = {"num_bits": 8, "type": "float"}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8 blocks": (BLOCKS, fp8_blocks("weight_scale_inv")),
    "fp8 rows": (
        compressed("float-quantized", {"dynamic": True, "strategy": "token"}, strategy="channel", **EIGHT),
        fp8_rows,
    ),
    "fp8 static": (
        compressed("naive-quantized", {"dynamic": False, "strategy": "tensor"}, strategy="tensor", **EIGHT),
        fp8_static,
    ),
    "fp8 weights alone": (compressed("naive-quantized", None, strategy="channel", **EIGHT), fp8_rows),
    "compressed blocks": (
        compressed(
            "float-quantized",
            {"dynamic": True, "strategy": "group", "group_size": 128},
            strategy="block",
            block_structure=[128, 128],
            **EIGHT,
        ),
        fp8_blocks("weight_scale"),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}, gptq),
    "gptq shuffled": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq_shuffled,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "packed": (
        compressed("pack-quantized", None, num_bits=4, type="int", strategy="group", group_size=32),
        packed,
    ),
}


def write_model(folder: Path, name: str, model_type: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """Write a random model with quantized projections; return its twin with dequantized weights."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4}
    twin = save_random_model(folder / "twin", model_type, **(sizes | changes))
    config, write = FORMATS[name]
    quantised, means = {}, {}
    for key, tensor in load_file(twin / "model.safetensors").items():
        means[key] = quantised[key] = tensor
        if re.search(r"(_proj|_with_mqa|\.w[123])\.weight$", key):
            written = write(tensor)
            del quantised[key]
            quantised |= {key.removesuffix("weight") + part: t.contiguous() for part, t in written.tensors.items()}
            means[key] = written.means
    save_file(means, twin / "model.safetensors", metadata={"format": "pt"})
    other = folder / "quantised"
    other.mkdir()
    text = json.loads((twin / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    save_file(quantised, other / "model.safetensors", metadata={"format": "pt"})
    return other, twin


def quantize(folder: Path, name: str, linears: str) -> dict[str, Tensor]:
    """Quantize the linears of a checkpoint whose names match, and return all tensors with dequantized weights."""
    config, write = FORMATS[name]
    file, tensors, means = folder / "model.safetensors", dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(file).items():
        means[key] = tensors[key] = tensor
        if re.fullmatch(linears, key):
            written = of_each(write, tensors.pop(key))
            tensors |= {key.removesuffix("weight") + part: t.contiguous() for part, t in written.tensors.items()}
            means[key] = written.means
    save_file(tensors, file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return means


EXPERTS = {"moe_intermediate_size": 160, "num_experts": 4, "num_experts_per_tok": 2}
