"""Settings of benchmarks by name, chains and trees by name and number of tokens, and unions with the n-gram index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

Setting = TypeVar("Setting")  # a dataclass with `num_steps`, `topk`, `num_nodes` and `with_ngrams`
WITH_NGRAMS = "+ngram"


def setting_of(known: Mapping[str, Setting], name: str) -> Setting:
    """Return a known setting, or a known chain or tree with another number of tokens: `chain4`, `mtp_tree8`.

    With `+ngram` at the end it is a union with the n-gram index.
    """
    if name.endswith(WITH_NGRAMS):
        alone: Any = setting_of(known, name.removesuffix(WITH_NGRAMS))
        union: Setting = replace(alone, with_ngrams=True)
        return union
    if name in known:
        return known[name]
    kind = name.rstrip("0123456789")
    setting: Any = known[kind]
    num_nodes = int(name[len(kind) :])
    sized: Setting = replace(
        setting, num_nodes=num_nodes, num_steps=num_nodes - 1 if setting.topk == 1 else setting.num_steps
    )
    return sized
