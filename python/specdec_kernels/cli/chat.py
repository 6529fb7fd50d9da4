"""`specdec chat`: a conversation in the terminal, with accepted draft tokens in color."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from . import engine_flags
from .arguments import allow_empty
from .generate import Printer, add_sampling, sampling_of
from .optional_dependencies import guarded, require

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine import Engine, RequestOutput, SamplingParams
    from .arguments import Subparsers

HELP = "/clear starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model that decodes speculatively: accepted draft tokens are in color, and each answer "
        f"is followed by its accept length and speed. {HELP}. Without arguments the tiny model that comes with the "
        "package continues what you type.",
    )
    engine_flags.add_arguments(parser)
    add_sampling(parser, max_new_tokens=1024)
    allow_empty(parser.add_argument("--system", metavar="TEXT", help="system message of the conversation"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("chat", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    return guarded("chat", chat, args)


def chat(args: argparse.Namespace) -> int:
    """Read messages and print answers until the input ends."""
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
        while (text := read_message(console)) is not None:
            if text == "/clear":
                messages = [*system]
            elif text:
                messages.append({"role": "user", "content": text})
                answer = print_answer(console, engine, messages, sampling, template)
                messages.append({"role": "assistant", "content": answer.text or ""})
    return 0


def read_message(console: Console) -> str | None:
    """Return what is typed next, None at the end."""
    try:
        text = console.input("[bold]> [/]").strip()
    except EOFError:
        return None
    return None if text == "/exit" else text


def print_answer(
    console: Console, engine: Engine, messages: list[dict[str, Any]], sampling: SamplingParams, template: str | None
) -> RequestOutput:
    """Print the answer as it is generated and return it; Ctrl-C ends it there."""
    options = {} if template is None else {"chat_template": template}
    tokens = engine.core.inputs.tokenize_chat(messages, options)
    begin = time.perf_counter()
    request = engine.submit(tokens, sampling)
    printer = Printer(console, engine.text_decoder(tokens))
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
