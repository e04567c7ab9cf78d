"""Each kernel against its PyTorch twin: in Triton's interpreter on a CPU, and compiled, in
bfloat16 too, on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import plain_layers as plain
import triton
import triton.language as tl
from effort import spread

from nanovllm.backends.cuda import attention_backends, flash_attention
from nanovllm.backends.cuda.attention_backends import PLAIN_BACKEND, select_attention_backend
from nanovllm.backends.cuda.products import gated_linear, linear, warmup_gated_linear, whole_gated
from nanovllm.backends.cuda.triton import (
    decode_attention,
    decode_gemm,
    elementwise,
    gemv,
    prefill_attention,
    prefill_gemm,
    router,
)
from nanovllm.backends.cuda.triton import moe as triton_moe
from nanovllm.backends.cuda.triton import sampler as triton_sampler
from nanovllm.backends.cuda.triton.dispatch import (
    TensorDescriptor,
    arrivals,
    has_large_shared_memory,
)
from nanovllm.engine.batch_state import BatchState
from nanovllm.layers import sampler
from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.moe import ClampedSwiGLU
from nanovllm.layers.sampler import sample
from nanovllm.sampling_params import INVALID_TOKEN

# The interpreter is numpy, which warns of what a device does silently: infinite noise ratios, NaN
# in padding rows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter computes in numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.float16] + [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
] * HAS_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual, expected):
    """By the norm of the error: single roundings may differ, the result as a whole may not."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert error < TOLERANCE[expected.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (2, 3, 48)])
def test_rms_norm_equals_its_twin(shape, zero_centered, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    args = x, weight, 1e-6, zero_centered
    assert_close(elementwise.rms_norm(*args), plain.rms_norm(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_embed_and_norm_equals_its_twins(zero_centered, dtype):
    table, weight = randn(9, 100, dtype=dtype), randn(100, dtype=dtype)
    token_ids = torch.tensor([8, 0, 3, 3], device=DEVICE)
    normed, rows = elementwise.embed_and_norm(token_ids, table, weight, 1e-6, zero_centered)
    assert torch.equal(rows, table[token_ids])
    assert_close(normed, plain.rms_norm(rows, weight, 1e-6, zero_centered))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("then_norm", [False, True])
def test_norm_add_norm_equals_its_twin(then_norm, zero_centered, dtype):
    x, residual = randn(2, 7, 100, dtype=dtype)
    after, weight = randn(2, 100, dtype=dtype)
    options = dict(after=after, weight=weight if then_norm else None, eps=1e-6)
    options["zero_centered"] = zero_centered
    expected = plain.norm_add_norm(x.clone(), residual.clone(), **options)
    for mine, twins in zip(elementwise.norm_add_norm(x, residual, **options), expected):
        assert_close(mine, twins)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100)])
def test_add_rms_norm_equals_its_twin(shape, dtype):
    x = randn(*shape, dtype=dtype)
    residual = randn(*shape, dtype=dtype)
    options = dict(weight=randn(shape[-1], dtype=dtype), eps=1e-6)
    expected = plain.add_rms_norm(x.clone(), residual.clone(), **options)
    for mine, twins in zip(elementwise.add_rms_norm(x, residual, **options), expected):
        assert_close(mine, twins)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (5, 2200)])
def test_activate_and_mul_equals_its_twin(shape, gelu, dtype):
    x = 3 * randn(*shape, dtype=dtype)
    assert_close(elementwise.activate_and_mul(x, gelu), plain.activate_and_mul(x, gelu))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size", [(4, 1, 64, 16), (7, 2, 80, 32), (16, 8, 128, 256)]
)
def test_qk_norm_rope_store_equals_its_twin(heads, kv_heads, head_dim, block_size, norm, dtype):
    slots = torch.tensor([3, -1, 0, 2 * block_size - 1, block_size, -1, 5], device=DEVICE)
    tokens = len(slots)
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q_weight, k_weight = [randn(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    cos_sin = randn(50, head_dim)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)

    def run(form):
        caches = torch.zeros(2, 2, block_size, kv_heads, head_dim, device=DEVICE, dtype=dtype)
        heads = form.qk_norm_rope_store(
            qkv.clone(),
            head_dim=head_dim,
            num_kv_heads=kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=1e-6,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slots,
            cache=KVCache(*caches),
        )
        return *heads, *caches

    for mine, twins in zip(run(elementwise), run(plain)):
        assert_close(mine, twins)


@pytest.mark.parametrize("norm", ["none", "plain", "zero-centered"])
@pytest.mark.parametrize("turning", [0, 12, 40, 80])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope_store_of_any_kind_equals_its_twin(interleaved, turning, norm):
    slots = torch.tensor([3, -1, 0, 31], device=DEVICE)
    qkv = randn(4, (3 + 2 * 2) * 80)
    q_weight, k_weight = [randn(80) if norm != "none" else None for _ in range(2)]
    cos_sin = randn(50, turning)
    positions = torch.randint(0, 50, (4,), device=DEVICE)

    def run(form):
        caches = torch.zeros(2, 2, 16, 2, 80, device=DEVICE)
        heads = form.qk_norm_rope_store(
            qkv.clone(),
            head_dim=80,
            num_kv_heads=2,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=1e-6,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slots,
            cache=KVCache(*caches),
            zero_centered=norm == "zero-centered",
            interleaved=interleaved,
        )
        return *heads, *caches

    for mine, twins in zip(run(elementwise), run(plain)):
        assert_close(mine, twins)


def test_qk_norm_rope_store_without_a_cache_writes_nothing():
    none = torch.empty(0, device=DEVICE)
    at = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    qkv = randn(2, 3 * 32)
    options = dict(head_dim=32, num_kv_heads=1, q_weight=None, k_weight=None, eps=1e-6)
    options |= dict(cos_sin=randn(1, 32), positions=at, slot_mapping=at)
    options["cache"] = KVCache(none, none)
    expected = plain.qk_norm_rope_store(qkv.clone(), **options)
    for mine, twins in zip(elementwise.qk_norm_rope_store(qkv, **options), expected):
        assert_close(mine, twins)


def moe_inputs(tokens, num_experts, width, expert_width, dtype):
    """x, logits, and by name gate_up and down. The logits are uneven, and the last expert's are the
    lowest.
    """
    logits = randn(tokens, num_experts) + torch.linspace(2, -2, num_experts, device=DEVICE)
    logits[:, -1] = -9.0
    gate_up = randn(num_experts, 2 * expert_width, width)
    down = randn(num_experts, width, expert_width)
    weights = dict(
        gate_up=(gate_up / width**0.5).to(dtype), down=(down / expert_width**0.5).to(dtype)
    )
    return randn(tokens, width, dtype=dtype), logits.to(dtype), weights


@spread(
    {
        "tokens, num_experts, top_k, width, expert_width": [
            (0, 4, 2, 16, 16),
            (1, 8, 2, 32, 16),
            (5, 3, 3, 24, 20),
            (37, 5, 3, 40, 33),
            (70, 16, 1, 17, 7),
            (9, 1, 1, 16, 9),
        ],
        "dtype": DTYPES,
        "renormalize": [True, False],
    }
)
def test_moe_equals_its_twin(tokens, num_experts, top_k, width, expert_width, renormalize, dtype):
    x, logits, options = moe_inputs(tokens, num_experts, width, expert_width, dtype)
    options |= dict(top_k=top_k, renormalize=renormalize)
    assert_close(triton_moe.moe(x, logits, **options), plain.moe(x, logits, **options))


@spread(
    {
        "tokens, num_experts, width, expert_width": [
            (1, 8, 32, 16),
            (5, 3, 24, 20),
            (9, 4, 180, 90),
            (70, 5, 17, 7),
        ],
        "clamped": [ClampedSwiGLU(1.7, 0.5), None],
        "dtype": DTYPES,
    }
)
def test_moe_with_biases_and_clamps_equals_its_twin(
    tokens, num_experts, width, expert_width, clamped, dtype
):
    x, logits, options = moe_inputs(tokens, num_experts, width, expert_width, dtype)
    options["gate_up_bias"] = randn(num_experts, 2 * expert_width, dtype=dtype)
    options["down_bias"] = randn(num_experts, width, dtype=dtype)
    options |= dict(top_k=3, renormalize=True, clamped=clamped)
    assert_close(triton_moe.moe(x, logits, **options), plain.moe(x, logits, **options))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("pairs_an_expert", [limit for limit, *_ in triton_moe.TILES])
def test_every_cut_of_moe_equals_its_twin(pairs_an_expert, dtype):
    """All tokens take one expert of four and one of the others, so that a run has several tiles
    and others none.
    """
    tokens = int(min(pairs_an_expert, 200)) * 4 // 2
    x, logits, options = moe_inputs(tokens, 4, 160, 96, dtype)
    logits[:, 2] = 9.0
    options |= dict(top_k=2, renormalize=True)
    assert_close(triton_moe.moe(x, logits, **options), plain.moe(x, logits, **options))


@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_sorted_pairs_are_whole_runs_in_whole_tiles(tokens, few, monkeypatch):
    """Tiles of more than `few` pairs come first."""
    monkeypatch.setattr(triton_moe, "MAX_CHUNKS", 3)  # for several passes
    logits = moe_inputs(tokens, 9, 8, 8, torch.float32)[1]
    weights, order, runs, max_tiles = triton_moe.sort_by_expert(
        logits, logits, top_k=4, renormalize=False, block_m=16, few=few
    )
    expected, experts = logits.softmax(dim=1).topk(4)
    torch.testing.assert_close(weights.view(-1, 4), expected)
    if tokens == 1:  # its pairs stay in their order
        assert order.tolist() == [0, 1, 2, 3]
        assert runs.tolist()[1:] == [
            [expert, i, i + 1, 0] for i, expert in enumerate(experts[0].tolist())
        ]
        assert runs[0, 0] == max_tiles == 4
        return
    assert torch.equal(order.long(), experts.flatten().argsort(stable=True))
    counts = experts.flatten().bincount(minlength=9).tolist()
    ends = experts.flatten().bincount(minlength=9).cumsum(0).tolist()
    tiles = [
        [e, at, end, 0] for e, end in enumerate(ends) for at in range(end - counts[e], end, 16)
    ]
    tiles.sort(key=lambda tile: tile[2] - tile[1] <= few)
    assert runs[0, 0] == len(tiles) <= max_tiles == len(runs) - 1
    assert runs[1 : 1 + len(tiles)].tolist() == tiles


@spread(
    {
        "tokens, num_experts, width": [(2, 4, 16), (17, 5, 300), (40, 70, 520)],
        "has_bias": [True, False],
        "dtype": DTYPES,
    }
)
def test_moe_adds_up_what_programs_computed_of_the_routers_logits(
    tokens, num_experts, width, has_bias, dtype
):
    x, _, options = moe_inputs(tokens, num_experts, width, 16, dtype)
    weight = (randn(num_experts, width) / width**0.5).to(dtype)
    bias = randn(num_experts, dtype=dtype) if has_bias else None
    partial = router.partial_logits(x, weight, bias)
    logits = torch.zeros(partial.shape, device=DEVICE)
    for part in partial.parts:
        logits += part
    if bias is not None:
        logits += bias
    assert_close(logits.to(dtype), F.linear(x, weight, bias))
    options |= dict(top_k=3, renormalize=True)
    expected = triton_moe.moe(x, logits.to(dtype), **options)
    assert torch.equal(triton_moe.moe(x, partial, **options), expected)


def test_moe_of_what_is_no_number_stays_in_bounds():
    x, logits, weights = moe_inputs(3, 5, 16, 16, torch.float32)
    logits[:] = torch.nan
    assert triton_moe.moe(x, logits, **weights, top_k=2, renormalize=True).isnan().all()


@spread(
    {
        "renormalize": [True, False],
        "num_experts, top_k": [(16, 4), (5, 3)]
        + [pytest.param(128, 8, marks=pytest.mark.gpu)] * HAS_GPU,
        "dtype": DTYPES,
    }
)
def test_a_row_that_is_no_number_changes_no_other_rows_experts(
    num_experts, top_k, renormalize, dtype
):
    """On a GPU, the threads that compare a row's NaN disagree on which is the greatest: see
    _route_kernel.
    """
    x, logits, options = moe_inputs(21, num_experts, 32, 16, dtype)
    options |= dict(top_k=top_k, renormalize=renormalize)
    expected = triton_moe.moe(x, logits, **options)
    nan, partly = [0, *range(3, 12), 20], 15
    x[nan] = logits[nan] = logits[partly, 1::3] = torch.nan
    result = triton_moe.moe(x, logits, **options)
    assert result[[*nan, partly]].isnan().all()
    others = [row for row in range(21) if row not in (*nan, partly)]
    # In the interpreter, NumPy's sums depend on a row's place in its tile on some processors.
    torch.testing.assert_close(result[others], expected[others], rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(HAS_GPU, reason="looks into the interpreter")
@pytest.mark.parametrize("rows", [slice(None), slice(2, 3)])
def test_no_expert_is_picked_by_comparing_nan(rows, monkeypatch):
    """The interpreter picks one expert whatever it compares; the threads of a GPU would not."""
    from triton.runtime.interpreter import ReduceOps

    compared, find = [], ReduceOps.min_max

    def min_max(self, input, *args, **options):
        values = input[0] if isinstance(input, tuple) else input
        compared.append(bool((values.handle.data != values.handle.data).any()))
        return find(self, input, *args, **options)

    monkeypatch.setattr(ReduceOps, "min_max", min_max)
    logits = moe_inputs(9, 16, 8, 8, torch.float32)[1]
    logits[rows, ::2] = torch.nan
    _, order, _, _ = triton_moe.sort_by_expert(
        logits, logits, top_k=4, renormalize=True, block_m=16
    )
    assert sorted(order.tolist()) == list(range(36))
    # Each of two programs finds its rows' best experts, one after the other.
    assert len(compared) >= 2 * 4 and not any(compared)


@pytest.mark.parametrize("width", [3, 1500])
def test_decode_inputs_equals_its_twin(width):
    def make_state():
        torch.manual_seed(1)
        state = BatchState(8, width, 16, torch.device(DEVICE))
        state.context_lens[:8] = torch.randint(0, 47, (8,))
        state.block_tables[:] = torch.randint(0, 99, (9, width))
        state.last_tokens[:] = torch.randint(-1, 99, (9,))
        return state

    rows = torch.tensor([2, 8, 0, 5, 8], device=DEVICE)  # 8 is the padding slot
    mine, twin = make_state(), make_state()
    for a, b in zip(elementwise.decode_inputs(rows, mine), twin.advance(rows)):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for name in ("last_tokens", "context_lens", "block_tables"):
        assert torch.equal(getattr(mine, name), getattr(twin, name))


@pytest.mark.parametrize("length", [1, 256, 700])
def test_a_kernel_copies_tokens(length):
    tokens = torch.arange(length, device=DEVICE)
    out = torch.full((701,), -1, device=DEVICE)
    elementwise.copy(tokens, out[:length])
    assert out.tolist() == [*range(length), *[-1] * (701 - length)]


@triton.jit
def _copy_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count), mask=at < count)


@pytest.mark.skipif(HAS_GPU, reason="the interpreter checks it")
def test_a_kernel_that_leaves_the_memory_of_a_tensor_raises():
    short, long = torch.arange(6.0), torch.zeros(8)
    _copy_kernel[(2,)](short, long[:6], 6, 4)
    assert long.tolist() == [*range(6), 0, 0]
    with pytest.raises(Exception, match="reads 4 bytes at byte 24 of 24"):
        _copy_kernel[(2,)](short, long, 7, 4)
    with pytest.raises(Exception, match="writes 4 bytes at byte 24 of 24"):
        _copy_kernel[(2,)](long, short, 7, 4)


def test_philox_gives_its_known_answer():
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in sampler.philox(zero, zero, zero)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


def test_uniform_noise_never_reaches_its_bounds():
    """At 1 the Gumbel noise would be infinite, and its token would be drawn whatever its logit."""
    uniform = sampler.open_unit_interval(torch.tensor([0, 2**32 - 1]))
    assert uniform[0] > 0 and uniform[1] < 1


@spread({"vocab, vocab_start": [(9000, 0), (1500, 777), (100, 1000)], "dtype": DTYPES})
def test_sample_draws_the_tokens_of_its_twin(vocab, vocab_start, dtype):
    logits = randn(6, vocab, dtype=dtype)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 0.01, 3.0, 0.0], device=DEVICE)
    seeds = torch.tensor([0, 1, -5, 2**40 + 3, 2**63 - 1, 9], device=DEVICE)
    positions = torch.tensor([0, 2, 3, 2**33, 77, 9], device=DEVICE)
    options = dict(temperatures=temperatures, seeds=seeds, positions=positions)
    tokens, values = triton_sampler.sample(logits, **options, vocab_start=vocab_start)
    expected_tokens, expected_values = sample(logits, **options, vocab_start=vocab_start)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(values, expected_values)


def test_sample_reads_and_writes_the_state_of_slots():
    logits = randn(3, 1500)
    temperatures, seeds = torch.rand(6, device=DEVICE), torch.arange(6, device=DEVICE) + 3
    temperatures[4] = 0
    slots = torch.tensor([5, 0, 4], device=DEVICE)
    positions = torch.tensor([9, 2, 7], dtype=torch.int32, device=DEVICE)
    last_tokens = torch.full((6,), -7, device=DEVICE)
    tokens, values = triton_sampler.sample(
        logits,
        temperatures=temperatures,
        seeds=seeds,
        positions=positions,
        slots=slots,
        last_tokens=last_tokens,
    )
    expected_tokens, expected_values = sample(
        logits, temperatures=temperatures[slots], seeds=seeds[slots], positions=positions.long()
    )
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(values, expected_values)
    assert last_tokens.tolist() == [tokens[1], -7, -7, -7, tokens[2], tokens[0]]


@pytest.mark.parametrize("rows", [3, 17])
def test_sample_passes_over_rows_of_a_temperature_below_0(rows):
    logits = randn(rows, 1500)
    temperatures = torch.full((rows,), 0.8, device=DEVICE)
    at = torch.arange(rows, device=DEVICE)
    options = dict(temperatures=temperatures, seeds=at, positions=at)
    whole, _ = triton_sampler.sample(logits, **options)
    temperatures[1] = -1
    logits[1] = torch.nan
    tokens, values = triton_sampler.sample(logits, **options)
    assert tokens[1] == 0 and values[1] == 0 and whole[1] != 0
    assert tokens[0] == whole[0] and tokens[2:].tolist() == whole[2:].tolist()


def test_sample_gives_a_tie_to_the_lowest_token():
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [300, 299, 1030, 8888]] = 1.0
    zero, greedy = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, device=DEVICE)
    tokens, _ = triton_sampler.sample(logits, temperatures=greedy, seeds=zero, positions=zero)
    assert tokens.item() == 299


@spread({"temperature": [0.0, 1e-6, 0.5, 1.0], "vocab_start": [777, 0]})
@pytest.mark.parametrize(
    "sampler_under_test", [triton_sampler.sample, sample], ids=["triton", "plain"]
)
def test_a_row_with_logits_that_are_no_numbers_samples_no_token(
    sampler_under_test, temperature, vocab_start
):
    logits = randn(9, 2100)
    logits[0] = torch.nan
    logits[1, 1999] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, 2099], logits[3, 2098] = torch.inf, -torch.inf
    logits[4] = -torch.inf
    logits[5, 64:80] = torch.nan  # a whole cell
    logits[6, :2000] = -torch.inf  # tokens that must not be sampled are no fault
    at = torch.arange(9, device=DEVICE)
    temperatures = torch.full((9,), temperature, device=DEVICE)
    options = dict(temperatures=temperatures, seeds=at, positions=at)
    tokens, values = sampler_under_test(logits, **options, vocab_start=vocab_start)
    assert tokens[:6].tolist() == [INVALID_TOKEN] * 6
    assert values[:6].tolist() == [torch.inf] * 4 + [-torch.inf, torch.inf]
    assert (
        (tokens[6:] >= vocab_start).all()
        and tokens[6] >= vocab_start + 2000
        and values[6:].isfinite().all()
    )


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30], ids=str)
@pytest.mark.parametrize(
    "sampler_under_test", [triton_sampler.sample, sample], ids=["triton", "plain"]
)
def test_a_row_that_the_lowest_number_bars_samples_no_token_unless_it_is_greedy(
    sampler_under_test, lowest
):
    logits = torch.full((6, 100), lowest, device=DEVICE)
    logits[5, 70] = 0.0
    at = torch.arange(6, device=DEVICE)
    temperatures = torch.tensor([1e-6, 0.5, 1.0, 1.25, 0.0, 1.0], device=DEVICE)
    tokens, values = sampler_under_test(logits, temperatures=temperatures, seeds=at, positions=at)
    assert tokens.tolist() == [INVALID_TOKEN] * 4 + [0, 70]
    assert values[:5].tolist() == [-torch.inf] * 4 + [logits[4, 0].item()]


def test_sample_of_shards_equals_sample_of_the_whole():
    logits = randn(4, 4992)  # four shards that meet between cells
    temperatures = torch.tensor([0.0, 0.7, 1.0, 2.0], device=DEVICE)
    seeds, positions = torch.arange(4, device=DEVICE), torch.arange(4, device=DEVICE) + 10
    options = dict(temperatures=temperatures, seeds=seeds, positions=positions)
    whole, _ = triton_sampler.sample(logits, **options)
    shards = [
        triton_sampler.sample(logits[:, begin : begin + 1248], **options, vocab_start=begin)
        for begin in range(0, 4992, 1248)
    ]
    tokens, values = (torch.stack(x) for x in zip(*shards))
    assert torch.equal(tokens.gather(0, values.argmax(dim=0, keepdim=True))[0], whole)


@pytest.mark.parametrize("order", ["within a cell", "over cells"])
def test_sample_follows_the_softmax(order):
    """Pearson's chi-squared over 10 tokens: 27.9 is passed once in a thousand, and the seeds are
    fixed.
    """
    draws, temperature = 5000, 0.7
    logits = torch.linspace(-1, 1, 10, device=DEVICE)
    # The others are impossible.
    at = torch.arange(10, device=DEVICE) * (1 if order == "within a cell" else 7)
    logits = torch.full((70,), float("-inf"), device=DEVICE).index_copy_(0, at, logits)
    tokens, _ = sample(
        logits.expand(draws, -1).contiguous(),
        temperatures=torch.full((draws,), temperature, device=DEVICE),
        seeds=torch.arange(draws, device=DEVICE),
        positions=torch.full((draws,), 3, device=DEVICE),
    )
    expected = torch.softmax(logits / temperature, dim=0) * draws
    counts = tokens.bincount(minlength=70)
    assert counts[at].sum() == draws
    assert ((counts[at] - expected[at]) ** 2 / expected[at]).sum() < 27.9


@spread(
    {
        "rows, inputs, outputs": [
            (1, 96, 70),
            (1, 1024, 33),
            (3, 300, 50),
            (4, 256, 64),
            (5, 64, 5),
        ],
        "dtype": DTYPES,
        "bias": [True, False],
    }
)
def test_linear_equals_its_twin(rows, inputs, outputs, bias, dtype):
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    b = randn(outputs, dtype=dtype) if bias else None
    expected = F.linear(x.float(), weight.float(), b.float() if bias else None).to(dtype)
    assert_close(linear(x, weight, b), expected)


@spread(
    {
        "rows, inputs, outputs": [(1, 96, 70), (2, 1152, 33), (4, 256, 1)],
        "dtype": DTYPES,
        "gelu": [False, True],
    }
)
def test_the_gated_product_of_few_rows_equals_its_twin(rows, inputs, outputs, gelu, dtype):
    x, weight = randn(rows, inputs, dtype=dtype), randn(2 * outputs, inputs, dtype=dtype)
    weight /= inputs**0.5  # where the activation bends
    expected = plain.activate_and_mul(F.linear(x.float(), weight.float()).to(dtype), gelu)
    assert_close(gemv.gated_linear(x, weight, gelu), expected)


needs_tiles = pytest.mark.skipif(
    TensorDescriptor is None or HAS_GPU and not has_large_shared_memory(torch.device("cuda", 0)),
    reason="needs Hopper's tensor memory accelerator, or the interpreter, and a release of Triton "
    "that knows it",
)
LOW_DTYPES = [torch.float16] + [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)] * HAS_GPU


@needs_tiles
@spread(
    {
        "rows, tiling": [
            (33, (64, 32, 128, 4, 6)),
            (64, (64, 64, 128, 1, 4)),
            (70, (64, 32, 128, 2, 3)),
            (130, (64, 128, 128, 1, 4)),
            # Turned; in four steps that three programs share; fetched at once, alone and shared.
            (2, (16, 64, 128, 1, 5, 4, True)),
            (16, (16, 64, 128, 3, 5, 4, True)),
            (20, (32, 64, 64, 8, 4, 4, True)),
            (5, (16, 64, 512, 1, 1, 4, True)),
            (32, (32, 64, 128, 4, 1, 4, True)),
        ],
        "bias": [False, True],
        "dtype": LOW_DTYPES,
    }
)
def test_decode_gemm_equals_its_twin_however_it_is_cut(rows, tiling, bias, dtype):
    outputs = 100 if tiling[-1] is True else 128  # turned tiles may be cut off
    x, weight = randn(rows, 512, dtype=dtype), randn(outputs, 512, dtype=dtype)
    b = randn(outputs, dtype=dtype) if bias else None
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None).to(dtype)
    for _ in range(2):  # programs that share a tile count themselves: each launch must find zeros
        assert_close(decode_gemm.multiply(x, weight, b, decode_gemm.Tiling(*tiling)), expected)


@needs_tiles
@spread(
    {
        "rows, tiling": [
            (33, (64, 32, 128, 1, 4)),
            (64, (64, 64, 128, 1, 4)),
            (100, (64, 32, 128, 1, 4)),
            # Turned: gates and ups as two operands, and as one.
            (5, (16, 64, 64, 1, 4, 4, True)),
            (30, (32, 32, 64, 1, 4, 4, True)),
        ],
        "gelu": [False, True],
        "dtype": LOW_DTYPES,
    }
)
def test_gated_decode_gemm_equals_its_twin(rows, tiling, gelu, dtype):
    x, weight = randn(rows, 256, dtype=dtype), randn(2 * 192, 256, dtype=dtype)
    weight /= 16  # where the activation bends
    product = F.linear(x.double(), weight.double()).to(dtype)
    result = decode_gemm.multiply(
        x, weight, None, decode_gemm.Tiling(*tiling), gated=True, gelu=gelu
    )
    assert_close(result, plain.activate_and_mul(product, gelu))


@needs_tiles
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(
    "tiling",
    [(16, 64, 512, 2, 1, 4, True), (16, 64, 128, 1, 5, 4, True), (16, 64, 128, 3, 5, 4, True)],
)
def test_a_turned_tile_may_reach_beyond_the_last_input(tiling, dtype):
    """As those of gpt-oss do, which has 2,880 inputs."""
    x, weight = randn(5, 704, dtype=dtype), randn(100, 704, dtype=dtype)
    expected = F.linear(x.double(), weight.double()).to(dtype)
    for _ in range(2):
        product = decode_gemm.multiply(x, weight, None, decode_gemm.Tiling(*tiling))
        assert_close(product, expected)


@needs_tiles
def test_turned_tiles_run_at_the_same_time_and_cover_all_inputs():
    shapes = [(1024, 2048), (1024, 3072), (4096, 1024), (2048, 6144), (6144, 2560), (2560, 9728)]
    shapes += [(4096, 12288), (24576, 4096), (100, 128), (1, 1152), (5120, 2880)]
    for outputs, inputs in shapes:
        for rows in range(1, decode_gemm.TURNED_ROWS + 1):
            for gated in (False, True):
                t = decode_gemm.turned_tiling(rows, outputs, inputs, gated, 132)
                if t is None:
                    continue
                programs = -(-outputs // t.block_n) * t.splits
                assert programs <= decode_gemm.PROGRAMS * 132
                steps = -(-inputs // t.block_k)
                assert -(-steps // -(-steps // t.splits)) == t.splits  # each has a step
                tensors = 2 if gated else 1
                tile = (t.block_m + tensors * t.block_n) * t.block_k * 2
                # CUDA takes 1 KB of each program, and Triton a few bytes.
                of_program = tile * t.stages + 1024 + 256
                assert of_program * -(-programs // 132) <= 228 << 10 and t.stages >= 1
                assert t.block_m >= rows and tensors * t.block_n >= 64


@needs_tiles
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(
    # One tile in part; two columns in part of two bands; of one band and the next one's part.
    "rows, outputs, inputs",
    [(1, 8, 64), (130, 200, 192), (1157, 136, 64)],
)
def test_the_gated_product_of_many_rows_equals_its_twin(rows, outputs, inputs, gelu, dtype):
    x, weight = randn(rows, inputs, dtype=dtype), randn(2 * outputs, inputs, dtype=dtype)
    weight /= inputs**0.5  # where the activation bends
    expected = plain.activate_and_mul(F.linear(x.float(), weight.float()).to(dtype), gelu)
    assert_close(prefill_gemm.gated_linear(x, weight, gelu), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@needs_tiles
@pytest.mark.parametrize("rows", [300, 5000, 16_384])
@pytest.mark.parametrize("outputs, inputs, gelu", [(3072, 1024, False), (2376, 1152, True)])
def test_the_gated_product_of_a_prefill_equals_its_twin(rows, outputs, inputs, gelu):
    x = randn(rows, inputs, dtype=torch.bfloat16)
    weight = randn(2 * outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    expected = plain.activate_and_mul(F.linear(x.float(), weight.float()).bfloat16(), gelu)
    assert_close(prefill_gemm.gated_linear(x, weight, gelu), expected)


MANY = 257  # rows, one more than a decode step's kernels take


@pytest.fixture
def launched(monkeypatch):
    """The kernels that run, with the activation and options, as on a Hopper device that is busy
    with 3 tiles.
    """
    monkeypatch.setattr(prefill_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(prefill_gemm, "num_processors", lambda device: 1)
    monkeypatch.setattr(prefill_gemm, "MIN_TILES", 3)
    kernels = []

    def spied(launch):
        def spy(kernel, grid, *args, **options):
            kernels.append((kernel.__name__, args[-1], *options.items()))
            options = {name: name != "PDL" and value for name, value in options.items()}
            launch(kernel, grid, *args, **options)  # the interpreter overlaps nothing

        return spy

    for module in (prefill_gemm, elementwise):
        monkeypatch.setattr(module, "launch", spied(module.launch))
    monkeypatch.setattr(elementwise, "overlap", lambda x: {"PDL": x.shape[0] <= 256})
    return kernels


def gated_inputs(rows=MANY, outputs=128, inputs=64, dtype=torch.float16):
    return randn(rows, inputs, dtype=dtype), randn(2 * outputs, inputs, dtype=dtype)


PREFILL, ACTIVATION = "_gated_linear_kernel", "_activate_and_mul_kernel"
on_cpu = pytest.mark.skipif(HAS_GPU, reason="the device is not asked what it is")


@on_cpu
@needs_tiles
@pytest.mark.parametrize("gelu", [False, True])
def test_many_rows_are_multiplied_and_activated_by_one_kernel(launched, gelu):
    x, weight = gated_inputs()
    expected = plain.activate_and_mul(F.linear(x.float(), weight.float()).half(), gelu)
    assert_close(gated_linear(x, weight, None, gelu), expected)
    assert [name for name, *_ in launched] == [PREFILL]


@on_cpu
def test_few_rows_are_multiplied_and_activated_by_one_kernel(launched):
    x, weight = gated_inputs(rows=1)
    expected = plain.activate_and_mul(F.linear(x.float(), weight.float()).half())
    assert_close(gated_linear(x, weight), expected)
    assert not launched  # neither the activation nor what many rows take


@pytest.mark.skipif(whole_gated is None, reason="needs Gluon")
def test_gates_in_float32_are_not_fetched_at_once(monkeypatch):
    monkeypatch.setattr(whole_gated, "is_hopper", lambda device: True)
    x, weight = torch.zeros(4, 256), torch.zeros(512, 256)
    assert not whole_gated.takes(x, weight)  # tiles of float32 are none of tensor cores
    assert whole_gated.takes(x.bfloat16(), weight.bfloat16())


@pytest.mark.skipif(whole_gated is None, reason="needs Gluon")
def test_no_rows_are_not_fetched_at_once(monkeypatch):
    monkeypatch.setattr(whole_gated, "is_hopper", lambda device: True)
    x, weight = torch.zeros(0, 256).bfloat16(), torch.zeros(512, 256).bfloat16()
    assert not whole_gated.takes(x, weight)  # the accelerator cannot describe an empty tensor
    assert gated_linear(x, weight).shape == (0, 256)


@on_cpu
@needs_tiles
@pytest.mark.parametrize(
    "outputs, inputs, dtype, is_skinny",
    [
        (4096, 1024, torch.bfloat16, False),
        (4096, 1024, torch.float32, True),
        (960, 544, torch.bfloat16, True),  # the inputs are no multiple of 64
    ],
)
def test_few_rows_that_turned_tiles_leave_are_multiplied_as_on_other_devices(
    outputs, inputs, dtype, is_skinny, monkeypatch
):
    for module in (gemv, decode_gemm):  # a Hopper device
        monkeypatch.setattr(module, "is_hopper", lambda device: True, raising=False)
    monkeypatch.setattr(decode_gemm, "can_overlap", lambda device: True)
    monkeypatch.setattr(decode_gemm, "has_large_shared_memory", lambda device: True)
    monkeypatch.setattr(decode_gemm, "num_processors", lambda device: 132)
    weight = torch.empty(outputs, inputs, dtype=dtype)
    for rows in (2, 3, 4):
        x = torch.empty(rows, inputs, dtype=dtype)
        assert gemv.is_skinny(x, weight) == is_skinny


@on_cpu
@needs_tiles
@pytest.mark.parametrize("rows, gated", [(5, False), (5, True), (16, True), (32, False)])
def test_the_rows_of_a_small_decode_step_are_multiplied_by_turned_tiles(rows, gated, monkeypatch):
    monkeypatch.setattr(decode_gemm, "is_able", lambda x, weight: True)
    monkeypatch.setattr(decode_gemm, "is_hopper", lambda device: True)
    tilings = []

    def spy(x, weight, bias, tiling, **options):
        tilings.append(tiling)
        return multiply(x, weight, bias, tiling, **options)

    multiply = decode_gemm.multiply
    monkeypatch.setattr(decode_gemm, "multiply", spy)
    x, weight = gated_inputs(rows, inputs=256)
    weight /= 16
    expected = F.linear(x.double(), weight.double()).half()
    if gated:
        assert_close(gated_linear(x, weight), plain.activate_and_mul(expected))
    else:
        assert_close(linear(x, weight), expected)
    assert [tiling.turned for tiling in tilings] == [True]


@on_cpu
@needs_tiles
@pytest.mark.parametrize(
    "case",
    ["rows", "tiles", "bias", "float32", "inputs", "outputs", "strides", "device", "release"],
)
def test_what_the_kernel_of_many_rows_does_not_know_is_done_by_two(case, launched, monkeypatch):
    other = {
        "rows": dict(rows=256, outputs=256),
        "float32": dict(dtype=torch.float32),
        "inputs": dict(inputs=96),
        "outputs": dict(outputs=132),
    }
    x, weight = gated_inputs(**other.get(case, {}))
    if case == "strides":
        x = x.T.contiguous().T
    if case == "tiles":
        monkeypatch.setattr(prefill_gemm, "MIN_TILES", 4)
    if case == "device":
        monkeypatch.setattr(prefill_gemm, "is_hopper", lambda device: False)
    if case == "release":
        monkeypatch.setattr(prefill_gemm, "TensorDescriptor", None)
    bias = randn(len(weight), dtype=x.dtype) if case == "bias" else None
    expected = plain.activate_and_mul(F.linear(x, weight, bias))
    assert_close(gated_linear(x, weight, bias), expected)
    assert [name for name, *_ in launched] == [ACTIVATION]


@on_cpu
@needs_tiles
@pytest.mark.parametrize("bias, gelu", [(False, False), (False, True), (True, False)])
def test_warmup_launches_what_prompts_need(bias, gelu, launched, monkeypatch):
    x, weight = gated_inputs()
    b = randn(len(weight), dtype=weight.dtype) if bias else None
    warmup_gated_linear(weight, b, gelu)
    warmed_up = set(launched)
    launched.clear()
    for min_tiles in (1, 100):
        monkeypatch.setattr(prefill_gemm, "MIN_TILES", min_tiles)
        gated_linear(x, weight, b, gelu)
    assert len(launched) == 2 and set(launched) <= warmed_up


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_every_tiling_of_a_decode_step_fits_the_device():
    for rows in (2, 5, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256):
        for outputs, inputs in (
            (4096, 1024),
            (1024, 2048),
            (1024, 3072),
            (6144, 1024),
            (6144, 4096),
            (4096, 12288),
        ):
            x = randn(rows, inputs, dtype=torch.bfloat16)
            weight = randn(outputs, inputs, dtype=torch.bfloat16)
            expected = F.linear(x, weight)
            assert_close(linear(x, weight), expected)
            assert_close(gated_linear(x, weight), plain.activate_and_mul(expected))


# (query heads, KV heads, head size, block size)
ATTENTION_SHAPES = [
    (4, 4, 32, 16),
    (4, 2, 64, 32),
    (4, 2, 80, 256),
    (8, 1, 128, 256),
    (2, 1, 256, 16),
]
SCALED = AttentionOptions(0.1)


def some_sinks(heads, dtype=torch.float32):
    """From ones that take nearly nothing to ones that take nearly all."""
    return torch.linspace(-4, 8, heads, device=DEVICE).to(dtype) if heads else None


def paged_cache(batch, longest, kv_heads, head_dim, block_size, dtype):
    """A KVCache, and tables of `batch` sequences: block 0 belongs to none of them."""
    width = -(-longest // block_size) + 1
    shape = 1 + batch * width, block_size, kv_heads, head_dim
    cache = KVCache(randn(*shape, dtype=dtype), randn(*shape, dtype=dtype))
    tables = 1 + torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    return cache, tables


def poison_unused(cache, lens, tables, given_back=()):
    """What no sequence has written, or has given back, may hold anything."""
    block_size = cache.k.shape[1]
    used = torch.zeros(cache.k.shape[:2], dtype=torch.bool, device=DEVICE)
    for length, table in zip(lens.tolist(), tables.tolist()):
        for token in range(length):
            used[table[token // block_size], token % block_size] = True
    for table, tokens in zip(tables.tolist(), given_back):
        for token in tokens:
            used[table[token // block_size], token % block_size] = False
    return KVCache(*[torch.where(used[..., None, None], x, torch.nan) for x in (cache.k, cache.v)])


@spread({"heads, kv_heads, head_dim, block_size": ATTENTION_SHAPES, "dtype": DTYPES})
def test_decode_attention_equals_its_twin(heads, kv_heads, head_dim, block_size, dtype):
    lens = torch.tensor([1, 17, 260, 64], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(4, 300, kv_heads, head_dim, block_size, dtype)
    q = randn(4, heads + 2, head_dim, dtype=dtype)[:, :heads]  # a view, as the layer passes it
    expected = plain.decode_attention(q, PagedKV(cache, tables, lens), SCALED)
    kv = PagedKV(poison_unused(cache, lens, tables), tables, lens)
    assert_close(decode_attention.decode_attention(q, kv, SCALED), expected)


def behind(lens, window, block_size=1):
    """Tokens that windows of sequences have left behind, in whole blocks."""
    return [range(max(0, x - window) // block_size * block_size) for x in lens.tolist()]


@spread(
    {
        "window, softcap, sinks": [
            (1, None, 0),
            (40, None, 0),
            (100, 1.5, 0),
            (None, 0.7, 0),
            (None, None, 6),
            (40, 1.5, 6),
        ],
        "head_dim, block_size": [(32, 16), (80, 256)],
        "splits": [4, 1],
    }
)
def test_decode_attention_in_windows_under_caps_and_with_sinks_equals_its_twin(
    head_dim, block_size, window, softcap, sinks, splits, monkeypatch
):
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    lens = torch.tensor([1, 41, 260, 64, 128], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(5, 300, 2, head_dim, block_size, torch.float32)
    q = randn(5, 6, head_dim)
    options = AttentionOptions(0.3, window, softcap, some_sinks(sinks))
    expected = plain.decode_attention(q, PagedKV(cache, tables, lens), options)
    poisoned = poison_unused(cache, lens, tables, behind(lens, window or 1000))
    kv = PagedKV(poisoned, tables, lens)
    shared = torch.tensor([block_size], dtype=torch.int32, device=DEVICE)
    for prefix in (None, shared)[: 1 if window is None else 2]:  # which a window does not see
        mine = decode_attention.decode_attention(q, kv, options, shared_prefix_len=prefix)
        assert_close(mine, expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("softcap, sinks", [(0.8, 0), (None, 4)])
def test_decode_attention_that_shares_a_prefix_caps_scores_there_and_counts_sinks_once(
    softcap, sinks, splits, monkeypatch
):
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    lens = torch.tensor([40, 33, 64], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(3, 64, 2, 32, 16, torch.float32)
    tables[:, :2] = tables[0, :2]
    q, shared = randn(3, 4, 32), torch.tensor([32], dtype=torch.int32, device=DEVICE)
    options = AttentionOptions(0.5, None, softcap, some_sinks(sinks))
    kv = PagedKV(cache, tables, lens)
    expected = plain.decode_attention(q, kv, options)
    mine = decode_attention.decode_attention(q, kv, options, shared_prefix_len=shared)
    assert_close(mine, expected)


@spread(
    {
        "heads, kv_heads, head_dim, block_size": ATTENTION_SHAPES,
        "prefix_blocks": [3, 1, 0],
    }
)
def test_decode_attention_that_shares_a_prefix_equals_its_twin(
    heads, kv_heads, head_dim, block_size, prefix_blocks
):
    prefix = prefix_blocks * block_size
    lens = prefix + torch.tensor(
        [1, 17, 3 * block_size, 9, 40 % block_size + 1], dtype=torch.int32, device=DEVICE
    )
    cache, tables = paged_cache(
        5, prefix + 3 * block_size, kv_heads, head_dim, block_size, torch.float32
    )
    tables[:, :prefix_blocks] = tables[0, :prefix_blocks]
    lens[4] = 1  # a padding row may be shorter than the prefix: it must not disturb the others
    q = randn(5, heads, head_dim)
    kv = PagedKV(cache, tables, lens)
    expected = plain.decode_attention(q, kv, SCALED)
    shared = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
    mine = decode_attention.decode_attention(q, kv, SCALED, shared_prefix_len=shared)
    assert_close(mine[:4], expected[:4])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [32, 256])  # of several programs a sequence, and of one
def test_the_parts_of_a_shared_prefix_are_written_before_they_are_merged(batch):
    lens = torch.randint(513, 700, (batch,), dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(batch, 700, 8, 128, 256, torch.bfloat16)
    tables[:, :2] = tables[0, :2]
    q, shared = randn(batch, 32, 128, dtype=torch.bfloat16), torch.tensor([512]).int().to(DEVICE)
    kv = PagedKV(cache, tables, lens)
    expected = decode_attention.decode_attention(q, kv, SCALED)
    torch.cuda.empty_cache()
    for _ in range(50):
        # The memory that the parts get next: a part that is read too early is NaN.
        poison = torch.full((2**26,), torch.nan, device=DEVICE)
        del poison
        mine = decode_attention.decode_attention(q, kv, SCALED, shared_prefix_len=shared)
        assert_close(mine, expected)


@pytest.mark.parametrize("block_size", [16, 256])
def test_decode_attention_of_any_tile_and_any_number_of_splits_equals_its_twin(
    block_size, monkeypatch
):
    lens = torch.tensor([300, 5, 129], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(3, 300, 2, 32, block_size, torch.float32)
    q = randn(3, 4, 32)
    expected = plain.decode_attention(q, PagedKV(cache, tables, lens), SCALED)
    kv = PagedKV(poison_unused(cache, lens, tables), tables, lens)
    for large_tiles in (False, True):
        monkeypatch.setattr(
            decode_attention, "has_large_shared_memory", lambda device, large=large_tiles: large
        )
        for splits in (1, 4, 32):
            monkeypatch.setattr(decode_attention, "num_splits", lambda *_, splits=splits: splits)
            assert_close(decode_attention.decode_attention(q, kv, SCALED), expected)


def test_decode_attention_that_is_repeated_gives_the_same_bits():
    """Programs that share a row count themselves: each launch must find zeros, whoever came last
    in the one before.
    """
    lens = torch.tensor([300, 5, 64], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(3, 300, 2, 32, 16, torch.float32)
    q = randn(3, 4, 32)
    kv = PagedKV(cache, tables, lens)
    first = decode_attention.decode_attention(q, kv, SCALED)
    for _ in range(20 if HAS_GPU else 2):
        assert torch.equal(decode_attention.decode_attention(q, kv, SCALED), first)
    assert not arrivals(q.device).any()


def test_rows_that_programs_share_have_a_counter_each():
    counters = len(arrivals(torch.device(DEVICE)))
    for rows in range(1, 4 * counters):
        assert (
            rows <= counters or decode_attention.num_splits(rows, 1000, torch.device(DEVICE)) == 1
        )


def test_decode_attention_of_padding_rows_is_harmless():
    """A padding row has length 1 and a table of zeros, and its block may hold anything."""
    lens = torch.tensor([20, 1, 1], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(3, 30, 2, 32, 16, torch.float32)
    tables[1:] = 0
    cache.k[0] = cache.v[0] = float("nan")
    q = randn(3, 4, 32)
    mine = decode_attention.decode_attention(q, PagedKV(cache, tables, lens), SCALED)
    first = PagedKV(cache, tables[:1], lens[:1])
    assert_close(mine[:1], plain.decode_attention(q[:1], first, SCALED))


@spread(
    {
        "heads, kv_heads, head_dim, turning, norm, interleaved": [
            (8, 4, 128, 128, "plain", False),
            (8, 2, 256, 64, "zero-centered", False),
            (14, 1, 64, 64, "plain", False),
            (4, 4, 32, 0, "plain", False),
            (7, 1, 80, 40, "none", True),
            (4, 2, 96, 72, "none", False),
        ],
        "window, softcap, has_sinks, splits, block_size": [
            (None, None, False, 8, 32),
            (100, 1.5, True, 1, 256),
            (40, None, True, 8, 256),
            (None, None, True, 4, 16),
            (None, None, False, 8, 16),
        ],
        "dtype": DTYPES,
    }
)
def test_one_kernel_norms_rotates_stores_and_attends_as_two_do(
    heads,
    kv_heads,
    head_dim,
    turning,
    norm,
    interleaved,
    window,
    softcap,
    has_sinks,
    splits,
    block_size,
    dtype,
    monkeypatch,
):
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    # Else so many rows hold no tile early.
    monkeypatch.setattr(decode_attention, "EARLY_ROWS", 7 if splits != 4 else 2)
    sinks = some_sinks(heads, dtype) if has_sinks else None
    options = AttentionOptions(0.3, window, softcap, sinks)
    lens = torch.tensor([1, 0, 63, 64, 65, 260, 130], dtype=torch.int32, device=DEVICE)
    cache, tables = paged_cache(7, 300, kv_heads, head_dim, block_size, dtype)
    positions = (lens - 1).clamp(min=0).long()
    blocks = tables.gather(1, positions[:, None] // block_size)[:, 0].long()
    slots = blocks * block_size + positions % block_size
    for x in (cache.k, cache.v):
        x.view(-1, kv_heads, head_dim)[slots[[0, 2, 3, 4, 5]]] = torch.nan  # to be overwritten
    slots[[1, 6]] = -1
    qkv = randn(7, (heads + 3 * kv_heads) * head_dim, dtype=dtype)
    qkv = qkv[:, : (heads + 2 * kv_heads) * head_dim]  # a view, as layers with gates pass it
    how = decode_attention.NormRopeStore(
        *[randn(head_dim, dtype=dtype) if norm != "none" else None for _ in range(2)],
        eps=1e-6,
        cos_sin=randn(300, turning),
        positions=positions,
        slot_mapping=slots,
        zero_centered=norm == "zero-centered",
        interleaved=interleaved,
    )
    assert decode_attention.takes_qkv(7, heads // kv_heads, cache, how)

    def run_two(rotation, attention):
        copy, kv = qkv.clone(), PagedKV(KVCache(cache.k.clone(), cache.v.clone()), tables, lens)
        sizes = dict(head_dim=head_dim, num_kv_heads=kv_heads)
        q, _, _ = rotation.qk_norm_rope_store(copy, **sizes, cache=kv.cache, **how._asdict())
        return attention.decode_attention(q, kv, options)[lens > 0], kv.cache.k, kv.cache.v

    given, kv = qkv.clone(), PagedKV(KVCache(cache.k.clone(), cache.v.clone()), tables, lens)
    out = decode_attention.decode_attention_of_qkv(qkv, kv, options, how)
    assert torch.equal(qkv, given)
    mine = out[lens > 0], kv.cache.k, kv.cache.v
    poisoned = PagedKV(poison_unused(cache, lens, tables), tables, lens)
    again = decode_attention.decode_attention_of_qkv(qkv, poisoned, options, how)
    assert torch.equal(again[lens > 0], mine[0])
    for one, two, twin in zip(
        mine, run_two(elementwise, decode_attention), run_two(plain, plain), strict=True
    ):
        assert torch.equal(one, two)
        assert_close(one, twin)


def test_one_kernel_is_used_where_it_computes_the_bits_of_two(monkeypatch):
    cache, _ = paged_cache(1, 16, 1, 128, 16, torch.float16)
    codes = KVCache(cache.k.byte(), cache.v.byte(), torch.ones(2))
    small_codes = KVCache(codes.k[..., :64], codes.v[..., :64], codes.scales)
    none = torch.empty(0)
    how = decode_attention.NormRopeStore(none, none, 1e-6, none, none, none)
    most = decode_attention.MAX_QKV_ROWS
    for rows, group, kv, changes, suits in (
        (1, 1, cache, {}, True),
        (most, 14, codes, {}, True),
        (most + 1, 1, cache, {}, False),
        (1, 15, cache, {}, False),  # no room beside the queries
        (1, 16, cache, {}, False),
        (1, 17, cache, {}, True),
        (1, 1, small_codes, {}, False),
        (1, 1, cache, dict(interleaved=True), False),
        (1, 1, cache, dict(interleaved=True, q_weight=None), True),
    ):
        assert decode_attention.takes_qkv(rows, group, kv, how._replace(**changes)) is suits
    monkeypatch.setattr(decode_attention, "HAS_TUPLES", False)
    assert not decode_attention.takes_qkv(1, 1, cache, how)


@pytest.mark.parametrize("cached", [0, 70])
@spread({"heads, kv_heads, head_dim, block_size": ATTENTION_SHAPES, "dtype": DTYPES})
def test_prefill_attention_equals_its_twin(heads, kv_heads, head_dim, block_size, cached, dtype):
    lens_q = torch.tensor([1, 17, 150])
    lens_k = lens_q + cached
    starts_q, starts_k = (F.pad(x.cumsum(0), (1, 0)).int().to(DEVICE) for x in (lens_q, lens_k))
    q, k, v = randn(168, heads + 2 * kv_heads, head_dim, dtype=dtype).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    cache, tables = paged_cache(3, 300, kv_heads, head_dim, block_size, dtype)
    meta = PrefillMetadata(starts_q, starts_k, 150, 150 + cached, tables if cached else None)
    kv = PagedKV(cache, tables) if cached else PackedKV(k, v)
    expected = plain.prefill_attention(q, kv, meta, SCALED)
    if cached:
        kv = PagedKV(poison_unused(cache, lens_k, tables), tables)
    assert_close(prefill_attention.prefill_attention(q, kv, meta, SCALED), expected)


@pytest.mark.parametrize("cached", [0, 70])
@spread(
    {
        "window, softcap, sinks": [
            (1, None, 0),
            (20, None, 0),
            (90, 1.5, 0),
            (None, 0.7, 0),
            (None, None, 4),
            (20, 1.5, 4),
        ],
        "head_dim, block_size": [(32, 16), (80, 256)],
    }
)
def test_prefill_attention_in_windows_under_caps_and_with_sinks_equals_its_twin(
    head_dim, block_size, window, softcap, sinks, cached
):
    lens_q = torch.tensor([1, 17, 150])
    lens_k = lens_q + cached
    starts_q, starts_k = (F.pad(x.cumsum(0), (1, 0)).int().to(DEVICE) for x in (lens_q, lens_k))
    q, k, v = randn(168, 4 + 2 * 2, head_dim).split([4, 2, 2], dim=1)
    cache, tables = paged_cache(3, 300, 2, head_dim, block_size, torch.float32)
    meta = PrefillMetadata(starts_q, starts_k, 150, 150 + cached, tables if cached else None)
    args = meta, AttentionOptions(0.3, window, softcap, some_sinks(sinks))
    kv = PagedKV(cache, tables) if cached else PackedKV(k, v)
    expected = plain.prefill_attention(q, kv, *args)
    if cached:
        given_back = behind(lens_k - lens_q + 1, window or 1000)  # by the first query of each
        kv = PagedKV(poison_unused(cache, lens_k, tables, given_back), tables)
    for one in (plain, prefill_attention):
        assert_close(one.prefill_attention(q, kv, *args), expected)


@spread(
    {
        "splits, window, softcap, has_sinks": [
            (1, None, None, False),
            (4, None, None, True),
            (1, 20, None, True),
            (4, 90, 1.5, False),
            (4, None, 0.7, False),
        ],
        "heads, kv_heads, head_dim, block_size": [(8, 1, 128, 256), (4, 2, 80, 16)],
    }
)
def test_attention_of_a_padded_step_equals_its_twin_and_writes_no_padding(
    heads, kv_heads, head_dim, block_size, splits, window, softcap, has_sinks, monkeypatch
):
    """Two decoding sequences of room for 5, then three chunks of room for 6, in 200 rows. Heads of
    128 come by tiles, where a device or the interpreter knows them.
    """
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    if not HAS_GPU:
        for module in (decode_attention, prefill_attention):
            monkeypatch.setattr(module, "has_large_shared_memory", lambda device: True)
    lens = torch.tensor([260, 3, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    lens_q = torch.tensor([1, 17, 150])
    lens_k = lens_q + torch.tensor([70, 0, 128])
    starts_q, starts_k = (F.pad(x.cumsum(0), (1, 0)).int().to(DEVICE) for x in (lens_q, lens_k))
    q = randn(200, heads + 2 * kv_heads, head_dim, dtype=torch.float16)[:, :heads]
    cache, tables = paged_cache(8, 300, kv_heads, head_dim, block_size, torch.float16)
    meta = PrefillMetadata(starts_q, starts_k, 150, 278, tables[5:])
    sinks = some_sinks(heads if has_sinks else 0, torch.float16)
    options = AttentionOptions(0.1, window, softcap, sinks)
    decoded = plain.decode_attention(q[:2], PagedKV(cache, tables[:2], lens[:2]), options)
    prefilled = plain.prefill_attention(q[2:170], PagedKV(cache, tables[5:]), meta, options)
    first_lens = torch.cat((lens.cpu(), lens_k - lens_q + 1))  # by the first query of each
    given_back = behind(first_lens, window or 1000, block_size)
    all_lens = torch.cat((lens.cpu(), lens_k))
    cache = poison_unused(cache, all_lens, tables, given_back)

    padded_q, padded_k = (F.pad(x, (0, 3)) for x in (starts_q + 2, starts_k))
    padded_q[4:] = padded_q[3]
    query_tiles = prefill_attention.tile_queries(padded_q, 9)
    padded_tables = F.pad(tables[5:], (0, 0, 0, 3))
    padded = prefill_attention.TiledPrefill(padded_q, padded_k, 0, 0, padded_tables, query_tiles)
    out = torch.full_like(q, 7.0)
    kv = PagedKV(cache, tables[:5], lens)
    decode_attention.decode_attention(q[:5], kv, options, out=out[:5])
    kv = PagedKV(cache, padded_tables)
    prefill_attention.prefill_attention(q, kv, padded, options, out=out)
    assert_close(out[:170], torch.cat((decoded, prefilled)))
    assert (out[170:] == 7.0).all()


def test_query_tiles_are_all_that_chunks_have_and_the_others_lie_behind_the_end():
    lens = torch.tensor([64, 1, 0, 129, 0])
    tiles = prefill_attention.tile_queries(F.pad(lens.cumsum(0), (1, 0)).int() + 7, 8).tolist()
    assert tiles[:5] == [[0, 0], [1, 0], [3, 0], [3, 64], [3, 128]]
    assert all(first >= lens[chunk] for chunk, first in tiles[5:])


@needs_tiles
@pytest.mark.parametrize(
    "head_dim, window, softcap, sinks, cached",
    [(64, 127, None, 0, cached) for cached in (0, 1, 62, 300)]
    + [(64, None, None, 4, 62), (64, None, None, 4, 0), (128, None, None, 0, 300)]
    + [(32, 90, 1.5, 0, 1), (32, 90, 1.5, 0, 300)],
)
def test_prefill_attention_by_tiles_equals_its_twin(
    head_dim, window, softcap, sinks, cached, monkeypatch
):
    """Of tiles of 64 keys some are masked and some are not: behind 62 cached tokens the first query
    does not see the first tile's last key, and in windows of 127 the last query of each 64 does not
    see the first key of the tile before, which all others do.
    """
    monkeypatch.setattr(prefill_attention, "TILED_KEYS", 0)
    monkeypatch.setattr(prefill_attention, "has_large_shared_memory", lambda device: True)
    lens_q = torch.tensor([1, 63, 200])
    lens_k = lens_q + cached
    starts_q, starts_k = (F.pad(x.cumsum(0), (1, 0)).int().to(DEVICE) for x in (lens_q, lens_k))
    q, k, v = randn(300, 4 + 2 * 2, head_dim, dtype=torch.float16).split([4, 2, 2], dim=1)
    k[264:] = v[264:] = float("nan")  # behind the last chunk
    cache, tables = paged_cache(3, 500, 2, head_dim, 64, torch.float16)
    meta = PrefillMetadata(starts_q, starts_k, 200, 200 + cached, tables if cached else None)
    args = meta, AttentionOptions(0.1, window, softcap, some_sinks(sinks, torch.float16))
    fetched = []
    make = prefill_attention.describe_keys
    monkeypatch.setattr(
        prefill_attention, "describe_keys", lambda x, rows: fetched.append(rows) or make(x, rows)
    )
    kv = PagedKV(cache, tables) if cached else PackedKV(k, v)
    expected = plain.prefill_attention(q[:264], kv, *args)
    if cached:
        given_back = behind(lens_k - lens_q + 1, window or 1000, 64)
        kv = PagedKV(poison_unused(cache, lens_k, tables, given_back), tables)
    assert_close(prefill_attention.prefill_attention(q[:264], kv, *args), expected)
    assert fetched == [64, 64]


def test_the_cpu_takes_plain_pytorch():
    assert (
        select_attention_backend("auto", torch.device("cpu"), torch.float32, 64, 16)
        is PLAIN_BACKEND
    )


def test_flash_attn_leaves_sinks_to_triton_or_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(flash_attention, "find_v2", lambda: (None, None))
    asked = torch.device("cuda"), torch.bfloat16, 64, 256
    backends = [select_attention_backend("auto", *asked, sinks=sinks) for sinks in (False, True)]
    assert [backend.name for backend in backends] == [
        "flash-attn 2 prefill, Triton decode",
        "Triton",
    ]
    with pytest.raises(ValueError, match="'flash-attn', but the model has attention sinks.* take"):
        select_attention_backend("flash-attn", *asked, sinks=True)
    flash_attn = select_attention_backend("flash-attn", *asked)
    assert flash_attn.name == "flash-attn 2" and flash_attn.decode_qkv is None
    assert all(backend.decode_qkv for backend in backends)


@pytest.mark.parametrize(
    "options, left",
    [
        (AttentionOptions(1.0), False),
        (AttentionOptions(1.0, window=9), True),
        (AttentionOptions(1.0, softcap=2.0), True),
        (AttentionOptions(1.0, sinks=torch.zeros(4)), True),
    ],
)
def test_flash_attn_4_leaves_windows_caps_and_sinks_to_triton(options, left, monkeypatch):
    monkeypatch.setattr(attention_backends, "MANY_PAIRS", 0)
    monkeypatch.setattr(flash_attention, "find_v4", lambda: True)
    monkeypatch.setattr(flash_attention, "prefill_attention_v4", lambda *_: "v4")
    prefill = attention_backends._large_by_v4(lambda *_, out: "Triton", only_packed=False)
    ends = torch.tensor([0, 2])
    meta = PrefillMetadata(ends, ends, 2, 2, None)
    q = torch.zeros(2, 4, 8)
    assert prefill(q, PackedKV(q, q), meta, options) == ("Triton" if left else "v4")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["auto", "flash-attn", "triton"])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (8, 2, 64)])
def test_backends_on_the_gpu_equal_plain_pytorch(name, heads, kv_heads, head_dim, monkeypatch):
    # Leave nothing to Triton that flash-attn 4 can do.
    monkeypatch.setattr(attention_backends, "MANY_PAIRS", 0)
    dtype = torch.bfloat16
    try:
        backend = select_attention_backend(name, torch.device("cuda"), dtype, head_dim, 256)
    except ValueError as error:
        pytest.skip(str(error))
    lens_q, lens_k = torch.tensor([1, 300, 700]), torch.tensor([40, 301, 1300])
    cache, tables = paged_cache(3, 1300, kv_heads, head_dim, 256, dtype)
    q, k, v = randn(1001, heads + 2 * kv_heads, head_dim, dtype=dtype).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    starts_q, starts_k = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (lens_q, lens_k))
    for kv, meta in (
        (PagedKV(cache, tables), PrefillMetadata(starts_q, starts_k, 700, 1300, tables)),
        (PackedKV(k, v), PrefillMetadata(starts_q, starts_q, 700, 700, None)),
    ):
        expected = plain.prefill_attention(q, kv, meta, SCALED)
        assert_close(backend.prefill(q, kv, meta, SCALED), expected)
    kv = PagedKV(cache, tables, lens_k.int().cuda())
    expected = plain.decode_attention(q[:3], kv, SCALED)
    assert_close(backend.decode(q[:3], kv, SCALED), expected)
