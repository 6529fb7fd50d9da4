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
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from .attention import IMPLEMENTATION, Rows, attach_pools
from .causal_lm import SUPPORTED_HEAD_DIMS, CausalLM, head_dim_of
from .checkpoint import load_tensors, local_folder


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


class WideAttention(LlamaAttention):
    """Llama attention whose inputs are an embedding and a feature side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self, name, wide)


class MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = WideAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embedding: Tensor, feature: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)
        attended, _ = self.self_attn(x, position_embeddings=position_embeddings, attention_mask=None, rows=rows)
        hidden: Tensor = feature + attended
        mlp: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mlp


class Eagle3Head(nn.Module):
    """The head as a module whose parameters carry the checkpoint's names.

    `id_map` [Vd] int32 translates draft ids to target ids (None: the vocabularies are one).
    """

    id_map: Tensor | None

    def __init__(self, config: LlamaConfig, num_features: int, draft_vocab: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("id_map", None, persistent=False)

    def join(self, features: Tensor) -> Tensor:
        """One feature [..., H] from the target's states side by side [..., n * H]."""
        joined: Tensor = self.fc(features)
        return joined

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Output before the final norm [B, Q, H], which is the feature of a recursive row.

        Args:
            tokens: [B, Q]. features: [B, Q, H], joined from the target's or the head's own output.
            positions: [B, Q], where rows are rotated.
        """
        rotation = self.rotary_emb(features, position_ids=positions)
        hidden: Tensor = self.midlayer(self.embed_tokens(tokens), features, rotation, rows)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., Vd] from outputs of `forward`."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def eagle3_config_of(head: str | Path | nn.Module) -> Any:
    """The config of a checkpoint folder, hub id or `Eagle3Head`."""
    if isinstance(head, Eagle3Head):
        return head.config
    if isinstance(head, nn.Module):
        raise ValueError(f"Speculation: draft_model is a {type(head).__name__}, expected an Eagle3Head for EAGLE3")
    return read_config(local_folder(head, "Speculation: draft_model"))


def read_config(folder: Path) -> LlamaConfig:
    config = LlamaConfig.from_pretrained(str(folder))
    config._attn_implementation = IMPLEMENTATION
    for option in ("norm_before_fc", "norm_before_residual", "parallel_drafting"):
        if getattr(config, option, False) or (getattr(config, "eagle_config", None) or {}).get(option, False):
            raise ValueError(f"EAGLE-3 head: {option} is set, expected a head without it (not supported)")
    if config.num_hidden_layers != 1:
        raise ValueError(f"EAGLE-3 head: num_hidden_layers is {config.num_hidden_layers}, expected 1")
    if head_dim_of(config) not in SUPPORTED_HEAD_DIMS:
        raise ValueError(f"EAGLE-3 head: head_dim is {head_dim_of(config)}, expected one of {SUPPORTED_HEAD_DIMS}")
    return config


def load_eagle3(source: str | Path | Eagle3Head, target: CausalLM, *, num_pages: int, page_size: int) -> Eagle3Head:
    """The head of a checkpoint folder or hub id, or a head that is loaded, with KV pools of the target's page geometry.

    Raises:
        ValueError: a variant that is not supported, or tensors that do not fit, by name.
    """
    weight = target.embedding.weight
    head = source if isinstance(source, Eagle3Head) else load_checkpoint(source, target)
    head.to(device=weight.device, dtype=weight.dtype).requires_grad_(False).eval()
    attach_pools(
        [head.midlayer.self_attn],
        head.midlayer.self_attn.k_proj.out_features // head_dim_of(head.config),
        head_dim_of(head.config),
        num_pages,
        page_size,
        like=weight,
    )
    return head


def load_checkpoint(source: str | Path, target: CausalLM) -> Eagle3Head:
    """A checkpoint without `embed_tokens` or `lm_head` shares the target's. Every tensor must find its place."""
    folder = local_folder(source, "Speculation: draft_model")
    config = read_config(folder)
    weight = target.embedding.weight
    if config.hidden_size != weight.shape[1]:
        raise ValueError(f"EAGLE-3 head: hidden_size is {config.hidden_size}, expected the target's {weight.shape[1]}")

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
    shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head}
    missing, unexpected = head.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if name not in shared]
    if missing or unexpected:
        raise ValueError(f"EAGLE-3 head: tensors are missing {missing} or unknown {unexpected}, expected neither")
    if "embed_tokens.weight" not in tensors:
        head.embed_tokens = target.embedding
    if "lm_head.weight" not in tensors:
        head.lm_head = target.lm_head
    if d2t is not None:
        head.id_map = (torch.arange(draft_vocab) + d2t).to(torch.int32)
    return head
