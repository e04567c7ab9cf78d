"""Compute from shapes the memory that models take on a card of 8 GiB, without a card or a run.

The layers run without memory, and each tensor that they make is counted until it is dropped. What
only a GPU can tell is assumed: LIBRARIES, and that PyTorch's allocator needs no more than what it
rounds up. tests/test_gpu.py starts the same models in 8 GiB of a GPU.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from nanovllm.apps.bench.shapes import QUANTIZED, SHAPES, model_config
from nanovllm.backends.cuda.attention_backends import AttentionBackend
from nanovllm.backends.cuda.fused_layers import FusedDecoder, fuse
from nanovllm.backends.cuda.fused_quantised import fused_weights, restore_weights
from nanovllm.backends.cuda.memory_budget import Room
from nanovllm.backends.cuda.padded_forward import num_weights, sizes_for
from nanovllm.backends.cuda.runner import GRAPH_BYTES, CUDAModelRunner
from nanovllm.backends.cuda.triton import dispatch
from nanovllm.backends.cuda.triton.decode_attention import decode_attention
from nanovllm.backends.cuda.triton.prefill_attention import prefill_attention
from nanovllm.backends.quantised.config import read_quantization
from nanovllm.backends.quantised.layers import use_quantised_layers
from nanovllm.engine.dtype import tensors_default_to
from nanovllm.engine.kv_cache import GIB, bytes_per_block
from nanovllm.layers.attention import KVCache, SelfAttention
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import build_model, read_model_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels must not be compiled")

MIB = 2**20
CARD = 8 * GIB
LIBRARIES = 300 * MIB  # kernels that are loaded, cuBLAS and its workspace, beside the CUDA context
META = torch.device("meta")
BLOCK, LENGTH, SEQUENCES = 256, 4096, 512  # the library's defaults
LAPTOP = dispatch.GPU((8, 9), 24, 99 << 10)  # an RTX 4060 of a laptop


class Peak(TorchDispatchMode):
    """The most bytes of tensors without memory that are made inside the block and held at a time.

    Sizes are rounded up as PyTorch's allocator does.
    """

    def __init__(self, held):
        super().__init__()
        self.not_counted = {x.untyped_storage()._cdata for x in held}
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.live = {key: of for key, of in self.live.items() if not of[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage()
                unit = 2 * MIB if memory.nbytes() > MIB else 512
                if memory._cdata not in self.not_counted:
                    size = -(-memory.nbytes() // unit) * unit
                    self.live[memory._cdata] = StorageWeakRef(memory), size
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.fixture(autouse=True)
def _kernels_are_not_launched(monkeypatch):
    def launch(*args, **options):
        pass

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: launch)
    for module in list(sys.modules.values()):
        if getattr(module, "gpu", None) is dispatch.gpu:
            monkeypatch.setattr(module, "gpu", lambda device: LAPTOP)


class Model:
    """A model without memory, and what it and its steps would take."""

    def __init__(self, shape, quantization=None):
        config = model_config(shape)
        if quantization in QUANTIZED:
            config["quantization_config"], quantization = QUANTIZED[quantization], None
        formats = read_quantization(config.get("quantization_config"), quantization)
        exchange = formats and partial(use_quantised_layers, quantization=formats)
        with tensors_default_to(torch.bfloat16, META):
            self.model = build_model(
                read_model_config(config), ParallelGroup(), LENGTH, exchange
            ).eval()
        fuse(self.model, AttentionBackend("Triton", prefill_attention, decode_attention))
        assert type(self.model.model) is FusedDecoder
        self.model.model.dry_run = True  # a layer drops its tensors before the next begins
        self.attention = [x for x in self.model.modules() if isinstance(x, SelfAttention)]
        self.block = bytes_per_block(self.attention, BLOCK, torch.bfloat16)
        for layer in self.attention:
            shape = 1, BLOCK, layer.num_kv_heads, layer.head_dim
            kv = [torch.empty(shape, dtype=torch.bfloat16, device=META) for _ in range(2)]
            layer.kv_cache = KVCache(*kv)
        self.held = [*self.model.parameters(), *self.model.buffers()]
        restore_weights(self.model)
        for weight in fused_weights(self.model):
            copies = (getattr(weight, name, None) for name in ("factors", "block_scales"))
            self.held += [copy for copy in copies if copy is not None]
        self.weights = sum({x.untyped_storage()._cdata: x.nbytes for x in self.held}.values())

    @torch.inference_mode()
    def step(self, tokens, sequences, decodes=False):
        """Count the bytes of a step's tensors, logits included."""

        def new(*shape, dtype=torch.int64):
            return torch.empty(shape, dtype=dtype, device=META)

        caches = [x for layer in self.attention for x in (layer.kv_cache.k, layer.kv_cache.v)]
        with Peak([*self.held, *caches]) as memory:
            if decodes:
                lens, tables = new(tokens, dtype=torch.int32), new(tokens, LENGTH // BLOCK)
                metadata = AttentionMetadata(new(tokens), tokens, lens, tables.int())
            else:
                ends, length = new(sequences + 1, dtype=torch.int32), -(-tokens // sequences)
                prefill = PrefillMetadata(ends, ends, length, length, None)
                wanted = new(sequences)
                metadata = AttentionMetadata(
                    new(tokens), 0, None, None, prefill=prefill, logits_indices=wanted
                )
            with forward_context(metadata):
                logits = self.model.compute_logits(self.model(new(tokens), new(tokens)))
            assert len(logits) == sequences
        return memory.peak

    def graphs(self, most):
        """Count the bytes of CUDA graphs: the largest share their memory with all others."""
        sizes = sizes_for(self.model.model.layers[0], most)
        largest = self.step(SEQUENCES, SEQUENCES, decodes=True)
        if sizes:
            largest = max(largest, self.step(sizes[-1], min(sizes[-1], SEQUENCES)))
        return largest + GRAPH_BYTES * (2 * 19 + 3 * len(sizes))


def count(model, card):
    """Let a runner count the bytes that KV may take. Returns them and the step's token budget."""
    runner = SimpleNamespace(
        max_num_batched_tokens=16384,
        max_num_seqs=SEQUENCES,
        block_size=BLOCK,
        group=ParallelGroup(),
        graphs=None,
        _run_largest_step=lambda: model.step(runner.max_num_batched_tokens, SEQUENCES),
        _graph_bytes=lambda: model.graphs(runner.max_num_batched_tokens),
    )

    def measure(block, run_largest_step, graphs, may_fail):
        taken = model.weights + run_largest_step() + graphs + LIBRARIES
        return Room(card - taken, taken, card, card, 1.0)

    runner._budget = SimpleNamespace(measure=measure)
    least = LENGTH // BLOCK * model.block
    return CUDAModelRunner._count_bytes(runner, model.block, least), runner.max_num_batched_tokens


FIT = {
    "8B INT4": (SHAPES["qwen3-8b"], "gptq", 4096),
    "0.6B bfloat16": (SHAPES["qwen3-0.6b"], None, 16384),
    "4B FP8": (SHAPES["qwen3-4b"], "fp8", 8192),
}


@pytest.mark.parametrize("name", FIT)
def test_a_card_of_8_gib_holds_a_model_its_graphs_and_4096_tokens(name):
    shape, quantization, budget = FIT[name]
    model = Model(shape, quantization)
    left, tokens = count(model, CARD)
    print(f"{name}: weights {model.weights / GIB:.2f}, graphs {model.graphs(tokens) / GIB:.2f}, ")
    print(f"{tokens} tokens {model.step(tokens, SEQUENCES) / GIB:.2f}, left {left / GIB:.2f} GiB")
    assert tokens == budget and left >= max(tokens, LENGTH) // BLOCK * model.block
    numbers = shape.layers * (
        2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
        + 3 * shape.hidden * shape.intermediate
    )
    counted = sum(num_weights(layer) for layer in model.model.model.layers)
    assert counted == pytest.approx(numbers, rel=1e-3), "each counts once, however few bits hold it"


def test_a_model_that_does_not_fit_says_what_would():
    model = Model(SHAPES["qwen3-8b"]._replace(layers=2), "fp8")
    with pytest.raises(ValueError, match="and leave 0.0 GiB .* weights of fewer bytes: quant"):
        count(model, CARD // 4)
    with pytest.raises(ValueError, match="lower max_model_len to 2048 or less, set kv_cache_dtype"):
        Room(8 * 100 + 99, 5 * GIB, GIB, CARD, 0.9).check(16 * 100, 100, BLOCK)
    Room(1600, 5 * GIB, GIB, CARD, 0.9).check(16 * 100, 100, BLOCK)


def test_a_budget_is_halved_no_further_than_sequences_need(monkeypatch):
    """Each decoding sequence takes a token of a step."""
    budgets = []

    class Tiny:
        block, weights = 1, 0

        def step(self, tokens, sequences):
            budgets.append(tokens)
            return 2 * CARD

        def graphs(self, most):
            return 0

    with pytest.raises(ValueError, match="lower max_num_seqs"):
        count(Tiny(), CARD)
    assert budgets == [16384, 8192, 4096, 2048, 1024, 512]
