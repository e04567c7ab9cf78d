"""What may come next: allowed tokens, biases, bad words, a user's functions, and constraints that
follow the output, against a plain loop over transformers with the rules said by hand.
"""

import dataclasses
import json
import math
import random
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from call_helpers import (
    BYTES,
    END,
    check_empty,
    completed,
    generate,
    make_folder,
    make_llm,
    random_prompts,
)
from sampling_helpers import Draws, process, random_params

from nanovllm import SamplingParams
from nanovllm.engine.batch import LogitsEdits
from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.features.sampling.constraints import BadWords, SequenceConstraint
from nanovllm.features.sampling.logits_edits import RowEdits, SlotEdits, static_mask
from nanovllm.features.sampling.resampler import Resampler
from nanovllm.layers.sampler import sample
from nanovllm.sampling_params import SamplingMetadata

pytestmark = pytest.mark.usefixtures("empty_afterwards")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 263
# Random options of both kinds of rules: some need the host at every step, some do not.
PROMPTS = random_prompts(14, seed=4) + [[7, 8, 9, 10] * 8, [7, 8, 9, 10] * 8]


TWO_RANKS = dict(overlap=True, tensor_parallel_size=2, device="cpu")


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder, overlap=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_ranks(folder):
    """An LLM that tests share, since its processes take seconds to start."""
    with make_llm(folder, **TWO_RANKS) as llm:
        yield llm


def rather_other_tokens(output, logits):
    """A user's function: what was put out last is less likely, and so is what is one above."""
    for token in output[-3:]:
        logits[token] -= 3.0
        logits[(token + 1) % len(logits)] -= 1.0
    return logits


def twice(output, logits):
    return logits * 2.0


def edited(logits, params, output):
    """The rules in the order that is documented, one token after the other."""
    logits = list(logits)
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -math.inf
    for *begin, last in params.bad_words:
        if output[len(output) - len(begin) :] == begin:
            logits[last] = -math.inf
    for token, bias in dict(params.logit_bias).items():
        logits[token] += bias
    for function in params.logits_processors:
        logits = function(list(output), torch.tensor(logits)).tolist()
    return logits


def expected_ids(plain, prompt, params, completion=0):
    output = []
    seed = torch.tensor([(params.seed or 0) + completion])
    stop_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else {END})
    while len(output) < params.max_tokens and not (output and output[-1] in stop_ids):
        logits = edited(plain.logits(prompt + output).tolist(), params, output)
        scores = torch.tensor([process(logits, params, prompt, output, stop_ids)])
        position = torch.tensor([len(prompt) + len(output)])
        token, _ = sample(scores, temperatures=torch.ones(1), seeds=seed, positions=position)
        output.append(int(token))
    return output


def random_rules(r):
    """Of what constrains; most of it bites, for the model likes few tokens."""
    some = r.sample(range(256), 40)
    rules = {}
    if r.random() < 0.5:
        rules["logit_bias"] = {r.randrange(VOCAB): r.uniform(-8, 8) for _ in range(20)}
    if r.random() < 0.5:
        rules["allowed_token_ids"] = some + ([END] if r.random() < 0.5 else [])
    if r.random() < 0.6:
        some = some[:12]  # so that sequences of them come up
        rules["allowed_token_ids"] = some
        rules["bad_words"] = [r.choices(some, k=r.choice([1, 2, 2, 2, 3])) for _ in range(25)]
        rules["bad_words"] = [word for word in rules["bad_words"] if word != [some[0]]]
    if r.random() < 0.3:
        rules["logits_processors"] = r.choice([[rather_other_tokens], [twice, rather_other_tokens]])
    return rules or random_rules(r)


def mixed_params():
    r = random.Random(11)
    params = []
    for i in range(len(PROMPTS)):
        more = {} if i % 4 == 0 else random_rules(r)
        fixed = dict(seed=50 * i, max_tokens=r.randint(8, 20), n=r.choice([1, 1, 1, 3]))
        if i % 3:  # nothing else is asked for
            fixed |= dict(temperature=r.choice([0.0, 1.2]))
            params.append(SamplingParams(**fixed, **more))
        else:
            params.append(random_params(r, **fixed, **more, min_tokens=r.choice([0, 5])))
    return params


@pytest.fixture(scope="module")
def expected(plain):
    found = [
        [expected_ids(plain, prompt, one, i) for i in range(one.n)]
        for prompt, one in zip(PROMPTS, mixed_params())
    ]
    unconstrained = [
        [expected_ids(plain, prompt, dataclasses.replace(one, **NOTHING), i) for i in range(one.n)]
        for prompt, one in zip(PROMPTS, mixed_params())
    ]
    # Else this would test little.
    differing = [a != b for a, b in zip(found, unconstrained)]
    assert sum(differing) >= 11 and not any(differing[::4])
    return found


NOTHING = dict(logit_bias=None, allowed_token_ids=None, bad_words=None, logits_processors=None)


@pytest.mark.parametrize(
    "options",
    [
        dict(overlap=False),
        dict(overlap=True),
        dict(overlap=True, max_num_batched_tokens=16),  # prompts in chunks, forks after the last
        dict(overlap=True, num_kvcache_blocks=7, max_num_batched_tokens=24),
        dict(overlap=False, num_kvcache_blocks=6, enable_prefix_caching=False, max_num_seqs=3),
        TWO_RANKS,
        dict(tensor_parallel_size=2, num_kvcache_blocks=7, device="cpu"),
    ],
    ids=lambda options: "-".join(options),
)
def test_every_row_gets_the_tokens_of_the_plain_loop(folder, expected, options, request):
    """Constrained or not, greedy or not, alone or one of several completions of a prompt."""
    if options is TWO_RANKS:
        llm = nullcontext(request.getfixturevalue("two_ranks"))
    else:
        llm = make_llm(folder, **options)
    with llm as llm:
        outputs = generate(llm, PROMPTS, mixed_params())
        if options.get("num_kvcache_blocks"):
            assert llm.engine.scheduler.num_preemptions > 0
        check_empty(llm)
    ids = [[one["token_ids"] for one in out.get("completions", [out])] for out in outputs]
    assert ids == expected


def test_streams_of_constrained_rows_are_what_generate_gives(llm):
    params = [dataclasses.replace(one, n=1) for one in mixed_params()]
    ids = [[] for _ in PROMPTS]
    for index, _, new_ids, _ in llm.stream(PROMPTS, params):
        ids[index] += new_ids
    assert ids == [output["token_ids"] for output in generate(llm, PROMPTS, params)]


def test_steps_without_a_constraint_that_follows_the_output_never_wait(llm, monkeypatch):
    engine = llm.engine
    params = SamplingParams(max_tokens=5, bad_words=[[1, 2]], ignore_eos=True)
    generate(llm, [[1]], params)
    monkeypatch.setattr(engine.runner, "sample_constrained", None)  # would raise
    monkeypatch.setattr(engine.constraints, "edits", None)
    static = dict(logit_bias={5: 3.0}, allowed_token_ids=[1, 2, 5, 9], bad_words=[[9]])
    outputs = generate(llm, [[1], [2]], [SamplingParams(), SamplingParams(**static)])
    assert outputs[1]["token_ids"] and {*outputs[1]["token_ids"]} <= {1, 2, 5}
    assert not engine._constrained or all(seq.finish_reason for seq in engine._constrained)


def test_logprobs_stay_the_models_own(llm, plain):
    rules = [
        dict(allowed_token_ids=[3, 4, 5], logit_bias={4: 2.0}),
        dict(bad_words=[[3, 3], [4, 4], [5, 5]], allowed_token_ids=[3, 4, 5]),
        dict(logits_processors=[rather_other_tokens]),
    ]
    params = [SamplingParams(max_tokens=6, logprobs=2, seed=1, **one) for one in rules]
    for output, prompt in zip(generate(llm, PROMPTS[:3], params), PROMPTS):
        tokens = list(prompt)
        for token, got in zip(output["token_ids"], output["logprobs"], strict=True):
            of_model = plain.logits(tokens).log_softmax(-1)
            assert {*got} == {token, *of_model.topk(2).indices.tolist()}
            assert all(abs(value - of_model[i]) < 1e-3 for i, value in got.items())
            tokens.append(token)


# Constraints that follow the output


class Walk:
    """A constraint with a state, as a grammar's: which 8 tokens may come next depends on all the
    tokens before, which it reads one by one.
    """

    def __init__(self) -> None:
        self.read: list[int] = []
        self.num_calls = 0

    @staticmethod
    def allowed(output):
        return random.Random(str(output)).sample(range(256), 8)

    def fill(self, token_ids, mask):
        assert token_ids[: len(self.read)] == self.read, "the output only grows"
        for token in token_ids[len(self.read) :]:
            assert token in self.allowed(self.read)
            self.read.append(token)
        self.num_calls += 1
        assert mask.flags.c_contiguous and mask.dtype == np.int32 and (mask == -1).all()
        mask[:] = static_mask(SamplingParams(allowed_token_ids=self.allowed(self.read)), VOCAB)


def expected_walk(plain, prompt, params, completion):
    output = []
    while len(output) < params.max_tokens and not {*output[-1:]} & {*params.stop_token_ids}:
        logits = plain.logits(prompt + output)
        kept = torch.full_like(logits, -math.inf)
        allowed = Walk.allowed(output)
        kept[allowed] = logits[allowed]
        seed, position = params.seed + completion, len(prompt) + len(output)
        token, _ = sample(
            kept.unsqueeze(0),
            temperatures=torch.tensor([params.temperature]),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([position]),
        )
        output.append(int(token))
    return output


@pytest.mark.parametrize(
    "options",
    [
        dict(overlap=True),
        dict(overlap=False, max_num_batched_tokens=16),
        dict(overlap=True, num_kvcache_blocks=6, max_num_batched_tokens=24),
        TWO_RANKS,
    ],
    ids=lambda options: "-".join(options),
)
def test_a_constraint_with_a_state_sees_each_output_grow(folder, plain, options):
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 20][:6]
    params = [
        SamplingParams(
            max_tokens=11 + i,
            temperature=i % 2,
            seed=9 * i,
            n=1 + i % 3,
            ignore_eos=True,
            logit_bias={7: 0.0},  # changes nothing, but one that asks for nothing is not asked
            stop_token_ids=[*range(0, 256, 9)] if i % 3 else [],
        )
        for i in range(len(prompts))
    ]
    made = []

    def make(one):
        if one.seed % 2 == 0:  # the others go on as ever
            made.append(Walk())
            return SequenceConstraint(None, (made[-1], BadWords([(300, 301)])), ())
        return None

    with make_llm(folder, **options) as llm:
        before = generate(llm, prompts, params)
        llm.engine.constraints.make = make
        after = generate(llm, prompts, params)
        if "tensor_parallel_size" in options:
            assert not llm.engine.runner._results, "those of steps that were completed later too"
        if "num_kvcache_blocks" in options:
            assert llm.engine.scheduler.num_preemptions > 0
    num_tokens = 0
    for i, (prompt, one) in enumerate(zip(prompts, params)):
        if one.seed % 2:
            assert completed([after[i]]) == completed([before[i]])
            continue
        outputs = after[i].get("completions", [after[i]])
        for completion, output in enumerate(outputs):
            assert output["token_ids"] == expected_walk(plain, prompt, one, completion)
            num_tokens += len(output["token_ids"])
    # Each was asked once a token, and never for a token that nobody wants.
    assert sum(walk.num_calls for walk in made) == num_tokens


def test_a_sequence_that_was_paused_goes_on_under_its_constraint(llm):
    params = SamplingParams(max_tokens=12, bad_words=[[1, 1], [2, 2]], allowed_token_ids=[1, 2])
    (output,) = generate(llm, [[5, 6]], params)
    assert output["token_ids"] in ([1, 2] * 6, [2, 1] * 6)
    request = llm.add_request([5, 6], params)
    for _ in range(4):
        llm.step()
    llm.pause(request)
    generate(llm, [[7]], SamplingParams(max_tokens=3))
    llm.resume(request)
    finished = []
    while not finished:
        finished = llm.step()
    assert finished[0]["token_ids"] in ([1, 2] * 6, [2, 1] * 6)


def test_a_request_that_is_aborted_between_two_steps_leaves_the_others_their_constraints(llm):
    params = SamplingParams(max_tokens=12, bad_words=[[1, 1], [2, 2]], allowed_token_ids=[1, 2])
    for steps in range(4):
        dropped, kept = [llm.add_request([i, 6], params) for i in (3, 4)]
        for _ in range(steps):
            llm.step()
        llm.abort(dropped)
        finished = []
        while llm.has_unfinished():
            finished += llm.step()
        assert [output["id"] for output in finished] == [kept]
        assert finished[0]["token_ids"] in ([1, 2] * 6, [2, 1] * 6)


# Users' functions

either_llm = pytest.mark.parametrize("name", ["llm", "two_ranks"])


@either_llm
def test_a_function_gets_the_output_and_the_models_logits_once_a_token(name, plain, request):
    llm = request.getfixturevalue(name)
    seen = []

    def watch(output, logits):
        seen.append((list(output), logits.cpu().clone()))
        logits[(len(output) * 7) % 250] = 1e4
        return logits

    params = SamplingParams(
        max_tokens=5, temperature=0, logits_processors=[watch], logit_bias={9: 4.0}
    )
    others = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    outputs = generate(llm, [[1, 2], [3]], [params, others])
    # What ranks said of steps that were then constrained is not kept.
    assert not getattr(llm.engine.runner, "_results", None)
    forced = [0, 7, 14, 21, 28]
    assert outputs[0]["token_ids"] == forced
    assert outputs[1]["token_ids"] == plain.greedy([3], 9)
    assert [output for output, _ in seen] == [forced[:i] for i in range(5)]
    for output, logits in seen:
        own = plain.logits([1, 2, *output])
        own[9] += 4.0
        assert logits.dtype == torch.float32 and torch.allclose(logits, own, atol=1e-4)


@either_llm
def test_a_function_that_fails_fails_the_call_and_leaves_the_llm_usable(name, plain, request):
    llm = request.getfixturevalue(name)

    def fail(output, logits):
        raise KeyError("mine")

    for function, error, words in [
        (fail, KeyError, "mine"),
        (lambda output, logits: None, TypeError, r"logits_processors\[0\] returned None: retu"),
        (lambda output, logits: logits[:7], TypeError, r"returned \(7,\): return a tensor"),
        (lambda output, logits: logits > 0, TypeError, "returned torch.bool: return a tens"),
    ]:
        params = SamplingParams(max_tokens=5, logits_processors=[function])
        with pytest.raises(error, match=words):
            generate(llm, [[1, 2], [3]], [params, SamplingParams()])
        check_empty(llm)
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        assert generate(llm, [[3]], greedy)[0]["token_ids"] == plain.greedy([3], 6)


# Where nothing is left to be sampled


@pytest.mark.parametrize(
    "rules",
    [
        dict(allowed_token_ids=[1, 2], bad_words=[[1, 1], [1, 2], [2, 1], [2, 2]]),
        dict(logits_processors=[lambda output, logits: logits - math.inf]),
        dict(logits_processors=[lambda output, logits: logits * math.nan], top_k=3),
    ],
    ids=lambda rules: "-".join(rules),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_with_no_token_left_ends_alone_and_says_so(llm, rules, temperature):
    params = SamplingParams(max_tokens=9, temperature=temperature, **rules)
    other = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (expected,) = generate(llm, [[7]], other)
    bad, good = generate(llm, [[5, 6], [7]], [params, other])
    assert good == expected
    barred = rules.get("bad_words") is not None
    assert bad["finish_reason"] == "error" and len(bad["token_ids"]) == barred
    assert re.search("no token can come next after . tokens.*constraints.*loosen", bad["error"])
    with pytest.raises(InvalidLogitsError, match=r"request \d+ \(prompt \[5, 6\]\): no token can"):
        generate(llm, [[5, 6]], params)
    assert generate(llm, [[7]], other) == [expected]


@pytest.mark.parametrize("options", [dict(), dict(top_p=0.9), dict(top_k=3, min_p=0.1)], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_processor_may_bar_every_token_by_the_lowest_number(llm, options, temperature):
    def bar_all(output, logits):
        return torch.full_like(logits, torch.finfo(logits.dtype).min)

    params = SamplingParams(temperature=temperature, logits_processors=[bar_all], **options)
    with pytest.raises(InvalidLogitsError, match="no token can come next"):
        generate(llm, [[5, 6]], params)


@pytest.mark.parametrize("options", [dict(), dict(top_p=0.9), dict(top_k=3, min_p=0.1)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 0.5, 1.0])
def test_a_processor_may_force_a_token_by_the_greatest_number(llm, options, temperature):
    def force(output, logits):
        logits[7] = torch.finfo(logits.dtype).max
        return logits

    params = SamplingParams(temperature, max_tokens=3, logits_processors=[force], **options)
    (output,) = generate(llm, [[5, 6]], params)
    assert output["token_ids"] == [7] * 3


def test_the_greatest_number_of_a_processor_stays_finite_in_the_units_of_the_kernels():
    numbers = torch.tensor([torch.finfo(torch.float32).max, 3.0, -math.inf, math.inf, math.nan])
    processors = {0: lambda logits: numbers}
    edits = LogitsEdits([], np.empty((0, 1), dtype=np.int32), processors)
    slots = SlotEdits(num_slots=1, vocab_size=len(numbers), upload=torch.from_numpy)
    rows = RowEdits([0], masked=False, bias=None)
    (given,) = slots.apply(rows, torch.zeros(1, len(numbers)), torch.tensor([0]), edits)
    assert (given / 1e-8 * math.log2(math.e)).isfinite().tolist() == [True, True] + [False] * 3
    torch.testing.assert_close(given[1:], numbers[1:], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        dict(allowed_token_ids=[1, 2], bad_words=[[1], [2]]),
        dict(bad_words=[[i] for i in range(VOCAB)]),
        dict(allowed_token_ids=[END], min_tokens=1),
        dict(allowed_token_ids=[4, 5], stop_token_ids=[4], bad_words=[[5]], min_tokens=2),
    ],
    ids=str,
)
def test_what_bars_every_token_is_refused_before_anything_runs(llm, options):
    with pytest.raises(ValueError, match=r"sampling_params\[1\] bars every token .*: allow one"):
        generate(llm, [[1], [2]], [SamplingParams(), SamplingParams(**options)])
    assert not llm.engine.has_unfinished()


def test_end_of_sequence_is_sampled_only_if_it_is_allowed(llm):
    for allowed, reason in (([1, 2], "length"), ([1, END], "stop")):
        params = SamplingParams(max_tokens=60, allowed_token_ids=allowed, temperature=5.0, seed=1)
        (output,) = generate(llm, [[1, 2, 3]], params)
        assert output["finish_reason"] == reason and output["stop_reason"] is None


# Bad words


def test_bad_words_are_barred_by_their_tokens_with_and_without_a_space(llm):
    tokenizer = llm.tokenizer

    def ids(text):
        return tuple(tokenizer.encode(text))

    ((_, params, _),) = llm._inputs.from_prompts([1], SamplingParams(bad_words=["the", " in", "q"]))
    assert params.bad_words == (
        *(ids("the"), ids(" the")),
        *(ids("in"), ids(" in")),
        *(ids("q"), ids(" q")),
    )
    assert [*map(len, params.bad_words)] == [1, 1, 1, 2, 1, 2]
    # Where the words are likely, they are avoided.
    likely = {token: 30.0 for text in ("the", " the", " ", "q") for token in ids(text)}
    params = SamplingParams(max_tokens=30, seed=1, logit_bias=likely, ignore_eos=True)
    (before,) = generate(llm, [[1]], params)
    assert " q" in before["text"] and "the" in before["text"]
    params = dataclasses.replace(params, bad_words=["the", "q"])
    (after,) = generate(llm, [[1]], params)
    assert not {*after["token_ids"]} & {*ids("the"), *ids(" the"), *ids("q")}


def test_a_bad_word_is_barred_only_after_its_own_beginning():
    mask = np.full(9, -1, dtype=np.int32)

    def barred(output):
        mask[:] = -1
        BadWords([(5, 31), (5, 6, 262), (6, 0)]).fill(output, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
        return {*np.flatnonzero(bits == 0).tolist()}

    assert barred([]) == barred([7]) == barred([5, 7]) == set()
    assert barred([5]) == barred([9, 5]) == {31}
    assert barred([5, 6]) == {262, 0} and barred([6]) == {0}


# Kernels that sample rows, beside rows that are edited


class Constrained:
    """Rows of given logits, of which some wait: a step's sampling in two parts."""

    def __init__(self, logits, params, constrained, edits, **options):
        seeds = torch.arange(len(logits), device=DEVICE)
        self.draws = Draws(logits, params, seeds, [1, 2], [3], **options)
        self.edits = edits
        slots = self.draws.slots
        self.draws.resampler.start(
            [
                (slots[i], SamplingMetadata(params[i], frozenset(), 2, [1, 2, 3], i in constrained))
                for i in range(len(params))
                if i in constrained or not params[i].is_plain
            ]
        )

    def run(self):
        self.draws.run()
        resampler = self.draws.resampler
        output, logprobs = resampler.sample_constrained(self.edits)
        logprobs = [dataclasses.replace(part, records=part.records.cpu()) for part in logprobs]
        return output.tokens, {row: one for part in logprobs for row, one in part.read().items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_and_the_plain_sampler_agree_on_edited_and_constrained_rows():
    pytest.importorskip("triton")
    from nanovllm.backends.cuda.resampler import CUDAResampler
    from nanovllm.backends.cuda.triton.sampler import sample as kernel

    r, rows, vocab = random.Random(2), 24, 300
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE)
    params, constrained = [], {*range(0, rows, 3)}
    for i in range(rows):
        rules = {}
        if i % 2:
            rules = dict(
                allowed_token_ids=r.sample(range(vocab), 100),
                logit_bias={r.randrange(vocab): 5.0 for _ in range(5)},
            )
        make = random_params if i % 4 < 2 else lambda r, **rules: SamplingParams(**rules)
        params.append(make(r, **rules))
    masks = np.stack(
        [
            static_mask(SamplingParams(allowed_token_ids=r.sample(range(vocab), 60)), vocab)
            for _ in range(len(constrained) - 1)
        ]
    )
    places = sorted(constrained)[1:]  # the first has ended: nothing is said of it
    r.shuffle(places)
    edits = LogitsEdits(places, masks, {places[2]: lambda logits: logits / 9})
    of_plain, of_kernels = [
        Constrained(logits, params, constrained, edits, make_resampler=cls, sampler=kernel).run()
        for cls in (Resampler, CUDAResampler)
    ]
    assert of_plain[0].tolist() == of_kernels[0].tolist()
    assert of_plain[1].keys() == of_kernels[1].keys() and of_plain[1]
    for i, place in enumerate(places):
        token = of_plain[0][place].item()
        assert masks[i, token // 32] >> token % 32 & 1
    for i, one in enumerate(params):
        assert (
            i in constrained - {*places}
            or one.allowed_token_ids is None
            or (of_plain[0][i].item() in one.allowed_token_ids)
        )


def test_a_slot_forgets_what_its_last_sequence_was_allowed(folder):
    with make_llm(folder, max_num_seqs=2) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        before = generate(llm, [[1], [2]], greedy)
        generate(llm, [[1], [2]], dataclasses.replace(greedy, allowed_token_ids=[1, 2, 3]))
        assert generate(llm, [[1], [2]], greedy) == before
        # One row has a mask and the other a bias: they are edited together.
        params = [
            dataclasses.replace(greedy, **rule)
            for rule in (dict(logit_bias={5: 0.0}), dict(allowed_token_ids=[1, 2, 3]))
        ]
        assert generate(llm, [[1], [2]], params)[0] == before[0]


# Text


@pytest.fixture(scope="module")
def letters(llm):
    """Tokens of one letter each, so that a longer stop string is split over tokens."""
    return [token for (token,) in map(llm.tokenizer.encode, "abcdefg")]


def stream_of(llm, prompt, params):
    """The pieces of a stream, and the token ids and finish_reason that it ends with."""
    of_index, pieces, ids, reasons = zip(*llm.stream([prompt], params))
    assert not any(of_index) and not any(reasons[:-1])
    return pieces, [token for new in ids for token in new], reasons[-1]


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_string_is_told_and_kept_where_that_is_asked_for(llm, letters, include):
    params = SamplingParams(max_tokens=40, seed=5, allowed_token_ids=letters)
    (whole,) = generate(llm, [[1]], params)
    for begin, length in ((0, 3), (7, 4), (20, 6)):
        stop = whole["text"][begin : begin + length]
        at = whole["text"].index(stop)
        stopping = dataclasses.replace(
            params, stop=["zz", stop], include_stop_str_in_output=include
        )
        (output,) = generate(llm, [[1]], stopping)
        assert output["text"] == whole["text"][: at + (length if include else 0)]
        assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
        assert output["token_ids"] == whole["token_ids"][: at + length]
        pieces, ids, reason = stream_of(llm, [1], stopping)
        assert "".join(pieces) == output["text"] and ids == output["token_ids"]
        assert reason == "stop"
        if include:  # nothing need be held back
            assert all(len(piece) == 1 for piece in pieces)


def test_the_first_of_several_stop_strings_is_told(llm, letters):
    params = SamplingParams(max_tokens=40, seed=5, allowed_token_ids=letters)
    text = generate(llm, [[1]], params)[0]["text"]
    stops = [text[9:12], text[6:10], text[:2], "zz"]
    (output,) = generate(llm, [[1]], dataclasses.replace(params, stop=stops))
    assert (output["text"], output["stop_reason"]) == ("", stops[2])


def test_a_stop_token_is_told_and_end_of_sequence_is_not(llm, letters):
    params = SamplingParams(
        max_tokens=40, seed=5, allowed_token_ids=letters, stop_token_ids=letters[3:5]
    )
    (output,) = generate(llm, [[1]], params)
    assert output["stop_reason"] == output["token_ids"][-1] in letters[3:5]
    (output,) = generate(llm, [[1]], SamplingParams(allowed_token_ids=[END]))
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", None)
    (output,) = generate(llm, [[1]], SamplingParams(max_tokens=2, allowed_token_ids=[1]))
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
    (output,) = generate(llm, [[1]], SamplingParams(n=2, allowed_token_ids=[END]))
    assert [one["stop_reason"] for one in output["completions"]] == [None, None]


@pytest.mark.parametrize("stop", ["zz", ()], ids=["read-as-it-grows", "decoded-at-the-end"])
@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ended_an_output_is_in_its_text_only_if_that_is_asked_for(
    llm, letters, include, stop
):
    def check(params):
        params = dataclasses.replace(params, include_stop_str_in_output=include, stop=stop)
        (output,) = generate(llm, [[1]], params)
        ids = output["token_ids"]
        assert output["finish_reason"] == "stop" and len(ids) > 1
        text_ids = ids if include else ids[:-1]
        skip = params.skip_special_tokens
        text = llm.tokenizer.decode(text_ids, skip_special_tokens=skip)
        assert output["text"] == text
        pieces, streamed, reason = stream_of(llm, [1], params)
        assert ("".join(pieces), streamed, reason) == (text, ids, "stop")

    params = SamplingParams(max_tokens=90, seed=5, min_tokens=1, skip_special_tokens=False)
    allowed = dataclasses.replace(params, allowed_token_ids=letters)
    check(dataclasses.replace(allowed, stop_token_ids=letters[3:5]))
    check(dataclasses.replace(allowed, stop_token_ids=letters[3:5], skip_special_tokens=True))
    check(dataclasses.replace(params, allowed_token_ids=[*letters[:4], END]))
    # The last byte of a character ends the output: the bytes before it are none.
    first, last = [BYTES.index(chr(byte)) for byte in (0xC3, 0xA9)]
    bytewise = dict(allowed_token_ids=[first, last], stop_token_ids=[last])
    check(dataclasses.replace(params, **bytewise))


def test_a_token_that_fills_max_tokens_and_ends_nothing_is_in_the_text(llm, letters):
    params = SamplingParams(max_tokens=2, allowed_token_ids=letters, stop_token_ids=[END])
    (output,) = generate(llm, [[1]], params)
    assert output["text"] == llm.tokenizer.decode(output["token_ids"]) and len(output["text"]) == 2


def test_special_tokens_are_written_where_that_is_asked_for(llm, letters):
    allowed = [*letters[:2], 256, 257, 258]
    params = SamplingParams(max_tokens=30, seed=6, allowed_token_ids=allowed, ignore_eos=True)
    written = dataclasses.replace(params, skip_special_tokens=False)
    outputs = generate(llm, [[1], [1], [1]], [params, written, params])
    for output, skip in zip(outputs, (True, False, True)):
        ids = output["token_ids"]
        assert output["text"] == llm.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "<|user|>" in outputs[1]["text"] and "<" not in outputs[0]["text"]
    for one, output in zip((params, written), outputs):
        assert "".join(stream_of(llm, [1], one)[0]) == output["text"]
    # A special token may be a stop string, if it is text.
    (stopped,) = generate(llm, [[1]], dataclasses.replace(written, stop="<|user|>"))
    assert stopped["text"] == outputs[1]["text"].split("<|user|>")[0]
    assert stopped["stop_reason"] == "<|user|>"


# Wrong values


@pytest.mark.parametrize(
    "error, options, words",
    [
        (TypeError, dict(logit_bias=[1, 2]), r"logit_bias is \[1, 2\]: use a dict of token ids"),
        (TypeError, dict(logit_bias=7), "logit_bias is 7: use a dict"),
        (TypeError, dict(logit_bias={"a": 1}), "logit_bias holds 'a': token ids are integers"),
        (TypeError, dict(logit_bias={1.5: 1}), "logit_bias holds 1.5: token ids are integers"),
        (TypeError, dict(logit_bias={3: "x"}), r"logit_bias\[3\] is 'x': use a number"),
        (ValueError, dict(logit_bias={3: math.nan}), r"logit_bias\[3\] is nan: use a number from"),
        (ValueError, dict(logit_bias={3: -101}), r"logit_bias\[3\] is -101: use .*-100 to 100"),
        (TypeError, dict(allowed_token_ids=3), "allowed_token_ids is 3: use a list"),
        (
            TypeError,
            dict(allowed_token_ids=["3"]),
            "allowed_token_ids holds '3': token ids are integers",
        ),
        (ValueError, dict(allowed_token_ids=[]), "allowed_token_ids is empty.*: name a token"),
        (TypeError, dict(bad_words="the"), "bad_words is 'the': use a list of strings"),
        (TypeError, dict(bad_words=[3]), "bad_words is 3: use a list"),
        (TypeError, dict(bad_words=np.array(["a", "b"])), r"bad_words is array.*: use a list"),
        (
            TypeError,
            dict(allowed_token_ids=np.arange(3.0)),
            "allowed_token_ids is array.*: use a l",
        ),
        (ValueError, dict(bad_words=[""]), "bad_words holds an empty entry.*: leave it out"),
        (ValueError, dict(bad_words=["a", []]), "bad_words holds an empty entry"),
        (TypeError, dict(logits_processors=len), "logits_processors is .*: use a list of func"),
        (TypeError, dict(logits_processors=[3]), r"logits_processors is \[3\]: use a list of func"),
        (
            TypeError,
            dict(logits_processors=[lambda prompt, ids, logits: logits]),
            "takes other arg",
        ),
        (
            TypeError,
            dict(logits_processors=[max, lambda logits: logits]),
            "is called with the token",
        ),
        (TypeError, dict(skip_special_tokens=None), "skip_special_tokens is None: use True or Fal"),
        (TypeError, dict(include_stop_str_in_output=1), "include_stop_str_in_output is 1: use"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_remedy(error, options, words):
    with pytest.raises(error, match=words):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(logit_bias={VOCAB: 1}), rf"\.logit_bias holds token id {VOCAB}: the model's voc"),
        (dict(logit_bias={-1: 1}), r"\.logit_bias holds token id -1: the model's vocabulary is 0"),
        (dict(allowed_token_ids=[1, 999]), r"\.allowed_token_ids holds token id 999: the model"),
        (dict(bad_words=["the", [1, 999]]), r"\.bad_words holds token id 999: the model"),
        (dict(bad_words=["\ud800"]), r"\.bad_words\[0\] is .* half a character: decode it"),
    ],
    ids=str,
)
def test_token_ids_outside_the_vocabulary_are_refused_before_anything_runs(llm, options, words):
    with pytest.raises(ValueError, match=r"sampling_params\[1\]" + words):
        generate(llm, [[1], [2]], [SamplingParams(), SamplingParams(**options)])
    assert not llm.engine.has_unfinished()


def test_bad_words_of_text_need_a_tokenizer(tmp_path):
    with make_llm(make_folder(tmp_path, tokenizer=False)) as llm:
        with pytest.raises(ValueError, match="bad_words holds text.*no tokenizer: give lists of"):
            generate(llm, [[1]], SamplingParams(bad_words=["a"]))
        params = SamplingParams(bad_words=[[1], [2, 3]], max_tokens=2)
        assert 1 not in generate(llm, [[1]], params)[0]["token_ids"]


def test_what_constrains_is_frozen_hashable_and_read_from_json():
    words, allowed = ["a", [1, 2]], [np.int64(3), 4]
    params = SamplingParams(bad_words=words, allowed_token_ids=allowed, logit_bias={"5": 1})
    words.append("b")
    allowed.append(9)
    assert params.bad_words == ("a", (1, 2)) and params.allowed_token_ids == (3, 4)
    assert params.logit_bias == ((5, 1.0),) and not params.is_plain
    again = SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params))))
    assert again == params and hash(again) == hash(params)
    nothing = dict(logit_bias={}, bad_words=[], logits_processors=None, skip_special_tokens=False)
    assert SamplingParams(**nothing).is_plain
