"""The messages between the engine and a runner: the plan of a step (`Batch`), the host's edits of
its logits (`LogitsEdits`), the result (`StepResult`), and the facts of the runner (`RunnerInfo`).

The messages are plain numbers without torch: cheap to make, to compare and to send to another
process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.sampling_params import SamplingMetadata

if TYPE_CHECKING:
    import numpy as np


class ScoredTokens(NamedTuple):
    """The consecutive tokens of a prompt that the hidden states of one chunk score."""

    begin: int  # the index in the chunk of the token before the first scored token
    token_ids: list[int]
    num_likeliest: int  # how many of the likeliest tokens are scored beside the token itself


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence whose values are known: a prompt, a part of a prompt, or
    the tokens of a preempted sequence that is recomputed.
    """

    batch_slot: int
    token_ids: list[int]
    start: int  # position of the first token
    write_from: int  # K and V before this position are in shared blocks and must not be written
    block_table: list[int]  # all blocks that the sequence holds
    is_last: bool  # the chunk reaches the end of the sequence, so a token is sampled after it
    temperature: float
    seed: int
    sampling: SamplingMetadata | None = None  # None: temperature and seed alone decide the sample
    scored: ScoredTokens | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)


class StepResult(NamedTuple):
    """The result of a step."""

    # For each sequence that samples, in batch order: its token, or INVALID_TOKEN.
    tokens: list[int]
    # Index in `tokens` -> the token's log-probabilities, in the form that frontend/outputs.py reads
    logprobs: dict[int, bytes] = {}
    # The log-probabilities of prompt tokens in the same form, for each chunk with `scored`.
    prompt_logprobs: tuple[bytes, ...] = ()


class LogitsEdits(NamedTuple):
    """The host's edits of the logits of a step's constrained rows: see
    SamplingMetadata.is_constrained.

    A constrained row that is missing here belongs to a sequence that has ended: any token will do.
    """

    rows: list[int]  # indices among the step's tokens
    # [len(rows), ceil(V / 32)] int32: bit j of word i says whether token 32 * i + j is allowed.
    # The masks of the next step reuse this memory.
    masks: "np.ndarray"
    # By row: a function that takes the row's logits, a tensor [V] float32, and returns new ones.
    processors: dict[int, Callable[[Any], Any]]


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The facts of a runner that is ready to launch steps."""

    num_blocks: int  # KV blocks
    device: str  # such as "cpu"; with several ranks, the device of rank 0
    dtype: str  # of weights and activations, such as "bfloat16"
    attention: str  # the attention backend's name
    max_model_len: int  # tokens of prompt and output together
    # A rank counts what it holds. The runner of several ranks reports num_parameters of the whole
    # model, and kv_cache_bytes of all ranks together.
    num_parameters: int
    kv_cache_bytes: int
    weight_format: str = ""  # of quantised weights, in words for users
    kv_format: str = ""  # of the KV cache, in words for users; "": that of dtype
    max_num_batched_tokens: int = 0  # that memory has room for; 0: as many as the config says
    # The state of recurrent layers: its bytes, the sequences that it has room for, and the states
    # that are kept for later prompts. All are 0 if no layer is recurrent.
    state_bytes: int = 0
    num_state_slots: int = 0
    num_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of a step: decoding sequences first, one token each, then the prefill chunks.

    The step samples a token for each decoding sequence and after each chunk that is the last of its
    sequence, in that order.
    """

    decode_slots: tuple[int, ...] = ()
    # (batch slot, index in its block table, block) of decoding sequences that grow by a block
    new_blocks: tuple[tuple[int, int, int], ...] = ()
    # The number of leading blocks that the tables of all decoding sequences have in common.
    shared_blocks: int = 0
    prefills: tuple[PrefillChunk, ...] = ()
    # (source, copy): blocks to copy before the step writes any. All sources are read first.
    block_copies: tuple[tuple[int, int], ...] = ()
    # (source, copy): rows of the state of recurrent layers to copy before the step computes
    # anything, as if one after the other
    state_copies: tuple[tuple[int, int], ...] = ()

    @property
    def sampling_slots(self) -> tuple[int, ...]:
        """The batch slots of the sequences that get a token, in the order of the tokens."""
        ending = [chunk.batch_slot for chunk in self.prefills if chunk.is_last]
        return (*self.decode_slots, *ending)

    @property
    def num_prefill_tokens(self) -> int:
        """The number of tokens in all prefill chunks."""
        return sum(len(chunk.token_ids) for chunk in self.prefills)
