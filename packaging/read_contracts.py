"""Write tests/compat/contracts/<engine>-<version>.json: what a plugin's contracts read in a release of its engine.

    python packaging/read_contracts.py sglang 0.5.23

The contracts are those of this version, or of the nearest earlier one that the plugin knows. The modules that they name
are read from the wheel in the package index, by HTTP ranges; the wheel is neither downloaded whole nor installed.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_kernels.compat.contracts import Found, Part, Sources, broken_parts, recorded
from specdec_kernels.compat.version_gate import nearest_tested

RECORDS = Path(__file__).resolve().parents[1] / "tests" / "compat" / "contracts"
INDEX = "https://pypi.org/simple"
TIMEOUT = 60  # seconds
READ_AHEAD = 1 << 20  # bytes; a request takes as long as this many


class RemoteFile(io.RawIOBase):
    """A file read by HTTP ranges.

    Args:
        url: of a server that answers ranges.
        size: of the file, in bytes.
    """

    def __init__(self, url: str, size: int) -> None:
        super().__init__()
        self.url, self.size, self.position = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        asked = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{last}"})
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url} answered {answer.status}, expected 206 (a range)")
            data = answer.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def wheel_of(package: str, version: str, index: str = INDEX) -> tuple[str, int]:
    """Return the address and size of a wheel for Linux on x86-64 in an index that answers JSON.

    Raises:
        LookupError: there is none.
    """
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{index}/{package}/", headers=accept), timeout=TIMEOUT
    ) as answer:
        files = json.load(answer)["files"]
    start = re.escape(f"{package.replace('-', '_')}-{version}-")
    for file in files:
        if re.fullmatch(rf"{start}.*(x86_64|any)\.whl", file["filename"]):
            return file["url"], file["size"]
    raise LookupError(f"{index} has no wheel of {package} {version} for Linux on x86-64")


def wheel_sources(url: str, size: int) -> Sources:
    """Return the sources in a wheel; a module is read when it is asked for."""
    wheel = zipfile.ZipFile(io.BufferedReader(RemoteFile(url, size), READ_AHEAD))
    names = set(wheel.namelist())

    def text_of(module: str) -> str | None:
        path = module.replace(".", "/")
        name = next((one for one in (f"{path}/__init__.py", f"{path}.py") if one in names), None)
        return None if name is None else wheel.read(name).decode()

    return Sources(text_of)


def parts_for(engine: str, version: str) -> Sequence[Part]:
    """Return the parts whose contracts apply to a version of an engine.

    Raises:
        LookupError: the version is older than all that the plugin knows.
    """
    contracts = importlib.import_module(f"specdec_kernels.compat.{engine}.contracts")
    base = nearest_tested(version, contracts.VERSIONS)
    if base is None:
        raise LookupError(f"{engine} {version} is older than {contracts.VERSIONS[0]}, the first that the plugin knows")
    parts: Sequence[Part] = contracts.parts_of(base)
    return parts


def read(engine: str, version: str, index: str = INDEX) -> dict[str, Found]:
    """Return what the contracts for a version read in its wheel."""
    return recorded(parts_for(engine, version), wheel_sources(*wheel_of(engine.replace("_", "-"), version, index)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="the engine's package, such as sglang")
    parser.add_argument("version", nargs="+", help="a release, such as 0.5.23")
    parser.add_argument("--index", default=INDEX, help="a package index with JSON (default: %(default)s)")
    given = parser.parse_args()
    for version in given.version:
        record = read(given.engine, version, given.index)
        path = RECORDS / f"{given.engine}-{version}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        broken = broken_parts(parts_for(given.engine, version), record)
        print(f"{path}: {len(record)} contracts; {len(broken)} parts would be left to {given.engine}")
        for part, reason in broken.items():
            print(f"  {part}: {reason}")


if __name__ == "__main__":
    main()
