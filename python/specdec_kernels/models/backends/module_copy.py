"""Copies of a module that share its weights, and calls that pass a module only what it takes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn


def shared_copy(model: nn.Module) -> Any:
    """Copy the model's modules and config, in evaluation mode, over the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.inference_mode(False):
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()


def replaced_submodule(model: Any, path: str, replacement: nn.Module) -> Any:
    """Copy the model with another submodule at `path`; the model stays as it is.

    Only the modules on that path are copied, all others are shared.
    """
    whole = copy.copy(model)
    parent, parts = whole, path.split(".")
    for part in parts[:-1]:
        parent._modules = dict(parent._modules)
        child = copy.copy(parent._modules[part])
        parent._modules[part] = child
        parent = child
    parent._modules = dict(parent._modules)
    parent._modules[parts[-1]] = replacement
    return whole


def cache_name(module: nn.Module) -> str:
    """Return what the forward pass calls its cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def accepted(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that the module's forward pass takes by name."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
