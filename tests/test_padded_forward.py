"""A step that is padded to one of a few sizes computes what it does as it is, in Triton's
interpreter: a CUDA graph only repeats it.
"""

from types import SimpleNamespace

import pytest
import torch
from model_helpers import BLOCK_SIZE, load, make_checkpoint
from test_fused_layers import CONFIGS, SIZES
from torch import nn
from transformers import Gemma2Config, Qwen3Config, Qwen3MoeConfig

pytest.importorskip("triton")

from nanovllm.backends.cuda import padded_forward
from nanovllm.backends.cuda.attention_backends import AttentionBackend
from nanovllm.backends.cuda.fused_layers import FusedDecoder, fuse, layers_of_dry_run
from nanovllm.backends.cuda.fused_quantised import FusedQuantised
from nanovllm.backends.cuda.padded_forward import PaddedInputs, sizes_for
from nanovllm.backends.cuda.triton.decode_attention import decode_attention
from nanovllm.backends.cuda.triton.prefill_attention import prefill_attention
from nanovllm.engine.batch_state import BatchState
from nanovllm.engine.recurrent_state import RecurrentState
from nanovllm.engine.snapshots import StateRows
from nanovllm.layers.attention import AttentionOptions, KVCache, SelfAttention
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.recurrent import RecurrentLayer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
TRITON = AttentionBackend("Triton", prefill_attention, decode_attention)
SLOTS, WIDTH = 12, 12  # batch slots; blocks of a sequence
WINDOWS_AND_CAPS = dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=6,
    attn_logit_softcapping=2.0,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, Qwen3Config(**SIZES))
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    make_checkpoint(folder, Gemma2Config(**SIZES, **WINDOWS_AND_CAPS))
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    sizes = SIZES | dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    make_checkpoint(folder, Qwen3MoeConfig(**sizes))
    return folder


@pytest.fixture(scope="module")
def delta_nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delta")
    make_checkpoint(folder, CONFIGS["qwen3.5"])
    return folder


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convolutions")
    make_checkpoint(folder, CONFIGS["lfm2"])
    return folder


class Step:
    """A step's inputs over caches of its own: sequences of `cached` tokens in batch slots 3, 4, ..
    go on, the first `decodes` of them by one token, the others by as many as `chunks` says.
    """

    def __init__(self, model, cached: list[int], decodes: int, chunks: list[int]) -> None:
        generator = torch.Generator().manual_seed(2)
        count, news = len(cached), [1] * decodes + chunks
        self.state = BatchState(SLOTS, WIDTH, BLOCK_SIZE, torch.device("cpu"))
        slots = torch.arange(3, 3 + count)
        blocks = torch.randperm(count * WIDTH, generator=generator)
        self.state.block_tables[slots] = blocks.int().view(count, WIDTH)
        ends = torch.tensor([length + new for length, new in zip(cached, news)])
        self.state.context_lens[slots] = ends.int()
        self.slots = torch.full((SLOTS,), SLOTS)
        self.slots[:decodes] = slots[:decodes]
        self.chunk_slots = slots[decodes:]

        total = sum(news)
        self.token_ids = torch.randint(101, (total,), generator=generator)
        self.positions = torch.cat(
            [torch.arange(length, length + new) for length, new in zip(cached, news)]
        )
        owners = slots.repeat_interleave(torch.tensor(news))
        blocks = self.state.block_tables[owners, self.positions // BLOCK_SIZE].long()
        lens = torch.tensor([0, *chunks])
        self.metadata = AttentionMetadata(
            blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE,
            decodes,
            ends[:decodes].int(),
            self.state.block_tables[slots[:decodes]],
            prefill=PrefillMetadata(
                lens.cumsum(0).int(),
                torch.cat((torch.zeros(1), ends[decodes:].cumsum(0))).int(),
                max(chunks),
                int(ends[decodes:].max()),
                self.state.block_tables[slots[decodes:]],
            ),
            logits_indices=torch.tensor([total - 1, 0]),
            state_rows=slots,
        )
        self.caches = []
        for layer in model.modules():
            if isinstance(layer, SelfAttention):
                shape = (2, count * WIDTH, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
                layer.kv_cache = KVCache(*torch.randn(shape, generator=generator))
                self.caches.append(layer.kv_cache)
        layers = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
        self.recurrent = RecurrentState(layers, torch.device("cpu"))
        self.recurrent.allocate(StateRows(SLOTS, 2))
        for layer in layers:
            layer.state.normal_(generator=generator)
        self.states = [layer.state for layer in layers]


@torch.inference_mode()
def run(model, token_ids, positions, metadata):
    with forward_context(metadata):
        return model(token_ids, positions)


@pytest.mark.parametrize(
    "cached, decodes, chunks",
    [
        ([0], 0, [5]),
        ([0, 9, 3], 0, [20, 1, 8]),
        ([4, 0], 1, [7]),
        ([1] * 6 + [2, 0], 6, [3, 4]),
    ],
)
def test_a_padded_step_computes_what_it_does_as_it_is(folder, cached, decodes, chunks, monkeypatch):
    compare(folder, cached, decodes, chunks, monkeypatch)


def test_a_padded_step_keeps_to_windows_and_caps(gemma, monkeypatch):
    compare(gemma, [20, 3, 15, 0], 2, [11, 9], monkeypatch)


@pytest.mark.parametrize("name", ["delta_nets", "convolutions"])
def test_a_padded_step_updates_the_states_of_its_sequences_alone(name, request, monkeypatch):
    compare(request.getfixturevalue(name), [0, 9, 3], 0, [20, 1, 8], monkeypatch)


@pytest.mark.parametrize("name", ["folder", "experts", "delta_nets", "convolutions"])
def test_what_lies_in_the_memory_of_padding_changes_no_result(name, request, monkeypatch):
    """Beside decodes and chunks. No kernel of attention writes rows of padding. Experts are the one
    layer that looks at all rows at once.
    """
    empty = torch.empty

    def poisoned(*args, **options):
        new = empty(*args, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", poisoned)
    compare(request.getfixturevalue(name), [3, 20, 12, 0, 6], 3, [11, 2], monkeypatch)


def compare(folder, cached, decodes, chunks, monkeypatch):
    monkeypatch.setattr(padded_forward, "FEW_DECODES", 4)
    plain_model = load(folder)
    plain = Step(plain_model, cached, decodes, chunks)
    expected = run(plain_model, plain.token_ids, plain.positions, plain.metadata)

    model = load(folder)
    fuse(model, TRITON)
    step = Step(model, cached, decodes, chunks)
    before = [state.clone() for state in step.states]
    padded = PaddedInputs(step.state, step.slots, [32, 64], step.recurrent if before else None)
    for one in (Step(model, [0, 30], 0, [30, 9]), step):  # another step was there before
        shape = padded.shape_for(one.metadata)
        padded.fill(one.token_ids, one.positions, one.metadata, one.chunk_slots, shape[0])
    attention = [layer for layer in model.modules() if isinstance(layer, SelfAttention)]
    for layer, cache in zip(attention, step.caches):
        layer.kv_cache = cache
    for layer, state in zip(step.recurrent.layers, step.states):
        layer.state = state
    size, rows = shape
    assert size in (32, 64) and size >= len(step.token_ids)
    assert rows == (0 if not decodes else 4 if decodes <= 4 else SLOTS)
    hidden = run(model, padded.token_ids[:size], padded.positions[:size], padded.metadata(*shape))
    torch.testing.assert_close(hidden[:2], expected, rtol=1e-4, atol=1e-4)
    for mine, plains in zip(step.caches, plain.caches):
        torch.testing.assert_close(mine.k, plains.k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.v, plains.v, rtol=1e-4, atol=1e-4)
    ours = step.metadata.state_rows
    others = [row for row in range(SLOTS + 4) if row not in ours and row != SLOTS]
    for mine, plains, old in zip(step.states, plain.states, before):
        torch.testing.assert_close(mine[ours], plains[ours], rtol=1e-4, atol=1e-4)
        assert torch.equal(mine[others], old[others])


def test_cleared_buffers_hold_a_step_that_changes_nothing(delta_nets):
    """Whatever larger step they held before: graphs are captured with them."""
    model = load(delta_nets)
    fuse(model, TRITON)
    step = Step(model, [0, 30], 0, [30, 9])
    padded = PaddedInputs(step.state, step.slots, [32, 64], step.recurrent)
    padded.fill(step.token_ids, step.positions, step.metadata, step.chunk_slots, 64)
    padded.clear()
    tensors = [*step.states, *[x for cache in step.caches for x in (cache.k, cache.v)]]
    before = [x.clone() for x in tensors]
    run(model, padded.token_ids[:32], padded.positions[:32], padded.metadata(32, 4))
    rows = [row for row in range(SLOTS + 4) if row != SLOTS]
    for x, old in zip(tensors[: len(step.states)], before):
        assert torch.equal(x[rows], old[rows])
    for x, old in zip(tensors[len(step.states) :], before[len(step.states) :]):
        assert torch.equal(x, old)


def test_a_step_too_large_for_every_size_or_busy_with_attention_is_launched_as_it_is(folder):
    step = Step(load(folder), [0, 3], 1, [20])
    padded = PaddedInputs(step.state, step.slots, [32])
    assert padded.shape_for(step.metadata) == (32, SLOTS)
    many = torch.zeros(33, dtype=torch.int64)
    for tokens, longest, indices in ((many, 20, many[:2]), (many[:9], 1 << 30, many[:2])):
        prefill = SimpleNamespace(max_seqlen_k=longest, cu_seqlens_q=many[:3])
        metadata = SimpleNamespace(
            slot_mapping=tokens, prefill=prefill, logits_indices=indices, num_decodes=1
        )
        assert padded.shape_for(metadata) is None


def test_many_short_chunks_and_many_samples_take_a_larger_size(folder):
    padded = PaddedInputs(BatchState(64, 1, 16, torch.device("cpu")), torch.zeros(64), [16, 32, 64])
    for chunks, samples, size in ((1, 1, 16), (2, 1, 32), (1, 17, 32), (4, 60, 64), (5, 1, None)):
        metadata = SimpleNamespace(
            slot_mapping=torch.zeros(9),
            prefill=SimpleNamespace(max_seqlen_k=9, cu_seqlens_q=torch.zeros(chunks + 1)),
            logits_indices=torch.zeros(samples),
            num_decodes=0,
        )
        assert padded.shape_for(metadata) == (size and (size, 0))


def test_the_larger_a_layer_the_fewer_tokens_are_padded(monkeypatch):
    monkeypatch.setattr(padded_forward, "BALANCE", 2048 * 100)
    assert sizes_for(nn.Linear(10, 10, bias=False), 1000) == [32, 64, 128, 256, 384, 512, 768]
    assert sizes_for(nn.Linear(100, 100, bias=False), 1000) == []


def test_an_outline_has_a_layer_of_each_kind_and_the_last():
    class Layer(nn.Module):
        def __init__(self, window, mlp, sinks=None):
            super().__init__()
            options = AttentionOptions(1.0, window, sinks=sinks)
            self.mixer = SimpleNamespace(options=options, rotary=None, head_dim=64, num_kv_heads=2)
            self.mlp = self.reader = mlp

    class Packed(FusedQuantised, nn.Linear):
        scheme = "fp8"

    def found(*kinds):
        """Of layers whose attention has a window or sinks, or which have another kind of MLP."""
        layers = [Layer(*kind) for kind in kinds]
        return [layers.index(layer) for layer in layers_of_dry_run(layers)]

    def packed(scheme):
        layer = nn.Linear(2, 2)
        layer.scheme = scheme
        return None, layer

    dense, sparse, local = (None, nn.Linear(2, 2)), (None, nn.ReLU()), (8, nn.Linear(2, 2))
    assert found(dense, dense, dense) == [0, 2]
    assert found(dense) == [0]
    assert found(dense, sparse, sparse, dense) == [0, 1, 3]
    assert found(local, local, dense, local, dense) == [0, 2, 4]
    assert found(dense, dense, sparse) == [0, 2]
    with_sinks = (None, nn.Linear(2, 2), torch.zeros(4))
    assert found(dense, with_sinks, with_sinks, dense) == [0, 1, 3]
    wide, half = (None, nn.Linear(2, 3)), (None, nn.Linear(2, 2).half())
    assert found(dense, wide, half, wide, half, dense) == [0, 1, 2, 5]
    assert found(dense, packed("fp8"), packed("fp8"), packed("int4"), dense) == [0, 1, 3, 4]
    fused = (None, Packed(2, 2))
    assert found(fused, fused, fused) == [0, 2]
    assert found(dense, fused, dense, fused, dense) == [0, 1, 4]
    # The second layer of this format reads what the first one left unnormed.
    assert found(dense, fused, fused, dense) == [0, 1, 2, 3]


def test_a_dry_run_runs_one_layer_of_each_kind_and_the_last(folder):
    model = load(folder)
    fuse(model, TRITON)
    assert type(model.model) is FusedDecoder
    step = Step(model, [0, 3], 1, [20])
    ran = []
    for layer in model.model.layers:
        layer.self_attn.qkv_proj.register_forward_hook(lambda *_: ran.append(1))
    model.model.dry_run = True
    hidden = run(model, step.token_ids, step.positions, step.metadata)
    assert hidden.shape == (2, 32) and len(ran) == 2
