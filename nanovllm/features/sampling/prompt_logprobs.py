"""Log-probabilities of the tokens of prompts.

A forward pass gives the hidden state of each token of a prompt; that of one token gives the logits
of the next. A prompt has thousands of tokens and a vocabulary a hundred thousand entries, so logits
are made for a few tokens at a time, and only what is asked for is kept of them.

Shapes: P tokens of prompt chunks; R of them whose next token is scored; V vocabulary entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.batch import PrefillChunk

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Logits that are there at once. They and their log-probabilities take 10 bytes an entry: 400 MB
# of 151,936 entries.
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of R tokens of a step's prompts, records [R, 1 + most, 2] int32: token ids and, as a
    float32's bits, their log-probabilities.

    First comes the prompt's own token, then the likeliest in order. `asking` has, for each chunk
    that asks, how many of the R tokens are its own, and how many likeliest it wants.
    """

    asking: list[tuple[int, int]]
    records: Tensor

    def read(self) -> tuple[bytes, ...]:
        """For each chunk that asks, the records of its tokens one after the other."""
        parts = self.records.split([count for count, _ in self.asking])
        wanted = [number for _, number in self.asking]
        return tuple([part[:, : 1 + k].numpy().tobytes() for part, k in zip(parts, wanted)])


def score_prompts(
    runner: "ModelRunner", hidden: Tensor, chunks: Sequence[PrefillChunk]
) -> PromptLogprobs:
    """What `chunks` ask for, by the hidden states [P, hidden size] of all their tokens, packed."""
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
        records.append(make_records(logits, tokens, most))
    return PromptLogprobs(asking, torch.cat(records))


def make_records(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """The records [R, 1 + most, 2] int32 of these tokens [R], by logits [R, V].

    Where one likeliest token is asked for, the lowest index wins a tie, as in sampling.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    if most == 1:
        best, likeliest = logprobs.max(dim=-1, keepdim=True)
    else:
        best, likeliest = logprobs.topk(most)
    own = token_ids.unsqueeze(1)
    ids, values = torch.cat((own, likeliest), 1), torch.cat((logprobs.gather(1, own), best), 1)
    return torch.stack((ids.int(), values.view(torch.int32)), dim=-1)
