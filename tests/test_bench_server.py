"""A server beside its engine: every text is the planted one, the record has all facts, and the report shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_kernels.models.planted import PlantedText

pytest.importorskip("uvicorn")
server = pytest.importorskip("specdec_kernels.bench.server", reason="bench/ is not beside the package here")

TINY = ["--shape", "tiny", "--device", "cpu", "--input", "24", "--output", "16", "--prefix", "128", "--repeats", "1"]


def test_the_tiny_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar")
    file = tmp_path / "run.json"
    options = ["--concurrency", "1,3", "--json-clients", "2", "--json", str(file)]
    assert server.main([*TINY, *options]) == 0
    assert "tiny float32, 24 tokens in, 16 out" in capsys.readouterr().out
    run = json.loads(file.read_text())
    assert [(r["params"]["prompts"], r["params"]["concurrency"]) for r in run["results"]] == [
        ("even", 1), ("even", 3), ("prefix", 1), ("json", 2)
    ]  # fmt: skip
    one, three, prefix, held = (r["facts"] for r in run["results"])
    for facts in (one, three):
        assert facts["tokens_per_second"] > 0 and facts["generate_tokens_per_second"] > 0
        assert facts["generate_first_token_ms"] > 0
        assert 0 <= facts["event_ms"] <= facts["event_p99_ms"]  # 0 where a busy client finds all events at once
    assert prefix["cached_tokens"] == 112 and prefix["first_token_ms"] > 0
    assert held["tokens_per_second"] > 0 and held["free_tokens_per_second"] > 0
    report = pytest.importorskip("specdec_kernels.bench.report").report({"cpu-server": run})
    assert "### server" in report and "| chain (5, 1, 6) | 3 | even |" in report


def test_a_text_that_strays_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server.Spelling, "text", lambda self, tokens: "other")
    assert server.main([*TINY, "--concurrency", "1", "--algorithm", "none"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_text_is_json_from_where_it_begins() -> None:
    text = PlantedText.of(2000, 512)
    spelling = server.Spelling(text, [128, 384])
    written = spelling.text(text.tokens(128, 256))
    assert json.loads(written + '"]') == [" ".join(map(str, range(at, at + 64))) for at in range(128, 384, 64)]
    tokenizer = spelling.tokenizer()
    assert tokenizer.decode(text.tokens(100, 200)) == spelling.text(text.tokens(100, 200))
    assert len(tokenizer) == 2000 and tokenizer.eos_token_id not in text.order.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "/"], "server: --json / cannot be written, expected a file's name"),
        (["--algorithm", "x"], "'x' is not one of"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    try:
        code = server.main([*TINY, *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err
