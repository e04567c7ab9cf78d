"""What those who train ask of an LLM between two rounds of generating: that it takes new weights,
and that it lends them its memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.session import Session
from nanovllm.trainer import memory, new_weights


def update_weights(session: Session, weights: Iterable[tuple[str, Tensor]]) -> None:
    """See `LLM.update_weights`."""
    with idle(session, "update_weights") as engine, session.busy():
        new_weights.update_weights(engine, weights)


def sleep(session: Session, level: Any) -> None:
    """See `LLM.sleep`."""
    with idle(session, "sleep") as engine:
        memory.sleep(engine, level)


def wake_up(session: Session) -> None:
    """See `LLM.wake_up`."""
    with idle(session, "wake_up") as engine:
        memory.wake_up(engine)


def reset_prefix_cache(session: Session) -> None:
    """See `LLM.reset_prefix_cache`."""
    with idle(session, "reset_prefix_cache") as engine:
        engine.reset()


@contextmanager
def idle(session: Session, call: str) -> Iterator[LLMEngine]:
    """The engine, with the lock held. Raises ValueError, which names the `call`, if a request is
    unfinished or another call under way.
    """
    session.open_engine()
    with session.lock:
        engine = session.settled_engine()
        if not session.is_idle:
            raise ValueError(
                f"{call} was called while requests are unfinished or another call is under way: "
                "let them end, take the requests' outputs by step, or abort these first"
            )
        yield engine
