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
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from specdec_kernels.engine import Draft, Engine, Ngram, SamplingParams
from specdec_kernels.engine.text import schema_patterns
from specdec_kernels.engine.text.json_schemas import held_to, moved
from specdec_kernels.tiny import tiny_model
from support.schema_texts import accepts, compiled, random_texts

pytest.importorskip("xgrammar")

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def of_array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


CAT = closed("kind", kind={"const": "cat", "type": "string"}, lives=INTEGER)
DOG = closed("kind", kind={"const": "dog", "type": "string"})

# By the name in the table of docs/json_schemas.md.
HELD: dict[str, list[Any]] = {
    "`type`": [{"type": name} for name in ("null", "boolean", "integer", "number", "string", "array", "object")]
    + [{"type": ["integer", "null"]}, {"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, True],
    "`enum`, `const`": [
        {"enum": ['a"b', "é", "\n", 1.5, {"x": [1]}]}, {"type": "integer", "enum": [1, "a", 2.0]}, {"const": {"a": [None]}},
        {"type": "string", "const": "b"},
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
    ],
    "`patternProperties`, `propertyNames`": [
        {"type": "object", "patternProperties": {"^x[0-9]$": INTEGER}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        {"type": "object", "propertyNames": {"minLength": 3, "maxLength": 5}, "minProperties": 1},
    ],
    "`minProperties`, `maxProperties`": [
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "minProperties": 2},
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "maxProperties": 0},
    ],
    "`items`, `prefixItems`, `unevaluatedItems`": [
        of_array(items=INTEGER), of_array(prefixItems=[INTEGER, STRING], minItems=2, maxItems=2), of_array(items=False),
        of_array(prefixItems=[STRING], items=INTEGER), of_array(prefixItems=[INTEGER], unevaluatedItems=False),
    ],
    "`minItems`, `maxItems`": [
        of_array(items=INTEGER, minItems=2, maxItems=3), of_array(prefixItems=[INTEGER], minItems=3), of_array(maxItems=0),
        of_array(prefixItems=[INTEGER, INTEGER, INTEGER], maxItems=2),
    ],
    "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`": [
        {"type": "integer", "minimum": -17, "maximum": 1234}, {"type": "integer", "exclusiveMinimum": 1.5, "maximum": 7.5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "number", "minimum": -1.25}, {"minimum": 3},
    ],
    "`multipleOf`": [
        {"type": "integer", "multipleOf": 7}, {"type": "integer", "multipleOf": 7, "minimum": -10, "maximum": 90},
    ],
    "`minLength`, `maxLength`": [
        {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "maxLength": 10**6}, {"minLength": 2},
        {"type": "string", "maxLength": 0},
    ],
    "`pattern`": [
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^.{1,3}$", r"^\S+$", r"^[^a]{2}$", r"^\d{3}-\d{4}$", "^a|b$", "^(ab+)?c$", r"^[\w.]+@x$", "^$", r"^\+?[0-9]{1,3}$"
        )
    ],
    "`format`": [{"type": "string", "format": name} for name in schema_patterns.FORMATS],
    "`anyOf`, `oneOf`, `allOf`": [
        {"anyOf": [INTEGER, {"type": "null"}]}, {"oneOf": [INTEGER, STRING]}, {"oneOf": [{"const": 1}, {"const": True}]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        {"allOf": [{"$ref": "#/$defs/cat"}], "description": "a cat", "$defs": {"cat": CAT}},
    ],
    "`$ref`, `$defs`, `definitions`": [
        closed(a={"$ref": "#"}, n=INTEGER), {"$ref": "#/$defs/x~1y%20z", "$defs": {"x/y z": INTEGER}},
        {"anyOf": [STRING, closed("a", a={"$ref": "#/anyOf/0"})]}, {"$ref": "#/definitions/a", "definitions": {"a": STRING}},
        {"$ref": "#/$defs/a", "description": "of a", "$defs": {"a": closed(b=of_array(items={"$ref": "#/$defs/a"}))}},
    ],
}  # fmt: skip

NO_GRAMMAR = "none (no grammar holds to it)"
REFUSED: dict[str, list[tuple[Any, str]]] = {
    f"`{keyword}`": [
        ({"type": "object", "properties": {"a/b": {keyword: {}}}}, f"{keyword} at #/properties/a~1b, expected {NO_GRAMMAR}")
    ]
    for keyword in (
        *("$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "else", "if", "maxContains", "minContains", "not", "then", "uniqueItems"),
    )
} | {
    "keywords beside `$ref`, `enum`, `const`, `anyOf`, `oneOf`, `allOf`": [
        ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}}, "minimum at #, expected none beside $ref"),
        ({"anyOf": [INTEGER, STRING], "required": ["a"]}, "required at #, expected none beside anyOf"),
        ({"enum": [1], "minimum": 3}, "minimum at #, expected none beside enum"),
    ],
    "`oneOf` of schemas that may overlap": [
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf at #, expected schemas that no value meets together (not 0 and 1)"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf at #, expected schemas that no value meets together (not 0 and 1)"),
    ],
    "`allOf` of several schemas": [({"allOf": [INTEGER, {"minimum": 2}]}, "allOf at #, expected one schema in it")],
    "`enum` without a value of its `type`": [
        ({"type": "integer", "const": "a"}, "const at #, expected a value of its type")
    ],
    "`$ref` to a URL, an anchor, no place, or itself": [
        ({"$ref": "https://x.y/z"}, '$ref "https://x.y/z" at #, expected "#" or "#/" and a place in the schema'),
        ({"$ref": "#x"}, '$ref "#x" at #, expected "#" or "#/" and a place in the schema'),
        ({"items": {"$ref": "#/$defs/x"}}, '$ref "#/$defs/x" at #/items, expected a place in the schema'),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, '$ref "#" at #/anyOf/0, expected an object or an array before a schema repeats'),
    ],
    "`$id` within a schema": [({"items": {"$id": "x"}}, "$id at #/items, expected none but at #")],
    "`multipleOf` of type number, or with one bound": [
        ({"type": "number", "multipleOf": 0.5}, "multipleOf at #, expected none with type number"),
        ({"type": "integer", "multipleOf": 7, "minimum": -90}, "multipleOf at #, expected both bounds beside it, or none"),
        ({"type": "integer", "multipleOf": 10**6}, "multipleOf 1000000 at #, expected an integer from 1 to 1000"),
    ],
    "bounds of more than 64 bits or 6 decimals": [
        ({"type": "integer", "minimum": 10**19}, "bounds at #, expected 64-bit integers"),
        ({"type": "number", "minimum": 0.12345678}, "bound 0.12345678 at #, expected at most 6 decimals"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "bounds at #, expected an integer within them"),
    ],
    "`pattern` or `format` beside each other or a length": [
        ({"type": "string", "pattern": "^a", "maxLength": 3}, "maxLength at #, expected none beside pattern"),
        ({"type": "string", "pattern": "^a", "format": "date"}, "format at #, expected none beside pattern"),
    ],
    "`pattern` with a lookaround, a flag, a name, an anchor inside, `\\b`, `\\D`, `\\W`, a reference, a quote, a backslash "
    "or a control character": [
        ({"pattern": pattern}, f"pattern {json.dumps(pattern)} at #, expected none with {json.dumps(part)}")
        for pattern, part in (
            ("^(?=a)ab$", "(?="), ("(?i)a", "(?i"), ("(?<n>a)", "(?<"), ("a^b", "^b"), (r"\ba", r"\b"), (r"\D", r"\D"),
            (r"^\W$", r"\W"), (r"(a)\1", r"\1"), ('^"$', '"'), (r"^\\$", r"\\"), (r"^\n$", r"\n"), ("^[ -~]$", "[ -~]"),
        )
    ],
    "`pattern` with a repetition in a repeated group, or an alternative that may be empty": [
        ({"pattern": "((ab)?c)+"}, 'pattern "((ab)?c)+" at #, expected none with "((ab)?c)+"'),
        ({"pattern": "(a{1,2}|b)"}, 'pattern "(a{1,2}|b)" at #, expected none with "(a{1,2}|"'),
        ({"pattern": "(a|)"}, 'pattern "(a|)" at #, expected none with "(a|)"'),
    ],
    "`format` " + ", ".join(f"`{name}`" for name in schema_patterns.REFUSED_FORMATS): [
        ({"format": name}, f'format "{name}" at #, expected one of {", ".join(schema_patterns.FORMATS)}')
        for name in schema_patterns.REFUSED_FORMATS
    ],
    "`patternProperties` of several patterns, or beside other names": [
        ({"patternProperties": {"^x": {}}, "properties": {"xa": INTEGER}, "additionalProperties": False},
         "patternProperties at #, expected one pattern, and no other names beside it"),
    ],
    "`propertyNames` beside `properties`": [
        ({"propertyNames": {"maxLength": 1}, "required": ["ab"]},
         "propertyNames at #, expected none beside properties, required or patternProperties"),
    ],
    "`minProperties` of 2 or more where names are free": [
        ({"type": "object", "minProperties": 2}, "minProperties at #, expected none where names are free"),
    ],
    "schemas that no value meets": [
        (False, "false at #, expected a schema that a value meets"),
        ({"required": ["a"], "additionalProperties": False}, 'required "a" at #, expected a property that may be there'),
        ({"minItems": 3, "maxItems": 2}, "minItems at #, expected at most maxItems, 2"),
        ({"type": "nope"}, 'type "nope" at #, expected one of null, boolean, integer, number, string, array, object'),
    ],
    "older drafts: `items` as a list, `exclusiveMinimum` as a bool": [
        ({"items": [INTEGER]}, 'items [{"type": "integer"}] at #, expected a schema'),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum true at #, expected a number"),
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


FORMATS: dict[str, Callable[[str], object]] = {
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


def check_text(text: str, schema: Any) -> None:
    value = json.loads(text)
    Draft202012Validator(schema).validate(value)
    if isinstance(schema, dict) and "format" in schema:
        FORMATS[schema["format"]](value)


@pytest.mark.parametrize("name", HELD)
def test_random_texts_of_a_grammar_meet_the_schema(name: str) -> None:
    for schema in HELD[name]:
        texts = random_texts(compiled(held_to(schema)), 50, seed=1)
        assert len(texts) > 10, schema
        for text in texts:
            check_text(text, schema)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_held_to_is_refused_by_keyword_and_place(name: str) -> None:
    for schema, message in REFUSED[name]:
        with pytest.raises(ValueError) as error:
            held_to(schema)
        assert str(error.value) == f"json_schema has {message}", schema


def test_table_of_docs_names_what_is_held_to_and_refused() -> None:
    page = (Path(__file__).parents[2] / "docs/json_schemas.md").read_text()
    sections = [re.findall(r"^\| (.+) \|$", part, re.M)[1:] for part in page.split("\n## ")[1:3]]
    rows = [[row.replace("\\|", "|") for row in rows if not row.startswith("---")] for rows in sections]
    assert rows == [list(HELD), list(REFUSED)]


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
    texts = random_texts(compiled(held_to(schema)), 50, seed=2, most=500)
    assert len(texts) > 10
    for text in texts:
        check_text(text, schema)
        Owner.model_validate_json(text)


WORDS = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(8 if depth else 3)
    if kind < 2:
        return rng.choice("abc") + rng.choice(["", "", "?", "*", "+", "{1,2}", "{0,2}", "{2}", "+?"])
    if kind == 2:
        return rng.choice(["[ab]", "[^a]", ".", "[b-c]"])
    inner = random_pattern(rng, depth - 1)
    if kind < 5:
        return inner + random_pattern(rng, depth - 1)
    if kind == 5:
        return f"({inner}|{random_pattern(rng, depth - 1)})"
    return f"({inner})" + rng.choice(["?", "*", "+", "{0,1}", "{1,2}", "{2}", "{0,2}", "{1,}", "??", "+?"])


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(250, 14000), marks=pytest.mark.exhaustive)])
def test_pattern_accepts_no_string_that_does_not_match(seeds: range) -> None:
    """All strings of up to five letters."""
    num_held = 0
    for seed in seeds:
        pattern = random_pattern(random.Random(seed), 4)
        try:
            grammar = compiled({"type": "string", "pattern": schema_patterns.checked(pattern)})
        except ValueError:
            continue
        num_held += 1
        accepted = [word for word in WORDS if accepts(grammar, f'"{word}"')]
        assert all(re.fullmatch(pattern, word) for word in accepted), pattern
    assert num_held > len(seeds) / 4


@pytest.mark.parametrize("names", [["a"], ["abc", "bbb", "ca", "b"], ["", "a", "ab", "abc"], ['a"', "b"]])
def test_other_names_are_all_but_those_of_properties(names: list[str]) -> None:
    grammar = compiled({"type": "string", "pattern": schema_patterns.other_names(names)})
    assert [word for word in WORDS if not accepts(grammar, f'"{word}"')] == sorted(
        {"", *names} & {*WORDS}, key=WORDS.index
    )
    assert not accepts(grammar, '"\\u0061"')  # "a"


def test_moved_schema_keeps_data_that_looks_like_references() -> None:
    schema = {"properties": {"$ref": {"$ref": "#/$defs/a"}}, "enum": [{"$ref": "#"}], "$defs": {"a": {"$ref": "#"}}}
    assert moved(schema, "#/x") == {
        "properties": {"$ref": {"$ref": "#/x/$defs/a"}},
        "enum": [{"$ref": "#"}],
        "$defs": {"a": {"$ref": "#/x"}},
    }


@pytest.mark.parametrize("draft", [None, Ngram(num_nodes=8)], ids=["none", "ngram"])
def test_texts_of_an_engine_meet_their_schemas(draft: Draft | None) -> None:
    """Greedy and drawn; another schema for each request."""
    word = {"type": "string", "maxLength": 6}
    schemas: list[Any] = [
        closed("a", "b", a={"minLength": 2, "maxLength": 4}, b={"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 20}),
        {"oneOf": [closed("k", k={"const": 1}), closed("k", "v", k={"const": 2}, v={"type": "string", "format": "ipv4"})]},
        {"required": ["x"], "properties": {"x": {"enum": [1, "a"], "type": "integer"}}},
        of_array(prefixItems=[word, {"type": "string", "format": "date"}], minItems=2, maxItems=2),
    ]  # fmt: skip
    engine = Engine(tiny_model("target"), draft=draft, adaptive=False, grammars=True, device="cpu", max_len=512)
    each = [
        SamplingParams(400, json_schema=schema, temperature=temperature, seed=3)
        for schema in schemas
        for temperature in (0, 1.0)
    ]
    with engine:
        outputs = engine.generate(["def area("] * len(each), each)
    for output, params in zip(outputs, each, strict=True):
        assert output.text is not None
        Draft202012Validator(params.json_schema).validate(json.loads(output.text))
