"""Old public names of version 0.2: they warn in 0.3 and are removed in 0.4."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Old names of ops and structs, and the new ones.
RENAMED = {
    "ExtendRows": "DraftExtendInputs",
    "Routes": "Routing",
    "Shares": "NodeAllocation",
    "combine_rows": "moe_combine",
    "expert_rows": "moe_grouped_gemm",
    "extend_rows": "draft_extend_inputs",
    "gate_rows": "silu_and_mul",
    "keep_rows": "append_draft_backlog",
    "learn_calibration": "update_calibration",
    "linear_rows": "small_m_gemm",
    "norm_rows": "add_rms_norm",
    "pair_rows": "rms_norm_concat",
    "rotate_qkv": "rope_qkv_write_kv",
    "round_rows": "quantize_fp8",
    "route_rows": "moe_route",
    "share_nodes": "allocate_nodes",
    "widen_rows": "dequantize",
}

# Old keyword arguments, and the new ones, by the new name of the function.
RENAMED_ARGUMENTS: dict[str, dict[str, str]] = {
    "NgramIndex.draft": {"num_draft_tokens": "num_nodes"},
    "add_rms_norm": {"shares": "topk_weights"},
    "append_draft_backlog": {
        "num_kept": "backlog_lens",
        "kept_tokens": "backlog_tokens",
        "kept_features": "backlog_features",
    },
    "allocate_nodes": {"rungs": "budget_levels", "rung_limits": "level_limits"},
    "build_tree": {"num_draft_tokens": "num_nodes"},
    "dequantize": {"numbers": "qweight"},
    "merge_trees": {"num_draft_tokens": "num_nodes"},
    "moe_combine": {"made": "expert_outputs", "shares": "topk_weights"},
    "moe_grouped_gemm": {"order": "sorted_pairs", "ends": "expert_ends", "again": "routing_ready"},
    "moe_route": {"taken": "top_k", "normalised": "renormalize"},
    "pack_trees": {"shares": "allocation"},
    "rope_qkv_write_kv": {"rotations": "cos_sin"},
}


def deprecated(name: str, module: str, values: Mapping[str, Any]) -> Any:
    """Return the replacement of a module's old public name, and warn.

    Args:
        name: the name that the module does not have.
        module: the module's name, for messages.
        values: the module's namespace, which has the new name.

    Raises:
        AttributeError: no such old name.
    """
    new = RENAMED.get(name)
    if new is None or new not in values:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return takes_old_arguments(values[new]) if new in RENAMED_ARGUMENTS else values[new]


def takes_old_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of RENAMED_ARGUMENTS: its old keyword arguments warn and become the new ones.

    A function that has kept its name is decorated where it is defined; `deprecated` decorates the others.
    """
    name = function.__qualname__
    arguments = RENAMED_ARGUMENTS[name]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for old, new in arguments.items():
            if old in kwargs:
                warnings.warn(f"{name}: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return call
