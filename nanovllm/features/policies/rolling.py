"""The policy of a job, whose requests keep coming while others run.

It is the policy of `generate`, with three differences:

- Longest first would let short requests wait as long as longer ones come. So it holds among
  `window` requests that came one after the other, and all of these start before later ones.
- Pacing, which spreads all tokens that are left over the steps of the longest request, would slow
  down a job whose other requests have not come yet. So it begins when the last request has come.
- Results are kept as they come. So no more requests run than make the device nearly as fast as it
  gets (`Scheduler.enough_seqs`). Results then come one after the other instead of all at the end.
"""

from typing import Any

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.policies.throughput import ThroughputPolicy


class RollingPolicy(ThroughputPolicy):
    """The throughput policy, for requests that keep coming.

    more_to_come: whoever adds the last request sets this to False.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.more_to_come = True

    def key(self, seq: Sequence) -> Any:
        # Sequences are numbered as they come.
        return seq.id // self.window, seq.num_prompt_tokens - seq.max_len

    def reason(self, seq: Sequence) -> str:
        tokens = f"at most {seq.num_tokens_left:,} new tokens"
        return f"longest first among {self.window:,} requests in a row: {tokens}"

    def running_limit(self, scheduler: Scheduler) -> int:
        return self._limit(scheduler, scheduler.enough_seqs, paced=not self.more_to_come)
