"""The library's logger, "nanovllm", and the line that it logs when an LLM is ready.

Where nobody has configured logging, messages of level INFO and above go to stderr. To hide the
line, call `logging.getLogger("nanovllm").setLevel(logging.WARNING)`.
"""

import logging
import os

from nanovllm.config import Config
from nanovllm.engine.batch import RunnerInfo

logger = logging.getLogger("nanovllm")

_import_seconds = 0.0  # import time that no logged line has counted yet


def show_unless_configured() -> None:
    """Send messages to stderr, unless the user has configured handlers.

    A level that the user has set stays.
    """
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def count_import(seconds: float) -> None:
    """Add the time that importing the package took to the time that the next line reports."""
    global _import_seconds
    _import_seconds += seconds


def uncounted_import_seconds() -> float:
    """Return the import time that no line has reported yet: 0 once an LLM is ready."""
    return _import_seconds


def say_ready(config: Config, info: RunnerInfo, device: str, seconds: float) -> None:
    """Log the model, its size, the device and the KV cache of an LLM that is ready.

    `seconds` is the time that the constructor took. The first line of a process also counts the
    time that importing the package took.
    """
    global _import_seconds
    seconds, _import_seconds = seconds + _import_seconds, 0.0
    is_folder = os.path.isdir(config.model)
    name = os.path.basename(os.path.abspath(config.model)) if is_folder else config.model
    weights = f"{info.weight_format}, " if info.weight_format else ""
    kv_format = f" {info.kv_format}" if info.kv_format else ""
    steps = ""
    if 0 < info.max_num_batched_tokens < config.max_num_batched_tokens:
        steps = f"steps of up to {info.max_num_batched_tokens:,} tokens to save memory, "
    states = ""
    if info.num_state_slots:
        states = (
            f"states of {info.num_state_slots:,} sequences and {info.num_snapshots:,} prefixes "
            f"({info.state_bytes / 2**30:.1f} GiB reserved), "
        )
    logger.info(
        f"nanovllm: {name}, {parameters(info.num_parameters)}, {weights}{info.dtype} on {device}, "
        f"attention: {info.attention}, {info.num_blocks:,} KV blocks of "
        f"{config.kvcache_block_size} tokens{kv_format} ({info.kv_cache_bytes / 2**30:.1f} GiB "
        f"reserved, none used yet), {states}{steps}"
        f"sequences of up to {info.max_model_len:,} tokens, ready in {seconds:.1f} s"
    )


def parameters(count: int) -> str:
    """Format a number of parameters: "0.6 B parameters", "3.8 M parameters"."""
    size = f"{count / 1e9:,.1f} B" if count >= 5e8 else f"{count / 1e6:,.1f} M"
    return f"{size} parameters"
