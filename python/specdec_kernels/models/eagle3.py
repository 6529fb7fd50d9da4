"""EAGLE-3 draft heads in their published checkpoint format (Li et al. 2025, arXiv 2503.01840).

One decoder layer that reads, for draft row i, the embedding of token i+1 and a feature of position i: the target's
hidden states entering a few of its layers, joined by `fc`; or, for tokens the head drafted itself, its own output
before the final norm. It predicts token i+2 over a reduced draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ..ops import pair_rows
from .attention import Rows
from .causal_lm import CausalLM
from .checkpoint import load_tensors, local_folder
from .draft_head import AttentionParameters, DraftHead, Features, HeadOutput, check_head, load_parameters
from .layers import added_and_normed, product_of


def feature_layers(config: Any, num_target_layers: int) -> tuple[int, ...]:
    """The target layers whose entering hidden states are the features.

    `eagle_aux_hidden_state_layer_ids` names layers whose *output* is taken; the default is low, middle and high.
    """
    eagle_config = getattr(config, "eagle_config", None) or {}
    ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(i + 1 for i in ids) if ids else (2, num_target_layers // 2, num_target_layers - 3)
    if not all(0 <= layer <= num_target_layers for layer in layers):
        raise ValueError(f"EAGLE-3 head: feature layers are {layers}, expected 0 to {num_target_layers} (the target's)")
    return layers


class MidLayer(nn.Module):
    """The parameters of the one layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = AttentionParameters(config, 2 * config.hidden_size, config.attention_bias)  # a pair
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(DraftHead):
    def __init__(self, config: LlamaConfig, num_features: int, draft_vocab: int) -> None:
        super().__init__(config)
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @property
    def decoder(self) -> nn.Module:
        return self.midlayer

    def join(self, features: Tensor) -> Tensor:
        return product_of(self.fc)(features)

    def forward(
        self, tokens: Tensor, features: Features, positions: Tensor, rows: Rows, only: Tensor | None = None
    ) -> HeadOutput:
        pairs, state = pair_rows(
            self.embed_tokens.weight,
            tokens.flatten().contiguous(),
            self.midlayer.input_layernorm.weight,
            features.table,
            self.midlayer.hidden_norm.weight,
            self.norm.variance_epsilon,
            feature_rows=features.rows,
        )
        x, residual = self._layer(pairs, state, positions, self.rotations, rows, only=only)
        normed, hidden = added_and_normed(self.norm, x, residual)
        return HeadOutput(hidden, normed)

    def logits(self, normed: Tensor) -> Tensor:
        return product_of(self.lm_head)(normed)


def eagle3_config_of(head: str | Path | nn.Module) -> Any:
    """The config of a checkpoint folder, hub id or `Eagle3Head`."""
    if isinstance(head, Eagle3Head):
        return head.config
    if isinstance(head, nn.Module):
        raise ValueError(f"Speculation: draft_model is a {type(head).__name__}, expected an Eagle3Head for EAGLE3")
    return read_config(local_folder(head, "Speculation: draft_model"))


def read_config(folder: Path) -> LlamaConfig:
    config = LlamaConfig.from_pretrained(str(folder))
    for option in ("norm_before_fc", "norm_before_residual", "parallel_drafting"):
        if getattr(config, option, False) or (getattr(config, "eagle_config", None) or {}).get(option, False):
            raise ValueError(f"EAGLE-3 head: {option} is set, expected a head without it (not supported)")
    return config


def load_eagle3(source: str | Path | Eagle3Head, target: CausalLM, *, num_pages: int, page_size: int) -> Eagle3Head:
    """The head of a checkpoint folder or hub id, or a head that is loaded, with KV pools of the target's page geometry.

    Raises:
        ValueError: a variant that is not supported, or tensors that do not fit, by name.
    """
    head = source if isinstance(source, Eagle3Head) else load_checkpoint(source, target)
    head.prepare(target, num_pages, page_size)
    return head


def load_checkpoint(source: str | Path, target: CausalLM) -> Eagle3Head:
    """A checkpoint without `embed_tokens` or `lm_head` shares the target's. Every tensor must find its place."""
    folder = local_folder(source, "Speculation: draft_model")
    config = read_config(folder)
    weight = target.embedding.weight
    check_head("EAGLE-3", config, target)

    # Some exporters write "model." in front, some call the one layer "layers.0".
    tensors = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in load_tensors(folder).items()
    }
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # the inverse of d2t, as a bit per target token
    draft_vocab = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else weight.shape[0]
    if d2t is None and draft_vocab != weight.shape[0]:
        raise ValueError(f"EAGLE-3 head: d2t is missing for a draft vocabulary of {draft_vocab}, expected the tensor")

    head = Eagle3Head(config, len(target.feature_layers), draft_vocab)
    shared: dict[str, nn.Module] = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head}
    load_parameters("EAGLE-3", head, tensors, shared)
    if d2t is not None:
        head.id_map = (torch.arange(draft_vocab) + d2t).to(torch.int32)
    return head
