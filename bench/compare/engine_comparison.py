"""Whole engines on the same checkpoints: ours, SGLang and vLLM, where they are installed (`specdec bench engines`).

A synthetic target and a synthetic EAGLE-3 head with a published acceptance are written to a folder in published
formats. Each engine loads them in a process of its own, as its users would, and greedily continues pieces of the
synthetic text; every token is compared with it. Only decoding is timed: tokens per second are those of a long run less
a short one. Small batches run several times, from different places of the text.

N-gram drafts are found in the prompts, which quote what will be written: passages of 4 to 24 tokens, separated by
1 to 4 other tokens. No piece of text that counts is written twice, so no engine finds there what it wrote before.
Prompts for a union of a model and the n-gram index quote the text that the model drafts, and the index finds what a
request's own prompt has, alone.

A block drafter, DSpark's or DFlash's, drafts seven tokens in one pass, with the acceptance of its published kind. Its
text is as short as `block_text_length` says.

An MTP layer is a part of the target's checkpoint, and its drafts have the acceptance of published MTP layers in the
same domain. It shares the target's LM head, so a text that it drafts is as short as `mtp_text_length` says. Models of
shapes that ship with an MTP layer always have one, so that all algorithms run on one checkpoint.

Engines take minutes to start. With `together` 2, two of them start at the same time, each with room for the KV of the
largest batch and little more, and are measured in turn once both have started.
"""

from __future__ import annotations

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
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from specdec_kernels.models.weights.mtp_layouts import NEXTN, QWEN, STEP
from specdec_kernels.synthetic.acceptance import PublishedAcceptance
from specdec_kernels.synthetic.block import block_text_length, save_block_drafter, synthetic_block
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm, synthetic_eagle3
from specdec_kernels.synthetic.mtp import mtp_text_length, save_with_mtp, synthetic_mtp
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

from ..ops.harness import Result
from ..report.record import record
from .checkpoints import write_eagle3, write_target
from .engines import BLOCK_DRAFTERS, FOLDERS, Job, algorithm_of, can_run, is_installed

NAME = "engines"
REQUESTS = 4  # at each batch size, at least
SPARE_TOKENS = 64  # tokens of max_len beyond a request's, which engines keep free
PASSAGE, BETWEEN = (4, 24), (1, 4)  # tokens of a quoted passage, and of other tokens between two passages
LEAD = 8  # tokens of the text right before what is written, at the end of a prompt with quotes
# Layouts of the MTP layers that types of models ship with.
MTP_LAYOUTS = {
    "qwen3_5_text": QWEN, "qwen3_next": QWEN, "deepseek_v3": NEXTN, "glm4_moe_lite": NEXTN, "step3p5": STEP,
}  # fmt: skip
QUOTES = f"quotes of {PASSAGE[0]} to {PASSAGE[1]}"


@dataclass(frozen=True)
class Comparison:
    """Models, engines and sizes of a comparison.

    Attributes:
        layers: of the model, None: the shape's.
        acceptance: domain whose acceptance the drafts have.
        drafter: published drafter whose acceptance the EAGLE-3 head has.
        input: tokens of a prompt.
        output: tokens of the long run.
        short: tokens of the short run, whose time is subtracted.
        repeats: runs whose median counts.
        max_len: of the engines, None: what requests need.
        limit: seconds of a process.
        together: engines that start at the same time.
        served: whether requests go to the engine's server, as streams.
        folders: where to look for an engine's packages first.
        options: more of an engine's class.
        out: folder of the checkpoints.
        logs: folder that keeps what each process says, None: it is shown if the process fails.
    """

    shape: str
    layers: int | None
    acceptance: str
    drafter: str
    engines: Sequence[str]
    algorithms: Sequence[str]
    batches: Sequence[int]
    input: int
    output: int
    short: int
    repeats: int
    max_len: int | None
    limit: float
    together: int
    served: bool
    folders: dict[str, list[str]]
    options: dict[str, dict[str, Any]]
    out: Path
    logs: Path | None
    device: torch.device

    @property
    def text(self) -> SyntheticText:
        config = shape_config(self.shape, self.layers)
        lengths = [mtp_text_length(config)] * ("mtp" in self.drafters)
        lengths += [block_text_length(config)] * bool(self.drafters & set(BLOCK_DRAFTERS))
        return SyntheticText.of(config.vocab_size, min(lengths, default=draft_vocab_of(config)))

    @property
    def drafters(self) -> set[str]:
        """The drafters that there are: an MTP layer, which some shapes ship with, a head and block drafters."""
        algorithms = [a for a in map(algorithm_of, self.algorithms) if a.num_steps]
        shipped = {"mtp"} if shape_config(self.shape).model_type in MTP_LAYOUTS else set()
        return ({a.drafter for a in algorithms} | shipped) - {"ngram"}

    def acceptance_of(self, drafter: str) -> PublishedAcceptance:
        """Return the acceptance of a drafter's drafts."""
        return PublishedAcceptance(self.acceptance, self.drafter if drafter == "eagle3" else drafter)

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"


def compare_engines(c: Comparison, command: str) -> dict[str, Any] | None:
    """Measure all engines that are installed and return the record; None if there is no result.

    Raises:
        ValueError: the text is too short for the sizes.
    """
    text = c.text
    runs = {algorithm: runs_of_batches(c, text, algorithm) for algorithm in c.algorithms}
    write_checkpoints(c)
    here = [engine for engine in c.engines if is_installed(engine, c.folders.get(engine, []))]
    for engine in c.engines:
        if engine not in here:
            print(f"specdec bench engines: {engine} is not installed and left out", file=sys.stderr)
    results: list[Result] = []
    engines: dict[str, Any] = {}
    for group in groups_of(here, c.algorithms, c.together, served=c.served):
        for (engine, _), (lines, facts) in zip(group, run_engines(c, runs, group), strict=True):
            results += lines
            engines[engine] = facts or engines.get(engine, {})
    return record(results, c.device, None, command) | {"engines": engines} if results else None


def groups_of(
    engines: Sequence[str], algorithms: Sequence[str], together: int, *, served: bool = False
) -> list[list[tuple[str, str]]]:
    """Group pairs of engine and algorithm that start at the same time."""
    pairs = [(e, name) for name in algorithms for e in engines if can_run(e, algorithm_of(name), served=served)]
    return [pairs[at : at + together] for at in range(0, len(pairs), together)]


def write_checkpoints(c: Comparison) -> None:
    """Write target and drafts to `out`, unless they are there with the same options."""
    config = shape_config(c.shape, c.layers)
    drafts = [f"{drafter}: {c.acceptance_of(drafter).name}" for drafter in sorted(c.drafters)]
    options: dict[str, Any] = {
        "target": [c.shape, config.num_hidden_layers, c.dtype, len(c.text.order)],
        "drafts": drafts,
    }
    file = c.out / "synthetic.json"
    written: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"target": None}
    if written["target"] == options["target"] and set(drafts) <= set(written["drafts"]):
        return
    c.out.mkdir(parents=True, exist_ok=True)
    target = synthetic_causal_lm(config, c.text, device=c.device, dtype=getattr(torch, c.dtype))
    rmtree(c.out / "target", ignore_errors=True)  # its files may have other names
    if "mtp" in c.drafters:
        layout = MTP_LAYOUTS.get(config.model_type, NEXTN)
        save_with_mtp(target, synthetic_mtp(target, c.text, c.acceptance_of("mtp"), layout), c.out / "target")
    else:
        write_target(target, c.out / "target")
    if "eagle3" in c.drafters:
        write_eagle3(synthetic_eagle3(target, c.text, c.acceptance_of("eagle3")), c.out / FOLDERS["eagle3"])
    kinds: tuple[Literal["dspark"], Literal["dflash"]] = "dspark", "dflash"
    for kind in kinds:
        if kind in c.drafters:
            drafter = synthetic_block(target, c.text, c.acceptance_of(kind), kind)
            save_block_drafter(*drafter, c.out / FOLDERS[kind])
    file.write_text(json.dumps(options))
    del target
    if c.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Request:
    """A prompt and its continuation."""

    prompt: list[int]
    answer: list[int]  # what a long run writes


Waves = list[list[Request]]  # requests of a batch at a time, one batch after the other


def runs_of_batches(c: Comparison, text: SyntheticText, algorithm: str) -> list[list[Waves]]:
    """Return the runs of each batch size: a warm-up, then a short and a long run for each repeat.

    Raises:
        ValueError: the text has too few tokens for all pieces.
    """
    a = algorithm_of(algorithm)
    if a.drafter != "ngram":
        pieces = [waves_of(text, batch, c.input, c.output, quoted=a.is_quoted) for batch in c.batches]
        return [[waves] * (1 + 2 * c.repeats) for waves in pieces]
    starts, lengths = [starts_of(text, batch) for batch in c.batches], [c.short, c.output] * c.repeats
    wanted = sum(len(wave) * (LEAD + length) for waves in starts for wave in waves for length in lengths)
    if wanted > len(text.other_order):
        raise ValueError(
            f"ngram takes {wanted} tokens of text, expected at most {len(text.other_order)}: "
            "ask for fewer or smaller batches, a shorter --output or fewer --repeats"
        )
    rest, longest = iter(text.other_tokens(0, wanted)), LEAD + c.output
    found = []
    for waves in starts:
        first = [[quoting(text.tokens(at, longest), c.input, text.order) for at in wave] for wave in waves]
        others = [
            [[quoting(list(islice(rest, LEAD + length)), c.input, text.order) for _ in wave] for wave in waves]
            for length in lengths
        ]
        found.append([first, *others])
    return found


def waves_of(text: SyntheticText, batch: int, prompt: int, output: int, *, quoted: bool = False) -> Waves:
    """Return requests from places all over the text, whose prompts may quote what follows."""
    if quoted:
        return [
            [quoting(text.tokens(at, LEAD + output), prompt, text.other_order) for at in wave]
            for wave in starts_of(text, batch)
        ]
    return [
        [Request(text.tokens(at, prompt), text.tokens(at + prompt, output)) for at in wave]
        for wave in starts_of(text, batch)
    ]


def quoting(piece: list[int], length: int, order: Tensor) -> Request:
    """Return a request whose prompt has `length` tokens: quotes of the answer, then the piece's first tokens.

    Between quotes are tokens of `order`, a text without the piece.
    """
    draw, answer = Random(piece[0]), piece[LEAD:]
    quotes: list[int] = []
    others = (int(order[at % len(order)]) for at in count(draw.randrange(len(order))))
    at = 0
    while at < len(answer) and len(quotes) < length:
        passage, between = draw.randint(*PASSAGE), draw.randint(*BETWEEN)
        quotes += [*answer[at : at + passage], *(next(others) for _ in range(between))]
        at += passage + between
    quotes = quotes[: max(0, length - LEAD)]
    before = [next(others) for _ in range(length - LEAD - len(quotes))]
    return Request([*before, *quotes, *piece[:LEAD]][-length:], answer)


def starts_of(text: SyntheticText, batch: int) -> list[list[int]]:
    """Return the places in the text where the requests of each wave begin, evenly spread over all waves."""
    waves = -(-REQUESTS // batch)
    places = [i * len(text.order) // (batch * waves) for i in range(batch * waves)]
    return [places[wave::waves] for wave in range(waves)]


def run_engines(
    c: Comparison, runs: dict[str, list[list[Waves]]], group: list[tuple[str, str]]
) -> list[tuple[list[Result], dict[str, Any]]]:
    """Run pairs of engine and algorithm in processes that start at the same time; see `run_engine`."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(group)) as threads:
        turns = Path(folder) if len(group) > 1 else None
        running = [
            threads.submit(run_engine, c, runs[algorithm], engine, algorithm, turns, len(group))
            for engine, algorithm in group
        ]
        return [one.result() for one in running]


def run_engine(
    c: Comparison, batches: list[list[Waves]], engine: str, algorithm: str, turns: Path | None, runners: int
) -> tuple[list[Result], dict[str, Any]]:
    """Run one process; return a result for each batch size, and what the engine reports about itself.

    `batches` are the runs of each batch size, `turns` is a folder in which `runners` processes take turns.
    """
    job = Job(
        engine=engine,
        algorithm=algorithm,
        target=str(c.out / "target"),
        head=str(c.out / FOLDERS.get(algorithm_of(algorithm).drafter, "head")),
        device=c.device.type,
        dtype=c.dtype,
        max_len=c.max_len or c.input + c.output + SPARE_TOKENS,
        batches=[[[[r.prompt for r in wave] for wave in waves] for waves in runs] for runs in batches],
        short=c.short,
        long=c.output,
        repeats=c.repeats,
        turns=None if turns is None else str(turns),
        runners=runners,
        served=c.served,
        options=c.options.get(engine, {}),
    )
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "job.json", Path(folder) / "out.json"
        log = (c.logs or Path(folder)) / f"{engine}-{algorithm}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "specdec_kernels.bench.compare.engines.worker", str(source), str(target)]
        failure = run_limited(command, c.folders.get(engine, []), log, c.limit)
        if turns is not None:
            (turns / f"{engine}-{algorithm} ended").touch()
        if failure:
            print(f"specdec bench engines: {engine} {algorithm} {failure}:\n{log.read_text()[-2000:]}", file=sys.stderr)
        found = json.loads(target.read_text()) if target.exists() else {"batches": []}
    measured = {line["batch"]: line for line in found.pop("batches")}
    results = []
    a = algorithm_of(algorithm)
    names = [] if a.drafter == "ngram" else [c.acceptance_of(a.drafter).name]
    accept = ", ".join([*names, *[QUOTES] * a.is_quoted])
    for batch, runs in zip(c.batches, batches, strict=True):
        params = {
            "engine": engine, "algorithm": algorithm, "batch": batch, **steps_of(algorithm), "shape": c.shape,
            "layers": c.layers, "accept": accept, "input": c.input, "output": c.output, "short": c.short,
            "max_len": job.max_len, "dtype": job.dtype,
            **({"served": True} if job.served else {}),
        }  # fmt: skip
        if batch in measured:
            answers = [request.answer for wave in runs[-1] for request in wave]
            results.append(result_of(params, measured[batch], answers, found["start_seconds"], c.device))
        else:
            results.append(Result(NAME, params, str(c.device), skipped=f"{engine} {failure or 'gave no result'}"))
    return results, found


def steps_of(algorithm: str) -> dict[str, int]:
    """Return an algorithm's sizes as parameters of a record."""
    a = algorithm_of(algorithm)
    return {"num_steps": a.num_steps, "topk": a.topk, "nodes": a.num_nodes}


def environment_of(folders: list[str]) -> dict[str, str]:
    """Return the environment of a process that looks for packages in these folders first."""
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | ({"PYTHONPATH": path} if path else {})


def run_limited(command: list[str], folders: list[str], log: Path, limit: float) -> str | None:
    """Run a process group to its end or the limit; return what went wrong, None for nothing."""
    with process_group(command, environment_of(folders), log) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"took more than {limit:g} s"
    return f"ended with code {code}" if code else None


@contextmanager
def process_group(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that writes to the log; on exit, kill it and all processes that it has started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # there is none left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def result_of(
    params: dict[str, Any],
    line: dict[str, Any],
    answers: Sequence[list[int]],
    start_seconds: float,
    device: torch.device,
) -> Result:
    """Return the result of a batch size, after its texts were compared with the answers."""
    shape: dict[str, Any] = {"op": NAME, "params": params, "device": str(device)}
    for index, (answer, tokens) in enumerate(zip(answers, line["tokens"], strict=True)):
        if tokens != answer:
            return Result(**shape, error=f"request {index} differs from the synthetic text")
    long = line["seconds"]["long"]
    seconds = median(long) - median(line["seconds"]["short"])
    if seconds <= 0:
        return Result(**shape, skipped="the long run took no longer than the short one, expected a larger --output")
    tokens = len(answers) * (params["output"] - params["short"])
    facts = {"tokens_per_second": round(tokens / seconds, 2), "start_seconds": round(start_seconds, 2)}
    facts["spread"] = round((max(long) - min(long)) / median(long), 4)
    if line["rounds"]:
        of_rounds = sum(len(tokens) - 1 for tokens in line["tokens"])  # prefill yields the first token
        facts["accept_length"] = round(of_rounds / line["rounds"], 4)
    return Result(**shape, facts=facts)
