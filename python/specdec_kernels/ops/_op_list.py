"""List the public ops and what this build has of each: for `specdec info`, torch_ops and the tests."""

from __future__ import annotations

import inspect

from .. import _C
from . import attention, draft, kv, layers, tree, verify

ROOMS = (draft, tree, layers, attention, verify, kv)


def public_ops() -> list[str]:
    """Return the name of every public function of the rooms, in the order of the files."""
    return [
        name
        for room in ROOMS
        for name, value in vars(room).items()
        if inspect.isfunction(value) and value.__module__ == room.__name__ and not name.startswith("_")
    ]


def native_halves(op: str) -> list[str]:
    """Return the devices that a compiled `op` runs on; none for a helper in Python, a workspace size or a plan."""
    if not hasattr(_C, op) or op.endswith(("_workspace", "_plan")):
        return []
    return ["cpu"] if _C.cuda_version is None else ["cpu", "cuda"]
