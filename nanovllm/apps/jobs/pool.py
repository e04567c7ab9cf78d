"""A pool of replicas that serves the requests of a job, though any replica may be lost at any time.

Each request is sent to one replica. If a replica is lost, the pool starts a new one in its place
and sends the unfinished requests again. A replica that does not answer for a long time counts as
lost. A request may itself kill replicas, and nobody can tell which of many requests did. So
requests that were on two lost replicas are sent in small groups, and in the end alone.

The pool does not know where replicas run, nor how to reach them: a `Cluster` does.
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

# How many requests may be together on a replica, by the number of lost replicas that they were on;
# None: any number. A request that was on len(TOGETHER) lost replicas fails.
TOGETHER = (None, None, 32, 1)
MOST_STARTS = 3  # failed starts in a row, after which the pool gives up a replica
# Calls under way to a replica. While the replica works on one call, the next call is already there,
# so the replica never waits for the pool.
CALLS = 2
WAIT_SECONDS = 0.5  # longest wait for an answer, so that signals are noticed
PROMPT_WORK = 0.25  # cost of a prompt token, where an output token costs 1
UNKNOWN_LENGTH = 1024  # assumed output tokens of a request without max_tokens

Answers = list[tuple[int, dict[str, Any]]]  # the line of a request, and its output as in `Outputs`
logger = logging.getLogger("nanovllm")


class ReplicaLostError(Exception):
    """An error that says why a replica is lost: it died, hangs, failed or cannot be reached."""


class Cluster(Protocol):
    """The interface of what starts replicas and calls them.

    A handle names a replica from its start until it is lost. A call is under way until `wait`
    returns it; then `result` returns its answers or raises ReplicaLostError. A replica runs its
    calls in order.
    """

    def start(self) -> tuple[Any, Hashable]:
        """Begin to start a replica.

        Returns the handle of the replica, and a call that ends, without answers, when the replica
        has started.
        """

    def serve(self, handle: Any, requests: list[Request], more_to_come: bool) -> Hashable:
        """Send requests to a replica. The call ends soon, with the answers finished by then."""

    def wait(self, calls: list[Hashable], seconds: float) -> list[Hashable]:
        """Wait until one of the calls has ended, at most `seconds`. Returns those that have."""

    def result(self, call: Hashable) -> Answers:
        """Return the answers of a call that has ended. Raises ReplicaLostError if it failed."""

    def stop(self, handle: Any) -> None:
        """Kill a replica, which may be dead already."""


@dataclass
class Entry:
    """An unfinished request."""

    request: Request
    prompt_tokens: int  # an estimate
    work: float  # an estimate, in output tokens
    losses: int = 0  # lost replicas that had the request


@dataclass(eq=False)
class Replica:
    """One replica, with its calls and unfinished requests."""

    handle: Any
    calls: deque[Hashable]  # calls under way, oldest first
    asked_at: float = field(default_factory=monotonic)  # when the oldest call became the oldest
    failed_starts: int = 0  # failed starts in a row in the place of this replica
    is_started: bool = False
    is_closed: bool = False  # takes no more requests until it has finished those it has
    entries: dict[int, Entry] = field(default_factory=dict)  # by line

    @property
    def work(self) -> float:
        """The work of the unfinished requests, in output tokens."""
        return sum([entry.work for entry in self.entries.values()])


class Pool:
    """An implementation of `loop.Engine` with several replicas.

    Outputs come in any order, exactly one for each request.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_replicas: int,
        num_running: int,
        *,
        start_timeout: float = math.inf,
        answer_timeout: float = math.inf,
    ) -> None:
        """Begin to start all replicas.

        num_running: requests that one replica runs at the same time.
        start_timeout: seconds after which a replica that has not started counts as lost.
        answer_timeout: seconds after which a replica that has not answered a call counts as lost.
        """
        self._cluster = cluster
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        most = num_replicas * num_running + num_ahead(num_replicas * num_running)
        self._most = -(-most // num_replicas)  # requests on one replica
        self._replicas = [self._start() for _ in range(num_replicas)]
        self._waiting: deque[Entry] = deque()
        self._suspects: list[deque[Entry]] = [deque() for _ in TOGETHER]  # by number of losses
        self._more_to_come = True
        self._lost_in_a_row = 0  # replicas lost since the last result
        self._most_in_a_row = len(TOGETHER) + 2 * num_replicas
        self.num_unfinished = 0
        self.num_prompt_tokens = 0
        self.num_prefill_tokens = self.num_decode_tokens = 0  # tokens of finished requests

    def _start(self, failed_starts: int = 0) -> Replica:
        handle, call = self._cluster.start()
        return Replica(handle, deque([call]), failed_starts=failed_starts)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all replicas have started, so that all of them share the first requests.

        Raises RefusedError if that takes longer than `seconds`, JobError if starts keep failing.
        """
        end = monotonic() + seconds
        while starting := [one for one in self._replicas if not one.is_started]:
            if monotonic() > end:
                raise RefusedError(
                    f"{len(self._replicas) - len(starting)} of {len(self._replicas)} replicas have "
                    f"started within start_timeout, {seconds:g} s: check that the machine has room "
                    "for all of them, or use fewer --replicas"
                )
            self.step()

    def add(self, requests: list[Request]) -> Refused:
        """Queue requests, and return []: the outputs will say which requests are invalid."""
        for request in requests:
            entry = entry_of(request)
            self._waiting.append(entry)
            self.num_unfinished += 1
            self.num_prompt_tokens += entry.prompt_tokens
        return []

    def no_more(self) -> None:
        """Note that the last request has been added."""
        self._more_to_come = False

    def step(self) -> Outputs:
        """Send requests to replicas that have room, and return the outputs they have finished.

        Raises JobError if replicas are lost again and again without finishing a request.
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
        """Return the replicas whose oldest call has timed out, and the seconds it has taken."""
        now = monotonic()
        silent = [(one, now - one.asked_at) for one in self._replicas if one.calls]
        # If this process was suspended for a while, an answer may be here that it has not read.
        return [
            (one, seconds)
            for one, seconds in silent
            if seconds > (self._answer_timeout if one.is_started else self._start_timeout)
            and not self._cluster.wait([one.calls[0]], 0)
        ]

    def _deal(self) -> None:
        """Send requests to replicas that have room, and keep calls under way to all busy ones."""
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
        """Take a group of the waiting requests that were on the most lost replicas."""
        for suspects, together in zip(reversed(self._suspects), reversed(TOGETHER)):
            if suspects:
                assert together is not None
                return [suspects.popleft() for _ in range(min(together, len(suspects)))]
        return []

    def _share_out(self, new: dict[Replica, list[Entry]]) -> None:
        """Give the waiting requests to the replicas with the least work, while these have room."""
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
        """Take the answers of the replica's oldest call, and return them as outputs."""
        replica.calls.popleft()
        replica.asked_at = monotonic()
        replica.is_started, replica.failed_starts = True, 0
        if answers:
            self._lost_in_a_row = 0
        return [self._end(replica.entries.pop(line), output) for line, output in answers]

    def _end(self, entry: Entry, output: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        """Count a request as finished, and return it with its output."""
        self.num_unfinished -= 1
        self.num_prompt_tokens -= entry.prompt_tokens
        if "error" not in output:
            self.num_prefill_tokens += len(output["prompt_token_ids"])
            completions = output.get("completions", [output])
            self.num_decode_tokens += sum([len(one["token_ids"]) for one in completions])
        return entry.request, output

    def _replace(self, lost: Replica, reason: str) -> Outputs:
        """Replace a lost replica, and queue its requests again.

        Returns the outputs of requests that are not tried again. Raises JobError if no replica is
        left, or if too many were lost in a row.
        """
        self._cluster.stop(lost.handle)
        place = self._replicas.index(lost)
        failed_starts = lost.failed_starts + (not lost.is_started)
        self._lost_in_a_row += 1
        logger.warning(
            "a replica was lost: %s. Its %d unfinished requests are run again",
            reason,
            len(lost.entries),
        )
        if failed_starts == MOST_STARTS:
            del self._replicas[place]
            logger.warning(
                "the replica failed to start %d times in a row, and is not started again",
                MOST_STARTS,
            )
        if not self._replicas or self._lost_in_a_row > self._most_in_a_row:
            raise JobError(
                f"replicas were lost {self._lost_in_a_row} times in a row without finishing a "
                f"request; the last one: {reason}. All finished results are kept: remove the "
                "cause, and run the same command again"
            )
        if failed_starts < MOST_STARTS:
            self._replicas[place] = self._start(failed_starts)
        return list(self._try_again(list(lost.entries.values()), reason))

    def _try_again(
        self, entries: list[Entry], reason: str
    ) -> Iterator[tuple[Request, dict[str, Any]]]:
        """Queue requests of a lost replica again; yield an error for those tried too often."""
        again = []
        for entry in entries:
            entry.losses += 1
            if entry.losses == len(TOGETHER):
                problem = (
                    f"a replica was lost each of the {entry.losses} times that it ran this request"
                )
                yield self._end(
                    entry, {"error": f"{problem}, the last time with no other: {reason}"}
                )
            elif TOGETHER[entry.losses] is None:
                again.append(entry)
            else:
                self._suspects[entry.losses].append(entry)
        self._waiting.extendleft(reversed(again))  # in front, in their earlier order


def entry_of(request: Request) -> Entry:
    """Make the entry of a request, with estimates of its tokens and work."""
    prompt = request.prompt
    if request.is_chat:
        num_tokens = len(str(prompt)) // 4
    else:
        num_tokens = len(prompt) // 4 + 1 if isinstance(prompt, str) else len(prompt)
    params = request.params
    output = params.n * (params.max_tokens or UNKNOWN_LENGTH)
    return Entry(request, num_tokens, PROMPT_WORK * num_tokens + output)
