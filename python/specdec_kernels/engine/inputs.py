"""From prompts and sampling parameters to the specs of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..models.language_model import LanguageModel
from ..models.weights.model_config import placeholders
from .config import MAX_STOP_TOKENS, EngineConfig
from .drafts import Draft
from .grammars import Grammars, NewMatcher
from .params import SamplingParams
from .request import RequestSpec
from .text.detokenizer import Detokenizer
from .text.prompts import as_list, chat_text, check_tokens, exceeds, num_characters, tokens_of_each
from .text.stop_strings import StopStrings

LONG_TOKEN = 8  # characters: the tokens of longer texts are counted before all of them are in memory


class InputProcessor:
    """Tokenizes prompts, checks parameters against the engine, and builds the specs of requests. Thread-safe.

    Attributes:
        tokenizer: of prompts and outputs, or None. detokenizer: decodes outputs with it.
        no_tokenizer: why there is none, for error messages.
        eos_token_ids: tokens that end a request by default.
        grammars: compiles those of requests.
    """

    def __init__(
        self, config: EngineConfig, target: LanguageModel, draft: Draft, tokenizer: Any, no_tokenizer: str
    ) -> None:
        self.tokenizer, self.no_tokenizer = tokenizer, no_tokenizer
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.eos_token_ids = eos_token_ids(target.model, tokenizer)
        self._config, self._draft = config, draft
        self._vocab_size = target.config.vocab_size
        self._placeholders = placeholders(target.model.config)
        self.grammars = Grammars(tokenizer, no_tokenizer, target.lm_head.out_features)

    def tokenize(self, prompts: Sequence[Any], names: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of prompts, text or token ids each.

        Args:
            prompts: text, or a sequence of token ids, each.
            names: what error messages call the prompts.
            add_special_tokens: whether the tokenizer adds its special tokens to text.

        Raises:
            ValueError, TypeError: a prompt that is empty, not below `max_len`, or holds an id that is no text token of
                the model; text without a tokenizer.
        """
        self._check_lengths(prompts, names)
        each = tokens_of_each(prompts, names, self.tokenizer, self.no_tokenizer, add_special_tokens)
        for tokens, name in zip(each, names, strict=True):
            self._check_tokens(tokens, name, self._placeholders)
        return each

    def _check_lengths(self, texts: Sequence[Any], names: Sequence[str]) -> None:
        for text, name in zip(texts, names, strict=True):
            if isinstance(text, str):
                self._check_length(len(text), name)
                max_len = self._config.max_len
                is_long = len(text) > LONG_TOKEN * max_len and self.tokenizer is not None
                if is_long and exceeds(text, self.tokenizer, max_len):
                    expected = f"expected at most {max_len - 1} (max_len - 1)"
                    raise ValueError(f"{name} has more than {max_len} tokens, {expected}")

    def _check_length(self, num_characters: int, name: str) -> None:
        """Refuse a text that cannot fit, before it is tokenized: megabytes take seconds and gigabytes."""
        limit = self._config.max_len * self._longest_token
        if num_characters > limit:
            raise ValueError(f"{name} has {num_characters} characters, expected at most {limit} (max_len tokens)")

    @cached_property
    def _longest_token(self) -> int:
        """Return an upper bound of the characters of a token: what normalization removes is counted generously."""
        vocab = self.tokenizer.get_vocab() if self.tokenizer is not None else ()
        return max(256, *map(len, vocab)) if vocab else 256

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Return the special tokens, by their texts."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {
            token.content: index
            for index, token in added.items()
            if token.special and token.content and index < self._vocab_size
        }

    def tokenize_all(
        self, op: str, prompts: Any, params: Any, add_special_tokens: bool
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return the token ids and the parameters of each prompt of a call of `op`."""
        items = as_list(prompts, op)
        token_lists = self.tokenize(items, [f"{op}: prompts[{i}]" for i in range(len(items))], add_special_tokens)
        return token_lists, params_of_each(params, len(items), op)

    def tokenize_chat(self, conversation: Any, template: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation by the tokenizer's chat template, up to where the answer begins."""
        self.check_conversation(conversation, template)
        text = chat_text(conversation, self.tokenizer, self.no_tokenizer, template)
        self._check_lengths([text], ["messages"])
        return tokens_of_each([text], ["messages"], self.tokenizer, self.no_tokenizer, False)[0]

    def check_conversation(self, conversation: Any, template: dict[str, Any]) -> None:
        """Raise ValueError if the texts of messages, tools or another argument of the template cannot fit."""
        for name, value in {"messages": conversation, **template}.items():
            self._check_length(num_characters(value), name)

    def compile_grammars(self, params: Sequence[SamplingParams]) -> None:
        """Compile the grammars that these parameters name, so that `specs` finds them. This may take seconds."""
        for one in params:
            if self.has_grammar(one):
                self.grammars.compiled(one)

    def has_grammar(self, params: SamplingParams) -> bool:
        """Return whether the parameters name a grammar that this engine takes."""
        return bool(params.constraint[0]) and self._config.grammars

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for stops that cannot be followed, or tokens outside the vocabulary."""
        self._stop_tokens(params)
        for string in params.stop_strings:
            # Text is decoded without special tokens: one alone is a stop token, one next to text would never be found.
            if string not in self._special_tokens:
                for special in self._special_tokens:
                    if special in string:
                        raise ValueError(
                            f"SamplingParams: stop is {string!r} with the special token {special}, "
                            "expected that token alone"
                        )
        self._check_begun(params)
        for token in params.logit_bias or ():
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"SamplingParams: logit_bias has token {token}, expected 0 to {self._vocab_size - 1} "
                    "(the model's vocabulary)"
                )
        if params.constrain_unless is not None and params.constrain_unless >= self._vocab_size:
            raise ValueError(
                f"SamplingParams: constrain_unless is {params.constrain_unless}, expected 0 to {self._vocab_size - 1} "
                "(the model's vocabulary)"
            )

    def specs(self, token_lists: Sequence[list[int]], params: Sequence[SamplingParams]) -> Iterator[RequestSpec]:
        """Yield the specs of requests in the order of the prompts, `n` of them for each.

        Raises:
            ValueError: parameters that the model or the engine rules out.
        """
        for place, (tokens, one) in enumerate(zip(token_lists, params, strict=True)):
            self.check_params(one)
            stops = self._stop_tokens(one)
            num_logprobs, num_prompt_logprobs = (
                min(count, self._config.top_n) for count in (one.num_logprobs, one.num_prompt_logprobs)
            )
            room, count = self._config.max_len - 1 - len(tokens), len(one.generated_token_ids)
            if count > room:
                expected = f"expected at most {room} after this prompt (max_len - 1 in all)"
                raise ValueError(f"SamplingParams: generated_token_ids has {count} entries, {expected}")
            matcher = self._new_matcher(one, stops)
            prediction, seeded = self._prediction(one), one.with_seed()
            for sample in range(one.n):
                yield RequestSpec(
                    place=place,
                    prompt=tokens,
                    params=seeded.of_sample(sample),
                    stop_tokens=stops,
                    stop=self._stop_strings(one, tokens),  # one for each sample: it follows the sample's text
                    num_logprobs=num_logprobs,
                    num_prompt_logprobs=num_prompt_logprobs,
                    new_matcher=matcher,
                    prediction=prediction,
                    sample=sample,
                )

    def _check_begun(self, params: SamplingParams) -> None:
        """Raise ValueError for generated tokens outside the vocabulary, or one that ends the text."""
        stops = set(self._stop_tokens(params)) if params.generated_token_ids else ()
        for place, token in enumerate(params.generated_token_ids):
            expected = f"0 to {self._vocab_size - 1} (the model's vocabulary)" if token >= self._vocab_size else ""
            if token in self._placeholders:
                expected = f"text alone, and not the model's {self._placeholders[token]}"
            if token in stops:
                expected = "no stop token (the text ends there)"
            if expected:
                raise refused_begin(token, place, expected)

    def _check_tokens(self, tokens: list[int], name: str, placeholders: Any) -> None:
        sizes = {"max_len": self._config.max_len, "vocab_size": self._vocab_size}
        check_tokens(tokens, name, **sizes, placeholders=placeholders)

    def _stop_tokens(self, params: SamplingParams) -> list[int]:
        stop = params.stop_token_ids
        if stop is None:
            stop = [] if params.ignore_eos else self.eos_token_ids
        special = [self._special_tokens[string] for string in params.stop_strings if string in self._special_tokens]
        if special:
            stop = list(dict.fromkeys([*stop, *special]))
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(
                f"SamplingParams: stop_token_ids has {len(stop)} entries, expected at most {MAX_STOP_TOKENS}"
            )
        return list(stop)

    def _prediction(self, params: SamplingParams) -> list[int]:
        if params.prediction is None:
            return []
        if not self._draft.takes_predictions:
            raise ValueError("SamplingParams: prediction is given, expected none without Ngram in Engine(draft=)")
        name = "SamplingParams: prediction"
        self._check_lengths([params.prediction], [name])
        (tokens,) = tokens_of_each([params.prediction], [name], self.tokenizer, self.no_tokenizer, False)
        if tokens:
            self._check_tokens(tokens, name, {})
        return tokens

    def _new_matcher(self, params: SamplingParams, stop_tokens: list[int]) -> NewMatcher | None:
        kind, _ = params.constraint
        if not kind:
            return None
        if not self._config.grammars:
            raise ValueError(f"SamplingParams: {kind} is given, expected none without Engine(grammars=True)")
        new_matcher = self.grammars.new_matcher(params, stop_tokens)
        if params.generated_token_ids:
            matcher = new_matcher()
            for place, token in enumerate(params.generated_token_ids):
                if not matcher.accept(token):
                    raise refused_begin(token, place, f"a token that {kind} allows there")
        return new_matcher

    def _stop_strings(self, params: SamplingParams, prompt: list[int]) -> StopStrings | None:
        if not params.stop_strings:
            return None
        if self.detokenizer is None or not self.detokenizer.is_fast:
            lack = self.no_tokenizer or "the tokenizer is not one of `tokenizers`"
            raise ValueError(f"SamplingParams: stop is given, expected none ({lack})")
        strings = StopStrings(self.detokenizer.decoder(prompt), params.stop_strings, params.min_new_tokens)
        begun = params.generated_token_ids
        if begun and (count := strings.find(begun)) is not None:
            token = begun[count - 1]
            raise refused_begin(token, count - 1, "none that completes a string of stop (the text ends there)")
        return strings


def refused_begin(token: int, place: int, expected: str) -> ValueError:
    """Return the error of a request that cannot have generated one of the tokens that it is to begin with."""
    return ValueError(f"SamplingParams: generated_token_ids has {token} at place {place}, expected {expected}")


def single_sample(params: SamplingParams | None) -> SamplingParams:
    """Return the parameters of a call that returns a single request; raise ValueError for more than one sample."""
    if params is not None and params.n > 1:
        raise ValueError(
            f"submit: params has n={params.n}, expected 1 (submit_many returns the requests of all samples)"
        )
    return params or SamplingParams()


def params_of_each(params: Any, count: int, op: str) -> list[SamplingParams]:
    """Return parameters for each of `count` prompts, given one for all, one each, or None."""
    each = [params or SamplingParams()] * count if not isinstance(params, Sequence) else list(params)
    for index, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            name = f"params[{index}]" if isinstance(params, Sequence) else "params"
            raise TypeError(f"{op}: {name} is a {type(one).__name__}, expected SamplingParams")
    if len(each) != count:
        raise ValueError(f"{op}: params has {len(each)} entries, expected one, or {count} like prompts")
    return each


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: of the generation config, else of the model's config, else the tokenizer.

    Negative ids, which some configs have for none, are left out.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            tokens = list(eos) if isinstance(eos, list | tuple) else [eos]
            return [token for token in tokens if token >= 0]
    return []
