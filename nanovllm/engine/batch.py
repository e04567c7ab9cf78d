"""One step's plan, as the scheduler hands it to the runner of every rank.

Plain numbers, frozen, no torch: it is cheap to make, to compare and to send to another process.
"""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.sampling_params import SamplingMetadata


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that begins where another's prompt ends: it draws from the same hidden state, and goes its own way.

    It shares the blocks that the prompt fills; the last one, if only part of it is filled, must be copied to its own.
    """

    batch_slot: int
    end: int  # tokens of the prompt
    block_table: list[int]
    temperature: float
    seed: int
    sampling: SamplingMetadata | None = None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence whose values are known: a prompt, a part of one, or a preempted sequence."""

    batch_slot: int  # of the running state on the device
    token_ids: list[int]
    start: int  # position of the first token
    write_from: int  # the K and V of earlier positions lie in shared blocks already: they must not be written
    block_table: list[int]  # all blocks the sequence holds
    is_last: bool  # the chunk reaches the sequence's end, so a token is drawn after it
    temperature: float
    seed: int
    sampling: SamplingMetadata | None = None  # what else decides the draw; None: nothing does
    forks: tuple[Fork, ...] = ()  # of a chunk that draws

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class StepResult(NamedTuple):
    """What a step answers."""

    tokens: list[int]
    logprobs: dict[int, dict[int, float]] = {}  # by index among the tokens, of those who asked: token id -> log-probability


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner is, once it is ready to launch steps."""

    num_blocks: int  # KV blocks
    device: str  # such as "cpu" or "cuda:0"; with several ranks, rank 0's
    dtype: str  # of weights and activations, such as "bfloat16"
    attention: str  # the attention backend's name
    num_parameters: int  # a rank counts what it holds; the runner of several ranks, the whole model's
    kv_cache_bytes: int  # likewise; the runner of several ranks gives their sum


@dataclass(frozen=True, slots=True)
class Batch:
    """Decoding rows first, one token each, then the prefill chunks.

    The step draws one token for each decoding row and each of `first_samples`, and answers them in that order.
    """

    decode_slots: tuple[int, ...] = ()
    new_blocks: tuple[tuple[int, int, int], ...] = ()  # (row, index in its table, block) of decoding rows that grew
    shared_blocks: int = 0  # blocks with which the tables of all decoding rows begin
    prefills: tuple[PrefillChunk, ...] = ()

    @property
    def first_samples(self) -> list[PrefillChunk | Fork]:
        """What starts to draw with this step: chunks that reach the end of what is known, then what forks from them."""
        return [chunk for chunk in self.prefills if chunk.is_last] + [fork for chunk in self.prefills for fork in chunk.forks]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefills)
