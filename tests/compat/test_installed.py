"""compat.installed: what `specdec info` says of engines, on packages written here."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from specdec_kernels import cli
from specdec_kernels.compat.installed import ENGINES, installed_engines

COMPAT = Path(__file__).resolve().parents[2] / "python" / "specdec_kernels" / "compat"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("SPECDEC_SGLANG", "SPECDEC_VLLM", "SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def install(site: Path, package: str, version: str) -> None:
    """Install a package without modules."""
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (site / package).mkdir()
    (site / package / "__init__.py").write_text("raise RuntimeError('imported')")


def lines(capsys: Capture) -> dict[str, str]:
    """Return what `specdec info` prints of each engine."""
    assert cli.main(["info"]) == 0
    printed = (line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    return {words[0]: words[1] for words in printed if len(words) == 2}


def test_info_names_tested_engine_with_all_its_parts(site: Path, capsys: Capture) -> None:
    install(site, "vllm", "0.33.0+cu130")
    said = lines(capsys)
    assert said["vLLM"] == "0.33.0+cu130, gets attention, n-gram proposer"
    assert said["TensorRT-LLM"] == "not installed"
    assert said["transformers"] == f"{importlib.metadata.version('transformers')}, gets hf.generate, hf.assisted"


def test_info_says_why_parts_of_an_untested_engine_are_left(site: Path, capsys: Capture) -> None:
    install(site, "vllm", "0.34.0")
    install(site, "tensorrt_llm", "1.3.0")
    said = lines(capsys)
    assert said["vLLM"] == (
        "0.34.0, gets nothing; not attention: vllm.plugins does not exist; not n-gram proposer: "
        "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer does not exist"
    )
    assert said["TensorRT-LLM"].startswith("1.3.0, gets nothing; not n-gram drafter: tensorrt_llm._torch.speculative")
    assert cli.main(["info", "--json"]) == 0
    vllm = json.loads(capsys.readouterr().out)["engines"]["vLLM"]
    assert vllm["version"] == "0.34.0" and not vllm["tested"] and vllm["takes_over"] == []
    assert set(vllm["left"]) == {"attention", "n-gram proposer"}


def test_every_engine_with_contracts_is_looked_for(site: Path) -> None:
    assert sorted(ENGINES.values()) == sorted(path.parent.name for path in COMPAT.glob("*/contracts.py"))
    install(site, "sglang", "0.5.23")
    found = installed_engines()["SGLang"]
    assert found is not None and found.is_tested and "attention" in found.parts and not found.left


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SPECDEC_VLLM", "0", "SPECDEC_VLLM is 0"),
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS is 'other', without specdec"),
    ],
)
def test_info_names_the_variable_that_disables_a_plugin(
    name: str, value: str, reason: str, site: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "vllm", "0.33.0")
    monkeypatch.setenv(name, value)
    assert lines(capsys)["vLLM"] == f"0.33.0, gets nothing ({reason})"


def test_info_says_which_versions_are_too_old(site: Path, capsys: Capture) -> None:
    install(site, "vllm", "0.25.0")
    assert lines(capsys)["vLLM"] == (
        "0.25.0, gets nothing (vLLM 0.25.0 is older than 0.26.0, the first tested version)"
    )


@pytest.mark.parametrize(
    ("version", "parts", "is_tested"), [("5.16.1", (), False), ("5.30", ("hf.generate", "hf.assisted"), True), ("6.0", ("hf.generate", "hf.assisted"), False)]
)  # fmt: skip
def test_transformers_is_supported_from_its_first_version_on(
    version: str, parts: tuple[str, ...], is_tested: bool, site: Path
) -> None:
    install(site, "transformers", version)
    found = installed_engines()["transformers"]
    assert found is not None and found.parts == parts and found.is_tested == is_tested
