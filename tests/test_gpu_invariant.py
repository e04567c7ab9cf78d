"""batch_invariant=True on CUDA: bits do not depend on what runs beside a request."""

import random

import pytest
import torch
from engine_helpers import FAMILIES, MODELS, SHAPE
from model_helpers import make_checkpoint
from quantised_helpers import change_config, fp8_blocks, make_pair
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
# Gated DeltaNet and the layers of Gemma 4 are refused.
SHOWN = (MODELS | FAMILIES).keys() - {"gemma4", "qwen3.5", "qwen3.5-moe", "qwen3-next"}
BF16 = dict(dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "outputs, inputs", [(1024, 3072), (4096, 1024), (1003, 328), (48, 32), (1003, 9736)]
)
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(outputs, inputs, dtype):
    from nanovllm.backends.cuda.triton import invariant_linear as kernels

    torch.manual_seed(0)
    x = torch.randn(1100, inputs, dtype=dtype, device="cuda")
    weight, bias = torch.randn(2 * outputs, inputs + 1, dtype=dtype, device="cuda").split(
        [inputs, 1], dim=1
    )
    weight, bias = weight.contiguous(), bias.flatten().contiguous()
    half = weight[:outputs].contiguous()
    for rows in (96, 224):
        kernels.approve_cublas(half, rows)
        kernels.approve_cublas(weight, rows)
    for given, plain in ((None, x @ half.T), (bias, x @ weight.T + bias)):
        whole = kernels.linear(x, half, given[:outputs] if given is not None else None)
        gated = kernels.gated_linear(x, weight, given)
        if given is None:
            torch.testing.assert_close(whole, plain, rtol=0.02, atol=0.02 * inputs**0.5)
        for rows in (1, 2, 16, 17, 33, 64, 65, 96, 200, 224, 256, 257, 800):
            few = kernels.linear(x[-rows:], half, given[:outputs] if given is not None else None)
            assert torch.equal(few, whole[-rows:]), rows
            assert torch.equal(kernels.gated_linear(x[-rows:], weight, given), gated[-rows:]), rows


def check_rows_alike(compute, x):
    """Check that the last rows of x [1100, K] get the same bits alone and among all rows."""
    whole = compute(x)
    for rows in (1, 2, 8, 16, 17, 64, 65, 130, 256, 257, 800):
        assert torch.equal(compute(x[-rows:].clone()), whole[-rows:]), rows


@pytest.mark.parametrize(
    "how, group, block, outputs, inputs",
    [
        ("group", 128, 128, 1024, 3072),
        ("group", 64, 64, 1024, 512),
        ("token", None, 1, 4096, 1024),
        (None, 128, 128, 1024, 512),
        (None, None, 1, 1024, 3072),
    ],
)
def test_a_row_of_a_packed_fp8_product_does_not_depend_on_the_number_of_rows(
    how, group, block, outputs, inputs
):
    from test_fp8_kernels import make_matrix

    from nanovllm.backends.cuda.products import gated_linear_fp8
    from nanovllm.backends.cuda.triton import fp8_linear

    torch.manual_seed(0)
    matrix = make_matrix(how, group, block, inputs, outputs)
    x, dtype = torch.randn(1100, inputs, **BF16), torch.bfloat16
    check_rows_alike(lambda x: fp8_linear.invariant_linear(x, matrix, None, dtype), x)
    linear = fp8_linear.invariant_linear
    check_rows_alike(lambda x: gated_linear_fp8(x, matrix, dtype, linear=linear), x)


FP8_EXPERTS = ("fp8-blocks", "fp8-blocks-and-groups", "fp8-rows-and-tokens", "fp8-published")


@pytest.mark.parametrize("scheme", ["mxfp4", "int4-zeros", "fp8-rows", *FP8_EXPERTS])
def test_a_token_of_packed_experts_gets_the_same_bits_among_any_others(scheme):
    from test_packed_experts import ALONE, WITH_INPUTS, mixture_of

    from nanovllm.backends.cuda.fused_layers import fuse
    from nanovllm.backends.cuda.invariant import invariant_attention
    from nanovllm.backends.cuda.products import INVARIANT
    from nanovllm.backends.quantised.config import Fp8

    schemes = ALONE | WITH_INPUTS | {"fp8-published": Fp8(128, 128, "group")}
    mixture = mixture_of(schemes[scheme], torch.bfloat16, sizes=(512, 768, 8, 3))
    fuse(mixture, invariant_attention(), INVARIANT)
    torch.manual_seed(0)
    with torch.inference_mode():
        check_rows_alike(mixture, torch.randn(1100, 512, **BF16))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("experts, top_k", [(128, 8), (24, 3)])
def test_a_token_is_routed_alike_alone_and_among_others(experts, top_k, renormalize):
    """A single token has a tile of its own, and no kernel sorts its pairs."""
    from nanovllm.backends.cuda.triton.moe import sort_by_expert

    torch.manual_seed(0)
    logits, x = torch.randn(300, experts, **BF16), torch.zeros(300, 64, **BF16)
    options = dict(top_k=top_k, renormalize=renormalize, block_m=16)
    together = sort_by_expert(logits, x, **options)[0].view(300, top_k)
    for i in range(300):
        alone = sort_by_expert(logits[i : i + 1], x[i : i + 1], **options)[0]
        assert torch.equal(alone, together[i]), i


@pytest.mark.parametrize(
    "heads, groups, head_dim, window, softcap",
    [(8, 2, 64, None, None), (6, 2, 128, 300, None), (4, 4, 256, None, 20.0), (20, 4, 24, 70, 5.0)],
)
def test_a_token_attends_alike_in_prompts_chunks_and_decoding(
    heads, groups, head_dim, window, softcap
):
    from nanovllm.backends.cuda.triton import invariant_attention as kernels
    from nanovllm.layers import attention as plain
    from nanovllm.layers.attention import AttentionOptions, KVCache, PackedKV, PagedKV
    from nanovllm.layers.context import PrefillMetadata

    torch.manual_seed(0)
    length, page = 1300, 256
    q, k, v = torch.randn(length, heads + 2 * groups, head_dim, **BF16).split(
        [heads, groups, groups], dim=1
    )
    options = AttentionOptions(head_dim**-0.5, window, softcap, torch.randn(heads, **BF16))
    pages = torch.full((2, 9, page, groups, head_dim), torch.nan, **BF16)
    tables = torch.randperm(9, device="cuda")[None, :6].int()
    for i in range(-(-length // page)):
        part = slice(i * page, min(length, (i + 1) * page))
        pages[0, tables[0, i], : part.stop - part.start] = k[part]
        pages[1, tables[0, i], : part.stop - part.start] = v[part]
    paged = PagedKV(KVCache(*pages), tables)

    def chunk(first: int, last: int, kv) -> torch.Tensor:
        starts = [torch.tensor([0, n], device="cuda").int() for n in (last - first, last)]
        lengths = last - first, last
        tables = None if isinstance(kv, PackedKV) else paged.block_tables
        metadata = PrefillMetadata(*starts, *lengths, tables)
        return kernels.prefill_attention(q[first:last], kv, metadata, options)

    whole = chunk(0, length, PackedKV(k, v))
    starts = torch.tensor([0, length], device="cuda").int()
    metadata = PrefillMetadata(starts, starts, length, length, None)
    expected = plain.prefill_attention(
        q.float(),
        PackedKV(k.float(), v.float()),
        metadata,
        AttentionOptions(options.scale, window, softcap, options.sinks.float()),
    )
    torch.testing.assert_close(whole.float(), expected, rtol=0.02, atol=0.02)
    for first in (0, 1, 255, 256, 700):
        assert torch.equal(chunk(first, length, paged), whole[first:]), first
    ends = torch.tensor([1, 2, 63, 64, 65, 255, 256, 257, 600, 1024, 1025, 1299, 1300]).cuda()
    for copies in (1, 40):
        lens = ends.repeat(copies)
        kv = PagedKV(paged.cache, tables.repeat(len(lens), 1), lens.int())
        assert torch.equal(kernels.decode_attention(q[lens - 1], kv, options), whole[lens - 1])


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Make requests of random lengths, some of which begin alike."""
    rng = random.Random(seed)
    prefix = [rng.randrange(190) for _ in range(130)]
    made = []
    for i in range(rng.choice([1, 3, 20, 60])):
        prompt = [rng.randrange(190) for _ in range(rng.choice([1, 5, 40, 100]))]
        prompt = prefix[: rng.choice([0, 1, 64, 130])] + prompt
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            seed=i,
            max_tokens=rng.choice([1, 10, 24]),
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=rng.choice([None, 1]),
        )
        made.append((prompt, params))
    return made


def bits(output) -> tuple:
    """Return all that a request's output says, with log-probabilities as they are."""
    (completion,) = output.outputs
    lists = (completion.logprobs, output.prompt_logprobs or [])
    flat = [
        [(token, entry.logprob) for token, entry in entries.items()]
        for entries in (*lists[0], *lists[1])
        if entries
    ]
    return tuple(completion.token_ids), flat


def check_bits_of(folder: str, others: list[dict], **options) -> None:
    """Run requests alone, and beside others by LLMs of other options. Compare their bits."""
    options |= dict(dtype="bfloat16", batch_invariant=True, max_model_len=512, max_num_seqs=64)
    options["gpu_memory_utilization"] = 0.2
    asked = [request for seed in range(4) for request in requests(seed)]
    with LLM(folder, **options) as llm:
        alone = [bits(llm.generate([p], s, use_tqdm=False)[0]) for p, s in asked[:30]]
        # A prompt's log-probabilities are those that generation gave.
        prompt, params = asked[1]
        tokens = list(alone[1][0])
        (again,) = llm.generate(
            [prompt + tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        given = [
            entry[token] for entry, token in zip(again.prompt_logprobs[-len(tokens) :], tokens)
        ]
        expected = [dict(entries)[t] for entries, t in zip(alone[1][1], tokens)]
        assert [entry.logprob for entry in given] == expected
    for more in others:
        with LLM(folder, **options | more) as llm:
            order = random.Random(1).sample(range(len(asked)), len(asked))
            outputs = llm.generate(
                [asked[i][0] for i in order], [asked[i][1] for i in order], use_tqdm=False
            )
            for i, output in zip(order, outputs):
                if i < len(alone):
                    assert bits(output) == alone[i], (more, i)


def test_a_request_gets_the_same_bits_whatever_runs_beside_it(tmp_path):
    make_checkpoint(tmp_path, Qwen3Config(**SHAPE | dict(head_dim=128)))
    others = [
        {},
        dict(max_num_batched_tokens=70, max_num_seqs=20),
        dict(enforce_eager=True, overlap=False, enable_prefix_caching=False),
        dict(num_kvcache_blocks=40, kvcache_block_size=16),
    ]
    check_bits_of(str(tmp_path), others)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_each_family_gets_the_same_bits_whatever_runs_beside_it(name, tmp_path):
    make_checkpoint(tmp_path, (MODELS | FAMILIES)[name])
    eager = dict(enforce_eager=True, overlap=False, enable_prefix_caching=False)
    few = dict(num_kvcache_blocks=60, kvcache_block_size=16, max_num_batched_tokens=70)
    check_bits_of(str(tmp_path), [{}, eager | few])


@pytest.mark.parametrize("name, layer", [("qwen3.5", "GatedDeltaNet"), ("gemma4", "WideRMSNorm")])
def test_a_model_whose_layers_were_not_shown_is_refused_by_name(name, layer, tmp_path):
    make_checkpoint(tmp_path, FAMILIES[name])
    with pytest.raises(
        ValueError, match=f"batch_invariant is True, but layer .* is of class {layer}"
    ):
        LLM(str(tmp_path), dtype="bfloat16", batch_invariant=True)


WIDE = dict(hidden_size=256, intermediate_size=256, head_dim=64)
MIXTURE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=128)


BLOCKS = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])


def test_a_model_in_fp8_gives_the_same_bits_whatever_runs_beside_a_request(tmp_path):
    _, folder = make_pair(tmp_path, Qwen3Config(**SHAPE | WIDE), fp8_blocks(128, 128), BLOCKS)
    check_bits_of(str(folder), [{}, dict(max_num_batched_tokens=70, enforce_eager=True)])


def test_experts_in_fp8_give_the_same_bits_whatever_runs_beside_a_request(tmp_path):
    config = Qwen3MoeConfig(**SHAPE | WIDE | MIXTURE)
    plain, packed = make_pair(tmp_path, config, fp8_blocks(128, 128), BLOCKS)
    others = [{}, dict(max_num_batched_tokens=70, enforce_eager=True)]
    check_bits_of(str(packed), others)
    check_bits_of(str(plain), others, quantization="fp8")


def test_experts_in_mxfp4_give_the_same_bits_whatever_runs_beside_a_request(tmp_path):
    sizes = SHAPE | WIDE | dict(num_local_experts=8, num_experts_per_tok=3, sliding_window=19)
    make_checkpoint(tmp_path, GptOssConfig(**sizes))
    change_config(tmp_path, quantization_config=dict(quant_method="mxfp4"))
    others = [{}, dict(max_num_batched_tokens=70, enforce_eager=True)]
    check_bits_of(str(tmp_path), others, load_format="dummy")
