"""The model for lm-evaluation-harness, beside the harness's own one on transformers."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from eval_helpers import (
    CHAT_TEMPLATE,
    CODE,
    assert_same,
    evaluate,
    near,
    write_tasks,
)
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nanovllm import TINY_MODEL, SamplingParams
from nanovllm.apps.lm_eval import NanovllmLM

ROOT = Path(__file__).parent.parent
LENGTH = 128  # tokens: the longest texts have more
OPTIONS = dict(max_model_len=LENGTH, device="cpu", kvcache_block_size=16)
# Its cache of logits mixes up texts whose tokens are the same but are cut elsewhere.
HF_OPTIONS = dict(
    max_length=LENGTH, device="cpu", dtype="float32", batch_size=4, logits_cache=False
)


def copy_model(folder: Path, tokenizer) -> Path:
    """The tiny model with another tokenizer."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(TINY_MODEL / name)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The tiny model with a chat template; and one whose texts begin with a token of their own,
    and which says special tokens besides its end of sequence.
    """
    root = tmp_path_factory.mktemp("models")
    plain, special = (AutoTokenizer.from_pretrained(TINY_MODEL) for _ in range(2))
    plain.chat_template = CHAT_TEMPLATE
    special.add_special_tokens({"bos_token": "yield", "additional_special_tokens": ["self"]})
    special.backend_tokenizer.post_processor = TemplateProcessing(
        single="yield $A", special_tokens=[("yield", special.bos_token_id)]
    )
    special.chat_template = "yield" + CHAT_TEMPLATE
    return {
        "plain": copy_model(root / "plain", plain),
        "special": copy_model(root / "special", special),
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), [*CODE, "".join(CODE)])


@pytest.fixture(scope="module")
def get_hf(folders):
    """A function: the name of a model -> the harness's own model of it."""
    made: dict[str, HFLM] = {}

    def get(name: str) -> HFLM:
        if name not in made:
            made[name] = HFLM(str(folders[name]), **HF_OPTIONS)
        return made[name]

    return get


@pytest.fixture(scope="module")
def get_model(folders):
    """A function: the name of a model -> this library's."""
    made: dict[str, NanovllmLM] = {}

    def get(name: str) -> NanovllmLM:
        if name not in made:
            made[name] = NanovllmLM(str(folders[name]), **OPTIONS)
        return made[name]

    yield get
    for model in made.values():
        model.llm.close()


def requests(*arguments: tuple) -> list[Instance]:
    return [Instance("", {}, one, i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("chat", [False, True], ids=["texts", "chats"])
@pytest.mark.parametrize("name", ["plain", "special"])
def test_tasks_get_the_answers_of_the_harness_own_model(name, chat, get_model, get_hf, tasks):
    """Some texts are longer than the model takes: they lose their beginning, or are windows."""
    how = dict(num_fewshot=2, apply_chat_template=chat, fewshot_as_multiturn=chat)
    assert_same(evaluate(get_model(name), tasks, **how), evaluate(get_hf(name), tasks, **how))


def test_empty_contexts_get_the_answers_of_the_harness_own_model(get_model, get_hf):
    asked = requests(("", "import os"), ("", "yield x"), ("import ", "os"), ("x = 1  ", " # "))
    for name in ("plain", "special"):
        assert near(get_model(name).loglikelihood(asked), get_hf(name).loglikelihood(asked))
        rolled = [get(name).loglikelihood_rolling(requests(("",))) for get in (get_model, get_hf)]
        assert near(*rolled)


def test_the_command_line_has_the_model(folders, tasks, tmp_path, get_hf):
    options = f"pretrained={folders['plain']},max_model_len={LENGTH},kvcache_block_size=16"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "nanovllm.apps.lm_eval", "--model", "nanovllm"),
            *(
                "--model_args",
                f"{options},dtype=float32,enable_prefix_caching=false,scheduling_policy=fcfs",
            ),
            *("--tasks", "choices,completions", "--include_path", str(tasks)),
            *("--batch_size", "auto", "--max_batch_size", "4", "--apply_chat_template"),
            *("--output_path", str(tmp_path), "--use_cache", str(tmp_path / "cache")),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.rglob("results_*.json")
    told = json.loads(file.read_text())
    assert told["chat_template"] == CHAT_TEMPLATE
    expected = evaluate(get_hf("plain"), tasks, apply_chat_template=True)["results"]
    for task, metric in [
        ("choices", "acc,none"),
        ("choices", "acc_norm,none"),
        ("completions", "exact_match,none"),
    ]:
        assert near(told["results"][task][metric], expected[task][metric]), metric


def test_the_package_tells_the_harness_of_the_model():
    """Releases of the harness that look for entry points know the model without an import."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."lm_eval\.models"\]\n(\w+) = "(.*)"', text)
    assert EntryPoint(*found.groups(), "lm_eval.models").load() is NanovllmLM
    assert found[1] == "nanovllm"


def test_arguments_of_a_string_reach_the_llm_with_their_types(folders):
    text = f"pretrained={folders['plain']},max_model_len=64,enable_prefix_caching=false,seed=3"
    given = dict(batch_size="auto:4", max_batch_size=None, device="cpu")
    model = NanovllmLM.create_from_arg_string(f"{text},trust_remote_code=true", given)
    with model.llm:
        assert model.llm.max_model_len == model.max_length == 64
        assert not model.llm.engine.scheduler.blocks.enable_prefix_caching
    with pytest.raises(TypeError, match="max_model_length.*max_model_len"):
        NanovllmLM.create_from_arg_string(f"{text},max_model_length=64", given)


@pytest.mark.parametrize(
    "asked, params",
    [
        ({}, dict(temperature=0.0, max_tokens=20)),
        (dict(max_gen_toks=5, num_beams=1), dict(temperature=0.0, max_tokens=5)),
        (dict(do_sample=False, temperature=0.7), dict(temperature=0.0, max_tokens=20)),
        (dict(temperature=0.7, seed=3), dict(temperature=0.7, seed=3, max_tokens=20)),
        (
            dict(do_sample=True, temperature=1.5, top_p=0.9, top_k=9, seed=3, max_new_tokens=12),
            dict(temperature=1.5, top_p=0.9, top_k=9, seed=3, max_tokens=12),
        ),
        (dict(until="\n"), dict(temperature=0.0, stop="\n", max_tokens=20)),
        (dict(until=["", ")", "\n\n"]), dict(temperature=0.0, stop=[")", "\n\n"], max_tokens=20)),
    ],
)
def test_generation_kwargs_are_sampling_parameters(asked, params, get_model, monkeypatch):
    model = get_model("plain")
    monkeypatch.setattr(model, "max_gen_toks", 20)
    (text,) = model.generate_until(requests(("def main(", asked)), disable_tqdm=True)
    (output,) = model.llm.generate("def main(", SamplingParams(**params), use_tqdm=False)
    assert text == output["text"] != ""


def test_a_special_token_among_the_stop_strings_ends_the_output(get_model, get_hf):
    """Though no text shows it."""
    asked = requests(("class Stack:\n    def __init__(", dict(until=["self"], max_gen_toks=50)))
    model = get_model("special")
    assert model.generate_until(asked) == get_hf("special").generate_until(asked)
    assert model.llm.metrics()["last_call"]["output_tokens"] < 10


def test_thoughts_are_left_out_and_templates_take_arguments(folders, get_model):
    how = dict(think_end_token="(", enable_thinking=True, chat_template_args={"effort": "low"})
    hf = HFLM(str(folders["plain"]), **HF_OPTIONS, **how)
    model = NanovllmLM(str(folders["plain"]), **OPTIONS, **how)
    with model.llm:
        asked = requests(("def read_lines", dict(until=[], max_gen_toks=9)))
        (text,) = model.generate_until(asked)
        assert [text] == hf.generate_until(asked) != get_model("plain").generate_until(asked)
        chat = [dict(role="user", content="Hi")]
        assert model.apply_chat_template(chat) == hf.apply_chat_template(chat)
        assert model.apply_chat_template(chat).endswith("# thought: low ")
        chat.append(dict(role="assistant", content="Well"))
        written = model.apply_chat_template(chat, add_generation_prompt=False)
        assert written == hf.apply_chat_template(chat, add_generation_prompt=False)
        assert written.endswith("Well")


def test_a_template_without_a_system_role_does_without_it(get_model):
    model, user = get_model("plain"), dict(role="user", content="Hi")
    both = [dict(role="system", content="Be kind."), user]
    assert model.apply_chat_template(both) == model.apply_chat_template([user])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(TINY_MODEL / name)
    with pytest.raises(ValueError, match="folder has no tokenizer: add tokenizer.json"):
        NanovllmLM(str(tmp_path), **OPTIONS)


@pytest.mark.parametrize(
    "asked, error, words",
    [
        (dict(max_gen_toks=LENGTH), ValueError, "max_gen_toks is 128.*max_model_len"),
        (dict(max_gen_toks=9, num_beams=4), TypeError, "num_beams"),
        (dict(max_gen_toks=9, top_p=2.0), ValueError, "top_p is 2.0"),
    ],
)
def test_what_cannot_be_generated_is_refused(asked, error, words, get_model):
    with pytest.raises(error, match=words):
        get_model("plain").generate_until(requests(("x =", asked)))


def test_a_continuation_longer_than_the_model_takes_is_refused(get_model):
    with pytest.raises(ValueError, match="max_model_len is 128: raise it"):
        get_model("plain").loglikelihood(requests(("x =", " 1" * 200)))
