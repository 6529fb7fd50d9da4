"""JSON schemas: every text of a grammar meets its schema by `jsonschema`; what is not held to is refused by name."""

from __future__ import annotations

import datetime
import enum
import itertools
import json
import random
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from pydantic import BaseModel, Field

from specdec_kernels.engine.text.json_schemas import held_to, moved
from specdec_kernels.engine.text.patterns import FORMATS, REFUSED_FORMATS
from specdec_kernels.server.protocol.requests import schema_of_calls
from support.generated_schemas import GENERATED
from support.held_schemas import CAT, HELD, INTEGER, KINDS, STRING, A, check_text, closed, of_array, with_integer
from support.schema_texts import accepts, new_matcher, random_texts

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

NO_GRAMMAR = "none (no grammar holds to it)"
REFUSED: dict[str, list[tuple[Any, str]]] = {
    f"`{keyword}`": [
        ({"type": "object", "properties": {"a/b": {keyword: {}}}}, f"{keyword} at #/properties/a~1b, expected {NO_GRAMMAR}")
    ]
    for keyword in ("$dynamicRef", "$recursiveRef", "contains", "maxContains", "minContains", "uniqueItems")
} | {
    "`if` of other schemas": [
        (schema, f"if at {place}, expected the value of one property of an object, whose values an enum lists")
        for schema, place in (
            ({"if": {}, "then": STRING}, "#"), (KINDS | {"if": {"properties": {"x": {"const": 1}}}}, "#"),
            ({"properties": KINDS["properties"], "if": {"properties": {"k": {"const": "a"}}}}, "#"),
            (KINDS | {"if": {"properties": {"k": {"pattern": "a"}}}}, "#"), (KINDS | {"if": with_integer("k")}, "#"),
            (KINDS | {"if": {"properties": {"k": {"const": "a"}}, "required": ["x"]}}, "#"),
            (KINDS | {"if": {"properties": {"k": {"const": "a"}, "x": {"const": 1}}}}, "#"),
            (KINDS | {"allOf": [A, {"if": {"minProperties": 1}}]}, "#/allOf/1"),
        )
    ] + [
        (KINDS | {"if": {"properties": {"k": {"const": "a"}}}, "else": {"uniqueItems": True}},
         f"uniqueItems at #/else, expected {NO_GRAMMAR}"),
        (KINDS | {"allOf": [{"if": {"properties": {"k": {"const": "a"}}}}, {"uniqueItems": True}]},
         f"uniqueItems at #/allOf/1, expected {NO_GRAMMAR}"),
    ],
    "`not` of other schemas": [
        (schema, "not at #, expected types, values out of an enum next to it, or required properties of an object")
        for schema in (
            {"not": {}}, {"type": "number", "not": INTEGER}, {"not": {"const": 1}}, {"not": {"required": ["a"]}},
            {"not": {"type": "string", "minLength": 2}},
        )
    ] + [
        ({"type": "null", "not": {"type": "null"}}, "not at #, expected a schema that a value meets"),
        ({"enum": [1], "not": {"enum": [1.0, 2]}}, "not at #, expected a schema that a value meets"),
    ],
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
    "names with control characters next to properties of any name": [
        ({"properties": {"a\n": INTEGER}, "additionalProperties": STRING},
         'property "a\\n" at #, expected no control characters where names are free'),
    ],
    "`unevaluatedProperties` or `unevaluatedItems` with choices": [
        ({"anyOf": [A, CAT], "unevaluatedProperties": False},
         "unevaluatedProperties at #, expected none with choices or other properties"),
        ({"allOf": [A], "unevaluatedProperties": INTEGER},
         "unevaluatedProperties at #, expected true or false with $ref, allOf, anyOf, oneOf"),
        ({"allOf": [of_array()], "unevaluatedItems": False}, "unevaluatedItems at #, expected none with $ref, allOf, anyOf, oneOf"),
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
    "`minProperties`, `maxProperties` with several optional properties": [
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, "min/maxProperties only supported when "),
    ],
    "recursion through keywords with `$ref`": [
        (closed(a={"$ref": "#", "required": ["a"]}), "circular references with sibling keys are not supported: "),
    ],
}  # fmt: skip


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
