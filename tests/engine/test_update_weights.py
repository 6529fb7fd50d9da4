"""Other weights for engines that run: texts are those of an engine made with them, to the token."""

from __future__ import annotations

import asyncio
import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec_kernels.engine import (
    AsyncEngine,
    Eagle,
    Engine,
    Ngram,
    SamplingParams,
    Union,
)
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.heads.eagle import EagleHead
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.update import write
from support.changed_weights import DRAFTS, HEAD, PARAMS, TARGET, changed, eagle3, make_engine, tensors_of, texts
from support.exhaustive import representative
from support.family_cases import random_module
from support.paused_rounds import rounds_held
from support.quantized_checkpoints import EXPERTS, FORMATS, write_model
from support.random_checkpoints import random_prompts, save_random_model
from support.tiny_checkpoint import held_out, target_with_features


def folder_with(folder: Path, like: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint like another one, with these tensors."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return folders of a target and a head with other weights."""
    root = tmp_path_factory.mktemp("other")
    target = folder_with(root / "target", TARGET, changed(tensors_of(TARGET)))
    return target, folder_with(root / "eagle3", HEAD, changed(tensors_of(HEAD), seed=1))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("name", representative(DRAFTS))
def test_texts_are_those_of_a_fresh_engine(
    name: str, implementation: str, other: tuple[Path, Path], device: torch.device
) -> None:
    if implementation == "transformers" and name != "eagle3":
        pytest.skip("what drafts does not depend on how the target runs")
    options = {"implementation": implementation, "prefix_cache": True}
    new = {"eagle3": tensors_of(other[1]), "standalone": tensors_of(other[0]), "union": [None, tensors_of(other[1])]}
    with (
        make_engine(TARGET, DRAFTS[name](TARGET, HEAD), device, **options) as engine,
        make_engine(other[0], DRAFTS[name](*other), device, **options) as fresh,
    ):
        before, graphs = texts(engine), engine.graphs
        engine.update_weights(tensors_of(other[0]), new.get(name))
        after = texts(engine)
        assert after == texts(fresh) != before
        assert engine.stats().cached_tokens == 2 * fresh.stats().cached_tokens  # nothing is found of what was there
        # And back, in two parts; the second is read from the first engine's own checkpoint.
        whole = tensors_of(TARGET)
        names = sorted(whole)
        engine.update_weights({key: whole[key] for key in names[::2]})
        engine.update_weights({key: whole[key] for key in names[1::2]})
        if name in new:
            old = tensors_of(HEAD if name != "standalone" else TARGET)
            engine.update_weights(draft=[None, old] if name == "union" else old)
        assert texts(engine) == before
        assert engine.graphs is graphs


def test_requests_that_run_go_on_with_the_new_weights(other: tuple[Path, Path], device: torch.device) -> None:
    """They keep the text that they have, and nothing that the old weights have computed of it."""
    prompts = held_out("code")[:2]
    params = [SamplingParams(24, ignore_eos=True), SamplingParams(24, ignore_eos=True, temperature=0.8, seed=9)]
    with (
        make_engine(TARGET, eagle3(HEAD), device) as engine,
        make_engine(TARGET, None, device) as first,
        make_engine(other[0], None, device, num_slots=8) as fresh,
    ):
        with rounds_held(engine, after=4):
            requests = engine.submit_many(prompts, params)
            next(iter(requests[0]))
            engine.update_weights(tensors_of(other[0]), tensors_of(other[1]))
        outputs = [request.result() for request in requests]
        assert engine.stats().retractions >= 1 or device.type == "cuda"  # where they may have ended by then
        for output, sampling in zip(outputs, params, strict=True):
            assert len(output.tokens) == 24
            # From some token on, that one where the weights changed, it is what the new ones make of its beginning.
            (old,) = first.generate([output.prompt_tokens], sampling)
            same = next((i for i, (a, b) in enumerate(zip(output.tokens, old.tokens, strict=True)) if a != b), 24)
            want = continuations(fresh, output.prompt_tokens, output.tokens, sampling, same)
            assert any(output.tokens[count:] == rest for count, rest in want.items()), same


def continuations(
    engine: Engine, prompt: list[int], tokens: list[int], sampling: SamplingParams, most: int
) -> dict[int, list[int]]:
    """Return the engine's continuations of the first 0 to `most` tokens."""
    counts = range(min(most, len(tokens) - 1) + 1)
    each = [replace(sampling, max_new_tokens=len(tokens) - count) for count in counts]
    outputs = engine.generate([[*prompt, *tokens[:count]] for count in counts], each)
    return {count: output.tokens for count, output in zip(counts, outputs, strict=True)}


def test_requests_that_wait_and_prefill(other: tuple[Path, Path], device: torch.device) -> None:
    """Whatever a request is at when the weights change, it ends, and no page is lost."""
    prompts = [prompt * 3 for prompt in held_out("code")[:12]]
    with make_engine(TARGET, eagle3(HEAD), device, prefill_chunk=16, num_pages=200, prefix_cache=True) as engine:
        requests = engine.submit_many([prompt[:180] for prompt in prompts], SamplingParams(12, ignore_eos=True))
        for weights in (other[0], TARGET, other[0]):
            engine.update_weights(tensors_of(weights))
        assert [len(request.result().tokens) for request in requests] == [12] * 12
        engine.clear_cache()
        engine.core.scheduler.settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert int(engine.state.pool.num_free) == 200


def test_from_asyncio(other: tuple[Path, Path]) -> None:
    async def run() -> tuple[list[int], list[int]]:
        async with AsyncEngine(make_engine(TARGET, None, "cpu")) as engine:
            prompt = held_out("code")[0]
            await (await engine.submit(prompt, PARAMS[0])).result()
            await engine.update_weights(tensors_of(other[0]))
            return prompt, (await (await engine.submit(prompt, PARAMS[0])).result()).tokens

    prompt, tokens = asyncio.run(run())
    with make_engine(other[0], None, "cpu") as fresh:
        assert tokens == fresh.generate([prompt], PARAMS[0])[0].tokens


# --- models


def logits(lm: CausalLM) -> Tensor:
    tokens = torch.arange(3, 40, dtype=torch.int32)[None]
    positions = torch.arange(tokens.shape[1], dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    pages = torch.arange(lm.pools.num_pages, dtype=torch.int32)[None]
    rows = PagedBatch(slots=zero, page_table=pages, prefix_lens=zero, tail_len=tokens.shape[1])
    with torch.inference_mode():
        return lm.logits(lm.forward(tokens, positions, rows).hidden)


def native(model: Any) -> CausalLM:
    device = torch.device("cpu")
    return CausalLM(model, ModelOptions(max_len=128, num_pages=8, page_size=16, dtype=torch.float32, device=device))


# Copies of what moves or is padded, sums with one, closures, fused products, biases, parameters of activations, experts.
FAMILIES = [
    "llama 80", "gemma3", "phi3", "glm", "cohere normed", "olmo", "apertus", "gpt_neox 80", "phi normed",
    "afmoe", "gpt_oss", "glm4_moe", "mixtral", "olmoe",
]  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str, tmp_path: Path) -> None:
    """By the names and in the pieces of a published checkpoint, which transformers puts together."""
    module = random_module(case)
    new = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    new.save_pretrained(tmp_path)
    lm, fresh = native(module), native(new)
    before, addresses = logits(lm), [parameter.data_ptr() for parameter in lm.model.parameters()]
    updates = lm.updates(tensors_of(tmp_path), "weights")
    assert torch.equal(logits(lm), before)
    write(updates)
    lm.refresh()
    assert torch.equal(logits(lm), logits(fresh)) and not torch.equal(logits(lm), before)
    assert addresses == [parameter.data_ptr() for parameter in lm.model.parameters()]


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *((name, "llama") for name in ("fp8 blocks", "gptq")),
        ("fp8 weights alone", "cohere"),
        ("gptq", "mixtral"),
        ("fp8 rows", "qwen3_moe"),
    ],
)
def test_quantized_weights(name: str, model_type: str, tmp_path: Path, device: torch.device) -> None:
    sizes = EXPERTS if model_type in ("mixtral", "qwen3_moe") else {}
    first, twin = write_model(tmp_path, name, model_type, **sizes)
    weights = changed(tensors_of(twin), 0.3)
    (tmp_path / "second").mkdir()
    second = requantized(tmp_path / "second", first, name, weights)
    prompts, options = random_prompts(3), {"max_len": 128, "page_size": 3}
    with make_engine(first, None, device, **options) as engine, make_engine(second, None, device, **options) as fresh:
        before = [output.tokens for output in engine.generate(prompts, PARAMS[0])]
        numbers = [buffer.data_ptr() for buffer in engine.target.model.buffers()]
        for _ in range(2):
            engine.update_weights(tensors_of(second))
        after = [output.tokens for output in engine.generate(prompts, PARAMS[0])]
        assert after == [output.tokens for output in fresh.generate(prompts, PARAMS[0])] != before
        assert numbers == [buffer.data_ptr() for buffer in engine.target.model.buffers()]

        path = next(key for key in tensors_of(first) if key.endswith("q_proj." + MARK[name]))
        one = {path: tensors_of(second)[path]}
        lacking = sorted(key for key in tensors_of(first) if key.startswith(path.rpartition(".")[0]) and key != path)
        with pytest.raises(ValueError) as caught:
            engine.update_weights(one)
        wanted = next(key for key in lacking if not key.endswith("g_idx"))
        assert str(caught.value) == (
            f"update_weights: weights lacks {wanted}, expected all tensors of a quantized product"
        )


MARK = {
    "fp8 blocks": "weight_scale_inv", "fp8 rows": "weight_scale", "fp8 weights alone": "weight_scale", "gptq": "qweight",
    "awq": "qweight", "packed": "weight_packed",
}  # fmt: skip


def requantized(folder: Path, like: Path, name: str, weights: dict[str, Tensor]) -> Path:
    """Write other weights in the quantized format of this checkpoint."""
    _, write = FORMATS[name]
    tensors = {}
    for key, tensor in weights.items():
        if key in tensors_of(like) and "scale" not in key and tensors_of(like)[key].dtype == tensor.dtype:
            tensors[key] = tensor
            continue
        written = write(tensor)
        tensors |= {key.removesuffix("weight") + part: t.contiguous() for part, t in written.tensors.items()}
    assert tensors.keys() == tensors_of(like).keys()
    (folder / "config.json").write_text((like / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_another_way_to_store_them_is_refused(tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "gptq shuffled")
    tensors = tensors_of(folder)
    path = "model.layers.0.self_attn.q_proj"
    with make_engine(folder, None, "cpu", max_len=128) as engine:
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(path)}
        engine.update_weights(own)
        with pytest.raises(ValueError) as caught:
            engine.update_weights(own | {f"{path}.g_idx": tensors[f"{path}.g_idx"].flip(0)})
        assert (
            str(caught.value) == f"update_weights: weights has {path} with another order, expected the one that it has"
        )
        with pytest.raises(ValueError) as caught:
            engine.update_weights({f"{path}.weight": torch.zeros(256, 192)})
        assert str(caught.value) == (
            f"update_weights: weights has {path}.weight alone, expected with it what its elements are multiplied by"
        )


def test_scales_of_kv_stay(tmp_path: Path) -> None:
    scales = {f"model.layers.{i}.self_attn.{part}_scale": torch.tensor([0.5]) for i in range(4) for part in "kv"}
    plain = save_random_model(tmp_path / "plain", "llama")
    folder = folder_with(tmp_path / "scaled", plain, tensors_of(plain) | scales)
    with make_engine(folder, None, "cpu", kv_dtype="fp8_e4m3", max_len=128) as engine:
        engine.update_weights(tensors_of(folder))
        name = "model.layers.2.self_attn.k_scale"
        with pytest.raises(ValueError) as caught:
            engine.update_weights({name: torch.tensor([0.25])})
        assert str(caught.value) == f"update_weights: weights has {name} 0.25, expected 0.5 (scales of KV stay)"


def test_a_head_among_the_targets_tokens(tmp_path: Path) -> None:
    """Its copy of rows of the target's `lm_head` follows the target."""
    target = target_with_features((0,))
    head = EagleHead(copy.copy(target.config))
    head.lm_head, head.embed_tokens = target.lm_head, target.embedding
    ids = sorted(torch.randperm(target.config.vocab_size)[:40].tolist())
    torch.save(torch.tensor(ids), tmp_path / "ids.pt")
    with make_engine(target.model, Eagle(head, vocabulary=tmp_path / "ids.pt"), "cpu") as engine:
        new = changed(tensors_of(TARGET))
        engine.update_weights(new)
        draft: Any = engine.draft
        assert torch.equal(draft.module._parts.head.weight, target.lm_head.weight[ids])
        assert torch.equal(target.lm_head.weight, new["model.embed_tokens.weight"].float())
        with pytest.raises(ValueError) as caught:
            engine.update_weights(draft={"lm_head.weight": new["model.embed_tokens.weight"]})
        assert str(caught.value) == (
            "update_weights: draft has lm_head.weight, which is the target's, expected weights of the head's own"
        )


def test_tied_embeddings(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    with make_engine(folder, None, "cpu", max_len=128) as engine:
        engine.update_weights({"model.embed_tokens.weight": embedding + 1})
        assert torch.equal(engine.target.lm_head.weight, embedding + 1)
        engine.update_weights({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
        assert torch.equal(engine.target.lm_head.weight, embedding)
        with pytest.raises(ValueError) as caught:
            engine.update_weights({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1})
        assert str(caught.value) == (
            "update_weights: weights has lm_head.weight, expected it to be model.embed_tokens.weight, "
            "which is the same weight in this model"
        )


def test_what_is_no_weight_is_refused_by_name_and_nothing_changes() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(TARGET)
    shape = list(tensors[name].shape)
    good = {"model.norm.weight": 2 * tensors["model.norm.weight"]}
    draft = {"norm.weight": 2 * tensors_of(HEAD)["norm.weight"]}
    head = tensors_of(HEAD)
    with make_engine(TARGET, eagle3(HEAD), "cpu") as engine:
        before = texts(engine)
        for weights, of_draft, error, message in [
            ([1], None, TypeError, "weights is a list, expected a mapping of names to tensors"),
            ({name: 1}, None, TypeError, f"weights['{name}'] is a int, expected a tensor"),
            ({5: tensors[name]}, None, TypeError, "weights has a int, expected names of tensors"),
            (
                {name: tensors[name].to("meta")},
                None,
                ValueError,
                f"weights['{name}'] is on the meta device, expected a tensor with elements",
            ),
            (
                good | {"model.layers.1.mlp.gate.weight": tensors[name]}, None, ValueError,
                "weights has model.layers.1.mlp.gate.weight, unknown to LlamaForCausalLM, "
                "expected tensors of the model alone",
            ),
            (
                good | {name: tensors[name][1:]}, None, ValueError,
                f"weights has {name} of shape {[shape[0] - 1, shape[1]]}, expected {shape}",
            ),
            (
                good | {name: tensors[name].to(torch.int8)}, None, ValueError,
                f"weights['{name}'] is torch.int8, expected float32, float16 or bfloat16",
            ),
            (
                good, draft | {"norm.bias": draft["norm.weight"]}, ValueError,
                "draft has norm.bias, unknown to Eagle3Head, expected tensors of the head",
            ),
            (
                good, draft | {"fc.weight": head["fc.weight"][1:]}, ValueError,
                f"draft has fc.weight of shape {list(head['fc.weight'][1:].shape)}, "
                f"expected {list(head['fc.weight'].shape)}",
            ),
            (
                good, [draft, draft], ValueError,
                "draft has 2 entries, expected one for each of 1 parts",
            ),
        ]:  # fmt: skip
            with pytest.raises(error) as caught:
                engine.update_weights(weights, of_draft)  # type: ignore[arg-type]
            assert str(caught.value) == f"update_weights: {message}"
        assert texts(engine) == before
    union = Union(Ngram(num_nodes=6), eagle3(HEAD), num_nodes=10)
    with make_engine(TARGET, union, "cpu") as engine:
        for of_parts, message in [
            (draft, "draft is one mapping, expected a list of 2, one (or None) for each part"),
            ([draft, draft], "draft[0] is given, expected None for Ngram, which has no weights"),
        ]:
            with pytest.raises(ValueError) as caught:
                engine.update_weights(good, of_parts)
            assert str(caught.value) == f"update_weights: {message}"
    with pytest.raises(RuntimeError) as closed:
        engine.update_weights(good)
    assert str(closed.value) == "Engine is closed, expected an open one"


def test_not_from_a_callback() -> None:
    with make_engine(TARGET, None, "cpu") as engine:
        said: list[str] = []

        def update(_: Any) -> None:
            try:
                engine.update_weights({})
            except RuntimeError as error:
                said.append(str(error))

        request = engine.submit(held_out("code")[0], SamplingParams(2))
        request.add_done_callback(update)
        request.result()
        engine.close()
    assert said == ["Engine: a callback waits for a request, expected another thread to do that"]
