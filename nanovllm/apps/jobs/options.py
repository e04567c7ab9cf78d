"""Flags of the command line, made from the declarations of options.

A new option of `Config` or `SamplingParams` is a new flag; its help is the option's.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_origin

from nanovllm.checks import shown
from nanovllm.foreign_names import OPTIONS, PARAMETERS
from nanovllm.options import members_of, options_of

NONE = "none"  # how a flag says None
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """A parser that answers an unknown flag with the one that may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # This comes first: of a misspelled --model, argparse says only that --model is required.
        for text in sys.argv[1:] if args is None else args:
            if text == "--":  # only positional arguments follow
                break
            flag = text.split("=")[0]
            # As argparse sees it: what has a space is a value.
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
        # A flag of two words can be spelled with "_", too: one spelling is enough here.
        known = [one for one in self._option_string_actions if "_" not in one]
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
        return f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them"


def add_flags(parser: argparse._ArgumentGroup, options: type, leave_out: set[str]) -> None:
    """Add a flag for each option: --max-tokens for max_tokens. One not given sets nothing."""
    annotations = {field.name: field.type for field in fields(options)}
    for name, declared in options_of(options).items():
        if name in leave_out:
            continue
        text = declared.help.replace("`None`", NONE).replace("`", "")
        if declared.default != ():
            text += f" (default: {str(declared.default).lower()})"
        # As Python writes the name, too; the help says it once.
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
    """Return what argparse must know to read an option of this type."""
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
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON object: use {{...}}")
    return value


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == NONE else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its errors
    return read
