"""Which files the repository holds, and where tests and their helpers stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.native_build import ROOT, tracked_files

TESTS = ROOT / "tests"

ENTRIES = {
    *(".ci", ".clang-format", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CMakeLists.txt"),
    *("CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "THIRD_PARTY_NOTICES", "VERSION", "bench", "build.sh"),
    *("constraints.txt", "csrc", "deploy", "docs", "examples", "mkdocs.yml", "packaging", "pyproject.toml", "python"),
    "tests",
}
SOURCES = {".py", ".pyi", ".in", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".sh", ".mjs", ".html", ".css", ".md", ".svg"}
SETTINGS = {".toml", ".yml", ".yaml", ".cff", ".service", ".dockerignore", ".typed"}
DATA = {".json", ".jsonl", ".txt", ".safetensors", ".LICENSE"}
NO_SUFFIX = {".ci/run", "deploy/Dockerfile"}
READ_AS_FOLDERS = ("bench/results", "tests/compat/contracts")


def test_root_holds_known_entries() -> None:
    assert {path.parts[0] for path in tracked_files()} == ENTRIES


def test_no_tracked_file_is_ignored() -> None:
    """What .gitignore names is built, cached or generated."""
    assert not tracked_files("--cached", "--ignored", "--exclude-standard")


def test_tracked_files_are_of_known_kinds() -> None:
    """Logs, traces, cores and profiles are not."""
    below = [path for path in tracked_files() if len(path.parts) > 1 and str(path) not in NO_SUFFIX]
    assert not [path for path in below if path.suffix not in SOURCES | SETTINGS | DATA]


def test_no_tracked_record_is_a_trace() -> None:
    records = [path for path in tracked_files() if path.suffix == ".json"]
    assert records and not [path for path in records if "traceEvents" in json.loads((ROOT / path).read_text())]


def test_data_files_are_named_where_they_are_read() -> None:
    files = tracked_files()
    readers = {path: (ROOT / path).read_text() for path in files if path.suffix in SOURCES | SETTINGS}
    data = [path for path in files if path.suffix in DATA | {".svg", ".css", ".mjs", ".html"}]

    def is_named(path: Path) -> bool:
        return any(path.name in text for reader, text in readers.items() if reader != path)

    assert not [path for path in data if not str(path).startswith(READ_AS_FOLDERS) and not is_named(path)]


def test_no_test_module_imports_another() -> None:
    """Helpers that several modules need are in tests/support."""
    imported = re.compile(r"^ *(?:from|import) +(?:[\w.]*\.)?(test_\w+)", re.MULTILINE)
    modules = {path.stem: path for path in TESTS.rglob("*.py")}
    found = {name: imported.findall(path.read_text()) for name, path in modules.items()}
    assert not [(name, other) for name, others in found.items() for other in others if other in modules]
