"""Run one engine with one algorithm: `python -m specdec_kernels.bench.compare.engines.worker JOB.json OUT.json`.

OUT.json is written after every batch size, so that measurements survive an engine that hangs or dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from . import PACKAGES, Job, Runner, algorithm_of, how_installed

VARIABLES = ("SPECDEC_SGLANG", "SPECDEC_VLLM", "VLLM_USE_")  # how variables begin that choose what is measured


def measure(runner: Runner, job: Job, runs: list[list[list[list[int]]]]) -> dict[str, Any]:
    """Return seconds of all waves with short and long outputs, by repeat, and texts and rounds of the last repeat."""
    seconds: dict[str, list[float]] = {"short": [], "long": []}
    tokens: list[list[int]] = []
    rounds: list[int | None] = []
    first, *others = runs
    for wave in first:  # compiles and captures what this size and that of the last rounds still need
        runner.generate(wave, job.long)
    for name, waves in zip(("short", "long") * job.repeats, others, strict=True):
        tokens, rounds = [], []
        start = time.perf_counter()
        generated = [runner.generate(wave, getattr(job, name)) for wave in waves]
        seconds[name].append(time.perf_counter() - start)
        for result in generated:
            tokens += result.tokens
            rounds.append(result.rounds)
    total = None if None in rounds else sum(r for r in rounds if r is not None)
    return {"batch": len(first[0]), "seconds": seconds, "tokens": tokens, "rounds": total}


@contextmanager
def turn(job: Job) -> Iterator[None]:
    """Wait until all engines that share the GPU have started or ended, and then for this engine's turn."""
    if job.turns is None:
        yield
        return
    folder = Path(job.turns)
    (folder / f"{job.engine}-{job.algorithm} has started").touch()
    while len({file.name.split(" ")[0] for file in folder.glob("* *")}) < job.runners:
        time.sleep(0.1)
    with (folder / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> None:
    """Run the job of a file and write the result."""
    source, target = map(Path, arguments)
    job = Job(**json.loads(source.read_text()))
    engine = import_module(f".{job.engine}", __package__)
    start = time.perf_counter()
    runner = engine.Runner(job, algorithm_of(job.algorithm))
    import torch  # imported by the engine already
    import transformers

    result: dict[str, Any] = {
        "version": engine.version(),
        "installed": how_installed(PACKAGES[job.engine]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "options": job.options,
        "start_seconds": time.perf_counter() - start,
        "batches": [],
    }
    with turn(job):
        for runs in job.batches:
            result["batches"].append(measure(runner, job, runs))
            target.write_text(json.dumps(result))
    target.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
