"""The C++ kernels against their plain PyTorch twins, and what the engine makes of them against
transformers.
"""

import builtins
import ctypes
import hashlib
import io
import logging
import os
import stat
import subprocess
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import plain_layers as plain
import pytest
import torch
import torch.nn.functional as F
from engine_helpers import PROMPTS, assert_greedy, greedy
from model_helpers import load
from process_helpers import in_fork
from quantised_helpers import tensors_of
from test_quantised import logits_of

from nanovllm import LLM
from nanovllm.backends.cpu import cpp_ops, layers, library_cache
from nanovllm.backends.cpu.decoder import CppDecoder
from nanovllm.backends.cpu.transform import use_cpu_layers
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.sampler import sample
from nanovllm.models.transformer import Decoder

KERNELS = ["auto", "plain"]
# In part these kernels': windows and caps are, other norms and heads that turn in part are not.
ODD = ["mistral-window", "gemma2", "phi3"]
needs_compiler = pytest.mark.skipif(cpp_ops.find_compiler() is None, reason="needs g++")
needs_bfloat16 = pytest.mark.skipif(
    cpp_ops.load_bfloat16() is None, reason="needs AVX512_BF16 and a g++ that knows it"
)
# The dtypes of models that have kernels.
in_each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=needs_compiler),
        pytest.param(torch.bfloat16, marks=needs_bfloat16),
    ],
)


def assert_equals_twin(got, expected):
    """The twin gets the same numbers in float32, and the kernel rounds its result once."""
    assert got.dtype != torch.bfloat16 or torch.isfinite(got).all()
    exact = got.dtype == torch.float32
    rtol, atol = (1e-5, 1e-5) if exact else (2**-8, 1e-4)
    torch.testing.assert_close(got.float(), expected, rtol=rtol, atol=atol)


@in_each_dtype
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("size", [40, 256])
def test_norms_and_activation_equal_their_twins(rows, size, dtype):
    x, weight = (20 * torch.randn(rows, size)).to(dtype), torch.rand(size).to(dtype)
    expected = plain.rms_norm(x.float(), weight.float(), 1e-6)
    assert_equals_twin(cpp_ops.rms_norm(x, weight, 1e-6), expected)
    x[0, :4] = torch.tensor([-200.0, -87.5, 88.5, 200.0])  # where an exponential leaves float32
    assert_equals_twin(cpp_ops.silu_and_mul(x), plain.activate_and_mul(x.float()))


@in_each_dtype
@pytest.mark.parametrize("inputs, panels, has_bias", [(24, 3, False), (576, 1, True), (1, 2, True)])
def test_products_equal_pytorchs_and_rows_do_not_depend_on_each_other(
    inputs, panels, has_bias, dtype
):
    inputs += inputs % 2 if dtype == torch.bfloat16 else 0
    weight = torch.randn(panels * cpp_ops.load().panel_width(), inputs).to(dtype)
    bias = torch.randn(len(weight)).to(dtype) if has_bias else None
    x, packed = torch.randn(200, inputs).to(dtype), cpp_ops.pack(weight)
    together = cpp_ops.linear(x, packed, bias)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(together.float(), expected, rtol=rtol, atol=1e-4)
    for begin, end in [(0, 1), (0, 95), (3, 200), *((7, 7 + rows) for rows in range(1, 14))]:
        assert torch.equal(cpp_ops.linear(x[begin:end], packed, bias), together[begin:end])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [70, 71])
def test_weights_that_fit_16_bits_are_held_so_and_change_no_bit(dtype, inputs):
    if dtype == torch.float16 and not cpp_ops.load().takes_float16():
        pytest.skip("this processor has no instruction for float16")
    width = cpp_ops.load().panel_width()
    weight = torch.randn(2 * width, inputs)
    weight[1] *= 2.0**-15  # below what float16 has with all of its bits
    weight[0, :2] = torch.tensor([-0.0, 1 + 2.0**-7 if dtype == torch.bfloat16 else 1 + 2.0**-10])
    weight = weight.to(dtype).float()
    halves = cpp_ops.pack(weight)
    assert halves.dtype == dtype
    floats = weight.unflatten(0, (-1, width)).transpose(1, 2).contiguous()
    for rows in (1, 5, 100):
        x = torch.randn(rows, inputs)
        assert torch.equal(cpp_ops.linear(x, halves, None), cpp_ops.linear(x, floats, None))
    weight[-1, -1] = 1 + 2.0**-20
    assert cpp_ops.pack(weight).dtype == torch.float32


@needs_bfloat16
def test_results_in_bfloat16_are_rounded_to_nearest_and_keep_nan():
    width = cpp_ops.load().panel_width()
    weight = torch.tensor([1.0, 2.0**-9]).expand(width, 2).bfloat16()
    x = torch.tensor([[1.0, 2], [1 + 2**-7, 2], [1, 2.5], [-3, 4], [1e38, 1], [torch.nan, 1]])
    exact = x @ weight[0].float()
    got = cpp_ops.linear(x.bfloat16(), cpp_ops.pack(weight), None)
    assert torch.equal(got[:-1, 0], exact[:-1].bfloat16()) and got[-1].isnan().all()
    assert cpp_ops.rms_norm(x.bfloat16(), weight[0], 1e-6)[-1].isnan().all()


@needs_bfloat16
@pytest.mark.parametrize("shape", [(33, 64), (64, 33)])
def test_a_bfloat16_weight_that_fits_no_panel_is_left_to_others(shape):
    assert cpp_ops.pack(torch.randn(shape).bfloat16()) is None


def load_in_bfloat16(folder):
    with tensors_default_to(torch.bfloat16, torch.device("cpu")):
        return load(folder)


@needs_bfloat16
@pytest.mark.parametrize("model", ["gqa-2", "llama", "attention-bias", "gemma2"])
def test_in_bfloat16_one_call_for_all_layers_changes_no_bit(get_checkpoint, model):
    built = load_in_bfloat16(get_checkpoint(model).folder)
    use_cpu_layers(built)
    assert (type(built.model) is CppDecoder) == (model != "gemma2")
    with tensors_default_to(torch.bfloat16, torch.device("cpu")):
        fast = logits_of(built)
        built.model.__class__ = Decoder
        assert torch.equal(logits_of(built), fast)


@needs_bfloat16
@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("model", ["gqa-2", "attention-bias", "experts", "llama", *ODD])
def test_kernels_in_bfloat16_are_as_near_to_float32_as_plain_layers(
    get_checkpoint, model, has_amx, monkeypatch
):
    """On a processor with AMX, the products are those of oneDNN."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    folder = get_checkpoint(model).folder
    exact = load(folder)
    plain_one, fast = load_in_bfloat16(folder), load_in_bfloat16(folder)
    for parameter, rounded in zip(exact.parameters(), plain_one.parameters()):
        parameter.copy_(rounded)
    use_cpu_layers(fast)
    weight = fast.model.layers[0].self_attn.o_proj.weight
    assert weight.is_mkldnn if has_amx else weight.dim() == 3
    expected = logits_of(exact)
    with tensors_default_to(torch.bfloat16, torch.device("cpu")):
        errors = [(logits_of(x).float() - expected).square().mean() for x in (plain_one, fast)]
    assert errors[1] < 1.5 * errors[0]


@needs_compiler
@pytest.mark.parametrize("model", ["gqa-2", "llama", "experts", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_call_for_all_layers_changes_no_bit(get_checkpoint, model, dtype):
    """Experts and norms behind layers are not among what the call computes."""
    built = load(get_checkpoint(model).folder)
    for parameter in built.parameters():
        parameter.copy_(parameter.to(dtype))
    use_cpu_layers(built)
    assert (type(built.model) is CppDecoder) == (model in ("gqa-2", "llama"))
    held = built.model.layers[0].self_attn.o_proj.weight.dtype
    assert held == dtype or dtype == torch.float16 and not cpp_ops.load().takes_float16()
    fast = logits_of(built)
    built.model.__class__ = Decoder
    assert torch.equal(logits_of(built), fast)


@needs_compiler
def test_layers_in_one_call_take_new_weights(checkpoint, make_llm):
    """The new weights need not fit bfloat16, as the old ones do."""
    llm = make_llm()
    model = llm.engine.runner.model
    new = tensors_of(checkpoint.folder)
    old = {name: tensor.bfloat16() for name, tensor in new.items()}
    llm.update_weights(old.items())
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    llm.update_weights(new.items())
    assert type(model.model) is CppDecoder
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.float32
    assert_greedy(llm, checkpoint)


@needs_compiler
def test_the_largest_logits_are_those_of_the_sampler():
    """The first of equals wins, 0 and -0 among them; rows without a finite largest get no token."""
    logits = torch.randint(-9, 9, (12, 5000)).float()
    logits[1] = -torch.inf
    logits[2, 4000], logits[3, 0], logits[4, 700] = torch.inf, torch.nan, -torch.nan
    logits[5, 1:] = -torch.inf
    logits[6] = -1
    logits[6, 3], logits[6, 9], logits[6, 2] = -0.0, 0.0, -torch.inf
    logits[7] = torch.linspace(-9, -3, 5000)
    rows = torch.zeros(len(logits))
    places = dict(temperatures=rows, seeds=rows.long(), positions=rows.long())
    for part in (logits, logits[:1], logits[:, :1], logits[:, :513]):
        of_part = {name: row[: len(part)] for name, row in places.items()}
        got, expected = cpp_ops.arg_max(part), sample(part, **of_part)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@needs_compiler
def test_a_weight_whose_outputs_fill_no_panel_is_left_to_others():
    assert cpp_ops.pack(torch.randn(cpp_ops.load().panel_width() + 1, 8)) is None


@in_each_dtype
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 24), (4, 4, 64), (6, 1, 16)])
@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_normed_rotated_and_stored_as_by_the_twin(heads, kv_heads, dim, norm, dtype):
    tokens, angles = 9, torch.rand(50, dim // 2)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q_weight, k_weight = torch.rand(2, dim).to(dtype) if norm else (None, None)
    slots = torch.tensor([7, -1, 31, 0, 2, 16, 17, 18, -1])
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    options = dict(head_dim=dim, num_kv_heads=kv_heads, q_weight=q_weight, k_weight=k_weight)
    options |= dict(eps=1e-6, cos_sin=table, positions=torch.arange(tokens) * 5, slot_mapping=slots)
    caches = [torch.zeros(2, 2, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    got, expected = [
        form.qk_norm_rope_store(qkv.clone(), **options, cache=KVCache(*cache))
        for form, cache in zip((cpp_ops, plain), caches)
    ]
    # The twin in bfloat16 rounds a norm twice before it rotates.
    close = {} if dtype == torch.float32 else dict(rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(*caches, **close)


@in_each_dtype
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 24), (4, 4, 64), (6, 1, 16)])
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("options", [(None, None), (20, None), (16, 2.0), (None, 0.7)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decode_attention_equals_its_twin(heads, kv_heads, dim, rows, options, has_sinks, dtype):
    lens = torch.tensor([1, 15, 16, 17, 40, 64, 3, 33, 5, 48, 2, 63], dtype=torch.int32)[-rows:]
    tables = torch.randperm(64)[: rows * 4].view(rows, 4).int()
    cache = torch.randn(2, 64, 16, kv_heads, dim).to(dtype)
    kv = PagedKV(KVCache(*cache), tables, lens)
    # q is a view, as of projected q, k and v.
    q = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)[:, :heads]
    sinks = torch.linspace(-4, 8, heads).to(dtype) if has_sinks else None
    wide = AttentionOptions(dim**-0.5, *options, sinks if sinks is None else sinks.float())
    wide_kv = PagedKV(KVCache(*cache.float()), tables, lens)
    expected = plain.decode_attention(q.float().contiguous(), wide_kv, wide)
    options = AttentionOptions(dim**-0.5, *options, sinks)
    assert_equals_twin(cpp_ops.decode_attention(q, kv, options), expected)


@needs_compiler
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("wrong", ["q", "k"])
def test_decode_attention_loses_no_nan(wrong, softcap):
    cache, q = torch.randn(2, 4, 16, 1, 64), torch.randn(2, 2, 64)
    (q if wrong == "q" else cache[0, 2])[0, 0, 3] = torch.nan
    tables, lens = torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([20, 17]).int()
    kv, options = PagedKV(KVCache(*cache), tables, lens), AttentionOptions(64**-0.5, None, softcap)
    for attend in (plain.decode_attention, cpp_ops.decode_attention):
        has_nan = attend(q, kv, options).isnan().all(dim=-1)
        assert has_nan.tolist() == [[True, wrong == "k"], [False, False]]


@needs_compiler
@pytest.mark.parametrize("lens_q", [[1, 5, 1, 7], [1, 1, 1, 1], [3, 2, 9, 4]])
@pytest.mark.parametrize("window", [None, 6])
def test_prompt_chunks_of_any_lengths_attend_as_in_plain_attention(checkpoint, lens_q, window):
    """Chunks of one token go to the decode kernel."""
    layer = load(checkpoint.folder).model.layers[0].self_attn
    layer.options = replace(layer.options, window=window)
    lens_k = [max(both) for both in zip(lens_q, [33, 21, 1, 48])]
    heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    kv = PagedKV(
        KVCache(*torch.randn(2, 64, 16, kv_heads, dim)), torch.arange(64).view(4, 16).int()
    )
    ends_q, ends_k = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (lens_q, lens_k)
    )
    metadata = PrefillMetadata(ends_q, ends_k, max(lens_q), max(lens_k), kv.block_tables)
    q = torch.randn(sum(lens_q), heads, dim)
    expected = layer.prefill(q, kv, metadata)
    layer.__class__ = layers.CppDecodeAttention
    torch.testing.assert_close(layer.prefill(q, kv, metadata), expected)


@needs_compiler
@pytest.mark.parametrize("model", ["gqa-2", "gqa-4", "attention-bias", "experts", "llama", *ODD])
def test_greedy_output_with_cpp_kernels_equals_transformers(get_checkpoint, make_llm, model):
    checkpoint = get_checkpoint(model)
    llm = make_llm(checkpoint.folder)
    assert llm.engine.runner.info.attention == "C++"
    assert_greedy(llm, checkpoint)


@needs_compiler
def test_plain_attention_stays_where_the_option_asks_for_it(checkpoint, make_llm):
    llm = make_llm(attention_backend="torch")
    layer = llm.engine.runner.model.model.layers[0]
    assert llm.engine.runner.info.attention == "plain" and type(layer.mlp) is layers.CppGatedMLP
    assert_greedy(llm, checkpoint)


@needs_compiler
def test_preemption_and_chunks_do_not_change_greedy_output_with_cpp_kernels(checkpoint, make_llm):
    llm = make_llm(num_kvcache_blocks=9, max_num_batched_tokens=16, overlap=True)
    assert_greedy(llm, checkpoint, max_tokens=60)
    assert_greedy(llm, checkpoint, PROMPTS[:1])


@needs_compiler
def test_an_mlp_that_is_computed_in_parts_computes_the_same(checkpoint, make_llm, monkeypatch):
    monkeypatch.setattr(layers, "ROWS", 7)
    assert_greedy(make_llm(), checkpoint)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A user at whose first start nothing is compiled yet; returns the folder of his cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp_ops.load.cache_clear()
    yield tmp_path / "cache" / "nanovllm"
    cpp_ops.load.cache_clear()


@pytest.fixture
def commands(monkeypatch):
    """The programs that are run, in their order."""
    run, seen = subprocess.run, []

    def spy(command, **options):
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    return seen


@pytest.fixture(scope="module")
def library():
    return cpp_ops.compile_library([*cpp_ops.find_compiler(), *cpp_ops.FLAGS])


def file_name() -> str:
    command = [*cpp_ops.find_compiler(), *cpp_ops.FLAGS]
    return cpp_ops.file_name(command, cpp_ops.SOURCE)


@pytest.fixture
def compiled(library, monkeypatch):
    """Lists the commands that would have compiled; what they would make is there already."""
    seen = []
    monkeypatch.setattr(cpp_ops, "compile_library", lambda to: seen.append(to) or library)
    return seen


@needs_compiler
def test_only_the_first_start_compiles(fresh, commands):
    assert cpp_ops.load()
    (kept,) = fresh.iterdir()
    assert kept.suffix == ".so"
    cpp_ops.load.cache_clear()
    assert cpp_ops.load()
    assert len(commands) == 1 and list(fresh.iterdir()) == [kept]


@needs_compiler
def test_what_is_kept_is_for_one_source_one_command_and_one_cpu(fresh, monkeypatch, tmp_path):
    def of_source(command):
        return cpp_ops.file_name(command, cpp_ops.SOURCE)

    names = [of_source(["g++", "-O1"]), of_source(["g++", "-O2"])]
    monkeypatch.setattr(cpp_ops, "this_cpu", lambda: "another one")
    names.append(of_source(["g++", "-O2"]))
    monkeypatch.setattr(cpp_ops, "SOURCE", tmp_path / "newer.cpp")
    (tmp_path / "newer.cpp").write_text("// another version")
    names.append(of_source(["g++", "-O2"]))
    assert len({*names}) == 4


@needs_compiler
def test_where_nothing_can_be_kept_each_start_compiles(fresh, commands):
    fresh.parent.write_text("no folder")
    for _ in range(2):
        assert cpp_ops.load()
        cpp_ops.load.cache_clear()
    assert len(commands) == 2


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5000],  # mapped, it ends the process with SIGBUS
        lambda data: data[:-1],
        lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
        lambda data: bytes(len(data)),  # a length without contents, as after a power loss
        lambda data: data[:-32],  # as versions without a checksum kept it
    ],
    ids=["empty", "cut off", "a byte short", "altered", "zeros", "without checksum"],
)
def test_a_damaged_library_is_not_loaded_and_is_compiled_again(fresh, compiled, damage):
    assert cpp_ops.load()
    (kept,) = fresh.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert start_anew() == ""
    assert kept.read_bytes()[-32:] == hashlib.sha256(kept.read_bytes()[:-32]).digest()
    compiled.clear()
    cpp_ops.load.cache_clear()
    assert cpp_ops.load() and not compiled, "the new one was kept"


def start_anew() -> str:
    """Load the kernels in a process of its own, which must live; returns what it logs."""

    def start() -> str:
        log = io.StringIO()
        logging.getLogger("nanovllm").addHandler(logging.StreamHandler(log))
        cpp_ops.load.cache_clear()
        assert cpp_ops.load()
        return log.getvalue()

    return in_fork(start)


@needs_compiler
def test_a_whole_library_that_cannot_be_loaded_here_is_compiled_again(fresh, compiled):
    with library_cache.open_cache() as cache:
        cache.keep(file_name(), b"of elsewhere")
    assert cpp_ops.load() and compiled
    compiled.clear()
    cpp_ops.load.cache_clear()
    assert cpp_ops.load() and not compiled


@needs_compiler
def test_a_library_gets_its_name_once_its_bytes_are_on_the_disk(fresh, compiled, monkeypatch):
    done = []

    def spy(name, call):
        def spied(*args, **options):
            if name != "fsync":
                done.append(name)
            else:
                is_folder = stat.S_ISDIR(os.fstat(args[0]).st_mode)
                size = os.fstat(args[0]).st_size
                done.append("fsync folder" if is_folder else f"fsync {size} bytes")
            return call(*args, **options)

        return spied

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, spy(name, getattr(os, name)))
    assert cpp_ops.load()
    (kept,) = fresh.iterdir()
    assert done == [f"fsync {kept.stat().st_size} bytes", "replace", "fsync folder"]


@needs_compiler
@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_library_that_cannot_be_kept_leaves_nothing_and_computes(
    fresh, compiled, monkeypatch, fails
):
    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, fails, fail)
    assert cpp_ops.load()
    assert not list(fresh.iterdir())


# Ends the process that loads it.
EVIL = """
#include <unistd.h>
__attribute__((constructor)) static void run() { _exit(99); }
"""


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A library that ends the process that loads it, with the checksum that belongs to it."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.cpp").write_text(EVIL)
    command = ["g++", "-shared", "-fPIC", str(folder / "evil.cpp"), "-o", str(folder / "evil.so")]
    subprocess.run(command, check=True)
    library = (folder / "evil.so").read_bytes()
    with pytest.raises(AssertionError, match=f"wait status {99 << 8}"):
        in_fork(lambda: ctypes.CDLL(str(folder / "evil.so")))
    return library + hashlib.sha256(library).digest()


def plant(folder: Path, library: bytes) -> Path:
    """Put a library where the next start looks for its own."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / file_name()
    path.write_bytes(library)
    path.chmod(0o600)
    return path


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(fresh, compiled, evil, mode):
    path = plant(fresh, evil)
    fresh.chmod(mode)
    said = start_anew()
    assert f"{fresh} may be written to by other users: " in said
    assert f"run chmod go-w {fresh}, or set XDG_CACHE_HOME to a folder of your own" in said
    assert path.read_bytes() == evil and list(fresh.iterdir()) == [path], "nothing is kept there"


@needs_compiler
@pytest.mark.parametrize("mode", [0o622, 0o660])
def test_a_library_that_others_may_write_to_is_not_loaded_and_is_replaced(
    fresh, compiled, evil, mode
):
    path = plant(fresh, evil)
    path.chmod(mode)
    said = start_anew()
    assert f"{path} may be written to by other users: it is not loaded" in said
    assert path.read_bytes() != evil and path.stat().st_mode & 0o777 == 0o600


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("owned", ["folder", "library", "folder behind a link"])
def test_what_another_user_owns_is_not_loaded(fresh, compiled, evil, tmp_path, owned):
    if owned == "folder behind a link":
        fresh.parent.mkdir()
        (tmp_path / "theirs").mkdir(mode=0o700)
        fresh.symlink_to(tmp_path / "theirs")
    path = plant(fresh, evil)
    os.chown(path if owned == "library" else fresh, 12345, 12345)
    said = start_anew()
    assert "belongs to another user, number 12345" in said
    assert (path.read_bytes() == evil) == (owned != "library"), "that one is replaced"
    assert "set XDG_CACHE_HOME" in said or owned == "library"


@needs_compiler
def test_a_link_in_the_librarys_place_is_not_followed(fresh, compiled, evil, tmp_path):
    path = plant(fresh, evil)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    start_anew()
    assert path.is_file() and not path.is_symlink(), "the compiled one takes the link's place"
    assert (tmp_path / "elsewhere").read_bytes() == evil


@needs_compiler
def test_a_folder_of_ones_own_may_lie_behind_a_link(fresh, compiled, tmp_path):
    fresh.parent.mkdir()
    (tmp_path / "large disk").mkdir(mode=0o700)
    fresh.symlink_to(tmp_path / "large disk")
    for _ in range(2):
        assert cpp_ops.load()
        cpp_ops.load.cache_clear()
    assert len(compiled) == 1


@needs_compiler
def test_what_was_checked_is_what_runs(fresh, compiled, evil, monkeypatch):
    """A file that changes after it was read changes nothing, as does another folder's name."""
    assert cpp_ops.load()
    (kept,) = fresh.iterdir()
    load_library = library_cache.load_library

    def late(library):
        kept.write_bytes(evil)
        return load_library(library)

    monkeypatch.setattr(cpp_ops, "load_library", late)
    cpp_ops.load.cache_clear()
    assert cpp_ops.load()
    assert kept.read_bytes() == evil


@needs_compiler
def test_where_nothing_can_run_from_memory_a_temporary_file_serves(fresh, compiled, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    assert cpp_ops.load()


@needs_compiler
def test_a_run_needs_nothing_that_linux_alone_has(
    fresh, compiled, checkpoint, make_llm, monkeypatch
):
    """As on macOS: there are neither /proc and /sys nor some functions of os."""
    open_file = io.open

    def open_elsewhere(file, *args, **options):
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return open_file(file, *args, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", open_elsewhere)
    for name in ("memfd_create", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert_greedy(make_llm(), checkpoint)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "g++ '", "false", "true"])
def test_without_a_compiler_that_works_plain_layers_compute(
    fresh, checkpoint, make_llm, monkeypatch, compiler
):
    monkeypatch.setenv("CXX", compiler)
    llm = make_llm()
    assert llm.engine.runner.info.attention == "plain"
    assert_greedy(llm, checkpoint)
    assert not fresh.exists() or not list(fresh.iterdir())


@pytest.mark.parametrize("has_compiler", [False, True])
@pytest.mark.parametrize("has_onednn", [False, True])
def test_products_run_with_and_without_compiler_and_onednn(
    fresh, checkpoint, make_llm, monkeypatch, has_compiler, has_onednn
):
    if not has_compiler:
        monkeypatch.setenv("CXX", "false")
    if not has_onednn:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    llm = make_llm()
    weights = [
        module.weight
        for module in llm.engine.runner.model.modules()
        if isinstance(module, layers.Packed)
    ]
    forms = {"oneDNN" if weight.is_mkldnn else weight.dim() for weight in weights}
    if not has_compiler:
        assert forms == ({"oneDNN"} if has_onednn else set())
    elif cpp_ops.find_compiler() is not None:
        assert 3 in forms and ("oneDNN" in forms) <= has_onednn
    assert_greedy(llm, checkpoint)


def test_packing_changes_neither_the_embedding_nor_how_many_parameters_are_told(
    get_checkpoint, make_llm
):
    folder = get_checkpoint("tied").folder
    packed, plain = (make_llm(folder, kernels=kernels).engine.runner for kernels in KERNELS)
    assert isinstance(packed.model.lm_head, layers.PackedLMHead)
    assert torch.equal(packed.model.model.embed_tokens.weight, plain.model.lm_head.weight)
    assert packed.info.num_parameters == plain.info.num_parameters


@needs_compiler
def test_the_compiler_may_come_with_options_as_in_make(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -O2 -DNAME='a b'")
    assert cpp_ops.find_compiler() == ["g++", "-O2", "-DNAME=a b"]
    assert cpp_ops.load()


@needs_compiler
def test_the_kernels_run_on_pytorchs_threads(fresh):
    """A second OpenMP library would have threads of its own, which spin beside PyTorch's."""
    assert cpp_ops.load()
    (library,) = fresh.iterdir()
    assert b"GOMP_parallel" in library.read_bytes()
    assert b"libgomp" not in library.read_bytes()


def test_another_attention_backend_is_refused(checkpoint):
    with pytest.raises(ValueError, match="kernels is 'plain', .* attention_backend is 'triton'"):
        LLM(checkpoint.folder, device="cpu", kernels="plain", attention_backend="triton")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_instruction", [False, True])
def test_in_other_dtypes_attention_is_plain_unless_the_processor_multiplies_them(
    make_llm, monkeypatch, dtype, has_instruction
):
    if not has_instruction:
        monkeypatch.setattr(cpp_ops, "load_bfloat16", lambda: None)
    llm = make_llm(dtype=dtype)
    has_kernels = dtype == "bfloat16" and cpp_ops.load_bfloat16() is not None
    assert llm.engine.runner.info.attention == ("C++" if has_kernels else "plain")
    assert layers.float32_is_faster(dtype) != has_kernels
    (output,) = llm.generate(PROMPTS[:1], greedy(4), use_tqdm=False)
    assert len(output["token_ids"]) == 4
