"""Clients of a server in a process of their own, with as little work per event as possible: `python client.py PORT`.

A line of stdin is a list of request bodies as JSON. All are sent at once, each over a connection that is already open;
received data is stored with its time and parsed after the last byte. A line of stdout is a list of answers: the seconds
from sending to each event of the stream, the text of each event, and the seconds to the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

OK = b"HTTP/1.1 200"
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


class Client(asyncio.Protocol):
    """One connection, used for one request after another."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-7:]
        refused = len(self.arrivals) == 1 and not data.startswith(OK)
        if refused or self._tail == b"\r\n0\r\n\r\n":
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future ends with its answer."""
        self.arrivals, self.ended, self._tail = [], asyncio.get_running_loop().create_future(), b""
        self.transport.write(request)
        return self.ended

    def answer(self, sent: float) -> dict[str, Any]:
        """Parse the received data; its times are seconds after `sent`."""
        whole = b"".join(data for _, data in self.arrivals)
        head, _, rest = whole.partition(b"\r\n\r\n")
        if not head.startswith(OK) or not self._tail.endswith(b"0\r\n\r\n"):
            return {"error": whole.decode(errors="replace")[:2000]}
        times: list[float] = []
        texts: list[str] = []
        at, arrivals, received = len(head) + 4, iter(self.arrivals), 0
        came = 0.0
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            chunk, rest = rest[:count], rest[count + 2 :]
            at += len(size) + count + 4
            while received < at:
                came, data = next(arrivals)
                received += len(data)
            if chunk.startswith(b"data: {"):
                for choice in json.loads(chunk[6:])["choices"]:
                    if choice["text"]:
                        texts.append(choice["text"])
                        times.append(came - sent)
        return {"seconds": times, "texts": texts, "last": self.arrivals[-1][0] - sent}


async def serve_input(port: int) -> None:
    """Send the requests of each line of stdin."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        bodies = [json.dumps(body).encode() for body in json.loads(line)]
        requests = [HEAD.format(len(body)).encode() + body for body in bodies]
        clients = [client for client in clients if not client.transport.is_closing()]
        while len(clients) < len(requests):
            clients.append((await loop.create_connection(Client, "127.0.0.1", port))[1])
        gc.collect()
        gc.disable()
        used = clients[: len(requests)]
        sent = time.perf_counter()
        await asyncio.gather(*[client.send(request) for client, request in zip(used, requests, strict=True)])
        gc.enable()
        print(json.dumps([client.answer(sent) for client in used]), flush=True)


if __name__ == "__main__":
    asyncio.run(serve_input(int(sys.argv[1])))
