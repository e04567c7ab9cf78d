"""The workloads, to the token."""

from collections.abc import Iterator
from math import log
from random import Random

WORKLOADS = {
    "bench": "256 requests, 100-1024 tokens in, 100-1024 out (133,966 in all)",
    "latency": "1 request, 128 in, 512 out",
    "prefill": "128 requests, 2048 in, 1 out",
    "shared": "256 requests, 2048 common tokens + 128 own in, 128 out",
    "long": "64 requests, 3000 in, 512 out",
    "many": "2048 requests, 16-128 in, 16-128 out",
    "conversations": "192 requests, 64-512 in, 128 out; then 4 times all of that and 64 more in",
    "lognormal": "768 requests, 16-2048 in (median 150), 16-1024 out (median 180), log-normal",
    "laptop": "64 requests, 16-256 in, 16-256 out, greedy",
    "small": "8 requests, 16-128 in, 32 out, greedy",
    "qwen-sampling": "256 requests of bench, with top_p 0.95 and top_k 20: Qwen3's own settings",
    "logprobs": "256 requests of bench, with logprobs 1",
    "penalties": "256 requests of bench, with presence_penalty 1",
}

GREEDY = ("laptop", "small")

# What the requests of a workload ask for beside a temperature, which is 0.6 unless it is greedy.
# Their prompts are those of bench.
ASKED: dict[str, dict] = {
    "qwen-sampling": dict(top_p=0.95, top_k=20),
    "logprobs": dict(logprobs=1),
    "penalties": dict(presence_penalty=1.0),
}

ROUNDS = {"conversations": 5}  # calls one after the other; of others 1

NEW_TOKENS = 64  # of each further round

Work = list[tuple[list[int], int]]  # prompt, output length


def workloads() -> Iterator[tuple[str, Work]]:
    """Every workload but the greedy ones, drawn in this order from one stream.

    They are what was measured elsewhere, to the token.
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


def workload(name: str, vocab: int) -> Work:
    if name == "laptop":
        r = Random(0)
        work = [
            ([r.randrange(vocab) for _ in range(r.randint(16, 256))], r.randint(16, 256))
            for _ in range(64)
        ]
    elif name == "small":
        r = Random(0)
        work = [([r.randrange(vocab) for _ in range(r.randint(16, 128))], 32) for _ in range(8)]
    elif name == "conversations":
        r = Random(0)
        prompts = [[r.randrange(vocab) for _ in range(r.randint(64, 512))] for _ in range(192)]
        work = [(prompt, 128) for prompt in prompts]
    elif name == "lognormal":
        r = Random(0)

        def length(median: int, longest: int) -> int:
            return round(min(max(16, r.lognormvariate(log(median), 1)), longest))

        work = [
            ([r.randrange(vocab) for _ in range(length(150, 2048))], length(180, 1024))
            for _ in range(768)
        ]
    else:
        drawn_as = "bench" if name in ASKED else name
        work = next(work for key, work in workloads() if key == drawn_as)
    return [([token % vocab for token in prompt], length) for prompt, length in work]


def refresh(work: Work, name: str, repeat: int, vocab: int) -> Work:
    """Change the first token of each prompt.

    So a prefix cache helps inside a workload, but not between repeats, nor between workloads with
    the same prompts.
    """
    begin = 20000 + 300 * repeat
    if name in ASKED:
        begin += 30000 * (1 + list(ASKED).index(name))
    first = [begin + (0 if name == "shared" else i % 256) for i in range(len(work))]
    return [([token % vocab, *prompt[1:]], length) for token, (prompt, length) in zip(first, work)]


def next_round(work: Work, outputs: list[list[int]], seed: int, vocab: int) -> Work:
    """Each prompt, what was answered to it, and new tokens."""
    r = Random(seed)
    return [
        (prompt + output + [r.randrange(vocab) for _ in range(NEW_TOKENS)], length)
        for (prompt, length), output in zip(work, outputs)
    ]


def num_output_tokens(work: Work, name: str) -> int:
    return sum(n for _, n in work) * ROUNDS.get(name, 1)
