"""compat.vllm_gpu: chains verified from logits, by seeds, in the layout of vLLM's second model runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_kernels.compat.vllm.gpu import rejection_sample


def call(counts: list[int], steps: int, logits: torch.Tensor, drafts: list[list[int]], **options: Any) -> Any:
    """Requests with counts[b] drafts each; slots are given out from the back."""
    device, batch = logits.device, len(counts)
    sampled = [x for row in drafts for x in (77, *row)]  # a request's first row decides the draft behind it
    starts = torch.tensor([0, *(n + 1 for n in counts)], device=device).cumsum(0).int()
    pos = torch.cat([torch.arange(n + 1) for n in counts]) + 10
    slots = torch.arange(batch, device=device).flip(0) + 1
    arguments: dict[str, Any] = {"temperature": torch.zeros(batch + 2, device=device), "draft_logits": None}
    arguments |= {"seed": torch.arange(batch + 2, device=device) + 5}
    arguments |= options
    return rejection_sample(
        target_logits=logits,
        draft_sampled=torch.tensor(sampled, device=device),
        cu_num_logits=starts,
        pos=pos.to(device),
        idx_mapping=slots.int(),
        expanded_idx_mapping=slots,
        expanded_local_pos=pos,
        num_speculative_steps=steps,
        **arguments,
    )


@pytest.mark.parametrize("counts", [[2, 2, 2], [2, 0, 1]])
def test_greedy(device: torch.device, counts: list[int]) -> None:
    logits = torch.randn(sum(counts) + 3, 9, device=device)
    best = logits.argmax(-1).tolist()
    drafts, want, at = [], [], 0
    for request, count in enumerate(counts):
        row = best[at : at + count]
        accepted = count
        if request == 2:  # the last draft is another
            row[-1], accepted = (row[-1] + 1) % 9, count - 1
        drafts.append(row)
        want.append(best[at : at + accepted + 1])
        at += count + 1
    sampled, lengths = call(counts, 2, logits, drafts)
    assert sampled.dtype == torch.int64 and sampled.shape == (3, 3) and lengths.dtype == torch.int32
    assert [row[:n] for row, n in zip(sampled.tolist(), lengths.tolist(), strict=True)] == want


@pytest.mark.parametrize("mode", ["not drawn", "drawn", "in blocks"])
def test_emitted_tokens_are_distributed_as_the_target(device: torch.device, mode: str) -> None:
    batch, steps, vocab = 6000, 2, 5
    logits, draft = torch.randn(steps + 1, vocab), torch.randn(steps, vocab + 3)
    draft[:, vocab:] = -torch.inf  # columns that only pad the draft's vocabulary
    temperature = 0.7
    q = torch.softmax(draft / temperature, -1)
    tokens = torch.stack([torch.multinomial(row, batch, replacement=True) for row in q], 1)
    if mode == "not drawn":
        tokens[:] = torch.tensor([1, 2])
    sampled, lengths = call(
        [steps] * batch, steps, logits.repeat(batch, 1).to(device), tokens.tolist(),
        temperature=torch.full((batch + 2,), temperature, device=device),
        draft_logits=None if mode == "not drawn" else draft.expand(batch + 2, -1, -1).contiguous().to(device),
        use_block_verification=mode == "in blocks",
    )  # fmt: skip
    target = torch.softmax(logits, -1)
    for place in range(steps + 1):
        emitted = sampled[lengths > place, place].cpu()
        counted = torch.bincount(emitted, minlength=vocab) / len(emitted)
        sigma = (target[place] * (1 - target[place]) / len(emitted)).sqrt()
        assert ((counted - target[place]).abs() < 5 * sigma).all(), place
    assert lengths.float().mean() > 1


def test_the_seed_fixes_the_tokens(device: torch.device) -> None:
    logits, drafts = torch.randn(7, 40, device=device), [[1, 2], [3], [4]]
    warm = {"temperature": torch.ones(5, device=device)}
    first, lengths = call([2, 1, 1], 3, logits, drafts, **warm)
    again, _ = call([2, 1, 1], 3, logits, drafts, **warm)
    assert torch.equal(first, again)
    alone, _ = call(
        [2],
        3,
        logits[:3],
        drafts[:1],
        temperature=torch.ones(3, device=device),
        seed=torch.tensor([0, 8, 0], device=device),
    )
    assert torch.equal(alone[0, : lengths[0]], first[0, : lengths[0]])  # the seed of its slot before


def test_messages() -> None:
    with pytest.raises(ValueError) as error:
        call([1], 1, torch.zeros(2, 4), [[1]], synthetic_conditional_rates=torch.ones(1))
    assert str(error.value) == "rejection_sample: synthetic_conditional_rates is given, expected None"
    with pytest.raises(ValueError) as error:
        call([1], 1, torch.zeros(2, 4), [[1]], seed=torch.zeros(3))
    assert str(error.value) == "verify_tree: seeds is float32, expected int64"
