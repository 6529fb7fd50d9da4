"""Configs whose entries differ between layers."""

from __future__ import annotations

from typing import Any


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, or the one of all layers if none has entries of its own."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
