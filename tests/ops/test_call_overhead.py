"""Bounds on what the Python side costs. They are generous: `specdec bench call_overhead` measures."""

from __future__ import annotations

import subprocess
import sys
import timeit

import torch

import specdec_kernels as sd


def test_import_takes_a_moment_and_no_heavy_modules() -> None:
    """Processor time, so that a busy machine does not count; 30 ms when it was written."""
    code = (
        "import sys, time; before = {*sys.modules}; start = time.process_time(); import specdec_kernels; "
        "print(time.process_time() - start, *(sys.modules.keys() - before & "
        "{'torch', 'numpy', 'transformers', 'rich', 'dataclasses', 'inspect'}))"
    )
    best = 1.0
    for _ in range(5):
        seconds, *heavy = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.split()
        assert not heavy, heavy
        best = min(best, float(seconds))
    assert best < 0.15


def test_an_op_of_six_tensors_takes_little_to_call() -> None:
    """An empty batch through ops.py; half a microsecond when it was written."""
    prefix_lens = torch.empty(0, dtype=torch.int32)
    pool = sd.make_page_pool(4, 0, 4, 16, prefix_lens)
    calls = 1000
    best = min(timeit.repeat(lambda: sd.free_pages(pool, prefix_lens), number=calls, repeat=50)) / calls
    assert best < 4e-6
