"""Engines that give their memory back for a while, and go on as if they had not."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.engine import AsyncEngine, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.engine.drafts import HasWeights
from specdec_kernels.engine.drafts.composition import having, pools_of
from specdec_kernels.tiny import tiny_model
from support.changed_weights import DRAFTS, HEAD, TARGET, changed, eagle3, make_engine, tensors_of, texts
from support.exhaustive import representative
from support.paused_rounds import rounds_held
from support.quantized_checkpoints import write_model
from support.random_checkpoints import random_prompts, save_random_model
from support.tiny_checkpoint import held_out, reference_model

ASLEEP = "Engine is asleep, expected wake() before requests"


def memory(device: torch.device) -> int:
    """Bytes that are taken: of the device, or of this process."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("name", representative(DRAFTS))
def test_sleep_keeps_texts(name: str, implementation: str, device: torch.device) -> None:
    if implementation == "transformers" and name != "eagle3":
        pytest.skip("what drafts does not depend on how the target runs")
    draft = DRAFTS[name](TARGET, HEAD)
    options = {"implementation": implementation, "prefix_cache": True}
    with make_engine(TARGET, draft, device, **options) as engine:
        before = texts(engine)
        engine.sleep()
        assert all(pools.num_bytes == 0 for pools in (engine.target.pools, *pools_of(draft)))
        with pytest.raises(RuntimeError) as caught:
            engine.submit([1, 2, 3])
        assert str(caught.value) == ASLEEP
        engine.wake()
        assert texts(engine) == before

        engine.sleep(2)
        weights = [engine.target.weights, *(part.weights for part in having(draft, HasWeights))]
        assert all(tensor.untyped_storage().nbytes() <= 4 for each in weights for tensor in each.values())
        engine.wake()
        with pytest.raises(RuntimeError) as caught:
            texts(engine)
        assert str(caught.value).startswith("Engine lacks model.embed_tokens.weight, model.layers.0.self_attn.q_proj")
        assert str(caught.value).endswith("more tensors since sleep(2), expected update_weights with all of them")
        engine.update_weights(tensors_of(TARGET))
        new = {"eagle3": tensors_of(HEAD), "standalone": tensors_of(TARGET), "union": [None, tensors_of(HEAD)]}
        if name in new:
            with pytest.raises(RuntimeError, match=r"^Engine lacks draft(\[1\])?: "):
                texts(engine)
            engine.update_weights(draft=new[name])
        assert texts(engine) == before
        assert (engine.graphs is None) == (engine.not_captured is not None or device.type == "cpu")


def touch(engine: Engine) -> None:
    """Pages that nobody has written, and weights of a file that nobody has read, take no memory of the process."""
    for weight in engine.target.weights.values():
        weight.sum()
    for group in engine.target.pools.groups:
        group.pools[0].fill_(1.0)
        group.pools[1].fill_(1.0)


def test_sleep_frees_memory(tmp_path: Path, device: torch.device) -> None:
    """Of pools at level 1, and at level 2 of weights, too, but for what malloc keeps."""
    sizes = {"hidden_size": 960, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 16384}
    folder = save_random_model(tmp_path / "wide", "llama", **sizes)
    engine = make_engine(folder, Ngram(num_nodes=4), device, num_pages=8192, page_size=16)
    touch(engine)
    pools = engine.target.pools.num_bytes
    weights = sum(weight.nbytes for weight in engine.target.weights.values())
    assert pools > 2**26 and weights > 2**26
    awake = memory(device)
    engine.sleep()
    asleep = memory(device)
    assert awake - asleep > 0.9 * (pools + (weights if device.type == "cuda" else 0))
    engine.wake()
    touch(engine)
    engine.sleep(2)
    assert awake - memory(device) > 0.8 * (pools + weights)
    engine.close()


def test_quantized_weights(tmp_path: Path, device: torch.device) -> None:
    folder, _ = write_model(tmp_path, "gptq shuffled")
    with make_engine(folder, None, device, max_len=128) as engine:
        prompts = random_prompts(3)
        before = [output.tokens for output in engine.generate(prompts, SamplingParams(12))]
        for level in (1, 2, 2):
            engine.sleep(level)
            engine.wake()
            if level == 2:
                engine.update_weights(tensors_of(folder))
            assert [output.tokens for output in engine.generate(prompts, SamplingParams(12))] == before


def test_sleep_keeps_weights_of_given_modules(device: torch.device) -> None:
    module: Any = reference_model()
    with make_engine(module, Standalone(tiny_model("target"), num_steps=2, topk=2), device) as engine:
        before = texts(engine)
        engine.sleep()
        assert module.lm_head.weight.device.type == device.type
        engine.wake()
        assert texts(engine) == before
        with pytest.raises(ValueError) as caught:
            engine.sleep(2)
        assert str(caught.value) == (
            "sleep: level is 2, expected 1 for a model that was given as a module, which is its owner's"
        )
    module.cpu()


def test_other_weights_after_a_sleep(device: torch.device) -> None:
    """As a trainer does it that shares the device: drop them, train, wake, give others."""
    new = changed(tensors_of(TARGET))
    union = Union(Ngram(num_nodes=6), eagle3(HEAD), num_nodes=10)
    with make_engine(TARGET, union, device) as engine, make_engine(TARGET, None, device) as other:
        texts(engine)
        engine.sleep(2)
        with pytest.raises(RuntimeError) as caught:
            engine.update_weights(new)
        assert str(caught.value) == "update_weights: Engine is asleep, expected wake() before"
        engine.wake()
        engine.update_weights(new, [None, tensors_of(HEAD)])
        other.update_weights(new)
        assert texts(engine) == texts(other)


def test_each_part_of_a_draft_lacks_weights_of_its_own() -> None:
    head = tensors_of(HEAD)
    with make_engine(TARGET, Union(eagle3(HEAD), eagle3(HEAD), num_nodes=10), "cpu") as engine:
        before = texts(engine)
        engine.sleep(2)
        engine.wake()
        engine.update_weights(tensors_of(TARGET), [None, head])
        with pytest.raises(RuntimeError, match=r"^Engine lacks draft\[0\]: "):
            texts(engine)
        engine.update_weights(draft=[head, None])
        assert texts(engine) == before


def test_sleep_with_running_requests() -> None:
    with make_engine(TARGET, None, "cpu") as engine:
        with rounds_held(engine):
            request = engine.submit(held_out("code")[0], SamplingParams(20, ignore_eos=True))
            with pytest.raises(RuntimeError) as caught:
                engine.sleep()
        assert str(caught.value) == "sleep: 1 requests run or wait, expected none (wait for them, or cancel them)"
        assert len(request.result().tokens) == 20
        with pytest.raises(ValueError) as wrong:
            engine.sleep(3)
        assert str(wrong.value) == "sleep: level is 3, expected 1 or 2"
        with pytest.raises(RuntimeError) as caught:
            engine.wake()
        assert str(caught.value) == "wake: Engine is awake, expected one that sleeps"
        engine.sleep()
        with pytest.raises(RuntimeError) as caught:
            engine.sleep()
        assert str(caught.value) == "sleep: Engine is asleep, expected wake() before"
        engine.clear_cache()
        engine.wake()
        assert texts(engine)
        engine.sleep()  # and is closed as it is


def test_sleep_from_asyncio() -> None:
    async def run() -> tuple[list[int], list[int]]:
        engine: Engine = make_engine(TARGET, None, "cpu")
        async with AsyncEngine(engine) as tasks:
            first = await (await tasks.submit([1, 2, 3], SamplingParams(8))).result()
            await tasks.sleep()
            await tasks.wake()
            return first.tokens, (await (await tasks.submit([1, 2, 3], SamplingParams(8))).result()).tokens

    first, second = asyncio.run(run())
    assert first == second
