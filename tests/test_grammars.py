"""Outputs of a given form: JSON by a schema, what a regular expression matches, a choice, a
grammar.
"""

import json
import random
import re

import numpy as np
import pytest

pytest.importorskip("llguidance", reason='pip install -e ".[structured]"')

from tokenizers import Tokenizer, decoders, models

from nanovllm import TINY_MODEL, SamplingParams, StructuredOutputsParams
from nanovllm.features.sampling import grammars
from nanovllm.features.sampling.grammars import Grammars, Matcher
from nanovllm.frontend.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(TINY_MODEL)
EOS, LAST = 0, 4095  # of the tiny model's vocabulary
PADDED = 4099  # entries, if a model has more than its tokenizer
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 9}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


def make_grammars(**options) -> Grammars:
    return Grammars(
        **dict(tokenizer=TOKENIZER, vocab_size=PADDED, stop_ids=frozenset({EOS})) | options
    )


def as_params(**given) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def allowed(matcher: Matcher, output: list[int]) -> list[int]:
    mask = np.full((1, -(-PADDED // 32)), -1, dtype=np.int32)
    make_grammars().fill([(0, matcher, output)], mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def text_of(output: list[int]) -> str:
    return TOKENIZER.decode([output])[0]


REGEXES = [
    r"ab*",
    r"(foo|bar)+x?",
    r"[^a-z]{0,3}é",
    r"\d{2}:\d{2}",
    r".{0,2}end",
    r"(a|ab)(c|bcd)?",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_an_output_may_end_exactly_where_the_expression_matches(regex):
    """At every place of random walks: by Python's own matcher."""
    compiled, rng = make_grammars(), random.Random(regex)
    ends = 0
    for _ in range(12):
        matcher, output = compiled.matcher(as_params(regex=regex)), list[int]()
        while len(output) < 12:
            tokens = allowed(matcher, output)
            whole = text_of(output)
            if "\ufffd" not in whole:  # no character is cut
                assert (EOS in tokens) == bool(re.fullmatch(regex, whole)), whole
                ends += EOS in tokens
            if tokens == [EOS]:
                break
            output.append(rng.choice([token for token in tokens if token != EOS]))
    assert ends


def test_no_token_without_text_is_allowed_inside_a_string():
    matcher = make_grammars().matcher(as_params(json={"type": "string"}))
    tokens = allowed(matcher, TOKENIZER.encode("text", ['"some'])[0])
    assert len(tokens) > 3000  # tokens
    assert EOS not in tokens and max(tokens) <= LAST


def test_where_an_output_must_end_all_stop_ids_are_allowed_and_nothing_else():
    stop_ids = frozenset({EOS, 300, 7})
    matcher = make_grammars(stop_ids=stop_ids).matcher(as_params(choice=["yes"]))
    assert stop_ids.isdisjoint(allowed(matcher, [])) and not matcher.is_complete([])
    (output,) = TOKENIZER.encode("text", ["yes"])
    assert matcher.is_complete(output) and set(allowed(matcher, output)) == stop_ids


def test_a_matcher_reads_what_is_new_however_much_it_is():
    text = '{"x": 12, "name": "ab"}'
    (output,) = TOKENIZER.encode("text", [text])
    compiled, rng = make_grammars(), random.Random(0)
    one_by_one = compiled.matcher(as_params(json=POINT))
    expected = [allowed(one_by_one, output[:i]) for i in range(len(output) + 1)]
    for _ in range(5):
        matcher = compiled.matcher(as_params(json=POINT))
        for i in sorted(rng.sample(range(len(output)), 4)):
            assert allowed(matcher, output[:i]) == expected[i]
            assert allowed(matcher, output[:i]) == expected[i]  # as if it were asked twice
        assert allowed(matcher, output) == expected[-1] and matcher.is_complete(output)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_made_side_by_side_are_those_of_each_row_alone(monkeypatch, num_threads):
    monkeypatch.setattr(grammars, "NUM_THREADS", num_threads)
    compiled, rng = make_grammars(), random.Random(1)
    (output,) = TOKENIZER.encode("text", ['{"x": 12, "name": "ab"}'])
    forms = [dict(json=POINT), dict(regex="[^a]*"), dict(json={"type": "string", "maxLength": 30})]
    rows = [
        (
            row,
            compiled.matcher(as_params(**forms[row % 3])),
            output[: row % 5 if row % 3 == 0 else 0],
        )
        for row in rng.sample(range(40), 30)  # some rows of the step have no form
    ]
    masks = np.full((40, -(-PADDED // 32)), -1, dtype=np.int32)
    compiled.fill(rows, masks)
    for row, matcher, so_far in rows:
        bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == allowed(matcher, so_far)
    assert (masks[[row for row in range(40) if row not in {r for r, *_ in rows}]] == -1).all()


def test_a_grammar_is_compiled_once_for_all_who_ask_for_the_same(monkeypatch):
    monkeypatch.setattr(grammars, "MOST_KEPT", 3)
    compiled = make_grammars()
    matchers = [compiled.matcher(as_params(json=given)) for given in (POINT, json.dumps(POINT))]
    assert compiled.compile.cache_info().misses == 1
    # Each has a state of its own.
    assert allowed(matchers[0], TOKENIZER.encode("text", ["{"])[0]) != allowed(matchers[1], [])
    for i in range(9):
        compiled.matcher(as_params(regex=f"a{{{i}}}"))
    assert compiled.compile.cache_info().currsize == 3


def test_completions_of_one_grammar_share_a_lexer_only_where_they_outnumber_the_threads(
    monkeypatch,
):
    monkeypatch.setattr(grammars, "NUM_THREADS", 3)
    compiled = make_grammars()
    first, second = as_params(json=POINT), as_params(regex="a+")
    numbers = [compiled.matcher(first).number for _ in range(14)]
    assert numbers == [*range(6), *range(6), 0, 1]
    assert [compiled.matcher(second).number for _ in range(2)] == [0, 1]


def test_a_call_of_another_thread_while_a_lexer_is_made_keeps_no_later_one_from_being_made(
    monkeypatch,
):
    monkeypatch.setattr(grammars, "NUM_THREADS", 2)
    compiled, params, makes = make_grammars(), as_params(json=POINT), []
    start = compiled._start

    def make(asked):
        makes.append(asked)
        if len(makes) == 2:
            compiled.matcher(params)  # what another thread may do at this moment
        return start(asked)

    monkeypatch.setattr(compiled, "_start", make)
    assert {compiled.matcher(params).number for _ in range(12)} == {0, 1, 2, 3}


class Serialized:
    """A tokenizer of the tokenizers package, as Grammars wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.to_json = tokenizer.to_str


def make_sentencepiece() -> Tokenizer:
    """Pieces with a mark for a space, and tokens of one byte, as Llama's and Gemma's have."""
    vocab = {name: i for i, name in enumerate(("<unk>", "<s>", "</s>"))}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = [("\u2581", "y"), ("y", "e"), ("ye", "s"), ("\u2581", "{")]
    for piece in [*"\u2581abcesxy{}:,", '"', *[a + b for a, b in merges]]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("choice", ["yes", "no, yes", "é€\U0001f600", '{"a": "ye s"}'])
def test_tokens_that_are_bytes_make_whole_characters(choice):
    tokenizer, end = make_sentencepiece(), 2
    compiled = make_grammars(tokenizer=Serialized(tokenizer), stop_ids=frozenset({end}))
    for seed in range(9):
        rng, output = random.Random(seed), list[int]()
        matcher = compiled.matcher(as_params(choice=[choice]))
        while (tokens := allowed(matcher, output)) != [end]:
            assert not {0, 1, end} & set(tokens) and max(tokens) < tokenizer.get_vocab_size()
            output.append(rng.choice(tokens))
        assert tokenizer.decode(output) == choice


WITHOUT_BYTES = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
UNSUITED = {
    "no-tokenizer": (dict(tokenizer=None), "the model's folder has no tokenizer.json: add it"),
    "no-bytes": (dict(tokenizer=Serialized(WITHOUT_BYTES)), "which llguidance does not find in"),
    "no-end": (dict(stop_ids=frozenset()), "names none: give eos_token_id in its generation_conf"),
    "more-tokens-than-the-model": (dict(vocab_size=4000), r"\(vocab size too small"),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_a_model_that_cannot_be_held_to_a_form_is_refused(name):
    options, message = UNSUITED[name]
    with pytest.raises(ValueError, match=f"^structured_outputs needs .*{message}"):
        make_grammars(**options).matcher(as_params(regex="a"))


GRAMMARS = {
    "lark": 'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]{1,3}/',
    "lark-inlined": '?start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]{1,3}/',
    "lark-kept": '// a ::= b\n!start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[0-9]+/',
    "gbnf": 'root ::= sum\nsum ::= [0-9]+ | "(" sum "+" sum ")"',
}


@pytest.mark.parametrize("notation", GRAMMARS)
@pytest.mark.parametrize(
    "text, fits", [("(1+(22+3))", True), ("7", True), ("(1+2", False), ("1+2", False)]
)
def test_a_grammar_may_be_written_for_lark_or_as_gbnf(notation, text, fits):
    matcher = make_grammars().matcher(as_params(grammar=GRAMMARS[notation]))
    output: list[int] = []
    for token in TOKENIZER.encode("text", [text])[0]:
        if token not in allowed(matcher, output):
            assert not fits
            return
        output.append(token)
    assert (EOS in allowed(matcher, output)) == fits


@pytest.mark.parametrize(
    "options, accepted, refused",
    [
        ({}, ['{"x":1,"name":""}', '{ "x" :\n1, "name": ""}'], []),
        (dict(disable_any_whitespace=True), ['{"x":1,"name":""}'], ['{"x": 1,"name":""}']),
        (dict(whitespace_pattern=" ?"), ['{"x": 1, "name":""}'], ['{"x":  1,"name":""}']),
    ],
)
def test_whitespace_is_what_the_options_say(options, accepted, refused):
    for text in accepted + refused:
        matcher = make_grammars().matcher(as_params(json=POINT, **options))
        output: list[int] = []
        for token in TOKENIZER.encode("text", [text])[0]:
            if token not in allowed(matcher, output):
                break
            output.append(token)
        assert (text_of(output) == text and EOS in allowed(matcher, output)) == (text in accepted)


WRONG = {
    "nothing": ({}, ValueError, "nothing is given: use exactly one of json, regex"),
    "two": (dict(regex="a", choice=["b"]), ValueError, "regex and choice is given: use exactly"),
    "unknown": (dict(jsn={}), TypeError, "no parameter 'jsn': did you mean json"),
    "structural_tag": (
        dict(structural_tag={}),
        TypeError,
        "'structural_tag', given {}: write a grammar of the text with its tags",
    ),
    "no-more-properties": (
        dict(json=POINT, disable_additional_properties=True),
        TypeError,
        'write "additionalProperties": false into the schema',
    ),
    "json-type": (dict(json=[1]), TypeError, r"json is \[1\]: use a JSON schema as a dict or"),
    "json-text": (dict(json='{"a'), ValueError, "json is '{\"a', which is not JSON"),
    "json-nan": (dict(json={"minimum": float("nan")}), ValueError, "which is not JSON"),
    "json-number": (dict(json="5"), ValueError, "json is '5': use a schema that is an object"),
    "regex-type": (dict(regex=7), TypeError, "regex is 7: use a string"),
    "choice-type": (dict(choice="ab"), TypeError, "choice is 'ab': use a list of strings"),
    "choice-of-numbers": (dict(choice=[1]), TypeError, r"choice is \[1\]: use a list of strings"),
    "choice-empty": (dict(choice=[]), ValueError, "choice is empty: give at least one"),
    "grammar-type": (dict(grammar=[]), TypeError, r"grammar is \[\]: use a string"),
    "json-object": (dict(json_object=1), TypeError, "json_object is 1: use True or False"),
    "whitespace": (
        dict(json=POINT, whitespace_pattern=" ", disable_any_whitespace=True),
        ValueError,
        "whitespace_pattern is ' ', but disable_any_whitespace is True: use one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_refused(name):
    given, error, message = WRONG[name]
    with pytest.raises(error, match=f"^structured_outputs: .*{message}"):
        SamplingParams(structured_outputs=given)


def test_a_schema_may_leave_unheeded_what_cannot_be_held_to():
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}
    with pytest.raises(ValueError, match="uniqueItems"):
        make_grammars().compile(as_params(json=schema))
    lenient = schema | {"x-guidance": {"lenient": True}}
    matcher = make_grammars().matcher(as_params(json=lenient))
    assert EOS in allowed(matcher, TOKENIZER.encode("text", ["[1, 1]"])[0])


# What reads well and cannot be held to, with what the error says of it.
CANNOT = {
    "unique": (dict(json={"type": "array", "uniqueItems": True}), "json .*uniqueItems.*x-guidance"),
    "one-of": (dict(json={"oneOf": [{"minimum": 1}, {"type": "integer"}]}), "json .*coerce_one_of"),
    "format": (dict(json={"type": "string", "format": "isbn"}), "json .*Unknown format: isbn"),
    "type": (dict(json={"type": "strin"}), "json .*Invalid type: strin"),
    "elsewhere": (dict(json={"$ref": "https://example.org/a.json"}), "json .*not present"),
    "itself": (dict(json={"$ref": "#"}), "json .*no text has this form: change it"),
    "nothing-fits": (
        dict(json={"type": "integer", "minimum": 2, "maximum": 1}),
        "json .*Unsatisfiable",
    ),
    "pattern": (dict(json={"type": "string", "pattern": "("}), "json .*unclosed group"),
    "regex": (dict(regex="a(b"), "regex .*unclosed group.*: change it"),
    "look-ahead": (dict(regex="(?=a)b"), "regex .*look-around"),
    "half-a-character": (dict(regex="\ud800"), "regex .*surrogates"),
    "lark": (dict(grammar="start: other"), "grammar .*unknown name"),
    "gbnf": (dict(grammar="root ::= ("), r"grammar .*Expected '\)'"),
    "choice": (dict(choice=["\udc00"]), "choice .*surrogates"),
    "whitespace": (dict(json_object=True, whitespace_pattern="("), "json_object .*unclosed group"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_compiled_is_refused_with_the_reason(name):
    given, message = CANNOT[name]
    params = StructuredOutputsParams(**given)
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{message}") as raised:
        make_grammars().compile(params)
    assert len(str(raised.value)) < 700
