"""A step's answer on its way from the device to the host, while the device goes on."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.batch import StepResult
from nanovllm.engine.model_runner import SampledTokens


@dataclass(frozen=True, slots=True)
class SampledTokensInFlight:
    """Like SampledTokens, which are there once `arrived` has happened on the device."""

    on_host: SampledTokens
    arrived: torch.cuda.Event

    @classmethod
    def send(cls, tokens: Tensor, logprobs: list[Any]) -> "SampledTokensInFlight":
        tokens = _to_host(tokens)
        logprobs = [
            replace(part, token_ids=_to_host(part.token_ids), values=_to_host(part.values))
            for part in logprobs
        ]
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(SampledTokens(tokens, logprobs), arrived)

    def ready(self) -> bool:
        return self.arrived.query()

    def wait(self) -> StepResult:
        self.arrived.synchronize()
        return self.on_host.wait()


def _to_host(x: Tensor) -> Tensor:
    """Start a copy into pinned memory."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
