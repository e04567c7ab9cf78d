"""A plain reference of what sampling parameters do, random ones, and draws from given logits."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import torch

from nanovllm import SamplingParams
from nanovllm.engine.model_runner import StepOutput
from nanovllm.features.sampling.resampler import Resampler
from nanovllm.frontend.outputs import read_logprobs
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.sampler import sample
from nanovllm.sampling_params import SamplingMetadata


def process(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], stop_ids=()
) -> list[float]:
    """Logits / temperature after everything, -inf where a token may not be drawn; by Python's
    own floats.
    """
    logits = list(logits)
    if len(output) < params.min_tokens:
        for token in stop_ids:
            logits[token] = -math.inf
    for token in set(prompt) | set(output):
        logits[token] *= (
            1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        )
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        best = logits.index(max(logits))
        return [x if i == best else -math.inf for i, x in enumerate(logits)]
    logits = [x / params.temperature for x in logits]
    kept = set(range(len(logits)))
    if params.min_p:
        kept = {i for i in kept if math.exp(logits[i] - max(logits)) >= params.min_p}
    order = sorted(kept, key=lambda i: -logits[i])
    if params.top_k > 0:
        kth = logits[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if logits[i] >= kth]
    total, reached, kept = sum(math.exp(logits[i]) for i in order), 0.0, set()
    least = math.inf
    for i in order:
        if reached >= params.top_p < 1 and logits[i] < least:
            break
        kept.add(i)
        least = logits[i]
        reached += math.exp(logits[i]) / total
    return [x if i in kept else -math.inf for i, x in enumerate(logits)]


class Draws:
    """Draws a token for each row of logits [R, V], all at the same position, from batch slots in a
    shuffled order."""

    def __init__(
        self,
        logits,
        params,
        seeds,
        prompt=(),
        output=(),
        stop_ids=(),
        group=ParallelGroup(),
        vocab_size=None,
        make_resampler=Resampler,
        sampler=sample,
    ):
        rows, device = len(seeds), logits.device
        self.logits, self.params = logits, params if isinstance(params, list) else [params] * rows
        self.length, self.sampler = len(prompt) + len(output), sampler
        self.slots = random.Random(rows).sample(range(rows), rows)
        self.slots_d = torch.tensor(self.slots, device=device)
        inverse = self.slots_d.argsort()
        temperatures = torch.tensor([one.temperature for one in self.params], device=device)
        self.state = SimpleNamespace(
            seeds=seeds.to(device)[inverse],
            temperatures=temperatures[inverse],
            last_tokens=torch.full((rows,), -7, device=device),
        )
        runner = SimpleNamespace(
            batch_state=self.state,
            vocab_size=vocab_size or logits.shape[1],
            group=group,
            max_num_seqs=rows,
            _upload=lambda array: torch.from_numpy(array).to(device),
            _sample_tokens=sampler,
        )
        self.resampler = make_resampler(runner)
        metadata = [
            None
            if one.is_plain
            else SamplingMetadata(one, frozenset(stop_ids), len(prompt), [*prompt, *output])
            for one in self.params
        ]
        self.resampler.start(list(zip(self.slots, metadata)))

    def run(self, position=0):
        """Tokens [R], and by row what is reported of log-probabilities.

        `position`: of the token, after all that there is; the noise depends on it.
        """
        device, state, slots = self.logits.device, self.state, self.slots_d
        positions = torch.full(
            (len(slots),), self.length + position, dtype=torch.int32, device=device
        )
        # On several ranks the best of all, which a shard of the logits does not tell.
        tokens, _ = self.sampler(
            self.logits,
            temperatures=state.temperatures[slots],
            seeds=state.seeds[slots],
            positions=positions.long(),
        )
        state.last_tokens[slots] = tokens
        output = StepOutput(tokens, self.logits, positions, slots)
        logprobs = {}
        for part in self.resampler.resample(tuple(self.slots), output):
            logprobs |= {
                row: read_logprobs([one], 1)[0]
                for row, one in replace(part, records=part.records.cpu()).read().items()
            }
        assert torch.equal(state.last_tokens[slots], tokens)
        return tokens, logprobs


def draw(*args, **options):
    """A token for each row of logits."""
    return Draws(*args, **options).run()[0]


def random_params(r: random.Random, **fixed) -> SamplingParams:
    def maybe(off, on):
        return off if r.random() < 0.4 else on

    options = dict(
        temperature=r.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=maybe(r.choice([0, -1]), r.randint(1, 60)),
        top_p=maybe(1.0, r.uniform(0.05, 0.99)),
        min_p=maybe(0.0, r.uniform(0.01, 0.6)),
        min_tokens=maybe(0, r.randint(1, 12)),
        repetition_penalty=maybe(1.0, r.uniform(0.5, 2.0)),
        presence_penalty=maybe(0.0, r.uniform(-2, 2)),
        frequency_penalty=maybe(0.0, r.uniform(-2, 2)),
        logprobs=maybe(None, r.randint(0, 5)),
    )
    return SamplingParams(**{**options, **fixed})
