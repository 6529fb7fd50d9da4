"""Block drafters over a target's states: DFlash, DFlash2, DSpark and JetSpec, in their published formats.

The target's states of committed tokens are injected: projected once, and from there to keys and values of every layer.
A block of rows, the root and mask tokens after it, then attends to all of them and to itself, and each row predicts the
token of one position. `docs/heads.md` says where each fact is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..language_model import LanguageModel
from ..layers.attention import Attention
from ..layers.decoder_layer import Layer
from ..layers.embedding import Embedding, LMHead
from ..layers.fp8 import QuantizedActivations
from ..layers.head_layout import HeadLayout
from ..layers.linear import Linear, linear_of
from ..layers.norm import Norm, RMSNorm, RMSNormQuant, rms_norm_of
from ..layers.outputs import LayerOutput, combined
from ..layers.paged_batch import PagedBatch
from ..layers.quantized import QuantizedWeight
from ..weights.checkpoint import DFLASH, DFLASH2, DSPARK
from .base import DraftHead, HeadLayer, Parts
from .block_config import BlockConfig


class Transitions(NamedTuple):
    """Arguments of `expand_trellis` that say how candidates of neighboring positions go together."""

    predecessors: Tensor | None = None
    successors: Tensor | None = None
    gates: Tensor | None = None
    root_tokens: Tensor | None = None


# --- parameters


class ConvParameters(nn.Module):
    """The parameters of a convolution over a block (DFlash2)."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)


class MarkovParameters(nn.Module):
    """The parameters of DSpark's serial head."""

    def __init__(self, kind: str, rank: int, hidden: int, vocab: int, draft_vocab: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)


class SelectorParameters(nn.Module):
    """The parameters of DFlash2's scores of neighboring candidates."""

    def __init__(self, rank: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)


class ConfidenceParameters(nn.Module):
    """The parameters of DSpark's estimate of acceptance."""

    def __init__(self, inputs: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1, bias=bias)


# --- layers


@dataclass(frozen=True)
class GroupedConv:
    """A causal convolution over the rows of a block, with a kernel of its own for each row.

    The kernel of a channel is the sum of a fixed one and of one for the channel's group, which a projection of the row
    yields. It is applied before a part of a layer, and with other coefficients after it.
    """

    base: Tensor  # [2, taps, H]
    projection: Linear
    group: int
    block_size: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part's input for rows [B * Q, H], and the coefficients [B * Q, taps, groups] for its output."""
        _, taps, hidden = self.base.shape
        delta = self.projection(x).view(len(x), 2, taps, hidden // self.group)
        return self.convolve(x, delta[:, 0], 0), delta[:, 1]

    def finish(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the part's output for rows [B * Q, H]."""
        return self.convolve(x, delta, 1)

    def convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """Return sum over taps of (base + delta) * the row that many rows before, within each block."""
        taps, hidden = self.base.shape[1:]
        kernel = self.base[side] + delta.repeat_interleave(self.group, dim=-1)
        blocks, kernel = x.view(-1, self.block_size, hidden), kernel.view(-1, self.block_size, taps, hidden)
        out = kernel[:, :, 0] * blocks
        for tap in range(1, min(taps, self.block_size)):
            out[:, tap:] += kernel[:, tap:, tap] * blocks[:, :-tap]
        return out.flatten(0, 1)


@dataclass
class ConvLayer(Layer):
    """A layer with a convolution around its attention and one around its feed-forward part (DFlash2)."""

    attention_conv: GroupedConv = field(kw_only=True)
    mlp_conv: GroupedConv = field(kw_only=True)

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
        assert only is None and self.pre_feed_forward_norm is not None  # a block is run whole
        normed, delta = self.attention_conv(normed)
        mixed = self.attention_conv.finish(self.mixer.out(self.mixer(normed, positions, batch)), delta)
        normed, residual = self.pre_feed_forward_norm.add_norm(mixed, residual, residual_out)
        normed, delta = self.mlp_conv(normed)
        output, _ = self.feed_forward(normed, None)
        return self.mlp_conv.finish(combined(output), delta), residual


class Markov(NamedTuple):
    """DSpark's serial head: scores of a token by the one before it.

    A vanilla head's are products of two factors; a gated one scales the predecessor's by the position's state; an RNN
    carries a state along the path, so that it goes along one path at a time.
    """

    kind: str
    w1: Tensor  # [V, r]
    w2: Linear  # [Vd, r]
    joint: Linear | None  # gate_proj or joint_proj

    def start(self, like: Tensor) -> Tensor:
        """Return the state at the root of each row [B, ...] of `like`, [B, r]."""
        return like.new_zeros(len(like), self.w1.shape[1])

    def bias(self, before: Tensor, states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to logits [B, Vd] after tokens `before` [B], and the next state.

        `states` [B, H] are the drafter's of the position.
        """
        embedded = self.w1[before.long()]
        if self.joint is None:
            return self.w2(embedded), state
        if self.kind == "gated":
            return self.w2(self.gated(embedded, states)), state
        gate, candidate, output = self.joint(torch.cat([state, embedded, states], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return self.w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()

    def gated(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return factors [..., r] of predecessors, scaled by the gate of states [..., H]."""
        assert self.joint is not None
        return self.joint(torch.cat([states, embedded], -1)).sigmoid() * embedded


class Selector(NamedTuple):
    """DFlash2's scores of neighboring candidates: products of two factors and a projection of the position's state."""

    predecessors: Tensor  # [V, r]
    successors: Tensor  # [V, r]
    projection: Linear


class Injection(NamedTuple):
    """Writes keys and values of all layers alone, by one projection, a copy of theirs.

    The kernel that writes them asks for one query head, which is each layer's last.
    """

    projection: Linear
    attentions: list[Attention]

    @classmethod
    def of(cls, attentions: list[Attention]) -> Injection:
        parts = [last_query_keys_values(attention) for attention in attentions]
        biases = [part.bias for part in parts if part.bias is not None]
        weights = [part.weight for part in parts]
        whole, *others = weights
        if isinstance(whole, Tensor):
            whole = torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
        else:
            for weight in others:
                assert isinstance(weight, QuantizedWeight)
                both = whole.concatenated(weight)
                assert both is not None  # all layers are stored alike
                whole = both
        return cls(Linear(whole, torch.cat(biases) if biases else None), attentions)

    def __call__(self, x: Tensor | QuantizedActivations, positions: Tensor, batch: PagedBatch) -> None:
        """Write the rows [T, H] at positions [B, Q] or [M]."""
        dim = self.attentions[0].head_dim
        of_layers = self.projection(x).view(*positions.shape, len(self.attentions), -1, dim).unbind(-3)
        for part, kv in zip(self.attentions, of_layers, strict=True):
            batch.rope_and_write(kv, part.rotations, positions, part.cache, q_norm=part.q_norm, k_norm=part.k_norm)


def last_query_keys_values(attention: Attention) -> Linear:
    """Return the projection of a layer's last query head, its keys and its values, which shares their weights."""
    whole = attention.qkv
    assert isinstance(whole, Linear)
    weight, rows = whole.weight, whole.weight.shape[0]
    begin = rows - (2 * attention.kv_heads + 1) * attention.head_dim
    part = weight[begin:] if isinstance(weight, Tensor) else weight.slice_rows(begin, rows)
    return Linear(part, None if whole.bias is None else whole.bias[begin:])


class BlockParts(NamedTuple):
    embedding: Embedding
    fc: Linear
    hidden_norm: Norm
    layers: list[Layer]
    injection: Injection
    norm: RMSNorm
    head: LMHead
    markov: Markov | None
    selector: Selector | None
    confidence: Linear | None


# --- heads


class BlockHead(DraftHead):
    """A block drafter. Its `embed_tokens` and `lm_head` are its own or the target's."""

    block_kind: ClassVar[str]
    has_own_width = True
    _parts: BlockParts

    def __init__(
        self, config: LlamaConfig, block: BlockConfig, parts: Parts, draft_vocab: int, has_confidence: bool = False
    ) -> None:
        super().__init__(config)
        self.block, hidden, eps = block, config.hidden_size, config.rms_norm_eps
        width = getattr(config, "target_hidden_size", None) or hidden
        self.fc = nn.Linear(len(block.feature_layers) * width, hidden, bias=False)
        self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, parts, hidden, "input_layernorm") for _ in range(config.num_hidden_layers)
        )
        layer: Any
        for layer in self.layers:
            if block.has_sinks:
                layer.self_attn.attention_sink_bias = nn.Parameter(torch.empty(config.num_attention_heads))
            for name in ("attention_conv", "mlp_conv") if block.conv_taps else ():
                layer.add_module(name, ConvParameters(hidden, block.conv_taps, block.conv_group))
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        self.markov_head = self.candidate_selector = self.confidence_head = None
        if block.markov:
            self.markov_head = MarkovParameters(block.markov, block.rank, hidden, config.vocab_size, draft_vocab)
        if block.top_k:
            self.candidate_selector = SelectorParameters(block.rank, hidden, config.vocab_size)
        if has_confidence:
            self.confidence_head = ConfidenceParameters(hidden + bool(block.with_markov) * block.rank, bias=True)

    @classmethod
    def made_for(cls, config: LlamaConfig, tensors: Mapping[str, Tensor], draft_vocab: int, num_layers: int) -> Any:
        block = cls.block_config(config, num_layers)
        parts = Parts.of({key: tensor for key, tensor in tensors.items() if key.startswith("layers.")})
        if parts.num_layers != config.num_hidden_layers:
            raise ValueError(
                f"{cls.name} head: num_hidden_layers is {config.num_hidden_layers}, "
                f"expected the {parts.num_layers} of the tensors"
            )
        if (weight := tensors.get("confidence_head.proj.weight")) is not None:
            block = replace(block, with_markov=cls.reads_markov(block, config.hidden_size, weight))
        return cls(config, block, parts, draft_vocab, any(key.startswith("confidence_head.") for key in tensors))

    @classmethod
    def reads_markov(cls, block: BlockConfig, hidden: int, weight: Tensor) -> bool:
        """Return whether a confidence head with this weight reads the Markov embedding next to states.

        Engines differ in the default of the config's entry: the weight's width says what the head was trained for.

        Raises:
            ValueError: the width is neither, or not what the config says.
        """
        columns, widths = weight.shape[-1], {hidden: False, hidden + block.rank: True}
        if columns not in widths:
            raise ValueError(
                f"{cls.name} head: confidence_head.proj.weight has {columns} columns, "
                f"expected {hidden}, or {hidden + block.rank} with the Markov embedding"
            )
        if block.with_markov not in (None, widths[columns]):
            raise ValueError(
                f"{cls.name} head: confidence_head_with_markov is {block.with_markov}, "
                f"expected {widths[columns]} for a confidence_head.proj.weight of {columns} columns"
            )
        return widths[columns]

    @classmethod
    def block_config(cls, config: LlamaConfig, num_target_layers: int) -> BlockConfig:
        """Return what a config says of blocks over a target with this number of layers."""
        return BlockConfig.of(config, num_target_layers, f"{cls.name} head", cls.block_kind)

    def prepare(self, target: LanguageModel, num_pages: int, page_size: int) -> None:
        if not 0 <= self.block.mask_token < self.embed_tokens.num_embeddings:
            raise ValueError(
                f"{self.name} head: mask_token_id is {self.block.mask_token}, "
                f"expected 0 to {self.embed_tokens.num_embeddings - 1} (rows of the embedding)"
            )
        if not self.is_given:
            self._share_copies(target)
        masks = 1, self.block.block_size - 1
        self._mask_tokens = torch.full(
            masks, self.block.mask_token, dtype=torch.int32, device=target.embedding.weight.device
        )
        super().prepare(target, num_pages, page_size)

    def _share_copies(self, target: LanguageModel) -> None:
        """Take the target's embedding and LM head in place of copies that the checkpoint has of them."""
        for name, module in (("embed_tokens", target.embedding), ("lm_head", target.lm_head)):
            own, theirs = getattr(self, name).weight, getattr(module, "weight", None)
            if not isinstance(theirs, Tensor) or own is theirs or own.shape != theirs.shape:
                continue
            if isinstance(module, nn.Module) and torch.equal(own.to(theirs), theirs):
                setattr(self, name, module)

    def _make_parts(self) -> BlockParts:
        layers = self._make_layers()
        module: Any
        for layer, window, module in zip(layers, self.block.windows, self.layers, strict=True):
            attention: Any = layer.mixer
            attention.window = window
            if self.block.has_sinks:
                attention.sinks = module.self_attn.attention_sink_bias.detach().float()
        markov, selector = self.markov_head, self.candidate_selector
        attentions: list[Any] = [layer.mixer for layer in layers]
        if not all(isinstance(attention.qkv, Linear) for attention in attentions):
            stored = self.storage.weights
            raise ValueError(
                f"{self.name} head: draft_weights is {stored!r}, expected None with partial or interleaved RoPE"
            )
        injection = Injection.of(attentions)
        hidden_norm = RMSNormQuant.before(rms_norm_of(self.hidden_norm), injection.projection)
        assert hidden_norm is not None
        return BlockParts(
            embedding=Embedding(self.embed_tokens.weight.detach(), unless_one(self.block.input_scale)),
            fc=linear_of(self.fc),
            hidden_norm=hidden_norm,
            layers=layers,
            injection=injection,
            norm=rms_norm_of(self.norm),
            head=LMHead(self._lm_head(), unless_one(self.block.logit_scale), self.block.soft_cap),
            markov=None if markov is None else markov_of(self.block.markov, markov),
            selector=None if selector is None else selector_of(selector),
            confidence=None if self.confidence_head is None else linear_of(self.confidence_head.proj),
        )

    def _layer(self, index: int, module: Any, heads: HeadLayout) -> Layer:
        layer = super()._layer(index, module, heads)
        if not self.block.conv_taps:
            return layer

        def conv(parameters: ConvParameters) -> GroupedConv:
            kernel, projection = parameters.base_kernel.detach(), linear_of(parameters.kernel_projection)
            return GroupedConv(kernel, projection, self.block.conv_group, self.block.block_size)

        # Convolutions read what norms return, which does not come quantized then.
        return ConvLayer(
            layer.mixer,
            rms_norm_of(module.post_attention_layernorm),
            layer.feed_forward,
            input_norm=rms_norm_of(module.input_layernorm),
            attention_conv=conv(module.attention_conv),
            mlp_conv=conv(module.mlp_conv),
        )

    def inject(self, features: Tensor, positions: Tensor, batch: PagedBatch) -> None:
        """Write the KV of committed rows, from their features [T, n * H]."""
        joined, _ = self._parts.hidden_norm.add_norm(self._parts.fc(features), None)
        self._parts.injection(joined, positions, batch)

    @property
    def rotates_neighbors(self) -> bool:
        return self.block.interleaved

    @property
    def scratch_rows(self) -> int:  # type: ignore[override]
        return self.block.block_size

    def _write_measured(self, tokens: Tensor, features: Tensor, rows: PagedBatch) -> None:
        batch, count = tokens.shape
        positions = torch.arange(count + self.scratch_rows, dtype=torch.int32, device=tokens.device).repeat(batch, 1)
        self.inject(features, positions[:, :count].contiguous(), rows)
        after = rows._replace(prefix_lens=torch.full_like(rows.prefix_lens, count), tail_len=self.scratch_rows)
        self.run_block(tokens[:, -1].contiguous(), positions[:, count:].contiguous(), after, self.whole_mask(batch))

    def block_tokens(self, roots: Tensor) -> Tensor:
        """Return the tokens of blocks [B, Q] after roots [B]."""
        return torch.cat([roots[:, None], self._mask_tokens.expand(len(roots), -1)], 1)

    def whole_mask(self, batch: int) -> Tensor:
        """Return the mask [B, Q, 1] of blocks whose rows see all of them."""
        rows = self.block.block_size
        return torch.full((batch, rows, 1), (1 << rows) - 1, dtype=torch.int64, device=self._mask_tokens.device)

    def run_block(self, roots: Tensor, positions: Tensor, batch: PagedBatch, whole_mask: Tensor) -> Tensor:
        """Return the states [B, D, H] that predict the tokens after roots [B].

        Args:
            roots: the last token of each text.
            positions: [B, Q], of the block's rows.
            batch: a causal chain of Q rows.
            whole_mask: of layers that are not causal, from `whole_mask`.
        """
        parts, rows = self._parts, positions.shape[1]
        whole = batch._replace(mask=whole_mask)
        x: Any = parts.embedding(self.block_tokens(roots).flatten())
        residual: Tensor | None = None
        for layer, causal in zip(parts.layers, self.block.causal, strict=True):
            normed, state = layer.enter(x, residual)
            x, residual = layer(normed, state, positions, batch if causal else whole)
        normed, _ = parts.norm.add_norm(x, residual)
        return normed.view(*positions.shape, -1)[:, rows - self.block.depth :]

    def logits(self, normed: Tensor) -> Tensor:
        return self._parts.head(normed)

    @property
    def markov(self) -> Markov | None:
        """The serial head; None: positions are predicted by themselves."""
        return self._parts.markov

    @property
    def has_confidence(self) -> bool:
        return self._parts.confidence is not None

    def confidence(self, states: Tensor, roots: Tensor, tokens: Tensor) -> Tensor:
        """Return log P(token d of a chain is accepted, given that those before are) [B, D].

        It depends on the tokens before d, of the chain `tokens` [B, D] after `roots` [B], and not on token d.
        """
        confidence, markov = self._parts.confidence, self._parts.markov
        assert confidence is not None and markov is not None
        rows = [states]
        if self.block.with_markov:
            before = torch.cat([roots[:, None], tokens[:, :-1]], 1)
            rows.append(markov.w1[before.long()])
        return nn.functional.logsigmoid(confidence(torch.cat(rows, -1).flatten(0, 1)).float()).view(tokens.shape)

    def transitions(self, states: Tensor, ids: Tensor, roots: Tensor) -> Transitions:
        """Return how candidates `ids` [B, D, K], draft ids, go together, for states [B, D, H] and roots [B]."""
        markov, selector = self._parts.markov, self._parts.selector
        if selector is not None:
            gates = selector.projection(states.flatten(0, 1)).view(*states.shape[:2], -1)
            return Transitions(selector.predecessors, selector.successors, gates, roots)
        if markov is None:
            return Transitions()
        assert markov.kind != "rnn" and isinstance(markov.w2.weight, Tensor)
        if markov.kind == "vanilla":
            return Transitions(markov.w1, markov.w2.weight, None, roots)
        tokens = ids if self.id_map is None else self.id_map[ids.long()]
        before = torch.cat([roots[:, None, None].expand(-1, 1, ids.shape[2]), tokens[:, :-1]], 1)
        embedded = markov.w1[before.long()]
        of_positions = states[:, :, None].expand(-1, -1, ids.shape[2], -1)
        return Transitions(markov.gated(embedded, of_positions), markov.w2.weight)


def unless_one(factor: float) -> float | None:
    """Return a factor; None for 1."""
    return None if factor == 1 else factor


def markov_of(kind: str, module: MarkovParameters) -> Markov:
    """Return the serial head that shares a module's weights."""
    joint = getattr(module, "gate_proj", None) or getattr(module, "joint_proj", None)
    return Markov(
        kind, module.markov_w1.weight.detach(), linear_of(module.markov_w2), None if joint is None else linear_of(joint)
    )


def selector_of(module: SelectorParameters) -> Selector:
    """Return the selector that shares a module's weights."""
    return Selector(
        module.predecessor_codebook.detach(), module.successor_codebook.detach(), linear_of(module.hidden_projection)
    )


class DFlashHead(BlockHead):
    """A drafter of DFlash or, with causal blocks, of JetSpec."""

    kind, name, block_kind = DFLASH, "DFlash", "dflash"


class DFlash2Head(BlockHead):
    """A drafter of DFlash2: convolutions along the block, and scores of neighboring candidates."""

    kind, name, block_kind = DFLASH2, "DFlash2", "dflash2"


class DSparkHead(BlockHead):
    """A drafter of DSpark: the root's row predicts too, and a serial head scores each token by the one before it."""

    kind, name, block_kind = DSPARK, "DSpark", "dspark"
