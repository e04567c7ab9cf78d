"""A trace: its events tell what the engine did, and the page in a browser shows what they tell."""

import dataclasses
import gc
import html
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any, get_origin

import pytest
from browser_helpers import browse, needs_chromium
from effort import spread
from engine_helpers import PROMPTS, VOCAB, assert_empty, assert_greedy, greedy
from test_bench import run, use_work

import nanovllm
from nanovllm import LLM, TINY_MODEL, SamplingParams, SchedulingPolicy
from nanovllm.apps.bench.workloads import Workload
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.policies.rolling import RollingPolicy
from nanovllm.features.trace.__main__ import main
from nanovllm.features.trace.events import (
    KINDS,
    Added,
    Committed,
    Event,
    Finished,
    GaveBack,
    Grew,
    Launched,
    Paused,
    Preempted,
    Released,
    Resumed,
    Run,
    Started,
)
from nanovllm.features.trace.files import KIND_OF_NAME, PAGE, PLACE, make_page, read_jsonl, write
from nanovllm.features.trace.replay import Replay
from nanovllm.features.trace.summary import Summary

ROOT = Path(nanovllm.__file__).parent.parent
TIGHT = dict(num_kvcache_blocks=14, max_num_seqs=6, max_num_batched_tokens=40)


class Watched:
    """An LLM, and a replay of its trace that follows behind it and is compared at every step."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.replay = Replay(llm.engine.listeners[-1].events[0])
        self._num_applied = 1
        llm.on_step(lambda step: self.compare())

    def compare(self) -> None:
        events = self.llm.engine.listeners[-1].events
        for event in events[self._num_applied :]:
            self.replay.apply(event)
        self._num_applied = len(events)
        replay, scheduler = self.replay, self.llm.engine.scheduler
        blocks = scheduler.blocks
        held = {
            id: [None] * seq.num_given_back + seq.block_table[seq.num_given_back :]
            for id, seq in scheduler.sequences.items()
            if seq.block_table
        }
        assert replay.tables == held
        assert replay.ref_counts == blocks.ref_counts
        # A block is free, or held by as many sequences as it says: not one is lost.
        references = Counter(block for table in held.values() for block in table)
        assert replay.ref_counts == [references[block] for block in range(blocks.num_blocks)]
        assert replay.ref_counts.count(0) == blocks.num_free
        assert replay.known == {
            block: f"{blocks.prefix(block).hash:016x}"
            for block, key in enumerate(blocks._keys)
            if key is not None
        }


def random_request(rng: random.Random, beginnings: list[list[int]]) -> tuple:
    prompt = rng.choice(beginnings)[: rng.randrange(60)]
    prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(
        max_tokens=rng.choice((1, 30, 60)),
        n=rng.choice((1, 1, 3)),
        seed=rng.randrange(100),
        stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 3)))],
    )
    return prompt, params


def bar_all_after_fifteen(output, logits):
    return logits - math.inf if len(output) > 15 else logits


@spread(
    {
        "model, overlap": list(product(["gqa-2", "mistral-window"], [False, True])),
        "seed": range(3),
    }
)
def test_the_events_replay_to_the_blocks_of_every_step(
    make_llm, get_checkpoint, tmp_path, model, seed, overlap
):
    options = dict(TIGHT)
    if model == "mistral-window":
        options |= dict(num_kvcache_blocks=9, max_num_batched_tokens=9)
    folder = get_checkpoint(model).folder
    llm = make_llm(folder, trace=tmp_path / "run.jsonl", overlap=overlap, **options)
    watched, rng = Watched(llm), random.Random(seed)
    beginnings = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    ids: list[int] = []
    for _ in range(40):
        prompt, params = random_request(rng, beginnings)
        if len(ids) % 6 == 3:  # some end with an error
            params = dataclasses.replace(params, logits_processors=[bar_all_after_fifteen])
        ids.append(llm.add_request(prompt, params))
        for _ in range(rng.randrange(4)):
            done = {output["id"] for output in llm.step()}
            ids = [id for id in ids if id not in done]
        if ids and rng.random() < 0.25:
            llm.abort(ids.pop(rng.randrange(len(ids))))
    while llm.has_unfinished():
        llm.step()
    watched.compare()
    assert watched.replay.num_preemptions and watched.replay.num_evictions, "so tight it was"
    reasons = {e.reason for e in llm.engine.listeners[-1].events if isinstance(e, Finished)}
    assert reasons >= {"length", "error", "abort"}
    kinds = {type(event) for event in llm.engine.listeners[-1].events}
    assert {GaveBack, Grew} & kinds == ({GaveBack, Grew} if model == "mistral-window" else set())
    for _ in range(8):  # a few more, that are scored
        prompt, params = random_request(rng, beginnings)
        llm.add_request(prompt, dataclasses.replace(params, prompt_logprobs=0, max_tokens=0))
    last = llm.add_request([7], SamplingParams(prompt_logprobs=0, max_tokens=0))
    while llm.has_unfinished():
        llm.step()
    (added,) = [
        e for e in llm.engine.listeners[-1].events if isinstance(e, Added) and e.seq == last
    ]
    assert (added.prompt_tokens, added.max_tokens) == (1, 0)
    assert not watched.replay.tables and not any(watched.replay.ref_counts)
    assert_empty(llm)


def test_a_replay_refuses_what_cannot_have_happened(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    for left_out in ("Released", "Evicted", "Started"):
        one = next(event for event in events if type(event).__name__ == left_out)
        replay = Replay(events[0])
        with pytest.raises((ValueError, KeyError)):
            for event in events[1:]:
                if event is not one:
                    replay.apply(event)


def trace_of(make_llm, tmp_path: Path, **options) -> list[Event]:
    """A run with shared prefixes, preemptions and several completions, closed; its events.

    A run with the same options as another one is not repeated: its files are written again.
    """
    names, key = ("run.jsonl", "metrics.json"), tuple(options.items())
    if key not in RUNS:
        llm = make_llm(trace=tmp_path / names[0], **TIGHT | options)
        rng = random.Random(5)
        beginnings = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        requests = [random_request(rng, beginnings) for _ in range(30)]
        llm.generate([r[0] for r in requests], [r[1] for r in requests], use_tqdm=False)
        llm.abort(llm.add_request(*requests[0]))
        (tmp_path / names[1]).write_text(json.dumps(llm.metrics()["total"]))
        llm.close()
        RUNS[key] = [(tmp_path / name).read_text() for name in names]
    for name, text in zip(names, RUNS[key]):
        (tmp_path / name).write_text(text)
    return read_jsonl(tmp_path / names[0])


RUNS: dict[tuple, list[str]] = {}  # by options, the files of `trace_of`


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_the_events_count_what_metrics_counts(make_llm, tmp_path, overlap):
    _, *events = trace_of(make_llm, tmp_path, overlap=overlap)
    total = json.loads((tmp_path / "metrics.json").read_text())
    ended = [event for event in events if isinstance(event, Finished)]
    assert [event.reason for event in ended if event.reason not in ("stop", "length")] == ["abort"]
    assert sum(event.output_tokens for event in ended) == total["output_tokens"]
    assert sum(isinstance(event, Preempted) for event in events) == total["preemptions"] > 0
    steps = [event for event in events if isinstance(event, Launched)]
    assert max(step.blocks_in_use for step in steps) / 14 == total["kv_cache_use"]
    assert [step.step for step in steps] == list(range(len(steps)))
    times = [event.time for event in events if isinstance(event, Launched)]
    assert times == sorted(times)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_the_figures_are_those_of_metrics(make_llm, tmp_path, overlap):
    events = trace_of(make_llm, tmp_path, overlap=overlap)
    total = json.loads((tmp_path / "metrics.json").read_text())
    summary = Summary(events)
    found = summary.figures()
    for name in ("output_tokens", "preemptions"):
        assert found[name] == total[name] > 0
    assert found["blocks_in_use"] / 14 == total["kv_cache_use"]
    # One more was added, and aborted before it could start.
    aborted = next(
        event for event in events if isinstance(event, Finished) and event.reason == "abort"
    )
    assert found["requests"] == total["requests"] + 1
    last = summary._added[aborted.seq]
    cached = found["prefix_cache_hit_rate"] * found["prompt_tokens"]
    assert found["prompt_tokens"] - last.prompt_tokens == total["prompt_tokens"]
    assert cached == pytest.approx(total["prefix_cache_hit_rate"] * total["prompt_tokens"])
    assert len(summary.first_tokens) == total["requests"]
    assert found["evictions"] > 0
    assert len(summary.lines()) == 5


def test_figures_are_worked_out_from_times_and_block_tables():
    run = Run("m", "cpu", "float32", "plain", False, 8, 4, 2, 8, 1.0, 1)
    step = dict(grown=(), waiting=0, schedule_seconds=0.01, launch_seconds=0.5)
    events = [
        run,
        Added(1.0, 0, 0, 6, 2),
        Added(2.0, 1, 1, 3, 1),
        Started(0, 0, (0, 1), 0, 0),
        Launched(0, 3.0, 0, ((0, 0, 4),), joined=(), left=(), running=1, blocks_in_use=2, **step),
        Committed(0, 4.0, 0, 0.25, 0.02),
        Started(1, 1, (2,), 0, 0),
        Launched(
            1,
            *(5.0, 0, ((0, 4, 6), (1, 0, 3))),
            **dict(joined=(), left=(), running=2, blocks_in_use=3),
            **step,
        ),
        Committed(1, 8.0, 2, 0.25, 0.02),
        Finished(8.0, 1, "length", 1),
        Released(1),
        Launched(2, 7.0, 1, (), joined=(0,), left=(), running=1, blocks_in_use=2, **step),
        Committed(2, 9.0, 1, 0.25, 0.02),
        Finished(9.0, 0, "length", 2),
        Released(0),
    ]
    summary = Summary(events)
    assert summary.step_seconds == [1.0, 3.0, 1.0], "of the last, what came after the one before"
    assert summary.first_tokens == {0: 7.0, 1: 6.0}
    found = summary.figures()
    # Of 8, 12 and 8 slots, the sequences had written 4, 6 + 3 and 7.
    assert found["unused_slots"] == (4 + 3 + 1) / 28
    assert found["seconds"] == 5.0 and found["longest_step"] == 3.0
    assert found["schedule_seconds"] == pytest.approx(0.09)
    assert (found["launch_seconds"], found["wait_seconds"]) == (1.5, 0.75)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 9, 3)


def test_a_file_that_is_no_trace_is_refused(make_llm, tmp_path, monkeypatch, capsys):
    write(trace_of(make_llm, tmp_path), path := tmp_path / "run.jsonl")
    whole = path.read_text()
    others = ['{"prompt": "a"}\n', "<html>\n", "[1]\n", '{"event": "Run"}\n', "", whole[:-9]]
    for text in [*others, whole[whole.index("\n") + 1 :]]:
        path.write_text(text)
        monkeypatch.setattr("sys.argv", ["trace", str(path)])
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr()
        assert said.out == "" and str(path) in said.err
        assert "give a file that LLM(..., " in said.err


def fields_of(kinds=KINDS) -> list[tuple[str, str]]:
    return [(kind.__name__, field) for kind in kinds for field in kind._fields]


MARKUP = "<img src=x onerror=document.title='run'>"


@pytest.mark.parametrize("kind, field", fields_of())
def test_a_value_of_another_type_is_refused(tmp_path, kind, field):
    declared = KIND_OF_NAME[kind].__annotations__[field]
    wrong: list = [{}, [[[1]]], ["a", 1], [-1]]
    if declared is not str:
        wrong.append(MARKUP)
    if declared in (int, float):
        wrong += [True, None, math.nan, math.inf, -math.inf, 2**53, 10**400]
    if declared is int:
        wrong += [-1, 0.5]
    if declared in (str, bool):
        wrong += [0, None]
    if get_origin(declared) in (list, tuple):
        wrong += [[MARKUP, 1], [[MARKUP] * 3], [None], None, "12"]
    lines = [{"event": name, **fields} for name, fields in EXAMPLES.items()]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(read_jsonl(path)) == len(KINDS)
    (line,) = [line for line in lines if line["event"] == kind]
    for value in wrong:
        line[field] = value
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        message = rf"run.jsonl: line .* is not an event: give .*{field} of {kind} is "
        with pytest.raises(ValueError, match=message):
            read_jsonl(path)


# A value for each field, by its type.
OF_TYPE = {str: "a", bool: False, int: 1, float: 0.5}
EXAMPLES = {
    kind.__name__: {
        field: OF_TYPE.get(declared, [] if get_origin(declared) in (list, tuple) else None)
        for field, declared in kind.__annotations__.items()
    }
    for kind in KINDS
}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"event": "Grew", "seq": 99, "blocks": [1]}', "did not introduce"),
        ('{"event": "Grew", "seq": 0, "blocks": [99]}', "did not introduce"),
        ('{"event": "Grew", "seq": 0, "blocks": [0]}', "block 0 is taken"),
        ('{"event": "Grew", "seq": 0, "blocks": ' + "[" * 100_000, "line 4 is not an event"),
    ],
    ids=["sequence", "block", "taken", "depth"],
)
def test_a_trace_that_contradicts_itself_is_refused_by_a_message(
    tmp_path, monkeypatch, capsys, line, message
):
    run = Run("m", "cpu", "float32", "plain", False, 8, 4, 2, 8, 1.0, 1)
    write([run, Added(0.0, 0, 0, 1, 1), Started(0, 0, (0,), 0, 0)], path := tmp_path / "run.jsonl")
    path.write_text(path.read_text() + line)
    monkeypatch.setattr("sys.argv", ["trace", str(path)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr()
    assert said.out == "" and message in said.err


def test_a_trace_without_a_step_has_figures():
    run = Run("m", "cpu", "float32", "plain", False, 8, 4, 2, 8, 1.0, 1)
    assert "first token never" in "".join(Summary([run]).lines())


def test_a_step_that_only_decodes_adds_two_events_however_many_sequences_run(make_llm, tmp_path):
    llm = make_llm(trace=tmp_path / "run.jsonl", kvcache_block_size=256, num_kvcache_blocks=40)
    counts: list[int] = []
    llm.on_step(lambda step: counts.append(len(llm.engine.listeners[-1].events)))
    llm.generate([[i] for i in range(32)], greedy(20), use_tqdm=False)
    added = {after - before for before, after in zip(counts, counts[1:-1])}
    assert added == {2}
    last = llm.engine.listeners[-1].events[counts[-3] : counts[-2]]
    assert [event.decode_tokens for event in last if isinstance(event, Launched)] == [32]


def test_a_trace_holds_the_text_of_prompts_and_outputs(tmp_path):
    path = tmp_path / "run.jsonl"
    long = "import os\n" * 400  # 1,200 tokens, of which the trace has 512
    prompts = ["import re", MARKUP, [5, 6, 7], long]
    with LLM(TINY_MODEL, device="cpu", trace=path) as llm:
        twice = SamplingParams(temperature=0, max_tokens=6, n=2, ignore_eos=True)
        outputs = llm.generate(prompts, [greedy(6)] * 3 + [twice], use_tqdm=False)
        scored = SamplingParams(prompt_logprobs=0, max_tokens=0)
        llm.generate("import re", scored, use_tqdm=False)
        ids = llm.tokenizer(long)["input_ids"][:512]
        (in_ids,) = llm.tokenizer.batch_decode([[5, 6, 7]])
        cut = llm.tokenizer.decode(ids) + " …"
    events = read_jsonl(path)
    added = {event.seq: event.text for event in events if isinstance(event, Added)}
    assert added == {0: "import re", 1: MARKUP, 2: in_ids, 3: cut, 4: "", 5: "import re"}
    ended = {event.seq: event.text for event in events if isinstance(event, Finished)}
    expected = [one["text"] for output in outputs for one in output.get("completions", [output])]
    assert ended == dict(enumerate([*expected, ""])) and all(expected)


@pytest.mark.parametrize("name", ["run.jsonl", "run.html"])
def test_a_trace_without_text_holds_no_word_of_prompts_and_outputs(tmp_path, name):
    with LLM(TINY_MODEL, device="cpu", trace=tmp_path / name, trace_text=False) as llm:
        (output,) = llm.generate("class Zebra:\n    def", greedy(12), use_tqdm=False)
    written = (tmp_path / name).read_text()
    assert "Finished" in written and "Zebra" not in written
    assert json.dumps(output["text"])[1:-1] not in written


class Unexplained:
    """A policy without a base class, and without the method `reason`."""

    key = staticmethod(lambda seq: -seq.id)
    running_limit = staticmethod(lambda scheduler: 2)
    started = order_decodes = staticmethod(lambda _: None)
    shared_prefix_blocks = staticmethod(lambda decoding: 0)


class ShortestPromptFirst(SchedulingPolicy):
    def key(self, seq):
        return seq.num_prompt_tokens


@pytest.mark.parametrize(
    "policy, reason",
    [
        ("throughput", "longest first: at most 25 new tokens"),
        ("fcfs", "first come, first served"),
        ("shortest-first", "shortest first: at most 25 new tokens"),
        ("longest-first", "longest first: at most 25 new tokens"),
        ("priority", "lowest number first: priority 7"),
        (RollingPolicy(64), "longest first among 64 requests in a row: at most 25 new tokens"),
        (ShortestPromptFirst(), "smallest key of ShortestPromptFirst: 30"),
        (Unexplained(), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_start_has_the_reason_that_the_policy_gives(make_llm, tmp_path, policy, reason):
    llm = make_llm(trace=tmp_path / "run.jsonl", scheduling_policy=policy, **TIGHT)
    priority = 7 if policy == "priority" else 0
    params = SamplingParams(max_tokens=25, ignore_eos=True, priority=priority)
    llm.generate([[i] * 30 for i in range(9)], params, use_tqdm=False)
    events = llm.engine.listeners[-1].events
    starts = [event for event in events if isinstance(event, Started)]
    again = {i for i, event in enumerate(starts) if event.seq in {e.seq for e in starts[:i]}}
    assert len(starts) - len(again) == 9
    for i, event in enumerate(starts):
        expected = "preempted sequences start before new ones" if i in again else reason
        assert event.reason == expected
    assert again or isinstance(policy, Unexplained), "some were preempted"
    llm.add_request([1], SamplingParams(max_tokens=2, n=2, priority=priority))
    while llm.has_unfinished():
        llm.step()
    last = [event.reason for event in llm.engine.listeners[-1].events if isinstance(event, Started)]
    assert last[-1] == "further completions start once their prompt is computed"
    if policy == "throughput":
        assert last[-2] == "interactive requests start before the others, in order of arrival"


def test_without_a_trace_no_policy_is_asked_for_a_reason(make_llm, tmp_path):
    class Asked(SchedulingPolicy):
        count = 0

        def reason(self, seq):
            self.count += 1
            return "because"

    for options, count in ({}, 0), ({"trace": tmp_path / "run.jsonl"}, 3):
        policy = Asked()
        llm = make_llm(scheduling_policy=policy, **options)
        llm.generate(PROMPTS[:3], greedy(2), use_tqdm=False)
        assert policy.count == count


def test_a_trace_of_a_version_without_texts_and_reasons_is_read(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    path = tmp_path / "run.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for field in ("text", *(["reason"] if line["event"] == "Started" else [])):
            line.pop(field, None)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    older = read_jsonl(path)
    assert older != events and Summary(older).lines() == Summary(events).lines()


def test_a_trace_changes_no_token(make_llm, checkpoint, tmp_path):
    for overlap in (False, True):
        llm = make_llm(trace=str(tmp_path / "run.html"), overlap=overlap, **TIGHT)
        assert_greedy(llm, checkpoint)


def test_without_a_trace_nothing_of_it_is_there(make_llm):
    llm = make_llm()
    assert type(llm.engine) is LLMEngine and type(llm.engine.scheduler) is Scheduler
    assert "launch" not in vars(llm.engine.runner)


def test_after_an_error_the_trace_goes_on(make_llm, tmp_path):
    llm = make_llm(trace=tmp_path / "run.jsonl", overlap=True, **TIGHT)
    watched = Watched(llm)

    def fail(step) -> None:
        if step.number == 9:
            raise RuntimeError("enough")

    llm.on_step(fail)
    with pytest.raises(RuntimeError, match="enough"):
        llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    watched.compare()
    kinds = Counter(type(event).__name__ for event in llm.engine.listeners[-1].events)
    assert kinds["Reset"] == 1 and kinds["Finished"] == len(PROMPTS)
    launched = -1
    for event in llm.engine.listeners[-1].events:
        if isinstance(event, Launched):
            launched = event.step
        elif isinstance(event, Committed):  # of the step before, or at the end of this
            assert launched - event.step in (0, 1)


def test_json_lines_give_the_figures_and_the_page_of_the_run(
    make_llm, tmp_path, monkeypatch, capsys
):
    events = trace_of(make_llm, tmp_path)
    names = [str(tmp_path / name) for name in ("run.jsonl", "run.html")]
    for arguments in (names[:1], names):
        monkeypatch.setattr(sys, "argv", ["nanovllm.features.trace", *arguments])
        assert not (tmp_path / "run.html").exists()
        main()
        assert capsys.readouterr().out.splitlines() == Summary(events).lines()
    assert (tmp_path / "run.html").read_text() == make_page(events)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    kinds = {kind.__name__: kind for kind in KINDS}
    for line in lines:
        assert list(line) == ["event", *kinds[line["event"]]._fields]


SCRIPT = """
import os, signal, sys
from nanovllm import LLM, TINY_MODEL, SamplingParams, SchedulingPolicy
llm = LLM({folder!r}, device="cpu", kvcache_block_size=16, num_kvcache_blocks=8, trace="run.jsonl")
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
os.mkdir("elsewhere"); os.chdir("elsewhere")
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "raise RuntimeError",
        "os.kill(os.getpid(), signal.SIGINT)",
        "pid = os.fork()\nif pid == 0: sys.exit()\nos.waitpid(pid, 0); os._exit(0)",
    ],
    ids=["error", "interrupt", "fork"],
)
def test_the_file_is_written_whatever_ends_the_process(checkpoint, tmp_path, end):
    """But a forked process does not write its parent's."""
    script = SCRIPT.format(folder=str(checkpoint.folder), end=end)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    if "fork" in end:
        assert not (tmp_path / "run.jsonl").exists()
        return
    _, *events = read_jsonl(tmp_path / "run.jsonl")
    assert [type(event).__name__ for event in events[-2:]] == ["Committed", "Finished"]
    assert [path.name for path in tmp_path.iterdir()] in (
        ["run.jsonl", "elsewhere"],
        ["elsewhere", "run.jsonl"],
    )


def test_an_llm_that_nobody_closes_leaves_its_trace(checkpoint, tmp_path):
    llm = LLM(checkpoint.folder, device="cpu", trace=tmp_path / "run.html")
    llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    assert not (tmp_path / "run.html").exists()
    del llm
    gc.collect()
    assert "Finished" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    "trace, error",
    [(3, TypeError), (True, TypeError), ("run.txt", ValueError), (Path("run.png"), ValueError)],
)
def test_a_wrong_name_is_refused(checkpoint, trace, error):
    with pytest.raises(error, match="trace is .*: give a file name that ends in .html or"):
        LLM(checkpoint.folder, trace=trace)


def test_a_folder_that_is_not_there_is_refused_before_the_model_is_loaded(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nowhere: make it first"):
        LLM(checkpoint.folder, trace=tmp_path / "nowhere" / "run.html", start_timeout=1)


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(checkpoint, tmp_path):
    (tmp_path / "run.html").mkdir()
    with pytest.raises(ValueError, match="trace is .*run.html', which is a folder: name a file in"):
        LLM(checkpoint.folder, trace=tmp_path / "run.html")
    assert len(list(tmp_path.iterdir())) == 1, "nothing is left of the attempt"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_the_name_that_traces_once_had_until_complete_is_left_alone(
    make_llm, tmp_path, is_link
):
    part, other = tmp_path / "run.jsonl.part", tmp_path / "other"
    other.write_text("precious")
    part.symlink_to(other) if is_link else part.write_text("precious")
    llm = make_llm(trace=tmp_path / "run.jsonl")
    llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
    llm.close()
    assert part.read_text() == other.read_text() == "precious" and part.is_symlink() == is_link
    assert read_jsonl(tmp_path / "run.jsonl")


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs a folder that root cannot write to")
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_is_loaded(checkpoint):
    with pytest.raises(ValueError, match="trace is '/proc/run.jsonl', which cannot be written: "):
        LLM(checkpoint.folder, trace="/proc/run.jsonl")


def test_bench_traces_its_last_run_alone(monkeypatch, capsys, tmp_path):
    common = list(range(40))
    small = [([*common, 50, 51], 5), ([*common, 52], 3)]
    use_work(monkeypatch, small)
    # The prefix stays cached between repeats.
    monkeypatch.setattr(Workload, "refresh", lambda self, work, *how: work)
    options = json.dumps({"device": "cpu", "kvcache_block_size": 16})
    path = tmp_path / "run.jsonl"
    arguments = ["--model", "tiny", "--workload", "laptop", "--options", options, "--repeat", "3"]
    run(monkeypatch, *arguments, "--trace", str(path))
    out = capsys.readouterr().out
    assert "trace of the last run: " in out and "2 requests, 83 tokens in, 8 out" in out
    first, *events = read_jsonl(path)
    assert isinstance(first, Run) and len(first.cached_blocks) >= 2
    replay = Replay(first)
    for event in events:
        replay.apply(event)
    assert [e.output_tokens for e in events if isinstance(e, Finished)] == [3, 5]
    assert not replay.tables
    known = {event.seq for event in events if isinstance(event, Added)}
    assert all(known.issuperset(event.left) for event in events if isinstance(event, Launched))
    for wrong in (["--workload", "laptop,small"], ["--engine", "transformers"]):
        with pytest.raises(SystemExit):
            run(monkeypatch, *arguments, *wrong, "--trace", str(path))


def test_the_page_asks_for_nothing_from_outside():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(PLACE) == 1
    assert not re.search(r"https?:|\bsrc=|@import|url\(|fetch\(|XMLHttp|import\(", page)


def test_a_name_cannot_end_the_pages_script(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    page = make_page([events[0]._replace(model="</script><script>alert(1)"), *events[1:]])
    assert page.count("</script>") == PAGE.read_text(encoding="utf-8").count("</script>")


def test_text_becomes_markup_in_one_place_which_escapes_it():
    page = PAGE.read_text(encoding="utf-8")
    ways = r"\b(?:inner|outer)HTML\b|insertAdjacentHTML|document\.write|createContextualFragment"
    assert re.findall(ways, page) == ["innerHTML"]
    assert "$(id).innerHTML = markup(content);" in page
    unmarked = re.findall(r"(?<!html)`\s*<", page)
    assert not unmarked, "of a string without html, the page shows the tags as text"


# In a browser.


def shown_text(dom: str, id: str) -> str:
    """The text of an element."""
    found = re.search(rf'<(\w+)[^>]*\bid="{id}"[^>]*>(.*?)</\1>', dom, flags=re.DOTALL)
    assert found, id
    return html.unescape(re.sub(r"<[^>]*>", "", found[2])).strip()


def number(dom: str, id: str) -> float:
    return float(re.search(rf'id="{id}" data-value="([^"]*)"', dom)[1])


@needs_chromium
def test_the_page_counts_what_metrics_counts(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path, overlap=True)
    total = json.loads((tmp_path / "metrics.json").read_text())
    write(events, tmp_path / "run.html")
    dom = browse(tmp_path / "run.html")
    assert number(dom, "count-requests") == total["requests"] == 30
    assert number(dom, "count-prompt") == total["prompt_tokens"]
    assert number(dom, "count-cached") == pytest.approx(total["prefix_cache_hit_rate"])
    assert number(dom, "count-output") == total["output_tokens"]
    assert number(dom, "count-preemptions") == total["preemptions"]
    assert number(dom, "count-peak") == pytest.approx(total["kv_cache_use"])
    assert number(dom, "count-steps") == sum(isinstance(event, Launched) for event in events)
    replay = Replay(events[0])
    for event in events[1:]:
        replay.apply(event)
    assert number(dom, "count-evictions") == replay.num_evictions
    assert shown_text(dom, "count-output") == f"{total['output_tokens']:,}"
    assert 'id="error" hidden' in dom


# What the page's own replay holds after steps taken forwards, backwards and at random.
STATES = """
const found = [];
for (const p of PLACES) {
  seek(p);
  found.push([p, [...state.refs], [...state.known], [...state.lengths], state.cachedFree]);
}
document.body.dataset.states = JSON.stringify(found);
"""


@needs_chromium
def test_the_page_replays_to_the_same_blocks_from_wherever_one_comes(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path, overlap=True)
    write(events, tmp_path / "run.html")
    replay, expected = Replay(events[0]), []
    for event in events[1:]:
        replay.apply(event)
        if isinstance(event, Launched):
            expected.append(snapshot(replay))
    expected.append(snapshot(replay))
    rng = random.Random(0)
    places = [0, 1, 2, len(expected) - 1, *(rng.randrange(len(expected)) for _ in range(40))]
    dom = browse(tmp_path / "run.html", script=STATES.replace("PLACES", str(places)))
    found = json.loads(html.unescape(re.search(r'data-states="([^"]*)"', dom)[1]))
    assert [place for place, *_ in found] == places
    for place, *have in found:
        assert have == expected[place], place


def snapshot(replay: Replay) -> list:
    blocks = range(replay.run.num_blocks)
    return [
        replay.ref_counts.copy(),
        [int(block in replay.known) for block in blocks],
        [[seq, length] for seq, length in replay.lengths.items()],
        sum(replay.ref_counts[block] == 0 for block in replay.known),
    ]


CONTROLS = """
const told = [];
const tell = (what) => told.push([what, position, followed && {...followed}, playing, theme()]);
const key = (key, shiftKey = false) =>
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, bubbles: true}));
const press = (id) => { $(id).click(); tell(id); };
const at = (id, type, x, y) => {
  const box = $(id).getBoundingClientRect();
  const where = {clientX: box.left + x, clientY: box.top + y, bubbles: true, pointerId: 1};
  $(id).setPointerCapture = () => {};
  $(id).dispatchEvent(new PointerEvent(type, where));
};
for (const id of ["first", "next", "next", "back", "last"]) press(id);
for (const name of ["Home", "ArrowRight", "ArrowLeft", "End"]) { key(name); tell(name); }
key("Home"); key("ArrowRight", true); tell("shift");
key("ArrowDown"); tell("down"); key("ArrowDown"); key("ArrowUp"); tell("up");
key("Escape"); tell("escape");
at("map", "click", 3, 3); tell("block"); press("unfollow");
at("rows", "click", 400, 8); tell("row"); key("Escape");
at("steps", "pointerdown", 5000, 5); tell("timeline end");
at("steps", "pointerdown", 0, 5); tell("timeline begin");
$("scrub").value = 7; $("scrub").dispatchEvent(new Event("input")); tell("scrub");
press("theme"); key("t"); tell("t");
const before = $("steps").toDataURL();
$("axis").value = "step"; $("axis").dispatchEvent(new Event("change"));
const rows = $("rows").toDataURL();
$("order").value = "arrival"; $("order").dispatchEvent(new Event("change"));
told.push([before !== $("steps").toDataURL(), rows !== $("rows").toDataURL()]);
at("map", "pointermove", 3, 3); told.push([$("tip").textContent, $("tip").hidden]);
key(" "); tell("play");
$("speed").value = "600"; $("speed").dispatchEvent(new Event("change"));
tick(0); tick(50); tell("playing"); tick(1e6); tell("played");
document.body.dataset.told = JSON.stringify(told);
"""


@needs_chromium
def test_every_control_of_the_page_does_what_it_says(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    write(events, tmp_path / "run.html")
    last = sum(isinstance(event, Launched) for event in events)
    dom = browse(tmp_path / "run.html", "theme=light", CONTROLS)
    told = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1]))
    axis_and_order, (tip, hidden) = [entry for entry in told if len(entry) == 2]
    assert axis_and_order == [True, True] and tip.startswith("block 0:") and not hidden
    said = [entry for entry in told if len(entry) == 5]
    assert [(what, position) for what, position, *_ in said[:10]] == [
        *(("first", 0), ("next", 1), ("next", 2), ("back", 1), ("last", last)),
        *(("Home", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", last), ("shift", 10)),
    ]
    by_name = {what: rest for what, *rest in said}
    first = by_name["down"][1]
    assert "seq" in first and by_name["up"][1] == first and by_name["escape"][1] is None
    assert by_name["block"][1] == {"block": 0} and by_name["unfollow"][1] is None
    assert by_name["row"][1] == first
    assert by_name["timeline end"][0] == last and by_name["timeline begin"][0] == 0
    assert by_name["scrub"][0] == 7
    assert by_name["theme"][3] == "dark" and by_name["t"][3] == "light"
    assert by_name["play"][2] is True and by_name["playing"][0] == 7 + 30
    assert by_name["played"][0] == last and by_name["played"][2] is False


@needs_chromium
def test_an_address_leads_to_a_step_and_a_sequence(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    write(events, tmp_path / "run.html")
    started = next(e for e in events if type(e).__name__ == "Started" and e.cached_tokens)
    dom = browse(tmp_path / "run.html", f"step=12&sequence={started.seq}&theme=dark")
    assert shown_text(dom, "now-title") == "Step 12" and 'data-theme="dark"' in dom
    assert f"{started.cached_tokens} found in the prefix cache" in shown_text(dom, "follow")
    dom = browse(tmp_path / "run.html", "step=99999&sequence=x&block=-1")  # nonsense is left out
    assert 'id="follow-card" hidden' in dom


@needs_chromium
def test_the_page_tells_after_which_tokens_a_state_was_kept(get_checkpoint, tmp_path):
    path = tmp_path / "run.html"
    options = dict(dtype="float32", num_kvcache_blocks=64, kvcache_block_size=16)
    with LLM(get_checkpoint("qwen3.5").folder, trace=path, **options) as llm:
        llm.generate([PROMPTS[6]], greedy(4), use_tqdm=False)
    # The last token that was chosen has not passed the model.
    kept = len(PROMPTS[6]) + 4 - 1
    assert f"for later prompts, after {kept} tokens" in shown_text(
        browse(path, "sequence=0"), "follow"
    )


def paused_run(make_llm, tmp_path: Path) -> tuple[int, list[Event]]:
    """Two requests, of which one is paused for a while: its id, and the events."""
    llm = make_llm(trace=tmp_path / "run.jsonl")
    watched = Watched(llm)
    ids = [llm.add_request([i], greedy(12)) for i in range(2)]
    llm.step()
    llm.step()
    for _ in range(2):
        llm.pause(ids[0])
    while not llm.step():
        pass
    llm.resume(ids[0])
    while llm.has_unfinished():
        llm.step()
    watched.compare()
    llm.close()
    return ids[0], read_jsonl(tmp_path / "run.jsonl")


def test_a_pause_is_told_once_and_so_is_its_end(make_llm, tmp_path):
    paused, events = paused_run(make_llm, tmp_path)
    told = [event for event in events if isinstance(event, (Paused, Resumed, Finished))]
    assert [type(event) for event in told] == [Paused, Finished, Resumed, Finished]
    assert [event.seq == paused for event in told] == [True, False, True, True]
    assert [event.time for event in told] == sorted([event.time for event in told])


@needs_chromium
def test_the_page_shows_markup_in_a_trace_as_text(make_llm, tmp_path):
    """Of events that no reader checked, too: names, reasons, and the ids of sequences."""
    events = trace_of(make_llm, tmp_path)
    events[0] = events[0]._replace(model=MARKUP, dtype=MARKUP, attention=MARKUP, began_at=MARKUP)
    lines = []
    for event in events:
        line = event._asdict()
        line |= dict.fromkeys({"reason", "text"} & {*line}, MARKUP)
        for field in ("seq", "request", "joined", "left"):
            if field in line:
                line[field] = marked(line[field])
        for field in {"prefills", "grown"} & {*line}:
            line[field] = [[marked(seq), *rest] for seq, *rest in line[field]]
        lines.append(type(event)(**line))
    write(lines, tmp_path / "run.html")
    script = """
        for (const id of seqs.keys()) follow({seq: id});
        for (let block = 0; block < run.num_blocks; block++) follow({block});
        for (let p = 0; p <= steps.length; p++) seek(p);
        follow({seq: [...seqs.keys()][3]});
        document.body.dataset.images = document.images.length;
    """
    dom = browse(tmp_path / "run.html", script=script)
    assert 'data-images="0"' in dom and "<title>run</title>" not in dom
    assert MARKUP in shown_text(dom, "facts")
    shown = html.unescape(dom.partition('<div id="follow">')[2].partition("</div>")[0])
    assert shown.count(MARKUP) >= 4, "prompt, output, why it started, and how it ended"


def marked(ids):
    """Ids that are markup instead of numbers, each another one."""
    return [*map(marked, ids)] if isinstance(ids, (list, tuple)) else f"{MARKUP}{ids}"


@needs_chromium
def test_a_pause_is_shown(make_llm, tmp_path):
    paused, events = paused_run(make_llm, tmp_path)
    write(events, tmp_path / "run.html")
    dom = browse(tmp_path / "run.html", f"sequence={paused}")
    assert re.search(r"paused\s*once, for [0-9.]+", shown_text(dom, "follow"))
    dom = browse(tmp_path / "run.html", f"sequence={1 - paused}")
    assert "paused" not in shown_text(dom, "follow")


@needs_chromium
def test_a_trace_without_a_step_or_with_unfinished_requests_is_shown(make_llm, tmp_path):
    events = trace_of(make_llm, tmp_path)
    write(events[:1], tmp_path / "run.html")
    assert shown_text(browse(tmp_path / "run.html"), "count-steps") == "0"
    write(events[: len(events) // 2], tmp_path / "run.html")
    dom = browse(tmp_path / "run.html", "step=99")
    assert number(dom, "count-steps") > 0 and 'id="error" hidden' in dom


def told_by(dom: str) -> Any:
    """What a script told: the JSON in the attribute data-told of the page's body."""
    return json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1]))


def steps_of(seconds: list[float], slow_commits: Collection[int] = ()) -> list[Event]:
    """The events of one sequence whose steps follow one another and take so many seconds."""
    run = Run("m", "cpu", "float32", "plain", False, 8, 256, 2, 512, 1.0, 1)
    events: list[Event] = [run, Added(0.0, 0, 0, 1, len(seconds)), Started(0, 0, (0,), 0, 0)]
    step = dict(grown=(), left=(), running=1, waiting=0)
    time = 0.0
    for i, taken in enumerate(seconds):
        first = i == 0
        decode = dict(decode_tokens=0 if first else 1, prefills=((0, 0, 1),) if first else ())
        joined = (0,) if i == 1 else ()
        launched = dict(step, **decode, joined=joined, schedule_seconds=0.0, launch_seconds=taken)
        events.append(Launched(i, time, blocks_in_use=1 + i % 3, **launched))
        time += taken
        commit = 0.03 if i in slow_commits else 0.0
        events.append(Committed(i, time, 1, 0.0, commit))
        time += commit + 0.0001
    return [*events, Finished(time, 0, "length", len(seconds)), Released(0)]


@needs_chromium
def test_the_page_opens_at_the_first_step_and_play_shows_the_whole_run(tmp_path):
    write(steps_of([0.01] * 30), tmp_path / "run.html")
    script = """
        const seen = [position];
        $("speed").value = "10";
        play(true);
        for (let now = 0; playing && now < 1e6; now += 100) {
          cancelAnimationFrame(frame);
          tick(now);
          seen.push(position);
        }
        document.body.dataset.told = JSON.stringify(seen);
    """
    seen = told_by(browse(tmp_path / "run.html", script=script))
    assert sorted({*seen}) == [*range(31)] and seen == sorted(seen)


WAITS = """
const told = {};
for (const seq of seqs.values()) {
  follow({seq: seq.id});
  seek(steps.length);
  told[seq.name] = [seq.label, $("follow").textContent];
}
document.body.dataset.told = JSON.stringify(told);
"""


@needs_chromium
def test_the_page_shows_texts_and_says_why_each_sequence_started_then(tmp_path):
    common = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    prompts = [common + "    def push(self, item):", common + "    def pop(self):", "import re"]
    path = tmp_path / "run.html"
    options = dict(device="cpu", trace=path, kvcache_block_size=16, num_kvcache_blocks=20)
    params = [greedy(8), greedy(12), greedy(9)]
    with LLM(TINY_MODEL, max_num_seqs=2, scheduling_policy="fcfs", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    told = told_by(browse(path, script=WAITS))
    for name, prompt, output in zip(("#0", "#1", "#2"), prompts, outputs):
        assert prompt in told[name][1] and output["text"] in told[name][1]
        assert "first come, first served." in told[name][1]
    labels = [label for label, _ in told.values()]
    assert labels == ["…push(self, item):", "…def pop(self):", "import re"]
    waited = "In the step before, no batch slot was free."
    assert [waited in text for _, text in told.values()] == [False, False, True]

    with LLM(TINY_MODEL, scheduling_policy=Unexplained(), **options) as llm:
        llm.generate(["a", "b", "c"], [greedy(8), greedy(12), greedy(9)], use_tqdm=False)
    waited = "Until now, the policy let it wait."
    texts = [text for _, text in told_by(browse(path, script=WAITS)).values()]
    assert [waited in text for text in texts] == [True, False, False]


LANES = """
const told = {drawn: []};
const draws = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
  told.drawn.push(text);
  draws.call(this, text, ...where);
};
drawSteps();
told.label = $("steps").getAttribute("aria-label");
// The bottom row of the lane of decode tokens, as far as steps decode.
const pixels = $("steps").getContext("2d");
const [from, to] = [Math.ceil(X(steps[1].time)) + 1, Math.floor(X(span.end)) - 1];
const row = pixels.getImageData(from, 4 + LANE - 3, to - from, 1).data;
told.empty = 0;
for (let i = 3; i < row.length; i += 4) if (row[i] === 0) told.empty++;
document.body.dataset.told = JSON.stringify(told);
"""


@needs_chromium
@pytest.mark.parametrize("first", [0.02, 0.96])
def test_a_cut_bar_is_marked_with_its_value(tmp_path, first):
    write(steps_of([first] + [0.01] * 50), tmp_path / "run.html")
    told = told_by(browse(tmp_path / "run.html", script=LANES))
    assert ("bars cut" in told["drawn"]) == ("960.0 ms" in told["drawn"]) == (first == 0.96)
    assert ("the longest step took 960.0 ms" in told["label"]) == (first == 0.96)


@needs_chromium
def test_steps_that_follow_one_another_leave_no_gaps(tmp_path):
    """Not even where a step takes long to commit, so that the next one begins later."""
    write(steps_of([0.01] * 90, slow_commits={30, 60}), tmp_path / "run.html")
    assert told_by(browse(tmp_path / "run.html", script=LANES))["empty"] == 0


@needs_chromium
def test_a_screen_reader_hears_what_the_canvases_show(make_llm, tmp_path):
    """Also that numbers in the map are those of sequences, and counts of sharers begin with ×."""
    events = trace_of(make_llm, tmp_path)
    write(events, tmp_path / "run.html")
    script = """
        const told = [];
        for (const p of [0, 5, steps.length]) {
          seek(p);
          told.push(["steps", "rows", "map"].map((id) => $(id).getAttribute("aria-label")));
        }
        const drawn = [];
        CanvasRenderingContext2D.prototype.fillText = (text) => drawn.push(text);
        for (let p = 0; p < steps.length; p++) { seek(p); drawMap(); }
        told.push(drawn);
        document.body.dataset.told = JSON.stringify(told);
    """
    *told, drawn = told_by(browse(tmp_path / "run.html", script=script))
    assert all(len({*texts}) > 1 for texts in zip(*told)), "they change with the position"
    replay = Replay(events[0])
    launched = 0
    for event in events[1:]:
        replay.apply(event)
        launched += isinstance(event, Launched)
        if launched == 6:
            break
    steps, rows, blocks = told[1]
    assert f"Now: step {event.step}, " in steps
    assert f"Now {len(replay.tables)} hold a batch slot: " in rows
    shared = sum(count > 1 for count in replay.ref_counts)
    used = event.blocks_in_use
    assert f"Map of 14 KV blocks. Now {used} are in use, {shared} of them shared;" in blocks
    assert {"×2", "#0"} <= {*drawn} and all(text[0] in "#×" for text in drawn if "." not in text)


@needs_chromium
def test_on_a_narrow_page_the_cache_and_the_play_bar_stay_in_view(tmp_path):
    write(steps_of([0.01] * 30), tmp_path / "run.html")
    script = """
        window.scrollTo(0, 1e6);
        const place = (id) => document.querySelector(id).getBoundingClientRect();
        const [bar, map, words] = [place(".bar"), place("#map"), place("#words-card")];
        const width = document.documentElement.scrollWidth;
        document.body.dataset.told = JSON.stringify(
          [scrollY, bar.top, bar.bottom, map.top, map.bottom, words.bottom, innerHeight, width]);
    """
    dom = browse(tmp_path / "run.html", script=script, width=800)
    scrolled, bar_top, bar_bottom, top, bottom, end, height, width = told_by(dom)
    assert scrolled > 100 and width <= 800
    assert bar_top == 0 < bar_bottom <= top < bottom < height / 2 < end <= height
