"""The ops that models call, registered with PyTorch: what `torch.compile` traces inside a layer.

    from specdec_kernels import torch_ops
    torch_ops.write_kv(k, v, k_pool, v_pool, page_table, prefix_lens)
    out = torch_ops.tree_attention(q, k_pool, v_pool, page_table, prefix_lens, mask=mask)

Dynamo cannot look into a compiled module, but keeps an operator of `torch.library` as one node of its graph. Arguments
are those of `specdec_kernels.ops`, without `out`, `lse`, `workspace` and `stream`: the operators run on the current
stream. Calling one costs some microseconds more than the plain op, so code outside compiled layers uses that.

Importing this module imports torch; nothing else in the package imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops

__all__ = ["tree_attention", "write_kv"]

_library: Any = torch.library.Library("specdec", "DEF")  # type: ignore[no-untyped-call]


def _refuse_lazy_views(op: Any) -> Callable[..., None]:
    """A kernel for conj and neg views, which PyTorch would otherwise copy, pools included, on every call."""
    schema = op._schema
    name = schema.name.removeprefix("specdec::")

    def refuse(*arguments: Any, **options: Any) -> None:
        named = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | options
        for argument, value in named.items():
            if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
                view, method = ("conj", "resolve_conj") if value.is_conj() else ("neg", "resolve_neg")
                raise ValueError(f"{name}: {argument} is a {view} view, expected a plain tensor ({method}() makes one)")

    return refuse


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines the operator and returns its overload, which is the shortest way to call it."""
    _library.define(schema)
    name, _, overload = schema.split("(", 1)[0].partition(".")
    op = getattr(getattr(torch.ops.specdec, name), overload or "default")
    torch.library.register_fake(op, fake, lib=_library)
    for key in ("CPU", "CUDA"):
        _library.impl(op, kernel, key)
    for key in ("Conjugate", "Negative"):
        _library.impl(op, _refuse_lazy_views(op), key)
    return op


def _tree_attention_fake(q: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
    return q.new_empty(q.shape)


_TREE_ATTENTION = (
    "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor page_table, Tensor prefix_lens, *, Tensor? slots=None, "
    "Tensor? q_lens=None, Tensor? cu_seqlens_q=None, SymInt? tail_len=None, Tensor? mask=None, float? scale=None, "
    "SymInt? window=None, float? soft_cap=None, float k_scale=1.0, float v_scale=1.0, int? fixed_split=None"
)
# Two overloads, because Inductor (torch 2.13) fails on an operator that returns a tensor and whose only mutable
# argument is optional and None.
_attend = _register(f"tree_attention{_TREE_ATTENTION}) -> Tensor", ops.tree_attention, _tree_attention_fake)
_attend_with_status = _register(
    f"tree_attention.status{_TREE_ATTENTION}, Tensor(a!) status) -> Tensor", ops.tree_attention, _tree_attention_fake
)


def tree_attention(*arguments: Tensor, status: Tensor | None = None, **options: Any) -> Tensor:
    """`ops.tree_attention` into a new, contiguous output: five tensors in its order, the rest by keyword."""
    if status is None:
        out: Tensor = _attend(*arguments, **options)
    else:
        out = _attend_with_status(*arguments, status=status, **options)
    return out


def _write_kv(*arguments: Any, **options: Any) -> None:
    ops.write_kv(*arguments, **options)


def _write_kv_fake(*_arguments: Any, **_options: Any) -> None:
    pass


write_kv = _register(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor page_table, Tensor start_lens, *, "
    "SymInt row_offset=0, Tensor? slots=None, Tensor? num_valid=None, Tensor? cu_seqlens_q=None, "
    "Tensor? page_refs=None, float k_scale=1.0, float v_scale=1.0, Tensor(c!)? status=None) -> ()",
    _write_kv,
    _write_kv_fake,
)
