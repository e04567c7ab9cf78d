"""The events that a trace is made of.

A trace begins with a `Run`. Then each thing that changes the engine's state has an event, in the
order in which it happened. What the scheduler decides while it plans a step comes before that
step's `Launched`; what a step's tokens lead to comes before or right after its `Committed`. Which
blocks are allocated, shared and given back follows from what happens to sequences:
`replay.Replay` works it out.

Times are seconds since the trace began, on the host's clock. Sequences, steps and blocks are
numbers that the engine gave them. Of a request of n completions each is a sequence; the request
has the number of the first.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """What runs where."""

    model: str
    device: str
    dtype: str
    attention: str
    overlap: bool  # a step is launched before the tokens of the one before it are read
    num_blocks: int  # KV blocks
    block_size: int  # tokens of a block
    max_num_seqs: int  # batch slots
    max_num_batched_tokens: int  # tokens of a step
    kv_bytes_per_token: float  # of K and V, all layers
    weight_bytes: int | None  # that each step reads; None: it depends on the tokens, as of experts
    bandwidth: float | None = None  # of the device's memory in bytes a second, if somebody knows it
    cached_blocks: tuple[int, ...] = ()  # free blocks that the prefix cache knows at the beginning
    cached_hashes: tuple[str, ...] = ()  # of these, as `Registered` has them
    began_at: str = ""  # date and time, ISO 8601


class Added(NamedTuple):
    """A sequence came in, and waits."""

    time: float
    seq: int
    request: int
    prompt_tokens: int
    max_tokens: int  # of the output


class Started(NamedTuple):
    """A sequence got a batch slot and blocks: for the first time, or again after a preemption."""

    seq: int
    slot: int
    blocks: tuple[int, ...]  # its block table
    shared_blocks: int  # so many leading ones were there already; the others were free
    cached_tokens: int  # tokens that the prefix cache held
    given_back: int = 0  # so many leading ones it does not hold: they lie behind its window


class Registered(NamedTuple):
    """The prefix cache knows blocks from now on: whoever begins alike may share them."""

    blocks: list[int]
    hashes: list[str]  # of each, the content hash by which it is found, as hexadecimal digits


class Evicted(NamedTuple):
    """The prefix cache forgot blocks: somebody takes them for something else, or what they hold may
    be no numbers.
    """

    blocks: list[int]


class Preempted(NamedTuple):
    """Blocks ran out: a sequence, and what forks from it, are released and wait again."""

    seq: int


class Released(NamedTuple):
    """A sequence gave its slot and its blocks back."""

    seq: int


class Paused(NamedTuple):
    """The user paused a sequence. It keeps its slot and blocks until others need them."""

    time: float
    seq: int


class Resumed(NamedTuple):
    """A paused sequence may go on."""

    time: float
    seq: int


class GaveBack(NamedTuple):
    """A sequence holds its first blocks no more: they lie behind the window of every layer."""

    seq: int
    blocks: int  # so many by now, counted from the first of its block table


class Grew(NamedTuple):
    """A prompt that is computed in part got more blocks."""

    seq: int
    blocks: tuple[int, ...]


class Launched(NamedTuple):
    """A step was given to the device.

    If that is the CPU itself, `launch_seconds` is the time to compute the step.
    """

    step: int
    time: float  # at which its scheduling began
    decode_tokens: int
    prefills: tuple[tuple[int, int, int], ...]  # prompt chunks: sequence, first token, end
    forked: tuple[tuple[int, int], ...]  # that go on where another's prompt ends: sequence, end
    grown: tuple[tuple[int, int], ...]  # decoding sequences that got a block: sequence, block
    joined: tuple[int, ...]  # sequences that decode now, and did not in the step before
    left: tuple[int, ...]  # sequences that did, and do not now
    running: int  # sequences that hold a batch slot
    waiting: int
    blocks_in_use: int
    schedule_seconds: float
    launch_seconds: float


class Committed(NamedTuple):
    """A step's tokens were read, and appended to their sequences."""

    step: int
    time: float  # at which they were there
    tokens: int  # appended; what a sequence sampled after its end was dropped
    wait_seconds: float  # that the host waited for them
    commit_seconds: float


class Finished(NamedTuple):
    """A sequence is done."""

    time: float
    seq: int
    reason: str  # "stop", "length", "error" or "abort"
    output_tokens: int


class Reset(NamedTuple):
    """An error or interrupt left a step unfinished: all sequences and cached blocks are dropped."""

    time: float


Event = (
    Run
    | Added
    | Started
    | Registered
    | Evicted
    | Preempted
    | Released
    | Paused
    | Resumed
    | GaveBack
    | Grew
    | Launched
    | Committed
    | Finished
    | Reset
)
KINDS: tuple[type[Event], ...] = Event.__args__
