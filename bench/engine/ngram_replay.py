"""Replays text against the n-gram index: how many drafted tokens are accepted per lookup.

    python -m specdec_kernels.bench.engine.ngram_replay tokens.npy
    python -m specdec_kernels.bench.engine.ngram_replay corpus.i32 --drafts 8,16,32 --warm 100000,1000000
    python -m specdec_kernels.bench.engine.ngram_replay path/to/a/folder --suffix .py

A token file is a NumPy file (`.npy`) or bare little-endian int32; tokens below 0 stand between documents. A folder or
another file is text, cut into pieces much as a tokenizer would, each file a document.

The last documents are requests: of each, the first tokens are the prompt and what follows is what the target would
have said; a draft is accepted as far as it agrees. Requests come one after another and leave their text behind.

  cold    the index starts empty
  warm    it starts with that many tokens of the other documents
  edit    the prompt is the whole document with every 40th token or so changed, dropped or doubled, and what follows is
          the document: no other request is there, as with copying in a chat

With --peers, other packages' drafters replay the same (peers/ngram.py), where they are installed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
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
from ..report.record import record
from .drafter import Drafter

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
    """Ours."""

    def __init__(self, drafts: int, max_tokens: int, options: dict[str, Any]) -> None:
        self._index = sd.NgramIndex(max_tokens, 1, 1 << 20)
        slot, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        out = self._index.draft(slot, zero, drafts + 1, **options)
        self._tree = out.tree
        self._draft = lambda: self._index.draft(slot, zero, drafts + 1, **options, out=out)

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
    node = length = 0
    for token in truth:
        child = next((c for c in range(node + 1, len(tokens)) if (parents[c], tokens[c]) == (node, token)), None)
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(drafter: Drafter, requests: Iterable[tuple[list[int], list[int]]]) -> Score:
    """Each request a prompt and what follows. The token behind an accepted draft, the bonus, is the truth's own."""
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
    """With every 40th token or so changed, dropped or doubled."""
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
    """Documents, of which the last are requests."""

    corpus: list[list[int]]
    requests: list[list[int]]
    prompt: int  # tokens of a prompt, and of what follows, at most
    output: int

    def continued(self) -> Iterator[tuple[list[int], list[int]]]:
        for document in self.requests:
            head = min(self.prompt, len(document) // 2)
            yield document[:head], document[head : head + self.output]

    def score(self, make: Callable[[], Drafter], held: int) -> Score:
        """Of all requests by one drafter, which holds that much of the other documents."""
        drafter = make()
        for document in reversed(self.corpus):  # the nearest, and the nearest of them last
            if held <= 0:
                break
            drafter.learn(document[:held])
            held -= len(document)
        return replay(drafter, self.continued())

    def score_edits(self, make: Callable[[], Drafter]) -> Score:
        """Of each request by a drafter of its own."""
        rng, total = random.Random(0), Score(0, 0, 0, 0.0)
        for document in self.requests:
            truth = document[: self.output]
            total += replay(make(), [(edited(truth, rng), truth)])
        return total


def numbers(text: str) -> list[int]:
    return [int(float(item)) for item in text.split(",") if item]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="tokens, or text")
    parser.add_argument("--suffix", default="", help="of the files of a folder")
    parser.add_argument("--drafts", type=numbers, default=[8, 16, 32], help="nodes beyond the root (8,16,32)")
    parser.add_argument("--warm", type=numbers, default=[], help="tokens held at the start, several with commas")
    parser.add_argument("--requests", type=int, default=40, help="the last documents of the file (40)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt, at most half the document (256)")
    parser.add_argument("--output", type=int, default=512, help="tokens replayed, at most (512)")
    parser.add_argument("--mode", choices=["tree", "chain"], default="tree")
    parser.add_argument("--own-weight", type=float, default=4.0)
    parser.add_argument("--recency", type=float, default=1.0)
    parser.add_argument("--min-prob", type=float, default=0.0)
    parser.add_argument("--peers", action="store_true", help="beside other packages' drafters")
    parser.add_argument("--json", type=Path, help="write the scores to a file, too")
    return parser.parse_args(arguments)


def command_line(args: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Without the places of files."""
    files = {str(args.file), str(args.json)}
    return " ".join(
        [f"python -m specdec_kernels.bench.engine.{NAME}", *(Path(a).name if a in files else a for a in arguments)]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    documents = [d for d in read_documents(args.file, args.suffix) if len(d) >= 32]
    if not documents:
        print(f"ngram_replay: {args.file} has no document of 32 tokens or more", file=sys.stderr)
        return 2
    text = Text(documents[: -args.requests], documents[-args.requests :], args.prompt, args.output)
    options = {name: getattr(args, name) for name in ("mode", "own_weight", "recency", "min_prob")}
    tokens, asked = sum(map(len, documents)), sum(map(len, text.requests))
    makers: dict[str, Callable[[int, int], Drafter]] = {
        "index": lambda drafts, held: Index(drafts, max(held, 1 << 17) + asked, options)
    }
    if args.peers:
        from ..ops.baselines.ngram import ngram_drafters

        makers |= {name: lambda drafts, held, make=make: make(drafts) for name, make in ngram_drafters().items()}

    print(f"{len(documents)} documents, {tokens} tokens; the last {len(text.requests)} are requests")
    print(f"{'':>12} {'drafts':>6} {'':>16} {'accepted':>9} {'drafted':>8} {'us':>8} {'lookups':>8}")
    results: list[Result] = []
    for workload, held in [("cold", 0), *((f"warm {held:.0e}", held) for held in args.warm), ("edit", 0)]:
        for drafts in args.drafts:
            for name, maker in makers.items():
                make = partial(maker, drafts, held)
                score = text.score_edits(make) if workload == "edit" else text.score(make, held)
                facts = score.facts()
                params = {"text": args.file.stem, "workload": workload, "drafts": drafts, "drafter": name}
                results.append(Result(NAME, params, "cpu", facts=facts))
                print(
                    f"{workload:>12} {drafts:>6} {name:>16} {facts['accepted']:>9.3f} {facts['drafted']:>8.1f} "
                    f"{facts['us']:>8.1f} {score.lookups:>8}",
                    flush=True,
                )
    if args.json:
        command = command_line(args, sys.argv[1:] if arguments is None else arguments)
        run = record(results, torch.device("cpu"), None, command)
        args.json.write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
