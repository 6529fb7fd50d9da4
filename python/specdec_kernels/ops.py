"""The ops. One thin function each: allocate the outputs that were not passed, call the compiled op positionally.

Conventions: shapes are row-major and contiguous unless said; indices are int32; every op runs on the device of its
tensors (all the same), on the caller's current stream unless `stream=` names another, without synchronising, and is
legal inside a CUDA graph when its outputs are passed. Nothing is converted or copied for the caller: a wrong dtype,
shape, device or stride is a ValueError that names the argument. `requires_grad` is ignored.

Letters: B batch, N tree nodes, S accept row width, k topk, V vocabulary, W mask words (ceil(N / 64)).
`slots[B]` names the slot each row works for (-1: an empty row); None means row b is slot b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from . import _C
from ._alloc import empty, shape_of

if TYPE_CHECKING:
    Tensor: TypeAlias = Any  # anything that speaks DLPack


# --- draft ------------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor,
    k: int,
    *,
    id_map: Tensor | None = None,
    out_ids: Tensor | None = None,
    out_logprobs: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-softmax and the k best of every row, in one pass over the logits.

    Args:
        logits: [R, Vd] float32, float16 or bfloat16; rows may be strided. NaN counts as -inf.
        k: how many, 1 to min(Vd, 64). Ties go to the lower index.
        id_map: [Vd] int32, translates a reduced draft vocabulary: `arange(Vd) + d2t`.

    Returns:
        out_ids [R, k] int32, best first, and out_logprobs [R, k] float32, never above 0.

    Raises:
        ValueError: wrong dtype, shape, device or stride; k out of range.
    """
    rows, _ = shape_of("select_topk", "logits", logits, 2)
    if out_ids is None:
        out_ids = empty("select_topk", logits, (rows, k), "int32")
    if out_logprobs is None:
        out_logprobs = empty("select_topk", logits, (rows, k), "float32")
    _C.select_topk(stream, logits, id_map, out_ids, out_logprobs)
    return out_ids, out_logprobs


# --- tree -------------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A batch of token trees. Node 0 is the root; parents come before children, siblings best first.

    Unused nodes (from `num_nodes` on) carry the root's token and position, their own mask bit, and -1 elsewhere.
    """

    tokens: Tensor  # [B, N] int32
    parents: Tensor  # [B, N] int32, -1 for the root
    positions: Tensor  # [B, N] int32, L + depth
    first_child: Tensor  # [B, N] int32 or -1
    next_sibling: Tensor  # [B, N] int32 or -1
    mask: Tensor  # [B, N, W] int64 as bits: bit j of row i says that node j is an ancestor of i, or i itself
    num_nodes: Tensor  # [B] int32


# --- attention --------------------------------------------------------------------------------------------------------


# --- verify -----------------------------------------------------------------------------------------------------------


# --- kv ---------------------------------------------------------------------------------------------------------------
