"""Kernels that start while the one before them runs: what they do before they wait for it, in the
code that is compiled for a GPU.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from process_helpers import SECONDS

from nanovllm.backends.cuda.triton import dispatch

pytestmark = pytest.mark.skipif(not dispatch.TAKES_ALL_ARGUMENTS, reason="Triton is too old")

# What no kernel writes. `addresses`: of memory that ranks share, written once at the start.
CONSTANT = {"weight", "gate_weight", "up_weight", "after", "addresses", "codes", "factors"}
CONSTANT |= {"w_scales", "input_scale", "w_tiles", "q_weight", "k_weight", "cos_sin"}
# What was written before the embedding of a decode step: see EMBEDDING.
STEP_INPUTS = {"positions", "slots", "lens", "tables"}
OF_SLOTS = {"positions", "slots", "temperatures", "seeds"}
OLD = {
    "_decode_kernel": STEP_INPUTS | {"k_cache", "v_cache"},
    "_best_cell_of_part_kernel": OF_SLOTS,
    "_best_of_row_kernel": OF_SLOTS,
    "_woven_down_kernel": {"runs"},  # see STARTED_LATE
    "_norm_and_quantise_kernel": {"residual"},  # asked for alone: the L2 cache has the latest
}
# Of the two kernels of woven experts, of one token or of several, the second reads the router's
# choice early: the first lets it start only after its own wait.
BY_TILE = "_woven_experts_kernel by tile"
STARTED_LATE = {"_woven_down_kernel": "_woven_gate_up_kernel", BY_TILE: "_woven_experts_kernel"}
# PyTorch's is not launched early, and this one waits before the next kernel starts.
EMBEDDING = "_embed_and_norm_kernel"
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled():
    """Compile the kernels that may start early, and find what each does before it waits."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-W", "ignore", str(TESTS / "compiled_kernels.py")]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_kernel_that_may_start_early_is_looked_at(compiled):
    kernels = set()
    for path in Path(dispatch.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "PDL" in [arg.arg for arg in node.args.args]:
                kernels.add(node.name)
    kernels -= {"wait_for_inputs", "admit_next"}
    assert {name for name, *_ in compiled} == kernels | {BY_TILE}


def test_a_kernel_that_starts_early_waits_on_every_path(compiled):
    assert [name for name, _, _, waits, _ in compiled if not waits] == []


def test_a_kernel_that_starts_early_reads_only_what_no_kernel_writes_before_it_waits(compiled):
    early = [(name, set(reads) - CONSTANT - OLD.get(name, set())) for name, reads, *_ in compiled]
    assert {name: reads for name, reads in early if reads and name != BY_TILE} == {}
    # Else it would be launched early for little.
    assert ["_skinny_linear_kernel", ["weight"]] in [found[:2] for found in compiled]
    assert any("v_cache" in reads for name, reads, *_ in compiled if name == "_decode_kernel")


def test_a_kernel_that_starts_early_writes_nothing_before_it_waits(compiled):
    assert [name for name, _, writes, *_ in compiled if writes] == [BY_TILE]


def test_the_kernel_after_the_embedding_starts_when_what_came_before_it_has_ended(compiled):
    assert [starts_next for name, *_, starts_next in compiled if name == EMBEDDING] == [False]


def test_a_kernel_whose_next_one_reads_the_choice_early_waits_before_that_one_starts(compiled):
    early = {name for name, *_, starts_next in compiled if starts_next}
    assert not set(STARTED_LATE.values()) & early
    # They do read them early: else the order would have no reason.
    reads = {name: set(found) for name, found, *_ in compiled}
    assert all("runs" in reads[name] for name in STARTED_LATE)
