"""Prompts of `generate` as lists of token ids."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .time_limit import TimeLimitError, within

SLICE = 1 << 16  # characters of a long text that are tokenized at a time to count its tokens
SPLIT_TOKENS = 64  # more tokens than a text has, at most, due to the end of a slice
# Arguments of `apply_chat_template` that a caller may give; what is no argument of it is a variable of the template.
TEMPLATE_ARGUMENTS = frozenset(
    {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
)
# Those of the tokenizer: padding alone may ask for any amount of memory, and truncation changes the prompt.
TOKENIZER_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "self", *TEMPLATE_ARGUMENTS,
}  # fmt: skip
TEMPLATE_SECONDS = 5.0  # a template is code of the model's folder, and may loop for years
TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*")


def own_tokenizer(adapter: Path | None) -> Path | None:
    """Return the folder of an adapter that has a tokenizer: the adapter was trained with it, and its template."""
    return adapter if adapter is not None and has_tokenizer(adapter) else None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def load_tokenizer(model: str | Path | nn.Module, tokenizer: Any, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the tokenizer and "", or None and the reason. No error: a tokenizer may not be needed."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer, ""
    if tokenizer is None and isinstance(model, nn.Module):
        return None, "the model is a module, and no tokenizer= is given"
    source = str(model if tokenizer is None else tokenizer)
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        return None, "the model folder has no tokenizer" if tokenizer is None else f"{source} has no tokenizer"
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code), ""
    except Exception as error:  # its files, or the code that reads them, may raise anything
        reason = " ".join(str(error).split())
        return None, f"the tokenizer of {source} does not load: {type(error).__name__}: {reason}"


def as_list(prompts: Any, op: str) -> list[Any]:
    """Return prompts as a list; a single one, text or token ids, as a list of one. Arrays count as lists."""
    if isinstance(prompts, str):
        return [prompts]
    items = plain(prompts)
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray | memoryview):
        hint = ' (its "input_ids" are)' if isinstance(items, Mapping) and "input_ids" in items else ""
        kind = type(prompts).__name__
        raise TypeError(f"{op}: prompts is a {kind}, expected text, token ids, or a list of them{hint}")
    return [items] if items and isinstance(items[0], Integral) else list(items)


def tokens_of_each(
    prompts: Sequence[Any], names: Sequence[str], tokenizer: Any, no_tokenizer: str, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each prompt. Errors use `names`, and `no_tokenizer`, why there is no tokenizer."""
    texts = []
    for prompt, name in zip(prompts, names, strict=True):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(f"{name} is text, expected token ids ({no_tokenizer})")
            check_unicode(prompt, name)
            texts.append(prompt)
    # One call for all texts: the overhead of a call exceeds its work on a short text.
    encoded = iter(tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else ())
    return [
        next(encoded) if isinstance(prompt, str) else token_ids(prompt, name)
        for prompt, name in zip(prompts, names, strict=True)
    ]


def exceeds(text: str, tokenizer: Any, max_tokens: int) -> bool:
    """Return whether a text has more tokens, for sure; a slice at a time, whose memory is freed."""
    for begin in range(0, len(text), SLICE):
        slice = text[begin : begin + SLICE]
        max_tokens -= len(tokenizer(slice, add_special_tokens=False)["input_ids"]) - SPLIT_TOKENS
        if max_tokens < 0:
            return True
    return False


def check_unicode(text: str, name: str) -> None:
    """Raise ValueError for half a surrogate pair, which Python makes of bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"{text[error.start]!r} at character {error.start}"
        raise ValueError(f"{name} has {where}, expected text that UTF-8 can encode") from None


def token_ids(prompt: Any, name: str) -> list[int]:
    """Return a prompt that is not text as a list of ints."""
    if type(prompt) in (list, tuple) and set(map(type, prompt)) <= {int}:  # the common case, checked fast
        return list(prompt)
    items = plain(prompt)
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray | memoryview):
        raise TypeError(f"{name} is a {type(prompt).__name__}, expected text or a list of token ids")
    for token in items:
        if not isinstance(token, Integral) or isinstance(token, bool):
            got = f"{type(prompt).__name__} with a {type(token).__name__} in it"
            raise TypeError(f"{name} is a {got}, expected text or a list of token ids")
    return [int(token) for token in items]


def conversations(messages: Any) -> tuple[list[Any], bool]:
    """Return conversations as a list, and whether a single one was given, that is a list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        got = f"a {type(messages).__name__}" if messages or not isinstance(messages, Sequence) else "empty"
        raise TypeError(f"chat: messages is {got}, expected a list of messages, or a list of such lists")
    single = isinstance(messages[0], Mapping)
    each = [messages] if single else list(messages)
    for index, conversation in enumerate(each):
        name = "messages" if single else f"messages[{index}]"
        if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes) or not conversation:
            raise TypeError(f"chat: {name} is a {type(conversation).__name__}, expected a list of messages")
        for place, message in enumerate(conversation):
            if not isinstance(message, Mapping) or "role" not in message:
                got = f"a {type(message).__name__}" if not isinstance(message, Mapping) else "without a role"
                raise TypeError(f"chat: {name}[{place}] is {got}, expected a dict with a role and its content")
    return each, single


def chat_text(conversation: Any, tokenizer: Any, no_tokenizer: str, options: dict[str, Any]) -> str:
    """Return the text of a conversation by the tokenizer's chat template, up to where the answer begins.

    `options` go to `apply_chat_template`: TEMPLATE_ARGUMENTS, and variables of the template.

    Raises:
        ValueError: an argument of the tokenizer; no tokenizer or no template; one that takes too long.
    """
    if given := sorted(TOKENIZER_ARGUMENTS & options.keys()):
        raise ValueError(f"chat: {given[0]} is given, expected variables of the chat template")
    if tokenizer is None:
        raise ValueError(f"chat: messages need a chat template, expected a tokenizer with one ({no_tokenizer})")
    if options.get("chat_template") is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: the tokenizer has no chat template, expected one, or chat_template=")
    options = {"add_generation_prompt": not options.get("continue_final_message", False)} | options
    try:
        text: str = within(
            TEMPLATE_SECONDS, lambda: tokenizer.apply_chat_template(conversation, **options, tokenize=False)
        )
    except TimeLimitError:
        raise ValueError(f"the chat template takes more than {TEMPLATE_SECONDS:g} s, expected less") from None
    return text


def num_characters(value: Any) -> int:
    """Count the characters of all texts in nested lists and dicts, without the keys."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return count


def check_tokens(
    tokens: list[int], name: str, *, max_len: int, vocab_size: int, placeholders: Mapping[int, str]
) -> None:
    """Raise ValueError for ids that are no text tokens of the model; `placeholders` stand for images or audio."""
    if not tokens:
        raise ValueError(f"{name} is empty, expected at least 1 token")
    if len(tokens) >= max_len:
        raise ValueError(f"{name} has {len(tokens)} tokens, expected at most {max_len - 1} (max_len - 1)")
    for token in placeholders.keys() & set(tokens):
        raise ValueError(f"{name} has token {token}, the model's {placeholders[token]}, expected text alone")
    for worst in (min(tokens), max(tokens)):
        if not 0 <= worst < vocab_size:
            raise ValueError(f"{name} has token {worst}, expected 0 to {vocab_size - 1} (the model's vocabulary)")


def plain(value: Any) -> Any:
    """Return a NumPy array or a tensor as (nested) lists, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
