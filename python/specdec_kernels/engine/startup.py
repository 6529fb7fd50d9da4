"""Startup of an engine: load the models, size the pools, capture CUDA graphs, create the scheduler."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
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
from ..models.options import ModelOptions
from .config import MAX_STOP_TOKENS, EngineConfig, PagePlan
from .device.executor import Executor
from .device.grammar_masks import TreeMasks
from .device.graphs import Graphs, capture
from .device.memory import pages_that_fit
from .device.prefill_graphs import captured_shapes
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
class Runtime:
    """What an engine runs on. `graphs` is None where rounds are launched call by call, and while the engine sleeps."""

    config: EngineConfig
    executor: Executor
    stream: torch.cuda.Stream | None
    graphs: Graphs | None
    scheduler: _C.Scheduler


def open_runtime(
    model: str | Path | nn.Module,
    draft: Draft,
    config: EngineConfig,
    *,
    adapter: Path | None,
    tokenizer: Any,
    no_tokenizer: str,
    calibrations: Sequence[dict[str, Any] | None],
    costs: _C.RoundCosts | None,
    trace: bool,
    progress: bool,
) -> Runtime:
    """Load target and draft, and create what their rounds need. On failure, close the draft again.

    Args:
        model: the target, as for `Engine`.
        draft: what to open for it.
        config: resolved options.
        adapter: folder of a LoRA to merge into the target.
        tokenizer: of the target; None: there is none, for the reason `no_tokenizer`.
        no_tokenizer: that reason, for errors.
        calibrations: that the draft's models start with (`calibrations_for`).
        costs: of rounds, if known; else they are measured.
        trace: whether rounds record their times.
        progress: whether to show progress bars.
    """
    executor = load_target(model, draft, config, adapter)
    round = executor.round
    try:
        catches_up = config.max_idle_rounds > 0
        context = DraftContext(round.target, round.state, config.max_len, catches_up, tokenizer, no_tokenizer)
        open_draft(draft, context)
        device = config.machine.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if config.mem_fraction is not None:
            assert stream is not None
            config = size_pools(executor, config, stream, trace, progress)
        graphs, scheduler = start(executor, config, stream, trace, progress)
        with on_stream(stream):
            if config.num_levels > 0 and costs is not None:
                scheduler.set_costs(costs)
            elif config.num_levels > 0:
                rows_of = dict(zip(config.batch_sizes, config.rows, strict=True))
                num_sizes = sum(len(rows_of[size]) for size in config.measured_sizes)
                with announced(f"timing rounds of {num_sizes} sizes; Engine.tuning keeps the times for the next start"):
                    scheduler.measure_rounds(list(config.measured_sizes))
                for each in having(draft, Learner):
                    each.forget()
            calibrate(draft, calibrations)
    except BaseException:
        close_draft(draft)
        raise
    return Runtime(config, executor, stream, graphs, scheduler)


def load_target(
    model: str | Path | nn.Module, draft: Draft, config: EngineConfig, adapter: Path | None = None
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
        window_pages=target.pools.window_pages,
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
    executor: Executor, config: EngineConfig, stream: torch.cuda.Stream, trace: bool, progress: bool
) -> EngineConfig:
    """Resize the pools to what `mem_fraction` leaves, measured in a trial run with pools of one request."""
    trial = start(executor, config, stream, trace, progress)
    assert config.mem_fraction is not None
    with on_stream(stream):
        fitting = pages_that_fit(executor, config.mem_fraction, config.prefill_chunk)
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


def start(
    executor: Executor, config: EngineConfig, stream: torch.cuda.Stream | None, trace: bool, progress: bool
) -> tuple[Graphs | None, _C.Scheduler]:
    """Capture rounds and prefill passes, if they are to be, and create the scheduler that launches them."""
    with on_stream(stream):
        graphs = capture_all(executor, config, stream, progress)
        return graphs, make_scheduler(executor, config, stream, graphs, trace)


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


def make_scheduler(
    executor: Executor, config: EngineConfig, stream: torch.cuda.Stream | None, graphs: Graphs | None, trace: bool
) -> _C.Scheduler:
    """Make the scheduler, with its sizes by name, and check them."""
    round, rings = executor.round, executor.round.rings
    sizes = _C.SchedulerConfig(
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
    return _C.Scheduler(
        executor,
        sizes,
        commands=rings.commands,
        results=rings.results,
        stream=stream.cuda_stream if stream else None,
        graphs=graphs.raw() if graphs else {},
        trace=trace,
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
