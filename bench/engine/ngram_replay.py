"""Replay of text against the n-gram index: drafts accepted per lookup (`specdec bench ngram-replay`).

The last documents of a text are requests: the first tokens of each are the prompt, and what follows is the target's
output; a draft is accepted as far as it agrees. Requests run one after another, and their text stays in the index.

  cold    the index starts empty
  warm    it starts with a number of tokens of the other documents
  edit    the prompt is the whole document with about every 40th token changed, dropped or doubled, and the output is
          the document: no other request is in the index, as in a chat that copies
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sd

from ..ops.harness import Result
from .drafter import Drafter
from .ngram_baselines import ngram_drafters

NAME = "ngram_replay"
PIECES = re.compile(r"\n[ \t]*| ?[^\W\d_]{1,8}|\d{1,3}| ?[^\w\s]|\s|_")


@dataclass(frozen=True)
class Score:
    """Sums over all lookups of a replay."""

    lookups: int
    accepted: int
    drafted: int
    seconds: float  # inside `draft`, of this thread

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def facts(self) -> dict[str, float]:
        """Per lookup."""
        sums = {"accepted": self.accepted, "drafted": self.drafted, "us": 1e6 * self.seconds}
        return {name: round(value / max(self.lookups, 1), 4) for name, value in sums.items()}


class Index(Drafter):
    """Our n-gram index."""

    def __init__(self, drafts: int, max_tokens: int, options: dict[str, Any]) -> None:
        self._index = sd.NgramIndex(max_tokens, 1, 1 << 20)
        slot, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        out = self._index.draft(slot, zero, drafts + 1, **options)
        self._tree = out.tree
        self._draft: Callable[[], sd.NgramDraft] = lambda: self._index.draft(slot, zero, drafts + 1, **options, out=out)

    def learn(self, document: Sequence[int]) -> None:
        self._index.insert(torch.tensor(document, dtype=torch.int32))

    def begin(self, prompt: Sequence[int]) -> None:
        self._index.begin(0)
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._index.insert(torch.tensor(tokens, dtype=torch.int32), 0)

    def draft(self) -> Any:
        return self._draft()

    def nodes(self, found: Any) -> tuple[list[int], list[int]]:
        count = int(self._tree.num_nodes[0])
        return self._tree.tokens[0, :count].tolist(), self._tree.parents[0, :count].tolist()


def accepted_length(tokens: list[int], parents: list[int], truth: Sequence[int]) -> int:
    """Return how many tokens of `truth` follow the root in a draft tree."""
    node = length = 0
    for token in truth:
        child = next((c for c in range(node + 1, len(tokens)) if (parents[c], tokens[c]) == (node, token)), None)
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(drafter: Drafter, requests: Iterable[tuple[list[int], list[int]]]) -> Score:
    """Replay requests, each a prompt and its output. The bonus token after an accepted draft is the output's own."""
    lookups = accepted = drafted = 0
    seconds = 0.0
    for prompt, output in requests:
        drafter.begin(prompt)
        at = 0
        while at < len(output):
            start = time.thread_time()
            found = drafter.draft()
            seconds += time.thread_time() - start
            tokens, parents = drafter.nodes(found)
            length = accepted_length(tokens, parents, output[at:])
            drafter.extend(output[at : at + length + 1])
            at += length + 1
            lookups, accepted, drafted = lookups + 1, accepted + length, drafted + len(tokens) - 1
    return Score(lookups, accepted, drafted, seconds)


def read_documents(path: Path, suffix: str) -> list[list[int]]:
    """Read documents as tokens.

    A token file is a NumPy file (`.npy`) or plain little-endian int32 (`.i32`, `.bin`), with tokens below 0 between
    documents. A folder or another file is text, each file a document, cut into pieces much as a tokenizer would.
    """
    if path.is_dir() or path.suffix not in (".npy", ".i32", ".bin"):
        files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
        ids: dict[str, int] = {}
        texts = (PIECES.findall(file.read_text("utf-8", "replace")) for file in files if file.is_file())
        return [[ids.setdefault(piece, len(ids) + 1) for piece in text] for text in texts]
    if path.suffix == ".npy":
        import numpy as np

        tokens = torch.from_numpy(np.load(path).astype(np.int32).reshape(-1))
    else:
        tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32)
    ends = [-1, *(tokens < 0).nonzero().flatten().tolist(), len(tokens)]
    return [tokens[start + 1 : end].tolist() for start, end in pairwise(ends)]


def edited(document: Sequence[int], rng: random.Random) -> list[int]:
    """Return the document with about every 40th token changed, dropped or doubled."""
    text: list[int] = []
    for token in document:
        edit = rng.randrange(120)
        if edit == 0:
            text.append(rng.choice(document))
        elif edit == 1:
            text += [token, token]
        elif edit != 2:
            text.append(token)
    return text


@dataclass(frozen=True)
class Text:
    """Documents, the last of them requests."""

    corpus: list[list[int]]
    requests: list[list[int]]
    prompt: int  # tokens of a prompt, and of what follows, at most
    output: int

    def continued(self) -> Iterator[tuple[list[int], list[int]]]:
        """Split each request into prompt and output."""
        for document in self.requests:
            head = min(self.prompt, len(document) // 2)
            yield document[:head], document[head : head + self.output]

    def score(self, make: Callable[[], Drafter], held: int) -> Score:
        """Replay all requests with one drafter, which has indexed `held` tokens of the other documents."""
        drafter = make()
        for document in reversed(self.corpus):  # from the nearest on
            if held <= 0:
                break
            drafter.learn(document[:held])
            held -= len(document)
        return replay(drafter, self.continued())

    def score_edits(self, make: Callable[[], Drafter]) -> Score:
        """Replay edits of each request, each with a drafter of its own."""
        rng, total = random.Random(0), Score(0, 0, 0, 0.0)
        for document in self.requests:
            truth = document[: self.output]
            total += replay(make(), [(edited(truth, rng), truth)])
        return total


def measure_replay(
    text: Text, name: str, drafts: Sequence[int], warm: Sequence[int], options: dict[str, Any], baselines: bool
) -> Iterator[Result]:
    """Replay every workload with every number of drafts, and yield results.

    The record calls the text `name`. An index starts empty, and with each of the `warm` numbers of tokens; it drafts
    with `options`. `baselines` adds the installed drafters of other packages.
    """
    asked = sum(map(len, text.requests))
    others = ngram_drafters() if baselines else {}
    for workload, held in [("cold", 0), *((f"warm {held:.0e}", held) for held in warm), ("edit", 0)]:
        index = partial(Index, max_tokens=max(held, 1 << 17) + asked, options=options)
        makers: dict[str, Callable[[int], Drafter]] = {"index": index, **others}
        for count in drafts:
            for drafter, make_drafter in makers.items():
                make = partial(make_drafter, count)
                score = text.score_edits(make) if workload == "edit" else text.score(make, held)
                params = {"text": name, "workload": workload, "drafts": count, "drafter": drafter}
                yield Result(NAME, params, "cpu", facts=score.facts())
