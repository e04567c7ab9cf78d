"""New weights, and memory that an LLM lends: the tokens are those of an LLM loaded from the
weights, and what is refused changes nothing.
"""

import gc
import os
import signal
import weakref

import pytest
import torch
from engine_helpers import (
    FAMILIES,
    MODELS,
    PROMPTS,
    Checkpoint,
    assert_empty,
    assert_greedy,
    greedy,
    save_checkpoint,
)
from safetensors.torch import load_file
from test_trace import Watched
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from nanovllm import LLM
from nanovllm.engine.errors import AsleepError
from nanovllm.engine.snapshots import StateRows
from nanovllm.features.weight_updates import new_weights, sleep

SOME = [PROMPTS[2], PROMPTS[5], PROMPTS[8]]
NORM = "model.norm.weight"


@pytest.fixture(scope="session")
def get_trained(tmp_path_factory):
    """A function: the name of a model -> a Checkpoint of it with other weights, made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder = tmp_path_factory.mktemp(f"trained-{name}")
            save_checkpoint(folder, (MODELS | FAMILIES)[name], seed=6)
            made[name] = Checkpoint(folder)
        return made[name]

    return get


@pytest.fixture
def trained(get_trained) -> Checkpoint:
    return get_trained("gqa-2")


def state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights as transformers holds them."""
    return checkpoint._model.state_dict()


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights as they lie in the folder."""
    files = checkpoint.folder.glob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def assert_some(llm: LLM, checkpoint: Checkpoint) -> None:
    assert_greedy(llm, checkpoint, SOME, max_tokens=10)


def assert_forgets_and_takes_again(llm: LLM, old: Checkpoint, new: Checkpoint) -> None:
    """Asleep at level 2, what was updated is forgotten, and other weights are taken."""
    llm.sleep(2)
    llm.wake_up()
    assert_some(llm, old)
    llm.sleep(2)
    llm.update_weights(state(new).items())
    llm.wake_up()
    assert_some(llm, new)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize(
    "name",
    ["gqa-2", "tied", "attention-bias", "experts", "phi3", "gemma3", "olmo2", "granite", "gpt-oss"],
)
def test_new_weights_give_the_tokens_of_an_llm_loaded_from_them(
    make_llm, get_checkpoint, get_trained, name, kernels
):
    """Of what transformers holds, and then of what lies in a folder; with a prefix cache in use."""
    old, new = get_checkpoint(name), get_trained(name)
    llm = make_llm(old.folder, kernels=kernels)
    assert_some(llm, old)
    llm.update_weights(state(new).items())
    assert_some(llm, new)
    llm.update_weights(reversed(tensors_of(old).items()))
    assert_some(llm, old)


def test_layers_that_torch_compile_made_take_new_weights_and_are_not_compiled_anew(
    make_llm, checkpoint, trained
):
    llm = make_llm(kernels="compile")
    assert_some(llm, checkpoint)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    llm.update_weights(state(trained).items())
    assert_some(llm, trained)
    weights = [weakref.ref(parameter) for parameter in llm.engine.runner.model.parameters()]
    gc.disable()  # a layer is in a circle with what was made of it
    try:
        llm.sleep(2)
        assert not any(ref() is not None for ref in weights)
    finally:
        gc.enable()
    llm.wake_up()
    assert_some(llm, checkpoint)
    assert compiled > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("name", ["tied", "gpt-oss"])
def test_several_ranks_take_new_weights_refuse_wrong_ones_and_sleep(
    make_llm, get_checkpoint, get_trained, name
):
    old, new = get_checkpoint(name), get_trained(name)
    llm = make_llm(old.folder, tensor_parallel_size=2)
    assert_some(llm, old)
    llm.update_weights(state(new).items())
    assert_some(llm, new)
    with pytest.raises(ValueError, match=f"weights lacks {NORM}: give all"):
        llm.update_weights((n, x) for n, x in state(old).items() if n != NORM)
    if name == "tied":
        head = state(old)["lm_head.weight"].clone()
        head[-1] += 1  # which the last rank alone sees
        with pytest.raises(ValueError, match="lm_head.weight with other values than model.em"):
            llm.update_weights((state(old) | {"lm_head.weight": head}).items())
    assert_some(llm, new)
    llm.sleep()
    with pytest.raises(AsleepError):
        llm.generate(SOME)
    llm.wake_up()
    assert_some(llm, new)
    assert_forgets_and_takes_again(llm, old, new)


def test_the_prefix_cache_is_empty_after_an_update(make_llm, checkpoint, trained):
    llm = make_llm()
    prompt = PROMPTS[6]
    llm.generate(prompt, greedy(2), use_tqdm=False)
    (output,) = llm.generate(prompt, greedy(2), use_tqdm=False)
    assert output["num_cached_tokens"] > 16
    llm.update_weights(state(trained).items())
    (output,) = llm.generate(prompt, greedy(2), use_tqdm=False)
    assert output["num_cached_tokens"] == 0
    assert output["token_ids"] == trained.expected(prompt, 2)


def test_new_weights_lie_where_the_old_ones_lay(make_llm, trained):
    llm = make_llm(kernels="plain")
    model = llm.engine.runner.model
    places = {name: x.data_ptr() for name, x in model.named_parameters()}
    llm.update_weights(state(trained).items())
    assert llm.engine.runner.model is model
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == places


def test_dtypes_views_and_what_requires_gradients_are_converted(make_llm, trained):
    llm = make_llm()
    big = torch.zeros(3, 2, 32, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        big[1, 1] = state(trained)[NORM].double()
    weights = {name: x.double() for name, x in state(trained).items()} | {NORM: big[1, 1]}
    weights["lm_head.weight"] = weights["lm_head.weight"].t().contiguous().t()
    llm.update_weights(weights.items())
    assert_some(llm, trained)


def test_a_generator_may_use_one_tensors_memory_for_all(make_llm, get_checkpoint, get_trained):
    """And yields what is not of the text model, or computed, as old checkpoints have it."""
    old, new = get_checkpoint("tied"), get_trained("tied")
    llm = make_llm(old.folder)
    room = torch.empty(max(x.numel() for x in state(new).values()))

    def weights():
        yield "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(3)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        for name, x in sorted(state(new).items()):  # the head before the embedding
            yield name, room[: x.numel()].view(x.shape).copy_(x)

    llm.update_weights(weights())
    assert_some(llm, new)


def test_a_tied_head_need_not_come(make_llm, get_checkpoint, get_trained):
    old, new = get_checkpoint("tied"), get_trained("tied")
    llm = make_llm(old.folder)
    llm.update_weights((n, x) for n, x in state(new).items() if n != "lm_head.weight")
    assert_some(llm, new)


@pytest.fixture
def with_own_head(tmp_path):
    """A function: a seed -> a checkpoint whose config.json ties the head, and which has another."""

    def make(seed: int) -> Checkpoint:
        folder = tmp_path / str(seed)
        save_checkpoint(folder, MODELS["gqa-2"], seed)
        made = Checkpoint(folder)
        config = (folder / "config.json").read_text()
        untied, tied = '"tie_word_embeddings": false', '"tie_word_embeddings": true'
        assert untied in config
        (folder / "config.json").write_text(config.replace(untied, tied))
        return made

    return make


def test_the_text_model_of_one_that_also_sees_takes_its_part(make_llm, tmp_path):
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = FAMILIES["gemma3"].to_dict()
    made = []
    for seed in (0, 1):
        config = Gemma3Config(text_config=text, vision_config=vision | dict(image_size=28))
        torch.manual_seed(seed)
        made.append(Gemma3ForConditionalGeneration(config).eval())
        made[seed].save_pretrained(tmp_path / str(seed))
    tokens = []
    for seed in (0, 1):
        llm = make_llm(tmp_path / str(seed))
        tokens.append([out["token_ids"] for out in llm.generate(SOME, greedy(8), use_tqdm=False)])
    assert tokens[0] != tokens[1]
    llm = make_llm(tmp_path / "0")
    llm.update_weights(made[1].state_dict().items())
    outputs = llm.generate(SOME, greedy(8), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == tokens[1]


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_head_that_the_loaded_checkpoint_untied_takes_new_weights(
    make_llm, with_own_head, kernels
):
    old, new = with_own_head(11), with_own_head(12)
    llm = make_llm(old.folder, kernels=kernels)
    assert_some(llm, old)
    llm.update_weights(state(new).items())
    assert_some(llm, new)
    assert_forgets_and_takes_again(llm, old, new)


def in_shards() -> torch.Tensor:
    """What looks like a tensor of FSDP."""
    tensor = torch.zeros(32)
    tensor.full_tensor = lambda: tensor
    return tensor


GATE = "model.layers.1.mlp.gate_proj.weight"
WRONG = {
    "missing": (lambda w: [p for p in w if p[0] != GATE], ValueError, f"lacks {GATE}: give all"),
    "unknown": (lambda w: [*w, ("model.layers.2.x", torch.zeros(1))], ValueError, "no place"),
    "shape": (lambda w: [*w[:3], (GATE, torch.zeros(32, 48))], ValueError, rf"{GATE} of shape"),
    "flat": (lambda w: [*w[:3], (NORM, torch.tensor(1.0))], ValueError, rf"{NORM} of shape \(\)"),
    "integers": (lambda w: [(n, x.int()) for n, x in w], ValueError, "in torch.int32, not one"),
    "eight-bit": (
        lambda w: [(n, x.to(torch.float8_e4m3fn)) for n, x in w],
        ValueError,
        "in torch.float8_e4m3fn, not one of",
    ),
    "no-numbers": (
        lambda w: [*w[:3], (NORM, torch.full((32,), torch.nan)), *w[3:]],
        ValueError,
        f"{NORM} with NaN or infinite numbers: look for the training step",
    ),
    "twice": (lambda w: [*w, w[0]], ValueError, r"model\.\S+ twice: give each tensor once"),
    "no-memory": (lambda w: [(NORM, torch.empty(32, device="meta"))], ValueError, "plain values"),
    "sparse": (lambda w: [(NORM, torch.zeros(32).to_sparse())], ValueError, "plain values"),
    "shards": (lambda w: [(NORM, in_shards())], TypeError, rf"{NORM} in shards: give its full_te"),
    "a-dict": (dict, TypeError, r"weights has 'model\.\S+': give pairs of name and tensor"),
    "arrays": (lambda w: [(n, x.numpy()) for n, x in w], TypeError, "give pairs of name and"),
    "triples": (lambda w: [(n, x, 1) for n, x in w], TypeError, "give pairs of name and tensor"),
    "numbers": (lambda w: [(1, x) for n, x in w], TypeError, "give pairs of name and tensor"),
    "nothing": (lambda w: None, TypeError, "weights is None: give pairs of name and tensor"),
    "empty": (lambda w: [], ValueError, "lacks lm_head.weight, model"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_weights_are_named_and_leave_the_old_ones(make_llm, checkpoint, trained, kind):
    change, error, match = WRONG[kind]
    llm = make_llm()
    assert_some(llm, checkpoint)
    with pytest.raises(error, match=match):
        llm.update_weights(change(list(state(trained).items())))
    assert new_weights.pending(llm.engine.runner).incoming is None
    assert_some(llm, checkpoint)
    llm.update_weights(state(trained).items())
    assert_some(llm, trained)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_iterable_that_fails_leaves_the_old_weights(make_llm, checkpoint, trained, error):
    def weights():
        yield from list(state(trained).items())[:5]
        raise error("lost")

    llm = make_llm()
    with pytest.raises(error, match="lost"):
        llm.update_weights(weights())
    assert new_weights.pending(llm.engine.runner).incoming is None
    assert_some(llm, checkpoint)


def test_an_interrupt_leaves_no_model_of_old_and_new_weights(make_llm, trained, monkeypatch):
    take, count = torch.nn.Module.get_submodule, iter(range(100))

    def take_and_interrupt(self, path):
        if next(count) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, path)

    llm = make_llm()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.nn.Module, "get_submodule", take_and_interrupt)
        llm.update_weights(state(trained).items())
    assert next(count) > 6
    assert_some(llm, trained)


def test_an_iterable_that_leaves_a_request_unfinished_leaves_the_old_weights(
    make_llm, checkpoint, trained
):
    llm = make_llm()

    def weights():
        assert_some(llm, checkpoint)
        llm.add_request(PROMPTS[4], greedy(3))
        yield from state(trained).items()

    with pytest.raises(ValueError, match="^weights added requests that are unfinished: let them"):
        llm.update_weights(weights())
    outputs = []
    while llm.has_unfinished():
        outputs += llm.step()
    assert [one["token_ids"] for one in outputs] == [checkpoint.expected(PROMPTS[4], 3)]
    llm.update_weights(state(trained).items())
    assert_some(llm, trained)


@pytest.mark.parametrize("call", ["update_weights", "sleep", "wake_up"])
def test_an_iterable_that_comes_between_its_own_tensors_leaves_the_old_weights(
    make_llm, checkpoint, trained, call
):
    llm = make_llm()
    arguments = dict(update_weights=[state(trained).items()]).get(call, [])

    def weights():
        first, *others = state(trained).items()
        yield first
        getattr(llm, call)(*arguments)
        yield from others

    with pytest.raises(ValueError, match=f"^{call} was called while .* another call is running"):
        llm.update_weights(weights())
    assert_some(llm, checkpoint)
    llm.update_weights(state(trained).items())
    assert_some(llm, trained)


@pytest.mark.parametrize("call", ["update_weights", "sleep", "wake_up"])
def test_unfinished_requests_are_left_alone(make_llm, checkpoint, trained, call):
    llm = make_llm()
    arguments = dict(update_weights=[state(trained).items()]).get(call, [])
    prompt = PROMPTS[4]
    stream = llm.stream(prompt, greedy(6))
    tokens = list(next(stream)[2])
    with pytest.raises(ValueError, match=f"{call} was called while requests are unfinished"):
        getattr(llm, call)(*arguments)
    for _, _, new, _ in stream:
        tokens += new
    assert tokens == checkpoint.expected(prompt, 6)
    request = llm.add_request(prompt, greedy(3))
    llm.pause(request)
    with pytest.raises(ValueError, match="unfinished"):
        getattr(llm, call)(*arguments)
    llm.resume(request)
    outputs = []
    while not outputs:
        outputs = llm.step()
    assert outputs[0]["token_ids"] == checkpoint.expected(prompt, 3)
    getattr(llm, call)(*arguments)
    assert_empty(llm)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_up_the_tokens(make_llm, checkpoint, level, kernels):
    llm = make_llm(kernels=kernels)
    runner = llm.engine.runner
    assert_greedy(llm, checkpoint)
    cache = StorageWeakRef(runner.kv_cache.untyped_storage())
    weights = [weakref.ref(parameter) for parameter in runner.model.parameters()]
    assert not cache.expired()
    llm.sleep(level)
    assert cache.expired() and runner.kv_cache.nbytes == 0
    assert [ref() is None for ref in weights] == [level == 2] * len(weights)
    assert level == 1 or all(parameter.is_meta for parameter in runner.model.parameters())
    llm.wake_up()
    (output,) = llm.generate(PROMPTS[6], greedy(2), use_tqdm=False)
    assert output["num_cached_tokens"] == 0
    assert_greedy(llm, checkpoint)
    llm.wake_up()  # does nothing
    assert_greedy(llm, checkpoint)


@pytest.mark.parametrize("level", [1, 2])
def test_an_llm_that_sleeps_says_so_and_forgets_nothing_else(make_llm, checkpoint, level):
    llm = make_llm()
    assert_some(llm, checkpoint)
    before, steps = llm.metrics(), []
    llm.on_step(steps.append)
    late = llm.stream(SOME[0], greedy(2))  # of a generator that begins when it is read
    llm.sleep(level)
    for call in (
        lambda: llm.generate(SOME),
        lambda: llm.stream(SOME),
        lambda: llm.score(SOME[:1], SOME[1:2]),
        lambda: next(late),
        lambda: llm.add_request(SOME[0]),
        lambda: llm.step(),
        lambda: llm.sleep(),
    ):
        with pytest.raises(AsleepError, match="this LLM is asleep: call wake_up first"):
            call()
    assert llm.metrics()["total"] == before["total"] and not llm.has_unfinished()
    assert not steps
    llm.wake_up()
    assert_some(llm, checkpoint)
    assert steps


def test_a_stream_that_begins_as_another_thread_lets_the_llm_sleep_says_so(
    make_llm, checkpoint, monkeypatch
):
    llm = make_llm()
    lock, sleeps = llm._session.lock, [llm.sleep]

    class Lock:
        def __enter__(self):
            if sleeps:
                sleeps.pop()()
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    with monkeypatch.context() as patch:
        patch.setattr(llm._session, "lock", Lock())
        with pytest.raises(AsleepError):
            next(llm.stream(SOME[0]))
    llm.wake_up()
    assert_some(llm, checkpoint)


@pytest.mark.parametrize("level", [1, 2])
def test_an_llm_wakes_up_with_as_many_blocks_as_it_had(make_llm, checkpoint, monkeypatch, level):
    """However much memory there is now: who uses the LLM knows how many it has."""
    llm = make_llm(num_kvcache_blocks=None)
    shapes = [part.shape for part in llm.engine.runner.kv_parts]
    monkeypatch.setattr(llm.engine.runner, "_count_blocks_and_rows", lambda: (7, StateRows(0, 0)))
    llm.sleep(level)
    llm.wake_up()
    assert [part.shape for part in llm.engine.runner.kv_parts] == shapes
    assert llm.engine.scheduler.blocks.num_blocks == llm.num_kvcache_blocks == shapes[0][1]
    assert_some(llm, checkpoint)


def test_an_output_that_nobody_took_is_not_lost(make_llm, checkpoint):
    llm = make_llm()
    llm.add_request(PROMPTS[4], greedy(2))
    llm.generate(PROMPTS[5], greedy(9), use_tqdm=False)
    assert not llm.engine.has_unfinished() and llm.has_unfinished()
    with pytest.raises(
        ValueError, match="sleep was called while requests are unfinished or .*: let"
    ):
        llm.sleep()
    (output,) = llm.step()
    assert output["token_ids"] == checkpoint.expected(PROMPTS[4], 2)
    llm.sleep()


def test_an_llm_that_woke_up_as_an_interrupt_came_takes_no_memory_twice(make_llm, checkpoint):
    llm = make_llm()
    llm.sleep()
    sleep.restore(llm.engine.runner)  # and nobody was told
    cache = llm.engine.runner.kv_cache
    llm.wake_up()
    assert llm.engine.runner.kv_cache is cache
    assert_some(llm, checkpoint)


@pytest.mark.parametrize("level", [1, 2])
def test_a_closed_llm_does_not_wake_up(make_llm, level):
    llm = make_llm()
    llm.sleep(level)
    llm.close()
    for call in (llm.sleep, llm.wake_up, lambda: llm.update_weights([])):
        with pytest.raises(ValueError, match="this LLM is closed"):
            call()


@pytest.mark.parametrize("level, error", [(0, ValueError), (3, ValueError), ("2", TypeError)])
def test_a_wrong_level_is_refused(make_llm, checkpoint, level, error):
    llm = make_llm()
    with pytest.raises(error, match=f"level is {level!r}: use 1"):
        llm.sleep(level)
    assert_some(llm, checkpoint)


@pytest.mark.parametrize("level", [1, 2])
def test_new_weights_come_to_an_llm_that_sleeps(make_llm, checkpoint, trained, level):
    llm = make_llm()
    llm.sleep(level)
    llm.update_weights(state(trained).items())
    with pytest.raises(ValueError, match="lacks"):  # and leaves those that came before
        llm.update_weights([])
    llm.wake_up()
    assert_some(llm, trained)
    assert new_weights.pending(llm.engine.runner).for_wake_up is None
    llm.sleep(2)
    llm.wake_up()
    assert_some(llm, checkpoint)  # the folder's


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("step", ["load", "allocate"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_wake_up_leaves_the_llm_asleep(
    make_llm, checkpoint, monkeypatch, level, step, error
):
    if (level, step) == (1, "load"):
        pytest.skip("the weights are there")
    llm = make_llm()
    llm.sleep(level)
    with monkeypatch.context() as patch, pytest.raises(error):
        done = getattr(llm.engine.runner, step)

        def do_and_fail(*args):
            done(*args)
            raise error

        patch.setattr(llm.engine.runner, step, do_and_fail)
        llm.wake_up()
    assert llm.engine.runner.kv_cache.nbytes == 0
    with pytest.raises(AsleepError):
        llm.generate(SOME)
    llm.wake_up()
    assert_some(llm, checkpoint)


def test_a_trace_goes_on_over_new_weights_and_sleep(make_llm, checkpoint, trained, tmp_path):
    llm = make_llm(trace=str(tmp_path / "run.jsonl"))
    watched = Watched(llm)
    assert_some(llm, checkpoint)
    llm.update_weights(state(trained).items())
    assert_some(llm, trained)
    llm.sleep(2)
    llm.wake_up()
    assert_some(llm, checkpoint)
    watched.compare()


def test_fused_layers_and_packed_ones_take_the_weights_of_plain_ones(get_checkpoint, get_trained):
    pytest.importorskip("triton")
    from model_helpers import Driver, load

    from nanovllm.backends.cuda.attention_backends import PLAIN_BACKEND
    from nanovllm.backends.cuda.fused_layers import fuse

    for name in ("attention-bias", "gemma3"):
        old, new = get_checkpoint(name), get_trained(name)
        fused, plain = load(old.folder), load(new.folder)
        fuse(fused, PLAIN_BACKEND)
        new_weights.copy_weights(plain, fused)
        logits = [Driver(model, 1, 16).step({}, {0: PROMPTS[2]}) for model in (fused, plain)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


GPU = dict(device="cuda", dtype="float32", num_kvcache_blocks=4096)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa-2", "tied", "experts", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(enforce_eager=True), dict(kernels="plain"), dict(overlap=False)],
    ids=str,
)
def test_graphs_go_on_with_new_weights_and_come_back_after_sleep(
    make_llm, get_checkpoint, get_trained, name, options
):
    old, new = get_checkpoint(name), get_trained(name)
    llm = make_llm(old.folder, **GPU, **options)
    runner = llm.engine.runner
    assert_some(llm, old)
    graphs = runner.graphs
    places = [parameter.data_ptr() for parameter in runner.model.parameters()]
    llm.update_weights((name, x.cuda()) for name, x in state(new).items())
    assert_some(llm, new)
    assert runner.graphs is graphs
    assert [parameter.data_ptr() for parameter in runner.model.parameters()] == places
    for level, expected in ((1, new), (2, old)):
        torch.cuda.empty_cache()
        cache, taken = runner.kv_cache.nbytes, torch.cuda.memory_allocated()
        free, _ = torch.cuda.mem_get_info()
        with torch.inference_mode():
            llm.sleep(level)
        assert not any(parameter.is_cuda for parameter in runner.model.parameters())
        assert torch.cuda.memory_allocated() < taken - cache
        assert torch.cuda.mem_get_info()[0] > free + cache / 2
        llm.wake_up()
        assert (runner.graphs is None) == (graphs is None)
        assert_some(llm, expected)
        assert_greedy(llm, expected)
    for level in (1, 2):
        llm.sleep(level)
        llm.update_weights(state(new).items())
        llm.wake_up()
        assert_some(llm, new)
        llm.update_weights(state(old).items())


@pytest.mark.gpu
def test_two_gpus_take_new_weights_and_sleep(make_llm, get_checkpoint, get_trained):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    old, new = get_checkpoint("experts"), get_trained("experts")
    llm = make_llm(old.folder, **GPU, tensor_parallel_size=2)
    assert_some(llm, old)
    llm.update_weights(state(new).items())
    assert_some(llm, new)
    for level, expected in ((1, new), (2, old)):
        llm.sleep(level)
        llm.wake_up()
        assert_some(llm, expected)
