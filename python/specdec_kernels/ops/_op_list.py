"""The public ops and the devices that this build has them for; read by `specdec info`, torch_ops and the tests."""

from __future__ import annotations

import inspect

from .. import _C
from . import attention, draft, kv, layers, mla, recurrent, tree, verify

MODULES = (draft, tree, layers, attention, mla, verify, kv, recurrent)


def public_ops() -> list[str]:
    """Return the name of every public op, in the order of MODULES and of their source."""
    return [
        name
        for module in MODULES
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def native_halves(op: str) -> list[str]:
    """Return the devices that `op` is compiled for; none for a Python helper, a workspace size or a plan."""
    if not hasattr(_C, op) or op.endswith(("_workspace", "_plan")):
        return []
    return ["cpu"] if _C.cuda_version is None else ["cpu", "cuda"]
