"""What counts as an integer or a number among users' values, and how an error names them."""

import difflib
import functools
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

Class = TypeVar("Class", bound=type)
ABOVE_ZERO = math.ulp(0.0)  # the least number above 0


def as_integer(value: Any) -> int | None:
    """The int that `value` is, as a NumPy integer is one; None if it is none. A bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> Any:
    """`value` if it is a real number, NumPy's as a plain float; else None, as for a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    # Beside a float16, NumPy would take a bound of 1e38 for infinity.
    return value if isinstance(value, numbers.Rational) else float(value)


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """The integers of a list that an error calls `name`. Raises TypeError for anything else."""
    ids = [as_integer(token) for token in given] if isinstance(given, (list, tuple)) else [None]
    found = tuple([token for token in ids if token is not None])
    if len(found) < len(ids):
        raise TypeError(f"{name} is {shown(given)}: use a list of token ids")
    return found


class Range(NamedTuple):
    """What a field of an options class may hold: a number from `least` to `most`."""

    kind: type[int] | type[float]
    least: float
    most: float
    remedy: str  # what to use instead, as an error says it
    none: bool = False  # whether it may be None

    def check(self, options: Any, name: str) -> None:
        """Raise TypeError or ValueError for a wrong value; keep a right one as a plain number."""
        given = getattr(options, name)
        if given is None and self.none:
            return
        value = as_integer(given) if self.kind is int else as_number(given)
        if value is None:
            raise TypeError(f"{name} is {shown(given)}: use {self.remedy}")
        if not self.least <= value <= self.most:
            raise ValueError(f"{name} is {shown(value)}: use {self.remedy}")
        object.__setattr__(options, name, self.kind(value))  # the class is frozen


def check_choice(options: Any, name: str, choices: tuple[Any, ...], other: str = "") -> None:
    """Raise an error unless the field is one of `choices`: ValueError among texts, else TypeError.

    `other`: what else the error should offer.
    """
    value = getattr(options, name)
    # By type first: 1 equals True, and an array compares with anything, item by item.
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return
    if isinstance(choices[0], str):
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {shown(value)}: use one of {listed}{other}")
    raise TypeError(f"{name} is {shown(value)}: use {' or '.join(map(repr, choices))}")


def shown(value: Any) -> str:
    """How an error shows a value: as Python does, but always short."""
    return reprlib.repr(value)


def refuse_unknown_names(
    owner: str, kind: str, names: Iterable[str], known: Collection[str]
) -> None:
    """Raise TypeError for the first of `names` that is not `known`: "LLM has no option 'x': did you
    mean y?"."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(known)}"
            raise TypeError(f"{owner} has no {kind} {name!r}: {hint}")


def name_the_nearest(kind: str) -> Callable[[Class], Class]:
    """Let a dataclass refuse an unknown keyword by a TypeError that names the nearest field."""

    def decorate(dataclass: Class) -> Class:
        cls: Any = dataclass
        init = cls.__init__

        @functools.wraps(init)
        def checked(self, *args: Any, **values: Any) -> None:
            refuse_unknown_names(cls.__name__, kind, values, cls.__dataclass_fields__)
            init(self, *args, **values)

        cls.__init__ = checked
        return dataclass

    return decorate
