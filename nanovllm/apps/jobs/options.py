"""Options of the command line, made from the fields of the classes that check them.

A new field of `Config` or `SamplingParams` is a new flag, described by the class's docstring.
"""

import argparse
import difflib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, Union, get_args, get_origin

from nanovllm.checks import FOREIGN, shown

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
        for owner in ("SamplingParams", "LLM"):
            if foreign := FOREIGN.get(owner, {}).get(name):
                return foreign.remedy
        # A flag of two words can be spelled with "_", too: one spelling is enough here.
        known = [one for one in self._option_string_actions if "_" not in one]
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
        return f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them"


def add_flags(parser: argparse._ArgumentGroup, options: type, leave_out: set[str]) -> None:
    """A flag for each field: --max-tokens for max_tokens. One that is not given sets nothing."""
    described = descriptions(options)
    for field in fields(options):
        if field.name in leave_out:
            continue
        text = described.get(field.name, "")
        if field.default != ():
            text += f" (default: {str(field.default).lower()})"
        # As Python writes the name, too; the help says it once.
        spellings = {
            "--" + field.name: argparse.SUPPRESS,
            "--" + field.name.replace("_", "-"): text.replace("%", "%%"),
        }
        for flag, help_text in spellings.items():
            parser.add_argument(
                flag,
                dest=f"{options.__name__}.{field.name}",
                default=argparse.SUPPRESS,
                help=help_text,
                **how_to_read(field),
            )


def given_flags(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The fields that were given, by name."""
    begin = options.__name__ + "."
    return {
        name.removeprefix(begin): value
        for name, value in vars(args).items()
        if name.startswith(begin)
    }


def descriptions(options: type) -> dict[str, str]:
    """What a class's docstring says of each field: "name: text", further lines indented."""
    found = re.findall(
        r"^(\w+): (.+(?:\n +.+)*)", inspect.cleandoc(options.__doc__ or ""), flags=re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in found}


def how_to_read(field: Field) -> dict[str, Any]:
    """What argparse must know to read a field of this type."""
    members = _members(field.type)
    kinds = members - {types.NoneType}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(kind) is dict for kind in kinds):
        return {"type": json_object, "metavar": "JSON"}
    if lists := [kind for kind in kinds if get_origin(kind) is list]:
        (item,) = get_args(lists[0])
        return {"action": "append", "type": item, "metavar": METAVARS[item]}
    kind = int if int in kinds else float if float in kinds else str
    return {
        "type": _or_none(kind) if types.NoneType in members else kind,
        "metavar": METAVARS[kind],
    }


def json_object(text: str) -> dict[str, Any]:
    """Raises argparse.ArgumentTypeError for what is none, or no JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON object: use {{...}}")
    return value


def _members(annotation: Any) -> set[Any]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return set(get_args(annotation)) if is_union else {annotation}


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == NONE else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its errors
    return read
