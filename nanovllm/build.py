"""The assembly of an engine from the parts that a configuration asks for.

The core knows none of the packages beside it; this module knows all of them. Only `llm.py` and the
process of a rank use this module. A backend is imported inside a function if it needs packages that
a user may lack or that are slow to import.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from os import fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.backends.cpu.batch_size import enough_sequences
from nanovllm.backends.cpu.runner import CPUModelRunner
from nanovllm.backends.cpu.threads import SharedCores
from nanovllm.backends.cpu.transform import use_cpu_layers
from nanovllm.backends.cuda.device import resolve_device, start_cuda_driver
from nanovllm.backends.quantised.config import (
    Quantization,
    check_kv_cache_scheme,
    read_quantization,
)
from nanovllm.config import Config
from nanovllm.engine.batch import RunnerInfo
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.policies import choose_policy
from nanovllm.features.sampling.constraints import Constraints
from nanovllm.features.sampling.grammars import Grammars
from nanovllm.features.sampling.logprobs import score_prompts
from nanovllm.features.sampling.resampler import Resampler
from nanovllm.features.trace.recorder import Recorder
from nanovllm.frontend.detokenizer import Detokenizer
from nanovllm.frontend.tokenizer import Tokenizer, load_tokenizer
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.models import find_model, load_model_config
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3_5 import Qwen3_5Config
from nanovllm.weights.hub import resolve_model_folder
from nanovllm.weights.loader import check_num_layers
from nanovllm.weights.model_files import load_eos_ids


def build_engine(config: Config) -> tuple[LLMEngine, Tokenizer | None]:
    """Load the model that `config` names, and build the engine that runs it.

    Returns the engine, and the model's tokenizer or None if the model folder has none. Raises
    ValueError for a model folder that cannot be run as `config` asks.
    """
    policy = choose_policy(config.scheduling_policy)
    recorder = None if config.trace is None else Recorder(fspath(config.trace))
    folder = resolve_model_folder(config.model)
    start_cuda_driver(config.device)
    model_config = set_state_dtype(load_model_config(folder), config)
    quantization_of(config, model_config)  # raises ValueError for a format that does not run here
    if config.load_format == "auto":
        check_num_layers(model_config.num_hidden_layers, folder, find_model(model_config))
    # Tokenizer and weights are loaded at the same time, because each can take seconds.
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(load_tokenizer, folder)
        runner = build_runners(config, model_config, folder)
    try:
        tokenizer = loading.result()
        stop_ids = load_eos_ids(folder)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            stop_ids |= {tokenizer.eos_token_id}
        forms = Grammars(tokenizer, model_config.vocab_size, stop_ids)
        engine = LLMEngine(
            config,
            model_config,
            runner,
            policy,
            stop_ids=stop_ids,
            constraints=Constraints(model_config.vocab_size, stop_ids, forms),
            enough_seqs=count_enough_sequences(runner.info, model_config),
            make_detokenizer=None if tokenizer is None else lambda: Detokenizer(tokenizer),
            listeners=() if recorder is None else (recorder,),
        )
        if recorder is not None:
            decode = tokenizer.decode if tokenizer is not None and config.trace_text else None
            recorder.follow(engine, config, model_config, folder, decode)
    except BaseException:
        runner.close()
        raise
    return engine, tokenizer


def set_state_dtype(model_config: ModelConfig, config: Config) -> ModelConfig:
    """Return the model's configuration with the dtype of states that the user asks for, if any.

    Only models with Gated DeltaNet have such states.
    """
    dtype = config.mamba_ssm_cache_dtype
    if dtype == "auto" or not isinstance(model_config, Qwen3_5Config):
        return model_config
    return replace(model_config, mamba_ssm_dtype=dtype)


def build_runners(config: Config, model_config: ModelConfig, folder: str | Path) -> Any:
    """Build the runner of a single rank, or start all ranks behind the interface of one runner."""
    if config.tensor_parallel_size == 1:
        return build_runner(config, model_config, folder)
    from nanovllm.backends.tensor_parallel.runner import TensorParallelRunner

    return TensorParallelRunner(config, model_config, folder, build_runner)


def build_runner(
    config: Config,
    model_config: ModelConfig,
    folder: str | Path,
    *,
    group: ParallelGroup = ParallelGroup(),
) -> ModelRunner:
    """Build the runner of one rank, with the parts that make it fast on its device."""
    device = resolve_device(config.device, group.rank)
    check_kernels(config, device)
    check_quantization(config, device)
    if config.batch_invariant:
        check_batch_invariance(config, device)
    make_runner: Callable[..., ModelRunner] = ModelRunner
    make_resampler: Callable[[ModelRunner], Any] = Resampler
    if device.type == "cuda":
        from nanovllm.backends.cuda.resampler import make_resampler as make_cuda_resampler
        from nanovllm.backends.cuda.runner import CUDAModelRunner

        make_runner = CUDAModelRunner
        if config.kernels == "auto":
            make_resampler = make_cuda_resampler
    elif device.type == "cpu" and config.kernels == "auto":
        make_runner = CPUModelRunner
    return make_runner(
        config,
        model_config,
        folder,
        device=device,
        group=group,
        exchange_layers=choose_exchange(config, model_config),
        transform=choose_transform(config, device),
        make_resampler=make_resampler,
        score_prompts=score_prompts,
    )


def quantization_of(config: Config, model_config: ModelConfig) -> Quantization | None:
    """Return the formats of the model's weights; None: its layers are plain."""
    if config.kv_cache_dtype == "fp8":
        check_kv_cache_scheme(model_config.quantization_config)
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    return read_quantization(
        model_config.quantization_config,
        config.quantization,
        # On an H200, kernels multiply faster by packed experts than by dequantised ones in decode
        # steps, and take 8 % longer for 8,192 tokens. On a CPU, packed ones take ten times as long.
        keeps_mxfp4=on_gpu and config.kernels == "auto",
    )


def choose_exchange(
    config: Config, model_config: ModelConfig
) -> Callable[[nn.Module], None] | None:
    """Return a function that replaces a model's plain layers by quantised ones, if any are.

    The function also prepares attention layers for an FP8 KV cache, if there is one.
    """
    quantization = quantization_of(config, model_config)
    has_kv_scales = quantization is not None and quantization.has_kv_scales
    in_fp8 = config.kv_cache_dtype == "fp8"
    if quantization is None and not in_fp8:
        return None
    from nanovllm.backends.quantised.kv_cache import use_fp8_kv_cache
    from nanovllm.backends.quantised.layers import use_quantised_layers

    def exchange(model: Any) -> None:
        if quantization is not None:
            is_dummy = config.load_format == "dummy"
            use_quantised_layers(model, quantization, reads_plain=is_dummy)
        if in_fp8:
            use_fp8_kv_cache(model, has_kv_scales)

    return exchange


def choose_transform(config: Config, device: torch.device) -> Callable[[nn.Module], None] | None:
    """Return the transform of the loaded model, if any. A CUDA runner replaces layers itself."""
    if config.kernels == "compile":
        from nanovllm.backends.compile import compile_layers

        return compile_layers
    if config.kernels == "auto" and device.type == "cpu":
        return partial(use_cpu_layers, plain_attention=config.attention_backend == "torch")
    return None


def check_kernels(config: Config, device: torch.device) -> None:
    """Raise ValueError if kernels, attention backend and device do not suit one another."""
    kernels, attention = config.kernels, config.attention_backend
    if kernels != "auto" and attention not in ("auto", "torch"):
        raise ValueError(
            f"kernels is {kernels!r}, which leaves attention to PyTorch, but attention_backend is "
            f"{attention!r}: use 'auto' for one of them"
        )
    if device.type == "cuda" and kernels == "auto":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ValueError(
                f"kernels is 'auto', but {torch.cuda.get_device_name(device)} has compute "
                f"capability {major}.{minor}, and the Triton kernels need 8.0: use 'plain'"
            )
    if device.type == "cpu" and attention in ("triton", "flash-attn"):
        raise ValueError(
            f"attention_backend is {attention!r}, but device {device} is not a GPU: use 'auto'"
        )


def check_quantization(config: Config, device: torch.device) -> None:
    """Raise ValueError for a format of weights that is not made on this device."""
    if config.quantization == "int8" and device.type == "cuda":
        raise ValueError(
            f"quantization is 'int8', which runs on a CPU alone, but device is {device}: use "
            "'fp8', which takes as many bytes, or give a checkpoint with INT8 weights in the "
            "format of GPTQ or compressed-tensors"
        )


def check_batch_invariance(config: Config, device: torch.device) -> None:
    """Raise ValueError for an option with which results would depend on what runs beside a request.

    The runner checks the model: see backends/cuda/invariant.py.
    """
    why = "batch_invariant is True, but "
    if device.type != "cuda":
        raise ValueError(
            f"{why}device is {str(device)!r}: use a Hopper GPU, or leave the option out; in "
            "float32 a CPU gives a prompt the same tokens in any batch without the option"
        )
    if (major := torch.cuda.get_device_capability(device)[0]) != 9:
        raise ValueError(
            f"{why}{torch.cuda.get_device_name(device)} has compute capability {major}.x, and the "
            "kernels were tested on Hopper (9.0) alone: leave the option out"
        )
    wanted = dict(
        kernels=("auto",),
        attention_backend=("auto", "triton"),
        kv_cache_dtype=("auto",),
        tensor_parallel_size=(1, 2),
    )
    for name, values in wanted.items():
        given = getattr(config, name)
        if given not in values:
            raise ValueError(
                f"{why}{name} is {given!r}, with which results depend on the batch or were not "
                f"tested: use {' or '.join(map(repr, values))}, or leave batch_invariant out"
            )


def count_enough_sequences(info: RunnerInfo, model_config: ModelConfig) -> int | None:
    """Return the number of running sequences beyond which the throughput hardly grows.

    None: it always grows.
    """
    if info.device == "cpu":
        return enough_sequences(info.num_parameters, model_config)
    return None


def share_cores(engine: LLMEngine, config: Config) -> Callable[[], AbstractContextManager]:
    """Return the context that each step runs in. On a CPU, it gives way to other processes."""
    computes_here = engine.runner.info.device == "cpu" and config.tensor_parallel_size == 1
    return SharedCores().step if computes_here else nullcontext
