import torch
from nanovllm.apps.course.solution.kv_cache import KVCache, generate
from nanovllm.apps.course.solution.one_token import causal_attention


def test_attention_in_parts_equals_attention_to_all(model):
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    whole = causal_attention(q, k, v)
    cache = KVCache(model)
    for layer in range(model.num_layers):
        for begin, end in ((0, 5), (5, 6), (6, 9)):
            out = cache.attend(layer, q[begin:end], k[begin:end], v[begin:end])
            torch.testing.assert_close(out, whole[begin:end])


def test_layers_have_keys_and_values_of_their_own(model):
    cache = KVCache(model)
    one, two = torch.full((1, 2, 64), 1.0), torch.full((1, 2, 64), 2.0)
    q = torch.ones(1, 4, 64)
    assert cache.attend(0, q, one, one).allclose(torch.tensor(1.0))
    assert cache.attend(1, q, two, two).allclose(torch.tensor(2.0))


def test_outputs_are_those_of_the_library(model, prompts, library):
    for prompt, expected in zip(prompts, library(prompts, 12)):
        assert generate(model, prompt, 12) == expected


def test_the_model_computes_each_token_once(model, prompts):
    model.end_token = -1
    generate(model, prompts[1], 12)
    assert sum(model.counts) == len(prompts[1]) + 11  # the last token is not needed as an input
    assert len(model.counts) == 12


def test_the_end_token_ends_the_output(model, prompts, library):
    (expected,) = library(prompts[1:2], 12)
    model.end_token = expected[5]
    assert generate(model, prompts[1], 12) == expected[: expected.index(expected[5]) + 1]
