"""The changes that `specdec doctor` tries of a block drafter: its mask, layers, block, RoPE and serial head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..engine.drafts.block import BlockDraft
from ..models.heads.block_config import MASKS, MOST_ROWS, NESTED, ROTATIONS, BlockConfig
from ..models.weights.checkpoint import load_tensors
from .doctor_shifts import Head, Shift, embedding_shifts, norm_shifts, row_shifts, vocabulary_shifts

LAYERS = "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
ANCHORS = "sample_from_anchor", "dspark_bonus_anchor"
SIZES = 4, 5, 6, 7, 8, 10, 12, 15, 16  # of published blocks, and of others
MARKOV = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def block_shifts(head: Head, target: Any, tokenizer: Any) -> Iterator[Shift]:
    """Yield all changes of a block drafter in a folder, for a target with this config."""
    draft = head.draft()
    assert isinstance(draft, BlockDraft)
    try:
        block: BlockConfig | None = draft.block_of(target.num_hidden_layers)
    except ValueError:
        block = None
    yield from mask_shifts(head, block)
    yield from feature_shifts(head, block, target.num_hidden_layers)
    yield from size_shifts(head, block)
    yield from token_shifts(head, block, target, tokenizer)
    yield from row_shifts(head.draft)
    yield from rope_shifts(head, block)
    yield from markov_shifts(head)
    yield from norm_shifts(head)
    yield from vocabulary_shifts(head, target.vocab_size)
    yield from embedding_shifts(head)


def entries(head: Head, keys: tuple[str, ...], **values: Any) -> dict[str, Any]:
    """Return changes of a config that set entries at the top and leave `keys` out, there and in nested configs."""
    config = head.config
    nested = {part: config[part] for part in NESTED if isinstance(config.get(part), dict)}
    kept = {part: {key: value for key, value in of.items() if key not in keys} for part, of in nested.items()}
    return dict.fromkeys([key for key in keys if key in config]) | kept | values


def mask_shifts(head: Head, block: BlockConfig | None) -> Iterator[Shift]:
    """Yield the other masks within a block."""
    for causal, name in ((True, "causal"), (False, "full")):
        if block is None or set(block.causal) != {causal}:
            yield Shift(
                "mask",
                f"{name} within the block",
                f'config.json: "is_causal": {str(causal).lower()} at the top',
                head.changed(entries(head, (*MASKS, "sliding_window_non_causal"), is_causal=causal)),
            )


def feature_shifts(head: Head, block: BlockConfig | None, num_layers: int) -> Iterator[Shift]:
    """Yield other feature layers: all one lower or higher, in the other order, and those that no config names."""
    named: dict[tuple[int, ...], str] = {}
    if block is not None:
        left = tuple(layer - 1 for layer in block.feature_layers)
        for by, how in ((1, "one higher"), (-1, "one lower")):
            named[tuple(layer + by for layer in left)] = how
        named[left[::-1]] = "in reverse"
        count = len(left)
        if count > 1:
            spread = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
            named.setdefault(spread, "the default")
        named.pop(left, None)
    for layers, how in named.items():
        if all(-1 <= layer < num_layers - 1 for layer in layers):
            yield Shift(
                "feature layers",
                f"{', '.join(map(str, layers))} ({how})",
                f'config.json: "target_layer_ids": {list(layers)} at the top (layers by their outputs)',
                head.changed(entries(head, LAYERS, target_layer_ids=list(layers))),
            )


def size_shifts(head: Head, block: BlockConfig | None) -> Iterator[Shift]:
    """Yield other numbers of rows, and the other meaning of the first."""
    now = block.block_size if block else None
    for size in sorted({*SIZES, *((now - 1, now + 1) if now else ())}):
        if size != now and 1 <= size <= MOST_ROWS:
            yield Shift(
                "block size",
                f"{size} rows",
                f'config.json: "block_size": {size} at the top',
                head.changed(entries(head, ("block_size",), block_size=size)),
            )
    if block is not None:
        other = not block.from_root
        yield Shift(
            "anchor",
            f"the root's row predicts {'a token' if other else 'nothing'}",
            f'config.json: "sample_from_anchor": {str(other).lower()} at the top',
            head.changed(entries(head, ANCHORS, sample_from_anchor=other)),
        )


def token_shifts(head: Head, block: BlockConfig | None, target: Any, tokenizer: Any) -> Iterator[Shift]:
    """Yield other mask tokens: the tokenizer's special ones, the last of the vocabulary, and neighbors."""
    named: dict[int, str] = {}
    for name in ("mask", "pad", "eos", "bos", "unk"):
        if (token := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            named.setdefault(int(token), name)
    if tokenizer is not None:
        for text, token in tokenizer.get_added_vocab().items():
            if "mask" in text.lower() or text == head.config.get("mask_token"):
                named.setdefault(int(token), text)
    named.setdefault(target.vocab_size - 1, "the last")
    if block is not None:
        for by in (-1, 1):
            named.setdefault(block.mask_token + by, "a neighbor")
        named.pop(block.mask_token, None)
    for token, name in named.items():
        if 0 <= token < target.vocab_size:
            yield Shift(
                "mask token",
                f"{token} ({name})",
                f'config.json: "mask_token_id": {token} at the top',
                head.changed(entries(head, ("mask_token_id",), mask_token_id=token)),
            )


def rope_shifts(head: Head, block: BlockConfig | None) -> Iterator[Shift]:
    """Yield the other pairs of elements that RoPE rotates."""
    for interleaved, name in ((True, "interleaved pairs"), (False, "pairs half a head apart")):
        if block is None or block.interleaved != interleaved:
            yield Shift(
                "RoPE",
                name,
                f'config.json: "rope_is_neox_style": {str(not interleaved).lower()} at the top',
                head.changed(entries(head, ROTATIONS, rope_is_neox_style=not interleaved)),
            )


def markov_shifts(head: Head) -> Iterator[Shift]:
    """Yield a serial head without effect, and one whose factors are exchanged."""
    found = load_tensors(head.folder, lambda name: name.removeprefix("model.") in MARKOV)
    found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    if len(found) < len(MARKOV):
        return
    first, second = (found[name] for name in MARKOV)
    yield Shift(
        "Markov head",
        "without effect",
        f"zeros in {MARKOV[1]}, or the factors that belong to this drafter",
        head.changed(tensors={MARKOV[1]: torch.zeros_like(second)}),
    )
    if first.shape == second.shape:
        yield Shift(
            "Markov head",
            "its factors exchanged",
            f"exchange {MARKOV[0]} and {MARKOV[1]}",
            head.changed(tensors={MARKOV[0]: second, MARKOV[1]: first}),
        )
