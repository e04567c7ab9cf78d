"""What the READMEs and the guide say is so.

Each of their examples runs alone, as it stands. README.md and docs/guide.md are the users': their
tables and calls are the code's. The other pages are for readers and contributors: the tests that
they name exist.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import MISSING, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint
from test_bench import bench, run
from test_scheduler import Server, make_request, make_scheduler

import nanovllm
from nanovllm import LLM, TINY_MODEL, SamplingParams
from nanovllm.apps.bench.roofline import roofline
from nanovllm.apps.bench.shapes import VOCAB
from nanovllm.apps.bench.workloads import WORKLOADS
from nanovllm.config import SCHEDULING_POLICIES, Config
from nanovllm.features.policies import POLICIES
from nanovllm.models import MODELS
from nanovllm.options import options_of
from nanovllm.outputs import StepRecord

PACKAGE = Path(nanovllm.__file__).parent
ROOT = PACKAGE.parent
TESTS = Path(__file__).parent
DOCS = PACKAGE / "docs"
USERS, GUIDE, CONTRIBUTING = ROOT / "README.md", DOCS / "guide.md", DOCS / "contributing.md"
USERS_TEXT, GUIDE_TEXT = USERS.read_text(), GUIDE.read_text()
PAGES = [USERS, PACKAGE / "README.md", *sorted(DOCS.glob("*.md"))]
ALL_TEXT = "".join(path.read_text() for path in PAGES)
EXPERIMENTS_TEXT = (DOCS / "experiments.md").read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    (_, rest) = f"\n{text}".split(f"\n{heading}\n")
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def code_blocks(path: Path | str, language: str) -> list[tuple[int, str]]:
    """The fenced code of a language, each with the number of the line it begins on."""
    text = path.read_text() if isinstance(path, Path) else path
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def bench_commands(code: str) -> list[str]:
    """The arguments of each line that runs bench.py."""
    return re.findall(r"^python bench\.py(.*)$", code.replace("\\\n", ""), flags=re.MULTILINE)


class Example(NamedTuple):
    """A Python block of a page."""

    path: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


# All but the script that needs Ray, which test_ray.py runs.
EXAMPLES = [
    Example(path, *block)
    for path in PAGES
    for block in code_blocks(path, "python")
    if "import ray\n" not in block[1]
]


def example_under(path: Path, heading: str) -> Example:
    text = section(path.read_text(), heading)
    (found,) = [one for one in EXAMPLES if one.path == path and one.code in text]
    return found


QUICK_START = example_under(USERS, "## Quick start")


@pytest.fixture(scope="module")
def names_of(tmp_path_factory):
    """A function: an example -> the names that it leaves behind.

    Each example runs once, in a namespace of its own and in an empty folder. The tiny model takes
    the place of the hub's.
    """
    folder, families = Path.cwd(), dict(MODELS)  # one example adds a family
    ran: dict[Example, dict] = {}

    def run_alone(example: Example) -> dict:
        if example in ran:
            return ran[example]
        code = example.code.replace('"Qwen/Qwen3-0.6B"', repr(str(TINY_MODEL)))
        names = {"__name__": "readme"}
        os.chdir(tmp_path_factory.mktemp("example"))
        try:
            exec(compile("\n" * (example.line - 1) + code, str(example.path), "exec"), names)
        finally:
            os.chdir(folder)
            MODELS.clear()
            MODELS.update(families)
            if "llm" in names:
                names["llm"].close()
        ran[example] = names
        return names

    return run_alone


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY_MODEL, device="cpu", num_kvcache_blocks=16) as llm:
        yield llm


# The users' README.


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_each_example_runs_alone(names_of, example):
    names_of(example)


def test_only_the_quick_start_needs_a_network(names_of):
    code = "".join(example.code for example in EXAMPLES if example != QUICK_START)
    assert '"Qwen/' not in code and "huggingface.co" not in code
    outputs = names_of(QUICK_START)["outputs"]
    assert len(outputs) == 2 and all(output["text"] for output in outputs)


def test_its_calls_are_those_of_an_llm_with_their_parameters():
    documented = dict(re.findall(r"`llm\.(\w+)\(([^`]*)\)`", section(USERS_TEXT, "## Calls")))
    for name, member in vars(LLM).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            _, *parameters = inspect.signature(member).parameters.values()
            said = [
                str(parameter.replace(annotation=inspect.Parameter.empty))
                for parameter in parameters
            ]
            assert documented.get(name) == ", ".join(said), f"README.md's `llm.{name}(...)`"
    assert documented.keys() <= vars(LLM).keys()


def test_its_names_of_an_llm_exist(llm):
    named = set(re.findall(r"\bllm\.(\w+)", USERS_TEXT + GUIDE_TEXT))
    assert {"tokenizer", "num_kvcache_blocks"} < named
    assert not [name for name in named if not hasattr(llm, name)]


def test_its_keys_of_an_output_are_those_of_an_output(llm):
    documented = re.findall(
        r"^\| `(\w+)` \|", section(USERS_TEXT, "### generate"), flags=re.MULTILINE
    )
    params = SamplingParams(n=2, logprobs=1, prompt_logprobs=0, max_tokens=2)
    (output,) = llm.generate("def", params, use_tqdm=False)
    documented.remove("error")  # only a request that failed has it
    assert documented == list(output)
    assert list(output["completions"][0]) == documented[documented.index("completions") - 6 : -1]


def test_its_names_of_metrics_are_those_of_metrics(llm):
    llm.generate("def", SamplingParams(max_tokens=2), use_tqdm=False)
    metrics = llm.metrics()
    keys = metrics.keys() | metrics["total"].keys() | metrics["total"]["time_to_first_token"].keys()
    named = set(re.findall(r"`([\w]+)`", section(GUIDE_TEXT, "## metrics")))
    assert named == keys


def test_its_fields_of_a_step_are_those_of_a_record():
    said, *_ = section(GUIDE_TEXT, "## on_step").split("```")
    named = re.findall(r"`(\w+)`", said)
    assert sorted(set(named) - {"callback"}) == sorted(StepRecord._fields)


def test_the_use_of_the_kv_cache_that_its_example_shows_is_not_0(names_of):
    names = names_of(example_under(GUIDE, "## on_step"))
    assert names["steps"] and names["most"] >= 2  # a block of each prompt
    assert names["llm"]._session._observers == []


def test_its_seeds_hold_as_the_example_says(names_of):
    names = names_of(example_under(GUIDE, "## Seeds and rounding"))
    assert names["alone"]["token_ids"] == names["second"]["token_ids"]


def options_table(options: type) -> list[str]:
    """The rows of the README's table of a class of options."""
    rows = []
    for name, declared in options_of(options).items():
        default = declared.default
        written = json.dumps(default) if isinstance(default, str) else repr(default)
        cell = "" if default is MISSING else f"`{written}` "
        rows.append(f"| `{name}` | {cell}| {declared.help} |")
    return rows


@pytest.mark.parametrize(
    "heading, options", [("### LLM", Config), ("### SamplingParams", SamplingParams)]
)
def test_its_tables_of_options_are_the_declarations(heading, options):
    """Name, default and help. The README may make links of words."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section(USERS_TEXT, heading))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == options_table(options)


@pytest.mark.parametrize("options", [Config, SamplingParams])
def test_the_help_of_an_option_names_each_of_its_choices(options):
    for name, declared in options_of(options).items():
        choices = SCHEDULING_POLICIES if name == "scheduling_policy" else declared.choices
        for choice in choices:
            assert not isinstance(choice, str) or f'`"{choice}"`' in declared.help


def test_its_choices_of_an_option_are_accepted():
    """Every quoted value in the table of LLM's options."""
    for row in section(USERS_TEXT, "### LLM").splitlines():
        if match := re.match(r"\| `(\w+)` \|", row):
            for value in re.findall(r'`"([\w:-]+)"`', row):
                assert getattr(Config("model", **{match[1]: value}), match[1]) == value


def test_its_policies_are_those_of_the_library():
    policies = section(GUIDE_TEXT, "## Scheduling policies")
    assert re.findall(r'^\| `"([\w-]+)"` \|', policies, flags=re.MULTILINE) == [*POLICIES]
    measured = section(EXPERIMENTS_TEXT, "## 3. Scheduling policies: who waits for whom")
    rows = re.findall(r"^\| ([a-z][a-z-]+)[ ,]", measured, flags=re.MULTILINE)
    assert [*dict.fromkeys(rows)] == ["policy", *POLICIES]


def test_its_families_are_those_of_the_registry():
    table = section(USERS_TEXT, "## Models")
    rows = re.findall(r"^\| ([A-Z][^|]*) \|", table, flags=re.MULTILINE)
    named = {
        name.replace("-MoE", "Moe").replace(".", "_") for row in rows for name in row.split(", ")
    }
    assert named == {
        name.removesuffix("ForCausalLM") for name in MODELS if "Conditional" not in name
    }


def test_its_rooflines_are_those_that_bench_works_out():
    """By the rates that are named above the table."""
    speed = section(USERS_TEXT, "## Speed")
    bandwidth, flops = (
        float(re.search(rf"([\d.]+) {unit}", speed)[1]) for unit in ("TB/s", "TFLOP/s")
    )
    rows = re.findall(r"^\| (\w+): ", speed, flags=re.MULTILINE)
    assert len(rows) == 6
    for row in speed.splitlines():
        if match := re.match(r"\| (\w+): ", row):
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            for model, said in (("qwen3-0.6b", cells[3]), ("qwen3-8b", cells[6])):
                work = WORKLOADS[match[1]].work(VOCAB)
                limit = roofline(model, work, match[1], bandwidth * 1e12, flops * 1e12)
                assert float(said) == pytest.approx(limit, rel=0.02), (match[1], model)


def test_it_says_before_the_first_command_how_to_do_without_cuda():
    before, _ = section(USERS_TEXT, "## Try it").split("```bash", maxsplit=1)
    assert "whl/cpu" in before and len(re.findall(r"[\d.]+ GB", before)) == 4


def test_ci_runs_its_two_commands():
    (_, commands), *_ = code_blocks(USERS, "bash")
    assert len(commands.splitlines()) == 2
    script = ROOT / ".ci" / "run"
    steps = re.findall(r"^step '(.*)'$", script.read_text(), flags=re.MULTILINE)
    assert set(commands.splitlines()) <= set(steps)
    assert os.access(script, os.X_OK)


def test_ci_runs_every_install_line_of_both():
    """What needs a GPU is resolved, not installed. PyTorch's own index is not asked: .ci/run takes
    a CPU build where pip is offered one.
    """
    script = (ROOT / ".ci" / "run").read_text()
    pattern = r"^(?:step|resolve) '(pip install [^'&]*?) *(?:&&.*)?'$"
    run = re.findall(pattern, script, flags=re.MULTILINE)
    told = re.findall(r"pip install [^`&#\n]*[^`&#\n ]", ALL_TEXT)
    names = ("plot", "parquet", "ray", "eval", "structured", "course")
    tested_together = {f'pip install -e ".[{extra}]"' for extra in names}
    of_pytorch = {"pip install torch --index-url https://download.pytorch.org/whl/cpu"}
    of_peers = {'pip install "optimum-intel[openvino]" openvino-genai'}  # which bench.py compares
    assert told and set(told) <= {*run, *tested_together, *of_pytorch, *of_peers}


# The README for readers and contributors.


def test_the_tests_it_names_exist():
    named = re.findall(r"`(?:tests/)?(test_\w+\.py)(?:::(\w+))?`", ALL_TEXT)
    assert len(named) > 10
    for file, name in named:
        text = (TESTS / file).read_text()
        assert not name or re.search(rf"^(def|class) {name}\b", text, flags=re.MULTILINE), name


def test_the_family_of_its_example_equals_transformers(names_of, monkeypatch, tmp_path):
    example = example_under(CONTRIBUTING, "## Adding a model family")
    family = names_of(example)["Ernie4_5ForCausalLM"]
    monkeypatch.setitem(MODELS, family.__name__, family)
    ernie = pytest.importorskip("transformers.models.ernie4_5")
    config = ernie.Ernie4_5Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        use_bias=True,
        pad_token_id=0,
    )
    reference = make_checkpoint(tmp_path, config)
    tokens = [7, 3, 99, 42, 5, 60, 11]
    logits = Driver(load(tmp_path), 1, 16).step({}, {0: tokens})
    assert (logits - expected_logits(reference, tokens)).abs().max() < 1e-4


def test_the_policy_of_its_example_changes_the_order(names_of):
    names = names_of(example_under(CONTRIBUTING, "## Adding a scheduling policy"))
    server = Server(make_scheduler(policy=names["PatientShortestFirst"]()))
    for id, (seconds, length) in enumerate([(0, 40), (0, 10), (5, 3), (0, 20), (0.05, 10), (9, 1)]):
        request = make_request(id, [id], length)
        request.added_at = seconds
        server.scheduler.add(request)
    server.run()
    assert server.scheduler.first_starts == [1, 4, 3, 0, 2, 5]
    assert max(len(batch.decode_slots) for batch in server.batches) == 4
    assert [output["finish_reason"] for output in names["outputs"]] == ["length"] * 3


def test_the_transform_of_its_example_changes_no_result(names_of):
    names = names_of(example_under(CONTRIBUTING, "## Adding a transform"))
    plain, changed = load(TINY_MODEL), load(TINY_MODEL)
    names["use_functional_norms"](changed)
    assert any(type(module) is names["FunctionalRMSNorm"] for module in changed.modules())
    logits = [Driver(model, 1, 16).step({}, {0: [5, 70, 300]}) for model in (plain, changed)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


# Its experiments.

EXPERIMENTS = re.split(r"^## ", EXPERIMENTS_TEXT, flags=re.MULTILINE)[1:]


def experiment(number: int, language: str) -> str:
    """All code in a language that an experiment has."""
    return "".join(code for _, code in code_blocks(EXPERIMENTS[number - 1], language))


def test_there_are_six_experiments_each_with_a_command_a_change_and_figures():
    assert [text.split(".")[0] for text in EXPERIMENTS] == ["1", "2", "3", "4", "5", "6"]
    for number, text in enumerate(EXPERIMENTS, 1):
        assert bench_commands(experiment(number, "bash")) and experiment(number, "diff")
        rows = re.findall(r"^\|.*\|$", text, flags=re.MULTILINE)
        assert len(rows) > 3 and "H200" in rows[0] and len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize("number", range(1, 7))
def test_each_command_of_an_experiment_runs(number, monkeypatch, capsys, tmp_path):
    """On few requests, and two rounds of conversations. Nothing is compiled."""
    two = replace(WORKLOADS["conversations"], rounds=2)
    monkeypatch.setitem(WORKLOADS, "conversations", two)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    for line in bench_commands(experiment(number, "bash")):
        arguments = shlex.split(line.replace("run.html", str(tmp_path / "run.html")))
        few = ["--model", "tiny", "--requests", "2", "--repeat", "1"]
        run(monkeypatch, *arguments, *few)
        out = capsys.readouterr().out
        assert ("slots unused" in out) == ("--trace" in line) == (tmp_path / "run.html").exists()
        assert all(f"| {name} |" in out for name in POLICIES if "--policy" in line)


def changed(text: str, diff: str) -> str:
    """`text` after a diff without line numbers, whose old lines stand there once."""
    old, new = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kinds)
        for kinds in (" -", " +")
    )
    assert text.count(old) == 1, diff
    return text.replace(old, new)


def test_the_changes_of_the_experiments_make_a_library_that_runs(tmp_path):
    """All of them together; nothing is compiled."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    shutil.copy(ROOT / "bench.py", tmp_path)
    for number in range(1, 7):
        path, diff = experiment(number, "diff").removeprefix("--- ").split("\n", 1)
        (tmp_path / path).write_text(changed((tmp_path / path).read_text(), diff))
    command = [sys.executable, "bench.py", "--model", "tiny", "--workload", "small"]
    command += ["--requests", "2", "--repeat", "1", "--options", '{"kernels": "compile"}']
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "small" in done.stdout


# All.

ALL = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def anchors(path: Path) -> set[str]:
    """What a link to a heading of this file says after #."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@ALL
def test_every_script_and_link_that_is_named_exists(path):
    commands = "".join(code for _, code in code_blocks(path, "bash"))
    scripts = re.findall(r"\b(?:python|pytest)(?: -\w+)* ((?:\w+/)*\w+\.py)", commands)
    assert all((ROOT / name).is_file() for name in scripts)
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", path.read_text())
    for link, anchor in links:
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), (link, anchor)


@ALL
def test_commands_of_bench_have_options_and_workloads_that_it_knows(path):
    lines = bench_commands("".join(code for _, code in code_blocks(path, "bash")))
    for line in lines:
        args = bench.make_parser().parse_args(shlex.split(line, comments=True))
        assert set((args.workload or "bench").split(",")) <= WORKLOADS.keys()
        assert Config.from_options("model", json.loads(args.options))
