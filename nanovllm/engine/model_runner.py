"""Own the device: the model, the KV cache, the running state; turn a batch into drawn tokens.

The running state is a row for each running sequence: its last token, its length, its block table, how it is sampled.
It lives on the device, so a decode step needs nothing from the host but the rows to run, and `launch` returns while the
device still works. Knows no sequences and no policy: those are the scheduler's.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm import kernels
from nanovllm.config import Config
from nanovllm.engine.batch import Batch, PrefillChunk, RunnerInfo
from nanovllm.gpu.cuda_graph import DecodeGraphs, sizes_up_to
from nanovllm.gpu.device import resolve_device, resolve_dtype, tensors_default_to
from nanovllm.gpu.sampled_tokens import SampledTokens
from nanovllm.engine.kv_cache import GpuBudget, allocate_kv_cache, block_bytes, num_blocks_in_ram
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import lay_out_for_cpu
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.sampling.sampler import Logprobs, SpecialRows, choose_over_ranks
from nanovllm.models import build_model
from nanovllm.layers.context import PrefillMetadata, StepMetadata, forward_context
from nanovllm.weights.loader import init_dummy_weights, load_weights
from nanovllm.layers.parallel import ParallelGroup

# A prefix that at least so many rows share, of at least so many tokens, is read once for all, by a kernel of its own. It was
# measured far above these (256 rows, 2,048 tokens, 1.44 s -> 0.68 s); where it begins to pay was not.
SHARING_ROWS, SHARED_TOKENS = 16, 256
GRAPH_BYTES = 2**20  # what each further graph takes: 0.8 MiB were measured; see _graph_bytes


class Drawn(NamedTuple):
    """What a step leaves on the device, for each row that drew: the tokens, and what they were drawn from."""

    tokens: Tensor
    logits: Tensor
    lens: Tensor  # the tokens' positions


class ModelRunner:
    """One rank's model. Every rank launches the same batches and draws the same tokens."""

    def __init__(
        self,
        config: Config,
        hf_config,
        folder: str,
        *,
        max_model_len: int,
        max_num_seqs: int,
        group: ParallelGroup = ParallelGroup(),
    ) -> None:
        self.config = config
        self.group = group
        self.block_size = config.kvcache_block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.device = resolve_device(config.device, group.rank)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        # Graphs are captured on no default stream, and libraries hold memory for each stream: so all steps run on this one.
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.dtype = resolve_dtype(config.dtype, hf_config, self.device)
        budget = GpuBudget(self.device, config.gpu_memory_utilization) if on_gpu else None
        with tensors_default_to(self.dtype, self.device):
            model = self.model = build_model(hf_config, group)
        model.eval().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.keep_positions(max_model_len)
        self.attention_layers = [module for module in model.modules() if isinstance(module, Attention)]

        rows, width = max_num_seqs + 1, -(-max_model_len // self.block_size)  # the last row is padding
        with torch.device(self.device):
            self.last_tokens = torch.zeros(rows, dtype=torch.int64)
            self.context_lens = torch.zeros(rows, dtype=torch.int32)
            self.block_tables = torch.zeros(rows, width, dtype=torch.int32)
            self.temperatures = torch.zeros(rows, dtype=torch.float32)
            self.seeds = torch.zeros(rows, dtype=torch.int64)
            self.rows = torch.full((max_num_seqs,), rows - 1)  # which rows decode in this step
            self.shared_len = torch.zeros(1, dtype=torch.int32)  # tokens with which the tables of all decoding rows begin
        self._decode_slots: tuple[int, ...] | None = ()  # what self.rows says
        self._shared_blocks: int | None = 0  # what self.shared_len says
        self.special = SpecialRows(rows, max_model_len, hf_config.vocab_size, group, self._upload)

        with ThreadPoolExecutor(1) as background:
            preparing = background.submit(self._prepare_kernels)
            if config.load_format == "dummy":
                init_dummy_weights(model, seed=0)
            else:
                load_weights(model, folder)
            if not on_gpu:
                lay_out_for_cpu(model)
            preparing.result()
        self.synchronize()
        with self._on_stream():
            self._allocate(budget, width)

    @property
    def info(self) -> RunnerInfo:
        return RunnerInfo(
            num_blocks=self.num_blocks,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self._backend.name,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            kv_cache_bytes=self.kv_cache.nbytes,
        )

    def _on_stream(self):
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    @torch.inference_mode()
    def _allocate(self, budget: GpuBudget | None, width: int) -> None:
        """Capture the graphs and make the KV cache; a sequence of full length takes `width` blocks."""
        # A graph cannot hold what waits for the device, as plain attention does.
        use_graphs = self._stream and self._backend is not kernels.TORCH_BACKEND and not self.config.enforce_eager
        self.graphs = DecodeGraphs(self._run_decode, self.max_num_seqs) if use_graphs else None
        num_blocks = self.config.num_kvcache_blocks
        if num_blocks is None:
            block = block_bytes(self.attention_layers, self.block_size, self.dtype)
            if budget is None:
                num_blocks = num_blocks_in_ram(block, self.max_num_seqs * width, self.group.size)
            else:
                num_blocks = budget.num_blocks(block, width, self._run_largest_step, self._graph_bytes())
        self.num_blocks = self.group.minimum(num_blocks)
        self._bind_cache(self.num_blocks)
        if self.graphs:
            self.graphs.capture(self.graphs.sizes)

    @torch.inference_mode()
    def _prepare_kernels(self) -> None:
        """Choose the attention's; compile all that decode steps and small prefills launch. Needs no weights."""
        self._backend = kernels.select_attention_backend(
            self.config.attention_backend, self.device, self.dtype, self.attention_layers[0].head_dim, self.block_size,
            cpp=self.config.cpp_kernels,
        )  # fmt: skip
        if not self._stream:
            return
        torch.cuda.set_device(self.device)  # of this thread
        self.synchronize()  # the running state was written on the default stream
        pool = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(self.device,))
        with pool, self._on_stream():
            self._bind_cache(1)
            # One that does not compile says so when it is launched.
            for compile_kernel in kernels.find_uncompiled(self._run_small_steps):
                pool.submit(compile_kernel)

    def _run_small_steps(self) -> None:
        """What is launched by a decode step of each size that is captured, and of 3 rows, and by prefills' attention."""
        model, self.model = self.model, self.model.outline()
        for size in (3, *sizes_up_to(self.max_num_seqs)):  # some kernels are made for a few rows' number
            self._run_decode(min(size, self.max_num_seqs), shared=False)
        self.model = model
        layer = self.attention_layers[0]
        heads = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
        # A short prompt, a longer one, and one of which a part is cached.
        for length, tables in ((32, None), (512, None), (min(512, self.max_model_len), self.block_tables[:1])):
            qkv = torch.zeros(length, sum(heads), layer.head_dim, dtype=self.dtype, device=self.device)
            ends = torch.tensor([0, length], dtype=torch.int32, device=self.device)
            meta = PrefillMetadata(ends, ends, length, length, tables)
            self._backend.prefill(*qkv.split(heads, dim=1), *self.kv_cache[0], meta, layer.scale)

    def _bind_cache(self, num_blocks: int) -> None:
        self.kv_cache = allocate_kv_cache(self.attention_layers, num_blocks, self.block_size, self.dtype, self.device)
        for layer, (k_cache, v_cache) in zip(self.attention_layers, self.kv_cache):
            layer.bind_cache(k_cache, v_cache, self._backend)

    def _graph_bytes(self) -> int:
        """Memory that the CUDA graphs will take: the largest one's is measured, and the others share its tensors' place."""
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
        """A prefill of the whole token budget that draws for every sequence, all of it in one block of cache."""
        self._bind_cache(1)
        budget, count = self.config.max_num_batched_tokens, self.max_num_seqs
        length = min(-(-budget // count), self.max_model_len)
        lengths = [min(length, budget - start) for start in range(0, min(budget, count * length), length)]
        chunks = [PrefillChunk(i, [0] * length, 0, 0, [], True, 1.0, 0) for i, length in enumerate(lengths)]
        self.launch(Batch(prefills=tuple(chunks))).wait()
        self._bind_cache(0)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> SampledTokens:
        """Start a step and return at once; `wait` on the result gives the drawn tokens in the batch's order."""
        with self._on_stream(), kernels.cpp_kernels(self._backend is kernels.CPP_BACKEND):
            if batch.new_blocks:
                row, index, block = self._upload(np.array(batch.new_blocks, dtype=np.int64).T.copy())
                self.block_tables[row, index] = block.int()
            num_decodes = len(batch.decode_slots)
            if batch.decode_slots != self._decode_slots:
                padding = (self.max_num_seqs,) * (self.max_num_seqs - num_decodes)
                self._decode_slots = None  # until they are there: an interrupt may come first
                self.rows.copy_(self._upload(np.array(batch.decode_slots + padding, dtype=np.int64)))
                self._decode_slots = batch.decode_slots
            if batch.prefills:
                drawn = self._mixed_step(num_decodes, batch.prefills)
            else:
                drawn = self._decode_step(num_decodes, batch.shared_blocks)
            rows = batch.decode_slots + tuple([one.batch_slot for one in batch.first_samples])
            return SampledTokens.send(drawn.tokens, self._draw_special(rows, drawn))

    def _decode_step(self, num_decodes: int, shared_blocks: int) -> Drawn:
        """One token for each of the first rows of self.rows: a graph's replay, or kernel by kernel."""
        shared = num_decodes >= SHARING_ROWS and shared_blocks * self.block_size >= SHARED_TOKENS
        if shared and shared_blocks != self._shared_blocks:
            self._shared_blocks = None
            self.shared_len.fill_(shared_blocks * self.block_size)
            self._shared_blocks = shared_blocks
        size = self.graphs.size_for(num_decodes) if self.graphs else None
        if size is None:
            return self._run_decode(num_decodes, shared)
        if not self.graphs.has(size, shared):  # shared prefixes are rare enough to be captured when they come
            rows, self._decode_slots, decode_slots = self.rows.clone(), None, self._decode_slots
            self.rows.fill_(self.max_num_seqs)
            self.graphs.capture([size], shared)
            self.rows.copy_(rows)
            self._decode_slots = decode_slots
        return Drawn(*(x[:num_decodes] for x in self.graphs.replay(size, shared)))

    def _run_decode(self, num_decodes: int, shared: bool) -> Drawn:
        rows = self.rows[:num_decodes]
        token_ids, positions, slots, lens, tables = self._decode_inputs(rows)
        shared_len = self.shared_len if shared else None
        hidden = self._forward(token_ids, positions, StepMetadata(slots, num_decodes, lens, tables, shared_len))
        return self._draw(hidden, rows, lens)

    def _mixed_step(self, num_decodes: int, chunks: tuple[PrefillChunk, ...]) -> Drawn:
        """Run decoding rows and prompt chunks in one forward pass -> one token for each row, then each first draw."""
        token_ids, positions, slots, rows, ends, prefill = self._prefill_inputs(chunks)
        lens = tables = None
        if num_decodes:
            decode_slots = self.rows[:num_decodes]
            *decode_inputs, lens, tables = self._decode_inputs(decode_slots)
            token_ids, positions, slots = map(torch.cat, zip(decode_inputs, (token_ids, positions, slots)))
        # Only the last token of a chunk that reaches its sequence's end is followed by a draw, and by those of its forks.
        drawing = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        forking = [i for i, chunk in enumerate(chunks) for _ in chunk.forks]
        last = np.cumsum([len(chunk.token_ids) for chunk in chunks])[drawing + forking] - 1 + num_decodes
        drawing += range(len(chunks), len(rows))
        draws = [*range(num_decodes), *last]
        wanted = draws or [0]  # a forward pass carries at least one token to its end
        picks = self._upload(np.array(wanted + drawing, dtype=np.int64))
        wanted, drawing = picks.split([len(wanted), len(drawing)])
        metadata = StepMetadata(slots, num_decodes, lens, tables, prefill=prefill, wanted=wanted)
        hidden = self._forward(token_ids, positions, metadata)
        self._copy_blocks(chunks)
        rows, ends = rows[drawing], ends[drawing]
        if num_decodes:
            rows, ends = torch.cat((decode_slots, rows)), torch.cat((lens, ends))
        return self._draw(hidden[: len(draws)], rows, ends)

    def _decode_inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        return kernels.decode_inputs(rows, self.last_tokens, self.context_lens, self.block_tables, self.block_size)

    def _prefill_inputs(self, chunks: tuple[PrefillChunk, ...]) -> tuple:
        """Bring the chunks' tokens to the device; set their rows of the running state, and those of their forks.

        Returns token_ids, positions, slots [P] int64; rows [N + F] int64 and ends [N + F] int32; the attention's metadata.
        """
        sequences = [*chunks, *(fork for chunk in chunks for fork in chunk.forks)]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        starts_q = np.concatenate(([0], np.cumsum(lengths)))
        tokens = np.empty((3, starts_q[-1]), dtype=np.int64)
        tables = np.zeros((len(sequences), self.block_tables.shape[1]), dtype=np.int32)
        for table, seq in zip(tables, sequences):
            table[: len(seq.block_table)] = seq.block_table
        for i, (chunk, table) in enumerate(zip(chunks, tables)):
            positions = np.arange(chunk.start, chunk.end)
            slots = table[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
            slots[: max(0, chunk.write_from - chunk.start)] = -1
            here = slice(starts_q[i], starts_q[i + 1])
            tokens[0, here], tokens[1, here], tokens[2, here] = chunk.token_ids, positions, slots

        ends = np.array([seq.end for seq in sequences])
        starts_k = np.concatenate(([0], np.cumsum(ends[: len(chunks)])))
        temperatures = np.array([seq.temperature for seq in sequences], dtype=np.float32).view(np.int32)
        ints = self._upload(np.concatenate((starts_q, starts_k, ends, temperatures), dtype=np.int32))
        cu_seqlens_q, cu_seqlens_k, ends_d, temperatures = ints.split([len(starts_q), len(starts_k), len(ends), len(ends)])
        rows, seeds = self._upload(np.array([[seq.batch_slot for seq in sequences], [seq.seed for seq in sequences]]))
        tables = self._upload(tables)
        self.context_lens[rows] = ends_d
        self.block_tables[rows] = tables
        self.temperatures[rows] = temperatures.view(torch.float32)
        self.seeds[rows] = seeds
        for seq in sequences:
            self.special.set(seq.batch_slot, seq.sampling)

        tables = tables[: len(chunks)] if any(chunk.start for chunk in chunks) else None
        prefill = PrefillMetadata(cu_seqlens_q, cu_seqlens_k, max(lengths), int(ends.max()), tables)
        return *self._upload(tokens), rows, ends_d, prefill

    def _copy_blocks(self, chunks: tuple[PrefillChunk, ...]) -> None:
        """Give each fork its own copy of a last block that its prompt has filled in part."""
        forks = [(chunk, fork) for chunk in chunks for fork in chunk.forks if fork.end % self.block_size]
        copies = [(chunk.block_table[-1], fork.block_table[-1]) for chunk, fork in forks]
        if copies:
            source, copy = self._upload(np.array(copies, dtype=np.int64).T.copy())
            for layer in self.kv_cache:  # one by one: what is read is held in memory before it is written
                layer[:, copy] = layer[:, source]

    def _forward(self, token_ids: Tensor, positions: Tensor, metadata: StepMetadata) -> Tensor:
        with forward_context(metadata):
            return self.model(token_ids, positions)

    def _draw(self, hidden: Tensor, rows: Tensor, lens: Tensor) -> Drawn:
        """Draw the token at position `lens` of each row, and make it the row's last."""
        logits = self.model.compute_logits(hidden)
        start = self.model.lm_head.vocab_start
        tokens, values = kernels.sample(logits, self.temperatures[rows], self.seeds[rows], lens.long(), start)
        tokens = choose_over_ranks(tokens, values, self.group)
        self.last_tokens[rows] = tokens
        return Drawn(tokens, logits, lens)

    def _draw_special(self, rows: tuple[int, ...], drawn: Drawn) -> list[Logprobs]:
        """Draw again for the special ones among a step's rows; returns what they asked to know."""
        logprobs = []
        for part in self.special.among(rows):
            logprobs.append(self.special.draw(part, drawn.logits, self.seeds, drawn.lens, drawn.tokens))
            self.last_tokens[part.rows] = drawn.tokens[part.at]
        return [part for part in logprobs if part is not None]

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        # Pinned memory lets the copy run behind the host's back; PyTorch keeps it until the copy is done.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._stream else tensor

    def synchronize(self) -> None:
        if self._stream:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give the device's memory back."""
        self.synchronize()
        self.attention_layers.clear()
        if self.graphs:
            self.graphs.clear()
        del self.model, self.kv_cache
        if self._stream:
            torch.cuda.empty_cache()
