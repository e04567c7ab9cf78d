"""One request while it is served: its tokens, its blocks, its status.

Knows no tensor and no policy: the scheduler changes it, the block manager lends it blocks.
"""

from enum import Enum, auto
from typing import Any

from nanovllm.sampling_params import SamplingParams, SamplingMetadata


class Status(Enum):
    WAITING = auto()  # no row, no blocks: new, or preempted
    RUNNING = auto()  # holds a row on the device and blocks
    FINISHED = auto()


class Sequence:
    """`token_ids` holds the tokens whose values are known; `num_tokens` counts those in flight too.

    A step may be scheduled before the last one's tokens are read back, so the scheduler works with `num_tokens`
    alone, and `num_tokens - len(token_ids)` is 0 or 1 between steps.
    """

    __slots__ = (
        "id", "params", "seed", "stop_ids", "token_ids", "num_prompt_tokens", "max_len", "num_tokens", "num_computed",
        "status", "finish_reason", "batch_slot", "block_table", "capacity", "num_hashed_blocks", "last_hash", "logprobs",
        "text", "patient", "parent", "siblings", "forks", "added_at", "first_token_at", "num_cached_tokens", "num_preemptions",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        max_len: int,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        patient: bool = False,
    ) -> None:
        self.id = id
        self.params = params
        self.seed = seed  # of the sampling noise
        self.stop_ids = stop_ids  # drawing one of these ends the sequence
        self.patient = patient  # nobody waits for its first token: only when all of a call have ended counts
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_len = max_len  # prompt and output together
        self.num_tokens = len(prompt)
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.logprobs: list[dict[int, float]] = []  # of each token drawn, if asked for
        self.text: Any = None  # the detokenizer's, for a sequence whose text is read as it grows
        # Of n completions of a prompt, the first computes it and the others fork from it: they get rows and blocks when it
        # is admitted, and start to decode when its prompt is computed.
        self.parent: Sequence | None = None
        self.siblings: tuple[Sequence, ...] = ()
        self.forks: tuple[Sequence, ...] = ()  # the siblings, as long as they wait for that
        self.added_at = 0.0  # by the clock that the engine reads
        self.first_token_at: float | None = None
        self.num_cached_tokens: int | None = None  # found in the prefix cache when the sequence was first admitted
        self.num_preemptions = 0
        self.reset()

    def reset(self) -> None:
        """Forget where the sequence ran: it must be computed anew."""
        self.num_computed = 0  # tokens whose K and V are written, or will be by a step in flight
        self.batch_slot = -1
        self.block_table: list[int] = []
        self.capacity = 0  # tokens that the block table has room for
        self.num_hashed_blocks = 0  # leading blocks that the prefix cache knows
        self.last_hash = 0  # of those blocks

    @property
    def num_left(self) -> int:
        """Tokens that it may yet draw, beside those in flight."""
        return self.max_len - self.num_tokens

    @property
    def num_left_with_forks(self) -> int:
        """The same of all that begin with it."""
        return self.num_left * (1 + len(self.forks))

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def request(self) -> "Sequence":
        """The first completion, which stands for all of them."""
        return self.parent or self

    @property
    def completions(self) -> "tuple[Sequence, ...]":
        return (self, *self.siblings)

    @property
    def has_ended(self) -> bool:
        """Whether all completions have."""
        return all([seq.finish_reason is not None for seq in self.completions])

    def sampling_metadata(self) -> SamplingMetadata | None:
        """What the runner must know to draw the sequence's next tokens, beyond temperature and seed."""
        params = self.params
        if params.is_plain:
            return None
        return SamplingMetadata(params, self.stop_ids, self.num_prompt_tokens, list(self.token_ids) if params.penalizes else [])
