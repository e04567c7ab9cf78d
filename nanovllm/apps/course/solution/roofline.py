"""The roofline: a time that no step can beat, from the rates of a device."""

from typing import NamedTuple

BYTES = 2  # of a number in bfloat16


class Shape(NamedTuple):
    """The sizes of a Qwen3 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


class Device(NamedTuple):
    """The greatest rates of a device."""

    bandwidth: float  # bytes of memory that it reads in a second
    flops: float  # operations (multiplications and additions) in a second


QWEN3_0_6B = Shape(28, 1024, 16, 8, 128, 3072, 151936)
QWEN3_8B = Shape(36, 4096, 32, 8, 128, 12288, 151936)


def layer_parameters(shape: Shape) -> int:
    """Count the numbers in the matrices of all layers."""
    # <piece 12: q, k, v and o; then gate, up and down>
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    # </piece>


def kv_bytes_per_token(shape: Shape) -> int:
    """Count the bytes of the keys and values of one token, in all layers."""
    # <piece 12>
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * BYTES
    # </piece>


def bytes_of_step(shape: Shape, chunks: list[tuple[int, int]]) -> int:
    """Count the bytes that a step must read.

    Each chunk is a pair: how many tokens of its sequence are computed before, and how many now. A
    step reads the matrices of all layers and the head once, and for each chunk the keys and values
    of all its sequence's tokens so far.
    """
    # <piece 12>
    weights = layer_parameters(shape) + shape.hidden * shape.vocab
    tokens = sum(start + count for start, count in chunks)
    return weights * BYTES + tokens * kv_bytes_per_token(shape)
    # </piece>


def operations_of_step(shape: Shape, chunks: list[tuple[int, int]]) -> int:
    """Count the operations of a step: two for each product of two numbers.

    Each token meets each number of the layers' matrices once. One token of each chunk meets the
    head. In each layer and head, a query meets the keys and the values of its own token and those
    before it: that are head_dim products each.
    """
    # <piece 12>
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
    products = tokens * layer_parameters(shape)
    products += len(chunks) * shape.hidden * shape.vocab
    products += pairs * shape.layers * shape.heads * shape.head_dim * 2
    return 2 * products
    # </piece>


def seconds_of_step(shape: Shape, device: Device, chunks: list[tuple[int, int]]) -> float:
    """Compute the time that a step takes at least: both reading and computing must end."""
    # <piece 12>
    reading = bytes_of_step(shape, chunks) / device.bandwidth
    computing = operations_of_step(shape, chunks) / device.flops
    return max(reading, computing)
    # </piece>
