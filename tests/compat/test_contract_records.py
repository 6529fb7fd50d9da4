"""Contracts of the plugins against what each tested version of an engine has, as recorded from its wheel.

`packaging/read_contracts.py` writes the records.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.compat.contracts import Names, Parameters, Part, broken_parts

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "compat" / "contracts"
ENGINES = sorted(path.parent.name for path in (ROOT / "python" / "specdec_kernels" / "compat").glob("*/contracts.py"))
TESTED = [
    (engine, version)
    for engine in ENGINES
    for version in importlib.import_module(f"specdec_kernels.compat.{engine}.contracts").VERSIONS
]
each_version = pytest.mark.parametrize(("engine", "version"), TESTED)


def parts_of(engine: str, version: str) -> list[Part]:
    return list(importlib.import_module(f"specdec_kernels.compat.{engine}.contracts").parts_of(version))


def record_of(engine: str, version: str) -> dict[str, Any]:
    return dict(json.loads((RECORDS / f"{engine}-{version}.json").read_text()))


@pytest.fixture(scope="module")
def read_contracts() -> Any:
    """Import packaging/read_contracts.py."""
    spec = importlib.util.spec_from_file_location("read_contracts", ROOT / "packaging" / "read_contracts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_record_belongs_to_a_tested_version() -> None:
    assert {path.name for path in RECORDS.glob("*.json")} == {f"{engine}-{known}.json" for engine, known in TESTED}


@each_version
def test_contracts_hold_in_the_recorded_version(engine: str, version: str) -> None:
    parts, record = parts_of(engine, version), record_of(engine, version)
    assert broken_parts(parts, record) == {}
    assert {contract.key for part in parts for contract in part.contracts} == set(record)


@each_version
def test_changed_signature_breaks_the_parts_that_rely_on_it(engine: str, version: str) -> None:
    parts, record = parts_of(engine, version), record_of(engine, version)
    keys = {contract.key: contract for part in parts for contract in part.contracts}
    for key, contract in keys.items():
        changed: Any = None  # the place is gone
        if isinstance(contract, Parameters):
            changed = ["inserted", *record[key]]
        elif isinstance(contract, Names):
            changed = []
        relying: set[str] = set()
        for part in parts:
            if relying & set(part.needs) or any(one.key == key for one in part.contracts):
                relying.add(part.name)
        assert set(broken_parts(parts, record | {key: changed})) == relying, key


@pytest.mark.contracts
@pytest.mark.parametrize(
    ("engine", "version"),
    [
        (engine, version)
        for engine, version in TESTED
        if getattr(importlib.import_module(f"specdec_kernels.compat.{engine}.contracts"), "IN_INDEX", True)
    ],
)
def test_release_in_the_index_has_the_recorded_contracts(engine: str, version: str, read_contracts: Any) -> None:
    assert read_contracts.read(engine, version) == record_of(engine, version)


class RangeAnswer(io.BytesIO):
    status = 206


def test_wheel_is_read_by_ranges(read_contracts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of a wheel and the modules asked for are transferred."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as wheel:
        wheel.writestr("engine/__init__.py", "VERSION = 1")
        wheel.writestr("engine/large.bin", bytes(10000))
        wheel.writestr("engine/worker.py", "def draft(batch): ...")
        wheel.writestr("engine/other.bin", bytes(10000))
    data, sent = buffer.getvalue(), []
    files = [
        {"filename": f"engine-1.{minor}-py3-none-{platform}.whl", "url": f"http://files/{minor}/{platform}", "size": len(data)}
        for minor in (2, 20) for platform in ("manylinux_2_28_aarch64", "manylinux_2_28_x86_64")
    ]  # fmt: skip

    def urlopen(request: Any, timeout: float) -> Any:
        if request.full_url == f"{read_contracts.INDEX}/engine/":
            return io.BytesIO(json.dumps({"files": files}).encode())
        assert request.full_url == "http://files/2/manylinux_2_28_x86_64"
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        sent.append(last + 1 - first)
        return RangeAnswer(data[first : last + 1])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(read_contracts, "READ_AHEAD", 256)
    sources = read_contracts.wheel_sources(*read_contracts.wheel_of("engine", "1.2"))
    assert Parameters("engine.worker:draft", ()).read(sources) == ["batch"]
    assert Names("engine", ("VERSION",)).read(sources) == ["VERSION"]
    assert Names("engine.other", ("VERSION",)).read(sources) is None
    assert 0 < sum(sent) < 5000
    with pytest.raises(LookupError, match=r"^https://pypi.org/simple has no wheel of engine 1.3 for Linux on x86-64$"):
        read_contracts.wheel_of("engine", "1.3")
