"""The engine: a target, a draft, paged KV, and continuous batching over fixed slots."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..status import FinishReason
from .core import EngineCore, OnTokens
from .device.graphs import Graphs
from .drafts import Draft
from .inputs import single_sample
from .options import EngineOptions, documents_options
from .outputs import GenerationError, RequestOutput
from .params import SamplingParams
from .request import BaseRequest, Request
from .stats import EngineStats
from .text.detokenizer import TextDecoder
from .text.prompts import conversations
from .transfer.migration import ExportedRequest
from .weight_updates import Weights


@documents_options
class Engine:
    """Generate with a Hugging Face causal language model by speculative decoding.

    The output is the target's own, greedy or sampled, whatever the draft; speculation changes only the speed.

    `submit` and `generate` may be called from any thread, while others run. The engine stays usable after any of them
    raises. Two threads of the engine, from the first request to `close`, run rounds and deliver results. As a context
    manager it closes itself. An engine without references and without running requests closes itself, too.

    Args:
        model: path or hub id of the target (docs/models.md lists the supported types), or a module, which shares its
            weights with the engine and is moved to `device` and cast to `dtype` if needed.
        draft: `Eagle3`, `Eagle`, `Standalone`, `Ngram`, a `Union` of two, or a `Draft` of your own. A draft serves one
            engine at a time, until `close`. None: plain decoding.
        options: an `EngineOptions`, with fields replaced by further keyword arguments. None: the defaults.

    Attributes:
        draft: the draft, or a `Draft` that drafts nothing.
        target: the language model. state: per-slot state on the device.
        config: all sizes, with defaults resolved.
        tokenizer: of prompts and outputs, or None. eos_token_ids: tokens that end a request by default.
        core: for the rest of the package.

    Raises:
        ValueError: an unsupported model, size, dtype or device; a pool that cannot hold one request of `max_len`, or
            exceeds this machine's memory; an invalid tuning, or one with calibrations of other drafts only; a trace
            file that cannot be written.
        OSError: no such model, corpus or tuning file.
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
        self.core = core = EngineCore(model, draft, options)
        self.draft, self.target, self.state, self.config = core.draft, core.target, core.state, core.config
        self.tokenizer, self.eos_token_ids = core.inputs.tokenizer, core.inputs.eos_token_ids
        self._trace = options.trace

    @property
    def device(self) -> torch.device:
        """Return the device that the engine runs on."""
        return self.config.machine.device

    @property
    def graphs(self) -> Graphs | None:
        """Return what was captured as CUDA graphs, and how long that took; None if nothing was."""
        return self.core.runtime.graphs

    @property
    def not_captured(self) -> str | None:
        """Return why rounds of transformers' modules could not be captured; None if they were, or were not to be."""
        return self.core.executor.not_captured

    @property
    def tuning(self) -> dict[str, Any]:
        """Return the draft's calibrations and the round costs as JSON values, for `Engine(tuning=)` (docs/tuning.md).

        Raises:
            RuntimeError: the engine is closed.
        """
        return self.core.tuning()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- requests

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> Request:
        """Start one request, and return at once. Callable from any thread, at any time.

        Args:
            prompt: text or token ids; a list, a tuple, an array or a tensor of them.
            params: how it is decoded. None: the defaults.
            add_special_tokens: as for `generate`.
            stream: False if only `result` is needed, which is cheapest: an iteration then finds the whole text at the
                end, as if of one round.

        Raises:
            ValueError, TypeError: as `generate`; nothing has started then.
            RuntimeError: the engine is closed, or this process is a fork of the one that made it.
        """
        token_lists = self.core.inputs.tokenize([prompt], ["submit: prompt"], add_special_tokens)
        return self.core.submit(Request, token_lists, [single_sample(params)], stream)[0]

    def submit_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        stream: bool = True,
    ) -> list[Request]:
        """Start several requests together, in their order.

        They join in one turn of the loop, which is cheaper than one by one. An invalid prompt or parameter, named by
        its index, starts none. The n samples of a prompt are n requests in a row.

        Args:
            prompts: as for `generate`.
            params: as for `generate`.
            add_special_tokens: as for `submit`.
            stream: as for `submit`.

        Raises:
            Exception: what `submit` raises.
        """
        token_lists, each = self.core.inputs.tokenize_all("submit_many", prompts, params, add_special_tokens)
        return self.core.submit(Request, token_lists, each, stream)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        on_tokens: OnTokens | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, and return one output each in their order; n in a row if `SamplingParams.n` is above 1.

        Args:
            prompts: text or token ids, one prompt or a list of them, of any lengths; more than slots wait their turn.
                Token ids may be a list, a tuple, an array or a tensor.
            params: one for all, or one each.
            add_special_tokens: let the tokenizer add its special tokens (a BOS) to text. False for text that has them,
                such as that of a chat template.
            on_tokens: called with the new tokens of each round and request as they are committed. If it returns True,
                the request is cancelled; rounds in flight may still add to it. An exception of it ends `generate`.

        Raises:
            ValueError, TypeError: a prompt that is empty, not below `max_len`, or holds an id that is no token of the
                model; nothing has started then.
            GenerationError: requests that the device gave up on; its `outputs` are the results of all.
            RuntimeError: as `submit`.
            Exception: the first that a round or prefill raised; the other requests are cancelled then.
        """
        core = self.core
        token_lists, each = core.inputs.tokenize_all("generate", prompts, params, add_special_tokens)
        core.expect_ready()
        requests = core.run(token_lists, each, on_tokens)
        self._write_trace()
        outputs = [request.with_text() for request in requests]
        failed = [request for request in requests if request.output.finish_reason == FinishReason.ERROR]
        if failed:
            whys = (f"prompts[{request.output.index}] ended with {request.why_failed()}" for request in failed)
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
        """Answer a conversation, or several; return one output, or a list with one each (n each, if that is more).

        Args:
            messages: a list of messages, `{"role": "user", "content": "..."}`; or a list of such lists.
            params: as for `generate`.
            on_tokens: as for `generate`.
            template: arguments of the tokenizer's `apply_chat_template`: tools, another chat_template, variables of the
                template (`enable_thinking=False`).

        Raises:
            TypeError: malformed messages. ValueError: no tokenizer, or a tokenizer without a chat template.
            Exception: what `generate` raises.
        """
        each, single = conversations(messages)
        prompts = [self.core.inputs.tokenize_chat(conversation, template) for conversation in each]
        outputs = self.generate(prompts, params, on_tokens=on_tokens)
        return outputs[0] if single and len(outputs) == 1 else outputs

    def export_request(self, request: BaseRequest) -> ExportedRequest:
        """Take a running request out of this engine, for `import_request` of another one.

        The other engine continues the request as if it had never moved; one engine may prefill, say, and another
        decode. The request ends here as cancelled, and frees its pages.

        Waits until the request runs, that is for its prefill and a first round. Greedy and sampled texts, with any
        parameters, continue exactly. The other engine needs the same weights, the same KV and the same kind of draft;
        it may have another number of ranks.

        Args:
            request: a `Request` or an `AsyncRequest` of this engine.

        Returns:
            Tensors on this engine's device, and JSON values.

        Raises:
            ValueError: a request of another engine, or one that has ended.
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        return self.core.export_request(request)

    def import_request(self, exported: ExportedRequest, *, stream: bool = True, trusted: bool = False) -> Request:
        """Continue a request that has left another engine.

        Its output, and an iteration over it, start with the tokens that it brings.

        Args:
            exported: from `export_request`, with tensors on any device; they are copied. Limits that are not the
                request's own, such as `max_len`, are those of this engine.
            stream: as for `submit`.
            trusted: its exporter is trusted with the texts of all others: its KV rows, which cannot be checked,
                enter the prefix cache. False: they serve this request alone.

        Raises:
            ValueError: another version, model, KV, draft or weights than this engine's; a text not below `max_len`; a
                grammar or a prediction that this engine does not take.
            RuntimeError: as `submit`.
        """
        return self.core.import_request(Request, exported, stream, trusted)

    # --- the engine as a whole

    def text_decoder(self, prompt: str | Sequence[int]) -> TextDecoder:
        """Return a decoder of one completion of a prompt, for tokens as they arrive.

        `push(new.tokens)` returns the text that is complete, `rest()` at the end what was held back. Together they are
        `RequestOutput.text`: a tokenizer that drops the first space of a text does not drop that after the prompt.

        Raises:
            ValueError: the engine has no tokenizer.
        """
        detokenizer = self.core.inputs.detokenizer
        if detokenizer is None:
            raise ValueError(f"text_decoder: the engine has no tokenizer ({self.core.inputs.no_tokenizer})")
        (tokens,) = self.core.inputs.tokenize([prompt], ["text_decoder: prompt"], add_special_tokens=True)
        return detokenizer.decoder(tokens)

    def clear_cache(self) -> None:
        """Release the pages of the prefix cache. Running requests keep theirs; later requests do not reuse any.

        Raises:
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        self.core.expect_ready()
        self.core.scheduler.clear_cache()

    def update_weights(
        self, weights: Weights | None = None, draft: Weights | Sequence[Weights | None] | None = None
    ) -> None:
        """Replace weights of the target, its draft or both, between two rounds; return once they are copied.

        CUDA graphs stay as they are. Requests submitted later get the texts of an engine made with these weights. A
        running request keeps its tokens so far and is prefilled again. No KV row of the old weights is used again, so
        the prefix cache is emptied, too.

        Args:
            weights: tensors of the target, by their names in its Hugging Face checkpoint, all or some, on any device,
                in any dtype that the engine can load. Experts that transformers stores as one tensor are given together
                for a layer; a quantized weight is given with its scales. A LoRA merged at load time is part of the
                weights that these replace.
            draft: those of the draft, by the names in its checkpoint. For a `Union` a list, with an entry (or None) for
                each of its drafts.

        Raises:
            ValueError, TypeError: an unknown name, or a tensor of another shape or kind; nothing has changed then.
            RuntimeError: the engine is closed, or a callback of a request calls this.
        """
        self.core.expect_ready()
        self.core.weights.update(weights, draft)

    def sleep(self, level: int = 1) -> None:
        """Free device memory until `wake`: KV pools with the prefix cache, CUDA graphs, and weights.

        Slot state, the tokens of an n-gram index and a draft's state of each slot stay; they are small. Weights of a
        module that the caller gave stay, too: they are the caller's.

        Args:
            level: 1 offloads weights to host memory (on the CPU they are there already). 2 drops them; after `wake`,
                `update_weights` has to give all of them before a request can start.

        Raises:
            ValueError: another level; level 2 for an engine whose model, or draft model, was given as a module.
            RuntimeError: requests run or wait, the engine sleeps already, or as for `update_weights`.
        """
        self.core.expect_ready()
        self.core.weights.sleep(level)

    def wake(self) -> None:
        """Take back the memory that `sleep` freed.

        On CUDA rounds are captured again, since addresses may change. That takes as long as at startup
        (`Engine.graphs` says how long).

        Raises:
            RuntimeError: the engine does not sleep, or is closed.
        """
        self.core.expect_ready()
        self.core.weights.wake()

    def weights_checksum(self) -> str:
        """Return a checksum over samples of each of the target's weights; it differs between fine-tuned models."""
        return self.core.weights.checksum()

    def stats(self) -> EngineStats:
        """Return counts and times of rounds so far. Device times are those of rounds whose results have been read."""
        return self.core.stats()

    def close(self) -> None:
        """Cancel running requests, end the engine's threads, and release the draft for another engine.

        Callable from any thread, any number of times.
        """
        self.core.close()

    def _write_trace(self) -> None:
        """Write the trace, if one was asked for; a full disk costs no outputs."""
        if self._trace is None:
            return
        try:
            self.core.scheduler.write_trace(str(self._trace))
        except RuntimeError as error:
            warnings.warn(f"Engine: {error}", RuntimeWarning, stacklevel=3)
