"""Times between the kernels of a decoder layer, on a simulated GPU: its clock moves by what each call costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import cli
from specdec_kernels.bench.ops import between, cases, harness, timing
from specdec_kernels.bench.ops.ceilings import Ceilings
from specdec_kernels.bench.ops.harness import Baseline, Case, Result, Work
from specdec_kernels.bench.ops.timing import Call, Times
from specdec_kernels.bench.report import record, report, tables

CPU = torch.device("cpu")


class SimulatedGpu:
    """A GPU that runs the calls of a graph one after the other, and every replay slower than the last one by `drift`."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift, self.replays = 0.0, drift, 0
        self.graphs: list[list[Call]] = []
        self.replayed: list[int] = []
        self.ran: list[str] = []

    def kernel(self, name: str, seconds: float) -> Call:
        def run() -> None:
            self.now += seconds
            self.ran.append(name)

        return run

    def capture(self, calls: Sequence[Call]) -> int:
        self.graphs.append(list(calls))
        return len(self.graphs) - 1

    def replay(self, graph: int) -> tuple[float, float]:
        start = self.now
        for call in self.graphs[graph]:
            call()
        self.replays += 1
        self.now += self.replays * self.drift
        self.replayed.append(graph)
        return start, self.now

    def names(self, graph: int) -> list[str]:
        """Return the kernels of a graph, in order."""
        self.ran.clear()
        for call in self.graphs[graph]:
            call()
        return [*self.ran]


class SimulatedLayer:
    def __init__(self, gpu: SimulatedGpu, name: str) -> None:
        self.before, self.after = gpu.kernel(f"before {name}", 50e-6), gpu.kernel(f"after {name}", 70e-6)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "capture", gpu.capture)
    monkeypatch.setattr(timing, "replay", gpu.replay)
    monkeypatch.setattr(timing, "seconds_of", lambda replays: [end - start for start, end in replays])
    monkeypatch.setattr(timing, "is_slow", lambda call: False)
    return gpu


def layers_of(gpu: SimulatedGpu) -> Any:
    return [SimulatedLayer(gpu, "0"), SimulatedLayer(gpu, "1")]


def test_times_between_are_what_calls_add_to_a_graph(gpu: SimulatedGpu) -> None:
    prepare = [gpu.kernel("prepare", 30e-6)]
    ops = [[gpu.kernel("op", 7e-6)], [gpu.kernel("baseline", 11e-6)]]
    for times, seconds in zip(between.times_between(layers_of(gpu), prepare, ops), (7e-6, 11e-6), strict=True):
        assert times is not None
        assert (times.best, times.median, times.p90) == pytest.approx((seconds,) * 3)


def test_times_between_are_exact_on_a_gpu_that_slows_down(gpu: SimulatedGpu) -> None:
    """A replay takes about 2 ms, and each 50 us more than the one before: in one order, an op would gain 3 us a call."""
    gpu.drift = 50e-6
    ops = [[gpu.kernel("op", 7e-6)], [gpu.kernel("baseline", 11e-6)]]
    ours, theirs = between.times_between(layers_of(gpu), [gpu.kernel("prepare", 0)], ops)
    assert ours is not None and theirs is not None
    assert (ours.best, ours.p90, theirs.best, theirs.p90) == pytest.approx((7e-6, 7e-6, 11e-6, 11e-6))


def test_times_between_replay_graphs_there_and_back(gpu: SimulatedGpu) -> None:
    between.times_between(layers_of(gpu), [gpu.kernel("prepare", 0)], [[gpu.kernel(name, 1e-6)] for name in "ab"])
    assert gpu.replayed == [0, 1, 2, 2, 1, 0] * between.ROUNDS


def test_graphs_between_have_a_call_in_every_layer_and_differ_only_in_it(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "LAYERS", 3)
    prepare = [gpu.kernel(f"prepare {i}", 0) for i in range(2)]
    between.times_between(layers_of(gpu), prepare, [[gpu.kernel(f"op {i}", 1e-6) for i in range(2)]])
    without, with_calls = gpu.names(0), gpu.names(1)
    assert with_calls == [
        "before 0", "prepare 0", "op 0", "after 0",
        "before 1", "prepare 1", "op 1", "after 1",
        "before 0", "prepare 0", "op 0", "after 0",
    ]  # fmt: skip
    assert without == [name for name in with_calls if not name.startswith("op")]


def test_times_between_leave_out_slow_calls(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = gpu.kernel("slow", 1.0), gpu.kernel("quick", 5e-6)
    monkeypatch.setattr(timing, "is_slow", lambda call: call is slow)
    ours, theirs = between.times_between(layers_of(gpu), [gpu.kernel("prepare", 0)], [[slow], [quick]])
    assert ours is None and theirs is not None and theirs.median == pytest.approx(5e-6)
    assert between.times_between(layers_of(gpu), [gpu.kernel("prepare", 0)], [[slow]]) == [None]


def test_decoder_layers_have_kernels_of_every_kind_and_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WIDTH", 32), ("INNER", 48), ("Q_HEADS", 4), ("KV_HEADS", 2), ("HEAD_DIM", 8)):
        monkeypatch.setattr(between, name, value)
    monkeypatch.setattr(between, "weight_sets", between.weight_sets.__wrapped__)
    layers = between.decoder_layers.__wrapped__(CPU, 3)
    assert len(layers) == between.WEIGHT_SETS and layers[0].weights is not layers[1].weights
    layer = layers[0]
    states, attended, pool = layer.states.clone(), layer.attended.clone(), layer.kv_pool.clone()
    layer.before()
    written = layer.kv_pool.clone()
    layer.after()
    layer.before()
    assert torch.equal(layer.states, states) and torch.equal(layer.attended, attended)
    assert not torch.equal(written, pool) and torch.equal(layer.kv_pool, written)


@pytest.mark.parametrize(
    ("params", "rows"),
    [({"batch": 4, "nodes": 6}, 24), ({"batch": 16, "rows": 2}, 32), ({"batch": 64, "nodes": 32}, 256), ({"k": 9}, 1)],
    ids=["tree", "rows", "many", "none"],
)
def test_rows_of_pass_are_those_of_all_requests_up_to_a_limit(params: dict[str, int], rows: int) -> None:
    assert between.rows_of_pass(params) == rows


def test_rewrite_changes_no_value() -> None:
    tensors = [
        torch.tensor([1.5, -torch.inf, torch.nan]), torch.tensor([[1, -2]], dtype=torch.int32),
        torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn), torch.tensor([True, False]),
    ]  # fmt: skip
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    between.rewrite(tensors)
    assert all(map(torch.equal, [tensor.view(torch.uint8) for tensor in tensors], before))


def test_every_case_names_contiguous_inputs_as_just_written() -> None:
    for case in cases.CASES.values():
        if "cpu" in case.devices:
            between.rewrite(case.make(CPU, case.smallest(CPU)).just_written)


@pytest.mark.parametrize("asked", [True, False])
def test_measure_times_op_and_baselines_between_layers_on_a_gpu(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    def make(device: torch.device, params: dict[str, int]) -> Work:
        return Work(
            call=gpu.kernel("op", 2e-6),
            check=lambda: None,
            bytes_moved=1,
            restore=gpu.kernel("restore", 90e-6),
            packages=[Baseline("another", gpu.kernel("another", 3e-6), lambda _: None)],
        )

    class Cuda(str):
        type = "cuda"

    monkeypatch.setattr(harness, "input_sets", lambda case, params, device, first: ([first, first], True))
    monkeypatch.setattr(harness, "on_gpu", lambda works: {"time": Times(1e-6, 1e-6, 1e-6)})
    monkeypatch.setattr(harness, "decoder_layers", lambda device, rows: layers_of(gpu))
    case: Any = Case("op", {"batch": (1,)}, make)
    device: Any = Cuda("cuda")
    result = harness.measure(case, {"batch": 1}, device, Ceilings(1, 1, 1), between_layers=asked)
    assert result.cold and result.error is None
    if not asked:
        assert result.between is None and result.between_baselines == {}
        return
    assert result.between is not None and result.between.median == pytest.approx(2e-6)
    assert result.between_baselines["another"].median == pytest.approx(3e-6)
    assert gpu.names(0).count("restore") == gpu.names(1).count("restore") == between.LAYERS


def measured(between_us: float | None = 8.0, p90: float = 8.5) -> Result:
    times = Times(4e-6, 4e-6, 4e-6)
    ours = None if between_us is None else Times(between_us * 1e-6, between_us * 1e-6, p90 * 1e-6)
    theirs = {} if between_us is None else {"another": Times(6e-6, 6e-6, 6e-6)}
    return Result(
        "op", {"batch": 1}, "cuda", time=times, floor=1e-6, baselines={"another": times, "third": times}, between=ours,
        between_baselines=theirs,
    )  # fmt: skip


def test_record_has_times_between_only_if_measured() -> None:
    line = record.line(measured())
    assert line["between_us"] == 8.0 and line["between_p90_us"] == 8.5 and line["between_baselines"] == {"another": 6.0}
    assert not [name for name in record.line(measured(None)) if name.startswith("between")]


def test_table_has_columns_between_others_next_to_times() -> None:
    lines = [record.line(measured()), record.line(measured(p90=13.0)), record.line(measured(None))]
    columns = tables.op_columns(lines)
    assert columns == [
        "op", "size", "time us", "between others us", "p90 us", "host us", "floor us", "of floor", "inputs",
        "another us", "another between others us", "third us", "third between others us",
    ]  # fmt: skip
    cells = [dict(zip(columns, tables.op_row(line, columns), strict=True)) for line in lines]
    assert [row["between others us"] for row in cells] == ["8.00", "8.00*", ""]
    assert [row["another between others us"] for row in cells] == ["6.00 (0.75x)"] * 2 + [""]
    assert cells[0]["another us"] == "4.00 (1.0x)" and cells[0]["third between others us"] == ""
    assert not [name for name in tables.op_columns(lines[2:]) if "between" in name]


def test_report_has_a_column_between_others() -> None:
    lines = report.op_table([record.line(measured()), record.line(Result("op", {"batch": 2}, "cuda", error="is off"))])
    assert "| time us | between others us |" in lines[0] and "| 4.00 | 8.00 |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("now", "slower"), [(8.0, []), (9.0, ["us between others"])])
def test_baseline_compares_times_between_others(now: float, slower: list[str]) -> None:
    from specdec_kernels.bench.ops.baseline import changes

    runs = [{"results": [record.line(measured(us))]} for us in (now, 8.0)]
    found = changes(*runs)
    assert [change.unit for change in found] == ["us", "us between others"]
    assert [change.unit for change in found if change.slower > 0.05] == slower


def test_bench_between_layers_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "select_topk", "--device", "cpu", "--between-layers"]) == 2
    message = "specdec bench: --between-layers times CUDA graphs, expected a GPU, not cpu\n"
    assert capsys.readouterr().err == message


def test_bench_between_layers_prints_and_records_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_kernels.cli.bench import ops

    asked: list[bool] = []

    def measure(*arguments: Any, between_layers: bool) -> Result:
        asked.append(between_layers)
        return measured()

    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr(ops, "find_device", lambda wanted: type("Cuda", (), {"type": "cuda"})())
    monkeypatch.setattr("specdec_kernels.bench.ops.ceilings.measure_ceilings", lambda *_: Ceilings(1e12, 1e12, 1e12))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(record, "driver_version", lambda: "1")
    monkeypatch.setattr(cases, "CASES", {"op": Case("op", {"batch": (1,)}, lambda device, params: pytest.fail())})
    file = tmp_path / "run.json"
    assert cli.main(["bench", "op", "--between-layers", "--json", str(file)]) == 0
    assert asked == [True]
    assert "between others us" in capsys.readouterr().out
    (line,) = json.loads(file.read_text())["results"]
    assert line["between_us"] == 8.0
