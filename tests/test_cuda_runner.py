"""The runner of CUDA devices and its resampler, on a CPU: tokens are those of the plain runner,
whoever had a batch slot before.
"""

import inspect
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from recorded_graphs import RunnerOnCPU, use_cuda_runner
from sampling_helpers import random_params
from triton.runtime import interpreter

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
OPTIONS = dict(
    device="cpu",
    dtype="float32",
    max_model_len=96,
    kvcache_block_size=16,
    num_kvcache_blocks=24,
    max_num_seqs=5,
    max_num_batched_tokens=32,
    overlap=True,
)


@pytest.fixture(params=["gqa-2", "lfm2"])
def two(request, get_checkpoint, monkeypatch):
    """Two LLMs of one model: one with the runner of CUDA devices, and a plain one."""
    folder = get_checkpoint(request.param).folder
    with LLM(folder, kernels="plain", **OPTIONS) as plain:
        use_cuda_runner(monkeypatch)
        with LLM(folder, **OPTIONS) as llm:
            assert type(llm.engine.runner) is RunnerOnCPU
            yield llm, plain


def random_mix(r: random.Random, count: int) -> list[SamplingParams]:
    """Make params of which some need no resampling, and others the host's edits of each step."""
    mix = []
    for i in range(count):
        fixed = dict(max_tokens=r.randint(2, 5), seed=i, min_tokens=0, logprobs=r.choice([None, 2]))
        if i % 4 == 0:
            mix.append(SamplingParams(temperature=0.8, **fixed))
        elif i % 4 == 1:
            bad_words = [[r.randrange(199), r.randrange(199)]]
            mix.append(SamplingParams(bad_words=bad_words, logit_bias={5: 3.0}, **fixed))
        else:
            mix.append(random_params(r, **fixed))
    return mix


def test_tokens_are_those_of_the_plain_runner_whoever_had_a_batch_slot_before(two):
    llm, _ = two
    r = random.Random(0)
    shared = [r.randrange(199) for _ in range(20)]
    asks = [SamplingParams(max_tokens=2, logprobs=number, seed=1) for number in (5, 1, None)]
    before = [asks[0]] * 5
    # The last row asks for nothing, in the slot of a sequence that asked for more than the others.
    after = [asks[1]] * 4 + [asks[2]]
    for params, level in (
        (before, None),
        (after, None),
        (random_mix(r, 5), 1),
        (random_mix(r, 7), 2),
        (random_mix(r, 3), None),
    ):
        prompts = [
            shared[: r.randint(0, 20)] + [r.randrange(199) for _ in range(r.randint(1, 20))]
            for _ in params
        ]
        if params in (before, after):  # all in one step
            prompts = [[r.randrange(199) for _ in range(4)] for _ in params]
        outputs, expected = (one.generate(prompts, params, use_tqdm=False) for one in two)
        for mine, plains in zip(outputs, expected):
            assert mine.outputs[0].token_ids == plains.outputs[0].token_ids
            assert logprobs_of(mine) == pytest.approx(logprobs_of(plains), abs=1e-4)
        assert llm.engine.runner.graphs.num_replays
        if level is not None:
            llm.sleep(level=level)
            llm.wake_up()


def logprobs_of(output) -> list[float]:
    of_tokens = output.outputs[0].logprobs or ()
    return [one.logprob for of_token in of_tokens for one in of_token.values()]


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_launch_no_attention_kernel_that_the_start_does_not_launch(
    graphs, get_checkpoint, monkeypatch
):
    """Else a step would wait until the kernel is compiled."""
    folder = get_checkpoint("gqa-2").folder
    use_cuda_runner(monkeypatch)
    at_start: set[tuple] = set()
    launched: set[tuple] = set()
    run_kernel = interpreter.GridExecutor.__call__

    def note(executor, *args, **options):
        names = executor.arg_names
        options = {name: value for name, value in options.items() if name in names}
        given = inspect.getcallargs(executor.fn, *args, **options)
        kind = [
            given[name] if name in executor.constexprs else given[name] is None for name in names
        ]
        launched.add((executor.fn.__name__, *kind))
        return run_kernel(executor, *args, **options)

    def compile_kernels(runner):
        runner._bind_cache(1)
        runner._run_small_steps()
        at_start.update(launched)
        launched.clear()

    monkeypatch.setattr(RunnerOnCPU, "_compile_kernels", compile_kernels)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    with LLM(folder, enforce_eager=not graphs, **OPTIONS) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3, 4, 5, 6, 2, 3)]
        llm.generate([[7] * (3 + i) for i in range(7)], params, use_tqdm=False)
        llm.generate([[7] * 40], params[:1], use_tqdm=False)  # in two chunks
    of_attention = {"_qk_norm_rope_store_kernel", "_decode_kernel", "_prefill_kernel"}
    seen = {kind for kind in launched if kind[0] in of_attention}
    assert {kind[0] for kind in seen} == of_attention
    assert seen <= at_start


def test_a_start_launches_attention_with_blocks_that_exist_whoever_had_blocks_before(two):
    runner = two[0].engine.runner
    runner.batch_state.block_tables.fill_(99)  # while weights load, the cache has one block
    layer = runner.attention_layers[0]
    seen = []

    def recorded(attend):
        def call(q, kv, *args, **kwargs):
            tables = [x.block_tables for x in (kv, *args) if hasattr(x, "block_tables")]
            seen.extend(x for x in tables if x is not None)
            return attend(q, kv, *args, **kwargs)

        return call

    plain = layer.backend
    layer.backend = replace(plain, prefill=recorded(plain.prefill), decode=recorded(plain.decode))
    try:
        with torch.inference_mode():
            runner._run_attention(layer)
    finally:
        layer.backend = plain
        runner.batch_state.block_tables.zero_()
    assert seen
    assert all((tables == 0).all() for tables in seen)
