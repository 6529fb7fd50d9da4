"""Where tests and their helpers stand."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_test_module_imports_another() -> None:
    """Helpers that several modules need are in tests/support."""
    modules = {path.stem: path for path in TESTS.rglob("*.py")}
    tests = {name for name in modules if name.startswith("test_")}
    found = []
    for path in modules.values():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            found += [f"{path.relative_to(TESTS)}:{node.lineno}" for name in names if name.split(".")[-1] in tests]
    assert not found
