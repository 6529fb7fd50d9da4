"""The base of drafts with a model: the model's pools and weights, and scores calibrated from acceptance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ...models.heads.base import DraftHead
from ...models.kv_pools import KvPools
from ...models.language_model import LanguageModel
from ...models.weights.update import Update
from ...ops import Calibration, make_calibration, update_calibration
from .base import Draft
from .capabilities import HasPools, HasWeights, Learner
from .proposal import Committed


class CalibratedDraft(Draft, Learner, HasPools, HasWeights):
    """A draft with a model.

    The model's probabilities of its candidates are calibrated from acceptance: path scores are products of calibrated
    probabilities. Rounds update the calibration where the engine says so (`calibrate`): not in a batch-invariant one,
    where the scores of one request would depend on the others.

    Attributes:
        calibration: of an open draft; None: it is not calibrated.
    """

    calibration: Calibration | None

    @property
    def is_calibrated(self) -> bool:
        """Whether the scores of its candidates are calibrated: those of drawn ones are not."""
        return not self.sampled

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name of its model, wherever the folder is."""

    @property
    @abstractmethod
    def loaded(self) -> LanguageModel | DraftHead:
        """The model, with its pools, of an open draft."""

    @property
    def pools(self) -> list[KvPools]:
        return [self.loaded.pools]

    def resize_pools(self, num_pages: int) -> None:
        self.loaded.resize_pools(num_pages)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.loaded.weights

    @property
    def is_given(self) -> bool:
        return self.loaded.is_given

    def updates(self, weights: Mapping[str, Tensor], name: str) -> list[Update]:
        return self.loaded.updates(weights, name)

    def refresh(self) -> None:
        self.loaded.refresh()

    def sleep(self, level: int) -> None:
        self.loaded.sleep(level)

    def wake(self, level: int, num_pages: int) -> None:
        self.loaded.wake(level, num_pages)

    def forget(self) -> None:
        if self.calibration is not None:
            table = self.calibration.table
            for own, new in zip(self.calibration, make_calibration(len(table), like=table), strict=True):
                own.copy_(new)

    @property
    def calibration_table(self) -> Tensor | None:
        """The table that corrects the scores of candidates."""
        return None if self.calibration is None else self.calibration.table

    def learn(self, committed: Committed) -> None:
        """Update the calibration from what was accepted."""
        tree, scores = committed.tree
        if self.calibration is None or not self.context.calibrates or tree.tokens.shape[1] == 1:
            return
        update_calibration(self.calibration, tree, scores, committed.accepted)
