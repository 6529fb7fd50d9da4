"""The compiled module at the edges of a process.

Objects without __init__, exit with daemon threads running, second interpreters, storage that changes during a call.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C
from support.exhaustive import thinned

# exit() calls sleep(1), the exit code, after Python has ended: the other threads go on for a second.
ENDS = {
    "soon": "",
    "late": """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
sys.exit(1)
""",
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["NgramIndex", "RoundCosts", "Scheduler"])
def test_objects_without_init_are_refused(name: str) -> None:
    cls = getattr(_C, name)
    nobody = cls.__new__(cls)
    members = [member for member in vars(cls) if not member.startswith("_")]
    assert members
    tensors = [torch.zeros(1, dtype=torch.int32)] * 17
    calls = {
        "extend": (*tensors[:2], None, None),
        "draft": (None, tensors[0], 2, False, 0.0, 0, 1.0, 1.0, 1.0, 1.0, *tensors[:9]),
    }
    for member in members:
        if isinstance(vars(cls)[member], staticmethod):
            continue
        with pytest.raises(TypeError) as error:
            attribute = getattr(nobody, member)
            attribute(*calls.get(member, ()))
        if member in calls or not callable(getattr(cls, member)):
            message = f"specdec_kernels._C.{name} is not initialised, expected __init__ to be called"
            assert str(error.value) == message, member


CALLS = ["index.insert(text)", "index.draft(None, lens, 16)", "index.extend(rows, counts, None)", "index.digest()"]


# A thread of the default run comes for the GIL from each call soon, and late from one: all come back by the same code.
@pytest.mark.parametrize(
    ("call", "end"),
    thinned(itertools.product(CALLS, ENDS), lambda case: case[1] == "soon" or case[0] == CALLS[-1]),
)
def test_exit_while_a_daemon_thread_is_in_a_call(call: str, end: str) -> None:
    """Some dozens of threads, which leave the GIL and come for it all the time, some of them when Python ends."""
    program = f"""
import sys, threading, time
import numpy as np
import specdec_kernels as sd

index = sd.NgramIndex(1 << 18, 64, 1 << 20)
text, lens = np.arange(5000, dtype=np.int32), np.zeros(64, np.int32)
rows, counts = np.ones((64, 1), np.int32), np.zeros(64, np.int32)
index.digest = index._index.digest

def work():
    while True:
        {call}

for _ in range(24):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("ends")
{ENDS[end]}
"""
    for _ in range(2 if end == "soon" else 1):
        done = run(program)
        assert (done.returncode, done.stdout, done.stderr) == (int(end == "late"), "ends\n", "")


@pytest.mark.parametrize("end", ENDS)
def test_exit_while_a_daemon_thread_runs_the_loop_of_a_scheduler(end: str) -> None:
    """Its executor is Python, so that it comes for the GIL all the time."""
    program = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.fake_device import Device, Sizes

def work():
    device = Device(Sizes())
    device.driven = True
    device.on_call = lambda: time.sleep(1e-5)
    while True:
        device.submit([1, 2, 3], 8)
        device.scheduler.settle()

for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
print("ends")
{ENDS[end]}
"""
    for _ in range(3 if end == "soon" else 1):
        done = run(program)
        assert (done.returncode, done.stdout, done.stderr) == (int(end == "late"), "ends\n", "")


def test_insert_survives_concurrent_storage_swap() -> None:
    index = sd.NgramIndex(1 << 21, 1)
    ends = threading.Event()
    tokens = torch.arange(1 << 18, dtype=torch.int32)

    def swap() -> None:
        while not ends.is_set():
            tokens.set_(torch.arange(1 << 18, dtype=torch.int32))

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(10):
            index.insert(tokens)
    finally:
        ends.set()
        swapper.join()
    begun = torch.tensor([200_000, 200_001, 200_002], dtype=torch.int32)
    index.insert(begun, 0)
    draft = index.draft(None, torch.zeros(1, dtype=torch.int32), 4)
    assert draft.tree.tokens.tolist() == [[200_002, 200_003, 200_004, 200_005]]


def test_second_interpreter_is_refused() -> None:
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        interpreters = pytest.importorskip("_interpreters")
    assert interpreters
    program = f"""
import {interpreters.__name__} as interpreters
import specdec_kernels
second = interpreters.create()
result = interpreters.run_string(second, '''
try:
    import specdec_kernels
except ImportError as error:
    print(error)
''')
print(result)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert "specdec_kernels._C is imported in a second interpreter, expected the main one" in done.stdout
