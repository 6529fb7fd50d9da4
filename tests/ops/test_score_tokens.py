"""score_tokens against its float64 reference."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference

WILD = [-1, -(2**31), 2**31 - 1]


def poisoned(batch: int, width: int, top_n: int, device: torch.device) -> sd.TokenScores:
    return sd.TokenScores(
        logprobs=torch.full((batch, width), torch.nan, device=device),
        top_ids=torch.full((batch, width, top_n), -77, dtype=torch.int32, device=device),
        top_logprobs=torch.full((batch, width, top_n), torch.nan, device=device),
    )


def on(device: torch.device, accepted: sd.Accepted) -> sd.Accepted:
    return sd.Accepted(*(t.to(device) for t in accepted))


def check(logits: torch.Tensor, accepted: sd.Accepted, top_n: int) -> sd.TokenScores:
    device = logits.device
    out = poisoned(*accepted.path.shape, top_n, device)
    got = sd.score_tokens(logits, on(device, accepted), top_n=top_n, out=out)
    assert got is out
    want = reference.score_tokens(logits.cpu(), accepted, top_n)
    assert torch.equal(got.top_ids.cpu(), want.top_ids)
    for g, w in ((got.logprobs, want.logprobs), (got.top_logprobs, want.top_logprobs)):
        assert g.dtype == torch.float32 and (g <= 0).all()
        torch.testing.assert_close(g.cpu().double(), w, rtol=0, atol=2e-5)
    return got


def random_rows(batch: int, nodes: int, width: int, vocab: int) -> sd.Accepted:
    path = torch.randint(0, nodes, (batch, width), dtype=torch.int32)
    tokens = torch.randint(0, vocab, (batch, width), dtype=torch.int32)
    return sd.Accepted(tokens, torch.randint(0, width + 1, (batch,), dtype=torch.int32), path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "width", "vocab", "top_n"),
    [(1, 1, 1, 1, 1), (3, 4, 3, 7, 7), (2, 8, 6, 1013, 20), (2, 3, 4, 32000, 0), (1, 2, 2, 128256, 64)],
)
def test_score_tokens_matches_reference(
    device: torch.device, dtype: torch.dtype, batch: int, nodes: int, width: int, vocab: int, top_n: int
) -> None:
    check(
        torch.randn(batch, nodes, vocab, device=device).to(dtype), random_rows(batch, nodes, width, vocab), top_n=top_n
    )


@pytest.mark.sanitize
def test_score_tokens_matches_reference_on_small_inputs(device: torch.device) -> None:
    check(torch.randn(2, 3, 33, device=device), random_rows(2, 3, 4, 33), top_n=5)


def test_score_tokens_of_verify_tree_outputs(device: torch.device) -> None:
    logits = torch.zeros(2, 3, 10, device=device)
    logits[0, 0, 7], logits[0, 2, 4], logits[1, 0, 3] = 5, 6, 7
    tree = sd.build_tree_from_parents(
        torch.tensor([[1, 2, 7], [1, 2, 7]], dtype=torch.int32, device=device),
        torch.tensor([[-1, 0, 0], [-1, 0, 0]], dtype=torch.int32, device=device),
        torch.tensor([9, 9], dtype=torch.int32, device=device),
    )
    accepted = sd.verify_tree(logits, tree, 3)
    assert accepted.tokens.tolist() == [[7, 4, -1], [3, -1, -1]]
    scores = sd.score_tokens(logits, accepted, top_n=1)
    assert scores.top_ids.squeeze(-1).tolist() == accepted.tokens.tolist()
    assert torch.equal(scores.top_logprobs.squeeze(-1), scores.logprobs)
    want = logits.cpu().log_softmax(-1)
    torch.testing.assert_close(scores.logprobs.cpu()[0, :2], torch.stack([want[0, 0, 7], want[0, 2, 4]]))
    assert scores.logprobs[0, 2] == scores.logprobs[1, 1] == -torch.inf


@pytest.mark.sanitize
@pytest.mark.parametrize("top_n", [0, 4])
def test_score_tokens_honors_num_logprobs_of_slots(device: torch.device, top_n: int) -> None:
    """Slots ask for nothing, the tokens alone, some top entries, or more than exist; some rows are empty."""
    accepted = random_rows(7, 3, 4, 70)._replace(num_valid=torch.full((7,), 3, dtype=torch.int32))
    slots = torch.tensor([4, 0, -1, 2, 1, 5, 3], dtype=torch.int32)
    wanted = torch.tensor([-1, 0, 2, 9, -(2**31)], dtype=torch.int32)
    logits = torch.randn(7, 3, 70, device=device)
    logits[0] = logits[1] = torch.nan  # not read
    got = sd.score_tokens(
        logits,
        on(device, accepted),
        top_n=top_n,
        slots=slots.to(device),
        num_logprobs=wanted.to(device),
        out=poisoned(7, 4, top_n, device),
    )
    want = reference.score_tokens(logits.cpu(), accepted, top_n, slots, wanted)
    assert torch.equal(got.top_ids.cpu(), want.top_ids)
    for g, w in ((got.logprobs, want.logprobs), (got.top_logprobs, want.top_logprobs)):
        torch.testing.assert_close(g.cpu().double(), w, rtol=0, atol=2e-5)
    assert (got.logprobs > -torch.inf).sum(1).tolist() == [0, 0, 0, 3, 3, 0, 3]


@pytest.mark.parametrize("wild", WILD, ids=str)
def test_score_tokens_treats_nodes_and_tokens_out_of_range_as_unused(device: torch.device, wild: int) -> None:
    accepted = random_rows(2, 4, 5, 50)
    accepted.num_valid.fill_(5)
    accepted.path[0, 1], accepted.tokens[1, 3] = wild, wild
    got = check(torch.randn(2, 4, 50, device=device), accepted, 3)
    assert got.logprobs[0, 1] == got.logprobs[1, 3] == -torch.inf
    assert got.top_ids[0, 1].tolist() == got.top_ids[1, 3].tolist() == [-1, -1, -1]


def test_score_tokens_of_invalid_lengths_stays_in_bounds(device: torch.device) -> None:
    accepted = random_rows(3, 4, 5, 50)._replace(num_valid=torch.tensor(WILD, dtype=torch.int32))
    check(torch.randn(3, 4, 50, device=device), accepted, 2)


def test_score_tokens_of_nan_and_infinities(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[nan, 2.0, -inf, 2.0], [nan] * 4, [0.0, inf, 1.0, inf]]
    logits = torch.tensor([rows], device=device)
    path = torch.tensor([[0, 0, 1, 2, 2]], dtype=torch.int32)
    tokens = torch.tensor([[0, 3, 1, 1, 2]], dtype=torch.int32)
    got = check(logits, sd.Accepted(tokens, torch.tensor([5], dtype=torch.int32), path), 4)
    torch.testing.assert_close(got.logprobs.cpu().exp(), torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]))


def test_score_tokens_of_strided_logits(device: torch.device) -> None:
    wide = torch.randn(2, 7, 4100, device=device).to(torch.bfloat16)
    check(wide[:, ::2, 3:4090], random_rows(2, 4, 5, 4087), top_n=9)


def test_score_tokens_accepts_empty_batch(device: torch.device) -> None:
    scores = sd.score_tokens(torch.empty(0, 3, 5, device=device), on(device, random_rows(0, 3, 2, 5)), top_n=2)
    assert [tuple(t.shape) for t in scores] == [(0, 2), (0, 2, 2), (0, 2, 2)]


def test_score_tokens_commutes_with_batch_permutation(device: torch.device) -> None:
    logits, accepted = torch.randn(5, 3, 999, device=device), random_rows(5, 3, 4, 999)
    order = torch.tensor([3, 0, 4, 2, 1])
    straight = check(logits, accepted, 4)
    permuted = check(logits[order.to(device)], sd.Accepted(*(t[order] for t in accepted)), 4)
    for a, b in zip(straight, permuted, strict=True):
        assert torch.equal(a[order.to(device)], b)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": int32(2, 3, 8)}, "score_tokens: logits is int32, expected float32 or float16 or bfloat16"),
        ({"logits": torch.zeros(2, 3, 0)}, "score_tokens: vocab is 0, expected 1 to 2147483647"),
        ({"path": int32(3, 4)}, "score_tokens: accepted.path has shape [3, 4], expected [batch=2, accept_width]"),
        ({"tokens": int32(2, 5)}, "score_tokens: accepted.tokens has shape [2, 5], expected [batch=2, accept_width=4]"),
        ({"num_valid": torch.zeros(2)}, "score_tokens: accepted.num_valid is float32, expected int32"),
        ({"top_n": -1}, "score_tokens: top_n is -1, expected 0 to 8"),
        ({"top_n": 9}, "score_tokens: top_n is 9, expected 0 to 8"),
        ({"slots": int32(2)}, "score_tokens: slots is given, expected None, since num_logprobs is None"),
        ({"slots": int32(3), "num_logprobs": int32(4)}, "score_tokens: slots has shape [3], expected [batch=2]"),
        ({"num_logprobs": int32(1)}, "score_tokens: slots is None for batch=2, expected a tensor, or batch <= num_slots=1"),
        ({"logprobs": torch.zeros(2, 3)}, "score_tokens: out.logprobs has shape [2, 3], expected [batch=2, accept_width=4]"),
        ({"top_ids": int32(2, 4, 3)}, "score_tokens: out.top_ids has shape [2, 4, 3], expected [batch=2, accept_width=4, top_n=2]"),
        ({"top_logprobs": torch.zeros(2, 2)}, "score_tokens: out.top_logprobs has shape [2, 2], expected [batch=2, accept_width=4, top_n=2]"),
    ],
)  # fmt: skip
def test_score_tokens_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 3, 8), "top_n": 2}
    rows = {"tokens": int32(2, 4), "num_valid": int32(2), "path": int32(2, 4)}
    outputs = poisoned(2, 4, 2, torch.device("cpu"))._asdict()
    given = arguments | rows | outputs | change
    accepted = sd.Accepted(*(given.pop(name) for name in rows))
    out = sd.TokenScores(*(given.pop(name) for name in outputs))
    with pytest.raises(ValueError) as error:
        sd.score_tokens(**given, accepted=accepted, out=out if change.keys() & outputs.keys() else None)
    assert str(error.value) == message
