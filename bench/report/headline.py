"""README's chart: decode throughput of each engine at its best setting, from the records of one machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .plot import write

RECORDS = "h200-newest-*.json"
ENGINES = {"ours": "specdec_kernels", "sglang": "SGLang", "vllm": "vLLM"}
COLORS = {"ours": "#1f77b4", "sglang": "#ff7f0e", "vllm": "#7f7f7f"}
GPU = "NVIDIA H200"

# Tokens per second of each engine, by batch size.
Rates = dict[str, dict[int, float]]


def best_rates(runs: Iterable[dict[str, Any]]) -> Rates:
    """Return the rate of each engine's fastest setting at each batch size.

    Settings are algorithms (plain, chain, tree, adaptive) and, for SGLang, attention backends (`sglang`, `sglang_fa3`).

    Raises:
        ValueError: a record of another GPU.
    """
    rates: Rates = {engine: {} for engine in ENGINES}
    for run in runs:
        if run["machine"]["name"] != GPU:
            raise ValueError(f"headline: a record of {run['machine']['name']}, expected {GPU}")
        for result in run["results"]:
            params, facts = result["params"], result.get("facts") or {}
            if "tokens_per_second" not in facts or result["error"]:
                continue
            of_engine = rates[params["engine"].split("_")[0]]
            of_engine[params["batch"]] = max(of_engine.get(params["batch"], 0), facts["tokens_per_second"])
    return rates


def versions(runs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the version of each engine that the records name."""
    return {
        name.split("_")[0]: facts["version"].split("+")[0]
        for run in runs
        for name, facts in run.get("engines", {}).items()
        if facts.get("version")
    }


def plot_headline(runs: list[dict[str, Any]], file: Path) -> None:
    """Draw grouped bars, one group for each batch size, with the rates as text above them."""
    from matplotlib.figure import Figure

    rates, names = best_rates(runs), versions(runs)
    batches = sorted(rates["ours"])
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(ENGINES)
    for i, (engine, label) in enumerate(ENGINES.items()):
        places = [j + (i - (len(ENGINES) - 1) / 2) * width for j in range(len(batches))]
        heights = [rates[engine][batch] for batch in batches]
        bars = axes.bar(places, heights, width * 0.92, color=COLORS[engine], label=f"{label} {names[engine]}")
        axes.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize="x-small", padding=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(min(of.values()) for of in rates.values()) / 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("decode throughput, tokens per second", loc="left", fontsize="medium")
    axes.set_title(f"one {GPU}, Qwen3-8B shape, EAGLE-3", loc="right", fontsize="small")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    write(figure, file)


def write_headline(results: Path, file: Path) -> None:
    """Draw the chart from the records in a folder.

    Raises:
        ValueError: there is none of them.
    """
    runs = [json.loads(path.read_text()) for path in sorted(results.glob(RECORDS))]
    if not runs:
        raise ValueError(f"results is {results}, expected a folder with records as {RECORDS}")
    plot_headline(runs, file)
