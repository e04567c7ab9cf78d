"""The flags of the command line, which are made from the declared options.

Every option of `Config` and `SamplingParams` has a flag, with the same help.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_origin

from nanovllm.checks import short_repr
from nanovllm.foreign_names import OPTIONS, PARAMETERS
from nanovllm.options import members_of, options_of

NONE = "none"  # the text that stands for None on the command line
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """A parser that suggests a known flag for an unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Check this first: for a misspelled --model, argparse says only that --model is required.
        for text in sys.argv[1:] if args is None else args:
            if text == "--":  # only positional arguments follow
                break
            flag = text.split("=")[0]
            # Like argparse, take an argument that has a space for a value.
            if (
                flag.startswith("--")
                and " " not in text
                and flag not in self._option_string_actions
            ):
                self.error(f"there is no flag {flag}: {self._advice(flag)}")
        return super().parse_known_args(args, namespace)

    def _advice(self, flag: str) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        if foreign := PARAMETERS.get(name) or OPTIONS.get(name):
            return foreign.remedy
        # Flags are also accepted with "_"; suggest only the spelling with "-".
        known = [one for one in self._option_string_actions if "_" not in one]
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
        return f"did you mean {near[0]}?" if near else f"see {self.prog} --help"


def add_flags(parser: argparse._ArgumentGroup, options: type, leave_out: set[str]) -> None:
    """Add a flag for each option, such as --max-tokens for max_tokens.

    A flag that is not given sets no attribute.
    """
    annotations = {field.name: field.type for field in fields(options)}
    for name, declared in options_of(options).items():
        if name in leave_out:
            continue
        text = declared.help.replace("`None`", NONE).replace("`", "")
        if declared.default != ():
            text += f" (default: {str(declared.default).lower()})"
        # Accept the spelling of Python too, but list a flag only once in the help.
        spellings = {
            "--" + name: argparse.SUPPRESS,
            "--" + name.replace("_", "-"): text.replace("%", "%%"),
        }
        for flag, help_text in spellings.items():
            parser.add_argument(
                flag,
                dest=f"{options.__name__}.{name}",
                default=argparse.SUPPRESS,
                help=help_text,
                **how_to_read(annotations[name]),
            )


def given_flags(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """Return the options that were given, by name."""
    begin = options.__name__ + "."
    return {
        name.removeprefix(begin): value
        for name, value in vars(args).items()
        if name.startswith(begin)
    }


def how_to_read(annotation: Any) -> dict[str, Any]:
    """Return the arguments of add_argument for an option of this type."""
    members = members_of(annotation)
    kinds = members - {NoneType}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) is dict for kind in kinds):
        return {"type": json_object, "metavar": "JSON"}
    if lists := [kind for kind in kinds if get_origin(kind) is list]:
        (item,) = get_args(lists[0])
        return {"action": "append", "type": item, "metavar": METAVARS[item]}
    kind = int if int in kinds else float if float in kinds else str
    return {
        "type": _or_none(kind) if NoneType in members else kind,
        "metavar": METAVARS[kind],
    }


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object. Raises argparse.ArgumentTypeError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not valid JSON: {error}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a JSON object: use {{...}}")
    return value


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads "none" as None, and other texts by `kind`."""

    def read(text: str) -> Any:
        return None if text.lower() == NONE else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse uses this name in its errors
    return read
