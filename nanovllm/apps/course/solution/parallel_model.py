"""Tensor parallelism: the MLP's matrices, split over ranks. Ranks are entries of a list here."""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.apps.course.solution.model import Model


def column_parallel(x: Tensor, weight: Tensor, num_ranks: int) -> list[Tensor]:
    """Multiply x [T, in] by weight [out, in], split by outputs.

    Returns the part [T, out / num_ranks] that each rank computes with its shard of the weight.
    """
    # <piece 11>
    return [x @ shard.T for shard in weight.chunk(num_ranks, dim=0)]
    # </piece>


def row_parallel(parts: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Multiply x [T, in] by weight [out, in], split by inputs. Rank i has only parts[i] of x.

    Returns the summand [T, out] of each rank: their sum is the product.
    """
    # <piece 11>
    shards = weight.chunk(len(parts), dim=1)
    return [part @ shard.T for part, shard in zip(parts, shards)]
    # </piece>


def all_reduce(summands: list[Tensor]) -> Tensor:
    """Sum the tensors of all ranks. In a real engine each rank gets the sum over the network."""
    return sum(summands[1:], summands[0])


class ParallelModel(Model):
    """A model whose MLP is split over ranks. `num_sums` counts the calls of all_reduce."""

    num_ranks = 2
    num_sums = 0

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (
            self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        self.num_sums += 1
        # <piece 11>
        gates = column_parallel(x, gate, self.num_ranks)
        ups = column_parallel(x, up, self.num_ranks)
        hidden = [F.silu(gate_i) * up_i for gate_i, up_i in zip(gates, ups)]
        return all_reduce(row_parallel(hidden, down))
        # </piece>
