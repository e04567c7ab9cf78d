"""What a step costs the host, without the device."""

import time
from random import Random

from nanovllm import SamplingParams
from nanovllm.apps.bench.shapes import VOCAB
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.policies.throughput import ThroughputPolicy


def host_cost(counts: tuple[int, ...] = (256, 512, 1024, 2048), steps: int = 400) -> None:
    """Schedule and commit with a runner that computes nothing: milliseconds of a step."""
    for count in counts:
        blocks = BlockManager(count * 8, 256)
        budget = max(16384, count)
        scheduler = Scheduler(
            blocks, ThroughputPolicy(), max_num_seqs=count, max_num_batched_tokens=budget
        )
        r = Random(0)
        for i in range(count):
            prompt = [r.randrange(VOCAB) for _ in range(r.randint(100, 300))]
            scheduler.add(
                Sequence(i, prompt, SamplingParams(max_tokens=1024), max_len=len(prompt) + 1024)
            )
        while len(scheduler.running) < count:
            batch = scheduler.schedule()
            scheduler.commit([1] * (len(batch.decode_slots) + len(batch.first_samples)))
        tokens, seconds = [1] * count, []
        for _ in range(steps):
            begin = time.perf_counter()
            scheduler.schedule()
            scheduler.commit(tokens)
            seconds.append(time.perf_counter() - begin)
        seconds.sort()
        print(
            f"{count:5} running sequences: {seconds[steps // 2] * 1e3:.3f} ms a step "
            f"(median of {steps}; "
            f"mean {sum(seconds) / steps * 1e3:.3f}, worst {seconds[-1] * 1e3:.3f})"
        )
