"""Wrong options and combinations: exit code 2 and a line that names the option, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_kernels import cli
from specdec_kernels.cli.optional_dependencies import unwritable
from specdec_kernels.engine import Engine, EngineOptions
from specdec_kernels.tiny import tiny_model

GENERATE = ["generate", "--device", "cpu", "--no-compare"]
ROUND = ["bench", "round", "--device", "cpu", "--algorithm", "none"]
ENGINES = ["bench", "engines", "--device", "cpu", "--out", "checkpoints"]
AT_ONE_SERVER = ["check-exact", "--server", "http://127.0.0.1:1"]


def last_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Return the last line that a refused command prints, without the command's name."""
    try:
        code: object = cli.main(arguments)
    except SystemExit as exit:  # of argparse
        code = exit.code
    assert code == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    return err.splitlines()[-1].partition(": ")[2].removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", ""], "argument model: it is empty, expected a value"),
        (["serve", "--model-path", ""], "argument --model-path: it is empty, expected a value"),
        (["serve", "--ssl-certfile", ""], "argument --ssl-certfile: it is empty, expected a value"),
        (["tune", "a", "--out", ""], "argument --out: it is empty, expected a value"),
        ([*AT_ONE_SERVER, "--report", ""], "argument --report: it is empty, expected a value"),
        (["bench", "round", "--json", ""], "argument --json: it is empty, expected a value"),
        (["chat", "--max-running-requests=5"], "unrecognized arguments: --max-running-requests=5"),
        (["bench", "round", "--layers", "99999999999"],
         "argument --layers: '99999999999' is above 2147483647, the largest allowed"),
        ([*AT_ONE_SERVER, "--timeout", "1e10"], "argument --timeout: '1e10' is above 1000000000, the largest allowed"),
        ([*AT_ONE_SERVER, "--rounding", "inf"], "argument --rounding: 'inf' is not a number of at least 0"),
    ],
)  # fmt: skip
def test_parser_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert last_line(capsys, arguments) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--upload-seconds", "nan"], "--upload-seconds is nan, expected at least 0.01"),
        (["serve", "--drain-seconds", "9" * 12], f"--drain-seconds is {'9' * 12}, expected at most 1e+09"),
        (["serve", "--allowed-origins", "https://a.com/"],
         "--allowed-origins has https://a.com/, expected * or an origin such as https://example.com"),
        (["serve", "--api-key", "a\nb"],
         "--api-key has a character that no header can have there, expected printable ASCII"),
        ([*GENERATE, "--speculative-num-steps", "3"], "--speculative-num-steps is 3, expected none for NGRAM"),
        ([*GENERATE, "--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "0"],
         "--speculative-eagle-topk is 0, expected 1 to 64"),
        ([*GENERATE, "--speculative-algorithm", "NONE", "--speculative-adaptive"],
         "--speculative-adaptive is set, expected none for NONE"),
        ([*GENERATE, "--seed", "3"], "--seed is 3, expected none at --temperature 0"),
        ([*GENERATE, "--compare-transformers"], "--compare-transformers is set, expected not with --no-compare"),
        ([*GENERATE, "--disable-custom-all-reduce"],
         "--disable-custom-all-reduce is set, expected only with --tp above 1"),
        ([*GENERATE, "--page-size", "0"], "--page-size is 0, expected at least 1"),
        ([*GENERATE, "--speculative-num-draft-tokens", "999"],
         "--speculative-num-draft-tokens is 999, expected 1 to 256"),
        ([*GENERATE, "--tuning", "/nowhere"],
         "--tuning is /nowhere, expected a file that can be read (No such file or directory)"),
        ([*GENERATE, "--speculative-ngram-corpus", "/nowhere"],
         "--speculative-ngram-corpus is /nowhere, expected a file that can be read (No such file or directory)"),
        (["tune", "/a", "--speculative-eagle-topk", "4"], "--speculative-eagle-topk is 4, expected none for NGRAM"),
        (["bench", "--json", "a"], "--json is given, expected not without an op"),
        (["bench", "select_topk", "--quick", "--full"], "--quick is set, expected not with --full"),
        (["bench", "select_topk", "--threshold", "3"], "--threshold is 3, expected none without --baseline"),
        ([*ROUND, "--drafter", "mtp"], "--drafter is given, expected not with --algorithm none alone"),
        ([*ENGINES, "--options", "ours={}", "--options", 'ours={"tp": 1}'],
         "--options is given twice for ours, expected once"),
        ([*ENGINES, "--logs", "/dev/null"], "--logs is /dev/null, expected a folder that can be made"),
        (["bench", "report", "/nowhere"], "results is /nowhere, expected a folder with records"),
        (["check-exact", "--server", "http://[::1"],
         "--server is http://[::1, expected http://HOST:PORT or https://HOST:PORT"),
        (["check-exact", "--serve", "'"],
         "--serve is \"'\", expected arguments as a shell reads them (No closing quotation)"),
    ],
)  # fmt: skip
def test_command_refuses(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert last_line(capsys, arguments) == message


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["serve", "--port=1", "--port", "2"], "--port"),
        (["doctor", "a", "--draft", "b", "--speculative-draft-model-path", "c"], "--speculative-draft-model-path"),
        (["chat", "--speculative-adaptive", "--no-speculative-adaptive"], "--speculative-adaptive"),
        (["chat", "--speculative-ngram-corpus", "a", "--speculative-ngram-corpus", "b"], ""),
        (["doctor", "--json", "--json"], ""),
    ],
)
def test_parser_names_repeated_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--no-such-flag"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "more than once" in line]
    assert lines == ([f"specdec {arguments[0]}: {flag} is given more than once, the last one counts"] if flag else [])


def test_file_that_no_permission_forbids_may_be_unwritable(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    assert unwritable("/proc/specdec") == "cannot be written, expected a file's name"
    assert unwritable(str(file)) is None and unwritable(link) is None
    assert not file.exists() and link.is_symlink()
    file.write_text("kept")
    assert unwritable(link) is None and file.read_text() == "kept"


@pytest.mark.parametrize("name", ["adapter", "tokenizer", "trace", "tuning"])
def test_engine_refuses_empty_paths(name: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineOptions(**{name: ""})
    assert str(error.value) == f"Engine: {name} is '', expected a path or None"


def test_engine_names_a_tuning_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as error:
        Engine(tiny_model("target"), tuning=tmp_path, device="cpu")
    assert str(error.value) == f"Engine: tuning is {tmp_path}, expected a file that can be read (Is a directory)"
