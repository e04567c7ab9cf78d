"""Constraints and forms on a GPU, beside its graphs and with steps launched ahead: the tokens are
those of the plain layers on a CPU.
"""

import json

import pytest
import torch

from nanovllm import LLM, TINY_MODEL, SamplingParams

PROMPTS = ["import os", "def f(", "class A:", "for i in", "return", "x = ["] * 4
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def halve_first(token_ids, logits):
    logits[:100] = logits[:100] * 0.5
    return logits


def kinds() -> list[dict]:
    pytest.importorskip("llguidance", reason='pip install -e ".[structured]"')
    return [
        {},
        dict(logit_bias={40: -100, 41: 3.5}),
        dict(allowed_token_ids=list(range(0, 2000, 3))),
        dict(bad_words=[[5, 6], [7], "self"], logprobs=2, repetition_penalty=1.2),
        dict(logits_processors=[halve_first]),
        dict(structured_outputs={"json": SCHEMA}, max_tokens=40, ignore_eos=False),
        dict(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False),
    ]


def run(temperature: float, **options) -> list[list[list[int]]]:
    """The token ids of each completion of each prompt."""
    some = kinds()
    params = [
        SamplingParams(
            **dict(temperature=temperature, seed=i, max_tokens=16, n=1 + i % 2, ignore_eos=True)
            | some[i % len(some)]
        )
        for i in range(len(PROMPTS))
    ]
    sizes = dict(dtype="float32", max_num_seqs=32, num_kvcache_blocks=64, max_model_len=512)
    with LLM(TINY_MODEL, **sizes, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        if "json" in some[i % len(some)].get("structured_outputs", ()):
            if output["finish_reason"] == "stop":
                assert type(json.loads(output["text"])["ok"]) is bool
    return [[one["token_ids"] for one in out.get("completions", [out])] for out in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(enforce_eager=True),
        dict(overlap=False),
        dict(max_num_batched_tokens=64),
        dict(kernels="plain"),
    ],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constrained_rows_get_the_tokens_that_a_cpu_gives_them(temperature, options):
    expected = run(temperature, device="cpu", kernels="plain", overlap=False)
    assert run(temperature, device="cuda", **options) == expected


@pytest.mark.gpu
def test_a_processor_may_force_a_token_by_the_greatest_number():
    def force(output, logits):
        logits[7] = torch.finfo(logits.dtype).max
        return logits

    params = SamplingParams(temperature=0.5, max_tokens=3, logits_processors=[force])
    with LLM(TINY_MODEL, max_num_seqs=4, num_kvcache_blocks=64, max_model_len=512) as llm:
        (output,) = llm.generate(["def"], params, use_tqdm=False)
    assert output["token_ids"] == [7] * 3
