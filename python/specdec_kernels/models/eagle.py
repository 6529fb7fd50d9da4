"""EAGLE and EAGLE-2 draft heads in their published checkpoint format (Li et al. 2024, arXiv 2401.15077, 2406.16858).

The two papers share the head and differ in the tree that is drafted with it. One decoder layer without a norm before
its attention, over `fc` of the embedding of token i+1 beside the feature of position i, which is the target's state
after its final norm. What comes out predicts token i+2 through the target's own `lm_head`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from .attention import Rows
from .causal_lm import CausalLM
from .checkpoint import load_tensors, local_folder
from .draft_head import AttentionParameters, DraftHead, Features, HeadOutput, check_head, load_parameters
from .layers import embedded, normed, product_of


class EagleLayer(nn.Module):
    """The parameters of the one layer."""

    def __init__(self, config: LlamaConfig, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = AttentionParameters(config, config.hidden_size, qkv_bias)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class EagleHead(DraftHead):
    """Heads differ in whether `fc` and the projections of queries, keys and values have biases."""

    def __init__(self, config: LlamaConfig, *, fc_bias: bool, qkv_bias: bool) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config, qkv_bias)])
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @property
    def decoder(self) -> nn.Module:
        return self.layers[0]

    def prepare(self, target: CausalLM, num_pages: int, page_size: int) -> None:
        self._target = target  # no module itself: its parameters stay no part of the head
        super().prepare(target, num_pages, page_size)

    def join(self, features: Tensor) -> Tensor:
        """The state after the target's final norm [..., H], from the one before it."""
        return normed(self._target.model.model.norm, features)

    def forward(
        self, tokens: Tensor, features: Features, positions: Tensor, rows: Rows, only: Tensor | None = None
    ) -> HeadOutput:
        each = features.table if features.rows is None else features.table[features.rows]
        state = product_of(self.fc)(torch.cat([embedded(self.embed_tokens, tokens.flatten()), each], dim=-1))
        x, rest = self._layer(state, state, positions, self.rotations, rows, only=only)
        hidden = x if rest is None else rest + x
        return HeadOutput(hidden, hidden)  # it stands for the target's normed state

    def logits(self, normed: Tensor) -> Tensor:
        return self._target.logits(normed)


def load_eagle(source: str | Path | nn.Module, target: CausalLM, *, num_pages: int, page_size: int) -> EagleHead:
    """The head of a checkpoint folder or hub id, or a head that is loaded, with KV pools of the target's page geometry.

    A checkpoint without `embed_tokens` shares the target's.

    Raises:
        ValueError: a head of several layers, or tensors that do not fit, by name; a module that is no `EagleHead`.
    """
    if isinstance(source, nn.Module) and not isinstance(source, EagleHead):
        raise ValueError(f"Speculation: draft_model is a {type(source).__name__}, expected an EagleHead for EAGLE")
    head = source if isinstance(source, EagleHead) else load_checkpoint(source, target)
    head.prepare(target, num_pages, page_size)
    return head


def load_checkpoint(source: str | Path, target: CausalLM) -> EagleHead:
    folder = local_folder(source, "Speculation: draft_model")
    config = LlamaConfig.from_pretrained(str(folder))
    check_head("EAGLE", config, target)
    tensors = {name.removeprefix("model."): t for name, t in load_tensors(folder).items()}
    head = EagleHead(config, fc_bias="fc.bias" in tensors, qkv_bias="layers.0.self_attn.q_proj.bias" in tensors)
    load_parameters("EAGLE", head, tensors, {"embed_tokens.weight": target.embedding})
    return head
