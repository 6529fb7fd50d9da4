"""Weights of a running engine: replacing them between rounds, and offloading them while the engine sleeps."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.language_model import LanguageModel
from ..models.layers.reduction import Reduction
from ..models.weights.checkpoint import some
from ..models.weights.checksum import checksum
from ..models.weights.divided_loading import by_layer
from ..models.weights.offload import MissingWeights
from ..models.weights.update import Update, expect_tensors, write
from .drafts import Draft, HasWeights, composition
from .drafts.composition import having, leaves
from .startup import RankRuntime, Runtime, capture_all, on_stream
from .threads import EngineThreads

Weights = Mapping[str, Tensor]


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
        """Return a checksum over samples of each of the target's weights. With ranks the first call needs a pause."""
        if self._checksum is None and self._runtime.ranks is not None:
            with self.lock, self._threads.paused():
                return self.checksum_in_pause()
        return self.checksum_in_pause()

    def checksum_in_pause(self) -> str:
        """Return the same between two rounds."""
        if self._checksum is None:
            with on_stream(self._runtime.stream), self._runtime.on_all_ranks("checksum"):
                self._checksum = checksum(self._target.model)
        return self._checksum

    def update(self, weights: Weights | None, draft: Weights | Sequence[Weights | None] | None) -> None:
        """Replace weights; see `Engine.update_weights`."""
        with self.lock:
            self._expect_awake("update_weights")
            runtime = self._runtime
            given = NewWeights(self._target, self._draft, weights, draft)
            groups = [] if runtime.ranks is None else groups_of(self._draft, weights, draft)
            shapes = [group.shapes for group in groups]
            with self._threads.paused(restart=True), on_stream(runtime.stream):
                with runtime.on_all_ranks("update_weights", shapes):
                    if runtime.ranks is not None:
                        for group in groups:
                            group.send(runtime.ranks.reduction, runtime.config.machine.device)
                    given.write()
                    given.refresh()
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
            if level == 2 and (self._target.is_given or any(part.is_given for part in having(self._draft, HasWeights))):
                raise ValueError(
                    "sleep: level is 2, expected 1 for a model that was given as a module, which is its owner's"
                )
            if self._missing.names:
                raise RuntimeError(f"sleep: {self._threads.unready}")
            self._threads.refuse_requests("Engine is asleep, expected wake() before requests")
            with self._threads.paused(restart=True), on_stream(runtime.stream):
                self._sleep_level = level
                with runtime.on_all_ranks("sleep", level):
                    free_memory(runtime, level)

    def wake(self) -> None:
        """Take device memory back; see `Engine.wake`."""
        runtime = self._runtime
        with self.lock:
            if not self._sleep_level:
                raise RuntimeError("wake: Engine is awake, expected one that sleeps")
            level = self._sleep_level
            with self._threads.paused(), on_stream(runtime.stream), runtime.on_all_ranks("wake", level):
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
    runtime.meet()


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
        """Copy the weights; `refresh` has to follow."""
        write(self.updates)

    def refresh(self) -> None:
        """Refresh what models derive from their weights."""
        for model in self._models:
            model.refresh()  # every model: it may share weights with one that has changed


class GroupShapes(NamedTuple):
    """The tensors of a `WeightGroup` as other ranks know them before they get them.

    Attributes:
        part: of the draft; None: the target's checkpoint.
        tensors: shape and dtype of each, in the order in which they are sent.
    """

    part: int | None
    tensors: dict[str, tuple[list[int], torch.dtype]]

    def receive(self, target: LanguageModel, draft: Draft, reduction: Reduction, device: torch.device) -> None:
        """Get the tensors from rank 0, and copy this rank's parts of them over its weights."""
        given = {name: reduction.broadcast(None, shape, dtype, device) for name, (shape, dtype) in self.tensors.items()}
        if self.part is None:
            NewWeights(target, draft, given, None).write()
        else:
            each = [given if number == self.part else None for number in range(len(leaves(draft)))]
            NewWeights(target, draft, None, each).write()


class WeightGroup(NamedTuple):
    """Tensors that ranks get together: those of a layer, which transformers may merge, or of a part of the draft."""

    part: int | None
    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> GroupShapes:
        """Return what other ranks need to receive the tensors."""
        return GroupShapes(self.part, {name: (list(each.shape), each.dtype) for name, each in self.tensors.items()})

    def send(self, reduction: Reduction, device: torch.device) -> None:
        """Send the tensors from rank 0 to the others, one by one."""
        for tensor in self.tensors.values():
            reduction.broadcast(tensor.detach().to(device), tensor.shape, tensor.dtype, device)


def groups_of(
    draft: Draft, weights: Weights | None, draft_weights: Weights | Sequence[Weights | None] | None
) -> list[WeightGroup]:
    """Return checked weights in the groups in which ranks get them."""
    groups = [] if weights is None else [
        WeightGroup(None, {name: weights[name] for name in sorted(names)}) for names in by_layer(set(weights))
    ]  # fmt: skip
    for part, (given, _) in enumerate(of_parts(draft, draft_weights)):
        if given is not None:
            groups.append(WeightGroup(part, dict(given)))
    return groups


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
