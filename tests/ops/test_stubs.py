"""Check that each op has one name in `_C.pyi`, `_C`, ops, csrc and tests, and docstrings that callers need."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import specdec_kernels
from specdec_kernels import _C, ops
from specdec_kernels.ops._op_list import native_halves, public_ops

ROOT = Path(__file__).parents[2]
STUB = ast.parse((Path(specdec_kernels.__file__).parent / "_C.pyi").read_text())

every_op = pytest.mark.parametrize("op", public_ops())


def names_in_stub() -> set[str]:
    """Return functions, classes and attributes that _C.pyi declares; not its imports and type aliases."""
    names = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    names |= {node.name for node in stub_classes()}
    for node in STUB.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None:
            names.add(node.target.id)
    return names


def test_stub_lists_public_names_of_module() -> None:
    assert names_in_stub() == {name for name in dir(_C) if not name.startswith("_")}


def stub_classes() -> list[ast.ClassDef]:
    """Return classes of the module; a class whose name starts with an underscore is a protocol of the stub alone."""
    return [node for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_stub_lists_public_members_of_every_class() -> None:
    for node in stub_classes():
        declared = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        declared |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        # A PyStructSequence also has n_fields, n_sequence_fields and n_unnamed_fields.
        actual = {name for name in vars(getattr(_C, node.name)) if not name.startswith(("_", "n_"))}
        assert {name for name in declared if not name.startswith("_")} == actual, node.name


@every_op
def test_op_is_public(op: str) -> None:
    assert op in specdec_kernels.__all__
    assert getattr(specdec_kernels, op) is getattr(ops, op)


def test_all_is_sorted_and_importable() -> None:
    assert sorted(specdec_kernels.__all__) == sorted(set(specdec_kernels.__all__))
    for name in specdec_kernels.__all__:
        assert hasattr(specdec_kernels, name), name


@every_op
def test_op_has_a_docstring(op: str) -> None:
    doc = inspect.getdoc(getattr(ops, op)) or ""
    returns = inspect.signature(getattr(ops, op)).return_annotation != "None"
    for section in ("Args:", "Returns:", "Raises:") if returns else ("Args:", "Raises:"):
        assert f"\n{section}\n" in doc, f"{op} does not say {section}"


@every_op
def test_op_documents_every_argument(op: str) -> None:
    doc = inspect.getdoc(getattr(ops, op)) or ""
    for name in inspect.signature(getattr(ops, op)).parameters:
        assert f"\n    {name}: " in doc, f"{op} does not say what {name} is"


@every_op
def test_op_has_stream_as_last_keyword(op: str) -> None:
    if not native_halves(op):
        pytest.skip("Python only")
    *_, last = inspect.signature(getattr(ops, op)).parameters.values()
    assert (last.name, last.kind, last.default) == ("stream", inspect.Parameter.KEYWORD_ONLY, None)


@every_op
def test_op_has_its_name_in_csrc_and_tests(op: str) -> None:
    """The op's own header, or that of the op it belongs to, declares its CPU and CUDA halves."""
    if not native_halves(op):
        pytest.skip("Python only")
    (header,) = [path for path in (ROOT / "csrc").rglob("*.h") if f"void {op}(CallStream " in path.read_text()]
    assert header.stem == op or header.stem in public_ops()
    assert header.with_suffix(".cpp").is_file() and header.with_suffix(".cu").is_file()
    assert any(re.search(rf"\b{op}\b", path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))


COMPAT = Path(specdec_kernels.__file__).parent / "compat"


def compat_ops() -> set[str]:
    """Return functions of compat/ that call the compiled one of the same name."""
    functions = [
        node
        for path in COMPAT.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    return {node.name for node in functions if f"_C.{node.name}(" in ast.unparse(node)}


def test_compat_op_has_its_name_in_csrc_and_tests() -> None:
    assert compat_ops()
    headers = [path.read_text() for path in (ROOT / "csrc" / "compat").glob("*.h")]
    tests = [path.read_text() for path in (ROOT / "tests" / "compat").glob("test_*.py")]
    for op in compat_ops():
        assert sum(f"void {op}(CallStream " in text for text in headers) == 1, op
        assert any(f"{op}(" in text for text in tests), op


# Ops that pass records between host and device: private to the engine.
RING_OPS = ("apply_commands", "publish_results")
# Ops over the memory that ranks share: private to `specdec_kernels.parallel`.
RANK_OPS = ("all_reduce", "all_gather", "all_reduce_add_rms_norm")


def test_ring_and_rank_ops_are_private() -> None:
    assert not {*RING_OPS, *RANK_OPS} & {*public_ops(), *specdec_kernels.__all__}
    for op in RANK_OPS:
        assert f"void {op}(CallStream " in (ROOT / "csrc" / "parallel" / "all_reduce.h").read_text()
    for op in RING_OPS:
        assert f"void {op}(CallStream " in (ROOT / "csrc" / "round" / f"{op}.h").read_text()


def test_compiled_functions_all_have_a_known_purpose() -> None:
    functions = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    ops_and_sizes = {name for name in functions if not name.startswith("noop")} - compat_ops()
    ops_and_sizes -= {
        "small_m_gemm_plan_of_sizes",
        "verify_plan",
        "attention_plan",
        "attention_variants",
        "mla_plan",
        "mla_variants",
        "current_gpu",
    }  # of sizes
    ops_and_sizes -= {*RING_OPS, *RANK_OPS, "command_words", "result_words"}
    assert {name for name in ops_and_sizes if native_halves(name)} == {op for op in public_ops() if native_halves(op)}
    assert {name.removesuffix("_workspace").removesuffix("_plan") for name in ops_and_sizes} <= set(public_ops())


ROOMS = sorted({path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} - {"core", "python"})


@pytest.mark.parametrize("room", ROOMS)
def test_csrc_folder_is_a_namespace(room: str) -> None:
    sources = [path for path in (ROOT / "csrc" / room).rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    assert sources
    for path in sources:
        opened = set(re.findall(r"^namespace (specdec[\w:]*) \{", path.read_text(), re.MULTILINE))
        assert opened and all(f"{name}::".startswith(f"specdec::{room}::") for name in opened), path


def test_stub_matches_bindings() -> None:
    pytest.importorskip("ruff")
    spec = importlib.util.spec_from_file_location("write_stub", ROOT / "packaging" / "write_stub.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.STUB.read_text() == module.stub()
