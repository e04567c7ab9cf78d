"""An engine that overlaps: it launches a step before it reads the tokens of the one before.

The device is a thread that runs one job after the other, in the order in which they come. So is a
GPU: it has a queue, and whoever puts a job into it need not wait.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.paged_cache import Chunk
from nanovllm.apps.course.solution.sampler import sample
from nanovllm.apps.course.solution.scheduler import Scheduler, Sequence

HOLE = -1  # stands in a sequence for a token that is not known yet


class Part(NamedTuple):
    """The part of a step that computes one sequence."""

    seq: Sequence
    chunk: Chunk
    end: int  # the position after the chunk
    is_last: bool  # the chunk reaches the end of the sequence, so a token is sampled after it


class Step(NamedTuple):
    """A step that has been launched and not committed."""

    parts: list[Part]
    tokens: "Future[list[int]]"  # tokens.result() waits for the device


class OverlappedScheduler(Scheduler):
    """A scheduler that plans a step while the tokens of the one before are unknown."""

    def chunk_size(self, seq: Sequence, budget: int) -> int:
        # <piece 9: plan nothing if the last token that the output may have is on its way>
        if len(seq.output) == seq.max_tokens:
            return 0
        # <until then>
        # </piece>
        return super().chunk_size(seq, budget)


class OverlappedEngine(Engine):
    """An engine whose device is never idle while there is work."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        old = self.scheduler
        self.scheduler = OverlappedScheduler(
            old.blocks, old.end_token, old.max_seqs, old.max_tokens
        )
        self.device = ThreadPoolExecutor(1)
        # The last token of each sequence. It lives on the device: only its jobs may use it.
        self.last_tokens: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self.in_flight: Step | None = None

    def step(self) -> list[Sequence]:
        """Launch the next step, then commit the one before. Returns the sequences that ended."""
        plan = self.scheduler.schedule()
        launched = self.launch(plan) if plan else None
        previous, self.in_flight = self.in_flight, launched
        ended = self.commit(previous) if previous else []
        if self.in_flight and not self.scheduler.running and not self.scheduler.waiting:
            self.in_flight.tokens.result()  # all have ended: nobody wants its tokens
            self.in_flight = None
        return ended

    def launch(self, plan: list[tuple[Sequence, int]]) -> Step:
        """Give a step to the device, and advance the sequences as if it had run."""
        # <piece 9: make the parts, advance the sequences, and submit self.run(parts)>
        parts = []
        for seq, count in plan:
            start, end = seq.num_computed, seq.num_computed + count
            # Copies: the host changes these lists while the device works.
            chunk = Chunk(seq.token_ids[start:end], start, seq.block_table.copy())
            parts.append(Part(seq, chunk, end, end == len(seq.token_ids)))
            seq.num_computed = end
            if end == len(seq.token_ids):
                seq.token_ids.append(HOLE)
        return Step(parts, self.device.submit(self.run, parts))
        # </piece>

    def run(self, parts: list[Part]) -> list[int]:
        """Compute a step, and sample a token after each part. This runs on the device."""
        chunks = []
        for seq, chunk, _, _ in parts:
            # Only the last token can be a hole. The step that samples it has run by now.
            token_ids = [self.last_tokens[seq] if t == HOLE else t for t in chunk.token_ids]
            chunks.append(chunk._replace(token_ids=token_ids))
        logits = self.cache.run(chunks)
        seqs = [part.seq for part in parts]
        tokens = sample(
            logits,
            torch.tensor([seq.temperature for seq in seqs]),
            torch.tensor([seq.top_k for seq in seqs]),
            torch.tensor([seq.top_p for seq in seqs]),
            torch.tensor([seq.seed for seq in seqs]),
            torch.tensor([part.end for part in parts]),
        )
        for part, token in zip(parts, tokens):
            if part.is_last:
                self.last_tokens[part.seq] = token
        return tokens

    def commit(self, step: Step) -> list[Sequence]:
        """Wait for the tokens of a step, and fill the holes. Returns the sequences that ended."""
        # <piece 9: as the scheduler's commit, but one more step has been launched by now>
        ended, scheduler = [], self.scheduler
        for part, token in zip(step.parts, step.tokens.result()):
            seq = part.seq
            if seq not in scheduler.running and seq not in scheduler.waiting:
                continue  # it had ended before: this step was one too far
            if part.is_last:
                seq.token_ids[part.end] = token
            # Preempted since, it may have begun again, and be computed less far.
            known = seq.token_ids[: min(part.end, seq.num_computed)]
            self.blocks.register(known, seq.block_table)
            length = part.end + 1 - len(seq.prompt)
            if part.is_last and (token == scheduler.end_token or length == seq.max_tokens):
                del seq.token_ids[part.end + 1 :]  # the hole of the step that is one too far
                (scheduler.running if seq in scheduler.running else scheduler.waiting).remove(seq)
                self.blocks.release(seq.block_table)
                seq.block_table = []
                ended.append(seq)
        return ended
        # </piece>
