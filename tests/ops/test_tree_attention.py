"""tree_attention against its float64 reference."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C, torch_ops
from specdec_kernels.reference import attention as reference
from support.attention_cases import NAN, Cache, make_cache, pack_bits, random_tree, random_trees
from support.devices import HAS_CUDA, TOLERANCES
from support.exhaustive import covering, exhaustive, thinned

# lse has the absolute error of a score: a float32 dot product of up to 256 terms, a few units of 2^-24 of scores up
# to about 10.
LSE_TOLERANCE = 2e-5
# Values have magnitude 1. The mean of thousands of them is small; the rounding of their float32 sum is not.
SUM_ERROR = 2**-22
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn


def plan_here(dtype: torch.dtype) -> str:
    q, pool = (torch.empty(1, 1, 1, 64, dtype=dtype, device="cuda") for _ in "qk")
    return sd.tree_attention_plan(q, pool, torch.empty(1, 1, dtype=torch.int32, device="cuda"))


MACHINE = plan_here(torch.bfloat16).split(".")[0] if HAS_CUDA else "cpu"  # "sm80" or "sm90", as plans call it


def on_plans(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test over kernels: once on the CPU (`plan` is None), and each named plan where this GPU runs it."""
    plans = [
        pytest.param(
            torch.device("cuda"), name, id=name, marks=pytest.mark.skipif(name[:4] != MACHINE, reason="other GPU")
        )
        for name in names
    ]
    return pytest.mark.parametrize(("device", "plan"), [pytest.param(torch.device("cpu"), None, id="cpu"), *plans])


def kernels() -> list[str]:
    """Return every compiled kernel with tensor cores, as `sm90.wgmma.64.occupancy2.d128` or `sm80.mma.16.d64.fp8`."""
    return [variant for variant in _C.attention_variants() if variant != "plain"]


def plan_of_kernel(variant: str) -> tuple[str, int, torch.dtype]:
    """Return a plan that runs the kernel, the head dimension, and the dtype of pools."""
    name, _, rest = variant.rpartition(".d")
    head_dim, _, fp8 = rest.partition(".")
    return name.replace(".sharing", ".sharing2"), int(head_dim), FP8 if fp8 else torch.bfloat16


# Without tensor cores and with them, and from 8-bit pools.
all_paths = pytest.mark.parametrize(
    ("dtype", "pools"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)],
    ids=["float32", "bfloat16", "fp8"],
)


def on_cpu(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def soft_cap_error(dtype: torch.dtype, soft_cap: object) -> float:
    """Bound the error of a capped score, and so of its weight's logarithm; on tensor cores, tanh is good to 2^-11."""
    if soft_cap is None:
        return 0.0
    assert isinstance(soft_cap, float)
    return soft_cap * 2**-22 if dtype == torch.float32 else 4e-3


def check(q: torch.Tensor, cache: Cache, *, out: torch.Tensor | None = None, **arguments: object) -> torch.Tensor:
    """Run the op over poisoned outputs, compare out, lse and status with the reference, and return status."""
    arguments = {k: v.to(q.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    out = torch.empty_like(q) if out is None else out
    out.fill_(NAN)
    lse = torch.full(q.shape[:-1], NAN, device=q.device)
    status = torch.zeros(len(cache.prefix_lens), dtype=torch.int32, device=q.device)
    returned = sd.tree_attention(q, *cache.tensors(), out=out, lse=lse, status=status, **arguments)
    assert returned is out
    for name in ("fixed_split", "plan"):
        arguments.pop(name, None)
    want, want_lse, want_status = reference.tree_attention(
        q.cpu(), *map(on_cpu, cache.tensors()), **{k: on_cpu(v) for k, v in arguments.items()}
    )
    assert torch.equal(status.cpu(), want_status)
    assert (out.cpu()[want_lse == -torch.inf] == 0).all()
    capped = soft_cap_error(q.dtype, arguments.get("soft_cap"))
    atol = (TOLERANCES[q.dtype] + capped) * want.abs().max().item() if want.numel() else 0
    atol += SUM_ERROR if q.dtype == torch.float32 else 0
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=0, atol=LSE_TOLERANCE + capped)
    return status.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 3), (4, 2), (8, 2), (5, 1), (14, 2), (8, 1)])
def test_tree_attention_of_trees_over_prefixes(
    device: torch.device, dtype: torch.dtype, head_dim: int, q_heads: int, kv_heads: int
) -> None:
    cache = make_cache(
        [65, 0, 130], [7] * 3, page_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
    check(torch.randn(3, 7, q_heads, head_dim, device=device).to(dtype), cache, mask=random_trees(3, 7))


@all_paths
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 500])
def test_tree_attention_of_prefix_and_page_sizes(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, page_size: int, prefix: int
) -> None:
    cache = make_cache([prefix], [5], page_size=page_size, dtype=pools, device=device)
    q = torch.randn(1, 5, 4, 64, device=device).to(dtype)
    check(q, cache, mask=random_trees(1, 5))
    check(q, cache)


@pytest.mark.parametrize("tail", [1, 2, 31, 63, 64, 65, 127, 129, 200])
@pytest.mark.parametrize("prefix", [0, 37, 64])
@all_paths
def test_tree_attention_of_tails_of_several_mask_words(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, tail: int, prefix: int
) -> None:
    cache = make_cache([prefix], [tail], page_size=16, dtype=pools, device=device)
    check(torch.randn(1, tail, 2, 64, device=device).to(dtype), cache, mask=random_trees(1, tail))


@all_paths
def test_tree_attention_of_random_masks(device: torch.device, dtype: torch.dtype, pools: torch.dtype) -> None:
    # Also rows that see no tail node, and, with an empty prefix, rows that see nothing at all.
    cache = make_cache([70, 0], [100, 100], page_size=3, dtype=pools, device=device)
    visible = torch.rand(2, 100, 100) < 0.3
    visible[:, 10:20] = False
    check(torch.randn(2, 100, 4, 64, device=device).to(dtype), cache, mask=pack_bits(visible))


@all_paths
@pytest.mark.parametrize("rows", [1, 2, 40, 150])
def test_tree_attention_of_causal_chains(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, rows: int
) -> None:
    cache = make_cache([29, 0], [rows] * 2, page_size=16, dtype=pools, device=device)
    check(torch.randn(2, rows, 4, 64, device=device).to(dtype), cache)


@all_paths
@pytest.mark.parametrize("window", [None, 90, *exhaustive(700)])
@pytest.mark.parametrize(("page_size", "kv_heads"), covering([1, 16], [1, 4]))
def test_tree_attention_of_prompt_chunks(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, kv_heads: int, page_size: int, window: int | None
) -> None:
    """In long chains, rows see almost all earlier rows, so few KV tiles need the mask."""
    rows = [601, 40, 1]
    cache = make_cache([300, 0, 77], rows, page_size=page_size, kv_heads=kv_heads, dtype=pools, device=device)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    check(torch.randn(sum(rows), 4, 64, device=device).to(dtype), cache, cu_seqlens_q=cu_seqlens, window=window)


@all_paths
def test_tree_attention_of_tails_longer_than_q(device: torch.device, dtype: torch.dtype, pools: torch.dtype) -> None:
    # Drafting: k frontier rows over every node drafted so far.
    k, steps = 10, 7
    cache = make_cache([90, 13, 0], [k * steps] * 3, page_size=16, dtype=pools, device=device)
    q = torch.randn(3, k, 4, 64, device=device).to(dtype)
    check(q, cache, tail_len=k * steps, mask=random_trees(3, k * steps)[:, -k:].contiguous())
    check(q, cache, tail_len=k * steps)  # a chain whose first rows are in the tail already


@all_paths
@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_of_tails_shorter_than_q(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, window: int | None
) -> None:
    # Under the causal rule the first three rows are before the whole tail.
    q = torch.randn(2, 8, 4, 64, device=device).to(dtype)
    check(q, make_cache([0, 70], [5, 5], page_size=3, dtype=pools, device=device), tail_len=5, window=window)
    check(q[:1], make_cache([20], [0], page_size=3, dtype=pools, device=device), tail_len=0, window=window)


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 40, 64])
@pytest.mark.parametrize(
    "prefixes",
    [[0], [1], [15], [2000], [0, 700], [33, 1], [0, 0, 130], [1100, 64, 16, 0], [127, 128, 129, 4000]],
    ids=str,
)
@pytest.mark.parametrize("head_dim", thinned([64, 128], (64).__eq__))
def test_tree_attention_of_few_requests(device: torch.device, head_dim: int, prefixes: list[int], rows: int) -> None:
    """Splits of the KV and row tiles that are empty, partial, or as many as possible."""
    batch = len(prefixes)
    cache = make_cache(prefixes, [rows] * batch, page_size=16, head_dim=head_dim, dtype=torch.bfloat16, device=device)
    q = torch.randn(batch, rows, 8, head_dim, device=device).bfloat16()
    check(q, cache, mask=random_trees(batch, rows))
    check(q, cache, q_lens=torch.randint(0, rows + 1, (batch,), dtype=torch.int32), window=100)
    ends = torch.tensor([0] * batch + [rows], dtype=torch.int32)  # all rows in the last request
    check(q[0], cache, cu_seqlens_q=ends)
    assert torch.equal(sd.tree_attention(q, *cache.tensors()), sd.tree_attention(q, *cache.tensors()))


@all_paths
@pytest.mark.parametrize(
    ("batch", "rows"),
    thinned([(11, 1), (16, 7), (16, 40), (20, 3), (33, 17), (64, 5), (70, 2)], {(33, 17), (70, 2)}.__contains__),
)
@pytest.mark.parametrize("head_dim", thinned([64, 128], (128).__eq__))
def test_tree_attention_of_unsplit_short_kv(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, head_dim: int, batch: int, rows: int
) -> None:
    """(Request, KV head) pairs for half of an H200's blocks and more: short KV is not split."""
    prefixes = [37 * b % 151 if b % 5 else 0 for b in range(batch)]
    cache = make_cache(
        prefixes, [rows] * batch, page_size=16, kv_heads=8, head_dim=head_dim, dtype=pools, device=device
    )
    q = torch.randn(batch, rows, 16, head_dim, device=device).to(dtype)
    check(q, cache, mask=random_trees(batch, rows))
    lengths = torch.randint(-1, rows + 2, (batch,), dtype=torch.int32)
    check(q, cache, q_lens=lengths, slots=torch.randperm(batch).int() - 1, window=50)
    assert torch.equal(sd.tree_attention(q, *cache.tensors()), sd.tree_attention(q, *cache.tensors()))


@all_paths
def test_tree_attention_of_padding_rows_gives_zeros(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    q_lens = torch.tensor([3, 0, 9], dtype=torch.int32)
    # No KV after the valid rows.
    cache = make_cache([65, 65, 2], [3, 0, 9], page_size=16, dtype=pools, device=device)
    q = torch.randn(3, 9, 4, 64, device=device).to(dtype)
    q[0, 3:] = NAN
    check(q, cache, q_lens=q_lens)
    check(q, cache, q_lens=q_lens, mask=random_trees(3, 9))
    assert (check(q, cache, q_lens=torch.tensor([3, -2, 10], dtype=torch.int32)) == torch.tensor([0, 8, 8])).all()


@all_paths
def test_tree_attention_of_packed_rows(device: torch.device, dtype: torch.dtype, pools: torch.dtype) -> None:
    lengths = [5, 0, 1, 40, 17]
    ends = torch.tensor([0, 5, 5, 6, 46, 63], dtype=torch.int32)
    cache = make_cache([30, 64, 0, 100, 129], lengths, page_size=16, dtype=pools, device=device)
    q = torch.randn(70, 4, 64, device=device).to(dtype)  # 7 rows after the last request
    check(q, cache, cu_seqlens_q=ends)
    words = torch.zeros(70, 1, dtype=torch.int64)
    for begin, length in zip(ends.tolist(), lengths, strict=False):
        if length:
            words[begin : begin + length] = random_tree(length)
    check(q, cache, cu_seqlens_q=ends, mask=words)
    check(q, cache, cu_seqlens_q=torch.zeros(1, dtype=torch.int32))  # no request: zeros


@all_paths
def test_tree_attention_of_packed_rows_with_given_tail(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    cache = make_cache([30, 10], [12, 12], page_size=16, dtype=pools, device=device)
    check(torch.randn(7, 4, 64, device=device).to(dtype), cache, cu_seqlens_q=ends, tail_len=12)


@all_paths
def test_tree_attention_of_more_packed_requests_than_warp_lanes(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    lengths = [i % 4 for i in range(67)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cache = make_cache([i % 9 for i in range(67)], lengths, page_size=3, dtype=pools, device=device)
    check(torch.randn(sum(lengths) + 1, 4, 64, device=device).to(dtype), cache, cu_seqlens_q=ends)


@all_paths
def test_tree_attention_of_malformed_packed_lengths_stays_in_bounds(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    cache = make_cache([5, 5, 5], [8, 8, 8], page_size=4, dtype=pools, device=device)
    q = torch.randn(8, 2, 64, device=device).to(dtype)
    status = torch.zeros(3, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 6, 3, 2**31 - 1], dtype=torch.int32, device=device)
    sd.tree_attention(q, *cache.tensors(), cu_seqlens_q=ends, status=status)
    assert status.tolist() == [0, 8, 8]


@all_paths
def test_tree_attention_of_strided_q_and_out_and_unaligned_pools(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    cache = make_cache([70, 3], [6, 6], page_size=4, dtype=pools, device=device)

    def unaligned(pool: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*pool.shape[:-1], 67), NAN, dtype=pool.dtype, device=device)
        wide[..., 1:65] = pool
        return wide[..., 1:65]

    q = torch.randn(2, 4, 6, 64, device=device).to(dtype).transpose(1, 2)  # as Hugging Face's attention has it
    out = torch.empty(2, 4, 6, 70, device=device, dtype=dtype)[..., 3:67].transpose(1, 2)
    unaligned_cache = dataclasses.replace(cache, k_pool=unaligned(cache.k_pool), v_pool=unaligned(cache.v_pool))
    check(q, cache, out=out)
    check(q, unaligned_cache, out=out)
    # Heads outside tokens, K and V of different strides.
    head_major = cache.v_pool.transpose(1, 2).contiguous().transpose(1, 2)
    check(q, dataclasses.replace(cache, v_pool=head_major), mask=random_trees(2, 6))


@all_paths
def test_tree_attention_ignores_nan_in_unseen_rows(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    # Node 2 holds NaN in a tile that is read, but no row sees it: its weight is 0.
    cache = make_cache([61], [6], page_size=64, dtype=pools, device=device)
    page = int(cache.page_table[0, 0])
    cache.k_pool[page, 63] = NAN
    cache.v_pool[page, 63] = NAN
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    visible[..., 2] = False
    q = torch.randn(1, 6, 4, 64, device=device).to(dtype)
    check(q, cache, mask=pack_bits(visible))
    check(q[:, :2], cache, window=2)  # nor a row before the window
    cache.k_pool[page, :59] = NAN
    cache.v_pool[page, :59] = NAN
    check(q[:, :2], cache, window=3)
    # Node 4 sees it: on tensor cores, NaN may spread to other rows of the request.
    cache = make_cache([61, 61], [6, 6], page_size=64, dtype=pools, device=device)
    cache.k_pool[int(cache.page_table[0, 0]), 63] = NAN
    cache.v_pool[int(cache.page_table[0, 0]), 63] = NAN
    visible[0, 4, 2] = True
    out = sd.tree_attention(q.repeat(2, 1, 1, 1), *cache.tensors(), mask=pack_bits(visible.repeat(2, 1, 1)).to(device))
    holds_nan = out.isnan().all(-1).all(-1).tolist()
    assert holds_nan[0][4] and not any(holds_nan[1])
    if device.type == "cpu" or dtype == torch.float32:
        assert holds_nan[0] == [False] * 4 + [True] + [False] and not out[0, [0, 1, 2, 3, 5]].isnan().any()


def test_tree_attention_of_empty_and_permuted_slots(device: torch.device) -> None:
    cache = make_cache([5, 70, 64], [4] * 3, page_size=16, device=device)
    q = torch.randn(5, 4, 4, 64, device=device)
    for slots in ([2, -1, 0, 3, 1], [-1] * 5, [2**31 - 1, -(2**31), 1, 1, 1]):
        status = check(q, cache, slots=torch.tensor(slots, dtype=torch.int32))
        assert (status == 0).all()


def test_tree_attention_masks_and_reports_bad_pages(device: torch.device) -> None:
    cache = make_cache([70, 70, 3, 70], [4] * 4, page_size=16, device=device)
    cache.page_table[0, 2] = -1
    cache.page_table[1, 4] = len(cache.k_pool)  # tail rows
    cache.page_table[2, 0] = 2**31 - 1  # all of the request's rows
    status = check(torch.randn(4, 4, 4, 64, device=device), cache, mask=random_trees(4, 4))
    assert status.tolist() == [4, 4, 4, 0]


def test_tree_attention_clamps_and_reports_bad_lengths(device: torch.device) -> None:
    cache = make_cache([48] * 4, [0] * 4, page_size=16, device=device)
    cache.page_table = cache.page_table[:, :3].contiguous()
    cache.prefix_lens = torch.tensor([-7, 43, 46, 2**31 - 1], dtype=torch.int32, device=device)
    q = torch.randn(4, 5, 4, 64, device=device)
    assert check(q, cache).tolist() == [8, 0, 8, 8]
    assert check(q, cache, mask=random_trees(4, 5)).tolist() == [8, 0, 8, 8]


def test_tree_attention_adds_status_bits(device: torch.device) -> None:
    cache = make_cache([3], [1], page_size=4, device=device)
    cache.page_table[0, 0] = -1
    status = torch.tensor([2], dtype=torch.int32, device=device)
    sd.tree_attention(torch.randn(1, 1, 2, 64, device=device), *cache.tensors(), status=status)
    assert status.tolist() == [6]


def test_tree_attention_treats_stalled_slots_as_empty(device: torch.device) -> None:
    """Their missing pages are not reported again."""
    cache = make_cache([5, 7], [3, 3], page_size=4, device=device)
    q = torch.randn(2, 3, 2, 64, device=device)
    want = sd.tree_attention(q, *cache.tensors())
    cache.page_table[0] = -1
    status = torch.tensor([1, 0], dtype=torch.int32, device=device)
    out = sd.tree_attention(q, *cache.tensors(), status=status)
    assert not out[0].any() and torch.equal(out[1], want[1])
    assert status.tolist() == [1, 0]


@all_paths
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_tree_attention_rows_do_not_depend_on_batch(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, packed: bool
) -> None:
    lengths = [9, 1, 30, 9, 17] if packed else [9] * 5
    cache = make_cache([0, 7, 64, 900, 429], lengths, page_size=16, dtype=pools, device=device)
    q = [torch.randn(rows, 4, 64, device=device).to(dtype) for rows in lengths]
    trees = [random_tree(rows).to(device) for rows in lengths]
    fixed_split = None if dtype == torch.float32 else 128

    def run(order: list[int]) -> list[torch.Tensor]:
        slots = torch.tensor(order, dtype=torch.int32, device=device)
        rows, words = [q[b] for b in order], [trees[b] for b in order]
        shared = {"slots": slots, "fixed_split": fixed_split}
        if not packed:
            out = sd.tree_attention(torch.stack(rows), *cache.tensors(), mask=torch.stack(words), **shared)
            return list(out)
        ends = torch.tensor([0, *(lengths[b] for b in order)], device=device).cumsum(0).int()
        out = sd.tree_attention(torch.cat(rows), *cache.tensors(), cu_seqlens_q=ends, mask=torch.cat(words), **shared)
        return list(out.split([lengths[b] for b in order]))

    everyone = run([0, 1, 2, 3, 4])
    for order in ([3, 1, 4, 0, 2], [2], [4, 3]):
        for b, alone in zip(order, run(order), strict=True):
            assert torch.equal(alone, everyone[b])


@all_paths
@pytest.mark.parametrize("window", [None, 70])
def test_tree_attention_rows_do_not_depend_on_chunking(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, window: int | None
) -> None:
    # A chain in one call, in two chunks, and row by row.
    cache = make_cache([300], [50], page_size=16, dtype=pools, device=device)
    q = torch.randn(1, 50, 4, 64, device=device).to(dtype)
    options = {"window": window, "fixed_split": None if dtype == torch.float32 else 128}
    whole = sd.tree_attention(q, *cache.tensors(), **options)
    for size in (1, 17):
        for begin in range(0, 50, size):
            cache.prefix_lens[0] = 300 + begin
            part = sd.tree_attention(q[:, begin : begin + size].contiguous(), *cache.tensors(), **options)
            assert torch.equal(part, whole[:, begin : begin + size])


@all_paths
@pytest.mark.parametrize("fixed_split", [None, 128, *exhaustive(1024)])
def test_tree_attention_of_long_prefixes(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, fixed_split: int | None
) -> None:
    # On a GPU the KV is split and merged.
    cache = make_cache([5000, 0, 2333, 64], [7] * 4, page_size=16, head_dim=128, dtype=pools, device=device)
    q = torch.randn(4, 7, 8, 128, device=device).to(dtype)
    check(q, cache, mask=random_trees(4, 7), fixed_split=fixed_split)
    check(
        q.flatten(0, 1),
        cache,
        cu_seqlens_q=torch.tensor([0, 7, 14, 21, 28], dtype=torch.int32),
        fixed_split=fixed_split,
    )
    check(q[:1, :1], cache, slots=torch.tensor([0], dtype=torch.int32), fixed_split=fixed_split)


@on_plans("sm90.cluster.16.blocks8.sharing8", "sm90.cluster.16.blocks6.sharing2", "sm90.cluster.16.blocks3.sharing1")
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("pools", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (FP8, 128)], ids=str)
def test_tree_attention_of_one_long_request(
    device: torch.device, plan: str | None, pools: torch.dtype, head_dim: int, rows: int, kv_heads: int
) -> None:
    """On a GPU, several clusters share each KV head of a long request."""
    lens = [9001] if device.type == "cuda" else [900]
    cache = make_cache(lens, [rows], page_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=pools, device=device)
    q = torch.randn(1, rows, 4 * kv_heads, head_dim, device=device).bfloat16()
    for prefix in (lens[0], lens[0] * 2 // 3, lens[0] // 3, 0):
        cache.prefix_lens[0] = prefix
        check(q, cache, mask=random_trees(1, rows), plan=plan)
    cache.prefix_lens[0] = lens[0]
    cache.page_table[0, 20] = -1
    check(q, cache, q_lens=torch.tensor([rows // 2], dtype=torch.int32), plan=plan)
    for window in (lens[0] // 2, 100):
        check(q, cache, window=window, mask=random_trees(1, rows), plan=plan)
    first = sd.tree_attention(q, *cache.tensors(), plan=plan)
    for _ in range(50 if device.type == "cuda" else 1):
        assert torch.equal(sd.tree_attention(q, *cache.tensors(), plan=plan), first)


@on_plans("sm90.cluster.16.sharing2", "sm90.cluster.16.sharing8", "sm90.cluster.64", "sm90.wgmma.64")
@pytest.mark.parametrize("rows", [2, 6])
def test_tree_attention_of_long_packed_requests(device: torch.device, plan: str | None, rows: int) -> None:
    """One request has more row tiles than the clusters provide for, another has none."""
    lens = [9001, 70, 8000] if device.type == "cuda" else [901, 70, 800]
    cache = make_cache(
        lens, [3 * rows] * 3, page_size=16, kv_heads=1, head_dim=128, dtype=torch.bfloat16, device=device
    )
    q = torch.randn(3 * rows, 2, 128, device=device).bfloat16()
    for ends in ([0, rows, 2 * rows, 3 * rows], [0, 3 * rows, 3 * rows, 3 * rows], [0, 0, 1, 3 * rows - 2]):
        check(q, cache, cu_seqlens_q=torch.tensor(ends, dtype=torch.int32), plan=plan)


@all_paths
def test_tree_attention_is_deterministic(device: torch.device, dtype: torch.dtype, pools: torch.dtype) -> None:
    cache = make_cache([3000, 10, 700], [20] * 3, page_size=64, head_dim=128, dtype=pools, device=device)
    q, mask = torch.randn(3, 20, 8, 128, device=device).to(dtype), random_trees(3, 20).to(device)
    first = sd.tree_attention(q, *cache.tensors(), mask=mask)
    for _ in range(5):
        assert torch.equal(sd.tree_attention(q, *cache.tensors(), mask=mask), first)


@all_paths
@pytest.mark.parametrize("window", [1, 2, 5, 64, 65, 200, 10_000])
def test_tree_attention_with_window(device: torch.device, dtype: torch.dtype, pools: torch.dtype, window: int) -> None:
    cache = make_cache([150, 0, 64], [9] * 3, page_size=16, dtype=pools, device=device)
    q = torch.randn(3, 9, 4, 64, device=device).to(dtype)
    check(q, cache, window=window)
    check(q, cache, window=window, mask=random_trees(3, 9))
    check(q, cache, window=window, mask=random_trees(3, 9), q_lens=torch.tensor([9, 2, 0], dtype=torch.int32))
    check(q[:, :3], cache, window=window, tail_len=9, mask=random_trees(3, 9)[:, 6:].contiguous())
    check(q[:, :3], cache, window=window, tail_len=9)


@pytest.mark.parametrize("window", [1, 3, 40, 70, 130, 220])
@pytest.mark.parametrize("prefix", [0, 37, 64])
def test_tree_attention_with_window_over_several_mask_words(device: torch.device, window: int, prefix: int) -> None:
    # The window excludes the oldest rows of a path, whichever mask word has their bits.
    cache = make_cache([prefix], [200], page_size=16, device=device)
    visible = (torch.rand(1, 200, 200) < 0.6) | torch.eye(200, dtype=torch.bool)
    check(torch.randn(1, 200, 2, 64, device=device), cache, window=window, mask=pack_bits(visible))


@all_paths
def test_tree_attention_needs_no_pages_before_window(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    # As an engine frees pages: rows 0 to 2 * 16 - 1 have none, and the first row sees 42 to 91.
    cache = make_cache([91], [4], page_size=16, dtype=pools, device=device)
    cache.page_table[0, :2] = -1
    q = torch.randn(1, 4, 4, 64, device=device).to(dtype)
    assert check(q, cache, window=50).tolist() == [0]
    assert check(q, cache, window=50, mask=random_trees(1, 4)).tolist() == [0]
    assert check(q, cache, window=61).tolist() == [4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_tree_attention_with_soft_cap(device: torch.device, dtype: torch.dtype, soft_cap: float) -> None:
    cache = make_cache([150, 0], [5] * 2, page_size=16, dtype=dtype, device=device)
    check(torch.randn(2, 5, 4, 64, device=device).to(dtype), cache, soft_cap=soft_cap, mask=random_trees(2, 5))
    check((torch.randn(2, 5, 4, 64, device=device)).to(dtype), cache, soft_cap=soft_cap, window=7, scale=0.3)


def test_tree_attention_with_soft_cap_of_large_scores(device: torch.device) -> None:
    cache = make_cache([100], [4], page_size=16, device=device)
    q = torch.randn(1, 4, 2, 64, device=device) * 1e4
    check(q, cache, soft_cap=20.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tree_attention_of_fp8_pools(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    cache = make_cache([65, 0, 1130], [7] * 3, page_size=16, head_dim=head_dim, dtype=FP8, device=device)
    q = torch.randn(3, 7, 8, head_dim, device=device).to(dtype)
    check(q, cache, mask=random_trees(3, 7))
    check(q, cache, mask=random_trees(3, 7), k_scale=0.7, v_scale=3.25, soft_cap=5.0, window=100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "fixed_split"), [(1, None), (50, None), (100, None), (300, None), (3, 128)])
def test_tree_attention_reads_every_fp8_value(
    device: torch.device, dtype: torch.dtype, rows: int, fixed_split: int | None
) -> None:
    # One key of weight 1, so that the output is its value: all 256 bit patterns.
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 1, 1, 64)
    table = torch.arange(4, dtype=torch.int32, device=device)[:, None]
    ones = torch.ones(4, dtype=torch.int32, device=device)
    q = torch.zeros(4, rows, 1, 64, device=device, dtype=dtype)
    k = torch.zeros(4, 1, 1, 64).to(FP8).to(device)
    out = sd.tree_attention(q, k, values.to(device), table, ones, tail_len=0, fixed_split=fixed_split)
    want = values.to(dtype).expand(4, rows, 1, 64)
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tree_attention_of_fp8_pools_and_q_of_any_magnitude(device: torch.device, head_dim: int) -> None:
    """Scores have the range of bfloat16, although FP8 pools are multiplied as float16."""
    cache = make_cache([200], [8], page_size=16, head_dim=head_dim, dtype=FP8, device=device)
    size = torch.tensor([1e-38, 1e-20, 1e-6, 0, 1, 1e3, 1e5, 1e6])[:, None, None]
    q = (torch.randn(1, 8, 4, head_dim) * size).bfloat16()
    q[0, 4, :, :5] = torch.tensor([1e-30, 2e4, 1e-3, 1e-8, -3e-2])  # in adjacent columns
    out = sd.tree_attention(q.to(device), *cache.tensors(), scale=1 / 128, k_scale=1 / 16)
    want, _, _ = reference.tree_attention(q, *map(on_cpu, cache.tensors()), scale=1 / 128, k_scale=1 / 16)
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=TOLERANCES[q.dtype] * want.abs().max().item())


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of q [R, D] over k, v [n, D]: exact, and with weights rounded as FlashAttention does."""
    weights = (q.double() @ k.double().T / q.shape[-1] ** 0.5).softmax(-1)
    rounded = (weights / weights.amax(-1, keepdim=True)).to(q.dtype).double()
    exact = weights / weights.amax(-1, keepdim=True)
    return weights @ v.double(), (rounded @ v.double() / exact.sum(-1, keepdim=True)).to(q.dtype).double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [4, 64])
def test_tree_attention_error_is_within_that_of_flash_attention(
    device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    cache = make_cache([2000], [0], page_size=1, kv_heads=1, head_dim=128, dtype=dtype, device=device)
    q = torch.randn(1, rows, 4, 128, device=device).to(dtype)
    out = sd.tree_attention(q, *cache.tensors(), tail_len=0)
    pages = cache.page_table[0, :2000].long()
    keys, values = (pool[pages, 0, 0].cpu() for pool in (cache.k_pool, cache.v_pool))
    exact, flash = flash_attention(q[0].flatten(0, 1).cpu(), keys, values)
    assert (out[0].flatten(0, 1).cpu() - exact).norm() <= 1.1 * (flash - exact).norm()


@pytest.mark.parametrize("seed", range(60 if HAS_CUDA else 16))
def test_tree_attention_of_random_shapes_and_options(device: torch.device, seed: int) -> None:
    """Draw all shapes and options at random."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    head_dim, group, kv_heads = draw.choice([64, 128, 256]), draw.choice([1, 2, 4, 5, 7, 8]), draw.choice([1, 2, 3, 20])
    batch, most = draw.randint(1, 5), draw.choice([1, 4, 16, 33, 70])
    lengths = [draw.randint(0, most) for _ in range(batch)]
    spare = draw.choice([None, 0, draw.randint(1, 150)])  # rows of the tail beyond the queries
    tail_len = None if spare is None else most + spare
    longest = 4000 if most <= 16 else 300
    prefixes = [draw.choice([0, draw.randint(0, 130), draw.randint(0, longest)]) for _ in range(batch)]
    cache = make_cache(
        prefixes, [most if tail_len is None else tail_len] * batch, page_size=draw.choice([1, 3, 16, 64, 256]),
        kv_heads=kv_heads, head_dim=head_dim, dtype=draw.choice([dtype, dtype, FP8]), device=device,
    )  # fmt: skip
    arguments: dict[str, object] = {"tail_len": tail_len}
    packed = draw.random() < 0.4
    if packed:
        arguments["cu_seqlens_q"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        shape: tuple[int, ...] = (sum(lengths) + draw.choice([0, 3]),)
    else:
        if draw.random() < 0.6:
            arguments["q_lens"] = torch.tensor(lengths, dtype=torch.int32)
        shape = (batch, most)
    if draw.random() < 0.6:
        tail = most if tail_len is None else tail_len
        visible = torch.rand(*shape, tail) < draw.choice([0.2, 0.9])
        arguments["mask"] = pack_bits(visible)
    if draw.random() < 0.4:
        arguments["slots"] = torch.tensor(draw.sample([*range(batch), -1], batch), dtype=torch.int32)
    if draw.random() < 0.4:
        arguments["window"] = draw.choice([1, 10, 100, 1000])
    if draw.random() < 0.3:
        arguments["soft_cap"] = draw.choice([4.0, 30.0])
    if cache.k_pool.dtype == FP8:
        arguments |= {"k_scale": 1.5, "v_scale": 0.25}
    if draw.random() < 0.3:
        arguments["fixed_split"] = draw.choice([128, 512])
    check(torch.randn(*shape, group * kv_heads, head_dim, device=device).to(dtype), cache, **arguments)


def test_tree_attention_workspace_size_and_reuse(device: torch.device) -> None:
    # FP8 pools of head_dim 256, since a few other requests may need no workspace.
    cache = make_cache([900, 3000], [9] * 2, page_size=16, head_dim=256, dtype=FP8, device=device)
    q = torch.randn(2, 9, 8, 256, device=device).bfloat16()
    want = sd.tree_attention(q, *cache.tensors())
    size = sd.tree_attention_workspace(q, cache.k_pool, cache.page_table)
    fixed = sd.tree_attention_workspace(q, cache.k_pool, cache.page_table, fixed_split=128)
    with pytest.raises(ValueError) as error:
        sd.tree_attention_workspace(q, cache.k_pool, cache.page_table, fixed_split=64)
    assert str(error.value) == "tree_attention: fixed_split is 64, expected a positive multiple of 128"
    if device.type == "cpu":
        assert size == fixed == 0
        return
    assert 0 < size < 40_000_000
    ends = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    assert sd.tree_attention_workspace(q.flatten(0, 1), cache.k_pool, cache.page_table, cu_seqlens_q=ends) > 0
    workspace = torch.full((size // 4,), NAN, device=device)
    for dtype in (torch.float32, torch.uint8, torch.int64):  # only its size in bytes counts
        of_dtype = workspace.view(dtype)
        assert torch.equal(sd.tree_attention(q, *cache.tensors(), workspace=of_dtype), want)
        assert torch.equal(sd.tree_attention(q, *cache.tensors(), workspace=of_dtype), want)  # it needs no reset
    with pytest.raises(ValueError) as error:
        sd.tree_attention(q, *cache.tensors(), workspace=workspace[:-1])
    assert str(error.value) == f"tree_attention: workspace has {size - 4} bytes, expected {size} or more"
    with pytest.raises(ValueError) as error:
        sd.tree_attention(q, *cache.tensors(), workspace=torch.empty(size // 4 + 1, device=device)[1:])
    assert str(error.value) == "tree_attention: workspace does not start on 16 bytes, expected a tensor that does"


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize(("fixed_split", "head_dim"), [(None, 128), (None, 256), (128, 128)])
def test_tree_attention_workspace_may_hold_garbage(fixed_split: int | None, head_dim: int) -> None:
    """Uneven requests with split KV alternate with calls that lay out the same memory differently."""
    calls = []
    for prefixes, rows, heads in (([5000, 100], 9, 8), ([77, 3000, 1200], 40, 16), ([9000], 1, 4)):
        cache = make_cache(
            prefixes, [rows] * len(prefixes), page_size=16, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"
        )
        calls.append((torch.randn(len(prefixes), rows, heads, head_dim, device="cuda").bfloat16(), cache))
    sizes = [sd.tree_attention_workspace(q, c.k_pool, c.page_table, fixed_split=fixed_split) for q, c in calls]
    alone = [sd.tree_attention(q, *cache.tensors(), fixed_split=fixed_split) for q, cache in calls]
    floats = max(sizes) // 4
    for workspace in (torch.full((floats,), NAN, device="cuda"), torch.randn(floats, device="cuda")):
        for _ in range(3):
            for (q, cache), want in zip(calls, alone, strict=True):
                out = sd.tree_attention(q, *cache.tensors(), fixed_split=fixed_split, workspace=workspace)
                assert torch.equal(out, want)
    for (q, cache), out in zip(calls, alone, strict=True):
        want_out, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()))
        atol = TOLERANCES[q.dtype] * want_out.abs().max().item()
        torch.testing.assert_close(out.cpu().double(), want_out, rtol=0, atol=atol)


@pytest.mark.skipif(MACHINE != "sm90", reason="no Hopper GPU here")
@pytest.mark.parametrize("rows", [4, 16])
def test_tree_attention_workspace_of_clusters_may_hold_garbage(rows: int) -> None:
    """Calls of other lengths and shapes use the workspace in between."""
    cache = make_cache([9001], [rows], page_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    plan = "sm90.cluster.16.sharing2"
    q = torch.randn(1, rows, 32, 128, device="cuda").bfloat16()
    few = q[:, :, :4].contiguous(), cache.k_pool[:, :, :1], cache.v_pool[:, :, :1], *cache.tensors()[2:]
    sizes = [
        sd.tree_attention_workspace(x, pool, cache.page_table, plan=plan)
        for x, pool in ((q, cache.k_pool), (few[0], few[1]))
    ]
    assert min(sizes) > 0
    workspace = torch.empty(max(sizes) // 4, device="cuda")
    want, want_few = (sd.tree_attention(*x, plan=plan) for x in ((q, *cache.tensors()), few))
    check(q, cache, plan=plan)
    for garbage in (NAN, 1.0, torch.inf, None):
        if garbage is None:
            workspace.view(torch.int32).fill_(-1)
        else:
            workspace.fill_(garbage)
        for length, result in ((9001, want), (100, None), (9001, want)):
            cache.prefix_lens[0] = length
            out = sd.tree_attention(q, *cache.tensors(), workspace=workspace, plan=plan)
            assert result is None or torch.equal(out, result)
            if result is not None:
                assert torch.equal(sd.tree_attention(*few, workspace=workspace, plan=plan), want_few)


def test_tree_attention_with_scale(device: torch.device) -> None:
    cache = make_cache([40], [3], page_size=16, device=device)
    check(torch.randn(1, 3, 2, 64, device=device), cache, scale=0.37)


def test_tree_attention_of_large_scores(device: torch.device) -> None:
    # Differences far beyond the range of exp: one key gets the whole weight, nothing overflows.
    cache = make_cache([100], [4], page_size=16, device=device)
    q = torch.randn(1, 4, 2, 64, device=device) * 100
    out = sd.tree_attention(q, *cache.tensors())
    want, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()))
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("batch", "rows"), [(0, 4), (3, 0)])
def test_tree_attention_accepts_empty_batch_and_no_rows(device: torch.device, batch: int, rows: int) -> None:
    cache = make_cache([3] * 3, [4] * 3, page_size=16, device=device)
    q = torch.randn(batch, rows, 4, 64, device=device)
    assert sd.tree_attention(q, *cache.tensors(), mask=torch.zeros(batch, rows, 1, dtype=torch.int64, device=device)).shape == q.shape  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_tree_attention_matches_reference_on_small_inputs(
    device: torch.device, dtype: torch.dtype, head_dim: int, fp8: bool
) -> None:
    pools = FP8 if fp8 else dtype
    cache = make_cache([66, 0], [3, 3], page_size=3, head_dim=head_dim, dtype=pools, device=device)
    check(torch.randn(2, 3, 4, head_dim, device=device).to(dtype), cache, mask=random_trees(2, 3))
    ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    check(torch.randn(4, 4, head_dim, device=device).to(dtype), cache, cu_seqlens_q=ends)


@pytest.mark.sanitize
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("variant", kernels())
def test_tree_attention_of_small_inputs_on_every_kernel(variant: str) -> None:
    """A full and a partial row tile, several KV tiles, a missing page, a window, splits that are merged."""
    if not variant.startswith(MACHINE):
        pytest.skip("other GPU")
    plan, head_dim, pools = plan_of_kernel(variant)
    q_rows = int(variant.split(".")[2]) // 4 + 3
    lens = [2400, 131] if "sharing" in variant else [400, 0, 256, 131]
    cache = make_cache(lens, [q_rows] * len(lens), page_size=16, head_dim=head_dim, dtype=pools, device="cuda")
    cache.page_table[0, 20] = -1
    q = torch.randn(len(lens), q_rows, 8, head_dim, device="cuda").bfloat16()
    name = sd.tree_attention_plan(q, cache.k_pool, cache.page_table, plan=plan)
    assert set(plan.split(".")) <= set(name.split("."))
    trees = random_trees(len(lens), q_rows)
    check(q, cache, mask=trees, plan=plan)
    check(q, cache, mask=trees, plan=plan, soft_cap=9.0, window=150)
    q_lens = torch.randint(0, q_rows + 1, (len(lens),), dtype=torch.int32)
    check(q, cache, q_lens=q_lens, plan=plan)
    ends = torch.tensor([0, *[q_rows - 1] * (len(lens) - 1), q_rows], dtype=torch.int32)
    check(q[0], cache, cu_seqlens_q=ends, plan=plan)
    if "cluster" not in variant:
        check(q, cache, mask=trees, plan=plan + ".whole")
        check(q, cache, mask=trees, plan=plan, fixed_split=128)


@pytest.mark.sanitize
@on_plans("sm90.wgmma.64", "sm90.wgmma.128", "sm80.mma.16", "sm80.mma.64")
@pytest.mark.parametrize("page_size", [3, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tree_attention_of_small_page_sizes(
    device: torch.device, plan: str | None, page_size: int, head_dim: int
) -> None:
    """Prefixes of whole KV tiles, copied by rows and by TMA boxes; more row tiles than run in step."""
    rows, lens = 40, [400, 0, 256, 131]
    cache = make_cache(lens, [rows] * 4, page_size=page_size, head_dim=head_dim, dtype=torch.bfloat16, device=device)
    cache.page_table[2, 100 // page_size] = -1
    q = torch.randn(4, rows, 8, head_dim, device=device).bfloat16()
    check(q, cache, mask=random_trees(4, rows), plan=plan)
    check(q, cache, window=150, q_lens=torch.tensor([40, 3, 40, 17], dtype=torch.int32), plan=plan)


@pytest.mark.sanitize
@on_plans(
    "sm90.dequant_registers.16",
    "sm90.dequant_registers.32",
    "sm90.dequant_registers.64",
    "sm90.dequant_smem.64",
    "sm90.dequant_smem.128",
    "sm90.cluster.16",
    "sm90.cluster.64",
    "sm80.mma.32",
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [3, 32])
@pytest.mark.parametrize("rows", [4, 16])
def test_tree_attention_of_small_fp8_tiles(
    device: torch.device, plan: str | None, rows: int, page_size: int, head_dim: int
) -> None:
    """FP8 pools, with full and partial row tiles."""
    cache = make_cache([400, 0, 256, 131], [rows] * 4, page_size=page_size, head_dim=head_dim, dtype=FP8, device=device)
    q = torch.randn(4, rows, 8, head_dim, device=device).bfloat16()
    check(q, cache, mask=random_trees(4, rows), plan=plan)
    q_lens = torch.tensor([rows, 3, rows, rows // 2], dtype=torch.int32)
    check(q, cache, window=150, q_lens=q_lens, plan=plan)


@pytest.mark.sanitize
@on_plans("sm90.dequant_registers.16.whole.occupancy2.warpgroups1", "sm90.dequant_smem.64.whole", "sm80.mma.64.whole")
@pytest.mark.parametrize("rows", [4, 8, 16])
def test_tree_attention_of_small_fp8_requests(device: torch.device, plan: str | None, rows: int) -> None:
    """More work items than SMs, and short KV: blocks process whole items in turn."""
    lens = [7 * i % 150 for i in range(70)]
    cache = make_cache(lens, [rows] * 70, page_size=16, dtype=FP8, device=device)
    q = torch.randn(70, rows, 8, 64, device=device).bfloat16()
    check(q, cache, mask=random_trees(70, rows), soft_cap=4.0, plan=plan)


@pytest.mark.sanitize
@on_plans("sm90.cluster.16.sharing2", "sm90.cluster.16.sharing8")
@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("pools", [torch.bfloat16, FP8], ids=str)
def test_tree_attention_around_length_that_clusters_share(
    device: torch.device, plan: str | None, pools: torch.dtype, rows: int
) -> None:
    """The shortest KV that clusters share, and one that is shorter."""
    cache = make_cache([2400], [rows], page_size=16, kv_heads=1, dtype=pools, device=device)
    q = torch.randn(1, rows, 4, 64, device=device).bfloat16()
    check(q, cache, mask=random_trees(1, rows), plan=plan)
    check(q, cache, window=150, plan=plan)


@pytest.mark.sanitize
@on_plans("sm90.wgmma.64.whole", "sm90.wgmma.128.whole", "sm80.mma.64.whole")
@pytest.mark.parametrize(("batch", "rows"), [(70, 10), (270, 3)])
def test_tree_attention_of_whole_items(device: torch.device, plan: str | None, batch: int, rows: int) -> None:
    """One block processes each request of short KV; some blocks process two."""
    lens = [b % 3 * 64 for b in range(batch)]
    cache = make_cache(lens, [rows] * batch, page_size=16, kv_heads=1, dtype=torch.bfloat16, device=device)
    cache.page_table[1, 2] = -1
    q = torch.randn(batch, rows, 8, 64, device=device).bfloat16()
    check(q, cache, mask=random_trees(batch, rows), plan=plan)


@on_plans("sm90.wgmma.64.split", "sm90.wgmma.128.split", "sm80.mma.16.split", "sm80.mma.32.split")
@pytest.mark.parametrize(("rows", "page_size"), covering([9, 33, 64, 80, 150, 200], [1, 48, 256]))
@pytest.mark.parametrize("head_dim", thinned([64, 128, 256], (128).__eq__))
def test_tree_attention_on_stream_k_plans(
    device: torch.device, plan: str | None, head_dim: int, page_size: int, rows: int
) -> None:
    """Workers split the KV, in row tiles of every size."""
    lens = [1000, 77, 0, 640]
    cache = make_cache(lens, [rows] * 4, page_size=page_size, head_dim=head_dim, dtype=torch.float16, device=device)
    q = torch.randn(4, rows, 4, head_dim, device=device).half()
    check(q, cache, mask=random_trees(4, rows), plan=plan)


@pytest.mark.parametrize(("batch", "rows"), covering([40, 130], [20, 3]))
def test_tree_attention_of_many_requests(device: torch.device, batch: int, rows: int) -> None:
    """More requests than the lanes of a warp hold at once, and more than the kernel holds at all."""
    lens = torch.randint(0, 200, (batch,)).tolist()
    cache = make_cache(lens, [rows] * batch, page_size=16, dtype=torch.bfloat16, device=device)
    q = torch.randn(batch, rows, 8, 64, device=device).bfloat16()
    check(q, cache, mask=random_trees(batch, rows))
    check(q, cache, q_lens=torch.randint(0, rows + 1, (batch,), dtype=torch.int32))


@on_plans("sm90.wgmma.128", "sm90.cluster.64", "sm80.mma.32")
@pytest.mark.parametrize("rows", [9, 40])
def test_tree_attention_of_pools_whose_heads_share_rows(device: torch.device, plan: str | None, rows: int) -> None:
    """TMA does not support such strides."""
    cache = make_cache([400, 33], [rows] * 2, page_size=16, kv_heads=1, dtype=torch.bfloat16, device=device)
    cache.k_pool, cache.v_pool = (pool.expand(-1, -1, 2, -1) for pool in (cache.k_pool, cache.v_pool))
    check(torch.randn(2, rows, 8, 64, device=device).bfloat16(), cache, mask=random_trees(2, rows), plan=plan)


@all_paths
def test_tree_attention_with_max_kv_len_equals_narrower_table(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype
) -> None:
    """The result is bitwise that of a page table of that length; on a GPU, so is the plan."""
    cache = make_cache([300, 77, 0], [6] * 3, page_size=16, head_dim=128, dtype=pools, device=device)
    wide = torch.nn.functional.pad(cache.page_table, (0, 4000), value=-1)
    q, mask = torch.randn(3, 6, 8, 128, device=device).to(dtype), random_trees(3, 6).to(device)
    want = sd.tree_attention(q, *cache.tensors(), mask=mask)
    rows = 16 * cache.page_table.shape[1]
    wide_cache = dataclasses.replace(cache, page_table=wide)
    assert torch.equal(sd.tree_attention(q, *wide_cache.tensors(), mask=mask, max_kv_len=rows), want)
    names = [sd.tree_attention_plan(q, cache.k_pool, table, max_kv_len=rows) for table in (cache.page_table, wide)]
    assert names[0] == names[1]
    # The table's capacity caps the bound; without a bound, 4096 rows count at most.
    assert sd.tree_attention_plan(q, cache.k_pool, wide, max_kv_len=10**9) == sd.tree_attention_plan(
        q, cache.k_pool, wide, max_kv_len=16 * wide.shape[1]
    )
    assert sd.tree_attention_plan(q, cache.k_pool, wide) == sd.tree_attention_plan(
        q, cache.k_pool, wide, max_kv_len=4096
    )


@all_paths
@pytest.mark.parametrize("max_kv_len", [1, 45, 50, 64])
def test_tree_attention_with_max_kv_len_clamps_longer_requests(
    device: torch.device, dtype: torch.dtype, pools: torch.dtype, max_kv_len: int
) -> None:
    """They are reported, as requests beyond the page table are; later rows are not read."""
    lens = [10, 60, 48, 45, 44]
    cache = make_cache(lens, [5] * 5, page_size=16, dtype=pools, device=device)
    q = torch.randn(5, 5, 4, 64, device=device).to(dtype)
    for arguments in ({}, {"mask": random_trees(5, 5)}, {"window": 7}):
        status = check(q, cache, max_kv_len=max_kv_len, **arguments)
        assert status.tolist() == [8 if n + 5 > max_kv_len else 0 for n in lens]
    whole = [b for b, n in enumerate(lens) if n + 5 <= max_kv_len]
    for b, n in enumerate(lens):
        for row in range(max_kv_len, n + 5):
            page = int(cache.page_table[b, row // 16])
            cache.k_pool[page, row % 16] = cache.v_pool[page, row % 16] = NAN
    status = check(q, cache, max_kv_len=max_kv_len).to(device)
    assert torch.equal(
        sd.tree_attention(q, *cache.tensors(), max_kv_len=max_kv_len, status=status)[whole],
        sd.tree_attention(q, *cache.tensors())[whole],
    )


@all_paths
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_tree_attention_graph_replay_reads_changed_lengths_and_tables(dtype: torch.dtype, pools: torch.dtype) -> None:
    cache = make_cache([40, 2500], [6, 6], page_size=16, dtype=pools, device="cuda")
    q = torch.randn(2, 6, 4, 64, device="cuda").to(dtype)
    out, trees = torch.empty_like(q), random_trees(2, 6).cuda()
    sd.tree_attention(q, *cache.tensors(), mask=trees, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sd.tree_attention(q, *cache.tensors(), mask=trees, out=out)
    for lens in ([3, 2500], [40, 0], [0, 1234]):
        order = torch.randperm(len(cache.k_pool), device="cuda")
        for pool in (cache.k_pool, cache.v_pool):
            pool.copy_(pool.clone()[order])
        moved = torch.argsort(order).int()
        known = (cache.page_table >= 0) & (cache.page_table < len(order))
        cache.page_table.copy_(torch.where(known, moved[cache.page_table.clamp(0, len(order) - 1).long()], -1))
        cache.prefix_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        trees.copy_(random_trees(2, 6))
        graph.replay()
        want, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()), mask=trees.cpu())
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=TOLERANCES[q.dtype] * want.abs().max().item())


@pytest.mark.skipif(MACHINE != "sm90", reason="no Hopper GPU here")
@pytest.mark.parametrize("rows", [4, 16])
def test_tree_attention_graph_replay_of_clusters_with_changed_lengths(rows: int) -> None:
    """Several calls of a graph share one workspace; lengths change with each replay."""
    caches = [
        make_cache([9001], [rows], page_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
        for _ in range(3)
    ]
    plan = "sm90.cluster.16.blocks6.sharing2"
    q = torch.randn(1, rows, 32, 128, device="cuda").bfloat16()
    outs, trees = [torch.empty_like(q) for _ in caches], random_trees(1, rows).cuda()
    size = sd.tree_attention_workspace(q, caches[0].k_pool, caches[0].page_table, plan=plan)
    workspace = torch.full((size // 4,), NAN, device="cuda")

    def call() -> None:
        for cache, out in zip(caches, outs, strict=True):
            sd.tree_attention(q, *cache.tensors(), mask=trees, out=out, workspace=workspace, plan=plan)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lens in ([9001, 9001, 9001], [9001, 17, 9000], [0, 8000, 100], [5000, 6000, 7000], [9001, 9001, 9001]):
        for cache, length in zip(caches, lens, strict=True):
            cache.prefix_lens.fill_(length)
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        for cache, out in zip(caches, outs, strict=True):
            got = out.clone()
            want, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()), mask=trees.cpu())
            atol = TOLERANCES[q.dtype] * want.abs().max().item()
            torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=atol)
            assert torch.equal(got, sd.tree_attention(q, *cache.tensors(), mask=trees, plan=plan))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FP8_POOLS = {"k_pool": zeros(5, 8, 2, 64).to(FP8), "v_pool": zeros(5, 8, 2, 64).to(FP8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": zeros(2, 3, 4, 64, dtype=torch.int32)}, "q is int32, expected float32 or float16 or bfloat16"),
        ({"q": zeros(2, 1, 4, 64).expand(2, 2**30, 4, 64), "out": zeros(1)}, "q_rows * q_heads is 4294967296, expected 0 to 2147483647"),
        ({"q": zeros(2, 3, 4, 96)}, "q has head_dim 96, expected 64, 128 or 256"),
        ({"q": zeros(2, 3, 64, 4).transpose(2, 3)}, "q has shape [2, 3, 4, 64] and is not contiguous in its last dimension, expected a last stride of 1"),
        ({"q": zeros(6, 4, 64), "out": zeros(6, 4, 64)}, "q has shape [6, 4, 64], expected [batch, q_rows, q_heads, head_dim]"),
        ({"k_pool": zeros(5, 8, 2, 64, dtype=torch.bfloat16)}, "k_pool is bfloat16, expected float32 or float8_e4m3fn"),
        ({"k_pool": zeros(5, 8, 2, 64).to(FP8)}, "v_pool is float32, expected float8_e4m3fn"),
        ({"q": zeros(2, 3, 4, 64).to(FP8)}, "q is float8_e4m3fn, expected float32 or float16 or bfloat16"),
        ({"k_pool": zeros(5, 0, 2, 64)}, "k_pool has page_size 0, expected 1 or more"),
        ({"k_pool": zeros(5, 8, 3, 64)}, "k_pool has 3 heads for the 4 of q, expected a number of heads that divides it"),
        ({"v_pool": zeros(5, 9, 2, 64)}, "v_pool has shape [5, 9, 2, 64], expected [num_pages=5, page_size=8, kv_heads=2, head_dim=64]"),
        ({"page_table": zeros(2, 4, dtype=torch.int64)}, "page_table is int64, expected int32"),
        ({"prefix_lens": zeros(3, dtype=torch.int32)}, "prefix_lens has shape [3], expected [num_slots=2]"),
        ({"slots": zeros(3, dtype=torch.int32)}, "slots has shape [3], expected [batch=2]"),
        ({"page_table": zeros(1, 4, dtype=torch.int32), "prefix_lens": zeros(1, dtype=torch.int32)}, "slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"q_lens": zeros(1, dtype=torch.int32)}, "q_lens has shape [1], expected [batch=2]"),
        ({"q": zeros(6, 4, 64), "cu_seqlens_q": zeros(3, dtype=torch.int32), "q_lens": zeros(2, dtype=torch.int32)}, "q_lens is given together with cu_seqlens_q, expected one of the two"),
        ({"q": zeros(6, 4, 64), "cu_seqlens_q": zeros(0, dtype=torch.int32)}, "cu_seqlens_q is empty, expected batch + 1 row offsets"),
        ({"tail_len": -1}, "tail_len is -1, expected 0 to 2147483647"),
        ({"mask": zeros(2, 3, 1)}, "mask is float32, expected int64"),
        ({"mask": zeros(2, 3, 1, dtype=torch.int64), "tail_len": 65}, "mask has mask_words 1, expected 2 or more for a tail of 65"),
        ({"window": 0}, "window is 0, expected 1 or more"),
        ({"scale": 0.0}, "scale is 0.000000, expected a finite float32 above 0"),
        ({"scale": -1.0}, "scale is -1.000000, expected a finite float32 above 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.000000, expected a finite float32 above 0"),
        ({"soft_cap": NAN}, "soft_cap is nan, expected a finite float32 above 0"),
        ({"soft_cap": float("inf")}, "soft_cap is inf, expected a finite float32 above 0"),
        ({"k_scale": 0.5}, "k_scale is 0.500000, expected 1 for pools of float32"),
        ({"v_scale": NAN}, "v_scale is nan, expected 1 for pools of float32"),
        (FP8_POOLS | {"k_scale": -1.0}, "k_scale is -1.000000, expected a finite float32 above 0"),
        (FP8_POOLS | {"v_scale": float("inf")}, "v_scale is inf, expected a finite float32 above 0"),
        ({"fixed_split": 0}, "fixed_split is 0, expected a positive multiple of 128"),
        ({"fixed_split": 100}, "fixed_split is 100, expected a positive multiple of 128"),
        ({"max_kv_len": 0}, "max_kv_len is 0, expected 1 or more"),
        ({"plan": "sm90.cluster.16"}, "plan is sm90.cluster.16, expected None on cpu"),
        ({"workspace": zeros(8, 2).T}, "workspace has shape [2, 8] and is not contiguous, expected a contiguous tensor"),
        ({"out": zeros(2, 3, 4, 64, dtype=torch.float16)}, "out is float16, expected float32"),
        ({"lse": zeros(2, 3, 5)}, "lse has shape [2, 3, 5], expected [batch=2, q_rows=3, q_heads=4]"),
        ({"status": zeros(3, dtype=torch.int32)}, "status has shape [3], expected [num_slots=2]"),
    ],
)  # fmt: skip
def test_tree_attention_error_messages(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q": zeros(2, 3, 4, 64),
        "k_pool": zeros(5, 8, 2, 64),
        "v_pool": zeros(5, 8, 2, 64),
        "page_table": zeros(2, 4, dtype=torch.int32),
        "prefix_lens": zeros(2, dtype=torch.int32),
    } | change
    with pytest.raises(ValueError) as error:
        sd.tree_attention(**arguments)
    assert str(error.value) == "tree_attention: " + message


@pytest.mark.parametrize(
    "options", [{}, {"max_kv_len": 20}, {"q_lens": [5, 6]}, {"cu_seqlens_q": [0, 5, 11]}], ids=lambda each: str(*each)
)
def test_tree_attention_of_lengths_that_do_not_fit_needs_status(options: dict[str, object]) -> None:
    cache = make_cache([3, 3], [5, 5], page_size=16)
    lengths = (
        [16 * cache.page_table.shape[1] - 4] * 2 if not options else [18, 3] if "max_kv_len" in options else [3, 3]
    )
    tensors = (*cache.tensors()[:3], torch.tensor(lengths, dtype=torch.int32))
    given = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for name, x in options.items()}
    q = torch.randn(10, 4, 64) if "cu_seqlens_q" in options else torch.randn(2, 5, 4, 64)
    with pytest.raises(ValueError) as error:
        sd.tree_attention(q, *tensors, **given)
    request, rows = int("max_kv_len" not in options and bool(options)), 20 if "max_kv_len" in options else 48
    assert str(error.value) == (
        f"tree_attention: request {request} has lengths that do not fit {rows} KV rows (by page_table and max_kv_len), "
        f"{len(q) if q.ndim == 3 else 5} rows of q and mask, expected lengths that fit, or status"
    )
    status = torch.zeros(2, dtype=torch.int32)
    sd.tree_attention(q, *tensors, **given, status=status)
    assert int(status[request]) & sd.Status.BAD_LENGTH
    empty = torch.tensor([-1, -1], dtype=torch.int32)  # rows without a request have no lengths
    sd.tree_attention(q, *tensors, **given, slots=empty)


@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool"])
def test_tree_attention_refuses_to_drop_gradients(name: str, device: torch.device) -> None:
    cache = make_cache([3], [2], page_size=4, device=device)
    arguments = {"q": torch.randn(1, 2, 4, 64, device=device)} | dataclasses.asdict(cache)
    arguments[name] = arguments[name].requires_grad_()
    for attention in (sd.tree_attention, torch_ops.tree_attention):
        with pytest.raises(ValueError) as error:
            attention(**arguments)
        assert str(error.value) == (
            f"tree_attention: {name} requires grad, expected none (detach() it, or call under torch.no_grad())"
        )
    with torch.no_grad():
        assert not sd.tree_attention(**arguments).requires_grad


@all_paths
def test_tree_attention_of_hnd_pools_equals_nhd(device: torch.device, dtype: torch.dtype, pools: torch.dtype) -> None:
    """FlashInfer's layout: heads before the rows of a page."""
    cache = make_cache([70, 33], [6, 6], page_size=16, kv_heads=2, dtype=pools, device=device)
    q, mask = torch.randn(2, 6, 8, 64, device=device).to(dtype), random_trees(2, 6).to(device)
    want = sd.tree_attention(q, *cache.tensors(), mask=mask)
    k, v = (pool.transpose(1, 2).contiguous() for pool in (cache.k_pool, cache.v_pool))
    tensors = k, v, cache.page_table, cache.prefix_lens
    assert torch.equal(sd.tree_attention(q, *tensors, mask=mask, layout="HND"), want)
    assert torch.equal(torch_ops.tree_attention(q, *tensors, mask=mask, layout="HND"), want)
    for ask in (sd.tree_attention_plan, sd.tree_attention_workspace):
        assert ask(q, k, cache.page_table, layout="HND") == ask(q, cache.k_pool, cache.page_table)


def test_unknown_layout_is_refused() -> None:
    cache = make_cache([3], [2], page_size=4)
    with pytest.raises(ValueError) as error:
        sd.tree_attention(torch.randn(1, 2, 4, 64), *cache.tensors(), layout="NDH")
    assert str(error.value) == "tree_attention: layout is 'NDH', expected 'NHD' or 'HND'"
