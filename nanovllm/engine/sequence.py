"""The state of one sequence while it is served: its tokens, its KV blocks, its status.

A sequence knows neither tensors nor policies. The scheduler changes it, and the block manager lends
it blocks.
"""

from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum, auto
from typing import Any

from nanovllm.engine.batch import Fork, PrefillChunk, ScoredTokens
from nanovllm.engine.block_manager import NO_PREFIX, Prefix
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.sampling_params import SamplingMetadata, SamplingParams


class Status(Enum):
    """The status of a sequence."""

    WAITING = auto()  # no batch slot, no blocks: new, or preempted
    RUNNING = auto()  # holds a batch slot and blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of a prompt.

    `token_ids` holds the tokens whose values are known; `num_tokens` also counts the tokens in
    flight. A step may be scheduled before the tokens of the previous step are read back, so the
    scheduler works with `num_tokens` alone. Between steps, `num_tokens - len(token_ids)` is 0 or 1.
    """

    id: int  # sequences are numbered in order of arrival
    prompt: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_len: int  # the most tokens of prompt and output together
    seed: int = 0  # the seed of the sampling noise
    stop_ids: frozenset[int] = frozenset()  # sampling one of these tokens ends the sequence
    interactive: bool = False  # a user waits for this sequence, not only for its whole batch

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None  # what went wrong, if finish_reason is "error"
    logprobs: list[bytes] = field(default_factory=list)  # one record per new token, if requested
    scores: PromptScores | None = None  # set if the prompt's log-probabilities are requested
    # The prompt's last token, if max_tokens is 0: no step computes it. The last step still samples
    # a token, and `commit` replaces that token by this one.
    # []: the prompt is a single token. None: max_tokens is above 0.
    uncomputed_last: list[int] | None = None
    text: Any = None  # the detokenizer's state, if the text is read as it grows
    constraint: Any = None  # what says which tokens may come next, if that depends on the output

    # Of n completions of a prompt, the first one computes the prompt and the others fork from it.
    # The forks get batch slots and blocks when the first one does, and start to decode when the
    # prompt is computed.
    parent: "Sequence | None" = None
    siblings: "tuple[Sequence, ...]" = ()  # the other completions, kept by the first one
    forks: "tuple[Sequence, ...]" = ()  # the siblings, until the prompt is computed

    # When and where the sequence runs.
    order: tuple[Any, int] = field(init=False)  # its place in the queue: the policy's key, its id
    batch_slot: int = field(init=False)
    block_table: list[int] = field(init=False)
    num_given_back: int = field(init=False)  # leading entries that were released: out of the window
    capacity: int = field(init=False)  # tokens that the block table has room for
    num_computed: int = field(init=False)  # tokens whose K and V are written or in flight
    num_registered_blocks: int = field(init=False)  # leading blocks that the prefix cache knows
    prefix: Prefix = field(init=False)  # the prefix that ends with the last registered block
    # Of a model with recurrent layers: the tokens after which the state was last kept or restored,
    # and numbers of prompt tokens after which it is to be kept, each with the number of waiting
    # prompts that need it.
    num_in_snapshot: int = field(init=False)
    snapshots_at: list[tuple[int, int]] = field(init=False)

    # What is reported of the sequence.
    prompt_text: str | None = None  # set if the prompt was given as text
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # found in the prefix cache at the first start
    added_at: float = 0.0  # in seconds of time.perf_counter, like the three times below
    first_token_at: float | None = None
    finished_at: float | None = None
    paused_at: float | None = None  # None: the sequence is not paused

    def __post_init__(self, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        if self.params.max_tokens == 0:
            self.uncomputed_last = [self.token_ids.pop()] if len(prompt) > 1 else []
            self.max_len = len(self.token_ids) + 1
            self.stop_ids = frozenset()
        self.num_tokens = len(self.token_ids)
        self.reset()

    def reset(self) -> None:
        """Forget the batch slot and the blocks. The sequence must be recomputed."""
        self.batch_slot = -1
        self.block_table = []
        self.num_given_back = 0
        self.capacity = 0
        self.num_computed = 0
        self.num_registered_blocks = 0
        self.prefix = NO_PREFIX
        self.num_in_snapshot = 0
        self.snapshots_at = []

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the sequence may still generate, without those in flight."""
        return self.max_len - self.num_tokens

    @property
    def num_tokens_left_with_forks(self) -> int:
        """The number of tokens that the sequence and its forks may still generate."""
        return self.num_tokens_left * (1 + len(self.forks))

    @property
    def num_reusable(self) -> int:
        """The number of leading tokens whose K and V may come from the prefix cache.

        The last of these tokens is computed in any case, because its hidden state is needed.
        """
        if self.scores is None or self.scores.are_done:
            return self.num_tokens
        return self.scores.num_done

    @property
    def output_ids(self) -> list[int]:
        """The tokens that were sampled."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ended_by_token(self) -> bool:
        """True if the last token is one of `stop_ids` and ended the sequence."""
        return self.finish_reason == "stop" and self.token_ids[-1] in self.stop_ids

    @property
    def text_ids(self) -> list[int]:
        """The output tokens that the text is decoded from."""
        leaves_out = self.ended_by_token and not self.params.include_stop_str_in_output
        return self.output_ids[:-1] if leaves_out else self.output_ids

    @property
    def request(self) -> "Sequence":
        """The first completion of the prompt, which represents the request."""
        return self.parent or self

    @property
    def completions(self) -> "tuple[Sequence, ...]":
        """All completions of the request, of which this is the first."""
        return (self, *self.siblings)

    @property
    def unfinished(self) -> "list[Sequence]":
        """The unfinished completions, without forks that wait for the prompt to be computed."""
        return [
            seq
            for seq in self.completions
            if seq.status is not Status.FINISHED and seq not in self.forks
        ]

    @property
    def has_ended(self) -> bool:
        """Whether all completions have ended."""
        return all([seq.finish_reason is not None for seq in self.completions])

    def clock(self, now: float) -> float:
        """Return the time on this sequence's clock, which a pause stops."""
        return now if self.paused_at is None else self.paused_at

    def shift_times(self, seconds: float) -> None:
        """Move the recorded times later by `seconds`, the length of a pause."""
        self.added_at += seconds
        if self.first_token_at is not None:
            self.first_token_at += seconds

    def prefill_chunk(
        self, start: int, end: int, write_from: int, scored: ScoredTokens | None
    ) -> PrefillChunk:
        """Return the chunk of tokens `start` to `end`, with all that the runner needs for it."""
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
        """Return what decides the next tokens besides temperature and seed. None: nothing does."""
        params, is_constrained = self.params, self.constraint is not None
        if self.uncomputed_last is not None or params.is_plain and not is_constrained:
            return None
        if params.logits_processors:  # functions stay on the host: no other process gets them
            params = replace(params, logits_processors=())
        # The host bars ends before min_tokens there, for it knows when a form is complete.
        if params.structured_outputs is not None and params.min_tokens:
            params = replace(params, min_tokens=0)
        counted = self.token_ids.copy() if params.penalizes else []
        return SamplingMetadata(
            params, self.stop_ids, self.num_prompt_tokens, counted, is_constrained
        )
