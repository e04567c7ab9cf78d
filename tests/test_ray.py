"""Ray: a job on several replicas, and a step of a pipeline, while processes are killed.

Ray runs in processes of its own here: its threads would be in the way of tests that fork.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from call_helpers import make_folder, make_llm
from job_helpers import arguments, kept_lines, read_lines, some_lines, write_lines
from process_helpers import descendants, started
from test_readme import GUIDE, ROOT, code_blocks

from nanovllm import SamplingParams
from nanovllm.__main__ import main
from nanovllm.apps.jobs.errors import RefusedError
from nanovllm.apps.jobs.pool import ReplicaLostError
from nanovllm.apps.ray_replicas import STEP_TIMEOUTS, RayCluster, resources_of
from nanovllm.config import Config

TESTS = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "RAY_USAGE_STATS_ENABLED": "0"}
NUM_LINES = 200
SECONDS = 240  # then a process counts as hung
# Then a replica does, after STEP_TIMEOUTS times as long: on a busy machine others may be slow, too.
STEP_TIMEOUT = 2.5

needs_ray = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "import ray.data"], capture_output=True, timeout=SECONDS
    ).returncode
    != 0,
    reason='needs Ray: pip install -e ".[ray]"',
)

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="needs Linux")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


# Without Ray.


def test_one_replica_imports_nothing_of_ray(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    argv = arguments(source, tmp_path / "out.jsonl", model)
    code = (
        f"import sys; from nanovllm.__main__ import main; assert main({argv}) == 0; "
        "print([name for name in sys.modules if name.split('.')[0] == 'ray' or "
        "name.startswith(('nanovllm.apps.ray', 'nanovllm.apps.jobs.pool'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--replicas", "2"], "pip install 'nanovllm[ray]'"),
        (["--address", "auto"], "pip install 'nanovllm[ray]'"),
        (["--replicas", "0"], "--replicas is 0: use 1 or more"),
        (["--replicas", "2", "--device", "cuda:1"], "Ray assigns GPUs to each replica: use cuda"),
        (["--replicas", "2", "--trace", "run.html"], "--trace records a single LLM"),
    ],
)
def test_replicas_that_cannot_be_are_refused(model, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    assert main([*arguments(source, tmp_path / "out.jsonl", model), *flags]) == 2
    assert words in capsys.readouterr().err


def test_each_replica_takes_the_gpus_of_its_ranks_and_no_other_takes_any():
    there = {"CPU": 8.0, "GPU": 4.0}
    auto, ranks = Config("m"), Config("m", tensor_parallel_size=2)
    assert resources_of(auto, 4, there, is_local=True) == {"num_cpus": 1, "num_gpus": 1}
    assert resources_of(ranks, 2, there, is_local=True) == {"num_cpus": 1, "num_gpus": 2}
    assert resources_of(Config("m", device="cpu"), 4, there, is_local=True) == {"num_cpus": 2}
    assert resources_of(auto, 16, {"CPU": 8.0}, is_local=True) == {"num_cpus": 1}
    assert resources_of(auto, 2, {"CPU": 8.0}, is_local=False) == {"num_cpus": 1}
    with pytest.raises(RefusedError, match="take 6 GPUs, and there are 4"):
        resources_of(ranks, 3, there, is_local=True)
    # A cluster may grow.
    assert resources_of(ranks, 3, there, is_local=False) == {"num_cpus": 1, "num_gpus": 2}


def test_what_an_actor_refuses_ends_the_job_and_what_it_dies_of_does_not():
    """Ray wraps what an actor raised, and tells the death of one by errors of its own."""

    class RayError(Exception):
        cause: Exception

    class RayTaskError(RayError):
        pass

    def get(error):
        raise error

    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    ray = SimpleNamespace(
        exceptions=errors, get=get, remote=lambda _: SimpleNamespace(options=dict)
    )
    cluster = RayCluster(ray, Config("m"), {})
    wrapped = RayTaskError("a page of traceback")
    wrapped.cause = RefusedError("no such option")
    with pytest.raises(RefusedError, match="^no such option$"):
        cluster.result(wrapped)
    wrapped.cause = RuntimeError("out of memory")
    with pytest.raises(ReplicaLostError, match="^RuntimeError: out of memory$"):
        cluster.result(wrapped)
    with pytest.raises(ReplicaLostError, match="^The actor died$"):
        cluster.result(RayError("The actor died.\n\tclass_name: Actor"))


# A job.


class Driver:
    """A process that does a job with two replicas, its progress watched.

    Each replica decodes one line at a time, so that the job lasts several times as long as its
    progress takes to be seen: else a fast machine ends the job before anything is killed.
    """

    def __init__(self, argv: list[str], log: Path, stack: ExitStack) -> None:
        argv.remove("--quiet")
        command = [
            sys.executable,
            "-m",
            "nanovllm",
            *argv,
            "--replicas",
            "2",
            "--max-num-seqs",
            "1",
        ]
        self.log = log
        with open(log, "w") as errors:
            self.process = stack.enter_context(
                started(command, env=ENV, stdout=subprocess.PIPE, stderr=errors, text=True)
            )

    def wait_for_lines(self, num_lines: int) -> None:
        """Until so many are done, those of earlier runs included."""
        while self.num_done() < num_lines:
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(self.log.read_text())

    def num_done(self) -> int:
        done = re.findall(rf"(\d+)/{NUM_LINES} ", self.log.read_text())
        return int(done[-1]) if done else 0

    def actors(self) -> list[int]:
        return [
            pid
            for pid in descendants(self.process.pid, zombies=False)
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Actor")
        ]


def socket_files(pids: set[int]) -> dict[Path, int]:
    """The sockets in folders that processes listen on, and what others may do with a folder on
    the path to each.
    """
    inodes = set()
    for pid in pids:
        for name in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes |= {*re.findall(r"socket:\[(\d+)\]", os.readlink(name))}
    paths = [
        Path(fields[7])
        for fields in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:])
        if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("/")
    ]
    return {path: min(one.stat().st_mode & 0o077 for one in path.parents) for path in paths}


def left_after(seconds: float, pids: set[int], folders: set[Path]) -> tuple[set, set]:
    """The processes and the folders that are still there after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = {pid for pid in pids if is_alive(pid)}
        there = {folder for folder in folders if folder.exists()}
        if not left and not there:
            break
        time.sleep(0.1)
    return left, there


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids: set[int]) -> set[str]:
    """The addresses that processes listen on, in the kernel's hexadecimal notation."""
    sockets = set()
    for pid in pids:
        for name in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets |= {*re.findall(r"socket:\[(\d+)\]", os.readlink(name))}
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                found.add(local.split(":")[0])
    return found


@pytest.fixture(scope="module")
def job(model, tmp_path_factory):
    """A job whose process is killed. Of the process that goes on with it, a replica is killed, and
    then another one is stopped, which hangs as far as anybody can see.
    """
    folder = tmp_path_factory.mktemp("job")
    source = write_lines(folder / "in.jsonl", some_lines(NUM_LINES, most_tokens=100))
    sampling = ("--temperature", "0.8", "--seed", "5")
    assert main([*arguments(source, folder / "alone.jsonl", model), *sampling]) == 0
    output = folder / "out.jsonl"
    argv = [*arguments(source, output, model), *sampling]

    with ExitStack() as stack:
        first = Driver(argv.copy(), folder / "first.log", stack)
        first.wait_for_lines(30)
        processes = {first.process.pid, *descendants(first.process.pid)}
        seen = {"listening": listening(processes), "sockets": socket_files(processes)}
        first.process.kill()
        first.process.wait(SECONDS)
        seen["left"] = left_after(10, processes, {path.parents[3] for path in seen["sockets"]})
        seen["kept"] = len(kept_lines(output))

        second = Driver([*argv, "--step-timeout", str(STEP_TIMEOUT)], folder / "second.log", stack)
        second.wait_for_lines(seen["kept"] + 30)
        seen["actors"] = second.actors()
        os.kill(seen["actors"][0], signal.SIGKILL)
        os.kill(seen["actors"][1], signal.SIGSTOP)
        seen["done_at_death"] = second.num_done()
        said, _ = second.process.communicate(timeout=SECONDS)
    seen |= {"status": second.process.returncode, "said": said, "log": second.log.read_text()}
    return seen | {"output": output, "alone": folder / "alone.jsonl"}


@needs_ray
def test_a_job_whose_process_and_replicas_are_killed_ends_as_an_undisturbed_one(job):
    """In the order of the input, with the same tokens and the same errors of bad lines."""
    assert job["status"] == 0, job["log"]
    assert len(job["actors"]) == 2 and 30 <= job["kept"] < job["done_at_death"] < NUM_LINES
    assert job["output"].read_bytes() == job["alone"].read_bytes()
    assert job["log"].count("a replica was lost: ") >= 2
    silent = re.findall("a replica was lost: it has not answered for ([0-9]+) s", job["log"])
    assert silent and min(map(int, silent)) >= STEP_TIMEOUT * STEP_TIMEOUTS


@needs_ray
def test_a_job_on_replicas_computes_nothing_that_was_kept(job):
    assert job["said"].startswith(f"{NUM_LINES} lines done, {job['kept']} of them in earlier runs")
    computed = sum(len(record.get("token_ids", ())) for record in read_lines(job["output"]))
    assert f" {computed:,} output tokens;" in job["said"]


@needs_ray
@needs_proc
def test_on_this_machine_ray_listens_on_the_loopback_interface_alone(job):
    assert job["listening"]
    assert job["listening"] <= {"0100007F", "0000000000000000FFFF00000100007F"}


@needs_ray
@needs_proc
def test_nobody_else_can_reach_the_sockets_of_a_session(job):
    """Ray unpickles what comes out of them."""
    assert {path.name for path in job["sockets"]} >= {"plasma_store", "raylet"}
    assert not [path for path in job["sockets"] if path.is_relative_to("/tmp/ray")]
    assert {*job["sockets"].values()} == {0}


@needs_ray
@needs_proc
def test_nothing_of_a_session_outlives_a_driver_that_is_killed(job):
    """Neither processes nor files. Two of Ray's processes would go on for a minute."""
    assert job["left"] == (set(), set())


# A pipeline, first without Ray: what an actor does with a batch.


@pytest.fixture(scope="module")
def generate(model):
    pytest.importorskip("pyarrow")
    from nanovllm.apps.ray import Generate

    params = SamplingParams(temperature=0, max_tokens=6)
    return Generate(model, params, keep=["note"], device="cpu", max_model_len=256)


def batch_of(rows: list[dict]):
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def test_a_batch_may_ask_by_text_token_ids_and_messages_and_for_more_than_text(generate, model):
    messages = [{"role": "user", "content": "in"}]
    rows = [
        {"prompt": "the", "note": b"\xff", "id": 7, "prompt_token_ids": None, "messages": None},
        {"prompt_token_ids": [5, 6], "logprobs": 1, "note": None},
        {"messages": messages, "n": 2, "temperature": 1.0, "seed": 3},
    ]
    text, ids, chat = generate(batch_of(rows)).to_pylist()
    with make_llm(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
        first, second = llm.generate([llm.encode("the")[0], [5, 6]], params, use_tqdm=False)
        params = SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=6)
        (third,) = llm.chat(messages, params, use_tqdm=False)
    assert (text["token_ids"], text["text"]) == (first["token_ids"], first["text"])
    assert (text["id"], text["note"], text["error"]) == (7, b"\xff", None)  # as they were
    assert ids["token_ids"] == second["token_ids"] and ids["num_prompt_tokens"] == 2
    assert [dict(one).keys() for one in ids["logprobs"]] == [
        one.keys() for one in second["logprobs"]
    ]
    assert [one["token_ids"] for one in chat["completions"]] == [
        one["token_ids"] for one in third["completions"]
    ]


def test_rows_at_the_same_place_of_two_batches_draw_by_noise_of_their_own(generate):
    batch = batch_of([{"prompt": "the", "note": "", "temperature": 1.0, "max_tokens": 20}])
    (first,), (second,) = generate(batch).to_pylist(), generate(batch).to_pylist()
    assert first["token_ids"] != second["token_ids"]


def test_every_batch_has_the_same_columns(generate):
    """A batch without an error, or without a row, must go with others into one file."""
    schemas = [
        generate(batch_of(rows)).schema
        for rows in ([{"prompt": "the", "note": "a"}], [{"prompt": None, "note": "b"}])
    ]
    empty = batch_of([{"prompt": "the", "note": "a"}]).slice(0, 0)
    assert schemas[0] == schemas[1] == generate(empty).schema


def test_what_is_wrong_with_a_whole_dataset_is_said_and_not_put_into_each_row(generate, model):
    with pytest.raises(TypeError, match="batch_format='pyarrow'"):
        generate({"prompt": ["the"]})
    with pytest.raises(
        ValueError, match=r"'max_token', which is not a field.*keep=\['max_token'\]"
    ):
        generate(batch_of([{"prompt": "the", "note": "", "max_token": 3}]))
    with pytest.raises(ValueError, match="'note', which is not a column"):
        generate(batch_of([{"prompt": "the"}]))
    with pytest.raises(ValueError, match="'text', which is a column of the results"):
        type(generate)(model, keep=["text"])
    with pytest.raises(TypeError, match="max_seqs"):
        type(generate)(model, max_seqs=3)


def test_an_actor_serves_the_next_batch_after_one_that_raised(generate):
    batch = batch_of([{"prompt": "the", "note": ""}] * 3)
    expected = generate(batch).to_pylist()
    remove = generate._llm.on_step(lambda record: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        generate(batch)
    remove()
    assert generate(batch).to_pylist() == expected


@pytest.fixture(scope="module")
def pipeline(model, tmp_path_factory) -> dict:
    """What the guide's script makes of 60 rows, in batches of 8, with an actor that is killed."""
    folder = tmp_path_factory.mktemp("pipeline")
    (script,) = [code for _, code in code_blocks(GUIDE, "python") if "import ray\n" in code]
    for old, new in {
        "ray.init()": "ray.init(address='local', num_cpus=4, include_dashboard=False, "
        "object_store_memory=2**27)",
        "nanovllm.apps.ray import Generate": "ray_faults import DyingGenerate as Generate",
        "batch_size=4096": "batch_size=8",
        "num_gpus=1": "num_cpus=1",
        '"keep"': '"device": "cpu", "max_model_len": 256, "keep"',
    }.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    rows = [row | {"id": i} for i, row in enumerate(some_rows())]
    source = write_lines(folder / "in.jsonl", rows)
    run = subprocess.run(
        [sys.executable, "-c", script, str(model), str(source), str(folder / "out")],
        env=ENV | {"ONE_DEATH": str(folder / "death"), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
    assert (folder / "death").exists()
    import pyarrow.parquet

    results = pyarrow.parquet.read_table(folder / "out").to_pylist()
    return {"rows": rows, "results": results}


def some_rows() -> list[dict]:
    rows = [
        {"prompt": "the" + " in" * (i % 5) + "x" * i, "max_tokens": 4 + i % 8} for i in range(60)
    ]
    rows[20] |= {"temperature": -1}
    rows[31] |= {"prompt": "x" * 500}
    rows[45] |= {"prompt": None}
    return rows


@needs_ray
def test_each_row_comes_back_right_once_though_an_actor_is_killed(pipeline, model):
    results = {result["id"]: result for result in pipeline["results"]}
    assert len(pipeline["results"]) == 60 and {*results} == {*range(60)}
    good = [row for row in pipeline["rows"] if results[row["id"]]["error"] is None]
    params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"]) for row in good]
    with make_llm(model) as llm:
        outputs = llm.generate([row["prompt"] for row in good], params, use_tqdm=False)
    for row, output in zip(good, outputs):
        result = results[row["id"]]
        assert result["token_ids"] == output["token_ids"]
        assert (result["prompt"], result["text"]) == (row["prompt"], output["text"])


@needs_ray
def test_a_bad_row_gets_an_error_and_its_batch_does_not_fail(pipeline):
    errors = {result["id"]: result["error"] for result in pipeline["results"] if result["error"]}
    assert {*errors} == {20, 31, 45}
    assert "temperature is -1" in errors[20] and "has no prompt" in errors[45]
    assert "max_model_len" in errors[31]
