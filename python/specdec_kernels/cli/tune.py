"""`specdec tune`: which steps, branches and nodes give most tokens a second on this machine and these prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .doctor import ALGORITHMS
from .optional_dependencies import require, unwritable
from .table import print_table

if TYPE_CHECKING:
    from .tune_measure import Measured

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BAR = 36  # characters of the longest


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="measure which steps, branches and nodes are fastest here",
        description="Generates from prompts with chains and trees of several sizes, by batch, and without drafts, and "
        "says which give most tokens a second. Ctrl-C ends the measurements and keeps what there is.",
    )
    parser.add_argument("model", help="target: a folder or hub id")
    parser.add_argument("--draft", required=True, metavar="PATH", help="EAGLE head or small draft model")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="of the draft (default: what its folder holds)")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="texts with empty lines between, or .jsonl with prompt or messages (default: a mix of chat, code, math)",
    )
    parser.add_argument("--batch", default="1,8,32", metavar="N", help="requests at once, several with commas (1,8,32)")
    parser.add_argument("--num-steps", default="1,2,3,5,7", metavar="N", help="depths to try (1,2,3,5,7)")
    parser.add_argument("--topk", default="1,4,8", metavar="K", help="branches to try (1,4,8)")
    parser.add_argument("--nodes", default="8,16,32", metavar="N", help="nodes of trees to try (8,16,32)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of each request (96)")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="begin nothing after so long (300)")
    parser.add_argument("--kv-dtype", choices=["fp8_e4m3"], help="of KV, if it is to have 8 bits")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and KV")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--out", metavar="FILE", help="write what was measured, and the best options, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not require("tune", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    from .tune_measure import measure

    try:
        for name in ("batch", "num_steps", "topk", "nodes"):
            setattr(args, name, numbers(getattr(args, name), "--" + name.replace("_", "-")))
        if args.out and unwritable(args.out):
            raise ValueError(f"--out is {args.out}, expected a file in an existing folder")
        found = measure(args)
    except (OSError, ValueError, NotImplementedError) as error:  # what the engine refuses, by name
        print(f"specdec tune: {error}", file=sys.stderr)
        return 2
    if not found.rows:
        print("specdec tune: nothing was measured in the time that was given", file=sys.stderr)
        return 1
    show(found)
    if args.out:
        Path(args.out).write_text(json.dumps(found.facts(), indent=1) + "\n")
    return 0


def numbers(text: str, option: str) -> list[int]:
    """Rising numbers from a list with commas; ValueError for anything else."""
    items = text.split(",")
    if not all(item.isascii() and item.isdigit() and int(item) > 0 for item in items):
        raise ValueError(f"{option} is {text}, expected numbers from 1 on, with commas between them")
    return sorted({int(item) for item in items})


def show(found: Measured) -> None:
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
        print(
            f"Fastest over all batches: --speculative-num-steps {best.num_steps} --speculative-eagle-topk {best.topk} "
            f"--speculative-num-draft-tokens {best.num_nodes}"
        )


def add_tuning(parser: Any) -> None:
    parser.add_argument(
        "--tuning",
        metavar="FILE",
        help="what specdec tune --out or Engine.tuning gave; flags beside it win",
    )


def apply_tuning(args: argparse.Namespace, tuning: dict[str, Any]) -> None:
    """The options of what `engine.tuning.read_tuning` has read, where the flags say nothing."""
    options = tuning.get("recommended") or {}
    for flag, key in (("num_steps", "num_steps"), ("eagle_topk", "topk"), ("num_draft_tokens", "num_nodes")):
        if getattr(args, f"speculative_{flag}") is None:
            setattr(args, f"speculative_{flag}", options.get(key))
