"""List the public ops and what this build has of each: for `specdec info`, torch_ops and the tests."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

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
    """The devices a compiled `op` runs on in this build; none for a helper that is Python only, a size or a plan."""
    if not hasattr(_C, op) or op.endswith(("_workspace", "_plan")):
        return []
    return ["cpu"] if _C.cuda_version is None else ["cpu", "cuda"]


def argument_name(function: str, index: int) -> str:
    """What _C.pyi calls an argument of a compiled function or of a method of the n-gram index; for error messages."""
    stub = ast.parse((Path(__file__).parents[1] / "_C.pyi").read_text())
    for node in ast.walk(stub):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if index < len(names):
                return names[index]
    return f"argument {index}"
