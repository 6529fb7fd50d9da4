"""`model.generate` of transformers, by speculative decoding.

    from specdec_kernels import hf
    from specdec_kernels.engine import Eagle3
    model.generate(**inputs, max_new_tokens=200, custom_generate=hf.generate, draft=Eagle3(folder))

The engine uses the model's own weights: projections are fused in place, without more memory, and the model still runs
as before. The engine is created at the first call and kept with the model; a call with other options, or that needs
longer or more sequences, replaces it. `release` frees its memory.

transformers does not pass `streamer=`, `assistant_model=` and the tokenizer to a custom_generate. Use `stream_to=` and
`draft=Standalone(model)` here, and for `stop_strings=` add a `StopStringCriteria(tokenizer, ...)` to the stopping
criteria.

`assisted` is a second loop: transformers' own assisted generation, with drafts from an n-gram index. It takes what the
engine refuses: every model that transformers can assist, with any logits processors, one sequence at a time.

    model.generate(**inputs, max_new_tokens=200, custom_generate=hf.assisted)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from .engine import Draft, Engine, NewTokens, Ngram, SamplingParams
from .models.backends.native import supported_family
from .models.families import position_limit
from .models.weights.loading import check_modules
from .models.weights.model_config import text_config
from .ngram import NgramIndex

__all__ = ["NgramCandidates", "assisted", "generate", "release"]

_ATTRIBUTE = "_specdec_engine"
_LARGEST_BATCH = 64  # sequences that run at once, unless num_slots says otherwise

# Logits processors of sampling parameters, in the order in which they apply, and these parameters.
_PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: "repetition_penalty",
    MinLengthLogitsProcessor: "min_new_tokens",
    MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}

# Arguments of transformers that this loop does not use.
_UNUSED = {"position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position"}


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: GenerationConfig | None = None,
    *,
    draft: Draft | None = None,
    adaptive: bool | None = None,
    max_len: int | None = None,
    num_slots: int | None = None,
    mem_fraction: float | None = None,
    page_size: int = 16,
    prefill_chunk: int = 2048,
    kv_dtype: str | torch.dtype | None = None,
    cuda_graph: bool = True,
    batch_invariant: bool = False,
    seed: int | None = None,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode for `model.generate(..., custom_generate=hf.generate)`; the text is the model's own.

    Read from the generation config: max_length and max_new_tokens, min_length and min_new_tokens, end-of-sequence
    tokens, repetition_penalty, do_sample with temperature, top_k, top_p and min_p, num_return_sequences,
    return_dict_in_generate (sequences only). A sampled text has the model's distribution, but differs from what
    transformers draws with the same seed. Stopping criteria are called after each token of each sequence, with that
    sequence only and without scores. Settings of how transformers computes (use_cache, cache_implementation, an empty
    past_key_values) have no effect.

    Args:
        model: a module of transformers; this and the next four are given by transformers.
        input_ids: [sequences, length] int64, padded on the left.
        logits_processor: processors of the settings above, in transformers' order.
        stopping_criteria: any.
        generation_config: the merged one. None: the model's.
        draft: as for `Engine`: the same object at each call, or one that equals it. None: `Ngram()`.
        adaptive: as for `Engine`, like all options below without a description.
        max_len: longest sequence. None: what the calls so far needed, a power of two.
        num_slots: sequences that run at once; others wait. None: what the calls so far needed, a power of two, at most
            64.
        mem_fraction: fraction of the GPU's memory.
        page_size: KV rows per page.
        prefill_chunk: prompt rows between two rounds.
        kv_dtype: dtype of the KV cache.
        cuda_graph: capture rounds in CUDA graphs.
        batch_invariant: make results bitwise independent of the batch.
        seed: of sampling. None: drawn from torch's default generator, so `torch.manual_seed` fixes it.
        stream_to: a streamer of transformers, for a single sequence.
        **model_kwargs: attention_mask and position_ids are read; others must be None, empty or without effect here.

    Returns:
        [sequences, length] int64 like input_ids. Sequences that ended earlier are followed by the pad token.

    Raises:
        ValueError: an unsupported feature, by name: another architecture, a logits processor besides those above or in
            another order, beams, an assistant model, scores, inputs that are not token ids.
    """
    config = generation_config or model.generation_config
    _check_kept_arguments(sys._getframe(1))
    _check_config(config)
    _check_model_kwargs(model_kwargs)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    batch, width = input_ids.shape
    longest = max(map(len, prompts), default=0)
    room = min((c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)), default=config.max_length)
    if stream_to is not None and batch != 1:
        raise ValueError(f"hf.generate: stream_to is given for {batch} sequences, expected one")
    stop = [int(t) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id]
    sampling = _sampling_of(
        config.do_sample, logits_processor, stop, width, room - width, [width - len(p) for p in prompts]
    )

    engine = _engine_of(
        model,
        Ngram() if draft is None else draft,
        needed_len=longest + room - width,
        needed_slots=batch,
        max_len=max_len,
        num_slots=num_slots,
        options={
            "adaptive": adaptive,
            "mem_fraction": mem_fraction,
            "page_size": page_size,
            "prefill_chunk": prefill_chunk,
            "kv_dtype": kv_dtype,
            "cuda_graph": cuda_graph,
            "batch_invariant": batch_invariant,
        },
    )
    others = [c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (batch,), generator=generator).tolist()
    params = [SamplingParams(room - width, stop, seed=each, **sampling) for each in seeds]

    watch = _Watch(input_ids, others, stream_to)
    outputs = engine.generate(prompts, params, on_tokens=watch if others or stream_to is not None else None)
    if stream_to is not None:
        stream_to.end()
    texts = [output.tokens[: watch.ends.get(output.index)] for output in outputs]
    sequences = _padded(input_ids, texts, config)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def release(model: Any) -> None:
    """Free the memory of the engine that `generate` has kept with the model."""
    kept = model.__dict__.pop(_ATTRIBUTE, None)
    if kept is not None:
        kept[1].close()


class NgramCandidates(CandidateGenerator):
    """Candidates for transformers' assisted generation from an n-gram index, for one text.

    New tokens of the text are inserted into the index, and stay there after its end.

    Args:
        index: on the CPU; its stream of `slot` becomes this text.
        num_tokens: candidates at a time, at most, 1 to 255.
        max_length: of the text, prompt included; the last token is always left to the model.
        vocab_size: candidates end before a token id that is not below it.
        slot: of the index, for this text only.
    """

    def __init__(
        self, index: NgramIndex, *, num_tokens: int = 10, max_length: int, vocab_size: int, slot: int = 0
    ) -> None:
        if not 1 <= num_tokens <= 255:
            raise ValueError(f"NgramCandidates: num_tokens is {num_tokens}, expected 1 to 255")
        self.index, self.num_tokens, self.max_length = index, num_tokens, max_length
        self.vocab_size, self.slot = vocab_size, slot
        index.begin(slot)
        self._known = 0

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> Any:
        """Return input_ids [1, length] followed by the candidates, and None for logits: nothing was sampled."""
        length = input_ids.shape[1]
        self.index.insert(input_ids[0, self._known :].int().cpu(), self.slot)
        self._known = length
        count = min(self.num_tokens, self.max_length - length - 1)
        if count < 1:
            return input_ids, None
        rows = torch.tensor([[self.slot], [length]], dtype=torch.int32)
        tree = self.index.draft(rows[0], rows[1], count + 1, mode="chain").tree
        tokens = tree.tokens[0, 1 : max(int(tree.num_nodes[0]), 1)]
        outside = (tokens >= self.vocab_size).nonzero()
        tokens = tokens[: int(outside[0])] if len(outside) else tokens
        return torch.cat([input_ids, tokens.to(input_ids)[None]], 1), None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Do nothing: the number of candidates does not depend on how many were accepted."""


def assisted(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: GenerationConfig | None = None,
    *,
    index: NgramIndex | None = None,
    num_tokens: int = 10,
    **model_kwargs: Any,
) -> Any:
    """Run transformers' assisted generation with candidates from an n-gram index: `custom_generate=hf.assisted`.

    The loop is transformers' own, with its limits: one sequence, a dynamic cache, greedy or sampled, any logits
    processors. A greedy text is the model's own; a sampled one has the model's distribution.

    Args:
        model: a module of transformers; this and the next four are given by transformers.
        input_ids: [1, length] int64.
        logits_processor: any.
        stopping_criteria: of lengths and end-of-sequence tokens.
        generation_config: the merged one. None: the model's.
        index: on the CPU; slot 0 is used. A caller that keeps it between texts lets one text draft for the next. None:
            an index for this text only.
        num_tokens: candidates per pass, at most.
        **model_kwargs: passed on.

    Returns:
        The result of transformers' loop, which `model.generate` returns.

    Raises:
        ValueError: several sequences; beams and other modes; a stopping criterion besides lengths and end-of-sequence
            tokens, since transformers would call it once per pass, after tokens at which it should have stopped.
    """
    config = generation_config or model.generation_config
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"hf.assisted: the generation config asks for {mode.value}, expected greedy_search or sample")
    if len(input_ids) != 1:
        raise ValueError(
            f"hf.assisted: input_ids has {len(input_ids)} sequences, expected one (hf.generate takes more)"
        )
    for criterion in stopping_criteria:
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise ValueError(
                f"hf.assisted: stopping_criteria has {type(criterion).__name__}, "
                "expected lengths and end-of-sequence tokens alone (hf.generate takes others)"
            )
    longest = min(
        (c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)), default=config.max_length
    )
    index = NgramIndex(max(longest, 27), 1, longest) if index is None else index
    candidates = NgramCandidates(
        index, num_tokens=num_tokens, max_length=longest, vocab_size=text_config(model.config).vocab_size
    )
    decode: Any = GenerationMixin._assisted_decoding
    return decode(
        _Assisted(model, candidates),
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=config,
        **model_kwargs,
    )


class _Assisted:
    """A model whose assisted generation takes its candidates from a given generator."""

    def __init__(self, model: Any, candidates: CandidateGenerator) -> None:
        self._model, self._candidates = model, candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> CandidateGenerator:
        return self._candidates


class _Watch:
    """Streams each new token, and applies the stopping criteria after it."""

    def __init__(self, input_ids: Tensor, criteria: list[Any], streamer: Any) -> None:
        self.input_ids, self.criteria, self.streamer = input_ids, criteria, streamer
        self.ends: dict[int, int] = {}  # new tokens of sequences that a criterion ended
        self._texts: dict[int, list[int]] = {}
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def __call__(self, new: NewTokens) -> bool:
        """Return whether the sequence ends here."""
        text = self._texts.setdefault(new.index, [])
        for token in new.tokens:
            if new.index in self.ends:
                break
            text.append(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.criteria:
                row = torch.cat([self.input_ids[new.index], self.input_ids.new_tensor(text)])[None]
                if any(bool(criterion(row, None).any()) for criterion in self.criteria):
                    self.ends[new.index] = len(text)
        return new.index in self.ends


def _check_kept_arguments(caller: FrameType) -> None:
    """Raise ValueError for arguments that transformers does not pass on, read from the caller's locals.

    Without this check a streamer or an assistant model would be ignored silently.
    """
    if caller.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return
    ours = {"streamer": "stream_to=", "assistant_model": "draft=Standalone(...)", "synced_gpus": "False"}
    for name, expected in ours.items():
        if caller.f_locals.get(name):
            raise ValueError(f"hf.generate: {name} is given, which transformers keeps to itself, expected {expected}")


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"hf.generate: the generation config asks for {mode.value}, expected greedy_search or sample")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "token_healing"):
        if getattr(config, name, None):
            raise ValueError(f"hf.generate: {name} is True, expected False")


def _check_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    name = "cache" if "cache" in model_kwargs else "past_key_values"  # since transformers 5.24, and before
    cache = model_kwargs.get(name)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(f"hf.generate: {name} holds a text already, expected an empty cache or None")
    for name, value in model_kwargs.items():
        nothing = value is None or (isinstance(value, dict) and not value)  # no image, say, of a model that takes some
        if not nothing and name not in _UNUSED and name != "attention_mask":
            raise ValueError(f"hf.generate: {name} is given, expected token ids and an attention mask alone")


def _sampling_of(
    do_sample: bool,
    processors: Sequence[Any],
    stop: list[int],
    width: int,
    max_new_tokens: int,
    padding: list[int],
) -> dict[str, Any]:
    """Return SamplingParams fields for the processors that transformers made; raise ValueError for any other.

    `padding`: of each prompt of `width` tokens, for processors that ignore it.
    """
    values: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0, "min_new_tokens": 0}
    order = list(_PROCESSORS)
    before = None
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:
            continue  # no probability changes
        if kind not in _PROCESSORS:
            raise ValueError(
                f"hf.generate: logits_processor has {kind.__name__}, "
                "expected those of repetition_penalty, min_length, min_new_tokens, temperature, top_k, top_p and min_p "
                "alone"
            )
        if before is not None and order.index(kind) <= order.index(before):
            raise ValueError(
                f"hf.generate: logits_processor has {kind.__name__} after {before.__name__}, "
                "expected each once, in the order repetition_penalty, min_length, min_new_tokens, temperature, top_k, "
                "top_p, min_p"
            )
        before, name = kind, _PROCESSORS[kind]
        if name == "min_new_tokens":
            least = min(_min_new_tokens(processor, stop, width), max_new_tokens)
            values[name] = max(values[name], least)
        elif isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            if ignored is not None and torch.as_tensor(ignored).tolist() != padding:
                raise ValueError(
                    f"hf.generate: prompt_ignore_length of {kind.__name__} is {ignored}, expected the padding {padding}"
                )
            values[name] = processor.penalty
        elif do_sample:
            if (keep := getattr(processor, "min_tokens_to_keep", 1)) != 1:
                raise ValueError(f"hf.generate: min_tokens_to_keep of {kind.__name__} is {keep}, expected 1")
            values[name] = getattr(processor, name)
    return values


def _min_new_tokens(processor: Any, stop: list[int], width: int) -> int:
    if set(processor.eos_token_id.tolist()) != set(stop):
        raise ValueError(
            f"hf.generate: {type(processor).__name__} is of other tokens than those that end a text, expected the same"
        )
    if isinstance(processor, MinLengthLogitsProcessor):
        length: int = processor.min_length
    else:
        length = processor.prompt_length_to_skip + processor.min_new_tokens
    return max(length - width, 0)


def _prompts(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """Return the tokens of each row without the padding to their left."""
    rows: list[list[int]] = input_ids.tolist()
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"hf.generate: attention_mask has shape {list(mask.shape)}, expected {list(input_ids.shape)} like input_ids"
        )
    starts = (mask == 0).sum(-1).tolist()
    for row, start in enumerate(starts):
        if not bool(mask[row, start:].all()):
            raise ValueError(f"hf.generate: attention_mask[{row}] has zeros after ones, expected padding on the left")
    if positions is not None and not bool(((positions == mask.cumsum(-1) - 1) | (mask == 0)).all()):
        raise ValueError("hf.generate: position_ids is given, expected positions that follow from the attention mask")
    return [row[start:] for row, start in zip(rows, starts, strict=True)]


def _padded(input_ids: Tensor, texts: list[list[int]], config: GenerationConfig) -> Tensor:
    width = max(map(len, texts), default=0)
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
    if pad is None and any(len(text) < width for text in texts):
        raise ValueError("hf.generate: pad_token_id is None, expected one, since the sequences differ in length")
    new = [text + [pad] * (width - len(text)) for text in texts]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device).view(-1, width)], 1)


def _engine_of(
    model: Any,
    draft: Draft,
    *,
    needed_len: int,
    needed_slots: int,
    max_len: int | None,
    num_slots: int | None,
    options: dict[str, Any],
) -> Engine:
    """Return the engine kept with the model, or a new one, at least as large as the one before."""
    limit = position_limit(text_config(model.config))
    key = (draft, max_len, num_slots, tuple(options.items()), model.dtype, model.device)
    kept_key, kept = model.__dict__.get(_ATTRIBUTE, (None, None))
    wanted_len = max_len or _power_of_two(max(needed_len, 512))
    if max_len is None and limit is not None:
        wanted_len = min(limit, wanted_len)
    wanted_slots = num_slots or min(_LARGEST_BATCH, _power_of_two(needed_slots))
    if needed_len > wanted_len:
        raise ValueError(f"hf.generate: the longest text may have {needed_len} tokens, expected at most {wanted_len}")
    if kept is not None and kept_key == key:
        if kept.config.max_len >= wanted_len and kept.config.num_slots >= wanted_slots:
            engine: Engine = kept
            return engine
        wanted_len, wanted_slots = max(wanted_len, kept.config.max_len), max(wanted_slots, kept.config.num_slots)
    _check_module(model, wanted_len)
    release(model)
    engine = Engine(
        model,
        draft=draft,
        max_len=wanted_len,
        num_slots=wanted_slots,
        dtype=model.dtype,
        device=model.device,
        **options,
    )
    model.__dict__[_ATTRIBUTE] = (key, engine)
    return engine


def _check_module(model: Any, max_len: int) -> None:
    config = text_config(model.config)
    check_modules(model, packages=supported_family(config, max_len).packages)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"hf.generate: the model is on {len(devices)} devices, expected one")


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
