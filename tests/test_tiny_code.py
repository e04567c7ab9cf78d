"""The model in the package, as a newcomer meets it: small, complete, and continuing code as
transformers would.
"""

import ast
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, TINY_MODEL, SamplingParams

PROMPTS = ["def read_lines(path):", "class Stack:\n    def push(self, item):"]
COUNT = 64


@pytest.fixture(scope="module")
def outputs():
    with LLM(TINY_MODEL, device="cpu", dtype="float32") as llm:
        yield llm.generate(
            PROMPTS,
            SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
            use_tqdm=False,
        )


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


def parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines) + "\n")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_it_continues_with_code(outputs, i):
    """All of it parses but the last few lines, which the length limit may have cut."""
    written = outputs[i]["text"]
    lines = (PROMPTS[i] + written).split("\n")
    kept = next(lines[: len(lines) - cut] for cut in range(5) if parses(lines[: len(lines) - cut]))
    assert len(kept) >= 5 and len("\n".join(kept)) > len(PROMPTS[i]) + len(written) // 2


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_greedy_tokens_equal_transformers(outputs, reference, i):
    prompt = AutoTokenizer.from_pretrained(TINY_MODEL)(PROMPTS[i], return_tensors="pt")
    reference.generation_config.eos_token_id = None  # go on past it, as asked of the outputs
    with torch.inference_mode():
        expected = reference.generate(
            **prompt, do_sample=False, max_new_tokens=COUNT, pad_token_id=0
        )
    assert outputs[i]["token_ids"] == expected[0, prompt["input_ids"].shape[1] :].tolist()


def test_it_is_small():
    sizes = {path.name: path.stat().st_size for path in TINY_MODEL.iterdir()}
    assert sizes["model.safetensors"] <= 8 * 2**20
    assert sum(sizes.values()) <= 10 * 2**20


def test_it_says_where_it_comes_from():
    readme = (TINY_MODEL / "README.md").read_text()
    script = TINY_MODEL.parent / "train_tiny_qwen3.py"
    ast.parse(script.read_text())
    assert script.name in readme and "Python Software Foundation" in readme


def test_the_package_carries_it():
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"assets/**/*"' in pyproject
