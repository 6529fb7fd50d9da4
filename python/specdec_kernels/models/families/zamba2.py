"""Zamba 2: Mamba 2 in all layers, and before some of them one of a few shared transformers, each time with adapters.

A shared transformer reads the token's embedding next to its state, so rows of the residual stream are both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding
from ..layers.head_layout import HeadLayout
from ..layers.linear import Linear, linear_of
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward, GatedMLP, activation_of
from ..layers.norm import Norm, add_residual
from ..layers.outputs import LayerOutput
from ..layers.paged_batch import PagedBatch
from ..state_cache import RecurrenceSpec, StateSpec
from .base import Decoder, register
from .hybrid import Mamba2Hybrid


class DoubledEmbedding(Embedding):
    """The embedding of each token, twice next to each other."""

    __slots__ = ()

    def __call__(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = super().__call__(tokens, positions)
        return torch.cat([rows, rows], -1)


class FirstHalfNorm(NamedTuple):
    """A norm of the first half of each row."""

    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x[..., : x.shape[-1] // 2])

    def add_norm(self, x: LayerOutput, residual: Tensor | None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = add_residual(x, residual, out)
        return self(total), total


@dataclass
class SharedTransformer:
    """A transformer layer without residuals, whose output passes a linear of the layer that it is shared with."""

    input_norm: Norm
    attention: Attention
    pre_feed_forward_norm: Norm
    feed_forward: GatedMLP
    linear: Linear

    def __call__(self, rows: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return [T, H] from rows [T, 2 * H]."""
        mixed = self.attention(self.input_norm(rows), positions, batch)
        return self.linear(self.feed_forward.output(self.pre_feed_forward_norm(self.attention.out(mixed))))


@dataclass
class Zamba2Layer(Layer):
    """A Mamba 2 layer over rows [T, 2 * H] of state and embedding, mostly without a shared transformer before it."""

    pre_feed_forward_norm: Norm | None = field(init=False, default=None)
    feed_forward: FeedForward = field(init=False)
    shared: SharedTransformer | None = field(default=None, kw_only=True)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.mixer,) if self.shared is None else (self.shared.attention, self.mixer)

    def enter(self, x: LayerOutput, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = add_residual(x, residual, None)
        return rows, rows

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        *,
        residual_out: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[LayerOutput, Tensor | None]:
        width = residual.shape[1] // 2
        x = residual[:, :width]
        if self.shared is not None:
            x = x + self.shared(residual, positions, batch)
        assert self.input_norm is not None
        mixed = self.mixer(self.input_norm(x), positions, batch)
        if only is not None:
            mixed, residual = mixed[only], residual[only]
        if residual_out is not None:
            residual = residual_out.copy_(residual)
        residual[:, :width] += self.mixer.out(mixed)
        return residual, None


@register
class Zamba2(Mamba2Hybrid):
    model_type = "zamba2"
    last_norm_name = "final_layernorm"

    @property
    def conv_activation(self) -> str:
        return "silu"

    @property
    def types(self) -> list[str]:
        kinds: list[str] = self.config.layers_block_type
        return kinds

    def state_specs(self, dtype: torch.dtype) -> list[StateSpec]:
        return [self.state_spec(dtype)] * len(self.types)

    @property
    def num_kv_layers(self) -> int:
        return self.types.count("hybrid")

    @property
    def mamba_sizes(self) -> RecurrenceSpec:
        config = self.config
        return RecurrenceSpec(config.mamba_ngroups, config.n_mamba_heads, config.mamba_d_state, config.mamba_headdim)

    def check(self, name: str = "model") -> None:
        super().check(name)
        expected = [index for index, kind in enumerate(self.types) if kind == "hybrid"]
        if (ids := self.config.hybrid_layer_ids) != expected:
            raise ValueError(f"{name}: hybrid_layer_ids is {ids!r}, expected {expected} (layers_block_type)")

    def division(self) -> dict[str, Any]:
        raise ValueError(f"model: {self.model_type} is not divided among ranks (its layers share transformers)")

    def rotary(self, body: Any) -> Any:
        return body.rotary_emb if self.config.use_mem_rope else None

    def rotation(self, index: int) -> str | None:
        return "" if self.config.use_mem_rope else None

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        decoder = super().decoder(model, max_len, device)
        return decoder._replace(norm=FirstHalfNorm(decoder.norm))

    def embedding(self, module: Any) -> Embedding:
        return DoubledEmbedding(module.weight.detach())

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        is_shared = hasattr(module, "shared_transformer")
        mamba = module.mamba_decoder if is_shared else module
        return Zamba2Layer(
            mixer=self.mamba(mamba.mamba),
            input_norm=self.norm(mamba.input_layernorm),
            shared=self.shared(index, module, layout) if is_shared else None,
        )

    def shared(self, index: int, module: Any, layout: HeadLayout) -> SharedTransformer:
        """Return the shared transformer of a layer, with the adapters that it has there."""
        block, number = module.shared_transformer, self.config.hybrid_layer_ids.index(index)
        attention, mlp = block.self_attn, block.feed_forward
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        if self.config.use_shared_attention_adapter:
            lists = (getattr(attention, f"linear_{part}_adapter_list") for part in "qkv")
            projections = [adapted(linear, each[number]) for linear, each in zip(projections, lists, strict=True)]
        kv_heads = self.config.num_key_value_heads
        return SharedTransformer(
            input_norm=self.norm(block.input_layernorm),
            attention=Attention(
                qkv=layout.qkv(kv_heads, *projections),
                out=layout.out(attention.o_proj),
                rotations=layout.rotations,
                kv_heads=kv_heads,
                head_dim=layout.size,
                scale=attention.scaling,
            ),
            pre_feed_forward_norm=self.norm(block.pre_ff_layernorm),
            feed_forward=GatedMLP(
                linear_of(adapted(mlp.gate_up_proj, mlp.gate_up_proj_adapter_list[number])),
                linear_of(mlp.down_proj),
                activation_of(mlp.act_fn),
            ),
            linear=linear_of(module.linear),
        )


def adapted(linear: Any, adapter: Any) -> nn.Linear:
    """Return a copy of a linear with the product of an adapter's two linears added to its weight."""
    down, up = adapter
    with torch.device("meta"):
        copy = nn.Linear(linear.in_features, linear.out_features, bias=False)
    product = up.weight.detach().float() @ down.weight.detach().float()
    weight = (linear.weight.detach().float() + product).to(linear.weight.dtype)
    copy.weight = nn.Parameter(weight, requires_grad=False)
    copy.bias = linear.bias
    return copy
