"""`specdec tune`: find the draft steps, branches and nodes that give most tokens per second here."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_flag, at_least
from .engine_flags import add_engine_flags
from .optional_dependencies import guarded, require, unwritable
from .speculative_flags import add_draft_to_examine, read_draft_to_examine
from .table import print_table

if TYPE_CHECKING:
    from .arguments import Subparsers
    from .tune_measure import Measured

SWEEPS = ("batch", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
OF_MODELS = {"speculative_num_steps": "1,2,3,5,7", "speculative_eagle_topk": "1,4,8"}  # of drafts with a model alone
BAR = 36  # characters of the longest bar


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "tune",
        help="measure which steps, branches and nodes are fastest here",
        description="Generate from prompts with chains and trees of several sizes, and without drafts, at several "
        "batch sizes, and print which is fastest; of a block drafter, with chains up to its depth and trees of that "
        "depth; of the n-gram index and of a draft of your own, with several numbers of nodes; of a union with the "
        "n-gram index, with chains of several numbers of nodes, and trees. Ctrl-C ends the "
        "measurements and keeps what has been measured.",
    )
    add_draft_to_examine(parser, "NGRAM")
    parser.add_argument(
        "--batch", default="1,8,32", metavar="N", help="batch sizes to try, separated by commas (1,8,32)"
    )
    add_flag(
        parser,
        "--speculative-num-steps",
        "--num-steps",
        metavar="N",
        help="draft steps per round to try (1,2,3,5,7)",
    )
    add_flag(
        parser,
        "--speculative-eagle-topk",
        "--topk",
        metavar="K",
        help="branches per step to try (1,4,8)",
    )
    add_flag(
        parser,
        "--speculative-num-draft-tokens",
        "--nodes",
        default="8,16,32",
        metavar="N",
        help="nodes of a tree to try, root included (8,16,32)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="tokens to generate for each request (96)"
    )
    parser.add_argument(
        "--seconds", type=at_least(0.0), default=300.0, metavar="S", help="start no measurement after this time (300)"
    )
    add_engine_flags(parser, "--kv-cache-dtype", "--dtype", "--device", "--tp", "--disable-custom-all-reduce")
    parser.add_argument("--out", metavar="FILE", help="write the measurements and the best options as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("tune", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    return guarded("tune", tune, args)


def tune(args: argparse.Namespace) -> int:
    """Measure, and print and write the result; return 1 if nothing was measured, else 0."""
    from .tune_measure import measure

    read_draft_to_examine(args)
    algorithm = args.speculative_algorithm or ("" if args.speculative_draft_model_path else "NGRAM")
    for name, default in OF_MODELS.items():
        if (value := getattr(args, name)) is None:
            setattr(args, name, default)
        elif algorithm == "NGRAM" or ":" in algorithm:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected none for {algorithm}")
    for name in SWEEPS:
        setattr(args, name, rising(getattr(args, name), "--" + name.replace("_", "-")))
    if args.out and unwritable(args.out):
        raise ValueError(f"--out is {args.out}, expected a file in an existing folder")
    found = measure(args)
    if not found.rows:
        print("specdec tune: nothing was measured within --seconds", file=sys.stderr)
        return 1
    show(found)
    if args.out:
        Path(args.out).write_text(json.dumps(found.facts(), indent=1) + "\n")
    return 0


def rising(text: str, option: str) -> list[int]:
    """Return the increasing integers of a list with commas.

    Raises:
        ValueError: anything else.
    """
    items = text.split(",")
    if not all(item.isascii() and item.isdigit() and int(item) > 0 for item in items):
        raise ValueError(f"{option} is {text}, expected integers of at least 1, separated by commas")
    return sorted({int(item) for item in items})


def show(found: Measured) -> None:
    """Print a table, a bar chart for each batch size, and the best options."""
    if not found.complete:
        print("Not all was measured: interrupted, or out of time (--seconds).")
    rows = [
        [
            row.options.name,
            str(row.batch),
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / plain:.2f}" if (plain := found.plain(row.batch)) else "",
            f"{row.accept_length:.2f}",
            f"{row.round_ms:.2f}",
        ]
        for row in found.rows
    ]
    print_table(["steps, topk, nodes", "batch", "tokens/s", "of plain", "accept length", "ms/round"], rows)
    for batch in found.batches:
        at_batch = [row for row in found.rows if row.batch == batch]
        most = max(row.tokens_per_second for row in at_batch)
        print(f"tokens/s, batch {batch}")
        for row in at_batch:
            bar = "#" * round(BAR * row.tokens_per_second / most)
            star = " *" if row.tokens_per_second == most else ""
            print(f"  {row.options.name:>10} {bar} {row.tokens_per_second:.0f}{star}")
    if (best := found.recommended) is None:
        print("No draft is faster than none here.")
    else:
        flags = {"num-steps": best.num_steps, "eagle-topk": best.topk, "num-draft-tokens": best.num_nodes}
        print("Fastest over all batches:", *(f"--speculative-{name} {value}" for name, value in flags.items() if value))
