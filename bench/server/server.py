"""A server beside the engine that it serves: what HTTP, JSON and the way of a text to its client cost.

    python -m specdec_kernels.bench.server.server --shape qwen3-8b --acceptance code --concurrency 1,16,64 \\
        --json bench/results/<machine>-server.json

One engine on planted models answers the same prompts twice, in turn: as lists of `Engine.generate`, and as streams to
as many clients, which are in a process of their own and send all at once. Tokens a second are those of the whole run,
from the sending to the end of the last text, prefill included; each text is compared with the planted one.

  even      prompts that have nothing in common
  prefix    one client; prompts that share a long beginning, which the prefix cache has since the first of them
  json      as even, held to a JSON schema, beside the same texts without

The planted text is JSON for that, a list of strings.

`--engines ours,sglang --out checkpoints` asks SGLang's server the same, on the same models in published formats, from
where `bench.shootout` writes and finds them; `--path sglang=FOLDER[:FOLDER]` says where it is, if not installed here.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec_kernels.cli.bench import (
    DOMAINS,
    DRAFTERS,
    NO_CUDA,
    SHAPES,
    algorithms,
    at_least,
    find_device,
    numbers,
    words_of,
)
from specdec_kernels.cli.optional_dependencies import require, unwritable
from specdec_kernels.cli.table import print_table
from specdec_kernels.engine import AsyncEngine, Engine, SamplingParams
from specdec_kernels.synthetic.acceptance import PublishedAcceptance
from specdec_kernels.synthetic.models import PlantedText

from ..compare.engine_comparison import MORE, add_path, folders_of, plant
from ..compare.engines import SERVED, Algorithm, Job, is_installed
from ..compare.synthetic_tokenizer import Spelling, say_what_ends_texts, starts_of
from ..engine.round import GOLDEN, PAGE_SIZE, PlantedModels, RoundClock, Setup, draft_of, drafting_of
from ..ops.harness import Result
from ..report.record import record
from .other_servers import OTHERS, served_by, status

NAME = "server"
PACKAGES = ["transformers", "safetensors", "fastapi", "uvicorn", "prometheus_client"]
COLUMNS = [
    "server",
    "algorithm",
    "clients",
    "prompts",
    "tokens/s",
    "beside",
    "share",
    "first token ms",
    "beside",
    "ms between",
    "p99",
]
WARM_UP_TOKENS = 12
TAIL = 16  # tokens behind a shared beginning
AFTER_PREFIX = 16  # tokens of an answer there
SCHEMA = {"type": "array", "items": {"type": "string"}}


@dataclass
class Answers:
    """What clients saw of the streams that came at once."""

    answers: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        return max(float(answer["last"]) for answer in self.answers)

    @property
    def first_token(self) -> float:
        return median(float(answer["seconds"][0]) for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """As far as the server tells."""
        details = (answer["usage"].get("prompt_tokens_details") or {} for answer in self.answers)
        return sum(each.get("cached_tokens", 0) for each in details)

    @property
    def between(self) -> list[float]:
        """Seconds from one event of a stream to the next, of all of them."""
        return [b - a for answer in self.answers for a, b in pairwise(answer["seconds"])]


class Clients:
    """The process of the clients."""

    def __init__(self, port: int, model: str) -> None:
        self._model = model
        command = [sys.executable, str(Path(__file__).with_name("client.py")), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompts: Sequence[list[int]], count: int, **more: Any) -> Answers:
        """All at once, each for so many tokens.

        Raises:
            RuntimeError: the server refused one.
        """
        common = {"model": self._model, "max_tokens": count, "temperature": 0, "stream": True} | more
        common["stream_options"] = {"include_usage": True}
        requests = [["/v1/completions", {"prompt": prompt} | common] for prompt in prompts]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError(f"the server answered {errors[0]}")
        return Answers(answers)

    def close(self) -> None:
        self._process.communicate()  # they end with their input


@contextmanager
def serving(engine: Engine, model: str) -> Iterator[Clients]:
    """An engine served as `specdec serve` does it, and its clients."""
    import uvicorn

    from specdec_kernels.server import Settings, make_app, serving_process

    with engine, socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(AsyncEngine(engine), Settings(model, defaults={"temperature": 0.0}))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        clients = Clients(listener.getsockname()[1], model)
        try:
            with serving_process():
                yield clients
        finally:
            clients.close()
            server.should_exit = True
            thread.join()


class Bench:
    """What clients ask of one server, up to so many of them."""

    name: str  # of the server

    def __init__(
        self, setup: Setup, text: PlantedText, spelling: Spelling, most: int, prefix: int, repeats: int
    ) -> None:
        self.setup, self.text, self.spelling, self.prefix, self.repeats = setup, text, spelling, prefix, repeats
        self._starts = starts_of(text, most)

    def clear_cache(self) -> None:
        """The server forgets the prompts that it has seen."""
        raise NotImplementedError

    def prompts(self, batch: int, wave: int) -> list[list[int]]:
        """Each wave's are from the middle of the longest stretches that those before it left out."""
        length, count = self.setup.input, len(self.text.order)
        return [self.text.tokens(int(count * (i + GOLDEN * wave % 1) / batch), length) for i in range(batch)]

    def expected(self, prompt: list[int], count: int) -> str:
        at = int((self.text.order == prompt[-1]).nonzero()[0, 0]) + 1
        return self.spelling.text(self.text.tokens(at, count))

    def check(self, prompts: list[list[int]], texts: Sequence[str], count: int) -> None:
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if text.lstrip() != self.expected(prompt, count).lstrip():  # some leave the space of a first token out
                raise WrongText(f"request {index} strays from the planted text")

    def ask(
        self, clients: Clients, prompts: list[list[int]], count: int, *, keep: bool = False, **more: Any
    ) -> Answers:
        if not keep:
            self.clear_cache()
        answers = clients.ask(prompts, count, **more)
        self.check(prompts, ["".join(answer["texts"]) for answer in answers.answers], count)
        return answers

    # --- what is measured

    def even(self, clients: Clients, batch: int) -> dict[str, float]:
        count = self.setup.output
        self.ask(clients, self.prompts(batch, 0), WARM_UP_TOKENS, ignore_eos=True)
        self.warm_up(batch)
        answers = []
        for wave in range(self.repeats):
            self.before_wave(batch, wave)
            answers.append(self.ask(clients, self.prompts(batch, wave), count, ignore_eos=True))
        tokens = self.repeats * batch * count
        return {
            "tokens_per_second": tokens / sum(one.seconds for one in answers),
            "first_token_ms": 1e3 * median(one.first_token for one in answers),
        } | between(answers)

    def warm_up(self, batch: int) -> None:
        """Before the first wave of even prompts."""

    def before_wave(self, batch: int, wave: int) -> None:
        """Before each of them."""

    def shared_prefix(self, clients: Clients, batch: int) -> dict[str, float]:
        count = self.repeats + 1
        places = [i * len(self.text.order) // count for i in range(count)]
        prompts = [self.text.tokens(0, self.prefix) + self.text.tokens(place, TAIL) for place in places]
        self.clear_cache()
        first, *later = (self.ask(clients, [prompt], AFTER_PREFIX, keep=True, ignore_eos=True) for prompt in prompts)
        return {
            "first_token_ms": 1e3 * median(one.first_token for one in later),
            "second_first_token_ms": 1e3 * later[0].first_token,
            "uncached_first_token_ms": 1e3 * first.first_token,
            "cached_tokens": min(one.cached_tokens for one in later),
        }

    def held_to_schema(self, clients: Clients, batch: int) -> dict[str, float]:
        count, length = self.setup.output, self.setup.input
        places = self._starts[:: len(self._starts) // batch][:batch]
        prompts = [self.text.tokens(place - length + len(self.text.order), length) for place in places]
        form = {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}
        kinds: dict[str, dict[str, Any]] = {"free_": {"ignore_eos": True}, "": {"response_format": form}}
        found: dict[str, list[Answers]] = {name: [] for name in kinds}
        for kind in kinds.values():
            self.ask(clients, prompts, WARM_UP_TOKENS, **kind)
        for _ in range(self.repeats):
            for name, kind in kinds.items():
                found[name].append(self.ask(clients, prompts, count, **kind))
        tokens = batch * count * self.repeats
        rates = {
            f"{name}tokens_per_second": tokens / sum(one.seconds for one in those) for name, those in found.items()
        }
        return rates | {"first_token_ms": 1e3 * median(one.first_token for one in found[""])} | between(found[""])

    def measure(self, clients: Clients, batch: int, kind: str) -> Result:
        """A kind of prompts: "even", "prefix" or "json"."""
        params = {"server": self.name, "prompts": kind, "concurrency": batch} | self.setup.params(batch)
        del params["batch"]
        if kind == "prefix":
            params["prefix"] = self.prefix
        shape: dict[str, Any] = {"op": NAME, "params": params, "device": str(self.setup.device)}
        ways: dict[str, Callable[[Clients, int], dict[str, float]]] = {
            "even": self.even, "prefix": self.shared_prefix, "json": self.held_to_schema
        }  # fmt: skip
        try:
            facts = ways[kind](clients, batch)
        except WrongText as error:
            return Result(**shape, error=str(error))
        except RuntimeError as error:
            return Result(**shape, skipped=" ".join(str(error).split())[:200])
        return Result(**shape, facts={name: round(value, 4) for name, value in facts.items()})


class Ours(Bench):
    """Our server, and the engine that it serves beside it."""

    name = "ours"

    def __init__(
        self, setup: Setup, models: PlantedModels, spelling: Spelling, most: int, prefix: int, repeats: int
    ) -> None:
        super().__init__(setup, models.text, spelling, most, prefix, repeats)
        models.target.generation_config.eos_token_id = spelling.end
        self.engine = Engine(
            models.target,
            draft=draft_of(setup.drafting, models.draft(setup)),
            tokenizer=spelling.tokenizer(),
            adaptive=setup.drafting.adaptive,
            max_len=setup.engine_len,
            num_slots=most,
            num_pages=setup.num_pages(most),
            page_size=PAGE_SIZE,
            prefix_cache=True,
            grammars=has_grammars(),
            device=setup.device,
            dtype=setup.dtype,
        )
        self._clocks: list[RoundClock] = []

    def clear_cache(self) -> None:
        self.engine.clear_cache()

    def even(self, clients: Clients, batch: int) -> dict[str, float]:
        self._clocks = []
        facts = super().even(clients, batch)
        tokens = self.repeats * batch * self.setup.output
        seconds = sum(clock.ended - clock.began for clock in self._clocks)
        first_tokens = [clock.run()["first_token_ms"] for clock in self._clocks]
        return facts | {
            "generate_tokens_per_second": tokens / seconds, "generate_first_token_ms": median(first_tokens)
        }  # fmt: skip

    def warm_up(self, batch: int) -> None:
        self.generate(self.prompts(batch, 0), self.setup.output if self.setup.drafting.adaptive else WARM_UP_TOKENS)

    def before_wave(self, batch: int, wave: int) -> None:
        self._clocks.append(self.generate(self.prompts(batch, wave), self.setup.output))

    def generate(self, prompts: list[list[int]], count: int) -> RoundClock:
        self.clear_cache()
        clock = RoundClock(len(prompts), time.perf_counter())
        outputs = self.engine.generate(prompts, SamplingParams(count, ignore_eos=True), on_tokens=clock)
        clock.end()
        self.check(prompts, [output.text or "" for output in outputs], count)
        return clock


class Other(Bench):
    """Another engine's server, which is asked over HTTP alone."""

    def __init__(self, name: str, port: int, *shared: Any) -> None:
        super().__init__(*shared)
        self.name, self._port = name, port

    def clear_cache(self) -> None:
        status(self._port, "POST", "/flush_cache")


def has_grammars() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class WrongText(Exception):
    """Of a model whose text is known."""


def between(answers: Sequence[Answers]) -> dict[str, float]:
    """What passes between two events of a stream: the median, and what ninety-nine in a hundred are below."""
    seconds = sorted(gap for one in answers for gap in one.between) or [0.0]
    return {"event_ms": 1e3 * median(seconds), "event_p99_ms": 1e3 * seconds[len(seconds) * 99 // 100]}


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    if not require("bench.server", "serve", PACKAGES):
        return 2
    device = find_device(args.device)
    if device is None:
        print(f"server: {NO_CUDA}", file=sys.stderr)
        return 2
    if args.json and (why := unwritable(args.json)):
        print(f"server: --json {args.json} {why}", file=sys.stderr)
        return 2
    others = [name for name in args.engines if name != "ours"]
    if others and args.out is None:
        print(f"server: --engines has {others[0]}, expected --out DIR beside it, for its checkpoints", file=sys.stderr)
        return 2
    for name in list(others):
        if not is_installed(name, folders_of(args, name)):
            print(f"server: {name} is not installed here and left out", file=sys.stderr)
            others.remove(name)
    words = ["python -m specdec_kernels.bench.server.server", *(sys.argv[1:] if arguments is None else arguments)]
    run = Run(args, device, " ".join(words))
    if "ours" in args.engines:
        run.ask_ours()
    if others:
        run.ask_others(others)
    if not run.results:
        return 2
    show(record(run.results, device, None, run.command))
    return 1 if any(r.error for r in run.results) else 0


class Run:
    """What one call measures, as its arguments ask."""

    def __init__(self, args: argparse.Namespace, device: torch.device, command: str) -> None:
        self.args, self.device, self.command = args, device, command
        self.results: list[Result] = []
        self._most = max(args.concurrency)
        self._setups = [
            Setup(
                args.shape,
                drafting_of(name),
                PublishedAcceptance(args.acceptance, args.drafter),
                args.input,
                args.output,
                device,
                torch.bfloat16 if device.type == "cuda" else torch.float32,
                max_len=max(args.input + args.output, args.prefix + TAIL + AFTER_PREFIX) + MORE,
            )
            for name in args.algorithm
        ]

    def ask_ours(self) -> None:
        models = PlantedModels(self._setups[0])
        spelling = self._spelling(models.text)
        for setup in self._setups:
            bench = Ours(setup, models, spelling, self._most, self.args.prefix, self.args.repeats)
            with serving(bench.engine, self.args.shape) as clients:
                self._measure(bench, clients)
            del bench
            self._free()

    def ask_others(self, names: list[str]) -> None:
        args = self.args
        self._free()
        text = plant(args, self.device)
        self._free()
        spelling = self._spelling(text)
        say_what_ends_texts(args.out / "target", spelling)
        for name in names:
            for setup in self._setups:
                d = setup.drafting
                job = Job(
                    name, d.name, str(args.out / "target"), str(args.out / "head"), self.device.type,
                    setup.params(1)["dtype"], setup.engine_len, [[[[[0]] * self._most]]], 0, 0, 0,
                )  # fmt: skip
                algorithm, log = Algorithm(d.num_steps, d.topk, d.num_nodes), args.out / f"{name}.log"
                try:
                    with served_by(name, job, algorithm, folders_of(args, name), log) as port:
                        clients = Clients(port, SERVED)
                        bench = Other(name, port, setup, text, spelling, self._most, args.prefix, args.repeats)
                        self._measure(bench, clients)
                        clients.close()
                except RuntimeError as error:
                    print(f"server: {error}", file=sys.stderr)

    def _spelling(self, text: PlantedText) -> Spelling:
        return Spelling(text, starts_of(text, self._most))

    def _measure(self, bench: Bench, clients: Clients) -> None:
        args = self.args
        plan = [(batch, "even") for batch in args.concurrency]
        plan += [(1, "prefix")] if args.prefix else []
        plan += [(min(args.json_clients, self._most), "json")] if has_grammars() else []
        for batch, kind in plan:
            self.results.append(bench.measure(clients, batch, kind))
            if args.json:  # what was measured survives what comes next
                run_record = record(self.results, self.device, None, self.command)
                Path(args.json).write_text(json.dumps(run_record, indent=1) + "\n")

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specdec_kernels.bench.server.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--acceptance", choices=DOMAINS, default="code", help="of which texts (code)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="eagle3", help="and of whose drafts (eagle3)")
    parser.add_argument("--algorithm", type=algorithms, default=["chain"], metavar="NAME", help="as of `round` (chain)")
    parser.add_argument("--concurrency", type=numbers(1), default=[1, 16, 64], metavar="N", help="clients (1,16,64)")
    parser.add_argument("--json-clients", type=at_least(1), default=16, metavar="N", help="whose texts are JSON (16)")
    parser.add_argument("--input", type=at_least(1), default=321, metavar="N", help="tokens of a prompt (321)")
    parser.add_argument("--output", type=at_least(2), default=215, metavar="N", help="tokens of a text (215)")
    parser.add_argument(
        "--prefix", type=at_least(0), default=4096, metavar="N", help="tokens that prompts share (4096)"
    )
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N", help="runs of each kind, in turn (5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--engines", type=words_of(("ours", *OTHERS)), default=["ours"], metavar="NAME")
    add_path(parser)
    parser.set_defaults(layers=None)  # those of the shape, in the checkpoints of `bench.shootout`, too
    parser.add_argument("--out", type=Path, metavar="DIR", help="where checkpoints for other engines are written")
    parser.add_argument("--json", metavar="FILE", help="write the run to FILE as well")
    return parser


def show(run_record: dict[str, Any]) -> None:
    p = run_record["results"][0]["params"]
    print(f"{run_record['machine']['name']}: {p['shape']} {p['dtype']}, {p['input']} tokens in, {p['output']} out")
    print_table(COLUMNS, [row(r) for r in run_record["results"]], left=4)


def row(r: dict[str, Any]) -> list[str]:
    """The cells of one result, under COLUMNS."""
    p, facts = r["params"], r.get("facts", {})
    name = p["algorithm"] + (f" ({p['num_steps']}, {p['topk']}, {p['nodes']})" if p["num_steps"] else "")
    head = [p.get("server", "ours"), name, str(p["concurrency"]), p["prompts"]]
    if r["error"] or r["skipped"]:
        return [*head, "WRONG" if r["error"] else "refused", *[""] * (len(COLUMNS) - 4)]
    beside = {"even": "generate_tokens_per_second", "json": "free_tokens_per_second"}.get(p["prompts"], "")
    first = {"even": "generate_first_token_ms", "prefix": "uncached_first_token_ms"}.get(p["prompts"], "")
    rates = [facts.get("tokens_per_second"), facts.get(beside)]
    share = "" if None in rates else f"{rates[0] / rates[1]:.1%}"
    return [
        *head,
        *("" if rate is None else f"{rate:.0f}" for rate in rates),
        share,
        *(
            f"{facts[name]:.2f}" if name in facts else ""
            for name in ("first_token_ms", first, "event_ms", "event_p99_ms")
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
