"""Grammars that take too long, too much memory, or end their compiler: others do not notice them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.server.grammars import MAX_VERDICT_BYTES, GrammarCompiler, GrammarLimits
from specdec_kernels.server.protocol import RequestError
from specdec_kernels.tiny import tiny_model
from support.server_thread import Running, serving, start, wait_for

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

PATH = "/v1/completions"
PLAIN = {"prompt": "def f", "max_tokens": 2}
SECONDS = 0.5  # for a grammar


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def slow(count: int) -> str:
    """Return a grammar that takes long to compile."""
    return "root ::= " + '"a" [bc]?' * count


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine(tiny_model("target"), device="cpu", max_len=128, num_slots=2, adaptive=False, grammars=True)
    with serving(engine, max_grammar_seconds=SECONDS) as running:
        assert running.ask(PATH, PLAIN | {"regex": "a+"})[0] == 200  # starts the process that compiles
        yield running


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "ab" * 450_000}, "regex has 900000 characters, expected at most 65536"),
        (nested(400), "response_format is nested too deep, expected fewer levels"),
        ({"ebnf": slow(5000)}, "ebnf takes more than 0.5 s to compile, expected a simpler one"),
    ],
)  # fmt: skip
def test_grammar_beyond_a_limit_is_refused_by_name(server: Running, fields: dict[str, Any], message: str) -> None:
    assert server.error(PATH, PLAIN | fields)[:2] == (400, message)


def test_bystanders_do_not_wait_for_grammars_of_clients_that_leave(server: Running) -> None:
    """A grammar takes seconds of CPU time; bystanders are answered before the first of them ends, and none ever does."""
    compiler = server.app.state.server.grammars
    verdicts = compiler._verdicts.items()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as clients:
        patch.setattr(compiler, "_limits", replace(compiler._limits, seconds=300))
        for i in range(8):
            connection = clients.enter_context(server.connection())
            connection.request("POST", PATH, json.dumps(PLAIN | {"ebnf": slow(7000 + i)}))
        wait_for(lambda: compiler._num_waiting == 8)
        for _ in range(3):
            assert server.ask(PATH, PLAIN)[0] == 200
        assert server.ask("/health")[0] == 200
        assert compiler._num_waiting == 8
    wait_for(lambda: compiler._num_waiting == 0)  # all have left: nothing is compiled any more
    assert compiler._verdicts.items() == verdicts
    assert server.app.state.server._num_prepared == 0


def test_process_that_compiles_is_started_again(server: Running) -> None:
    compiler = server.app.state.server.grammars
    assert compiler._process is not None
    os.kill(compiler._process.pid, signal.SIGKILL)
    compiler._process.wait()
    assert server.ask(PATH, PLAIN | {"regex": "b+"})[0] == 200


def test_health_names_grammars_that_do_not_end(server: Running) -> None:
    compiler = server.app.state.server.grammars
    compiler._deadlines["late"] = time.monotonic() - 1
    try:
        assert server.error("/health", None)[:2] == (
            503,
            "1 grammars are compiled for longer than their time, expected none",
        )
    finally:
        del compiler._deadlines["late"]


@pytest.mark.exhaustive
def test_sigterm_is_obeyed_while_grammars_are_compiled() -> None:
    process, line = start("--drain-seconds", "2", "--max-grammar-seconds", "60")
    try:
        port = int(line.strip().rsplit(":", 1)[1])
        with ExitStack() as clients:
            for i in range(4):
                connection = http.client.HTTPConnection("127.0.0.1", port)
                clients.callback(connection.close)
                connection.request("POST", PATH, json.dumps(PLAIN | {"ebnf": slow(7000 + i)}))
            time.sleep(8)  # the process that compiles has started
            process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            assert process.wait(timeout=30) == 0
            assert time.monotonic() - begin < 4
    finally:
        process.kill()
        process.communicate()


def test_grammar_without_a_backend_is_refused_with_what_to_install(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, message, param = server.error(PATH, PLAIN | {"regex": "a+"})
    assert (status, param) == (400, "regex")
    assert message == 'regex is given, expected none without llguidance (pip install "specdec-kernels[grammar]")'


class Refusing(GrammarCompiler):
    """A compiler that refuses every grammar, after it may."""

    def __init__(self) -> None:
        inputs = SimpleNamespace(has_grammar=lambda params: True, grammars=SimpleNamespace(expect_available=str))
        super().__init__(SimpleNamespace(core=SimpleNamespace(inputs=inputs)), GrammarLimits())  # type: ignore[arg-type]
        self.may, self.num_tried = asyncio.Event(), 0

    async def _try_out(self, kind: str, source: str) -> str:
        await self.may.wait()
        self.num_tried += 1
        return f"{source[0]} is wrong " + "x" * 8000


def test_verdicts_are_bounded_by_bytes() -> None:
    """The least recently used ones are forgotten."""

    async def refuse_many() -> None:
        compiler = Refusing()
        compiler.may.set()
        for i in [*range(100), 0, *range(100, 200), 0, 1]:
            with pytest.raises(ValueError):
                await compiler.compile(SamplingParams(regex=str(i)))
            assert (
                compiler._verdicts.num_bytes
                == sum(len(one) for _, one in compiler._verdicts.items())
                <= MAX_VERDICT_BYTES
            )
        assert len(compiler._verdicts) == MAX_VERDICT_BYTES // 8011 and compiler.num_tried == 201

    asyncio.run(refuse_many())


def test_waiting_grammars_are_bounded_by_bytes() -> None:
    async def fill() -> None:
        compiler = Refusing()
        given = [SamplingParams(regex="\N{EURO SIGN}" * 65536) for _ in range(6)]  # of 192 KiB
        tasks = [asyncio.ensure_future(compiler.compile(one)) for one in given]
        await asyncio.sleep(0)
        compiler.may.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(error, RequestError) for error in errors] == [False] * 5 + [True]
        assert str(errors[-1]) == "5 grammars wait to be compiled, expected fewer: try again later"
        assert compiler._num_waiting == compiler._waiting_bytes == 0

    asyncio.run(fill())
