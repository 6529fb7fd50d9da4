"""`specdec generate`: generate text by speculative decoding and compare with plain decoding of the same prompt."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import speculative_flags
from .algorithms import BLOCK_ALGORITHMS, MODEL_ALGORITHMS
from .arguments import add_flag, allow_empty, model_of
from .engine_flags import add_engine_flags, options_of
from .optional_dependencies import guarded, require
from .tuning_flags import add_tuning

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine import Draft, Engine, RequestOutput, SamplingParams
    from ..engine.text.detokenizer import TextDecoder
    from .arguments import Subparsers
    from .near_tie import Difference

# No newline at the end, because the tokenizer joins it with the indentation that follows.
DEFAULT_PROMPT = '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):'''


# A short run is repeated without printing, and the fastest counts: other work on the machine only slows it down.
MAX_RUNS, MIN_SECONDS = 4, 2.0
LEAST_ROUNDS = 16  # in these, some tokens of a draft that fits are accepted


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text by speculative decoding and compare with plain decoding",
        description="Generate text, streaming it with accepted draft tokens in color, then decode the same prompt "
        "without speculation and print both in a table. Without arguments it uses the tiny model that comes with "
        "the package and a default prompt; on a GPU its EAGLE-3 head drafts, on a CPU the n-gram index.",
    )
    model = parser.add_argument(
        "model",
        nargs="?",
        help="target, before a prompt: a folder, a hub id, or smollm2, the extra's model (default: the packaged tiny "
        "model)",
    )
    prompt = parser.add_argument(
        "prompt", nargs="?", help="text to continue (default: the head of a small Python class)"
    )
    for either in (model, prompt):
        allow_empty(either)  # the engine refuses it
    add_flag(parser, "--model-path", "--model", metavar="PATH", help="the target, as a flag")
    add_engine_flags(parser, "--adapter")
    speculative_flags.add_arguments(parser)
    add_tuning(parser)
    add_sampling(parser, max_new_tokens=200)
    add_engine_flags(
        parser,
        "--device",
        "--tp",
        "--disable-custom-all-reduce",
        "--dtype",
        "--kv-cache-dtype",
        "--page-size",
        "--mem-fraction-static",
        "--enable-deterministic-inference",
        "--disable-cuda-graph",
        mem_fraction="fraction of the GPU's memory to use (default: what is needed)",
    )
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the rounds")
    parser.add_argument("--no-compare", action="store_true", help="skip the plain decoding run")
    parser.add_argument(
        "--compare-transformers", action="store_true", help="also time transformers' own generate, if greedy"
    )
    parser.set_defaults(run=run)


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add the flags of sampling."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"tokens to generate at most ({max_new_tokens})",
    )
    parser.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="none",
        help="auto: sample as the model's generation_config.json says, overridden by other flags (none)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default); above 0: sample")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (0: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="... of these, the most likely that reach probability P (1)"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="... of these, tokens at least P times as likely as the best (0)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="random seed (default: a new one each time)")


def sampling_of(args: argparse.Namespace, model: Any) -> SamplingParams:
    """Return the sampling that the flags ask for, on top of the model's generation config with `auto`.

    Raises:
        ValueError: parameters out of range, or without effect.
    """
    from ..engine import SamplingParams

    flags = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    given = {name: value for name in flags if (value := getattr(args, name)) is not None}
    if args.generation_config == "auto":
        sampling = SamplingParams.from_generation_config(model, **given)
    else:
        sampling = SamplingParams(**given)
    for name in ("top_k", "top_p", "min_p", "seed"):
        if name in given and sampling.temperature == 0:
            raise ValueError(f"--{name.replace('_', '-')} is {given[name]}, expected none at --temperature 0")
    return sampling


@dataclass
class Run:
    """A generated text and its time."""

    name: str
    output: RequestOutput
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if not require("generate", "engine", ["torch", "transformers", "safetensors", "rich"]):
        return 2
    return guarded("generate", compare, args)


def read_words(args: argparse.Namespace) -> None:
    """Set `args.model` and `args.prompt`: a single word is a prompt, unless it names a model's folder or an extra's.

    Raises:
        ValueError: two targets.
    """
    from ..smollm2 import NAME

    word = args.model
    names_model = word is None or word == NAME or os.path.isfile(os.path.join(word, "config.json"))
    if args.prompt is None and not names_model:
        args.model, args.prompt = None, word
    args.model = model_of(args)


def compare(args: argparse.Namespace) -> int:
    """Generate with and without drafts; return 1 if speculation changed the text without a near-tie, else 0."""
    from rich.console import Console

    from .near_tie import difference, difference_of_ranks

    console = Console(highlight=False)
    read_words(args)
    model, algorithm, draft, _ = speculative_flags.choose(args)
    sampling = sampling_of(args, model).with_seed()  # one for both runs: it makes their texts the same
    if args.compare_transformers:
        for why, is_so in (
            ("with --no-compare", args.no_compare),
            ("without drafts", draft is None),
            ("above --temperature 0", sampling.temperature > 0),
        ):
            if is_so:
                raise ValueError(f"--compare-transformers is set, expected not {why}")
    prompt = DEFAULT_PROMPT if args.prompt is None else args.prompt

    first = generate(console, args, model, algorithm, draft, sampling, prompt, stream=True)[0]
    if args.no_compare or draft is None:
        print_table(console, [first], sampling)
        return 0
    plain, engine = generate(console, args, model, "NONE", None, sampling, prompt, stream=False)
    theirs = args.compare_transformers and sampling.temperature == 0 and by_transformers(engine, model, plain.output)
    print_table(console, [first, plain, *([theirs] if theirs else [])], sampling)
    texts = first.output.tokens, plain.output.tokens
    if (args.tp or 1) > 1:
        parted = difference_of_ranks(engine, plain.output.prompt_tokens, texts, sampling)
    else:
        parted = difference(engine.target.model, plain.output.prompt_tokens, texts, sampling)
    print_comparison(console, first, plain, parted)
    if theirs:
        console.print(f"It was {theirs.seconds / first.seconds:.2f} times as fast as transformers' generate.")
    return 0 if parted is None or parted.is_near_tie else 1


def generate(
    console: Console,
    args: argparse.Namespace,
    model: Any,
    algorithm: str,
    draft: Draft | None,
    sampling: SamplingParams,
    prompt: str,
    *,
    stream: bool,
) -> tuple[Run, Engine]:
    """Generate a text several times and return the fastest run, and its engine; `stream` prints the first run."""
    from ..engine import Engine, SamplingParams

    with console.status(f"{algorithm}: loading and warming up"):
        options = options_of(
            args,
            adaptive=args.speculative_adaptive if draft is not None else None,
            num_slots=1,
            trace=args.trace if stream else None,
        )
        engine = Engine(model, draft, options=options)
        engine.generate(prompt, SamplingParams(max_new_tokens=8, ngram_group=1))
    if engine.graphs:
        console.print(f"{algorithm}: {engine.graphs}", style="dim")
    printer = Printer(console, engine.text_decoder(prompt)) if stream else None
    if printer:
        console.print(prompt, end="", style="dim", markup=False, soft_wrap=True)
    runs = [timed(engine, prompt, replace(sampling, ngram_group=2), algorithm, printer)]
    if printer:
        printer.finish()
    while len(runs) < MAX_RUNS and sum(run.seconds for run in runs) < MIN_SECONDS:
        runs.append(timed(engine, prompt, replace(sampling, ngram_group=2 + len(runs)), algorithm))
    return min(runs, key=lambda run: run.seconds), engine


def timed(engine: Engine, prompt: str, sampling: SamplingParams, algorithm: str, printer: Printer | None = None) -> Run:
    """Time one run. The caller gives each run an n-gram group, so that it drafts nothing from another run's text."""
    begin = time.perf_counter()
    (output,) = engine.generate(prompt, sampling, on_tokens=printer)
    return Run(algorithm, output, time.perf_counter() - begin)


def by_transformers(engine: Engine, model: Any, output: RequestOutput) -> Run:
    """Time transformers' own `generate` on the same prompt, for as many tokens as `output` has."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..engine import RequestStats

    theirs: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=engine.config.dtype)
    theirs = theirs.to(engine.device)
    ids = torch.tensor([output.prompt_tokens], device=engine.device)
    count = len(output.tokens)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "min_new_tokens": count, "pad_token_id": 0}
    begin = time.perf_counter()
    runs: list[Run] = []
    while not runs or (len(runs) < MAX_RUNS and time.perf_counter() - begin < MIN_SECONDS):
        start = time.perf_counter()
        tokens = theirs.generate(ids, max_new_tokens=count, **options)[0, ids.shape[1] :].tolist()
        runs.append(
            Run("transformers", replace(output, tokens=tokens, stats=RequestStats()), time.perf_counter() - start)
        )
    return min(runs, key=lambda run: run.seconds)


class Printer:
    """Stream a completion with accepted draft tokens in color."""

    def __init__(self, console: Console, decoder: TextDecoder) -> None:
        self.console, self.decoder = console, decoder

    def __call__(self, new: Any) -> None:
        begin = 0
        for count in new.rounds:
            end = begin + count
            self._print(self.decoder.push(new.tokens[begin : end - 1]), "green")
            self._print(self.decoder.push(new.tokens[end - 1 : end]), None)
            begin = end

    def finish(self) -> None:
        """Print what is left, even if a character is incomplete."""
        self._print(self.decoder.rest(), None)
        self.console.print("\n")

    def _print(self, text: str, style: str | None) -> None:
        self.console.print(text, end="", style=style, markup=False, soft_wrap=True)


def print_table(console: Console, runs: list[Run], sampling: SamplingParams) -> None:
    """Print the counts of each run, a column per run, which fits a narrow terminal."""
    from rich.table import Table

    table = Table("", *("plain" if run.name == "NONE" else run.name for run in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens", *(str(len(run.output.tokens)) for run in runs))
    ours = [run.output.stats for run in runs if run.name != "transformers"]
    table.add_row("rounds", *(str(c.rounds) for c in ours))
    table.add_row("accept length", *(f"{c.accept_length:.2f}" for c in ours))
    table.add_row("drafted", *(str(c.drafted) for c in ours))
    table.add_row("accepted", *(str(c.accepted) for c in ours))
    table.add_row("tokens/s", *(f"{len(run.output.tokens) / run.seconds:.1f}" for run in runs))
    console.print("green: drafted and accepted; plain: the target's own token of each round")
    console.print(table)
    if (
        runs[0].name.startswith((*MODEL_ALGORITHMS, *BLOCK_ALGORITHMS))
        and ours[0].rounds >= LEAST_ROUNDS
        and not ours[0].accepted
    ):
        console.print(
            f"{runs[0].name} had nothing accepted: an untrained draft, or one of another target? "
            "`specdec doctor` finds out.",
            style="yellow",
        )
    if sampling.temperature > 0:
        console.print(f"sampled with --seed {sampling.seed}")


def print_comparison(console: Console, speculative: Run, plain: Run, parted: Difference | None) -> None:
    """Print whether speculation changed the text, and how much faster it was."""
    speed = f"{plain.seconds / speculative.seconds:.2f} times as fast as plain decoding"
    if parted is None:
        console.print(f"{speculative.name} produced the same tokens {speed}.")
        return
    what = f"{speculative.name} produced other tokens from token {parted.at} on"
    margin = f"a margin of {parted.margin:.1e}, where roundoff explains up to {parted.limit:.1e}"
    if parted.is_near_tie:
        console.print(f"{what} {speed} (a near-tie of the target: {margin}).")
    else:
        console.print(f"{what}, which is an error: {margin}.", style="red")
