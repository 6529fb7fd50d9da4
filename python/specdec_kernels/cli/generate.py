"""`specdec generate`: text by speculative decoding, beside plain decoding of the same prompt."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine import Engine, RequestOutput

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# Ends inside a line: a prompt that ends with one leaves out the indentation, which the tokenizer joins to line breaks.
DEFAULT_PROMPT = """import unittest


class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_push(self):
        self.stack.push(1)
        self.assertEqual("""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text by speculative decoding and compare with plain decoding",
        description="Generates text, streaming it with accepted draft tokens in colour, then decodes the same prompt "
        "without speculation and prints both in a table. Without arguments it uses the tiny model that comes with "
        "the package, its EAGLE-3 head and a default prompt.",
    )
    parser.add_argument("prompt", nargs="?", help="text to continue (default: the start of a small unit test)")
    parser.add_argument("--model", help="target: a folder or hub id (default: the packaged tiny model)")
    parser.add_argument(
        "--speculative-algorithm",
        choices=["NONE", "NGRAM", "EAGLE3", "STANDALONE"],
        help="how to draft (default: EAGLE3 for the tiny model, NGRAM for any other)",
    )
    parser.add_argument("--speculative-draft-model-path", metavar="PATH", help="EAGLE-3 head or small draft model")
    parser.add_argument("--speculative-num-steps", type=int, default=5, metavar="N", help="depth of drafting (5)")
    parser.add_argument("--speculative-eagle-topk", type=int, default=8, metavar="K", help="branches per step (8)")
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="tree nodes verified per round, root included (32)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="budget (256)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and KV")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="KV rows per page (16)")
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers with torch.compile")
    parser.add_argument("--no-compare", action="store_true", help="skip the plain decoding run")
    parser.set_defaults(run=run)


@dataclass
class Run:
    name: str
    output: RequestOutput
    seconds: float


def run(args: argparse.Namespace) -> int:
    if not require("generate", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 1
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from ..engine import Speculation
    from ..tiny import tiny_model

    logging.disable_progress_bar()
    if args.model is None:
        torch.set_num_threads(1)  # too small a model to share: on a busy machine its threads wait for each other

    console = Console(highlight=False)
    model = args.model or tiny_model("target")
    algorithm = args.speculative_algorithm or ("EAGLE3" if args.model is None else "NGRAM")
    draft_model = args.speculative_draft_model_path
    if algorithm == "EAGLE3" and draft_model is None and args.model is None:
        draft_model = tiny_model("eagle3")
    speculation = Speculation(
        algorithm,
        draft_model,
        num_steps=args.speculative_num_steps,
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
    )
    prompt = args.prompt or DEFAULT_PROMPT

    runs = [generate(console, args, model, speculation, prompt, stream=True)]
    if not args.no_compare and algorithm != "NONE":
        runs.append(generate(console, args, model, Speculation(), prompt, stream=False))
    print_table(console, runs)
    if len(runs) == 2:
        print_comparison(console, *runs)
    return 0


def generate(
    console: Console, args: argparse.Namespace, model: Any, speculation: Any, prompt: str, *, stream: bool
) -> Run:
    import torch

    from ..engine import Engine, SamplingParams

    with console.status(f"{speculation.algorithm}: loading and warming up"):
        engine = Engine(
            model,
            speculation=speculation,
            num_slots=1,
            page_size=args.page_size,
            device=args.device,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            compile=args.compile,
        )
        engine.generate(prompt, SamplingParams(max_new_tokens=8))
    printer = Printer(console, engine) if stream else None
    if printer:
        console.print(prompt, end="", style="dim", markup=False)
    begin = time.perf_counter()
    (output,) = engine.generate(prompt, SamplingParams(max_new_tokens=args.max_new_tokens), on_tokens=printer)
    seconds = time.perf_counter() - begin
    if printer:
        console.print("\n")
    return Run(speculation.algorithm, output, seconds)


class Printer:
    """Streams text with the accepted draft tokens in colour; a token cut inside a character waits for the rest."""

    def __init__(self, console: Console, engine: Engine) -> None:
        self.console, self.tokenizer = console, engine.tokenizer
        self.tokens: list[int] = []
        self.printed = 0

    def __call__(self, new: Any) -> None:
        self._print(new.tokens[:-1], "green")
        self._print(new.tokens[-1:], None)

    def _print(self, tokens: list[int], style: str | None) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        self.console.print(text[self.printed :], end="", style=style, markup=False, soft_wrap=True)
        self.printed = len(text)


def print_table(console: Console, runs: list[Run]) -> None:
    from rich.table import Table

    table = Table(title="green: drafted and accepted; plain: the target's own token of each round")
    for column in ("decoding", "tokens", "rounds", "accept length", "drafted", "accepted", "tokens/s"):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    for run in runs:
        stats, tokens = run.output.stats, len(run.output.tokens)
        table.add_row(
            "plain" if run.name == "NONE" else run.name,
            str(tokens),
            str(stats.rounds),
            f"{stats.accept_length:.2f}",
            str(stats.drafted),
            str(stats.accepted),
            f"{tokens / run.seconds:.1f}",
        )
    console.print(table)


def print_comparison(console: Console, speculative: Run, plain: Run) -> None:
    speedup = plain.seconds / speculative.seconds
    same = speculative.output.tokens == plain.output.tokens
    verdict = "the same tokens" if same else "different tokens (a near-tie of the target's logits)"
    console.print(f"{speculative.name} produced {verdict} {speedup:.2f} times as fast as plain decoding.")
