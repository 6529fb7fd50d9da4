"""Places where token ids part: simulated servers whose logits round, greedy and seeded, and defects among them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from specdec_kernels.exactness import DIFFERENCE, NEAR_TIE, Endpoint, Side
from specdec_kernels.exactness.answers import Answer, Choice, Token
from specdec_kernels.exactness.cases import BEGUN, BOTH, CHAT, COMPLETIONS, FEATURES
from specdec_kernels.exactness.client import Refused
from specdec_kernels.exactness.judge import Judge
from specdec_kernels.exactness.places import cause_by_ids, from_prefix, shift_of_draw
from specdec_kernels.exactness.questions import Cause, Question

VOCAB, LENGTH = 12, 10
NOISE, LIMIT = 0.05, 0.1  # margins between logits differ by twice the noise of a logit at most
PROMPT = [1, 2, 3]
Body = dict[str, Any]


class Simulated(Side):
    """A server whose logits depend on the tokens before, with noise of its own; a chat allows even places odd tokens."""

    def __init__(self, noise: int, noise_size: float = NOISE, seed_shift: int = 0, wrong_at: int | None = None) -> None:
        super().__init__(Endpoint("http://simulated"), "simulated", "specdec", gives_ids=True)
        for name, value in {"noise": noise, "size": noise_size, "shift": seed_shift, "wrong_at": wrong_at}.items():
            object.__setattr__(self, name, value)

    def ask(self, path: str, body: Body, **_: Any) -> Answer:
        prompt = list(body["prompt"]) if path == COMPLETIONS else [*PROMPT, body["seed"] // 10 % 60]
        choices = []
        for sample in range(body.get("n", 1)):
            tokens: list[int] = list(body.get(BEGUN, ()))
            if path == CHAT and any((token + place) % 2 == 0 for place, token in enumerate(tokens)):
                raise Refused(400, f"{BEGUN} has a token that is not allowed")
            scored = []
            while len(tokens) < body["max_tokens"]:
                token, logprobs = self.choose(path, body, prompt, tokens, sample)
                scored.append(
                    Token(f"token_id:{token}", logprobs[token], {f"token_id:{t}": v for t, v in logprobs.items()})
                )
                tokens.append(token)
            text = "".join(chr(97 + token) for token in tokens)
            choices.append(Choice(text, "", [], "length", None, scored if "logprobs" in body else [], prompt, tokens))
        return Answer(choices)

    def choose(
        self, path: str, body: Body, prompt: list[int], tokens: list[int], sample: int
    ) -> tuple[int, dict[int, float]]:
        key, exact = [*prompt, *tokens], random.Random(str([*prompt, *tokens]))
        rounding = random.Random(f"{self.noise} {key}")  # type: ignore[attr-defined]
        logits = {}
        for token in range(VOCAB):
            value = exact.gauss(0, 1.5) + rounding.uniform(-1, 1) * self.size  # type: ignore[attr-defined]
            value += body.get("logit_bias", {}).get(str(token), 0.0)
            value -= body.get("presence_penalty", 0.0) * (token in tokens)
            if path == COMPLETIONS or (token + len(tokens)) % 2:
                logits[token] = value
        if len(key) == self.wrong_at:  # type: ignore[attr-defined]
            logits[max(logits)] += 3.0
        total = math.log(sum(map(math.exp, logits.values())))
        logprobs = {token: value - total for token, value in logits.items()}
        temperature = body["temperature"]
        if not temperature:
            return max(logits, key=lambda token: logits[token]), logprobs
        weights = {token: math.exp(value / temperature) for token, value in logits.items()}
        seed = body["seed"] + sample + self.shift  # type: ignore[attr-defined]
        place = random.Random(f"{seed} {len(key)}").random() * sum(weights.values())
        for token, weight in weights.items():
            place -= weight
            if place < 0:
                return token, logprobs
        return max(weights), logprobs


def causes(
    ours: Simulated, theirs: Simulated, count: int = 30, path: str = COMPLETIONS, knows: str = BEGUN, **fields: Any
) -> list[Cause]:
    """Return why answers differ, of requests with other seeds."""
    found = []
    judge = Judge(ours, theirs, LIMIT, {*FEATURES, *BOTH, knows})
    for seed in range(0, 10 * count, 10):
        given: Body = (
            {"prompt": [*PROMPT, seed // 10 % 60]} if path == COMPLETIONS else {"messages": [], "response_format": {}}
        )
        question = Question(path, {"max_tokens": LENGTH, "seed": seed, "temperature": 0, **given, **fields})
        a, b = question.to_ours(ours), question.to_theirs(theirs)
        for index, (one, other) in enumerate(zip(a.choices, b.choices, strict=True)):
            if one.token_ids != other.token_ids:
                cause = cause_by_ids(judge, question, one, other, index)
                assert cause is not None
                found.append(cause)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "n": 2},
        {"temperature": 1.0, "presence_penalty": 0.7, "logit_bias": {"4": 1.0}},
        {"presence_penalty": 0.7},
    ],
)
@pytest.mark.parametrize("knows", [BEGUN, "no more"])
def test_rounding_explains_all_differences_of_servers_that_round(fields: Body, knows: str) -> None:
    found = causes(Simulated(1), Simulated(2), knows=knows, **fields)
    assert len(found) >= 3 and all(cause.kind == NEAR_TIE for cause in found), found
    assert max(cause.margin or 0.0 for cause in found) <= LIMIT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_texts_are_led_to_the_place_where_they_part(temperature: float) -> None:
    found = causes(Simulated(1), Simulated(2), count=60, path=CHAT, knows="no more", temperature=temperature)
    assert len(found) >= 3 and all(cause.kind == NEAR_TIE for cause in found), found


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"presence_penalty": 0.7, "repetition_penalty": 1.2}])
def test_long_constrained_texts_are_asked_for_at_the_place_where_they_part(fields: Body) -> None:
    found = causes(Simulated(1, 0.025), Simulated(2, 0.025), 60, CHAT, max_tokens=40, **fields)
    assert len(found) >= 10 and all(cause.kind == NEAR_TIE for cause in found), found


def test_a_text_that_the_reference_refuses_to_go_on_from_is_a_difference() -> None:
    class Refusing(Simulated):
        def ask(self, path: str, body: Body, **fields: Any) -> Answer:
            if len(body.get(BEGUN, ())) > 0 and body["max_tokens"] > len(body[BEGUN]) + 1:
                raise Refused(400, "no")
            return super().ask(path, body, **fields)

    found = causes(Simulated(1), Refusing(2), path=CHAT, temperature=1.0)
    kinds = {cause.evidence.split(" tokens ")[-1] for cause in found if cause.kind == DIFFERENCE}
    assert found and kinds == {"of the server's text: 400: no"}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_logit_of_the_server_is_a_difference(path: str, temperature: float) -> None:
    """Rounding of the size that is measured explains none of what it changes at once."""
    found = causes(Simulated(1, 0.0, wrong_at=5), Simulated(2, 0.0), path=path, temperature=temperature, count=20)
    wrong = [cause for cause in found if cause.kind == DIFFERENCE]
    assert len(found) >= 5 and len(wrong) >= 0.8 * len(found)


def test_a_text_of_another_seed_is_a_difference() -> None:
    """A draw of another seed may be next to the right one by chance; those after it are not."""
    found = causes(Simulated(1, seed_shift=1), Simulated(2), temperature=1.0)
    assert len(found) == 30 and {cause.kind for cause in found} == {DIFFERENCE}


def test_the_same_tokens_with_another_text_and_texts_that_end_are_differences() -> None:
    judge, question = Judge(Simulated(1), Simulated(1), LIMIT, {*BOTH}), Question(COMPLETIONS, {"temperature": 0})
    whole = Choice("abc", prompt_ids=PROMPT, token_ids=[0, 1, 2])
    other = cause_by_ids(judge, question, Choice("abQ", prompt_ids=PROMPT, token_ids=[0, 1, 2]), whole, 0)
    ended = cause_by_ids(judge, question, Choice("ab", prompt_ids=PROMPT, token_ids=[0, 1]), whole, 0)
    assert other == Cause(DIFFERENCE, "the same tokens are answered otherwise", is_rounding=False)
    evidence = "one text ends where the other goes on after the same tokens"
    assert ended == Cause(DIFFERENCE, evidence, is_rounding=False)
    assert cause_by_ids(judge, question, Choice("ab", prompt_ids=[1], token_ids=[0]), whole, 0) is None


def test_a_request_from_the_prefix_is_the_request_with_the_text_so_far() -> None:
    judge = Judge(Simulated(1), Simulated(1), LIMIT, {*BOTH, BEGUN})
    body: Body = {"max_tokens": 8, "temperature": 1.0, "seed": 40, "n": 3, "min_tokens": 6, "stop": ["x"], "regex": "a"}
    given: Body = {"presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"7": 2.0}}
    kept = {"temperature": 1.0, "seed": 42, "stop": ["x"], "regex": "a", **given, BEGUN: [7, 7, 8]}
    for path, prompt in ((CHAT, {"messages": []}), (COMPLETIONS, {"prompt": ["a", "b"], "echo": True})):
        question = Question(path, body | given | prompt | {"logprobs": 2}, stream=True, depth=3)
        for max_tokens, left in ((1, 4), (5, 6)):
            found = from_prefix(judge, question, 5, PROMPT, [7, 7, 8], max_tokens)
            want = kept | {"max_tokens": 3 + max_tokens, "min_tokens": left}
            want |= {"messages": []} if path == CHAT else {"prompt": PROMPT}
            assert found == Question(path, want, depth=3)


def test_a_request_from_the_prefix_has_its_penalties_as_biases() -> None:
    """Where a server does not know how to begin with a text."""
    judge = Judge(Simulated(1), Simulated(1), LIMIT, {*BOTH})
    body = {"max_tokens": 8, "temperature": 1.0, "seed": 40, "n": 3, "min_tokens": 6, "stop": ["x"], "messages": []}
    given = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"7": 2.0, "9": 1.0}}

    def asked(max_tokens: int = 1, **fields: Any) -> Body | None:
        found = from_prefix(judge, Question(CHAT, body | fields), 2, PROMPT, [7, 7, 8], max_tokens)
        return None if found is None else found.body

    plain = {"prompt": [1, 2, 3, 7, 7, 8], "max_tokens": 1, "temperature": 1.0, "seed": 42, "min_tokens": 1}
    assert asked() == plain
    assert asked(**given) == plain | {"logit_bias": {"7": 0.0, "9": 1.0, "8": -1.5}}
    assert asked(repetition_penalty=1.2) == plain | {"repetition_penalty": 1.2}
    assert asked(4, frequency_penalty=0.5) == plain | {
        "max_tokens": 4,
        "min_tokens": 3,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -1.0, "8": -0.5},
    }
    for fields in ({"presence_penalty": 1.0, "repetition_penalty": 1.2}, {"regex": "a"}, {"tool_choice": "required"}):
        assert asked(**fields) is None
    assert asked(4, presence_penalty=1.0) is None


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_no_rounding_moves_a_cumulative_distribution_farther_than_the_bound(temperature: float) -> None:
    rng, largest, margin = random.Random(1), 0.0, 0.6
    bound = shift_of_draw(Question(COMPLETIONS, {"temperature": temperature}), margin)
    for _ in range(2000):
        logits = [rng.gauss(0, 1.5) for _ in range(6)]
        moves = [rng.choice([-0.5, 0.5]) * margin for _ in logits]
        tables = [
            [math.exp(v / temperature) for v in row] for row in (logits, map(sum, zip(logits, moves, strict=True)))
        ]
        for end in range(1, 6):
            before, after = (sum(table[:end]) / sum(table) for table in tables)
            largest = max(largest, abs(before - after))
    assert 0.95 * bound < largest <= bound
