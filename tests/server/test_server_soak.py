"""Many clients of a server at once, some of which disconnect: texts equal those of lone requests, nothing leaks.

SPECDEC_SOAK=20000 pytest -m soak runs that many requests on 64 slots.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec_kernels.engine import RequestOutput, SamplingParams
from support.exhaustive import thinned
from support.leaks import expect_nothing_lost, resident_bytes
from support.request_engines import DRAFTS, make_engine
from support.server_thread import Running, serving
from support.tiny_checkpoint import held_out

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.soak
REQUESTS = int(os.environ.get("SPECDEC_SOAK", 300)) // len(DRAFTS)
LONG = REQUESTS >= 1000
NUM_SLOTS, NUM_PAGES, CLIENTS = (64, 100, 96) if LONG else (8, 32, 24)
LENGTHS = (8, 24, 40)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["square", "circle"]}, "width": {"type": "integer", "maximum": 99}},
    "required": ["name", "width"],
    "additionalProperties": False,
}

Kind = tuple[dict[str, Any], dict[str, Any]]  # fields of a body, and the parameters that they set
KINDS: list[Kind] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0, "speculation": "off"}, {"speculation": "off"}),
    ({"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}),
    ({"temperature": 0, "stop": ["):", "="]}, {"stop": ["):", "="]}),
    ({"temperature": 0, "logprobs": 2}, {"logprobs": 2}),
    ({"temperature": 1.0, "seed": 5, "n": 3, "stop": "\n"}, {"temperature": 1.0, "seed": 5, "n": 3, "stop": "\n"}),
    ({"temperature": 0, "frequency_penalty": 0.7}, {"frequency_penalty": 0.7}),
    ({"temperature": 0.9, "seed": 7, "ebnf": 'root ::= ("yes" | "no") ", " [0-9] "%"'}, {"temperature": 0.9, "seed": 7, "grammar": 'root ::= ("yes" | "no") ", " [0-9] "%"'}),
    ({"temperature": 0.7, "seed": 9, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"temperature": 0.7, "seed": 9, "json_schema": SCHEMA}),
]  # fmt: skip
Case = tuple[dict[str, Any], list[RequestOutput]]


def texts_alone() -> list[Case]:
    """Return bodies of every kind with their texts without draft, cache or other clients."""
    prompts = [prompt[:30] for prompt in held_out("code")]
    cases: list[Case] = []
    with make_engine("none", adaptive=False, grammars=True) as engine:
        for i in range(3 * len(KINDS)):
            fields, params = KINDS[i % len(KINDS)]
            prompt, length = prompts[i % 5] + prompts[i][:3], LENGTHS[i % 4 % len(LENGTHS)]
            outputs = engine.generate([prompt], SamplingParams(length, **params))
            cases.append(({"prompt": prompt, "max_tokens": length} | fields, outputs))
    return cases


def one_request(running: Running, body: dict[str, Any], seed: int) -> list[str] | None:
    """Return the texts; None if this client left, was refused, or sent nonsense."""
    rng = random.Random(seed)
    stream = rng.random() < 0.6
    kind = rng.random()
    if kind < 0.1:
        assert running.error("/v1/completions", body | {"temperature": -1})[0] == 400
        return None
    with running.connection() as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}))
        if kind < 0.15:
            return None
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            return None
        assert response.status == 200
        if stream and kind < 0.4:
            response.read1(rng.randrange(2000))
            return None
        answer = response.read()
    texts: dict[int, str] = {}
    if stream:
        events = [line[6:] for line in answer.decode().split("\n\n") if line]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
    else:
        choices = json.loads(answer)["choices"]
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("name", thinned(DRAFTS, {"union"}.__contains__))
def test_server_soak_keeps_texts_and_leaks_nothing(name: str) -> None:
    alone = texts_alone()
    engine = make_engine(
        name, num_slots=NUM_SLOTS, num_pages=NUM_PAGES, adaptive=False, grammars=True, prefix_cache=True
    )
    rng = random.Random(name)
    begun = time.monotonic()
    with serving(engine, max_queued=CLIENTS) as running, ThreadPoolExecutor(CLIENTS) as clients:

        def go(count: int) -> tuple[int, int]:
            """Send requests; return the number of texts and of those that differ from the lone ones."""
            chosen = [(*rng.choice(alone), rng.randrange(2**31)) for _ in range(count)]
            answers = list(clients.map(lambda one: one_request(running, one[0], one[2]), chosen))
            pairs = [
                (text, output.text)
                for answer, (_, outputs, _) in zip(answers, chosen, strict=True)
                if answer is not None
                for text, output in zip(answer, outputs, strict=True)
            ]
            others = [pair for pair in pairs if pair[0] != pair[1]]
            for text, want in others:
                print(f"{text!r} for {want!r}")
            running.wait_until_idle()
            return len(pairs), len(others)

        quarters, left = [], []
        for _ in range(4):
            quarters.append(go(REQUESTS // 4))
            left.append((resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        texts, others = (sum(counts) for counts in zip(*quarters, strict=True))
        stats = engine.stats()
        print(f"{name}: {texts} texts in {time.monotonic() - begun:.0f} s, {others} others than alone; {stats}")
        print(
            "MiB, files and threads after each quarter:", [(m // 2**20, files, threads) for m, files, threads in left]
        )
        assert texts > REQUESTS // 2 and stats.prefix_hits > 0
        assert others <= 1 + REQUESTS // 100, "more than near-ties explain"
        (half, *half_open), (end, *end_open) = left[1], left[3]
        assert end - half < 16 * 2**20
        assert all(last <= before + 4 for last, before in zip(end_open, half_open, strict=True))
        assert engine.core.scheduler.num_running == engine.core.scheduler.num_waiting == 0
        assert engine.core.threads.num_requests == running.app.state.server.metrics.num_open == 0
        expect_nothing_lost(engine)
