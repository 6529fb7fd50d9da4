"""The command line, called as a function; in a process of its own only where other packages must be missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels
from specdec_kernels import cli
from specdec_kernels._op_list import public_ops
from specdec_kernels.bench import cases, plot, report, timing
from specdec_kernels.bench.compare import WrongResult, expect_close, expect_equal, expect_near
from specdec_kernels.bench.harness import Baseline, Case, Work
from specdec_kernels.cli import bench

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_SECONDS", 0.01)


def without(*packages: str) -> str:
    """The start of a Python program in which these packages cannot be imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


# --- help -------------------------------------------------------------------------------------------------------------


def test_no_arguments_prints_help(capsys: Capture) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: specdec <command> [options]")
    assert "Start with `specdec info`" in text


@pytest.mark.parametrize("command", [module.__name__.rsplit(".", 1)[1] for module in cli.COMMANDS])
def test_every_command_is_listed_and_has_help(capsys: Capture, command: str) -> None:
    cli.main([])
    assert f"\n    {command} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: specdec {command}")


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"specdec_kernels {specdec_kernels.__version__}\n"


def test_unknown_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["frobnicate"])
    assert stop.value.code == 2
    assert "invalid choice: 'frobnicate'" in capsys.readouterr().err


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec_kernels", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"specdec_kernels {specdec_kernels.__version__}\n"


# --- info -------------------------------------------------------------------------------------------------------------


def test_info(capsys: Capture) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"specdec_kernels       {specdec_kernels.__version__}\n" in text
    assert f"torch                 {torch.__version__}" in text
    assert "DLPack exchange API   yes" in text
    for op in public_ops():
        assert op in text


def test_info_json(capsys: Capture) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["specdec_kernels"] == specdec_kernels.__version__
    assert facts["cuda_version"] == specdec_kernels.cuda_version
    assert facts["packages"]["torch"] == torch.__version__
    assert list(facts["ops"]) == public_ops()
    halves = ["cpu", "cuda"] if specdec_kernels.cuda_version else ["cpu"]
    assert facts["ops"]["select_topk"] == halves
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_info_of_a_cpu_build(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert run["schema"] == 2
    assert run["command"].startswith("specdec bench select_topk --quick")
    assert run["machine"].keys() == {"device", "name", "driver", "torch", "python"}
    assert run["ceilings"].keys() == {"copy_gb_s", "read_gb_s", "tflop_s"}
    assert [r["params"]["batch"] for r in run["results"]] == [2, 3]
    for r in run["results"]:
        assert r["error"] is None and r["time_us"] > 0 and r["p90_us"] >= r["time_us"]
        assert r["floor_us"] > 0 and r["bytes"] > 0 and r["baselines"]["torch"] > 0


def test_results_readme_defines_every_field() -> None:
    readme = Path(__file__).parent.parent / "bench/results/README.md"
    from specdec_kernels.bench.harness import Result
    from specdec_kernels.bench.record import line, record

    run = record([Result("op", {}, "cpu")], torch.device("cpu"), None, "")
    for field in [*run, *line(Result("op", {}, "cpu"))]:
        assert f"`{field}`" in readme.read_text(), field


def test_call_overhead(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert cli.main(["bench", "call_overhead", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["ceilings"] is None
    nanoseconds = {r["params"]["call"]: r["host_us"] * 1e3 for r in run["results"]}
    assert 0 < nanoseconds["_C.noop1, torch"] < nanoseconds["_C.noop8, torch"]
    assert "_C.noop8, torch" in capsys.readouterr().out


def doubling(wrong: bool = False, wrong_baseline: bool = False, wrong_peer: bool = False) -> Case:
    """A case of an op that doubles numbers, and forgets the last one if `wrong`."""

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
            peers=[Baseline("shifting", lambda: (numbers << 1) - int(wrong_peer), lambda o: expect_equal("shift", o, 2 * numbers))],
        )  # fmt: skip

    return Case("doubling", {"batch": (4, 5)}, make)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (doubling(wrong=True), "out differs in 1 of 4 elements, first at [3]: got 0, expected 6"),
        (doubling(wrong_baseline=True), "baseline adding: sum differs in 4 of 4 elements, first at [0]: got 1, expected 0"),
        (doubling(wrong_peer=True), "baseline shifting: shift differs in 4 of 4 elements, first at [0]: got -1, expected 0"),
    ],
    ids=["op", "baseline", "peer"],
)  # fmt: skip
def test_a_wrong_result_gets_no_time(
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


def test_a_right_result_gets_a_time(capsys: Capture, monkeypatch: pytest.MonkeyPatch, short_rounds: None) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    assert cli.main(["bench", "all", "--device", "cpu", "--batch", "4,5"]) == 0  # call_overhead has no batch
    text = capsys.readouterr().out
    assert "batch=4" in text and "batch=5" in text and "adding us" in text and "shifting us" in text


def test_sizes_of_a_case() -> None:
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


def test_every_parameter_is_an_option() -> None:
    grids = [grid for case in cases.CASES.values() for grid in (case.grid, case.cpu_grid or {}, case.base or {})]
    assert {name for grid in grids for name in grid} == {*bench.NUMBERS, *bench.WORDS}
    for case in cases.CASES.values():
        for name, values in case.grid.items():
            assert name in bench.NUMBERS or set(values) <= set(bench.WORDS[name])
        assert case.base is None or case.base.keys() == case.grid.keys()


def test_parameters_as_options(capsys: Capture) -> None:
    arguments = ["--batch", "2", "--nodes", "4,5", "--k", "3", "--device", "cpu"]
    assert cli.main(["bench", "build_tree", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.count("build_tree") == 2 and "batch=2 nodes=4 k=3" in text and "batch=2 nodes=5 k=3" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuchop"], "specdec bench: there is no op nosuchop, expected one of doubling, call_overhead\n"),
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
def test_bench_without_a_gpu(capsys: Capture) -> None:
    assert cli.main(["bench", "select_topk", "--device", "cuda"]) == 2
    assert "needs a CUDA build of specdec_kernels and a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--batch", "1,x"], ["--nodes", "-1"], ["--dtype", "int8"], ["--mode", "tree,bush"], ["--device", "tpu"]],
    ids=" ".join,
)
def test_bench_rejects_values(capsys: Capture, option: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "select_topk", *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err


# --- plots ------------------------------------------------------------------------------------------------------------


def test_plot(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_rounds: None) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling()})
    picture, record = tmp_path / "x.png", tmp_path / "x.json"
    assert cli.main(["bench", "all", "--device", "cpu", "--quick", "--plot", str(picture), "--json", str(record)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    plot.main([str(record), str(tmp_path / "again.svg")])
    assert "adding" in (tmp_path / "again.svg").read_text()


def test_plot_needs_matplotlib(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert cli.main(["bench", "select_topk", "--quick", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == 'specdec bench --plot needs matplotlib: pip install "specdec-kernels[bench]"\n'


def results_of(sizes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"op": "op", "params": size, "time_us": 1.0, "floor_us": 0.5, "baselines": {}} for size in sizes]


def test_panels_of_a_product_and_of_one_parameter_at_a_time() -> None:
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


def test_comparisons_say_what_differs() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -torch.inf]])
    expect_close("x", x + 1e-6, x, atol=1e-5)
    expect_near("x", x[0] * 1.001, x[0], 1e-2)
    with pytest.raises(WrongResult, match=r"x differs in 1 of 4 elements, first at \[0, 1\]: got nan, expected 2"):
        expect_close("x", torch.tensor([[1.0, torch.nan], [3.0, -torch.inf]]), x, atol=1.0)
    with pytest.raises(WrongResult, match=r"x has shape \[2\], expected \[2, 2\]"):
        expect_equal("x", x[0], x)
    with pytest.raises(WrongResult, match="x is off by nan of its norm, allowed 1e-02"):
        expect_near("x", x[0] * torch.nan, x[0], 1e-2)


def test_restores_run_outside_the_clock(short_rounds: None) -> None:
    order: list[str] = []
    (times,) = timing.cpu_time([lambda: order.append("call")], restores=[lambda: order.append("restore")])
    assert order[:4] == ["restore", "call"] * 2
    assert 0 < times.best <= times.median <= times.p90


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_time_takes_restores_off() -> None:
    x = torch.zeros(1 << 26, device="cuda")
    small = torch.zeros(1, device="cuda")
    plain = timing.gpu_time([lambda: small.add_(1)]).median
    restored = timing.gpu_time([lambda: small.add_(1)], [lambda: x.zero_()]).median
    assert 0 < plain < 20e-6
    assert restored < plain + 20e-6  # zeroing 256 MiB takes longer


def test_report(tmp_path: Path, short_rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", {"doubling": doubling(), "halving": doubling(wrong=True)})
    cli.main(["bench", "all", "--device", "cpu", "--quick", "--json", str(tmp_path / "here.json")])
    report.main([str(tmp_path), str(tmp_path / "docs/benchmarks.md")])
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert text.startswith("# Benchmarks\n")
    assert "## here: " in text and "`specdec bench all --device cpu --quick" in text
    assert "| batch=4 | " in text and "wrong result: out differs in 1 of 4" in text
    assert "| _C.noop4, torch | " in text
