"""The kernels that sample for rows that ask for more, against the plain sampler of those rows and
an exact reference: in Triton's interpreter on a CPU, and compiled on a GPU.
"""

import math
import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from sampling_helpers import Draws, random_params

from nanovllm import SamplingParams
from nanovllm.backends.cuda.resampler import CUDAResampler
from nanovllm.backends.cuda.triton import resampler as kernels
from nanovllm.backends.cuda.triton.sampler import sample, scale_of
from nanovllm.engine.model_runner import StepOutput
from nanovllm.features.sampling.resampler import Resampler
from nanovllm.layers.sampler import sample as plain_sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which has no bfloat16.
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make_logits(kind, rows, vocab, dtype, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, vocab, device=DEVICE, generator=generator)
    if kind == "flat":
        x = 0.64 * x
    elif kind == "sharp":
        x = 3 * x + 8 * (torch.rand(x.shape, device=DEVICE, generator=generator) < 20 / vocab)
    elif kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "holes":
        is_hole = torch.rand(x.shape, device=DEVICE, generator=generator) < 0.7
        x = (2 * x).masked_fill(is_hole, -torch.inf)
    elif kind == "equal":
        x = torch.zeros_like(x)
    return x.to(dtype)


def kernel_draws(logits, params, *context, seeds=None, cls=CUDAResampler):
    seeds = torch.arange(len(logits), device=DEVICE) if seeds is None else seeds
    return Draws(logits, params, seeds, *context, make_resampler=cls, sampler=sample)


@pytest.mark.parametrize(
    "vocab, rows, kind, dtype",
    [
        (1100, 24, "sharp", torch.float32),
        (9, 20, "flat", torch.float32),
        (130, 24, "ties", LOW),
        (3000, 20, "holes", LOW),
    ],
)
def test_kernels_sample_what_the_plain_sampler_does(vocab, rows, kind, dtype):
    r = random.Random(vocab)
    logits = make_logits(kind, rows, vocab, dtype)
    context = r.choices(range(vocab), k=40), r.choices(range(min(60, vocab)), k=8), (3, 7)
    params = [random_params(r) for _ in range(rows)]
    plain = Draws(logits, params, torch.arange(rows, device=DEVICE), *context, sampler=sample)
    kernel = kernel_draws(logits, params, *context)
    tokens, logprobs = kernel.run()
    expected_tokens, expected_logprobs = plain.run()
    assert tokens.tolist() == expected_tokens.tolist()
    penalized = [kernel.slots[i] for i, one in enumerate(params) if one.penalizes]
    counts = [one.resampler.token_tables.counts[penalized] for one in (kernel, plain)]
    assert torch.equal(*counts) and counts[0].max() > 1
    assert logprobs.keys() == expected_logprobs.keys() and logprobs
    for row, expected in expected_logprobs.items():
        # Of equally likely tokens the plain one may report another.
        values, expected_values = (sorted(set(one.values())) for one in (logprobs[row], expected))
        assert values == pytest.approx(expected_values, abs=1e-4)
        assert list(logprobs[row])[0] == tokens[row]


def test_rows_get_the_same_tokens_alone_as_among_others():
    vocab, rows, r = 1000, 12, random.Random(5)
    logits = make_logits("sharp", rows, vocab, torch.float32)
    params = [
        SamplingParams(temperature=0.7) if i % 4 == 0 else random_params(r) for i in range(rows)
    ]
    context = [1, 2, 3], [4, 5, 5], (7,)
    tokens, logprobs = kernel_draws(logits, params, *context).run()
    for row in range(rows):
        alone = kernel_draws(
            logits[row : row + 1],
            params[row : row + 1],
            *context,
            seeds=torch.tensor([row]).to(DEVICE),
        )
        token, of_token = alone.run()
        assert token[0] == tokens[row] and of_token.get(0) == logprobs.get(row), params[row]
    plain_tokens, _ = sample(
        logits,
        temperatures=torch.full((rows,), 0.7, device=DEVICE),
        seeds=torch.arange(rows, device=DEVICE),
        positions=torch.full((rows,), 6, device=DEVICE),
    )
    assert tokens[::4].tolist() == plain_tokens[::4].tolist()


def test_penalties_count_each_token_that_is_sampled():
    logits = make_logits("flat", 3, 500, torch.float32)
    params = [
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=1.5, logprobs=1),
        SamplingParams(temperature=0, repetition_penalty=50.0),
    ]
    plain = Draws(logits, params, torch.arange(3, device=DEVICE), [1], [2], sampler=sample)
    kernel = kernel_draws(logits, params, [1], [2])
    steps = [[draws.run()[0].tolist() for _ in range(6)] for draws in (plain, kernel)]
    assert steps[0] == steps[1] and len(set(map(tuple, steps[0]))) > 4


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=5),
        dict(top_p=0.9),
        dict(top_p=0.3, min_p=0.1),
        dict(presence_penalty=1.0, logprobs=2),
        dict(min_tokens=20),
        dict(temperature=0, repetition_penalty=2.0),
    ],
    ids=str,
)
def test_logits_that_are_no_numbers_sample_no_token(options):
    logits = make_logits("sharp", 6, 1000, torch.float32)
    # A penalised token, one that is barred, and all of them.
    logits[0, 5], logits[1, 7], logits[2], logits[3, 3] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    draws = kernel_draws(logits, SamplingParams(**options), [1, 5], [2, 7], (3, 7))
    tokens, logprobs = draws.run()
    assert tokens[:4].tolist() == [-1] * 4 and (tokens[4:] >= 0).all()


@pytest.mark.parametrize(
    "options", [dict(top_p=0.9), dict(top_k=3, presence_penalty=1.0), dict(min_p=0.5)], ids=str
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cls", [CUDAResampler, Resampler])
def test_logits_too_low_for_the_temperature_sample_no_token(options, temperature, cls):
    """A logits processor may bar all tokens by the least number of float32."""
    logits = make_logits("sharp", 2, 100, torch.float32)
    logits[0] = torch.finfo(torch.float32).min
    params = SamplingParams(temperature=temperature, **options)
    draws = Draws(
        logits,
        params,
        torch.arange(2, device=DEVICE),
        [1, 5],
        [2, 7],
        make_resampler=cls,
        sampler=sample if cls is CUDAResampler else plain_sample,
    )
    tokens, _ = draws.run()
    assert tokens[0] == -1 and tokens[1] in range(100)


# The kept tokens themselves.


@triton.jit
def _kept_kernel(
    logits,
    settings,
    limits,
    maxima,
    weights,
    found,
    between,
    out,
    vocab,
    chunks,
    WIDEST: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row * vocab
    settings, limits = settings + row * kernels.COLUMNS, limits + row * kernels.COLUMNS
    found, between = found + row * chunks, between + row * kernels.MOST_BETWEEN
    _, scale = scale_of(tl.load(settings + kernels.TEMPERATURE))
    chunk = tl.arange(0, WIDEST)
    at, inside = row * chunks + chunk, chunk < chunks
    maximum = tl.load(maxima + at, mask=inside, other=float("-inf"))
    weight = tl.load(weights + at, mask=inside, other=0.0)
    peak = tl.max(maximum, axis=0)
    weight *= tl.exp2((maximum - peak) * scale)
    edited = logits, found, found, found, settings, row * 0, vocab
    opened = found, chunks, peak, scale
    least, num_open = kernels.least_kept(edited, opened, chunk, maximum, weight, between, limits)
    tl.store(out + 2 * row, least)
    tl.store(out + 2 * row + 1, num_open)


def least_kept(logits, params):
    """By the kernels: the least logits that the filters keep, and how many chunks hold such."""
    draws = kernel_draws(logits, params)
    draws.run()
    space = draws.resampler._workspace
    table = draws.resampler.slot_params.table[draws.slots_d]
    out = torch.zeros(len(logits), 2, dtype=torch.int32, device=DEVICE)
    _kept_kernel[(len(logits),)](
        logits,
        table[:, :-3].view(torch.float32),
        table[:, -3:],
        space.maxima,
        space.weights,
        space.found,
        space.between,
        out,
        logits.shape[1],
        space.chunks,
        triton.next_power_of_2(space.chunks),
        num_warps=8,
        enable_fp_fusion=False,
    )
    keys = out[:, 0]
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32), out[:, 1]


def exact_least(x, params):
    """In float64: the least logit that is kept, and how near top_p comes to another."""
    best = x.double().sort(descending=True).values
    if params.top_k > 0:
        best = best[best >= best[min(params.top_k, len(best)) - 1]]
    if params.min_p > 0:
        best = best[best >= best[0] + params.temperature * math.log(params.min_p)]
    near = 1.0
    if params.top_p < 1:
        probs = ((best - best[0]) / params.temperature).softmax(0)
        before = probs.cumsum(0) - probs
        near = (before - params.top_p).abs().min().item()
        best = best[: int((before < params.top_p).sum())]
    return best[-1], near


FILTERS = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in [
        (1.0, 1, 1.0, 0.0),
        (0.6, 20, 0.95, 0.0),
        (1.0, 400, 1.0, 0.0),
        (1.7, 1200, 0.9, 0.01),
        (1.0, 1_000_000, 1.0, 0.05),
        (0.3, 0, 1.0, 1.0),
        (1.0, 0, 0.9, 0.01),
        (1.0, 0, 1e-6, 0.0),
        (0.6, 0, 0.5, 0.0),
        (0.6, 0, 0.95, 0.0),
        (1.0, 0, 0.999, 0.0),
        (50.0, 0, 0.8, 0.0),
    ]
]


TOP_P_ALONE = FILTERS[7:]  # which leaves many chunks open


@pytest.mark.parametrize(
    "kind, vocab, dtype, filters",
    [
        ("flat", 17_003, torch.float32, FILTERS),
        ("equal", 17_000, LOW, TOP_P_ALONE),
        ("ties", 17_000, LOW, TOP_P_ALONE),
        ("holes", 3000, torch.float32, FILTERS),
        ("sharp", 5000, LOW, FILTERS),
        ("ties", 700, LOW, FILTERS),
        ("sharp", 17, torch.float32, FILTERS),
    ],
)
def test_the_kept_tokens_are_those_that_sorting_finds(kind, vocab, dtype, filters):
    params = [SamplingParams(**options) for options in filters]
    logits = make_logits(kind, len(params), vocab, dtype, seed=vocab)
    found, num_open = least_kept(logits, params)
    for row, one in enumerate(params):
        x = logits[row].float()
        exact, near = exact_least(x, one)
        same = torch.equal(x >= found[row], x >= exact)
        assert same or near < 2e-6, (one, found[row], exact, near)
    if kind != "sharp" and vocab >= 17_000:
        assert num_open[-2] > 128


def test_top_p_is_a_part_of_all_tokens_as_likely_as_the_kth():
    probs = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]], device=DEVICE)
    for p, expected in ((0.85, 0.1), (0.71, 0.1), (0.69, 0.3)):  # of three tokens, 0.875 are two
        found, _ = least_kept(probs.log(), [SamplingParams(top_k=3, top_p=p)])
        assert found[0].exp().item() == pytest.approx(expected)


def test_what_many_chunks_hold_is_found_by_a_sample(monkeypatch):
    """That is, by one pass and not by bisecting over all of them."""
    params = [SamplingParams(top_p=p, temperature=0.8) for p in (0.5, 0.9, 0.95)]
    logits = make_logits("flat", len(params), 17_003, torch.float32)
    expected, num_open = least_kept(logits, params)
    assert (num_open > 128).all()
    monkeypatch.setattr(kernels, "_search", None)
    found, _ = least_kept(logits, params)
    assert torch.equal(found, expected)


def test_a_row_writes_no_more_records_than_it_has_room_for(monkeypatch):
    """A batch slot keeps the number of likeliest tokens that an earlier sequence asked for."""
    logits = make_logits("sharp", 3, 300, torch.float32)
    earlier = [SamplingParams(logprobs=5), SamplingParams(logprobs=1), SamplingParams(logprobs=5)]
    draws = kernel_draws(logits, earlier)
    runner = draws.resampler
    made = []

    def empty(*shape, **options):
        made.append(torch.full((math.prod(shape) + 40,), -7, **options))
        return made[-1][: math.prod(shape)].view(shape)

    tokens = torch.tensor([1, 2, 3], device=DEVICE)
    step = StepOutput(tokens, logits, positions=tokens.int(), slots=draws.slots_d)
    monkeypatch.setattr(kernels.torch, "empty", empty)
    records = kernels.logprobs(
        logits,
        torch.arange(3, device=DEVICE),
        step,
        slot_params=runner.slot_params,
        most=1,
        workspace=runner._workspace,
    )
    assert records[:, 0, 0].tolist() == [1, 2, 3]
    assert (made[0][records.numel() :] == -7).all()


def test_warmup_launches_every_kernel_that_a_step_may_launch(monkeypatch):
    launch, launched = kernels.launch, set()

    def note(kernel, grid, *args, **options):
        launched.add((kernel, *(arg.dtype for arg in args if isinstance(arg, torch.Tensor))))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(kernels, "launch", note)
    logits = make_logits("flat", 3, 300, LOW)
    edited = SamplingParams(logit_bias={3: 1.0}, top_k=5)
    draws = kernel_draws(logits, [edited, SamplingParams(logprobs=2), SamplingParams(min_p=0.1)])
    tokens, positions = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    output = StepOutput(tokens.to(DEVICE), logits, positions.to(DEVICE), draws.slots_d)
    draws.resampler.warmup(output)
    warmed_up = launched.copy()
    launched.clear()
    draws.run()
    assert launched and launched <= warmed_up
    assert any(torch.float32 == logits for _, logits, *_ in launched)
