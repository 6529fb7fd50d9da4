"""Old names of version 0.2: they warn in 0.3 and go in 0.4."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Old names of ops and structs, and what replaced each.
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

# Old keyword arguments of ops, by the op's new name.
RENAMED_ARGUMENTS: dict[str, dict[str, str]] = {
    "add_rms_norm": {"shares": "topk_weights"},
    "append_draft_backlog": {
        "num_kept": "backlog_lens",
        "kept_tokens": "backlog_tokens",
        "kept_features": "backlog_features",
    },
    "allocate_nodes": {"rungs": "budget_levels", "rung_limits": "level_limits"},
    "dequantize": {"numbers": "qweight"},
    "moe_combine": {"made": "expert_outputs", "shares": "topk_weights"},
    "moe_grouped_gemm": {"order": "sorted_pairs", "ends": "expert_ends", "again": "routing_ready"},
    "moe_route": {"taken": "top_k", "normalised": "renormalize"},
    "rope_qkv_write_kv": {"rotations": "cos_sin"},
}


def deprecated(name: str, module: str, values: Mapping[str, Any]) -> Any:
    """Return what replaced the public name `name` of `module`, and warn.

    Args:
        name: an old name.
        module: the module that the caller asks, for messages.
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
    """Return `function` with the old keywords of RENAMED_ARGUMENTS translated to the new ones."""
    arguments = RENAMED_ARGUMENTS[function.__name__]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for old, new in arguments.items():
            if old in kwargs:
                warnings.warn(f"{function.__name__}: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return call
