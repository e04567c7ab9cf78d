"""The model runner for a CPU, which takes the most likely tokens in C++."""

import torch
from torch import Tensor

from nanovllm.backends.cpu import cpp_ops
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.sampler import sample


class CPUModelRunner(ModelRunner):
    """A model runner on a CPU."""

    def _sample_tokens(
        self, logits: Tensor, *, temperatures: Tensor, vocab_start: int = 0, **options: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for each row, as `sample` does. All cores share the rows of a batch."""
        logits = logits.float()
        in_cpp = cpp_ops.load() is not None
        if not in_cpp or not len(logits) or (temperatures > 0).any():
            return sample(logits, temperatures=temperatures, vocab_start=vocab_start, **options)
        tokens, values = cpp_ops.arg_max(logits)
        return torch.where(tokens < 0, tokens, tokens + vocab_start), values
