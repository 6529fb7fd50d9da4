"""JSON schemas: every text of a grammar meets its schema by `jsonschema`; what is not held to is refused by name."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, Field

from specdec_kernels import FinishReason
from specdec_kernels.engine import Draft, Engine, Ngram, RequestOutput, SamplingParams
from specdec_kernels.engine.text.json_schemas import held_to, moved
from specdec_kernels.engine.text.patterns import FORMATS, REFUSED_FORMATS
from specdec_kernels.server.protocol.requests import schema_of_calls
from specdec_kernels.tiny import tiny_model
from support.generated_schemas import GENERATED
from support.schema_texts import accepts, new_matcher, random_texts

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def of_array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


CAT = closed("kind", kind={"const": "cat", "type": "string"}, lives=INTEGER)
DOG = closed("kind", kind={"const": "dog", "type": "string"})
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
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
    "`dependentRequired`, `dependentSchemas`, `dependencies`": [
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "dependentRequired": {"a": ["b"], "b": ["c"]}},
        {"properties": {"a": INTEGER, "b": STRING}, "dependentSchemas": {"a": {"properties": {"b": {"minLength": 3}}}}},
        DRAFT_7 | {"properties": {"a": INTEGER}, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}, "required": ["c"]},
    ],
}  # fmt: skip

NO_GRAMMAR = "none (no grammar holds to it)"
REFUSED: dict[str, list[tuple[Any, str]]] = {
    f"`{keyword}`": [
        ({"type": "object", "properties": {"a/b": {keyword: {}}}}, f"{keyword} at #/properties/a~1b, expected {NO_GRAMMAR}")
    ]
    for keyword in (
        *("$dynamicRef", "$recursiveRef", "contains", "else", "if", "maxContains", "minContains", "not", "then"),
        "uniqueItems",
    )
} | {
    "`oneOf` of schemas that may overlap": [
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf at #, expected schemas that no value meets together (not 0 and 1)"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf at #, expected schemas that no value meets together (not 0 and 1)"),
    ],
    "`$ref` to a URL, an anchor, no place, or itself": [
        ({"$ref": "https://x.y/z"}, '$ref "https://x.y/z" at #, expected "#" or "#/" and a place in the schema'),
        ({"$ref": "#x"}, '$ref "#x" at #, expected "#" or "#/" and a place in the schema'),
        ({"items": {"$ref": "#/$defs/x"}}, '$ref "#/$defs/x" at #/items, expected a place in the schema'),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, '$ref "#" at #/anyOf/0, expected an object or an array before a schema repeats'),
    ],
    "`$id` within a schema": [({"items": {"$id": "x"}}, "$id at #/items, expected none but at #")],
    "numbers of more than 53 bits": [
        ({"type": "integer", "minimum": 10**19}, "minimum 10000000000000000000 at #, expected at most 2^53 (10^12 with decimals)"),
        ({"maximum": 2**53 + 1}, "maximum 9007199254740993 at #, expected at most 2^53 (10^12 with decimals)"),
        ({"minimum": 10**15 + 1}, "bounds at #, expected numbers of fewer than 16 digits within them"),
        ({"enum": [{"a": [2**53 + 1]}]}, "enum 9007199254740993 at #, expected at most 53 bits, below 2^63"),
    ],
    "`pattern` with a lookaround, a reference, a flag, `\\b`, `\\B`, `\\A`, `\\Z`, `\\p`, an anchor inside, a possessive "
    "repetition, or what Python and ECMAScript read in different ways": [
        ({"pattern": pattern}, f"pattern {json.dumps(pattern)} at #, expected {expected}")
        for pattern, expected in (
            ("^(?=a)ab$", "none with a lookahead or lookbehind"), ("(?<!a)b", "none with a negative lookahead or lookbehind"),
            ("(?i)a", "none with flags"), ("(?i:a)", "none with flags"), ("a^b", "none with ^ inside"), ("(a$)b", "none with $ inside"),
            (r"\ba", r"none with \b"), (r"\Ba", r"none with \B"), (r"\Aa", r"none with \A"), (r"a\Z", r"none with \Z"),
            (r"(a)\1", "none with a reference to a group"), ("[]a]", "none with [], which languages read in different ways"),
            ("a{,2}", "none with {,, which languages read in different ways"),
            (r"\p{L}", r"a regular expression (bad escape \p at position 0)"),
            ("(a", "a regular expression (missing ), unterminated subpattern at position 0)"),
        )
    ],
    "`format` " + ", ".join(f"`{name}`" for name in REFUSED_FORMATS): [
        ({"format": name}, f'format "{name}" at #, expected one of {", ".join(FORMATS)}') for name in REFUSED_FORMATS
    ],
    "`propertyNames` of other schemas": [
        ({"propertyNames": {"anyOf": [STRING]}}, "propertyNames at #/propertyNames, expected an enum, or keywords of strings"),
        ({"propertyNames": {"enum": 3}}, "propertyNames at #/propertyNames, expected an enum, or keywords of strings"),
        ({"propertyNames": {"enum": ["a", "bb"], "maxLength": 1}},
         "propertyNames at #/propertyNames, expected an enum, or keywords of strings"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}},
         "propertyNames at #/propertyNames, expected one of pattern, format and lengths"),
    ],
    "`minProperties` that properties of any name count for": [
        ({"type": "object", "minProperties": 2}, "minProperties at #, expected at most 1 that is not required where names are free"),
    ],
    "names with control characters beside properties of any name": [
        ({"properties": {"a\n": INTEGER}, "additionalProperties": STRING},
         'property "a\\n" at #, expected no control characters where names are free'),
    ],
    "`unevaluatedProperties` or `unevaluatedItems` beside choices": [
        ({"anyOf": [A, CAT], "unevaluatedProperties": False},
         "unevaluatedProperties at #, expected none beside choices or other properties"),
        ({"allOf": [A], "unevaluatedProperties": INTEGER},
         "unevaluatedProperties at #, expected true or false beside $ref, allOf, anyOf, oneOf"),
        ({"allOf": [of_array()], "unevaluatedItems": False}, "unevaluatedItems at #, expected none beside $ref, allOf, anyOf, oneOf"),
    ],
    "values that are of another kind than their keyword asks for": [
        (False, "false at #, expected a schema that a value meets"), ({"items": 3}, "3 at #/items, expected a schema"),
        ({"minItems": 3, "maxItems": 2}, "minItems at #, expected at most maxItems, 2"),
        ({"type": "nope"}, 'type "nope" at #, expected one of null, boolean, integer, number, string, array, object'),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum true at #, expected a number"),
        ({"enum": []}, "enum [] at #, expected a list of values"), ({"required": "a"}, 'required "a" at #, expected a list of names'),
        ({"dependentRequired": {"a": {}}}, "dependentRequired {} at #, expected a list of names"),
    ],
}  # fmt: skip
# What llguidance refuses, with its own words.
UNHELD: dict[str, list[tuple[Any, str]]] = {
    "schemas that no value meets": [
        ({"type": "integer", "const": "a"}, "Unsatisfiable schema: incompatible types"),
        ({"required": ["a"], "additionalProperties": False}, "Unsatisfiable schema: required property 'a' is unsatisfiable"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable schema: minimum (2) is greater than maximum (1)"),
    ],
    "`patternProperties` whose patterns meet on a name": [
        ({"patternProperties": {"^x": INTEGER, "x$": STRING}}, "patternProperty regexes "),
    ],
    "`minProperties`, `maxProperties` beside several optional properties": [
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "min/maxProperties only supported when "),
    ],
    "recursion through keywords beside `$ref`": [
        (closed(a={"$ref": "#", "required": ["a"]}), "circular references with sibling keys are not supported: "),
    ],
}  # fmt: skip


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


def check_text(text: str, schema: Any) -> None:
    number = decimal if "multipleOf" in json.dumps(schema) else float  # in floats, 0.07 is no multiple of 0.01
    getcontext().prec = 1000
    schema, value = (json.loads(one, parse_float=number) for one in (json.dumps(schema), text))
    validator_for(schema, Draft202012Validator)(schema).validate(value)
    if isinstance(schema, dict) and "format" in schema:
        CHECKS[schema["format"]](value)


@pytest.mark.parametrize("name", HELD)
def test_random_texts_of_a_grammar_meet_the_schema(name: str) -> None:
    for schema in HELD[name]:
        texts = random_texts(new_matcher("json_schema", schema), 50, seed=1)
        assert len(texts) >= 5, schema
        for text in texts:
            check_text(text, schema)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_held_to_is_refused_by_keyword_and_place(name: str) -> None:
    for schema, message in REFUSED[name]:
        with pytest.raises(ValueError) as error:
            held_to(schema)
        assert str(error.value) == f"json_schema has {message}", schema


@pytest.mark.parametrize("name", UNHELD)
def test_what_llguidance_does_not_hold_to_is_refused_in_its_words(name: str) -> None:
    for schema, message in UNHELD[name]:
        with pytest.raises(ValueError) as error:
            new_matcher("json_schema", schema)
        assert str(error.value).startswith(message), schema


def test_table_of_docs_names_what_is_held_to_and_refused() -> None:
    page = (Path(__file__).parents[2] / "docs/json_schemas.md").read_text()
    sections = [re.findall(r"^\| (.+) \|$", part, re.M)[1:] for part in page.split("\n## ")[1:3]]
    rows = [[row.replace("\\|", "|") for row in rows if not row.startswith("---")] for rows in sections]
    assert rows == [list(HELD), [*REFUSED, *UNHELD]]


def test_every_keyword_of_json_schema_is_held_to_refused_or_asks_for_nothing() -> None:
    """Keywords of the drafts' own schemas, by the tables above."""
    known = {
        keyword
        for schema in (Draft202012Validator.META_SCHEMA, Draft7Validator.META_SCHEMA, *vocabularies())
        for keyword in schema["properties"]
    }
    named = {keyword for row in (*HELD, *REFUSED) for keyword in re.findall("`([^`]+)`", row)}
    assert known - named == {
        *("$anchor", "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description"),
        *("examples", "readOnly", "title", "writeOnly", "additionalItems"),
    }


def vocabularies() -> list[Any]:
    from jsonschema_specifications import REGISTRY

    return [one.contents for uri, one in REGISTRY.items() if "2020-12/meta/" in uri]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    color: Color | None = None


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: dict[Literal["a", "b"], Annotated[int, Field(ge=0, lt=100)]]


class Owner(BaseModel):
    """What Pydantic's generator emits for nested, Literal, Optional, union and constrained fields."""

    name: Annotated[str, Field(min_length=1, max_length=8)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    born: datetime.date
    pair: tuple[int, bool]
    share: Annotated[float, Field(gt=0, le=1)]
    friend: Owner | None = None


def test_texts_of_pydantic_models_validate() -> None:
    schema = Owner.model_json_schema()
    texts = random_texts(new_matcher("json_schema", schema), 50, seed=2, most=500)
    assert len(texts) > 10
    for text in texts:
        check_text(text, schema)
        Owner.model_validate_json(text)


@pytest.mark.parametrize("name", GENERATED)
def test_texts_of_generated_schemas_validate(name: str) -> None:
    """Also where the schema of a text is deep in another: no object has properties that its generator did not name."""
    texts = random_texts(new_matcher("json_schema", GENERATED[name]), 25, seed=3, most=700)
    assert len(texts) > 5
    for text in texts:
        check_text(text, GENERATED[name])


def test_texts_of_tool_calls_validate() -> None:
    """By the parameters of their tools, which have definitions of the same names and references to themselves."""
    parameters = {name: one for name, one in GENERATED.items() if "properties" in one}
    tools = [{"function": {"name": name, "parameters": one}} for name, one in parameters.items()]
    for text in random_texts(new_matcher("json_schema", schema_of_calls(tools)), 60, seed=4, most=800):
        call = json.loads(text)
        check_text(json.dumps(call["arguments"]), parameters[call["name"]])


WORDS = ["".join(word) for length in range(5) for word in itertools.product("abc", repeat=length)]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(8 if depth else 3)
    if kind < 2:
        return rng.choice("abc") + rng.choice(["", "", "?", "*", "+", "{1,2}", "{0,2}", "{2}", "+?"])
    if kind == 2:
        return rng.choice(["[ab]", "[^a]", ".", "[b-c]", r"\w", r"\W", r"[^\d]", "(?:)"])
    inner = random_pattern(rng, depth - 1)
    if kind < 5:
        return inner + random_pattern(rng, depth - 1)
    if kind == 5:
        return f"({inner}|{random_pattern(rng, depth - 1)})"
    return f"({inner})" + rng.choice(["?", "*", "+", "{0,1}", "{1,2}", "{2}", "{0,2}", "{1,}", "??", "+?"])


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("[[:a]b", ["[b", ":b", "ab"], ["b", "[:b"]),  # not a class in a class
        ("[a&&b]", ["a", "&", "b"], ["", "&&"]),  # not what both have
        ("[-~~]", ["-", "~"], ["b"]),
        (r"(?<n>a)[\w-]", ["a-", "a_"], ["aé"]),
        (r"\d", ["7"], ["٣"]),  # what only Python has for a digit
        (r"\D", ["a"], ["7", "٣"]),
        (r"[^\w]", ["-"], ["a", "é"]),
        (r"\s", [" ", "\t"], ["\x1c", "\xa0"]),
        (r"[\S]", ["a"], [" ", "\x1c", "\ufeff"]),
        (".", ["a", "é"], ["\n", "\r", "\u2028"]),
        (r"a\/\.b\x41\u00e9", ["a/.bAé"], ["a/xbAé"]),
        ("", [""], ["a"]),
    ],
)
def test_regex_accepts_what_all_languages_match(pattern: str, matches: list[str], others: list[str]) -> None:
    make = new_matcher("regex", pattern)
    assert [text for text in matches + others if accepts(make, text)] == matches


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.exhaustive)])
def test_pattern_accepts_the_strings_that_match(seeds: range) -> None:
    """All strings of up to four letters; as a `regex` the whole text, in a schema with and without anchors."""
    for seed in seeds:
        rng = random.Random(seed)
        pattern = random_pattern(rng, 4)
        anchored = rng.choice(["^", ""]) + f"(?:{pattern})" + rng.choice(["$", ""])
        whole, part = new_matcher("regex", pattern), new_matcher("json_schema", {"type": "string", "pattern": anchored})
        for word in WORDS:
            assert accepts(whole, word) == bool(re.fullmatch(pattern, word)), (pattern, word)
            assert accepts(part, f'"{word}"') == bool(re.search(anchored, word)), (anchored, word)


def test_moved_schema_keeps_data_that_looks_like_references() -> None:
    schema = {"properties": {"$ref": {"$ref": "#/$defs/a"}}, "enum": [{"$ref": "#"}], "$defs": {"a": {"$ref": "#"}}}
    assert moved(schema, "#/x") == {
        "properties": {"$ref": {"$ref": "#/x/$defs/a"}},
        "enum": [{"$ref": "#"}],
        "$defs": {"a": {"$ref": "#/x"}},
    }


DRAFTS: dict[str, Draft | None] = {"none": None, "ngram": Ngram(num_nodes=8)}


def texts_of_engine(schemas: list[Any], count: int, draft: str) -> list[tuple[Any, RequestOutput]]:
    """Return schemas with outputs, half of them greedy after different prompts and half drawn.

    Every second of each kind prefers to end: some texts of numbers would not within their budget.
    """
    with Engine(
        tiny_model("target"), draft=DRAFTS[draft], adaptive=False, grammars=True, device="cpu", max_len=512
    ) as engine:
        end = engine.tokenizer.eos_token_id
        each = [
            (
                schema,
                f"def area{i}(",
                SamplingParams(
                    400, json_schema=schema, temperature=i % 2, seed=i, logit_bias={end: 30.0} if i % 4 > 1 else None
                ),
            )
            for schema in schemas
            for i in range(count)
        ]
        outputs = engine.generate([prompt for _, prompt, _ in each], [params for *_, params in each])
    return [(schema, output) for (schema, *_), output in zip(each, outputs, strict=True)]


def check_outputs(schemas: list[Any], count: int) -> None:
    """Check that texts meet their schemas, with the same tokens under any draft."""
    each = {draft: texts_of_engine(schemas, count, draft) for draft in DRAFTS}
    for found in zip(*each.values(), strict=True):
        assert len({tuple(output.tokens) for _, output in found}) == 1
        schema, output = found[0]
        if output.finish_reason == FinishReason.STOP:
            check_text(output.text or "", schema)
    for schema in schemas:
        ended = [output for one, output in each["none"] if one is schema and output.finish_reason == FinishReason.STOP]
        assert len(ended) >= count / 10, schema


def test_texts_of_an_engine_meet_their_schemas() -> None:
    """Greedy and drawn, with and without a draft; another schema for each request."""
    word = {"type": "string", "maxLength": 6}
    check_outputs(
        [
            closed("a", "b", a={"minLength": 2, "maxLength": 4}, b={"type": "integer", "multipleOf": 3, "maximum": 20, "minimum": 4}),
            {"oneOf": [closed("k", k={"const": 1}), closed("k", "v", k={"const": 2}, v={"type": "string", "format": "ipv4"})]},
            {"required": ["x"], "properties": {"x": {"enum": [1, "a"], "type": "integer"}}},
            of_array(prefixItems=[word, {"type": "string", "format": "date"}], minItems=2, maxItems=2),
            {"allOf": [closed("a", a=word), {"dependentRequired": {"a": ["a"]}}], "properties": {"a": {"minLength": 1}}},
        ],
        2,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HELD)
def test_fifty_texts_of_an_engine_meet_each_schema(name: str) -> None:
    check_outputs([schema for schema in HELD[name] if schema is not True], 50)
