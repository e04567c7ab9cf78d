"""Codes of few bits, decoded in registers.

Codes lie in words of 16 bits, the first in the lowest bits. In bfloat16, instructions of two words
a register decode them: 1 or 2 shifts, 3 logical operations and a product for two numbers.
"""

import triton
import triton.language as tl

# Numbers of MXFP4 in bfloat16 are decoded as multiples of this, which sums are divided by.
E2M1_UNIT = tl.constexpr(2.0**-32)


def _shift(to: str, places: int) -> str:
    """Shift the words to the left; places below 0: to the right."""
    return f"{'shl' if places >= 0 else 'shr'}.b32 {to}, $1, {abs(places)};"


def _float(sign: int, magnitude: int, mask: int, factor: str) -> tl.constexpr:
    """Write instructions that move the bits of two codes to their places in bfloat16.

    sign, magnitude: the places by which they go to the left.
    mask: the magnitude's bits at their places.
    factor: what the numbers are then multiplied by.
    """
    return tl.constexpr(
        "{ .reg .b32 s, m, f, none;"
        f"{_shift('s', sign)} and.b32 s, s, 0x80008000;"
        f"{_shift('m', magnitude)} and.b32 m, m, {mask:#x}; or.b32 m, m, s;"
        f"mov.b32 f, {factor}; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, m, f, none; }}"
    )


def _integer(place: int) -> tl.constexpr:
    """Write instructions that decode two integers, which begin at a place in their words.

    With the exponent of 128, the code is the fraction of 128 + code.
    """
    return tl.constexpr(
        "{ .reg .b32 m, one, none; "
        f"{_shift('m', -place)} and.b32 m, m, 0x000F000F; or.b32 m, m, 0x43004300;"
        "mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000;"
        "fma.rn.bf16x2 m, m, one, $3; fma.rn.bf16x2 $0, m, $2, none; }"
    )


E2M1 = [_float(12 - 4 * i, 6 - 4 * i, 0x01C001C0, "$2") for i in range(4)]
E2M1_0, E2M1_1, E2M1_2, E2M1_3 = E2M1
# 0x7B807B80 is twice 2^120, by which the biases of exponents differ.
E4M3_0, E4M3_1 = (_float(8 - 8 * i, 4 - 8 * i, 0x07F007F0, "0x7B807B80") for i in range(2))


INT4_0, INT4_1, INT4_2, INT4_3 = (_integer(4 * i) for i in range(4))


@triton.jit
def decoded(
    words,
    factor,
    zero,
    i: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the numbers that code i of each word stands for.

    words: int16, of PARTS codes each. With PARTS 1, FP8 numbers.
    factor: the words' factor_of their scales; "e4m3": None.
    zero: "int4": the words' offset_of their zero points; others: None.
    """
    if PARTS == 1:
        return words
    elif KIND == "e4m3":
        return _e4m3(words, i, dtype)
    elif KIND == "e2m1":
        return _e2m1(words, factor, i, dtype)
    else:
        return _int4(words, factor, zero, i, dtype)


@triton.jit
def factor_of(scale, KIND: tl.constexpr, dtype: tl.constexpr):
    """Return what `decoded` takes for scales as they are stored."""
    if KIND != "e2m1":
        return scale.to(tl.float32)
    elif dtype == tl.bfloat16:
        # One product multiplies by the scale, the difference of biases, 2^126, and E2M1_UNIT. With
        # it, scales from 2^-100 to 2^33 are exact. Larger ones become infinite.
        bits = tl.minimum(scale.to(tl.int32) + 94, 255) << 7
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        bits = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def offset_of(zero, dtype: tl.constexpr):
    """Return what `decoded` takes for the codes of 0."""
    if dtype == tl.bfloat16:
        return (-128.0 - zero.to(tl.float32)).to(tl.bfloat16)
    else:
        return zero.to(tl.int16)


@triton.jit
def _e4m3(words, i: tl.constexpr, dtype: tl.constexpr):
    # Sign, exponent and mantissa lie side by side in float16 and bfloat16 too, where the exponent
    # has another bias.
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E4M3_0 if i == 0 else E4M3_1, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        code = words >> (8 * i)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit
def _e2m1(words, factor, i: tl.constexpr, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        asm: tl.constexpr = (
            (E2M1_0 if i == 0 else E2M1_1) if i < 2 else (E2M1_2 if i == 2 else E2M1_3)
        )
        return tl.inline_asm_elementwise(
            asm, "=r,r,r", [words, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        code = words >> (4 * i)
        bits = ((code & 8) << 12) | ((code & 7) << 9)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        return (number * factor).to(dtype)


@triton.jit
def _int4(words, factor, offset, i: tl.constexpr, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        asm: tl.constexpr = (
            (INT4_0 if i == 0 else INT4_1) if i < 2 else (INT4_2 if i == 2 else INT4_3)
        )
        return tl.inline_asm_elementwise(
            asm,
            "=r,r,r,r",
            [words, factor.to(tl.bfloat16), offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return (((words >> (4 * i)) & 15) - offset).to(dtype) * factor.to(dtype)
