"""Differences of forged servers: near ties, rounding under load, streams, refusals and true differences."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from specdec_kernels.exactness import BATCH, DIFFERENCE, NEAR_TIE, STREAM, Endpoint, Side
from specdec_kernels.exactness.answers import Answer, Choice, Malformed, StreamParser, Token, compare, parse_whole
from specdec_kernels.exactness.cases import BOTH, COMPLETIONS, FEATURES, KINDS, Limits, make_case
from specdec_kernels.exactness.client import Failed, Refused
from specdec_kernels.exactness.judge import Finding, Judge, Suspect, mismatches_of
from specdec_kernels.exactness.questions import Question, attempt
from specdec_kernels.exactness.shrink import reproduce, shrunk
from specdec_kernels.exactness.sides import logit_step, probe

LIMITS = Limits(256, 16, dict.fromkeys(KINDS, 2.0), 1500)
LIMIT = 1e-3
Body = dict[str, Any]
Reply = Callable[[Body], list[str]]


class Forged(Side):
    """A server whose tokens a function of the body gives; a token of one animal is nearly as likely as of another."""

    def __init__(self, reply: Reply, margin: float = 1.0, dialect: str = "specdec") -> None:
        super().__init__(Endpoint("http://forged"), "forged", dialect)
        object.__setattr__(self, "reply", reply)
        object.__setattr__(self, "margin", margin)

    def ask(
        self, path: str, body: Body, *, stream: bool = False, leaves_after: Any = None, depth: Any = None
    ) -> Answer:
        tokens = self.reply(body | {"stream": stream})  # type: ignore[attr-defined]
        other = {" cat": " dog", " dog": " cat"}
        scored = [
            Token(text, -0.1, {text: -0.1, other.get(text, "x"): -0.1 - self.margin})  # type: ignore[attr-defined]
            for text in tokens
        ]
        return Answer([Choice("".join(tokens), finish_reason="length", tokens=scored if "logprobs" in body else [])])

    def token_id(self, text: str) -> int | None:
        return {" cat": 1, " dog": 2}.get(text)


def judged(ours: Side, theirs: Side, **body: Any) -> Finding:
    question = Question(COMPLETIONS, {"prompt": "a b", "max_tokens": 8, "temperature": 0, "seed": 1} | body)
    outcomes = attempt(lambda: question.to_ours(ours)), attempt(lambda: question.to_theirs(theirs))
    answers = [None if isinstance(one, Exception) else one for one in outcomes]
    case = make_case(1, 0, LIMITS, {*BOTH})
    suspect = Suspect(case, 0, question, answers[0], answers[1], mismatches_of(*outcomes, LIMIT))
    judge = Judge(ours, theirs, LIMIT, {*FEATURES})
    finding = judge.judge(suspect)
    if finding.kind == DIFFERENCE:
        reproduce(judge, finding)
    return finding


CAT, DOG = ["the", " cat", " sat", " on", " it"], ["the", " dog", " ran", " off", " it"]


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 2}])
@pytest.mark.parametrize("margin, kind", [(5e-4, NEAR_TIE), (0.2, DIFFERENCE)])
def test_greedy_texts_part_at_a_margin(margin: float, kind: str, logprobs: Body) -> None:
    finding = judged(Forged(lambda _: CAT, margin), Forged(lambda _: DOG, margin), **logprobs)
    assert (finding.kind, finding.margin) == (kind, pytest.approx(margin) if kind == NEAR_TIE else None)


def test_a_margin_on_one_side_alone_is_a_difference() -> None:
    """The server is sure of its token, so its logits differ from the reference's."""
    assert judged(Forged(lambda _: CAT, 0.5), Forged(lambda _: DOG, 5e-4)).kind == DIFFERENCE


@pytest.mark.parametrize("tie, kind", [(2e-4, NEAR_TIE), (10.0, DIFFERENCE)])
@pytest.mark.parametrize("body", [{"temperature": 0.8}, {"presence_penalty": 0.3}])
def test_a_bias_shows_the_margin_where_log_probabilities_do_not(body: Body, tie: float, kind: str) -> None:
    """The reference says " dog" until " cat" is worth `tie` more."""

    def reply(body: Body) -> list[str]:
        bias = body.get("logit_bias", {})
        return CAT if bias.get("1", 0) - bias.get("2", 0) >= tie else DOG

    finding = judged(Forged(lambda _: CAT, dialect="vllm"), Forged(reply, dialect="vllm"), **body)
    assert finding.kind == kind
    assert finding.kind == DIFFERENCE or (finding.margin is not None and tie <= finding.margin <= LIMIT)


def test_a_reference_that_differs_from_itself_is_rounding_only_at_a_small_margin() -> None:
    def alternating(margin: float) -> Forged:
        replies = iter([DOG, *[CAT] * 100])
        return Forged(lambda _: next(replies), margin)

    assert judged(Forged(lambda _: CAT, 5e-4), alternating(5e-4)).kind == BATCH
    assert judged(Forged(lambda _: CAT, 0.2), alternating(0.2)).kind == DIFFERENCE


@pytest.mark.parametrize("margin, kind", [(5e-4, NEAR_TIE), (0.2, DIFFERENCE)])
def test_a_text_that_the_reference_leaves_earlier_is_continued_from_the_words_in_common(
    margin: float, kind: str
) -> None:
    """The reference under load says that the dog ran, and alone something else."""
    first = iter([DOG])

    def reply(body: Body) -> list[str]:
        return DOG[1:] if body["prompt"] == "a bthe" else next(first, ["one", " bird"])

    ours = Forged(lambda body: CAT[1:] if body["prompt"] == "a bthe" else CAT, margin)
    assert judged(ours, Forged(reply, margin)).kind == kind


def test_streams_that_differ_from_whole_answers_on_both_sides_have_their_own_kind() -> None:
    def reply(body: Body) -> list[str]:
        return ["the", "cat"] if body["stream"] else ["the", " cat"]

    question = Question(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "temperature": 0, "seed": 1}, stream=True)
    ours, theirs = Forged(reply), Forged(reply)
    outcomes = question.to_ours(ours), question.to_theirs(theirs)
    suspect = Suspect(make_case(1, 0, LIMITS, {*BOTH}), 0, question, *outcomes, compare(*outcomes, LIMIT))
    assert Judge(ours, theirs, LIMIT, set()).judge(suspect).kind == STREAM


def test_refusals_and_failures_of_one_side_are_differences() -> None:
    def refuse(_: Body) -> list[str]:
        raise Refused(400, "no")

    def fail(_: Body) -> list[str]:
        raise Failed("status 500: gone")

    for reply, field in ((refuse, "refusal"), (fail, "error")):
        finding = judged(Forged(reply), Forged(lambda _: CAT))
        assert (finding.kind, finding.suspect.mismatches[0].field) == (DIFFERENCE, field)
        assert finding.reproduces == "alone"


def test_probe_lists_features_that_both_or_one_refuse() -> None:
    def without(name: str) -> Reply:
        def reply(body: Body) -> list[str]:
            if name in body:
                raise Refused(400, f"{name} is not supported")
            return CAT

        return reply

    found = probe(Forged(without("n")), Forged(lambda _: CAT), LIMITS, ["n", "stop", "draft depth"])
    assert found.one_sided == [("n", "server", "400: n is not supported")]
    assert {"stop", "draft depth"} <= found.usable and "n" not in found.usable
    found = probe(Forged(without("n"), dialect="vllm"), Forged(without("n")), LIMITS, ["n", "stop", "draft depth"])
    assert found.skipped == {
        "n": "400: n is not supported",
        "draft depth": "the server has no switch for each request",
    }


def test_smallest_request_keeps_only_what_matters() -> None:
    body = {"prompt": "one two three", "max_tokens": 16, "temperature": 0.8, "seed": 1, "stop": ["x"], "n": 2}
    question = Question(COMPLETIONS, body, stream=True, leaves_after=2, depth=4)
    found = shrunk(question, lambda one: "w" in one.body["prompt"] and one.body["max_tokens"] >= 3)
    assert found == Question(COMPLETIONS, {"prompt": "w", "max_tokens": 3, "temperature": 0, "seed": 1})


@pytest.mark.parametrize("step", [2.0**-5, 2.0**-8, None])
def test_step_of_logits_shows_in_distances_of_log_probabilities(step: float | None) -> None:
    rng = random.Random(1)
    logits = [[rng.uniform(0, 8) for _ in range(5)] for _ in range(40)]
    if step is not None:
        logits = [[round(one / step) * step for one in row] for row in logits]
    tokens = [Token("a", -1.0, {str(i): one - 9.3172 for i, one in enumerate(row)}) for row in logits]
    assert logit_step([answer(tokens=tokens)]) == step


# --- answers


def answer(text: str = "a b", reason: str = "stop", usage: tuple[int, int] = (3, 2), **choice: Any) -> Answer:
    return Answer([Choice(text, finish_reason=reason, **choice)], usage)


@pytest.mark.parametrize(
    "other, fields",
    [
        (answer(), []),
        (answer("a c", "length", (3, 9)), ["text"]),
        (answer(reason="length"), ["finish_reason"]),
        (answer(usage=(3, 3)), ["usage"]),
        (answer(calls=[("draw", '{"width": 3}')]), ["tool_calls"]),
        (answer(reasoning="hm"), ["reasoning"]),
        (Answer([]), ["choices"]),
        (Answer([Choice("a")], is_partial=True), []),
        (Answer([Choice("b")], is_partial=True), ["text"]),
    ],
)
def test_compare_names_the_field_that_differs(other: Answer, fields: list[str]) -> None:
    assert [one.field for one in compare(other, answer(), LIMIT)] == fields


@pytest.mark.parametrize(
    "token, field",
    [
        (Token("a", -1.0005, {"a": -1.0005, "c": -3.0}), None),
        (Token("a", -1.01, {"a": -1.0, "b": -2.0}), "logprobs"),
        (Token("a", -1.0, {"a": -1.0, "b": -2.01}), "top_logprobs"),
        (Token("a", -1.0, {"a": -1.0, "c": -1.9}), "top_logprobs"),
        (Token("a", -1.0, {"a": -1.0, "c": -2.0005}), None),
        (Token("a", None, {"a": -1.0, "b": -2.0}), "logprobs"),
    ],
)
def test_compare_takes_log_probabilities_within_the_tolerance(token: Token, field: str | None) -> None:
    """Alternatives that only one side lists are as unlikely as the other's last."""
    last = {"a": -1.0, "b": -2.0} if token.top.get("c") != -3.0 else {"a": -1.0}
    found = compare(answer(tokens=[token]), answer(tokens=[Token("a", -1.0, last)]), LIMIT)
    assert [one.field for one in found] == ([] if field is None else [field])


def test_first_tokens_of_prompts_have_no_log_probability_on_either_side() -> None:
    assert compare(answer(tokens=[Token("a", None, {})]), answer(tokens=[Token("a", None, {})]), LIMIT) == []


def test_stream_joins_to_the_whole_answer() -> None:
    def chunk(delta: Body, reason: str | None = None) -> str:
        import json

        return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    call = {"index": 0, "id": "1", "function": {"name": "draw", "arguments": '{"w'}}
    parser = StreamParser()
    for data in (
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "so "}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]}, "tool_calls"),
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}',
        "[DONE]",
    ):
        parser.push(data)
    message = {"content": "so ", "tool_calls": [{"id": "2", "function": {"name": "draw", "arguments": '{"w":1}'}}]}
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }
    assert parser.finish() == parse_whole(whole)


def test_stream_without_its_end_is_malformed() -> None:
    parser = StreamParser()
    parser.push('{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}')
    with pytest.raises(Malformed, match=r"the stream ends without \[DONE\]"):
        parser.finish()
    with pytest.raises(Malformed, match="text comes after the finish reason"):
        parser.push('{"choices": [{"index": 0, "text": "b", "finish_reason": null}]}')


def test_choices_that_have_not_begun_are_empty_in_a_partial_answer() -> None:
    parser = StreamParser()
    parser.push('{"choices": [{"index": 1, "text": "b", "finish_reason": null}]}')
    both = Answer([Choice("a", finish_reason="stop"), Choice("bc", finish_reason="stop")])
    assert [choice.text for choice in parser.partial().choices] == ["", "b"]
    assert not compare(parser.partial(), both, LIMIT)


# --- requests


def test_a_request_depends_on_its_seed_and_index_only() -> None:
    every = {*FEATURES, *BOTH}
    some = [make_case(3, index, LIMITS, every) for index in range(300)]
    assert some[7] == make_case(3, 7, LIMITS, every) and some[7] != make_case(4, 7, LIMITS, every)
    assert {name for case in some for name in case.features} == {*FEATURES, "chat", "completion"}
    assert len({case.body["seed"] for case in some}) == len(some)
    without = make_case(3, 7, LIMITS, every - {"seeded", "stream"})
    assert without.body["max_tokens"] == some[7].body["max_tokens"] and without.path == some[7].path
