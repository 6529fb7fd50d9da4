"""The endpoints under `/v1/responses`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine import Engine
from ..protocol import Object, ParsedRequest, RequestError, Settings, read_chat, unexpected, validate
from ..protocol.errors import shown
from ..responses import ResponseBuilder
from .bodies import ResponsesBody, renamed
from .items import as_messages, read_items
from .output import ResponseRun
from .store import References, ResponseStore, StoredResponse, items_of

ID = "response_id"


class Host(Protocol):
    """The server that these endpoints need."""

    engine: Engine
    settings: Settings

    def check_key(self, request: Request) -> None:
        """Raise RequestError unless the client has the key."""
        ...

    async def body(self, request: Request) -> Object:
        """Return the body of an authorized request."""
        ...

    async def start(self, request: Request, parsed: ParsedRequest, arrival: float, *, is_chat: bool) -> ResponseBuilder:
        """Submit a request to the engine."""
        ...

    async def answer(self, request: Request, builder: ResponseRun, stream: bool) -> Response:
        """Return the HTTP response, whole or a stream."""
        ...


class ResponsesApi:
    """Responses of one server: those that are generated, and those that are stored."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.store = ResponseStore(host.settings.max_stored_responses, host.settings.max_stored_bytes)
        self._running: dict[str, ResponseRun] = {}

    async def create(self, request: Request) -> Response:
        """Generate a response."""
        arrival = time.perf_counter()
        host = self._host
        body = await asyncio.to_thread(validate, ResponsesBody, await host.body(request), host.settings)
        turns = self.store.conversation(body.previous_response_id) if body.previous_response_id else []

        def read() -> tuple[list[Object], ParsedRequest]:
            items = read_items(body.input, References(self.store).find)
            messages = as_messages([*items_of(turns), *items])
            return items, read_chat(body.as_chat(messages), host.settings, host.engine)

        try:
            items, parsed = await asyncio.to_thread(read)
            builder = await host.start(request, parsed, arrival, is_chat=True)
        except RequestError as error:
            raise renamed(error) from error

        def end(response: Object) -> None:
            if body.store:
                self.store.put(StoredResponse(response, items, body.previous_response_id))

        run = ResponseRun(builder, body.echo(), end)
        self._running = {one: other for one, other in self._running.items() if other.is_running}
        self._running[run.response["id"]] = run
        return await host.answer(request, run, body.stream)

    def _run(self, response_id: str) -> ResponseRun | None:
        run = self._running.get(response_id)
        return run if run is not None and run.is_running else None

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response, or one that is generated as it is so far."""
        self._host.check_key(request)
        response_id = request.path_params[ID]
        run = self._run(response_id)
        response = run.response if run is not None else self.store.get(ID, response_id).response
        return JSONResponse(response)

    async def delete(self, request: Request) -> Response:
        """Remove a stored response."""
        self._host.check_key(request)
        response_id = self.store.get(ID, request.path_params[ID]).id
        self.store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is generated."""
        self._host.check_key(request)
        response_id = request.path_params[ID]
        run = self._run(response_id)
        if run is None:
            status = self.store.get(ID, response_id).response["status"]
            raise RequestError(f"{ID} is {shown(response_id)}, which is {status}, expected one in progress", ID)
        run.cancel()
        return JSONResponse(run.response | {"status": "cancelled"})

    async def input_items(self, request: Request) -> Response:
        """Return the items that a response answers, without those of earlier responses."""
        self._host.check_key(request)
        stored = self.store.get(ID, request.path_params[ID])
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise unexpected("order", order, '"asc" or "desc"')
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= 100:
            raise unexpected("limit", limit, "1 to 100")
        items = stored.items if order == "asc" else stored.items[::-1]
        ids = [item["id"] for item in items]
        after = query.get("after")
        if after is not None and after not in ids:
            raise unexpected("after", after, "the id of an item of this response")
        begin = 0 if after is None else ids.index(after) + 1
        data = items[begin : begin + int(limit)]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        has_more = begin + len(data) < len(items)
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": has_more})
