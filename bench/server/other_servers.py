"""Other engines' servers, each in processes of its own."""

from __future__ import annotations

import http.client
import importlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..compare.engine_comparison import environment_of, process_group
from ..compare.engines import Algorithm, Job

OTHERS = ("sglang", "sglang_plugin")  # whose servers can be asked
START_SECONDS = 280.0  # in which one of them must be there


def status(port: int, method: str, path: str) -> int | None:
    """What a server answers there; None while there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@contextmanager
def served_by(name: str, job: Job, algorithm: Algorithm, folders: list[str], log: Path) -> Iterator[int]:
    """The port at which another engine's server answers.

    Raises:
        RuntimeError: it is not there in time, or ended.
    """
    runner = importlib.import_module(f"specdec_kernels.bench.compare.engines.{name}").Runner
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with process_group(
        runner.server(job, algorithm, port), environment_of(folders) | runner.environment(), log
    ) as process:
        until = time.monotonic() + START_SECONDS
        while status(port, "GET", "/health") != 200:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield port
