"""tree_conv1d and commit_conv1d against a plain convolution along every path, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from support.devices import TOLERANCES
from support.recurrent_layers import INT, no_paths, offsets, on, path_to, random_tree

STALLED, BAD_TREE, BAD_LENGTH = (int(sd.Status[name]) for name in ("STALLED", "BAD_TREE", "BAD_LENGTH"))


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT)


def convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the output [C] after the last of the inputs [n, C], in float64; inputs before the first are zeros."""
    taps = weight.shape[1]
    padded = torch.cat([torch.zeros(taps, inputs.shape[1]), inputs.double()])[-taps:]
    out = (padded * weight.T.double()).sum(0) + (0 if bias is None else bias.double())
    return out * out.sigmoid() if silu else out


class Model:
    """One convolution with slots on a device."""

    def __init__(
        self, device: torch.device, channels: int, taps: int, num_slots: int, dtype: torch.dtype = torch.float32,
        max_nodes: int = 16, bias: bool = True, silu: bool = True,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.silu = device, dtype, silu
        self.weight = torch.randn(channels, taps).to(dtype)
        self.bias = torch.randn(channels).to(dtype) if bias else None
        self.window = torch.randn(num_slots, taps - 1, channels).to(device, dtype)
        self.records = torch.full((2, num_slots, max_nodes, channels), torch.nan, dtype=dtype, device=device)
        self.paths = on(device, no_paths(num_slots, max_nodes))
        self.prefix_lens = torch.ones(num_slots, dtype=INT, device=device)
        self.status = torch.zeros(num_slots, dtype=INT, device=device)

    def inputs(self, rows: int) -> Tensor:
        return torch.randn(rows, len(self.weight)).to(self.dtype)

    def run(self, x: Tensor, ends: Tensor, slots: Tensor | None, mask: Tensor | None = None) -> Tensor:
        out = torch.full_like(x, torch.nan, device=self.device)
        x, weight, bias, ends, mask, slots = on(self.device, (x, self.weight, self.bias, ends, mask, slots))
        return sd.tree_conv1d(
            x, weight, bias, self.window, self.records, self.paths, self.prefix_lens, ends, mask=mask, slots=slots,
            activation="silu" if self.silu else None, out=out, status=self.status,
        )  # fmt: skip

    def accept(self, paths: list[list[int]], slots: Tensor | None) -> None:
        width = self.paths.nodes.shape[1]
        path = ints([path + [-7] * (width - len(path)) for path in paths])
        counts, slots = ints([len(path) for path in paths]), on(self.device, slots)
        sd.set_pending_paths(self.paths, *on(self.device, (path, counts)), slots=slots)

    def assert_output(self, got: Tensor, inputs: Tensor) -> None:
        want = convolved(inputs, self.weight, self.bias, self.silu)
        tolerance = 4 * TOLERANCES[self.dtype] * max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("taps", "channels"), [(2, 1), (3, 70), (4, 257), (4, 264), (5, 8), (8, 33)])
def test_tree_conv1d_of_packed_trees_matches_plain_convolution(
    device: torch.device, dtype: torch.dtype, taps: int, channels: int
) -> None:
    counts, slots = (9, 0, 64, 1, 17), ints([3, 0, 5, 1, 2])
    model = Model(device, channels, taps, 6, dtype, max_nodes=64, bias=taps != 3, silu=taps != 5)
    window = model.window.cpu().clone()
    parents, masks = zip(*(random_tree(count) for count in counts), strict=True)
    x = model.inputs(sum(counts) + 2)
    out = model.run(x, offsets(*counts), slots, torch.cat([*masks, torch.full((2, 1), -1, dtype=torch.int64)]))
    assert (out[-2:] == 0).all() and (model.status == 0).all()
    assert torch.equal(model.window.cpu(), window)
    first = 0
    for count, slot, tree in zip(counts, slots.tolist(), parents, strict=True):
        own = x[first : first + count]
        for i in range(count):
            model.assert_output(out[first + i], torch.cat([window[slot], own[path_to(tree, i)]]))
        assert torch.equal(model.records[1, slot, :count].cpu(), own)
        first += count


@pytest.mark.parametrize("taps", [2, 4, 8])
def test_tree_conv1d_folds_any_accepted_path(device: torch.device, taps: int) -> None:
    parents, mask = random_tree(12)
    model = Model(device, 20, taps, 12)
    before, x = model.window.cpu().clone(), model.inputs(12)
    model.run(x.repeat(12, 1), offsets(*[12] * 12), None, mask.repeat(12, 1))
    model.accept([path_to(parents, i) for i in range(12)], None)
    committed = model.window.clone()
    sd.commit_conv1d(committed, model.records, model.paths)
    root = model.inputs(12)
    out = model.run(root, offsets(*[1] * 12), None, torch.ones(12, 1, dtype=torch.int64))
    for i in range(12):
        text = torch.cat([before[i], x[path_to(parents, i)]])
        assert torch.equal(committed[i].cpu(), text[-(taps - 1) :])
        assert torch.equal(model.window[i].cpu(), text[-(taps - 1) :])
        model.assert_output(out[i], torch.cat([text, root[i : i + 1]]))


@pytest.mark.parametrize("taps", [2, 3, 4, 8])
@pytest.mark.parametrize("cuts", [(40,), (1, 2, 3, 34), (20, 20)], ids=str)
def test_tree_conv1d_of_a_chain_does_not_depend_on_how_it_is_cut(
    device: torch.device, taps: int, cuts: tuple[int, ...]
) -> None:
    model = Model(device, 40, taps, 2)
    model.window.fill_(torch.nan)
    model.prefix_lens.zero_()
    x, first = model.inputs(40), 0
    for count in cuts:
        out = model.run(x[first : first + count], offsets(count), ints([1]))
        for i in range(count):
            model.assert_output(out[i], x[: first + i + 1])
        model.prefix_lens.fill_(7)
        first += count
    assert torch.equal(model.window[1].cpu(), x[-(taps - 1) :])
    assert model.window[0].isnan().all() and model.records.isnan().all()


@pytest.mark.parametrize(("taps", "channels"), [(3, 24), (4, 1032), (8, 5)])
def test_tree_conv1d_of_packed_chains_matches_plain_convolution(device: torch.device, taps: int, channels: int) -> None:
    """Chains of several tiles and of none, one of them after a pending path; rows after the last request are zeros."""
    counts, slots = (70, 0, 1, 33, 2), ints([3, 0, 5, 1, 2])
    model = Model(device, channels, taps, 6, torch.bfloat16)
    _, mask = random_tree(1)
    root = model.inputs(1)
    model.run(root, offsets(1), ints([1]), mask)
    model.accept([[0]], ints([1]))
    model.prefix_lens[5] = 0
    window, x = model.window.cpu().clone(), model.inputs(sum(counts) + 2)
    window[5] = 0
    window[1] = torch.cat([window[1], root])[1:]
    out = model.run(x, offsets(*counts), slots)
    assert (out[-2:] == 0).all() and (model.status == 0).all()
    first = 0
    for count, slot in zip(counts, slots.tolist(), strict=True):
        text = torch.cat([window[slot], x[first : first + count]])
        for i in range(count):
            model.assert_output(out[first + i], text[: taps + i])
        if count > 0:
            assert torch.equal(model.window[slot].cpu(), text[-(taps - 1) :])
        first += count


def test_tree_conv1d_rounds_equal_one_plain_convolution(device: torch.device) -> None:
    """A prompt, then rounds of trees that each accept some path; then a chain that commits the last path."""
    model = Model(device, 24, 4, 2)
    model.window.fill_(torch.nan)
    model.prefix_lens.zero_()
    slots, text = ints([1]), model.inputs(5)
    model.run(text, offsets(5), slots)
    model.accept([[]], slots)
    model.prefix_lens.fill_(5)
    for count in (5, 1, 16, 7):
        parents, mask = random_tree(count)
        x = model.inputs(count)
        out = model.run(x, offsets(count), slots, mask)
        path = path_to(parents, int(torch.randint(count, ())))
        text = torch.cat([text, x[path]])
        model.assert_output(out[path[-1]], text)
        model.accept([path], slots)
    x = model.inputs(2)
    text = torch.cat([text, x])
    model.assert_output(model.run(x, offsets(2), slots)[1], text)
    assert torch.equal(model.window[1].cpu(), text[-3:])


def test_tree_conv1d_takes_strided_rows(device: torch.device) -> None:
    model = Model(device, 16, 4, 1, torch.bfloat16)
    before, (parents, mask) = model.window[0].cpu().clone(), random_tree(6)
    wide = model.inputs(6).repeat(1, 3).to(device)
    out = torch.full_like(wide, torch.nan)
    sd.tree_conv1d(
        wide[:, 16:32], model.weight.to(device), None, model.window, model.records, model.paths, model.prefix_lens,
        offsets(6).to(device), mask=mask.to(device), out=out[:, 5:21],
    )  # fmt: skip
    model.bias, model.silu = None, False
    for i in range(6):
        model.assert_output(out[i, 5:21], torch.cat([before, wide[path_to(parents, i), 16:32].cpu()]))
    assert out[:, :5].isnan().all() and out[:, 21:].isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", [-1, 2**31 - 1, -(2**31)])
def test_tree_conv1d_refuses_a_request_of_bad_data(device: torch.device, wild: int) -> None:
    def refuse(expected: int, **changes: Any) -> None:
        model = Model(device, 6, 4, 2, max_nodes=4)
        model.records.fill_(0.5)
        values: dict[str, Any] = {
            "mask": [1, 3, 7] * 2, "nodes": [[0, 2]] * 2, "num_nodes": [2, 2], "prefix_lens": [4, 4], "slots": [0, 1],
            "status": [0, 0],
        } | changes  # fmt: skip
        paths = sd.PendingPaths(ints(values["nodes"]), ints(values["num_nodes"]), ints([0, 1]))
        model.paths = on(device, paths)
        model.prefix_lens, model.status = (on(device, ints(values[name])) for name in ("prefix_lens", "status"))
        before = model.window.clone()
        mask = torch.tensor(values["mask"], dtype=torch.int64).view(6, 1)
        out = model.run(model.inputs(6), offsets(3, 3), ints(values["slots"]), mask)
        assert model.status.tolist() == [expected, 0]
        assert (out[:3] == 0).all() and not (out[3:] == 0).all()
        assert torch.equal(model.window[0], before[0]) and not torch.equal(model.window[1], before[1])

    refuse(BAD_LENGTH, num_nodes=[wild, 2])
    refuse(BAD_TREE, nodes=[[0, wild], [0, 2]])
    refuse(BAD_TREE, nodes=[[0, 4], [0, 2]])
    refuse(BAD_TREE, mask=[1, 3, 1, 1, 3, 7])
    refuse(BAD_TREE, mask=[1, 3, wild, 1, 3, 7])
    refuse(BAD_LENGTH, prefix_lens=[min(wild, -1), 4])
    refuse(0, slots=[wild, 1])
    refuse(STALLED, status=[STALLED, 0])


def test_commit_conv1d_of_bad_and_stalled_slots_changes_nothing(device: torch.device) -> None:
    model = Model(device, 6, 4, 4, max_nodes=4)
    model.records.fill_(0.5)
    paths = on(device, sd.PendingPaths(ints([[0, 4], [0, 2], [0, 2], [0, 2]]), ints([2, 3, 2, 2]), ints([0] * 4)))
    status, before = on(device, ints([0, 0, STALLED, 0])), model.window.clone()
    sd.commit_conv1d(model.window, model.records, paths, slots=on(device, ints([0, 1, 2, -1])), status=status)
    assert torch.equal(model.window, before)
    assert status.tolist() == [BAD_TREE, BAD_LENGTH, STALLED, 0]


def message(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "x": torch.zeros(5, 6), "weight": torch.zeros(6, 4), "bias": None, "window": torch.zeros(3, 3, 6),
        "records": torch.zeros(2, 3, 4, 6), "paths": no_paths(3, 2), "prefix_lens": torch.zeros(3, dtype=INT),
        "cu_seqlens": offsets(2, 3),
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as error:
        sd.tree_conv1d(**arguments | changes)
    return str(error.value)


def test_tree_conv1d_error_messages() -> None:
    zeros = torch.zeros
    assert message(x=zeros(5, 6, dtype=INT)) == "tree_conv1d: x is int32, expected float32 or float16 or bfloat16"
    assert message(weight=zeros(6, 9), window=zeros(3, 8, 6)) == "tree_conv1d: taps is 9, expected 2 to 8"
    assert message(weight=zeros(6, 1), window=zeros(3, 0, 6)) == "tree_conv1d: taps is 1, expected 2 to 8"
    assert message(window=zeros(3, 3, 6).half()) == "tree_conv1d: window is float16, expected float32"
    assert message(window=zeros(3, 4, 6)) == (
        "tree_conv1d: window has shape [3, 4, 6], expected [num_slots, taps - 1=3, channels=6]"
    )
    assert message(records=zeros(2, 3, 65, 6)) == "tree_conv1d: num_nodes is 65, expected 1 to 64"
    assert message(bias=zeros(5)) == "tree_conv1d: bias has shape [5], expected [channels=6]"
    assert message(activation="gelu") == "tree_conv1d: activation is gelu, expected None or silu"
    assert message(paths=(1, 2)) == "tree_conv1d: paths is a tuple, expected a PendingPaths"
