"""The rejection sampling of vLLM's second model runner, on `verify_tree`.

    from specdec_kernels.compat.vllm.gpu import rejection_sample
    # for vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils's

It takes logits and seeds rather than probabilities and coins, as `verify_tree` does, so that it is that op with the
chains laid out for it. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import Tree, verify_tree

__all__ = ["rejection_sample"]


def rejection_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
) -> tuple[Tensor, Tensor]:
    """Verify a chain for each request, and emit the token after what is accepted.

    A request of temperature 0 follows the argmax of its logits. Any other draws, by its seed and the positions of the
    tokens alone: with `draft_logits` by rejection, else one token of the target after another while the drafts agree.

    Args:
        target_logits: [rows, V] float32, float16 or bfloat16: of each request one row more than drafts, request after
            request, temperature and filters applied. Chains of uneven lengths are copied into one layout.
        draft_logits: [max_num_reqs, num_speculative_steps, Vd] like target_logits, before temperature: what drafts were
            drawn from. None: they were not drawn. The columns of the larger vocabulary are left out.
        draft_sampled: [rows] int: the draft that row i decides stands at i + 1.
        cu_num_logits: [bs + 1] int32, where each request's rows begin.
        pos: [rows] int: positions.
        idx_mapping: [bs] int: each request's place in draft_logits, temperature and seed.
        expanded_idx_mapping, expanded_local_pos: have no effect.
        temperature: [max_num_reqs] float32. seed: [max_num_reqs] int64.
        num_speculative_steps: no request has more drafts; at most 511.
        synthetic_conditional_rates: None; made-up acceptance is for benchmarks.
        use_fp64: has no effect.
        use_block_verification: verify drawn drafts as blocks.

    Returns:
        sampled [bs, num_speculative_steps + 1] int64, of which the first num_sampled [bs] int32 of each row count.

    Raises:
        ValueError: wrong dtype, shape or device; synthetic_conditional_rates.
    """
    if synthetic_conditional_rates is not None:
        raise ValueError("rejection_sample: synthetic_conditional_rates is given, expected None")
    batch, nodes, rows = len(idx_mapping), num_speculative_steps + 1, len(target_logits)
    starts, columns = cu_num_logits[:-1, None], torch.arange(nodes, dtype=torch.int32, device=target_logits.device)
    lengths = (cu_num_logits[1:] - cu_num_logits[:-1]).clamp(0, nodes).int()
    if draft_logits is not None:
        target_logits = target_logits[:, : draft_logits.shape[-1]]
        draft_logits = draft_logits[idx_mapping.long(), :, : target_logits.shape[-1]]
    flat = (starts + columns.minimum(lengths[:, None] - 1)).clamp(0, max(rows - 1, 0)).long()
    # No request has more than `nodes` rows: where they all have, there is nothing to lay out.
    laid_out = (
        target_logits.view(batch, nodes, target_logits.shape[-1]) if rows == batch * nodes else target_logits[flat]
    )
    chain = columns.expand(batch, -1)
    tree = Tree(
        tokens=draft_sampled[flat].int(),
        parents=(chain - 1).contiguous(),
        positions=pos[flat].int(),
        first_child=torch.where(chain + 1 < lengths[:, None], chain + 1, -1).int(),
        next_sibling=torch.full_like(chain, -1, memory_format=torch.contiguous_format),
        mask=None,
        num_nodes=lengths,
    )
    sampling: dict[str, Any] = {"temperature": (temperature > 0).float(), "seeds": seed}
    if draft_logits is not None and num_speculative_steps > 0:
        sampling |= {"draft_logits": draft_logits, "draft_rows": tree.parents, "draft_temperature": temperature}
        sampling |= {"block_verification": use_block_verification}
    accepted = verify_tree(laid_out, tree, nodes, slots=idx_mapping.int(), **sampling)
    return accepted.tokens.long(), accepted.num_valid
