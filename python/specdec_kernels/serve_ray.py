"""A Ray Serve application: replicas of `specdec serve` at one address, with each session kept on one replica.

`serve run specdec_kernels.serve_ray:app flags="MODEL --speculative-algorithm EAGLE3 ..." replicas=2 max_replicas=8`
starts it; docs/scale_out.md describes it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
except ImportError as error:
    hint = 'pip install "specdec-kernels[ray]"'
    raise ImportError(f"specdec_kernels.serve_ray needs Ray Serve ({hint}): {error}") from error

from .cli import engine_flags, make_parser
from .cli.serve import check, settings_of
from .engine import AsyncEngine
from .server import make_app, serving_process
from .server.protocol import RequestError
from .server.responses import event

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

# The router of Ray Serve that maps a session to a replica, and to the next ones on its ring where that one is full.
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
SCOPE = "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client"
SESSION_FIELDS = ("session_id", "prompt_cache_key", "user", "safety_identifier")
HEAD_CHARACTERS = 1024  # of a prompt, which requests without a session share
MAX_ATTEMPTS = 3  # replicas that a request may lose before its response begins


@dataclass
class Options:
    """Arguments of the application, as `serve run` and a config file give them.

    Attributes:
        flags: those of `specdec serve`; its address, TLS and logs are Ray's.
        replicas: engines to begin with, and at least.
        max_replicas: engines at most, by load (default: `replicas`).
        gpus: of each replica; 0 serves on the CPU.
        ingresses: processes that read requests and send responses.
    """

    flags: str = ""
    replicas: int = 1
    max_replicas: int = 0
    gpus: float = 1
    ingresses: int = 1

    def __post_init__(self) -> None:
        for name, convert in (("replicas", int), ("max_replicas", int), ("gpus", float), ("ingresses", int)):
            setattr(self, name, convert(getattr(self, name)))  # the command line gives strings
        self.max_replicas = max(self.max_replicas, self.replicas)


def app(args: dict[str, Any]) -> Any:
    """Build the application. `args` are `Options`.

    Raises:
        ValueError: flags of `specdec serve` that cannot be followed.
    """
    options = Options(**args)
    flags = parse(options.flags)
    slots = flags.max_running_requests or (64 if options.gpus else 8)
    replicas = serve.deployment(
        name="Replica",
        ray_actor_options={"num_gpus": options.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.max_replicas, target_ongoing_requests=slots * 3 / 4
        ),
        max_ongoing_requests=slots + slots // 4 + 1,  # a few wait, so that no slot does
        max_queued_requests=flags.max_queued_requests,
        request_router_config=RequestRouterConfig(request_router_class=cast(Any, ROUTER)),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=600 if flags.drain_seconds is None else flags.drain_seconds,
    )(Replica)
    ingress = serve.deployment(name="Ingress", num_replicas=options.ingresses, max_ongoing_requests=4096)(
        serve.ingress()(Ingress)
    )
    return ingress.bind(replicas.bind(options.flags), flags.max_body_bytes)


def parse(flags: str) -> argparse.Namespace:
    """Return the flags of `specdec serve` that a line of text holds."""
    args = make_parser().parse_args(["serve", *shlex.split(flags)])
    check(args)
    return args


class Replica:
    """An engine and its server."""

    async def __init__(self, flags: str) -> None:  # type: ignore[misc]
        args = parse(flags)
        chosen, template = engine_flags.resolve(args)
        with ExitStack() as opened:
            engine = opened.enter_context(engine_flags.open_engine(args, chosen))
            opened.enter_context(serving_process())
            self.app = make_app(AsyncEngine(engine), settings_of(args, chosen.model, template))
            self.server = self.app.state.server
            opened.callback(self.server.grammars.close)
            self.server.prepare()
            self._opened = opened.pop_all()

    async def __call__(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the messages of the response, those together that came while earlier ones were on their way."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            return unread.pop() if unread else await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while message := await messages.get():
                together = [message]
                while not messages.empty() and (message := messages.get_nowait()):
                    together.append(message)
                yield together
                if message is None:
                    break
            await task
        finally:
            task.cancel()  # the client has gone, if it is not done: the engine cancels its requests

    def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics."""
        return serve.get_replica_context().replica_tag, self.server.metrics.text().decode()

    async def whole(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Return all messages of the response."""
        return [one async for together in self(scope, body) for one in together]

    def check_health(self) -> None:
        """Raise if no request can be served; Ray then replaces the replica."""
        self.server.expect_healthy()

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()


class Ingress:
    """Reads requests, and forwards each to the replica of its session."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/metrics", self.metrics), Mount("", app=self.forward)])

    async def metrics(self, _: Request) -> Response:
        """Return the metrics of all replicas, with the label `replica`."""
        return Response(merged(await self._replicas.broadcast("metrics").results_async()), media_type="text/plain")

    async def forward(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request: by the replica of its session, or by another one if that is lost before it responds."""
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body") or len(body) > self._max_body_bytes:  # a replica refuses a longer one
                break
        else:
            return  # the client has gone
        request = {name: scope[name] for name in SCOPE if name in scope}, body
        if scope["path"] == "/flush_cache":  # the one request that all replicas follow
            for one in max(await self._replicas.broadcast("whole", *request).results_async(), key=status_of):
                await send(one)
            return
        replicas = self._replicas.options(stream=True, session_id=session_of(scope["headers"], body))
        start: Message | None = None
        for left in reversed(range(MAX_ATTEMPTS)):
            responses = replicas.remote(*request)
            try:
                async for messages in responses:
                    for one in messages:
                        await send(one)
                        start = start or one
                return
            except BackPressureError as error:
                wait = {"Retry-After": "1"}
                failure = RequestError(f"{error}: try again later", status=429, code="queue_full", headers=wait)
                break
            except (RayActorError, DeploymentUnavailableError) as error:
                failure = RequestError(f"the replica of this request is lost ({type(error).__name__})", status=503)
                if start or not left:
                    break
            finally:
                responses.cancel()
        if start is None:
            await JSONResponse(failure.body, failure.status, headers=failure.headers)(scope, receive, send)
        elif any(value.startswith(b"text/event-stream") for _, value in start["headers"]):
            await send({"type": "http.response.body", "body": event(failure.body), "more_body": False})
        else:
            raise failure


def status_of(messages: Iterable[Message]) -> int:
    """Return the HTTP status of a response."""
    return next(int(one["status"]) for one in messages if one["type"] == "http.response.start")


def session_of(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """Return what requests that can share a prefix have in common; "" if the request says nothing of it.

    That is the header `x-session-id`, or the first of SESSION_FIELDS, or the messages up to the first of the user, or
    the first characters of the prompt.
    """
    for name, value in headers:
        if name == b"x-session-id":
            return value.decode("latin-1")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # its replica refuses it
        return ""
    if not isinstance(fields, dict):
        return ""
    for field in SESSION_FIELDS:
        if isinstance(session := fields.get(field), str) and session:
            return session
    head = fields.get("messages") or fields.get("input") or fields.get("prompt") or ""
    if isinstance(head, list) and head and isinstance(head[0], dict):
        users = [index for index, one in enumerate(head) if isinstance(one, dict) and one.get("role") == "user"]
        shared = json.dumps(head[: users[0] + 1 if users else 1])
    else:
        shared = json.dumps(head)[:HEAD_CHARACTERS] if head else ""
    return hashlib.sha256(shared.encode()).hexdigest() if shared else ""


def merged(texts: Iterable[tuple[str, str]]) -> str:
    """Return the metrics of several replicas as one text; each sample gets its replica as a label."""
    families: dict[str, list[str]] = {}
    for replica, text in texts:
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP"):
                lines = families.setdefault(line, [])
            elif line.startswith("#"):
                lines += [line] * (not lines)
            else:
                name, brace, rest = line.partition("{")
                value = rest if brace else "} " + line.partition(" ")[2]
                lines.append(f'{name.partition(" ")[0]}{{replica="{replica}"{"," * bool(brace)}{value}')
    return "".join(f"{line}\n" for head, lines in families.items() for line in (head, *lines))
