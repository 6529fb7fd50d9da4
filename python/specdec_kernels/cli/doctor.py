"""`specdec doctor`: why few drafts are accepted (`doctor_examine.py` finds out, this asks and shows)."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from .optional_dependencies import require
from .table import print_table

if TYPE_CHECKING:
    from .doctor_examine import Diagnosis

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say why few drafts of a head or a draft model are accepted",
        description="Measures how much of the target's own text a draft gets right, then changes one input at a time "
        "(feature layers, position offset, norms, chat template, vocabulary map, KV dtype, embedding) and says which "
        "change restores acceptance by more than chance. Exit code: 0, none does; 1, one does; 2, it cannot run.",
    )
    parser.add_argument("model", help="target: a folder or hub id")
    parser.add_argument("--draft", required=True, metavar="PATH", help="EAGLE head or small draft model")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="of the draft (default: what its folder holds)")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="texts with empty lines between, or .jsonl with prompt or messages (default: a mix of chat, code, math)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of the text for each prompt (96)")
    parser.add_argument("--num-steps", type=int, default=5, metavar="N", help="drafts of a round, a chain (5)")
    parser.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        help="prompts are conversations (default: where the tokenizer has a template)",
    )
    parser.add_argument("--kv-dtype", choices=["fp8_e4m3"], help="of the target's KV, if it is to have 8 bits")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and KV")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not require("doctor", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    from .doctor_examine import examine

    try:
        diagnosis = examine(args)
    except (OSError, ValueError, NotImplementedError) as error:  # what the engine refuses, by name
        print(f"specdec doctor: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(diagnosis.facts(), indent=2))
    else:
        show(diagnosis)
    return 1 if diagnosis.cause else 0


def show(diagnosis: Diagnosis) -> None:
    print(f"{diagnosis.algorithm}: {diagnosis.num_texts} prompts, {diagnosis.num_tokens} tokens written by the target")
    if diagnosis.as_is is None:
        print(f"As it is, the draft is refused: {diagnosis.refusal}")
    else:
        by_depth = " ".join(f"{share:.1%}" for share in diagnosis.as_is.by_depth)
        print(f"As it is, the accept length is {diagnosis.accept_length:.2f}; accepted by depth: {by_depth}")
        if diagnosis.as_is.covered is not None:
            print(f"The draft vocabulary holds {diagnosis.as_is.covered:.1%} of the tokens written.")
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
