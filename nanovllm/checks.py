"""What counts as an integer or a number among users' values, and how an error names them."""

import difflib
import functools
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def as_integer(value: Any) -> int | None:
    """The int that `value` is, as a NumPy integer is one; None if it is none. A bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> Any:
    """`value` if it is a real number, NumPy's included; else None, as for a bool."""
    is_number = isinstance(value, numbers.Real) and type(value) is not bool
    return value if is_number else None


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
