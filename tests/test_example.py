"""example.py, run as a newcomer runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, TINY_MODEL, SamplingParams

ROOT = Path(__file__).parent.parent


def run(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "example.py"), *args],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | env,
    )  # fmt: skip


def test_without_arguments_it_completes_prompts_together_and_alone():
    done = run()
    assert done.returncode == 0, done.stderr
    assert "def read_lines(path):" in done.stdout and "class Stack:\n    def push(self, item):" in done.stdout
    assert "prompts together: " in done.stdout and "1 prompt alone: " in done.stdout
    assert done.stdout.count("tokens/s") == 2


def test_it_shows_what_generate_returns():
    prompt = "class Stack:\n    def push(self, item):"
    done = run("--prompt", prompt, "--temperature", "0", "--max-tokens", "24", "--enforce-eager")
    assert done.returncode == 0, done.stderr
    with LLM(TINY_MODEL) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    assert prompt + output["text"] in done.stdout
    assert "1 prompt alone: 24 tokens" in done.stdout and "together" not in done.stdout


def test_a_model_with_a_chat_template_chats(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}def "
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        os.symlink(TINY_MODEL / name, tmp_path / name)
    done = run("--model", str(tmp_path), "--prompt", "add", "--prompt", "pop", "--temperature", "0", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    with LLM(TINY_MODEL) as llm:
        outputs = llm.generate(["# add\ndef ", "# pop\ndef "], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    together, alone = done.stdout.split("prompts together")
    assert all(output["text"] in together for output in outputs) and outputs[0]["text"] in alone


@pytest.mark.parametrize(
    "args, message",
    [
        (["--model", "no-such-model"], "no such folder"),
        (["--model", "nobody/nothing"], "nobody/nothing"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_exit_2(args, message):
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("example.py: ") and done.stderr.count("\n") == 1 and message in done.stderr


def test_help_names_every_option():
    done = run("--help")
    assert done.returncode == 0
    for option in ("model", "prompt", "temperature", "max-tokens", "tensor-parallel-size", "enforce-eager"):
        assert f"--{option}" in done.stdout
