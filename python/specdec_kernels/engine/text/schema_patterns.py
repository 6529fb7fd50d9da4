"""Patterns of JSON strings, in the regular expressions that xgrammar holds to.

xgrammar matches a pattern with the raw characters between the quotes: a quote, a backslash or a control character in it
would be written as it is, and the text would be no JSON. Here no pattern matches one.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

EXCLUDED = r"\"\\\x00-\x1f"  # within brackets
CHARACTER = f"[^{EXCLUDED}]"
# What `\s` is in Python or ECMAScript, apart from control characters.
SPACES = " \x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
QUANTIFIER = re.compile(r"([?*+]|\{([0-9]+)(,([0-9]*))?\})\??")
NOT_ESCAPED = frozenset(string.ascii_letters + string.digits + "_")

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


def anchored(body: str) -> str:
    """Return the pattern of whole strings."""
    return f"^(?:{body})$"


def literal(text: str) -> str:
    return "".join(c if c in NOT_ESCAPED or ord(c) > 127 else "\\" + c for c in text)


def of_length(least: int, most: int | None) -> str:
    return anchored(f"{CHARACTER}{{{least},{'' if most is None else most}}}")


def other_names(names: list[str]) -> str:
    """Return a pattern of strings that are none of `names`: all but "" and those that need an escape."""
    bare = {name for name in names if not re.search(r'["\\\x00-\x1f]', name)}
    starts = sorted({name[:end] for name in bare for end in range(len(name) + 1)} | {""})
    branches = [literal(start) for start in starts if start and start not in bare]
    for start in starts:
        nexts = sorted({name[len(start)] for name in bare if name.startswith(start) and name != start})
        branches.append(f"{literal(start)}[^{EXCLUDED}{''.join(map(literal, nexts))}]{CHARACTER}*")
    return anchored("|".join(branches))


def checked(pattern: str, *, nested: bool = False) -> str:
    """Return the pattern of the strings that match a schema's pattern as a whole.

    xgrammar 0.2.8 accepts too much for some patterns in which a repeated group has a repeated group or a range such as
    {1,2} in it, or one of several alternatives has a range in it or may be empty. They are refused; `nested` allows
    them, in a pattern that was tried.

    Raises:
        ValueError: the part of it that is not held to.
    """
    body = pattern.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1:
        body = body[:-1]
    out: list[str] = []
    groups = [Group(0, 0)]  # those that are open; first the whole pattern
    closed: Group | None = None  # ends here
    at = 0
    while at < len(body):
        group, closed = closed, None
        if quantifier := QUANTIFIER.match(body, at):
            times, least, comma, most = quantifier.group(1, 2, 3, 4)
            if group is not None:
                if (group.has_repetition or group.has_range) and not nested:
                    raise ValueError(body[group.begin : at + len(times)])
                groups[-1].has_repetition = True
            groups[-1].has_range |= comma is not None and least != most
            at = quantifier.end()
            if times == "?" and group is not None:
                # xgrammar skips the start of an optional group that ends in a repetition: (ab+)? would match b.
                out.insert(group.place, "(?:")
                out.append("|)")
            else:
                out.append(quantifier.group())
            continue
        c = body[at]
        if c == "|" or (c == ")" and len(groups) > 1):
            groups[-1].end_alternative(body[groups[-1].begin : at + 1], is_last=c == ")", nested=nested)
        if c == "[":
            end = end_of_class(body, at)
            out.append(checked_class(body[at:end]))
            at = end
        elif c == "\\":
            escape, code = escape_at(body, at)
            plain = {r"\S": f"[^{EXCLUDED}{SPACES}]", r"\s": " "}.get(escape, escape)
            out.append(plain if code is None else literal(printable(chr(code), escape)))
            at += len(escape)
        elif c == "(":
            opening = "(?:" if body.startswith("(?:", at) else "("
            if opening == "(" and body.startswith("(?", at):
                raise ValueError(body[at : at + 3])
            groups.append(Group(len(out), at))
            out.append(opening)
            at += len(opening)
            continue
        elif c in "^$":
            raise ValueError(body[at : at + 2])
        else:
            if c == ")" and len(groups) > 1:
                closed = groups.pop()
                groups[-1].has_repetition |= closed.has_repetition
                groups[-1].has_range |= closed.has_range
            out.append(f"[^{EXCLUDED}\u2028\u2029]" if c == "." else printable(c, c))
            at += 1
        if c != "|" and not body.startswith(("?", "*", "{0"), at):
            groups[-1].may_be_empty &= closed is not None and closed.was_empty
    groups[-1].end_alternative(body, is_last=True, nested=nested)
    return anchored("".join(out))


@dataclass
class Group:
    """A group of a pattern, or the whole."""

    place: int  # in the output
    begin: int  # in the pattern
    has_repetition: bool = False  # of a group within it
    has_range: bool = False  # a repetition between two numbers of times
    num_alternatives: int = 0  # that have ended
    may_be_empty: bool = True  # the alternative that has not ended
    was_empty: bool = False  # one that has ended may be empty

    def end_alternative(self, text: str, *, is_last: bool, nested: bool) -> None:
        """Begin the next alternative, or end the group; raise ValueError for alternatives that are not held to."""
        self.num_alternatives += 1
        self.was_empty |= self.may_be_empty
        self.may_be_empty = True
        has_several = self.num_alternatives > 1 or not is_last
        if has_several and (self.was_empty or self.has_range) and not nested:
            raise ValueError(text)


def escape_at(text: str, at: int) -> tuple[str, int | None]:
    """Return the escape at a place, and the character's code point if it stands for one."""
    match = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[dwsS]|[^A-Za-z0-9])").match(text, at)
    if match is None:
        raise ValueError(text[at : at + 2])
    escape = match.group()
    if match.group(1) or match.group(2):
        return escape, int(escape[2:], 16)
    return escape, None if escape[1] in "dwsS" else ord(escape[1])


def printable(c: str, shown: str) -> str:
    if c in '"\\' or ord(c) < 32 or 0xD800 <= ord(c) < 0xE000:
        raise ValueError(shown)
    return c


def end_of_class(text: str, begin: int) -> int:
    at = begin + 1
    at += text[at : at + 1] == "^"
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        raise ValueError("[")
    return at + 1


def checked_class(text: str) -> str:
    """Return a bracketed class without characters that no string may have as they are."""
    negated = text.startswith("[^")
    inner, at, items = text[2 if negated else 1 : -1], 0, list[str | tuple[int, int]]()
    while at < len(inner):
        first, at = class_item(inner, at)
        if isinstance(first, int) and inner[at : at + 1] == "-" and at + 1 < len(inner):
            last, at = class_item(inner, at + 1)
            if not isinstance(last, int) or last < first:
                raise ValueError(text)
            items.append((first, last))
        else:
            items.append((first, first) if isinstance(first, int) else first)
    shown = [
        item if isinstance(item, str) else literal(chr(item[0])) + "-" + literal(chr(item[1]))
        for item in items
        if isinstance(item, str) or not negated or item[0] > 31
    ]
    for item in items:
        is_escape = isinstance(item, str)
        if is_escape and (negated or item == r"\S"):  # Unicode's digits, letters and spaces are not ASCII's
            raise ValueError(text)
        if not negated and not isinstance(item, str):
            low, high = item
            if low < 32 or low <= 0x22 <= high or low <= 0x5C <= high or (low <= 0xDFFF and high >= 0xD800):
                raise ValueError(text)
    if not items:
        raise ValueError(text)
    shown = [" " if one == r"\s" else one for one in shown]
    return f"[^{EXCLUDED}{''.join(shown)}]" if negated else f"[{''.join(shown)}]"


def class_item(inner: str, at: int) -> tuple[int | str, int]:
    """Return the character or escape at a place within brackets, and the place after it."""
    if inner[at] != "\\":
        return ord(inner[at]), at + 1
    escape, code = escape_at(inner, at)
    return (escape if code is None else code), at + len(escape)
