"""The Triton kernels over a KV cache in FP8 against the plain layers: in Triton's interpreter on a
CPU, and compiled, in bfloat16 and with the GPU's own instructions, on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import plain_layers as plain
import triton
import triton.language as tl

from nanovllm.backends.cuda import attention_backends, flash_attention
from nanovllm.backends.cuda.attention_backends import select_attention_backend
from nanovllm.backends.cuda.triton import decode_attention, elementwise, prefill_attention
from nanovllm.backends.cuda.triton.dispatch import TensorDescriptor
from nanovllm.backends.cuda.triton.e4m3 import encode, from_codes, from_words, how_to_decode
from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV, store_kv
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.e4m3 import E4M3, to_e4m3

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
] * HAS_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAN = 0x7F  # as a code
# (query heads, KV heads, head size, block size)
SHAPES = [(4, 4, 32, 16), (4, 2, 64, 256), (4, 2, 80, 32), (8, 1, 128, 256), (2, 1, 256, 16)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[expected.dtype], f"relative error {error:.2e}"


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def paged_cache(lens, kv_heads, head_dim, block_size, seen_from=None):
    """A cache that holds the tokens of sequences from `seen_from` on, NaN elsewhere, and tables."""
    width = -(-max(lens) // block_size) + 1
    order = 1 + torch.randperm(len(lens) * width, device=DEVICE)
    shape = 1 + len(order), block_size, kv_heads, head_dim
    codes = torch.full((2, *shape), NAN, dtype=torch.uint8, device=DEVICE)
    cache = KVCache(*codes, torch.tensor([0.03, 0.6], device=DEVICE))
    tables = order.int().view(len(lens), width)
    for i, length in enumerate(lens):
        token = torch.arange(seen_from[i] if seen_from else 0, length, device=DEVICE)
        slots = tables[i, token // block_size].long() * block_size + token % block_size
        k, v = 2 * randn(2, len(token), kv_heads, head_dim)
        store_kv(k, v, cache, slots)
    return cache, tables


def ends_of(lens):
    return F.pad(torch.tensor(lens).cumsum(0), (1, 0)).int().to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", SHAPES)
def test_decoding_equals_its_twin(heads, kv_heads, head_dim, block_size, dtype):
    lens = [1, 17, 260, 64]
    cache, tables = paged_cache(lens, kv_heads, head_dim, block_size)
    kv = PagedKV(cache, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    q = randn(4, heads + 2, head_dim, dtype=dtype)[:, :heads]
    options = AttentionOptions(0.1)
    expected = plain.decode_attention(q, kv, options)
    assert_close(decode_attention.decode_attention(q, kv, options), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window, softcap, has_sinks", [(40, 1.5, True), (None, 0.7, True)])
def test_windows_caps_and_sinks_equal_their_twin(window, softcap, has_sinks, splits, monkeypatch):
    monkeypatch.setattr(decode_attention, "num_splits", lambda *_: splits)
    lens = [1, 41, 260, 64, 128]
    begins = [max(0, n - (window or 1000)) // 16 * 16 for n in lens]
    cache, tables = paged_cache(lens, 2, 32, 16, begins)
    kv = PagedKV(cache, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    sinks = torch.linspace(-4, 8, 6, device=DEVICE) if has_sinks else None
    options = AttentionOptions(0.3, window, softcap, sinks)
    q = randn(5, 6, 32)
    expected = plain.decode_attention(q, kv, options)
    assert_close(decode_attention.decode_attention(q, kv, options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", SHAPES[2:])
def test_one_kernel_norms_rotates_stores_and_attends_as_two_do(
    heads, kv_heads, head_dim, block_size, dtype
):
    lens = [1, 17, 260, 64]
    cache, tables = paged_cache([n - 1 for n in lens], kv_heads, head_dim, block_size)
    kv = PagedKV(cache, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    positions = torch.tensor(lens, device=DEVICE) - 1
    blocks = tables.gather(1, positions[:, None] // block_size)[:, 0].long()
    weights = randn(2, head_dim, dtype=dtype)
    how = decode_attention.NormRopeStore(
        *weights,
        eps=1e-6,
        cos_sin=randn(300, head_dim // 4 * 2),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
    )
    assert decode_attention.takes_qkv(4, heads // kv_heads, cache, how)
    qkv = 3 * randn(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    options = AttentionOptions(0.1)
    one = decode_attention.decode_attention_of_qkv(qkv, kv, options, how)
    codes = cache.k.clone(), cache.v.clone()
    sizes = dict(head_dim=head_dim, num_kv_heads=kv_heads)
    for stored in (cache.k, cache.v):
        stored.view(-1, kv_heads, head_dim)[how.slot_mapping] = NAN
    q, _, _ = elementwise.qk_norm_rope_store(qkv, **sizes, cache=cache, **how._asdict())
    assert torch.equal(one, decode_attention.decode_attention(q, kv, options))
    assert torch.equal(codes[0], cache.k) and torch.equal(codes[1], cache.v)
    assert not one.isnan().any()


@pytest.mark.parametrize("prefix_blocks", [0, 3])
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", SHAPES[1:4:2])
def test_a_shared_prefix_equals_its_twin(heads, kv_heads, head_dim, block_size, prefix_blocks):
    prefix = prefix_blocks * block_size
    lens = [prefix + n for n in (1, 17, 300, 9)]
    cache, tables = paged_cache(lens, kv_heads, head_dim, block_size)
    tables[:, :prefix_blocks] = tables[0, :prefix_blocks]
    # The first sequence has stored only a part of the last of these blocks.
    cache.k[cache.k == NAN] = 3
    cache.v[cache.v == NAN] = 3
    kv = PagedKV(cache, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    shared = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
    q, options = randn(4, heads, head_dim), AttentionOptions(0.1, softcap=2.0)
    expected = plain.decode_attention(q, kv, options)
    mine = decode_attention.decode_attention(q, kv, options, shared_prefix_len=shared)
    assert_close(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", SHAPES)
def test_prompts_equal_their_twin(heads, kv_heads, head_dim, block_size, dtype):
    lens_q, lens_k = [1, 17, 150], [71, 17, 220]
    cache, tables = paged_cache(lens_k, kv_heads, head_dim, block_size)
    q, kv = randn(168, heads, head_dim, dtype=dtype), PagedKV(cache, tables)
    meta = PrefillMetadata(ends_of(lens_q), ends_of(lens_k), 150, 220, tables)
    options = AttentionOptions(0.1)
    expected = plain.prefill_attention(q, kv, meta, options)
    assert_close(prefill_attention.prefill_attention(q, kv, meta, options), expected)


@pytest.mark.skipif(TensorDescriptor is None, reason="Triton is too old")
@pytest.mark.parametrize("is_graph", [False, True])
def test_prompts_by_tiles_equal_their_twin(is_graph, monkeypatch):
    """As on Hopper, where the accelerator fetches tiles."""
    monkeypatch.setattr(prefill_attention, "has_large_shared_memory", lambda device: True)
    lens_q, lens_k = [1, 63, 200], [63, 364, 501]
    cache, tables = paged_cache(lens_k, 2, 64, 128)
    fetched = []
    make = prefill_attention.describe_keys
    monkeypatch.setattr(
        prefill_attention, "describe_keys", lambda x, rows: fetched.append(rows) or make(x, rows)
    )
    q, kv = randn(264, 4, 64, dtype=torch.float16), PagedKV(cache, tables)
    meta = PrefillMetadata(ends_of(lens_q), ends_of(lens_k), 200, 501, tables)
    options = AttentionOptions(0.1)
    expected = plain.prefill_attention(q, kv, meta, options)
    if is_graph:
        tiles = prefill_attention.tile_queries(meta.cu_seqlens_q, 7)
        args = meta.cu_seqlens_q, meta.cu_seqlens_k, 0, 0, tables, tiles
        meta = prefill_attention.TiledPrefill(*args)
    assert_close(prefill_attention.prefill_attention(q, kv, meta, options), expected)
    assert fetched == [128, 128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 1, 64), (7, 2, 80), (16, 8, 128)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("has_cache", [True, False])
def test_what_is_stored_and_what_is_returned_equal_their_twin(
    heads, kv_heads, head_dim, norm, dtype, has_cache
):
    slots = torch.tensor([3, -1, 0, 31, 16], device=DEVICE)
    qkv = 30 * randn(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weight = randn(head_dim, dtype=dtype) if norm else None
    cos_sin, positions = randn(50, head_dim), torch.randint(0, 50, (5,), device=DEVICE)
    scales = torch.tensor([0.03, 0.4], device=DEVICE)

    def run(form):
        blocks = 2 if has_cache else 0
        shape = 2, blocks, 16, kv_heads, head_dim
        cache = KVCache(*torch.zeros(shape, dtype=torch.uint8, device=DEVICE), scales)
        q, k, v = form.qk_norm_rope_store(
            qkv.clone(),
            head_dim=head_dim,
            num_kv_heads=kv_heads,
            q_weight=weight,
            k_weight=weight,
            eps=1e-6,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slots,
            cache=cache,
        )
        return q, k, v, *(x.view(E4M3).float() for x in (cache.k, cache.v))

    (q, *rest), (twins_q, *twins) = run(elementwise), run(plain)
    assert_close(q, twins_q)
    for mine, twin in zip(rest, twins):
        if twin.numel():
            # Where the two differ before they round to FP8, a number may become its neighbour.
            assert (mine != twin).float().mean() < (1e-3 if dtype == torch.float32 else 1e-2)
            assert (mine.double() - twin.double()).norm() < 5e-3 * twin.double().norm()


@triton.jit
def _round_trip_kernel(x, rounded, codes, halves, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    number, code = encode(tl.load(x + i), HOW)
    tl.store(rounded + i, number)
    tl.store(codes + i, code)
    tl.store(halves + i, from_codes(code, HOW))


@triton.jit
def _words_kernel(words, halves, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    h0, h1, h2, h3 = from_words(tl.load(words + i), HOW)
    tl.store(halves + 4 * i, h0)
    tl.store(halves + 4 * i + 1, h1)
    tl.store(halves + 4 * i + 2, h2)
    tl.store(halves + 4 * i + 3, h3)


# On a GPU in all ways, of which Ampere's and the interpreter's run anywhere.
WAYS = range(how_to_decode(torch.device(DEVICE)) + 1)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_rounded_as_pytorch_rounds_them(way):
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, between, between * (1 + 2**-23), between * (1 - 2**-24)])
    x = torch.cat([x, torch.tensor([464.0, 1e9, torch.inf]), 10 ** torch.linspace(-9, 9, 3000)])
    x = torch.cat([x, -x, torch.tensor([torch.nan])])
    x = F.pad(x, (0, 8192 - len(x))).to(DEVICE)
    rounded, halves = torch.empty_like(x), torch.empty_like(x, dtype=torch.float16)
    codes = torch.empty_like(x, dtype=torch.uint8)
    _round_trip_kernel[(1,)](x, rounded, codes, halves, len(x), way)
    expected = to_e4m3(x)
    assert torch.equal(codes, expected.view(torch.uint8))
    torch.testing.assert_close(rounded, expected.float(), rtol=0, atol=0, equal_nan=True)
    is_number = ~x.isnan()
    assert torch.equal(halves[is_number].float(), expected.float()[is_number])


@pytest.mark.parametrize("way", WAYS)
def test_words_are_read_from_their_first_byte_on(way):
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)[torch.randperm(1024)]
    codes[codes & 127 == NAN] = 0
    codes = codes.to(DEVICE)
    halves = torch.empty(1024, dtype=torch.float16, device=DEVICE)
    _words_kernel[(1,)](codes.view(torch.int32), halves, 256, way)
    assert torch.equal(halves, codes.view(E4M3).half())


@pytest.mark.parametrize("heavy", [False, True])
def test_long_contexts_keep_their_precision(heavy):
    """30,000 tokens, one of which carries the weight or none, against float64."""
    length, options = 30_000, AttentionOptions(0.1)
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    cache, tables = paged_cache([length], 1, 64, 256)
    q = randn(1, 4, 64, dtype=dtype)
    if heavy:
        # The first head's score of this token is 20 above the others.
        k = q[0, :1].float() * 20 / (options.scale * q[0, 0].float().square().sum())
        slot = tables[0, 12345 // 256].long() * 256 + 12345 % 256
        store_kv(k[None], k[None], cache, slot[None])
    k, v = cache.decode(cache.k, cache.v, torch.float64)
    k, v = (x[tables[0].long()].flatten(0, 1)[:length, 0] for x in (k, v))
    weights = (q[0].double() @ k.T * options.scale).softmax(-1)
    assert (weights[0, 12345] > 0.99) == heavy
    expected = weights @ v
    kv = PagedKV(cache, tables, torch.tensor([length], dtype=torch.int32, device=DEVICE))
    mine = decode_attention.decode_attention(q, kv, options)[0].double()
    assert (mine - expected).abs().max() < expected.abs().max() * TOLERANCE[dtype] / 2


def test_flash_attn_is_refused_or_gets_only_prompts_without_cached_tokens(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(flash_attention, "find_v2", lambda: (None, None))
    monkeypatch.setattr(flash_attention, "prefill_attention_v2", lambda *_: "flash-attn")
    asked = torch.device("cuda"), torch.bfloat16, 64, 256
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', attention_backend 'flash-attn'"):
        select_attention_backend("flash-attn", *asked, fp8_kv=True)
    with pytest.raises(ValueError, match="head_dim 66: such a KV cache needs .* a multiple of 4"):
        select_attention_backend("auto", *asked[:2], 66, 256, fp8_kv=True)
    monkeypatch.setattr(prefill_attention, "prefill_attention", lambda *_, out: "Triton")
    backend = select_attention_backend("auto", *asked, fp8_kv=True)
    packed = PackedKV(torch.zeros(1), torch.zeros(1))
    paged = PagedKV(KVCache(packed.k, packed.v), torch.zeros(1))
    assert backend.prefill(None, packed, None, None) == "flash-attn"
    assert backend.prefill(None, paged, None, None) == "Triton"
    monkeypatch.setattr(attention_backends, "MANY_PAIRS", 0)
    monkeypatch.setattr(flash_attention, "find_v4", lambda: True)
    monkeypatch.setattr(flash_attention, "prefill_attention_v4", lambda *_: "v4")
    prefill = attention_backends._large_by_v4(lambda *_, out: "Triton", only_packed=True)
    meta = PrefillMetadata(None, None, 2, 2, None)
    q, options = torch.zeros(2, 4, 8), AttentionOptions(1.0)
    assert prefill(q, packed, meta, options) == "v4"
    assert prefill(q, paged, meta, options) == "Triton"
