"""The text: which files, the split, the tokenizer and the held-out prompts.

CPython's standard library is a good corpus for a toy: everyone who can run the
script has it, its licence allows redistribution of excerpts, and with its test
directories it is about 30 MB of code in many hands' styles.
"""

import functools
import hashlib
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Generated tables rather than code. The charmap codecs are near copies of each
# other, so they would also flatter a split made by file.
SKIPPED_DIRS = {"site-packages", "encodings", "pydoc_data", "__pycache__"}


def read_corpus(source: Path, max_files: int | None = None) -> dict[str, str]:
    """Return {relative path: text} for every distinct UTF-8 ``.py`` file.

    Files that are not UTF-8 (test data for the codec machinery) and exact copies
    are left out. ``max_files`` takes an evenly spaced sample, for quick trials.
    """
    corpus, seen = {}, set()
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        if SKIPPED_DIRS & set(relative.parts):
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).digest()
        if len(data) < 64 or digest in seen:
            continue
        seen.add(digest)
        try:
            corpus[relative.as_posix()] = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
    if max_files and len(corpus) > max_files:
        names = list(corpus)
        names = [names[i * len(names) // max_files] for i in range(max_files)]
        corpus = {name: corpus[name] for name in names}
    return corpus


def is_held_out(name: str, share: float = 0.03) -> bool:
    """Split by a hash of the path alone, so the split never moves with the corpus."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return bucket < share * 2**32


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2).

    Byte level means that every string is representable, so no unknown token is
    needed; the one special token both ends and separates documents.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path):
    """Save under the class name that transformers 4 and 5 both load."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    """Concatenate the texts, each preceded by the end-of-text token."""
    stream = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        stream.append(tokenizer.eos_token_id)
        stream.extend(ids)
    stream.append(tokenizer.eos_token_id)
    return stream


def _looks_like_code(text: str) -> bool:
    """Reject tables of numbers, escapes and similar text that is trivial to continue."""
    return len(text.strip()) > 60 and sum(c.isalpha() for c in text) > 0.45 * len(text)


@functools.cache
def _line_starts(text: str) -> list[int]:
    return [0] + [i + 1 for i, c in enumerate(text) if c == "\n"]


def code_prompts(held_out: dict[str, str], count: int, rng: random.Random) -> list[dict]:
    """Cut plain continuations: 100..600 characters, half of them ending in mid-line."""
    files = [name for name, text in held_out.items() if len(text) > 1500]
    prompts, used, attempts = [], set(), 0
    while len(prompts) < count and attempts < 40 * count:
        attempts += 1
        name = files[attempts % len(files)]
        text = held_out[name]
        start = rng.choice(_line_starts(text))
        end = start + rng.randint(100, 600)
        if rng.random() < 0.5:
            end = text.rfind("\n", start, end) + 1
        if not 100 <= end - start <= 600 or end + 400 > len(text):
            continue
        if any(abs(start - other) < 400 for file, other in used if file == name):
            continue
        prompt, continuation = text[start:end], text[end : end + 400]
        if _looks_like_code(prompt) and _looks_like_code(continuation):
            used.add((name, start))
            prompts.append({"file": name, "prompt": prompt, "continuation": continuation, "kind": "code"})
    return prompts


def repeat_prompts(held_out: dict[str, str], count: int, rng: random.Random) -> list[dict]:
    """Cut edit-like prompts: a passage, then its beginning once more.

    They stand for "here is the function, write it again with one change", the
    case in which a drafter that copies n-grams from the prompt is hard to beat.
    """
    files = [name for name, text in held_out.items() if len(text) > 1500]
    prompts, attempts = [], 0
    while len(prompts) < count and attempts < 40 * count:
        attempts += 1
        name = files[attempts % len(files)]
        text = held_out[name]
        start = rng.choice(_line_starts(text))
        end = text.rfind("\n", start, start + rng.randint(300, 460)) + 1
        if end - start < 260:
            continue
        passage = text[start:end]
        begun = rng.randint(40, 90)
        if not _looks_like_code(passage):
            continue
        prompt = f"# Before:\n{passage}\n# After:\n{passage[:begun]}"
        prompts.append({"file": name, "prompt": prompt, "continuation": passage[begun:], "kind": "repeat"})
    return prompts


def write_prompts(path: Path, held_out: dict[str, str], code: int = 256, repeat: int = 48):
    """Write ``heldout.jsonl`` and return its records."""
    rng = random.Random(20)
    records = code_prompts(held_out, code, rng) + repeat_prompts(held_out, repeat, rng)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return records
