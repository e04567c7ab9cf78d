"""The policy of a job, whose requests keep coming while others run.

It is the policy of `generate`, with three differences:

- Longest first would let short requests wait as long as longer ones come. So it holds among
  `window` requests that came one after the other, and all of these start before later ones.
- Pacing, which spreads all tokens that are left over the steps of the longest request, would slow
  down a job whose other requests have not come yet. So it begins when the last request has come.
- Results are kept as they come. So no more requests run than make the device nearly as fast as it
  gets (`Scheduler.enough_seqs`). Results then come one after the other instead of all at the end.
  Once the last request has come, the number may rise, so that no last round of a few requests is
  left: of 200 equal requests, 4 rounds of 50 run, not 4 of 48 and one of 8.
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
        most = scheduler.enough_seqs
        if not self.more_to_come:
            most = even_rounds(scheduler, most)
        return self._limit(scheduler, most, paced=not self.more_to_come)


def even_rounds(scheduler: Scheduler, enough: int) -> int:
    """Return how many of the unfinished sequences run at a time so that each round has the same
    number, which is `enough` or up to half as many more.
    """
    waiting = scheduler.waiting
    num_seqs = scheduler.num_running + len(waiting) + len(waiting.followers)
    rounds = max(1, round(num_seqs / enough))
    return min(scheduler.max_num_seqs, max(enough, -(-num_seqs // rounds)))
