"""Texts of completions in the context of their prompts, whole and as tokens arrive, of every kind of tokenizer."""

from __future__ import annotations

import random
import time

import pytest

from specdec_kernels.engine.text.detokenizer import Detokenizer, TextDecoder
from specdec_kernels.engine.text.stop_strings import StopStrings
from support.tokenizer_kinds import BYTES, KINDS, token_texts, tokenizer_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
every_kind = pytest.mark.parametrize("kind", KINDS)


def streamed(decoder: TextDecoder, tokens: list[int], draw: random.Random, most: int) -> str:
    pieces, begin = [], 0
    while begin < len(tokens):
        end = begin + draw.randint(0, most)
        pieces.append(decoder.push(tokens[begin:end]))
        decoder.rest()  # changes nothing
        begin = end
    return "".join([*pieces, decoder.rest()])


def ids(kind: str, *pieces: str) -> list[int]:
    tokens: list[int] = tokenizer_of(kind).convert_tokens_to_ids(list(pieces))
    return tokens


@every_kind
def test_prompt_and_text_are_what_all_tokens_decode_to(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer, draw = Detokenizer(tokenizer), random.Random(kind)
    prompts, texts = token_texts(kind, 0, 300), token_texts(kind, 1, 300)
    num_exact = 0
    for prompt, tokens in zip(prompts, texts, strict=True):
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        both = tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)
        text = detokenizer.text(prompt, tokens)
        for most in (1, 3, 30):
            assert streamed(detokenizer.decoder(prompt), tokens, draw, most) == text, (prompt, tokens)
        if both.startswith(before):
            num_exact += 1
            assert before + text == both, (prompt, tokens)
        else:  # the prompt ends within a character that the text completes
            assert both.endswith(text)
            assert not before.endswith(text) or not text
    assert num_exact > 200


@every_kind
def test_long_text_streams_as_it_is_decoded(kind: str) -> None:
    detokenizer = Detokenizer(tokenizer_of(kind))
    tokens = [token for text in token_texts(kind, 2, 200) for token in text]
    whole = tokenizer_of(kind).decode(tokens, skip_special_tokens=True)
    for most in (1, 5):
        assert streamed(detokenizer.decoder([]), tokens, random.Random(most), most) == whole
    assert streamed(detokenizer.decoder(tokens[:40]), tokens[40:], random.Random(0), 2) == detokenizer.text(
        tokens[:40], tokens[40:]
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word-ends"])  # its spaces depend on what follows
def test_token_texts_add_up_to_the_text(kind: str) -> None:
    detokenizer = Detokenizer(tokenizer_of(kind))
    special = set(tokenizer_of(kind).all_special_ids)
    prompt = tokenizer_of(kind)("the", add_special_tokens=False)["input_ids"]
    num_checked = 0
    for tokens in token_texts(kind, 3, 300):
        text = detokenizer.text(prompt, tokens)
        if not special & set(tokens) and REPLACEMENT not in text:
            num_checked += 1
            assert b"".join(map(detokenizer.token_bytes, tokens)).decode() == text
    assert num_checked > 5


def test_first_space_of_a_completion_is_kept() -> None:
    for kind in ("byte-fallback-strip", "byte-fallback", "metaspace"):
        detokenizer = Detokenizer(tokenizer_of(kind))
        prompt, tokens = ids(kind, "▁the", "▁cat", "▁is"), ids(kind, "▁Paris", ".")
        assert detokenizer.text(prompt, tokens) == " Paris."
        assert detokenizer.decoder(prompt).push(tokens[:1]) == " Paris"
        stop = StopStrings(detokenizer.decoder(prompt), [" Paris"], 0)
        assert (stop.find(tokens), stop.text) == (1, "")


def test_byte_that_is_no_utf8_changes_its_run_alone() -> None:
    kind = "byte-fallback-strip"
    detokenizer, prompt = Detokenizer(tokenizer_of(kind)), ids(kind, "▁the")
    tokens = ids(kind, "is", BYTES[0x0A], BYTES[0xFF], "▁cat", BYTES[0x0A], "s")
    decoder = detokenizer.decoder(prompt)
    pieces = [decoder.push([token]) for token in tokens]
    assert pieces == ["is", "", "", 2 * REPLACEMENT + " cat", "", "\ns"]
    assert decoder.rest() == ""
    decoder = detokenizer.decoder(prompt)
    assert [decoder.push(tokens[:2]), decoder.pending, decoder.rest()] == ["is", "\n", "\n"]
    assert [decoder.push(tokens[2:3]), decoder.pending, decoder.rest()] == ["", *[2 * REPLACEMENT] * 2]


def test_stop_string_ends_a_text_at_the_byte_that_completes_it() -> None:
    kind = "byte-fallback-strip"
    detokenizer, prompt = Detokenizer(tokenizer_of(kind)), ids(kind, "▁the")
    tokens = ids(kind, "is", *(BYTES[byte] for byte in "a\n日本".encode()), BYTES[0xFF], "▁cat")
    for stop, count, text in (
        ("\n", 3, "isa"),
        ("日", 6, "isa\n"),
        ("s", 1, "i"),
        (" cat", 11, "is" + 9 * REPLACEMENT),
    ):
        strings = StopStrings(detokenizer.decoder(prompt), ["no", stop], 0)
        assert (strings.find(tokens), strings.text) == (count, text)
        strings = StopStrings(detokenizer.decoder(prompt), [stop], 0)
        assert [strings.find([token]) for token in tokens[:count]] == [*[None] * (count - 1), 1]
        assert strings.text == text
    strings = StopStrings(detokenizer.decoder(prompt), ["s", "long stop string"], 2)
    assert strings.find(ids(kind, "is", "a", "b", "s", "a")) == 4, "found a string that was complete too early"


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("byte-fallback-strip", [BYTES[0x61]]),
        ("byte-fallback-strip", [BYTES[0x61], "▁cat"]),
        ("byte-fallback-strip", ["�"]),
        ("byte-fallback-strip", ["▁"]),
        ("byte-fallback-strip", ["</s>"]),
        ("byte-level", ["ÿ"]),
        ("metaspace", ["▁"]),
        ("word-piece", ["##"]),
    ],
)
def test_time_of_a_stream_grows_with_its_tokens_alone(kind: str, pieces: list[str]) -> None:
    detokenizer, tokens = Detokenizer(tokenizer_of(kind)), 30_000 // len(pieces) * ids(kind, *pieces)
    begin = time.process_time()
    decoder, strings = detokenizer.decoder([]), StopStrings(detokenizer.decoder([]), ["no such string"], 0)
    text = "".join(decoder.push([token]) for token in tokens)
    assert strings.find(tokens) is None
    assert time.process_time() - begin < 10  # a stream of quadratic time takes minutes
    assert text + decoder.rest() == tokenizer_of(kind).decode(tokens, skip_special_tokens=True)
