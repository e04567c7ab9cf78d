"""Compile the kernels that are launched early, for a GPU that need not be there, and say what each
reads, and whether it writes, before it waits for the kernel before it.

Run as a script, without TRITON_INTERPRET: it writes JSON, a list of [kernel, arguments that are
read before the wait, whether anything is written before it, whether it waits on every path, whether
it lets the next kernel start before]. " by tile" follows the name of a kernel whose programs wait
for programs of the kernel before.
"""

import inspect
import json
import re
from collections.abc import Callable
from tempfile import TemporaryDirectory

import torch
from cards import stand_in_for
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from nanovllm.backends.cuda.triton import (
    allreduce_norm,
    decode_attention,
    decode_gemm,
    elementwise,
    fp8_gemv,
    fp8_inputs,
    fp8_linear,
    fp8_row,
    fp8_splitk,
    gated_delta,
    gemv,
    invariant_linear,
    moe,
    moe_packed,
    packed_linear,
    router,
    sampler,
    short_conv,
    whole_gated,
    woven_experts,
    woven_linear,
    woven_row,
)
from nanovllm.backends.cuda.triton.unnormed import Stream, Unnormed
from nanovllm.engine.batch_state import BatchState
from nanovllm.layers.attention import AttentionOptions, KVCache, PagedKV

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 512, 8, 2, 64
BLOCK = r"\$L__BB\w+"
COPY = r"\.shared::(?:cluster|cta)\.global"  # Triton 3.6 writes the first, 3.9 the second


def early_reads(ptx: str, argument_names: list[str]) -> tuple[list[str], bool, bool, bool]:
    """Find what is read before `griddepcontrol.wait`, whether anything is written, whether no way
    through the kernel avoids the wait, and whether the next kernel may start before.

    Follows each address back to the arguments that it was computed from. The name of one that is
    a number is "".
    """
    before, wait, after = re.sub("//.*", "", ptx).partition("griddepcontrol.wait")
    body = before[before.index("{", before.index(".reqntid")) :]
    sources: dict[str, set[int]] = {}
    reads: set[int] = set()
    for line in re.split(r"[;\n]", body):
        if found := re.search(r"(?:ld\.param|mov)\S*\s+(%\w+), \[?\w+_param_(\d+)", line):
            sources[found[1]] = {int(found[2])}
        elif registers := re.findall(r"%(?:rd|rs|r|p|f)\d+", line):
            of = set().union(*[sources.get(register, set()) for register in registers])
            sources[registers[0]] = of
            if re.search(rf"ld(\.volatile)?\.global|prefetch\.global|{COPY}", line):
                address = re.findall(r"\[\s*(%\w+)", line)
                reads |= set().union(*[sources.get(register, set()) for register in address])
    # An asynchronous copy from global to shared memory writes nothing that others see.
    copies = rf"cp\.async\.bulk(?!\S*{COPY})"
    writes = re.search(rf"\b(st|atom|red)\.(?!shared)|{copies}", body) is not None
    # Whatever branches before the wait leads to labels before it, or to another wait.
    labels = set(re.findall(rf"({BLOCK}):", body))
    targets = set(re.findall(rf"\bbra(?:\.uni)?\s+({BLOCK})", body))
    elsewhere = all(waits_first(after.splitlines(), label) for label in targets - labels)
    # Before the wait, nobody hands work to other warps, which would not wait.
    always = bool(wait) and not re.search(r"\bret\b|barrier\.sync", body) and elsewhere
    starts_next = "griddepcontrol.launch_dependents" in body
    return sorted({argument_names[i] for i in reads} - {""}), writes, always, starts_next


def waits_first(lines: list[str], label: str, seen: frozenset[str] = frozenset()) -> bool:
    """Tell whether all ways from a label lead to a wait before they touch memory that others see.

    Warps with work of their own wait at a barrier until other warps, which have waited for the
    kernel before, give it to them.
    """
    begin = [i for i, line in enumerate(lines) if line.startswith(f"{label}:")]
    for line in lines[begin[0] + 1 :] if begin else []:
        if re.search(r"griddepcontrol\.wait|barrier\.sync", line):
            return True
        if re.search(r"\b(ret|prefetch|cp)\b|\b(ld|st|atom|red)\b(?!\.(shared|param))", line):
            return False
        if found := re.search(rf"\bbra(?:\.uni)?\s+({BLOCK})", line):
            if found[1] not in seen and not waits_first(lines, found[1], seen | {found[1]}):
                return False
            if "@" not in line:
                return True
    return False


def report_to(found: list) -> Callable[..., None]:
    """Return a function that compiles a kernel that is launched, and adds a report to `found`."""

    def compile_it(kernel, grid, args, options):
        compiled = kernel.run(*args, grid=grid, warmup=True, **options)
        bound = inspect.signature(kernel.fn).bind_partial(*args)
        constants = {p.name for p in kernel.params if p.is_constexpr}
        specialized = {p.name for p in kernel.params if not p.do_not_specialize}
        names = []
        for name, value in bound.arguments.items():
            # None and constants are no arguments of the compiled kernel; nor is 1, mostly.
            is_one = type(value) in (int, bool) and value == 1 and name in specialized
            if name in constants or value is None or is_one:
                continue
            if hasattr(value, "block_shape"):
                names += [name] + [
                    ""
                ] * 2 * value.base.dim()  # a descriptor's shape and strides are numbers
            else:
                names.append(name if isinstance(value, torch.Tensor) else "")
        assert options["launch_pdl"] and compiled.metadata.launch_pdl, kernel.__name__
        report = early_reads(compiled.asm["ptx"], [*names, "scratch", "scratch"])
        by_tile = {"GATED": False, "BY_TILE": True}.items() <= bound.arguments.items()
        found.append([kernel.__name__ + " by tile" * by_tile, *report])

    return compile_it


def run_all() -> None:
    """Launch each kernel that takes PDL once."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype)

    rows, ints = 2, torch.zeros(2, dtype=torch.int64)
    x, weight = new(rows, HIDDEN), new(HIDDEN)
    gemv.linear(x, new(64, HIDDEN), new(64))
    gemv.gated_linear(x, new(128, HIDDEN))
    chained = new(64, 2048)
    assert invariant_linear.num_chains(*chained.shape) > 1
    invariant_linear.linear(new(1, 2048), chained, new(64))
    whole_gated.gated_linear(x, new(128, HIDDEN))
    many = new(64, HIDDEN)
    for tiling in (
        decode_gemm.Tiling(64, 32, 128, splits=2, stages=3),
        decode_gemm.Tiling(16, 64, 128, splits=2, stages=3, turned=True),
        decode_gemm.Tiling(16, 64, 256, splits=2, stages=1, turned=True),  # in one step
        decode_gemm.Tiling(16, 64, 128, splits=1, stages=3, turned=True, lead=128),
    ):
        decode_gemm.multiply(many, new(64, HIDDEN), new(64), tiling)
    for tiling in (
        decode_gemm.Tiling(64, 32, 128, splits=1, stages=3),
        decode_gemm.Tiling(16, 64, 64, splits=1, stages=3, turned=True),
    ):
        decode_gemm.multiply(many, new(64, HIDDEN), None, tiling, gated=True)
    fp8 = torch.float8_e4m3fn
    scales = new(64, HIDDEN // 128, dtype=torch.float32)
    matrix = fp8_inputs.Fp8Matrix(new(64, HIDDEN, dtype=fp8), scales, 128, 128, "group")
    fp8_inputs.norm_and_quantise(x, x.clone(), matrix, weight=weight, eps=1e-6)
    chosen = fp8_linear.Tiling(64, 64, 2, warps=4, stages=3)
    inputs = fp8_inputs.quantise(many, matrix)
    fp8_linear.multiply(inputs, matrix, new(64), x.dtype, chosen)
    blocks = new(1, HIDDEN // 128, dtype=torch.float32)
    whole = matrix._replace(codes=new(128, HIDDEN, dtype=fp8), block_scales=blocks)
    for count in (96, 192):
        tall = fp8_inputs.quantise(new(count, HIDDEN), whole)
        fp8_splitk.linear(tall, whole, new(128), x.dtype)
    one = fp8_inputs.quantise(new(1, HIDDEN), matrix)
    fp8_gemv.linear(one, matrix, new(64), x.dtype)
    codes, factors = (new(*shape, dtype=torch.int32) for shape in ((64, HIDDEN // 8), (4, 64)))
    packed = packed_linear.PackedTensors(codes, factors, 4, 128, HIDDEN)
    packed_linear.few_rows_linear(x, packed, new(64))
    packed_linear.tiled_linear(many, packed, new(64), packed_linear.Tiling(32, 64, 16, 2, 2, 4))
    for more in (0, 32):
        woven = woven_linear.Tiling(block_m=64, more=more, warps=4, splits=2, stages=2)
        woven_linear.linear(many, codes, factors, new(64), woven, group=128)
    division = woven_row.Division(warps=1, runs=2, blocks=2)
    woven_row.linear(new(1, HIDDEN), codes, factors, new(64), division, group=128)
    stream = Stream(new(1, HIDDEN), new(4, dtype=torch.float32))
    row, residual = Unnormed(stream, weight, 1e-6), new(1, 64)
    division = woven_row.Division(warps=1, runs=4, blocks=1)
    woven_row.linear(row, codes, factors, None, division, group=128, residual=residual)
    fp8_row.linear(row, matrix, None, residual=residual)
    for direct_bytes in (1 << 20, 0):
        shared = allreduce_norm.SharedRows(ints, 0, direct_bytes)
        allreduce_norm.sum_add_rms_norm(x, x.clone(), weight=weight, eps=1e-6, shared=shared)
    elementwise.add_rms_norm(x, x.clone(), weight=weight, eps=1e-6)
    elementwise.embed_and_norm(ints, new(8, HIDDEN), weight, 1e-6)
    elementwise.norm_add_norm(x, x.clone(), after=weight, weight=weight, eps=1e-6)
    elementwise.activate_and_mul(x)
    elementwise.multiply_by_sigmoid(x, x.clone())
    short_conv.convolve_token(
        x, new(HIDDEN, 4), new(HIDDEN), new(4, 3, HIDDEN), ints, out=x.clone(), silu=True
    )
    gates = torch.zeros(2, 4)
    delta = gated_delta.DeltaInputs(new(rows, 8 * HEAD_DIM), new(rows, 8), *gates, 2, HEAD_DIM)
    gated_delta.delta_rule_token(
        delta,
        torch.zeros(4, 4, HEAD_DIM, HEAD_DIM),
        ints,
        z=new(rows, 4 * HEAD_DIM),
        norm_weight=new(HEAD_DIM),
        eps=1e-6,
        out=new(rows, 4 * HEAD_DIM),
    )
    heads = new(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cache = KVCache(new(4, 16, KV_HEADS, HEAD_DIM), new(4, 16, KV_HEADS, HEAD_DIM))
    elementwise.qk_norm_rope_store(
        heads,
        head_dim=HEAD_DIM,
        num_kv_heads=KV_HEADS,
        q_weight=new(HEAD_DIM),
        k_weight=new(HEAD_DIM),
        eps=1e-6,
        cos_sin=new(64, HEAD_DIM, dtype=torch.float32),
        positions=ints,
        slot_mapping=ints.clone(),
        cache=cache,
    )
    state = BatchState(8, 8, 16, torch.device("cpu"))
    elementwise.decode_inputs(ints, state)
    q = new(rows, HEADS, HEAD_DIM)
    kv = PagedKV(cache, state.block_tables[:rows], state.context_lens[:rows])
    decode_attention.decode_attention(q, kv, AttentionOptions(0.125))
    norms = new(HEAD_DIM), new(HEAD_DIM)
    cos_sin = new(1024, HEAD_DIM, dtype=torch.float32)
    # So many sequences that a program asks for a tile of keys and values early, and one more.
    for count in (decode_attention.EARLY_ROWS, decode_attention.EARLY_ROWS + 1):
        places = new(count, dtype=torch.int64), new(count, dtype=torch.int64)
        how = decode_attention.NormRopeStore(*norms, 1e-6, cos_sin, *places)
        kv = PagedKV(cache, new(count, 64, dtype=torch.int32), state.context_lens[:count])
        qkv = new(count, heads.shape[1])
        decode_attention.decode_attention_of_qkv(qkv, kv, AttentionOptions(0.125), how)
    moe.moe(
        x,
        router.partial_logits(x, new(8, HIDDEN), new(8)),
        gate_up=new(8, 64, HIDDEN),
        down=new(8, HIDDEN, 32),
        gate_up_bias=new(8, 64),
        down_bias=new(8, HIDDEN),
        top_k=2,
        renormalize=True,
    )
    packed = [
        moe_packed.PackedExperts(
            "e4m3",
            new(8, outputs, inputs, dtype=torch.float8_e4m3fn),
            new(8, outputs, inputs // 32, dtype=torch.float32),
            32,
            sharing=32,
        )
        for outputs, inputs in ((64, HIDDEN), (HIDDEN, 32))
    ]
    moe.moe(x, new(rows, 8), gate_up=packed[0], down=packed[1], top_k=2, renormalize=True)
    moe.moe(x[:1], new(1, 8), gate_up=packed[0], down=packed[1], top_k=2, renormalize=True)
    # A tile of FP8 weights that ends within the row is loaded under a mask.
    uneven = moe_packed.PackedExperts(
        "e4m3",
        new(8, HIDDEN, 48, dtype=torch.float8_e4m3fn),
        new(8, HIDDEN, 1, dtype=torch.float32),
        48,
        sharing=48,
    )
    packed[0] = moe_packed.PackedExperts(
        "e4m3",
        new(8, 96, HIDDEN, dtype=torch.float8_e4m3fn),
        new(8, 96, 1, dtype=torch.float32),
        HIDDEN,
        sharing=HIDDEN,
    )
    moe.moe(x, new(rows, 8), gate_up=packed[0], down=uneven, top_k=2, renormalize=True)
    # Of one token, several programs share a product.
    packed = [
        moe_packed.PackedExperts(
            "e2m1",
            new(8, outputs, inputs // 2, dtype=torch.uint8),
            new(8, outputs, inputs // 32, dtype=torch.uint8),
            32,
        )
        for outputs, inputs in ((64, HIDDEN), (HIDDEN, 32))
    ]
    moe.moe(x[:1], new(1, 8), gate_up=packed[0], down=packed[1], top_k=1, renormalize=True)
    woven = [
        woven_experts.view_woven(
            new(8, outputs, inputs // 2, dtype=torch.uint8),
            new(8, outputs, inputs // 32, dtype=torch.uint8),
        )
        for outputs, inputs in ((128, HIDDEN), (HIDDEN, 64))
    ]
    for tokens in (1, rows, 16):
        logits = new(tokens, 8)
        moe.moe(many[:tokens], logits, gate_up=woven[0], down=woven[1], top_k=2, renormalize=True)
    temperatures = new(rows, dtype=torch.float32)
    sampler.sample(
        new(rows, 256),
        temperatures=temperatures,
        seeds=ints,
        positions=ints.clone(),
        slots=ints.clone(),
        last_tokens=ints.clone(),
    )


if __name__ == "__main__":
    CUDABackend.make_cubin = lambda *_, **__: b""  # what comes after PTX is not looked at
    found: list = []
    # Nobody else may find kernels that are not whole.
    with TemporaryDirectory() as knobs.cache.dir:
        stand_in_for(90, report_to(found))
        run_all()
    print(json.dumps(found))
