"""Formats of quantized checkpoints: fine-grained FP8, compressed-tensors, GPTQ and AWQ.

Tensor names show which linears are quantized, `quantization_config` shows how. An unsupported option is refused by name
before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.fp8 import FP8, GROUP, column_major
from ..layers.quantized import Fp8Weight, Int4Weight, QuantizedWeight

Tensors = Mapping[str, Tensor]  # of one linear, by the last part of their names

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds column i


class Scheme(NamedTuple):
    """The format of a checkpoint's quantized linears.

    Attributes:
        tensors: names of the tensors of each, which follow its path. optional: of those that may exist too.
        marks: the tensor that only a quantized linear has.
        weight: makes the weight of a linear from its tensors.
        kept: the class of these weights.
        activations: how their inputs are quantized, as in `Fp8Weight`.
    """

    tensors: frozenset[str]
    optional: frozenset[str]
    marks: str
    weight: Callable[[Tensors], QuantizedWeight]
    kept: type[QuantizedWeight]
    activations: str = "none"

    def linears(self, names: Iterable[str]) -> set[str]:
        """Return the paths of the quantized linears of a checkpoint with tensors of these names."""
        return {name.removesuffix(f".{self.marks}") for name in names if name.endswith(f".{self.marks}")}

    def tensors_of(self, path: str) -> set[str]:
        """Return the names that the tensors of a linear may have, but for a bias."""
        return {f"{path}.{name}" for name in self.tensors | self.optional}


def fitting_weight(scheme: Scheme, tensors: Tensors, what: str) -> QuantizedWeight:
    """Return the weight that these tensors store.

    Raises:
        ValueError: they do not fit each other; the message begins with `what`.
    """
    try:
        return scheme.weight(tensors)
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{what} that does not fit ({error})") from error


class Unsupported(ValueError):
    """An unsupported option of a format, in words that follow "is quantized by ..."."""


def scheme_of(quantization: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config`.

    Raises:
        Unsupported: there is none.
    """
    readers = {"fp8": fine_grained, "compressed-tensors": compressed, "gptq": gptq, "awq": awq}
    method = str(quantization.get("quant_method"))
    if method not in readers:
        raise Unsupported(f"expected {', '.join(readers)} or weights of float32, float16 or bfloat16")
    return readers[method](quantization)


def expect(values: Mapping[str, Any], where: str = "", **wanted: object) -> None:
    """Raise `Unsupported` unless each key has the wanted value, or one of a tuple of values."""
    for key, choices in wanted.items():
        value, allowed = values.get(key), choices if isinstance(choices, tuple) else (choices,)
        if value not in allowed:
            raise Unsupported(f"{where}{key} is {value!r}, expected {' or '.join(map(repr, allowed))}")


def fine_grained(config: Mapping[str, Any]) -> Scheme:
    """Read FP8 with a scale for each 128 x 128 block, and for each 128 elements of activations.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.
    """
    block = config.get("weight_block_size")
    if block is None or list(block) != [GROUP, GROUP]:
        raise Unsupported(f"weight_block_size is {block}, expected {[GROUP, GROUP]}")
    expect(config, fmt=("e4m3", None), activation_scheme=("dynamic", None), scale_fmt=("float", None))

    def weight(tensors: Tensors) -> QuantizedWeight:
        return of_blocks(tensors["weight"], tensors["weight_scale_inv"], "group")

    return Scheme(
        frozenset({"weight", "weight_scale_inv"}), frozenset(), "weight_scale_inv", weight, Fp8Weight, "group"
    )


def compressed(config: Mapping[str, Any]) -> Scheme:
    """Read compressed-tensors with one group of linears, in FP8 or INT4."""
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise Unsupported(f"config_groups has {len(groups)} groups, expected one")
    for other in ("sparsity_config", "transform_config"):
        if any(value not in (None, "dense", [], {}) for value in (config.get(other) or {}).values()):
            raise Unsupported(f"{other} is given, expected none")
    expect(groups[0], output_activations=None)
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    expect(weights, "weights: ", type=("float", "int"), dynamic=(False, None))
    if weights["type"] == "int":
        return packed(config, weights, inputs)
    expect(config, format=("float-quantized", "naive-quantized"))
    expect(weights, "weights: ", num_bits=8, symmetric=True, strategy=("tensor", "channel", "block"))
    activations = "none"
    if inputs:
        expect(inputs, "input_activations: ", num_bits=8, type="float", symmetric=True)
        static = {("tensor", False): "static", ("token", True): "token", ("group", True): "group"}
        kind = str(inputs.get("strategy")), bool(inputs.get("dynamic"))
        if kind not in static:
            raise Unsupported(
                f"input_activations: strategy is {kind[0]!r} and dynamic is {kind[1]}, expected 'tensor' and False, or "
                "'token' or 'group' and True (what depends on other rows would depend on the drafts)"
            )
        activations = static[kind]
    if activations == "group":
        expect(inputs or {}, "input_activations: ", group_size=GROUP)
    if weights["strategy"] == "block" and list(weights.get("block_structure") or ()) != [GROUP, GROUP]:
        raise Unsupported(f"weights: block_structure is {weights.get('block_structure')}, expected {[GROUP, GROUP]}")

    def weight(tensors: Tensors) -> QuantizedWeight:
        elements, scale = tensors["weight"], tensors["weight_scale"]
        if weights["strategy"] == "block":
            return of_blocks(elements, scale, activations)
        rows = scale.float().reshape(-1, 1).expand(len(elements), 1).contiguous()
        given = tensors["input_scale"].float().reshape(1) if activations == "static" else None
        return Fp8Weight(expect_fp8(elements), rows, activations, input_scale=given)

    needed = {"weight", "weight_scale"} | ({"input_scale"} if activations == "static" else set())
    return Scheme(frozenset(needed), frozenset({"weight_zero_point"}), "weight_scale", weight, Fp8Weight, activations)


def packed(config: Mapping[str, Any], weights: Mapping[str, Any], inputs: object) -> Scheme:
    """Read INT4 of compressed-tensors."""
    expect(config, format="pack-quantized")
    expect(weights, "weights: ", num_bits=4, symmetric=True, strategy=("group", "channel"))
    if weights.get("actorder") == "group":
        raise Unsupported("weights: actorder is 'group', expected 'static' or none")
    if inputs:
        raise Unsupported("input_activations are given, expected none with weights of 4 bits")

    def weight(tensors: Tensors) -> QuantizedWeight:
        elements = nibbles(tensors["weight_packed"])[:, : int(tensors["weight_shape"][1])]
        scales = tensors["weight_scale"].float()
        return Int4Weight.pack(elements, torch.full_like(scales, 8, dtype=torch.uint8), scales)

    needed = frozenset({"weight_packed", "weight_scale", "weight_shape"})
    return Scheme(needed, frozenset(), "weight_packed", weight, Int4Weight)


def gptq(config: Mapping[str, Any]) -> Scheme:
    """Read GPTQ (Frantar et al., arXiv 2210.17323). Its first format stores zero points less one."""
    expect(config, bits=4, checkpoint_format=("gptq", "gptq_v2", None))
    if config.get("dynamic"):
        raise Unsupported("dynamic is given, expected one number of bits for all linears")
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weight(tensors: Tensors) -> QuantizedWeight:
        elements = nibbles(tensors["qweight"].t()).contiguous()
        zeros, scales = nibbles(tensors["qzeros"]) + less, tensors["scales"].float()
        columns = tensors.get("g_idx")
        size = elements.shape[1] // len(scales)
        even = torch.arange(elements.shape[1], device=elements.device) // max(size, 1)
        ordered = columns is None or (elements.shape[1] % len(scales) == 0 and torch.equal(columns.int(), even.int()))
        return Int4Weight.pack(elements, zeros.t(), scales.t(), None if ordered else columns)

    return Scheme(frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"}), "qweight", weight, Int4Weight)


def awq(config: Mapping[str, Any]) -> Scheme:
    """Read AWQ (Lin et al., arXiv 2306.00978)."""
    expect(config, bits=4, zero_point=True)
    if str(config.get("version", config.get("format", "gemm"))).lower() != "gemm":
        raise Unsupported(f"version is {config.get('version', config.get('format'))!r}, expected 'gemm'")

    def weight(tensors: Tensors) -> QuantizedWeight:
        elements, zeros = (in_order(nibbles(tensors[name])) for name in ("qweight", "qzeros"))
        return Int4Weight.pack(elements.t().contiguous(), zeros.t(), tensors["scales"].t())

    return Scheme(frozenset({"qweight", "qzeros", "scales"}), frozenset(), "qweight", weight, Int4Weight)


def of_blocks(elements: Tensor, scales: Tensor, activations: str) -> Fp8Weight:
    """Return the weight of FP8 elements with a scale for each block."""
    outs, ins = elements.shape
    if list(scales.shape) != [-(-outs // GROUP), -(-ins // GROUP)]:
        blocks = f"expected one for each block of {GROUP} x {GROUP}"
        raise ValueError(f"scales of shape {list(scales.shape)} for {outs} by {ins} elements, {blocks}")
    return Fp8Weight(expect_fp8(elements), column_major(scales.float().repeat_interleave(GROUP, 0)[:outs]), activations)


def expect_fp8(elements: Tensor) -> Tensor:
    if elements.dtype != FP8:
        raise ValueError(f"a weight of {elements.dtype}, expected {FP8}")
    return elements


def nibbles(words: Tensor) -> Tensor:
    """Unpack [rows, n] int32 to [rows, 8 * n] uint8, the lowest four bits of each word first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.int()[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def in_order(elements: Tensor) -> Tensor:
    """Reorder the columns of AWQ's words."""
    return elements.view(len(elements), -1, 8)[..., list(AWQ_ORDER)].flatten(1)
