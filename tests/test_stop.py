"""When a request ends: at an end-of-sequence token wherever the model's folder names it, or at a
length.
"""

import json
import shutil

import pytest
from engine_helpers import PROMPTS, assert_greedy, greedy, save_tokenizer

PROMPT = PROMPTS[4]


@pytest.fixture
def output(checkpoint):
    """The greedy output; its first four tokens differ."""
    tokens = checkpoint.expected(PROMPT, 12)
    assert len(set(tokens[:4])) == 4
    return tokens


@pytest.fixture
def make_stopping_llm(make_llm, checkpoint, tmp_path):
    """A function: end-of-sequence ids as each file names them -> an LLM."""

    def make(*, generation_config=None, config=None, tokenizer=None, **options):
        folder = shutil.copytree(checkpoint.folder, tmp_path / "model")
        for name, eos in (("generation_config.json", generation_config), ("config.json", config)):
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(content | {"eos_token_id": eos}))
        if tokenizer is not None:
            save_tokenizer(folder, eos_token=str(tokenizer))
        return make_llm(folder, **options)

    return make


def generate(llm, params):
    (answer,) = llm.generate([PROMPT], params, use_tqdm=False)
    return answer["token_ids"], answer["finish_reason"]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_of_sequence_token_ends_the_output_with_itself(make_stopping_llm, output, overlap):
    llm = make_stopping_llm(generation_config=output[2], overlap=overlap)
    assert generate(llm, greedy(12, ignore_eos=False)) == (output[:3], "stop")


def test_any_of_several_end_of_sequence_tokens_ends_the_output(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=[output[3], output[1]])
    assert generate(llm, greedy(12, ignore_eos=False)) == (output[:2], "stop")


def test_the_generation_config_goes_before_the_model_config(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=output[2], config=output[1])
    assert generate(llm, greedy(12, ignore_eos=False)) == (output[:3], "stop")


def test_the_model_config_counts_where_there_is_no_other(make_stopping_llm, output):
    llm = make_stopping_llm(config=output[1])
    assert generate(llm, greedy(12, ignore_eos=False)) == (output[:2], "stop")


def test_the_tokenizers_end_of_sequence_counts_too(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=output[2], tokenizer=output[1])
    assert generate(llm, greedy(12, ignore_eos=False)) == (output[:2], "stop")


def test_ignore_eos_goes_on_past_the_end_of_sequence(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=output[2])
    assert generate(llm, greedy(12, ignore_eos=True)) == (output, "length")


def test_an_end_of_sequence_token_as_the_last_one_counts_as_a_stop(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=output[2])
    assert generate(llm, greedy(3, ignore_eos=False)) == (output[:3], "stop")


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing(make_stopping_llm, output):
    llm = make_stopping_llm(generation_config=PROMPT[3])
    assert PROMPT[3] not in output
    assert generate(llm, greedy(12, ignore_eos=False)) == (output, "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_max_model_len_ends_the_output_at_a_length(make_llm, checkpoint, overlap):
    llm = make_llm(max_model_len=len(PROMPT) + 7, overlap=overlap)
    assert generate(llm, greedy(100)) == (checkpoint.expected(PROMPT, 7), "length")


def test_the_models_own_limit_holds_where_it_is_lower(
    make_stopping_llm, make_llm, checkpoint, tmp_path
):
    folder = shutil.copytree(checkpoint.folder, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": len(PROMPT) + 5})
    )
    llm = make_llm(folder, max_model_len=4096)
    assert generate(llm, greedy(100)) == (checkpoint.expected(PROMPT, 5), "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_each_request_ends_at_its_own_length(make_llm, checkpoint, overlap):
    llm = make_llm(overlap=overlap)
    answers = llm.generate(
        PROMPTS[:6], [greedy(count) for count in (1, 2, 16, 17, 5, 1)], use_tqdm=False
    )
    assert [len(answer["token_ids"]) for answer in answers] == [1, 2, 16, 17, 5, 1]
    assert_greedy(llm, checkpoint, PROMPTS[:6], max_tokens=1)
