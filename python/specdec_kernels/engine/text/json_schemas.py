"""JSON schemas: moving one into another, and which of them a text is held to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from . import schema_patterns
from .schema_patterns import FORMATS, REFUSED_FORMATS

Schema = Any  # a dict or a bool

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

REFUSED = (
    *("$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies", "dependentRequired"),
    *("dependentSchemas", "else", "if", "maxContains", "minContains", "not", "then", "uniqueItems"),
)
CHOICES = ("$ref", "const", "enum", "allOf", "anyOf", "oneOf")
KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ASSERTIONS = {*CHOICES, "type", *(name for names in KEYWORDS.values() for name in names)}
MOST_MULTIPLES = 1000  # a multiple is a state of the grammar for each remainder, or a value
MOST_DEPTH = 8  # of objects in objects that tell the schemas of oneOf apart
INT64 = 2**63


def held_to(schema: Schema) -> dict[str, Any]:
    """Return a schema of xgrammar for texts that a JSON schema accepts: of all of them, or of some.

    Some: objects whose `additionalProperties` are not given have no others; a `pattern` is that of the whole string;
    a schema without `type` accepts the types that its keywords are about.

    Raises:
        ValueError: the keyword and the place of what no grammar here holds to.
    """
    return Conversion(schema).whole()


def refused(keyword: str, place: str, expected: str) -> ValueError:
    return ValueError(f"json_schema has {keyword} at {place}, expected {expected}")


class Conversion:
    """The conversion of one schema to one that xgrammar holds to."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.names: dict[str, str] = {}  # of places that are referred to
        self.definitions: dict[str, dict[str, Any]] = {}
        self.entered = {"#"}  # places since the last part of the text

    def whole(self) -> dict[str, Any]:
        converted = self.convert(self.root, "#")
        return converted | ({"$defs": self.definitions} if self.definitions else {})

    def convert(self, schema: Schema, place: str) -> dict[str, Any]:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise refused(shown(schema), place, "a schema that a value meets")
        for keyword in REFUSED:
            if keyword in schema and schema[keyword] is not False:
                raise refused(keyword, place, "none (no grammar holds to it)")
        if "$id" in schema and place != "#":
            raise refused("$id", place, "none but at #")
        chosen = next((keyword for keyword in CHOICES if keyword in schema), None)
        if chosen is None:
            return self.by_type(schema, place)
        for keyword in schema:
            if (
                keyword in ASSERTIONS
                and keyword != chosen
                and (keyword, chosen) not in (("type", "enum"), ("type", "const"))
            ):
                raise refused(keyword, place, f"none beside {chosen}")
        value = schema[chosen]
        if chosen == "$ref":
            return {"$ref": f"#/$defs/{self.definition(value, place)}"}
        if chosen in ("enum", "const"):
            return self.values(schema, place)
        if not isinstance(value, list) or not value:
            raise refused(f"{chosen} {shown(value)}", place, "a list of schemas")
        if chosen == "allOf" and len(value) > 1:
            raise refused("allOf", place, "one schema in it")
        for i, one in enumerate(value):
            for other in range(i) if chosen == "oneOf" else ():
                if not self.disjoint(one, value[other]):
                    raise refused("oneOf", place, f"schemas that no value meets together (not {other} and {i})")
        converted = [self.convert(one, f"{place}/{chosen}/{i}") for i, one in enumerate(value)]
        return converted[0] if len(converted) == 1 else {"anyOf": converted}

    # --- references

    def definition(self, reference: Any, place: str) -> str:
        """Return the name of what a reference refers to, converted."""
        target = self.target(reference, place)
        if reference in self.entered:
            raise refused(f"$ref {shown(reference)}", place, "an object or an array before a schema repeats")
        if reference not in self.names:
            self.names[reference] = name = str(len(self.names))
            self.definitions[name] = {}  # keeps the order of the names
            self.entered.add(reference)
            self.definitions[name] = self.convert(target, reference)
            self.entered.discard(reference)
        return self.names[reference]

    def target(self, reference: Any, place: str) -> Schema:
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

    def inside(self, schema: Schema, place: str) -> dict[str, Any]:
        """Convert the schema of a part of an object or an array."""
        entered, self.entered = self.entered, set()
        converted = self.convert(schema, place)
        self.entered = entered
        return converted

    # --- values

    def values(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        keyword = "enum" if "enum" in schema else "const"
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        if not isinstance(values, list):
            raise refused(f"enum {shown(values)}", place, "a list of values")
        types = self.types(schema, place)
        kept = [value for value in values if not types or any(is_of_type(value, one) for one in types)]
        if not kept:
            raise refused(keyword, place, "a value of its type")
        return {"enum": kept}

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
        a, b = self.resolved(a), self.resolved(b)
        if depth == 0 or not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        for one, other in ((a, b), (b, a)):
            branches = one.get("anyOf", one.get("oneOf"))
            if isinstance(branches, list) and branches:
                return all(self.disjoint(branch, other, depth - 1) for branch in branches)
        values = [one.get("enum", [one["const"]] if "const" in one else None) for one in (a, b)]
        if all(isinstance(one, list) for one in values):
            return not {as_key(value) for value in values[0]} & {as_key(value) for value in values[1]}
        kinds = [kinds_of(one) for one in (a, b)]
        if all(kinds) and not kinds[0] & kinds[1]:
            return True
        if kinds != [{"object"}, {"object"}]:
            return False
        return any(
            self.disjoint(a["properties"][name], b["properties"][name], depth - 1)
            for name in a.get("required", [])
            if name in b.get("required", []) and name in a.get("properties", {}) and name in b.get("properties", {})
        )

    def resolved(self, schema: Schema) -> Schema:
        """Return a schema or, if it is a reference, what that refers to."""
        for _ in range(MOST_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"], "#")
        return {}

    # --- types

    def by_type(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        types = self.types(schema, place)
        types = types or [kind for kind, names in KEYWORDS.items() if any(name in schema for name in names)]
        convert = {"string": self.string, "array": self.array, "object": self.object}
        each = [
            convert[one](schema, place)
            if one in convert
            else self.number(schema, place, one)
            if one in ("integer", "number")
            else {"type": one}
            for one in types
        ]
        return {"anyOf": each} if len(each) > 1 else each[0] if each else {}

    def number(self, schema: dict[str, Any], place: str, kind: str) -> dict[str, Any]:
        bounds = {name: bound(schema, name, place) for name in KEYWORDS["number"] if name in schema}
        multiple = bounds.pop("multipleOf", None)
        low = [(value, "exclusive" in name) for name, value in bounds.items() if name.endswith("inimum")]
        high = [(value, "exclusive" in name) for name, value in bounds.items() if name.endswith("aximum")]
        if kind == "number":
            if multiple is not None:
                raise refused("multipleOf", place, "none with type number")
            least, most = max(low, default=None), min(high, key=lambda one: (one[0], not one[1]), default=None)
            empty = least and most and (least[0] > most[0] or (least[0] == most[0] and (least[1] or most[1])))
            if empty:
                raise refused("bounds", place, "a number within them")
            for value in bounds.values():
                if round(value, 6) != value:
                    raise refused(f"bound {value}", place, "at most 6 decimals")
            converted = {"type": "number"}
            for found, name in ((least, "Minimum"), (most, "Maximum")):
                if found:
                    converted["exclusive" + name if found[1] else name.lower()] = found[0]
            return converted
        first = max((math.floor(value) + 1 if over else math.ceil(value) for value, over in low), default=None)
        last = min((math.ceil(value) - 1 if under else math.floor(value) for value, under in high), default=None)
        if first is not None and last is not None and first > last:
            raise refused("bounds", place, "an integer within them")
        for value in (first, last):
            if value is not None and not -INT64 < value < INT64:
                raise refused("bounds", place, "64-bit integers")
        limits = {name: value for name, value in (("minimum", first), ("maximum", last)) if value is not None}
        if multiple is None or multiple == 1:
            return {"type": "integer", **limits}
        if multiple != int(multiple) or multiple < 1 or (multiple > MOST_MULTIPLES and len(limits) < 2):
            raise refused(f"multipleOf {multiple}", place, f"an integer from 1 to {MOST_MULTIPLES}")
        if not limits:
            return {"type": "integer", "multipleOf": int(multiple)}
        if first is None or last is None:
            raise refused("multipleOf", place, "both bounds beside it, or none")
        multiples = range(-(-first // int(multiple)) * int(multiple), last + 1, int(multiple))
        if not 0 < len(multiples) <= MOST_MULTIPLES:
            raise refused("multipleOf", place, f"1 to {MOST_MULTIPLES} multiples within the bounds")
        return {"enum": list(multiples)}

    def string(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        least, most = limits_of(schema, "minLength", "maxLength", place)
        has_length = least > 0 or most is not None
        pattern, format = schema.get("pattern"), schema.get("format")
        if format in REFUSED_FORMATS:
            raise refused(f"format {shown(format)}", place, "one of " + ", ".join(FORMATS))
        known = isinstance(format, str) and format in FORMATS
        if pattern is not None and not isinstance(pattern, str):
            raise refused(f"pattern {shown(pattern)}", place, "a string")
        names = ["pattern"] * (pattern is not None) + ["format"] * known
        if len(names) == 2 or (names and has_length):
            other = "format" if len(names) == 2 else "minLength" if least else "maxLength"
            raise refused(other, place, f"none beside {names[0]}")
        if pattern is not None:
            try:
                return {"type": "string", "pattern": schema_patterns.checked(pattern)}
            except ValueError as error:
                raise refused(f"pattern {shown(pattern)}", place, f"none with {shown(str(error))}") from error
        if known:
            return {"type": "string", "pattern": schema_patterns.checked(FORMATS[str(format)], nested=True)}
        return {"type": "string"} | ({"pattern": schema_patterns.of_length(least, most)} if has_length else {})

    def array(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        least, most = limits_of(schema, "minItems", "maxItems", place)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise refused(f"prefixItems {shown(prefix)}", place, "a list of schemas")
        prefix = prefix if most is None else prefix[:most]
        name = "unevaluatedItems" if "items" not in schema and "unevaluatedItems" in schema else "items"
        items = schema.get(name, not prefix or least > len(prefix))
        if not is_schema(items):
            raise refused(f"{name} {shown(items)}", place, "a schema")
        if items is False and least > len(prefix):
            raise refused("minItems", place, f"at most {len(prefix)}")
        if items is False and not prefix:
            items, most = True, 0
        converted: dict[str, Any] = {"type": "array"}
        if prefix:
            converted["prefixItems"] = [self.inside(one, f"{place}/prefixItems/{i}") for i, one in enumerate(prefix)]
        converted["items"] = items and self.inside(items, f"{place}/{name}")
        if least:
            converted["minItems"] = least
        if most is not None and (items is not False or most < len(prefix)):
            converted["maxItems"] = most
        return converted

    def object(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        least, most = limits_of(schema, "minProperties", "maxProperties", place)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        patterns, of_names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        for name, value in (("properties", properties), ("patternProperties", patterns)):
            if not isinstance(value, dict):
                raise refused(f"{name} {shown(value)}", place, "an object of schemas")
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise refused(f"required {shown(required)}", place, "a list of names")
        required = list(dict.fromkeys(required))
        is_open = not properties and not patterns and not required
        unevaluated = schema.get("unevaluatedProperties", is_open)
        additional = schema.get("additionalProperties", unevaluated)
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        if not is_schema(additional):
            raise refused(f"additionalProperties {shown(additional)}", place, "a schema")
        if patterns:
            if len(patterns) > 1 or properties or required or additional is not False:
                raise refused("patternProperties", place, "one pattern, and no other names beside it")
            (pattern,) = patterns
        if of_names is not True and (properties or patterns or required):
            raise refused("propertyNames", place, "none beside properties, required or patternProperties")
        for name in required:
            if properties.get(name, others) is False:
                raise refused(f"required {shown(name)}", place, "a property that may be there")
        names = [*properties, *(name for name in required if name not in properties)]
        kept = {
            name: self.inside(one, f"{place}/properties/{escaped(name)}")
            for name, one in ((name, properties.get(name, others)) for name in names)
            if one is not False
        }
        converted: dict[str, Any] = {"type": "object"}
        if kept:
            converted |= {"properties": kept, "required": required}
        is_free = bool(patterns) or additional is not False
        if patterns:
            at = f"{place}/patternProperties/{escaped(pattern)}"
            key = self.string({"pattern": pattern}, at)["pattern"]
            converted |= {"patternProperties": {key: self.inside(patterns[pattern], at)}, "additionalProperties": False}
        elif additional is False:
            converted["additionalProperties"] = False
        elif names:  # a name with an escape could be that of a property
            others_pattern = schema_patterns.other_names(names)
            value = self.inside(additional, f"{place}/additionalProperties")
            converted |= {"patternProperties": {others_pattern: value}, "additionalProperties": False}
        else:
            converted["additionalProperties"] = self.inside(additional, f"{place}/additionalProperties")
            if of_names is not True:
                converted["propertyNames"] = self.names_of(of_names, f"{place}/propertyNames")
        least = 0 if least <= len(required) else least
        if (most is not None and most < len(required)) or (not is_free and least > len(kept)):
            raise refused("minProperties" if least else "maxProperties", place, "as many properties as there may be")
        if is_free and (least > 1 or (kept and (least or most is not None))):
            # A text may name a property twice.
            raise refused("minProperties" if least else "maxProperties", place, "none where names are free")
        if not is_free and not kept:
            most = None
        return (
            converted | ({"minProperties": least} if least else {}) | ({} if most is None else {"maxProperties": most})
        )

    def names_of(self, schema: Schema, place: str) -> dict[str, Any]:
        """Convert the schema of the names of an object's properties."""
        if isinstance(schema, dict) and "type" not in schema and not any(name in schema for name in CHOICES):
            schema = schema | {"type": "string"}
        converted = self.convert(schema, place)
        while "$ref" in converted:
            converted = self.definitions[converted["$ref"].rpartition("/")[2]]
        if converted.get("type") == "string":
            return converted
        names = [one for one in converted.get("enum", []) if isinstance(one, str)]
        if not names:
            raise refused("propertyNames", place, "a schema of strings")
        return {"enum": names}


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def bound(schema: dict[str, Any], name: str, place: str) -> int | float:
    value = schema[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refused(f"{name} {shown(value)}", place, "a number")
    return value


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


def as_key(value: Any) -> str:
    """Return a text that two values share if JSON Schema holds them for equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(as_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{json.dumps(name)}:{as_key(one)}" for name, one in value.items())) + "}"
    return json.dumps(value)
