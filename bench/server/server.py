"""A server and the engine that it serves: the cost of HTTP, JSON and streaming (`specdec bench server`).

An engine on synthetic models answers the same prompts twice, in turn: as `Engine.generate`, and as streams to clients,
which run in a process of their own and send all at once. Tokens per second are those of the whole run, from sending to
the end of the last text, prefill included; each text is compared with the synthetic one.

  even      prompts that have nothing in common
  json      as even, constrained by a JSON schema; the reference is the same texts without it

The synthetic text is a JSON list of strings.
"""

from __future__ import annotations

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

from specdec_kernels.engine import AsyncEngine, Engine, SamplingParams

from ..engine.round import GOLDEN, PAGE_SIZE, RoundClock, Setup, SyntheticModels, draft_of
from ..ops.harness import Result
from .synthetic_tokenizer import SyntheticTokenizer, json_starts

NAME = "server"
MODEL = "synthetic"  # the name that clients use
WARM_UP_TOKENS = 12
SPARE_TOKENS = 64  # tokens of max_len beyond a request's
SCHEMA = {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True)
class Answers:
    """Streams that clients received, all requested at once."""

    answers: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        return max(float(answer["last"]) for answer in self.answers)

    @property
    def first_token(self) -> float:
        return median(float(answer["seconds"][0]) for answer in self.answers)

    @property
    def between(self) -> list[float]:
        """Seconds from one event of a stream to the next, of all streams."""
        return [b - a for answer in self.answers for a, b in pairwise(answer["seconds"])]


class Clients:
    """The process of the clients."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("client.py")), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompts: Sequence[list[int]], count: int, **more: Any) -> Answers:
        """Ask for `count` tokens of each prompt at once.

        Raises:
            RuntimeError: the server refused a request.
        """
        common = {"model": MODEL, "max_tokens": count, "temperature": 0, "stream": True} | more
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([{"prompt": prompt} | common for prompt in prompts]) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError(f"the server answered {errors[0]}")
        return Answers(answers)

    def close(self) -> None:
        """End the process, which ends with its input."""
        self._process.communicate()


@contextmanager
def serving(engine: Engine) -> Iterator[Clients]:
    """Serve an engine as `specdec serve` does, and start its clients."""
    import uvicorn

    from specdec_kernels.server import Connection, Settings, make_app, serving_process

    with engine, socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(AsyncEngine(engine), Settings(MODEL, defaults={"temperature": 0.0}))
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        clients = Clients(listener.getsockname()[1])
        try:
            with serving_process():
                yield clients
        finally:
            clients.close()
            server.should_exit = True
            thread.join()


class WrongText(Exception):
    """A text differs from the synthetic one."""


class Bench:
    """An engine on synthetic models, and what its clients ask for, `most` of them at most."""

    def __init__(self, setup: Setup, models: SyntheticModels, most: int, repeats: int) -> None:
        models.use(setup)
        self.setup, self.text, self.repeats = setup, models.text, repeats
        self._starts = json_starts(models.text, most)
        self._tokenizer = SyntheticTokenizer(models.text, self._starts)
        models.target.generation_config.eos_token_id = self._tokenizer.eos
        self.engine = Engine(
            models.target,
            draft=draft_of(setup, models.draft(setup)),
            tokenizer=self._tokenizer.fast(),
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

    def measure(self, clients: Clients, batch: int, kind: str) -> Result:
        """Measure prompts of a kind, "even" or "json"."""
        params = {"server": "ours", "prompts": kind, "concurrency": batch} | self.setup.params(batch)
        del params["batch"]
        shape: dict[str, Any] = {"op": NAME, "params": params, "device": str(self.setup.device)}
        kinds: dict[str, Callable[[Clients, int], dict[str, float]]] = {"even": self.even, "json": self.json}
        try:
            facts = kinds[kind](clients, batch)
        except WrongText as error:
            return Result(**shape, error=str(error))
        except RuntimeError as error:
            return Result(**shape, skipped=" ".join(str(error).split())[:200])
        return Result(**shape, facts={name: round(value, 4) for name, value in facts.items()})

    def even(self, clients: Clients, batch: int) -> dict[str, float]:
        """Ask for texts that have nothing in common, from the server and from the engine in turn."""
        count = self.setup.output
        self.ask(clients, self.prompts(batch, 0), WARM_UP_TOKENS, ignore_eos=True)
        self.generate(self.prompts(batch, 0), count if self.setup.drafting.adaptive else WARM_UP_TOKENS)
        answers, clocks = [], []
        for wave in range(self.repeats):
            clocks.append(self.generate(self.prompts(batch, wave), count))
            answers.append(self.ask(clients, self.prompts(batch, wave), count, ignore_eos=True))
        tokens = self.repeats * batch * count
        return rates("", tokens, answers) | {
            "generate_tokens_per_second": tokens / sum(clock.ended - clock.began for clock in clocks),
            "generate_first_token_ms": median(clock.run()["first_token_ms"] for clock in clocks),
        }

    def json(self, clients: Clients, batch: int) -> dict[str, float]:
        """Ask for texts that a JSON schema constrains, and for the same texts without it in turn."""
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
        free = rates("free_", tokens, found["free_"])["free_tokens_per_second"]
        return rates("", tokens, found[""]) | {"free_tokens_per_second": free}

    def prompts(self, batch: int, wave: int) -> list[list[int]]:
        """Return a wave's prompts, from the middle of the longest stretches that earlier waves left out."""
        length, count = self.setup.input, len(self.text.order)
        return [self.text.tokens(int(count * (i + GOLDEN * wave % 1) / batch), length) for i in range(batch)]

    def ask(self, clients: Clients, prompts: list[list[int]], count: int, **more: Any) -> Answers:
        """Ask the server, with an empty prefix cache, and check the texts."""
        self.engine.clear_cache()
        answers = clients.ask(prompts, count, **more)
        self.check(prompts, ["".join(answer["texts"]) for answer in answers.answers], count)
        return answers

    def generate(self, prompts: list[list[int]], count: int) -> RoundClock:
        """Ask the engine, with an empty prefix cache, and check the texts."""
        self.engine.clear_cache()
        clock = RoundClock(len(prompts), time.perf_counter())
        outputs = self.engine.generate(prompts, SamplingParams(count, ignore_eos=True), on_tokens=clock)
        clock.end()
        self.check(prompts, [output.text or "" for output in outputs], count)
        return clock

    def check(self, prompts: list[list[int]], texts: Sequence[str], count: int) -> None:
        """Compare texts with the synthetic one.

        Raises:
            WrongText: one differs.
        """
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            at = int((self.text.order == prompt[-1]).nonzero()[0, 0]) + 1
            if text != self._tokenizer.decode(self.text.tokens(at, count)):
                raise WrongText(f"request {index} differs from the synthetic text")


def rates(prefix: str, tokens: int, answers: Sequence[Answers]) -> dict[str, float]:
    """Return throughput, time to the first token, and time between events: median and 99th percentile."""
    between = sorted(gap for one in answers for gap in one.between) or [0.0]
    return {
        f"{prefix}tokens_per_second": tokens / sum(one.seconds for one in answers),
        f"{prefix}first_token_ms": 1e3 * median(one.first_token for one in answers),
        f"{prefix}event_ms": 1e3 * median(between),
        f"{prefix}event_p99_ms": 1e3 * between[len(between) * 99 // 100],
    }


def has_grammars() -> bool:
    """Return whether the engine can be constrained by a JSON schema here."""
    return all(importlib.util.find_spec(name) is not None for name in ("llguidance", "xgrammar"))


def measure_server(
    setups: Sequence[Setup], concurrency: Sequence[int], json_clients: int, repeats: int
) -> Iterator[Result]:
    """Measure each setup, all of one target: even prompts at each concurrency, then JSON."""
    models, most = SyntheticModels(setups[0]), max(concurrency)
    for setup in setups:
        bench = Bench(setup, models, most, repeats)
        with serving(bench.engine) as clients:
            for batch in concurrency:
                yield bench.measure(clients, batch, "even")
            if has_grammars():
                yield bench.measure(clients, min(json_clients, most), "json")
        del bench
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
