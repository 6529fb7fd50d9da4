"""The n-gram index without bounds: no hashing, nothing ever ages out. Plain Python, to be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

ORDERS = (1, 2, 4, 8)
RECENT = 7  # places kept for each n-gram
MAX_MATCH = 32


@dataclass(eq=False)
class Stream:
    tokens: list[int] = field(default_factory=list)


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
class Node:
    members: list[int]  # candidate numbers, rising
    weight: int
    match: int
    token: int
    parent: int
    depth: int

    def order(self) -> tuple[int, int, int]:
        return (-self.weight, -self.match, self.members[0])


class NgramIndex:
    def __init__(self) -> None:
        self.running: dict[int, Stream] = {}
        self.texts: list[Stream] = []
        self.places: dict[tuple[int, ...], list[tuple[Stream, int]]] = {}  # newest first

    def insert(self, tokens: list[int], slot: int | None = None) -> None:
        stream = self.running.get(slot) if slot is not None else None
        if stream is None:
            if not tokens:
                return
            stream = Stream()
            self.texts.append(stream)
            if slot is not None:
                self.running[slot] = stream
        for token in tokens:
            i = len(stream.tokens)
            for n in ORDERS:
                if i >= n:
                    places = self.places.setdefault(tuple(stream.tokens[i - n :]), [])
                    places.insert(0, (stream, i))
                    del places[RECENT:]
            stream.tokens.append(token)

    def release(self, slot: int) -> None:
        self.running.pop(slot, None)

    def candidates(self, own: Stream, min_match: int) -> list[Candidate]:
        context = own.tokens
        found: list[Candidate] = []
        for n in reversed(ORDERS):
            for stream, at in self.places.get(tuple(context[-n:]), []) if len(context) >= n else []:
                if any(c.stream is stream and c.at == at for c in found):
                    continue
                match = 0
                while match < min(MAX_MATCH, at, len(context)) and stream.tokens[at - 1 - match] == context[-1 - match]:
                    match += 1
                if match >= min_match:
                    weight = 2 ** min(match, 24) * (4 if stream is own else 1)
                    found.append(Candidate(stream, at, match, weight))
        return found

    def draft(
        self,
        slot: int,
        num_draft_tokens: int,
        *,
        mode: str = "tree",
        min_prob: float = 0.0,
        min_match: int = 1,
    ) -> Draft | None:
        """None for a slot without a stream."""
        own = self.running.get(slot)
        if own is None:
            return None
        candidates = self.candidates(own, min_match)
        total = sum(c.weight for c in candidates)

        def children(members: list[int], parent: int, depth: int) -> list[Node]:
            groups: dict[int, list[int]] = {}
            for i in members:
                token = candidates[i].token(depth)
                if token is not None:
                    groups.setdefault(token, []).append(i)
            return [
                Node(g, sum(candidates[i].weight for i in g), max(candidates[i].match for i in g), token, parent, depth)
                for token, g in groups.items()
            ]

        draft = Draft([own.tokens[-1]], [-1], [0.0], max((c.match for c in candidates), default=0))
        open_nodes = children(list(range(len(candidates))), 0, 0)
        while open_nodes and len(draft.tokens) < num_draft_tokens:
            best = min(open_nodes, key=Node.order)
            if best.weight / total < min_prob:
                break
            open_nodes.remove(best)
            draft.tokens.append(best.token)
            draft.parents.append(best.parent)
            draft.scores.append(math.log(best.weight / total))
            below = children(best.members, len(draft.tokens) - 1, best.depth + 1)
            open_nodes = below if mode == "chain" else open_nodes + below
        return draft
