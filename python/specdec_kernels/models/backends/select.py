"""Choice of the backend that runs a model.

Native: our layers (`CausalLM`), for the registered families. Transformers: its own modules with our paged tree
attention (`TransformersLM`), the fallback for all other models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..families import family_of, known_families, largest
from ..language_model import LanguageModel
from ..options import ModelOptions
from ..state_cache import bytes_of
from ..weights.model_config import StoredConfig, config_of
from .native import CausalLM, UnreadableConfigError, check_supported
from .transformers import TransformersLM

IMPLEMENTATIONS = ("auto", "native", "transformers")


def implementation_of(config: Any, max_len: int, implementation: str = "auto", name: str = "model") -> str:
    """Return the backend, "native" or "transformers", that runs a model of this config.

    Args:
        config: the model's text config.
        max_len: longest sequence in tokens.
        implementation: one of IMPLEMENTATIONS. Auto: native if our layers can express the model.
        name: of the model in errors.

    Raises:
        ValueError: no such implementation; native, or a hybrid, for a model that our layers cannot express; a config
            with an entry that no implementation computes.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"Engine: implementation is {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if not largest(config, "num_attention_heads"):
        if getattr(config, "sub_configs", None):
            raise ValueError(f"{name}: {config.model_type} is made of several models, expected one")
        raise ValueError(f"{name}: {config.model_type} has no attention in its layers, expected a model that has")
    if config.model_type not in known_families() and implementation != "native":
        return "transformers"
    family = family_of(config, name)
    family.check_entries(name)
    if implementation == "transformers":
        return implementation
    try:
        check_supported(family, max_len, name)
    except UnreadableConfigError:
        raise
    except ValueError:
        # Transformers' modules keep one recurrent state, which no tree can share.
        if implementation == "native" or family.state_specs(torch.float32):
            raise
        return "transformers"
    return "native"


def open_language_model(
    model: str | Path | nn.Module, options: ModelOptions, implementation: str = "auto"
) -> LanguageModel:
    """Load the model by the backend that `implementation_of` names.

    Raises:
        ValueError: what `implementation_of` and the backend refuse.
    """
    kind: type[CausalLM] | type[TransformersLM] = TransformersLM
    if implementation_of(config_of(model, options.name), options.max_len, implementation, options.name) == "native":
        kind = CausalLM
    return kind(model, options)


def windows_of(config: Any, implementation: str) -> set[int | None]:
    """Return the windows of a model's layers; None is among them if some layer sees all rows, or may see all.

    What a module of transformers sees is known only when it runs.
    """
    if implementation == "transformers":
        return {None, largest(config, "sliding_window")}
    family = family_of(config)
    return {family.window(layer) for layer in range(config.num_hidden_layers)}


def states_of(config: Any) -> str | None:
    """Return the size of the recurrent states of a native model, in words; None: it has none."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    specs = family_of(config).state_specs(dtype)
    if not specs:
        return None
    state, with_node = (sum(bytes_of(spec, 1, nodes) for spec in specs) for nodes in (0, 1))
    of_node = (with_node - state) / 1e6
    return f"{state / 1e6:.1f} MB a request or a snapshot, and {of_node:.2f} MB for each node of its trees"


class BackendSummary(NamedTuple):
    """The backends of a model's layers, in words."""

    implementation: str
    layers: str
    linears: str
    experts: str | None
    windows: str
    features: str
    states: str | None  # None: no layer keeps a recurrent state
    rounds: str


def summarize_backend(model: str | Path, name: str = "model") -> BackendSummary:
    """Describe how an engine would run the model of a folder or hub id, from its config alone.

    Raises:
        ValueError: what `StoredConfig.read` and `implementation_of` refuse.
    """
    stored = StoredConfig.read(model, name)
    config, storage = stored.text, stored.storage()
    implementation = implementation_of(config, 2, name=name)
    limited = sorted(window for window in windows_of(config, implementation) if window is not None)
    windows = ", ".join(f"the last {window} rows" for window in limited)
    count = config.num_hidden_layers
    if implementation == "native":
        states = states_of(config)
        if None in windows_of(config, implementation):
            whole = "all rows in every layer" if states is None else "all rows in layers with attention"
            windows = f"{windows} in some layers, all rows in others" if windows else whole
        return BackendSummary(
            implementation,
            "native",
            storage.linears,
            storage.experts,
            windows,
            f"states that enter any of {count} layers or leave the last",
            states,
            "captured as CUDA graphs",
        )
    return BackendSummary(
        implementation,
        "by transformers, with our attention; norms, linears, MLPs, rotations and experts of ours where they "
        "compute the same; checked against its own logits when an engine is made",
        storage.linears,
        storage.experts,
        f"as its modules ask: {windows} or all" if windows else "as its modules ask",
        f"by hooks on its {count} layers",
        None,
        "captured as CUDA graphs where its code allows (Engine.not_captured says why not)",
    )
