"""Tokenizers of the kinds that models come with, trained or written on the spot."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec_kernels.engine.text.detokenizer import LETTERS

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXT = "The capital of France is Paris, isn't it? Yes: the cat's 日本語 🎉 is naïve. 'do not' go\n\n  x = [1, 2]!"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LETTERS = {byte: letter for letter, byte in LETTERS.items()}
PIECES = [
    *(
        "▁",
        "▁▁",
        "▁▁▁",
        "▁the",
        "▁Paris",
        "▁is",
        "▁cat",
        "the",
        "Paris",
        "is",
        "cat",
        "s",
        ".",
        ",",
        "'",
        "[",
        "]",
        "{",
    ),
    *("}", ":", '"', "1", "2", "a", "b", "é", "日", "本", "�", "▁a▁b", "x▁", "\n"),
]


def wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special.values()])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, Llama 3's and Qwen's, with merges across characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "日本語日本語日木本末 🎉🎊🎉"] * 4, trainer)
    return wrapped(tokenizer, eos_token="</s>")


def byte_fallback(strips: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's, whose decoder strips the first space, or like Gemma's."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", *BYTES, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if strips else replaced
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return wrapped(tokenizer, bos_token="<s>", eos_token="</s>")


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer like T5's: no bytes, and a first token without its spaces."""
    scores = [("<unk>", 0.0), *((piece, -1.0 - 0.01 * i) for i, piece in enumerate(PIECES))]
    tokenizer = Tokenizer(models.Unigram(scores, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrapped(tokenizer, eos_token="</s>")


def word_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, whose decoder moves punctuation to the word before."""
    words = [
        "[UNK]",
        "the",
        "paris",
        "is",
        "cat",
        "##s",
        "##a",
        "##",
        ".",
        ",",
        "'",
        "n't",
        "'s",
        "!",
        "do",
        "not",
        "##é",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return wrapped(tokenizer, eos_token="[SEP]")


def word_ends() -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-1's: the last token of a word ends with a suffix, which is no space at the end."""
    words = ["<unk>", "the</w>", "paris</w>", "is</w>", "cat", "s</w>", "</w>", ".</w>", "x"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return wrapped(tokenizer, eos_token="</s>")


def plain() -> PreTrainedTokenizerFast:
    """Return a tokenizer without a decoder: a space between any two tokens."""
    words = {word: i for i, word in enumerate(["<unk>", "the", "paris", "is", "", "cat"])}
    return wrapped(Tokenizer(models.WordLevel(words, unk_token="<unk>")), eos_token="</s>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-fallback-strip": lambda: byte_fallback(True),
    "byte-fallback": lambda: byte_fallback(False),
    "metaspace": metaspace,
    "word-piece": word_piece,
    "word-ends": word_ends,
    "plain": plain,
}


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


def token_texts(kind: str, seed: int, count: int) -> list[list[int]]:
    """Return random texts of up to 24 tokens: some are bytes of characters, with or without a mistake in them."""
    tokenizer, draw = tokenizer_of(kind), random.Random(f"{kind} {seed}")
    size = len(tokenizer)
    texts = []
    for _ in range(count):
        tokens: list[int] = []
        while len(tokens) < draw.randint(0, 24):
            if kind.startswith("byte") and draw.random() < 0.4:
                content = draw.choice(["\n", "é", "日", "🎉", " ", "x", "\n\n日本"]).encode()
                content = content[draw.choice([0, 0, 0, 1]) :][: draw.choice([9, 9, 9, 1, 2])]
                names = [BYTE_LETTERS[byte] if kind == "byte-level" else BYTES[byte] for byte in content]
                tokens += tokenizer.convert_tokens_to_ids(names)
            else:
                tokens.append(draw.randrange(size))
        texts.append(tokens)
    return texts
