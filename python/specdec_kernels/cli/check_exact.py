"""`specdec check-exact`: show that speculation does not change a server's answers."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .arguments import MOST_SECONDS, allow_empty, at_least, checked_key, integers
from .optional_dependencies import guarded, unwritable
from .progress import progress
from .table import print_table

if TYPE_CHECKING:
    from ..exactness import Options, Result, Run, Side
    from .arguments import Subparsers

KEY_VARIABLE = "OPENAI_API_KEY"
SWITCH = {"speculation": "off"}
START_SECONDS = 1800.0  # a model may have to be downloaded and captured


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "check-exact",
        help="show that speculation does not change a server's answers",
        description="Send the same requests to a server and to a reference, and compare texts, tokens, tool calls, "
        "finish reasons, log-probabilities and usage. The reference is another server (--against), or the same one "
        "with speculation switched off for each request. Any server of OpenAI's API will do. Exit code: 0 exact, 1 a "
        "true difference, 2 the check could not run.",
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--server", metavar="URL", help="the server to check, such as http://127.0.0.1:30000")
    servers.add_argument("--against", metavar="URL", help="the reference (default: --server, with --against-fields)")
    arguments = servers.add_argument(
        "--serve",
        metavar="ARGS",
        help="start `specdec serve ARGS` for the check, instead of --server; '' serves the tiny model",
    )
    allow_empty(arguments)
    servers.add_argument("--fields", metavar="JSON", help="members of each body for the server (default: none)")
    servers.add_argument(
        "--against-fields",
        metavar="JSON",
        help=f"members of each body for the reference (without --against: {json.dumps(SWITCH)})",
    )
    servers.add_argument("--model", metavar="NAME", help="model of the server (default: its first)")
    servers.add_argument("--against-model", metavar="NAME", help="model of the reference (default: its first)")
    servers.add_argument(
        "--dialect",
        choices=["auto", "specdec", "vllm", "sglang", "openai"],
        default="auto",
        help="fields beyond OpenAI's (auto: each server's own; openai: none)",
    )
    key = servers.add_argument(
        "--api-key", metavar="KEY", help=f"key of both servers (default: that of {KEY_VARIABLE})"
    )
    allow_empty(key)  # `checked_key` refuses it, wherever it comes from
    servers.add_argument(
        "--timeout",
        type=at_least(0.1, MOST_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds to wait for a byte (120)",
    )
    requests = parser.add_argument_group("requests")
    requests.add_argument("--requests", type=at_least(1), default=500, metavar="N", help="number of requests (500)")
    requests.add_argument(
        "--seed", type=at_least(0), default=1, metavar="N", help="what the requests are drawn from (1)"
    )
    requests.add_argument("--only", type=integers(0), metavar="N,...", help="send only requests of these numbers")
    skip = requests.add_argument(
        "--skip", default="", metavar="FEATURE,...", help="features to leave out, as the table names them"
    )
    allow_empty(skip)
    requests.add_argument(
        "--concurrency", type=at_least(1), default=8, metavar="N", help="requests that run at the same time (8)"
    )
    requests.add_argument("--max-tokens", type=at_least(8), default=32, metavar="N", help="tokens of an answer (32)")
    requests.add_argument(
        "--long-prompt", type=at_least(1), default=1500, metavar="N", help="tokens of the longest prompts (1500)"
    )
    requests.add_argument(
        "--context", type=at_least(64), metavar="N", help="tokens of prompt and answer (default: as the servers say)"
    )
    parser.add_argument(
        "--rounding",
        type=at_least(0.0),
        metavar="X",
        help="largest margin between logits that counts as a near tie, and tolerance of log-probabilities (default: "
        "measured on the reference, 0.001 to 0.5)",
    )
    parser.add_argument(
        "--shrink",
        type=at_least(0),
        default=8,
        metavar="N",
        help="differences whose smallest request is looked for (8)",
    )
    parser.add_argument("--report", metavar="FILE", help="write all findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return guarded("check-exact", check, args)


def check(args: argparse.Namespace) -> int:
    """Send the requests, print the result, and return the exit code."""
    if (args.server is None) == (args.serve is None):
        raise ValueError(f"--server is {args.server or 'missing'}, expected a URL, or --serve instead")
    if args.report and unwritable(args.report):
        raise ValueError(f"--report is {args.report}, expected a file in an existing folder")
    options = options_of(args)
    for flag in ("server", "against"):
        expect_url(getattr(args, flag), f"--{flag}")
    args.api_key = checked_key(args.api_key, "--api-key", KEY_VARIABLE)
    if args.serve is None:
        return check_server(args, args.server, options)
    with served(args.serve) as url:
        return check_server(args, url, options)


def check_server(args: argparse.Namespace, url: str, options: Options) -> int:
    """Check a server that runs, and return the exit code."""
    from .. import __version__
    from ..exactness import Run, as_json

    ours, theirs = sides_of(args, url)
    count = options.requests if options.only is None else len(options.only)
    with progress(count, "asking what the servers know") as advance:
        check = Run(ours, theirs, options, advance)
        result = measure(check)
    if args.report:
        report = as_json(result, check.ours, check.theirs, options, args.command_line, __version__)
        Path(args.report).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    show(result, check.ours)
    if not result.pairs or not result.complete:
        return 1 if result.pairs and not result.is_exact else 2
    return 0 if result.is_exact else 1


def measure(check: Run) -> Result:
    """Run a check; an unreachable server is a ValueError."""
    from ..exactness import Unreachable

    try:
        return check.run()
    except Unreachable as error:
        raise ValueError(f"the server is gone: {error}") from error


def options_of(args: argparse.Namespace) -> Options:
    from ..exactness import BEGUN, FEATURES, IDS, Options

    skip, known = [name for name in args.skip.split(",") if name], [*FEATURES, IDS, BEGUN]
    for name in skip:
        if name not in known:
            raise ValueError(f"--skip has {name!r}, expected one of {', '.join(known)}")
    return Options(
        requests=args.requests,
        seed=args.seed,
        concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        context=args.context,
        long_prompt=args.long_prompt,
        limit=args.rounding,
        shrink=args.shrink,
        only=args.only,
        skip=skip,
    )


def sides_of(args: argparse.Namespace, url: str) -> tuple[Side, Side]:
    """Return the server and the reference."""
    from ..exactness import Endpoint, Unreachable, open_side

    key = args.api_key
    fields = object_of(args.fields, "--fields")
    other_fields = object_of(args.against_fields, "--against-fields")
    try:
        ours = open_side(Endpoint(url, key, fields, args.timeout), args.model, args.dialect)
        if args.against is None and not args.against_fields:
            if ours.dialect != "specdec":
                raise ValueError(
                    f"{url} has no known switch of speculation for each request, expected --against URL "
                    "or --against-fields"
                )
            other_fields = SWITCH
        other = Endpoint(args.against or url, key, other_fields, args.timeout)
        theirs = open_side(other, args.against_model or (args.model if args.against is None else None), args.dialect)
    except Unreachable as error:
        raise ValueError(f"no server answers at {error}") from error
    return ours, theirs


def expect_url(text: str | None, flag: str) -> None:
    """Raise ValueError for a text that is no URL of a server."""
    try:
        parts = urlsplit(text or "http://none")
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != -1
    except ValueError:  # brackets, or a port that is none
        is_url = False
    if not is_url:
        raise ValueError(f"{flag} is {text}, expected http://HOST:PORT or https://HOST:PORT")


def object_of(text: str | None, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} is {text}, expected a JSON object")
    return value


def show(result: Result, ours: Side) -> None:
    from ..exactness import lines_of, rows_of, verdict_of

    print_table(["requests with", "pairs", "equal", "rounding", "differences"], rows_of(result))
    for line in [*lines_of(result, ours), verdict_of(result)]:
        print(line)


@contextmanager
def served(arguments: str) -> Iterator[str]:
    """Run `specdec serve` in a process of its own, and yield its URL."""
    import socket

    from ..exactness import Endpoint, Unreachable

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ValueError(f"--serve is {arguments!r}, expected arguments as a shell reads them ({error})") from error
    command = [sys.executable, "-m", "specdec_kernels", "serve", *words, "--port", str(port)]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            while True:
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip()[-600:]
                    raise ValueError(f"--serve is {arguments!r}, expected arguments that specdec serve accepts: {said}")
                try:
                    Endpoint(url).get("/v1/models")
                    break
                except Unreachable:
                    time.sleep(0.1)
            yield url
        finally:
            server.terminate()
