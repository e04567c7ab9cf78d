"""A causal depthwise convolution over the last few tokens of a sequence.

Each channel is a weighted sum of its own last K values: out[t] = sum over j of
weight[j] * x[t - K + 1 + j], and `bias`. The K - 1 values before a chunk are the layer's state.

Shapes: T tokens (B decoding sequences, then P tokens of N prompt chunks), C channels, width K,
R rows of state.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanovllm.layers.linear import Shard, empty_parameter, stack
from nanovllm.layers.recurrent import RecurrentLayer
from nanovllm.weights.weight_slice import WeightSlice


class ShortConvolution(RecurrentLayer):
    """A causal depthwise convolution: [T, C] -> [T, C].

    `shards`: this rank's parts of the checkpoint's channels, which are stacked in one tensor
    [channels, 1, K].
    """

    def __init__(self, shards: Sequence[Shard], width: int, *, bias: bool = False):
        channels = sum(shard.count for shard in shards)
        super().__init__((width - 1, channels), torch.get_default_dtype())
        self.shards = stack(shards)
        self.num_channels = sum(shard.total for shard in shards)
        self.weight = empty_parameter(channels, width)
        self.bias = empty_parameter(channels) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.recur(x)

    def decode(self, *inputs: Tensor, rows: Tensor) -> Tensor:
        (x,) = inputs
        return convolve_token(x, self.weight, self.bias, self.state, rows)

    def prefill(self, *inputs: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        (x,) = inputs
        return convolve_chunks(x, self.weight, self.bias, self.state, rows, starts)

    def weight_slices(self, path: str) -> Iterator[WeightSlice]:
        row, total, every = 0, self.num_channels, slice(None)
        for shard in self.shards:
            here = slice(row, row + shard.count)
            ours = slice(shard.start, shard.start + shard.count)
            shape = (total, 1, self.weight.shape[1])
            weight = self.weight[here].unsqueeze(1)
            yield WeightSlice(f"{path}.weight", weight, (ours, every, every), shape)
            if self.bias is not None:
                yield WeightSlice(f"{path}.bias", self.bias[here], (ours,), (total,))
            row += shard.count


def convolve_token(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Tensor
) -> Tensor:
    """Convolve one token of each of B sequences, and shift it into their rows of the state.

    x [B, C], weight [C, K], state [R, K - 1, C], rows [B] -> [B, C].
    """
    window = torch.cat((state[rows], x.unsqueeze(1)), dim=1)  # [B, K, C]
    state[rows] = window[:, 1:]
    return weighted_sum([window[:, j] for j in range(weight.shape[1])], weight, bias)


def convolve_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Tensor, starts: Tensor
) -> Tensor:
    """Convolve N chunks of sequences, and keep the last inputs of each in its row of the state.

    x [P, C], weight [C, K], state [R, K - 1, C], rows [N], starts [N + 1] -> [P, C].
    """
    carried = weight.shape[1] - 1
    starts = starts.long()
    count, chunks = len(x), torch.arange(len(rows), device=x.device)
    tokens = torch.arange(count, device=x.device)
    # `inputs` holds the chunks one after the other, each after its K - 1 carried inputs. The first
    # input that token t of chunk i sees lies at t + i (K - 1).
    chunk_of = torch.searchsorted(starts[1:], tokens, right=True)
    first = tokens + chunk_of * carried
    offsets = torch.arange(carried, device=x.device)
    inputs = x.new_empty(count + len(rows) * carried, x.shape[1])
    inputs[first + carried] = x
    inputs[(starts[:-1] + chunks * carried).unsqueeze(1) + offsets] = state[rows]
    state[rows] = inputs[(starts[1:] + chunks * carried).unsqueeze(1) + offsets]
    return weighted_sum([inputs[first + j] for j in range(carried + 1)], weight, bias)


def weighted_sum(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sum K inputs [T, C] with the weights [C, K], in float32 at least."""
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    out = sum(x.to(dtype) * weight[:, j].to(dtype) for j, x in enumerate(inputs))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(inputs[0].dtype)
