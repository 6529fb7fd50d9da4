"""A rank other than the first: it makes the calls that rank 0 records, and decides nothing."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..models.backends.whole_head import gathered_head
from ..models.weights.checksum import checksum
from ..parallel import launch
from ..parallel.ranks import Ranks, fail
from .device.recording import ReplayedCalls
from .drafts.composition import close_draft
from .loading import Loading
from .startup import FollowerRuntime, forget, on_stream
from .transfer.kv_transfer import MigratedKv, pack_slot
from .tuning import calibrate
from .weight_updates import GroupShapes, NewWeights, free_memory, take_memory


def open_ranks(loading: Loading, work: Callable[[], Any]) -> Ranks | None:
    """Return this rank among those of an engine, once all are there; None: the engine has one process.

    `work` returns what `serve_rank` needs in ranks that this one starts: the model, the draft and the options.
    """
    if loading.place is None:
        return None
    return launch.open_ranks(
        loading.place,
        loading.machine.device,
        loading.channel_sizes,
        work,
        agreed=loading.agreed,
        custom_all_reduce=loading.options.custom_all_reduce,
    )


def serve_rank(joining: launch.Joining) -> None:
    """Be the rank that rank 0 has started with `open_ranks`, until it closes."""
    channel = launch.attach(joining)
    try:
        model, draft, options = pickle.loads(joining.work)
        place = launch.Place(joining.rank, joining.sizes["num_ranks"], by_torchrun=False)
        loading = Loading.of(model, draft, options, place)
        ranks = launch.join(joining, channel, loading.machine.device, custom_all_reduce=options.custom_all_reduce)
    except BaseException as error:
        fail(channel, error)
        raise
    follow(loading, ranks)


def follow(loading: Loading, ranks: Ranks) -> None:
    """Load this rank's part of the models, and make the calls that rank 0 records until it closes.

    Raises:
        RuntimeError: a rank has failed.
        Exception: what was raised here. All ranks end for this reason then.
    """
    runtime: FollowerRuntime | None = None
    try:
        runtime = loading.open_follower(ranks)
        Follower(runtime).run()
    except BaseException as error:
        fail(ranks.channel, error)  # before anything that may wait for the device
        raise
    finally:
        if runtime is None:
            ranks.close()
        else:
            runtime.close_ranks()
            close_draft(loading.draft)


class Follower(ReplayedCalls):
    """The calls that rank 0 records, on this rank; `run` makes them until rank 0 closes."""

    def __init__(self, runtime: FollowerRuntime) -> None:
        super().__init__(runtime.executor, lambda first_rows: MigratedKv(None, first_rows, runtime.stream))
        self._runtime, self._draft = runtime, runtime.executor.draft

    def run(self) -> None:
        """Make the recorded calls; return when rank 0 has closed the engine."""
        runtime = self._runtime
        assert runtime.ranks is not None
        channel = runtime.ranks.channel
        with contextlib.ExitStack() as stack:
            if runtime.stream is not None:
                stack.enter_context(torch.cuda.device(runtime.stream.device))
                stack.enter_context(torch.cuda.stream(runtime.stream))
            while (record := runtime.replayer.next()) is not None:
                name, arguments = pickle.loads(record)
                channel.enter(name)
                getattr(self, name)(*arguments)

    # --- calls between rounds

    def pack_slot(self, slot: int, num_rows: int) -> None:
        """Give rank 0 this rank's part of what a slot with `num_rows` rows keeps."""
        executor = self._executor
        with on_stream(self._runtime.stream):
            pack_slot(executor.state, executor.target, executor.draft, slot, num_rows)

    def features_of(self, tokens: list[int]) -> None:
        """Pass a text through this rank's part of the target."""
        with on_stream(self._runtime.stream):
            self._executor.features_of(tokens)

    def gather_head(self) -> None:
        """Give rank 0 this rank's rows of the LM head."""
        with on_stream(self._runtime.stream):
            gathered_head(self._executor.target)

    def checksum(self) -> None:
        """Give rank 0 this rank's part of the samples of the weights."""
        with on_stream(self._runtime.stream):
            checksum(self._executor.target.model)

    def forget(self) -> None:
        """Let drafts forget what they learned from requests."""
        with on_stream(self._runtime.stream):
            forget(self._draft)

    def calibrate(self, calibrations: Sequence[dict[str, Any] | None]) -> None:
        """Copy calibrations into the draft."""
        with on_stream(self._runtime.stream):
            calibrate(self._draft, calibrations)

    def update_weights(self, groups: Sequence[GroupShapes]) -> None:
        """Replace weights by this rank's parts of those that rank 0 sends."""
        runtime, executor = self._runtime, self._executor
        assert runtime.ranks is not None
        with on_stream(runtime.stream):
            for group in groups:
                group.receive(executor.target, executor.draft, runtime.ranks.reduction, runtime.config.machine.device)
            NewWeights(executor.target, executor.draft, None, None).refresh()

    def sleep(self, level: int) -> None:
        """Free this rank's memory until `wake`."""
        with on_stream(self._runtime.stream):
            free_memory(self._runtime, level)

    def wake(self, level: int) -> None:
        """Take the memory back."""
        with on_stream(self._runtime.stream):
            take_memory(self._runtime, level)
