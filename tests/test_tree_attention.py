"""tree_attention against its float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import specdec_kernels as sd
from conftest import HAS_CUDA, TOLERANCES
from specdec_kernels.reference import attention as reference

# The log of a sum of exponentials carries the absolute error of a score: a float32 dot product of up to 256 terms, some
# units of 2^-24 of scores up to about 10.
LSE_TOLERANCE = 2e-5
NAN = float("nan")
WILD = (-1, 2**31 - 1, -(2**31), 10**6)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclasses.dataclass
class Cache:
    """Pools and a page table of which every row and entry that no request owns is poisoned."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.k_pool, self.v_pool, self.page_table, self.prefix_lens


def make_cache(
    prefix_lens: list[int],
    tails: list[int],
    *,
    page_size: int,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Cache:
    """A cache with prefix_lens[s] + tails[s] rows for slot s, on shuffled pages of the second of three layers."""
    counts = [-(-(prefix + tail) // page_size) for prefix, tail in zip(prefix_lens, tails, strict=True)]
    num_pages, max_pages = sum(counts) + 3, max(counts, default=0) + 2
    free = torch.randperm(num_pages).tolist()
    table = torch.tensor(WILD)[torch.randint(0, len(WILD), (len(prefix_lens), max_pages))].to(torch.int32)
    k, v = (torch.full((3, num_pages, page_size, kv_heads, head_dim), NAN, dtype=dtype) for _ in "kv")
    v[:, ::2] = float("inf")
    for slot, count in enumerate(counts):
        for i in range(count):
            table[slot, i] = page = free.pop()
            rows = min(page_size, prefix_lens[slot] + tails[slot] - i * page_size)
            k[1, page, :rows] = torch.randn(rows, kv_heads, head_dim).to(dtype)
            v[1, page, :rows] = torch.randn(rows, kv_heads, head_dim).to(dtype)
    return Cache(
        k.to(device)[1], v.to(device)[1], table.to(device), torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    )


def pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """bool [..., tail] to int64 words [..., ceil(tail / 64)]."""
    words = torch.zeros(*visible.shape[:-1], -(-visible.shape[-1] // 64), dtype=torch.int64)
    for j in range(visible.shape[-1]):
        words[..., j // 64] |= visible[..., j].long() << (j % 64)
    return words


def random_tree(nodes: int) -> torch.Tensor:
    """Mask words of a tree with random parents: each node sees its ancestors and itself."""
    visible = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        visible[i] |= visible[int(torch.randint(0, i, ()))]
    return pack_bits(visible)


def random_trees(batch: int, nodes: int) -> torch.Tensor:
    return torch.stack([random_tree(nodes) for _ in range(batch)])


def on_cpu(x: object) -> object:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def check(q: torch.Tensor, cache: Cache, *, out: torch.Tensor | None = None, **arguments: object) -> torch.Tensor:
    """Runs the op over poisoned outputs, compares out, lse and status with the reference, and returns status."""
    arguments = {k: v.to(q.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    out = torch.empty_like(q) if out is None else out
    out.fill_(NAN)
    lse = torch.full(q.shape[:-1], NAN, device=q.device)
    status = torch.zeros(len(cache.prefix_lens), dtype=torch.int32, device=q.device)
    returned = sd.tree_attention(q, *cache.tensors(), out=out, lse=lse, status=status, **arguments)
    assert returned is out
    want, want_lse, want_status = reference.tree_attention(
        q.cpu(), *map(on_cpu, cache.tensors()), **{k: on_cpu(v) for k, v in arguments.items()}
    )
    assert torch.equal(status.cpu(), want_status)
    assert (out.cpu()[want_lse == -torch.inf] == 0).all()
    atol = TOLERANCES[q.dtype] * want.abs().max().item() if want.numel() else 0
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=0, atol=LSE_TOLERANCE)
    return status.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 2), (8, 1), (6, 3)])
def test_tree_over_prefix(device: torch.device, dtype: torch.dtype, head_dim: int, q_heads: int, kv_heads: int) -> None:
    cache = make_cache(
        [65, 0, 130], [7] * 3, page_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device
    )
    check(torch.randn(3, 7, q_heads, head_dim, device=device).to(dtype), cache, mask=random_trees(3, 7))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 500])
def test_prefix_and_page_sizes(device: torch.device, page_size: int, prefix: int) -> None:
    cache = make_cache([prefix], [5], page_size=page_size, device=device)
    q = torch.randn(1, 5, 4, 64, device=device)
    check(q, cache, mask=random_trees(1, 5))
    check(q, cache)


@pytest.mark.parametrize("tail", [1, 2, 31, 63, 64, 65, 127, 129, 200])
@pytest.mark.parametrize("prefix", [0, 37, 64])
def test_tails_of_several_mask_words(device: torch.device, tail: int, prefix: int) -> None:
    cache = make_cache([prefix], [tail], page_size=16, device=device)
    check(torch.randn(1, tail, 2, 64, device=device), cache, mask=random_trees(1, tail))


def test_random_bits_of_any_pattern(device: torch.device) -> None:
    # Also rows that see no tail node, and, behind an empty prefix, rows that see nothing at all.
    cache = make_cache([70, 0], [100, 100], page_size=3, device=device)
    visible = torch.rand(2, 100, 100) < 0.3
    visible[:, 10:20] = False
    check(torch.randn(2, 100, 4, 64, device=device), cache, mask=pack_bits(visible))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 40, 150])
def test_causal_chain(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    cache = make_cache([29, 0], [rows] * 2, page_size=16, dtype=dtype, device=device)
    check(torch.randn(2, rows, 4, 64, device=device).to(dtype), cache)


def test_draft_decoding_tail_is_longer_than_q(device: torch.device) -> None:
    # k frontier rows over every node drafted so far.
    k, steps = 10, 7
    cache = make_cache([90, 13, 0], [k * steps] * 3, page_size=16, device=device)
    q = torch.randn(3, k, 4, 64, device=device)
    check(q, cache, tail_len=k * steps, mask=random_trees(3, k * steps)[:, -k:].contiguous())
    check(q, cache, tail_len=k * steps)  # a chain whose first rows are already in the tail


def test_tail_shorter_than_q(device: torch.device) -> None:
    # Under the causal rule the first three rows are before the whole tail.
    check(torch.randn(2, 8, 4, 64, device=device), make_cache([0, 70], [5, 5], page_size=3, device=device), tail_len=5)
    check(torch.randn(1, 8, 4, 64, device=device), make_cache([20], [0], page_size=3, device=device), tail_len=0)


def test_padded_rows_give_zeros(device: torch.device) -> None:
    q_lens = torch.tensor([3, 0, 9], dtype=torch.int32)
    cache = make_cache([65, 65, 2], [3, 0, 9], page_size=16, device=device)  # no KV behind the valid rows
    q = torch.randn(3, 9, 4, 64, device=device)
    q[0, 3:] = NAN
    check(q, cache, q_lens=q_lens)
    check(q, cache, q_lens=q_lens, mask=random_trees(3, 9))
    assert (check(q, cache, q_lens=torch.tensor([3, -2, 10], dtype=torch.int32)) == torch.tensor([0, 8, 8])).all()


def test_packed_rows(device: torch.device) -> None:
    lengths = [5, 0, 1, 40, 17]
    ends = torch.tensor([0, 5, 5, 6, 46, 63], dtype=torch.int32)
    cache = make_cache([30, 64, 0, 100, 129], lengths, page_size=16, device=device)
    q = torch.randn(70, 4, 64, device=device)  # 7 rows behind the last request
    check(q, cache, cu_seqlens_q=ends)
    words = torch.zeros(70, 1, dtype=torch.int64)
    for begin, length in zip(ends.tolist(), lengths, strict=False):
        if length:
            words[begin : begin + length] = random_tree(length)
    check(q, cache, cu_seqlens_q=ends, mask=words)
    check(q, cache, cu_seqlens_q=torch.zeros(1, dtype=torch.int32))  # no request: zeros


def test_packed_rows_with_a_given_tail(device: torch.device) -> None:
    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    cache = make_cache([30, 10], [12, 12], page_size=16, device=device)
    check(torch.randn(7, 4, 64, device=device), cache, cu_seqlens_q=ends, tail_len=12)


def test_more_packed_requests_than_a_warp_has_lanes(device: torch.device) -> None:
    lengths = [i % 4 for i in range(67)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cache = make_cache([i % 9 for i in range(67)], lengths, page_size=3, device=device)
    check(torch.randn(sum(lengths) + 1, 4, 64, device=device), cache, cu_seqlens_q=ends)


def test_packed_malformed_lengths_stay_in_bounds(device: torch.device) -> None:
    cache = make_cache([5, 5, 5], [8, 8, 8], page_size=4, device=device)
    q = torch.randn(8, 2, 64, device=device)
    status = torch.zeros(3, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 6, 3, 2**31 - 1], dtype=torch.int32, device=device)
    sd.tree_attention(q, *cache.tensors(), cu_seqlens_q=ends, status=status)
    assert status.tolist() == [0, 8, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_q_out_and_unaligned_pools(device: torch.device, dtype: torch.dtype) -> None:
    cache = make_cache([70, 3], [6, 6], page_size=4, dtype=dtype, device=device)

    def unaligned(pool: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*pool.shape[:-1], 67), NAN, dtype=dtype, device=device)
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


def test_unseen_rows_may_hold_nan(device: torch.device) -> None:
    # Node 2 holds NaN: whoever does not see it stays clean, in this tile and with a weight of 0.
    cache = make_cache([61], [6], page_size=64, device=device)
    page = int(cache.page_table[0, 0])
    cache.k_pool[page, 63] = NAN
    cache.v_pool[page, 63] = NAN
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    visible[..., 2] = False
    check(torch.randn(1, 6, 4, 64, device=device), cache, mask=pack_bits(visible))
    visible[0, 4, 2] = True
    out = sd.tree_attention(
        torch.randn(1, 6, 4, 64, device=device), *cache.tensors(), mask=pack_bits(visible).to(device)
    )
    assert out.isnan().all(-1).all(-1).tolist() == [[False] * 4 + [True] + [False]]


def test_empty_slots_and_slot_order(device: torch.device) -> None:
    cache = make_cache([5, 70, 64], [4] * 3, page_size=16, device=device)
    q = torch.randn(5, 4, 4, 64, device=device)
    for slots in ([2, -1, 0, 3, 1], [-1] * 5, [2**31 - 1, -(2**31), 1, 1, 1]):
        status = check(q, cache, slots=torch.tensor(slots, dtype=torch.int32))
        assert (status == 0).all()


def test_bad_pages_are_invisible_and_reported(device: torch.device) -> None:
    cache = make_cache([70, 70, 3, 70], [4] * 4, page_size=16, device=device)
    cache.page_table[0, 2] = -1
    cache.page_table[1, 4] = len(cache.k_pool)  # tail rows
    cache.page_table[2, 0] = 2**31 - 1  # all it has
    status = check(torch.randn(4, 4, 4, 64, device=device), cache, mask=random_trees(4, 4))
    assert status.tolist() == [4, 4, 4, 0]


def test_bad_lengths_are_clamped_and_reported(device: torch.device) -> None:
    cache = make_cache([48] * 4, [0] * 4, page_size=16, device=device)
    cache.page_table = cache.page_table[:, :3].contiguous()
    cache.prefix_lens = torch.tensor([-7, 43, 46, 2**31 - 1], dtype=torch.int32, device=device)
    q = torch.randn(4, 5, 4, 64, device=device)
    assert check(q, cache).tolist() == [8, 0, 8, 8]
    assert check(q, cache, mask=random_trees(4, 5)).tolist() == [8, 0, 8, 8]


def test_status_bits_are_added(device: torch.device) -> None:
    cache = make_cache([3], [1], page_size=4, device=device)
    cache.page_table[0, 0] = -1
    status = torch.tensor([2], dtype=torch.int32, device=device)
    sd.tree_attention(torch.randn(1, 1, 2, 64, device=device), *cache.tensors(), status=status)
    assert status.tolist() == [6]


def test_stalled_slots_are_empty(device: torch.device) -> None:
    """Their pages are missing, which is no news."""
    cache = make_cache([5, 7], [3, 3], page_size=4, device=device)
    q = torch.randn(2, 3, 2, 64, device=device)
    want = sd.tree_attention(q, *cache.tensors())
    cache.page_table[0] = -1
    status = torch.tensor([1, 0], dtype=torch.int32, device=device)
    out = sd.tree_attention(q, *cache.tensors(), status=status)
    assert not out[0].any() and torch.equal(out[1], want[1])
    assert status.tolist() == [1, 0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_rows_do_not_depend_on_the_batch(device: torch.device, packed: bool) -> None:
    batch, rows = 5, 9
    cache = make_cache([0, 7, 64, 300, 129], [rows] * batch, page_size=16, device=device)
    q = torch.randn(batch, rows, 4, 64, device=device)
    trees = random_trees(batch, rows).to(device)

    def run(order: list[int]) -> torch.Tensor:
        slots = torch.tensor(order, dtype=torch.int32, device=device)
        if not packed:
            return sd.tree_attention(q[order], *cache.tensors(), slots=slots, mask=trees[order])
        ends = torch.arange(0, rows * len(order) + 1, rows, dtype=torch.int32, device=device)
        flat, words = q[order].flatten(0, 1), trees[order].flatten(0, 1)
        return sd.tree_attention(flat, *cache.tensors(), slots=slots, cu_seqlens_q=ends, mask=words).unflatten(
            0, (-1, rows)
        )

    everyone = run([0, 1, 2, 3, 4])
    for order in ([3, 1, 4, 0, 2], [2], [4, 3]):
        assert torch.equal(run(order), everyone[order])


def test_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    # A chain in one call, in two chunks, and row by row.
    cache = make_cache([100], [50], page_size=16, device=device)
    q = torch.randn(1, 50, 4, 64, device=device)
    whole = sd.tree_attention(q, *cache.tensors())
    for size in (1, 17):
        for begin in range(0, 50, size):
            cache.prefix_lens[0] = 100 + begin
            part = sd.tree_attention(q[:, begin : begin + size].contiguous(), *cache.tensors())
            assert torch.equal(part, whole[:, begin : begin + size])


def test_scale(device: torch.device) -> None:
    cache = make_cache([40], [3], page_size=16, device=device)
    check(torch.randn(1, 3, 2, 64, device=device), cache, scale=0.37)
    check(torch.randn(1, 3, 2, 64, device=device), cache, scale=0.0)


def test_large_scores(device: torch.device) -> None:
    # Differences far beyond the range of exp: one key takes all, nothing overflows.
    cache = make_cache([100], [4], page_size=16, device=device)
    q = torch.randn(1, 4, 2, 64, device=device) * 100
    out = sd.tree_attention(q, *cache.tensors())
    want, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()))
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("batch", "rows"), [(0, 4), (3, 0)])
def test_empty_batch_and_no_rows(device: torch.device, batch: int, rows: int) -> None:
    cache = make_cache([3] * 3, [4] * 3, page_size=16, device=device)
    q = torch.randn(batch, rows, 4, 64, device=device)
    assert sd.tree_attention(q, *cache.tensors(), mask=torch.zeros(batch, rows, 1, dtype=torch.int64, device=device)).shape == q.shape  # fmt: skip


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    cache = make_cache([66, 0], [3, 3], page_size=3, head_dim=head_dim, dtype=dtype, device=device)
    check(torch.randn(2, 3, 4, head_dim, device=device).to(dtype), cache, mask=random_trees(2, 3))
    ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    check(torch.randn(4, 4, head_dim, device=device).to(dtype), cache, cu_seqlens_q=ends)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_graph_replay_with_changed_lengths() -> None:
    cache = make_cache([40, 90], [6, 6], page_size=16, device="cuda")
    q, out = torch.randn(2, 6, 4, 64, device="cuda"), torch.empty(2, 6, 4, 64, device="cuda")
    trees = random_trees(2, 6).cuda()
    sd.tree_attention(q, *cache.tensors(), mask=trees, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sd.tree_attention(q, *cache.tensors(), mask=trees, out=out)
    cache.prefix_lens.copy_(torch.tensor([3, 90], dtype=torch.int32))
    trees.copy_(random_trees(2, 6))
    graph.replay()
    want, _, _ = reference.tree_attention(q.cpu(), *map(on_cpu, cache.tensors()), mask=trees.cpu())
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=TOLERANCES[q.dtype] * want.abs().max().item())


def test_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    cache = make_cache([10], [2], page_size=4)
    q = torch.randn(1, 2, 4, 64)
    out = sd.tree_attention(q.numpy(), *(x.numpy() for x in cache.tensors()))
    assert type(out) is np.ndarray
    assert (out == sd.tree_attention(q, *cache.tensors()).numpy()).all()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": zeros(2, 3, 4, 64, dtype=torch.int32)}, "q is int32, expected float32 or float16 or bfloat16"),
        ({"q": zeros(2, 3, 4, 96)}, "q has head_dim 96, expected 64, 128 or 256"),
        ({"q": zeros(2, 3, 64, 4).transpose(2, 3)}, "q has shape [2, 3, 4, 64] and is not contiguous in its last dimension, expected a last stride of 1"),
        ({"q": zeros(6, 4, 64), "out": zeros(6, 4, 64)}, "q has shape [6, 4, 64], expected [batch, q_rows, q_heads, head_dim]"),
        ({"k_pool": zeros(5, 8, 2, 64, dtype=torch.bfloat16)}, "k_pool is bfloat16, expected float32"),
        ({"k_pool": zeros(5, 0, 2, 64)}, "k_pool has page_size 0, expected 1 or more"),
        ({"k_pool": zeros(5, 8, 3, 64)}, "k_pool has 3 heads for the 4 of q, expected a number of heads that divides it"),
        ({"v_pool": zeros(5, 9, 2, 64)}, "v_pool has shape [5, 9, 2, 64], expected [num_pages=5, page_size=8, kv_heads=2, head_dim=64]"),
        ({"page_table": zeros(2, 4, dtype=torch.int64)}, "page_table is int64, expected int32"),
        ({"prefix_lens": zeros(3, dtype=torch.int32)}, "prefix_lens has shape [3], expected [num_slots=2]"),
        ({"slots": zeros(3, dtype=torch.int32)}, "slots has shape [3], expected [batch=2]"),
        ({"page_table": zeros(1, 4, dtype=torch.int32), "prefix_lens": zeros(1, dtype=torch.int32)}, "slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"q_lens": zeros(1, dtype=torch.int32)}, "q_lens has shape [1], expected [batch=2]"),
        ({"q": zeros(6, 4, 64), "cu_seqlens_q": zeros(3, dtype=torch.int32), "q_lens": zeros(2, dtype=torch.int32)}, "q_lens is given beside cu_seqlens_q, expected one of the two"),
        ({"q": zeros(6, 4, 64), "cu_seqlens_q": zeros(0, dtype=torch.int32)}, "cu_seqlens_q is empty, expected batch + 1 row numbers"),
        ({"tail_len": -1}, "tail_len is -1, expected 0 to 2147483647"),
        ({"mask": zeros(2, 3, 1)}, "mask is float32, expected int64"),
        ({"mask": zeros(2, 3, 1, dtype=torch.int64), "tail_len": 65}, "mask has mask_words 1, expected 2 or more for a tail of 65"),
        ({"out": zeros(2, 3, 4, 64, dtype=torch.float16)}, "out is float16, expected float32"),
        ({"lse": zeros(2, 3, 5)}, "lse has shape [2, 3, 5], expected [batch=2, q_rows=3, q_heads=4]"),
        ({"status": zeros(3, dtype=torch.int32)}, "status has shape [3], expected [num_slots=2]"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, object], message: str) -> None:
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
