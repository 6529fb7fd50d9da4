"""The names of the ops, read from ops.py itself: for `specdec info`, and for the tests that none is forgotten."""

from __future__ import annotations

import inspect

from . import _C, ops


def public_ops() -> list[str]:
    """Every public function defined in ops.py, in the order of the file."""
    return [
        name
        for name, value in vars(ops).items()
        if inspect.isfunction(value) and value.__module__ == ops.__name__ and not name.startswith("_")
    ]


def native_halves(op: str) -> list[str]:
    """The devices a compiled `op` runs on in this build; none for a helper that is Python only, or just a size."""
    if not hasattr(_C, op) or op.endswith("_workspace"):
        return []
    return ["cpu"] if _C.cuda_version is None else ["cpu", "cuda"]
