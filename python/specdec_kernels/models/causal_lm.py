"""A Hugging Face causal language model over paged KV: the target, and the standalone draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .attention import IMPLEMENTATION, KvPools, Rows, attach_pools

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_HEAD_DIMS = (64, 128, 256)


def check_supported(config: PretrainedConfig, max_len: int) -> None:
    """ValueError, by name, for what our attention cannot express."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"model: model_type is {config.model_type!r}, expected one of {SUPPORTED_MODEL_TYPES}")
    head_dim = head_dim_of(config)
    if head_dim not in SUPPORTED_HEAD_DIMS:
        raise ValueError(f"model: head_dim is {head_dim}, expected one of {SUPPORTED_HEAD_DIMS}")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or config.model_type == "mistral"
    if window is not None and slides and window < max_len:
        raise ValueError(f"model: sliding_window is {window}, expected at least max_len={max_len}")
    limit = getattr(config, "max_position_embeddings", max_len)
    if max_len > limit:
        raise ValueError(f"model: max_position_embeddings is {limit}, expected at least max_len={max_len}")


def head_dim_of(config: PretrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


class CausalLM:
    """The model with its KV pools, and one forward pass for every purpose (prefill, tree, draft step).

    Args:
        model: a path or hub id for `AutoModelForCausalLM`, or a model already loaded with our attention.
        max_len: the longest sequence to be served; the model must allow it.
        dtype, device: of weights and pools.
        feature_layers: layers whose entering hidden states `features` returns (for EAGLE-3); the number of layers
            itself names the state entering the final norm.

    Raises:
        ValueError: an architecture, head dimension or sliding window that is not supported.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        max_len: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_layers: Sequence[int] = (),
    ) -> None:
        self.model = as_model(model, dtype)
        check_supported(self.config, max_len)
        if any(hasattr(layer.self_attn, "k_pool") for layer in self.layers):
            raise ValueError("model: has the KV pools of another engine already, expected a module for this one alone")
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.model.to(device=device, dtype=dtype).requires_grad_(False).eval()
        self.pools: KvPools = attach_pools(
            [layer.self_attn for layer in self.layers],
            self.config.num_key_value_heads,
            head_dim_of(self.config),
            num_pages,
            page_size,
            like=self.embedding.weight,
        )
        self.feature_layers = tuple(feature_layers)
        self._features: dict[int, Tensor] = {}
        # Pre-hooks, not output_hidden_states: that, once used, breaks every later fullgraph compile of a layer.
        for index in self.feature_layers:
            module = self.layers[index] if index < len(self.layers) else self.model.model.norm
            module.register_forward_pre_hook(self._keep_feature(index), with_kwargs=True)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    @property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> nn.Linear:
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def _keep_feature(self, index: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._features[index] = args[0] if args else kwargs["hidden_states"]

        return keep

    def forward(self, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Hidden states [B, Q, H] after the final norm, of tokens [B, Q] rotated at positions [B, Q]."""
        output = self.model.model(input_ids=tokens, position_ids=positions, use_cache=False, rows=rows)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def features(self) -> Tensor | None:
        """The feature layers' states of the last forward pass, concatenated: [B, Q, len(feature_layers) * H]."""
        if not self.feature_layers:
            return None
        return torch.cat([self._features[index] for index in self.feature_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from hidden states [..., H]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def compile_layers(self, **options: Any) -> None:
        """Compile each decoder layer as one graph, shared by all layers (keywords go to `torch.compile`)."""
        for layer in self.layers:
            layer.compile(fullgraph=True, **options)


def config_of(model: str | Path | nn.Module) -> Any:
    """The config of a path, hub id or module."""
    return model.config if isinstance(model, nn.Module) else AutoConfig.from_pretrained(str(model))


def as_model(model: str | Path | nn.Module, dtype: torch.dtype) -> Any:
    """A module as it is; a path or hub id through `AutoModelForCausalLM`, with our attention."""
    if isinstance(model, nn.Module):
        return model
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, attn_implementation=IMPLEMENTATION)
