"""Write the site's page of benchmarks and its charts from recorded runs: `specdec bench report`.

The page has one section per `specdec bench ... --json bench/results/<name>.json`, newest first. Runs of whole engines
have a chart in docs/benchmarks/. `./build.sh docs` writes both; they are not in the source tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .plot import plot_rates, series_name
from .record import read_record
from .tables import (
    ENGINES,
    HEADS,
    REPLAY,
    ROUND,
    ROUND_COLUMNS,
    SERVER,
    SERVER_COLUMNS,
    heads_table,
    op_columns,
    op_row,
    params_text,
    round_head,
    round_row,
    server_row,
    steps_text,
)

EVEN = (
    "Drafts are right for a fixed number of tokens and then wrong, in every request alike: a comparison at a fixed "
    "accept length, unlike real text."
)
# Tokens per second by acceptance of the drafts (None: no drafts), engine and batch size.
Rates = dict[tuple[Any, str, int], float]
HEAD = """\
# Benchmarks

Written by `specdec bench report` from the runs recorded in `bench/results/`, where
[README.md](../bench/results/README.md) defines every column. Each result was checked against its reference before it
was timed. The `time us` of an op is that of calls that follow each other; its `between others us` is that of calls
between the other kernels of a decoder layer, as in a model.
"""


def report(runs: dict[str, dict[str, Any]]) -> str:
    """Return the page of these records, by name."""
    newest_first = sorted(runs.items(), key=lambda item: (item[1]["date"], item[0]), reverse=True)
    return "\n".join([HEAD, *(section(name, run) for name, run in newest_first)])


def section(name: str, run: dict[str, Any]) -> str:
    """Return the section of a record."""
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
        lines += ["", f"![tokens per second by batch size](benchmarks/{name}.svg)"]
    calls = [r for r in run["results"] if "call" in r["params"]]
    ops = [r for r in run["results"] if "call" not in r["params"]]
    for op in dict.fromkeys(r["op"] for r in ops):
        table = TABLES.get(op, op_table)
        lines += ["", f"### {op}", "", *table([r for r in ops if r["op"] == op])]
    if calls:
        lines += ["", "### call_overhead", "", "| call | ns |", "|---|---:|"]
        lines += [f"| {r['params']['call']} | {r['host_us'] * 1e3:.0f} |" for r in calls]
    return "\n".join([*lines, ""])


def has_chart(run: dict[str, Any]) -> bool:
    """Return whether a record has a chart: engines at several batch sizes, with one acceptance."""
    rates = [r["params"] for r in run["results"] if "tokens_per_second" in r.get("facts", {})]
    return len({p["batch"] for p in rates if "batch" in p}) > 1 and len(acceptances(rates)) < 2


def acceptances(params: Iterable[dict[str, Any]]) -> list[Any]:
    """Return the acceptances of results with drafts, each once."""
    return list(dict.fromkeys(p["accept"] for p in params if p.get("num_steps")))


def round_table(results: list[dict[str, Any]]) -> list[str]:
    """Return a table for each acceptance; results without drafts are in the first."""
    lines = adaptive_table(results)
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


def adaptive_table(results: list[dict[str, Any]]) -> list[str]:
    """Return a table of the adaptive engine, plain decoding and the best fixed draft, if the run has all three."""
    rates = rates_of(results)
    adaptive = {series_name(r["params"]) for r in results if r["params"].get("adaptive")}
    plain = {batch: rate for (accept, _, batch), rate in rates.items() if accept is None}
    if len(adaptive) != 1 or not plain:
        return []
    (chosen,) = adaptive
    batches = sorted({batch for _, _, batch in rates})
    lines = [
        "Tokens per second: plain decoding, the best of plain decoding and fixed drafts, and the adaptive engine, in "
        "brackets its multiple of each.",
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
    """Return the rates of results that have one."""
    rates: Rates = {}
    for r in results:
        p, facts = r["params"], r.get("facts", {})
        if "tokens_per_second" in facts:
            rates[p["accept"] if p["num_steps"] else None, series_name(p), p["batch"]] = facts["tokens_per_second"]
    return rates


def best_fixed(rates: Rates, accept: Any, batch: int, chosen: str) -> tuple[str, float | None]:
    """Return name and rate of the fastest at this batch size, without drafts or with this acceptance, except `chosen`.

    Returns "" and None if nothing was measured.
    """
    of_batch = {name: rate for (a, name, b), rate in rates.items() if a in (accept, None) and b == batch}
    of_batch.pop(chosen, None)
    return max(of_batch.items(), key=lambda item: item[1], default=("", None))


def with_shares(rate: float | None, *others: float | None) -> str:
    """Return a rate and its multiples of the others; nothing if one of them was not measured."""
    shares = [f"{rate / other:.2f}" for other in others if rate and other]
    return f"{rate:.0f} ({', '.join(shares)})" if len(shares) == len(others) else ""


def drafts_text(accept: Any) -> str:
    """Return the name of drafts of this acceptance."""
    if isinstance(accept, str):
        return accept
    return "all wrong" if accept == 1 else f"{accept:g} tokens"


def replay_table(results: list[dict[str, Any]]) -> list[str]:
    """Return the accepted drafts per lookup, a column per drafter."""
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
    """Return tokens per second and accept length, a column per engine."""
    engines = list(dict.fromkeys(r["params"]["engine"] for r in results))
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for r in results:
        p, facts = r["params"], r.get("facts", {})
        cell = "wrong text" if r["error"] else "not measured"
        if facts:
            cell = f"{facts['tokens_per_second']:.0f}"
            cell += f" ({facts['accept_length']:.2f})" if p["num_steps"] and "accept_length" in facts else ""
        rows.setdefault((steps_text(p), p["batch"]), {})[p["engine"]] = cell
    shared = {name: results[0]["params"][name] for name in ("shape", "dtype", "accept", "input", "output", "max_len")}
    shared["accept"] = ", ".join(dict.fromkeys(str(r["params"]["accept"]) for r in results))
    return [
        f"{params_text(shared)}. Tokens per second of decoding, in brackets the accept length.",
        "",
        "| algorithm | batch | " + " | ".join(engines) + " |",
        "|---|---:|" + "---:|" * len(engines),
        *(
            f"| {name} | {batch} | " + " | ".join(cells.get(engine, "") for engine in engines) + " |"
            for (name, batch), cells in rows.items()
        ),
    ]


def server_table(results: list[dict[str, Any]]) -> list[str]:
    """Return throughput and latency of a server, with their references."""
    shared = {name: results[0]["params"][name] for name in ("shape", "dtype", "accept", "input", "output", "max_len")}
    return [
        f"{params_text(shared)}. The reference is `Engine.generate` for even prompts, the same texts without a "
        "schema for JSON, and the first request for a shared prefix.",
        "",
        "| " + " | ".join(SERVER_COLUMNS) + " |",
        "|---|---|---:|---|" + "---:|" * (len(SERVER_COLUMNS) - 4),
        *("| " + " | ".join(server_row(r)) + " |" for r in results),
    ]


def heads_lines(results: list[dict[str, Any]]) -> list[str]:
    """Return accept lengths by domain and tokens per second, a row per draft."""
    columns, rows = heads_table(results)
    shared = {name: results[0]["params"][name] for name in ("target", "dtype", "new_tokens")}
    return [
        f"{params_text(shared)}. Accept lengths by domain of prompt, and tokens per second.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * (len(columns) - 2),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def op_table(results: list[dict[str, Any]]) -> list[str]:
    """Return the times of an op, with columns for each baseline."""
    columns = op_columns(results)[1:]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for r in results:
        if r.get("skipped"):
            lines.append(f"| {params_text(r['params'])} | not timed: {r['skipped']} |" + " |" * (len(columns) - 2))
        elif r["error"]:
            lines.append(f"| {params_text(r['params'])} | wrong result: {r['error']} |" + " |" * (len(columns) - 2))
        else:
            lines.append("| " + " | ".join(op_row(r, columns)) + " |")
    return lines


TABLES = {
    ROUND: round_table,
    REPLAY: replay_table,
    SERVER: server_table,
    ENGINES: engines_table,
    HEADS: heads_lines,
}


def write_report(results: Path, page: Path) -> None:
    """Write the page of the records in a folder, and its charts into a folder of the page's name."""
    runs = {path.stem: read_record(path) for path in sorted(results.glob("*.json"))}
    charts = page.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    for old in charts.glob("*.svg"):
        old.unlink()
    for name, run in runs.items():
        if has_chart(run):
            plot_rates(run, charts / f"{name}.svg")
    page.write_text(report(runs))
