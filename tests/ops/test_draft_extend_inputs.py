"""draft_extend_inputs against its row-by-row reference."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

WILD = [-1, -(2**31), 2**31 - 1]


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def poisoned(batch: int, width: int, device: torch.device) -> sd.DraftExtendInputs:
    def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -77, dtype=dtype, device=device)

    return sd.DraftExtendInputs(
        tokens=filled(batch, width, dtype=torch.int32),
        positions=filled(batch, width, dtype=torch.int32),
        node_rows=filled(batch, width, dtype=torch.int64),
        last_rows=filled(batch, dtype=torch.int64),
        kept_slots=filled(batch, dtype=torch.int64),
    )


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("batch", "accept_width", "num_nodes"), [(0, 3, 4), (1, 1, 1), (5, 6, 32), (67, 6, 4), (300, 7, 7)]
)
@pytest.mark.parametrize("with_slots", [False, True])
def test_draft_extend_inputs_matches_reference(
    batch: int, accept_width: int, num_nodes: int, with_slots: bool, device: torch.device
) -> None:
    num_slots = batch + 3
    tokens, path = ints(-1, 50000, batch, accept_width), ints(0, num_nodes, batch, accept_width)
    num_valid, lens = ints(0, accept_width + 1, batch), ints(0, 4000, num_slots)
    slots = None
    if with_slots:
        slots = torch.randperm(num_slots)[:batch].int()
        slots[::4] = -1
    arguments = (tokens, path, num_valid, lens)
    want = reference.draft_extend_inputs(*arguments, num_nodes, slots, 1)
    outputs = poisoned(batch, min(accept_width, num_nodes), device)
    got = sd.draft_extend_inputs(
        *(argument.to(device) for argument in arguments),
        num_nodes,
        slots=None if slots is None else slots.to(device),
        position_offset=1,
        out=outputs,
    )
    assert got is outputs
    for name, g, w in zip(want._fields, got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g.cpu(), w), name


@pytest.mark.sanitize
def test_draft_extend_inputs_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    wild = torch.tensor(WILD, dtype=torch.int32)
    tokens, path = torch.stack([wild, wild.flip(0)]), torch.stack([wild, wild])
    got = sd.draft_extend_inputs(
        tokens.to(device),
        path.to(device),
        wild[1:].to(device),
        torch.tensor([5, 9, 13], dtype=torch.int32, device=device),
        4,
        slots=torch.tensor([1, 2**31 - 1], dtype=torch.int32, device=device),
    )
    assert got.tokens.tolist() == [[0, 0, 2**31 - 1], [2**31 - 1, 0, 0]]
    assert got.positions.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert got.node_rows.tolist() == [[0, 0, 3], [4, 4, 7]]
    assert got.last_rows.tolist() == [0, 5]
    assert got.kept_slots.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ints(0, 4, 2, 4)}, "draft_extend_inputs: path has shape [2, 4], expected [batch=2, accept_width=3]"),
        ({"num_nodes": 0}, "draft_extend_inputs: num_nodes is 0, expected 1 to 2147483647"),
        ({"position_offset": -1}, "draft_extend_inputs: position_offset is -1, expected 0 to 2147483647"),
        (
            {"out": poisoned(2, 5, torch.device("cpu")), "num_nodes": 5},
            "draft_extend_inputs: width is 5, expected 1 to 3",
        ),
    ],
)
def test_draft_extend_inputs_error_messages(change: dict[str, object], message: str, device: torch.device) -> None:
    arguments: dict[str, object] = {
        "tokens": ints(0, 9, 2, 3),
        "path": ints(0, 4, 2, 3),
        "num_valid": ints(0, 3, 2),
        "prefix_lens": ints(0, 9, 2),
        "num_nodes": 4,
    } | change
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    if "out" in there:
        there["out"] = sd.DraftExtendInputs(*(x.to(device) for x in arguments["out"]))  # type: ignore[attr-defined]
    with pytest.raises(ValueError) as error:
        sd.draft_extend_inputs(**there)  # type: ignore[arg-type]
    assert str(error.value) == message
