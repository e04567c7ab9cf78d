"""What a run was like: requests, tokens, cache use, and how long users waited.

Takes a few numbers of each sequence that has ended, so that a token costs nothing.
"""

import math
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence

LATEST = 65536  # requests that the percentiles look back on


class StepRecord(NamedTuple):
    """What one step did, for those who watch. What it counts is so at the step's launch.

    With overlap a step launches its own tokens and waits for those of the step before: `seconds`
    and `finished` then belong to these.
    """

    number: int  # of this step, from 0
    time: float  # at which it began, in seconds of time.perf_counter
    prefill_tokens: int
    decode_tokens: int  # one for each decoding sequence
    running: int  # sequences that hold a batch slot
    waiting: int  # sequences that wait for one
    blocks_in_use: int  # KV blocks that sequences hold
    num_blocks: int  # KV blocks there are
    preemptions: int  # sequences that this step preempted
    seconds: float = 0.0  # from its beginning to its end, on the host's clock
    finished: tuple[int, ...] = ()  # ids of the requests that ended with it


class Metrics:
    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0  # completions that ended with one
        self.prompt_tokens = 0
        self.cached_tokens = 0  # of the prompts, found in the prefix cache
        self.output_tokens = 0
        self.preemptions = 0
        self.peak_blocks = 0
        self.seconds_to_first_token: deque[float] = deque(maxlen=LATEST)
        self.seconds_per_output_token: deque[float] = deque(maxlen=LATEST)

    def record(self, seq: Sequence, now: float) -> None:
        """Take the numbers of a sequence that has come to its end."""
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        self.output_tokens += num_output
        self.errors += seq.finish_reason == "error"
        self.preemptions += seq.num_preemptions
        if seq.parent is None:  # of several completions, the one that computed the prompt counts it
            assert seq.num_cached_tokens is not None
            self.requests += 1
            self.prompt_tokens += seq.num_prompt_tokens
            self.cached_tokens += seq.num_cached_tokens
            if num_output:
                assert seq.first_token_at is not None
                self.seconds_to_first_token.append(seq.first_token_at - seq.added_at)
        if num_output > 1:
            assert seq.first_token_at is not None
            self.seconds_per_output_token.append((now - seq.first_token_at) / (num_output - 1))

    def summary(self, num_blocks: int) -> dict[str, int | float | dict[str, float] | None]:
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
    """Median and 99th percentile, or None of no values.

    A percentile is the smallest value that at least as many of the values do not exceed.
    """
    if not values:
        return None
    ordered = sorted(values)

    def at(part: float) -> float:
        return ordered[math.ceil(part * len(ordered)) - 1]

    return {"median": at(0.5), "p99": at(0.99)}
