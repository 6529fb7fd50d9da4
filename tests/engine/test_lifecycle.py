"""The compiled module at the edges of a process.

Objects without __init__, exit with daemon threads running, second interpreters, storage that changes during a call.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels import _C

# exit() calls sleep(1), the exit code, after Python has ended: the other threads go on for a second.
END_LATE = """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
sys.exit(1)
"""


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


@pytest.mark.parametrize("end", ["", END_LATE], ids=["soon", "late"])
@pytest.mark.parametrize(
    "call",
    [
        "index.insert(text)",
        "index.draft(None, lens, 16)",
        "index.extend(rows, counts, None)",
        "index.digest()",
    ],
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
{end}
"""
    for _ in range(1 if end else 2):
        done = run(program)
        assert (done.returncode, done.stdout, done.stderr) == (1 if end else 0, "ends\n", "")


@pytest.mark.parametrize("end", ["", END_LATE], ids=["soon", "late"])
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
{end}
"""
    for _ in range(1 if end else 3):
        done = run(program)
        assert (done.returncode, done.stdout, done.stderr) == (1 if end else 0, "ends\n", "")


def test_insert_survives_concurrent_storage_swap() -> None:
    index = sd.NgramIndex(1 << 22, 1)
    ends = threading.Event()
    tokens = torch.arange(1 << 20, dtype=torch.int32)

    def swap() -> None:
        while not ends.is_set():
            tokens.set_(torch.arange(1 << 20, dtype=torch.int32))

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(10):
            index.insert(tokens)
    finally:
        ends.set()
        swapper.join()
    begun = torch.tensor([500_000, 500_001, 500_002], dtype=torch.int32)
    index.insert(begun, 0)
    draft = index.draft(None, torch.zeros(1, dtype=torch.int32), 4)
    assert draft.tree.tokens.tolist() == [[500_002, 500_003, 500_004, 500_005]]


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


def test_exit_with_an_open_engine_beside_an_older_finalizer() -> None:
    """`weakref.finalize` has an exit hook from its first use on, here before ours: engines must be closed before."""
    done = run(
        """
import weakref
class Anything: pass
anything = Anything()
weakref.finalize(anything, int)
from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.tiny import tiny_model
engine = Engine(tiny_model("target"))
print(len(engine.generate("import os", SamplingParams(4))[0].tokens))
"""
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
