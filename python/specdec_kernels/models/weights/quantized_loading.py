"""Quantized linears and experts of a checkpoint: their loading around transformers' own.

Transformers reads all other tensors. It is asked to leave quantized linears empty and not to report their tensors;
`load_quantized` then fills them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..layers.moe import QuantizedExperts
from ..layers.quantized import Fp8Weight, QuantizedLinear, QuantizedWeight
from .checkpoint import does_not_fit, load_tensors
from .formats import Scheme, fitting_weight
from .model_config import keeps_experts, text_config

PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
STORED_BY = "specdec_scheme"  # attribute of a model: how its quantized weights are stored
METHOD = "specdec_kernels"  # our name among transformers' quantization methods


def own_names(tensors: Iterable[str], model: Any) -> dict[str, str]:
    """Return the model's names of a checkpoint's tensors, by the checkpoint's. Experts have one name each in both."""
    renamings, _ = conversions(model)
    return {tensor: rename_source_key(tensor, renamings, [])[0] for tensor in tensors}


def merged_names(tensors: Iterable[str], model: Any) -> dict[str, str]:
    """Return the names of the model's parameters that a checkpoint's tensors are parts of, by the checkpoint's."""
    renamings, converters = conversions(model)
    return {tensor: rename_source_key(tensor, renamings, converters)[0] for tensor in tensors}


def conversions(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return what transformers does with a checkpoint's tensors of this model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return renamings, [each for each in mapping if isinstance(each, WeightConverter)]


def known_as(tensors: set[str], model: Any) -> set[str]:
    """Return all names under which transformers may report these tensors.

    They are the checkpoint's and the model's own; an expert's scale may also have that of all experts' parameter.
    """
    renamings, converters = conversions(model)
    return tensors | {rename_source_key(each, renamings, way)[0] for each in tensors for way in ([], converters)}


def of_any_expert(name: str) -> str:
    """Return a pattern of the names that this tensor has in all experts of its layer."""
    return re.sub(r"(?<=\bexperts\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))


class QuantizedLinearsConfig(QuantizationConfigMixin):
    """Ask transformers to leave these quantized linears empty and to ignore their tensors.

    Args:
        linears: their paths. tensors: all their tensors. Both are named as in the checkpoint.
    """

    def __init__(self, linears: set[str], tensors: set[str]) -> None:
        self.quant_method: Any = METHOD
        self.linears, self.tensors = linears, tensors

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


def replace_linears(model: Any, linears: Iterable[str]) -> None:
    """Put a `QuantizedLinear` at each quantized linear, which the checkpoint names so."""
    for path in own_names(linears, model).values():
        parent, _, leaf = path.rpartition(".")
        try:
            linear = model.get_submodule(path)
        except AttributeError:
            continue  # `load_quantized` refuses it
        if type(linear) is nn.Linear:
            setattr(model.get_submodule(parent), leaf, QuantizedLinear(linear))


class QuantizedLinearsQuantizer(HfQuantizer):
    """Put a `QuantizedLinear` at each quantized linear before transformers reads weights."""

    def _process_model_before_weight_loading(self, model: Any, **_options: Any) -> None:
        config: Any = self.quantization_config
        replace_linears(model, config.linears)
        # Transformers tries every pattern on every unknown name, so there is one pattern for all experts of a layer.
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *(f"^{of_any_expert(name)}$" for name in known_as(config.tensors, model)),
        }

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(METHOD)(QuantizedLinearsQuantizer)


def load_quantized(
    model: Any, folder: Path, scheme: Scheme, linears: set[str], tensors: set[str], what: str
) -> set[str]:
    """Fill a model's quantized linears and experts; experts that do not stay quantized are dequantized.

    Returns:
        Names of the parameters that were written or replaced, and of tensors that have no effect.

    Raises:
        ValueError: a quantized module that is neither a linear nor an expert, or is the output head; tensors that are
            missing or do not fit.
    """
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
        model.config._is_quantized = False
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    all_biases = {f"{path}.bias" for path in linears}
    loaded = load_tensors(folder, (tensors | all_biases).__contains__)
    linears, loaded = unstack_experts(model, scheme, linears, loaded, what)
    modules = dict(model.named_modules())
    written: dict[str, set[tuple[int, str]]] = {}
    kept: dict[str, QuantizedExperts] = {}  # by the paths of the modules that they replace
    filled: set[str] = set()
    # Early GPTQ wrote a bias of zeros for linears that have none.
    biases = {name for name in all_biases & loaded.keys() if not loaded[name].any()}
    own = own_names({*linears, *biases}, model)
    for path in sorted(linears):
        of_path = {name: loaded.get(f"{path}.{name}") for name in scheme.tensors | scheme.optional}
        given = {name: tensor for name, tensor in of_path.items() if tensor is not None}
        linear, expert = modules.get(own[path]), expert_of(own[path], modules)
        if not isinstance(linear, QuantizedLinear) and expert is None:
            raise ValueError(f"{what} has a quantized {path}, expected quantized projections and experts alone")
        if own[path] == head:
            raise ValueError(f"{what} has a quantized {path}, expected one of float32, float16 or bfloat16")
        if missing := sorted(scheme.tensors - given.keys()):
            raise does_not_fit(what, f"lacks {path}.{missing[0]}")
        weight = fitting_weight(scheme, given, f"{what} has a quantized {path}")
        if isinstance(linear, QuantizedLinear):
            expected = [linear.out_features, linear.in_features]
        else:
            assert expert is not None
            expected = list(expert.rows.shape)
        if list(weight.shape) != expected:
            raise ValueError(f"{what} has {path} of shape {list(weight.shape)}, expected {expected}")
        if isinstance(linear, QuantizedLinear):
            linear.store(weight)
            if linear.bias is None and f"{path}.bias" in biases:
                filled |= {f"{path}.bias", own[f"{path}.bias"]}
        else:
            assert expert is not None
            in_eight_bits = keeps_experts(scheme, text_config(model.config).model_type)
            put(expert, weight, kept if in_eight_bits else None, f"{what} has a quantized {path}")
            written.setdefault(expert.path, set()).add((expert.number, expert.part))
    filled |= whole_experts(written, modules, what)
    for path, experts in kept.items():
        model.set_submodule(path, experts)
    return filled


def unstack_experts(
    model: Any, scheme: Scheme, linears: set[str], tensors: Mapping[str, Tensor], what: str
) -> tuple[set[str], dict[str, Tensor]]:
    """Return linears and tensors with each expert's own, where a checkpoint has those of a layer [experts, ...] in one.

    An expert's tensors are views, with the model's names.

    Raises:
        ValueError: other modules than experts have such tensors; a number of experts that is not the model's.
    """
    stacked = dict[str, dict[str, Tensor]]()
    for path in linears:
        of_path = {name: tensors.get(f"{path}.{name}") for name in scheme.tensors | scheme.optional}
        given = {name: tensor for name, tensor in of_path.items() if tensor is not None}
        if any(tensor.dim() > 2 for tensor in given.values()):
            stacked[path] = given
    alone, rest, modules = linears - stacked.keys(), dict(tensors), dict(model.named_modules())
    merged = merged_names((f"{path}.weight" for path in stacked), model)
    for path, given in stacked.items():
        if missing := sorted(scheme.tensors - given.keys()):
            raise does_not_fit(what, f"lacks {path}.{missing[0]}")
        experts, part = merged[f"{path}.weight"].rpartition(".")[0], path.rpartition(".")[2]
        if experts not in modules or not experts.endswith(".experts") or part not in PARTS:
            raise ValueError(f"{what} has a quantized {path}, expected quantized projections and experts alone")
        count = experts_in(modules[experts])
        for name, tensor in given.items():
            if len(tensor) != count:
                raise ValueError(f"{what} has {path}.{name} of {len(tensor)} experts, expected {count}")
            del rest[f"{path}.{name}"]
            rest |= {f"{experts}.{number}.{part}.{name}": own for number, own in enumerate(tensor)}
        alone |= {f"{experts}.{number}.{part}" for number in range(count)}
    return alone, rest


class Expert(NamedTuple):
    """A linear of one expert. Its weight is a part of the parameter that transformers keeps for all experts."""

    path: str  # of the module of all experts
    module: Any
    number: int
    part: str  # "gate", "up" or "down"
    weight: nn.Parameter  # [experts, ...], of all experts
    rows: Tensor  # [out, in], a view of it


def expert_of(path: str, modules: dict[str, Any]) -> Expert | None:
    """Return the expert's linear at this path; None: it is none, or its module keeps no [experts, out, in]."""
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)
    if match is None or match[1] not in modules or match[3] not in PARTS:
        return None
    module, part = modules[match[1]], PARTS[match[3]]
    if not hasattr(module, "gate_up_proj"):
        return None
    number, inner = int(match[2]), module.down_proj.shape[2]
    if number >= experts_in(module) or module.gate_up_proj.shape[1] != 2 * inner:
        return None
    weight = module.down_proj if part == "down" else module.gate_up_proj
    whole = weight.data[number]
    rows = {"gate": whole[:inner], "up": whole[inner:], "down": whole}[part]
    return Expert(match[1], module, number, part, weight, rows)


def experts_in(module: Any) -> int:
    """Return the config's number of experts; some versions of transformers allocate as many as a checkpoint has."""
    count = getattr(module, "num_experts", None)
    return len(module.down_proj) if count is None else int(count)


def put(expert: Expert, weight: QuantizedWeight, kept: dict[str, QuantizedExperts] | None, what: str) -> None:
    """Store an expert's FP8 weight among those `kept` of its module; if kept is None, dequantize it.

    Raises:
        ValueError: activations are quantized in a way that experts do not support, or not alike for all experts.
    """
    activations = weight.activations if isinstance(weight, Fp8Weight) else "none"
    module, others = expert.module, None
    if kept is not None:
        limit = getattr(module, "limit", inf)
        others = kept.setdefault(expert.path, QuantizedExperts(experts_in(module), module.act_fn, limit))
    known = ("none",) if others is None else ("none", "token", "group")
    if activations not in known or (others is not None and others.activations not in (None, activations)):
        raise ValueError(f"{what} whose activations are rounded ({activations}), expected those of all experts alike")
    if others is None:
        expert.rows.copy_(weight.dequantize())
    else:
        assert isinstance(weight, Fp8Weight)
        others.store(expert.number, expert.part, weight)


def whole_experts(written: dict[str, set[tuple[int, str]]], modules: dict[str, Any], what: str) -> set[str]:
    """Return the names of the experts' parameters that were written.

    Raises:
        ValueError: only a part of one was written.
    """
    for path, parts in written.items():
        for number in range(experts_in(modules[path])):
            for part in ("gate", "up", "down"):
                if (number, part) not in parts:
                    raise ValueError(
                        f"{what} has quantized experts in {path}, but not {part} of {number}, expected all"
                    )
    return {f"{path}.{name}" for path in written for name in ("gate_up_proj", "down_proj")}
