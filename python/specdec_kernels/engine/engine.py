"""The engine: a target, a draft, paged KV, and continuous batching over fixed slots."""

from __future__ import annotations

import dataclasses
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ..models.weights.adapters import with_base
from ..models.weights.checkpoint import expect_folder
from ..models.weights.loading import config_of, model_name, placeholders
from ..models.weights.offload import Lacking
from ..status import FinishReason
from .config import MAX_STOP_TOKENS, EngineConfig, Machine
from .device.grammar_masks import Grammars
from .drafts import Draft
from .options import EngineOptions, documents_options
from .outputs import EngineStats, GenerationError, NewTokens, RequestOutput
from .params import SamplingParams
from .request import BaseRequest, Order, Request
from .startup import capture_all, on_stream, open_engine
from .text.prompts import (
    as_list,
    chat_tokens,
    check_tokens,
    conversations,
    load_tokenizer,
    own_tokenizer,
    tokens_of_each,
)
from .text.stop_strings import StopStrings
from .threads import Loop
from .transfer.migration import (
    Arrival,
    ExportedRequest,
    check_tensors,
    check_values,
    checksum,
    keep_for,
    layout_of,
    packed_slot,
    params_of,
    plain_values,
)
from .tuning import calibrations_for, costs_for, read_tuning, rounds_of, tuning_of
from .weight_updates import NewWeights, Weights, own_weights, why_unready

OnTokens = Callable[[NewTokens], bool | None]
AnyRequest = TypeVar("AnyRequest", bound=BaseRequest)


@documents_options
class Engine:
    """Generates with a Hugging Face causal language model by speculative decoding.

    Whatever drafts, the output is the target's own text, greedy or drawn: speculation changes the speed alone.

    `submit` and `generate` may be called from any thread, while others run; whatever one of them raises, the engine can
    be used again. Two threads of the engine, from the first request to `close`, run rounds and hand out results. As a
    context manager it closes itself; one that is no longer referred to, and has nothing to do, does so, too.

    Args:
        model: path or hub id of the target (docs/models.md lists the supported types), or a module, which shares its
            weights with the engine and is moved to `device` and cast to `dtype` if needed.
        draft: `Eagle3`, `Eagle`, `Standalone`, `Ngram`, a `Union` of two, or a `Draft` of your own. A draft serves one
            engine at a time, until `close`. None: plain decoding.
        options: fields of `EngineOptions`, by name; or, as the argument `options`, a whole one, of which further
            arguments replace fields.

    Attributes:
        config: all its numbers, defaults resolved. draft: what drafts. tokenizer: of prompts and texts, or None.
        device: where it runs. graphs: what was captured, or None. not_captured: why rounds of a model that runs by
            transformers' modules could not be captured, and are launched call by call; None: they are, or were not
            to be. eos_token_ids: what ends a text.

    Raises:
        ValueError: an unsupported model, size, dtype or device; a pool that cannot hold one request of `max_len`, or
            that this machine has no memory for; a tuning that is none, or has a calibration of another draft alone; a
            trace that cannot be written.
        OSError: no such model, no such corpus, no such tuning.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        draft: Draft | None = None,
        *,
        options: EngineOptions | None = None,
        **named: Any,
    ) -> None:
        if draft is not None and not isinstance(draft, Draft):
            raise ValueError(f"Engine: draft is a {type(draft).__name__}, expected a Draft or None")
        options = EngineOptions(**named) if options is None else dataclasses.replace(options, **named)
        self.draft = Draft() if draft is None else draft
        self.draft.expect_closed()
        given = {} if options.tuning is None else read_tuning(options.tuning)
        machine = Machine.of(options.device)
        expect_folder(model, "Engine: model")
        base, adapter_folder = with_base(model, options.adapter)
        model_config = config_of(base)
        config = EngineConfig.resolve(model_config, self.draft, machine, options)
        self._target_name = "+".join(model_name(part) for part in (base, adapter_folder) if part is not None)
        self._rounds = rounds_of(model_config, self.draft, config)
        calibrations = calibrations_for(given, self.draft, self._target_name)
        if options.trace is not None:
            check_writable(options.trace)
        self._trace = options.trace
        self.tokenizer, self._no_tokenizer = load_tokenizer(
            base, options.tokenizer or own_tokenizer(adapter_folder), options.trust_remote_code
        )
        opened = open_engine(
            base,
            self.draft,
            config,
            adapter=adapter_folder,
            tokenizer=self.tokenizer,
            no_tokenizer=self._no_tokenizer,
            calibrations=calibrations,
            costs=costs_for(given, self._rounds, config),
            trace=options.trace is not None,
            progress=options.progress,
        )
        self.config, self.graphs = opened.config, opened.graphs
        self._executor, self._scheduler, self._stream = opened.executor, opened.scheduler, opened.stream
        self.target, self.state = self._executor.target, self._executor.state
        self._placeholders = placeholders(self.target.model.config)
        self._grammars = Grammars(self.tokenizer, self._no_tokenizer, self.target.lm_head.out_features)
        self.eos_token_ids = eos_token_ids(self.target.model, self.tokenizer)
        self._loop = Loop(self._scheduler, self._stream)
        self._changing = threading.Lock()  # held by who changes what rounds work on
        self._checksum: str | None = None  # of weights; None: not known
        self._level = 0  # at which it sleeps; 0: it is awake
        self._lacking = Lacking({})  # weights, since it slept at level 2
        self._closer = weakref.finalize(self, shut, self._loop, self.draft)  # also when the interpreter ends

    @property
    def device(self) -> torch.device:
        return self.config.machine.device

    @property
    def tuning(self) -> dict[str, Any]:
        """What has been found out by now, for JSON and for `Engine(tuning=)` (docs/tuning.md): the calibrations of the
        draft's models, and what rounds cost.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._loop.expect_open()
        with on_stream(self._stream):  # between two rounds
            return tuning_of(self.draft, self._target_name, self._scheduler.costs, self._rounds)

    @property
    def not_captured(self) -> str | None:
        return self._executor.not_captured

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> Request:
        """Start one request, and return while it waits and runs. Any thread, at any time, as many as one likes.

        Args:
            prompt: text or token ids; a list, a tuple, an array or a tensor of them.
            params: how it is decoded. None: the defaults.
            add_special_tokens: as for `generate`.
            stream: False where `result` is all that is wanted, which costs the least: an iteration then finds the whole
                text at once, as if of one round.

        Raises:
            ValueError, TypeError: as `generate`; then nothing has started.
            RuntimeError: the engine is closed, or this process is a fork of the one that made it.
        """
        token_lists = self._tokens([prompt], ["submit: prompt"], add_special_tokens)
        return self._submit(Request, token_lists, [one_sample(params)], stream)[0]

    def submit_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> list[Request]:
        """Start several requests together, in their order: they join in one turn of the loop, and cost less than one by
        one. What is refused of one, by its index, starts none. Of n samples each is a request, behind each other.

        Args:
            prompts, params: as for `generate`.
            add_special_tokens, stream, what is raised: as for `submit`.
        """
        token_lists, each = self._checked("submit_many", prompts, params, add_special_tokens)
        return self._submit(Request, token_lists, each, stream)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        on_tokens: OnTokens | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or a list); returns one output each, in their order: n of them
        one behind the other where `SamplingParams.n` is more than 1.

        Args:
            prompts: uneven lengths are fine; more prompts than slots wait their turn. Token ids may be a list, a tuple,
                an array or a tensor.
            params: one for all, or one each.
            add_special_tokens: let the tokenizer put its special tokens (a BOS) around text. False for text that has
                them already, as that of a chat template does.
            on_tokens: called with every round's new tokens of every request, as they are committed. Where it returns
                True the request is cancelled; some rounds of it may be on their way. What it raises ends `generate`.

        Raises:
            ValueError, TypeError: a prompt that is empty, leaves no room below `max_len`, or holds what is no token of
                the model; then nothing has started.
            GenerationError: requests the device gave up on; its `outputs` are the results of all.
            RuntimeError: as `submit`.
            Exception: the first that a round or prefill has raised; the other requests are cancelled then.
        """
        token_lists, each = self._checked("generate", prompts, params, add_special_tokens)
        self._loop.expect_open()
        self._loop.expect_to_wait()
        told: SimpleQueue[list[BaseRequest]] = SimpleQueue()
        requests = self._requests(BaseRequest, token_lists, each, told.put)
        self._follow_caller()
        try:
            self._loop.submit(requests, on_tokens is not None)
            pass_on(requests, told, on_tokens)
        except BaseException:
            for request in requests:
                request.cancel()
            while any(map(self._loop.awaits, requests)):
                told.get()
            raise
        finally:
            self._scheduler.settle()
            self._lead_caller()
        self._write_trace()
        outputs = [request.with_text() for request in requests]
        failed = [request for request in requests if request.output.finish_reason == FinishReason.ERROR]
        if failed:
            whys = (f"prompts[{request.output.index}] ended with {request.status.name}" for request in failed)
            raise GenerationError("generate: " + ", ".join(whys), outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_tokens: OnTokens | None = None,
        **template: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or several; returns one output, or a list of one each (n each, if that is more).

        Args:
            messages: a list of messages, `{"role": "user", "content": "..."}`; or a list of such lists.
            params, on_tokens: as for `generate`.
            template: of `apply_chat_template` of the tokenizer: tools, another chat_template, what its template asks
                for (`enable_thinking=False`).

        Raises:
            TypeError: what are no messages. ValueError: there is no tokenizer, or it has no chat template.
            All that `generate` raises.
        """
        each, single = conversations(messages)
        prompts = [chat_tokens(conversation, self.tokenizer, self._no_tokenizer, template) for conversation in each]
        outputs = self.generate(prompts, params, on_tokens=on_tokens)
        return outputs[0] if single and len(outputs) == 1 else outputs

    def _checked(
        self, op: str, prompts: Any, params: Any, add_special_tokens: bool
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """The tokens and the parameters of each of several prompts."""
        items = as_list(prompts, op)
        token_lists = self._tokens(items, [f"{op}: prompts[{i}]" for i in range(len(items))], add_special_tokens)
        return token_lists, params_of_each(params, len(items), op)

    def _tokens(self, prompts: Sequence[Any], names: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The tokens of prompts, which errors call by these names."""
        each = tokens_of_each(prompts, names, self.tokenizer, self._no_tokenizer, add_special_tokens)
        max_len, vocab_size = self.config.max_len, self.target.config.vocab_size
        for tokens, name in zip(each, names, strict=True):
            check_tokens(tokens, name, max_len=max_len, vocab_size=vocab_size, placeholders=self._placeholders)
        return each

    def _submit(
        self,
        kind: Callable[..., AnyRequest],
        token_lists: Sequence[list[int]],
        params: Sequence[SamplingParams],
        stream: bool,
        *tell: Any,
    ) -> list[AnyRequest]:
        requests = self._requests(kind, token_lists, params, *tell)
        self._follow_caller()
        self._loop.submit(requests, stream)
        return requests

    def _requests(
        self,
        kind: Callable[..., AnyRequest],
        token_lists: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *tell: Any,
    ) -> list[AnyRequest]:
        """Requests that have not started."""
        requests = []
        for place, (tokens, one) in enumerate(zip(token_lists, params, strict=True)):
            stops = self._stop_tokens(one)
            self._check_bias(one)
            num_logprobs, matcher = min(one.num_logprobs, self.config.top_n), self._new_matcher(one, stops)
            prediction, seeded = self._prediction(one), one.with_seed()
            for sample in range(one.n):
                params_of, strings = seeded.of_sample(sample), self._stop_strings(one)  # which follow a text each
                order = Order(place, tokens, params_of, stops, strings, num_logprobs, matcher, prediction, sample)
                requests.append(kind(self, order, *tell))
        return requests

    def _stop_tokens(self, sampling: SamplingParams) -> list[int]:
        stop = sampling.stop_token_ids
        if stop is None:
            stop = [] if sampling.ignore_eos else self.eos_token_ids
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(
                f"SamplingParams: stop_token_ids has {len(stop)} entries, expected at most {MAX_STOP_TOKENS}"
            )
        return list(stop)

    def _check_bias(self, sampling: SamplingParams) -> None:
        vocab_size = self.target.config.vocab_size
        for token in sampling.logit_bias or ():
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"SamplingParams: logit_bias has token {token}, expected 0 to {vocab_size - 1} "
                    "(the model's vocabulary)"
                )

    def _prediction(self, sampling: SamplingParams) -> list[int]:
        if sampling.prediction is None:
            return []
        if not self.draft.takes_predictions:
            raise ValueError("SamplingParams: prediction is given, expected none without Ngram in Engine(draft=)")
        name = "SamplingParams: prediction"
        (tokens,) = tokens_of_each([sampling.prediction], [name], self.tokenizer, self._no_tokenizer, False)
        max_len, vocab_size = self.config.max_len, self.target.config.vocab_size
        if tokens:
            check_tokens(tokens, name, max_len=max_len, vocab_size=vocab_size, placeholders={})
        return tokens

    def _new_matcher(self, sampling: SamplingParams, stop_tokens: list[int]) -> Callable[[], Any] | None:
        kind, _ = sampling.constraint
        if not kind:
            return None
        if not self.config.grammars:
            raise ValueError(f"SamplingParams: {kind} is given, expected none without Engine(grammars=True)")
        return self._grammars.new_matcher(sampling, stop_tokens)

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop_strings:
            return None
        if not getattr(self.tokenizer, "is_fast", False):
            lack = self._no_tokenizer or "the tokenizer is not one of `tokenizers`"
            raise ValueError(f"SamplingParams: stop is given, expected none ({lack})")
        return StopStrings(self.tokenizer, sampling.stop_strings, sampling.min_new_tokens)

    def clear_cache(self) -> None:
        """Give back the pages of the prefix cache. Requests that run keep theirs; those submitted later begin anew.

        Raises:
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        self._loop.expect_open()
        self._loop.expect_to_wait()
        self._scheduler.clear_cache()

    def update_weights(
        self, weights: Weights | None = None, draft: Weights | Sequence[Weights | None] | None = None
    ) -> None:
        """Other weights for the target, its draft or both, between two rounds; nothing is captured anew.

        Texts that are submitted later are those of an engine made with these weights. A request that runs goes on with
        the text that it has, which is prefilled anew: no row of KV that the old weights have made is used again, so the
        prefix cache is emptied, too. Returns when it is done; the tensors are copied.

        Args:
            weights: tensors of the target by the names that they have in its checkpoint (Hugging Face's), all of them
                or some; on any device, in any dtype that the engine could have loaded. Of experts that transformers
                keeps as one tensor, those of a layer come together; of a quantised product its numbers and scales. A
                LoRA that was merged at load is part of what they replace.
            draft: those of the draft, by the names in its checkpoint. Of a `Union` a list, with an entry (or None) for
                each of the drafts that it unites.

        Raises:
            ValueError, TypeError: a name that is unknown, a tensor of another shape or of other numbers than weights;
                then nothing has changed.
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        self._loop.expect_open()
        self._loop.expect_to_wait()
        with self._changing:
            self._expect_awake("update_weights")
            given = NewWeights(self.target, self.draft, weights, draft)
            with self._loop.paused(restart=True), on_stream(self._stream):
                given.write()
                self._checksum = None
            if self._loop.unready:
                self._lacking.note(given.updates)
                self._loop.unready = why_unready(self._lacking)

    def sleep(self, level: int = 1) -> None:
        """Gives memory back until `wake`: KV pools, captured rounds, and the weights; the prefix cache is empty then.

        What stays is small: the state of slots, tokens of an n-gram index, what drafts keep of each slot. Weights of a
        module that the caller gave are the caller's, and stay, too.

        Args:
            level: 1: weights wait in host memory (where those of an engine on the CPU are). 2: they are dropped, and
                behind `wake` all of them are to be given by `update_weights` before a request starts.

        Raises:
            ValueError: another level; 2, of an engine whose model, or draft's model, was given as a module.
            RuntimeError: requests run or wait; it sleeps already; all that `update_weights` raises.
        """
        self._loop.expect_open()
        self._loop.expect_to_wait()
        with self._changing:
            self._expect_awake("sleep")
            if level not in (1, 2):
                raise ValueError(f"sleep: level is {level}, expected 1 or 2")
            if level == 2 and (self.target.is_given or any(part.is_given for part in self.draft.parts)):
                raise ValueError(
                    "sleep: level is 2, expected 1 for a model that was given as a module, which is its owner's"
                )
            if self._lacking.names:
                raise RuntimeError(f"sleep: {self._loop.unready}")
            self._loop.shut_out("Engine is asleep, expected wake() before requests")
            with self._loop.paused(restart=True), on_stream(self._stream):
                self._level = level
                if self._stream is not None:
                    self._stream.synchronize()
                if self.config.captures:
                    self._scheduler.set_graphs({})
                    self._executor.passes.captured.clear()
                    self.graphs = None
                self.target.sleep(level)
                self.draft.sleep(level)
                if self._stream is not None:
                    torch.cuda.empty_cache()

    def wake(self) -> None:
        """Takes back what `sleep` gave. On CUDA rounds are captured anew, since addresses may be others, which takes as
        long as when the engine was made (`Engine.graphs` says how long).

        Raises:
            RuntimeError: it does not sleep; it is closed.
        """
        self._loop.expect_open()
        self._loop.expect_to_wait()
        with self._changing:
            if not self._level:
                raise RuntimeError("wake: Engine is awake, expected one that sleeps")
            level, num_pages = self._level, self.config.num_pages
            with self._loop.paused(), on_stream(self._stream):
                self.target.wake(level, num_pages)
                self.draft.wake(level, num_pages)
                if self.config.captures:
                    self.graphs = capture_all(self._executor, self.config, self._stream, progress=False)
                    self._scheduler.set_graphs(self.graphs.raw() if self.graphs else {})
            self._level = 0
            self._lacking = Lacking(own_weights(self.target, self.draft) if level == 2 else {})
            self._loop.unready = why_unready(self._lacking)

    def export_request(self, request: BaseRequest) -> ExportedRequest:
        """Takes a request out of this engine, for `import_request` of another one, which goes on with it as if it had
        never moved: the one prefills, say, and the other decodes. Here it ends as cancelled, and its pages are free.

        Waits until it runs, which is behind its prefill and a first round. Greedy and drawn texts, with any parameters,
        go on exactly; the other engine must be one of the same weights, with the same KV and the same kind of draft.

        Args:
            request: of this engine: a `Request` or an `AsyncRequest`.

        Returns:
            Tensors on this engine's device and plain values.

        Raises:
            ValueError: a request of another engine, or one that has ended.
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        if request._engine is not self:
            raise ValueError(f"export_request: request {request.id} is of another engine, expected one of this")
        self._loop.expect_open()
        self._loop.expect_to_wait()
        has_ended = threading.Event()
        with self._changing:
            layout, weights = layout_of(self), self.weights_checksum()
            with self._loop.paused(request_id=request.id), on_stream(self._stream):
                held = self._scheduler.held(request.id)
                if held is not None:
                    slot, text = held
                    tensors, first_rows = packed_slot(self._executor, slot, len(text) - 1)
                    self._scheduler.cancel(request.id)
            if held is not None and self._stream is not None:
                keep_for(torch.cuda.current_stream(self.device), tensors)
        request.add_done_callback(lambda _: has_ended.set())
        if held is not None:
            has_ended.wait()
        if held is None or request.output.finish_reason != FinishReason.CANCELLED:
            raise ValueError(f"export_request: request {request.id} has ended, expected one that runs")
        values = plain_values(request)
        return ExportedRequest(tensors, values | {"layout": layout, "weights": weights, "first_rows": first_rows})

    def import_request(self, exported: ExportedRequest, *, stream: bool = True) -> Request:
        """Goes on with a request that has left another engine. Its output begins with the tokens that it brings along,
        and so does an iteration over it.

        Args:
            exported: what `export_request` gave, with tensors on any device; they are copied. Limits that are not the
                request's, as `max_len`, are those of this engine.
            stream: as for `submit`.

        Raises:
            ValueError: another version, model, KV or draft than this engine's, or other weights; a text that leaves no
                room below `max_len`; a grammar or a prediction that this engine does not take.
            RuntimeError: as `submit`.
        """
        return self._import(Request, exported, stream)

    def _import(
        self, kind: Callable[..., AnyRequest], exported: ExportedRequest, stream: bool, *tell: Any
    ) -> AnyRequest:
        self._loop.expect_open()
        values = exported.values
        check_values(values, self)
        check_tensors(exported, self)
        (request,) = self._requests(kind, [values["prompt"]], [params_of(values)], *tell)
        request.resume(values, Arrival(exported, self.device, self._stream))
        self._follow_caller()
        self._loop.submit([request], stream)
        return request

    def weights_checksum(self) -> str:
        """Of some numbers of each of the target's weights: engines whose checksums differ say different things."""
        if self._checksum is None:
            self._checksum = checksum(self.target.model)
        return self._checksum

    def _expect_awake(self, op: str) -> None:
        if self._level:
            raise RuntimeError(f"{op}: Engine is asleep, expected wake() before")

    def close(self) -> None:
        """Cancels what runs, ends the engine's threads, and gives the draft back, which may serve another engine then.

        Any thread; a second time there is nothing to do.
        """
        self._closer()
        self._loop.close()  # whoever is not the first waits for the threads, too

    def _write_trace(self) -> None:
        """The trace, if one was asked for. A disk that is full costs no outputs."""
        if self._trace is None:
            return
        try:
            self._scheduler.write_trace(str(self._trace))
        except RuntimeError as error:
            warnings.warn(f"Engine: {error}", RuntimeWarning, stacklevel=3)

    def stats(self) -> EngineStats:
        """What rounds took so far. The device's own times are those of rounds that have been read."""
        rounds, rows, *nanoseconds = self._scheduler.times
        host, wait, prefill, device, following, gaps = (1e-9 * t for t in nanoseconds)
        return EngineStats(
            rounds=rounds,
            rows=rows,
            retractions=self._scheduler.num_retractions,
            prefix_hits=self._scheduler.num_prefix_hits,
            cached_tokens=self._scheduler.num_cached_tokens,
            host_seconds=host,
            wait_seconds=wait,
            prefill_seconds=prefill,
            emit_seconds=self._loop.hand_out_seconds,
            device_seconds=device,
            following_seconds=following,
            gap_seconds=gaps,
            rounds_by_nodes=self._rounds_by_nodes(),
            costs=self._scheduler.costs,
        )

    def _rounds_by_nodes(self) -> dict[float, int]:
        """Rounds by the nodes that each slot of their batch size has in the mean, rising."""
        rounds: Counter[float] = Counter()
        for batch, rows, counts in zip(
            self.config.batch_sizes, self.config.all_rows, self._scheduler.rounds_by_rows, strict=True
        ):
            rounds.update({each / batch: count for each, count in zip(rows, counts, strict=True)})
        return dict(sorted(rounds.items()))

    def _follow_caller(self) -> None:
        """The engine's stream waits for the work that the caller's stream has, such as a copy of new weights."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _lead_caller(self) -> None:
        """The caller's stream waits for the work that the engine's stream has."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def pass_on(requests: Sequence[BaseRequest], told: SimpleQueue[list[BaseRequest]], on_tokens: OnTokens | None) -> None:
    """Calls `on_tokens` with each piece that the requests gain, in the order of the pieces, until all have ended."""
    seen = dict.fromkeys(requests, 0)
    num_running = len(requests)
    while num_running:
        for request in told.get():
            begin = seen[request]
            seen[request] = end = begin + 1
            new = request.pieces(begin, end)
            if on_tokens is not None and on_tokens(new) and not new.finish_reason:
                request.cancel()
            if new.finish_reason:
                num_running -= 1
                if request.error is not None:
                    raise request.error


def one_sample(params: SamplingParams | None) -> SamplingParams:
    """For what returns a single request."""
    if params is not None and params.n > 1:
        raise ValueError(
            f"submit: params has n={params.n}, expected 1 (submit_many returns the requests of all samples)"
        )
    return params or SamplingParams()


def params_of_each(params: Any, count: int, op: str) -> list[SamplingParams]:
    """One for each of so many prompts."""
    each = [params or SamplingParams()] * count if not isinstance(params, Sequence) else list(params)
    for index, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            name = f"params[{index}]" if isinstance(params, Sequence) else "params"
            raise TypeError(f"{op}: {name} is a {type(one).__name__}, expected SamplingParams")
    if len(each) != count:
        raise ValueError(f"{op}: params has {len(each)} entries, expected one, or {count} like prompts")
    return each


def check_writable(trace: str | Path) -> None:
    """ValueError for a file that cannot be written; one that can be is there then."""
    try:
        with open(trace, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"Engine: trace is {trace}, expected a file that can be written ({error.strerror})") from error


def shut(loop: Loop, draft: Draft) -> None:
    """Ends what an engine runs on; it does not know the engine, which may be gone."""
    loop.close()
    draft.close()


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text: those of the generation config, else of the model's, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return list(eos) if isinstance(eos, list | tuple) else [eos]
    return []
