"""KV pools as a value; 8-bit KV in the engine: its scales, its logits, and the same text with any draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, SamplingParams, Standalone, Union
from specdec_kernels.models.backends.select import open_language_model
from specdec_kernels.models.kv_pools import KeyValueLayout, KvPools, KvScales
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.kv_scales import FP8, LARGEST, ROOM, checkpoint_scales, measured_scale
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering
from support.random_checkpoints import VOCAB, random_prompts, save_random_model
from support.tiny_checkpoint import held_out

CPU = torch.device("cpu")

# --- pools


def pools_of_three(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> KvPools:
    """Return pools of layers 0 and 2 of one shape, and layer 1 of another."""
    shapes = [KeyValueLayout(2, 64, 64), KeyValueLayout(2, 64, 32, window=5), KeyValueLayout(2, 64, 64)]
    return KvPools.allocate(shapes, 6, 4, dtype, device, [KvScales(2.0**i, 0.5**i) for i in range(3)])


def test_layers_of_one_shape_are_a_group() -> None:
    pools = pools_of_three(FP8)
    assert [(group.layers, *(list(pool.shape) for pool in group.pools)) for group in pools.groups] == [
        ((0, 2), [2, 6, 4, 2, 64], [2, 6, 4, 2, 64]),
        ((1,), [1, 6, 4, 2, 64], [1, 6, 4, 2, 32]),
    ]
    assert [kv.scales for kv in pools.layers] == [(1.0, 1.0), (2.0, 0.5), (4.0, 0.25)]
    assert [kv.pools[0].data_ptr() for kv in pools.layers] == [
        pools.groups[group].pools[0][i].data_ptr() for group, i in ((0, 0), (1, 0), (0, 1))
    ]
    assert pools.num_bytes == 6 * 4 * 2 * (64 + 64 + 64 + 32 + 64 + 64)
    assert (pools.dtype, pools.num_pages, pools.page_size) == (FP8, 6, 4)


def test_pools_of_another_size_are_of_the_same_layers() -> None:
    pools = pools_of_three(torch.bfloat16)
    more = pools.with_pages(9)
    assert (more.num_pages, more.page_size, more.dtype) == (9, 4, torch.bfloat16)
    assert [([pool.shape[1:] for pool in kv.pools], kv.scales) for kv in more.layers] == [
        ([pool.shape[1:] for pool in kv.pools], kv.scales) for kv in pools.layers
    ]
    assert more.num_bytes == pools.num_bytes // 6 * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_a_path_moves_in_every_layer(dtype: torch.dtype, device: torch.device) -> None:
    pools = KvPools.allocate(
        [KeyValueLayout(2, 64, 64), KeyValueLayout(1, 64, 64), KeyValueLayout(2, 64, 64)], 6, 4, dtype, device
    )
    for kv in pools.layers:
        for pool in kv.pools:
            pool.view(torch.uint8).random_(0, 120)
    before = [tuple(pool.clone().view(torch.uint8).flatten(0, 1) for pool in kv.pools) for kv in pools.layers]
    tables = torch.tensor([[3, 1, 4]], dtype=torch.int32, device=device)
    slot, status = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    path = torch.tensor([[0, 2, 5]], dtype=torch.int32, device=device)
    pools.move(tables, path, slot + 3, slot + 2, slots=slot, status=status)
    assert status.tolist() == [0]
    row = [3 * 4 + i for i in range(4)] + [1 * 4 + i for i in range(4)]  # of the slot's rows
    for kv, old in zip(pools.layers, before, strict=True):
        for pool, was in zip(kv.pools, old, strict=True):
            was[[row[3], row[4]]] = was[[row[4], row[7]]]
            assert torch.equal(pool.view(torch.uint8).flatten(0, 1), was)


# --- scales


def with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor], **config: object) -> Path:
    """Write a checkpoint with these tensors and config entries in addition to its own."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def number(value: float) -> torch.Tensor:
    return torch.tensor(value)


NAMES = {
    "llm-compressor": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older llm-compressor": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
LAYOUTS = [KeyValueLayout(2, 64, 64)] * 4
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


def engine_of(model: Any, kv_dtype: Any = "fp8_e4m3", **options: Any) -> Engine:
    return Engine(
        model,
        **{"max_len": 160, "num_slots": 2, "dtype": torch.float32, "device": "cpu", "kv_dtype": kv_dtype} | options,
    )


@pytest.mark.parametrize("exporter", NAMES)
def test_scales_of_checkpoints(exporter: str, folder: Path, tmp_path: Path) -> None:
    k, v = NAMES[exporter]
    scales = {f"model.layers.{i}.{k}": number(0.5 + i).view([1] * (i % 2)) for i in range(4)}
    scales |= {f"model.layers.{i}.{v}": number(0.25 + i).bfloat16() for i in range(4)}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}
    source = with_scales(folder, tmp_path / "scaled", scales, quantization_config=quantization)
    want = [KvScales(0.5 + i, 0.25 + i) for i in range(4)]
    assert [kv.scales for kv in engine_of(source).target.pools.layers] == want
    # Where KV is of the weights' dtype they mean nothing, and the text is that of the model without them.
    texts = []
    for model in (source, folder):
        torch.manual_seed(1)
        outputs = engine_of(model, None).generate(random_prompts(2), SamplingParams(max_new_tokens=8))
        texts.append([output.tokens for output in outputs])
    assert texts[0] == texts[1]


def test_one_scale_for_keys_and_values(folder: Path, tmp_path: Path) -> None:
    scales = {f"model.layers.{i}.self_attn.kv_scale": number(2.0 + i) for i in range(4)}
    source = with_scales(folder, tmp_path / "scaled", scales)
    assert checkpoint_scales(source, LAYOUTS, "model") == [KvScales(2.0 + i, 2.0 + i) for i in range(4)]
    assert checkpoint_scales(folder, LAYOUTS, "model") is None
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert checkpoint_scales(module, LAYOUTS, "model") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.2.self_attn.k_scale": None}, "has no k_scale in layer 2, expected one in each"),
        (
            {"model.layers.1.self_attn.v_scale": torch.zeros(())},
            "has model.layers.1.self_attn.v_scale 0.0, expected one number above 0",
        ),
        (
            {"model.layers.1.self_attn.v_scale": torch.ones(2)},
            "has model.layers.1.self_attn.v_scale [1.0, 1.0], expected one number above 0",
        ),
    ],
)
def test_scales_that_are_none_are_refused(change: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    scales = {f"model.layers.{i}.self_attn.{name}_scale": number(1.0) for i in range(4) for name in "kv"}
    source = with_scales(folder, tmp_path / "x", {n: t for n, t in (scales | change).items() if t is not None})
    with pytest.raises(ValueError) as error:
        engine_of(source)
    assert str(error.value) == f"model: {source} {message}"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}, "kv_cache_scheme": KV_SCHEME},
            "weights: type is None, expected 'float' or 'int'",
        ),
        ({"kv_cache_scheme": KV_SCHEME | {"type": "int"}}, "config_groups has 0 groups, expected one"),
        ({"kv_cache_scheme": KV_SCHEME | {"strategy": "attn_head"}}, "config_groups has 0 groups, expected one"),
        ({}, "config_groups has 0 groups, expected one"),
    ],
    ids=["weights", "int", "heads", "nothing"],
)
def test_schemes_that_quantize_more_or_otherwise_are_refused(
    quantization: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = {"quant_method": "compressed-tensors"} | quantization
    source = with_scales(folder, tmp_path / "x", {}, quantization_config=config)
    with pytest.raises(ValueError) as error:
        engine_of(source)
    assert str(error.value) == f"model: {source} is quantized by compressed-tensors, {message}"


def test_measured_scales_leave_room_and_cost_no_precision() -> None:
    for largest in (1e-4, 0.37, 1.0, 112.0, 113.0, 5e4):
        scale = measured_scale(torch.tensor([[0.0, -largest], [largest / 3, 0.0]]))
        assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
        assert LARGEST / (2 * ROOM) < largest / scale <= LARGEST / ROOM
    assert measured_scale(torch.zeros(3)) == 1.0 == measured_scale(torch.tensor([torch.inf, 1.0]))


def test_scales_are_measured_alike_every_time(device: torch.device) -> None:
    """They fit what the model then says: nothing of a text of its own is clamped, and little is lost below."""
    first, second = (engine_of(tiny_model("target"), max_len=512, device=device) for _ in range(2))
    scales = [kv.scales for kv in first.target.pools.layers]
    assert scales == [kv.scales for kv in second.target.pools.layers] and len(set(scales)) > 1
    first.generate(held_out("code")[:2], SamplingParams(max_new_tokens=80))
    for kv in first.target.pools.layers:
        for pool in kv.pools:
            assert LARGEST / 32 < pool.float().abs().max() < LARGEST


# --- the engine


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale


def with_rounded_kv(model: Any, pools: KvPools) -> Any:
    """Return the model of transformers with keys and values rounded as in the pools."""

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        scales = pools.layers[module.layer_idx].scales
        groups = query.shape[1] // key.shape[1]
        k, v = (rounded(x, s).repeat_interleave(groups, 1) for x, s in zip((key, value), scales, strict=True))
        rows = query.shape[2]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = (query @ k.transpose(-1, -2) * module.scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("rounded_kv", attend)
    AttentionMaskInterface.register("rounded_kv", lambda *args, **kwargs: None)
    model = deepcopy(model)
    model.set_attn_implementation("rounded_kv")
    return model


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of logits [Q, V], without what is common to a row: root mean squares over each other."""
    got, want = (x - x.mean(-1, keepdim=True) for x in (got.cpu().double(), want.double()))
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_logits_are_those_of_rounded_kv(name: str, implementation: str, folder: Path, device: torch.device) -> None:
    """Compare logits with two references.

    First, the module with keys and values rounded the same way. Float32 rounds a few of them to the other side, each by
    at most 2^-3 of itself, far less than all others together. Second, the module as it is. An element is off by 2^-4 of
    itself at most and by a fortieth on average; scores and values sum many, and layers add their errors, so an error of
    a tenth is never expected.
    """
    source = tiny_model("target") if name == "tiny" else folder
    module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    sizes: dict[str, Any] = {"max_len": 160, "num_pages": 8, "page_size": 16, "dtype": torch.float32}
    target = open_language_model(source, ModelOptions(device=device, kv_dtype=FP8, **sizes), implementation)
    assert target.pools.dtype == FP8
    tokens = torch.tensor([held_out("code")[0][:60]]) % (VOCAB if name == "qwen3" else 1 << 30)
    count = tokens.shape[1]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device)[None]
    positions = torch.arange(count, dtype=torch.int32, device=device)[None]
    rows = PagedBatch(zero, table, zero, count, status=zero.clone())
    logits = target.logits(target.forward(tokens.int().to(device), positions, rows).hidden)[0]
    assert relative_error(logits, with_rounded_kv(module, target.pools)(tokens).logits[0]) < 2e-3
    plain = relative_error(logits, module(tokens).logits[0])
    assert 1e-3 < plain < 0.1, plain


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_logits_of_16_bits(implementation: str, dtype: torch.dtype, device: torch.device) -> None:
    """As far from those of the module in float32 as the module itself is in this dtype, by either way."""
    source = tiny_model("target")
    module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    sizes: dict[str, Any] = {"max_len": 160, "num_pages": 8, "page_size": 16, "dtype": dtype}
    target = open_language_model(source, ModelOptions(device=device, **sizes), implementation)
    assert target.pools.dtype == dtype
    tokens = torch.tensor([held_out("code")[0][:60]])
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device)[None]
    positions = torch.arange(60, dtype=torch.int32, device=device)[None]
    hidden = target.forward(tokens.int().to(device), positions, PagedBatch(zero, table, zero, 60)).hidden
    want = module(tokens).logits[0]
    own = relative_error(module.to(dtype)(tokens).logits[0], want)
    assert relative_error(target.logits(hidden)[0], want) < 2 * own < 0.1


@pytest.mark.parametrize(("dtype", "kv_dtype"), covering([torch.float16, torch.bfloat16], [None, FP8]))
def test_the_general_way_generates_with_16_and_8_bits(dtype: torch.dtype, kv_dtype: Any, device: torch.device) -> None:
    """Trees as well as single tokens. Ties are common in 16 bits, which sums in another order break otherwise."""
    prompts, texts = held_out("repeat")[:4], []
    for draft in (None, Ngram(), eagle3()):
        options: dict[str, Any] = {"implementation": "transformers", "adaptive": False, "device": device}
        with engine_of(tiny_model("target"), kv_dtype, draft=draft, dtype=dtype, **options) as engine:
            assert engine.target.pools.dtype == (kv_dtype or dtype)
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
            texts.append([output.tokens for output in outputs])
    assert sum(output.stats.accept_length for output in outputs) / len(outputs) > 1.5
    equal = sum(text == want for drafted in texts[1:] for text, want in zip(drafted, texts[0], strict=True))
    assert equal >= 6, equal


def eagle3() -> Eagle3:
    return Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16)


DRAFTS: dict[str, Callable[[], Draft]] = {
    "ngram": Ngram,
    "eagle3": eagle3,
    "standalone": lambda: Standalone(tiny_model("target"), num_steps=4, topk=2, num_nodes=9),
    "union": lambda: Union(eagle3(), Ngram()),
}
PLAIN: dict[tuple[str, float], list[list[int]]] = {}


def outputs_of(draft: Draft | None, temperature: float, device: torch.device) -> tuple[Engine, list[Any]]:
    options = {"max_len": 512, "num_slots": 4, "adaptive": False}  # adaptive, the clock chooses how much is drafted
    engine = engine_of(tiny_model("target"), draft=draft, device=device, **options)
    params = SamplingParams(max_new_tokens=48, ignore_eos=True, temperature=temperature, seed=5)
    return engine, engine.generate(held_out("repeat")[:5] + held_out("code")[:5], params)


@pytest.mark.parametrize(("name", "temperature"), covering(DRAFTS, [0.0, 0.8]))
def test_text_is_the_same_with_any_draft(name: str, temperature: float, device: torch.device) -> None:
    """Rows of a tree are rounded as in plain decoding.

    A sum in another order may round an element to the other side and decide a near tie differently: one text of ten may
    differ for that.
    """
    key = device.type, temperature
    if key not in PLAIN:
        PLAIN[key] = [output.tokens for output in outputs_of(None, temperature, device)[1]]
    draft = DRAFTS[name]()
    engine, outputs = outputs_of(draft, temperature, device)
    texts = [output.tokens for output in outputs]
    assert sum(text == want for text, want in zip(texts, PLAIN[key], strict=True)) >= 9
    lengths = [output.stats.accept_length for output in outputs]
    assert sum(lengths) / 10 > (1.8 if temperature == 0 else 1.1)
    assert engine.target.pools.dtype == FP8
    if isinstance(draft, Eagle3):  # one layer: rounding would save little and cost acceptance
        assert draft.module.pools.dtype == torch.float32
    if isinstance(draft, Standalone):  # as many layers as the target, here
        assert draft.lm.pools.dtype == FP8
        assert draft.lm.pools.num_bytes == engine.target.pools.num_bytes


def test_pools_take_half_of_16_bits(device: torch.device) -> None:
    options = {"max_len": 512, "dtype": torch.bfloat16, "device": device}
    eight, sixteen = (engine_of(tiny_model("target"), kv_dtype, **options) for kv_dtype in (FP8, torch.bfloat16))
    assert 2 * eight.target.pools.num_bytes == sixteen.target.pools.num_bytes
    prompts = held_out("repeat")[:4]
    for engine in (eight, sixteen):
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
        assert [len(output.tokens) for output in outputs] == [16] * 4


def test_behind_sliding_windows(tmp_path: Path, device: torch.device) -> None:
    """Texts of two drafts over windows and 8 bits at once; layers with and without a window have pools of their own."""
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    source = save_random_model(tmp_path / "windows", "qwen3", **windows)
    prompts = random_prompts(6)
    texts = []
    for draft in (None, Ngram(), Standalone(source, num_steps=3, topk=2)):
        engine = engine_of(source, draft=draft, num_slots=3, page_size=4, device=device)
        assert [group.layers for group in engine.target.pools.groups] == [(0,), (1, 2, 3)]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
        texts.append([output.tokens for output in outputs])
    assert all(sum(a == b for a, b in zip(texts[0], other, strict=True)) >= 5 for other in texts[1:])


def test_dtypes_that_are_none_are_refused() -> None:
    for kv_dtype in ("fp8_e5m2", "int8", torch.float8_e5m2, torch.bfloat16):
        with pytest.raises(ValueError) as error:
            engine_of(tiny_model("target"), kv_dtype)
        assert str(error.value) == (
            f"Engine: kv_dtype is {kv_dtype!r}, expected None (that of the weights), 'fp8_e4m3' or torch.float8_e4m3fn"
        )
    with pytest.raises(ValueError) as error:
        engine_of(tiny_model("target"), 8)
    assert str(error.value) == "Engine: kv_dtype is 8, expected a string, a dtype of torch or None"
