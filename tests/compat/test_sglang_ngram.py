"""compat.sglang.ngram: trees in the form of SGLang's n-gram worker, from texts as its requests hold them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specdec_kernels.compat.sglang.ngram import NgramTrees


def request(rid: str, prompt: list[int], output: list[int]) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids_unpadded=prompt, output_ids=output)


def batch(requests: list[Any], emitted: list[list[int]], nodes: int) -> Any:
    tokens = torch.zeros(len(requests), nodes, dtype=torch.int32)
    for row, last in zip(tokens, emitted, strict=True):
        row[: len(last)] = torch.tensor(last, dtype=torch.int32)
    lens = torch.tensor([len(last) for last in emitted], dtype=torch.int32)
    return SimpleNamespace(reqs=requests, spec_info=SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=lens))


def test_ngram_trees_continue_texts() -> None:
    nodes = 5
    trees = NgramTrees(nodes, 4, 100)
    first = request("a", [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1], [])
    other = request("b", [30, 31, 32], [])
    # With overlap, the outputs do not contain the last round's tokens yet.
    tokens, mask = trees.draft(batch([first, other], [[2, 3], [40]], nodes), overlap=True)
    tree, seen = tokens.reshape(2, nodes), mask.reshape(2, nodes, nodes)
    assert tokens.dtype == np.int64 and mask.dtype == np.bool_
    assert tree[0, 0] == 3 and set(tree[0, 1:3]) == {4, 6}  # both continuations
    assert tree[1].tolist() == [40] * 5
    assert seen[1].tolist() == [[j in (0, i) for j in range(nodes)] for i in range(nodes)]
    parents = [int(np.flatnonzero(row[:i])[-1]) if i else -1 for i, row in enumerate(seen[0])]
    assert parents[:3] == [-1, 0, 0] and all(parent < i for i, parent in enumerate(parents))


def test_ngram_trees_insert_each_text_once() -> None:
    nodes = 4
    trees = NgramTrees(nodes, 2, 100)
    req = request("a", [1, 2, 3], [])
    trees.draft(batch([req], [[4]], nodes), overlap=True)
    assert trees.index.statistics.inserted == 4
    req.output_ids = [4]
    trees.draft(batch([req], [[5, 6]], nodes), overlap=True)
    assert trees.index.statistics.inserted == 6
    req.output_ids = [4, 5, 6]
    trees.draft(batch([req], [[]], nodes), overlap=False)
    assert trees.index.statistics.inserted == 6
    for i in range(6):  # more requests than slots, while the first waits
        trees.draft(batch([request(f"other {i}", [10 * i, 10 * i + 1], [])], [[]], nodes), overlap=False)
    req.output_ids = [4, 5, 6, 1, 2]
    tokens, _ = trees.draft(batch([req], [[]], nodes), overlap=False)
    assert tokens[:3].tolist() == [2, 3, 4]
    trees.clear()
    tokens, _ = trees.draft(batch([request("c", [1, 2], [])], [[]], nodes), overlap=False)
    assert tokens.tolist() == [2, 2, 2, 2]
