"""Which tokens of a prompt are to be scored, and the scores as they come.

A token's log-probability comes from the hidden state of the token before it. So chunk after chunk
scores the tokens that follow its own, each of them once: not again when the sequence is preempted.
"""

from dataclasses import dataclass, field

from nanovllm.engine.batch import ScoredTokens


@dataclass(slots=True)
class PromptScores:
    prompt: list[int]
    num_likeliest: int  # beside a token's own score, those of so many likeliest tokens
    num_done: int  # leading tokens that are not to be scored, or whose step has been planned
    records: list[bytes] = field(default_factory=list)  # of each chunk, as outputs.py reads them

    @property
    def are_done(self) -> bool:
        return self.num_done == len(self.prompt)

    def take(self, start: int, end: int) -> ScoredTokens | None:
        """What the chunk of tokens `start` to `end` is to score, which counts as done from now
        on. None: nothing.
        """
        first, last = self.num_done, min(end + 1, len(self.prompt))
        if first >= last:
            return None
        self.num_done = last
        return ScoredTokens(first - 1 - start, self.prompt[first:last], self.num_likeliest)
