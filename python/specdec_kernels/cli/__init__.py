"""The command line: `specdec <command>`.

A command is a module with `add_parser(subparsers)` and `run(args) -> int`, listed in COMMANDS. The module imports the
standard library only; `run` asks `optional_dependencies.require` for other packages.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from . import bench, chat, check_exact, doctor, generate, info, serve, tune
from .arguments import CommandParser

COMMANDS = (generate, chat, serve, check_exact, doctor, tune, bench, info)

DESCRIPTION = """\
Speculative decoding makes a large language model emit several tokens per forward pass: a cheap draft proposes a tree
of tokens, the model scores the whole tree at once, and a verify step keeps the longest part that the model itself
would have produced. The text is the model's own; it only takes less time.
"""

EPILOG = """\
Start with `specdec info`: it lists what is installed and what can run. `specdec <command> --help` explains a
command.
"""


def make_parser() -> CommandParser:
    """Return the parser of all commands."""
    from .. import __version__

    parser = CommandParser(
        prog="specdec",
        usage="specdec <command> [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"specdec_kernels {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="<command>", prog="specdec")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.command_line = shlex.join(["specdec", *(sys.argv[1:] if argv is None else argv)])
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        result: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
        return 1
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return 130
    return result
