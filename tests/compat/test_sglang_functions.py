"""compat.sglang.functions against references in plain Python and float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.compat.sglang import functions as sglang

CLOSE = 1e-5  # decisions closer than this are not compared

POISON = 77


# --- trees ------------------------------------------------------------------------------------------------------------


@dataclass
class Drafts:
    """Candidates as an EAGLE worker selects them: the parent of a selected node is selected too."""

    parent_list: Tensor
    selected: Tensor
    seq_lens: Tensor
    topk: int
    depth: int
    nodes: int


def random_drafts(batch: int, topk: int, depth: int, nodes: int, device: torch.device) -> Drafts:
    ids = [list(range(topk))] + [
        list(range(topk + (d - 1) * topk * topk, topk + d * topk * topk)) for d in range(1, depth)
    ]
    parent_list = torch.full((batch, topk * (depth - 1) + 1), -1)
    selected = torch.zeros(batch, nodes - 1, dtype=torch.int64)
    for b in range(batch):
        for d in range(1, depth):
            chosen = torch.randperm(len(ids[d - 1]))[:topk].tolist()
            for j, c in enumerate(chosen):
                parent_list[b, (d - 1) * topk + 1 + j] = ids[d - 1][c]
        reached: list[int] = []
        while len(reached) < nodes - 1:
            open_ids = [
                c
                for level in ids
                for c in level
                if c not in reached and (c < topk or int(parent_list[b, c // topk]) in reached)
            ]
            reached.append(open_ids[int(torch.randint(len(open_ids), ()))])
        selected[b] = torch.tensor(sorted(reached))
    seq_lens = torch.randint(0, 9, (batch,))
    return Drafts(parent_list.to(device), selected.to(device), seq_lens.to(device), topk, depth, nodes)


def reference_tree(drafts: Drafts, b: int) -> tuple[list[int], list[int]]:
    """Return the parent and depth of each node; a node without a parent before it has depth 0."""
    parents, depths = [-1], [0]
    selected = drafts.selected[b].tolist()
    for i, candidate in enumerate(selected):
        parent, group = -1, candidate // drafts.topk
        if candidate >= 0 and group == 0:
            parent = 0
        elif 0 < group < drafts.parent_list.shape[1]:
            above = int(drafts.parent_list[b, group])
            parent = selected[:i].index(above) + 1 if above >= 0 and above in selected[:i] else -1
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return parents, depths


def visible(parents: list[int], i: int) -> set[int]:
    seen = {0, i}
    while parents[i] > 0:
        i = parents[i]
        seen.add(i)
    return seen


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    n = len(parents)
    children = [next((j for j in range(i + 1, n) if parents[j] == i), -1) for i in range(n)]
    siblings = [
        next((j for j in range(i + 1, n) if parents[i] >= 0 and parents[j] == parents[i]), -1) for i in range(n)
    ]
    return children, siblings


def build(drafts: Drafts, mode: int) -> tuple[Tensor, ...]:
    device, n, batch = drafts.selected.device, drafts.nodes, len(drafts.selected)
    row_bytes = 1 if n <= 8 else 2 if n <= 16 else 4
    sizes = {0: int((drafts.seq_lens.clamp(min=0) + n).sum()) * n, 1: batch * n * n, 2: batch * n * row_bytes}
    mask = torch.full((sizes[mode],), POISON, dtype=torch.uint8, device=device)
    positions = torch.full((batch * n,), POISON, device=device)
    out = torch.full((3, batch, n), POISON, device=device)
    sglang.build_tree_kernel_efficient(
        drafts.parent_list, drafts.selected, drafts.seq_lens, mask, positions, *out,
        drafts.topk, drafts.depth, n, mode,
    )  # fmt: skip
    return mask.cpu(), positions.cpu(), *out.cpu()


def expect_trees(drafts: Drafts, mode: int) -> None:
    mask, positions, index, child, sibling = build(drafts, mode)
    n, at = drafts.nodes, 0
    for b in range(len(drafts.selected)):
        parents, depths = reference_tree(drafts, b)
        children, siblings = links(parents)
        seq_len = int(drafts.seq_lens[b])
        assert index[b].tolist() == list(range(b * n, b * n + n))
        assert positions[b * n : b * n + n].tolist() == [seq_len + d for d in depths]
        assert (child[b].tolist(), sibling[b].tolist()) == (children, siblings)
        for i in range(n):
            seen = visible(parents, i)
            want = [int(j in seen) for j in range(n)]
            if mode == 0:
                assert mask[at : at + seq_len].tolist() == [POISON] * seq_len
                assert mask[at + seq_len : at + seq_len + n].tolist() == want
                at += seq_len + n
            elif mode == 1:
                assert mask[(b * n + i) * n :][:n].tolist() == want
            else:
                size = 1 if n <= 8 else 2 if n <= 16 else 4
                row = mask[(b * n + i) * size :][:size].tolist()
                assert int.from_bytes(bytes(row), "little") == sum(bit << j for j, bit in enumerate(want))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize(("topk", "depth", "nodes"), [(1, 4, 5), (2, 3, 8), (4, 4, 11), (3, 5, 32), (1, 1, 2)])
def test_build_tree_matches_reference(device: torch.device, mode: int, topk: int, depth: int, nodes: int) -> None:
    expect_trees(random_drafts(5, topk, depth, nodes, device), mode)


@pytest.mark.parametrize("mode", [0, 1])
def test_build_tree_of_large_trees(device: torch.device, mode: int) -> None:
    expect_trees(random_drafts(3, 8, 6, 67, device), mode)
    chain = random_drafts(2, 1, 200, 201, device)
    expect_trees(chain, mode)


def test_build_tree_of_empty_inputs(device: torch.device) -> None:
    expect_trees(random_drafts(0, 2, 2, 4, device), 1)
    expect_trees(random_drafts(3, 2, 2, 1, device), 1)
    alone = random_drafts(2, 4, 1, 5, device)
    alone.parent_list = alone.parent_list[:, :0].contiguous()
    expect_trees(alone, 1)


@pytest.mark.sanitize
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_build_tree_of_invalid_candidates(device: torch.device, mode: int) -> None:
    for _ in range(4):
        drafts = random_drafts(4, 3, 3, 9, device)
        for tensor in (drafts.parent_list, drafts.selected):
            where = torch.rand(tensor.shape, device=device) < 0.3
            tensor[where] = torch.randint(-(2**62), 2**62, tensor.shape, device=device)[where]
        expect_trees(drafts, mode)


def test_build_tree_positions_wrap_around(device: torch.device) -> None:
    drafts = random_drafts(1, 1, 4, 5, device)  # a chain
    drafts.seq_lens[:] = 2**63 - 2
    _, positions, *_ = build(drafts, 1)
    assert positions.tolist() == [2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63, 2 - 2**63]


def test_build_tree_with_lengths_beyond_mask(device: torch.device) -> None:
    drafts = random_drafts(3, 2, 3, 6, device)
    drafts.seq_lens[:] = torch.tensor([3, 2**62, -5])
    n = drafts.nodes
    mask = torch.full((n * (3 + n) + 7,), POISON, dtype=torch.uint8, device=device)
    out = torch.empty(4, 3, n, dtype=torch.int64, device=device)
    sglang.build_tree_kernel_efficient(drafts.parent_list, drafts.selected, drafts.seq_lens, mask, *out, 2, 3, n, 0)
    assert mask[-7:].tolist() == [POISON] * 7 and mask[3].item() == 1


# --- verification -----------------------------------------------------------------------------------------------------


@dataclass
class Walks:
    """Inputs and outputs of every verify function."""

    tokens: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor
    predicts: Tensor
    accept_index: Tensor
    accept_num: Tensor

    def outputs(self) -> tuple[Tensor, ...]:
        return self.predicts, self.accept_index, self.accept_num

    def inputs(self) -> tuple[Tensor, ...]:
        return self.tokens, self.index, self.child, self.sibling


def random_walks(batch: int, nodes: int, width: int, vocab: int, device: torch.device, chain: bool = False) -> Walks:
    tokens, child, sibling = (torch.zeros(batch, nodes, dtype=torch.int64) for _ in range(3))
    for b in range(batch):
        parents = [-1] + [i if chain else int(torch.randint(max(0, i - 3), i + 1, ())) for i in range(nodes - 1)]
        tokens[b] = torch.randint(vocab, (nodes,))
        child[b], sibling[b] = (torch.tensor(x) for x in links(parents))
    index = torch.arange(batch * nodes).view(batch, nodes)
    return Walks(
        *(x.to(device) for x in (tokens, index, child, sibling)),
        torch.full((batch * nodes,), POISON, dtype=torch.int32, device=device),
        torch.full((batch, width), POISON, dtype=torch.int32, device=device),
        torch.full((batch,), POISON, dtype=torch.int32, device=device),
    )


def expect_path(walks: Walks, b: int, path: list[int], emitted: list[int]) -> None:
    """Check the accepted nodes, root first, and the token after each; nothing else is written."""
    nodes, width = walks.tokens.shape[1], walks.accept_index.shape[1]
    assert walks.accept_num[b].item() == len(path) - 1
    assert walks.accept_index[b].tolist() == [b * nodes + i for i in path] + [POISON] * (width - len(path))
    want = [POISON] * nodes
    for node, token in zip(path, emitted, strict=True):
        want[node] = token
    assert walks.predicts[b * nodes : (b + 1) * nodes].tolist() == want


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (6, 6), (17, 4), (64, 9), (700, 30)])
def test_verify_greedy_matches_reference(device: torch.device, nodes: int, width: int) -> None:
    batch = 60 if nodes < 100 else 7
    walks = random_walks(batch, nodes, width, 4, device)
    targets = torch.randint(4, (batch, nodes)).to(device)
    sglang.verify_tree_greedy(*walks.outputs(), *walks.inputs(), targets)
    longest = 0
    for b in range(batch):
        tokens, child, sibling = (x[b].tolist() for x in (walks.tokens, walks.child, walks.sibling))
        path = [0]
        while len(path) < width:
            node = child[path[-1]]
            while node >= 0 and tokens[node] != targets[b, path[-1]].item():
                node = sibling[node]
            if node < 0:
                break
            path.append(node)
        longest = max(longest, len(path))
        expect_path(walks, b, path, [targets[b, i].item() for i in path])
    assert batch < 60 or nodes < 17 or longest > 2


def sampled_reference(
    walks: Walks, b: int, coins: Any, final: float, target: Tensor, draft: Tensor, single: float, acc: float
) -> tuple[list[int], list[int], float]:
    """Return path, tokens and the margin of the closest decision; change draft [nodes, V] as the op does."""
    tokens, child, sibling = (x[b].tolist() for x in (walks.tokens, walks.child, walks.sibling))
    width, vocab = walks.accept_index.shape[1], target.shape[-1]
    path, emitted, near = [0], [], 1.0
    while len(path) < width:
        node, total, coin = child[path[-1]], 0.0, float(coins[path[-1]])
        while node >= 0:
            p = float(target[path[-1], tokens[node]])
            total += p
            if p > 0:
                near = min(near, abs(coin - total / max(acc, 1e-9)), abs(p - single) if single < 1 else 1)
            if p > 0 and (coin < total / max(acc, 1e-9) or p >= single):
                break
            draft[path[-1], tokens[node]] = p
            node = sibling[node]
        if node < 0:
            break
        emitted.append(tokens[node])
        path.append(node)
    left = target[path[-1]].double()
    if len(path) < width:
        left = (left - draft[path[-1]].double()).clamp(min=0)
    sums = left.cumsum(0)
    share = final * float(sums[-1])
    near = min(near, float((sums - share).abs().min()) / max(float(sums[-1]), 1e-9))
    above = (sums > share).nonzero()
    emitted.append(int(above[0]) if len(above) else vocab - 1)
    return path, emitted, near


def probabilities(*shape: int, zeros: float = 0.3) -> Tensor:
    weights = torch.rand(shape) ** 3
    weights[torch.rand(shape) < zeros] = 0
    weights[..., 0] += 1e-3
    return (weights / weights.sum(-1, keepdim=True)).float()


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.2, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize(("nodes", "width", "vocab"), [(1, 1, 5), (9, 9, 7), (20, 4, 33), (16, 6, 5003)])
def test_tree_sampling_matches_reference(
    device: torch.device, nodes: int, width: int, vocab: int, single: float, acc: float
) -> None:
    batch, checked = 24, 0
    walks = random_walks(batch, nodes, width, min(vocab, 6), device)
    coins, finals = torch.rand(batch, nodes), torch.rand(batch)
    target = probabilities(batch, nodes, vocab)
    if vocab > 100:
        target[..., :6] += 0.2
        target /= target.sum(-1, keepdim=True)
    draft = torch.zeros(batch, nodes, vocab)
    mutated = draft.to(device)
    sglang.tree_speculative_sampling_target_only(
        *walks.outputs(), *walks.inputs(), coins.to(device), finals.to(device), target.to(device), mutated, single, acc
    )
    for b in range(batch):
        path, emitted, near = sampled_reference(walks, b, coins[b], float(finals[b]), target[b], draft[b], single, acc)
        if near < CLOSE:
            continue
        checked += 1
        expect_path(walks, b, path, emitted)
        assert torch.equal(mutated[b].cpu(), draft[b])
    assert checked >= batch * 0.7


def test_tree_sampling_subtracts_draft_probs(device: torch.device) -> None:
    walks = random_walks(1, 1, 2, 3, device)
    target = torch.tensor([[[0.5, 0.3, 0.2]]], device=device)
    for final, want in ((0.0, 1), (0.55, 1), (0.65, 2)):  # residual: 0, 0.3, 0.2
        sglang.tree_speculative_sampling_target_only(
            *walks.outputs(), *walks.inputs(), torch.zeros(1, 1, device=device), torch.tensor([final], device=device),
            target, torch.tensor([[[0.9, 0.0, 0.0]]], device=device),
        )  # fmt: skip
        assert walks.predicts.tolist() == [want]


def test_tree_sampling_of_empty_residual_gives_last_token(device: torch.device) -> None:
    walks = random_walks(1, 1, 2, 3, device)
    nothing = torch.full((1, 1, 5), torch.nan, device=device)
    zeros = torch.zeros(1, 1, device=device)
    sglang.tree_speculative_sampling_target_only(
        *walks.outputs(), *walks.inputs(), zeros, zeros[0], nothing, torch.zeros_like(nothing)
    )
    assert walks.predicts.tolist() == [4]


@pytest.mark.sanitize
def test_verify_functions_stay_in_bounds_of_invalid_inputs(device: torch.device) -> None:
    """Links that loop or leave the tree, rows and tokens out of range, invalid probabilities."""
    for _ in range(6):
        batch, nodes, width, vocab = 4, 9, 5, 21
        walks = random_walks(batch, nodes, width, vocab, device)
        for tensor in walks.inputs():
            wild = torch.randint(-(2**40), 2**40, tensor.shape, device=device)
            near = torch.randint(-3, nodes + 3, tensor.shape, device=device)
            kind = torch.rand(tensor.shape, device=device)
            tensor[kind < 0.2] = wild[kind < 0.2]
            tensor[kind > 0.6] = near[kind > 0.6]
        walks.child[0] = walks.sibling[0] = torch.arange(nodes)  # cycles
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 2.0, 1e30], device=device)

        def floats(*shape: int, bad: Tensor = bad) -> Tensor:
            some = torch.randint(len(bad), shape, device=bad.device)
            wild = torch.rand(shape, device=bad.device) < 0.2
            return torch.where(wild, bad[some], torch.rand(shape, device=bad.device))

        probs, finals = floats(batch, nodes, vocab), floats(batch)
        sglang.verify_tree_greedy(*walks.outputs(), *walks.inputs(), walks.tokens)
        sglang.tree_speculative_sampling_target_only(
            *walks.outputs(), *walks.inputs(), floats(batch, nodes), finals, probs, floats(batch, nodes, vocab)
        )
        assert ((walks.accept_num >= 0) & (walks.accept_num < width)).all()


def test_tree_sampling_is_equal_on_both_devices(device: torch.device) -> None:
    """Close decisions included, with the vocabulary size of a real model."""
    if device.type == "cpu":
        pytest.skip("compares CUDA with the CPU")
    batch, nodes, width, vocab = 16, 8, 8, 128256
    walks = random_walks(batch, nodes, width, 50, device, chain=True)
    target = probabilities(batch, nodes, vocab)
    coins, finals = torch.rand(batch, nodes), torch.rand(batch)
    results = []
    for where in (torch.device("cpu"), device):
        outputs = [x.to(where).clone() for x in walks.outputs()]
        mutated = torch.zeros(batch, nodes, vocab, device=where)
        sglang.tree_speculative_sampling_target_only(
            *outputs, *(x.to(where) for x in walks.inputs()), coins.to(where), finals.to(where), target.to(where),
            mutated,
        )  # fmt: skip
        results += [*outputs, mutated]
    half = len(results) // 2
    for on_cpu, on_cuda in zip(results[:half], results[half:], strict=True):
        assert torch.equal(on_cpu, on_cuda.cpu())


# --- arguments --------------------------------------------------------------------------------------------------------


def test_sglang_functions_error_messages() -> None:
    walks = random_walks(2, 4, 3, 9, torch.device("cpu"))
    drafts = random_drafts(2, 2, 3, 5, torch.device("cpu"))
    with pytest.raises(ValueError) as error:
        sglang.verify_tree_greedy(*walks.outputs(), *walks.inputs(), walks.tokens.int())
    assert str(error.value) == "verify_tree_greedy: target_predict is int32, expected int64"
    out = torch.empty(4, 2, 5, dtype=torch.int64)
    lists = (drafts.parent_list, drafts.selected, drafts.seq_lens)
    for mask, mode, message in (
        (torch.empty(49, dtype=torch.bool), 1, "tree_mask has 49 bytes, expected at least 50"),
        (torch.empty(50), 1, "tree_mask is float32, expected bool or uint8"),
        (torch.empty(50, dtype=torch.bool), 3, "tree_mask_mode is 3, expected 0 to 2"),
        (torch.empty(10, 10, dtype=torch.bool).T, 1, "tree_mask is not contiguous, expected a contiguous tensor"),
    ):
        with pytest.raises(ValueError) as error:
            sglang.build_tree_kernel_efficient(*lists, mask, *out, 2, 3, 5, mode)
        assert str(error.value) == f"build_tree_kernel_efficient: {message}"
    with pytest.raises(ValueError) as error:
        sglang.build_tree_kernel_efficient(*lists, torch.empty(50, dtype=torch.bool), *out, 3, 3, 5, 1)
    assert str(error.value).startswith("build_tree_kernel_efficient: parent_list.shape[1] is 5, expected 7 to ")
    probs = torch.zeros(2, 4, 9)
    with pytest.raises(ValueError) as error:
        sglang.tree_speculative_sampling_target_only(
            *walks.outputs(), *walks.inputs(), torch.zeros(2, 4), torch.zeros(2), probs, probs.clone(), 1.5
        )
    assert str(error.value) == ("tree_speculative_sampling_target_only: threshold_single is 1.500000, expected 0 to 1")
