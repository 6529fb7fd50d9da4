"""A draft of one's own: the class that docs/embedding.md shows, in engines of every kind; and what drafts may not be."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import Candidates, Tree
from specdec_kernels.engine import (
    Committed,
    Draft,
    DraftBudget,
    Eagle,
    Eagle3,
    Engine,
    Idleable,
    Learner,
    Migratable,
    Needs,
    Ngram,
    Proposal,
    RequestOutput,
    SamplingParams,
    Standalone,
    Union,
)
from specdec_kernels.engine.drafts import DraftContext
from specdec_kernels.engine.drafts.composition import having, leaves, restore_slot, save_slot, walk
from specdec_kernels.engine.drafts.ngram import file_tokens
from specdec_kernels.engine.drafts.proposal import DrawnFrom, ScoredTree, scored_tree_of
from specdec_kernels.tiny import tiny_model
from support.devices import HAS_CUDA
from support.exhaustive import thinned
from support.recording_heads import DepthDraft
from support.tiny_checkpoint import Comparison, accept_length, held_out, reference_model, reference_texts

TARGET, HEAD = tiny_model("target"), tiny_model("eagle3")
NEW_TOKENS = 24
PAGE = Path(__file__).resolve().parents[2] / "docs" / "embedding.md"


def bigrams_of_the_page() -> type[Draft]:
    """Return the class of the page's example."""
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "class Bigrams" in b)
    source, _, rest = block.partition("\nprompt = ")
    assert rest and len(source[source.index("class") :].splitlines()) <= 36
    namespace: dict[str, Any] = {}
    exec(compile(source, PAGE.name, "exec"), namespace)
    bigrams: type[Draft] = namespace["Bigrams"]
    return bigrams


Bigrams = bigrams_of_the_page()


def make_engine(draft: Draft | None, device: torch.device | str = "cpu", **options: Any) -> Engine:
    sizes: dict[str, Any] = {"max_len": 256, "num_slots": 4, "page_size": 4, "dtype": torch.float32, "device": device}
    return Engine(TARGET, draft=draft, **(sizes | options))


def prompts() -> list[list[int]]:
    return [
        *(prompt[:50] for prompt in held_out("code")[:6]),
        *(prompt[-80:] for prompt in held_out("repeat")[:6]),
        [7],
    ]


def expect_plain_texts(engine: Engine) -> list[RequestOutput]:
    comparison = Comparison(reference_model())
    outputs = engine.generate(prompts(), SamplingParams(NEW_TOKENS))
    for prompt, output, want in zip(prompts(), outputs, reference_texts(prompts(), NEW_TOKENS), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1 and not engine.state.status.any()
    return outputs


@pytest.mark.usefixtures("measured_costs")
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_text_is_that_of_plain_decoding(adaptive: bool, device: torch.device) -> None:
    """Also from a pool from which requests are retracted."""
    outputs = expect_plain_texts(make_engine(Bigrams(), device, adaptive=adaptive, num_pages=100))
    if not adaptive:
        assert accept_length(outputs) > 1.2


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("adaptive", [False, True])
def test_custom_draft_rounds_are_captured(adaptive: bool) -> None:
    engine = make_engine(Bigrams(), "cuda", adaptive=adaptive)
    assert engine.graphs is not None
    outputs = expect_plain_texts(engine)
    called = expect_plain_texts(make_engine(Bigrams(), "cuda", adaptive=adaptive, cuda_graph=False))
    if not adaptive:
        assert abs(accept_length(outputs) - accept_length(called)) < 0.1


class SuffixesOnHost(Draft):
    """Drafts what followed the last two tokens before, from Python lists."""

    def needs(self, target: Any) -> Needs:
        return Needs(num_nodes=4, accept_width=4)

    def open(self, context: DraftContext) -> None:
        self.texts: dict[int, list[int]] = {}

    def begin(self, slot: int, request: Any) -> None:
        self.texts[slot] = [*request.tokens]

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        roots, chains = self.state.root_tokens[slots].tolist(), []
        for slot, root in zip(slots.tolist(), roots, strict=True):
            text = [*self.texts.get(slot, []), root]
            places = (i for i in range(len(text) - 2, 0, -1) if text[i - 1 : i + 1] == text[-2:])
            chain = text[(place := next(places, len(text))) + 1 : place + 4]
            chains.append(chain + [-1] * (3 - len(chain)))
        tokens = torch.tensor(chains, dtype=torch.int32, device=slots.device)
        parents = torch.arange(-1, 2, dtype=torch.int32, device=slots.device).repeat(len(slots), 1)
        scores = torch.where(tokens < 0, -torch.inf, -0.5).cumsum(1)
        return Proposal(Candidates(tokens, parents, scores), note=roots)

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        counts, tokens = committed.num_valid.tolist(), committed.accepted.tokens.tolist()
        for slot, root, count, accepted in zip(slots.tolist(), proposal.note, counts, tokens, strict=True):
            if slot >= 0 and count > 0:  # the last accepted token is the next root
                self.texts[slot] += [root, *accepted[: count - 1]]


def test_draft_on_the_host_keeps_the_text_without_graphs(device: torch.device) -> None:
    engine = make_engine(SuffixesOnHost(), device, adaptive=False, cuda_graph=False)
    assert accept_length(expect_plain_texts(engine)) > 1.2


def test_custom_draft_seeded_text_equals_plain_decoding() -> None:
    params = [SamplingParams(20, temperature=0.8, top_p=0.9, seed=seed) for seed in range(len(prompts()))]
    want = make_engine(None).generate(prompts(), params)
    got = make_engine(Bigrams()).generate(prompts(), params)
    assert sum(a.tokens != b.tokens for a, b in zip(want, got, strict=True)) <= 1  # a near-tie, and what follows it


UNIONS = {
    "own and index": lambda: Union(Bigrams(), Ngram(num_nodes=8), num_nodes=12),
    "own and own": lambda: Union(Bigrams(), Bigrams(), num_nodes=8),
    "head and own": lambda: Union(Eagle3(HEAD, num_steps=3, topk=4, num_nodes=16), Bigrams(), num_nodes=16),
    "two heads": lambda: Union(Eagle3(HEAD, num_steps=2, topk=4), Eagle3(HEAD, num_steps=5, topk=1), num_nodes=12),
    "head and model": lambda: Union(Eagle3(HEAD, topk=1), Standalone(TARGET, num_steps=2, topk=2, num_nodes=6)),
    "a union and an index": lambda: Union(Union(Bigrams(), Eagle3(HEAD, topk=2)), Ngram(num_nodes=8), num_nodes=16),
}


@pytest.mark.parametrize("name", thinned(UNIONS, lambda name: "and own" not in name))
def test_union_text_equals_plain_decoding(name: str, device: torch.device) -> None:
    outputs = expect_plain_texts(make_engine(UNIONS[name](), device, adaptive=False))
    assert accept_length(outputs) > (2 if "head" in name else 1.2)


def test_scores_are_log_probabilities_of_paths() -> None:
    """0 for the root, never rising along a path, -inf for unused nodes, whatever drafts."""
    for draft in (Bigrams(), Ngram(), Eagle3(HEAD), Standalone(TARGET), UNIONS["a union and an index"]()):
        engine = make_engine(draft, adaptive=False)
        checked = 0
        propose = draft.propose

        def check(slots: Tensor, budget: DraftBudget, propose: Any = propose, engine: Engine = engine) -> Proposal:
            nonlocal checked
            proposal, num_nodes = propose(slots, budget), budget.num_nodes
            tree, scores = scored_tree_of(proposal.drafts, slots, num_nodes, engine.state)
            assert scores.shape == tree.tokens.shape == (len(slots), num_nodes)
            for row, count in enumerate(tree.num_nodes.tolist()):
                values = scores[row].tolist()
                assert values[0] == 0 and values[count:] == [-torch.inf] * (num_nodes - count)
                assert all(-torch.inf < values[i] <= values[tree.parents[row, i]] + 1e-5 for i in range(1, count))
                checked += count - 1
            return proposal

        draft.propose = check  # type: ignore[method-assign]
        engine.generate(prompts()[6:9], SamplingParams(12))
        assert checked > 20, type(draft).__name__


def test_draft_with_two_methods_drafts(device: torch.device) -> None:
    """`needs` and `propose` are enough: this one says that each token comes twice."""

    class Twice(Draft):
        def needs(self, target: Any) -> Needs:
            return Needs(num_nodes=2, accept_width=2)

        def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
            root = self.state.root_tokens[slots][:, None]
            return Proposal(Candidates(root, torch.full_like(root, -1), torch.full_like(root, -1, dtype=torch.float32)))

    outputs = expect_plain_texts(make_engine(Twice(), device, adaptive=False))
    assert sum(output.stats.accepted for output in outputs) > 0


# --- capabilities


class Counting(Bigrams, Migratable, Learner):  # type: ignore[misc, valid-type]
    """Keeps a number of each slot, and counts what the engine asks of it."""

    def open(self, context: DraftContext) -> None:
        super().open(context)
        self.rounds = torch.zeros(context.num_slots + 1, 1, dtype=torch.int32, device=context.device)
        self.forgotten = 0

    def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
        super().extend(slots, committed, proposal, features)
        self.rounds[slots.long()] += 1

    def save(self, slot: int) -> dict[str, Tensor]:
        return {"rounds": self.rounds[slot]}

    def restore(self, slot: int, saved: Mapping[str, Tensor]) -> None:
        self.rounds[slot].copy_(saved["rounds"])

    def forget(self) -> None:
        self.forgotten += 1


def test_composition_finds_capabilities_of_members() -> None:
    draft = Union(Union(Ngram(), Counting()), Union(Counting(), Bigrams()))
    (_, first), (second, _) = (union.members for union in draft.members)
    assert [type(each).__name__ for each in walk(draft)] == [
        "Ngram", "Counting", "Union", "Counting", "Bigrams", "Union", "Union"
    ]  # fmt: skip
    assert leaves(draft) == [*draft.first.members, *draft.second.members]  # type: ignore[attr-defined]
    assert having(draft, Migratable) == [first, second]
    assert having(draft, Idleable) == [] and len(having(draft, Learner)) == 3
    with closing(make_engine(draft, adaptive=False)) as engine:
        engine.generate(prompts()[6], SamplingParams(4))
        saved = save_slot(draft, 0)
        assert sorted(saved) == ["1.rounds", "3.rounds"] and int(saved["1.rounds"]) > 1
        restore_slot(draft, 1, {name: tensor + index for index, (name, tensor) in enumerate(saved.items())})
        assert first.rounds[1] == first.rounds[0] and second.rounds[1] == second.rounds[0] + 1
    assert not first.is_open and not hasattr(first, "rounds")


@pytest.mark.usefixtures("measured_costs")
def test_engine_calls_capabilities_of_a_union_member() -> None:
    """Also of a member of a member: migrated state arrives, and warm-up rounds are forgotten."""
    drafts = [Union(Union(Counting(), Ngram(num_nodes=4)), Bigrams(), num_nodes=6) for _ in range(2)]
    engines = [make_engine(draft, adaptive=True) for draft in drafts]
    counts = [having(draft, Migratable)[0] for draft in drafts]
    assert [count.forgotten for count in counts] == [1, 1]  # type: ignore[attr-defined]
    for engine, count in zip(engines, counts, strict=True):
        count.rounds.zero_()  # type: ignore[attr-defined]
        assert engine.stats().rounds == 0
    request = engines[0].submit(prompts()[6], SamplingParams(NEW_TOKENS, ignore_eos=True))
    exported = engines[0].export_request(request)
    rounds = int(counts[0].rounds.max())  # type: ignore[attr-defined]
    assert rounds > 0 and exported.tensors["slot.0.rounds"].tolist() == [rounds]
    moved = engines[1].import_request(exported)
    assert len(moved.result().tokens) == NEW_TOKENS
    assert int(counts[1].rounds[:-1].max()) > rounds  # type: ignore[attr-defined]


def test_draft_steps_know_their_depth(device: torch.device) -> None:
    """Committed rows have depth 0, frontier nodes 1 and up; a module of one depth changes the drafts below it alone."""
    trees: list[list[list[int]]] = []
    for scales in ([1.0] * 4, [1.0, 1.0, -1.0, 1.0]):
        draft = DepthDraft(HEAD, scales, num_steps=4, topk=1)
        engine = make_engine(draft, device, adaptive=False, num_slots=1, cuda_graph=False)
        chains: list[list[int]] = []
        propose = draft.propose

        def keep(slots: Tensor, budget: DraftBudget, propose: Any = propose, chains: Any = chains) -> Proposal:
            proposal: Proposal = propose(slots, budget)
            if budget.num_nodes > 1:
                chains.append(proposal.drafts.tokens[0].tolist())
            return proposal

        draft.propose = keep  # type: ignore[method-assign]
        engine.generate(prompts()[0], SamplingParams(12, ignore_eos=True))
        assert draft.depths[:5] == [0, 1, 2, 3, 0] and set(draft.depths) == {0, 1, 2, 3}
        trees.append(chains)
    plain, changed = trees[0][0], trees[1][0]
    assert plain[:2] == changed[:2] and plain[2] != changed[2]


# --- one engine for each


def test_draft_serves_one_open_engine() -> None:
    draft = Eagle3(HEAD, num_steps=2, topk=2)
    first = make_engine(draft)
    message = (
        "Engine: draft (Eagle3) is open in another engine, expected one for this engine alone, or the other one closed"
    )
    for again in (draft, Union(draft, Ngram()), Union(Ngram(), Union(Bigrams(), draft))):
        with pytest.raises(ValueError) as error:
            make_engine(again)
        assert str(error.value) == message
    want = expect_plain_texts(first)
    first.close()
    assert not draft.is_open and draft == Eagle3(HEAD, num_steps=2, topk=2)
    assert [o.tokens for o in expect_plain_texts(make_engine(draft))] == [o.tokens for o in want]


def test_failed_engine_leaves_draft_closed() -> None:
    class Broken(Bigrams):  # type: ignore[misc, valid-type]
        def open(self, context: Any) -> None:
            super().open(context)
            raise OSError("no such table")

    own, broken = Bigrams(), Broken()
    for draft in (broken, Union(own, broken)):
        with pytest.raises(OSError, match="no such table"):
            make_engine(draft)
        assert not draft.is_open and not own.is_open and not broken.is_open
    expect_plain_texts(make_engine(own))


class Asking(Draft):
    def __init__(self, **needs: Any) -> None:
        self.asked = Needs(**({"num_nodes": 4, "accept_width": 4} | needs))

    def needs(self, target: Any) -> Needs:
        return self.asked


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0, expected 1 to 256"),
        ({"num_nodes": 257}, "num_nodes=257, expected 1 to 256"),
        ({"accept_width": 0}, "accept_width=0, expected 1 to 256"),
        ({"feature_layers": (0, 5)}, "feature_layers=(0, 5), expected 0 to 4 (the target's)"),
        ({"scratch_rows": -1}, "scratch_rows=-1, expected 0 or more"),
        ({"kv_numbers": -1}, "kv_numbers=-1, expected 0 or more"),
        ({"tensor_prefixes": ("",)}, "tensor_prefixes=('',), expected prefixes that are not empty"),
        ({"max_idle_rounds": -1}, "max_idle_rounds=-1, expected 0 or more"),
    ],
    ids=str,
)
def test_draft_needs_out_of_range_are_refused(needs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_engine(Asking(**needs))
    assert str(error.value) == f"Engine: draft (Asking) needs {message}"


def test_features_are_those_that_were_asked_for() -> None:
    """Side by side in the order of the layers, of prompts and of trees; a union hands each draft its own."""
    seen: dict[str, set[int]] = {"prefill": set(), "extend": set()}

    class Reader(Asking):
        def prefill(self, prefill: Any, features: Tensor | None) -> None:
            assert features is not None and features.is_contiguous()
            seen["prefill"].add(features.shape[-1])

        def extend(self, slots: Tensor, committed: Committed, proposal: Proposal, features: Tensor | None) -> None:
            assert features is not None and int(committed.cu_seqlens[-1]) <= len(features)
            seen["extend"].add(features.shape[-1])

    hidden = reference_model().config.hidden_size
    expect_plain_texts(make_engine(Union(Reader(feature_layers=(3, 1)), Bigrams(), num_nodes=4)))
    assert seen == {"prefill": {2 * hidden}, "extend": {2 * hidden}}
    expect_plain_texts(make_engine(Union(Reader(feature_layers=(4,)), Eagle3(HEAD, topk=1), num_nodes=8)))
    assert seen == {"prefill": {hidden, 2 * hidden}, "extend": {hidden, 2 * hidden}}


def test_candidates_that_are_no_tree_end_their_requests() -> None:
    class Wrong(Bigrams):  # type: ignore[misc, valid-type]
        def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
            proposal: Proposal = super().propose(slots, budget)
            tokens, parents, scores = proposal.drafts
            return Proposal(Candidates(tokens.clamp(min=0), parents, scores.flip(1)), note=proposal.note)

    with pytest.raises(RuntimeError, match=r"prompts\[0\] ended with BAD_TREE"):
        make_engine(Wrong()).generate([prompts()[6]], SamplingParams(NEW_TOKENS))


def returned_value(value: Any) -> Draft:
    class Returns(Bigrams):  # type: ignore[misc, valid-type]
        def propose(self, slots: Tensor, budget: DraftBudget) -> Any:
            return value(self, slots, budget)

    return Returns()


def drawn(draft: Draft, slots: Tensor, budget: DraftBudget) -> Proposal:
    zeros = torch.zeros(len(slots), 1, dtype=torch.int32)
    return Bigrams.propose(draft, slots, budget)._replace(drawn_from=DrawnFrom(zeros.float()[..., None], zeros, None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda *_: None, "Returns.propose returned a NoneType, expected a Proposal"),
        (lambda *_: [1], "Returns.propose returned a list, expected a Proposal"),
        (lambda *a: Bigrams.propose(*a).drafts, "Returns.propose returned a Candidates, expected a Proposal"),
        (lambda *_: Proposal(None),
         "Returns.propose returned drafts of type NoneType, expected Candidates or a ScoredTree"),
        (drawn, "Returns.propose returned drawn_from, expected None of a draft whose `sampled` is False"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_union", [False, True])
def test_proposals_of_other_kinds_are_refused_by_name(value: Any, message: str, in_union: bool) -> None:
    draft = returned_value(value)
    engine = make_engine(Union(draft, Ngram(), num_nodes=8) if in_union else draft, adaptive=False)
    with pytest.raises((TypeError, ValueError)) as error:
        engine.generate([prompts()[6]], SamplingParams(NEW_TOKENS))
    assert str(error.value) == message


Change = Callable[[Tensor, Tree, Tensor], Tree]


def foreign_token(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(tokens=torch.where(victim & (tree.positions > tree.positions[:, :1]), 10**6, tree.tokens))


def negative_token(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(tokens=torch.where(victim & (tree.positions > tree.positions[:, :1]), -1, tree.tokens))


def other_root(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    is_root = torch.arange(tree.tokens.shape[1], device=roots.device) == 0
    return tree._replace(tokens=torch.where(victim & is_root, (tree.tokens + 1) % 500, tree.tokens))


def later_positions(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(positions=tree.positions + victim)


def flat_positions(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(positions=torch.where(victim, tree.positions[:, :1], tree.positions))


def more_nodes(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(num_nodes=torch.where(victim[:, 0], tree.tokens.shape[1] + 1, tree.num_nodes))


def no_nodes(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    return tree._replace(num_nodes=tree.num_nodes.masked_fill(victim[:, 0], 0))


def own_parents(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
    nodes = torch.arange(tree.tokens.shape[1], dtype=torch.int32, device=roots.device)
    return tree._replace(parents=torch.where(victim, nodes, tree.parents))


class Trees(Bigrams):  # type: ignore[misc, valid-type]
    """Proposes trees of its own; those of the first slot are changed."""

    def __init__(self, change: Change | None) -> None:
        self.change = change

    def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
        proposal: Proposal = super().propose(slots, budget)
        tree, scores = scored_tree_of(proposal.drafts, slots, budget.num_nodes, self.state)
        if self.change and budget.num_nodes > 1:
            tree = self.change(self.state.root_tokens, tree, (slots == 0)[:, None])
        return proposal._replace(drafts=ScoredTree(tree, scores))


@functools.cache
def two_plain_texts(device: torch.device) -> list[RequestOutput]:
    return make_engine(None, device).generate([prompts()[6], prompts()[0]], SamplingParams(NEW_TOKENS))


def expect_first_request_ends_with_bad_tree(draft: Draft, device: torch.device) -> None:
    want = two_plain_texts(device)
    with closing(make_engine(draft, device, adaptive=False)) as engine:
        requests = engine.submit_many([prompts()[6], prompts()[0]], SamplingParams(NEW_TOKENS))
        with pytest.raises(RuntimeError, match="BAD_TREE"):
            requests[0].result()
        assert requests[1].result().tokens == want[1].tokens
        so_far = requests[0].output.tokens
        assert so_far == want[0].tokens[: len(so_far)]


def test_trees_of_an_own_draft_keep_the_text(device: torch.device) -> None:
    outputs = expect_plain_texts(make_engine(Trees(None), device, adaptive=False))
    assert accept_length(outputs) > 1.2


@pytest.mark.parametrize("in_union", [False, True])
@pytest.mark.parametrize(
    "change",
    [foreign_token, negative_token, other_root, later_positions, flat_positions, more_nodes, no_nodes, own_parents],
)
def test_tree_that_would_change_the_text_ends_its_request(change: Change, in_union: bool, device: torch.device) -> None:
    draft = Trees(change)
    expect_first_request_ends_with_bad_tree(Union(draft, Bigrams(), num_nodes=8) if in_union else draft, device)


@pytest.mark.parametrize("token", [-1, 10**6, 2**31 - 1])
def test_candidate_outside_the_vocabulary_ends_its_request(token: int, device: torch.device) -> None:
    class Foreign(Bigrams):  # type: ignore[misc, valid-type]
        def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
            proposal: Proposal = super().propose(slots, budget)
            tokens, parents, scores = proposal.drafts
            victim = (slots == 0)[:, None]
            tokens = torch.where(victim, token, tokens)
            return proposal._replace(drafts=Candidates(tokens, parents, torch.where(victim, -1.0, scores)))

    expect_first_request_ends_with_bad_tree(Foreign(), device)


def test_links_and_mask_of_a_tree_come_from_its_parents(device: torch.device) -> None:
    def blind(roots: Tensor, tree: Tree, victim: Tensor) -> Tree:
        links = {"first_child": tree.first_child * 0, "next_sibling": tree.next_sibling * 0 + 3}
        return tree._replace(mask=tree.mask * 0 - 1, **links)

    expect_plain_texts(make_engine(Trees(blind), device, adaptive=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, scores: (tuple(tree), scores), "Own.propose returned a tree of type tuple, expected a Tree"),
        (lambda tree, scores: (tree, scores[:, 1:]),
         "Own.propose returned scores of shape [1, 3], expected [1, 4]"),
        (lambda tree, scores: (tree._replace(positions=tree.positions[:, 1:]), scores),
         "Own.propose returned tree.positions of shape [1, 3], expected [1, 4]"),
        (lambda tree, scores: (tree._replace(num_nodes=tree.num_nodes[:0]), scores),
         "Own.propose returned tree.num_nodes of shape [0], expected [1]"),
        (lambda tree, scores: (tree._replace(tokens=tree.tokens[:, :0]), scores),
         "Own.propose returned trees of 0 nodes, expected 1 to 4 (the budget)"),
        (lambda tree, scores: (tree._replace(tokens=tree.tokens.repeat(1, 2)), scores),
         "Own.propose returned trees of 8 nodes, expected 1 to 4 (the budget)"),
    ],
)  # fmt: skip
def test_trees_of_other_shapes_are_refused_by_name(change: Any, message: str) -> None:
    class Own(Trees):
        def propose(self, slots: Tensor, budget: DraftBudget) -> Proposal:
            proposal = super().propose(slots, budget)
            if budget.num_nodes == 1:
                return proposal
            return proposal._replace(drafts=ScoredTree(*change(*proposal.drafts)))

    engine = make_engine(Own(None), adaptive=False)
    with pytest.raises((TypeError, ValueError)) as error:
        engine.generate([prompts()[6]], SamplingParams(NEW_TOKENS))
    assert str(error.value) == message


# --- options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Eagle3("x", num_steps=0), "Eagle3: num_steps is 0, expected 1 to 64"),
        (lambda: Eagle3("x", num_steps=1.5), "Eagle3: num_steps is 1.5, expected an integer"),  # type: ignore[arg-type]
        (lambda: Ngram(num_nodes=True), "Ngram: num_nodes is True, expected an integer"),
        (lambda: Eagle("x", topk=65), "Eagle: topk is 65, expected 1 to 64"),
        (lambda: Standalone("x", num_nodes=257), "Standalone: num_nodes is 257, expected 1 to 256"),
        (lambda: Eagle3(None), "Eagle3: head is a NoneType, expected a folder, a hub id or an Eagle3Head"),
        (lambda: Standalone(3), "Standalone: model is a int, expected a folder, a hub id or a module"),
        (lambda: Ngram(num_nodes=0), "Ngram: num_nodes is 0, expected 1 to 256"),
        (lambda: Ngram(max_tokens=0), "Ngram: max_tokens is 0, expected 1 to 1073741824"),
        (lambda: Ngram(corpus="docs.txt"), "Ngram: corpus is docs.txt, expected a list of files"),
        (lambda: Eagle3("x", num_steps=None), "Eagle3: num_steps is None, expected an integer"),
        (lambda: Standalone("x", sampled="no"), "Standalone: sampled is 'no', expected True or False"),
        (lambda: Ngram(corpus=1.5), "Ngram: corpus is 1.5, expected a list of files"),
        (lambda: Union(Ngram(), Ngram(), num_nodes=300), "Union: num_nodes is 300, expected 1 to 256"),
        (lambda: Union(Ngram(), "NGRAM"), "Union: second is a str, expected a Draft"),
        (lambda: Union(*[Ngram()] * 2), "Union: first and second are one object, expected two"),
        (lambda: make_engine("EAGLE3"), "Engine: draft is a str, expected a Draft or None"),
    ],
)
def test_options_are_checked_where_they_are_given(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


def test_corpus_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("a b")
    context: Any = SimpleNamespace(tokenizer=lambda text, **_: {"input_ids": [3, 512]}, vocab_size=512)
    with pytest.raises(ValueError) as error:
        file_tokens(file, context)
    assert str(error.value) == (
        f"Ngram: corpus has {file} with tokens from 3 to 512, expected 0 to 511 (the model's vocabulary)"
    )


def test_options_make_drafts_equal() -> None:
    assert Eagle3("x", topk=1) == Eagle3("x", topk=1) != Eagle3("x", topk=2)
    assert Union(Eagle3("x"), Ngram()) == Union(Eagle3("x"), Ngram())
    assert repr(Ngram(num_nodes=8)) == "Ngram(num_nodes=8, max_tokens=1048576, corpus=())"
