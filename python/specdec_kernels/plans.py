"""The plan of an attention call by its shape: the C++ planning rules, without tensors or a GPU."""

from __future__ import annotations

from typing import Literal, NamedTuple

from . import _C

HEAD_DIMS = (64, 128, 256)  # supported by `rope_qkv_write_kv` and `tree_attention`


class Gpu(NamedTuple):
    """The properties of a GPU that planning rules use."""

    num_sms: int
    has_wgmma: bool  # Hopper, compute capability 9.0
    shared_bytes_per_block: int  # opt-in maximum
    shared_bytes_per_sm: int


H100 = H200 = Gpu(132, True, 227 * 1024, 228 * 1024)
B200 = Gpu(148, False, 227 * 1024, 228 * 1024)
A100 = Gpu(108, False, 163 * 1024, 164 * 1024)
L40S = Gpu(142, False, 99 * 1024, 100 * 1024)


class AttentionPlan(NamedTuple):
    """The kernel of a `tree_attention` call and how it divides the work; see docs/attention.md."""

    name: str  # as for `tree_attention(plan=...)`
    variant: str  # name of the compiled kernel
    tile_rows: int  # query rows times heads of a GQA group that one block computes at a time
    tile_tokens: int  # KV rows of a KV tile
    row_tiles: int  # row tiles that read the same KV in step, each in a block of its own
    blocks_per_sm: int  # of a persistent grid
    cluster_blocks: int  # blocks of a cluster, which split one row tile's KV; 0: no clusters
    sharing_clusters: int  # clusters that split the KV of a row tile if it is long; 1: no such split
    whole_items: bool  # one worker per work item (request, KV head, row tiles): KV is not split
    warpgroups: int  # that run MMAs in a block
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
    """Return the plan of a `tree_attention` call; a pure function that needs neither tensors nor a GPU.

    Example: batch 4, 32 query rows and 8K KV of an 8B model. `attention_plan(batch=4, q_rows=32, q_heads=32,
    kv_heads=8, head_dim=128, max_kv_len=8192).name` is "sm90.cluster.128.blocks3.sharing1". The rules
    are in csrc/attention/plan_sm90.cpp and plan_sm80.cpp.

    Args:
        batch: number of requests.
        q_rows: query rows per request; with `packed`, of all requests together.
        q_heads: query heads, a multiple of kv_heads.
        kv_heads: KV heads.
        head_dim: 64, 128 or 256.
        max_kv_len: bound on the KV rows of a request, prefix and tail.
        page_size: KV rows of a page.
        fp8: whether the pools hold float8_e4m3fn instead of 16-bit floats.
        packed: whether query rows are packed, with cu_seqlens_q.
        tensor_cores: whether queries are 16-bit floats, and rows of q, out and the pools are aligned to 16 bytes.
        fixed_split: as for `tree_attention`.
        gpu: the device.
        plan: name of a plan to force.

    Returns:
        The plan.

    Raises:
        ValueError: a size is out of range, or `plan` does not exist or cannot run this shape on this GPU.
    """
    fields = _C.attention_plan(
        batch=batch,
        q_rows=q_rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        packed=packed,
        fp8=fp8,
        tensor_cores=tensor_cores,
        fixed_split=fixed_split or 0,
        max_kv_len=max_kv_len,
        **gpu._asdict(),
        plan=plan,
    )
    return AttentionPlan(**fields)


class MlaPlan(NamedTuple):
    """The kernel of an `mla_tree_attention` call and how it divides the work."""

    name: str  # as for `mla_tree_attention(plan=...)`
    variant: str  # name of the compiled kernel
    tile_rows: int  # query rows times heads that one block computes at a time
    tile_tokens: int  # KV rows of a KV tile
    splits: int  # blocks that share the KV of a row tile if it is long
    row_tiles: int  # row tiles that read the same KV in step, each in a block of its own
    workers: int  # of a persistent grid, each of row_tiles blocks; 0: no such grid
    whole_items: bool  # one worker per work item (request, row tiles): KV is not split
    workspace_bytes: int


def mla_plan(
    *,
    batch: int,
    q_rows: int,
    q_heads: int,
    max_kv_len: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
    rows: Literal["16-bit", "fp8", "656"] = "16-bit",
    packed: bool = False,
    listed: bool = False,
    tensor_cores: bool = True,
    fixed_split: int | None = None,
    gpu: Gpu = H200,
    plan: str | None = None,
) -> MlaPlan:
    """Return the plan of an `mla_tree_attention` call; a pure function that needs neither tensors nor a GPU.

    Args:
        batch: number of requests.
        q_rows: query rows per request; with `packed`, of all requests together.
        q_heads: query heads.
        max_kv_len: bound on the KV rows of a request, prefix and tail; with `listed`, the length of the lists.
        latent_dim: elements of the value.
        rope_dim: elements of the rotated key.
        rows: what the pool holds: 16-bit floats, float8_e4m3fn, or rows of 656 bytes.
        packed: whether query rows are packed, with cu_seqlens_q.
        listed: whether query rows have index lists.
        tensor_cores: whether queries are 16-bit floats, and rows of q, out and the pool are aligned to 16 bytes.
        fixed_split: as for `mla_tree_attention`.
        gpu: the device.
        plan: name of a plan to force.

    Returns:
        The plan.

    Raises:
        ValueError: a size is out of range, or `plan` does not exist or cannot run this shape on this GPU.
    """
    fields = _C.mla_plan(
        batch=batch,
        q_rows=q_rows,
        q_heads=q_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        packed=packed,
        listed=listed,
        rows=rows,
        tensor_cores=tensor_cores,
        fixed_split=fixed_split or 0,
        max_kv_len=max_kv_len,
        **gpu._asdict(),
        plan=plan,
    )
    return MlaPlan(**fields)
