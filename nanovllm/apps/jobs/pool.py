"""Serve a job's requests with several replicas of the model, any of which may be lost at any time.

Each request is sent to one replica. If that is lost, a new one is started in its place, and its
unfinished requests are sent again. One that does not answer for long counts as lost, too. A request
may be what kills a replica. Nobody sees which of many it was, so those that were there twice are
then sent in small groups, and at last alone.

Knows nothing of where replicas run and of how they are reached: see `Cluster`.
"""

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.apps.jobs.formats import Request
from nanovllm.apps.jobs.loop import num_ahead
from nanovllm.apps.jobs.worker import Outputs, Refused

# By the number of lost replicas that a request was on: how many such requests may be together on
# one; None: any number. One that was on as many as there are entries here is not tried again.
TOGETHER = (None, None, 32, 1)
MOST_STARTS = 3  # that fail one after the other: then the replica is given up
# Calls that a replica has at a time. While it works on one, the next, which is there already,
# brings what it is to do after it; so it does not wait for an answer.
CALLS = 2
WAIT_SECONDS = 0.5  # for an answer, at most: then signals are looked at
PROMPT_WORK = 0.25  # what a prompt's token costs, if one of output costs 1
UNKNOWN_LENGTH = 1024  # tokens that an output is taken for, if only the model limits it

Answers = list[tuple[int, dict[str, Any]]]  # line of the request, and its output as in `Outputs`
logger = logging.getLogger("nanovllm")


class ReplicaLostError(Exception):
    """A replica has died, hangs, cannot be reached or cannot go on. Says why."""


class Cluster(Protocol):
    """What starts replicas and reaches them. A handle is one life of a replica.

    A call is under way until `wait` names it; then `result` returns its answers, or raises
    ReplicaLostError. A replica does its calls in order.
    """

    def start(self) -> tuple[Any, Hashable]:
        """Begin to start a replica. Returns its handle, and a call that ends, without answers,
        when it has started."""

    def serve(self, handle: Any, requests: list[Request], more_to_come: bool) -> Hashable:
        """Give a replica requests. The call ends soon, with what the replica has finished."""

    def wait(self, calls: list[Hashable], seconds: float) -> list[Hashable]:
        """Those of the calls that have ended: as soon as there is one, or after so long none."""

    def result(self, call: Hashable) -> Answers: ...

    def stop(self, handle: Any) -> None:
        """End a replica, whether it lives or not."""


@dataclass
class Entry:
    """A request that has no result yet."""

    request: Request
    prompt_tokens: int  # about
    work: float  # about, in tokens of output
    losses: int = 0  # of replicas that had it


@dataclass(eq=False)
class Replica:
    handle: Any
    calls: deque[Hashable]  # under way, the oldest first
    asked_at: float = field(default_factory=monotonic)  # since when the oldest is the oldest
    failed_starts: int = 0  # one after the other, of those before it in its place
    is_started: bool = False
    is_closed: bool = False  # takes nothing more until it has finished what it has
    entries: dict[int, Entry] = field(default_factory=dict)  # by line

    @property
    def work(self) -> float:
        return sum([entry.work for entry in self.entries.values()])


class Pool:
    """The `loop.Engine` of several replicas. Results come in any order, each once."""

    def __init__(
        self,
        cluster: Cluster,
        num_replicas: int,
        num_running: int,
        *,
        start_timeout: float = math.inf,
        answer_timeout: float = math.inf,
    ) -> None:
        """`num_running`: requests that one replica runs at the same time. `start_timeout`,
        `answer_timeout`: seconds after which a call that starts a replica, or that gives it
        requests, counts as one that will not end.
        """
        self._cluster = cluster
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        most = num_replicas * num_running + num_ahead(num_replicas * num_running)
        self._most = -(-most // num_replicas)  # requests of one replica
        self._replicas = [self._start() for _ in range(num_replicas)]
        self._waiting: deque[Entry] = deque()
        self._suspects: list[deque[Entry]] = [deque() for _ in TOGETHER]  # by losses
        self._more_to_come = True
        self._lost_in_a_row = 0  # without a result meanwhile
        self._most_in_a_row = len(TOGETHER) + 2 * num_replicas
        self.num_unfinished = 0
        self.num_prompt_tokens = 0
        self.num_prefill_tokens = self.num_decode_tokens = 0  # of requests that have ended

    def _start(self, failed_starts: int = 0) -> Replica:
        handle, call = self._cluster.start()
        return Replica(handle, deque([call]), failed_starts=failed_starts)

    def wait_for_all(self, seconds: float) -> None:
        """Return when all replicas have started, so that none is given what others could do.

        Raises RefusedError if that takes longer, JobError if one fails again and again.
        """
        end = monotonic() + seconds
        while starting := [one for one in self._replicas if not one.is_started]:
            if monotonic() > end:
                raise RefusedError(
                    f"{len(self._replicas) - len(starting)} of {len(self._replicas)} replicas have "
                    f"started within start_timeout, {seconds:g} s: check that there is room for "
                    "all, or run with fewer --replicas"
                )
            self.step()

    def add(self, requests: list[Request]) -> Refused:
        """Queue requests. What cannot be served is known later, and is among the outputs."""
        for request in requests:
            entry = entry_of(request)
            self._waiting.append(entry)
            self.num_unfinished += 1
            self.num_prompt_tokens += entry.prompt_tokens
        return []

    def no_more(self) -> None:
        self._more_to_come = False

    def step(self) -> Outputs:
        """Give the replicas what they have room for, and take what they have finished.

        Raises JobError if the replicas are lost, one after the other, and finish nothing.
        """
        ended: Outputs = []
        for replica, seconds in self._hanging():
            ended += self._replace(replica, f"it has not answered for {seconds:.0f} s")
        self._deal()
        asked = {replica.calls[0]: replica for replica in self._replicas if replica.calls}
        for call in self._cluster.wait(list(asked), WAIT_SECONDS):
            try:
                ended += self._take(asked[call], self._cluster.result(call))
            except ReplicaLostError as error:
                ended += self._replace(asked[call], str(error))
        return ended

    def _hanging(self) -> list[tuple[Replica, float]]:
        """The replicas whose oldest calls should have ended long ago, and for how long they run."""
        now = monotonic()
        silent = [(one, now - one.asked_at) for one in self._replicas if one.calls]
        # This process may have been stopped for a while, and have looked at no answer.
        return [
            (one, seconds)
            for one, seconds in silent
            if seconds > (self._answer_timeout if one.is_started else self._start_timeout)
            and not self._cluster.wait([one.calls[0]], 0)
        ]

    def _deal(self) -> None:
        """Send requests to replicas, and let each that has some be asked for results."""
        ready = [one for one in self._replicas if one.is_started and len(one.calls) < CALLS]
        new: dict[Replica, list[Entry]] = {replica: [] for replica in ready}
        for replica in ready:
            if not replica.entries:
                new[replica] = self._take_suspects()
                replica.is_closed = bool(new[replica])
        self._share_out({replica: new[replica] for replica in ready if not replica.is_closed})
        more = self._more_to_come or bool(self._waiting)
        for replica, entries in new.items():
            replica.entries |= {entry.request.line: entry for entry in entries}
            while replica.entries and len(replica.calls) < CALLS:
                requests = [entry.request for entry in entries]
                replica.asked_at = replica.asked_at if replica.calls else monotonic()
                replica.calls.append(self._cluster.serve(replica.handle, requests, more))
                entries = []

    def _take_suspects(self) -> list[Entry]:
        """A group of those that have most often been on a replica that was lost."""
        for suspects, together in zip(reversed(self._suspects), reversed(TOGETHER)):
            if suspects:
                assert together is not None
                return [suspects.popleft() for _ in range(min(together, len(suspects)))]
        return []

    def _share_out(self, new: dict[Replica, list[Entry]]) -> None:
        """Give what waits to those that have the least work, as far as they have room."""
        work = {replica: replica.work for replica in new} if self._waiting else {}
        while self._waiting and work:
            least = min(work, key=work.__getitem__)
            if len(least.entries) + len(new[least]) >= self._most:
                del work[least]
                continue
            entry = self._waiting.popleft()
            new[least].append(entry)
            work[least] += entry.work

    def _take(self, replica: Replica, answers: Answers) -> Outputs:
        replica.calls.popleft()
        replica.asked_at = monotonic()
        replica.is_started, replica.failed_starts = True, 0
        if answers:
            self._lost_in_a_row = 0
        return [self._end(replica.entries.pop(line), output) for line, output in answers]

    def _end(self, entry: Entry, output: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        self.num_unfinished -= 1
        self.num_prompt_tokens -= entry.prompt_tokens
        if "error" not in output:
            self.num_prefill_tokens += len(output["prompt_token_ids"])
            completions = output.get("completions", [output])
            self.num_decode_tokens += sum([len(one["token_ids"]) for one in completions])
        return entry.request, output

    def _replace(self, lost: Replica, reason: str) -> Outputs:
        """Start another replica, and queue what the lost one had. Returns what is not tried again.

        Raises JobError if there is no point in it.
        """
        self._cluster.stop(lost.handle)
        place = self._replicas.index(lost)
        failed_starts = lost.failed_starts + (not lost.is_started)
        self._lost_in_a_row += 1
        logger.warning(
            "a replica was lost: %s. Its %d requests are sent again", reason, len(lost.entries)
        )
        if failed_starts == MOST_STARTS:
            del self._replicas[place]
            logger.warning("it did not start %d times, and is given up", MOST_STARTS)
        if not self._replicas or self._lost_in_a_row > self._most_in_a_row:
            raise JobError(
                f"replicas were lost {self._lost_in_a_row} times, and finished nothing between; "
                f"the last one: {reason}. What is done is kept: put that right, and run the same "
                "command again"
            )
        if failed_starts < MOST_STARTS:
            self._replicas[place] = self._start(failed_starts)
        return list(self._try_again(list(lost.entries.values()), reason))

    def _try_again(
        self, entries: list[Entry], reason: str
    ) -> Iterator[tuple[Request, dict[str, Any]]]:
        again = []
        for entry in entries:
            entry.losses += 1
            if entry.losses == len(TOGETHER):
                problem = f"a replica was lost each of the {entry.losses} times that it was tried"
                yield self._end(entry, {"error": f"{problem}, the last time alone: {reason}"})
            elif TOGETHER[entry.losses] is None:
                again.append(entry)
            else:
                self._suspects[entry.losses].append(entry)
        self._waiting.extendleft(reversed(again))  # the oldest lines first, as they were


def entry_of(request: Request) -> Entry:
    prompt = request.prompt
    if request.is_chat:
        num_tokens = len(str(prompt)) // 4
    else:
        num_tokens = len(prompt) // 4 + 1 if isinstance(prompt, str) else len(prompt)
    params = request.params
    output = params.n * (params.max_tokens or UNKNOWN_LENGTH)
    return Entry(request, num_tokens, PROMPT_WORK * num_tokens + output)
