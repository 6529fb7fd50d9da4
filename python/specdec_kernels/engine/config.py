"""What an engine is made with: every default resolved and every option checked, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _C
from ..models.families import kv_numbers, position_limit
from ..models.language_model import implementation_of, windows_of
from ..models.weights.kv_scales import kv_dtype_of
from ..models.weights.loading import DTYPES
from ..plans import Gpu
from .device.graphs import RoundSize, default_batch_sizes
from .device.kv_buckets import AttentionCall, kv_bounds
from .device.round import most_nodes
from .drafts import Draft, Needs
from .params import MAX_LOGPROBS

MAX_STOP_TOKENS = 16
INVARIANT_SPLIT = 1024  # rows of KV
MOST_NODES = 65536  # of a round, among which `allocate_nodes` chooses
RING_DEPTH = 16  # records of commands, which the loop may be ahead of the device, and of results


class Machine(NamedTuple):
    """What an engine's sizes are held to."""

    device: torch.device
    num_bytes: int  # of its memory, all of it
    gpu: Gpu | None = None  # None: a CPU

    @classmethod
    def of(cls, device: str | torch.device | None) -> Machine:
        """That of a device; None: CUDA where torch has it and this build has kernels, else the CPU.

        Raises:
            ValueError: a device that there is none of.
        """
        if device is None:
            device = default_device()
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"Engine: device is {device}, expected cpu or cuda")
        if device.type == "cpu":
            return cls(device, host_bytes())
        if not torch.cuda.is_available():
            raise ValueError(f"Engine: device is {device}, expected cpu (torch finds no GPU)")
        if _C.cuda_version is None:
            raise ValueError(
                f"Engine: device is {device}, expected cpu (this build of specdec_kernels has no CUDA half)"
            )
        with torch.cuda.device(device):
            return cls(device, torch.cuda.mem_get_info(device)[1], Gpu(*_C.current_gpu()))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and _C.cuda_version else "cpu")


def host_bytes() -> int:
    """The memory of the host, or what a container may have of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


class PagePlan(NamedTuple):
    """The page tables of an engine: one of all layers, and where windows differ one for each of the shorter ones.

    A window counts where it is so much shorter than the longest text that a slot never holds all pages of one.

    Attributes:
        window: behind which no layer of the first table sees; None: one sees all.
        of_slot: pages of the first table that a slot holds at most.
        windows: of the other tables, rising, and the most pages that slots hold in each together.
    """

    window: int | None
    of_slot: int
    windows: tuple[tuple[int, int], ...]

    @property
    def gives_back(self) -> bool:
        """Whether any layer's pages are given back as a text grows."""
        return self.window is not None or bool(self.windows)

    @classmethod
    def of(cls, windows: set[int | None], ahead: int, max_pages: int, page_size: int, num_slots: int) -> PagePlan:
        """For layers with these windows, and slots that have pages for `ahead` rows behind their text at most."""

        def held(window: int) -> int:
            # Whole pages, of which the first one and the last one may be used in part.
            return -(-(window + ahead) // page_size) + 1

        short = sorted(window for window in windows if window is not None and held(window) < max_pages)
        widest = None if len(short) < len(windows) else short.pop()
        of_slot = max_pages if widest is None else held(widest)
        return cls(widest, of_slot, tuple((window, num_slots * held(window)) for window in short))


@dataclass(frozen=True)
class EngineConfig:
    """All numbers of an engine.

    Attributes:
        machine: where it runs. dtype, kv_dtype: of weights and of the target's KV.
        needs: of the draft.
        max_len: longest sequence, prompt included. num_slots: requests that run at once.
        page_size: KV rows per page. max_pages: of a slot's page table. num_pages: of the pool; with `mem_fraction`, of
            the one that the engine is tried out with.
        pages: which page tables there are beside, and what is given back as texts grow.
        mem_fraction: share of the device's memory to take; None: what `num_pages` takes.
        reserve: KV rows behind L that a round may write (docs/round.md).
        prefill_chunk, prefill_requests: most rows, and most prompts, of a prefill pass.
        captures: rounds and passes are CUDA graphs.
        batch_sizes: of rounds, rising up to num_slots. measured_sizes: of these, whose costs are measured.
        rows: of each batch size the nodes that its rounds verify in all, rising; several: the engine is adaptive.
        plain_rounds: a round whose requests all want no drafts has a node for each, whatever `rows` has.
        max_idle_rounds: rounds for which a slot's draft may be idle before it has to catch up; 0: it is never idle, or
            need not catch up.
        round_sizes: of the captured rounds: each batch size with each number of rows, for KV of several lengths where
            attention runs other plans for them; and without rows, where a draft catches up.
        rounds_in_flight: launched and not yet read.
        prefix_cache: pages of requests serve others whose texts begin alike.
        fixed_split: rows at which attention cuts KV whatever runs beside it; None: where it is fastest.
        top_n: most best entries scored beside a token.
        implementation: of the target, "native" or "transformers".
        grammars: requests may have one.
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
    fixed_split: int | None
    top_n: int
    implementation: str
    grammars: bool

    @classmethod
    def resolve(
        cls,
        model: Any,
        draft: Draft,
        machine: Machine,
        *,
        adaptive: bool | None = None,
        max_len: int | None = None,
        num_slots: int = 8,
        num_pages: int | None = None,
        mem_fraction: float | None = None,
        page_size: int = 16,
        prefill_chunk: int = 2048,
        dtype: torch.dtype | None = None,
        kv_dtype: str | torch.dtype | None = None,
        cuda_graph: bool = True,
        batch_sizes: Sequence[int] | None = None,
        rounds_in_flight: int | None = None,
        prefix_cache: bool | None = False,
        batch_invariant: bool = False,
        implementation: str = "auto",
        grammars: bool = False,
    ) -> EngineConfig:
        """The options of `Engine`, for a target of this config. Nothing is allocated, and no weight is read.

        Raises:
            ValueError: an option out of range, or beside one that it does not go with; a pool that cannot hold one
                request; sizes that the machine has no memory for.
            All that `draft.needs` raises.
        """
        on_cuda = machine.device.type == "cuda"
        if max_len is None:
            max_len = min(2048, position_limit(model) or 2048)
        check_at_least(2, max_len=max_len)
        check_at_least(1, num_slots=num_slots, page_size=page_size, prefill_chunk=prefill_chunk)
        check_invariance(model, draft, batch_invariant, batch_sizes, adaptive, bool(prefix_cache))
        check_cacheable(draft, bool(prefix_cache))
        if batch_sizes is not None:
            check_batch_sizes(batch_sizes, num_slots)
        if rounds_in_flight is None:
            rounds_in_flight = 2 if on_cuda else 1
        if not 1 <= rounds_in_flight < RING_DEPTH:
            raise ValueError(f"Engine: rounds_in_flight is {rounds_in_flight}, expected 1 to {RING_DEPTH - 1}")
        dtype = dtype or (model.dtype or torch.bfloat16 if on_cuda else torch.float32)
        check_dtype(dtype)
        implementation = implementation_of(model, max_len, implementation)
        kv_dtype = kv_dtype_of(kv_dtype, dtype)

        needs = draft.needs(model)
        check_needs(draft, needs, model.num_hidden_layers)
        reserve = max(needs.num_nodes, needs.accept_width, needs.scratch_rows) + 1
        max_pages = -(-(max_len + reserve) // page_size)
        keeps_all: set[int | None] = {None}
        windows = windows_of(model, implementation) | (keeps_all if needs.kv_numbers > 0 else set())
        sizes = max(prefill_chunk, reserve), max_pages, page_size, num_slots
        pages = PagePlan.of(windows, *sizes)
        if prefix_cache is None:
            prefix_cache = not batch_invariant and draft.cacheable and not pages.gives_back
        if prefix_cache:  # cached pages serve texts that see other rows of them: none are given back behind a window
            pages = PagePlan.of(keeps_all, *sizes)
        if mem_fraction is not None:
            check_mem_fraction(mem_fraction, num_pages, machine.device)
            num_pages = pages.of_slot  # until it is known how many fit
        if num_pages is None:
            num_pages = num_slots * pages.of_slot
        check_num_pages(num_pages, pages, max_len, prefill_chunk, reserve)
        captures = on_cuda and cuda_graph
        if adaptive is None:
            adaptive = (captures or not on_cuda) and not batch_invariant and not draft.sampled
        max_idle_rounds = needs.max_idle_rounds if adaptive and needs.num_nodes > 1 else 0
        top_n = min(MAX_LOGPROBS, model.vocab_size)
        num_levels = num_levels_of(budget_levels(num_slots, needs.num_nodes, adaptive, draft.sampled))
        fewest = min([num_pages, *(most for _, most in pages.windows)])
        row_numbers = num_pages * needs.kv_numbers + fewest * kv_numbers(model, model.num_hidden_layers)
        parts = {  # at least: a draft's KV may be wider than the target's, and not all layers have the shortest window
            "KV": page_size * row_numbers * kv_dtype.itemsize,
            "logits": num_slots * needs.num_nodes * model.vocab_size * dtype.itemsize,
            "masks": num_slots * needs.num_nodes * -(-model.vocab_size // 32) * 4 if grammars else 0,
            "slots": 4 * num_slots * (max_pages * (1 + len(pages.windows)) + MAX_STOP_TOKENS + 2 * model.vocab_size)
            + ring_bytes(num_slots, needs.accept_width, num_levels, top_n)
            + num_slots * (1 + max_idle_rounds) * len(needs.feature_layers) * model.hidden_size * dtype.itemsize,
        }
        check_memory(parts, machine, num_slots=num_slots, max_len=max_len, num_pages=num_pages)
        check_num_nodes(num_slots, needs.num_nodes)

        if batch_sizes is None and batch_invariant:
            batch_sizes = [num_slots]
        if batch_sizes is None:
            batch_sizes = default_batch_sizes(num_slots) if captures else range(1, num_slots + 1)
        rows = tuple(budget_levels(batch, needs.num_nodes, adaptive, draft.sampled) for batch in batch_sizes)

        def bounds(batch: int, num_rows: int) -> tuple[int, ...]:
            if machine.gpu is None or batch_invariant or num_rows in (_C.CATCH_UP, _C.FIRST_ROUND):
                return (max_len + reserve,)
            calls = AttentionCall.of(model, None, True), *needs.attention
            most = most_nodes(batch, num_rows, needs, equal=draft.sampled)
            return kv_bounds(
                calls,
                batch,
                num_rows,
                most,
                max_len + reserve,
                machine.gpu,
                page_size=page_size,
                fp8=kv_dtype.itemsize == 1,
                tensor_cores=dtype.itemsize == 2,
            )

        return cls(
            machine=machine,
            dtype=dtype,
            kv_dtype=kv_dtype,
            needs=needs,
            max_len=max_len,
            num_slots=num_slots,
            page_size=page_size,
            max_pages=max_pages,
            num_pages=num_pages,
            pages=pages,
            mem_fraction=mem_fraction,
            reserve=reserve,
            prefill_chunk=prefill_chunk,
            prefill_requests=1 if batch_invariant else num_slots,
            captures=captures,
            batch_sizes=tuple(batch_sizes),
            # On a CPU, where any batch size may run, it would take long to time them all.
            measured_sizes=tuple(batch_sizes) if on_cuda else tuple(sorted({batch_sizes[0], num_slots})),
            rows=rows,
            plain_rounds=not batch_invariant,
            max_idle_rounds=max_idle_rounds,
            round_sizes=tuple(
                RoundSize(batch, num_rows, most)
                for batch, each in zip(batch_sizes, all_rows(batch_sizes, rows, not batch_invariant), strict=True)
                for num_rows in (
                    [_C.FIRST_ROUND, *([_C.CATCH_UP] if max_idle_rounds else []), *each] if captures else []
                )
                for most in bounds(batch, num_rows)
            ),
            rounds_in_flight=rounds_in_flight,
            prefix_cache=prefix_cache,
            fixed_split=INVARIANT_SPLIT if batch_invariant else None,
            top_n=top_n,
            implementation=implementation,
            grammars=grammars,
        )

    @property
    def all_rows(self) -> list[list[int]]:
        """Of each batch size the nodes that its rounds verify, those of plain rounds among them."""
        return all_rows(self.batch_sizes, self.rows, self.plain_rounds)

    @property
    def num_levels(self) -> int:
        """Return the number of budget levels of the largest batch; 0 if there is nothing to choose."""
        return num_levels_of(self.rows[-1])


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


def all_rows(batch_sizes: Sequence[int], rows: Sequence[Sequence[int]], plain_rounds: bool) -> list[list[int]]:
    pairs = zip(batch_sizes, rows, strict=True)
    return [sorted({*([batch] if plain_rounds else []), *each}) for batch, each in pairs]


def num_levels_of(rows: Sequence[int]) -> int:
    """Return the number of budget levels, given those of the largest batch (which has the most); 0 if there is nothing
    to choose."""
    return len(rows) if len(rows) > 1 else 0


def ring_bytes(num_slots: int, accept_width: int, num_levels: int, top_n: int) -> int:
    """The bytes of both rings, whose words are counted in C++, where they are written."""
    words = _C.command_words(num_slots, num_slots, MAX_STOP_TOKENS)
    words += _C.result_words(num_slots, accept_width, num_levels, top_n)
    return 4 * RING_DEPTH * words


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"Engine: dtype is {dtype}, expected one of {', '.join(map(str, DTYPES))}")


def check_at_least(low: int, **arguments: int) -> None:
    for name, value in arguments.items():
        if value < low:
            raise ValueError(f"Engine: {name} is {value}, expected at least {low}")


def check_batch_sizes(batch_sizes: Sequence[int], num_slots: int) -> None:
    sizes = list(batch_sizes)
    if not sizes or sizes[0] < 1 or sizes[-1] != num_slots or sorted(set(sizes)) != sizes:
        raise ValueError(f"Engine: batch_sizes is {sizes}, expected rising sizes up to num_slots={num_slots}")


def check_invariance(
    model: Any,
    draft: Draft,
    batch_invariant: bool,
    batch_sizes: Sequence[int] | None,
    adaptive: bool | None,
    prefix_cache: bool,
) -> None:
    """ValueError for what a batch-invariant engine cannot have."""
    if not batch_invariant:
        return
    if hasattr(model, "num_experts_per_tok"):
        raise ValueError(
            f"Engine: batch_invariant is set, expected not with {model.model_type}, "
            "whose experts multiply the rows of several requests together"
        )
    if batch_sizes is not None and len(batch_sizes) > 1:
        raise ValueError(f"Engine: batch_sizes is {list(batch_sizes)}, expected one size with batch_invariant")
    if draft.reads_others:
        raise ValueError(
            f"Engine: batch_invariant is set, expected not with {type(draft).__name__}, "
            "whose drafts depend on what other requests said"
        )
    if adaptive:
        raise ValueError("Engine: adaptive is set, expected not with batch_invariant")
    if prefix_cache:
        raise ValueError(
            "Engine: prefix_cache is set, expected not with batch_invariant "
            "(rows that another request has written are equal up to rounding)"
        )


def check_cacheable(draft: Draft, prefix_cache: bool) -> None:
    if prefix_cache and not draft.cacheable:
        raise ValueError(
            f"Engine: prefix_cache is set, expected not with {type(draft).__name__}, "
            "which keeps more of a prompt than the rows of its pools"
        )


def check_num_pages(num_pages: int, pages: PagePlan, max_len: int, prefill_chunk: int, reserve: int) -> None:
    if num_pages >= pages.of_slot:
        return
    fits = f"one request of max_len={max_len} tokens and the {reserve} rows of a round"
    if pages.window is not None:
        fits = f"a window of {pages.window} rows of one request and {max(prefill_chunk, reserve)} rows more"
    raise ValueError(f"Engine: num_pages is {num_pages}, expected at least {pages.of_slot} ({fits} must fit)")


def check_mem_fraction(mem_fraction: float, num_pages: int | None, device: torch.device) -> None:
    if num_pages is not None:
        raise ValueError(f"Engine: num_pages is {num_pages}, expected None beside mem_fraction")
    if device.type != "cuda":
        raise ValueError(f"Engine: mem_fraction is {mem_fraction}, expected None (device is {device})")
    if not 0 < mem_fraction <= 1:
        raise ValueError(f"Engine: mem_fraction is {mem_fraction}, expected above 0 and at most 1")


def check_needs(draft: Draft, needs: Needs, num_layers: int) -> None:
    """ValueError for what no engine over a target of so many layers can provide."""
    name = f"Engine: draft ({type(draft).__name__}) needs"
    for need in ("num_nodes", "accept_width"):
        if not 1 <= getattr(needs, need) <= 256:
            raise ValueError(f"{name} {need}={getattr(needs, need)}, expected 1 to 256")
    for need in ("scratch_rows", "kv_numbers", "max_idle_rounds"):
        if getattr(needs, need) < 0:
            raise ValueError(f"{name} {need}={getattr(needs, need)}, expected 0 or more")
    if not all(0 <= layer <= num_layers for layer in needs.feature_layers):
        raise ValueError(f"{name} feature_layers={needs.feature_layers}, expected 0 to {num_layers} (the target's)")


def check_num_nodes(num_slots: int, num_nodes: int) -> None:
    if num_slots * num_nodes > MOST_NODES:
        raise ValueError(
            f"Engine: num_slots is {num_slots}, expected at most {MOST_NODES // num_nodes} "
            f"(trees of {num_nodes} nodes; a round has {MOST_NODES} at most)"
        )


def check_memory(parts: dict[str, int], machine: Machine, **sizes: int) -> None:
    """ValueError for sizes that take more than all memory of the machine, without the weights."""
    total = sum(parts.values())
    if total <= machine.num_bytes:
        return
    (first, value), *others = sizes.items()
    beside = ", ".join(f"{name}={other}" for name, other in others)
    shares = ", ".join(f"{name} {gigabytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    raise ValueError(
        f"Engine: {first} is {value} ({beside}), which takes {gigabytes(total)} ({shares}), "
        f"expected at most the {gigabytes(machine.num_bytes)} of {machine.device}"
    )


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
