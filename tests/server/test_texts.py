"""Texts of the server and the engine, whole and streamed, by tokenizers of several kinds: random tokens of all sorts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec_kernels.engine import Engine, NewTokens, Ngram, SamplingParams
from support.exhaustive import exhaustive
from support.server_thread import Running, serving
from support.tiny_random_models import NATIVE, tiny_model
from support.tokenizer_kinds import BYTES, KINDS, TEXT, tokenizer_of

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the cat is"


def make_engine(kind: str, **options: Any) -> Engine:
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(0)
    model = tiny_model("llama", **NATIVE | {"vocab_size": len(tokenizer)})
    sizes = {"device": "cpu", "dtype": torch.float32, "max_len": 256, "num_slots": 4, "adaptive": False}
    return Engine(model, Ngram(), tokenizer=tokenizer, **sizes, **options)


@pytest.fixture(scope="module", params=["byte-fallback-strip", "metaspace", "byte-level"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(make_engine(request.param)) as server:
        yield server


def body_of(running: Running, seed: int, **fields: Any) -> dict[str, Any]:
    """Return a request for random tokens, often bytes; some bytes are no UTF-8."""
    ids = running.engine.tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in (0x0A, 0x20, 0xFF, *"é日".encode())])
    bias = {str(token): 4 for token in ids if token is not None}
    return {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.5, "seed": seed, "logit_bias": bias, **fields}


def whole(running: Running, body: dict[str, Any], path: str = COMPLETE) -> list[dict[str, Any]]:
    status, _, answer = running.ask(path, body)
    assert status == 200, answer
    choices: list[dict[str, Any]] = json.loads(answer)["choices"]
    return choices


def chunks(running: Running, body: dict[str, Any], path: str = COMPLETE) -> list[dict[str, Any]]:
    status, _, answer = running.ask(path, body | {"stream": True})
    assert status == 200
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"stop": ["é", " P", "\n", "no such string"]}, {"stream_options": {"include_rounds": True}}],
    ids=["plain", "n", "stop", "rounds"],
)
@pytest.mark.parametrize("first", [0, *exhaustive(5, 10)])
def test_streamed_text_is_the_whole_text(running: Running, fields: dict[str, Any], first: int) -> None:
    for seed in range(first, first + 5):
        body = body_of(running, seed, **fields)
        body.pop("stream_options", None)
        choices = whole(running, body)
        events = chunks(running, body | fields)
        for choice in choices:
            mine = [event for event in events if event["index"] == choice["index"]]
            assert "".join(event["text"] for event in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            if "stream_options" in fields:
                pieces = [piece["text"] for event in mine for piece in event["pieces"]]
                assert "".join(pieces) == choice["text"]
            assert not any(stop in choice["text"] for stop in fields.get("stop", ()))


def test_prompt_and_text_are_what_all_tokens_decode_to(running: Running) -> None:
    engine, tokenizer = running.engine, running.engine.tokenizer
    for seed in range(6):
        body = body_of(running, seed, ignore_eos=True)
        bias = {int(token): value for token, value in body["logit_bias"].items()}
        params = SamplingParams(30, temperature=1.5, seed=seed, logit_bias=bias, ignore_eos=True)
        (output,) = engine.generate(PROMPT, params)
        both = tokenizer.decode([*output.prompt_tokens, *output.tokens], skip_special_tokens=True)
        assert tokenizer.decode(output.prompt_tokens, skip_special_tokens=True) + (output.text or "") == both
        (choice,) = whole(running, body)
        assert choice["text"] == output.text
        events: list[NewTokens] = []
        engine.generate(PROMPT, params, on_tokens=events.append)
        decoder = engine.text_decoder(PROMPT)
        assert "".join(decoder.push(new.tokens) for new in events) + decoder.rest() == output.text


def test_chat_text_is_streamed_as_it_is_whole(running: Running) -> None:
    for seed in range(4):
        body = body_of(running, seed, messages=[{"role": "user", "content": PROMPT}])
        del body["prompt"]
        (choice,) = whole(running, body, CHAT)
        pieces = [event["delta"].get("content", "") for event in chunks(running, body, CHAT)]
        assert "".join(pieces) == choice["message"]["content"]


def test_text_offsets_are_places_in_the_text(running: Running) -> None:
    for seed in range(6):
        body = body_of(running, seed, logprobs=2, ignore_eos=True)
        (choice,) = whole(running, body)
        text, entries = choice["text"], choice["logprobs"]
        offsets = entries["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
        streamed = [event["logprobs"] for event in chunks(running, body) if event["logprobs"]]
        assert [offset for one in streamed for offset in one["text_offset"]] == offsets
        for token, begin, end in zip(entries["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
            if text[begin:end].isascii() and not token.startswith(("<", "bytes:")):
                assert text[begin:end] == token


def test_request_moves_to_another_engine_with_its_stop_string() -> None:
    with make_engine("byte-fallback-strip") as engine, make_engine("byte-fallback-strip") as other:
        for seed in range(4):
            params = SamplingParams(40, temperature=1.5, seed=seed, ignore_eos=True, stop=["no such string", "cat"])
            (want,) = engine.generate(PROMPT, params)
            request = engine.submit(PROMPT, params)
            try:
                moved = other.import_request(engine.export_request(request)).result()
            except ValueError:  # it has ended before
                moved = request.result()
            assert (moved.text, moved.tokens, moved.finish_reason) == (want.text, want.tokens, want.finish_reason)


def test_first_space_reaches_the_client_and_its_stop_strings() -> None:
    """A tokenizer that drops the first space of a text does not drop that of a completion."""
    with serving(make_engine("byte-fallback-strip")) as running:
        token = running.engine.tokenizer.convert_tokens_to_ids("▁Paris")
        body = {"prompt": PROMPT, "max_tokens": 2, "logit_bias": {str(token): 100}}
        (choice,) = whole(running, body)
        assert choice["text"] == " Paris Paris"
        (choice,) = whole(running, body | {"stop": " Paris"})
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "logit_bias": {str(token): 100}}
        (choice,) = whole(running, chat, CHAT)
        assert choice["message"]["content"] == " Paris Paris"


def test_byte_that_is_no_utf8_loses_no_text() -> None:
    """After it, nothing more was sent; with a stop string the answer was an error."""
    with serving(make_engine("byte-fallback-strip")) as running:
        newline, broken = running.engine.tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xFF>"])
        sampled = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        for seed in range(8):
            body = sampled | {"seed": seed, "logit_bias": {str(newline): 5, str(broken): 5}}
            (choice,) = whole(running, body)
            assert "\N{REPLACEMENT CHARACTER}" in choice["text"]
            assert "".join(event["text"] for event in chunks(running, body)) == choice["text"]
            (stopped,) = whole(running, body | {"stop": "no such string"})
            assert stopped["text"] == choice["text"]


# Left out: a space that depends on the next token, and one that is a token of its own, which no token of a word follows.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word-ends", "plain")])
def test_text_under_a_regex_has_its_spaces(kind: str) -> None:
    """Tokens are held to what they add to the text, whatever their names in the vocabulary are."""
    pytest.importorskip("xgrammar")
    pattern = "( the| is| cat)( the| is| cat)"
    with make_engine(kind, grammars=True) as engine:
        for seed in range(4):
            (output,) = engine.generate(PROMPT, SamplingParams(20, temperature=1.0, seed=seed, regex=pattern))
            assert output.text is not None and re.fullmatch(pattern, output.text), output.text
