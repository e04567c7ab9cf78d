"""The host time of a step: scheduler and block manager alone, without a device."""

import time
from random import Random

from nanovllm import SamplingParams
from nanovllm.apps.bench.shapes import VOCAB
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.policies.throughput import ThroughputPolicy


def host_cost(counts: tuple[int, ...] = (256, 512, 1024, 2048), steps: int = 400) -> None:
    """Print how many milliseconds it takes to schedule and commit a step.

    No model runs: every sequence decodes, and every token is 1.
    """
    for count in counts:
        scheduler = decoding_scheduler(count)
        tokens, seconds = [1] * count, []
        for _ in range(steps):
            begin = time.perf_counter()
            scheduler.schedule()
            scheduler.commit(tokens)
            seconds.append(time.perf_counter() - begin)
        seconds.sort()
        print(
            f"{count:5} running sequences: {seconds[steps // 2] * 1e3:.3f} ms per step "
            f"(median of {steps}; "
            f"mean {sum(seconds) / steps * 1e3:.3f}, worst {seconds[-1] * 1e3:.3f})"
        )


def decoding_scheduler(count: int) -> Scheduler:
    """Make a scheduler with `count` sequences, and run their prompts."""
    scheduler = Scheduler(
        BlockManager(count * 8, 256),
        ThroughputPolicy(),
        max_num_seqs=count,
        max_num_batched_tokens=max(16384, count),
    )
    r = Random(0)
    for i in range(count):
        prompt = [r.randrange(VOCAB) for _ in range(r.randint(100, 300))]
        params = SamplingParams(max_tokens=1024)
        scheduler.add(Request(i, prompt, params, max_len=len(prompt) + 1024))
    while len(scheduler.decoding) < count:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit([1] * len(batch.sampling_slots))
    return scheduler
