"""Responses: OpenAI's objects, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from ..engine import AsyncRequest, GenerationError, NewTokens, TokenLogprob, merge_streams
from ..engine.text.detokenizer import Detokenizer
from ..status import FinishReason
from .parsers import Item, Parser, Reasoning, ReasoningByTokens, ToolCall
from .prompt_parts import EchoedPrompt, finite, legacy_logprobs, vllm_logprobs
from .protocol import ParsedRequest, RequestError
from .text import Piece, TextStream, TokenEnds, TokenText

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The answer to an HTTP request, which is generated."""

    @property
    def requests(self) -> Sequence[AsyncRequest]:
        """The engine's requests."""
        ...

    async def whole(self) -> dict[str, Any]:
        """Wait for the end, and return the body; RequestError if there is none."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a stream."""
        ...


class Choice:
    """One choice of a response, built as its tokens arrive."""

    def __init__(
        self,
        request: AsyncRequest,
        detokenizer: Detokenizer,
        parser: Parser | None,
        by_rounds: bool,
        generates: bool = True,
        markup: Detokenizer | None = None,
    ) -> None:
        self.request = request
        self._detokenizer, self._markup = detokenizer, markup
        self._generates = generates  # else its text is not part of the response
        self.parser = parser
        self.num_calls = 0
        self.num_echoed = 0  # characters of the prompt before the text
        self._by_rounds = by_rounds
        decoders = [(markup or detokenizer).decoder(request.output.prompt_tokens) for _ in range(2)]
        self._text, self._ends = TextStream(decoders[0], request.params.stop_strings), TokenEnds(decoders[1])

    def on_tokens(self, new: NewTokens) -> list[Piece]:
        """Decode new tokens, and return the text that can be sent."""
        if self._by_rounds:
            begin = len(new.tokens) - sum(new.rounds)  # the first tokens may have been given by the request
            self._text.push(new.tokens[:begin])
            for count in new.rounds:
                end = begin + count
                self._text.push(new.tokens[begin : end - 1], accepted=True)
                self._text.push(new.tokens[end - 1 : end])
                begin = end
        else:
            self._text.push(new.tokens)
        if new.finish_reason:
            return self._text.finish(self.final_text() if self._generates else "")
        found_stop = self.request.output.text is not None  # the final text is known, and its end follows
        return [] if found_stop else self._text.take()

    def final_text(self) -> str:
        """Return the text of a request that is done, with the special tokens that the parser reads."""
        output = self.request.outcome()
        text = output.text or ""
        if self._markup is None:
            return text
        for end in range(len(output.tokens), 0, -1):  # a stop string cuts off some of the last tokens, or parts of them
            kept = output.tokens[:end]
            plain = self._detokenizer.text(output.prompt_tokens, kept)
            if len(plain) <= len(text):
                return self._markup.text(output.prompt_tokens, kept) + text[len(plain) :]
        return text

    def count(self, tokens: Sequence[int]) -> None:
        """Note where new tokens end in the text, for the parser and `reasoning_tokens`."""
        if isinstance(self.parser, ReasoningByTokens):
            for token in tokens:
                self._ends.push([token])
                self.parser.on_token(token, self._ends.last)
        elif self.parser is not None:
            self._ends.push(tokens)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that are reasoning or its tags."""
        if self.parser is None:
            return 0
        if isinstance(self.parser, ReasoningByTokens):
            return self.parser.num_reasoning_tokens
        return sum(self._ends.count(begin, end) for begin, end in self.parser.reasoning_spans)

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return where in the text each of the next tokens begins."""
        return [self.num_echoed + begin for begin in self._ends.push(tokens)]

    def parse(self, text: str, last: bool) -> list[Item]:
        """Split text into reasoning, tool calls, and other text."""
        if self.parser is None:
            return [text] if text else []
        found = self.parser.push(text)
        if last:
            found += self.parser.finish()
        self.num_calls += sum(isinstance(item, ToolCall) for item in found)
        return found

    @property
    def finish_reason(self) -> str:
        if self.num_calls:
            return "tool_calls"
        if not self._generates:
            return "length"
        return "stop" if self.request.output.finish_reason == FinishReason.STOP else "length"

    @property
    def meta_info(self) -> dict[str, Any]:
        """Statistics of speculation, by SGLang's names."""
        stats = self.request.output.stats
        return {
            "spec_accept_length": stats.accept_length,
            "spec_accept_token_num": stats.accepted,
            "spec_draft_token_num": stats.drafted,
            "spec_verify_ct": stats.rounds,
        }


class Message:
    """The reasoning, the text and the calls among parsed items."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.text = "".join(item for item in items if isinstance(item, str))
        self.calls = [item for item in items if isinstance(item, ToolCall)]
        self._reasoning = "".join(item.text for item in items if isinstance(item, Reasoning))

    @property
    def reasoning(self) -> dict[str, str]:
        """The reasoning by both of its names: most clients read the first one, vLLM's read the second one."""
        return {"reasoning_content": self._reasoning, "reasoning": self._reasoning} if self._reasoning else {}


class ResponseBuilder:
    """The response to one HTTP request.

    Args:
        parsed: the HTTP request.
        requests: the engine's requests, one for each choice of each prompt.
        is_chat: of `/v1/chat/completions`, otherwise of `/v1/completions`.
        model: name of the model.
        detokenizer: decodes the choices.
        token_text: returns the text and bytes of a token.
        parser: creates a parser of reasoning and tool calls for a choice; None: there are none.
        markup: decodes the choices for their parsers, with special tokens; None: these read none.
        on_first: called at the first token.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        requests: Sequence[AsyncRequest],
        *,
        is_chat: bool,
        model: str,
        detokenizer: Detokenizer,
        token_text: Callable[[int], TokenText],
        parser: Callable[[], Parser] | None,
        markup: Detokenizer | None,
        on_first: Callable[[], None],
    ) -> None:
        self.parsed, self.requests, self._is_chat, self._token_text = parsed, requests, is_chat, token_text
        self._detokenizer = detokenizer
        self._echoes: dict[int, EchoedPrompt] = {}  # by choice
        self._prompt_logprobs: dict[int, list[Any]] = {}
        self._on_first, self.model = on_first, model
        self._num_tokens = 0  # received so far
        by_rounds = parsed.options.include_rounds and parsed.stream
        self.choices = [
            Choice(one, detokenizer, parser and parser(), by_rounds, parsed.generates, markup) for one in requests
        ]
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + (parsed.id or secrets.token_hex(12)),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices, and return the response object."""
        async for _ in self.chunks():
            pass
        indices = range(len(self.choices))
        for index in indices if self.parsed.shows_prompts else ():
            await asyncio.to_thread(self._read_prompt, index)  # a long one takes a while
        whole: dict[str, Any] = self._head | {"choices": [self._whole(index) for index in indices], "usage": self.usage}
        if self._is_chat:
            whole |= self._prompt_ids(0)
        if self._is_chat and self._prompt_logprobs:
            whole["prompt_logprobs"] = self._prompt_logprobs[0]
        return whole

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: chunks of choices as they arrive, then the usage."""
        begun: set[int] = set()
        head: dict[str, Any] = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        known = as_json(head)[1:-1]  # members of every event, encoded once
        usage: dict[str, Any] = {"usage": None} if self.parsed.options.include_usage else {}
        async for new in self.chunks():
            index = self._index_of(new)
            if self.parsed.echo and index not in begun:
                begun.add(index)
                await asyncio.to_thread(self._read_prompt, index)
                part = {"index": index, **self._echoes[index].before("", None), "finish_reason": None}
                part |= self._prompt_ids(index) | self._ids([])
                yield event({"choices": [part], **usage}, known)
            for part in self._deltas(self.choices[index], new):
                prompt: dict[str, Any] = {}
                if index not in begun:
                    begun.add(index)
                    prompt = self._prompt_ids(index)
                    if self._is_chat:
                        part["delta"] = {"role": "assistant", "content": "", **part["delta"]}
                    else:
                        part, prompt = part | prompt, {}
                if self.parsed.options.continuous_usage_stats:
                    usage = {"usage": self.usage}
                yield event({"choices": [{"index": index, **part}], **prompt, **usage}, known)
        if self.parsed.options.include_usage:
            yield event({"choices": [], "usage": self.usage}, known)
        yield DONE

    async def chunks(self) -> AsyncIterator[NewTokens]:
        """Yield new tokens of all choices; RequestError if one failed."""
        begun = False
        try:
            async for new in merge_streams(self.requests):
                if not begun:
                    begun = True
                    self._on_first()
                if new.finish_reason == FinishReason.CANCELLED:
                    raise RequestError("the request was cancelled, expected to be sent again", status=503)
                if new.finish_reason == FinishReason.TIMEOUT:
                    seconds = self.parsed.params.timeout
                    message = f"timeout is {seconds}, expected more seconds: the request was not done after them"
                    raise RequestError(message, "timeout", status=504, code="timeout")
                if not self.parsed.generates:
                    new = NewTokens(new.index, [], new.finish_reason, sample=new.sample)
                self._num_tokens += len(new.tokens)
                self.choices[self._index_of(new)].count(new.tokens)
                yield new
        except GenerationError as error:
            raise RequestError(str(error), status=500) from error

    def _read_prompt(self, index: int) -> None:
        """Read what the response shows of a choice's prompt, which is there with the choice's first token."""
        parsed, request, choice = self.parsed, self.requests[index], self.choices[index]
        tokens, scored = request.output.prompt_tokens, request.read_prompt_logprobs()
        if parsed.num_prompt_top >= 0 and scored is not None:
            self._prompt_logprobs[index] = vllm_logprobs(tokens, scored, parsed.num_prompt_top, self._token_text)
        if parsed.echo:
            given = parsed.echo[index // parsed.params.n]
            scored = scored if parsed.num_top >= 0 else None
            echo = EchoedPrompt.of(
                given, tokens, scored, parsed.num_top, self._detokenizer, self._token_text, self._name
            )
            self._echoes[index], choice.num_echoed = echo, len(echo.text)

    def _message(self, items: Sequence[Item]) -> Message:
        kept = items if self.parsed.include_reasoning else [one for one in items if not isinstance(one, Reasoning)]
        return Message(kept)

    def _index_of(self, new: NewTokens) -> int:
        return new.index * self.parsed.params.n + new.sample

    def _deltas(self, choice: Choice, new: NewTokens) -> list[dict[str, Any]]:
        """Return the deltas for new tokens: usually one, none while a character is incomplete."""
        last = bool(new.finish_reason)
        pieces = choice.on_tokens(new)
        found = choice.parse("".join(piece.text for piece in pieces), last)
        logprobs = self._logprobs(choice, new.tokens, new.logprobs)
        if not found and not last and logprobs is None and not (self.parsed.shows_ids and new.tokens):
            return []
        parts: list[dict[str, Any]] = []
        if self._is_chat:
            message = self._message(found)
            first = choice.num_calls - len(message.calls)
            delta: dict[str, Any] = {**message.reasoning, **({"content": message.text} if message.text else {})}
            if message.calls:
                delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(message.calls)]
            parts.append({"delta": delta, "logprobs": logprobs, "finish_reason": None})
        else:
            parts.append({"text": "".join(map(str, found)), "logprobs": logprobs, "finish_reason": None})
        parts[0] |= self._ids(new.tokens)
        if self.parsed.options.include_rounds:
            parts[0]["rounds"] = new.rounds
            parts[0]["pieces"] = [piece._asdict() for piece in pieces]
        if last:
            parts[-1] |= {"finish_reason": choice.finish_reason, "meta_info": choice.meta_info}
        return parts

    def _whole(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        output = choice.request.outcome()
        text = choice.final_text() if self.parsed.generates else ""
        message = self._message(choice.parse(text, last=True))
        logprobs = self._logprobs(choice, output.tokens, output.logprobs) if self.parsed.generates else None
        whole: dict[str, Any] = {"index": index, "logprobs": logprobs}
        if self._is_chat:
            content = message.text if message.text or not message.calls else None
            whole["message"] = {"role": "assistant", **message.reasoning, "content": content}
            if message.calls:
                whole["message"]["tool_calls"] = message.calls
        else:
            whole["text"] = message.text
            if index in self._echoes:
                whole |= self._echoes[index].before(message.text, logprobs)
            if index in self._prompt_logprobs:
                whole["prompt_logprobs"] = self._prompt_logprobs[index]
            whole |= self._prompt_ids(index)
        whole |= self._ids(output.tokens if self.parsed.generates else [])
        return whole | {"finish_reason": choice.finish_reason, "meta_info": choice.meta_info}

    def _prompt_ids(self, index: int) -> dict[str, list[int]]:
        """Return the token ids of a choice's prompt, if the response has them."""
        return {"prompt_token_ids": self.requests[index].output.prompt_tokens} if self.parsed.shows_ids else {}

    def _ids(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        """Return token ids of a choice, if the response has them."""
        return {"token_ids": list(tokens)} if self.parsed.shows_ids else {}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts, stop tokens included; a prompt counts once for all its choices."""
        outputs = [request.output for request in self.requests]
        of_prompts = outputs[:: self.parsed.params.n]
        prompt = sum(len(output.prompt_tokens) for output in of_prompts)
        cached = sum(output.cached_tokens for output in of_prompts)
        completion = self._num_tokens
        accepted = sum(output.stats.accepted for output in outputs)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        reasoning = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)}
        return usage | {
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(output.stats.drafted for output in outputs) - accepted,
                **(reasoning if self._is_chat else {}),
            },
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _logprobs(
        self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        if self.parsed.num_top < 0 or not logprobs:
            return None
        scored = slice(len(tokens) - len(logprobs), None)  # the first tokens may have been given by the request
        if self._is_chat:
            return {"content": self.chat_logprobs(tokens[scored], logprobs)}
        offsets = choice.offsets(tokens)
        return legacy_logprobs(tokens[scored], logprobs, offsets[scored], self.parsed.num_top, self._name)

    def chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> list[dict[str, Any]]:
        """Return the entry of each token in the form of a chat."""
        if self.parsed.num_top < 0 or not logprobs:
            return []
        return [self._chat_entry(token, one) for token, one in zip(tokens, logprobs, strict=True)]

    def _chat_entry(self, token: int, one: TokenLogprob) -> dict[str, Any]:
        return self._entry(token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        name = f"token_id:{token}" if self.parsed.ids_as_tokens else text.text
        return {"token": name, "logprob": finite(logprob), "bytes": text.bytes}

    def _name(self, token: int) -> str:
        """Return what log-probabilities of completions call a token."""
        return f"token_id:{token}" if self.parsed.ids_as_tokens else self._token_text(token).key


as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: dict[str, Any], known: str = "") -> bytes:
    """Encode a server-sent event: an object that begins with the members `known`, given as JSON."""
    text = as_json(value)
    return f"data: {{{known},{text[1:]}\n\n".encode() if known else f"data: {text}\n\n".encode()
