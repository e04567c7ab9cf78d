"""The kernels of layers with a state, by the plain layers: in Triton's interpreter on a CPU, and
compiled, in bfloat16 too, on a GPU.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import plain_layers as plain
from effort import spread

from nanovllm.backends.cuda.fused_recurrent import FusedGatedDeltaNet, warmup_recurrent
from nanovllm.backends.cuda.triton import gated_delta, short_conv
from nanovllm.backends.cuda.triton.gated_delta import DeltaInputs
from nanovllm.backends.cuda.triton.prefill_attention import TiledPrefill, tile_queries
from nanovllm.backends.cuda.triton.short_conv import ChunkBlocks
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.parallel import ParallelGroup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32] + [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)] * HAS_GPU
# Relative errors, of outputs and of states. The twin computes in float64 from inputs of the dtype.
ERROR = {torch.float32: 5e-5, torch.bfloat16: 6e-3}
STATE_ERROR = {torch.float32: 5e-5, torch.bfloat16: 1e-4}
# Tokens of chunks, and whether they lie in a padded step.
LENGTHS = [([1], False), ([2, 1, 65], True), ([64, 128, 3], False), ([7, 193, 1], True)]
HALVES = [torch.bfloat16 if HAS_GPU else torch.float16]  # the interpreter lacks bfloat16
ROWS = 9  # of state; the rows of sequences lie among rows that nobody may touch
PADDING = 8
DECODES = 2  # tokens before chunks
HEADS = [(1, 1), (1, 3), (2, 4)]
DIMS = [(16, 32), (32, 16)] + [(128, 128)] * HAS_GPU


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def new(*shape):
    *shape, dtype = shape
    return torch.full(shape, 7.0, dtype=dtype, device=DEVICE)


def strided(x, width=8):
    """The same rows as a part of a wider tensor, whose other parts are NaN."""
    wide = torch.full((len(x), x.shape[1] + width), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def assert_near(actual, expected, error):
    assert actual.shape == expected.shape and torch.isfinite(actual).all()
    found = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert found < error, f"relative error {found:.2e}"


def others_of(rows):
    """The rows of state that none of `rows` is."""
    return [row for row in range(ROWS) if row not in rows and row != PADDING]


def step_of(lengths, rows, tiled):
    """A step of DECODES tokens, and then of chunks; or, if `tiled`, padded, with two chunks more.

    Returns the first token that the starts of chunks count from, rows, and blocks.
    """
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    rows = torch.tensor(rows, device=DEVICE)
    if not tiled:
        return DECODES, rows, ChunkBlocks.of(PrefillMetadata(ends, ends, max(lengths), 0, None))
    ends = F.pad(ends + DECODES, (0, 2), value=sum(lengths) + DECODES)
    tiles = tile_queries(ends, sum(lengths) // 64 + len(lengths) + 3)
    blocks = ChunkBlocks.of(TiledPrefill(ends, ends, 0, 0, None, tiles))
    return 0, F.pad(rows, (0, 2), value=PADDING), blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, kind", [(2, ""), (4, "silu"), (3, "gated"), (4, "")])
@pytest.mark.parametrize("channels, bias", [(40, True), (300, False)])
def test_a_convolution_of_tokens_equals_its_twin(width, kind, channels, bias, dtype):
    rows = torch.tensor([3, 0, 7, PADDING, PADDING], device=DEVICE)
    weight = randn(channels, width, dtype=dtype)
    bias = randn(channels, dtype=dtype) if bias else None
    got = randn(ROWS, width - 1, channels, dtype=dtype)
    want, before = got.clone(), got.clone()
    for _ in range(width + 1):
        x = strided(randn(5, channels * (3 if kind == "gated" else 1), dtype=dtype))
        options = dict(silu=kind == "silu", gated=kind == "gated")
        out, expected = strided(new(5, channels, dtype)), new(5, channels, dtype)
        short_conv.convolve_token(x, weight, bias, got, rows, out=out, **options)
        plain.convolve_token(x, weight, bias, want, rows, out=expected, **options)
        assert_near(out[:3], expected[:3], ERROR[dtype])
        assert torch.equal(got[rows[:3]], want[rows[:3]])
    kept = others_of([3, 0, 7])
    assert torch.equal(got[kept], before[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, kind", [(2, "gated"), (4, "silu")])
@pytest.mark.parametrize("lengths, tiled", LENGTHS, ids=str)
def test_a_convolution_of_chunks_equals_its_twin(lengths, width, kind, tiled, dtype):
    channels, total = 72, DECODES + sum(lengths)
    rows = [3, 0, 7][: len(lengths)]
    weight = randn(channels, width, dtype=dtype)
    got = randn(ROWS, width - 1, channels, dtype=dtype)
    want, before = got.clone(), got.clone()
    x = strided(randn(total, channels * (3 if kind == "gated" else 1), dtype=dtype))
    options = dict(silu=kind == "silu", gated=kind == "gated")
    begin, of, blocks = step_of(lengths, rows, tiled)
    out, expected = new(2, total, channels, dtype)
    args = x[begin:], weight, None
    short_conv.convolve_chunks(*args, got, of, blocks, out=out[begin:], **options)
    plain.convolve_chunks(*args, want, of, blocks, out=expected[begin:], **options)
    assert_near(out, expected, ERROR[dtype])
    assert torch.equal(out[:DECODES], expected[:DECODES])
    assert torch.equal(got[rows], want[rows])
    kept = others_of(rows)
    assert torch.equal(got[kept], before[kept])


class Layer:
    """Random inputs of a layer's delta rule: arguments of the kernels, and those of the twins, in
    float64.
    """

    def __init__(self, heads, dims, tokens, dtype, spread=1.0, state_dtype=torch.float32):
        key_heads, count = heads
        key_dim, value_dim = dims
        channels = 2 * key_heads * key_dim + count * value_dim
        qkv = strided(randn(tokens, channels, dtype=dtype))
        ba = strided(spread * randn(tokens, 2 * count, dtype=dtype), 3)
        gates = randn(count) * 2 - 1, randn(count)
        self.inputs = DeltaInputs(qkv, ba, *gates, key_heads, key_dim)
        self.exact = self.inputs._replace(qkv=qkv.double(), ba=self.exact_ba())
        self.state = randn(ROWS, count, key_dim, value_dim, dtype=state_dtype)
        self.out = strided(new(tokens, count * value_dim, dtype))
        self.before, self.want = self.state.clone(), self.state.double()
        self.expected = self.out.double()
        self.z = strided(randn(tokens, count * value_dim, dtype=dtype))
        self.norm_weight = 1 + 0.3 * randn(value_dim, dtype=dtype)

    def exact_ba(self):
        """b and a whose strengths in float64 are those of the layer, rounded to its dtype."""
        b, a = self.inputs.ba.chunk(2, dim=1)
        return torch.cat((b.sigmoid().double().logit(), a.double()), dim=1)

    def run(self, name, *args, begin=0):
        """Run the kernel of a name, and its twin, on the tokens from `begin` on."""
        of = slice(begin, None)
        norm = dict(norm_weight=self.norm_weight, eps=1e-6)
        kernel, twin = getattr(gated_delta, name), getattr(plain, name)
        inputs, out = self.inputs.rows(of), self.out[of]
        kernel(inputs, self.state, *args, z=self.z[of], out=out, **norm)
        norm["norm_weight"] = self.norm_weight.double()
        inputs, out = self.exact.rows(of), self.expected[of]
        twin(inputs, self.want, *args, z=self.z[of].double(), out=out, **norm)

    def check(self, rows, error):
        assert_near(self.state[rows], self.want[rows], error)
        kept = others_of(rows)
        assert torch.equal(self.state[kept], self.before[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("slice_dim", [gated_delta.TOKEN_SLICE, 16])
def test_the_delta_rule_of_tokens_equals_its_twin(slice_dim, dims, heads, dtype, monkeypatch):
    """Whether a program updates a head's whole state at once, or one slice after another."""
    monkeypatch.setattr(gated_delta, "TOKEN_SLICE", slice_dim)
    if slice_dim == 16:
        monkeypatch.setattr(gated_delta, "num_processors", lambda device: 1)
    layer = Layer(heads, dims, 5, dtype)
    rows = [3, 0, 7]
    layer.run("delta_rule_token", torch.tensor([*rows, PADDING, PADDING], device=DEVICE))
    assert_near(layer.out[:3], layer.expected[:3], ERROR[dtype])
    layer.check(rows, STATE_ERROR[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@spread(
    {
        "lengths, tiled": LENGTHS,
        "heads, dims": [(HEADS[2], DIMS[0]), (HEADS[1], DIMS[-1])],
    }
)
@pytest.mark.parametrize("width", [1.0, 8.0])  # decays from none to such that exp underflows
def test_the_delta_rule_of_chunks_equals_its_twin(heads, dims, lengths, tiled, width, dtype):
    rows = [3, 0, 7][: len(lengths)]
    layer = Layer(heads, dims, DECODES + sum(lengths), dtype, width)
    begin, of, blocks = step_of(lengths, rows, tiled)
    layer.run("delta_rule_chunks", of, blocks, begin=begin)
    assert_near(layer.out, layer.expected, ERROR[dtype])
    assert torch.equal(layer.out[:DECODES].double(), layer.expected[:DECODES])
    layer.check(rows, STATE_ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_large", [False, True])
def test_products_of_keys_may_take_their_columns_in_slices(is_large, dtype, monkeypatch):
    """They do where a program may take little shared memory."""
    monkeypatch.setattr(gated_delta, "has_large_shared_memory", lambda device: is_large)
    monkeypatch.setattr(gated_delta, "KEY_SLICE", 16)
    launched, launch = [], gated_delta.launch

    def note(kernel, grid, *args, **options):
        launched.append((kernel.__name__, args[-1]))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(gated_delta, "launch", note)
    layer = Layer(HEADS[2], (32, 16), DECODES + 67, dtype)
    begin, of, blocks = step_of([67], [4], False)
    layer.run("delta_rule_chunks", of, blocks, begin=begin)
    assert ("_solve_blocks_kernel", 32 if is_large else 16) in launched
    assert_near(layer.out, layer.expected, ERROR[dtype])
    layer.check([4], STATE_ERROR[dtype])


@pytest.mark.parametrize("state_dtype", HALVES)
@pytest.mark.parametrize("is_chunk", [False, True])
def test_states_of_half_the_bytes_are_rounded_once_a_step(is_chunk, state_dtype):
    layer = Layer((1, 3), (16, 32), DECODES + 70, torch.float32, state_dtype=state_dtype)
    begin, of, blocks = step_of([70], [4], False)
    if is_chunk:
        layer.run("delta_rule_chunks", of, blocks, begin=begin)
    else:
        layer.inputs, layer.exact = layer.inputs.rows(slice(1)), layer.exact.rows(slice(1))
        layer.out, layer.expected, layer.z = layer.out[:1], layer.expected[:1], layer.z[:1]
        layer.run("delta_rule_token", torch.tensor([4], device=DEVICE))
    assert_near(layer.out, layer.expected, ERROR[torch.float32])
    assert layer.state.dtype == state_dtype
    spacing = 2.0 * torch.finfo(state_dtype).eps * layer.want[4].abs()
    assert ((layer.state[4].double() - layer.want[4]).abs() < spacing / 2 + 1e-5).all()
    kept = others_of([4])
    assert torch.equal(layer.state[kept], layer.before[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_repeat_leave_blocks_exact(dtype):
    """Then the triangular system's powers grow to 1e18, and its inverse to 1."""
    layer = Layer((1, 1), (16, 16), DECODES + 130, dtype)
    for inputs in (layer.inputs, layer.exact):
        inputs.qkv[:, 16:32] = layer.inputs.qkv[0, 16:32]
    layer.inputs.ba[:] = torch.tensor([9.0, -9.0], device=DEVICE)  # strengths near 1, decays near 0
    layer.exact.ba[:] = layer.exact_ba()
    begin, of, blocks = step_of([130], [4], False)
    layer.run("delta_rule_chunks", of, blocks, begin=begin)
    assert_near(layer.out, layer.expected, ERROR[dtype])
    layer.check([4], STATE_ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decays_of_tokens_after_large_gates_are_exact(dtype):
    """A float32 sum of gates of some -10,000 would leave errors of 1e-3 in later decays."""
    layer = Layer((1, 1), (16, 16), DECODES + 64, dtype)
    _, a = layer.inputs.ba.chunk(2, dim=1)
    a[: DECODES + 32] = 300.0
    a[DECODES + 32 :] = torch.linspace(-7.0, -3.0, 32, device=DEVICE).unsqueeze(1)
    layer.exact.ba[:] = layer.exact_ba()
    layer.inputs.A_log.fill_(0.1)
    begin, of, blocks = step_of([64], [4], False)
    layer.run("delta_rule_chunks", of, blocks, begin=begin)
    assert_near(layer.out, layer.expected, ERROR[dtype])
    layer.check([4], {torch.float32: 2e-6, torch.bfloat16: 3e-5}[dtype])


def test_warmup_launches_the_delta_rule_for_few_chunks_and_for_many(monkeypatch):
    layer: Any = GatedDeltaNet(32, 1, 2, 16, 32, ParallelGroup(), conv_width=4, eps=1e-6)
    for module in (layer, layer.conv1d):
        module.state = torch.zeros(1, *module.state_shape)
    layer.__class__ = FusedGatedDeltaNet
    launched = set()

    def note(kernel, grid, *args, **options):
        launched.add((kernel.__name__, options.get("num_stages")))

    for module in (gated_delta, short_conv):
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(gated_delta, "is_hopper", lambda device: True)
    warmup_recurrent(layer)
    assert launched >= {("_pass_over_blocks_kernel", stages) for stages in (1, 2)}
