"""Integer weights that kernels multiply by.

With the rows of a decode step, no dequantised weight is written to memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends.cuda import products
from nanovllm.backends.cuda.fused_weight import FusedWeight
from nanovllm.backends.cuda.triton import packed_linear
from nanovllm.backends.cuda.triton.packed_linear import PackedTensors
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.backends.quantised.integers import IntegerWeight


class FusedIntegerWeight(FusedWeight, IntegerWeight):
    """An integer weight that kernels multiply by.

    The kernels read scales and zeros from a copy, the factors: see PackedTensors. It is made when
    it is first needed, and whenever weights have changed.
    """

    factors: Tensor | None = None  # int32 [..., G, N]
    is_woven: bool | None = None  # whether the kernels take the codes woven; None: not known yet
    has_woven_codes = False  # whether they are woven by now: those that were just read are not

    @staticmethod
    def suits(plain: IntegerWeight) -> bool:
        """Tell whether the kernels can multiply by the weight.

        Two kinds stay plain. With a `g_idx`, as GPTQ's desc_act makes it, the columns of a word
        belong to several groups. And no kernel knows a rank's share of several groups that begins
        inside one.
        """
        scheme = plain.scheme
        return (
            not scheme.has_g_idx
            and plain.scales.dtype in (torch.bfloat16, torch.float16)
            and plain.width % (32 // scheme.bits) == 0
            and (plain.num_groups == 1 or plain.group % 32 == 0)
            and not plain.begins_inside_group
        )

    def can_norm(self, row: Tensor) -> bool:
        return bool(self.is_woven) and packed_linear.woven_row.norms(self.width)

    def can_add(self, row: Any) -> bool:
        return bool(self.is_woven)

    def add(self, row: Tensor, bias: Tensor | None, residual: Tensor) -> Stream:
        return products.linear_int(row, self.tensors(), bias, residual)

    def forward(
        self, x: Tensor | Unnormed, bias: Tensor | None = None, expert: int | None = None
    ) -> Tensor:
        return products.linear_int(x, self.tensors(expert), bias)

    def gated(self, x: Tensor | Unnormed, bias: Tensor | None, gelu: bool) -> Tensor:
        """Compute silu(gates) * ups, or with gelu: x [T, K] -> [T, N]. The weight is [2 N, K]."""
        return products.gated_linear_int(x, self.tensors(), bias, gelu)

    def warmup_gated(self, bias: Tensor | None, gelu: bool) -> None:
        """Launch the kernels of `gated` that only steps with prompts launch."""
        products.warmup_gated_linear_int(self.tensors(), self.scales.dtype, bias, gelu)

    def tensors(self, expert: int | None = None) -> PackedTensors:
        """Return what the kernels read, of an expert if there are any."""
        if self.is_woven is None:
            self.arrange()
        if self.factors is None:
            self.refresh()
        codes: Tensor = self.codes
        factors = self.factors
        assert factors is not None
        if expert is not None:
            codes, factors = codes[expert], factors[expert]
        bits, group, width = self.scheme.bits, self.group, self.width
        return PackedTensors(codes, factors, bits, group, width, bool(self.is_woven))

    @property
    def shall_weave(self) -> bool:
        """True if the kernels want the codes woven."""
        # Kernels for experts know no other order.
        return not self.lead and packed_linear.takes_woven(
            self.codes.device, self.scheme.bits, self.group, self.codes.shape[0], self.width
        )

    @torch.inference_mode()
    def arrange(self) -> None:
        self.is_woven = self.shall_weave
        if self.is_woven and not self.has_woven_codes:
            packed_linear.woven_linear.weave(self.codes)
            self.has_woven_codes = True
        self.refresh()

    def await_weights(self) -> None:
        self.is_woven = self.shall_weave

    def restore(self) -> None:
        if self.factors is None:
            self.arrange()

    def drop(self) -> None:
        self.factors = None

    def dequantise(self, rows: slice, index: int, expert: int | None) -> Tensor:
        if not self.has_woven_codes:
            return super().dequantise(rows, index, expert)
        return packed_linear.dequantise(self.tensors(), self.scales.dtype)[rows]

    @torch.inference_mode()
    def refresh(self) -> None:
        """Make the factors of scales and zeros. A graph may hold the address of their memory."""
        scales = self.scales.mT
        if self.factors is None:
            self.factors = torch.empty(scales.shape, dtype=torch.int32, device=scales.device)
        zeros = self.zeros.mT if self.scheme.has_zeros else 2 ** (self.scheme.bits - 1)
        bits = scales.contiguous().view(torch.int16).to(torch.int32)
        self.factors.copy_(bits << 16 | zeros)

    def take_weights(self, plain: nn.Module) -> None:
        self.copy_parameters(plain)
        self.has_woven_codes = False
        if self.factors is not None:  # otherwise `restore` follows, on the device of the kernels
            self.arrange()
