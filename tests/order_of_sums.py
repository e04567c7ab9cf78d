"""Compile products of batch_invariant for a Hopper GPU that need not be there, with 1 to 512 rows,
and say in what order they sum.

Run as a script, without TRITON_INTERPRET, it prints the orders of each case, and fails if a case
has several, for different numbers of rows. An order consists of

- the instructions of tensor cores, but for the side of their tile that is no part of a sum;
- how many neighbouring columns a thread holds (kWidth), unless these are 2: then, as from shared
  memory, an instruction takes columns that are neighbours;
- the columns that a step of the loop takes;
- the programs that share a sum;
- the kinds of operations on single numbers, by which codes are scaled and sums added up.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from cards import new, stand_in_for
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from nanovllm.backends.cuda.triton import fp8_inputs, fp8_linear, moe, moe_packed

# Each kernel, with the argument that is the columns of a step.
KERNELS = {
    "_packed_product_kernel": "BLOCK_W",
    "_linear_kernel": "BLOCK_K",
}
ROWS = range(1, 513)


def cases() -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yield cases: their names, and functions that compute the product of some rows."""
    outputs, inputs = 1024, 2048

    def fp8(how: str | None, group: int, rows: int) -> None:
        codes = new(outputs, inputs, dtype=torch.float8_e4m3fn)
        scales = new(outputs, inputs // group, dtype=torch.float32)
        matrix = fp8_inputs.Fp8Matrix(codes, scales, group, 128, how)
        fp8_linear.invariant_linear(new(rows, inputs), matrix, None, torch.bfloat16)

    def experts(sharing: int | None, group: int, block: int, width: int, rows: int) -> None:
        def make(outputs: int, inputs: int) -> moe_packed.PackedExperts:
            columns = min(group, inputs)
            return moe_packed.PackedExperts(
                "e4m3",
                new(8, outputs, inputs, dtype=torch.float8_e4m3fn),
                new(8, outputs, inputs // columns, dtype=torch.float32),
                columns,
                sharing and min(sharing, inputs),
                block,
            )

        moe.moe(
            new(rows, 512),
            new(rows, 8),
            gate_up=make(2 * width, 512),
            down=make(512, width),
            top_k=3,
            renormalize=True,
            is_invariant=True,
        )

    yield "experts in FP8 by blocks", partial(experts, 128, 128, 128, 128)
    yield "experts in FP8 by tokens", partial(experts, 768, 768, 1, 768)
    yield "experts with weights in FP8 by blocks", partial(experts, None, 128, 128, 768)
    yield "FP8 by blocks", partial(fp8, "group", 128)
    yield "FP8 by tokens", partial(fp8, "token", inputs)
    yield "FP8 weights by blocks", partial(fp8, None, 128)


def order_of(compiled: Any, arguments: dict[str, Any], step: str) -> str:
    """Describe in what order a compiled kernel sums."""
    ptx, layouts = compiled.asm["ptx"], compiled.asm["ttgir"]
    instructions = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.[\w.]+", ptx))
    # Whether a pair of numbers is multiplied at once (bf16x2) changes no number.
    numbers = set(re.findall(r"\b(?:add|sub|mul|fma)\.[\w.]*f(?:32|16)", ptx))
    parts = [
        *sorted({re.sub(r"m64n\d+k", "m64k", one) for one in instructions}),
        *sorted(set(re.findall(r"kWidth = [^2]", layouts))),
        f"{step} = {arguments[step]}",
        f"SPLITS = {arguments['SPLITS']}",
        *sorted(numbers),
    ]
    return ", ".join(parts)


def find_orders() -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yield each case, and the numbers of rows that are summed in each order."""
    known: dict[str, str] = {}  # a compiled kernel's hash -> its order
    launched: list[str] = []

    def note(kernel: Any, grid: tuple, args: tuple, options: dict[str, Any]) -> None:
        step = KERNELS.get(kernel.__name__)
        if step is not None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            if compiled.hash not in known:
                arguments = dict(zip([one.name for one in kernel.params], args))
                known[compiled.hash] = order_of(compiled, arguments, step)
            launched.append(known[compiled.hash])

    stand_in_for(90, note)
    for name, run in cases():
        rows_of: dict[str, list[int]] = {}
        for rows in ROWS:
            launched.clear()
            run(rows)
            rows_of.setdefault("; ".join(launched), []).append(rows)
        yield name, rows_of


def main() -> None:
    CUDABackend.make_cubin = lambda *_, **__: b""  # what comes after PTX is not looked at
    several = []
    # Nobody else may find kernels that are not whole.
    with TemporaryDirectory() as knobs.cache.dir:
        for name, rows_of in find_orders():
            for order, rows in rows_of.items():
                print(f"{name}, {len(rows)} numbers of rows from {rows[0]} on: {order}")
            if len(rows_of) > 1:
                several.append(name)
    print(f"Triton {triton.__version__}; cases of several orders: {several}")
    sys.exit(bool(several))


if __name__ == "__main__":
    main()
