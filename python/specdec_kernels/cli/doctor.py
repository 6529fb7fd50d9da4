"""`specdec doctor`: find out why few drafts are accepted. `doctor_examine.py` measures; this parses and prints."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from .arguments import add_flag
from .engine_flags import add_engine_flags
from .optional_dependencies import guarded, require
from .speculative_flags import add_draft_to_examine, read_draft_to_examine
from .table import print_table

if TYPE_CHECKING:
    from .arguments import Subparsers
    from .doctor_examine import Diagnosis


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="find out why few drafts of a head or a draft model are accepted",
        description="Measure how much of the target's own text a draft predicts, then change one input at a time "
        "(feature layers, position offset, norms, chat template, vocabulary map, KV dtype, embedding; of a block "
        "drafter mask, block size, mask token and Markov head, too) and name the "
        "change that restores acceptance by more than chance. Of a union, also measure the n-gram index alone and what "
        "it adds to the draft. Exit code: 0, none does; 1, one does; 2, it cannot run.",
    )
    add_draft_to_examine(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="tokens to generate for each prompt (96)"
    )
    add_flag(
        parser,
        "--speculative-num-steps",
        "--num-steps",
        type=int,
        default=5,
        metavar="N",
        help="draft steps per round, a chain (5)",
    )
    add_flag(
        parser,
        "--apply-chat-template",
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        help="prompts are conversations (default: where the tokenizer has a template)",
    )
    add_engine_flags(parser, "--kv-cache-dtype", "--dtype", "--device", "--tp")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("doctor", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    return guarded("doctor", diagnose, args)


def diagnose(args: argparse.Namespace) -> int:
    """Examine the draft and print the diagnosis; return 1 if it has a cause, else 0."""
    from .doctor_examine import examine

    read_draft_to_examine(args)
    diagnosis = examine(args)
    if args.json:
        print(json.dumps(diagnosis.facts(), indent=2))
    else:
        show(diagnosis)
    return 1 if diagnosis.cause else 0


def show(diagnosis: Diagnosis) -> None:
    """Print a table of the changes, and the verdict."""
    print(f"{diagnosis.algorithm}: {diagnosis.num_texts} prompts, {diagnosis.num_tokens} tokens written by the target")
    if diagnosis.as_is is None:
        print(f"Unchanged, the draft is refused: {diagnosis.refusal}")
    else:
        by_depth = " ".join(f"{share:.1%}" for share in diagnosis.as_is.by_depth)
        print(f"Unchanged, the accept length is {diagnosis.accept_length:.2f}; accepted by depth: {by_depth}")
        if diagnosis.as_is.covered is not None:
            print(f"The draft vocabulary holds {diagnosis.as_is.covered:.1%} of the tokens written.")
    for part in diagnosis.parts:
        gain = part.gain and f"a gain of {part.gain.mean:+.2f}, {part.gain.low:+.2f} to {part.gain.high:+.2f}"
        more = f": {gain}" if gain else ""
        print(f"{part.name}, {part.num_nodes} nodes: the accept length is {part.acceptance.accept_length:.2f}{more}")
    rows = [
        [
            finding.shift.input,
            finding.shift.change,
            f"{finding.acceptance.accept_length:.2f}",
            f"{finding.gain:+.2f}",
            f"{finding.low:+.2f} to {finding.high:+.2f}",
            f"{finding.acceptance.by_depth[0]:.1%}",
            "restores" if finding.cause else "",
        ]
        for finding in diagnosis.findings
    ]
    columns = ["input", "changed to", "accept length", "gain", "gain, range", "top-1", "verdict"]
    if rows:
        print_table(columns, rows, left=2, least=["top-1", "verdict"])
    for line in diagnosis.verdict():
        print(line)
