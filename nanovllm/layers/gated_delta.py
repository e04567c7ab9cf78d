"""Gated DeltaNet: linear attention whose state is corrected by the delta rule, and decays.

(Yang et al. 2025.) Each value head has a state S, a matrix that maps keys to values. A token with
query q, key k and value v, gate g <= 0 and strength beta changes and reads the state:

    S = exp(g) S                      the state decays
    S = S + k (beta (v - k^T S))^T    the value that the state holds for k moves towards v
    o = S^T q

`delta_rule_token` computes this for one token of each sequence, `delta_rule_chunks` for prompts, a
block of tokens at a time. Both compute in float32. A state that is kept in bfloat16 is rounded
after each token that decodes, and after each chunk of a prompt.

Shapes: T tokens (B decoding sequences, then P tokens of N prompt chunks), G key heads, H value
heads, key size Dk, value size Dv, R rows of state. H / G consecutive value heads share a key head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import (
    RowParallelLinear,
    SensitiveLinear,
    Shard,
    StackedLinear,
    empty_parameter,
    shard_kv_heads,
    stack,
)
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.layers.short_conv import ShortConvolution
from nanovllm.weights.weight_slice import WeightSlice

# Tokens of a prompt that are computed at once. More of them take more work per token, fewer make
# the loop over blocks longer.
BLOCK = 64
NORM_EPS = 1e-6  # of the norms of q and k


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a rank, and where they lie in a checkpoint's tensors."""

    key_dim: int
    value_dim: int
    all_key_heads: int  # of all ranks
    all_value_heads: int
    num_key_heads: int  # of this rank
    num_value_heads: int
    first_key_head: int
    first_value_head: int

    @classmethod
    def of_rank(
        cls,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        group: ParallelGroup,
    ) -> "DeltaHeads":
        """Return the heads of a rank, which holds whole value heads and the keys that they need."""
        count = group.shard(num_value_heads, "linear_num_value_heads")
        keys, first_key = shard_kv_heads(num_key_heads, group, "linear_num_key_heads")
        return cls(
            key_dim=key_dim,
            value_dim=value_dim,
            all_key_heads=num_key_heads,
            all_value_heads=num_value_heads,
            num_key_heads=keys,
            num_value_heads=count,
            first_key_head=first_key,
            first_value_head=group.rank * count,
        )

    @property
    def sizes(self) -> list[int]:
        """The number of channels that q, k and v have on this rank."""
        keys = self.num_key_heads * self.key_dim
        return [keys, keys, self.num_value_heads * self.value_dim]

    def qkv(self) -> list[Shard]:
        """Return this rank's shards of q, k and v, which a checkpoint stacks in this order."""
        keys = self._of_keys(self.key_dim)
        return [keys, keys, self._of_values(self.value_dim)]

    def projections(self) -> tuple[list[Shard], list[Shard]]:
        """Return the shards of q, k, v and z, and of b and a, in a tensor for each of the names."""
        qkv = [replace(shard, name="in_proj_qkv") for shard in stack(self.qkv())]
        z = replace(self._of_values(self.value_dim), name="in_proj_z")
        b, a = (replace(self._of_values(1), name=f"in_proj_{name}") for name in "ba")
        return [*qkv, z], [b, a]

    def grouped_projections(self) -> tuple[list[Shard], list[Shard]]:
        """Return the shards of q, k, v and z, and of b and a, in two tensors.

        The first tensor holds, for each key head, its q and k, and v and z of its value heads. The
        second one holds, for each key head, b and a of its value heads.
        """
        ratio = self.all_value_heads // self.all_key_heads
        dim, keys, values = self.value_dim, self.key_dim, ratio * self.value_dim
        parts: dict[str, list[Shard]] = {name: [] for name in "qkvzba"}
        end = self.first_value_head + self.num_value_heads
        for head in range(self.first_key_head, self.first_key_head + self.num_key_heads):
            first = max(self.first_value_head, head * ratio)
            count = min(end, (head + 1) * ratio) - first
            skipped = first - head * ratio
            qkvz = {
                "q": (0, keys),
                "k": (keys, keys),
                "v": (2 * keys + skipped * dim, count * dim),
                "z": (2 * keys + values + skipped * dim, count * dim),
            }
            for name, (start, size) in qkvz.items():
                width = 2 * keys + 2 * values
                total = self.all_key_heads * width
                parts[name].append(Shard(None, total, head * width + start, size))
            for name, start in (("b", skipped), ("a", ratio + skipped)):
                total, start = 2 * self.all_value_heads, 2 * ratio * head + start
                parts[name].append(Shard(None, total, start, count))
        qkvz_shards = [shard for name in "qkvz" for shard in parts[name]]
        return qkvz_shards, parts["b"] + parts["a"]

    def _of_keys(self, size: int) -> Shard:
        first, count, total = self.first_key_head, self.num_key_heads, self.all_key_heads
        return Shard(None, total * size, first * size, count * size)

    def _of_values(self, size: int) -> Shard:
        first, count, total = self.first_value_head, self.num_value_heads, self.all_value_heads
        return Shard(None, total * size, first * size, count * size)


class GatedDeltaNet(RecurrentLayer):
    """A Gated DeltaNet layer: [T, hidden] -> [T, hidden].

    The ranks share the value heads evenly. Where there are more ranks than key heads, neighbouring
    ranks hold the same key head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        group: ParallelGroup,
        *,
        conv_width: int,
        eps: float,
        grouped: bool = False,  # the checkpoint's projections are two tensors, by key head
        state_dtype: torch.dtype = torch.float32,
    ):
        heads = DeltaHeads.of_rank(num_key_heads, num_value_heads, key_dim, value_dim, group)
        super().__init__((heads.num_value_heads, key_dim, value_dim), state_dtype)
        self.heads = heads
        qkvz, ba = heads.grouped_projections() if grouped else heads.projections()
        self.in_proj_qkvz = StackedLinear(hidden_size, qkvz, bias=False)
        self.in_proj_ba = SensitiveLinear(hidden_size, ba, bias=False)
        self.conv1d = ShortConvolution(heads.qkv(), conv_width)
        # g = -exp(A_log) softplus(a + dt_bias). In float32, because exp magnifies an error.
        self.A_log = empty_parameter(heads.num_value_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads.num_value_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = RowParallelLinear(num_value_heads * value_dim, hidden_size, group)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, count = self.heads, len(x)
        qkv, z = self.in_proj_qkvz(x).tensor_split([sum(heads.sizes)], dim=-1)
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)  # [T, H] each
        qkv = F.silu(self.conv1d(qkv))
        q, k, v = qkv.split(heads.sizes, dim=-1)
        q, k = (y.reshape(count, -1, heads.key_dim) for y in (q, k))  # [T, G, Dk]
        v, z = (y.reshape(count, -1, heads.value_dim) for y in (v, z))  # [T, H, Dv]
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        out = self.recur(q, k, v, g, b.sigmoid())  # [T, H, Dv]
        return self.out_proj(self.norm(out, z).flatten(1))

    def decode(self, *inputs: Tensor, rows: Tensor) -> Tensor:
        q, k, v, g, beta = inputs
        return delta_rule_token(q, k, v, g, beta, self.state, rows)

    def prefill(self, *inputs: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        q, k, v, g, beta = inputs
        return delta_rule_chunks(q, k, v, g, beta, self.state, rows, starts)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        first, count = self.heads.first_value_head, self.heads.num_value_heads
        ours, shape = (slice(first, first + count),), (self.heads.all_value_heads,)
        yield WeightSlice(f"{path}.A_log", self.A_log, ours, shape)
        yield WeightSlice(f"{path}.dt_bias", self.dt_bias, ours, shape)


class GatedRMSNorm(RMSNorm):
    """An RMSNorm whose outputs are multiplied by silu(gate): x and gate [..., N] -> [..., N]."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return (super().forward(x) * F.silu(gate.float())).to(x.dtype)


def delta_rule_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: Tensor
) -> Tensor:
    """Apply the delta rule to one token of each of B sequences, and update their rows.

    q and k [B, G, Dk], v [B, H, Dv], g and beta [B, H], state [R, H, Dk, Dv], rows [B] ->
    [B, H, Dv].
    """
    dtype = v.dtype
    q, k, v, g, beta = prepare(q, k, v, g, beta)
    s = state[rows].to(v.dtype) * g.exp()[..., None, None]  # [B, H, Dk, Dv]
    change = beta.unsqueeze(-1) * (v - torch.einsum("bhk,bhkv->bhv", k, s))
    s = s + k.unsqueeze(-1) * change.unsqueeze(-2)
    state[rows] = s.to(state.dtype)
    return torch.einsum("bhk,bhkv->bhv", q, s).to(dtype)


def delta_rule_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Tensor,
    starts: Tensor,
) -> Tensor:
    """Apply the delta rule to N chunks of sequences, and update their rows.

    q and k [P, G, Dk], v [P, H, Dv], g and beta [P, H], state [R, H, Dk, Dv], rows [N], starts
    [N + 1] -> [P, H, Dv].
    """
    out = torch.empty_like(v)
    inputs = prepare(q, k, v, g, beta)
    bounds = starts.tolist()
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin == end:
            continue
        row = rows[i : i + 1]
        q, k, v, g, beta = (x[begin:end] for x in inputs)
        before = state[row][0].to(q.dtype)
        out[begin:end], last = delta_rule_blocks(q, k, v, g, beta, before)
        state[row] = last.to(state.dtype)
    return out


def delta_rule_blocks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to consecutive tokens of one sequence, BLOCK of them at a time.

    Inputs are those that `prepare` returns, with L tokens; s [H, Dk, Dv] is the state before them.
    Returns the outputs [L, H, Dv] and the state after the last token.

    Within a block, let d(i) be the sum of g up to token i. The change u(i) that token i makes is

        u(i) = beta(i) (v(i) - exp(d(i)) S^T k(i) - sum of exp(d(i) - d(j)) (k(i) . k(j)) u(j))

    over j < i, which is a triangular system for all u of the block. With them, all outputs and the
    state after the block are matrix products.
    """
    length = len(q)
    count = -(-length // BLOCK)
    padding = count * BLOCK - length
    # A token of padding has g = 0 and beta = 0, and does not change the state.
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (count, BLOCK)).transpose(1, 2)
        for x in (q, k, v)
    )  # [blocks, H, BLOCK, D]
    g, beta = (
        F.pad(x, (0, 0, 0, padding)).unflatten(0, (count, BLOCK)).transpose(1, 2) for x in (g, beta)
    )  # [blocks, H, BLOCK]
    d = g.cumsum(-1)
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    decay = (d.unsqueeze(-1) - d.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    beta = beta.unsqueeze(-1)
    # (1 + system) u = beta (v - exp(d) S^T k). The solver takes the diagonal for ones.
    system = (beta * (k @ k.mT)) * decay
    right_sides = torch.cat((beta * v, beta * d.exp().unsqueeze(-1) * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * decay
    q_decayed = q * d.exp().unsqueeze(-1)
    k_decayed = k * (d[..., -1:] - d).exp().unsqueeze(-1)
    block_decay = d[..., -1].exp()[..., None, None]  # [blocks, H, 1, 1]

    out = torch.empty_like(v)
    for i in range(count):
        u = from_values[i] - from_state[i] @ s  # [H, BLOCK, Dv]
        out[i] = q_decayed[i] @ s + within[i] @ u
        s = block_decay[i] * s + k_decayed[i].mT @ u
    return out.transpose(1, 2).flatten(0, 1)[:length], s


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring the inputs of the delta rule to float32, norm q and k, and repeat them for each head.

    A float64 input stays float64. Returns q and k as [T, H, Dk].
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    repeats = v.shape[1] // k.shape[1]
    q, k = (
        (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)).repeat_interleave(
            repeats, dim=1
        )
        for x in (q, k)
    )
    return q * q.shape[-1] ** -0.5, k, v, g, beta
