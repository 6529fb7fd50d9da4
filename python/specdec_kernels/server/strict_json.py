"""JSON without Python's extensions: NaN and Infinity are no numbers of it, and `1e999` is none that can be written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def loads(text: str | bytes, parse_int: Callable[[str], int] = int) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is none, or has a number beyond 64-bit floats.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float, parse_int=parse_int)


def dumps(value: Any) -> str:
    """Write JSON that can be sent as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parse_float(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:40]} is beyond 64-bit floats")
    return value
