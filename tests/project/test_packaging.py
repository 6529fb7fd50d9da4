"""A fresh copy of the source, in a folder with a space in its name, builds as a stranger would build it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import native_build

ROOT = native_build.ROOT
QUICK = "None"  # a build type of no options: neither optimized nor with debug information
# Each library compiled as one file: most of the time goes into headers. (The development build compiles each file alone.)
AS_ONE = "set(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE 0)\nset(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy what a clone would hold: every file that git does not ignore, and nothing that was built."""
    native_build.require([], ["c++"])
    copy = tmp_path / "a folder with spaces"
    for name in native_build.tracked_files("--cached", "--others", "--exclude-standard"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    assert files(copy / "csrc") == files(ROOT / "csrc")
    return copy


@pytest.fixture
def trees(source: Path) -> Path:
    """Reduce the copy to the ops on trees: its build is shown, and the development build has compiled all files."""
    for file in (source / "csrc").rglob("*.cpp"):
        is_other_module = file.name.endswith("_module.cpp") and file.name != "tree_module.cpp"
        if is_other_module or file.parent.name not in ("core", "tree", "python"):
            file.unlink()
    return source


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Create an empty environment, which this Python's pip fills; return its Python."""
    native_build.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"])
    return tmp_path / "environment" / "bin" / "python"


@pytest.fixture
def toolchain(tmp_path: Path) -> str:
    """Return the path of a file of settings that CMake reads before the project, where CMAKE_TOOLCHAIN_FILE names it."""
    path = tmp_path / "toolchain.cmake"
    path.write_text(AS_ONE)
    return str(path)


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def pip(python: Path, *arguments: str | Path, **variables: str) -> None:
    """Run pip with the versions in constraints.txt, those of build requirements too, and write no bytecode."""
    constraints = (ROOT / "constraints.txt").as_uri()
    command = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check", *arguments]
    native_build.run(
        command,
        PIP_CONSTRAINT=constraints,
        PIP_BUILD_CONSTRAINT=constraints,
        PIP_NO_COMPILE="1",
        PYTHONPATH="",
        PYTHONDONTWRITEBYTECODE="1",
        **variables,
    )


def test_pip_installs_from_it_and_writes_nothing_there(trees: Path, environment: Path, toolchain: str) -> None:
    before = files(trees)
    variables = {"SPECDEC_CUDA": "OFF", "CMAKE_TOOLCHAIN_FILE": toolchain}
    pip(environment, "install", "--no-deps", f"-Ccmake.build-type={QUICK}", trees, **variables)
    assert files(trees) == before
    program = (
        "from importlib.metadata import files, version; print(version('specdec_kernels'), *files('specdec_kernels'))"
    )
    version, *installed = native_build.run([environment, "-c", program], PYTHONPATH="").split()
    assert version == (ROOT / "VERSION").read_text().strip()
    names = {path.name for path in map(Path, installed) if path.parent == Path("specdec_kernels")}
    (module,) = {name for name in names if name.endswith(".so")}
    assert module.startswith("_C.")
    assert names - {module} == {path.name for path in (trees / "python/specdec_kernels").iterdir() if path.is_file()}


@pytest.mark.exhaustive
def test_wheel_builds_in_fresh_checkout(trees: Path, toolchain: str) -> None:
    done = subprocess.run(
        ["./build.sh", "wheel", "cpu"],
        cwd=trees,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONS": sys.executable,
            "PYTHONPATH": "",
            "PIP_NO_COMPILE": "1",
            "CMAKE_BUILD_TYPE": QUICK,
            "CMAKE_TOOLCHAIN_FILE": toolchain,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (trees / "dist").glob("*.whl")
    assert wheel.name.startswith(f"specdec_kernels-{(ROOT / 'VERSION').read_text().strip()}+cpu-cp3")


def test_build_with_nvcc_asks_for_cutlass() -> None:
    """The default run asks; compiling the kernels is what `./build.sh compile-check` does, with that package."""
    native_build.require([], ["nvcc"])
    program = "import sys; sys.path.insert(0, 'packaging'); import build_backend as b; print(*b.get_requires_for_build_wheel())"
    assert "nvidia-cutlass" in native_build.run([sys.executable, "-c", program])


@pytest.mark.exhaustive
def test_pip_finds_all_that_a_build_with_nvcc_needs(source: Path, environment: Path, tmp_path: Path) -> None:
    """What pip would install to build with, and a kernel that includes CUTLASS compiled with that alone."""
    native_build.require([], ["nvcc"])
    program = (
        "import pathlib, sys, tomllib; sys.path.insert(0, 'packaging'); "
        "print(*tomllib.loads(pathlib.Path('pyproject.toml').read_text())['build-system']['requires'], sep='\\n')"
    )
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    requires = subprocess.run([environment, "-c", program], cwd=source, capture_output=True, text=True, check=True)
    pip(environment, "install", *requires.stdout.split("\n")[:-1])
    program = "import sys; sys.path.insert(0, 'packaging'); import build_backend as b; print(*b.get_requires_for_build_wheel())"
    asked = subprocess.run([environment, "-c", program], cwd=source, capture_output=True, text=True, check=True)
    assert "nvidia-cutlass" in asked.stdout
    pip(environment, "install", "cmake", "ninja", *asked.stdout.split())

    tools, build = environment.parent, tmp_path / "a build"
    native_build.run(
        [
            *(tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={environment}"),
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            f"-Dpybind11_DIR={native_build.run([environment, '-m', 'pybind11', '--cmakedir']).strip()}",
            *("-DSKBUILD_PROJECT_VERSION=0", f"-DCMAKE_BUILD_TYPE={QUICK}", "-DSPECDEC_COMPILE_CHECK=ON"),
        ]
    )
    kernel = "CMakeFiles/specdec_core.dir/csrc/kv/copy_kv.cu.o"
    native_build.run([tools / "ninja", "-C", build, kernel])
    assert (build / kernel).exists()
