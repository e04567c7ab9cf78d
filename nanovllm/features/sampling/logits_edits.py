"""Change logits of rows that ask for it, before they are sampled.

Knows three ways to change logits: bitmasks of the tokens that are allowed, what is added to single
logits, and a user's functions. Those of a sequence that never change are on the device as long as
it runs in its batch slot. What a step's rows wait for comes from the host: see LogitsEdits.

Shapes: R rows of a step, V vocabulary entries, W = ceil(V / 32) words of a bitmask, whose bit j of
word i stands for token 32 * i + j.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.batch import LogitsEdits
from nanovllm.sampling_params import SamplingMetadata, SamplingParams

ALL = -1  # the word of a bitmask that allows all its tokens


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What is always done to R rows of a step, and what the host may add to it."""

    places: list[int]  # the rows', in the step
    masked: bool  # whether the slot of any has a bitmask
    bias: tuple[Tensor, Tensor] | None  # where in logits that are laid flat, and what to add


class SlotEdits:
    """What sequences in the batch slots ask for, whatever their tokens are."""

    def __init__(
        self, num_slots: int, vocab_size: int, upload: Callable[[np.ndarray], Tensor]
    ) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self._upload = upload
        self._masks: Tensor | None = None  # [S, W] int32, once a slot has one
        self._masked: set[int] = set()  # the slots that have, or had
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: tokens, what to add
        self._bits: Tensor | None = None  # [8] uint8: of a byte, each bit alone

    def start(self, asked: Sequence[tuple[int, SamplingMetadata]]) -> None:
        """Sequences start to sample in these slots."""
        masks = {}
        for slot, metadata in asked:
            params = metadata.params
            self._bias.pop(slot, None)
            if params.logit_bias:
                tokens, values = zip(*params.logit_bias)
                self._bias[slot] = np.array(tokens, np.int64), np.array(values, np.float32)
            if bars_tokens(params):
                masks[slot] = static_mask(params, self.vocab_size)
            elif slot in self._masked:  # another sequence's mask is in its place
                masks[slot] = np.full(num_words(self.vocab_size), ALL, dtype=np.int32)
        if not masks:
            return
        if self._masks is None:
            shape = self.num_slots, num_words(self.vocab_size)
            self._masks = self._upload(np.full(shape, ALL, dtype=np.int32))
        self._masked.update(masks)
        slots = self._upload(np.array([*masks], dtype=np.int64))
        self._masks[slots] = self._upload(np.stack([*masks.values()]))

    def of(self, places: list[int], slots: list[int]) -> RowEdits:
        """Of the rows at `places` of a step, which are sequences in `slots`."""
        biased = [(row, *self._bias[slot]) for row, slot in enumerate(slots) if slot in self._bias]
        bias = None
        if biased:
            at = np.concatenate([row * self.vocab_size + tokens for row, tokens, _ in biased])
            values = np.concatenate([values for *_, values in biased])
            bias = self._upload(at), self._upload(values)
        return RowEdits(places, not self._masked.isdisjoint(slots), bias)

    def apply(
        self, rows: RowEdits, logits: Tensor, slots: Tensor, edits: LogitsEdits | None
    ) -> Tensor:
        """logits [R, V] of R slots -> float32 ones of their own memory, changed: bitmasks, then
        what is added, then processors.
        """
        logits = logits.to(torch.float32, copy=True)
        masks = self._bitmasks(rows, slots, edits)
        if masks is not None:
            logits.masked_fill_(self._is_barred(masks), -torch.inf)
        if rows.bias is not None:
            logits.view(-1).index_add_(0, *rows.bias)
        if edits is not None and edits.processors:
            for row, place in enumerate(rows.places):
                if process := edits.processors.get(place):
                    logits[row] = process(logits[row])
        return logits

    def _bitmasks(self, rows: RowEdits, slots: Tensor, edits: LogitsEdits | None) -> Tensor | None:
        """[R, W] int32: what the slots' masks and the host's allow; None: all."""
        own = None
        if rows.masked:
            assert self._masks is not None
            own = self._masks[slots]
        if edits is None or not edits.rows:
            return own
        masks = edits.masks
        if edits.rows != rows.places:
            masks = np.full((len(rows.places), masks.shape[1]), ALL, dtype=np.int32)
            row_of = {place: row for row, place in enumerate(rows.places)}
            for place, mask in zip(edits.rows, edits.masks):
                if place in row_of:
                    masks[row_of[place]] = mask
        given = self._upload(masks)
        return given if own is None else own & given

    def _is_barred(self, masks: Tensor) -> Tensor:
        """[R, W] int32 -> [R, V] bool."""
        if self._bits is None:
            self._bits = self._upload(1 << np.arange(8, dtype=np.uint8))
        # Byte by byte, the lowest byte of a word first: no tensor of V words is made.
        allowed = masks.view(torch.uint8)[..., None] & self._bits
        return (allowed == 0).flatten(1)[:, : self.vocab_size]


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def bars_tokens(params: SamplingParams) -> bool:
    return params.allowed_token_ids is not None or any(
        [len(word) == 1 for word in params.barred_sequences]
    )


def static_mask(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """[W] int32: what allowed_token_ids and bad words of one token let through."""
    allowed = np.ones(num_words(vocab_size) * 32, dtype=bool)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[np.array(params.allowed_token_ids)] = True
    allowed[[word[0] for word in params.barred_sequences if len(word) == 1]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)
