"""Startup of an engine: load the models, size the pools, capture CUDA graphs, create the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch import nn

from .. import _C
from ..models.backends.select import open_language_model
from ..models.language_model import LanguageModel
from ..models.layers.reduction import LOCAL
from ..models.options import ModelOptions
from ..models.shard import WHOLE
from ..parallel.ranks import Ranks, fail
from .config import MAX_STOP_TOKENS, EngineConfig, PagePlan
from .device.executor import Executor
from .device.grammar_masks import TreeMasks
from .device.graphs import Graphs, capture
from .device.memory import pages_that_fit
from .device.prefill_graphs import captured_shapes
from .device.recording import RecordingExecutor
from .device.rings import Rings
from .device.round import Round
from .device.state import EngineState
from .drafts import Draft, DraftContext, Learner
from .drafts.composition import close_draft, having, open_draft, resize_pools
from .options import RING_DEPTH
from .tuning import calibrate

SECONDS_OF_SILENCE = 3.0
logger = logging.getLogger(__name__)


@dataclass
class RankRuntime:
    """The parts that a rank of an engine runs on.

    Attributes:
        config: with the pages that there are.
        executor: makes the device's calls.
        stream: of the rounds; None on a CPU.
        graphs: captured; None where rounds are launched call by call, and while the engine sleeps.
        ranks: this rank among others; None: the engine has one process.
    """

    config: EngineConfig
    executor: Executor
    stream: torch.cuda.Stream | None
    graphs: Graphs | None
    ranks: Ranks | None

    @property
    def launches(self) -> _C.Scheduler | _C.Replayer:
        """Return what launches the graphs."""
        raise NotImplementedError

    def record(self, name: str, *arguments: Any) -> None:
        """Let the other ranks, if there are any, make a call (`Ranks.record`)."""
        if self.ranks is not None:
            self.ranks.record(name, *arguments)

    @contextmanager
    def on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Record a call for the other ranks, which the body makes here. An exception of the body ends all ranks."""
        self.record(name, *arguments)
        try:
            yield
        except BaseException as error:
            if self.ranks is not None:
                fail(self.ranks.channel, error)
            raise
        if self.ranks is not None:
            self.ranks.channel.made()

    def meet(self) -> None:
        """Wait for the other ranks, if there are any, before graphs that have been captured run."""
        if self.ranks is not None:
            self.ranks.meet()

    def drop_graphs(self) -> None:
        """Destroy all graphs; nothing may be running."""
        if self.config.captures:
            self.launches.set_graphs({})
            self.executor.passes.captured.clear()
            self.graphs = None

    def close_ranks(self) -> None:
        """Let the other ranks end, after the graphs: NCCL does not end while graphs have its collectives."""
        if self.ranks is None:
            return
        with contextlib.suppress(RuntimeError):  # after a failure, the device may be gone
            if self.stream is not None:
                self.stream.synchronize()
            self.drop_graphs()
        self.ranks.close()


@dataclass
class Runtime(RankRuntime):
    """The parts of the rank with the scheduler."""

    scheduler: _C.Scheduler

    @property
    def launches(self) -> _C.Scheduler:
        return self.scheduler


@dataclass
class FollowerRuntime(RankRuntime):
    """The parts of another rank, which launches what the scheduler of rank 0 launches."""

    replayer: _C.Replayer

    @property
    def launches(self) -> _C.Replayer:
        return self.replayer


@dataclass(frozen=True)
class RankSources:
    """The models that a rank loads.

    Attributes:
        model: the target, as for `Engine`, without its adapter.
        draft: what is opened for it.
        config: resolved options.
        adapter: folder of a LoRA to merge into the target.
        tokenizer: of the target; None: there is none, for the reason `no_tokenizer`.
        no_tokenizer: that reason, for errors.
        ranks: this rank among those of a divided target; None: the engine has one process.
    """

    model: str | Path | nn.Module
    draft: Draft
    config: EngineConfig
    adapter: Path | None
    tokenizer: Any
    no_tokenizer: str
    ranks: Ranks | None

    def open(self) -> tuple[Executor, torch.cuda.Stream | None]:
        """Load target and draft, and return the executor of their rounds, and the stream that it runs on."""
        config = self.config
        executor = load_target(self.model, self.draft, config, self.adapter, self.ranks)
        round = executor.round
        context = DraftContext(
            round.target,
            round.state,
            config.max_len,
            config.max_idle_rounds > 0,
            self.tokenizer,
            self.no_tokenizer,
            config.calibrates,
        )
        open_draft(self.draft, context)
        device = config.machine.device
        return executor, torch.cuda.Stream(device) if device.type == "cuda" else None


def open_runtime(
    sources: RankSources,
    *,
    calibrations: Sequence[dict[str, Any] | None],
    costs: _C.RoundCosts | None,
    trace: bool,
    progress: bool,
) -> Runtime:
    """Load target and draft, and create what their rounds need. On failure, close the draft again.

    Args:
        sources: of this rank, the first.
        calibrations: that the draft's models start with (`calibrations_for`).
        costs: of rounds, if known; else they are measured.
        trace: whether rounds record their times.
        progress: whether to show progress bars.
    """
    config, draft, ranks = sources.config, sources.draft, sources.ranks
    executor, stream = sources.open()

    def started(config: EngineConfig) -> Runtime:
        with on_stream(stream):
            graphs = capture_all(executor, config, stream, progress)
            scheduler = make_scheduler(executor, config, stream, graphs, trace, ranks)
        return Runtime(config, executor, stream, graphs, ranks, scheduler)

    try:
        if config.mem_fraction is not None:
            config = size_pools(executor, config, started)
        runtime = started(config)
        runtime.meet()
        scheduler = runtime.scheduler
        with on_stream(stream):
            if config.num_levels > 0 and costs is not None:
                scheduler.set_costs(costs)
            elif config.num_levels > 0:
                rows_of = dict(zip(config.batch_sizes, config.rows, strict=True))
                num_sizes = sum(len(rows_of[size]) for size in config.measured_sizes)
                with announced(f"timing rounds of {num_sizes} sizes; Engine.tuning keeps the times for the next start"):
                    scheduler.measure_rounds(list(config.measured_sizes))
                with runtime.on_all_ranks("forget"):
                    forget(draft)
            with runtime.on_all_ranks("calibrate", calibrations):
                calibrate(draft, calibrations)
    except BaseException:
        close_draft(draft)
        raise
    if ranks is not None:
        ranks.on_loaded()
    return runtime


def open_follower(sources: RankSources) -> FollowerRuntime:
    """Do on another rank what `open_runtime` does on rank 0, up to where rank 0 begins to record calls."""
    ranks = sources.ranks
    assert ranks is not None
    executor, stream = sources.open()

    def started(config: EngineConfig) -> FollowerRuntime:
        with on_stream(stream):
            graphs = capture_all(executor, config, stream, progress=False)
            replayer = make_replayer(executor, config, stream, graphs, ranks)
        return FollowerRuntime(config, executor, stream, graphs, ranks, replayer)

    config = sources.config
    try:
        if config.mem_fraction is not None:
            config = size_pools(executor, config, started)
        runtime = started(config)
        runtime.meet()
    except BaseException:
        close_draft(sources.draft)
        raise
    ranks.on_loaded()
    return runtime


def forget(draft: Draft) -> None:
    """Let drafts forget what they learned from requests; no slot has one."""
    for each in having(draft, Learner):
        each.forget()


def load_target(
    model: str | Path | nn.Module,
    draft: Draft,
    config: EngineConfig,
    adapter: Path | None = None,
    ranks: Ranks | None = None,
) -> Executor:
    """Load the target with its pools, and create slot state, rings and rounds; the draft is opened later."""
    device = config.machine.device
    options = ModelOptions(
        max_len=config.max_len,
        num_pages=config.num_pages,
        page_size=config.page_size,
        dtype=config.dtype,
        device=device,
        kv_dtype=config.kv_dtype,
        draft_prefixes=config.needs.tensor_prefixes,
        feature_layers=config.needs.feature_layers,
        adapter=adapter,
        window_pages=dict(config.pages.windows),
        num_slots=config.num_slots,
        num_snapshots=config.num_snapshots,
        max_nodes=config.needs.num_nodes,
        accept_width=config.needs.accept_width,
        shard=WHOLE if ranks is None else ranks.shard,
        reduction=LOCAL if ranks is None else ranks.reduction,
    )
    target = open_language_model(model, options, config.implementation)
    check_windows(target, config.pages)
    state = EngineState.create(
        num_slots=config.num_slots,
        vocab_size=target.lm_head.out_features,
        hidden_size=target.hidden_size,
        num_features=len(config.needs.feature_layers) * target.config.hidden_size,
        dtype=config.dtype,
        max_len=config.max_len,
        max_stop_tokens=MAX_STOP_TOKENS,
        num_pages=config.num_pages,
        max_pages=config.max_pages,
        page_size=config.page_size,
        prefix_cache=config.prefix_cache,
        fixed_split=config.fixed_split,
        device=device,
        window=config.pages.window,
        window_pages={
            window: most
            for window, most in config.pages.windows
            if window in target.pools.window_pages or window in config.needs.kv_windows
        },
    )
    width = config.needs.accept_width
    rings = Rings.create(
        state,
        max_batch=config.num_slots,
        accept_width=width,
        num_levels=config.num_levels,
        top_n=config.top_n,
        depth=RING_DEPTH,
    )
    masks = None
    if config.grammars:
        most_rows, vocab = max(map(max, config.rows)), target.lm_head.out_features
        masks = TreeMasks(config.num_slots, most_rows, config.needs.num_nodes, vocab, device)
    budget_levels = dict(zip(config.batch_sizes, config.rows, strict=True))
    round = Round(
        target,
        draft,
        state,
        rings,
        reserve=config.reserve,
        needs=config.needs,
        budget_levels=budget_levels,
        masks=masks,
    )
    return Executor(round, config.prefill_chunk)


def check_windows(target: LanguageModel, pages: PagePlan) -> None:
    """Raise ValueError if a layer sees rows whose pages would be given back."""
    for group in target.pools.groups:
        sees, kept = group.layout.window, pages.window
        if group.window is None and kept is not None and (sees is None or sees > kept):
            raise ValueError(
                f"model: layer {group.layers[0]} has window={sees}, expected at most {kept} (by the family's `window`)"
            )


def size_pools(
    executor: Executor, config: EngineConfig, started: Callable[[EngineConfig], RankRuntime]
) -> EngineConfig:
    """Resize the pools to what `mem_fraction` leaves next to a trial run with pools of one request.

    Ranks have as many pages as fit on each of them.
    """
    assert config.mem_fraction is not None
    trial = started(config)
    with on_stream(trial.stream):
        fitting = pages_that_fit(executor, config.mem_fraction, config.prefill_chunk)
    if trial.ranks is not None:
        fitting = trial.ranks.least(fitting)
    del trial
    executor.passes.captured.clear()
    torch.cuda.empty_cache()
    if fitting < config.pages.of_slot:
        raise ValueError(
            f"Engine: mem_fraction is {config.mem_fraction}, which leaves room for {fitting} pages, "
            f"expected at least {config.pages.of_slot} (one request of max_len={config.max_len} tokens)"
        )
    num_pages = min(fitting, config.num_slots * config.pages.of_slot)
    executor.state.resize_pool(num_pages)
    executor.target.resize_pools(num_pages)
    resize_pools(executor.draft, num_pages)
    return dataclasses.replace(config, num_pages=num_pages)


def capture_all(
    executor: Executor, config: EngineConfig, stream: torch.cuda.Stream | None, progress: bool
) -> Graphs | None:
    """Capture rounds and prefill passes as CUDA graphs, if they are to be; on the engine's stream."""
    if not config.captures:
        return None
    assert stream is not None
    shapes = captured_shapes(config.prefill_chunk, config.num_slots, config.max_len)
    passes, round = executor.passes, executor.round
    try:
        return capture(round, config.round_sizes, passes, shapes, stream, progress=progress)
    except RuntimeError as error:
        if config.implementation == "native":
            raise
        # Modules of transformers may read device values, which a graph cannot: launch them call by call.
        torch.cuda.synchronize(stream.device)
        passes.captured.clear()
        round.reset()
        executor.not_captured = str(error).partition("\n")[0]
        return None


def scheduler_sizes(executor: Executor, config: EngineConfig) -> _C.SchedulerConfig:
    """Return the sizes that the scheduler works with."""
    round = executor.round
    return _C.SchedulerConfig(
        num_slots=config.num_slots,
        num_pages=config.num_pages,
        page_size=config.page_size,
        window=config.pages.window or 0,
        vocab_size=executor.target.config.vocab_size,
        max_len=config.max_len,
        reserve=config.reserve,
        accept_width=config.needs.accept_width,
        max_stops=MAX_STOP_TOKENS,
        max_logprobs=config.top_n,
        prefill_chunk=config.prefill_chunk,
        prefill_requests=config.prefill_requests,
        rounds_in_flight=config.rounds_in_flight,
        draft_can_idle=config.needs.max_idle_rounds > 0,
        prefix_cache=config.prefix_cache,
        num_snapshots=config.num_snapshots,
        snapshot_pages=config.snapshot_pages,
        lookahead=max(config.needs.lookahead, 1),
        batch_sizes=config.batch_sizes,
        rows=config.rows,
        drafted=[round.level_limits[batch] for batch in config.batch_sizes],
        plain_rounds=config.plain_rounds,
        max_idle_rounds=config.max_idle_rounds,
    )


def make_scheduler(
    executor: Executor,
    config: EngineConfig,
    stream: torch.cuda.Stream | None,
    graphs: Graphs | None,
    trace: bool,
    ranks: Ranks | None = None,
) -> _C.Scheduler:
    """Make the scheduler. With other ranks, its calls are recorded for them."""
    rings = executor.round.rings
    return _C.Scheduler(
        executor if ranks is None else RecordingExecutor(executor, ranks),
        scheduler_sizes(executor, config),
        commands=rings.commands,
        results=rings.results,
        stream=stream.cuda_stream if stream else None,
        graphs=graphs.raw() if graphs else {},
        trace=trace,
        channel=None if ranks is None else ranks.channel,
    )


def make_replayer(
    executor: Executor, config: EngineConfig, stream: torch.cuda.Stream | None, graphs: Graphs | None, ranks: Ranks
) -> _C.Replayer:
    """Make what launches, on another rank, the rounds that rank 0 launches."""
    rings = executor.round.rings
    return _C.Replayer(
        executor,
        ranks.channel,
        scheduler_sizes(executor, config),
        commands=rings.commands,
        results=rings.results,
        stream=stream.cuda_stream if stream else None,
        graphs=graphs.raw() if graphs else {},
    )


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log a line about work that takes longer than some seconds, so that nobody takes it for a hang."""
    timer = Timer(SECONDS_OF_SILENCE, logger.warning, (f"specdec_kernels: {what}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enter the engine's device and stream.

    Work launched inside waits for earlier work of the caller's stream, and later work of the caller's stream waits for
    it.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device):
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)
