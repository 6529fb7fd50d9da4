"""SGLang's server with clients that stream, in place of its offline engine (`specdec bench engines --served`)."""

from __future__ import annotations

import asyncio
import atexit
import json
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

HOST = "127.0.0.1"
EVENT = b"data: {"
SECONDS_TO_END = 30.0


class Server:
    """A server process of SGLang with the interface of its offline engine.

    Args:
        options: those of `sglang.Engine`; each becomes a flag.

    Raises:
        RuntimeError: the server ended before it was ready.
    """

    def __init__(self, **options: Any) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(self.port)]
        # It stays in this process group, which is killed when the time is up.
        self._process = subprocess.Popen([*command, *flags_of(options)])
        atexit.register(self.shutdown)
        while not self._is_ready():
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"sglang.launch_server ended with code {code}, expected a server")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"http://{HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        """Send all prompts at once, each over a connection of its own, and return the last event of each stream."""
        bodies = [{"input_ids": ids, "sampling_params": sampling_params, "stream": True} for ids in input_ids]

        async def ask() -> list[bytes]:
            return await asyncio.gather(*(exchange(self.port, json.dumps(body).encode()) for body in bodies))

        return [last_event(received) for received in asyncio.run(ask())]

    def shutdown(self) -> None:
        """End the server, which ends the processes that it has started."""
        self._process.terminate()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def flags_of(options: dict[str, Any]) -> list[str]:
    """Return options of the offline engine as flags of the server."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


async def exchange(port: int, body: bytes) -> bytes:
    """Send a body to `/generate` and return everything that the server sends."""
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST /generate HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = await reader.read()
    writer.close()
    return received


def last_event(received: bytes) -> dict[str, Any]:
    """Return the last event of a stream, which has all tokens.

    Raises:
        RuntimeError: the server refused the request or sent no event.
    """
    events = [line for line in received.splitlines() if line.startswith(EVENT)]
    if not events or not received.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"/generate answered {received[:500]!r}, expected a stream of events")
    found: dict[str, Any] = json.loads(events[-1].removeprefix(b"data: "))
    return found
