"""Engines that `specdec bench engines` compares, each run in a process of its own through one interface.

An engine is a module here with `version()`, and `Runner(job, algorithm)`, which loads the models as the engine's users
would. Its `generate(prompts, count)` greedily generates exactly `count` tokens for each prompt.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from typing import Any, Protocol
from urllib.parse import unquote

from ...sizes import setting_of

# Engines by name, and the package that each needs.
PACKAGES = {
    "ours": "specdec_kernels",
    "sglang": "sglang",
    "sglang_fa3": "sglang",
    "sglang_plugin": "sglang",
    "vllm": "vllm",
    "vllm_plugin": "vllm",
}
# Groups of entry points in which engines look for plugins.
PLUGINS = {"sglang_plugin": "sglang.srt.plugins", "vllm_plugin": "vllm.general_plugins"}


@dataclass(frozen=True)
class Algorithm:
    """Options of drafting that all engines share. Without steps: plain decoding.

    Attributes:
        drafter: "eagle3"; "mtp", a layer of the target; "dspark" or "dflash", a block drafter; or "ngram", which drafts
            what followed the last tokens elsewhere in the text.
        with_ngrams: in a union with the n-gram index.
    """

    num_steps: int = 0
    topk: int = 1
    num_nodes: int = 1
    adaptive: bool = False
    drafter: str = "eagle3"
    with_ngrams: bool = False

    @property
    def is_quoted(self) -> bool:
        """Whether prompts quote what is to be written."""
        return self.with_ngrams or self.drafter == "ngram"


ALGORITHMS = {
    "plain": Algorithm(),
    "chain": Algorithm(5, 1, 6),
    "tree": Algorithm(5, 10, 32),
    "adaptive": Algorithm(5, 10, 32, adaptive=True),
    "adaptive_chain": Algorithm(5, 1, 6, adaptive=True),
    "mtp_chain": Algorithm(3, 1, 4, drafter="mtp"),
    "mtp_tree": Algorithm(4, 4, 16, drafter="mtp"),
    "mtp_adaptive": Algorithm(4, 4, 16, adaptive=True, drafter="mtp"),
    "dspark_chain": Algorithm(7, 1, 8, drafter="dspark"),
    "dspark_tree": Algorithm(7, 32, 32, drafter="dspark"),
    "dspark_adaptive": Algorithm(7, 32, 32, adaptive=True, drafter="dspark"),
    "dflash_chain": Algorithm(7, 1, 8, drafter="dflash"),
    "dflash_tree": Algorithm(7, 32, 32, drafter="dflash"),
    "ngram": Algorithm(11, 1, 12, drafter="ngram"),
}
BLOCK_DRAFTERS = "dspark", "dflash"


def algorithm_of(name: str) -> Algorithm:
    """Return one of `ALGORITHMS`, a chain or tree with a number of tokens, `chain4`, or a union, `tree16+ngram`."""
    return setting_of(ALGORITHMS, name)


FOLDERS = {"eagle3": "head", "dspark": "dspark", "dflash": "dflash"}  # of drafts, next to the target's


@dataclass(frozen=True)
class Job:
    """The input of a worker, as JSON."""

    engine: str
    algorithm: str
    target: str  # folders in published formats
    head: str
    device: str
    dtype: str
    max_len: int
    # Prompts by batch size, run, wave and request. The first run is a warm-up; after it, short and long runs alternate.
    batches: list[list[list[list[list[int]]]]]
    short: int  # tokens of the run that is subtracted from the long one
    long: int
    repeats: int
    turns: str | None = None  # the folder in which engines that share a GPU take turns
    runners: int = 1  # engines that share the GPU
    served: bool = False  # requests are streams of the engine's server
    options: dict[str, Any] = field(default_factory=dict)  # more of the engine's class


@dataclass(frozen=True)
class Generated:
    """The result of a call."""

    tokens: list[list[int]]
    rounds: int | None  # of all requests together, if the engine reports it


class Runner(Protocol):
    """An engine with its models loaded."""

    def __init__(self, job: Job, algorithm: Algorithm) -> None: ...

    def generate(self, prompts: list[list[int]], count: int) -> Generated: ...


def is_installed(engine: str, folders: list[str]) -> bool:
    """Return whether a worker finds the engine and its plugin, with `folders` before its own path."""
    if engine in PLUGINS:
        there = (point for found in distributions(path=[*folders, *sys.path]) for point in found.entry_points)
        if not any(point.group == PLUGINS[engine] and point.name == "specdec" for point in there):
            return False
    if PathFinder.find_spec(PACKAGES[engine], folders) is not None:
        return True
    return importlib.util.find_spec(PACKAGES[engine]) is not None


def can_run(engine: str, algorithm: Algorithm, *, served: bool = False) -> bool:
    """Return whether an engine has an algorithm that another entry does not cover.

    SGLang has no adaptive drafts, and vLLM has no trees. SGLang uses FA3 by default except for trees. Both draft chains
    alone with block drafters, which our plugins leave to them. Unions with the n-gram index are ours alone. Only
    SGLang's server is timed here; `specdec bench server` times ours.
    """
    if algorithm.with_ngrams and engine != "ours":
        return False
    if served and PACKAGES[engine] != "sglang":
        return False
    if PACKAGES[engine] == "sglang" and algorithm.adaptive:
        return False
    if algorithm.drafter in BLOCK_DRAFTERS:
        return engine == "ours" or (engine in ("sglang", "vllm") and algorithm.topk == 1)
    if engine == "sglang_fa3":
        return algorithm.topk > 1 or algorithm.drafter == "ngram"
    return PACKAGES[engine] != "vllm" or algorithm.topk == 1


def max_batch(job: Job) -> int:
    """Return the largest number of requests at a time."""
    return max(len(wave) for runs in job.batches for waves in runs for wave in waves)


def kv_tokens(job: Job) -> int | None:
    """Return the KV capacity in tokens of an engine that shares a GPU; None if it has the GPU alone.

    It is a quarter more than the largest batch needs.
    """
    return None if job.turns is None else max_batch(job) * job.max_len * 5 // 4


def how_installed(package: str) -> str | None:
    """Return where the package was installed from by its metadata: an installer, a file name or a URL."""
    import importlib.metadata as metadata
    import json

    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    came_from: Any = json.loads(found.read_text("direct_url.json") or "{}")
    url = str(came_from.get("url", ""))
    if url.startswith("file:"):  # the folder means nothing on another machine
        return unquote(url.rsplit("/", 1)[-1])
    return url or (found.read_text("INSTALLER") or "unpacked wheel").strip()
