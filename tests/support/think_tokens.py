"""A tokenizer that has the tags of reasoning as tokens, which the tiny model writes by itself."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from support.tiny_checkpoint import tokenizer

# After this prompt the model writes " C", "opy", "right", " (", "c", ")", " 2", greedily.
PROMPT, BEGIN, END = "def area(\n#", 478, 430
THOUGHT = "opyright (c)"  # between the two tokens


def with_tags(*, special: bool, begin: str = "<think>", end: str = "</think>") -> Any:
    """Return the tiny tokenizer whose tokens BEGIN and END are tags."""
    values = json.loads(tokenizer().backend_tokenizer.to_str())
    model = values["model"]
    pieces = {index: piece for piece, index in model["vocab"].items()}
    for index, tag in ((BEGIN, begin), (END, end)):
        piece = pieces[index]
        del model["vocab"][piece]
        model["vocab"][tag] = index
        model["merges"] = [pair for pair in model["merges"] if piece not in (*pair, "".join(pair))]
        options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        values["added_tokens"].append({"id": index, "content": tag, "special": special, **options})
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(values)), eos_token=tokenizer().eos_token
    )
