"""MTP layers against their published formula, written out in plain torch, and against transformers' `MtpModel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.heads.base import Features
from specdec_kernels.models.heads.mtp import MtpCheckpoint, MtpHead, load_mtp_head
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.mtp_layouts import HY_V3, MIMO, NEXTN, QWEN, STEP, find_layout
from support.exhaustive import exhaustive, thinned
from support.mtp_checkpoints import CASES, NUM_LAYERS, Reference, write_nemotron_with_mtp, write_target_with_mtp
from support.quantized_checkpoints import quantize

END = ", expected every tensor of the layer and no other"
TEXT, STEPS = [17, 3, 101, 44, 3, 9, 76, 150, 12], 3


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def target_of(folder: Path) -> CausalLM:
    options = ModelOptions(
        max_len=64, num_pages=8, page_size=8, dtype=torch.float32, device=torch.device("cpu"),
        feature_layers=(NUM_LAYERS,),
    )  # fmt: skip
    return CausalLM(folder, options)


def head_of(folder: Path, target: CausalLM, **changes: Any) -> MtpHead:
    checkpoint = MtpCheckpoint.open(folder)
    layout = replace(checkpoint.layout, **changes)
    return load_mtp_head(replace(checkpoint, layout=layout), target, num_pages=8, page_size=8)


@torch.inference_mode()
def drafted(head: MtpHead, target: CausalLM) -> tuple[list[int], Tensor]:
    """Return the chain that the head drafts after TEXT, with its logits [STEPS, V]."""
    length, table = len(TEXT), torch.arange(8, dtype=torch.int32)[None]
    rows = PagedBatch(int32([0]), table, int32([0]), tail_len=length)
    features = target.forward(int32([TEXT]), int32([list(range(length))]), rows).features
    assert features is not None
    committed = PagedBatch(int32([0]), table, int32([0]), tail_len=length - 1)
    joined = Features(head.join(features[0, :-1].contiguous()))
    positions = int32([list(range(length - 1))])
    hidden, normed = head(int32([TEXT[1:]]), joined, positions, committed, only=torch.tensor([length - 2]))
    chain, logits = [], []
    for step in range(STEPS):
        logits.append(head.logits(normed)[0])
        chain.append(int(logits[-1].argmax()))
        row = PagedBatch(int32([0]), table, int32([length - 1 + step]), tail_len=1)
        hidden, normed = head(int32([[chain[-1]]]), Features(hidden), int32([[length - 1 + step]]), row, depth=step + 1)
    return chain, torch.stack(logits)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Compare log-probabilities of a chain in float32: rounding, which differs between CPUs, grows with its depth."""
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=4e-3)


@pytest.fixture(params=thinned(CASES, lambda name: name not in ("glm4_moe_lite", "hy_v3")))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name: str = request.param
    return name, write_target_with_mtp(tmp_path / "target", name)


# Wrong readings of a layout. Each must change the chain's probabilities in every layout.
WRONG = {
    "order": lambda layout: {"state_first": not layout.state_first},
    "norms": lambda layout: {"embedding_norm": layout.state_norm, "state_norm": layout.embedding_norm},
    "first embedding": lambda layout: {"zeroes_first_embedding": not layout.zeroes_first_embedding},
}


def test_probabilities_are_those_of_the_published_formula(case: tuple[str, Path]) -> None:
    name, folder = case
    target = target_of(folder)
    chain, logits = drafted(head_of(folder, target), target)
    expected, theirs = Reference(folder, name).chain(TEXT, STEPS)
    assert chain == expected
    close(logits, theirs)
    layout = MtpCheckpoint.open(folder).layout
    for change in WRONG.values():
        with pytest.raises(AssertionError):
            close(drafted(head_of(folder, target, **change(layout)), target)[1], theirs)


def test_wrong_state_changes_the_probabilities(case: tuple[str, Path]) -> None:
    name, folder = case
    target = target_of(folder)
    _, theirs = Reference(folder, name).chain(TEXT, STEPS)
    before_norm = drafted(head_of(folder, target, passes_normed_state=False), target)[1]
    close(before_norm[:1], theirs[:1])  # the first step reads the target's state
    with pytest.raises(AssertionError):
        close(before_norm[1:], theirs[1:])
    with pytest.raises(AssertionError):
        close(drafted(head_of(folder, target, reads_normed_state=False), target)[1][:1], theirs[:1])


@pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"), reason="transformers before 5.24"
)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_probabilities_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_target_with_mtp(tmp_path / "target", name)
    reference = Reference(folder, name).target
    # Its patterns of keys name the layers of the published checkpoints.
    monkeypatch.setattr(reference, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{NUM_LAYERS}.*"])
    model: Any = modeling_layers
    theirs = model.MtpModel.from_pretrained(reference).eval()
    target = target_of(folder)
    chain, logits = drafted(head_of(folder, target), target)
    tokens = TEXT[1:]
    states = reference.model(torch.tensor([TEXT])).last_hidden_state[:, :-1]
    for step in range(STEPS):
        positions = torch.arange(len(tokens))[None]
        out = theirs.forward_layer(0, states, positions, None, input_ids=torch.tensor([tokens]))
        close(logits[step], reference.lm_head(out[0, -1]))
        tokens, states = [*tokens, chain[step]], torch.cat([states, out[:, -1:]], 1)


def test_embedding_and_head_that_differ_from_the_target_s_are_the_layer_s_own(tmp_path: Path) -> None:
    plain = write_target_with_mtp(tmp_path / "plain", "glm4_moe")
    target = target_of(plain)
    shared = head_of(plain, target)
    assert shared.lm.get_input_embeddings() is target.embedding and shared.lm.lm_head is target.lm_head
    tensors = load_file(plain / "model.safetensors")
    names = [f"model.layers.{NUM_LAYERS}.{module}.weight" for module in ("embed_tokens", "shared_head.head")]
    others = {name: torch.randn(tensors[name].shape) / 4 for name in names}
    folder = write_target_with_mtp(tmp_path / "own", "glm4_moe", **others)
    target = target_of(folder)
    chain, logits = drafted(head_of(folder, target), target)
    expected, theirs = Reference(folder, "glm4_moe").chain(TEXT, STEPS)
    assert chain == expected
    close(logits, theirs)


@pytest.mark.parametrize("name", ["fp8 blocks", *exhaustive("fp8 rows", "fp8 static")])
def test_layer_of_8_bits_drafts_as_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    folders = [write_target_with_mtp(tmp_path / which, "deepseek_v3") for which in ("plain", "quantized")]
    target = target_of(folders[0])
    layer = rf"model\.layers\.{NUM_LAYERS}\..*_proj(_with_mqa)?\.weight"
    means = quantize(folders[1], name, layer)
    chain, logits = drafted(head_of(folders[1], target), target)
    save_file(
        {key: tensor.contiguous() for key, tensor in means.items()}, folders[0] / "model.safetensors", {"format": "pt"}
    )
    expected, theirs = drafted(head_of(folders[0], target), target)
    assert chain == expected
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-4)  # 2e-5 on some CPUs, at logits up to 16
    rewrite(folders[1], lambda tensors: {key: t for key, t in tensors.items() if "q_b_proj.weight_scale" not in key})
    with pytest.raises(ValueError, match=r"has model\.layers\.2\.self_attn\.q_b_proj\.weight of torch\.float8_e4m3fn"):
        head_of(folders[1], target)


def test_head_drafts_among_some_tokens(tmp_path: Path) -> None:
    """The rows of its logits are those of the whole head at these tokens."""
    folder = write_target_with_mtp(tmp_path / "target", "glm4_moe")
    target = target_of(folder)
    whole = drafted(head_of(folder, target), target)[1][0]
    head, ids = head_of(folder, target), list(range(3, 90, 2))
    head.draft_among(ids)
    assert head.id_map.tolist() == ids
    torch.testing.assert_close(drafted(head, target)[1][0], whole[ids])


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {key: t for key, t in tensors.items() if not key.startswith("mtp.")},
            "has no MTP layer under 'model.layers.2.', 'model.mtp_layers.', 'model.mtp_' or 'mtp.', expected one "
            "(some exporters and quantizers drop these tensors)",
        ),
        (
            lambda tensors: {key: t for key, t in tensors.items() if "mtp.layers.0.mlp.up" not in key},
            f"lacks mtp.layers.0.mlp.up_proj.weight{END}",
        ),
        (
            lambda tensors: {key: t for key, t in tensors.items() if key != "mtp.fc.weight"},
            f"lacks mtp.fc.weight{END}",
        ),
        (
            lambda tensors: {key: t for key, t in tensors.items() if key != "mtp.pre_fc_norm_hidden.weight"},
            f"lacks mtp.pre_fc_norm_hidden.weight{END}",
        ),
        (
            lambda tensors: tensors | {"mtp.pre_fc_norm_hidden.weight": torch.ones(7)},
            f"has mtp.pre_fc_norm_hidden.weight of shape [7], expected [96]{END}",
        ),
        (
            lambda tensors: tensors | {"mtp.embed_tokens.weight": torch.ones(7, 96)},
            f"has mtp.embed_tokens.weight of shape [7, 96], expected [199, 96]{END}",
        ),
        (
            lambda tensors: tensors | {"mtp.lm_head.weight": torch.ones(199)},
            f"has mtp.lm_head.weight of shape [199], expected [199, 96]{END}",
        ),
        (
            lambda tensors: tensors | {"mtp.gate.weight": torch.ones(7), "mtp.layers.0.x": torch.ones(1)},
            f"has mtp.layers.0.x, mtp.gate.weight, unknown to MtpHead{END}",
        ),
        (
            lambda tensors: tensors | {"mtp.layers.1.mlp.up_proj.weight": torch.ones(7)},
            "has MTP layers 0, 1, expected one alone (a chain of this layout is not supported)",
        ),
        (
            lambda tensors: tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)},
            "has mtp.fc.weight of torch.float8_e4m3fn, expected one of torch.float32, torch.float16, torch.bfloat16, "
            "or FP8 with scales",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_target_with_mtp(tmp_path / "target", "qwen3_next")
    target = target_of(folder)
    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        head_of(folder, target)
    assert str(error.value) == f"MTP head: {folder} {message}"


def test_missing_projection_of_a_numbered_layer_is_refused_by_name(tmp_path: Path) -> None:
    name = "mtp.layers.0.eh_proj.weight"
    write_nemotron_with_mtp(tmp_path / "target")
    rewrite(tmp_path / "target", lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError) as error:
        MtpCheckpoint.open(tmp_path / "target")
    assert str(error.value) == f"MTP head: {tmp_path / 'target'} lacks {name}{END}"


def test_experts_that_do_not_fit_each_other_are_refused_by_name(tmp_path: Path) -> None:
    folder, name = write_target_with_mtp(tmp_path / "target", "glm4_moe"), "model.layers.2.mlp.experts.3.up_proj.weight"
    target, whole = target_of(folder), load_file(folder / "model.safetensors")
    others = {key: tensor for key, tensor in whole.items() if key != name}
    for tensors, why in (
        (others | {name: whole[name][:5].clone()}, f"has {name} of shape [5, 96] (other experts: [64, 96])"),
        (others, f"lacks {name}"),
    ):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError) as error:
            head_of(folder, target)
        assert str(error.value) == f"MTP head: {folder} {why}{END}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.mtp.layers.0.eh_proj.weight", "MiMo-V2's MTP layers"),
        ("model.mtp.layers.0.enorm.m.weight", "LongCat-Flash's MTP layer"),
        ("model.mtp_layers.0.eh_proj.weight", "HY-V4's MTP layers"),
        ("mtp.0.main_proj.weight", "a DSpark drafter"),
    ],
)
def test_layouts_that_are_not_computed_are_refused_by_name(name: str, kind: str) -> None:
    others = {"model.layers.2.enorm.weight", "model.layers.2.hnorm.weight", "mtp.fc.weight", "model.norm.weight"}
    with pytest.raises(ValueError) as error:
        find_layout(others | {name}, 2, "target")
    assert str(error.value) == f"target has {name} of {kind}, expected another layout (not supported)"


@pytest.mark.parametrize("layout", [NEXTN, HY_V3, STEP, MIMO, QWEN], ids=["nextn", "hy_v3", "step", "mimo", "qwen"])
def test_names_of_a_layout_translate_back(layout: Any) -> None:
    for key in (*layout.modules, f"{layout.block}.mlp.up_proj".lstrip(".")):
        assert layout.stored_name(layout.own_name(f"{key}.weight")) == f"{key}.weight"


@torch.inference_mode()
def test_nemotron_layers_of_one_part_each_are_those_of_the_published_formula(tmp_path: Path) -> None:
    """The MTP layer is attention and experts, with norms of their own; the projection is named like a part of them."""
    folder = tmp_path / "target"
    layers, parts = write_nemotron_with_mtp(folder)
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = target_of(folder)
    chain, logits = drafted(head_of(folder, target), target)

    def norm(name: str, x: Tensor) -> Tensor:
        eps = module.config.layer_norm_epsilon
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * parts[f"mtp.layers.{name}.weight"]

    tokens, states = TEXT[1:], module.model(torch.tensor([TEXT])).last_hidden_state[0, :-1]
    for step in range(STEPS):
        embedded = module.get_input_embeddings().weight[tokens]
        pairs = torch.cat([norm("0.enorm", embedded), norm("0.hnorm", states)], -1)
        x = (pairs @ parts["mtp.layers.0.eh_proj.weight"].T)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        for layer in layers:
            x = layer(x, attention_mask=mask)
        state = norm("1.final_layernorm", x[0])[-1]
        close(logits[step], module.lm_head(state))
        tokens, states = [*tokens, chain[step]], torch.cat([states, state[None]])
