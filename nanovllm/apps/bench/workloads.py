"""The workloads of bench.py, whose tokens are the same on every machine and in every version."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log
from random import Random

Work = list[tuple[list[int], int]]  # prompt and number of output tokens of each request
NEW_TOKENS = 64  # new tokens in each further round of a conversation


@dataclass(frozen=True)
class Workload:
    """A named set of requests.

    The prompts are drawn once. Before each run, `refresh` replaces their first tokens.
    """

    description: str
    draw: Callable[[int], Work]  # takes the size of the vocabulary
    sampling: dict = field(default_factory=lambda: dict(temperature=0.6))
    rounds: int = (
        1  # successive calls; each appends the answers of the previous call to the prompts
    )
    common_prefix: int = 0  # length of the prefix that all prompts share
    first_token: int = 20000  # first token of the first prompt in the first run

    def work(self, vocab: int) -> Work:
        """Return the requests for a model with `vocab` tokens."""
        return [([token % vocab for token in prompt], n) for prompt, n in self.draw(vocab)]

    def refresh(self, work: Work, repeat: int, vocab: int) -> Work:
        """Replace the first token of each prompt by one that belongs to this repeat.

        So the prefix cache helps within a run, but neither between repeats nor between workloads
        that have the same prompts.
        """
        begin = self.first_token + 300 * repeat
        first = [begin + (0 if self.common_prefix else i % 256) for i in range(len(work))]
        return [([token % vocab, *prompt[1:]], n) for token, (prompt, n) in zip(first, work)]

    def longest(self, work: Work) -> int:
        """Return the most tokens that prompt and output of a request have, in the last round."""
        added = self.rounds - 1
        return max(len(prompt) + n + added * (n + NEW_TOKENS) for prompt, n in work)

    def num_output_tokens(self, work: Work) -> int:
        """Count the tokens that all rounds of a run generate."""
        return sum(n for _, n in work) * self.rounds


def next_round(work: Work, outputs: list[list[int]], seed: int, vocab: int) -> Work:
    """Append to each prompt its answer and NEW_TOKENS random tokens."""
    r = Random(seed)
    return [
        (prompt + output + [r.randrange(vocab) for _ in range(NEW_TOKENS)], n)
        for (prompt, n), output in zip(work, outputs)
    ]


def draw_stream() -> Iterator[tuple[str, Work]]:
    """Draw six workloads from one stream of random numbers.

    Their order determines their tokens and must not change: other engines have been measured on
    these tokens.
    """
    r = Random(0)

    def ids(n: int) -> list[int]:
        return [r.randint(0, 10000) for _ in range(n)]

    prompts = [ids(r.randint(100, 1024)) for _ in range(256)]
    yield "bench", [(prompt, r.randint(100, 1024)) for prompt in prompts]
    yield "latency", [(ids(128), 512)]
    yield "prefill", [(ids(2048), 1) for _ in range(128)]
    common = ids(2048)
    yield "shared", [(common + ids(128), 128) for _ in range(256)]
    yield "long", [(ids(3000), 512) for _ in range(64)]
    yield "many", [(ids(r.randint(16, 128)), r.randint(16, 128)) for _ in range(2048)]


def draw_from_stream(name: str, vocab: int) -> Work:
    """Draw one of the six workloads of the stream; their tokens do not depend on `vocab`."""
    return next(work for key, work in draw_stream() if key == name)


def draw_conversations(vocab: int) -> Work:
    """Draw the first round of the conversations."""
    r = Random(0)
    prompts = [[r.randrange(vocab) for _ in range(r.randint(64, 512))] for _ in range(192)]
    return [(prompt, 128) for prompt in prompts]


def draw_lognormal(vocab: int) -> Work:
    """Draw requests with log-normal lengths, which are as skewed as the requests of real users."""
    r = Random(0)

    def length(median: int, longest: int) -> int:
        return round(min(max(16, r.lognormvariate(log(median), 1)), longest))

    return [
        ([r.randrange(vocab) for _ in range(length(150, 2048))], length(180, 1024))
        for _ in range(768)
    ]


def draw_laptop(vocab: int) -> Work:
    """Draw requests for a small model without a GPU."""
    r = Random(0)
    return [
        ([r.randrange(vocab) for _ in range(r.randint(16, 256))], r.randint(16, 256))
        for _ in range(64)
    ]


def draw_small(vocab: int) -> Work:
    """Draw a few short requests, for a real model without a GPU."""
    r = Random(0)
    return [([r.randrange(vocab) for _ in range(r.randint(16, 128))], 32) for _ in range(8)]


draw_bench = partial(draw_from_stream, "bench")

WORKLOADS = {
    "bench": Workload(
        "256 requests, 100-1024 tokens in, 100-1024 out (133,966 in all)", draw_bench
    ),
    "latency": Workload("1 request, 128 in, 512 out", partial(draw_from_stream, "latency")),
    "prefill": Workload("128 requests, 2048 in, 1 out", partial(draw_from_stream, "prefill")),
    "shared": Workload(
        "256 requests, 2048 common tokens + 128 own in, 128 out",
        partial(draw_from_stream, "shared"),
        common_prefix=2048,
    ),
    "long": Workload("64 requests, 3000 in, 512 out", partial(draw_from_stream, "long")),
    "many": Workload("2048 requests, 16-128 in, 16-128 out", partial(draw_from_stream, "many")),
    "conversations": Workload(
        "192 requests, 64-512 in, 128 out; then 4 rounds with all of that and 64 more in",
        draw_conversations,
        rounds=5,
    ),
    "lognormal": Workload(
        "768 requests, 16-2048 in (median 150), 16-1024 out (median 180), log-normal",
        draw_lognormal,
    ),
    "laptop": Workload(
        "64 requests, 16-256 in, 16-256 out, greedy", draw_laptop, dict(temperature=0.0)
    ),
    "small": Workload("8 requests, 16-128 in, 32 out, greedy", draw_small, dict(temperature=0.0)),
    "qwen-sampling": Workload(
        "256 requests of bench, with top_p 0.95 and top_k 20: Qwen3's own settings",
        draw_bench,
        dict(temperature=0.6, top_p=0.95, top_k=20),
        first_token=50000,
    ),
    "logprobs": Workload(
        "256 requests of bench, with logprobs 1",
        draw_bench,
        dict(temperature=0.6, logprobs=1),
        first_token=80000,
    ),
    "penalties": Workload(
        "256 requests of bench, with presence_penalty 1",
        draw_bench,
        dict(temperature=0.6, presence_penalty=1.0),
        first_token=110000,
    ),
}
