"""Adapters in the format of PEFT, merged into the weights of their base model when it is loaded.

LoRA (Hu et al. 2021, arXiv 2106.09685): W + s B A with s = alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski
2023, arXiv 2312.03732). DoRA (Liu et al. 2024, arXiv 2402.09353): each row of that sum scaled to its learned length. A
merged model costs what its base costs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .checkpoint import expect_folder, is_adapter, local_folder, read_json, tensors_of

NAME = "adapter"
# PEFT's prefix of the names of a base model's modules.
PREFIX = "base_model.model."
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# Values of `init_lora_weights` that do not change the base model's weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")

# Options of adapters that do more than add to weights of modules.
REFUSED_OPTIONS = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)


class LowRank(NamedTuple):
    """The update of the weight [out, in] of one module."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float
    magnitude: Tensor | None  # [out], of DoRA


def with_base(model: str | Path | nn.Module, adapter: str | Path | None) -> tuple[str | Path | nn.Module, Path | None]:
    """Return the model and the folder of its adapter. A `model` that is an adapter gives the base that it names.

    Raises:
        ValueError: an adapter for a module, or of an adapter; one that names no base.
    """
    names_base = not isinstance(model, nn.Module) and Path(model).is_dir() and is_adapter(Path(model))
    if adapter is not None:
        expect_folder(adapter, f"Engine: {NAME}")
    elif not names_base:
        return model, None
    if isinstance(model, nn.Module):
        raise ValueError(
            f"{NAME}: it is given with a {type(model).__name__}, expected the path or hub id of its base model "
            "(merge_and_unload() of PEFT merges it into a module)"
        )
    if not names_base:
        assert adapter is not None
        return model, local_folder(adapter, NAME)
    if adapter is not None:
        raise ValueError(f"{NAME}: it is given with {model}, which is an adapter, too, expected its base model")
    base = read_json(Path(model) / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{NAME}: {model} names no base model, expected base_model_name_or_path, or adapter= with it")
    return str(base), Path(model)


def merge_adapter(model: nn.Module, adapter: Path) -> None:
    """Add an adapter to the model's weights, in place. Sums are of float32 and are rounded once.

    Raises:
        ValueError: no LoRA; options or tensors that change more than weights of linear and embedding modules; modules
            that the model does not have; shapes that do not fit.
    """
    config = adapter_config(adapter)
    tensors = adapter_tensors(adapter)
    whole = set(config.get("modules_to_save") or ())
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.weight)?", name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        elif name.rpartition(".")[0].rpartition(".")[2] in whole:
            replace(model, name, tensor, adapter)
        else:
            raise ValueError(f"{NAME}: {adapter} has {name}, expected tensors of LoRA or of modules_to_save alone")
    if not tensors:
        raise ValueError(f"{NAME}: {adapter} has no tensors, expected some")
    for path, part in parts.items():
        add(model, path, low_rank_of(path, part, config, adapter), adapter)


def adapter_config(adapter: Path) -> dict[str, Any]:
    """Return the options of an adapter that can be merged exactly; refuse others by name."""
    if not (adapter / "adapter_config.json").exists():
        raise ValueError(f"{NAME}: {adapter} has no adapter_config.json, expected a folder as PEFT saves it")
    config: dict[str, Any] = read_json(adapter / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{NAME}: {adapter} has peft_type {config.get('peft_type')!r}, expected 'LORA'")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{NAME}: {adapter} has bias {config['bias']!r}, expected 'none'")
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{NAME}: {adapter} has init_lora_weights {start!r}, which changes the base model's weights, "
            "expected an adapter to the base model as it is (PEFT converts one when it is saved)"
        )
    for option in REFUSED_OPTIONS:
        if config.get(option):
            raise ValueError(f"{NAME}: {adapter} sets {option}, expected a LoRA without it")
    for option in ("r", "lora_alpha"):
        if not isinstance(config.get(option), int | float):
            raise ValueError(f"{NAME}: {adapter} has {option} {config.get(option)!r}, expected a number")
    return config


def adapter_tensors(adapter: Path) -> dict[str, Tensor]:
    """Return the tensors, by the names that their modules have in the base model."""
    for file in WEIGHTS:
        if (adapter / file).exists():
            tensors = tensors_of(adapter / file)
            return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    raise ValueError(f"{NAME}: {adapter} has no weights, expected one of {', '.join(WEIGHTS)}")


def low_rank_of(path: str, part: dict[str, Tensor], config: Mapping[str, Any], adapter: Path) -> LowRank:
    """Return the matrices of one module; those of an embedding are transposed."""
    embeds = "lora_embedding_A" in part
    names = ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A", "lora_B")
    for name in names:
        if name not in part:
            raise ValueError(f"{NAME}: {adapter} lacks {path}.{name}, expected both matrices of a module")
    a, b = (part[name].float() for name in names)
    rank = pattern_of(path, config.get("rank_pattern"), config["r"])
    if a.shape[0] != rank or b.shape[-1] != rank:
        raise ValueError(
            f"{NAME}: {adapter} has {path} of ranks {a.shape[0]} and {b.shape[-1]}, expected {rank} as its config says"
        )
    alpha = pattern_of(path, config.get("alpha_pattern"), config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    magnitude = part.get("lora_magnitude_vector")
    if embeds:
        a, b = b.t(), a.t()  # the weight of an embedding is [V, H], as if of a linear module with V outputs
    return LowRank(a, b, scale, None if magnitude is None else magnitude.float().flatten())


def pattern_of(path: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's path, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def add(model: nn.Module, path: str, part: LowRank, adapter: Path) -> None:
    """Add a low-rank update to a module's weight."""
    module = module_of(model, path, adapter)
    if not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
        raise ValueError(
            f"{NAME}: {adapter} adapts {path}, a {type(module).__name__}, expected a linear module or an embedding"
        )
    if part.magnitude is not None and isinstance(module, nn.Embedding):
        raise ValueError(f"{NAME}: {adapter} has a magnitude of {path}, an embedding, expected one of a linear module")
    check_own(model, module.weight, path, adapter)
    weight = module.weight.data
    view = weight.t() if isinstance(module, Conv1D) else weight  # [out, in]
    shape = [part.b.shape[0], part.a.shape[1]]
    if list(view.shape) != shape:
        raise ValueError(f"{NAME}: {adapter} has {path} of shape {shape}, expected {list(view.shape)}")
    total = torch.addmm(view.float(), part.b, part.a, alpha=part.scale)
    if part.magnitude is not None:
        total *= (part.magnitude / torch.linalg.vector_norm(total, dim=1))[:, None]
    view.copy_(total)


def replace(model: nn.Module, name: str, tensor: Tensor, adapter: Path) -> None:
    """Replace a tensor of a module that was trained whole."""
    path, _, own = name.rpartition(".")
    parameter = getattr(module_of(model, path, adapter), own, None)
    if not isinstance(parameter, nn.Parameter):
        raise ValueError(f"{NAME}: {adapter} has {name}, which {type(model).__name__} does not have")
    check_own(model, parameter, path, adapter)
    if parameter.shape != tensor.shape:
        raise ValueError(
            f"{NAME}: {adapter} has {name} of shape {list(tensor.shape)}, expected {list(parameter.shape)}"
        )
    parameter.data.copy_(tensor)


def module_of(model: nn.Module, path: str, adapter: Path) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"{NAME}: {adapter} has {path}, which {type(model).__name__} does not have") from None


def check_own(model: nn.Module, parameter: Tensor, path: str, adapter: Path) -> None:
    """Raise a ValueError for a parameter that two modules share: an update of one would change the other."""
    owners = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
    if len(owners) > 1:
        names = " and ".join(owners)
        raise ValueError(f"{NAME}: {adapter} changes {path}, expected a weight of its own ({names} are one)")
