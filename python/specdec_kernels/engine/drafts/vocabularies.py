"""Matches the tokens of a draft model and its target by the text that they stand for.

Token-level intersection (TLI; Timor et al. 2025, arXiv 2502.05202): the draft proposes tokens that the target has too,
and its distribution is normalized over these. The target verifies, so the output is its own, whatever is shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..text.detokenizer import LETTERS
from ..text.prompts import plain

SPACE, BYTE_SPACE = "\u2581", "\u0120"  # what stands for a space in vocabularies of SentencePiece, and of bytes


class SharedTokens(NamedTuple):
    """Translates ids between the two vocabularies."""

    draft_ids: Tensor  # [K] int64, rising: columns of the draft's logits
    target_ids: Tensor  # [K] int32: the same tokens' ids in the target, all different
    fed_ids: Tensor  # [V] int32: what the draft reads for each id of the target


def texts_of(tokenizer: Any, size: int) -> dict[int, bytes | str]:
    """Return what each id below `size` stands for: bytes of text, or the name of a special token."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    of_bytes = any(token.startswith(BYTE_SPACE) for token in vocab)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(token) for token in tokenizer.all_special_ids} | {i for i, token in added.items() if token.special}

    def text(token: str, number: int) -> bytes | str:
        if number in special:
            return token
        if number in added:
            return token.encode()
        if of_bytes and all(letter in LETTERS for letter in token):
            return bytes(LETTERS[letter] for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE, " ").encode()

    return {
        number: text(token, number)
        for token, number in sorted(vocab.items(), key=lambda item: item[1])
        if number < size
    }


def shared_tokens(target: Any, target_size: int, draft: Any, draft_size: int) -> SharedTokens | None:
    """Return the tokens that two tokenizers share, for these vocabulary sizes; None: all, under the same ids.

    The tokens that end or begin a text correspond, whatever they are called. A token of the target that the draft does
    not have is fed as the last token that the draft's tokenizer makes of the text.
    """
    ours, theirs = texts_of(target, target_size), texts_of(draft, draft_size)
    if target_size == draft_size and ours == theirs:
        return None
    id_of: dict[bytes | str, int] = {}
    for number, text in ours.items():
        id_of.setdefault(text, number)
    for role in ("eos_token_id", "bos_token_id"):
        mine, other = getattr(target, role, None), getattr(draft, role, None)
        if mine in ours and other in theirs and theirs[other] not in id_of:
            theirs[other] = ours[mine]
    to_target: dict[int, int] = {}
    taken: set[int] = set()
    for number, text in theirs.items():
        if (same := id_of.get(text)) is not None and same not in taken:
            to_target[number] = same
            taken.add(same)
    fed = torch.full((target_size,), nothing_of(draft, draft_size), dtype=torch.int32)
    others = [number for number in ours if number not in taken]
    if others:
        texts = [text if isinstance(text := ours[number], str) else text.decode(errors="replace") for number in others]
        pieces = draft(texts, add_special_tokens=False)["input_ids"]
        for number, ids in zip(others, pieces, strict=True):
            if ids and ids[-1] < draft_size:
                fed[number] = plain(ids[-1])
    draft_ids = torch.tensor(list(to_target), dtype=torch.int64)
    target_ids = torch.tensor(list(to_target.values()), dtype=torch.int32)
    fed[target_ids.long()] = draft_ids.to(torch.int32)
    return SharedTokens(draft_ids, target_ids, fed)


def nothing_of(tokenizer: Any, size: int) -> int:
    """Return the id that stands for text without a token of its own."""
    for role in ("unk_token_id", "pad_token_id", "eos_token_id"):
        number = getattr(tokenizer, role, None)
        if isinstance(number, int) and 0 <= number < size:
            return number
    return 0
