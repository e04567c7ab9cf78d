"""Log-probabilities of sampled tokens and of prompt tokens.

A record holds pairs of token id and log-probability, the latter as the bits of a float32: first the
pair of the sampled token, or of the prompt's own, then those of the likeliest tokens in order.

A forward pass computes a hidden state for each token of a prompt, which gives the logits of the
next token. A prompt may have thousands of tokens and a vocabulary a hundred thousand entries. So
logits are computed for a few tokens at a time, and only the requested log-probabilities are kept.

Shapes: P tokens of prompt chunks; R of these whose next token is scored; V vocabulary entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.batch import PrefillChunk

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Rows of logits that exist at the same time. Logits and log-probabilities take 10 bytes an entry:
# 400 MB for a vocabulary of 151,936 entries.
ROWS_AT_ONCE = 256
BYTES = 8  # of a pair in a record


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The records of a step's rows, [rows, 1 + most, 2] int32.

    `asking` has an entry for each row that asks for log-probabilities: the row's place in the step,
    and where its part of the records' bytes begins and ends.
    """

    asking: list[tuple[int, int, int]]
    records: Tensor

    def read(self) -> dict[int, bytes]:
        """Return the bytes of each asking row's record, by the row's place in the step."""
        records = self.records.numpy().tobytes()
        return {place: records[begin:end] for place, begin, end in self.asking}


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The records of R prompt tokens of a step, [R, 1 + most, 2] int32.

    `asking` has an entry for each chunk that asks for log-probabilities: how many of the R tokens
    belong to it, and how many likeliest tokens it asks for.
    """

    asking: list[tuple[int, int]]
    records: Tensor

    def read(self) -> tuple[bytes, ...]:
        """Return the bytes of its tokens' records for each chunk in `asking`."""
        parts = self.records.split([count for count, _ in self.asking])
        wanted = [number for _, number in self.asking]
        return tuple([part[:, : 1 + k].numpy().tobytes() for part, k in zip(parts, wanted)])


def score_prompts(
    runner: "ModelRunner",
    hidden: Tensor,
    chunks: Sequence[PrefillChunk],
    make: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> PromptLogprobs:
    """Compute the log-probabilities that `chunks` ask for. At least one chunk asks for some.

    hidden [P, hidden size] are the hidden states of all tokens of the chunks, packed. `make` takes
    the arguments of make_records, in whose place it is called.
    """
    make = make or make_records
    rows: list[int] = []
    token_ids: list[int] = []
    asking: list[tuple[int, int]] = []
    start = 0
    for chunk in chunks:
        if scored := chunk.scored:
            count, begin = len(scored.token_ids), start + scored.begin
            rows += range(begin, begin + count)
            token_ids += scored.token_ids
            asking.append((count, min(scored.num_likeliest, runner.vocab_size)))
        start += len(chunk.token_ids)
    most = max(number for _, number in asking)
    wanted = runner._upload(np.array((rows, token_ids), dtype=np.int64))
    records = []
    for piece, tokens in zip(*[x.split(ROWS_AT_ONCE) for x in wanted]):
        logits = runner.model.compute_logits(hidden[piece])
        logits = runner.group.gather_vocab(logits, runner.vocab_size)
        records.append(make(logits, tokens, most))
    return PromptLogprobs(asking, torch.cat(records))


def make_records(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Make the records [R, 1 + most, 2] int32 of token_ids [R] from logits [R, V].

    If most is 1, the lowest token id wins a tie, as in greedy sampling. An id below 0 is no token,
    and its log-probability has no meaning.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    if most == 1:
        best, likeliest = logprobs.max(dim=-1, keepdim=True)
    else:
        best, likeliest = logprobs.topk(most)
    own = token_ids.unsqueeze(1)
    of_own = logprobs.gather(1, own.clamp(min=0))
    ids, values = torch.cat((own, likeliest), 1), torch.cat((of_own, best), 1)
    return torch.stack((ids.int(), values.view(torch.int32)), dim=-1)
