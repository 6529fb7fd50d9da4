"""docs/reference/cli.md, from the commands' parsers: `python tests/support/cli_reference.py > docs/reference/cli.md`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from specdec_kernels.cli import make_parser
from specdec_kernels.cli.arguments import CommandParser

HEAD = """\
# Command line

`specdec <command>`, or `python -m specdec_kernels <command>`. `--help` of each command says the same.
"""


def parsers() -> Iterator[CommandParser]:
    """Yield the parser of each command, and after it those of its own commands."""
    for parser in next(
        action.choices for action in make_parser()._actions if isinstance(action.choices, dict)
    ).values():
        yield parser
        yield from parser.commands.values()


def row(action: argparse.Action) -> str:
    """Return an option's line of the table."""
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest])
    choices = [f"`{choice}`" for choice in action.choices or ()]
    value = f"one of {', '.join(choices)}" if choices else action.metavar if action.option_strings else ""
    return f"| {names} | {value or ''} | {action.help} |"


def section(parser: CommandParser) -> str:
    """Return a command's section."""
    options = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    table = ["| option | value | |", "|---|---|---|", *map(row, options)]
    return "\n".join([f"## {parser.prog}", "", str(parser.description), "", *table, ""])


def reference_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *map(section, parsers())])


if __name__ == "__main__":
    print(reference_page(), end="")
