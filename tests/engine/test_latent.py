"""Engines over targets with latent attention: texts are those of transformers, whatever drafts and however slots go."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.engine import Draft, Eagle3, Engine, Ngram, RequestOutput, SamplingParams, Standalone
from specdec_kernels.engine.device import latent_blocks, prefill_graphs
from specdec_kernels.models.kv_pools import LatentLayout
from specdec_kernels.models.layers.latent_attention import LatentAttention
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.norm import RMSNorm
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive, thinned
from support.hybrid_cases import greedy_alone
from support.latent_cases import COUNT, LATENT, latent_module, module_of, prompts_of, texts_of
from support.observed_rounds import wrap_method
from support.tiny_checkpoint import Comparison

WIDE = {"vocab_size": 2048, "hidden_size": 256}  # of the packaged head
OPTIONS: dict[str, Any] = {
    "implementation": "native", "adaptive": False, "max_len": 160, "num_slots": 8, "page_size": 16,
    "dtype": torch.float32, "prefill_chunk": 24,
}  # fmt: skip
GREEDY = SamplingParams(COUNT, ignore_eos=True)
ROW = 32 + 16  # elements of a latent row


def make_engine(module: Any, draft: Draft | None, device: torch.device, **changes: Any) -> Engine:
    return Engine(deepcopy(module), draft=draft, device=device, **(OPTIONS | changes))


def predicted(case: str) -> list[SamplingParams]:
    """Return parameters with a prediction that is right but for one token, so that long paths are accepted."""
    return [replace(GREEDY, prediction=[*text[:5], 3, *text[5:]]) for text in texts_of(case)]


def check_texts(case: str, outputs: list[RequestOutput]) -> None:
    comparison = Comparison(module_of(case))
    for prompt, output, text in zip(prompts_of(), outputs, texts_of(case), strict=True):
        comparison.check(prompt, list(output.tokens), text)
    assert len(comparison.near_ties) <= 1


BY_DEFAULT = (("deepseek_v3", 1), ("kimi_linear", 64))


@pytest.mark.parametrize(
    ("case", "page_size"),
    [
        *BY_DEFAULT,
        *exhaustive(*((case, size) for case in LATENT for size in (1, 16, 64) if (case, size) not in BY_DEFAULT)),
    ],
)
def test_greedy_text_is_that_of_transformers(case: str, page_size: int, device: torch.device) -> None:
    """Eight prompts of mixed lengths, prefilled in chunks that several of them share."""
    with make_engine(module_of(case), Ngram(num_nodes=9), device, page_size=page_size) as engine:
        assert {type(group.layout) for group in engine.target.pools.groups} == {LatentLayout}
        outputs = engine.generate(prompts_of(), predicted(case))
    check_texts(case, outputs)
    assert all(output.stats.accept_length > 2 for output in outputs)


@pytest.mark.parametrize("case", [*exhaustive(*LATENT)])
def test_plain_and_self_drafted_texts_are_those_of_transformers(case: str, device: torch.device) -> None:
    drafts: list[Draft | None] = [None]
    if case != "kimi_linear":  # a hybrid is no draft
        drafts.append(Standalone(deepcopy(module_of(case)), num_steps=3, topk=3, num_nodes=9))
    for draft in drafts:
        with make_engine(module_of(case), draft, device) as engine:
            outputs = engine.generate(prompts_of(), GREEDY)
        check_texts(case, outputs)
    if case != "kimi_linear":
        assert sum(output.stats.accept_length for output in outputs) / len(outputs) > 2


@pytest.mark.parametrize("case", ["glm4_moe_lite", *exhaustive("deepseek_v2", "deepseek_v3", "kimi_linear")])
def test_eagle3_trees_read_the_states_that_enter_layers(case: str, device: torch.device) -> None:
    module, prompts = latent_module(case, **WIDE), prompts_of(WIDE["vocab_size"])
    with make_engine(module, Eagle3(tiny_model("eagle3"), num_steps=3, topk=3, num_nodes=10), device) as engine:
        outputs = engine.generate(prompts, GREEDY)
    comparison = Comparison(module)
    for prompt, output in zip(prompts, outputs, strict=True):
        comparison.check(prompt, list(output.tokens), greedy_alone(module, prompt, COUNT))
    assert len(comparison.near_ties) <= 1


def test_features_of_half_layers_are_refused(device: torch.device) -> None:
    """A layer of LongCat-Flash counts twice in its config; states are known before and after whole layers."""
    module, draft = (
        latent_module("longcat_flash", **WIDE),
        Eagle3(tiny_model("eagle3")),
    )
    with pytest.raises(ValueError) as error:
        make_engine(module, draft, device)
    assert str(error.value) == "model feature_layers=(1, 2, 3), expected 0 to 2 (layers of longcat_flash)"


@pytest.mark.parametrize("case", ["minicpm3", *exhaustive("deepseek_v2 lite", "kimi_linear")])
def test_requests_of_all_kinds_end_as_they_do_alone(case: str, device: torch.device) -> None:
    """Through a pool that is too small for them, with cached prefixes, by rounds of any size."""
    rng, module, count = random.Random(case), module_of(case), 20
    common = [rng.randrange(200) for _ in range(20)]
    texts = [[*common, *(rng.randrange(200) for _ in range(rng.choice([1, 5, 30])))] for _ in range(6)]
    kinds = [replace(GREEDY, max_new_tokens=30, seed=i, temperature=0.9 * (i % 2)) for i in range(len(texts))]
    with make_engine(module, None, device) as engine:
        alone = engine.generate(texts, kinds)
    chosen = [rng.randrange(len(texts)) for _ in range(count)]
    params = [
        replace(
            kinds[index],
            max_new_tokens=rng.randint(1, 30),
            speculation=rng.choice(["on", "off", 3]),
            prediction=list(alone[index].tokens) if rng.random() < 0.5 else None,
        )
        for index in chosen
    ]
    comparison = Comparison(module)
    for prefix_cache in (False, True):
        # Rounds that are not adaptive need pages enough for retractions.
        options = {"adaptive": prefix_cache, "page_size": 4, "num_pages": 24, "max_len": 84, "num_slots": 5}
        with make_engine(module, Ngram(num_nodes=8), device, prefix_cache=prefix_cache, **options) as engine:
            outputs = engine.generate([texts[index] for index in chosen], params)
            stats = engine.stats()
        assert stats.prefix_hits > 0 if prefix_cache else stats.retractions > 0
        for at, (index, output) in enumerate(zip(chosen, outputs, strict=True)):
            comparison.check(texts[index], list(output.tokens), list(alone[index].tokens), params[at])
    assert len(comparison.near_ties) <= 1


def test_new_weights_and_sleep_reach_what_is_made_of_them(device: torch.device) -> None:
    case = "deepseek_v3"
    module, other = module_of(case), latent_module(case, seed=8)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def texts(engine: Engine) -> list[list[int]]:
        return [list(output.tokens) for output in engine.generate(prompts_of(), GREEDY)]

    with make_engine(module, Ngram(num_nodes=6), device) as engine, make_engine(other, None, device) as fresh:
        before = texts(engine)
        engine.update_weights(dict(other.state_dict()))
        assert texts(engine) == texts(fresh) != before
        engine.update_weights(weights)
        num_bytes = engine.target.pools.num_bytes
        engine.sleep()
        assert engine.target.pools.num_bytes == 0
        engine.wake()
        assert engine.target.pools.num_bytes == num_bytes
        assert texts(engine) == before


@pytest.mark.parametrize("case", ["youtu", *exhaustive("deepseek_v3", "kimi_linear")])
def test_exported_requests_continue(case: str, device: torch.device) -> None:
    prompt = prompts_of()[2]
    want = greedy_alone(module_of(case), prompt, 40)
    with (
        make_engine(module_of(case), Ngram(num_nodes=6), device) as one,
        make_engine(module_of(case), Ngram(num_nodes=6), device, page_size=4) as two,
    ):
        wrap_method(one.core.executor, "launch", start_late)
        request = one.submit(prompt, replace(GREEDY, max_new_tokens=40, prediction=want[:20]))
        for _ in request:
            if len(request.output.tokens) >= 6:
                break
        exported = one.export_request(request)
        rows = exported.tensors["target.0.latent"]
        assert rows.shape[0] == LATENT_LAYERS.get(case, 3) and list(rows.shape[2:]) == [1, ROW]
        output = two.import_request(exported).result()
    comparison = Comparison(module_of(case))
    comparison.check(prompt, list(output.tokens), want)


LATENT_LAYERS = {"kimi_linear": 1}


def start_late(begin: Callable[..., None], *size: int) -> None:
    """Begin a round late, so that a request can leave before its end."""
    time.sleep(0.005)
    begin(*size)


def test_rows_of_8_bits_are_within_their_rounding(device: torch.device) -> None:
    """The text is that of the target with such rows, with any draft."""
    case = "deepseek_v2"
    texts, scores = [], []
    for draft, kv_dtype in ((None, "fp8_e4m3"), (Ngram(num_nodes=9), "fp8_e4m3"), (None, None)):
        params = [replace(each, logprobs=1) for each in (predicted(case) if draft else [GREEDY] * 8)]
        with make_engine(module_of(case), draft, device, kv_dtype=kv_dtype) as engine:
            pools = engine.target.pools
            assert pools.num_bytes == pools.num_pages * 16 * 3 * ROW * (1 if kv_dtype else 4)
            outputs = engine.generate(prompts_of(), params)
        texts.append([list(output.tokens) for output in outputs])
        scores.append([output.logprobs[0].logprob for output in outputs if output.logprobs])
    assert texts[0] == texts[1]
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[2]), rtol=0, atol=0.5)
    assert scores[0] != scores[2]


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let every prefill expand latent rows, 64 of a prefix at a time; the rows of each layer's blocks are listed."""
    blocks: list[tuple[int, ...]] = []
    attend = LatentAttention.attend_expanded

    def listed(self: LatentAttention, queries: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        blocks.append(tuple(len(block.rows) for block in batch.latent_blocks))
        return attend(self, queries, positions, batch)

    monkeypatch.setattr(LatentAttention, "attend_expanded", listed)
    monkeypatch.setattr(LatentAttention, "is_cheaper_expanded", lambda *_: True)
    monkeypatch.setattr(prefill_graphs, "EXPANDED_ROWS", 1)
    monkeypatch.setattr(latent_blocks, "BLOCK_ROWS", 64)
    return blocks


@pytest.mark.parametrize("case", thinned(LATENT, ("deepseek_v3", "minicpm3").__contains__))
def test_expanded_prefill_leaves_the_text_of_transformers(
    case: str, expansions: list[tuple[int, ...]], device: torch.device
) -> None:
    """Prompts are prefilled in chunks of 50 rows, some of them of several prompts."""
    with make_engine(module_of(case), Ngram(num_nodes=9), device, prefill_chunk=50, max_len=320) as engine:
        outputs = engine.generate(prompts_of(), predicted(case))
    check_texts(case, outputs)
    assert {len(blocks) for blocks in expansions} == {1, 2, 3} and max(map(max, expansions)) > 64


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_expanded_prefill_scores_as_the_absorbed_one(
    kv_dtype: str | None, expansions: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The second prompt is prefilled after a cached prefix of the first, all of whose tokens are scored."""
    texts = [[*range(180), 3, 7], [*range(180), 9, 4, 5, 2]]
    params = SamplingParams(4, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"prefill_chunk": 64, "max_len": 240, "kv_dtype": kv_dtype, "prefix_cache": True}
    scores = []
    for rows in (1, 10**6):
        monkeypatch.setattr(prefill_graphs, "EXPANDED_ROWS", rows)
        with make_engine(module_of("glm4_moe_lite"), None, device, **options) as engine:
            first = engine.generate([texts[0]], [replace(params, prompt_logprobs=1)])[0]
            second = engine.generate([texts[1]], [params])[0]
            assert engine.stats().prefix_hits == 1
        tokens = *(first.prompt_logprobs or ())[1:], *(first.logprobs or ()), *(second.logprobs or ())
        scores.append([token.logprob for token in tokens if token is not None])
    assert len(scores[0]) == 181 + 8 and max(map(len, expansions)) == 4
    # Rounding differs, and may take an element of a row in 8 bits to the next of its values.
    atol = 1e-4 if kv_dtype is None else 5e-3
    torch.testing.assert_close(*map(torch.tensor, scores), rtol=0, atol=atol)


def test_batch_invariant_prefill_is_absorbed(expansions: list[tuple[int, ...]], device: torch.device) -> None:
    with make_engine(module_of("minicpm3"), None, device, batch_invariant=True) as engine:
        engine.generate(prompts_of(), GREEDY)
    assert not expansions


def test_prefill_is_expanded_where_that_is_cheaper() -> None:
    """DeepSeek-V3's heads: keys of 128 + 64 elements, values of 128."""
    with torch.device("meta"):
        attention = LatentAttention(
            qkv=Linear(torch.empty(0, 0), None), out=Linear(torch.empty(0, 0), None), key_up=torch.empty(128, 128, 512),
            value_up=torch.empty(128, 512, 128), kv_norm=RMSNorm(torch.empty(512), 1e-6), rotations=None,
            interleaved=True, layout=LatentLayout(512, 64), scale=0.1,
        )  # fmt: skip
    assert attention.head_dim == 256

    def is_cheaper(before: int, rows: int) -> bool:
        return attention.is_cheaper_expanded(rows, rows * before + rows * (rows + 1) // 2, before + rows)

    assert [is_cheaper(0, rows) for rows in (64, 512, 1024, 2048)] == [False, False, True, True]
    assert [is_cheaper(32768, rows) for rows in (64, 512, 1024, 2048)] == [False, False, True, True]
    wide = replace(attention, value_up=torch.empty(128, 512, 320, device="meta"))
    assert wide.head_dim is None and not wide.is_cheaper_expanded(4096, 4096**2, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 24}, "model: kv_lora_rank is 24 and qk_rope_head_dim is 16, expected multiples of 16, at most "
         "512, and 576 in all"),
        ({"attention_bias": True, "q_lora_rank": None}, "model: attention_bias is set, expected not without q_lora_rank"),
    ],
)  # fmt: skip
def test_what_layers_cannot_express_is_refused(changes: dict[str, Any], message: str, device: torch.device) -> None:
    with pytest.raises(ValueError) as error:
        make_engine(latent_module("deepseek_v3", **changes), None, device)
    assert str(error.value) == message
