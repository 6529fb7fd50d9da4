"""The command line, called as a function; in a process of its own only where other packages must be missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels
from specdec_kernels import cli
from specdec_kernels.bench.ops import baseline, cases, timing
from specdec_kernels.bench.ops.check import WrongResult, expect_close, expect_equal, expect_near
from specdec_kernels.bench.ops.harness import Baseline, Case, Work
from specdec_kernels.bench.report import headline, plot, report, tables
from specdec_kernels.bench.report.record import SCHEMA, line, read_record, record
from specdec_kernels.cli import table
from specdec_kernels.cli.arguments import CommandParser
from specdec_kernels.cli.bench import ops
from specdec_kernels.ops._op_list import public_ops

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_SECONDS", 0.01)


def without(*packages: str) -> str:
    """Return the start of a Python program in which these packages cannot be imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


# --- help -------------------------------------------------------------------------------------------------------------


def test_cli_without_arguments_prints_help(capsys: Capture) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: specdec <command> [options]")
    assert "Start with `specdec info`" in text


@pytest.mark.parametrize("command", [module.__name__.rsplit(".", 1)[1].replace("_", "-") for module in cli.COMMANDS])
def test_every_command_is_listed_and_has_help(capsys: Capture, command: str) -> None:
    cli.main([])
    assert re.search(rf"\n    {command}\s", capsys.readouterr().out)
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: specdec {command}")


def benchmarks() -> list[str]:
    bench = next(action.choices for action in cli.make_parser()._actions if isinstance(action.choices, dict))["bench"]
    assert isinstance(bench, CommandParser)
    return list(bench.commands)


@pytest.mark.parametrize("name", benchmarks())
def test_every_benchmark_is_listed_and_has_help(capsys: Capture, name: str) -> None:
    for arguments, expected in ((["bench"], name), (["bench", name], f"usage: specdec bench {name} ")):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--help"])
        assert stop.value.code == 0 and expected in capsys.readouterr().out


# Spellings of earlier versions: command, flag with a value, and what it is now.
ALIASES = [
    ("generate", "--model=m", "--model-path=m"),
    ("generate", "--kv-dtype=fp8_e4m3", "--kv-cache-dtype=fp8_e4m3"),
    ("generate", "--mem-fraction=0.5", "--mem-fraction-static=0.5"),
    ("generate", "--batch-invariant", "--enable-deterministic-inference"),
    ("generate", "--no-cuda-graph", "--disable-cuda-graph"),
    ("doctor m", "--draft=d", "--speculative-draft-model-path=d"),
    ("doctor m --draft=d", "--algorithm=EAGLE", "--speculative-algorithm=EAGLE"),
    ("doctor m --draft=d", "--num-steps=3", "--speculative-num-steps=3"),
    ("doctor m --draft=d", "--chat-template", "--apply-chat-template"),
    ("doctor m --draft=d", "--no-chat-template", "--no-apply-chat-template"),
    ("doctor m --draft=d", "--kv-dtype=fp8_e4m3", "--kv-cache-dtype=fp8_e4m3"),
    ("tune m", "--draft=d", "--speculative-draft-model-path=d"),
    ("tune m --draft=d", "--algorithm=EAGLE3", "--speculative-algorithm=EAGLE3"),
    ("tune m --draft=d", "--num-steps=1,2", "--speculative-num-steps=1,2"),
    ("tune m --draft=d", "--topk=1,4", "--speculative-eagle-topk=1,4"),
    ("tune m --draft=d", "--nodes=8", "--speculative-num-draft-tokens=8"),
    ("tune m --draft=d", "--kv-dtype=fp8_e4m3", "--kv-cache-dtype=fp8_e4m3"),
    ("bench moe_route", "--taken=8", "--top-k=8"),
]


@pytest.mark.parametrize(("command", "earlier", "now"), ALIASES, ids=lambda value: value.replace(" ", "_"))
def test_earlier_spellings_of_flags_work_and_are_hidden(capsys: Capture, command: str, earlier: str, now: str) -> None:
    words = command.split()
    parse = cli.make_parser().parse_args
    assert parse([*words, earlier]) == parse([*words, now])
    assert f"{earlier.split('=')[0]} is " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*(word for word in words if not word.startswith("-")), "--help"])
    flags = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert now.split("=")[0] in flags and earlier.split("=")[0] not in flags


def test_engine_flags_set_options_of_the_engine() -> None:
    from dataclasses import fields

    from specdec_kernels.cli.engine_flags import FLAGS, options_of
    from specdec_kernels.engine import EngineOptions

    assert {flag.option for flag in FLAGS.values()} <= {field.name for field in fields(EngineOptions)}
    defaults = EngineOptions()
    for flag, option in (("--page-size", "page_size"), ("--chunked-prefill-size", "prefill_chunk")):
        assert f"({getattr(defaults, option)})" in FLAGS[flag].parser["help"]
    parse = cli.make_parser().parse_args
    assert options_of(parse(["generate"])) == defaults
    words = ["--dtype=float16", "--disable-cuda-graph", "--mem-fraction-static=0.5", "--enable-deterministic-inference"]
    given = options_of(parse(["generate", *words, "--kv-cache-dtype=fp8_e4m3"]))
    assert (given.dtype, given.cuda_graph, given.mem_fraction) == (torch.float16, False, 0.5)
    assert given.batch_invariant and given.kv_dtype == "fp8_e4m3"


def test_names_for_parsers_are_those_of_the_tables() -> None:
    from specdec_kernels.bench.compare import engines
    from specdec_kernels.bench.engine import round
    from specdec_kernels.cli.bench import engines as engine_names
    from specdec_kernels.cli.bench import rounds as round_names
    from specdec_kernels.synthetic import acceptance, names, shapes

    assert set(names.SHAPES) == set(shapes._CONFIGS) and set(names.DOMAINS) == set(acceptance.RATES)
    assert all(tuple(rates) == names.DRAFTERS for rates in acceptance.RATES.values())
    assert tuple(round.ALGORITHMS) == round_names.SETTINGS
    assert tuple(engines.PACKAGES) == engine_names.ENGINES and tuple(engines.ALGORITHMS) == engine_names.ALGORITHMS


def test_cli_prints_its_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"specdec_kernels {specdec_kernels.__version__}\n"


def test_cli_refuses_an_unknown_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["frobnicate"])
    assert stop.value.code == 2
    assert "invalid choice: 'frobnicate'" in capsys.readouterr().err


def test_cli_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec_kernels", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"specdec_kernels {specdec_kernels.__version__}\n"


# --- info -------------------------------------------------------------------------------------------------------------


def test_info(capsys: Capture) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"specdec_kernels       {specdec_kernels.__version__}\n" in text
    assert f"torch                 {importlib.metadata.version('torch')}\n" in text
    assert "DLPack exchange API   yes" in text
    for op in public_ops():
        assert op in text


def test_info_json(capsys: Capture) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["specdec_kernels"] == specdec_kernels.__version__
    assert facts["cuda_version"] == specdec_kernels.cuda_version
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert list(facts["ops"]) == public_ops()
    halves = ["cpu", "cuda"] if specdec_kernels.cuda_version else ["cpu"]
    assert facts["ops"]["select_topk"] == halves
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_info_describes_a_model_by_its_config(capsys: Capture, tmp_path: Path) -> None:
    """By its config alone: there are no weights."""
    from transformers import AutoConfig

    def of(model_type: str) -> str:
        AutoConfig.for_model(model_type, num_hidden_layers=2).save_pretrained(tmp_path / model_type)
        return str(tmp_path / model_type)

    native, other = of("qwen3"), of("biogpt")
    assert cli.main(["info", native]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["model", native],
        ["model_type", "qwen3"],
        ["implementation", "native"],
        ["layers", "native"],
        ["linears", "in the engine's dtype"],
        ["windows", "all rows in every layer"],
        ["features", "states that enter any of 2 layers or leave the last"],
        ["rounds", "captured as CUDA graphs"],
    ]
    assert cli.main(["info", other, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model_type"] == "biogpt" and facts["layers"].startswith("by transformers, with our attention")
    assert cli.main(["info", of("mamba")]) == 2
    out, err = capsys.readouterr()
    assert not out and err == "specdec info: model: mamba has no attention in its layers, expected a model that has\n"
    assert cli.main(["info", "/nowhere"]) == 2
    assert capsys.readouterr().err == "specdec info: model is /nowhere, expected an existing folder or a hub id\n"


def test_info_names_a_cpu_build(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec_kernels, "cuda_version", None)
    monkeypatch.setattr(specdec_kernels, "cuda_architectures", None)
    cli.main(["info"])
    assert "CUDA build            CPU only: built without nvcc\n" in capsys.readouterr().out


def test_info_needs_the_standard_library_only() -> None:
    code = without("torch", "numpy", "rich", "transformers") + "; from specdec_kernels.cli import main; main(['info'])"
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr
    assert "torch does not import" in done.stdout  # its metadata is still there
    assert "\nselect_topk" in done.stdout


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("torch", "rich"), 'specdec bench needs torch and rich: pip install "specdec-kernels[bench]"\n'),
        (("rich",), 'specdec bench needs rich: pip install "specdec-kernels[bench]"\n'),
    ],
    ids=["torch+rich", "rich"],
)
def test_bench_names_what_is_missing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], message: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    assert cli.main(["bench", "select_topk"]) == 2
    assert capsys.readouterr().err == message


def test_bench_lists_ops(capsys: Capture) -> None:
    assert cli.main(["bench"]) == 0
    text = capsys.readouterr().out
    for name in [*cases.CASES, "call_overhead"]:
        assert name in text


def test_bench_one_op(capsys: Capture, tmp_path: Path, short_rounds: None) -> None:
    file = tmp_path / "run.json"
    assert cli.main(["bench", "select_topk", "--quick", "--device", "cpu", "--batch", "2,3", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "of floor" in text and "batch=3 " in text
    run = json.loads(file.read_text())
    assert run.keys() == {"schema", "date", "command", "specdec_kernels", "machine", "ceilings", "results"}
    assert run["schema"] == SCHEMA
    assert run["command"].startswith("specdec bench select_topk --quick")
    assert run["machine"].keys() == {"device", "name", "driver", "torch", "python"}
    assert run["ceilings"].keys() == {"copy_gb_s", "read_gb_s", "tflop_s"}
    assert [r["params"]["batch"] for r in run["results"]] == [2, 3]
    for r in run["results"]:
        assert r["error"] is None and r["time_us"] > 0 and r["p90_us"] >= r["time_us"]
        assert r["floor_us"] > 0 and r["bytes"] > 0 and r["baselines"]["torch"] > 0


def test_results_readme_defines_every_field() -> None:
    readme = Path(__file__).parents[2] / "bench/results/README.md"
    from specdec_kernels.bench.ops.harness import Result

    run = record([Result("op", {}, "cpu")], torch.device("cpu"), None, "")
    for field in [*run, *line(Result("op", {}, "cpu", between=timing.Times(1.0, 1.0, 1.0)))]:
        assert f"`{field}`" in readme.read_text(), field


def test_bench_call_overhead_times_calls(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert cli.main(["bench", "call_overhead", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["ceilings"] is None
    nanoseconds = {r["params"]["call"]: r["host_us"] * 1e3 for r in run["results"]}
    assert 0 < nanoseconds["_C.noop1, torch"] < nanoseconds["_C.noop8, torch"]
    assert "_C.noop8, torch" in capsys.readouterr().out


def doubling(wrong: bool = False, wrong_baseline: bool = False, wrong_package: bool = False) -> Case:
    """Return a case of an op that doubles numbers, and omits the last one if `wrong`."""

    def make(device: torch.device, params: dict[str, Any]) -> Work:
        numbers = torch.arange(params["batch"], device=device)
        out = torch.full_like(numbers, -1)

        def call() -> None:
            out.copy_(2 * numbers)
            if wrong:
                out[-1] = 0

        return Work(
            call=call,
            check=lambda: expect_equal("out", out, 2 * numbers),
            bytes_moved=2 * numbers.nbytes,
            baseline=Baseline("adding", lambda: numbers + numbers + wrong_baseline, lambda o: expect_equal("sum", o, 2 * numbers)),
            packages=[Baseline("shifting", lambda: (numbers << 1) - int(wrong_package), lambda o: expect_equal("shift", o, 2 * numbers))],
        )  # fmt: skip

    return Case("doubling", {"batch": (4, 5)}, make)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (doubling(wrong=True), "out differs in 1 of 4 elements, first at [3]: got 0, expected 6"),
        (doubling(wrong_baseline=True), "baseline adding: sum differs in 4 of 4 elements, first at [0]: got 1, expected 0"),
        (doubling(wrong_package=True), "baseline shifting: shift differs in 4 of 4 elements, first at [0]: got -1, expected 0"),
    ],
    ids=["op", "baseline", "package"],
)  # fmt: skip
def test_bench_does_not_time_a_wrong_result(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_rounds: None, case: Case, message: str
) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": case})
    file = tmp_path / "run.json"
    assert cli.main(["bench", "doubling", "--device", "cpu", "--quick", "--json", str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"wrong result, not timed: doubling batch=4: {message}\n"
    assert "WRONG" in captured.out
    (result,) = json.loads(file.read_text())["results"]
    assert result["error"] == message
    assert [result[key] for key in ("time_us", "p90_us", "host_us", "of_floor")] == [None] * 4
    assert result["baselines"] == {}


def test_bench_times_a_right_result(capsys: Capture, monkeypatch: pytest.MonkeyPatch, short_rounds: None) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    assert cli.main(["bench", "all", "--device", "cpu", "--batch", "4,5"]) == 0  # call_overhead has no batch
    text = capsys.readouterr().out
    assert "batch=4" in text and "batch=5" in text and "adding us" in text and "shifting us" in text


def test_case_sizes_are_a_product_or_vary_one_parameter() -> None:
    cpu = torch.device("cpu")
    grid = {"batch": (1, 2, 8), "nodes": (4, 16), "dtype": ("float32", "float16")}
    product = Case("op", grid, doubling().make)
    assert len(list(product.sizes(cpu))) == 12
    assert list(product.sizes(cpu, quick=True)) == [{"batch": 1, "nodes": 4, "dtype": "float32"}]

    case = Case("op", grid, doubling().make, base={"batch": 2, "nodes": 16, "dtype": "float32"})

    def sizes(**arguments: Any) -> list[tuple[Any, ...]]:
        return [tuple(size.values()) for size in case.sizes(cpu, **arguments)]

    around = [(1, 16, "float32"), (2, 16, "float32"), (8, 16, "float32"), (2, 4, "float32"), (2, 16, "float16")]
    assert sizes() == around
    assert sizes(quick=True) == [(1, 4, "float32")]
    assert sizes(full=True) == list(itertools.product(*grid.values()))
    assert sizes(batch=[3], nodes=[5, 6], dtype=["float16"]) == [(3, 5, "float16"), (3, 6, "float16")]
    assert sizes(batch=[3, 4], nodes=[16]) == [(b, 16, t) for b in (3, 4) for t in ("float32", "float16")]


def test_bench_has_an_option_for_every_parameter() -> None:
    grids = [grid for case in cases.CASES.values() for grid in (case.grid, case.cpu_grid or {}, case.base or {})]
    assert {name for grid in grids for name in grid} == {*ops.NUMBERS, *ops.WORDS}
    for case in cases.CASES.values():
        for name, values in case.grid.items():
            assert name in ops.NUMBERS or set(values) <= set(ops.WORDS[name])
        assert case.base is None or case.base.keys() == case.grid.keys()


def test_bench_takes_sizes_as_options(capsys: Capture) -> None:
    arguments = ["--batch", "2", "--nodes", "4,5", "--k", "3", "--device", "cpu"]
    assert cli.main(["bench", "build_tree", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.count("build_tree") == 1 and "batch=2 nodes=4 k=3" in text and "batch=2 nodes=5 k=3" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nosuchop"],
            "specdec bench: there is no op nosuchop, expected one of doubling, call_overhead, or all\n",
        ),
        (["doubling", "--json", "/nowhere/x.json"], "specdec bench: --json /nowhere/x.json is in no existing folder\n"),
        (["doubling", "--plot", "/nowhere/x.png"], "specdec bench: --plot /nowhere/x.png is in no existing folder\n"),
        (
            ["doubling", "--plot", "x.txt"],
            "specdec bench: --plot x.txt is no picture, expected a name in .png or .svg or .pdf\n",
        ),
        (["doubling", "--dtype", "float32"], "specdec bench: doubling has no dtype, its parameters are batch\n"),
        (
            ["doubling", "--nodes", "4", "--num-steps", "1"],
            "specdec bench: doubling has no nodes or num_steps, its parameters are batch\n",
        ),
        (["call_overhead", "--batch", "4"], "specdec bench: none of these ops has batch\n"),
    ],
    ids=["op", "json", "plot", "picture", "parameter", "parameters", "overhead"],
)
def test_bench_refuses(capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_refuses_cuda_without_a_gpu(capsys: Capture) -> None:
    assert cli.main(["bench", "select_topk", "--device", "cuda"]) == 2
    assert "needs a CUDA build of specdec_kernels and a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--batch", "1,x"],
        ["--nodes", "-1"],
        ["--prefix", "-1"],
        ["--dtype", "int8"],
        ["--mode", "tree,bush"],
        ["--device", "tpu"],
    ],
    ids=" ".join,
)
def test_bench_rejects_values(capsys: Capture, option: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "select_topk", *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select_topk", "--k", "65"], "select_topk: k is 65, expected 1 to 64"),
        (["build_tree", "--nodes", "400"], "build_tree: num_nodes is 400, expected 1 to 256"),
        (["tree_attention", "--batch", "2000000000"], "cpu has not the memory for it"),
    ],
    ids=["select_topk", "build_tree", "memory"],
)
def test_bench_names_a_size_that_cannot_run(capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["bench", *arguments, "--device", "cpu", "--quick"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"not timed: {arguments[0]} ") and captured.err.endswith(f": {message}\n")
    assert "skipped" in captured.out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--batch", "0"], "argument --batch: '0' is not integers of at least 1, separated by commas"),
        (["--batch", "1,,2"], "argument --batch: '1,,2' is not integers of at least 1, separated by commas"),
        (["--threshold", "-1"], "argument --threshold: '-1' is not a number of at least 0"),
        (["--nodes", "4"], "specdec bench round: error: unrecognized arguments: --nodes 4"),
        (["--accept", "0.5"], "argument --accept: '0.5' is not a number of at least 1"),
        (["--accept", "nan"], "argument --accept: 'nan' is not a number of at least 1"),
        (["--input", "0"], "argument --input: '0' is not an integer of at least 1"),
        (["--speculative-num-steps", "x"], "argument --speculative-num-steps: 'x' is not an integer of at least 1"),
        (["--acceptance", "poetry"], "argument --acceptance: 'poetry' is not one of chat, code, math, wrong"),
        (
            ["--algorithm", "tree0"],
            "argument --algorithm: 'tree0' is not one of none, chain, tree, mtp_chain, mtp_tree, mtp_adaptive, standalone, "
            "dspark_chain, dspark_tree, dspark_adaptive, dflash_chain, dflash_tree, adaptive, nor chain or tree with a number, "
            "nor one with +ngram",
        ),
        (["--algorithm", "standalone+ngram"], "argument --algorithm: 'standalone+ngram' is not one of none, chain"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_rejects_numbers(capsys: Capture, option: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "round", *option])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "doubling"], "all means every op, expected no other op"),
        (["doubling", "round"], "round is no op, expected it first: specdec bench round"),
        (["doubling", "--json", "{folder}"], "--json {folder} cannot be written, expected a file's name"),
        (["doubling", "--plot", "{folder}.png"], "--plot {folder}.png cannot be written, expected a file's name"),
        (["{folder}.json"], "{folder}.json cannot be read (No such file or directory)"),
        (["doubling", "--baseline", "{text}"], "--baseline {text} is not JSON, expected a run that --json wrote"),
        (["doubling", "--baseline", "{number}"], "--baseline {number} is no run of schema 2, expected one that --json wrote"),
        (["--baseline", "{number}"], "--baseline {number} needs an op or a recorded run to compare"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bench_refuses_before_it_runs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    names = {"folder": str(tmp_path / "folder"), "text": str(tmp_path / "text"), "number": str(tmp_path / "number")}
    Path(names["folder"]).mkdir()
    Path(names["folder"] + ".png").mkdir()
    Path(names["text"]).write_text("no run")
    Path(names["number"]).write_text("3")
    assert cli.main(["bench", "--device", "cpu", "--quick", *(a.format(**names) for a in arguments)]) == 2
    assert capsys.readouterr().err == f"specdec bench: {message.format(**names)}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--weights", "int4", "--shape", "qwen3-30b-a3b"],
            "--weights is int4, expected fp8 or fp8-rows with --shape qwen3-30b-a3b, a MoE model",
        ),
        (["--speculative-num-steps", "65"], "Eagle3: num_steps is 65, expected 1 to 64"),
        (["--max-len", "100000"], "model: max_position_embeddings is 4096, expected at least max_len=100000"),
        (["--accept", "2", "--acceptance", "chat"], "--accept is 2.0, expected none with --acceptance"),
        (["--json", "/"], "--json / cannot be written, expected a file's name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_round_refuses_before_it_runs(capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["bench", "round", "--device", "cpu", "--quick", *arguments]) == 2
    assert capsys.readouterr().err == f"specdec bench round: {message}\n"


def test_bench_round_refuses_models_too_large_for_memory(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.bench.engine import round

    monkeypatch.setattr(round, "free_memory", lambda device: 10**9)
    assert (
        cli.main(["bench", "round", "--device", "cpu", "--shape", "qwen3-8b", "--batch", "1,4", "--algorithm", "chain"])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("specdec bench round: qwen3-8b needs about 3")
    assert "GB for weights and KV of 4 requests in float32, and cpu has 1.0 GB free" in error


def recorded(times: dict[int, float], p90: float = 1.0, machine: str = "a CPU") -> dict[str, Any]:
    """Return a record of one op: microseconds by batch."""
    line = {
        "op": "op",
        "error": None,
        "host_us": None,
        "floor_us": 0.5,
        "of_floor": 0.5,
        "cold": False,
        "baselines": {},
    }
    return {
        "schema": 2, "date": "2026-01-01 00:00 UTC", "command": "", "ceilings": None,
        "specdec_kernels": {"version": "1", "commit": "abc", "cuda": None},
        "machine": {"device": "cpu", "name": machine, "driver": None, "torch": "2", "python": "3"},
        "results": [
            {**line, "params": {"batch": batch}, "time_us": time, "p90_us": p90 * time} for batch, time in times.items()
        ],
    }  # fmt: skip


@pytest.mark.parametrize(("now", "code"), [(104.0, 0), (106.0, 1), (50.0, 0)])
def test_bench_compares_a_record_with_its_baseline(capsys: Capture, tmp_path: Path, now: float, code: int) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(recorded({1: 100.0, 2: 10.0, 3: 5.0}, machine="another CPU")))
    after.write_text(json.dumps(recorded({1: now, 2: 10.0, 4: 7.0})))
    assert cli.main(["bench", str(after), "--baseline", str(before)]) == code
    captured = capsys.readouterr()
    assert f"{now / 100 - 1:+.1%}" in captured.out
    assert captured.err.splitlines()[0] == "the baseline is of another machine: another CPU, here a CPU"
    assert ("slower than the baseline: op batch=1: +6.0%" in captured.err) == bool(code)
    assert cli.main(["bench", str(after), "--baseline", str(before), "--threshold", "10"]) == 0


def test_read_record_renames_parameters_of_older_records(tmp_path: Path) -> None:
    run = recorded({1: 10.0})
    run["results"][0]["params"]["taken"] = 8
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert read_record(tmp_path / "run.json")["results"][0]["params"] == {"batch": 1, "top_k": 8}


def test_baseline_changes_compare_tokens_per_second_of_rounds() -> None:
    old = {"op": "round", "params": {"batch": 1}, "facts": {"tokens_per_second": 200.0}}
    new = {"op": "round", "params": {"batch": 1, "max_len": 537}, "facts": {"tokens_per_second": 100.0}}
    (change,) = baseline.changes({"results": [new]}, {"results": [old]})
    assert change.unit == "tokens/s" and change.slower == pytest.approx(1.0)
    skipped = {"op": "round", "params": {"batch": 1}}
    assert baseline.changes({"results": [skipped]}, {"results": [old]}) == []


def test_bench_refuses_a_baseline_without_a_shared_size(capsys: Capture, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(recorded({1: 100.0})))
    after.write_text(json.dumps(recorded({2: 100.0})))
    assert cli.main(["bench", str(after), "--baseline", str(before)]) == 2
    assert "has no size of this run, expected the same op and sizes" in capsys.readouterr().err


def test_bench_table_marks_noise_with_a_star(capsys: Capture, tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps(recorded({1: 10.0}, p90=1.4)))
    cli.main(["bench", str(run)])
    assert "*" not in capsys.readouterr().out
    run.write_text(json.dumps(recorded({1: 10.0}, p90=1.6)))
    cli.main(["bench", str(run)])
    assert "16.00*" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["h200-verify", "h200-round-code", "h200-smollm2-heads"])
def test_bench_table_shows_whole_numbers_on_narrow_terminals(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    for variable, value in (("FORCE_COLOR", "1"), ("COLUMNS", str(width)), ("TERM", "dumb")):
        monkeypatch.setenv(variable, value)
    record = Path(__file__).parents[2] / f"bench/results/{name}.json"
    assert cli.main(["bench", str(record)]) == 0
    text = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for r in json.loads(record.read_text())["results"]:
        shown = f"{r['facts']['tokens_per_second']:.0f}" if "facts" in r else tables.number_text(r["time_us"])
        assert shown in text
    rows = [line for line in text.splitlines() if "\u2500" in line]
    assert rows and all(len(line) <= width for line in rows)


def test_print_table_omits_empty_columns(capsys: Capture) -> None:
    table.print_table(["name", "absent", "count"], [["x", "", "1"], ["y", "", "2"]])
    text = capsys.readouterr().out
    assert "absent" not in text and "name" in text and "count" in text


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_cli_ends_quietly_if_the_pipe_closes(rich: bool) -> None:
    """`specdec info | head -1`: no traceback. Without the packages that it describes, it takes seconds less."""
    code = (
        without("torch", "transformers", *(() if rich else ("rich",)))
        + "; from specdec_kernels.cli import main; sys.exit(main(['info']))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert done.returncode == 1 and done.stderr == ""


# --- plots ------------------------------------------------------------------------------------------------------------


def test_bench_plots_a_run_and_a_record(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_rounds: None
) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    picture, record = tmp_path / "x.png", tmp_path / "x.json"
    assert cli.main(["bench", "all", "--device", "cpu", "--quick", "--plot", str(picture), "--json", str(record)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", str(record), "--plot", str(tmp_path / "again.svg")]) == 0
    assert "adding" in (tmp_path / "again.svg").read_text()


def test_bench_plot_needs_matplotlib(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert cli.main(["bench", "select_topk", "--quick", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == 'specdec bench --plot needs matplotlib: pip install "specdec-kernels[bench]"\n'


def results_of(sizes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"op": "op", "params": size, "time_us": 1.0, "floor_us": 0.5, "baselines": {}} for size in sizes]


def test_plot_panels_of_a_product_and_of_one_parameter_at_a_time() -> None:
    grid = {"batch": (1, 2, 8), "nodes": (4, 16), "dtype": ("float32", "float16")}
    base = {"batch": 2, "nodes": 16, "dtype": "float32"}
    cpu = torch.device("cpu")

    product = results_of([*Case("op", grid, doubling().make).sizes(cpu)])
    ((parameter, results),) = plot.panels_of(product)
    assert parameter == "batch" and results == product
    assert len(plot.lines_of(results, "batch")) == 4

    around = results_of([*Case("op", grid, doubling().make, base=base).sizes(cpu)])
    panels = {parameter: [r["params"][parameter] for r in results] for parameter, results in plot.panels_of(around)}
    assert panels == {"batch": [1, 2, 8, 2], "nodes": [16, 4]}  # float16 has a single point, in the first panel

    many = results_of([*Case("op", grid | {"k": (1, 2, 4)}, doubling().make).sizes(cpu)])
    parts = plot.panels_of(many)  # 12 lines are too many for one panel
    assert [(p, {r["params"]["nodes"] for r in part}) for p, part in parts] == [("batch", {4}), ("batch", {16})]
    assert [r for _, part in parts for r in part] == sorted(many, key=lambda r: r["params"]["nodes"])

    alone = results_of([{"batch": 4}])
    assert plot.panels_of(alone) == [("batch", alone)]


# --- comparisons, restores, the report --------------------------------------------------------------------------------


def test_expect_functions_name_the_difference() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -torch.inf]])
    expect_close("x", x + 1e-6, x, atol=1e-5)
    expect_near("x", x[0] * 1.001, x[0], 1e-2)
    with pytest.raises(WrongResult, match=r"x differs in 1 of 4 elements, first at \[0, 1\]: got nan, expected 2"):
        expect_close("x", torch.tensor([[1.0, torch.nan], [3.0, -torch.inf]]), x, atol=1.0)
    with pytest.raises(WrongResult, match=r"x has shape \[2\], expected \[2, 2\]"):
        expect_equal("x", x[0], x)
    with pytest.raises(WrongResult, match="x is off by nan of its norm, allowed 1e-02"):
        expect_near("x", x[0] * torch.nan, x[0], 1e-2)


def test_cpu_time_excludes_restores(short_rounds: None) -> None:
    order: list[str] = []
    (times,) = timing.cpu_time([lambda: order.append("call")], restores=[lambda: order.append("restore")])
    assert order[:4] == ["restore", "call"] * 2
    assert 0 < times.best <= times.median <= times.p90


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_time_subtracts_restores() -> None:
    x = torch.zeros(1 << 26, device="cuda")
    small = torch.zeros(1, device="cuda")
    plain = timing.gpu_time([lambda: small.add_(1)]).median
    restored = timing.gpu_time([lambda: small.add_(1)], [lambda: x.zero_()]).median
    assert 0 < plain < 20e-6
    assert restored < plain + 20e-6  # zeroing 256 MiB takes longer


def rounds(algorithm: str, rates: dict[int, float], accept: float | str = "code eagle3") -> list[dict[str, Any]]:
    params = {
        "shape": "qwen3-8b", "algorithm": algorithm, "num_steps": 0 if algorithm == "none" else 5, "topk": 1, "nodes": 6,
        "adaptive": algorithm == "adaptive", "accept": 1 if algorithm == "none" else accept, "input": 321, "output": 215,
        "max_len": 537, "dtype": "bfloat16",
    }  # fmt: skip
    line = {
        "op": "round",
        "error": None,
        "time_us": 9e3,
        "p90_us": 9e3,
        "floor_us": 4e3,
        "of_floor": 0.4,
        "baselines": {},
    }
    return [
        {**line, "params": params | {"batch": b}, "facts": {"tokens_per_second": rate, "accept_length": 3.25}}
        for b, rate in rates.items()
    ]


def test_report_of_rounds_has_a_chart_and_repeats(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "docs/benchmarks.md"
    results.mkdir()
    lines = [*rounds("none", {1: 200.0, 4: 800.0}), *rounds("chain", {1: 500.0, 4: 1900.0})]
    run = recorded({}) | {"command": "specdec bench round --json somewhere", "results": lines}
    (results / "here.json").write_text(json.dumps(run))

    def written() -> list[str]:
        assert cli.main(["bench", "report", str(results), str(page)]) == 0
        return [page.read_text(), *(f.read_text() for f in sorted(page.with_suffix("").iterdir()))]

    text, chart = written()
    assert "![tokens per second by batch size](benchmarks/here.svg)" in text
    assert ">chain (5, 1, 6)</text>" in chart and ">tokens per second</text>" in chart
    assert written() == [text, chart]


def test_report_compares_adaptive_with_plain_and_best_fixed() -> None:
    """One table with plain decoding and the best fixed draft, then a table for each acceptance."""
    results = [
        *rounds("none", {1: 200.0, 4: 800.0}),
        *rounds("chain", {1: 500.0, 4: 1900.0}),
        *rounds("tree", {1: 600.0, 4: 900.0}),
        *rounds("adaptive", {1: 630.0, 4: 1850.0}),
        *rounds("adaptive", {1: 198.0, 4: 796.0}, 1),
    ]
    table = report.round_table(results)
    assert table[2:9] == [
        "| drafts | | 1 | 4 |",
        "|---|---|---:|---:|",
        "| | plain | 200 | 800 |",
        "| code eagle3 | best fixed | 600 tree (5, 1, 6) | 1900 chain (5, 1, 6) |",
        "| | adaptive | 630 (3.15, 1.05) | 1850 (2.31, 0.97) |",
        "| all wrong | best fixed | 200 plain | 800 plain |",
        "| | adaptive | 198 (0.99, 0.99) | 796 (0.99, 0.99) |",
    ]
    heads = [line for line in table if line.startswith("shape=")]
    assert len(heads) == 2 and "accept=code eagle3" in heads[0] and "accept=1" in heads[1]
    assert sum(line.startswith("| none |") for line in table) == 2


def test_report_of_the_recorded_runs_has_a_section_each(tmp_path: Path) -> None:
    """Charts take most of the time: one is drawn of each set of params."""
    files = sorted((Path(__file__).parents[2] / "bench/results").glob("*.json"))
    runs = {file.stem: read_record(file) for file in files}
    text = report.report(runs)
    assert all(text.count(f"## {name}: ") == 1 for name in runs)
    drawn = {frozenset(run["results"][0]["params"]): name for name, run in runs.items() if report.has_chart(run)}
    (tmp_path / "results").mkdir()
    for name in drawn.values():
        shutil.copy(files[0].with_name(f"{name}.json"), tmp_path / "results")
    report.write_report(tmp_path / "results", tmp_path / "benchmarks.md")
    assert {path.stem for path in (tmp_path / "benchmarks").iterdir()} == {*drawn.values()}
    assert (tmp_path / "benchmarks.md").read_text() == report.report({name: runs[name] for name in drawn.values()})


def test_headline_chart_shows_the_best_recorded_rates(tmp_path: Path) -> None:
    """Each bar's label is a rate of the records; the committed chart is what they draw."""
    root = Path(__file__).parents[2]
    runs = [json.loads(path.read_text()) for path in sorted((root / "bench/results").glob(headline.RECORDS))]
    rates = headline.best_rates(runs)
    assert all(sorted(of_engine) == [1, 4, 16, 64] for of_engine in rates.values())
    assert cli.main(["bench", "headline", str(root / "bench/results"), str(tmp_path / "headline.svg")]) == 0
    for chart in (tmp_path / "headline.svg", root / "docs/headline.svg"):
        labels = re.findall(r">(\d+)</text>", chart.read_text())
        for of_engine in rates.values():
            assert {f"{rate:.0f}" for rate in of_engine.values()} <= {*labels}
    readme = (root / "README.md").read_text()
    ratios = [f"{rates['ours'][b] / max(rates['sglang'][b], rates['vllm'][b]):.2f}" for b in (1, 4, 16, 64)]
    assert "{}, {}, {} and {} times the best setting".format(*ratios) in readme


def test_report_has_wrong_results_and_notes(
    tmp_path: Path, short_rounds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling(), "halving": doubling(wrong=True)})
    cli.main(["bench", "all", "--device", "cpu", "--quick", "--json", str(tmp_path / "here.json")])
    report.write_report(tmp_path, tmp_path / "docs/benchmarks.md")
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert text.startswith("# Benchmarks\n")
    assert "## here: " in text and "`specdec bench all --device cpu --quick" in text
    assert "| batch=4 | " in text and "wrong result: out differs in 1 of 4" in text
    assert "| _C.noop4, torch | " in text
    assert "**" not in text
    run = json.loads((tmp_path / "here.json").read_text())
    assert "\n\n**It rained.**\n\n" in report.report({"here": run | {"note": "It rained."}})
