"""Other weights for an engine that runs: which of its models a mapping is for, and when they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..models.language_model import LanguageModel
from ..models.weights.loading import some
from ..models.weights.offload import Lacking
from ..models.weights.update import Update, write

if TYPE_CHECKING:
    from .drafts import Draft

Weights = Mapping[str, Tensor]


class NewWeights:
    """What `Engine.update_weights` was given, checked: nothing has changed yet.

    Raises:
        TypeError, ValueError: what `updates` of a model refuses; mappings that are not one for each of a draft's parts.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: Draft,
        weights: Weights | None,
        of_draft: Weights | Sequence[Weights | None] | None,
    ) -> None:
        self._models: list[LanguageModel | Draft] = [target, *draft.parts]
        self.updates: list[Update] = []
        if weights is not None:
            self.updates += target.updates(weights, "update_weights: weights")
        for part, (given, name) in zip(draft.parts, of_parts(draft, of_draft), strict=True):
            if given is not None:
                self.updates += part.updates(given, f"update_weights: {name}")

    def write(self) -> None:
        write(self.updates)
        for model in self._models:
            model.refresh()  # also where it shares weights with another that has changed


def of_parts(draft: Draft, given: Weights | Sequence[Weights | None] | None) -> list[tuple[Weights | None, str]]:
    """What each part of the draft gets, and what errors call that; ValueError where there is not one for each."""
    parts = draft.parts
    if given is None:
        return [(None, "")] * len(parts)
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(parts):
            raise ValueError(
                f"update_weights: draft has {len(given)} entries, expected one for each of {len(parts)} parts"
            )
        return [(each, f"draft[{i}]") for i, each in enumerate(given)]
    if len(parts) > 1:
        raise ValueError(
            f"update_weights: draft is one mapping, expected a list of {len(parts)}, one (or None) for each part"
        )
    return [(given, "draft")]


def own_weights(target: LanguageModel, draft: Draft) -> dict[str, Tensor]:
    """The weights that an engine puts away and takes back, by names that say whose they are."""
    weights = dict(target.weights)
    for i, part in enumerate(draft.parts):
        whose = "draft" if len(draft.parts) == 1 else f"draft[{i}]"
        weights |= {f"{whose}: {name}": tensor for name, tensor in part.weights.items()}
    return weights


def why_unready(lacking: Lacking) -> str:
    """Why no request can start where these are lacking; empty where none are."""
    if not lacking.names:
        return ""
    return f"Engine lacks {some(lacking.names)} since sleep(2), expected update_weights with all of them"
