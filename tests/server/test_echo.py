"""Prompts in responses: `echo`, the log-probabilities of prompts, and the tasks of lm-eval that read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
import torch
from openai import OpenAI

from specdec_kernels.engine import SamplingParams
from specdec_kernels.server.protocol import requests
from specdec_kernels.tiny import tiny_model
from support import lm_eval_session
from support.request_engines import make_engine, prompts
from support.server_thread import NAME, Running, serving
from support.tiny_checkpoint import reference_model, tokenizer

TEXT = "def area(width):\n    return"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module", params=["none", "union"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(make_engine(request.param, max_len=256, prefix_cache=True, prefill_chunk=32)) as running:
        yield running


def ask(server: Running, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    status, _, answer = server.ask(path, {"model": NAME, "prompt": TEXT, "max_tokens": 4, **body})
    assert status == 200, answer
    value: dict[str, Any] = json.loads(answer)
    return value


@torch.inference_mode()
def scored(tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities [T - 1, V] of the tokens after the first, by transformers."""
    logprobs: torch.Tensor = reference_model()(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    return logprobs


# --- echo


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
def test_echo_puts_the_prompt_before_the_text(client: OpenAI, stream: bool, as_tokens: bool) -> None:
    prompt: Any = tokenizer()(TEXT)["input_ids"] if as_tokens else TEXT
    given: dict[str, Any] = {"model": NAME, "prompt": [prompt, prompt], "max_tokens": 4, "n": 2, "seed": 3}
    want = client.completions.create(**given)
    if stream:
        texts = dict.fromkeys(range(4), "")
        for chunk in client.completions.create(**given, echo=True, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = {choice.index: choice.text for choice in client.completions.create(**given, echo=True).choices}
    assert texts == {choice.index: TEXT + choice.text for choice in want.choices}


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_of_an_echoed_prompt(server: Running, client: OpenAI, num_top: int) -> None:
    tokens = tokenizer()(TEXT)["input_ids"]
    plain = ask(server, logprobs=num_top)["choices"][0]
    choice = ask(server, logprobs=num_top, echo=True)["choices"][0]
    logprobs, own = choice["logprobs"], plain["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {len(tokens) + 4}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][len(tokens) :] == own["tokens"] and "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][len(tokens) :] == pytest.approx(own["token_logprobs"], abs=1e-5)
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    reference = scored(tokens)
    for row, token, text, one, top in zip(
        reference,
        tokens[1:],
        logprobs["tokens"][1:],
        logprobs["token_logprobs"][1:],
        logprobs["top_logprobs"][1:],
        strict=False,
    ):
        assert one == pytest.approx(row[token].item(), abs=2e-3) and top[text] == one
        assert num_top <= len(top) <= num_top + 1
        best = sorted(top.values(), reverse=True)[:num_top]
        assert best == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-3)


def test_stream_has_the_logprobs_of_the_whole_answer(server: Running, client: OpenAI) -> None:
    given: dict[str, Any] = {"model": NAME, "prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 2}
    want = client.completions.create(**given).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**given, stream=True)]
    assert parts[0].text == TEXT
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        values = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
        assert values == getattr(want.logprobs, name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_max_tokens_of_0_returns_the_prompt_alone(server: Running, client: OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {"model": NAME, "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    count = len(tokenizer()(TEXT)["input_ids"])
    if stream:
        options: Any = {"include_usage": True}
        *parts, last = client.completions.create(**given, stream=True, stream_options=options)
        assert "".join(part.choices[0].text for part in parts) == TEXT
        assert parts[-1].choices[0].finish_reason == "length"
        usage, logprobs = last.usage, parts[0].choices[0].logprobs
    else:
        got = client.completions.create(**given)
        assert (got.choices[0].text, got.choices[0].finish_reason) == (TEXT, "length")
        usage, logprobs = got.usage, got.choices[0].logprobs
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (count, 0)
    assert logprobs is not None and logprobs.tokens is not None and len(logprobs.tokens) == count


def test_max_tokens_of_0_without_echo_is_refused(server: Running) -> None:
    message = "max_tokens is 0, expected at least 1"
    assert server.error(COMPLETIONS, {"prompt": TEXT, "max_tokens": 0}) == (400, message, "max_tokens")


# --- vLLM's form


def expect_form_of_vllm(listed: list[Any], tokens: list[int], num_top: int) -> None:
    assert len(listed) == len(tokens) and listed[0] is None
    for row, token, entry in zip(scored(tokens), tokens[1:], listed[1:], strict=True):
        assert next(iter(entry)) == str(token) and num_top <= len(entry) <= num_top + 1
        for name, value in entry.items():
            assert value.keys() == {"logprob", "rank", "decoded_token"}
            assert value["logprob"] == pytest.approx(row[int(name)].item(), abs=2e-3)
            assert value["decoded_token"] == tokenizer().decode([int(name)])
        ranks = [value["rank"] for value in entry.values() if value["rank"] is not None]
        assert sorted(ranks) == [*range(1, num_top + 1)]


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_have_the_form_of_vllm(server: Running, num_top: int) -> None:
    choice = ask(server, prompt_logprobs=num_top)["choices"][0]
    expect_form_of_vllm(choice["prompt_logprobs"], tokenizer()(TEXT)["input_ids"], num_top)
    assert choice["logprobs"] is None and choice["text"] == ask(server)["choices"][0]["text"]
    messages = [{"role": "user", "content": TEXT}]
    _, _, answer = server.ask(CHAT, {"messages": messages, "max_tokens": 2, "n": 2, "prompt_logprobs": num_top})
    whole = json.loads(answer)
    assert all("prompt_logprobs" not in choice for choice in whole["choices"])
    expect_form_of_vllm(whole["prompt_logprobs"], tokenizer()(TEXT + "\n")["input_ids"], num_top)


def test_echo_and_prompt_logprobs_have_their_own_counts(server: Running) -> None:
    choice = ask(server, prompt_logprobs=4, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) == 2
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {4, 5}


# --- limits


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21, expected 0 to 20", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, expected 0 to 20", "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is 1, expected none with stream", "prompt_logprobs"),
        ({"echo": 1}, "echo is 1, expected true or false", "echo"),
    ],
)
def test_other_values_are_refused(server: Running, fields: dict[str, Any], message: str, param: str) -> None:
    assert server.error(COMPLETIONS, {"prompt": TEXT, **fields}) == (400, message, param)


def test_too_many_logprobs_are_refused_before_the_first_token(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_SCORES", 100)
    body = {"prompt": [[5] * 20] * 2, "echo": True, "logprobs": 2}
    message = "logprobs asks for 120 values of prompts, expected at most 100"
    assert server.error(COMPLETIONS, body) == (400, message, "logprobs")
    body = {"prompt": [5] * 51, "prompt_logprobs": 1}
    message = "prompt_logprobs asks for 102 values of prompts, expected at most 100"
    assert server.error(COMPLETIONS, body) == (400, message, "prompt_logprobs")
    assert ask(server, prompt=[5] * 50, prompt_logprobs=1)


def test_too_long_echoes_are_refused_before_the_first_token(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many choices repeats its prompt."""
    monkeypatch.setattr(requests, "MOST_ECHOED", 100)
    message = "echo asks for 102 tokens of prompts, expected at most 100"
    assert server.error(COMPLETIONS, {"prompt": [5] * 34, "n": 3, "echo": True}) == (400, message, "echo")
    assert ask(server, prompt=[5] * 34, n=2, echo=True)


# --- lm-eval


def parse_logprobs(outputs: list[dict[str, Any]], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Read log-likelihoods as the `local-completions` model of lm-eval does: the last token is the generated one."""
    found = []
    for output in outputs:
        for choice, begin in zip(sorted(output["choices"], key=itemgetter("index")), context_lengths, strict=False):
            own = choice["logprobs"]["token_logprobs"][begin:-1]
            top = choice["logprobs"]["top_logprobs"][begin:-1]
            is_greedy = all(one == max(best.values()) for one, best in zip(own, top, strict=True))
            found.append((sum(own), is_greedy))
    return found


def likelihood(tokens: list[int], begin: int) -> tuple[float, bool]:
    rows = scored(tokens)[begin - 1 :]
    ids = torch.tensor(tokens[begin:])
    return rows.gather(1, ids[:, None]).sum().item(), bool((rows.argmax(-1) == ids).all())


def test_log_likelihoods_of_lm_eval(server: Running) -> None:
    """Continuations of one context, sent twice: whole prompts, and as a batch of token lists."""
    context = prompts()[3]
    (greedy,) = server.engine.generate([context], SamplingParams(6))
    continuations = [greedy.tokens, prompts()[0][:5], [7], context[:20]]
    texts = [context + continuation for continuation in continuations]
    payload = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    batch = ask(server, prompt=texts, **payload)
    each = [ask(server, prompt=text, **payload) for text in texts]
    lengths = [len(context)] * len(texts)
    got = parse_logprobs([batch], lengths)
    alone = [parse_logprobs([one], lengths)[0] for one in each]
    assert [is_greedy for _, is_greedy in got] == [True, False, False, False]
    for text, (value, is_greedy), other in zip(texts, got, alone, strict=True):
        want, want_greedy = likelihood(text, len(context))
        assert value == pytest.approx(want, abs=5e-3) and is_greedy == want_greedy
        assert other == (pytest.approx(value, abs=1e-3), is_greedy)


@pytest.mark.clients
def test_tasks_of_lm_eval_agree_with_transformers(server: Running) -> None:
    python = os.environ.get("SPECDEC_CLIENTS", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode != 0:
        pytest.skip(f"lm_eval is not installed for {python}")
    pairs = [("def area(", "width):"), ("import os", "\nimport sys\n"), ("", "def main():\n")]
    arguments = f"http://127.0.0.1:{server.port}/v1", NAME, str(tiny_model("target")), json.dumps(pairs)
    command = [python, lm_eval_session.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for (context, continuation), (value, is_greedy) in zip(pairs, found["pairs"], strict=True):
        whole = tokenizer()(context + continuation)["input_ids"]
        tokens = whole if context else [found["first"], *whole]
        want, want_greedy = likelihood(tokens, len(tokenizer()(context)["input_ids"]) if context else 1)
        assert (value, is_greedy) == (pytest.approx(want, abs=5e-3), want_greedy)
    tokens = [found["first"], *tokenizer()("".join(pairs[0]) * 3)["input_ids"]]
    assert found["rolling"] == [pytest.approx(likelihood(tokens, 1)[0], abs=5e-3)]
