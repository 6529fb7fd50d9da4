"""The operators of torch_ops: traceable, with correct fakes and schemas, and results equal to the plain ops."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels as sd
from specdec_kernels import torch_ops
from specdec_kernels.ops._op_list import public_ops
from support.attention_cases import make_cache, random_trees
from support.op_calls import calls

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_package_does_not_import_torch() -> None:
    code = "import sys, specdec_kernels; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_attention_equals_plain_op(device: torch.device) -> None:
    cache = make_cache([30, 5], [6, 6], page_size=4, device=device)
    cache.page_table[1, 0] = -1
    q = torch.randn(2, 4, 6, 64, device=device).transpose(1, 2)
    arguments = {"mask": random_trees(2, 6).to(device), "scale": 0.2, "tail_len": 6, "window": 9, "soft_cap": 2.0}
    status = torch.zeros(2, dtype=torch.int32, device=device)
    out = torch_ops.tree_attention(q, *cache.tensors(), status=status, **arguments)
    assert out.is_contiguous()
    assert torch.equal(out, sd.tree_attention(q, *cache.tensors(), **arguments))
    assert status.tolist() == [0, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_attention_compiles_without_graph_break(device: torch.device, backend: str) -> None:
    cache = make_cache([30, 5], [7, 7], page_size=4, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    cache.page_table[0, 3] = -1

    def layer(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = torch_ops.tree_attention(q.transpose(1, 2) * 2, *cache.tensors(), mask=mask, status=status)
        return out.flatten(2) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for rows in (7, 5, 3):  # a second and third length: dynamic shapes
        q = torch.randn(2, 4, rows, 64, device=device)
        for mask in (None, random_trees(2, rows).to(device)):
            want = layer(q, mask)
            status.zero_()
            torch.testing.assert_close(compiled(q, mask), want, rtol=0, atol=0)
            assert status.tolist() == [4, 0]


def test_torch_attention_passes_opcheck(device: torch.device) -> None:
    cache = make_cache([30, 5, 0], [6, 6, 6], page_size=4, device=device)
    q = torch.randn(3, 6, 4, 64, device=device)
    status = torch.zeros(3, dtype=torch.int32, device=device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([6, 1, 3], dtype=torch.int32, device=device)
    ends = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    mask = random_trees(3, 6).to(device)
    op = torch.ops.specdec.tree_attention
    all_of_them = {"slots": slots, "q_lens": lengths, "mask": mask, "tail_len": 6, "scale": 0.5, "window": 20}
    all_of_them |= {"soft_cap": 9.0, "fixed_split": 128}
    torch.library.opcheck(op.default, (q, *cache.tensors()))
    torch.library.opcheck(op.default, (q[0], *cache.tensors()), {"cu_seqlens_q": ends})
    torch.library.opcheck(op.default, (q, *cache.tensors()), all_of_them)
    torch.library.opcheck(op.status, (q, *cache.tensors()), all_of_them | {"status": status})


def test_torch_attention_fake_has_shape_and_strides_of_output(device: torch.device) -> None:
    cache = make_cache([30, 5], [6, 6], page_size=4, device=device)
    q = torch.randn(2, 4, 6, 64, device=device).transpose(1, 2)
    out = torch_ops.tree_attention(q, *cache.tensors())
    with FakeTensorMode() as mode:
        fake = torch_ops.tree_attention(*(mode.from_tensor(x) for x in (q, *cache.tensors())))
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (out.shape, out.stride(), out.dtype, out.device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_write_and_attention_compile_together(device: torch.device, backend: str) -> None:
    rows = 5
    cache = make_cache([30, 6], [rows, rows], page_size=4, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    valid = torch.tensor([rows, 2], dtype=torch.int32, device=device)

    def layer(k_pool: torch.Tensor, v_pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.transpose(1, 2) for y in (x * 2, x[:, :2] + 1, x[:, 2:] - 1))
        table, lens = cache.page_table, cache.prefix_lens
        torch_ops.write_kv(k, v, k_pool, v_pool, table, lens, num_valid=valid, status=status)
        return torch_ops.tree_attention(q, k_pool, v_pool, table, lens, q_lens=valid, status=status) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        x = torch.randn(2, 4, rows, 64, device=device)
        pools = [(cache.k_pool.clone(), cache.v_pool.clone()) for _ in range(2)]
        want, got = layer(*pools[0], x), compiled(*pools[1], x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for written, expected in zip(pools[1], pools[0], strict=True):
            torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)
        plain = cache.k_pool.clone(), cache.v_pool.clone()
        k, v = (x[:, :2] + 1).transpose(1, 2), (x[:, 2:] - 1).transpose(1, 2)
        sd.write_kv(k, v, *plain, cache.page_table, cache.prefix_lens, num_valid=valid)
        torch.testing.assert_close(pools[0], plain, rtol=0, atol=0, equal_nan=True)
    assert status.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
@pytest.mark.parametrize("with_status", [False, True])
def test_torch_ops_compile_with_inductor(device: torch.device, with_status: bool) -> None:
    # Operators and views alone, so that nothing is left to generate and compile.
    cache = make_cache([30, 6], [5, 5], page_size=4, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device) if with_status else None

    def layer(x: torch.Tensor) -> torch.Tensor:
        q = x.transpose(1, 2)
        torch_ops.write_kv(q[:, :, :2], q[:, :, 2:], *cache.tensors(), status=status)
        return torch_ops.tree_attention(q, *cache.tensors(), status=status).flatten(2)

    x = torch.randn(2, 4, 5, 64, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=0, atol=0)


def test_torch_write_kv_passes_opcheck(device: torch.device) -> None:
    cache = make_cache([30, 5], [6, 6], page_size=4, device=device)
    cache.k_pool.nan_to_num_(), cache.v_pool.nan_to_num_(posinf=0)  # opcheck compares mutated arguments, NaN unequal
    k, v = torch.randn(2, 2, 6, 2, 64, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
    for arguments in ({}, {"row_offset": 1, "slots": slots, "num_valid": slots.abs(), "status": status}):
        torch.library.opcheck(torch_ops.write_kv, (k, v, *cache.tensors()), arguments)


@pytest.mark.filterwarnings("ignore")  # torch warns of the null pointer that the op then refuses
def test_plain_op_refuses_fake_tensors_naming_torch_ops() -> None:
    cache = make_cache([3], [1], page_size=4)
    mode = FakeTensorMode()
    q, *pools = (mode.from_tensor(x) for x in (torch.randn(1, 1, 4, 64), *cache.tensors()))
    with pytest.raises(ValueError) as error:
        sd.tree_attention(q, *pools, out=torch.empty(1, 1, 4, 64))
    assert str(error.value) == "tree_attention: q has no storage (a fake tensor?), expected a tensor with data"


def neg_view(*shape: int) -> torch.Tensor:
    view = torch.zeros(*shape, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


def test_torch_ops_refuse_lazy_views() -> None:
    cache = make_cache([3], [1], page_size=4)
    with pytest.raises(ValueError) as error:
        torch_ops.tree_attention(neg_view(1, 1, 4, 64), *cache.tensors())
    assert str(error.value) == "tree_attention: q is a neg view, expected a plain tensor (resolve_neg() makes one)"
    q = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match="v_pool is a neg view"):
        torch_ops.tree_attention(q, cache.k_pool, neg_view(*cache.v_pool.shape), cache.page_table, cache.prefix_lens)
    with pytest.raises(ValueError, match="write_kv: k_pool is a neg view"):
        k = torch.zeros(1, 1, 2, 64)
        torch_ops.write_kv(k, k, neg_view(*cache.k_pool.shape), cache.v_pool, cache.page_table, cache.prefix_lens)
    with pytest.raises(ValueError, match="status is a conj view"):
        torch_ops.tree_attention(q, *cache.tensors(), status=torch.zeros(1, dtype=torch.complex64).conj())


# --- every op ---------------------------------------------------------------------------------------------------------


def same(got: Any, want: Any) -> None:
    """Return whether two results are equal, including their tuples and types."""
    if isinstance(want, tuple):
        assert type(got) is type(want) and len(got) == len(want)
        for each, expected in zip(got, want, strict=True):
            same(each, expected)
    elif want is None or not isinstance(want, torch.Tensor):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


OF_FLOAT8 = {"moe_grouped_gemm"}  # the schema check would multiply them, torch does not
CLOCKED = {"apply_commands", "publish_results"}  # write timestamps


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("op", torch_ops.OPS)
def test_torch_op_compiled_equals_plain_op(op: str, device: torch.device) -> None:
    # Graphs of the other ops are dispatched ahead of time below, for each overload.
    backend = "aot_eager" if op in CLOCKED else "eager"
    compiled = torch.compile(
        lambda *args, **options: getattr(torch_ops, op)(*args, **options), fullgraph=True, backend=backend
    )
    for number in range(len(calls(op, device))):
        arguments, options = calls(op, device)[number]
        want = getattr(sd, op)(*arguments, **options)
        for function in (getattr(torch_ops, op), compiled):
            others, other_options = calls(op, device)[number]
            got = function(*others, **other_options)
            same(got, want)
            if op not in CLOCKED:
                same((others, *other_options.values()), (arguments, *options.values()))


@pytest.mark.parametrize("op", torch_ops.OPS)
def test_torch_op_passes_opcheck(op: str, device: torch.device) -> None:
    """Each overload is traced once here, since `test_torch_op_compiled_equals_plain_op` traces every call."""
    traced = set()
    for arguments, options in calls(op, device):
        operators = getattr(torch.ops.specdec, op)
        (split,) = {"status", "residual"} & set(operators.overloads()) or {"default"}
        overload = getattr(operators, split if split in options else "default")
        flat: list[Any] = []
        for argument in arguments:
            flat += argument if isinstance(argument, tuple) else [argument]
        named = {}
        for name, value in options.items():
            fields = value._asdict().items() if isinstance(value, tuple) else [("", value)]
            named |= {f"{name}_{field}".removesuffix("_"): part for field, part in fields}
        checks = ["test_autograd_registration", "test_faketensor"]
        if op not in OF_FLOAT8:
            checks.append("test_schema")
        if op not in CLOCKED and overload not in traced:
            checks.append("test_aot_dispatch_dynamic")
            traced.add(overload)
        torch.library.opcheck(overload, tuple(flat), named, test_utils=checks)


def test_torch_ops_cover_every_op() -> None:
    assert set(torch_ops.OPS) == set(public_ops()) - {
        "make_calibration", "make_logit_edits", "make_page_pool", "make_slot_state", "mla_tree_attention_plan", "mla_tree_attention_workspace", "pack_mask", "pack_whole_trees", "page_table_of_lists", "tree_attention_plan", "tree_attention_workspace", "verify_tree_workspace"
    }  # fmt: skip


def test_torch_ops_refuse_lazy_views_inside_tuples() -> None:
    pool = sd.make_page_pool(4, 1, 2, 4, like=torch.zeros(1))
    with pytest.raises(ValueError, match="alloc_pages: seq_lens is a conj view"):
        torch_ops.alloc_pages(pool, torch.zeros(1, dtype=torch.complex64).conj(), 1)
