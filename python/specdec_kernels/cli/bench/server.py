"""`specdec bench server`: time a server and the engine that it serves."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..arguments import CommandParser, at_least, integers, sized_words_of
from ..optional_dependencies import require
from . import modules
from .output import NO_CUDA, add_device, add_json, add_models, find_device, refuse, refuse_files, show
from .rounds import SETTINGS

COMMAND = "bench server"
PACKAGES = ["torch", "transformers", "safetensors", "fastapi", "uvicorn", "prometheus_client"]

EPILOG = """\
An engine on synthetic models answers the same prompts twice, in turn: as Engine.generate, and as streams to clients in
a process of their own, which send all at once. Every text is checked.

prompts:
  even    have nothing in common; the reference is Engine.generate
  json    constrained by a JSON schema; the reference is the same texts without it

  specdec bench server --shape qwen3-8b --acceptance code --concurrency 1,16,64
"""


def add_command(bench: CommandParser) -> None:
    """Add the benchmark's parser."""
    parser = bench.add_command(
        "server",
        description="Time a server and the engine that it serves: what HTTP, JSON and streaming cost.",
        epilog=EPILOG,
    )
    add_models(parser)
    parser.add_argument(
        "--algorithm",
        type=sized_words_of(SETTINGS),
        default=["chain"],
        metavar="NAME",
        help="as in `specdec bench round`, comma-separated (chain)",
    )
    parser.add_argument(
        "--concurrency",
        type=integers(1),
        default=[1, 16, 64],
        metavar="N",
        help="clients, comma-separated (1,16,64)",
    )
    parser.add_argument(
        "--json-clients", type=at_least(1), default=16, metavar="N", help="clients that ask for JSON (16)"
    )
    parser.add_argument("--input", type=at_least(1), default=321, metavar="N", help="tokens of a prompt (321)")
    parser.add_argument("--output", type=at_least(2), default=215, metavar="N", help="tokens of a text (215)")
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N", help="runs of each kind, in turn (5)")
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require(COMMAND, "serve", PACKAGES):
        return 2
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA, COMMAND)
    if (code := refuse_files(args, COMMAND)) is not None:
        return code
    record, rounds = modules.record, modules.round
    results: list[Any] = []
    setups, most = setups_of(args, device), max(*args.concurrency, args.json_clients)
    for setup in setups:
        needed, free = rounds.memory_needed(setup, most), rounds.free_memory(device)
        if needed > free:
            return refuse(
                f"{setup.shape} needs about {needed / 1e9:.1f} GB for weights and KV of {most} clients, and "
                f"{device.type} has {free / 1e9:.1f} GB free: another --shape, fewer --concurrency",
                COMMAND,
            )
    try:
        for result in modules.server.measure_server(setups, args.concurrency, args.json_clients, args.repeats):
            results.append(result)
            if args.json:  # what has been measured survives a later failure
                record.write_record(record.record(results, device, None, args.command_line), args.json)
    except ValueError as error:  # what the engine refuses, by name
        return refuse(str(error), COMMAND)
    show(record.record(results, device, None, args.command_line))
    wrong = [result for result in results if result.error]
    for result in wrong:
        print(f"specdec {COMMAND}: {result.params['prompts']}: {result.error}", file=sys.stderr)
    return 1 if wrong else 0


def setups_of(args: argparse.Namespace, device: Any) -> list[Any]:
    """Return a setup for each algorithm."""
    import torch

    from ...synthetic.acceptance import PublishedAcceptance

    rounds = modules.round
    return [
        rounds.Setup(
            args.shape,
            rounds.drafting_of(name),
            PublishedAcceptance(args.acceptance, args.drafter),
            args.input,
            args.output,
            device,
            torch.bfloat16 if device.type == "cuda" else torch.float32,
            max_len=args.input + args.output + modules.server.SPARE_TOKENS,
        )
        for name in args.algorithm
    ]
