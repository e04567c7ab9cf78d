"""The scores of a prompt's tokens: which tokens are to be scored, and the scores so far.

The log-probability of a token comes from the hidden state of the token before it. Each chunk
therefore scores the tokens that follow its own tokens. Each token is scored once, even if the
sequence is preempted and recomputed.
"""

from dataclasses import dataclass, field

from nanovllm.engine.batch import ScoredTokens


@dataclass(slots=True)
class PromptScores:
    """The tokens of one prompt that are to be scored, and their scores so far."""

    prompt: list[int]
    num_likeliest: int  # how many of the likeliest tokens are scored beside the token itself
    num_done: int  # leading tokens that need no score, or whose scores are planned
    # The scores of each chunk, in the form that frontend/outputs.py reads.
    records: list[bytes] = field(default_factory=list)

    @property
    def are_done(self) -> bool:
        """True if the scores of all tokens are planned."""
        return self.num_done == len(self.prompt)

    def take(self, start: int, end: int) -> ScoredTokens | None:
        """Take the tokens that the chunk of tokens `start` to `end` scores, and count them as done.

        Returns None if the chunk scores no token.
        """
        first, last = self.num_done, min(end + 1, len(self.prompt))
        if first >= last:
            return None
        self.num_done = last
        return ScoredTokens(first - 1 - start, self.prompt[first:last], self.num_likeliest)
