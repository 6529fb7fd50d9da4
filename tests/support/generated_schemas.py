"""JSON schemas as generators emit them: Pydantic, zod (its own and zod-to-json-schema's), OpenAI's strict examples."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"  # with a default, so that it is not required
    color: Color | None = None


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tags: dict[Literal["a", "b"], Annotated[int, Field(ge=0, lt=100)]] = {}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    level: Level
    mixed: int | str | None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    n: int


class Times(BaseModel):
    day: datetime.date
    at: datetime.datetime
    hour: datetime.time
    long: datetime.timedelta
    id: uuid.UUID
    site: AnyUrl


class Numbers(BaseModel):
    a: Annotated[int, Field(gt=3, le=12)]
    b: Annotated[float, Field(ge=0.5, lt=1)]
    c: Annotated[int, Field(multiple_of=5)]
    d: decimal.Decimal
    e: Annotated[float, Field(multiple_of=0.5, ge=0)]


class Containers(BaseModel):
    word: Annotated[str, Field(min_length=1, max_length=4, pattern="^[a-z]+$")]
    items: Annotated[list[Annotated[str, Field(max_length=3)]], Field(min_length=1, max_length=2)]
    pair: tuple[int, bool]
    many: tuple[int, ...]
    by_name: dict[str, bool]
    by_code: dict[Annotated[str, Field(pattern="^[A-Z]{2}$")], int]
    whatever: Any


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Tree(BaseModel):
    left: Tree | None = None
    right: Tree | None = None


Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    next: str | None = Field(None, max_length=5)


class Movie(TypedDict, total=False):
    name: str
    year: int


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Pair:
    a: bool
    b: Annotated[str, Field(max_length=2)]


class Pets(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    described: Cat = Field(description="siblings of $ref", examples=[{"kind": "cat"}])
    either: Cat | Dog | None


PYDANTIC = {
    one.__name__: one.model_json_schema()
    for one in (Pets, Strict, Open, Times, Numbers, Containers, Node, Tree, Page[Cat])
} | {
    str(one): TypeAdapter(one).json_schema() for one in (Movie, Point, Pair, list[Level], dict[str, Cat], int | None)
}  # fmt: skip

ZOD_4: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "id": {
            "type": "string",
            "format": "uuid",
            "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
            "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
        },
        "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "count": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "role": {"type": "string", "enum": ["admin", "user"]},
        "one": {"type": "string", "const": "x"},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "byDefault": {"default": True, "type": "boolean"},
        "pair": {"type": "array", "prefixItems": [{"type": "string", "maxLength": 2}, {"type": "number"}]},
        "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        "byRole": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["admin", "user"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["admin", "user"],
        },
        "shape": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"type": "string", "const": kind}, size: {"type": "number", "minimum": 0}},
                    "required": ["kind", size],
                    "additionalProperties": False,
                }
                for kind, size in (("circle", "radius"), ("square", "side"))
            ]
        },
        "both": {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ]
        },
        "half": {"type": "number", "multipleOf": 0.5},
        "anything": {},
    },
    "required": ["id", "age", "name", "role", "one", "maybe", "pair", "record", "byRole", "shape", "both", "half"],
    "additionalProperties": False,
}
ZOD_4_RECURSIVE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$ref": "#/$defs/__schema0",
    "$defs": {
        "__schema0": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "subcategories": {"type": "array", "items": {"$ref": "#/$defs/__schema0"}},
            },
            "required": ["name", "subcategories"],
            "additionalProperties": False,
        }
    },
}
ZOD_3: dict[str, Any] = {  # zod-to-json-schema
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/user",
    "definitions": {
        "user": {
            "type": "object",
            "properties": {
                "email": {"type": "string", "format": "email"},
                "at": {"type": "string", "format": "date-time"},
                "age": {"type": "integer", "exclusiveMinimum": 0},
                "pair": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 2,
                    "items": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
                },
                "rest": {
                    "type": "array",
                    "minItems": 1,
                    "items": [{"type": "boolean"}],
                    "additionalItems": {"type": "integer"},
                },
                "nullable": {"type": ["string", "null"]},
                "mixed": {"type": ["boolean", "integer"]},
                "same": {"$ref": "#/definitions/user/properties/pair"},
                "record": {"type": "object", "additionalProperties": {"type": "number"}},
                "byPattern": {
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "propertyNames": {"minLength": 2, "maxLength": 3},
                },
                "empty": {"type": "object", "properties": {}, "additionalProperties": False},
                "friend": {"$ref": "#/definitions/user"},
            },
            "required": ["email", "age", "pair"],
            "additionalProperties": False,
        }
    },
}
STEPS: dict[str, Any] = {  # OpenAI's guide to structured outputs
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
UI: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "description": "The type of the UI component", "enum": ["div", "button", "form"]},
        "label": {"type": "string", "description": "The label, used for buttons or form fields"},
        "children": {"type": "array", "description": "Nested UI components", "items": {"$ref": "#"}},
        "attributes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
                "additionalProperties": False,
                "required": ["name", "value"],
            },
        },
    },
    "required": ["type", "label", "children", "attributes"],
    "additionalProperties": False,
}
LINKED_LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"linked_list": {"$ref": "#/$defs/linked_list_node"}},
    "$defs": {
        "linked_list_node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "next": {"anyOf": [{"$ref": "#/$defs/linked_list_node"}, {"type": "null"}]},
            },
            "additionalProperties": False,
            "required": ["next", "value"],
        }
    },
    "additionalProperties": False,
    "required": ["linked_list"],
}
CONSTRAINED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "username": {"type": "string", "pattern": "^[a-zA-Z0-9_]+$"},
        "ip": {"type": "string", "format": "ipv4"},
        "temperature": {"type": "number", "minimum": -130, "maximum": 130},
        "unit": {"type": ["string", "null"], "enum": ["F", "C", None]},
        "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 3},
        "address": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"street": {"type": "string", "maxLength": 5}},
                    "additionalProperties": False,
                    "required": ["street"],
                },
                {"$ref": "#/$defs/place"},
            ]
        },
    },
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"number": {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 2}},
            "additionalProperties": False,
            "required": ["number"],
        }
    },
    "additionalProperties": False,
    "required": ["username", "ip", "temperature", "unit", "dates", "address"],
}
GENERATED: dict[str, Any] = PYDANTIC | {
    "zod 4": ZOD_4,
    "zod 4, recursive": ZOD_4_RECURSIVE,
    "zod 3": ZOD_3,
    "OpenAI, steps": STEPS,
    "OpenAI, user interface": UI,
    "OpenAI, linked list": LINKED_LIST,
    "OpenAI, constrained": CONSTRAINED,
}
