"""The C++ kernels against their plain PyTorch twins, and what the engine makes of them against
transformers.
"""

import plain_layers as plain
import pytest
import torch
from engine_helpers import PROMPTS, assert_greedy

from nanovllm import LLM
from nanovllm.cpu import cpp_ops

# What these kernels do not do is left to others: windows, caps, heads that turn in part.
ODD = ["mistral-window", "gemma2", "phi3"]
needs_compiler = pytest.mark.skipif(cpp_ops.find_compiler() is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("size", [40, 256])
def test_norms_and_activation_equal_their_twins(rows, size):
    x, weight = 20 * torch.randn(rows, size), torch.rand(size)
    torch.testing.assert_close(cpp_ops.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    x[0, :4] = torch.tensor([-200.0, -87.5, 88.5, 200.0])  # where an exponential leaves float32
    torch.testing.assert_close(
        cpp_ops.silu_and_mul(x), plain.activate_and_mul(x), rtol=1e-5, atol=1e-5
    )


@needs_compiler
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 24), (4, 4, 64), (6, 1, 16)])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_normed_rotated_and_stored_as_by_the_twin(heads, kv_heads, dim, norm):
    tokens, angles = 9, torch.rand(50, dim // 2)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    weights = (torch.rand(dim), torch.rand(dim)) if norm else (None, None)
    slots = torch.tensor([7, -1, 31, 0, 2, 16, 17, 18, -1])
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    args = dim, kv_heads, *weights, 1e-6, table, torch.arange(tokens) * 5, slots
    caches = [torch.zeros(2, 2, 16, kv_heads, dim) for _ in range(2)]
    got = cpp_ops.qk_norm_rope_store(qkv.clone(), *args, *caches[0])
    torch.testing.assert_close(got, plain.qk_norm_rope_store(qkv.clone(), *args, *caches[1]))
    torch.testing.assert_close(*caches)


@needs_compiler
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 24), (4, 4, 64), (6, 1, 16)])
@pytest.mark.parametrize("rows", [1, 12])
def test_decode_attention_equals_its_twin(heads, kv_heads, dim, rows):
    lens = torch.tensor([1, 15, 16, 17, 40, 64, 3, 33, 5, 48, 2, 63], dtype=torch.int32)[-rows:]
    tables = torch.randperm(64)[: rows * 4].view(rows, 4).int()
    caches = torch.randn(2, 64, 16, kv_heads, dim)
    q = torch.randn(rows, heads + 2 * kv_heads, dim)[:, :heads]  # as a view of projected q, k and v
    expected = plain.decode_attention(q.contiguous(), *caches, lens, tables, dim**-0.5)
    torch.testing.assert_close(
        cpp_ops.decode_attention(q, *caches, lens, tables, dim**-0.5), expected
    )


@needs_compiler
@pytest.mark.parametrize("model", ["gqa-2", "gqa-4", "attention-bias", "experts", "llama", *ODD])
def test_greedy_output_with_cpp_kernels_equals_transformers(get_checkpoint, make_llm, model):
    checkpoint = get_checkpoint(model)
    assert_greedy(make_llm(checkpoint.folder, kernels="cpp"), checkpoint)


@needs_compiler
def test_preemption_and_chunks_do_not_change_greedy_output_with_cpp_kernels(checkpoint, make_llm):
    llm = make_llm(kernels="cpp", num_kvcache_blocks=9, max_num_batched_tokens=16, overlap=True)
    assert_greedy(llm, checkpoint, max_tokens=60)
    assert_greedy(llm, checkpoint, PROMPTS[:1])


def test_without_a_compiler_the_option_is_refused(checkpoint, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp_ops.load.cache_clear()
    message = "kernels is 'cpp', but CXX is 'no-such-compiler', which names no program: install g"
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint.folder, device="cpu", kernels="cpp")


@needs_compiler
def test_the_compiler_may_come_with_options_as_in_make(monkeypatch):
    monkeypatch.setenv("CXX", "g++ -O2 -DNAME='a b'")
    assert cpp_ops.find_compiler() == ["g++", "-O2", "-DNAME=a b"]
    cpp_ops.load.cache_clear()
    cpp_ops.load()


def test_a_compiler_whose_name_cannot_be_parsed_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("CXX", "g++ '")
    cpp_ops.load.cache_clear()
    with pytest.raises(ValueError, match="CXX is .*, which names no program: install"):
        cpp_ops.load()


def test_another_attention_backend_is_refused(checkpoint):
    with pytest.raises(ValueError, match="kernels is 'cpp', .* attention_backend is 'triton'"):
        LLM(checkpoint.folder, device="cpu", kernels="cpp", attention_backend="triton")


def test_other_dtypes_are_refused(checkpoint):
    with pytest.raises(ValueError, match="kernels is 'cpp', but dtype is torch.bfloat16"):
        LLM(checkpoint.folder, device="cpu", kernels="cpp", dtype="bfloat16")
