"""The facade: what a call returns, what an error or an interrupt leaves behind, and how an LLM
ends.
"""

import gc
import random
import shutil
import sys
import weakref

import pytest
from call_helpers import generate
from engine_helpers import MODELS, PROMPTS, assert_empty, assert_greedy, greedy, save_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.engine import block_manager, block_tables, scheduler
from nanovllm.engine.model_runner import SampledTokens

PROMPT = PROMPTS[4]


@pytest.fixture
def text_llm(make_llm, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    save_tokenizer(folder)
    return make_llm(folder)


def words(token_ids):
    return " ".join(map(str, token_ids))


def test_a_folder_that_was_named_from_here_is_read_from_elsewhere(
    make_llm, checkpoint, tmp_path, monkeypatch
):
    """What is read later: transformers' tokenizer, and the weights after a deep sleep."""
    save_tokenizer(shutil.copytree(checkpoint.folder, tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    llm = make_llm("model")
    monkeypatch.chdir("/")
    assert llm.get_tokenizer().decode(PROMPT) == words(PROMPT)
    llm.sleep(level=2)
    llm.wake_up()
    assert_greedy(llm, checkpoint)


def test_text_goes_in_and_comes_out(text_llm, checkpoint):
    outputs = text_llm.generate([words(prompt) for prompt in PROMPTS], greedy(9), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        expected = checkpoint.expected(prompt, 9)
        assert output == {
            "prompt_token_ids": prompt,
            "num_cached_tokens": 0 if prompt not in PROMPTS[8:] else output["num_cached_tokens"],
            "text": words(expected),
            "token_ids": expected,
            "finish_reason": "length",
            "stop_reason": None,
        }


def test_token_ids_come_back_with_text_too(text_llm, checkpoint):
    (output,) = text_llm.generate([PROMPT], greedy(9), use_tqdm=False)
    assert output["text"] == words(checkpoint.expected(PROMPT, 9))


def test_without_a_tokenizer_the_text_is_empty(make_llm, checkpoint):
    (output,) = make_llm().generate([PROMPT], greedy(3), use_tqdm=False)
    assert (output["text"], output["token_ids"]) == ("", checkpoint.expected(PROMPT, 3))


def test_one_prompt_needs_no_list(text_llm):
    usual = generate(text_llm, [PROMPT], greedy(3))
    for prompts in (words(PROMPT), PROMPT, tuple(PROMPT), [tuple(PROMPT)], (PROMPT,)):
        assert generate(text_llm, prompts, greedy(3)) == usual


def test_outputs_say_what_of_the_prompt_was_cached(make_llm):
    llm = make_llm(enable_prefix_caching=True)
    prompt = list(range(40))  # two blocks of 16 and a half
    assert [llm.generate([prompt], use_tqdm=False)[0]["num_cached_tokens"] for _ in range(2)] == [
        0,
        32,
    ]
    (several,) = llm.generate([prompt], SamplingParams(n=2), use_tqdm=False)
    assert several["num_cached_tokens"] == 32 and several["prompt_token_ids"] == prompt
    assert [set(one) for one in several["completions"]] == [
        {"text", "token_ids", "finish_reason", "stop_reason"}
    ] * 2
    assert several["token_ids"] == several["completions"][0]["token_ids"]


def test_max_tokens_of_none_goes_on_to_the_models_length(make_llm):
    llm = make_llm(max_model_len=70)
    for prompt in (PROMPTS[0], PROMPTS[6]):
        for params in (
            SamplingParams(max_tokens=None, ignore_eos=True),
            SamplingParams(max_tokens=None, min_tokens=99),
        ):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert (
                len(output["token_ids"]) == 70 - len(prompt) and output["finish_reason"] == "length"
            )


def test_max_tokens_of_none_is_refused_where_the_cache_is_smaller(make_llm):
    llm = make_llm(max_model_len=70, num_kvcache_blocks=4)
    with pytest.raises(
        ValueError, match=r"needs 69 tokens of KV cache .*which holds 64: lower max_tokens"
    ):
        llm.generate([PROMPT], SamplingParams(max_tokens=None), use_tqdm=False)


def test_what_was_found_can_be_read(make_llm, checkpoint, tmp_path):
    llm = make_llm(num_kvcache_blocks=7, max_model_len=100)
    assert (llm.num_kvcache_blocks, llm.max_model_len) == (7, 100)
    llm = make_llm(num_kvcache_blocks=None, max_num_seqs=3, max_model_len=10**6)
    assert llm.max_model_len == 512 and llm.num_kvcache_blocks == 3 * 512 / 16


def test_the_callers_lists_stay_as_they_were(make_llm):
    prompts, params = [list(PROMPT), list(PROMPTS[0])], [greedy(5), greedy(3)]
    make_llm().generate(prompts, params, use_tqdm=False)
    assert prompts == [PROMPT, PROMPTS[0]] and params == [greedy(5), greedy(3)]


def test_sampling_params_have_defaults(make_llm):
    usual = make_llm(seed=1).generate([PROMPT], SamplingParams(), use_tqdm=False)
    assert make_llm(seed=1).generate([PROMPT], use_tqdm=False) == usual


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_shown_unless_it_is_turned_off(make_llm, capfd, shown):
    make_llm().generate(PROMPTS, greedy(5), use_tqdm=shown)
    shown_text = capfd.readouterr().err
    assert ("tok/s" in shown_text and f"{len(PROMPTS)}/{len(PROMPTS)}" in shown_text) == shown


def test_the_default_options_work(checkpoint):
    with LLM(checkpoint.folder, device="cpu") as llm:
        assert_greedy(llm, checkpoint, [PROMPT])


def test_the_cpus_cache_is_as_large_as_the_sequences_need(make_llm):
    llm = make_llm(num_kvcache_blocks=None, max_num_seqs=3, max_model_len=70)
    assert llm.num_kvcache_blocks == 3 * 5  # of 16 tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(make_llm, dtype):
    llm = make_llm(dtype=dtype)
    outputs = llm.generate(PROMPTS, greedy(5), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [5] * len(PROMPTS)
    assert str(llm.engine.runner.kv_cache.dtype) == f"torch.{dtype}"


def test_dummy_weights_need_no_checkpoint_and_are_the_same_each_time(make_llm, tmp_path):
    MODELS["gqa-2"].save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json")
        .read_text()
        .replace("{", '{"architectures": ["Qwen3ForCausalLM"],', 1)
    )
    first, second = (
        generate(make_llm(tmp_path, load_format="dummy"), PROMPTS, greedy(5)) for _ in range(2)
    )
    assert first == second and len(first) == len(PROMPTS)


@pytest.mark.parametrize("overlap, order", [(True, "LLWLWW"), (False, "LWLWLW"), (None, "LWLWLW")])
def test_overlap_launches_a_step_before_it_waits_for_the_last(
    make_llm, monkeypatch, overlap, order
):
    """On the CPU, where it gains nothing, it is off unless asked for."""
    llm = make_llm(overlap=overlap)
    seen = []

    def recorded(letter, call):
        return lambda *args: seen.append(letter) or call(*args)

    monkeypatch.setattr(llm.engine.runner, "launch", recorded("L", llm.engine.runner.launch))
    monkeypatch.setattr(SampledTokens, "wait", recorded("W", SampledTokens.wait))
    llm.generate([PROMPT], greedy(3), use_tqdm=False)
    assert "".join(seen) == order


# An error or an interrupt, wherever it strikes, leaves an LLM that serves the next call as if
# nothing had been.

CROWDED = dict(num_kvcache_blocks=9, max_num_batched_tokens=40, max_num_seqs=4)


def fail_at(call, strike: int, error: type[BaseException], after: bool):
    """`call` as it is, but that its `strike`-th run raises: before it does its work, or after."""
    count = 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == strike and not after:
            raise error("struck")
        result = call(*args, **kwargs)
        if count == strike:
            raise error("struck")
        return result

    return failing


PLACES = {
    "launch": lambda llm: (llm.engine.runner, "launch"),
    "wait": lambda llm: (SampledTokens, "wait"),
    "schedule": lambda llm: (llm.engine.scheduler, "schedule"),
    "commit": lambda llm: (llm.engine.scheduler, "commit"),
    "add": lambda llm: (llm.engine, "add"),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("options", [{}, CROWDED], ids=["roomy", "crowded"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_mid_call_leaves_an_empty_usable_llm(
    make_llm, checkpoint, monkeypatch, place, options, overlap
):
    llm = make_llm(overlap=overlap, **options)
    for strike in (1, 2, 3, 8, 11):
        for error, after in ((KeyboardInterrupt, False), (RuntimeError, True)):
            target, name = PLACES[place](llm)
            with monkeypatch.context() as patch:
                patch.setattr(target, name, fail_at(getattr(target, name), strike, error, after))
                with pytest.raises(error, match="struck"):
                    llm.generate(PROMPTS, greedy(24), use_tqdm=False)
            assert_empty(llm)
            assert_greedy(llm, checkpoint, PROMPTS[3:8], max_tokens=12)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_an_interrupt_between_any_two_lines_of_the_scheduler_leaves_an_empty_usable_llm(
    make_llm, checkpoint, overlap
):
    llm = make_llm(overlap=overlap, **CROWDED)
    chance, previous = random.Random(0), sys.gettrace()

    def generate(strike: int) -> int:
        """Interrupt before the `strike`-th line; returns how many there were."""
        count = 0

        def line(frame, event, _):
            nonlocal count
            if event == "line":
                count += 1
                if count == strike:
                    raise KeyboardInterrupt("struck")
            return line

        files = [module.__file__ for module in (scheduler, block_tables, block_manager)]
        sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in files else None)
        try:
            llm.generate(PROMPTS[:5], greedy(8), use_tqdm=False)
        finally:
            sys.settrace(previous)
        return count

    count = generate(0)
    for strike in chance.sample(range(1, count), 60):
        with pytest.raises(KeyboardInterrupt, match="struck"):
            generate(strike)
        assert_empty(llm)
    assert_greedy(llm, checkpoint, PROMPTS[3:8], max_tokens=12)


def test_a_second_interrupt_leaves_an_empty_usable_llm_too(make_llm, checkpoint, monkeypatch):
    llm = make_llm(overlap=True)
    runner = llm.engine.runner
    monkeypatch.setattr(runner, "launch", fail_at(runner.launch, 3, KeyboardInterrupt, False))
    monkeypatch.setattr(
        runner, "synchronize", fail_at(runner.synchronize, 1, KeyboardInterrupt, False)
    )
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    assert_empty(llm)
    assert_greedy(llm, checkpoint)


def test_an_error_goes_through_with_the_progress_bar_on(make_llm, checkpoint, monkeypatch):
    llm = make_llm()
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine.runner,
            "launch",
            fail_at(llm.engine.runner.launch, 3, KeyboardInterrupt, True),
        )
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(24))
    assert_greedy(llm, checkpoint)


def test_a_closed_llm_refuses_calls(make_llm):
    llm = make_llm()
    llm.close()
    with pytest.raises(ValueError, match="this LLM is closed: make a new one"):
        llm.generate([PROMPT], greedy(1), use_tqdm=False)
    llm.close()  # closing twice is no error


def test_with_closes_also_after_an_error(make_llm):
    with pytest.raises(RuntimeError, match="mine"), make_llm() as llm:
        raise RuntimeError("mine")
    assert llm.engine is None


def test_closing_frees_model_and_cache(checkpoint):
    llm = LLM(checkpoint.folder, device="cpu", num_kvcache_blocks=2)
    llm.generate([PROMPT], greedy(3), use_tqdm=False)
    model, cache = weakref.ref(llm.engine.runner.model), weakref.ref(llm.engine.runner.kv_cache)
    llm.close()
    gc.collect()
    assert model() is None and cache() is None


def test_dropping_an_llm_frees_model_and_cache(checkpoint):
    llm = LLM(checkpoint.folder, device="cpu", num_kvcache_blocks=2)
    llm.generate([PROMPT], greedy(3), use_tqdm=False)
    model, cache = weakref.ref(llm.engine.runner.model), weakref.ref(llm.engine.runner.kv_cache)
    del llm
    gc.collect()
    assert model() is None and cache() is None


@pytest.mark.parametrize("overlap", [False, True])
def test_two_llms_live_side_by_side(get_checkpoint, make_llm, overlap):
    """Call by call, and step by step."""
    checkpoints = [get_checkpoint("gqa-2"), get_checkpoint("tied")]
    llms = [make_llm(checkpoint.folder, overlap=overlap) for checkpoint in checkpoints]
    for _ in range(2):
        for llm, checkpoint in zip(llms, checkpoints):
            assert_greedy(llm, checkpoint)
    requests = [[llm.engine.add(prompt, greedy(10)) for prompt in PROMPTS] for llm in llms]
    while any(llm.engine.has_unfinished() for llm in llms):
        for llm in llms:
            llm.engine.step()
    for checkpoint, running in zip(checkpoints, requests):
        assert [request.first.output_ids for request in running] == [
            checkpoint.expected(prompt, 10) for prompt in PROMPTS
        ]
    for llm in llms:
        assert_empty(llm)


def test_llms_follow_one_another(get_checkpoint, make_llm):
    for name in ("gqa-2", "tied", "gqa-2"):
        checkpoint = get_checkpoint(name)
        with make_llm(checkpoint.folder) as llm:
            assert_greedy(llm, checkpoint, PROMPTS[:4])


def test_closing_one_llm_leaves_the_other(checkpoint, make_llm):
    first, second = make_llm(), make_llm()
    first.close()
    assert_greedy(second, checkpoint)
