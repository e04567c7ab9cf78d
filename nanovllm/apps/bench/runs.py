"""One timed run of a workload on an engine, and what must hold before it."""

import argparse
import sys
import time

from nanovllm.apps.bench.engines import Engine
from nanovllm.apps.bench.workloads import WORKLOADS, Work, next_round


def check_lengths(args: argparse.Namespace, engine: Engine) -> None:
    """Raise ValueError if a request of any workload is too long, before the first one runs."""
    limit = engine.max_model_len
    for name in args.workload.split(","):
        longest = WORKLOADS[name].longest(WORKLOADS[name].work(engine.vocab)[: args.requests])
        if limit is not None and longest > limit:
            remedy = "leave this workload out, or name another --model"
            if limit == args.max_model_len:
                remedy = f"raise --max-model-len, {remedy}"
            raise ValueError(
                f"--workload {name} has requests of up to {longest:,} tokens of prompt and output, "
                f"and {args.model} takes {limit:,}: {remedy}"
            )


def run_once(engine: Engine, work: Work, name: str, repeat: int, num_repeats: int) -> float:
    """Run all rounds of a workload, and return the seconds that the engine took.

    Each repeat has different first tokens, so that no earlier run has cached its prefixes.
    """
    print(f"{name}: run {repeat + 1} of {num_repeats}", file=sys.stderr, flush=True)
    workload = WORKLOADS[name]
    prompts = workload.refresh(work, repeat, engine.vocab)
    outputs: list[list[int]] = []
    tokens, seconds = 0, 0.0
    for round in range(workload.rounds):
        if outputs:
            prompts = next_round(prompts, outputs, round, engine.vocab)
        begin = time.perf_counter()
        outputs = engine.run(prompts, workload.sampling)
        seconds += time.perf_counter() - begin
        tokens += sum(map(len, outputs))
    wanted = workload.num_output_tokens(work)
    if tokens != wanted:
        made = f"{type(engine).__name__} generated {tokens} tokens"
        raise RuntimeError(f"{name}: {made} instead of {wanted}")
    return seconds
