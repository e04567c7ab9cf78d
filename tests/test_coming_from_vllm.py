"""For those who come from vLLM: its scripts run, outputs have its attributes and stay dicts, and
what is not here is refused with a remedy.
"""

import copy
import inspect
import json
import pickle
import re
import shutil
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
import torch
from call_helpers import check_empty, completed, generate, make_folder, make_llm
from tqdm import tqdm
from transformers import AutoTokenizer

import nanovllm
from nanovllm import (
    LLM,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    foreign_names,
)
from nanovllm.apps.jobs.formats import Defaults, NativeFormat, Request
from nanovllm.apps.jobs.openai_batch import OWN as OWN_FIELDS
from nanovllm.apps.jobs.openai_batch import OpenAIFormat
from nanovllm.apps.jobs.worker import Worker
from nanovllm.config import Config
from nanovllm.options import options_of
from nanovllm.sampling_params import OF_SAMPLING_PARAMS

GREEDY = SamplingParams(temperature=0, max_tokens=8)
CHAT = [{"role": "user", "content": "in the end"}]
WRITTEN = "<|user|>in the end<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder) as llm:
        yield llm


# Scripts

# As people write them after the first pages of vLLM's documentation.
SCRIPT = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the", "The capital of", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=12)


def main():
    llm = LLM(
        model=MODEL,
        trust_remote_code=True,
        disable_custom_all_reduce=True,
        tensor_parallel_size=1,
        dtype="float32",
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        max_num_seqs=16,
        max_model_len=256,
        quantization=None,
        swap_space=0,
        calculate_kv_scales=False,
        disable_log_stats=True,
        enable_chunked_prefill=True,
        seed=0,
    )
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False, lora_request=None)
    for output in outputs:
        print((output.prompt, output.outputs[0].text))

    tokenizer = llm.get_tokenizer()
    conversation = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_chat = llm.chat(conversation, sampling_params, use_tqdm=False, add_generation_prompt=True)
    by_text = llm.generate(prompts=[{"prompt": text}], sampling_params=sampling_params)
    by_ids = llm.generate({"prompt_token_ids": ids}, sampling_params=sampling_params)
    for (output,) in (by_chat, by_text, by_ids):
        assert output.finished and output.prompt_token_ids == ids
        print((output.prompt, output.outputs[0].text))
    llm.close()


if __name__ == "__main__":
    main()
"""


def test_a_script_for_vllm_runs_once_its_import_is_changed(folder, plain, tokenizer, capsys):
    script = SCRIPT.replace("from vllm import", "from nanovllm import")
    assert script.count("vllm") == SCRIPT.count("vllm")
    exec(compile(script, "script.py", "exec"), {"MODEL": str(folder), "__name__": "__main__"})
    hello = "<|user|>Hello<|assistant|>"
    texts = ["Hello, my name is", "The president of the", "The capital of", "The future of AI is"]
    expected = []
    for text, prompt in [(t, t) for t in texts] + [(hello, hello), (hello, hello), (hello, None)]:
        tokens = plain.greedy(tokenizer(text)["input_ids"], 12)
        if (end := tokenizer.eos_token_id) in tokens:
            tokens = tokens[: tokens.index(end)]
        expected.append(str((prompt, tokenizer.decode(tokens, skip_special_tokens=True))))
    assert capsys.readouterr().out.splitlines() == expected


# Prompts

MIXTURE = [
    "the",
    {"prompt": "in", "prompt_token_ids": None},
    [7, 8],
    {"prompt_token_ids": [9, 10]},
    (11, 12),
]


def test_prompts_of_all_forms_may_be_mixed(llm):
    alone = ["the", "in", [7, 8], [9, 10], [11, 12]]
    outputs = llm.generate(MIXTURE, GREEDY, use_tqdm=False)
    assert completed(outputs) == [generate(llm, [prompt], GREEDY)[0] for prompt in alone]
    assert [output["prompt_token_ids"] for output in outputs][2:] == alone[2:]


def test_one_prompt_in_a_dict_needs_no_list(llm):
    expected = generate(llm, ["the end"], GREEDY)
    ids = llm.encode("the end")[0]
    for prompt in (TextPrompt(prompt="the end"), TokensPrompt(prompt_token_ids=ids)):
        assert generate(llm, prompt, GREEDY) == expected
        assert "".join(text for _, text, *_ in llm.stream(prompt, GREEDY)) == expected[0]["text"]
    request_id = llm.add_request({"prompt": "the end"}, GREEDY)
    while llm.has_unfinished():
        outputs = llm.step()
    assert completed(outputs) == [{"id": request_id, **expected[0]}]


def test_token_ids_count_where_a_dict_has_both_and_the_text_is_kept(llm):
    prompt = {"prompt_token_ids": [7, 8], "prompt": "the end", "multi_modal_data": None}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (output.prompt, output["prompt_token_ids"]) == ("the end", [7, 8])


def test_an_error_counts_the_prompts_of_all_forms(llm):
    with pytest.raises(ValueError, match=r"prompts\[2\] is '.ud800', which holds half a character"):
        llm.generate([[7], {"prompt": "in"}, "\ud800"], use_tqdm=False)


@pytest.mark.parametrize(
    "prompt, error, message",
    [
        ({}, TypeError, r"is \{\}: give a str as 'prompt', or a list of token ids as 'prompt_to"),
        ({"prompt": None}, TypeError, r"is \{'prompt': None\}: give a str as 'prompt'"),
        ({"prompt": [7]}, TypeError, r"is \{'prompt': \[7\]\}: give a str as"),
        ({"prompt_token_ids": "the"}, TypeError, r"is \{'prompt_token_ids': 'the'\}: give a str"),
        ({"prompt_token_ids": [7], "prompt": 5}, TypeError, r"is \{.*\}: give a str"),
        ({"prompt_token_ids": []}, ValueError, "is empty: give at least one token"),
        ({"prompt_token_ids": [999]}, ValueError, "holds token id 999: the model's vocabulary"),
        ({"promt": "the"}, TypeError, "has no key 'promt': did you mean prompt"),
        ({3: 4}, TypeError, "has no key '3': the keys are prompt, prompt_token_ids"),
    ],
    ids=str,
)
def test_a_wrong_dict_is_refused_before_any_prompt_is_queued(llm, prompt, error, message):
    with pytest.raises(error, match=r"^prompts\[1\] " + message):
        llm.generate(["the", prompt], use_tqdm=False)
    check_empty(llm)


# Outputs

RICH = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=6, logprobs=2)


@pytest.mark.parametrize("params", [GREEDY, RICH], ids=["one", "several"])
def test_attributes_are_the_dicts_items(llm, params):
    (output,) = llm.generate(["the end"], params, use_tqdm=False)
    assert isinstance(output, RequestOutput) and output.finished
    assert output.prompt == "the end"
    assert output.prompt_token_ids is output["prompt_token_ids"]
    assert output.num_cached_tokens == output["num_cached_tokens"]
    completions = output.get("completions", [output])
    assert len(output.outputs) == len(completions) == params.n
    for i, (view, one) in enumerate(zip(output.outputs, completions)):
        assert isinstance(view, CompletionOutput) and view.index == i
        for name in ("text", "token_ids", "finish_reason"):
            assert getattr(view, name) is view[name] is one[name]
        assert view == {name: one[name] for name in view}
        assert not view.keys() & {"prompt_token_ids", "num_cached_tokens", "completions"}
        assert (view.logprobs is None) == (params.logprobs is None)
        assert view.stop_reason == one.get("stop_reason")
        assert view.cumulative_logprob == one.get("cumulative_logprob")
    assert output.prompt_logprobs is None


def test_request_ids_are_strings_that_count_upwards(llm):
    outputs = llm.generate(["the", "in"], GREEDY, use_tqdm=False)
    first, second = [output.request_id for output in outputs]
    assert isinstance(first, str) and int(second) == int(first) + 1


def test_outputs_of_step_have_them_too_and_say_the_id_first(llm):
    ids = [llm.add_request(prompt, GREEDY) for prompt in ("the end", [7, 8])]
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output.request_id: output for output in llm.step()}
    first, second = [outputs[str(i)] for i in ids]
    assert (first.prompt, second.prompt) == ("the end", None)
    assert first.outputs[0].text == first["text"] == generate(llm, ["the end"], GREEDY)[0]["text"]
    assert "id" not in first.outputs[0]
    assert [next(iter(output.items())) for output in (first, second)] == [
        ("id", number) for number in ids
    ]


def test_a_chats_prompt_is_what_the_template_wrote(llm):
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt == WRITTEN and output.outputs[0].text == output["text"]


def test_an_output_behaves_as_the_dict_it_is(llm):
    for params in (GREEDY, RICH):
        (output,) = llm.generate(["the end"], params, use_tqdm=False)
        same = dict(output)
        assert type(same) is dict and isinstance(output, dict)
        assert output == same and same == output and repr(output) == repr(same)
        assert json.dumps(output) == json.dumps(same)
        assert output | {"a": 1} == same | {"a": 1} and {**output} == same
        changed = copy.deepcopy(output)
        changed["token_ids"].append(5)
        assert changed != output == same
        output["text"] = "other"
        assert output.outputs[0].text == ("other" if params.n == 1 else same["text"])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, "pickle"])
def test_a_copy_has_what_the_output_has(llm, duplicate):
    if duplicate == "pickle":
        duplicate = lambda value: pickle.loads(pickle.dumps(value))  # noqa: E731
    (output,) = llm.generate(["the end"], RICH, use_tqdm=False)
    twin = duplicate(output)
    assert type(twin) is RequestOutput and twin == output and twin is not output
    assert (twin.prompt, twin.request_id) == (output.prompt, output.request_id)
    for one, other in zip(twin.outputs, output.outputs):
        assert one == other and one.index == other.index and one.logprobs == other.logprobs
    completion = duplicate(output.outputs[1])
    assert type(completion) is CompletionOutput and completion.index == 1
    assert completion == output.outputs[1] and completion.logprobs == output.outputs[1].logprobs


def test_a_pickled_output_takes_along_no_tokenizer_and_no_other_tokens(llm):
    outputs = llm.generate(["the end", "in"], [GREEDY, RICH], use_tqdm=False)
    assert [bool(output.outputs[0].logprobs) for output in outputs] == [False, True]
    poor, rich = pickle.loads(pickle.dumps(outputs))
    rows = [row for one in rich["completions"] for row in one["logprobs"]]
    assert vars(poor)["_texts"] == {}
    assert vars(rich)["_texts"].keys() == {token for row in rows for token in row}


def test_a_jobs_outputs_are_plain_dicts(llm):
    """They may go to another process, where nobody reads attributes."""
    worker = Worker(llm)
    assert worker.add([Request(1, [7, 8], RICH)]) == []
    ended = []
    while not ended:
        ended = worker.step()
    ((_, output),) = ended
    assert type(output) is dict and len(output["completions"]) == 3


def test_an_attribute_cannot_be_set_in_vain(llm):
    (output,) = llm.generate(["the"], GREEDY, use_tqdm=False)
    with pytest.raises(AttributeError):
        output.outputs[0].text = "other"
    with pytest.raises(AttributeError):
        output.prompt_token_ids = [1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_have_transformers_values_ranks_and_texts(llm, plain, tokenizer, count):
    params = SamplingParams(
        temperature=1.5,
        seed=5,
        max_tokens=8,
        logprobs=count,
        prompt_logprobs=count,
        ignore_eos=True,
    )
    (output,) = llm.generate([[7, 8, 9]], params, use_tqdm=False)
    (completion,) = output.outputs
    assert output.prompt_logprobs[0] is None
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    tokens, unranked = [7], 0
    for token, row in zip([8, 9, *completion.token_ids], rows, strict=True):
        expected = plain.logits(tokens).log_softmax(-1)
        best = expected.argsort(descending=True).tolist()
        assert set(row) == {token, *best[:count]}
        for i, one in row.items():
            assert isinstance(one, Logprob)
            assert one.logprob == pytest.approx(expected[i].item(), abs=1e-4)
            assert one.decoded_token == tokenizer.decode([i])
            assert one.rank == (best.index(i) + 1 if i in best[:count] else None)
        unranked += token not in best[:count]
        tokens.append(token)
    assert unranked


def test_special_tokens_have_a_text_in_logprobs(llm, tokenizer):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    (output,) = llm.generate(["the"], params, use_tqdm=False)
    assert output._texts[257] == "<|user|>" == tokenizer.decode([257])


def test_what_only_some_dicts_have_is_an_attribute_too():
    values = {
        "prompt_token_ids": [7, 8],
        "num_cached_tokens": 0,
        "prompt_logprobs": [None, {8: -3.0, 9: -0.5}],
        "text": "a",
        "token_ids": [4],
        "finish_reason": "stop",
        "stop_reason": 4,
        "cumulative_logprob": -0.25,
        "logprobs": [{4: -0.25}],
    }
    output = RequestOutput(
        values,
        request_id="3",
        prompt=None,
        texts={token: str(token) for token in range(20)},
        logprobs=1,
        prompt_logprobs=1,
    )
    (one,) = output.outputs
    assert (one.stop_reason, one.cumulative_logprob) == (4, -0.25)
    assert one.logprobs == [{4: Logprob(-0.25, 1, "4")}]
    assert output.prompt_logprobs == [
        None,
        {8: Logprob(-3.0, None, "8"), 9: Logprob(-0.5, 1, "9")},
    ]
    assert "prompt_logprobs" not in one


def test_without_a_tokenizer_the_texts_are_none(tmp_path):
    with make_llm(make_folder(tmp_path, tokenizer=False)) as llm:
        (output,) = llm.generate([[7]], SamplingParams(logprobs=1, max_tokens=1), use_tqdm=False)
        (row,) = output.outputs[0].logprobs
        assert {one.decoded_token for one in row.values()} == {None} and output.prompt is None
        with pytest.raises(ValueError, match="no tokenizer: add tokenizer.json"):
            llm.get_tokenizer()


def test_get_tokenizer_gives_transformers(llm, tokenizer):
    own = llm.get_tokenizer()
    assert own is llm.tokenizer and type(own) is type(tokenizer)
    assert own.encode("the end") == tokenizer.encode("the end")
    assert own.eos_token_id == tokenizer.eos_token_id


# What is not here

CALLS = {
    "LLM": lambda llm, **values: Config.from_options("a folder", values),
    "SamplingParams": lambda llm, **values: SamplingParams(**values),
    "generate": lambda llm, **values: llm.generate("the", GREEDY, use_tqdm=False, **values),
    "chat": lambda llm, **values: llm.chat(CHAT, GREEDY, use_tqdm=False, **values),
    "prompt": lambda llm, **values: llm.generate(
        {"prompt": "the", **values}, GREEDY, use_tqdm=False
    ),
    "StructuredOutputsParams": lambda llm, **values: StructuredOutputsParams(regex="a", **values),
    "wake_up": lambda llm, **values: llm.wake_up(**values),
    "a line": lambda llm, **values: NativeFormat(DEFAULTS).parse(1, {"prompt": "a", **values}),
    "body": lambda llm, **values: OpenAIFormat(DEFAULTS, "m", 0).parse(
        1, {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", **values}}
    ),
}
DEFAULTS = Defaults(SamplingParams(), seed=0)
FOREIGN = {
    "LLM": OF_SAMPLING_PARAMS | foreign_names.OPTIONS,
    "SamplingParams": foreign_names.PARAMETERS,
    "generate": OF_SAMPLING_PARAMS | foreign_names.IN_GENERATE,
    "chat": OF_SAMPLING_PARAMS | foreign_names.IN_CHAT,
    "prompt": foreign_names.IN_PROMPT,
    "StructuredOutputsParams": foreign_names.IN_FORM,
    "wake_up": foreign_names.IN_WAKE_UP,
    "a line": foreign_names.IN_LINE,
    "body": foreign_names.IN_LINE,
}
ATTRIBUTES = {"LLM": foreign_names.OF_LLM, "RequestOutput": foreign_names.OF_OUTPUT}
# Some names have a meaning of their own in one of the places.
OWN = [("LLM", "seed"), *[("body", name) for name in ("best_of", "tools", *OWN_FIELDS)]]
NAMES = [(owner, name) for owner, names in FOREIGN.items() for name in names]
NAMES = [pair for pair in NAMES if pair not in OWN]


@pytest.mark.parametrize("owner, name", NAMES)
def test_a_name_of_others_that_is_not_here_is_refused_with_a_remedy(llm, owner, name):
    value, remedy = object(), FOREIGN[owner][name].remedy
    place = "prompts[0]" if owner == "prompt" else owner
    message = rf"^{re.escape(place)} has no \w+ '{name}', given <object .*>: {re.escape(remedy)}$"
    with pytest.raises(TypeError, match=message):
        CALLS[owner](llm, **{name: value})
    check_empty(llm)


@pytest.mark.parametrize("owner", FOREIGN)
def test_values_that_ask_for_what_is_done_anyway_change_nothing(llm, owner):
    usual = CALLS[owner](llm)
    usual = completed(usual) if isinstance(usual, list) else usual
    for name, foreign in FOREIGN[owner].items():
        assert not foreign.harmless or None in foreign.harmless
        for value in foreign.harmless:
            same = CALLS[owner](llm, **{name: value})
            assert (completed(same) if isinstance(same, list) else same) == usual


def test_a_value_that_another_name_has_too_changes_nothing(llm):
    asked = {"tokenizer": "a folder", "max_model_len": 100, "max_seq_len_to_capture": 100}
    assert Config.from_options("a folder", asked) == Config("a folder", max_model_len=100)
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    with pytest.raises(TypeError, match="'best_of', given 4: use n"):
        SamplingParams(n=3, best_of=4)
    with pytest.raises(
        TypeError, match="'tokenizer', given 'b': leave it out if it is the model's"
    ):
        Config.from_options("a folder", {"tokenizer": "b"})


def test_none_is_the_default_of_an_option_that_has_no_none_of_its_own():
    """As vLLM takes it."""
    usual = Config("a folder")
    for name, declared in options_of(Config).items():
        if name != "model":
            config = Config.from_options("a folder", {name: None})
            expected = None if declared.takes_none else getattr(usual, name)
            assert getattr(config, name) == expected
    assert Config.from_options("a folder", {"load_format": "safetensors"}) == usual
    with pytest.raises(TypeError, match="max_num_seqs is 'None': use an integer"):
        Config.from_options("a folder", {"max_num_seqs": "None"})


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "half", "float"])
def test_a_dtype_may_be_pytorchs_own_or_its_other_name(name):
    dtype = getattr(torch, name)
    known = str(dtype).removeprefix("torch.")
    for given in (name, dtype, str(dtype)):
        assert Config("a folder", dtype=given) == Config("a folder", dtype=known)
    with pytest.raises(ValueError, match="dtype is 'int8': use one of 'auto', 'float32'"):
        Config("a folder", dtype=torch.int8)


def test_without_max_model_len_a_request_may_be_as_long_as_the_model_takes(folder, tmp_path):
    longer = shutil.copytree(folder, tmp_path / "longer")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 5000}
    (longer / "config.json").write_text(json.dumps(config))
    with make_llm(longer, max_model_len=None, num_kvcache_blocks=313) as llm:
        assert llm.max_model_len == 5000
        with pytest.raises(ValueError, match="5000 tokens, the model itself takes 5000 of prompt"):
            llm.generate([[7] * 5000], GREEDY, use_tqdm=False)
        (output,) = llm.generate([[7] * 4999], GREEDY, use_tqdm=False)
        assert len(output["token_ids"]) == 1


def test_a_harmless_value_is_told_from_one_that_equals_it():
    for value in (0, 1, 0.0):
        with pytest.raises(TypeError, match="'trust_remote_code', given .*: leave it out"):
            Config.from_options("a folder", {"trust_remote_code": value})


def test_disable_custom_all_reduce_stands_for_symmetric_memory():
    for own in ({}, {"symmetric_memory": False}):
        given = {"disable_custom_all_reduce": True, **own}
        assert Config.from_options("a", given) == Config("a", symmetric_memory=False)
        given = dict(reversed(given.items()))
        assert Config.from_options("a", given) == Config("a", symmetric_memory=False)
    for value in (1, "True", True):
        given = {"disable_custom_all_reduce": value, "symmetric_memory": True}
        with pytest.raises(TypeError, match="'disable_custom_all_reduce', given .*: use symmetr"):
            Config.from_options("a", given)


OWN_NAMES = {
    "LLM": {field.name for field in fields(Config)},
    "SamplingParams": {field.name for field in fields(SamplingParams)},
    "generate": set(inspect.signature(LLM.generate).parameters),
    "chat": set(inspect.signature(LLM.chat).parameters),
    "prompt": {"prompt", "prompt_token_ids"},
}


def test_a_size_of_the_batch_is_said_to_be_max_num_seqs():
    for name in ("max_batch_size", "batch_size", "max_running_requests"):
        with pytest.raises(TypeError, match=f"no option '{name}', given 8: use max_num_seqs"):
            Config.from_options("a folder", {name: 8})


@pytest.mark.parametrize("kind", ["json", "json_object", "regex", "choice", "grammar"])
def test_a_form_in_older_or_shorter_words_hears_of_structured_outputs(llm, kind):
    remedy = re.escape(f"use structured_outputs={{'{kind}': ...}}")
    for name in (f"guided_{kind}", kind):
        with pytest.raises(TypeError, match=f"^SamplingParams has no parameter.*: {remedy}$"):
            SamplingParams(**{name: "a"})
    with pytest.raises(TypeError, match=f"^generate has no.*: in SamplingParams, {remedy}$"):
        llm.generate("the", **{f"guided_{kind}": "a"})
    with pytest.raises(TypeError, match=f"^a line has no.*: {remedy}$"):
        NativeFormat(DEFAULTS).parse(1, {"prompt": "a", f"guided_{kind}": "a"})


def test_what_a_remedy_tells_to_use_is_there():
    known = set.union(*OWN_NAMES.values(), vars(LLM))
    told = 0
    for owner, name in NAMES:
        for use in re.findall(r"\buse '?([a-z_]+)", FOREIGN[owner][name].remedy):
            assert use in known, (owner, name)
            told += 1
    assert told > 20


def test_the_remedies_for_chats_work(llm):
    template = "{{ messages[0].content }}{% if tools %}{{ tools | length }}{% endif %}"
    options = {"chat_template": template, "tools": [{"type": "function", "function": {}}]}
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template_kwargs=options)
    assert output.prompt == "in the end1"
    options = {"continue_final_message": True, "add_generation_prompt": False}
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template_kwargs=options)
    assert output.prompt == "<|user|>in the end"


def test_use_tqdm_may_be_what_makes_the_bar(llm):
    bars = []

    def make(**options):
        bars.append(tqdm(**options, file=StringIO()))
        return bars[-1]

    llm.generate(["the", "in"], GREEDY, use_tqdm=make)
    llm.chat(CHAT, GREEDY, use_tqdm=make)
    llm.score([[7], [8]], [[8], [9]], use_tqdm=make)
    assert [(bar.n, bar.total) for bar in bars] == [(2, 2), (1, 1), (2, 2)]


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_an_unknown_argument_names_the_nearest(llm, call):
    with pytest.raises(TypeError, match=f"{call} has no argument 'use_tdqm': did you mean use_tqd"):
        getattr(llm, call)("the", use_tdqm=False)


def test_attributes_of_vllm_that_mean_something_here_are_there(llm):
    (output,) = llm.generate("the", RICH, use_tqdm=False)
    assert output.lora_request is None and output.outputs[0].lora_request is None
    assert all([completion.finished() is True for completion in output.outputs])
    assert GREEDY.clone() == GREEDY
    # What is forgotten is computed again.
    prompt = [7] * 40
    held = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert held[1] > 0 and llm.reset_prefix_cache() is True
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    request = llm.add_request("the", GREEDY)
    with pytest.raises(ValueError, match="reset_prefix_cache was called while requests are unfin"):
        llm.reset_prefix_cache()
    llm.abort(request)
    llm.sleep()
    assert llm.reset_prefix_cache()
    llm.wake_up()


@pytest.mark.parametrize(
    "owner, name", [(owner, name) for owner, names in ATTRIBUTES.items() for name in names]
)
def test_attributes_of_vllm_that_are_not_here_say_what_to_do_instead(llm, owner, name):
    (output,) = llm.generate("the", GREEDY, use_tqdm=False)
    one = {"LLM": llm, "RequestOutput": output}[owner]
    with pytest.raises(AttributeError) as raised:
        getattr(one, name)
    assert str(raised.value) == f"{owner} has no attribute '{name}': {ATTRIBUTES[owner][name]}"
    assert not hasattr(one, name) and getattr(one, name, 5) == 5


def test_an_unknown_attribute_is_an_attribute_error(llm):
    (output,) = llm.generate("the", GREEDY, use_tqdm=False)
    for one, name in ((llm, "LLM"), (output, "RequestOutput"), (output.outputs[0], "Completion")):
        with pytest.raises(AttributeError, match=f"^{name}.* has no attribute 'other'$"):
            getattr(one, "other")  # noqa: B009


# The table of the guide

GUIDE = (Path(nanovllm.__file__).parent / "docs" / "guide.md").read_text()
TABLE = GUIDE.split("| of vLLM | works here |")[1].split("\n", 1)[1].split("\n\n")[0]
ROWS = {
    name: [re.findall(r"`(\w+)`", cell) for cell in cells]
    for name, *cells in (line.strip("| ").split(" | ") for line in TABLE.splitlines()[1:])
}
OWNERS = {
    "`LLM(...)`": "LLM",
    "`SamplingParams(...)`": "SamplingParams",
    "`generate(...)`": "generate",
    "`chat(...)`": "chat",
    "prompts": "prompt",
}


@pytest.mark.parametrize("row", OWNERS)
def test_what_the_table_says_is_here_is_here_and_the_rest_is_refused(row):
    here, refused = ROWS[row]
    assert here and set(here) <= OWN_NAMES[OWNERS[row]]
    if options := {"LLM": Config, "SamplingParams": SamplingParams}.get(OWNERS[row]):
        defaults = {field.name: field.default for field in fields(options)} | {"model": "a folder"}
        assert options(**{name: defaults[name] for name in here})
    assert refused and set(refused) <= FOREIGN[OWNERS[row]].keys()


def test_the_attributes_and_methods_that_the_table_names_are_there(llm):
    (output,) = llm.generate("the", RICH, use_tqdm=False)
    owners = {"outputs": output, "of these `outputs`": output.outputs[0], "methods": llm}
    assert ROWS.keys() == OWNERS.keys() | owners.keys()
    for row, owner in owners.items():
        names, *others = ROWS[row]
        refused = [name for cell in others for name in cell]
        assert len(names) > 2 and all(hasattr(owner, name) for name in names)
        assert set(refused) <= ATTRIBUTES.get(type(owner).__name__, {}).keys()


@pytest.mark.parametrize("name", ["beam_search", "embed", "classify", "reward", "collective_rpc"])
def test_methods_that_are_said_not_to_be_here_are_not(name):
    assert f"`{name}`" in GUIDE.split(" There is no ")[1].split("\n\n")[0]
    assert not hasattr(LLM, name)
