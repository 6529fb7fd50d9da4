"""Recurrent states: a path that was accepted continues as its text does; states are saved, restored and forked."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import Status
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.mixer import attach_caches, mixers_of, state_specs_of
from specdec_kernels.models.layers.paged_batch import PagedBatch, Sequences
from specdec_kernels.models.layers.recurrent import KimiDeltaAttention
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.state_cache import ConvSpec, RecurrenceSpec, StateCache, StateSpec, bytes_of
from support.exhaustive import thinned
from support.hybrid_cases import HYBRIDS, VOCAB, hybrid_module
from support.trees import random_parents

SLOTS, NODES, PAGES = 3, 6, 8


def make_model(case: str, device: torch.device) -> CausalLM:
    options = ModelOptions(
        max_len=96,
        num_pages=SLOTS * PAGES,
        page_size=16,
        dtype=torch.float32,
        device=device,
        num_slots=SLOTS,
        max_nodes=NODES,
        accept_width=NODES,
    )
    return CausalLM(hybrid_module(case), options)


def ints(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Slots:
    """Texts of slots, and passes over them."""

    def __init__(self, lm: CausalLM) -> None:
        self.lm, self.device = lm, lm.embedding.weight.device
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]
        self.table = torch.arange(SLOTS * PAGES, dtype=torch.int32, device=self.device).view(SLOTS, PAGES)
        self.status = ints([0] * SLOTS, self.device)

    @property
    def lens(self) -> Tensor:
        return ints([len(text) for text in self.texts], self.device)

    def prefill(self, slot: int, tokens: list[int]) -> Tensor:
        """Append tokens to a slot's text, and return their hidden states [n, H]."""
        begin = len(self.texts[slot])
        positions = ints([list(range(begin, begin + len(tokens)))], self.device)
        rows = PagedBatch(ints([slot], self.device), self.table, self.lens, tail_len=len(tokens), status=self.status)
        hidden = self.lm.forward(ints([tokens], self.device), positions, rows).hidden[0]
        self.texts[slot] += tokens
        return hidden

    def run_trees(self, slots: list[int], tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
        """Return the hidden states of packed trees, [M, H]."""
        bounds, mask, positions = [0], [], []
        for slot, links in zip(slots, parents, strict=True):
            words: list[int] = []
            for node, parent in enumerate(links):
                words.append((words[parent] if parent >= 0 else 0) | 1 << node)
                positions.append(len(self.texts[slot]) + words[-1].bit_count() - 1)
            mask += words
            bounds.append(len(mask))
        rows = PagedBatch(
            ints(slots, self.device),
            self.table,
            self.lens,
            mask=torch.tensor(mask, device=self.device)[:, None],
            cu_seqlens_q=ints(bounds, self.device),
            status=self.status,
        )
        packed = ints([token for each in tokens for token in each], self.device)
        return self.lm.forward(packed, ints(positions, self.device), rows).hidden

    def accept(self, slots: list[int], tokens: list[list[int]], paths: list[list[int]]) -> None:
        """Commit a path of each slot's last tree."""
        width, device = NODES, self.device
        path = ints([each + [each[-1]] * (width - len(each)) for each in paths], device)
        counts = ints(list(map(len, paths)), device)
        self.lm.commit_path(self.table, path, counts, self.lens, slots=ints(slots, device), status=self.status)
        for slot, of_slot, nodes in zip(slots, tokens, paths, strict=True):
            self.texts[slot] += [of_slot[node] for node in nodes]


def random_tree(count: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree with a root."""
    parents = random_parents(1, count)[0].tolist()
    return torch.randint(VOCAB, (count,)).tolist(), [-1, *parents[1:]]


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def expect_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("case", thinned(HYBRIDS, ("qwen3_next", "falcon_h1", "lfm2").__contains__))
@torch.inference_mode()
def test_accepted_paths_continue_as_their_texts_do(case: str, device: torch.device) -> None:
    """In several rounds, of one slot and of two, each node's state is that of its path, prefilled in the third slot."""
    torch.manual_seed(3)
    lm = make_model(case, device)
    slots = Slots(lm)
    for slot, length in ((0, 9), (1, 2)):
        slots.prefill(slot, torch.randint(VOCAB, (length,)).tolist())
    for batch in ([0, 1], [1], [1, 0], [0, 1]):
        trees = [random_tree(int(torch.randint(1, NODES + 1, ()))) for _ in batch]
        tokens, parents = [tree[0] for tree in trees], [tree[1] for tree in trees]
        hidden = slots.run_trees(batch, tokens, parents)
        paths, first = [], 0
        for slot, of_slot, links in zip(batch, tokens, parents, strict=True):
            for node in range(len(links)):
                path = path_to(node, links)
                lm.begin(2)
                slots.texts[2] = []
                alone = slots.prefill(2, slots.texts[slot] + [of_slot[at] for at in path])
                expect_close(hidden[first + node], alone[-1])
            paths.append(path_to(int(torch.randint(len(links), ())), links))
            first += len(links)
        slots.accept(batch, tokens, paths)


@torch.inference_mode()
def test_kimi_delta_attention_computes_what_its_module_does(device: torch.device) -> None:
    """Each node of a tree has the output of its path, after a prompt in two chunks and an accepted path."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = kimi.KimiLinearConfig(
        hidden_size=24, linear_num_heads=2, linear_head_dim=16, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(6)
    module = kimi.KimiLinearDeltaAttention(config, 0).eval()
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    mixer = KimiDeltaAttention.of(deepcopy(module).to(device))
    states = StateCache.allocate(state_specs_of([mixer]), 1, NODES, NODES, device)
    mixer.cache = states.layers[0]
    x, slot, status = torch.randn(9 + 4 + 3, 24), ints([0], device), ints([0], device)

    def run(begin: int, end: int, length: int, parents: list[int] | None = None) -> Tensor:
        mask = None
        if parents is not None:
            paths = [path_to(node, parents) for node in range(len(parents))]
            mask = torch.tensor([[sum(1 << at for at in path)] for path in paths], device=device)
        rows = Sequences(slot, ints([0, end - begin], device), ints([length], device), mask, status)
        return mixer.out(mixer.mix(x[begin:end].to(device), rows)).cpu()

    def alone(rows: list[int]) -> Tensor:
        out: Tensor = module(x[rows][None])[0]
        return out

    prompt = torch.cat([run(0, 5, 0), run(5, 9, 5)])
    expect_close(prompt, alone(list(range(9))))
    first, second = [-1, 0, 0, 2], [-1, 0, 0]
    for parents, begin, text in ((first, 9, list(range(9))), (second, 13, [*range(9), 9, 11])):
        outputs = run(begin, begin + len(parents), len(text), parents)
        for node in range(len(parents)):
            expect_close(outputs[node], alone([*text, *(begin + at for at in path_to(node, parents))])[-1])
        states.move(ints([[0, 2, 2, 2, 2, 2]], device), ints([2], device), slots=slot, status=status)


@torch.inference_mode()
def test_stalled_slot_keeps_its_pending_path(device: torch.device) -> None:
    torch.manual_seed(4)
    slots = Slots(make_model("qwen3_next", device))
    slots.prefill(0, [1, 2, 3])
    tokens, parents = [5, 6, 7, 8], [-1, 0, 0, 2]
    slots.run_trees([0], [tokens], [parents])
    slots.accept([0], [tokens], [[0, 2]])
    want = slots.run_trees([0], [[9]], [[-1]])
    slots.prefill(1, slots.texts[0][:3])
    slots.run_trees([1], [tokens], [parents])
    slots.accept([1], [tokens], [[0, 2]])
    slots.status[1] = int(Status.STALLED)
    slots.run_trees([1], [[4, 4]], [[-1, 0]])
    slots.lm.commit_path(
        slots.table, ints([[0] * NODES], device), ints([1], device), slots.lens, slots=ints([1], device),
        status=slots.status,
    )  # fmt: skip
    slots.status[1] = 0
    expect_close(slots.run_trees([1], [[9]], [[-1]]), want)


@torch.inference_mode()
def test_states_are_saved_restored_and_forked(device: torch.device) -> None:
    torch.manual_seed(5)
    slots = Slots(make_model("qwen3_next", device))
    states = slots.lm.states
    assert states is not None
    slots.prefill(0, [1, 2, 3])
    tokens, parents = [5, 6, 7, 8], [-1, 0, 0, 2]
    slots.run_trees([0], [tokens], [parents])
    slots.accept([0], [tokens], [[0, 2, 3]])
    states.fork(0, 1)  # a path is pending
    slots.table[1], slots.texts[1] = slots.table[0], list(slots.texts[0])
    saved = states.save(0)
    want = slots.run_trees([0], [[9]], [[-1]])
    expect_close(slots.run_trees([1], [[9]], [[-1]]), want)
    slots.accept([0], [[9]], [[0]])
    slots.texts[0].pop()
    slots.run_trees([0], [[3, 3]], [[-1, 0]])
    states.restore(0, saved)
    expect_close(slots.run_trees([0], [[9]], [[-1]]), want)


def test_bytes_are_those_of_the_tensors() -> None:
    conv = ConvSpec(24, 4, torch.bfloat16)
    specs = [
        StateSpec(conv),
        StateSpec(conv, RecurrenceSpec(2, 4, 8, 16)),
        StateSpec(conv, RecurrenceSpec(2, 4, 8, 16, decays_by_channel=True)),
    ]
    for spec in specs:
        states = StateCache.allocate([spec], 5, 7, 3, torch.device("cpu"))
        assert states.num_bytes == bytes_of(spec, 5, 7)
    empty = StateCache.allocate(specs, 5, 7, 3, torch.device("cpu")).with_slots(0)
    assert (empty.num_slots, empty.num_bytes, len(empty.layers)) == (0, 0, 3)


def test_recurrent_layers_without_states_are_refused() -> None:
    lm = make_model("qwen3_next", torch.device("cpu"))
    mixers = mixers_of(lm.decoder.layers)
    assert len(state_specs_of(mixers)) == 3 and len(lm.pools.layers) == 1
    with pytest.raises(ValueError) as error:
        attach_caches(mixers, lm.pools)
    assert str(error.value) == "model: mixer 0 keeps a recurrent state, expected KV in every layer"
