"""compat.vllm.ngram: the n-gram proposer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec_kernels.compat.vllm.ngram import NgramProposer


def proposer(drafts: int = 4, max_len: int = 64, requests: int = 4, **options: Any) -> NgramProposer:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, **options),
        model_config=SimpleNamespace(max_model_len=max_len),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )
    return NgramProposer(config)


class Batch:
    """Texts as in vLLM's buffers: rows that are overwritten in place."""

    def __init__(self, rows: int, max_len: int = 64) -> None:
        self.tokens = np.full((rows, max_len), 999, np.int32)
        self.lengths = np.zeros(rows, np.int32)

    def put(self, row: int, text: list[int]) -> None:
        self.tokens[row] = 999
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)


def test_proposer_drafts_what_followed_before() -> None:
    drafter, batch = proposer(), Batch(3)
    batch.put(0, [1, 2, 3, 4, 5, 6, 1, 2])
    batch.put(1, [30, 31, 32])
    batch.put(2, [1, 2])
    drafts = drafter.propose([[2], [32], []], batch.lengths, batch.tokens, slot_mappings=None)
    assert drafts == [[3, 4, 5, 6], [], []]
    batch.put(0, [1, 2, 3, 4, 5, 6, 1, 2, 3, 30])
    batch.put(2, [7, 8, 30, 31])
    drafts = drafter.propose([[3, 30], [], [31]], batch.lengths, batch.tokens)
    assert drafts[0][:2] == [31, 32] and drafts[1] == [] and drafts[2][0] == 32


def test_proposer_detects_new_request_in_row() -> None:
    drafter, batch = proposer(), Batch(1)
    batch.put(0, [1, 2, 3, 4])
    drafter.propose([[4]], batch.lengths, batch.tokens)
    batch.put(0, [5, 6, 2])
    assert drafter.propose([[2]], batch.lengths, batch.tokens)[0][:2] == [3, 4]  # the old text can still be matched
    batch.put(0, [5, 6, 2, 9, 5])
    assert drafter.propose([[9, 5]], batch.lengths, batch.tokens)[0][:2] == [6, 2]


def test_proposer_stops_at_max_model_len() -> None:
    drafter, batch = proposer(drafts=8, max_len=10), Batch(1, 10)
    batch.put(0, [1, 2, 3, 4, 5, 6, 1, 2])
    assert drafter.propose([[2]], batch.lengths, batch.tokens) == [[3, 4]]
    batch.put(0, [1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    assert drafter.propose([[4]], batch.lengths, batch.tokens) == [[]]


def test_proposer_honors_prompt_lookup_min() -> None:
    drafter, batch = proposer(prompt_lookup_min=3), Batch(1)
    batch.put(0, [1, 2, 3, 9, 2, 3])
    assert drafter.propose([[3]], batch.lengths, batch.tokens) == [[]]
    batch.put(0, [1, 2, 3, 9, 2, 3, 1, 2, 3])
    assert drafter.propose([[1, 2, 3]], batch.lengths, batch.tokens)[0][0] == 9


@pytest.mark.parametrize(("requests", "drafted"), [(1, 6), (9, 6), (64, 3)])
def test_proposer_ends_chains_below_acceptance_threshold(requests: int, drafted: int) -> None:
    """After a match of one token, acceptance falls by 3/5 a draft: 0.216 is above 64 / (330 + 64), 0.13 is not."""
    drafter, batch = proposer(drafts=6, requests=requests), Batch(requests)
    for row in range(requests):
        known = list(range(100 * row, 100 * row + 20))
        batch.put(row, [*known, 100 * row + 50, known[3]])
    sampled = [[100 * row + 3] for row in range(requests)]
    drafts = drafter.propose(sampled, batch.lengths, batch.tokens)
    assert drafts == [list(range(100 * row + 4, 100 * row + 4 + drafted)) for row in range(requests)]
    for row in range(requests):  # after a match of many tokens, all are drafted
        known = list(range(100 * row, 100 * row + 20))
        batch.put(row, [*known, 100 * row + 50, *known[3:14]])
    drafts = drafter.propose([list(batch.tokens[row, 22:32]) for row in range(requests)], batch.lengths, batch.tokens)
    assert drafts == [list(range(100 * row + 14, 100 * row + 20)) for row in range(requests)]


def test_proposer_follows_moved_and_preempted_requests() -> None:
    """Each text is inserted once and continued at its end, however the rows of the batch change."""
    random = np.random.default_rng(5)
    drafter, batch = proposer(max_len=200, requests=6), Batch(6, 200)
    texts: list[list[int]] = []  # of running requests, in the order of their rows
    waiting: list[list[int]] = []  # preempted
    begun, lengths = 0, {}
    for turn in range(120):
        for row in reversed(range(len(texts))):
            event = random.random()
            if len(texts[row]) > 150 or event < 0.03:  # it ends: the last row moves into its place
                texts[row] = texts[-1]
                texts.pop()
            elif event < 0.08:
                waiting.append(texts.pop(row))
        while len(texts) < 6 and (turn < 100 or waiting):
            if waiting and random.random() < 0.5:
                texts.append(waiting.pop(int(random.integers(len(waiting)))))
            elif len(waiting) < 4 and turn < 100:
                prompt = random.integers(0, 50, int(random.integers(1, 40)))  # shares prefixes with others
                texts.append([*range(1000 + begun % 3, 1004 + begun % 3), *prompt.tolist(), 2000 + begun])
                begun += 1
            else:
                break
        random.shuffle(texts)
        sampled: list[list[int]] = []
        for row, text in enumerate(texts):
            new = random.integers(0, 50, int(random.integers(0, 5))).tolist()
            text += new
            sampled.append(new)
            batch.put(row, text)
        drafts = drafter.propose(sampled, batch.lengths, batch.tokens)
        for text, new, draft in zip(texts, sampled, drafts, strict=True):
            assert new or not draft
            if new:
                lengths[next(token for token in text if token >= 2000)] = len(text)
    assert begun > 20 and drafter.index.statistics.inserted == sum(lengths.values())


def test_proposer_inserts_no_text_twice() -> None:
    drafter, batch = proposer(), Batch(3)
    first, second, third = [1, 2, 3, 4, 5], [1, 2, 9, 8], [7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for row, text in enumerate([first, second, third]):
        batch.put(row, text)
    drafter.propose([[5], [8], [10]], batch.lengths, batch.tokens)
    assert drafter.index.statistics.inserted == 20
    batch.put(0, [*third, 11])  # the first was preempted, the third moved into its row
    drafter.propose([[11], [8]], batch.lengths, batch.tokens)
    assert drafter.index.statistics.inserted == 21
    batch.put(2, [*first, 6])
    drafter.propose([[11], [], [6]], batch.lengths, batch.tokens)
    assert drafter.index.statistics.inserted == 22


def test_proposer_error_messages() -> None:
    drafter, batch = proposer(), Batch(5)
    with pytest.raises(ValueError) as error:
        drafter.propose(torch.zeros(2, 1), batch.lengths, batch.tokens)  # type: ignore[arg-type]
    assert str(error.value) == (
        "NgramProposer: sampled_token_ids is a Tensor, expected a list (vllm: --no-async-scheduling)"
    )
    with pytest.raises(ValueError) as error:
        drafter.propose([[1]] * 5, batch.lengths, batch.tokens)
    assert str(error.value) == "NgramProposer: sampled_token_ids has 5 rows, expected at most 4"
    with pytest.raises(ValueError) as error:
        proposer(drafts=256)
    assert str(error.value) == "NgramProposer: num_speculative_tokens is 256, expected 1 to 255"
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=True),
    )
    with pytest.raises(ValueError) as error:
        NgramProposer(config)
    assert str(error.value) == ("NgramProposer: async_scheduling is True, expected False (vllm: --no-async-scheduling)")
