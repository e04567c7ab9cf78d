"""The events of which a trace is made.

A trace begins with a `Run`. Then every change of the engine's state has an event, in the order in
which the changes happened. The scheduler's decisions while it plans a step come before the step's
`Launched`. The effects of a step's tokens come before its `Committed` or right after it. Events do
not list which blocks are allocated, shared and given back: `replay.Replay` works that out from what
happens to the sequences.

Times are seconds since the trace began, on the host's clock. Sequences, steps and blocks appear by
the numbers that the engine gave them. Each of the n completions of a request is a sequence, and the
request has the number of its first sequence.

Fields with a default came later than the others: a trace that an older version wrote lacks them.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """The model, the device and the engine's options: the first event of a trace."""

    model: str
    device: str
    dtype: str
    attention: str
    overlap: bool  # whether a step is launched before the tokens of the step before it are read
    num_blocks: int  # number of KV blocks
    block_size: int  # tokens that a block holds
    max_num_seqs: int  # number of batch slots
    max_num_batched_tokens: int  # limit of tokens in a step
    kv_bytes_per_token: float  # bytes of a token's K and V in all layers
    # Bytes of weights that each step reads; None: it depends on the tokens, as with experts.
    weight_bytes: int | None
    bandwidth: float | None = None  # bytes a second of the device's memory; None: unknown
    cached_blocks: tuple[int, ...] = ()  # free blocks that the prefix cache knows at the beginning
    cached_hashes: tuple[str, ...] = ()  # the content hash of each of these blocks
    began_at: str = ""  # date and time, ISO 8601


class Added(NamedTuple):
    """A sequence that was added and waits."""

    time: float
    seq: int
    request: int
    prompt_tokens: int
    max_tokens: int  # limit of the output's tokens
    text: str = ""  # the prompt's text; "" for other completions, or if the trace has no text


class Started(NamedTuple):
    """A sequence that got a batch slot and blocks, at first or again after a preemption."""

    seq: int
    slot: int
    blocks: tuple[int, ...]  # the sequence's block table
    shared_blocks: int  # number of leading blocks that held tokens already; the others were free
    cached_tokens: int  # tokens of the sequence that the prefix cache held
    given_back: int = 0  # number of leading blocks that lie behind the window and are not held
    reason: str = ""  # why this sequence started before the others, in the policy's words


class Registered(NamedTuple):
    """Blocks that the prefix cache knows from now on: sequences that begin alike may share them."""

    blocks: list[int]
    hashes: list[str]  # the content hash by which each block is found, as hexadecimal digits


class Evicted(NamedTuple):
    """Blocks that the prefix cache forgot.

    Their memory is needed for something else, or they may hold NaN or infinity.
    """

    blocks: list[int]


class Preempted(NamedTuple):
    """A sequence that was preempted because blocks ran out. It is released and waits again."""

    seq: int


class Released(NamedTuple):
    """A sequence that gave its slot and its blocks back."""

    seq: int


class Paused(NamedTuple):
    """A sequence that the user paused. It keeps its slot and blocks until others need them."""

    time: float
    seq: int


class Resumed(NamedTuple):
    """A paused sequence that may go on."""

    time: float
    seq: int


class GaveBack(NamedTuple):
    """A sequence that gave back its first blocks, which lie behind the window of every layer."""

    seq: int
    blocks: int  # number of leading blocks of its table that it has given back by now


class Grew(NamedTuple):
    """A sequence whose prompt is computed in part, and which got more blocks."""

    seq: int
    blocks: tuple[int, ...]


class Kept(NamedTuple):
    """The state of recurrent layers after a sequence's first tokens, kept for later prompts."""

    seq: int
    tokens: int  # number of the tokens


class Launched(NamedTuple):
    """A step that was given to the device.

    If the device is the CPU itself, `launch_seconds` is the time that the step took to compute.
    """

    step: int
    time: float  # when the scheduling of the step began
    decode_tokens: int
    prefills: tuple[tuple[int, int, int], ...]  # prompt chunks: sequence, first token, end
    grown: tuple[tuple[int, int], ...]  # decoding sequences that got a block: sequence, block
    joined: tuple[int, ...]  # sequences that decode in this step, but not in the step before
    left: tuple[int, ...]  # sequences that decoded in the step before, but not in this one
    running: int  # sequences that hold a batch slot
    waiting: int
    blocks_in_use: int
    schedule_seconds: float
    launch_seconds: float


class Committed(NamedTuple):
    """A step whose tokens were read and appended to their sequences."""

    step: int
    time: float  # when the tokens had arrived
    tokens: int  # number of appended tokens, without those that a sequence sampled after its end
    wait_seconds: float  # how long the host waited for the tokens
    commit_seconds: float


class Finished(NamedTuple):
    """A sequence that has ended."""

    time: float
    seq: int
    reason: str  # "stop", "length", "error" or "abort"
    output_tokens: int
    text: str = ""  # the output's text; "" if the trace has no text


class Reset(NamedTuple):
    """A reset of the engine, after an error or interrupt left a step unfinished.

    All sequences and all cached blocks are dropped.
    """

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
    | Kept
    | Launched
    | Committed
    | Finished
    | Reset
)
KINDS: tuple[type[Event], ...] = Event.__args__
