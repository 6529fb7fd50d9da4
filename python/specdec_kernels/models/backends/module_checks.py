"""Layers of transformers that carry more than keys and values from token to token: refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from ..layers.rope import constant_len
from .attention_hook import AttentionSpec, Temperature, UnsupportedModel


def check_serial_state(model: nn.Module, config: Any) -> None:
    """Refuse layers that carry a state from token to token, which a tree of tokens would need once for each path.

    Kinds that are not known by name here are found when the logits are compared.
    """
    if any(path.endswith(".encoder_attn") for path, _ in model.named_modules()):
        raise UnsupportedModel("attends to an encoder")
    serial = ("mamba", "linear", "conv", "recurrent", "delta")
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if any(word in kind for word in serial):
            name = "Mamba 1" if has_mamba1(model) else kind
            raise UnsupportedModel(f"has layers of {name}, whose state goes from token to token")


def has_mamba1(model: nn.Module) -> bool:
    """Return whether states decay by channel and element; from Mamba 2 on all elements of a head decay alike."""
    return any(name.endswith("A_log") and parameter.dim() > 1 for name, parameter in model.named_parameters())


def check_convolutions(model: nn.Module, specs: Sequence[AttentionSpec]) -> None:
    """Refuse layers that have convolutions over tokens next to the attention of these calls."""
    attends = {spec.module for spec in specs}
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and not attends.isdisjoint(layers.modules()):
            for module in layers.modules():
                if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and module.groups > 1:
                    raise UnsupportedModel("has convolutions over tokens, whose state goes from token to token")


def freeze_rotations(model: nn.Module, config: Any, max_len: int) -> None:
    """Refuse rotations that change with the length of the text up to `max_len`, and make those that change later plain.

    They change in these copies only. A rotation that looks for the longest position waits for the device in each layer.
    """
    limit = constant_len(config)
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        by_layer_type: dict[str, Any] = types if isinstance(types, dict) else {"": types}
        changing = [kind for kind in by_layer_type.values() if kind in ("dynamic", "longrope")]
        if not changing:
            continue
        if limit is not None and max_len > limit:
            raise UnsupportedModel(
                f"has rotations of rope_type {changing[0]!r} that change after {limit} tokens (max_len is {max_len})"
            )
        frozen = {layers: "default" if kind in changing else kind for layers, kind in by_layer_type.items()}
        setattr(module, "rope_type", frozen if isinstance(types, dict) else "default")  # noqa: B010


def check_cached_windows(specs: Sequence[AttentionSpec], config: Any, max_len: int) -> None:
    """Refuse a model that attends to more rows without a cache than its own cache keeps: its texts are two."""
    cached = DynamicCache(config=config).layers
    for spec in specs:
        index = getattr(spec.module, "layer_idx", None)
        kept = getattr(cached[index], "sliding_window", None) if index is not None and index < len(cached) else None
        if kept is not None and kept < max_len and spec.mask.kind != "chunk" and (spec.window or max_len) > kept:
            seen = f"the last {spec.window} rows" if spec.window else "all rows"
            raise UnsupportedModel(
                f"attends to {seen} without a cache and to the last {kept} with its own (max_len is {max_len})"
            )


def take_temperatures(model: nn.Module) -> dict[nn.Module, Temperature]:
    """Have Llama 4's attention modules leave the temperature of queries to us, and return it for each.

    They would take the place of a row in the pass for its position.
    """
    taken = dict[nn.Module, Temperature]()
    for module in model.modules():
        if isinstance(module, Llama4TextAttention) and module.attn_temperature_tuning and not module.use_rope:
            taken[module] = Temperature(module.attn_scale, module.floor_scale)
            module.attn_temperature_tuning = False
    return taken
