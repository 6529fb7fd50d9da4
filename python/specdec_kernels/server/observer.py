"""Middleware around every HTTP request: its id, a line in the log, and the counts of responses."""

from __future__ import annotations

import json
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import AsyncRequest
from .metrics import Metrics
from .protocol import RequestError

logger = logging.getLogger("specdec_kernels.server")
MAX_ID_LENGTH = 256
MAX_REASON = 500  # characters of an error message in a line
STATUS_LEFT = 499  # nginx's, of a client that left before a response began


class Observer:
    """Gives each response the `x-request-id` of its request, or a new one; logs and counts it when it has ended.

    Endpoints add to `scope["facts"]`: `requests`, those of the engine; `reason`, why it was refused or failed.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        is_long = len(given) > MAX_ID_LENGTH
        scope["request_id"] = secrets.token_hex(16) if is_long or not given else given
        scope["facts"] = {}
        status = STATUS_LEFT

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = scope["request_id"]
            await send(message)

        try:
            if is_long:
                error = RequestError(f"x-request-id has {len(given)} characters, expected at most {MAX_ID_LENGTH}")
                scope["facts"]["reason"] = str(error)
                await JSONResponse(error.body, error.status)(scope, receive, observed_send)
            else:
                await self._app(scope, receive, observed_send)
        except Exception as error:
            status = 500
            scope["facts"]["reason"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end(scope, status, begin)

    def _end(self, scope: Scope, status: int, begin: float) -> None:
        seconds = time.perf_counter() - begin
        handler = getattr(scope.get("route"), "path", "none")
        self._metrics.count_response(handler, scope["method"], status, seconds)
        level = logging.ERROR if status >= 500 else logging.INFO
        if logger.isEnabledFor(level):
            facts = {"id": scope["request_id"], "method": scope["method"], "path": scope["path"], "status": status}
            facts |= described(scope["facts"], begin) | {"total_seconds": round(seconds, 6)}
            logger.log(level, "%s", text_of(facts), extra={"facts": facts})


def described(facts: dict[str, Any], begin: float) -> dict[str, Any]:
    """Return what a line says of the engine's requests, and the reason of an error."""
    found: dict[str, Any] = {}
    requests: list[AsyncRequest] = facts.get("requests", [])
    if requests:
        outputs, times = [request.output for request in requests], [request.times for request in requests]
        found["model"] = facts["model"]
        found["prompt_tokens"] = sum(len(output.prompt_tokens) for output in outputs[:: requests[0].params.n])
        found["completion_tokens"] = sum(len(output.tokens) for output in outputs)
        found["finish"] = ",".join(sorted({output.finish_reason.name.lower() for output in outputs}))
        begun = [one.begun - one.submitted for one in times if one.begun is not None]
        first = [one.chunks[0] - begin for one, output in zip(times, outputs, strict=True) if output.tokens]
        if begun:
            found["queue_seconds"] = round(max(begun), 6)
        if first:
            found["first_token_seconds"] = round(min(first), 6)
    if "reason" in facts:
        found["reason"] = facts["reason"][:MAX_REASON]
    return found


def text_of(facts: dict[str, Any]) -> str:
    """Return facts as `key=value`, the values as JSON where they are not plain."""
    values = {key: value if is_plain(value) else json.dumps(value) for key, value in facts.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def is_plain(value: Any) -> bool:
    return not isinstance(value, str) or (value.isascii() and value.isprintable() and not set(value) & set(' "='))


class JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        line |= getattr(record, "facts", None) or {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def logging_config(level: str, format: str) -> dict[str, Any]:
    """Return a configuration of `logging` for the server's process: lines with their times on stderr."""
    formatter: dict[str, Any] = {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}
    if format == "json":
        formatter = {"()": f"{__name__}.{JsonFormatter.__name__}"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {name: {"handlers": ["stderr"], "level": level.upper()} for name in ("specdec_kernels", "uvicorn")},
    }
