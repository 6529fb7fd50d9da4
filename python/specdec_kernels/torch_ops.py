"""Every op, registered with PyTorch: what `torch.compile` traces without a graph break.

    from specdec_kernels import torch_ops
    torch_ops.write_kv(k, v, k_pool, v_pool, page_table, prefix_lens)
    out = torch_ops.tree_attention(q, k_pool, v_pool, page_table, prefix_lens, mask=mask)

Dynamo cannot trace a compiled module, but keeps an operator of `torch.library` as one node of its graph. The functions
are those of `specdec_kernels.ops` with the same arguments and results, except preallocated outputs (`out`, `lse`,
`workspace`), `plan` and `stream`: operators allocate their results and run on the current stream. A call costs some
microseconds more than the plain op, so use the plain op in code that is not compiled.

Importing this module imports torch; nothing else in the package imports it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from . import ops
from .ops._op_list import native_halves, public_ops

_library: Any = torch.library.Library("specdec", "DEF")

_POOL = tuple(f"pool_{name}" for name in ops.PagePool._fields if name != "page_size")

# Arguments that each op changes in place; ops without an entry change nothing.
_CHANGED: dict[str, tuple[str, ...]] = {
    "expand_tree": (
        "candidates_tokens", "candidates_parents", "candidates_scores", "frontier_nodes", "frontier_mask",
    ),
    "update_calibration": ("calibration_table", "calibration_counts"),
    "append_draft_backlog": ("backlog_lens", "backlog_tokens", "backlog_features"),
    "build_tree": ("status",),
    "build_tree_from_parents": ("status",),
    "build_tree_from_mask": ("status",),
    "pack_trees": tuple(f"tree_{name}" for name in ops.Tree._fields),
    "rope_qkv_write_kv": ("k_pool", "v_pool", "status"),
    "tree_attention": ("status",),
    "mla_tree_attention": ("status",),
    "write_latent": ("kv_pool", "q_out", "status"),
    "edit_logits": ("logits",),
    "mask_stops": ("logits",),
    "verify_tree": ("status",),
    "commit_tokens": (
        "accepted_tokens", "accepted_num_valid", "state_seq_lens", "state_prefix_lens", "state_root_tokens",
        "state_remaining", "state_finish_reasons", "state_status", "counts",
    ),
    "alloc_pages": (*_POOL, "status"),
    "free_pages": (*_POOL, "status"),
    "fork_pages": (*_POOL, "status"),
    "assign_pages": _POOL,
    "write_kv": ("k_pool", "v_pool", "status"),
    "move_kv": ("k_pools", "v_pools", "status"),
    "copy_kv": ("k_pools", "v_pools", "status"),
    "set_pending_paths": ("paths_nodes", "paths_num_nodes", "paths_parity", "status"),
    "tree_recurrence": ("state", "records_k", "records_u", "records_g", "status"),
    "commit_recurrence": ("state", "status"),
    "tree_conv1d": ("window", "records", "status"),
    "commit_conv1d": ("window", "status"),
}  # fmt: skip

_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple)


def _struct_fields(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint, vars(ops) | {"Tensor": Tensor})


def _schema_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "str"
    alternatives = get_args(hint)
    if type(None) in alternatives:
        (hint,) = (each for each in alternatives if each is not type(None))
        return _SCHEMA_TYPES[hint] + "?"
    return _SCHEMA_TYPES[hint]


def _default(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else f'="{value}"' if isinstance(value, str) else f"={value}"


class _Op:
    """An op as an operator: structs are flattened into tensors, and arguments for outputs are omitted."""

    def __init__(self, name: str) -> None:
        self.name, self.call = name, inspect.unwrap(getattr(ops, name))
        self.hints = get_type_hints(self.call, vars(ops) | {"Tensor": Tensor, "Literal": Literal})
        without = ("out", "lse", "workspace", "plan", "stream")
        self.parameters = [
            parameter
            for parameter in inspect.signature(self.call).parameters.values()
            if not (parameter.kind is parameter.KEYWORD_ONLY and parameter.name.startswith(without))
        ]
        self.changed = _CHANGED.get(name, ())
        result = self.hints["return"]
        parts = get_args(result) if get_origin(result) is tuple else (result,)
        self.results = [] if result is type(None) else [part if _is_struct(part) else None for part in parts]
        self.is_single = get_origin(result) is not tuple
        # The fake: the same function without the compiled half, which only allocates the outputs.
        sizes = ("tree_attention_workspace", "mla_tree_attention_workspace", "verify_tree_workspace")
        nothing = types.SimpleNamespace(**dict.fromkeys(sizes, lambda *_: 0), **{name: lambda *_: None})
        self.fake = types.FunctionType(
            self.call.__code__,
            self.call.__globals__ | {"_C": nothing},
            name,
            self.call.__defaults__,
            self.call.__closure__,
        )
        self.fake.__kwdefaults__ = self.call.__kwdefaults__

    def schema(self, overload: str, without: str | None, required: str | None) -> str:
        arguments: list[str] = []
        marks = (chr(ord("a") + i) for i in range(26))
        for parameter in self.parameters:
            if parameter.name == without:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
                arguments.append("*")
            hint = self.hints[parameter.name]
            fields = {parameter.name: hint}
            if _is_struct(hint):
                fields = {f"{parameter.name}_{field}": kind for field, kind in _struct_fields(hint).items()}
            for field, kind in fields.items():
                kind, default = _schema_type(kind), _default(parameter.default)
                if field == required:
                    kind, default = kind.removesuffix("?"), ""
                if field in self.changed:
                    kind = kind.replace("Tensor", f"Tensor({next(marks)}!)")
                arguments.append(f"{kind} {field}{default}")
        count = sum(1 if part is None else len(_struct_fields(part)) for part in self.results)
        if self.name == "add_rms_norm" and required is None:
            count = 1  # the second result is x, which an operator must not return
        results = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
        return f"{self.name}{overload}({', '.join(arguments)}) -> {results}"

    def implementation(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Run the op: build structs from flat arguments and flatten the results."""

        def kernel(*values: Any, **options: Any) -> Any:
            rest, arguments = iter(values), []
            for parameter in self.parameters:
                if parameter.kind is parameter.KEYWORD_ONLY:
                    break
                hint = self.hints[parameter.name]
                if _is_struct(hint):
                    arguments.append(hint(*(next(rest) for _ in _struct_fields(hint))))
                else:
                    arguments += [value for value in [next(rest, _MISSING)] if value is not _MISSING]
            results = [result for result in _flat(call(*arguments, **options)) if result is not values[0]]
            return results[0] if len(results) == 1 else tuple(results) or None

        return kernel

    def register(self, overload: str = "", without: str | None = None, required: str | None = None) -> Any:
        """Define an operator and return its overload, the fastest way to call it."""
        _library.define(self.schema(overload, without, required))
        op = getattr(getattr(torch.ops.specdec, self.name), overload.removeprefix(".") or "default")
        torch.library.register_fake(op, self.implementation(self.fake), lib=_library)
        for key in ("CPU", "CUDA"):
            _library.impl(op, self.implementation(self.call), key)
        for key in ("Conjugate", "Negative"):
            _library.impl(op, _refuse_lazy_views(op), key)
        return op


_MISSING = object()


def _flat(value: Any) -> Iterator[Any]:
    """Return the tensors of nested tuples, in order."""
    if isinstance(value, tuple):
        for each in value:
            yield from _flat(each)
    elif value is not None:
        yield value


def _refuse_lazy_views(op: Any) -> Callable[..., None]:
    """Define a kernel for conj and neg views, which PyTorch would otherwise copy, pools included, on every call."""
    schema = op._schema
    name = schema.name.removeprefix("specdec::")

    def refuse(*arguments: Any, **options: Any) -> None:
        named = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | options
        for argument, value in named.items():
            if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
                view, method = ("conj", "resolve_conj") if value.is_conj() else ("neg", "resolve_neg")
                raise ValueError(f"{name}: {argument} is a {view} view, expected a plain tensor ({method}() makes one)")

    return refuse


def _function(name: str) -> Any:
    """Return the op as a function over its operators, or the operator itself where the two take and return the same.

    An op that returns tensors and changes nothing but an optional argument has two operators, with that argument and
    without, because Inductor (torch 2.13) fails on one whose only mutable argument is None.
    """
    op = _Op(name)
    split = "residual" if name == "add_rms_norm" else "status" if op.changed == ("status",) else None
    plain = op.register(without=split)
    if split is None and not any(op.results) and not any(_is_struct(hint) for hint in op.hints.values()):
        return plain
    given = op.register(f".{split}", required=split) if split else plain
    sizes = [1 if part is None else len(_struct_fields(part)) for part in op.results]

    # Plain loops: Dynamo (torch 2.11) cannot trace more concise code over named tuples.
    structs = {name: tuple(_struct_fields(hint)) for name, hint in op.hints.items() if _is_struct(hint)}

    def function(*arguments: Any, **options: Any) -> Any:
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, tuple):
                for value in argument:
                    values.append(value)
            else:
                values.append(argument)
        named: dict[str, Any] = {}
        for parameter, argument in options.items():
            if parameter in structs:
                for field, value in zip(structs[parameter], argument, strict=True):
                    named[f"{parameter}_{field}"] = value
            else:
                named[parameter] = argument
        called = given
        if split is not None and named.get(split) is None:
            named.pop(split, None)
            called = plain
        results = called(*values, **named)
        if name == "add_rms_norm" and called is plain:
            return results, values[0]
        if not sizes or sizes == [1]:
            return results
        parts, at = [], 0
        for part, size in zip(op.results, sizes, strict=True):
            piece = results[at : at + size]
            parts.append(piece[0] if part is None else part(*piece))
            at += size
        return parts[0] if op.is_single else tuple(parts)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`ops.{name}` as an operator."
    return function


# Ops with a compiled half; the others are plain Python.
OPS = tuple(name for name in public_ops() if native_halves(name))
globals().update({name: _function(name) for name in OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
