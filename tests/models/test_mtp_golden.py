"""MTP layers against what vLLM's modules draft, at depths 1 to 3: support/record_mtp.py recorded it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.heads.base import Features
from specdec_kernels.models.heads.mtp import MtpCheckpoint, MtpHead, load_mtp_head
from specdec_kernels.models.heads.mtp_chain import MtpChain, load_mtp_chain
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.mtp_layouts import MtpLayout
from support.drafted_chains import drafted_after
from support.golden_mtp import GOLDEN, SIZES, STEPS, TOKENS

RECORDED = json.loads((Path(__file__).parent / "mtp_golden.json").read_text())["families"]
# vLLM and SGLang apply no final norm to ERNIE's layer, unlike its authors (docs/heads.md).
UNNORMED = {"ernie"}
# What vLLM does otherwise than SGLang and transformers, which we follow.
VLLM_ALONE: dict[str, dict[str, Any]] = {
    "ernie": {"passes_normed_state": False},
    "deepseek_v3": {"zeroes_first_embedding": True},
    "hy_v3": {"zeroes_first_embedding": True},
    "glm4_moe_lite": {"passes_normed_state": False, "zeroes_first_embedding": True},
}


def write_checkpoint(folder: Path, name: str) -> Path:
    """Write a target whose own layers are any, next to the recorded tensors."""
    case = GOLDEN[name]
    if case.model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {case.model_type}")
    config = AutoConfig.for_model(case.model_type, **(SIZES | case.config))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | case.tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.is_chain:  # transformers saves no entries of the MTP layers
        (folder / "config.json").write_text(json.dumps(SIZES | case.config | {"model_type": case.model_type}))
    return folder


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@torch.inference_mode()
def drafted(head: MtpHead, states: Tensor, unnormed: bool) -> Tensor:
    """Return log-probabilities [STEPS, V] of the chain after TOKENS."""
    table, rows = torch.arange(8, dtype=torch.int32)[None], len(TOKENS) - 1
    tokens, positions = int32([TOKENS[1:]]), int32([range(rows)])
    batch, features = PagedBatch(int32([0]), table, int32([0]), tail_len=rows), head.join(states[:-1])
    logprobs = list[Tensor]()
    for step in range(STEPS):
        hidden, normed = head(tokens, Features(features), positions, batch, only=torch.tensor([tokens.shape[1] - 1]))
        logprobs.append(head.logits(hidden if unnormed else normed)[0].log_softmax(-1))
        tokens, positions, features = int32([[int(logprobs[-1].argmax())]]), int32([[rows + step]]), hidden
        batch = PagedBatch(int32([0]), table, int32([rows + step]), tail_len=1)
    return torch.stack(logprobs)


@torch.inference_mode()
def drafted_by_chain(chain: MtpChain, states: Tensor) -> Tensor:
    """Return log-probabilities [STEPS, V] of the chain after TOKENS, by a layer for each."""
    table, rows = torch.arange(8, dtype=torch.int32)[None], len(TOKENS) - 1
    batch = PagedBatch(int32([0]), table, int32([0]), tail_len=rows, num_valid=int32([rows]))
    features, last = Features(chain.join(states[:-1])), torch.tensor([rows - 1])
    output = chain(int32([TOKENS[1:]]), features, int32([range(rows)]), batch, only=last)
    return drafted_after(chain, output, rows, table)[1].log_softmax(-1)


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-3)


# Wrong readings of a layout, and the depth from which on each changes what is drafted.
WRONG: dict[str, tuple[int, Callable[[MtpLayout], dict[str, Any]]]] = {
    "order": (0, lambda layout: {"state_first": not layout.state_first}),
    "norms": (0, lambda layout: {"embedding_norm": layout.state_norm, "state_norm": layout.embedding_norm}),
    "first embedding": (0, lambda layout: {"zeroes_first_embedding": not layout.zeroes_first_embedding}),
    "target's state": (0, lambda layout: {"reads_normed_state": not layout.reads_normed_state}),
    "layer's state": (1, lambda layout: {"passes_normed_state": not layout.passes_normed_state}),
}

# Row 0 is within the windows of all layers together, and not of fewer.
DEPTHS = {("step3p5", "first embedding"): STEPS - 1}


@pytest.mark.parametrize("name", RECORDED)
def test_probabilities_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    folder, case, unnormed = write_checkpoint(tmp_path / "target", name), GOLDEN[name], name in UNNORMED
    options = ModelOptions(
        max_len=64, num_pages=8, page_size=8, dtype=torch.float32, device=torch.device("cpu"), feature_layers=(2,)
    )
    target, checkpoint = CausalLM(folder, options), MtpCheckpoint.open(folder)
    right = replace(checkpoint.layout, **VLLM_ALONE.get(name, {}))
    theirs = torch.tensor(RECORDED[name]["logprobs"])

    def ours(layout: MtpLayout) -> Tensor:
        source = replace(checkpoint, layout=layout)
        if case.is_chain:
            chain = load_mtp_chain([source.layer(index) for index in range(STEPS)], target, num_pages=8, page_size=8)
            return drafted_by_chain(chain, case.states)
        head = load_mtp_head(source, target, num_pages=8, page_size=8)
        return drafted(head, case.states, unnormed)

    torch.testing.assert_close(ours(right), theirs, rtol=0, atol=1e-3)
    assert theirs.argmax(-1).tolist() == RECORDED[name]["drafted"]
    for wrong, (first, change) in WRONG.items():
        depth = 0 if unnormed else DEPTHS.get((name, wrong), first)
        others = ours(replace(right, **change(right)))
        agreeing = [is_close(mine, other) for mine, other in zip(others, theirs, strict=True)]
        assert agreeing[:depth] == [True] * depth and not agreeing[depth], wrong
