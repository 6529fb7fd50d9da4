"""The tensor boundary of all ops: accepted arguments, refused ones, and the messages of refusals."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.ops._op_list import native_halves, public_ops
from support.devices import HAS_CUDA
from support.op_calls import calls

np = pytest.importorskip("numpy")

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 8.0, 7.0, 6.0]])
BEST = [[1, 3], [0, 1]]


def best_two(logits: Any, **keywords: Any) -> list[list[int]]:
    out = sd.TopK(torch.full((2, 2), -1, dtype=torch.int32), torch.full((2, 2), torch.nan))
    sd.select_topk(logits, 2, out=out, **keywords)
    return out.ids.tolist()


class OldProducer:
    """A tensor type older than DLPack 1.0: `__dlpack__` has no max_version."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


class NewProducer(OldProducer):
    """A tensor type whose `__dlpack__` takes max_version and records it."""

    asked: Any = None

    def __dlpack__(self, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        self.asked = max_version
        return self.tensor.__dlpack__(max_version=max_version)


class RaisingProducer(OldProducer):
    def __dlpack__(self, **keywords: Any) -> Any:
        raise BufferError("on strike")


class WrongProducer(OldProducer):
    def __dlpack__(self, **keywords: Any) -> Any:
        return "not a capsule"


# --- accepted ---------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "logits",
    [
        LOGITS,
        LOGITS.clone().requires_grad_(),
        torch.nn.Parameter(LOGITS.clone()),
        torch.nn.Buffer(LOGITS.clone()),
        LOGITS.clone().as_subclass(Subclass),
        LOGITS.numpy(),
        OldProducer(LOGITS),
        NewProducer(LOGITS),
    ],
    ids=["tensor", "requires_grad", "Parameter", "Buffer", "Subclass", "numpy", "old-dlpack", "new-dlpack"],
)
def test_boundary_accepts_dlpack_tensors(logits: Any) -> None:
    assert best_two(logits) == BEST


def test_boundary_accepts_more_types_than_its_cache_holds() -> None:
    for i in range(12):
        kind = type(f"Subclass{i}", (torch.Tensor,), {})
        assert best_two(LOGITS.clone().as_subclass(kind)) == BEST
        assert best_two(type(f"Producer{i}", (OldProducer,), {})(LOGITS)) == BEST
    assert best_two(LOGITS) == BEST


def test_boundary_requests_dlpack_1_3() -> None:
    producer = NewProducer(LOGITS)
    best_two(producer)
    assert producer.asked == (1, 3)


def test_boundary_accepts_read_only_inputs() -> None:
    array = LOGITS.numpy().copy()
    array.flags.writeable = False
    assert best_two(array) == BEST


def test_boundary_accepts_tensors_of_several_libraries() -> None:
    ids, logprobs = np.empty((2, 2), np.int32), np.empty((2, 2), np.float32)
    sd.select_topk(LOGITS, 2, out=sd.TopK(ids, logprobs))
    assert ids.tolist() == BEST


def as_arrays(value: Any) -> Any:
    """Return the value with NumPy arrays for tensors."""
    if isinstance(value, tuple):
        parts = map(as_arrays, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.numpy() if isinstance(value, torch.Tensor) else value


def array_leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in array_leaves(part)] if isinstance(value, tuple) else [value]


NO_NUMPY_DTYPE = {"small_m_gemm", "small_m_bmm", "dequantize", "moe_grouped_gemm", "quantize_fp8"}  # bfloat16 or float8


@pytest.mark.parametrize("op", [op for op in public_ops() if native_halves(op) and op not in NO_NUMPY_DTYPE])
def test_ops_accept_numpy_arrays(op: str) -> None:
    function = getattr(sd, op)
    twice = (calls(op, torch.device("cpu")) for _ in range(2))
    for (arguments, options), (others, other_options) in zip(*twice, strict=True):
        want = as_arrays((function(*arguments, **options), arguments))
        arrays = as_arrays(others)
        got = function(*arrays, **{name: as_arrays(value) for name, value in other_options.items()})
        for array, expected in zip(array_leaves((got, arrays)), array_leaves(want), strict=True):
            assert type(array) is type(expected)
            np.testing.assert_array_equal(array, expected)


def test_stream_keyword_is_ignored_on_cpu() -> None:
    assert best_two(LOGITS, stream=0) == best_two(LOGITS, stream=12345) == BEST


def test_boundary_ignores_strides_of_dimensions_of_size_one() -> None:
    one = torch.zeros(4, 7)[:, :1].t()  # [1, 4], strides (1, 7)
    with pytest.raises(ValueError, match="is not contiguous in its last dimension"):
        sd.select_topk(one, 1)
    column = torch.zeros(4, 7)[:, :1]  # [4, 1], strides (7, 1)
    assert sd.select_topk(column, 1)[0].tolist() == [[0]] * 4
    assert sd.select_topk(column.as_strided((4, 1), (7, 5)), 1)[0].tolist() == [[0]] * 4


# --- not a tensor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "name"), [(3, "int"), ("x", "str"), ([1.0], "list"), (None, "NoneType")])
def test_boundary_refuses_non_tensors(value: object, name: str) -> None:
    with pytest.raises(TypeError) as error:
        _C.noop1(None, value)
    assert str(error.value) == (
        f"noop1: a is a {name}, expected a tensor (torch.Tensor, numpy.ndarray, or another type with __dlpack__)"
    )


def test_ops_refuse_non_tensors_by_name() -> None:
    with pytest.raises(TypeError) as error:
        sd.select_topk([[1.0]], 1)
    assert str(error.value) == "select_topk: logits is a list, expected a tensor"
    with pytest.raises(TypeError) as error:
        sd.select_topk(LOGITS, 2, id_map=[0, 1, 2, 3])
    assert str(error.value) == (
        "select_topk: id_map is a list, expected a tensor (torch.Tensor, numpy.ndarray, or another type with __dlpack__)"
    )


PLAIN = (
    torch.zeros(1, 1).int(),
    torch.zeros(1).int(),
    torch.zeros(1, 1).int(),
)


def a_tree() -> sd.Tree:
    return sd.build_tree_from_parents(torch.zeros(1, 1).int(), torch.full((1, 1), -1).int(), torch.zeros(1).int())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sd.verify_tree(LOGITS[:1, None], tuple(a_tree()), 1), "verify_tree: tree is a tuple, expected a Tree"),
        (lambda: sd.verify_tree(LOGITS[:1, None], a_tree(), 1, out=PLAIN), "verify_tree: out is a tuple, expected an Accepted"),
        (lambda: sd.select_topk(LOGITS, 2, out=PLAIN[:2]), "select_topk: out is a tuple, expected a TopK"),
        (lambda: sd.build_tree(PLAIN, PLAIN[1], PLAIN[1], 1), "build_tree: candidates is a tuple, expected a Candidates"),
        (lambda: sd.merge_trees(a_tree(), LOGITS, None, LOGITS, 4), "merge_trees: b is a NoneType, expected a Tree"),
        (lambda: sd.score_tokens(LOGITS[:1, None], PLAIN), "score_tokens: accepted is a tuple, expected an Accepted"),
        (lambda: sd.commit_tokens(sd.Accepted(*PLAIN), {}), "commit_tokens: state is a dict, expected a SlotState"),
        (lambda: sd.sample_draft(LOGITS, 1, seeds=PLAIN[1].long(), positions=PLAIN[1], temperature=0.8), "sample_draft: temperature is a float, expected a tensor (torch.Tensor, numpy.ndarray, or another type with __dlpack__)"),
        (lambda: sd.select_topk(LOGITS, 2, stream="0"), "select_topk: stream is a str, expected None or a raw cudaStream_t as an int"),
        (lambda: sd.free_pages([], PLAIN[1]), "free_pages: pool is a list, expected a PagePool"),
    ],
    ids=["tree", "out", "topk", "candidates", "trees", "accepted", "state", "temperature", "stream", "pool"],
)  # fmt: skip
def test_ops_name_arguments_of_wrong_types(call: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            "select_topk",
            (None, LOGITS, "2", None, LOGITS, LOGITS),
            "k is a str, expected int of 64 bits",
        ),
        (
            "select_topk",
            (None, LOGITS, 2.5, None, LOGITS, LOGITS),
            "k is a float, expected int of 64 bits",
        ),
        (
            "select_topk",
            (None, LOGITS, 2**63, None, LOGITS, LOGITS),
            "k is a int, expected int of 64 bits",
        ),
        ("add_rms_norm", (None, LOGITS, LOGITS, [], None, None, None, None, LOGITS), "eps is a list, expected float"),
        (
            "small_m_gemm",
            (None, LOGITS, LOGITS, None, None, None, "yes", None, LOGITS),
            "gated is a str, expected bool",
        ),
        (
            "tree_attention_workspace",
            (*[LOGITS] * 4, "x", None, None),
            "fixed_split is a str, expected int of 64 bits or None",
        ),
        (
            "free_pages",
            (None, (*[LOGITS] * 6, None), LOGITS, None, None, None),
            "pool is a tuple, expected PagePool",
        ),
        ("free_pages", (None, LOGITS), "2 arguments, expected 6"),
    ],
)
def test_compiled_op_refuses_wrong_numbers(function: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError) as error:
        getattr(_C, function)(*arguments)
    assert str(error.value) == f"{function}: {message}"


def test_compiled_op_refuses_keywords() -> None:
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        _C.noop1(None, a=LOGITS)


def test_op_of_foreign_tensors_requires_outputs() -> None:
    with pytest.raises(TypeError) as error:
        sd.select_topk(OldProducer(LOGITS), 2)
    assert str(error.value) == ("select_topk: cannot allocate outputs like OldProducer, expected out to be passed")


def test_boundary_propagates_errors_of_dlpack_producers() -> None:
    with pytest.raises(BufferError, match=r"^on strike$"):
        best_two(RaisingProducer(LOGITS))


def test_boundary_refuses_producers_that_return_no_capsule() -> None:
    with pytest.raises(TypeError, match=r"^select_topk: logits is a WrongProducer, expected a tensor "):
        best_two(WrongProducer(LOGITS))


@pytest.mark.parametrize(("stream", "name"), [("default", "str"), (1.0, "float"), ([], "list")])
def test_boundary_refuses_streams_that_are_no_integers(stream: object, name: str) -> None:
    with pytest.raises(TypeError) as error:
        best_two(LOGITS, stream=stream)
    assert str(error.value) == f"select_topk: stream is a {name}, expected None or a raw cudaStream_t as an int"
    assert best_two(LOGITS) == BEST


class WithoutDevice:
    def __dlpack__(self, **keywords: Any) -> Any:
        return LOGITS.__dlpack__()


class RaisingOnLookUp:
    @property
    def __dlpack__(self) -> Any:
        raise OSError("disk on fire")


class RaisingDevice(OldProducer):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise OSError("no such device")


def test_boundary_refuses_incomplete_dlpack_producers() -> None:
    with pytest.raises(TypeError, match=r"^noop1: a is a WithoutDevice, expected a tensor "):
        _C.noop1(None, WithoutDevice())


def test_boundary_propagates_errors_of_attribute_lookup() -> None:
    with pytest.raises(OSError, match=r"^disk on fire$"):
        _C.noop1(None, RaisingOnLookUp())
    with pytest.raises(OSError, match=r"^no such device$"):
        _C.noop1(None, RaisingDevice(LOGITS))


# --- refused tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bool, "bool"),
        (torch.uint8, "uint8"),
        (torch.uint64, "uint64"),
        (torch.int8, "int8"),
        (torch.int16, "int16"),
        (torch.int64, "int64"),
        (torch.float64, "float64"),
        (torch.complex64, "complex64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
    ids=lambda value: str(value),
)
def test_boundary_refuses_other_dtypes_without_converting(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.select_topk(torch.zeros(2, 4, dtype=dtype), 2)
    assert str(error.value) == f"select_topk: logits is {name}, expected float32 or float16 or bfloat16"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((), "select_topk: logits has 0 dimensions, expected 2 dimensions"),
        ((4,), "select_topk: logits has 1 dimension, expected 2 dimensions"),
        ((1, 2, 4), "select_topk: logits has 3 dimensions, expected 2 dimensions"),
    ],
    ids=str,
)
def test_boundary_refuses_other_numbers_of_dimensions(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.select_topk(torch.zeros(shape), 2)
    assert str(error.value) == message


def test_boundary_refuses_outputs_with_other_numbers_of_dimensions() -> None:
    with pytest.raises(ValueError) as error:
        sd.select_topk(LOGITS, 2, out=sd.TopK(torch.zeros(2, 2).int(), torch.zeros(())))
    assert str(error.value) == "select_topk: out.logprobs has shape [], expected [rows=2, k=2]"


def test_boundary_refuses_read_only_outputs() -> None:
    ids = np.zeros((2, 2), np.int32)
    ids.flags.writeable = False
    with pytest.raises(ValueError) as error:
        sd.select_topk(LOGITS.numpy(), 2, out=sd.TopK(ids, np.zeros((2, 2), np.float32)))
    assert str(error.value) == "select_topk: out.ids is read-only, expected a writable tensor"
    assert not ids.any()


def test_boundary_refuses_strided_outputs() -> None:
    with pytest.raises(ValueError) as error:
        sd.select_topk(LOGITS, 2, out=sd.TopK(torch.zeros(2, 4, dtype=torch.int32)[:, ::2], torch.zeros(2, 2)))
    assert str(error.value) == (
        "select_topk: out.ids has shape [2, 2] and is not contiguous, expected a contiguous tensor"
    )


def test_boundary_refuses_unaligned_data() -> None:
    memory = bytearray(33)
    with pytest.raises(ValueError) as error:
        best_two(np.frombuffer(memory, np.float32, count=8, offset=1).reshape(2, 4))
    assert str(error.value) == (
        "select_topk: logits starts between two multiples of its 4-byte elements, expected an aligned tensor"
    )


def test_boundary_refuses_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2, 4)
    with pytest.raises(ValueError) as error:
        best_two(fake)
    assert str(error.value) == "select_topk: logits has no storage (a fake tensor?), expected a tensor with data"


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 4, device="meta"), "Cannot pack tensors on meta"),
        (LOGITS.to_sparse(), "Cannot access data pointer of Tensor that doesn't have storage"),
    ],
    ids=["meta", "sparse"],
)
def test_boundary_reports_tensors_that_torch_cannot_export(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        best_two(logits)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_boundary_refuses_mixed_devices() -> None:
    with pytest.raises(ValueError) as error:
        sd.select_topk(LOGITS.cuda(), 2, id_map=torch.arange(4, dtype=torch.int32))
    assert str(error.value) == "select_topk: id_map is on cpu, expected cuda:0 like logits"
    with pytest.raises(ValueError) as error:
        sd.select_topk(LOGITS, 2, id_map=torch.arange(4, dtype=torch.int32, device="cuda"))
    assert str(error.value) == "select_topk: id_map is on cuda:0, expected cpu like logits"


@pytest.mark.skipif(not torch.cuda.is_available() or HAS_CUDA, reason="needs a GPU and a CPU-only build")
def test_cpu_only_build_refuses_cuda_tensors() -> None:
    with pytest.raises(NotImplementedError) as error:
        sd.select_topk(LOGITS.cuda(), 2)
    assert str(error.value) == (
        "select_topk: logits is on cuda, and this build of specdec_kernels has no CUDA kernels, expected cpu tensors "
        "(install a CUDA wheel, or build from source where nvcc is on the PATH)"
    )


# --- lifetime and cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [LOGITS.numpy, lambda: OldProducer(LOGITS), lambda: NewProducer(LOGITS)], ids=["numpy", "old", "new"]
)
def test_dlpack_fallback_leaks_no_references(make: Any) -> None:
    producer = make()
    kept = producer.tensor if isinstance(producer, OldProducer) else producer
    for _ in range(100):
        _C.noop1(None, producer)
    references = sys.getrefcount(producer), sys.getrefcount(kept)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        calls = 25_000 if producer is kept else 5_000
        for _ in range(calls):
            _C.noop4(None, producer, producer, producer, producer)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (sys.getrefcount(producer), sys.getrefcount(kept)) == references
    assert after - before < 8 * calls  # a leaked object has 16 bytes or more; other threads allocate, too


def test_boundary_errors_leak_no_references() -> None:
    array = np.zeros((2, 4), np.float64)
    references = sys.getrefcount(array)
    for _ in range(1000):
        with pytest.raises(ValueError):
            sd.select_topk(array, 2, out=sd.TopK(array, array))
        with pytest.raises(TypeError):
            _C.noop4(None, array, array, array, "not a tensor")
    assert sys.getrefcount(array) == references
