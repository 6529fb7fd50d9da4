"""References of the draft ops."""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(logits: Tensor, k: int, id_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stable descending sort, so ties keep the lower index first."""
    x = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best, index = torch.sort(x, dim=-1, descending=True, stable=True)
    best, index = best[:, :k], index[:, :k]
    # Entries of +inf share the whole probability, as the limit of ever larger equal logits does.
    certain = (x == torch.inf).sum(-1, keepdim=True)
    finite = torch.where(best > -torch.inf, best - torch.logsumexp(x, -1, keepdim=True), -torch.inf)
    infinite = torch.where(best == torch.inf, -certain.double().log(), -torch.inf)
    logprobs = torch.where(certain > 0, infinite, finite)
    ids = index if id_map is None else id_map[index]
    return ids.to(torch.int32), logprobs.clamp(max=0)
