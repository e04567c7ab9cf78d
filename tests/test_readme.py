"""What README.md says is so: its examples run, its tables and commands are the code's, its route
misses no file.
"""

import ast
import json
import os
import re
import shutil
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from model_helpers import Driver, expected_logits, load, make_checkpoint

import nanovllm
from nanovllm import TINY_MODEL, SamplingParams
from nanovllm.config import Config
from nanovllm.models import MODELS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced code of a language, each with the number of the line it begins on."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The names that the examples, run one after the other, leave behind.

    The hub's model is the tiny one, able to chat.
    """
    folder = tmp_path_factory.mktemp("readme") / "tiny"
    folder.mkdir()
    for path in TINY_MODEL.iterdir():
        if path.name == "tokenizer_config.json":
            (folder / path.name).write_text(
                json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE})
            )
        else:
            os.symlink(path, folder / path.name)
    known, names = set(MODELS), {"__name__": "readme"}
    try:
        for line, code in blocks("python"):
            code = code.replace('"Qwen/Qwen3-0.6B"', repr(str(folder)))
            exec(compile("\n" * (line - 1) + code, str(ROOT / "README.md"), "exec"), names)
        yield names
    finally:
        if "llm" in names:
            names["llm"].close()
        for name in set(MODELS) - known:
            del MODELS[name]


def test_the_examples_run_and_none_downloads(ran):
    assert len(ran["outputs"]) == 2 and all(output["text"] for output in ran["outputs"])
    assert "huggingface.co" not in "".join(code for _, code in blocks("python"))


def test_the_examples_show_every_call(ran):
    code = "".join(code for _, code in blocks("python"))
    calls = [
        name
        for name, member in vars(nanovllm.LLM).items()
        if callable(member) and not name.startswith("_")
    ]
    assert len(calls) == 10
    assert not [name for name in calls if f"llm.{name}(" not in code]


def test_seeds_hold_as_the_example_says(ran):
    assert ran["alone"]["token_ids"] == ran["batch"][1]["token_ids"]


def test_the_family_of_the_example_equals_transformers(ran, tmp_path):
    seed_oss = pytest.importorskip("transformers.models.seed_oss")
    config = seed_oss.SeedOssConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=True,
        pad_token_id=0,
    )
    reference = make_checkpoint(tmp_path, config)
    tokens = [7, 3, 99, 42, 5, 60, 11]
    logits = Driver(load(tmp_path), 1, 16).step({}, {0: tokens})
    assert (logits - expected_logits(reference, tokens)).abs().max() < 1e-4


def table(heading: str) -> dict[str, str]:
    """The first two columns of the table under a heading: name -> default."""
    section = re.split(r"^#", README.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", section, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "heading, options", [("### LLM", Config), ("### SamplingParams", SamplingParams)]
)
def test_the_tables_of_options_are_those_of_the_code(heading, options):
    expected = {field.name: field.default for field in fields(options)}
    documented = {
        name: ast.literal_eval(value) if value else MISSING
        for name, value in table(heading).items()
    }
    assert list(documented.items()) == list(expected.items())


def test_the_route_through_the_source_misses_no_file_and_names_no_other():
    route = README.split("\n## How it works\n")[1].split("\n## ")[0]
    package = Path(nanovllm.__file__).parent
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent.name != "assets"
    }
    silent = {name for name in files if name.endswith("__init__.py")} - {
        "models/__init__.py",
        "kernels/__init__.py",
    }
    assert set(re.findall(r"`([\w/]+\.py)`", route)) == files - silent


def test_ci_runs_the_two_commands_of_the_readme():
    (_, commands), *_ = blocks("bash")
    assert len(commands.splitlines()) == 2
    script = ROOT / ".ci" / "run"
    assert (
        re.findall(r"^step '(.*)'$", script.read_text(), flags=re.MULTILINE)
        == commands.splitlines()
    )
    assert os.access(script, os.X_OK)


def test_ci_runs_every_install_line_of_the_readme():
    """What needs a GPU is resolved, not installed."""
    script = (ROOT / ".ci" / "run").read_text()
    run = re.findall(
        r"^(?:step|resolve) '(pip install [^'&]*?) *(?:&&.*)?'$", script, flags=re.MULTILINE
    )
    told = re.findall(r"pip install [^`&#\n]*[^`&#\n ]", README)
    assert len(told) > 6 and set(told) <= {*run, 'pip install -e ".[plot]"'}


def test_no_line_is_longer_than_120_characters():
    assert not [line for line in README.splitlines() if len(line) > 120]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("line, code", blocks("bash"))
def test_every_script_that_is_named_exists(line, code):
    assert all((ROOT / name).is_file() for name in re.findall(r"\bpython (\S+\.py)", code))
