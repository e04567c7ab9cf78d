"""Options: what a class declares about each of its fields, and the checks made from that.

A class of options is a frozen dataclass. `option` declares each field once:

    max_num_seqs: int = option(512, "sequences that run at the same time", ge=1, le=65536)

From this line and the field's annotation come the check of a value and the error for a wrong one
(`check_options`), the command line's flag and its help (apps/jobs/options.py), and the row of the
README's table (tests/test_readme.py compares them).
"""

import functools
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Union, get_args, get_origin

from nanovllm.checks import as_integer, as_number, is_one_of, shown


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a class of options. `option` takes those below by keyword.

    help: what the option does, a line of Markdown for the README and the command line.
    ge, gt, le: a number's limits: at least, more than, at most.
    multiple_of: what an integer must be a multiple of.
    choices: the only values. A bool's follow from its annotation.
    use: the remedy in the error for a wrong value. Empty: made of the type, limits and choices.
    read: a function of the option's name and what was given. It checks what types and limits
        cannot say, and returns the value to keep. The other checks follow it.
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    multiple_of: int | None = None
    choices: tuple[Any, ...] = ()
    use: str = ""
    read: Callable[[str, Any], Any] | None = None
    # Read from the field.
    name: str = ""
    default: Any = None
    kind: Any = None  # the annotation's type beside None, if it is one
    takes_none: bool = False

    @classmethod
    def from_field(cls, given: Field) -> "Option":
        """Join what a field's declaration says with its name, annotation and default."""
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
        """Return a value in the form in which it is kept, such as a NumPy integer as an int.

        Raises TypeError for a value of a wrong type, ValueError for one that is out of range.
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
        fits = (  # which NaN does not
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )
        if not fits:
            raise self._error(ValueError, number)
        return self.kind(number)

    def _error(self, error: type[Exception], value: Any) -> Exception:
        return error(f"{self.name} is {shown(value)}: use {self.use or self.allowed}")

    @property
    def allowed(self) -> str:
        """The values that the option takes, in words."""
        if self.choices:
            listed = [repr(choice) for choice in self.choices]
            is_text = isinstance(self.choices[0], str)
            return f"one of {', '.join(listed)}" if is_text else " or ".join(listed)
        said = {int: "an integer", float: "a number"}.get(self.kind, "a string")
        if self.multiple_of is not None:
            said = f"a multiple of {self.multiple_of}"
        elif self.ge is not None and self.le is not None:
            said += f" from {spell(self.ge)} to {spell(self.le)}"
        else:
            said += "" if self.ge is None else f", {spell(self.ge)} or more"
            said += "" if self.gt is None else f" above {spell(self.gt)}"
            said += "" if self.le is None else f", at most {spell(self.le)}"
        return f"{said}, or None" if self.takes_none else said


def option(default: Any = MISSING, help: str = "", **declared: Any) -> Any:
    """Declare a field of a class of options; one without a default is required.

    `declared`: its limits, choices and the like, as `Option` describes them.
    """
    return field(default=default, metadata={"option": Option(help, **declared)})


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """Return the options that a class declares, by name."""
    return {one.name: Option.from_field(one) for one in fields(cls)}


def check_options(options: Any) -> None:
    """Check each field of a class of options, and keep its value in the form that is checked."""
    for name, declared in options_of(options.__class__).items():
        given = getattr(options, name)
        if given is declared.default:  # it needs no check, and most values of a request are
            continue
        value = declared.check(given)
        if value is not given:
            keep(options, name, value)


def keep(options: Any, name: str, value: Any) -> None:
    """Put a checked value into a class of options, which is frozen for its users."""
    object.__setattr__(options, name, value)


def members_of(annotation: Any) -> set[Any]:
    """Return the types of an annotation, such as {int, NoneType} of `int | None`."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return set(get_args(annotation)) if is_union else {annotation}


def spell(limit: float) -> str:
    """Write a limit as a reader knows it: 2**63 - 1 rather than 9223372036854775807."""
    is_mask = isinstance(limit, int) and limit >= 2**31 - 1 and not limit & (limit + 1)
    return f"2**{int(limit).bit_length()} - 1" if is_mask else str(limit)
