"""Settings of benchmarks by name, chains and trees by name and number of tokens, and the drafts of such settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from specdec_kernels.engine import Draft

WITH_NGRAMS = "+ngram"


class Sizes(Protocol):
    """The sizes of a draft, fields of a dataclass."""

    @property
    def num_steps(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def with_ngrams(self) -> bool:
        """Whether it drafts in a union with the n-gram index."""


Setting = TypeVar("Setting", bound=Sizes)


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


def sized_draft(sizes: Sizes, kind: Callable[..., Draft], *model: Any, **options: Any) -> Draft:
    """Return a draft of these sizes, in a union with the n-gram index if they say so.

    Args:
        sizes: of the draft; a union verifies as many nodes.
        kind: the draft's class.
        model: the draft's model; none: the target has it.
        options: more of the draft's class.

    Raises:
        ValueError: as the class and `with_ngrams`.
    """
    from specdec_kernels.engine.drafts.union import with_ngrams

    draft = kind(*model, num_steps=sizes.num_steps, topk=sizes.topk, num_nodes=sizes.num_nodes, **options)
    return with_ngrams(draft, sizes.num_nodes) if sizes.with_ngrams else draft


def ngram_groups(sizes: Sizes) -> Iterator[int]:
    """Yield the `ngram_group` of each request: in a union a group of its own, so that it finds its own text alone."""
    return count(1) if sizes.with_ngrams else repeat(0)
