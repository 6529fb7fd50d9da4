"""Sizes of an engine: all defaults resolved and all options checked, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _C
from ..models.backends.select import implementation_of, windows_of
from ..models.families import family_of, kv_numbers, position_limit
from ..models.shard import WHOLE, Shard
from ..models.state_cache import MOST_TREE_NODES, StateSpec, bytes_of
from ..models.weights.kv_scales import kv_dtype_of
from ..models.weights.loading import DTYPES
from ..plans import Gpu
from .device.graphs import RoundSize, default_batch_sizes
from .device.kv_buckets import kv_bounds
from .device.round import most_nodes
from .drafts import AttentionCall, Draft, Needs
from .drafts.base import has_equal_shares
from .options import RING_DEPTH, EngineOptions
from .params import MAX_LOGPROBS

MAX_STOP_TOKENS = 16
INVARIANT_SPLIT = 1024  # rows of KV
MOST_NODES = 65536  # of a round, among which `allocate_nodes` chooses


class Machine(NamedTuple):
    """The machine that an engine's sizes must fit."""

    device: torch.device
    num_bytes: int  # total memory of the device
    gpu: Gpu | None = None  # None: a CPU

    @classmethod
    def of(cls, device: str | torch.device | None) -> Machine:
        """Return the machine of a device; None: that of `default_device`.

        Raises:
            ValueError: a device that does not exist, or that this build has no kernels for.
        """
        if device is None:
            device = default_device()
        try:
            device = torch.device(device)
        except RuntimeError:  # torch lists the backends of all accelerators
            raise ValueError(f"Engine: device is {device}, expected cpu or cuda") from None
        if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
            raise ValueError(f"Engine: device is {device}, expected cpu or cuda")
        if device.type == "cpu":
            return cls(device, host_bytes())
        if not torch.cuda.is_available():
            raise ValueError(f"Engine: device is {device}, expected cpu (torch finds no GPU)")
        if _C.cuda_version is None:
            raise ValueError(
                f"Engine: device is {device}, expected cpu (this build of specdec_kernels has no CUDA half)"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"Engine: device is {device}, expected one of {torch.cuda.device_count()} GPUs")
        with torch.cuda.device(device):
            return cls(device, torch.cuda.mem_get_info(device)[1], Gpu(**_C.current_gpu()))


def default_device() -> torch.device:
    """Return CUDA if torch finds a GPU and this build has CUDA kernels, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and _C.cuda_version else "cpu")


def host_bytes() -> int:
    """Return the memory of the host in bytes, or the limit of the container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


class PagePlan(NamedTuple):
    """Page tables of an engine: one shared by most layers, and one for each shorter sliding window.

    A window counts only if it is so short that a slot never holds the pages of a sequence of `max_len` in full.

    Attributes:
        window: of the first table; its layers see no row further back. None: a layer sees all rows.
        of_slot: pages of the first table that a slot holds at most.
        windows: of the other tables, increasing: the window, and the pages that all slots together hold at most.
    """

    window: int | None
    of_slot: int
    windows: tuple[tuple[int, int], ...]

    @property
    def gives_back(self) -> bool:
        """Return whether pages of any layer are given back as a sequence grows."""
        return self.window is not None or bool(self.windows)

    @classmethod
    def of(cls, windows: set[int | None], ahead: int, max_pages: int, page_size: int, num_slots: int) -> PagePlan:
        """Return the plan for layers with these windows, and slots with pages for `ahead` rows after their text."""

        def held(window: int) -> int:
            # Whole pages; the first and the last may be used in part.
            return -(-(window + ahead) // page_size) + 1

        short = sorted(window for window in windows if window is not None and held(window) < max_pages)
        widest = None if len(short) < len(windows) else short.pop()
        of_slot = max_pages if widest is None else held(widest)
        return cls(widest, of_slot, tuple((window, num_slots * held(window)) for window in short))


@dataclass(frozen=True)
class EngineConfig:
    """All sizes of an engine.

    Attributes:
        machine: where it runs. dtype, kv_dtype: of weights and of the target's KV.
        needs: of the draft.
        max_len: longest sequence in tokens, prompt included. num_slots: requests that run at the same time.
        page_size: KV rows per page. max_pages: entries of a slot's page table. num_pages: pages of the pool; with
            `mem_fraction`, those of the trial run at startup.
        pages: page tables, and which of them give back pages as sequences grow.
        mem_fraction: fraction of the device's memory to take; None: what `num_pages` takes.
        reserve: KV rows after the L committed ones that a round may write (docs/round.md).
        prefill_chunk, prefill_requests: most rows, and most prompts, of a prefill pass.
        captures: rounds and prefill passes are CUDA graphs.
        batch_sizes: of rounds, increasing, up to num_slots. measured_sizes: those whose costs are measured at startup.
        rows: for each batch size the budget levels (nodes verified in total), increasing; more than one if adaptive.
        plain_rounds: a round whose requests all refuse drafts has one node each, whatever `rows` lists.
        max_idle_rounds: rounds for which a slot's draft may be idle before it has to catch up; 0: it is never idle, or
            need not catch up.
        round_sizes: captured rounds: each batch size with each number of rows, for each range of KV lengths with its
            own attention plan, and the passes in which drafts catch up.
        rounds_in_flight: rounds launched and not yet read.
        prefix_cache: requests reuse the pages of others with the same prefix.
        num_snapshots: recurrent states of prefixes that the cache keeps; 0: the target has none, or there is no cache.
        snapshot_pages: of a prompt between two snapshots, its last whole page excepted.
        fixed_split: rows at which attention splits KV, whatever the batch; None: where it is fastest.
        calibrates: drafts learn from acceptance how likely their candidates are.
        top_n: most likely tokens scored next to each token, at most.
        implementation: of the target, "native" or "transformers".
        grammars: requests may have a grammar.
        state_bytes: of the recurrent states of all slots and snapshots, and of what the slots record of trees.
    """

    machine: Machine
    dtype: torch.dtype
    kv_dtype: torch.dtype
    needs: Needs
    max_len: int
    num_slots: int
    page_size: int
    max_pages: int
    num_pages: int
    pages: PagePlan
    mem_fraction: float | None
    reserve: int
    prefill_chunk: int
    prefill_requests: int
    captures: bool
    batch_sizes: tuple[int, ...]
    measured_sizes: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    plain_rounds: bool
    max_idle_rounds: int
    round_sizes: tuple[RoundSize, ...]
    rounds_in_flight: int
    prefix_cache: bool
    num_snapshots: int
    snapshot_pages: int
    fixed_split: int | None
    calibrates: bool
    top_n: int
    implementation: str
    grammars: bool
    state_bytes: int

    @classmethod
    def resolve(
        cls, model: Any, draft: Draft, machine: Machine, options: EngineOptions, shard: Shard = WHOLE
    ) -> EngineConfig:
        """Resolve the options of an engine for a target with this config. Allocate nothing, read no weights.

        Args:
            model: the target's config (`PretrainedConfig`).
            draft: whose needs the engine meets.
            machine: the device and its memory.
            options: what the user asks for; None entries are chosen here.
            shard: the share of the target that the machine holds.

        Raises:
            ValueError: options that the model, the draft or the device rules out; a pool that cannot hold one request;
                sizes that exceed the machine's memory.
            Exception: what `draft.needs` raises.
        """
        on_cuda = machine.device.type == "cuda"
        captures = on_cuda and options.cuda_graph
        check_batch_invariant(model, draft, options)
        check_cacheable(draft, bool(options.prefix_cache))
        max_len = options.max_len or min(2048, position_limit(model) or 2048)
        dtype = options.dtype or (model.dtype or torch.bfloat16 if on_cuda else torch.float32)
        check_dtype(dtype)
        implementation = implementation_of(model, max_len, options.implementation)
        kv_dtype = kv_dtype_of(options.kv_dtype, dtype)
        needs = checked_needs(draft, model)
        states = state_specs_of_model(shard.config(model), implementation, dtype)
        check_recurrent(model, states, needs, options)
        reserve = max(needs.num_nodes, needs.accept_width, needs.scratch_rows) + 1
        max_pages = -(-(max_len + reserve) // options.page_size)
        can_cache = draft.cacheable and (not states or options.num_snapshots != 0)
        pages, prefix_cache = page_plan_of(model, implementation, can_cache, needs, options, max_pages, reserve)
        num_snapshots = 0
        if states and prefix_cache:
            num_snapshots = options.num_slots if options.num_snapshots is None else options.num_snapshots
        num_pages = num_pages_of(options, machine, pages, max_len, reserve)
        adaptive, equal = is_adaptive(options, draft, captures, on_cuda), has_equal_shares(draft, needs)
        largest = options.num_slots
        config = cls(
            machine=machine,
            dtype=dtype,
            kv_dtype=kv_dtype,
            needs=needs,
            max_len=max_len,
            num_slots=options.num_slots,
            page_size=options.page_size,
            max_pages=max_pages,
            num_pages=num_pages,
            pages=pages,
            mem_fraction=options.mem_fraction,
            reserve=reserve,
            prefill_chunk=options.prefill_chunk,
            prefill_requests=1 if options.batch_invariant else options.num_slots,
            captures=captures,
            batch_sizes=(largest,),
            measured_sizes=(largest,),
            rows=(budget_levels(largest, needs.num_nodes, adaptive, equal),),
            plain_rounds=not options.batch_invariant,
            max_idle_rounds=needs.max_idle_rounds if adaptive and needs.num_nodes > 1 else 0,
            round_sizes=(),
            rounds_in_flight=options.rounds_in_flight or (2 if on_cuda else 1),
            prefix_cache=prefix_cache,
            num_snapshots=num_snapshots,
            snapshot_pages=min(max(options.snapshot_rows // options.page_size, 1), max_pages),
            fixed_split=INVARIANT_SPLIT if options.batch_invariant else None,
            calibrates=options.calibrate and not options.batch_invariant,
            top_n=min(MAX_LOGPROBS, model.vocab_size),
            implementation=implementation,
            grammars=options.grammars,
            state_bytes=sum(
                bytes_of(spec, options.num_slots, needs.num_nodes) + num_snapshots * spec.nbytes for spec in states
            ),
        )
        share = shard.config(model)
        check_memory(config, share)  # before sizes are listed that may be too many for a list
        check_num_nodes(options.num_slots, needs.num_nodes)
        batch_sizes = batch_sizes_of(options, captures)
        config = replace(
            config,
            batch_sizes=batch_sizes,
            # A CPU runs all batch sizes, and timing all of them would take long.
            measured_sizes=batch_sizes if on_cuda else tuple(sorted({batch_sizes[0], largest})),
            rows=tuple(budget_levels(batch, needs.num_nodes, adaptive, equal) for batch in batch_sizes),
        )
        return replace(config, round_sizes=round_sizes_of(config, share, draft)) if captures else config

    @property
    def all_rows(self) -> list[list[int]]:
        """Return the node counts that rounds of each batch size may verify, including those of plain rounds."""
        pairs = zip(self.batch_sizes, self.rows, strict=True)
        return [sorted({*([batch] if self.plain_rounds else []), *each}) for batch, each in pairs]

    @property
    def num_levels(self) -> int:
        """Return the number of budget levels of the largest batch; 0 if there is nothing to choose."""
        return len(self.rows[-1]) if len(self.rows[-1]) > 1 else 0


def checked_needs(draft: Draft, model: Any) -> Needs:
    """Return what the draft needs of the engine; raise ValueError for needs that no engine over this target meets."""
    needs = draft.needs(model)
    name = f"Engine: draft ({type(draft).__name__}) needs"
    for need in ("num_nodes", "accept_width"):
        if not 1 <= getattr(needs, need) <= 256:
            raise ValueError(f"{name} {need}={getattr(needs, need)}, expected 1 to 256")
    for need in ("scratch_rows", "kv_numbers", "max_idle_rounds"):
        if getattr(needs, need) < 0:
            raise ValueError(f"{name} {need}={getattr(needs, need)}, expected 0 or more")
    if "" in needs.tensor_prefixes:
        raise ValueError(f"{name} tensor_prefixes={needs.tensor_prefixes}, expected prefixes that are not empty")
    num_layers = model.num_hidden_layers
    if not all(0 <= layer <= num_layers for layer in needs.feature_layers):
        raise ValueError(f"{name} feature_layers={needs.feature_layers}, expected 0 to {num_layers} (the target's)")
    return needs


def page_plan_of(
    model: Any, implementation: str, can_cache: bool, needs: Needs, options: EngineOptions, max_pages: int, reserve: int
) -> tuple[PagePlan, bool]:
    """Return the page tables of the engine, and whether it has a prefix cache."""
    keeps_all: set[int | None] = {None}
    windows = windows_of(model, implementation)
    of_draft = set(needs.kv_windows) if needs.kv_numbers > 0 else set()
    sizes = max(options.prefill_chunk, reserve), max_pages, options.page_size, options.num_slots
    pages = PagePlan.of(windows | of_draft, *sizes)
    prefix_cache = options.prefix_cache
    if prefix_cache is None:  # windows of the draft alone are not worth giving up the cache
        of_target = PagePlan.of(windows | (keeps_all if of_draft else set()), *sizes)
        prefix_cache = not options.batch_invariant and can_cache and not of_target.gives_back
    if prefix_cache:  # a cached page serves requests that see other rows of it: no page below a window is given back
        pages = PagePlan.of(keeps_all, *sizes)
    return pages, prefix_cache


def num_pages_of(options: EngineOptions, machine: Machine, pages: PagePlan, max_len: int, reserve: int) -> int:
    """Return the pages of the pool; with `mem_fraction`, those of one slot, with which the engine is tried out."""
    if options.mem_fraction is not None:
        if machine.device.type != "cuda":
            raise ValueError(
                f"Engine: mem_fraction is {options.mem_fraction}, expected None (device is {machine.device})"
            )
        return pages.of_slot
    if options.num_pages is None:
        return options.num_slots * pages.of_slot
    if options.num_pages < pages.of_slot:
        fits = f"one request of max_len={max_len} tokens and the {reserve} rows of a round"
        if pages.window is not None:
            ahead = max(options.prefill_chunk, reserve)
            fits = f"a window of {pages.window} rows of one request and {ahead} rows more"
        raise ValueError(
            f"Engine: num_pages is {options.num_pages}, expected at least {pages.of_slot} ({fits} must fit)"
        )
    return options.num_pages


def is_adaptive(options: EngineOptions, draft: Draft, captures: bool, on_cuda: bool) -> bool:
    """Return whether rounds choose how many nodes to verify."""
    if options.adaptive is not None:
        return options.adaptive
    return (captures or not on_cuda) and not options.batch_invariant and not draft.sampled


def batch_sizes_of(options: EngineOptions, captures: bool) -> tuple[int, ...]:
    """Return the batch sizes of rounds, increasing, up to `num_slots`."""
    if options.batch_sizes is not None:
        return tuple(options.batch_sizes)
    if options.batch_invariant:
        return (options.num_slots,)
    return tuple(default_batch_sizes(options.num_slots) if captures else range(1, options.num_slots + 1))


def round_sizes_of(config: EngineConfig, model: Any, draft: Draft) -> tuple[RoundSize, ...]:
    """Return the rounds to capture.

    For each batch size: a first round, a catch-up pass if drafts can be idle, and each number of rows, once for each
    range of KV lengths with its own attention plan.
    """
    sizes = []
    for batch, rows in zip(config.batch_sizes, config.all_rows, strict=True):
        catch_up = [_C.CATCH_UP] if config.max_idle_rounds else []
        for num_rows in (_C.FIRST_ROUND, *catch_up, *rows):
            bounds = kv_bounds_of(config, model, draft, batch, num_rows)
            sizes += [RoundSize(batch, num_rows, max_kv_len) for max_kv_len in bounds]
    return tuple(sizes)


def kv_bounds_of(config: EngineConfig, model: Any, draft: Draft, batch: int, num_rows: int) -> tuple[int, ...]:
    """Return the KV lengths for which a round of this size is captured, increasing."""
    longest = config.max_len + config.reserve
    if config.machine.gpu is None or config.fixed_split or num_rows in (_C.CATCH_UP, _C.FIRST_ROUND):
        return (longest,)
    calls = AttentionCall.of(model, None, True), *config.needs.attention
    return kv_bounds(
        calls,
        batch,
        num_rows,
        most_nodes(batch, num_rows, config.needs, equal=has_equal_shares(draft, config.needs)),
        longest,
        config.machine.gpu,
        page_size=config.page_size,
        fp8=config.kv_dtype.itemsize == 1,
        tensor_cores=config.dtype.itemsize == 2,
    )


def budget_levels(batch: int, num_nodes: int, adaptive: bool = True, equal: bool = False) -> tuple[int, ...]:
    """Return how many nodes rounds of this batch size may verify, in increasing order.

    All of them or, if rounds are adaptive, 1 per request (plain decoding), then 1.5, 2, 3, 4, 6, ... times as many, in
    whole numbers. A level is at most 1.5 times the one before, except for 1 and 2 of a single request. With `equal` all
    requests have the same number, so 2 follows 1.
    """
    most = batch * num_nodes
    if not adaptive:
        return (most,)
    halves = [2, *(half << power for power in range(8) for half in (3, 4) if not (equal and half << power == 3))]
    levels = sorted({rows for half in halves if (rows := batch * half // 2) < most})
    if len(levels) > 1 and 3 * levels[-2] >= 2 * most:
        levels.pop()
    return (*levels, most)


def result_words(config: EngineConfig) -> int:
    """Return the words of a record of results."""
    return _C.result_words(config.num_slots, config.needs.accept_width, config.num_levels, config.top_n)


def ring_bytes(num_slots: int, accept_width: int, num_levels: int, top_n: int) -> int:
    """Return the bytes of both rings. C++ writes their records, and counts their words."""
    words = _C.command_words(num_slots, num_slots, MAX_STOP_TOKENS)
    words += _C.result_words(num_slots, accept_width, num_levels, top_n)
    return 4 * RING_DEPTH * words


# --- checks


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that weights cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"Engine: dtype is {dtype}, expected one of {', '.join(map(str, DTYPES))}")


def check_batch_invariant(model: Any, draft: Draft, options: EngineOptions) -> None:
    """Raise ValueError for a model or a draft that a batch-invariant engine cannot have."""
    if not options.batch_invariant:
        return
    if hasattr(model, "num_experts_per_tok"):
        raise ValueError(
            f"Engine: batch_invariant is set, expected not with {model.model_type}, "
            "whose experts multiply the rows of several requests together"
        )
    if draft.reads_others:
        raise ValueError(
            f"Engine: batch_invariant is set, expected not with {type(draft).__name__}, "
            "whose drafts depend on what other requests said"
        )


def check_cacheable(draft: Draft, prefix_cache: bool) -> None:
    """Raise ValueError for a prefix cache with a draft that cannot reuse rows."""
    if prefix_cache and not draft.cacheable:
        raise ValueError(
            f"Engine: prefix_cache is set, expected not with {type(draft).__name__}, "
            "which keeps more of a prompt than the rows of its pools"
        )


def state_specs_of_model(model: Any, implementation: str, dtype: torch.dtype) -> list[StateSpec]:
    """Return what each layer of the target with a recurrent state keeps."""
    return family_of(model).state_specs(dtype) if implementation == "native" else []


def check_recurrent(model: Any, states: Sequence[StateSpec], needs: Needs, options: EngineOptions) -> None:
    """Raise ValueError for options that a target with recurrent states cannot have."""
    if not states:
        return
    if needs.num_nodes > MOST_TREE_NODES:
        raise ValueError(
            f"Engine: draft has num_nodes={needs.num_nodes}, expected at most {MOST_TREE_NODES} "
            f"({model.model_type} has layers with a recurrent state)"
        )
    if options.prefix_cache and options.num_snapshots == 0:
        raise ValueError(
            f"Engine: num_snapshots is 0, expected at least 1 with prefix_cache "
            f"({model.model_type} has layers with a recurrent state)"
        )


def check_num_nodes(num_slots: int, num_nodes: int) -> None:
    """Raise ValueError for rounds with more nodes than `allocate_nodes` takes."""
    if num_slots * num_nodes > MOST_NODES:
        raise ValueError(
            f"Engine: num_slots is {num_slots}, expected at most {MOST_NODES // num_nodes} "
            f"(trees of {num_nodes} nodes; a round has {MOST_NODES} at most)"
        )


def check_memory(config: EngineConfig, model: Any) -> None:
    """Raise ValueError for sizes that exceed all memory of the machine, weights not counted."""
    parts, machine = memory_of(config, model), config.machine
    total = sum(parts.values())
    if total <= machine.num_bytes:
        return
    shares = ", ".join(f"{name} {gigabytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    raise ValueError(
        f"Engine: num_slots is {config.num_slots} (max_len={config.max_len}, num_pages={config.num_pages}), which "
        f"takes {gigabytes(total)} ({shares}), expected at most the {gigabytes(machine.num_bytes)} of {machine.device}"
    )


def memory_of(config: EngineConfig, model: Any) -> dict[str, int]:
    """Return a lower bound in bytes of what an engine allocates besides weights, by part.

    It is a lower bound because a draft may have wider KV than the target, and not all layers have the shortest window.
    """
    needs, pages, num_slots = config.needs, config.pages, config.num_slots
    fewest = min([config.num_pages, *(most for _, most in pages.windows)])
    num_layers = model.num_hidden_layers
    if config.implementation == "native":
        num_layers = family_of(model).num_kv_layers
    of_draft = config.num_pages if set(needs.kv_windows) == {None} else fewest
    row_elements = of_draft * needs.kv_numbers + fewest * kv_numbers(model, num_layers)
    num_nodes = num_slots * needs.num_nodes
    slot_words = config.max_pages * (1 + len(pages.windows)) + MAX_STOP_TOKENS + 2 * model.vocab_size
    features = (1 + config.max_idle_rounds) * len(needs.feature_layers) * model.hidden_size * config.dtype.itemsize
    rings = ring_bytes(num_slots, needs.accept_width, config.num_levels, config.top_n)
    return {
        "states": config.state_bytes,
        "KV": config.page_size * row_elements * config.kv_dtype.itemsize,
        "logits": num_nodes * model.vocab_size * config.dtype.itemsize,
        "masks": num_nodes * -(-model.vocab_size // 32) * 4 if config.grammars else 0,
        "slots": num_slots * (4 * slot_words + features) + rings,
    }


def gigabytes(num_bytes: int) -> str:
    """Return the bytes in GB, with one decimal."""
    return f"{num_bytes / 1e9:.1f} GB"
