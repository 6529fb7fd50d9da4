"""Replays text against the n-gram index: how many drafted tokens are accepted per lookup.

    python -m specdec_kernels.bench.ngram_replay tokens.npy
    python -m specdec_kernels.bench.ngram_replay corpus.i32 --drafts 8,16,32 --warm 100000,1000000
    python -m specdec_kernels.bench.ngram_replay path/to/a/folder --suffix .py

A token file is a NumPy file (`.npy`) or bare little-endian int32; tokens below 0 stand between documents. A folder or
another file is text, cut into pieces much as a tokenizer would, each file a document.

The last documents are requests: of each, the first tokens are the prompt and what follows is what the target would
have said; a draft is accepted as far as it agrees. Requests come one after another and leave their text behind.

  cold    the index starts empty
  warm    it starts with that many tokens of the other documents
  edit    the prompt is the whole document with every 40th token or so changed, dropped or doubled, and what follows is
          the document: no other request is there, as with copying in a chat
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sd

PIECES = re.compile(r"\n[ \t]*| ?[^\W\d_]{1,8}|\d{1,3}| ?[^\w\s]|\s|_")


@dataclass(frozen=True)
class Score:
    """Sums over all lookups of a replay."""

    lookups: int
    accepted: int
    drafted: int
    seconds: float  # inside `draft`, of this thread

    def per_lookup(self, value: float) -> float:
        return value / max(self.lookups, 1)


def read_documents(path: Path, suffix: str) -> list[Tensor]:
    if path.is_dir() or path.suffix not in (".npy", ".i32", ".bin"):
        files = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
        ids: dict[str, int] = {}
        texts = (PIECES.findall(file.read_text("utf-8", "replace")) for file in files if file.is_file())
        return [torch.tensor([ids.setdefault(p, len(ids)) for p in text], dtype=torch.int32) for text in texts]
    if path.suffix == ".npy":
        import numpy as np

        tokens = torch.from_numpy(np.load(path).astype(np.int32).reshape(-1))
    else:
        tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32)
    ends = [-1, *(tokens < 0).nonzero().flatten().tolist(), len(tokens)]
    return [tokens[start + 1 : end] for start, end in pairwise(ends)]


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


def accepted_length(tokens: list[int], parents: list[int], count: int, truth: Sequence[int]) -> int:
    node = length = 0
    for token in truth:
        child = next((c for c in range(node + 1, count) if parents[c] == node and tokens[c] == token), None)
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(
    index: sd.NgramIndex, requests: Iterator[tuple[list[int], list[int]]], drafts: int, options: dict[str, Any]
) -> Score:
    """Each request a prompt and what follows. The token behind an accepted draft, the bonus, is the truth's own."""
    lookups = accepted = drafted = 0
    seconds = 0.0
    slot, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tree, *rest = index.draft(slot, zero, drafts + 1, **options)
    out = {f"out_{n}": t for n, t in zip((*sd.Tree._fields, "scores", "match_len"), (*tree, *rest), strict=True)}
    for prompt, output in requests:
        index.begin(0)
        index.insert(torch.tensor(prompt, dtype=torch.int32), 0)
        at = 0
        while at < len(output):
            start = time.thread_time()
            index.draft(slot, zero, drafts + 1, **options, **out)
            seconds += time.thread_time() - start
            count = int(tree.num_nodes[0])
            length = accepted_length(tree.tokens[0].tolist(), tree.parents[0].tolist(), count, output[at:])
            index.insert(torch.tensor(output[at : at + length + 1], dtype=torch.int32), 0)
            at += length + 1
            lookups, accepted, drafted = lookups + 1, accepted + length, drafted + count - 1
    return Score(lookups, accepted, drafted, seconds)


def numbers(text: str) -> list[int]:
    return [int(float(item)) for item in text.split(",") if item]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ngram_replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    parser.add_argument("--json", type=Path, help="write the scores to a file, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    documents = [d for d in read_documents(args.file, args.suffix) if len(d) >= 32]
    if not documents:
        print(f"ngram_replay: {args.file} has no document of 32 tokens or more", file=sys.stderr)
        return 2
    last = [d.tolist() for d in documents[-args.requests :]]
    corpus = documents[: -args.requests]
    options = {name: getattr(args, name) for name in ("mode", "own_weight", "recency", "min_prob")}

    def continued() -> Iterator[tuple[list[int], list[int]]]:
        for document in last:
            head = min(args.prompt, len(document) // 2)
            yield document[:head], document[head : head + args.output]

    scores: list[dict[str, Any]] = []

    def report(workload: str, drafts: int, score: Score) -> None:
        scores.append({"workload": workload, "drafts": drafts, **asdict(score)})
        print(
            f"{workload:>12} {drafts:>6} {score.per_lookup(score.accepted):>9.3f} "
            f"{score.per_lookup(score.drafted):>8.1f} {1e6 * score.per_lookup(score.seconds):>8.1f} {score.lookups:>8}",
            flush=True,
        )

    sizes = [len(d) for d in documents]
    print(f"{len(documents)} documents, {sum(sizes)} tokens; the last {len(last)} are requests")
    print(f"{'':>12} {'drafts':>6} {'accepted':>9} {'drafted':>8} {'us':>8} {'lookups':>8}")
    for held in (0, *args.warm):
        for drafts in args.drafts:
            index = sd.NgramIndex(max(held, 1 << 17) + sum(sizes[-args.requests :]), 1, 1 << 20)
            room = held
            for document in reversed(corpus):  # the nearest, and the nearest of them last
                if room <= 0:
                    break
                index.insert(document[:room].contiguous())
                room -= len(document)
            report("cold" if held == 0 else f"warm {held:.0e}", drafts, replay(index, continued(), drafts, options))
    for drafts in args.drafts:
        sums = [0, 0, 0, 0.0]
        rng = random.Random(0)
        for document in last:
            truth = document[: args.output]
            index = sd.NgramIndex(1 << 14, 1, 1 << 14)
            part = replay(index, iter([(edited(truth, rng), truth)]), drafts, options)
            sums = [a + b for a, b in zip(sums, asdict(part).values(), strict=True)]
        report("edit", drafts, Score(*sums))  # type: ignore[arg-type]
    if args.json:
        args.json.write_text(json.dumps({"options": options, "scores": scores}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
