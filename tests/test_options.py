"""Options: one declaration makes the check, the error, the flag and the README's row."""

import argparse
from dataclasses import MISSING, dataclass

import numpy as np
import pytest

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.apps.jobs.options import add_flags, given_flags
from nanovllm.config import Config
from nanovllm.options import check_options, option, options_of


def read_even(name, given):
    if given == "even":
        return 2
    raise ValueError(f"{name} is {given}: use even")


@dataclass(frozen=True)
class Oven:
    dish: str = option(help="what is baked")
    degrees: int = option(180, "how `hot`; `None` is not", ge=50, le=2**31 - 1)
    part: float = option(0.5, "how full", gt=0, le=1)
    trays: int | None = option(None, "how many", ge=1)
    step: int = option(8, "by how many degrees", ge=8, multiple_of=8)
    is_on: bool = option(False, "whether it is on")
    light: bool | None = option(None, "whether it is lit")
    mode: str = option("fan", "how it heats", choices=("fan", "grill"))
    price: float = option(1.0, "what it takes", ge=0, use="a price")
    plates: int = option(2, "of these two", read=read_even)

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("dish", 3, TypeError, "dish is 3: use a string"),
        ("degrees", 3, ValueError, r"degrees is 3: use an integer from 50 to 2\*\*31 - 1"),
        ("degrees", 99.0, TypeError, "degrees is 99.0: use an integer from"),
        ("degrees", True, TypeError, "degrees is True: use an integer from"),
        ("degrees", None, TypeError, "degrees is None: use an integer from"),
        ("part", 0, ValueError, "part is 0: use a number above 0, at most 1"),
        ("part", float("nan"), ValueError, "part is nan: use a number above 0"),
        ("part", "1", TypeError, "part is '1': use a number above 0"),
        ("trays", 0, ValueError, "trays is 0: use an integer, 1 or more, or None"),
        ("step", 12, ValueError, "step is 12: use a multiple of 8"),
        ("step", 0, ValueError, "step is 0: use a multiple of 8"),
        ("is_on", 1, TypeError, "is_on is 1: use True or False"),
        ("is_on", None, TypeError, "is_on is None: use True or False"),
        ("light", "no", TypeError, "light is 'no': use True or False or None"),
        ("mode", "steam", ValueError, "mode is 'steam': use one of 'fan', 'grill'"),
        ("mode", 3, ValueError, "mode is 3: use one of 'fan', 'grill'"),
        ("price", -1, ValueError, "price is -1: use a price"),
        ("plates", 3, ValueError, "plates is 3: use even"),
    ],
)
def test_a_wrong_value_raises_with_the_remedy_that_the_declaration_says(
    name, value, error, message
):
    with pytest.raises(error, match=f"^{message}"):
        Oven(**{"dish": "pie", name: value})


def test_right_values_are_kept_as_plain_ones():
    given = dict(degrees=np.int64(200), part=1, trays=np.uint8(3), step=16, plates="even")
    oven = Oven("pie", **given)
    assert oven == Oven("pie", degrees=200, part=1.0, trays=3, step=16, plates="even")
    assert type(oven.degrees) is type(oven.trays) is int and type(oven.part) is float
    assert oven.plates == 2


@pytest.mark.parametrize("options", [Config, SamplingParams, StructuredOutputsParams, Oven])
def test_each_default_passes_its_own_check_and_each_option_has_help(options):
    """A default is kept without a check."""
    for name, declared in options_of(options).items():
        assert declared.help, name
        if declared.default not in (MISSING, None) and declared.read is not read_even:
            assert declared.check(declared.default) == declared.default, name


def test_a_flag_is_made_of_each_declaration():
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("oven"), Oven, leave_out={"plates"})
    words = parser.format_help().split()
    said = " ".join(words)
    assert "--degrees N how hot; none is not (default: 180)" in said
    assert "--is-on, --no-is-on whether it is on (default: false)" in said
    assert "--plates" not in said
    flags = ["--degrees", "90", "--trays", "none", "--no-light", "--mode=grill"]
    args = parser.parse_args(flags)
    expected = dict(degrees=90, trays=None, light=False, mode="grill")
    assert given_flags(args, Oven) == expected
