"""Quantised weights on a CPU: the C++ kernels against float64 products of the numbers that the
codes stand for, and against the plain layers.
"""

import ctypes
import subprocess

import pytest
import torch
from model_helpers import load as load_plain
from model_helpers import make_checkpoint
from quantised_helpers import make_pair, on_ranks, rewrite, tensors_of
from test_quantised import DENSE, EXPERTS, FORMATS, PHI, SIZES, build, greedy, load, logits_of
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from nanovllm import LLM
from nanovllm.backends.cpu import cpp_ops, quantised
from nanovllm.backends.cpu.decoder import CppDecoder
from nanovllm.backends.cpu.quantised import CppInt8Weight, CppIntegerWeight, use_cpp_weights
from nanovllm.backends.cpu.transform import use_cpu_layers
from nanovllm.backends.quantised.config import Int8, Integers
from nanovllm.backends.quantised.int8 import Int8Weight, quantise
from nanovllm.backends.quantised.integers import IntegerWeight
from nanovllm.build import check_quantization
from nanovllm.config import Config
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.transformer import Decoder
from nanovllm.weights.loader import init_dummy_weights
from nanovllm.weights.weight_slice import WeightSlice

needs_compiler = pytest.mark.skipif(cpp_ops.find_compiler() is None, reason="needs g++")
TIED = LlamaConfig(
    **{name: size for name, size in SIZES.items() if name != "head_dim"}, tie_word_embeddings=True
)
WINDOW = MistralConfig(**SIZES, sliding_window=9)


def made_of(weight, make):
    """Return the packed weight that `make` builds, made of a plain weight."""
    whole = WeightSlice("w.weight", torch.empty_like(weight), (slice(None),) * 2, weight.shape)
    packed = make(whole.destination, [whole])
    for part in packed.plain_slices(whole):
        part.fill(weight)
    return packed


def int8(outputs, inputs):
    weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    return made_of(weight, lambda plain, parts: Int8Weight(plain, parts, Int8(), ParallelGroup()))


def in_cpp(packed, kind):
    """Return a copy of a packed weight that multiplies by a kernel."""
    copy = kind.__new__(kind)
    copy.__dict__.update(packed.__dict__)
    copy._parameters = dict(packed._parameters)
    copy.take_weights(packed)
    return copy


# Outputs and inputs that fill no block, no vector and no word, and that do.
SHAPES = [(1, 1), (19, 37), (33, 64), (64, 130), (50, 576)]


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_those_of_the_numbers_that_the_codes_stand_for(shape):
    packed, x = int8(*shape), 3 * torch.randn(5, shape[1])
    bias, numbers = torch.randn(shape[0]), []
    for part in x.split(32, dim=-1):
        codes, scales = quantise(part)
        assert ((codes * scales - part).abs() <= 0.501 * scales).all()
        numbers.append(codes.double() * scales.double())
    weights = packed.dequantise(slice(None), 0, None).double()
    want = torch.cat(numbers, dim=-1) @ weights.T + bias.double()
    assert (packed(x, bias) - want).norm() < 1e-6 * want.norm()


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_kernels_compute_what_the_plain_weight_computes(shape):
    """The sums are equal, and so are the floats made of them. No token depends on another."""
    packed = int8(*shape)
    fast = in_cpp(packed, CppInt8Weight)
    for rows in (1, 2, 3, 4, 5, 7, 8, 19):
        x = torch.randn(rows, shape[1]) * 10 ** torch.randn(rows, 1)
        x[rows // 2] = 0
        x[0, 0] = 1e4  # the other codes of its group become 0
        assert torch.equal(fast(x), packed(x))
        assert torch.equal(fast(x), torch.cat([fast(row) for row in x.split(1)]))
        bias = torch.randn(shape[0])
        torch.testing.assert_close(fast(x, bias), packed(x, bias))
        torch.testing.assert_close(fast(x.bfloat16()), packed(x.bfloat16()))


@needs_compiler
@pytest.mark.parametrize("wrong", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_int8_kernels_lose_no_nan_or_infinity_of_an_input(wrong):
    packed, x = int8(19, 70), torch.randn(3, 70)
    x[1, 40] = wrong
    for weight in (packed, in_cpp(packed, CppInt8Weight)):
        assert weight(x).isfinite().all(dim=-1).tolist() == [True, False, True]


@needs_compiler
def test_largest_sums_are_exact():
    """All codes are 127 or -127: pairs of products come nearest to what 16 bits hold."""
    signs = torch.randint(2, (32, 512)) * 2.0 - 1
    packed = made_of(signs, lambda *how: Int8Weight(*how, Int8(), ParallelGroup()))
    x = torch.cat((signs[:3], -signs[:3]))
    torch.testing.assert_close(in_cpp(packed, CppInt8Weight)(x), x @ signs.T)


@needs_compiler
def test_code_for_processors_with_avx512_computes_the_same(tmp_path, monkeypatch):
    """Compiled for processors without AVX2, plain C++ takes the place of AVX-512's instructions."""
    packed, x = int8(50, 136), torch.randn(21, 136)
    scheme = Integers("awq", 4, 64, True)
    grouped = made_of(
        torch.randn(50, 136), lambda *how: IntegerWeight(*how, scheme, ParallelGroup())
    )
    want, of_grouped = in_cpp(packed, CppInt8Weight)(x), in_cpp(grouped, CppIntegerWeight)(x)
    source = quantised.SOURCE
    command = [*cpp_ops.find_compiler(), "-shared", "-fPIC", "-O1", "-w", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "plain.so")], check=True)
    loaded = ctypes.CDLL(str(tmp_path / "plain.so"))
    for name in ("int8_linear", "grouped_linear"):
        getattr(loaded, name).argtypes = getattr(quantised.load(), name).argtypes
    monkeypatch.setattr(quantised, "load", lambda: loaded)
    assert torch.equal(in_cpp(packed, CppInt8Weight)(x), want)
    torch.testing.assert_close(in_cpp(grouped, CppIntegerWeight)(x), of_grouped)


@needs_compiler
@pytest.mark.parametrize("bits, group, has_zeros", [(4, 32, False), (4, 64, True), (8, 0, True)])
@pytest.mark.parametrize("shape", [(1, 64), (19, 136), (70, 576)])
def test_integer_kernels_multiply_by_the_numbers_that_the_codes_stand_for(
    shape, bits, group, has_zeros
):
    """No token depends on another, to the last bit."""
    scheme = Integers("gptq", bits, group, has_zeros)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    packed = made_of(weight, lambda *how: IntegerWeight(*how, scheme, ParallelGroup()))
    fast = in_cpp(packed, CppIntegerWeight)
    numbers = packed.dequantise(slice(None), 0, None).double()
    for rows in (1, 2, 3, 4, 8, 21):
        x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
        want, out = x.double() @ numbers.T + bias.double(), fast(x, bias)
        # The summands may nearly cancel each other, so their sizes are the measure.
        sizes = x.double().abs() @ numbers.abs().T + bias.double().abs()
        assert (out - want).norm() < 4e-7 * sizes.norm()
        assert torch.equal(out, torch.cat([fast(row, bias) for row in x.split(1)]))


@needs_compiler
@pytest.mark.parametrize("name", ["gptq", "awq", "gptq-8-bits", "gptq-desc-act"])
def test_kernels_compute_what_the_plain_layers_of_a_checkpoint_compute(name, tmp_path):
    pack, config, _ = FORMATS[name]
    _, packed = make_pair(tmp_path, EXPERTS if name == "awq" else DENSE, pack, config)
    model = load(packed)
    want = logits_of(model)
    use_cpp_weights(model)
    kinds = {type(module) for module in model.modules()}
    assert (CppIntegerWeight in kinds) == (name != "gptq-desc-act")
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-4)
    assert greedy(packed) == greedy(packed, kernels="plain")


MODELS = {"qwen3": DENSE, "tied": TIED, "phi3": PHI, "experts": EXPERTS}


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_kernels_change_no_logit_of_a_model_in_int8(name, tmp_path):
    make_checkpoint(tmp_path, MODELS[name])
    model = load(tmp_path, wanted="int8")
    want = logits_of(model)
    use_cpp_weights(model)
    assert torch.equal(logits_of(model), want)
    exact = logits_of(load_plain(tmp_path))
    assert (want - exact).norm() < 0.2 * exact.norm()
    assert greedy(tmp_path, quantization="int8") == greedy(
        tmp_path, quantization="int8", kernels="plain"
    )


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3", "tied", "mistral", "gptq"])
def test_one_call_for_all_layers_changes_no_bit(name, tmp_path):
    if name == "gptq":
        _, folder = make_pair(tmp_path, DENSE, *FORMATS[name][:2])
    else:
        folder = tmp_path
        make_checkpoint(folder, (MODELS | {"mistral": WINDOW})[name])
    model = load(folder, wanted=None if name == "gptq" else "int8")
    use_cpu_layers(model)
    assert type(model.model) is CppDecoder
    fast = logits_of(model)
    model.model.__class__ = Decoder
    assert torch.equal(logits_of(model), fast)


@pytest.mark.parametrize("config", [DENSE, TIED], ids=["untied", "tied"])
def test_int8_logits_do_not_depend_on_the_number_of_ranks(config, tmp_path):
    make_checkpoint(tmp_path, config)
    want = logits_of(load(tmp_path, wanted="int8"))

    def of_rank(group):
        model = load(tmp_path, group, "int8")
        if cpp_ops.find_compiler():
            use_cpp_weights(model)
        return logits_of(model)

    # Ranks add their parts in float32, and an input between two codes may become the other.
    torch.testing.assert_close(torch.cat(on_ranks(2, of_rank), dim=1), want, rtol=0, atol=0.1)


def test_ranks_that_would_split_a_group_of_inputs_in_int8_are_refused(tmp_path):
    """With other groups, tokens would depend on the number of ranks."""
    make_checkpoint(tmp_path, Qwen3Config(**SIZES | dict(intermediate_size=96)))
    message = "down_proj.weight has 96 columns, of which each of 2 ranks takes 48, .* groups of 32:"
    for rank in (0, 1):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, ParallelGroup(rank, 2), "int8")


def test_a_head_that_differs_from_the_embedding_is_quantised_itself(tmp_path):
    make_checkpoint(tmp_path, TIED)
    tensors = tensors_of(tmp_path)
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    rewrite(tmp_path, tensors | {"lm_head.weight": head})
    model = load(tmp_path, wanted="int8")
    weight = model.lm_head.packed["weight"]
    numbers = torch.cat([weight.dequantise(rows, 0, None) for _, rows in weight.chunks])
    torch.testing.assert_close(numbers, head, rtol=0, atol=0.03)
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("config", [DENSE, TIED], ids=["untied", "tied"])
def test_dummy_and_new_weights_are_quantised_to_int8(config, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    make_checkpoint(old, config)
    make_checkpoint(new, config, seed=7)
    want = logits_of(load(new, wanted="int8"))
    options = dict(device="cpu", quantization="int8", num_kvcache_blocks=8, max_model_len=64)
    with LLM(str(old), **options) as llm:
        for level in (1, 2):
            llm.update_weights(tensors_of(new).items())
            torch.testing.assert_close(logits_of(llm.engine.runner.model), want)
            llm.sleep(level)
            llm.wake_up()
        torch.testing.assert_close(
            logits_of(llm.engine.runner.model), logits_of(load(old, wanted="int8"))
        )
    model = build(old, wanted="int8")
    init_dummy_weights(model)
    assert logits_of(model).std() > 0


def test_int8_is_refused_on_a_gpu_with_a_remedy():
    config = Config("m", quantization="int8")
    check_quantization(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="'int8', which runs on a CPU .* cuda:0: use 'fp8'"):
        check_quantization(config, torch.device("cuda:0"))
