"""FP8 codes (e4m3) in Triton kernels, as bytes: Triton has the type only for some GPUs.

A code becomes float16, which holds every number of e4m3. Attention reads a KV cache at the speed of
memory only if this takes about one instruction a byte, so GPUs get their own instructions, for two
or four codes at a time.
"""

import torch
import triton
import triton.language as tl

from nanovllm.backends.cuda.triton import dispatch

# The ways to decode.
PLAIN = tl.constexpr(0)  # as Triton's interpreter can
SHIFTS = tl.constexpr(1)  # Ampere: it has no instruction for it
NATIVE = tl.constexpr(2)  # Ada, Hopper and newer GPUs have one


def how_to_decode(device: torch.device) -> int:
    """Choose the way to decode on a device."""
    capability = dispatch.gpu(device).capability
    return (NATIVE if capability >= (8, 9) else SHIFTS if capability >= (8, 0) else PLAIN).value


# Each takes two words, and returns the first bytes of both as two float16 in a word, then their
# second bytes, and so on.
_WORDS_NATIVE = tl.constexpr("""{
    .reg .b32 low, high;
    .reg .b16 b0, b1, b2, b3;
    prmt.b32 low, $4, $5, 0x5140;
    prmt.b32 high, $4, $5, 0x7362;
    mov.b32 {b0, b1}, low;
    mov.b32 {b2, b3}, high;
    cvt.rn.f16x2.e4m3x2 $0, b0;
    cvt.rn.f16x2.e4m3x2 $1, b1;
    cvt.rn.f16x2.e4m3x2 $2, b2;
    cvt.rn.f16x2.e4m3x2 $3, b3;
}""")


def _shifted(result: str, first: str, second: str, selector: str) -> str:
    """Write the code that decodes two bytes by shifts.

    Sign, exponent and mantissa lie side by side in float16, too, whose exponents are 8 higher.
    """
    return f"""
    prmt.b32 x, {first}, {second}, {selector};
    and.b32 sign, x, 0x80008000;
    shr.b32 x, x, 1;
    and.b32 x, x, 0x3f803f80;
    or.b32 x, x, sign;
    mul.f16x2 {result}, x, factor;"""


_SHIFTS_BEGIN = """{
    .reg .b32 x, sign, factor;
    mov.b32 factor, 0x5c005c00;"""
_WORDS_SHIFTS = tl.constexpr(
    _SHIFTS_BEGIN
    + "".join(_shifted(f"${i}", "$4", "$5", f"0x{4 + i}{4 + i}{i}{i}") for i in range(4))
    + "}"
)
# Each takes a word, and returns its four bytes as two words of two float16.
_CODES_NATIVE = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_CODES_SHIFTS = tl.constexpr(
    _SHIFTS_BEGIN
    + _shifted("$0", "$2", "$2", "0x1100")
    + _shifted("$1", "$2", "$2", "0x3322")
    + "}"
)

# Takes four float32 numbers, and returns a word of their codes.
_ENCODE = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def from_words(words, HOW: tl.constexpr):
    """Decode int32 words of four codes: return the first codes of all words, the second, ..."""
    if HOW == PLAIN:
        return (
            from_codes(words.to(tl.uint8), HOW),
            from_codes((words >> 8).to(tl.uint8), HOW),
            from_codes((words >> 16).to(tl.uint8), HOW),
            from_codes((words >> 24).to(tl.uint8), HOW),
        )
    else:
        return tl.inline_asm_elementwise(
            _WORDS_NATIVE if HOW == NATIVE else _WORDS_SHIFTS,
            "=r,=r,=r,=r,r,r",
            [words],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def from_codes(codes, HOW: tl.constexpr):
    """Decode codes, given as uint8."""
    if HOW == PLAIN:
        bits = ((codes & 128).to(tl.uint16) << 8) | ((codes & 127).to(tl.uint16) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            _CODES_NATIVE if HOW == NATIVE else _CODES_SHIFTS,
            "=r,=r,r",
            [codes],
            tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def encode(x, HOW: tl.constexpr):
    """Round float32 numbers to e4m3, ties to even. Returns (rounded numbers, codes as uint8).

    Numbers beyond 448 become 448, and NaN stays NaN.
    """
    if HOW == NATIVE:
        codes = tl.inline_asm_elementwise(
            _ENCODE, "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4
        )
        return from_codes(codes, HOW).to(tl.float32), codes
    else:
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        size = tl.minimum(tl.abs(x), 448.0)
        # Keep 3 of 23 bits of mantissa; the bias of exponents is 7 instead of 127.
        bits = size.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        rounded = bits.to(tl.float32, bitcast=True)
        code = (bits >> 20).to(tl.int32) - (120 << 3)
        # Numbers below 2^-6 become multiples of 2^-9, as sums with 2^14 are. Codes count these.
        is_small = size < 0.015625
        small = (size + 16384.0) - 16384.0
        rounded = tl.where(is_small, small, rounded)
        code = tl.where(is_small, (small * 512.0).to(tl.int32), code)
        rounded = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        code = tl.where(x != x, 127, code | (sign >> 24).to(tl.int32))
        return tl.where(x != x, x, rounded), code.to(tl.uint8)
