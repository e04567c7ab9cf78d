"""How much random tests try: a little in each run of the suite, more where somebody asks for it."""

import os

from hypothesis import settings

# TEST_EFFORT=20 tries 20 times as much, and other cases each time.
EFFORT = int(os.environ.get("TEST_EFFORT", "1"))


def tries(count: int) -> settings:
    return settings(max_examples=count * EFFORT, derandomize=EFFORT == 1, database=None)
