"""A step's sampled tokens, on their way to the host while the device works on."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.backends.cuda.triton import elementwise
from nanovllm.engine.batch import StepResult
from nanovllm.engine.model_runner import SampledTokens


@dataclass(frozen=True, slots=True)
class SampledTokensInFlight(SampledTokens):
    """Sampled tokens in pinned host memory, which are valid once the event `arrived` is reached."""

    arrived: torch.cuda.Event = field(kw_only=True)

    @classmethod
    def send(
        cls, tokens: Tensor, logprobs: list[Any], prompt_logprobs: Any, host: Tensor | None = None
    ) -> "SampledTokensInFlight":
        """Start to copy tokens and log-probabilities to the host; return without waiting.

        host: pinned memory that a kernel writes the tokens to, which must not be freed. The next
            step's kernels wait longer for a copy.
        """
        if host is None:
            tokens = _to_host(tokens)
        else:
            elementwise.copy(tokens, host)
            tokens = host
        logprobs = [replace(part, records=_to_host(part.records)) for part in logprobs]
        if prompt_logprobs is not None:
            prompt_logprobs = replace(prompt_logprobs, records=_to_host(prompt_logprobs.records))
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(tokens, logprobs, prompt_logprobs, arrived=arrived)

    def ready(self) -> bool:
        return self.arrived.query()

    def wait(self) -> StepResult:
        self.arrived.synchronize()
        return SampledTokens.wait(self)


def _to_host(x: Tensor) -> Tensor:
    """Start to copy `x` into pinned memory, and return the copy."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
