"""A comparison of scheduling policies by the time that requests wait for their first token."""

import argparse
import sys
import time
from collections import deque
from importlib import import_module
from random import Random
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench.engines import NanovllmEngine, device_name, versions
from nanovllm.apps.bench.report import options_name, options_of
from nanovllm.apps.bench.runs import check_lengths, run_once
from nanovllm.apps.bench.shapes import model_folder
from nanovllm.apps.bench.workloads import WORKLOADS, Work
from nanovllm.engine.metrics import percentiles
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.features.policies import POLICIES, choose_policy


def find_policy(name: str) -> SchedulingPolicy:
    """Make the policy that the library calls `name`, or that `name` gives as "module:Class"."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        return choose_policy(getattr(import_module(module), attribute)())
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--policy {name}: use one of {', '.join(POLICIES)}, or your own policy as "
            f"module:Class, such as my_file:MyPolicy for a my_file.py that Python finds ({error})"
        ) from error


def compare_policies(args: argparse.Namespace) -> list[dict]:
    """Serve the same load under each policy, by turns, on one engine.

    Every other request of the workload is added at the start, as in a call of `generate`: these are
    the batch. The others arrive at random times while the engine runs, as by `add_request`: they
    stand for people who wait, and have the better priority. They arrive within half of the time
    that the whole workload takes at once, so the engine is overloaded throughout.
    """
    folder, random_weights = model_folder(args.model, args.quantization)
    engine = NanovllmEngine(
        folder,
        random_weights,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        **options_of(args),
    )
    check_lengths(args, engine)
    rows = []
    for name in args.workload.split(","):
        workload = WORKLOADS[name]
        work = workload.work(engine.vocab)[: args.requests]
        if len(work) < 2:
            raise ValueError(
                f"--policy: workload {name} has a single request, but a comparison needs two or "
                "more: choose another workload, or raise --requests"
            )
        run_once(engine, work, name, 0, 2)  # compiles kernels and captures CUDA graphs
        span = run_once(engine, work, name, 1, 2) / 2
        r = Random(0)
        arrivals = [r.uniform(0, span) if i % 2 else 0.0 for i in range(len(work))]
        runs: dict[str, list[dict]] = {policy: [] for policy in args.policy.split(",")}
        for repeat in range(args.repeat):
            fresh = workload.refresh(work, 2 + repeat, engine.vocab)
            for policy, results in runs.items():
                print(f"{name}: {policy}, {repeat + 1} of {args.repeat}", file=sys.stderr)
                results.append(serve(engine.llm, policy, fresh, arrivals, name))
        print_policies(args, name, span, runs)
        rows += [
            dict(
                model=args.model,
                workload=name,
                policy=policy,
                device=device_name(),
                runs=results,
                options=options_of(args),
                versions=versions("nanovllm"),
            )
            for policy, results in runs.items()
        ]
    return rows


def serve(llm: LLM, policy: str, work: Work, arrivals: list[float], name: str) -> dict[str, float]:
    """Add requests at their times of arrival, in seconds, and run steps until all have finished.

    Returns the seconds that requests waited for their first token, as mean and 99th percentile over
    all requests and over those that arrived later; and the seconds of the whole run. A wait begins
    at the time of arrival, even if the engine was in a step then.
    """
    engine = llm.engine
    assert engine is not None
    # An engine keeps its policy: reset the engine with the new policy and an empty prefix cache.
    engine.policy = find_policy(policy)
    engine.reset()
    coming = deque(sorted(range(len(work)), key=lambda i: arrivals[i]))
    added, begin = {}, time.perf_counter()
    while coming or engine.has_unfinished():
        while coming and arrivals[coming[0]] <= time.perf_counter() - begin:
            i = coming.popleft()
            prompt, length = work[i]
            params = SamplingParams(
                temperature=WORKLOADS[name].sampling["temperature"],
                max_tokens=length,
                ignore_eos=True,
                priority=0 if arrivals[i] else 1,
            )
            added[i] = engine.add(prompt, params, interactive=arrivals[i] > 0)
        llm.step()
    seconds = time.perf_counter() - begin
    waits = {}
    for i, request in added.items():
        first_token_at = request.first.first_token_at
        assert first_token_at is not None, "the request has finished"
        waits[i] = first_token_at - begin - arrivals[i]
    later = [wait for i, wait in waits.items() if arrivals[i]]
    return dict(
        mean=sum(waits.values()) / len(waits),
        p99=p99(list(waits.values())),
        mean_of_later=sum(later) / len(later),
        p99_of_later=p99(later),
        seconds=seconds,
    )


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    found = percentiles(values)
    assert found is not None, "there are values"
    return found["p99"]


def print_policies(
    args: argparse.Namespace, name: str, span: float, runs: dict[str, list[dict]]
) -> None:
    """Print a Markdown table with the median over the runs for each figure."""
    print(
        f"\n{args.model}, {name} on {device_name()}, {options_name(options_of(args))}: half of the "
        f"requests arrive at the start, half within {span:.2f} s.\n"
        f"Seconds, median of {args.repeat} runs by turns.\n\n"
        "| policy | time to first token, mean | p99 | of later arrivals, mean | p99 "
        "| whole run |\n| --- | --- | --- | --- | --- | --- |"
    )
    for policy, results in runs.items():
        middle = [median(result[figure] for result in results) for figure in results[0]]
        print(f"| {policy} | {' | '.join(f'{seconds:.3f}' for seconds in middle)} |", flush=True)
