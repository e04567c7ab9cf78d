"""JSON schemas whose objects have only the properties that are listed.

JSON Schema allows an object further properties unless it says `"additionalProperties": false`.
"""

from typing import Any

PROPERTIES = ("properties", "patternProperties")
SCHEMAS_BY_NAME = (*PROPERTIES, "$defs", "definitions", "dependentSchemas")
DATA = ("const", "default", "enum", "examples")  # which hold no schema


def close_objects(schema: Any) -> Any:
    """Add `"additionalProperties": false` to each object of a schema that lists properties.

    An object that says which further properties it may have stays as it is. Raises ValueError where
    several parts of a schema list properties of one object: each would bar those of the others.
    """
    if isinstance(schema, list):
        return [close_objects(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if num_lists(schema) > 1:
        raise ValueError(
            "disable_additional_properties is True, but several parts of a schema, such as those "
            "of allOf, list the properties of one object: put them into one list"
        )
    closed = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            value = {name: close_objects(one) for name, one in value.items()}
        elif key not in DATA:
            value = close_objects(value)
        closed[key] = value
    if any(key in closed for key in PROPERTIES):
        closed.setdefault("additionalProperties", False)
    return closed


def num_lists(schema: Any) -> int:
    """Count the lists of properties that hold for the object that a schema describes."""
    if not isinstance(schema, dict):
        return 0
    count = int(any(key in schema for key in PROPERTIES)) + ("$ref" in schema)
    count += sum(map(num_lists, schema.get("allOf", ())))
    for key in ("anyOf", "oneOf"):
        count += max(map(num_lists, schema.get(key, ())), default=0)
    return count
