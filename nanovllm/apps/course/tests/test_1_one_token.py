import pytest
import torch
import torch.nn.functional as F
from nanovllm.apps.course.solution.one_token import causal_attention, generate, next_token


def random_qkv(num_queries, num_keys):
    torch.manual_seed(0)
    return (
        torch.randn(num_queries, 4, 8),
        torch.randn(num_keys, 2, 8),
        torch.randn(num_keys, 2, 8),
    )


def attention_of_torch(q, k, v):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_attention_equals_that_of_torch():
    q, k, v = random_qkv(7, 7)
    torch.testing.assert_close(causal_attention(q, k, v), attention_of_torch(q, k, v))


def test_queries_belong_to_the_last_tokens():
    q, k, v = random_qkv(7, 7)
    of_all = causal_attention(q, k, v)
    torch.testing.assert_close(causal_attention(q[4:], k, v), of_all[4:])
    torch.testing.assert_close(causal_attention(q[6:], k, v), of_all[6:])


def test_a_token_does_not_see_later_tokens():
    q, k, v = random_qkv(7, 7)
    before = causal_attention(q, k, v)[:5]
    k[5:], v[5:] = 100.0, 100.0
    torch.testing.assert_close(causal_attention(q, k, v)[:5], before)


def test_the_next_token_is_that_of_the_library(model, prompts, library):
    for prompt, expected in zip(prompts, library(prompts, 1)):
        assert [next_token(model, prompt)] == expected


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_outputs_are_those_of_the_library(model, prompts, library, max_tokens):
    for prompt, expected in zip(prompts, library(prompts, max_tokens)):
        assert generate(model, prompt, max_tokens) == expected


def test_the_end_token_ends_the_output(model, prompts, library):
    (expected,) = library(prompts[1:2], 12)
    model.end_token = expected[5]
    assert generate(model, prompts[1], 12) == expected[: expected.index(expected[5]) + 1]
