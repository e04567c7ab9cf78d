"""A ladder of equivalences: whatever the engine does to run it, a prompt's greedy output is what
transformers gives.
"""

import random

import pytest
import torch
from engine_helpers import FAMILIES, MODELS, PROMPTS, VOCAB, assert_empty, assert_greedy, greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine import block_manager

LONG = PROMPTS[7]

overlapped = pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])


def test_the_prompts_tell_outputs_apart(checkpoint):
    """Outputs that repeat one token, or forget the prompt's beginning, would prove nothing."""
    outputs = [checkpoint.expected(prompt, 24) for prompt in PROMPTS]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output)) > 5 for output in outputs)
    assert checkpoint.expected([LONG[0] ^ 1] + LONG[1:], 24) != checkpoint.expected(LONG, 24)


@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_equals_transformers_alone_and_in_a_batch(get_checkpoint, make_llm, model):
    checkpoint = get_checkpoint(model)
    llm = make_llm(checkpoint.folder, enable_prefix_caching=False)
    for prompt in PROMPTS:
        assert_greedy(llm, checkpoint, [prompt])
    assert_greedy(llm, checkpoint)


@pytest.mark.parametrize("model", ["experts", "qwen2", "llama", *FAMILIES])
def test_nothing_that_the_engine_does_changes_a_familys_greedy_output(
    get_checkpoint, make_llm, model
):
    """Chunks, a cache that is too small, hits, and several completions of a prompt."""
    checkpoint = get_checkpoint(model)
    llm = make_llm(checkpoint.folder, max_num_batched_tokens=20, num_kvcache_blocks=9, overlap=True)
    for _ in range(2):
        assert_greedy(llm, checkpoint)
    assert llm.engine.scheduler.num_preemptions > 0
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=3)
    (output,) = llm.generate([LONG], params, use_tqdm=False)
    # What lies behind the windows of all layers was given back, and others have taken it. So it is
    # with states: there are two snapshots.
    is_lost = llm.engine.window is not None or llm.engine.snapshots is not None
    assert output["num_cached_tokens"] > 0 or is_lost
    for completion in output["completions"]:
        assert completion["token_ids"] == checkpoint.expected(LONG, 24)


@pytest.mark.parametrize("kernels", ["plain", "compile"])
def test_layers_of_pytorch_alone_and_of_torch_compile_give_the_same_tokens(
    checkpoint, make_llm, kernels
):
    """In chunks, so that one compiled layer sees many numbers of tokens."""
    assert_greedy(make_llm(kernels=kernels, max_num_batched_tokens=64), checkpoint)


@overlapped
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=20), dict(kernels="plain")])
def test_a_model_of_windows_goes_on_in_a_cache_that_holds_no_whole_sequence(
    get_checkpoint, make_llm, options, overlap
):
    checkpoint = get_checkpoint("mistral-window")  # 21 tokens
    llm = make_llm(checkpoint.folder, num_kvcache_blocks=4, overlap=overlap, **options)
    used: list[int] = []
    llm.on_step(lambda step: used.append(step.blocks_in_use))
    assert_greedy(llm, checkpoint, [PROMPTS[3]], max_tokens=100)
    assert max(used[-60:]) == 3, "so many blocks of 16 a window touches at most"
    assert_greedy(llm, checkpoint, PROMPTS[:6], max_tokens=100)
    assert llm.engine.scheduler.num_preemptions > 0
    (output,) = llm.generate([LONG], greedy(9), use_tqdm=False)
    assert output["token_ids"] == checkpoint.expected(LONG, 9)


@overlapped
def test_greedy_output_is_the_same_in_any_batch(checkpoint, make_llm, overlap):
    llm = make_llm(overlap=overlap)
    rng = random.Random(0)
    for _ in range(8):
        prompts = [rng.choice(PROMPTS) for _ in range(rng.randint(1, 12))]
        counts = [rng.randint(1, 24) for _ in prompts]
        outputs = llm.generate(prompts, [greedy(count) for count in counts], use_tqdm=False)
        for prompt, count, output in zip(prompts, counts, outputs):
            assert output["token_ids"] == checkpoint.expected(prompt, count)
        assert_empty(llm)


@overlapped
@pytest.mark.parametrize("caching", [False, True])
def test_prefix_caching_does_not_change_greedy_output(checkpoint, make_llm, caching, overlap):
    llm = make_llm(enable_prefix_caching=caching, overlap=overlap)
    assert_greedy(llm, checkpoint)
    first = llm.engine.num_prefill_tokens
    assert_greedy(llm, checkpoint)
    again = llm.engine.num_prefill_tokens - first
    assert (
        first == sum(map(len, PROMPTS)) if not caching else again < first < sum(map(len, PROMPTS))
    )


@overlapped
@pytest.mark.parametrize("budget", [5, 16, 50])
def test_chunked_prefill_does_not_change_greedy_output(checkpoint, make_llm, budget, overlap):
    llm = make_llm(max_num_batched_tokens=budget, overlap=overlap)
    assert_greedy(llm, checkpoint)
    assert_greedy(llm, checkpoint)


@overlapped
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_does_not_change_greedy_output(checkpoint, make_llm, caching, overlap):
    llm = make_llm(num_kvcache_blocks=9, enable_prefix_caching=caching, overlap=overlap)
    assert_greedy(llm, checkpoint, max_tokens=60)
    assert llm.engine.scheduler.num_preemptions > 0


@overlapped
@pytest.mark.parametrize("max_num_seqs", [1, 3, 7])
def test_the_number_of_sequences_at_a_time_does_not_change_greedy_output(
    checkpoint, make_llm, max_num_seqs, overlap
):
    assert_greedy(make_llm(max_num_seqs=max_num_seqs, overlap=overlap), checkpoint)


@overlapped
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_the_block_size_does_not_change_greedy_output(checkpoint, make_llm, block_size, overlap):
    llm = make_llm(kvcache_block_size=block_size, num_kvcache_blocks=24, overlap=overlap)
    assert_greedy(llm, checkpoint)
    assert_greedy(llm, checkpoint)


@overlapped
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_fully_cached_prompt_gives_the_same_output(checkpoint, make_llm, blocks, overlap):
    prompt = PROMPTS[6][: 16 * blocks]
    llm = make_llm(overlap=overlap)
    assert_greedy(llm, checkpoint, [prompt])
    before = llm.engine.num_prefill_tokens
    assert_greedy(llm, checkpoint, [prompt])
    assert llm.engine.num_prefill_tokens == before + 1, (
        "only the last token is computed again, for its logits"
    )
    assert_greedy(llm, checkpoint, [prompt] * 3 + [PROMPTS[0]])


def test_the_last_token_of_a_cached_prompt_is_computed_again_but_not_stored(make_llm):
    """Others may be reading the block at that moment.

    Its content is marked, to see that nothing is written.
    """
    llm = make_llm()
    prompt = PROMPTS[6]
    llm.generate(prompt, greedy(1), use_tqdm=False)
    parts, blocks = llm.engine.runner.kv_parts, llm.engine.scheduler.blocks.match(prompt)
    assert len(blocks) == 4
    with torch.inference_mode():
        for part in parts:
            part[:, blocks] += 1
    marked = [part[:, blocks].clone() for part in parts]
    llm.generate([prompt, prompt + [3]], greedy(5), use_tqdm=False)
    assert all(part[:, blocks].equal(kept) for part, kept in zip(parts, marked))


@overlapped
def test_requests_of_one_step_share_their_prefix_without_changing_output(
    checkpoint, make_llm, overlap
):
    prompt = PROMPTS[6]
    llm = make_llm(overlap=overlap)
    assert_greedy(llm, checkpoint, [prompt, prompt, prompt[:40] + [9, 9], prompt])
    assert llm.engine.num_prefill_tokens == 64 + 1 + (42 - 32) + 1


@overlapped
def test_a_preempted_request_hits_its_own_prefix_without_changing_output(
    checkpoint, make_llm, overlap
):
    llm = make_llm(num_kvcache_blocks=9, overlap=overlap)
    prompts = [PROMPTS[5], PROMPTS[6]]  # 33 and 64 tokens: 3 and 4 blocks, and soon more
    assert_greedy(llm, checkpoint, prompts, max_tokens=31)  # the first one needs no block of it
    assert llm.engine.scheduler.num_preemptions == 1
    assert llm.engine.num_prefill_tokens < 33 + 64 + 64, (
        "the second one was not computed from its start again"
    )


@overlapped
def test_a_follow_up_prompt_reuses_what_was_drawn(checkpoint, make_llm, overlap):
    prompt = PROMPTS[5]
    llm = make_llm(overlap=overlap)
    assert_greedy(llm, checkpoint, [prompt], max_tokens=48)
    longer = prompt + checkpoint.expected(prompt, 48) + [3]  # 33 + 48 + 1
    before = llm.engine.num_prefill_tokens
    assert_greedy(llm, checkpoint, [longer])
    assert llm.engine.num_prefill_tokens == before + 82 - 80


@overlapped
@pytest.mark.parametrize(
    "options", [{}, dict(max_num_batched_tokens=20), dict(num_kvcache_blocks=8, max_num_seqs=3)]
)
def test_conversations_are_copied_to_the_token_without_changing_output(
    checkpoint, make_llm, monkeypatch, options, overlap
):
    """What is known of a prompt ends anywhere in a block of 64."""
    monkeypatch.setattr(block_manager, "MIN_RUN", 1)
    llm = make_llm(overlap=overlap, kvcache_block_size=64, **options)
    prompts = PROMPTS[3:7]
    for turn in range(4):
        before = llm.engine.num_prefill_tokens
        assert_greedy(llm, checkpoint, prompts)
        if not options and turn:
            # The last token of each answer, and the three new ones.
            assert llm.engine.num_prefill_tokens == before + 4 * len(prompts)
        answers = [checkpoint.expected(prompt, 24) for prompt in prompts]
        prompts = [
            [*prompt, *answer, turn, i, 3]
            for i, (prompt, answer) in enumerate(zip(prompts, answers))
        ]


@overlapped
def test_a_block_is_copied_before_the_step_that_takes_it_writes_there(
    checkpoint, make_llm, monkeypatch, overlap
):
    monkeypatch.setattr(block_manager, "MIN_RUN", 1)
    llm = make_llm(num_kvcache_blocks=3, overlap=overlap)
    first, second = PROMPTS[2][:9], PROMPTS[3][:9]
    for prompt in (first, second):
        assert_greedy(llm, checkpoint, [prompt], max_tokens=1)
    # The second of these takes the block that the first one copies.
    before = llm.engine.num_prefill_tokens
    assert_greedy(llm, checkpoint, [first[:8] + [3], second[:8] + [3]], max_tokens=7)
    assert llm.engine.num_prefill_tokens == before + 2


@overlapped
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_num_batched_tokens=20), dict(num_kvcache_blocks=9), dict(max_num_seqs=3)],
)
def test_stopping_in_mid_batch_does_not_change_the_others(checkpoint, make_llm, options, overlap):
    llm = make_llm(overlap=overlap, **options)
    outputs = [checkpoint.expected(prompt, 60) for prompt in PROMPTS]
    # The token whose first appearances in the outputs are spread most widely.
    stop = max(
        range(VOCAB),
        key=lambda token: len({output.index(token) for output in outputs if token in output}),
    )
    llm.engine.stop_ids = frozenset({stop})
    stopped = 0
    for output, answer in zip(
        outputs, llm.generate(PROMPTS, greedy(60, ignore_eos=False), use_tqdm=False)
    ):
        if stop in output:
            output = output[: output.index(stop) + 1]
            stopped += 1
        assert answer["token_ids"] == output
        assert answer["finish_reason"] == ("stop" if stop in output else "length")
    assert 3 <= stopped < len(PROMPTS)
    assert_empty(llm)


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    options=st.fixed_dictionaries(
        dict(
            overlap=st.booleans(),
            enable_prefix_caching=st.booleans(),
            max_num_seqs=st.sampled_from([1, 2, 5, 32]),
            max_num_batched_tokens=st.sampled_from([3, 17, 40, 512]),
            num_kvcache_blocks=st.sampled_from([7, 9, 12, 96]),
        )
    ),
    calls=st.lists(
        st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=9), min_size=1, max_size=3
    ),
    max_tokens=st.sampled_from([1, 17, 24]),
    min_run=st.sampled_from([1, block_manager.MIN_RUN]),
)
def test_no_mixture_of_options_changes_greedy_output(
    checkpoint, make_llm, monkeypatch, options, calls, max_tokens, min_run
):
    monkeypatch.setattr(block_manager, "MIN_RUN", min_run)
    with make_llm(**options) as llm:
        for prompts in calls:
            assert_greedy(llm, checkpoint, prompts, max_tokens)
