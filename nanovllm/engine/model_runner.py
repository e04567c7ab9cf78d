"""The model runner: it owns the model, the KV cache and the state of the running sequences.

`ModelRunner.launch` turns a batch into sampled tokens. The runner knows neither sequences nor
policies, which belong to the scheduler. It is plain and right on any device; a subclass replaces
what its device can do better.

Shapes: B sequences that sample in a step; P tokens in N prompt chunks; V vocabulary entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, LogitsEdits, PrefillChunk, RunnerInfo, StepResult
from nanovllm.engine.batch_state import BatchState, DecodeInputs
from nanovllm.engine.dtype import resolve_dtype, tensors_default_to
from nanovllm.engine.kv_cache import (
    allocate_kv_cache,
    bytes_in_ram,
    bytes_per_block,
    divide_memory,
    parts_of_layers,
)
from nanovllm.engine.packing import pack_chunks, sampled_places
from nanovllm.engine.recurrent_state import RecurrentState
from nanovllm.engine.snapshots import StateRows
from nanovllm.layers.attention import KVCache, SelfAttention
from nanovllm.layers.context import AttentionMetadata, PrefillMetadata, forward_context
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.layers.sampler import best_over_ranks, sample
from nanovllm.layers.shared_kv import SharedKVAttention
from nanovllm.models import build_model
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.transformer import CausalLM
from nanovllm.weights.loader import init_dummy_weights, load_weights


class StepOutput(NamedTuple):
    """The results that a step leaves on the device."""

    tokens: Tensor  # [B] int64
    # [B, V], from which the tokens were sampled. With several ranks: this rank's vocabulary shard.
    logits: Tensor
    positions: Tensor  # [B] int32, the positions of the tokens in their sequences
    slots: Tensor  # [B] int64, the batch slots of the sequences
    # Log-probabilities of prompt tokens, if requested: see features/sampling/logprobs.py.
    prompt_logprobs: Any = None


class PrefillInputs(NamedTuple):
    """The inputs of a step's prompt chunks. The first three fields are those of DecodeInputs."""

    token_ids: Tensor  # [P] int64
    positions: Tensor  # [P] int64
    slot_mapping: Tensor  # [P] int64
    batch_slots: Tensor  # [N] int64
    context_lens: Tensor  # [N] int32, after this step
    metadata: PrefillMetadata


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step, which may still be in flight.

    tokens: Tensor [B].
    logprobs: The log-probabilities of requests that want them: see features/sampling/logprobs.py.
    prompt_logprobs: The `prompt_logprobs` of StepOutput.
    """

    tokens: Tensor
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None

    def ready(self) -> bool:
        """Tell whether `wait` would return at once."""
        return True

    def wait(self) -> StepResult:
        """Wait until the step has run, and return its result."""
        return StepResult(
            self.tokens.tolist(),
            {i: of_token for part in self.logprobs for i, of_token in part.read().items()},
            () if self.prompt_logprobs is None else self.prompt_logprobs.read(),
        )


class ModelRunner:
    """The runner of one rank. Every rank launches the same batches and samples the same tokens.

    exchange_layers: Replaces layers, such as by quantised ones, before parameters have memory.
    transform: Replaces parts of the loaded model by equal, faster ones.
    make_resampler: Takes this runner and makes the resampler, which samples for requests that ask
        for more than temperature and seed.
    score_prompts: Takes this runner, hidden states [P, hidden size] and chunks. Returns the
        log-probabilities of the prompt tokens that requests want scored.
    """

    attention_name = SelfAttention.attention_name
    takes_all_memory = False  # whether there may be more KV blocks than running sequences need

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        folder: str,
        *,
        device: torch.device,
        group: ParallelGroup = ParallelGroup(),
        exchange_layers: Callable[[CausalLM], None] | None = None,
        transform: Callable[[nn.Module], None] | None = None,
        make_resampler: Callable[["ModelRunner"], Any] | None = None,
        score_prompts: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device = device
        self.group = group
        self.exchange_layers = exchange_layers
        self.transform = transform
        self.block_size = config.kvcache_block_size
        self.max_num_seqs = config.num_batch_slots
        self.max_num_batched_tokens = config.max_num_batched_tokens  # fewer where memory is short
        limit = model_config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or limit, limit)
        self.vocab_size = model_config.vocab_size
        self.max_blocks = -(-self.max_model_len // self.block_size)  # the most of one sequence
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, device)
        self.kv_dtype = torch.uint8 if config.kv_cache_dtype == "fp8" else self.dtype
        self.batch_state = BatchState(self.max_num_seqs, self.max_blocks, self.block_size, device)
        self.make_resampler = make_resampler
        self.score_prompts = score_prompts
        self.resampler: Any = None  # made for the first request that needs it
        self.num_blocks = 0  # KV blocks; 0: not counted yet
        self.state_rows = StateRows(0, 0)
        # Fills a model with the weights of the model folder, or with random weights.
        self.read_weights: Callable[[nn.Module], None] = partial(load_weights, folder=folder)
        if config.load_format == "dummy":
            self.read_weights = init_dummy_weights
        self.load(self.read_weights)
        self.allocate()

    @property
    def info(self) -> RunnerInfo:
        """The figures of this runner that the engine and users see."""
        return RunnerInfo(
            num_blocks=self.num_blocks,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self.attention_name,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_parameters=self.num_parameters,
            kv_cache_bytes=self.kv_cache.nbytes,
            weight_format=self.model.weight_format,
            kv_format=self.model.kv_format,
            state_bytes=self.recurrent.nbytes if self.is_recurrent else 0,
            num_state_slots=self.state_rows.num_slots if self.is_recurrent else 0,
            num_snapshots=self.state_rows.num_snapshots,
        )

    def _build_model(self, model_config: ModelConfig) -> CausalLM:
        with tensors_default_to(self.dtype, self.device):
            model = build_model(model_config, self.group, self.max_model_len, self.exchange_layers)
        return model.eval().requires_grad_(False)

    def load(self, fill: Callable[[nn.Module], None]) -> None:
        """Build the model, fill it by calling `fill`, and apply the transform."""
        self.model = self._build_model(self.model_config)
        self.num_parameters = self.model.num_parameters
        self.attention_layers = [
            module for module in self.model.modules() if isinstance(module, SelfAttention)
        ]
        self.layers_with_kv = [
            layer for layer in self.attention_layers if not isinstance(layer, SharedKVAttention)
        ]
        layers = [module for module in self.model.modules() if isinstance(module, RecurrentLayer)]
        self.recurrent = RecurrentState(layers, self.device)
        self.recurrent.allocate(StateRows(0, 0))  # the row of padding, for dry runs
        self.is_recurrent = bool(layers)
        self._fill(fill)

    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate the KV cache and the state of recurrent layers.

        All ranks have the same number of blocks and of rows of state, which fit on each of them.
        After `release`, the numbers are the same as before.
        """
        if not self.num_blocks:
            num_blocks, rows = self._count_blocks_and_rows()
            self.state_rows = StateRows(*map(self.group.minimum, rows))
            self.num_blocks = self.group.minimum(num_blocks)
        self.recurrent.allocate(self.state_rows)
        self._bind_cache(self.num_blocks)

    def release(self) -> None:
        """Give back the memory of the KV cache and the states. No step may run until `allocate`."""
        self.recurrent.release()
        self._bind_cache(0)

    def _count_blocks_and_rows(self) -> tuple[int, StateRows]:
        """Count the KV blocks and the rows of state that fit into memory."""
        block_bytes = bytes_per_block(self.layers_with_kv, self.block_size, self.kv_dtype)
        row_bytes, share = self.recurrent.row_bytes, self.config.state_snapshot_share
        if given := self.config.num_kvcache_blocks:
            # The share is the snapshots' part of all the memory: KV blocks, slots and snapshots.
            beside = given * block_bytes + self.max_num_seqs * row_bytes
            count = int(beside * share / (1 - share) / row_bytes) if row_bytes else 0
            return given, StateRows(self.max_num_seqs, min(count, given))
        least_kv = self.max_blocks * block_bytes  # that of one sequence
        num_blocks, rows = divide_memory(
            self._count_bytes(block_bytes, least_kv + StateRows(1, 0).total * row_bytes),
            block_bytes=block_bytes,
            least_kv=least_kv,
            row_bytes=row_bytes,
            max_num_seqs=self.max_num_seqs,
            snapshot_share=share,
        )
        if not self.takes_all_memory:
            num_blocks = min(num_blocks, self.max_num_seqs * self.max_blocks)
        # More snapshots than blocks are of no use.
        return num_blocks, StateRows(rows.num_slots, min(rows.num_snapshots, num_blocks))

    def _count_bytes(self, block_bytes: int, least: int) -> int:
        """Count the bytes that KV blocks, of `block_bytes` each, and rows of state may take.

        least: the bytes that one sequence of max_model_len tokens needs.
        """
        return bytes_in_ram(self.group.size)

    def _bind_cache(self, num_blocks: int) -> None:
        layers, size = self.layers_with_kv, self.block_size
        self.kv_cache = allocate_kv_cache(layers, num_blocks, size, self.kv_dtype, self.device)
        self.kv_parts = parts_of_layers(self.kv_cache, layers, num_blocks, size)
        for layer, (k, v) in zip(layers, self.kv_parts):
            layer.kv_cache = KVCache(k, v, layer.kv_scales)
        for layer in self.attention_layers:
            if isinstance(layer, SharedKVAttention):
                layer.kv_cache = layer.source.kv_cache

    @torch.inference_mode()
    def launch(self, batch: Batch) -> SampledTokens:
        """Launch a step. `wait` on the returned object gives the sampled tokens in batch order."""
        if batch.new_blocks:
            columns = np.array(batch.new_blocks, dtype=np.int64).T.copy()
            self.batch_state.grow(*self._upload(columns))
        slots = self._upload_decode_slots(batch.decode_slots)
        if batch.block_copies:
            self._copy_blocks(batch)
        if batch.state_copies:
            self.recurrent.copy(batch.state_copies)
        if batch.prefills:
            output = self._mixed_step(slots, batch.prefills)
        else:
            output = self._decode_step(slots, batch)
        logprobs = []
        if self.resampler is not None:
            logprobs = self.resampler.resample(batch.sampling_slots, output)
        return self._answer(output, logprobs)

    @torch.inference_mode()
    def sample_constrained(self, edits: LogitsEdits) -> SampledTokens:
        """Sample the constrained rows of the last step: see SamplingMetadata.is_constrained.

        The returned object replaces that of `launch`, in which the tokens of these rows have no
        meaning.
        """
        return self._answer(*self.resampler.sample_constrained(edits))

    @torch.inference_mode()
    def read_logits(self, edits: LogitsEdits, rows: list[int]) -> np.ndarray:
        """Return the logits [len(rows), V] float32 that these rows' logits processors take."""
        return self.resampler.edited_logits(edits, rows).cpu().numpy()

    def _run_decode(self, slots: Tensor, shared_prefix_len: Tensor | None = None) -> StepOutput:
        """Run the model and sample one token for each decoding sequence in `slots` [B]."""
        inputs = self._advance(slots)
        metadata = AttentionMetadata(
            inputs.slot_mapping,
            num_decodes=len(slots),
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            shared_prefix_len=shared_prefix_len,
            state_rows=self.recurrent.rows_of(slots) if self.is_recurrent else None,
        )
        hidden = self._forward(inputs.token_ids, inputs.positions, metadata)
        return self._sample(hidden, slots, inputs.context_lens)

    def _mixed_step(self, slots: Tensor, chunks: tuple[PrefillChunk, ...]) -> StepOutput:
        """Run decoding sequences and prompt chunks in one forward pass.

        Samples a token for each decoding sequence, then for each chunk that ends its prompt.
        """
        decodes = len(slots)
        prefill = self._prefill_inputs(chunks)
        token_ids, positions, slot_mapping = prefill[:3]
        context_lens = block_tables = None
        if decodes:
            decode = self._advance(slots)
            context_lens, block_tables = decode.context_lens, decode.block_tables
            token_ids, positions, slot_mapping = map(torch.cat, zip(decode[:3], prefill[:3]))
        places = sampled_places(decodes, chunks)
        # A forward pass returns at least one hidden state, even if no token is sampled.
        wanted = places.tokens if len(places.tokens) else np.zeros(1, dtype=np.int64)
        indices, ending = self._upload_all(np.int64, wanted, places.chunks)
        some_scored = any([chunk.scored for chunk in chunks])
        state_rows = None
        if self.is_recurrent:
            state_rows = self.recurrent.rows_of(torch.cat((slots, prefill.batch_slots)))
        metadata = AttentionMetadata(
            slot_mapping,
            num_decodes=decodes,
            context_lens=context_lens,
            block_tables=block_tables,
            prefill=prefill.metadata,
            logits_indices=None if some_scored else indices,
            state_rows=state_rows,
        )
        hidden = self._forward(token_ids, positions, metadata)
        prompt_logprobs = None
        if some_scored:  # then there are hidden states of all tokens
            assert self.score_prompts is not None, "without it, no request may ask for scores"
            prompt_logprobs = self.score_prompts(self, hidden[decodes:], chunks)
            hidden = hidden[indices]
        sampling = torch.cat((slots, prefill.batch_slots[ending]))
        lengths = prefill.context_lens[ending]
        if context_lens is not None:
            lengths = torch.cat((context_lens, lengths))
        output = self._sample(hidden[: len(places.tokens)], sampling, lengths)
        return output._replace(prompt_logprobs=prompt_logprobs)

    def _prefill_inputs(self, chunks: tuple[PrefillChunk, ...]) -> PrefillInputs:
        """Upload the tokens of the chunks, and start the chunks' sequences in their batch slots."""
        packed = pack_chunks(chunks, self.block_size, self.max_blocks)
        temperatures = np.array([chunk.temperature for chunk in chunks], dtype=np.float32)
        # Arrays of one dtype are uploaded together: each upload takes the host some microseconds.
        tables, cu_seqlens_q, cu_seqlens_k, context_lens, temperatures_d = self._upload_all(
            np.int32,
            packed.block_tables.ravel(),  # first, so that it is aligned
            packed.cu_seqlens_q,
            packed.cu_seqlens_k,
            packed.context_lens,
            temperatures.view(np.int32),
        )
        token_ids, positions, slot_mapping, slots, seeds = self._upload_all(
            np.int64,
            packed.token_ids,
            packed.positions,
            packed.slot_mapping,
            np.array([chunk.batch_slot for chunk in chunks]),
            np.array([chunk.seed for chunk in chunks]),
        )
        tables = tables.view(packed.block_tables.shape)
        self.batch_state.start(
            slots,
            context_lens=context_lens,
            block_tables=tables,
            temperatures=temperatures_d.view(torch.float32),
            seeds=seeds,
        )
        if self.resampler is None and any([chunk.sampling for chunk in chunks]):
            assert self.make_resampler is not None, "without it, all requests must be plain"
            self.resampler = self.make_resampler(self)
        if self.resampler is not None:
            # The resampler must hear of plain sequences too: the previous sequences in these batch
            # slots may have had sampling metadata.
            self.resampler.start([(chunk.batch_slot, chunk.sampling) for chunk in chunks])

        cached = tables if any(chunk.start for chunk in chunks) else None
        longest = int(np.diff(packed.cu_seqlens_q).max()), int(packed.context_lens.max())
        metadata = PrefillMetadata(cu_seqlens_q, cu_seqlens_k, *longest, cached)
        return PrefillInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            batch_slots=slots,
            context_lens=context_lens,
            metadata=metadata,
        )

    def _upload_all(self, dtype: type, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Upload arrays as one, and return a tensor for each."""
        sizes = [len(array) for array in arrays]
        return self._upload(np.concatenate(arrays, dtype=dtype)).split(sizes)

    def _copy_blocks(self, batch: Batch) -> None:
        """Copy blocks for sequences that start, as far as these do not compute the tokens anew.

        All sources are read first, so a block may be the source of one pair and the copy of
        another.
        """
        size = self.block_size
        # A chunk computes the tokens of a copied block from its start on.
        needed = {
            chunk.block_table[chunk.start // size]: chunk.start % size for chunk in batch.prefills
        }
        count = max(needed.get(copy, size) for _, copy in batch.block_copies)
        source, copy = self._upload(np.array(batch.block_copies, dtype=np.int64).T.copy())
        # The K or V of one layer at a time, because PyTorch holds all that it reads in memory
        # before it writes. As 64-bit integers, because PyTorch takes as long to copy an element of
        # two bytes as one of eight.
        for part in self.kv_parts:
            blocks = part.flatten(2).view(torch.int64)  # [2, blocks, a block's content]
            end = -(-count * blocks.shape[2] // size)
            blocks[:, copy, :end] = blocks[:, source, :end]

    def _sample(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> StepOutput:
        """Sample the next tokens from hidden [B, hidden size], and store them as the last tokens of
        `slots` [B]. `positions` [B] are the positions of these tokens in their sequences.
        """
        logits = self.model.compute_logits(hidden)
        tokens = self._sample_slots(logits, slots, positions)
        return StepOutput(tokens, logits, positions, slots)

    def _sample_slots(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Do the work of `_sample` from the logits [B, V] of this rank on; return the tokens."""
        tokens, values = self._sample_tokens(
            logits,
            temperatures=self.batch_state.temperatures[slots],
            seeds=self.batch_state.seeds[slots],
            positions=positions.long(),
            vocab_start=self.model.lm_head.vocab_start,
        )
        if self.group.size > 1:
            tokens = best_over_ranks(tokens, values, self.group)
        self.batch_state.last_tokens[slots] = tokens
        return tokens

    # The methods below are those that a subclass may override for its device.

    def _fill(self, fill: Callable[[nn.Module], None]) -> None:
        """Fill the model with weights, and apply the transform if there is one."""
        fill(self.model)
        if self.transform is not None:
            self.transform(self.model)
            self.attention_name = self.attention_layers[0].attention_name

    def _decode_step(self, slots: Tensor, batch: Batch) -> StepOutput:
        """Run a step of decoding sequences alone, those in `slots` [B]."""
        return self._run_decode(slots)

    def _forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the hidden states of the tokens whose logits are needed. Padding may follow."""
        with forward_context(metadata):
            return self.model(token_ids, positions)

    _sample_tokens = staticmethod(sample)

    def _advance(self, slots: Tensor) -> DecodeInputs:
        return self.batch_state.advance(slots)

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _upload_decode_slots(self, slots: tuple[int, ...]) -> Tensor:
        return self._upload(np.array(slots, dtype=np.int64))

    def _answer(self, output: StepOutput, logprobs: list[Any]) -> SampledTokens:
        return SampledTokens(output.tokens, logprobs, output.prompt_logprobs)

    def on_all_ranks(self, task: Callable[..., None], *args: Any) -> None:
        """Call `task(runner, *args)` with the runner of each rank. Here there is one rank."""
        task(self, *args)

    def synchronize(self) -> None:
        """Wait until all launched steps have run."""

    def close(self) -> None:
        """Give back the memory of the device."""
        self.synchronize()
        self.attention_layers.clear()
        self.layers_with_kv.clear()
        del self.model, self.kv_cache, self.kv_parts, self.recurrent
