"""What breaks in mid-run is raised as it is, and the LLM is empty and usable after it."""

import json
import logging
import math
import shutil
from dataclasses import replace

import pytest
import torch
from call_helpers import check_empty, completed, generate, random_prompts
from call_helpers import make_llm as make_llm_anywhere
from job_helpers import arguments, read_lines, write_lines
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.__main__ import main
from nanovllm.engine.errors import InvalidLogitsError
from nanovllm.models.transformer import Decoder

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
    "norm": lambda llm: (decoder_of(llm).norm, "forward"),  # when all layers have stored K and V
    "decode": lambda llm: (llm._tokenizer, "decode"),
    "detokenizer": lambda llm: (llm.engine.detokenizer, "update"),
}


def decoder_of(llm):
    layers = llm.engine.runner.model.modules()
    return next(layer for layer in layers if isinstance(layer, Decoder))


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
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_nan_logits_end_their_request_alone(folder, poisoned, kernels, at, budget, overlap):
    """Others that run beside it, or after it in its blocks, get their tokens."""
    prompt = [7] * at + [POISON] + [7] * (39 - at)
    sizes = dict(kernels=kernels, max_num_batched_tokens=budget, num_kvcache_blocks=40)
    sizes["overlap"] = overlap
    with make_llm(folder, **sizes) as llm:
        expected = generate(llm, SOUND, GREEDY)
    with make_llm(poisoned, **sizes) as llm:
        for tried in range(3):
            others = [llm.add_request(one, GREEDY) for one in SOUND[: 2 * tried]]
            for _ in others:
                llm.step()
            bad = llm.add_request(prompt, GREEDY)
            outputs = {}
            while llm.has_unfinished():
                outputs |= {output.pop("id"): output for output in llm.step()}
            assert completed([outputs[i] for i in others]) == expected[: 2 * tried]
            output = outputs[bad]
            assert (output["finish_reason"], output["token_ids"]) == ("error", [])
            assert output["prompt_token_ids"] == prompt and output["stop_reason"] is None
            assert "computed NaN or infinite logits after 40 tokens" in output["error"]
            check_empty(llm)
            assert generate(llm, SOUND, GREEDY) == expected
        # It is aborted before anything is sampled from what it has computed.
        bad = llm.add_request(prompt, GREEDY)
        llm.engine.runner.launch(llm.engine.scheduler.schedule())
        llm.engine.reset()
        llm._session.requests.clear()
        assert generate(llm, SOUND, GREEDY) == expected


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": "zzz"}], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_nan_that_comes_with_a_sampled_token_ends_its_request_after_that_token(
    folder, overlap, more
):
    params = replace(GREEDY, **more)
    with make_llm(folder, overlap=overlap) as llm:
        expected = generate(llm, SOUND, params)
        token = expected[2]["token_ids"][5]
        llm.engine.runner.model.model.embed_tokens.weight[token] = torch.nan
        sound = [i for i, prompt in enumerate(SOUND) if token not in prompt]
        outputs = generate(llm, [SOUND[i] for i in sound], params)
        reasons = set()
        for i, output in zip(sound, outputs):
            ids = expected[i]["token_ids"]
            if token in ids[:-1]:
                ids = ids[: ids.index(token) + 1]
                assert output["finish_reason"] == "error" and "NaN" in output["error"]
                assert output["text"] == llm.tokenizer.decode(ids, skip_special_tokens=True)
                assert output["token_ids"] == ids
                if params.logprobs is not None:
                    assert [next(iter(one)) for one in output["logprobs"]] == ids
            else:
                assert output == expected[i] and "error" not in output
            reasons.add(output["finish_reason"])
        assert len(reasons) > 1
        check_empty(llm)


BAD = [7] * 20 + [POISON] + [7] * 5


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "overlap"])
def poisoned_llm(poisoned, request):
    with make_llm(poisoned, overlap=request.param) as llm:
        yield llm


def test_what_led_to_nan_is_not_found_in_the_prefix_cache_again(folder):
    """Whatever made it so: with what is computed anew, the prompt is as good as any."""
    prompt = [*range(40)]
    with make_llm(folder) as llm:
        (expected,) = generate(llm, [prompt], GREEDY)
        for cached in (prompt[:38], prompt):  # its last block in part, and in whole
            assert generate(llm, [cached], GREEDY)
            with torch.inference_mode():
                llm.engine.runner.kv_cache.fill_(torch.nan)
            with pytest.raises(InvalidLogitsError):
                generate(llm, [prompt], GREEDY)
            assert generate(llm, [prompt], GREEDY) == [expected]


def test_a_call_raises_where_all_its_requests_end_with_an_error(folder, poisoned_llm):
    llm = poisoned_llm
    with make_llm(folder) as sound:
        expected = generate(sound, SOUND[:1], GREEDY)
    other = llm.add_request(SOUND[0], GREEDY)  # not of this call
    several = [GREEDY, replace(GREEDY, n=3, temperature=1.0)]
    message = r"request \d+ \(prompt \[7, .*NaN.*the 1 other requests of the call ended"
    with pytest.raises(InvalidLogitsError, match=message):
        llm.generate([BAD, BAD], several, use_tqdm=False)
    with pytest.raises(InvalidLogitsError, match="NaN"):
        llm.score([BAD, BAD], [[1], [[2], [3]]], use_tqdm=False)
    pieces = []
    with pytest.raises(InvalidLogitsError, match="NaN"):
        pieces.extend(llm.stream([BAD, BAD], GREEDY))
    assert llm.generate([], use_tqdm=False) == []
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    assert outputs[0].pop("id") == other and completed(outputs) == expected
    check_empty(llm)


def test_a_stream_tells_of_an_error_in_the_last_piece_of_its_request(folder, poisoned_llm):
    prompts = [SOUND[0], BAD, SOUND[1]]
    with make_llm(folder) as llm:
        expected = generate(llm, prompts[::2], GREEDY)
    pieces = [*poisoned_llm.stream(prompts, GREEDY)]
    assert [piece for piece in pieces if piece[0] == 1] == [(1, "", [], "error")]
    for i, answer in zip((0, 2), expected):
        _, texts, _, reasons = zip(*[piece for piece in pieces if piece[0] == i])
        assert ("".join(texts), reasons[-1]) == (answer["text"], answer["finish_reason"])
    check_empty(poisoned_llm)


def test_a_score_that_is_no_number_says_so_beside_those_of_the_others(folder, poisoned_llm):
    contexts, continuations = [SOUND[0], BAD, SOUND[1]], [[[1, 2], [3]], [4, 5], [6]]
    with make_llm(folder) as llm:
        right = llm.score(contexts, continuations, use_tqdm=False)
    poisoned_llm.reset_prefix_cache()  # the last bits depend on what is computed anew
    scores = poisoned_llm.score(contexts, continuations, use_tqdm=False)
    assert scores[::2] == right[::2]
    assert scores[1]["token_ids"] == [4, 5] and math.isnan(scores[1]["cumulative_logprob"])
    assert "NaN" in scores[1]["error"] and "error" not in right[1]
    check_empty(poisoned_llm)


def test_of_several_completions_those_without_an_error_are_whole(poisoned_llm):
    def end_some(output, logits):
        return logits - torch.inf if len(output) == 4 and output[0] % 2 else logits

    llm = poisoned_llm
    params = SamplingParams(n=8, seed=3, temperature=2.0, max_tokens=9, ignore_eos=True)
    (whole,) = generate(llm, [SOUND[0]], params)
    (cut,) = llm.generate([SOUND[0]], replace(params, logits_processors=[end_some]), use_tqdm=False)
    reasons = set()
    for one, other, view in zip(cut["completions"], whole["completions"], cut.outputs):
        ids = other["token_ids"]
        if ids[0] % 2:
            assert one["token_ids"] == ids[:4] and one["finish_reason"] == view.finish_reason
            assert "no token can come next" in one["error"] == view.error
        else:
            assert one == other and view.error is None
        reasons.add(one["finish_reason"])
    assert reasons == {"error", "length"}
    check_empty(llm)


def test_a_warning_is_logged_once_for_all_errors_of_a_call(poisoned_llm, caplog):
    for _ in range(2):
        caplog.clear()
        outputs = poisoned_llm.generate([BAD, SOUND[0], BAD, BAD], GREEDY, use_tqdm=False)
        assert [output["finish_reason"] == "error" for output in outputs] == [1, 0, 1, 1]
        (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert record.name == "nanovllm" and outputs[0]["error"] in record.getMessage()


def test_a_job_line_of_several_completions_says_which_ended_with_an_error(folder, tmp_path):
    barred = [[1, 1], [1, 2], [2, 1], [2, 2]]
    line = {"prompt_token_ids": [5], "n": 2, "allowed_token_ids": [1, 2], "bad_words": barred}
    source = write_lines(tmp_path / "in.jsonl", [line, line | {"bad_words": []}])
    output = tmp_path / "out.jsonl"
    assert main(arguments(source, output, folder, "--max-tokens", "3")) == 0
    bad, good = read_lines(output)
    assert bad["error"].startswith("line 1: completion 0 of 2: no token can come next")
    assert "error" not in good and len(good["completions"]) == 2


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
            assert answer["error"] and f"line {i + 1}: the model computed NaN" in said
            assert answer.get("id") == i or answer["custom_id"] == str(i)
        else:
            answer.get("response", {}).get("body", {}).pop("created", 0)
            right.get("response", {}).get("body", {}).pop("created", 0)
            answer.get("response", {}).get("body", {}).pop("model", 0)
            right.get("response", {}).get("body", {}).pop("model", 0)
            assert answer == right
