"""Grammars of requests: what compiles them, and matchers that follow their texts.

llguidance takes JSON schemas and regular expressions, xgrammar grammars in EBNF (`BACKENDS`). Both see the vocabulary
as bytes, without the special tokens, which no text has.
"""

from __future__ import annotations

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .params import BACKENDS, SamplingParams
from .text.detokenizer import Detokenizer
from .text.json_schemas import held_to
from .text.patterns import Unsupported, canonical
from .text.source_cache import SourceCache

MOST_COMPILED = 128  # grammars of llguidance that are kept
MOST_CONVERTED = 64  # schemas and patterns whose grammars are kept
SOURCE_BYTES = 4 << 20  # of the sources of each of these
CACHE_BYTES = 512 << 20  # of xgrammar's grammars that are kept

MOST_WHITESPACE = 16  # consecutive characters between two parts of a JSON text: some models would never stop
FULL = -1  # a word of a mask that allows all of its tokens
# llguidance would allow but one way to write what is certain to come.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
# In llguidance's errors: places in a grammar that no user has written.
PLACE_OF_ERROR = re.compile(
    r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?|\n +(?:\d+ \||while processing).*|\n<state>.*", re.S
)
LOOKAHEAD = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#.*|(\(=)')  # of EBNF: the only group


class Matcher(ABC):
    """A text under a grammar, token by token."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Append a token, and return whether the grammar allows it there."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens."""

    @abstractmethod
    def fill(self, mask: Tensor) -> None:
        """Write which tokens may come next to the bits of `mask` [ceil(V / 32)] int32: none at a dead end."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether a stop token has ended the text."""


class XgrammarMatcher(Matcher):
    """A matcher of xgrammar."""

    def __init__(self, grammar: Any, stop_tokens: StopTokens) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=sorted(stop_tokens.tokens))

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, mask: Tensor) -> None:
        if not self._matcher.fill_next_token_bitmask(mask[None]):
            mask.fill_(FULL)

    @property
    def has_ended(self) -> bool:
        return bool(self._matcher.is_terminated())


class LlguidanceMatcher(Matcher):
    """A matcher of llguidance, which knows no stop tokens, and is of no more use after a dead end.

    llguidance keeps its last mask, by the lexer's state and the number of lexemes. A rollback does not discard it, so
    other tokens that lead to the same key would get the mask of the tokens that were removed.
    """

    def __init__(self, fresh: Any, stop_tokens: StopTokens) -> None:
        self._fresh, self._stop_tokens = fresh, stop_tokens
        self._matcher = fresh.deep_copy()
        self._tokens: list[int] = []
        self._has_ended = False
        self._keeps_removed = False  # the mask kept may be of tokens that were removed

    def accept(self, token: int) -> bool:
        if token in self._stop_tokens.tokens:
            accepted = self._has_ended = bool(self._matcher.is_accepting())
        else:
            if self._keeps_removed:  # replaced by the mask here, whose key only tokens from here on share
                self._matcher.compute_bitmask()
                self._keeps_removed = False
            accepted = not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1
        if accepted:
            self._tokens.append(token)
        return accepted

    def rollback(self, count: int) -> None:
        if count == 0:
            return
        del self._tokens[-count:]
        count -= self._has_ended
        self._has_ended = False
        if self._matcher.is_error():
            self._matcher = self._fresh.deep_copy()
            self._matcher.consume_tokens(self._tokens)
            self._keeps_removed = False
        else:
            self._matcher.rollback(count)
            self._keeps_removed = True

    def fill(self, mask: Tensor) -> None:
        self._keeps_removed = False
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if self._matcher.is_error():  # no token is allowed, or the text is beyond llguidance's limits
            mask.zero_()
            return
        self._stop_tokens.write(mask, allowed=self._matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        return self._has_ended


class LaterMatcher(Matcher):
    """A matcher of a text whose grammar begins after the first occurrence of some tokens; before it, no text ends.

    Args:
        matcher: of the grammar.
        begin: the tokens.
        opening: the token that a text has to begin with for that; the grammar of others begins at once. None: any.
        stop_tokens: of the request.
        vocab_size: of the masks.
    """

    def __init__(
        self, matcher: Matcher, begin: Sequence[int], opening: int | None, stop_tokens: StopTokens, vocab_size: int
    ) -> None:
        self._matcher, self._begin, self._stop_tokens = matcher, list(begin), stop_tokens
        self._opening = opening
        self._opening_mask = mask_of([] if opening is None else [opening], vocab_size)
        self._tokens: list[int] = []
        self._begun = -1  # tokens up to where the grammar begins; -1: that has not come, or is not known yet

    @property
    def _may_open(self) -> bool:
        return self._opening is not None and not self._tokens

    def accept(self, token: int) -> bool:
        if self._begun >= 0:
            accepted = self._matcher.accept(token)
        elif self._may_open and token != self._opening:
            accepted = self._matcher.accept(token)
            self._begun = 0 if accepted else -1
        else:
            accepted = token not in self._stop_tokens.tokens or token == self._begin[-1]
        if accepted:
            self._tokens.append(token)
            if self._begun < 0 and self._tokens[-len(self._begin) :] == self._begin:
                self._begun = len(self._tokens)
        return accepted

    def rollback(self, count: int) -> None:
        if self._begun >= 0:
            self._matcher.rollback(min(count, len(self._tokens) - self._begun))
        del self._tokens[len(self._tokens) - count :]
        if len(self._tokens) < self._begun or self._may_open:
            self._begun = -1

    def fill(self, mask: Tensor) -> None:
        if self._begun >= 0 or self._may_open:
            self._matcher.fill(mask)
            if self._may_open:
                mask |= self._opening_mask
        else:
            self._stop_tokens.write(mask.fill_(FULL), allowed=False)

    @property
    def has_ended(self) -> bool:
        return self._matcher.has_ended


class StopTokens:
    """The stop tokens of a request as bits of a mask."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, others: Sequence[int] = ()) -> None:
        self.tokens = frozenset(tokens)
        self._bits = mask_of(self.tokens, vocab_size)
        self._cleared = ~mask_of({*tokens, *others}, vocab_size)

    def write(self, mask: Tensor, *, allowed: bool) -> None:
        """Allow the stop tokens in a mask, or none of them."""
        mask &= self._cleared
        if allowed:
            mask |= self._bits


def mask_of(tokens: Collection[int], vocab_size: int) -> Tensor:
    """Return the mask [ceil(V / 32)] int32 that allows these tokens."""
    words = [0] * -(-vocab_size // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)


@dataclass(frozen=True)
class NewMatcher:
    """Makes matchers of a compiled grammar at the start of the text."""

    make: Callable[[], Matcher]
    vocab_size: int

    def __call__(self) -> Matcher:
        return self.make()

    def is_dead_end(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar accepts these tokens as the start of a text, and none after them."""
        matcher = self()
        if not all(map(matcher.accept, tokens)) or matcher.has_ended:
            return False
        mask = torch.empty(-(-self.vocab_size // 32), dtype=torch.int32)
        matcher.fill(mask)
        return not mask.any()


class Grammars:
    """Compiles the grammars of requests; any thread may call it."""

    def __init__(self, tokenizer: Any, no_tokenizer: str, vocab_size: int) -> None:
        self._tokenizer, self._no_tokenizer, self._vocab_size = tokenizer, no_tokenizer, vocab_size
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of, for another process."""
        return Grammars, (self._tokenizer, self._no_tokenizer, self._vocab_size)

    def expect_available(self, kind: str) -> None:
        """Raise ValueError if there is no tokenizer, or a backend is not installed."""
        if self._tokenizer is None:
            raise ValueError(f"SamplingParams: {kind} is given, expected none ({self._no_tokenizer})")
        for package in sorted(set(BACKENDS.values())):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ValueError(
                    f"SamplingParams: {kind} is given, expected none without {package} "
                    '(pip install "specdec-kernels[grammar]")'
                ) from error

    def prepare(self) -> None:
        """Read the tokenizer for both backends, at the latest when the first grammar is compiled."""
        self._read_vocabulary("grammar").prepare()

    def try_out(self, kind: str, source: str) -> int:
        """Compile a grammar, compute its first mask, and return its size in bytes; ValueError as `compiled`.

        llguidance, whose grammars and masks are within limits of its own, tells no size: 0.
        """
        given: dict[str, Any] = {kind: source}
        sampling = SamplingParams(**given)
        self._new_matcher(sampling, [0]).is_dead_end([])  # a stop token, whichever
        return int(getattr(self.compiled(sampling), "memory_size_bytes", 0))

    def compiled(self, sampling: SamplingParams) -> Any:
        """Return the compiled grammar of a request that has one.

        Raises:
            ValueError: there is no tokenizer, or no backend; the source is no schema, pattern or grammar; no grammar
                holds to it.
        """
        kind, source = sampling.constraint
        converted = CONVERSIONS[kind](source)
        vocabulary = self._read_vocabulary(kind)
        try:
            return vocabulary.compiled_ebnf(converted) if kind == "grammar" else vocabulary.compiled(converted)
        except (RuntimeError, ValueError) as error:
            why = " ".join(re.sub(r"^\[[^]]*\] \S+:\d+: ", "", str(error)).split())  # without its time and place
            raise ValueError(f"SamplingParams: {kind} does not compile: {why}") from error

    def new_matcher(self, sampling: SamplingParams, stop_tokens: Sequence[int]) -> NewMatcher:
        """Return what makes matchers at the start of the text, which the request's stop tokens may end.

        Raises:
            ValueError: as `compiled`; no stop token; no token of the vocabulary begins a text.
        """
        kind, _ = sampling.constraint
        stop_tokens = [token for token in stop_tokens if token < self._vocab_size]
        if not stop_tokens:
            raise ValueError(f"SamplingParams: {kind} is given, expected a stop token with it, which ends the text")
        new_matcher = self._new_matcher(sampling, stop_tokens)
        if new_matcher.is_dead_end([]):
            raise ValueError(
                f"SamplingParams: {kind} allows no token of the vocabulary at the start of the text, "
                "expected at least one"
            )
        if begin := sampling.constrain_after:
            stops = self._stops(stop_tokens)
            opening, size = sampling.constrain_unless, self._vocab_size
            return NewMatcher(lambda: LaterMatcher(new_matcher(), begin, opening, stops, size), size)
        return new_matcher

    def _new_matcher(self, sampling: SamplingParams, stop_tokens: Sequence[int]) -> NewMatcher:
        grammar, stops = self.compiled(sampling), self._stops(stop_tokens)
        if sampling.grammar_backend == "xgrammar":
            return NewMatcher(lambda: XgrammarMatcher(grammar, stops), self._vocab_size)
        return NewMatcher(lambda: LlguidanceMatcher(grammar, stops), self._vocab_size)

    def _stops(self, tokens: Sequence[int]) -> StopTokens:
        assert self._vocabulary is not None  # a grammar is compiled
        return StopTokens(tokens, self._vocab_size, [self._vocabulary.eos])

    def _read_vocabulary(self, kind: str) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self.expect_available(kind)
                self._vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size)
            return self._vocabulary


class Vocabulary:
    """The vocabulary of a model as both backends take it.

    Attributes:
        tokens: the bytes of each token; empty for those that no text has.
        eos: a token that no text has, for llguidance's end.
    """

    def __init__(self, tokens: list[bytes], eos: int) -> None:
        self.tokens, self.eos = tokens, eos
        self._lock = Lock()
        self.compiled = SourceCache(self._compile, MOST_COMPILED, SOURCE_BYTES)

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> Vocabulary:
        """Return a tokenizer's vocabulary, in which special tokens are empty: they are no part of a text."""
        import xgrammar

        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*getattr(tokenizer, "all_special_ids", ()), *(index for index, one in added.items() if one.special)}
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        texts = list(info.decoded_vocab)
        if info.vocab_type == xgrammar.VocabType.RAW:
            # xgrammar would take names of tokens for their texts: a space of Metaspace, "##" of WordPiece.
            detokenizer = Detokenizer(tokenizer)
            texts = [detokenizer.text_bytes(token) for token in range(size)]
        tokens = [b"" if index in special else text for index, text in enumerate(texts)]
        eos = getattr(tokenizer, "eos_token_id", None)
        if not isinstance(eos, int) or eos >= size:
            eos = next((index for index, token in enumerate(tokens) if not token), 0)
        return cls(tokens, eos)

    def prepare(self) -> None:
        """Build what the backends make of it."""
        with self._lock:
            _ = self._llguidance, self._xgrammar

    def compiled_ebnf(self, grammar: str) -> Any:
        """Return a grammar of xgrammar."""
        with self._lock:
            compiler = self._xgrammar
        return compiler.compile_grammar(grammar)

    def _compile(self, grammar: str) -> Any:
        """Return a matcher of llguidance at the start of a text."""
        import llguidance

        with self._lock:
            tokenizer = self._llguidance
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(PLACE_OF_ERROR.sub("", matcher.get_error()))
        return matcher

    @cached_property
    def _xgrammar(self) -> Any:
        import xgrammar

        options: dict[str, Any] = {
            "vocab_type": xgrammar.VocabType.RAW,
            "vocab_size": len(self.tokens),
            "stop_token_ids": [self.eos],
        }
        return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(self.tokens, **options), cache_limit_bytes=CACHE_BYTES)

    @cached_property
    def _llguidance(self) -> Any:
        import llguidance

        wrapped: Any = SimpleNamespace(
            is_tokenizer_wrapper=True,
            tokens=self.tokens,
            special_token_ids=[index for index, token in enumerate(self.tokens) if not token],
            eos_token_id=self.eos,
            bos_token_id=None,
        )
        return llguidance.LLTokenizer(wrapped, n_vocab=len(self.tokens), eos_token=self.eos)


def new_grammar_of_schema(source: str) -> str:
    """Return llguidance's grammar of texts that a JSON schema accepts."""
    try:
        schema = held_to(json.loads(source))
    except json.JSONDecodeError as error:
        raise ValueError(f"SamplingParams: json_schema does not compile: it is no JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("SamplingParams: json_schema is nested too deep, expected fewer levels") from error
    except ValueError as error:
        raise ValueError(f"SamplingParams: {error}") from error
    whitespace = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_WHITESPACE}}}"}
    return f"{NO_FORCING}start: %json {json.dumps(schema | {'x-guidance': whitespace})}"


def new_grammar_of_pattern(pattern: str) -> str:
    """Return llguidance's grammar of texts that a regular expression matches as a whole."""
    try:
        converted = canonical(pattern)
    except Unsupported as error:
        raise ValueError(f"SamplingParams: regex has {error}, expected none (no grammar holds to it)") from error
    except RecursionError as error:
        raise ValueError("SamplingParams: regex is nested too deep, expected fewer levels") from error
    except ValueError as error:
        raise ValueError(f"SamplingParams: regex does not compile: {error}") from error
    return f"{NO_FORCING}start: /{converted}/" if converted else f'{NO_FORCING}start: ""'


grammar_of_schema = SourceCache(new_grammar_of_schema, MOST_CONVERTED, SOURCE_BYTES)
grammar_of_pattern = SourceCache(new_grammar_of_pattern, MOST_CONVERTED, SOURCE_BYTES)


def checked_ebnf(source: str) -> str:
    """Return a grammar in EBNF that xgrammar holds to; ValueError for lookaheads, which it reads as hints."""
    if any(found.group(1) for found in LOOKAHEAD.finditer(source)):
        raise ValueError("SamplingParams: grammar has a lookahead (= ), expected none (no grammar holds to it)")
    return source


CONVERSIONS: dict[str, Callable[[str], str]] = {
    "json_schema": grammar_of_schema,
    "regex": grammar_of_pattern,
    "grammar": checked_ebnf,
}
