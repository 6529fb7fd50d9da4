"""tree_recurrence and its companions against the plain recurrence along every path, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from support.devices import TOLERANCES
from support.recurrent_layers import (
    INT,
    KINDS,
    Layer,
    Rows,
    along_path,
    no_paths,
    offsets,
    on,
    path_to,
    random_tree,
)

STALLED, BAD_TREE, BAD_LENGTH = (int(sd.Status[name]) for name in ("STALLED", "BAD_TREE", "BAD_LENGTH"))

# Key heads, value heads, key dim, value dim.
SIZES = {
    "odd": (1, 3, 5, 7),
    "grouped": (2, 4, 24, 33),
    "wide": (1, 2, 128, 64),
    "largest": (1, 1, 256, 130),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compare with float64, relative to the largest element; float32 sums of 256 products differ by several units."""
    want = want.double()
    assert got.shape == want.shape
    error = TOLERANCES[dtype] * (10 if dtype == torch.float32 else 1)
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=error * max(float(want.abs().max()), 1.0))


class Model:
    """One layer with slots on a device: runs passes, and makes accepted paths pending as an engine does."""

    def __init__(self, device: torch.device, layer: Layer, num_slots: int, max_nodes: int = 64, **options: Any) -> None:
        self.device, self.layer, self.options = device, layer, options
        self.state = layer.state(num_slots).to(device)
        self.records = on(device, layer.records(num_slots, max_nodes))
        self.paths = on(device, no_paths(num_slots, max_nodes))
        self.prefix_lens = torch.ones(num_slots, dtype=INT, device=device)
        self.status = torch.zeros(num_slots, dtype=INT, device=device)

    def run(self, rows: Rows, ends: Tensor, slots: Tensor | None, mask: Tensor | None = None) -> Tensor:
        out = torch.full_like(rows.v, torch.nan, device=self.device)
        mask, slots, ends = (on(self.device, x) for x in (mask, slots, ends))
        return sd.tree_recurrence(
            *rows.to(self.device), self.state, self.records, self.paths, self.prefix_lens, ends,
            mask=mask, slots=slots, out=out, status=self.status, **self.options,
        )  # fmt: skip

    def accept(self, paths: list[list[int]], slots: Tensor | None) -> None:
        width = self.paths.nodes.shape[1]
        path = ints([path + [2**31 - 1] * (width - len(path)) for path in paths])
        counts = ints([len(path) for path in paths])
        sd.set_pending_paths(self.paths, *on(self.device, (path, counts)), slots=on(self.device, slots))


@every_kind
@pytest.mark.parametrize("size", SIZES)
def test_tree_recurrence_of_packed_trees_matches_plain_recurrence(device: torch.device, kind: str, size: str) -> None:
    """Five requests of other sizes, one of them without rows, in permuted slots; garbage rows follow."""
    layer = Layer(kind, *SIZES[size])
    counts = (9, 0, 40 if size == "largest" else 64, 1, 17)
    slots = ints([3, 0, 5, 1, 2])
    model = Model(device, layer, num_slots=6, max_nodes=counts[2])
    before = model.state.cpu().clone()
    parents, masks = zip(*(random_tree(count) for count in counts), strict=True)
    rows = layer.rows(sum(counts) + 3)
    garbage = torch.full((3, 1), -1, dtype=torch.int64)
    out = model.run(rows, offsets(*counts), slots, torch.cat([*masks, garbage]))
    assert (out[-3:] == 0).all() and (model.status == 0).all()
    assert torch.equal(model.state.cpu(), before), "nothing was pending"
    first = 0
    for count, slot, tree in zip(counts, slots.tolist(), parents, strict=True):
        own = rows.at(slice(first, first + count))
        nodes = range(count) if count < 20 else [0, count // 2, count - 1]
        for i in nodes:
            want, _ = along_path(own, path_to(tree, i), before[slot])
            assert_near(out[first + i], want)
        first += count


@every_kind
def test_tree_recurrence_folds_any_accepted_path(device: torch.device, kind: str) -> None:
    """One slot for each node of a tree accepts the path to it; the next round's root and the commit op see it."""
    layer = Layer(kind, 2, 4, 16, 12)
    parents, mask = random_tree(12)
    model = Model(device, layer, num_slots=12, max_nodes=12)
    before = model.state.cpu().clone()
    rows = layer.rows(12)
    twelve = Rows(*(None if x is None else x.repeat(12, *[1] * (x.ndim - 1)) for x in rows))
    model.run(twelve, offsets(*[12] * 12), None, mask.repeat(12, 1))
    model.accept([path_to(parents, i) for i in range(12)], None)
    committed = model.state.clone()
    sd.commit_recurrence(committed, model.records, model.paths)
    root = layer.rows(12)
    out = model.run(root, offsets(*[1] * 12), None, torch.ones(12, 1, dtype=torch.int64))
    for i in range(12):
        _, state = along_path(rows, path_to(parents, i), before[i])
        assert_near(committed[i], state)
        assert_near(model.state[i], state)
        assert_near(out[i], along_path(root, [i], state)[0])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tree_recurrence_rounds_equal_one_plain_recurrence(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """A prompt, then rounds of trees that each accept some path; then a chain that commits the last path."""
    layer = Layer(kind, 2, 4, 32, 16)
    model = Model(device, layer, num_slots=2, max_nodes=16)
    model.state.fill_(torch.nan)
    model.prefix_lens.zero_()
    slots, text = ints([1]), layer.rows(21, dtype)
    out = model.run(text, offsets(21), slots)
    model.accept([[]], slots)
    model.prefix_lens.fill_(21)
    _, state = along_path(text, list(range(21)), torch.zeros_like(model.state[1].cpu()))
    for count in (5, 1, 16, 7, 12):
        parents, mask = random_tree(count)
        rows = layer.rows(count, dtype)
        out = model.run(rows, offsets(count), slots, mask)
        path = path_to(parents, int(torch.randint(count, ())))
        want, state = along_path(rows, path, state)
        assert_near(out[path[-1]], want, dtype)
        model.accept([path], slots)
    last = layer.rows(3, dtype)
    out = model.run(last, offsets(3), slots)
    want, state = along_path(last, [0, 1, 2], state)
    assert_near(out[2], want, dtype)
    assert_near(model.state[1], state)
    assert model.state[0].isnan().all() and (model.status == 0).all()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 2, 40, 20), (2, 4, 128, 64), (1, 1, 200, 40)], ids=str)
def test_tree_recurrence_of_a_chain_does_not_depend_on_how_it_is_cut(
    device: torch.device, kind: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    layer = Layer(kind, *sizes)
    rows = layer.rows(83, dtype)
    start = want_state = layer.state(1)[0]
    wanted = {}
    for i in range(83):
        wanted[i], want_state = along_path(rows, [i], want_state)
    for cuts in ((83,), (1, 15, 16, 17, 34), (33, 50)):
        model = Model(device, layer, num_slots=1)
        model.state[0] = start
        first = 0
        for count in cuts:
            out = model.run(rows.at(slice(first, first + count)), offsets(count), None)
            for i in (0, count // 2, count - 1):
                assert_near(out[i], wanted[first + i], dtype)
            first += count
        assert_near(model.state[0], want_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tree_recurrence_of_a_chain_normalizes_and_scales(device: torch.device, dtype: torch.dtype) -> None:
    layer = Layer("gated delta", 2, 4, 64, 32)
    rows = layer.rows(37, dtype)
    rows = rows._replace(q=20 * rows.q, k=20 * rows.k)
    model = Model(device, layer, num_slots=1, scale=0.3, l2norm_eps=1e-6)
    before = model.state[0].cpu().clone()
    out = model.run(rows, offsets(37), None)
    want, state = along_path(normalized(rows, 0.3), list(range(37)), before)
    assert_near(out[36], want, dtype)
    assert_near(model.state[0], state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes"), [("gated delta", (1, 2, 40, 20)), ("gated delta", (2, 4, 128, 64)), ("KDA", (1, 1, 24, 8))]
)
def test_tree_recurrence_without_the_delta_rule_weighs_values(
    device: torch.device, kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """A tree, whose longest path becomes pending, then a chain."""
    layer = Layer(kind, *sizes)
    model = Model(device, layer, num_slots=1, max_nodes=12, delta_rule=False)
    state = model.state[0].cpu().clone()
    (parents, mask), tree, chain = random_tree(12), layer.rows(12, dtype), layer.rows(37, dtype)
    out = model.run(tree, offsets(12), None, mask)
    for i in range(12):
        assert_near(out[i], along_path(weighed(tree), path_to(parents, i), state)[0], dtype)
    path = max((path_to(parents, i) for i in range(12)), key=len)
    _, state = along_path(weighed(tree), path, state)
    model.accept([path], None)
    out = model.run(chain, offsets(37), None)
    want, state = along_path(weighed(chain), list(range(37)), state)
    assert_near(out[36], want, dtype)
    assert_near(model.state[0], state)


def weighed(rows: Rows) -> Rows:
    """Return the rows whose values are multiplied with beta, without beta."""
    assert rows.beta is not None
    return rows._replace(v=rows.beta.double()[..., None] * rows.v.double(), beta=None)


def normalized(rows: Rows, scale: float) -> Rows:
    """Return the rows with normalized q and k in float64, and q scaled."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (rows.q.double(), rows.k.double()))
    return rows._replace(q=scale * q, k=k)


def test_tree_recurrence_normalizes_and_scales(device: torch.device) -> None:
    layer = Layer("gated delta", 2, 2, 24, 8)
    rows = layer.rows(9)
    rows = rows._replace(q=20 * rows.q, k=20 * rows.k)
    parents, mask = random_tree(9)
    model = Model(device, layer, num_slots=1, scale=0.3, l2norm_eps=1e-6)
    before = model.state[0].cpu().clone()
    out = model.run(rows, offsets(9), None, mask)
    want = normalized(rows, 0.3)
    for i in range(9):
        assert_near(out[i], along_path(want, path_to(parents, i), before)[0])
    assert_near(model.records.k[1, 0, :9], want.k)


@every_kind
def test_tree_recurrence_of_strong_decays_stays_finite(device: torch.device, kind: str) -> None:
    """Factors e^G and e^-G would overflow; their differences along a path do not."""
    layer = Layer(kind, 1, 1, 16, 16)
    rows = layer.rows(32)
    rows = rows._replace(g=rows.g * 40)
    model = Model(device, layer, num_slots=1, max_nodes=32)
    before = model.state[0].cpu().clone()
    mask = ((torch.ones(32, dtype=torch.int64) << torch.arange(1, 33)) - 1).view(-1, 1)
    out = model.run(rows, offsets(32), None, mask)
    assert_near(out[31], along_path(rows, list(range(32)), before)[0])
    model.accept([list(range(32))], None)
    sd.commit_recurrence(model.state, model.records, model.paths)
    assert_near(model.state[0], along_path(rows, list(range(32)), before)[1])


def test_tree_recurrence_takes_strided_rows(device: torch.device) -> None:
    """q, k and v are parts of one row, as a fused projection writes them; out is transposed."""
    layer = Layer("KDA", 2, 2, 16, 24)
    fused = torch.randn(7, 2 * 16 + 2 * 16 + 2 * 24) / 4
    q, k, v = fused.split((32, 32, 48), 1)
    rows = layer.rows(7)._replace(q=q.view(7, 2, 16), k=k.view(7, 2, 16), v=v.view(7, 2, 24))
    both = torch.stack([rows.g, rows.g], 2)
    rows = rows._replace(g=both[:, :, 0])
    parents, mask = random_tree(7)
    model = Model(device, layer, num_slots=1, max_nodes=7)
    before = model.state[0].cpu().clone()
    out = torch.full((2, 7, 24), torch.nan, device=device).transpose(0, 1)
    fused = fused.to(device)
    q, k, v = fused.split((32, 32, 48), 1)
    sd.tree_recurrence(
        q.view(7, 2, 16), k.view(7, 2, 16), v.view(7, 2, 24), both.to(device)[:, :, 0], on(device, rows.beta),
        model.state, model.records, model.paths, model.prefix_lens, offsets(7).to(device), mask=mask.to(device), out=out,
    )  # fmt: skip
    for i in range(7):
        assert_near(out[i], along_path(rows, path_to(parents, i), before)[0])


def test_tree_recurrence_of_prefix_0_reads_no_state_and_no_records(device: torch.device) -> None:
    layer = Layer("gated delta", 1, 2, 8, 8)
    model = Model(device, layer, num_slots=1, max_nodes=8)
    model.state.fill_(torch.nan)
    model.prefix_lens.zero_()
    model.paths.num_nodes.fill_(2**31 - 1)
    rows = layer.rows(4)
    parents, mask = random_tree(4)
    out = model.run(rows, offsets(4), None, mask)
    for i in range(4):
        assert_near(out[i], along_path(rows, path_to(parents, i), torch.zeros(2, 8, 8))[0])
    assert (model.state == 0).all() and (model.status == 0).all()


def test_tree_recurrence_does_not_depend_on_other_requests(device: torch.device) -> None:
    layer = Layer("gated delta", 1, 2, 32, 32)
    rows, (_, mask) = layer.rows(40), random_tree(20)
    whole, alone = (Model(device, layer, num_slots=2, max_nodes=20) for _ in range(2))
    alone.state.copy_(whole.state)
    both = whole.run(rows, offsets(20, 20), ints([1, 0]), mask.repeat(2, 1))
    own = alone.run(rows.at(slice(20, 40)), offsets(20), ints([0]), mask)
    assert torch.equal(both[20:], own)
    assert torch.equal(whole.records.u[:, 0].nan_to_num(), alone.records.u[:, 0].nan_to_num())


CHAIN = [1, 3, 7]


def refuse(device: torch.device, **changes: Any) -> tuple[list[int], bool, bool, bool]:
    """Run two requests of three rows with one argument changed.

    Return the status of both slots, and whether the first request has zeros, its slot is unchanged, and the other
    request has the outputs that it has without the change.
    """
    torch.manual_seed(3)
    layer = Layer("gated delta", 1, 2, 8, 4)
    model = Model(device, layer, num_slots=2, max_nodes=4)
    for records in model.records:
        records.nan_to_num_(0.5)
    rows = layer.rows(6)
    arguments: dict[str, Any] = {
        "mask": [CHAIN[0], CHAIN[1], CHAIN[2]] * 2, "nodes": [[0, 2, 3]] * 2, "num_nodes": [2, 2], "parity": [0, 1],
        "ends": [0, 3, 6], "prefix_lens": [4, 4], "status": [0, 0], "slots": [0, 1],
    }  # fmt: skip

    def outputs(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
        model.status.copy_(ints(values["status"]))
        model.prefix_lens.copy_(ints(values["prefix_lens"]))
        width = len(values["nodes"][0])
        paths = sd.PendingPaths(*(ints(values[name]) for name in ("nodes", "num_nodes", "parity")))
        model.paths = on(device, sd.PendingPaths(paths.nodes.view(2, width), paths.num_nodes, paths.parity))
        state = model.state.clone()
        mask = torch.tensor(values["mask"], dtype=torch.int64).view(6, -1)
        out = model.run(rows, ints(values["ends"]), ints(values["slots"]), mask)
        after = model.state.clone()
        model.state.copy_(state)
        return out, after

    want, _ = outputs(arguments)
    out, after = outputs(arguments | changes)
    unchanged = torch.equal(after[0], model.state[0])
    return model.status.tolist(), bool((out[:3] == 0).all()), unchanged, torch.equal(out[3:], want[3:])


WILD = [-1, 2**31 - 1, -(2**31)]


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", WILD)
def test_tree_recurrence_refuses_a_request_of_bad_data(device: torch.device, wild: int) -> None:
    refused = (True, True, True)
    assert refuse(device) == ([0, 0], False, False, True)
    assert refuse(device, num_nodes=[wild, 2]) == ([BAD_LENGTH, 0], *refused)
    assert refuse(device, num_nodes=[4, 2]) == ([BAD_LENGTH, 0], *refused)
    assert refuse(device, nodes=[[0, wild, 3], [0, 2, 3]]) == ([BAD_TREE, 0], *refused)
    assert refuse(device, nodes=[[wild, 2, 3], [0, 2, 3]]) == ([BAD_TREE, 0], *refused)
    assert refuse(device, nodes=[[0, 4, 3], [0, 2, 3]]) == ([BAD_TREE, 0], *refused)
    assert refuse(device, nodes=[[2, 2, 3], [0, 2, 3]]) == ([BAD_TREE, 0], *refused)
    if wild < 0:
        assert refuse(device, prefix_lens=[wild, 4]) == ([BAD_LENGTH, 0], *refused)
    assert refuse(device, slots=[wild, 1]) == ([0, 0], *refused)
    assert refuse(device, status=[STALLED, 0]) == ([STALLED, 0], *refused)
    assert refuse(device, ends=[wild, 3, 6])[0] == [BAD_LENGTH, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "mask",
    [[3, 3, 7], [1, 2 | 8, 7], [1, 1, 7], [1, 3, 6], [0, 3, 7], [1, 3, -1], [1, 2, 7], [-(2**63) | 1, 3, 7]],
    ids=str,
)
def test_tree_recurrence_refuses_a_mask_that_is_no_tree(device: torch.device, mask: list[int]) -> None:
    assert refuse(device, mask=mask + CHAIN) == ([BAD_TREE, 0], True, True, True)


def test_tree_recurrence_takes_zeros_after_the_first_mask_word(device: torch.device) -> None:
    words = [word for bits in CHAIN * 2 for word in (bits, 0)]
    assert refuse(device, mask=words) == ([0, 0], False, False, True)
    words[3] = 1
    assert refuse(device, mask=words) == ([BAD_TREE, 0], True, True, True)


def test_tree_recurrence_refuses_more_rows_than_records(device: torch.device) -> None:
    layer = Layer("Mamba 2", 1, 1, 8, 8)
    model = Model(device, layer, num_slots=1, max_nodes=3)
    out = model.run(layer.rows(4), offsets(4), None, torch.tensor([[1], [3], [7], [15]]))
    assert (out == 0).all() and model.status.tolist() == [BAD_LENGTH]
    assert all(x.isnan().all() for x in model.records)


def test_tree_recurrence_takes_no_rows_and_no_requests(device: torch.device) -> None:
    layer = Layer("KDA", 1, 1, 8, 8)
    model = Model(device, layer, num_slots=1, max_nodes=3)
    before = model.state.clone()
    model.run(layer.rows(0), offsets(0), None)
    out = model.run(layer.rows(2), offsets(), None)
    assert (out == 0).all() and torch.equal(model.state, before)


def test_set_pending_paths_stores_paths_and_changes_buffers(device: torch.device) -> None:
    paths = sd.PendingPaths(torch.full((4, 3), 9, dtype=INT), ints([1, 2, 3, 1]), ints([0, 1, 0, 1]))
    paths = on(device, paths)
    path = ints([[0, 2, 5], [0, 1, -7], [0, 3, 4], [0, 1, 2]])
    slots, status = ints([2, 0, -1, 3]), ints([0, 0, 0, STALLED])
    path, num_valid, slots, status = on(device, (path, ints([3, 0, 3, 2]), slots, status))
    sd.set_pending_paths(paths, path, num_valid, slots=slots, status=status)
    assert paths.num_nodes.tolist() == [0, 2, 3, 1]
    assert paths.parity.tolist() == [1, 1, 1, 1]
    assert paths.nodes[2].tolist() == [0, 2, 5]
    assert paths.nodes[[0, 1, 3]].tolist() == [[9] * 3] * 3


@pytest.mark.sanitize
@pytest.mark.parametrize("wild", WILD)
def test_set_pending_paths_of_bad_paths_store_nothing(device: torch.device, wild: int) -> None:
    cases = [([wild, 1, 2], 3, BAD_TREE), ([0, 1, 2], wild, BAD_LENGTH), ([0, 1, 2], 4, BAD_LENGTH)]
    cases += [([0, 2, 2], 3, BAD_TREE), ([0, 2, min(wild, 1)], 3, BAD_TREE)]
    paths = on(device, no_paths(len(cases), 3))
    paths.num_nodes.fill_(2)
    status = torch.zeros(len(cases), dtype=INT, device=device)
    path, counts = (ints([case[i] for case in cases]) for i in (0, 1))
    sd.set_pending_paths(paths, *on(device, (path, counts)), status=status)
    assert status.tolist() == [bits for *_, bits in cases]
    assert (paths.num_nodes == 0).all() and (paths.nodes == -77).all()


def test_commit_recurrence_of_bad_and_stalled_slots_changes_nothing(device: torch.device) -> None:
    layer = Layer("gated delta", 1, 2, 8, 4)
    state, records = on(device, layer.state(4)), on(device, layer.records(4, 4))
    for x in records:
        x.fill_(0.5)
    paths = on(device, sd.PendingPaths(ints([[0, 4], [0, 2], [0, 2], [0, 2]]), ints([2, 3, 2, 2]), ints([0] * 4)))
    status = on(device, ints([0, 0, STALLED, 0]))
    before = state.clone()
    sd.commit_recurrence(state, records, paths, slots=on(device, ints([0, 1, 2, -1])), status=status)
    assert torch.equal(state, before)
    assert status.tolist() == [BAD_TREE, BAD_LENGTH, STALLED, 0]


def message(**changes: Any) -> str:
    layer = Layer("gated delta", 2, 4, 8, 6)
    arguments: dict[str, Any] = {
        **layer.rows(5)._asdict(), "state": layer.state(3), "records": layer.records(3, 4), "paths": no_paths(3, 2),
        "prefix_lens": torch.zeros(3, dtype=INT), "cu_seqlens": offsets(2, 3),
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as error:
        sd.tree_recurrence(**arguments | changes)
    return str(error.value)


def test_tree_recurrence_error_messages() -> None:
    zeros, long = torch.zeros, Layer("gated delta", 2, 4, 257, 6)
    records, paths = Layer("gated delta", 2, 4, 8, 6).records(3, 4), no_paths(3, 2)
    assert message(q=zeros(5, 2, 8, dtype=INT)) == (
        "tree_recurrence: q is int32, expected float32 or float16 or bfloat16"
    )
    assert message(k=zeros(5, 2, 8).half()) == "tree_recurrence: k is float16, expected float32"
    assert (
        message(v=zeros(4, 4, 6)) == "tree_recurrence: v has shape [4, 4, 6], expected [rows=5, value_heads, value_dim]"
    )
    assert message(v=zeros(5, 3, 6), state=zeros(3, 3, 6, 8), records=records._replace(u=zeros(2, 3, 4, 3, 6), g=zeros(2, 3, 4, 3))) == (
        "tree_recurrence: records.k has 2 heads for the 3 of records.u, expected a number of heads that divides it"
    )  # fmt: skip
    assert message(g=zeros(5, 4, 8)) == ("tree_recurrence: g has shape [5, 4, 8], expected [rows=5, value_heads=4]")
    assert message(q=zeros(5, 2, 257), k=zeros(5, 2, 257), state=long.state(3), records=long.records(3, 4)) == (
        "tree_recurrence: key_dim is 257, expected 1 to 256"
    )
    assert message(records=Layer("gated delta", 2, 4, 8, 6).records(3, 65)) == (
        "tree_recurrence: num_nodes is 65, expected 1 to 64"
    )
    assert message(mask=zeros(5, 0, dtype=torch.int64)) == (
        "tree_recurrence: mask has mask_words 0, expected 1 or more"
    )
    assert message(scale=0.0) == "tree_recurrence: scale is 0.000000, expected a finite float32 above 0"
    assert message(l2norm_eps=-1.0) == "tree_recurrence: l2norm_eps is -1.000000, expected a finite float32 above 0"
    assert message(records=tuple(records)) == "tree_recurrence: records is a tuple, expected a RecurrentRecords"
    assert message(paths=tuple(paths)) == "tree_recurrence: paths is a tuple, expected a PendingPaths"
    assert message(paths=paths._replace(parity=zeros(2, dtype=INT))) == (
        "tree_recurrence: paths.parity has shape [2], expected [num_slots=3]"
    )
