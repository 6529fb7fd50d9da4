"""Engines of several processes: the tiny model divided over gloo says what one process says, and all end together."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import FinishReason
from specdec_kernels.engine import Draft, Eagle3, Engine, GenerationError, Ngram, SamplingParams, Standalone
from specdec_kernels.engine import core as core_module
from specdec_kernels.engine.device.recording import RecordedRequest
from specdec_kernels.parallel.launch import place_of
from specdec_kernels.tiny import tiny_model
from support.changed_weights import HEAD, TARGET, changed, tensors_of
from support.exhaustive import thinned
from support.random_checkpoints import save_random_model
from support.tiny_checkpoint import held_out

DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "none": lambda: None,
    "tree": lambda: Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16),
    "drawn": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=1, sampled=True),
    "ngram": lambda: Ngram(num_nodes=6),
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=2, topk=2, num_nodes=5),
}
SIZES: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_len": 160, "num_slots": 4, "page_size": 8}
FAILED = RuntimeError, GenerationError


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the processes that tests start use a core each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def make_engine(draft: str = "none", **options: Any) -> Engine:
    return Engine(tiny_model("target"), DRAFTS[draft](), **SIZES | options)


def others_of(engine: Engine) -> list[int]:
    """Return the processes of the engine's other ranks."""
    ranks = engine.core.runtime.ranks
    assert ranks is not None
    return [ranks.channel.process(rank) for rank in range(1, ranks.size)]


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def expect_ended(processes: list[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_there, processes)):
        assert time.monotonic() < deadline, f"{processes} have not ended"
        time.sleep(0.05)


def moved(prompt: list[int], *engines: Engine, params: SamplingParams) -> list[int]:
    """Return the text of a request that moves from engine to engine, some rounds after it has come."""
    request = engines[0].submit(prompt, params)
    for here, there in pairwise(engines):
        count = len(request.output.tokens)
        for _ in request:
            if len(request.output.tokens) > count:
                break
        request = there.import_request(pickle.loads(pickle.dumps(here.export_request(request))))
    return request.result().tokens


def test_two_ranks_say_what_one_process_says_and_end_with_a_rank_that_is_killed() -> None:
    prompts = [prompt[:60] for prompt in held_out("code")[:5]]
    params = [SamplingParams(24, ignore_eos=True), *[SamplingParams(24, temperature=0.8, seed=i) for i in range(4)]]
    with make_engine("tree", adaptive=False) as alone:
        want = [output.tokens for output in alone.generate(prompts, params)]
    engine = make_engine("tree", adaptive=False, tp=2)
    processes = others_of(engine)
    assert [output.tokens for output in engine.generate(prompts, params)] == want
    with make_engine("tree", adaptive=False) as alone:
        assert alone.weights_checksum() == engine.weights_checksum()
        for sampling in (SamplingParams(90, ignore_eos=True), SamplingParams(90, temperature=0.8, seed=5)):
            (stayed,) = alone.generate(prompts[:1], sampling)
            assert moved(prompts[0], alone, engine, alone, engine, params=sampling) == stayed.tokens
        before = engine.generate(prompts, params[:1] * 5)
        new, head = changed(tensors_of(TARGET)), changed(tensors_of(HEAD), seed=1)
        for each in (alone, engine):
            each.update_weights(new, head)
        after = [[output.tokens for output in each.generate(prompts, params)] for each in (alone, engine)]
        assert after[0] == after[1] != want and alone.weights_checksum() == engine.weights_checksum()
    with pytest.raises(ValueError, match="unknown to LlamaForCausalLM"):
        engine.update_weights({"model.other.weight": new["model.norm.weight"]})
    engine.sleep(2)
    engine.wake()
    engine.update_weights(tensors_of(TARGET))
    with pytest.raises(RuntimeError, match=r"^Engine lacks draft: .* since sleep\(2\)"):
        engine.generate(prompts[:1], params[:1])
    engine.update_weights(draft=tensors_of(HEAD))
    again = engine.generate(prompts, params[:1] * 5)
    assert [output.tokens for output in again] == [output.tokens for output in before]
    request = engine.submit(prompts[0], SamplingParams(90, ignore_eos=True))
    next(iter(request))
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(FAILED, match=rf"rank 1 \(process {processes[0]}\) was killed by signal 9"):
        request.result(timeout=20)
    with pytest.raises(FAILED, match="was killed by signal 9"):
        engine.generate(prompts[:1], params[:1])
    engine.close()
    expect_ended(processes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "tp"), [*((name, 2) for name in DRAFTS), ("tree", 4)])  # 4: more than KV heads
def test_ranks_say_what_one_process_says_through_retractions_and_cancels(name: str, tp: int) -> None:
    rng = random.Random(name)
    prompts = [prompt[: rng.randint(1, 90)] for prompt in held_out("code")[:24]]
    params = [SamplingParams(rng.randint(1, 60), ignore_eos=True) for _ in prompts]
    with make_engine(name) as alone:
        want = [output.tokens for output in alone.generate(prompts, params)]
    with make_engine(name, num_pages=26, prefix_cache=True, tp=tp) as engine:
        requests = engine.submit_many(prompts, params)
        for request in requests[::7]:
            request.cancel()
        for request, text in zip(requests, want, strict=True):
            tokens = request.result().tokens
            assert tokens == text[: len(tokens)]
        assert [output.tokens for output in engine.generate(prompts, params)] == want
        assert engine.core.scheduler.num_retractions > 0 and engine.core.scheduler.num_prefix_hits > 0
        processes = others_of(engine)
    expect_ended(processes)


@pytest.mark.exhaustive
def test_rank_that_waits_in_a_collective_which_no_other_enters_is_named() -> None:
    with make_engine(tp=2) as engine:
        ranks = engine.core.runtime.ranks
        assert ranks is not None
        engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))
        ranks.record("checksum")
        ranks.channel.made()
        started = time.monotonic()
        while not ranks.channel.failure:
            assert time.monotonic() - started < 60
            time.sleep(0.1)
        (process,) = others_of(engine)
        failure = ranks.channel.failure
        assert failure.startswith(f"rank 1 (process {process}) has not finished call ")
        assert failure.endswith(" (it makes checksum), which rank 0 finished 30 s ago")
        with pytest.raises(FAILED, match="it makes checksum"):
            engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))
    expect_ended([process], 20)


@pytest.mark.exhaustive
def test_ranks_that_differ_end_in_the_round_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tp=2) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True))
        before = int(engine.core.executor.round.rings.num_published)
        (process,) = others_of(engine)
        recorded = RecordedRequest.of
        monkeypatch.setattr(RecordedRequest, "of", lambda request: recorded(request)._replace(edit=None))
        with pytest.raises(FAILED) as raised:
            engine.generate([[1, 2, 3]], SamplingParams(4, ignore_eos=True, logit_bias={5: 1000.0}))
        assert f"round {before}: tokens[0] of request 1 (slot 0) is 5 on rank 0 and " in str(raised.value)
        assert f" on rank 1 (process {process}), expected the same on all ranks" in str(raised.value)
    expect_ended([process])


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [2, 3])
def test_soak_of_requests_that_come_end_and_move(tp: int, tmp_path: Path) -> None:
    """Whatever happens to requests, those that end by themselves say what they would have said alone."""
    rng = random.Random(tp)
    folder = save_random_model(tmp_path / "model", "llama", num_key_value_heads=6, intermediate_size=192)
    sizes = SIZES | {"prefix_cache": True, "adaptive": False}
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    prompts += [[*prompt, 5, 6] for prompt in prompts[:8]]
    with (
        Engine(folder, Ngram(num_nodes=6), **sizes) as alone,
        Engine(folder, Ngram(num_nodes=6), **sizes | {"num_pages": 30}, tp=tp) as ranks,
    ):
        params = [SamplingParams(rng.randint(1, 80), ignore_eos=True) for _ in prompts]
        want = [output.tokens for output in alone.generate(prompts, params)]
        for _ in range(6):
            order = rng.sample(range(len(prompts)), len(prompts))
            requests = {at: ranks.submit(prompts[at], params[at]) for at in order}
            for at in rng.sample(order, 8):
                if rng.random() < 0.5:
                    requests[at].cancel()
                    continue
                with contextlib.suppress(ValueError):  # it has ended
                    moved = alone.import_request(ranks.export_request(requests[at]))
                    with contextlib.suppress(ValueError):
                        moved = ranks.import_request(alone.export_request(moved))
                    requests[at] = moved
            if rng.random() < 0.5:
                ranks.update_weights(tensors_of(folder))
            for at, request in requests.items():
                output = request.result(timeout=120)
                cancelled = output.finish_reason == FinishReason.CANCELLED
                assert output.tokens == (want[at][: len(output.tokens)] if cancelled else want[at])
            ranks.clear_cache()
            ranks.core.scheduler.settle()
            assert int(ranks.state.pool.num_free) == 30
        assert ranks.stats().retractions > 0
        processes = others_of(ranks)
    expect_ended(processes)


@pytest.mark.exhaustive
def test_eight_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    folder = save_random_model(
        tmp_path / "model", "llama", num_attention_heads=8, num_key_value_heads=2, hidden_size=128
    )
    prompts = [[5, 9, 3, 9, 3, 7, 1], [8, 8, 2]]
    params = [SamplingParams(40, ignore_eos=True), SamplingParams(40, temperature=0.8, seed=4)]
    with Engine(folder, Ngram(num_nodes=6), **SIZES, adaptive=False) as alone:
        want = [output.tokens for output in alone.generate(prompts, params)]
        checksum = alone.weights_checksum()
    with Engine(folder, Ngram(num_nodes=6), **SIZES, adaptive=False, tp=8) as ranks:
        assert [output.tokens for output in ranks.generate(prompts, params)] == want
        assert ranks.weights_checksum() == checksum
        processes = others_of(ranks)
    assert len(processes) == 7
    expect_ended(processes)


@pytest.mark.parametrize("seed", thinned(range(20), (1).__eq__))
def test_kill_of_any_rank_at_any_moment_ends_all(seed: int, tmp_path: Path) -> None:
    """The default run kills the first rank; the test above kills the second."""
    rng = random.Random(seed)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from specdec_kernels.engine import Eagle3, Engine, SamplingParams\n"
        "from specdec_kernels.tiny import tiny_model\n"
        "if __name__ == '__main__':\n"
        "    draft = Eagle3(tiny_model('eagle3'), num_steps=3, topk=2, num_nodes=8)\n"
        "    engine = Engine(tiny_model('target'), draft, device='cpu', max_len=400, num_slots=2, tp=2)\n"
        "    print(engine.core.runtime.ranks.channel.process(1), flush=True)\n"
        "    while True:\n"
        "        engine.generate([[1, 2, 3], [4]], SamplingParams(300, ignore_eos=True))\n"
    )
    first = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stderr is not None
    second = int(first.stdout.readline())
    time.sleep(rng.random() * 3)
    victim = rng.choice([first.pid, second])
    os.kill(victim, rng.choice([signal.SIGKILL, signal.SIGSTOP] if victim == second else [signal.SIGKILL]))
    started = time.monotonic()
    _, errors = first.communicate(timeout=30)
    expect_ended([second], 30)
    assert time.monotonic() - started < 30  # 10 s, and what a busy machine adds
    if victim == second:
        assert first.returncode == 1 and f"rank 1 (process {second}) " in errors


@pytest.mark.exhaustive
def test_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from specdec_kernels.engine import Engine, SamplingParams\n"
        "from specdec_kernels.tiny import tiny_model\n"
        "if __name__ == '__main__':\n"
        "    engine = Engine(tiny_model('target'), device='cpu', max_len=400, num_slots=2, tp=2)\n"
        "    print(engine.core.runtime.ranks.channel.process(1), flush=True)\n"
        "    while True:\n"
        "        engine.generate([[1, 2, 3], [4]], SamplingParams(300, ignore_eos=True))\n"
    )
    first = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    second = int(first.stdout.readline())
    time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors and "failed" not in errors
    expect_ended([second])


@pytest.mark.exhaustive
def test_torchrun_script_runs_on_the_first_rank_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from specdec_kernels.engine import Engine, SamplingParams\n"
        "from specdec_kernels.tiny import tiny_model\n"
        "with Engine(tiny_model('target'), device='cpu', max_len=160, num_slots=2, tp=2) as engine:\n"
        "    (output,) = engine.generate([[1, 2, 3]], SamplingParams(20, ignore_eos=True))\n"
        "print('said', output.tokens)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with Engine(tiny_model("target"), device="cpu", max_len=160, num_slots=2) as engine:
        (want,) = engine.generate([[1, 2, 3]], SamplingParams(20, ignore_eos=True))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("said")] == [f"said {want.tokens}"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "draft", "message"),
    [
        ("max_len=160 + 16 * rank", "None", "Engine: max_len is 176 on rank 1, expected 160 (that of rank 0: "),
        (
            "max_len=160",
            "Ngram() if rank else None",
            "Engine: draft is Ngram on rank 1, expected Draft (that of rank 0",
        ),
    ],
)
def test_ranks_of_torchrun_that_are_given_what_differs_are_refused(
    options: str, draft: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from specdec_kernels.engine import Engine, Ngram\n"
        "from specdec_kernels.tiny import tiny_model\n"
        "rank = int(os.environ['RANK'])\n"
        f"Engine(tiny_model('target'), {draft}, device='cpu', num_slots=2, tp=2, {options})\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and message in done.stderr


@pytest.mark.exhaustive
def test_server_ends_with_a_rank_that_is_killed() -> None:
    command = [sys.executable, "-m", "specdec_kernels", "serve", "--port", "0", "--device", "cpu", "--tp", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert "specdec serve:" in first.stdout.readline()
    (second,) = map(int, Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split())
    os.kill(second, signal.SIGKILL)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == 1 and f"specdec serve: rank 1 (process {second}) was killed by signal 9" in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [None, 2])
def test_engine_that_fails_after_it_has_loaded_leaves_neither_ranks_nor_an_open_draft(
    tp: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, ranks, opened = Ngram(num_nodes=6), list[int](), core_module.opened

    def noting(*arguments: Any) -> Any:
        loading, runtime = opened(*arguments)
        if runtime.ranks is not None:
            ranks.append(runtime.ranks.channel.process(1))
        return loading, runtime

    def refuse(*arguments: Any) -> None:
        raise ValueError("no such tokens")

    with monkeypatch.context() as patch:
        patch.setattr(core_module, "opened", noting)
        patch.setattr(core_module, "InputProcessor", refuse)
        with pytest.raises(ValueError, match=r"^no such tokens$"):
            Engine(tiny_model("target"), draft, **SIZES, tp=tp)
    assert len(ranks) == (tp is not None) and not draft.is_open
    expect_ended(ranks)


def test_tp_that_cannot_be_is_refused_by_name() -> None:
    module = torch.nn.Linear(1, 1)
    env = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}
    for refused, said in {
        lambda: make_engine(tp=0): "Engine: tp is 0, expected at least 1",
        lambda: make_engine(tp=2, implementation="transformers"): (
            "Engine: implementation is transformers, expected native with tp=2"
        ),
        lambda: Engine(module, tp=2): (
            "Engine: model is a Linear, expected a path or hub id with tp=2: each rank loads its part "
            "(or torchrun, where each rank passes the module, which is divided in place)"
        ),
        lambda: place_of(2, env): "Engine: tp is 2, expected 4 (processes of torchrun, 2 of them on this host)",
    }.items():
        with pytest.raises(ValueError) as raised:
            refused()  # type: ignore[no-untyped-call]
        assert str(raised.value) == said
    assert place_of(None) is None and place_of(1, env) is None
