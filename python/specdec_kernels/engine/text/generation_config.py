"""Sampling parameters of a model's generation config, as `generate` of transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig

from ...models.weights.adapters import with_base
from ...models.weights.checkpoint import expect_folder

# Settings that would change the text and are not supported, with the value that disables each.
REFUSED = {
    **{"num_beams": 1, "num_return_sequences": 1, "dola_layers": None, "constraints": None, "force_words_ids": None},
    **{"encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "sequence_bias": None},
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None},
    **{"suppress_tokens": None, "begin_suppress_tokens": None, "watermarking_config": None, "token_healing": False},
    "max_time": None,
}
REFUSED_OF_DRAWS = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
REFUSED_OF_GREEDY = {"penalty_alpha": 0.0}


def values_of(source: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for SamplingParams. Overrides of refused settings count as the config's own."""
    values = vars(config_of(source)).copy()
    for name in (REFUSED | REFUSED_OF_DRAWS | REFUSED_OF_GREEDY).keys() & overrides.keys():
        values[name] = overrides.pop(name)
    draws = values.get("do_sample") is True
    for name, nothing in (REFUSED | (REFUSED_OF_DRAWS if draws else REFUSED_OF_GREEDY)).items():
        if (value := values.get(name)) not in (None, nothing, [], {}):
            raise ValueError(
                f"SamplingParams: {name} is {value} in the generation config, expected {nothing} "
                f"({name}={nothing} leaves it out)"
            )

    def given(**names: str) -> dict[str, Any]:
        return {ours: values[name] for ours, name in names.items() if values.get(name) is not None}

    found = given(max_new_tokens="max_new_tokens", min_new_tokens="min_new_tokens", stop="stop_strings")
    found |= given(repetition_penalty="repetition_penalty")
    if draws:
        # Defaults of transformers.
        found |= {"temperature": 1.0, "top_k": 50} | given(
            temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p"
        )
    eos = values.get("eos_token_id")
    if eos is not None and not overrides.get("ignore_eos"):
        found["stop_token_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return found | overrides


def config_of(source: Any) -> GenerationConfig:
    """Return the generation config of a model, given by path, hub id or module, or the config itself."""
    if isinstance(source, str | Path):
        expect_folder(source, "SamplingParams: source")
        base, _ = with_base(source, None)
        folder = Path(str(base))
        if folder.is_dir() and not (folder / "generation_config.json").exists():
            raise FileNotFoundError(f"SamplingParams: {folder} has no generation_config.json, expected one")
        return GenerationConfig.from_pretrained(str(base))
    config = getattr(source, "generation_config", None) if isinstance(source, nn.Module) else source
    if not isinstance(config, GenerationConfig):
        what = f"{type(source).__name__}{' without a generation config' if isinstance(source, nn.Module) else ''}"
        raise TypeError(
            f"SamplingParams: source is a {what}, expected a model with one, its path or hub id, or a GenerationConfig"
        )
    return config
