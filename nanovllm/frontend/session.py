"""The rules for using an engine.

One caller uses the engine at a time, only in the process that made it, and only until it is closed.
After an error the engine starts again from an empty state. A session knows the unfinished requests.
It knows nothing of prompts and texts.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

from nanovllm.checks import as_integer, short_repr
from nanovllm.engine.errors import AsleepError, ClosedError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.outputs import StepRecord


class Session:
    """An engine with a lock, and the requests that `LLM.add_request` made.

    One thread uses the engine at a time, and other threads wait for the lock. An on_step callback
    may add, abort, pause and resume requests, close the LLM, and read from it. Whatever runs steps
    or needs an idle LLM raises RuntimeError there.

    `around_call` and `around_step` make context managers, in which each call and each step runs.

    Attributes:
        lock: held while the engine works. Callbacks run in the thread that holds it.
        requests: request id -> each request of `LLM.add_request` that `LLM.step` has not returned.
        finished: those of `requests` that have ended.
    """

    def __init__(
        self,
        engine: LLMEngine,
        around_call: Callable[[], AbstractContextManager[Any]],
        around_step: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.engine: LLMEngine | None = engine  # None after close()
        self.lock = RLock()
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []
        self._around_call = around_call
        self._around_step = around_step
        self._observers: list[Callable[[StepRecord], Any]] = []
        self._pid = os.getpid()
        self._is_closed = False
        self._is_dirty = False  # a step did not finish, so the engine must be reset
        self._inside: int | None = None  # the thread that is inside a step or a callback
        self._is_exclusive = False  # inside `idle`
        self._abandoned: list[Request] = []  # requests of closed streams, to be aborted

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the process that made the engine."""
        return os.getpid() != self._pid

    @property
    def _is_nested(self) -> bool:
        """Whether this call comes from inside a step or a callback of the same thread."""
        return self._inside == get_ident()

    def open_engine(self) -> LLMEngine:
        """Return the engine if this process may use it and it is not closed.

        This method takes no lock: in a forked process the lock may stay held for ever.
        """
        if self._is_forked:
            raise ValueError(
                f"this LLM belongs to process {self._pid}, which forked this one, {os.getpid()}: "
                "call it there, or make an LLM in a process that multiprocessing's 'spawn' starts"
            )
        engine = self.engine
        if engine is None or self._is_closed:
            raise ClosedError
        return engine

    def awake_engine(self) -> LLMEngine:
        """Return the engine if `open_engine` does and it is not asleep."""
        engine = self.open_engine()
        if engine.is_asleep:
            raise AsleepError
        return engine

    def clean_engine(self) -> LLMEngine:
        """Return the engine for a change of its requests. The caller holds the lock.

        If an error or an interrupt has left a step unfinished, reset the engine first. An interrupt
        may stop this method as well. Each task is therefore forgotten only when it is done, and the
        next call does the rest.
        """
        engine = self.open_engine()
        if self._is_dirty:
            if self._is_nested:
                raise RuntimeError(
                    "this LLM was called in the middle of its own step, as a function among "
                    "logits_processors may do: call it between two steps, or use another LLM there"
                )
            self.requests.clear()
            self.finished.clear()
            engine.reset()
            self._is_dirty = False
        while self._abandoned:
            engine.abort(self._abandoned[-1])
            self._abandoned.pop()
        return engine

    def steppable_engine(self) -> LLMEngine:
        """Return the engine for a call that runs steps or needs an idle engine. The caller holds
        the lock.
        """
        engine = self.clean_engine()
        if self._is_nested:
            raise RuntimeError(
                "an on_step callback made a call that runs steps or needs an idle LLM: in a "
                "callback use add_request, abort, pause, resume, close, and calls that only read"
            )
        return engine

    @contextmanager
    def call(self) -> Iterator[LLMEngine]:
        """Hold the lock and yield the engine, for a call that runs its requests to their end."""
        with self.lock, self._around_call():
            engine = self.begin_call()
            with self.running():
                yield engine

    def begin_call(self) -> LLMEngine:
        """Return the engine, ready for the requests of a new call. The caller holds the lock."""
        self.awake_engine()
        engine = self.steppable_engine()
        engine.metrics.begin_call()
        return engine

    @contextmanager
    def running(self) -> Iterator[None]:
        """Guard a call or a part of one: an error or Ctrl-C in the block drops all requests."""
        self.awake_engine()
        is_nested = self._is_nested  # if so, the step around this call goes on
        try:
            yield
        except BaseException as error:
            if not is_nested:
                self._drop_all()
            if self._is_closed and isinstance(error, Exception):
                # A signal handler that closes the LLM in the middle of a step may cause any error.
                if not isinstance(error, ClosedError):
                    raise ClosedError from error
            raise

    def abandon(self, requests: Iterable[Request]) -> None:
        """Abort the requests of a stream that was closed.

        The garbage collector may close a stream in the middle of a step. Then the next call aborts
        its requests.
        """
        if not self._is_forked:
            with self.lock, suppress(ClosedError):
                self._abandoned += requests
                if not self._is_nested:
                    self.clean_engine()

    def _drop_all(self) -> None:
        """Reset the engine after an error, because the step may have stopped anywhere."""
        if not self._is_forked:
            with self.lock, suppress(ClosedError):
                self._is_dirty, self._inside = True, None
                self.clean_engine()

    @contextmanager
    def idle(self, call: str) -> Iterator[LLMEngine]:
        """Hold the lock and yield the engine, for a call that needs an engine without requests.

        Raises ValueError, which names the `call`, if a request is unfinished or another such call
        is running.
        """
        self.open_engine()
        with self.lock:
            engine = self.steppable_engine()
            if self.requests or engine.has_unfinished() or self._is_exclusive:
                raise ValueError(
                    f"{call} was called while requests are unfinished or another call is running: "
                    "let them end, take the requests' outputs by step, or abort the requests first"
                )
            self._is_exclusive = True
            try:
                yield engine
            finally:
                self._is_exclusive = False

    @contextmanager
    def request(self, request_id: int) -> Iterator[tuple[LLMEngine, Request]]:
        """Hold the lock and yield the engine and the request of `add_request` with this id.

        Raises ValueError if there is no such request, or `step` has returned it already.
        """
        self.open_engine()
        with self.lock:
            engine = self.clean_engine()
            number = as_integer(request_id)
            request = None if number is None else self.requests.get(number)
            if request is None:
                raise ValueError(
                    f"request_id is {short_repr(request_id)}, which no unfinished request has: "
                    "use what add_request returned"
                )
            with self.running():
                yield engine, request

    def step(self) -> list[Request]:
        """Run one step, then the callbacks. The caller holds the lock.

        Returns the requests whose last completion has ended.
        """
        engine = self.steppable_engine()
        self._is_dirty, self._inside = True, get_ident()
        try:
            with self._around_step():
                ended = engine.step()
            self._is_dirty = False
            requests = dict.fromkeys(seq.request for seq in ended)  # each once, in order
            finished = [request for request in requests if request.has_ended]
            self.finished += [request for request in finished if request.id in self.requests]
            if self._observers:
                self._tell_observers(engine, tuple([request.id for request in finished]))
        finally:
            self._inside = None
        return finished

    def _tell_observers(self, engine: LLMEngine, finished: tuple[int, ...]) -> None:
        """Call the callbacks with the step's record. `finished` has ids of requests that ended."""
        assert engine.last_step is not None, "a step has just been recorded"
        seconds = perf_counter() - engine.last_step.time
        record = engine.last_step._replace(seconds=seconds, finished=finished)
        for observe in self._observers.copy():  # a callback may remove itself
            observe(record)

    def observe(self, callback: Callable[[StepRecord], Any]) -> Callable[[], None]:
        """Call `callback` after each step. Returns a function that removes the callback."""

        def observer(record: StepRecord) -> None:  # a new function: a callback may be given twice
            callback(record)

        def remove() -> None:
            with suppress(ValueError):  # it was removed before
                self._observers.remove(observer)

        self._observers.append(observer)
        return remove

    def close(self) -> None:
        """Close the engine: see `LLM.close`."""
        if self._is_forked:
            return
        self._is_closed = True  # a call in another thread ends before its next step
        with self.lock:
            if self.engine is not None:
                self.engine.close()
                self.engine = None
