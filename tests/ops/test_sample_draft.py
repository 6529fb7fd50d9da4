"""sample_draft against its reference, and its distribution against Plackett-Luce."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference

WILD = [-1, 2**31 - 1]


def draw(
    logits: torch.Tensor,
    k: int,
    temperature: float | torch.Tensor = 1.0,
    seeds: int | torch.Tensor = 0,
    positions: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    id_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return draws into poisoned outputs; without slots a request per row, without positions numbered ones."""
    rows, device = len(logits), logits.device
    num_slots = rows if slots is None else 5
    if not isinstance(temperature, torch.Tensor):
        temperature = torch.full((num_slots,), temperature)
    if not isinstance(seeds, torch.Tensor):
        seeds = torch.full((num_slots,), seeds)
    if positions is None:
        positions = torch.arange(rows, dtype=torch.int32)
    there = {"seeds": seeds, "positions": positions, "temperature": temperature, "slots": slots, "id_map": id_map}
    return sd.sample_draft(
        logits,
        k,
        **{name: None if t is None else t.to(device) for name, t in there.items()},
        out=sd.TopK(
            torch.full((rows, k), -77, dtype=torch.int32, device=device),
            torch.full((rows, k), torch.nan, device=device),
        ),
    )


def check(logits: torch.Tensor, k: int, temperature: torch.Tensor, slots: torch.Tensor | None = None, id_map: torch.Tensor | None = None) -> None:  # fmt: skip
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(temperature),))
    positions = torch.randint(0, 2**31 - 1, (len(logits),), dtype=torch.int32)
    ids, logprobs = draw(logits, k, temperature, seeds, positions, slots, id_map)
    want_ids, want_logprobs = reference.sample_draft(logits.cpu(), k, seeds, positions, temperature, slots, id_map)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(logprobs.cpu().double(), want_logprobs, rtol=2e-6, atol=2e-5)
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(1, 1, 1), (3, 7, 7), (5, 127, 8), (2, 2048, 64), (3, 32000, 10), (1, 128256, 64)]
)
def test_sample_draft_matches_reference(
    device: torch.device, dtype: torch.dtype, rows: int, vocab: int, k: int
) -> None:
    check(torch.randn(rows, vocab, device=device).to(dtype) * 2, k, torch.rand(rows) + 0.3)


@pytest.mark.sanitize
def test_sample_draft_with_slots_and_id_map_matches_reference(device: torch.device) -> None:
    slots = torch.tensor([4, -1, 0, WILD[1]], dtype=torch.int32)
    temperature = torch.tensor([1.0, torch.nan, torch.nan, torch.nan, 0.0])
    id_map = torch.randperm(33).to(torch.int32)
    check(torch.randn(8, 33, device=device), 5, temperature, slots, id_map)


def test_sample_draft_of_strided_rows_and_unaligned_pointer_matches_reference(device: torch.device) -> None:
    wide = torch.randn(6, 4103, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for start in (0, 1, 5):
            check(wide.to(dtype)[::2, start : start + 4091], 9, torch.tensor([0.7, 1.0, 0.0]))


def test_sample_draft_of_several_temperatures_matches_reference(device: torch.device) -> None:
    greedy = [0.0, -1.0, math.nan, -math.inf]
    temperature = torch.tensor([*greedy, 1e-3, 0.1, 1.0, 100.0])
    logits = torch.randn(1, 200, device=device).repeat(len(temperature), 1)
    check(logits, 7, temperature)
    ids, logprobs = draw(logits, 7, temperature)
    for got, want in zip((ids, logprobs), sd.select_topk(logits[: len(greedy)], 7), strict=True):
        assert torch.equal(got[: len(greedy)], want)


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e30, math.inf])
def test_sample_draft_of_extreme_temperatures(device: torch.device, temperature: float) -> None:
    logits = torch.randn(4, 100, device=device)
    ids, logprobs = draw(logits, 3, temperature)
    if temperature < 1:
        assert torch.equal(ids[:, 0], logits.argmax(1).int()) and not logprobs[:, 0].any()
    else:
        torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(100)))
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_sample_draft_of_fewer_than_k_possible_tokens(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, nan, 2.0, -inf], [nan] * 4, [-inf] * 4, [inf, 1.0, inf, -inf]], device=device)
    ids, logprobs = draw(logits, 4)
    assert ids[0].tolist() == [2, 0, 1, 3] and ids[1].tolist() == ids[2].tolist() == [0, 1, 2, 3]
    assert sorted(ids[3, :2].tolist()) == [0, 2] and ids[3, 2:].tolist() == [1, 3]
    want = torch.full((4, 4), -inf)
    want[0, 0], want[3, :2] = 0, math.log(0.5)
    torch.testing.assert_close(logprobs.cpu(), want)


def test_sample_draft_of_masked_vocabulary(device: torch.device) -> None:
    logits = torch.full((2, 50000), -torch.inf, device=device)
    logits[:, 777::9999] = torch.randn(2, 5, device=device)
    check(logits, 20, torch.tensor([0.0, 1.0]))


def test_sample_draft_of_equal_logits(device: torch.device) -> None:
    check(torch.zeros(2, 50000, device=device), 20, torch.tensor([0.0, 1.0]))


def test_sample_draft_accepts_empty_batch(device: torch.device) -> None:
    ids, logprobs = draw(torch.empty(0, 5, device=device), 2, slots=torch.empty(0, dtype=torch.int32))
    assert ids.shape == logprobs.shape == (0, 2)


# --- distribution: every draw has its own position, so that one call draws many -----------------------------------

DRAWS = 200_000
WEIGHTS = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return chi-square in standard deviations above its mean; P(> 5) < 1e-5, seeds are fixed."""
    expected = probabilities.double() * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def plackett_luce(p: torch.Tensor, k: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each ordered draw of k."""
    result = {}
    for order in permutations(range(len(p)), k):
        left, probability = 1.0, 1.0
        for i in order:
            probability *= float(p[i]) / left
            left -= float(p[i])
        result[order] = probability
    return result


def many_draws(device: torch.device, k: int, temperature: float = 1.0, seed: int = 11) -> torch.Tensor:
    """Return [DRAWS, k] draws from WEIGHTS, one for each position of one request."""
    logits = (WEIGHTS.log() * temperature).to(device).expand(DRAWS, -1)
    return draw(logits, k, temperature, seed, slots=torch.zeros(1, dtype=torch.int32))[0].cpu()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sample_draft_follows_plackett_luce(device: torch.device, temperature: float) -> None:
    draws = many_draws(device, 3, temperature)
    want = plackett_luce(WEIGHTS, 3)
    number = {order: i for i, order in enumerate(want)}
    code = torch.full((125,), -1)
    for order, i in number.items():
        code[order[0] * 25 + order[1] * 5 + order[2]] = i
    kinds = code[draws.long() @ torch.tensor([25, 5, 1])]
    assert (kinds >= 0).all()
    assert abs(chi_square(kinds.bincount(minlength=len(want)), torch.tensor(list(want.values())))) < 5
    for place in range(3):  # the marginal of each draw
        marginal = torch.zeros(5)
        for order, probability in want.items():
            marginal[order[place]] += probability
        assert abs(chi_square(draws[:, place].bincount(minlength=5), marginal)) < 5


def test_sample_draft_follows_unequal_weights_of_a_large_vocabulary(device: torch.device) -> None:
    weights = torch.logspace(0, -5, 1000)
    weights /= weights.sum()
    logits = weights.log().to(device).expand(DRAWS // 2, -1)
    ids = draw(logits, 1, 1.0, torch.arange(DRAWS // 2))[0].cpu().flatten()
    groups = weights.cumsum(0).mul(40).long().clamp(max=39)  # groups of about equal probability
    want = torch.zeros(40).index_add_(0, groups, weights)
    assert abs(chi_square(groups[ids].bincount(minlength=40), want)) < 5


@pytest.mark.parametrize("apart_by", ["position", "row", "seed"])
def test_sample_draft_rows_are_independent(device: torch.device, apart_by: str) -> None:
    if apart_by == "position":
        draws = many_draws(device, 1).flatten()
        first, second = draws[:-1], draws[1:]
    elif apart_by == "seed":
        first, second = (many_draws(device, 1, seed=seed).flatten() for seed in (11, 12))
    else:  # two rows of each request, at the same position
        logits = WEIGHTS.log().to(device).expand(2 * DRAWS, -1)
        slots = torch.zeros(DRAWS, dtype=torch.int32)
        positions = torch.arange(DRAWS, dtype=torch.int32).repeat_interleave(2)
        draws = draw(logits, 1, 1.0, 11, positions, slots)[0].cpu()
        first, second = draws[0::2, 0], draws[1::2, 0]
    pairs = (first * 5 + second).bincount(minlength=25)
    assert abs(chi_square(pairs, torch.outer(WEIGHTS, WEIGHTS).flatten())) < 5


# --- dependence of the noise ----------------------------------------------------------------------------------------


def test_sample_draft_does_not_depend_on_batch_slot_or_k(device: torch.device) -> None:
    logits = torch.randn(6, 3000, device=device)
    seeds, positions = torch.randint(0, 2**62, (5,)), torch.randint(0, 1000, (6,), dtype=torch.int32)
    slots = torch.tensor([3, 0, 4], dtype=torch.int32)  # two rows each
    temperature = torch.tensor([1.0, 0.5, 0.7, 0.8, 0.9])
    together = draw(logits, 8, temperature, seeds, positions, slots)
    for b in range(3):
        rows = slice(2 * b, 2 * b + 2)
        moved = torch.tensor([1], dtype=torch.int32)
        there = int(slots[b])
        alone = draw(
            logits[rows].contiguous(), 5, temperature[[0, there, 2, 3, 4]], seeds[[0, there, 2, 3, 4]], positions[rows], moved
        )  # fmt: skip
        assert torch.equal(alone[0], together[0][rows, :5]) and torch.equal(alone[1], together[1][rows, :5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sample_draft_is_equal_on_both_devices(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available() or sd.cuda_version is None:
        pytest.skip("no GPU here")
    for rows, vocab in ((64, 151936), (3, 50257), (300, 32000)):
        logits = (torch.randn(rows, vocab) * 3).to(dtype)
        temperature, seeds = torch.rand(rows) * 2, torch.randint(-(2**63), 2**63 - 1, (rows,))
        here, there = (draw(x, 16, temperature, seeds) for x in (logits, logits.cuda()))
        assert torch.equal(here[0], there[0].cpu())
        torch.testing.assert_close(there[1].cpu(), here[1], rtol=2e-6, atol=2e-5)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": int32(6, 8)}, "sample_draft: logits is int32, expected float32 or float16 or bfloat16"),
        ({"k": 9}, "sample_draft: k is 9, expected 1 to 8"),
        ({"k": 0}, "sample_draft: k is 0, expected 1 to 8"),
        ({"seeds": int32(3)}, "sample_draft: seeds is int32, expected int64"),
        ({"positions": int32(5)}, "sample_draft: positions has shape [5], expected [rows=6]"),
        ({"temperature": torch.zeros(4)}, "sample_draft: temperature has shape [4], expected [num_slots=3]"),
        ({"slots": int32(4)}, "sample_draft: logits has 6 rows, expected a multiple of batch=4"),
        ({"slots": int32(0)}, "sample_draft: logits has 6 rows, expected a multiple of batch=0"),
        ({"slots": torch.zeros(3)}, "sample_draft: slots is float32, expected int32"),
        ({"id_map": int32(7)}, "sample_draft: id_map has shape [7], expected [vocab=8]"),
        ({"out": sd.TopK(int32(6, 3), torch.zeros(6, 2))}, "sample_draft: out.ids has shape [6, 3], expected [rows=6, k=2]"),
        ({"out": sd.TopK(int32(6, 2), torch.zeros(3, 2))}, "sample_draft: out.logprobs has shape [3, 2], expected [rows=6, k=2]"),
    ],
)  # fmt: skip
def test_sample_draft_error_messages(change: dict[str, object], message: str) -> None:
    arguments = {
        "logits": torch.zeros(6, 8),
        "k": 2,
        "seeds": torch.zeros(3, dtype=torch.int64),
        "positions": int32(6),
        "temperature": torch.zeros(3),
    }
    with pytest.raises(ValueError) as error:
        sd.sample_draft(**(arguments | change))
    assert str(error.value) == message
