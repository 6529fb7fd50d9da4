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
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ..ops import norm_rows
from .attention import KvPools, Rows, attach_pools, resize_pools
from .causal_lm import SUPPORTED_HEAD_DIMS, CausalLM, head_dim_of
from .checkpoint import load_tensors, local_folder
from .layers import Layer, product_of, rotations_of


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


class WideAttention(nn.Module):
    """The parameters of an attention whose inputs are an embedding and a feature side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        hidden, bias = config.hidden_size, config.attention_bias
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * hidden, query, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, key, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, key, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)


class MidLayer(nn.Module):
    """The parameters of the one layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = WideAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """The head as a module whose parameters carry the checkpoint's names.

    `id_map` [Vd] int32 translates draft ids to target ids (None: the vocabularies are one).
    """

    id_map: Tensor | None
    pools: KvPools

    def __init__(self, config: LlamaConfig, num_features: int, draft_vocab: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("id_map", None, persistent=False)

    def resize_pools(self, num_pages: int) -> None:
        """Other pools, empty, with another number of pages."""
        self.pools = resize_pools([self.midlayer.self_attn], self.pools, num_pages)

    def prepare(self, target: CausalLM, num_pages: int, page_size: int) -> None:
        """Makes ready for `forward`: on the target's device and in its dtype, with KV pools of its page geometry."""
        weight, config = target.embedding.weight, self.config
        kv_heads = self.midlayer.self_attn.k_proj.out_features // head_dim_of(config)
        self.to(device=weight.device, dtype=weight.dtype).requires_grad_(False).eval()
        self.rotations = rotations_of(LlamaRotaryEmbedding(config), target.max_len, weight.device)
        self._layer = Layer(self.midlayer)
        self.pools = attach_pools(
            [self.midlayer.self_attn],
            kv_heads,
            head_dim_of(config),
            num_pages,
            page_size,
            like=weight,
        )

    def join(self, features: Tensor) -> Tensor:
        """One feature [..., H] from the target's states side by side [..., n * H]."""
        return product_of(self.fc)(features)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Output before the final norm [B, Q, H], which is the feature of a recursive row.

        Args:
            tokens: [B, Q]. features: [B, Q, H], joined from the target's or the head's own output.
            positions: [B, Q], where rows are rotated.
        """
        layer, features = self._layer, features.flatten(0, 1)
        width = features.shape[-1]
        both = features.new_empty(len(features), 2 * width)
        for x, norm, out in (
            (self.embed_tokens(tokens).flatten(0, 1), self.midlayer.input_layernorm, both[:, :width]),
            (features, self.midlayer.hidden_norm, both[:, width:]),
        ):
            norm_rows(x, norm.weight, norm.variance_epsilon, out=out)
        x, hidden = layer(both, features, positions, self.rotations, rows)
        return (hidden + x).view(*tokens.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., Vd] from outputs of `forward`."""
        normed, _ = norm_rows(hidden.reshape(-1, hidden.shape[-1]), self.norm.weight, self.norm.variance_epsilon)
        return product_of(self.lm_head)(normed).view(*hidden.shape[:-1], -1)


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
    head = source if isinstance(source, Eagle3Head) else load_checkpoint(source, target)
    head.prepare(target, num_pages, page_size)
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
