"""Every fused kernel of the library, said again in plain PyTorch.

These functions are the CPU path and the oracle of the Triton kernels, whose signatures they share.
Shapes: T tokens, H query heads, G KV heads, D head size, B sequences, V vocabulary entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CELL = 16  # consecutive vocabulary entries that sampling weighs as one; ranks meet between cells: layers/parallel.VOCAB_UNIT


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [..., N] to root mean square 1, then by `weight` [N]. Computed in float32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass over x; the rest is small
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual` + `x`, and its RMS norm: (normed, new residual). May overwrite both arguments."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, 2F] -> [T, F]: SiLU of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def moe(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool) -> Tensor:
    """A mixture of SwiGLU experts: each token goes through K of the E, and their results are summed by weight.

    A token's experts are those of its K largest logits, weighted by their probabilities; `renormalize` lets the weights
    sum to 1. x [T, N], logits [T, E], gate_up [E, 2F, N], down [E, N, F] -> [T, N].
    """
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)  # [T, K]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order = experts.flatten().argsort(stable=True)  # the T K pairs of token and expert, expert by expert
    counts = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    results = x.new_empty(len(order), x.shape[1])
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            hidden = silu_and_mul(F.linear(x[pairs // top_k], gate_up[expert]))
            results[pairs] = F.linear(hidden, down[expert])
    # Summing by token, not by expert, keeps a token's result independent of the others in the batch.
    return (results.view(-1, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def qk_norm_rope_store(
    qkv: Tensor,
    head_dim: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare a step's attention: split the heads, norm q and k, rotate them, write k and v to the cache.

    qkv [T, (H + 2G) D] may be overwritten. q_weight, k_weight [D]: RMS norm of each head; None for models without it.
    cos_sin [max_position, D] float32: the cosines of D/2 frequencies, then their sines; halves rotate ("neox" style).
    positions, slots [T] int64; a slot of -1 is not written. k_cache, v_cache [blocks, block_size, G, D]; with no
    elements at all, nothing is written. Returns q [T, H, D], k [T, G, D], v [T, G, D].
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        qk = rms_norm(qk, torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1))), eps)
    q, k = _rotate(qk, cos_sin[positions].unsqueeze(1)).split([num_heads, num_kv_heads], dim=1)
    if k_cache.numel():
        written = slots >= 0
        k_new, v_new = k, v
        if not bool(written.all()):
            slots, k_new, v_new = slots[written], k[written], v[written]
        k_cache.view(-1, num_kv_heads, head_dim)[slots] = k_new
        v_cache.view(-1, num_kv_heads, head_dim)[slots] = v_new
    return q, k, v


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D], cos_sin [T, 1, D]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves of each head."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1)
    return (wide * torch.cat((cos, cos), dim=-1)).addcmul_(swapped, torch.cat((-sin, sin), dim=-1)).to(x.dtype)


def decode_inputs(
    rows: Tensor, last_tokens: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turn the running state of `rows` [B] int64 into a decode step's inputs, and count its token into the state.

    The state has R + 1 rows: last_tokens int64, context_lens int32 (tokens whose K and V are written) and
    block_tables [R + 1, W] int32. Its last row is for padding: its length stays 0 and its tokens are not written.
    Returns token_ids, positions, slots [B] int64, lens [B] int32 (position + 1) and tables [B, W] int32.
    """
    scratch = context_lens.shape[0] - 1
    tables = block_tables[rows]
    positions = context_lens[rows].long()
    lens = (positions + 1).int()
    blocks = tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
    slots = torch.where(rows == scratch, -1, blocks * block_size + positions % block_size)
    context_lens[rows] = lens
    context_lens[scratch] = 0
    return last_tokens[rows], positions, slots, lens, tables


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, vocab_start: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by the Gumbel-max trick, first a cell, then an entry in it; temperature 0 takes the arg max.

    softmax(logits / t) is sampled exactly by the arg max of logits / t + g with independent Gumbel noise g (Gumbel 1954;
    Maddison et al. 2014). The vocabulary is cut into cells of CELL entries: the arg max of the cells' log-sum-exps plus
    noise draws a cell by its probability, at the price of one noise a cell, and noise of its own draws an entry in it.
    Noise is a function of (seed, position, vocabulary index) alone, see `gumbel_noise`, so a draw is the same in any
    batch. Vocabulary shards can each take their own best, and the largest value wins; it is the same as without shards
    where they meet between cells.

    logits [B, V], the columns being entries vocab_start, vocab_start + 1, ... of the vocabulary; temperatures [B] float32,
    seeds [B] int64, positions [B] int64 (of the token being drawn). Returns (token ids [B] int64, their values [B] float32).
    The lowest index wins a tie.
    """
    drawn = (temperatures > 0).unsqueeze(1)
    if not drawn.any():
        values, tokens = logits.float().max(dim=1)
        return tokens + vocab_start, values
    scores = logits.float() / torch.where(drawn, temperatures.unsqueeze(1).clamp(min=1e-10), 1.0)
    begin = vocab_start // CELL * CELL
    margins = (vocab_start - begin, -(vocab_start + logits.shape[1]) % CELL)
    scores = F.pad(scores, margins, value=float("-inf")).unflatten(1, (-1, CELL))  # [B, C, CELL]
    cells = begin + torch.arange(0, scores.shape[1] * CELL, CELL, device=logits.device)
    # Where a shard begins inside a cell, its part of it is drawn apart from the other shard's, with other noise.
    noise = gumbel_noise(seeds, positions, cells.clamp(min=vocab_start), stream=0)
    values, best = torch.where(drawn, scores.logsumexp(dim=2) + noise, scores.amax(dim=2)).max(dim=1)
    entries = cells[best].unsqueeze(1) + torch.arange(CELL, device=logits.device)  # [B, CELL]
    scores = scores[torch.arange(len(best), device=logits.device), best]
    scores = torch.where(drawn, scores + gumbel_noise(seeds, positions, entries, stream=1), scores)
    return entries.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1), values


def gumbel_noise(seeds: Tensor, positions: Tensor, index: Tensor, stream: int) -> Tensor:
    """[B, n] float32 of standard Gumbel noise for index [n] or [B, n], from Philox4x32-10 (Salmon et al., SC 2011).

    The key is the seed, the counter (index, position, stream, 0); of its four words the first is used.
    """
    words = philox(seeds.unsqueeze(1), index, positions.unsqueeze(1), stream)[0]
    return -torch.log(-torch.log(open_unit_interval(words)))


def open_unit_interval(words: Tensor) -> Tensor:
    """The upper 23 bits of 32-bit words as float32 in (0, 1). With one bit more, the largest would round to 1."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, c2: int = 0, rounds: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 of the counters (c0, c1, c2, 0) under 64-bit keys: four tensors of 32-bit words, held in int64."""
    mask = 0xFFFFFFFF
    k0, k1 = seeds & mask, (seeds >> 32) & mask
    c0, c1, c2, c3 = c0 & mask, c1 & mask, torch.full_like(c0, c2), torch.zeros_like(c0)
    for _ in range(rounds):
        # The products wrap to 64 bits; their two halves are exact all the same.
        p0, p2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((p2 >> 32) & mask) ^ c1 ^ k0, p2 & mask, ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.broadcast_tensors(c0, c1, c2, c3)
