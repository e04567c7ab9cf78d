"""The sampler: one token a row, as a function of logits, temperature, seed and position alone.

The arg max of logits / t + g, with independent Gumbel noise g, is an exact sample of
softmax(logits / t) (the Gumbel-max trick; Maddison et al. 2014). The sampler applies the trick
twice, which needs less noise. The vocabulary is cut into cells of VOCAB_UNIT entries. First, one
noise is added to the log-sum-exp of each cell, and the arg max samples a cell by its probability.
Then one noise is added to each entry of that cell, and the arg max samples an entry.

Noise is a function of (seed, position, vocabulary index). So a token is the same in any batch, no
generator has a state, and each rank can sample from its own shard of the vocabulary: the rank with
the greatest value wins.

Shapes: B rows, V vocabulary entries, C cells.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.parallel import VOCAB_UNIT as CELL
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.sampling_params import INVALID_TOKEN

# Lower scores are barred, as -inf is, unless the row is greedy: a logits processor may bar tokens
# by the lowest finite number. The kernels have the same bound, in units of log2.
LOWEST_SCORE = -1e30 * math.log(2)
LOW_WORD = 0xFFFFFFFF  # of an int64, its lower 32 bits


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row. The lowest index wins a tie.

    Args:
        logits: [B, V]; column i is vocabulary entry vocab_start + i. A token whose logit is -inf is
            never sampled, nor is one of a row with a temperature whose logit / temperature is below
            LOWEST_SCORE.
        temperatures: [B] float32. 0 takes the arg max. Below 0 any token will do, because the row
            is sampled again elsewhere.
        seeds: [B] int64.
        positions: [B] int64, of the tokens that are sampled.
    Returns:
        tokens [B] int64 and their values [B] float32. A row whose maximum is not finite, or that
        has no token to sample, gets INVALID_TOKEN. Its value is infinity, which no other rank
        exceeds; where this rank has no token to sample, it is -inf.
    """
    logits = logits.float()
    random = (temperatures > 0).unsqueeze(1)
    if random.any():
        tokens, values = _sample_by_cells(
            logits,
            random,
            temperatures=temperatures,
            seeds=seeds,
            positions=positions,
            vocab_start=vocab_start,
        )
        values = values.masked_fill(random.squeeze(1) & (values < LOWEST_SCORE), -torch.inf)
    else:
        values, tokens = logits.max(dim=1)
        tokens += vocab_start
    peak = logits.amax(dim=1)  # NaN if there is one
    tokens = tokens.masked_fill(~peak.isfinite() | (values == -torch.inf), INVALID_TOKEN)
    return tokens, values.masked_fill(peak.isnan() | (peak == torch.inf), torch.inf)


def _sample_by_cells(
    logits: Tensor,
    random: Tensor,
    *,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_start: int,
) -> tuple[Tensor, Tensor]:
    scores = logits / torch.where(random, temperatures.unsqueeze(1), 1.0)
    begin = vocab_start // CELL * CELL
    margins = (vocab_start - begin, -(vocab_start + logits.shape[1]) % CELL)
    scores = F.pad(scores, margins, value=-torch.inf).unflatten(1, (-1, CELL))  # [B, C, CELL]
    cells = begin + torch.arange(0, scores.shape[1] * CELL, CELL, device=logits.device)
    # Where a shard begins inside a cell, its part is a cell of its own, with noise of its own.
    noise = gumbel_noise(seeds, positions, cells.clamp(min=vocab_start), stream=0)
    totals = torch.where(random, scores.logsumexp(dim=2) + noise, scores.amax(dim=2))  # [B, C]
    values, best = totals.max(dim=1)
    entries = cells[best].unsqueeze(1) + torch.arange(CELL, device=logits.device)  # [B, CELL]
    scores = scores[torch.arange(len(best), device=logits.device), best]
    scores = torch.where(random, scores + gumbel_noise(seeds, positions, entries, stream=1), scores)
    return entries.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1), values


def best_over_ranks(tokens: Tensor, values: Tensor, group: ParallelGroup) -> Tensor:
    """Choose the token with the greatest value of all ranks, the lowest token in a tie.

    tokens [B] int64 and values [B] float32 are this rank's. Ranks exchange one integer a row
    instead of logits. These integers are ordered as (value, -token) is, so their maximum decides.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    # Integers in the order of the floats. Bits of negative floats grow downwards: turn them round.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) | (LOW_WORD - (tokens & LOW_WORD))
    tokens = LOW_WORD - (group.maximum(keys) & LOW_WORD)
    return tokens.int().long()  # INVALID_TOKEN is -1 again


def gumbel_noise(seeds: Tensor, positions: Tensor, index: Tensor, stream: int) -> Tensor:
    """Make standard Gumbel noise [B, n] float32 for index [n] or [B, n].

    The random bits are the first word of Philox4x32-10 (Salmon et al., SC 2011) with the seed as
    key and (index, position, stream, 0) as counter.
    """
    words = philox(seeds.unsqueeze(1), index, positions.unsqueeze(1), stream)[0]
    return -torch.log(-torch.log(open_unit_interval(words)))


def open_unit_interval(words: Tensor) -> Tensor:
    """Turn the upper 23 bits of 32-bit words into float32 numbers in (0, 1).

    With one bit more, the largest would round to 1.
    """
    return ((words >> 9).float() + 0.5) * 2.0**-23


def philox(
    seeds: Tensor, c0: Tensor, c1: Tensor, c2: int = 0, rounds: int = 10
) -> tuple[Tensor, ...]:
    """Compute Philox4x32 of the counters (c0, c1, c2, 0) under 64-bit keys.

    Returns four tensors of 32-bit words, held in int64.
    """
    mask = LOW_WORD
    k0, k1 = seeds & mask, (seeds >> 32) & mask
    x0, x1, x2, x3 = c0 & mask, c1 & mask, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(rounds):
        # The products wrap to 64 bits; their two halves are exact all the same.
        p0, p2 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x2 = ((p2 >> 32) & mask) ^ x1 ^ k0, ((p0 >> 32) & mask) ^ x3 ^ k1
        x1, x3 = p2 & mask, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.broadcast_tensors(x0, x1, x2, x3)
