"""Text for prompts, drawn from a random generator: the same for the same seed on every machine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

WORDS = re.findall(
    r"\w+",
    """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face level office door health person art war history party result change morning
reason research
""",
)
VERBS = re.findall(
    r"\w+",
    """
is was has makes takes finds gives keeps shows holds moves plays runs opens reads builds
""",
)
NAMES = re.findall(
    r"\w+",
    """
count total width height value index left right first last items size node path data text key line
""",
)
SCRIPTS = (
    "naïve café",
    "Straße über Öl",
    "Привет, мир",
    "東京は日本の首都です",
    "안녕하세요",
    "مرحبا بالعالم",
    "🙂🚀👩‍👩‍👧",
    "e\u0301 and é",
    "∑ x² ≤ ∞",
    "שלום",
)


def prose(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(3, 6))]
    return f"The {words[0]} {rng.choice(VERBS)} the {' '.join(words[1:-1])} of a {words[-1]}. "


def code(rng: random.Random) -> str:
    name, a, b = rng.sample(NAMES, 3)
    body = rng.choice(
        [
            f"    return {a} {rng.choice('+-*')} {b}\n",
            f"    for {a[0]} in {b}:\n        print({a[0]})\n",
            f"    if {a} is None:\n        {a} = {rng.randint(0, 99)}\n    return {a}, {b}\n",
            f"    self.{a} = {a}\n    self.{b} = {b}\n",
        ]
    )
    return f"def {rng.choice(['get', 'set', 'make'])}_{name}({a}, {b}):\n{body}\n"


def repeated(rng: random.Random) -> str:
    line = f"{rng.choice(NAMES)}: {rng.choice(WORDS)} {rng.randint(0, 999)}\n"
    return line * rng.randint(2, 5)


def records(rng: random.Random) -> str:
    return (
        json.dumps({name: rng.choice([rng.randint(0, 999), rng.choice(WORDS)]) for name in rng.sample(NAMES, 3)}) + "\n"
    )


def scripts(rng: random.Random) -> str:
    return f"{rng.choice(SCRIPTS)}, {rng.choice(SCRIPTS)}. "


KINDS: dict[str, Callable[[random.Random], str]] = {
    "prose": prose,
    "code": code,
    "repeated": repeated,
    "records": records,
    "scripts": scripts,
}


def text_of(rng: random.Random, kind: str, size: int) -> str:
    """Return text of a kind, cut to `size` characters, and not empty."""
    text = ""
    while len(text) < size:
        text += KINDS[kind](rng)
    return text[: max(size, 1)].strip() or "x"
