"""Clients of a server, as cheap as can be, in a process of their own: `python server_client.py PORT`.

A line of its input is a list of requests, `[path, body]` as JSON. All are sent at once, each over a connection that is
open already; what arrives is kept as it is, with its time, and looked at when all have come. A line of its output is a
list of answers: seconds from the sending to each event of the stream, the text, and what was used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

OK = b"HTTP/1.1 200"


class Client(asyncio.Protocol):
    """One connection, which one request after another uses."""

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
        self.arrivals, self.ended, self._tail = [], asyncio.get_running_loop().create_future(), b""
        self.transport.write(request)
        return self.ended

    def answer(self, sent: float) -> dict[str, Any]:
        """What came, with the seconds behind `sent` at which it did."""
        whole = b"".join(data for _, data in self.arrivals)
        head, _, rest = whole.partition(b"\r\n\r\n")
        if not head.startswith(OK) or not self._tail.endswith(b"0\r\n\r\n"):
            return {"error": whole.decode(errors="replace")[:2000]}
        ends, total = [], 0
        for at, data in self.arrivals:
            total += len(data)
            ends.append((total, at))
        times: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        at, arrival = len(head) + 4, iter(ends)
        end, came = next(arrival)
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            chunk, rest = rest[:count], rest[count + 2 :]
            at += len(size) + count + 4
            while end < at:
                end, came = next(arrival)
            if not chunk.startswith(b"data: {"):
                continue
            event = json.loads(chunk[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                if text:
                    texts.append(text)
                    times.append(came - sent)
        return {"seconds": times, "texts": texts, "usage": usage, "last": self.arrivals[-1][0] - sent}


async def serve_input(port: int) -> None:
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        requests = []
        for path, body in json.loads(line):
            data = json.dumps(body).encode()
            kind = "Content-Type: application/json\r\n"  # without which others do not look into a body
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: {len(data)}\r\n\r\n"
            requests.append(head.encode() + data)
        clients = [client for client in clients if not client.transport.is_closing()]
        while len(clients) < len(requests):
            clients.append((await loop.create_connection(Client, "127.0.0.1", port))[1])
        gc.collect()
        gc.disable()
        asked = clients[: len(requests)]
        sent = time.perf_counter()
        await asyncio.gather(*[client.send(request) for client, request in zip(asked, requests, strict=True)])
        gc.enable()
        answers = [client.answer(sent) for client in asked]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    asyncio.run(serve_input(int(sys.argv[1])))
