"""A wheel holds what it should, asks the system for next to nothing, and works where nothing else is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

import specdec_kernels
from support import native_build

ROOT = native_build.ROOT
HERE_CUDA = "OFF" if specdec_kernels.cuda_version is None else "ON"
DEVELOPMENT_BUILD = Path("build") / ("dev-cpu" if HERE_CUDA == "OFF" else "dev")

# Of any system with glibc and a C++ runtime; cudart is inside, and libcuda is loaded when a kernel is.
SYSTEM_LIBRARIES = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld-linux-x86-64"}


# The title in THIRD_PARTY_NOTICES, by the folder that a header is included from; the runtime, models and heads are no headers.
OF_OTHERS = {
    "cutlass": "CUTLASS and CuTe",
    "cute": "CUTLASS and CuTe",
    "cudart": "CUDA runtime",
    "cub": "CUB",
    "cuda": "libcu++",
    "nvtx3": "libcu++",
    "pybind11": "pybind11",
    "dlpack": "DLPack",
    "models": "Tiny models",
    "smollm2": "A head for SmolLM2",
}

HERE = f"cp{sys.version_info[0]}{sys.version_info[1]}"

WHEELS = [None, *sorted((ROOT / "dist").glob("specdec_kernels-*.whl"))]


@pytest.fixture(scope="module", params=WHEELS, ids=["built" if path is None else path.stem for path in WHEELS])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return each wheel in dist, and one made of the objects of the development build, without compiling again."""
    native_build.require(["scikit_build_core", "pybind11", "tvm_ffi"], ["c++", "readelf", "nm"])
    if request.param is not None:
        made = request.param.stat().st_mtime
        sources = (path for room in ("csrc", "python", "bench") for path in (ROOT / room).rglob("*.[chp]*"))
        newer = [path for path in sources if "__pycache__" not in path.parts and path.stat().st_mtime > made]
        if newer:
            pytest.skip(f"{request.param.name} is older than {newer[0].relative_to(ROOT)}")
        return request.param
    if not (ROOT / DEVELOPMENT_BUILD / "CMakeInit.txt").exists():
        pytest.skip(f"there is no build in {DEVELOPMENT_BUILD} (./build.sh dev makes it)")
    directory = tmp_path_factory.mktemp("wheel")
    with native_build.alone(ROOT / "build" / "wheel"):
        native_build.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"),
                *(
                    "-w",
                    directory,
                    f"-Cbuild-dir={DEVELOPMENT_BUILD}",
                    f"-Ccmake.define.SPECDEC_CUDA={HERE_CUDA}",
                    ROOT,
                ),
            ],
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )
    (path,) = directory.glob("specdec_kernels-*.whl")
    return path


def version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def interpreter(wheel: Path) -> str:
    """Return the Python that a wheel is for, looked for where build.sh does."""
    tag = wheel.name.split("-")[2]
    if tag == HERE:
        return sys.executable
    minor = tag.removeprefix("cp3")
    kept = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")
    for path in (shutil.which(f"python3.{minor}"), f"/opt/python/{tag}-{tag}/bin/python", *kept):
        if path and Path(path).exists() and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return str(path)
    pytest.skip(f"there is no CPython 3.{minor}")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and nothing else, not even pip."""
    directory = tmp_path_factory.mktemp("environment")
    native_build.run([interpreter(wheel), "-m", "venv", "--without-pip", directory])
    python = directory / "bin" / "python"
    native_build.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], PYTHONPATH=""
    )
    return python


@pytest.fixture
def packages(wheel: Path, python: Path, tmp_path: Path) -> Path:
    """Return a directory with numpy and nothing else: this one, or for another Python the one that pip finds."""
    if wheel.name.split("-")[2] == HERE:
        installed = Path(numpy.__file__).parents[1]
        for name in ("numpy", "numpy.libs"):
            if (installed / name).exists():
                (tmp_path / name).symlink_to(installed / name)
        return tmp_path
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--only-binary", ":all:"]
    pip += ["-c", ROOT / "constraints.txt", "--target", tmp_path, "numpy"]
    if subprocess.run(pip, capture_output=True).returncode != 0:
        pytest.skip("pip finds no numpy for this Python")
    return tmp_path


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        return Path(archive.extract(name, directory))


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


@pytest.mark.skipif(bool(list(Path("/usr/local").glob("cuda-12*"))), reason="CUDA 12 is here")
def test_wheel_build_without_compiler_is_refused_first() -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"}
    done = subprocess.run([ROOT / "build.sh", "wheel", "cu12"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == (
        "build.sh: there is no nvcc of CUDA 12, expected one on the PATH or in /usr/local/cuda-12.*/bin (NVIDIA's packages "
        "cuda-{nvcc,cudart-dev,cccl,nvtx}-12-9; PyPI's nvidia-cuda-nvcc-cu12 is without nvcc, cicc, cudafe++, fatbinary and "
        "nvlink)\n"
    )


def test_wheel_contains_runtime_files(wheel: Path) -> None:
    expected = [
        "__init__.py",
        "_C.pyi",
        "py.typed",
        "ops/layers.py",
        "reference/draft.py",
        "engine/drafts/eagle.py",
        "server/page.html",
    ]
    expected += [f"bench/{path.relative_to(ROOT / 'bench')}" for path in (ROOT / "bench").rglob("*.py")]
    for model in ("target", "eagle3"):
        expected += [f"tiny_model/{model}/{path.name}" for path in (ROOT / "examples" / "tiny" / model).iterdir()]
    expected += ["packaged_heads/smollm2/eagle3.safetensors"]
    assert {f"specdec_kernels/{name}" for name in expected} <= files(wheel)
    assert any(name.endswith("/licenses/LICENSE") for name in files(wheel))


def test_wheel_contains_the_notices_of_what_is_compiled_in(wheel: Path) -> None:
    (name,) = [name for name in files(wheel) if name.endswith("/licenses/THIRD_PARTY_NOTICES")]
    notices = zipfile.ZipFile(wheel).read(name).decode()
    titles = re.findall(r"^={80}\n(.*)\n={80}$", notices, re.MULTILINE)
    assert {title.split(" (")[0] for title in titles} == set(OF_OTHERS.values())
    assert notices.count("THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS") == 3  # BSD texts
    assert "This software contains source code provided by NVIDIA Corporation." in notices


def test_every_foreign_header_has_a_notice() -> None:
    """Headers of the system and of CUDA's compiler need none; the others name whose they are by their first folder."""
    sources = [path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    included = {name for text in sources for name in re.findall(r"^#include <([^>]+)>", text, re.MULTILINE)}
    ours_or_toolchain = re.compile(r"[a-z_]+|sys/\w+\.h|(Python|poll|pthread|unistd|cuda(_\w+)?|cooperative_groups)\.h")
    foreign = {name.split("/")[0] for name in included if not ours_or_toolchain.fullmatch(name)}
    assert foreign == OF_OTHERS.keys() - {"cudart", "models", "smollm2"}


def test_wheel_contains_no_other_files(wheel: Path) -> None:
    kinds = {Path(name).suffix for name in files(wheel) if name.startswith("specdec_kernels/")}
    assert kinds == {".py", ".pyi", ".typed", ".so", ".json", ".safetensors", ".html"}
    assert not [
        name for name in files(wheel) if re.search(r"train\.py|corpus\.py|/results/|/tests/|metrics\.json", name)
    ]


def test_wheel_version_has_variant_label(wheel: Path) -> None:
    assert re.fullmatch(re.escape((ROOT / "VERSION").read_text().strip()) + r"(\+(cu13|cu12|cpu))?", version(wheel))
    (metadata,) = [name for name in files(wheel) if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {version(wheel)}\n" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_wheel_needs_system_libraries_alone(module: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\.so", native_build.run(["readelf", "-d", module]))
    assert needed and set(needed) <= SYSTEM_LIBRARIES


def test_wheel_exports_one_symbol(module: Path) -> None:
    symbols = native_build.run(["nm", "-D", "--defined-only", module]).split("\n")
    assert [line.split()[-1] for line in symbols if line] == ["PyInit__C"]


def test_module_lacks_no_symbol_of_its_own(module: Path) -> None:
    """Undefined are symbols of libraries, which have a version, and Python's: a forgotten source file leaves others."""
    symbols = native_build.run(["nm", "-D", "--undefined-only", module]).split("\n")
    names = [line.split()[-1] for line in symbols if line]
    weak = ("_ITM_", "__gmon_start__")  # of any module: the system may have them
    assert names and not [
        name for name in names if "@" not in name and not re.match("_?Py", name) and not name.startswith(weak)
    ]


def test_module_is_hardened(module: Path) -> None:
    assert re.search(r"\(FLAGS\).*BIND_NOW", native_build.run(["readelf", "-d", module]))
    segments = native_build.run(["readelf", "-lW", module])
    assert "GNU_RELRO" in segments and re.search(r"GNU_STACK .* RW ", segments)
    undefined = native_build.run(["nm", "-D", "--undefined-only", module])
    assert "__stack_chk_fail" in undefined
    assert re.search(r"__\w+_chk@", undefined)  # of _FORTIFY_SOURCE


def test_wheel_imports_without_dependencies(wheel: Path, python: Path) -> None:
    program = "import sys, specdec_kernels as sd; print(sd.__version__, {'torch', 'numpy'} & sys.modules.keys())"
    said = native_build.run([python, "-c", program], PYTHONPATH="")
    assert said == f"{version(wheel)} set()\n"


def test_specdec_info_works_where_nothing_else_is(python: Path) -> None:
    said = native_build.run([python.parent / "specdec", "info"], PYTHONPATH="")
    assert re.search(r"^numpy +not installed$", said, re.MULTILINE)
    assert re.search(r"^select_topk +yes ", said, re.MULTILINE)


def test_wheel_finds_its_models(python: Path) -> None:
    program = """
from specdec_kernels.smollm2 import head_file
from specdec_kernels.tiny import tiny_model
print(*(tiny_model(name) / "model.safetensors" for name in ("target", "eagle3")), head_file())
"""
    for file in native_build.run([python, "-c", program], PYTHONPATH="").split():
        assert Path(file).is_relative_to(python.parents[1]) and Path(file).exists()


def test_ops_run_with_numpy_alone(python: Path, packages: Path) -> None:
    program = """
import numpy as np, specdec_kernels as sd
print(sd.select_topk(np.array([[0, 3, 1, 2]], np.float32), 2)[0].tolist())
"""
    assert native_build.run([python, "-c", program], PYTHONPATH=str(packages)) == "[[1, 3]]\n"


def torch_for(tag: str, release: str) -> Path:
    """Return a folder with that torch for that Python: the installed one, or one of SPECDEC_TORCHES.

    SPECDEC_TORCHES lists folders of `pip install --target`, separated by colons. PyPI has only CUDA builds of torch,
    which need gigabytes of NVIDIA's packages that no test downloads.
    """
    here = importlib.util.find_spec("torch")
    folders = [] if here is None or here.origin is None else [str(Path(here.origin).parents[1])]
    for folder in map(Path, [*folders, *filter(None, os.environ.get("SPECDEC_TORCHES", "").split(":"))]):
        version_file = (folder / "torch" / "version.py").read_text()
        if f"__version__ = '{release}." in version_file and list((folder / "torch").glob(f"_C.cpython-{tag[2:]}-*")):
            return folder
    pytest.skip(f"there is no torch {release} for {tag} here (SPECDEC_TORCHES names folders of others)")


@pytest.mark.parametrize("release", ["2.10", "2.11", "2.12", "2.13"])
def test_ops_run_with_torch(wheel: Path, python: Path, release: str) -> None:
    """Return site-packages, to follow the wheel on the path, so that the wheel's specdec_kernels is under test."""
    folder = torch_for(wheel.name.split("-")[2], release)
    program = f"""
import sys
sys.path.append({str(folder)!r})
import torch, specdec_kernels as sd

tokens, parents = torch.tensor([[7, 3, 5, 9]]).int(), torch.tensor([[-1, 0, 0, 1]]).int()
tree = sd.build_tree_from_parents(tokens, parents, torch.tensor([10]).int())
logits = torch.zeros(1, 4, 16)
logits[0, 0, 3] = logits[0, 1, 9] = logits[0, 3, 4] = 1
print(torch.__version__, sd.verify_tree(logits, tree, accept_width=3).tokens.tolist(), sd.__file__)
"""
    said, tokens, file = re.fullmatch(
        r"(\S+) (.*\]) (.*)\n", native_build.run([python, "-c", program], PYTHONPATH="")
    ).groups()
    assert said.startswith(f"{release}.") and tokens == "[[3, 9, 4]]" and Path(file).is_relative_to(python.parents[1])
