"""A decoder layer: a mixer (attention, mostly) and a feed-forward part around the residual stream.

Query, key and value projections are one linear, and so are gate and up. Between GEMMs a layer with attention takes four
launches: a norm fused with the residual addition, RoPE fused with the KV write, attention, and a second norm. A fifth,
SwiGLU, is added for batches that `small_m_gemm` does not take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .mixer import Mixer
from .mlp import MLP, FeedForward, GatedMLP
from .norm import Norm, PostNorm, RMSNormQuant, Scale, post_normed
from .outputs import LayerOutput, PartialSum, added, combined
from .paged_batch import PagedBatch


@dataclass
class Layer:
    """A layer with a norm before its mixer and one before its feed-forward part.

    Rows are [T, H], those of all requests together. The output of either part may pass a norm or a scale before it is
    added to the residual stream. A family whose layers are wired in another way has a class of its own with these
    methods and `mixer`.
    """

    mixer: Mixer
    pre_feed_forward_norm: Norm | None  # None in a `ParallelLayer` alone
    feed_forward: FeedForward
    input_norm: Norm | None = None  # None: the caller has normalized what enters
    post_attention_norm: PostNorm | None = None
    post_feed_forward_norm: PostNorm | None = None

    def __post_init__(self) -> None:
        if type(self) is not Layer:  # others may read the output of a norm in two places
            return
        if getattr(self.mixer, "gate", None) is None:
            self.input_norm = RMSNormQuant.before(self.input_norm, getattr(self.mixer, "qkv", None))
        if isinstance(self.feed_forward, GatedMLP):
            self.pre_feed_forward_norm = RMSNormQuant.before(self.pre_feed_forward_norm, self.feed_forward.gate_up)
        elif isinstance(self.feed_forward, MLP):
            self.pre_feed_forward_norm = RMSNormQuant.before(self.pre_feed_forward_norm, self.feed_forward.up)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's mixers, in the order in which the model's caches are given to them."""
        return (self.mixer,)

    def enter(self, x: LayerOutput, residual: Tensor | None) -> tuple[Any, Tensor]:
        """Return the layer's input from the previous layer's output: x + residual normalized, and x + residual.

        The sum is written over the residual; without one it is x.
        """
        assert self.input_norm is not None
        return self.input_norm.add_norm(x, residual)

    def write_cache(self, normed: Tensor, residual: Tensor, positions: Tensor, batch: PagedBatch) -> None:
        """Update the caches of the mixers, without the layer's output; `residual` stays as it is."""
        for mixer in self.mixers:
            mixer.write_cache(normed, positions, batch)

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
        """Return (x, residual) for the next norm to add, or (sum, None) where they are added already.

        `residual` is written over, unless `residual_out` takes the sum in its place. With `only` [R], the outputs are
        those of these rows.
        """
        mixed = self.mixer(normed, positions, batch)
        if only is not None:
            mixed, residual = mixed[only], residual[only]
        assert self.pre_feed_forward_norm is not None
        out, post_norm = self.mixer.out, self.post_attention_norm
        if residual_out is None and post_norm is None:
            normed, residual = self.pre_feed_forward_norm.add_norm(*out.add_to(residual, mixed))
        else:
            x = post_normed(post_norm, out.unreduced(mixed))
            normed, residual = self.pre_feed_forward_norm.add_norm(x, residual, residual_out)
        return self.feed_forward_and_norm(normed, residual)

    def feed_forward_and_norm(self, normed: Tensor, residual: Tensor) -> tuple[LayerOutput, Tensor | None]:
        """Run the feed-forward part and the norm after it, if there is one."""
        if self.post_feed_forward_norm is None:
            return self.feed_forward(normed, residual)
        output, _ = self.feed_forward(normed, None)
        return post_normed(self.post_feed_forward_norm, output), residual


@dataclass
class ParallelLayer(Layer):
    """A layer whose mixer and feed-forward part read the same input, as in GPT-J.

    Both are added to the residual stream. The feed-forward part reads the output of the input norm, or of
    `pre_feed_forward_norm` if there is one.
    """

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
        mixed = self.mixer(normed, positions, batch)
        if only is not None:
            mixed, normed, residual = mixed[only], normed[only], residual[only]
        if self.pre_feed_forward_norm is not None:
            normed = self.pre_feed_forward_norm(residual)
        if residual_out is not None:
            residual = residual_out.copy_(residual)
        x, rest = self.mixer.out.add_to(residual, mixed)
        if isinstance(x, PartialSum):
            output, rest = self.feed_forward(normed, rest)
            return added(x, output), rest
        return self.feed_forward(normed, x if rest is None else rest.add_(x))


@dataclass
class TwoMixerLayer(Layer):
    """A layer with two mixers, whose inputs and outputs are scaled and whose outputs are added, as in Falcon-H1."""

    second: Mixer = field(kw_only=True)
    in_scales: tuple[float, float] = (1.0, 1.0)
    out_scales: tuple[float, float] = (1.0, 1.0)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return self.mixer, self.second

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
        outputs = []
        for mixer, in_scale, out_scale in zip(self.mixers, self.in_scales, self.out_scales, strict=True):
            mixed = mixer(scaled(normed, in_scale), positions, batch)
            output = mixer.out.unreduced(mixed if only is None else mixed[only])
            outputs.append(post_normed(None if out_scale == 1.0 else Scale(out_scale), output))
        residual = residual if only is None else residual[only]
        assert self.pre_feed_forward_norm is not None
        normed, residual = self.pre_feed_forward_norm.add_norm(added(*outputs), residual, residual_out)
        return self.feed_forward_and_norm(normed, residual)


@dataclass
class ShortcutLayer(Layer):
    """Two layers, and experts that read what the first one's MLP reads, as in LongCat-Flash.

    The experts' output is added after the second layer.
    """

    second: Layer = field(kw_only=True)
    experts: FeedForward = field(kw_only=True)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return self.mixer, self.second.mixer

    def write_cache(self, normed: Tensor, residual: Tensor, positions: Tensor, batch: PagedBatch) -> None:
        middle, residual = self.attend(normed, residual, positions, batch, torch.empty_like(residual))
        normed, _ = self.second.enter(*self.feed_forward(middle, residual))
        self.second.mixer.write_cache(normed, positions, batch)

    def attend(
        self, normed: Tensor, residual: Tensor, positions: Tensor, batch: PagedBatch, residual_out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what the first MLP and the experts read, and the residual stream."""
        assert self.pre_feed_forward_norm is not None
        mixed = self.mixer(normed, positions, batch)
        return self.pre_feed_forward_norm.add_norm(self.mixer.out(mixed), residual, residual_out)

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
        middle, residual = self.attend(normed, residual, positions, batch, residual_out)
        shortcut = combined(self.experts(middle, None)[0])
        normed, residual = self.second.enter(*self.feed_forward(middle, residual))
        x, rest = self.second(normed, residual, positions, batch, only=only)
        return combined(x) + (shortcut if only is None else shortcut[only]), rest


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor; x itself for 1."""
    return x if factor == 1.0 else x * factor


@dataclass
class MixerLayer(Layer):
    """A layer without a feed-forward part, as in Nemotron-H."""

    pre_feed_forward_norm: Norm | None = field(init=False, default=None)
    feed_forward: FeedForward = field(init=False)

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
        mixed = self.mixer(normed, positions, batch)
        if only is not None:
            mixed, residual = mixed[only], residual[only]
        if residual_out is not None:
            residual = residual_out.copy_(residual)
        return self.mixer.out.add_to(residual, mixed)


@dataclass
class FeedForwardLayer(Layer):
    """A layer without a mixer, as in Nemotron-H."""

    mixer: Mixer = field(init=False)
    pre_feed_forward_norm: Norm | None = field(init=False, default=None)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return ()

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
        if only is not None:
            normed, residual = normed[only], residual[only]
        if residual_out is not None:
            residual = residual_out.copy_(residual)
        return self.feed_forward(normed, residual)
