"""Generous bounds on the cost of the Python side; `specdec bench call_overhead` measures it."""

from __future__ import annotations

import subprocess
import sys
import time
import timeit

import torch

import specdec_kernels as sd


def test_import_is_fast_and_loads_no_heavy_modules() -> None:
    """CPU time, so that load of the machine does not count; 30 ms when this test was written."""
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


def test_op_call_overhead_of_six_tensors_is_small() -> None:
    """An empty batch through the Python wrapper, in CPU time; half a microsecond when this test was written."""
    prefix_lens = torch.empty(0, dtype=torch.int32)
    pool = sd.make_page_pool(4, 0, 4, 16, prefix_lens)
    call, calls = (lambda: sd.free_pages(pool, prefix_lens)), 1000
    best = min(timeit.repeat(call, timer=time.thread_time, number=calls, repeat=50)) / calls
    assert best < 4e-6
