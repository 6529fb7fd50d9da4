"""Building blocks of the commands' parsers: nested commands, hidden spellings, types of values."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Container = argparse._ActionsContainer
    Subparsers = argparse._SubParsersAction["CommandParser"]


MOST = 2**31 - 1  # of integers
MOST_SECONDS = 1e9  # timers take no more


class CommandParser(argparse.ArgumentParser):
    """A parser whose first argument may name a command of its own, as in `specdec bench round`.

    It refuses values that are empty, as those of shell variables that are not set, and names flags that are repeated.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands: dict[str, CommandParser] = {}

    def add_command(self, name: str, **options: Any) -> CommandParser:
        """Add a command and return its parser."""
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        self.commands[name] = CommandParser(prog=f"{self.prog} {name}", **options)
        return self.commands[name]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if words and words[0] in self.commands:
            return self.commands[words[0]].parse_args(words[1:], namespace), []
        for word in words:
            spelling = word.partition("=")[0]
            if (name := getattr(self._option_string_actions.get(spelling), "now", None)) is not None:
                print(f"{self.prog}: {spelling} is {name} since 0.3.0", file=sys.stderr)
        for name in self._repeated(words):
            print(f"{self.prog}: {name} is given more than once, the last one counts", file=sys.stderr)
        return super().parse_known_args(words, namespace)

    def _repeated(self, words: Sequence[str]) -> list[str]:
        """Return the flags with one value that are given more than once, by any of their spellings."""
        given = [self._option_string_actions.get(word.partition("=")[0]) for word in words]
        single = [
            action
            for action in given
            if action is not None
            and not isinstance(action, argparse._AppendAction)
            and (action.nargs != 0 or isinstance(action, argparse.BooleanOptionalAction))
        ]
        names: dict[str, list[str]] = {}
        for action in single:
            names.setdefault(action.dest, []).append(action.option_strings[0])
        return [each[-1] for each in names.values() if len(each) > 1]

    def _get_values(self, action: Any, arg_strings: Any) -> Any:
        """Return the value of an argument; argparse calls this for each one that is given."""
        own = arg_strings[:1] if action.nargs == argparse.PARSER else arg_strings  # not those of a command
        if "" in own and not getattr(action, "may_be_empty", False):
            raise argparse.ArgumentError(action, "it is empty, expected a value")
        return super()._get_values(action, arg_strings)


def add_flag(parser: Container, name: str, *hidden: str, **options: Any) -> None:
    """Add a flag, and earlier spellings of it that `--help` does not list."""
    action = parser.add_argument(name, **options)
    for other in hidden:
        earlier: Any = parser.add_argument(
            other, **options | {"dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        )
        earlier.now = name  # for a warning


def allow_empty(action: Any) -> None:
    """Let an argument be an empty text."""
    action.may_be_empty = True


def add_model(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add the target model, as an argument and as a flag; `model_of` reads them."""
    parser.add_argument("model", nargs="?", help=f"target: a folder, a hub id, or smollm2, the extra's model{default}")
    parser.add_argument("--model-path", metavar="PATH", help="the same, as a flag")


def model_of(args: argparse.Namespace, *, required: bool = False) -> str | None:
    """Return the target that `add_model` read, None if none was given.

    Raises:
        ValueError: given twice, or not at all where it is required.
    """
    if args.model is not None and args.model_path is not None:
        raise ValueError(f"--model-path is {args.model_path}, expected none with {args.model}")
    model: str | None = args.model_path if args.model is None else args.model
    if model is None and required:
        raise ValueError("--model-path is missing, expected a folder or hub id")
    return model


def checked_key(flag: str | None, name: str, variable: str) -> str | None:
    """Return the key that a flag of this name gives, else that of the variable; None: there is none.

    Raises:
        ValueError: it is empty, or no header of a request can have it.
    """
    source, key = (name, flag) if flag is not None else (variable, os.environ.get(variable))
    if key == "":
        raise ValueError(f"{source} is empty, expected a key")
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(f"{source} has a character that no header can have there, expected printable ASCII")
    return key


def at_least(least: float, most: float | None = None) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`, by default MOST for integers, if `least` is one."""
    kind = type(least)
    if most is None and kind is int:
        most = MOST

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < math.inf:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} of at least {least:g}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{text!r} is above {most:.12g}, the largest allowed")
        return value

    return number


def integers(least: int) -> Callable[[str], list[int]]:
    """Return a parser of integers of at least `least`, separated by commas; `1e6` is one."""

    def several(text: str) -> list[int]:
        try:
            values = [int(float(item)) if re.fullmatch(r"\d+e\d+", item) else int(item) for item in text.split(",")]
        except (ValueError, OverflowError):
            values = []
        if not values or min(values) < least or max(values) > MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is not integers of at least {least}, separated by commas")
        return values

    return several


def words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of words out of `known`, separated by commas."""

    def words(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if value not in known:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(known)}")
        return values

    return words


def sized_words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of what `words_of` parses, and of `known` chains and trees with a number of tokens: `chain4`.

    Chains, trees and adaptive ones may have `+ngram` at the end.
    """
    sized = [name for name in known if name.endswith(("chain", "tree"))]
    adaptive = [name for name in known if name.endswith("adaptive")]
    pattern = rf"({'|'.join(sized)})([1-9]\d*)?(\+ngram)?|({'|'.join(adaptive)})(\+ngram)?"

    def words(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if value not in known and not re.fullmatch(pattern, value):
                names = ", ".join(known)
                raise argparse.ArgumentTypeError(
                    f"{value!r} is not one of {names}, nor chain or tree with a number, nor one with +ngram"
                )
        return values

    return words
