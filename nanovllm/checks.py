"""The checks of values that users give: numbers, token ids, texts, forms, names.

Each check raises TypeError for a wrong type and ValueError for a wrong value, with field, value and
remedy. These checks need no model; frontend/ checks values against the model.
"""

import difflib
import functools
import inspect
import json
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nanovllm.foreign_names import Foreign

Named = TypeVar("Named", bound=Callable[..., Any])
MAX_BIAS = 100


def short_repr(value: Any) -> str:
    """Return the repr of a value for an error message, shortened if it is long."""
    return reprlib.repr(value)


def as_integer(value: Any) -> int | None:
    """Return `value` as an int if it is an integer, such as NumPy's. None for a bool and others."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> Any:
    """Return a real number, a NumPy float as a plain float. None for a bool and other values."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    # In a comparison with a float16, NumPy would round a bound of 1e38 to infinity.
    return value if isinstance(value, numbers.Rational) else float(value)


def is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    """Tell whether a value is among choices.

    The types are compared first, because 1 equals True, and an array compares item by item.
    """
    return any(type(value) is type(choice) and value == choice for choice in choices)


# Token ids


def as_list(given: Any) -> Any:
    """Return the integers of a one-dimensional NumPy array as a list; anything else as it is."""
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
        return given.tolist()
    return given


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """Return the token ids of a list. Raises TypeError, with the field's `name`, for others."""
    given = as_list(given)
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} is {short_repr(given)}: use a list of token ids")
    if set(map(type, given)) <= {int}:  # the fast way, since prompts are long and most are plain
        return tuple(given)
    ids = []
    for token in given:
        number = as_integer(token)
        if number is None:
            hint = "; a conversation goes to chat or stream_chat" * isinstance(token, dict)
            raise TypeError(f"{name} holds {short_repr(token)}: token ids are integers{hint}")
        ids.append(number)
    return tuple(ids)


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token id that the model does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"{name} holds token id {short_repr(wrong)}: the model's vocabulary is 0 to "
            f"{vocab_size - 1}"
        )


# Values of requests that are more than a number. `read` of an option is one of these functions.
# Each takes the field's name and the given value, and returns the value to keep. None means empty.


def read_stop_strings(name: str, given: Any) -> tuple[str, ...]:
    """Read the strings that end an output: one string or a list."""
    strings = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(strings, (list, tuple)) or not all(isinstance(one, str) for one in strings):
        raise TypeError(f"{name} is {short_repr(given)}: use a string or a list of strings")
    if "" in strings:
        raise ValueError(
            f"{name} holds an empty string, which would end every output at once: leave it out"
        )
    return tuple(strings)


def read_stop_ids(name: str, given: Any) -> tuple[int, ...]:
    """Read the tokens that end an output."""
    return () if given is None else token_ids(name, given)


def read_allowed_ids(name: str, given: Any) -> tuple[int, ...]:
    """Read the only tokens that may be sampled."""
    allowed = token_ids(name, given)
    if not allowed:
        raise ValueError(
            f"{name} is empty, so nothing could be sampled: name a token, or use None for all"
        )
    return allowed


def read_biases(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    """Read a dict of token ids and the numbers to add to their logits, and return it as pairs.

    JSON has no integer keys, so strings of digits are accepted.
    """
    try:
        bias = dict(() if given is None else given)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {short_repr(given)}: use a dict of token ids") from None
    pairs = []
    for key, value in bias.items():
        spelt = isinstance(key, str) and key.isdecimal()
        token, number = as_integer(int(key) if spelt else key), as_number(value)
        if token is None:
            raise TypeError(f"{name} holds {short_repr(key)}: token ids are integers")
        if number is None:
            raise TypeError(f"{name}[{token}] is {short_repr(value)}: use a number")
        if not -MAX_BIAS <= number <= MAX_BIAS:
            raise ValueError(
                f"{name}[{token}] is {short_repr(value)}: use a number from -{MAX_BIAS} to "
                f"{MAX_BIAS}, or bad_words or allowed_token_ids to bar a token"
            )
        pairs.append((token, float(number)))
    return tuple(pairs)


def read_bad_words(name: str, given: Any) -> tuple[str | tuple[int, ...], ...]:
    """Read texts that must not be in an output, or their token ids."""
    words = () if given is None else given
    if not isinstance(words, (list, tuple)):
        raise TypeError(f"{name} is {short_repr(words)}: use a list of strings")
    words = [word if isinstance(word, str) else token_ids(name, word) for word in words]
    if not all(words):
        raise ValueError(f"{name} holds an empty entry, which bars nothing: leave it out")
    return tuple(words)


def read_processors(name: str, given: Any) -> tuple[Callable[..., Any], ...]:
    """Read a list of functions of token ids and logits."""
    functions = () if given is None else given
    if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
        raise TypeError(
            f"{name} is {short_repr(functions)}: use a list of functions of token ids and logits"
        )
    for function in functions:
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # the function is not written in Python
            continue
        try:
            signature.bind([], None)
        except TypeError as error:
            raise TypeError(
                f"{name} holds {short_repr(function)}, which takes other arguments ({error}): it "
                "is called with the token ids of the output so far, and the logits"
            ) from None
    return tuple(functions)


def read_schema(name: str, given: Any) -> str:
    """Read a JSON schema, or one of pydantic's classes, and return the schema's text."""
    make = getattr(given, "model_json_schema", None)  # pydantic's classes have it
    if not isinstance(given, (str, dict)) and not callable(make):
        raise TypeError(
            f"{name} is {short_repr(given)}: use a JSON schema as a dict or as text, or a class of "
            "pydantic's"
        )
    if callable(make):
        try:
            given = make()
        except Exception as error:  # pydantic has errors of its own
            raise ValueError(
                f"{name} is {short_repr(given)}, of which pydantic makes no JSON schema ({error}): "
                "change the class, or give a schema"
            ) from error
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is {short_repr(given)}, which is not JSON ({error}): use a JSON schema"
        ) from error
    if not isinstance(schema, dict):
        raise ValueError(f"{name} is {short_repr(given)}: use a schema that is an object")
    return text


def read_choices(name: str, given: Any) -> tuple[str, ...]:
    """Read a list of at least one string."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise TypeError(f"{name} is {short_repr(given)}: use a list of strings")
    if not given:
        raise ValueError(f"{name} is empty: give at least one string")
    return tuple(given)


# Names


def refuse_unknown_names(
    owner: str,
    kind: str,
    values: dict[str, Any],
    known: Collection[str],
    foreign: Mapping[str, Foreign],
) -> dict[str, Any]:
    """Return `values` without the harmless values of foreign names.

    Raises TypeError for the first other name that is not `known`, such as "LLM has no option 'x':
    did you mean y". For a foreign name, the error says the remedy.
    """
    kept = {}
    for name, value in values.items():
        if name in known:
            kept[name] = value
            continue
        said = f"{owner} has no {kind} {str(name)[:60]!r}"
        found = foreign.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(known)}"
            raise TypeError(f"{said}: {hint}")
        if found.means is not None:
            its_value, other, meant = found.means
            if is_one_of(value, (its_value,)) and is_one_of(values.get(other, meant), (meant,)):
                kept[other] = meant
                continue
        same = (values[found.same_as],) if found.same_as in values else ()
        if not is_one_of(value, found.harmless + same):
            raise TypeError(f"{said}, given {short_repr(value)}: {found.remedy}")
    return kept


def no_attribute(owner: str, name: str, remedies: Mapping[str, str]) -> AttributeError:
    """Make the error for an attribute that an object of the class `owner` does not have."""
    remedy = f": {remedies[name]}" if name in remedies else ""
    return AttributeError(f"{owner} has no attribute {name!r}{remedy}")


def name_the_nearest(kind: str, foreign: Mapping[str, Foreign]) -> Callable[[Named], Named]:
    """Decorate a dataclass or a method: `refuse_unknown_names` checks its keyword arguments."""

    def decorate(target: Any) -> Any:
        is_class = inspect.isclass(target)
        function = target.__init__ if is_class else target
        _, *known = inspect.signature(function).parameters
        names = frozenset(known)

        @functools.wraps(function)
        def checked(self, *args: Any, **values: Any) -> Any:
            if not names.issuperset(values):
                values = refuse_unknown_names(target.__name__, kind, values, known, foreign)
            return function(self, *args, **values)

        if not is_class:
            return checked
        target.__init__ = checked
        return target

    return decorate
