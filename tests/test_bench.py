"""bench.py and its parts: the workloads to the token, the roofline, what is printed and written."""

import importlib.util
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, TINY_MODEL
from nanovllm.apps.bench import checks, engines, host, policies, report
from nanovllm.apps.bench.roofline import bytes_of_states, parameters_beside_experts, roofline
from nanovllm.apps.bench.shapes import SHAPES, VOCAB, model_folder
from nanovllm.apps.bench.workloads import WORKLOADS, Work
from nanovllm.backends.quantised.config import read_quantization
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.config import Config
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.models import build_model, load_model_config

linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
SPEC = importlib.util.spec_from_file_location("bench", Path(__file__).parent.parent / "bench.py")
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    bench.main()


def use_work(monkeypatch, work: Work) -> None:
    """Let every workload be `work`."""
    for name, workload in WORKLOADS.items():
        monkeypatch.setitem(WORKLOADS, name, replace(workload, draw=lambda vocab: work))


TOTALS = {  # requests, tokens in, tokens out
    "bench": (256, 142827, 133966),
    "latency": (1, 128, 512),
    "prefill": (128, 262144, 128),
    "shared": (256, 557056, 32768),
    "long": (64, 192000, 32768),
    "many": (2048, 146435, 149747),
    "conversations": (192, 54069, 24576),
    "lognormal": (768, 177876, 199419),
    "laptop": (64, 9474, 8491),
    "small": (8, 569, 256),
    "qwen-sampling": (256, 142827, 133966),
    "logprobs": (256, 142827, 133966),
    "penalties": (256, 142827, 133966),
}
# Seconds, at 4.3 TB/s and 790 TFLOP/s.
LIMITS = {
    "qwen3-0.6b": dict(bench=3.67, latency=0.147, prefill=0.37, shared=0.248, long=3.20, many=0.70),
    "qwen3-30b-a3b": dict(
        bench=17.38, latency=0.730, prefill=2.08, shared=2.19, long=10.85, many=5.52
    ),
    "qwen3-8b": dict(bench=10.26, latency=1.81, prefill=4.81, shared=1.29, long=8.83, many=5.45),
    "qwen3.5-0.8b": dict(bench=2.10, latency=0.185, prefill=0.357, shared=0.404),
    "qwen3.5-9b": dict(bench=10.4, latency=1.91, prefill=4.66, shared=1.91),
    "qwen3.5-35b-a3b": dict(bench=19.9, latency=0.719, prefill=1.71, shared=3.26),
    "gpt-oss-20b": dict(bench=4.81, latency=0.444, prefill=2.09, shared=0.703, long=3.60),
}


@pytest.fixture(scope="module")
def work():
    # The greedy ones draw within the vocabulary: these are the tiny model's totals.
    return {
        name: one.work(VOCAB if one.sampling["temperature"] else 4096)
        for name, one in WORKLOADS.items()
    }


def test_every_option_says_what_it_does():
    actions = bench.make_parser()._actions
    assert len(actions) > 10 and all(action.help for action in actions)


def test_workloads_are_what_they_were_to_the_token(work):
    found = {
        name: (len(w), sum(len(prompt) for prompt, _ in w), sum(n for _, n in w))
        for name, w in work.items()
    }
    assert found == TOTALS
    assert work["bench"][0][0][:4] == [6311, 6890, 663, 4242] and [
        n for _, n in work["bench"][:4]
    ] == [
        845,
        312,
        607,
        843,
    ]


def test_what_is_said_of_a_workload_is_so(work):
    for name, one in WORKLOADS.items():
        assert one.description.startswith(f"{TOTALS[name][0]} request")
    assert "133,966" in WORKLOADS["bench"].description


def test_prompts_fit_any_vocabulary():
    prompts = [prompt for prompt, _ in WORKLOADS["shared"].work(100)[:3]]
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_repeats_share_no_prefix_and_the_prompts_of_shared_do(work):
    for name in ("bench", "shared"):
        first, second = (WORKLOADS[name].refresh(work[name], repeat, VOCAB) for repeat in (0, 1))
        assert not {prompt[0] for prompt, _ in first} & {prompt[0] for prompt, _ in second}
        assert [(prompt[1:], n) for prompt, n in first] == [
            (prompt[1:], n) for prompt, n in work[name]
        ]
    assert len({tuple(prompt[:2048]) for prompt, _ in second}) == 1


def test_workloads_with_the_same_prompts_share_no_prefix(work):
    names = ("bench", "qwen-sampling", "logprobs", "penalties")
    begins = [
        {prompt[0] for prompt, _ in WORKLOADS[name].refresh(work[name], repeat, VOCAB)}
        for name in names
        for repeat in range(10)
    ]
    assert len(set().union(*begins)) == sum(map(len, begins))


def test_each_round_of_a_conversation_begins_with_all_that_was_said(monkeypatch, capsys):
    prompts, outputs = [], []

    class Engine(engines.NanovllmEngine):
        def run(self, work, *args):
            answers = super().run(work, *args)
            prompts.append([prompt for prompt, _ in work])
            outputs.append(answers)
            return answers

    monkeypatch.setitem(bench.ENGINES, "nanovllm", Engine)
    use_work(monkeypatch, [([1, 2, 3], 5), ([4], 5)])
    run(monkeypatch, "--model", "tiny", "--workload", "conversations", "--repeat", "1")
    prompts, outputs = prompts[1:], outputs[1:]  # the first call warms up
    assert len(prompts) == 5 and all(len(output) == 5 for round in outputs for output in round)
    for before, answers, after in zip(prompts, outputs, prompts[1:]):
        for prompt, answer, longer in zip(before, answers, after):
            assert longer[:-64] == prompt + answer
    assert len({tuple(prompt[-64:]) for round in prompts[1:] for prompt in round}) == 8
    assert "conversations" in capsys.readouterr().out


@pytest.mark.parametrize("model", LIMITS)
def test_rooflines_are_those_worked_out_apart(model, work):
    for name, limit in LIMITS[model].items():
        assert roofline(model, work[name], name, 4.3e12, 790e12) == pytest.approx(limit, rel=0.01)


def test_a_model_of_unknown_shape_has_no_roofline(work):
    assert roofline("tiny", work["latency"], "latency", 1.0, 1.0) is None


@pytest.mark.parametrize(
    "name, total",
    [
        ("qwen3-8b", 8.19e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("qwen3.5-0.8b", 0.752e9),
        ("qwen3.5-9b", 8.95e9),
        ("qwen3.5-35b-a3b", 34.66e9),
        ("gpt-oss-20b", 20.9e9),
    ],
)
def test_a_shape_is_the_model_of_its_name_and_the_roofline_counts_its_parameters(name, total):
    folder, dummy = model_folder(name)
    with tensors_default_to(torch.bfloat16, torch.device("meta")):
        model = build_model(load_model_config(folder), ParallelGroup())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert dummy and count == pytest.approx(total, rel=0.005)
    shape = SHAPES[name]
    counted = parameters_beside_experts(shape) + (2 - shape.tied) * shape.vocab * shape.hidden
    counted += shape.layers * 3 * shape.hidden * shape.intermediate * shape.experts
    # Without norms, biases and the gates' parameters.
    assert counted == pytest.approx(count, rel=1e-3)
    layers = [layer for layer in model.modules() if isinstance(layer, RecurrentLayer)]
    assert sum(layer.state_bytes for layer in layers) == bytes_of_states(shape)


def test_a_decode_step_of_256_sequences_of_9b_moves_26_gb_of_states(work):
    shape = SHAPES["qwen3.5-9b"]
    read_and_written = 2 * 256 * bytes_of_states(shape)
    assert read_and_written == pytest.approx(26.4e9, rel=0.01)  # 25.8 of S, 0.6 of convolutions
    halved = 2 * 256 * bytes_of_states(shape, "bfloat16")
    assert read_and_written - halved == pytest.approx(25.8e9 / 2, rel=0.01)
    ours, theirs = (
        roofline("qwen3.5-9b", work["bench"], "bench", 4.3e12, 790e12, mamba_ssm_cache_dtype=dtype)
        for dtype in ("auto", "bfloat16")
    )
    steps = sum(n - 1 for _, n in work["bench"]) / 256
    assert ours - theirs == pytest.approx(steps * (read_and_written - halved) / 4.3e12)


def test_a_start_counts_the_import_of_its_own_engine_alone(monkeypatch):
    class Ready:
        def __init__(self, *args, **options):
            self.run = lambda work, sampling: None

    monkeypatch.setattr(engines, "uncounted_import_seconds", lambda: 1000.0)
    for name, counted in (("nanovllm", 1000), ("vllm", 0)):
        monkeypatch.setitem(engines.ENGINES, name, Ready)
        _, seconds = engines.start(name, "tiny")
        assert counted <= seconds < counted + 1000


def test_a_measurement_is_printed_and_written(monkeypatch, capsys, tmp_path):
    small = [([1, 2, 3], 5), (list(range(40)), 3)]
    use_work(monkeypatch, small)
    options = json.dumps({"device": "cpu", "kvcache_block_size": 16})
    args = [
        "--engine",
        "nanovllm",
        "--model",
        "tiny",
        "--workload",
        "laptop,bench",
        "--options",
        options,
    ]
    run(monkeypatch, *args, "--repeat", "3", "--json", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["engine"], row["model"], row["workload"]) for row in rows] == [
        ("nanovllm", "tiny", "laptop"),
        ("nanovllm", "tiny", "bench"),
    ]
    for row in rows:
        assert (
            row["output_tokens"] == 8
            and len(row["runs"]) == 3
            and row["seconds"] == min(row["runs"]) > 0
            and row["first_seconds"] == row["runs"][0]
        )
        assert row["output_tokens_per_second"] == pytest.approx(8 / row["seconds"])
        assert row["startup_seconds"] > 0 and row["roofline_seconds"] is None and row["device"]
        assert {"python", "torch", "nanovllm"} <= row["versions"].keys()
        assert row["options"] == json.loads(options)
    out, err = capsys.readouterr()
    row = r"nanovllm +tiny +laptop +first +\d+\.\d+ s, best of 3 +\d+\.\d+ s"
    assert re.search(row, out) and f"options {options}" in out
    assert err.splitlines() == [
        f"{name}: run {i} of 3" for name in ("laptop", "bench") for i in (1, 2, 3)
    ]


def test_a_part_of_a_workload_is_run(monkeypatch, capsys, tmp_path):
    use_work(monkeypatch, [([1, 2, 3], i) for i in (2, 3, 4)])
    few = ["--model", "tiny", "--workload", "small", "--requests", "2", "--repeat", "1"]
    run(monkeypatch, *few, "--json", f"{tmp_path}/out")
    (row,) = json.loads((tmp_path / "out").read_text())
    assert (row["requests"], row["output_tokens"]) == (2, 5)
    served = []
    serve = policies.serve
    monkeypatch.setattr(policies, "serve", lambda *args: served.append(args[2]) or serve(*args))
    run(monkeypatch, *few, "--policy", "fcfs")
    assert [len(work) for work in served] == [2]


def test_without_options_the_defaults_are_measured_and_said_to_be(monkeypatch, capsys):
    use_work(monkeypatch, [([1, 2, 3], 5)])
    made = []
    monkeypatch.setattr(
        engines, "LLM", lambda *args, **options: made.append(options) or LLM(*args, **options)
    )
    run(monkeypatch, "--model", "tiny", "--workload", "small", "--repeat", "1")
    assert made == [dict(load_format="auto", max_model_len=4096, tensor_parallel_size=1)]
    assert all(
        Config.from_options("model", {name: made[0][name]}) == Config("model") for name in made[0]
    )
    assert "the library's default options" in capsys.readouterr().out


def test_engines_are_compared_by_their_first_and_their_best_runs(monkeypatch, capsys, tmp_path):
    runs = {"nanovllm": [2.0, 1.0], "vllm": [3.0, 1.5], "openvino": [1.0, 0.8]}
    commands = []

    def run_bench(command):
        engine, path = (command[command.index(name) + 1] for name in ("--engine", "--json"))
        commands.append(command)
        row = dict(engine=engine, workload="many", seconds=min(runs[engine]), startup_seconds=5.0)
        row |= dict(first_seconds=runs[engine][0], device="a GPU", roofline_fraction=0.5)
        row |= dict(options={})
        Path(path).write_text(json.dumps([row]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench.subprocess, "run", run_bench)
    monkeypatch.setattr(checks, "find_spec", lambda name: True)  # as if both were installed
    args = ["--model", "tiny", "--workload", "many", "--quantization", "fp8"]
    run(monkeypatch, *args, "--compare", "vllm,openvino")
    # OpenVINO ignores options, so its rows must not say that it ran with any.
    assert ["--quantization" in command for command in commands] == [True, True, False]
    out = capsys.readouterr().out
    times = "2.000, 1.000 | 3.000, 1.500 | 1.000, 0.800"
    assert f"| many | {times} | 1.50, 1.50 | 0.50, 0.80 | 50% |" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1, "each line has all columns"
    assert "| start to first token | 5.0 | 5.0 | 5.0 |" in out
    assert "the library's default options" in out
    assert all("-u" in command for command in commands), "rows are shown as they come"


class LastFirst(SchedulingPolicy):
    def key(self, seq):
        return -seq.id


def test_policies_are_compared_on_one_load(monkeypatch, capsys, tmp_path):
    use_work(monkeypatch, [([1, 2, 3], 6), ([4], 3)] * 6)
    options = json.dumps({"device": "cpu", "kvcache_block_size": 16, "max_num_seqs": 2})
    names = ["throughput", "fcfs", "priority", "test_bench:LastFirst"]
    args = ["--model", "tiny", "--workload", "small", "--policy", ",".join(names)]
    made = []
    find = policies.find_policy
    for module in (checks, policies):
        monkeypatch.setattr(module, "find_policy", lambda name: made.append(name) or find(name))
    run(monkeypatch, *args, "--options", options, "--repeat", "3", "--json", f"{tmp_path}/out")
    assert made == names + names * 3, "checked, then by turns"
    rows = json.loads((tmp_path / "out").read_text())
    assert [row["policy"] for row in rows] == names
    out = capsys.readouterr().out
    for row in rows:
        assert len(row["runs"]) == 3 and row["options"] == json.loads(options)
        for found in row["runs"]:
            assert 0 < found["mean"] <= found["p99"] <= found["seconds"]
            assert 0 < found["mean_of_later"] <= found["p99_of_later"] <= found["p99"]
        means = sorted(found["mean"] for found in row["runs"])
        assert f"| {row['policy']} | {means[1]:.3f} |" in out, "the median"


def test_a_load_for_policies_is_a_batch_and_people_who_come_later(monkeypatch):
    """Seen by the policy: what comes when, and who is told to be first."""
    seen = []

    class Seen(SchedulingPolicy):
        def key(self, seq):
            seen.append((seq.token_ids[:], seq.request.interactive, seq.params.priority))
            return seq.id

    work = [([i], 2) for i in range(1, 5)]
    arrivals = [0.0, 0.02, 0.0, 0.01]
    monkeypatch.setattr(policies, "find_policy", lambda name: Seen())
    with LLM(TINY_MODEL, device="cpu", kvcache_block_size=16, num_kvcache_blocks=9) as llm:
        found = policies.serve(llm, "seen", work, arrivals, "small")
    assert seen == [([1], False, 1), ([3], False, 1), ([4], True, 0), ([2], True, 0)]
    assert found["seconds"] > 0.02


def test_tokens_a_second_add_up():
    times, counts = [0.0, 0.5, 1.0, 3.9, 4.0], [10, 20, 0, 7, 5]
    rates, edges = report.tokens_a_second(times, counts, num_spans=4)
    assert edges == [0, 1, 2, 3, 4] and rates == [30, 0, 0, 12]
    rates, edges = report.tokens_a_second([0.0], [3])
    assert (
        len(rates) == 60
        and sum(rate * (end - begin) for rate, begin, end in zip(rates, edges, edges[1:])) > 0
    )


def test_the_host_alone_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(host.host_cost, "__defaults__", ((4, 8), 20))
    run(monkeypatch, "--host")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["4", "8"] and all(
        "ms per step" in line for line in lines
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (["--workload", "nope"], "use one of bench, "),
        (["--repeat", "0"], "--repeat is 0"),
        (["--requests", "0"], "--requests is 0"),
        (["--policy", "fcfs,lifo"], "--policy lifo: use one of throughput, fcfs, "),
        (["--policy", "test_bench:Missing"], "--policy test_bench:Missing: use one of"),
        (["--policy", "os:path"], "--policy os:path: use one of"),
        (["--policy", "json:JSONDecoder"], "which has no method"),
        (["--json", "."], ". is a folder: name a file in it"),
        (
            ["--policy", "fcfs", "--compare", "vllm"],
            "--policy compares policies of nanovllm alone: leave",
        ),
        (["--compare", "vllm"], "vllm is not installed: pip install vllm, or"),
        (["--compare", "openvino,sglang"], "--compare 'sglang': use one or several of vllm, "),
        (["--compare", "nanovllm"], "--compare 'nanovllm': use one or several of vllm, "),
        (["--compare", ""], "--compare '': use one or several of vllm, "),
        (["--compare", "openvino", "--engine", "vllm"], "leave out --engine"),
        (["--engine", "transformers", "--quantization", "int8"], "transformers runs a model as it"),
        (["--engine", "openvino", "--options", '{"seed": 1}'], "openvino runs a model as it is"),
        (["--engine", "transformers", "--tensor-parallel-size", "2"], "leave out --options"),
        (["--model", ""], "model is ''"),
        (["--model", "qwen3-06b"], "--model 'qwen3-06b': use a folder, a hub id, tiny or one of q"),
        (["--workload", ""], "--workload '': use one of bench, "),
        (["--workload", "laptop,"], "--workload '': use one of bench, "),
        (["--policy", ""], "--policy : use one of"),
        (["--workload", "laptop,long"], "long has requests of up to 3,512 tokens of prompt and"),
        (["--workload", "long", "--policy", "fcfs"], "tiny takes 2,048: leave this workload out"),
        (
            ["--workload", "conversations", "--max-model-len", "512"],
            "requests of up to 1,399 tokens of prompt and output, and tiny takes 512: raise --max-",
        ),
        (["--options", '{"model": "x"}'], "For model, max_model_len"),
        (["--options", '{"load_format": "dummy"}'], "load_format follows from the model"),
        pytest.param(["--json", "/proc/x"], "/proc/x cannot be written (No such", marks=linux),
        pytest.param(["--plot", "/proc/x.png"], "/proc/x.png cannot be written", marks=linux),
        (["--plot", "run"], "name a file that ends in .png or .pdf or .svg"),
        (["--host", "--json", "x.json"], "--host runs no model: leave out all other options"),
        (["--compare", "openvino", "--model", "qwen3-8b"], "openvino needs weights: name a "),
        (["--policy", "fcfs", "--workload", "latency"], "workload latency has a single request"),
    ],
)
def test_a_mistake_says_what_to_do(monkeypatch, capsys, args, message):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "vllm" else True)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--model", "tiny", "--workload", "laptop", *args)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_check_of_a_file_leaves_it_as_it_was(monkeypatch, capsys, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("[]")
    for path in (old, new):
        with pytest.raises(SystemExit):
            run(monkeypatch, "--model", "tiny", "--workload", "long", "--json", str(path))
    assert old.read_text() == "[]" and not new.exists()


def test_ctrl_c_ends_a_measurement_with_one_line(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_once", interrupted)
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, "--model", "tiny", "--workload", "small")
    assert exit.value.code == 130 and capsys.readouterr().err == "bench.py: interrupted\n"


def test_tiny_is_the_model_in_the_package():
    assert model_folder("tiny") == (str(TINY_MODEL), False)


def test_rooflines_count_the_bytes_of_quantised_weights(work):
    """8B: 6.95e9 weights in layers, 0.62e9 in the head, which stays in bfloat16."""
    layers, head = 6.946e9, 151936 * 4096

    def seconds(quantization):
        return roofline("qwen3-8b", work["latency"], "latency", 4.3e12, 790e12, quantization)

    for quantization, bytes_ in (("fp8", 1), ("awq", 0.5 + 2.5 / 128)):
        saved = (2 - bytes_) / (2 + 2 * head / layers)
        assert seconds(quantization) == pytest.approx(seconds(None) * (1 - saved), rel=0.02)
    assert roofline("qwen3-8b", work["latency"], "latency", 1.0, 1.0, "mxfp4") is None


def bytes_read(model: str, work: Work, **options) -> float | None:
    """Count what a roofline without operations reads: at a byte a second."""
    return roofline(model, work, "latency", 1.0, math.inf, **options)


def test_rooflines_count_the_bytes_of_experts_in_mxfp4():
    """A step with many sequences reads all weights but the embedding."""
    config = load_model_config(model_folder("gpt-oss-20b")[0])
    formats = read_quantization(config.quantization_config, None, keeps_mxfp4=True)
    exchange = partial(use_quantised_layers, quantization=formats)
    with tensors_default_to(torch.bfloat16, torch.device("meta")):
        model = build_model(config, ParallelGroup(), 4096, exchange)
    held = sum(parameter.nbytes for parameter in model.parameters())
    work = [([1], 1)] * 512
    read = bytes_read("gpt-oss-20b", work)
    embedding = model.model.embed_tokens.weight.nbytes
    assert read == pytest.approx(held - embedding, rel=2e-3)  # without biases
    assert read == bytes_read("gpt-oss-20b", work, quantization="mxfp4")


def test_rooflines_count_windows_in_every_second_layer():
    """A token has 8 heads x 64 elements of K, and as many of V, in each of 24 layers."""
    short, long = (bytes_read("gpt-oss-20b", [([1] * n, 3)]) for n in (10, 1000))
    tokens = 1001 + 1002 + 128 + 128 - 2 * (11 + 12)
    assert long - short == 12 * tokens * 2 * 8 * 64 * 2


def test_a_shape_in_mxfp4_takes_no_other_format():
    folder, _ = model_folder("gpt-oss-20b", "gptq")
    with pytest.raises(ValueError, match="quantization is 'gptq', but the checkpoint is in mxfp4"):
        LLM(folder, load_format="dummy", quantization="gptq")


def test_rooflines_count_the_bytes_of_an_fp8_kv_cache(work):
    """8B: a token has 36 layers x 8 heads x 128 elements of K, and as many of V."""

    def seconds(kv_cache_dtype, rate=4.3e12):
        options = dict(kv_cache_dtype=kv_cache_dtype)
        return roofline("qwen3-8b", work["long"], "long", rate, 790e12, **options)

    read = sum(len(prompt) * (n - 1) + n * (n - 1) / 2 for prompt, n in work["long"])
    saved = read * 36 * 8 * 128 * 2
    assert seconds("auto") - seconds("fp8") == pytest.approx(saved / 4.3e12)
    assert seconds("auto") == pytest.approx(LIMITS["qwen3-8b"]["long"], abs=0.005)
    assert seconds("int4") is None


def test_formats_go_to_the_engine_and_into_the_rows(monkeypatch, capsys, tmp_path):
    use_work(monkeypatch, [([1, 2, 3], 5)])
    path, formats = tmp_path / "rows.json", []
    few = ["--model", "tiny", "--workload", "small", "--repeat", "1"]
    both = ["--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    made = engines.NanovllmEngine.__init__

    def note(engine, *args, **options):
        made(engine, *args, **options)
        formats.append((engine.llm.engine.runner.info.weight_format, options["kv_cache_dtype"]))

    monkeypatch.setattr(engines.NanovllmEngine, "__init__", note)
    run(monkeypatch, *few, *both, "--json", str(path))
    (row,) = json.loads(path.read_text())
    assert row["options"] == {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    assert formats == [("FP8 weights (a scale a row) and inputs (a scale a token)", "fp8")]
    assert 'options {"quantization": "fp8", "kv_cache_dtype": "fp8"}' in capsys.readouterr().out
    folder, _ = model_folder("qwen3-0.6b", "gptq")
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
