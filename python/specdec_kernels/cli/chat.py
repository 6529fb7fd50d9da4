"""`specdec chat`: a conversation in the terminal, with the accepted draft tokens in colour."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from . import engine_flags
from .generate import Printer, add_sampling, sampling_of
from .optional_dependencies import require

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine import Engine, RequestOutput, SamplingParams

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "/clear begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation with a model, by speculative decoding: accepted draft tokens are in colour, and "
        f"each answer is followed by what they were worth. {HELP}. Without arguments the tiny model that comes with "
        "the package goes on with what you type.",
    )
    engine_flags.add_arguments(parser)
    add_sampling(parser, max_new_tokens=1024)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not require("chat", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    try:
        return chat(args)
    except (OSError, ValueError, NotImplementedError) as error:  # what the engine refuses, by name
        print(f"specdec chat: {error}", file=sys.stderr)
        return 2


def chat(args: argparse.Namespace) -> int:
    from rich.console import Console

    chosen, template = engine_flags.resolve(args)
    sampling = sampling_of(args, chosen.model)
    console = Console(highlight=False)
    with console.status("loading"):
        engine = engine_flags.open_engine(args, chosen, num_slots=1)
    with engine:
        console.print(f"{args.model or 'the tiny model'}, {chosen.algorithm}. {HELP}.", style="dim", markup=False)
        system = [{"role": "system", "content": args.system}] if args.system else []
        messages: list[dict[str, Any]] = [*system]
        while (text := asked(console)) is not None:
            if text == "/clear":
                messages = [*system]
            elif text:
                messages.append({"role": "user", "content": text})
                answer = answered(console, engine, messages, sampling, template)
                messages.append({"role": "assistant", "content": answer.text or ""})
    return 0


def asked(console: Console) -> str | None:
    """What is typed next; None: nothing more."""
    try:
        text = console.input("[bold]> [/]").strip()
    except EOFError:
        return None
    return None if text == "/exit" else text


def answered(
    console: Console, engine: Engine, messages: list[dict[str, Any]], sampling: SamplingParams, template: str | None
) -> RequestOutput:
    """Prints the answer as it comes; Ctrl-C ends it, and it stands as far as it came."""

    options = {} if template is None else {"chat_template": template}
    tokens = engine.core.inputs.tokenize_chat(messages, options)
    begin = time.perf_counter()
    request = engine.submit(tokens, sampling)
    printer = Printer(console, engine)
    try:
        for new in request:
            printer(new)
    except KeyboardInterrupt:
        request.cancel()
    output = request.result()
    seconds = time.perf_counter() - begin
    printer.finish()
    speed = f"{len(output.tokens) / seconds:.1f} tokens/s"
    console.print(f"{len(output.tokens)} tokens, accept length {output.stats.accept_length:.2f}, {speed}", style="dim")
    return output
