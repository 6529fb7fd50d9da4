"""Errors in OpenAI's form, and the JSON of a body."""

from __future__ import annotations

import json
import re
from typing import Any

from .. import strict_json

Object = dict[str, Any]

MAX_VALUES, MAX_CONTAINERS = 1 << 20, 1 << 16  # of a body


class RequestError(Exception):
    """An error response in OpenAI's form.

    Attributes:
        status: HTTP status.
        param: the field at fault.
        code: OpenAI's error code.
        headers: headers of the response.
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
    def body(self) -> Object:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unexpected(where: str, value: Any, expected: str) -> RequestError:
    """Return the error of a field, or of an element of a list; a field that is None is missing."""
    found = "missing" if value is None and not where.endswith("]") else shown(value)
    return RequestError(f"{where} is {found}, expected {expected}", where.partition("[")[0])


def shown(value: Any) -> str:
    """Format a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def field_name(name: str) -> str:
    """Return the name of a field as messages show it: an empty or long one as a value."""
    return name if 1 <= len(name) <= 60 else shown(name)


def without_folders(message: str) -> str:
    """Return a message of other code with the names of files alone: folders of the server are its own business."""
    return re.sub(r"(?<![\w:/.])/(?:[^\s/'\":]+/)+([^\s/'\":]*)", r"\1", message)


def check_count(body: bytes) -> None:
    """Refuse a body of more values than any request needs: parsing millions of them would hold up other requests."""
    if body.count(b",") < MAX_VALUES and body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    bare = re.sub(rb'"[^"]*"', b"", body.replace(rb"\\", b"").replace(rb"\"", b""))  # without strings
    for count, what, most in (
        (bare.count(b",") + 1, "values", MAX_VALUES),
        (bare.count(b"[") + bare.count(b"{"), "arrays and objects", MAX_CONTAINERS),
    ):
        if count > most:
            raise RequestError(f"the body has {count} {what}, expected at most {most}")


def parse_body(body: bytes) -> Object:
    """Parse a JSON object; RequestError if it is none, if a string is no valid Unicode or a number is too large."""
    check_count(body)
    try:
        values = strict_json.loads(body, parse_int)
        if b"\\u" in body:
            json.dumps(values, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error}), expected a JSON object") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body is {shown(values)}, expected a JSON object")
    return values


def parse_int(digits: str) -> int:
    """Parse an integer of a body. None means more than 64 bits, and Python's own limit is 4300 digits."""
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"the integer {digits[:40]} has more than 64 bits")
    return int(digits)
