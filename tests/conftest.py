"""What the tests share: random small checkpoints, their greedy output by transformers, and LLMs
that run them.
"""

import faulthandler
import os
import signal
import sys

import torch

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter; the choice must be made before triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where pytest runs in the background, Ctrl-C may be ignored from the start, and tests of interrupts
# would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from call_helpers import Plain, check_empty, make_folder
from engine_helpers import FAMILIES, MODELS, Checkpoint, save_checkpoint
from hypothesis import HealthCheck, settings
from interpreter_helpers import check_bounds, speed_up_the_interpreter
from process_helpers import fresh_process

from nanovllm import LLM
from nanovllm.backends.cpu.threads import usable_cores

# Time says nothing on a machine that others use too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up_the_interpreter()
    check_bounds()
torch.set_num_threads(1)  # the models are so small that more threads only wait for each other


# A test that hangs fails, and so does its clean-up. Where Python gets no turn to say so, pytest
# ends the run instead: faulthandler_timeout in pyproject.toml.
HANGS_SECONDS, AGAIN_SECONDS = 480, 60


@pytest.hookimpl(wrapper=True)
def fail_if_it_hangs(item):
    def fail(*_):
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"it hangs: it took {HANGS_SECONDS} s, see where each thread is")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, HANGS_SECONDS, AGAIN_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = fail_if_it_hangs


def pytest_enter_pdb():
    signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_unconfigure():
    """A thread that hangs does not keep the process from ending."""
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True, file=sys.__stderr__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Take `-n auto` as a process for each core that has 3 GB of memory, or one on a GPU."""
    if torch.cuda.is_available():
        return 1  # whose memory an LLM takes whole
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(usable_cores(), int(memory // 3e9)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each process a run of files, since tests of a file share what is slow to make."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def get_checkpoint(tmp_path_factory):
    """A function: the name of a model in MODELS or FAMILIES -> its Checkpoint, made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_checkpoint(folder, (MODELS | FAMILIES)[name])
            made[name] = Checkpoint(folder)
        return made[name]

    return get


@pytest.fixture
def checkpoint(get_checkpoint) -> Checkpoint:
    return get_checkpoint("gqa-2")


@pytest.fixture
def make_llm(checkpoint):
    """A function: options -> an LLM on the CPU with small blocks; all are closed after the test."""
    made: list[LLM] = []

    def make(folder=checkpoint.folder, **options) -> LLM:
        options = {
            "device": "cpu",
            "max_model_len": 256,
            "kvcache_block_size": 16,
            "num_kvcache_blocks": 96,
        } | options
        made.append(LLM(folder, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model folder of call_helpers.py, for tests that do not change it."""
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(folder):
    return Plain(folder)


@pytest.fixture(scope="module")
def fresh():
    """A function: call(function, *args) has a process that has done nothing else do that."""
    with fresh_process() as call:
        yield call


@pytest.fixture
def empty_afterwards(request):
    """Of a test that uses `llm`: nothing is left in it."""
    yield
    if "llm" in request.fixturenames:
        check_empty(request.getfixturevalue("llm"))
