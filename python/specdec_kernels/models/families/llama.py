"""Llama: norms before attention and before a gated MLP. The other families are variations of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..layers.attention import Attention
from ..layers.decoder_layer import Layer, ParallelLayer
from ..layers.embedding import Embedding, LMHead
from ..layers.head_layout import HeadLayout
from ..layers.linear import Projection, fused, linear_of
from ..layers.mixer import Mixer
from ..layers.mlp import FeedForward, GatedMLP, activation_of
from ..layers.norm import Norm, rms_norm_of
from ..layers.rope import Rope
from .base import Decoder, Family, head_dim_of, register


@register
class Llama(Family):
    model_type = "llama"
    interleaved: ClassVar[bool] = False  # whether rotated pairs are neighbors
    out_name: ClassVar[str] = "o_proj"  # of attention's output projection
    last_norm_name: ClassVar[str] = "norm"
    layers_name: ClassVar[str] = "layers"

    def decoder(self, model: Any, max_len: int, device: torch.device) -> Decoder:
        body = model.get_decoder()
        # A multimodal model applies the linear alone, whatever its language model would do to logits.
        head = self.head(model.lm_head) if body is model.base_model else LMHead(linear_of(model.lm_head))
        modules = getattr(body, self.layers_name)
        kinds = [self.rotation(index) for index in range(len(modules))]
        layouts = {kind: self.head_layout(self.rotary(body), kind, max_len, device) for kind in dict.fromkeys(kinds)}
        layers = zip(modules, kinds, strict=True)
        return Decoder(
            embedding=self.embedding(body.get_input_embeddings()),
            layers=[self.layer(index, module, layouts[kind]) for index, (module, kind) in enumerate(layers)],
            norm=self.norm(getattr(body, self.last_norm_name)),
            head=head,
        )

    def rotary(self, body: Any) -> Any:
        """Return the module that computes cosines and sines."""
        return body.rotary_emb

    def head_layout(self, rotary: Any, kind: str | None, max_len: int, device: torch.device) -> HeadLayout:
        """Return the layout of layers whose rotation is of this kind."""
        if kind is None:
            rotation = Rope.none(device)
        else:
            kinds = (kind,) if kind else ()
            rotation = Rope.of(rotary, max_len, device, *kinds, interleaved=self.interleaved)
        return HeadLayout(head_dim_of(self.config), rotation)

    def embedding(self, module: Any) -> Embedding:
        return Embedding(module.weight.detach())

    def head(self, linear: Any) -> LMHead:
        return LMHead(linear_of(linear))

    def norm(self, module: Any) -> Norm:
        return rms_norm_of(module)

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        return Layer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.mixer(index, module, layout),
            pre_feed_forward_norm=self.norm(module.post_attention_layernorm),
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def parallel_layer(self, index: int, module: Any, layout: HeadLayout) -> ParallelLayer:
        """Return a layer whose mixer and feed-forward part read the output of one norm."""
        return ParallelLayer(
            input_norm=self.norm(module.input_layernorm),
            mixer=self.attention(index, module.self_attn, layout),
            pre_feed_forward_norm=None,
            feed_forward=self.feed_forward(index, module.mlp),
        )

    def mixer(self, index: int, module: Any, layout: HeadLayout) -> Mixer:
        """Return the mixer of a layer's module: attention, in most families."""
        return self.attention(index, module.self_attn, layout)

    def attention(self, index: int, module: Any, layout: HeadLayout) -> Attention:
        kv_heads = self.config.num_key_value_heads
        return Attention(
            qkv=self.qkv(module, layout),
            out=layout.out(getattr(module, self.out_name)),
            rotations=layout.rotations,
            kv_heads=kv_heads,
            head_dim=layout.size,
            window=self.window(index),
            scale=module.scaling,
        )

    def qkv(self, module: Any, layout: HeadLayout) -> Projection:
        """Return the projection of queries, keys and values."""
        projections = module.q_proj, module.k_proj, module.v_proj
        return layout.qkv(self.config.num_key_value_heads, *projections, normed=self.head_norms(module))

    def feed_forward(self, index: int, module: Any) -> FeedForward:
        return gated_mlp(module)

    def head_norms(self, module: Any) -> Callable[[Projection], Projection] | None:
        """Return what wraps a layer's QKV projection in `LayerNormedHeads`, if the model has them."""
        return None

    def rotation(self, index: int) -> str | None:
        """Return the rotary module's name of the kind of layer `index`; "": it has one kind only; None: no rotation."""
        return ""


def gated_mlp(mlp: Any) -> GatedMLP:
    return GatedMLP(fused(mlp.gate_proj, mlp.up_proj), linear_of(mlp.down_proj), activation_of(mlp.act_fn))
