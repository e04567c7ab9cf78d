"""The resampler of CUDA devices: Triton kernels sample rows with filters, penalties or logprobs."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.backends.cuda.triton import resampler as kernels
from nanovllm.features.sampling.resampler import Resampler, Rows
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner, StepOutput


def make_resampler(runner: "ModelRunner") -> Resampler:
    """Make a CUDAResampler, or the plain one if Triton is too old for its kernels."""
    return CUDAResampler(runner) if kernels.CAN_COMPILE else Resampler(runner)


class CUDAResampler(Resampler):
    """A resampler that launches two kernels a step to sample, and two for log-probabilities.

    On one rank it launches them for all rows of a step. So nothing has to be copied to the device
    when other rows than before need resampling. For a row that does not need it, a kernel reads the
    row's slot and stops.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__(runner)
        self.rows_at_once = runner.max_num_seqs
        if self.group.size > 1:
            # The ranks' logits of so many rows are gathered at a time.
            self.rows_at_once = min(128, self.rows_at_once)
        device = self.slots.table.device
        self._space = kernels.Workspace(self.rows_at_once, self.vocab_size, device)
        self._all = torch.arange(runner.max_num_seqs, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)

    def warmup(self, output: "StepOutput") -> None:
        rows = Rows([0], [SamplingParams(logprobs=1)], self._all[:1], self.vocab_size)
        logits = output.logits[:1]
        if self.group.size > 1:
            logits = logits.new_empty(1, self.vocab_size)
        self._sample(rows, logits, output)
        self._sample(rows, logits.float(), output)  # edited logits are float32
        self._logprobs(rows, logits, output)

    def _rows(self, index: list[int], params: list[SamplingParams], alone: bool) -> list[Rows]:
        if self.group.size > 1 or not alone:
            return super()._rows(index, params, alone)
        return [Rows(index, params, None, self.vocab_size)]

    def _sample(self, rows: Rows, logits: Tensor, output: "StepOutput") -> None:
        slots, nothing = self.slots, self._nothing
        counts = nothing if slots.counts is None else slots.counts
        barred, cells = [
            nothing.view(torch.bool) if table is None else table
            for table in (slots.barred, slots.cells)
        ]
        kernels.resample(
            logits,
            self._all[: len(logits)] if rows.at is None else rows.at,
            output,
            self.state,
            slots,
            (counts, barred, cells),
            self._space,
        )

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> Tensor:
        at = self._all[: len(logits)] if rows.at is None else rows.at
        most = rows.most_logprobs
        return kernels.logprobs(logits, at, output, self.slots, most, self._space)
