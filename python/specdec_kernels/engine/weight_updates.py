"""Weights of a running engine: replacing them between rounds, and offloading them while the engine sleeps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.language_model import LanguageModel
from ..models.weights.checkpoint import some
from ..models.weights.offload import MissingWeights, weights_of
from ..models.weights.update import Update, expect_tensors, write
from .drafts import Draft, HasWeights, composition
from .drafts.composition import having, leaves
from .startup import RankRuntime, Runtime, capture_all, on_stream
from .threads import EngineThreads

Weights = Mapping[str, Tensor]
SAMPLED = 32  # elements of each weight in a checksum


class WeightManager:
    """Updates, offloads and reloads the weights of target and draft, between two rounds.

    Attributes:
        lock: held by whatever changes, or reads whole, what rounds work on.
    """

    def __init__(self, runtime: Runtime, threads: EngineThreads) -> None:
        self.lock = threading.Lock()
        self._runtime, self._threads = runtime, threads
        self._target, self._draft = runtime.executor.target, runtime.executor.draft
        self._checksum: str | None = None  # of the target's weights; None: not computed
        self._sleep_level = 0  # 0: awake
        self._missing = MissingWeights({})  # weights dropped by sleep(2) and not given again

    def checksum(self) -> str:
        """Return a checksum over samples of each of the target's weights."""
        if self._checksum is None:
            self._checksum = checksum(self._target.model)
        return self._checksum

    def update(self, weights: Weights | None, draft: Weights | Sequence[Weights | None] | None) -> None:
        """Replace weights; see `Engine.update_weights`."""
        with self.lock:
            self._expect_awake("update_weights")
            if (ranks := self._runtime.ranks) is not None:
                raise ValueError(
                    f"update_weights: Engine has tp={ranks.size}, expected 1 (new weights are not divided)"
                )
            given = NewWeights(self._target, self._draft, weights, draft)
            with self._threads.paused(restart=True), on_stream(self._runtime.stream):
                given.write()
                self._checksum = None
                self._threads.forget_acceptance()
            if self._threads.unready:
                self._missing.record(given.updates)
                self._threads.unready = why_unready(self._missing)

    def sleep(self, level: int) -> None:
        """Free device memory; see `Engine.sleep`."""
        runtime = self._runtime
        with self.lock:
            self._expect_awake("sleep")
            if level not in (1, 2):
                raise ValueError(f"sleep: level is {level}, expected 1 or 2")
            if level == 2 and (ranks := runtime.ranks) is not None:
                raise ValueError(
                    f"sleep: level is 2, expected 1 with tp={ranks.size} (update_weights gives no weights back)"
                )
            if level == 2 and (self._target.is_given or any(part.is_given for part in having(self._draft, HasWeights))):
                raise ValueError(
                    "sleep: level is 2, expected 1 for a model that was given as a module, which is its owner's"
                )
            if self._missing.names:
                raise RuntimeError(f"sleep: {self._threads.unready}")
            self._threads.refuse_requests("Engine is asleep, expected wake() before requests")
            with self._threads.paused(restart=True), on_stream(runtime.stream):
                self._sleep_level = level
                runtime.record("sleep", level)
                free_memory(runtime, level)

    def wake(self) -> None:
        """Take device memory back; see `Engine.wake`."""
        runtime = self._runtime
        with self.lock:
            if not self._sleep_level:
                raise RuntimeError("wake: Engine is awake, expected one that sleeps")
            level = self._sleep_level
            with self._threads.paused(), on_stream(runtime.stream):
                runtime.record("wake", level)
                take_memory(runtime, level)
            self._sleep_level = 0
            self._missing = MissingWeights(own_weights(self._target, self._draft) if level == 2 else {})
            self._threads.unready = why_unready(self._missing)

    def _expect_awake(self, op: str) -> None:
        if self._sleep_level:
            raise RuntimeError(f"{op}: Engine is asleep, expected wake() before")


def free_memory(runtime: RankRuntime, level: int) -> None:
    """Free a rank's graphs, pools and weights, between two rounds."""
    if runtime.stream is not None:
        runtime.stream.synchronize()
    runtime.drop_graphs()
    runtime.executor.target.sleep(level)
    composition.sleep(runtime.executor.draft, level)
    if runtime.stream is not None:
        torch.cuda.empty_cache()


def take_memory(runtime: RankRuntime, level: int) -> None:
    """Undo `free_memory`, with empty pools."""
    num_pages = runtime.config.num_pages
    runtime.executor.target.wake(level, num_pages)
    composition.wake(runtime.executor.draft, level, num_pages)
    if runtime.config.captures:
        runtime.graphs = capture_all(runtime.executor, runtime.config, runtime.stream, progress=False)
        runtime.launches.set_graphs(runtime.graphs.raw() if runtime.graphs else {})


class NewWeights:
    """Weights given to `Engine.update_weights`, checked and not yet written.

    Raises:
        TypeError, ValueError: weights that `updates` of a model refuses; another number of mappings than the draft has
            parts.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: Draft,
        weights: Weights | None,
        draft_weights: Weights | Sequence[Weights | None] | None,
    ) -> None:
        self._models: list[LanguageModel | HasWeights] = [target, *having(draft, HasWeights)]
        self.updates: list[Update] = []
        if weights is not None:
            name = "update_weights: weights"
            expect_tensors(weights, name)
            rest = dict(weights)
            for owner in having(draft, HasWeights):  # a draft may come with the target's checkpoint
                prefixes = owner.tensor_prefixes
                own = {key: rest.pop(key) for key in list(rest) if key.startswith(prefixes)}
                self.updates += owner.updates(own, name)
            self.updates += target.updates(rest, name)
        for part, (given, name) in zip(leaves(draft), of_parts(draft, draft_weights), strict=True):
            if given is None:
                continue
            if not isinstance(part, HasWeights):
                kind = type(part).__name__
                raise ValueError(f"update_weights: {name} is given, expected None for {kind}, which has no weights")
            self.updates += part.updates(given, f"update_weights: {name}")

    def write(self) -> None:
        """Copy the weights, and refresh what models derive from theirs."""
        write(self.updates)
        for model in self._models:
            model.refresh()  # every model: it may share weights with one that has changed


def of_parts(draft: Draft, given: Weights | Sequence[Weights | None] | None) -> list[tuple[Weights | None, str]]:
    """Return the weights of each part of the draft, and their name in errors; ValueError for another number."""
    parts = leaves(draft)
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
    """Return the weights that the engine offloads and reloads, by model and name."""
    weights = dict(target.weights)
    parts = leaves(draft)
    for i, part in enumerate(parts):
        if not isinstance(part, HasWeights):
            continue
        model = "draft" if len(parts) == 1 else f"draft[{i}]"
        weights |= {f"{model}: {name}": tensor for name, tensor in part.weights.items()}
    return weights


def why_unready(missing: MissingWeights) -> str:
    """Return why no request can start while weights are missing; empty if none are."""
    if not missing.names:
        return ""
    return f"Engine lacks {some(missing.names)} since sleep(2), expected update_weights with all of them"


@torch.no_grad()
def checksum(model: Any) -> str:
    """Return a checksum over SAMPLED elements of each weight, which tells fine-tuned models of one shape apart."""
    parts = []
    for _, weight in sorted(weights_of(model).items()):
        flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().t().reshape(-1)
        step = max(1, len(flat) // SAMPLED)
        parts.append(flat[::step][:SAMPLED].contiguous().view(torch.uint8))
    return hashlib.blake2b(torch.cat(parts).cpu().numpy().tobytes(), digest_size=8).hexdigest()
