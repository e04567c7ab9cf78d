"""Put the core and its rooms together: the one place that knows both.

The core imports no room. A room that is not there is left out: the library then does less, or does
it slower.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from nanovllm.checks import DEFAULTS, FOREIGN, shown
from nanovllm.config import SCHEDULING_POLICIES, Config
from nanovllm.engine.batch import RunnerInfo
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.weights.hf_config import load_eos_ids, load_hf_config
from nanovllm.weights.hub import resolve_model_folder


def build_engine(config: Config) -> tuple[LLMEngine, Any]:
    """The engine that `config` asks for, and the model's tokenizer: None if it has none.

    Raises ValueError for a model folder that cannot be run as it is asked for.
    """
    policy = choose_policy(config.scheduling_policy)
    folder = resolve_model_folder(config.model)
    if gpu := room("gpu.device"):
        gpu.begin_driver(config.device)
    hf_config = load_hf_config(folder)
    text = room("text")
    make_runner = build_runner
    if config.tensor_parallel_size > 1:
        make_runner = import_module("nanovllm.distributed.tensor_parallel").TensorParallelRunner
    engine_class = LLMEngine
    if config.trace is not None:
        engine_class = import_module("nanovllm.trace.recorder").RecordedEngine
    # Reading a tokenizer can take seconds, and so does reading the weights.
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(text.load_tokenizer, folder) if text else None
        engine = engine_class(
            config,
            hf_config,
            folder,
            make_runner,
            policy,
            lambda info: count_enough_sequences(info, hf_config),
        )
    try:
        engine.stop_ids = load_eos_ids(folder)
        tokenizer = loading.result() if loading else None
        if tokenizer is not None:
            engine.make_detokenizer = lambda: text.Detokenizer(tokenizer)
            if tokenizer.eos_token_id is not None:
                engine.stop_ids |= {tokenizer.eos_token_id}
        engine.constraints = make_constraints(engine, tokenizer)
    except BaseException:
        engine.close()
        raise
    return engine, tokenizer


def make_constraints(engine: LLMEngine, tokenizer: Any) -> Any:
    """What says which tokens may come next, where a request's tokens decide it."""
    constraints, structured = room("sampling.constraints"), room("structured.grammars")
    if constraints is None:
        return None
    forms = None
    if structured is not None:
        forms = structured.Grammars(tokenizer, engine.vocab_size, engine.stop_ids)
    return constraints.Constraints(engine.vocab_size, forms)


def choose_policy(given: Any) -> SchedulingPolicy:
    """The policy that the option `scheduling_policy` names, or is."""
    policies = room("policies")
    if isinstance(given, str):
        if policies:
            return policies.POLICIES[given]()
        if given in ("throughput", "fcfs"):
            return SchedulingPolicy()
        raise ValueError(
            f"scheduling_policy is {given!r}, but nanovllm/policies is not there: use 'fcfs'"
        )
    if isinstance(given, type):
        raise TypeError(
            f"scheduling_policy is the class {given.__name__}: give an object of it, such as "
            f"{given.__name__}()"
        )
    methods = [name for name in vars(SchedulingPolicy) if not name.startswith("_")]
    if lacking := [name for name in methods if not callable(getattr(given, name, None))]:
        raise TypeError(
            f"scheduling_policy is {shown(given)}, which has no method {lacking[0]}: derive its "
            "class from nanovllm.engine.policy.SchedulingPolicy, or use one of "
            f"{', '.join(map(repr, SCHEDULING_POLICIES))}"
        )
    return given


def build_runner(
    config: Config,
    hf_config,
    folder: str,
    *,
    group: ParallelGroup = ParallelGroup(),
) -> ModelRunner:
    """One rank's runner, with what makes it fast on its device."""
    device = choose_device(config.device, group.rank)
    runner_class = ModelRunner
    if device.type == "cuda" and (gpu := room("gpu.runner")):
        runner_class = gpu.CUDAModelRunner
    scores = room("sampling.prompt_logprobs")
    return runner_class(
        config,
        hf_config,
        folder,
        device=device,
        group=group,
        transform=choose_transform(config, device),
        make_resampler=choose_resampler(config, device),
        score_prompts=scores.score_prompts if scores else None,
    )


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank; "auto" is a GPU where there is one."""
    if gpu := room("gpu.device"):
        return gpu.resolve_device(name, rank)
    return torch.device("cpu" if name == "auto" else name)


def choose_transform(config: Config, device: torch.device) -> Callable[[nn.Module], None] | None:
    """What to make of the model once it is loaded. A GPU's own kernels are its runner's affair."""
    check_kernels(config, device)
    if config.kernels == "compile":
        return import_module("nanovllm.kernels.compile").compile_layers
    if config.kernels == "auto" and device.type == "cpu" and (cpu := room("cpu.layers")):
        return cpu.speed_up
    return None


def choose_resampler(config: Config, device: torch.device) -> Callable[[ModelRunner], Any] | None:
    """What makes the sampler for requests that ask for more than temperature and seed."""
    if device.type == "cuda" and config.kernels == "auto" and (gpu := room("gpu.resampler")):
        return gpu.make_resampler
    plain = room("sampling.resampler")
    return plain.Resampler if plain else None


def check_kernels(config: Config, device: torch.device) -> None:
    """Refuse an attention backend that does not suit the kernels or the device."""
    kernels, attention = config.kernels, config.attention_backend
    if kernels != "auto" and attention not in ("auto", "torch"):
        raise ValueError(
            f"kernels is {kernels!r}, which leaves attention to PyTorch, but attention_backend is "
            f"{attention!r}: use 'auto' for one of them"
        )
    if device.type == "cpu" and attention in ("triton", "flash-attn"):
        raise ValueError(
            f"attention_backend is {attention!r}, but device {device} is no GPU: use 'auto'"
        )


def count_enough_sequences(info: RunnerInfo, hf_config) -> int | None:
    """How many sequences make the device about as fast as it gets; None: the more, the faster."""
    if info.device == "cpu" and (batch_size := room("cpu.batch_size")):
        return batch_size.enough_sequences(info.num_parameters, hf_config)
    return None


def prepare_process() -> None:
    """Call before anything is computed in this process."""
    if forked := room("cpu.forked"):
        forked.keep_clear_of_lost_threads()


def share_cores(engine: LLMEngine, config: Config) -> Callable[[], AbstractContextManager]:
    """What each step runs inside, so that it gives way to other processes on its CPU."""
    computes_here = engine.runner.info.device == "cpu" and config.tensor_parallel_size == 1
    if computes_here and (threads := room("cpu.threads")):
        return threads.SharedCores().step
    return nullcontext


def collect_rarely() -> Callable[[], AbstractContextManager]:
    """What each call runs inside, so that collecting garbage holds it up less."""
    garbage = room("cpu.garbage")
    return garbage.full_collections_are_rare if garbage else nullcontext


def trainer() -> Any:
    """The room that gives a running LLM new weights, and lends its memory."""
    return import_module("nanovllm.trainer")


def choose_view(tokenizer: Any) -> Callable[[dict[str, Any], Sequence], dict[str, Any]]:
    """What makes, of a dict and of the request that has ended with it, what a call returns."""
    compat = room("compat.outputs")
    return compat.make_view(tokenizer) if compat else lambda output, request: output


def describe_device(name: str, count: int) -> str:
    """What a user calls `count` devices, of which `name` is the first."""
    gpu = room("gpu.device")
    return gpu.describe_device(name, count) if gpu else name


def room(name: str) -> Any:
    """The module nanovllm.`name`; None if its room was taken out, or one that it needs."""
    try:
        return import_module(f"nanovllm.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nanovllm."):
            raise  # it is there, and misses something else
        return None


if names := room("compat.names"):
    FOREIGN.update(names.FOREIGN)
    DEFAULTS.update(names.DEFAULTS)
