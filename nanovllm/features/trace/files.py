"""Write a trace: JSON, one event a line, or a page that a browser replays.

A line of JSON is an object of an event's fields, with its kind as `event`. The page is
`page.html` with the events in it, as arrays of their values: it needs no network and no server.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from nanovllm.checks import shown
from nanovllm.features.trace.events import KINDS, Event, Run

PAGE = Path(__file__).with_name("page.html")
PLACE = "TRACE-GOES-HERE"  # in the page
KIND_OF_NAME = {kind.__name__: kind for kind in KINDS}
FIELDS = {
    kind: get_type_hints(kind) for kind in KINDS
}  # their names, and the types of their values
NUMBERS_END = 2**53  # below it, the page's numbers are exact


def write(events: Iterable[Event], path: str | Path) -> None:
    """A page if `path` ends in .html, else JSON lines."""
    text = make_page(events) if str(path).endswith(".html") else make_jsonl(events)
    # At once: whoever looks at the path sees no half of a file.
    part = part_of(path)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def check_writable(path: str) -> None:
    """Raise ValueError for what `write` could not write: now, rather than after a long run."""
    try:
        part_of(path).touch()
        part_of(path).unlink()
    except OSError as error:
        raise ValueError(f"trace is {path!r}, which cannot be written: {error}") from error
    if Path(path).is_dir():
        raise ValueError(f"trace is {path!r}, which is a folder: name a file in it")


def part_of(path: str | Path) -> Path:
    """What a file is called until it is complete."""
    return Path(f"{path}.part")


def make_jsonl(events: Iterable[Event]) -> str:
    lines = [
        {"event": type(event).__name__, **dict(zip(event._fields, map(rounded, event)))}
        for event in events
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def read_jsonl(path: str | Path) -> list[Event]:
    """The events of a file that `write` wrote; their lists are lists and not tuples.

    Raises ValueError for another file, and for a value of another type than its event says: a trace
    may be somebody else's.
    """
    events: list[Event] = []
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                values = json.loads(line)
                events.append(make_event(KIND_OF_NAME[values.pop("event")], values))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} holds no events, at line {len(events) + 1}: give what "
                f"LLM(..., trace='run.jsonl') wrote ({type(error).__name__}: {error})"
            ) from error
    if not events or not isinstance(events[0], Run):
        raise ValueError(
            f"{path} is not a whole trace: give what LLM(..., trace='run.jsonl') wrote"
        )
    return events


def make_event(kind: type[Event], values: dict[str, Any]) -> Event:
    """Make an event. Raises TypeError for missing and unknown fields and for wrong values."""
    event = kind(**values)
    for (name, declared), value in zip(FIELDS[kind].items(), event):
        if not has_type(value, declared):
            raise TypeError(f"{name} of {kind.__name__} is {shown(value)}, not {declared}")
    return event


def has_type(value: Any, declared: Any) -> bool:
    """Whether a value read from JSON is what an event's field declares.

    An array of JSON may be a list or a tuple. Numbers are finite, and whole ones count from 0.
    """
    parts = get_args(declared)
    origin = get_origin(declared)
    if origin is UnionType:
        return any(has_type(value, part) for part in parts)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False
        if origin is list or parts[-1] is Ellipsis:
            return all(has_type(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(has_type, value, parts))
    if declared is float:
        return type(value) in (int, float) and abs(value) < NUMBERS_END
    if declared is int:
        return type(value) is int and 0 <= value < NUMBERS_END
    assert declared in (str, bool, NoneType), f"no rule for {declared}"
    return type(value) is declared


def make_page(events: Iterable[Event]) -> str:
    index = {kind: i for i, kind in enumerate(KINDS)}
    trace = {
        "kinds": [[kind.__name__, *kind._fields] for kind in KINDS],
        "events": [[index[type(event)], *map(rounded, event)] for event in events],
    }
    # A "<" in a name would be the page's.
    text = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(PLACE) == 1
    return page.replace(PLACE, text)


def rounded(value: Any) -> Any:
    """Seconds are given to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value
