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
        device = self.slot_params.table.device
        self._workspace = kernels.Workspace(self.rows_at_once, self.vocab_size, device)
        self._all_rows = torch.arange(runner.max_num_seqs, device=device)
        self._no_table = torch.zeros(1, dtype=torch.int32, device=device)

    def warmup(self, output: "StepOutput") -> None:
        rows = Rows([0], [SamplingParams(logprobs=1)], self._all_rows[:1], self.vocab_size)
        logits = output.logits[:1]
        if self.group.size > 1:
            logits = logits.new_empty(1, self.vocab_size)
        self._sample(rows, logits, output)
        self._sample(rows, logits.float(), output)  # edited logits are float32
        self._logprobs(rows, logits, output)

    def _split(self, index: list[int], params: list[SamplingParams], alone: bool) -> list[Rows]:
        if self.group.size > 1 or not alone:
            return super()._split(index, params, alone)
        return [Rows(index, params, None, self.vocab_size)]

    def _sample(self, rows: Rows, logits: Tensor, output: "StepOutput") -> None:
        tables, no_table = self.token_tables, self._no_table
        kernels.resample(
            logits,
            self._all_rows[: len(logits)] if rows.at is None else rows.at,
            output,
            state=self.batch_state,
            slot_params=self.slot_params,
            counts=no_table if tables.counts is None else tables.counts,
            barred=no_table.view(torch.bool) if tables.barred is None else tables.barred,
            cells=no_table.view(torch.bool) if tables.cells is None else tables.cells,
            workspace=self._workspace,
        )

    def _logprobs(self, rows: Rows, logits: Tensor, output: "StepOutput") -> Tensor:
        return kernels.logprobs(
            logits,
            self._all_rows[: len(logits)] if rows.at is None else rows.at,
            output,
            slot_params=self.slot_params,
            most=rows.most_logprobs,
            workspace=self._workspace,
        )
