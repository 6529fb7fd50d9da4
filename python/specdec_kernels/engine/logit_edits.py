"""The logit edits of one request, and how they become its slot's part of `LogitEdits`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..ops import LogitEdits
from ..status import Edit
from .host_tensors import to_device


class LogitEdit(NamedTuple):
    """The logit edits of one request."""

    kinds: Edit
    bias: Mapping[int, float]
    presence: float
    frequency: float
    repetition: float
    num_prompt_tokens: int  # of its text; the rest was generated
    new_matcher: Callable[[], Any] | None = None  # of its grammar, if it has one

    def write(self, edits: LogitEdits, slot: int, tokens: Sequence[int]) -> None:
        """Write the edits of a request with this text so far to its slot."""
        kinds, bias, counts, presence, frequency, repetition = (tensor[slot] for tensor in edits)
        prompt, generated = tokens[: self.num_prompt_tokens], tokens[self.num_prompt_tokens :]
        device = kinds.device
        counts.zero_()
        counts.index_fill_(0, to_device(array("i", prompt), device).long(), 1)
        counted = to_device(array("i", generated), device)
        counts.index_add_(0, counted.long(), counted.new_full((len(generated),), 2))
        bias.zero_()
        biased = to_device(array("i", self.bias), device).long()
        bias.index_copy_(0, biased, to_device(array("f", self.bias.values()), device))
        kinds.fill_(self.kinds)
        presence.fill_(self.presence)
        frequency.fill_(self.frequency)
        repetition.fill_(self.repetition)
