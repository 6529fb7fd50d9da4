"""Every model type of transformers that goes on with a text, as a tiny random checkpoint: it works, or it is refused by name.

Whatever opens is compared: its greedy text in float32, plain and speculative, with that of transformers' own `generate`.
docs/models.md is what comes out, for one version of transformers; `PYTHONPATH=tests python tests/models/test_every_model.py` writes it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec_kernels.engine import Draft, Engine, Ngram, RequestOutput, SamplingParams, Standalone
from specdec_kernels.models.families import family_of, known_families
from specdec_kernels.models.weights.model_config import PLAIN_TEXT_DECODERS, text_config
from support.exhaustive import exhaustive, thinned
from support.tiny_random_models import NATIVE, NATIVE_OF, NO_SMALL, tiny_config, tiny_model

MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *PLAIN_TEXT_DECODERS})
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LENGTH = 14  # tokens of a text, after a prompt that is longer than windows and chunks
LIKELIEST = 4  # tokens whose log-probabilities are compared at each place
DRAFTS = ("plain", "n-gram", "itself", "another")
ERROR = 1e-3  # of a log-probability, relative to the spread of the logits

HEAD = """# Models

All model types that transformers {version} loads as a causal language model, and the multimodal types whose text decoder
our layers run (with text prompts only). Each was tested with a tiny random checkpoint in float32. A type works if its
greedy text equals that of transformers' `generate` in four runs: without drafts, with trees of the n-gram index, and with
two `Standalone` drafts of the same type, the model itself and one with other weights. Types whose layers keep a recurrent
state are no `Standalone` drafts: they take the first two runs.

- *native*: our layers run it.
- *transformers*: transformers' own modules run it, with our paged tree attention registered in the attention interface.

`Engine(implementation="auto")` chooses native where there is one. {works} types work; the others raise an error before the
first token, with the reason given.

`PYTHONPATH=tests python tests/models/test_every_model.py` writes this page from all four runs. The default test run repeats
the one that drafts with the model itself for some types of each outcome; `pytest -m exhaustive` repeats all four for all.

| model type | native | transformers | reason |
|---|---|---|---|
"""


def prompt() -> list[int]:
    tokens: list[int] = torch.randint(5, 150, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    return tokens


def own_text(model: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that transformers' `generate` gives, and the logits of each."""
    if getattr(text_config(model.config), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # some versions' own choice knows no cap
    tokens = torch.tensor([prompt()])
    options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), output_logits=True, return_dict_in_generate=True, **options
    )
    return out.sequences[0, len(prompt()) :].tolist(), torch.cat(out.logits)


def expect_like(text: RequestOutput, want: tuple[list[int], torch.Tensor], what: str) -> None:
    """Expect the same tokens and log-probabilities: with random weights a text may be one token over and over."""
    tokens, logits = want
    assert list(text.tokens) == tokens and text.logprobs is not None, what
    best = torch.tensor([[logprob for _, logprob in each.top] for each in text.logprobs]).double()
    error = (best - logits.double().log_softmax(-1).topk(LIKELIEST).values).abs().amax(-1)
    assert (error <= ERROR * logits.double().std(-1).clamp(min=1e-3)).all(), f"{what}: {error}"


def texts(
    model: Any, make_other: Callable[[], Any], implementation: str, chosen: Collection[str]
) -> dict[str, RequestOutput]:
    """Return the text of each chosen draft. ValueError: the model is refused."""
    params, found = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, logprobs=LIKELIEST), {}
    drafts: dict[str, Callable[[], Draft | None]] = {
        "plain": lambda: None,
        "n-gram": lambda: Ngram(num_nodes=8),
        "itself": lambda: Standalone(model, num_steps=3, topk=2, num_nodes=6),
        "another": lambda: Standalone(make_other(), num_steps=2, topk=2, num_nodes=5),
    }
    for name in chosen:
        with Engine(
            model,
            draft=drafts[name](),
            implementation=implementation,
            adaptive=False,
            max_len=64,
            num_slots=2,
            dtype=torch.float32,
            device="cpu",
        ) as engine:
            found[name] = engine.generate([prompt()], params)[0]
    return found


def model_of(model_type: str) -> Any:
    """Return a tiny model; None if none can be made, which depends on its config and on packages that it wants."""
    if model_type in NO_SMALL:
        return None
    try:
        return tiny_model(model_type)
    except Exception:
        return None


def keeps_states(model_type: str) -> bool:
    """Whether layers of a native type keep a recurrent state: it is no `Standalone` draft then."""
    return bool(family_of(text_config(tiny_config(model_type))).state_specs(torch.float32))


def row_of(model_type: str, chosen: Collection[str] = DRAFTS) -> str:
    """Return the line of the table. AssertionError: a model that opens gives another text than its own."""
    backends, why = {"native": "-", "transformers": "-"}, ""
    if (unchanged := model_of(model_type)) is None:
        return f"| {model_type} | - | - | not tried: {NO_SMALL.get(model_type, 'no small checkpoint can be made of its config')} |"
    for backend in backends:
        if backend == "native" and text_config(tiny_config(model_type)).model_type not in known_families():
            continue
        changes = NATIVE | NATIVE_OF.get(model_type, {}) if backend == "native" else {}
        names = tuple(chosen)
        if backend == "native" and keeps_states(model_type):
            names = tuple(dict.fromkeys("plain" if name == "plain" else "n-gram" for name in chosen))
        make = functools.partial(tiny_model, model_type, **changes)
        model = make(0) if changes else unchanged
        try:
            found = texts(model, functools.partial(make, 1), backend, names)
        except ValueError as error:
            why = (
                re.sub(r"^(draft )?model: \w+ ", "", str(error))
                .partition(", expected")[0]
                .partition(" (")[0]
                .removeprefix("model: ")
            )
            why = re.sub(r", [\d.e+-]+ of their spread apart", "", why)
            continue
        want = own_text(model)
        for name, text in found.items():
            expect_like(text, want, f"{model_type}, {backend}, {name}")
        backends[backend] = "yes"
    if "yes" in backends.values():
        why = ""
    return f"| {model_type} | {backends['native']} | {backends['transformers']} | {why} |"


def version_of_page() -> str:
    match = re.search(r"transformers ([\d.]+) loads", PAGE.read_text())
    assert match is not None
    return match[1]


# Types that run lines of code or branches which no other test of the default run does.
ALONE = {
    "deepseek_v2", "doge", "dots3_note_text", "gemma4_unified", "glm4_moe", "granitemoehybrid", "hrm_text", "jetmoe",
    "kimi_linear", "lfm2_moe", "longcat_flash", "mimo_v2_flash", "minicpm3", "nemotron_h", "plbart", "qwen2_moe",
    "sarvam_mla", "xmod", "zamba2", "zaya",
}  # fmt: skip


def default_types() -> set[str]:
    """Return those types, the first one with each outcome on the page, and a twelfth of all."""
    cells = [row.strip("| ").split(" | ") for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    first = {tuple(outcome): model_type for model_type, *outcome in reversed(cells)}
    return {*ALONE, *first.values(), *MODEL_TYPES[::12]}


@pytest.mark.parametrize("drafts", [("itself",), *exhaustive((DRAFTS,))], ids="-".join)
@pytest.mark.parametrize("model_type", thinned(MODEL_TYPES, default_types().__contains__))
def test_it_works_or_is_refused_by_name(model_type: str, drafts: tuple[str, ...]) -> None:
    """The model drafts for itself, after a prompt longer than windows and chunks; other drafts and types are exhaustive."""
    row = row_of(model_type, drafts)
    if transformers.__version__ == version_of_page():
        assert row in PAGE.read_text().splitlines()


def test_page_has_every_type_and_counts_them() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "model type" not in line]
    works = sum("| yes |" in row for row in rows)
    assert works >= 60
    assert PAGE.read_text().startswith(HEAD.format(version=version_of_page(), works=works))
    if transformers.__version__ == version_of_page():
        assert [row.split(" ")[1] for row in rows] == MODEL_TYPES


def main(model_types: list[str]) -> None:
    rows = []
    for model_type in model_types or MODEL_TYPES:
        rows.append(row_of(model_type))
        print(rows[-1], flush=True)
    if not model_types:
        works = sum("| yes |" in row for row in rows)
        head = HEAD.format(version=transformers.__version__, works=works)
        PAGE.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(sys.argv[1:])
