"""A step's answer on its way from the device to the host, while the device goes on."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanovllm.engine.batch import StepResult
from nanovllm.sampling.sampler import Logprobs


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens [B], and the log-probabilities of those rows that asked."""

    tokens: Tensor
    arrived: "torch.cuda.Event | None"  # None: they are there
    logprobs: list[Logprobs] = field(default_factory=list)

    @classmethod
    def send(cls, tokens: Tensor, logprobs: list[Logprobs]) -> "SampledTokens":
        if tokens.device.type == "cpu":
            return cls(tokens, None, logprobs)
        tokens = _to_host(tokens)
        logprobs = [replace(one, token_ids=_to_host(one.token_ids), values=_to_host(one.values)) for one in logprobs]
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(tokens, arrived, logprobs)

    def ready(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> StepResult:
        if self.arrived is not None:
            self.arrived.synchronize()
        logprobs = {i: of_token for one in self.logprobs for i, of_token in one.read().items()}
        return StepResult(self.tokens.tolist(), logprobs)


def _to_host(x: Tensor) -> Tensor:
    """Start a copy into pinned memory."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
