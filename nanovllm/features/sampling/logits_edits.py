"""Edits of logits before sampling: bitmasks, logit_bias and a user's functions.

A bitmask says which tokens are allowed, and logit_bias adds to single logits. What stays the same
for a sequence's whole run is kept on the device while the sequence has its batch slot. What depends
on the tokens so far comes from the host in each step: see LogitsEdits.

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

ALL = -1  # a word of a bitmask with all bits set: all its tokens are allowed
# It stays finite when it is divided by the lowest temperature that is not greedy, 1e-8, and turned
# into units of log2.
GREATEST_LOGIT = 1e29


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of R rows of a step that are known before the host's LogitsEdits come."""

    places: list[int]  # of the rows, in the step
    masked: bool  # whether the batch slot of any row has a bitmask
    bias: tuple[Tensor, Tensor] | None  # indices into the flattened logits, what to add there


class SlotEdits:
    """The edits that the sequences in the batch slots ask for in each of their steps."""

    def __init__(
        self, num_slots: int, vocab_size: int, upload: Callable[[np.ndarray], Tensor]
    ) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self._upload = upload
        self._masks: Tensor | None = None  # [S, W] int32; None until a slot has a bitmask
        self._masked: set[int] = set()  # slots that have a bitmask, or had one
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> tokens, bias
        self._bits: Tensor | None = None  # [8] uint8: 1, 2, 4, ..., 128

    def start(self, asked: Sequence[tuple[int, SamplingMetadata]]) -> None:
        """Store the edits of sequences that start to sample in these slots."""
        masks = {}
        for slot, metadata in asked:
            params = metadata.params
            self._bias.pop(slot, None)
            if params.logit_bias:
                tokens, values = zip(*params.logit_bias)
                self._bias[slot] = np.array(tokens, np.int64), np.array(values, np.float32)
            if bars_tokens(params):
                masks[slot] = static_mask(params, self.vocab_size)
            elif slot in self._masked:  # the mask of an earlier sequence is still there
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
        """Return the edits of the rows at `places` of a step, whose sequences are in `slots`."""
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
        """Return an edited float32 copy of logits [R, V] of R slots.

        Bitmasks come first, then logit_bias, then logits processors, whose finite numbers above
        GREATEST_LOGIT become GREATEST_LOGIT.
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
                    given = process(logits[row])
                    # A processor may force a token by the greatest finite number, which must not
                    # become infinite when it is divided by the temperature.
                    logits[row] = given.where(~given.isfinite(), given.clamp(max=GREATEST_LOGIT))
        return logits

    def _bitmasks(self, rows: RowEdits, slots: Tensor, edits: LogitsEdits | None) -> Tensor | None:
        """Return [R, W] int32, the tokens that both the slots and the host allow; None: all."""
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
        """Return which tokens the masks bar: [R, W] int32 -> [R, V] bool."""
        if self._bits is None:
            self._bits = self._upload(1 << np.arange(8, dtype=np.uint8))
        # Test bits byte by byte (a word's lowest byte comes first), to avoid a tensor of V words.
        allowed = masks.view(torch.uint8)[..., None] & self._bits
        return (allowed == 0).flatten(1)[:, : self.vocab_size]


def num_words(vocab_size: int) -> int:
    """Return W, the number of 32-bit words in a bitmask of the vocabulary."""
    return -(-vocab_size // 32)


def bars_tokens(params: SamplingParams) -> bool:
    """Return whether `params` bar tokens in every step, whatever the output so far is."""
    return params.allowed_token_ids is not None or any(
        [len(word) == 1 for word in params.barred_sequences]
    )


def static_mask(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """Return the bitmask [W] int32 of allowed_token_ids without the bad words of one token."""
    allowed = np.ones(num_words(vocab_size) * 32, dtype=bool)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[np.array(params.allowed_token_ids)] = True
    allowed[[word[0] for word in params.barred_sequences if len(word) == 1]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)
