"""Tell apart why two servers answered a request differently: a near tie, rounding under load, or a true difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from .answers import Answer, Choice, Mismatch, Token, common_length, compare, logprob_distance
from .cases import COMPLETIONS, Case
from .client import Refused
from .places import cause_by_ids
from .questions import (
    BATCH,
    DIFFERENCE,
    EDITS,
    LEAST_LOGPROB,
    NEAR_TIE,
    SCALES,
    STREAM,
    Cause,
    Outcome,
    Question,
    attempt,
    bias_of_draw,
)
from .sides import Side, common

Object = dict[str, Any]
PREFIX_TOKENS = 16  # of an answer that continues from a given text
REPEATS = 3  # runs of the reference under load
SURE_CHARS = 8  # of two texts that agree by chance no longer


@dataclass
class Suspect:
    """A pair of answers that differ.

    Attributes:
        neighbors: indices of cases that ran at the same time.
    """

    case: Case
    turn: int
    question: Question
    ours: Answer | None
    theirs: Answer | None
    mismatches: list[Mismatch]
    neighbors: tuple[int, ...] = ()


@dataclass
class Finding:
    """A suspect and its cause.

    Attributes:
        kind: NEAR_TIE, BATCH (the reference differs from itself), STREAM (the reference's own streams differ from its
            whole answers) or DIFFERENCE.
        evidence: what decided.
        margin: between the logits of both tokens, or the bias that reverses the choice, at most.
        reproduces: "alone", "under load" or "not again"; of a difference.
        smallest: the smallest request that differs, if it does so alone.
        smallest_neighbors: requests that have to run next to it otherwise.
    """

    suspect: Suspect
    kind: str
    evidence: str
    margin: float | None = None
    reproduces: str | None = None
    smallest: Question | None = None
    smallest_neighbors: list[int] = field(default_factory=list)


@dataclass
class Judge:
    """Asks both servers again.

    Attributes:
        limit: the largest margin that rounding explains, and tolerance of log-probabilities.
        usable: features that both servers know.
        neighbors: questions by the index of their case.
    """

    ours: Side
    theirs: Side
    limit: float
    usable: set[str]
    neighbors: dict[int, Question] = field(default_factory=dict)
    # Causes that are known. Threads may write it at the same time: two of them find the same cause at worst.
    _by_ids: dict[str, Cause | None] = field(default_factory=dict)

    def judge(self, suspect: Suspect) -> Finding:
        """Return the cause of a difference."""
        first = suspect.mismatches[0]
        if first.field == "prompt_token_ids":
            return Finding(suspect, DIFFERENCE, "the tokens of the prompts differ")
        why = "no margin and no repeated run of the reference explains it"
        if first.is_of_text and suspect.ours is not None and suspect.theirs is not None:
            choices = sorted({one.choice for one in suspect.mismatches if one.choice is not None})
            causes = [self.cause_of_text(suspect, choice) for choice in choices]
            unexplained = next((cause for cause in causes if not cause.is_rounding), None)
            if unexplained is None:
                largest = max(causes, key=lambda cause: cause.margin or 0.0)
                return Finding(suspect, largest.kind, largest.evidence, largest.margin)
            why = unexplained.evidence
        elif "logprobs" in first.field and (evidence := self.rounding_of_logprobs(suspect)):
            return Finding(suspect, BATCH, evidence)
        if (evidence := self.stream_of_reference(suspect)) is not None:
            return Finding(suspect, STREAM, evidence, reproduces="alone")
        return Finding(suspect, DIFFERENCE, why)

    def explained(self, suspect: Suspect) -> Finding | None:
        """Return a finding if margins alone explain the difference; may be called while others are judged.

        A cause found under load that explains nothing is forgotten, and looked for again by `judge`.
        """
        if not suspect.mismatches[0].is_of_text or suspect.ours is None or suspect.theirs is None:
            return None
        choices = sorted({one.choice for one in suspect.mismatches if one.choice is not None})
        known = []
        for index in choices:
            cause = self.cause_alone(suspect.question, suspect.ours, suspect.theirs, index)
            if cause is None or not cause.is_rounding:
                self._by_ids.pop(key_of(suspect.question, suspect.ours, suspect.theirs, index), None)
                return None
            known.append(cause)
        largest = max(known, key=lambda cause: cause.margin or 0.0)
        return Finding(suspect, largest.kind, largest.evidence, largest.margin)

    # --- differences of the text

    def cause_of_text(self, suspect: Suspect, index: int) -> Cause:
        """Return why the texts of a choice part."""
        assert suspect.ours is not None and suspect.theirs is not None
        cause = self.cause_alone(suspect.question, suspect.ours, suspect.theirs, index)
        cause = cause or self.cause_after_prefix(suspect.question, suspect.ours, suspect.theirs, index)
        return cause or self.cause_by_load(suspect, index)

    def cause_alone(self, question: Question, ours: Answer, theirs: Answer, index: int) -> Cause | None:
        """Return why a choice differs, by its token ids or else by its text; None: neither shows it."""
        a, b = ours.choices[index], theirs.choices[index]
        if a.token_ids is None or b.token_ids is None:
            return self.cause_by_margin(question, ours, theirs, index)
        key = key_of(question, ours, theirs, index)
        if key not in self._by_ids:
            self._by_ids[key] = cause_by_ids(self, question, a, b, index)
        return self._by_ids[key]

    def cause_by_margin(self, question: Question, ours: Answer, theirs: Answer, index: int) -> Cause | None:
        """Return why the texts of a choice part, by the margin of the tokens there; None: no margin is known."""
        a, b = ours.choices[index], theirs.choices[index]
        scored = b if has_tops(b) else self._scored(question, self.theirs, index)
        if scored is None or common_length(scored.said(), b.said()) < common_length(a.said(), b.said()):
            return None
        kind, target, rest = NEAR_TIE, a, b
        if agrees_longer(scored, a, b):  # the reference, asked again, writes the server's text
            kind, target, rest = BATCH, b, a
        place = self._place(question, index, target, rest, scored)
        if place is None:
            return None
        chosen, text, other = place
        names = f"{chosen.text!r}" if text is None else f"{chosen.text!r} and {text!r}"
        if question.is_greedy and self._scores_choice(question):
            values = list(chosen.top.values())
            best = max([*values, *([] if chosen.logprob is None else [chosen.logprob])])
            if text is not None and text in chosen.top:
                margin = best - chosen.top[text]
                if other is not None and other.logprob is not None and chosen.text in other.top:
                    margin = max(margin, other.logprob - other.top[chosen.text])
                return Cause(kind, f"log-probabilities of {names}", margin, margin <= self.limit)
            if values and best - min(values) > self.limit:
                least = best - min(values)
                evidence = "the server's token is not among the reference's most likely ones"
                return Cause(DIFFERENCE, evidence, least, is_rounding=False)
        tokens = [] if text is None else [(text, chosen.top.get(text, LEAST_LOGPROB), 1)]
        tokens.append((chosen.text, chosen.logprob or 0.0, -1))
        found = self._margin_by_bias(question, index, (target, rest), tokens)
        return None if found is None else Cause(kind, f"a bias of {names} reverses the choice", found)

    def cause_after_prefix(self, question: Question, ours: Answer, theirs: Answer, index: int) -> Cause | None:
        """Return rounding if both servers, asked to continue from the words in common, part at a small margin.

        This is for texts that the reference alone leaves earlier. None: it shows nothing, or cannot be asked.
        """
        a, b = ours.choices[index], theirs.choices[index]
        head = a.text[: common_length(a.text, b.text)]
        head, parts_at = head[: max(head.rfind(" "), 0)], len(head)
        changed = any(name in question.body for name in (*EDITS, "n", "prediction", "echo"))
        if changed or not head or not question.is_greedy or a.reasoning or b.reasoning:
            return None
        fields: Object = {"max_tokens": min(question.body["max_tokens"], PREFIX_TOKENS)}
        if question.path == COMPLETIONS:
            if not isinstance(question.body["prompt"], str):
                return None
            fields["prompt"] = question.body["prompt"] + head
        else:
            fields["messages"] = [*question.body["messages"], {"role": "assistant", "content": head}]
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        part_a, part_b = (
            Answer([Choice(one.text[len(head) : parts_at + SURE_CHARS], finish_reason=one.finish_reason)])
            for one in (a, b)
        )
        continued = replace(question.with_fields(**fields), stream=False, leaves_after=None)
        cause = self.cause_by_margin(continued, part_a, part_b, 0)
        return cause if cause is not None and cause.is_rounding else None

    def _scores_choice(self, question: Question) -> bool:
        """Return whether log-probabilities are those that the choice was made by."""
        return self.theirs.dialect == "specdec" or not any(name in question.body for name in EDITS)

    def _scored(self, question: Question, side: Side, index: int) -> Choice | None:
        """Return a choice of the request asked alone, with log-probabilities."""
        if "logprobs" not in self.usable:
            return None
        scored = question.scored
        answer = attempt(lambda: scored.to_ours(side) if side is self.ours else scored.to_theirs(side))
        return answer.choices[index] if isinstance(answer, Answer) and index < len(answer.choices) else None

    def _place(
        self, question: Question, index: int, a: Choice, b: Choice, scored: Choice
    ) -> tuple[Token, str | None, Token | None] | None:
        """Return the reference's token where the texts part, and the text of that of `a` there, with its scores.

        The text is None if only characters of `a` are known, and none of the reference's most likely tokens fits.
        """
        other: Choice | None = a if a.tokens else self._scored(question, self.ours, index)
        if other is not None and not other.said().startswith(a.said()):
            other = None
        if other is not None:
            at = len(common(other.tokens, scored.tokens))
            if at < min(len(other.tokens), len(scored.tokens)):
                return scored.tokens[at], other.tokens[at].text, other.tokens[at]
            return None
        if a.calls or b.calls or a.reasoning or b.reasoning:
            return None  # their tokens are not all of the text
        parts_at, begin = common_length(a.text, b.text), 0
        for token in scored.tokens:
            if begin + len(token.text) > parts_at:
                follows = [text for text in token.top if text and a.text.startswith(text, begin)]
                return token, max(follows, key=len, default=None), None
            begin += len(token.text)
        return None

    def _margin_by_bias(
        self,
        question: Question,
        index: int,
        choices: tuple[Choice, Choice],
        tokens: Sequence[tuple[str, float, int]],
    ) -> float | None:
        """Return the least margin tried at which a bias makes the reference write the first choice; None: none does.

        Args:
            question: what to ask, with the bias.
            index: of the choice.
            choices: what the reference shall write, and what it writes.
            tokens: text and log-probability of tokens with which they part, and 1 to favor it, -1 to disfavor it.
        """
        if "logit_bias" not in self.usable:
            return None
        given = question.body.get("logit_bias", {})
        known = [(token, p, sign) for text, p, sign in tokens if (token := self.theirs.token_id(text)) is not None]
        chars = len(tokens[0][0]) if tokens[0][2] > 0 else SURE_CHARS
        for margin in (self.limit * scale for scale in SCALES):
            for token, logprob, sign in known:
                size = margin if question.is_greedy else bias_of_draw(margin / 4, math.exp(logprob), sign)
                bias = given | {str(token): given.get(str(token), 0) + sign * size}
                asked = question.with_fields(logit_bias=bias)
                answer = attempt(lambda asked=asked: asked.to_theirs(self.theirs))  # type: ignore[misc]
                if isinstance(answer, Answer) and agrees_longer(answer.choices[index], *choices, chars):
                    return margin
        return None

    # --- repeated runs

    def cause_by_load(self, suspect: Suspect, index: int) -> Cause:
        """Return BATCH if the reference under load writes what the server wrote, else DIFFERENCE."""
        assert suspect.ours is not None and suspect.theirs is not None
        a, b = suspect.ours.choices[index], suspect.theirs.choices[index]
        for answer in self.under_load(suspect):
            if agrees_longer(answer.choices[index], a, b):
                return Cause(BATCH, "the reference under load writes what the server wrote")
        evidence = "no margin and no repeated run of the reference explains it"
        return Cause(DIFFERENCE, evidence, is_rounding=False)

    def under_load(self, suspect: Suspect) -> Iterator[Answer]:
        """Ask the reference several times, each time with the requests that ran at the same time before."""
        for _ in range(REPEATS):
            outcome = self.loaded(suspect.question, suspect.neighbors, self.theirs)
            if isinstance(outcome, Answer):
                yield outcome

    def loaded(self, question: Question, neighbors: Sequence[int], side: Side) -> Outcome:
        """Ask one server together with neighbors."""
        others = [self.neighbors[index] for index in neighbors if index in self.neighbors]

        def ask(one: Question) -> Outcome:
            return attempt(lambda: one.to_ours(side) if side is self.ours else one.to_theirs(side))

        if not others:
            return ask(question)
        with ThreadPoolExecutor(len(others) + 1) as clients:
            return list(clients.map(ask, [*others, question]))[-1]

    def rounding_of_logprobs(self, suspect: Suspect) -> str | None:
        """Return evidence if log-probabilities of the reference differ among its runs as they do from the server's."""
        assert suspect.ours is not None and suspect.theirs is not None
        first = suspect.mismatches[0]
        assert first.choice is not None
        at = first.ours["token"]
        a, b = (answer.choices[first.choice].tokens[at] for answer in (suspect.ours, suspect.theirs))
        apart = logprob_distance(a, b)
        for answer in self.under_load(suspect):
            tokens = answer.choices[first.choice].tokens
            if at < len(tokens) and tokens[at].text == b.text and 2 * logprob_distance(tokens[at], b) >= apart:
                return "log-probabilities of the reference differ as much between its own runs"
        return None

    def stream_of_reference(self, suspect: Suspect) -> str | None:
        """Return evidence if the reference streams what the server streamed, and answers something else as a whole."""
        question = suspect.question
        if not question.stream or suspect.ours is None or suspect.ours.is_partial:
            return None
        streamed = attempt(lambda: question.to_theirs(self.theirs, stream=True))
        whole = attempt(lambda: question.to_theirs(self.theirs))
        if isinstance(streamed, Exception) or isinstance(whole, Exception):
            return None
        if compare(streamed, suspect.ours, self.limit) or not compare(streamed, whole, self.limit):
            return None
        return "the reference's stream equals the server's, and differs from the reference's whole answer"

    # --- whether it happens again

    def differs(self, question: Question, neighbors: Sequence[int] = (), *, near_ties: bool = False) -> list[Mismatch]:
        """Ask the reference, and the server with neighbors; return what differs, `near_ties` also by a near tie."""
        ours = self.loaded(question, neighbors, self.ours)
        theirs = attempt(lambda: question.to_theirs(self.theirs))
        mismatches = mismatches_of(ours, theirs, self.limit)
        if near_ties or isinstance(ours, Exception) or isinstance(theirs, Exception):
            return mismatches
        if not mismatches or not mismatches[0].is_of_text:
            return mismatches
        for one in mismatches:
            cause = None if one.choice is None else self.cause_alone(question, ours, theirs, one.choice)
            if cause is None or not cause.is_rounding:
                return mismatches
        return []


def key_of(question: Question, ours: Answer, theirs: Answer, index: int) -> str:
    """Return what identifies two texts of a choice."""
    return repr((question, index, ours.choices[index].token_ids, theirs.choices[index].token_ids))


def mismatches_of(ours: Outcome, theirs: Outcome, tolerance: float) -> list[Mismatch]:
    """Return what differs between two outcomes; nothing if neither is an answer."""
    if isinstance(ours, Exception) and isinstance(theirs, Exception):
        return []
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        outcomes = (ours, theirs)
        name = "refusal" if any(isinstance(one, Refused) for one in outcomes) else "error"
        return [Mismatch(name, None, *(str(one) if isinstance(one, Exception) else None for one in outcomes))]
    return compare(ours, theirs, tolerance)


def has_tops(choice: Choice) -> bool:
    return bool(choice.tokens) and all(len(token.top) > 1 for token in choice.tokens[1:] or choice.tokens)


def agrees_longer(candidate: Choice, a: Choice, b: Choice, chars: int = SURE_CHARS) -> bool:
    """Return whether a third text agrees with `a` for some characters beyond the place where `a` and `b` part."""
    text, parts_at = a.said(), common_length(a.said(), b.said())
    if len(text) <= parts_at:  # `a` is the beginning of `b`
        return candidate.said() == text and candidate.finish_reason == a.finish_reason
    return candidate.said().startswith(text[: parts_at + chars])
