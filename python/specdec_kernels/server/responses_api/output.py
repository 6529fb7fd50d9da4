"""The output of a response: its items, and the events of a stream that make them up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..parsers import Item, Reasoning, ToolCall
from ..protocol import Object, RequestError
from ..responses import ResponseBuilder, as_json
from .items import call_item, new_id

Event = dict[str, Any]


class ResponseRun:
    """A response that is generated.

    Args:
        builder: of the chat that it is generated as.
        response: the response object with the fields of the request.
        on_end: called with the final object, unless the client disconnects.
    """

    def __init__(self, builder: ResponseBuilder, response: Object, on_end: Callable[[Object], None]) -> None:
        self.response = response | {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        params = builder.parsed.params
        self.response |= {"status": "in_progress", "error": None, "incomplete_details": None, "output": []}
        self.response |= {
            "model": builder.model,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None,
        }
        self._builder, self._on_end = builder, on_end
        self._choice = builder.choices[0]
        self._output: list[Object] = self.response["output"]
        self._is_open = False  # the last item
        self._logprobs: list[Object] = []  # of tokens whose text has not been sent
        self._num_passed = 0  # tokens of reasoning whose log-probabilities were left out
        self._is_cancelled = False
        self._error: RequestError | None = None
        self._number = 0

    @property
    def requests(self) -> Any:
        """The engine's requests."""
        return self._builder.requests

    @property
    def is_running(self) -> bool:
        """Whether it is generated, and its client waits for it."""
        return self.response["status"] == "in_progress" and not self.requests[0].done()

    def cancel(self) -> None:
        """End the response with the output that it has."""
        self._is_cancelled = True
        for request in self.requests:
            request.cancel()

    async def whole(self) -> Object:
        """Wait for the end, and return the response; RequestError if it failed."""
        async for _ in self._run():
            pass
        if self._error is not None:
            raise self._error
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events."""
        async for event in self._run():
            event["sequence_number"] = self._number
            self._number += 1
            yield f"event: {event['type']}\ndata: {as_json(event)}\n\n".encode()

    async def _run(self) -> AsyncIterator[Event]:
        for kind in ("created", "in_progress"):
            yield self._lifecycle(kind)
        status = "completed"
        try:
            async for new in self._builder.chunks():
                text = "".join(piece.text for piece in self._choice.on_tokens(new))
                found = self._choice.parse(text, bool(new.finish_reason))
                self._logprobs += self._builder.chat_logprobs(new.tokens, new.logprobs)
                for item in found:
                    for event in self._add(item):
                        yield event
            if self._choice.finish_reason == "length":
                status = "incomplete"
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        except RequestError as error:
            status = "cancelled" if self._is_cancelled else "failed"
            if status == "failed":
                self._error = error
                self.response["error"] = {"code": "server_error", "message": str(error)}
        if not self._output and status == "completed":
            for event in self._open({"type": "message", "role": "assistant"}, "msg"):
                yield event
        for event in self._close("completed" if status == "completed" else "incomplete"):
            yield event
        self.response |= {"status": status, "usage": self._usage, "completed_at": int(time.time())}
        self._on_end(self.response)
        yield self._lifecycle("incomplete" if status == "cancelled" else status)

    def _lifecycle(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self.response}

    @property
    def _usage(self) -> Object:
        usage = self._builder.usage
        details = usage["completion_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": usage["total_tokens"],
        }

    # --- items

    def _add(self, item: Item) -> Iterator[Event]:
        if isinstance(item, ToolCall):
            yield from self._close()
            yield from self._call(item)
            return
        is_reasoning = isinstance(item, Reasoning)
        kind = "reasoning" if is_reasoning else "message"
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._close()
            if is_reasoning:
                yield from self._open({"type": kind, "summary": []}, "rs")
            else:
                yield from self._open({"type": kind, "role": "assistant"}, "msg")
        text = item.text if isinstance(item, Reasoning) else str(item)
        part = self._output[-1]["content"][0]
        part["text"] += text
        if is_reasoning:
            yield {"type": "response.reasoning_text.delta", **self._place, "delta": text}
        else:
            logprobs = self._take_logprobs()
            part["logprobs"] += logprobs
            yield {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": logprobs}

    @property
    def _place(self) -> Event:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _open(self, fields: Object, prefix: str) -> Iterator[Event]:
        self._output.append({"id": new_id(prefix), **fields, "status": "in_progress", "content": []})
        self._is_open = True
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._output) - 1,
            "item": self._output[-1],
        }
        part: Object = {"type": "reasoning_text", "text": ""}
        if fields["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"].append(part)
        yield {"type": "response.content_part.added", **self._place, "part": part}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        item = self._output[-1]
        part = item["content"][0]
        if item["type"] == "reasoning":
            yield {"type": "response.reasoning_text.done", **self._place, "text": part["text"]}
        else:
            part["logprobs"] += self._take_logprobs()
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **self._place, **done}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        item["status"], self._is_open = status, False
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        item = call_item(call["id"], call.name, call.arguments)
        index = len(self._output)
        place = {"item_id": item["id"], "output_index": index}
        self._output.append(item)
        added = item | {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}
        done = {"arguments": call.arguments, "name": call.name}
        yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self._logprobs = []

    def _take_logprobs(self) -> list[Object]:
        """Return log-probabilities of the message's tokens, without those of the reasoning before it."""
        left_out = max(self._choice.reasoning_tokens - self._num_passed, 0)
        self._num_passed += left_out
        taken, self._logprobs = self._logprobs[left_out:], []
        return taken
