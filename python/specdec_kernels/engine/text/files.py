"""Text files that users name."""

from __future__ import annotations

from pathlib import Path


def read_text(file: str | Path, name: str) -> str:
    """Read a text in UTF-8; `name` is that of the option, for errors.

    Raises:
        OSError: no such file.
        ValueError: a pipe or a device, which may never end; UnicodeDecodeError: other bytes.
    """
    path = Path(file)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{name} is {file}, expected a regular file")
    return path.read_text("utf-8")
