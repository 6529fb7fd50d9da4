"""Reference of the n-gram index without bounds: no hashing, no aging out. Plain Python, written to be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

ORDERS = (1, 2, 4, 8)
RECENT = 15  # occurrences kept per n-gram and scope
MAX_MATCH = 32
MAX_CANDIDATES = 32
MAX_STEP = 256  # maximum tokens between two drafts if the second follows the first

LOG2_UNIT = 256  # probabilities are compared by log2 in integer multiples of 1/256

Scope = object  # GLOBAL, the number of a group, or a private stream
GLOBAL = 0


@dataclass(eq=False)
class Stream:
    tokens: list[int] = field(default_factory=list)
    group: int = GLOBAL
    private: bool = False
    request: int | None = None
    followed: dict[int, tuple[Stream, int]] = field(default_factory=dict)  # by length: furthest match

    @property
    def scope(self) -> Scope:
        return self if self.private else self.group

    def scopes(self) -> list[Scope]:
        """Return the scopes that the stream reads, in this order."""
        return [*([self] if self.private else []), *([self.group] if self.group else []), GLOBAL]


class Draft(NamedTuple):
    """One row without padding; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    match_len: int


@dataclass
class Candidate:
    stream: Stream
    at: int  # its next token
    match: int
    weight: int

    def token(self, depth: int) -> int | None:
        i = self.at + depth
        return self.stream.tokens[i] if i < len(self.stream.tokens) else None


@dataclass
class Weights:
    """Weights in units of 1/16; recency in units of 1/256."""

    own: int
    group: int
    everywhere: int
    recency: float

    def of(self, stream: Stream, own: Stream, newer: int) -> int:
        scope = self.own if stream is own else self.group if stream.scope else self.everywhere
        return scope * math.floor(256 * self.recency**newer + 0.5)


def log2(x: int) -> int:
    """Return log2 in 1/256, rounded down. Squaring shifts one more bit of the log2 before the point."""
    found = x.bit_length() - 1
    mantissa = (x << 63 - found) >> 32
    for _ in range(LOG2_UNIT.bit_length() - 1):
        square = mantissa * mantissa
        above = square >> 63
        mantissa = square >> 31 + above
        found = 2 * found + above
    return found


def in_log2(value: float) -> int:
    return math.floor(math.log2(value) * LOG2_UNIT + 0.5)


STEP = [in_log2((match + 4) / (match + 2)) for match in range(MAX_MATCH + 1)]


@dataclass
class Node:
    members: list[int]  # candidate indices, increasing
    weight: int
    match: int
    token: int
    parent: int
    depth: int

    @property
    def log2_p(self) -> int:
        """Return log2 p before subtracting the total weight's."""
        return log2(self.weight) - self.depth * STEP[self.match]

    def order(self) -> tuple[int, int, int]:
        return (-self.log2_p, -self.match, self.members[0])


class NgramIndex:
    def __init__(self) -> None:
        self.running: dict[int, Stream] = {}
        self.ended: dict[int, Stream] = {}  # by slot, until the slot is reused
        self.texts: list[Stream] = []
        self.occurrences: dict[tuple[Scope, tuple[int, ...]], list[tuple[Stream, int]]] = {}  # newest first

    def begin(self, slot: int, *, group: int = 0, private: bool = False, request: int | None = None) -> None:
        self.release(slot)
        resumed = [
            at
            for at, ended in sorted(self.ended.items())
            if request is not None and (ended.request, ended.group, ended.private) == (request, group, private)
        ]
        held = self.ended.pop(slot, None)
        if resumed:
            stream = held if resumed[0] == slot else self.ended.pop(resumed[0])
            if held is not None and resumed[0] != slot:
                self.ended[resumed[0]] = held
            assert stream is not None
        else:
            stream = Stream(group=group, private=private, request=request)
            self.texts.append(stream)
        self.running[slot] = stream

    def length(self, slot: int) -> int:
        return len(self.running[slot].tokens) if slot in self.running else 0

    def insert(self, tokens: list[int], slot: int | None = None, *, group: int = 0, start: int | None = None) -> None:
        if slot is not None and start is not None:
            tokens = tokens[self.length(slot) - start :]
        if not tokens:
            return
        if slot is None:
            stream = Stream(group=group)
            self.texts.append(stream)
        else:
            if slot not in self.running:
                self.begin(slot)
            stream = self.running[slot]
        for token in tokens:
            i = len(stream.tokens)
            for n in ORDERS:
                if i >= n:
                    found = self.occurrences.setdefault((stream.scope, tuple(stream.tokens[i - n :])), [])
                    found.insert(0, (stream, i))
                    del found[RECENT:]
            stream.tokens.append(token)

    def release(self, slot: int) -> None:
        if slot in self.running:
            self.ended[slot] = self.running.pop(slot)

    def end_all(self) -> None:
        """End all streams and forget them, as a saved file does; texts stay."""
        self.running.clear()
        self.ended.clear()

    def candidates(self, own: Stream, min_match: int, weights: Weights) -> list[Candidate]:
        context = own.tokens
        found: list[Candidate] = []
        listed = [
            (newer, stream, at)
            for n in reversed(ORDERS)
            if len(context) >= n
            for scope in own.scopes()
            for newer, (stream, at) in enumerate(self.occurrences.get((scope, tuple(context[-n:])), []))
        ]
        before = max((length for length in own.followed if length < len(context)), default=-MAX_STEP)
        if len(context) - before <= MAX_STEP:
            stream, at = own.followed[before]
            if (at := at + len(context) - before) < len(stream.tokens):
                listed.insert(0, (0, stream, at))
        for newer, stream, at in listed:
            if any(c.stream is stream and c.at == at for c in found) or len(found) == MAX_CANDIDATES:
                continue
            match = 0
            while match < min(MAX_MATCH, at, len(context)) and stream.tokens[at - 1 - match] == context[-1 - match]:
                match += 1
            weight = weights.of(stream, own, newer) * 2 ** min(match, 24)
            if match >= min_match and weight > 0:
                found.append(Candidate(stream, at, match, weight))
        if found:
            best = max(found, key=lambda c: c.match)  # the first one with that match
            own.followed[len(context)] = best.stream, best.at
        return found

    def draft(
        self,
        slot: int,
        num_nodes: int,
        *,
        mode: str = "tree",
        min_prob: float = 0.0,
        min_match: int = 0,
        own_weight: float = 4.0,
        group_weight: float = 1.0,
        global_weight: float = 1.0,
        recency: float = 1.0,
    ) -> Draft | None:
        """Return a draft; None for a slot without text."""
        own = self.running.get(slot)
        if own is None or not own.tokens:
            return None
        weights = Weights(round(own_weight * 16), round(group_weight * 16), round(global_weight * 16), recency)
        candidates = self.candidates(own, min_match, weights)
        total = log2(sum(c.weight for c in candidates)) if candidates else 0
        least = in_log2(min_prob) if min_prob > 0 else -math.inf

        def children(members: list[int], parent: int, depth: int) -> list[Node]:
            groups: dict[int, list[int]] = {}
            for i in members:
                token = candidates[i].token(depth)
                if token is not None:
                    groups.setdefault(token, []).append(i)
            return [
                Node(
                    g,
                    sum(candidates[i].weight for i in g),
                    max(candidates[i].match for i in g),
                    token,
                    parent,
                    depth + 1,
                )
                for token, g in groups.items()
            ]

        draft = Draft([own.tokens[-1]], [-1], [0.0], max((c.match for c in candidates), default=0))
        open_nodes = children(list(range(len(candidates))), 0, 0)
        while open_nodes and len(draft.tokens) < num_nodes:
            best = min(open_nodes, key=Node.order)
            if best.log2_p - total < least:
                break
            open_nodes.remove(best)
            draft.tokens.append(best.token)
            draft.parents.append(best.parent)
            draft.scores.append((best.log2_p - total) * math.log(2) / LOG2_UNIT)
            below = children(best.members, len(draft.tokens) - 1, best.depth)
            open_nodes = below if mode == "chain" else open_nodes + below
        return draft
