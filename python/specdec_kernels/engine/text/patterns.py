r"""Regular expressions: one dialect for what Python, ECMAScript and llguidance read alike, and the formats of strings.

Python's parser reads a pattern. What it yields is written again in constructs that llguidance takes literally, each for
the characters that it stands for in both languages: `\d` for the ASCII digits, `.` for all but line ends.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as op  # type: ignore[attr-defined]
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_constants as op
    import sre_parse as _parser

ANYTHING = r"(?s:.*)"
DOT = r"[^\n\r\x{2028}\x{2029}]"
# The characters of a class: those that both languages have in it, and those that one of them has, within brackets.
CATEGORIES = {
    op.CATEGORY_DIGIT: ("0-9", r"\p{Nd}"),
    op.CATEGORY_SPACE: (r" \t\n\r\x0b\x0c", r"\s\x1c-\x1f\x{85}\x{feff}"),
    op.CATEGORY_WORD: ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
}
COMPLEMENTS = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
REFUSED = {
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a negative lookahead or lookbehind",
    "ATOMIC_GROUP": "an atomic group",
    "AT_BEGINNING": "^ inside",
    "AT_BEGINNING_STRING": r"\A",
    "AT_BOUNDARY": r"\b",
    "AT_END": "$ inside",
    "AT_END_STRING": r"\Z",
    "AT_NON_BOUNDARY": r"\B",
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}
# What Python and ECMAScript read in different ways: a class that begins with ], a repetition without a least number.
AMBIGUOUS = re.compile(r"(?:[^\\]|^)(?:\\\\)*(\[\^?\]|\{,)")

DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
MONTHS = f"(?:(?:0[1-9]|1[0-2])-{DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
DATE = f"(?:{YEAR}-{MONTHS}|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
HOUR = "(?:[01][0-9]|2[0-3])"
TIME = rf"{HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{HOUR}:[0-5][0-9])"
DURATION_TIME = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
DURATION_DATE = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
GROUP = "[0-9a-fA-F]{1,4}"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,28}[A-Za-z0-9])?"  # 8 of them have fewer than 253 characters
HEX = "[0-9a-fA-F]"
URI_CHARACTER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/\-]|%{HEX}{{2}})"


def compressed_ipv6() -> str:
    """Return the addresses with `::`, by the number of groups before it."""
    after = [f"(?:{GROUP}(?::{GROUP}){{0,{most - 1}}})?" if most > 0 else "" for most in range(7)]
    return "|".join(
        "::" + f"(?:{GROUP}(?::{GROUP}){{0,6}})?"
        if before == 0
        else f"{GROUP}(?::{GROUP}){{{before - 1}}}::{after[7 - before]}"
        for before in range(8)
    )


FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:[0-9]{{1,9}}W|{DURATION_DATE}(?:{DURATION_TIME})?|{DURATION_TIME})",
    "email": rf"[A-Za-z0-9_+\-]{{1,30}}(?:\.[A-Za-z0-9_+\-]{{1,30}})?@{LABEL}(?:\.{LABEL}){{1,6}}",
    "hostname": rf"{LABEL}(?:\.{LABEL}){{0,7}}",
    "ipv4": rf"{OCTET}(?:\.{OCTET}){{3}}",
    "ipv6": f"{GROUP}(?::{GROUP}){{7}}|{compressed_ipv6()}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.\-]*://{LABEL}(?:\.{LABEL}){{0,7}}(?::[1-9][0-9]{{0,3}})?"
    rf"(?:/{URI_CHARACTER}*)?(?:\?{URI_CHARACTER}*)?(?:#{URI_CHARACTER}*)?",
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
}
REFUSED_FORMATS = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
)  # others are not of JSON Schema, and ask for nothing


class Unsupported(ValueError):
    """A pattern has something without an exact counterpart; the text names it."""


def canonical(pattern: str, *, is_search: bool = False) -> str:
    """Return a pattern for whole texts in llguidance's dialect.

    Args:
        pattern: for whole texts; `^` at its start and `$` at its end are allowed.
        is_search: it is found anywhere in a text unless it is anchored, as JSON Schema has it.

    Raises:
        Unsupported: something in the pattern has no exact counterpart.
        ValueError: it is no pattern.
    """
    if found := AMBIGUOUS.search(pattern):
        raise Unsupported(f"{found.group(1)}, which languages read in different ways")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's plans for brackets in brackets
        try:
            parsed = _parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", pattern))
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from error
    if parsed.state.flags != re.UNICODE:
        raise Unsupported("flags")
    return Writer(is_search).sequence(parsed, is_first=True, is_last=True)


class Writer:
    """Writes the items of a parsed pattern."""

    def __init__(self, is_search: bool) -> None:
        self.is_search = is_search

    def sequence(self, items: Iterable[tuple[Any, Any]], *, is_first: bool, is_last: bool) -> str:
        """Write items in a row, which may begin or end the whole pattern and have its anchors there."""
        items = list(items)
        begins = is_first and items[:1] == [(op.AT, op.AT_BEGINNING)]
        ends = is_last and items[-1:] == [(op.AT, op.AT_END)]
        items = items[begins : len(items) - ends]
        passes_first = is_first and not begins and bool(items) and items[0][0] in (op.SUBPATTERN, op.BRANCH)
        passes_last = is_last and not ends and bool(items) and items[-1][0] in (op.SUBPATTERN, op.BRANCH)
        written = "".join(
            self.item(*item, is_first=passes_first and place == 0, is_last=passes_last and place == len(items) - 1)
            for place, item in enumerate(items)
        )
        before = is_first and not begins and not passes_first and self.is_search
        after = is_last and not ends and not passes_last and self.is_search
        return ANYTHING * before + written + ANYTHING * after

    def item(self, kind: Any, value: Any, *, is_first: bool, is_last: bool) -> str:
        if kind == op.LITERAL:
            return literal(value)
        if kind == op.NOT_LITERAL:
            return f"[^{literal(value)}]"
        if kind == op.ANY:
            return DOT
        if kind == op.IN:
            return bracketed(value)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            times = {(0, 1): "?", (0, op.MAXREPEAT): "*", (1, op.MAXREPEAT): "+"}.get(
                (least, most), f"{{{least},{'' if most == op.MAXREPEAT else most}}}"
            )
            return f"(?:{self.sequence(inner, is_first=False, is_last=False)}){times}"
        if kind == op.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise Unsupported("flags")
            return f"(?:{self.sequence(inner, is_first=is_first, is_last=is_last)})"
        if kind == op.BRANCH:
            branches = [self.sequence(one, is_first=is_first, is_last=is_last) for one in value[1]]
            return f"(?:{'|'.join(branches)})"
        raise Unsupported(REFUSED[str(value if kind == op.AT else kind)])


def bracketed(items: Sequence[tuple[Any, Any]]) -> str:
    """Write a class of characters: no character that one of the languages does not have in it."""
    is_negated = items[0][0] == op.NEGATE
    written = []
    for kind, value in items[is_negated:]:
        if kind == op.RANGE:
            written.append(f"{literal(value[0])}-{literal(value[1])}")
        elif kind == op.LITERAL:
            written.append(literal(value))
        elif value in CATEGORIES:
            written.append(CATEGORIES[value][is_negated])
        else:
            written.append(f"[^{CATEGORIES[COMPLEMENTS[value]][not is_negated]}]")
    return f"[{'^' * is_negated}{''.join(written)}]"


def literal(code: int) -> str:
    """Write a character, given its code point."""
    if 0xD800 <= code < 0xE000:
        raise Unsupported(f"\\u{code:04x}, half of a character")
    text = chr(code)
    return text if text.isascii() and text.isalnum() else f"\\x{{{code:x}}}"
