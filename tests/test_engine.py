"""The engine's loop around scheduler and runner: seeds, and steps that fail."""

import shutil

import pytest
from engine_helpers import PROMPTS, assert_empty, assert_greedy, greedy
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.engine.batch import StepResult
from nanovllm.sampling_params import INVALID_TOKEN


class Answer:
    """A step whose sampled tokens were changed on their way."""

    def __init__(self, step, change):
        self.step, self.change = step, change

    def wait(self) -> StepResult:
        answer = self.step.wait()
        return answer._replace(tokens=self.change(answer.tokens))


def break_step(llm, number: int, change) -> None:
    """Let `change` have the tokens of the step of this number from now, and no other's."""
    launch, count = llm.engine.runner.launch, 0

    def broken_launch(batch):
        nonlocal count
        step, count = launch(batch), count + 1
        return Answer(step, change) if count == number else step

    llm.engine.runner.launch = broken_launch


def invalidate_last(tokens: list[int]) -> list[int]:
    return [*tokens[:-1], INVALID_TOKEN]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_invalid_logits_end_one_request_and_the_call_gives_the_others_answers(
    make_llm, checkpoint, overlap, number
):
    llm = make_llm(overlap=overlap)
    break_step(llm, number, invalidate_last)
    outputs = llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    (failed,) = [i for i, output in enumerate(outputs) if output["finish_reason"] == "error"]
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs)):
        expected = checkpoint.expected(prompt, 24)
        if i == failed:
            expected = expected[: len(output["token_ids"])]
        assert output["token_ids"] == expected
    assert len(outputs[failed]["token_ids"]) < number
    assert_empty(llm)
    assert_greedy(llm, checkpoint)


def test_invalid_logits_are_told_in_the_output_of_their_request(make_llm):
    llm = make_llm()
    llm.add_request([1, 2, 3], greedy(1))
    while llm.has_unfinished():
        llm.step()
    second = llm.add_request([4, 5], greedy(9))
    break_step(llm, 2, invalidate_last)
    assert llm.step() == []
    (output,) = llm.step()
    assert (output["id"], output["finish_reason"]) == (second, "error")
    assert "infinite logits after 3 tokens of prompt and output" in output["error"]
    assert not llm.has_unfinished()
    assert llm.metrics()["total"]["output_tokens"] == 2
    assert_empty(llm)


def test_requests_without_a_seed_get_the_llms_in_the_order_in_which_they_come(make_llm):
    """However many tokens each may generate, and so whichever starts first."""

    def outputs(lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = make_llm(seed=7).generate([PROMPTS[4]] * 4, params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]

    even = outputs([20, 20, 20, 20])
    assert len(set(map(tuple, even))) == 4
    for lengths in ([5, 10, 15, 20], [20, 15, 10, 5], [7, 20, 9, 1]):
        assert outputs(lengths) == [whole[:length] for whole, length in zip(even, lengths)]


@pytest.fixture(params=["nan", "inf"])
def broken_checkpoint(request, checkpoint, tmp_path):
    """The checkpoint with one bad value in the embedding of token 7, and a head of its own."""
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint.folder, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][7, 3] = float(request.param)
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_weight_is_an_error_and_no_empty_text(broken_checkpoint, make_llm, ranks):
    llm = make_llm(broken_checkpoint, tensor_parallel_size=ranks)
    message = r"^request \d+ \(prompt \[1, 7\]\): .*weights$"
    for options in (
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(top_k=3, logprobs=2),
        dict(temperature=0.0, repetition_penalty=1.5),
    ):
        params = SamplingParams(**options, max_tokens=4, ignore_eos=True, seed=1)
        with pytest.raises(FloatingPointError, match=message):
            llm.generate([[1, 7]], params, use_tqdm=False)
        assert_empty(llm)
        bad, good = llm.generate([[1, 7], [1, 2]], [params, greedy(1)], use_tqdm=False)
        assert (bad["finish_reason"], bad["token_ids"], bad["text"]) == ("error", [], "")
        assert len(good["token_ids"]) == 1 and "error" not in good
        assert_empty(llm)
