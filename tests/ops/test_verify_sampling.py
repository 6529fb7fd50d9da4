"""verify_tree's sampled requests: draws, their distribution, and their dependence on other inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference
from specdec_kernels.reference.noise import philox
from support.exhaustive import exhaustive
from support.verification import Sampling, assert_distributed, sampling


@pytest.fixture
def device(verifier: tuple[torch.device, str | None]) -> torch.device:
    return verifier[0]


@pytest.fixture
def plan(verifier: tuple[torch.device, str | None]) -> str | None:
    return verifier[1]


def lone_roots(batch: int, positions: Tensor | None = None, device: torch.device | str = "cpu") -> sd.Tree:
    """Return trees of the root alone: the emitted token is one draw."""
    row = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    position = row if positions is None else positions.to(device=device, dtype=torch.int32)[:, None].contiguous()
    return sd.Tree(row, row - 1, position, row - 1, row - 1, row[..., None].long() + 1, row[:, 0] + 1)


def draw(logits: Tensor, parameters: Sampling, positions: Tensor | None = None, **arguments: Any) -> Tensor:
    """Draw one token for each row of logits [B, V], on their device."""
    device = logits.device
    parameters = {name: tensor.to(device) for name, tensor in parameters.items()}
    tree = lone_roots(len(logits), positions, device)
    return sd.verify_tree(logits[:, None], tree, 1, **parameters, **arguments).tokens[:, 0].cpu()


def acceptable(x: Tensor, s: Sampling, b: int, position: int) -> Iterator[int]:
    """Yield the reference's draw, then those that it may draw if probabilities and top-p have an error of 1e-6."""
    u = reference.uniform(int(s["seeds"][b]), position + 1)
    top_k, top_p, min_p = int(s["top_k"][b]), float(s["top_p"][b]), float(s["min_p"][b])
    for slack in (0.0, -1e-6, 1e-6):
        p = reference.filtered(
            x, float(s["temperature"][b]), top_k, top_p + slack if top_p < 1 else 1.0, min_p * (1 + slack)
        )
        yield from (reference.drawn(p, min(max(u + e, 0.0), 1 - 1e-12)) for e in (0.0, -1e-6, 1e-6))


def random_parameters(batch: int, vocab: int) -> Sampling:
    """Return sampling parameters: each filter on in about half of the requests; some greedy."""

    def sometimes(values: Tensor, off: float) -> list[float]:
        return torch.where(torch.rand(batch) < 0.5, values, torch.tensor(off)).tolist()

    return sampling(
        sometimes(torch.rand(batch) * 2, 0.7),
        [int(k) for k in sometimes(torch.randint(1, vocab + 2, (batch,)).float(), 0)],
        sometimes(torch.rand(batch), 1.0),
        sometimes(torch.rand(batch) ** 3, 0.0),
        torch.randint(-(2**63), 2**63 - 1, (batch,)).tolist(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 5, 31, 300, 4099])
def test_sampling_matches_reference(device: torch.device, plan: str | None, vocab: int, dtype: torch.dtype) -> None:
    batch = 40
    logits = (torch.randn(batch, vocab) * 2).to(dtype)
    logits[::5] = logits[::5].round()  # ties
    logits[:, 0] = torch.where(torch.rand(batch) < 0.2, torch.nan, logits[:, 0].float()).to(dtype)
    logits[:, vocab // 2] = 1.0  # something above -inf
    parameters = random_parameters(batch, vocab)
    positions = torch.randint(0, 2**31 - 2, (batch,))
    got = draw(logits.to(device), parameters, positions, plan=plan)
    for b, token in enumerate(got.tolist()):
        assert token in acceptable(logits[b], parameters, b, int(positions[b])), (b, parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [32000, 128256, *exhaustive(151936)])
@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "ties"])
def test_sampling_of_large_vocabularies_on_every_kernel_path(
    device: torch.device, plan: str | None, vocab: int, dtype: torch.dtype, kind: str
) -> None:
    """Lists, nuclei and ties that overflow the CUDA kernel's lists, and no filter at all."""
    parameters = sampling(
        [1.0, 0.8, 1.0, 1.0, 0.6, 1.5, 1.0, 1.0],
        [0, 50, 0, 1000, 20, 5000, 0, 1],
        [1.0, 0.9, 0.95, 1.0, 0.5, 0.99, 0.2, 1.0],
        [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.05, 0.0],
    )
    batch = len(parameters["temperature"])
    logits = torch.randn(batch, vocab)
    if kind == "peaked":
        logits = logits * 3 + 12 * (torch.rand(batch, vocab) < 1e-4)
    elif kind == "flat":
        logits = logits * 1e-2
    elif kind == "ties":
        logits = torch.randint(-2, 3, (batch, vocab)).float()
    logits = logits.to(dtype)
    got = draw(logits.to(device), parameters, plan=plan)
    assert torch.equal(got, draw(logits, parameters))  # both devices draw the same tokens
    for b, token in enumerate(got.tolist()):
        s = {name: tensor[b].item() for name, tensor in parameters.items()}
        x = logits[b].double()
        weights = torch.exp((x - x.max()) / s["temperature"])
        order = torch.argsort(x, descending=True, stable=True)
        kept = torch.ones(vocab, dtype=torch.bool)
        if 0 < s["top_k"] < vocab:
            kept &= x >= x[order[s["top_k"] - 1]]
        if s["top_p"] < 1:
            sums = torch.cumsum(torch.where(kept, weights, 0.0)[order], 0)
            last = order[int((sums < s["top_p"] * sums[-1] * (1 + 1e-6)).sum().clamp(max=vocab - 1))]
            kept &= x >= x[last]
        kept &= weights >= s["min_p"] * (1 - 1e-5)
        sums = torch.cumsum(torch.where(kept, weights, 0.0), 0) / weights[kept].sum()
        u = reference.uniform(b, 1)
        below = float(sums[token - 1]) if token > 0 else 0.0
        assert kept[token] and below - 1e-4 <= u <= float(sums[token]) + 1e-4, (b, kind)


@pytest.mark.parametrize(
    ("batch", "nodes", "vocab"),
    [pytest.param(3, 5, 3001, marks=pytest.mark.sanitize), (3, 7, 9001), (1, 33, 16411), (2, 40, 40009)],
)
def test_sampling_of_trees_of_flat_and_peaked_rows_is_equal_on_both_devices(
    device: torch.device, plan: str | None, batch: int, nodes: int, vocab: int
) -> None:
    """Greedy and sampled requests cover all paths of the CUDA kernel."""
    logits = torch.randn(batch, nodes, vocab)
    peaked = torch.rand(batch, nodes, 1) < 0.6
    logits = torch.where(peaked, logits * 3 + 12 * (torch.rand(batch, nodes, vocab) < 1e-3), logits * 0.01).bfloat16()
    for name, values in {
        "top-k": sampling([0.9] * batch, [20] * batch),
        "both": sampling([0.9] * batch, [50] * batch, [0.9] * batch, [0.01] * batch),
        "top-p": sampling([1.0] * batch, None, [0.8] * batch),
        "mixed": sampling([0.7, 0.0, 1.3][:batch], [0, 0, 3000][:batch]),
    }.items():
        position = torch.arange(nodes)
        one = {key: tensor.repeat_interleave(nodes) for key, tensor in values.items()}
        targets = draw(logits.flatten(0, 1), one, position.repeat(batch)).view(batch, nodes)
        parents = torch.tensor([[-1, *(int(torch.randint(max(0, i - 3), i, ())) for i in range(1, nodes))]] * batch)
        hits = torch.rand(batch, nodes) < 0.8
        hits[:, 1] = True
        tokens = torch.where(hits, targets.gather(1, parents.clamp(min=0)), 1).int()
        tree = sd.build_tree_from_parents(tokens, parents.int(), torch.zeros(batch, dtype=torch.int32))
        tree = tree._replace(positions=position.int().repeat(batch, 1))
        want = sd.verify_tree(logits, tree, 6, **values)
        on_device = {key: tensor.to(device) for key, tensor in values.items()}
        got = sd.verify_tree(logits.to(device), sd.Tree(*(x.to(device) for x in tree)), 6, **on_device, plan=plan)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b), name
        assert (want.num_valid > 1).all(), name


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.7, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.3, 9, 0.9, 0.05),
    ],
)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_sampling_follows_filtered_distribution(
    device: torch.device, temperature: float, top_k: int, top_p: float, min_p: float, by: str
) -> None:
    """Check 200 000 draws that differ in their seed or in their position."""
    n, vocab = 200_000, 19
    x = torch.randn(vocab) * 2
    x[4] = x[11]
    numbers = torch.arange(n)
    parameters = sampling([temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n, [77] * n)
    if by == "seed":
        parameters["seeds"] = numbers + 10**9
    tokens = draw(x.expand(n, vocab).contiguous().to(device), parameters, numbers if by == "position" else None)
    assert_distributed(tokens, reference.filtered(x, temperature, top_k, top_p, min_p))


def test_sampling_of_adjacent_positions_is_independent(device: torch.device) -> None:
    n, vocab = 200_000, 5
    x = torch.tensor([0.0, 0.5, 1.0, -0.5, 0.2])
    parameters = sampling([1.0] * n, seeds=[3] * n)
    tokens = draw(x.expand(n, vocab).contiguous().to(device), parameters, torch.arange(n)).long()
    p = reference.filtered(x, 1.0)
    assert_distributed(tokens[:-1] * vocab + tokens[1:], torch.outer(p, p).flatten())


def test_sampling_mixes_with_greedy_requests(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(6, 50, device=device)
    temperature = [0.0, 1.0, -1.0, math.nan, 2.0, 0.0]
    got = draw(logits, sampling(temperature), plan=plan)
    greedy = logits.argmax(-1).cpu()
    for b in (0, 2, 3, 5):
        assert got[b] == greedy[b]
    alone = draw(logits[[1, 4]], sampling([1.0, 2.0], seeds=[1, 4]), plan=plan)
    assert torch.equal(got[[1, 4]], alone)  # other requests of the batch change nothing


def test_sampling_parameters_follow_slots(device: torch.device, plan: str | None) -> None:
    logits = torch.randn(3, 40, device=device)
    parameters = sampling([0.0, 1.0, 1.0, 0.5, 3.0], [0, 3, 0, 0, 0], seeds=[5, 6, 7, 8, 9])
    slots = torch.tensor([4, 1, 3], dtype=torch.int32, device=device)
    got = draw(logits, parameters, slots=slots, plan=plan)
    chosen = {name: tensor[[4, 1, 3]] for name, tensor in parameters.items()}
    assert torch.equal(got, draw(logits, chosen, plan=plan))


@pytest.mark.sanitize
def test_sampling_with_extreme_parameters(device: torch.device, plan: str | None) -> None:
    x = torch.tensor([1.0, 3.0, -torch.inf, 3.0, 0.0, 2.0])
    big, n = 1e30, 12
    parameters = sampling(
        [1e-30, 1e-5, big, torch.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [0, 0, 0, 0, -3, 6, 2**31 - 1, 1, 0, 0, 0, 0],
        [1.0, 1.0, 1.0, 1.0, 2.0, math.nan, 1.0, 1.0, 0.0, -1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0, -1.0, math.nan, 0.0, 0.0, 0.0, 0.0, 1.0, 7.0],
    )
    for _ in range(8):
        parameters["seeds"] += 100
        got = draw(x.expand(n, 6).contiguous().to(device), parameters, plan=plan).tolist()
        assert all(token in (1, 3) for token in got[:2] + got[7:])  # the best two, tied
        assert all(token != 2 for token in got)


def test_sampling_of_infinite_and_nan_logits(device: torch.device, plan: str | None) -> None:
    logits = torch.zeros(3, 9, device=device)
    logits[0, 4:6] = torch.inf
    logits[1] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[2, 8] = -1e30
    status = torch.zeros(3, dtype=torch.int32, device=device)
    got = draw(logits, sampling([1.0] * 3), status=status, plan=plan)
    assert got[0] in (4, 5) and got[1] == -1 and got[2] == 8
    assert status.tolist() == [0, sd.Status.BAD_LOGITS, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [31, 64, 1003])
def test_sampling_with_vocab_mask_and_logit_bias(
    device: torch.device, plan: str | None, temperature: float, vocab: int
) -> None:
    """The result equals that of logits biased and masked in advance."""
    batch, words = 20, (vocab + 31) // 32
    logits = torch.randn(batch, vocab)
    allowed = torch.rand(batch, vocab) < 0.3
    allowed[:, 3] = True
    bits = torch.zeros(batch, words * 32, dtype=torch.int64)
    bits[:, :vocab] = allowed
    bits[:, vocab:] = torch.rand(batch, words * 32 - vocab) < 0.5  # beyond the vocabulary: ignored
    packed = (bits.view(batch, words, 32) << torch.arange(32)).sum(-1)
    vocab_mask = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)[:, None].to(device)
    bias = torch.randn(batch, vocab + 3)[:, 2:-1].to(device)
    parameters = sampling([temperature] * batch, [0, 4] * 10, [1.0, 1.0, 0.7, 0.7] * 5)
    got = draw(logits.to(device), parameters, vocab_mask=vocab_mask, logit_bias=bias, plan=plan)
    want = draw(torch.where(allowed, logits + bias.cpu(), -torch.inf).to(device), parameters, plan=plan)
    assert torch.equal(got, want)


def chain_of(tokens: list[list[int]], first_position: int, device: torch.device) -> sd.Tree:
    """Return chains under the root, one for each row of tokens."""
    batch, nodes = len(tokens), len(tokens[0])
    ids = torch.arange(nodes, dtype=torch.int32).repeat(batch, 1)
    child = torch.where(ids + 1 < nodes, ids + 1, -1)
    fields = (torch.tensor(tokens, dtype=torch.int32), ids - 1, ids + first_position, child, torch.full_like(ids, -1))
    mask, count = torch.ones(batch, nodes, 1, dtype=torch.int64), torch.full((batch,), nodes, dtype=torch.int32)
    return sd.Tree(*(x.to(device) for x in (*fields, mask, count)))


def markov_text(table: Tensor, parameters: Sampling, length: int, drafts: Tensor | None) -> list[int]:
    """Return a text of the target with next-token logits table[token], verified along random chains."""
    device, text = table.device, [0]
    round_ = 0
    while len(text) <= length:
        guess = [] if drafts is None else drafts[round_ % len(drafts)].tolist()
        nodes = [text[-1], *guess]
        tree = chain_of([nodes], len(text) - 1, device)
        out = sd.verify_tree(table[torch.tensor(nodes, device=device)][None], tree, len(nodes), **parameters)
        text += out.tokens[0, : int(out.num_valid[0])].tolist()
        round_ += 1
    return text[: length + 1]


def test_sampled_text_does_not_depend_on_draft(device: torch.device) -> None:
    vocab = 6
    table = torch.randn(vocab, vocab, device=device)
    for seed in range(5):
        parameters = {k: v.to(device) for k, v in sampling([1.2], [5], [0.95], seeds=[seed]).items()}
        plain = markov_text(table, parameters, 60, None)
        assert len(set(plain)) > 2
        for depth in (1, 3, 7):
            assert markov_text(table, parameters, 60, torch.randint(0, vocab, (50, depth))) == plain


def test_sampling_noise_is_philox() -> None:
    """Compare with known answers of Random123, and with the words that a draw uses."""
    assert philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    all_ones = 2**32 - 1
    assert philox(2**64 - 1, (all_ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
