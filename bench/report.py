"""Writes docs/benchmarks.md from the recorded runs. From the root of the source tree:

    python -m specdec_kernels.bench.report [bench/results [docs/benchmarks.md]]

One section per run of `specdec bench ... --json bench/results/<name>.json`, newest first. Nothing is edited by hand.
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
    ROUND_HEAD,
    names_of_others,
    round_row,
    row,
    text_of,
)

REPLAY = "ngram_replay"
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
    if ceilings:
        lines.append(
            f"Measured in the same run: copy {ceilings['copy_gb_s']} GB/s, read {ceilings['read_gb_s']} GB/s, "
            f"matrix product {ceilings['tflop_s']} Tflop/s."
        )
    calls = [r for r in run["results"] if "call" in r["params"]]
    ops = [r for r in run["results"] if "call" not in r["params"]]
    for op in dict.fromkeys(r["op"] for r in ops):
        table = {ROUND: round_table, REPLAY: replay_table}.get(op, op_table)
        lines += ["", f"### {op}", "", *table([r for r in ops if r["op"] == op])]
    if calls:
        lines += ["", "### call_overhead", "", "| call | ns |", "|---|---:|"]
        lines += [f"| {r['params']['call']} | {r['host_us'] * 1e3:.0f} |" for r in calls]
    return "\n".join([*lines, ""])


def round_table(results: list[dict[str, Any]]) -> list[str]:
    return [
        text_of({name: results[0]["params"][name] for name in ROUND_HEAD}),
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


def op_table(results: list[dict[str, Any]]) -> list[str]:
    others = names_of_others(results)
    columns = [*COLUMNS[1:], *(f"{name} us" for name in others)]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for r in results:
        if r["error"]:
            lines.append(f"| {text_of(r['params'])} | wrong result: {r['error']} |" + " |" * (len(columns) - 2))
        else:
            lines.append("| " + " | ".join(row(r, others)[1:]) + " |")
    return lines


def main(arguments: list[str]) -> None:
    results = Path(arguments[0] if arguments else "bench/results")
    target = Path(arguments[1] if len(arguments) > 1 else "docs/benchmarks.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report({path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}))


if __name__ == "__main__":
    main(sys.argv[1:])
