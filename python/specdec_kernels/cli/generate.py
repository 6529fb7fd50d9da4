"""`specdec generate`: text by speculative decoding, beside plain decoding of the same prompt."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine import Engine, RequestOutput, SamplingParams

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# It ends without a newline: the tokenizer joins that with the indentation behind it.
DEFAULT_PROMPT = '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):'''


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text by speculative decoding and compare with plain decoding",
        description="Generates text, streaming it with accepted draft tokens in colour, then decodes the same prompt "
        "without speculation and prints both in a table. Without arguments it uses the tiny model that comes with "
        "the package, its EAGLE-3 head and a default prompt.",
    )
    parser.add_argument("prompt", nargs="?", help="text to continue (default: the head of a small Python class)")
    parser.add_argument("--model", help="target: a folder or hub id (default: the packaged tiny model)")
    parser.add_argument(
        "--speculative-algorithm",
        choices=["NONE", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "EAGLE3+NGRAM"],
        help="how to draft (default: EAGLE3 for the tiny model, NGRAM for any other)",
    )
    parser.add_argument("--speculative-draft-model-path", metavar="PATH", help="EAGLE head or small draft model")
    parser.add_argument("--speculative-num-steps", type=int, default=5, metavar="N", help="depth of drafting (5)")
    parser.add_argument(
        "--speculative-eagle-topk", type=int, metavar="K", help="branches per step (8 on a GPU, 1, a chain, on the CPU)"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="nodes verified per round, root included (32 for a tree, steps + 1 for a chain, 16 for NGRAM)",
    )
    parser.add_argument(
        "--speculative-adaptive",
        action=argparse.BooleanOptionalAction,
        help="choose in each round how many of these nodes to draft (default: where rounds are CUDA graphs)",
    )
    parser.add_argument(
        "--speculative-ngram-corpus",
        action="append",
        default=[],
        metavar="FILE",
        help="a text file that NGRAM knows from the start; several with several flags",
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="budget (200)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, greedy (default), or above: sample"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="... of these, the likeliest that reach P (1)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="... of these, any P times as likely as the best (0)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (default: another one each time)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of weights and KV")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="KV rows per page (16)")
    parser.add_argument(
        "--mem-fraction", type=float, metavar="F", help="share of the GPU's memory to take (default: what is needed)"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="the same bits whatever runs beside a request")
    parser.add_argument("--no-cuda-graph", action="store_true", help="launch rounds kernel by kernel, for debugging")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the rounds")
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
    try:
        compare(args)
    except (OSError, ValueError, NotImplementedError) as error:  # what the engine refuses, by name
        print(f"specdec generate: {error}", file=sys.stderr)
        return 2
    return 0


def compare(args: argparse.Namespace) -> None:
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from ..engine import SamplingParams, Speculation
    from ..engine.engine import default_device
    from ..tiny import tiny_model

    logging.disable_progress_bar()
    if args.model is None:
        torch.set_num_threads(1)  # too small a model to share: on a busy machine its threads wait for each other

    console = Console(highlight=False)
    model = args.model or tiny_model("target")
    algorithm = args.speculative_algorithm or ("EAGLE3" if args.model is None else "NGRAM")
    draft_model = args.speculative_draft_model_path
    if algorithm.startswith("EAGLE3") and draft_model is None and args.model is None:
        draft_model = tiny_model("eagle3")
    speculation = Speculation(
        algorithm,
        draft_model,
        num_steps=args.speculative_num_steps,
        # A GPU scores a tree in the time of a token; a CPU pays for every node, so there a chain is the faster choice.
        topk=args.speculative_eagle_topk or (8 if str(args.device or default_device()).startswith("cuda") else 1),
        num_draft_tokens=args.speculative_num_draft_tokens,
        adaptive=args.speculative_adaptive,
        ngram_corpus=args.speculative_ngram_corpus,
    )
    sampling = SamplingParams(
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    ).with_seed()  # one for both runs: it makes their texts the same
    prompt = DEFAULT_PROMPT if args.prompt is None else args.prompt

    runs = [generate(console, args, model, speculation, sampling, prompt, stream=True)]
    if not args.no_compare and algorithm != "NONE":
        runs.append(generate(console, args, model, Speculation(), sampling, prompt, stream=False))
    print_table(console, runs)
    if sampling.temperature > 0:
        console.print(f"sampled with --seed {sampling.seed}")
    if len(runs) == 2:
        print_comparison(console, *runs)


def generate(
    console: Console,
    args: argparse.Namespace,
    model: Any,
    speculation: Any,
    sampling: SamplingParams,
    prompt: str,
    *,
    stream: bool,
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
            mem_fraction=args.mem_fraction,
            batch_invariant=args.batch_invariant,
            cuda_graph=not args.no_cuda_graph,
            trace=args.trace if stream else None,
        )
        engine.generate(prompt, SamplingParams(max_new_tokens=8))
    if engine.graphs:
        console.print(f"{speculation.algorithm}: {engine.graphs}", style="dim")
    printer = Printer(console, engine) if stream else None
    if printer:
        console.print(prompt, end="", style="dim", markup=False, soft_wrap=True)
    begin = time.perf_counter()
    (output,) = engine.generate(prompt, sampling, on_tokens=printer)
    seconds = time.perf_counter() - begin
    if printer:
        printer.finish()
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

    def finish(self) -> None:
        """Whatever still waited is all there is of it."""
        self._print([], None, last=True)
        self.console.print("\n")

    def _print(self, tokens: list[int], style: str | None, last: bool = False) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return
        self.console.print(text[self.printed :], end="", style=style, markup=False, soft_wrap=True)
        self.printed = len(text)


def print_table(console: Console, runs: list[Run]) -> None:
    from rich.table import Table

    # A column a run: that fits the narrowest terminal.
    table = Table("", *("plain" if run.name == "NONE" else run.name for run in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    counts = [run.output.stats for run in runs]
    table.add_row("tokens", *(str(len(run.output.tokens)) for run in runs))
    table.add_row("rounds", *(str(c.rounds) for c in counts))
    table.add_row("accept length", *(f"{c.accept_length:.2f}" for c in counts))
    table.add_row("drafted", *(str(c.drafted) for c in counts))
    table.add_row("accepted", *(str(c.accepted) for c in counts))
    table.add_row("tokens/s", *(f"{len(run.output.tokens) / run.seconds:.1f}" for run in runs))
    console.print("green: drafted and accepted; plain: the target's own token of each round")
    console.print(table)


def print_comparison(console: Console, speculative: Run, plain: Run) -> None:
    speedup = plain.seconds / speculative.seconds
    same = speculative.output.tokens == plain.output.tokens
    verdict = "the same tokens" if same else "different tokens (a near-tie of the target's logits)"
    console.print(f"{speculative.name} produced {verdict} {speedup:.2f} times as fast as plain decoding.")
