"""The base of families with multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kv_pools import LatentLayout
from ..layers.head_layout import HeadLayout
from ..layers.latent_attention import LatentAttention
from ..layers.linear import fused, linear_of
from ..layers.mixer import Mixer
from ..layers.norm import rms_norm_of
from ..layers.quantized import QuantizedLinear
from ..layers.rope import Rope
from .llama import Llama

MAX_LATENT_DIM, MAX_ROW, ROW_UNIT = 512, 576, 16  # of `mla_tree_attention`


class Latent(Llama):
    """Llama with multi-head latent attention, by the names of DeepSeek-V2."""

    @property
    def rotates_neighbors(self) -> bool:
        """Whether rotated pairs are neighbors."""
        return bool(self.config.rope_interleave)

    def check(self, name: str = "model") -> None:
        super().check(name)
        check_row(self.config, name)
        if self.config.attention_bias and self.config.q_lora_rank is None:
            raise ValueError(f"{name}: attention_bias is set, expected not without q_lora_rank")

    def head_layout(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> HeadLayout:
        rope = Rope.none(device)
        if kind is not None:
            rope = Rope.of(rotary, max_len, device, interleaved=self.rotates_neighbors)
        return HeadLayout(self.config.qk_rope_head_dim, rope)

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        return latent_attention(module.self_attn, layout.rope)


def check_row(config: Any, name: str) -> None:
    """Raise ValueError for latent rows that `mla_tree_attention` does not take; errors call the model `name`."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if rank % ROW_UNIT or rope % ROW_UNIT or rank > MAX_LATENT_DIM or rank + rope > MAX_ROW:
        raise ValueError(
            f"{name}: kv_lora_rank is {rank} and qk_rope_head_dim is {rope}, expected multiples of {ROW_UNIT}, at "
            f"most {MAX_LATENT_DIM}, and {MAX_ROW} in all"
        )


def latent_attention(module: Any, rope: Rope) -> LatentAttention:
    """Return the attention of a module with the names of DeepSeek-V3's, with this rotation."""
    has_lora = module.q_lora_rank is not None
    kv_norm, q_norm = rms_norm_of(module.kv_a_layernorm), None
    if has_lora:
        q_norm = rms_norm_of(module.q_a_layernorm)
        assert q_norm.eps == kv_norm.eps
    key_up, value_up = up_projections(module)
    return LatentAttention(
        qkv=fused(module.q_a_proj if has_lora else module.q_proj, module.kv_a_proj_with_mqa),
        out=linear_of(module.o_proj),
        key_up=key_up,
        value_up=value_up,
        kv_norm=kv_norm,
        rotations=rope.table if rope.cos.shape[1] else None,
        interleaved=rope.interleaved,
        layout=LatentLayout(module.kv_lora_rank, module.qk_rope_head_dim),
        scale=module.scaling,
        q_norm=None if q_norm is None else q_norm.weight,
        q_up=linear_of(module.q_b_proj) if has_lora else None,
    )


def up_projections(module: Any) -> tuple[Tensor, Tensor]:
    """Return what makes keys [heads, nope, latent] and values [heads, latent, v] of latent parts.

    They are views of a module's `kv_b_proj`, or of a dequantized copy of it.
    """
    nope, v = module.qk_nope_head_dim, module.v_head_dim
    linear = module.kv_b_proj
    if isinstance(linear, QuantizedLinear):
        weight = linear.weight.dequantize().to(module.kv_a_layernorm.weight.dtype)
    else:
        weight = linear.weight.detach()
    keys, values = torch.split(weight.view(-1, nope + v, weight.shape[1]), [nope, v], dim=1)
    return keys, values.mT
