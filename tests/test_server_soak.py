"""Many clients of a server at once, some of whom go away: texts are those of each alone, and nothing is left behind.

SPECDEC_SOAK=20000 pytest -m soak makes a long soak of it: so many requests.
"""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving import Running, serving
from specdec_kernels.engine import Engine, RequestOutput, SamplingParams
from test_requests import DRAFTS, expect_nothing_left, make_engine
from test_soak import resident_bytes
from tiny import held_out

pytestmark = pytest.mark.soak
REQUESTS = int(os.environ.get("SPECDEC_SOAK", 300))
CLIENTS = 24
LENGTH = 40


def texts_alone(engine: Engine) -> list[tuple[dict[str, Any], RequestOutput]]:
    """Bodies of several kinds, and what they say alone."""
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "speculation": "off"}, {}),
        ({"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}),
        ({"temperature": 0, "stop": ["):", "="]}, {"stop": ["):", "="]}),
        ({"temperature": 0, "logprobs": 2}, {"logprobs": 2}),
    ]
    prompts = [prompt[:30] for prompt in held_out("code")[:12]]
    pairs = [(prompt, *kinds[i % len(kinds)]) for i, prompt in enumerate(prompts)]
    outputs = engine.generate(prompts, [SamplingParams(LENGTH, **params) for _, _, params in pairs])
    bodies = [{"prompt": prompt, "max_tokens": LENGTH} | fields for prompt, fields, _ in pairs]
    return list(zip(bodies, outputs, strict=True))


def one_request(running: Running, body: dict[str, Any], output: RequestOutput, seed: int) -> str | None:
    """The text that came; None where this client went away, was refused, or asked for nonsense."""
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
    if not stream:
        return str(json.loads(answer)["choices"][0]["text"])
    events = [line[6:] for line in answer.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("name", DRAFTS)
def test_soak(name: str) -> None:
    alone = texts_alone(make_engine("none", adaptive=False))
    engine = make_engine(name, num_slots=8, num_pages=60, adaptive=False)
    rng = random.Random(name)
    with serving(engine, max_queued=12) as running, ThreadPoolExecutor(CLIENTS) as clients:

        def go(count: int) -> tuple[int, int]:
            """How many texts came, and how many of them are others than alone."""
            chosen = [(*rng.choice(alone), rng.randrange(2**31)) for _ in range(count)]
            texts = list(clients.map(lambda one: one_request(running, *one), chosen))
            pairs = [(text, one[1].text) for text, one in zip(texts, chosen, strict=True) if text is not None]
            others = [pair for pair in pairs if pair[0] != pair[1]]
            for text, want in others:
                print(f"{text!r} for {want!r}")
            running.wait_until_idle()
            return len(pairs), len(others)

        first = go(REQUESTS // len(DRAFTS) // 2)
        memory = resident_bytes()
        second = go(REQUESTS // len(DRAFTS) // 2)
        assert first[0] + second[0] > REQUESTS // len(DRAFTS) // 4
        assert first[1] + second[1] <= 1 + REQUESTS // 100, "more than near-ties explain"
        expect_nothing_left(engine)
        assert resident_bytes() - memory < 64 * 2**20
        assert len(engine._loop._requests) == running.app.state.server.metrics.num_open == 0
