"""Small models whose shares are compared with the whole: their options, and what a prompt and a tree give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.paged_batch import LastRows, PagedBatch
from specdec_kernels.models.options import ModelOptions


def options(**others: Any) -> ModelOptions:
    sizes = {"max_len": 64, "num_pages": 8, "page_size": 4, "dtype": torch.float32, "device": torch.device("cpu")}
    return ModelOptions(**{**sizes, "max_nodes": 4, "accept_width": 3} | others)


def passes_of(lm: CausalLM, tokens: Tensor) -> tuple[Tensor, Any]:
    """Return the state of a prompt's last row, and what a pass over a tree after it gives."""
    slot, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32)[None]
    count = tokens.shape[1]
    batch = PagedBatch(slot, table, zero, tail_len=count)
    last = LastRows(zero + count - 1, zero[None] + count - 1, batch._replace(prefix_lens=zero + count - 1, tail_len=1))
    hidden = lm.prefill(tokens, torch.arange(count, dtype=torch.int32)[None], batch, last).hidden
    assert hidden is not None
    mask = torch.tensor([[[0b001], [0b011], [0b101]]])
    tree = batch._replace(prefix_lens=zero + count, tail_len=3, mask=mask)
    states = lm.forward(tokens[:, :3], torch.tensor([[0, 1, 1]], dtype=torch.int32) + count, tree)
    return hidden, states


def outputs_of(lm: CausalLM, tokens: Tensor) -> Tensor:
    """Return logits of a prompt's last row and of a tree after it, with what leaves the last layer."""
    hidden, states = passes_of(lm, tokens)
    return torch.cat([lm.logits(hidden).view(1, -1), lm.logits(states.hidden)[0]])
