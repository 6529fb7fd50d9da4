"""A check that what a module computes for a row follows the row's position, not its place in the pass.

The engine's rows may have any place: nodes of a tree, packed requests. Some modules count the rows of the pass and of
their cache instead, and a short text may not show it: Llama 4 scales queries from the 8192nd row on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .attention_hook import UnsupportedModel, marker_like, use_hook
from .module_copy import accepted, cache_name

ORDER = (3, 0, 6, 1, 5, 2, 4)  # of the rows in the second pass
FAR = 10**5  # the first position, and the rows that the cache of the third pass claims to have
LARGEST = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.2}  # relative to the spread of a row


class FarCache(DynamicCache):
    """A cache that claims to have rows and gives none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._rows + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class RecordingHook:
    """A hook that keeps the queries, keys and values of each attention call. Its outputs are the values."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Tensor]] = []

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
        return out

    def mask(self, options: dict[str, Any]) -> Tensor:
        return marker_like(options["device"], options["dtype"])

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        self.calls.append((module, torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], 1)))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


def check_places(model: nn.Module, arguments: Callable[[Tensor, Tensor], dict[str, Any]], max_len: int) -> None:
    """Run rows at far positions: in order, in another order, and after a cache of many rows.

    Args:
        model: hooked modules.
        arguments: makes those of a pass, from tokens and positions [1, T].
        max_len: positions are below it.

    Raises:
        UnsupportedModel: what a row computes depends on its place.
    """
    count = min(len(ORDER), max_len)
    device = next(model.parameters()).device
    tokens = torch.arange(1, 1 + count, device=device)[None]
    begin = min(FAR, max_len - count)
    positions = begin + torch.arange(count, device=device)[None]
    order = torch.tensor([row for row in ORDER if row < count], device=device)
    first = recorded(model, arguments(tokens, positions))
    moved = recorded(model, arguments(tokens[:, order], positions[:, order]))
    expect_alike(model, [(module, rows[order]) for module, rows in first], moved, exact=False)
    try:
        after = recorded(model, arguments(tokens, positions) | {cache_name(model): FarCache(begin)})
    except Exception:  # takes caches of its own class alone
        return
    expect_alike(model, first, after, exact=True)


def recorded(model: nn.Module, arguments: dict[str, Any]) -> list[tuple[nn.Module, Tensor]]:
    """Return what enters each attention call of a pass, a row for each token; and the logits, of the model itself."""
    hook = RecordingHook()
    with use_hook(hook):
        logits = model(**accepted(model, arguments)).logits
    return [*hook.calls, (model, logits[0])]


def expect_alike(
    model: nn.Module, want: list[tuple[nn.Module, Tensor]], got: list[tuple[nn.Module, Tensor]], exact: bool
) -> None:
    """Raise `UnsupportedModel` at the first tensors that differ; `exact`: by more than the same sums may."""
    names = {module: name for name, module in model.named_modules()}
    if [module for module, _ in want] != [module for module, _ in got]:
        raise UnsupportedModel("calls its attention otherwise where rows stand at other places of a pass")
    for (module, theirs), (_, ours) in zip(want, got, strict=True):
        spread = theirs.float().std(-1).clamp(min=1e-6)
        off = (theirs.float() - ours.float()).abs().amax(-1) / spread
        # In 16 bits, sums of another order may send a token to another expert: a row or two then differ.
        is_sharp = exact or theirs.dtype == torch.float32
        if not float(off.max() if is_sharp else off.median()) <= (2e-3 if exact else LARGEST[theirs.dtype]):
            what = f"what enters the attention of {names[module]}" if names[module] else "the logits"
            raise UnsupportedModel(f"has rows that follow their place in a pass, not their position: {what}")
