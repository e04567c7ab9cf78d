"""The model in the package, as a newcomer meets it: small, complete, and continuing code as
transformers would.
"""

import ast
import json
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


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_its_chat_template_writes_conversations_as_comments_and_code(add_generation_prompt):
    chat = [
        {"role": "system", "content": "Write Python.\nBe brief."},
        {"role": "user", "content": "A stack, please."},
        {"role": "assistant", "content": "class Stack:\n    pass"},
        {"role": "user", "content": "Now a queue."},
    ]
    written = AutoTokenizer.from_pretrained(TINY_MODEL).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert written == (
        "# system: Write Python.\n# Be brief.\n# user: A stack, please.\n"
        "# assistant:\n\nclass Stack:\n    pass\n\n# user: Now a queue.\n"
    ) + ("# assistant:\n\n" if add_generation_prompt else "")
    assert parses(written.split("\n"))


def test_a_conversation_goes_on_from_the_cached_prefix_of_its_last_turn():
    """The second prompt begins with the first prompt."""
    chat = [{"role": "user", "content": "def is_prime(n):\n" * 9}]
    with LLM(TINY_MODEL, device="cpu", kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16)
        (first,) = llm.chat(chat, params, use_tqdm=False)
        chat += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Go"}]
        (second,) = llm.chat(chat, params, use_tqdm=False)
    prompt = first["prompt_token_ids"]
    assert second["prompt_token_ids"][: len(prompt)] == prompt
    assert second["num_cached_tokens"] >= len(prompt) // 16 * 16 and second["text"]


def test_its_chat_template_is_the_one_that_its_recipe_writes():
    recipe = ast.parse((TINY_MODEL.parent / "train_tiny_qwen3.py").read_text())
    (written,) = [
        ast.literal_eval(node.value)
        for node in recipe.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CHAT_TEMPLATE"
    ]
    config = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
    assert config["chat_template"] == written


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
