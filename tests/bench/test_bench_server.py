"""`specdec bench server`: every text is checked, and the record has all facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_kernels import cli
from specdec_kernels.synthetic.models import SyntheticText

pytest.importorskip("uvicorn")
tokenizers = pytest.importorskip("specdec_kernels.bench.server.synthetic_tokenizer", reason="the package has no bench/")

TINY = ["--shape", "tiny", "--device", "cpu", "--input", "24", "--output", "16", "--repeats", "1"]


def bench_server(*options: str) -> int:
    return cli.main(["bench", "server", *TINY, *options])


def test_bench_server_measures_server_and_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    file = tmp_path / "run.json"
    assert bench_server("--concurrency", "1,3", "--json-clients", "2", "--json", str(file)) == 0
    assert "tiny float32, 24 tokens in, 16 out" in capsys.readouterr().out
    run = json.loads(file.read_text())
    assert [(r["params"]["prompts"], r["params"]["concurrency"]) for r in run["results"]] == [
        ("even", 1), ("even", 3), ("json", 2)
    ]  # fmt: skip
    one, three, held = (r["facts"] for r in run["results"])
    for facts in (one, three):
        assert facts["tokens_per_second"] > 0 and facts["generate_tokens_per_second"] > 0
        assert facts["generate_first_token_ms"] > 0
        assert 0 <= facts["event_ms"] <= facts["event_p99_ms"]  # 0 where a busy client finds all events at once
    assert held["tokens_per_second"] > 0 and held["free_tokens_per_second"] > 0
    report = pytest.importorskip("specdec_kernels.bench.report.report").report({"cpu-server": run})
    assert "### server" in report and "| chain (5, 1, 6) | 3 | even |" in report


def test_bench_server_reports_a_wrong_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tokenizers.SyntheticTokenizer, "decode", lambda self, tokens: "other")
    assert bench_server("--concurrency", "1", "--algorithm", "none") == 1
    captured = capsys.readouterr()
    assert "WRONG" in captured.out and "request 0 differs from the synthetic text" in captured.err


def test_synthetic_tokenizer_spells_json() -> None:
    text = SyntheticText.of(2000, 512)
    synthetic = tokenizers.SyntheticTokenizer(text, [128, 384])
    written = synthetic.decode(text.tokens(128, 256))
    assert json.loads(written + '"]') == [" ".join(map(str, range(at, at + 64))) for at in range(128, 384, 64)]
    tokenizer = synthetic.fast()
    assert tokenizer.decode(text.tokens(100, 200)) == synthetic.decode(text.tokens(100, 200))
    assert len(tokenizer) == 2000 and tokenizer.eos_token_id not in text.order.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "/"], "specdec bench server: --json / cannot be written, expected a file's name"),
        (["--algorithm", "x"], "'x' is not one of"),
    ],
)
def test_bench_server_refuses_bad_flags(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    try:
        code = bench_server(*options)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err
