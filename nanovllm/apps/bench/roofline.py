"""The roofline: a lower bound on the time of a workload, from the measured rates of a GPU."""

import torch

from nanovllm.apps.bench.shapes import SHAPES, VOCAB
from nanovllm.apps.bench.workloads import WORKLOADS, Work

MAX_RUNNING = 512  # sequences in one step
BF16 = 2  # bytes per element of what is not quantised
# Bytes per weight of layers; in 4 bits, each group of 128 has a scale of 2 bytes and a zero point.
BYTES = {None: BF16, "fp8": 1.0, "gptq": 0.5 + 2.5 / 128, "awq": 0.5 + 2.5 / 128}
KV_BYTES = {"auto": BF16, "fp8": 1}  # per element of keys and values


def roofline(
    model: str,
    work: Work,
    name: str,
    bandwidth: float,
    flops: float,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> float | None:
    """Return a lower bound on the seconds of a workload, at the rates of all GPUs together.

    The result is the higher of two bounds:

    - Bytes of decode steps, plus operations of prompts: each step reads the weights once and the K
      and V of each running sequence once; it reads the K and V of a common prefix once for all
      sequences. Each prompt token takes two operations per parameter.
    - All operations: two per parameter for prompt tokens and for generated tokens, plus the head
      and the attention within prompts.

    A step reads as many experts as its tokens would choose at random, and a token computes only
    with its own experts. Returns None for models of unknown shape and workloads of several rounds.

    Args:
        bandwidth: bytes per second.
        flops: operations per second of products in bfloat16. Those in FP8 count as twice as fast.
        quantization: the format of the layers' weights; embedding and head are in bfloat16.
        kv_cache_dtype: the format of the KV cache.
    """
    workload = WORKLOADS[name]
    if model not in SHAPES or workload.rounds > 1 or quantization not in BYTES:
        return None
    if kv_cache_dtype not in KV_BYTES:
        return None
    shape = SHAPES[model]

    # Parameters.
    expert = shape.layers * 3 * shape.hidden * shape.intermediate
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    router = shape.hidden * shape.experts if shape.experts > 1 else 0
    others = shape.layers * (attention + router)
    body = others + shape.experts_per_token * expert  # parameters used per token
    head = VOCAB * shape.hidden

    # Every prompt but the first finds the common prefix in the prefix cache.
    spared = workload.common_prefix
    prompts = [len(prompt) for prompt, _ in work]
    outputs = [n for _, n in work]
    prompt_tokens = sum(prompts) - spared * (len(work) - 1)
    pairs = (
        sum(n**2 for n in prompts) - spared**2 * (len(work) - 1)
    ) / 2  # pairs of a query and a key

    weights_read = 0.0  # bytes
    for rows in rows_of_steps(outputs):
        missed = (1 - shape.experts_per_token / shape.experts) ** rows
        layers = others + expert * shape.experts * (1 - missed)
        weights_read += layers * BYTES[quantization] + head * BF16
    kv_read = sum(sum(range(prompt + 1, prompt + n)) for prompt, n in zip(prompts, outputs))
    kv_read -= spared * sum(n - 1 for n in outputs[1:])
    kv_elements = shape.layers * shape.kv_heads * shape.head_dim * 2  # elements of one token

    if quantization == "fp8":
        flops *= 2
    prompt_ops = 2 * body * prompt_tokens
    attention_ops = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    all_ops = prompt_ops + 2 * (body + head) * sum(outputs) + attention_ops
    bytes_read = kv_read * kv_elements * KV_BYTES[kv_cache_dtype] + weights_read
    return max(bytes_read / bandwidth + prompt_ops / flops, all_ops / flops)


def rows_of_steps(outputs: list[int]) -> list[int]:
    """Return for each step how many sequences generate a token.

    All sequences start with the first step; those beyond MAX_RUNNING wait for a later step.
    """
    steps: list[int] = []
    left = 0
    while left or len(steps) < max(outputs):
        left += sum(n > len(steps) for n in outputs)
        steps.append(min(left, MAX_RUNNING))
        left -= steps[-1]
    return steps


def ceilings() -> tuple[float, float] | None:
    """Measure this GPU's copy bandwidth (bytes/s) and bf16 matrix rate (FLOP/s).

    Returns None without a GPU.
    """
    if not torch.cuda.is_available():
        return None
    rates = copy_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    return rates


def copy_bandwidth() -> float:
    """Measure the bandwidth of a copy in bytes per second, read plus written."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds_on_gpu(lambda: y.copy_(x))


def matrix_rate() -> float:
    """Measure the rate of a large bfloat16 product in FLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_on_gpu(lambda: a @ b)


def seconds_on_gpu(f, n: int = 10) -> float:
    """Return the mean GPU time of `n` calls of `f`, after three calls for warmup."""
    for _ in range(3):
        f()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(n):
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n / 1e3
