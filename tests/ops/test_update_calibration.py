"""update_calibration and its use in expand_root and expand_tree: overconfident and underconfident drafts.

The target is a table of distributions over the next token; drafts are right, or distorted by a temperature.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import pytest
import torch

import specdec_kernels as sd
from specdec_kernels.reference import draft as reference
from support.random_drafts import on, random_draft

INT = torch.int32
VOCAB, TOPK, STEPS, NODES = 48, 4, 3, 12


def target_table() -> torch.Tensor:
    """Return log p [V, V] of the token that follows each; some distributions are nearly certain, others open."""
    sharpness = torch.linspace(0.5, 5, VOCAB)[torch.randperm(VOCAB)]
    return torch.log_softmax(torch.randn(VOCAB, VOCAB) * sharpness[:, None], 1)


class Rounds(NamedTuple):
    expected: float
    emitted: int


def run(
    device: torch.device,
    temperature: float,
    calibration: sd.Calibration,
    target: torch.Tensor,
    rounds: int,
    learn: bool,
) -> Rounds:
    """Draft, verify and learn; return expected and emitted tokens."""
    batch, k = 64, TOPK
    lens = torch.full((batch,), 100, dtype=INT, device=device)
    target = target.to(device)
    draft = (target / temperature).contiguous()
    sampling = {"temperature": torch.ones(batch, device=device), "seeds": torch.arange(batch, device=device)}
    promised, emitted = 0.0, 0
    for _ in range(rounds):
        roots = torch.randint(0, VOCAB, (batch,), device=device)
        sampling["seeds"] = sampling["seeds"] + batch
        table = calibration.table
        candidates, frontier = sd.expand_root(*sd.select_topk(draft[roots], k), lens, STEPS, calibration=table)
        tokens = frontier.tokens
        for step in range(2, STEPS + 1):
            ids, logprobs = (t.view(batch, k, k) for t in sd.select_topk(draft[tokens.flatten().long()], k))
            tokens = sd.expand_tree(ids, logprobs, step, candidates, frontier, lens, calibration=table).tokens
        tree = sd.build_tree(candidates, roots.to(INT), lens, NODES)
        scores = torch.cat([candidates.scores.new_zeros(batch, 1), candidates.scores.topk(NODES - 1).values], 1)
        budget = torch.tensor([batch * NODES], dtype=INT, device=device)
        promised += float(sd.allocate_nodes(scores, batch, budget_levels=budget).expected)
        accepted = sd.verify_tree(target[tree.tokens.long()], tree, STEPS + 1, **sampling)
        emitted += int(accepted.num_valid.sum())
        if learn:
            sd.update_calibration(calibration, tree, scores, accepted)
    return Rounds(promised, emitted)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_calibrated_scores_predict_acceptance(device: torch.device, temperature: float) -> None:
    target = target_table()
    identity = sd.make_calibration(STEPS, torch.empty(0, device=device))
    before = run(device, temperature, identity, target, 40, learn=False)
    assert torch.equal(identity.table.cpu(), torch.tensor([[1.0, 0.0]] * STEPS))
    off = before.expected / before.emitted - 1
    assert abs(off) < 0.03 if temperature == 1 else abs(off) > 0.05

    learnt = sd.make_calibration(STEPS, torch.empty(0, device=device))
    run(device, temperature, learnt, target, 40, learn=True)  # a few thousand nodes of each depth
    after = run(device, temperature, learnt, target, 80, learn=False)
    assert after.expected == pytest.approx(after.emitted, rel=0.03)
    slopes = learnt.table[:, 0].cpu()
    assert bool((slopes > 0.85).all() if temperature == 2 else (slopes < 1.15).all())


def best_nodes(
    log_p: torch.Tensor, said: list[list[list[tuple[int, float]]]], root: int, k: int, nodes: int
) -> list[float]:
    """Return the expected tokens (float64) of the best 1, 2, ... nodes, chosen by the draft's scores per depth."""
    heap: list[tuple[float, float, int, int]] = [(0.0, 0.0, root, 0)]  # -score, log p of the target, token, depth
    worth, total = [], 0.0
    while len(worth) < nodes:
        score, true, token, depth = heapq.heappop(heap)
        total += float(torch.tensor(true, dtype=torch.float64).exp())
        worth.append(total)
        for child, logprob in said[min(depth, STEPS - 1)][token][:k]:
            heapq.heappush(heap, (score - logprob, true + float(log_p[token, child]), child, depth + 1))
    return worth


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_calibrated_tree_emits_at_least_as_much_as_chain(temperature: float) -> None:
    target = target_table()
    calibration = sd.make_calibration(STEPS, torch.empty(0))
    run(torch.device("cpu"), temperature, calibration, target, 40, learn=True)
    log_p = target.double()
    values, ids = torch.log_softmax(log_p / temperature, 1).topk(TOPK)
    said = [
        [
            list(zip(i, v, strict=True))
            for i, v in zip(ids.tolist(), reference.calibrated(calibration.table, d, values).tolist(), strict=True)
        ]
        for d in range(1, STEPS + 1)
    ]
    trees, chains = (
        torch.tensor([best_nodes(log_p, said, root, k, 16) for root in range(VOCAB)], dtype=torch.float64).mean(0)
        for k in (TOPK, 1)
    )
    assert bool((trees >= chains - 1e-12).all())
    assert float(trees[-1]) > 1.05 * float(chains[-1])


def random_round(batch: int, nodes: int) -> tuple[sd.Tree, torch.Tensor, sd.Accepted]:
    tree, scores = random_draft(batch, nodes, 7)
    scores[torch.rand(scores.shape) < 0.05] = torch.nan
    accepted = sd.verify_tree(3 * torch.randn(batch, nodes, 7), tree, 5)
    accepted.num_valid[0] = 0
    return tree, scores, accepted


@pytest.mark.sanitize
@pytest.mark.parametrize(("batch", "nodes", "depths"), [(1, 1, 1), (3, 9, 2), (40, 30, 4), (2, 256, 64)])
def test_update_calibration_matches_reference(device: torch.device, batch: int, nodes: int, depths: int) -> None:
    want = sd.make_calibration(depths, torch.empty(0))
    want.table.copy_(torch.stack([0.4 + torch.rand(depths), torch.rand(depths) - 0.5], 1))
    for _ in range(3):
        tree, scores, accepted = random_round(batch, nodes)
        got = sd.Calibration(*(field.clone().to(device) for field in want))
        reference.update_calibration(want, tree, scores, accepted)
        there = on(device, tree), scores.to(device), sd.Accepted(*(field.to(device) for field in accepted))
        sd.update_calibration(got, *there)
        learnt = [field.clone() for field in got]
        sd.update_calibration(got, *there[:2], there[2]._replace(num_valid=torch.zeros_like(there[2].num_valid)))
        assert all(torch.equal(a, b) for a, b in zip(got, learnt, strict=True))  # empty rounds teach nothing
        counts = got.counts.cpu()
        assert int((counts[..., :2] - want.counts[..., :2]).abs().sum()) <= 4  # nodes on the border of two bins
        assert int((counts.sum(1) - want.counts.sum(1))[:, 2].abs().max()) <= 65536
        want = sd.Calibration(got.table.cpu(), counts)


def test_update_calibration_accepts_other_tree_than_verified(device: torch.device) -> None:
    """The draft's tree is 9 -> (1 -> 2 -> (3, 4), 5); the verified path is 1, 2, 4, 6."""
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 7]], dtype=INT)
    parents = torch.tensor([[-1, 0, 1, 2, 2, 0, 5]], dtype=INT)
    tree = on(device, sd.build_tree_from_parents(tokens, parents, torch.tensor([10], dtype=INT)))
    scores = torch.tensor([[0.0, -0.5, -1.0, -1.5, -1.6, -1.0, -2.0]], device=device)
    accepted = sd.Accepted(
        torch.tensor([[1, 2, 4, 6, 8]], dtype=INT, device=device),
        torch.tensor([4], dtype=INT, device=device),
        torch.tensor([[0, 1, 3, 6, 6]], dtype=INT, device=device),  # of the verified tree
    )
    calibration = sd.make_calibration(3, scores)
    sd.update_calibration(calibration, tree, scores, accepted)
    assert calibration.counts.sum(1)[:, :2].tolist() == [[2, 1], [1, 1], [2, 1]]


def test_update_calibration_converges_and_forgets(device: torch.device) -> None:
    tree = sd.build_tree_from_parents(
        torch.tensor([[0, 1]] * 100, dtype=INT), torch.tensor([[-1, 0]] * 100, dtype=INT), torch.zeros(100, dtype=INT)
    )
    scores = torch.tensor([[0.0, 0.0]] * 100)
    scores[:, 1] = torch.log(torch.tensor(0.9))
    calibration = sd.make_calibration(1, torch.empty(0, device=device))

    def learn(share: int, rounds: int) -> float:
        """Accept `share` of 100 nodes that the draft scores 0.9; return the calibrated score of 0.9."""
        tokens = torch.full((100, 1), 2, dtype=INT)
        tokens[:share] = 1
        accepted = sd.Accepted(tokens, torch.ones(100, dtype=INT), torch.zeros(100, 1, dtype=INT))
        raw = torch.tensor([[0.9]]).log().to(device)
        for _ in range(rounds):
            said, _ = sd.expand_root(
                torch.ones(1, 1, dtype=INT, device=device),
                raw,
                torch.zeros(1, dtype=INT, device=device),
                1,
                calibration=calibration.table,
            )
            scores[:, 1] = said.scores[0, 0].cpu()
            sd.update_calibration(
                calibration, on(device, tree), scores.to(device), sd.Accepted(*(f.to(device) for f in accepted))
            )
        want = reference.fit_platt(calibration.counts[0].cpu())
        torch.testing.assert_close(calibration.table[0].double().cpu(), want, rtol=1e-3, atol=1e-3)
        return float(reference.calibrated(calibration.table.cpu(), 1, raw.cpu()).exp())

    assert learn(60, 40) == pytest.approx(0.6, abs=0.01)
    assert learn(30, 500) == pytest.approx(0.3, abs=0.01)
    assert 1 << 13 <= int(calibration.counts[:, :, 0].sum()) <= 1 << 14


@pytest.mark.sanitize
def test_expand_ops_apply_calibration(device: torch.device) -> None:
    table = torch.tensor([[0.5, 0.3], [2.0, -1.0], [1.0, 0.0]], device=device)
    lens = torch.zeros(2, dtype=INT, device=device)
    k, ids = 3, torch.arange(6, dtype=INT, device=device).view(2, 3)
    logprobs = torch.log_softmax(3 * torch.randn(2, 3, 9), -1).topk(3).values.to(device)
    first = logprobs[:, 0].contiguous()
    candidates, frontier = sd.expand_root(ids, first, lens, 4, calibration=table)
    want = reference.calibrated(table.cpu(), 1, first.cpu())
    torch.testing.assert_close(candidates.scores[:, :k].double().cpu(), want, rtol=2e-6, atol=1e-6)
    for step in (2, 3, 4):
        sd.expand_tree(
            ids[:, None].repeat(1, k, 1).contiguous(), logprobs, step, candidates, frontier, lens, calibration=table
        )
        new = slice(k + (step - 2) * k * k, k + (step - 1) * k * k)
        above = candidates.scores.gather(1, candidates.parents[:, new].long())
        got = (candidates.scores[:, new] - above).view(2, k, k)
        torch.testing.assert_close(
            got.double().cpu(), reference.calibrated(table.cpu(), step, logprobs.cpu()), rtol=1e-4, atol=1e-5
        )

    spread = -torch.logspace(-7, 2, 64, device=device)[None].repeat(2, 1)
    ids = torch.arange(64, dtype=INT, device=device).repeat(2, 1)
    rising = sd.expand_root(ids, spread.contiguous(), lens, 1, calibration=table)[0].scores
    assert bool((rising.diff(dim=1) <= 1e-6).all()) and bool((rising <= 0).all())
    wild = torch.tensor([[torch.nan, -torch.inf, 1.0]] * 2, device=device)
    assert (
        sd.expand_root(ids[:, :3].contiguous(), wild, lens, 1, calibration=table)[0].scores[0, :2].tolist()
        == [-torch.inf] * 2
    )


@pytest.mark.sanitize
def test_update_calibration_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    wild = torch.tensor([-(2**31), -1, 0, 1, 3, 2**31 - 1], dtype=INT)
    for _ in range(20):
        tree, scores, accepted = random_round(3, 6)
        fields = {
            name: wild[torch.randint(0, 6, getattr(tree, name).shape)] for name in ("parents", "positions", "num_nodes")
        }
        fields["positions"] = fields["positions"] % 1000
        accepted = sd.Accepted(*(wild[torch.randint(0, 6, field.shape)] for field in accepted))
        calibration = sd.make_calibration(2, torch.empty(0, device=device))
        calibration.table[0] = torch.nan
        there = sd.Accepted(*(field.to(device) for field in accepted))
        sd.update_calibration(calibration, on(device, tree._replace(**fields)), scores.to(device), there)
        assert int(calibration.counts[0].abs().sum()) == 0 and int(calibration.counts.min(2).values.max()) <= 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 5)}, "update_calibration: scores has shape [2, 5], expected [batch=2, num_nodes=4]"),
        ({"calibration": sd.Calibration(torch.zeros(2, 3), torch.zeros(2, 16, 3).long())}, "update_calibration: calibration.table has shape [2, 3], expected [num_depths, 2]"),
        ({"calibration": sd.Calibration(torch.zeros(2, 2), torch.zeros(2, 16, 3))}, "update_calibration: calibration.counts is float32, expected int64"),
    ],
)  # fmt: skip
def test_update_calibration_error_messages(change: dict[str, Any], message: str) -> None:
    tree, scores, accepted = random_round(2, 4)
    given = {"calibration": sd.make_calibration(2, scores), "tree": tree, "scores": scores, "accepted": accepted}
    with pytest.raises(ValueError) as error:
        sd.update_calibration(**(given | change))
    assert str(error.value) == message


def test_calibration_error_messages() -> None:
    tree, scores, accepted = random_round(2, 4)
    with pytest.raises(ValueError) as number:
        sd.make_calibration(65, scores)
    assert str(number.value) == "make_calibration: num_depths is 65, expected 1 to 64"
    with pytest.raises(TypeError) as kind:
        sd.update_calibration((scores, scores), tree, scores, accepted)  # type: ignore[arg-type]
    assert str(kind.value) == "update_calibration: calibration is a tuple, expected a Calibration"
    with pytest.raises(ValueError) as shape:
        sd.expand_root(tree.tokens, scores, tree.num_nodes, 1, calibration=torch.zeros(65, 2))
    assert str(shape.value) == "expand_root: num_depths is 65, expected 1 to 64"


@pytest.mark.parametrize("extreme", [2**63 - 1, -(2**63)])
def test_update_calibration_of_extreme_counts_wraps(device: torch.device, extreme: int) -> None:
    """UBSan (./build.sh dev --sanitize) reports sums that are not wrapped."""
    tokens, parents = torch.tensor([[9, 1]], dtype=INT), torch.tensor([[-1, 0]], dtype=INT)
    tree = on(device, sd.build_tree_from_parents(tokens, parents, torch.tensor([10], dtype=INT)))
    accepted = sd.Accepted(*(torch.tensor(x, dtype=INT, device=device) for x in ([[1, 2]], [2], [[0, 1]])))
    scores = torch.tensor([[0.0, -0.5]], device=device)
    calibration = sd.make_calibration(1, scores)
    calibration.counts.fill_(extreme)
    sd.update_calibration(calibration, tree, scores, accepted)
    assert bool(calibration.table.isfinite().all())
    # The sum over 16 bins is 1 - 16 or 1, so nothing is halved; only the bin of the node has changed.
    changed = (calibration.counts[0] != extreme).any(1).nonzero().flatten().tolist()
    assert len(changed) == 1
    assert int(calibration.counts[0, changed[0], 0]) == (-(2**63) if extreme > 0 else extreme + 1)
