"""Text to token ids and back without transformers, where that is the same; else with it."""

import json
import subprocess
import sys
import unicodedata

import pytest
from call_helpers import make_folder, make_llm, make_tokenizer
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
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3_5Config

from nanovllm import TINY_MODEL, SamplingParams
from nanovllm.apps.jobs.formats import Request
from nanovllm.apps.jobs.worker import Worker
from nanovllm.frontend import tokenizer as tokenizer_module
from nanovllm.frontend.token_bytes import COMPOSED, most_bytes
from nanovllm.frontend.tokenizer import Tokenizer as TextTokenizer
from nanovllm.frontend.tokenizer import load_tokenizer
from nanovllm.frontend.tokenizer_json import QWEN_WORDS
from nanovllm.weights.model_files import load_eos_ids

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


def test_the_end_of_sequence_of_a_model_that_also_sees_is_that_of_transformers(tmp_path):
    config = Qwen3_5Config(text_config={"eos_token_id": [5, 7]})
    config.save_pretrained(tmp_path)
    assert "eos_token_id" not in json.loads((tmp_path / "config.json").read_text())
    expected = GenerationConfig.from_model_config(config).eos_token_id
    assert load_eos_ids(tmp_path) == frozenset(expected) == {5, 7}


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


def save_bytes_in_words(folder):
    """In the style of Llama 2: blanks are a character of their own, unknown ones are bytes."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
    backend = Tokenizer(
        models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>").save_pretrained(folder)


def save_with_blanks(folder):
    """With a token that takes the blanks beside it, as Phi-3's do."""
    save_bytes(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    change_config(folder, tokenizer_class="PreTrainedTokenizerFast")


DENSE = [
    "\u212a" * 99,  # a sign of three bytes, which becomes a letter of one
    "\u1fbe\u0308\u0301" * 99,
    "\u1112\u1161\u11ab" * 99,
    "<|wide|>" + " \n" * 999,
    "<|im_end|>" * 99,
    " the" * 99,
    "\U0001f642" * 99,
    " " * 999,
    "\x1c\x85\u2003" * 99,
]


@pytest.mark.parametrize("make", [save_qwen, save_bytes, save_bytes_in_words, save_with_blanks])
def test_no_text_has_fewer_tokens_than_its_bytes_say(tmp_path, make):
    make(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = [*DENSE, *TEXTS, "ab " * 2000]
    for text, ids in zip(texts, tokenizer.encode("prompts", texts)):
        assert tokenizer.fewest_tokens(text) <= len(ids)
    assert tokenizer.fewest_tokens("ab " * 2000) > 50


def test_composed_text_has_at_least_a_quarter_of_the_bytes():
    """Over all characters that Unicode composes of others, each in its longest form."""
    characters = [chr(i) for i in range(0x30000) if not 0xD800 <= i < 0xE000]
    parts = {c: unicodedata.normalize("NFD", c) for c in characters}
    longest: dict[str, int] = {}
    for c, decomposed in parts.items():
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(c.encode()))
    for c, decomposed in parts.items():
        assert sum(longest[part] for part in decomposed) <= COMPOSED * len(c.encode())


def dropping(**values):
    def change(content):
        content |= {name: value for name, value in values.items() if name != "model"}
        content["model"] |= values.get("model", {})

    return change


@pytest.mark.parametrize(
    "change",
    [
        dropping(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        dropping(normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}),
        dropping(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        dropping(normalizer={"type": "Lowercase"}),
        dropping(pre_tokenizer={"type": "BertPreTokenizer"}),
        dropping(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        ),
        dropping(pre_tokenizer=None),  # what is no byte of the alphabet is dropped
    ],
)
def test_of_a_tokenizer_that_drops_text_nothing_is_known(tmp_path, change):
    save_bytes(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert most_bytes(Tokenizer.from_file(str(path))) is None
    assert load_tokenizer(tmp_path).fewest_tokens("a" * 10**6) == 0


CHAT = [{"role": "user", "content": "hello"}]


class CountingBackend:
    """A tokenizer that notes what it is given."""

    def __init__(self, backend):
        self.backend, self.given = backend, []

    def encode_batch(self, texts, **options):
        self.given.append(sum(map(len, texts)))
        return self.backend.encode_batch(texts, **options)


def test_texts_go_to_the_tokenizer_a_bounded_number_of_characters_at_a_time(tmp_path, monkeypatch):
    save_bytes(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_module, "TOKENIZED_AT_ONCE", 100)
    texts = ["a" * n for n in (10, 0, 60, 30, 1, 250, 100, 99, 5)]
    expected = tokenizer.encode("prompts", texts)
    tokenizer._plain = CountingBackend(tokenizer._plain)
    assert tokenizer.encode("prompts", texts) == expected
    assert [len(ids) for ids in expected] == [len(text) for text in texts]
    assert tokenizer._plain.given == [100, 1, 250, 100, 99, 5]


def test_a_text_that_cannot_fit_is_refused_before_any_text_is_tokenized(tmp_path, monkeypatch):
    long = "x " * 10**6
    with make_llm(make_folder(tmp_path / "model")) as llm:
        monkeypatch.setattr(TextTokenizer, "_encode", None)  # calling it would be a TypeError
        message = r"\[1\] has at least \d+ tokens, max_model_len is 256: shorten it"
        for call, one, other in [
            (llm.generate, "a", long),
            (llm.stream, "a", long),
            (llm.chat, CHAT, [CHAT[0] | {"content": long}]),
            (llm.encode_chat, CHAT, [CHAT[0] | {"content": long}]),
            (llm.encode, "a", long),
        ]:
            how = {"check_length": True} if "encode" in call.__name__ else {}
            with pytest.raises(ValueError, match=message):
                call([one, other], **how)
        with pytest.raises(ValueError, match=message):
            llm.score(["a", long], ["b", "c"])
        worker = Worker(llm)
        requests = [Request(1, long, SamplingParams()), Request(2, [5], SamplingParams())]
        ((refused, problem),) = worker.add(requests)
        assert refused.line == 1 and "has at least" in problem


def test_a_text_may_be_encoded_that_no_request_may_have(tmp_path):
    with make_llm(make_folder(tmp_path / "model")) as llm:
        (ids,) = llm.encode("x" * 10**4)
        assert len(ids) == 10**4
