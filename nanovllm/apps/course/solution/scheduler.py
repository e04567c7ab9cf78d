"""The scheduler: which tokens of which sequences the next step computes."""

from collections import deque
from dataclasses import dataclass, field

from nanovllm.apps.course.solution.block_manager import BlockManager


@dataclass(eq=False)
class Sequence:
    """A prompt and its output so far."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    seed: int = 0
    token_ids: list[int] = field(init=False)  # prompt and output
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_cached: int = 0  # of these, tokens that were found in the prefix cache at the start
    block_table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = self.prompt.copy()

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.prompt) :]


class Scheduler:
    """The planner of steps, under three limits: sequences, tokens of a step, and blocks."""

    def __init__(
        self, blocks: BlockManager, end_token: int, max_seqs: int = 16, max_tokens: int = 256
    ) -> None:
        self.blocks = blocks
        self.end_token = end_token
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order in which they came
        self.num_preemptions = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Plan a step. Returns sequences, and how many tokens of each are computed."""
        # <piece 4>
        plan: list[tuple[Sequence, int]] = []
        budget = self.max_tokens
        for seq in self.running.copy():
            count = self.chunk_size(seq, budget)
            if seq in self.running and count and self.make_room(seq, seq.num_computed + count):
                plan.append((seq, count))
                budget -= count
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            if not self.chunk_size(seq, budget) or not self.start(seq):
                break
            self.running.append(self.waiting.popleft())
            count = self.chunk_size(seq, budget)
            plan.append((seq, count))
            budget -= count
        return plan
        # </piece>

    def chunk_size(self, seq: Sequence, budget: int) -> int:
        """Return how many tokens of a sequence a step computes that has `budget` tokens left.

        That is 1 for a sequence that decodes: its last token.
        """
        # <piece 5: compute as much of a prompt as fits into the budget>
        return min(len(seq.token_ids) - seq.num_computed, budget)
        # <until then>
        # return len(seq.token_ids) - seq.num_computed
        # </piece>

    def start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its blocks. Returns False if too few are free."""
        # <piece 4>
        # The last token is computed in any case, because its logits are needed.
        shared = self.blocks.match(seq.token_ids[:-1])
        missing = self.num_blocks(len(seq.token_ids)) - len(shared)
        if missing > self.blocks.num_free - sum(block in self.blocks.free for block in shared):
            return False
        self.blocks.share(shared)
        seq.block_table = shared + self.blocks.allocate(missing)
        seq.num_computed = seq.num_cached = len(shared) * self.blocks.block_size
        return True
        # </piece>

    def make_room(self, seq: Sequence, length: int) -> bool:
        """Give a running sequence blocks for its first `length` tokens.

        Returns False if the sequence had to give up its own blocks instead.
        """
        missing = max(0, self.num_blocks(length) - len(seq.block_table))
        # <piece 7: preempt the sequence that came last, until there is room>
        while missing > self.blocks.num_free:
            victim = self.running.pop()
            self.blocks.release(victim.block_table)
            victim.block_table, victim.num_computed = [], 0
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        # <until then>
        # if missing > self.blocks.num_free:
        #     raise MemoryError("no block is free: chapter 7 says what to do")
        # </piece>
        seq.block_table += self.blocks.allocate(missing)
        return True

    def num_blocks(self, length: int) -> int:
        """Return how many blocks `length` tokens take."""
        return -(-length // self.blocks.block_size)

    def commit(self, plan: list[tuple[Sequence, int]], tokens: list[int]) -> list[Sequence]:
        """Take the token that was sampled after each chunk. Returns the sequences that ended.

        A chunk that does not reach the end of its sequence gets a token without a meaning.
        """
        # <piece 4>
        ended = []
        for (seq, count), token in zip(plan, tokens):
            seq.num_computed += count
            self.blocks.register(seq.token_ids[: seq.num_computed], seq.block_table)
            if seq.num_computed < len(seq.token_ids):
                continue
            seq.token_ids.append(token)
            if token == self.end_token or len(seq.output) == seq.max_tokens:
                self.running.remove(seq)
                self.blocks.release(seq.block_table)
                seq.block_table = []
                ended.append(seq)
        return ended
        # </piece>
