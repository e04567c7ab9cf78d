"""A wrong call raises ValueError or TypeError that names the place, the value and the remedy;
nothing is queued.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from engine_helpers import PROMPTS, VOCAB, assert_empty, assert_greedy, greedy, save_tokenizer
from transformers import BatchEncoding

from nanovllm import LLM, TINY_MODEL, SamplingParams
from nanovllm.build import check_kernels
from nanovllm.config import Config

GOOD = PROMPTS[2]


@pytest.fixture
def llm(make_llm, checkpoint, tmp_path):
    """With a tokenizer, and a cache smaller than max_model_len."""
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    save_tokenizer(folder)
    return make_llm(folder, max_model_len=100, num_kvcache_blocks=5)


def nest(depth):
    value = [7]
    for _ in range(depth):
        value = [value]
    return value


WRONG_PROMPTS = {
    "empty-ids": ([GOOD, []], ValueError, r"prompts\[1\] is empty.* at least one token"),
    "empty-text": (["7 8", ""], ValueError, r"prompts\[1\] is empty.* at least one token"),
    "only-empty-text": ("", ValueError, r"prompts\[0\] is empty"),
    "too-long": (
        [GOOD, [1] * 100],
        ValueError,
        r"prompts\[1\] has 100 tokens, max_model_len is 100: shorten it",
    ),
    "above-vocabulary": (
        [GOOD, [1, VOCAB]],
        ValueError,
        rf"prompts\[1\] holds token id {VOCAB}: .* 0 to {VOCAB - 1}",
    ),
    "negative": ([[3, -1], GOOD], ValueError, r"prompts\[0\] holds token id -1: .* 0 to"),
    "huge": ([[2**70], GOOD], ValueError, r"prompts\[0\] holds token id 1180591620717411303424"),
    "float": ([GOOD, [1, 2.0]], TypeError, r"prompts\[1\] holds 2\.0: token ids are integers"),
    "none-inside": (
        [GOOD, [1, None]],
        TypeError,
        r"prompts\[1\] holds None: token ids are integers",
    ),
    "bool": ([GOOD, [1, True]], TypeError, r"prompts\[1\] holds True: token ids are integers"),
    "bools-alone": ([True, False], TypeError, r"prompts\[0\] holds True"),
    "text-inside": ([GOOD, [1, "2"]], TypeError, r"prompts\[1\] holds '2': token ids are integers"),
    "nested": ([GOOD, [[1]]], TypeError, r"prompts\[1\] holds \[1\]: token ids are integers"),
    "floats-alone": ([1.0, 2.0], TypeError, r"prompts\[0\] is a float"),
    "no-ids-after-text": (["7", 5], TypeError, r"prompts\[1\] is a int: give a str, a list"),
    "none": (None, TypeError, r"prompts is a NoneType: give a str"),
    "none-in-list": ([GOOD, None], TypeError, r"prompts\[1\] is a NoneType"),
    "number": (5, TypeError, r"prompts is a int: give a str"),
    "tensor": (torch.tensor([[1]]), TypeError, r"prompts is a Tensor: .*, or its tolist\(\)$"),
    "encoding": (BatchEncoding({"input_ids": [1]}), TypeError, "prompts is a BatchEnc.*input_ids"),
    "dict": (
        {"a": 1},
        TypeError,
        r"prompts\[0\] has no key 'a': the keys are prompt, prompt_token_ids",
    ),
    "message": (
        {"role": "user", "content": "7"},
        TypeError,
        r"prompts\[0\] has no key 'role', given 'user': a conversation goes to chat or stream_chat",
    ),
    "messages": (
        [{"role": "user", "content": "7"}],
        TypeError,
        r"prompts\[0\] has no key 'role', given 'user': a conversation goes to chat or stream_chat",
    ),
    "chats": (
        [[{"role": "user", "content": "7"}]],
        TypeError,
        r"prompts\[0\] holds \{.*: .* goes to chat or stream_chat",
    ),
    "numpy-float": (
        [GOOD, [1, np.float64(2)]],
        TypeError,
        r"prompts\[1\] holds .*2\.0.*: token ids are integers",
    ),
    "numpy-bool": (
        [GOOD, [np.False_]],
        TypeError,
        r"prompts\[1\] holds .*False.*: token ids are integers",
    ),
    "numpy-above-vocabulary": (
        [[np.int64(VOCAB)]],
        ValueError,
        rf"prompts\[0\] holds token id {VOCAB}: .* 0 to",
    ),
    "deeply-nested": (nest(100_000), TypeError, r"prompts\[0\] holds \[\[\["),
    "long-inside": (
        [[1, "x" * 10**6]],
        TypeError,
        r"prompts\[0\] holds '.{1,60}': token ids are integers",
    ),
    "never-fits": (
        [GOOD, [1] * 70],
        ValueError,
        r"prompts\[1\] needs 81 tokens of KV cache.* holds 80: lower max_tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_a_wrong_prompt_is_refused_before_any_is_queued(llm, checkpoint, monkeypatch, name):
    prompts, error, message = WRONG_PROMPTS[name]
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine, "add", lambda *_: pytest.fail("queued although another prompt is wrong")
        )
        with pytest.raises(error, match=message):
            llm.generate(prompts, greedy(12), use_tqdm=False)
    assert_empty(llm)
    assert_greedy(llm, checkpoint, [GOOD])


WRONG_PARAMS = {
    "too-few": (
        [greedy(1)],
        ValueError,
        r"sampling_params has 1 entries for 2 prompts: give one for all, or one for each",
    ),
    "too-many": ([greedy(1)] * 3, ValueError, r"sampling_params has 3 entries for 2 prompts"),
    "none-of-them": ([], ValueError, r"sampling_params has 0 entries for 2 prompts"),
    "all-tokens-barred": (
        SamplingParams(stop_token_ids=list(range(VOCAB)), min_tokens=1),
        ValueError,
        r"sampling_params\[0\]\.stop_token_ids holds the whole vocabulary, and min_tokens=1 "
        r"bars all of it",
    ),
    "a-dict": ({"temperature": 1}, TypeError, r"sampling_params is a dict: give a SamplingParams"),
    "a-number-inside": (
        [greedy(1), 5],
        TypeError,
        r"sampling_params\[1\] is a int: give a SamplingParams",
    ),
    "none-inside": ([None, greedy(1)], TypeError, r"sampling_params\[0\] is a NoneType"),
}


@pytest.mark.parametrize("name", WRONG_PARAMS)
def test_wrong_sampling_params_are_refused_before_any_is_queued(llm, checkpoint, name):
    params, error, message = WRONG_PARAMS[name]
    with pytest.raises(error, match=message):
        llm.generate([GOOD, GOOD], params, use_tqdm=False)
    assert_empty(llm)
    assert_greedy(llm, checkpoint, [GOOD])


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(temperature=-0.5), ValueError, r"temperature is -0\.5: use 0"),
        (dict(temperature=math.nan), ValueError, "temperature is nan: use 0"),
        (dict(temperature=math.inf), ValueError, "temperature is inf: use 0"),
        (dict(temperature=np.float16("inf")), ValueError, "temperature is inf: use 0"),
        (dict(temperature="hot"), TypeError, "temperature is 'hot': use "),
        (dict(temperature=True), TypeError, "temperature is True: use "),
        (dict(temperature=None), TypeError, "temperature is None: use "),
        (dict(max_tokens=0), ValueError, "max_tokens is 0: use .*1 or more"),
        (dict(max_tokens=-3), ValueError, "max_tokens is -3: use .*1 or more"),
        (dict(max_tokens=2.0), TypeError, r"max_tokens is 2\.0: use an integer"),
        (dict(max_tokens=True), TypeError, "max_tokens is True: use an integer"),
        (dict(max_tokens="all"), TypeError, "max_tokens is 'all': use an integer"),
        (dict(ignore_eos=1), TypeError, "ignore_eos is 1: use True or False"),
        (
            dict(temprature=1.0),
            TypeError,
            "SamplingParams has no parameter 'temprature': did you mean temperature",
        ),
        (dict(max_token=3), TypeError, "no parameter 'max_token': did you mean max_tokens"),
        (
            dict(zzz=3),
            TypeError,
            "no parameter 'zzz': the parameters are temperature, top_k, .*frequency_penalty",
        ),
        (dict(seed=10**400), ValueError, r"seed is 1\d+\.\.\.0+: use an integer from 0"),
        (dict(top_k=np.float32(3)), TypeError, "top_k is .*3.*: use an integer"),
        (dict(n=np.True_), TypeError, "n is .*True.*: use an integer"),
        (
            dict(stop_token_ids=[1, True]),
            TypeError,
            "stop_token_ids holds True: token ids are integers",
        ),
        (dict(stop_token_ids=7), TypeError, "stop_token_ids is 7: use a list of token ids"),
        (dict(stop=0), TypeError, "stop is 0: use a string or a list"),
        (dict(stop=["a", ["b"]]), TypeError, r"stop is \['a', \['b'\]\]: use a string or a list"),
    ],
    ids=str,
)
def test_wrong_sampling_values_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("text", ["7", ["7"], ["7", "8"]])
def test_text_without_a_tokenizer_is_refused(make_llm, text):
    llm = make_llm()
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        llm.generate(text, greedy(1), use_tqdm=False)
    assert_empty(llm)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=False) == []
    assert llm.generate((), greedy(3), use_tqdm=False) == []


def test_a_prompt_longer_than_the_model_takes_is_told_so(make_llm, checkpoint, tmp_path):
    """Raising max_model_len would not help."""
    folder = shutil.copytree(checkpoint.folder, tmp_path / "short")
    change_config(folder, max_position_embeddings=20)
    llm = make_llm(folder, max_model_len=100)
    with pytest.raises(
        ValueError, match=r"prompts\[0\] has 20 tokens, the model itself takes 20 .*: shorten it"
    ):
        llm.generate([[1] * 20], use_tqdm=False)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_arrays_of_integers_are_token_ids_wherever_lists_are(llm, checkpoint, dtype):
    given, ids = np.array(GOOD, dtype=dtype), [3, 5, 7]
    params = greedy(5)
    expected = checkpoint.expected(GOOD, 5)
    both = [given, GOOD, {"prompt_token_ids": given}, given[:2]]
    for prompts in (given, [given], both, tuple(both), {"prompt_token_ids": given}):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert outputs[0]["prompt_token_ids"] == GOOD and outputs[0]["token_ids"] == expected
        json.dumps(outputs)  # of Python's own types alone
    assert outputs == llm.generate(GOOD, params, use_tqdm=False)
    llm.abort(llm.add_request(given, params))
    assert [piece[2] for piece in llm.stream(given, params)] == [[token] for token in expected]
    array = np.array(ids, dtype=dtype)
    assert SamplingParams(
        stop_token_ids=array, allowed_token_ids=array, bad_words=[array, "a"]
    ) == SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, bad_words=[ids, "a"])
    one = llm.score([GOOD], [ids])
    assert llm.score([given], [array]) == llm.score([GOOD], [array]) == one
    assert llm.score([given], [[array, ids]]) == [one * 2]


@pytest.mark.parametrize("array", [np.ones(3), np.ones((1, 2), int), np.ones(2, bool)])
def test_other_arrays_are_refused(llm, array):
    for call in (
        lambda: llm.generate(array),
        lambda: llm.generate([array]),
        lambda: llm.generate({"prompt_token_ids": array}),
        lambda: llm.score([GOOD], [array]),
        lambda: SamplingParams(stop_token_ids=array),
        lambda: SamplingParams(allowed_token_ids=array),
    ):
        with pytest.raises(TypeError, match="list of|is a ndarray: give|token ids are integers"):
            call()


def test_numpy_integers_are_integers(llm, checkpoint):
    params = SamplingParams(
        np.float32(0),
        top_k=np.int8(3),
        max_tokens=np.int64(5),
        min_tokens=np.uint8(1),
        seed=np.uint64(2**62),
        n=np.int16(1),
        stop_token_ids=[np.int64(VOCAB - 1)],
        ignore_eos=True,
        top_p=np.float64(1),
    )
    expected = checkpoint.expected(GOOD, 5)
    prompt = [np.int32(token) for token in GOOD]
    for prompts in (prompt, [prompt], tuple(np.array(GOOD))):
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        assert output["token_ids"] == expected and output["prompt_token_ids"] == GOOD
        json.dumps(output)  # of Python's own types alone
    request_id = llm.add_request(prompt, params)
    llm.abort(np.int64(request_id))
    assert not llm.has_unfinished()


def test_numpy_integers_are_options(make_llm, checkpoint):
    sizes = (
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "kvcache_block_size",
        "num_kvcache_blocks",
    )
    llm = make_llm(
        **{name: np.int64(64) for name in sizes}, seed=np.uint32(1), step_timeout=np.float32(9)
    )
    assert_greedy(llm, checkpoint, [GOOD])


def test_a_prompt_that_just_fits_is_served(make_llm, checkpoint):
    llm = make_llm(num_kvcache_blocks=5)
    prompt = PROMPTS[6] + [5]  # 65 tokens, and all but the last of 16 need room: 80
    assert_greedy(llm, checkpoint, [prompt], max_tokens=16)
    with pytest.raises(ValueError, match="needs 81 tokens"):
        llm.generate([prompt], greedy(17), use_tqdm=False)


COUNTS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "num_kvcache_blocks",
)
WRONG_OPTIONS = [
    *[(name, 0, ValueError, f"{name} is 0: use an integer.* 1") for name in COUNTS],
    *[(name, 2.5, TypeError, rf"{name} is 2\.5: use an integer") for name in COUNTS],
    *[(name, True, TypeError, f"{name} is True: use an integer") for name in COUNTS],
    *[(name, "8", TypeError, f"{name} is '8': use an integer") for name in COUNTS],
    ("kvcache_block_size", 24, ValueError, "kvcache_block_size is 24: use a multiple of 16"),
    ("kvcache_block_size", 8, ValueError, "kvcache_block_size is 8: use a multiple of 16"),
    ("kvcache_block_size", 16.0, TypeError, r"kvcache_block_size is 16\.0: use a multiple of 16"),
    (
        "gpu_memory_utilization",
        0,
        ValueError,
        "gpu_memory_utilization is 0: use a number .* above 0",
    ),
    (
        "gpu_memory_utilization",
        1.5,
        ValueError,
        r"gpu_memory_utilization is 1\.5: use a number .* at most 1",
    ),
    (
        "gpu_memory_utilization",
        math.nan,
        ValueError,
        "gpu_memory_utilization is nan: use a number .* above 0",
    ),
    ("gpu_memory_utilization", "0.9", TypeError, r"gpu_memory_utilization is '0\.9': use a number"),
    ("enforce_eager", 1, TypeError, "enforce_eager is 1: use True or False"),
    ("enable_prefix_caching", "no", TypeError, "enable_prefix_caching is 'no': use True or False"),
    ("step_timeout", 0, ValueError, "step_timeout is 0: use a number of seconds above 0"),
    ("step_timeout", math.nan, ValueError, "step_timeout is nan: use a number of seconds above 0"),
    ("step_timeout", "60", TypeError, "step_timeout is '60': use a number of seconds"),
    ("symmetric_memory", 0, TypeError, "symmetric_memory is 0: use True or False"),
    ("overlap", "yes", TypeError, "overlap is 'yes': use True or False"),
    ("dtype", "float8", ValueError, "dtype is 'float8': use one of 'auto', 'float32'"),
    ("dtype", 16, ValueError, "dtype is 16: use one of"),
    ("dtype", np.zeros(2), ValueError, r"dtype is array\(\[0., 0.\]\): use one of"),
    (
        "enforce_eager",
        np.zeros(2),
        TypeError,
        r"enforce_eager is array\(\[0., 0.\]\): use True or False",
    ),
    ("device", np.zeros(2), ValueError, r"device is array\(\[0., 0.\]\): use 'auto'"),
    ("max_num_seqs", np.float64(8), TypeError, "max_num_seqs is .*8.*: use an integer"),
    (
        "max_num_seqs",
        10**30,
        ValueError,
        r"max_num_seqs is 1000\d+: use an integer from 1 to 65536",
    ),
    (
        "step_timeout",
        10**400,
        ValueError,
        r"step_timeout is 1\d+\.\.\.0+: use a number of seconds above 0",
    ),
    ("load_format", "gguf", ValueError, "load_format is 'gguf': use one of 'auto', 'dummy'"),
    (
        "attention_backend",
        "xformers",
        ValueError,
        "attention_backend is 'xformers': use one of 'auto'",
    ),
    ("device", "tpu", ValueError, "device is 'tpu': use 'auto', 'cuda'"),
    ("device", 0, ValueError, "device is 0: use 'auto', 'cuda'"),
    ("device", "cuda:first", ValueError, "device is 'cuda:first': use 'auto', 'cuda'"),
    ("device", "cpu:1", ValueError, "device is 'cpu:1': use 'auto', 'cuda'"),
    ("seed", -1, ValueError, "seed is -1: use an integer from 0"),
    ("seed", "lucky", TypeError, "seed is 'lucky': use an integer"),
    ("max_model_length", 100, TypeError, "'max_model_length': did you mean max_model_len"),
    ("cache_block_size", 16, TypeError, "'cache_block_size': did you mean kvcache_block_size"),
    ("zzz", 1, TypeError, "'zzz': the options are .*max_num_batched_tokens"),
]


@pytest.mark.parametrize(
    "name, value, error, message", WRONG_OPTIONS, ids=[f"{o[0]}={o[1]}" for o in WRONG_OPTIONS]
)
def test_a_wrong_option_is_refused(checkpoint, name, value, error, message):
    with pytest.raises(error, match=message):
        LLM(checkpoint.folder, **{name: value})


def test_a_gpu_that_is_too_old_for_triton_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="kernels is 'auto', but Tesla T4 .* 7.5.*use 'plain'"):
        check_kernels(Config(str(TINY_MODEL)), device)
    check_kernels(Config(str(TINY_MODEL), kernels="plain"), device)


@pytest.mark.parametrize("name", ["triton", "flash-attn"])
def test_an_attention_backend_of_gpus_is_refused_on_a_cpu(checkpoint, name):
    message = f"attention_backend is '{name}', but device cpu is not a GPU: use 'auto'"
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint.folder, device="cpu", attention_backend=name)


@pytest.mark.parametrize("model", [None, 5, b"folder", ""], ids=repr)
def test_a_model_that_is_no_name_is_refused(model):
    with pytest.raises((TypeError, ValueError), match="model is .*: give a folder or a hub id"):
        LLM(model)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def remove_weights(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def truncate_weights(folder):
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


BROKEN_FOLDERS = {
    "unknown-architecture": (
        lambda f: change_config(f, architectures=["GPT9"]),
        r"GPT9.*this library runs .*Qwen3ForCausalLM",
    ),
    "unknown-model-type": (
        lambda f: change_config(f, architectures=["GPT9"], model_type="gpt9"),
        r"GPT9.*this library runs .*Qwen3ForCausalLM",
    ),
    "other-model-type": (
        lambda f: change_config(f, architectures=["T5ForConditionalGeneration"], model_type="t5"),
        r"T5ForConditionalGeneration.*this library runs .*Qwen3ForCausalLM",
    ),
    "quantized": (
        lambda f: change_config(f, quantization_config={"quant_method": "bitsandbytes"}),
        "quantization_config: quant_method is 'bitsandbytes': this library runs fp8, .* choose",
    ),
    "activation-of-no-name": (
        lambda f: change_config(f, hidden_act={"silu": 1}),
        r"hidden_act is \{'silu': 1\}: it must be a name",
    ),
    "no-architecture": (
        lambda f: change_config(f, architectures=None),
        r"this library runs .*Qwen3ForCausalLM",
    ),
    "no-config": (lambda f: (f / "config.json").unlink(), "has no config.json: give the folder"),
    "corrupt-config": (
        lambda f: (f / "config.json").write_text("{"),
        r"config\.json cannot be read|"
        r"tokenizer cannot be loaded.*config\.json' is not a valid JSON",
    ),
    "corrupt-tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "tokenizer cannot be loaded, download it again",
    ),
    "corrupt-generation-config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        r"generation_config\.json cannot be read",
    ),
    "no-weights": (remove_weights, r"has no \*\.safetensors file: download"),
    "a-shard-is-missing": (
        lambda f: max(f.glob("*.safetensors")).unlink(),
        "lacks .*safetensors.*download the model again",
    ),
    "a-shard-is-truncated": (truncate_weights, "is truncated or corrupt: download it again"),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
@pytest.mark.parametrize("tokenizer", [False, True], ids=["no-tokenizer", "tokenizer"])
def test_a_broken_folder_is_refused(checkpoint, tmp_path, name, tokenizer):
    damage, message = BROKEN_FOLDERS[name]
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    if tokenizer:
        save_tokenizer(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_missing_folder_is_refused(name):
    with pytest.raises(ValueError, match=f"model is '{name}'.* there is no such folder"):
        LLM(name)
