"""What breaks in mid-run is raised as it is, and the LLM is empty and usable after it."""

import json
import shutil

import pytest
import torch
from call_helpers import check_empty, completed, generate, random_prompts
from call_helpers import make_llm as make_llm_anywhere
from job_helpers import arguments, read_lines, write_lines
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.__main__ import main
from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.layers.attention import SelfAttention

PROMPTS = random_prompts(7, seed=3)


def make_llm(folder, **options):
    return make_llm_anywhere(folder, device="cpu", **options)


# Half of the texts are read as they grow.
PARAMS = [
    SamplingParams(
        temperature=i % 2, seed=i, max_tokens=12, top_k=5 * (i % 3), stop=("th",) * (i % 2)
    )
    for i in range(7)
]
POISON = 200  # a token whose embedding is NaN in some folders


@pytest.fixture(scope="module")
def expected(folder):
    with make_llm(folder) as llm:
        return generate(llm, PROMPTS, PARAMS)


class PanicException(BaseException):
    """As packages written in Rust raise: no Exception."""


ERRORS = {
    "kernel": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "value": lambda: ValueError("a value"),
    "panic": lambda: PanicException("index out of bounds"),
}
PLACES = {
    "model": lambda llm: (llm.engine.runner.model, "forward"),
    "sampler": lambda llm: (llm.engine.runner, "_sample_tokens"),
    "attention": lambda llm: (attention_of(llm), "attend_stored"),
    "decode": lambda llm: (llm._tokenizer, "decode"),
    "detokenizer": lambda llm: (llm.engine.detokenizer, "update"),
}


def attention_of(llm):
    layers = llm.engine.runner.model.modules()
    return [layer for layer in layers if isinstance(layer, SelfAttention)][-1]


def by_generate(llm):
    return generate(llm, PROMPTS, PARAMS)


def by_stream(llm):
    ended = {}
    for i, *_, reason in llm.stream(PROMPTS, PARAMS):
        if reason is not None:
            ended[i] = reason
    return ended


def by_steps(llm):
    ids = [llm.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]
    outputs = {}
    while llm.has_unfinished():
        outputs |= {output.pop("id"): output for output in llm.step()}
    return completed([outputs[i] for i in ids])


class FailsLater:
    """Calls a function; one call, after so many others, raises."""

    def __init__(self, function, after: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, after, error

    def __call__(self, *args, **options):
        self.left -= 1
        if self.left == -1:
            raise self.error
        return self.function(*args, **options)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("call", [by_generate, by_stream, by_steps])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_breaks_in_mid_run_is_raised_and_the_llm_is_usable(
    folder, expected, monkeypatch, place, call, overlap
):
    with make_llm(folder, overlap=overlap, num_kvcache_blocks=12) as llm:
        assert by_steps(llm) == expected
        for after, make_error in zip((0, 1, 2, 4), ERRORS.values()):
            error = make_error()
            owner, name = PLACES[place](llm)
            failing = FailsLater(getattr(owner, name), after, error)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                try:
                    call(llm)
                except BaseException as raised:
                    assert raised is error
                else:
                    # Fewer texts are decoded than that.
                    assert place == "decode" and failing.left >= 0
            check_empty(llm)
            assert generate(llm, PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("make_error", ERRORS.values(), ids=ERRORS)
def test_a_tokenizer_that_fails_to_encode_says_so_and_nothing_is_queued(
    folder, expected, make_error
):
    """Its packages raise what they like, even what is no Exception."""
    with make_llm(folder) as llm:
        plain = llm._tokenizer._plain

        class Broken:
            def encode_batch(self, texts, **options):
                if "in" in texts:
                    raise make_error()
                return plain.encode_batch(texts, **options)

        llm._tokenizer._plain = Broken()
        for call in (llm.generate, llm.encode, llm.stream):
            with pytest.raises(ValueError, match=r"prompts\[1\] is 'in'.*tokenizer.*token ids"):
                call(["the", "in"])
        llm._tokenizer._plain = plain
        check_empty(llm)
        assert generate(llm, PROMPTS, PARAMS) == expected


@pytest.fixture(scope="module")
def poisoned(folder, tmp_path_factory):
    return poison(shutil.copytree(folder, tmp_path_factory.mktemp("x") / "poisoned"))


def poison(copy):
    """Let one token of the model in a folder make NaN of all that follows it."""
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    path = copy / index["model.embed_tokens.weight"]
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    return copy


SOUND = [[token for token in prompt if token != POISON] + [1] for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[POISON])


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("at", [0, 20, 39], ids="at-{}".format)
@pytest.mark.parametrize("budget", [16, 512])
def test_nan_logits_name_their_request_and_stay_with_it(folder, poisoned, kernels, at, budget):
    """Others that run beside it, or after it in its blocks, get their tokens."""
    prompt = [7] * at + [POISON] + [7] * (39 - at)
    sizes = dict(kernels=kernels, max_num_batched_tokens=budget, num_kvcache_blocks=40)
    with make_llm(folder, **sizes) as llm:
        expected = generate(llm, SOUND, GREEDY)
    with make_llm(poisoned, **sizes) as llm:
        for tried in range(3):
            others = [llm.add_request(one, GREEDY) for one in SOUND[: 2 * tried]]
            for _ in others:
                llm.step()
            bad = llm.add_request(prompt, GREEDY)
            with pytest.raises(InvalidLogitsError, match=f"request {bad} ") as caught:
                while llm.has_unfinished():
                    llm.step()
            assert caught.value.request_ids == {bad}
            check_empty(llm)
            assert generate(llm, SOUND, GREEDY) == expected
        # It is aborted before anything is sampled from what it has computed.
        bad = llm.add_request(prompt, GREEDY)
        llm.engine.runner.launch(llm.engine.scheduler.schedule())
        llm.engine.reset()
        llm._session.requests.clear()
        assert generate(llm, SOUND, GREEDY) == expected


def test_nan_that_comes_with_a_sampled_token_stays_with_its_request(folder):
    with make_llm(folder) as llm:
        outputs = [one["token_ids"] for one in generate(llm, SOUND, GREEDY)]
        token = outputs[2][5]
        llm.engine.runner.model.model.embed_tokens.weight[token] = torch.nan
        sound = [i for i, prompt in enumerate(SOUND) if token not in prompt]
        # All start in one step, and whoever samples the token first fails first.
        first = {i: outputs[i].index(token) for i in sound if token in outputs[i][:-1]}
        wanted = {i for i in first if first[i] == min(first.values())}
        ids = {llm.add_request(SOUND[i], GREEDY): i for i in sound}
        with pytest.raises(InvalidLogitsError) as caught:
            while llm.has_unfinished():
                llm.step()
        assert {ids[i] for i in caught.value.request_ids} == wanted
        assert len(wanted) < len(ids)


FORMATS = {
    "native": lambda i, ids: {"id": i, "prompt_token_ids": ids},
    "openai": lambda i, ids: {
        "custom_id": str(i),
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": ids},
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_job_gives_a_request_with_nan_logits_an_error_and_does_the_others(
    folder, poisoned, tmp_path, name
):
    sound = random_prompts(30, seed=8)
    prompts = [ids + [POISON] if i % 7 == 3 else ids for i, ids in enumerate(sound)]
    lines = [FORMATS[name](i, ids) for i, ids in enumerate(prompts)]
    flags = ("--temperature", "0.7", "--seed", "1", "--max-tokens", "9", "--stop-token-ids", "200")
    answers = []
    for model in (folder, poisoned):
        source = write_lines(tmp_path / "in.jsonl", lines)
        output = tmp_path / f"{model.name}.jsonl"
        assert main(arguments(source, output, model, *flags)) == 0
        answers.append(read_lines(output))
    for i, (right, answer) in enumerate(zip(*answers)):
        if POISON in prompts[i]:
            said = json.dumps(answer)
            assert answer["error"] and f"line {i + 1}: the model computes NaN" in said
            assert answer.get("id") == i or answer["custom_id"] == str(i)
        else:
            answer.get("response", {}).get("body", {}).pop("created", 0)
            right.get("response", {}).get("body", {}).pop("created", 0)
            answer.get("response", {}).get("body", {}).pop("model", 0)
            right.get("response", {}).get("body", {}).pop("model", 0)
            assert answer == right
