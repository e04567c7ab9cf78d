"""The roofline: a lower bound on the time of a workload, from the measured rates of a GPU."""

import torch

from nanovllm.apps.bench.shapes import CONV_WIDTH, LINEAR_DIM, SHAPES, Shape
from nanovllm.apps.bench.workloads import WORKLOADS, Work

MAX_RUNNING = 512  # sequences in one step
BF16 = 2  # bytes per element of what is not quantised
STATE_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2}  # per element of Gated DeltaNet's states
# Bytes per weight of layers; in 4 bits, each group of 128 has a scale of 2 bytes and a zero point.
BYTES = {None: BF16, "fp8": 1.0, "gptq": 0.5 + 2.5 / 128, "awq": 0.5 + 2.5 / 128}
# Of experts in a format of their own; in MXFP4, each group of 32 has a scale of a byte.
EXPERT_BYTES: dict[str | None, float] = {"mxfp4": 0.5 + 1 / 32}
KV_BYTES = {"auto": BF16, "fp8": 1}  # per element of keys and values


def roofline(
    model: str,
    work: Work,
    name: str,
    bandwidth: float,
    flops: float,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
) -> float | None:
    """Return a lower bound on the seconds of a workload, at the rates of all GPUs together.

    The result is the higher of two bounds:

    - Bytes of decode steps, plus operations of prompts: each step reads the weights once and the K
      and V of each running sequence once; it reads the K and V of a common prefix once for all
      sequences. A layer with a window reads no K and V before it. A step reads and writes the state
      of each sequence. Each prompt token takes two operations per parameter, and six per element of
      a state (see state_ops).
    - All operations: two per parameter for prompt tokens and for generated tokens, plus the head,
      the attention within prompts, and the states.

    A step reads as many experts as its tokens would choose at random, and a token computes only
    with its own experts. Returns None for models of unknown shape and workloads of several rounds.

    Args:
        bandwidth: bytes per second.
        flops: operations per second of products in bfloat16. Those in FP8 count as twice as fast.
        quantization: the format of the layers' weights; embedding and head are in bfloat16. Experts
            have that of the shape if it names one.
        kv_cache_dtype: the format of the KV cache.
        mamba_ssm_cache_dtype: the dtype of Gated DeltaNet's states.
    """
    workload = WORKLOADS[name]
    if model not in SHAPES or workload.rounds > 1 or kv_cache_dtype not in KV_BYTES:
        return None
    shape = SHAPES[model]
    if quantization == shape.expert_format:
        quantization = None  # the experts have this format in any case
    if quantization not in BYTES:
        return None
    expert_bytes = EXPERT_BYTES.get(shape.expert_format, BYTES[quantization])

    expert = shape.layers * 3 * shape.hidden * shape.intermediate
    others = parameters_beside_experts(shape)
    body = others + shape.experts_per_token * expert  # parameters used per token
    head = shape.vocab * shape.hidden

    # Every prompt but the first finds the common prefix in the prefix cache.
    spared = workload.common_prefix
    prompts = [len(prompt) for prompt, _ in work]
    outputs = [n for _, n in work]
    prompt_tokens = sum(prompts) - spared * (len(work) - 1)

    weights_read = 0.0  # bytes
    for rows in rows_of_steps(outputs):
        missed = (1 - shape.experts_per_token / shape.experts) ** rows
        experts = expert * shape.experts * (1 - missed)
        weights_read += others * BYTES[quantization] + experts * expert_bytes + head * BF16
    kv_read, pairs = 0.0, 0.0  # tokens whose K and V steps read; queries x keys within prompts
    for span, layers in shape.attention_spans.items():
        kv_read += layers * tokens_read(prompts, outputs, spared, span)
        of_prompts = sum(pairs_within(n, span) for n in prompts)
        pairs += layers * (of_prompts - pairs_within(spared, span) * (len(work) - 1))
    kv_size = shape.kv_heads * shape.head_dim * 2  # of one token in one layer
    states_moved = 2 * sum(n - 1 for n in outputs)

    if quantization == "fp8":
        flops *= 2
    # A token decays a state, compares it with k, adds k u^T to it, and multiplies it by q.
    state_ops = 6 * shape.recurrent_layers * shape.state_size
    prompt_ops = (2 * body + state_ops) * prompt_tokens
    attention_ops = 4 * shape.heads * shape.head_dim * pairs
    all_ops = prompt_ops + (2 * (body + head) + state_ops) * sum(outputs) + attention_ops
    bytes_read = kv_read * kv_size * KV_BYTES[kv_cache_dtype] + weights_read
    bytes_moved = bytes_read + states_moved * bytes_of_states(shape, mamba_ssm_cache_dtype)
    return max(bytes_moved / bandwidth + prompt_ops / flops, all_ops / flops)


def tokens_read(prompts: list[int], outputs: list[int], prefix: int, span: float) -> float:
    """Count the tokens whose K and V all decode steps read, in a layer that sees `span` tokens.

    The first sequence reads the common prefix, of `prefix` tokens, for all sequences.
    """
    total = 0.0
    for i, (prompt, n) in enumerate(zip(prompts, outputs)):
        spared = prefix if i else 0
        total += sum(min(context - spared, span) for context in range(prompt + 1, prompt + n))
    return total


def pairs_within(n: int, span: float) -> float:
    """Count the pairs of a query and a key in n tokens, each of which sees the last `span`."""
    seen = min(n, span)
    return seen * (n - seen / 2)


def parameters_beside_experts(shape: Shape) -> int:
    """Count the parameters of all layers, without their MLPs or the experts of a mixture."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    attention = 2 * hidden * (width + shape.kv_heads * shape.head_dim)
    mixture = hidden * shape.experts if shape.experts > 1 else 0  # the router
    if shape.value_heads:
        attention += hidden * width  # the gates
        if shape.experts > 1:
            mixture += hidden * (3 * shape.intermediate + 1)  # the shared expert, and its gate
    values = shape.value_heads * LINEAR_DIM
    # q, k and v, their convolution, z and the output, and b and a.
    recurrent = shape.channels * (hidden + CONV_WIDTH)
    recurrent += hidden * (2 * values + 2 * shape.value_heads)
    return (
        shape.attention_layers * attention
        + shape.recurrent_layers * recurrent
        + shape.layers * mixture
    )


def bytes_of_states(shape: Shape, state_dtype: str = "auto") -> int:
    """Count the bytes of a sequence's states: those of Gated DeltaNet, and of its convolution."""
    convolution = shape.channels * (CONV_WIDTH - 1) * BF16
    return shape.recurrent_layers * (shape.state_size * STATE_BYTES[state_dtype] + convolution)


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
