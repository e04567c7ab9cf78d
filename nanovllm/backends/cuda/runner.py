"""The model runner for CUDA devices. It keeps the device from waiting for the host.

The model's layers are fused. A decode step is one CUDA graph. The forward pass of a step with
prompts is a graph, too, if the host would take longer to launch its kernels than the device to run
them. Copies to and from the device pass through pinned memory while the host goes on, and `launch`
returns while the device works. Kernels are compiled while the weights load. The KV cache gets as
many blocks as the memory has room for.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.backends.cuda.attention_backends import PLAIN_BACKEND, select_attention_backend
from nanovllm.backends.cuda.cuda_graph import SIZES, Graphs, size_for, sizes_up_to
from nanovllm.backends.cuda.fused_layers import (
    FusedDecoder,
    FusedGatedMLP,
    FusedMixtureOfExperts,
    FusedSelfAttention,
    formats_of,
    fuse,
    kind_of,
)
from nanovllm.backends.cuda.fused_quantised import (
    arrange_weights,
    await_weights,
    drop_copies,
    restore_weights,
)
from nanovllm.backends.cuda.fused_recurrent import FUSED_RECURRENT, warmup_recurrent
from nanovllm.backends.cuda.invariant import (
    approve_products,
    check_model,
    invariant_attention,
    make_prompt_records,
    warmup_products,
)
from nanovllm.backends.cuda.memory_budget import MemoryBudget
from nanovllm.backends.cuda.overlapped_decoder import (
    MIN_ROWS,
    OverlappedDecoder,
    overlap_all_reduces,
)
from nanovllm.backends.cuda.padded_forward import PaddedInputs, sizes_for
from nanovllm.backends.cuda.precompile import begin_hashing, compile_kernels
from nanovllm.backends.cuda.products import INVARIANT
from nanovllm.backends.cuda.sampled_tokens import SampledTokensInFlight
from nanovllm.backends.cuda.triton import elementwise, sampler
from nanovllm.backends.cuda.triton.dispatch import MAX_ROWS
from nanovllm.backends.cuda.triton.prefill_attention import TiledPrefill, tile_queries
from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits, PrefillChunk
from nanovllm.engine.batch_state import DecodeInputs
from nanovllm.engine.model_runner import ModelRunner, PrefillInputs, SampledTokens, StepOutput
from nanovllm.layers.attention import PagedKV, SelfAttention
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.gated_delta import GatedDeltaNet
from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models.lfm2 import GatedConvolution
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM

# A prefix of at least MIN_SHARED_TOKENS tokens that at least MIN_SHARING sequences share is read
# once for all of them, by a kernel of its own. That was measured far above these limits (256
# sequences, 2,048 tokens: 1.44 s -> 0.68 s on an H200); where it begins to pay was not measured.
MIN_SHARING, MIN_SHARED_TOKENS = 16, 256
# The kinds of PyTorch's attention that plain attention may use. cuDNN's is not among them: it plans
# each new length anew, which takes some 50 ms on an H200.
PLAIN_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FEWEST_TOKENS = 512  # the least token budget of a step that is halved to save memory
GRAPH_BYTES = 2**20  # the size of a further graph (0.8 MiB were measured); see _graph_bytes


class CUDAModelRunner(ModelRunner):
    """A model runner on one CUDA device."""

    takes_all_memory = True

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        folder: str,
        *,
        device: torch.device,
        group: ParallelGroup = ParallelGroup(),
        **options: Any,
    ) -> None:
        begin_hashing()
        torch.cuda.set_device(device)
        # Graphs cannot be captured on the default stream, and libraries hold memory for each
        # stream: so all steps run on this one.
        self._stream = torch.cuda.Stream(device)
        self._budget = MemoryBudget(device, config.gpu_memory_utilization)
        self._has_own_kernels = config.kernels == "auto"
        self.graphs: Graphs | None = None
        num_slots = config.num_batch_slots
        self.decode_sizes = sizes_up_to(num_slots)
        self._padded: PaddedInputs | None = None  # inputs of the graphs of steps with prompts
        self._chunk_slots: Tensor | None = None  # batch slots of the step's prompt chunks
        with torch.cuda.device(device):
            # The batch slots that decode in a step, in a fixed buffer that graphs read. The host
            # keeps a copy of the buffer's values, which is None while they are unknown. The same
            # holds for _shared_len, the number of tokens in a shared prefix.
            self._slots = torch.full((num_slots,), num_slots, device=device)
            self._slots_hold: tuple[int, ...] | None = ()
            self._shared_len = torch.zeros(1, dtype=torch.int32, device=device)
            self._shared_len_holds: int | None = 0
        super().__init__(config, model_config, folder, device=device, group=group, **options)

    def _build_model(self, model_config: ModelConfig) -> CausalLM:
        model = super()._build_model(model_config)
        config = self.config
        if not self._has_own_kernels:
            self._backend = PLAIN_BACKEND
            return model
        if config.batch_invariant:
            self._backend = invariant_attention()
            fuse(model, self._backend, INVARIANT)
            check_model(model, self.dtype)
            if self.score_prompts is not None:
                self.score_prompts = partial(self.score_prompts, make=make_prompt_records)
            self.attention_name = self._backend.name
            return model
        layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
        self._backend = select_attention_backend(
            config.attention_backend,
            self.device,
            self.dtype,
            head_dim=max(layer.head_dim for layer in layers),
            block_size=self.block_size,
            sinks=any(layer.sinks is not None for layer in layers),
            fp8_kv=config.kv_cache_dtype == "fp8",
        )
        fuse(model, self._backend)
        if not all(isinstance(layer, FusedSelfAttention) for layer in layers):
            self._backend = PLAIN_BACKEND  # some layers stay plain, and compute attention so
        self.attention_name = self._backend.name
        if self.group.size > 1:
            overlap_all_reduces(model)
        return model

    def _fill(self, fill: Callable[[nn.Module], None]) -> None:
        """Load the weights, and compile kernels meanwhile."""
        if not self._has_own_kernels:
            return super()._fill(fill)
        await_weights(self.model)
        with ThreadPoolExecutor(1) as beside:
            compiling = beside.submit(self._compile_kernels)
            super()._fill(fill)
            compiling.result()
        arrange_weights(self.model)  # compiling used weights that were not read yet
        self.synchronize()

    @torch.inference_mode()
    def _compile_kernels(self) -> None:
        """Compile the kernels that decode steps and small prefills launch. Needs no weights."""
        torch.cuda.set_device(self.device)  # PyTorch keeps the current device by thread
        self.synchronize()  # the running state was written on the default stream
        pool = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(self.device,))
        with pool, torch.cuda.stream(self._stream):
            self._bind_cache(1)
            if self.make_resampler is not None:
                self.resampler = self.make_resampler(self)
            compile_kernels(self._run_small_steps, pool)

    def _run_small_steps(self) -> None:
        """Launch the kernels of all decode steps, and those of attention and MLPs in prefills.

        Decode steps of every captured size run, and one of 3 rows: for so few rows there is a
        kernel for each number of rows, and no graph has 3. Prompts of few tokens launch the kernels
        of decode steps with as many rows, which may be more than there are sequences.
        """
        of_prompts = [size for size in SIZES if size <= min(MAX_ROWS, self.max_num_batched_tokens)]
        with self._dry_run():
            for size in sorted({3, *of_prompts, *self.decode_sizes}):
                output = self._run_decode(self._slots.new_full((size,), self.max_num_seqs))
            self._answer(output._replace(tokens=output.tokens[:1]), [])
        if self.resampler is not None:
            self.resampler.warmup(output)
        layers = [x for x in self.attention_layers if isinstance(x, FusedSelfAttention)]
        for layer in {kind_of(layer): layer for layer in layers}.values():
            self._run_attention(layer)
        recurrent = [layer for layer in self.model.modules() if isinstance(layer, FUSED_RECURRENT)]
        for mixer in {formats_of(mixer): mixer for mixer in recurrent}.values():
            warmup_recurrent(mixer)
        mlps = [layer for layer in self.model.modules() if isinstance(layer, FusedGatedMLP)]
        for mlp in {formats_of(mlp): mlp for mlp in mlps}.values():
            mlp.warmup()
        mixtures = [x for x in self.model.modules() if isinstance(x, FusedMixtureOfExperts)]
        for mixture in {formats_of(mixture): mixture for mixture in mixtures}.values():
            mixture.warmup(self.max_num_batched_tokens)
        if self.config.batch_invariant:
            warmup_products(self.model)

    @contextmanager
    def _dry_run(self) -> Iterator[None]:
        """Let the model run few layers, which launch every kernel it has: its outline."""
        decoder: Any = self.model.model
        decoder.dry_run = True  # only FusedDecoder reads it: others run all layers
        try:
            yield
        finally:
            decoder.dry_run = False

    def _run_attention(self, layer: FusedSelfAttention) -> None:
        """Launch a layer's attention kernels for prompts, for sequences that decode beside prompts,
        and for shared prefixes.

        The prompts are a short one, a longer one, and one with a cached part.
        """
        # Before a level-2 sleep, sequences had blocks that the cache of this run does not have.
        tables = torch.zeros_like(self.batch_state.block_tables[:1])
        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        options: dict[str, Any] = dict(dtype=self.dtype, device=self.device)

        def run(length: int, prefill: PrefillMetadata) -> None:
            ints = torch.zeros(2, length, dtype=torch.int64, device=self.device)
            metadata = AttentionMetadata(slot_mapping=ints[1] - 1, num_decodes=0, prefill=prefill)
            with forward_context(metadata):
                layer.heads(torch.zeros(length, width, **options), positions=ints[0])

        kinds = [(32, None), (512, None), (512, tables)]
        for length, table in [(min(n, self.max_model_len), table) for n, table in kinds]:
            ends = torch.tensor([0, length], dtype=torch.int32, device=self.device)
            run(length, PrefillMetadata(ends, ends, length, length, table))
        if self._backend.takes_tiles:
            run(length, TiledPrefill(ends, ends, 0, 0, tables, tile_queries(ends, 8)))
        for size in self.decode_sizes:
            q = torch.zeros(size, layer.num_heads, layer.head_dim, **options)
            lens = torch.ones(size, dtype=torch.int32, device=self.device)
            kv = PagedKV(layer.kv_cache, tables.repeat(size, 1), lens)
            layer.backend.decode(q, kv, layer.options)
            if size >= MIN_SHARING and not self.config.batch_invariant:
                rows = layer.room_for_codes(q.flatten(1))
                layer.backend.decode(
                    q, kv, layer.options, shared_prefix_len=self._shared_len, out=rows
                )

    @torch.inference_mode()
    def allocate(self) -> None:
        with torch.cuda.stream(self._stream):
            restore_weights(self.model)
            if self.config.batch_invariant:
                approve_products(self.model, {*SIZES, *self.decode_sizes})
            # Plain attention, plain experts and plain recurrent layers wait for the device, which a
            # graph cannot hold.
            is_plain = self._backend is PLAIN_BACKEND or any(
                isinstance(module, (MixtureOfExperts, GatedDeltaNet, GatedConvolution))
                and not isinstance(module, (FusedMixtureOfExperts, *FUSED_RECURRENT))
                for module in self.model.modules()
            )
            if not is_plain and not self.config.enforce_eager:
                self.graphs = Graphs()
                self._padded = self._make_padded_inputs()
            super().allocate()
            if self.graphs is not None:
                self._capture_largest()
                for size in reversed(self.decode_sizes[:-1]):
                    self._capture_decode(size)

    def release(self) -> None:
        """Free the weights and the KV cache, and the graphs, which hold their addresses."""
        self.synchronize()
        if self.graphs is not None:
            self.graphs.clear()
        self.graphs = self._padded = None
        with torch.cuda.stream(self._stream):
            self._slots.fill_(self.max_num_seqs)  # padding: the next capture needs it
        self._slots_hold = ()
        drop_copies(self.model)
        super().release()
        self.synchronize()
        torch.cuda.empty_cache()

    def _make_padded_inputs(self) -> PaddedInputs | None:
        """Make the buffers for graphs of steps with prompts; None: there are no such graphs."""
        decoder = self.model.model
        if not self._backend.takes_tiles or not isinstance(decoder, FusedDecoder):
            return None
        most = self.max_num_batched_tokens
        if isinstance(decoder, OverlappedDecoder):
            most = min(most, MIN_ROWS - 1)  # steps with overlapped all-reduces are no graphs
        sizes = sizes_for(decoder.layers[0], most)
        recurrent = self.recurrent if self.is_recurrent else None
        return PaddedInputs(self.batch_state, self._slots, sizes, recurrent) if sizes else None

    def _count_bytes(self, block_bytes: int, least: int) -> int:
        """Count the bytes that are left beside the largest step.

        If too few are left, halve the step's token budget, because most of a step's memory grows
        with it. A step has no use for more tokens than the KV cache has room for.
        """
        fewest = min(self.max_num_batched_tokens, max(self.max_num_seqs, FEWEST_TOKENS))
        while True:
            room = self._budget.measure(
                block_bytes,
                self._run_largest_step,
                self._graph_bytes(),
                may_fail=self.group.size == 1,  # other ranks would wait for this one's sums
            )
            tokens = self.max_num_batched_tokens
            fits = room.left >= max(least, -(-tokens // self.block_size) * block_bytes)
            if self.group.minimum(int(fits)) or tokens <= fewest:
                break
            self.max_num_batched_tokens = max(tokens // 2, fewest)
            if self.graphs is not None:
                self._padded = self._make_padded_inputs()
        room.check(least, block_bytes, self.block_size)
        return room.left

    def _graph_bytes(self) -> int:
        """Estimate the bytes that the CUDA graphs will take.

        The largest graphs are measured. The others keep their tensors in the same memory, and take
        GRAPH_BYTES each.
        """
        if self.graphs is None:
            return 0
        self._bind_cache(1)
        self._capture_largest()  # loads the kernels, whose memory must not be counted
        self.graphs.clear()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        self._capture_largest()
        torch.cuda.empty_cache()
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        self.graphs.clear()
        self._bind_cache(0)
        torch.cuda.empty_cache()
        # Decode steps with and without a shared prefix; steps with prompts and no, few or many
        # decoding sequences.
        count = 2 * len(self.decode_sizes) + 3 * (len(self._padded.sizes) if self._padded else 0)
        return taken + GRAPH_BYTES * count

    def _capture_largest(self) -> None:
        """Capture the graphs whose memory has room for the tensors of all other graphs."""
        self._capture_decode(self.decode_sizes[-1])
        if self._padded is not None:
            size = self._padded.sizes[-1]
            self._capture_forward(size, min(size, self.max_num_seqs))

    def _run_largest_step(self) -> None:
        """Prefill the whole token budget in one KV block, and sample for every sequence."""
        self._bind_cache(1)
        graphs, self.graphs = self.graphs, None  # a graph captured now would hold this cache
        budget, count = self.max_num_batched_tokens, self.max_num_seqs
        length = min(-(-budget // count), self.max_model_len)
        starts = range(0, min(budget, count * length), length)
        chunks = [
            PrefillChunk(
                batch_slot=slot,
                token_ids=[0] * min(length, budget - start),
                start=0,
                write_from=0,
                block_table=[],
                is_last=True,
                temperature=1.0,
                seed=0,
            )
            for slot, start in enumerate(starts)
        ]
        try:
            self.launch(Batch(prefills=tuple(chunks))).wait()
        finally:
            self.graphs = graphs
            self._bind_cache(0)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> SampledTokens:
        """Start a step and return at once; `wait` on the result gives its sampled tokens."""
        is_plain = self._backend is PLAIN_BACKEND
        attention = sdpa_kernel(PLAIN_ATTENTION) if is_plain else nullcontext()
        with torch.cuda.stream(self._stream), attention:
            return super().launch(batch)

    def sample_constrained(self, edits: LogitsEdits) -> SampledTokens:
        with torch.cuda.stream(self._stream):
            return super().sample_constrained(edits)

    def read_logits(self, edits: LogitsEdits, rows: list[int]) -> np.ndarray:
        with torch.cuda.stream(self._stream):
            return super().read_logits(edits, rows)

    def _upload_decode_slots(self, slots: tuple[int, ...]) -> Tensor:
        if slots != self._slots_hold:
            padding = (self.max_num_seqs,) * (self.max_num_seqs - len(slots))
            self._slots_hold = None  # the values are unknown if an interrupt stops the copy
            self._slots.copy_(self._upload(np.array(slots + padding, dtype=np.int64)))
            self._slots_hold = slots
        return self._slots[: len(slots)]

    def _decode_step(self, slots: Tensor, batch: Batch) -> StepOutput:
        """Replay the graph for the step's size if there is one; otherwise launch its kernels."""
        count, shared_tokens = len(slots), batch.shared_blocks * self.block_size
        shares = count >= MIN_SHARING and shared_tokens >= MIN_SHARED_TOKENS
        shares &= not self.config.batch_invariant
        if shares and shared_tokens != self._shared_len_holds:
            self._shared_len_holds = None
            self._shared_len.fill_(shared_tokens)
            self._shared_len_holds = shared_tokens
        graphs, size = self.graphs, size_for(count, self.decode_sizes)
        if graphs is None or size is None:
            return self._run_padded_decode(count, shares)
        # Shared prefixes are rare: their graphs are captured when the first one comes.
        if ("decode", size, shares) not in graphs:
            with self._slots_of_padding():
                self._capture_decode(size, shares)
        return StepOutput(*(x[:count] for x in graphs.replay(("decode", size, shares))))

    @contextmanager
    def _slots_of_padding(self) -> Iterator[None]:
        """Fill all slots with padding inside the block, so that no sequence decodes there."""
        slots, self._slots_hold, slots_hold = self._slots.clone(), None, self._slots_hold
        self._slots.fill_(self.max_num_seqs)
        yield
        self._slots.copy_(slots)
        self._slots_hold = slots_hold

    def _capture_decode(self, size: int, shares: bool = False) -> None:
        """Capture a decode step of `size` rows, after a dry run of it.

        All slots must be padding, because the dry run changes the state of slots.
        """
        assert self.graphs is not None
        with self._dry_run():
            self._run_padded_decode(size, shares)

        def run() -> tuple[Tensor, ...]:
            output = self._run_padded_decode(size, shares)
            return output.tokens, output.logits, output.positions, output.slots

        self.graphs.capture(("decode", size, shares), run)

    def _run_padded_decode(self, count: int, shares: bool) -> StepOutput:
        return self._run_decode(self._slots[:count], self._shared_len if shares else None)

    def _prefill_inputs(self, chunks: tuple[PrefillChunk, ...]) -> PrefillInputs:
        inputs = super()._prefill_inputs(chunks)
        self._chunk_slots = inputs.batch_slots
        return inputs

    def _forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Replay a graph if the step has prompts and fits one; otherwise launch its kernels."""
        indices, padded = metadata.logits_indices, self._padded
        # Decode steps may be under capture now. Without indices, all hidden states are wanted.
        if metadata.prefill is None or indices is None:
            return super()._forward(token_ids, positions, metadata)
        shape = padded.shape_for(metadata) if padded is not None else None
        if padded is None or shape is None or self.graphs is None:
            # Pad to a decode step's number of rows, for which cuBLAS has loaded its kernel.
            padding = (size_for(len(indices), SIZES) or len(indices)) - len(indices)
            metadata = replace(metadata, logits_indices=F.pad(indices, (0, padding)))
            return super()._forward(token_ids, positions, metadata)
        assert self._chunk_slots is not None
        # Most numbers of tokens never come: each is captured when it first comes.
        if ("forward", *shape) not in self.graphs:
            padded.clear()
            with self._slots_of_padding():
                self._capture_forward(*shape)
        padded.fill(token_ids, positions, metadata, self._chunk_slots, shape[0])
        (hidden,) = self.graphs.replay(("forward", *shape))
        return hidden

    def _capture_forward(self, size: int, decodes: int) -> None:
        """Capture the forward pass of the padded inputs, after a dry run of it.

        The inputs must have no tokens but padding, because the dry run changes states.
        """
        assert self.graphs is not None
        with self._dry_run():
            self._run_padded_forward(size, decodes)
        run = partial(self._run_padded_forward, size, decodes)
        self.graphs.capture(("forward", size, decodes), run)

    def _run_padded_forward(self, size: int, decodes: int) -> tuple[Tensor]:
        padded = self._padded
        assert padded is not None
        inputs = padded.token_ids[:size], padded.positions[:size], padded.metadata(size, decodes)
        return (super()._forward(*inputs),)

    def _sample_slots(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        if not self._has_own_kernels or self.group.size > 1:
            return super()._sample_slots(logits, slots, positions)
        # The kernels read and write the state of the slots. PyTorch would need four kernels more.
        state = self.batch_state
        tokens, _ = sampler.sample(
            logits,
            temperatures=state.temperatures,
            seeds=state.seeds,
            positions=positions,
            slots=slots,
            last_tokens=state.last_tokens,
        )
        return tokens

    def _sample_tokens(self, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        sample = sampler.sample if self._has_own_kernels else super()._sample_tokens
        return sample(logits, **options)

    def _advance(self, slots: Tensor) -> DecodeInputs:
        if not self._has_own_kernels:
            return super()._advance(slots)
        return elementwise.decode_inputs(slots, self.batch_state)

    def _upload(self, array: np.ndarray) -> Tensor:
        # From pinned memory, the copy runs while the host goes on; PyTorch keeps that memory until
        # the copy is done. NumPy fills it, because PyTorch wakes all its threads to copy a large
        # array: that took 6 ms for 5 MB on a host of 64 cores.
        dtype = torch.from_numpy(array).dtype
        pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.device, non_blocking=True)

    @cached_property
    def _token_rows(self) -> Iterator[Tensor]:
        """Pinned memory that kernels write sampled tokens to, a row a step.

        There are four rows: at most two steps are in flight, and each may sample twice, so the host
        has read a row before it is written again.
        """
        width = self.max_num_seqs + self.max_num_seqs % 2  # keeps rows aligned
        return cycle(torch.empty(4, width, dtype=torch.int64, pin_memory=True))

    def _answer(self, output: StepOutput, logprobs: list[Any]) -> SampledTokensInFlight:
        tokens, host = output.tokens, None
        if self._has_own_kernels:
            host = next(self._token_rows)[: len(tokens)]
        return SampledTokensInFlight.send(tokens, logprobs, output.prompt_logprobs, host)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.graphs:
            self.synchronize()
            self.graphs.clear()
        super().close()
        torch.cuda.empty_cache()
