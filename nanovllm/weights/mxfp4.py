"""Weights in MXFP4: 32 numbers of 4 bits share a scale of 8 bits.

The format is that of OCP Microscaling Formats, version 1.0. Checkpoints of gpt-oss hold experts in
it. They are dequantised while they are read.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # numbers that share a scale
# E2M1: a sign, two bits of exponent, one of mantissa. E8M0: an exponent alone, and one NaN.
ELEMENTS = [sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
SCALES = [2.0 ** (i - 127) for i in range(255)] + [float("nan")]


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute the numbers of blocks [..., N, 16] with scales [..., N], both uint8.

    A byte holds two numbers, the first one in its low half. Returns [..., 32 N] in bfloat16, which
    holds each number exactly, up to scales of 2^125.
    """
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.tensor([[ELEMENTS[i % 16], ELEMENTS[i // 16]] for i in range(256)], **options)
    numbers = F.embedding(blocks.int(), pairs).flatten(-2)  # [..., N, 16] -> [..., N, 32]
    return (numbers * torch.tensor(SCALES, **options)[scales.int()].unsqueeze(-1)).flatten(-2)


class Mxfp4Tensor:
    """Matrices [E, in, out] in MXFP4, which are read like a tensor of a safetensors file.

    A checkpoint holds them transposed: blocks [E, out, in / 32, 16], scales [E, out, in / 32].
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        experts, out, count = self.scales.get_shape()
        return [experts, count * BLOCK, out]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, rows, columns = index
        begin, end, _ = rows.indices(self.get_shape()[1])
        held = slice(begin // BLOCK, -(-end // BLOCK))  # whole blocks
        part = experts, columns, held
        values = dequantize(self.blocks[part], self.scales[part])
        return values[..., begin - held.start * BLOCK : end - held.start * BLOCK].mT


def join_blocks(
    checkpoint: dict[str, tuple[Any, Any]], kept: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Replace each pair of blocks and scales in a checkpoint by one Mxfp4Tensor.

    The checkpoint maps a tensor's name to its file and the tensor; it is changed and returned. The
    tensors in `kept` stay as they are.
    """
    names = [
        name.removesuffix("_blocks")
        for name in checkpoint
        if name.endswith("_blocks") and name not in kept
    ]
    for name in (name for name in names if ".experts." in name):
        path, blocks = checkpoint[f"{name}_blocks"]
        if f"{name}_scales" not in checkpoint:
            raise ValueError(
                f"{path}: no file has {name}_scales, with which {name}_blocks is a weight in "
                "MXFP4: download the model again"
            )
        _, scales = checkpoint[f"{name}_scales"]
        for part, tensor in ((f"{name}_blocks", blocks), (f"{name}_scales", scales)):
            if (dtype := tensor.get_dtype()) != "U8":
                raise ValueError(
                    f"{path}: {part} is {dtype}, but in MXFP4 it is U8: download the model again"
                )
        if len(scales.get_shape()) != 3 or blocks.get_shape() != [*scales.get_shape(), BLOCK // 2]:
            raise ValueError(
                f"{path}: {name}_blocks has shape {blocks.get_shape()}, {name}_scales "
                f"{scales.get_shape()}: in MXFP4 it must be one scale for 16 bytes; download the "
                "model again"
            )
        if name in checkpoint:
            raise ValueError(
                f"{path} has {name} in MXFP4, {checkpoint[name][0]} as it is: remove the wrong one"
            )
        del checkpoint[f"{name}_blocks"], checkpoint[f"{name}_scales"]
        checkpoint[name] = path, Mxfp4Tensor(blocks, scales)
    return checkpoint
