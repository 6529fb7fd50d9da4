"""`specdec serve`: an HTTP server with OpenAI's endpoints and a page that shows drafted tokens."""

from __future__ import annotations

import argparse
import asyncio
import logging.config
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import engine_flags
from .arguments import MOST_SECONDS, allow_empty, checked_key
from .optional_dependencies import guarded, require

if TYPE_CHECKING:
    from ..server import Settings
    from .arguments import Subparsers

KEY_VARIABLE = "SPECDEC_API_KEY"
PACKAGES = ["torch", "transformers", "safetensors", "fastapi", "uvicorn", "prometheus_client"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model to OpenAI's clients, and a page that shows drafted tokens",
        description="Serve a model by speculative decoding: chat and text completions of OpenAI's API, metrics for "
        "Prometheus at /metrics, and a page at / that shows which tokens were drafted. Without arguments it serves the "
        "tiny model that comes with the package. SIGTERM lets running requests finish.",
    )
    engine_flags.add_arguments(parser)
    engine_flags.add_serving(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=30000, metavar="N", help="port to listen on; 0: any free one (30000)"
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="model names that clients may use; responses have the first (default: the path as given)",
    )
    key = parser.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: that of {KEY_VARIABLE}, else none)"
    )
    allow_empty(key)  # `api_key` refuses it, wherever it comes from
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of the model's tool calls, by vLLM's names: deepseek_v3, deepseek_v31, glm45, hermes, kimi_k2, "
        "llama3_json, minimax_m2, mistral, openai, pythonic, qwen3_coder (default: by its template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of the model's reasoning, which is returned apart from the answer: deepseek_r1, glm45, gpt_oss, "
        "kimi_k2, minimax_m2, nemotron, qwen3, or none: it stays in the text (default: by its template)",
    )
    parser.add_argument(
        "--sampling-defaults",
        choices=["model", "openai"],
        default="model",
        help="sampling of requests that do not specify it: model, as its generation config; openai, temperature 1",
    )
    parser.add_argument(
        "--max-queued-requests",
        type=int,
        default=2048,
        metavar="N",
        help="requests that may wait; the server answers 429 to further ones (2048)",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=8 << 20, metavar="N", help="largest body of a request (8388608)"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="longest prompt of a request (default: what the context holds)",
    )
    parser.add_argument(
        "--max-stored-responses",
        type=int,
        default=1024,
        metavar="N",
        help="responses of /v1/responses that are kept for later requests; 0: none (1024)",
    )
    parser.add_argument(
        "--max-stored-bytes", type=int, default=64 << 20, metavar="N", help="size of these responses (67108864)"
    )
    parser.add_argument("--max-n", type=int, default=128, metavar="N", help="choices of a request at most (128)")
    parser.add_argument(
        "--max-grammar-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="time that the schema, regular expression or grammar of a request may take to compile (5)",
    )
    parser.add_argument(
        "--upload-seconds", type=float, default=60.0, metavar="S", help="time in which a body must arrive (60)"
    )
    parser.add_argument(
        "--keep-alive-seconds",
        type=int,
        default=5,
        metavar="S",
        help="time without a request after which a connection is closed (5)",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help='origins of web pages that may ask the server, by CORS; "*": any (default: none)',
    )
    parser.add_argument(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="answer /tokenizer_info: the tokenizer's configuration and the chat template",
    )
    parser.add_argument("--ssl-certfile", metavar="FILE", help="certificate of TLS, in PEM; with --ssl-keyfile")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate, in PEM")
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where to send a trace of each request, by OpenTelemetry's protocol over HTTP (default: nowhere)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=int,
        metavar="S",
        help="time that requests have to finish after SIGTERM (default: no limit)",
    )
    parser.add_argument(
        "--log-level",
        choices=["error", "warning", "info", "debug"],
        default="warning",
        help="info logs each request (warning)",
    )
    parser.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="lines as key=value, or as JSON objects (text)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("serve", "serve", PACKAGES):
        return 2
    return guarded("serve", serve, args)


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or the end of a rank, then end the process; with 1 after a rank has failed."""
    check(args)  # before imports and models, which take a while
    with listening_socket(args.host, args.port) as listener:
        from ..engine import AsyncEngine
        from ..server import make_app, serving_process
        from ..server.observer import logging_config
        from ..server.parsers import format_of

        format_of("", args.tool_call_parser, args.reasoning_parser)
        chosen, template = engine_flags.resolve(args)
        logging.config.dictConfig(logging_config(args.log_level, args.log_format))
        with engine_flags.open_engine(args, chosen) as engine:
            flush = export_traces(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
            app = make_app(AsyncEngine(engine), settings_of(args, chosen.model, template))
            host, port = listener.getsockname()[:2]
            scheme = "https" if args.ssl_certfile else "http"
            where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            with serving_process():
                run_app(app, listener, args, f"{app.state.server.settings.model_name} ({chosen.algorithm}) at {where}")
            failed = bool(engine.core.failure)
    if flush is not None:
        flush()
    # The interpreter would free torch's modules for seconds, and wait for a grammar that is still compiled.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))


def export_traces(url: str) -> Callable[[], None]:
    """Send the spans that FastAPI makes of each request to a URL; return what sends the last ones."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "specdec"}))  # or OTEL_SERVICE_NAME's
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    trace.set_tracer_provider(provider)
    shutdown: Callable[[], None] = provider.shutdown
    return shutdown


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or OSError for flags that cannot be followed, as far as they show it by themselves."""
    api_key(args.api_key)
    for name, low in (
        ("max_queued_requests", 0),
        ("max_body_bytes", 1),
        ("max_n", 1),
        ("max_prompt_tokens", 1),
        ("max_grammar_seconds", 0.01),
        ("upload_seconds", 0.01),
        ("keep_alive_seconds", 0),
        ("drain_seconds", 0),
        ("max_stored_responses", 0),
        ("max_stored_bytes", 0),
    ):
        if (value := getattr(args, name)) is not None and not value >= low:  # nan is not
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least {low}")
        if value is not None and name.endswith("_seconds") and value > MOST_SECONDS:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at most {MOST_SECONDS:g}")
    for origin in args.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError(f"--allowed-origins has {origin}, expected * or an origin such as https://example.com")
    if (url := args.otlp_traces_endpoint) is not None:
        if not re.match("https?://[^/]", url):
            raise ValueError(f"--otlp-traces-endpoint is {url}, expected a URL such as http://localhost:4318/v1/traces")
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint is {url}, expected none without opentelemetry "
                '(pip install "specdec-kernels[otel]")'
            ) from error
    if args.ssl_keyfile and not args.ssl_certfile:
        raise ValueError(f"--ssl-keyfile is {args.ssl_keyfile}, expected --ssl-certfile with it")
    if args.ssl_certfile:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        except OSError as error:  # an SSLError is one
            raise ValueError(
                f"--ssl-certfile is {args.ssl_certfile}, expected a certificate in PEM and its key ({error})"
            ) from error


def settings_of(args: argparse.Namespace, model: Any, template: str | None) -> Settings:
    """Return the server's settings."""
    from ..server import Settings

    names = args.served_model_name or [args.model or "tiny"]
    return Settings(
        model_name=names[0],
        other_names=names[1:],
        api_key=api_key(args.api_key),
        defaults=sampling_defaults(model, args.sampling_defaults),
        chat_template=template,
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_queued=args.max_queued_requests,
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        max_n=args.max_n,
        max_grammar_seconds=args.max_grammar_seconds,
        max_stored_responses=args.max_stored_responses,
        max_stored_bytes=args.max_stored_bytes,
        upload_seconds=args.upload_seconds,
        shows_tokenizer=args.enable_tokenizer_info_endpoint,
        allowed_origins=args.allowed_origins,
    )


def api_key(flag: str | None) -> str | None:
    """Return the key that clients must send: of the flag, else of the environment, where other users cannot read it.

    Raises:
        ValueError: it is empty, as a secret that was not filled in, or no header can have it.
    """
    return checked_key(flag, "--api-key", KEY_VARIABLE)


def sampling_defaults(model: Any, source: str) -> dict[str, Any]:
    """Return the sampling of requests that do not specify it: OpenAI's, or that of a generation config that samples."""
    from ..engine import SamplingParams

    defaults: dict[str, Any] = {"temperature": 1.0}
    if source == "model":
        try:
            config = SamplingParams.from_generation_config(model)
        except FileNotFoundError:
            return defaults
        except ValueError as error:
            raise ValueError(f"{error}; --sampling-defaults openai does not read it") from error
        if config.temperature > 0:
            names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            defaults = {name: getattr(config, name) for name in names}
    return defaults


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address.

    Raises:
        ValueError: no port, or an address that cannot be bound.
    """
    if not 0 <= port < 65536:
        raise ValueError(f"--port is {port}, expected 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            opened.pop_all()
            return listener
    except (OSError, UnicodeError) as error:  # a name that is none
        raise ValueError(f"--host is {host} and --port {port}, expected an address to listen on ({error})") from error


def run_app(app: Any, listener: socket.socket, args: argparse.Namespace, title: str) -> None:
    """Serve until SIGTERM or SIGINT, and then until running requests have finished."""
    import uvicorn

    from ..server import Connection

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            app.state.server.prepare()
            print(f"specdec serve: {title}", flush=True)

        async def on_tick(self, counter: int) -> bool:
            if counter % 10 == 0:  # once a second
                close_idle(self.server_state.connections)
                if failure := app.state.server.engine.core.failure:
                    print(f"specdec serve: {failure}", file=sys.stderr, flush=True)
                    self.should_exit = True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if args.drain_seconds is not None:
                later = asyncio.get_running_loop().call_later
                later(args.drain_seconds, app.state.server.cancel_all)
                later(args.drain_seconds + 0.5, self.abort_connections)
            await super().shutdown(sockets)
            app.state.server.grammars.close()

        def abort_connections(self) -> None:
            """Abort the connections of clients that read no errors either, which ends their requests."""
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    idle_since: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def close_idle(connections: Any) -> None:
        """Close connections that have not sent a request, or all of its headers, for too long."""
        for connection in list(connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                idle_since.pop(connection, None)
            elif time.monotonic() - idle_since.setdefault(connection, time.monotonic()) > args.keep_alive_seconds:
                connection.transport.close()

    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,  # `serve` has configured logging
        access_log=False,
        timeout_keep_alive=args.keep_alive_seconds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        lifespan="off",
        ws="none",
        server_header=False,
        # One second after the requests were cancelled, for connections that are still open.
        timeout_graceful_shutdown=None if args.drain_seconds is None else args.drain_seconds + 1,
    )
    # uvicorn raises the signal again at the end. This handler ignores it, so that the engine is closed in order.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        Server(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
