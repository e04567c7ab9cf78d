"""Outputs of a given form: JSON by a schema, what a regular expression matches, a choice, a
grammar.
"""

import ctypes
import gc
import json
import os
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path

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


NAMED = {"x": 1, "name": "ab"}


def own(**guidance) -> dict:
    return {**POINT, "x-guidance": guidance}


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
    compiled, makes = make_grammars(), []
    start = compiled._start
    monkeypatch.setattr(compiled, "_start", lambda *asked: makes.append(asked) or start(*asked))
    forms = [compiled.compile(as_params(json=given)) for given in (POINT, json.dumps(POINT))]
    assert forms[0] is forms[1] and len(makes) == 1
    # Each has a state of its own.
    matchers = [compiled.matcher(as_params(json=POINT)) for _ in range(2)]
    assert allowed(matchers[0], TOKENIZER.encode("text", ["{"])[0]) != allowed(matchers[1], [])


def test_forms_that_no_request_uses_take_no_more_than_their_bound(monkeypatch):
    """Whatever their number and size, and however many completions asked for one at once."""
    monkeypatch.setattr(grammars, "NUM_THREADS", 8)
    monkeypatch.setattr(grammars, "FIRST_STATES", grammars.MOST_STATES)
    compiled, rng = make_grammars(), random.Random(0)
    size = grammars.MOST_STATES * grammars.STATE_BYTES
    monkeypatch.setattr(grammars, "CACHE_BYTES", 5 * size)
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0
    for i in range(40):
        choices = [f"{i} {j}" for j in range(rng.choice([1, 10, 2000]))]
        asked = as_params(choice=choices)
        alive.add(compiled.compile(asked))
        matchers = [begun(compiled, asked) for _ in range(rng.randint(0, 12))]
        assert compiled.num_bytes <= 5 * size and asked in compiled._kept
        del matchers
        assert sum(starts.num_bytes for starts in alive) == compiled.num_bytes
        most = max(most, len(compiled._kept))
    assert most > 2


def test_hundreds_of_usual_forms_are_kept():
    compiled = make_grammars()
    asked = [as_params(json={**POINT, "title": str(i)}) for i in range(256)]
    for params in asked:
        fill_lexer(compiled, params, most=9)
    assert [*compiled._kept] == asked


def test_a_form_whose_first_mask_needs_many_states_is_compiled(monkeypatch):
    monkeypatch.setattr(grammars, "FIRST_STATES", 4)
    compiled = make_grammars()
    asked = as_params(regex="(a|b|[a-z ])*a(a|b|[a-z ]){15}")
    assert len(allowed(compiled.matcher(asked), [])) > 1000
    assert compiled.compile(asked)._limits[0] > 4


def test_forms_that_have_learned_more_leave_others_less_room(monkeypatch):
    monkeypatch.setattr(grammars, "NUM_THREADS", 1)
    monkeypatch.setattr(grammars, "FIRST_STATES", 100)
    monkeypatch.setattr(grammars, "MOST_STATES", 1600)
    monkeypatch.setattr(grammars, "CACHE_BYTES", 10 * 1600 * grammars.STATE_BYTES)
    compiled = make_grammars()
    for i in range(40):
        compiled.compile(as_params(regex=rf"[\w ]{{1,{500 + i}}}"))
    assert len(compiled._kept) == 40
    for i in range(39, -1, -1):
        fill_lexer(compiled, as_params(regex=rf"[\w ]{{1,{500 + i}}}"))
        assert compiled.num_bytes <= grammars.CACHE_BYTES
    assert 5 < len(compiled._kept) < 40


def test_completions_that_have_yet_to_begin_hold_no_form(monkeypatch):
    monkeypatch.setattr(grammars, "CACHE_BYTES", 1)
    compiled = make_grammars()
    waiting = [compiled.matcher(as_params(regex=f"a{{{i}}}")) for i in range(5)]
    assert len(compiled._known) == 0
    for i, matcher in enumerate(waiting):
        matcher.read([])
        assert len(compiled._known) == i + 1
    assert compiled.matcher(as_params(regex="a{3}")).read([]) is None
    assert len(compiled._known) == 5  # it shares one


FULL = {
    "words": dict(regex=r"[\w ]{1,300}"),
    "strings": dict(
        json={"type": "array", "items": {"type": "string", "maxLength": 200}, "minItems": 40}
    ),
    "mail": dict(regex=r"(\w{1,50}@\w{2,60}\.[a-z]{2,9} ){50}"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_lexer_that_has_learned_all_it_may_changes_no_mask(monkeypatch, name):
    """Nor does it end a completion: it goes on with a new one."""
    monkeypatch.setattr(grammars, "NUM_THREADS", 1)
    masks = []
    for first_states, most_states in ((10**5, 10**5), (100, 700)):
        monkeypatch.setattr(grammars, "FIRST_STATES", first_states)
        monkeypatch.setattr(grammars, "MOST_STATES", most_states)
        compiled, rng, made = make_grammars(), random.Random(name), []
        matchers = [compiled.matcher(as_params(**FULL[name])) for _ in range(6)]
        outputs: list[list[int]] = [[] for _ in matchers]
        compiled.fill([(0, matchers[0], [])], np.zeros((1, -(-PADDED // 32)), dtype=np.int32))
        first = matchers[0]._source
        for _ in range(40):
            for matcher, output in zip(matchers, outputs):
                tokens = allowed(matcher, output)
                made.append(tokens)
                output.append(rng.choice([token for token in tokens if token != EOS]))
                assert not matcher.is_complete(output)
        masks.append(made)
        assert (matchers[0]._source is first) == (most_states > 700)
    assert masks[0] == masks[1] and all(masks[0])


def test_a_full_lexer_takes_no_more_bytes_than_are_counted(monkeypatch):
    """By the process's memory, of lexers that were filled and are kept."""
    monkeypatch.setattr(grammars, "NUM_THREADS", 1)
    monkeypatch.setattr(grammars, "FIRST_STATES", 2000)
    monkeypatch.setattr(grammars, "MOST_STATES", 2000)
    compiled = make_grammars()
    fill_lexer(compiled, as_params(regex=r"[\w -]{1,900}"))  # what is allocated but once
    before, count = resident_bytes(), 16
    for i in range(count):
        fill_lexer(compiled, as_params(regex=rf"[\w ]{{1,{900 + i}}}"))
    assert len(compiled._kept) == 1 + count
    grown = resident_bytes() - before
    assert count * 2000 * 500 < grown < compiled.num_bytes


def fill_lexer(compiled: Grammars, params: StructuredOutputsParams, most: int = 0) -> None:
    """Make masks until a lexer is full, or as many as this."""
    rng = random.Random(0)
    while True:
        matcher, output = compiled.matcher(params), list[int]()
        matcher.read(output)
        first = matcher._source
        for i in range(200):
            if most and i == most:
                return
            output.append(rng.choice([token for token in allowed(matcher, output) if token != EOS]))
            if matcher._source is not first:
                matcher._starts._starts[0] = first  # the full one
                return


def resident_bytes() -> int:
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_completions_of_one_grammar_share_a_lexer_only_where_they_outnumber_the_threads(
    monkeypatch,
):
    monkeypatch.setattr(grammars, "NUM_THREADS", 3)
    compiled = make_grammars()
    first, second = as_params(json=POINT), as_params(regex="a+")
    numbers = [begun(compiled, first).number for _ in range(14)]
    assert numbers == [*range(6), *range(6), 0, 1]
    assert [begun(compiled, second).number for _ in range(2)] == [0, 1]


def begun(compiled: Grammars, params: StructuredOutputsParams) -> Matcher:
    matcher = compiled.matcher(params)
    matcher.read([])
    return matcher


def test_a_call_of_another_thread_while_a_lexer_is_made_keeps_no_later_one_from_being_made(
    monkeypatch,
):
    monkeypatch.setattr(grammars, "NUM_THREADS", 2)
    compiled, params, makes = make_grammars(), as_params(json=POINT), []
    start = compiled._start

    def make(*asked):
        makes.append(asked)
        if len(makes) == 2:
            begun(compiled, params)  # what another thread may do at this moment
        return start(*asked)

    monkeypatch.setattr(compiled, "_start", make)
    assert {begun(compiled, params).number for _ in range(12)} == {0, 1, 2, 3}


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
        make_grammars(**options).compile(as_params(regex="a"))


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


def takes(text: str, **given) -> bool:
    """Whether an output may be this text."""
    matcher, output = make_grammars().matcher(as_params(**given)), list[int]()
    for token in TOKENIZER.encode("text", [text])[0]:
        if token not in allowed(matcher, output):
            return False
        output.append(token)
    return EOS in allowed(matcher, output)


def test_any_json_object_has_bounded_whitespace_too():
    given = dict(json_object=True)
    assert takes('{"a": [1,\n  2]}', **given) and not takes('{"a":\n\n1}', **given)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Schemas, with texts that close_objects leaves out or keeps.
CLOSED = {
    "plain": (OBJECT, ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1}', "{}"]),
    "nested": (
        {"type": "array", "items": {"anyOf": [OBJECT, {"type": "null"}]}},
        ['[{"b":2}]'],
        ['[{"a":1},null]'],
    ),
    "referred-to": (
        {"$defs": {"one": OBJECT}, "type": "object", "properties": {"o": {"$ref": "#/$defs/one"}}},
        ['{"o":{"b":2}}', '{"p":1}'],
        ['{"o":{"a":1}}'],
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
        ['{"b":2}'],
        ['{"x1":2}'],
    ),
    "says-itself": ({**OBJECT, "additionalProperties": {"type": "integer"}}, [], ['{"b":2}']),
    "lists-nothing": ({"type": "object"}, [], ['{"b":2}']),
    "named-properties": (
        {"type": "object", "properties": {"properties": {"type": "integer"}}},
        ['{"additionalProperties":1}', '{"a":1}'],
        ['{"properties":1}'],
    ),
    "data": ({"const": {"properties": {"a": 1}}}, [], ['{"properties":{"a":1}}']),
    "one-of-allOf": ({"allOf": [OBJECT, {"required": ["a"]}]}, ['{"a":1,"b":2}'], ['{"a":1}']),
}


@pytest.mark.parametrize("name", CLOSED)
def test_disable_additional_properties_leaves_out_what_is_not_listed(name):
    schema, out, kept = CLOSED[name]
    options = dict(json=schema, disable_any_whitespace=True)
    for text in out + kept:
        assert takes(text, **options)
        assert takes(text, **options, disable_additional_properties=True) == (text in kept)


def test_properties_of_one_object_that_are_listed_in_parts_cannot_be_closed():
    other = {"properties": {"b": {"type": "integer"}}}
    for parts in ({"allOf": [OBJECT, other]}, {**OBJECT, "anyOf": [other, {"minProperties": 1}]}):
        asked = as_params(json={"items": parts}, disable_additional_properties=True)
        with pytest.raises(ValueError, match="several parts of a schema.*: put them into one list"):
            make_grammars().compile(asked)


@pytest.mark.parametrize(
    "options, accepted, refused",
    [
        (
            {},
            ['{"x":1,"name":""}', '{ "x" :\n1, "name": ""}', json.dumps(NAMED, indent=20)]
            + ['{\r\n\t"x":1,"name":""}', '{"x":' + 20 * " " + '1,"name":""}'],
            ['{"x":\n\n1,"name":""}', '{"x":' + 21 * " " + '1,"name":""}']
            + [json.dumps(NAMED, indent=21), '{"x":\n \n1,"name":""}', '{"x":1,"name":""\n\n}'],
        ),
        (dict(disable_any_whitespace=True), ['{"x":1,"name":""}'], ['{"x": 1,"name":""}']),
        (dict(whitespace_pattern=" ?"), ['{"x": 1, "name":""}'], ['{"x":  1,"name":""}']),
        (dict(whitespace_pattern=r"\s*"), ['{"x":\n \n1,"name":""}', '{"x":1,"name":""}'], []),
        (dict(json=own(whitespace_pattern=r"\n*")), ['{"x":\n\n1,"name":""}'], []),
        (dict(json=own(whitespace_flexible=False)), [], ['{"x": 1,"name":""}']),
        (dict(json=own(lenient=True)), ['{"x": 1,"name":""}'], ['{"x":\n\n1,"name":""}']),
        (
            dict(json=own(whitespace_pattern=" *"), disable_any_whitespace=True),
            ['{"x":1,"name":""}'],
            ['{"x": 1,"name":""}'],
        ),
    ],
)
def test_whitespace_is_what_the_options_say(options, accepted, refused):
    """By default up to one line break, and after it up to 20 blanks."""
    for text in accepted + refused:
        matcher = make_grammars().matcher(as_params(**dict(json=POINT) | options))
        output: list[int] = []
        for token in TOKENIZER.encode("text", [text])[0]:
            if token not in allowed(matcher, output):
                break
            output.append(token)
        assert (text_of(output) == text and EOS in allowed(matcher, output)) == (text in accepted)


class Point:
    """As pydantic's classes are."""

    @classmethod
    def model_json_schema(cls) -> dict:
        return POINT


def test_a_class_of_pydantics_stands_for_its_schema():
    assert as_params(json=Point) == as_params(json=POINT)
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(ValueError, match="json is .*, of which pydantic makes no JSON schema"):
        as_params(json=pydantic.create_model("Bad", f=(Callable[[int], int], ...)))
    with pytest.raises(TypeError, match="json is .*int.*: use a JSON schema"):
        as_params(json=int)
    made = pydantic.create_model("Made", x=(int, ...), name=(str | None, None))
    assert as_params(json=made) == as_params(json=made.model_json_schema())
    assert takes('{"x":1,"name":null}', json=made)
    assert not takes('{"name":null}', json=made)


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
        dict(json=POINT, disable_additional_properties=1),
        TypeError,
        "disable_additional_properties is 1: use True or False",
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
