"""The tree builds where there is no nvcc, and says so when it is given CUDA tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import specdec_kernels
from support import native_build

BUILD = native_build.ROOT / "build" / "cpu"

IMPORTS = """
import ctypes
import numpy as np
import specdec_kernels as sd
"""

# Puts the module of the CPU build in the place of the installed one.
USE_CPU_BUILD = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("specdec_kernels._C", {module!r})
sys.modules["specdec_kernels._C"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["specdec_kernels._C"])
"""


@pytest.fixture(scope="module")
def preamble() -> str:
    """Return the start of a program that uses a build without CUDA.

    That is the installed one, or one whose directory is kept, so that the next build takes seconds.
    """
    if specdec_kernels.cuda_version is None:
        return IMPORTS
    native_build.require(["cmake", "ninja", "pybind11", "tvm_ffi"], ["c++"])
    import cmake
    import ninja
    import pybind11

    with native_build.alone(BUILD):
        native_build.run(
            [
                Path(cmake.CMAKE_BIN_DIR) / "cmake",
                *("-S", native_build.ROOT, "-B", BUILD, "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DSKBUILD_PROJECT_VERSION={(native_build.ROOT / 'VERSION').read_text().strip()}",
                "-DSPECDEC_CUDA=OFF",
                *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"),
            ]
        )
        native_build.run([Path(cmake.CMAKE_BIN_DIR) / "cmake", "--build", BUILD])
    (module,) = BUILD.glob("_C.*.so")
    return USE_CPU_BUILD.format(module=str(module)) + IMPORTS


def test_cpu_build_reports_no_cuda(preamble: str) -> None:
    said = native_build.run([sys.executable, "-c", preamble + "print(sd.cuda_version, sd.cuda_architectures)"])
    assert said == "None None\n"


def test_ops_run_on_numpy_arrays(preamble: str) -> None:
    program = """
logits = np.array([[0, 3, 1, 2], [5, 5, 0, 7]], np.float32)
ids, logprobs = sd.select_topk(logits, 2)
print(ids.tolist(), logprobs.dtype)
"""
    assert native_build.run([sys.executable, "-c", preamble + program]) == "[[1, 3], [3, 0]] float32\n"


def test_cuda_tensors_are_refused_by_name(preamble: str) -> None:
    program = """
get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

class OnCuda:
    # An array that claims to be on a GPU, as DLPack says it: nobody may read its data.
    def __init__(self, array):
        self.array, self.shape = array, array.shape
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        ctypes.c_int32.from_address(get_pointer(capsule, b"dltensor") + 8).value = 2  # device type, after the data
        return capsule

logits, ids, logprobs = (OnCuda(np.zeros((2, 4), dtype)) for dtype in (np.float32, np.int32, np.float32))
try:
    sd.select_topk(logits, 4, out=sd.TopK(ids, logprobs))
except NotImplementedError as error:
    print(error)
"""
    assert native_build.run([sys.executable, "-c", preamble + program]) == (
        "select_topk: logits is on cuda, and this build of specdec_kernels has no CUDA kernels, expected cpu tensors "
        "(install a CUDA wheel, or build from source where nvcc is on the PATH)\n"
    )
