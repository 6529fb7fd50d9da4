"""mla_tree_attention against its float64 reference."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from specdec_kernels.reference import mla as reference
from support.attention_cases import NAN, pack_bits, random_tree, random_trees
from support.devices import HAS_CUDA, TOLERANCES
from support.mla_cases import FP8, LatentCache, make_latent_cache, mask_of_lists, random_lists

SCALE = 0.07
LSE_TOLERANCE = 5e-5  # a float32 dot product of up to 576 terms
SUM_ERROR = 2**-19
U8 = torch.uint8

# Without tensor cores and with them, and from each format of rows.
all_paths = pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
        (torch.bfloat16, U8),
    ],
    ids=["float32", "float16", "bfloat16", "fp8", "656"],
)
sizes = pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (256, 32), (64, 0), (32, 16)], ids=str)


def on_cpu(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def check(q: torch.Tensor, cache: LatentCache, *, out: torch.Tensor | None = None, **arguments: object) -> torch.Tensor:
    """Run the op over poisoned outputs, compare out, lse and status with the reference, and return status."""
    arguments = {k: v.to(q.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    arguments = {"scale": SCALE, **arguments}
    latent = arguments.get("latent_dim", 512)
    assert isinstance(latent, int)
    out = q.new_empty(*q.shape[:-1], latent) if out is None else out
    out.fill_(NAN)
    lse = torch.full(q.shape[:-1], NAN, device=q.device)
    status = torch.zeros(len(cache.prefix_lens), dtype=torch.int32, device=q.device)
    returned = sd.mla_tree_attention(q, *cache.tensors(), out=out, lse=lse, status=status, **arguments)
    assert returned is out
    for name in ("fixed_split", "plan"):
        arguments.pop(name, None)
    want, want_lse, want_status = reference.mla_tree_attention(
        q.cpu(), *map(on_cpu, cache.tensors()), **{k: on_cpu(v) for k, v in arguments.items()}
    )
    assert torch.equal(status.cpu(), want_status)
    assert (out.cpu()[want_lse == -torch.inf] == 0).all()
    # On tensor cores, rows of 656 bytes are rounded to bfloat16 before they are multiplied.
    is_rounded = cache.kv_pool.dtype == U8 and q.is_cuda
    atol = TOLERANCES[q.dtype] * (2 if is_rounded else 1) * want.abs().max().item() if want.numel() else 0
    # A score of up to 8 standard deviations has an absolute error, which its weight takes over.
    scale = arguments["scale"]
    assert isinstance(scale, float)
    atol += SUM_ERROR + 8 * scale * q.shape[-1] ** 0.5 * 2**-21 if q.dtype == torch.float32 else 0
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=0, atol=2e-2 if is_rounded else LSE_TOLERANCE)
    return status.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@sizes
@pytest.mark.parametrize("q_heads", [1, 5, 16, 20])
def test_mla_tree_attention_of_trees_over_prefixes(
    device: torch.device, dtype: torch.dtype, latent_dim: int, rope_dim: int, q_heads: int
) -> None:
    cache = make_latent_cache(
        [65, 0, 130], [7] * 3, page_size=16, latent_dim=latent_dim, rope_dim=rope_dim, rows=dtype, device=device
    )
    q = torch.randn(3, 7, q_heads, latent_dim + rope_dim, device=device).to(dtype)
    check(q, cache, mask=random_trees(3, 7), latent_dim=latent_dim)


@all_paths
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 300])
def test_mla_tree_attention_of_prefix_and_page_sizes(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype, page_size: int, prefix: int
) -> None:
    cache = make_latent_cache([prefix], [5], page_size=page_size, rows=rows, device=device)
    q = torch.randn(1, 5, 4, 576, device=device).to(dtype)
    check(q, cache, mask=random_trees(1, 5))
    check(q, cache)


@all_paths
@pytest.mark.parametrize("tail", [31, 65, 130])
def test_mla_tree_attention_of_random_masks(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype, tail: int
) -> None:
    # Also rows that see no tail node, and, with an empty prefix, rows that see nothing at all.
    cache = make_latent_cache([70, 0], [tail] * 2, page_size=3, rows=rows, device=device)
    visible = torch.rand(2, tail, tail) < 0.3
    visible[:, 10:20] = False
    check(torch.randn(2, tail, 2, 576, device=device).to(dtype), cache, mask=pack_bits(visible))


@pytest.mark.sanitize
@all_paths
@pytest.mark.parametrize("window", [None, 9, 90])
def test_mla_tree_attention_of_packed_rows(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype, window: int | None
) -> None:
    lengths = [5, 0, 1, 40, 17]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cache = make_latent_cache([30, 64, 0, 100, 129], lengths, page_size=16, rows=rows, device=device)
    q = torch.randn(66, 4, 576, device=device).to(dtype)  # 3 rows after the last request
    check(q, cache, cu_seqlens_q=ends, window=window)
    words = torch.zeros(66, 1, dtype=torch.int64)
    for begin, length in zip(ends.tolist(), lengths, strict=False):
        if length:
            words[begin : begin + length] = random_tree(length)
    check(q, cache, cu_seqlens_q=ends, mask=words, window=window)
    check(q, cache, cu_seqlens_q=torch.zeros(1, dtype=torch.int32))  # no request: zeros


@pytest.mark.sanitize
@all_paths
def test_mla_tree_attention_of_tails_and_lengths(device: torch.device, dtype: torch.dtype, rows: torch.dtype) -> None:
    # Drafting: k frontier rows over every node drafted so far.
    k, steps = 6, 5
    cache = make_latent_cache([90, 13, 0], [k * steps] * 3, page_size=16, rows=rows, device=device)
    q = torch.randn(3, k, 4, 576, device=device).to(dtype)
    check(q, cache, tail_len=k * steps, mask=random_trees(3, k * steps)[:, -k:].contiguous())
    check(q, cache, tail_len=k * steps)
    lengths = torch.tensor([3, 0, 9], dtype=torch.int32)
    status = check(q, cache, q_lens=lengths, slots=torch.tensor([2, 0, 1], dtype=torch.int32), window=20)
    assert status.tolist() == [0, 8, 0]
    q[0, 3:] = NAN
    check(q[:1], cache, q_lens=lengths[:1], mask=random_trees(1, 6))


@pytest.mark.sanitize
@all_paths
def test_mla_tree_attention_of_long_prefixes_is_split(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype
) -> None:
    cache = make_latent_cache([2900, 700, 5], [4] * 3, page_size=64, rows=rows, device=device)
    q = torch.randn(3, 4, 16, 576, device=device).to(dtype)
    mask = random_trees(3, 4)
    check(q, cache, mask=mask)
    check(q, cache, mask=mask, fixed_split=512)
    assert torch.equal(*(sd.mla_tree_attention(q, *cache.tensors(), scale=SCALE) for _ in "12"))


@all_paths
def test_mla_tree_attention_of_fp8_scales_and_strided_tensors(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype
) -> None:
    cache = make_latent_cache([70, 3], [6, 6], page_size=4, rows=rows, device=device)
    q = torch.randn(2, 4, 6, 576, device=device).to(dtype).transpose(1, 2)
    out = torch.empty(2, 4, 6, 518, device=device, dtype=dtype)[..., 3:515].transpose(1, 2)
    check(q, cache, out=out)
    if rows == FP8:
        check(q, cache, kv_scale=0.37)
    if rows == U8:
        wide = torch.full((*cache.kv_pool.shape[:-1], 672), 0x7F, dtype=U8, device=device)
        wide[..., :656] = cache.kv_pool
        check(q, dataclasses.replace(cache, kv_pool=wide[..., :656]))
    else:
        wide = torch.full((*cache.kv_pool.shape[:-1], 579), NAN, device=device).to(cache.kv_pool.dtype)
        wide[..., 1:577] = cache.kv_pool
        check(q, dataclasses.replace(cache, kv_pool=wide[..., 1:577]))


@all_paths
def test_mla_tree_attention_ignores_nan_in_unseen_rows(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype
) -> None:
    cache = make_latent_cache([61], [6], page_size=64, rows=rows, device=device)
    page = int(cache.page_table[0, 0])
    poison = torch.full((576,), NAN) if rows != U8 else torch.full((656,), 0xFF, dtype=U8)
    cache.kv_pool[page, 63] = poison.to(device, cache.kv_pool.dtype)
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    visible[..., 2] = False
    q = torch.randn(1, 6, 4, 576, device=device).to(dtype)
    check(q, cache, mask=pack_bits(visible))
    check(q[:, :2], cache, window=2)


def test_mla_tree_attention_reports_bad_pages_and_lengths(device: torch.device) -> None:
    cache = make_latent_cache([70, 70, 3, 48], [4] * 4, page_size=16, device=device)
    cache.page_table[0, 2] = -1
    cache.page_table[1, 4] = len(cache.kv_pool)
    q = torch.randn(4, 4, 4, 576, device=device)
    assert check(q, cache, mask=random_trees(4, 4)).tolist() == [4, 4, 0, 0]
    cache.prefix_lens[2:] = torch.tensor([-7, 2**31 - 1])
    assert check(q[2:], cache, slots=torch.tensor([2, 3], dtype=torch.int32), max_kv_len=40).tolist()[2:] == [8, 8]
    status = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device=device)
    out = sd.mla_tree_attention(q[:1], *cache.tensors(), scale=SCALE, status=status)
    assert not out.any() and status[0] == 1  # a stalled slot is empty


@pytest.mark.sanitize
@all_paths
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_mla_tree_attention_of_index_lists_is_that_of_a_dense_mask(
    device: torch.device, dtype: torch.dtype, rows: torch.dtype, packed: bool
) -> None:
    prefix, tail = [150, 0, 77], [5] * 3
    cache = make_latent_cache(prefix, tail, page_size=16, rows=rows, device=device)
    lists = random_lists([p + t for p, t in zip(prefix, tail, strict=True)], 5, 90)
    q = torch.randn(3, 5, 20, 576, device=device).to(dtype)
    ends = torch.tensor([0, 5, 10, 15], dtype=torch.int32, device=device)
    if packed:
        check(q.flatten(0, 1), cache, indices=lists.flatten(0, 1), cu_seqlens_q=ends)
    else:
        check(q, cache, indices=lists)
    # The same rows as the tail of an empty prefix, seen by a dense mask.
    mask = pack_bits(mask_of_lists(lists, 155)).to(device)
    none = torch.zeros_like(cache.prefix_lens)
    status = torch.zeros(3, dtype=torch.int32, device=device)
    dense = sd.mla_tree_attention(
        q, cache.kv_pool, cache.page_table, none, scale=SCALE, mask=mask, tail_len=155, status=status
    )
    lists = lists.to(device)
    if packed:
        listed = sd.mla_tree_attention(
            q.flatten(0, 1), *cache.tensors(), scale=SCALE, indices=lists.flatten(0, 1), cu_seqlens_q=ends
        ).view_as(dense)
    else:
        listed = sd.mla_tree_attention(q, *cache.tensors(), scale=SCALE, indices=lists)
    atol = TOLERANCES[dtype] * dense.abs().max().item()
    torch.testing.assert_close(listed, dense, rtol=0, atol=max(atol, 1e-5))


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.sanitize
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("variant", [name for name in _C.mla_variants() if name.startswith("sm80")])
def test_mla_tree_attention_of_each_mma_kernel(variant: str, splits: int) -> None:
    """Hopper has a kernel of its own for rows of 512 + 64 elements, so those of other GPUs run there only if forced."""
    kernel = variant.removesuffix(".fp8").removesuffix(".656")
    pools = U8 if variant.endswith(".656") else FP8 if variant.endswith(".fp8") else torch.bfloat16
    device, plan = torch.device("cuda"), f"{kernel}.splits{splits}"
    cache = make_latent_cache([1700, 0, 77], [6] * 3, page_size=16, rows=pools, device=device)
    q = torch.randn(3, 6, 5, 576, device=device).bfloat16()
    check(q, cache, mask=random_trees(3, 6), plan=plan)
    check(q, cache, window=50, plan=plan)
    check(q, cache, indices=random_lists([1706, 6, 83], 6, 400), plan=plan)
    ends = torch.tensor([0, 3, 3, 15], dtype=torch.int32)
    check(q.flatten(0, 1), cache, cu_seqlens_q=ends, tail_len=6, plan=plan)
    if splits == 1:
        check(q, cache, mask=random_trees(3, 6), fixed_split=512, plan=kernel)


def test_mla_tree_attention_skips_and_reports_bad_indices(device: torch.device) -> None:
    cache = make_latent_cache([20, 20, 20], [3] * 3, page_size=16, device=device)
    q = torch.randn(3, 3, 4, 576, device=device)
    lists = random_lists([23] * 3, 3, 8)
    lists[0, 1, 2], lists[1, 0, 0], lists[2, 2, 1] = 23, -2, 22
    assert check(q, cache, indices=lists).tolist() == [8, 8, 0]
    lists[:] = -1
    assert check(q, cache, indices=lists).tolist() == [0, 0, 0]  # rows without entries give zeros
    assert check(q, cache, indices=lists[..., :0].contiguous()).tolist() == [0, 0, 0]
    lists[..., :2] = 4  # a row that is listed twice counts twice
    lists[..., 2] = 5
    check(q, cache, indices=lists)


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [FP8, U8], ids=["fp8", "656"])
def test_mla_tree_attention_of_8_bit_rows_equals_that_of_the_16_bit_rows_they_stand_for(
    device: torch.device, rows: torch.dtype
) -> None:
    """With factors that are powers of two, bfloat16 holds what 8-bit rows stand for."""
    cache = make_latent_cache([1900, 0, 65], [6] * 3, page_size=16, rows=rows, device=device)
    if rows == U8:
        factors = 2.0 ** torch.randint(-3, 3, (*cache.kv_pool.shape[:-1], 4), device=device)
        cache.kv_pool[..., 512:528] = factors.view(U8)
    wide = dataclasses.replace(cache, kv_pool=reference.latent_rows(cache.kv_pool).bfloat16())
    q = torch.randn(3, 6, 20, 576, device=device).bfloat16()
    for options in ({"mask": random_trees(3, 6).to(device)}, {"fixed_split": 512}, {"window": 100}):
        got, want = (sd.mla_tree_attention(q, *pool.tensors(), scale=SCALE, **options) for pool in (cache, wide))
        assert torch.equal(got, want)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, FP8),
        (torch.float16, FP8),
        (torch.bfloat16, U8),
    ],
    ids=["bfloat16", "float16", "fp8", "float16-fp8", "656"],
)
@pytest.mark.parametrize(
    ("prefixes", "nodes", "heads"),
    [
        ([5000], 1, 16),
        ([3000, 0, 77], 16, 20),  # 5 row tiles
        ([700, 1, 64], 32, 20),  # 10
        (list(range(1100, 2660, 40)), 4, 16),  # 39 requests
    ],
    ids=["1 request", "5 row tiles", "10 row tiles", "39 requests"],
)
def test_mla_tree_attention_of_rounds_has_the_bits_of_the_general_form(
    dtype: torch.dtype, rows: torch.dtype, prefixes: list[int], nodes: int, heads: int
) -> None:
    """On Hopper, calls of rounds run a slim form of the kernel. A window, here one of all rows, takes the general one."""
    device, batch = torch.device("cuda"), len(prefixes)
    cache = make_latent_cache(prefixes, [nodes] * batch, page_size=16, rows=rows, device=device)
    q, mask = torch.randn(batch, nodes, heads, 576, device=device).to(dtype), random_trees(batch, nodes)
    slots, lengths = torch.randperm(batch).int(), torch.randint(0, nodes + 1, (batch,)).int()
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    flat = torch.cat([words[:n] for words, n in zip(mask, lengths.tolist(), strict=True)])
    padding = batch * nodes - len(flat)
    packed = {
        "mask": torch.cat([flat, flat.new_full((padding, 1), -1)]),
        "cu_seqlens_q": ends,
        "slots": slots,
    }
    for queries, options in (
        (q, {"mask": mask}),
        (q, {"mask": mask, "slots": slots, "q_lens": lengths}),
        (q, {"mask": mask, "tail_len": nodes, "slots": slots}),
        (q, {"slots": slots, "q_lens": lengths}),
        (q, {"tail_len": max(nodes - 1, 0)}),
        (q.flatten(0, 1), packed),
    ):
        on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        results = []
        for window in (None, 1 << 40):
            out, lse = (
                queries.new_full((*queries.shape[:-1], 512), NAN),
                torch.full(queries.shape[:-1], NAN, device=device),
            )
            status = torch.zeros(batch, dtype=torch.int32, device=device)
            sd.mla_tree_attention(
                queries, *cache.tensors(), out=out, lse=lse, status=status, scale=SCALE, window=window, **on_device
            )
            assert not out.isnan().any()
            results.append((out, lse, status))
        for slim, general in zip(*results, strict=True):
            assert torch.equal(slim, general)
    check(q.flatten(0, 1), cache, **packed)


def test_mla_tree_attention_rows_do_not_depend_on_batch(device: torch.device) -> None:
    lengths = [9, 1, 30, 9, 17]
    bf16 = torch.bfloat16
    for dtype, rows in ((torch.float32, torch.float32), (bf16, bf16), (bf16, FP8), (bf16, U8)):
        cache = make_latent_cache([0, 7, 64, 900, 429], lengths, page_size=16, rows=rows, device=device)
        q = [torch.randn(n, 4, 576, device=device).to(dtype) for n in lengths]

        def run(
            order: list[int], q: list[torch.Tensor] = q, cache: LatentCache = cache, dtype: torch.dtype = dtype
        ) -> list[torch.Tensor]:
            slots = torch.tensor(order, dtype=torch.int32, device=device)
            ends = torch.tensor([0, *(lengths[b] for b in order)], device=device).cumsum(0).int()
            out = sd.mla_tree_attention(
                torch.cat([q[b] for b in order]),
                *cache.tensors(),
                scale=SCALE,
                slots=slots,
                cu_seqlens_q=ends,
                fixed_split=None if dtype == torch.float32 else 128,
            )
            return list(out.split([lengths[b] for b in order]))

        together = run([0, 1, 2, 3, 4])
        for order in ([4, 2], [3], [1, 0, 3]):
            for b, out in zip(order, run(order), strict=True):
                assert torch.equal(out, together[b])


Q, POOL = torch.zeros(2, 3, 4, 576), torch.zeros(5, 16, 576)
TABLE, LENS = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
MASK, LISTS = torch.zeros(2, 3, 1, dtype=torch.int64), torch.zeros(2, 3, 7, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[..., :520].contiguous()}, "q has width 520, expected a multiple of 16 from latent_dim=512 to 576"),
        ({"q": Q[..., :496].contiguous()}, "q has width 496, expected a multiple of 16 from latent_dim=512 to 576"),
        ({"latent_dim": 520}, "latent_dim is 520, expected a multiple of 16 from 16 to 512"),
        ({"kv_pool": POOL[..., :512]}, "kv_pool has shape [5, 16, 512], expected [num_pages, page_size, width=576]"),
        ({"kv_pool": POOL.half()}, "kv_pool is float16, expected float32 or float8_e4m3fn"),
        ({"kv_pool": torch.zeros(5, 16, 656, dtype=U8), "latent_dim": 256}, "kv_pool has rows of 656 bytes for latent_dim=256 and width=576, expected 512 and 576"),
        ({"kv_pool": torch.zeros(5, 16, 657, dtype=U8)[..., 1:]}, "kv_pool has rows of 656 bytes that are not aligned, expected rows aligned to 16 bytes"),
        ({"kv_scale": 2.0}, "kv_scale is 2.000000, expected 1 for pools of float32"),
        ({"scale": 0.0}, "scale is 0.000000, expected a finite float32 above 0"),
        ({"mask": MASK, "indices": LISTS}, "mask is given together with indices, expected one of the two"),
        ({"window": 3, "indices": LISTS}, "window is given together with indices, expected one of the two"),
        ({"window": 0}, "window is 0, expected 1 or more"),
        ({"indices": LISTS[:1]}, "indices has shape [1, 3, 7], expected [batch=2, q_rows=3, num_indices]"),
        ({"fixed_split": 100}, "fixed_split is 100, expected a positive multiple of 128"),
        ({"plan": "plain"}, "plan is plain, expected None on cpu"),
        ({"q": torch.zeros(2, 3, 4, 576, requires_grad=True)}, "q requires grad, expected none (detach() it, or call under torch.no_grad())"),
        ({"indices": LISTS + 9}, "indices of query row 0 of request 0 name no row of its prefix and tail, expected -1 or 0 to 2, or status"),
        ({"prefix_lens": LENS + 99}, "request 0 has lengths that do not fit 64 KV rows (by page_table and max_kv_len), 3 rows of q and mask, expected lengths that fit, or status"),
    ],
)  # fmt: skip
def test_messages(changes: dict[str, object], message: str) -> None:
    arguments = {"q": Q, "kv_pool": POOL, "page_table": TABLE, "prefix_lens": LENS, "scale": SCALE}
    with pytest.raises(ValueError) as error:
        sd.mla_tree_attention(**arguments | changes)
    assert str(error.value) == "mla_tree_attention: " + message


@pytest.mark.exhaustive
def test_mla_tree_attention_of_random_cases(device: torch.device) -> None:
    """2000 random shapes, formats, lengths, masks and lists."""
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(2000):
        random_case(draw, device)


def test_mla_tree_attention_of_a_few_random_cases(device: torch.device) -> None:
    draw = random.Random(1)
    torch.manual_seed(1)
    for _ in range(30):
        random_case(draw, device)


def random_case(draw: random.Random, device: torch.device) -> None:
    """Check one call whose shape, row format, lengths, visibility and options are drawn."""
    dtype, rows = draw.choice(
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
         (torch.bfloat16, FP8), (torch.float16, FP8), (torch.bfloat16, U8), (torch.float32, FP8)]
    )  # fmt: skip
    latent, rope = (512, 64) if rows == U8 else draw.choice([(512, 64), (256, 32), (128, 0), (16, 16), (112, 64)])
    batch, heads, n = draw.randint(1, 5), draw.choice([1, 2, 5, 16, 20]), draw.randint(1, draw.choice([4, 24, 70]))
    packed = draw.random() < 0.5
    lengths = [draw.randint(0, n) for _ in range(batch)] if packed else [n] * batch
    tail = draw.choice([None, draw.randint(0, 80)])
    tails = [length if tail is None else tail for length in lengths]
    prefixes = [draw.choice([0, draw.randint(0, 90), draw.randint(0, 600)]) for _ in range(batch)]
    cache = make_latent_cache(
        prefixes, tails, page_size=draw.choice([1, 2, 16, 64]), latent_dim=latent, rope_dim=rope, rows=rows,
        device=device,
    )  # fmt: skip
    options: dict[str, object] = {
        "latent_dim": latent,
        "tail_len": tail,
        "scale": draw.uniform(0.2, 2) / (latent + rope) ** 0.5,
    }
    if rows == FP8:
        options["kv_scale"] = draw.choice([1.0, 0.3])
    if draw.random() < 0.3:
        options["slots"] = torch.randperm(batch).int()
        prefixes = [prefixes[slot] for slot in options["slots"].tolist()]  # type: ignore[attr-defined]
        if packed and tail is None:
            del options["slots"]  # a slot has as many rows as its cache was made for
            prefixes = cache.prefix_lens.tolist()
    if draw.random() < 0.3:
        options["fixed_split"] = draw.choice([128, 512])
    total = sum(lengths) + draw.randint(0, 2)
    shape = (total,) if packed else (batch, n)
    q = torch.randn(*shape, heads, latent + rope, device=device).to(dtype)
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    widest = max(tails, default=0)
    match draw.randrange(3):
        case 0:
            visible = torch.rand(*shape, max(widest, 1)) < draw.choice([0.1, 0.5, 1.0])
            options["mask"] = pack_bits(visible)
            options["window"] = draw.choice([None, draw.randint(1, 200)])
        case 1:
            options["window"] = draw.choice([None, draw.randint(1, 200)])
        case _:
            entries = draw.randint(0, 90)
            counts = [prefix + t for prefix, t in zip(prefixes, tails, strict=True)]
            if packed:
                lists = torch.full((total, entries), -1, dtype=torch.int32)
                begin = 0
                for count, length in zip(counts, lengths, strict=True):
                    lists[begin : begin + length] = random_lists([count], length, entries)[0]
                    begin += length
            else:
                lists = random_lists(counts, n, entries)
            options["indices"] = lists
    check(q, cache, **options)
