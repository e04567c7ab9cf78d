"""One run of a workload."""

import argparse
import sys
import time

from nanovllm.apps.bench.workloads import (
    ASKED,
    GREEDY,
    ROUNDS,
    Work,
    next_round,
    num_output_tokens,
    refresh,
)


def run_once(engine, work: Work, name: str, repeat: int, args: argparse.Namespace) -> float:
    """Run a workload, with prompts of its own in each repeat; returns the seconds it took."""
    count = 2 if args.policy else args.repeat
    print(f"{name}: run {repeat + 1} of {count}", file=sys.stderr, flush=True)
    fresh = refresh(work, name, repeat, engine.vocab)
    sampling = dict(temperature=0.0 if name in GREEDY else 0.6) | ASKED.get(name, {})
    outputs: list[list[int]] = []
    tokens, seconds = 0, 0.0
    for round in range(ROUNDS.get(name, 1)):
        if outputs:
            fresh = next_round(fresh, outputs, round, engine.vocab)
        begin = time.perf_counter()
        outputs = engine.run(fresh, sampling)
        seconds += time.perf_counter() - begin
        tokens += sum(map(len, outputs))
    wanted = num_output_tokens(work, name)
    if tokens != wanted:
        raise RuntimeError(f"{name}: {args.engine} made {tokens} tokens instead of {wanted}")
    return seconds
