"""What a user of the engine may do wrong, what may go wrong, and that the engine goes on afterwards."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from specdec_kernels import FinishReason
from specdec_kernels.engine import Eagle, Eagle3, Engine, GenerationError, NewTokens, SamplingParams, Standalone
from specdec_kernels.engine.device.graphs import default_batch_sizes
from specdec_kernels.models.weights.checkpoint import local_folder
from support.random_checkpoints import VOCAB, random_prompts, save_random_model
from support.random_engines import make_engine, poisoned_folder

CPU = torch.device("cpu")
EIGHT = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "plain", "llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """Shared by the tests: each leaves it usable, which the next one needs."""
    return make_engine(folder)


def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [output.tokens for output in engine.generate(prompts, EIGHT)]


def expect_usable(engine: Engine, want: list[list[int]], prompts: list[list[int]]) -> None:
    assert texts(engine, prompts) == want
    pool = engine.state.pool
    assert int(pool.num_free[0]) == len(pool.free_stack), "pages were lost"
    assert not pool.page_refs.any()


# --- prompts


def test_generate_without_prompts(engine: Engine) -> None:
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "same",
    [
        lambda ids: ids,
        tuple,
        np.array,
        torch.tensor,
        lambda ids: np.array([ids], dtype=np.int16),
        lambda ids: torch.tensor([ids], dtype=torch.int32),
        lambda ids: [np.array(ids)],
        lambda ids: (torch.tensor(ids),),
        lambda ids: [[np.int64(i) for i in ids]],
    ],
    ids=["list", "tuple", "ndarray", "tensor", "2-d array", "2-d tensor", "arrays", "tensors", "NumPy ints"],
)
def test_generate_accepts_prompt_types(engine: Engine, same: Any) -> None:
    ids = [5, 6, 7]
    (want,), (got,) = engine.generate([ids], EIGHT), engine.generate(same(ids), EIGHT)
    assert got.tokens == want.tokens and got.prompt_tokens == ids
    assert all(type(token) is int for token in got.prompt_tokens)


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([[1], []], ValueError, "generate: prompts[1] is empty, expected at least 1 token"),
        (
            [[1], [2, VOCAB]],
            ValueError,
            "generate: prompts[1] has token 199, expected 0 to 198 (the model's vocabulary)",
        ),
        ([[-1]], ValueError, "generate: prompts[0] has token -1, expected 0 to 198 (the model's vocabulary)"),
        ([[1] * 128], ValueError, "generate: prompts[0] has 128 tokens, expected at most 127 (max_len - 1)"),
        ("hello", ValueError, "generate: prompts[0] is text, expected token ids (the model folder has no tokenizer)"),
        ([[1], 2], TypeError, "generate: prompts[1] is a int, expected text or a list of token ids"),
        ([[1.5]], TypeError, "generate: prompts[0] is a list with a float in it, expected text or a list of token ids"),
        (
            torch.ones(2, 3),
            TypeError,
            "generate: prompts[0] is a list with a float in it, expected text or a list of token ids",
        ),
        (
            [True, False],
            TypeError,
            "generate: prompts[0] is a list with a bool in it, expected text or a list of token ids",
        ),
        (
            np.ones((1, 3), dtype=bool),
            TypeError,
            "generate: prompts[0] is a list with a bool in it, expected text or a list of token ids",
        ),
        (b"abc", TypeError, "generate: prompts is a bytes, expected text, token ids, or a list of them"),
        ([b"abc"], TypeError, "generate: prompts[0] is a bytes, expected text or a list of token ids"),
        ([bytearray(b"abc")], TypeError, "generate: prompts[0] is a bytearray, expected text or a list of token ids"),
        (None, TypeError, "generate: prompts is a NoneType, expected text, token ids, or a list of them"),
    ],
)
def test_generate_bad_prompt_starts_nothing(engine: Engine, prompts: Any, error: type[Exception], message: str) -> None:
    events: list[NewTokens] = []
    with pytest.raises(error) as raised:
        engine.generate(prompts, on_tokens=events.append)
    assert str(raised.value) == message
    assert not events and engine.core.scheduler.num_waiting == 0


def test_generate_wrong_number_of_params_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="generate: params has 2 entries, expected one, or 3 like prompts"):
        engine.generate([[1], [2], [3]], [EIGHT, EIGHT])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 4}, "generate: params is a dict, expected SamplingParams"),
        (16, "generate: params is a int, expected SamplingParams"),
        ([EIGHT, {"max_new_tokens": 4}], "generate: params[1] is a dict, expected SamplingParams"),
        ("greedy", "generate: params[0] is a str, expected SamplingParams"),
    ],
)
def test_generate_wrong_params_type_is_refused(engine: Engine, params: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        engine.generate([[1], [2]], params)
    assert str(error.value) == message


def test_generate_tokenizer_batch_is_refused(engine: Engine) -> None:
    batch = BatchEncoding({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]})
    with pytest.raises(TypeError) as error:
        engine.generate(batch, EIGHT)  # type: ignore[arg-type]
    assert str(error.value) == (
        'generate: prompts is a BatchEncoding, expected text, token ids, or a list of them (its "input_ids" are)'
    )
    assert engine.generate(batch["input_ids"], EIGHT)[0].prompt_tokens == [1, 2]


def test_generate_too_many_stop_tokens_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="SamplingParams: stop_token_ids has 17 entries, expected at most 16"):
        engine.generate([1], SamplingParams(stop_token_ids=range(17)))


# --- construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 1}, "Engine: max_len is 1, expected at least 2"),
        ({"num_slots": 0}, "Engine: num_slots is 0, expected at least 1"),
        ({"page_size": 0}, "Engine: page_size is 0, expected at least 1"),
        ({"prefill_chunk": 0}, "Engine: prefill_chunk is 0, expected at least 1"),
        (
            {"num_pages": 8},
            "Engine: num_pages is 8, expected at least 9 "
            "(one request of max_len=128 tokens and the 2 rows of a round must fit)",
        ),
        (
            {"dtype": torch.float64},
            "Engine: dtype is torch.float64, expected one of torch.float32, torch.float16, torch.bfloat16",
        ),
        ({"device": "meta"}, "Engine: device is meta, expected cpu or cuda"),
        ({"mem_fraction": 0.5}, "Engine: mem_fraction is 0.5, expected None (device is cpu)"),
        ({"mem_fraction": 0.5, "num_pages": 9}, "Engine: num_pages is 9, expected None with mem_fraction"),
        ({"rounds_in_flight": 0}, "Engine: rounds_in_flight is 0, expected 1 to 15"),
        ({"batch_sizes": [1, 2]}, "Engine: batch_sizes is [1, 2], expected rising sizes up to num_slots=3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_engine_bad_size_is_refused_before_loading(
    folder: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_kernels.engine.startup.open_language_model", None)
    with pytest.raises(ValueError) as error:
        make_engine(folder, **options)
    assert str(error.value) == message


def test_engine_batch_sizes_to_capture() -> None:
    assert [default_batch_sizes(n) for n in (1, 3, 4)] == [[1], [1, 2, 3], [1, 2, 4]]
    assert default_batch_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    sizes = default_batch_sizes(1000)
    assert sizes == sorted(sizes) and all(2 * a <= 3 * b for a, b in zip(sizes[4:], sizes[3:], strict=False))


def test_engine_cuda_without_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"Engine: device is cuda:1, expected cpu \(torch finds no GPU\)"):
        make_engine(folder, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("specdec_kernels._C.cuda_version", None)
    with pytest.raises(
        ValueError, match=r"Engine: device is cuda, .*\(this build of specdec_kernels has no CUDA half\)"
    ):
        make_engine(folder, device="cuda")


@pytest.mark.parametrize("path", [Path("nowhere"), "/nowhere", "./nowhere", "a/b/c"])
def test_engine_missing_folder_is_refused(folder: Path, path: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"Engine: model is {path!s}, expected an existing folder or a hub id"):
        Engine(path)
    for draft, name in ((Eagle(path), "head"), (Eagle3(path), "head"), (Standalone(path), "model")):
        kind = type(draft).__name__
        with pytest.raises(
            FileNotFoundError, match=f"{kind}: {name} is {path!s}, expected an existing folder or a hub"
        ):
            make_engine(folder, draft=draft)


@pytest.mark.parametrize(
    ("model", "given"), [(5, "a int"), ("", "''"), (["a"], "a list")], ids=["number", "empty", "list"]
)
def test_engine_model_that_is_no_path_is_refused(model: Any, given: str) -> None:
    with pytest.raises(ValueError) as error:
        Engine(model)
    assert str(error.value) == f"Engine: model is {given}, expected an existing folder or a hub id"


def test_engine_head_that_can_be_no_hub_id_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        make_engine(folder, draft=Eagle3("a b"))
    assert str(error.value) == "Eagle3: head is 'a b', expected an existing folder or a hub id"


def test_engine_head_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "specdec_kernels.models.weights.checkpoint.snapshot_download", lambda name, allow_patterns: tmp_path / name
    )
    assert local_folder("someone/head", "draft_model") == tmp_path / "someone/head"
    assert local_folder(tmp_path, "draft_model") == tmp_path


# --- while it runs


def test_generate_failing_request_keeps_others(folder: Path, tmp_path: Path) -> None:
    prompts = random_prompts(6)
    want = texts(make_engine(folder), prompts)
    poison = next(token for token in range(VOCAB) if not any(token in text for text in prompts + want))
    engine = make_engine(poisoned_folder(folder, tmp_path, poison))
    events: list[NewTokens] = []
    with pytest.raises(GenerationError) as error:
        engine.generate([*prompts[:3], [1, poison, 2], *prompts[3:]], EIGHT, on_tokens=events.append)
    assert str(error.value) == "generate: prompts[3] ended with BAD_LOGITS"
    outputs = error.value.outputs
    failed = outputs.pop(3)
    assert failed.finish_reason == FinishReason.ERROR and failed.tokens == []
    assert [output.tokens for output in outputs] == want
    assert [e.finish_reason for e in events if e.index == 3] == [FinishReason.ERROR]
    expect_usable(engine, want, prompts)  # also: NaN left in pages harms nobody


def test_generate_model_exception_keeps_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(5)
    want = texts(engine, prompts)
    forward, calls = engine.target.forward, 0

    def fail_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError("no room")
        return forward(*arguments)

    monkeypatch.setattr(engine.target, "forward", fail_later)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate(prompts, EIGHT)
    expect_usable(engine, want, prompts)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("at", [1, 2, 7])
def test_generate_interrupted_keeps_engine(engine: Engine, at: int) -> None:
    prompts = random_prompts(5)
    want = texts(engine, prompts)
    calls = 0

    def interrupt(_new: NewTokens) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, EIGHT, on_tokens=interrupt)
    expect_usable(engine, want, prompts)


@pytest.mark.parametrize("method", ["begin", "prefill", "activate", "launch"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_executor_exception_keeps_engine(
    engine: Engine, method: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after it did its work: it comes out of the `generate` whose request it ended."""
    prompts = random_prompts(5)
    want = texts(engine, prompts)
    real, calls = getattr(engine.core.executor, method), 0

    def failing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and not after:
            raise MemoryError("no room")
        real(*arguments)
        if calls == 2 and after:
            raise MemoryError("no room")

    monkeypatch.setattr(engine.core.executor, method, failing)
    with pytest.raises(MemoryError, match="no room"):
        engine.generate(prompts, EIGHT)
    expect_usable(engine, want, prompts)


def test_deactivate_exception_is_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots count as given back whatever the draft says to that; texts are what they are."""
    prompts = random_prompts(5)
    want = texts(engine, prompts)

    def fail(_slots: list[int]) -> None:
        raise KeyError("mine")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.executor, "deactivate", fail)
        assert texts(engine, prompts) == want
    assert {record.message for record in caplog.records} == {
        "an exception in the engine's loop that ended no request; the loop goes on"
    }
    assert all(record.exc_info and str(record.exc_info[1]) == "'mine'" for record in caplog.records)
    expect_usable(engine, want, prompts)


def test_generate_failing_callback(engine: Engine) -> None:
    prompts = random_prompts(5)
    want = texts(engine, prompts)

    def fail(_new: NewTokens) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(prompts, EIGHT, on_tokens=fail)
    expect_usable(engine, want, prompts)


def test_generate_in_callback_is_refused(engine: Engine) -> None:
    prompts = random_prompts(4)
    want = texts(engine, prompts)
    others: list[list[list[int]]] = []

    def again(_new: NewTokens) -> None:
        others.append(texts(engine, prompts[:2]))

    outputs = engine.generate(prompts, EIGHT, on_tokens=again)
    assert [output.tokens for output in outputs] == want
    assert len(others) > 8 and all(other == want[:2] for other in others)
    expect_usable(engine, want, prompts)


def test_generate_from_two_threads(engine: Engine) -> None:
    """A callback that blocks holds up its own `generate` alone."""
    prompts = random_prompts(4)
    want = texts(engine, prompts)
    running, other_done = threading.Event(), threading.Event()
    results: list[list[int]] = []

    def wait(_new: NewTokens) -> None:
        running.set()
        assert other_done.wait(300)

    thread = threading.Thread(
        target=lambda: results.extend(o.tokens for o in engine.generate(prompts, EIGHT, on_tokens=wait))
    )
    thread.start()
    assert running.wait(300)
    assert texts(engine, prompts) == want
    other_done.set()
    thread.join()
    assert results == want


def test_engine_pages_held_elsewhere_raise(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(3)
    want = texts(engine, prompts)
    num_free = engine.state.pool.num_free
    before = int(num_free[0])
    num_free[0] = 0
    with pytest.raises(GenerationError, match=r"generate: prompts\[0\] ended with BAD_PAGE, prompts\[1\] ended with"):
        engine.generate(prompts, EIGHT)
    num_free[0] = before
    expect_usable(engine, want, prompts)
