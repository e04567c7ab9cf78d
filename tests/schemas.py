"""JSON schemas for the tests: some as people write them, and random ones."""

import json

from effort import tries
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

NAMES = ("id", "name", "a b", "größe", "x", "items")
WORDS = ("red", "green", "", 'with "quotes"', "naïve\n", "\\")
FORMATS = ("date", "uuid", "ipv4", "email")
PATTERNS = (r"^[A-Z]{2}-\d{3}$", r"^a+b?$", r"[xyz]", r"^\w{1,4}$")
short = st.integers(0, 3)


@st.composite
def strings(draw) -> dict:
    kind = draw(st.sampled_from(["free", "length", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS)), "maxLength": 12}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(FORMATS))}
    least = draw(short) if kind == "length" else 0
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 9))}


@st.composite
def numbers(draw) -> dict:
    kind = draw(st.sampled_from(["integer", "number"]))
    least = draw(st.integers(-1000, 1000))
    schema = {"type": kind, "minimum": least, "maximum": least + draw(st.integers(1, 5000))}
    if draw(st.booleans()) and kind == "integer":
        schema |= {"minimum": 0, "multipleOf": draw(st.sampled_from([2, 5, 7]))}
        schema["maximum"] = 10_000
    return schema


values = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from(WORDS))
leaves = st.one_of(
    strings(),
    numbers(),
    st.sampled_from(["boolean", "null"]).map(lambda name: {"type": name}),
    st.just({"type": ["boolean", "null"]}),
    st.lists(values, min_size=1, max_size=4, unique_by=json.dumps).map(lambda of: {"enum": of}),
    values.map(lambda value: {"const": value}),
)


@st.composite
def objects(draw, parts) -> dict:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    schema = {
        "type": "object",
        "properties": {name: draw(parts) for name in names},
        "additionalProperties": False,
    }
    if names:
        schema["required"] = draw(st.lists(st.sampled_from(names), unique=True))
    if draw(st.integers(0, 4)) == 0:
        schema["patternProperties"] = {"^n_[a-z]$": draw(parts)}
    return schema


@st.composite
def arrays(draw, parts) -> dict:
    least = draw(short)
    schema = {"type": "array", "items": draw(parts), "minItems": least, "maxItems": least + 2}
    if draw(st.booleans()):
        first = draw(st.lists(parts, min_size=1, max_size=2))
        schema |= {"prefixItems": first, "maxItems": least + 2}
    return schema


@st.composite
def schemas(draw) -> dict:
    """Satisfiable, of a few levels, with bounded strings and arrays."""
    defined = draw(leaves)
    parts = st.recursive(
        st.one_of(leaves, st.just({"$ref": "#/$defs/part"})),
        lambda parts: st.one_of(
            objects(parts),
            arrays(parts),
            st.lists(parts, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
        ),
        max_leaves=6,
    )
    return draw(parts) | {"$defs": {"part": defined}}


def random_schemas(count: int) -> list[dict]:
    """As many schemas, all of them different."""
    found: dict[str, dict] = {}

    @settings(tries(count + count // 4), phases=[Phase.generate])
    @given(schemas())
    def collect(schema: dict) -> None:
        found[json.dumps(schema)] = schema

    collect()
    return list(found.values())[-count:]


def closed(properties: dict, *optional: str) -> dict:
    """An object with these properties and no others, all of them required but for `optional`."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict] = {
    "person": closed(
        {
            "name": TEXT,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {
                "anyOf": [
                    {"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,8}\.org$"},
                    {"type": "null"},
                ]
            },
            "role": {"enum": ["admin", "editor", "viewer"]},
        }
    ),
    "sentiment": closed(
        {
            "label": {"enum": ["positive", "neutral", "negative"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        }
    ),
    "entities": {
        "type": "array",
        "items": closed({"text": TEXT, "type": {"enum": ["PER", "ORG", "LOC"]}}),
        "minItems": 1,
        "maxItems": 3,
    },
    "invoice": {
        "$defs": {
            "line": closed(
                {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
                }
            )
        },
        **closed(
            {
                "id": {"type": "string", "format": "uuid"},
                "date": {"type": "string", "format": "date"},
                "lines": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/line"},
                    "minItems": 1,
                    "maxItems": 2,
                },
            }
        ),
    },
    # As pydantic writes a model with an optional field and a nested one.
    "pydantic": {
        "$defs": {
            "Address": {
                "properties": {"city": TEXT | {"title": "City"}},
                "required": ["city"],
                "title": "Address",
                "type": "object",
                "additionalProperties": False,
            }
        },
        "properties": {
            "address": {"$ref": "#/$defs/Address"},
            "nickname": {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "Nickname"},
        },
        "required": ["address"],
        "title": "User",
        "type": "object",
        "additionalProperties": False,
    },
    "tool-call": {
        "anyOf": [
            closed({"name": {"const": "search"}, "arguments": closed({"query": TEXT})}),
            closed(
                {
                    "name": {"const": "move"},
                    "arguments": closed({"x": {"type": "integer", "minimum": -9, "maximum": 9}}),
                }
            ),
        ]
    },
    "tagged": {
        "oneOf": [
            closed(
                {
                    "kind": {"const": "circle"},
                    "radius": {"type": "integer", "minimum": 0, "maximum": 9},
                }
            ),
            closed(
                {
                    "kind": {"const": "line"},
                    "to": {
                        "type": "array",
                        "items": {"enum": [0, 1]},
                        "minItems": 2,
                        "maxItems": 2,
                    },
                }
            ),
        ]
    },
    "tree": {
        "$defs": {
            "node": closed(
                {
                    "value": {"enum": ["+", "-"]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                }
            )
        },
        "$ref": "#/$defs/node",
    },
    "geojson": closed(
        {
            "type": {"const": "Point"},
            "coordinates": {
                "type": "array",
                "prefixItems": [
                    {"type": "integer", "minimum": -180, "maximum": 180},
                    {"type": "integer", "minimum": -90, "maximum": 90},
                ],
                "items": False,
                "minItems": 2,
            },
        }
    ),
    "settings": {
        "type": "object",
        "properties": {"version": {"const": 2}},
        "patternProperties": {"^on_[a-z]{1,3}$": {"type": "boolean"}},
        "required": ["version"],
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "when": closed(
        {
            "time": {"type": "string", "format": "date-time"},
            "from": {"type": "string", "format": "ipv4"},
            "zones": {
                "type": "array",
                "items": {"type": "string", "enum": ["UTC", "CET"]},
                "maxItems": 2,
            },
        }
    ),
    "quiz": closed(
        {
            "question": TEXT,
            "options": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2},
            "answer": {"type": "integer", "minimum": 0, "maximum": 1},
            "hint": TEXT,
        },
        "hint",
    ),
}
