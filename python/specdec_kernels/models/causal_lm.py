"""A Hugging Face causal language model over paged KV: the target, and the standalone draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .attention import KvPools, Rows, attach_pools, resize_pools
from .layers import Layer, added_and_normed, embedded, product_of, rotations_of

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
    if config.hidden_act != "silu":
        raise ValueError(f"model: hidden_act is {config.hidden_act!r}, expected 'silu'")
    limit = getattr(config, "max_position_embeddings", max_len)
    if max_len > limit:
        raise ValueError(f"model: max_position_embeddings is {limit}, expected at least max_len={max_len}")


def head_dim_of(config: PretrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


class CausalLM:
    """The model with its KV pools, and one forward pass for every purpose (prefill, tree, draft step).

    Args:
        model: a path or hub id for `AutoModelForCausalLM`, or a module already loaded, whose projections are merged
            in place.
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
        self.rotations = rotations_of(self.model.model.rotary_emb, max_len, device)
        if any(parameter.dtype != dtype for parameter in self.model.parameters()):
            self.model.to(dtype=dtype)  # buffers too, so not for nothing: a module's own rotations would not survive it
        self.model.to(device=device).requires_grad_(False).eval()
        self.pools: KvPools = attach_pools(
            [layer.self_attn for layer in self.layers],
            self.config.num_key_value_heads,
            head_dim_of(self.config),
            num_pages,
            page_size,
            like=self.embedding.weight,
        )
        self.max_len = max_len
        self.feature_layers = tuple(feature_layers)
        self._kept_layers = sorted(set(feature_layers))
        self._kept: Tensor | None = None  # [B, Q, len(_kept_layers), H]: the states of the last forward pass
        self._layers = [Layer(layer) for layer in self.layers]

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

    def forward(self, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Hidden states [B, Q, H] after the final norm, of tokens [B, Q] rotated at positions [B, Q]."""
        hidden: Tensor = self._enter(len(self._layers), tokens, positions, rows).view(*tokens.shape, -1)
        return hidden

    def prefill(self, tokens: Tensor, positions: Tensor, rows: Rows) -> None:
        """`forward` for the sake of the rows' KV and `features` alone, without what follows the last of them."""
        last = len(self._layers)
        if last in self.feature_layers:
            self._enter(last, tokens, positions, rows)
        else:
            normed = self._enter(last - 1, tokens, positions, rows)
            self._layers[-1].write_kv(normed, positions, self.rotations, rows)

    def _enter(self, last: int, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """What enters layer `last`, normalised [B * Q, H], after the layers before it; behind all, the final norm's."""
        norms = [*(layer.input_layernorm for layer in self.layers), self.model.model.norm]
        x, residual = embedded(self.embedding, tokens).flatten(0, 1), None
        # The residual stream is in one place, where it is written over; and in others where a feature stays behind, for
        # which it is there before it enters that layer.
        kept = x.new_empty(len(x), len(self._kept_layers), x.shape[-1])
        places = iter([*kept.unbind(1), x])
        moving = {0, *self._kept_layers} if self._kept_layers else set()
        if 0 in self._kept_layers:
            x = next(places).copy_(x)
        for i in range(last):
            normed, state = added_and_normed(norms[i], x, residual)
            to = next(places) if i in moving else None
            x, residual = self._layers[i](normed, state, positions, self.rotations, rows, move_to=to)
        self._kept = kept.view(*tokens.shape, *kept.shape[1:])
        return added_and_normed(norms[last], x, residual)[0]

    def resize_pools(self, num_pages: int) -> None:
        """Other pools, empty, with another number of pages."""
        self.pools = resize_pools([layer.self_attn for layer in self.layers], self.pools, num_pages)

    def detach_pools(self) -> None:
        """Leaves the module as another one may take it."""
        for layer in self.layers:
            del layer.self_attn.k_pool, layer.self_attn.v_pool

    def features(self) -> Tensor | None:
        """The feature layers' states of the last forward pass, concatenated: [B, Q, len(feature_layers) * H]."""
        if self._kept is None or not self.feature_layers:
            return None
        if list(self.feature_layers) == self._kept_layers:
            return self._kept.flatten(2)
        return torch.cat([self._kept[:, :, self._kept_layers.index(layer)] for layer in self.feature_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] from hidden states [..., H]."""
        return product_of(self.lm_head)(hidden)


def config_of(model: str | Path | nn.Module) -> Any:
    """The config of a path, hub id or module."""
    return model.config if isinstance(model, nn.Module) else AutoConfig.from_pretrained(str(model))


def as_model(model: str | Path | nn.Module, dtype: torch.dtype) -> Any:
    """A module as it is; a path or hub id through `AutoModelForCausalLM`."""
    if isinstance(model, nn.Module):
        return model
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype)
