"""hf.generate: what `model.generate` of transformers gives, by speculative decoding, with the model's own weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_kernels import hf
from specdec_kernels.engine import Draft, Eagle3, Standalone
from specdec_kernels.models.backends.module_copy import cache_name
from specdec_kernels.ngram import NgramIndex
from specdec_kernels.tiny import tiny_model
from support.exhaustive import exhaustive
from support.tiny_checkpoint import held_out, reference_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(models: dict[str, Any], device: torch.device) -> Any:
    """Return the tiny target, one for all tests of a device."""
    if device.type not in models:
        loaded = AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float32)
        models[device.type] = loaded.to(device)
    return models[device.type]


def batch_of(prompts: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


DRAFTS: dict[str, Callable[[], Draft | None]] = {
    "ngram": lambda: None,
    "none": Draft,
    "eagle3": lambda: Eagle3(tiny_model("eagle3"), num_steps=3, topk=4),
    "standalone": lambda: Standalone(str(tiny_model("target")), num_steps=2, topk=1),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_is_that_of_transformers(model: Any, device: torch.device, draft: str) -> None:
    batch = batch_of(held_out("repeat")[:3] + held_out("code")[:2], device)
    want = reference_model().generate(
        **{k: v.cpu() for k, v in batch.items()}, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    got = model.generate(
        **batch, max_new_tokens=24, do_sample=False, pad_token_id=0, custom_generate=hf.generate, draft=DRAFTS[draft]()
    )
    assert got.dtype == want.dtype and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("penalty", [1.5, *exhaustive(1.05, 0.8)])
def test_repetition_penalty_is_that_of_transformers(model: Any, device: torch.device, penalty: float) -> None:
    """Prompt and output count, and it also applies before the end tokens that a least length rules out."""
    texts = []
    for prompt in (held_out("repeat")[0], held_out("code")[0]):
        batch = batch_of([prompt], device)
        options = {"max_new_tokens": 24, "min_new_tokens": 4, "do_sample": False, "repetition_penalty": penalty}
        want = reference_model().generate(**{k: v.cpu() for k, v in batch.items()}, **options, pad_token_id=0)
        got = model.generate(**batch, **options, pad_token_id=0, custom_generate=hf.generate)
        assert torch.equal(got.cpu(), want)
        plain = model.generate(**batch, max_new_tokens=24, do_sample=False, pad_token_id=0)
        texts.append(torch.equal(plain, got))
    assert penalty == 1.05 or not all(texts), "the penalty changed no text"


def test_padding_is_not_penalized(model: Any, device: torch.device) -> None:
    """As in transformers; the pad token may be an end token."""
    batch = batch_of([held_out("code")[0], held_out("code")[1][:9]], device)
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "repetition_penalty": 1.5,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    want = reference_model().generate(**{k: v.cpu() for k, v in batch.items()}, **options)
    assert torch.equal(model.generate(**batch, **options, custom_generate=hf.generate).cpu(), want)


def test_generation_config_of_qwen_is_followed(model: Any, device: torch.device) -> None:
    """The published one of Qwen2.5-Instruct, whose penalty was refused."""
    batch = batch_of([held_out("code")[0]], device)
    config = GenerationConfig(
        do_sample=True,
        repetition_penalty=1.05,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        pad_token_id=0,
        eos_token_id=[2, 0],
    )
    got = model.generate(**batch, generation_config=config, max_new_tokens=12, custom_generate=hf.generate, seed=3)
    again = model.generate(**batch, generation_config=config, max_new_tokens=12, custom_generate=hf.generate, seed=3)
    assert got.shape[1] > batch["input_ids"].shape[1] and torch.equal(got, again)


def test_hf_generate_leaves_model_unchanged(model: Any, device: torch.device) -> None:
    """Its weights are shared, its own generate gives the same text, and a second call takes the same engine."""
    batch = batch_of([held_out("repeat")[0]], device)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    first = model.generate(**batch, **options, custom_generate=hf.generate)
    engine = model.__dict__["_specdec_engine"][1]
    assert engine.target.model is model
    assert torch.equal(model.generate(**batch, **options), first)
    assert torch.equal(model.generate(**batch, **options, custom_generate=hf.generate), first)
    assert model.__dict__["_specdec_engine"][1] is engine
    longer = model.generate(**batch, **options | {"max_new_tokens": 400}, custom_generate=hf.generate)
    assert torch.equal(longer[:, : first.shape[1]], first)
    assert model.__dict__["_specdec_engine"][1] is not engine
    hf.release(model)
    assert "_specdec_engine" not in model.__dict__
    hf.release(model)


def test_hf_draft_module_serves_engines_in_turn(model: Any, device: torch.device) -> None:
    draft = AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float32).to(device)
    batch = batch_of([held_out("repeat")[0]], device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**batch, **options)
    for num_steps in (2, 3):
        got = model.generate(
            **batch, **options, custom_generate=hf.generate, draft=Standalone(draft, num_steps=num_steps, topk=1)
        )
        assert torch.equal(got, want)
    hf.release(model)


def test_hf_draft_serves_batches_of_any_size(model: Any, device: torch.device) -> None:
    draft = Eagle3(tiny_model("eagle3"), num_steps=2, topk=2)
    batch = batch_of([held_out("repeat")[0]], device)
    options = {"do_sample": False, "pad_token_id": 0, "custom_generate": hf.generate, "draft": draft}
    short = model.generate(**batch, max_new_tokens=8, **options)
    engine = model.__dict__["_specdec_engine"][1]
    same = options | {"draft": Eagle3(tiny_model("eagle3"), num_steps=2, topk=2)}
    assert torch.equal(model.generate(**batch, max_new_tokens=8, **same), short)
    assert model.__dict__["_specdec_engine"][1] is engine
    longer = model.generate(**batch, max_new_tokens=400, **options)  # needs another engine
    assert torch.equal(longer[:, : short.shape[1]], short) and draft.is_open
    hf.release(model)
    assert not draft.is_open


def test_ends_where_the_eos_tokens_say(model: Any, device: torch.device) -> None:
    batch = batch_of(held_out("repeat")[:4], device)
    plain = model.generate(**batch, max_new_tokens=20, do_sample=False, pad_token_id=0)
    eos = plain[0, batch["input_ids"].shape[1] + 5].item()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [eos, 1], "pad_token_id": 3}
    for pad in (3, None):  # None: transformers pads with the first of them
        want = model.generate(**batch, **options | {"pad_token_id": pad})
        got = model.generate(**batch, **options | {"pad_token_id": pad}, custom_generate=hf.generate)
        assert torch.equal(got, want) and (got[:, -1] == (eos if pad is None else pad)).any()


def test_max_length_counts_the_prompt(model: Any, device: torch.device) -> None:
    batch = batch_of([held_out("code")[0], held_out("code")[1][:5]], device)
    width = batch["input_ids"].shape[1]
    options = {"max_length": width + 7, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    want = model.generate(**batch, **options).sequences
    got = model.generate(**batch, **options, custom_generate=hf.generate)
    assert torch.equal(got.sequences, want) and want.shape[1] == width + 7


@pytest.mark.parametrize("least", [{"min_new_tokens": 9}, {"min_length": 9}])
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")
def test_ends_no_sooner_than_it_may(model: Any, device: torch.device, least: dict[str, int]) -> None:
    """min_length counts the prompt, padding included; a minimum above the budget is the budget."""
    batch = batch_of([held_out("repeat")[0], held_out("repeat")[1][:40]], device)
    plain = model.generate(**batch, max_new_tokens=20, do_sample=False, pad_token_id=0)
    width = batch["input_ids"].shape[1]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": plain[0, width + 2].item(), "pad_token_id": 3}
    options |= {name: value + (width if name == "min_length" else 0) for name, value in least.items()}
    want = model.generate(**batch, **options)
    got = model.generate(**batch, **options, custom_generate=hf.generate)
    assert torch.equal(got, want) and got.shape[1] > width + 9
    short = options | {"max_new_tokens": 4}
    assert torch.equal(model.generate(**batch, **short, custom_generate=hf.generate), model.generate(**batch, **short))


def test_hf_raising_criterion_keeps_engine(model: Any, device: torch.device) -> None:
    def broken(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        raise OSError("disk on fire")

    batch = batch_of([held_out("code")[0]], device)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(OSError, match="disk on fire"):
        model.generate(**batch, **options, stopping_criteria=[broken], custom_generate=hf.generate)
    got = model.generate(**batch, **options, custom_generate=hf.generate)
    assert torch.equal(got, model.generate(**batch, **options))


def test_ends_at_a_string_or_after_a_time(model: Any, device: torch.device) -> None:
    batch = batch_of([held_out("repeat")[0]], device)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    criteria = [StopStringCriteria(tokenizer(), ["self"])]
    want = model.generate(**batch, **options, stopping_criteria=criteria)
    got = model.generate(**batch, **options, stopping_criteria=criteria, custom_generate=hf.generate)
    assert torch.equal(got, want) and got.shape[1] < batch["input_ids"].shape[1] + 16
    late = model.generate(**batch, **options, max_time=0.0, custom_generate=hf.generate)
    assert late.shape[1] == batch["input_ids"].shape[1] + 1


def test_how_transformers_computes_means_nothing(model: Any, device: torch.device) -> None:
    batch = batch_of([held_out("code")[0]], device)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**batch, **options)
    for name, value in {
        cache_name(model): DynamicCache(), "cache_implementation": "static", "use_cache": False,
        "renormalize_logits": True,
    }.items():  # fmt: skip
        got = model.generate(**batch, **options, **{name: value}, custom_generate=hf.generate)
        assert torch.equal(got, want), name


def test_sampling_follows_the_seed_and_the_filters(model: Any, device: torch.device) -> None:
    batch = batch_of([held_out("code")[0]], device)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    options |= {"pad_token_id": 0, "num_return_sequences": 3, "custom_generate": hf.generate}
    first = model.generate(**batch, **options, seed=5)
    assert first.shape[0] == 3 and not torch.equal(first[0], first[1])
    assert torch.equal(model.generate(**batch, **options, seed=5), first)
    assert not torch.equal(model.generate(**batch, **options, seed=6), first)
    drafted = model.generate(**batch, **options, seed=5, draft=DRAFTS["eagle3"]())
    assert torch.equal(drafted, first)  # the seed fixes the text, whatever drafts
    torch.manual_seed(1)
    a = model.generate(**batch, **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**batch, **options), a)
    greedy = model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
    one = model.generate(**batch, **options | {"top_k": 1, "num_return_sequences": 1})
    assert torch.equal(one, greedy)


class Ends(StoppingCriteria):
    """After `count` new tokens."""

    def __init__(self, width: int, count: int) -> None:
        self.width, self.count, self.asked = width, count, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked += 1
        return torch.full((len(input_ids),), input_ids.shape[1] - self.width >= self.count)


def test_stopping_criteria_are_asked_after_every_token(model: Any, device: torch.device) -> None:
    batch = batch_of(held_out("repeat")[:3], device)
    width = batch["input_ids"].shape[1]
    plain = model.generate(**batch, max_new_tokens=9, do_sample=False, pad_token_id=0)
    ends = Ends(width, 9)
    got = model.generate(
        **batch, max_new_tokens=60, do_sample=False, pad_token_id=0, custom_generate=hf.generate,
        stopping_criteria=StoppingCriteriaList([ends]),
    )  # fmt: skip
    assert torch.equal(got, plain) and ends.asked == 27


def test_streams_to_a_text_streamer(model: Any, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    batch = batch_of([held_out("code")[0]], device)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model.generate(**batch, **options, streamer=TextStreamer(tokenizer(), skip_prompt=True))
    want = capsys.readouterr().out
    model.generate(
        **batch, **options, custom_generate=hf.generate, stream_to=TextStreamer(tokenizer(), skip_prompt=True)
    )
    assert capsys.readouterr().out == want and want.strip()


def message(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> str:
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "custom_generate": hf.generate}
    with pytest.raises(ValueError) as error:
        model.generate(**batch, **arguments | options)
    return str(error.value)


def test_refuses_the_rest_by_name(model: Any) -> None:
    batch = batch_of([[5, 6, 7], [5, 6]], model.device)
    assert message(model, batch, num_beams=2) == (
        "hf.generate: the generation config asks for beam_search, expected greedy_search or sample"
    )
    assert message(model, batch, no_repeat_ngram_size=3) == (
        "hf.generate: logits_processor has NoRepeatNGramLogitsProcessor, expected those of repetition_penalty, "
        "min_length, min_new_tokens, temperature, top_k, top_p and min_p alone"
    )
    one = batch_of([[5, 6, 7]], model.device)
    assert message(model, one, streamer=TextStreamer(tokenizer())) == (
        "hf.generate: streamer is given, which transformers keeps to itself, expected stream_to="
    )
    assert message(model, batch, assistant_model=model) == (
        "hf.generate: assistant_model is given, which transformers keeps to itself, expected draft=Standalone(...)"
    )
    assert message(model, batch, synced_gpus=True) == (
        "hf.generate: synced_gpus is given, which transformers keeps to itself, expected False"
    )
    assert message(model, batch, return_dict_in_generate=True, output_scores=True) == (
        "hf.generate: output_scores is True, expected False"
    )
    assert message(model, batch, stream_to=TextStreamer(tokenizer())) == (
        "hf.generate: stream_to is given for 2 sequences, expected one"
    )
    right = {"input_ids": batch["input_ids"], "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]).to(model.device)}
    assert message(model, right) == (
        "hf.generate: attention_mask[0] has zeros after ones, expected padding on the left"
    )
    shifted = batch | {"position_ids": torch.arange(3, device=model.device).expand(2, -1) + 4}
    assert message(model, shifted) == (
        "hf.generate: position_ids is given, expected positions that follow from the attention mask"
    )
    assert message(model, batch, max_new_tokens=100, max_len=64) == (
        "hf.generate: the longest text may have 103 tokens, expected at most 64"
    )
    filled = DynamicCache()
    name = cache_name(model)
    model(**batch, **{name: filled})
    assert message(model, batch, **{name: filled}) == (
        f"hf.generate: {name} holds a text already, expected an empty cache or None"
    )
    model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0, custom_generate=hf.generate, max_len=64)
    assert "may have 103 tokens" in message(model, batch, max_new_tokens=100, max_len=64)  # also where it is kept


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "asks for contrastive_search"),
        ({"dola_layers": "low"}, "asks for dola_generation"),
        ({"prompt_lookup_num_tokens": 3}, "asks for assisted_generation"),
        ({"num_beams": 2, "force_words_ids": [[3]]}, "asks for constrained_beam_search"),
        ({"num_beams": 2, "do_sample": True}, "asks for beam_sample"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1]}, "has PrefixConstrainedLogitsProcessor"),
        ({"bad_words_ids": [[3]]}, "has NoBadWordsLogitsProcessor"),
        ({"no_repeat_ngram_size": 2}, "has NoRepeatNGramLogitsProcessor"),
        ({"guidance_scale": 2.0}, "has UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"typical_p": 0.5, "do_sample": True}, "has TypicalLogitsWarper"),
        ({"return_dict_in_generate": True, "output_logits": True}, "output_logits is True"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions is True"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is True"),
        ({"labels": torch.zeros(2, 3)}, "labels is given"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.filterwarnings("ignore:.*compiled model:UserWarning")
def test_refuses_every_other_way_to_decode(model: Any, options: dict[str, Any], named: str) -> None:
    assert f" {named}, expected " in message(model, batch_of([[5, 6, 7], [5, 6]], model.device), **options)


def test_refuses_processors_that_act_in_another_way(model: Any) -> None:
    batch = batch_of([[5, 6, 7]], model.device)
    sample = {"do_sample": True, "top_k": 0, "eos_token_id": 2}

    def said(*processors: Any, **options: Any) -> str:
        return message(model, batch, logits_processor=LogitsProcessorList(processors), **sample | options)

    assert said(TemperatureLogitsWarper(0.5), temperature=0.7) == (
        "hf.generate: logits_processor has TemperatureLogitsWarper after TemperatureLogitsWarper, "
        "expected each once, in the order repetition_penalty, min_length, min_new_tokens, temperature, top_k, top_p, min_p"
    )
    assert said(RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)) == (
        "hf.generate: prompt_ignore_length of RepetitionPenaltyLogitsProcessor is 2, expected the padding [0]"
    )
    assert " TopKLogitsWarper after TopPLogitsWarper, " in said(TopPLogitsWarper(0.5), TopKLogitsWarper(5))
    assert said(TopPLogitsWarper(0.5, min_tokens_to_keep=2)) == (
        "hf.generate: min_tokens_to_keep of TopPLogitsWarper is 2, expected 1"
    )
    assert said(MinLengthLogitsProcessor(9, 3)) == (
        "hf.generate: MinLengthLogitsProcessor is of other tokens than those that end a text, expected the same"
    )


def test_refuses_products_that_are_not_plain(device: torch.device) -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.float32).to(device)
    attention = model.model.layers[0].self_attn
    attention.q_proj.__class__ = Adapted
    batch = batch_of([[5, 6, 7]], device)
    assert message(model, batch) == (
        f"model: model.layers.0.self_attn.q_proj is a {__name__}.Adapted, expected a plain torch.nn.Linear"
    )


def test_half_precision_keeps_the_models_rotations(device: torch.device) -> None:
    """An engine in 16 bits leaves the frequencies of the module's own forward pass as they are."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("target"), dtype=torch.bfloat16).to(device)
    before = model.model.rotary_emb.inv_freq.clone()
    batch = batch_of([held_out("code")[0]], device)
    model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0, custom_generate=hf.generate)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(
        model.model.rotary_emb.inv_freq, before
    )


def test_hf_model_without_length_limit_is_refused() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=1, n_head=2)
    bloom = AutoModelForCausalLM.from_config(config).eval()
    assert message(bloom, batch_of([[5, 6, 7]], bloom.device)).startswith(
        "model: model_type is 'bloom', expected one of ("
    )


# --- transformers' own assisted generation, with an n-gram index --------------------------------------------------------

REPOSITORY = Path(__file__).resolve().parents[2] / "examples" / "custom_generate_repository"


class Passes:
    """Counts the passes of a model."""

    def __init__(self, model: Any) -> None:
        self.number = 0
        self.hook = model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.number += 1


def test_assisted_text_is_the_models_own_in_fewer_passes(model: Any, device: torch.device) -> None:
    index = NgramIndex(4096, 1, 1024)
    for prompt in held_out("repeat")[:1] + held_out("code")[:1]:
        batch = batch_of([prompt], device)
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        options |= {"repetition_penalty": 1.1, "return_dict_in_generate": True, "output_scores": True}
        want = model.generate(**batch, **options)
        passes = Passes(model)
        got = model.generate(**batch, **options, custom_generate=hf.assisted, index=index, num_tokens=6)
        assert torch.equal(got.sequences, want.sequences) and passes.number <= 24
        again = model.generate(**batch, **options, custom_generate=hf.assisted, index=index, num_tokens=6)
        passes.hook.remove()
        assert torch.equal(again.sequences, want.sequences) and len(again.scores) == len(want.scores)
    assert passes.number < 24 + 12  # the second text of a prompt is drafted from the first


def test_assisted_text_ends_where_the_plain_one_does(model: Any, device: torch.device) -> None:
    batch = batch_of([held_out("repeat")[0]], device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    text = model.generate(**batch, **options, max_new_tokens=30)
    index = NgramIndex(4096, 1, 1024)
    index.insert(text[0].int().cpu())
    index.insert(torch.tensor([*text[0, :20].tolist(), 10**6], dtype=torch.int32))  # of another vocabulary
    for limits in (
        {"max_new_tokens": 7},
        {"max_new_tokens": 1},
        {"max_new_tokens": 30, "eos_token_id": int(text[0, -9])},
    ):
        want = model.generate(**batch, **options, **limits)
        assert torch.equal(model.generate(**batch, **options, **limits, custom_generate=hf.assisted, index=index), want)


def test_assisted_sampling_keeps_what_may_be_drawn(model: Any, device: torch.device) -> None:
    """Of one token left by top-k the sampled text is the greedy one, whatever is tried; of a few, each is one of them."""
    batch = batch_of([held_out("repeat")[0]], device)
    options: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0}
    want = model.generate(**batch, **options, do_sample=False)
    assert torch.equal(model.generate(**batch, **options, do_sample=True, top_k=1, custom_generate=hf.assisted), want)
    got = model.generate(**batch, **options, do_sample=True, top_k=3, custom_generate=hf.assisted)
    width = batch["input_ids"].shape[1]
    best = model(got).logits[0, width - 1 : -1].topk(3).indices
    assert bool((best == got[0, width:, None]).any(1).all())


def test_assisted_refuses_the_rest_by_name(model: Any) -> None:
    two, one = batch_of([[5, 6, 7], [5, 6]], model.device), batch_of([[5, 6, 7]], model.device)
    how = {"custom_generate": hf.assisted}
    assert message(model, two, **how) == (
        "hf.assisted: input_ids has 2 sequences, expected one (hf.generate takes more)"
    )
    assert message(model, one, num_beams=2, **how) == (
        "hf.assisted: the generation config asks for beam_search, expected greedy_search or sample"
    )
    stop = StoppingCriteriaList([StopStringCriteria(tokenizer(), ["x"])])
    assert message(model, one, stopping_criteria=stop, **how) == (
        "hf.assisted: stopping_criteria has StopStringCriteria, "
        "expected lengths and end-of-sequence tokens alone (hf.generate takes others)"
    )
    assert message(model, one, num_tokens=256, **how) == "NgramCandidates: num_tokens is 256, expected 1 to 255"


def test_a_repository_makes_it_one_line(model: Any, device: torch.device) -> None:
    batch = batch_of(held_out("repeat")[:2], device)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**batch, **options)
    how = {"custom_generate": str(REPOSITORY), "trust_remote_code": True}
    assert torch.equal(model.generate(**batch, **options, **how), want)
    assert torch.equal(model.generate(**batch, **options, **how, draft=DRAFTS["eagle3"]()), want)
    assert torch.equal(model.generate(batch["input_ids"][:1], **options, **how), want[:1])
