"""Sample for the requests that ask for more than a temperature and a seed.

A step samples for all its rows in one pass (layers/sampler.py). Rows whose SamplingParams ask for
more are then sampled once more, with the same noise, from logits that went through (min_tokens'
place among these makes no difference)

    repetition, then frequency and presence penalty -> min_tokens (no token that would end the
    output) -> temperature -> min_p -> top_k -> top_p,

and that token replaces the first. So rows that ask for nothing pay nothing. A greedy row takes the
arg max of what the penalties leave. Reported log-probabilities are the model's own, before any of
this.

Shapes: S special rows, V vocabulary entries, M the most tokens of a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.sampling_params import INVALID_TOKEN, SamplingMetadata, SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch_state import BatchState
    from nanovllm.engine.model_runner import ModelRunner, StepOutput

Upload = Callable[[np.ndarray], Tensor]
REPETITION_BOUNDS = 1e-10, 1e10
ROWS_AT_ONCE = 64  # bounds the memory that sorting the vocabulary takes


def apply_penalties(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """logits [S, V] float32 -> the same, penalised.

    seen [S, V] bool: tokens of prompt or output; counts [S, V] float32: how often each is in the
    output. The penalties are [S, 1] float32; 1, 0 and 0 change nothing, to the bit.
    """
    logits = torch.where(
        seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    return logits - frequency * counts - presence * (counts > 0)


def count_tokens(
    history: Tensor, prompt_lens: Tensor, lens: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """What `apply_penalties` needs, from the first lens [S, 1] tokens of history [S, M],
    prompt_lens [S, 1] of them given.
    """
    at = torch.arange(history.shape[1], device=history.device)
    zeros = torch.zeros(history.shape[0], vocab_size, device=history.device)
    known = zeros.scatter_add(1, history, (at < lens).float())
    drawn = zeros.scatter_add_(1, history, ((at >= prompt_lens) & (at < lens)).float())
    return known > 0, drawn


def keep_likeliest(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> Tensor:
    """[S, V] bool: which tokens may be drawn by scores [S, V] = logits / temperature.

    top_k [S, 1] int64 (V: no bound), top_p [S, 1] (infinite: no bound) and min_p [S, 1] float32.
    width: how many tokens to put in order; V if a row bounds top_p alone, else the largest bound of
    top_k, 0 if there is none. A token as likely as the last one kept is kept too, so that the set
    is a function of the scores alone.
    """
    threshold = scores.amax(dim=-1, keepdim=True) + min_p.log()
    if width:
        best = scores.topk(width).values  # likeliest first
        dropped = (torch.arange(width, device=scores.device) >= top_k) | (best < threshold)
        probs = best.masked_fill(dropped, -torch.inf).softmax(dim=-1)
        # The token that crosses the bound is kept: those before it do not reach top_p.
        kept = ~dropped & (probs.cumsum(dim=-1) - probs < top_p)
        # Of scores that are no numbers, none is kept.
        last = best.gather(1, kept.sum(dim=-1, keepdim=True).sub(1).clamp(min=0))
        # A row with neither bound may stand beside rows that need fewer tokens in order than it
        # keeps.
        threshold = torch.where(top_k > width, threshold, last)
    return scores >= threshold


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows `index` of a step, each asking for its `counts`: token ids and log-probabilities
    [rows, 1 + most].

    The first column is the token drawn, the others are the likeliest in order.
    """

    index: list[int]
    counts: list[int]
    token_ids: Tensor
    values: Tensor

    def read(self) -> dict[int, dict[int, float]]:
        """For each index, token id -> log-probability."""
        rows = zip(self.index, self.counts, self.token_ids.tolist(), self.values.tolist())
        return {i: dict(zip(ids[: count + 1], values)) for i, count, ids, values in rows}


# Each special row brings these to the device, behind top_p.
NUMBERS = ("min_p", "temperature", "repetition_penalty", "frequency_penalty", "presence_penalty")


class _Part:
    """Some of a step's special rows and what they ask for, on the device."""

    def __init__(
        self,
        index: list[int],
        slots: Sequence[int],
        asked: dict[int, SamplingMetadata],
        vocab_size: int,
        upload: Upload,
    ):
        wishes = [asked[slots[i]] for i in index]
        params = [wish.params for wish in wishes]
        limits = [limit(p, vocab_size) for p in params]
        prompt_lens = [wish.num_prompt_tokens for wish in wishes]
        # A sum of probabilities can come to a little over 1: who asked for no bound must not meet
        # one there.
        top_p = [p.top_p if p.top_p < 1 else np.inf for p in params]
        ints = np.array([index, [slots[i] for i in index], limits, prompt_lens], dtype=np.int64)
        floats = np.array([top_p, *([getattr(p, name) for p in params] for name in NUMBERS)])
        # Beyond these bounds float32 would lose logits to infinity, and with them which one is
        # larger.
        floats[3].clip(*REPETITION_BOUNDS, out=floats[3])
        floats = floats.astype(np.float32)
        self.index = index
        self.at, self.slots, limits_d, prompt_lens_d = upload(ints)  # at: among the step's rows
        top_p_d, min_p, self.temperatures, *penalties = upload(floats)
        self.divisors = torch.where(self.temperatures > 0, self.temperatures, 1.0).unsqueeze(1)
        self.top_k, self.top_p, self.min_p = (x.unsqueeze(1) for x in (limits_d, top_p_d, min_p))
        self.penalties = [x.unsqueeze(1) for x in penalties]
        self.prompt_lens = prompt_lens_d.unsqueeze(1)

        self.penalizes = any(p.penalizes for p in params)
        self.width = max(
            (k for p, k in zip(params, limits) if k < vocab_size or p.top_p < 1), default=0
        )
        self.filters_any = self.width > 0 or any(p.min_p > 0 for p in params)
        barred = [
            (i, token, wish.num_prompt_tokens + wish.params.min_tokens)
            for i, wish in enumerate(wishes)
            if wish.params.min_tokens
            for token in wish.stop_ids
            if token < vocab_size
        ]
        # Row i may not draw the token before it has this length.
        self.barred = upload(np.array(barred, dtype=np.int64).T.copy()) if barred else None
        self.asking = [i for i, p in enumerate(params) if p.logprobs is not None]
        self.counts = [params[i].logprobs or 0 for i in self.asking]
        self.asking_at = upload(np.array(self.asking, dtype=np.int64)) if self.asking else None


class Resampler:
    """Knows which batch slots ask for more, and samples for them."""

    def __init__(self, runner: "ModelRunner") -> None:
        self.vocab_size = runner.vocab_size
        self.group = runner.group
        self._upload = runner._upload
        self._sample_tokens = runner._sample_tokens
        self._asked: dict[int, SamplingMetadata] = {}  # by batch slot
        self._shape = (runner.max_num_seqs + 1, runner.max_model_len)
        # [slots, M] int32: the tokens of slots with penalties, once there is one
        self._history: Tensor | None = None
        self._slots: Sequence[int] = ()  # of the last step, and what they came to
        self._parts: list[_Part] = []

    def start(self, slot: int, metadata: SamplingMetadata | None) -> None:
        """A sequence starts to sample in this slot; None: temperature and seed are all it asks
        for.
        """
        if metadata is None:
            if not self._asked or self._asked.pop(slot, None) is None:
                return
        else:
            self._asked[slot] = metadata
            if metadata.params.penalizes:
                tokens = self._upload(np.array(metadata.token_ids, dtype=np.int32))
                if self._history is None:
                    self._history = torch.zeros(
                        self._shape, dtype=torch.int32, device=tokens.device
                    )
                self._history[slot, : len(tokens)] = tokens
        self._slots, self._parts = (), []

    def resample(
        self, slots: Sequence[int], output: "StepOutput", state: "BatchState"
    ) -> list[Logprobs]:
        """Replace the tokens of those among a step's `slots` that ask for more; returns the
        log-probabilities asked for.
        """
        logprobs = []
        for part in self._among(slots):
            logprobs.append(self._sample(part, output, state.seeds))
            state.last_tokens[part.slots] = output.tokens[part.at]
        return [part for part in logprobs if part is not None]

    def _among(self, slots: Sequence[int]) -> list[_Part]:
        """Stays the same, and costs nothing, as long as the slots do."""
        if self._asked and slots != self._slots:
            index = [i for i, slot in enumerate(slots) if slot in self._asked]
            index.sort(key=lambda i: limit(self._asked[slots[i]].params, self.vocab_size))
            parts = [
                index[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(index), ROWS_AT_ONCE)
            ]
            self._parts = [
                _Part(part, slots, self._asked, self.vocab_size, self._upload) for part in parts
            ]
            self._slots = slots
        return self._parts

    def _sample(self, part: _Part, output: "StepOutput", seeds: Tensor) -> Logprobs | None:
        """Replace the tokens of the part's rows. `seeds` are by batch slot."""
        raw = logits = self.group.gather_vocab(output.logits[part.at], self.vocab_size).float()
        positions = output.positions[part.at].long()
        if part.penalizes:
            assert self._history is not None
            history = self._history[part.slots].long()
            seen, counts = count_tokens(
                history, part.prompt_lens, positions.unsqueeze(1), self.vocab_size
            )
            logits = apply_penalties(logits, seen, counts, *part.penalties)
        if part.barred is not None:  # after the penalties: minus infinity times 0 is no number
            row, token, least = part.barred
            logits = logits.clone() if logits is raw else logits
            logits[row, token] = logits[row, token].masked_fill(positions[row] < least, -torch.inf)
        if part.filters_any:
            scores = logits / part.divisors
            kept = keep_likeliest(scores, part.top_k, part.top_p, part.min_p, part.width)
            logits = logits.masked_fill(~kept, -torch.inf)
        tokens, _ = self._sample_tokens(logits, part.temperatures, seeds[part.slots], positions)
        # A filter may have hidden that logits were no numbers.
        tokens = torch.where(output.tokens[part.at] == INVALID_TOKEN, INVALID_TOKEN, tokens)
        if part.penalizes and self._history is not None:
            self._history[part.slots, positions] = tokens.int().clamp(min=0)
        output.tokens[part.at] = tokens
        return self._logprobs(part, raw, tokens) if part.asking else None

    @staticmethod
    def _logprobs(part: _Part, raw: Tensor, tokens: Tensor) -> Logprobs:
        logprobs = raw[part.asking_at].log_softmax(dim=-1)
        best, token_ids = logprobs.topk(min(max(part.counts), logprobs.shape[1]))
        tokens = tokens[part.asking_at].unsqueeze(1)
        values = torch.cat((logprobs.gather(1, tokens.clamp(min=0)), best), dim=1)
        index = [part.index[i] for i in part.asking]
        return Logprobs(index, part.counts, torch.cat((tokens, token_ids), dim=1), values)


def limit(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size
