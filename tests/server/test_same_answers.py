"""A server's answers are the same bytes with and without speculation, whatever happens to a request.

Every situation runs on a server with each kind of draft (many requests at once, greedy and sampled, streamed and not)
and on a server that drafts nothing, with pages for all. Two answers may differ only from a near-tie on, which is printed
with its margin; roundoff must explain the margin.

SPECDEC_SOAK=20000 pytest -m soak repeats all situations with other prompts and seeds, up to that many requests.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from specdec_kernels.cli.near_tie import difference
from specdec_kernels.engine import AsyncRequest, Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.tiny import tiny_model
from support.devices import on_cuda
from support.exhaustive import thinned
from support.leaks import expect_nothing_lost
from support.server_thread import NAME, Running, serving, wait_for
from support.tiny_checkpoint import NEAR_TIE, held_out, reference_model, tokenizer

xgrammar = pytest.importorskip("xgrammar")

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
DRAFTS: dict[str, Callable[[], Draft]] = {
    "eagle3-tree": lambda: Eagle3(HEAD, num_steps=4, topk=4, num_nodes=16),
    "ngram": lambda: Ngram(num_nodes=8),
    "union": lambda: Union(Eagle3(HEAD, num_steps=3, topk=3, num_nodes=12), Ngram(num_nodes=12), num_nodes=16),
    "standalone": lambda: Standalone(TARGET, num_steps=3, topk=2, num_nodes=8),
}
MAX_LEN, PAGE_SIZE, NUM_SLOTS = 256, 4, 6
SMALL = -(-(MAX_LEN + 64) // PAGE_SIZE)  # pages of one long request
ROOMY = 800
CLIENTS = 8
LOGPROB_NOISE = 1e-3  # roundoff of a log-probability between float32 logits of different shapes
WAVES = max(1, int(os.environ.get("SPECDEC_SOAK", 0)) // 400)  # each has about 100 requests with each draft
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.1, "top_k": 50},
]
SHAPE = {
    "type": "object",
    "properties": {"width": {"type": "integer", "maximum": 999}, "name": {"enum": ["square", "circle", "line"]}},
    "required": ["width", "name"],
    "additionalProperties": False,
}
SHAPES = {"type": "array", "items": SHAPE, "minItems": 1, "maxItems": 2}
DRAW: dict[str, Any] = {"type": "function", "function": {"name": "draw", "parameters": SHAPE}}
TURN: dict[str, Any] = {
    "type": "function",
    "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Ask:
    """A body to send; the client leaves after reading `leaves_at` bytes of the stream."""

    path: str
    body: dict[str, Any]
    leaves_at: int | None = None


@dataclass
class Answer:
    """Message and finish reason of each choice, log-probabilities of its tokens, and usage (prompt, completion)."""

    choices: list[dict[str, Any]]
    logprobs: list[list[float]]
    usage: tuple[int, int] | None


Key = tuple[int, int]  # the seed of a request, which is unique, and the index of its prompt in the body


@dataclass
class Server:
    """A server, and the requests that it received."""

    running: Running
    requests: dict[Key, AsyncRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        server = self.running.app.state.server
        submit = server._submit

        def noted(*arguments: Any) -> list[AsyncRequest]:
            requests: list[AsyncRequest] = submit(*arguments)
            self.requests.update({(one.params.seed or 0, one.output.index): one for one in requests})
            return requests

        server._submit = noted

    def ask(self, asks: Sequence[Ask]) -> list[Answer | None]:
        """Send all at once; return None for clients that left."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.ask_one, asks))

    def ask_one(self, ask: Ask) -> Answer | None:
        with self.running.connection() as connection:
            connection.request("POST", ask.path, json.dumps({"model": NAME} | ask.body))
            response = connection.getresponse()
            if ask.leaves_at is not None:
                response.read1(ask.leaves_at)
                return None
            answer = response.read()
        assert response.status == 200, answer
        return joined(answer) if ask.body.get("stream") else whole(answer)


class Plain(Server):
    """A server that remembers its answers."""

    @functools.cached_property
    def known(self) -> dict[str, Answer | None]:
        return {}

    def ask_one(self, ask: Ask) -> Answer | None:
        key = json.dumps(ask.body)
        if key not in self.known:
            self.known[key] = super().ask_one(ask)
        return self.known[key]


def whole(answer: bytes) -> Answer:
    value = json.loads(answer)
    choices = value["choices"]
    messages = [choice.get("message") or {"content": choice["text"]} for choice in choices]
    each = [scored(choice) for choice in choices]
    return made_of(messages, [choice["finish_reason"] for choice in choices], each, value["usage"])


def joined(answer: bytes) -> Answer:
    """Return a stream's deltas as one whole answer."""
    messages: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str | None] = {}
    scores: dict[int, list[tuple[str, float]]] = {}
    usage = None
    *events, done = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
    assert done == "[DONE]"
    for event in map(json.loads, events):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            assert reasons.get(index) is None, "nothing comes after the end"
            reasons[index] = choice["finish_reason"]
            message = messages.setdefault(index, {"content": ""})
            delta = choice.get("delta") or {"content": choice.get("text")}
            message["content"] += delta.get("content") or ""
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
            scores.setdefault(index, []).extend(scored(choice))
    order = sorted(messages)
    return made_of([messages[i] for i in order], [reasons[i] for i in order], [scores[i] for i in order], usage)


def scored(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Return tokens and their log-probabilities, if the answer has them."""
    given = choice.get("logprobs") or {}
    if "content" in given:
        return [(entry["token"], entry["logprob"]) for entry in given["content"]]
    return list(zip(given.get("tokens", []), given.get("token_logprobs", []), strict=True))


def made_of(messages: list[Any], reasons: list[Any], scores: list[Any], usage: dict[str, Any] | None) -> Answer:
    choices = [
        {
            "content": message["content"] or "",
            "calls": [call["function"] for call in message.get("tool_calls") or []],
            "finish_reason": reason,
            "tokens": [token for token, _ in each],
        }
        for message, reason, each in zip(messages, reasons, scores, strict=True)
    ]
    counts = None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
    return Answer(choices, [[logprob for _, logprob in each] for each in scores], counts)


class Masked(nn.Module):
    """The reference model of transformers, with tokens that a request's grammar forbids masked."""

    def __init__(self, sampling: SamplingParams, text: list[int]) -> None:
        super().__init__()
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._sampling, self._text = sampling, text

    def forward(self, tokens: torch.Tensor, logits_to_keep: int) -> Any:
        out = reference_model()(tokens, logits_to_keep=logits_to_keep)
        kind, source = self._sampling.constraint
        if kind:
            options = {"max_whitespace_cnt": 16} if kind == "json_schema" else {}
            matcher = xgrammar.GrammarMatcher(getattr(compiler(), f"compile_{kind}")(source, **options))
            assert all(map(matcher.accept_token, self._text))
            mask = xgrammar.allocate_token_bitmask(1, out.logits.shape[-1])
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(out.logits[:, -1], mask)
        return out


@functools.cache
def compiler() -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=reference_model().config.vocab_size)
    return xgrammar.GrammarCompiler(info)


def margin_between(a: AsyncRequest, b: AsyncRequest) -> float:
    """Return how close the two tokens are where two texts of one request first differ."""
    ours, theirs = a.output.tokens, b.output.tokens
    same = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    parted = difference(Masked(a.params, ours[:same]), a.output.prompt_tokens, (ours, theirs), a.params)
    assert parted is not None
    return parted.margin


@dataclass
class Pair:
    """A speculating server and one that does not speculate; both get the same requests."""

    speculating: Server
    plain: Plain
    num_texts: int = 0
    near_ties: list[str] = field(default_factory=list)

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """Return the answers of clients that stayed; each equals the plain answer, or differs from a near-tie on."""
        answers = self.speculating.ask(asks)
        wanted = self.plain.ask([Ask(ask.path, ask.body | {"stream": False}) for ask in asks])
        for ask, answer, want in zip(asks, answers, wanted, strict=True):
            assert want is not None
            keys = keys_of(ask)
            assert len(want.choices) == len(keys)
            others = 0
            for place, key in enumerate(keys):
                ours, theirs = self.speculating.requests[key], self.plain.requests[key]
                if answer is None:  # the part that it read is a prefix of the text
                    wait_for(ours.done)
                    same = ours.output.tokens == theirs.output.tokens[: len(ours.output.tokens)]
                else:
                    said, want_said = answer.choices[place], want.choices[place]
                    same = json.dumps(said).encode() == json.dumps(want_said).encode()
                    assert not same or ours.output.tokens == theirs.output.tokens
                    if same:
                        assert answer.logprobs[place] == pytest.approx(want.logprobs[place], abs=LOGPROB_NOISE)
                if not same:
                    others += 1
                    self.note(ask, ours, theirs, f"{answer and answer.choices[place]} for {want.choices[place]}")
            if answer is not None and answer.usage is not None and not others:
                assert answer.usage == want.usage
            self.num_texts += len(keys)
        return [answer for answer in answers if answer is not None]

    def note(self, ask: Ask, ours: AsyncRequest, theirs: AsyncRequest, said: str) -> None:
        assert ours.output.tokens != theirs.output.tokens, f"{ask}: {said}, of the same tokens"
        margin = margin_between(ours, theirs)
        what = f"{ask.body}: {ours.output.tokens} for {theirs.output.tokens}, margin {margin:.1e}"
        assert margin <= NEAR_TIE, what
        self.near_ties.append(what)
        print("near-tie:", what)


def keys_of(ask: Ask) -> list[Key]:
    """Return the keys of an answer's choices, in order."""
    prompt, seed = ask.body.get("prompt"), ask.body["seed"]
    count = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 1
    return [(seed + sample, place) for place in range(count) for sample in range(ask.body.get("n", 1))]


# --- situations


@dataclass
class Asker:
    """Builds bodies, each with a seed of its own."""

    rng: random.Random
    seeds: Iterator[int]

    def prompt(self, low: int = 2, high: int = 50) -> list[int]:
        tokens = self.rng.choice(held_out("code") + held_out("repeat"))
        return tokens[: self.rng.randint(low, high)]

    def completion(self, prompt: Any = None, most: int = 24, **more: Any) -> Ask:
        prompt = self.prompt() if prompt is None else prompt
        return Ask(COMPLETIONS, {"prompt": prompt, "max_tokens": most} | self.common() | more)

    def chat(self, messages: Any = None, most: int = 24, **more: Any) -> Ask:
        messages = messages or [{"role": "user", "content": tokenizer().decode(self.prompt())}]
        return Ask(CHAT, {"messages": messages, "max_tokens": most} | self.common() | more)

    def common(self) -> dict[str, Any]:
        seed = next(self.seeds)
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.rng.random() < 0.5 else {}
        return {"seed": seed} | SAMPLINGS[seed // SEEDS_EACH % len(SAMPLINGS)] | stream


SEEDS_EACH = 10  # the samples of a prompt have the seeds after its own


def prefix_hit(pair: Pair, asker: Asker) -> None:
    """Send prompts with a common prefix, then send them again."""
    starts = [prompt[:37] for prompt in held_out("code")[:2]]
    prompts = [[*asker.rng.choice(starts), *asker.prompt(1, 9)] for _ in range(6)]
    pair.ask([asker.completion(prompt) for prompt in prompts])
    pair.ask([asker.completion(prompt, most=12) for prompt in prompts])


def multi_turn(pair: Pair, asker: Asker) -> None:
    """Continue from the previous answer in each turn."""
    conversations = [[{"role": "user", "content": tokenizer().decode(asker.prompt(2, 20))}] for _ in range(6)]
    for _ in range(3):
        answers = pair.ask([asker.chat(messages, 16) for messages in conversations])
        for messages, answer in zip(conversations, answers, strict=True):
            messages.append({"role": "assistant", "content": answer.choices[0]["content"]})
            messages.append({"role": "user", "content": tokenizer().decode(asker.prompt(2, 9))})


def preemption(pair: Pair, asker: Asker) -> None:
    """Send more requests than the pages hold, so that some are preempted and resume."""
    prompts = [asker.prompt(20, 60) for _ in range(6)]
    pair.ask(
        [asker.completion(prompts, 50, ignore_eos=True, **kind) for kind in ({"temperature": 0}, {"temperature": 0.9})]
    )


def empty_drafts(pair: Pair, asker: Asker) -> None:
    """Send random tokens, prompts of one or two tokens, and requests that want few drafts or none."""
    vocab = reference_model().config.vocab_size
    prompts = [asker.rng.sample(range(vocab), asker.rng.choice([1, 2, 9])) for _ in range(8)]
    wishes: list[Any] = ["off", 1, 2, "on"]
    pair.ask([asker.completion(prompt, 16, speculation=wishes[i % 4]) for i, prompt in enumerate(prompts)])
    pair.ask([asker.completion(most=1 + i % 3, speculation=wishes[i % 4]) for i in range(8)])


def tools_and_schemas(pair: Pair, asker: Asker) -> None:
    """Send requests with grammars together with others."""
    schema = {"type": "json_schema", "json_schema": {"name": "shapes", "schema": SHAPES}}
    call = '<tool_call>{"name": "draw", "arguments": {"width": 3}}</tool_call>\n'
    answers = pair.ask(
        [
            asker.chat(most=120, response_format=schema),
            asker.chat(most=120, response_format=schema, frequency_penalty=0.3),
            asker.chat(most=120, response_format=schema),
            asker.chat(most=90, response_format=schema),
            asker.chat(most=90, tools=[DRAW, TURN], tool_choice="required"),
            asker.chat(most=90, tools=[DRAW, TURN], tool_choice={"type": "function", "function": {"name": "draw"}}),
            asker.chat([{"role": "user", "content": call * 4}], 60, tools=[DRAW]),
            asker.chat(most=30, response_format={"type": "json_object"}),
            asker.completion(most=20, regex="(yes|no), (0|[1-9][0-9]?)%"),
            asker.completion(most=30, ebnf='root ::= "def " [a-z]+ "(" ")" ":" " pass"'),
            asker.completion(),
            asker.completion(),
        ]
    )
    said = [answer.choices[0] for answer in answers]
    for answer in said[:4]:
        assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["content"]), list)
    for answer in said[4:6]:
        assert answer["finish_reason"] == "length" or json.loads(answer["calls"][0]["arguments"]) is not None


def greedy_and_sampled(pair: Pair, asker: Asker) -> None:
    """Send every kind of sampling in one batch, with every kind of ending."""
    ends: list[dict[str, Any]] = [{}, {"stop": ["):", "="]}, {"logprobs": 2}, {"ignore_eos": True}, {"min_tokens": 9}]
    pair.ask([asker.completion(**ends[i % 5]) for i in range(12)])


def cancels(pair: Pair, asker: Asker) -> None:
    """Send requests of which some are cancelled."""
    asks = [asker.completion(most=30 + 60 * (i % 2), ignore_eos=True, stream=True) for i in range(12)]
    for i in range(1, 12, 2):
        asks[i].leaves_at = asker.rng.choice([1, 300, 2000])
    pair.ask(asks)


def samples(pair: Pair, asker: Asker) -> None:
    """Send requests for several choices of one prompt and of several prompts."""
    pair.ask(
        [
            asker.chat(most=16, n=3, temperature=1.0, logprobs=True),
            asker.completion(most=16, n=4, temperature=0.8, stop="\n"),
            asker.completion([asker.prompt(), asker.prompt()], 12, n=2, temperature=1.0),
            asker.completion(most=12, n=2, temperature=0),
            asker.completion(),
        ]
    )


def penalties(pair: Pair, asker: Asker) -> None:
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.2, "presence_penalty": -0.3, "frequency_penalty": 0.4},
        {"logit_bias": {"5": 4.0, "40": -100, "13": -2.5}, "frequency_penalty": -0.05},
    ]
    pair.ask(
        [asker.completion(most=32, **kinds[i] if i < 5 else kinds[i % 5]) for i in range(10)] + [asker.completion()]
    )


SITUATIONS: dict[str, Callable[[Pair, Asker], None]] = {
    "prefix hit": prefix_hit,
    "multi-turn": multi_turn,
    "preemption": preemption,
    "empty drafts": empty_drafts,
    "tools and schemas": tools_and_schemas,
    "greedy and sampled": greedy_and_sampled,
    "cancels": cancels,
    "samples": samples,
    "penalties": penalties,
}


# --- servers

AnyServer = TypeVar("AnyServer", bound=Server)


def make_engine(draft: Draft | None, device: torch.device, **options: Any) -> Engine:
    given = {
        "max_len": MAX_LEN,
        "num_slots": NUM_SLOTS,
        "page_size": PAGE_SIZE,
        "num_pages": ROOMY,
        "prefill_chunk": 48,
        "dtype": torch.float32,
        "device": device,
        "adaptive": False,
        "grammars": True,
    } | options
    return Engine(TARGET, draft=draft, **given)


@contextmanager
def running(kind: type[AnyServer], engine: Engine) -> Iterator[AnyServer]:
    with serving(engine, max_queued=100) as running:
        yield kind(running)
        running.wait_until_idle()
        expect_nothing_lost(engine)


@pytest.fixture(scope="module", params=["cpu", *on_cuda("cuda")])
def where(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def plain(where: torch.device) -> Iterator[Plain]:
    with running(Plain, make_engine(None, where)) as server:
        yield server


@pytest.fixture(scope="module", params=thinned(DRAFTS, {"union", "standalone"}.__contains__))
def pair(request: pytest.FixtureRequest, plain: Plain, where: torch.device) -> Iterator[Pair]:
    with running(Server, make_engine(DRAFTS[request.param](), where, prefix_cache=True)) as server:
        yield Pair(server, plain)


def asker(name: str, wave: int = 0) -> Asker:
    """Return an asker with the same bodies for every draft."""
    place = list(SITUATIONS).index(name)
    return Asker(random.Random(f"{name} {wave}"), itertools.count(10**6 * (1 + place + 10 * wave), SEEDS_EACH))


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "preemption"])
def test_server_answers_do_not_depend_on_speculation(name: str, pair: Pair) -> None:
    before, ties = pair.speculating.running.engine.stats(), len(pair.near_ties)
    SITUATIONS[name](pair, asker(name))
    stats = pair.speculating.running.engine.stats() - before
    assert len(pair.near_ties) - ties <= 1
    assert stats.prefix_hits > 0 or name not in ("prefix hit", "multi-turn", "samples")


@pytest.mark.parametrize("draft", thinned(DRAFTS, {"union", "standalone"}.__contains__))
def test_server_answers_do_not_depend_on_preemption(draft: str, plain: Plain, where: torch.device) -> None:
    engine = make_engine(DRAFTS[draft](), where, num_pages=SMALL)
    with running(Server, engine) as server:
        pair = Pair(server, plain)
        preemption(pair, asker("preemption"))
        assert engine.stats().retractions > 0 and len(pair.near_ties) <= 1


@pytest.mark.soak
@pytest.mark.parametrize("draft", DRAFTS if "SPECDEC_SOAK" in os.environ else ("union", "standalone"))
def test_server_answers_of_all_situations_at_once(draft: str, plain: Plain, where: torch.device) -> None:
    """The pool is too small, the prefix cache is on, and the engine chooses the tree size, also 0."""
    engine = make_engine(DRAFTS[draft](), where, num_pages=SMALL, prefix_cache=True, adaptive=True)
    with running(Server, engine) as server, ThreadPoolExecutor(len(SITUATIONS)) as threads:
        pair = Pair(server, plain)
        for wave in range(1, 1 + WAVES):
            for _ in threads.map(lambda name: SITUATIONS[name](pair, asker(name, wave)), SITUATIONS):  # noqa: B023
                pass
        stats = engine.stats()
        assert stats.retractions > 0 and stats.prefix_hits > 0
        assert len(pair.near_ties) <= 1 + pair.num_texts // 100
