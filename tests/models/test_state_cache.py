"""Layers whose mixer keeps a recurrent state: the state is saved, restored, forked and moved along accepted paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec_kernels.models.backends import native
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.families import Llama, base
from specdec_kernels.models.layers.decoder_layer import Layer
from specdec_kernels.models.layers.head_layout import HeadLayout
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.mixer import attach_caches, state_specs_of
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.models.state_cache import StateCache, StateSpec
from support.counting_mixer import CountingMixer

CPU = torch.device("cpu")
SLOTS, NODES, PAGE_SIZE = 3, 4, 4
MASK = [0b0001, 0b0011, 0b0101, 0b1101]  # nodes 0, 0-1, 0-2, 2-3


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Counting(Llama):
    """Llama whose layers count tokens, but for layer 0, which has attention."""

    model_type = "counting"

    def layer(self, index: int, module: Any, layout: HeadLayout) -> Layer:
        layer = super().layer(index, module, layout)
        if index:
            weight = torch.full((self.config.hidden_size, 1), 0.1 * index)
            layer.mixer = CountingMixer(Linear(weight, None))
        return layer


def counting_model(monkeypatch: pytest.MonkeyPatch, num_layers: int = 3) -> CausalLM:
    monkeypatch.setattr(base, "_FAMILIES", base._FAMILIES | {"counting": Counting})
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_attention_heads=1, num_hidden_layers=num_layers
    )
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    module.config.model_type = "counting"
    monkeypatch.setattr(
        CausalLM, "states", StateCache.allocate([StateSpec(((),), (torch.int64,))] * 2, SLOTS, NODES, CPU)
    )
    options = ModelOptions(max_len=64, num_pages=9, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(native, "check_against_module", lambda *_: None)  # no module of transformers counts
    return CausalLM(module.eval(), options)


def batch_of(slots: Tensor, lens: Tensor, count: int, mask: list[int] | None = None) -> tuple[Tensor, PagedBatch]:
    """Return positions [B, count] and the batch of rows after prefixes of these lengths."""
    words = None if mask is None else torch.tensor(mask).expand(len(slots), -1)[..., None].contiguous()
    table = torch.arange(9, dtype=torch.int32).view(SLOTS, 3)
    depths = torch.arange(count) if mask is None else torch.tensor([bits.bit_count() - 1 for bits in mask])
    positions = (lens[slots.long()][:, None] + depths).int()
    return positions, PagedBatch(slots, table, lens, tail_len=count, mask=words)


def counts(lm: CausalLM) -> list[list[int]]:
    assert lm.states is not None
    return [layer.committed[0].tolist() for layer in lm.states.layers]


def test_states_count_prompts_and_accepted_paths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = counting_model(monkeypatch)
    slots, lens = ints(2, 0), ints(5, 0, 5)
    positions, batch = batch_of(slots, ints(0, 0, 0), 5)
    tokens = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(1))
    lm.prefill(tokens, positions, batch)
    assert counts(lm) == [[5, 0, 5]] * 2  # the last layer, too, has counted each row once
    positions, batch = batch_of(slots, lens, 4, MASK)
    lm.forward(tokens[:, :4], positions, batch)
    assert counts(lm) == [[5, 0, 5]] * 2
    path = ints(0, 2, 3).expand(2, -1).contiguous()
    lm.commit_path(batch.page_table, path, ints(3, 0), lens, slots=slots, status=ints(0, 0, 0))
    assert counts(lm) == [[5, 0, 8]] * 2


def test_tree_pass_sees_each_path_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden state of a node is that of its path, prefilled: counts enter the residual stream."""
    lm = counting_model(monkeypatch)
    tokens, tree = torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2, 3, 4]])
    lm.prefill(tokens, *batch_of(ints(0), ints(0, 0, 0), 3))
    got = lm.forward(tree, *batch_of(ints(0), ints(3, 0, 0), 4, MASK)).hidden
    path = torch.cat([tokens, tree[:, [0, 2, 3]]], 1)
    want = lm.forward(path, *batch_of(ints(1), ints(0, 0, 0), 6)).hidden
    torch.testing.assert_close(got[0, [0, 2, 3]], want[0, 3:], rtol=1e-4, atol=1e-4)


def test_states_are_saved_restored_and_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = counting_model(monkeypatch)
    assert lm.states is not None
    lm.prefill(torch.ones(1, 4, dtype=torch.long), *batch_of(ints(1), ints(0, 0, 0), 4))
    saved = lm.states.save(1)
    lm.states.fork(1, 2)
    lm.prefill(torch.ones(1, 2, dtype=torch.long), *batch_of(ints(1), ints(0, 4, 4), 2))
    assert counts(lm) == [[0, 6, 4]] * 2
    lm.states.restore(1, saved)
    assert counts(lm) == [[0, 4, 4]] * 2


def test_recurrent_layers_without_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = counting_model(monkeypatch)
    mixers = [layer.mixer for layer in lm.decoder.layers]
    assert len(state_specs_of(mixers)) == 2 and len(lm.pools.layers) == 1
    with pytest.raises(ValueError) as error:
        attach_caches(mixers, lm.pools)
    assert str(error.value) == "model: layer 1 keeps a recurrent state, expected KV in every layer"
