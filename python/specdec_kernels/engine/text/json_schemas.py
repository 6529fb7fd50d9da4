"""JSON schemas: moving one into another, and rewriting one so that llguidance holds texts to it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from .patterns import FORMATS, REFUSED_FORMATS, Unsupported, canonical

Schema = Any  # a dict or a bool

DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
# Keywords whose value is a schema, a list of schemas, or an object of them.
ONE = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
OBJECTS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Schema, str], Schema], place: str) -> dict[str, Any]:
    """Return a schema with `change(subschema, place)` in the place of each direct subschema.

    Values that are no schemas stay: data (`enum`, `const`, `default`), and names in `dependencies`.
    """
    changed = dict(schema)
    for name, value in schema.items():
        at = f"{place}/{escaped(name)}"
        if name in OBJECTS and isinstance(value, dict):
            changed[name] = {
                key: change(one, f"{at}/{escaped(key)}") if is_schema(one) else one for key, one in value.items()
            }
        elif name in LISTS and isinstance(value, list):
            changed[name] = [change(one, f"{at}/{i}") if is_schema(one) else one for i, one in enumerate(value)]
        elif name in ONE and is_schema(value):
            changed[name] = change(value, at)
    return changed


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def moved(schema: Schema, place: str) -> Schema:
    """Return a schema whose references to places within itself hold once it is at `place` of another schema."""

    def move(one: Schema, at: str) -> Schema:
        if isinstance(one, bool):
            return one
        changed = with_subschemas(one, move, at)
        if at == "#":
            changed.pop("$id", None)
        reference = changed.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            changed["$ref"] = place + reference[1:]
        return changed

    return move(schema, "#")


# --- schemas that a text is held to

REFUSED = ("$dynamicRef", "$recursiveRef", "contains", "maxContains", "minContains", "uniqueItems")
CONDITION = ("if", "then", "else")
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")  # schemas that the same value meets
KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties", *DEPENDENT),
    ),
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ASSERTIONS = {*IN_PLACE, "enum", "const", "type", *(name for names in KEYWORDS.values() for name in names)}
MOST_DEPTH = 8  # of objects in objects that tell the schemas of oneOf apart
LARGEST_BOTH = 10**15  # the lower bound is at most this, and the upper one at least its negative
SMALLEST_STEP = 1e-9  # from an excluded number to the nearest one
MOST_COMPARED = 20_000  # pairs of schemas
ESCAPED = re.compile(r"[\x00-\x1f\x7f]")  # characters that a JSON string may write in several ways


def held_to(schema: Schema) -> dict[str, Any]:
    """Return a schema of llguidance for texts that a JSON schema accepts: of all of them, or of some.

    Some: objects that say nothing of additional properties have none; lists that say nothing of additional items have
    none after their prefix; a schema without `type` accepts the types that its keywords are about.

    Raises:
        ValueError: the keyword and the place of what is not held to.
    """
    return Conversion(schema).whole()


def refused(keyword: str, place: str, expected: str) -> ValueError:
    return ValueError(f"json_schema has {keyword} at {place}, expected {expected}")


@dataclass
class Names:
    """What a schema says of the names of an object's properties, by itself and by schemas that the same value meets."""

    given: dict[str, None] = field(default_factory=dict)  # in order
    evaluated: dict[str, None] = field(default_factory=dict)  # those that `properties` has
    patterns: dict[str, None] = field(default_factory=dict)
    has_others: bool = False  # it says of others which values they have
    has_choices: bool = False  # whether some of it counts depends on the value


class Placed(dict[str, Any]):
    """A schema with the place where it was given, for errors."""

    def __init__(self, schema: dict[str, Any], place: str) -> None:
        super().__init__(schema)
        self.place = place


class Conversion:
    """The conversion of one schema to one that llguidance holds to."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.names: dict[tuple[str, bool], str] = {}  # of definitions, by the place referred to, and whether it is open
        self.definitions: dict[str, Schema] = {}
        self.entered = {"#"}  # places since the last part of the text
        self.num_compared = 0

    def whole(self) -> dict[str, Any]:
        """Return the root, converted, with what it refers to."""
        if self.root is False:
            raise refused("false", "#", "a schema that a value meets")
        converted = self.convert(self.root, "#")
        return ({} if converted is True else converted) | ({"$defs": self.definitions} if self.definitions else {})

    def convert(self, schema: Schema, place: str, *, is_open: bool = False) -> Schema:
        """Convert the schema at a place.

        Args:
            schema: there.
            place: a JSON pointer.
            is_open: the value meets other schemas too, so that this one adds nothing of its own.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refused(shown(schema), place, "a schema")
        place = schema.place if isinstance(schema, Placed) else place
        for keyword in REFUSED:
            if keyword in schema and schema[keyword] is not False:
                raise refused(keyword, place, "none (no grammar holds to it)")
        schema = self.without_conditions(self.without_not(schema, place), place)
        if "$id" in schema and place != "#":
            raise refused("$id", place, "none but at #")
        asserted = [keyword for keyword in schema if keyword in ASSERTIONS]
        if asserted == ["$ref"]:
            return {"$ref": self.definition(schema["$ref"], place, is_open=is_open)}
        if len(asserted) == 1 and asserted[0] in IN_PLACE:
            branches = self.branches(schema, asserted[0], place, is_open=is_open or asserted[0] == "allOf")
            closing = [] if is_open or asserted[0] != "allOf" else self.closing(schema, place)
            if len(branches) == 1 and not closing:
                return branches[0]
            return {"allOf" if asserted[0] == "allOf" else "anyOf": branches + closing}
        return self.together(schema, place, is_open=is_open)

    def together(self, schema: dict[str, Any], place: str, *, is_open: bool) -> dict[str, Any]:
        """Convert a schema of several keywords; the value meets each of them."""
        types = self.types(schema, place)
        if not types and not is_open and not any(keyword in schema for keyword in (*IN_PLACE, "enum", "const")):
            types = [kind for kind, names in KEYWORDS.items() if any(name in schema for name in names)]
        converted: dict[str, Any] = {"type": types[0] if len(types) == 1 else types} if types else {}
        also: list[Schema] = []  # what no keyword of its own says
        has_other = any(keyword in schema for keyword in IN_PLACE)
        for keyword, value in schema.items():  # in order, which is that of the properties
            if keyword == "$ref":
                converted["$ref"] = self.definition(value, place, is_open=True)
            elif keyword in ("anyOf", "oneOf"):
                also.append({"anyOf": self.branches(schema, keyword, place, is_open=True)})
            elif keyword == "allOf":
                also += self.branches(schema, keyword, place, is_open=True)
            elif keyword == "enum" and not (isinstance(value, list) and value):
                raise refused(f"enum {shown(value)}", place, "a list of values")
            elif keyword in ("enum", "const"):
                converted[keyword] = value
                if found := next(filter(is_too_long, numbers_of(value)), None):
                    raise refused(f"{keyword} {shown(found)}", place, "at most 53 bits, below 2^63")
        self.number(schema, place, converted, is_open=is_open or has_other)
        self.string(schema, place, converted, also)
        self.array(schema, place, converted, is_open=is_open or has_other)
        self.object(schema, place, converted, also)
        closing = self.closing(schema, place) if not is_open or schema.get("unevaluatedProperties") is False else []
        if closing and not has_other and not also:
            (one,) = closing
            converted["properties"] = one["properties"] | converted.get("properties", {})
            converted["additionalProperties"] = False
        else:
            also += closing
        return converted | ({"allOf": also} if also else {})

    def branches(self, schema: dict[str, Any], keyword: str, place: str, *, is_open: bool) -> list[Schema]:
        """Convert the schemas of `allOf`, `anyOf` or `oneOf`."""
        value = schema[keyword]
        if not isinstance(value, list) or not value:
            raise refused(f"{keyword} {shown(value)}", place, "a list of schemas")
        converted = [self.convert(one, f"{place}/{keyword}/{i}", is_open=is_open) for i, one in enumerate(value)]
        if keyword != "oneOf":
            return converted
        overlap = next(
            ((a, b) for b in range(len(value)) for a in range(b) if not self.disjoint(value[a], value[b])), None
        )
        if overlap is None:
            return converted
        if (name := self.discriminator(value)) is None:
            raise refused("oneOf", place, "schemas that no value meets together (not {} and {})".format(*overlap))
        return [{"allOf": [one, {"required": [name]}]} for one in converted]

    # --- not and if

    def without_not(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Write `not` of types, listed values or required properties in other keywords."""
        if "not" not in schema:
            return schema
        others = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        given = schema["not"] if isinstance(schema["not"], dict) else {}
        asserted = asserted_of(given)
        if asserted == {"type"}:
            types, excluded = self.types(schema, place) or [*TYPES], self.types(given, f"{place}/not")
            if "number" in excluded or "integer" not in excluded or "number" not in types:
                left = [one for one in types if one not in excluded and not (one == "integer" and "number" in excluded)]
                return others | {"type": self.expect_any(left, place)}
        elif asserted in ({"enum"}, {"const"}) and ({"enum", "const"} & {*schema}):
            excluded = [as_key(value) for value in listed(given)]
            del others["enum" if "enum" in others else "const"]
            left = [one for one in listed(schema) if as_key(one) not in excluded]
            return others | {"enum": self.expect_any(left, place)}
        elif asserted == {"required"} and kinds_of(schema) == {"object"}:
            names = required_of(given["required"], "required", f"{place}/not")
            absent = [{"properties": {name: False}} for name in names]
            return others | {"allOf": [*schema.get("allOf", []), {"anyOf": self.expect_any(absent, place)}]}
        raise refused("not", place, "types, values out of an enum next to it, or required properties of an object")

    def expect_any(self, values: list[Any], place: str) -> list[Any]:
        """Return what `not` leaves; refuse it if that is nothing."""
        if not values:
            raise refused("not", place, "a schema that a value meets")
        return values

    def without_conditions(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Write `if` about the values of a property, here and in schemas of `allOf`, as choices between them."""
        conditions: list[tuple[dict[str, Any], str]] = []
        every: list[Schema] = []
        if "if" in schema:
            conditions.append((schema, place))
        for i, one in enumerate(given if isinstance(given := schema.get("allOf"), list) else ()):
            if isinstance(one, dict) and "if" in one and not {*one} & ASSERTIONS:
                conditions.append((one, f"{place}/allOf/{i}"))
            else:
                every.append(Placed(one, f"{place}/allOf/{i}") if isinstance(one, dict) else one)
        if not conditions:
            return schema
        others = {keyword: value for keyword, value in schema.items() if keyword not in (*CONDITION, "allOf")}
        return others | {"allOf": every + [{"anyOf": self.choices(schema, one, at)} for one, at in conditions]}

    def choices(self, schema: dict[str, Any], condition: dict[str, Any], place: str) -> list[Schema]:
        """Return what objects meet under a condition in each case: the values in it, the others, and no value."""
        given = condition["if"] if isinstance(condition["if"], dict) else {}
        properties, needed = given.get("properties"), given.get("required", [])
        own = value if isinstance(value := schema.get("properties"), dict) else {}
        asserted = asserted_of(given)
        name = next(iter(properties), None) if isinstance(properties, dict) and len(properties) == 1 else None
        values = self.values_of(own.get(name)) if name is not None else None
        wanted = self.values_of(given["properties"][name]) if name is not None else None
        is_plain = asserted <= {"properties", "required", "type"} and given.get("type", "object") == "object"
        is_plain = is_plain and kinds_of(schema) == {"object"} and needed in ([], [name])
        if not is_plain or values is None or wanted is None:
            raise refused("if", place, "the value of one property of an object, whose values an enum lists")
        keys = {as_key(value) for value in wanted}
        branches = {keyword: condition.get(keyword, True) for keyword in CONDITION[1:]}
        then, otherwise = (
            Placed(one, f"{place}/{keyword}") if isinstance(one, dict) else one for keyword, one in branches.items()
        )
        parts = [
            (then, [value for value in values if as_key(value) in keys]),
            (otherwise, [value for value in values if as_key(value) not in keys]),
        ]
        found: list[Schema] = [
            {"allOf": [{"properties": {name: {"enum": some}}, "required": [name]}, one]} for one, some in parts if some
        ]
        if name not in required_of(schema.get("required", []), "required", place):
            found.append({"allOf": [{"properties": {name: False}}, otherwise if needed else then]})
        return found

    def values_of(self, schema: Schema) -> list[Any] | None:
        """Return the values that a schema lists, if all that it asserts is that, or a type; None: it lists none."""
        schema = self.resolved(schema)
        if not isinstance(schema, dict) or not ({*schema} & {"enum", "const"} or schema.get("type") == "boolean"):
            return None
        values = listed(schema) if {*schema} & {"enum", "const"} else [False, True]
        if not isinstance(values, list) or asserted_of(schema) - {"enum", "const", "type"}:
            return None
        types = self.types(schema, "#")
        return [one for one in values if not types or any(is_of_type(one, kind) for kind in types)]

    # --- references

    def definition(self, reference: Any, place: str, *, is_open: bool) -> str:
        """Return the reference to a definition of what a reference refers to, converted."""
        target = self.target(reference, place)
        if reference in self.entered:
            raise refused(f"$ref {shown(reference)}", place, "an object or an array before a schema repeats")
        key = reference, is_open
        if key not in self.names:
            self.names[key] = name = str(len(self.names))
            self.entered.add(reference)
            self.definitions[name] = self.convert(target, reference, is_open=is_open)
            self.entered.discard(reference)
        return f"#/$defs/{self.names[key]}"

    def target(self, reference: Any, place: str) -> Schema:
        """Return what a reference refers to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refused(f"$ref {shown(reference)}", place, '"#" or "#/" and a place in the schema')
        found = self.root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise refused(f"$ref {shown(reference)}", place, "a place in the schema")
        return found

    def inside(self, schema: Schema, place: str) -> Schema:
        """Convert the schema of a part of an object or an array."""
        entered, self.entered = self.entered, set()
        converted = self.convert(schema, place)
        self.entered = entered
        return converted

    # --- values

    def types(self, schema: dict[str, Any], place: str) -> list[str]:
        """Return the types that a schema names; empty: none."""
        if "type" not in schema:
            return []
        given = schema["type"]
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(one, str) and one in TYPES for one in types):
            raise refused(f"type {shown(given)}", place, "one of " + ", ".join(TYPES))
        return [one for one in dict.fromkeys(types) if not (one == "integer" and "number" in types)]

    def disjoint(self, a: Schema, b: Schema, depth: int = MOST_DEPTH) -> bool:
        """Return whether it is certain that no value meets both schemas."""
        self.num_compared += 1
        if self.num_compared > MOST_COMPARED:
            return False
        a, b = self.resolved(a), self.resolved(b)
        if depth == 0 or not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        for one, other in ((a, b), (b, a)):
            for keyword, every in (("anyOf", all), ("oneOf", all), ("allOf", any)):
                branches = one.get(keyword)
                if isinstance(branches, list) and every(self.disjoint(each, other, depth - 1) for each in branches):
                    return True
        if all("enum" in one or "const" in one for one in (a, b)):
            keys = [{as_key(value) for value in one.get("enum", [one.get("const")])} for one in (a, b)]
            return not keys[0] & keys[1]
        kinds = [kinds_of(one) for one in (a, b)]
        if all(kinds) and not kinds[0] & kinds[1]:
            return True
        if kinds != [{"object"}, {"object"}]:
            return False
        return any(
            name in b.get("required", []) and self.disjoint_at(name, a, b, depth - 1) for name in a.get("required", [])
        )

    def disjoint_at(self, name: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Return whether it is certain that no property of this name meets both schemas of objects."""
        each = [one.get("properties", {}).get(name, True) for one in (a, b)]
        return self.disjoint(each[0], each[1], depth)

    def discriminator(self, schemas: list[Schema]) -> str | None:
        """Return a property that tells objects of all schemas apart, if they have it."""
        each = [self.resolved(one) for one in schemas]
        if not all(isinstance(one, dict) and kinds_of(one) == {"object"} for one in each):
            return None
        return next(
            (
                name
                for name in each[0].get("properties", {})
                if all(self.disjoint_at(name, a, b, MOST_DEPTH) for a, b in combinations(each, 2))
            ),
            None,
        )

    def resolved(self, schema: Schema) -> Schema:
        """Return a schema or, if it is a reference, what that refers to."""
        for _ in range(MOST_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"], "#")
        return {}

    # --- types

    def number(self, schema: dict[str, Any], place: str, converted: dict[str, Any], *, is_open: bool) -> None:
        given = {name: schema[name] for name in KEYWORDS["number"] if name in schema}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise refused(f"{name} {shown(value)}", place, "a number")
            if abs(value) > (2**53 if value == int(value) else 10**12):
                raise refused(f"{name} {shown(value)}", place, "at most 2^53 (10^12 with decimals)")
            if name == "multipleOf" and value <= 0:
                raise refused(f"{name} {shown(value)}", place, "a number above 0")
        low = [value for name, value in given.items() if name.endswith("inimum")]
        high = [value for name, value in given.items() if name.endswith("aximum")]
        if max(low, default=0) > LARGEST_BOTH or min(high, default=0) < -LARGEST_BOTH:
            raise refused("bounds", place, "numbers of fewer than 16 digits within them")
        is_narrow = is_open or (bool(low and high) and min(high) - max(low) <= 1)
        for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            if is_narrow and name in given:
                # llguidance would allow an integer that is excluded here if the other bound is less than 1 from it.
                value = given.pop(name)
                nearest, one = value + sign * max(SMALLEST_STEP, abs(value) * 2**-48), name[9:].lower()
                given[one] = nearest if one not in given else max(nearest, given[one], key=lambda each: sign * each)
        converted |= given

    def string(self, schema: dict[str, Any], place: str, converted: dict[str, Any], also: list[Schema]) -> None:
        least, most = limits_of(schema, "minLength", "maxLength", place)
        converted |= limits(minLength=least, maxLength=most)
        if "pattern" in schema:
            converted["pattern"] = self.pattern(schema["pattern"], place)
        name = schema.get("format")
        if name in REFUSED_FORMATS:
            raise refused(f"format {shown(name)}", place, "one of " + ", ".join(FORMATS))
        if isinstance(name, str) and name in FORMATS:
            also.append({"pattern": f"^(?:{FORMATS[name]})$"})

    def pattern(self, pattern: Any, place: str) -> str:
        """Return a pattern of strings for llguidance."""
        if not isinstance(pattern, str):
            raise refused(f"pattern {shown(pattern)}", place, "a string")
        try:
            return f"^(?:{canonical(pattern, is_search=True)})$"
        except Unsupported as error:
            raise refused(f"pattern {shown(pattern)}", place, f"none with {error}") from error
        except ValueError as error:
            raise refused(f"pattern {shown(pattern)}", place, f"a regular expression ({error})") from error

    def array(self, schema: dict[str, Any], place: str, converted: dict[str, Any], *, is_open: bool) -> None:
        least, most = limits_of(schema, "minItems", "maxItems", place)
        converted |= limits(minItems=least, maxItems=most)
        prefix_name, name = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # of older drafts
            prefix_name, name = "items", "additionalItems"
        if name not in schema and "unevaluatedItems" in schema:
            if is_open:
                raise refused("unevaluatedItems", place, f"none with {', '.join(IN_PLACE)}")
            name = "unevaluatedItems"
        prefix = schema.get(prefix_name, [])
        if not isinstance(prefix, list):
            raise refused(f"prefixItems {shown(prefix)}", place, "a list of schemas")
        if prefix:
            converted["prefixItems"] = [self.inside(one, f"{place}/{prefix_name}/{i}") for i, one in enumerate(prefix)]
        if name in schema:
            converted["items"] = self.inside(schema[name], f"{place}/{name}")
        elif prefix and least <= len(prefix) and not is_open:
            converted["items"] = False

    def object(self, schema: dict[str, Any], place: str, converted: dict[str, Any], also: list[Schema]) -> None:
        least, most = limits_of(schema, "minProperties", "maxProperties", place)
        converted |= limits(minProperties=least, maxProperties=most)
        if "required" in schema:
            converted["required"] = required_of(schema["required"], "required", place)
        for name in ("properties", "patternProperties"):
            value = schema.get(name, {})
            if not isinstance(value, dict):
                raise refused(f"{name} {shown(value)}", place, "an object of schemas")
            if value:
                converted[name] = {
                    self.pattern(key, at) if name == "patternProperties" else key: self.inside(one, at)
                    for key, one, at in ((key, one, f"{place}/{name}/{escaped(key)}") for key, one in value.items())
                }
        others = schema.get("additionalProperties")
        if others is None and not isinstance(schema.get("unevaluatedProperties", True), bool):
            if any(keyword in schema for keyword in (*IN_PLACE, *DEPENDENT)):
                raise refused("unevaluatedProperties", place, f"true or false with {', '.join(IN_PLACE)}")
            others = schema["unevaluatedProperties"]
        if others is not None:
            converted["additionalProperties"] = self.inside(others, f"{place}/additionalProperties")
        names = Names()
        self.collect(schema, place, names, set())
        is_free = names.has_others or bool(names.patterns) or not names.given
        if is_free and least > max(1, len(converted.get("required", ())) + 1):
            raise refused("minProperties", place, "at most 1 that is not required where names are free")  # or twice one
        if is_free and (found := next(filter(ESCAPED.search, names.given), None)) is not None:
            raise refused(f"property {shown(found)}", place, "no control characters where names are free")
        if "propertyNames" in schema:
            also += self.names_of(schema["propertyNames"], f"{place}/propertyNames")
        for keyword in DEPENDENT:
            if keyword in schema:
                also += self.dependent(schema[keyword], keyword, place)

    def names_of(self, schema: Schema, place: str) -> list[Schema]:
        """Convert the schema of the names of an object's properties."""
        given = self.resolved(schema)
        if given is True:
            return []
        asserted = {*given} & ASSERTIONS - {"type"} if isinstance(given, dict) else {""}
        if asserted in ({"enum"}, {"const"}) and isinstance(values := given.get("enum", [given.get("const")]), list):
            names = dict.fromkeys((one for one in values if isinstance(one, str)), True)
            return [{"properties": names, "additionalProperties": False}]
        if not asserted <= {*KEYWORDS["string"]} or given.get("type", "string") != "string":
            raise refused("propertyNames", place, "an enum, or keywords of strings")
        converted: dict[str, Any] = {}
        also: list[Schema] = []
        self.string(given, place, converted, also)
        least, most = converted.pop("minLength", 0), converted.pop("maxLength", "")
        patterns = [one["pattern"] for one in (converted, *also) if "pattern" in one]
        if least or most != "":
            patterns.append(f"^(?s:.{{{least},{most}}})$")
        if len(patterns) > 1:
            raise refused("propertyNames", place, "one of pattern, format and lengths")
        return [{"patternProperties": {one: True}, "additionalProperties": False} for one in patterns]

    def dependent(self, value: Any, keyword: str, place: str) -> list[Schema]:
        """Convert `dependentRequired`, `dependentSchemas` or `dependencies`: lists of names, or schemas, by names."""
        if not isinstance(value, dict):
            raise refused(f"{keyword} {shown(value)}", place, "an object")
        converted = []
        for name, one in value.items():
            at = f"{place}/{keyword}/{escaped(name)}"
            is_list = isinstance(one, list)
            if is_list != (keyword == "dependentRequired") and keyword != "dependencies":
                raise refused(f"{keyword} {shown(one)}", place, "a schema" if is_list else "a list of names")
            needed = required_of(one, keyword, place) if is_list else []
            also = [] if is_list else [self.convert(one, at, is_open=True)]
            present = {"required": list(dict.fromkeys([name, *needed]))} | ({"allOf": also} if also else {})
            converted.append({"anyOf": [{"properties": {name: False}}, present]})
        return converted

    # --- closing objects

    def closing(self, schema: dict[str, Any], place: str) -> list[dict[str, Any]]:
        """Return a schema that allows no properties but those that this one names; empty: it says something of others.

        Raises:
            ValueError: `unevaluatedProperties` is false with additional properties of a schema for the same value.
        """
        names = Names()
        self.collect(schema, place, names, set())
        is_closed = schema.get("unevaluatedProperties") is False
        if is_closed and (names.has_others or names.has_choices):
            raise refused("unevaluatedProperties", place, "none with choices or other properties")
        if not is_closed and (
            names.has_others or names.patterns or not names.given or "additionalProperties" in schema
        ):
            return []
        allowed = names.evaluated if is_closed else names.given
        patterns = {"patternProperties": dict.fromkeys(names.patterns, True)} if names.patterns else {}
        return [{"properties": dict.fromkeys(allowed, True), **patterns, "additionalProperties": False}]

    def collect(self, schema: Schema, place: str, names: Names, seen: set[str]) -> None:
        """Add what a schema says of the names of properties to `names`."""
        if not isinstance(schema, dict):
            return
        if isinstance(value := schema.get("properties"), dict):
            names.given |= dict.fromkeys(value)
            names.evaluated |= dict.fromkeys(value)
        if isinstance(value := schema.get("patternProperties"), dict):
            names.patterns |= {self.pattern(key, place): None for key in value}
        names.given |= dict.fromkeys(required_of(schema.get("required", []), "required", place))
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
        names.has_others |= others is not False
        for keyword in IN_PLACE[1:]:
            names.has_choices |= keyword != "allOf" and keyword in schema
            for one in value if isinstance(value := schema.get(keyword), list) else ():
                self.collect(one, place, names, seen)
        for keyword in CONDITION:
            names.has_choices |= keyword in schema
            self.collect(schema.get(keyword), place, names, seen)
        for keyword in DEPENDENT:
            for one in value.values() if isinstance(value := schema.get(keyword), dict) else ():
                names.has_choices |= not isinstance(one, list)
                names.given |= dict.fromkeys(required_of(one, keyword, place)) if isinstance(one, list) else {}
                self.collect(one, place, names, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            self.collect(self.target(reference, place), place, names, seen | {reference})


def numbers_of(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value."""
    if isinstance(value, int | float):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers_of(one)


def is_too_long(number: int | float) -> bool:
    """Return whether llguidance, which reads numbers as float64, would read another one."""
    return abs(number) >= 2**63 or int(float(number)) != int(number)


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def limits(**values: int | None) -> dict[str, int]:
    """Return the limits that ask for something."""
    return {name: value for name, value in values.items() if value is not None and (value or "max" in name)}


def required_of(value: Any, keyword: str, place: str) -> list[str]:
    """Return a list of names, each once."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise refused(f"{keyword} {shown(value)}", place, "a list of names")
    return list(dict.fromkeys(value))


def limits_of(schema: dict[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
    """Return the least and the most of a length."""
    values = []
    for name in (least, most):
        value = schema.get(name)
        if value is not None and not (is_of_type(value, "integer") and value >= 0):
            raise refused(f"{name} {shown(value)}", place, "a length")
        values.append(None if value is None else int(value))
    low, high = values[0] or 0, values[1]
    if high is not None and low > high:
        raise refused(least, place, f"at most {most}, {high}")
    return low, high


def is_of_type(value: Any, kind: str) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and isinstance(value, int | float) and value % 1 == 0
    return kind_of(value) == kind


def kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {type(None): "null", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of values that a schema accepts, integers as numbers; empty: unknown."""
    if "const" in schema or "enum" in schema:
        return {kind_of(value) for value in schema.get("enum", [schema.get("const")])}
    types = schema.get("type", [])
    return {"number" if one == "integer" else one for one in ([types] if isinstance(types, str) else types)}


def asserted_of(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of a schema that ask for something."""
    return {*schema} & {*ASSERTIONS, *CONDITION, *REFUSED, "not"}


def listed(schema: dict[str, Any]) -> Any:
    """Return the values of `enum` or `const`."""
    return schema["enum"] if "enum" in schema else [schema["const"]]


def as_key(value: Any) -> str:
    """Return a text that two values share if JSON Schema holds them for equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(as_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{json.dumps(name)}:{as_key(one)}" for name, one in value.items())) + "}"
    return json.dumps(value)
