"""Random and forged calls of ops: each raises an error that names the op, or is deterministic.

Valid calls are damaged: elements become extreme, tensors get other shapes, dtypes and strides, numbers leave their
range, arguments are omitted. Each call runs twice, on copies whose storage has guards around it. Both runs must agree,
and write neither to arguments that the op does not change nor to the guards. An undamaged call must match the
reference.

`python -m support.random_calls FIRST COUNT` makes the calls of COUNT seeds and prints each seed before its call.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

import specdec_kernels as sd
from specdec_kernels import torch_ops
from specdec_kernels.ops._op_list import native_halves
from specdec_kernels.reference import attention, draft, kv, layers, mla, recurrent, tree, verify
from support.op_calls import calls

OPS = [op for op in torch_ops.OPS if native_halves(op)]
GUARD, SENTINEL = 64, 0x5A
INTS = (-1, 0, 1, 2, 3, 63, 64, 255, 2**31 - 1, -(2**31), 2**31 - 2)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45)
NUMBERS = (-1, 0, 1, 2, 7, 64, 65, 1000, -(2**31), 2**62, 2**63 - 1, -(2**63))
DTYPES = (
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.float64,
    torch.bool,
)
REFERENCES = (draft, tree, layers, attention, mla, verify, kv, recurrent)
Call = tuple[list[Any], dict[str, Any]]
REFUSALS = (ValueError, TypeError, NotImplementedError)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, in the middle of storage full of sentinels."""
    width = x.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    storage = torch.full(((extent + 2 * GUARD) * width,), SENTINEL, dtype=torch.uint8).view(x.dtype)
    copy = storage.as_strided(x.shape, x.stride(), GUARD)
    if x.numel():
        copy.copy_(x)
    return copy


def storage_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def is_guard(x: torch.Tensor) -> torch.Tensor:
    """Return which bytes of the storage belong to no element."""
    guards = torch.ones(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
    guards.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return guards.repeat_interleave(x.element_size())


def each_tensor(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, tuple):
        fields = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
        return [found for name, part in fields for found in each_tensor(part, f"{path}_{name}")]
    return []


def damaged_values(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel() == 0 or x.dtype == torch.bool:
        return x
    flat = x.view(-1)
    for _ in range(rng.choice((1, 1, 2, flat.numel()))):
        value = rng.choice(FLOATS) if x.dtype.is_floating_point else rng.choice(INTS)
        flat[rng.randrange(flat.numel())] = torch.tensor(
            value, dtype=torch.float64 if x.dtype.is_floating_point else torch.int64
        ).to(x.dtype)
    return x


def damaged_form(x: torch.Tensor, rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0 if x.ndim:
            dim = rng.randrange(x.ndim)
            return x.narrow(dim, 0, rng.randint(0, x.shape[dim]))
        case 1 if x.ndim:
            dim = rng.randrange(x.ndim)
            return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)
        case 2:
            return x[None]
        case 3 if x.ndim:
            return x[0] if len(x) else x.sum()
        case 4 if x.ndim > 1:
            return x.transpose(0, rng.randrange(1, x.ndim))
        case 5:
            return x.to(rng.choice(DTYPES))
        case 6 if x.ndim:
            return torch.cat([x, x], -1)[..., :: rng.choice((1, 2))]
        case _:
            return rng.choice((None, 3, "a tensor", [1, 2]))


def damaged(value: Any, rng: random.Random) -> Any:
    if isinstance(value, torch.Tensor):
        return damaged_values(value, rng) if rng.random() < 0.7 else damaged_form(value, rng)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        field = rng.choice(value._fields)
        return value._replace(**{field: damaged(getattr(value, field), rng)})
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    if isinstance(value, float):
        return rng.choice((*FLOATS, value))
    return rng.choice((None, 1, 2.5, "word"))


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return guarded(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    return value


def outcome(op: str, arguments: list[Any], options: dict[str, Any]) -> Any:
    try:
        return getattr(sd, op)(*arguments, **options)
    except REFUSALS as error:
        return error


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_by_reference(op: str, call: Call, got: Any, left: Call) -> None:
    """Compare the result and the changed arguments with the reference, if it supports the given options."""
    function = next(getattr(module, op) for module in REFERENCES if hasattr(module, op))
    takes = inspect.signature(function).parameters
    arguments, options = call[0], {name: value for name, value in call[1].items() if name in takes}
    if op == "expand_tree" or set(call[1]) - set(options) - {
        "status"
    }:  # the reference returns the result, not in place
        return
    want = function(*arguments, **options)
    if op in ("tree_attention", "mla_tree_attention"):
        want, *_ = want  # then lse and status
    for (name, a), (_, b) in zip(each_tensor((got, *left[0])), each_tensor((want, *arguments)), strict=True):
        if a.dtype.is_floating_point:
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-2, atol=1e-4, equal_nan=True)
        else:
            assert torch.equal(a, b.to(a.dtype)), f"{name} is not the reference's"


def check_call(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    op = rng.choice(OPS)
    arguments, options = rng.choice(calls(op, torch.device("cpu")))
    named = dict(enumerate(arguments)) | options
    hurt = rng.sample(sorted(named, key=str), rng.randint(0, min(2, len(named))))
    for key in hurt:
        named[key] = damaged(named[key], rng)
    check_twice(op, arguments, options, named, by_reference=not hurt)


def check_twice(
    op: str, arguments: list[Any], options: dict[str, Any], named: dict[Any, Any], by_reference: bool
) -> None:
    """Run the call in `named` twice: values of `arguments` by position, of `options` by name."""

    def made() -> tuple[list[Any], dict[str, Any]]:
        copy = {key: copied(value) for key, value in named.items()}
        return [copy[i] for i in range(len(arguments))], {key: copy[key] for key in options}

    before, first, second = made(), made(), made()
    results = [outcome(op, *call) for call in (first, second)]
    if isinstance(results[0], BaseException):
        assert type(results[0]) is type(results[1]) and str(results[0]) == str(results[1])
        named_by = (f"{op}: ", f"{op}_workspace: ")  # the latter comes from the size query
        assert str(results[0]).startswith(named_by), f"{type(results[0]).__name__}: {results[0]}"
    else:
        for (name, a), (_, b) in zip(*map(each_tensor, results), strict=True):
            assert torch.equal(bits(a), bits(b)), f"result{name} differs from call to call"

        if by_reference:
            check_by_reference(op, made(), results[0], first)

    changed = () if isinstance(results[0], BaseException) else torch_ops._CHANGED.get(op, ())
    names = [*list(inspect.signature(getattr(sd, op)).parameters)[: len(arguments)], *options]
    flat = [[*positional, *keywords.values()] for positional, keywords in (before, first, second)]
    for name, *versions in zip(names, *flat, strict=True):
        for (path, was), (_, now), (_, again) in zip(*map(each_tensor, versions), strict=True):
            full = f"{name}{path}"
            assert torch.equal(bits(now), bits(again)), f"{full} is left differently from call to call"
            if full not in changed:
                assert torch.equal(bits(was), bits(now)), f"{full} was changed"
            guards = is_guard(now)
            assert torch.equal(storage_of(now)[guards], storage_of(was)[guards]), f"guards of {full} were written"


def without_size(value: Any, size: int) -> Any:
    """Return the value with every dimension of this size cut to nothing."""
    if isinstance(value, torch.Tensor):
        for dim, n in enumerate(value.shape):
            value = value.narrow(dim, 0, 0) if n == size else value
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(without_size(part, size) for part in value))
    return value


def each_with_an_empty_dimension(value: Any) -> Iterator[Any]:
    """Yield copies of the value; each has one dimension of one tensor cut to nothing."""
    if isinstance(value, torch.Tensor):
        for dim in range(value.ndim):
            yield value.narrow(dim, 0, 0)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, part in zip(value._fields, value, strict=True):
            for empty in each_with_an_empty_dimension(part):
                yield value._replace(**{field: empty})


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        print(seed, flush=True)  # the last line names the call that killed the process
        check_call(seed)
