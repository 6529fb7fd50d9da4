"""Draft heads whose tensors are under a prefix of the target's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec_kernels.engine import Eagle, Engine, HeadCheckpoint, SamplingParams
from specdec_kernels.tiny import tiny_model
from support.eagle_heads import CONFIG, random_tensors, write_head, write_target_with_head
from support.tiny_checkpoint import held_out

PREFIX = "mtp."
WIDE = 768  # of the target, whose config is the head's


@pytest.fixture
def with_head(tmp_path: Path) -> Path:
    return write_target_with_head(tmp_path / "target", random_tensors(bias=True, wide=WIDE), PREFIX)


def engine_of(target: Path, head: str | Path | HeadCheckpoint) -> Engine:
    draft = Eagle(head, num_steps=3, topk=2, num_nodes=6)
    return Engine(target, draft=draft, adaptive=False, max_len=256, num_slots=2, dtype=torch.float32, device="cpu")


def texts_and_rounds(engine: Engine) -> list[tuple[list[int], int]]:
    outputs = engine.generate(held_out("code")[:2], SamplingParams(max_new_tokens=24))
    return [(output.tokens, output.stats.rounds) for output in outputs]


def test_head_under_a_prefix_drafts_as_in_its_own_folder(with_head: Path, tmp_path: Path) -> None:
    own = write_head(tmp_path / "head", random_tensors(bias=True, wide=WIDE), intermediate_size=WIDE)
    with engine_of(tiny_model("target"), own) as engine:
        expected = texts_and_rounds(engine)
    with engine_of(with_head, HeadCheckpoint(with_head, PREFIX)) as engine:
        assert texts_and_rounds(engine) == expected
        assert engine.draft.model_name == "target"


def test_update_weights_gives_a_draft_the_tensors_under_its_prefix(with_head: Path) -> None:
    weights = load_file(with_head / "model.safetensors")
    with engine_of(with_head, HeadCheckpoint(with_head, PREFIX)) as engine:
        expected = texts_and_rounds(engine)
        key = "mtp.layers.0.mlp.down_proj.weight"
        engine.update_weights({key: torch.zeros_like(weights[key])})
        assert not engine.draft.module.layers[0].mlp.down_proj.weight.any()
        engine.sleep(2)
        engine.wake()
        engine.update_weights(weights)
        assert texts_and_rounds(engine) == expected


def test_target_refuses_a_draft_s_tensors_without_that_draft(with_head: Path) -> None:
    with pytest.raises(ValueError) as error:
        Engine(with_head, max_len=256, device="cpu", dtype=torch.float32)
    assert str(error.value).startswith(f"model: {with_head} has mtp.fc.bias, mtp.fc.weight, mtp.layers.0.")


def test_prefix_without_tensors_is_refused(with_head: Path) -> None:
    with pytest.raises(ValueError) as error:
        engine_of(with_head, HeadCheckpoint(with_head, "nextn."))
    assert str(error.value) == (f"EAGLE head: {with_head} has no tensor under 'nextn.', expected the head's there")


def test_tensors_under_a_prefix_are_named_as_in_the_folder(tmp_path: Path) -> None:
    tensors = random_tensors(bias=False, wide=WIDE)
    del tensors["layers.0.mlp.up_proj.weight"]
    folder = write_target_with_head(tmp_path / "target", tensors, PREFIX)
    with pytest.raises(ValueError) as error:
        engine_of(folder, HeadCheckpoint(folder, PREFIX))
    assert (
        str(error.value)
        == f"EAGLE head: {folder} lacks mtp.layers.0.mlp.up_proj.weight, expected every tensor of the head and no other"
    )


def nested(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write as vLLM does: the layers' config is within `model`."""
    write_head(folder, tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "eagle", "model": CONFIG}))


def first_speculators(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write as the first versions of speculators did."""
    names = {name: name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.") for name in tensors}
    write_head(folder, {names[name]: tensor for name, tensor in tensors.items()})
    config = {"speculators_model_type": "eagle", "transformer_layer_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("write", [nested, first_speculators])
def test_head_in_an_older_format_drafts_as_in_the_common_one(write: Any, tmp_path: Path) -> None:
    tensors = random_tensors(bias=True)
    with engine_of(tiny_model("target"), write_head(tmp_path / "head", tensors)) as engine:
        expected = texts_and_rounds(engine)
    write(tmp_path / "other", tensors)
    with engine_of(tiny_model("target"), tmp_path / "other") as engine:
        assert texts_and_rounds(engine) == expected


def test_missing_tensor_of_an_older_format_has_the_folder_s_name(tmp_path: Path) -> None:
    tensors = random_tensors(bias=False)
    del tensors["layers.0.mlp.up_proj.weight"]
    first_speculators(tmp_path / "head", tensors)
    with pytest.raises(ValueError) as error:
        engine_of(tiny_model("target"), tmp_path / "head")
    assert (
        str(error.value)
        == f"EAGLE head: {tmp_path / 'head'} lacks transformer.mlp.up_proj.weight, expected every tensor of the head and no other"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_head_with_quantized_elements_is_refused(dtype: Any, tmp_path: Path) -> None:
    tensors = random_tensors(bias=False)
    tensors["lm_head.weight"] = torch.ones(2048, 256, dtype=dtype)
    folder = write_head(tmp_path / "head", tensors)
    with pytest.raises(ValueError) as error:
        engine_of(tiny_model("target"), folder)
    assert str(error.value) == (
        f"EAGLE head: {folder} has lm_head.weight of {dtype}, expected one of torch.float32, torch.float16, "
        "torch.bfloat16 (heads are not dequantized)"
    )
