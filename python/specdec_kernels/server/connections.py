"""Connections of uvicorn, whose clients may send requests before the response to an earlier one, and leave."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """A connection whose loss ends all of its requests.

    uvicorn notifies the last request alone, although an earlier one runs, and starts those that wait.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._open: list[Any] = []  # requests whose responses are not complete

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._open = [*(one for one in self._open if not one.response_complete), self.cycle]

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        super().connection_lost(exc)
        for one in self._open:
            one.disconnected = one.disconnected or not one.response_complete
            one.message_event.set()
        self._open = []
