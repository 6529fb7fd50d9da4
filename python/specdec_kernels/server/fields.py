"""The fields of a request's body: each is taken by its name and kind, and what nobody takes is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class RequestError(Exception):
    """What a client is told, in OpenAI's form.

    Attributes:
        status: of the HTTP response. param: the field it is about. headers: of the response.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.headers = param, status, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Kind(NamedTuple):
    """What a field may hold, and how that is said."""

    words: str
    holds: Callable[[Any], bool]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
INTEGER = Kind("an integer", is_integer)
NUMBER = Kind("a number", lambda value: isinstance(value, float) or is_integer(value))
TEXT = Kind("a string", is_text)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TOKENS = Kind("a list of token ids", list_of(is_integer))
STOP = Kind("a string or a list of strings", lambda value: is_text(value) or list_of(is_text)(value))
SPECULATION = Kind('"on", "off" or a number of nodes', lambda value: value in ("on", "off") or is_integer(value))


def at_most(most: int) -> Kind:
    return Kind(f"1 to {most}", lambda value: is_integer(value) and 1 <= value <= most)


def one_of(*values: Any) -> Kind:
    words = " or ".join(map(shown, values))
    return Kind(words, lambda value: any(type(value) is type(good) and value == good for good in values))


class Fields:
    """The fields of a JSON object. One that is null counts as one that is not there.

    Args:
        values: the object.
        path: what stands before the names in messages: where the object is in the body.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """The value of a field, which is then taken; RequestError where it is of another kind."""
        if name not in self._values:
            return default
        value = self._values.pop(name)
        if not kind.holds(value):
            raise self.error(name, value, kind.words)
        return value

    def need(self, name: str, kind: Kind) -> Any:
        """The value of a field that has to be there."""
        if name not in self._values:
            where = self._path + name
            raise RequestError(f"{where} is missing, expected {kind.words}", where)
        return self.take(name, kind)

    def without_effect(self, name: str, *values: Any) -> None:
        """Takes a field that is not supported, where its value is one of these, which ask for nothing."""
        if name in self._values and one_of(*values).holds(self._values[name]):
            del self._values[name]

    def expect_no_more(self) -> None:
        """RequestError for the first that nobody took."""
        for name, value in self._values.items():
            raise self.error(name, value, "none (this field is not supported)")

    def error(self, name: str, value: Any, expected: str) -> RequestError:
        where = self._path + name
        return RequestError(f"{where} is {shown(value)}, expected {expected}", where)


def shown(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_body(body: bytes) -> Fields:
    """The fields of a body; RequestError where it is no JSON object of text that is Unicode."""
    try:
        values = json.loads(body, parse_constant=refuse_constant)
        if b"\\u" in body:
            json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error}), expected a JSON object") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body is {shown(values)}, expected a JSON object")
    return Fields(values)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
