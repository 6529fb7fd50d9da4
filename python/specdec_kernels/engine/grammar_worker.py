"""A process that compiles grammars of strangers within limits, because xgrammar's compiler cannot be interrupted.

It forks a child for each grammar. A child has a limit of time and one of memory, is killed when its client goes, and
answers whether the grammar compiles. The asking process then compiles it again, which takes no longer; xgrammar's
serialized form of the result would take longer to read. `start` is called in the asking process.

The control socket brings the sockets of jobs. A job is the JSON of a `Job`, up to the end of the stream; its answer is
the JSON of an `Answer`.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass

from .grammars import Grammars

MAX_ANSWER_BYTES = 1 << 16
NICENESS = 10  # of a child: requests that run come first
# The package of this module without its `__init__`, which imports models: the process is ready in half of the time.
START = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[2])
import specdec_kernels
package = types.ModuleType("specdec_kernels.engine")
package.__path__ = [sys.argv[3]]
sys.modules[package.__name__] = package
from specdec_kernels.engine.grammar_worker import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Job:
    """A grammar to compile, and the limits of its process."""

    kind: str
    source: str
    seconds: float
    num_bytes: int
    max_compiled_bytes: int


@dataclass(frozen=True)
class Answer:
    """The end of a job: an error, "" if the grammar compiles, or the signal that ended its process."""

    error: str = ""
    signal: int = 0


def start(grammars: Grammars) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process for the grammars of an engine; return it and its control socket.

    The socket yields a byte when the process is ready. The process ends when the socket is closed.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, str(theirs.fileno()), json.dumps(sys.path), os.path.dirname(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which then closes the socket
        )

    def send() -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pickle.dump(grammars, pipe)

    threading.Thread(target=send, daemon=True).start()  # a pipe holds less than a tokenizer
    return process, ours


def main(control_fd: int) -> None:
    """Run the process."""
    with socket.socket(fileno=control_fd) as control:
        grammars = pickle.load(sys.stdin.buffer)
        grammars.prepare()
        gc.freeze()  # children share its pages
        control.sendall(b"r")
        supervise(control, grammars)


@dataclass(frozen=True)
class Child:
    """A running child: its process id, the socket of its job, and a pipe that ends with it."""

    pid: int
    job: socket.socket
    pipe: int


def supervise(control: socket.socket, grammars: Grammars) -> None:
    """Fork a child for each job that arrives, until the control socket ends; then kill all of them."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, Child] = {}  # by the descriptors of their jobs and of their pipes
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                _, received, _, _ = socket.recv_fds(control, 1, 1)
                if not received:
                    for running in children.values():
                        os.kill(running.pid, signal.SIGKILL)
                    return
                new = fork_child(socket.socket(fileno=received[0]), control, grammars)
                children[new.job.fileno()] = children[new.pipe] = new
                poll.register(new.job, 0)  # POLLHUP, which is always reported: the client has gone
                poll.register(new.pipe, 0)
            elif (child := children.get(descriptor)) is None:  # ended by an earlier event of this call
                continue
            elif descriptor == child.pipe:
                for one in (child.job.fileno(), child.pipe):
                    del children[one]
                    with suppress(KeyError):  # the job's, if its client went first
                        poll.unregister(one)
                end_child(child)
            else:
                os.kill(child.pid, signal.SIGKILL)
                poll.unregister(child.job)


def fork_child(job: socket.socket, control: socket.socket, grammars: Grammars) -> Child:
    """Fork a child that answers a job and exits."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            job.setblocking(True)
            job.sendall(json.dumps(asdict(answer(job, grammars))).encode())
        finally:
            os._exit(0)
    os.close(writes)
    return Child(pid, job, reads)


def end_child(child: Child) -> None:
    """Wait for a child that has ended, and answer its job if the child did not."""
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    with child.job as job, suppress(OSError):  # if its client has gone
        if os.WIFSIGNALED(status):
            job.sendall(json.dumps(asdict(Answer(signal=os.WTERMSIG(status)))).encode())
        job.shutdown(socket.SHUT_RDWR)  # children that were forked later have the socket, too


def answer(socket_of_job: socket.socket, grammars: Grammars) -> Answer:
    """Read a job, and compile its grammar within its limits; beyond its time, end the process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # to read the job
    job = Job(**json.loads(b"".join(iter(lambda: socket_of_job.recv(1 << 16), b""))))
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + job.num_bytes,) * 2)
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_REAL, job.seconds)
    try:
        size = grammars.try_out(job.kind, job.source)
    except MemoryError:
        return Answer(f"SamplingParams: {job.kind} does not compile within {job.num_bytes >> 20} MiB of memory")
    except ValueError as error:
        return Answer(str(error)[: MAX_ANSWER_BYTES // 8])
    if size > job.max_compiled_bytes:
        return Answer(f"SamplingParams: {job.kind} compiles to {size} bytes, expected at most {job.max_compiled_bytes}")
    return Answer()
