"""A KV cache in FP8: attention sees the rounded K and V in every step, as transformers computes
with a cache that rounds.
"""

import shutil
from contextlib import suppress

import pytest
import torch
from effort import EFFORT
from engine_helpers import PROMPTS, Checkpoint, assert_greedy, greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_helpers import change_config, rewrite, tensors_of
from transformers import DynamicCache

from nanovllm import LLM
from nanovllm.backends.cpu import cpp_ops
from nanovllm.backends.quantised.config import check_kv_cache_scheme
from nanovllm.config import Config
from nanovllm.engine import block_manager
from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV, store_kv
from nanovllm.layers.context import PrefillMetadata

# Windows, sinks, caps, shared K and V, K that serve as V, recurrent layers, gates, a tied head.
MODELS = ["gqa-2", "mistral-window", "gpt-oss", "gemma2", "gemma4", "lfm2", "qwen3.5"]
if EFFORT > 1:
    MODELS += ["gqa-4", "experts", "phi3", "ministral3", "gemma3"]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What e4m3 holds of x, by its definition: four digits of a float whose exponent is -6 or more.

    PyTorch's type is not asked.
    """
    x = x / scale
    exponent = torch.frexp(x.abs().clamp(min=2.0**-6)).exponent
    step = torch.ldexp(torch.ones_like(x), exponent - 4)
    return ((x / step).round() * step).clamp(-448, 448) * scale


class RoundingCache(DynamicCache):
    """The cache of transformers, which rounds what it is given."""

    def __init__(self, config, scales):
        super().__init__(config=config)
        self.scales = scales

    def update(self, k, v, layer, *args, **options):
        k_scale, v_scale = self.scales.get(layer, (1.0, 1.0))
        return super().update(rounded(k, k_scale), rounded(v, v_scale), layer, *args, **options)


class RoundedCheckpoint(Checkpoint):
    """A checkpoint whose expected outputs are those of a cache that rounds."""

    def __init__(self, folder, scales=None):
        super().__init__(folder)
        scales, generate = scales or {}, self._model.generate

        def generate_rounded(ids, **options):
            cache = RoundingCache(self._model.config, scales)
            return generate(ids, past_key_values=cache, **options)

        self._model.generate = generate_rounded

    def clear_prompts(self) -> list[list[int]]:
        """The prompts whose expected outputs have no near tie."""
        clear = []
        for prompt in PROMPTS:
            with suppress(AssertionError):
                self.expected(prompt, 24)
                clear.append(prompt)
        assert len(clear) >= len(PROMPTS) - 2
        return clear


@pytest.fixture(scope="module")
def get_rounded(get_checkpoint):
    made = {}

    def get(name):
        if name not in made:
            made[name] = RoundedCheckpoint(get_checkpoint(name).folder)
        return made[name]

    return get


@pytest.fixture(scope="module")
def scaled(get_checkpoint, tmp_path_factory):
    """A checkpoint with a scale for the K and the V of each layer, and nothing else that is
    quantised.
    """
    folder = tmp_path_factory.mktemp("scaled")
    return add_scales(get_checkpoint("gqa-2").folder, folder, SCALES)


SCALES = {0: (0.3, 0.011), 1: (0.007, 2.0)}


def add_scales(source, folder, scales):
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    named = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([scale])
        for layer, pair in scales.items()
        for name, scale in zip("kv", pair)
    }
    rewrite(folder, tensors_of(folder) | named)
    return RoundedCheckpoint(source, scales), folder


def test_rounding_changes_what_these_models_say(get_checkpoint, get_rounded, scaled):
    """Else outputs would prove nothing here."""
    checkpoints = get_checkpoint("gqa-2"), get_rounded("gqa-2"), scaled[0]
    outputs = [[one.expected(prompt, 24) for prompt in PROMPTS] for one in checkpoints]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert sum(a != b for a, b in zip(outputs[i], outputs[j])) >= 5


@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_equals_transformers_with_a_cache_that_rounds(get_rounded, make_llm, model):
    """In a batch, then in chunks, preempted, and with hits: the same tokens."""
    checkpoint = get_rounded(model)
    prompts = checkpoint.clear_prompts()
    llm = make_llm(checkpoint.folder, kv_cache_dtype="fp8")
    assert_greedy(llm, checkpoint, prompts)
    small = dict(max_num_batched_tokens=20, num_kvcache_blocks=9, overlap=True)
    llm = make_llm(checkpoint.folder, kv_cache_dtype="fp8", **small)
    for _ in range(2):
        assert_greedy(llm, checkpoint, prompts)
    assert llm.engine.scheduler.num_preemptions > 0


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    options=st.fixed_dictionaries(
        dict(
            overlap=st.booleans(),
            enable_prefix_caching=st.booleans(),
            max_num_seqs=st.sampled_from([1, 2, 5, 32]),
            max_num_batched_tokens=st.sampled_from([3, 17, 40, 512]),
            num_kvcache_blocks=st.sampled_from([7, 9, 12, 96]),
            kernels=st.sampled_from(["auto", "plain"]),
        )
    ),
    calls=st.lists(
        st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=9), min_size=1, max_size=3
    ),
    min_run=st.sampled_from([1, block_manager.MIN_RUN]),
)
def test_no_mixture_of_options_changes_greedy_output(
    scaled, make_llm, monkeypatch, options, calls, min_run
):
    monkeypatch.setattr(block_manager, "MIN_RUN", min_run)
    checkpoint, folder = scaled
    with make_llm(folder, kv_cache_dtype="fp8", **options) as llm:
        for prompts in calls:
            assert_greedy(llm, checkpoint, prompts)


@pytest.mark.parametrize("options", [dict(kernels="compile"), dict(tensor_parallel_size=2)])
def test_compiled_layers_and_two_ranks_give_the_same_tokens(scaled, make_llm, options):
    checkpoint, folder = scaled
    llm = make_llm(folder, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=64, **options)
    assert_greedy(llm, checkpoint)


def test_blocks_take_a_quarter_of_their_bytes_in_float32(make_llm):
    sizes = [make_llm(kv_cache_dtype=dtype).engine.runner.kv_cache.nbytes for dtype in DTYPES]
    assert sizes[0] == 4 * sizes[1] == 96 * 16 * 2 * 2 * 2 * 16 * 4
    blocks = [make_llm(kv_cache_dtype=dtype, dtype="float16").engine.runner for dtype in DTYPES]
    assert blocks[0].kv_cache.nbytes == 2 * blocks[1].kv_cache.nbytes


DTYPES = ("auto", "fp8")


def test_new_weights_keep_the_scales_that_they_do_not_bring(scaled, make_llm, get_checkpoint):
    checkpoint, folder = scaled
    plain = tensors_of(get_checkpoint("gqa-2").folder)
    llm = make_llm(folder, kv_cache_dtype="fp8")
    llm.update_weights(plain.items())
    assert_greedy(llm, checkpoint)
    other = {name: (k * 20, v * 20) for name, (k, v) in SCALES.items()}
    scales = {
        f"model.layers.{i}.self_attn.{name}_scale": torch.tensor(scale)
        for i, pair in other.items()
        for name, scale in zip("kv", pair)
    }
    llm.update_weights((plain | scales).items())
    changed = RoundedCheckpoint(get_checkpoint("gqa-2").folder, other)
    assert changed.expected(PROMPTS[5], 24) != checkpoint.expected(PROMPTS[5], 24)
    assert_greedy(llm, changed)
    llm.sleep(2)
    llm.update_weights(plain.items())
    llm.wake_up()
    assert_greedy(llm, changed)
    llm.sleep(1)
    llm.wake_up()
    assert_greedy(llm, changed)
    llm.sleep(2)
    llm.wake_up()  # reads the folder
    assert_greedy(llm, checkpoint)


def test_scales_that_are_none_are_refused(get_checkpoint, tmp_path):
    no_scale, no_number = "is .*, which is no scale", "has NaN or infinite numbers"
    wrong = {0.0: no_scale, -1.0: no_scale, torch.nan: no_number, torch.inf: no_number}
    for scale, why in wrong.items():
        add_scales(get_checkpoint("gqa-2").folder, tmp_path, {0: (1.0, scale)})
        with pytest.raises(ValueError, match=f"layers.0.self_attn.v_scale {why}"):
            LLM(tmp_path, device="cpu", kv_cache_dtype="fp8", num_kvcache_blocks=8)


def test_scales_with_other_names_are_refused_where_scales_are_read(scaled, tmp_path):
    _, folder = scaled
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    pack_nothing = {"quant_method": "fp8", "kv_cache_scheme": SCHEME}
    change_config(tmp_path, quantization_config=pack_nothing | {"ignored_layers": ["model"]})
    name = "model.layers.0.self_attn.attn.k_scale"
    rewrite(tmp_path, tensors_of(folder) | {name: torch.tensor(0.5)})
    LLM(tmp_path, device="cpu", num_kvcache_blocks=8).close()
    with pytest.raises(ValueError, match=f"no place for {name}"):
        LLM(tmp_path, device="cpu", kv_cache_dtype="fp8", num_kvcache_blocks=8)


def test_random_weights_have_scales_of_1(checkpoint, make_llm):
    llm = make_llm(load_format="dummy", kv_cache_dtype="fp8")
    scales = [layer.kv_scales.tolist() for layer in llm.engine.runner.attention_layers]
    assert scales == [[1.0, 1.0]] * 2
    llm.generate(PROMPTS, greedy(3), use_tqdm=False)


def test_a_config_that_asks_for_another_kv_cache_is_refused(tmp_path):
    check_kv_cache_scheme(None)
    check_kv_cache_scheme({"quant_method": "fp8"})
    check_kv_cache_scheme({"kv_cache_scheme": SCHEME | {"symmetric": True}})
    others = {"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}
    for other in others:
        with pytest.raises(ValueError, match="only FP8 with a static scale a tensor .* leave the"):
            check_kv_cache_scheme({"kv_cache_scheme": SCHEME | other})


def test_names_of_formats():
    assert Config("m").kv_cache_dtype == "auto"
    assert Config("m", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8_e5m2': use 'fp8', which is e4m3"):
        Config("m", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8': use one of 'auto', 'fp8'"):
        Config("m", kv_cache_dtype="int8")


def test_every_code_is_read_as_pytorch_reads_it_and_a_nan_stays_one():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    cache = KVCache(codes, codes, torch.tensor([1.0, 0.5]))
    k, v = cache.decode(codes, codes, torch.float32)
    torch.testing.assert_close(k, numbers, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(v, numbers / 2, equal_nan=True, rtol=0, atol=0)
    x = torch.randn(1000) * 10.0 ** torch.empty(1000).uniform_(-4, 4)
    k, v = cache.decode(*cache.encode(x, x), torch.float32)
    torch.testing.assert_close(k, rounded(x, 1.0), rtol=0, atol=0)
    torch.testing.assert_close(v, rounded(x, 0.5), rtol=0, atol=0)
    nan = torch.tensor([torch.nan, torch.inf, -torch.inf])
    k, _ = cache.decode(*cache.encode(nan, nan), torch.float32)
    assert k[0].isnan() and k[1:].tolist() == [448.0, -448.0]


LONG = 30_000


def long_cache(head_dim, heavy, options):
    """A query of 4 heads that share a KV head, and LONG tokens in FP8; one carries the weight."""
    blocks = -(-LONG // 64)
    codes = torch.zeros(2, blocks, 64, 1, head_dim, dtype=torch.uint8)
    cache = KVCache(*codes, torch.tensor([0.05, 0.3]))
    q = torch.randn(1, 4, head_dim)
    k, v = torch.randn(2, LONG, 1, head_dim)
    if heavy:
        # The first head's score of this token is 20 above the others.
        k[12345] = q[0, 0] * 20 / (options.scale * q[0, 0].dot(q[0, 0]))
    table = torch.randperm(blocks).int()[None]
    tokens = torch.arange(LONG)
    slots = table[0].long()[tokens // 64] * 64 + tokens % 64
    store_kv(k, v, cache, slots)
    return q, PagedKV(cache, table, torch.tensor([LONG], dtype=torch.int32))


def in_float64(q, kv, options):
    """Attention of one query to the numbers in the cache, in float64."""
    k, v = kv.cache.decode(kv.cache.k, kv.cache.v, torch.float64)
    k, v = (x[kv.block_tables[0].long()].flatten(0, 1)[:LONG, 0] for x in (k, v))
    return ((q[0].double() @ k.T * options.scale).softmax(-1) @ v)[None]


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("form", ["plain", "C++"])
def test_long_contexts_keep_their_precision(form, heavy):
    if form == "C++" and cpp_ops.load() is None:
        pytest.skip("there is no compiler")
    torch.manual_seed(0)
    options = AttentionOptions(0.1)
    q, kv = long_cache(64, heavy, options)
    expected = in_float64(q, kv, options)
    decode = attention.decode_attention if form == "plain" else cpp_ops.decode_attention
    error = (decode(q, kv, options) - expected).abs().max() / expected.abs().max()
    assert error < 2e-5


def test_prompts_see_in_the_step_that_stores_them_what_later_steps_see():
    torch.manual_seed(0)
    cache = KVCache(*torch.zeros(2, 4, 16, 2, 32, dtype=torch.uint8), torch.tensor([0.1, 0.2]))
    q, k, v = torch.randn(40, 4, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)
    k, v = store_kv(k, v, cache, torch.arange(16, 56))
    ends = torch.tensor([0, 40], dtype=torch.int32)
    tables = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    options = AttentionOptions(0.2)
    fresh = PrefillMetadata(ends, ends, 40, 40, None)
    cached = PrefillMetadata(ends, ends, 40, 40, tables)
    first = attention.prefill_attention(q, PackedKV(k, v), fresh, options)
    later = attention.prefill_attention(q, PagedKV(cache, tables), cached, options)
    torch.testing.assert_close(first, later, rtol=1e-6, atol=1e-6)


def test_the_ready_line_names_the_format(scaled, make_llm, caplog):
    _, folder = scaled
    with caplog.at_level("INFO", "nanovllm"):
        make_llm(folder, kv_cache_dtype="fp8")
    assert "96 KV blocks of 16 tokens in FP8 (0.0 GiB" in caplog.messages[-1]
