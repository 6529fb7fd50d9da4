"""compat.contracts and compat.version_gate, on small engines written here."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specdec_kernels.compat import version_gate
from specdec_kernels.compat.contracts import Contract, Lines, Names, Parameters, Part, Sources, broken_parts
from specdec_kernels.compat.version_gate import Takeover, parts_to_take_over

ENGINE = """
import os
from torch import add as plus, mul

if os.environ:
    def draft(batch, *, width): return width + 1
    def draft_more(batch): return 0

class Worker(Base):
    topk: int

    def __init__(self, args):
        self.args, self.width = args, 2
        self.name: str = "a"

    async def step(self, batch, /, *rest, timeout=None, **others):
        def inner(): ...
        self.step_count = self.step_count + 1
        return batch
"""
SOURCES = Sources.of_texts({"engine.worker": ENGINE, "engine.bad": "def ("})


@pytest.mark.parametrize(
    ("contract", "found"),
    [
        (Parameters("engine.worker:draft", ()), ["batch", "width"]),
        (Parameters("engine.worker:Worker.step", ()), ["self", "batch", "timeout"]),
        (Parameters("engine.worker:Worker", ()), None),
        (Parameters("engine.worker:Worker.inner", ()), None),
        (Parameters("engine.worker:draft_less", ()), None),
        (Parameters("engine.other:draft", ()), None),
        (Parameters("engine.bad:draft", ()), None),
        (Names("engine.worker", ("os", "plus", "add", "mul", "draft", "Worker")), ["os", "plus", "mul", "draft", "Worker"]),
        (Names("engine.worker:Worker", ("topk", "args", "width", "name", "step", "batch")), ["topk", "args", "width", "name", "step"]),
        (Lines("engine.worker:draft", "return width + 1"), 1),
        (Lines("engine.worker:Worker.step", "self.step_count"), 2),
        (Lines("engine.worker:draft", "return 0"), 0),
    ],
)  # fmt: skip
def test_contract_reads_source(contract: Contract, found: object) -> None:
    assert contract.read(SOURCES) == found


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (Parameters("engine.worker:draft", ("batch", "width")), None),
        (Parameters("engine.worker:draft", ("batch",), more=True), None),
        (
            Parameters("engine.worker:draft", ("batch",)),
            "engine.worker:draft has the parameters (batch, width), expected (batch)",
        ),
        (
            Parameters("engine.worker:draft", ("batch", "depth"), more=True),
            "engine.worker:draft has the parameters (batch, width), expected (batch, depth, ...)",
        ),
        (Parameters("engine.worker:tree", ()), "engine.worker:tree does not exist"),
        (Names("engine.worker:Worker", ("topk",)), None),
        (Names("engine.worker:Worker", ("topk", "depth", "tree")), "engine.worker:Worker lacks depth, tree"),
        (Lines("engine.worker", "return width + 1"), None),
        (Lines("engine.worker", "self.step_count", 2), None),
        (Lines("engine.worker", "self.step_count", 1), "engine.worker has 2 times `self.step_count`, expected 1"),
        (Lines("engine.worker", "return 2"), "engine.worker lacks `return 2`"),
    ],
)
def test_contract_says_what_is_broken(contract: Contract, reason: str | None) -> None:
    assert contract.broken(contract.read(SOURCES)) == reason


DRAFT = Part("draft", (Parameters("engine.worker:draft", ("batch", "width")),))
TREE = Part("tree", (Names("engine.worker", ("Worker",)),), needs=("draft",))
WORKER = Part("worker", (Names("engine.worker:Worker", ("topk",)),))


def test_part_breaks_with_the_part_that_it_needs() -> None:
    assert broken_parts([DRAFT, TREE, WORKER], SOURCES) == {}
    changed = Sources.of_texts({"engine.worker": ENGINE.replace("*, width", "*, widths")})
    assert broken_parts([DRAFT, TREE, WORKER], changed) == {
        "draft": "engine.worker:draft has the parameters (batch, widths), expected (batch, width)",
        "tree": "it needs draft",
    }


def test_sources_of_folder_and_installed_package_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "specdec_test_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "worker.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    contract = Names("specdec_test_engine.worker", ("Worker",))
    installed = Sources.of_installed("specdec_test_engine")
    assert installed is not None
    for sources in (Sources.of_folder(tmp_path), installed):
        assert contract.read(sources) == ["Worker"]
        assert Names("specdec_test_engine", ("Worker",)).read(sources) == []
        assert Names("specdec_test_engine.tree", ("Worker",)).read(sources) is None
    assert Sources.of_installed("specdec_no_such_engine") is None


def takeover(
    monkeypatch: pytest.MonkeyPatch, found: str | None, text: str = ENGINE, asked: list[str] | None = None
) -> Takeover:
    def version(package: str) -> str:
        assert package == "engine"
        if found is None:
            raise PackageNotFoundError(package)
        return found

    def parts_of(base: str) -> list[Part]:
        if asked is not None:
            asked.append(base)
        return [DRAFT, TREE, WORKER]

    monkeypatch.setattr(version_gate, "version", version)
    tested = ("1.9.0", "1.10.0", "1.12.0")
    return parts_to_take_over(
        "Engine", tested, parts_of, logging.getLogger("test"), lambda package: Sources.of_texts({"engine.worker": text})
    )


def test_tested_version_gets_all_parts_unread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got = takeover(monkeypatch, "1.10.0+cu130", text="")
    assert got == Takeover("1.10.0+cu130", "1.10.0", ("draft", "tree", "worker"))
    assert got.is_tested and not caplog.messages


@pytest.mark.parametrize(
    ("found", "base"), [("1.10.0.post1", "1.10.0"), ("1.11.2", "1.10.0"), ("1.12.0rc1", "1.12.0"), ("2.0", "1.12.0")]
)
def test_untested_version_gets_the_parts_whose_contracts_hold(
    found: str, base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    got = takeover(monkeypatch, found, ENGINE.replace("*, width", "*, widths"), asked)
    assert asked == [base]
    reason = "engine.worker:draft has the parameters (batch, widths), expected (batch, width)"
    assert got == Takeover(found, base, ("worker",), {"draft": reason, "tree": "it needs draft"})
    assert not got.is_tested
    assert caplog.messages == [
        f"specdec: Engine {found} is not tested (1.9.0 to 1.12.0 are); by its sources it gets worker; without draft "
        f"({reason}); without tree (it needs draft)"
    ]


def test_untested_version_without_sources_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    got = takeover(monkeypatch, "3.0", "")
    assert (got.base, got.parts, got.reason) == (None, (), "no contract holds")
    assert caplog.messages[0].startswith(
        "specdec: Engine 3.0 is not tested (1.9.0 to 1.12.0 are); by its sources it gets nothing; "
    )


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("1.8.9", "Engine 1.8.9 is older than 1.9.0, the first tested version"),
        (None, "the version of Engine is not known"),
    ],
)
def test_older_and_unknown_versions_get_nothing(
    found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert takeover(monkeypatch, found) == Takeover(found, reason=reason)
    assert caplog.messages == [f"specdec: {reason}; nothing is changed"]


def test_variable_leaves_the_engine_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SPECDEC_ENGINE", "0")
    assert takeover(monkeypatch, "1.9.0") == Takeover(None, reason="SPECDEC_ENGINE is 0")
    assert not caplog.messages
