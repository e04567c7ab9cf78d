"""Sampling, several completions and streams on CUDA: with graphs and without, and without
waiting for the device.
"""

import random
import shutil

import pytest
import torch
from call_helpers import check_empty, generate, make_folder, make_llm, random_prompts
from test_completions import mixed_params
from test_failures import GREEDY, POISON, SOUND, poison
from test_sampling import draw, random_params

from nanovllm import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_special_rows_draw_on_the_gpu_what_they_draw_on_the_cpu():
    r, rows, vocab = random.Random(0), 150, 5000
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    params = [random_params(r) for _ in range(rows)]
    prompt, output = r.choices(range(vocab), k=40), r.choices(range(60), k=8)
    arguments = params, torch.arange(rows), prompt, output, (3, 700)
    on_cpu = draw(logits, *arguments)
    on_gpu = draw(logits.cuda(), params, torch.arange(rows).cuda(), prompt, output, (3, 700)).cpu()
    assert (on_cpu != on_gpu).sum() <= 1  # the last bit of a logarithm can decide


@pytest.mark.parametrize(
    "options", [dict(), dict(num_kvcache_blocks=12), dict(max_num_batched_tokens=24)], ids=str
)
def test_graphs_change_nothing_for_special_rows_and_forks(folder, options):
    prompts, params = random_prompts(14, seed=9), mixed_params(14)
    outputs = []
    for enforce_eager in (True, False):
        with make_llm(folder, dtype="float32", enforce_eager=enforce_eager, **options) as llm:
            outputs.append(generate(llm, prompts, params))
            texts = [""] * 14
            singles = [
                SamplingParams(seed=i, max_tokens=20, top_p=0.9, stop="th") for i in range(14)
            ]
            for index, text, _, _ in llm.stream(prompts, singles):
                texts[index] += text
            assert texts == [output["text"] for output in generate(llm, prompts, singles)]
            check_empty(llm)
    eager, graphs = ([output.pop("completions", [output]) for output in one] for one in outputs)
    assert [[c["token_ids"] for c in one] for one in eager] == [
        [c["token_ids"] for c in one] for one in graphs
    ]


def test_special_rows_do_not_make_the_host_wait(folder):
    params = [
        SamplingParams(**one, max_tokens=40, ignore_eos=True)
        for one in (
            dict(top_p=0.9),
            dict(top_k=5, min_p=0.1),
            dict(logprobs=3),
            dict(repetition_penalty=1.2, min_tokens=30),
            dict(n=3),
        )
    ]
    with make_llm(folder) as llm:
        generate(llm, random_prompts(5), params)  # compiles what is compiled
        launch = llm.engine.runner.launch

        def launch_without_waiting(batch):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm.engine.runner.launch = launch_without_waiting
        generate(llm, random_prompts(5, seed=1), params)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["auto", "triton", "torch", "flash-attn"])
def test_nan_stays_with_the_request_that_computes_it(folder, tmp_path, backend, eager):
    """Others that run beside it, or after it in its blocks, get their tokens."""
    if backend == "flash-attn":
        pytest.importorskip("flash_attn")
        folder = make_folder(tmp_path / "sound", head_dim=64)  # some builds have 64 and 128 alone
    poisoned = poison(shutil.copytree(folder, tmp_path / "poisoned"))
    # flash-attn has no float32, and its blocks are of 256 tokens
    dtype = "bfloat16" if backend == "flash-attn" else "float32"
    size = 256 if backend == "flash-attn" else 16
    options = dict(attention_backend=backend, dtype=dtype, kvcache_block_size=size)
    options |= dict(enforce_eager=eager, num_kvcache_blocks=40, max_num_seqs=64)
    options["enable_prefix_caching"] = False  # in bfloat16 what is cached may change tokens
    with make_llm(folder, **options) as llm:
        expected = generate(llm, SOUND, GREEDY)
    with make_llm(poisoned, **options) as llm:
        for at in (0, 20, 39):
            for prompt in SOUND:
                llm.add_request(prompt, GREEDY)
            llm.step()
            bad = llm.add_request([7] * at + [POISON] + [7] * (39 - at), GREEDY)
            outputs = {}
            while llm.has_unfinished():
                outputs |= {output.pop("id"): output for output in llm.step()}
            assert outputs.pop(bad)["finish_reason"] == "error"
            assert {one["finish_reason"] for one in outputs.values()} == {"length"}
            check_empty(llm)
            assert generate(llm, SOUND, GREEDY) == expected


def take_all_memory() -> list[torch.Tensor]:
    taken, size = [], 2**36
    torch.cuda.empty_cache()
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_out_of_memory_in_mid_run_is_raised_and_the_llm_is_usable_once_there_is_some(folder, eager):
    prompts = [[(i + j) % 256 for j in range(250)] for i in range(256)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sizes = dict(num_kvcache_blocks=4200, max_num_seqs=256, max_num_batched_tokens=65536)
    sizes |= dict(gpu_memory_utilization=0.3)
    with make_llm(folder, dtype="float32", enforce_eager=eager, **sizes) as llm:
        expected = generate(llm, prompts, params)
        llm.engine.reset()  # forget the cached prefixes: the prompts are computed again
        taken = take_all_memory()
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            generate(llm, prompts, params)
        check_empty(llm)
        taken.clear()
        torch.cuda.empty_cache()
        assert generate(llm, prompts, params) == expected
