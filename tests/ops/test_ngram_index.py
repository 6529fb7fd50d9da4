"""The n-gram index: against its unbounded model, and without a model once text is evicted."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sd
from specdec_kernels.reference import ngram as reference

FIELDS = sd.Tree._fields


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class OnDevice:
    """An index on any device that takes and returns CPU tensors; `insert` with `start` goes through one call."""

    def __init__(self, device: torch.device, *sizes: int, **options: int) -> None:
        self._device, self._options = device, options
        self.index = sd.NgramIndex(*sizes, device=device, **options)

    def __getattr__(self, name: str) -> Any:
        def move(value: Any, device: torch.device | str) -> Any:
            if isinstance(value, tuple):
                moved = [move(item, device) for item in value]
                return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
            return value.to(device) if isinstance(value, torch.Tensor) else value

        def call(*arguments: Any, **options: Any) -> Any:
            options = {key: move(value, self._device) for key, value in options.items()}
            return move(getattr(self.index, name)(*move(arguments, self._device), **options), "cpu")

        return call

    def through_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.index.save(Path(folder) / "index")
            self.index = sd.NgramIndex.load(Path(folder) / "index", device=self._device, **self._options)


def outputs(batch: int, n: int) -> sd.NgramDraft:
    """Return outputs full of garbage."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*FIELDS[:5], "scores"), (batch, n))
    shapes |= {"mask": (batch, n, (n + 63) // 64), "num_nodes": (batch,), "match_len": (batch,)}
    dtypes = {"mask": torch.int64, "scores": torch.float32}
    filled = {k: torch.full(s, -123456, dtype=dtypes.get(k, torch.int32)) for k, s in shapes.items()}
    return sd.NgramDraft(sd.Tree(*(filled[name] for name in FIELDS)), filled["scores"], filled["match_len"])


def with_tree(**fields: torch.Tensor) -> sd.NgramDraft:
    """Return outputs of one row of four nodes with some fields of the tree replaced."""
    out = outputs(1, 4)
    return out._replace(tree=out.tree._replace(**fields))


def draft(
    index: sd.NgramIndex | OnDevice, slots: list[int], n: int, lens: list[int] | None = None, **options: Any
) -> Any:
    seq_lens = ints(lens if lens is not None else [100 + s for s in slots])
    return index.draft(ints(slots), seq_lens, n, **options, out=outputs(len(slots), n))


def paths(tree: sd.Tree, b: int) -> list[list[int]]:
    """Return the tokens from the root to each node of row b."""
    found: list[list[int]] = []
    for i in range(int(tree.num_nodes[b])):
        parent = int(tree.parents[b, i])
        found.append(([] if i == 0 else found[parent]) + [int(tree.tokens[b, i])])
    return found


def check_row(row: sd.Tree, scores: torch.Tensor, seq_len: int) -> None:
    """Check links, mask, positions and unused nodes of one row, from its tokens and parents alone."""
    n, used = len(row.tokens), int(row.num_nodes)
    parents = row.parents.tolist()
    assert parents[0] == -1 and all(0 <= parents[i] < i for i in range(1, used))
    ancestors: list[set[int]] = []
    for i in range(n):
        ancestors.append({i} | (ancestors[parents[i]] if 0 < i < used else set()))
        children = [c for c in range(1, used) if parents[c] == i]
        assert int(row.first_child[i]) == (children[0] if children and i < used else -1)
        siblings = [c for c in range(i + 1, used) if parents[c] == parents[i]] if 0 < i < used else []
        assert int(row.next_sibling[i]) == (siblings[0] if siblings else -1)
        depth = len(ancestors[i]) - 1
        assert int(row.positions[i]) == seq_len + depth
        bits = {64 * w + bit for w, word in enumerate(row.mask[i].tolist()) for bit in range(64) if word >> bit & 1}
        assert bits == ancestors[i]
    assert row.tokens[used:].tolist() == [int(row.tokens[0])] * (n - used)
    assert parents[used:] == [-1] * (n - used)
    assert torch.isneginf(scores[used:]).all() and torch.isfinite(scores[:used]).all()
    assert all(scores[i] <= scores[parents[i]] for i in range(1, used))


def check_empty_row(row: sd.Tree, scores: torch.Tensor, match_len: torch.Tensor) -> None:
    assert int(row.num_nodes) == 0 and int(match_len) == 0 and torch.isneginf(scores).all()
    assert not row.tokens.any() and not row.positions.any()
    for links in (row.parents, row.first_child, row.next_sibling):
        assert (links == -1).all()


def row_of(tree: sd.Tree, b: int) -> sd.Tree:
    return sd.Tree(*(field[b] for field in tree))


def check_same(
    index: sd.NgramIndex | OnDevice, model: reference.NgramIndex, slots: list[int], n: int, **options: Any
) -> None:
    lens = [10 * s + 3 for s in slots]
    tree, scores, match_len = draft(index, slots, n, lens, **options)
    for b, slot in enumerate(slots):
        want = model.draft(slot, n, **options)
        row = row_of(tree, b)
        if want is None:
            check_empty_row(row, scores[b], match_len[b])
            continue
        check_row(row, scores[b], lens[b])
        used = int(row.num_nodes)
        assert row.tokens[:used].tolist() == want.tokens
        assert row.parents[:used].tolist() == want.parents
        assert int(match_len[b]) == want.match_len
        torch.testing.assert_close(scores[b, :used].double(), torch.tensor(want.scores).double(), rtol=0, atol=2e-6)


NUM_SLOTS = 3
slots_or_none = st.one_of(st.none(), st.integers(0, NUM_SLOTS - 1))


def texts(alphabet: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, alphabet - 1), max_size=size)


@st.composite
def call_lists(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    alphabet = draw(st.integers(1, 4))
    insert = st.tuples(st.just("insert"), texts(alphabet, 90), slots_or_none)
    document = st.tuples(st.just("document"), texts(alphabet, 90), st.integers(0, 2))
    begin = st.tuples(
        st.just("begin"),
        st.integers(0, NUM_SLOTS - 1),
        st.sampled_from([0, 0, 1, 2]),
        st.booleans(),
        st.sampled_from([None, 0, 1]),
    )
    step = st.tuples(st.just("insert"), texts(alphabet, 4), st.integers(0, NUM_SLOTS - 1))
    again = st.tuples(st.just("again"), st.integers(0, NUM_SLOTS - 1), texts(alphabet, 4), st.floats(0, 1))
    rows = st.lists(st.tuples(st.integers(-1, NUM_SLOTS), texts(alphabet, 5)), min_size=1, max_size=5)
    extend = st.tuples(st.just("extend"), rows)
    file = st.tuples(st.just("file"))
    release = st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1))
    look = st.tuples(
        st.just("draft"),
        st.sampled_from([1, 2, 7, 16, 64, 65, 256]),
        st.sampled_from(["tree", "tree", "chain"]),
        st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        st.sampled_from([0, 0, 1, 2, 9, 32]),
        st.sampled_from([(4.0, 1.0, 1.0, 1.0), (1.0, 2.5, 0.5, 0.75), (1.0, 0.0, 0.0, 0.5), (0.0, 1.0, 256.0, 1e-3)]),
    )
    calls = (insert, document, begin, step, extend, extend, again, look, look, look, release, file)
    return draw(st.lists(st.one_of(*calls), max_size=25))


def options_of(mode: str, min_prob: float, min_match: int, weights: tuple[float, ...]) -> dict[str, Any]:
    names = ("own_weight", "group_weight", "global_weight", "recency")
    return {"mode": mode, "min_prob": min_prob, "min_match": min_match, **dict(zip(names, weights, strict=True))}


def rows_of(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts as `extend` takes them: [B, S], padded with an invalid token, and their lengths."""
    width = max(map(len, rows), default=0)
    padded = [row + [-7] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(rows), width), ints([len(row) for row in rows])


@settings(max_examples=300)
@given(calls=call_lists())
def test_ngram_index_matches_model(calls: list[tuple[Any, ...]], device: torch.device) -> None:
    index, model = OnDevice(device, 1 << 14, NUM_SLOTS, 4000), reference.NgramIndex()
    for call, *arguments in [*calls, ("draft", 16, "tree", 0.0, 1, (4.0, 1.0, 1.0, 1.0))]:
        if call == "insert":
            tokens, slot = arguments
            index.insert(ints(tokens), slot)
            model.insert(tokens, slot)
        elif call == "document":
            tokens, group = arguments
            index.insert(ints(tokens), group=group)
            model.insert(tokens, group=group)
        elif call == "again":  # what the stream holds already, from somewhere on, and more
            slot, tokens, share = arguments
            held = model.running[slot].tokens if slot in model.running else []
            start = int(share * len(held))
            index.insert(ints(held[start:] + tokens), slot, start=start)
            model.insert(held[start:] + tokens, slot, start=start)
        elif call == "extend":
            slots, texts = zip(*arguments[0], strict=True)
            index.extend(*rows_of(texts), ints(slots))
            for slot, tokens in arguments[0]:
                if 0 <= slot < NUM_SLOTS:
                    model.insert(tokens, slot)
        elif call == "begin":
            slot, group, private, request = arguments
            for each in (index, model):
                each.begin(slot, group=group, private=private, request=request)
            assert index.length(slot) == model.length(slot)
        elif call == "release":
            index.release(arguments[0])
            model.release(arguments[0])
        elif call == "file":
            index.through_a_file()
            model.end_all()
        else:
            n, *options = arguments
            check_same(index, model, [0, 1, 2], n, **options_of(*options))


@pytest.mark.parametrize("mode", ["tree", "chain"])
@pytest.mark.parametrize("alphabet", [2, 5, 50])
def test_ngram_index_matches_model_on_long_streams(alphabet: int, mode: str) -> None:
    rng = random.Random(alphabet)
    index, model = sd.NgramIndex(1 << 17, 4, 1 << 16), reference.NgramIndex()
    for round_ in range(60):
        slot = rng.choice([None, 0, 1, 2])
        size = rng.choice([1, 3, 27, 28, 29, 63, 64, 65, 300])
        # Runs of one small source text, so that long matches occur.
        source = random.Random(rng.randrange(4))
        tokens = [source.randrange(alphabet) for _ in range(size)]
        index.insert(ints(tokens), slot)
        model.insert(tokens, slot)
        if round_ % 20 == 19:
            released = rng.randrange(3)
            index.release(released)
            model.release(released)
        check_same(index, model, [2, -1, 0, 3, 1], 33, mode=mode)


def is_inside(needle: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(needle)] == needle for i in range(len(text) - len(needle) + 1))


class Ring:
    """A model of the token ring: streams are stored in blocks of 27, and a new block evicts the oldest."""

    def __init__(self, max_tokens: int, num_slots: int) -> None:
        self._blocks, self._taken = -(-max_tokens // 27) + num_slots, 0
        self._block: dict[reference.Stream, list[int]] = {}  # the block of each token, numbered in order of allocation

    def write(self, model: reference.NgramIndex) -> None:
        """Store the tokens that the model got since the last call, all of one text."""
        for text in model.texts:
            blocks = self._block.setdefault(text, [])
            for at in range(len(blocks), len(text.tokens)):
                if at % 27 == 0 or blocks[-1] <= self._taken - self._blocks:
                    self._taken += 1
                    blocks.append(self._taken)
                else:
                    blocks.append(blocks[-1])

    def held(self, text: reference.Stream) -> list[int]:
        gone = sum(block <= self._taken - self._blocks for block in self._block.get(text, []))
        return text.tokens[gone:]


AGEING = {"max_tokens": st.integers(1, 200), "alphabet": st.integers(1, 5), "seed": st.integers(0, 2**32)}


@settings(max_examples=70)
@given(**AGEING)
def test_ngram_index_never_misreads_evicted_text(
    max_tokens: int, alphabet: int, seed: int, device: torch.device
) -> None:
    age(max_tokens, alphabet, seed, device)


@pytest.mark.exhaustive
@settings(max_examples=400)
@given(**AGEING)
def test_ngram_index_never_misreads_evicted_text_of_more_seeds(
    max_tokens: int, alphabet: int, seed: int, device: torch.device
) -> None:
    age(max_tokens, alphabet, seed, device)


def age(max_tokens: int, alphabet: int, seed: int, device: torch.device) -> None:
    """Check that paths continue held, visible text, on a ring and a table far too small, through files and scopes.

    Twins stay equal, one of them with threads.
    """
    rng = random.Random(seed)
    index = OnDevice(device, max_tokens, 3, 10_000)
    twin = OnDevice(torch.device("cpu"), max_tokens, 3, 10_000, num_threads=3)
    model, ring = reference.NgramIndex(), Ring(max_tokens, 3)
    for _ in range(60):
        action = rng.random()
        slot = rng.randrange(3)
        if action < 0.05:
            for each in (index, twin, model):
                each.release(slot)
        elif action < 0.2:
            options = {
                "group": rng.randrange(3),
                "private": rng.random() < 0.3,
                "request": rng.choice([None, 1, 2]),
            }
            for each in (index, twin, model):
                each.begin(slot, **options)
            assert index.length(slot) == twin.length(slot) == model.length(slot)
        elif action < 0.5:
            tokens = [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 5, 30, 100]))]
            target = rng.choice([slot, slot, None])
            group = rng.randrange(3) if target is None else 0
            for each in (index, twin):
                each.insert(ints(tokens), target, group=group)
            model.insert(tokens, target, group=group)
            ring.write(model)
        elif action < 0.6:
            slots = [rng.randrange(-1, 3) for _ in range(3)]
            texts = [[rng.randrange(alphabet) for _ in range(rng.randrange(6))] for _ in slots]
            for each in (index, twin):
                each.extend(*rows_of(texts), ints(slots))
            for row, tokens in zip(slots, texts, strict=True):
                if row >= 0:
                    model.insert(tokens, row)
                    ring.write(model)
        elif action < 0.63:
            index.through_a_file()
            twin.through_a_file()
            model.end_all()
        else:
            check_ageing(index, twin, model, ring, rng.choice(["tree", "chain"]))
        statistics = index.index.statistics
        assert statistics == twin.index.statistics
        assert statistics.held == sum(len(ring.held(text)) for text in model.texts)
    assert index.index._index.digest() == twin.index._index.digest()


def check_ageing(index: OnDevice, twin: OnDevice, model: reference.NgramIndex, ring: Ring, mode: str) -> None:
    tree, scores, match_len = draft(index, [0, 1, 2], 20, [5, 6, 7], mode=mode)
    for field, other in zip(tree, draft(twin, [0, 1, 2], 20, [5, 6, 7], mode=mode)[0], strict=True):
        assert torch.equal(field, other)
    for b in range(3):
        own = model.running.get(b)
        if own is None or not own.tokens:
            check_empty_row(row_of(tree, b), scores[b], match_len[b])
            continue
        check_row(row_of(tree, b), scores[b], 5 + b)
        length = int(match_len[b])
        assert length == 0 or int(tree.num_nodes[b]) > 1
        suffix = own.tokens[-max(length, 1) :]
        assert own.tokens[-1] == int(tree.tokens[b, 0])
        held = [ring.held(text) for text in model.texts if text.scope in own.scopes()]
        assert length == 0 or any(is_inside(suffix, text) for text in held)
        for path in paths(tree, b)[1:]:  # the root may stand in the place of another token
            assert any(is_inside(path[1:], text) for text in held)


def test_ngram_index_finds_released_text_until_overwritten() -> None:
    index = sd.NgramIndex(1000, 2, 500)
    text = list(range(50, 100))
    index.insert(ints(text), 0)
    index.release(0)
    index.insert(ints([7, 8, 9]), 0)  # reusing the slot overwrites nothing by itself
    index.insert(ints(text[:20]), 1)
    tree, scores, match_len = draft(index, [1], 31)
    assert tree.tokens[0].tolist() == text[19:50] and int(match_len[0]) == 20
    assert scores[0].exp().tolist() == pytest.approx([(22 / 24) ** depth for depth in range(31)], rel=0.05)
    filler = list(range(1000, 3000))
    index.insert(ints(filler))
    tree, _, match_len = draft(index, [1], 31)
    assert tree.num_nodes.tolist() == [1] and match_len.tolist() == [0]


def test_ngram_index_with_full_table_keeps_newest() -> None:
    index = sd.NgramIndex(2000, 1, 10)
    text = torch.randperm(20_000).to(torch.int32)  # four new n-grams a token, where the table has room for one
    index.insert(text)
    assert index.statistics.evictions > 60_000
    for at in range(19_600, 19_999, 19):
        index.insert(text[at : at + 1], 0)
        assert draft(index, [0], 2)[0].tokens.tolist() == [text[at : at + 2].tolist()]
        index.release(0)


def test_ngram_stream_drafts_after_its_text_is_evicted() -> None:
    """The context is stored apart from the ring, so a request goes on drafting."""
    index = sd.NgramIndex(200, 1, 500)
    index.insert(ints([1, 2, 3, 4, 5]), 0)
    document = list(range(10, 300))
    index.insert(ints(document))
    index.insert(ints(document[250:260]), 0)
    tree, _, match_len = draft(index, [0], 8)
    assert tree.tokens[0].tolist() == document[259:267] and int(match_len[0]) == 10


def test_ngram_draft_follows_text_past_a_different_token() -> None:
    index = sd.NgramIndex(1000, 1, 500)
    text = list(range(50, 200))
    index.insert(ints(text))
    index.insert(ints(text[:20]), 0)
    assert draft(index, [0], 4)[0].tokens.tolist() == [text[19:23]]
    index.insert(ints([text[20], 7]), 0)  # 7 replaces text[21]; nothing stored ends in it
    tree, scores, match_len = draft(index, [0], 40)
    assert tree.tokens[0].tolist() == [7, *text[22:61]] and match_len.tolist() == [0]
    assert scores[0].exp().tolist() == pytest.approx([0.5**depth for depth in range(40)], rel=0.05)
    assert draft(index, [0], 4, min_match=1)[0].num_nodes.tolist() == [1]
    assert draft(index, [0], 4)[0].tokens.tolist() == [[7, *text[22:25]]]  # repeated calls give the same draft
    index.insert(ints(text[22:61]), 0)
    tree, _, match_len = draft(index, [0], 4)
    assert tree.tokens[0].tolist() == text[60:64] and match_len.tolist() == [32]
    index.insert(ints([7] * 257), 0)  # more tokens than one draft can have proposed
    assert text[61] not in draft(index, [0], 4)[0].tokens[0].tolist()


def test_ngram_draft_follows_text_through_a_run() -> None:
    index = sd.NgramIndex(1000, 1, 500)
    index.insert(ints([1, 2, 3, *[9] * 60, 4, 5]), 0)
    index.insert(ints([1, 2, 3]), 0)
    for part in ([], [9] * 30, [9] * 20, [9] * 8):
        index.insert(ints(part), 0)
        tree, _, match_len = draft(index, [0], 64)
    assert match_len.tolist() == [32]  # also with fifteen matches within this run
    assert [9, 9, 9, 4, 5] in paths(tree, 0)


def test_ngram_draft_weighs_own_text_four_times() -> None:
    index = sd.NgramIndex(1000, 2, 500)
    index.insert(ints([1, 2, 9, 4, 1, 2]), 0)  # own: 2 -> 9, match 2
    for follower in (5, 5, 5, 6):
        index.insert(ints([1, 2, follower]))
    tree, scores, _ = draft(index, [0], 4)
    goes_on = 4 / 6  # after a match of 2
    assert tree.tokens[0].tolist() == [2, 9, 5, 4]  # weights: 4 of 8, 3 of 8, then 4 of 8 one step deeper
    want = [1, goes_on / 2, goes_on * 3 / 8, goes_on**2 / 2]
    assert scores[0].exp().tolist() == pytest.approx(want, rel=0.01)
    tree, scores, _ = draft(index, [0], 8)
    assert tree.tokens[0].tolist() == [2, 9, 5, 4, 1, 2, 6, 2] and tree.num_nodes.tolist() == [7]
    assert scores[0, 6].exp() == pytest.approx(goes_on / 8, rel=0.01)


def test_ngram_draft_weighs_scopes_and_recency() -> None:
    index = sd.NgramIndex(1000, 2, 500)
    for text, group in (([1, 5], 0), ([1, 6], 7), ([1, 7], 7), ([1, 8], 3)):
        index.insert(ints(text), group=group)
    index.begin(0, group=7)
    index.insert(ints([1]), 0)
    tree, scores, _ = draft(index, [0], 4)
    assert tree.tokens[0].tolist() == [1, 7, 6, 5]  # first its own group, newest first; nothing of other groups
    tree, scores, _ = draft(index, [0], 4, group_weight=2.0, recency=0.5)
    assert tree.tokens[0].tolist() == [1, 7, 6, 5]
    assert scores[0].exp().tolist() == pytest.approx([1, 0.6 * 2 / 4, 0.6 / 4, 0.6 / 4], rel=0.01)
    assert draft(index, [0], 4, group_weight=0.0)[0].tokens.tolist() == [[1, 5, 1, 1]]
    assert draft(index, [0], 4, global_weight=0.0)[0].num_nodes.tolist() == [3]


def test_ngram_private_stream_is_visible_to_itself_only() -> None:
    index = sd.NgramIndex(1000, 2, 500)
    index.begin(0, private=True)
    index.insert(ints([1, 2, 3, 1, 2]), 0)
    index.insert(ints([1, 2, 9, 2]), 1)
    tree, _, _ = draft(index, [0, 1], 6)
    assert tree.tokens.tolist() == [[2, 3, 1, 2, 9, 2], [2, 9, 2, 2, 2, 2]] and tree.num_nodes.tolist() == [6, 3]
    index.release(0)
    index.begin(0)
    index.insert(ints([1, 2]), 0)
    assert draft(index, [0], 6)[0].tokens.tolist() == [[2, 9, 2, 2, 2, 2]]


def test_ngram_request_resumes_its_stream() -> None:
    """In another slot, with the weight of its own text and without a seam, though its slot's record moved."""
    index = sd.NgramIndex(1000, 3, 500)
    index.begin(0, request=10)
    index.insert(ints([1, 2, 3, 4, 5]), 0)
    index.begin(1, request=11)
    index.insert(ints([7, 7]), 1)
    index.release(0)
    index.release(1)
    assert begun(index, 0, request=11) == 2  # request 10 is in slot 1 now
    assert begun(index, 1, request=10, group=1) == 0  # another group means another request; the record is lost
    assert begun(index, 2, request=10) == 0
    index.release(0)
    assert begun(index, 1, request=11) == 2
    index.insert(ints([8, 7, 7]), 1)
    tree, _, match_len = draft(index, [1], 3)
    assert tree.tokens[0].tolist() == [7, 8, 7] and match_len.tolist() == [2]
    assert index.statistics.inserted == 10
    assert begun(index, 1, request=11) == 5  # also where it runs
    assert begun(index, 1) == 0


def begun(index: sd.NgramIndex, slot: int, **options: int) -> int:
    index.begin(slot, **options)  # type: ignore[arg-type]
    return index.length(slot)


def test_ngram_insert_skips_text_that_is_stored() -> None:
    index, plain = (sd.NgramIndex(1000, 1, 50) for _ in range(2))
    text = list(range(40))
    plain.insert(ints(text), 0)
    for start, end in ((0, 10), (0, 5), (3, 12), (12, 12), (0, 40), (40, 40)):
        index.insert(ints(text[start:end]), 0, start=start)
    assert index.length(0) == 40 and index._index.digest() == plain._index.digest()
    assert index.statistics.inserted == 40


def test_ngram_statistics_count_accepted_tokens_by_match_length() -> None:
    index = sd.NgramIndex(100, 3, 50)
    index.extend(ints([[5, 6, 5], [7, 7, 7], [1, 1, 1]]), ints([3, 1, 0]), ints([0, 1, 2]), ints([4, 4, 32]))
    index.extend(ints([[5, 6, 5]]), ints([2]), ints([-1]), ints([77]))
    index.extend(ints([[5, 6, 5]]), ints([2]), ints([0]), ints([0]))
    statistics = index.statistics
    assert {m: n for m, n in enumerate(statistics.rounds_by_match) if n} == {0: 1, 4: 2}
    assert {m: n for m, n in enumerate(statistics.accepted_by_match) if n} == {0: 1, 4: 2}


def test_ngram_draft_cuts_more_than_32_candidates() -> None:
    index = sd.NgramIndex(4000, 1, 500)
    for follower in range(60):
        for n in (1, 2, 4, 8):
            index.insert(ints([*range(9 - n, 9), 100 + follower]), group=follower % 2)
    index.begin(0, group=1)
    index.insert(ints(list(range(1, 9))), 0)
    tree, _, match_len = draft(index, [0], 64)
    assert tree.num_nodes.tolist() == [31] and match_len.tolist() == [
        8
    ]  # 15 texts of each scope, and two of them again


def test_ngram_chain_has_one_child_each() -> None:
    index = sd.NgramIndex(10_000, 1, 5000)
    rng = random.Random(3)
    index.insert(ints([rng.randrange(3) for _ in range(4000)]), 0)
    tree, _, _ = draft(index, [0], 40, mode="chain")
    used = int(tree.num_nodes[0])
    assert used > 8 and tree.parents[0, :used].tolist() == list(range(-1, used - 1))
    assert (tree.next_sibling == -1).all()


def test_ngram_lookup_sees_earlier_insertions_only() -> None:
    index = sd.NgramIndex(1000, 1, 500)
    index.insert(ints([4, 4, 4]), 0)
    tree, _, match_len = draft(index, [0], 9)
    assert tree.tokens[0, :3].tolist() == [4, 4, 4] and tree.num_nodes.tolist() == [3] and match_len.tolist() == [2]


def test_ngram_draft_with_slots_and_empty_rows() -> None:
    index = sd.NgramIndex(1000, 4, 500)
    for slot, text in {0: [1, 2, 1, 2, 1], 2: [1, 2, 3, 1, 2]}.items():
        index.insert(ints(text), slot)
    tree, scores, match_len = index.draft(None, ints([4, 0, 4, 0]), 6)
    order = [2, -1, 0, 99, -(2**31), 2]
    again = draft(index, order, 6, [4] * 6)
    for b, slot in enumerate(order):
        if slot in (0, 2):
            for field, other in zip(tree, again[0], strict=True):
                assert torch.equal(field[slot], other[b])
            assert torch.equal(scores[slot], again[1][b]) and match_len[slot] == again[2][b]
        else:
            check_empty_row(row_of(again[0], b), again[1][b], again[2][b])
    assert tree.num_nodes.tolist()[1] == 0


def test_ngram_index_accepts_empty_batch_and_empty_insert() -> None:
    index = sd.NgramIndex(100, 1, 10)
    index.insert(ints([]), 0)
    index.insert(ints([]))
    tree, scores, match_len = index.draft(ints([]), ints([]), 5)
    assert tree.tokens.shape == scores.shape == (0, 5) and match_len.shape == (0,)
    assert draft(index, [0], 5)[0].num_nodes.tolist() == [0]


@pytest.mark.parametrize("seq_len", [0, 2**31 - 1, -1, -(2**31)], ids=str)
def test_ngram_draft_accepts_any_seq_len(seq_len: int) -> None:
    index = sd.NgramIndex(100, 1, 50)
    index.insert(ints([1, 2, 3, 1, 2, 3]), 0)
    tree, _, _ = draft(index, [0], 4, [seq_len])
    assert int(tree.positions[0, 0]) == seq_len and tree.tokens[0].tolist() == [3, 1, 2, 3]


def test_ngram_index_stores_large_token_ids() -> None:
    index = sd.NgramIndex(100, 1, 50)
    index.insert(ints([2**31 - 1, 0, 2**31 - 1]), 0)
    assert draft(index, [0], 3)[0].tokens.tolist() == [[2**31 - 1, 0, 2**31 - 1]]


def test_ngram_index_memory_is_fixed_as_documented() -> None:
    index = sd.NgramIndex(1 << 20, 64, 4096)
    assert index.num_bytes == 768 + (1 << 20) // 8 * 512 + (38837 + 64 + 1) * 128 + 64 * 176
    assert index.num_bytes / (1 << 20) < 69
    small = sd.NgramIndex(50, 1, 10_000)
    before = small.num_bytes
    for _ in range(10):
        small.insert(torch.randint(1000, (999,), dtype=torch.int32), 0)
    assert small.num_bytes == before


def test_ngram_clear_resets_content_and_statistics() -> None:
    index = sd.NgramIndex(100, 2, 500)
    fresh = index._index.digest()
    index.insert(ints([1, 2, 1]), 1)
    draft(index, [0, 1], 4)
    assert index.statistics[:8] == (3, 3, 3, 3 / 104, 0, 1, 1, 2)  # 1 -> 2; 2 -> 1 and (1, 2) -> 1
    index.insert(torch.arange(2000, dtype=torch.int32))
    statistics = index.statistics
    assert statistics.evictions > 0 and statistics.entries <= 104 and statistics.load <= 1
    assert statistics.inserted == 2003 and 100 <= statistics.held <= 6 * 27
    index.clear()
    assert index.statistics == (*(0,) * 8, [0] * 33, [0] * 33, 0) and index._index.digest() == fresh
    assert draft(index, [1], 4)[0].num_nodes.tolist() == [0]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-2, NUM_SLOTS + 1), texts(3, 5)), max_size=8))
def test_ngram_extend_equals_inserts_row_by_row(rows: list[tuple[int, list[int]]]) -> None:
    """A slot may occur twice; empty rows and entries after the lengths hold garbage."""
    extended, inserted = (sd.NgramIndex(1 << 10, NUM_SLOTS, 100) for _ in range(2))
    for index in (extended, inserted):
        index.insert(ints([0, 1, 2, 0, 1]), 1)
    garbage = [-1, -(2**31), 2**31 - 1, 7, -77]
    tokens = ints([text + garbage[len(text) :] for _, text in rows]).reshape(len(rows), 5)
    lengths = ints([len(text) if 0 <= slot < NUM_SLOTS else -9 for slot, text in rows])
    extended.extend(tokens, lengths, ints([slot for slot, _ in rows]))
    for slot, text in rows:
        if 0 <= slot < NUM_SLOTS:
            inserted.insert(ints(text), slot)
    assert extended._index.digest() == inserted._index.digest()
    assert extended.statistics == inserted.statistics


def test_ngram_extend_without_slots() -> None:
    index = sd.NgramIndex(100, 3, 50)
    index.extend(ints([[5, 6, 5], [7, 7, -1]]), ints([3, 2]), None)
    assert draft(index, [0, 1, 2], 2)[0].tokens.tolist() == [[5, 6], [7, 7], [0, 0]]


def test_ngram_index_accepts_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    index = sd.NgramIndex(100, 1, 50)
    index.insert(np.array([5, 6, 5], np.int32), 0)
    tree, _, _ = index.draft(np.array([0], np.int32), np.array([2], np.int32), 3)
    assert type(tree.tokens) is np.ndarray and tree.tokens.tolist() == [[5, 6, 5]]


def one_slot_index() -> sd.NgramIndex:
    index = sd.NgramIndex(100, 2, 10)
    index.insert(ints([1, 2, 3, 1, 2]), 1)
    return index


REFUSED: list[tuple[Callable[[sd.NgramIndex], object], str]] = [
    (lambda i: i.insert(ints([1]), 2), "ngram_insert: slot is 2, expected 0 to 1"),
    (lambda i: i.insert(ints([1]), -1), "ngram_insert: slot is -1, expected 0 to 1"),
    (lambda i: i.insert(ints([3, -5]), 1), "ngram_insert: tokens has -5 at index 1, expected token ids of 0 or more"),
    (lambda i: i.insert(ints([3] * 6), 1), "ngram_insert: tokens takes slot 1 to 11 tokens, expected at most max_len=10"),
    (lambda i: i.insert(ints([3] * 11), 0), "ngram_insert: tokens takes slot 0 to 11 tokens, expected at most max_len=10"),
    (lambda i: i.insert(torch.zeros(3, dtype=torch.int64), 1), "ngram_insert: tokens is int64, expected int32"),
    (lambda i: i.insert(ints([[1, 2]]), 1), "ngram_insert: tokens has shape [1, 2], expected [tokens]"),
    (lambda i: i.extend(ints([[9], [1]]), ints([1, 2]), ints([0, 1])), "ngram_extend: num_valid has 2 in row 1, expected 0 to accept_width=1"),
    (lambda i: i.extend(ints([[9], [1]]), ints([1, -1]), None), "ngram_extend: num_valid has -1 in row 1, expected 0 to accept_width=1"),
    (lambda i: i.extend(ints([[9, 9], [1, -3]]), ints([2, 2]), None), "ngram_extend: tokens has -3 at index 1 of row 1, expected token ids of 0 or more"),
    (lambda i: i.extend(ints([[9] * 3] * 2), ints([3, 3]), ints([1, 1])), "ngram_extend: tokens takes slot 1 to 11 tokens, expected at most max_len=10"),
    (lambda i: i.extend(ints([9]), ints([1]), None), "ngram_extend: tokens has shape [1], expected [batch, accept_width]"),
    (lambda i: i.extend(ints([[9]]), ints([1, 1]), None), "ngram_extend: num_valid has shape [2], expected [batch=1]"),
    (lambda i: i.extend(ints([[9]] * 3), ints([1] * 3), None), "ngram_extend: slots is None for batch=3, expected a tensor, or batch <= num_slots=2"),
    (lambda i: i.insert(ints([1]), group=-1), "ngram_insert: group is -1, expected 0 to 2147483647"),
    (lambda i: i.insert(ints([1]), 0, group=1), "ngram_insert: group is 1 with a slot, expected that of `begin`"),
    (lambda i: i.insert(ints([1]), 1, start=6), "ngram_insert: start is 6, expected 0 to 5"),
    (lambda i: i.insert(ints([1]), 1, start=-1), "ngram_insert: start is -1, expected 0 to 10"),
    (lambda i: i.insert(ints([1]), start=1), "ngram_insert: start is 1, expected 0 to 0"),
    (lambda i: i.length(2), "ngram_length: slot is 2, expected 0 to 1"),
    (lambda i: i.begin(2), "ngram_begin: slot is 2, expected 0 to 1"),
    (lambda i: i.begin(1, group=2**31), "ngram_begin: group is 2147483648, expected 0 to 2147483647"),
    (lambda i: i.begin(1, request=-1), "ngram_begin: request is -1, expected 0 to 9223372036854775807"),
    (lambda i: i.extend(ints([[9]]), ints([1]), None, ints([33])), "ngram_extend: match_len has 33 in row 0, expected 0 to 32"),
    (lambda i: i.extend(ints([[9]]), ints([1]), None, ints([3, 3])), "ngram_extend: match_len has shape [2], expected [batch=1]"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, own_weight=-1), "ngram_draft: own_weight is -1.000000, expected 0 to 256"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, group_weight=257), "ngram_draft: group_weight is 257.000000, expected 0 to 256"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, global_weight=float("nan")), "ngram_draft: global_weight is nan, expected 0 to 256"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, recency=0), "ngram_draft: recency is 0.000000, expected above 0, at most 1"),
    (lambda i: i.release(2), "ngram_release: slot is 2, expected 0 to 1"),
    (lambda i: i.draft(None, ints([1, 1, 1]), 4), "ngram_draft: slots is None for batch=3, expected a tensor, or batch <= num_slots=2"),
    (lambda i: i.draft(ints([1]), ints([1, 1]), 4), "ngram_draft: seq_lens has shape [2], expected [batch=1]"),
    (lambda i: i.draft(ints([1]), ints([1]), 0), "ngram_draft: num_nodes is 0, expected 1 to 256"),
    (lambda i: i.draft(ints([1]), ints([1]), 257), "ngram_draft: num_nodes is 257, expected 1 to 256"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, mode="list"), "ngram_draft: mode is 'list', expected 'tree' or 'chain'"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, min_prob=1.5), "ngram_draft: min_prob is 1.500000, expected 0 to 1"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, min_prob=float("nan")), "ngram_draft: min_prob is nan, expected 0 to 1"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, min_match=33), "ngram_draft: min_match is 33, expected 0 to 32"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, out=with_tree(tokens=torch.zeros(1, 5, dtype=torch.int32))), "ngram_draft: out.tree.tokens has shape [1, 5], expected [batch=1, num_nodes=4]"),
    (lambda i: i.draft(ints([1]), ints([1]), 4, out=with_tree(mask=torch.zeros(1, 4, 2, dtype=torch.int64))), "ngram_draft: out.tree.mask has shape [1, 4, 2], expected [batch=1, num_nodes=4, mask_words=1]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:60] for _, m in REFUSED])
def test_ngram_index_error_messages_leave_state_unchanged(
    call: Callable[[sd.NgramIndex], object], message: str
) -> None:
    index = one_slot_index()
    digest = index._index.digest()
    with pytest.raises(ValueError) as error:
        call(index)
    assert str(error.value) == message
    assert index._index.digest() == digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "ngram_index: max_tokens is 0, expected 1 to 1073741824"),
        ((1, 0, 1), "ngram_index: num_slots is 0, expected 1 to 65536"),
        ((1, 1, 0), "ngram_index: max_len is 0, expected 1 to 2147483647"),
        ((1, 1, 1, 0), "ngram_index: num_threads is 0, expected 1 to 256"),
    ],
)
def test_ngram_index_construction_error_messages(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sd.NgramIndex(*arguments[:3], num_threads=arguments[3] if len(arguments) > 3 else 1)
    assert str(error.value) == message
