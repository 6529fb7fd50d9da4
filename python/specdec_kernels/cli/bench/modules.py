"""The modules of `specdec_kernels.bench` that the command calls, each imported when it is first used.

In the source tree that package is bench/, the name by which type checkers find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.compare import engine_comparison
    from bench.engine import forward, ngram_replay, round
    from bench.ops import baseline, call_overhead, cases, ceilings, harness
    from bench.report import headline, plot, record, report, tables
    from bench.server import server
else:
    from importlib import import_module

    FOLDERS = {
        "compare": ("engine_comparison",),
        "engine": ("forward", "ngram_replay", "round"),
        "ops": ("baseline", "call_overhead", "cases", "ceilings", "harness"),
        "report": ("headline", "plot", "record", "report", "tables"),
        "server": ("server",),
    }

    def __getattr__(name: str) -> Any:
        for folder, names in FOLDERS.items():
            if name in names:
                return import_module(f"specdec_kernels.bench.{folder}.{name}")
        raise AttributeError(name)


__all__ = [
    "baseline", "call_overhead", "cases", "ceilings", "engine_comparison", "forward", "harness", "headline",
    "ngram_replay", "plot", "record", "report", "round", "server", "tables",
]  # fmt: skip
