"""Jobs: whatever happens to them, each line of the input ends with exactly one result."""

import bz2
import gzip
import json
import lzma
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
import zipfile
from contextlib import closing, nullcontext, redirect_stderr, suppress
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path

import job_helpers
import pytest
from call_helpers import make_folder, make_llm
from effort import EFFORT
from job_helpers import (
    Stopped,
    StubEngine,
    arguments,
    as_job,
    journal_of,
    kept_lines,
    read_lines,
    run_stub,
    some_lines,
    stop_after,
    watch,
    write_lines,
)
from process_helpers import SECONDS, in_thread
from tqdm.auto import tqdm

from nanovllm import SamplingParams
from nanovllm.__main__ import main
from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.apps.jobs.job import FREE, run_job
from nanovllm.apps.jobs.journal import MOST_LOGGED, Journal, Result, files_of
from nanovllm.config import Config
from nanovllm.whole_files import part_of

TESTS = Path(__file__).parent
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path):
    """A function: lines of the input, further arguments -> (exit code, path of the output)."""

    def run(lines, *more: str, name: str = "out.jsonl") -> tuple[int, Path]:
        source = tmp_path / "in.jsonl"
        if lines is not None:
            write_lines(source, lines)
        return main(arguments(source, tmp_path / name, model, *more)), tmp_path / name

    return run


def greedy(model: Path, prompts: list, max_tokens: int = 8) -> list[list[int]]:
    with make_llm(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [one["token_ids"] for one in llm.generate(prompts, params, use_tqdm=False)]


# What a job does.


def test_each_line_gets_the_tokens_of_generate_in_the_order_of_the_input(run, model):
    prompts = ["the", "in the", " the the in", "t", "the in"]
    lines = [{"prompt": text, "max_tokens": 8 - i} for i, text in enumerate(prompts)]
    status, output = run(lines, *GREEDY)
    assert status == 0
    records = read_lines(output)
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    expected = [ids[: 8 - i] for i, ids in enumerate(greedy(model, prompts))]
    assert [record["token_ids"] for record in records] == expected


def test_it_runs_as_a_module_and_ends_with_a_line_of_totals(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}, {"prompt": 1}])
    argv = arguments(source, tmp_path / "out.jsonl", model, *GREEDY)
    argv.remove("--quiet")
    command = [sys.executable, "-m", "nanovllm", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 lines done: 1 failed, 1 prompt tokens, 8 output tokens; ")
    assert done.stdout.count("\n") == 1
    bar = done.stderr.split("\r")[-1]
    assert "2/2" in bar and "1 failed" in bar and "tokens, prefill" in bar


def test_the_bar_shows_tokens_before_any_line_is_done(model, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.frontend.progress.REFRESH_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", shown := StringIO())
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 3)

    class Slow(StubEngine):
        def step(self):
            if self.num_decode_tokens == 20:
                assert "0/3" in shown.getvalue() and "0 failed, 1,020 tokens" in shown.getvalue()
                return super().step()
            self.num_prefill_tokens, self.num_decode_tokens = 1000, self.num_decode_tokens + 10
            return []

    run_stub(replace(as_job(source, tmp_path / "out.jsonl", model), show_progress=True), Slow())
    assert "3/3" in shown.getvalue()


def test_without_stderr_it_shows_no_progress_and_ends(model, tmp_path, monkeypatch):
    """As in a daemon."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    argv = arguments(source, tmp_path / "out.jsonl", model, *GREEDY)
    argv.remove("--quiet")
    monkeypatch.setattr(sys, "stderr", None)
    assert main(argv) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_on_a_full_disk_the_bar_costs_no_results(model, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    argv = arguments(source, tmp_path / "out.jsonl", model, *GREEDY)
    argv.remove("--quiet")
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:  # closing it fails, too
        monkeypatch.setattr(sys, "stderr", full)
        code = main(argv)
    assert code == 0
    assert len(read_lines(tmp_path / "out.jsonl")) == 1


def test_without_a_bar_it_does_not_wait_for_tqdms_lock(model, tmp_path):
    job = as_job(write_lines(tmp_path / "in.jsonl", some_lines(5)), tmp_path / "out.jsonl", model)
    with tqdm.get_lock():
        in_thread(lambda: run_stub(job)).result(SECONDS)


def test_without_arguments_it_says_what_there_is(capsys):
    assert main([]) == 0
    assert "run " in capsys.readouterr().out


def test_every_option_and_sampling_field_is_a_flag(capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for field in (*fields(Config), *fields(SamplingParams)):
        if field.name != "logits_processors":  # which no flag can say
            assert f"--{field.name.replace('_', '-')}" in said


def test_flags_reach_the_classes_that_check_them(run, monkeypatch):
    made = {}
    monkeypatch.setattr("nanovllm.apps.jobs.command.run_job", lambda job, *_: made.update(job=job))
    flags = "--max_num_seqs 9 --no-enable-prefix-caching --num-kvcache-blocks none --overlap"
    flags += " --dtype float32 --start-timeout 3 --top-k 4 --top_p 0.5 --max-tokens none"
    flags += " --stop a --stop b --stop-token-ids 7 --ignore-eos --seed 3"
    flags += ' --logit-bias {"9":-3.5} --bad-words a --bad-words b --allowed-token-ids 5'
    status, _ = run([], *flags.split())
    assert status == 0
    config, params = made["job"].config, made["job"].params
    assert (config.max_num_seqs, config.enable_prefix_caching, config.overlap) == (9, False, True)
    assert (config.num_kvcache_blocks, config.dtype, config.seed) == (None, "float32", 3)
    assert config.start_timeout == 3
    expected = SamplingParams(
        top_k=4,
        top_p=0.5,
        max_tokens=None,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        logit_bias={9: -3.5},
        bad_words=["a", "b"],
        allowed_token_ids=[5],
    )
    assert params == expected


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--kvcache-block-size", "17"], "multiple of 16"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_a_wrong_option_is_said_before_anything_is_written(run, capsys, flags, word):
    status, output = run([{"prompt": "the"}], *flags)
    assert status == 2 and word in capsys.readouterr().err
    assert not output.exists() and not journal_of(output).exists()


@pytest.mark.parametrize(
    "flag, advice",
    [
        ("--modle", "did you mean --model?"),  # rather than: --model is required
        ("--max-token", "did you mean --max-tokens?"),
        ("--max_token", "did you mean --max-tokens?"),
        ("--no-enforce-eage", "did you mean --no-enforce-eager?"),
        ("--max-new-tokens", "use max_tokens"),
        ("--max-batch-size", "use max_num_seqs"),
        ("--zzz", "see python -m nanovllm run --help"),
    ],
)
@pytest.mark.parametrize("value", [["=8"], ["", "8"]], ids=["joined", "apart"])
def test_an_unknown_flag_is_answered_with_the_one_to_use(capsys, flag, advice, value):
    joined, *apart = value
    with pytest.raises(SystemExit) as end:
        main(["run", "in.jsonl", "-o", "out.jsonl", flag + joined, *apart])
    assert end.value.code == 2
    assert f"there is no flag {flag}: {advice}" in capsys.readouterr().err


def test_what_looks_like_a_flag_and_is_a_value_is_taken(run):
    status, _ = run([{"prompt": "the"}], "--stop", "--no flag, for it has spaces")
    assert status == 0


@pytest.mark.parametrize("flag", ["--logit-bias", "--structured-outputs", "--chat-template-kwargs"])
@pytest.mark.parametrize(
    "value, word", [("{", "'{' is not valid JSON: "), ("[1]", "not a JSON object")]
)
def test_a_flag_that_takes_an_object_says_what_is_wrong_with_another(
    run, capsys, flag, value, word
):
    with pytest.raises(SystemExit) as exit:
        run([{"prompt": "the"}], flag, value)
    assert exit.value.code == 2 and f"argument {flag}: " in (said := capsys.readouterr().err)
    assert word in said


def test_the_engine_is_kept_full_with_a_bounded_queue(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 1000)
    engine = StubEngine(at_once=8)
    step, seen = engine.step, []
    engine.step = lambda: seen.append(engine.num_unfinished) or step()
    run_stub(as_job(source, tmp_path / "out.jsonl", model), engine)
    assert max(seen) <= 8 + 8 * 8
    assert min(seen[:-1]) >= 8
    assert not engine.more_to_come


def test_memory_does_not_grow_with_the_number_of_lines(model, tmp_path, monkeypatch):
    """Bytes a line at the peak: of a million lines less than 100 MB."""

    monkeypatch.setattr("nanovllm.apps.jobs.journal.MOST_QUEUED", 64)

    def peak(count: int) -> int:
        source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * count)
        tracemalloc.start()
        run_stub(as_job(source, tmp_path / f"out-{count}.jsonl", model))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(100)
    assert peak(4_000) - peak(1_000) < 100 * 3_000


@pytest.mark.parametrize("policy", ["throughput", "fcfs"])
def test_a_job_starts_its_requests_as_generate_does_unless_it_is_told_otherwise(
    run, monkeypatch, tmp_path, policy
):
    """By length, not in the order in which they come."""
    lines = [{"prompt": "the", "max_tokens": 1 + i} for i in range(6)]
    watch(monkeypatch.setattr, tmp_path / "log")
    flags = ["--ignore-eos", "--max-num-seqs", "1", "--scheduling-policy", policy]
    assert run(lines, *GREEDY, *flags)[0] == 0
    ended = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert ended == ([6, 5, 4, 3, 2, 1] if policy == "throughput" else [1, 2, 3, 4, 5, 6])


# Bad lines.

BAD = {
    "": "the line is empty",
    "   ": "the line is empty",
    "nonsense": "the line is not valid JSON",
    '{"prompt": "the"': "the line is not valid JSON",
    '{"prompt": "the", "temperature": NaN}': "NaN",
    "[1, 2]": "the line is a JSON list",
    "[" * 100_000: "the line is not valid JSON",
    '{"id": 3}': "the request has no prompt",
    '{"prompt": "the", "messages": []}': "the request has prompt and messages",
    '{"prompt": ["the"]}': "prompt is ['the']",
    '{"prompt": ""}': "is empty",
    '{"prompt": "\\ud800"}': "half a character",
    '{"prompt_token_ids": [1, 1000000]}': "1000000",
    '{"prompt_token_ids": [true]}': "True",
    '{"prompt": "the", "max_token": 3}': "did you mean max_tokens?",
    '{"prompt": "the", "max_tokens": 3.5}': "max_tokens is 3.5",
    '{"prompt": "the", "temperature": -2}': "temperature is -2",
    '{"prompt": "the", "top_p": "1"}': "top_p is '1'",
    '{"prompt": "the", "priority": 3}': "--scheduling-policy priority",
    '{"messages": ["hello"]}': "messages[0]",
    '{"messages": [{"role": "system", "content": "x"}]}': "unknown role",
    '{"messages": [], "chat_template_kwargs": 3}': "chat_template_kwargs is 3",
    f'{{"prompt": "{"the " * 300}"}}': "max_model_len is 256",
}


def test_a_bad_line_gets_an_error_with_its_number_and_the_job_goes_on(run):
    lines = [line for bad in BAD for line in (bad, {"prompt": "the", "id": "good"})]
    status, output = run(lines, *GREEDY)
    assert status == 0
    records = read_lines(output)
    assert [record["line"] for record in records] == list(range(1, len(lines) + 1))
    for number, (problem, record) in enumerate(zip(BAD.values(), records[::2])):
        assert record["error"].startswith(f"line {2 * number + 1}: ")
        assert problem in record["error"]
    assert len({json.dumps(record["token_ids"]) for record in records[1::2]}) == 1


def test_strict_stops_at_a_bad_line_and_keeps_what_was_done(run, capsys):
    lines = [{"prompt": "the"}] * 9 + ["nonsense"] + [{"prompt": "in"}] * 200
    status, output = run(lines, "--strict", *GREEDY)
    assert status == 1 and not output.exists()
    said = capsys.readouterr().err
    assert "line 10: the line is not valid JSON" in said and "Without --strict" in said
    assert 10 not in kept_lines(output)
    status, _ = run(None, *GREEDY)
    assert status == 0 and "error" in read_lines(output)[9]


def test_strict_after_a_run_that_was_not_sees_its_errors(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ["nonsense", *[{"prompt": "x"}] * 99])
    job = as_job(source, tmp_path / "out.jsonl", model)
    stop_after(job, 5)
    strict = as_job(source, tmp_path / "out.jsonl", model, strict=True)
    with pytest.raises(JobError, match="line 1 failed in an earlier run"):
        run_stub(strict)
    run_stub(job)
    with pytest.raises(JobError, match="line 1 failed .* or start over with another output"):
        run_stub(strict)
    assert "already complete" in run_stub(job)


def test_files_of_other_systems_are_read(model, tmp_path):
    """A byte order mark, carriage returns, and no newline at the end."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xc3\xa9"}\r\n{"prompt": "c"}')
    run_stub(as_job(source, tmp_path / "out.jsonl", model))
    texts = [record["text"] for record in read_lines(tmp_path / "out.jsonl")]
    assert texts == ["answer to a", "answer to é", "answer to c"]


def test_an_empty_input_gives_an_empty_output(run):
    status, output = run([])
    assert status == 0 and output.read_bytes() == b""


def test_a_byte_order_mark_alone_is_an_empty_input(model, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf")
    run_stub(as_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_line_that_would_fill_the_memory_is_an_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.apps.jobs.files.LONGEST_LINE", 1000)
    monkeypatch.setattr("nanovllm.apps.jobs.files.PIECE", 64)
    lines = [{"prompt": "x" * length} for length in (3, 985, 986, 5000, 3)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert [len(line) for line in source.read_text().splitlines()][1] == 999
    run_stub(as_job(source, tmp_path / "out.jsonl", model))
    records = read_lines(tmp_path / "out.jsonl")
    assert ["error" in record for record in records] == [False, False, True, True, False]
    assert "longer than 1000 bytes" in records[2]["error"]


def test_records_are_lines_for_every_reader(model, tmp_path):
    """Some readers end a line at more characters than a newline."""
    ids = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0cb\nc\r", "\ud800", "日本"]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "id": id} for id in ids])
    run_stub(as_job(source, tmp_path / "out.jsonl", model))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids


# Killed, stopped, and gone on with.


def test_a_job_killed_at_random_instants_ends_as_an_undisturbed_one(model, tmp_path):
    """And computes no line again whose result was kept; and shows no output but a complete one."""
    kills = 15 * EFFORT
    killer = [sys.executable, TESTS / "job_killer.py", tmp_path, model, f"{kills}"]
    done = subprocess.run(killer, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["kills"] >= kills and seen["midway"] >= 2
    assert {seen[name] for name in ("wrong", "recomputed", "lost", "torn")} == {0}
    assert seen["left"] == []


def test_nothing_that_was_kept_is_computed_again(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}"} for i in range(300)])
    job = as_job(source, tmp_path / "out.jsonl", model)
    computed: list[int] = []

    class Counting(StubEngine):
        def step(self):
            ended = super().step()[::-1]  # not in the order of the input
            computed.extend(request.line for request, _ in ended)
            return ended

    def stop() -> None:
        if len(computed) > most:
            raise Stopped

    for most in (0, 20, 100, 200):  # noqa: B007  that `stop` reads
        with pytest.raises(Stopped):
            run_stub(job, Counting(), stop)
        assert kept_lines(job.output) == set(computed)
    run_stub(job, Counting())
    assert sorted(computed) == list(range(1, 301))
    assert [record["text"] for record in read_lines(job.output)] == [
        f"answer to {i}" for i in range(300)
    ]


def test_noise_does_not_depend_on_where_a_job_was_stopped(run, model, monkeypatch, tmp_path):
    """Without a seed, too: the job chooses one, and keeps it."""
    lines = [{"prompt": "the"}] * 40
    at_random = ("--temperature", "2", "--max-tokens", "6")

    def stop_midway() -> None:
        if (tmp_path / "log").read_text().count("\n") >= 12:
            raise KeyboardInterrupt

    watch(monkeypatch.setattr, tmp_path / "log", stop_midway)
    with pytest.raises(KeyboardInterrupt):
        run(lines, *at_random)
    output = tmp_path / "out.jsonl"
    assert 0 < len(kept_lines(output)) < 40
    seed = seed_of(output)
    job_helpers.WatchedWorker.hook = staticmethod(lambda: None)
    assert run(None, *at_random)[0] == 0
    _, other = run(None, *at_random, "--seed", str(seed), name="other.jsonl")
    assert output.read_bytes() == other.read_bytes()
    assert len({json.dumps(record["token_ids"]) for record in read_lines(output)}) > 30


def seed_of(output: Path) -> int:
    with closing(sqlite3.connect(journal_of(output))) as db:
        ((value,),) = db.execute("SELECT value FROM job WHERE key = 'seed'")
        return int(value)


def test_what_was_written_a_second_ago_survives_a_loss_of_power(tmp_path):
    """What is forced to the disk is in the journal's file; what is not may be in its log alone,
    of which a loss of power may leave nothing.
    """
    with_journal = Journal(tmp_path / "journal")
    with_journal.begin({"seed": 1})
    with with_journal as journal:
        for line in range(1, 4):
            journal.add(Result(line, False, 1, 1, {"line": line}))
        time.sleep(0.2)
        journal.add(Result(4, False, 1, 1, {"line": 4}))
        deadline = time.monotonic() + SECONDS
        lines = None
        while lines != [1, 2, 3, 4] and time.monotonic() < deadline:
            time.sleep(0.1)
            shutil.copy(tmp_path / "journal", tmp_path / "after")
            with suppress(sqlite3.DatabaseError):  # copied in the middle of a write
                with closing(sqlite3.connect(tmp_path / "after")) as db:
                    lines = [line for (line,) in db.execute("SELECT line FROM results")]
    assert lines == [1, 2, 3, 4]
    with_journal.close()


def single_results(count: int, size: int):
    lines = list(range(1, count + 1))
    random.Random(1).shuffle(lines)
    return [Result(line, False, 1, 1, {"text": "x" * size}) for line in lines]


def log_bytes(journal: Journal) -> int:
    return files_of(journal.path)[1].stat().st_size


def test_the_log_of_a_journal_stays_small_however_much_is_written(tmp_path):
    """Each commit writes whole pages to it: 2,000 small results, one by one, are 25 MB."""
    with closing(Journal(tmp_path / "journal")) as journal:
        most = 0
        for result in single_results(2000, 300):
            journal._insert([result])
            most = max(most, log_bytes(journal))
        assert most < 2 * MOST_LOGGED
        journal._insert([one._replace(line=10_000 + one.line) for one in single_results(900, 9000)])
        assert log_bytes(journal) < 2 * MOST_LOGGED, "nor by many results at once"
        assert journal.totals().done == 2900
        journal.finish({})
        assert log_bytes(journal) < 2 * MOST_LOGGED, "nor by what drops the results"


def test_what_a_killed_run_has_left_in_the_log_is_moved_out_of_it_first(tmp_path):
    path = tmp_path / "journal"
    with closing(Journal(path)) as journal:
        journal.begin({"identity": {}})
        journal._insert(single_results(50, 300))
        for source in files_of(path)[:2]:
            shutil.copy(source, tmp_path / source.name.replace("journal", "copy"))
    with closing(Journal(tmp_path / "copy")) as copy:
        assert copy.totals().done == 50 and log_bytes(copy) == 0


def signalled_main(argv: list[str], log: Path, number: int) -> tuple[int, str]:
    """A job's exit code and what it said, of which a few steps let the signal be sent."""

    def send() -> None:
        if log.read_text().count("\n") > 5:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
        watch(patch.setattr, log, send)
        return main(argv), said.getvalue()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_job_cleanly_and_says_how_to_go_on(fresh, model, tmp_path, number, status):
    source = write_lines(tmp_path / "in.jsonl", some_lines(60))
    argv = arguments(source, tmp_path / "out.jsonl", model, *GREEDY)
    log = tmp_path / "log"
    ended_with, said = fresh(signalled_main, argv, log, number)
    assert ended_with == status and "Run the same command again to resume" in said
    # What was computed is kept: the step was not broken off.
    assert {int(line) for line in log.read_text().split()} <= kept_lines(tmp_path / "out.jsonl")
    assert main(argv) == 0
    assert len(read_lines(tmp_path / "out.jsonl")) == 60


def test_a_job_that_is_done_is_not_done_again(run, capsys, monkeypatch):
    _, output = run([{"prompt": "the", "id": "x" * 50_000}], *GREEDY)
    before = output.read_bytes()
    monkeypatch.setattr("nanovllm.apps.jobs.command.LLM", None)
    assert run(None, *GREEDY)[0] == 0
    assert "already complete" in capsys.readouterr().out
    assert output.read_bytes() == before
    assert journal_of(output).stat().st_size < 40_000


def test_a_job_whose_output_was_taken_away_is_done_anew(run):
    _, output = run([{"prompt": "the"}], *GREEDY)
    before = output.read_bytes()
    output.unlink()
    assert run([{"prompt": "the"}], *GREEDY)[0] == 0
    assert output.read_bytes() == before


def test_the_last_pass_alone_is_repeated_if_it_was_cut_off(model, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 20)
    job = as_job(source, tmp_path / "out.jsonl", model)
    for name in ("os.replace", "os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"nanovllm.whole_files.{name}", raise_stopped)
            with pytest.raises(Stopped):
                run_stub(job)
        assert not job.output.exists()
    assert run_job(job, None, lambda: None).startswith("20 lines done, 20 of them in earlier runs")
    assert len(read_lines(job.output)) == 20
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
    }


def raise_stopped(*_: object, **__: object) -> None:
    raise Stopped


# What is refused, and what goes wrong outside.


def refused(run, capsys, *words: str, lines=None, flags=()) -> Path:
    status, output = run(lines, *GREEDY, *flags)
    said = capsys.readouterr().err
    assert status == 2
    assert all(word in said for word in words), said
    return output


@pytest.mark.parametrize("finished", [False, True])
def test_a_job_goes_on_only_as_it_was_begun(run, capsys, model, tmp_path, finished):
    lines = [{"prompt": "the"}] * 100
    output = tmp_path / "out.jsonl"
    if finished:
        run(lines, *GREEDY)
    else:
        run([*lines[:90], "nonsense", *lines[91:]], *GREEDY, "--strict")  # stops midway
        assert 0 < len(kept_lines(output)) < 100
        lines = None
    before = kept_lines(output), output.exists() and output.read_bytes()
    words = ["was started differently", "out.jsonl.journal", "choose another output"]
    changes = {
        "--max-tokens was 8 and is 9": ["--max-tokens", "9"],
        "--temperature was 0.0 and is 0.5": ["--temperature", "0.5"],
        "--seed was None and is 3": ["--seed", "3"],
        "--max-model-len was 256 and is 128": ["--max-model-len", "128"],
        "--stop was [] and is ['x']": ["--stop", "x"],
        "--keep was [] and is ['x']": ["--keep", "x"],
    }
    for change, flags in changes.items():
        refused(run, capsys, change, *words, flags=flags)
    other = shutil.copytree(model, tmp_path / "other")
    weights = sorted(other.glob("*.safetensors"))[-1]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(run, capsys, "the model has changed", *words, flags=["--model", str(other)])
    source = tmp_path / "in.jsonl"
    text = source.read_text()
    for changed in (text.replace("the", "teh", 1), text + '{"prompt": "x"}\n', text[:-20]):
        source.write_text(changed)
        refused(run, capsys, "the input has changed", *words)
    source.write_text(text)
    assert before == (kept_lines(output), output.exists() and output.read_bytes())
    # Another folder with the same model, and other resources, change nothing.
    same = shutil.copytree(model, tmp_path / "same")
    assert run(None, *GREEDY, "--model", str(same), "--max-num-seqs", "3")[0] == 0
    assert len(read_lines(output)) == 100


def test_what_may_change_are_options():
    assert {field.name for field in fields(Config)} >= FREE


def test_a_run_that_computed_nothing_binds_nobody(run, monkeypatch):
    monkeypatch.setattr("nanovllm.apps.jobs.job.compute", raise_stopped)
    with pytest.raises(Stopped):
        run([{"prompt": "the"}], "--max-tokens", "9")
    monkeypatch.undo()
    assert run([{"prompt": "in"}], "--max-tokens", "8")[0] == 0


def test_two_runs_on_one_output_at_a_time_are_refused(fresh, run, model, tmp_path):
    output = tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    journal = Journal(journal_of(output))
    try:
        assert fresh(main, arguments(source, output, model)) == 2
    finally:
        journal.close()
    assert run(None)[0] == 0


def test_two_runs_on_one_output_say_so(run, capsys, tmp_path):
    journal = Journal(journal_of(tmp_path / "out.jsonl"))
    try:
        refused(run, capsys, "is in use: another run", lines=[{"prompt": "the"}])
    finally:
        journal.close()


def test_files_of_others_are_left_alone(run, capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    refused(run, capsys, "already exists", lines=[{"prompt": "the"}])
    assert output.read_text() == "precious"
    output.unlink()
    journal_of(output).write_text("precious " * 100)
    refused(run, capsys, "is not the journal of a job", lines=[{"prompt": "the"}])
    assert journal_of(output).read_text() == "precious " * 100


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_the_name_that_outputs_once_had_until_complete_is_left_alone(
    model, tmp_path, is_link
):
    part = tmp_path / "out.jsonl.part"
    source = write_lines(tmp_path / "in.jsonl" if is_link else part, [{"prompt": "x"}] * 20)
    before = source.read_bytes()
    if is_link:
        part.symlink_to(source)
    run_stub(as_job(part, tmp_path / "out.jsonl", model))
    assert source.read_bytes() == before and part.is_symlink() == is_link
    assert len(read_lines(tmp_path / "out.jsonl")) == 20


def test_what_a_kill_has_left_of_the_output_is_removed(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 20)
    job = as_job(source, tmp_path / "out.jsonl", model)
    stop_after(job, 3)
    with closing(Journal(job.journal)) as journal:
        left = part_of(job.output, journal.state["mark"])
    left.write_text("half")
    run_stub(job)
    assert len(read_lines(job.output)) == 20 and not left.exists()


@pytest.mark.parametrize("end", ["", "-wal", "-journal"])
def test_an_input_that_is_called_as_the_journal_is_refused(model, tmp_path, end):
    source = write_lines(tmp_path / f"out.jsonl.journal{end}", [{"prompt": "x"}])
    before = source.read_bytes()
    with pytest.raises(RefusedError, match="the name of this job's journal: rename the input"):
        run_stub(as_job(source, tmp_path / "out.jsonl", model))
    assert source.read_bytes() == before


def test_a_link_in_the_journals_place_is_refused(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    (tmp_path / "out.jsonl.journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        RefusedError, match="is a symbolic link, but a job writes only to its own files"
    ):
        run_stub(as_job(source, tmp_path / "out.jsonl", model))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("columns", ["photos (name)", "job (name, salary)", "job (key, value)"])
def test_a_database_of_others_is_left_alone(model, tmp_path, columns):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    job = as_job(source, tmp_path / "out.jsonl", model)
    with closing(sqlite3.connect(job.journal)) as db:
        db.execute(f"CREATE TABLE {columns}")
        db.execute("CREATE TABLE more (x)")
        db.commit()
    before = job.journal.read_bytes()
    with pytest.raises(
        RefusedError, match="is not the journal of a job .*'more'.*move the file away"
    ):
        run_stub(job)
    assert job.journal.read_bytes() == before
    job.journal.rename(tmp_path / "moved")
    run_stub(job)
    assert len(read_lines(job.output)) == 1


@pytest.mark.parametrize("damage", ["cut off", "cut short", "overwritten"])
def test_for_a_damaged_journal_the_advice_helps(model, tmp_path, damage):
    lines = [{"prompt": "x" * 1000}] * 100
    job = as_job(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", model)
    stop_after(job, 10)
    data = job.journal.read_bytes()
    half = len(data) // 2 // 4096 * 4096
    assert half > 4096
    shutil.copy(job.journal, tmp_path / "whole")
    rest = {"cut off": b"", "cut short": b"", "overwritten": bytes(len(data) - half)}[damage]
    job.journal.write_bytes(data[: 60 if damage == "cut short" else half] + rest)
    for _ in range(2):
        with pytest.raises(
            RefusedError, match="damaged.* complete copy.* remove the journal, and out.jsonl"
        ):
            run_stub(job)
    if damage == "overwritten":  # results alone: what reads them says so, too
        with closing(Journal(job.journal)) as journal, pytest.raises(RefusedError, match="damaged"):
            list(journal.records())
    # One piece of the advice, then the other.
    shutil.copy(tmp_path / "whole", job.journal)
    run_stub(job)
    expected = job.output.read_bytes()
    job.journal.unlink()
    job.output.unlink()
    run_stub(job)
    assert job.output.read_bytes() == expected and len(read_lines(job.output)) == 100


@pytest.mark.parametrize(
    "name, word",
    [
        ("no/out.jsonl", "the folder exists"),
        (".", "is a folder"),
        ("in.jsonl", "input"),
        ("out.jsonl.gz", "a job writes no compressed files: leave out the .gz"),
    ],
)
def test_an_output_that_cannot_be_is_refused(run, capsys, name, word):
    status, _ = run([{"prompt": "the"}], name=name)
    assert status == 2 and word in capsys.readouterr().err


def test_stdin_as_the_input_is_refused(model, tmp_path, capsys):
    assert main(arguments(Path("-"), tmp_path / "out.jsonl", model)) == 2
    assert "the input is -: name a file, because the input is read" in capsys.readouterr().err


def test_stdout_as_the_output_is_refused(model, tmp_path, monkeypatch, capsys):
    """A file of that name would hide from whoever looks for it in a pipe."""
    monkeypatch.chdir(tmp_path)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the"}])
    assert main(arguments(source, Path("-"), model)) == 2
    assert "the output is -: name a file" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_input_that_cannot_be_read_is_refused(model, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "utf16").write_text('{"prompt": "x"}', encoding="utf-16")
    words = {"none": "No such file", "pipe": "not a regular file", "utf16": "is UTF-16: convert it"}
    for module in (gzip, bz2, lzma):
        name = f"packed.{module.__name__}"
        (tmp_path / name).write_bytes(module.compress(b'{"prompt": "x"}'))
        words[name] = ": unpack it"
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("in.jsonl", '{"prompt": "x"}')
    for name, word in (words | {"packed.zip": "is a zip archive: unpack it"}).items():
        assert main(arguments(tmp_path / name, tmp_path / "out.jsonl", model)) == 2
        assert word in capsys.readouterr().err
    assert not journal_of(tmp_path / "out.jsonl").exists()


def test_an_input_that_changes_during_a_job_ends_it(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 20)
    job = as_job(source, tmp_path / "out.jsonl", model)

    class Cutting(StubEngine):
        def __init__(self):
            super().__init__()
            write_lines(source, [{"prompt": "x"}] * 15)

    with pytest.raises(JobError, match="has changed while the job ran"):
        run_job(job, lambda: nullcontext(Cutting()), lambda: None)
    assert not job.output.exists()


@pytest.mark.parametrize("line", [3, 250], ids=["after it was read", "before it is read"])
def test_an_input_that_is_edited_in_place_during_a_job_is_noticed(
    model, tmp_path, monkeypatch, line
):
    """And no result is of what was written in its place."""
    monkeypatch.setattr("nanovllm.apps.jobs.files.PIECE", 512)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"old {i}"} for i in range(300)])
    text = source.read_text()
    job = as_job(source, tmp_path / "out.jsonl", model)

    class Editing(StubEngine):
        def step(self):
            changed = text.replace(f'"old {line}"', f'"new {line}"')
            with open(source, "r+") as file:
                file.write(changed)
            return super().step()

    with pytest.raises(JobError, match="has changed while the job ran.* restore that version"):
        run_stub(job, Editing())
    assert not job.output.exists()
    source.write_text(text)
    run_stub(job)
    texts = [record["text"] for record in read_lines(job.output)]
    assert texts == [f"answer to old {i}" for i in range(300)]


def test_an_input_that_is_removed_once_it_was_read_is_not_missed(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 20)
    job = as_job(source, tmp_path / "out.jsonl", model)

    class Removing(StubEngine):
        def step(self):
            source.unlink(missing_ok=True)
            return super().step()

    run_stub(job, Removing())
    assert len(read_lines(job.output)) == 20


def test_an_engine_that_fails_ends_the_job_and_what_was_done_is_kept(run, capsys, monkeypatch):
    count = 0

    def fail() -> None:
        nonlocal count
        count += 1
        if count == 10:
            raise FloatingPointError("NaN somewhere")

    with monkeypatch.context() as patch:
        watch(patch.setattr, Path(os.devnull), fail)
        status, output = run([{"prompt": "the", "max_tokens": 1 + i % 5} for i in range(40)])
    said = capsys.readouterr().err
    assert status == 1 and "NaN somewhere" in said and "All finished results are kept" in said
    assert 0 < len(kept_lines(output)) < 40
    assert run(None)[0] == 0 and len(read_lines(output)) == 40


def fill_up(run, capsys, make_room) -> None:
    """A job ends clearly when no more can be written, and goes on when there is room again."""
    status, output = run(None, *GREEDY)
    said = capsys.readouterr().err
    assert status == 1 and "cannot write" in said and "run the same command again" in said
    kept = kept_lines(output)
    assert not output.exists() and not list(output.parent.glob("*.part"))
    make_room()
    assert run(None, *GREEDY)[0] == 0
    assert kept <= set(range(1, 201)) and len(kept) > 10


LONG_IDS = [{"prompt": "the", "id": f"{i}" + "x" * 4000} for i in range(200)]


@pytest.fixture
def tmpfs(tmp_path):
    """A file system with room for half a job."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", ["600k", "1400k"])
def test_on_a_full_file_system_nothing_is_lost(run, capsys, tmpfs, size):
    """600 KB are too small for the journal, 1,400 for the output beside it."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(tmpfs)], check=True)
    _, reference = run(LONG_IDS, *GREEDY)

    def run_there(lines, *more):
        return run(lines, *more, name="full/out.jsonl")

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=9M", str(tmpfs)], check=True)

    fill_up(run_there, capsys, make_room)
    assert (tmpfs / "out.jsonl").read_bytes() == reference.read_bytes()
    assert {path.name for path in tmpfs.iterdir()} == {"out.jsonl", "out.jsonl.journal"}


def test_where_files_may_not_grow_nothing_is_lost(run, capsys, tmp_path):
    """The same, where no file system may be mounted: a limit on the size of files."""
    _, reference = run(LONG_IDS, *GREEDY)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        fill_up(
            lambda lines, *more: run(lines, *more, name="limited.jsonl"),
            capsys,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "limited.jsonl").read_bytes() == reference.read_bytes()
