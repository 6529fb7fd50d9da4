"""Ops with random, forged and empty arguments: see support/random_calls.py.

SPECDEC_FUZZ=100000 pytest -m fuzz makes that many calls. A failure names its seed: SPECDEC_FUZZ_SEED=<seed> makes that call
alone. A build by `./build.sh dev --sanitize` finds the most.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.exhaustive import exhaustive
from support.op_calls import calls
from support.random_calls import OPS, check_twice, each_tensor, each_with_an_empty_dimension, without_size

pytestmark = pytest.mark.fuzz
CALLS = int(os.environ.get("SPECDEC_FUZZ", 700))


@pytest.mark.parametrize("seeds", ["fixed", *exhaustive("fresh")])
def test_ops_of_random_calls_refuse_or_are_deterministic(seeds: str) -> None:
    """A process of its own makes the calls; if one kills it, its output still has the seed."""
    only = os.environ.get("SPECDEC_FUZZ_SEED")
    first = int(only) if only else 0 if seeds == "fixed" else random.SystemRandom().randrange(2**40)
    command = [sys.executable, "-m", "support.random_calls", str(first), str(1 if only else CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    seed = done.stdout.rsplit("\n", 2)[-2:-1]
    assert done.returncode == 0, f"SPECDEC_FUZZ_SEED={''.join(seed)} (exit status {done.returncode})\n{done.stderr}"


@pytest.mark.parametrize("op", OPS)
def test_ops_distinguish_empty_tensors_from_none(op: str) -> None:
    """An empty tensor's data pointer is null, which an op must not read as an omitted argument."""
    torch.manual_seed(0)
    for arguments, options in calls(op, torch.device("cpu")):
        named = dict(enumerate(arguments)) | options
        sizes = {n for value in named.values() for _, x in each_tensor(value) for n in x.shape}
        for size in sorted(sizes - {0}):
            check_twice(op, arguments, options, {key: without_size(value, size) for key, value in named.items()}, False)
            for key, value in named.items():
                check_twice(op, arguments, options, named | {key: without_size(value, size)}, False)


@pytest.mark.parametrize("op", OPS)
def test_ops_of_one_empty_dimension_refuse_or_are_deterministic(op: str) -> None:
    """Other dimensions keep their sizes, as in no call whose shapes agree."""
    torch.manual_seed(0)
    for arguments, options in calls(op, torch.device("cpu")):
        named = dict(enumerate(arguments)) | options
        for key, value in named.items():
            for empty in each_with_an_empty_dimension(value):
                check_twice(op, arguments, options, named | {key: empty}, False)
