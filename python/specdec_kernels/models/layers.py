"""A decoder layer as four products with our ops between them, on the weights of a Hugging Face layer.

Query, key and value projections become one product, and so do gate and up. Between products a layer needs four
launches: a norm with the residual sum before it, the rotation that also writes KV, attention, and a norm; and a fifth,
the gate, of many rows that `linear_rows` does not take.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import _C
from ..ops import gate_rows, linear_rows, norm_rows, rotate_qkv, tree_attention
from .attention import Rows

# Beyond the longest sequence: the deepest node of a tree, and padding.
SPARE_POSITIONS = 320


# Of x and of the weight, up to where `linear_rows` was measured to be faster than cuBLAS: of any weight, and on Hopper
# of one whose rows its blocks take at once. Of more rows it is where it takes the gate, too, and they fill its tiles.
FEW_ROWS = 64
MORE_ROWS, MORE_OUTS = 128, 32768
SMALL_INDEX = 16  # up to which torch's embedding has a kernel of its own


@cache
def has_wgmma(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return _C.has_wgmma()


class Product(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., out] from [..., in]."""
        return self._rows(x) if self._has_few(x) else functional.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up [rows, out / 2] from x [rows, in], of a product that makes gate and up."""
        if len(self.weight) % 16 == 0 and (self._has_few(x) or self._has_many(x)):
            return self._rows(x, gated=True)
        out: Tensor = gate_rows(functional.linear(x, self.weight, self.bias))
        return out

    def added_to(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[rows, out] each: the product of x [rows, in], and the state that it is to be added to; of rows that cuBLAS
        multiplies, their sum, written over the state, and None."""
        if self._has_few(x) or not x.is_cuda or self.bias is not None:
            return self(x), state
        return state.addmm_(x, self.weight.t()), None

    def _has_few(self, x: Tensor) -> bool:
        rows = x.shape[:-1].numel()
        return self._fits(x) and (
            rows <= FEW_ROWS or (rows <= MORE_ROWS and len(self.weight) <= MORE_OUTS and has_wgmma(x.device))
        )

    def _has_many(self, x: Tensor) -> bool:
        if not self._fits(x):
            return False
        with torch.cuda.device(x.device):
            return _C.many_rows_fill(x.shape[:-1].numel(), len(self.weight))

    def _fits(self, x: Tensor) -> bool:
        return x.is_cuda and x.dtype != torch.float32 and x.shape[-1] % 64 == 0

    def _rows(self, x: Tensor, gated: bool = False) -> Tensor:
        out: Tensor = linear_rows(x.reshape(-1, x.shape[-1]), self.weight, self.bias, gated=gated)
        return out.view(*x.shape[:-1], -1)


def product_of(linear: nn.Linear) -> Product:
    return Product(linear.weight, linear.bias)


def embedded(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """[..., H] of tokens [...]."""
    # What an embedding reads few rows with takes 12 us for 16, on an H200: three times as long as an index.
    few = tokens.is_cuda and tokens.numel() <= SMALL_INDEX
    out: Tensor = embedding.weight[tokens] if few else embedding(tokens)
    return out


def added_and_normed(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """[T, H] each: the sum of both, normalised, and itself, which is written over the residual; without one, of x."""
    out, total = norm_rows(x, norm.weight, norm.variance_epsilon, residual=residual, out_sum=residual)
    return out, total


def normed(norm: Any, x: Tensor) -> Tensor:
    """[..., H] from [..., H], by a root mean square norm of the model's."""
    rows, _ = norm_rows(x.reshape(-1, x.shape[-1]), norm.weight, norm.variance_epsilon)
    out: Tensor = rows.view(x.shape)
    return out


def merged(*linears: nn.Linear) -> Product:
    """Products of one input as one. The modules keep their parameters, which become parts of the merged ones."""

    def join(name: str) -> Tensor | None:
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None:
            return None
        whole = torch.cat([part.data for part in parts])
        for linear, part in zip(linears, torch.split(whole, [len(part) for part in parts]), strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
        return whole

    weight = join("weight")
    assert weight is not None
    return Product(weight, join("bias"))


def rotations_of(rotary: Any, max_len: int, device: torch.device) -> Tensor:
    """[max_len + SPARE_POSITIONS, D] float32: what `rotate_qkv` takes, from a module that makes cosines and sines.

    Made before the module is cast to 16 bits, which its frequencies would not survive.
    """
    kind = getattr(rotary, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"model: rope_type is {kind!r}, expected one whose rotations depend on positions alone")
    rotary = rotary.to(device)
    positions = torch.arange(max_len + SPARE_POSITIONS, device=device)[None]
    cosine, sine = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = cosine.shape[-1] // 2
    return torch.cat([cosine[0, :, :half], sine[0, :, :half]], dim=-1).contiguous()


class Layer:
    """Attention and feed-forward part of one layer; its rows are [T, H], those of all requests together."""

    def __init__(self, module: Any) -> None:
        self.attention = attention = module.self_attn
        self.head_dim: int = attention.head_dim
        self.qkv = merged(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = product_of(attention.o_proj)
        self.gate_up = merged(module.mlp.gate_proj, module.mlp.up_proj)
        self.down = product_of(module.mlp.down_proj)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.middle_norm = module.post_attention_layernorm
        self.eps: float = self.middle_norm.variance_epsilon

    def write_kv(self, x: Tensor, positions: Tensor, rotations: Tensor, rows: Rows) -> Tensor:
        """The KV of x [T, in], normalised, at positions [B, Q]; its queries [B, Q, heads, head_dim] are returned."""
        q: Tensor = rotate_qkv(
            self.qkv(x).view(*positions.shape, -1, self.head_dim),
            rotations,
            positions,
            self.attention.k_pool,
            self.attention.v_pool,
            rows.page_table,
            rows.prefix_lens,
            row_offset=rows.row_offset,
            slots=rows.slots,
            num_valid=rows.num_valid,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            status=rows.status,
        )
        return q

    def attend(self, q: Tensor, rows: Rows) -> Tensor:
        """[T, heads * head_dim] of queries."""
        attended: Tensor = tree_attention(
            q,
            self.attention.k_pool,
            self.attention.v_pool,
            rows.page_table,
            rows.prefix_lens,
            slots=rows.slots,
            q_lens=rows.num_valid,
            tail_len=rows.tail_len,
            mask=rows.mask,
            fixed_split=rows.fixed_split,
            status=rows.status,
        )
        return attended.flatten(2).flatten(0, 1)

    def __call__(
        self,
        normed: Tensor,
        state: Tensor,
        positions: Tensor,
        rotations: Tensor,
        rows: Rows,
        *,
        move_to: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the next norm takes: rows, and the state of the residual stream that it adds to them, or None where they
        have it already. `state` is written over, unless it is to `move_to` another place and stay as it is. With `only`
        [R], these of all T rows."""
        attended = self.attend(self.write_kv(normed, positions, rotations, rows), rows)
        if only is not None:
            attended, state = attended[only], state[only]
        if move_to is None:
            normed, state = added_and_normed(self.middle_norm, *self.out.added_to(state, attended))
        else:
            weight = self.middle_norm.weight
            normed, state = norm_rows(self.out(attended), weight, self.eps, residual=state, out_sum=move_to)
        return self.down.added_to(state, self.gate_up.gated(normed))
