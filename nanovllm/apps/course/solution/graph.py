"""A graph: the operations of a step, recorded once and then replayed without the model's code.

A CUDA graph records kernels, and the GPU starts them by itself. Here PyTorch's operations take the
place of kernels, and a loop starts them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.apps.course.solution.model import Model


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors lie in the same memory, as a tensor and a view of it do."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Graph(TorchDispatchMode):
    """The operations that `function` called when it was captured, and its result.

    PyTorch calls __torch_dispatch__ instead of each operation. `function` must return a tensor. Its
    result, and all tensors in between, stay where they are: a replay writes new values there.
    """

    def __init__(self, function: Callable[[], Tensor]) -> None:
        super().__init__()
        # The operation, its arguments, its options, and its result.
        self.operations: list[tuple[Callable, tuple, dict, Any]] = []
        with self, torch.inference_mode():
            self.result = function()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation for the first time, and record it."""
        # <piece 10: run operation(*args, **kwargs), record it, and return its result>
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result
        # </piece>

    @torch.inference_mode()
    def replay(self) -> Tensor:
        """Run the recorded operations again. Returns the same result tensor with new values."""
        # <piece 10: run each operation again, and copy what is new to where the old result is>
        for operation, args, kwargs, result in self.operations:
            new = operation(*args, **kwargs)
            # The result of a view, or of an operation in place, is where it should be.
            for old, value in zip(tensors_in(result), tensors_in(new)):
                if not same_memory(old, value):
                    old.copy_(value)
        return self.result
        # </piece>


def tensors_in(result: Any) -> list[Tensor]:
    """List the tensors of an operation's result, which is a tensor, or several, or a number."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


class GraphedDecoder:
    """A sequence whose steps are replays of one graph. What differs from step to step is in
    tensors: the token, its position, and the keys and values of all `max_len` positions.
    """

    def __init__(self, model: Model, max_len: int = 64) -> None:
        shape = (model.num_layers, max_len, model.num_kv_heads, model.head_dim)
        self.model, self.max_len = model, max_len
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.token = torch.zeros(1, dtype=torch.int64)
        self.position = torch.zeros(1, dtype=torch.int64)
        self.graph = Graph(self.step)

    def step(self) -> Tensor:
        """Compute self.token at self.position. Returns logits [1, V]."""
        hidden = self.model.forward(self.token, self.position, self.attend)
        return self.model.logits(hidden)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [1, G, D] to their place, and attend from q [1, H, D] to all so far.

        All shapes are the same in each step, and no number is read from a tensor.
        """
        # <piece 10: index_copy_ writes to a place that a tensor names; masks hide later positions>
        self.k[layer].index_copy_(0, self.position, k)
        self.v[layer].index_copy_(0, self.position, v)
        group = q.shape[1] // k.shape[1]
        keys = self.k[layer].repeat_interleave(group, dim=1)  # [max_len, H, D]
        values = self.v[layer].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        later = torch.arange(self.max_len) > self.position  # [max_len]
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
        # </piece>

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Generate an output. The prompt goes through the graph, too, token by token."""
        output: list[int] = []
        for position, token in enumerate(prompt):
            logits = self.run(token, position)
        while len(output) < max_tokens and (not output or output[-1] != self.model.end_token):
            output.append(int(logits.argmax()))
            if len(output) < max_tokens:
                logits = self.run(output[-1], len(prompt) + len(output) - 1)
        return output

    def run(self, token: int, position: int) -> Tensor:
        """Fill the inputs, and replay the graph."""
        self.token.fill_(token)
        self.position.fill_(position)
        return self.graph.replay()
