"""EAGLE-3 draft heads in their published checkpoint formats (Li et al. 2025, arXiv 2503.01840), EAGLE-3.1 among them.

The head has decoder layers, mostly one. For draft row i, the first reads the embedding of token i+1 and a feature of
position i: `fc` of the target's hidden states that enter a few of its layers; or, for tokens that the head drafted, its
own output. The output predicts token i+2 over a reduced draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...ops import rms_norm_concat
from ..layers.decoder_layer import Layer
from ..layers.linear import Linear, linear_of
from ..layers.norm import RMSNorm, rms_norm_of
from ..weights.checkpoint import EAGLE3
from .base import DraftHead, Features, HeadLayer, Parts

# Entries of a head's config, or of the `eagle_config` in it, and the values that are supported.
COMPUTED = {
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

# The norms before `fc`, by the config entry that asks for them, and a tensor of each.
NORMS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def option(config: Any, name: str, default: Any = None) -> Any:
    """Return an entry of the config; some exporters write it into the `eagle_config` there."""
    inner = getattr(config, "eagle_config", None) or {}
    value = getattr(config, name, None)
    return inner.get(name, default) if value is None else value


def feature_layers(config: Any, num_target_layers: int) -> tuple[int, ...]:
    """Return the target layers whose input hidden states are the features.

    `eagle_aux_hidden_state_layer_ids` has two meanings. At the top of a config, where speculators writes and vLLM reads
    it, it names the layers that the states *enter*; so does `aux_hidden_state_layer_ids`, its name in speculators'
    other configs. In `eagle_config`, where SGLang reads it, it names the layers that the states *leave*. The first of
    the three that is given counts; the default is a low, a middle and a high layer.
    """
    entered = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or getattr(
        config, "aux_hidden_state_layer_ids", None
    )
    left = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    if any(type(layer) is not int for layer in entered or left or ()):
        raise ValueError(f"EAGLE-3 head: feature layers are {tuple(entered or left or ())}, expected integers")
    if entered:
        layers = tuple(entered)
    elif left:
        layers = tuple(i + 1 for i in left)
    else:
        layers = (2, num_target_layers // 2, num_target_layers - 3)
    if not all(0 <= layer <= num_target_layers for layer in layers):
        raise ValueError(f"EAGLE-3 head: feature layers are {layers}, expected 0 to {num_target_layers} (the target's)")
    return layers


class Eagle3Parts(NamedTuple):
    embeddings: Tensor
    embedding_norm: RMSNorm
    feature_norm: RMSNorm
    input_norm: RMSNorm | None
    state_norms: list[RMSNorm]
    fc: Linear
    layers: list[Layer]
    norm: RMSNorm
    head: Linear


class Eagle3Head(DraftHead):
    """A head of EAGLE-3. Four entries of its config change what it computes; all are off in the paper.

    - `norm_before_residual`: the residual stream starts with the normalized feature, not with the feature itself.
    - `norm_before_fc`: one norm of the concatenated states, before `fc`. `fc_norm`: a norm of each of them.
    - `norm_output`: the feature of a token that the head drafted is its output after the final norm, not before it.

    Its width, `hidden_size`, may differ from the target's, `target_hidden_size` in its config (None: the same), if it
    has embeddings and an output head of its own.
    """

    kind, name = EAGLE3, "EAGLE-3"
    has_own_width = True
    _parts: Eagle3Parts

    def __init__(self, config: LlamaConfig, num_features: int, draft_vocab: int, parts: Parts | None = None) -> None:
        super().__init__(config)
        parts, hidden, eps = parts or Parts(), config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = bool(option(config, "norm_before_residual"))
        self.passes_normed_state = bool(option(config, "norm_output"))
        width = option(config, "target_hidden_size", None) or hidden
        self.input_norm = LlamaRMSNorm(num_features * width, eps=eps) if option(config, "norm_before_fc") else None
        each = num_features if option(config, "fc_norm") else 0
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in range(each))
        self.fc = nn.Linear(num_features * width, hidden, bias="fc" in parts.biases)
        first = HeadLayer(config, parts, 2 * hidden, "input_layernorm", "hidden_norm")  # embedding and feature
        others = (HeadLayer(config, parts, hidden, "input_layernorm") for _ in range(1, parts.num_layers))
        self.layers = nn.ModuleList([first, *others])
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)

    @classmethod
    def check_config(cls, config: Any) -> None:
        for name, computed in COMPUTED.items():
            if bool(option(config, name, computed)) != computed:
                raise ValueError(f"EAGLE-3 head: {name} is {not computed}, expected {computed} (not supported)")
        if all(option(config, name) for name in NORMS):
            raise ValueError("EAGLE-3 head: fc_norm is set with norm_before_fc, expected one of them")

    @classmethod
    def made_for(
        cls, config: LlamaConfig, tensors: Mapping[str, Tensor], draft_vocab: int, num_layers: int
    ) -> Eagle3Head:
        for name, tensor in NORMS.items():
            if tensor in tensors and not option(config, name):
                raise ValueError(f"EAGLE-3 head: {tensor} is there, expected none without {name} in the config")
        return cls(config, len(feature_layers(config, num_layers)), draft_vocab, Parts.of(tensors))

    def _make_parts(self) -> Eagle3Parts:
        first: Any = self.layers[0]
        return Eagle3Parts(
            embeddings=self.embed_tokens.weight.detach(),
            embedding_norm=rms_norm_of(first.input_layernorm),
            feature_norm=rms_norm_of(first.hidden_norm),
            input_norm=None if self.input_norm is None else rms_norm_of(self.input_norm),
            state_norms=[rms_norm_of(norm) for norm in self.fc_norm],
            fc=linear_of(self.fc),
            layers=self._make_layers(),
            norm=rms_norm_of(self.norm),
            head=self._lm_head(),
        )

    def join(self, features: Tensor) -> Tensor:
        input_norm, state_norms = self._parts.input_norm, self._parts.state_norms
        if input_norm is not None:
            features = input_norm(features)
        if state_norms:
            states = features.chunk(len(state_norms), dim=-1)
            features = torch.cat([norm(state) for norm, state in zip(state_norms, states, strict=True)], dim=-1)
        return self._parts.fc(features)

    def enter(self, tokens: Tensor, features: Features, positions: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._parts
        pairs, state = rms_norm_concat(
            parts.embeddings,
            tokens.flatten().contiguous(),
            parts.embedding_norm.weight,
            features.table,
            parts.feature_norm.weight,
            parts.norm.eps,
            feature_rows=features.rows,
        )
        if self.norm_before_residual:
            state = pairs[:, self.config.hidden_size :].contiguous()
        return pairs, state
