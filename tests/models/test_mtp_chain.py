"""Chains of MTP layers against their published formula, written out in plain torch, and transformers' `MtpModel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_layers

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.heads.base import Features, HeadOutput
from specdec_kernels.models.heads.mtp import MtpCheckpoint
from specdec_kernels.models.heads.mtp_chain import MtpChain, load_mtp_chain
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.weights.mtp_layouts import find_layout
from support.drafted_chains import drafted_after
from support.mtp_checkpoints import NUM_LAYERS, ChainReference, write_target_with_chain
from support.step_cases import StepReference, write_step

TEXT, LAYERS = [17, 3, 101, 44, 3, 9, 76, 150, 12], 3
ROWS, TABLE = len(TEXT) - 1, torch.arange(8, dtype=torch.int32)[None]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_with_chain(tmp_path_factory.mktemp("chain") / "target", LAYERS)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(tmp_path_factory.mktemp("step") / "target", LAYERS)


def target_of(folder: Path) -> CausalLM:
    options = ModelOptions(
        max_len=64, num_pages=8, page_size=4, dtype=torch.float32, device=torch.device("cpu"),
        feature_layers=(NUM_LAYERS,),
    )  # fmt: skip
    return CausalLM(folder, options)


def chain_of(folder: Path, target: CausalLM, num_layers: int, **changes: Any) -> MtpChain:
    """Return the chain of a folder, read with these changes of its layout."""
    checkpoint = MtpCheckpoint.open(folder)
    checkpoint = replace(checkpoint, layout=replace(checkpoint.layout, **changes))
    layers = [checkpoint.layer(index) for index in range(num_layers)]
    return load_mtp_chain(layers, target, num_pages=8, page_size=4)


def committed(chain: MtpChain, target: CausalLM, pieces: list[int]) -> HeadOutput:
    """Commit the rows of TEXT in pieces, and return the output at the last one."""
    length, table = len(TEXT), TABLE
    rows = PagedBatch(int32([0]), table, int32([0]), tail_len=length)
    features = target.forward(int32([TEXT]), int32([list(range(length))]), rows).features
    assert features is not None
    joined, start = chain.join(features[0].contiguous()), 0
    for count in pieces:
        # One row more than is valid, as other requests of a batch may have.
        tokens, positions = int32([[*TEXT[start + 1 : start + count + 1], 0]]), int32([range(start, start + count + 1)])
        of_piece = PagedBatch(int32([0]), table, int32([start]), tail_len=count + 1, num_valid=int32([count]))
        states = Features(joined[start : start + count + 1])
        hidden, normed = chain(tokens, states, positions, of_piece, only=torch.tensor([count - 1]))
        start += count
    assert start == length - 1
    return HeadOutput(hidden, normed)


@torch.inference_mode()
def drafted(chain: MtpChain, target: CausalLM, pieces: list[int]) -> tuple[list[int], Tensor]:
    """Return the chain after TEXT, whose rows are committed in pieces, with its logits."""
    return drafted_after(chain, committed(chain, target, pieces), ROWS, TABLE)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=1e-3)


@pytest.fixture(scope="module", params=["glm4_moe", "step3p5"])
def case(request: pytest.FixtureRequest, folder: Path, step: Path) -> tuple[Path, ChainReference | StepReference]:
    is_step = request.param == "step3p5"
    return (step, StepReference(step, LAYERS)) if is_step else (folder, ChainReference(folder, LAYERS))


@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize("pieces", [[8], [1, 1, 1, 5], [2, 6], [3, 3, 1, 1]], ids=str)
def test_probabilities_are_those_of_the_published_formula(
    case: tuple[Path, ChainReference | StepReference], num_layers: int, pieces: list[int]
) -> None:
    folder, reference = case
    target = target_of(folder)
    ids, logits = drafted(chain_of(folder, target, num_layers), target, pieces)
    expected, theirs = reference.chain(TEXT, num_layers)
    assert ids == expected
    close(logits, theirs)


# Wrong readings of Step-3.5's layers, and the depth from which on each changes what they draft.
WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "order": (0, {"state_first": True}),
    "norms": (0, {"embedding_norm": "hnorm", "state_norm": "enorm"}),
    "target's state": (0, {"reads_normed_state": True}),
    "layer's state": (1, {"passes_normed_state": True}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_readings_change_the_probabilities(wrong: str, step: Path) -> None:
    target, (first, changes) = target_of(step), WRONG[wrong]
    right, other = (drafted(chain_of(step, target, LAYERS, **each), target, [8])[1] for each in ({}, changes))
    close(other[:first], right[:first])
    for depth in range(first, LAYERS):
        with pytest.raises(AssertionError):
            close(other[depth], right[depth])


@torch.inference_mode()
def test_nodes_of_a_tree_have_the_probabilities_of_their_paths(
    case: tuple[Path, ChainReference | StepReference],
) -> None:
    folder, reference = case
    target = target_of(folder)
    chain = chain_of(folder, target, LAYERS)
    hidden, _ = committed(chain, target, [8])
    rows = PagedBatch(int32([0]), TABLE, int32([ROWS]), tail_len=2, mask=torch.tensor([[[0b1], [0b10]]]))
    parents = Features(hidden, int32([0, 0]))  # the root's
    logits, hidden = chain.step(1, int32([[20, 30]]), int32([[ROWS, ROWS]]), parents, rows)
    for row, path in enumerate([[20], [30]]):
        close(logits[row], reference.chain(TEXT, 2, path)[1][-1])
    # Nodes 40 and 50 of depth 2 are children of 30 and 20.
    rows = rows._replace(tail_len=4, row_offset=2, mask=torch.tensor([[[0b0110], [0b1001]]]))
    parents = Features(hidden, int32([1, 0]))
    logits, _ = chain.step(2, int32([[40, 50]]), int32([[ROWS + 1, ROWS + 1]]), parents, rows)
    for row, path in enumerate([[30, 40], [20, 50]]):
        close(logits[row], reference.chain(TEXT, 3, path)[1][-1])


@pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"), reason="transformers before 5.24"
)
@torch.inference_mode()
def test_probabilities_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ChainReference(folder, LAYERS).target
    reference._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS + i}.*" for i in range(LAYERS)]
    model: Any = modeling_layers
    theirs = model.MtpModel.from_pretrained(reference).eval()
    states = reference.model(torch.tensor([TEXT])).last_hidden_state[:, :-1]
    tokens, positions = torch.tensor([TEXT[1:]]), torch.arange(1, len(TEXT))[None]
    target = target_of(folder)
    ids, logits = drafted(chain_of(folder, target, LAYERS), target, [8])
    for layer in range(LAYERS):
        states = theirs.forward_layer(layer, states, positions, None, input_ids=tokens)
        own = ChainReference(folder, LAYERS).layers[layer].head  # transformers has the target's alone
        close(logits[layer], own @ states[0, -1])
        tokens, positions = torch.cat([tokens[:, 1:], torch.tensor([[ids[layer]]])], 1), positions + 1


def test_a_chain_with_a_gap_is_refused_by_name() -> None:
    names = [f"model.layers.{layer}.{name}.weight" for layer in (2, 4) for name in ("eh_proj", "hnorm")]
    with pytest.raises(ValueError) as error:
        find_layout(names, 2, "target")
    assert str(error.value) == "target has MTP layers 2, 4, expected one after another from 2 on"
