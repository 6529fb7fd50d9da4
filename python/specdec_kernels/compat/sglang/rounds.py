"""Faster versions of what SGLang's speculative rounds do between forward passes.

`compat.sglang.plugin` registers these functions as hooks around SGLang's own. Each calls the original for every case
that it does not know. SGLang is imported only inside calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...ops import select_topk
from . import functions
from .attention import BACKEND, TreeAttention, is_capturing
from .ngram import ALGORITHM

__all__ = [
    "accepted_width",
    "best_of",
    "draft_backend",
    "extend_accepted",
    "extend_phase",
    "keep_logits",
    "move_accepted",
    "sample",
    "verify_greedy",
    "verify_logits",
]

MAX_TOPK = 64  # limit of select_topk
# Algorithms whose trees our attention verifies. SGLang passes their logits to `eagle_sample` and nothing else.
VERIFIED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", ALGORITHM)
BRANCHING = ("NGRAM", ALGORITHM)  # those of them that draft trees whatever speculative_eagle_topk is


# --- a draft's best tokens ---


@dataclass(frozen=True)
class DraftLogits:
    """Logits in place of a draft's probabilities, from `renorm_draft_probs` to `fast_topk`.

    `select_topk` finds the best tokens and their probabilities in one pass over the logits.
    """

    logits: Tensor  # [rows, vocabulary]


def keep_logits(original: Callable[..., Any], logits: Any, sampling_info: Any, use_rejection_sampling: bool) -> Any:
    """Wrap `renorm_draft_probs`: return the logits, which only `fast_topk` reads unless drafts are sampled."""
    if use_rejection_sampling or not logits.is_cuda or not len(logits):
        return original(logits, sampling_info, use_rejection_sampling)
    return DraftLogits(logits)


def best_of(original: Callable[..., Any], values: Any, topk: int, dim: int) -> Any:
    """Wrap `fast_topk`: return probabilities [rows, topk] float32 and tokens [rows, topk] int64, best first."""
    if not isinstance(values, DraftLogits):
        return original(values, topk, dim)
    logits = values.logits
    if topk > MAX_TOPK:
        return original(logits.softmax(-1), topk, dim)
    best = select_topk(logits, topk)
    return best.logprobs.exp(), best.ids.long()


# --- the target's logits of a tree ---


# SGLang converts the logits of verified trees to float32 within the CUDA graph. Greedy verification needs only the
# argmax of each row, which is the same in the head's dtype: for 64 trees of 32 nodes and a vocabulary of 152 thousand,
# 1.2 instead of 3.7 GB are written and read. So the head writes to the first half of SGLang's own float32 buffer, and
# the logits are converted only if something else reads them. The buffer's storage carries a mark, which every view of
# it shares, however it was sliced.


def narrow_logits(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a [rows, vocabulary] view of `dtype` (2 bytes) in the first half of `buffer`, and mark its storage.

    Args:
        buffer: [rows, vocabulary] float32, contiguous: SGLang's.
        dtype: float16 or bfloat16.
    """
    storage: Any = buffer.untyped_storage()
    storage.specdec_vocab = buffer.shape[1]
    rows, vocab = buffer.shape
    return buffer.view(dtype).view(-1)[: rows * vocab].view(rows, vocab)


def is_narrow(logits: Tensor) -> bool:
    """Return whether `logits` are what `narrow_logits` returned, or their first rows."""
    vocab = getattr(logits.untyped_storage(), "specdec_vocab", None)
    return logits.dtype.itemsize == 2 and logits.ndim == 2 and vocab == logits.shape[1]


def widen_logits(logits: Tensor) -> Tensor:
    """Convert narrow logits to float32 in place, and return the rows of SGLang's buffer that hold them."""
    rows, vocab = logits.shape
    wide = torch.empty(0, dtype=torch.float32, device=logits.device)
    wide.set_(logits.untyped_storage(), logits.storage_offset() // 2, (rows, vocab), (vocab, 1))
    return wide.copy_(logits.clone())  # a copy first: both views overlap


def verify_logits(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    logits_metadata: Any,
    embedding_bias: Tensor | None = None,
    use_logits_buffer: bool = True,
    *,
    head_settings: tuple[str, ...],
) -> Any:
    """Wrap `LogitsProcessor._get_logits`: keep the head's dtype while a verification is captured.

    The head must be a plain one on one GPU, whose logits are neither scaled nor capped: no attribute of the processor
    in `head_settings` is true.
    """
    buffer, weight = logits_metadata.next_token_logits_buffer, getattr(lm_head, "weight", None)
    if (
        buffer is None
        or weight is None
        or not use_logits_buffer
        or not logits_metadata.forward_mode.is_target_verify()
        or not is_capturing()
        or not ends_in_sample()
        or has_more_to_do(processor, lm_head, head_settings)
        or weight.dtype not in (torch.bfloat16, torch.float16)
        or hidden_states.dtype != weight.dtype
        or tuple(buffer.shape) != (len(hidden_states), processor.vocab_size)
        or len(weight) != processor.vocab_size
    ):
        return original(processor, hidden_states, lm_head, logits_metadata, embedding_bias, use_logits_buffer)
    return torch.matmul(hidden_states, weight.T, out=narrow_logits(buffer, weight.dtype))


def ends_in_sample() -> bool:
    """Return whether the algorithm's logits go to `eagle_sample`, whose wrapper converts them if needed."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm in VERIFIED


def has_more_to_do(processor: Any, lm_head: Any, head_settings: tuple[str, ...]) -> bool:
    """Return whether SGLang computes logits other than by one GEMM, or changes them afterwards."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    return bool(
        any(getattr(processor, name) for name in head_settings)
        or processor.logit_scale is not None
        or processor.rl_on_policy_target is not None
        or hasattr(lm_head, "set_lora")
        or should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    )


def sample(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *more: Any,
    **others: Any,
) -> Any:
    """Wrap `eagle_sample`: convert logits to float32 unless nothing but their argmax is read.

    The batch is then greedy, without watermarks, and returns no log-probabilities.
    """
    logits = logits_output.next_token_logits
    if logits is not None and is_narrow(logits):
        info = batch.sampling_info
        is_plain = (
            info.is_all_greedy
            and info.acc_additive_penalties is None
            and info.acc_scaling_penalties is None
            and info.logit_bias is None
            and grammar_mask is None
            and others.get("watermark_state") is None
            and not batch.return_logprob
        )
        if not is_plain:
            logits_output.next_token_logits = widen_logits(logits)
    return original(verify_input, batch, logits_output, grammar_mask, *more, **others)


def verify_greedy(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Wrap `verify_tree_greedy`: ours for int64 candidates, which trees of a root alone do not always have."""
    if args or named["candidates"].dtype != torch.int64:
        return original(*args, **named)
    functions.verify_tree_greedy(**named)
    return None


# --- KV rows of accepted tokens ---


def move_accepted(
    original: Callable[..., Any],
    batch: Any,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
    allocator: Any,
    *,
    within_window: bool,
) -> Any:
    """Wrap `move_accept_tokens_to_target_kvcache`: one kernel for all of it, in pools of plain rows.

    Accepted rows go to the first rows of their tree: those that `batch.out_cache_loc` names if `within_window`, else
    those of `req_to_token`, which are the same until SGLang gives them to another request.
    """
    pool = allocator.get_kvcache()
    is_known = accept_index.is_cuda and accept_index.dtype == num_correct_drafts.dtype == torch.int32
    row_bytes = plain_rows(pool) if is_known else None
    if row_bytes is None:
        return original(batch, accept_index, num_correct_drafts, allocator)
    return functions.move_accept_tokens(
        pool.data_ptrs.view(torch.int64),
        row_bytes,
        len(pool.k_buffer[0]),
        *destinations(batch, within_window),
        batch.out_cache_loc,
        accept_index,
        num_correct_drafts,
    )


def destinations(batch: Any, within_window: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table of rows, and the row and the column of it where each request's accepted rows begin."""
    if not within_window:
        return batch.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens
    bs, device = len(batch.seq_lens), batch.seq_lens.device
    table = batch.out_cache_loc.view(bs, -1).int()
    return table, torch.arange(bs, device=device), torch.zeros(bs, dtype=torch.int64, device=device)


def plain_rows(pool: Any) -> int | None:
    """Return the bytes of a row of any layer's K or V; None if they differ, or if the pool has another layout."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool or pool.use_hnd or pool.use_native_move_kv_cache:
        return None
    if pool not in row_sizes:
        buffers = [*pool.k_buffer, *pool.v_buffer]
        kinds = {(len(each), each[0].numel() * each.element_size(), each.is_contiguous()) for each in buffers}
        _, size, contiguous = max(kinds, default=(0, 0, False))
        is_plain = len(kinds) == 1 and contiguous and size % 16 == 0 and len(buffers) == len(pool.data_ptrs)
        row_sizes[pool] = size if is_plain else None
    return row_sizes[pool]


row_sizes: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # by pool, whose buffers never change size


def accepted_width(original: Callable[..., int], *, phase: str, mlp_sync_takes_args: bool, **others: Any) -> int:
    """Wrap `resolve_num_tokens_per_req`: return the rows of a request in draft-extend.

    After a tree, SGLang's draft reads a row for each node of the tree, although only the first rows, the accepted path,
    count. A path has at most one token for each draft step, and the token after them.
    """
    width: int = original(phase=phase, **others)
    return path_width(width, mlp_sync_takes_args) if phase == "draft_extend" else width


def path_width(nodes: int, mlp_sync_takes_args: bool) -> int:
    """Return the rows of a path after a tree of `nodes`; `nodes` if the plugin leaves draft-extend as it is."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if (
        (spec.speculative_eagle_topk or 1) <= 1
        or draft_backend(extend_phase()) != BACKEND
        or spec.enable_multi_layer_eagle
        or pads_across_ranks(mlp_sync_takes_args)
    ):
        return nodes
    return min(nodes, int(spec.speculative_num_steps) + 1)


def pads_across_ranks(mlp_sync_takes_args: bool) -> bool:
    from sglang.srt.utils.common import require_mlp_sync

    if not mlp_sync_takes_args:
        return bool(require_mlp_sync())
    from sglang.srt.runtime_context import get_server_args

    return bool(require_mlp_sync(get_server_args()))


def draft_backend(phase: str) -> str | None:
    """Return the name of a draft's attention backend in a phase, as SGLang resolves it."""
    from sglang.srt.runtime_context import get_exec, get_spec

    kernel = get_exec().kernel
    own, of_phase = get_spec().speculative_draft_attention_backend, getattr(kernel, f"{phase}_attention_backend")
    name: str | None = own or of_phase or kernel.attention_backend
    return name


def extend_phase() -> str:
    """Return the phase whose attention backend draft-extend uses."""
    from sglang.srt.runtime_context import get_spec

    return "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"


def extend_accepted(
    original: Callable[..., Any],
    worker: Any,
    batch: Any,
    batch_result: Any,
    *,
    mlp_sync_takes_args: bool,
    **others: Any,
) -> Any:
    """Wrap `EagleDraftWorker._draft_extend_for_decode`: pass the rows of each request's path, not of its tree."""
    nodes, bs = worker.speculative_num_draft_tokens, len(batch.seq_lens)
    width = path_width(nodes, mlp_sync_takes_args)
    graphs, output = worker.cuda_graph_runner_for_draft_extend, batch_result.logits_output
    whole = batch.out_cache_loc, batch_result.next_token_ids, output.hidden_states
    # Later versions prepare inputs and locations of chains for all rows.
    prepared = [getattr(batch_result, "prepared_draft_extend_inputs", None), *others.values()]
    if (
        width == nodes
        or bs == 0
        or not isinstance(worker.draft_extend_attn_backend, TreeAttention)
        or any(each is not None for each in prepared)
        or any(rows is not None and len(rows) != bs * nodes for rows in whole)
        or (graphs is not None and graphs.captured_req_width != width)
    ):
        return original(worker, batch, batch_result, **others)

    def first(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.view(bs, nodes, *rows.shape[1:])[:, :width].flatten(0, 1)

    batch.out_cache_loc, batch_result.next_token_ids, output.hidden_states = map(first, whole)
    worker.speculative_num_draft_tokens = width
    try:
        return original(worker, batch, batch_result, **others)
    finally:
        worker.speculative_num_draft_tokens = nodes
        batch.out_cache_loc, batch_result.next_token_ids, output.hidden_states = whole
