"""Which kernel runs when: the rules of the ops that have several, asked without tensors and without a GPU."""

from __future__ import annotations

from typing import NamedTuple

from . import _C

HEAD_DIMS = (64, 128, 256)  # of `rope_qkv_write_kv` and `tree_attention`


class Gpu(NamedTuple):
    """What the rules know of a device."""

    num_sms: int
    has_wgmma: bool  # Hopper, compute capability 9.0
    shared_bytes_per_block: int  # at most, on request
    shared_bytes_per_sm: int


H200 = Gpu(132, True, 227 * 1024, 228 * 1024)
A100 = Gpu(108, False, 163 * 1024, 164 * 1024)
L40S = Gpu(142, False, 99 * 1024, 100 * 1024)


class AttentionPlan(NamedTuple):
    """Which kernel runs a call of `tree_attention`, and how it divides the work; see docs/attention.md."""

    name: str  # what `tree_attention(plan=...)` takes
    variant: str  # the compiled kernel
    tile_rows: int  # query rows times heads that one block computes at a time
    tile_tokens: int  # KV rows of a KV tile
    row_tiles: int  # row tiles that walk the same KV in step, each in a block of its own
    blocks_per_sm: int
    cluster_blocks: int  # blocks of a cluster that share one row tile's KV; 0: no clusters
    sharing_clusters: int  # clusters that share a row tile whose KV is long; 1: none do
    whole_items: bool  # KV is not split: each request, KV head and its row tiles are one worker's
    warpgroups: int  # that multiply in a block
    workers: int  # of a persistent grid, each of row_tiles blocks
    workspace_bytes: int


def attention_plan(
    *,
    batch: int,
    q_rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    page_size: int = 16,
    fp8: bool = False,
    packed: bool = False,
    tensor_cores: bool = True,
    fixed_split: int | None = None,
    gpu: Gpu = H200,
    plan: str | None = None,
) -> AttentionPlan:
    """The plan of a `tree_attention` call of such a shape on such a GPU: a pure function, in every build.

    Args:
        batch: requests.
        q_rows: query rows of each request, or with `packed` of all of them.
        q_heads, kv_heads, head_dim: as the tensors have them; head_dim is 64, 128 or 256.
        max_kv_len: KV rows, prefix and tail, that no request exceeds.
        page_size: KV rows of a page.
        fp8: pools hold float8_e4m3fn instead of 16-bit floats.
        packed: rows are packed, with cu_seqlens_q.
        tensor_cores: queries are 16-bit floats, and rows of q, out and the pools start on 16 bytes.
        fixed_split: as for `tree_attention`.
        gpu: the device.
        plan: the name of a plan to be forced.

    Returns:
        The plan.

    Raises:
        ValueError: a size out of range, or a plan that does not exist or cannot run this shape on this GPU.
    """
    sizes = (batch, q_rows, q_heads, kv_heads, head_dim)
    split = fixed_split or 0
    found = _C.attention_plan(sizes, page_size, packed, fp8, tensor_cores, split, max_kv_len, gpu, plan)
    return AttentionPlan(*found)
