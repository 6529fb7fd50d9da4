"""Whole engines beside each other on one checkpoint: each in a process of its own, driven by one interface.

An engine is a module here with `version()`, and `Runner(job, algorithm)`, which loads the models as the engine's users
would and whose `generate(prompts, count)` greedily writes exactly `count` tokens behind each prompt.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from typing import Any, Protocol
from urllib.parse import unquote

# The engines by name, and the package that must be installed for each.
PACKAGES = {
    "ours": "specdec_kernels",
    "sglang": "sglang",
    "sglang_fa3": "sglang",
    "sglang_plugin": "sglang",
    "vllm": "vllm",
    "vllm_plugin": "vllm",
}
SERVED = "planted"  # the name of a model that is served
# Where those look for what plugs into them.
PLUGINS = {"sglang_plugin": "sglang.srt.plugins", "vllm_plugin": "vllm.general_plugins"}


@dataclass(frozen=True)
class Algorithm:
    """How to draft, in the terms that engines share. No steps: plain decoding."""

    num_steps: int = 0
    topk: int = 1
    num_nodes: int = 1
    adaptive: bool = False
    ngram: bool = False  # drafts are what followed the last tokens elsewhere in the text


ALGORITHMS = {
    "plain": Algorithm(),
    "chain": Algorithm(5, 1, 6),
    "tree": Algorithm(5, 10, 32),
    "adaptive": Algorithm(5, 10, 32, adaptive=True),
    "ngram": Algorithm(11, 1, 12, ngram=True),
}


@dataclass(frozen=True)
class Job:
    """What a worker gets, as JSON."""

    engine: str
    algorithm: str
    target: str  # folders in published formats
    head: str
    device: str
    dtype: str
    max_len: int
    # Of each batch size its runs, of each run its waves, of each wave the prompts. The first run counts for nothing;
    # behind it a short one and a long one take turns.
    batches: list[list[list[list[list[int]]]]]
    short: int  # tokens of the run that is taken off the long one
    long: int
    repeats: int
    turns: str | None = None  # the folder in which engines that share a GPU take turns
    runners: int = 1  # how many they are


@dataclass(frozen=True)
class Generated:
    """Of one call."""

    tokens: list[list[int]]
    rounds: int | None  # of all requests together, where the engine tells


class Runner(Protocol):
    def __init__(self, job: Job, algorithm: Algorithm) -> None: ...

    def generate(self, prompts: list[list[int]], count: int) -> Generated: ...


def is_installed(engine: str, folders: list[str]) -> bool:
    """Whether a worker finds the engine, with `folders` before its own path, and what plugs into it."""
    if engine in PLUGINS:
        there = (point for found in distributions(path=[*folders, *sys.path]) for point in found.entry_points)
        if not any(point.group == PLUGINS[engine] and point.name == "specdec" for point in there):
            return False
    if PathFinder.find_spec(PACKAGES[engine], folders) is not None:
        return True
    return importlib.util.find_spec(PACKAGES[engine]) is not None


def can_run(engine: str, algorithm: Algorithm) -> bool:
    """Adaptive trees are ours alone, and vLLM has no trees. SGLang takes FA3 by itself for all but trees."""
    if algorithm.adaptive:
        return engine == "ours"
    if engine == "sglang_fa3":
        return algorithm.topk > 1 or algorithm.ngram
    return PACKAGES[engine] != "vllm" or algorithm.topk == 1


def max_batch(job: Job) -> int:
    return max(len(wave) for runs in job.batches for waves in runs for wave in waves)


def kv_tokens(job: Job) -> int | None:
    """Tokens whose KV an engine that shares a GPU has room for, a quarter more than the largest batch's; else None."""
    return None if job.turns is None else max_batch(job) * job.max_len * 5 // 4


def how_installed(package: str) -> str | None:
    """What put the package here, as its metadata says: pip, or a path or address that it came from."""
    import importlib.metadata as metadata
    import json

    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    came_from: Any = json.loads(found.read_text("direct_url.json") or "{}")
    url = str(came_from.get("url", ""))
    if url.startswith("file:"):  # whose folder says nothing elsewhere
        return unquote(url.rsplit("/", 1)[-1])
    return url or (found.read_text("INSTALLER") or "unpacked wheel").strip()
