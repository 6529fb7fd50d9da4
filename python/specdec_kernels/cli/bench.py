"""`specdec bench`: times an op on this machine, after checking its result against the reference."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tune
from .optional_dependencies import require, unwritable
from .table import print_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SCHEMA = 2  # of what --json writes; bench/results/README.md describes it
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PATIENCE_SECONDS = 2.0
NO_CUDA = "--device cuda needs a CUDA build of specdec_kernels and a GPU that torch can use"

# The parameters of all cases: each is an option. Numbers, and what they count:
NUMBERS = {
    "batch": "requests in a batch",
    "nodes": "nodes of a tree",
    "vocab": "tokens of the vocabulary",
    "k": "branches per draft step",
    "num_steps": "draft steps",
    "accept_width": "tokens of a round at most",
    "prefix": "tokens before the tree",
    "page_size": "KV rows of a page",
    "rows": "rows, of rope_qkv_write_kv and write_kv per request",
    "width": "numbers of a row",
    "outs": "numbers of a row that a product makes",
    "experts": "experts of a layer",
    "taken": "experts that a row takes",
    "inner": "numbers between the two products of an expert",
    "layers": "layers of KV",
    "top_n": "alternatives scored beside each token",
    "held": "tokens the n-gram index holds",
    "max_len": "KV rows that page tables have room for (0: the text's); of round, one number, the longest text that "
    "the engine allows (input + output + 1)",
}
MAY_BE_ZERO = ("prefix", "top_n", "held", "max_len")
# Of `round`, beside --batch, --dtype, --max-len and --weights:
ROUND = "round"
SHAPES = ("qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "qwen3-0.6b", "tiny")
ALGORITHMS = ("none", "chain", "tree", "standalone", "adaptive")
DOMAINS = ("chat", "code", "math")
WRONG = "wrong"
DRAFTERS = ("eagle3", "dflash", "dspark")
ROUND_OPTIONS = (
    "shape", "algorithm", "acceptance", "drafter", "context_decay", "accept", "input", "output",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "tuning",
)  # fmt: skip
# Words, and which:
WORDS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "lengths": ("even", "uneven"),
    "kv": ("same", "fp8"),
    "mode": ("tree", "chain"),
    "moves": ("tree", "none"),
    "weights": ("fp8", "fp8-rows", "int4"),
    "sampling": ("greedy", "top_k+top_p", "top_p", "temperature"),
    "edit": ("none", "penalties", "mask"),
}

EPILOG = """\
sizes:
  An op has its own sizes: every combination of them, or, where that would take long, one size with one parameter
  varied at a time (--full: every combination). A parameter you name takes your values instead, in all combinations.
  `specdec bench` lists the parameters of each op. Examples:
    specdec bench verify_tree --batch 1,4,16,64,256 --nodes 32 --vocab 128256 --plot verify.png
    specdec bench build_tree --nodes 8,32,64 --k 10
    specdec bench all --quick
    specdec bench round --shape qwen3-8b --algorithm none,chain,tree --batch 1,4,16,64 --acceptance code

round:
  Whole rounds of the engine on a model of a well-known shape with planted weights: full cost, a known text, and drafts
  that are accepted as often as a published drafter's were on such texts, easy stretches and hard ones. With --weights
  the target's layers are stored in 8 bits, by blocks (fp8) or by rows (fp8-rows), or in 4; with --implementation
  transformers its own modules run it. Every token is checked. All requests of a batch come at once; counted are rounds
  in which all of them take part, and the run, from their coming to the last one's end.

columns:
  time      median time of a call; on a GPU from replays of a CUDA graph, on a CPU wall time
  p90       nine of ten samples are at or below it
  host      on a GPU: how long the call keeps the host; the least seen
  floor     bytes the op must move over the bandwidth measured here first (or arithmetic over its rate, if larger)
  of floor  floor / time: 100 % cannot be beaten by memory that is cold
  inputs    cold: rotated through more memory than the L2 cache holds
  gpu       of round: from its first kernel to its last, a mean; idle, the GPU's share of time between rounds;
            host, what the loop takes of the host for one (on a CPU that is the round itself, and left out); emit,
            handing out its tokens, in another thread; wait, waiting for the device; means of all rounds; nodes, how
            many their trees had, which adaptive chooses
  run       of round: tokens a second of the whole run, prefill included; first token, when half of the requests had
            theirs
  others    one column each, torch and installed packages (sglang, flashinfer): another way to the same result, checked
            as well, timed alike; in brackets its time over ours

baseline:
  --baseline FILE compares with an earlier run's --json: tokens a second of round, the time of an op. A recorded run is
  compared, shown or drawn by its name instead of an op's:
    specdec bench select_topk --json before.json
    specdec bench select_topk --baseline before.json --threshold 10
    specdec bench after.json --baseline before.json

noise:
  A p90 with a star is far above the median: something else ran. Such a time says little.

exit code: 0; 1 when a result was wrong (it is named and has no time) or slower than --baseline by more than
--threshold; 2 when the command cannot run here, or a size could not be timed (it is named).
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time one op on this machine, checked against its reference first",
        description="Times ops on this machine. Each result is checked against the reference first; a wrong one gets "
        "no time. Without an op: lists them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ops", metavar="op", nargs="*", help="which to time, or `all`; none lists them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="the smallest size only")
    parser.add_argument("--full", action="store_true", help="every combination of an op's sizes, however many")
    parser.add_argument("--json", metavar="FILE", help="write the run to FILE as well")
    parser.add_argument("--plot", metavar="FILE", help="draw the times into FILE (.png, .svg or .pdf)")
    parser.add_argument("--baseline", metavar="FILE", help="compare with the run that --json wrote there")
    parser.add_argument(
        "--threshold",
        type=at_least(0.0),
        default=5.0,
        metavar="PERCENT",
        help="slower than the baseline is: by more (5)",
    )
    sizes = parser.add_argument_group("sizes, several with commas")
    for name, meaning in NUMBERS.items():
        sizes.add_argument(option(name), type=numbers(0 if name in MAY_BE_ZERO else 1), metavar="N", help=meaning)
    for name, words in WORDS.items():
        sizes.add_argument(option(name), type=words_of(words), metavar="NAME", help=", ".join(words))
    rounds = parser.add_argument_group("of round")
    rounds.add_argument("--shape", choices=SHAPES, help="of the target (qwen3-8b on a GPU, tiny on a CPU)")
    rounds.add_argument(
        "--algorithm",
        type=algorithms,
        metavar="NAME",
        help="none; chain and tree, of an EAGLE-3 head (5 steps; topk 1, 6 tokens; topk 10, 32 tokens), or chain4 and "
        "tree8, of so many tokens; standalone, a chain of a small model; adaptive, what an engine does with that head "
        "that is told nothing more: in each round as many tokens as pay; several with commas (none,chain,tree)",
    )
    rounds.add_argument(
        "--acceptance",
        type=words_of((*DOMAINS, WRONG)),
        metavar="NAME",
        help="of which texts: chat, code, math; or wrong, drafts of which none is right; several with commas (chat)",
    )
    rounds.add_argument("--drafter", choices=DRAFTERS, help="and of whose drafts, at the planted head's cost (eagle3)")
    rounds.add_argument("--context-decay", action="store_true", help="acceptance falls with the length of the context")
    rounds.add_argument(
        "--accept",
        type=at_least(1.0),
        metavar="N",
        help="instead: every round emits N tokens, its drafts right up to there",
    )
    rounds.add_argument("--input", type=at_least(1), metavar="N", help="tokens of a prompt (321; tiny: 32)")
    rounds.add_argument("--output", type=at_least(1), metavar="N", help="tokens generated for each (215; tiny: 32)")
    rounds.add_argument("--speculative-num-steps", type=at_least(1), metavar="N", help="instead of the algorithm's own")
    rounds.add_argument(
        "--speculative-eagle-topk", type=at_least(1), metavar="K", help="instead of the algorithm's own"
    )
    rounds.add_argument(
        "--speculative-num-draft-tokens", type=at_least(1), metavar="N", help="instead of the algorithm's own"
    )
    rounds.add_argument(
        "--implementation", choices=("native", "transformers"), default="native", help="of the target (native)"
    )
    tune.add_tuning(rounds)
    parser.set_defaults(run=run)


def option(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")


def at_least(least: float) -> Callable[[str], float]:
    """A number of the bound's kind, from there on."""
    kind = type(least)

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} on")
        return value

    return number


def numbers(least: int) -> Callable[[str], list[int]]:
    def several(text: str) -> list[int]:
        try:
            values = [int(item) for item in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not numbers from {least} on, with commas between them")
        return values

    return several


def words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if value not in known:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(known)}")
        return values

    return words


def algorithms(text: str) -> list[str]:
    """Of ALGORITHMS, or a chain or tree of so many tokens."""
    values = text.split(",")
    for value in values:
        if value not in ALGORITHMS and not re.fullmatch(r"(chain|tree)[1-9]\d*", value):
            known = ", ".join(ALGORITHMS)
            raise argparse.ArgumentTypeError(f"{value!r} is not one of {known}, nor chain or tree with a number")
    return values


def run(args: argparse.Namespace) -> int:
    if not require("bench", "bench", ["torch", "rich"]):
        return 2
    # The harness lives in bench/ of the source tree and is part of the package only once installed.
    cases = import_module("specdec_kernels.bench.ops.cases").CASES
    overhead = import_module("specdec_kernels.bench.ops.call_overhead")
    if not args.ops:
        if args.baseline:
            return refuse(f"--baseline {args.baseline} stands alone, expected an op or a recorded run beside it")
        list_ops(cases, overhead.NAME)
        return 0
    if (code := refuse_files(args)) is not None:
        return code
    if len(args.ops) == 1 and args.ops[0].endswith(".json"):
        return show_recorded(args)
    if ROUND in args.ops:
        return run_rounds(args)
    names = [*cases, overhead.NAME] if args.ops == ["all"] else args.ops
    known = [*cases, overhead.NAME]
    for name in names:
        if name == "all":
            return refuse("all means every op, expected no op beside it")
        if name not in known:
            return refuse(f"there is no op {name}, expected one of {', '.join([*known, ROUND])}, or all")
    if beside := [name for name in ROUND_OPTIONS if getattr(args, name)]:
        return refuse(f"{option(beside[0])} is of {ROUND}, expected it not beside {args.ops[0]}")
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA)

    chosen = {name: getattr(args, name) for name in (*NUMBERS, *WORDS) if getattr(args, name) is not None}
    try:
        plan = plan_of(names, cases, device, chosen, quick=args.quick, full=args.full)
    except ValueError as error:
        return refuse(str(error))
    return bench(args, plan, overhead if overhead.NAME in names else None, device)


def refuse_files(args: argparse.Namespace) -> int | None:
    """The exit code where --json or --plot cannot be written: said before the run, not behind it."""
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file and (why := unwritable(file)):
            return refuse(f"{flag} {file} {why}")
    if args.baseline:
        try:
            args.baseline_run = read_record(args.baseline)
        except (OSError, ValueError) as error:
            return refuse(f"--baseline {error}")
    if args.plot:
        if not require("bench --plot", "bench", ["matplotlib"]):
            return 2
        if Path(args.plot).suffix not in PLOT_SUFFIXES:
            return refuse(f"--plot {args.plot} is no picture, expected a name in {' or '.join(PLOT_SUFFIXES)}")
    return None


def read_record(file: str) -> dict[str, Any]:
    """A run as --json writes it. OSError or ValueError where it is none."""
    try:
        run_record = json.loads(Path(file).read_text())
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON, expected a run that --json wrote") from error
    if not isinstance(run_record, dict) or run_record.get("schema") != SCHEMA:
        raise ValueError(f"{file} is no run of schema {SCHEMA}, expected one that --json wrote")
    return run_record


def show_recorded(args: argparse.Namespace) -> int:
    """`specdec bench FILE.json`: the table of an earlier run, its picture, and its comparison."""
    try:
        run_record = read_record(args.ops[0])
    except (OSError, ValueError) as error:
        return refuse(str(error))
    show(run_record)
    if args.plot:
        import_module("specdec_kernels.bench.report.plot").plot(run_record, args.plot)
    return compare(args, run_record)


def run_rounds(args: argparse.Namespace) -> int:
    """`specdec bench round`: the engine instead of an op."""
    if args.ops != [ROUND]:
        return refuse(f"{ROUND} is timed alone, expected no op beside it")
    if not require("bench round", "engine", ["transformers", "safetensors"]):
        return 2
    mine = ("batch", "dtype", "max_len", "weights")
    others = [name for name in (*NUMBERS, *WORDS) if name not in mine and getattr(args, name) is not None]
    if others:
        names = " or ".join(others)
        return refuse(
            f"{ROUND} has no {names}, expected --batch, --dtype, --max-len, --weights and what its help lists"
        )
    for name in ("max_len", "weights"):
        if len(getattr(args, name) or ()) > 1:
            return refuse(f"{ROUND} takes one {option(name)}, expected it not to be {getattr(args, name)}")
    device = find_device(args.device)
    if device is None:
        return refuse(NO_CUDA)
    try:
        if args.tuning:
            read_tuning = import_module("specdec_kernels.engine.tuning").read_tuning
            tune.apply_tuning(args, read_tuning(args.tuning, "--tuning"))
        setups = round_setups(args, device)
    except (OSError, ValueError) as error:
        return refuse(str(error))

    rounds = import_module("specdec_kernels.bench.engine.round")
    batches = args.batch or ([1] if args.quick or device.type == "cpu" else [1, 4, 16, 64])
    for setup in setups:
        needed, free = rounds.memory_needed(setup, max(batches)), rounds.free_memory(device)
        if needed > free:
            return refuse(
                f"{setup.shape} needs about {needed / 1e9:.1f} GB for weights and KV of {max(batches)} requests in "
                f"{setup.params(1)['dtype']}, and {device.type} has {free / 1e9:.1f} GB free: another --shape, fewer "
                "--batch, a shorter --max-len"
            )
    ceilings = import_module("specdec_kernels.bench.ops.ceilings").measure_ceilings(device, args.quick)
    results = []
    try:
        with progress(len(setups) * len(batches)) as advance:
            for result in rounds.measure_rounds(setups, batches, ceilings):
                results.append(result)
                advance(f"{ROUND} {result.params['algorithm']} batch {result.params['batch']}")
    except ValueError as error:  # what the engine refuses, by name
        return refuse(str(error))
    return finish(args, results, device, ceilings)


def round_setups(args: argparse.Namespace, device: Any) -> list[Any]:
    """One setup for each algorithm and acceptance; but one of no drafts, which none of these changes."""
    from dataclasses import replace

    import torch

    from ..synthetic.acceptance import EvenAcceptance, PublishedAcceptance

    rounds = import_module("specdec_kernels.bench.engine.round")
    shape = args.shape or ("qwen3-8b" if device.type == "cuda" else "tiny")
    small = shape == "tiny"
    input, output = (args.input or (32 if small else 321)), (args.output or (32 if small else 215))
    if args.accept is not None:
        for flag, value in (
            ("--acceptance", args.acceptance), ("--drafter", args.drafter), ("--context-decay", args.context_decay)
        ):  # fmt: skip
            if value:
                raise ValueError(f"--accept is {args.accept}, expected none beside {flag}")
    dtype = args.dtype[0] if args.dtype else "bfloat16" if device.type == "cuda" else "float32"
    given = {
        "num_steps": args.speculative_num_steps,
        "topk": args.speculative_eagle_topk,
        "num_nodes": args.speculative_num_draft_tokens,
    }
    context = (input + output // 2) if args.context_decay else None
    if args.accept is not None:
        acceptances: list[Any] = [args.accept]
    else:
        acceptances = [
            EvenAcceptance(1.0) if name == WRONG else PublishedAcceptance(name, args.drafter or "eagle3", context)
            for name in args.acceptance or ["chat"]
        ]
    setups = []
    for acceptance, name in itertools.product(acceptances, args.algorithm or ("none", "chain", "tree")):
        drafting = rounds.drafting_of(name)
        if drafting.kind is None:
            if acceptance is not acceptances[0]:
                continue
        else:
            drafting = replace(drafting, **{key: value for key, value in given.items() if value is not None})
        setup = rounds.Setup(
            shape=shape,
            drafting=drafting,
            acceptance=EvenAcceptance(min(acceptance, drafting.num_steps + 1))
            if isinstance(acceptance, float)
            else acceptance,
            input=input,
            output=output,
            device=device,
            dtype=getattr(torch, dtype),
            max_len=args.max_len[0] if args.max_len else None,
            weights=args.weights[0] if args.weights else None,
            implementation=args.implementation,
        )
        setups.append(setup)
    return setups


def refuse(message: str) -> int:
    print(f"specdec bench: {message}", file=sys.stderr)
    return 2


def list_ops(cases: dict[str, Any], overhead: str) -> None:
    rows = [[op, ", ".join(case.grid)] for op, case in cases.items()]
    rows += [
        [overhead, "what a call costs at the Python boundary"],
        [ROUND, "whole rounds of the engine: shape, algorithm, accept, input, output, batch"],
    ]
    print_table(["op", "parameters"], rows, left=2)
    print("Time one with `specdec bench <op>`; `--quick` for the smallest size only.")


def find_device(wanted: str | None) -> Any:
    import torch

    import specdec_kernels

    has_cuda = specdec_kernels.cuda_version is not None and torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        return None
    return torch.device(wanted or ("cuda" if has_cuda else "cpu"))


def plan_of(
    names: Sequence[str], cases: dict[str, Any], device: Any, chosen: dict[str, Any], *, quick: bool, full: bool
) -> list[tuple[Any, dict[str, Any]]]:
    """Every (case, size) to measure. With several ops, a choice applies to those that have it."""
    known = [cases[name] for name in names if name in cases]
    for name in chosen:
        if len(known) != 1 and not any(name in case.grid for case in known):
            raise ValueError(f"none of these ops has {name}")
    plan = []
    for case in known:
        if device.type not in case.devices:
            if len(names) == 1:
                raise ValueError(f"{case.op} runs on {' or '.join(case.devices)}, not on {device.type}")
            continue
        mine = chosen if len(known) == 1 else {key: value for key, value in chosen.items() if key in case.grid}
        plan += [(case, params) for params in case.sizes(device, quick, full, **mine)]
    return plan


def bench(args: argparse.Namespace, plan: list[tuple[Any, dict[str, Any]]], overhead: Any, device: Any) -> int:
    harness = import_module("specdec_kernels.bench.ops.harness")
    ceilings_of = import_module("specdec_kernels.bench.ops.ceilings").measure_ceilings

    results, ceilings = [], None
    with progress(len(plan) + 1) as advance:
        if plan:
            ceilings = ceilings_of(device, args.quick)
        for case, params in plan:
            advance(f"{case.op} {text_of(params)}")
            results.append(harness.measure(case, params, device, ceilings))
        if overhead is not None:
            advance(overhead.NAME)
            results += overhead.measure_calls(device, args.quick)

    return finish(args, results, device, ceilings)


def finish(args: argparse.Namespace, results: list[Any], device: Any, ceilings: Any) -> int:
    """Shows, records and draws what was measured."""
    run_record = import_module("specdec_kernels.bench.report.record").record(
        results, device, ceilings, args.command_line
    )
    show(run_record)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(run_record, file, indent=1)
            file.write("\n")
    if args.plot:
        import_module("specdec_kernels.bench.report.plot").plot(run_record, args.plot)
    slower = compare(args, run_record)
    wrong = [result for result in results if result.error]
    for result in wrong:
        print(f"wrong result, not timed: {result.op} {text_of(result.params)}: {result.error}", file=sys.stderr)
    skipped = [result for result in results if result.skipped]
    for result in skipped:
        print(f"not timed: {result.op} {text_of(result.params)}: {result.skipped}", file=sys.stderr)
    return 1 if wrong else 2 if skipped else slower


def compare(args: argparse.Namespace, run_record: dict[str, Any]) -> int:
    """Shows a run beside --baseline: 0; 1, something is slower by more than --threshold; 2, no size is in both."""
    if not args.baseline:
        return 0
    before = args.baseline_run
    found = import_module("specdec_kernels.bench.ops.baseline").changes(run_record, before)
    if not found:
        return refuse(f"--baseline {args.baseline} has no size of this run, expected the same op and sizes")
    names = before["machine"]["name"], run_record["machine"]["name"]
    if names[0] != names[1]:
        print(f"the baseline is of another machine: {names[0]}, here {names[1]}", file=sys.stderr)
    slower = [change for change in found if change.slower > args.threshold / 100]
    print(f"beside {args.baseline}, {before['date']}, specdec_kernels {before['specdec_kernels']['commit'] or ''}")
    rows = [
        [
            c.op,
            text_of(c.params),
            number(c.before),
            number(c.now),
            c.unit,
            f"{c.slower:+.1%}",
            "slower" if c in slower else "",
        ]
        for c in found
    ]
    print_table(["op", "size", "before", "now", "unit", "time", "verdict"], rows, left=2, least=["unit"])
    for change in slower:
        print(f"slower than the baseline: {change.op} {text_of(change.params)}: {change.slower:+.1%}", file=sys.stderr)
    return 1 if slower else 0


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time left, on a terminal, for a run that lasts longer than PATIENCE_SECONDS."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("measuring the device", total=total)
    start = threading.Timer(PATIENCE_SECONDS, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda what: bar.update(task, description=what, advance=1)
    finally:
        start.cancel()
        start.join()
        bar.stop()


def show(run_record: dict[str, Any]) -> None:
    machine, package = run_record["machine"], run_record["specdec_kernels"]
    hardware = machine["name"] + (f", driver {machine['driver']}" if machine["driver"] else "")
    ours = package["version"] + (f" ({package['commit']})" if package["commit"] else "")
    print(f"{hardware}, torch {machine['torch']}, specdec_kernels {ours}, {run_record['date']}")
    ceilings = run_record["ceilings"]
    if ceilings:
        bandwidth = f"copy {ceilings['copy_gb_s']} GB/s, read {ceilings['read_gb_s']} GB/s"
        print(f"measured here: {bandwidth}, matrix product {ceilings['tflop_s']} Tflop/s")

    calls = [r for r in run_record["results"] if "call" in r["params"]]
    rounds = [r for r in run_record["results"] if r["op"] == ROUND]
    ops = [r for r in run_record["results"] if r["op"] != ROUND and "call" not in r["params"]]
    if rounds:
        print(round_head(rounds))
        print_table(ROUND_COLUMNS, [round_row(r) for r in rounds], least=LEAST_OF_ROUND)
    if ops:
        others = names_of_others(ops)
        columns, rows, left = [*COLUMNS, *(f"{name} us" for name in others)], [row(r, others) for r in ops], 2
        if len({r["op"] for r in ops}) == 1:  # a heading instead of a column
            print(ops[0]["op"])
            columns, rows, left = columns[1:], [cells[1:] for cells in rows], 1
        print_table(columns, rows, left=left, least=LEAST)
    if calls:
        print_table(["call", "ns"], [[r["params"]["call"], f"{r['host_us'] * 1e3:.0f}"] for r in calls])


ROUND_HEAD = ("shape", "dtype", "weights", "implementation", "input", "output", "max_len", "accept")
ROUND_COLUMNS = [
    "algorithm", "batch", "ms/round", "p90 ms", "tokens/s", "accept length", "p10 to p90", "gpu ms", "idle", "host us",
    "emit us", "wait us", "floor ms", "of floor", "run tokens/s", "first token ms", "rounds by nodes",
]  # fmt: skip


def round_head(rounds: Sequence[dict[str, Any]]) -> str:
    """What the results of `round` have in common; of acceptance, what those that draft have."""
    params = max((r["params"] for r in rounds), key=lambda p: p["num_steps"])
    return text_of({name: params[name] for name in ROUND_HEAD if name in params})


def round_row(r: dict[str, Any]) -> list[str]:
    """The cells of one result of `round`, under ROUND_COLUMNS."""
    p = r["params"]
    name = p["algorithm"] + (f" ({p['num_steps']}, {p['topk']}, {p['nodes']})" if p["num_steps"] else "")
    if r["error"]:
        return [name, str(p["batch"]), "WRONG", *[""] * (len(ROUND_COLUMNS) - 3)]
    if r.get("skipped"):
        return [name, str(p["batch"]), "skipped", *[""] * (len(ROUND_COLUMNS) - 3)]
    facts = r["facts"]
    return [
        name,
        str(p["batch"]),
        number(r["time_us"] * 1e-3),
        p90(r, 1e-3),
        f"{facts['tokens_per_second']:.0f}",
        f"{facts['accept_length']:.2f}",
        f"{facts['accept_length_p10']:.2f} to {facts['accept_length_p90']:.2f}" if "accept_length_p10" in facts else "",
        number(facts["gpu_us"] * 1e-3) if "gpu_us" in facts else "",
        f"{facts['idle']:.2%}" if "idle" in facts else "",
        *(number(facts[name]) if name in facts else "" for name in ("host_us", "emit_us", "wait_us")),
        number(r["floor_us"] * 1e-3),
        f"{r['of_floor']:.0%}",
        *(f"{facts[name]:.0f}" if name in facts else "" for name in ("run_tokens_per_second", "first_token_ms")),
        facts.get("nodes", ""),
    ]


# What a narrow terminal can do without.
LEAST_OF_ROUND = [
    "rounds by nodes", "first token ms", "emit us", "wait us", "run tokens/s", "host us", "idle", "floor ms", "gpu ms",
    "p10 to p90", "p90 ms", "of floor",
]  # fmt: skip
LEAST = ["inputs", "host us", "floor us", "p90 us", "of floor"]
NOISY = 1.5  # p90 over the median, from which on a star says so


def p90(r: dict[str, Any], scale: float = 1.0) -> str:
    """The cell, with a star where the samples are far apart."""
    star = "*" if r["p90_us"] is not None and r["p90_us"] > NOISY * r["time_us"] else ""
    return (number(r["p90_us"] * scale) if r["p90_us"] is not None else "") + star


COLUMNS = ["op", "size", "time us", "p90 us", "host us", "floor us", "of floor", "inputs"]


def names_of_others(results: Sequence[dict[str, Any]]) -> list[str]:
    """The baselines of any of these results, each once: their columns."""
    return list(dict.fromkeys(name for r in results for name in r["baselines"]))


def row(r: dict[str, Any], others: Sequence[str]) -> list[str]:
    """The cells of one result, under COLUMNS and the names of the others."""
    if r["error"]:
        return [r["op"], text_of(r["params"]), "WRONG", *[""] * (len(COLUMNS) - 3 + len(others))]
    if r.get("skipped"):
        return [r["op"], text_of(r["params"]), "skipped", *[""] * (len(COLUMNS) - 3 + len(others))]
    plan = r.get("facts", {}).get("plan")
    return [
        r["op"],
        text_of(r["params"]) + (f" plan={plan}" if plan else ""),
        number(r["time_us"]),
        p90(r),
        number(r["host_us"]),
        number(r["floor_us"]),
        f"{r['of_floor']:.0%}" if r["of_floor"] else "",
        "cold" if r["cold"] else "warm",
        *(beside(r["baselines"].get(name), r["time_us"]) for name in others),
    ]


def beside(other: float | None, ours: float) -> str:
    """Another's time, and how many times ours it is."""
    if other is None or not ours:
        return number(other)
    ratio = other / ours
    return f"{number(other)} ({ratio:.{1 if ratio >= 1 else 2}f}x)"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def text_of(params: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())
