"""Scheduling policies compared: who waits how long."""

import argparse
import json
import sys
import time
from collections import deque
from importlib import import_module
from random import Random
from statistics import median

from nanovllm import SamplingParams
from nanovllm.apps.bench.engines import NanovllmEngine, device_name, versions
from nanovllm.apps.bench.report import options_name
from nanovllm.apps.bench.runs import run_once
from nanovllm.apps.bench.shapes import model_folder
from nanovllm.apps.bench.workloads import GREEDY, Work, refresh, workload
from nanovllm.engine.metrics import percentiles
from nanovllm.features.policies import POLICIES, choose_policy


def find_policy(name: str):
    """A new policy: by a name of the library's, or as "module:Class"."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        return choose_policy(getattr(import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--policy {name}: the policies are {', '.join(POLICIES)}, or give your own as "
            f"module:Class, such as my_file:MyPolicy of a my_file.py that Python finds ({error})"
        ) from error


def compare_policies(args: argparse.Namespace) -> list[dict]:
    """Serve one load under each policy, by turns, on one engine.

    Half of the workload's requests, every other one, is there at the start, as in a call of
    `generate`: the batch. The others come at random times while it runs, as by `add_request`: they
    are people who wait, and have the better priority. They come within the first half of the time
    that the whole takes at once, so that there is always more to do than can be done.
    """
    folder, dummy = model_folder(args.model)
    engine = NanovllmEngine(folder, dummy, args)
    rows = []
    for name in args.workload.split(","):
        work = workload(name, engine.vocab)[: args.requests]
        if len(work) < 2:
            raise ValueError(f"--policy: workload {name} has one request, which waits for no other")
        # The first run compiles and captures.
        span = [run_once(engine, work, name, repeat, args) for repeat in (0, 1)][-1] / 2
        r = Random(0)
        arrivals = [r.uniform(0, span) if i % 2 else 0.0 for i in range(len(work))]
        runs: dict[str, list[dict]] = {policy: [] for policy in args.policy.split(",")}
        for repeat in range(args.repeat):
            fresh = refresh(work, name, 2 + repeat, engine.vocab)
            for policy, results in runs.items():
                print(f"{name}: {policy}, {repeat + 1} of {args.repeat}", file=sys.stderr)
                results.append(serve(engine.llm, policy, fresh, arrivals, name))
        print_policies(args, name, span, runs)
        rows += [
            dict(model=args.model, workload=name, policy=policy, device=device_name(), runs=results)
            | dict(options=json.loads(args.options), versions=versions("nanovllm"))
            for policy, results in runs.items()
        ]
    return rows


def serve(llm, policy: str, work: Work, arrivals: list[float], name: str) -> dict[str, float]:
    """Let requests come at their times, in seconds. A time to first token begins there, even if
    the engine was in a step then.
    """
    # An engine has one policy for all of its life: begin a new one, with an empty prefix cache.
    llm.engine.policy = find_policy(policy)
    llm.engine.reset()
    coming = deque(sorted(range(len(work)), key=lambda i: arrivals[i]))
    added, begin = {}, time.perf_counter()
    while coming or llm.engine.has_unfinished():
        while coming and arrivals[coming[0]] <= time.perf_counter() - begin:
            i = coming.popleft()
            prompt, length = work[i]
            params = SamplingParams(
                temperature=0.0 if name in GREEDY else 0.6,
                max_tokens=length,
                ignore_eos=True,
                priority=0 if arrivals[i] else 1,
            )
            added[i] = llm.engine.add(prompt, params, interactive=arrivals[i] > 0)
        llm.step()
    seconds = time.perf_counter() - begin
    wait = {i: seq.first_token_at - begin - arrivals[i] for i, seq in added.items()}
    later = [wait[i] for i in added if arrivals[i]]
    return dict(
        mean=sum(wait.values()) / len(wait),
        p99=percentiles(wait.values())["p99"],
        mean_of_later=sum(later) / len(later),
        p99_of_later=percentiles(later)["p99"],
        seconds=seconds,
    )


def print_policies(
    args: argparse.Namespace, name: str, span: float, runs: dict[str, list[dict]]
) -> None:
    """A table in Markdown: of each figure, the median of the runs."""
    print(
        f"\n{args.model}, {name} on {device_name()}, {options_name(args.options)}: half of the "
        f"requests at the start, half within {span:.2f} s.\n"
        f"Seconds, median of {args.repeat} runs by turns.\n\n"
        "| policy | to first token, mean | p99 | of those that come later, mean | p99 "
        "| to the end |\n| --- | --- | --- | --- | --- | --- |"
    )
    for policy, results in runs.items():
        middle = [median(result[figure] for result in results) for figure in results[0]]
        print(f"| {policy} | {' | '.join(f'{seconds:.3f}' for seconds in middle)} |", flush=True)
