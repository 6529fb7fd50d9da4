"""Checks of the entries in a model's config.json: a refusal names the entry, its value and what was expected.

Transformers checks the types that a config class declares, and few values. Other values would fail in its modules or in
our layers, in words that name no entry, or compute nonsense.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from math import isfinite, isnan
from typing import Any

import torch
from huggingface_hub.dataclasses import type_validator
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..layer_configs import layer_configs
from .checkpoint import in_a_line

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # its names in configs
MOST = 2**31 - 1  # of any integer

# The smallest and the largest value of integers that may be missing or null.
SIZES = {
    "vocab_size": (1, MOST),
    "hidden_size": (1, MOST),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, MOST),
    "num_key_value_heads": (1, MOST),
    "head_dim": (0, MOST),  # 0: as if it were missing
    "rotary_dim": (1, MOST),
    "mamba_n_heads": (1, MOST),
    "n_mamba_heads": (1, MOST),
}

# Numbers above 0 that may be missing or null: epsilons, factors and divisors.
POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "attention_multiplier",
    "query_pre_attn_scalar", "dim_model_base", "logits_scaling",
)  # fmt: skip
ROPE_POSITIVE = (
    "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow",
)  # fmt: skip


def check_raw(values: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for an entry of a config.json, or of its `text_config`, before transformers computes with it."""
    for part in (values, values.get("text_config")):
        if isinstance(part, dict):
            kind = config_class(part)
            names = {} if kind is None else kind.attribute_map
            for name in SIZES:
                for own in {name, names.get(name, name)}:
                    check_size(own, part.get(own), SIZES[name], what)
            for key in ("rope_parameters", "rope_scaling"):
                check_rope(part.get(key), what)


def check_entries(config: Any, what: str) -> None:
    """Raise ValueError for an entry of a text config that is read here, and whose value transformers does not check."""
    if not isinstance(config.dtype, torch.dtype | None):
        raise ValueError(f"{what} has dtype {config.dtype!r}, expected the name of a dtype of torch")
    for part in layer_configs(config):
        for name, limits in SIZES.items():
            check_size(name, getattr(part, name, None), limits, what)
        for entry in fields(part):
            value = getattr(part, entry.name)
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{what} has {entry.name} {value!r}, expected a finite number")
            if isinstance(value, list | tuple) and any(isinstance(each, float) and isnan(each) for each in value):
                raise ValueError(f"{what} has {entry.name} {value!r}, expected numbers")
            if type(value) is int and abs(value) > MOST:
                raise ValueError(f"{what} has {entry.name} {value!r}, expected an integer of 32 bits")
        for name in POSITIVE:
            check_positive(name, getattr(part, name, None), what)
        check_rope(getattr(part, "rope_parameters", None), what)
    check_experts(config, what)


def check_size(name: str, size: Any, limits: tuple[int, int], what: str) -> None:
    """Raise ValueError for a size that is given, and is no integer within the limits."""
    low, high = limits
    if size is not None and (type(size) is not int or not low <= size <= high):
        raise ValueError(f"{what} has {name} {size!r}, expected an integer from {low} to {high}")


def check_positive(name: str, value: Any, what: str) -> None:
    """Raise ValueError for a number that is given, and is none above 0."""
    if value is not None and not (type(value) in (int, float) and 0 < value < 2**63):
        raise ValueError(f"{what} has {name} {value!r}, expected a number above 0, below 2**63")


def check_rope(angles: Any, what: str) -> None:
    """Raise ValueError for a number of `rope_parameters`, of all layers or of each type, that gives no angles."""
    if not isinstance(angles, dict):
        return
    for values in (angles, *(each for each in angles.values() if isinstance(each, dict))):
        for name in ROPE_POSITIVE:
            check_positive(name, values.get(name), what)
        for name, value in values.items():
            if isinstance(value, int | float) and not abs(value) < 2**63:
                raise ValueError(f"{what} has {name} {value!r}, expected a finite number below 2**63")
        share = values.get("partial_rotary_factor")
        if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
            raise ValueError(f"{what} has partial_rotary_factor {share!r}, expected a number above 0, at most 1")


def check_experts(config: Any, what: str) -> None:
    """Raise ValueError for numbers of experts and groups from which no row can select."""
    experts: Any = next(filter(None, (getattr(config, name, None) for name in NUM_EXPERTS)), None)
    if type(experts) is not int or experts < 2 or not hasattr(config, "num_experts_per_tok"):
        return
    top_k: Any = config.num_experts_per_tok
    most = experts + (getattr(config, "zero_expert_num", None) or 0)
    if isinstance(top_k, list):  # of each layer
        return
    if type(top_k) is not int or not 1 <= top_k <= most:
        raise ValueError(f"{what} has num_experts_per_tok {top_k!r}, expected 1 to {most} (experts)")
    groups: Any = getattr(config, "n_group", None)
    taken: Any = getattr(config, "topk_group", None)
    if not groups or getattr(config, "topk_method", None) == "greedy":  # without groups, as in DeepSeek-V2
        return
    if type(groups) is not int or experts % groups:
        raise ValueError(f"{what} has n_group {groups!r}, expected a divisor of the number of experts ({experts})")
    if groups > 1 and (type(taken) is not int or not 1 <= taken <= groups):
        raise ValueError(f"{what} has topk_group {taken!r}, expected 1 to n_group ({groups})")
    if groups > 1 and top_k > (most := taken * (experts // groups)):
        raise ValueError(f"{what} has num_experts_per_tok {top_k}, expected 1 to {most} (topk_group {taken})")


def made_of(values: dict[str, Any], make: Callable[[dict[str, Any]], Any], what: str) -> Any:
    """Return what transformers makes of the entries of a config.json, or raise ValueError that names one."""
    try:
        return make(values)
    except Exception as error:
        raise ValueError(f"{what} {fault_of_entry(values, make, error)}") from error


def fault_of_entry(values: Mapping[str, Any], make: Callable[[dict[str, Any]], object], error: Exception) -> str:
    """Describe the entry of a config.json for which `make` raised the error.

    It is one of another type than its class declares, or else the first without which `make` raises nothing.
    """
    for name, value, expected in mistyped(values):
        return f"has {name} {value!r}, expected {expected}"
    for name, value, others in without_one(values):
        try:
            make(others)
        except Exception:
            continue
        return f"has {name} {value!r}, expected a value that can be read ({in_a_line(error)})"
    return f"has a config that cannot be read ({in_a_line(error)})"


def mistyped(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield entries of another type than their class declares, with that type."""
    kind = config_class(values)
    if kind is not None:
        types = {entry.name: entry.type for entry in fields(kind)}
        for name, value in values.items():
            declared: Any = types.get(kind.attribute_map.get(name, name), Any)
            try:
                type_validator(name, value, declared)
            except TypeError:
                yield name, value, re.sub(r"\b\w+\.", "", inspect.formatannotation(declared))
    if isinstance(text := values.get("text_config"), dict):
        yield from mistyped(text)


def without_one(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each entry, those of dicts before the dicts, with a copy of the values that lacks it."""
    for name, value in values.items():
        if isinstance(value, dict):
            for inner, item, rest in without_one(value):
                yield f"{name}.{inner}", item, {**values, name: rest}
        yield name, value, {other: each for other, each in values.items() if other != name}


def config_class(values: Mapping[str, Any]) -> Any:
    """Return the class of transformers for a config's entries; None: it has none."""
    model_type = values.get("model_type")
    return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
