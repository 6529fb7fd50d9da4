"""The operators of torch_ops: traceable, with right fakes and schemas, and the same numbers as the plain ops."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from test_tree_attention import make_cache, random_trees
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels as sd
from specdec_kernels import torch_ops
from specdec_kernels.ops._op_list import public_ops

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, specdec_kernels; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_same_numbers_as_the_plain_op(device: torch.device) -> None:
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
def test_attention_compiles_without_a_graph_break(device: torch.device, backend: str) -> None:
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


def test_attention_opcheck(device: torch.device) -> None:
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


def test_attention_fake_has_the_shape_and_strides_of_the_output(device: torch.device) -> None:
    cache = make_cache([30, 5], [6, 6], page_size=4, device=device)
    q = torch.randn(2, 4, 6, 64, device=device).transpose(1, 2)
    out = torch_ops.tree_attention(q, *cache.tensors())
    with FakeTensorMode() as mode:
        fake = torch_ops.tree_attention(*(mode.from_tensor(x) for x in (q, *cache.tensors())))
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (out.shape, out.stride(), out.dtype, out.device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_writes_and_attends_compiles(device: torch.device, backend: str) -> None:
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
def test_inductor_accepts_the_operators(device: torch.device, with_status: bool) -> None:
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


def test_write_kv_opcheck(device: torch.device) -> None:
    cache = make_cache([30, 5], [6, 6], page_size=4, device=device)
    cache.k_pool.nan_to_num_(), cache.v_pool.nan_to_num_(posinf=0)  # opcheck compares mutated arguments, NaN unequal
    k, v = torch.randn(2, 2, 6, 2, 64, device=device)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
    for arguments in ({}, {"row_offset": 1, "slots": slots, "num_valid": slots.abs(), "status": status}):
        torch.library.opcheck(torch_ops.write_kv, (k, v, *cache.tensors()), arguments)


@pytest.mark.filterwarnings("ignore")  # torch warns of the null pointer that the op is about to refuse
def test_plain_op_refuses_fake_tensors() -> None:
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


def test_lazy_views_are_refused() -> None:
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


def calls(op: str, device: torch.device) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of one or two small calls of an op; equal ones every time."""
    random = torch.Generator().manual_seed(3)

    def ints(*shape: int, high: int = 9, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random).int().to(device)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slots, status = torch.tensor([1, 0], dtype=torch.int32, device=device), zeros(2)
    lens, seeds = torch.tensor([5, 3], dtype=torch.int32, device=device), ints(2).long()
    temperature = torch.tensor([0.0, 0.8], device=device)
    candidates, frontier = sd.expand_root(ints(2, 2), -floats(2, 2).abs(), lens, 3)
    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32, device=device)
    tree = sd.build_tree_from_parents(ints(2, 4, high=8), parents, lens)
    accepted = sd.verify_tree(floats(2, 4, 8), tree, 3)
    pool = sd.make_page_pool(12, 2, 5, 4, like=status)
    pools = floats(2, 12, 4, 2, 64), floats(2, 12, 4, 2, 64)
    if op not in ("alloc_pages",):
        sd.alloc_pages(pool, lens, 4)
    ends = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    table, both = pool.page_table, {"slots": slots, "status": status}
    if op == "free_pages":
        return [
            ((pool, lens), {}),
            ((), {"pool": pool, "prefix_lens": zeros(2), **both}),
            ((pool, lens), {"window": 1}),
        ]
    if op == "fork_pages":
        sd.free_pages(pool, zeros(2), slots=slots[:1])
        return [((pool, slots[1:], slots[:1], lens), {"status": status})]
    if op == "assign_pages":
        return [((pool, torch.tensor([0, -1], dtype=torch.int32, device=device), slots + 5), {})]
    new_kv = floats(2, 3, 2, 64), floats(2, 3, 2, 64)
    noise = {"seeds": seeds, "positions": ints(2), "temperature": temperature, "slots": slots}
    sampling = {"temperature": temperature, "top_k": ints(2), "top_p": temperature + 0.1, "seeds": seeds}
    mask = torch.tensor([[1, 3, 5, 11]] * 2, device=device)[:, :, None]
    state = sd.make_slot_state(2, 25, 1, like=status)._replace(seq_lens=lens, status=status)
    state.stop_tokens.zero_()
    edits = sd.make_logit_edits(2, 20, like=temperature)
    edits.kinds.fill_(7)
    edits.counts[:, 3] = 5
    return {
        "select_topk": [((floats(3, 20), 4), {}), ((floats(3, 20), 4), {"id_map": ints(20)})],
        "sample_draft": [((floats(2, 20), 4), noise)],
        "expand_root": [((ints(2, 2), -floats(2, 2).abs(), lens, 3), {"slots": slots, "position_offset": 1})],
        "expand_tree": [((ints(2, 2, 2), -floats(2, 2, 2).abs(), 2, candidates, frontier, lens), {})],
        "update_calibration": [((sd.make_calibration(2, like=temperature), tree, -floats(2, 4).abs(), accepted), {})],
        "draft_extend_inputs": [
            ((accepted.tokens, accepted.path, accepted.num_valid, lens, 4), options)
            for options in ({}, {"slots": slots, "position_offset": 1})
        ],
        "append_draft_backlog": [
            ((accepted.tokens, accepted.path, accepted.num_valid, ints(2), ints(2, 5)), options)
            for options in (
                {"slots": slots},
                {"features": floats(2, 4, 8), "kept_features": floats(2, 5, 8)},
                {"features": floats(8, 8), "kept_features": floats(2, 5, 8), "cu_seqlens_q": ends},
            )
        ],
        "build_tree": [((candidates, lens, lens, 4), {}), ((candidates, lens, lens, 3), {"order": "given", **both})],
        "build_tree_from_parents": [((ints(2, 4), parents, lens), {}), ((ints(2, 4), parents, lens), both)],
        "build_tree_from_mask": [((ints(2, 4), mask, lens), {}), ((ints(2, 4), mask, lens), both)],
        "merge_trees": [((tree, floats(2, 4), tree, floats(2, 4), 5), {})],
        "allocate_nodes": [
            ((-floats(2, 4).abs().cumsum(1), 5), options) for options in ({}, {"budget_levels": ints(3)})
        ],
        "pack_trees": [((tree, floats(2, 4), sd.allocate_nodes(-floats(2, 4).abs().cumsum(1), 5), 6), {})],
        "add_rms_norm": [
            ((floats(3, 64), floats(64), 1e-5), {}),
            ((floats(3, 64), floats(64), 1e-5), {"residual": floats(3, 64)}),
            ((floats(6, 64), floats(64), 1e-5), {"residual": floats(3, 64), "shares": floats(3, 2)}),
        ],
        "rms_norm_concat": [
            ((floats(9, 64), ints(3), floats(64), floats(4, 64), floats(64), 1e-5), options)
            for options in ({}, {"feature_rows": ints(3)})
        ],
        "silu_and_mul": [((floats(3, 64),), {})],
        "small_m_gemm": [
            ((floats(3, 64, dtype=torch.bfloat16), floats(48, 64, dtype=torch.bfloat16)), options)
            for options in ({}, {"gated": True})
        ],
        "dequantize": [
            ((torch.zeros(3, 64, dtype=torch.uint8), torch.ones(2, 3)), options)
            for options in ({}, {"dtype": "float32"})
        ],
        "moe_grouped_gemm": [
            (
                (
                    floats(3, 128, dtype=torch.bfloat16),
                    floats(4, 48, 128).to(torch.float8_e4m3fn),
                    torch.tensor([4, 0, 2, 5, 1, 3], device=device),
                    torch.tensor([1, 1, 4, 6], dtype=torch.int32, device=device),
                ),
                {"weight_scales": floats(4, 1, 48)} | options,
            )
            for options in ({}, {"gated": True})
        ],
        "moe_route": [((floats(5, 9), 3), options) for options in ({}, {"normalised": True})],
        "moe_combine": [((floats(6, 40), floats(2, 3)), {})],
        "quantize_fp8": [((floats(3, 200),), {}), ((floats(3, 200),), {"group_size": 128})],
        "rope_qkv_write_kv": [
            ((floats(2, 3, 8, 64), floats(30, 64), ints(2, 3), pools[0][0], pools[1][0], table, lens), {}),
            ((floats(2, 3, 8, 64), floats(30, 64), ints(2, 3), pools[0][0], pools[1][0], table, lens), both),
        ],
        "tree_attention": [((floats(2, 3, 4, 64), pools[0][0], pools[1][0], table, lens), both)],
        "verify_tree": [
            ((floats(2, 4, 8), tree, 3), {}),
            ((floats(2, 4, 8),), {"tree": tree, "accept_width": 3, **sampling, **both}),
            ((floats(8, 8), tree, 3), {"cu_seqlens_q": ends}),
        ],
        "score_tokens": [((floats(2, 4, 8), accepted), {"top_n": 2})],
        "edit_logits": [
            ((floats(2, 4, 20), mask, ints(2, 4), edits), {"slots": slots, "vocab_mask": ints(2, 4, 1)}),
            ((floats(8, 20), mask.flatten(0, 1), ints(2, 4), edits), {"cu_seqlens_q": ends}),
        ],
        "mask_stops": [
            ((floats(2, 4, 20), ints(2, 4), ints(2, 1), lens), {"slots": slots}),
            ((floats(8, 20), ints(8), ints(2, 1), lens), {"cu_seqlens_q": ends}),
        ],
        "commit_tokens": [
            ((accepted, state), {}),
            ((accepted,), {"state": state, "slots": slots, "counts": ints(2, 20)}),
        ],
        "alloc_pages": [((pool, lens, 4), {}), ((pool, lens), {"reserve": 2, **both})],
        "write_kv": [((*new_kv, pools[0][0], pools[1][0], table, lens), {"num_valid": lens - 2, **both})],
        "move_kv": [((*pools, table, accepted.path, accepted.num_valid, lens), both)],
        "copy_kv": [((*pools, table, slots[:1], slots[1:], lens, lens[:1] * 0 + 2), {"status": status})],
    }[op]


def same(got: Any, want: Any) -> None:
    """Equal, tuples and their types included."""
    if isinstance(want, tuple):
        assert type(got) is type(want) and len(got) == len(want)
        for each, expected in zip(got, want, strict=True):
            same(each, expected)
    elif want is None or not isinstance(want, torch.Tensor):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


OF_FLOAT8 = {"moe_grouped_gemm"}  # which the check of a schema would multiply, and torch does not
CLOCKED = {"apply_commands", "publish_results"}  # write what time it is


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("op", torch_ops.OPS)
def test_every_op_compiles_whole_and_does_the_same(op: str, device: torch.device) -> None:
    compiled = torch.compile(
        lambda *args, **options: getattr(torch_ops, op)(*args, **options), fullgraph=True, backend="aot_eager"
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
def test_every_op_passes_opcheck(op: str, device: torch.device) -> None:
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
        if op not in CLOCKED:
            checks.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(overload, tuple(flat), named, test_utils=checks)


def test_every_op_is_there() -> None:
    assert set(torch_ops.OPS) == set(public_ops()) - {
        "make_calibration", "make_logit_edits", "make_page_pool", "make_slot_state", "tree_attention_plan", "tree_attention_workspace", "verify_tree_workspace"
    }  # fmt: skip


def test_lazy_views_are_refused_inside_tuples() -> None:
    pool = sd.make_page_pool(4, 1, 2, 4, like=torch.zeros(1))
    with pytest.raises(ValueError, match="alloc_pages: seq_lens is a conj view"):
        torch_ops.alloc_pages(pool, torch.zeros(1, dtype=torch.complex64).conj(), 1)
