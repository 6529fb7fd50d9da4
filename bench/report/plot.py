"""Plots of a record: the times of ops against their sizes, and the throughput of engines against the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tables import baseline_names, params_text, steps_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 2
MARKERS = "sD^vPX"  # one for each baseline
MAX_LINES = 8  # per panel

Results = list[dict[str, Any]]


def plot(run: dict[str, Any], file: str | Path) -> None:
    """Draw a record: a panel for each op and each of its numeric parameters that varies."""
    from matplotlib.figure import Figure

    ops = [r for r in run["results"] if "call" not in r["params"] and not r["error"] and not r.get("skipped")]
    rates = [r for r in ops if "tokens_per_second" in r.get("facts", {})]
    times = [r for r in ops if r["time_us"] is not None and r not in rates]
    panels = [
        panel
        for op in dict.fromkeys(r["op"] for r in times)
        for panel in panels_of([r for r in times if r["op"] == op])
    ]
    number = len(panels) + bool(rates)
    rows, columns = -(-number // COLUMNS), min(COLUMNS, number)
    figure = Figure(figsize=(7.5 * max(columns, 1), 5 * max(rows, 1)), layout="constrained")
    if rates:
        draw_rates(figure.add_subplot(rows, columns, 1), rates)
    for i, (parameter, results) in enumerate(panels, 1 + bool(rates)):
        draw(figure.add_subplot(rows, columns, i), parameter, results)
    save(figure, run, file)


def plot_rates(run: dict[str, Any], file: str | Path) -> None:
    """Draw the throughput of a record of engines alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw_rates(figure.add_subplot(), [r for r in run["results"] if "tokens_per_second" in r.get("facts", {})])
    save(figure, run, file)


def save(figure: Figure, run: dict[str, Any], file: str | Path) -> None:
    """Write the figure, with machine, version and date as its title."""
    figure.suptitle(f"{run['machine']['name']}, specdec_kernels {run['specdec_kernels']['version']}, {run['date']}")
    write(figure, file)


def write(figure: Figure, file: str | Path) -> None:
    """Write the figure reproducibly, with text as text: two plots of one record are the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "specdec_kernels"}):
        figure.savefig(file, dpi=120, metadata={"Date": None} if str(file).endswith(".svg") else None)


def draw_rates(axes: Axes, results: Results) -> None:
    """Draw tokens per second against the batch size, a line per engine and algorithm."""
    lines: dict[str, Results] = {}
    for r in results:
        lines.setdefault(series_name(r["params"]), []).append(r)
    for name, line in lines.items():
        line = sorted(line, key=lambda r: r["params"]["batch"])
        axes.plot(
            [r["params"]["batch"] for r in line],
            [r["facts"]["tokens_per_second"] for r in line],
            marker="o", linewidth=1.5, markersize=4, label=name,
        )  # fmt: skip
    batches = sorted({r["params"]["batch"] for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    fixed = {k: results[0]["params"][k] for k in ("shape", "input", "output") if k in results[0]["params"]}
    accepts = {str(r["params"]["accept"]) for r in results if r["params"]["num_steps"]}
    axes.set_title("tokens per second", loc="left")
    axes.set_title(
        params_text(fixed | ({"accept": ", ".join(sorted(accepts))} if accepts else {})),
        loc="right",
        fontsize="x-small",
    )
    axes.set_xlabel("batch")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def series_name(params: dict[str, Any]) -> str:
    """Return the name of a line: engine, algorithm and its sizes."""
    adaptive = ", adaptive" if params.get("adaptive") and params["algorithm"] != "adaptive" else ""
    return " ".join(filter(None, [params.get("engine"), steps_text(params) + adaptive]))


def panels_of(results: Results) -> list[tuple[str, Results]]:
    """Group one op's results by x axis: the first parameter that varies, then those that show further results."""
    panels, shown = [], []
    for parameter, value in results[0]["params"].items():
        if isinstance(value, str):
            continue
        varied = [r for line in lines_of(results, parameter).values() if len(line) > 1 for r in line]
        if any(r not in shown for r in varied):
            panels.append((parameter, varied))
            shown += varied
    rest = [r for r in results if r not in shown]  # sizes that differ in words alone, or a single size
    if not panels:
        return [(next(iter(results[0]["params"])), rest)]
    parameter, varied = panels[0]
    panels[0] = (parameter, [r for r in results if r in varied or r in rest])
    return [part for panel in panels for part in parted(*panel)]


def parted(parameter: str, results: Results) -> list[tuple[str, Results]]:
    """Split a panel with too many lines into one for each value of the first other parameter that varies."""
    if len(lines_of(results, parameter)) <= MAX_LINES:
        return [(parameter, results)]
    names = [name for name in results[0]["params"] if name != parameter]
    other = next(name for name in names if any(r["params"][name] != results[0]["params"][name] for r in results))
    values = dict.fromkeys(r["params"][other] for r in results)
    return [part for value in values for part in parted(parameter, [r for r in results if r["params"][other] == value])]


def lines_of(results: Results, parameter: str) -> dict[str, Results]:
    """Group results that differ in `parameter` alone, by the text of their other parameters."""
    lines: dict[str, Results] = {}
    for r in results:
        lines.setdefault(params_text({k: v for k, v in r["params"].items() if k != parameter}), []).append(r)
    return lines


def points(results: Results, parameter: str, times: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return the values of a parameter in order, and the time at each; results without a time are left out."""
    pairs = sorted((r["params"][parameter], time) for r, time in zip(results, times, strict=True) if time)
    return [value for value, _ in pairs], [time for _, time in pairs]


def draw(axes: Axes, parameter: str, results: Results) -> None:
    """Draw our times as lines, and in the same color the floor dashed and the baselines dotted."""
    baselines = baseline_names(results)
    fixed = {k: v for k, v in results[0]["params"].items() if all(r["params"][k] == v for r in results)}
    for i, line in enumerate(lines_of(results, parameter).values()):
        color = f"C{i % 10}"
        label = params_text({k: v for k, v in line[0]["params"].items() if k not in fixed and k != parameter})
        values, ours = points(line, parameter, [r["time_us"] for r in line])
        axes.plot(values, ours, color=color, marker="o", label=label or "specdec_kernels")
        values, floors = points(line, parameter, [r["floor_us"] for r in line])
        axes.plot(values, floors, color=color, linestyle="--", linewidth=1)
        for name, marker in zip(baselines, MARKERS, strict=False):
            values, theirs = points(line, parameter, [r["baselines"].get(name) for r in line])
            axes.plot(
                values, theirs,
                color=color, marker=marker, linestyle=":", linewidth=0.8, markersize=5, alpha=0.6,
            )  # fmt: skip
    axes.plot([], [], color="gray", linestyle="--", label="floor")
    for name, marker in zip(baselines, MARKERS, strict=False):
        axes.plot([], [], color="gray", marker=marker, linestyle=":", label=name)

    values = sorted({r["params"][parameter] for r in results})
    if values[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values], minor=False)
        axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_title(results[0]["op"], loc="left")
    axes.set_title(params_text({k: v for k, v in fixed.items() if k != parameter}), loc="right", fontsize="x-small")
    axes.set_xlabel(parameter)
    axes.set_ylabel("time, us")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
