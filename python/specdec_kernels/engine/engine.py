"""The engine: a target, a draft, paged KV, and continuous batching over fixed slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoTokenizer

from .. import _C
from ..models.causal_lm import CausalLM, config_of
from ..models.checkpoint import expect_folder
from ..models.eagle3 import eagle3_config_of, feature_layers
from ..status import FinishReason, Status
from .drafts import build_draft
from .drafts.ngram import NgramDraft
from .drafts.union import UnionDraft
from .executor import Executor
from .graphs import Graphs, capture, default_batch_sizes
from .memory import pages_that_fit
from .outputs import EngineStats, GenerationError, NewTokens, RequestOutput, TokenLogprob
from .params import MAX_LOGPROBS, SamplingParams, Speculation
from .passes import captured_shapes
from .prompts import as_list, check_tokens, file_tokens, token_ids
from .round import Round
from .state import Rings, SlotState
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from .._C import Emission

MAX_STOP_TOKENS = 16
INVARIANT_SPLIT = 1024  # rows of KV
RING_DEPTH = 16  # records of commands, which the loop may be ahead of the device, and of results
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

OnTokens = Callable[[NewTokens], bool | None]


@dataclass
class Running:
    """What the engine knows of a request whose last emission has not come."""

    output: RequestOutput
    num_logprobs: int
    stop: StopStrings | None


class Engine:
    """Generates with a Hugging Face causal language model by speculative decoding.

    The output of every algorithm is the target's own text, greedy or drawn: speculation changes the speed alone. One
    `generate` runs at a time; whatever it raises, the engine can be used again.

    Args:
        model: path or hub id of the target (Llama, Mistral, Qwen2, Qwen3), or the module itself, which this engine
            then owns and which has no tokenizer.
        speculation: how to draft; default none.
        max_len: longest sequence, prompt included. None: 2048, or the model's limit if that is less.
        num_slots: requests that run at once; more wait.
        num_pages: KV pages in the pool. None: enough for every slot at `max_len`, or what mem_fraction leaves.
        mem_fraction: share of the GPU's memory that weights, captured rounds, prefill and pages may take together.
        page_size: KV rows per page.
        prefill_chunk: most rows of prompts run between two rounds; a prompt is cut where they are full.
        dtype: of weights and KV. None: the checkpoint's own on CUDA, float32 on the CPU.
        device: None: CUDA where torch has it and this build has kernels, else the CPU.
        cuda_graph: on CUDA, capture rounds as CUDA graphs, else launch them kernel by kernel.
        batch_sizes: of rounds, rising up to num_slots; a round is padded to the next of them, and each is captured.
            None: about a third apart with graphs, every size without.
        rounds_in_flight: rounds launched and not yet read. None: 2 on CUDA (the next round is launched while one
            runs), else 1.
        batch_invariant: a request gets the same bits whatever runs beside it. Rounds all have one size, `num_slots` and
            all nodes, and attention cuts KV at fixed places, which is slower with few requests. A request that is
            retracted for want of pages may differ from there on: what it had generated comes back as a prompt.
        trace: file for a Chrome trace of the loop and its rounds, rewritten at the end of every `generate`.
        progress: show what is being captured.

    Raises:
        ValueError: an unsupported model, size, dtype or device; a pool that cannot hold one request of `max_len`.
        OSError: no such model, no such corpus.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        speculation: Speculation | None = None,
        max_len: int | None = None,
        num_slots: int = 8,
        num_pages: int | None = None,
        mem_fraction: float | None = None,
        page_size: int = 16,
        prefill_chunk: int = 2048,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        cuda_graph: bool = True,
        batch_sizes: Sequence[int] | None = None,
        rounds_in_flight: int | None = None,
        batch_invariant: bool = False,
        trace: str | Path | None = None,
        progress: bool = False,
    ) -> None:
        self.speculation = speculation = speculation or Speculation()
        self.device = torch.device(device or default_device())
        check_device(self.device)
        expect_folder(model, "Engine: model")
        config = config_of(model)
        if max_len is None:
            max_len = min(2048, config.max_position_embeddings)
        check_at_least(2, max_len=max_len)
        check_at_least(1, num_slots=num_slots, page_size=page_size, prefill_chunk=prefill_chunk)
        if batch_sizes is not None:
            check_batch_sizes(batch_sizes, num_slots)
            if batch_invariant and len(batch_sizes) > 1:
                raise ValueError(f"Engine: batch_sizes is {list(batch_sizes)}, expected one size with batch_invariant")
        if batch_invariant and speculation.uses_ngram:
            raise ValueError(
                f"Engine: batch_invariant is set, expected not for {speculation.algorithm}, "
                "whose drafts depend on what other requests said"
            )
        if batch_invariant and speculation.adaptive:
            raise ValueError("Engine: speculation.adaptive is set, expected not with batch_invariant")
        if rounds_in_flight is not None and not 1 <= rounds_in_flight < RING_DEPTH:
            raise ValueError(f"Engine: rounds_in_flight is {rounds_in_flight}, expected 1 to {RING_DEPTH - 1}")
        self.max_len, self.num_slots = max_len, num_slots
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else config.dtype or torch.bfloat16)
        if self.dtype not in DTYPES:
            raise ValueError(f"Engine: dtype is {self.dtype}, expected one of {', '.join(map(str, DTYPES))}")
        self.tokenizer: Any = load_tokenizer(model)
        self.eos_token_ids = eos_token_ids(config, self.tokenizer)

        # Rows a round may write beyond L: the tree, the accepted rows, the draft's scratch (docs/round.md).
        reserve = speculation.num_nodes + 1
        if speculation.uses_model:
            scratch = speculation.topk * (speculation.num_steps - 1) + 1
            reserve = max(speculation.num_nodes, speculation.num_steps + 1, scratch) + 1
        max_pages = -(-(max_len + reserve) // page_size)
        if mem_fraction is not None:
            check_mem_fraction(mem_fraction, num_pages, self.device)
            num_pages = max_pages  # until it is known how many fit
        if num_pages is None:
            num_pages = num_slots * max_pages
        if num_pages < max_pages:
            raise ValueError(
                f"Engine: num_pages is {num_pages}, expected at least {max_pages} "
                f"(one request of max_len={max_len} tokens and the {reserve} rows of a round must fit)"
            )

        layers: tuple[int, ...] = ()
        if speculation.algorithm == "EAGLE":
            layers = (config.num_hidden_layers,)  # the state entering the final norm
        if speculation.uses_eagle3:
            assert speculation.draft_model is not None
            layers = feature_layers(eagle3_config_of(speculation.draft_model), config.num_hidden_layers)
        self.target = CausalLM(
            model,
            max_len=max_len,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            feature_layers=layers,
        )
        self.state = SlotState.create(
            num_slots=num_slots,
            max_len=max_len,
            max_stop_tokens=MAX_STOP_TOKENS,
            num_pages=num_pages,
            max_pages=max_pages,
            page_size=page_size,
            fixed_split=INVARIANT_SPLIT if batch_invariant else None,
            device=self.device,
        )
        self.draft = build_draft(speculation, self.state, self.target, num_pages=num_pages, max_len=max_len)
        if isinstance(self.draft, NgramDraft | UnionDraft):
            for file in speculation.ngram_corpus:
                self.draft.learn(file_tokens(file, self.tokenizer))

        on_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        if batch_sizes is None:
            if batch_invariant:
                batch_sizes = [num_slots]
            else:
                batch_sizes = default_batch_sizes(num_slots) if on_cuda and cuda_graph else range(1, num_slots + 1)
        if rounds_in_flight is None:
            rounds_in_flight = 2 if on_cuda else 1
        adaptive = speculation.adaptive
        if adaptive is None:
            adaptive = on_cuda and cuda_graph and not batch_invariant and not speculation.sampled_drafts
        nodes = speculation.ladder if adaptive else [speculation.num_nodes]
        top_n = min(MAX_LOGPROBS, config.vocab_size)
        rings = Rings.create(
            self.state, max_batch=num_slots, accept_width=self.draft.accept_width, top_n=top_n, depth=RING_DEPTH
        )
        round = Round(self.target, self.draft, self.state, rings, reserve)
        self._executor = Executor(round, self._emit)

        def start(num_pages: int) -> tuple[Graphs | None, _C.Scheduler]:
            graphs = None
            with self._on_device():
                if self._stream and cuda_graph:
                    shapes = captured_shapes(prefill_chunk, num_slots, max_len)
                    passes = self._executor.passes
                    graphs = capture(round, batch_sizes, nodes, passes, shapes, self._stream, progress=progress)
                scheduler = _C.Scheduler(
                    self._executor,
                    num_slots=num_slots,
                    num_pages=num_pages,
                    page_size=page_size,
                    max_len=max_len,
                    reserve=reserve,
                    accept_width=self.draft.accept_width,
                    max_stops=MAX_STOP_TOKENS,
                    max_logprobs=top_n,
                    prefill_chunk=prefill_chunk,
                    prefill_requests=1 if batch_invariant else num_slots,
                    rounds_in_flight=rounds_in_flight,
                    batch_sizes=list(batch_sizes),
                    nodes=nodes,
                    commands=rings.commands,
                    results=rings.results,
                    stream=self._stream.cuda_stream if self._stream else None,
                    graphs=graphs.raw() if graphs else {},
                    trace=trace is not None,
                )
            return graphs, scheduler

        if mem_fraction is not None:
            # All is made and tried out with the smallest pool, and made anew with the largest that fits beside it.
            trial = start(max_pages)
            with self._on_device():
                fitting = pages_that_fit(self._executor, mem_fraction, prefill_chunk)
            del trial
            self._executor.passes.captured.clear()
            torch.cuda.empty_cache()
            if fitting < max_pages:
                raise ValueError(
                    f"Engine: mem_fraction is {mem_fraction}, which leaves room for {fitting} pages, "
                    f"expected at least {max_pages} (one request of max_len={max_len} tokens)"
                )
            num_pages = min(fitting, num_slots * max_pages)
            self._resize_pools(num_pages)
        self.graphs, self._scheduler = start(num_pages)
        if len(nodes) > 1:
            with self._on_device():
                self._scheduler.measure_rounds()
        self._nodes = nodes
        self._trace = trace
        self._lock = Lock()  # held by the one `generate` that runs
        self._running: dict[int, Running] = {}
        self._failed: list[str] = []
        self._on_tokens: OnTokens | None = None

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or a list); returns one output each, in their order.

        Args:
            prompts: uneven lengths are fine; more prompts than slots wait their turn. Token ids may be a list, a tuple,
                an array or a tensor.
            params: one for all, or one each.
            on_tokens: called with every round's new tokens of every request, as they are committed. Where it returns
                True the request is cancelled; some rounds of it may be on their way. What it raises ends `generate`.

        Raises:
            ValueError, TypeError: a prompt that is empty, leaves no room below `max_len`, or holds what is no token of
                the model; then nothing has started.
            GenerationError: requests the device gave up on; its `outputs` are the results of all.
            RuntimeError: this engine is generating already.
        """
        token_lists = [token_ids(prompt, index, self.tokenizer) for index, prompt in enumerate(as_list(prompts))]
        for index, tokens in enumerate(token_lists):
            check_tokens(tokens, index, max_len=self.max_len, vocab_size=self.target.config.vocab_size)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(token_lists)
        if len(each) != len(token_lists):
            raise ValueError(
                f"generate: params has {len(each)} entries, expected one, or {len(token_lists)} like prompts"
            )
        stops = [self._stop_tokens(sampling) for sampling in each]
        stop_strings = [self._stop_strings(sampling) for sampling in each]
        each = [sampling.with_seed() for sampling in each]

        outputs = [
            RequestOutput(
                index,
                tokens,
                seed=sampling.seed if sampling.temperature > 0 else None,
                logprobs=[] if sampling.num_logprobs >= 0 else None,
            )
            for index, (tokens, sampling) in enumerate(zip(token_lists, each, strict=True))
        ]
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "generate: this engine is generating already, expected one call at a time "
                "(not from another thread, not from on_tokens)"
            )
        try:
            self._on_tokens, self._failed = on_tokens, []
            for output, sampling, stop, strings in zip(outputs, each, stops, stop_strings, strict=True):
                num_logprobs = min(sampling.num_logprobs, self.target.config.vocab_size)
                request_id = self._scheduler.submit(
                    output.prompt_tokens,
                    sampling.max_new_tokens,
                    stop,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    seed=sampling.seed or 0,
                    min_new_tokens=sampling.min_new_tokens,
                    num_logprobs=num_logprobs,
                    streams=on_tokens is not None or strings is not None,
                )
                self._running[request_id] = Running(output, num_logprobs, strings)
                if sampling.ngram_group:
                    self._executor.groups[request_id] = sampling.ngram_group
            with self._on_device():
                self._scheduler.run_until_idle()
            if self._trace is not None:
                self._scheduler.write_trace(str(self._trace))
            if self._failed:
                raise GenerationError("generate: " + ", ".join(self._failed), outputs)
        finally:
            # After an exception requests are left over; the next `generate` starts by taking their slots back.
            self._scheduler.abort_all()
            self._running.clear()
            self._executor.groups.clear()
            self._on_tokens = None
            self._lock.release()
        return outputs

    def _stop_tokens(self, sampling: SamplingParams) -> list[int]:
        stop = sampling.stop_token_ids
        if stop is None:
            stop = [] if sampling.ignore_eos else self.eos_token_ids
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(
                f"SamplingParams: stop_token_ids has {len(stop)} entries, expected at most {MAX_STOP_TOKENS}"
            )
        return list(stop)

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop_strings:
            return None
        if not getattr(self.tokenizer, "is_fast", False):
            lack = "has no tokenizer" if self.tokenizer is None else "has a tokenizer that is not one of `tokenizers`"
            raise ValueError(f"SamplingParams: stop is given, expected none (the model folder {lack})")
        return StopStrings(self.tokenizer, sampling.stop_strings, sampling.min_new_tokens)

    def _resize_pools(self, num_pages: int) -> None:
        self.state.resize_pool(num_pages)
        self.target.resize_pools(num_pages)
        self.draft.resize_pools(num_pages)

    def close(self) -> None:
        """Takes the KV pools out of the modules the engine was given, which may serve another one then."""
        self.target.detach_pools()
        self.draft.detach_pools()

    def stats(self) -> EngineStats:
        """What rounds took so far. The device's own times are those of rounds that have been read."""
        rounds, rows, *nanoseconds = self._scheduler.times
        host, wait, prefill, emit, device, following, gaps = (1e-9 * t for t in nanoseconds)
        return EngineStats(
            rounds=rounds,
            rows=rows,
            retractions=self._scheduler.num_retractions,
            host_seconds=host,
            wait_seconds=wait,
            prefill_seconds=prefill,
            emit_seconds=emit,
            device_seconds=device,
            following_seconds=following,
            gap_seconds=gaps,
            rounds_by_nodes=dict(zip(self._nodes, self._scheduler.rounds_by_rung, strict=True)),
            costs=self._scheduler.costs,
        )

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The engine's device and stream, behind and before all that the caller's stream does."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)

    def _emit(self, emissions: Sequence[Emission]) -> None:
        """The scheduler's report after a turn: of requests that stream, and of those that ended.

        In a round with many requests no other code of Python runs, so that what all need is written out here.
        """
        for request_id, tokens, reason, rounds, drafted, accepted, status, scores in emissions:
            running = self._running.get(request_id)
            if running is None:  # of a `generate` that was interrupted, or ended by a stop string
                continue
            output = running.output
            logprobs = None if scores is None else token_logprobs(*scores, running.num_logprobs)
            if running.stop is not None and (kept := running.stop.find(tokens)) is not None:
                reason = FinishReason.STOP
                accepted -= len(tokens) - kept
                tokens = tokens[:kept]
                logprobs = logprobs and logprobs[:kept]
                output.text = running.stop.text
                self._scheduler.cancel(request_id)
            output.tokens += tokens
            if output.logprobs is not None and logprobs is not None:
                output.logprobs += logprobs
            stats = output.stats
            stats.rounds, stats.drafted, stats.accepted = rounds, drafted, accepted
            if reason:
                output.finish_reason = FinishReason(reason)
                self._end(request_id, output, status)
            if self._on_tokens is None:
                continue
            new = NewTokens(output.index, tokens, output.finish_reason, logprobs)
            if self._on_tokens(new) and not reason:
                self._scheduler.cancel(request_id)

    def _end(self, request_id: int, output: RequestOutput, status: int) -> None:
        del self._running[request_id]
        if output.text is None and self.tokenizer is not None:
            output.text = self.tokenizer.decode(output.tokens, skip_special_tokens=True)
        if output.finish_reason == FinishReason.ERROR:
            self._failed.append(f"prompts[{output.index}] ended with {Status(status).name}")


def token_logprobs(
    logprobs: list[float], top_ids: list[int], top_logprobs: list[float], num_top: int
) -> list[TokenLogprob]:
    tops = list(zip(top_ids, top_logprobs, strict=True))
    return [TokenLogprob(own, tops[i * num_top : (i + 1) * num_top]) for i, own in enumerate(logprobs)]


def check_at_least(low: int, **arguments: int) -> None:
    for name, value in arguments.items():
        if value < low:
            raise ValueError(f"Engine: {name} is {value}, expected at least {low}")


def check_batch_sizes(batch_sizes: Sequence[int], num_slots: int) -> None:
    sizes = list(batch_sizes)
    if not sizes or sizes[0] < 1 or sizes[-1] != num_slots or sorted(set(sizes)) != sizes:
        raise ValueError(f"Engine: batch_sizes is {sizes}, expected rising sizes up to num_slots={num_slots}")


def check_mem_fraction(mem_fraction: float, num_pages: int | None, device: torch.device) -> None:
    if num_pages is not None:
        raise ValueError(f"Engine: num_pages is {num_pages}, expected None beside mem_fraction")
    if device.type != "cuda":
        raise ValueError(f"Engine: mem_fraction is {mem_fraction}, expected None (device is {device})")
    if not 0 < mem_fraction <= 1:
        raise ValueError(f"Engine: mem_fraction is {mem_fraction}, expected above 0 and at most 1")


def check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Engine: device is {device}, expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"Engine: device is {device}, expected cpu (torch finds no GPU)")
    if device.type == "cuda" and _C.cuda_version is None:
        raise ValueError(f"Engine: device is {device}, expected cpu (this build of specdec_kernels has no CUDA half)")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and _C.cuda_version else "cpu")


def load_tokenizer(model: str | Path | nn.Module) -> Any:
    """The model's tokenizer, or None where there is no folder or it has none."""
    if isinstance(model, nn.Module):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError):
        return None


def eos_token_ids(config: Any, tokenizer: Any) -> list[int]:
    eos = config.eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
