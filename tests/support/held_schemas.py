"""Schemas that texts are held to, by the rows of the table in docs/json_schemas.md, and the check of such a text."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal, getcontext
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from specdec_kernels.engine.text.patterns import FORMATS

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def with_integer(name: str) -> dict[str, Any]:
    """Return a schema that requires an integer by that name."""
    return {"properties": {name: INTEGER}, "required": [name]}


def of_array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


CAT = closed("kind", kind={"const": "cat", "type": "string"}, lives=INTEGER)
DOG = closed("kind", kind={"const": "dog", "type": "string"})
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
KINDS = {"type": "object", "properties": {"k": {"enum": ["a", "b", "c"]}, "x": INTEGER}, "required": ["k"]}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}

# By the name in the table of docs/json_schemas.md.
HELD: dict[str, list[Any]] = {
    "`type`": [{"type": name} for name in ("null", "boolean", "integer", "number", "string", "array", "object")]
    + [{"type": ["integer", "null"]}, {"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, True],
    "`enum`, `const`": [
        {"enum": ['a"b', "é", "\n", 1.5, {"x": [1]}]}, {"type": "integer", "enum": [1, "a", 2.0]}, {"const": {"a": [None]}},
        {"type": "string", "const": "b"}, {"enum": [1, 5, "abc"], "minimum": 3, "maxLength": 3}, {"const": 2**60},
    ],
    "`properties`, `required`": [
        closed("b", a=INTEGER, b=STRING), {"required": ["a"]}, {"properties": {"a": INTEGER}, "required": ["a", "c"]},
        closed('a"é\n', **{'a"é\n': INTEGER}), {"type": "object", "properties": {"a": False, "b": INTEGER}},
    ],
    "`additionalProperties`, `unevaluatedProperties`": [
        {"type": "object", "properties": {"a": INTEGER, "ab": INTEGER, 'a"é': INTEGER, "b]-^": INTEGER},
         "required": ["a"], "additionalProperties": STRING},
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": STRING},
        {"type": "object", "additionalProperties": INTEGER},
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": STRING}}], "unevaluatedProperties": False},
    ],
    "`patternProperties`, `propertyNames`": [
        {"type": "object", "patternProperties": {"^x[0-9]$": INTEGER}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x": INTEGER, "^y": STRING}, "properties": {"xy": {"minimum": 7}}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        {"type": "object", "propertyNames": {"minLength": 3, "maxLength": 5}, "minProperties": 1},
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "properties": {"ab": INTEGER, "x": INTEGER}},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    ],
    "`minProperties`, `maxProperties`": [
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "minProperties": 1},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "maxProperties": 0},
        {"type": "object", "required": ["a"], "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
    ],
    "`items`, `prefixItems`, `unevaluatedItems`": [
        of_array(items=INTEGER), of_array(prefixItems=[INTEGER, STRING], minItems=2, maxItems=2), of_array(items=False),
        of_array(prefixItems=[STRING], items=INTEGER), of_array(prefixItems=[INTEGER], unevaluatedItems=False),
        DRAFT_7 | of_array(items=[INTEGER, STRING], additionalItems={"type": "null"}), DRAFT_7 | of_array(items=[INTEGER]),
    ],
    "`minItems`, `maxItems`": [
        of_array(items=INTEGER, minItems=2, maxItems=3), of_array(prefixItems=[INTEGER], minItems=3), of_array(maxItems=0),
        of_array(prefixItems=[INTEGER, INTEGER, INTEGER], maxItems=2),
    ],
    "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`": [
        {"type": "integer", "minimum": -17, "maximum": 1234}, {"type": "integer", "exclusiveMinimum": 1.5, "maximum": 7.5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "number", "minimum": -1.25}, {"minimum": 3},
        {"type": "number", "exclusiveMaximum": 0, "minimum": -0.00001}, {"type": "number", "minimum": 0.12345678, "maximum": 9},
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, {"minimum": 1, "exclusiveMinimum": 1, "maximum": 2},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, {"type": "number", "exclusiveMinimum": 916, "maximum": 916.5},
    ],
    "`multipleOf`": [
        {"type": "integer", "multipleOf": 7}, {"type": "integer", "multipleOf": 7, "minimum": -10, "maximum": 90},
        {"type": "number", "multipleOf": 0.01, "minimum": 0}, {"type": "integer", "multipleOf": 2.5},
    ],
    "`minLength`, `maxLength`": [
        {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "maxLength": 10**6}, {"minLength": 2},
        {"type": "string", "maxLength": 0},
    ],
    "`pattern`": [
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^.{1,3}$", r"^\S+$", r"^[^a]{2}$", r"^\d{3}-\d{4}$", "^(ab+)?c$", "^$", r"^\+?[0-9]{1,3}$",
            r"^((ab)?c)+$", r"^(a{1,2}|)$", r'^"[\\\n]$', r"^\D\W$", r"^[^\d\w\s]$", "^(?:a|(?P<n>b))[&-]$", r"^[ -~\u00e9]+?$",
        )
    ] + [
        {"type": "string", "pattern": "^[ab]+$", "minLength": 3, "maxLength": 4},
        {"type": "string", "pattern": "^ab|b$", "maxLength": 12}, {"type": "string", "pattern": r"^[\w.]+@x$", "maxLength": 12},
    ],
    "`format`": [{"type": "string", "format": name} for name in FORMATS]
    + [{"type": "string", "format": "date", "pattern": "^20[0-9]{2}-02-29$"}, {"format": "uuid", "maxLength": 36}],
    "`anyOf`, `oneOf`": [
        {"anyOf": [INTEGER, {"type": "null"}]}, {"oneOf": [INTEGER, STRING]}, {"oneOf": [{"const": 1}, {"const": True}]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        {"oneOf": [{"properties": {"k": {"const": i}}, "type": "object"} for i in range(3)]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": INTEGER, "b": STRING}},
        {"type": "string", "anyOf": [{"minLength": 3}, {"pattern": "^a"}], "maxLength": 4},
    ],
    "`allOf`": [
        {"allOf": [{"$ref": "#/$defs/cat"}], "description": "a cat", "$defs": {"cat": CAT}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": STRING}, "required": ["b"]}], "$defs": {"a": A}},
        {"allOf": [INTEGER, {"minimum": 2}, {"maximum": 4}, {"multipleOf": 2}]},
        {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"maxLength": 5}], "type": "string"},
        {"allOf": [of_array(items=INTEGER), {"items": {"minimum": 5}, "minItems": 1}]},
        {"allOf": [{"anyOf": [A, CAT]}, {"anyOf": [{"required": ["a"]}, {"required": ["lives"]}]}]},
        {"type": "object", "properties": {"a": INTEGER}, "allOf": [{"properties": {"a": {"minimum": 3}, "b": STRING}}]},
    ],
    "`$ref`, `$defs`, `definitions`": [
        closed(a={"$ref": "#"}, n=INTEGER), {"$ref": "#/$defs/x~1y%20z", "$defs": {"x/y z": INTEGER}},
        {"anyOf": [STRING, closed("a", a={"$ref": "#/anyOf/0"})]}, {"$ref": "#/definitions/a", "definitions": {"a": STRING}},
        {"$ref": "#/$defs/a", "description": "of a", "$defs": {"a": closed(b=of_array(items={"$ref": "#/$defs/a"}))}},
        {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}},
        {"$ref": "#/$defs/a", "properties": {"b": STRING}, "required": ["b"], "$defs": {"a": A}},
    ],
    "`if`, `then`, `else`": [
        KINDS | {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}, "else": with_integer("y")},
        {"type": "object", "properties": {"k": {"type": "boolean"}}, "if": {"properties": {"k": {"const": True}}, "required": ["k"]},
         "then": with_integer("z")},
        KINDS | {"allOf": [{"properties": {"k": {"enum": ["a", "b"]}}}, {"if": {"properties": {"k": {"const": "a"}}},
         "then": with_integer("v")}, {"if": {"properties": {"k": {"const": "b"}}}, "then": with_integer("w")}]},
        {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "additionalProperties": False,
         "if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "else": False},
        {"type": "object", "properties": {"k": {"enum": [1, 2, "x"], "type": "integer"}, "a": STRING},
         "additionalProperties": INTEGER, "if": {"properties": {"k": {"enum": [1.0, 5]}}}, "then": {"required": ["a"]}},
        {"then": STRING, "type": "integer"},
    ],
    "`not`": [
        {"not": STRING, "maximum": 9}, {"type": ["string", "null", "integer"], "not": {"type": ["null", "number"]}},
        {"enum": [1, 2, "a"], "not": {"const": 1.0}}, {"type": "string", "enum": ["a", "b", "c"], "not": {"enum": ["b"]}},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "not": {"required": ["a", "b"]}},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["b"], "not": {"required": ["a"]}},
    ],
    "`dependentRequired`, `dependentSchemas`, `dependencies`": [
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "dependentRequired": {"a": ["b"], "b": ["c"]}},
        {"properties": {"a": INTEGER, "b": STRING}, "dependentSchemas": {"a": {"properties": {"b": {"minLength": 3}}}}},
        DRAFT_7 | {"properties": {"a": INTEGER}, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}, "required": ["c"]},
    ],
}  # fmt: skip

WORD = {"type": "string", "maxLength": 6}
TOGETHER: list[Any] = [
    closed("a", "b", a={"minLength": 2, "maxLength": 4}, b={"type": "integer", "multipleOf": 3, "maximum": 20, "minimum": 4}),
    {"oneOf": [closed("k", k={"const": 1}), closed("k", "v", k={"const": 2}, v={"type": "string", "format": "ipv4"})]},
    {"required": ["x"], "properties": {"x": {"enum": [1, "a"], "type": "integer"}}},
    of_array(prefixItems=[WORD, {"type": "string", "format": "date"}], minItems=2, maxItems=2),
    {"allOf": [closed("a", a=WORD), {"dependentRequired": {"a": ["a"]}}], "properties": {"a": {"minLength": 1}}},
]  # fmt: skip


def check_time(text: str) -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    datetime.datetime.fromisoformat("2020-01-01T" + text)


def check_date_time(text: str) -> None:
    datetime.date.fromisoformat(text[:10])
    assert text[10] == "T"
    check_time(text[11:])


def check_hostname(text: str) -> None:
    labels = text.split(".")
    assert len(text) <= 253 and all(re.fullmatch("[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", one) for one in labels)


def check_email(text: str) -> None:
    local, host = text.split("@")
    assert re.fullmatch(r"[\w+-]+(\.[\w+-]+)*", local)
    check_hostname(host)


def check_duration(text: str) -> None:
    assert re.fullmatch(r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text)


def check_uri(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]+(/[^?#]*)?(\?[^#]*)?(#[^#]*)?", text)
    assert not re.search("%(?![0-9a-fA-F]{2})", text)


CHECKS: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "time": check_time,
    "date-time": check_date_time,
    "duration": check_duration,
    "email": check_email,
    "hostname": check_hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": check_uri,
    "uuid": uuid.UUID,
}


def decimal(text: str) -> Decimal | float:
    return float(text) if "e" in text.lower() else Decimal(text)  # an exponent may be too large


def check_text(text: str, schema: Any, path: Sequence[str] = ()) -> None:
    """Check that a text of JSON meets a schema, or the value in it that a path of names leads to."""
    number = decimal if "multipleOf" in json.dumps(schema) else float  # in floats, 0.07 is no multiple of 0.01
    getcontext().prec = 1000
    schema, value = (json.loads(one, parse_float=number) for one in (json.dumps(schema), text))
    for name in path:
        value = value[name]
    validator_for(schema, Draft202012Validator)(schema).validate(value)
    if isinstance(schema, dict) and "format" in schema:
        CHECKS[schema["format"]](value)
