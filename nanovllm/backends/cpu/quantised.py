"""Quantised weights that C++ kernels multiply by (quantised_ops.cpp), in few bits as they are.

`use_cpp_weights` gives a packed weight the class that multiplies by a kernel, if there is one for
its format. The kernels compute what the plain forms in backends/quantised/ compute. They read each
weight once for several tokens, so memory sets the time of a step with few tokens.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.cpu import cpp_ops
from nanovllm.backends.quantised.int8 import GROUP, Int8Weight
from nanovllm.backends.quantised.integers import IntegerWeight

SOURCE = Path(__file__).with_name("quantised_ops.cpp")
# Products and sums stay those of the source. So a token's result does not depend on how many tokens
# a kernel takes at a time.
FLAGS = [*cpp_ops.FLAGS[:-1], "-ffp-contract=off", str(SOURCE)]
# The kinds of each kernel's arguments, as in cpp_ops.py.
ARGUMENTS = {
    "int8_linear": "pppppnnn",
    "grouped_linear": "ppppppnnnnn",
}
# Outputs whose weights lie together, of the two kernels.
BLOCK, WIDE = 16, 32


@cache
def load() -> ctypes.CDLL | None:
    """Load the kernels, as in cpp_ops.py; to compile them takes three seconds."""
    return cpp_ops.load_kernels(SOURCE, FLAGS, ARGUMENTS)


def use_cpp_weights(model: nn.Module) -> None:
    """Let the packed weights of a loaded model multiply by C++ kernels, in place.

    Where there is no compiler, they stay as they are.
    """
    for module in model.modules():
        kind: Any = CPP_WEIGHTS.get(type(module))
        if kind is not None and kind.suits(module) and load() is not None:
            module.__class__ = kind
            kind.take_weights(module, module)


class CppInt8Weight(Int8Weight):
    """An int8 weight whose codes lie in the order in which the kernel reads them."""

    @staticmethod
    def suits(plain: Int8Weight) -> bool:
        return True

    @torch.inference_mode()
    def take_weights(self, plain: nn.Module) -> None:
        """Bring the codes of a plain packed weight into the kernel's order, and take its scales."""
        codes = plain.get_parameter("codes")
        put(self, "codes", in_blocks(F.pad(codes, (0, -self.width % GROUP)), BLOCK, 4))
        self.scales.copy_(plain.get_parameter("scales"))

    def forward(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        numbers = x.float().contiguous()
        tensors = of_expert([self.codes, self.scales], expert)
        out = numbers.new_empty(len(x), self.height)
        bias = None if bias is None else bias.float()
        sizes = *x.shape, self.height
        cpp_ops.call(load(), "int8_linear", numbers, *tensors, bias, out, *sizes)
        return out.to(x.dtype)


class CppIntegerWeight(IntegerWeight):
    """An integer weight whose tensors lie in the order in which the kernel reads them.

    Sums are computed in float32.
    """

    @staticmethod
    def suits(plain: IntegerWeight) -> bool:
        """Tell whether the kernel can multiply by the weight: its groups must be of whole words.

        Two kinds stay plain. With a `g_idx`, as GPTQ's desc_act makes it, the columns of a word
        belong to several groups. And the kernel knows no rank's share of several groups that begins
        inside one.
        """
        return not plain.scheme.has_g_idx and not plain.begins_inside_group

    @torch.inference_mode()
    def take_weights(self, plain: nn.Module) -> None:
        """Bring the tensors of a plain packed weight into the kernel's order."""
        for name, parameter in plain.named_parameters(recurse=False):
            values = parameter.float() if name == "scales" else parameter
            put(self, name, in_blocks(values, WIDE, 1))

    @property
    def words_of_group(self) -> int:
        group = self.group if self.num_groups > 1 else self.width
        return -(-group // self.per_word)

    def forward(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        numbers = x.float().contiguous()
        zeros = self.zeros if self.scheme.has_zeros else None
        tensors = of_expert([self.codes, self.scales, zeros], expert)
        out = numbers.new_empty(len(x), self.height)
        bias = None if bias is None else bias.float()
        sizes = *x.shape, self.height, self.scheme.bits, self.words_of_group
        cpp_ops.call(load(), "grouped_linear", numbers, *tensors, bias, out, *sizes)
        return out.to(x.dtype)


# The class that multiplies by a kernel, for each format.
CPP_WEIGHTS: dict[type, type] = {Int8Weight: CppInt8Weight, IntegerWeight: CppIntegerWeight}


def put(weight: nn.Module, name: str, values: Tensor) -> None:
    """Let a parameter have these values, and leave it where it is if it has their shape."""
    if weight.get_parameter(name).shape == values.shape:
        weight.get_parameter(name).copy_(values)
    else:
        setattr(weight, name, nn.Parameter(values, requires_grad=False))


def of_expert(tensors: list[Tensor | None], expert: int | None) -> list[Tensor | None]:
    """Return the parts of tensors that belong to an expert; None: there are no experts."""
    return [x if x is None or expert is None else x[expert] for x in tensors]


def in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Reorder a matrix for the kernels: [..., N, K] -> [..., N / rows, K / columns, rows, columns].

    Zeros fill the last block and the last columns.
    """
    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % columns, 0, -height % rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).transpose(-3, -2).contiguous()
