"""Whole engines side by side on the same checkpoints: ours, SGLang and vLLM, where they are installed.

    python -m specdec_kernels.bench.compare.engine_comparison --shape qwen3-8b --acceptance code --batch 1,4,16,64 \\
        --engines ours,sglang --out checkpoints --json bench/results/<machine>-shootout.json

A planted target and a planted EAGLE-3 head with a published acceptance are written to --out in published formats. Each
engine loads them in a process of its own, as its users would, and writes greedily behind pieces of the planted text;
every token is compared with it. Decoding alone counts: the tokens a second are those of a long run less a short one.
Where a batch is small, several run one after the other, from different places of the text.

N-gram drafts are found in the prompts, which quote what will be written: passages of 4 to 24 tokens, between which 1 to
4 are others. No piece of text that counts is written twice, so no engine finds there what it wrote before.

Engines take minutes to start. With `--together 2` two start at the same time, each with room for the KV of the largest
batch and little more, and are measured in turn when both are there: one works, the other waits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specdec_kernels.cli.bench import DOMAINS, DRAFTERS, SHAPES, at_least, find_device, numbers, words_of
from specdec_kernels.cli.optional_dependencies import unwritable
from specdec_kernels.cli.table import print_table
from specdec_kernels.synthetic.acceptance import PublishedAcceptance
from specdec_kernels.synthetic.models import PlantedText, plant_causal_lm, plant_eagle3
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

from ..ops.harness import Result
from ..report.record import record
from .checkpoints import write_eagle3, write_target
from .engines import ALGORITHMS, PACKAGES, Job, can_run, is_installed

NAME = "engines"
REQUESTS = 4  # at each batch size, at least
MORE = 64  # tokens of max_len beyond a request's, for what engines keep free
PASSAGE, BETWEEN = (4, 24), (1, 4)  # tokens that a prompt quotes, and of others before it quotes on
LEAD = 8  # tokens of the text right before what is written, at the end of a prompt with quotes
QUOTES = f"quotes of {PASSAGE[0]} to {PASSAGE[1]}"
COLUMNS = ["engine", "algorithm", "batch", "tokens/s", "accept length", "start s"]


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    device = find_device(args.device)
    if device is None:
        print(
            "engines: --device cuda needs a CUDA build of specdec_kernels and a GPU that torch can use",
            file=sys.stderr,
        )
        return 2
    if args.short >= args.output:
        print(f"engines: --short is {args.short}, expected less than --output {args.output}", file=sys.stderr)
        return 2
    if args.json and (why := unwritable(args.json)):
        print(f"engines: --json {args.json} {why}", file=sys.stderr)
        return 2
    text = text_of(args)
    try:
        batches = {algorithm: runs_of_batches(args, text, algorithm) for algorithm in args.algorithm}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    plant(args, device)
    here = [engine for engine in args.engines if is_installed(engine, folders_of(args, engine))]
    for engine in args.engines:
        if engine not in here:
            print(f"engines: {engine} is not installed here and left out", file=sys.stderr)
    results, engines = [], {}
    for run in runs_of(here, args.algorithm, args.together):
        for (engine, _), (lines, facts) in zip(run, run_engines(args, device, batches, run), strict=True):
            results += lines
            engines[engine] = facts or engines.get(engine, {})
    if not results:
        return 2
    command = " ".join(
        [
            "python -m specdec_kernels.bench.compare.engine_comparison",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
    )
    run_record = record(results, device, None, command) | {"engines": engines}
    show(run_record)
    if args.json:
        Path(args.json).write_text(json.dumps(run_record, indent=1) + "\n")
    return 1 if any(r.error for r in results) else 2 if any(r.skipped for r in results) else 0


def runs_of(engines: list[str], algorithms: list[str], together: int) -> list[list[tuple[str, str]]]:
    """Which engines run at the same time, each with an algorithm."""
    pairs = [(engine, name) for name in algorithms for engine in engines if can_run(engine, ALGORITHMS[name])]
    return [pairs[at : at + together] for at in range(0, len(pairs), together)]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specdec_kernels.bench.compare.engine_comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="of the model, instead of the shape's")
    parser.add_argument("--acceptance", choices=DOMAINS, default="code", help="of which texts (code)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="eagle3", help="and of whose drafts (eagle3)")
    parser.add_argument("--engines", type=words_of(tuple(PACKAGES)), default=list(PACKAGES), metavar="NAME")
    add_path(parser)
    parser.add_argument("--algorithm", type=words_of(tuple(ALGORITHMS)), default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--batch", type=numbers(1), default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--input", type=at_least(1), default=321, metavar="N", help="tokens of a prompt (321)")
    parser.add_argument("--output", type=at_least(2), default=420, metavar="N", help="tokens of the long run (420)")
    parser.add_argument("--short", type=at_least(1), default=20, metavar="N", help="of the one taken off it (20)")
    parser.add_argument("--repeats", type=at_least(1), default=2, metavar="N", help="whose median counts (2)")
    parser.add_argument("--max-len", type=at_least(1), metavar="N", help="of the engines (what the requests need)")
    parser.add_argument("--limit", type=at_least(0.0), default=400.0, metavar="S", help="seconds of one process (400)")
    parser.add_argument("--together", type=at_least(1), default=1, metavar="N", help="that start at the same time (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the checkpoints are written")
    parser.add_argument("--json", metavar="FILE", help="write the run to FILE as well")
    return parser


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        type=engine_and_folders,
        metavar="ENGINE=FOLDER[:FOLDER]",
        help="look for an engine's packages there first, in its process alone; several with several flags",
    )


def engine_and_folders(text: str) -> str:
    engine, _, folders = text.partition("=")
    if engine not in PACKAGES or not folders:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=FOLDER, of {', '.join(PACKAGES)}")
    return text


def text_of(args: argparse.Namespace) -> PlantedText:
    config = shape_config(args.shape, args.layers)
    return PlantedText.of(config.vocab_size, draft_vocab_of(config))


def plant(args: argparse.Namespace, device: torch.device) -> PlantedText:
    """The text; its target and head lie in --out. What lies there from the same options is used again."""
    config, text = shape_config(args.shape, args.layers), text_of(args)
    made_of = [args.shape, config.num_hidden_layers, args.acceptance, args.drafter, dtype_of(device), "two texts"]
    told = args.out / "planted.json"
    if told.exists() and json.loads(told.read_text()) == made_of:
        return text
    args.out.mkdir(parents=True, exist_ok=True)
    target = plant_causal_lm(config, text, device=device, dtype=getattr(torch, dtype_of(device)))
    write_target(target, args.out / "target")
    write_eagle3(plant_eagle3(target, text, PublishedAcceptance(args.acceptance, args.drafter)), args.out / "head")
    told.write_text(json.dumps(made_of))
    del target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return text


def dtype_of(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    answer: list[int]  # what a long run writes


Waves = list[list[Request]]  # requests of a batch at a time, one batch after the other


def runs_of_batches(args: argparse.Namespace, text: PlantedText, algorithm: str) -> list[list[Waves]]:
    """Of each batch size its runs: one that counts for nothing, then a short and a long one for each repeat.

    Raises:
        ValueError: the text is too short for as many pieces.
    """
    if not ALGORITHMS[algorithm].ngram:
        return [[waves_of(text, batch, args.input, args.output)] * (1 + 2 * args.repeats) for batch in args.batch]
    starts, lengths = [starts_of(text, batch) for batch in args.batch], [args.short, args.output] * args.repeats
    wanted = sum(len(wave) * (LEAD + length) for waves in starts for wave in waves for length in lengths)
    if wanted > len(text.other_order):
        raise ValueError(
            f"engines: ngram takes {wanted} tokens of text, expected at most {len(text.other_order)}: "
            "ask for fewer or smaller batches, a shorter --output or fewer --repeats"
        )
    rest, longest = iter(text.other_tokens(0, wanted)), LEAD + args.output
    found = []
    for waves in starts:
        first = [[quoting(text, text.tokens(at, longest), args.input) for at in wave] for wave in waves]
        others = [
            [[quoting(text, list(islice(rest, LEAD + length)), args.input) for _ in wave] for wave in waves]
            for length in lengths
        ]
        found.append([first, *others])
    return found


def waves_of(text: PlantedText, batch: int, prompt: int, output: int) -> Waves:
    return [
        [Request(text.tokens(at, prompt), text.tokens(at + prompt, output)) for at in wave]
        for wave in starts_of(text, batch)
    ]


def quoting(text: PlantedText, piece: list[int], length: int) -> Request:
    """A prompt of that length that ends with the first tokens of a piece and quotes the others before."""
    draw, answer, quotes = Random(piece[0]), piece[LEAD:], []
    others = (text.tokens(at, 1)[0] for at in count(draw.randrange(len(text.order))))  # that no answer has
    at = 0
    while at < len(answer) and len(quotes) < length:
        passage, between = draw.randint(*PASSAGE), draw.randint(*BETWEEN)
        quotes += [*answer[at : at + passage], *(next(others) for _ in range(between))]
        at += passage + between
    quotes = quotes[: max(0, length - LEAD)]
    before = [next(others) for _ in range(length - LEAD - len(quotes))]
    return Request([*before, *quotes, *piece[:LEAD]][-length:], answer)


def starts_of(text: PlantedText, batch: int) -> list[list[int]]:
    """Of each wave, where in the text its requests begin: all of them evenly over it."""
    waves = -(-REQUESTS // batch)
    places = [i * len(text.order) // (batch * waves) for i in range(batch * waves)]
    return [places[wave::waves] for wave in range(waves)]


def run_engines(
    args: argparse.Namespace, device: torch.device, batches: dict[str, list[list[Waves]]], run: list[tuple[str, str]]
) -> list[tuple[list[Result], dict[str, Any]]]:
    """What `run_engine` says of each, in processes that run at the same time; `batches` has each algorithm's."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(run)) as threads:
        turns = Path(folder) if len(run) > 1 else None
        running = [
            threads.submit(run_engine, args, device, batches[algorithm], engine, algorithm, turns, len(run))
            for engine, algorithm in run
        ]
        return [one.result() for one in running]


def run_engine(
    args: argparse.Namespace,
    device: torch.device,
    batches: list[list[Waves]],
    engine: str,
    algorithm: str,
    turns: Path | None = None,
    runners: int = 1,
) -> tuple[list[Result], dict[str, Any]]:
    """One process: a result for each batch size, and what the engine says of itself.

    Args:
        batches: the runs of each batch size.
        turns: a folder in which this and other processes, `runners` in all, take turns.
    """
    job = Job(
        engine=engine,
        algorithm=algorithm,
        target=str(args.out / "target"),
        head=str(args.out / "head"),
        device=device.type,
        dtype=dtype_of(device),
        max_len=args.max_len or args.input + args.output + MORE,
        batches=[[[[r.prompt for r in wave] for wave in waves] for waves in runs] for runs in batches],
        short=args.short,
        long=args.output,
        repeats=args.repeats,
        turns=None if turns is None else str(turns),
        runners=runners,
    )
    with TemporaryDirectory() as folder:
        source, target, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
        source.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "specdec_kernels.bench.compare.engines.worker", str(source), str(target)]
        failure = run_limited(command, folders_of(args, engine), log, args.limit)
        if turns is not None:
            (turns / f"{engine}-{algorithm} ended").touch()
        if failure:
            print(f"engines: {engine} {algorithm} {failure}:\n{log.read_text()[-2000:]}", file=sys.stderr)
        found = json.loads(target.read_text()) if target.exists() else {"batches": []}
    measured = {line["batch"]: line for line in found.pop("batches")}
    results = []
    accept = QUOTES if ALGORITHMS[algorithm].ngram else PublishedAcceptance(args.acceptance, args.drafter).name
    for batch, runs in zip(args.batch, batches, strict=True):
        params = {
            "engine": engine, "algorithm": algorithm, "batch": batch, **steps_of(algorithm), "shape": args.shape,
            "layers": args.layers, "accept": accept, "input": args.input, "output": args.output, "short": args.short,
            "max_len": job.max_len, "dtype": job.dtype,
        }  # fmt: skip
        if batch in measured:
            answers = [request.answer for wave in runs[-1] for request in wave]
            results.append(result_of(params, measured[batch], answers, found["start_seconds"], device))
        else:
            results.append(Result(NAME, params, str(device), skipped=f"{engine} {failure or 'gave no result'}"))
    return results, found


def steps_of(algorithm: str) -> dict[str, int]:
    a = ALGORITHMS[algorithm]
    return {"num_steps": a.num_steps, "topk": a.topk, "nodes": a.num_nodes}


def folders_of(args: argparse.Namespace, engine: str) -> list[str]:
    """Where to look for the engine's packages first."""
    told = dict(item.split("=", 1) for item in args.path)
    return told[engine].split(os.pathsep) if engine in told else []


def environment_of(folders: list[str]) -> dict[str, str]:
    """Of a process that looks there first."""
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | ({"PYTHONPATH": path} if path else {})


def run_limited(command: list[str], folders: list[str], log: Path, limit: float) -> str | None:
    """Runs a process group to its end or the limit; says what went wrong, if something did."""
    with process_group(command, environment_of(folders), log) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"took more than {limit:g} s"
    return f"ended with code {code}" if code else None


@contextmanager
def process_group(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to the log; at the end it is killed, with all that it has started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the engine's own processes, where it left some
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def result_of(
    params: dict[str, Any],
    line: dict[str, Any],
    answers: Sequence[list[int]],
    start_seconds: float,
    device: torch.device,
) -> Result:
    shape: dict[str, Any] = {"op": NAME, "params": params, "device": str(device)}
    for index, (answer, tokens) in enumerate(zip(answers, line["tokens"], strict=True)):
        if tokens != answer:
            return Result(**shape, error=f"request {index} strays from the planted text")
    long = line["seconds"]["long"]
    seconds = median(long) - median(line["seconds"]["short"])
    if seconds <= 0:
        return Result(**shape, skipped="the long run took no longer than the short one, which takes more --output")
    tokens = len(answers) * (params["output"] - params["short"])
    facts = {"tokens_per_second": round(tokens / seconds, 2), "start_seconds": round(start_seconds, 2)}
    facts["spread"] = round((max(long) - min(long)) / median(long), 4)
    if line["rounds"]:
        behind_prefill = sum(len(tokens) - 1 for tokens in line["tokens"])  # whose first ones are of no round
        facts["accept_length"] = round(behind_prefill / line["rounds"], 4)
    return Result(**shape, facts=facts)


def show(run_record: dict[str, Any]) -> None:
    told = ", ".join(f"{name} {facts.get('version', '?')}" for name, facts in run_record["engines"].items())
    p = run_record["results"][0]["params"]
    print(f"{run_record['machine']['name']}: {told}")
    layers = f" of {p['layers']} layers" if p.get("layers") else ""
    accepts = ", ".join(dict.fromkeys(str(r["params"]["accept"]) for r in run_record["results"]))
    print(f"{p['shape']}{layers} {p['dtype']}, accept {accepts}, {p['input']} tokens in, {p['output']} out")
    print_table(COLUMNS, [row(r) for r in run_record["results"]], left=2)


def row(r: dict[str, Any]) -> list[str]:
    """The cells of one result, under COLUMNS."""
    p, facts = r["params"], r.get("facts", {})
    head = [p["engine"], p["algorithm"], str(p["batch"])]
    if not facts:
        return [*head, "WRONG" if r["error"] else "skipped", "", ""]
    accept = f"{facts['accept_length']:.2f}" if "accept_length" in facts else ""
    return [*head, f"{facts['tokens_per_second']:.0f}", accept, f"{facts['start_seconds']:.0f}"]


if __name__ == "__main__":
    sys.exit(main())
