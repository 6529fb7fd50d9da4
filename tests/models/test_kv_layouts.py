"""KV layouts other than keys and values: pools, writes, attention, moves and transfers ask the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.models.kv_pools import KeyValueLayout, KvPools, LatentLayout
from specdec_kernels.models.layers.paged_batch import PagedBatch

CPU = torch.device("cpu")
LATENT = LatentLayout(latent_dim=32, rope_dim=16)
ROW = LATENT.latent_dim + LATENT.rope_dim
PAGE_SIZE = 4
PATH = [0, 2, 3]  # of a tree with nodes 0, 0-1, 0-2, 2-3
MASK = [0b0001, 0b0011, 0b0101, 0b1101]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pools_with_latent_layers() -> KvPools:
    """Layers 0 and 2 with a latent row, layer 1 with keys and values."""
    return KvPools.allocate([LATENT, KeyValueLayout(2, 64, 64), LATENT], 8, PAGE_SIZE, torch.float32, CPU)


def plain_attention(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attention of queries [heads, dim] over all rows [n, dim], with values from the latent part."""
    return (q @ rows.t() * scale).softmax(-1) @ rows[:, : LATENT.latent_dim]


def test_pools_of_latent_layers_have_one_row_for_each_token() -> None:
    pools = pools_with_latent_layers()
    assert [(group.layers, [list(pool.shape) for pool in group.pools]) for group in pools.groups] == [
        ((0, 2), [[2, 8, PAGE_SIZE, 1, ROW]]),
        ((1,), [[1, 8, PAGE_SIZE, 2, 64], [1, 8, PAGE_SIZE, 2, 64]]),
    ]
    assert [kv.scales for kv in pools.layers] == [(1.0,), (1.0, 1.0), (1.0,)]
    assert pools.num_bytes == 8 * PAGE_SIZE * (2 * ROW + 2 * 2 * 64) * 4 == pools.bytes_with(8)
    assert pools.with_pages(3).groups[0].named_pools["latent"].shape[1] == 3


def test_latent_layer_writes_attends_and_moves_accepted_paths() -> None:
    torch.manual_seed(0)
    pools, table, slot = pools_with_latent_layers(), ints(5, 2, 7, 0)[None], ints(0)
    prompt, tree = torch.randn(1, 6, 1, ROW), torch.randn(1, 4, 1, ROW)
    batch = PagedBatch(slot, table, prefix_lens=ints(0), tail_len=6)
    drafted = batch._replace(prefix_lens=ints(6), tail_len=4, mask=torch.tensor(MASK)[None, :, None])
    for kv in pools.layers[::2]:
        batch.write(kv, prompt)
        drafted.write(kv, tree)
    q, options = torch.randn(1, 4, 3, ROW), {"scale": 0.2, "window": None, "soft_cap": None, "sinks": None}
    kv = pools.layers[2]
    out = drafted.attend(q, kv, **options)
    for node, bits in enumerate(MASK):
        seen = torch.cat([prompt[0, :, 0], tree[0, [i for i in range(4) if bits >> i & 1], 0]])
        torch.testing.assert_close(out[0, node], plain_attention(q[0, node], seen, 0.2))

    pools.move(table, ints(*PATH)[None], ints(3), ints(6), slots=slot, status=ints(0))
    want = torch.cat([prompt[0, :, 0], tree[0, PATH, 0]])
    assert torch.equal(kv.pools[0][table[0].long()].flatten(0, 1)[:9, 0], want)
    # A pass over the next token sees the accepted path as if it had been prefilled.
    after = batch._replace(prefix_lens=ints(9), tail_len=1)
    after.write(kv, last := torch.randn(1, 1, 1, ROW))
    got = after.attend(q[:, :1], kv, **options)[0, 0]
    torch.testing.assert_close(got, plain_attention(q[0, 0], torch.cat([want, last[0, :, 0]]), 0.2))


def test_rows_of_8_bits_are_those_of_their_values() -> None:
    """Attention over FP8 rows is attention over what they hold, times their scale."""
    torch.manual_seed(0)
    [kv] = KvPools.allocate([LATENT], 8, PAGE_SIZE, torch.float8_e4m3fn, CPU, [(0.25,)]).layers
    table, rows = ints(5, 2, 7, 0)[None], torch.randn(1, 9, 1, ROW)
    batch = PagedBatch(ints(0), table, prefix_lens=ints(0), tail_len=9)
    batch.write(kv, rows)
    held = (rows[0, :, 0] / 0.25).to(torch.float8_e4m3fn).float() * 0.25
    q = torch.randn(1, 1, 3, ROW)
    out = batch.attend(q, kv, scale=0.2, window=None, soft_cap=None, sinks=None)
    torch.testing.assert_close(out[0, 0], plain_attention(q[0, 0], held, 0.2))


def test_latent_rows_are_transferred_by_the_names_of_their_pools() -> None:
    """Rows leave a group by pool name and page, and come in by the layout's write, whatever the layout is."""
    torch.manual_seed(0)
    source, target = pools_with_latent_layers(), pools_with_latent_layers()
    table, other = ints(5, 2)[None], ints(1, 6)[None]
    for kv in source.layers:
        rows = [torch.randn(1, 7, heads, dim) for heads, dim in kv.layout.row_shapes.values()]
        PagedBatch(ints(0), table, ints(0), tail_len=7).write(kv, *rows)
    for ours, theirs in zip(source.groups, target.groups, strict=True):
        exported = {name: pool[:, table[0].long()].flatten(1, 2)[:, :7] for name, pool in ours.named_pools.items()}
        for index in range(len(theirs.layers)):
            rows = [part[index][None] for part in exported.values()]
            kv = theirs.layer(index, theirs.layout.unit_scales)
            theirs.layout.write(kv, rows, page_table=other, prefix_lens=ints(0), slots=ints(0), row_offset=0)
        for name, pool in theirs.named_pools.items():
            assert torch.equal(pool[:, other[0].long()].flatten(1, 2)[:, :7], exported[name])
