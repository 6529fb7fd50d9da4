"""The rows of a record as text, for the terminal and for the page of benchmarks. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Line = dict[str, Any]

# Values of `op`.
ROUND, CALLS, ENGINES, SERVER, REPLAY = "round", "call_overhead", "engines", "server", "ngram_replay"
HEADS = "heads"

BETWEEN = " between others us"  # the end of a column's name: of calls between a layer's other kernels
COLUMNS = ["op", "size", "time us", BETWEEN.strip(), "p90 us", "host us", "floor us", "of floor", "inputs"]
LEAST = ["inputs", "host us", "floor us", "p90 us", "of floor"]  # hidden first on a narrow terminal

ROUND_HEAD = ("shape", "tp", "dtype", "weights", "implementation", "input", "output", "max_len", "accept")
ROUND_COLUMNS = [
    "algorithm", "batch", "ms/round", "p90 ms", "tokens/s", "accept length", "p10 to p90", "gpu ms", "idle", "host us",
    "emit us", "wait us", "floor ms", "of floor", "run tokens/s", "first token ms", "rounds by nodes",
]  # fmt: skip
ROUND_LEAST = [
    "rounds by nodes", "first token ms", "emit us", "wait us", "run tokens/s", "host us", "idle", "floor ms", "gpu ms",
    "p10 to p90", "p90 ms", "of floor",
]  # fmt: skip
MOVED_COLUMNS = ["algorithm", "batch", "weights GB", "KV GB", "states GB", "time / floor", "scratch / copies of states"]
KERNEL_COLUMNS = ["kernel", "launches", "us", "share"]
MOST_KERNELS, NAME_WIDTH = 16, 110  # of a round, that are shown
ENGINE_COLUMNS = ["engine", "algorithm", "batch", "tokens/s", "accept length", "start s"]
SERVER_COLUMNS = [
    "server", "algorithm", "clients", "prompts", "tokens/s", "reference", "share", "first token ms", "reference ms",
    "ms between", "p99",
]  # fmt: skip

NOISY = 1.5  # p90 over the median from which on a star marks it


def params_text(params: Line) -> str:
    """Return parameters as `name=value` words."""
    return " ".join(f"{name}={value}" for name, value in params.items())


def number_text(value: float | None) -> str:
    """Return a number with two decimals below 100, else without; nothing for None."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def steps_text(params: Line) -> str:
    """Return the algorithm, its steps, branches and nodes, and how the draft's weights are stored."""
    steps = f" ({params['num_steps']}, {params['topk']}, {params['nodes']})" if params["num_steps"] else ""
    stored = f" {params['draft_weights']}" if "draft_weights" in params else ""
    return f"{params['algorithm']}{steps}{stored}"


def p90_text(line: Line, scale: float = 1.0) -> str:
    """Return the p90, with a star if the samples are far apart."""
    p90 = line["p90_us"]
    return (number_text(p90 * scale) if p90 is not None else "") + star_text(p90, line["time_us"])


def star_text(p90: float | None, median: float | None) -> str:
    """Return a star if the p90 is far above the median."""
    return "*" if p90 is not None and median is not None and p90 > NOISY * median else ""


def failure_text(line: Line, skipped: str = "skipped") -> str | None:
    """Return the cell of a result without a time, None for one with."""
    return "WRONG" if line["error"] else skipped if line.get("skipped") else None


def baseline_names(lines: Iterable[Line]) -> list[str]:
    """Return the names of all baselines, in order."""
    return list(dict.fromkeys(name for line in lines for name in line["baselines"]))


def op_columns(lines: Sequence[Line]) -> list[str]:
    """Return COLUMNS and those of the baselines, without times between other kernels if none was measured."""
    baselines = [f"{name}{end}" for name in baseline_names(lines) for end in (" us", BETWEEN)]
    between = any("between_us" in line for line in lines)
    return [name for name in (*COLUMNS, *baselines) if between or not name.endswith(BETWEEN.strip())]


def op_row(line: Line, columns: Sequence[str]) -> list[str]:
    """Return the cells of an op under these of its columns."""
    cells = {"op": line["op"], "size": params_text(line["params"])}
    if failure := failure_text(line):
        cells["time us"] = failure
    else:
        plan = line.get("facts", {}).get("plan")
        between = line.get("between_us")
        cells |= {
            "size": cells["size"] + (f" plan={plan}" if plan else ""),
            "time us": number_text(line["time_us"]),
            BETWEEN.strip(): number_text(between) + star_text(line.get("between_p90_us"), between),
            "p90 us": p90_text(line),
            "host us": number_text(line["host_us"]),
            "floor us": number_text(line["floor_us"]),
            "of floor": f"{line['of_floor']:.0%}" if line["of_floor"] else "",
            "inputs": "cold" if line["cold"] else "warm",
        }
        for name, time in line["baselines"].items():
            cells[f"{name} us"] = ratio_text(time, line["time_us"])
        for name, time in line.get("between_baselines", {}).items():
            cells[f"{name}{BETWEEN}"] = ratio_text(time, between)
    return [cells.get(name, "") for name in columns]


def ratio_text(baseline: float, ours: float | None) -> str:
    """Return a baseline's time and its multiple of ours, if that was measured."""
    if not ours:
        return number_text(baseline)
    ratio = baseline / ours
    return f"{number_text(baseline)} ({ratio:.{1 if ratio >= 1 else 2}f}x)"


def round_head(lines: Sequence[Line]) -> str:
    """Return the parameters that all results of `round` share; the acceptance is that of results with drafts."""
    params = max((line["params"] for line in lines), key=lambda p: p["num_steps"])
    return params_text({name: params[name] for name in ROUND_HEAD if name in params})


def round_row(line: Line) -> list[str]:
    """Return the cells of a result of `round` under ROUND_COLUMNS."""
    params = line["params"]
    head = [steps_text(params), str(params["batch"])]
    if failure := failure_text(line):
        return [*head, failure, *[""] * (len(ROUND_COLUMNS) - 3)]
    facts = line["facts"]
    return [
        *head,
        number_text(line["time_us"] * 1e-3),
        p90_text(line, 1e-3),
        f"{facts['tokens_per_second']:.0f}",
        f"{facts['accept_length']:.2f}",
        f"{facts['accept_length_p10']:.2f} to {facts['accept_length_p90']:.2f}" if "accept_length_p10" in facts else "",
        number_text(facts["gpu_us"] * 1e-3) if "gpu_us" in facts else "",
        f"{facts['idle']:.2%}" if "idle" in facts else "",
        *(number_text(facts.get(name)) for name in ("host_us", "emit_us", "wait_us")),
        number_text(line["floor_us"] * 1e-3),
        f"{line['of_floor']:.0%}",
        *(f"{facts[name]:.0f}" if name in facts else "" for name in ("run_tokens_per_second", "first_token_ms")),
        facts.get("nodes", ""),
    ]


def moved_row(line: Line) -> list[str]:
    """Return the cells of a result of `round` under MOVED_COLUMNS."""
    facts = line["facts"]
    return [
        steps_text(line["params"]),
        str(line["params"]["batch"]),
        *(f"{facts.get(name, 0) / 1e9:.3f}" for name in ("weight_bytes", "kv_bytes", "state_bytes")),
        f"{1 / line['of_floor']:.2f}",
        f"{facts['scratch_share']:.1%}" if "scratch_share" in facts else "",
    ]


def kernel_rows(line: Line) -> list[list[str]]:
    """Return the cells of the longest kernels of a result of `round` under KERNEL_COLUMNS."""
    profile = line["profile"]
    return [
        [
            kernel["name"][:NAME_WIDTH],
            f"{kernel['launches']:.4g}",
            f"{kernel['microseconds']:.1f}",
            f"{kernel['microseconds'] / profile['microseconds']:.1%}",
        ]
        for kernel in profile["kernels"][:MOST_KERNELS]
    ]


def kernels_head(line: Line) -> str:
    """Return what a result of `round` says about its kernels as a whole."""
    profile = line["profile"]
    count = sum(kernel["launches"] for kernel in profile["kernels"])
    return (
        f"{steps_text(line['params'])}, batch {line['params']['batch']}: {count:.0f} kernels in "
        f"{profile['microseconds']:.0f} us, {profile['idle']:.0f} us of them idle, mean of {profile['launches']} rounds"
    )


def engine_row(line: Line) -> list[str]:
    """Return the cells of a result of `engines` under ENGINE_COLUMNS."""
    params, facts = line["params"], line.get("facts", {})
    head = [params["engine"], params["algorithm"], str(params["batch"])]
    if not facts:
        return [*head, failure_text(line) or "skipped", "", ""]
    accept = f"{facts['accept_length']:.2f}" if "accept_length" in facts else ""
    return [*head, f"{facts['tokens_per_second']:.0f}", accept, f"{facts['start_seconds']:.0f}"]


def heads_table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of results of `heads`: a column for the accept length of each domain."""
    domains = list(dict.fromkeys(domain for line in lines for domain in line["facts"]["accept_length"]))
    rows = []
    for line in lines:
        facts = line["facts"]
        lengths = [facts["accept_length"].get(domain) for domain in domains]
        rows.append(
            [
                *(line["params"][name] for name in ("draft", "prompts")),
                *map(number_text, lengths),
                f"{facts['tokens_per_second']:.0f}",
                f"{facts['equal_texts']} of {facts['texts']}",
            ]
        )
    return ["draft", "prompts", *domains, "tokens/s", "texts equal"], rows


def server_row(line: Line) -> list[str]:
    """Return the cells of a result of `server` under SERVER_COLUMNS.

    Older records have `prefix` prompts and other servers too.
    """
    params, facts = line["params"], line.get("facts", {})
    kind = params["prompts"]
    head = [params.get("server", "ours"), steps_text(params), str(params["concurrency"]), kind]
    if failure := failure_text(line, "refused"):
        return [*head, failure, *[""] * (len(SERVER_COLUMNS) - 5)]
    reference = {"even": "generate_tokens_per_second", "json": "free_tokens_per_second"}.get(kind, "")
    first = {"even": "generate_first_token_ms", "prefix": "uncached_first_token_ms"}.get(kind, "")
    rates = [facts.get("tokens_per_second"), facts.get(reference)]
    share = "" if None in rates else f"{rates[0] / rates[1]:.1%}"
    times = (facts.get(name) for name in ("first_token_ms", first, "event_ms", "event_p99_ms"))
    return [
        *head,
        *("" if rate is None else f"{rate:.0f}" for rate in rates),
        share,
        *("" if time is None else f"{time:.2f}" for time in times),
    ]
