"""Requests that go from one engine to another say what they would have said had they stayed."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import _C, FinishReason
from specdec_kernels.engine import (
    AsyncEngine,
    Draft,
    Eagle3,
    Engine,
    ExportedRequest,
    Ngram,
    Request,
    RequestOutput,
    SamplingParams,
    Standalone,
    Union,
)
from support.changed_weights import HEAD, TARGET, changed, eagle3, tensors_of
from support.changed_weights import make_engine as make_quick_engine
from support.decoding_process import decode
from support.devices import HAS_CUDA
from support.exhaustive import representative
from support.observed_rounds import wrap_method
from support.random_checkpoints import random_prompts, save_random_model
from support.sampled_texts import differing
from support.tiny_checkpoint import held_out

DRAFTS: dict[str, Any] = {
    "none": Draft,
    "eagle3-tree": lambda: eagle3(HEAD),
    "eagle3-sampled": lambda: Eagle3(HEAD, num_steps=3, topk=1, sampled=True),
    "standalone": lambda: Standalone(TARGET, num_steps=2, topk=2, num_nodes=6),
    "ngram": lambda: Ngram(num_nodes=8),
    "union": lambda: Union(Ngram(num_nodes=6), eagle3(HEAD), num_nodes=10),
}

BASE = SamplingParams(28, ignore_eos=True)
PARAMS = [
    BASE,
    replace(BASE, temperature=0.9, top_p=0.9, seed=4),
    replace(BASE, temperature=0.8, top_k=30, seed=-5, presence_penalty=0.6, frequency_penalty=0.3, logprobs=3),
    replace(BASE, repetition_penalty=1.3, logit_bias={5: 2.0, 7: -float("inf")}),
    replace(BASE, stop=["\n\n", "return"], logprobs=True, generated_token_ids=[5, 9, 11]),
    replace(BASE, ignore_eos=False, stop_token_ids=[10, 11, 12], min_new_tokens=16),
    replace(BASE, temperature=1.0, min_p=0.1, seed=2, speculation="off"),
    replace(BASE, regex="(ab|c[0-9]{3} )+", ignore_eos=False),
]


def make_engine(target: Any, draft: Draft | None, device: torch.device | str, **options: Any) -> Engine:
    """Make an engine whose rounds take at least 5 ms on a CPU, so that a request can leave before its end."""
    engine = make_quick_engine(target, draft, device, **options)
    if engine.config.machine.device.type == "cpu":
        for part in ("launch", "forward"):  # the latter for rounds with grammars
            wrap_method(engine.core.executor, part, start_late)
    return engine


def start_late(begin: Callable[..., None], *size: int) -> None:
    time.sleep(0.005)
    begin(*size)


def moved(a: Engine, b: Engine, request: Request, count: int) -> Request | None:
    """Move a request once it has `count` tokens, and return it in the other engine; None if it has ended by then."""
    for _ in request:
        if len(request.output.tokens) >= count:
            break
    try:
        return b.import_request(a.export_request(request))
    except ValueError as error:
        assert str(error) == f"export_request: request {request.id} has ended, expected one that runs"
        return None


def expect_nothing_left(engine: Engine) -> None:
    engine.clear_cache()
    engine.core.scheduler.settle()
    if engine.config.machine.device.type == "cuda":
        torch.cuda.synchronize()
    assert int(engine.state.pool.num_free) == engine.config.num_pages
    assert not engine.core.executor.migrated_drafts
    assert all(int(pool.num_free) == len(pool.free_stack) for pool in engine.state.window_pools.values())


@pytest.mark.parametrize("name", representative(DRAFTS))
def test_migrated_text_equals_unmoved(name: str, device: torch.device) -> None:
    """Requests with all parameters move from any point of their texts, among others, to an engine with another page size."""
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"grammars": True, "prefix_cache": True}
    prompts = held_out("code")[: len(PARAMS)]
    each = list(PARAMS)
    if name in ("ngram", "union"):
        each[0] = replace(each[0], prediction=prompts[1])
    with (
        make_engine(TARGET, DRAFTS[name](), device, **options) as a,
        make_engine(TARGET, DRAFTS[name](), device, page_size=7, **options) as b,
    ):
        want = a.generate(prompts, each)
        a.clear_cache()
        stats = [(output.stats.rounds, output.stats.drafted) for output in want]
        went = 0
        outputs: list[RequestOutput] = []
        for begin in range(0, len(prompts), 4):
            requests = a.submit_many(prompts[begin : begin + 4], each[begin : begin + 4])
            there = [moved(a, b, request, count) for request, count in zip(requests, (1, 4, 9, 14), strict=True)]
            went += sum(request is not None for request in there)
            for here, request in zip(requests, there, strict=True):
                outputs.append((request or here).result())
                if request is not None:
                    assert here.result().finish_reason == FinishReason.CANCELLED
                    new = next(iter(request))
                    assert new.tokens[: len(here.output.tokens)] == here.output.tokens
        assert went > 0  # others may have ended before they could go
        assert differing(outputs, want, each) <= 1
        if name in ("none", "eagle3-tree", "standalone") and device.type == "cpu":
            # What drafted goes on as exactly as the text: it takes the same rounds.
            same = [
                (output.stats.rounds, output.stats.drafted) == old for output, old in zip(outputs, stats, strict=True)
            ]
            assert sum(same) >= len(same) - 1
        for output, old in zip(outputs, want, strict=True):
            assert (output.finish_reason, output.text, output.seed) == (old.finish_reason, old.text, old.seed)
            if old.logprobs is not None:
                assert output.logprobs is not None
                got, expected = ([token.logprob for token in each_of.logprobs or ()] for each_of in (output, old))
                assert torch.allclose(torch.tensor(got), torch.tensor(expected), atol=1e-4)
        expect_nothing_left(a)
        expect_nothing_left(b)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_migration_back_and_forth(implementation: str, device: torch.device) -> None:
    """Also to an engine that runs the target in another way."""
    prompt, params = held_out("code")[2], replace(BASE, temperature=0.9, seed=8, max_new_tokens=120)
    with (
        make_engine(TARGET, eagle3(HEAD), device) as a,
        make_engine(TARGET, eagle3(HEAD), device, page_size=5, implementation=implementation) as b,
    ):
        (want,) = a.generate([prompt], params)
        request = a.submit(prompt, params)
        for here, there, count in ((a, b, 3), (b, a, 9), (a, b, 15)):
            arrived = moved(here, there, request, count)
            assert arrived is not None
            request = arrived
        output = request.result()
        assert differing([output], [want], [params]) == 0 or implementation == "transformers"
        assert output.stats == want.stats or output.tokens != want.tokens or device.type == "cuda"


def test_migration_of_idle_draft(device: torch.device) -> None:
    """An idle draft catches up before its request moves to an engine whose drafts are never idle."""
    prompts, params = held_out("code")[:2], replace(BASE, max_new_tokens=80)
    with (
        make_engine(TARGET, eagle3(HEAD), device, adaptive=True) as a,
        make_engine(TARGET, eagle3(HEAD), device) as b,
    ):
        want = [b.generate([prompt], params)[0] for prompt in prompts]
        costs = a.core.scheduler.costs
        dear = [[1.0, *[1e6] * (len(us) - 1)] for us in costs.us]  # so that it always rests
        a.core.scheduler.set_costs(_C.RoundCosts(costs.batches, costs.rows, dear, [1.0] * len(dear)))
        for prompt, old in zip(prompts, want, strict=True):
            request = a.submit(prompt, params)
            arrived = moved(a, b, request, 7)
            assert arrived is not None
            output = arrived.result()
            assert output.tokens == old.tokens
            # The head has no gap in its rows: from there on as much is accepted as if it had always drafted.
            assert output.stats.accepted > 10


@pytest.mark.parametrize("case", ["one table", "two tables"])
def test_windows(case: str, tmp_path: Path, device: torch.device) -> None:
    """Pages below a sliding window have been freed, and are not sent."""
    changes: dict[str, Any] = {"sliding_window": 13}
    kind = "mistral"
    if case == "two tables":
        kind = "qwen3"
        changes = {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    folder = save_random_model(tmp_path / "model", kind, **changes)
    prompt = [token for each in random_prompts(4) for token in each][:90]
    options: dict[str, Any] = {"prefill_chunk": 16, "page_size": 3}
    with (
        make_engine(folder, Ngram(num_nodes=5), device, **options) as a,
        make_engine(folder, Ngram(num_nodes=5), device, **(options | {"page_size": 4})) as b,
    ):
        long = replace(BASE, max_new_tokens=140)  # it is to run yet when it is asked for
        for params in (long, replace(long, temperature=0.8, seed=3)):
            (want,) = a.generate([prompt], params)
            exported = a.export_request(a.submit(prompt, params))
            assert any(first > 60 for first in exported.values["first_rows"].values())
            assert b.import_request(exported).result().tokens == want.tokens
        expect_nothing_left(a)
        expect_nothing_left(b)


def test_migration_of_fp8_kv(tmp_path: Path, device: torch.device) -> None:
    folder = save_random_model(tmp_path / "model", "llama")
    prompt = random_prompts(2)[1]
    with (
        make_engine(folder, None, device, kv_dtype="fp8_e4m3") as a,
        make_engine(folder, None, device, kv_dtype="fp8_e4m3", page_size=8) as b,
    ):
        (want,) = a.generate([prompt], BASE)
        exported = a.export_request(a.submit(prompt, BASE))
        assert exported.tensors["target.0.k"].dtype == torch.float8_e4m3fn
        sent = pickle.loads(pickle.dumps(exported.to("cpu")))
        assert b.import_request(sent).result().tokens == want.tokens


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_exported_rows_stay_until_read(to_host: bool) -> None:
    """Sent rows stay valid until the other engine reads them, however late, and whatever allocates memory meanwhile."""
    prompt = held_out("code")[0]
    with make_engine(TARGET, eagle3(HEAD), "cuda") as a, make_engine(TARGET, eagle3(HEAD), "cuda") as b:
        (want,) = a.generate([prompt], BASE)
        exported = a.export_request(a.submit(prompt, BASE))
        shapes = [(tensor.shape, tensor.dtype) for tensor in exported.tensors.values()]
        assert b.core.stream is not None and a.core.stream is not None
        with torch.cuda.stream(b.core.stream):
            torch.cuda._sleep(1_000_000_000)  # half a second
        request = b.import_request(exported.to("cpu") if to_host else exported)
        del exported
        for stream in (a.core.stream, torch.cuda.current_stream()):  # to which the tensors' memory goes back
            with torch.cuda.stream(stream):
                for _ in range(50):
                    _others = [torch.full(shape, 7, dtype=dtype, device="cuda") for shape, dtype in shapes]
                    time.sleep(0.004)
        assert request.result().tokens == want.tokens


def test_migrated_request_is_retracted(device: torch.device) -> None:
    """In a pool that is too small for all that arrive, some are retracted and prefilled again.

    A request may end before it leaves: a GPU's rounds are short.
    """
    prompts, params = [prompt[:40] for prompt in held_out("code")[:8]], replace(BASE, max_new_tokens=100)
    with (
        make_engine(TARGET, eagle3(HEAD), device, num_slots=8) as a,
        make_engine(TARGET, eagle3(HEAD), device, num_slots=8, num_pages=110) as b,
    ):
        want = a.generate(prompts, params)
        requests = a.submit_many(prompts, params)
        there = [moved(a, b, request, 1) for request in requests]
        outputs = [(new or old).result() for new, old in zip(there, requests, strict=True)]
        assert b.stats().retractions > 0 or None in there
        assert differing(outputs, want, [params] * 8) <= 1
        expect_nothing_left(b)


def test_migration_between_processes(tmp_path: Path) -> None:
    """One prefills, the other decodes, on GPUs of their own where there are two; what goes between them is bytes."""
    devices = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 and HAS_CUDA else ("cpu", "cpu")
    prompts = held_out("code")[:2]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs, TARGET, HEAD, devices[1]))
    process.start()
    with make_engine(TARGET, eagle3(HEAD), devices[0]) as engine:
        want = [engine.generate([prompt], params)[0] for prompt in prompts for params in PARAMS[:2]]
        got = []
        for prompt in prompts:
            for params in PARAMS[:2]:
                exported = engine.export_request(engine.submit(prompt, params))
                exported.save(tmp_path / "request.safetensors")
                read = ExportedRequest.load(tmp_path / "request.safetensors")
                assert read.values == exported.values and read.num_bytes == exported.num_bytes > 0
                ours.send_bytes(pickle.dumps(read.to("cpu")))
                got.append(ours.recv())
    ours.send_bytes(b"")
    process.join()
    assert process.exitcode == 0
    assert got == [output.tokens for output in want]


def test_migration_from_asyncio() -> None:
    prompt = held_out("code")[0]

    async def run() -> tuple[list[int], list[int]]:
        first, second = (AsyncEngine(make_engine(TARGET, eagle3(HEAD), "cpu")) for _ in range(2))
        async with first, second:
            want = await (await first.submit(prompt, BASE)).result()
            exported = await first.export_request(await first.submit(prompt, BASE))
            request = await second.import_request(exported)
            tokens = [token async for new in request for token in new.tokens]
            return tokens, want.tokens

    tokens, want = asyncio.run(run())
    assert tokens == want


def test_a_request_waits_while_its_engine_reads_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it takes milliseconds: on a fast machine a short request ended meanwhile, and could not be exported."""
    prompt = held_out("code")[0]
    with make_quick_engine(TARGET, eagle3(HEAD), "cpu") as a, make_quick_engine(TARGET, eagle3(HEAD), "cpu") as b:
        (expected,) = a.generate([prompt], BASE)
        checksum, rounds = a.core.weights.checksum_in_pause, []

        def slow_checksum() -> str:
            for _ in range(2):
                rounds.append(a.stats().rounds)
                time.sleep(0.05)
            return checksum()

        monkeypatch.setattr(a.core.weights, "checksum_in_pause", slow_checksum)
        request = a.submit(prompt, replace(BASE, max_new_tokens=200))
        exported = a.export_request(request)
        assert rounds[0] == rounds[1]
        assert b.import_request(exported).result().tokens[: len(expected.tokens)] == expected.tokens


def test_migration_refuses_inexact_requests(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    pytest.importorskip("llguidance")
    prompt = held_out("code")[0]
    with make_engine(TARGET, eagle3(HEAD), "cpu", grammars=True) as a:
        request = a.submit(prompt, replace(BASE, regex="a+", ignore_eos=False))
        exported = a.export_request(request)
        with pytest.raises(ValueError) as caught:
            a.export_request(request)
        assert str(caught.value) == f"export_request: request {request.id} has ended, expected one that runs"

        def refused(engine: Engine, other: ExportedRequest = exported) -> str:
            with pytest.raises(ValueError) as error:
                engine.import_request(other)
            return str(error.value)

        def with_values(**values: Any) -> ExportedRequest:
            return ExportedRequest(exported.tensors, exported.values | values)

        lacking = {key: value for key, value in exported.values.items() if key != "counts"}
        assert refused(a, ExportedRequest(exported.tensors, lacking)) == (
            "import_request: request lacks counts, expected what export_request gave"
        )
        assert refused(a, with_values(tokens=[4, -1])) == (
            f"import_request: request has token -1, expected 0 to {a.target.config.vocab_size - 1} "
            "(the model's vocabulary)"
        )
        assert refused(a, with_values(version=2)) == "import_request: request has version 2, expected 1"
        for values, why in (
            ({"layout": 3}, "layout of type int, expected dict"),
            ({"logprobs": "none"}, "logprobs of type str, expected list or None"),
            ({"tokens": [4, "5"]}, "'5' among tokens, expected integers"),
            ({"first_rows": {"target.0": 1.5}}, "1.5 among first_rows, expected integers"),
            ({"first_rows": {"target.0": -16}}, "rows of target.0 from -16 on, expected 0 to 0"),
            ({"counts": [1, 2]}, "counts of 2, expected 4"),
            (
                {"params": exported.values["params"] | {"generated_token_ids": [1, 2]}},
                "tokens that do not begin with its generated_token_ids [1, 2]",
            ),
            ({"logprobs": [[0.5]]}, "other logprobs than one and the best with it for each token"),
            ({"params": exported.values["params"] | {"loud": 1}}, "loud, expected none among params"),
        ):
            assert refused(a, with_values(**values)) == f"import_request: request has {why}"
        biased = exported.values["params"] | {"logit_bias": [5]}
        assert refused(a, with_values(params=biased)) == (
            "import_request: request has logit_bias [5], expected pairs of a token and a number"
        )
        assert refused(a, with_values(params={})) == ("import_request: request lacks client, expected it among params")
        tokens = exported.values["prompt"]
        assert refused(a, with_values(prompt=tokens * 20)) == (
            f"import_request: request has {20 * len(tokens) + len(exported.values['tokens'])} tokens, "
            "expected at most 255 (max_len - 1)"
        )
        shape = list(exported.tensors["target.0.k"].shape)
        cut = {"target.0.k": exported.tensors["target.0.k"][:, 1:]}
        wild = {"slot.child_ids": exported.tensors["slot.child_ids"].clone().fill_(1 << 20)}
        assert refused(a, ExportedRequest(exported.tensors | wild, exported.values)) == (
            "import_request: request has slot.child_ids from 1048576 to 1048576, expected 0 to "
            f"{a.target.config.vocab_size - 1} (the model's vocabulary)"
        )
        assert refused(a, ExportedRequest(exported.tensors | cut, exported.values)) == (
            f"import_request: request has target.0.k of shape {[shape[0], shape[1] - 1, *shape[2:]]} and torch.float32, "
            f"expected {shape} and torch.float32"
        )
        without = {name: tensor for name, tensor in exported.tensors.items() if name != "slot.last_hidden"}
        assert refused(a, ExportedRequest(without, exported.values)) == (
            "import_request: request lacks slot.last_hidden, expected a tensor of shape [256]"
        )
        assert refused(a, ExportedRequest(exported.tensors | {"slot.last_hidden": [1]}, exported.values)) == (
            "import_request: request has a list as slot.last_hidden, expected a tensor of shape [256]"
        )
        with make_engine(TARGET, eagle3(HEAD), "cpu") as b:
            assert refused(b) == "SamplingParams: regex is given, expected none without Engine(grammars=True)"
            with pytest.raises(ValueError) as caught:
                b.export_request(request)
            assert (
                str(caught.value) == f"export_request: request {request.id} is of another engine, expected one of this"
            )
        with make_engine(TARGET, None, "cpu") as b:
            head = exported.values["layout"]["kv of the draft"]
            assert refused(b) == f"import_request: request has kv of the draft {head}, expected this engine's []"
        with make_engine(TARGET, Eagle3(HEAD, num_steps=3, topk=4, num_nodes=10), "cpu", grammars=True) as b:
            assert refused(b).startswith(
                "import_request: request has state of the draft {'child_ids': ['torch.int32', 3]"
            )
        with make_engine(TARGET, eagle3(HEAD), "cpu", dtype=torch.bfloat16) as b:
            assert refused(b).startswith("import_request: request has kv [[")
        with make_engine(TARGET, eagle3(HEAD), "cpu", grammars=True) as b:
            b.update_weights(changed(tensors_of(TARGET)))
            assert refused(b) == (
                f"import_request: request is of weights {exported.values['weights']}, "
                f"expected this engine's {b.weights_checksum()}"
            )
            b.update_weights(tensors_of(TARGET))
            assert b.import_request(exported).cancel()
    (tmp_path / "broken").write_bytes(b"no such file")
    with pytest.raises(ValueError, match=r"^checkpoint: .*broken cannot be read"):
        ExportedRequest.load(tmp_path / "broken")


def test_requests_that_wait_run_first_or_end() -> None:
    """An export waits for a request that is in the queue; one that is cancelled meanwhile has ended."""
    prompts = held_out("code")[:3]
    with make_engine(TARGET, None, "cpu", num_slots=1) as engine, make_engine(TARGET, None, "cpu") as other:
        want = [output.tokens for output in other.generate(prompts, BASE)]
        requests = engine.submit_many(prompts, BASE)
        arrived = other.import_request(engine.export_request(requests[2]), stream=False)
        assert [request.result().tokens for request in (*requests[:2], arrived)] == want
        requests = engine.submit_many(prompts[:2], BASE)
        requests[1].cancel()
        with pytest.raises(ValueError, match=r"has ended, expected one that runs$"):
            engine.export_request(requests[1])
        requests[0].result()
        expect_nothing_left(engine)


@pytest.mark.parametrize("trusted", [False, True])
def test_imported_rows_serve_others_only_if_trusted(trusted: bool, device: torch.device) -> None:
    """V rows cannot be checked: forged ones would change the text of the next request with that prompt."""
    prompt = held_out("code")[0]
    options: dict[str, Any] = {"prefix_cache": True}
    with make_engine(TARGET, Draft(), device, **options) as a, make_engine(TARGET, Draft(), device, **options) as b:
        (want,) = a.generate([prompt], BASE)
        exported = a.export_request(a.submit(prompt, replace(BASE, max_new_tokens=60)))
        for name, rows in exported.tensors.items():
            if name.startswith("target.") and name.endswith(".v"):
                rows.neg_()
        forged = b.import_request(exported, trusted=trusted)
        for _ in forged:  # beside it
            if len(forged.output.tokens) > 8:
                break
        beside = b.submit(prompt, BASE).result()
        forged.result()
        (after,) = b.generate([prompt], BASE)
        (again,) = b.generate([prompt], BASE)
        for output in (beside, after, again):
            assert trusted == (output.tokens != want.tokens)
        assert (after.cached_tokens > 0) and again.cached_tokens > 0  # of `beside`, where the forged rows stay out
        expect_nothing_left(b)


def test_import_from_asyncio_may_be_trusted() -> None:
    async def cached(trusted: bool) -> int:
        async with AsyncEngine(make_engine(TARGET, Draft(), "cpu", prefix_cache=True)) as b:
            moved = await b.import_request(exported, trusted=trusted)
            await moved.result()
            return (await (await b.submit(prompt, BASE)).result()).cached_tokens

    prompt = held_out("code")[0]
    with make_engine(TARGET, Draft(), "cpu") as a:
        exported = a.export_request(a.submit(prompt, replace(BASE, max_new_tokens=60)))
    assert asyncio.run(cached(False)) == 0 < asyncio.run(cached(True))
