"""Text that comes from outside, as lists of token ids: what `generate` takes as prompts, and files."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any


def as_list(prompts: Any) -> list[Any]:
    """Prompts one by one: a single one, text or token ids, as a list of one. Arrays count as what they hold."""
    if isinstance(prompts, str):
        return [prompts]
    items = plain(prompts)
    if not isinstance(items, Sequence):
        raise TypeError(f"generate: prompts is a {type(prompts).__name__}, expected text, token ids, or a list of them")
    return [items] if items and isinstance(items[0], Integral) else list(items)


def token_ids(prompt: Any, index: int, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"generate: prompts[{index}] is text, expected token ids (the model folder has no tokenizer)"
            )
        tokens: list[int] = tokenizer(prompt)["input_ids"]
        return tokens
    items = plain(prompt)
    if not isinstance(items, Sequence) or not all(isinstance(token, Integral) for token in items):
        raise TypeError(
            f"generate: prompts[{index}] is a {type(prompt).__name__}, expected text or a list of token ids"
        )
    return [int(token) for token in items]


def check_tokens(tokens: list[int], index: int, *, max_len: int, vocab_size: int) -> None:
    name = f"generate: prompts[{index}]"
    if not tokens:
        raise ValueError(f"{name} is empty, expected at least 1 token")
    if len(tokens) >= max_len:
        raise ValueError(f"{name} has {len(tokens)} tokens, expected at most {max_len - 1} (max_len - 1)")
    for worst in (min(tokens), max(tokens)):
        if not 0 <= worst < vocab_size:
            raise ValueError(f"{name} has token {worst}, expected 0 to {vocab_size - 1} (the model's vocabulary)")


def plain(value: Any) -> Any:
    """A NumPy array or a tensor as (nested) lists, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def file_tokens(file: str | Path, tokenizer: Any) -> list[int]:
    """A text file as it would stand within a text: without special tokens."""
    if tokenizer is None:
        raise ValueError("Speculation: ngram_corpus is given, expected none (the model folder has no tokenizer)")
    try:
        text = Path(file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"Speculation: ngram_corpus has {file}, expected text in UTF-8") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens
