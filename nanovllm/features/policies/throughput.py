"""The policy of `generate` and `chat`, whose requests all come at once.

What counts is when the last of them ends. Three things make that sooner than first come, first
served does:

- Longest first (Graham's rule of 1969): what runs longest starts first, so that the fewest
  sequences run alone at the end.
- Groups: a step that computes prompts costs the host more than one that only decodes, and a few
  short prompts leave the device half idle. Sequences start when enough of them can start together.
- Pacing: a sequence may wait although there is room. The call takes at least as many steps as its
  longest output has tokens. If all others start together with it, the first steps decode many
  sequences and are slow, and the last steps decode few and read all the weights for them. So only
  as many run as spread all tokens evenly over the steps of the longest.

  An example: one request generates 1,000 tokens and 499 others generate 500 each, 250,500 in all.
  Without pacing, 500 sequences decode for 500 steps, then one decodes alone for 500 more. With it,
  251 decode in each of the 1,000 steps: half of the others at once, the other half after them.

Interactive requests start before all others, in order of arrival. They start in groups as well, but
they are not paced.
"""

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.policies.shared_prefix import SharedPrefixPolicy

# Pacing never holds the number of decoding sequences below this. A decode step takes the time to
# read the weights, or the time to multiply by them if that is longer; where the two meet depends on
# the device, the format of the weights and the kernels. Measured on an H200 with `bench`, in
# seconds, with at least 160, 192 and 256 sequences: Qwen3-8B 13.27, 13.37, 13.58; in INT4 13.57,
# 13.67, 13.69; Qwen3-0.6B 4.71, 4.66, 4.70; Qwen3-30B-A3B in FP8 14.34, 14.15, 14.20. With at most
# 128, 160 and 192: Qwen3-8B in FP8 10.97, 11.07, 10.87; gpt-oss-20b in MXFP4 8.31, 8.39, 8.08.
MIN_RUNNING = 192

# Prompts of this many tokens keep a device busy for longer than the host takes to launch them.
GROUP_TOKENS = 4096


class ThroughputPolicy(SharedPrefixPolicy):
    """Longest first, started in groups, paced; see the module's docstring."""

    def __init__(self, min_running: int = MIN_RUNNING, group_tokens: int = GROUP_TOKENS) -> None:
        super().__init__()
        self.min_running = min_running
        self.group_tokens = group_tokens
        self._uncached_part = 1.0  # of the prompt that started last

    def key(self, seq: Sequence) -> tuple[bool, int]:
        max_new_tokens = seq.max_len - seq.num_prompt_tokens
        return (False, 0) if seq.request.interactive else (True, -max_new_tokens)

    def reason(self, seq: Sequence) -> str:
        if seq.request.interactive:
            return "interactive requests start before the others, in order of arrival"
        return f"longest first: at most {seq.num_tokens_left:,} new tokens"

    def running_limit(self, scheduler: Scheduler) -> int:
        paced = not scheduler.waiting.first.request.interactive
        return self._limit(scheduler, scheduler.max_num_seqs, paced=paced)

    def _limit(self, scheduler: Scheduler, most: int, paced: bool) -> int:
        group = self._group_size(scheduler, most)
        if scheduler.num_running + group > most:
            return scheduler.num_running
        return min(most, self._paced_limit(scheduler, group)) if paced else most

    def started(self, seq: Sequence) -> None:
        if seq.is_first:
            self._uncached_part = 1 - seq.num_computed / seq.num_tokens

    def order_decodes(self, decoding: list[Sequence]) -> None:
        # Attention to a long context takes longest. If it begins first, short ones fill the end of
        # the step. As each step adds one token to all, they stay in this order.
        decoding.sort(key=lambda seq: -seq.num_tokens)

    def _group_size(self, scheduler: Scheduler, most_running: int) -> int:
        """Return how many waiting sequences start together while others run.

        A group is large enough if its prompts have `group_tokens` tokens to compute. It also is if
        it has a sixteenth of `most_running` sequences: running sequences end one by one, and their
        slots must not stay empty for long. The method assumes that the same part of each prompt is
        cached as of the last prompt that started.
        """
        if not scheduler.decoding:
            return 1
        enough_tokens = min(self.group_tokens, scheduler.max_num_batched_tokens)
        most = max(1, most_running // 16)
        tokens, size = 0.0, 0
        for seq in scheduler.waiting:
            tokens += seq.num_tokens * self._uncached_part
            size += 1
            if tokens >= enough_tokens or size == most:
                break
        return size

    def _paced_limit(self, scheduler: Scheduler, group: int) -> int:
        """Return how many sequences spread all tokens evenly over the steps of the longest one.

        The number is at least `min_running`, and higher if the next group would otherwise end after
        the longest sequence.
        """
        first = scheduler.waiting.first
        left = [seq.num_tokens_left for seq in scheduler.decoding]
        longest = max(left, default=first.num_tokens_left)
        tokens_left = sum(left) + scheduler.waiting.num_tokens_left
        even = max(self.min_running, -(-tokens_left // longest))
        with_group = scheduler.num_running + group
        if first.num_tokens_left >= longest:  # it would end last, however soon it starts
            return max(even, with_group)
        return even if with_group <= even else scheduler.num_running
