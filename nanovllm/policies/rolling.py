"""The policy of a job, whose requests keep coming while others run.

It is that of `generate` with two differences. Longest first would let short requests wait as long
as longer ones come: so it holds among `window` requests that came one after the other, and all of
these start before those after them. And pacing, which spreads all tokens that are left over the
steps of the longest request, would slow a job down whose other requests are not there yet: so it
begins when the last one has come.
"""

from typing import Any

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.policies.throughput import ThroughputPolicy


class RollingPolicy(ThroughputPolicy):
    """`more_to_come`: whoever adds the last request sets it to False."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.more_to_come = True

    def key(self, seq: Sequence) -> Any:
        # Sequences are numbered as they come.
        return seq.id // self.window, seq.num_prompt_tokens - seq.max_len

    def running_limit(self, scheduler: Scheduler) -> int:
        return self._limit(scheduler, scheduler.enough_seqs, paced=not self.more_to_come)
