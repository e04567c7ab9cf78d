"""One sequence while it is served: its tokens, its KV blocks, its status.

Knows no tensor and no policy: the scheduler changes it, the block manager lends it blocks.
"""

from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum, auto
from typing import Any

from nanovllm.engine.batch import Fork, PrefillChunk, ScoredTokens
from nanovllm.engine.block_manager import NO_PREFIX, Prefix
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.sampling_params import SamplingMetadata, SamplingParams


class Status(Enum):
    WAITING = auto()  # no batch slot, no blocks: new, or preempted
    RUNNING = auto()  # holds a batch slot and blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of a prompt.

    `token_ids` holds the tokens whose values are known; `num_tokens` counts those in flight too. A
    step may be scheduled before the last one's tokens are read back, so the scheduler works with
    `num_tokens` alone, and `num_tokens - len(token_ids)` is 0 or 1 between steps.
    """

    id: int  # sequences are numbered as they come
    prompt: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_len: int  # prompt and output together
    seed: int = 0  # of the sampling noise
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the sequence
    interactive: bool = False  # somebody waits for this one, not only for its whole batch

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None  # what went wrong, where finish_reason is "error"
    logprobs: list[bytes] = field(default_factory=list)  # of each new token, if asked
    scores: PromptScores | None = None  # if the prompt's log-probabilities are asked for
    # If max_tokens is 0: the prompt's last token, which is not computed. The step samples a token
    # all the same, and this takes its place. [] if the prompt is one token. None: max_tokens > 0.
    held_back: list[int] | None = None
    text: Any = None  # the detokenizer's, if the text is read as it grows
    constraint: Any = None  # if its tokens decide which may come next: what knows how

    # Of n completions of a prompt, the first computes it and the others fork from it: they get
    # batch slots and blocks when it does, and start to decode when its prompt is computed.
    parent: "Sequence | None" = None
    siblings: "tuple[Sequence, ...]" = ()  # the others, kept by the first
    forks: "tuple[Sequence, ...]" = ()  # the same, until its prompt is computed

    # When and where it runs.
    order: tuple[Any, int] = field(init=False)  # its place in line: the policy's key, then its id
    batch_slot: int = field(init=False)
    block_table: list[int] = field(init=False)
    num_given_back: int = field(init=False)  # leading entries, behind its window, not its own
    capacity: int = field(init=False)  # tokens that the block table has room for
    num_computed: int = field(init=False)  # tokens whose K and V are written by now, or in flight
    num_registered_blocks: int = field(init=False)  # leading blocks that the prefix cache knows
    prefix: Prefix = field(init=False)  # that ends with the last of those blocks

    # What is reported of it.
    prompt_text: str | None = None  # if the prompt was given as text
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # found in the prefix cache when it first started
    added_at: float = 0.0  # seconds of time.perf_counter, as are the three below
    first_token_at: float | None = None
    finished_at: float | None = None
    paused_at: float | None = None  # None: it is not

    def __post_init__(self, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        if self.params.max_tokens == 0:
            self.held_back = [self.token_ids.pop()] if len(prompt) > 1 else []
            self.max_len = len(self.token_ids) + 1
            self.stop_ids = frozenset()
        self.num_tokens = len(self.token_ids)
        self.reset()

    def reset(self) -> None:
        """Forget where the sequence ran: it must be computed anew."""
        self.batch_slot = -1
        self.block_table = []
        self.num_given_back = 0
        self.capacity = 0
        self.num_computed = 0
        self.num_registered_blocks = 0
        self.prefix = NO_PREFIX

    @property
    def num_tokens_left(self) -> int:
        """Tokens that it may yet generate, beside those in flight."""
        return self.max_len - self.num_tokens

    @property
    def num_tokens_left_with_forks(self) -> int:
        """The same of all sequences that start with it."""
        return self.num_tokens_left * (1 + len(self.forks))

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose K and V may come from a cache. The last of them runs all the same:
        its hidden state is needed.
        """
        if self.scores is None or self.scores.are_done:
            return self.num_tokens
        return self.scores.num_done

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ended_by_token(self) -> bool:
        """Whether its last token is one of `stop_ids`, and ended it."""
        return self.finish_reason == "stop" and self.token_ids[-1] in self.stop_ids

    @property
    def text_ids(self) -> list[int]:
        """The tokens of the output that its text is made of."""
        leaves_out = self.ended_by_token and not self.params.include_stop_str_in_output
        return self.output_ids[:-1] if leaves_out else self.output_ids

    @property
    def request(self) -> "Sequence":
        """The first completion, which stands for all of them."""
        return self.parent or self

    @property
    def completions(self) -> "tuple[Sequence, ...]":
        return (self, *self.siblings)

    @property
    def unfinished(self) -> "list[Sequence]":
        """Completions that run or wait on their own: forks are not among them yet."""
        return [
            seq
            for seq in self.completions
            if seq.status is not Status.FINISHED and seq not in self.forks
        ]

    @property
    def has_ended(self) -> bool:
        """Whether all completions have."""
        return all([seq.finish_reason is not None for seq in self.completions])

    def clock(self, now: float) -> float:
        """The time that counts for this sequence: a pause stops it."""
        return now if self.paused_at is None else self.paused_at

    def shift_times(self, seconds: float) -> None:
        """Count its times from so much later, as it was paused for so long."""
        self.added_at += seconds
        if self.first_token_at is not None:
            self.first_token_at += seconds

    def prefill_chunk(
        self, start: int, end: int, write_from: int, scored: ScoredTokens | None
    ) -> PrefillChunk:
        """What the runner needs for tokens `start` to `end`."""
        is_last = end == self.num_tokens
        return PrefillChunk(
            batch_slot=self.batch_slot,
            token_ids=self.token_ids[start:end],
            start=start,
            write_from=write_from,
            block_table=self.block_table.copy(),
            is_last=is_last,
            temperature=self.params.temperature,
            seed=self.seed,
            sampling=self._sampling_metadata() if is_last else None,
            forks=tuple([fork._as_fork() for fork in self.forks]) if is_last else (),
            scored=scored,
        )

    def _as_fork(self) -> Fork:
        return Fork(
            batch_slot=self.batch_slot,
            end=self.num_tokens,
            block_table=self.block_table.copy(),
            temperature=self.params.temperature,
            seed=self.seed,
            sampling=self._sampling_metadata(),
        )

    def _sampling_metadata(self) -> SamplingMetadata | None:
        """What decides the next tokens beside temperature and seed; None: nothing does."""
        params, waits = self.params, self.constraint is not None
        if self.held_back is not None or params.is_plain and not waits:
            return None
        if params.logits_processors:  # the host's alone: functions do not go to other processes
            params = replace(params, logits_processors=())
        counted = self.token_ids.copy() if params.penalizes else []
        return SamplingMetadata(params, self.stop_ids, self.num_prompt_tokens, counted, waits)
