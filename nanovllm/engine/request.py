"""A request while it is served: a prompt, what is asked of it, and its completions."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field

from nanovllm.engine.block_manager import NO_PREFIX, Prefix
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt, its sampling parameters, and one sequence for each completion.

    The first completion computes the prompt. The others wait until a step is planned that computes
    the end of the prompt. They are then ordinary sequences, which find most of the prompt in the
    prefix cache.

    max_len: The most tokens of prompt and output together, for each completion.
    seeds: The seeds of the sampling noise, one for each completion.
    stop_ids: Tokens that end a completion when they are sampled.
    """

    id: int  # the completions have the ids `id`, `id` + 1, ...
    prompt: list[int]
    params: SamplingParams
    _: KW_ONLY
    max_len: InitVar[int]
    seeds: InitVar[Iterable[int]] = (0,)
    stop_ids: InitVar[frozenset[int]] = frozenset()
    prompt_text: str | None = None  # set if the prompt was given as text
    interactive: bool = False  # a user waits for this request, not only for its whole batch
    scores: PromptScores | None = None  # set if the prompt's log-probabilities are requested

    completions: tuple[Sequence, ...] = field(init=False)
    # The prefix before the request's first block in the prefix cache. None: no block is cached.
    root: Prefix | None = NO_PREFIX
    num_cached_tokens: int | None = None  # prompt tokens that were cached at the first start

    # The times of a request and its completions are seconds of time.perf_counter without pauses.
    added_at: float = 0.0
    paused_at: float | None = None  # by time.perf_counter itself; None: the request is not paused
    paused_seconds: float = 0.0  # the length of all pauses that have ended

    def __post_init__(self, max_len: int, seeds: Iterable[int], stop_ids: frozenset[int]) -> None:
        if self.params.max_tokens == 0:
            max_len, stop_ids = self.num_inputs + 1, frozenset()
        self.completions = tuple(
            [
                Sequence(self.id + i, self, max_len=max_len, seed=seed, stop_ids=stop_ids)
                for i, seed in enumerate(seeds)
            ]
        )

    @property
    def num_inputs(self) -> int:
        """The number of leading prompt tokens that steps compute.

        All of them; if max_tokens is 0, all but the last one, and at least one.
        """
        return max(1, len(self.prompt) - (self.params.max_tokens == 0))

    @property
    def first(self) -> Sequence:
        """The first completion, which computes the prompt."""
        return self.completions[0]

    @property
    def unfinished(self) -> list[Sequence]:
        """The completions that have not ended."""
        return [seq for seq in self.completions if seq.status is not Status.FINISHED]

    @property
    def has_ended(self) -> bool:
        """Whether all completions have ended."""
        return all([seq.finish_reason is not None for seq in self.completions])

    def clock(self, now: float) -> float:
        """Return the time on this request's clock, which stands still while it is paused."""
        return (now if self.paused_at is None else self.paused_at) - self.paused_seconds

    def pause(self, now: float) -> None:
        """Stop the request's clock, if it runs."""
        if self.paused_at is None:
            self.paused_at = now

    def resume(self, now: float) -> None:
        """Let the request's clock run again."""
        if self.paused_at is not None:
            self.paused_seconds += now - self.paused_at
            self.paused_at = None
