"""example.py, run as a newcomer runs it: in a process of its own, or where that adds nothing, by
the same entry here.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, TINY_MODEL, SamplingParams

EXAMPLE = Path(__file__).parent.parent / "example.py"
CLASS = "class Stack:\n    def push(self, item):"


def run_apart(*args: str) -> subprocess.CompletedProcess:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, EXAMPLE.name, *args],
        cwd=EXAMPLE.parent,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """A function: arguments -> (exit status, what was printed, what was printed as errors)."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["example.py", *args])
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


def complete(prompts: list[str], max_tokens: int) -> list[str]:
    with LLM(TINY_MODEL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [output["text"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_without_arguments_it_completes_prompts_together_and_alone():
    done = run_apart()
    assert done.returncode == 0, done.stderr
    assert "def read_lines(path):" in done.stdout and CLASS in done.stdout
    assert "prompts together: " in done.stdout and "1 prompt alone: " in done.stdout
    assert done.stdout.count("tokens/s") == 2
    assert (
        (done.stdout + done.stderr).count("tiny-qwen3")
        == (done.stdout + done.stderr).count("ready in")
        == 1
    )


def test_a_wrong_model_is_one_line_and_exit_2():
    done = run_apart("--model", "no-such-model")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("example.py: ") and done.stderr.count("\n") == 1
    assert "no-such-model" in done.stderr


def test_it_shows_what_generate_returns(run):
    status, out, _ = run(
        "--prompt", CLASS, "--temperature", "0", "--max-tokens", "24", "--enforce-eager"
    )
    assert status == 0
    assert CLASS + complete([CLASS], 24)[0] in out
    assert "1 prompt alone: 24 tokens" in out and "together" not in out


def test_a_model_with_a_chat_template_chats(run, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = (
        "{% for message in messages %}# {{ message.content }}\n{% endfor %}def "
    )
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        os.symlink(TINY_MODEL / name, tmp_path / name)
    options = ["--temperature", "0", "--max-tokens", "8"]
    status, out, _ = run("--model", str(tmp_path), "--prompt", "add", "--prompt", "pop", *options)
    assert status == 0
    add, pop = complete(["# add\ndef ", "# pop\ndef "], 8)
    together, alone = out.split("prompts together")
    assert add in together and pop in together and add in alone


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--model", "./nothing-here", "no such folder"),
        ("--max-tokens", "0", "max_tokens is 0"),
        ("--temperature", "-1", "temperature is -1"),
        ("--tensor-parallel-size", "3", "tensor_parallel_size=3"),
    ],
)
def test_a_mistake_says_what_to_do_in_one_line(run, option, value, message):
    status, _, err = run(option, value)
    assert status == 2
    assert err.startswith("example.py: ") and err.count("\n") == 1 and message in err


def test_help_names_every_option(run):
    status, out, _ = run("--help")
    assert status == 0
    for option in (
        "model",
        "prompt",
        "temperature",
        "max-tokens",
        "tensor-parallel-size",
        "enforce-eager",
    ):
        assert f"--{option} " in out or f"--{option}]" in out
