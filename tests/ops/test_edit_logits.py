"""edit_logits against its reference, bitwise; nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

INT = torch.int32


def random_edits(num_slots: int, vocab: int, kinds: torch.Tensor | None = None) -> sd.LogitEdits:
    few = lambda: torch.rand(num_slots, vocab) < 0.2  # noqa: E731
    return sd.LogitEdits(
        kinds=torch.randint(0, 8, (num_slots,), dtype=INT) if kinds is None else kinds,
        bias=torch.where(few(), 5 * torch.randn(num_slots, vocab), 0.0),
        counts=torch.where(few(), torch.randint(0, 9, (num_slots, vocab)), 0).to(INT),
        presence=torch.randn(num_slots),
        frequency=torch.randn(num_slots),
        repetition=0.5 + torch.rand(num_slots),
    )


def random_trees(batch: int, nodes: int, vocab: int) -> sd.Tree:
    """Return trees over few distinct tokens, so that a path repeats tokens."""
    parents = torch.tensor(
        [[-1, *(int(torch.randint(0, i, ())) for i in range(1, nodes))] for _ in range(batch)], dtype=INT
    )
    tokens = torch.randint(0, min(vocab, 6), (batch, nodes), dtype=INT)
    return sd.build_tree_from_parents(tokens, parents.view(batch, nodes), torch.zeros(batch, dtype=INT))


def on(device: torch.device, value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*(on(device, part) for part in value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def check(logits: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    want = logits.cpu().clone()
    reference.edit_logits(want, *rest, **options)
    sd.edit_logits(
        logits, *(on(logits.device, part) for part in rest), **{k: on(logits.device, v) for k, v in options.items()}
    )
    assert torch.equal(logits.cpu(), want)
    return want


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "vocab", "slots"), [(1, 1, 1, 1), (3, 40, 71, 5), (5, 70, 33, 8), (2, 3, 4999, 2)]
)
def test_edit_logits_matches_reference(
    device: torch.device, dtype: torch.dtype, batch: int, nodes: int, vocab: int, slots: int
) -> None:
    for _ in range(4):
        tree = random_trees(batch, nodes, vocab)
        wide = torch.randn(batch, 2 * nodes, vocab + 3, device=device).mul(10).to(dtype)
        logits = wide[:, ::2, 2:-1]  # between others
        before = wide.clone()
        named = torch.cat([torch.randperm(slots), torch.tensor([-1, slots])]).to(INT)
        check(
            logits,
            tree.mask,
            tree.tokens,
            random_edits(slots, vocab),
            vocab_mask=torch.randint(-(2**31), 2**31, (batch, nodes, -(-vocab // 32))).to(INT),
            slots=named[torch.randperm(slots + 2)][:batch].contiguous(),
        )
        before[:, ::2, 2:-1] = logits
        assert torch.equal(before, wide)


@pytest.mark.sanitize
def test_edit_logits_of_packed_rows_equals_padded_rows(device: torch.device) -> None:
    batch, nodes, vocab = 4, 20, 50
    for _ in range(4):
        tree, edits = random_trees(batch, nodes, vocab), random_edits(6, vocab)
        counts = torch.randint(0, nodes + 1, (batch,))
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(INT)
        slots = torch.tensor([5, -1, 0, 3], dtype=INT)
        logits = torch.randn(batch, nodes, vocab)
        vocab_mask = torch.randint(-(2**31), 2**31, (batch, nodes, 2)).to(INT)

        def pack(values: torch.Tensor, counts: torch.Tensor = counts) -> torch.Tensor:
            rows = [values[b, : int(n)] for b, n in enumerate(counts)]
            return torch.cat([*rows, torch.zeros_like(values[0, :3])]).to(device)  # the last ones belong to no request

        packed, mask, allowed = pack(logits), pack(tree.mask), pack(vocab_mask)
        reference.edit_logits(logits, tree.mask, tree.tokens, edits, vocab_mask, slots)
        there = on(device, tree.tokens), on(device, edits)
        sd.edit_logits(packed, mask, *there, vocab_mask=allowed, slots=slots.to(device), cu_seqlens_q=ends.to(device))
        assert torch.equal(packed, pack(logits))


@pytest.mark.sanitize
def test_edit_logits_of_a_worked_example(device: torch.device) -> None:
    """Root 1 has child 2, which has child 2; 0 is in the prompt, 1 in prompt and text, 3 has a bias."""
    tree = sd.build_tree_from_parents(
        torch.tensor([[1, 2, 2]], dtype=INT), torch.tensor([[-1, 0, 1]], dtype=INT), torch.zeros(1, dtype=INT)
    )
    edits = sd.make_logit_edits(1, 5, like=torch.zeros(1))
    edits.kinds[0] = sd.Edit.BIAS | sd.Edit.PENALTIES
    edits.bias[0, 3] = -3
    edits.counts[0, :2] = torch.tensor([1, 3])
    edits.presence[0], edits.frequency[0], edits.repetition[0] = 0.5, 0.25, 2
    logits = torch.tensor([4.0, -4.0, 8.0, 1.0, 7.0], device=device).repeat(1, 3, 1)
    check(logits, tree.mask, tree.tokens, edits)
    assert logits.tolist() == [[[2, -8.75, 8, -2, 7], [2, -8.75, 3.25, -2, 7], [2, -8.75, 3, -2, 7]]]


def test_edit_logits_does_not_read_rows_without_edits(device: torch.device) -> None:
    tree = random_trees(2, 5, 9)
    edits = random_edits(2, 9, kinds=torch.zeros(2, dtype=INT))
    edits.bias.fill_(torch.nan)
    logits = torch.full((2, 5, 9), torch.nan, device=device)
    sd.edit_logits(logits, on(device, tree.mask), on(device, tree.tokens), on(device, edits))
    assert logits.isnan().all()
    check(torch.zeros(2, 5, 9, device=device), tree.mask, tree.tokens, edits)
    masked = random_edits(2, 9, kinds=torch.full((2,), 4, dtype=INT))  # without a mask
    assert check(torch.zeros(2, 5, 9, device=device), tree.mask, tree.tokens, masked).eq(0).all()


def test_edit_logits_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    tokens = torch.tensor([[0, -1, 2**31 - 1, -(2**31)]], dtype=INT)
    mask = torch.full((1, 4, 2), -1)  # bits of nodes that do not exist
    check(torch.randn(1, 4, 3, device=device), mask, tokens, random_edits(1, 3, kinds=torch.full((1,), 3, dtype=INT)))


def test_edit_logits_accepts_empty_batch(device: torch.device) -> None:
    check(
        torch.zeros(0, 3, 5, device=device), torch.zeros(0, 3, 1).long(), torch.zeros(0, 3).to(INT), random_edits(2, 5)
    )


def test_commit_tokens_counts_committed_tokens(device: torch.device) -> None:
    state = on(device, sd.make_slot_state(3, 100, 1, like=torch.zeros(1)))
    state.remaining[:] = torch.tensor([9, 2, 9], dtype=INT)
    state.stop_tokens[0] = 4
    accepted = sd.Accepted(
        torch.tensor([[3, 4, 3, 3], [5, 5, 5, 1], [1, 6, 6, -1]], dtype=INT, device=device),
        torch.tensor([4, 4, 3], dtype=INT, device=device),
        torch.zeros(3, 4, dtype=INT, device=device),
    )
    counts = torch.ones(3, 6, dtype=INT, device=device)
    sd.commit_tokens(accepted, state, counts=counts, slots=torch.tensor([0, 2, 1], dtype=INT, device=device))
    assert counts.tolist() == [[1, 1, 1, 3, 3, 1], [1, 3, 1, 1, 1, 1], [1, 3, 1, 1, 1, 7]]


EDITS = sd.make_logit_edits(2, 8, like=torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, 8, dtype=INT)}, "edit_logits: logits is int32, expected float32 or float16 or bfloat16"),
        ({"mask": torch.zeros(2, 4, 1).long()}, "edit_logits: mask has shape [2, 4, 1], expected [batch=2, num_nodes=3, words]"),
        ({"tokens": torch.zeros(3, 3, dtype=INT)}, "edit_logits: tokens has shape [3, 3], expected [batch=2, tree_nodes]"),
        ({"edits": EDITS._replace(bias=torch.zeros(2, 9))}, "edit_logits: edits.bias has shape [2, 9], expected [num_slots=2, vocab=8]"),
        ({"edits": EDITS._replace(counts=torch.zeros(2, 8))}, "edit_logits: edits.counts is float32, expected int32"),
        ({"vocab_mask": torch.zeros(2, 3, 2, dtype=INT)}, "edit_logits: vocab_mask has shape [2, 3, 2], expected [batch=2, num_nodes=3, 1]"),
        ({"slots": torch.zeros(3, dtype=INT)}, "edit_logits: slots has shape [3], expected [batch=2]"),
    ],
    ids=["dtype", "mask", "tokens", "bias", "counts", "vocab_mask", "slots"],
)  # fmt: skip
def test_edit_logits_error_messages(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 3, 8),
        "mask": torch.zeros(2, 3, 1).long(),
        "tokens": torch.zeros(2, 3, dtype=INT),
        "edits": EDITS,
    }
    with pytest.raises(ValueError) as error:
        sd.edit_logits(**(arguments | change))
    assert str(error.value) == message


def test_logit_edits_error_messages() -> None:
    with pytest.raises(TypeError) as error:
        sd.edit_logits(torch.zeros(1, 1, 8), torch.zeros(1, 1, 1).long(), torch.zeros(1, 1).to(INT), ())
    assert str(error.value) == "edit_logits: edits is a tuple, expected a LogitEdits"
    for sizes, message in (((-1, 3), "num_slots is -1"), ((3, -1), "vocab is -1")):
        with pytest.raises(ValueError) as error:
            sd.make_logit_edits(*sizes, like=torch.zeros(1))
        assert str(error.value) == f"make_logit_edits: {message}, expected at least 0"
