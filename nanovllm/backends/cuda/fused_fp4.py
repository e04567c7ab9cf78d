"""Experts in MXFP4 whose codes are reordered for the kernel that multiplies by them on Hopper."""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda.fused_weight import FusedWeight
from nanovllm.backends.cuda.triton.moe import woven_experts
from nanovllm.backends.quantised.fp4 import Fp4Weight


class FusedFp4Weight(FusedWeight, Fp4Weight):
    """The weights of experts in MXFP4, woven where the kernel of woven_experts.py takes them.

    Elsewhere they stay as they were read, and the kernels of moe_packed.py multiply by them.
    """

    is_woven = False  # whether the kernels take the codes woven
    has_woven_codes = False  # whether they are woven by now: those that were just read are not

    @staticmethod
    def suits(plain: Fp4Weight) -> bool:
        """Tell whether the weights are of experts, and in MXFP4."""
        return bool(plain.lead) and not plain.scheme.is_nvidia

    @property
    def is_gated(self) -> bool:
        """True if the rows are those of gates and ups."""
        return len(self.starts) == 2

    @property
    def shall_weave(self) -> bool:
        """True if the kernel takes the weights woven: both of a mixture, or neither."""
        if woven_experts is None or self.is_invariant:  # its sums depend on the number of rows
            return False
        rows = self.height // 2 if self.is_gated else self.height
        return woven_experts.is_woven(self.codes.device, self.plain.dtype, rows, self.width)

    @property
    def woven(self) -> Any:
        """The weights as the kernel reads them."""
        return woven_experts.view_woven(self.codes, self.scales)

    def await_weights(self) -> None:
        self.is_woven = self.shall_weave

    @torch.inference_mode()
    def arrange(self) -> None:
        self.is_woven = self.shall_weave
        if self.is_woven and not self.has_woven_codes:
            woven_experts.weave(self.codes, self.scales, gated=self.is_gated)
            self.has_woven_codes = True

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        if not self.has_woven_codes:
            return super().dequantise(rows, index, expert)
        codes, scales = woven_experts.unweave(
            self.codes[expert], self.scales[expert], gated=self.is_gated
        )
        return self.numbers_of(codes[rows], scales[rows])

    def take_weights(self, plain: nn.Module) -> None:
        self.has_woven_codes = False
        super().take_weights(plain)
