"""Sampling by a model's generation config: what transformers makes of it, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import LogitNormalization, MinLengthLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria

from specdec_kernels import cli
from specdec_kernels.engine import Engine, SamplingParams
from specdec_kernels.engine.text.generation_config import REFUSED, REFUSED_OF_DRAWS, REFUSED_OF_GREEDY
from specdec_kernels.hf import _PROCESSORS
from specdec_kernels.tiny import tiny_model
from support.random_checkpoints import random_prompts, save_random_model

# Where transformers has no processor.
NOTHING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "plain", "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def made_by_transformers(model: Any, config: GenerationConfig) -> tuple[dict[str, Any], set[str]]:
    """Our parameters, as the processors and criteria say that `model.generate` makes; and the names of the others."""
    found: dict[str, Any] = {}
    others = set()

    def read(
        _model: Any, ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Any:
        found["temperature"] = 1.0 if generation_config.do_sample else 0.0
        for processor in logits_processor:
            name = _PROCESSORS.get(type(processor), "")
            if hasattr(processor, name):
                found[name] = getattr(processor, name)
            elif generation_config.min_new_tokens and isinstance(processor, MinLengthLogitsProcessor):
                assert processor.min_length == ids.shape[1] + generation_config.min_new_tokens  # the same once more
            elif not isinstance(processor, LogitNormalization):
                others.add(type(processor).__name__)
        for criterion in stopping_criteria:
            if isinstance(criterion, EosTokenCriteria):
                found["stop_token_ids"] = tuple(criterion.eos_token_id.tolist())
        return ids

    prompt = torch.tensor([[1, 2]])
    model.generate(prompt, generation_config=config, custom_generate=read, pad_token_id=0, max_new_tokens=8)
    return found, others


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.5, "top_p": 0.8},  # of no account: it does not sample
        {"do_sample": False, "top_k": 5},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.0},
        {"do_sample": True, "top_k": 0, "min_p": 0.05, "typical_p": 1.0},
        {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "renormalize_logits": True},
        {"eos_token_id": 3},
        {"eos_token_id": [3, 5], "min_new_tokens": 7, "num_beams": 1},
        {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.0, "bad_words_ids": None, "length_penalty": 2.0},
    ],
    ids=str,
)
def test_generation_config_equals_transformers(model: Any, given: dict[str, Any]) -> None:
    config = GenerationConfig(**given)
    params = SamplingParams.from_generation_config(config)
    want, others = made_by_transformers(model, config)
    assert not others
    for name, value in (NOTHING | {"stop_token_ids": None} | want).items():
        if params.temperature > 0 or name not in ("top_k", "top_p", "min_p"):
            assert getattr(params, name) == value, name
    assert params.max_new_tokens == SamplingParams().max_new_tokens


# A value of each that asks for something, and what the message calls the value that does not.
ASKING: dict[str, Any] = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "dola_layers": "high",
    "constraints": ["x"],
    "force_words_ids": [[4]],
    "encoder_repetition_penalty": 1.1,
    "guidance_scale": 1.5,
    "sequence_bias": [[[3], -10.0]],
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[3]],
    "min_length": 5,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 0,
    "exponential_decay_length_penalty": (5, 1.1),
    "suppress_tokens": [3],
    "begin_suppress_tokens": [3],
    "watermarking_config": {"greenlist_ratio": 0.25},
    "token_healing": True,
    "max_time": 1.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "top_h": 0.5,
    "penalty_alpha": 0.6,
}


def config_with(name: str, do_sample: bool) -> GenerationConfig:
    config = GenerationConfig(do_sample=do_sample, eos_token_id=3)
    setattr(config, name, ASKING[name])
    return config


def test_every_refusal_is_tested() -> None:
    assert ASKING.keys() == REFUSED.keys() | REFUSED_OF_DRAWS.keys() | REFUSED_OF_GREEDY.keys()


@pytest.mark.parametrize("name", ASKING)
def test_generation_config_refuses_unsupported_fields(name: str) -> None:
    nothing = (REFUSED | REFUSED_OF_DRAWS | REFUSED_OF_GREEDY)[name]
    config = config_with(name, name not in REFUSED_OF_GREEDY)
    with pytest.raises(ValueError) as error:
        SamplingParams.from_generation_config(config)
    assert str(error.value) == (
        f"SamplingParams: {name} is {ASKING[name]} in the generation config, expected {nothing} "
        f"({name}={nothing} leaves it out)"
    )
    without = GenerationConfig(do_sample=config.do_sample, eos_token_id=3)
    left_out = SamplingParams.from_generation_config(config, **{name: nothing})
    assert left_out == SamplingParams.from_generation_config(without)


@pytest.mark.parametrize("name", [*REFUSED_OF_DRAWS, *REFUSED_OF_GREEDY])
def test_generation_config_ignores_irrelevant_fields(name: str) -> None:
    config = config_with(name, name in REFUSED_OF_GREEDY)
    assert SamplingParams.from_generation_config(config).stop_token_ids == (3,)


PROCESSED = (
    *("encoder_repetition_penalty", "guidance_scale", "no_repeat_ngram_size", "bad_words_ids"),
    *("encoder_no_repeat_ngram_size", "min_length", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
    *("begin_suppress_tokens", "exponential_decay_length_penalty", "sequence_bias", *REFUSED_OF_DRAWS),
)


@pytest.mark.parametrize("name", PROCESSED)
def test_transformers_would_change_the_text(model: Any, name: str) -> None:
    """By a processor that it has for nothing else."""
    assert len(made_by_transformers(model, config_with(name, True))[1]) == 1


def test_generation_config_overrides() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, eos_token_id=[3, 5], max_new_tokens=40, stop_strings=["\n\n", "#"]
    )
    params = SamplingParams.from_generation_config(config)
    assert params == SamplingParams(40, temperature=0.7, top_p=0.8, top_k=50, stop_token_ids=(3, 5), stop=["\n\n", "#"])
    params = SamplingParams.from_generation_config(config, temperature=0.0, max_new_tokens=9, stop=(), seed=4, top_k=0)
    assert params == SamplingParams(9, temperature=0.0, top_p=0.8, stop_token_ids=(3, 5), seed=4)
    params = SamplingParams.from_generation_config(config, ignore_eos=True, stop=())
    assert params.stop_token_ids is None and params.ignore_eos
    assert SamplingParams.from_generation_config(config, stop_token_ids=[9]).stop_token_ids == [9]
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams.from_generation_config(config, temprature=0.5)
    with pytest.raises(ValueError, match=r"^SamplingParams: top_p is 0, expected above 0 and at most 1$"):
        SamplingParams.from_generation_config(config, top_p=0)
    with pytest.raises(ValueError, match=r"^SamplingParams: num_beams is 3 in the generation config, expected 1 "):
        SamplingParams.from_generation_config(config, num_beams=3)


def test_generation_config_source(folder: Path, model: Any, tmp_path: Path) -> None:
    """A folder, a module, and a LoRA's folder, which names its base."""
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 5]}
    GenerationConfig(**given).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    want = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, stop_token_ids=(3, 5))
    assert SamplingParams.from_generation_config(tmp_path) == want
    assert SamplingParams.from_generation_config(str(tmp_path)) == want
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    assert SamplingParams.from_generation_config(lora) == want
    assert SamplingParams.from_generation_config(model) == SamplingParams()
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match="generation_config"):
        SamplingParams.from_generation_config(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(FileNotFoundError) as error:
        SamplingParams.from_generation_config(tmp_path)
    assert str(error.value) == f"SamplingParams: {tmp_path} has no generation_config.json, expected one"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("/nowhere", FileNotFoundError, "source is /nowhere, expected an existing folder or a hub id"),
        (
            {"top_k": 3},
            TypeError,
            "source is a dict, expected a model with one, its path or hub id, or a GenerationConfig",
        ),
        (
            nn.Linear(1, 1),
            TypeError,
            "source is a Linear without a generation config, "
            "expected a model with one, its path or hub id, or a GenerationConfig",
        ),
    ],
)
def test_generation_config_refuses_other_sources(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        SamplingParams.from_generation_config(source)
    assert str(raised.value) == f"SamplingParams: {message}"


def test_texts_are_those_of_transformers(folder: Path, model: Any) -> None:
    """Greedy, with several tokens that end a text, which the engine's own model does not know."""
    (prompt,) = random_prompts(1)
    with Engine(folder, max_len=128, device="cpu") as engine:
        free = engine.generate(prompt, SamplingParams(24))[0].tokens
        other = next(token for token in range(199) if token not in free)
        config = GenerationConfig(eos_token_id=[other, free[5]], max_new_tokens=24, temperature=0.3)
        (got,) = engine.generate(prompt, SamplingParams.from_generation_config(config))
    want = model.generate(torch.tensor([prompt]), generation_config=config, pad_token_id=0)[0, len(prompt) :].tolist()
    assert got.tokens == want and len(want) < 24


# --- specdec generate


def generate(*arguments: str) -> int:
    return cli.main(["generate", "--device", "cpu", "--max-new-tokens", "8", "--no-compare", *arguments])


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    """Return a tiny model that samples by its generation config."""
    for file in tiny_model("target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    GenerationConfig(do_sample=True, temperature=1.5, eos_token_id=0).save_pretrained(tmp_path)
    return tmp_path


def test_generation_config_flag(sampled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it a text is greedy; flags beside it win."""
    texts = []
    for flags in (
        [],
        ["--generation-config", "auto", "--seed", "1"],
        ["--temperature", "1.5", "--top-k", "50", "--seed", "1"],
    ):
        assert generate("--model-path", str(sampled), *flags) == 0
        out = capsys.readouterr().out
        texts.append(out.partition("\n\ngreen:")[0])
        assert ("sampled with --seed 1" in out) == bool(flags)
    assert texts[1] == texts[2] != texts[0]
    assert generate("--model-path", str(sampled), "--generation-config", "auto", "--temperature", "0") == 0
    assert capsys.readouterr().out.partition("\n\ngreen:")[0] == texts[0]


def test_generation_config_flag_refuses_bad_file(sampled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GenerationConfig(no_repeat_ngram_size=3).save_pretrained(sampled)
    assert generate("--model-path", str(sampled), "--generation-config", "auto") == 2
    assert capsys.readouterr().err == (
        "specdec generate: SamplingParams: no_repeat_ngram_size is 3 in the generation config, expected 0 "
        "(no_repeat_ngram_size=0 leaves it out)\n"
    )
    (sampled / "generation_config.json").unlink()
    assert generate("--model-path", str(sampled), "--generation-config", "auto") == 2
    message = f"specdec generate: SamplingParams: {sampled} has no generation_config.json, expected one\n"
    assert capsys.readouterr().err == message
