"""The parts that decoder layers are made of, and the layer itself: products with our ops between them.

Parts hold tensors, which they share with the modules that they are made of. Query, key and value projections become one
product, and so do gate and up. Between products a layer needs four launches: a norm with the residual sum before it,
the rotation that also writes KV, attention, and a norm; and a fifth, the gate, of many rows that `small_m_gemm` does
not take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from ... import _C
from ...ops import add_rms_norm, moe_combine, silu_and_mul, small_m_gemm
from .quantized import GROUP, Fp8Weight, QuantisedLinear, RoundedRows, StoredWeight, stored_together

if TYPE_CHECKING:
    from .attention import Attention, Rows

PACK = 8  # numbers of 16 bits in 16 bytes, of which `add_rms_norm` rounds multiples
SMALL_INDEX = 16  # up to which torch's embedding has a kernel of its own


class Product(NamedTuple):
    weight: Tensor | StoredWeight
    bias: Tensor | None

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        """[..., out] from [..., in]."""
        if isinstance(x, RoundedRows):
            assert isinstance(self.weight, Fp8Weight)
            return self.weight.product(x, self.bias)
        if not isinstance(self.weight, Tensor):
            return self.weight.product(x, self.bias)
        return self._rows(x) if self._is_ours(x) else functional.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor | RoundedRows) -> Tensor:
        """silu(gate) * up [rows, out / 2] from x [rows, in], of a product that makes gate and up."""
        if isinstance(x, RoundedRows):
            assert isinstance(self.weight, Fp8Weight)
            return self.weight.product(x, self.bias, gated=True)
        if not isinstance(self.weight, Tensor):
            return self.weight.product(x, self.bias, gated=True)
        if self._is_ours(x, gated=True):
            return self._rows(x, gated=True)
        out: Tensor = silu_and_mul(functional.linear(x, self.weight, self.bias))
        return out

    def added_to(self, state: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[rows, out] each: the product of x [rows, in], and the state that it is to be added to, if any; of rows that
        cuBLAS multiplies, their sum, written over the state, and None."""
        by_cublas = x.is_cuda and not self._is_ours(x) and isinstance(self.weight, Tensor)
        if state is None or self.bias is not None or not by_cublas:
            return self(x), state
        assert isinstance(self.weight, Tensor)
        return state.addmm_(x, self.weight.t()), None

    def _is_ours(self, x: Tensor, gated: bool = False) -> bool:
        """Whether `small_m_gemm` is quicker than torch's product, which is cuBLAS on a GPU."""
        return isinstance(self.weight, Tensor) and _C.small_m_gemm_plan(x, self.weight, gated) != "library"

    def _rows(self, x: Tensor, gated: bool = False) -> Tensor:
        out: Tensor = small_m_gemm(x.reshape(-1, x.shape[-1]), self.weight, self.bias, gated=gated)
        return out.view(*x.shape[:-1], -1)

    def rows(self, places: list[int]) -> Product:
        """A copy whose output i is that of places[i], or 0 where that is -1."""
        assert isinstance(self.weight, Tensor)
        return Product(moved(self.weight, places), None if self.bias is None else moved(self.bias, places))

    def columns(self, places: list[int]) -> Product:
        """A copy whose input i is that of places[i], or left alone where that is -1."""
        assert isinstance(self.weight, Tensor)
        return Product(moved(self.weight.t(), places).t().contiguous(), self.bias)


def moved(tensor: Tensor, places: list[int]) -> Tensor:
    """The tensor's rows places[i], zeros for -1."""
    index = torch.tensor(places, device=tensor.device)
    rows = tensor[index.clamp(min=0)]
    rows[index < 0] = 0
    return rows


def product_of(linear: nn.Linear | QuantisedLinear) -> Product:
    weight = linear.weight if isinstance(linear, QuantisedLinear) else linear.weight.detach()
    return Product(weight, None if linear.bias is None else linear.bias.detach())


def merged(*linears: nn.Linear | QuantisedLinear) -> Product:
    """Products of one input as one. The modules keep their parameters, whose data become rows of the merged ones; where
    they are that already, of another engine on the same modules, nothing is copied. Weights of fewer bits keep their
    scales."""

    def join(name: str) -> Tensor | None:
        parts = parts_of(name, linears)
        whole = rows_of_one([part.data for part in parts]) if parts else None
        if whole is None and parts:
            with torch.inference_mode(False):  # the module may be trained later, whatever mode the caller is in
                whole = torch.cat([part.data for part in parts])
                for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
                    part.data = rows
        return whole

    if any(isinstance(linear, QuantisedLinear) for linear in linears):
        return Product(stored_together(linears), join("bias"))
    weight = join("weight")
    assert weight is not None
    return Product(weight, join("bias"))


def joined(*linears: nn.Linear) -> Product:
    """Products of one input as one, whose weight is a copy: nothing about the modules changes."""
    weight, bias = ([part.detach() for part in parts_of(name, linears)] for name in ("weight", "bias"))
    return Product(torch.cat(weight), torch.cat(bias) if bias else None)


def parts_of(name: str, linears: Sequence[nn.Linear | QuantisedLinear]) -> list[Tensor]:
    """The weights or biases of all; none where no module has one."""
    parts = [getattr(linear, name) for linear in linears]
    if all(part is None for part in parts):
        return []
    if any(part is None for part in parts):
        raise ValueError(f"model: {name} is missing in some of the projections that are merged, expected all or none")
    return parts


def rows_of_one(parts: list[Tensor]) -> Tensor | None:
    """The tensor whose rows the parts are, one behind another; None where they are not."""
    first = parts[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if (part.untyped_storage().data_ptr(), part.storage_offset()) != (storage, offset) or not part.is_contiguous():
            return None
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class Embedding(NamedTuple):
    weight: Tensor  # [V, H]
    scale: float | None = None
    places: Tensor | None = None  # [num_positions, H], of which a token's position adds one; behind the last, the last

    def __call__(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[..., H] of tokens [...] at positions [...]."""
        # What an embedding reads few rows with takes 12 us for 16, on an H200: three times as long as an index.
        few = tokens.is_cuda and tokens.numel() <= SMALL_INDEX
        rows = self.weight[tokens] if few else functional.embedding(tokens, self.weight)
        rows = rows if self.scale is None else rows * self.scale
        if self.places is None or positions is None:
            return rows
        return rows + self.places[positions.clamp(0, len(self.places) - 1)]


class Head(NamedTuple):
    """Logits: a product, which a scale multiplies and a soft cap bounds."""

    product: Product
    scale: float | None = None
    soft_cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., V] from [..., H]."""
        logits = self.product(hidden)
        if self.scale is not None:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


class Behind(Protocol):
    """What a part's output passes before it is added to the residual stream: a norm, or a scale."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., H] from [..., H]."""


class Scale(NamedTuple):
    """What multiplies a part's output before it is added to the residual stream."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class MadeRows(NamedTuple):
    """What several experts made of each row, which their shares make one."""

    made: Tensor  # [T * taken, H], those of a row one behind another
    shares: Tensor  # [T, taken] float32

    def combined(self) -> Tensor:
        """[T, H]: their sum in float32, by shares."""
        out: Tensor
        if self.made.is_cuda:
            out = moe_combine(self.made, self.shares)
        else:
            rows, taken = self.shares.shape
            out = (self.made.view(rows, taken, -1) * self.shares[..., None]).sum(1).to(self.made.dtype)
        return out


def rows_at(places: Tensor, x: Tensor | MadeRows) -> Any:
    """Some of the rows, like x, copied."""
    if isinstance(x, MadeRows):
        made = x.made.view(*x.shares.shape, -1)[places]
        return MadeRows(made.flatten(0, 1), x.shares[places])
    return x[places]


class AnyNorm(Protocol):
    """What stands before a part of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] from [..., H]."""

    def added(self, x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None = None) -> tuple[Any, Tensor]:
        """[T, H] each: the sum of both, normalised, and the sum, which is written over the residual or where `to` says;
        without a residual it is x itself. The first may be `RoundedRows`, where what reads it takes them."""


class Norm(NamedTuple):
    """A root mean square norm."""

    weight: Tensor  # [H]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] from [..., H]."""
        rows, _ = add_rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps)
        out: Tensor = rows.view(x.shape)
        return out

    def added(self, x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, shares = x if isinstance(x, MadeRows) else (x, None)
        out = None, residual if to is None else to
        normed, total = add_rms_norm(rows, self.weight, self.eps, residual=residual, topk_weights=shares, out=out)
        return normed, total


class RoundingNorm(NamedTuple):
    """A root mean square norm before a product that rounds its rows: both in one launch."""

    norm: Norm
    activations: str  # as of `Fp8Weight`, "token" or "group"

    @classmethod
    def before(cls, norm: AnyNorm | None, reader: object) -> AnyNorm | None:
        """The norm itself, unless a product whose rows are rounded is what reads it."""
        weight = reader.weight if isinstance(reader, Product) else None
        if not isinstance(norm, Norm) or not isinstance(weight, Fp8Weight):
            return norm
        if weight.activations not in ("token", "group") or weight.shape[1] % PACK:
            return norm
        return cls(norm, weight.activations)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def added(
        self, x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None = None
    ) -> tuple[RoundedRows, Tensor]:
        rows, shares = x if isinstance(x, MadeRows) else (x, None)
        count = len(rows if shares is None else shares)
        groups = 1 if self.activations == "token" else -(-rows.shape[1] // GROUP)
        # Groups start on 16 bytes, as `small_m_gemm` wants them.
        scales = torch.empty(groups, -(-count // 4) * 4, dtype=torch.float32, device=rows.device)[:, :count]
        numbers, total = add_rms_norm(
            rows,
            self.norm.weight,
            self.norm.eps,
            residual=residual,
            topk_weights=shares,
            out=(None, residual if to is None else to),
            out_scales=scales,
        )
        return RoundedRows(numbers, scales, rows.dtype), total


class LayerNorm(NamedTuple):
    """A norm that takes the mean away first, by torch (Ba et al. 2016, arXiv 1607.06450)."""

    weight: Tensor | None  # [H]; None: of ones
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def added(self, x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = sum_of(x, residual, to)
        return self(total), total


class NoNorm(NamedTuple):
    """Of layers whose parts read the residual stream as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def added(self, x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = sum_of(x, residual, to)
        return total, total


def sum_of(x: Tensor | MadeRows, residual: Tensor | None, to: Tensor | None) -> Tensor:
    """The sum, written over the residual or where `to` says; x itself without a residual."""
    x = x.combined() if isinstance(x, MadeRows) else x
    return x if residual is None else torch.add(x, residual, out=residual if to is None else to)


def norm_of(norm: Any) -> Norm:
    """The norm of a module of transformers, where the smallest mean square is called `variance_epsilon`."""
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def one_more_norm_of(norm: Any) -> Norm:
    """The norm of a module that multiplies by 1 + weight. The sum is made in float32 and rounded to the weight's dtype:
    the module, which keeps it in float32, is as far from ours as one rounding of 16-bit weights is."""
    return Norm((1 + norm.weight.detach().float()).to(norm.weight.dtype), norm.eps)


def layer_norm_of(norm: Any) -> LayerNorm:
    """The norm of an `nn.LayerNorm`."""
    weight, bias = (None if part is None else part.detach() for part in (norm.weight, norm.bias))
    return LayerNorm(weight, bias, norm.eps)


class FeedForward(Protocol):
    """What a layer has behind its attention."""

    def __call__(self, normed: Tensor, state: Tensor | None) -> tuple[Tensor | MadeRows, Tensor | None]:
        """From rows [T, H], normalised, and the state of the residual stream: the part's own output, and the state that
        is to be added to it; or the sum of both, written over the state, and None. Without a state, its own output as
        a tensor."""


Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GatedFeedForward(FeedForward):
    """down(activation(gate(x)) * up(x)), of silu where no activation is named: that of others is not one launch."""

    gate_up: Product
    down: Product
    activation: Activation | None = None

    def __call__(self, normed: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.activation is None:
            return self.down.added_to(state, self.gate_up.gated(normed))
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.down.added_to(state, self.activation(gate) * up)

    def made_of(self, normed: Tensor) -> Tensor:
        """The part's own output [T, H]."""
        return self(normed, None)[0]


@dataclass(frozen=True)
class PlainFeedForward(FeedForward):
    """down(activation(up(x)))."""

    up: Product
    down: Product
    activation: Activation

    def __call__(self, normed: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.down.added_to(state, self.activation(self.up(normed)))


def activation_of(activation: Activation) -> Activation | None:
    """What a gated part takes for the activation that a module holds."""
    return None if isinstance(activation, (nn.SiLU, SiLUActivation)) else activation


@dataclass
class Layer:
    """A layer with a norm before its attention and one before its feed-forward part; its rows are [T, H], those of all
    requests together. What either part gives may pass a norm or a scale before it is added to the residual stream.

    A family whose layers are wired in another way has a class of its own with these methods and `attention`.
    """

    attention: Attention
    middle_norm: AnyNorm | None  # None: of a `ParallelLayer` alone
    feed_forward: FeedForward
    input_norm: AnyNorm | None = None  # None: whoever calls it has normalised what enters
    behind_attention: Behind | None = None
    behind_feed_forward: Behind | None = None

    def __post_init__(self) -> None:
        if type(self) is not Layer:  # whose norms others may read, too
            return
        if getattr(self.attention, "gate", None) is None:
            self.input_norm = RoundingNorm.before(self.input_norm, getattr(self.attention, "qkv", None))
        if isinstance(self.feed_forward, GatedFeedForward):
            self.middle_norm = RoundingNorm.before(self.middle_norm, self.feed_forward.gate_up)
        elif isinstance(self.feed_forward, PlainFeedForward):
            self.middle_norm = RoundingNorm.before(self.middle_norm, self.feed_forward.up)

    def enter(self, x: Tensor | MadeRows, residual: Tensor | None) -> tuple[Any, Tensor]:
        """What the layer takes, from what the one before it left: their sum normalised, and the sum itself, which
        stands where the residual was, or x without one."""
        assert self.input_norm is not None
        return self.input_norm.added(x, residual)

    def __call__(
        self,
        normed: Tensor,
        state: Tensor,
        positions: Tensor,
        rows: Rows,
        *,
        move_to: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[Tensor | MadeRows, Tensor | None]:
        """What the next norm takes: rows, and the state of the residual stream that it adds to them, or None where they
        have it already. `state` is written over, unless it is to `move_to` another place and stay as it is. With `only`
        [R], these of all T rows."""
        attended = self.attention(normed, positions, rows)
        if only is not None:
            attended, state = attended[only], state[only]
        assert self.middle_norm is not None
        out, behind = self.attention.out, self.behind_attention
        if move_to is None and behind is None:
            normed, state = self.middle_norm.added(*out.added_to(state, attended))
        else:
            x = out(attended)
            normed, state = self.middle_norm.added(x if behind is None else behind(x), state, move_to)
        if self.behind_feed_forward is None:
            return self.feed_forward(normed, state)
        made, _ = self.feed_forward(normed, None)
        assert isinstance(made, Tensor)
        return self.behind_feed_forward(made), state


@dataclass
class ParallelLayer(Layer):
    """A layer whose feed-forward part stands beside its attention: both read what enters, by one norm or `middle_norm`
    for the second, and both are added to the residual stream."""

    def __call__(
        self,
        normed: Tensor,
        state: Tensor,
        positions: Tensor,
        rows: Rows,
        *,
        move_to: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[Tensor | MadeRows, Tensor | None]:
        attended = self.attention(normed, positions, rows)
        if only is not None:
            attended, normed, state = attended[only], normed[only], state[only]
        if self.middle_norm is not None:
            normed = self.middle_norm(state)
        if move_to is not None:
            state = move_to.copy_(state)
        x, rest = self.attention.out.added_to(state, attended)
        return self.feed_forward(normed, x if rest is None else rest.add_(x))
