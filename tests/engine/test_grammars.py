"""Texts under a JSON schema, a pattern or a grammar: always complete and valid, and the same with any draft or none."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedTokenizerFast

from specdec_kernels import FinishReason
from specdec_kernels.engine import (
    AsyncEngine,
    Draft,
    Eagle3,
    Engine,
    GenerationError,
    Ngram,
    SamplingParams,
)
from specdec_kernels.engine.device.round import Round
from specdec_kernels.engine.grammars import LlguidanceMatcher, StopTokens, Vocabulary, grammar_of_schema
from specdec_kernels.models.backends.module_copy import cache_name
from specdec_kernels.reference import verify as reference
from support import packaged_drafts
from support.exhaustive import exhaustive, thinned
from support.packaged_drafts import HEAD, TARGET
from support.tiny_checkpoint import held_out, reference_model, tokenizer

xgrammar = pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

MAX_LEN, NEW_TOKENS = 256, 200
DRAFTS = packaged_drafts.DRAFTS | {"drawn": lambda: Eagle3(HEAD, num_steps=3, topk=1, sampled=True)}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), (0|[1-9][0-9]?)%"
EBNF = 'root ::= "def " [a-z]+ "(" ")" ":" " pass"'
KINDS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA), "temperature": 1.0},
    {"max_new_tokens": 60},
    {"regex": PATTERN, "temperature": 0.9},
    {"grammar": EBNF, "temperature": 0.8, "top_k": 40},
    {"json_schema": SCHEMA, "temperature": 0.7, "frequency_penalty": 0.3, "top_p": 0.9},
]


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt[:40] for prompt in held_out("code")[: len(KINDS) + 3]]


def params(**more: Any) -> list[SamplingParams]:
    most = {"max_new_tokens": NEW_TOKENS}
    return [SamplingParams(seed=5 + i, **(most | KINDS[i % len(KINDS)] | more)) for i in range(len(prompts()))]


def make_engine(name: str, device: torch.device | str = "cpu", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_len": MAX_LEN, "num_slots": 4, "page_size": 4, "dtype": torch.float32}
    return Engine(TARGET, draft=DRAFTS[name](), adaptive=False, grammars=True, device=device, **(defaults | options))


def fits(text: str, sampling: SamplingParams) -> bool:
    kind, _ = sampling.constraint
    if kind == "json_schema":
        value = json.loads(text)
        return (
            set(value) == {"name", "tags", "size"}
            and re.fullmatch("[a-z]{1,8}", value["name"]) is not None
            and set(value["tags"]) <= {"red", "green", "blue"}
            and 0 <= value["size"] <= 999
        )
    return kind == "" or re.fullmatch(PATTERN if kind == "regex" else r"def [a-z]+\(\): pass", text) is not None


@functools.cache
def compiler() -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=reference_model().config.vocab_size)
    return xgrammar.GrammarCompiler(info)


def by_hand(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Token by token, with a matcher and a mask of its own."""
    eos, vocab = tokenizer().eos_token_id, reference_model().config.vocab_size
    kind, source = sampling.constraint
    matcher = None
    if kind:
        options = {"max_whitespace_cnt": 16} if kind == "json_schema" else {}
        matcher = xgrammar.GrammarMatcher(getattr(compiler(), f"compile_{kind}")(source, **options))
    generated: list[int] = []
    rows, cache = prompt, DynamicCache()
    while len(generated) < sampling.max_new_tokens and eos not in generated:
        with torch.inference_mode():
            x = reference_model()(torch.tensor([rows]), **{cache_name(reference_model()): cache}).logits[0, -1]
        x = x.double().clone()
        for token in set(generated):
            x[token] -= sampling.frequency_penalty * generated.count(token)
        if matcher is not None:
            mask = xgrammar.allocate_token_bitmask(1, vocab)
            matcher.fill_next_token_bitmask(mask)
            ids = torch.arange(vocab)
            x[(mask[0].long()[ids // 32] >> ids % 32 & 1) == 0] = -torch.inf
        if sampling.temperature == 0:
            token = int(x.argmax())
        else:
            p = reference.filtered(x, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            token = reference.drawn(p, reference.uniform(sampling.seed, len(prompt) + len(generated)))
        assert matcher is None or matcher.accept_token(token)
        generated.append(token)
        rows = [token]
    return generated


@functools.cache
def wanted() -> list[list[int]]:
    return [by_hand(prompt, one) for prompt, one in zip(prompts(), params(), strict=True)]


def check_texts(outputs: list[Any], each: list[SamplingParams]) -> None:
    for output, sampling in zip(outputs, each, strict=True):
        if sampling.constraint[0]:
            assert output.finish_reason == FinishReason.STOP, output.text
        if output.finish_reason == FinishReason.STOP:
            assert fits(output.text, sampling), output.text


# The default run finds trees in the union, and in the tests by budget levels and of retraction.
@pytest.mark.parametrize(
    "name", thinned([name for name in DRAFTS if name != "drawn"], ("none", "eagle3+ngram", "standalone").__contains__)
)
def test_text_is_the_targets_under_the_grammar(name: str, device: torch.device) -> None:
    outputs = make_engine(name, device).generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()
    check_texts(outputs, params())


# At temperature 0 the test above checks the texts of all drafts but the drawn one.
IN_DEFAULT_RUN = {("eagle3+ngram", 1.0), ("drawn", 1.0)}


@pytest.mark.parametrize(
    ("name", "temperature"), thinned(itertools.product(DRAFTS, [0.0, 1.0]), IN_DEFAULT_RUN.__contains__)
)
def test_grammar_accepts_every_text(name: str, temperature: float, device: torch.device) -> None:
    """Also where drafts are drawn, whose text is another with each draft."""
    each = params(temperature=temperature)
    check_texts(make_engine(name, device, num_slots=3).generate(prompts(), each), each)


# Whose texts end within 900 tokens, whatever whitespace they have.
WORD = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    SCHEMA,
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 5},
    {
        "type": "object",
        "properties": {
            "point": {"$ref": "#/$defs/point"},
            "label": {"anyOf": [WORD, {"type": "null"}]},
            "seen": {"type": "boolean"},
        },
        "required": ["point", "label"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"enum": [0, 0.5, 1]}, "y": {"const": "up"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {"anyOf": [{"type": "array", "items": WORD, "maxItems": 3}, {"const": {"none": None}}, {"type": "boolean"}]},
    {"type": "object", "properties": {'ä "b"': WORD}, "required": ['ä "b"'], "additionalProperties": False},
]
KINDS_OF = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
TEXTS = 1000 if "SPECDEC_SOAK" in os.environ else 55  # each schema at each temperature


def holds(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is as a schema of the keywords above says."""
    if "$ref" in schema:
        return holds(value, SCHEMAS[2]["$defs"]["point"])
    if "anyOf" in schema:
        return any(holds(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if type(value) is not KINDS_OF[schema["type"]]:
        return False
    if isinstance(value, dict):
        properties = schema["properties"]
        whole = {*schema["required"]} <= {*value} <= {*properties}
        return whole and all(holds(one, properties[name]) for name, one in value.items())
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return fits and all(holds(one, schema["items"]) for one in value)
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 8) and ("pattern" not in schema or value.islower())
    return type(value) is not int or schema["minimum"] <= value <= schema["maximum"]


@pytest.mark.soak
def test_grammar_json_texts_parse(device: torch.device) -> None:
    """Every one of a thousand, at temperatures from 0 to 1."""
    texts = [prompt[:30] for prompt in held_out("code")]
    each = [
        SamplingParams(900, json_schema=SCHEMAS[i % len(SCHEMAS)], temperature=i % 11 / 10, seed=i)
        for i in range(TEXTS)
    ]
    engine = make_engine("eagle3+ngram", device, num_slots=8, max_len=1024)
    outputs = engine.generate([texts[i % len(texts)] for i in range(TEXTS)], each)
    for i, output in enumerate(outputs):
        assert output.finish_reason == FinishReason.STOP and holds(
            json.loads(output.text), SCHEMAS[i % len(SCHEMAS)]
        ), output.text
    assert len({output.text for output in outputs}) > TEXTS / 4


@pytest.mark.parametrize("name", ["eagle3-tree", *exhaustive("ngram")])
def test_grammar_by_budget_levels(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(Round, "_goes_by_depth", lambda *_: True)
    outputs = make_engine(name, device).generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()


@pytest.mark.parametrize("name", [*exhaustive("none"), "eagle3-tree"])
def test_grammar_survives_retraction(name: str, device: torch.device) -> None:
    engine = make_engine(name, device, num_pages=-(-(MAX_LEN + 80) // 4))
    outputs = engine.generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()
    assert engine.stats().retractions > 0


@pytest.mark.parametrize("in_flight", [2, *exhaustive(3)])
def test_grammar_with_rounds_in_flight(in_flight: int, device: torch.device) -> None:
    engine = make_engine("eagle3-tree", device, rounds_in_flight=in_flight, num_slots=2)  # which are used again
    outputs = engine.generate(prompts(), params())
    assert [output.tokens for output in outputs] == wanted()


def test_cancelled_requests_leave_nothing(device: torch.device) -> None:
    engine = make_engine("eagle3-tree", device)
    engine.generate(prompts(), params(), on_tokens=lambda new: True)
    outputs = engine.generate(prompts()[:4], params()[:4])
    assert [output.tokens for output in outputs] == wanted()[:4]


def test_engine_with_grammars_keeps_plain_texts(device: torch.device) -> None:
    each = [SamplingParams(24, temperature=0.8, seed=i) for i in range(4)]
    with_grammars = make_engine("eagle3-tree", device).generate(prompts()[:4], each)
    without = Engine(
        TARGET, draft=DRAFTS["eagle3-tree"](), adaptive=False, max_len=MAX_LEN, dtype=torch.float32, device=device
    ).generate(prompts()[:4], each)
    assert [output.tokens for output in with_grammars] == [output.tokens for output in without]


def test_grammar_text_cut_by_max_new_tokens(device: torch.device) -> None:
    (output,) = make_engine("eagle3-tree", device).generate(prompts()[:1], SamplingParams(4, json_schema=SCHEMA))
    assert output.finish_reason == FinishReason.LENGTH and output.tokens == wanted()[0][:4]


@pytest.mark.parametrize("constraint", [{"regex": "[a-z]{5}"}, {"grammar": "root ::= [a-z] [a-z] [a-z]"}])
def test_stop_tokens_beyond_the_vocabulary_never_come(constraint: dict[str, Any]) -> None:
    with make_engine("none") as engine:
        stops, vocab = [tokenizer().eos_token_id], reference_model().config.vocab_size
        texts = [
            engine.generate(prompts()[:1], SamplingParams(12, stop_token_ids=each, **constraint))[0].tokens
            for each in (stops, [*stops, vocab, 10**9])
        ]
        with pytest.raises(ValueError, match="is given, expected a stop token with it, which ends the text"):
            engine.generate(prompts()[:1], SamplingParams(12, stop_token_ids=[10**9], **constraint))
    assert texts[0] == texts[1] and texts[0][-1] == stops[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "SamplingParams: regex is given, expected none with json_schema"),
        ({"regex": "a", "constrain_after": [-1]}, "SamplingParams: constrain_after has -1, expected 0 to 2147483647"),
        ({"constrain_after": [1]}, "SamplingParams: constrain_after is [1], expected none without a constraint"),
        ({"regex": "a", "constrain_unless": 2}, "SamplingParams: constrain_unless is 2, expected none without constrain_after"),
        ({"regex": "a", "constrain_after": [1], "constrain_unless": True}, "SamplingParams: constrain_unless is True, expected 0 to 2147483647, or None"),
        ({"grammar": "root ::= 1", "min_new_tokens": 3}, "SamplingParams: min_new_tokens is 3, expected 0 with grammar"),
    ],
)  # fmt: skip
def test_grammar_error_messages(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "(a"}, "SamplingParams: regex does not compile: missing ), unterminated subpattern at position 0"),
        ({"regex": "(?=a)a"}, "SamplingParams: regex has a lookahead or lookbehind, expected none (no grammar holds to it)"),
        ({"grammar": 'root ::= "a" (= "b")'}, "SamplingParams: grammar has a lookahead (= ), expected none (no grammar holds to it)"),
        ({"json_schema": {"type": "integer", "const": "a"}}, "SamplingParams: json_schema does not compile: Unsatisfiable schema: "),
        ({"grammar": "root ::= x"}, "SamplingParams: grammar does not compile: EBNF parser error at line 1, column 10: "),
        ({"json_schema": '{"type": 5'}, "SamplingParams: json_schema does not compile: "),
        ({"json_schema": {"type": "nope"}}, 'SamplingParams: json_schema has type "nope" at #, expected one of null, '),
        ({"regex": "a", "ignore_eos": True}, "SamplingParams: regex is given, expected a stop token with it, which ends the text"),
    ],
    ids=["regex", "lookahead", "lookahead of a grammar", "unsatisfiable", "grammar", "json", "schema", "no end"],
)  # fmt: skip
def test_grammar_that_does_not_compile_is_refused(given: dict[str, Any], message: str) -> None:
    engine = make_engine("none")
    with pytest.raises(ValueError) as error:
        engine.submit([1, 2], SamplingParams(**given))
    assert str(error.value).startswith(message)
    assert engine.generate([[1, 2]], SamplingParams(2))[0].tokens  # nothing has started


def test_engine_without_grammars_refuses_grammar() -> None:
    with Engine(TARGET, max_len=MAX_LEN, device="cpu") as engine, pytest.raises(ValueError) as error:
        engine.submit([1, 2], SamplingParams(json_schema=SCHEMA))
    assert str(error.value) == "SamplingParams: json_schema is given, expected none without Engine(grammars=True)"


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_grammar_without_a_backend_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, backend, None)
    with pytest.raises(ValueError) as error:
        make_engine("none").submit([1, 2], SamplingParams(regex="a"))
    assert str(error.value) == (
        f'SamplingParams: regex is given, expected none without {backend} (pip install "specdec-kernels[grammar]")'
    )


def test_mask_after_rejected_tokens_is_that_of_the_text() -> None:
    """A rejected value, then a second name after as many lexemes: llguidance would give that the mask of the value."""
    many = [b'":', b'"}']  # end a name, and a value
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), *many, b""], 258)
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    fresh = vocabulary.compiled(grammar_of_schema(json.dumps(schema)))
    matcher = LlguidanceMatcher(fresh, StopTokens([258], 259))

    def allowed_after(text: bytes) -> list[bytes]:
        assert all(map(matcher.accept, text))
        mask = torch.zeros(9, dtype=torch.int32)
        matcher.fill(mask)
        return [token for i, token in enumerate(many) if mask[8] >> i & 1]

    assert allowed_after(b"{") == many  # which begin a name
    assert allowed_after(b' "a": "b') == [b'"}']
    matcher.rollback(8)
    assert allowed_after(b'"a":"b","c') == [b'":']
    matcher.rollback(10)
    assert allowed_after(b' "a": "b') == [b'"}']


def test_grammar_compilation_does_not_block_event_loop(device: torch.device) -> None:
    async def texts() -> list[list[int]]:
        async with AsyncEngine(make_engine("ngram", device)) as engine:
            one = await engine.submit(prompts()[3], params()[3])
            many = await engine.submit_many(prompts()[3:5], params()[3:5])
            return [(await request.result()).tokens for request in (one, *many)]

    assert asyncio.run(texts()) == [wanted()[3], *wanted()[3:5]]


def letters_engine(draft: Draft | None) -> Engine:
    """Return an engine whose vocabulary has the letters a, b and c, and no bytes."""
    vocab = {"a": 0, "b": 1, "c": 2, "</s>": 3} | {f"<{i}>": i for i in range(4, 32)}
    letters = Tokenizer(WordLevel(vocab, unk_token="c"))
    letters.decoder = Fuse()
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1,
        vocab_size=32, max_position_embeddings=128, eos_token_id=3, bos_token_id=None,
    )  # fmt: skip
    return Engine(
        AutoModelForCausalLM.from_config(config),
        draft=draft,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>"),
        adaptive=False,
        grammars=True,
        device="cpu",
        max_len=64,
        num_slots=1,
        dtype=torch.float32,
    )


LETTERS = [0, 1, 0, 1, 0, 1, 2]  # a b a b a b c


@pytest.mark.parametrize(("regex", "tokens"), [("abé", [0, 1]), ("ababé", [0, 1, 0, 1])])
@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=6)], ids=["none", "ngram"])
def test_text_that_no_token_continues_ends_there_with_an_error(
    draft: Draft | None, regex: str, tokens: list[int]
) -> None:
    """The vocabulary lacks bytes that the pattern asks for: same text and error with and without a draft."""
    why = "ended with BAD_LOGITS: no token continues the text under this regex"
    with letters_engine(draft) as engine:
        request = engine.submit(LETTERS, SamplingParams(10, regex=regex, logprobs=True))
        with pytest.raises(GenerationError) as error:
            request.result()
        assert str(error.value) == f"result: request 0 {why}"
        assert request.output.tokens == tokens and request.output.finish_reason == FinishReason.ERROR
        assert request.output.logprobs is not None and len(request.output.logprobs) == len(tokens)
        with pytest.raises(GenerationError) as error:
            engine.generate([LETTERS], SamplingParams(10, regex=regex))
        assert str(error.value) == f"generate: prompts[0] {why}"


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=6)], ids=["none", "ngram"])
def test_text_that_its_budget_ends_before_a_dead_end_has_no_error(draft: Draft | None) -> None:
    with letters_engine(draft) as engine:
        (output,) = engine.generate([LETTERS], SamplingParams(4, regex="ababé"))
    assert output.tokens == [0, 1, 0, 1] and output.finish_reason == FinishReason.LENGTH


THOUGHT, ANSWER = 12, r"yes|no, (0|[1-9][0-9]?)%"


@functools.cache
def thoughts(temperature: float) -> list[tuple[list[int], list[int]]]:
    """Return prompts with what a plain engine writes after them."""
    each = [SamplingParams(THOUGHT, temperature=temperature, seed=i) for i in range(4)]
    outputs = make_engine("none").generate(prompts()[:4], each)
    return [(prompt, output.tokens) for prompt, output in zip(prompts(), outputs, strict=False)]


@pytest.mark.parametrize(("opens", "temperature"), [(False, 0.0), (False, 1.0), (True, 0.0)])
@pytest.mark.parametrize("length", [*exhaustive(1), 2])
def test_grammar_that_begins_in_a_draft_has_the_text_of_plain_decoding(
    length: int, opens: bool, temperature: float
) -> None:
    """The draft gets the whole text, so that its paths lead from the thoughts into the grammar."""
    num_tokens = []
    for prompt, thought in thoughts(temperature):
        begin = thought[-length:]
        first = next(i for i in range(length, THOUGHT + 1) if thought[i - length : i] == begin)
        seed = thoughts(temperature).index((prompt, thought))
        plain = SamplingParams(NEW_TOKENS, regex=ANSWER, constrain_after=begin, temperature=temperature, seed=seed)
        if opens:
            plain = replace(plain, constrain_unless=thought[0])
        (wanted,) = make_engine("none").generate([prompt], plain)
        assert wanted.tokens[:first] == thought[:first] and wanted.finish_reason == FinishReason.STOP
        assert re.fullmatch(ANSWER, tokenizer().decode(wanted.tokens[first:], skip_special_tokens=True))
        (output,) = make_engine("ngram").generate([prompt], replace(plain, prediction=wanted.tokens))
        assert output.tokens == wanted.tokens and output.finish_reason == FinishReason.STOP
        num_tokens.append(len(output.tokens) / output.stats.rounds)
    assert max(num_tokens) > 3  # some rounds accepted several


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=6)], ids=["none", "ngram"])
def test_text_that_reaches_a_dead_end_after_its_thoughts_ends_there(draft: Draft | None) -> None:
    with letters_engine(draft) as engine:
        params = SamplingParams(10, regex="abé", constrain_after=[2], logit_bias={2: 50.0})
        with pytest.raises(GenerationError) as error:
            engine.submit(LETTERS, params).result()
    assert str(error.value) == "result: request 0 ended with BAD_LOGITS: no token continues the text under this regex"
    (output,) = error.value.outputs
    assert output is not None and output.tokens == [2, 0, 1]


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=6)], ids=["none", "ngram"])
def test_text_that_does_not_open_its_thoughts_is_constrained_at_once(draft: Draft | None) -> None:
    """At its start the opening token is allowed beside those of the grammar, and never again."""
    with letters_engine(draft) as engine:
        given: dict[str, Any] = {"regex": "aba", "constrain_after": [2], "constrain_unless": 5}
        (output,) = engine.generate([LETTERS], SamplingParams(9, **given, logit_bias={5: -100.0}))
        assert output.tokens == [0, 1, 0, 3]
        opened = SamplingParams(9, **given, logit_bias={5: 100.0, 2: 90.0, 1: 10.0, 3: 50.0})
        (output,) = engine.generate([LETTERS], opened)
        assert output.tokens == [5] * 9, "free after its opening, and without an end"
        (output,) = engine.generate([LETTERS], replace(opened, logit_bias={5: 80.0, 2: 100.0}, constrain_unless=2))
        assert output.tokens == [2, 0, 1, 0, 3], "one token may open and end them"
        with pytest.raises(ValueError) as error:
            engine.submit(LETTERS, replace(opened, constrain_unless=32))
    assert str(error.value) == ("SamplingParams: constrain_unless is 32, expected 0 to 31 (the model's vocabulary)")


def test_text_does_not_end_before_its_grammar_begins() -> None:
    with letters_engine(None) as engine:
        params = SamplingParams(6, regex="ab", constrain_after=[2], logit_bias={3: 50.0, 2: -50.0})
        (output,) = engine.generate([LETTERS], params)
    assert output.finish_reason == FinishReason.LENGTH and not {2, 3} & set(output.tokens)


def test_grammar_that_no_token_begins_is_refused() -> None:
    with letters_engine(None) as engine:
        with pytest.raises(ValueError) as error:
            engine.submit(LETTERS, SamplingParams(10, regex="é"))
        assert engine.generate([LETTERS], SamplingParams(2))[0].tokens  # nothing has started
    assert str(error.value) == (
        "SamplingParams: regex allows no token of the vocabulary at the start of the text, expected at least one"
    )
