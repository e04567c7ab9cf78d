"""Run batches on a CUDA device, so that it never waits for the host.

The model is fused. Decode steps are CUDA graphs. What goes to the device or comes from it passes
through pinned memory behind the host's back, and `launch` returns while the device works. Kernels
are compiled while the weights load, and as many KV blocks are made as the memory has room for.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, PrefillChunk
from nanovllm.engine.batch_state import DecodeInputs
from nanovllm.engine.kv_cache import block_bytes
from nanovllm.engine.model_runner import ModelRunner, SampledTokens, StepOutput
from nanovllm.gpu.cuda_graph import DecodeGraphs, sizes_up_to
from nanovllm.gpu.fused_layers import FusedSelfAttention, fuse, kind_of
from nanovllm.gpu.memory_budget import MemoryBudget
from nanovllm.gpu.precompile import find_uncompiled
from nanovllm.gpu.sampled_tokens import SampledTokensInFlight
from nanovllm.kernels.attention_backends import PLAIN_BACKEND, select_attention_backend
from nanovllm.kernels.triton import elementwise, sampling
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.context import PrefillMetadata
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.transformer import CausalLM

# A prefix that at least so many sequences share, of at least so many tokens, is read once for all,
# by a kernel of its own. It was measured far above these (256 sequences, 2,048 tokens, 1.44 s ->
# 0.68 s on an H200); where it begins to pay was not.
MIN_SHARING, MIN_SHARED_TOKENS = 16, 256
# PyTorch's attention by cuDNN plans each new length anew, for some 50 ms on an H200; these do not.
PLAIN_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GRAPH_BYTES = 2**20  # what each further graph takes: 0.8 MiB were measured; see _graph_bytes


class CUDAModelRunner(ModelRunner):
    def __init__(
        self,
        config: Config,
        hf_config,
        folder: str,
        *,
        device: torch.device,
        max_num_seqs: int,
        group: ParallelGroup = ParallelGroup(),
        **options: Any,
    ) -> None:
        torch.cuda.set_device(device)
        # Graphs are captured on no default stream, and libraries hold memory for each stream: so
        # all steps run on this one.
        self._stream = torch.cuda.Stream(device)
        self._budget = MemoryBudget(device, config.gpu_memory_utilization)
        self._has_own_kernels = config.kernels == "auto"
        self.graphs: DecodeGraphs | None = None
        with torch.cuda.device(device):
            # The slots that decode in a step, in a place that graphs know, and what it holds.
            self._slots = torch.full((max_num_seqs,), max_num_seqs, device=device)
            self._slots_hold: tuple[int, ...] | None = ()
            self._shared_len = torch.zeros(1, dtype=torch.int32, device=device)
            self._shared_len_holds: int | None = 0
        super().__init__(
            config,
            hf_config,
            folder,
            device=device,
            max_num_seqs=max_num_seqs,
            group=group,
            **options,
        )

    def _build_model(self, hf_config) -> CausalLM:
        model = super()._build_model(hf_config)
        config = self.config
        if not self._has_own_kernels:
            self._backend = PLAIN_BACKEND
            return model
        head_dim = next(
            module.head_dim for module in model.modules() if isinstance(module, SelfAttention)
        )
        self._backend = select_attention_backend(
            config.attention_backend, self.device, self.dtype, head_dim, self.block_size
        )
        self.attention_name = self._backend.name
        fuse(model, self._backend)
        if self.group.size > 1:
            from nanovllm.gpu.overlapped_decoder import overlap_all_reduces

            overlap_all_reduces(model)
        return model

    def _load(self, folder: str) -> None:
        """Load the weights, and compile kernels meanwhile."""
        if not self._has_own_kernels:
            return super()._load(folder)
        with ThreadPoolExecutor(1) as beside:
            compiling = beside.submit(self._compile_kernels)
            super()._load(folder)
            compiling.result()
        self.synchronize()

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Compile what decode steps and small prefills launch. Needs no weights."""
        torch.cuda.set_device(self.device)  # of this thread
        self.synchronize()  # the running state was written on the default stream
        pool = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(self.device,))
        with pool, torch.cuda.stream(self._stream):
            self._bind_cache(1)
            if self.make_resampler is not None:
                self.resampler = self.make_resampler(self)
            # One that does not compile says so when it is launched.
            for compile_kernel in find_uncompiled(self._run_small_steps):
                pool.submit(compile_kernel)

    def _run_small_steps(self) -> None:
        """Run a decode step of each size that is captured, one of 3 rows, and prefill attention."""
        decoder: Any = self.model.model
        decoder.outline = True  # all layers launch the same kernels: see FusedDecoder
        # Some kernels are made for a few rows' number.
        for size in (3, *sizes_up_to(self.max_num_seqs)):
            output = self._run_decode(self._slots[: min(size, self.max_num_seqs)])
        if self.resampler is not None:
            self.resampler.rehearse(output)
        decoder.outline = False
        for layer in {kind_of(layer): layer for layer in self.attention_layers}.values():
            self._prefill_small(layer)

    def _prefill_small(self, layer: SelfAttention) -> None:
        heads = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
        # A short prompt, a longer one, and one of which a part is cached.
        cached = min(512, self.max_model_len)
        for length, tables in ((32, None), (512, None), (cached, self.state.block_tables[:1])):
            qkv = torch.zeros(
                length, sum(heads), layer.head_dim, dtype=self.dtype, device=self.device
            )
            ends = torch.tensor([0, length], dtype=torch.int32, device=self.device)
            metadata = PrefillMetadata(ends, ends, length, length, tables)
            self._backend.prefill(
                *qkv.split(heads, dim=1),
                *self.kv_cache[0],
                metadata,
                layer.scale,
                layer.window,
                layer.softcap,
            )

    @torch.inference_mode()
    def _allocate(self) -> None:
        with torch.cuda.stream(self._stream):
            # A graph cannot hold what waits for the device, as plain attention does.
            is_plain = self._backend is PLAIN_BACKEND or not all(
                isinstance(layer, FusedSelfAttention) for layer in self.attention_layers
            )
            if not is_plain and not self.config.enforce_eager:
                self.graphs = DecodeGraphs(self._run_padded_decode, self.max_num_seqs)
            super()._allocate()
            if self.graphs:
                self.graphs.capture(self.graphs.sizes)

    def _count_blocks(self) -> int:
        block = block_bytes(self.attention_layers, self.block_size, self.dtype)
        return self._budget.num_blocks(
            block, self.max_blocks, self._run_largest_step, self._graph_bytes()
        )

    def _graph_bytes(self) -> int:
        """Memory that the CUDA graphs will take.

        The largest is measured; the others share its tensors' place.
        """
        if not self.graphs:
            return 0
        self._bind_cache(1)
        size = self.graphs.sizes[-1]
        self.graphs.capture([size])  # loads the kernels, which is no graph's memory
        self.graphs.clear()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        self.graphs.capture([size])
        torch.cuda.empty_cache()
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        self.graphs.clear()
        self._bind_cache(0)
        torch.cuda.empty_cache()
        return taken + GRAPH_BYTES * (len(self.graphs.sizes) - 1)

    def _run_largest_step(self) -> None:
        """Prefill the whole token budget in one KV block, and sample for every sequence."""
        self._bind_cache(1)
        budget, count = self.config.max_num_batched_tokens, self.max_num_seqs
        length = min(-(-budget // count), self.max_model_len)
        lengths = [
            min(length, budget - start) for start in range(0, min(budget, count * length), length)
        ]
        chunks = [
            PrefillChunk(i, [0] * length, 0, 0, [], True, 1.0, 0)
            for i, length in enumerate(lengths)
        ]
        self.launch(Batch(prefills=tuple(chunks))).wait()
        self._bind_cache(0)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> SampledTokens:
        """Start a step and return at once; `wait` on the result gives its sampled tokens."""
        is_plain = self._backend is PLAIN_BACKEND
        attention = sdpa_kernel(PLAIN_ATTENTION) if is_plain else nullcontext()
        with torch.cuda.stream(self._stream), attention:
            return super().launch(batch)

    def _upload_decode_slots(self, slots: tuple[int, ...]) -> Tensor:
        if slots != self._slots_hold:
            padding = (self.max_num_seqs,) * (self.max_num_seqs - len(slots))
            self._slots_hold = None  # until they are there: an interrupt may come first
            self._slots.copy_(self._upload(np.array(slots + padding, dtype=np.int64)))
            self._slots_hold = slots
        return self._slots[: len(slots)]

    def _decode_step(self, slots: Tensor, batch: Batch) -> StepOutput:
        """A graph's replay, or kernel by kernel."""
        count, shared_tokens = len(slots), batch.shared_blocks * self.block_size
        shares = count >= MIN_SHARING and shared_tokens >= MIN_SHARED_TOKENS
        if shares and shared_tokens != self._shared_len_holds:
            self._shared_len_holds = None
            self._shared_len.fill_(shared_tokens)
            self._shared_len_holds = shared_tokens
        graphs = self.graphs
        size = graphs.size_for(count) if graphs is not None else None
        if graphs is None or size is None:
            return self._run_padded_decode(count, shares)
        # Shared prefixes are rare enough to be captured when they come.
        if not graphs.has(size, shares):
            slots, self._slots_hold, slots_hold = self._slots.clone(), None, self._slots_hold
            self._slots.fill_(self.max_num_seqs)
            graphs.capture([size], shares)
            self._slots.copy_(slots)
            self._slots_hold = slots_hold
        return StepOutput(*(x[:count] for x in graphs.replay(size, shares)))

    def _run_padded_decode(self, count: int, shares: bool) -> StepOutput:
        return self._run_decode(self._slots[:count], self._shared_len if shares else None)

    def _sample_tokens(self, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        sample = sampling.sample if self._has_own_kernels else super()._sample_tokens
        return sample(logits, *args)

    def _advance(self, slots: Tensor) -> DecodeInputs:
        if not self._has_own_kernels:
            return super()._advance(slots)
        state = self.state
        return DecodeInputs(
            *elementwise.decode_inputs(
                slots, state.last_tokens, state.context_lens, state.block_tables, self.block_size
            )
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        # Pinned memory lets the copy run behind the host's back; PyTorch keeps it until the copy is
        # done.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def _answer(self, tokens: Tensor, logprobs: list[Any]) -> SampledTokensInFlight:
        return SampledTokensInFlight.send(tokens, logprobs)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.graphs:
            self.synchronize()
            self.graphs.clear()
        super().close()
        torch.cuda.empty_cache()
