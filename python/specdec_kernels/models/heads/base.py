"""The base of draft heads over a target's states: a few decoder layers with KV pools of their own.

A checkpoint's tensors show what a head is made of: how many layers, which biases, norms of queries and keys. Its config
has what no tensor shows. A head is refused if one contradicts the other, or if it needs what is not computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ..families import head_dim_of, window_of
from ..families.latent import latent_attention
from ..families.llama import gated_mlp
from ..kv_pools import KvLayout, KvPools
from ..language_model import LanguageModel
from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.embedding import LMHead
from ..layers.head_layout import HeadLayout
from ..layers.linear import Linear, linear_of
from ..layers.mixer import Mixer, attach_caches, kv_layouts_of, mixers_of
from ..layers.norm import rms_norm_of
from ..layers.outputs import LayerOutput
from ..layers.paged_batch import PagedBatch
from ..layers.quantized import Fp8Weight, QuantizedLinear, QuantizedWeight, quantized_rows
from ..layers.rope import Rope
from ..weights.checkpoint import Kind
from ..weights.kv_scales import measured_scale
from ..weights.offload import LARGE, offload, onload, unfuse_quantized, weights_of
from ..weights.update import Update, expect_floats, expect_tensors, same_kind, write_over
from .checkpoint import LATENT, LAYER, UNUSED, own_name, target_ids

MEASURED_REQUESTS, MEASURED_ROWS, MEASURED_PAGE = 8, 32, 16  # of the pass that scales of 8-bit KV are measured in
HEAD_ROOM = 8.0  # factor of scales above those of `measured_scale`


class Features(NamedTuple):
    """A feature for each row: a state of the target, or the head's own output."""

    table: Tensor  # [F, H]
    rows: Tensor | None = None  # [T] int32, each row's index in the table; None: row i is table[i]


class HeadOutput(NamedTuple):
    """The output of a head, [T, H] each."""

    hidden: Tensor  # the feature of the next draft step
    normed: Tensor  # the input of `logits`


@dataclass(frozen=True)
class Parts:
    """The parts of a head's layers, as tensors show them.

    Attributes:
        num_layers: the number of layers, each with KV of its own.
        biases: names of the linears with a bias.
        qk_norm: whether each query and key head has a norm, as in Qwen3.
        first_norm: whether the first layer has an input norm; EAGLE's paper has none.
        latent: whether attention is latent, as in DeepSeek-V3.
    """

    num_layers: int = 1
    biases: frozenset[str] = frozenset()
    qk_norm: bool = False
    first_norm: bool = False
    latent: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Parts:
        """Return what tensors with a head's own names show."""
        return cls(
            num_layers=len({match[0] for key in tensors if (match := LAYER.match(key))}),
            biases=frozenset(key.split(".")[-2] for key in tensors if key.endswith(".bias")),
            qk_norm=any(key.endswith("self_attn.q_norm.weight") for key in tensors),
            first_norm="layers.0.input_layernorm.weight" in tensors,
            latent=any(key.endswith(LATENT) for key in tensors),
        )


class HeadLayer(nn.Module):
    """The parameters of one layer with inputs of this width, and with these norms."""

    def __init__(self, config: Any, parts: Parts, inputs: int, *norms: str) -> None:
        super().__init__()
        kind = latent_parameters if parts.latent else AttentionParameters
        self.self_attn = kind(config, parts, inputs)
        config = copy(config)
        config.mlp_bias = "gate_proj" in parts.biases
        self.mlp = LlamaMLP(config)
        for norm in (*norms, "post_attention_layernorm"):
            self.add_module(norm, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))


class AttentionParameters(nn.Module):
    """The parameters of an attention with inputs of this width."""

    def __init__(self, config: Any, parts: Parts, inputs: int) -> None:
        super().__init__()
        self.head_dim = head_dim_of(config)
        query, key = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, query, bias="q_proj" in parts.biases)
        self.k_proj = nn.Linear(inputs, key, bias="q_proj" in parts.biases)
        self.v_proj = nn.Linear(inputs, key, bias="q_proj" in parts.biases)
        self.o_proj = nn.Linear(query, config.hidden_size, bias="o_proj" in parts.biases)
        for norm in ("q_norm", "k_norm") if parts.qk_norm else ():
            self.add_module(norm, LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps))


def latent_parameters(config: Any, parts: Parts, inputs: int) -> nn.Module:
    """Return the parameters of DeepSeek-V3's attention with inputs of this width."""
    config = copy(config)
    config.attention_bias = "kv_a_proj_with_mqa" in parts.biases
    config.q_lora_rank = getattr(config, "q_lora_rank", None)
    module = DeepseekV3Attention(config, 0)
    for name in ("q_proj" if config.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa"):
        whole = getattr(module, name)
        setattr(module, name, nn.Linear(inputs, whole.out_features, bias=whole.bias is not None))
    return module


def rotated_part(config: Any) -> Any:
    """Return a config whose heads are the rotated elements of this one's: Llama's plain rotation takes them all."""
    if getattr(config, "kv_lora_rank", None) is not None:
        config = copy(config)
        config.head_dim = config.qk_rope_head_dim
        return config
    parameters = config.rope_parameters
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor == 1 or parameters["rope_type"] != "default":
        return config
    config = copy(config)
    config.head_dim = int(head_dim_of(config) * factor)
    return config


@dataclass(frozen=True)
class HeadStorage:
    """The storage of a head's weights and KV.

    Attributes:
        weights: "fp8": linears of the head's own are quantized when it is loaded, by `Fp8Weight.of_rows`; the target's
            LM head and tables stay as they are. "fp8-head": the LM head that it shares is a copy in 8 bits as well.
            None: all as loaded.
        kv_dtype: of the pools; None: that of the weights. In float8_e4m3fn each layer has scales, which are measured in
            one pass over random tokens and states.
        window_pages: as in `KvPools.allocate`.
    """

    weights: str | None = None
    kv_dtype: torch.dtype | None = None
    window_pages: Mapping[int, int] = field(default_factory=dict)


class DraftHead(nn.Module):
    """A head that predicts token i+2 from token i+1 and a feature of position i.

    The feature is made of the target's states; for tokens that the head drafted, it is the head's own output.

    Attributes:
        id_map: [Vd] int32, the target's id of each draft id; None: the vocabularies are one.
        prefix: of its tensors' names in the target's checkpoint; empty: its checkpoint is its own.
    """

    kind: ClassVar[Kind]
    name: ClassVar[str]  # of the method, in errors
    id_map: Tensor | None
    layers: nn.ModuleList
    fc: nn.Linear
    _parts: Any
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    pools: KvPools
    is_given = False  # whether the parameters are the caller's
    _among: list[int] | None = None  # the target's tokens that it predicts; None: all
    _divides_logits = False
    has_own_width: ClassVar[bool] = False  # whether its layers may have another width than the target's
    prefix = ""
    storage = HeadStorage()
    passes_normed_state = False  # whether the feature of a token that it drafted is its output after the final norm
    scratch_rows = 0  # rows after a text that a round writes and drops

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("id_map", None, persistent=False)

    @classmethod
    def made_for(cls, config: LlamaConfig, tensors: Mapping[str, Tensor], draft_vocab: int, num_layers: int) -> Any:
        """Return a head whose parameters have these tensors' shapes, over a target of `num_layers` layers.

        Raises:
            ValueError: tensors and config contradict each other.
        """
        raise NotImplementedError

    @classmethod
    def check_config(cls, config: Any) -> None:
        """Raise a ValueError for an unsupported variant, by name."""

    def prepare(self, target: LanguageModel, num_pages: int, page_size: int) -> None:
        """Prepare for `forward`: on the target's device, in its dtype, with KV pools of its page geometry.

        A head that is given as a module is prepared as a shallow copy, which shares the parameters and has pools of its
        own: another engine may have prepared it too.
        """
        weight = target.embedding.weight
        self._place(weight.dtype, weight.device)
        self._max_len, self._vocab = target.max_len, len(weight)
        of_target = {id(parameter) for parameter in target.model.parameters()}
        self._of_target = {name for name, own in self._named() if id(own) in of_target}
        if self.storage.weights is not None:
            self._quantize()
        self._parts = self._make_parts()
        layouts = kv_layouts_of(mixers_of(self._parts.layers))
        kv_dtype, scales = self.storage.kv_dtype or weight.dtype, None
        if kv_dtype != weight.dtype:
            scales = self._measured_scales(layouts)
        sizes = num_pages, page_size
        self._hold(KvPools.allocate(layouts, *sizes, kv_dtype, weight.device, scales, self.storage.window_pages))

    @torch.inference_mode()
    def _measured_scales(self, layouts: Sequence[KvLayout]) -> list[tuple[float, ...]]:
        """Measure scales of 8-bit KV from what one pass writes to pools of the weights' dtype.

        States are random, and a norm follows; what real ones make of them may be larger. FP8 has room for that: its
        relative error is the same down to 1 / 28672 of the largest number.
        """
        weight, count = self.embed_tokens.weight, max(1, min(MEASURED_ROWS, self._max_len - self.scratch_rows))
        pages = MEASURED_REQUESTS, -(-(count + self.scratch_rows) // MEASURED_PAGE)
        self._hold(KvPools.allocate(layouts, pages[0] * pages[1], MEASURED_PAGE, weight.dtype, weight.device))
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(weight), (MEASURED_REQUESTS, count), generator=generator)
        width = self.fc.in_features
        features = torch.randn(MEASURED_REQUESTS * count, width, generator=generator).to(weight.device, weight.dtype)
        slots = torch.arange(MEASURED_REQUESTS, dtype=torch.int32, device=weight.device)
        table = torch.arange(pages[0] * pages[1], dtype=torch.int32, device=weight.device).view(pages)
        rows = PagedBatch(slots=slots, page_table=table, prefix_lens=torch.zeros_like(slots), tail_len=count)
        self._write_measured(drawn.to(weight.device, torch.int32), features, rows)
        return [tuple(HEAD_ROOM * measured_scale(pool) for pool in kv.pools) for kv in self.pools.layers]

    def _write_measured(self, tokens: Tensor, features: Tensor, rows: PagedBatch) -> None:
        """Write the KV of tokens [B, Q] with features [B * Q, n * H], from which scales are measured."""
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device).expand_as(tokens)
        self.prefill(tokens, Features(self.join(features)), positions.contiguous(), rows)

    def _place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move the weights to the device, and cast them to `dtype`."""
        self.to(device=device, dtype=dtype)

    def _quantize(self) -> None:
        """Quantize the linears of the layers, `fc`, and an LM head of the head's own."""
        own = [name for name in ("fc", "layers", "lm_head") if f"{name}.weight" not in self._of_target]
        # This head may be a shallow copy of a given module, whose dict of modules it shares.
        self._modules = self._modules | {name: quantized_rows(getattr(self, name)) for name in own}

    def _make_parts(self) -> Any:
        """Return what `forward` computes with: `layers`, and what precedes and follows them."""
        raise NotImplementedError

    def _lm_head(self) -> Linear:
        """Return the product with `lm_head`, by a copy in 8 bits if `storage` asks for one of the target's."""
        head = linear_of(self.lm_head)
        if self.storage.weights != "fp8-head" or not isinstance(head.weight, Tensor):
            return head
        return head._replace(weight=Fp8Weight.of_rows(head.weight))

    @property
    def logits_weight(self) -> Tensor | QuantizedWeight:
        """The weight [Vd, H] that logits are computed with."""
        head: Linear | LMHead = self._parts.head
        return (head.linear if isinstance(head, LMHead) else head).weight

    def draft_among(self, ids: list[int]) -> None:
        """Predict only these tokens of the target, by a copy of their rows of `lm_head`."""
        self._among = ids
        # This head may be a shallow copy of a given module, whose dict of buffers it shares.
        id_map = torch.tensor(ids, dtype=torch.int32, device=self.pools.device)
        self._buffers = self._buffers | {"id_map": id_map}
        self._parts = self._make_parts()
        self._hold(self.pools)

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.named_parameters(remove_duplicate=False)

    @property
    def rotates_neighbors(self) -> bool:
        """Whether RoPE rotates elements 2i and 2i + 1 of a head, not i and i + pairs."""
        is_latent = getattr(self.config, "kv_lora_rank", None) is not None
        return is_latent and bool(getattr(self.config, "rope_interleave", True))

    def _make_layers(self) -> list[Layer]:
        device, config = self.embed_tokens.weight.device, rotated_part(self.config)
        is_latent = getattr(config, "kv_lora_rank", None) is not None
        rotary = LlamaRotaryEmbedding(config)
        rotation = Rope.of(rotary, self._max_len, device, interleaved=self.rotates_neighbors)
        heads = HeadLayout(head_dim_of(config if is_latent else self.config), rotation)
        return [self._layer(index, module, heads) for index, module in enumerate(self.layers)]

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        """Return the updates of the head's weights by tensors that are named as in checkpoints; see `updates_of`."""
        expect_tensors(weights, name)
        named = {own_name(key, self.prefix): key for key in weights if not key.endswith(UNUSED)}
        given = {own: key for own, key in named.items() if own != "t2d"}
        updates, parameters = list[Update](), dict(self._named())
        linears = {f"{path}.weight": part for path, part in self.named_modules() if isinstance(part, QuantizedLinear)}
        if "d2t" in given and self.id_map is not None:
            try:
                ids = target_ids(name, weights[given.pop("d2t")].cpu(), len(self.id_map), self._vocab)
            except ValueError as error:
                raise ValueError(str(error).replace(f"{name}: d2t", f"{name}['d2t']")) from None
            updates.append(Update(self.id_map, ids))
        expect_floats({key: weights[key] for key in given.values()}, name)
        for own, key in given.items():
            if own in self._of_target:
                raise ValueError(f"{name} has {key}, which is the target's, expected weights of the head's own")
            if own in linears:
                stored = linears[own].weight
                updates += same_kind(stored, Fp8Weight.of_rows(weights[key]), f"{name} has {key}")
                continue
            if own not in parameters:
                raise ValueError(f"{name} has {key}, unknown to {type(self).__name__}, expected tensors of the head")
            if weights[key].shape != parameters[own].shape:
                shapes = list(weights[key].shape), list(parameters[own].shape)
                raise ValueError(f"{name} has {key} of shape {shapes[0]}, expected {shapes[1]}")
            updates.append(Update(parameters[own].data, weights[key], parameters[own]))
        return updates

    @property
    def feature_size(self) -> int:
        """The elements of a row of `HeadOutput.hidden`."""
        size: int = self.config.hidden_size
        return size

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the head's own weights, which may be offloaded."""
        own = weights_of(self)
        if self.is_given:  # what was quantized is a copy
            own = {name: part for name, part in own.items() if self.storage.weights and name.endswith(LARGE)}
        return {name: tensor for name, tensor in own.items() if name not in self._of_target}

    def sleep(self, level: int) -> None:
        """Sleep as `PagedModel.sleep` does, after the target."""
        self._device = self.pools.device
        self.resize_pools(0)
        del self._parts
        unfuse_quantized(self)
        if level == 2 or self._device.type != "cpu":
            offload(self.weights, drop=level == 2)

    @torch.no_grad()
    def wake(self, level: int, num_pages: int) -> None:
        """Wake as `PagedModel.wake` does, after the target."""
        if level == 2 or self._device.type != "cpu":
            onload(self.weights, self._device, dropped=level == 2)
        self._parts = self._make_parts()
        self.resize_pools(num_pages)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Recompute, in place, what was made of weights, its own or the target's."""
        write_over(self._parts, self._make_parts())

    def _layer(self, index: int, module: Any, heads: HeadLayout) -> Layer:
        norm = getattr(module, "input_layernorm", None)
        return Layer(
            self._attention(index, module.self_attn, heads),
            rms_norm_of(module.post_attention_layernorm),
            gated_mlp(module.mlp),
            input_norm=None if norm is None else rms_norm_of(norm),
        )

    def _attention(self, index: int, projections: Any, heads: HeadLayout) -> Mixer:
        if hasattr(projections, "kv_a_proj_with_mqa"):
            return latent_attention(projections, heads.rope)
        kv_heads = projections.k_proj.out_features // heads.dim
        q_norm, k_norm = (getattr(projections, norm, None) for norm in ("q_norm", "k_norm"))
        return Attention(
            qkv=heads.qkv(kv_heads, projections.q_proj, projections.k_proj, projections.v_proj),
            out=heads.out(projections.o_proj),
            rotations=heads.rotations,
            kv_heads=kv_heads,
            head_dim=heads.size,
            q_norm=None if q_norm is None else heads.norm(rms_norm_of(q_norm)),
            k_norm=None if k_norm is None else heads.norm(rms_norm_of(k_norm)),
            window=window_of(self.config, index),
            scale=heads.dim**-0.5,
        )

    def _hold(self, pools: KvPools) -> None:
        self.pools = pools
        attach_caches(mixers_of(self._parts.layers), pools)

    def resize_pools(self, num_pages: int) -> None:
        """Replace the pools by empty ones of another number of pages."""
        self._hold(self.pools.with_pages(num_pages))

    def join(self, features: Tensor) -> Tensor:
        """Return features [..., H] of the target's states, n of them, concatenated."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        features: Features,
        positions: Tensor,
        batch: PagedBatch,
        only: Tensor | None = None,
        *,
        depth: int = 0,
    ) -> HeadOutput:
        """Run all layers of the head.

        Args:
            tokens: [B, Q].
            features: of all B * Q rows.
            positions: [B, Q], for rotation.
            batch: where the rows' KV is.
            only: [R], the rows among B * Q that have an output; the KV of all is written. None: all.
            depth: the rows' depth below the roots of their trees; committed rows have 0.
        """
        return self.leave(*self.pass_layers(*self.enter(tokens, features, positions), positions, batch, only))

    def enter(self, tokens: Tensor, features: Features, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer [B * Q, ...], normalized if it has an input norm, and the residual."""
        raise NotImplementedError

    def prefill(self, tokens: Tensor, features: Features, positions: Tensor, batch: PagedBatch) -> None:
        """Write the rows' KV."""
        normed, state = self.enter(tokens, features, positions)
        layers = self._parts.layers[: self._last_mixer + 1]
        for before, layer in pairwise(layers):
            normed, state = layer.enter(*before(normed, state, positions, batch))
        layers[-1].write_cache(normed, state, positions, batch)

    @property
    def _last_mixer(self) -> int:
        """The last layer with a mixer: after it, rows do not depend on others."""
        return max(index for index, layer in enumerate(self._parts.layers) if layer.mixers)

    def pass_layers(
        self, normed: Tensor, state: Tensor, positions: Tensor, batch: PagedBatch, only: Tensor | None
    ) -> tuple[LayerOutput, Tensor | None]:
        """Run all layers, and return the input of the final norm: the last layer's output and the residual."""
        first, *others = self._parts.layers
        last = self._last_mixer
        x, residual = first(normed, state, positions, batch, only=None if last else only)
        for index, layer in enumerate(others, 1):
            normed, state = layer.enter(x, residual)
            x, residual = layer(normed, state, positions, batch, only=only if index == last else None)
        return x, residual

    def leave(self, x: LayerOutput, residual: Tensor | None) -> HeadOutput:
        """Return the output of the last layer after the final norm."""
        normed, hidden = self._parts.norm.add_norm(x, residual)
        return HeadOutput(normed if self.passes_normed_state else hidden, normed)

    def step(
        self, depth: int, tokens: Tensor, positions: Tensor, features: Features, rows: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        """Run nodes [B, k], which are `depth` below the root, and return their logits and hidden states."""
        hidden, normed = self(tokens, features, positions, rows, depth=depth)
        return self.logits(normed), hidden

    def logits(self, normed: Tensor) -> Any:
        """Return [..., Vd] for [..., H], or `DividedLogits`, as `divide_logits` says."""
        head: Linear | LMHead = self._parts.head
        return head.divided(normed) if self._divides_logits else head(normed)

    def divide_logits(self) -> None:
        """Let `logits` be this rank's columns if the target's LM head, which it shares, is divided among ranks."""
        self._divides_logits = True
