"""What the tests of the course share: the model, some prompts, and the library's tokens."""

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of my_engine
torch.set_num_threads(1)

from nanovllm.apps.course.solution.model import Model

from nanovllm import LLM, TINY_MODEL, SamplingParams

TEXTS = ["import os", "class Stack:\n    def push(self, item):\n", "def read_lines(path):", "for"]


class CountingModel(Model):
    """A model that counts the tokens of each forward pass."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def forward(self, token_ids, positions, attend):
        self.counts.append(len(token_ids))
        return super().forward(token_ids, positions, attend)


@pytest.fixture(scope="session")
def loaded():
    return CountingModel()


@pytest.fixture
def model(loaded):
    """The tiny model. `model.counts` lists the tokens of each forward pass of this test."""
    model = copy.copy(loaded)
    model.counts = []
    return model


@pytest.fixture(scope="session")
def library():
    """A function: prompts, number of tokens -> the library's greedy outputs."""
    llm = LLM(TINY_MODEL, device="cpu", dtype="float32", kernels="plain", num_kvcache_blocks=16)
    found = {}

    def generate(prompts, max_tokens):
        for prompt in prompts:
            if (tuple(prompt), max_tokens) not in found:
                params = SamplingParams(temperature=0, max_tokens=max_tokens)
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                found[tuple(prompt), max_tokens] = output["token_ids"]
        return [found[tuple(prompt), max_tokens] for prompt in prompts]

    generate.encode = llm.encode
    return generate


@pytest.fixture(scope="session")
def prompts(library):
    """Four prompts of 2 to 17 tokens."""
    return library.encode(TEXTS)


@pytest.fixture(scope="session")
def long_prompt(library):
    """A prompt of more than 100 tokens."""
    lines = [f"    {name} = self.{name} + 1\n" for name in ("left", "right", "size", "count") * 4]
    return library.encode(["class Tree:\n  def grow(self):\n" + "".join(lines)])[0]
