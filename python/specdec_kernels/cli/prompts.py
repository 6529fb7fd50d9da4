"""Prompts for `specdec doctor` and `specdec tune`: those of a file, or a small mix of chat, code and math."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..engine.text.files import read_text

Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation

BUILT_IN: dict[str, tuple[str, ...]] = {
    "chat": (
        "How do I keep basil alive on a windowsill through the winter?",
        "Explain to a twelve-year-old why the sky is blue and sunsets are red.",
        "Write a short, friendly email that moves our meeting from Tuesday to Thursday afternoon.",
        "What should I look at when I buy a used bicycle?",
    ),
    "code": (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
        "import os\n\ndef list_files(path):\n    names = []\n    for name in os.listdir(path):",
        'def read_config(filename):\n    """Read the file and return a dictionary of its options."""\n',
        "class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n",
    ),
    "math": (
        "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Think step by step.",
        "Solve for x: 3(x - 4) + 5 = 2x + 9. Show each step.",
        "A box holds 4 red and 6 blue balls. Two are drawn without replacement. What is the probability that both are "
        "red?",
        "The sum of three consecutive odd numbers is 141. Which numbers are they?",
    ),
}


def read_prompts(file: str | Path | None) -> list[Prompt]:
    """Read the prompts of a file, or return the built-in mix.

    A `.jsonl` file has one object per line, with `prompt`, a text, or `messages`, a conversation. Any other file has
    texts separated by empty lines.

    Raises:
        OSError: the file does not exist.
        ValueError: the file has no prompts, or an invalid line.
    """
    if file is None:
        return [prompt for prompts in BUILT_IN.values() for prompt in prompts]
    text = read_text(file, "--prompts")
    if Path(file).suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        prompts = [prompt_of(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    else:
        prompts = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise ValueError(f"--prompts is {file}, which has none, expected some")
    return prompts


def prompt_of(line: str, where: str) -> Prompt:
    """Parse a line of a `.jsonl` file.

    Raises:
        ValueError: it has neither `prompt` nor `messages`.
    """
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        if isinstance(value.get("prompt"), str):
            return str(value["prompt"])
        if isinstance(value.get("messages"), list):
            return list(value["messages"])
    raise ValueError(f"{where} is {line[:40]!r}, expected an object with prompt or messages")


def without_template(prompt: Prompt) -> str:
    """Return the plain text of a prompt: its messages, separated by empty lines."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message.get("content", "")) for message in prompt)


def with_template(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt in the tokenizer's chat template, up to the start of the answer."""
    from ..engine.text.prompts import chat_text

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tokens: list[int] = tokenizer(chat_text(messages, tokenizer, "", {}), add_special_tokens=False)["input_ids"]
    return tokens
