"""The effort of tests: a few cases in each run of the suite, more if TEST_EFFORT asks for them."""

import os
from itertools import product

import pytest
import torch
from hypothesis import settings

# TEST_EFFORT=20 tries 20 times as much, and other cases each time.
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))


def tries(count: int) -> settings:
    return settings(max_examples=count * EFFORT, derandomize=EFFORT == 1, database=None)


def spread(values: dict[str, list]):
    """Parametrize a test that takes long in Triton's interpreter by fewer cases than all products.

    Each value of the parameter with the most values is taken once. The others go round with it,
    each faster than the next one, so that their values meet. On a GPU, or with TEST_EFFORT, all
    products are taken.

    Args:
        values: The values by name. As for pytest, a name may be that of several parameters.
    """
    cases = list(product(*values.values()))
    if EFFORT == 1 and not torch.cuda.is_available():
        most = max(values, key=lambda name: len(values[name]))
        cases = []
        for i, value in enumerate(values[most]):
            case, rest = {most: value}, i
            for name, others in values.items():
                if name != most:
                    rest, at = divmod(rest, len(others))
                    case[name] = others[at]
            cases.append(tuple(case[name] for name in values))
    return pytest.mark.parametrize(", ".join(values), [_joined(values, case) for case in cases])


def _joined(names, case):
    """Return a case's values and marks as one pytest.param."""
    parts, marks = [], []
    for name, value in zip(names, case):
        if hasattr(value, "marks"):  # a pytest.param
            parts += value.values
            marks += value.marks
        elif "," in name:
            parts += value
        else:
            parts.append(value)
    return pytest.param(*parts, marks=marks)
