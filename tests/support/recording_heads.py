"""Draft heads that record the calls of a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from specdec_kernels.engine import Eagle3
from specdec_kernels.engine.drafts import DraftContext
from specdec_kernels.models.heads.base import DraftHead, HeadOutput
from specdec_kernels.models.heads.eagle3 import Eagle3Head


class DepthHead(Eagle3Head):
    """An EAGLE-3 head with a module per depth, as in MTP; each depth scales the input of the logits."""

    scales: list[float]
    depths: list[int]

    def forward(self, *args: Any, depth: int = 0, **options: Any) -> HeadOutput:
        self.depths.append(depth)
        output = super().forward(*args, depth=depth, **options)
        return output._replace(normed=output.normed * self.scales[depth])


class DepthDraft(Eagle3):
    """A draft with a head whose output at depth d is scaled by `scales[d]`."""

    def __init__(self, head: str | Path, scales: list[float], **options: Any) -> None:
        super().__init__(head, **options)
        self.scales, self.depths = scales, list[int]()

    def load(self, context: DraftContext) -> DraftHead:
        head = super().load(context)
        assert isinstance(head, nn.Module)
        head.__class__ = DepthHead
        assert isinstance(head, DepthHead)
        head.scales, head.depths = self.scales, self.depths
        return head
