"""Kernels that are compiled for a GPU that is not here, and must fit it.

`.ci/run` compiles all kernels for all cards, by cards.py. Here are the largest, for a small card.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from process_helpers import SECONDS

from nanovllm.backends.cuda.triton import dispatch

pytestmark = pytest.mark.skipif(not dispatch.TAKES_ALL_ARGUMENTS, reason="Triton is too old")

TESTS = Path(__file__).parent


def compile_for_cards(*arguments: str) -> subprocess.CompletedProcess:
    """Run cards.py, without the interpreter that other tests use."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-W", "ignore", str(TESTS / "cards.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def test_the_largest_kernels_fit_a_card_of_99_kb_of_shared_memory():
    largest = "(decode 256 shared prefix|prefill cached), heads of 256|prefill 4096 of 32"
    result = compile_for_cards("--cards", "86", "--cases", largest)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = {line.split()[0].partition(".")[2] for line in result.stdout.splitlines()}
    assert {"_decode_kernel", "prefix_kernel", "_prefill_kernel", "_product_kernel"} <= kernels


def test_a_card_takes_the_same_kernels_beside_another_card_as_alone():
    """cards.py may assemble for sm_80 what it compiled for sm_86, if that is the same."""

    def rows(*cards: str) -> list[str]:
        names = "decode norms 4096|decode INT4 16 by 128 4096|decode sample 64"
        result = compile_for_cards("--cards", *cards, "--cases", names)
        assert result.returncode == 0, result.stdout + result.stderr
        return [line for line in result.stdout.splitlines() if " sm_80 " in line]

    compiled, assembled = rows("80"), rows("80", "86")
    assert len(compiled) > 5
    assert assembled == compiled
