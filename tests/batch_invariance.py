"""Run requests alone, and again among random neighbours, and count those whose bits differ.

    python tests/batch_invariance.py --model qwen3-0.6b          on a GPU: batch_invariant=True
    python tests/batch_invariance.py --model qwen3-0.6b --off    without the option
    python tests/batch_invariance.py --model FOLDER --transformers

A trial is one request in one batch. Its tokens, their log-probabilities and those of its prompt
must be what they were when the request ran alone, to the bit. The requests sample in all ways, and
their prompts share prefixes that end at the borders of blocks and one token beside them. A batch
has 1 to 256 other requests. A model is a shape of bench.py with random weights, or a folder. Every
second request is a chat if the model has a chat template.

A CPU needs no option for equal tokens in float32, and refuses the option: leave it out there by
`--options '{"device": "cpu"}'`. The last bits of log-probabilities differ there.
"""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.apps.bench.shapes import model_folder

PREFIXES = (0, 1, 511, 2048, 4097)  # tokens that prompts share
MAX_NEIGHBOURS = 256
COMPARED = 10  # requests of a batch that are compared
WORDS = ("a dog", "a king", "an old robot", "rivers", "the moon", "bread", "a spy", "music")
# Each part of the trials runs by an LLM with these options beside those of the command line.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    dict(max_num_batched_tokens=700, max_num_seqs=48),
    dict(enforce_eager=True, overlap=False, enable_prefix_caching=False),
)


class Request(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Bits(NamedTuple):
    """The parts of an output that must not depend on other requests."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # those of the tokens
    others: tuple[tuple[int, float], ...]  # those of likelier tokens, and of the prompt


def bits(output: Any) -> Bits:
    (completion,) = output.outputs
    tokens = tuple(completion.token_ids)
    lists = [*completion.logprobs, *(entry for entry in output.prompt_logprobs or [] if entry)]
    others = tuple((token, one.logprob) for entry in lists for token, one in entry.items())
    own = tuple(entry[token].logprob for entry, token in zip(completion.logprobs, tokens))
    return Bits(tokens, own, others)


def kinds(rng: random.Random) -> Iterator[dict]:
    """Yield ways to sample, without end."""
    while True:
        yield dict(temperature=0.0)
        yield dict(temperature=1.0)
        yield dict(temperature=0.8, top_p=0.9)
        yield dict(temperature=1.2, top_k=rng.randint(2, 50), min_p=0.02)
        yield dict(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3)
        yield dict(temperature=0.7, presence_penalty=0.5, logit_bias={7: 2.0, 11: -5.0})


class Requests:
    """A source of random requests."""

    def __init__(self, llm: LLM, seed: int) -> None:
        assert llm.engine is not None
        self.llm, self.rng = llm, random.Random(seed)
        self.vocab = llm.engine.vocab_size
        self.longest = llm.engine.max_model_len - 64
        self.prefix = self.tokens(max(PREFIXES))
        self.kinds = kinds(self.rng)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def prompt(self) -> list[int]:
        own = self.tokens(self.rng.choice([1, 5, 40, 130]))
        common = min(self.rng.choice(PREFIXES), self.longest - len(own))
        return self.prefix[:common] + own

    def new(self, prompt: list[int] | None = None) -> Request:
        params = SamplingParams(
            **next(self.kinds),
            seed=self.rng.randrange(2**31),
            max_tokens=self.rng.randint(1, 32),
            ignore_eos=True,
            logprobs=self.rng.choice([0, 2]),
            prompt_logprobs=self.rng.choice([None, None, 1]),
        )
        return Request(prompt or self.prompt(), params)

    def chat(self) -> Request:
        text = f"Write {self.rng.randint(1, 9)} lines about {self.rng.choice(WORDS)}."
        (prompt,) = self.llm.encode_chat([[{"role": "user", "content": text}]])
        return self.new(prompt)


def run(llm: LLM, requests: list[Request]) -> list[Bits]:
    prompts, params = [one.prompt for one in requests], [one.params for one in requests]
    return [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def requests_alone(llm: LLM, count: int) -> tuple[list[Request], list[Bits]]:
    """Make requests, and run each alone."""
    source = Requests(llm, seed=0)
    requests = [source.new() for _ in range(count)]
    if llm.has_chat_template:
        requests[::2] = [source.chat() for _ in requests[::2]]
    return requests, [run(llm, [one])[0] for one in requests]


def trials(
    llm: LLM, requests: list[Request], alone: list[Bits], count: int, seed: int
) -> Iterator[tuple[bool, bool]]:
    """Run batches until so many trials are done; yield whether bits and tokens were the same."""
    source, rng = Requests(llm, seed), random.Random(seed)
    while count > 0:
        compared = rng.sample(range(len(requests)), min(COMPARED, len(requests), count))
        batch = [(None, source.new()) for _ in range(rng.randint(1, MAX_NEIGHBOURS))]
        for i in compared:
            batch.insert(rng.randint(0, len(batch)), (i, requests[i]))
        for (i, _), found in zip(batch, run(llm, [request for _, request in batch])):
            if i is not None:
                yield found == alone[i], found.tokens == alone[i].tokens
        count -= len(compared)


def scores_differ(llm: LLM, requests: list[Request], alone: list[Bits]) -> int:
    """Count outputs whose tokens get other log-probabilities as the end of a prompt."""
    prompts = [one.prompt + list(found.tokens) for one, found in zip(requests, alone)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    differ = 0
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for request, found, output in zip(requests, alone, outputs):
        scored = output.prompt_logprobs[len(request.prompt) :]
        given = tuple(entry[token].logprob for entry, token in zip(scored, found.tokens))
        differ += given != found.logprobs
    return differ


@torch.inference_mode()
def beside_transformers(
    folder: str, dtype: str, requests: list[Request], alone: list[Bits]
) -> torch.Tensor:
    """Return how far each token's log-probability lies from that of transformers' forward pass."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    differences = []
    for request, found in zip(requests, alone):
        ids = torch.tensor([request.prompt + list(found.tokens)], device=device)
        logprobs = model(ids).logits[0].float().log_softmax(-1).cpu()
        for i, (token, ours) in enumerate(zip(found.tokens, found.logprobs)):
            differences.append(abs(ours - logprobs[len(request.prompt) + i - 1, token].item()))
    return torch.tensor(differences, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a shape of bench.py")
    add("--quantization", help="format of the weights, as in bench.py")
    add("--trials", type=int, default=90)
    add("--requests", type=int, default=20, help="requests that are compared; default: 20")
    add("--off", action="store_true", help="leave the option out")
    add("--transformers", action="store_true", help="compare log-probabilities with transformers")
    add("--options", default="{}", type=json.loads, help="options of the LLM, as JSON")
    args = parser.parse_args()

    folder, is_random = model_folder(args.model, args.quantization)
    options = dict(max_model_len=4608, load_format="dummy" if is_random else "auto") | args.options
    if not args.off and options.get("device") != "cpu":
        options["batch_invariant"] = True
    differ = differ_in_tokens = done = 0
    for i, variant in enumerate(VARIANTS):
        with LLM(folder, **options | variant) as llm:
            if not i:
                requests, alone = requests_alone(llm, args.requests)
                print(f"{scores_differ(llm, requests, alone)} of {len(requests)} scores differ")
                dtype = llm.engine.runner.info.dtype if llm.engine else ""
            share = args.trials * (i + 1) // len(VARIANTS) - done
            for same, same_tokens in trials(llm, requests, alone, share, seed=i + 1):
                done, differ = done + 1, differ + (not same)
                differ_in_tokens += not same_tokens
        print(f"{done} trials, {differ} differ in a bit, {differ_in_tokens} in a token: {variant}")
    if args.transformers:
        far = beside_transformers(folder, dtype, requests, alone)
        print(
            f"transformers in {dtype}, {len(far)} tokens: log-probabilities differ by "
            f"{far.mean():.2g} on average, {far.max():.2g} at most; {(far == 0).sum()} are equal"
        )


if __name__ == "__main__":
    main()
