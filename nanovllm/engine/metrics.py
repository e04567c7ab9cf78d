"""The metrics of a run: requests, tokens, cache use, and how long users waited.

The metrics take a few numbers from each sequence that has ended, so a token costs nothing.
"""

import math
from collections import deque
from collections.abc import Collection

from nanovllm.engine.listener import EngineListener
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import StepRecord

LATEST = 65536  # the percentiles are those of so many latest values


class EngineMetrics(EngineListener):
    """The metrics of everything an engine has served, and of the last call."""

    def __init__(self) -> None:
        self.total = Metrics()
        self.last_call = Metrics()

    def begin_call(self) -> None:
        """Start new metrics of the last call."""
        self.last_call = Metrics()

    def step_recorded(self, step: StepRecord) -> None:
        for metrics in (self.total, self.last_call):
            metrics.peak_blocks = max(metrics.peak_blocks, step.blocks_in_use)

    def sequence_finished(self, seq: Sequence) -> None:
        if seq.finish_reason != "abort":
            self.total.record(seq)
            self.last_call.record(seq)


class Metrics:
    """The counts and times of sequences that have ended."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0  # completions that ended with an error
        self.prompt_tokens = 0
        self.cached_tokens = 0  # prompt tokens that were found in the prefix cache
        self.output_tokens = 0
        self.preemptions = 0
        self.peak_blocks = 0
        self.seconds_to_first_token: deque[float] = deque(maxlen=LATEST)
        self.seconds_per_output_token: deque[float] = deque(maxlen=LATEST)

    def record(self, seq: Sequence) -> None:
        """Add the numbers of a sequence that has ended."""
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        self.output_tokens += num_output
        self.errors += seq.finish_reason == "error"
        self.preemptions += seq.num_preemptions
        if seq.is_first:  # of n completions, only the first one counts the prompt
            request = seq.request
            assert request.num_cached_tokens is not None
            self.requests += 1
            self.prompt_tokens += seq.num_prompt_tokens
            self.cached_tokens += request.num_cached_tokens
            if num_output:
                assert seq.first_token_at is not None
                self.seconds_to_first_token.append(seq.first_token_at - request.added_at)
        if num_output > 1:
            assert seq.first_token_at is not None and seq.finished_at is not None
            seconds = seq.finished_at - seq.first_token_at
            self.seconds_per_output_token.append(seconds / (num_output - 1))

    def summary(self, num_blocks: int) -> dict[str, int | float | dict[str, float] | None]:
        """Return the metrics as `LLM.metrics` describes them."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "prefix_cache_hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "kv_cache_use": self.peak_blocks / num_blocks,
            "preemptions": self.preemptions,
            "time_to_first_token": percentiles(self.seconds_to_first_token),
            "time_per_output_token": percentiles(self.seconds_per_output_token),
        }


def percentiles(values: Collection[float]) -> dict[str, float] | None:
    """Return the median and the 99th percentile, or None if there are no values.

    The 99th percentile is the smallest value that at least 99 % of the values do not exceed.
    """
    if not values:
        return None
    ordered = sorted(values)

    def at(part: float) -> float:
        return ordered[math.ceil(part * len(ordered)) - 1]

    return {"median": at(0.5), "p99": at(0.99)}
