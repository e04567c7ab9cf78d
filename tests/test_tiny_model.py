"""The trained model in the package: small, complete, and continuing code as transformers does."""

import ast
import json
from pathlib import Path

import pytest
import torch
from engine_helpers import Checkpoint, assert_empty, assert_greedy, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, TINY_MODEL, SamplingParams

LIBRARY = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)
TEXTS = [
    "import",
    "def add(a, b):\n",
    "class Node:\n    def __init__(self",
    "def fibonacci(n):\n    if n < 2:\n",
    LIBRARY,
    LIBRARY + "        self.items.append(item)\n\n    def pop(self):\n",
    'if __name__ == "__main__":\n    unittest.main()',  # ends the file: the model stops
]


@pytest.fixture(scope="module")
def tiny():
    return Checkpoint(TINY_MODEL)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return tokenizer(TEXTS)["input_ids"]


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_seqs=1),
        dict(overlap=True),
        dict(overlap=True, max_num_batched_tokens=16, enable_prefix_caching=False),
        dict(overlap=True, num_kvcache_blocks=9, max_num_batched_tokens=40),
        dict(num_kvcache_blocks=9, max_num_seqs=3),
    ],
    ids=str,
)
def test_greedy_tokens_of_the_tiny_model_equal_transformers(make_llm, tiny, prompts, options):
    llm = make_llm(TINY_MODEL, **options)
    assert_greedy(llm, tiny, prompts, max_tokens=40)
    assert ("num_kvcache_blocks" in options) == (llm.engine.scheduler.num_preemptions > 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_text_stops_where_the_tiny_models_file_ends(make_llm, tiny, tokenizer, prompts, overlap):
    llm = make_llm(TINY_MODEL, overlap=overlap)
    reasons = []
    for prompt, output in zip(
        prompts, llm.generate(TEXTS, greedy(40, ignore_eos=False), use_tqdm=False)
    ):
        expected = tiny.expected(prompt, 40)
        if tokenizer.eos_token_id in expected:
            expected = expected[: expected.index(tokenizer.eos_token_id) + 1]
        assert output["token_ids"] == expected
        assert output["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert "endoftext" not in output["text"]
        reasons.append(output["finish_reason"])
    assert reasons == ["length"] * 6 + ["stop"]
    assert_empty(llm)


def test_the_tiny_model_runs_with_default_options(tiny, prompts):
    with LLM(TINY_MODEL, device="cpu") as llm:
        assert_greedy(llm, tiny, prompts[:3], max_tokens=16)


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
