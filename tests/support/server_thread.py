"""A server in a thread on its own port, with a client for tests."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from openai import OpenAI

from specdec_kernels.cli.engine_flags import TINY_TEMPLATE
from specdec_kernels.engine import AsyncEngine, Engine
from specdec_kernels.server import Connection, Settings, make_app

NAME = "tiny"


class Running(NamedTuple):
    """A running server."""

    port: int
    engine: Engine
    app: Any

    @contextmanager
    def client(self, **options: Any) -> Iterator[OpenAI]:
        given = {"api_key": "any", "max_retries": 0, "timeout": 60} | options
        with OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **given) as client:
            yield client

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            yield connection
        finally:
            connection.close()

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Return status, headers and body; send a POST if there is a body (JSON or bytes)."""
        with self.connection() as connection:
            data = json.dumps(body) if isinstance(body, dict | list) else body
            connection.request("GET" if body is None else "POST", path, data, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def error(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str, str | None]:
        """Return status, message and field of a refusal."""
        status, _, answer = self.ask(path, body, headers)
        error = json.loads(answer)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return status, error["message"], error["param"]

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.app.state.server.metrics.num_open)


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Running]:
    """Serve an engine until the block ends, then close it."""
    given = {"model_name": NAME, "chat_template": TINY_TEMPLATE, "defaults": {"temperature": 0.0}} | settings
    with engine, socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(AsyncEngine(engine), Settings(**given))
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield Running(listener.getsockname()[1], engine, app)
        finally:
            server.should_exit = True
            thread.join()
            app.state.server.grammars.close()


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `specdec serve` in a process of its own, and return its address."""
    command = [sys.executable, "-m", "specdec_kernels", "serve", "--port", "0", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("specdec serve: "), process.stderr.read()
    return process, line
