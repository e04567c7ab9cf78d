"""What the library says by itself: one line when an LLM is ready.

The logger is "nanovllm". Where nobody has configured logging, its messages of level INFO and above
go to stderr; `logging.getLogger("nanovllm").setLevel(logging.WARNING)` keeps the line away.
"""

import logging
import os

from nanovllm.config import Config
from nanovllm.engine.batch import RunnerInfo

logger = logging.getLogger("nanovllm")

_import_seconds = 0.0  # that no line has counted yet


def show_unless_configured() -> None:
    """Make messages visible on stderr, unless the user has handlers of his own; keep the level he
    has set."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def count_import(seconds: float) -> None:
    """Add the time that the package's import took to what the first line says."""
    global _import_seconds
    _import_seconds += seconds


def uncounted_import_seconds() -> float:
    """Return the import time that no line has counted yet: 0 once an LLM is ready."""
    return _import_seconds


def say_ready(config: Config, info: RunnerInfo, device: str, seconds: float) -> None:
    """Log what was loaded, and where.

    `seconds`: since the LLM's making began. The first line of a process adds what it took to
    import the package.
    """
    global _import_seconds
    seconds, _import_seconds = seconds + _import_seconds, 0.0
    is_folder = os.path.isdir(config.model)
    name = os.path.basename(os.path.abspath(config.model)) if is_folder else config.model
    logger.info(
        f"nanovllm: {name}, {parameters(info.num_parameters)}, {info.dtype} on {device}, "
        f"attention: {info.attention}, {info.num_blocks:,} KV blocks of "
        f"{config.kvcache_block_size} tokens ({info.kv_cache_bytes / 2**30:.1f} GiB reserved, "
        "none used yet), "
        f"sequences of up to {info.max_model_len:,} tokens, ready in {seconds:.1f} s"
    )


def parameters(count: int) -> str:
    """A model's size as people say it: "0.6 B parameters", "3.8 M parameters"."""
    size = f"{count / 1e9:,.1f} B" if count >= 5e8 else f"{count / 1e6:,.1f} M"
    return f"{size} parameters"
