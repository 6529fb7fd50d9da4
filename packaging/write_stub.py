"""Write python/specdec_kernels/_C.pyi: functions from the compiled module's signatures, classes from csrc/python.

    python packaging/write_stub.py

The bindings name the arguments of each op (`def_op` in csrc/python); C++ gives their types.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from specdec_kernels import _C

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "python" / "specdec_kernels" / "_C.pyi"
CLASSES = ROOT / "csrc" / "python" / "pybind_classes.pyi.in"
HEAD = '''\
"""The compiled module. Written by packaging/write_stub.py; do not edit.

`specdec_kernels.ops` documents the arguments of the ops.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Tensor: TypeAlias = Any
PagePool: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]  # ops.PagePool

version: str
cuda_version: str | None
cuda_architectures: str | None

'''


def signatures() -> list[str]:
    """Return the signature of every op, in the order of the bindings; those of CLASSES are written by hand."""
    by_hand = {node.name for node in ast.parse(CLASSES.read_text()).body if isinstance(node, ast.FunctionDef)}
    docs = {name: value.__doc__ or "" for name, value in vars(_C).items() if callable(value) and name not in by_hand}
    first_lines = [doc.partition("\n")[0] for name, doc in docs.items() if doc.startswith(f"{name}(")]
    return [f"def {line}: ..." for line in first_lines]


def stub() -> str:
    """Return the text of the stub, formatted."""
    text = HEAD + "\n".join(signatures()) + "\n\n" + CLASSES.read_text().partition("\n\n")[2]
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--stdin-filename", "_C.pyi", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    STUB.write_text(stub())
