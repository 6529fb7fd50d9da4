"""What a round owes rows that take no part in it, and that drafts are those of the algorithm, not merely lossless."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_kernels import Status
from specdec_kernels.engine import DraftBudget, Eagle3, Engine, SamplingParams, Standalone
from specdec_kernels.engine.device.round import Round
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.models.heads.eagle3 import Eagle3Head, feature_layers
from specdec_kernels.models.heads.loading import config_of_head
from specdec_kernels.tiny import tiny_model
from support.devices import HAS_CUDA
from support.exhaustive import exhaustive, thinned
from support.manual_rounds import (
    MAX_LEN,
    begin,
    every_draft,
    kv_of,
    make_engine,
    prompts,
    run,
    slot_state,
)
from support.random_checkpoints import random_prompts, save_random_model
from support.tiny_checkpoint import reference_model

EIGHT = SamplingParams(max_new_tokens=8)


def texts_of(engine: Engine, slots: list[int], rounds: int) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for _ in range(rounds):
        for slot, tokens in run(engine, slots).items():
            texts.setdefault(slot, []).extend(tokens)
    return texts


# --- rows that take no part


@every_draft
def test_stalled_slot_is_unchanged_and_recovers(name: str, device: torch.device) -> None:
    alone = make_engine(name, device)
    for slot in range(3):
        begin(alone, slot, prompts()[slot])
    want = texts_of(alone, [0, 1, 2], 12)

    engine = make_engine(name, device)
    for slot in range(3):
        begin(engine, slot, prompts()[slot])
    texts: dict[int, list[int]] = {slot: [] for slot in range(3)}
    num_free, stalled_rounds = engine.state.pool.num_free, 0
    free = int(num_free[0])
    for turn in range(12):
        # From round 2 to 7 the pool is empty: a slot that needs another page stalls.
        if turn == 2:
            free = int(num_free[0])
            num_free[0] = 0
        if turn == 8:
            num_free[0] = free
        before = [(slot_state(engine, slot), kv_of(engine, slot)) for slot in range(3)]
        for slot, tokens in run(engine, [0, 1, 2]).items():
            texts[slot] += tokens
            status = int(engine.state.status[slot])
            assert status in (0, Status.STALLED), Status(status)
            if status == Status.STALLED:
                stalled_rounds += 1
                assert not tokens and 2 <= turn < 8
                assert slot_state(engine, slot) == before[slot][0]
                assert torch.equal(kv_of(engine, slot), before[slot][1])
    assert stalled_rounds > 3
    assert not engine.state.status.any()
    for slot in range(3):
        shortest = min(len(texts[slot]), len(want[slot]))
        assert shortest >= 6 and texts[slot][:shortest] == want[slot][:shortest]


@every_draft
def test_empty_rows_change_nothing(name: str, device: torch.device) -> None:
    """Empty rows may be anywhere in a batch, also when the last slot runs."""
    want_engine, engine = (make_engine(name, device, num_slots=5) for _ in range(2))
    for slot in (0, 4):
        begin(want_engine, slot, prompts()[slot])
        begin(engine, slot, prompts()[slot])
    for _ in range(6):
        want, got = run(want_engine, [0, 4]), run(engine, [-1, 4, -1, 0, -1])
        assert got == want
        for slot in (0, 4):
            a, b = slot_state(want_engine, slot), slot_state(engine, slot)
            for key in a.keys() - {"pages"}:  # given out in the order of rows
                torch.testing.assert_close(torch.tensor(a[key]), torch.tensor(b[key]), rtol=1e-4, atol=1e-4)
    assert not engine.state.status.any()


@every_draft
def test_finished_slot_is_unchanged_by_rounds(name: str, device: torch.device) -> None:
    engine, alone = make_engine(name, device), make_engine(name, device)
    begin(engine, 0, prompts()[0], budget=3)
    begin(engine, 1, prompts()[1])
    begin(alone, 1, prompts()[1])
    other, want = list[int](), list[int]()  # in rounds of other lengths, perhaps: what a draft learns is of both
    while not int(engine.state.finish_reasons[0]):
        other += run(engine, [0, 1])[1]
        want += run(alone, [1])[1]
    before = slot_state(engine, 0)
    for _ in range(4):
        got = run(engine, [0, 1])
        assert got[0] == []
        other += got[1]
        want += run(alone, [1])[1]
        after = slot_state(engine, 0)
        del before["pages"], before["count"], after["pages"], after["count"]
        assert after == before
        before = slot_state(engine, 0)
    both = min(len(other), len(want))
    assert both > 4 and other[:both] == want[:both] and not engine.state.status.any()


# --- the order of requests, and retraction


@every_draft
def test_texts_do_not_depend_on_the_order_of_prompts(name: str, device: torch.device) -> None:
    engine = make_engine(name, device)
    want = [o.tokens for o in engine.generate(prompts(), EIGHT)]
    order = torch.randperm(len(want)).tolist()
    got = engine.generate([prompts()[i] for i in order], EIGHT)
    assert [o.tokens for o in got] == [want[i] for i in order]


@every_draft
def test_retraction_keeps_texts(name: str, device: torch.device) -> None:
    """A pool for one long request, and four that fit together only while they are short."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    roomy = make_engine(name, device, num_slots=4)
    want = roomy.generate(prompts()[:5], params)
    tight = make_engine(name, device, num_slots=4, num_pages=roomy.state.pool.page_table.shape[1] + 4)
    got = tight.generate(prompts()[:5], params)
    assert tight.core.scheduler.num_retractions > 0
    assert [o.tokens for o in got] == [o.tokens for o in want]
    firsts = [60 - o.stats.accepted - o.stats.rounds for o in got]  # tokens of first rounds, one each time it began
    assert min(firsts) == 1 and 5 < sum(firsts) <= 5 + tight.core.scheduler.num_retractions
    pool = tight.state.pool
    assert int(pool.num_free[0]) == len(pool.free_stack) and not pool.page_refs.any()


def test_ngram_streams_equal_request_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through retraction and reuse of slots; a retracted request's text is inserted once."""
    engine = make_engine("ngram", num_slots=4, num_pages=45)
    index: Any = engine.draft.index  # type: ignore[attr-defined]
    texts: dict[int, list[int]] = {}  # by request
    running: dict[int, int] = {}  # slot -> request
    begun = 0

    class Recorder:
        def begin(self, slot: int, group: int, request: int) -> None:
            nonlocal begun
            begun += 1
            running[slot] = request
            index.begin(slot, group=group, request=request)
            assert index.length(slot) in (0, len(texts.get(request, [])))

        def insert(self, tokens: torch.Tensor, slot: int, start: int) -> None:
            assert start == 0
            texts[running[slot]] = tokens.tolist()
            index.insert(tokens, slot, start=0)

        def extend(self, tokens: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, match: torch.Tensor) -> None:
            for row, length, slot in zip(tokens, lengths.tolist(), slots.tolist(), strict=True):
                texts[running[slot]] += row[:length].tolist()
            index.extend(tokens, lengths, slots, match)

        def release(self, slot: int) -> None:
            running.pop(slot, None)
            index.release(slot)

        def draft(self, *arguments: Any) -> Any:
            return index.draft(*arguments)

    monkeypatch.setattr(engine.draft, "index", Recorder())
    outputs = engine.generate(prompts()[:5], SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert engine.core.scheduler.num_retractions > 0 and begun > 5 and not running
    assert [texts[request] for request in sorted(texts)] == [o.prompt_tokens + o.tokens for o in outputs]
    statistics = index.statistics
    assert statistics.inserted == sum(map(len, texts.values()))
    assert sum(statistics.rounds_by_match) == sum(o.stats.rounds for o in outputs)
    # A request's last round may be cut short by its budget.
    assert sum(statistics.accepted_by_match) >= sum(o.stats.accepted for o in outputs)


@pytest.mark.parametrize("name", [*exhaustive("ngram"), "eagle3+ngram"])
def test_groups_draft_from_their_own_texts(name: str, device: torch.device) -> None:
    """The same request again is drafted from its first run by its own group and by everybody's, not by another."""
    prompt = prompts()[1]

    def rounds(first: int, second: int) -> int:
        engine = make_engine(name, device, num_slots=1, adaptive=False)
        groups = [SamplingParams(40, ignore_eos=True, ngram_group=group) for group in (first, second)]
        outputs = [engine.generate([prompt], params)[0] for params in groups]
        assert outputs[0].tokens == outputs[1].tokens
        return outputs[1].stats.rounds

    shared, seen = rounds(7, 7), rounds(0, 7)
    apart, hidden = rounds(7, 8), rounds(7, 0)
    assert max(shared, seen) < min(apart, hidden)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@pytest.mark.parametrize("name", ["ngram", "eagle3+ngram"])
def test_captured_rounds_feed_the_index(name: str) -> None:
    """Two in flight, with retractions and slots that are given away: all that was said is held, once and in order."""
    engine = make_engine(name, "cuda", num_slots=4, num_pages=60, adaptive=False)  # whose plain rounds look nothing up
    assert engine.graphs is not None
    outputs = engine.generate(prompts()[:6], SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert engine.core.scheduler.num_retractions > 0
    draft: Any = engine.draft
    torch.cuda.synchronize()  # the last rounds may still run, on the engine's stream
    index = (draft if name == "ngram" else draft.second).index.to("cpu")
    statistics = index.statistics
    assert statistics.inserted == statistics.held == sum(len(o.prompt_tokens + o.tokens) for o in outputs)
    assert sum(statistics.rounds_by_match) == sum(o.stats.rounds for o in outputs) and statistics.refused == 0
    for output in outputs:
        text = output.prompt_tokens + output.tokens
        index.begin(0, private=True)
        index.insert(torch.tensor(text[:-12], dtype=torch.int32), 0)
        tree, _, match_len = index.draft(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 256)
        node = 0
        for token in text[-12:]:
            node = next(i for i in range(256) if (tree.parents[0, i], tree.tokens[0, i]) == (node, token))
        assert match_len[0] == min(32, len(text) - 12)


# --- chunks


@pytest.mark.parametrize("name", ["eagle3-tree", "standalone"])
def test_prefill_chunk_size_keeps_drafts(name: str, device: torch.device) -> None:
    text = prompts()[5][:34]
    whole = make_engine(name, device)
    begin(whole, 1, text)
    want = {key: torch.tensor(value) for key, value in slot_state(whole, 1).items()}
    first = run(whole, [1])
    engine = make_engine(name, device)
    for chunk in (*range(1, 18), 32, 33, 34):
        begin(engine, 1, text, chunk=chunk)
        got = slot_state(engine, 1)
        for key in ("length", "root", "child_ids"):
            assert got[key] == want[key].tolist(), (chunk, key)
        for key in ("child_logprobs", "last_hidden"):
            if key in got:
                torch.testing.assert_close(torch.tensor(got[key]), want[key], rtol=1e-3, atol=1e-3)
        assert run(engine, [1]) == first


# --- EAGLE-3 against its own training code, which knows neither pages nor rounds


@functools.cache
def training_head() -> Any:
    """Return the head in the code that trained it."""
    source = Path(__file__).resolve().parents[2] / "examples" / "tiny"
    sys.path.insert(0, str(source))
    try:
        from eagle3 import Eagle3Head  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(source))
    folder = tiny_model("eagle3")
    head = Eagle3Head(json.loads((folder / "config.json").read_text()))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.float().eval()


def features_of(text: list[int]) -> tuple[Any, torch.Tensor]:
    """Return transformers' own hidden states that enter the feature layers, of all positions of a text."""
    model = reference_model()
    layers = feature_layers(config_of_head(Eagle3Head, tiny_model("eagle3")), model.config.num_hidden_layers)
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    assert all(layer < model.config.num_hidden_layers for layer in layers)
    return model.get_input_embeddings(), torch.cat([states[layer][0] for layer in layers], -1).clone()


def drafted_by_training_code(text: list[int], steps: int, topk: int, nodes: int) -> set[tuple[int, ...]]:
    """Recompute the paths (tokens below the root) of all kept candidates that are drafted after a text."""
    embed, features = features_of(text)
    base = torch.tensor([len(text) - 2])
    token, parent, _level, kept = (
        x[0].tolist() for x in training_head().draft(embed, torch.tensor(text), features, base, steps, topk, nodes)
    )

    def path(candidate: int) -> tuple[int, ...]:
        above = () if parent[candidate] == 0 else path(parent[candidate] - 1)
        return (*above, token[candidate])

    return {path(c) for c in range(len(token)) if kept[c]}


def paths_of(tree: Any, row: int) -> set[tuple[int, ...]]:
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append((*paths[parents[node]], tokens[node]))
    return set(paths[1:])


def in_the_format_of_speculators(folder: Path, **options: Any) -> Path:
    """Save the tiny head as speculators does.

    The layer's config is apart, without its type's defaults, and feature layers are named by what enters them.
    """
    config = json.loads((tiny_model("eagle3") / "config.json").read_text())
    layer_keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {key: config[key] for key in (*layer_keys, "rms_norm_eps", "rope_parameters", "max_position_embeddings")}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "transformer_layer_config": layer | {"model_type": "llama", "vocab_size": config["vocab_size"]},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(nested | options))
    tensors = load_file(tiny_model("eagle3") / "model.safetensors")
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("head", "chunk"),
    thinned(
        itertools.product(["packaged", "speculators", "norm_before_residual"], [1000, 5]),
        {("packaged", 1000), ("speculators", 5), ("norm_before_residual", 5)}.__contains__,
    ),
)
@pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 1, 5), *exhaustive((4, 3, 12)), (5, 8, 32)])
def test_eagle3_trees_are_those_of_the_training_code(
    steps: int,
    topk: int,
    nodes: int,
    chunk: int,
    head: str,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every round's tree of three requests in a batch; a row or rotation off by one would change nearly all of them."""
    trained = training_head()
    folder = tiny_model("eagle3")
    if head == "speculators":
        folder = in_the_format_of_speculators(tmp_path / "head")
    if head == "norm_before_residual":
        folder = in_the_format_of_speculators(tmp_path / "head", norm_before_residual=True)
        finish = trained.finish
        norm = trained.midlayer.hidden_norm
        monkeypatch.setattr(trained, "finish", lambda feature, attended: finish(norm(feature), attended))
    engine = Engine(
        tiny_model("target"),
        draft=Eagle3(folder, num_steps=steps, topk=topk, num_nodes=nodes),
        max_len=MAX_LEN,
        num_slots=4,
        page_size=3,
        dtype=torch.float32,
        device=device,
    )
    trees: list[Any] = []
    propose = engine.draft.propose

    def keep(slots: torch.Tensor, budget: DraftBudget) -> Any:
        proposal = propose(slots, budget)
        trees.append(scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state).tree)
        return proposal

    monkeypatch.setattr(engine.draft, "propose", keep)
    monkeypatch.setattr(engine.draft, "learn", lambda committed: None)  # the training code knows no calibration
    slots = [3, 0, 2]
    texts = {slot: list(prompt) for slot, prompt in zip(slots, prompts(), strict=False)}
    for slot in slots:
        texts[slot] += begin(engine, slot, texts[slot], chunk=chunk)
    same = total = accepted = 0
    for _ in range(6):
        new = run(engine, slots)
        for row, slot in enumerate(slots):
            want, got = drafted_by_training_code(texts[slot], steps, topk, nodes), paths_of(trees[-1], row)
            total += len(want)
            same += len(want & got)
            assert len(got) == len(want) == nodes - 1
            texts[slot] += new[slot]
            accepted += len(new[slot]) - 1
    if head != "norm_before_residual":  # it was not trained so
        assert accepted > 10  # rows came from draft-extend, not from prefill alone
    print(f"{same} of {total} nodes")
    assert same >= 0.99 * total, f"{same} of {total} nodes"  # a near-tie may swap the last nodes kept


def test_one_step_of_drafting(device: torch.device, tmp_path: Path) -> None:
    """num_steps = 1 has no draft forward at all; more nodes than candidates leave rows unused."""
    folder = save_random_model(tmp_path / "target", "llama")
    want = [o.tokens for o in Engine(folder, max_len=MAX_LEN, device=device).generate(random_prompts(3), EIGHT)]
    torch.manual_seed(20)
    draft = Standalone(folder, num_steps=1, topk=2, num_nodes=8)
    engine = Engine(folder, draft=draft, adaptive=False, max_len=MAX_LEN, device=device)
    got = engine.generate(random_prompts(3), EIGHT)
    assert [len(o.tokens) for o in got] == [len(text) for text in want]
    assert all(o.stats.accept_length > 1.5 for o in got)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_memsets_of_a_captured_round_become_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills write words of any size at odd addresses, and leave nodes before and after alone."""
    scratch = torch.zeros(300_000, dtype=torch.uint8, device="cuda")
    parts = [scratch[1:4], scratch[16 : 16 + 130_001], scratch[200_000:200_256].view(torch.int32), scratch[-1:]]
    launch = Round.launch

    def zeroing(round: Round, *size: int) -> None:
        for part in parts[:2]:
            part.zero_()
        launch(round, *size)
        for part in parts[2:]:
            part.zero_()

    want = make_engine("eagle3-chain", "cuda").generate(prompts()[:2], EIGHT)
    monkeypatch.setattr(Round, "launch", zeroing)
    engine = make_engine("eagle3-chain", "cuda", batch_sizes=[3])
    scratch.fill_(7)
    got = engine.generate(prompts()[:2], EIGHT)
    assert [o.tokens for o in got] == [o.tokens for o in want]
    assert not any(part.any() for part in parts)
    for part in parts:
        part.view(torch.uint8).fill_(7)
    assert (scratch == 7).all()
