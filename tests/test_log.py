"""What is said at the start: one line on stderr, for those who have not configured logging, and
to their handlers else.
"""

import logging
import os
import re
import subprocess
import sys

import pytest
import torch

from nanovllm import TINY_MODEL
from nanovllm.backends.cpu import cpp_ops
from nanovllm.frontend.log import parameters

LINE = (
    r"nanovllm: tiny-qwen3, 3\.8 M parameters, float32 on the CPU, attention: (?:plain|C\+\+), "
    r"4 KV blocks of 256 tokens \(0\.0 GiB reserved, none used yet\), "
    r"sequences of up to 2,048 tokens, ready in (\d+\.\d) s\n"
)
MAKE = (
    "from nanovllm import LLM\n"
    f"llm = LLM({str(TINY_MODEL)!r}, device='cpu', num_kvcache_blocks=4)\n"
)


def run(code: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_process_without_stderr_shows_nothing_and_generates():
    """As a daemon: there Python's sys.stderr is None."""
    code = MAKE + "print(len(llm.generate(['a', 'b'])))"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "2\n")


def test_one_line_says_what_runs_where():
    done = run(MAKE + MAKE + "import logging; assert not logging.getLogger().handlers")
    first, second = re.fullmatch(LINE + LINE, done.stderr).groups()
    assert done.stdout == ""
    assert float(first) > float(second), "the first one counts the imports"


@pytest.mark.parametrize(
    "code",
    [
        "import logging; logging.getLogger('nanovllm').setLevel(logging.WARNING)\n" + MAKE,
        "from nanovllm import LLM\nimport logging; "
        "logging.getLogger('nanovllm').setLevel(logging.WARNING)\n" + MAKE,
        "import logging; logging.basicConfig()\n" + MAKE,
    ],
    ids=["level", "level-after-import", "configured-for-warnings"],
)
def test_it_is_silent_where_the_user_wants_no_more_than_warnings(code):
    assert run(code).stderr == ""


def test_handlers_of_the_user_get_the_line_once():
    done = run(
        "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout, "
        "format='%(name)s|%(message)s')\n" + MAKE
    )
    assert re.fullmatch(r"nanovllm\|" + LINE, done.stdout) and done.stderr == ""


@pytest.mark.parametrize(
    "dtype, has_amx, said",
    [
        ("float32", False, "float32 on the CPU, attention"),
        ("bfloat16", False, "bfloat16 on the CPU, where float32 is faster, attention"),
        ("bfloat16", True, "bfloat16 on the CPU, attention"),
        ("float16", True, "float16 on the CPU, where float32 is faster, attention"),
    ],
)
def test_a_dtype_that_a_cpu_computes_slowly_is_said_to_be_slow(
    caplog, make_llm, monkeypatch, dtype, has_amx, said
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    monkeypatch.setattr(cpp_ops, "load_bfloat16", lambda: None)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        make_llm(dtype=dtype)
    assert said in caplog.text


def test_a_handler_of_the_packages_logger_is_the_only_one(caplog, make_llm):
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        make_llm(num_kvcache_blocks=96)
    (record,) = [record for record in caplog.records if record.name == "nanovllm"]
    assert (
        "96 KV blocks of 16 tokens" in record.getMessage()
        and "up to 256 tokens" in record.getMessage()
    )
    assert logging.getLogger("nanovllm").handlers == []


@pytest.mark.parametrize(
    "count, text",
    [
        (3_800_000, "3.8 M"),
        (596_049_920, "0.6 B"),
        (30_532_122_624, "30.5 B"),
        (134_515_008, "134.5 M"),
    ],
)
def test_sizes_are_said_as_people_say_them(count, text):
    assert parameters(count) == f"{text} parameters"
