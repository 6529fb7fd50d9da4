"""The words of tests/words.txt do not occur: the field has others for the same things."""

from __future__ import annotations

import re

from support import native_build

ROOT = native_build.ROOT
WORDS = ROOT / "tests" / "words.txt"
ROOMS = ("csrc", "python", "bench", "docs", "tests", "examples", "packaging")
KINDS = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".md", ".toml", ".sh", ".html", ".cmake"}
LEFT_OUT = (
    "python/specdec_kernels/_deprecated.py",
    "docs/benchmarks.md",
    "docs/models.md",
    "bench/results",
    "examples/tiny",
)
CLAUSE = r"(?:^|[.,;:#\"] *)of which\b"  # at the start of a clause


def words() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in WORDS.read_text().splitlines())
    return [line for line in lines if line]


def sources() -> list[str]:
    """Return the files that are written by hand, but for records and the table of old public names."""
    files = native_build.tracked_files("--", *ROOMS, "README.md", "CONTRIBUTING.md", "build.sh")
    left_out = (*LEFT_OUT, "tests/project/test_words.py")
    return [str(path) for path in files if path.suffix in KINDS and not str(path).startswith(left_out)]


def found_in(text: str) -> list[tuple[int, str]]:
    """Return the line and the word of each hit."""
    each = [re.escape(word) if word != word.lower() else f"(?i:{re.escape(word)})" for word in words()]
    pattern = re.compile(rf"\b(?:{'|'.join(each)})\b|(?i:{CLAUSE})", re.MULTILINE)
    return [(text.count("\n", 0, hit.start()) + 1, hit[0].strip()) for hit in pattern.finditer(text)]


def test_words_of_the_list_are_found() -> None:
    text = "A Planted one.\nWhoever, of which\nbehindhand, StandIns"
    assert [(line, word.lower()) for line, word in found_in(text)] == [
        (1, "planted"),
        (2, "whoever"),
        (2, ", of which"),
        (3, "standins"),
    ]


def test_no_file_holds_a_word_of_the_list() -> None:
    assert not [f"{name}:{line}: {word}" for name in sources() for line, word in found_in((ROOT / name).read_text())]
