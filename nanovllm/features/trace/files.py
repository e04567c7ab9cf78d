"""The files of a trace: lines of JSON, one for each event, or a page that a browser replays.

A line of JSON is an object of an event's fields, with the event's kind as `event`. The page is
`page.html` with the events in it, as arrays of their values. It needs no network and no server.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from nanovllm.checks import short_repr
from nanovllm.features.trace.events import KINDS, Event, Run
from nanovllm.whole_files import draw_mark, open_new, part_of, whole_file

PAGE = Path(__file__).with_name("page.html")
PLACE = "TRACE-GOES-HERE"  # the text in the page that the events replace
KIND_OF_NAME = {kind.__name__: kind for kind in KINDS}
FIELDS = {kind: get_type_hints(kind) for kind in KINDS}  # kind -> {name of a field: its type}
NUMBERS_END = 2**53  # the page's numbers, JavaScript's, are exact below this


def write(events: Iterable[Event], path: str | Path) -> None:
    """Write a trace to a file: a page if `path` ends in .html, else lines of JSON."""
    text = make_page(events) if str(path).endswith(".html") else make_jsonl(events)
    with whole_file(Path(path)) as file:
        file.write(text.encode())


def check_writable(path: str) -> None:
    """Raise ValueError if `write` could not write to `path`.

    The check runs before the engine does, because the trace is written after a long run.
    """
    part = part_of(Path(path), draw_mark())
    try:
        open_new(part).close()
        part.unlink()
    except OSError as error:
        raise ValueError(
            f"trace is {path!r}, which cannot be written: {error}. Name a file in a folder of yours"
        ) from error
    if Path(path).is_dir():
        raise ValueError(f"trace is {path!r}, which is a folder: name a file in it")


def make_jsonl(events: Iterable[Event]) -> str:
    """Make lines of JSON from events, one for each."""
    lines = [
        {"event": type(event).__name__, **dict(zip(event._fields, map(rounded, event)))}
        for event in events
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def read_jsonl(path: str | Path) -> list[Event]:
    """Read the events of a file that `write` wrote. Tuples come back as lists.

    A trace may come from somebody else, so it is checked: raises ValueError if the file is not a
    trace, or if a value is not of the type that its event declares.
    """
    events: list[Event] = []
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                values = json.loads(line)
                events.append(make_event(KIND_OF_NAME[values.pop("event")], values))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}: line {len(events) + 1} is not an event: give a file that "
                f"LLM(..., trace='run.jsonl') wrote ({type(error).__name__}: {error})"
            ) from error
    if not events or not isinstance(events[0], Run):
        raise ValueError(
            f"{path} does not begin with a Run event: give a file that "
            "LLM(..., trace='run.jsonl') wrote"
        )
    return events


def make_event(kind: type[Event], values: dict[str, Any]) -> Event:
    """Make an event of a kind. Raises TypeError for missing, unknown and wrong values."""
    event = kind(**values)
    for (name, declared), value in zip(FIELDS[kind].items(), event):
        if not has_type(value, declared):
            raise TypeError(f"{name} of {kind.__name__} is {short_repr(value)}, not {declared}")
    return event


def has_type(value: Any, declared: Any) -> bool:
    """Return whether a value read from JSON has the type that an event's field declares.

    A declared list or tuple is an array in JSON. Numbers must be finite, and integers at least 0.
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
    """Make the page that replays events in a browser."""
    index = {kind: i for i, kind in enumerate(KINDS)}
    trace = {
        "kinds": [[kind.__name__, *kind._fields] for kind in KINDS],
        "events": [[index[type(event)], *map(rounded, event)] for event in events],
    }
    # The browser would read a "<" in a name as the page's markup.
    text = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(PLACE) == 1
    return page.replace(PLACE, text)


def rounded(value: Any) -> Any:
    """Round a float to six digits, which are microseconds for seconds; return others unchanged."""
    return round(value, 6) if isinstance(value, float) else value
