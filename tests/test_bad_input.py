"""A wrong call raises ValueError or TypeError that names the place, the value and the remedy; nothing is queued."""

import json
import math
import shutil

import numpy as np
import pytest
from engine_helpers import PROMPTS, VOCAB, assert_empty, assert_greedy, greedy, save_tokenizer

from nanovllm import LLM, SamplingParams

GOOD = PROMPTS[2]
DEEP: list = []
for _ in range(3000):
    DEEP = [DEEP]


@pytest.fixture
def llm(make_llm, checkpoint, tmp_path):
    """With a tokenizer, and a cache smaller than max_model_len."""
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    save_tokenizer(folder)
    return make_llm(folder, max_model_len=100, num_kvcache_blocks=5)


WRONG_PROMPTS = {
    "empty-ids": ([GOOD, []], ValueError, r"prompts\[1\] is empty.* at least one token"),
    "empty-text": (["7 8", ""], ValueError, r"prompts\[1\] is empty.* at least one token"),
    "only-empty-text": ("", ValueError, r"prompts\[0\] is empty"),
    "too-long": ([GOOD, [1] * 100], ValueError, r"prompts\[1\] has 100 tokens, max_model_len is 100: shorten it"),
    "above-vocabulary": ([GOOD, [1, VOCAB]], ValueError, rf"prompts\[1\] holds token id {VOCAB}: .* 0 to {VOCAB - 1}"),
    "negative": ([[3, -1], GOOD], ValueError, r"prompts\[0\] holds token id -1: .* 0 to"),
    "huge": ([[2**70], GOOD], ValueError, r"prompts\[0\] holds token id 1180591620717411303424"),
    "float": ([GOOD, [1, 2.0]], TypeError, r"prompts\[1\] holds 2\.0: token ids are integers"),
    "none-inside": ([GOOD, [1, None]], TypeError, r"prompts\[1\] holds None: token ids are integers"),
    "bool": ([GOOD, [1, True]], TypeError, r"prompts\[1\] holds True: token ids are integers"),
    "bools-alone": ([True, False], TypeError, r"prompts\[0\] holds True"),
    "text-inside": ([GOOD, [1, "2"]], TypeError, r"prompts\[1\] holds '2': token ids are integers"),
    "nested": ([GOOD, [[1]]], TypeError, r"prompts\[1\] holds \[1\]: token ids are integers"),
    "floats-alone": ([1.0, 2.0], TypeError, r"prompts\[0\] is a float"),
    "ids-after-text": (["7", GOOD], TypeError, r"prompts\[1\] is a list.* all"),
    "text-after-ids": ([GOOD, "7"], TypeError, r"prompts\[1\] is a str.* all"),
    "none": (None, TypeError, r"prompts is a NoneType: give a str"),
    "none-in-list": ([GOOD, None], TypeError, r"prompts\[1\] is a NoneType"),
    "number": (5, TypeError, r"prompts is a int: give a str"),
    "dict": ({"a": 1}, TypeError, r"prompts is a dict: give a str"),
    "nested-deep": ([GOOD, [1, DEEP]], TypeError, r"prompts\[1\] holds \[\[.*: token ids are integers"),
    "nested-deep-alone": ([DEEP], TypeError, r"prompts\[0\] holds \[\[.*: token ids are integers"),
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
        patch.setattr(llm.engine, "add", lambda *_: pytest.fail("queued although another prompt is wrong"))
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
        r"sampling_params\[0\]\.stop_token_ids holds the whole vocabulary, of which min_tokens=1 lets none be drawn",
    ),
    "a-dict": ({"temperature": 1}, TypeError, r"sampling_params is a dict: give a SamplingParams"),
    "a-number-inside": ([greedy(1), 5], TypeError, r"sampling_params\[1\] is a int: give a SamplingParams"),
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
        (dict(temperature="hot"), TypeError, "temperature is 'hot': use "),
        (dict(temperature=True), TypeError, "temperature is True: use "),
        (dict(temperature=None), TypeError, "temperature is None: use "),
        (dict(max_tokens=0), ValueError, "max_tokens is 0: use .*1 or more"),
        (dict(max_tokens=-3), ValueError, "max_tokens is -3: use .*1 or more"),
        (dict(max_tokens=2.0), TypeError, r"max_tokens is 2\.0: use an integer"),
        (dict(max_tokens=True), TypeError, "max_tokens is True: use an integer"),
        (dict(max_tokens=None), TypeError, "max_tokens is None: use an integer"),
        (dict(ignore_eos=1), TypeError, "ignore_eos is 1: use True or False"),
        (dict(temprature=1.0), TypeError, "temprature"),
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


def test_a_prompt_that_just_fits_is_served(make_llm, checkpoint):
    llm = make_llm(num_kvcache_blocks=5)
    prompt = PROMPTS[6] + [5]  # 65 tokens, and all but the last of 16 need room: 80
    assert_greedy(llm, checkpoint, [prompt], max_tokens=16)
    with pytest.raises(ValueError, match="needs 81 tokens"):
        llm.generate([prompt], greedy(17), use_tqdm=False)


COUNTS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "num_kvcache_blocks")
WRONG_OPTIONS = [
    *[(name, 0, ValueError, f"{name} is 0: use 1 or more") for name in COUNTS],
    *[(name, 2.5, TypeError, rf"{name} is 2\.5: use an integer") for name in COUNTS],
    *[(name, True, TypeError, f"{name} is True: use an integer") for name in COUNTS],
    *[(name, "8", TypeError, f"{name} is '8': use an integer") for name in COUNTS],
    ("kvcache_block_size", 24, ValueError, "kvcache_block_size is 24: use a multiple of 16"),
    ("kvcache_block_size", 8, ValueError, "kvcache_block_size is 8: use 16 or more"),
    ("kvcache_block_size", 16.0, TypeError, r"kvcache_block_size is 16\.0: use an integer"),
    ("gpu_memory_utilization", 0, ValueError, "gpu_memory_utilization is 0: use a fraction"),
    ("gpu_memory_utilization", 1.5, ValueError, r"gpu_memory_utilization is 1\.5: use a fraction"),
    ("gpu_memory_utilization", math.nan, ValueError, "gpu_memory_utilization is nan: use a fraction"),
    ("gpu_memory_utilization", "0.9", TypeError, r"gpu_memory_utilization is '0\.9': use a number"),
    ("enforce_eager", 1, TypeError, "enforce_eager is 1: use True or False"),
    ("enable_prefix_caching", None, TypeError, "enable_prefix_caching is None: use True or False"),
    ("step_timeout", 0, ValueError, "step_timeout is 0: use a number of seconds above 0"),
    ("step_timeout", math.nan, ValueError, "step_timeout is nan: use a number of seconds above 0"),
    ("step_timeout", "60", TypeError, "step_timeout is '60': use a number of seconds"),
    ("symmetric_memory", 0, TypeError, "symmetric_memory is 0: use True or False"),
    ("overlap", "yes", TypeError, "overlap is 'yes': use True or False"),
    ("dtype", "float8", ValueError, "dtype is 'float8': use one of 'auto', 'float32'"),
    ("dtype", 16, ValueError, "dtype is 16: use one of"),
    ("dtype", np.zeros(3), ValueError, r"dtype is array.*: use one of 'auto'"),
    ("attention_backend", np.array(["torch", "triton"]), ValueError, "attention_backend is array"),
    ("max_num_seqs", 10**9, ValueError, "max_num_seqs is 1000000000: use 65536 or less"),
    ("max_num_seqs", 10**30, ValueError, "max_num_seqs is 10{30}: use 65536 or less"),
    ("load_format", "gguf", ValueError, "load_format is 'gguf': use one of 'auto', 'dummy'"),
    ("attention_backend", "xformers", ValueError, "attention_backend is 'xformers': use one of 'auto'"),
    ("device", "tpu", ValueError, "device is 'tpu': use 'auto', 'cuda'"),
    ("device", 0, ValueError, "device is 0: use 'auto', 'cuda'"),
    ("device", "cuda:first", ValueError, "device is 'cuda:first': use 'auto', 'cuda'"),
    ("device", "cpu:1", ValueError, "device is 'cpu:1': use 'auto', 'cuda'"),
    ("seed", -1, ValueError, "seed is -1: use 0 or more"),
    ("seed", "lucky", TypeError, "seed is 'lucky': use an integer"),
    ("max_model_length", 100, TypeError, "'max_model_length': did you mean max_model_len"),
    ("block_size", 16, TypeError, "'block_size': did you mean kvcache_block_size"),
    ("zzz", 1, TypeError, "'zzz': the options are .*max_num_batched_tokens"),
]


@pytest.mark.parametrize("name, value, error, message", WRONG_OPTIONS, ids=[f"{o[0]}={o[1]}" for o in WRONG_OPTIONS])
def test_a_wrong_option_is_refused(checkpoint, name, value, error, message):
    with pytest.raises(error, match=message):
        LLM(checkpoint.folder, **{name: value})


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
        lambda f: change_config(f, quantization_config={"quant_method": "fp8"}),
        "quantization_config is set: choose",
    ),
    "no-architecture": (lambda f: change_config(f, architectures=None), r"this library runs .*Qwen3ForCausalLM"),
    "no-config": (lambda f: (f / "config.json").unlink(), "has no config.json: give the folder"),
    "corrupt-config": (
        lambda f: (f / "config.json").write_text("{"),
        r"config\.json cannot be read|tokenizer cannot be loaded.*config\.json' is not a valid JSON",
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


def test_a_conversation_nested_deep_is_refused(make_llm, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
    save_tokenizer(folder)
    llm = make_llm(folder)
    template = {"chat_template": "{{ messages | tojson }}"}
    for messages in (DEEP, [DEEP], [5, DEEP]):
        with pytest.raises(TypeError, match=r"messages\[0\] is .*: a conversation is a list of"):
            llm.chat(messages, chat_template_kwargs=template)
    with pytest.raises(ValueError, match=r"messages\[0\] does not fit the model's chat template"):
        llm.chat([{"role": "user", "content": DEEP}], chat_template_kwargs=template)
    assert_empty(llm)


def test_a_prompt_above_the_models_own_limit_is_not_sent_to_an_option(make_llm):
    llm = make_llm(max_model_len=10**6, max_num_batched_tokens=64)
    longest = llm.engine.max_model_len
    message = rf"has {longest} tokens, the model's own limit .* is {longest}: shorten it"
    with pytest.raises(ValueError, match=message) as error:
        llm.generate([[1] * longest], use_tqdm=False)
    assert "raise" not in str(error.value)


def test_more_completions_than_one_step_has_tokens_for_are_refused_by_the_right_name(make_llm):
    llm = make_llm(max_num_batched_tokens=3, max_num_seqs=64)
    message = r"n is 4 for .*, and 3 sequences may run .*max_num_seqs and max_num_batched_tokens"
    with pytest.raises(ValueError, match=message):
        llm.generate([GOOD], SamplingParams(n=4), use_tqdm=False)


def test_a_cache_that_no_memory_holds_is_refused_without_blaming_what_was_not_set(make_llm):
    with pytest.raises(ValueError, match="the KV cache of 1 blocks of .* does not have: set num_kv"):
        make_llm(num_kvcache_blocks=None, kvcache_block_size=16 * 10**15)
