"""The transformers backend computes the native one's states and features, and refuses other models by name."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from specdec_kernels.engine import Engine, Ngram, SamplingParams
from specdec_kernels.engine import startup as opening
from specdec_kernels.engine.device.prefill_graphs import captured_shapes
from specdec_kernels.models.backends import native
from specdec_kernels.models.backends.attention_hook import hook_rotations, running_hook, use_hook
from specdec_kernels.models.backends.module_copy import cache_name
from specdec_kernels.models.backends.select import open_language_model
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from support.tiny_random_models import NATIVE, tiny_model


class CountingHook:
    """A hook that counts the rotations of a module with its own attention."""

    def __init__(self) -> None:
        self.rotations = 0

    def rotate(
        self, own: Callable[..., Any], q: Tensor, k: Tensor, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        self.rotations += 1
        rotated: tuple[Tensor, Tensor] = own(q, k, *arguments, **named)
        return rotated

    def attend(self, *_: Any) -> Tensor:
        raise AssertionError("the module attends by itself")

    def mask(self, *_: Any) -> Tensor:
        raise AssertionError("the module makes its own masks")


def test_states_and_features_are_those_of_the_native_backend() -> None:
    model = tiny_model("llama", **NATIVE)
    tokens = torch.randint(5, 150, (1, 17), dtype=torch.int32)
    positions = torch.arange(17, dtype=torch.int32)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    rows = PagedBatch(slots=zero, page_table=torch.arange(4, dtype=torch.int32)[None], prefix_lens=zero, tail_len=17)
    states = []
    options = ModelOptions(
        max_len=32,
        num_pages=4,
        page_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        feature_layers=(4, 0, 2),
    )
    for implementation in ("native", "transformers"):
        lm = open_language_model(model, options, implementation)
        with torch.inference_mode():
            hidden, features = lm.forward(tokens, positions, rows)
            assert features is not None
            states.append((hidden, features, lm.logits(hidden)))
    for ours, fallback in zip(*states, strict=True):
        assert ours.shape == fallback.shape
        torch.testing.assert_close(fallback, ours, rtol=1e-4, atol=1e-4)


def test_rotations_in_threads_reach_the_hook_of_their_own_thread_and_plain_calls_none() -> None:
    model = tiny_model("llama", **NATIVE)
    tokens = torch.arange(5, 14)[None]
    with torch.inference_mode():
        want = model(tokens).logits
    hook_rotations(model)
    hook_rotations(model)  # wraps once
    start = Barrier(5)

    def run(hook: CountingHook | None) -> bool:
        start.wait(timeout=300)
        with torch.inference_mode(), nullcontext() if hook is None else use_hook(hook):
            return all(torch.equal(model(tokens).logits, want) for _ in range(20))

    hooks = [CountingHook() for _ in range(4)]
    with ThreadPoolExecutor(5) as threads:
        assert all(threads.map(run, [*hooks, None]))
    assert [hook.rotations for hook in hooks] == [20 * model.config.num_hidden_layers] * 4
    with pytest.raises(RuntimeError, match="is called outside of a pass of the engine"):
        running_hook()


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("llama", **NATIVE), implementation="magic", device="cpu")
    assert str(error.value) == "Engine: implementation is 'magic', expected one of auto, native, transformers"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("rwkv", "model: rwkv has no attention in its layers, expected a model that has"),
        ("blt", "model: blt is made of several models, expected one"),
        (  # whose config says -1 for no limit of length
            "xlnet",
            "model: XLNetLMHeadModel does not use the attention interface, expected a decoder with causal attention "
            "through transformers' attention interface",
        ),
    ],
)
def test_what_has_no_attention_of_ours_is_refused(model_type: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Engine(tiny_model(model_type), max_len=64, device="cpu")
    assert str(error.value) == message


class NoStream:
    """Stands for a stream of a device that this machine may not have."""

    device, cuda_stream = "cuda:0", 0


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_rounds_that_cannot_be_captured_are_launched_call_by_call(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a capture has left is undone before rounds are launched. Our own parts are captured, or it is an error."""
    options: dict[str, Any] = {"max_len": 64, "num_slots": 2, "dtype": torch.float32, "device": "cpu"}
    with Engine(tiny_model("llama", **NATIVE), implementation=implementation, **options) as engine:
        executor, waited = engine.core.executor, []
        rings, passes = executor.round.rings, executor.passes

        def capture(*_arguments: Any, **_named: Any) -> Any:
            passes.captured[next(iter(captured_shapes(64, 2, 64)))] = (None, torch.zeros(1))  # type: ignore[assignment]
            rings.num_applied.fill_(3)
            raise RuntimeError("operation not permitted when stream is capturing\nand more of it")

        monkeypatch.setattr(opening, "capture", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
        config = replace(engine.config, captures=True)
        if implementation == "native":
            with pytest.raises(RuntimeError, match=r"^operation not permitted"):
                opening.capture_all(executor, config, NoStream(), progress=False)  # type: ignore[arg-type]
            assert engine.not_captured is None
            return
        assert opening.capture_all(executor, config, NoStream(), progress=False) is None  # type: ignore[arg-type]
        assert engine.not_captured == "operation not permitted when stream is capturing"
        assert (waited, passes.captured) == ([NoStream.device], {})
        assert int(rings.num_applied) == 0


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 96, "factor": 4.0,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def test_rotations_of_one_layer_type_that_change_with_the_length() -> None:
    """Rotations that change after a length are plain ones up to it, as long as no code looks for the length."""
    model = tiny_model(
        "gemma3_text", rope_parameters={"full_attention": LONGROPE, "sliding_attention": PLAIN}, eos_token_id=None
    )
    options: dict[str, Any] = {"implementation": "transformers", "device": "cpu", "dtype": torch.float32}
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=97, **options)
    assert str(error.value) == (
        "model: Gemma3ForCausalLM has rotations of rope_type 'longrope' that change after 96 tokens "
        "(max_len is 97), expected a decoder with causal attention through transformers' attention interface"
    )
    prompt = torch.randint(5, 150, (60,)).tolist()
    with Engine(model, max_len=96, **options) as engine:
        body = engine.target._body  # type: ignore[attr-defined]
        kinds = {kind for module in body.modules() for kind in (getattr(module, "rope_type", None) or {}).values()}
        assert kinds == {"default"}
        tokens = engine.generate([prompt], SamplingParams(max_new_tokens=36))[0].tokens
    want = model.generate(torch.tensor([prompt]), max_new_tokens=36, do_sample=False, use_cache=False)
    assert tokens == want[0, 60:].tolist()


def test_llama4_scales_queries_by_their_position_after_its_first_floor() -> None:
    """The text is longer than the self-check, which ends before the first factor that is not 1."""
    model = tiny_model("llama4_text", floor_scale=64, attn_scale=2.0, eos_token_id=None, attention_chunk_size=32)
    prompt = torch.randint(5, 150, (70,)).tolist()
    options: dict[str, Any] = {"max_len": 160, "num_slots": 2, "device": "cpu", "dtype": torch.float32}
    with Engine(model, draft=Ngram(num_nodes=8), adaptive=False, **options) as engine:
        tokens = engine.generate([prompt], SamplingParams(max_new_tokens=70))[0].tokens
    text = torch.tensor([prompt])
    want = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=70, do_sample=False)
    assert tokens == want[0, 70:].tolist()


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (  # whose positions begin at 2 in `generate`
            "kosmos-2.5", {},
            "gives other logits with its own cache than without, 1 of their spread apart, expected at most 0.002 "
            "(what it generates is not what it scores)",
        ),
        (  # whose window is its cache's alone
            "moshi", {"sliding_window": 40},
            "attends to all rows without a cache and to the last 40 with its own (max_len is 64), expected a decoder "
            "with causal attention through transformers' attention interface",
        ),
    ],
)  # fmt: skip
def test_model_whose_generate_computes_something_else_is_refused(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    model = tiny_model(model_type, **changes)
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=64, device="cpu", dtype=torch.float32)
    message = re.sub(r"[\d.e-]+ of their", "1 of their", str(error.value))
    assert message == f"model: {type(model).__name__} {reason}"


class LateScale(torch.nn.Module):
    """A norm that counts the rows of the pass and of the cache, and doubles its output from the 1000th on."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own, self.seen = own, 0

    def forward(self, x: Tensor) -> Tensor:
        rows = self.seen + torch.arange(x.shape[1])
        scaled: Tensor = self.own(x) * (1 + rows // 1000)[:, None]
        return scaled


def test_module_that_counts_the_rows_of_its_cache_is_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    norm = LateScale(model.model.layers[1].input_layernorm)
    model.model.layers[1].input_layernorm = norm

    def look(body: Any, _: Any, named: dict[str, Any]) -> None:
        cache = named.get(cache_name(model))
        body.layers[1].input_layernorm.seen = 0 if cache is None else cache.get_seq_length()

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=4096, implementation="transformers", device="cpu", dtype=torch.float32)
    assert str(error.value) == (
        "model: LlamaForCausalLM has rows that follow their place in a pass, not their position: what enters the "
        "attention of model.layers.1.self_attn, expected a decoder with causal attention through transformers' "
        "attention interface"
    )


def test_transformers_engine_is_freed_without_the_garbage_collector() -> None:
    options = ModelOptions(
        max_len=32, num_pages=4, page_size=8, dtype=torch.float32, device=torch.device("cpu"), feature_layers=(1, 4)
    )
    lm = open_language_model(tiny_model("llama", **NATIVE), options, "transformers")
    modules = [ref(lm), *map(ref, lm._body.modules())]  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        del lm
        assert [module() for module in modules if module() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_module_that_is_not_made_as_its_family_reads_it_is_refused_by_the_native_backend(model_type: str) -> None:
    model = tiny_model(model_type)
    for module in model.modules():
        vars(module).get("_buffers", {}).pop("embed_positions", None)
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=64, device="cpu", dtype=torch.float32, implementation="native")
    assert re.sub(r"\(.*\)", "(...)", str(error.value)) == (
        f"model: {type(model).__name__} of transformers {transformers.__version__} is not made as our layers read it "
        "(...), expected implementation='transformers' for it"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module_of_other_logits_than_our_layers_runs_by_its_modules(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward = tiny_model("llama", **NATIVE), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x + 2))  # what no config says
    options: dict[str, Any] = {"max_len": 64, "device": "cpu", "dtype": dtype}
    name = f"LlamaForCausalLM of transformers {transformers.__version__}"
    limit = 0.002 if dtype == torch.float32 else 1.0
    message = (
        rf"model: {name} gives other logits than our layers, [\d.]+ of their spread apart, expected at most {limit} "
        r"\(implementation='transformers' runs its modules\)"
    )
    with pytest.raises(ValueError, match=message):
        Engine(model, implementation="native", **options)
    with pytest.warns(RuntimeWarning, match="Engine: " + message + "; its modules run, which is slower"):
        engine = Engine(model, **options)
    assert engine.config.implementation == "transformers"
    prompt = list(range(5, 25))
    text = torch.tensor([prompt])
    want = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=12, do_sample=False)
    (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    assert dtype == torch.bfloat16 or prompt + output.tokens == want[0].tolist()


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_rotations_of_all_layers_are_found_where_transformers_5_24_has_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(model_type)
    body = model.get_decoder()
    table = body.h[0].attn.embed_positions if hasattr(body.h[0].attn, "embed_positions") else None
    prompt = list(range(5, 25))
    options: dict[str, Any] = {"max_len": 64, "device": "cpu", "dtype": torch.float32, "implementation": "native"}
    text = torch.tensor([prompt])
    want = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=12, do_sample=False)
    if table is not None:
        body.rotary_emb = torch.nn.Module()
        body.rotary_emb.register_buffer("embed_positions", table)
        for layer in body.h:
            del layer.attn.embed_positions
        monkeypatch.setattr(native, "check_against_module", lambda *_: None)  # the older module needs them there
    with Engine(model, **options) as engine:
        assert engine.generate([prompt], SamplingParams(max_new_tokens=12))[0].tokens == want[0, 20:].tolist()
