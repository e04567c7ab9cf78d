"""Any call: whatever is asked for, the right tokens come, or an error that names the field."""

from dataclasses import fields, replace
from importlib.util import find_spec

import numpy as np
import pytest
from call_helpers import check_empty, generate
from effort import tries
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config

NUMBERS = (0, 1, -1, 2, 7, 64, 10**9, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 1e-300, 1e38, 1e308, float("nan"), float("inf"))
OTHERS = (None, True, False, "", "x", "th", "\ud800", b"x", [], [""], ["a"], [1], [[1]], {}, {1: 2})
NUMPY = (
    np.int8(3),
    np.uint64(2**64 - 1),
    np.float16(0.5),
    np.bool_(True),
    np.zeros(2),
    np.str_("a"),
)
THINGS = (*NUMBERS, *FLOATS, *OTHERS, *NUMPY, (), object(), int, lambda: 0, 1j, range(3), {1})
things = st.sampled_from(THINGS)
PARAMETERS = sorted(field.name for field in fields(SamplingParams))
OPTIONS = sorted(field.name for field in fields(Config) if field.name != "model")


@tries(400)
@given(st.dictionaries(st.sampled_from([*PARAMETERS, "temprature"]), things, max_size=3))
def test_any_sampling_parameters_are_taken_or_refused_by_name(given):
    is_refused_by_name(lambda: SamplingParams(**given), given)


@tries(400)
@given(st.dictionaries(st.sampled_from([*OPTIONS, "max_seqs"]), things, max_size=3))
def test_any_options_are_taken_or_refused_by_name(given):
    is_refused_by_name(lambda: Config.from_options("a folder", given), given)


def is_refused_by_name(make, given) -> None:
    try:
        make()
    except (ValueError, TypeError) as error:
        said = str(error)
        assert any(name in said for name in given) and ":" in said and len(said) < 1000


@pytest.fixture(scope="module")
def plain(folder):
    """One request at a time, by the plain layers, with nothing kept from one to the next."""
    options = dict(kernels="plain", enable_prefix_caching=False, max_num_seqs=5, overlap=False)
    with LLM(folder, device="cpu", kvcache_block_size=16, num_kvcache_blocks=64, **options) as llm:
        yield llm


tokens = st.integers(0, 262)
ids = st.one_of(
    st.lists(tokens, min_size=1, max_size=50),
    st.integers(1, 40).map(lambda count: [*range(100, 100 + count)]),  # they begin alike
)
texts = st.text("the in\x00é漢\U0001f600", min_size=1, max_size=15)
FORMS = [dict(regex="[a-z]+")] if find_spec("llguidance") else []


def upwards(output, logits):
    """A processor in which the output so far decides, and of another dtype."""
    logits[: output[-1] if output else 0] -= 2
    return logits.double()


def make_params(**given) -> SamplingParams:
    """Of what goes together."""
    if given["structured_outputs"]:
        given |= dict(ignore_eos=False, min_tokens=0, allowed_token_ids=None)
    if given["max_tokens"] == 0:
        given |= dict(prompt_logprobs=2, min_tokens=0)
    return SamplingParams(**given)


params = st.builds(
    make_params,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    seed=st.integers(0, 2**63 - 1),  # else a draw is anybody's
    max_tokens=st.sampled_from([0, 1, 2, 9, 9, 24]),
    n=st.sampled_from([1, 1, 1, 2, 5]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_tokens=st.sampled_from([0, 0, 1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    stop=st.sampled_from([(), (), ("t",), "xyz"]),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=2),
    logprobs=st.sampled_from([None, None, 1]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
    logits_processors=st.sampled_from([(), (), [upwards]]),
    structured_outputs=st.sampled_from([None, None, None, *FORMS]),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=9),
    allowed_token_ids=st.sampled_from([None, None, None, [*range(90, 140)]]),
)
options = st.fixed_dictionaries(
    dict(
        kvcache_block_size=st.sampled_from([16, 32, 48, 256]),
        num_kvcache_blocks=st.sampled_from([2, 7, 9, 64]),
        max_num_batched_tokens=st.sampled_from([1, 3, 17, 64, 512]),
        max_num_seqs=st.sampled_from([1, 2, 5, 32]),
        max_model_len=st.sampled_from([2, 40, 512, 512]),
        enable_prefix_caching=st.booleans(),
        overlap=st.booleans(),
        kernels=st.sampled_from(["auto", "plain"]),
        scheduling_policy=st.sampled_from(["throughput", "fcfs", "shortest-first"]),
    )
)
wrong_prompts = st.builds(lambda ids, thing: [*ids, thing], st.lists(tokens, max_size=3), things)
wrong = st.tuples(st.one_of(ids, things, wrong_prompts, st.just([7] * 600)), params | things)
calls = st.one_of(
    st.lists(st.tuples(ids, params), min_size=1, max_size=6),
    st.lists(st.tuples(texts, params), min_size=1, max_size=6),
    st.builds(lambda right, wrong: [*right, wrong], st.lists(st.tuples(ids, params)), wrong),
)


@tries(35)
@given(options, st.lists(calls, min_size=1, max_size=4))
def test_any_calls_bring_the_plain_answers_or_a_named_error(folder, plain, options, calls):
    with LLM(folder, device="cpu", **options) as llm:
        for call in calls:
            prompts, params = map(list, zip(*call))
            try:
                outputs = generate(llm, prompts, params)
            except (ValueError, TypeError) as error:
                names = ("prompts", "sampling_params", "n is", "stop needs")
                assert str(error).startswith(names) and ":" in str(error)
            else:
                for prompt, one, output in zip(prompts, params, outputs):
                    longest = max(0, llm.max_model_len - len(as_ids(llm, prompt)))
                    shorter = replace(one, max_tokens=min(one.max_tokens, longest), min_tokens=0)
                    one = one if one.max_tokens <= longest else shorter
                    (expected,) = generate(plain, [prompt], one)
                    assert without_values(output) == without_values(expected)
                    assert values_of(output) == pytest.approx(values_of(expected), abs=1e-3)
            check_empty(llm)


LOGPROBS = ("logprobs", "cumulative_logprob", "prompt_logprobs", "completions")


def without_values(output: dict) -> list[dict]:
    """What an output says beside log-probabilities, which rounding may change: each completion."""
    parts = [output, *output.get("completions", [])]
    return [{key: value for key, value in one.items() if key not in LOGPROBS} for one in parts]


def values_of(output: dict) -> list[float]:
    """The log-probabilities of an output, in order."""
    rows = list(output.get("prompt_logprobs", [None])[1:])
    for one in [output, *output.get("completions", [])]:
        rows += one.get("logprobs", [])
    return [value for row in rows for value in row.values()]


def as_ids(llm: LLM, prompt: str | list[int]) -> list[int]:
    return llm.encode(prompt)[0] if isinstance(prompt, str) else prompt
