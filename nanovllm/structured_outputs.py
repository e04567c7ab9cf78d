"""The form that an output must have, as a request asks for it.

Knows names and types. Whether a schema, expression or grammar says something that can be held to,
the room that compiles them tells.
"""

import json
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nanovllm.checks import check_choice, keep, name_the_nearest, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's names that are not done here, and what to do instead.
REFUSED = {
    "structural_tag": "write a grammar of the text with its tags",
}


@name_the_nearest("parameter")
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the whole text of an output must be. Names and meanings are vLLM's. Exactly one of:

    json: JSON that a schema describes: a dict, its text, or a class of pydantic's, which is kept as
        the schema that its model_json_schema() returns. Properties come in the schema's order.
        Of a format the shape is right: a date may be February 31. A keyword that cannot be held to
        is refused, unless the schema has "x-guidance": {"lenient": true}.
    regex: what the regular expression matches as a whole; without look-around, back-references and
        inner anchors.
    choice: one of these strings.
    grammar: what the grammar derives, from `start` in Lark's notation, or from `root` in GBNF's
        (`root ::= ...`).
    json_object: True: a JSON object, whatever is in it.

    For json and json_object:

    disable_any_whitespace: none between the parts of the JSON. Otherwise a line break may stand
        there, and then up to 20 blanks.
    whitespace_pattern: a regular expression of what may stand there instead.
    disable_additional_properties: no property may come beside those that an object's schema lists,
        where it does not say otherwise by additionalProperties.

    A wrong type raises TypeError, a wrong value ValueError.
    """

    json: str | dict[str, Any] | type | None = None  # kept as text
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None  # kept as a tuple
    grammar: str | None = None
    json_object: bool | None = None
    _: KW_ONLY
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    structural_tag: None = None
    disable_additional_properties: bool = False

    @classmethod
    def of(cls, given: Any) -> "StructuredOutputsParams":
        """What `given` is or, as a dict, says."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise TypeError(
                f"structured_outputs is {shown(given)}: "
                "use a StructuredOutputsParams, or a dict of its parameters"
            )
        try:
            return cls(**{str(name): value for name, value in given.items()})
        except (TypeError, ValueError) as error:
            raise type(error)(f"structured_outputs: {error}") from None

    def __post_init__(self) -> None:
        for name, remedy in REFUSED.items():
            if (value := getattr(self, name)) not in (None, False):
                raise ValueError(f"{name} is {shown(value)}, which is not supported: {remedy}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {shown(value)}: use a string")
        check_choice(self, "json_object", (True, False, None))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_choice(self, name, (True, False))
        if self.json is not None:
            keep(self, "json", _schema_text(self.json))
        if self.choice is not None:
            keep(self, "choice", _choices(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} is given: use exactly one of "
                f"{', '.join(KINDS)}"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern is {shown(self.whitespace_pattern)}, "
                "but disable_any_whitespace is True: use one of them"
            )

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def check_form(params: Any) -> None:
    """Put a StructuredOutputsParams into the place of what was given to SamplingParams."""
    form = StructuredOutputsParams.of(params.structured_outputs)
    keep(params, "structured_outputs", form)
    if params.ignore_eos:
        raise ValueError(
            "ignore_eos is True beside structured_outputs, which says where an output ends: "
            "leave one of them out"
        )


def check_form_compiles(name: str, params: Any, constraints: Any) -> None:
    """The form of SamplingParams, which errors call `name`, must be one that an output can be held
    to: by the engine's `constraints`, which raise ValueError where it is not.
    """
    try:
        constraints.check(params)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def _schema_text(given: Any) -> str:
    """A schema as JSON."""
    make = getattr(given, "model_json_schema", None)  # pydantic's classes have it
    if not isinstance(given, (str, dict)) and not callable(make):
        raise TypeError(
            f"json is {shown(given)}: use a JSON schema as a dict or as text, or a class of "
            "pydantic's"
        )
    if callable(make):
        try:
            given = make()
        except Exception as error:  # pydantic has errors of its own
            raise ValueError(
                f"json is {shown(given)}, of which pydantic makes no JSON schema ({error}): change "
                "the class, or give a schema"
            ) from error
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"json is {shown(given)}, which is not JSON ({error}): use a JSON schema"
        ) from error
    if not isinstance(schema, dict):
        raise ValueError(f"json is {shown(given)}: use a schema that is an object")
    return text


def _choices(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise TypeError(f"choice is {shown(given)}: use a list of strings")
    if not given:
        raise ValueError("choice is empty: give at least one string")
    return tuple(given)
