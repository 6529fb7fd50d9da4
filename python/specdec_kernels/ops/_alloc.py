"""Allocate missing outputs with the caller's tensor library, and refuse arguments that this needs first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def empty(op: str, like: Any, shape: Sequence[int], dtype: str) -> Any:
    """Allocate an uninitialized tensor like `like`, by `new_empty` (torch) or `numpy.empty`."""
    new_empty = getattr(like, "new_empty", None)
    if new_empty is not None:
        try:
            return new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        except (RuntimeError, TypeError):  # the op itself refuses an impossible size
            shape = [n if isinstance(n, int) and 0 < n < 2**31 else 0 for n in shape]
            return new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    if type(like).__module__ == "numpy":
        return sys.modules["numpy"].empty(shape, dtype)
    raise TypeError(f"{op}: cannot allocate outputs like {type(like).__name__}, expected out to be passed")


def empty_like(op: str, like: Any, shape: Sequence[int]) -> Any:
    """Allocate as `empty` does, with the dtype of `like`."""
    new_empty = getattr(like, "new_empty", None)
    if new_empty is not None:
        return new_empty(shape)
    return empty(op, like, shape, str(getattr(like, "dtype", None)))


def fill_zeros(out: Any, stream: int | None) -> None:
    """Fill a tensor with zeros on the stream that the op runs on."""
    if stream is None or not getattr(out, "is_cuda", False):
        out[...] = 0
        return
    cuda = sys.modules["torch"].cuda
    with cuda.stream(cuda.ExternalStream(stream, device=out.device)):
        out[...] = 0


def arange_like(like: Any, start: int, stop: int, step: int) -> Any:
    """Call `arange` of the library that `empty` allocates from."""
    library = sys.modules["torch" if hasattr(like, "new_empty") else "numpy"]
    return library.arange(start, stop, step)


def range_on_device(like: Any, count: int) -> Any:
    """Return 0 to count - 1 on the device of `like`."""
    if hasattr(like, "new_empty"):
        return sys.modules["torch"].arange(count, device=like.device)
    return sys.modules["numpy"].arange(count)


def wrong_type(op: str, name: str, value: Any, kind: type) -> TypeError:
    """Return the error for a struct of the wrong type, such as a plain tuple."""
    article = "an" if kind.__name__[0] in "AE" else "a"
    return TypeError(f"{op}: {name} is a {type(value).__name__}, expected {article} {kind.__name__}")


def as_nhd(op: str, layout: str, *pools: Any) -> tuple[Any, ...]:
    """Return views [..., page_size, Hkv, D] of pools in this layout; "HND" is [..., Hkv, page_size, D]."""
    if layout == "NHD":
        return pools
    if layout != "HND":
        raise ValueError(f"{op}: layout is {layout!r}, expected 'NHD' or 'HND'")
    for pool in pools:
        if len(getattr(pool, "shape", ())) < 4:
            return pools  # the op itself names what is wrong
    return tuple(pool.swapaxes(-3, -2) for pool in pools)


def refuse_gradient(op: str, **tensors: Any) -> None:
    """Raise ValueError for a tensor of torch whose gradient an op without a backward would drop in silence."""
    for name, tensor in tensors.items():
        if getattr(tensor, "requires_grad", False) is True and sys.modules["torch"].is_grad_enabled():
            raise ValueError(f"{op}: {name} requires grad, expected none (detach() it, or call under torch.no_grad())")


def shape_of(op: str, name: str, tensor: Any, ndim: int) -> tuple[int, ...]:
    """Return the shape of `tensor`, and check that it has `ndim` dimensions."""
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, expected a tensor")
    if len(shape) != ndim:
        raise ValueError(f"{op}: {name} has {ndim_text(len(shape))}, expected {ndim_text(ndim)}")
    return tuple(shape)


def ndim_text(ndim: int) -> str:
    return f"{ndim} dimension{'' if ndim == 1 else 's'}"
