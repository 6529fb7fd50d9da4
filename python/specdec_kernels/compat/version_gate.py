"""Decide what a plugin takes over in the installed version of an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from logging import CRITICAL, Logger

from .contracts import Found, Part, Sources, broken_parts

__all__ = ["QUIET", "Takeover", "nearest_tested", "parts_to_take_over", "take_over"]

QUIET = Logger("specdec_kernels.quiet", CRITICAL + 1)  # for those who read the reasons from the result


@dataclass(frozen=True)
class Takeover:
    """The parts that a plugin takes over.

    Attributes:
        found: the installed version, with its local label; None: it is not known.
        base: the tested version whose contracts and differences apply; None: nothing is taken over.
        parts: names of the parts to take over.
        left: the parts that stay the engine's, and why.
        reason: why nothing is taken over.
    """

    found: str | None
    base: str | None = None
    parts: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    reason: str | None = None

    @property
    def is_tested(self) -> bool:
        return self.base is not None and self.found is not None and self.found.partition("+")[0] == self.base


def parts_to_take_over(
    name: str,
    tested: Sequence[str],
    parts_of: Callable[[str], Sequence[Part]],
    logger: Logger,
    sources_of: Callable[[str], Sources | Mapping[str, Found] | None] | None = None,
) -> Takeover:
    """Return what to take over, and log what is not.

    All parts are taken over in a tested version. In a version between the tested ones, or a newer one, the parts are
    those whose contracts with the nearest earlier tested version hold in the installed sources. An older version, and
    the environment variable SPECDEC_<NAME>=0, leave everything as it is.

    Args:
        name: the engine's; in lower case, with `_` for `-`, that of its package.
        tested: tested versions, oldest first.
        parts_of: returns the parts for a tested version, each after those that it needs.
        logger: gets one line.
        sources_of: returns the sources of a package, or a record of what contracts read there; by default those of the
            installed one.
    """
    package = name.lower().replace("-", "_")
    if os.environ.get(f"SPECDEC_{package.upper()}") == "0":
        return Takeover(None, reason=f"SPECDEC_{package.upper()} is 0")
    try:
        found = version(package)
    except PackageNotFoundError:
        reason = f"the version of {name} is not known"
        logger.warning("specdec: %s; nothing is changed", reason)
        return Takeover(None, reason=reason)
    release = found.partition("+")[0]
    if release in tested:
        return Takeover(found, release, tuple(part.name for part in parts_of(release)))
    base = nearest_tested(release, tested)
    if base is None:
        reason = f"{name} {found} is older than {tested[0]}, the first tested version"
        logger.warning("specdec: %s; nothing is changed", reason)
        return Takeover(found, reason=reason)
    parts, sources = parts_of(base), (sources_of or Sources.of_installed)(package)
    unread = {part.name: "its sources cannot be read" for part in parts}
    left = unread if sources is None else broken_parts(parts, sources)
    kept = tuple(part.name for part in parts if part.name not in left)
    reasons = "".join(f"; without {part} ({reason})" for part, reason in left.items())
    logger.warning(
        "specdec: %s %s is not tested (%s to %s are); by its sources it gets %s%s",
        *(name, found, tested[0], tested[-1], ", ".join(kept) or "nothing", reasons),
    )
    return Takeover(found, base if kept else None, kept, left, None if kept else "no contract holds")


def take_over(
    takeover: Takeover, parts: Sequence[Part], register: Callable[[str], None], name: str, logger: Logger
) -> tuple[str, ...]:
    """Register the parts of a takeover, and return those that are registered.

    In an untested version, a part whose registration raises is left out, with those that need it and one warning.

    Args:
        takeover: from `parts_to_take_over`.
        parts: of its base.
        register: registers the part of a name.
        name: the engine's.
        logger: gets the warnings.
    """
    registered: list[str] = []
    for part in parts:
        if part.name not in takeover.parts or not set(part.needs) <= set(registered):
            continue
        try:
            register(part.name)
        except Exception as error:
            if takeover.is_tested:
                raise
            logger.warning("specdec: %s %s stays without %s: %r", name, takeover.found, part.name, error)
        else:
            registered.append(part.name)
    return tuple(registered)


def nearest_tested(release: str, tested: Sequence[str]) -> str | None:
    """Return the newest tested version that is not newer than a release; None if there is none."""
    return next((one for one in reversed(tested) if numbers(one) <= numbers(release)), None)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 5, 23) for `0.5.23.post1`, and for `0.5.23rc1`."""
    return tuple(int(one) for one in re.findall(r"\d+", re.split(r"[a-z]|\.post|\.dev", text, maxsplit=1)[0]))
