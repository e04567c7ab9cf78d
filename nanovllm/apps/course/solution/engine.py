"""The engine: the loop of schedule, run, sample and commit. This file is complete."""

import torch

from nanovllm.apps.course.solution.block_manager import BlockManager
from nanovllm.apps.course.solution.model import Model
from nanovllm.apps.course.solution.paged_cache import Chunk, PagedCache
from nanovllm.apps.course.solution.sampler import sample
from nanovllm.apps.course.solution.scheduler import Scheduler, Sequence


class Engine:
    """An engine for the tiny model: `add` queues a prompt, `step` runs a step."""

    def __init__(
        self,
        model: Model,
        num_blocks: int = 64,
        block_size: int = 16,
        max_seqs: int = 16,
        max_tokens: int = 256,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.cache = PagedCache(model, num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, model.end_token, max_seqs, max_tokens)

    def add(self, prompt: list[int], max_tokens: int, **sampling: float) -> Sequence:
        """Queue a prompt. `sampling`: temperature, top_k, top_p and seed, as Sequence has them."""
        seq = Sequence(prompt, max_tokens, **sampling)  # type: ignore[arg-type]
        if self.scheduler.num_blocks(len(prompt) + max_tokens) > self.blocks.num_blocks:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens need more blocks than there are")
        self.scheduler.waiting.append(seq)
        return seq

    def step(self) -> list[Sequence]:
        """Run a step. Returns the sequences that ended."""
        plan = self.scheduler.schedule()
        chunks = []
        for seq, count in plan:
            start = seq.num_computed
            chunks.append(Chunk(seq.token_ids[start : start + count], start, seq.block_table))
        logits = self.cache.run(chunks)
        seqs = [seq for seq, _ in plan]
        tokens = sample(
            logits,
            torch.tensor([seq.temperature for seq in seqs]),
            torch.tensor([seq.top_k for seq in seqs]),
            torch.tensor([seq.top_p for seq in seqs]),
            torch.tensor([seq.seed for seq in seqs]),
            torch.tensor([len(seq.token_ids) for seq in seqs]),
        )
        return self.scheduler.commit(plan, tokens)

    def generate(self, prompts: list[list[int]], max_tokens: int, **sampling: float) -> list[list]:
        """Generate an output for each prompt."""
        seqs = [self.add(prompt, max_tokens, **sampling) for prompt in prompts]
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        return [seq.output for seq in seqs]
