"""Mixers that keep a recurrent state: gated delta nets, Kimi delta attention, Mamba 2 and short convolutions.

Each is a projection, a causal convolution over a few tokens, a linear recurrence in float32 (`tree_recurrence`) and a
gate. The ops work on chains and trees alike, from the state of a slot and what it recorded of its last tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...ops import compute_gates, gated_rms_norm, tree_conv1d, tree_recurrence
from ..state_cache import ConvSpec, LayerState, RecurrenceSpec, StateSpec
from .linear import Linear, Projections, fused, linear_of
from .paged_batch import PagedBatch, Sequences
from .reduction import LOCAL, Reduction

NO_LIMIT = 0.0, float("inf")  # of time steps, which are never negative


class GatedRMSNorm(NamedTuple):
    """RMSNorm of each group of a row's elements and a gate, in float32."""

    weight: Tensor | None  # [D], or one for all groups; None: the gate alone, a SiLU
    eps: float = 0.0
    groups: int = 1  # of rows [T, D]
    gates_first: bool = False  # the gate multiplies what is normalized, not the result
    activation: str = "silu"  # of the gate, or "sigmoid"
    reduction: Reduction = LOCAL  # averages mean squares over the ranks that divide rows, of one group

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x's shape in the gate's dtype, from x [T, D], or [T, groups, D / groups], and gate [T, D]."""
        if self.weight is None:
            return (x * functional.silu(gate.float())).to(gate.dtype)
        if self.reduction is not LOCAL:
            return self._reduced(x.float(), functional.silu(gate.float())).to(gate.dtype)
        grouped = x if x.dim() == 3 else x.view(len(x), self.groups, -1)
        out: Tensor = gated_rms_norm(
            grouped,
            gate.view(grouped.shape),
            self.weight,
            self.eps,
            gates_first=self.gates_first,
            activation=self.activation,
        )
        return out.view(x.shape)

    def _reduced(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x normalized and multiplied by a gate, both [T, D] float32, if the ranks divide rows."""
        assert self.weight is not None and self.groups == 1 and self.activation == "silu"
        x = x * gate if self.gates_first else x
        mean = self.reduction.sum(x.square().mean(-1, keepdim=True)) / self.reduction.size
        out = x * torch.rsqrt(mean + self.eps) * self.weight.float()
        return out if self.gates_first else out * gate


class Conv(NamedTuple):
    """A causal convolution of each channel over the tokens."""

    weight: Tensor  # [C, K], of the row itself last
    bias: Tensor | None = None  # [C]
    activation: str | None = None  # None or "silu"

    @classmethod
    def of(cls, module: Any, activation: str | None = None) -> Conv:
        """Return the convolution of an `nn.Conv1d`, whose tensors it shares."""
        return cls(module.weight.detach().squeeze(1), None if module.bias is None else module.bias.detach(), activation)

    @property
    def spec(self) -> ConvSpec:
        channels, width = self.weight.shape
        return ConvSpec(channels, width, self.weight.dtype)

    def __call__(self, x: Tensor, cache: LayerState, rows: Sequences) -> Tensor:
        """Return [M, C] from the inputs x [M, C], which the layer keeps."""
        out: Tensor = tree_conv1d(
            x,
            self.weight,
            self.bias,
            cache.window,
            cache.inputs,
            cache.paths,
            rows.prefix_lens,
            rows.cu_seqlens,
            mask=rows.mask,
            slots=rows.slots,
            activation=self.activation,
            status=rows.status,
        )
        return out


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    cache: LayerState,
    rows: Sequences,
    **options: Any,
) -> Tensor:
    """Run `tree_recurrence` on a layer's state."""
    assert cache.records is not None
    out: Tensor = tree_recurrence(
        q,
        k,
        v,
        decay,
        beta,
        cache.state,
        cache.records,
        cache.paths,
        rows.prefix_lens,
        rows.cu_seqlens,
        mask=rows.mask,
        slots=rows.slots,
        status=rows.status,
        **options,
    )
    return out


def heads_of(rows: Tensor, count: int) -> Tensor:
    """Return rows [T, D] as [T, count, D / count]."""
    return rows.view(len(rows), count, -1)


@dataclass
class RecurrentMixer:
    """The base of recurrent mixers: `attach_caches` sets `cache` once the model has its states."""

    conv: Conv
    out: Linear
    cache: LayerState = field(init=False)

    @property
    def recurrence_spec(self) -> RecurrenceSpec | None:
        """The matrices that the mixer keeps."""
        return None

    @property
    def cache_spec(self) -> StateSpec:
        return StateSpec(self.conv.spec, self.recurrence_spec)

    def write_cache(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Update the state; nothing is saved without the outputs."""
        return self(x, positions, batch)

    def __call__(self, x: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Return the outputs [T, in of `out`] of normalized rows x [T, H], before the projection `out`."""
        return self.mix(x, batch.as_sequences(positions))

    def mix(self, x: Tensor, rows: Sequences) -> Tensor:
        """Return the outputs, and update the state."""
        raise NotImplementedError


@dataclass
class ShortConv(RecurrentMixer):
    """c * conv(b * x) of three projections b, c and x, as in LFM2."""

    in_proj: Linear  # [3 * H, H]

    def mix(self, x: Tensor, rows: Sequences) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, dim=-1)
        return after * self.conv(before * x, self.cache, rows)


@dataclass
class GatedDeltaNet(RecurrentMixer):
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next.

    Queries, keys and values pass one convolution; queries and keys are L2-normalized. Value heads share key heads.
    """

    # Queries, keys and values; gates; logits of beta; what the decay depends on: [2 * keys + values, H], [values, H],
    # [value_heads, H] twice.
    in_proj: Projections
    decay: Tensor  # [value_heads] float32, -exp(A_log)
    dt_bias: Tensor  # [value_heads]
    norm: GatedRMSNorm  # of each head
    sizes: RecurrenceSpec

    EPS = 1e-6  # of the L2 norms

    @property
    def recurrence_spec(self) -> RecurrenceSpec:
        return self.sizes

    def mix(self, x: Tensor, rows: Sequences) -> Tensor:
        sizes = self.sizes
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        mixed, gate, beta_logits, steps = self.in_proj(x)
        q, k, v = torch.split(self.conv(mixed, self.cache, rows), [keys, keys, values], dim=-1)
        out = recurrence(
            heads_of(q, sizes.key_heads),
            heads_of(k, sizes.key_heads),
            heads_of(v, sizes.value_heads),
            *compute_gates(steps, beta_logits, self.decay, self.dt_bias),
            self.cache,
            rows,
            scale=sizes.key_dim**-0.5,
            l2norm_eps=self.EPS,
        )
        return self.norm(out, gate).flatten(-2)


@dataclass
class KimiDeltaAttention(RecurrentMixer):
    """Kimi Delta Attention (arXiv 2510.26692): a gated delta rule with a decay for each channel of a key."""

    in_proj: Linear  # [3 * heads * dim, H]: queries, keys, values
    gates_proj: Linear  # [2 * dim + heads, H]: what decays and gates are made of, logits of beta
    decays_proj: Linear  # [heads * dim, dim]
    gate_proj: Linear  # [heads * dim, dim]
    decay: Tensor  # [heads] float32, -exp(A_log)
    dt_bias: Tensor  # [heads, dim]
    norm: GatedRMSNorm  # of each head
    sizes: RecurrenceSpec

    EPS = 1e-6  # of the L2 norms

    @classmethod
    def of(cls, module: Any) -> KimiDeltaAttention:
        """Return the mixer of a module of Kimi-Linear."""
        dim, forget = module.head_dim, module.forget_gate
        heads = forget.A_log.numel()
        return cls(
            conv=Conv.of(module.conv1d, "silu"),
            out=linear_of(module.o_proj),
            in_proj=fused(module.q_proj, module.k_proj, module.v_proj),
            gates_proj=fused(forget.f_a_proj, module.g_a_proj, module.b_proj),
            decays_proj=linear_of(forget.f_b_proj),
            gate_proj=linear_of(module.g_b_proj),
            decay=-forget.A_log.detach().float().exp().view(heads),
            dt_bias=forget.dt_bias.detach().view(heads, dim),
            norm=GatedRMSNorm(module.o_norm.weight.detach(), module.o_norm.variance_epsilon, activation="sigmoid"),
            sizes=RecurrenceSpec(heads, heads, dim, dim, decays_by_channel=True),
        )

    @property
    def recurrence_spec(self) -> RecurrenceSpec:
        return self.sizes

    def mix(self, x: Tensor, rows: Sequences) -> Tensor:
        heads, dim = self.sizes.value_heads, self.sizes.value_dim
        q, k, v = self.conv(self.in_proj(x), self.cache, rows).chunk(3, dim=-1)
        decays, gate, beta_logits = torch.split(self.gates_proj(x), [dim, dim, heads], dim=-1)
        steps = heads_of(self.decays_proj(decays.contiguous()), heads)
        out = recurrence(
            heads_of(q, heads),
            heads_of(k, heads),
            heads_of(v, heads),
            *compute_gates(steps, beta_logits, self.decay, self.dt_bias),
            self.cache,
            rows,
            scale=dim**-0.5,
            l2norm_eps=self.EPS,
        )
        return self.norm(out, self.gate_proj(gate.contiguous())).flatten(-2)


@dataclass
class Mamba2(RecurrentMixer):
    """Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): a recurrence without correction; groups of heads share keys."""

    in_proj: Linear  # [2 * values + 2 * keys + heads, H]: gates, values, keys, queries, time steps
    decay: Tensor  # [heads] float32, -exp(A_log)
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads] float32, D: what of the values is added to the outputs
    norm: GatedRMSNorm
    sizes: RecurrenceSpec
    dt_limit: tuple[float, float] = NO_LIMIT
    factors: Tensor | None = None  # of the projection's outputs

    @property
    def recurrence_spec(self) -> RecurrenceSpec:
        return self.sizes

    def mix(self, x: Tensor, rows: Sequences) -> Tensor:
        sizes = self.sizes
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        projected = self.in_proj(x)
        projected = projected if self.factors is None else projected * self.factors
        gate, mixed, steps = torch.split(projected, [values, values + 2 * keys, sizes.value_heads], dim=-1)
        v, k, q = torch.split(self.conv(mixed, self.cache, rows), [values, keys, keys], dim=-1)
        v = heads_of(v, sizes.value_heads)
        least, largest = self.dt_limit
        out = recurrence(
            heads_of(q, sizes.key_heads),
            heads_of(k, sizes.key_heads),
            v,
            *compute_gates(steps, None, self.decay, self.dt_bias, dt_min=least, dt_max=largest),
            self.cache,
            rows,
            delta_rule=False,
        )
        return self.norm(torch.addcmul(out, v, self.skip[:, None]).flatten(-2), gate)
