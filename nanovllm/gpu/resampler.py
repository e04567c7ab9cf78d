"""Sample by Triton's kernels for rows that ask for more than a temperature and a seed."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.kernels.triton import resampling
from nanovllm.sampling.resampler import Resampler, Rows
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.batch_state import BatchState
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


def make_resampler(runner: "ModelRunner") -> Resampler:
    """The plain one where Triton is too old for these kernels."""
    return CUDAResampler(runner) if resampling.CAN_COMPILE else Resampler(runner)


class CUDAResampler(Resampler):
    """Launches two kernels a step for what changes the sampling, and two for log-probabilities."""

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__(runner)
        # Nothing is sorted, but several ranks gather logits.
        self.rows_at_once = runner.max_num_seqs if self.group.size == 1 else 128
        device = self.slots.params.device
        self._no_counts = torch.zeros(1, dtype=torch.int32, device=device)
        self._not_barred = torch.zeros(1, dtype=torch.bool, device=device)

    def rehearse(self, output: "StepOutput", state: "BatchState") -> None:
        rows = Rows([0], [0], {0: SamplingParams(logprobs=1)}, False, self._upload)
        logits = output.logits[:1]
        if self.group.size > 1:
            logits = logits.new_empty(1, self.vocab_size)
        self._sample(rows, logits, output, state)
        self._logprobs(rows, logits, output)

    def _sample(
        self, rows: Rows, logits: Tensor, output: "StepOutput", state: "BatchState"
    ) -> None:
        counts = self._no_counts if self.slots.counts is None else self.slots.counts
        barred = self._not_barred if self.slots.barred is None else self.slots.barred
        resampling.resample(logits, rows.at, output, state, self.slots, counts, barred)

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> tuple[Tensor, Tensor]:
        most = min(rows.most_logprobs, self.vocab_size)
        return resampling.logprobs(logits, rows.at, output.tokens, self.slots.limits, most)
