"""A server beside its engine: every text is the planted one, the record has all facts, and the report shows them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.synthetic.models import PlantedText

pytest.importorskip("uvicorn")
server = pytest.importorskip("specdec_kernels.bench.server.server", reason="bench/ is not beside the package here")

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
    report = pytest.importorskip("specdec_kernels.bench.report.report").report({"cpu-server": run})
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
        (["--engines", "sglang"], "server: --engines has sglang, expected --out DIR beside it, for its checkpoints"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    try:
        code = server.main([*TINY, *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_another_server_is_asked_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours in the place of SGLang's, from the checkpoints that it would read."""
    pytest.importorskip("xgrammar")
    sglang = pytest.importorskip("specdec_kernels.bench.compare.engines.sglang")

    def started(job: Any, algorithm: Any, port: int) -> list[str]:
        told = sglang.settings(job, algorithm)
        flags = {
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": told["speculative_draft_model_path"],
        }
        words = [word for flag in flags.items() for word in flag]
        served = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", sglang.SERVED]
        main = "from specdec_kernels.cli import main; raise SystemExit(main())"
        return [sys.executable, "-c", main, "serve", told["model_path"], *words, *served]

    monkeypatch.setattr(sglang.Runner, "server", started)
    monkeypatch.setattr(server, "is_installed", lambda engine, folders: True)
    file = tmp_path / "run.json"
    options = ["--concurrency", "2", "--json-clients", "2", "--engines", "sglang", "--out", str(tmp_path)]
    assert server.main([*TINY, *options, "--json", str(file)]) == 0, capsys.readouterr()
    results = json.loads(file.read_text())["results"]
    assert [(r["params"]["server"], r["params"]["prompts"], r["error"], r["skipped"]) for r in results] == [
        ("sglang", "even", None, None), ("sglang", "prefix", None, None), ("sglang", "json", None, None)
    ]  # fmt: skip
    assert "generate_tokens_per_second" not in results[0]["facts"]


def test_a_server_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sglang = pytest.importorskip("specdec_kernels.bench.compare.engines.sglang")
    monkeypatch.setattr(sglang.Runner, "server", lambda *_: [sys.executable, "-c", "print('no room'); exit(3)"])
    monkeypatch.setattr(server, "is_installed", lambda engine, folders: True)
    options = ["--concurrency", "1", "--engines", "sglang", "--out", str(tmp_path)]
    assert server.main([*TINY, *options]) == 2
    assert "server: sglang does not serve:\nno room" in capsys.readouterr().err
