"""Check what users give: numbers, choices, names. How errors show a value is said here too."""

import difflib
import functools
import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Named = TypeVar("Named", bound=Callable[..., Any])
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


def as_list(given: Any) -> Any:
    """What a NumPy array of integers holds, if it has one dimension, as a list. Anything else is
    returned as it is.
    """
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
        return given.tolist()
    return given


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """The integers of a list that an error calls `name`. Raises TypeError for anything else."""
    given = as_list(given)
    ids = [as_integer(token) for token in given] if isinstance(given, (list, tuple)) else [None]
    found = tuple([token for token in ids if token is not None])
    if len(found) < len(ids):
        raise TypeError(f"{name} is {shown(given)}: use a list of token ids")
    return found


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token id that the model does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"{name} holds token id {shown(wrong)}: the model's vocabulary is 0 to {vocab_size - 1}"
        )


def keep(options: Any, name: str, value: Any) -> None:
    """Put a checked value into a field of an options class. These are frozen for their users."""
    object.__setattr__(options, name, value)


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
        keep(options, name, self.kind(value))


def is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    """By type first: 1 equals True, and an array compares with anything, item by item."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def check_choice(options: Any, name: str, choices: tuple[Any, ...], other: str = "") -> None:
    """Raise an error unless the field is one of `choices`: ValueError among texts, else TypeError.

    `other`: what else the error should offer.
    """
    value = getattr(options, name)
    if is_one_of(value, choices):
        return
    if isinstance(choices[0], str):
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {shown(value)}: use one of {listed}{other}")
    raise TypeError(f"{name} is {shown(value)}: use {' or '.join(map(repr, choices))}")


def shown(value: Any) -> str:
    """How an error shows a value: as Python does, but always short."""
    return reprlib.repr(value)


class Foreign(NamedTuple):
    """A name that users bring from elsewhere and that is none here."""

    remedy: str  # what to do instead
    harmless: tuple[Any, ...] = (None,)  # values that ask for nothing, or for what is done anyway
    same_as: str = ""  # another name: this one's value is harmless, too, if it is that one's
    means: tuple[Any, str, Any] | None = None  # a value, and the known name and value it stands for


# By what they are given to, and by name. A room may fill them.
FOREIGN: dict[str, dict[str, Foreign]] = {}
DEFAULTS: dict[str, dict[str, tuple[Any, ...]]] = {}  # of known names, values that mean the default
ATTRIBUTES: dict[str, dict[str, str]] = {}  # by class: attributes elsewhere, and what to do instead


def refuse_unknown_names(
    owner: str, kind: str, values: dict[str, Any], known: Collection[str], place: str = ""
) -> dict[str, Any]:
    """`values` less those that mean a default, and foreign ones that are harmless. Raises TypeError
    for the first of another name that is not `known`: "LLM has no option 'x': did you mean y?".

    `place`: what the error should call the `owner`.
    """
    kept = {}
    for name, value in values.items():
        if name in known:
            if not is_one_of(value, DEFAULTS.get(owner, {}).get(name, ())):
                kept[name] = value
            continue
        said = f"{place or owner} has no {kind} {str(name)[:60]!r}"
        foreign = FOREIGN.get(owner, {}).get(name)
        if foreign is None:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(known)}"
            raise TypeError(f"{said}: {hint}")
        if foreign.means is not None:
            its_value, other, meant = foreign.means
            if is_one_of(value, (its_value,)) and is_one_of(values.get(other, meant), (meant,)):
                kept[other] = meant
                continue
        same = (values[foreign.same_as],) if foreign.same_as in values else ()
        if not is_one_of(value, foreign.harmless + same):
            raise TypeError(f"{said}, given {shown(value)}: {foreign.remedy}")
    return kept


def no_attribute(owner: str, name: str) -> AttributeError:
    """What an object of the class `owner` raises for an attribute that it does not have."""
    remedy = ATTRIBUTES.get(owner, {}).get(name)
    return AttributeError(f"{owner} has no attribute {name!r}{f': {remedy}' if remedy else ''}")


def name_the_nearest(kind: str) -> Callable[[Named], Named]:
    """Let a dataclass or a method refuse an unknown keyword as `refuse_unknown_names` does."""

    def decorate(target: Any) -> Any:
        is_class = inspect.isclass(target)
        function = target.__init__ if is_class else target
        _, *known = inspect.signature(function).parameters
        names = frozenset(known)

        @functools.wraps(function)
        def checked(self, *args: Any, **values: Any) -> Any:
            if not names.issuperset(values):
                values = refuse_unknown_names(target.__name__, kind, values, known)
            return function(self, *args, **values)

        if not is_class:
            return checked
        target.__init__ = checked
        return target

    return decorate
