"""The examination of `specdec doctor`: the draft unchanged, and with one input changed at a time."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from ..engine import Draft, Engine, Ngram
from ..engine.drafts.block import FOLDER_IN_TARGET
from ..engine.text.prompts import load_tokenizer
from ..models.language_model import LanguageModel
from ..models.weights.checkpoint import local_folder
from ..models.weights.model_config import config_of
from .algorithms import BLOCK_ALGORITHMS, UNIONS, algorithm_of, draft_class, make_draft, model_part
from .doctor_block import block_shifts
from .doctor_measure import Acceptance, Recorder, Text, measure, record, write_texts
from .doctor_mtp import mtp_shifts
from .doctor_shifts import Head, Prompting, Shift, head_shifts, prompting_shifts, standalone_shifts
from .engine_flags import options_of
from .progress import progress
from .prompts import read_prompts, with_template, without_template

MOST_STEPS = 64  # of a draft with a model
MIN_TEXTS = 6  # fewer do not separate a gain from chance
MIN_GAIN = 0.05  # share of the accept length; a smaller gain is not reported as a cause
RESAMPLES = 20_000
LEVEL = 0.05  # family-wise error rate over all changes


@dataclass(frozen=True)
class Finding:
    """The effect of a shift on the accept length.

    Attributes:
        low: lower end of the gain's confidence interval, by bootstrap over prompts. In a share LEVEL of examinations,
            the true gain of some shift is outside its interval.
        high: upper end of it.
        cause: the gain exceeds chance and is large enough to matter.
    """

    shift: Shift
    acceptance: Acceptance
    gain: float
    low: float
    high: float
    cause: bool


class Gain(NamedTuple):
    """A gain in accept length, and its confidence interval as of `Finding`."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """The acceptance of the n-gram index, alone or in a union.

    Attributes:
        num_nodes: of its trees, the root included.
        gain: over the model's draft alone; None: that is refused, or it is not a part.
    """

    name: str
    num_nodes: int
    acceptance: Acceptance
    gain: Gain | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        as_is: acceptance of the unchanged draft; None if it is refused, for the reason `refusal`.
        findings: one for each shift that could be measured, the best first.
        parts: of a union: the n-gram index alone, and with the model.
    """

    model: str
    draft: str
    algorithm: str
    num_texts: int
    num_tokens: int
    as_is: Acceptance | None
    refusal: str
    findings: list[Finding]
    parts: list[Part] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        return self.as_is.accept_length if self.as_is else 1.0

    @property
    def cause(self) -> Finding | None:
        """The best finding that restores acceptance."""
        return next((finding for finding in self.findings if finding.cause), None)

    def verdict(self) -> list[str]:
        """Return the conclusion in sentences."""
        now, best = f"{self.accept_length:.2f}", self.cause
        if best is None:
            lines = [f"No change restores acceptance by more than chance; the accept length is {now}."]
            if self.as_is:
                lines.append(f"The draft's own top-1 agreement with the target is {self.as_is.by_depth[0]:.1%}.")
            return lines + self.verdict_on_parts()
        new = f"{best.acceptance.accept_length:.2f}"
        lines = [
            f"The {best.shift.input} is wrong: with {best.shift.change} the accept length is {new} instead of {now}, "
            f"a gain of {best.low:.2f} to {best.high:.2f}.",
            f"Remedy: {best.shift.remedy}.",
        ]
        others = [f for f in self.findings if f.cause and f.shift.input != best.shift.input]
        if others:
            names = ", ".join(f"{f.shift.input} ({f.shift.change}, {f.gain:+.2f})" for f in others)
            lines.append(f"These gain less: {names}.")
        return lines + self.verdict_on_parts()

    def verdict_on_parts(self) -> list[str]:
        """Return a sentence about a union: whether the n-gram index gains more than chance."""
        gain = next((part.gain for part in self.parts if part.gain is not None), None)
        if gain is None:
            return []
        if gain.low > 0:
            return [f"The n-gram index adds {gain.low:.2f} to {gain.high:.2f} tokens a round on these prompts."]
        alone = model_part(self.algorithm)
        return [f"The n-gram index adds no more than chance on these prompts: {alone} alone costs less."]

    def facts(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "model": self.model,
            "draft": self.draft,
            "algorithm": self.algorithm,
            "prompts": self.num_texts,
            "tokens": self.num_tokens,
            "as_is": facts_of(self.as_is) if self.as_is else None,
            "refusal": self.refusal or None,
            "shifts": [
                {"input": f.shift.input, "change": f.shift.change, "remedy": f.shift.remedy}
                | facts_of(f.acceptance)
                | {"gain": f.gain, "gain_low": f.low, "gain_high": f.high, "restores": f.cause}
                for f in self.findings
            ],
            "parts": [
                {"name": part.name, "num_nodes": part.num_nodes, "gain": part.gain and part.gain._asdict()}
                | facts_of(part.acceptance)
                for part in self.parts
            ],
            "cause": self.cause.shift.input if self.cause else None,
            "verdict": " ".join(self.verdict()),
        }


def facts_of(acceptance: Acceptance) -> dict[str, Any]:
    """Return an acceptance as JSON."""
    derived = {"accept_length": acceptance.accept_length, "acceptance_by_depth": acceptance.by_depth}
    return derived | asdict(acceptance)


def compared(as_is: Acceptance | None, shift: Shift, with_shift: Acceptance, num_shifts: int) -> Finding:
    """Return the shift's gain and its interval."""
    before = as_is.accept_length if as_is else 1.0
    gain = gain_of(as_is, with_shift, num_shifts)
    return Finding(shift, with_shift, *gain, cause=gain.low > 0 and gain.mean >= MIN_GAIN * before)


def gain_of(as_is: Acceptance | None, other: Acceptance, num_others: int) -> Gain:
    """Return one of `num_others` gains, and its interval from the same resampled prompts for both."""
    tokens, rounds = counts(other)
    tokens_as_is, rounds_as_is = counts(as_is) if as_is else (rounds, rounds)
    draws = torch.randint(len(tokens), (RESAMPLES, len(tokens)), generator=torch.Generator().manual_seed(0))

    def accept_lengths(tokens: Tensor, rounds: Tensor) -> Tensor:
        return tokens[draws].sum(1) / rounds[draws].sum(1).clamp(min=1)

    gains = accept_lengths(tokens, rounds) - accept_lengths(tokens_as_is, rounds_as_is)
    tail = LEVEL / 2 / max(num_others, 1)
    low, high = torch.quantile(gains, torch.tensor([tail, 1 - tail], dtype=gains.dtype)).tolist()
    return Gain(other.accept_length - (as_is.accept_length if as_is else 1.0), low, high)


def counts(acceptance: Acceptance) -> tuple[Tensor, Tensor]:
    """Return the tokens and rounds of each prompt."""
    return torch.tensor(acceptance.tokens).double(), torch.tensor(acceptance.rounds).double()


class Target:
    """The target and its continuations, by prompting.

    Raises:
        ValueError: no tokenizer, too few prompts, what the engine refuses.
        OSError: no such model or file.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = config_of(args.model)
        self.tokenizer, reason = load_tokenizer(args.model, None, False)
        if self.tokenizer is None:
            raise ValueError(f"model is {args.model}, expected one with a tokenizer ({reason})")
        self.prompts = read_prompts(args.prompts)
        if len(self.prompts) < MIN_TEXTS:
            raise ValueError(
                f"--prompts {args.prompts} has {len(self.prompts)} prompts, expected at least {MIN_TEXTS}: "
                "fewer say little about chance"
            )
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))
        self.layers: tuple[int, ...] = ()  # their input states are recorded
        if args.tp is not None and args.tp > 1 and args.kv_cache_dtype is not None:
            raise ValueError(
                f"--kv-cache-dtype is {args.kv_cache_dtype}, expected none with --tp {args.tp}: the change to 16 bits "
                "needs a second engine"
            )
        self._engines: dict[str, Engine] = {}
        self._models: dict[str, LanguageModel] = {}
        self._texts: dict[Prompting, list[Text]] = {}

    def tokens(self, prompting: Prompting) -> list[list[int]]:
        """Return the tokens of each prompt."""
        if prompting.template:
            prompts = [with_template(prompt, self.tokenizer) for prompt in self.prompts]
        else:
            prompts = [self.tokenizer(without_template(prompt))["input_ids"] for prompt in self.prompts]
        if prompting.num_bos is None:
            return prompts
        bos = self.tokenizer.bos_token_id
        return [[bos] * prompting.num_bos + tokens[leading(tokens, bos) :] for tokens in prompts]

    def num_bos(self, prompting: Prompting) -> int | None:
        """Return the number of BOS tokens that prompts begin with, None if the tokenizer has none."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return None if bos is None else leading(self.tokens(prompting)[0], bos)

    def engine(self, kv: str) -> Engine:
        """Return an engine with this KV dtype."""
        if kv not in self._engines:
            # Given the module instead of the folder, the engine does not read the checkpoint's KV scales.
            model = self.args.model if kv == "as is" else self.engine("as is").target.model
            options = options_of(
                self.args,
                adaptive=False,
                num_slots=min(8, len(self.prompts)),
                kv_dtype=None if kv == "16 or 32 bit" else self.args.kv_cache_dtype,
            )
            self._engines[kv] = Engine(model, Recorder(self.layers), options=options)
        return self._engines[kv]

    def model(self, kv: str) -> LanguageModel:
        """Return the target of the engine with this KV dtype, with its whole LM head."""
        if kv not in self._models:
            self._models[kv] = self.engine(kv).core.whole_target()
        return self._models[kv]

    def texts(self, prompting: Prompting) -> list[Text]:
        """Return the prompts with the target's continuations and states."""
        if prompting not in self._texts:
            engine, prompts = self.engine(prompting.kv), self.tokens(prompting)
            self._texts[prompting] = record(engine, prompts, write_texts(engine, prompts, self.args.max_new_tokens))
        return self._texts[prompting]

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()


def leading(tokens: Sequence[int], token: int) -> int:
    """Count the leading `token`s."""
    return next((at for at, other in enumerate(tokens) if other != token), len(tokens))


def examine(args: argparse.Namespace) -> Diagnosis:
    """Measure the draft as it is and with every shift.

    Raises:
        ValueError: options that do not fit, and all that `Target` raises.
        OSError: no such model or file.
    """
    logging.disable_progress_bar()
    num_steps = args.speculative_num_steps
    for name, low in (("speculative_num_steps", 1), ("max_new_tokens", num_steps + 1)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least {low}")
    if num_steps > MOST_STEPS:
        raise ValueError(f"--speculative-num-steps is {num_steps}, expected at most {MOST_STEPS}")
    path = args.speculative_draft_model_path
    folder = None if path is None else local_folder(path, "--speculative-draft-model-path")
    algorithm = args.speculative_algorithm or algorithm_of(Path(folder or ""))
    part = model_part(algorithm)
    if part == "DSPARK" and folder is None:
        folder = local_folder(args.model, "MODEL") / FOLDER_IN_TARGET
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-doctor-")))
        target = Target(args)
        stack.callback(target.close)
        if args.apply_chat_template and not target.has_template:
            raise ValueError(
                f"--apply-chat-template is set, expected not: the tokenizer of {args.model} has no template"
            )
        as_is = Prompting(target.has_template if args.apply_chat_template is None else args.apply_chat_template)

        def make() -> Draft:
            try:
                return draft_class(part)(folder, num_steps=num_steps, topk=1)
            except TypeError as error:  # of a class of the user's own
                raise ValueError(
                    f"--speculative-algorithm is {algorithm}, expected a class like Eagle3, which takes a checkpoint, "
                    f"num_steps and topk ({error})"
                ) from error

        def shifts(layers: tuple[int, ...]) -> Iterator[Shift]:
            fp8 = args.kv_cache_dtype is not None
            yield from prompting_shifts(as_is, target.has_template, target.num_bos(as_is), fp8)
            vocab_size, num_layers = target.config.vocab_size, target.config.num_hidden_layers
            if ":" in algorithm:
                return
            if part == "MTP":
                yield from mtp_shifts(folder, num_steps, target.config)
                return
            assert folder is not None
            if part == "STANDALONE":
                yield from standalone_shifts(folder, num_steps, target.tokenizer, vocab_size)
            else:
                head = Head(folder, part, num_steps, scratch)
                if part in BLOCK_ALGORITHMS:
                    yield from block_shifts(head, target.config, target.tokenizer)
                    return
                yield from head_shifts(head, layers, num_layers, vocab_size)

        # Trees that hold the chain of either part whole.
        sizes = {"num_steps": num_steps, "topk": 1, "num_nodes": 2 * num_steps + 1}
        parts: dict[str, Callable[[], Draft]] = {}
        if algorithm in UNIONS:
            parts["NGRAM"] = lambda: Ngram(num_nodes=num_steps + 1)
            parts[algorithm] = lambda: make_draft(algorithm, folder, sizes)
        return diagnose(target, algorithm, as_is, make, shifts, parts)


def diagnose(
    target: Target,
    algorithm: str,
    as_is: Prompting,
    make: Callable[[], Draft],
    shifts: Callable[[tuple[int, ...]], Iterator[Shift]],
    parts: Mapping[str, Callable[[], Draft]],
) -> Diagnosis:
    """Measure the unchanged draft, which `make` creates, and every shift.

    `shifts` takes the feature layers that the unchanged draft reads. `parts` make the n-gram index and the union that
    the draft is a part of.
    """
    refusal, drafts = "", []
    own, layers = needed(make, target.config)
    if isinstance(layers, ValueError):
        refusal, layers = str(layers), ()
    for shift in shifts(layers):
        draft, others = needed(shift.draft or make, target.config)
        if draft is not None and not isinstance(others, ValueError):
            drafts.append((shift, draft))
            layers += others
    target.layers = tuple(sorted(set(layers)))

    def acceptance(
        draft: Draft, prompting: Prompting | None, pairing: int = 0, num_nodes: int | None = None
    ) -> Acceptance:
        prompting = prompting or as_is
        texts, model = target.texts(prompting), target.model(prompting.kv)
        return measure(draft, target.args.speculative_num_steps, model, texts, pairing, num_nodes)

    with progress(len(drafts) + len(parts) + 1) as advance:
        base, measured = None, []
        texts = target.texts(as_is)
        if own is not None:
            try:
                base = acceptance(own, None)
            except ValueError as error:
                refusal = str(error)
        for shift, draft in drafts:
            advance(f"{shift.input}: {shift.change}")
            try:
                measured.append((shift, acceptance(draft, shift.prompting, shift.pairing)))
            except ValueError:  # the checkpoint cannot be read so
                continue
        of_parts = []
        for name, make_part in parts.items():
            advance(name)
            draft, _ = needed(make_part, target.config)
            if draft is None or (base is None and draft.members):
                continue  # refused for the reason that the model's draft is
            num_nodes = draft.needs(target.config).num_nodes
            found = acceptance(draft, None, num_nodes=num_nodes)
            gain = gain_of(base, found, 1) if draft.members else None
            of_parts.append(Part(name, num_nodes, found, gain))
    if base is None and not measured:
        raise ValueError(refusal)
    findings = [compared(base, *one, len(measured)) for one in measured]
    return Diagnosis(
        model=str(target.args.model),
        draft=str(target.args.speculative_draft_model_path or target.args.model),
        algorithm=algorithm,
        num_texts=len(texts),
        num_tokens=sum(len(text.tokens) - len(text.prompt) for text in texts),
        as_is=base,
        refusal=refusal,
        findings=sorted(findings, key=lambda finding: -finding.gain),
        parts=of_parts,
    )


def needed(make: Callable[[], Draft], config: Any) -> tuple[Draft | None, tuple[int, ...] | ValueError]:
    """Return a draft and the feature layers it reads, or None and the error that refuses it."""
    try:
        draft = make()
        return draft, draft.needs(config).feature_layers
    except ValueError as error:
        return None, error
