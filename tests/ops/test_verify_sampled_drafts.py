"""verify_tree with sampled candidates: the target's distribution, and the acceptance rates of theory.

The algorithms come first, by enumeration of every draft of a tiny vocabulary; then the op.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import specdec_kernels as sd
from specdec_kernels.reference import verify as reference
from support.devices import HAS_CUDA
from support.verification import Sampling, assert_distributed, sampling, tree_of

Text = tuple[int, ...]
Outcomes = dict[Text, float]  # emitted tokens, and their probability


def softmax_table(vocab: int, sharpness: float = 1.5) -> Tensor:
    """Return a Markov model: the distribution [V] that follows each token."""
    return torch.softmax(torch.randn(vocab, vocab, dtype=torch.float64) * sharpness, -1)


def draws(q: Tensor, count: int) -> Iterator[tuple[list[int], float]]:
    """Return every ordered draw of `count` tokens without replacement, with its probability."""
    for drawn in itertools.permutations(range(len(q)), count):
        chance, left = 1.0, 1.0
        for d in drawn:
            chance *= float(q[d]) / left
            left -= float(q[d])
        yield list(drawn), chance


def assert_target_text(outcomes: Outcomes, p: Tensor, length: int) -> None:
    """Check that outcomes, continued by the target itself, follow its distribution of texts after token 0."""
    assert sum(outcomes.values()) == pytest.approx(1, abs=1e-12)
    for text in itertools.product(range(len(p)), repeat=length):
        got, want = 0.0, 1.0
        for i, token in enumerate(text):
            want *= float(p[(0, *text)[i], token])
        for emitted, chance in outcomes.items():
            if emitted[:length] == text[: len(emitted)]:
                for i in range(len(emitted), length):
                    chance *= float(p[(0, *text)[i], text[i]])
                got += chance
        assert got == pytest.approx(want, abs=1e-9)


def walk(p: Tensor, q: Tensor, shape: list[int], token: int, chance: float, text: Text, outcomes: Outcomes) -> None:
    """Enumerate all drafts and coins of a tree: shape[0] children of the root, shape[1] children of each, and so on."""
    for drawn, drawn_chance in draws(q[token], shape[0] if shape else 0):
        accepted, bonus = reference.rejection(p[token], q[token], drawn)
        for d, accepted_chance in zip(drawn, accepted, strict=True):
            if accepted_chance > 0:
                walk(p, q, shape[1:], d, chance * drawn_chance * accepted_chance, (*text, d), outcomes)
        for y, bonus_chance in enumerate(bonus.tolist()):
            outcomes[(*text, y)] += chance * drawn_chance * bonus_chance


@pytest.mark.parametrize("shape", [[1], [1, 1, 1], [2], [3, 1], [2, 2], [4], [3, 2]], ids=str)
def test_recursive_rejection_keeps_target_distribution(shape: list[int]) -> None:
    p, q = softmax_table(4), softmax_table(4)
    p[1, 2] = 0  # filtered out
    p[1] /= p[1].sum()
    outcomes: Outcomes = defaultdict(float)
    walk(p, q, shape, 0, 1.0, (), outcomes)
    assert_target_text(outcomes, p, len(shape) + 1)


def test_rejection_accepts_one_draft_at_overlap_of_p_and_q() -> None:
    p, q = softmax_table(5)[0], softmax_table(5)[0]
    rate = sum(chance * reference.rejection(p, q, drawn)[0][0] for drawn, chance in draws(q, 1))
    assert rate == pytest.approx(float(torch.minimum(p, q).sum()))


def chains(q: Tensor, length: int) -> Iterator[tuple[list[int], float]]:
    for drawn in itertools.product(range(len(q)), repeat=length):
        chance = 1.0
        for before, d in itertools.pairwise((0, *drawn)):
            chance *= float(q[before, d])
        yield list(drawn), chance


def block_outcomes(p: Tensor, q: Tensor, length: int) -> Outcomes:
    outcomes: Outcomes = defaultdict(float)
    for drawn, chance in chains(q, length):
        nodes = torch.tensor([0, *drawn])
        accepted, bonus = reference.block_rejection(p[nodes], q[nodes[:-1]], drawn)
        for n, accepted_chance in enumerate(accepted):
            for y, y_chance in enumerate(bonus[n].tolist()):
                outcomes[(*drawn[:n], y)] += chance * accepted_chance * y_chance
    return outcomes


def mean_length(outcomes: Outcomes) -> float:
    return sum(len(text) * chance for text, chance in outcomes.items())


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_block_verification_keeps_target_distribution(length: int) -> None:
    p, q = softmax_table(3), softmax_table(3)
    outcomes = block_outcomes(p, q, length)
    assert_target_text(outcomes, p, length + 1)
    one_by_one: Outcomes = defaultdict(float)
    walk(p, q, [1] * length, 0, 1.0, (), one_by_one)
    if length == 1:
        assert mean_length(outcomes) == pytest.approx(mean_length(one_by_one))
    else:
        assert mean_length(outcomes) > mean_length(one_by_one)


@pytest.mark.parametrize("choose", ["reordered", "pruned"])
def test_rejection_of_reordered_draws_is_biased(choose: str) -> None:
    """A negative control: the likelier of two draws goes first, or is the only one."""
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.5, 0.3, 0.2])
    got = torch.zeros(3, dtype=torch.float64)
    for drawn, chance in draws(q, 2):
        ranked = sorted(drawn, key=lambda d: -float(q[d]))
        ranked = ranked[:1] if choose == "pruned" else ranked
        accepted, bonus = reference.rejection(p, q, ranked)
        got += chance * bonus
        for d, accepted_chance in zip(ranked, accepted, strict=True):
            got[d] += chance * accepted_chance
    assert float(got.sum()) == pytest.approx(1) and (got - p).abs().max() > 0.05


# --- the op ---


def drawn_trees(
    parents: list[int], n: int, draft: Tensor, draft_temperature: float, id_map: Tensor | None = None
) -> sd.Tree:
    """Return n trees of one shape below token 0; children are Gumbel draws from the draft's logits [V, Vd]."""
    shape = tree_of(parents, [0] * len(parents))
    depth = [0] * len(parents)
    tokens = torch.zeros(n, len(parents), dtype=torch.int64)
    for node in range(len(parents)):
        children = [c for c in range(1, len(parents)) if parents[c] == node]
        for c in children:
            depth[c] = depth[node] + 1
        if children:
            q = torch.log_softmax(draft[tokens[:, node]].double() / draft_temperature, -1)
            gumbel = -torch.log(-torch.log(torch.rand(q.shape, dtype=torch.float64)))
            drawn = torch.topk(q + gumbel, len(children)).indices
            tokens[:, children] = drawn if id_map is None else id_map[drawn].long()
    rows = sd.Tree(*(field.expand(n, *field.shape[1:]).contiguous() for field in shape))
    positions = torch.tensor(depth, dtype=torch.int32).repeat(n, 1)
    return rows._replace(tokens=tokens.int(), positions=positions)


CHAIN_1, CHAIN_3 = [-1, 0], [-1, 0, 1, 2]
STAR, TREE = [-1, 0, 0, 0], [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def verify(
    device: torch.device,
    tree: sd.Tree,
    target: Tensor,
    draft: Tensor,
    parameters: Sampling,
    draft_temperature: float | None = None,
    id_map: Tensor | None = None,
    **arguments: bool,
) -> sd.Accepted:
    """Run the op on trees whose logits follow from their tokens; a node's draft row is that of its parent's index."""
    n, nodes = tree.tokens.shape
    target, draft = target.to(device), draft.to(device)
    tree = sd.Tree(*(field.to(device) for field in tree))
    given: dict[str, Tensor] = {name: tensor.to(device) for name, tensor in parameters.items()}
    if draft_temperature is not None:
        given["draft_temperature"] = torch.full((n,), draft_temperature, device=device)
    if id_map is not None:
        given["id_map"] = id_map.to(device)
    got = sd.verify_tree(
        target[tree.tokens.long()],
        tree,
        nodes,
        draft_logits=draft[tree.tokens.long()],
        draft_rows=tree.parents,
        **given,
        **arguments,
    )
    return sd.Accepted(*(x.cpu() for x in got))


def assert_first_two(got: sd.Accepted, p: Tensor) -> None:
    """Check that the first two tokens follow the target; the second is drawn from it if the op emitted one."""
    vocab = len(p)
    first = got.tokens[:, 0].long()
    second = torch.multinomial(p[first], 1)[:, 0]
    if got.tokens.shape[1] > 1:
        second = torch.where(got.num_valid > 1, got.tokens[:, 1].long(), second)
    assert_distributed(first * vocab + second, (p[0][:, None] * p).flatten())


def assert_rate(hits: Tensor, expected: float) -> None:
    deviation = (expected * (1 - expected) / len(hits)) ** 0.5
    assert abs(float(hits.double().mean()) - expected) < 5.5 * deviation + 1e-6


def distributions(target: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return torch.stack([reference.filtered(x, temperature, top_k, top_p, min_p) for x in target])


FILTERS = [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.7, 0.0), (1.0, 5, 0.9, 0.1)]


@pytest.mark.parametrize("parents", [CHAIN_3, STAR, TREE], ids=["chain", "star", "tree"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_verify_sampled_tree_emits_target_distribution(
    device: torch.device, parents: list[int], filters: tuple[float, int, float, float]
) -> None:
    n, vocab, draft_temperature = 120_000, 6, 1.2
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, vocab)
    tree = drawn_trees(parents, n, draft, draft_temperature)
    temperature, top_k, top_p, min_p = filters
    parameters = sampling([temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n)
    got = verify(device, tree, target, draft, parameters, draft_temperature)
    assert_first_two(got, distributions(target, *filters))
    assert int(got.num_valid.max()) == len({0, *parents}) or parents is TREE


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("parents", [CHAIN_1, CHAIN_3, STAR, TREE], ids=["one", "chain", "star", "tree"])
def test_verify_sampled_tree_with_reduced_draft_vocabulary(
    device: torch.device, parents: list[int], block: bool
) -> None:
    n, vocab = 120_000, 7
    id_map = torch.tensor([5, 0, 3, 2], dtype=torch.int32)
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, 4)
    tree = drawn_trees(parents, n, draft, 0.9, id_map)
    parameters = sampling([0.8] * n, [5] * n)
    got = verify(device, tree, target, draft, parameters, 0.9, id_map, block_verification=block)
    p = distributions(target, 0.8, 5)
    assert_first_two(got, p)
    if len(parents) == 2:
        q = torch.zeros(vocab, dtype=torch.float64)
        q[id_map.long()] = torch.softmax(draft[0].double() / 0.9, -1)
        assert_rate(got.num_valid == 2, float(torch.minimum(p[0], q).sum()))


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(1.0, None), (0.6, 1.5)])
def test_verify_sampled_chain_has_theoretical_acceptance_rate(
    device: torch.device, temperature: float, draft_temperature: float | None
) -> None:
    n, vocab = 150_000, 5
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, vocab)
    p, q = distributions(target, temperature), distributions(draft, draft_temperature or temperature)
    tree = drawn_trees(CHAIN_3, n, draft, draft_temperature or temperature)
    parameters = sampling([temperature] * n)
    one_by_one: Outcomes = defaultdict(float)
    walk(p, q, [1, 1, 1], 0, 1.0, (), one_by_one)
    for block, outcomes in ((False, one_by_one), (True, block_outcomes(p, q, 3))):
        got = verify(device, tree, target, draft, parameters, draft_temperature, block_verification=block)
        assert_first_two(got, p)
        for length in range(1, 5):
            rate = sum(chance for text, chance in outcomes.items() if len(text) == length)
            assert_rate(got.num_valid == length, rate)


def test_verify_sampled_tree_accepts_all_of_a_perfect_draft(device: torch.device) -> None:
    n, vocab = 2000, 50
    table = torch.randn(vocab, vocab)
    tree = drawn_trees(CHAIN_3, n, table, 0.9)
    for block in (False, True):
        got = verify(device, tree, table, table, sampling([0.9] * n), block_verification=block)
        assert (got.num_valid == 4).all()
        assert torch.equal(got.tokens[:, :3], tree.tokens[:, 1:])


def test_verify_tree_without_sampled_candidates_ignores_draft_logits(device: torch.device) -> None:
    """Rows of -1, greedy requests and greedy drafts; sampled requests in the batch change nothing."""
    n, vocab = 400, 20
    target, draft = torch.randn(vocab, vocab, device=device), torch.randn(vocab, vocab, device=device)
    tree = sd.Tree(*(x.to(device) for x in drawn_trees(TREE, n, draft.cpu(), 1.0)))
    parameters = {k: v.to(device) for k, v in sampling([0.0, 1.0, 0.5, 1.0] * (n // 4), [0, 7] * (n // 2)).items()}
    rows = tree.parents.clone()
    rows[1::4] = -1
    draft_temperature = torch.tensor([1.0, 1.0, 0.0, 1.0] * (n // 4), device=device)
    logits, draft_logits = target[tree.tokens.long()], draft[tree.tokens.long()]
    want = sd.verify_tree(logits, tree, 4, **parameters)
    for block in (False, True):
        got = sd.verify_tree(
            logits,
            tree,
            4,
            draft_logits=draft_logits,
            draft_rows=rows,
            draft_temperature=draft_temperature,
            block_verification=block,
            **parameters,
        )
        same = torch.arange(n) % 4 != 3
        assert all(torch.equal(a[same], b[same]) for a, b in zip(got, want, strict=True))
        assert not torch.equal(got.tokens, want.tokens)


def test_verify_tree_mixes_sampled_and_other_candidates(device: torch.device) -> None:
    """The root has sampled children; the first child has one that is not sampled."""
    n, vocab = 120_000, 5
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, vocab)
    tree = drawn_trees([-1, 0, 0, 1, 1], n, draft, 1.0)
    tree.tokens[:, 3:] = torch.tensor([1, 2], dtype=torch.int32)
    rows = tree.parents.clone()
    rows[:, 3:] = -1
    move = [x.to(device) for x in (target[tree.tokens.long()], draft[tree.tokens.long()], rows)]
    parameters = {k: v.to(device) for k, v in sampling([1.0] * n).items()}
    tree = sd.Tree(*(x.to(device) for x in tree))
    for block in (False, True):
        got = sd.verify_tree(
            move[0], tree, 5, draft_logits=move[1], draft_rows=move[2], block_verification=block, **parameters
        )
        assert_first_two(sd.Accepted(*(x.cpu() for x in got)), distributions(target, 1.0))


def test_verify_sampled_tree_skips_impossible_children(device: torch.device) -> None:
    """A token of probability 0, outside the map, out of range, or repeated changes nothing."""
    n, vocab = 120_000, 6
    id_map = torch.tensor([4, 1, 0, 3], dtype=torch.int32)
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, 4)
    draft[:, 2] = -torch.inf  # token 0
    drawn = drawn_trees([-1, 0, 0], n, draft, 1.0, id_map).tokens
    tree = drawn_trees([-1, 0, 0, 0, 0, 0, 0], n, torch.zeros(vocab, vocab), 1.0)
    first, second = drawn[:, 1], drawn[:, 2]
    junk = [torch.full_like(first, token) for token in (0, 5, 2**30)]
    tree.tokens[:, 1:] = torch.stack([junk[0], first, junk[1], first, second, junk[2]], 1)
    safe = tree.tokens.clamp(max=vocab - 1).long()
    parameters = {k: v.to(device) for k, v in sampling([1.0] * n).items()}
    got = sd.verify_tree(
        target[safe].to(device),
        sd.Tree(*(x.to(device) for x in tree)),
        2,
        draft_logits=draft[safe].to(device),
        draft_rows=tree.parents.to(device),
        id_map=id_map.to(device),
        **parameters,
    )
    assert_first_two(sd.Accepted(*(x.cpu() for x in got)), distributions(target, 1.0))


def wild(*shape: int) -> Tensor:
    """Return small integers, and some of any size."""
    values = torch.randint(-2, 9, shape)
    return torch.where(torch.rand(shape) < 0.1, torch.randint(-(2**31), 2**31 - 1, shape), values).int()


@pytest.mark.sanitize
def test_verify_sampled_tree_of_out_of_range_values_stays_in_bounds(device: torch.device) -> None:
    batch, nodes, vocab, draft_vocab = 48, 8, 9, 5
    for block in (False, True):
        fields = [wild(batch, nodes) for _ in range(5)]
        fields[1] = torch.where(torch.rand(batch, nodes) < 0.7, torch.arange(nodes).int() - 1, fields[1])
        fields[3] = torch.where(torch.rand(batch, nodes) < 0.7, torch.arange(nodes).int() + 1, fields[3])
        fields[4] = torch.where(torch.rand(batch, nodes) < 0.7, -1, fields[4]).int()
        tree = sd.Tree(*fields, mask=torch.zeros(batch, nodes, 1, dtype=torch.int64), num_nodes=wild(batch))
        logits, draft_logits = torch.randn(batch, nodes, vocab), torch.randn(batch, 3, draft_vocab)
        logits[torch.rand(batch, nodes) < 0.1] = torch.nan
        draft_logits[torch.rand(batch, 3) < 0.2] = -torch.inf
        given = {
            **sampling([1.0] * batch, [4] * batch),
            "draft_logits": draft_logits,
            "draft_rows": wild(batch, nodes).clamp(-(2**31), 3),
            "draft_temperature": torch.rand(batch),
            "id_map": wild(draft_vocab),
            "status": torch.zeros(batch, dtype=torch.int32),
        }
        results = []
        for where in (device, torch.device("cpu")):
            on = {name: x.clone().to(where) for name, x in given.items()}
            got = sd.verify_tree(
                logits.to(where), sd.Tree(*(x.to(where) for x in tree)), 5, block_verification=block, **on
            )
            results.append([x.cpu() for x in (*got, on["status"])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        lengths, path = results[0][1], results[0][2]
        for length, row in zip(lengths.tolist(), path.tolist(), strict=True):
            assert 0 <= length <= 5 and all(0 <= a < b < nodes for a, b in itertools.pairwise(row[:length]))


def test_verify_sampled_tree_reports_bad_draft_rows(device: torch.device) -> None:
    """Siblings with different rows, or a row out of range: children before the bad one count."""
    tree = sd.Tree(*(x.to(device) for x in drawn_trees(STAR, 3, torch.randn(4, 4), 1.0)))
    logits = torch.zeros(3, 4, 4, device=device)
    rows = torch.tensor([[-1, 0, 0, 0], [-1, 0, 1, 0], [-1, 2, 2, 2]], dtype=torch.int32, device=device)
    draft_logits = torch.zeros(3, 2, 4, device=device)
    draft_logits[1] -= torch.inf  # nothing is accepted
    status = torch.zeros(3, dtype=torch.int32, device=device)
    parameters = {k: v.to(device) for k, v in sampling([1.0] * 3).items()}
    got = sd.verify_tree(logits, tree, 2, draft_logits=draft_logits, draft_rows=rows, status=status, **parameters)
    assert status.tolist() == [0, sd.Status.BAD_TREE, sd.Status.BAD_TREE]
    assert got.num_valid.tolist()[1:] == [1, 1]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x * 2,
    "peaked": lambda x: x * 3 + 12 * (torch.rand_like(x) < 1e-4),
    "flat": lambda x: x * 1e-2,
    "ties": lambda x: (x * 2).round(),
    "holes": lambda x: torch.where(torch.rand_like(x) < 0.3, torch.where(x > 0, torch.nan, -torch.inf), x),
    "infinite": lambda x: torch.where(torch.rand_like(x) < 1e-4, torch.inf, x),
}


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(300, 0), (4099, 0), (4099, 501), (32000, 0), (128256, 32000)])
@pytest.mark.parametrize("kind", KINDS)
def test_verify_sampled_tree_is_equal_on_both_devices(
    vocab: int, draft_vocab: int, dtype: torch.dtype, kind: str
) -> None:
    batch = 8
    for parents in (CHAIN_3, TREE):
        nodes = len(parents)
        target = KINDS[kind](torch.randn(batch, nodes, vocab)).to(dtype)
        id_map = torch.randperm(vocab)[:draft_vocab].int() if draft_vocab else None
        ids = torch.arange(vocab) if id_map is None else id_map.long()
        draft = (target[..., ids].float() + torch.randn(batch, nodes, len(ids))).to(dtype)
        tree = drawn_trees(parents, batch, torch.zeros(vocab, 4), 1.0)  # tokens follow
        clean = draft.float().nan_to_num(nan=-torch.inf, posinf=50.0)
        for node in range(nodes):
            children = [c for c in range(1, nodes) if parents[c] == node]
            if children:
                gumbel = -torch.log(-torch.log(torch.rand(batch, len(ids))))
                tree.tokens[:, children] = ids[torch.topk(clean[:, node] + gumbel, len(children)).indices].int()
        parameters: dict[str, Tensor] = sampling(
            [1.0, 0.8, 1.0, 1.0, 0.6, 1.5, 1.0, 0.0],
            [0, 50, 0, 100, 20, 5000, 0, 1],
            [1.0, 0.9, 0.95, 1.0, 0.5, 0.99, 0.2, 1.0],
            [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.05, 0.0],
        )
        parameters["draft_rows"] = tree.parents
        if id_map is not None:
            parameters["id_map"] = id_map
        if kind == "normal":
            parameters["logit_bias"] = torch.randn(batch, vocab)
        for block in (False, True):
            for _ in range(3):
                parameters["seeds"] = parameters["seeds"] + 100
                results = []
                for where in ("cuda", "cpu"):
                    on = {name: x.to(where) for name, x in parameters.items()}
                    rows = sd.Tree(*(x.to(where) for x in tree))
                    got = sd.verify_tree(
                        target.to(where), rows, 4, draft_logits=draft.to(where), block_verification=block, **on
                    )
                    results.append([x.cpu() for x in got])
                assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (kind, block, results)


def test_verify_sampled_tree_of_strided_draft_rows(device: torch.device) -> None:
    n, vocab = 64, 33
    target, draft = torch.randn(vocab, vocab), torch.randn(vocab, vocab)
    tree = sd.Tree(*(x.to(device) for x in drawn_trees(TREE, n, draft, 1.0)))
    logits, draft_logits = target.to(device)[tree.tokens.long()], draft.to(device)[tree.tokens.long()]
    parameters = {k: v.to(device) for k, v in sampling([1.0] * n).items()}
    wide = torch.full((n, 12, vocab + 5), torch.nan, device=device)
    wide[:, 1:11, 3:-2] = draft_logits
    results = [
        sd.verify_tree(logits, tree, 4, draft_logits=x, draft_rows=tree.parents, **parameters)
        for x in (draft_logits, wide[:, 1:11, 3:-2])
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


INT = torch.int32
DRAFTS = {"draft_logits": torch.zeros(2, 5, 4), "draft_rows": torch.zeros(2, 3, dtype=INT)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": None, "seeds": None}, "verify_tree: draft_logits is given, expected None, since temperature is None"),
        ({"draft_rows": None}, "verify_tree: draft_rows is None, expected a tensor, since draft_logits is given"),
        ({"draft_logits": None}, "verify_tree: draft_rows is given, expected None, since draft_logits is None"),
        ({"draft_logits": None, "draft_rows": None, "draft_temperature": torch.ones(2)}, "verify_tree: draft_temperature is given, expected None, since draft_logits is None"),
        ({"draft_logits": None, "draft_rows": None, "id_map": torch.zeros(4, dtype=INT)}, "verify_tree: id_map is given, expected None, since draft_logits is None"),
        ({"draft_logits": None, "draft_rows": None, "block_verification": True}, "verify_tree: block_verification is True, expected False, since draft_logits is None"),
        ({"draft_logits": torch.zeros(2, 5, 4, dtype=torch.float16)}, "verify_tree: draft_logits is float16, expected float32"),
        ({"draft_logits": torch.zeros(2, 5, 3)}, "verify_tree: draft_logits has shape [2, 5, 3], expected [batch=2, num_rows, vocab=4]"),
        ({"draft_logits": torch.zeros(2, 0, 4)}, "verify_tree: draft_logits has 0 rows, expected 1 to 2147483647"),
        ({"draft_logits": torch.zeros(2, 5, 3), "id_map": torch.zeros(4, dtype=INT)}, "verify_tree: id_map has shape [4], expected [draft_vocab=3]"),
        ({"draft_rows": torch.zeros(2, 5, dtype=INT)}, "verify_tree: draft_rows has shape [2, 5], expected [batch=2, num_nodes=3]"),
        ({"draft_temperature": torch.ones(3)}, "verify_tree: draft_temperature has shape [3], expected [num_slots=2]"),
        ({"logits": torch.zeros(2, 3, 1).expand(2, 3, 2**20 + 1).contiguous(), "id_map": torch.zeros(4, dtype=INT)}, "verify_tree: vocab is 1048577, expected at most 1048576 with an id_map"),
    ],
)  # fmt: skip
def test_verify_sampled_tree_error_messages(change: dict[str, object], message: str) -> None:
    tree = drawn_trees([-1, 0, 0], 2, torch.zeros(4, 4), 1.0)
    arguments: dict[str, object] = {"logits": torch.zeros(2, 3, 4), **sampling([1.0] * 2), **DRAFTS} | change
    if arguments["temperature"] is None:
        arguments |= dict.fromkeys(("top_k", "top_p", "min_p"))
    with pytest.raises(ValueError) as error:
        sd.verify_tree(tree=tree, accept_width=3, **arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
