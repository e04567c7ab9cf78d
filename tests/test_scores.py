"""Log-probabilities of prompts and of continuations are those of transformers, however the engine
comes by them, and no more is computed than they need.
"""

import math
from array import array
from dataclasses import replace
from itertools import product

import pytest
import torch
from call_helpers import END, Plain
from call_helpers import make_llm as make_text_llm
from effort import EFFORT, spread, tries
from engine_helpers import FAMILIES, MODELS, PROMPTS, VOCAB, assert_empty, assert_greedy, greedy
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import check_empty, output_alone
from test_scheduler import NO_WINDOW, WINDOWS, Server, make_scheduler, serve, streams

from nanovllm import SamplingParams
from nanovllm.engine.errors import AsleepError
from nanovllm.features.sampling import logprobs

LONG = PROMPTS[7]  # 70 tokens
NEAR = 1e-4


def asking(most: int = 0, max_tokens: int = 0, **options) -> SamplingParams:
    options = dict(temperature=0.0, ignore_eos=True) | options
    return SamplingParams(prompt_logprobs=most, max_tokens=max_tokens, **options)


def check_prompt(checkpoint, output, prompt: list[int], most: int, near: float = NEAR) -> None:
    """Of each token after the first its own log-probability, and those of the likeliest."""
    assert output["prompt_token_ids"] == prompt
    first, *others = output["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    for token, expected, values in zip(prompt[1:], checkpoint.logprobs(prompt), others):
        assert next(iter(values)) == token
        assert all(abs(value - expected[i]) < near for i, value in values.items())
        best = sorted(expected.tolist(), reverse=True)[:most]
        assert len(values) in (max(1, most), most + 1)
        assert sorted(values.values(), reverse=True)[:most] == pytest.approx(best, abs=near)


def check_score(checkpoint, score, context, continuation, near: float = NEAR) -> None:
    rows = checkpoint.logprobs(context + continuation)[len(context) - 1 : -1]
    expected = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    assert score["token_ids"] == continuation
    assert score["logprobs"] == pytest.approx(expected, abs=near)
    assert score["cumulative_logprob"] == pytest.approx(sum(expected), abs=near * len(expected))
    assert score["is_greedy"] == [int(row.argmax()) == t for row, t in zip(rows, continuation)]


def generate(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_empty(llm)
    return outputs


def score(llm, *pairs):
    scores = llm.score(*pairs, use_tqdm=False)
    assert_empty(llm)
    return scores


# What families do to logits: a tied head, factors, caps. And what stops their sequences elsewhere:
# windows, sinks, states. tests/test_models.py compares the logits of each family.
SCORED = ["gqa-2", "tied", "granite", "gpt-oss", "mistral-window", "gemma2", "lfm2", "qwen3.5"]


@pytest.mark.parametrize("model", SCORED if EFFORT == 1 else [*MODELS, *FAMILIES])
def test_scores_of_each_family_are_those_of_transformers(get_checkpoint, make_llm, model):
    """In chunks, beside others that decode, preempted, with hits, and of several completions."""
    checkpoint = get_checkpoint(model)
    llm = make_llm(checkpoint.folder, max_num_batched_tokens=20, num_kvcache_blocks=9, overlap=True)
    params = [asking(i % 3, (0, 9, 30)[i % 3], n=1 + i % 2) for i in range(len(PROMPTS))]
    params[4] = greedy(24)
    # Gated DeltaNet norms small outputs, which magnifies the rounding of float32: of a prompt of 64
    # tokens, transformers' scores are 1.3e-4 from those in float64, and these 1.9e-4.
    near = NEAR if llm.engine.snapshots is None else 5e-4
    for _ in range(2):
        outputs = generate(llm, PROMPTS, params)
        for prompt, one, output in zip(PROMPTS, params, outputs):
            if one.prompt_logprobs is not None:
                check_prompt(checkpoint, output, prompt, one.prompt_logprobs, near)
            for completion in output.get("completions", [output]):
                assert completion["token_ids"] == checkpoint.expected(prompt, one.max_tokens)
    assert llm.engine.scheduler.num_preemptions > 0
    best = checkpoint.expected(LONG, 3)
    continuations = [best, [*best[:2], best[2] ^ 1], [LONG[0]]]
    first, second = score(llm, [LONG, LONG[:9]], [continuations, LONG[9:30]])
    for continuation, one in zip(continuations, first, strict=True):
        check_score(checkpoint, one, LONG, continuation)
    check_score(checkpoint, second, LONG[:9], LONG[9:30])
    assert [one["is_greedy"] for one in first[:2]] == [[True] * 3, [True, True, False]]


@spread({"budget, overlap": list(product([3, 300], [False, True])), "cached": [False, True]})
def test_scores_are_the_same_in_any_chunks(checkpoint, make_llm, budget, overlap, cached):
    options = dict(max_num_batched_tokens=budget, enable_prefix_caching=cached)
    llm = make_llm(overlap=overlap, **options)
    outputs = generate(llm, PROMPTS, asking(1))
    for prompt, output in zip(PROMPTS, outputs):
        check_prompt(checkpoint, output, prompt, 1)
        assert output["token_ids"] == [] and output["finish_reason"] == "length"
    contexts, continuations = [prompt[:5] for prompt in PROMPTS[2:]], [p[5:] for p in PROMPTS[2:]]
    for pair in zip(score(llm, contexts, continuations), contexts, continuations, strict=True):
        check_score(checkpoint, *pair)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_scores_on_a_gpu_are_those_of_transformers(get_checkpoint, make_llm, eager):
    """Beside sequences that decode in graphs; in float32, that kernels compute in other orders."""
    checkpoint = get_checkpoint("gqa-1")
    options = dict(device="cuda", dtype="float32", enforce_eager=eager)
    llm = make_llm(checkpoint.folder, max_num_batched_tokens=40, **options)
    params = [asking(i % 3, (0, 9)[i % 2]) for i in range(len(PROMPTS))]
    for prompt, one, output in zip(PROMPTS, params, generate(llm, PROMPTS, params)):
        check_prompt(checkpoint, output, prompt, one.prompt_logprobs, near=5e-3)
    (scores,) = score(llm, [LONG], [CONTINUATIONS])
    for continuation, one in zip(CONTINUATIONS, scores, strict=True):
        check_score(checkpoint, one, LONG, continuation, near=5e-3)


@given(streams(NO_WINDOW | WINDOWS), st.data())
@tries(150)
def test_each_token_asked_for_is_scored_once_wherever_a_sequence_is_stopped(stream, data):
    """Preempted, paused, aborted, in chunks, with hits and further completions: by a scheduler of a
    device that checks every read.
    """
    sizes, stream, delays = stream
    changed = []
    for asked in stream:
        if data.draw(st.booleans()):
            begin = data.draw(st.sampled_from([1, 1, 2, 7, len(asked.prompt) - 1])) or 1
            none = data.draw(st.booleans())
            asked = replace(asked, score_from=begin, max_tokens=0 if none else asked.max_tokens)
        changed.append(asked)
    server = Server(make_scheduler(**sizes))
    for asked, request in zip(changed, serve(server, changed, delays).values()):
        numbers = array("q", b"".join(request.scores.records if request.scores else [])).tolist()
        places = range(asked.score_from or len(asked.prompt), len(asked.prompt))
        expected = [number for place in places for number in (place, asked.prompt[place])]
        if any(seq.finish_reason == "abort" for seq in request.completions):
            assert numbers == expected[: len(numbers)]
        else:
            assert numbers == expected
            for i, seq in enumerate(request.completions):
                assert seq.token_ids[: len(asked.prompt)] == asked.prompt
                length = len(asked.prompt) + asked.max_tokens
                assert seq.output_ids == output_alone(asked.prompt, length, asked.stop_ids, seed=i)
    check_empty(server.scheduler)


def test_what_was_scored_before_a_preemption_is_not_scored_again():
    server = Server(make_scheduler(num_blocks=6, max_num_batched_tokens=3, caching=False))
    server.add(0, [1] * 8, 9)
    prompt = [2, 3, 4, 5] * 3
    seq = server.add(1, prompt, 1, score_from=1)
    server.run()
    assert seq.num_preemptions == 1
    scored = [chunk.scored for batch in server.batches for chunk in batch.prefills if chunk.scored]
    assert sum([one.token_ids for one in scored], []) == prompt[1:]


@pytest.mark.parametrize("rows", [7, 64])
def test_logits_are_made_for_a_few_tokens_at_a_time(checkpoint, make_llm, monkeypatch, rows):
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", rows)
    llm, seen = make_llm(), []
    compute = llm.engine.runner.model.compute_logits

    def watched(hidden):
        seen.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(llm.engine.runner.model, "compute_logits", watched)
    outputs = generate(llm, PROMPTS, asking(2))
    assert max(seen) <= max(rows, len(PROMPTS)) and sum(seen) >= sum(map(len, PROMPTS)) - 11
    for prompt, output in zip(PROMPTS, outputs):
        check_prompt(checkpoint, output, prompt, 2)


def test_a_piece_of_logits_fits_beside_a_model():
    """With the largest vocabulary there is, in the three forms that they have at once."""
    assert logprobs.ROWS_AT_ONCE * 262_144 * (2 + 4 + 4) < 2**30


def test_who_asks_for_no_scores_pays_nothing(checkpoint, make_llm, monkeypatch):
    llm, carried = make_llm(max_num_batched_tokens=48), []
    runner = llm.engine.runner
    forward = runner._forward

    def watched(token_ids, positions, metadata):
        hidden = forward(token_ids, positions, metadata)
        carried.append(len(hidden))
        return hidden

    monkeypatch.setattr(runner, "_forward", watched)
    monkeypatch.setattr(runner, "score_prompts", None)  # would raise
    assert_greedy(llm, checkpoint)
    assert max(carried) <= len(PROMPTS)


def test_a_prompt_is_computed_as_far_as_its_scores_need_it(make_llm):
    llm, prompt = make_llm(), PROMPTS[6]  # 64 tokens, four blocks

    def computed(run, *call) -> int:
        before = llm.engine.num_prefill_tokens
        run(llm, *call)
        return llm.engine.num_prefill_tokens - before

    assert computed(generate, [prompt], greedy(1)) == 64
    assert computed(generate, [prompt], greedy(1)) == 1
    assert computed(generate, [prompt], asking(max_tokens=1)) == 64
    assert computed(generate, [prompt], asking()) == 63  # no token follows the last one
    assert computed(score, [prompt[:48]], [prompt[48:]]) == 16
    assert computed(score, [prompt], [[7]]) == 1
    (output,) = generate(llm, [prompt], asking())
    assert output["num_cached_tokens"] == 0


CONTINUATIONS = [[5, 6, 7], [8], [5, 9], [10, 11], [12], [13, 14, 15, 16]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [16, 64])
def test_a_context_of_many_continuations_is_computed_once(checkpoint, make_llm, size, overlap):
    """In one call, given once with all of them, or with each."""
    llm = make_llm(kvcache_block_size=size, num_kvcache_blocks=20, overlap=overlap)
    for context, contexts in ((LONG, [LONG] * 6), (LONG[::-1], [LONG[::-1]])):
        before = llm.engine.num_prefill_tokens
        if len(contexts) == 6:
            scores = score(llm, contexts, CONTINUATIONS)
        else:
            (scores,) = score(llm, contexts, [CONTINUATIONS])
        for continuation, one in zip(CONTINUATIONS, scores, strict=True):
            check_score(checkpoint, one, context, continuation)
        # All but the last token of each pair, and what follows the context's last whole block: six
        # tokens, too few to be copied.
        tail = len(context) % size
        assert llm.engine.num_prefill_tokens - before == (
            len(context) + sum(map(len, CONTINUATIONS)) - len(CONTINUATIONS) + 5 * tail
        )
    assert llm.metrics()["last_call"]["prefix_cache_hit_rate"] > 0.7


def test_the_end_of_a_context_inside_a_block_is_copied(make_llm):
    llm = make_llm(kvcache_block_size=64, num_kvcache_blocks=20)
    before = llm.engine.num_prefill_tokens
    context = (LONG + LONG)[:100]
    score(llm, [context], [CONTINUATIONS])
    # The last token of the context runs for each: its hidden state tells of the continuation.
    first, *others = map(len, CONTINUATIONS)
    assert llm.engine.num_prefill_tokens - before == 100 + first - 1 + sum(others)


def test_contexts_are_still_cached_when_their_other_continuations_come(checkpoint, make_llm):
    """However many contexts there are, and however small the cache."""
    llm = make_llm(num_kvcache_blocks=20, overlap=True)
    contexts = [[i, *LONG[:63]] for i in range(12)]
    before = llm.engine.num_prefill_tokens
    rows = score(llm, contexts, [CONTINUATIONS[:3]] * 12)
    assert llm.engine.num_prefill_tokens - before == 12 * (64 + 2 + 1 + 2)
    for context, row in zip(contexts[::5], rows[::5]):
        for continuation, one in zip(CONTINUATIONS, row):
            check_score(checkpoint, one, context, continuation)


def test_what_is_sampled_does_not_change_where_the_prompt_is_scored(checkpoint, make_llm):
    llm = make_llm()
    params = [
        SamplingParams(max_tokens=9, seed=3, ignore_eos=True, **options)
        for options in (
            dict(logprobs=2),
            dict(repetition_penalty=1.4, presence_penalty=0.5),
            dict(top_k=5, n=3, logprobs=0),
            dict(min_tokens=4),
        )
    ]
    expected = generate(llm, PROMPTS[4:8], params)
    outputs = generate(llm, PROMPTS[4:8], [replace(one, prompt_logprobs=1) for one in params])
    for prompt, before, after in zip(PROMPTS[4:8], expected, outputs):
        check_prompt(checkpoint, after, prompt, 1)
        assert after["token_ids"] == before["token_ids"]
        for one in after.get("completions", [after]):
            assert "prompt_logprobs" not in one or one is after
            assert ("cumulative_logprob" in one) == ("logprobs" in one)
            if "logprobs" in one:
                values = [v[token] for token, v in zip(one["token_ids"], one["logprobs"])]
                assert one["cumulative_logprob"] == pytest.approx(sum(values))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_generates_nothing_ends_like_others(make_llm, overlap):
    llm = make_llm(overlap=overlap)
    ids = [llm.add_request(prompt, asking()) for prompt in PROMPTS[:4]]
    llm.pause(ids[1])
    llm.abort(ids.pop(2))
    ended = {}
    for _ in range(5):
        ended |= {output["id"]: output for output in llm.step()}
    assert ended.keys() == {*ids} - {ids[1]}
    llm.resume(ids[1])
    while llm.has_unfinished():
        ended |= {output["id"]: output for output in llm.step()}
    assert ended.keys() == {*ids}
    assert all(output["token_ids"] == [] and output["text"] == "" for output in ended.values())
    assert ended[ids[0]]["prompt_logprobs"] == [None]  # of one token
    total = llm.metrics()["total"]
    assert total["output_tokens"] == 0 and total["prompt_tokens"] == 1 + 2 + 16
    assert total["time_to_first_token"] is None
    assert_empty(llm)


def test_no_end_of_sequence_ends_what_generates_nothing(make_llm):
    """The token that its last step samples is dropped, whichever it is."""
    (output,) = generate(make_llm(), [LONG], asking(stop_token_ids=list(range(VOCAB))))
    assert output["finish_reason"] == "length" and output["prompt_token_ids"] == LONG


def test_what_is_asked_of_outputs_means_nothing_where_there_are_none(checkpoint, make_llm):
    only_7 = dict(allowed_token_ids=[7], logits_processors=[lambda tokens, logits: logits * 0])
    params = [
        asking(most, logprobs=1, repetition_penalty=1.5, **options)
        for most, options in enumerate((only_7, dict(temperature=1.0, top_k=3, n=2)))
    ]
    for output, one in zip(generate(make_llm(), [LONG] * 2, params), params):
        check_prompt(checkpoint, output, LONG, one.prompt_logprobs)
        for completion in output.get("completions", [output]):
            assert (completion["token_ids"], completion["logprobs"]) == ([], [])
            assert completion["cumulative_logprob"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_scored_in_steps_that_wait_for_the_host(checkpoint, make_llm, overlap):
    """Where a callable of the user's edits the logits of other rows, or of the same."""
    llm = make_llm(overlap=overlap, max_num_batched_tokens=24)
    edited = dict(logits_processors=[lambda tokens, logits: -logits])
    params = [asking(i % 3, 6, **(edited if i % 2 else {})) for i in range(len(PROMPTS))]
    outputs = generate(llm, PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, outputs):
        check_prompt(checkpoint, output, prompt, one.prompt_logprobs)
        if not one.logits_processors:
            assert output["token_ids"] == checkpoint.expected(prompt, 6)


def test_a_text_may_be_a_token_longer_than_max_model_len(checkpoint, make_llm):
    llm = make_llm(max_model_len=70, num_kvcache_blocks=5)
    (output,) = generate(llm, [[*LONG, 7]], asking())
    check_prompt(checkpoint, output, [*LONG, 7], 0)
    (scored,) = score(llm, [LONG[:50]], [[*LONG[50:], 7]])
    check_score(checkpoint, scored, LONG[:50], [*LONG[50:], 7])
    with pytest.raises(ValueError, match=r"^prompts\[0\] has 72 tokens, max_model_len is 70 .*: s"):
        llm.generate([[*LONG, 7, 7]], asking(), use_tqdm=False)
    with pytest.raises(ValueError, match="^prompts.0. has 71 tokens, max_model_len is 70: shorten"):
        llm.generate([[*LONG, 7]], asking(max_tokens=1), use_tqdm=False)
    assert_empty(llm)


def test_a_text_that_the_cache_cannot_hold_is_refused(make_llm):
    """All of it but its last token must fit."""
    llm = make_llm(max_model_len=65, num_kvcache_blocks=4)
    assert len(score(llm, [LONG[:60]], [LONG[60:65]])) == 1
    with pytest.raises(ValueError, match="needs 65 tokens of KV cache .* which holds 64: "):
        llm.score([LONG[:60]], [LONG[60:66]], use_tqdm=False)


def test_completions_of_nothing_need_the_blocks_of_all_but_the_last_token(checkpoint, make_llm):
    """The blocks that are filled are shared; each completion has a last one that is not."""
    llm = make_llm(num_kvcache_blocks=3)
    for length in (33, 32):
        (output,) = generate(llm, [LONG[:length]], asking(n=4))
        check_prompt(checkpoint, output, LONG[:length], 0)
        assert len(output["completions"]) == 4


def test_logits_that_are_no_numbers_are_an_error_of_a_score_too(make_llm, monkeypatch):
    llm = make_llm()
    head = llm.engine.runner.model.compute_logits
    monkeypatch.setattr(llm.engine.runner.model, "compute_logits", lambda x: head(x) * math.nan)
    with pytest.raises(FloatingPointError, match="NaN or infinite logits"):
        llm.score([LONG], [[1]], use_tqdm=False)
    monkeypatch.undo()
    assert_empty(llm)
    assert len(score(llm, [LONG], [[1]])) == 1


def test_an_llm_that_sleeps_scores_nothing(checkpoint, make_llm):
    llm = make_llm()
    llm.sleep()
    for wrong in ([[1]], [[]]):  # whatever it is given
        with pytest.raises(AsleepError):
            llm.score([LONG], wrong)
    llm.wake_up()
    check_score(checkpoint, score(llm, [LONG], [[1]])[0], LONG, [1])


# Texts


@pytest.fixture(scope="module")
def llm(folder):
    with make_text_llm(folder) as llm:
        yield llm


def test_texts_are_split_as_evaluation_harnesses_split_them(llm, folder):
    """The space before a word belongs to its token, wherever the caller has put it."""
    the = llm.encode(" the")[0]
    assert len(the) == 1
    contexts, continuations = ["in", "in ", "in  "], [" the", "the", ["the", "q"]]
    first, second, (third, fourth) = score(llm, contexts, continuations)
    assert first == second and first["token_ids"] == the
    assert third["token_ids"] == llm.encode("  the")[0]
    assert fourth["token_ids"] == llm.encode("  q")[0]
    expected = Plain(folder).logits(llm.encode("in")[0]).log_softmax(-1)
    assert first["logprobs"] == pytest.approx([float(expected[the[0]])], abs=NEAR)
    # Where one token spans the border, it is the context's own tokens that stand.
    (whole,) = score(llm, ["t"], ["hethe"])
    assert whole["token_ids"] == llm.encode("thethe")[0][1:]


def test_a_score_of_ids_is_the_score_of_their_text(llm):
    ids = score(llm, [llm.encode("in the")[0], [5, 6]], [llm.encode(" in q")[0], (7, 8)])
    texts = score(llm, ["in the"], [" in q"])
    assert ids[0]["logprobs"] == pytest.approx(texts[0]["logprobs"], abs=NEAR)
    assert ids[1]["token_ids"] == [7, 8]


def test_no_pairs_have_no_scores(llm):
    assert llm.score([], []) == []


WRONG = {
    r"contexts is 'in': give a list": ("in", ["q"]),
    r"continuations is 'q': give a list": (["in"], "q"),
    r"contexts has 2 entries, continuations has 1: give": (["in", "the"], ["q"]),
    r"contexts\[0\] with continuations\[0\]: the context has no tokens: give": ([""], ["q"]),
    r"contexts\[1\] with .*: the context has no tokens: give": ([[1], []], [[1], [2]]),
    r"contexts\[0\] with continuations\[0\]: the continuation has no tokens": (["in"], [""]),
    r".*continuations\[0\]\[1\]: the continuation has no tokens: give": (["in"], [["q", ""]]),
    r".*continuations\[0\]: the continuation has no tokens: give a": ([[1]], [[]]),
    r".*continuations\[0\]: the continuation has .*: the tokenizer merges it into": (["i"], ["n"]),
    r".*: one is text, the other is not: give both": (["in"], [[1]]),
    r".*0\]: the continuation has no tokens: give at least one token$": (["in"], [[]]),
    r".*\[0\]\[1\]: the continuation has no tokens": (["in"], [["q", []]]),
    r".*\[0\]: the context has no tokens: give at least": ([[]], ["in"]),
    r".*\[0\]: the continuation is None: give text or a list": (["in"], [None]),
    r".*\[0\]: the context is 5: give text or a list": ([5], ["in"]),
    r".*continuations\[0\]\[0\]: one is text": ([[1]], [["q"]]),
    r".*: the context is 3: give text or": ([3], [[1]]),
    r".*continuations\[0\]: the continuation is None: give text": ([[1]], [None]),
    r".*continuations\[0\]\[1\]: the continuation is 3: give": ([[1]], [[[2], 3]]),
    r".* holds token id 263: the model's vocabulary is 0 to 262": ([[1]], [[263]]),
    r".* holds 1.5: token ids are integers": ([[1.5]], [[1]]),
    r".*continuations\[1\] has 300 tokens, max_model_len is 256": ([[1], [2]], [[1], [2] * 299]),
    r"pairs\[1\] is '.*', which holds half a character": (["in", "q"], ["q", "\ud800"]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_pair_is_named_and_nothing_runs(llm, message):
    steps = llm.engine.num_steps
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        llm.score(*WRONG[message])
    assert llm.engine.num_steps == steps and len(score(llm, ["in"], ["q"])) == 1


@pytest.mark.parametrize(
    "error, message, options",
    [
        (TypeError, "prompt_logprobs is True: use an integer", dict(prompt_logprobs=True)),
        (ValueError, "prompt_logprobs is 21: use an integer", dict(prompt_logprobs=21)),
        (ValueError, "prompt_logprobs is -1: use an integer", dict(prompt_logprobs=-1)),
        (ValueError, "max_tokens is 0: use 1 or more, or", dict(max_tokens=0)),
        (ValueError, "min_tokens is 1", dict(max_tokens=0, prompt_logprobs=0, min_tokens=1)),
    ],
)
def test_wrong_parameters_are_refused(error, message, options):
    with pytest.raises(error, match=f"^{message}"):
        SamplingParams(**options)


def test_the_token_that_is_dropped_leaves_no_text(llm):
    assert list(llm.stream(["in the"], asking(stop=["q"]))) == [(0, "", [], "length")]
    assert llm.engine.detokenizer is None or not llm.engine.detokenizer._reading


def test_the_lowest_of_equally_likely_tokens_is_the_likeliest():
    logits = torch.randint(0, 3, (50, 500), generator=torch.Generator().manual_seed(0)).float()
    records = logprobs.make_records(logits, torch.full((50,), 4), most=1)
    assert (records[:, 0, 0] == 4).all()
    assert records[:, 1, 0].tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_chat_is_scored_as_its_template_writes_it(llm):
    (output,) = llm.chat([{"role": "user", "content": "in"}], asking(), use_tqdm=False)
    assert END + 1 in output["prompt_token_ids"]
    assert len(output["prompt_logprobs"]) == len(output["prompt_token_ids"])
