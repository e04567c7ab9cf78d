"""The state of one sequence while it is served: its tokens, its KV blocks, its status.

A sequence knows neither tensors nor policies. The scheduler changes it, and the block manager lends
it blocks.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from nanovllm.engine.batch import PrefillChunk, ScoredTokens
from nanovllm.engine.block_manager import Prefix
from nanovllm.sampling_params import SamplingMetadata, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.request import Request


class Status(Enum):
    """The status of a sequence."""

    WAITING = auto()  # no batch slot, no blocks: new, or preempted
    RUNNING = auto()  # holds a batch slot and blocks, paused or not
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of a request.

    `token_ids` holds the tokens whose values are known; `num_tokens` also counts the tokens in
    flight. A step may be scheduled before the tokens of the previous step are read back, so the
    scheduler works with `num_tokens` alone. Between steps, `num_tokens - len(token_ids)` is 0 or 1.

    If max_tokens is 0, the last step still samples a token, which `Scheduler.commit` drops.
    """

    id: int  # sequences are numbered in order of arrival
    request: "Request"
    max_len: int  # the most tokens of prompt and output together
    seed: int  # the seed of the sampling noise
    stop_ids: frozenset[int]  # sampling one of these tokens ends the sequence

    token_ids: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None  # what went wrong, if finish_reason is "error"
    logprobs: list[bytes] = field(default_factory=list)  # one record per new token, if requested
    text: Any = None  # the detokenizer's state, if the text is read as it grows
    constraint: Any = None  # what says which tokens may come next, if that depends on the output

    # When and where the sequence runs.
    order: tuple[Any, int] = field(init=False)  # its place in the queue: the policy's key, its id
    batch_slot: int = field(init=False)
    block_table: list[int] = field(init=False)
    num_given_back: int = field(init=False)  # leading blocks that were released: out of the window
    capacity: int = field(init=False)  # tokens that the block table has room for
    num_computed: int = field(init=False)  # tokens whose K and V are written or in flight
    num_registered_blocks: int = field(init=False)  # leading full blocks that the cache was offered
    # The prefix that ends with the last registered block; before the first one, `request.root`.
    prefix: Prefix | None = field(init=False)
    # Of a model with recurrent layers: the tokens after which the state was last kept or restored,
    # and numbers of prompt tokens after which it is to be kept.
    num_in_snapshot: int = field(init=False)
    snapshots_at: list[int] = field(init=False)

    # What is reported of the sequence. The times are those of the request's clock.
    num_preemptions: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.request.prompt[: self.request.num_inputs]
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
        self.prefix = self.request.root
        self.num_in_snapshot = 0
        self.snapshots_at = []

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the sequence may still generate, without those in flight."""
        return self.max_len - self.num_tokens

    @property
    def is_first(self) -> bool:
        """Whether this is the first completion of the request, which computes the prompt."""
        return self.id == self.request.id

    @property
    def waits_for_prompt(self) -> bool:
        """Whether the first completion of the request has yet to compute the prompt."""
        return not self.is_first and self.request.first.num_tokens <= self.request.num_inputs

    @property
    def num_reusable(self) -> int:
        """The number of leading tokens whose K and V may come from the prefix cache.

        The last of these tokens is computed in any case, because its hidden state is needed.
        """
        scores = self.request.scores
        return self.num_tokens if scores is None or scores.are_done else scores.num_done

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
            scored=scored,
        )

    def _sampling_metadata(self) -> SamplingMetadata | None:
        """Return what the resampler must know. None: temperature and seed decide alone."""
        params, is_constrained = self.params, self.constraint is not None
        if params.max_tokens == 0 or params.is_plain and not is_constrained:
            return None
        if params.logits_processors:  # functions stay on the host: no other process gets them
            params = replace(params, logits_processors=())
        # With structured outputs the host enforces min_tokens: it knows when the output is
        # complete.
        if params.structured_outputs is not None and params.min_tokens:
            params = replace(params, min_tokens=0)
        counted = self.token_ids.copy() if params.penalizes else []
        return SamplingMetadata(
            params,
            self.stop_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=counted,
            is_constrained=is_constrained,
        )
