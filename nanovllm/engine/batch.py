"""What the engine and a runner tell each other: the plan of a step (`Batch`), what the host adds
to it (`LogitsEdits`), its answer (`StepResult`), and what the runner is (`RunnerInfo`).

Plain numbers, no torch: cheap to make, to compare and to send to another process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.sampling_params import SamplingMetadata

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that goes on where another's prompt ends: it samples from the same hidden state.

    It shares the blocks that the prompt fills. If the prompt's last block is filled only in part,
    its content must be copied to the last block of the fork's own table.
    """

    batch_slot: int
    end: int  # tokens of the prompt
    block_table: list[int]
    temperature: float
    seed: int
    sampling: SamplingMetadata | None = None


class ScoredTokens(NamedTuple):
    """Consecutive tokens of a prompt whose log-probabilities a chunk's hidden states give."""

    begin: int  # index in the chunk of the token before the first of them
    token_ids: list[int]
    num_likeliest: int  # beside a token's own score, those of so many likeliest tokens


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence whose values are known.

    That is a prompt, a part of one, or a preempted sequence that is computed anew.
    """

    batch_slot: int
    token_ids: list[int]
    start: int  # position of the first token
    write_from: int  # K and V of earlier positions are in shared blocks: they must not be written
    block_table: list[int]  # all blocks the sequence holds
    is_last: bool  # the chunk reaches the sequence's end, so a token is sampled after it
    temperature: float
    seed: int
    sampling: SamplingMetadata | None = None  # what else decides the sample; None: nothing does
    forks: tuple[Fork, ...] = ()  # only if `is_last`
    scored: ScoredTokens | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class StepResult(NamedTuple):
    """What a step gives."""

    tokens: list[int]  # one for each sequence that samples, in the batch's order, or INVALID_TOKEN
    # Index among `tokens` -> its log-probabilities, in the form that outputs.py reads.
    logprobs: dict[int, bytes] = {}
    # The same of the prompts' tokens: for each chunk with `scored`, in order.
    prompt_logprobs: tuple[bytes, ...] = ()


class LogitsEdits(NamedTuple):
    """What the host says of a step's rows that wait for it: see SamplingMetadata.waits. A row
    that waits and is missing here has ended meanwhile: any token will do.
    """

    rows: list[int]  # places among the step's tokens
    # [len(rows), ceil(V / 32)] int32: bit j of word i says whether token 32 * i + j is allowed.
    # Valid until the next step's are made, which reuse the memory.
    masks: "np.ndarray"
    # By place: a function of the row's logits [V] float32, a tensor, that gives them changed.
    processors: dict[int, Callable[[Any], Any]]


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner is, once it is ready to launch steps."""

    num_blocks: int  # KV blocks
    device: str  # such as "cpu"; with several ranks, rank 0's
    dtype: str  # of weights and activations, such as "bfloat16"
    attention: str  # the attention backend's name
    max_model_len: int  # tokens of prompt and output together
    # A rank tells what it holds; the runner of several ranks, the whole model's and their sum.
    num_parameters: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Decoding sequences first, one token each, then the prefill chunks.

    The step samples a token for each decoding sequence and each of `first_samples`, in that order.
    """

    decode_slots: tuple[int, ...] = ()
    # (batch slot, index in its block table, block) of decoding sequences that grow by a block
    new_blocks: tuple[tuple[int, int, int], ...] = ()
    # Leading blocks that the tables of all decoding sequences have in common.
    shared_blocks: int = 0
    prefills: tuple[PrefillChunk, ...] = ()
    # (source, copy): blocks to copy before the step writes any, all read before one is written
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def first_samples(self) -> list[PrefillChunk | Fork]:
        """What samples without decoding: chunks that reach their sequence's end, then forks."""
        chunks = [chunk for chunk in self.prefills if chunk.is_last]
        forks = [fork for chunk in self.prefills for fork in chunk.forks]
        return chunks + forks

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)
