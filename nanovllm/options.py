"""Declarations of options, and the checks that are made from them.

A class of options is a frozen dataclass. `option` declares each of its fields once:

    max_num_seqs: int = option(512, "sequences that run at the same time", ge=1, le=65536)

This line and the annotation of the field define the check of a value and the error for a wrong
value (`check_options`), the flag of the command line and its help (apps/jobs/options.py), and the
row in the README's table (tests/test_readme.py compares them).
"""

import functools
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Union, get_args, get_origin

from nanovllm.checks import as_integer, as_number, is_one_of, short_repr


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one field of a class of options.

    `option` takes these values by keyword:

    help: what the option does, as a line of Markdown for the README and the command line.
    ge, gt, le: limits of a number: at least, greater than, at most.
    multiple_of: a number of which an integer must be a multiple.
    choices: the allowed values. For a bool, they follow from the annotation.
    use: the remedy in the error for a wrong value. Empty: made of type, limits and choices.
    read: a function that takes the option's name and the given value, makes checks that types and
        limits cannot express, and returns the value to store. The other checks come after it.
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    multiple_of: int | None = None
    choices: tuple[Any, ...] = ()
    use: str = ""
    read: Callable[[str, Any], Any] | None = None
    # `from_field` sets the following from the field.
    name: str = ""
    default: Any = None
    kind: Any = None  # the type in the annotation, without None; None if there are several
    takes_none: bool = False

    @classmethod
    def from_field(cls, given: Field) -> "Option":
        """Complete the declaration of a field with its name, annotation and default."""
        declared: Option = given.metadata["option"]
        members = members_of(given.type)
        takes_none = types.NoneType in members
        members -= {types.NoneType}
        choices = declared.choices
        if members == {bool}:
            choices = (True, False, None) if takes_none else (True, False)
        return replace(
            declared,
            name=given.name,
            default=given.default,
            kind=members.pop() if len(members) == 1 else None,
            takes_none=takes_none,
            choices=choices,
        )

    def check(self, given: Any) -> Any:
        """Check a value, and return it in the form to store, such as an int for a NumPy integer.

        Raises TypeError for a value of a wrong type, ValueError for a value out of range.
        """
        value = given if self.read is None else self.read(self.name, given)
        if self.choices:
            if not is_one_of(value, self.choices):
                raise self._error(
                    ValueError if isinstance(self.choices[0], str) else TypeError, value
                )
            return value
        if value is None and self.takes_none:
            return None
        if self.kind is int or self.kind is float:
            return self._check_number(value)
        if self.kind is str and not isinstance(value, str):
            raise self._error(TypeError, value)
        return value

    def _check_number(self, given: Any) -> int | float:
        number = as_integer(given) if self.kind is int else as_number(given)
        if number is None:
            raise self._error(TypeError, given)
        fits = (  # False for NaN
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )
        if not fits:
            raise self._error(ValueError, number)
        return self.kind(number)

    def _error(self, error: type[Exception], value: Any) -> Exception:
        return error(f"{self.name} is {short_repr(value)}: use {self.use or self.allowed}")

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        if self.choices:
            listed = [repr(choice) for choice in self.choices]
            is_text = isinstance(self.choices[0], str)
            return f"one of {', '.join(listed)}" if is_text else " or ".join(listed)
        text = {int: "an integer", float: "a number"}.get(self.kind, "a string")
        if self.multiple_of is not None:
            text = f"a multiple of {self.multiple_of}"
        elif self.ge is not None and self.le is not None:
            text += f" from {spell(self.ge)} to {spell(self.le)}"
        else:
            text += "" if self.ge is None else f", {spell(self.ge)} or more"
            text += "" if self.gt is None else f" above {spell(self.gt)}"
            text += "" if self.le is None else f", at most {spell(self.le)}"
        return f"{text}, or None" if self.takes_none else text


def option(default: Any = MISSING, help: str = "", **declared: Any) -> Any:
    """Declare a field of a class of options. A field without a default is required.

    declared: limits, choices and the like, as `Option` describes them.
    """
    return field(default=default, metadata={"option": Option(help, **declared)})


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the declared options of a class, by name."""
    return {one.name: Option.from_field(one) for one in fields(cls)}


def check_options(options: Any) -> None:
    """Check each field of an instance, and store each value as `Option.check` returns it."""
    for name, declared in options_of(options.__class__).items():
        given = getattr(options, name)
        if given is declared.default:  # skip the check: most values of a request are defaults
            continue
        value = declared.check(given)
        if value is not given:
            keep(options, name, value)


def keep(options: Any, name: str, value: Any) -> None:
    """Store a value in an instance, which is frozen for users."""
    object.__setattr__(options, name, value)


def members_of(annotation: Any) -> set[Any]:
    """Return the types of an annotation, such as {int, NoneType} of `int | None`."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return set(get_args(annotation)) if is_union else {annotation}


def spell(limit: float) -> str:
    """Write a limit as a reader knows it, such as 2**63 - 1 for 9223372036854775807."""
    is_mask = isinstance(limit, int) and limit >= 2**31 - 1 and not limit & (limit + 1)
    return f"2**{int(limit).bit_length()} - 1" if is_mask else str(limit)
