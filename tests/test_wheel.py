"""A wheel holds what it should, asks the system for next to nothing, and works where nothing else is installed."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

import native_build

ROOT = native_build.ROOT
DEVELOPMENT_BUILD = ROOT / "build" / "dev"

# Of any system with glibc and a C++ runtime; cudart is inside, and libcuda is loaded when a kernel is.
SYSTEM_LIBRARIES = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld-linux-x86-64"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the objects that the development build has just made, so that nothing is compiled a second time."""
    native_build.require(["scikit_build_core", "pybind11", "tvm_ffi"], ["c++", "readelf", "nm"])
    if not (DEVELOPMENT_BUILD / "CMakeInit.txt").exists():
        pytest.skip("there is no build in build/dev (./build.sh dev makes it)")
    directory = tmp_path_factory.mktemp("wheel")
    with native_build.alone(ROOT / "build" / "wheel"):
        native_build.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"),
                *("-w", directory, "-Cbuild-dir=build/dev", ROOT),
            ],
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )
    (path,) = directory.glob("specdec_kernels-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing else, not even pip."""
    directory = tmp_path_factory.mktemp("environment")
    native_build.run([sys.executable, "-m", "venv", "--without-pip", directory])
    python = directory / "bin" / "python"
    native_build.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], PYTHONPATH=""
    )
    return python


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        return Path(archive.extract(name, directory))


def files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_everything_that_runs_is_inside(wheel: Path) -> None:
    expected = ["__init__.py", "_C.pyi", "py.typed", "ops.py", "reference/draft.py", "engine/drafts/eagle.py"]
    expected += [f"bench/{path.relative_to(ROOT / 'bench')}" for path in (ROOT / "bench").rglob("*.py")]
    for model in ("target", "eagle3"):
        expected += [f"tiny_model/{model}/{path.name}" for path in (ROOT / "examples" / "tiny" / model).iterdir()]
    assert {f"specdec_kernels/{name}" for name in expected} <= files(wheel)
    assert any(name.endswith("/licenses/LICENSE") for name in files(wheel))


def test_nothing_else_is_inside(wheel: Path) -> None:
    kinds = {Path(name).suffix for name in files(wheel) if name.startswith("specdec_kernels/")}
    assert kinds == {".py", ".pyi", ".typed", ".so", ".json", ".safetensors"}
    assert not [
        name for name in files(wheel) if re.search(r"train\.py|corpus\.py|/results/|/tests/|metrics\.json", name)
    ]


def test_it_needs_the_system_alone(module: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\.so", native_build.run(["readelf", "-d", module]))
    assert needed and set(needed) <= SYSTEM_LIBRARIES


def test_it_exports_one_symbol(module: Path) -> None:
    symbols = native_build.run(["nm", "-D", "--defined-only", module]).split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["PyInit__C"]


def test_it_imports_where_nothing_else_is(python: Path) -> None:
    program = "import sys, specdec_kernels as sd; print(sd.__version__, {'torch', 'numpy'} & sys.modules.keys())"
    said = native_build.run([python, "-c", program], PYTHONPATH="")
    assert said == f"{(ROOT / 'VERSION').read_text().strip()} set()\n"


def test_specdec_info_works_where_nothing_else_is(python: Path) -> None:
    said = native_build.run([python.parent / "specdec", "info"], PYTHONPATH="")
    assert re.search(r"^numpy +not installed$", said, re.MULTILINE)
    assert re.search(r"^select_topk +yes ", said, re.MULTILINE)


def test_the_models_are_found(python: Path) -> None:
    program = "from specdec_kernels.tiny import tiny_model; print(*map(tiny_model, ('target', 'eagle3')))"
    for folder in native_build.run([python, "-c", program], PYTHONPATH="").split():
        assert Path(folder).is_relative_to(python.parents[1]) and (Path(folder) / "model.safetensors").exists()


def test_ops_run_with_numpy_alone(python: Path, tmp_path: Path) -> None:
    packages = Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    program = """
import numpy as np, specdec_kernels as sd
print(sd.select_topk(np.array([[0, 3, 1, 2]], np.float32), 2)[0].tolist())
"""
    assert native_build.run([python, "-c", program], PYTHONPATH=str(tmp_path)) == "[[1, 3]]\n"
