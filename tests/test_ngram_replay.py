"""The replay of text against the n-gram index: what it counts, and the files it reads."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as sd

np = pytest.importorskip("numpy")
replay: Any = import_module("specdec_kernels.bench.ngram_replay")


def test_counts_what_verification_would_accept() -> None:
    index = sd.NgramIndex(1000, 1, 100)
    index.insert(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int32))
    score = replay.replay(index, iter([([9, 1], [2, 3, 4, 40, 5, 6, 7, 8])]), 2, {})
    # 1 -> 2 3 and the bonus 4; 4 -> (5 6), bonus 40; nothing known of 40, bonus 5; 5 -> 6 7 and the bonus 8.
    assert (score.lookups, score.accepted, score.drafted) == (4, 4, 6)


def test_accepted_length_walks_the_branches() -> None:
    tokens, parents = [9, 1, 2, 5, 6], [-1, 0, 0, 2, 1]
    assert [replay.accepted_length(tokens, parents, 5, truth) for truth in ([2, 5, 1], [1, 6], [3], [])] == [2, 2, 0, 0]
    assert replay.accepted_length(tokens, parents, 3, [2, 5]) == 1


def test_files(tmp_path: Path) -> None:
    want = [[1, 2, 3], [4], [], [5, 6]]
    tokens = np.array([1, 2, 3, -1, 4, -1, -1, 5, 6], np.int64)
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.i32").write_bytes(tokens.astype("<i4").tobytes())
    for name in ("a.npy", "a.i32"):
        assert [d.tolist() for d in replay.read_documents(tmp_path / name, "")] == want
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.py").write_text("def f():\n    return 12\n")
    (tmp_path / "text" / "c.py").write_text("def f():")
    first, second = replay.read_documents(tmp_path / "text", ".py")
    assert second.tolist() == first[: len(second)].tolist()


def test_scores_of_a_text_that_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phrase = np.random.default_rng(0).integers(0, 99, 50)
    np.save(tmp_path / "a.npy", np.concatenate([np.append(np.tile(phrase, 8), -1) for _ in range(6)]))
    arguments = [tmp_path / "a.npy", "--requests", 2, "--drafts", "4,8", "--warm", "1e3", "--json", tmp_path / "out"]
    assert replay.main([str(a) for a in arguments]) == 0
    scores = json.loads((tmp_path / "out").read_text())["scores"]
    assert [(s["workload"], s["drafts"]) for s in scores] == [
        (name, drafts) for name in ("cold", "warm 1e+03", "edit") for drafts in (4, 8)
    ]
    for score in scores:
        assert score["accepted"] <= score["drafted"] <= score["lookups"] * score["drafts"]
        assert score["accepted"] > score["lookups"] * score["drafts"] / 2
    assert capsys.readouterr().out.splitlines()[0] == "6 documents, 2400 tokens; the last 2 are requests"


def test_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("short")
    assert replay.main([str(tmp_path / "a.txt")]) == 2
    assert "has no document of 32 tokens or more" in capsys.readouterr().err
