"""JSON schemas: places of references, and moving a schema into another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        reference = changed.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            changed["$ref"] = place + reference[1:]
        return changed

    return move(schema, "#")
