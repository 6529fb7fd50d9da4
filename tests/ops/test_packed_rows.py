"""Ops on packed rows of cut trees: results equal those on the padded rows bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import specdec_kernels as sd
from support.paged import assert_same_bytes, page_table, poisoned
from support.random_drafts import on, random_draft

INT = torch.int32
BATCH, NODES, VOCAB, WIDTH, NOBODY = 6, 9, 40, 6, 3


class Cut(NamedTuple):
    """Trees of a batch, cut; `pack` packs padded rows [B, N, ..] and puts NaN after the last request."""

    tree: sd.Tree
    packed: sd.PackedNodes
    ends: torch.Tensor
    pack: Callable[[torch.Tensor], torch.Tensor]


def cut_trees(device: torch.device, vocab: int = VOCAB) -> Cut:
    tree, scores = random_draft(BATCH, NODES, vocab)
    scores[2] = -torch.inf  # nothing but its root
    tree, scores = on(device, tree), scores.to(device)
    slots = torch.tensor([0, 1, 2, -1, 4, 5], dtype=INT, device=device)
    shares = sd.allocate_nodes(scores.cummin(1).values, 4 * BATCH, slots=slots)
    packed = sd.pack_trees(tree, scores, shares, int(shares.cu_seqlens[-1]) + NOBODY)
    counts = shares.num_nodes.tolist()

    def pack(padded: torch.Tensor) -> torch.Tensor:
        rows = [padded[b, :n] for b, n in enumerate(counts)]
        nobody = padded.new_zeros(NOBODY, *padded.shape[2:])
        return torch.cat([*rows, nobody + torch.nan if padded.is_floating_point() else nobody])

    return Cut(tree, packed, shares.cu_seqlens, pack)


def parameters(device: torch.device, greedy: bool) -> dict[str, Any]:
    if greedy:
        return {}
    return {
        "temperature": torch.tensor([0, 0.7, 1, 1, 0.9, 2], device=device),
        "top_k": torch.tensor([0, 0, 5, 0, 0, 3], dtype=INT, device=device),
        "seeds": torch.randint(0, 2**40, (BATCH,), device=device),
    }


def pull(logits: torch.Tensor, tree: sd.Tree) -> None:
    """Raise each node's logits for its first child, so that walks go deep."""
    for b in range(BATCH):
        for i in range(NODES):
            child = int(tree.first_child[b, i])
            if child >= 0 and torch.rand(()) < 0.7:
                logits[b, i, int(tree.tokens[b, child])] += 9


@pytest.mark.sanitize
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_tree_of_packed_rows_equals_padded(
    verifier: tuple[torch.device, str | None], dtype: torch.dtype, greedy: bool
) -> None:
    device, plan = verifier
    longest = 0
    for _ in range(10):
        cut = cut_trees(device)
        logits = torch.randn(BATCH, NODES, VOCAB, device=device)
        pull(logits, cut.tree)
        logits = logits.to(dtype)
        allowed = torch.randint(-(2**31), 2**31 - 1, (BATCH, NODES, 2), device=device).to(INT)
        given = parameters(device, greedy)
        for mask in (None, allowed):
            padded = sd.verify_tree(logits, cut.tree, WIDTH, plan=plan, vocab_mask=mask, **given)
            packed = sd.verify_tree(
                cut.pack(logits),
                cut.tree,
                WIDTH,
                cu_seqlens_q=cut.ends,
                plan=plan,
                vocab_mask=None if mask is None else cut.pack(mask),
                **given,
            )
            for got, want in zip(packed, padded, strict=True):
                assert torch.equal(got, want)
            if mask is None:
                assert packed.num_valid[3] == 0
                longest = max(longest, int(packed.num_valid.max()))
    assert longest > 1


@pytest.mark.sanitize
@pytest.mark.parametrize("blocks", [False, True])
def test_verify_tree_of_packed_sampled_drafts_equals_padded(device: torch.device, blocks: bool) -> None:
    rows = torch.arange(-1, NODES - 1, dtype=INT, device=device).repeat(BATCH, 1)
    lens = torch.full((BATCH,), 7, dtype=INT, device=device)
    chain = torch.arange(-1, NODES - 1, dtype=INT, device=device).repeat(BATCH, 1)
    for _ in range(10):
        logits, drafts = (torch.randn(BATCH, n, VOCAB, device=device) for n in (NODES, NODES - 1))
        logits[:, :-1] = drafts + 0.3 * logits[:, :-1]
        seeds, t = torch.randint(0, 2**40, (BATCH,), device=device), torch.ones(BATCH, device=device)
        positions = (lens[:, None] + torch.arange(1, NODES, dtype=INT, device=device)).flatten().contiguous()
        drawn, _ = sd.sample_draft(drafts.flatten(0, 1), 1, seeds=seeds, positions=positions, temperature=t)
        tokens = torch.cat([torch.zeros_like(lens)[:, None], drawn.view(BATCH, -1)], 1)
        counts = torch.randint(1, NODES + 1, (BATCH,), dtype=INT, device=device)
        tree = sd.build_tree_from_parents(tokens, chain, lens, num_nodes=counts)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(INT)
        packed_logits = torch.cat([logits[b, : int(n)] for b, n in enumerate(counts)] + [logits[0, :1] * torch.nan])
        given = {
            "temperature": t,
            "seeds": seeds,
            "draft_logits": drafts,
            "draft_rows": rows,
            "block_verification": blocks,
        }
        want = sd.verify_tree(logits, tree, NODES, **given)
        got = sd.verify_tree(packed_logits, tree, NODES, cu_seqlens_q=ends, **given)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.sanitize
def test_verify_tree_of_invalid_packed_ends_stays_in_bounds(verifier: tuple[torch.device, str | None]) -> None:
    device, plan = verifier
    tree, _ = random_draft(3, 4, 5)
    tree = on(device, tree)
    tree.num_nodes.fill_(4)
    for ends, sizes in (([0, 4, 5, 5], [4, 1, 0]), ([-3, 2, 9, 2**31 - 1], [0, 0, 0]), ([0, 2, 1, 5], [1, 0, 4])):
        status = torch.zeros(3, dtype=INT, device=device)
        logits = torch.randn(5, 5, device=device)
        cu = torch.tensor(ends, dtype=INT, device=device)
        got = sd.verify_tree(logits, tree, 4, cu_seqlens_q=cu, plan=plan, status=status)
        assert (got.num_valid > 0).tolist() == [size > 0 for size in sizes]
        assert status.tolist() == [0 if size == 4 else 2 for size in sizes]
        assert all(int(n) <= max(size, 0) for n, size in zip(got.num_valid, sizes, strict=True))


@pytest.mark.sanitize
def test_mask_stops_and_score_tokens_of_packed_rows_equal_padded(device: torch.device) -> None:
    cut = cut_trees(device)
    logits = torch.randn(BATCH, NODES, VOCAB, device=device)
    packed = cut.pack(logits)
    stops = torch.randint(-1, VOCAB, (BATCH, 3), dtype=INT, device=device)
    stops_from = cut.tree.positions[:, 0] + 2
    sd.mask_stops(logits, cut.tree.positions, stops, stops_from)
    sd.mask_stops(packed, cut.packed.positions, stops, stops_from, cu_seqlens_q=cut.ends)
    assert_same_bytes(packed, cut.pack(logits).cpu())
    assert packed[:-NOBODY].isinf().any() and packed[-NOBODY:].isnan().all()

    accepted = sd.verify_tree(packed, cut.tree, WIDTH, cu_seqlens_q=cut.ends)
    wanted = torch.tensor([0, 2, -1, 1, 5, 5], dtype=INT, device=device)
    for given in ({}, {"num_logprobs": wanted}):
        want = sd.score_tokens(logits, accepted, top_n=2, **given)
        got = sd.score_tokens(packed, accepted, top_n=2, cu_seqlens_q=cut.ends, **given)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    beyond = accepted._replace(path=accepted.path + 2**30)
    assert sd.score_tokens(packed, beyond, cu_seqlens_q=cut.ends).logprobs.isinf().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_qkv_write_kv_of_packed_rows_equals_padded(device: torch.device, dtype: torch.dtype, normed: bool) -> None:
    cut, query_heads, heads, dim = cut_trees(device), 4, 2, 64
    table, num_pages = page_table(BATCH, 8)
    qkv = torch.randn(BATCH, NODES, query_heads + 2 * heads, dim, device=device).to(dtype)
    turns = torch.randn(200, dim, device=device)
    lens = torch.randint(0, 9, (BATCH,), dtype=INT, device=device)
    norms = {f"{name}_norm": torch.randn(dim, device=device).to(dtype) for name in "qk"} if normed else {}
    pools = [[poisoned(num_pages, 4, heads, dim, dtype=dtype).to(device) for _ in range(2)] for _ in range(2)]
    status = torch.zeros(BATCH, dtype=INT, device=device)
    status[4] = sd.Status.STALLED
    given = {"row_offset": 1, "status": status, **norms}
    want = sd.rope_qkv_write_kv(
        qkv, turns, cut.tree.positions, *pools[0], table.to(device), lens, num_valid=cut.tree.num_nodes, **given
    )
    packed = (cut.pack(qkv), turns, cut.packed.positions, *pools[1], table.to(device), lens)
    got = sd.rope_qkv_write_kv(*packed, cu_seqlens_q=cut.ends, **given)
    nobody = cut.pack(want)
    nobody[-NOBODY:] = 0
    assert_same_bytes(got, nobody.cpu())
    for g, w in zip(pools[1], pools[0], strict=True):
        assert_same_bytes(g, w.cpu())
    assert got.isfinite().all() and status.tolist() == [0, 0, 0, 0, int(sd.Status.STALLED), 0]

    fewer = torch.zeros(BATCH, dtype=INT, device=device)
    before = [pool.cpu() for pool in pools[1]]
    assert_same_bytes(sd.rope_qkv_write_kv(*packed, cu_seqlens_q=cut.ends, num_valid=fewer, **given), got.cpu())
    for g, w in zip(pools[1], before, strict=True):
        assert_same_bytes(g, w)
    sd.rope_qkv_write_kv(*packed, cu_seqlens_q=cut.ends, num_valid=fewer + 99, **given)
    assert status[0] == sd.Status.BAD_LENGTH


# Invalid ends of requests; the (request, row) of each of 6 rows; requests that claim rows out of range, which write
# no KV. A request that ends before it begins has no row.
WILD_ENDS = [
    ([0, 4, 9, 9], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)], {1}),
    ([2, 3, 3, 5], [None, None, (0, 0), (2, 0), (2, 1), None], set()),
    ([-(2**31), 2, 4, 6], [None, None, (1, 0), (1, 1), (2, 0), (2, 1)], set()),
    ([0, 5, 3, 6], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (2, 2)], set()),
    ([2**31 - 1] * 4, [None] * 6, set()),
]


@pytest.mark.sanitize
@pytest.mark.parametrize(("ends", "rows", "beyond"), WILD_ENDS)
def test_rope_qkv_write_kv_of_invalid_packed_ends_stays_in_bounds(
    device: torch.device, ends: list[int], rows: list[tuple[int, int] | None], beyond: set[int]
) -> None:
    """Each row equals that of a request of one row."""
    heads, dim = 2, 64
    table, num_pages = page_table(3, 4)
    qkv, turns = torch.randn(6, 3 * heads, dim), torch.randn(20, dim)
    positions = torch.randint(0, 20, (6,), dtype=INT)
    lens = torch.tensor([3, 0, 5], dtype=INT)
    want, want_pools = torch.zeros(6, heads, dim), [poisoned(num_pages, 4, heads, dim) for _ in range(2)]
    for row, of in enumerate(rows):
        if of is None:
            continue
        b, j = of
        slots = torch.tensor([b if b not in beyond else -1], dtype=INT)
        one = (qkv[row : row + 1, None].contiguous(), turns, positions[row : row + 1, None])
        want[row] = sd.rope_qkv_write_kv(*one, *want_pools, table, lens + j, slots=slots)[0, 0]

    pools = [poisoned(num_pages, 4, heads, dim).to(device) for _ in range(2)]
    status = torch.zeros(3, dtype=INT, device=device)
    inputs = [t.to(device) for t in (qkv, turns, positions)]
    got = sd.rope_qkv_write_kv(
        *inputs,
        *pools,
        table.to(device),
        lens.to(device),
        cu_seqlens_q=torch.tensor(ends, dtype=INT, device=device),
        status=status,
        out=poisoned(6, heads, dim).to(device),
    )
    for g, w in zip((got, *pools), (want, *want_pools), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert status.tolist() == [int(sd.Status.BAD_LENGTH) if b in beyond else 0 for b in range(3)]


@pytest.mark.sanitize
def test_draft_extend_inputs_of_invalid_packed_ends_stays_in_bounds(device: torch.device) -> None:
    ones = torch.ones(3, 2, dtype=INT, device=device)
    ends = torch.tensor([-5, 3, 1, 2**31 - 1], dtype=INT, device=device)
    rows = sd.draft_extend_inputs(
        ones, ones, ones[:, 0].contiguous(), ones[:, 0].contiguous(), 4, cu_seqlens_q=ends
    ).node_rows
    assert rows.tolist() == [[0, 0], [0, 0], [2, 2]]


def test_verify_tree_of_more_requests_than_grid_rows(device: torch.device) -> None:
    """The batch exceeds a grid's limit along y; all requests but two have no row."""
    batch, last = 70_000, 69_999
    one, _ = random_draft(1, 4, 5)
    tree = sd.Tree(*(field.repeat(batch, *[1] * (field.ndim - 1)).to(device) for field in one))
    tree.num_nodes.zero_()
    tree.num_nodes[[0, last]] = 1
    ends = torch.ones(batch + 1, dtype=INT, device=device)
    ends[0], ends[-1] = 0, 2
    logits = torch.randn(2, 5, device=device)
    for given in ({}, {"temperature": ends[1:].float(), "seeds": ends[1:].long()}):
        got = sd.verify_tree(logits, tree, 2, cu_seqlens_q=ends, **given)
        assert got.num_valid.nonzero().flatten().tolist() == [0, last]
        assert given or got.tokens[[0, last], 0].tolist() == logits.argmax(1).tolist()


@pytest.mark.sanitize
def test_draft_extend_inputs_of_packed_rows_equals_padded(device: torch.device) -> None:
    cut = cut_trees(device)
    accepted = sd.verify_tree(torch.randn(BATCH, NODES, VOCAB, device=device), cut.tree, WIDTH)
    lens = torch.full((BATCH,), 5, dtype=INT, device=device)
    given = (accepted.tokens, accepted.path, accepted.num_valid, lens, NODES)
    want, got = sd.draft_extend_inputs(*given), sd.draft_extend_inputs(*given, cu_seqlens_q=cut.ends)
    rows = torch.arange(BATCH * NODES, device=device).view(BATCH, NODES)
    packed = cut.pack(rows)
    live = accepted.num_valid > 0
    assert torch.equal(packed[got.node_rows[live]], want.node_rows[live])
    assert bool((got.node_rows < int(cut.ends[-1])).all())
    assert all(torch.equal(g, w) for name, g, w in zip(want._fields, got, want, strict=True) if name != "node_rows")


LOGITS, ENDS = torch.zeros(5, 8), torch.tensor([0, 3, 5], dtype=INT)
NUMBERS, TWO = torch.zeros(5, dtype=INT), torch.zeros(2, dtype=INT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sd.mask_stops(LOGITS, NUMBERS[1:], TWO[:, None], TWO, cu_seqlens_q=ENDS), "mask_stops: positions has shape [4], expected [rows=5]"),
        (lambda: sd.mask_stops(LOGITS, NUMBERS, TWO[:, None], TWO, cu_seqlens_q=ENDS[:0]), "mask_stops: batch + 1 is 0, expected 1 to 2147483647"),
        (lambda: sd.mask_stops(LOGITS[None], NUMBERS, TWO[:, None], TWO, cu_seqlens_q=ENDS), "mask_stops: logits has shape [1, 5, 8], expected [rows, vocab]"),
        (lambda: sd.verify_tree(LOGITS, random_draft(3, 4, 5)[0], 2, cu_seqlens_q=ENDS), "verify_tree: tree.tokens has shape [3, 4], expected [batch=2, num_nodes]"),
        (lambda: sd.verify_tree(LOGITS[:0], random_draft(2, 4, 5)[0], 2, cu_seqlens_q=ENDS), "verify_tree: rows is 0, expected 1 to 2147483647"),
        (lambda: sd.verify_tree_workspace(LOGITS, num_nodes=0), "verify_tree: num_nodes is 0, expected 1 to 512"),
        (lambda: sd.score_tokens(LOGITS, sd.Accepted(TWO[:, None], TWO, TWO[:, None]), cu_seqlens_q=ENDS[1:]), "score_tokens: accepted.path has shape [2, 1], expected [batch=1, accept_width]"),
        (lambda: sd.draft_extend_inputs(TWO[:, None], TWO[:, None], TWO, TWO, 4, cu_seqlens_q=ENDS[1:]), "draft_extend_inputs: cu_seqlens_q has shape [2], expected [batch + 1=3]"),
    ],
)  # fmt: skip
def test_packed_rows_error_messages(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
