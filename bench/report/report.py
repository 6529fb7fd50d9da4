"""Write the site's page of benchmarks and its charts from the recorded runs. From the root of the source tree:

    python -m specdec_kernels.bench.report.report [bench/results [docs/benchmarks.md]]

The page has one section per run of `specdec bench ... --json bench/results/<name>.json`, newest first. Runs of whole
engines have a chart in docs/benchmarks/. `./build.sh docs` writes both; they are not in the source tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
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

from ..server.server import COLUMNS as SERVER_COLUMNS
from ..server.server import row as server_row
from .plot import name_of, plot_rates

REPLAY = "ngram_replay"
SERVER = "server"
ENGINES = "engines"
EVEN = (
    "Drafts are planted to be right for so many tokens and then wrong, in every request alike: a comparison at a fixed "
    "accept length, and no picture of text."
)
# Tokens a second by the acceptance of drafts (None: nothing is drafted), the engine, and the batch size.
Rates = dict[tuple[Any, str, int], float]
HEAD = """\
# Benchmarks

Written by `python -m specdec_kernels.bench.report.report` from the runs recorded in `bench/results/`, where
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
    if "note" in run:
        lines += ["", f"**{run['note']}**", ""]
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
        table = {ROUND: round_table, REPLAY: replay_table, SERVER: server_table, ENGINES: engines_table}.get(
            op, op_table
        )
        lines += ["", f"### {op}", "", *table([r for r in ops if r["op"] == op])]
    if calls:
        lines += ["", "### call_overhead", "", "| call | ns |", "|---|---:|"]
        lines += [f"| {r['params']['call']} | {r['host_us'] * 1e3:.0f} |" for r in calls]
    return "\n".join([*lines, ""])


def has_chart(run: dict[str, Any]) -> bool:
    """Runs of whole engines at several batch sizes have one, if their drafts are accepted alike."""
    rates = [r["params"] for r in run["results"] if "tokens_per_second" in r.get("facts", {})]
    return len({p["batch"] for p in rates if "batch" in p}) > 1 and len(acceptances(rates)) < 2


def acceptances(params: Iterable[dict[str, Any]]) -> list[Any]:
    """How often drafts were accepted, of those results that have any."""
    return list(dict.fromkeys(p["accept"] for p in params if p.get("num_steps")))


def round_table(results: list[dict[str, Any]]) -> list[str]:
    """One for each acceptance; what drafts nothing stands in the first."""
    lines = beside_fixed(results)
    for i, accept in enumerate(acceptances(r["params"] for r in results) or [None]):
        even = [EVEN, ""] if accept is not None and not isinstance(accept, str) else []
        of_this = [r for r in results if (r["params"]["accept"] == accept if r["params"]["num_steps"] else i == 0)]
        lines += [
            *even,
            round_head(of_this),
            "",
            "| " + " | ".join(ROUND_COLUMNS) + " |",
            "|---|" + "---:|" * (len(ROUND_COLUMNS) - 1),
            *("| " + " | ".join(round_row(r)) + " |" for r in of_this),
            "",
        ]
    return lines[:-1]


def beside_fixed(results: list[dict[str, Any]]) -> list[str]:
    """What an engine that chooses for itself reaches of plain decoding and of the best fixed draft, where a run has
    all of them."""
    rates = rates_of(results)
    adaptive = {name_of(r["params"]) for r in results if r["params"].get("adaptive")}
    plain = {batch: rate for (accept, _, batch), rate in rates.items() if accept is None}
    if len(adaptive) != 1 or not plain:
        return []
    (chosen,) = adaptive
    batches = sorted({batch for _, _, batch in rates})
    lines = [
        "Tokens a second: plain decoding, the best of it and the fixed drafts, and the adaptive engine, in brackets "
        "its share of either.",
        "",
        "| drafts | | " + " | ".join(map(str, batches)) + " |",
        "|---|---|" + "---:|" * len(batches),
        "| | plain | " + " | ".join(f"{plain[b]:.0f}" if b in plain else "" for b in batches) + " |",
    ]
    for accept in acceptances(r["params"] for r in results):
        best = [best_fixed(rates, accept, batch, chosen) for batch in batches]
        fixed = [f"{rate:.0f} {name.replace('none', 'plain')}" if name else "" for name, rate in best]
        reached = [
            with_shares(rates.get((accept, chosen, batch)), plain.get(batch), rate)
            for batch, (_, rate) in zip(batches, best, strict=True)
        ]
        lines += [
            f"| {drafts_text(accept)} | best fixed | " + " | ".join(fixed) + " |",
            "| | adaptive | " + " | ".join(reached) + " |",
        ]
    return [*lines, ""]


def rates_of(results: list[dict[str, Any]]) -> Rates:
    rates: Rates = {}
    for r in results:
        p, facts = r["params"], r.get("facts", {})
        if "tokens_per_second" in facts:
            rates[p["accept"] if p["num_steps"] else None, name_of(p), p["batch"]] = facts["tokens_per_second"]
    return rates


def best_fixed(rates: Rates, accept: Any, batch: int, chosen: str) -> tuple[str, float | None]:
    """The name and the rate of the fastest at this batch size that drafts nothing, or with this acceptance, apart from
    the engine `chosen`; where nothing was measured, "" and None."""
    of_batch = {name: rate for (a, name, b), rate in rates.items() if a in (accept, None) and b == batch}
    of_batch.pop(chosen, None)
    return max(of_batch.items(), key=lambda item: item[1], default=("", None))


def with_shares(rate: float | None, *others: float | None) -> str:
    """A rate, in brackets its share of each of the others; nothing where one of them was not measured."""
    shares = [f"{rate / other:.2f}" for other in others if rate and other]
    return f"{rate:.0f} ({', '.join(shares)})" if len(shares) == len(others) else ""


def drafts_text(accept: Any) -> str:
    """What the drafts of this acceptance are called."""
    if isinstance(accept, str):
        return accept
    return "all wrong" if accept == 1 else f"{accept:g} tokens"


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


def engines_table(results: list[dict[str, Any]]) -> list[str]:
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
    shared["accept"] = ", ".join(dict.fromkeys(str(r["params"]["accept"]) for r in results))
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


def server_table(results: list[dict[str, Any]]) -> list[str]:
    shared = {name: results[0]["params"][name] for name in ("shape", "dtype", "accept", "input", "output", "max_len")}
    return [
        f"{text_of(shared)}. Beside: of even prompts `Engine.generate`, of JSON the same texts without a schema, of a "
        "shared prefix the first request with it.",
        "",
        "| " + " | ".join(SERVER_COLUMNS) + " |",
        "|---|---|---:|---|" + "---:|" * (len(SERVER_COLUMNS) - 4),
        *("| " + " | ".join(server_row(r)) + " |" for r in results),
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


def main(arguments: list[str]) -> None:
    paths = ["bench/results", "docs/benchmarks.md"]
    results, target = (Path(path) for path in [*arguments, *paths[len(arguments) :]])
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    charts = target.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    for old in charts.glob("*.svg"):
        old.unlink()
    for name, run in runs.items():
        if has_chart(run):
            plot_rates(run, charts / f"{name}.svg")
    target.write_text(report(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
