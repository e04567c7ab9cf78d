"""Text to token ids and back without transformers, where that is the same; else with it."""

import json
import subprocess
import sys

import pytest
from call_helpers import make_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import TINY_MODEL
from nanovllm.frontend.tokenizer import load_tokenizer
from nanovllm.frontend.tokenizer_json import QWEN_WORDS
from nanovllm.weights.hf_config import load_eos_ids

TEXTS = [
    "def read(path):\n    return open(path)",
    "the naïve 你好 🙂 <|im_end|>the\n\nend  <think> x",
    "",
    " ",
]


def save_qwen(folder, words=QWEN_WORDS):
    """A tokenizer of Qwen's kind: special tokens, and added ones that are text."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    cut, to_bytes = (
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    change_config(folder, tokenizer_class="Qwen2Tokenizer")


def save_bytes(folder):
    """A token for each byte."""
    make_tokenizer().save_pretrained(folder)
    # Transformers 4 does not write it.
    change_config(folder, tokenizer_class="PreTrainedTokenizerFast")


def change_config(folder, **values):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_same(folder, *, plain: bool):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours._plain is not None) == plain
    ids = ours.encode("prompts", TEXTS)
    assert ids == theirs(TEXTS)["input_ids"]
    assert (
        ours.encode("prompts", TEXTS, special_tokens=False)
        == theirs(TEXTS, add_special_tokens=False)["input_ids"]
    )
    assert ours.decode(ids) == [theirs.decode(one, skip_special_tokens=True) for one in ids]
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.has_chat_template == bool(theirs.chat_template)
    return ours


@pytest.mark.parametrize("make", [save_qwen, save_bytes])
def test_a_plain_tokenizer_is_read_without_transformers(tmp_path, make):
    make(tmp_path)
    tokenizer = assert_same(tmp_path, plain=True)
    chat = [{"role": "user", "content": "hello"}]
    want = tokenizer.transformers.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_chats([chat], {})[1] == [want]


def test_padding_and_truncation_that_were_saved_do_not_count(tmp_path):
    save_bytes(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_padding(length=100)
    backend.enable_truncation(5)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert_same(tmp_path, plain=True)


def add_bos(folder):
    """Something that is put before each text."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<|user|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))


def test_the_file_may_put_tokens_around_a_text(tmp_path):
    save_bytes(tmp_path)
    add_bos(tmp_path)
    assert len(assert_same(tmp_path, plain=True).encode("prompts", [""])[0]) == 1


def test_a_qwen_tokenizer_that_cuts_otherwise_is_left_to_transformers(tmp_path):
    save_qwen(tmp_path, words=r"\s+")
    assert_same(tmp_path, plain=False)


@pytest.mark.parametrize(
    "values",
    [
        {"add_bos_token": True, "bos_token": "<|user|>"},
        {"pad_token": "<|a token that the file lacks|>"},
        {"pad_token": "a"},  # in the vocabulary, but no special token yet
        {"additional_special_tokens": ["<|another|>"]},
        {"split_special_tokens": True},
        {
            "added_tokens_decoder": {
                "256": {"content": "<|end|>", "special": True, "lstrip": True, "rstrip": True}
            }
        },
    ],
    ids=str,
)
def test_what_the_configuration_adds_is_left_to_transformers(tmp_path, values):
    save_bytes(tmp_path)
    change_config(tmp_path, **values)
    assert_same(tmp_path, plain=False)


def test_an_older_file_of_special_tokens_is_left_to_transformers(tmp_path):
    save_bytes(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    assert_same(tmp_path, plain=False)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|end|>", "lstrip": false}}'
    )
    assert_same(tmp_path, plain=True)


@pytest.mark.parametrize("text", ["{{ messages }}", ""])
def test_a_template_in_a_file_of_its_own_counts_unless_it_is_empty(tmp_path, text):
    save_bytes(tmp_path)
    change_config(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text(text)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "a processor\'s"}')
    assert assert_same(tmp_path, plain=True).has_chat_template == bool(text)


@pytest.mark.parametrize("plain", [True, False])
def test_half_a_character_is_refused_by_name(tmp_path, plain):
    save_bytes(tmp_path)
    if not plain:
        change_config(tmp_path, split_special_tokens=True)
    with pytest.raises(
        ValueError,
        match=r"prompts\[1\] is 'a\\ud800', which holds half a character: decode it with",
    ):
        load_tokenizer(tmp_path).encode("prompts", ["fine", "a\ud800"])


@pytest.mark.parametrize(
    "values",
    ['{"eos_token_id": "0"}', '{"eos_token_id": [1, -1]}', '{"eos_token_id": [[0]]}', "[]"],
)
def test_an_end_of_sequence_that_is_no_token_id_is_refused(tmp_path, values):
    (tmp_path / "generation_config.json").write_text(values)
    with pytest.raises(ValueError, match="generation_config.json"):
        load_eos_ids(tmp_path)


def test_generating_text_does_not_import_transformers():
    code = """
import sys
from nanovllm import LLM, TINY_MODEL, SamplingParams
with LLM(TINY_MODEL) as llm:
    (output,) = llm.generate("import", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output["text"] and llm.has_chat_template and "transformers" not in sys.modules
    assert llm.tokenizer.decode(output["token_ids"]) and "transformers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tiny_models_tokenizer_is_plain():
    assert_same(TINY_MODEL, plain=True)


@pytest.mark.parametrize(
    "model_type", [None, "qwen2", "qwen2_moe", "qwen3", "llama", "mistral", "t5"]
)
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
@pytest.mark.parametrize("make", [save_qwen, save_bytes])
def test_ids_are_those_of_the_class_that_transformers_makes(tmp_path, make, kind, model_type):
    make(tmp_path)
    change_config(tmp_path, tokenizer_class=kind)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    as_in_file = kind != "Qwen2Tokenizer" and model_type in (None, "qwen3", "llama", "mistral")
    assert_same(tmp_path, plain=make is save_qwen or as_in_file)


def test_a_type_that_brings_its_own_tokenizer_gives_other_ids_than_the_file(tmp_path):
    """Or the test above would not tell one from the other."""
    save_qwen(tmp_path, words=r"\s+")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    change_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = assert_same(tmp_path, plain=False)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("prompts", TEXTS) != [file.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("changes", [{"end_of_word_suffix": "</w>"}, {"dropout": 0.999}], ids=str)
def test_what_a_qwen_tokenizer_drops_of_its_file_is_left_to_transformers(tmp_path, changes):
    save_qwen(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"] |= changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert_same(tmp_path, plain=False)


def test_a_panic_of_the_tokenizers_package_is_a_value_error(tmp_path):
    save_bytes(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["continuing_subword_prefix"] = "##"  # which no token has
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded, download it again"):
        load_tokenizer(tmp_path)
