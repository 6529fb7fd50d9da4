"""Writes docs/benchmarks.md, its charts and README's table from the recorded runs. From the root of the source tree:

    python -m specdec_kernels.bench.report [bench/results [docs/benchmarks.md [README.md]]]

One section per run of `specdec bench ... --json bench/results/<name>.json`, newest first; those of whole engines have a
chart in docs/benchmarks/. Nothing is edited by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specdec_kernels.cli.bench import (
    COLUMNS,
    ROUND,
    ROUND_COLUMNS,
    names_of_others,
    round_head,
    round_row,
    row,
    text_of,
)

from .plot import plot_rates

REPLAY = "ngram_replay"
SHOOTOUT = "shootout"
README_RUNS = ("h200-round-code", "h200-round-code-adaptive")
README_BEGIN, README_END = "<!-- rounds: written by bench/report.py -->\n", "<!-- end of rounds -->\n"
EVEN = (
    "Drafts are planted to be right for so many tokens and then wrong, in every request alike: a comparison at a fixed "
    "accept length, and no picture of text."
)
HEAD = """\
# Benchmarks

Written by `python -m specdec_kernels.bench.report` from the runs recorded in `bench/results/`, where
[README.md](../bench/results/README.md) defines every column. Each result was checked against its reference before it
was timed.
"""


def report(runs: dict[str, dict[str, Any]]) -> str:
    newest_first = sorted(runs.items(), key=lambda item: (item[1]["date"], item[0]), reverse=True)
    return "\n".join([HEAD, *(section(name, run) for name, run in newest_first)])


def section(name: str, run: dict[str, Any]) -> str:
    machine, package, ceilings = run["machine"], run["specdec_kernels"], run["ceilings"]
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [
        f"## {name}: {machine['name']}",
        "",
        f"`{run['command']}`, {run['date']}{driver}, torch {machine['torch']}, specdec_kernels {package['version']}"
        f" at {package['commit'] or 'a released wheel'}, CUDA {package['cuda'] or 'none'}.",
    ]
    for engine, facts in run.get("engines", {}).items():
        lines.append(
            f"{engine} {facts.get('version', '?')} ({facts.get('installed') or 'from a source tree'}; "
            f"torch {facts.get('torch')}, transformers {facts.get('transformers')})."
        )
    if ceilings:
        lines.append(
            f"Measured in the same run: copy {ceilings['copy_gb_s']} GB/s, read {ceilings['read_gb_s']} GB/s, "
            f"matrix product {ceilings['tflop_s']} Tflop/s."
        )
    if has_chart(run):
        lines += ["", f"![tokens a second by batch size](benchmarks/{name}.svg)"]
    calls = [r for r in run["results"] if "call" in r["params"]]
    ops = [r for r in run["results"] if "call" not in r["params"]]
    for op in dict.fromkeys(r["op"] for r in ops):
        table = {ROUND: round_table, REPLAY: replay_table, SHOOTOUT: shootout_table}.get(op, op_table)
        lines += ["", f"### {op}", "", *table([r for r in ops if r["op"] == op])]
    if calls:
        lines += ["", "### call_overhead", "", "| call | ns |", "|---|---:|"]
        lines += [f"| {r['params']['call']} | {r['host_us'] * 1e3:.0f} |" for r in calls]
    return "\n".join([*lines, ""])


def has_chart(run: dict[str, Any]) -> bool:
    """Runs of whole engines at several batch sizes have one."""
    return len({r["params"]["batch"] for r in run["results"] if "tokens_per_second" in r.get("facts", {})}) > 1


def round_table(results: list[dict[str, Any]]) -> list[str]:
    drafting = [r["params"] for r in results if r["params"]["num_steps"]]
    even = [EVEN, ""] if drafting and not isinstance(drafting[0]["accept"], str) else []
    return [
        *even,
        round_head(results),
        "",
        "| " + " | ".join(ROUND_COLUMNS) + " |",
        "|---|" + "---:|" * (len(ROUND_COLUMNS) - 1),
        *("| " + " | ".join(round_row(r)) + " |" for r in results),
    ]


def replay_table(results: list[dict[str, Any]]) -> list[str]:
    """Accepted drafts per lookup, a column for each drafter."""
    drafters = list(dict.fromkeys(r["params"]["drafter"] for r in results))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for r in results:
        p = r["params"]
        row = rows.setdefault((p["text"], p["workload"], str(p["drafts"])), {})
        row[p["drafter"]] = f"{r['facts']['accepted']:.3f}"
    return [
        "Accepted drafts per lookup.",
        "",
        "| text | workload | drafts | " + " | ".join(drafters) + " |",
        "|---|---|" + "---:|" * (1 + len(drafters)),
        *("| " + " | ".join([*size, *(row.get(name, "") for name in drafters)]) + " |" for size, row in rows.items()),
    ]


def shootout_table(results: list[dict[str, Any]]) -> list[str]:
    """Tokens a second and accept length of each engine, an engine a column."""
    engines = list(dict.fromkeys(r["params"]["engine"] for r in results))
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for r in results:
        p, facts = r["params"], r.get("facts", {})
        cell = "wrong text" if r["error"] else "not measured"
        if facts:
            cell = f"{facts['tokens_per_second']:.0f}"
            cell += f" ({facts['accept_length']:.2f})" if p["num_steps"] and "accept_length" in facts else ""
        steps = f" ({p['num_steps']}, {p['topk']}, {p['nodes']})" if p["num_steps"] else ""
        rows.setdefault((p["algorithm"] + steps, p["batch"]), {})[p["engine"]] = cell
    shared = {name: results[0]["params"][name] for name in ("shape", "dtype", "accept", "input", "output", "max_len")}
    return [
        f"{text_of(shared)}. Tokens a second of decoding, in brackets the accept length.",
        "",
        "| algorithm | batch | " + " | ".join(engines) + " |",
        "|---|---:|" + "---:|" * len(engines),
        *(
            f"| {name} | {batch} | " + " | ".join(cells.get(engine, "") for engine in engines) + " |"
            for (name, batch), cells in rows.items()
        ),
    ]


def op_table(results: list[dict[str, Any]]) -> list[str]:
    others = names_of_others(results)
    columns = [*COLUMNS[1:], *(f"{name} us" for name in others)]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for r in results:
        if r.get("skipped"):
            lines.append(f"| {text_of(r['params'])} | not timed: {r['skipped']} |" + " |" * (len(columns) - 2))
        elif r["error"]:
            lines.append(f"| {text_of(r['params'])} | wrong result: {r['error']} |" + " |" * (len(columns) - 2))
        else:
            lines.append("| " + " | ".join(row(r, others)[1:]) + " |")
    return lines


def readme_rounds(runs: dict[str, dict[str, Any]]) -> str:
    """README's table of tokens a second, from the runs it names."""
    results = [r for name in README_RUNS for r in runs[name]["results"] if "tokens_per_second" in r.get("facts", {})]
    batches = sorted({r["params"]["batch"] for r in results})
    lines: dict[str, dict[int, str]] = {}
    for r in results:
        p, facts = r["params"], r["facts"]
        steps = f" ({p['num_steps']} steps, topk {p['topk']}, {p['nodes']} tokens)" if p["num_steps"] else ""
        name = {"none": "no speculation"}.get(p["algorithm"], p["algorithm"]) + steps
        name += ", as many of them as pay" if p["adaptive"] else ""
        cell = f"{facts['tokens_per_second']:.0f}" + (f" ({facts['accept_length']:.1f})" if p["num_steps"] else "")
        lines.setdefault(name, {})[p["batch"]] = cell
    drafting = next(r["params"] for r in results if r["params"]["num_steps"])
    domain, drafter = str(drafting["accept"]).split()[:2]
    rows = [
        f"| {name} | " + " | ".join(cells.get(batch, "") for batch in batches) + " |" for name, cells in lines.items()
    ]
    return f"""\
On one {runs[README_RUNS[0]]["machine"]["name"]}, with a model of {drafting["shape"]}'s shape in {drafting["dtype"]},
{drafting["input"]} tokens in and {drafting["output"]} out, and an EAGLE-3 head whose drafts are accepted as often as
published {drafter} drafts were on {domain}. Tokens a second by batch size, in brackets the accept length:

| | {" | ".join(map(str, batches))} |
|---|{"---:|" * len(batches)}
{chr(10).join(rows)}

```bash
{chr(10).join(runs[name]["command"].partition(" --json")[0] for name in README_RUNS)}
```
"""


def main(arguments: list[str]) -> None:
    paths = ["bench/results", "docs/benchmarks.md", "README.md"]
    results, target, readme = (Path(path) for path in [*arguments, *paths[len(arguments) :]])
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    charts = target.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    for old in charts.glob("*.svg"):
        old.unlink()
    for name, run in runs.items():
        if has_chart(run):
            plot_rates(run, charts / f"{name}.svg")
    target.write_text(report(runs))
    if readme.exists() and set(README_RUNS) <= runs.keys():
        before, _, rest = readme.read_text().partition(README_BEGIN)
        readme.write_text(before + README_BEGIN + readme_rounds(runs) + README_END + rest.partition(README_END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
