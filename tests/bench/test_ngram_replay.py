"""`specdec bench ngram-replay`: what it counts, and the files it reads."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_kernels import cli

np = pytest.importorskip("numpy")
replay: Any = import_module("specdec_kernels.bench.engine.ngram_replay")


def test_replay_counts_tokens_that_verification_accepts() -> None:
    index = replay.Index(2, 1000, {})
    index.learn([1, 2, 3, 4, 5, 6, 7, 8])
    score = replay.replay(index, [([9, 1], [2, 3, 4, 40, 5, 6, 7, 8])])
    # 1 -> 2 3 and the bonus 4; 4 -> (5 6), bonus 40; 40 for 5 -> (6 7), bonus 5; 5 -> 6 7 and the bonus 8.
    assert (score.lookups, score.accepted, score.drafted) == (4, 4, 8)


def test_accepted_length_walks_the_branches() -> None:
    tokens, parents = [9, 1, 2, 5, 6], [-1, 0, 0, 2, 1]
    assert [replay.accepted_length(tokens, parents, truth) for truth in ([2, 5, 1], [1, 6], [3], [])] == [2, 2, 0, 0]
    assert replay.accepted_length(tokens[:3], parents[:3], [2, 5]) == 1


def test_read_documents_of_tokens_and_text(tmp_path: Path) -> None:
    want = [[1, 2, 3], [4], [], [5, 6]]
    tokens = np.array([1, 2, 3, -1, 4, -1, -1, 5, 6], np.int64)
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.i32").write_bytes(tokens.astype("<i4").tobytes())
    for name in ("a.npy", "a.i32"):
        assert replay.read_documents(tmp_path / name, "") == want
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.py").write_text("def f():\n    return 12\n")
    (tmp_path / "text" / "c.py").write_text("def f():")
    first, second = replay.read_documents(tmp_path / "text", ".py")
    assert second == first[: len(second)] and 0 not in first  # 0 fills the trees of another package


def test_replay_accepts_drafts_of_a_repeated_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phrase = np.random.default_rng(0).integers(0, 99, 50)
    np.save(tmp_path / "a.npy", np.concatenate([np.append(np.tile(phrase, 8), -1) for _ in range(6)]))
    arguments = [tmp_path / "a.npy", "--requests", 2, "--drafts", "4,8", "--warm", "1e3", "--json", tmp_path / "out"]
    assert cli.main(["bench", "ngram-replay", *map(str, arguments)]) == 0
    run = json.loads((tmp_path / "out").read_text())
    assert run["command"] == "specdec bench ngram-replay a.npy --requests 2 --drafts 4,8 --warm 1e3 --json out"
    params = [result["params"] for result in run["results"]]
    assert all(p["drafter"] == "index" and p["text"] == "a" for p in params)
    assert [(p["workload"], p["drafts"]) for p in params] == [
        (name, drafts) for name in ("cold", "warm 1e+03", "edit") for drafts in (4, 8)
    ]
    for p, facts in zip(params, (result["facts"] for result in run["results"]), strict=True):
        assert p["drafts"] / 2 < facts["accepted"] <= facts["drafted"] <= p["drafts"]
    assert capsys.readouterr().out.splitlines()[0] == "6 documents, 2400 tokens; the last 2 are requests"


def test_replay_refuses_a_text_without_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("short")
    assert cli.main(["bench", "ngram-replay", str(tmp_path / "a.txt")]) == 2
    assert "has no document of 32 tokens or more" in capsys.readouterr().err


class Canned:
    """A package that drafts what the test sets."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.calls.append((name, arguments)) or self._answers.get(name)


def test_replay_calls_other_drafters_as_their_engines_do() -> None:
    baselines: Any = import_module("specdec_kernels.bench.engine.ngram_baselines")
    found = SimpleNamespace(token_ids=[4, 5, 6], parents=[-1, 0, -1])
    cache = Canned(speculate=found)
    trees = baselines.SuffixTrees(SimpleNamespace(SuffixDecodingCache=lambda **_: cache), 3, depth=2, tree=True)
    trees.learn([1, 2])
    trees.begin([7, 8, 9])
    trees.extend([1])
    assert trees.nodes(trees.draft()) == ([1, 4, 5, 6], [-1, 0, 1, 0])
    assert cache.calls == [
        ("start_request", (1, [])),
        ("add_active_response", (1, [1, 2])),
        ("stop_request", (1,)),
        ("start_request", (2, [7, 8, 9])),
        ("add_active_response", (2, [1])),
        ("speculate", (2, [9, 1])),
    ]

    tokens = np.array([9, 4, 6, 5, 0])  # 9 -> 4 -> 5, 9 -> 6, and one that fills the row
    mask = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]])
    inner = Canned(match_stateful=(tokens, mask.reshape(-1)))
    trie = baselines.Trie(SimpleNamespace(get_ngram_corpus_cls=lambda: lambda *_: inner), 4, prompts=True)
    trie.begin([*range(1, 9), 9])
    assert trie.nodes(trie.draft()) == ([9, 4, 6, 5], [-1, 0, 0, 1])
    trie.extend([4])
    inserted = [arguments for name, arguments in inner.calls if name == "insert"]
    assert inserted == [([[*range(1, 10)]],), ([[*range(1, 10)]],)]  # the prompt, then a round late

    lookup = Canned(propose=[[4, 5]])
    prompt_lookup = baselines.PromptLookup(SimpleNamespace(NgramProposer=lambda config: lookup), 3, shortest=2)
    prompt_lookup.begin([7, 8])
    prompt_lookup.extend([9])
    assert prompt_lookup.nodes(prompt_lookup.draft()) == ([9, 4, 5], [-1, 0, 1])
    ((name, (drafts, sampled, lengths, texts)),) = lookup.calls
    assert (name, drafts, sampled, lengths.tolist()) == ("propose", 3, [[9]], [3])
    assert texts[0, :4].tolist() == [7, 8, 9, 0]
    prompt_lookup.begin([1])
    assert prompt_lookup.nodes([[]]) == ([1], [-1])
