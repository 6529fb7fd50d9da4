"""Text files that users name."""

from __future__ import annotations

from pathlib import Path


def read_text(file: str | Path, name: str) -> str:
    """Read a text in UTF-8; `name` is that of the option, for errors.

    Raises:
        OSError: no such file.
        ValueError: a pipe or a device, which may never end; other bytes.
    """
    path, shown = Path(file), str(file) or "''"
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{name} is {shown}, expected a regular file")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is {shown}, expected text in UTF-8") from error
    except OSError as error:
        raise type(error)(f"{name} is {shown}, expected a file that can be read ({error.strerror})") from error
