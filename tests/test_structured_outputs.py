"""Outputs of a given form, through the whole engine: each parses and validates, whatever the engine
does.
"""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance", reason='pip install -e ".[structured]"')

from effort import EFFORT
from engine_helpers import assert_empty
from schemas import SCHEMAS, random_schemas
from transformers import AutoModelForCausalLM

from nanovllm import LLM, TINY_MODEL, SamplingParams, StructuredOutputsParams
from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.features.sampling import grammars
from nanovllm.features.sampling.grammars import Grammars
from nanovllm.frontend.tokenizer import load_tokenizer

PROMPTS = ["import json\n\nexample = ", "class Point:\n", "def main():\n    return ", "x = "]
REGEX = r"[a-z]{2,8}(, [a-z]{2,8}){0,3}\."
CHOICES = ["yes", "yes, if it must be", "no", "né"]
GRAMMAR = 'start: sum\nsum: NUMBER | "(" sum " + " sum ")"\nNUMBER: /[0-9]{1,3}/'


def form(**options) -> SamplingParams:
    """JSON without whitespace between its parts, where nothing else is said."""
    given = options.pop("structured_outputs")
    if "json" in given:
        given = dict(disable_any_whitespace=True) | given
    return SamplingParams(**dict(max_tokens=160, structured_outputs=given) | options)


def completions(outputs: list[dict]) -> list[dict]:
    return [one for output in outputs for one in output.get("completions", [output])]


def check_json(output: dict, schema: dict) -> bool:
    """A complete output parses and validates. Returns whether this one is."""
    if output["finish_reason"] == "length":
        return False
    value = json.loads(output["text"])
    checker = jsonschema.FormatChecker(["uuid", "ipv4", "email"])  # a date may be February 31
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    return True


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY_MODEL, device="cpu", max_num_seqs=64, num_kvcache_blocks=64) as llm:
        yield llm


def test_every_output_parses_and_validates(llm):
    """Run random schemas in one batch, at several temperatures."""
    count = 100 * EFFORT
    given = random_schemas(count)
    assert len(given) == count
    params = [
        form(structured_outputs=dict(json=schema), seed=i, temperature=(0, 0.7, 1, 3)[i % 4])
        for i, schema in enumerate(given)
    ]
    outputs = llm.generate(["x = "] * count, params, use_tqdm=False)
    complete = [check_json(*pair) for pair in zip(outputs, given)]
    assert sum(complete) >= 0.9 * count  # the others are cut


FORMS = [dict(json=schema) for schema in SCHEMAS.values()]
FORMS += [dict(regex=REGEX), dict(choice=CHOICES), dict(grammar=GRAMMAR)]
REQUESTS = [
    form(
        structured_outputs=given,
        seed=100 * i,
        temperature=(0, 1)[i % 2],
        n=1 + i % 3,
        max_tokens=90,
    )
    for i, given in enumerate(FORMS)
]
REQUESTS += [SamplingParams(temperature=1, seed=i, max_tokens=40) for i in range(3)]  # no form
TEXTS = [PROMPTS[i % len(PROMPTS)] for i in range(len(REQUESTS))]


def has_form(output: dict, given: dict) -> bool:
    """Whether the output is complete; then it has its form."""
    text = output["text"]
    if "json" in given:
        return check_json(output, given["json"])
    if output["finish_reason"] == "length":
        return False
    if "regex" in given:
        assert re.fullmatch(given["regex"], text)
    elif "choice" in given:
        assert text in given["choice"]
    else:
        assert re.fullmatch(r"[0-9]{1,3}|\(.* \+ .*\)", text) and isinstance(eval(text), int)
    return True


@pytest.fixture(scope="module")
def expected(llm):
    """Each request's completions, alone in its call: those with a form have it."""
    alone = [llm.generate(text, params, use_tqdm=False)[0] for text, params in zip(TEXTS, REQUESTS)]
    complete = [
        has_form(one, given) for output, given in zip(alone, FORMS) for one in completions([output])
    ]
    assert len(complete) > len(FORMS) and sum(complete) >= 0.8 * len(complete)
    return [[one["token_ids"] for one in completions([output])] for output in alone]


@pytest.mark.parametrize(
    "options",
    [
        dict(overlap=True, max_num_seqs=8, enable_prefix_caching=False, kernels="plain"),
        dict(max_num_batched_tokens=24, max_num_seqs=12),  # in chunks
        dict(overlap=True, num_kvcache_blocks=24),  # some are preempted
        dict(overlap=True, tensor_parallel_size=2),
    ],
    ids=str,
)
def test_no_mixture_of_options_changes_an_output(make_llm, expected, options):
    """Nor does it change the tokens of requests without a form, which are among them."""
    llm = make_llm(TINY_MODEL, **options)
    outputs = llm.generate(TEXTS, REQUESTS, use_tqdm=False)
    assert [[one["token_ids"] for one in completions([output])] for output in outputs] == expected
    if options.get("num_kvcache_blocks") == 24:
        assert llm.engine.scheduler.num_preemptions > 0
    assert_empty(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_brings_the_same(make_llm, expected, overlap):
    llm = make_llm(TINY_MODEL, overlap=overlap)
    one_each = [replace(params, n=1) for params in REQUESTS]
    ids: list[list[int]] = [[] for _ in TEXTS]
    texts, reasons = [""] * len(TEXTS), {}
    for i, text, new_ids, reason in llm.stream(TEXTS, one_each):
        ids[i] += new_ids
        texts[i] += text
        reasons[i] = reason
    assert ids == [first for first, *_ in expected]
    for i, given in enumerate(FORMS):
        has_form({"text": texts[i], "finish_reason": reasons[i]}, given)


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_are_the_likeliest_that_the_form_allows(make_llm, overlap):
    """By transformers' logits of each prefix, and a matcher that reads it at once."""
    llm = make_llm(TINY_MODEL, overlap=overlap)
    params = [form(structured_outputs=given, temperature=0, max_tokens=30) for given in FORMS]
    outputs = llm.generate(["x = "] * len(FORMS), params, use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    compiled = Grammars(
        load_tokenizer(TINY_MODEL), reference.config.vocab_size, llm.engine.stop_ids
    )
    mask = np.zeros((1, reference.config.vocab_size // 32), dtype=np.int32)
    for output, one in zip(outputs, params):
        prompt, tokens = output["prompt_token_ids"], output["token_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for i, token in enumerate(tokens):
            compiled.fill([(0, compiled.matcher(one.structured_outputs), tokens[:i])], mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
            assert (
                int(logits[i].masked_fill(~torch.from_numpy(allowed), -torch.inf).argmax()) == token
            )


def test_what_max_tokens_cuts_has_finished_by_length(llm):
    given = dict(json=SCHEMAS["invoice"])
    whole, cut = llm.generate(
        ["x = "] * 2,
        [form(structured_outputs=given, temperature=0, max_tokens=count) for count in (160, 20)],
        use_tqdm=False,
    )
    assert check_json(whole, SCHEMAS["invoice"])
    assert cut["finish_reason"] == "length" and len(cut["token_ids"]) == 20
    assert whole["text"].startswith(cut["text"]) and whole["text"] != cut["text"]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_output_ends_where_nothing_may_follow(make_llm, overlap):
    """Without a step for end-of-sequence, and with "stop" though max_tokens is reached."""
    llm = make_llm(TINY_MODEL, overlap=overlap)
    (tokens,) = llm.encode(["import"])
    assert len(tokens) == 1
    steps = []
    llm.on_step(steps.append)
    params = SamplingParams(max_tokens=1, structured_outputs=dict(choice=["import"]))
    (output,) = llm.generate("x = ", params, use_tqdm=False)
    assert (output["token_ids"], output["text"]) == (tokens, "import")
    assert output["finish_reason"] == "stop" and len(steps) <= 1 + overlap
    # Where something may follow, end-of-sequence says that nothing does.
    params = SamplingParams(temperature=0, structured_outputs=dict(regex="import( *)"))
    (output,) = llm.generate("x = ", params, use_tqdm=False)
    assert output["token_ids"][-1] in llm.engine.stop_ids or output["finish_reason"] == "length"


def test_stop_strings_and_biases_keep_their_meaning(llm):
    given = dict(regex=r"[ab]{30}")
    stopped, biased = llm.generate(
        ["x = "] * 2,
        [
            form(structured_outputs=given, temperature=1, seed=1, stop="b"),
            form(structured_outputs=given, temperature=0, logit_bias={66: 100}),
        ],
        use_tqdm=False,
    )
    assert stopped["finish_reason"] == "stop" and set(stopped["text"]) <= {"a"}
    assert biased["text"] == "b" * 30


def test_a_dict_says_what_structured_outputs_params_does():
    as_dict = SamplingParams(structured_outputs=dict(json=SCHEMAS["person"]))
    as_class = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMAS["person"]))
    assert as_dict == as_class and hash(as_dict) == hash(as_class)
    assert as_dict.structured_outputs.json == json.dumps(SCHEMAS["person"])


def test_log_probabilities_are_the_models_own(llm):
    params = form(structured_outputs=dict(choice=["yes"]), logprobs=1, temperature=0)
    (output,) = llm.generate("x = ", params, use_tqdm=False)
    first = output["logprobs"][0]
    assert first[output["token_ids"][0]] < max(first.values())  # another one was likelier


def test_lexers_are_shared_evenly_by_those_who_ask_for_the_same(make_llm, monkeypatch):
    """To check a form takes none."""
    monkeypatch.setattr(grammars, "NUM_THREADS", 2)
    llm = make_llm(TINY_MODEL)
    params = [form(structured_outputs=dict(choice=["no"])) for _ in range(6)]
    taken = []
    monkeypatch.setattr(
        grammars.Grammars,
        "matcher",
        lambda self, one, matcher=grammars.Grammars.matcher: (
            taken.append(matcher(self, one)) or taken[-1]
        ),
    )
    llm.generate(["x = "] * 6, params, use_tqdm=False)
    assert [matcher.number for matcher in taken] == [0, 1, 2, 3, 0, 1]


WRONG = {
    "schema": (dict(json={"type": "strin"}), r"json cannot be compiled \(Invalid type: strin\)"),
    "regex": (dict(regex="(?=a)"), r"regex cannot be compiled \(.*look-around"),
    "grammar": (dict(grammar="start: other"), r"grammar cannot be compiled \(.*unknown name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_is_refused_before_anything_is_queued(llm, name):
    given, message = WRONG[name]
    params = [SamplingParams(), SamplingParams(structured_outputs=given)]
    with pytest.raises(ValueError, match=rf"^sampling_params\[1\]\.structured_outputs\.{message}"):
        llm.generate(["x", "y"], params, use_tqdm=False)
    assert_empty(llm)
    with pytest.raises(ValueError, match=message):
        llm.add_request("x", params[1])
    (output,) = llm.generate("x", form(structured_outputs=dict(choice=["no"])), use_tqdm=False)
    assert output["text"] == "no"


def test_ignore_eos_is_refused_beside_a_form():
    with pytest.raises(ValueError, match="ignore_eos is True beside structured_outputs, which"):
        SamplingParams(structured_outputs=dict(regex="a"), ignore_eos=True)


@pytest.mark.parametrize("options", [dict(), dict(overlap=True), dict(tensor_parallel_size=2)])
def test_nothing_ends_a_form_before_min_tokens_but_that_it_is_complete(make_llm, options):
    """Not end-of-sequence, which is made likely here, nor a stop token or a stop string."""
    llm = make_llm(TINY_MODEL, **options)
    (end,) = llm.engine.stop_ids
    (word,) = llm.encode("import")[0]
    early = dict(temperature=0, min_tokens=9, logit_bias={end: 100, word: 90}, max_tokens=30)
    forms = [dict(regex=r"[ a-z]*"), dict(regex=r"[ab]{12}[ab]*"), dict(choice=["no"])]
    forms += [dict(json={"type": "array", "items": {"enum": [1]}})]
    stops = dict(stop_token_ids=[word], stop=["a"])
    params = [form(structured_outputs=given, **early) for given in forms]
    params += [form(structured_outputs=forms[0], **early, **stops)]
    outputs = llm.generate(["x = "] * len(params), params, use_tqdm=False)
    free, longer, choice, array, stopped = (output["token_ids"] for output in outputs)
    assert free == [word] * 9 + [end]
    assert longer[-1] == end and re.fullmatch("[ab]{12}", outputs[1]["text"])
    assert outputs[2]["text"] == "no" and len(choice) < 9  # complete, and nothing may follow
    assert json.loads(outputs[3]["text"]) == [1] * outputs[3]["text"].count("1")
    assert word not in stopped[:9] and len(stopped) >= 9
    assert {output["finish_reason"] for output in outputs} == {"stop"}


def test_min_tokens_let_a_form_end_where_nothing_else_may_follow(llm):
    """Here bad_words bar what might."""
    params = form(structured_outputs=dict(regex="qz?"), min_tokens=5, temperature=0)
    (q,), (z,) = llm.encode(["q", "z"])
    barred = replace(params, bad_words=[[q, z]])
    outputs = llm.generate(["x = "] * 2, [params, barred], use_tqdm=False)
    assert [output["text"] for output in outputs] == ["qz", "q"]
    assert {output["finish_reason"] for output in outputs} == {"stop"}


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_wait_or_have_ended_hold_no_form(make_llm, overlap, monkeypatch):
    """However many there are in a call: as many forms are there as run, and the cache."""
    monkeypatch.setattr(grammars, "CACHE_BYTES", 1)
    llm = make_llm(TINY_MODEL, overlap=overlap, max_num_seqs=4)
    compiled = llm.engine.constraints.forms
    most = []
    llm.on_step(lambda step: most.append(len(compiled._known)))
    params = [form(structured_outputs=dict(choice=[f"number {i}"])) for i in range(40)]
    dropped = llm.add_request("x", params[0])
    llm.abort(dropped)
    llm.generate(["x = "] * 40, params, use_tqdm=False)
    assert 1 < max(most) <= 4 + overlap * 4 + 1 and len(compiled._known) == 1


def test_without_the_package_the_error_says_what_to_install(make_llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = make_llm(TINY_MODEL)
    with pytest.raises(ValueError, match=r'llguidance.*: pip install -e "\.\[structured\]"'):
        llm.generate("x", form(structured_outputs=dict(regex="a")), use_tqdm=False)
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)


def test_without_a_tokenizer_the_error_says_so(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="structured_outputs needs to know the text of each token"):
        llm.generate([[1]], form(structured_outputs=dict(regex="a")), use_tqdm=False)
    assert_empty(llm)


def test_a_form_that_is_found_too_complex_in_mid_run_is_named(llm):
    long = form(structured_outputs=dict(regex="a{1000000}"))
    other = form(structured_outputs=dict(regex="ab"))
    bad, good = llm.generate(["x", "x"], [long, other], use_tqdm=False)
    assert (bad["finish_reason"], good["text"]) == ("error", "ab")
    with pytest.raises(InvalidLogitsError, match="in structured_outputs is too complex: simplify"):
        llm.generate("x", long, use_tqdm=False)
    assert_empty(llm)


def test_a_matcher_that_can_read_no_further_fails_its_request_alone(make_llm, monkeypatch):
    llm = make_llm(TINY_MODEL)
    unexpected = [1]
    lose = lambda self, output: self.state.consume_tokens(unexpected)  # noqa: E731
    monkeypatch.setattr(grammars.Matcher, "_consume", lose)
    with pytest.raises(InvalidLogitsError):
        llm.generate("x", form(structured_outputs=dict(regex="abc")), use_tqdm=False)
    assert_empty(llm)
