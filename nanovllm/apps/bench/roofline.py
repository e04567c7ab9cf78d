"""The time below which no engine comes, and the rates of a GPU that it follows from."""

import torch

from nanovllm.apps.bench.shapes import SHAPES, VOCAB
from nanovllm.apps.bench.workloads import ROUNDS, Work


def roofline(model: str, work: Work, name: str, bandwidth: float, flops: float) -> float | None:
    """Seconds below which no engine comes, by all GPUs' rates together. Either bound may be the
    higher one:

    - bytes, then prompts: each step reads the weights once and each running sequence's K and V
      once, a common prefix's once for all; the prompts' tokens take two operations a parameter.
      Steps hold at most 512 sequences.
    - all operations: those, the same for tokens drawn, the head, and attention within prompts.

    Of experts, a step reads as many as its tokens would pick at random, and a token computes with
    its own alone. Several rounds have none.
    """
    if model not in SHAPES or name in ROUNDS:
        return None
    hidden, layers, heads, kv_heads, head_dim, intermediate, experts, active, _ = SHAPES[model]
    expert = layers * 3 * hidden * intermediate
    others = layers * (
        2 * hidden * (heads + kv_heads) * head_dim + (hidden * experts if experts > 1 else 0)
    )
    body = others + active * expert
    head = VOCAB * hidden
    kv_bytes = layers * kv_heads * head_dim * 2 * 2
    drawn = sum(n for _, n in work)
    weights_read, left, step = 0.0, 0, 0
    while left or step < max(
        n for _, n in work
    ):  # all run from the first step on; those over 512 wait for a later one
        left += sum(n > step for _, n in work)
        rows, step = min(left, 512), step + 1
        left -= rows
        weights_read += others + head + expert * experts * (1 - (1 - active / experts) ** rows)
    # Of every prompt but the first: in the prefix cache already, and read once for all that decode.
    spared = 2048 if name == "shared" else 0
    kv_read = sum(sum(range(len(prompt) + 1, len(prompt) + n)) for prompt, n in work)
    kv_read = (kv_read - spared * sum(n - 1 for _, n in work[1:])) * kv_bytes
    prompt_ops = 2 * body * (sum(len(prompt) for prompt, _ in work) - spared * (len(work) - 1))
    # Pairs of query and key.
    pairs = (sum(len(prompt) ** 2 for prompt, _ in work) - spared**2 * (len(work) - 1)) / 2
    all_ops = prompt_ops + 2 * (body + head) * drawn + 4 * layers * heads * head_dim * pairs
    return max((kv_read + weights_read * 2) / bandwidth + prompt_ops / flops, all_ops / flops)


def ceilings() -> tuple[float, float] | None:
    """This GPU's copy bandwidth in bytes/s and bf16 matrix rate in FLOP/s, measured now."""
    if not torch.cuda.is_available():
        return None

    def seconds(f, n: int = 10) -> float:
        for _ in range(3):
            f()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n / 1e3

    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / seconds(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds(lambda: a @ b)
    x = y = a = b = None
    torch.cuda.empty_cache()
    return copy, rate
