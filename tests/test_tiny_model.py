"""The trained model that comes with the library: real text, a real tokenizer, a real end of
sequence.
"""

import pytest
from engine_helpers import Checkpoint, assert_empty, assert_greedy, greedy
from transformers import AutoTokenizer

from nanovllm import LLM, TINY_MODEL

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
