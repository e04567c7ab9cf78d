"""The rules of using an engine: by one caller at a time, in the process that made it, until it is
closed, and from an empty state after an error.

Knows the requests under way. Knows nothing of prompts and texts.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

from nanovllm.checks import as_integer, shown
from nanovllm.engine.errors import AsleepError, ClosedError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.metrics import Metrics
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import StepRecord


class Session:
    """An engine, and who uses it.

    `around_call`, `around_step`: make the contexts in which each call and each step runs.

    lock: held while the engine works. A thread may call within a call of its own, as an on_step
        callback does.
    requests: by id, those of `LLM.add_request` whose outputs `LLM.step` has not returned.
    finished: those of them that have ended.
    """

    def __init__(
        self,
        engine: LLMEngine,
        around_call: Callable[[], AbstractContextManager[Any]],
        around_step: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.engine: LLMEngine | None = engine  # None once it is closed
        self.lock = RLock()
        self.requests: dict[int, Sequence] = {}
        self.finished: list[Sequence] = []
        self._around_call = around_call
        self._around_step = around_step
        self._observers: list[Callable[[StepRecord], Any]] = []
        # Requests that have ended in steps which the running callback made. None: none runs.
        self._ended_inside: list[Sequence] | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._is_unsettled = False  # a step was begun and not finished: the engine must be reset
        self._stepping: int | None = None  # the thread that is inside the engine's step
        self._num_resets = 0
        self._num_busy = 0  # calls inside `busy`
        self._abandoned: list[Sequence] = []  # of closed streams, to be aborted

    @property
    def _is_forked(self) -> bool:
        """Whether this process is not the one that made the engine."""
        return os.getpid() != self._pid

    def open_engine(self) -> LLMEngine:
        """The engine, if it may be used. Takes no lock: in a forked process it may stay held."""
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
        """The engine, if it may be used and steps may run."""
        engine = self.open_engine()
        if engine.is_asleep:
            raise AsleepError
        return engine

    def settled_engine(self) -> LLMEngine:
        """The engine, reset if an error or interrupt has left a step unfinished. Needs the lock.

        An interrupt may come in here too: then the next call does the rest, so each thing to do is
        forgotten only once it is done.
        """
        engine = self.open_engine()
        if self._stepping is not None:
            raise RuntimeError(
                "this LLM was called in the middle of its own step, as a function among "
                "logits_processors may do: call it between two steps, such as from on_step's "
                "callback, or use another LLM there"
            )
        if self._is_unsettled:
            self.requests.clear()
            self.finished.clear()
            engine.reset()
            self._num_resets += 1
            self._is_unsettled = False
        while self._abandoned:
            engine.abort(self._abandoned[-1])
            self._abandoned.pop()
        return engine

    @contextmanager
    def call(self) -> Iterator[LLMEngine]:
        """The engine, for a call that runs its requests to their end. Holds the lock."""
        with self.lock, self._around_call(), self.running():
            yield self.begin_call()

    def begin_call(self) -> LLMEngine:
        """The engine, ready for the requests of a new call. Needs the lock."""
        self.awake_engine()
        engine = self.settled_engine()
        engine.last_call = Metrics()
        return engine

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a call, or a part of one. An error or Ctrl-C inside drops all requests."""
        self.awake_engine()
        is_nested = self._stepping == get_ident()  # in a step that goes on after this call
        try:
            yield
        except GeneratorExit:  # a stream was closed, which is no error
            raise
        except BaseException as error:
            if not is_nested:
                self._drop_all()
            if self._is_closed and isinstance(error, Exception):
                # If a signal handler closed the LLM in the middle of a step, it may be any error.
                if not isinstance(error, ClosedError):
                    raise ClosedError from error
            raise

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Abort the sequences of a stream that was closed.

        The garbage collector may close one in the middle of a step: then the next call aborts them.
        """
        if not self._is_forked:
            with self.lock, suppress(ClosedError):
                self._abandoned += sequences
                if self._stepping is None:
                    self.settled_engine()

    def _drop_all(self) -> None:
        """Reset the engine after an error: nobody knows how far the step has come."""
        if not self._is_forked:
            with self.lock, suppress(ClosedError):
                self._is_unsettled, self._stepping = True, None
                self.settled_engine()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For a call that at times has no request queued: inside, `is_idle` is False."""
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1

    @property
    def is_idle(self) -> bool:
        """Whether all requests are ended and returned, and no call is under way. Needs the lock."""
        queued = self.requests or self.settled_engine().has_unfinished()
        return not (queued or self._num_busy)

    @contextmanager
    def idle(self, call: str) -> Iterator[LLMEngine]:
        """Yield the engine with the lock held, for a call that no request may be under way in.

        Raises ValueError, which names the `call`, if a request is unfinished or another call is
        under way.
        """
        self.open_engine()
        with self.lock:
            engine = self.settled_engine()
            if not self.is_idle:
                raise ValueError(
                    f"{call} was called while requests are unfinished or another call is under "
                    "way: let them end, take the requests' outputs by step, or abort these first"
                )
            yield engine

    @contextmanager
    def request(self, request_id: int) -> Iterator[tuple[LLMEngine, Sequence]]:
        """The engine, and the request of `add_request` that has this id, if `step` has not
        returned it. Holds the lock.
        """
        self.open_engine()
        with self.lock:
            engine = self.settled_engine()
            number = as_integer(request_id)
            request = None if number is None else self.requests.get(number)
            if request is None:
                raise ValueError(
                    f"request_id is {shown(request_id)}, which no unfinished request has: "
                    "use what add_request returned"
                )
            with self.running():
                yield engine, request

    def step(self) -> list[Sequence]:
        """Run one step; returns the requests whose last completion has ended. Needs the lock."""
        engine = self.settled_engine()
        self._is_unsettled, self._stepping = True, get_ident()  # until the step is done
        try:
            with self._around_step():
                ended = engine.step()
        finally:
            self._stepping = None
        self._is_unsettled = False
        requests = dict.fromkeys(seq.request for seq in ended)  # each once, in order
        finished = [request for request in requests if request.has_ended]
        self.finished += [request for request in finished if request.id in self.requests]
        if self._observers:
            finished += self._tell_observers(engine, tuple([request.id for request in finished]))
        if self._ended_inside is not None:
            self._ended_inside += finished
        return finished

    def _tell_observers(self, engine: LLMEngine, finished: tuple[int, ...]) -> list[Sequence]:
        """Call them with the step's record, in which `finished` are the ids of the requests that
        ended. Returns the requests that have ended in steps which the callbacks made.
        """
        assert engine.last_step is not None, "a step has just been recorded"
        seconds = perf_counter() - engine.last_step.time
        record = engine.last_step._replace(seconds=seconds, finished=finished)
        num_resets = self._num_resets
        ended: list[Sequence] = []
        outer, self._ended_inside = self._ended_inside, ended
        try:
            for observe in self._observers.copy():  # one may remove itself
                observe(record)
        finally:
            self._ended_inside = outer
        if self._num_resets > num_resets:
            raise RuntimeError(
                "an on_step callback caught the error of a call of its own, which has dropped all "
                "requests, those of the call around it too: let the callback raise it"
            )
        return ended

    def observe(self, callback: Callable[[StepRecord], Any]) -> Callable[[], None]:
        """Call `callback` after each step. Returns a function that ends this."""

        def observer(record: StepRecord) -> None:  # a new one: a callback may be given twice
            callback(record)

        def remove() -> None:
            with suppress(ValueError):  # it was removed before
                self._observers.remove(observer)

        self._observers.append(observer)
        return remove

    def close(self) -> None:
        """See `LLM.close`."""
        if self._is_forked:
            return
        self._is_closed = True  # ends a call in another thread before its next step
        with self.lock:
            if self.engine is not None:
                self.engine.close()
                self.engine = None
