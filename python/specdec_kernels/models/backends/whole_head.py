"""The whole LM head of a model that ranks divide, on rank 0."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import nn

from ..language_model import LanguageModel
from ..layers.reduction import Columns, reduction_of


@torch.inference_mode()
def gathered_head(target: LanguageModel) -> nn.Linear:
    """Return an LM head with the rows of all ranks, which call this together."""
    head, columns = target.lm_head, reduction_of(target.lm_head)
    if not isinstance(columns, Columns):
        return head
    rows = columns.sum(head.weight.detach().t().contiguous()).t().contiguous()
    whole = nn.Linear(rows.shape[1], rows.shape[0], bias=head.bias is not None, device="meta")
    whole.weight = nn.Parameter(rows, requires_grad=False)
    if head.bias is not None:
        whole.bias = nn.Parameter(columns.sum(head.bias.detach()[None])[0], requires_grad=False)
    return whole


def with_head(target: LanguageModel, head: nn.Linear) -> LanguageModel:
    """Return the same model, with all other weights shared, and this LM head.

    Raises:
        ValueError: the model keeps its head in a module of a module.
    """
    other: Any = copy(target)
    other.model = copy(target.model)
    other.model._modules = dict(target.model._modules)
    before = target.lm_head
    other.model.set_output_embeddings(head)
    if target.lm_head is not before:
        target.model.set_output_embeddings(before)
        raise ValueError(f"model: {type(target.model).__name__} has its LM head in another module, expected its own")
    with_whole: LanguageModel = other
    return with_whole
