"""Parsers of reasoning between tags, which precedes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .items import Item, Parser, Reasoning, Span, first_tag, held_back


class ReasoningTags(NamedTuple):
    """The marks of reasoning in a family of models.

    Attributes:
        begin, end: the tags around it.
        from_start: a text begins with reasoning though neither prompt nor text has the begin tag, unless the prompt
            ends with the end tag.
        answers: tags that begin the answer without an end tag before them.
    """

    begin: str = "<think>"
    end: str = "</think>"
    from_start: bool = False
    answers: Sequence[str] = ()

    def begins_inside(self, prompt_end: str) -> bool:
        """Return whether the text after a prompt is within reasoning: chat templates may write the begin tag."""
        prompt_end = prompt_end.rstrip()
        return prompt_end.endswith(self.begin) or (self.from_start and not prompt_end.endswith(self.end))


@dataclass(frozen=True)
class ThinkTokens:
    """The tokens that mark the reasoning before a constrained answer.

    Attributes:
        end: after which the answer begins.
        end_tag: its text; empty for a special token, which no text has.
        begin: with which a text may begin.
        inside: the text begins within reasoning; otherwise only one that begins with `begin` does.
        never: tokens that begin the answer without an end token, which a constrained text must not have.
    """

    end: int
    end_tag: str
    begin: int | None
    inside: bool
    never: Sequence[int] = ()


class TaggedReasoning:
    """Reasoning at the start of a text, and another parser for the answer.

    Whitespace next to a tag is dropped. Reasoning without an end is all of the text.

    Args:
        parser: of the answer.
        tags: around the reasoning.
        inside: the text begins within reasoning.
        separate: return `Reasoning`; otherwise text, tags included, in which a tool call is none.
    """

    def __init__(self, parser: Parser, tags: ReasoningTags, *, inside: bool, separate: bool = True) -> None:
        self._parser, self._tags, self._separate = parser, tags, separate
        self._ends = [tags.end, *tags.answers]
        self._text = ""  # not returned yet
        self._inside: bool | None = None  # None: not known yet, the begin tag may come
        self._begins_inside = inside
        self._at_start = True  # of the reasoning or of the answer, where whitespace is dropped
        self._num_passed = 0  # characters that have left `_text`

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        if not self._separate or not (self._inside or self._num_passed or self._begins_inside):
            return ()
        return [(0, self._num_passed if self._inside is False else None)]

    def push(self, text: str) -> list[Item]:
        self._text += text
        if self._inside is None:
            self._look_for_begin()
        found: list[Item] = self._reasoning() if self._inside else []
        if self._inside is False:
            found += self._parser.push(self._answer())
        return found

    def _look_for_begin(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._tags.begin):
            self._inside = True
            if self._separate:
                self._pass(len(self._text) - len(text) + len(self._tags.begin))
        elif not self._tags.begin.startswith(text):
            self._inside = self._at_start = self._begins_inside

    def _reasoning(self) -> list[Item]:
        if not self._separate:
            return self._text_with_tags()
        self._drop_whitespace()
        at, tag = first_tag(self._text, self._ends)
        end = len(self._text[:at].rstrip()) if tag else len(self._text) - held_back(self._text, self._ends)
        found: list[Item] = [Reasoning(self._text[:end])] if end else []
        self._pass(end)
        if tag:
            self._pass(at - end + (len(tag) if tag == self._tags.end else 0))
            self._inside, self._at_start = False, True
        return found

    def _text_with_tags(self) -> list[Item]:
        at, tag = first_tag(self._text, self._ends)
        kept = 0 if tag else held_back(self._text, self._ends)
        end = at + (len(tag) if tag == self._tags.end else 0) if tag else len(self._text) - kept
        found: list[Item] = [self._text[:end]] if end else []
        self._pass(end)
        if tag:
            self._inside = self._at_start = False
        return found

    def _answer(self) -> str:
        if self._at_start:
            text = self._text.lstrip()
            self._at_start = not text
        else:
            text = self._text
        self._text = ""
        return text

    def _drop_whitespace(self) -> None:
        if self._at_start:
            self._pass(len(self._text) - len(self._text.lstrip()))
            self._at_start = not self._text

    def _pass(self, count: int) -> None:
        self._num_passed += count
        self._text = self._text[count:]

    def finish(self) -> list[Item]:
        if self._inside or (self._inside is None and self._begins_inside):
            text, self._text = self._text, ""
            return [Reasoning(text) if self._separate else text] if text else []
        if self._inside is None:
            self._at_start = False
        return [*self._parser.push(self._answer()), *self._parser.finish()]


class ReasoningByTokens:
    """Reasoning up to its end token, and another parser for the answer, which is constrained from there on.

    The tokens decide, because the constraint begins after one: a tag that the reasoning spells with several tokens is a
    part of it. Whitespace at both ends of the reasoning is dropped, and none of the answer.

    Args:
        parser: of the answer.
        tokens: that mark the reasoning.
    """

    def __init__(self, parser: Parser, tokens: ThinkTokens) -> None:
        self._parser, self._tokens = parser, tokens
        self._num_tokens = 0  # so far
        self._begin = 0  # where the reasoning begins in the text
        self._answer: int | None = None if tokens.inside else 0  # where the answer begins; None: not known yet
        self.num_reasoning_tokens = 0
        self._text = ""  # not returned yet
        self._num_passed = 0  # characters that have left `_text`
        self._at_start = True  # of the reasoning, where whitespace is dropped

    def on_token(self, token: int, end: int) -> None:
        """Note a token and where it ends in the text, before its text is pushed."""
        if self._num_tokens == 0 and token == self._tokens.begin:
            self._begin, self._answer = end, None
        self._num_tokens += 1
        if self._answer is None:
            self.num_reasoning_tokens += 1
            if token == self._tokens.end:
                self._answer = end

    @property
    def reasoning_spans(self) -> Sequence[Span]:
        return [(0, self._answer)] if self.num_reasoning_tokens else ()

    def push(self, text: str) -> list[Item]:
        return self._push(text, last=False)

    def finish(self) -> list[Item]:
        return [*self._push("", last=True), *self._parser.finish()]

    def _push(self, text: str, *, last: bool) -> list[Item]:
        self._text += text
        found: list[Item] = []
        if self._answer is None or self._num_passed < self._answer:
            found += self._reasoning(last)
        if self._answer is not None and self._num_passed >= self._answer:
            found += self._parser.push(self._pass(len(self._text)))
        return found

    def _reasoning(self, last: bool) -> list[Item]:
        self._pass(self._begin - self._num_passed)
        end = None if self._answer is None else self._answer - len(self._tokens.end_tag)
        content = self._text if end is None else self._text[: max(end - self._num_passed, 0)]
        if self._at_start:
            self._pass(len(content) - len(content.lstrip()))
            content = content.lstrip()
            self._at_start = not content
        is_whole = end is not None and self._num_passed + len(content) >= end
        kept = content if last and not is_whole else content.rstrip()
        self._pass(len(content) if is_whole else len(kept))
        if is_whole and self._answer is not None:
            self._pass(self._answer - self._num_passed)
        return [Reasoning(kept)] if kept else []

    def _pass(self, count: int) -> str:
        passed = self._text[: max(count, 0)]
        self._text = self._text[len(passed) :]
        self._num_passed += len(passed)
        return passed
