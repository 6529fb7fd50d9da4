"""Draft heads packed in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_kernels.models.weights.packed_heads import pack_head, unpack_head

CONFIG = {"vocab_size": 40, "hidden_size": 8}


def tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {"fc.weight": torch.randn(6, 8, generator=rng), "norm.weight": torch.randn(8, generator=rng)}


def test_a_packed_head_unpacks_within_the_rounding_of_8_bits(tmp_path: Path) -> None:
    kept = torch.tensor([1, 5, 6, 39])
    head, lm_head = tensors(), torch.arange(320.0).view(40, 8)
    head["fc.weight"][2] = 0  # a row without a scale of its own
    pack_head(CONFIG, head, kept, tmp_path / "head.safetensors")
    unpack_head(tmp_path / "head.safetensors", lm_head, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    half_a_step = head["fc.weight"].abs().amax(1, keepdim=True) / 254
    assert bool(((found["fc.weight"] - head["fc.weight"]).abs() <= half_a_step * 1.001).all())
    assert torch.equal(found["norm.weight"], head["norm.weight"])
    assert torch.equal(found["lm_head.weight"], lm_head[kept])
    assert (torch.arange(4) + found["d2t"]).tolist() == kept.tolist()
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG | {"torch_dtype": "float32"}


def test_what_cannot_be_packed_is_refused_by_name(tmp_path: Path) -> None:
    kept, file = torch.tensor([1, 5]), tmp_path / "head.safetensors"
    with pytest.raises(ValueError, match="the ids of a draft vocabulary must increase"):
        pack_head(CONFIG, tensors(), torch.tensor([5, 5]), file)
    for name in ("lm_head.weight", "d2t", "fc.weight.scales"):
        with pytest.raises(ValueError, match=f"{name} is not a tensor of a packed head"):
            pack_head(CONFIG, {name: torch.ones(2, 8)}, kept, file)
    for tensor in (torch.ones(2, 2, 2), torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match=r"fc\.weight is not a finite vector or matrix"):
            pack_head(CONFIG, {"fc.weight": tensor}, kept, file)
    assert not file.exists()


def test_a_packed_head_of_another_target_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    pack_head(CONFIG, tensors(), torch.tensor([1, 5]), file)
    with pytest.raises(ValueError, match=r"belongs to a target with an LM head \[40, 8\], not \[40, 16\]"):
        unpack_head(file, torch.ones(40, 16), tmp_path)
    save_file(tensors(), file)
    with pytest.raises(ValueError, match="is not a packed head"):
        unpack_head(file, torch.ones(40, 8), tmp_path)
