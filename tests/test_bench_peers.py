"""The adapters of other packages' kernels: what they hand over and how results are compared, with stand-ins for those.

The packages themselves run where they are installed and there is a GPU: every `specdec bench` there checks them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.bench import peers
from specdec_kernels.bench.cases import CASES
from specdec_kernels.bench.compare import WrongResult
from specdec_kernels.bench.harness import Work, check
from specdec_kernels.bench.peers import sglang

CPU = torch.device("cpu")


def walk_links(
    predicts: Tensor, index: Tensor, count: Tensor, candidates: Tensor, links: list[Tensor], chosen: Tensor
) -> None:
    """What verify_tree_greedy does: along the chosen tokens, through flat rows."""
    rows, next_token, next_sibling = links
    for b in range(len(candidates)):
        last = int(rows[b, 0])
        index[b, 0], node, accepted = last, 0, 0
        for _ in range(1, index.shape[1]):
            node = int(next_token[b, node])
            while node != -1 and candidates[b, node] != chosen.flatten()[last]:
                node = int(next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = candidates[b, node]
            accepted, last = accepted + 1, int(rows[b, node])
            index[b, accepted] = last
        count[b], predicts[last] = accepted, chosen.flatten()[last]


def greedy(*arguments: Tensor) -> None:
    predicts, index, count, candidates, *links, chosen = arguments
    walk_links(predicts, index, count, candidates, links, chosen)


def sampled(*arguments: Any) -> None:
    predicts, index, count, candidates, *links, coins, last_coin, probs, scratch, _, _, _ = arguments
    assert coins.shape == candidates.shape and last_coin.shape == count.shape and not scratch.any()
    assert torch.allclose(probs.sum(-1), torch.ones(()))
    walk_links(predicts, index, count, candidates, links, probs.argmax(-1))


def build(
    parents: Tensor, chosen: Tensor, lens: Tensor, mask: Tensor, positions: Tensor, rows: Tensor, next_token: Tensor,
    next_sibling: Tensor, k: int, depth: int, nodes: int, mode: int,
) -> None:  # fmt: skip
    """What build_tree_kernel_efficient does with the smallest mask, node by node."""
    assert mode == 1 and parents.shape[1] == k * (depth - 1) + 1
    assert (next_token == -1).all() and (next_sibling == -1).all()
    batch = len(chosen)
    masks, places = mask.view(batch, nodes, nodes), positions.view(batch, nodes)
    masks[:] = False
    rows[:] = torch.arange(batch * nodes).view(batch, nodes)
    for b in range(batch):
        ids = chosen[b].tolist()
        assert ids == sorted(ids)
        masks[b, 0, 0], places[b, 0] = True, lens[b]
        for node, candidate in enumerate(ids, 1):
            group = candidate // k
            parent = 0 if group == 0 else 1 + ids.index(int(parents[b, group]))
            masks[b, node] = masks[b, parent]
            masks[b, node, node] = True
            places[b, node] = places[b, parent] + 1
            if next_token[b, parent] == -1:
                next_token[b, parent] = node
            else:
                last = int(next_token[b, parent])
                while next_sibling[b, last] != -1:
                    last = int(next_sibling[b, last])
                next_sibling[b, last] = node


def from_mask(
    mask: Tensor, lens: Tensor, positions: Tensor, rows: Tensor, next_token: Tensor, next_sibling: Tensor, batch: int, nodes: int
) -> None:  # fmt: skip
    masks = mask.view(batch, nodes, nodes)
    positions.view(batch, nodes)[:] = lens[:, None] + masks.sum(-1) - 1
    next_token[:], next_sibling[:] = -1, -1
    for b in range(batch):
        parents = [max((j for j in range(i) if masks[b, i, j]), default=-1) for i in range(nodes)]
        for i in range(nodes - 1, 0, -1):
            next_sibling[b, i], next_token[b, parents[i]] = next_token[b, parents[i]].item(), i


def only(probs: Tensor, _limit: Tensor) -> Tensor:
    return probs


STAND_INS = {
    "sglang.kernels.ops.speculative.tree": SimpleNamespace(
        verify_tree_greedy=greedy, build_tree_kernel_efficient=build, reconstruct_indices_from_tree_mask=from_mask
    ),
    "sglang.kernels.ops.speculative.sampling": SimpleNamespace(tree_speculative_sampling_target_only=sampled),
    "flashinfer.sampling": SimpleNamespace(
        top_k_renorm_probs=only,
        top_p_renorm_probs=only,
        top_k_mask_logits=only,
        softmax=lambda rows, temperature: torch.softmax(rows / temperature[:, None], -1),
        top_p_sampling_from_probs=lambda probs, top_p, seed, offset: probs.argmax(-1).int(),
        sampling_from_probs=lambda probs, seed, offset: probs.argmax(-1).int(),
    ),
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sglang, peers.flashinfer):
        monkeypatch.setattr(module, "module", lambda name, _device: STAND_INS[name])


def verify_work(sampling: str) -> Work:
    params = {"batch": 7, "nodes": 9, "vocab": 300, "sampling": sampling, "dtype": "bfloat16"}
    return CASES["verify_tree"].make(CPU, params)


def test_there_are_none_without_a_gpu() -> None:
    assert peers.module("torch", CPU) is None
    assert [other.name for other in verify_work("greedy").others] == ["torch"]
    assert not verify_work("top_p").others


@pytest.mark.parametrize("sampling", ["greedy", "top_k+top_p", "top_p", "temperature"])
def test_verify_tree(sampling: str, stand_ins: None) -> None:
    work = verify_work(sampling)
    check(work)
    assert [other.name for other in work.others][-1] == ("sglang" if sampling == "greedy" else "flashinfer")


@pytest.mark.parametrize(("nodes", "k", "others"), [(12, 4, 2), (6, 1, 2), (8, 1, 0)])
def test_build_tree(nodes: int, k: int, others: int, stand_ins: None) -> None:
    """A chain of five steps has candidates for six nodes: SGLang asks for that many."""
    work = CASES["build_tree"].make(CPU, {"batch": 5, "nodes": nodes, "k": k})
    check(work)
    assert len(work.others) == others


def test_build_tree_from_mask(stand_ins: None) -> None:
    work = CASES["build_tree_from_mask"].make(CPU, {"batch": 5, "nodes": 12})
    check(work)
    assert len(work.others) == 1


def test_another_tree_is_seen() -> None:
    lens, parents = torch.tensor([3], dtype=torch.int32), torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)
    tree = sd.build_tree_from_parents(torch.tensor([[5, 6, 7, 8]], dtype=torch.int32), parents, lens)

    def compare(tokens: list[int], first_child: list[int], next_sibling: list[int]) -> None:
        links = torch.tensor([first_child]), torch.tensor([next_sibling])
        visible = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]])
        sglang.expect_same_trees(torch.tensor([tokens]), torch.tensor([[3, 4, 4, 5]]), visible, lens, *links, tree)

    compare([5, 7, 6, 8], [1, -1, 3, -1], [-1, 2, -1, -1])  # siblings in the other order
    for tokens, first_child, next_sibling in (
        ([5, 6, 7, 8], [1, -1, 3, -1], [-1, 2, -1, -1]),  # 8 follows 7
        ([5, 7, 6, 8], [1, -1, 3, -1], [-1, -1, -1, -1]),  # a sibling is lost
    ):
        with pytest.raises(WrongResult, match="tree 0 is another"):
            compare(tokens, first_child, next_sibling)
