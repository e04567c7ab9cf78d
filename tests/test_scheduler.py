"""The scheduler's promises, over random streams of requests and a device that checks every read."""

import copy
import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest
from effort import tries
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_device import (
    VOCABULARY,
    SimulatedDevice,
    WatchedScheduler,
    check_blocks,
    check_empty,
    check_places,
    output_alone,
)

from nanovllm.engine.block_manager import NO_PREFIX, BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.engine.prompt_scores import PromptScores
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.snapshots import Snapshots, StateRows
from nanovllm.features.policies import POLICIES as NAMED_POLICIES
from nanovllm.features.policies.throughput import ThroughputPolicy
from nanovllm.sampling_params import INVALID_TOKEN, SamplingParams


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    arrival: int = 0  # step before which it is added
    patience: int | None = None  # steps after which it is aborted
    completions: int = 1
    interactive: bool = False
    pauses: tuple[tuple[int, int], ...] = ()  # from and to which step after its arrival
    score_from: int | None = None  # the first token of the prompt that is scored


def make_request(
    id: int,
    prompt: list[int],
    max_tokens: int,
    stop_ids=frozenset(),
    completions: int = 1,
    interactive: bool = False,
    score_from: int | None = None,
) -> Request:
    """Of several completions, the ids are 0, 100, 200, ... more, and the seeds 0, 1, 2, ...

    Priorities go round by id.
    """
    params = dict(temperature=0.0, max_tokens=max_tokens, priority=-id % 3)
    scores = None
    if score_from is not None:
        params["prompt_logprobs"] = 0
        scores = PromptScores(prompt, 0, min(score_from, len(prompt)))
    request = Request(
        id,
        prompt,
        SamplingParams(**params),
        max_len=len(prompt) + max_tokens,
        seeds=range(completions),
        stop_ids=frozenset(stop_ids),
        interactive=interactive,
        scores=scores,
    )
    for i, seq in enumerate(request.completions):
        seq.id = id + 100 * i
    return request


def make_scheduler(
    num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **options
):
    return WatchedScheduler(
        num_blocks,
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )


@dataclass
class Server:
    """The engine's loop around a scheduler, with a simulated device in place of the runner."""

    scheduler: WatchedScheduler
    in_flight: deque = field(default_factory=deque)
    scored: deque = field(default_factory=deque)  # what these steps say of prompts
    batches: list = field(default_factory=list)
    as_planned: list = field(default_factory=list)

    def __post_init__(self):
        self.device = SimulatedDevice(self.scheduler)

    def add(self, id: int, prompt: list[int], max_tokens: int, *args, **options) -> Sequence:
        """Returns the first completion."""
        request = make_request(id, prompt, max_tokens, *args, **options)
        self.scheduler.add(request)
        return request.first

    def add_request(self, id: int, asked: Asked) -> Request:
        return self.add(
            id,
            asked.prompt,
            asked.max_tokens,
            asked.stop_ids,
            asked.completions,
            asked.interactive,
            asked.score_from,
        ).request

    def step(self, delay: bool = False) -> None:
        """Plan and launch a step, then commit all in flight, but not the step itself if `delay`."""
        batch = self.scheduler.schedule()
        check_blocks(self.scheduler)
        if batch is not None:
            self.check_budgets(batch)
            self.batches.append(batch)
            self.as_planned.append(copy.deepcopy(batch))
            self.in_flight.append(self.device.launch(batch))
            self.scored.append(self.device.score(batch))
        while len(self.in_flight) > (delay and batch is not None):
            self.scheduler.commit(self.in_flight.popleft(), {}, self.scored.popleft())
            check_blocks(self.scheduler)

    def check_budgets(self, batch):
        num_tokens = len(batch.decode_slots) + batch.num_prefill_tokens
        assert 0 < num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(batch.decode_slots) + len(batch.prefills) <= self.scheduler.max_num_seqs
        running = [seq for seq in self.scheduler.sequences.values() if seq.status is Status.RUNNING]
        assert len(running) <= self.scheduler.max_num_seqs

    def run(
        self, delay: bool = False, until=lambda server: not server.scheduler.has_unfinished()
    ) -> None:
        for _ in range(1000):
            if until(self) and not self.in_flight:
                return
            self.step(delay)
        raise AssertionError("waits forever")

    def run_until_preemption(self) -> None:
        self.run(until=lambda server: server.scheduler.num_preemptions)


# None for most. Some begin before the first step, some end before the next one; a long one lets all
# others end.
PAUSES = [
    *((), (), (), ((0, 5),), ((1, 2), (2, 9)), ((1, 60),), ((3, 3), (4, 5)), ((4, 60),)),
    ((2, 7), (8, 40)),
]


NO_WINDOW, WINDOWS = st.none(), st.integers(1, 12)


@st.composite
def all_sizes(draw, windows):
    return dict(
        num_blocks=draw(st.sampled_from([3, 4, 5, 6, 8, 13, 70])),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.sampled_from([3, 1, 2, 5, 16])),
        max_num_batched_tokens=draw(st.sampled_from([20, 1, 3, 8, 100])),
        caching=draw(st.booleans()),
        min_run=draw(st.sampled_from([1, 2, 16])),
        window=draw(windows),
    )


@st.composite
def streams(draw, windows=NO_WINDOW):
    """Sizes, requests that each fit the cache, and whether a step's commit waits for the next.

    With a window, a request fits if its window and a block do.
    """
    sizes = draw(all_sizes(windows))
    num_blocks, block_size = sizes["num_blocks"], sizes["block_size"]
    window_fits = sizes["window"] and sizes["window"] + block_size <= num_blocks * block_size
    room = num_blocks * block_size  # for all but the last token
    token = st.integers(0, VOCABULARY - 1)
    families = draw(st.lists(st.lists(token, max_size=20), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(2, 8))):
        family = draw(st.sampled_from(families))
        prompt = family[: draw(st.sampled_from([20, 0, 4, 8]))] + draw(st.lists(token, max_size=5))
        most = 50 if window_fits else room
        prompt = prompt[: most - draw(st.integers(0, most - 1))] or [0]
        requests.append(
            Asked(
                prompt,
                max_tokens=min(draw(st.sampled_from([16, 1, 2, 7])), most + 1 - len(prompt)),
                stop_ids=draw(
                    st.sampled_from(
                        [frozenset(), frozenset(), frozenset({0}), frozenset({1, 2, 3})]
                    )
                ),
                arrival=draw(st.sampled_from([0, 0, 1, 4, 9])),
                patience=draw(st.sampled_from([None, None, None, 1, 6])),
                completions=draw(st.sampled_from([1, 1, 1, 2, 4])),
                interactive=draw(st.booleans()),
                pauses=draw(st.sampled_from(PAUSES)),
            )
        )
    requests.sort(key=lambda request: request.arrival)  # ids are numbered as sequences come
    delays = draw(
        st.one_of(
            st.just([True]), st.just([False]), st.lists(st.booleans(), min_size=1, max_size=6)
        )
    )
    return sizes, requests, delays


class Shuffled(SchedulingPolicy):
    """An order that has nothing to do with arrival or length."""

    def key(self, seq):
        return hash((seq.id, seq.num_prompt_tokens)) % 3


class Never(SchedulingPolicy):
    """One runs at a time, whatever a policy says."""

    def running_limit(self, scheduler):
        return 0


POLICIES = NAMED_POLICIES | {
    "the core's": SchedulingPolicy,
    "throughput": lambda: ThroughputPolicy(min_running=2),
    "throughput in small groups": lambda: ThroughputPolicy(min_running=1, group_tokens=4),
    "shuffled": Shuffled,
    "never": Never,
}


def check_answers(asked: Asked, request: Request) -> None:
    """Each completion is the one the request gets alone, or the begin of it if it was aborted."""
    for i, seq in enumerate(request.completions):
        alone = output_alone(asked.prompt, seq.max_len, asked.stop_ids, seed=i)
        if seq.finish_reason == "abort":
            assert asked.patience is not None
            assert seq.output_ids == alone[: len(seq.output_ids)]
        else:
            assert seq.output_ids == alone
            assert seq.finish_reason == ("stop" if alone[-1] in asked.stop_ids else "length")


def serve(server: Server, stream: list[Asked], delays: list[bool]) -> dict[int, Request]:
    """Let requests come, be paused, go on and be aborted, each at its step. Returns them in the
    order in which they came.
    """
    scheduler = server.scheduler
    last_event = max(one.arrival + max([0, *(end for _, end in one.pauses)]) for one in stream)
    # A step that plans nothing commits, and any other gets some sequence on by a token at least.
    bound = last_event + 2 * sum(
        one.completions * (len(one.prompt) + one.max_tokens + 1) for one in stream
    )
    requests: dict[int, Request] = {}
    step = 0
    while step <= last_event or scheduler.has_unfinished() or server.in_flight:
        for id, one in enumerate(stream):
            since = step - one.arrival
            if since == 0:
                requests[id] = server.add_request(id, one)
            for begin, end in one.pauses:
                for seq in requests[id].unfinished if since == begin else ():
                    scheduler.pause(seq)
                for seq in requests[id].unfinished if since == end else ():
                    scheduler.resume(seq)
            if since > 0 and since == one.patience:
                for seq in requests[id].unfinished:
                    scheduler.abort(seq)
            check_places(scheduler)
        lengths = {seq: seq.num_tokens for seq in scheduler.paused}
        server.step(delays[step % len(delays)])
        assert lengths == {seq: seq.num_tokens for seq in lengths}, "a paused sequence runs"
        step += 1
        assert step <= bound, "a request starves"
    return requests


@pytest.mark.parametrize("policy", POLICIES)
@tries(70)
@given(streams())
def test_any_stream_of_requests_is_served_right(policy, stream):
    """Whatever the policy: each answer is the one the request gets alone; each step reads what it
    should; no block leaks; none starves."""
    sizes, stream, delays = stream
    server = Server(make_scheduler(**sizes, policy=POLICIES[policy]()))
    scheduler = server.scheduler
    requests = serve(server, stream, delays)
    for id, asked in enumerate(stream):
        check_answers(asked, requests[id])
    if policy == "fcfs" and not any(asked.pauses for asked in stream):
        assert scheduler.first_starts == [id for id in requests if id in scheduler.first_starts]
    check_empty(scheduler)
    assert server.batches == server.as_planned, (
        "a plan never changes: it may run in another process, or later"
    )


@pytest.mark.parametrize("policy", ["fcfs", "throughput", "shuffled"])
@tries(80)
@given(streams(WINDOWS))
def test_any_stream_is_served_right_by_a_model_of_windows(policy, stream):
    """What lies behind the window is given back, and a request may be longer than the cache."""
    sizes, stream, delays = stream
    server = Server(make_scheduler(**sizes, policy=POLICIES[policy]()))
    requests = serve(server, stream, delays)
    for id, asked in enumerate(stream):
        check_answers(asked, requests[id])
    check_empty(server.scheduler)
    assert server.batches == server.as_planned


@pytest.mark.parametrize("policy", ["throughput", "shuffled"])
@tries(80)
@given(streams(), st.integers(0, 8))
def test_any_stream_is_served_right_by_a_model_with_recurrent_layers(policy, stream, num_snapshots):
    """Each token is computed from the state of all tokens before it, whatever is kept of states."""
    sizes, requests, delays = stream
    options = dict(policy=POLICIES[policy](), num_snapshots=num_snapshots)
    server = Server(make_scheduler(**{**sizes, "window": None}, **options))
    sequences = serve(server, requests, delays)
    for id, request in enumerate(requests):
        check_answers(request, sequences[id])
    check_empty(server.scheduler)
    check_snapshots(server.scheduler.blocks.snapshots)
    assert server.batches == server.as_planned


def check_snapshots(snapshots):
    """Each row holds one snapshot or is free."""
    rows = [*snapshots._rows.values(), *snapshots._free]
    assert sorted(rows) == list(snapshots.rows.snapshots)
    assert sum(map(Counter.total, snapshots._lengths.values())) == len(snapshots)


def test_a_snapshot_dropped_in_the_step_that_saves_it_does_not_overwrite_the_next_in_its_row():
    snapshots = Snapshots(StateRows(num_slots=2, num_snapshots=1))
    snapshots.save(0, NO_PREFIX, [1], after_step=True, is_needed=False)
    snapshots.save(1, NO_PREFIX, [2], after_step=False, is_needed=False)  # a paused sequence's
    (row,) = snapshots.rows.snapshots
    states = {0: "of slot 0", 1: "of slot 1"}
    for _ in range(2):
        for source, target in snapshots.take_copies():
            states[target] = states[source]
    assert states[row] == "of slot 1"


@tries(80)
@given(streams(), st.integers(1, 6), st.integers(1, 3))
def test_a_sequence_that_fails_ends_alone_with_its_tokens_so_far(stream, step, every):
    """Some fail in the place of a token that they would sample, some in several in one step."""
    sizes, stream, delays = stream
    server = Server(make_scheduler(**sizes))
    scheduler, device = server.scheduler, server.device
    launch = device.launch

    def fails_at(seq):  # the number of the token that it cannot sample
        return seq.id % 100 % 4 + step if seq.id % every == 0 else math.inf

    def launch_some_that_fail(batch):
        return [
            INVALID_TOKEN
            if len(device.tokens[seq.id]) - seq.num_prompt_tokens >= fails_at(seq)
            else token
            for token, seq in zip(launch(batch), scheduler.newest_step)
        ]

    device.launch = launch_some_that_fail
    requests = serve(server, stream, delays)
    for seq in [one for request in requests.values() for one in request.completions]:
        if seq.finish_reason == "abort":
            continue
        alone = output_alone(
            seq.token_ids[: seq.num_prompt_tokens], seq.max_len, seq.stop_ids, seq.seed
        )
        failed = fails_at(seq) <= len(alone)
        assert seq.output_ids == (alone[: fails_at(seq) - 1] if failed else alone)
        assert (seq.finish_reason == "error") == failed
    check_empty(scheduler)


class AllIsSeen(Exception):
    pass


def look_until_seen(look, seen: set, wanted: set, window=NO_WINDOW) -> None:
    """Call `look` with random streams until all that is wanted has been seen, else fail."""

    @settings(max_examples=400, database=None, derandomize=True, phases=[Phase.generate])
    @given(streams(window))
    def try_one(stream):
        look(*stream)
        if seen >= wanted:
            raise AllIsSeen

    with suppress(AllIsSeen):
        try_one()
    assert seen >= wanted, wanted - seen


def test_the_random_streams_of_windows_reach_what_they_are_meant_for():
    seen = set()

    class WatchedTables(BlockTables):
        def give_back(self, seq):
            before = seq.num_given_back
            super().give_back(seq)
            if seq.num_given_back > before:
                in_part = seq.num_computed < seq.num_tokens - 1
                seen.add("a prompt gives back" if in_part else "a decode gives back")
                seen.add(("of completions", len(seq.request.completions) > 1))

    class Watched(WatchedScheduler):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            self.tables.__class__ = WatchedTables

        def _start(self, seq, plan):
            super()._start(seq, plan)
            seen.add(("a hit behind the window", seq.num_given_back > 0))
            seen.add(("a start in part", seq.capacity < seq.num_tokens))

        def _preempt(self, seq):
            if (
                seq.num_given_back
                and seq.num_tokens > self.blocks.num_blocks * self.blocks.block_size
            ):
                seen.add("preempted and longer than the cache")
            super()._preempt(seq)

    wanted = {"a prompt gives back", "a decode gives back", ("of completions", True)}
    wanted |= {("a hit behind the window", True), ("a start in part", True)}
    wanted |= {"preempted and longer than the cache"}

    def look(sizes, stream, delays):
        serve(Server(Watched(**sizes)), stream, delays)

    look_until_seen(look, seen, wanted, WINDOWS)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 8])
def test_a_sequence_holds_the_blocks_of_its_window_and_no_more(window, delay):
    most = (window + 2) // 4 + 1  # that a window touches, in blocks of 4
    most += window == 1 and delay  # of a full block the last token is not known yet
    server = Server(make_scheduler(num_blocks=30, window=window, max_num_batched_tokens=4))
    seq = server.add(0, [1] * 40, 100)
    used = []
    while server.scheduler.has_unfinished() or server.in_flight:
        server.step(delay)
        used.append(server.scheduler.blocks.num_used)
    assert max(used[10:]) == most and max(used) <= (window + 4) // 4 + 2
    assert seq.output_ids == output_alone([1] * 40, 140)


def test_what_was_given_back_is_a_hit_until_another_takes_it():
    server = Server(make_scheduler(num_blocks=12, window=6))
    prompt = list(range(20))
    server.add(0, prompt, 16)
    server.run()
    hit, _ = first_chunk(server, 1, prompt)
    assert hit.start == 19 and server.scheduler.num_preemptions == 0
    server.add(2, [5] * 30, 1)
    server.run()
    miss, _ = first_chunk(server, 3, prompt)
    assert miss.start == 0, "the first blocks are gone, so what follows them is not found"


def test_a_hit_takes_only_the_blocks_that_are_seen():
    server = Server(make_scheduler(num_blocks=6, window=6))
    server.add(0, list(range(22)), 1)
    server.run()
    server.add(1, list(range(22)), 1)
    server.scheduler.schedule()
    (seq,) = server.scheduler.sequences.values()
    assert (seq.request.num_cached_tokens, seq.num_given_back) == (20, 3)
    assert server.scheduler.blocks.num_used == 3


def test_a_sequence_longer_than_the_cache_is_preempted_and_goes_on():
    server = Server(make_scheduler(num_blocks=5, window=6, max_num_batched_tokens=6))
    sequences = [server.add(id, [id], 90) for id in range(2)]
    server.run()
    assert server.scheduler.num_preemptions
    assert [seq.output_ids for seq in sequences] == [output_alone([id], 91) for id in range(2)]


def test_the_random_streams_reach_what_they_are_meant_for():
    """Preemption, chunks, cached prompts, and completions that share blocks and copy them."""
    seen = set()

    def look(sizes, stream, delays):
        server = Server(make_scheduler(**sizes))
        for id, asked in enumerate(stream):
            server.add_request(id, asked)
        server.run(delays[0])
        seen.update(
            ("completion", "shares" if num_shared else "shares nothing", sizes["caching"])
            for id, num_shared in server.scheduler.num_shared.items()
            if id >= 100
        )
        if server.scheduler.num_preemptions:
            seen.add(("preemption", delays[0]))
        for batch in server.batches:
            seen.update(("chunk", chunk.is_last) for chunk in batch.prefills)
            if any(chunk.write_from > chunk.start for chunk in batch.prefills):
                seen.add("fully cached")
            tables = [chunk.block_table for chunk in batch.prefills]
            for source, target in batch.block_copies:
                seen.add("copy")
                if any(source in table for table in tables if target not in table):
                    seen.add("copy from a block that is taken")
                if not sizes["caching"]:
                    seen.add("copy from another completion")

    wanted = {("chunk", False), ("chunk", True), "fully cached"}
    wanted |= {("completion", "shares", caching) for caching in (False, True)}
    wanted |= {"copy", "copy from a block that is taken", "copy from another completion"}
    look_until_seen(look, seen, wanted | {("preemption", False), ("preemption", True)})


def test_sequences_start_in_order_of_arrival():
    server = Server(make_scheduler(num_blocks=4, block_size=4))
    server.add(0, [1] * 9, 4)
    server.add(1, [2] * 9, 4)  # does not fit beside the first
    server.add(2, [3], 2)  # would fit, but is not let past
    server.step()
    assert [seq.id for seq in server.scheduler.waiting] == [1, 2]
    server.run()
    assert server.scheduler.first_starts == [0, 1, 2]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    server = Server(make_scheduler(max_num_batched_tokens=10))
    server.add(0, list(range(25)), 2)
    server.run()
    lengths = [[len(chunk.token_ids) for chunk in batch.prefills] for batch in server.batches]
    assert lengths == [[10], [10], [5], []]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("policy", ["throughput", "fcfs"])
def test_a_long_prompt_delays_each_token_of_the_others_by_one_chunk_at_most(policy, delay):
    """Those that decode get a token in every step, as without it. No step has more tokens than the
    budget, whatever it computes of the prompt."""
    budget, long_prompt = 1024, [i % VOCABULARY for i in range(4000)]

    def outputs_by_step(with_long: bool) -> list[list[int]]:
        sizes = dict(num_blocks=280, block_size=64, max_num_seqs=256)
        policy_object = NAMED_POLICIES[policy]()
        server = Server(
            make_scheduler(**sizes, max_num_batched_tokens=budget, policy=policy_object)
        )
        for i in range(200):
            server.add(i, [i % VOCABULARY, i // VOCABULARY % VOCABULARY, 3], 20)
        for _ in range(5):
            server.step(delay)
        decoding = server.scheduler.decoding.copy()
        assert len(decoding) >= 160
        if with_long:
            long = server.add(200, long_prompt, 5, interactive=True)
        counts = []
        while any(seq.finish_reason is None for seq in decoding):
            server.step(delay)
            counts.append([len(seq.output_ids) for seq in decoding])
        if with_long:
            chunks = [len(one.token_ids) for batch in server.batches for one in batch.prefills]
            assert long.output_ids and max(chunks) <= budget - 160
        return counts

    assert outputs_by_step(with_long=True) == outputs_by_step(with_long=False)


def test_chunks_share_the_budget_with_decoding_sequences():
    server = Server(make_scheduler(max_num_batched_tokens=8))
    server.add(0, [1, 2, 3], 20)
    server.step()
    server.add(1, list(range(20)), 5)
    server.step()
    assert len(server.batches[-1].decode_slots) == 1 and server.batches[-1].num_prefill_tokens == 7


def test_the_youngest_is_preempted_though_it_is_the_longest():
    server = Server(make_scheduler(num_blocks=6, block_size=2, max_num_seqs=3))
    server.add(0, [1, 2], 8)
    server.add(1, [1, 3, 4, 5, 6, 7], 4)
    server.run_until_preemption()
    assert [seq.id for seq in server.scheduler.decoding] == [0]
    assert [seq.id for seq in server.scheduler.waiting] == [1]
    server.run()


def test_the_youngest_sequence_is_preempted_and_goes_first_in_line():
    server = Server(make_scheduler(num_blocks=5, block_size=2, max_num_seqs=3))
    for id in range(4):
        server.add(id, [id, id], 8)
    server.run_until_preemption()
    assert [seq.id for seq in server.scheduler.decoding] == [0, 1]
    assert [seq.id for seq in server.scheduler.waiting] == [2, 3]


@pytest.mark.parametrize("completions", [1, 3])
def test_a_prompt_computed_in_part_is_preempted_before_those_that_decode(completions):
    num_blocks = 9 + completions
    server = Server(make_scheduler(num_blocks=num_blocks, block_size=2, max_num_batched_tokens=5))
    server.add(0, [1], 9)
    server.add(1, [3], 9)
    for _ in range(3):
        server.step()
    third = server.add(2, [2] * 12, 3, completions=completions)
    server.step()
    assert server.scheduler.prefilling == [third]
    assert server.scheduler.blocks.num_free == completions - 1, "one for each that follows"
    server.run_until_preemption()
    assert [seq.id for seq in server.scheduler.decoding] == [0, 1]
    assert [seq.id for seq in server.scheduler.waiting] == [2]
    assert not server.scheduler.prefilling
    server.run()
    assert [seq.output_ids for seq in third.request.completions] == [
        output_alone([2] * 12, 15, seed=i) for i in range(completions)
    ]


def test_preemption_waits_until_nothing_is_in_flight():
    server = Server(make_scheduler(num_blocks=5, block_size=2))
    for id in range(3):
        server.add(id, [id, id], 8)
    scheduler = server.scheduler
    for _ in range(100):
        batch = scheduler.schedule()
        if batch is None:
            break
        server.in_flight.append(server.device.launch(batch))
        if len(server.in_flight) > 1:
            scheduler.commit(server.in_flight.popleft())
    assert scheduler.num_preemptions == 0 and len(server.in_flight) == 1
    scheduler.commit(server.in_flight.popleft())
    assert scheduler.schedule() is not None and scheduler.num_preemptions == 1


def test_a_preempted_sequence_shares_what_is_left_of_its_blocks():
    server = Server(make_scheduler(num_blocks=6, block_size=2))
    server.add(0, [0, 1], 4)
    server.add(1, [1, 2, 3, 4, 5], 6)
    server.run()
    assert server.scheduler.num_preemptions
    again = [chunk for batch in server.batches[1:] for chunk in batch.prefills]
    assert again and all(chunk.start > 0 for chunk in again)


@pytest.mark.parametrize("length", [4, 8, 20])
def test_a_fully_cached_prompt_computes_its_last_token_and_writes_nothing(length):
    server = Server(make_scheduler())
    prompt = list(range(length))
    server.add(0, prompt, 1)
    server.run()
    server.add(1, prompt, 1)
    server.run()
    (chunk,) = server.batches[-1].prefills
    assert (chunk.start, chunk.end, chunk.write_from) == (length - 1, length, length)


def test_requests_of_one_step_share_their_prefix():
    server = Server(make_scheduler())
    server.add(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    server.add(1, [1, 2, 3, 4, 5, 6, 7, 8, 10], 3)
    server.step()
    first, second = server.batches[0].prefills
    assert (first.start, second.start) == (0, 8) and first.block_table[:2] == second.block_table[:2]
    server.run()


def first_chunk(server: Server, id: int, prompt: list[int], max_tokens: int = 1, **options):
    """What is computed first of a prompt, and the copies of that step."""
    server.add(id, prompt, max_tokens, **options)
    server.step()
    return server.batches[-1].prefills[0], server.batches[-1].block_copies


@pytest.mark.parametrize("delay", [False, True])
def test_a_conversation_goes_on_where_its_last_answer_ends(delay):
    """Wherever that is in a block. Only the last token's K and V were never computed."""
    server = Server(make_scheduler(block_size=8, min_run=1, max_num_batched_tokens=100))
    prompt = [1, 2, 3]
    for turn in range(8):
        seq = server.add(turn, prompt, 3 + turn % 3)
        server.run(delay)
        assert seq.request.num_cached_tokens == (len(prompt) - 3 if turn else 0)
        prompt = seq.token_ids + [turn, turn]


def test_a_sequence_that_ran_one_step_too_far_is_known_with_its_last_token():
    prompt = [1, 2, 3]
    output = output_alone(prompt, 8)
    server = Server(make_scheduler(block_size=8, min_run=1))
    stopped = server.add(0, prompt, 5, stop_ids={output[1]})
    server.run(delay=True)
    assert sum(len(batch.decode_slots) for batch in server.batches) > len(stopped.output_ids) - 1
    chunk, _ = first_chunk(server, 1, [*prompt, *output[:5]])
    assert chunk.start == len(stopped.token_ids)


def test_prompts_that_differ_inside_a_block_copy_what_they_have_in_common():
    server = Server(make_scheduler(block_size=8, min_run=1))
    server.add(0, list(range(14)), 1)
    server.run()
    chunk, copies = first_chunk(server, 1, [*range(11), 5, 5])
    (source,) = (source for source, _ in copies)
    assert chunk.start == chunk.write_from + 3 == 11
    assert copies == ((source, chunk.block_table[1]),) and source not in chunk.block_table


def test_a_prompt_that_is_known_to_its_end_computes_its_last_token():
    server = Server(make_scheduler(block_size=8, min_run=1))
    server.add(0, list(range(14)), 1)
    server.run()
    chunk, _ = first_chunk(server, 1, list(range(13)))
    assert (chunk.start, chunk.end) == (12, 13)


def test_what_a_step_computes_is_copied_from_the_next_step_on():
    """Its K and V are not there yet when the step copies; whole blocks are shared at once."""
    server = Server(make_scheduler(block_size=8, min_run=1, max_num_batched_tokens=100))
    for id in range(2):
        server.add(id, [*range(13), id], 9)
    server.step()
    first, second = server.batches[0].prefills
    assert (first.start, second.start) == (0, 8) and not server.batches[0].block_copies
    chunk, copies = first_chunk(server, 2, [*range(13), 2])
    assert chunk.start == 13 and len(copies) == 1, "although the first two still run"


def test_a_source_may_be_taken_in_the_step_that_copies_it():
    server = Server(make_scheduler(num_blocks=4, block_size=8, min_run=1))
    server.add(0, [1] * 5, 1)
    server.run()
    server.add(1, [1] * 5 + [2], 1)
    server.add(2, [3] * 24, 1)
    server.step()
    ((source, copy),) = server.batches[-1].block_copies
    copier, taker = server.batches[-1].prefills
    assert copier.start == 5 and source in taker.block_table and copy in copier.block_table
    server.run()


def test_a_source_may_be_another_copys_target():
    server = Server(make_scheduler(num_blocks=3, block_size=8, min_run=1))
    for id in (1, 2):
        server.add(id, [id] * 5, 1)
        server.run()
    for id in (1, 2):
        server.add(10 + id, [id] * 4 + [3], 2)
    server.step()
    (source, _), (_, target) = server.batches[-1].block_copies
    assert source == target
    server.run()


def test_a_prompt_that_was_computed_in_part_goes_on_inside_a_block():
    server = Server(make_scheduler(num_blocks=4, block_size=8, min_run=1, max_num_batched_tokens=8))
    server.add(0, [0] * 7, 5)
    server.step()
    server.add(1, [2] * 24, 1)
    server.run_until_preemption()
    server.run()
    chunks = [chunk for batch in server.batches[1:] for chunk in batch.prefills]
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 7), (7, 15), (15, 23), (23, 24)]


def test_completions_of_a_prompt_that_is_copied_in_part_copy_it_on():
    server = Server(make_scheduler(block_size=8, min_run=1))
    server.add(0, [1] * 14, 1)
    server.run()
    seq = server.add(1, [1] * 12 + [2], 9, completions=3)
    server.run()
    assert seq.request.num_cached_tokens == 12
    assert [one.output_ids for one in seq.request.completions] == [
        output_alone([1] * 12 + [2], 22, seed=i) for i in range(3)
    ]


def test_conversations_compute_hardly_a_token_twice():
    """Five rounds beside each other: within 1 % of the most that could be cached."""
    r = Random(0)
    scheduler = Scheduler(
        BlockManager(1500, 256), ThroughputPolicy(), max_num_seqs=512, max_num_batched_tokens=4096
    )
    prompts = [[r.randrange(10_000) for _ in range(r.randint(64, 512))] for _ in range(96)]
    cached = possible = 0
    for turn in range(5):
        requests = [make_request(96 * turn + i, one, 32) for i, one in enumerate(prompts)]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_unfinished():
            batch = scheduler.schedule()
            scheduler.commit([r.randrange(10_000) for _ in batch.sampling_slots])
        cached += sum(request.num_cached_tokens for request in requests)
        # All but the last answer's last token and the new question.
        possible += sum(len(prompt) - 65 for prompt in prompts) if turn else 0
        answers = [request.first.token_ids for request in requests]
        prompts = [answer + [r.randrange(10_000) for _ in range(64)] for answer in answers]
    assert 0.99 * possible < cached <= possible


def test_without_prefix_caching_nothing_is_shared():
    server = Server(make_scheduler(caching=False))
    for id in range(3):
        server.add(id, [1] * 16, 3)
    server.run()
    server.add(3, [1] * 16, 3)
    server.run()
    assert all(
        chunk.start == 0 == chunk.write_from for batch in server.batches for chunk in batch.prefills
    )


def test_blocks_filled_by_sampled_tokens_are_shared_too():
    server = Server(make_scheduler())
    seq = server.add(0, [1, 2, 3], 10)
    server.run()
    server.add(1, list(seq.token_ids), 1)
    server.run()
    # 13 tokens of blocks of 4; the K and V of the last token were never computed.
    assert server.batches[-1].prefills[0].start == 12


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_step_is_run_past_a_known_length(max_tokens):
    """The prompt gives the first token. The last one is in flight when the next step is planned."""
    server = Server(make_scheduler())
    server.add(0, [1, 2, 3], max_tokens)
    server.run(delay=True)
    assert [len(batch.decode_slots) for batch in server.batches] == [0] + [1] * (max_tokens - 1)


def test_a_sequence_that_stopped_while_a_step_was_in_flight_drops_that_steps_token():
    prompt = [1, 2, 3]
    output = output_alone(prompt, 8)
    server = Server(make_scheduler())
    seq = server.add(0, prompt, 5, stop_ids={output[0]})
    other = server.add(1, [4], 5)
    server.run(delay=True)
    assert len(server.batches[1].decode_slots) == 2, (
        "the step after the stop was launched with the sequence in it"
    )
    assert seq.output_ids == output[:1] and seq.finish_reason == "stop"
    assert other.output_ids == output_alone([4], 6)


def test_a_start_beside_running_sequences_leaves_blocks_for_these_to_grow():
    server = Server(make_scheduler(num_blocks=128, block_size=1, max_num_batched_tokens=200))
    server.add(0, [1], 100)
    server.step()
    server.step()  # two blocks in use; a third when the next step is planned
    server.add(1, [2] * 124, 1)
    server.step()
    assert len(server.scheduler.waiting) == 1, "125 blocks are free, but 2 of 128 are held back"
    server.scheduler.abort(server.scheduler.decoding[0])
    server.add(2, [3] * 128, 1)
    server.step()
    server.step()
    assert not server.scheduler.waiting, "alone, a request may take the whole cache"


class ShortestPromptFirst(SchedulingPolicy):
    def key(self, seq):
        return seq.num_prompt_tokens


def test_a_policy_of_one_method_changes_the_order():
    server = Server(make_scheduler(max_num_seqs=1, policy=ShortestPromptFirst()))
    for id, length in enumerate([3, 9, 1, 3]):
        server.add(id, [id] * length, 2)
    server.run()
    assert server.scheduler.first_starts == [2, 0, 3, 1], "equal keys start in order of arrival"


class Priority(SchedulingPolicy):
    """Even numbers are important."""

    def key(self, seq):
        return seq.id % 2


def test_the_one_that_the_policy_puts_last_is_preempted_and_goes_first_in_line():
    server = Server(make_scheduler(num_blocks=5, block_size=2, max_num_seqs=3, policy=Priority()))
    server.add(1, [1, 1], 8)
    server.step()
    for id in (2, 3, 4):
        server.add(id, [id, id], 8)
    server.run_until_preemption()
    assert [seq.id for seq in server.scheduler.decoding] == [2, 4]
    assert [seq.id for seq in server.scheduler.waiting] == [1, 3]
    server.add(6, [6], 8)
    assert [seq.id for seq in server.scheduler.waiting] == [1, 6, 3], "whatever its key"
    server.run()


def test_an_important_prompt_is_not_preempted_for_others():
    server = Server(
        make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=5, policy=Priority())
    )
    server.add(1, [1, 2], 8)
    server.add(3, [1, 3], 8)
    server.step()
    server.step()
    important = server.add(4, [2] * 8, 3)
    server.step()
    assert server.scheduler.prefilling == [important] and server.scheduler.blocks.num_free == 0
    server.run_until_preemption()
    assert [seq.id for seq in server.scheduler.waiting] == [3]
    server.run()
    assert important.output_ids == output_alone([2] * 8, 11)


def test_a_policy_is_asked_once_a_step_how_many_may_run():
    class Two(SchedulingPolicy):
        asked = 0

        def running_limit(self, scheduler):
            self.asked += 1
            return 2

    policy = Two()
    server = Server(make_scheduler(policy=policy))
    for id in range(5):
        server.add(id, [id], 4)
    server.step()
    assert policy.asked == 1 and server.scheduler.num_running == 2
    server.run()
    assert max(len(batch.decode_slots) for batch in server.batches) == 2


def test_a_policy_that_says_nothing_of_shared_prefixes_shares_none():
    server = Server(make_scheduler())
    for id in range(3):
        server.add(id, [1] * 16, 3)
    server.run()
    assert not any(batch.shared_blocks for batch in server.batches)


def test_a_paused_sequence_keeps_its_slot_and_blocks_and_goes_on_where_it_was():
    server = Server(make_scheduler())
    seq, other = server.add(0, [1, 2, 3], 9), server.add(1, [4], 20)
    for _ in range(3):
        server.step()
    slot, table = seq.batch_slot, list(seq.block_table)
    server.scheduler.pause(seq)
    for _ in range(5):
        server.step()
    assert (seq.batch_slot, seq.block_table) == (slot, table) and len(seq.output_ids) == 3
    assert len(other.output_ids) == 8
    server.scheduler.resume(seq)
    server.run()
    assert seq.output_ids == output_alone([1, 2, 3], 12)
    assert sum(batch.num_prefill_tokens for batch in server.batches) == 4, "none anew"


@pytest.mark.parametrize("completions", [1, 3])
def test_prompts_computed_in_part_may_be_paused_and_go_on_in_turn(completions):
    server = Server(make_scheduler(max_num_seqs=9, max_num_batched_tokens=9, caching=False))
    sequences = []
    for id in range(3):
        sequences.append(server.add(id, [id] * 20, 3, completions=completions))
        server.step()
        server.scheduler.pause(sequences[-1])
        server.scheduler.pause(sequences[-1])
    server.step()
    assert len(server.batches) == 3 and server.scheduler.num_running == 0
    for seq in sequences:
        server.scheduler.resume(seq)
    assert server.scheduler.prefilling == sequences
    server.run()
    computed = sum(batch.num_prefill_tokens for batch in server.batches)
    assert computed == 60 + 3 * (completions - 1), "only each completion's last token anew"
    for id, seq in enumerate(sequences):
        outputs = [one.output_ids for one in seq.request.completions]
        assert outputs == [output_alone([id] * 20, 23, seed=i) for i in range(completions)]


@pytest.mark.parametrize("delay", [False, True])
def test_paused_sequences_give_way_before_a_running_one_is_preempted(delay):
    server = Server(make_scheduler(num_blocks=6, block_size=2, policy=Priority()))
    sequences = {id: server.add(id, [id, id], 9) for id in (1, 2, 3)}
    server.step()
    server.scheduler.pause(sequences[1])
    server.scheduler.pause(sequences[2])
    server.run(delay, until=lambda server: server.scheduler.num_preemptions)
    assert sequences[1].num_preemptions == 1, "the one that the policy puts last of these two"
    assert sequences[1].status is Status.WAITING and not server.scheduler.waiting
    assert sequences[3].num_preemptions == 0
    server.scheduler.resume(sequences[1])
    server.scheduler.resume(sequences[2])
    server.run(delay)
    for id, seq in sequences.items():
        assert seq.output_ids == output_alone([id, id], 11)


@pytest.mark.parametrize("sizes", [dict(max_num_seqs=2), dict(num_blocks=2)], ids=str)
@pytest.mark.parametrize("policy", [SchedulingPolicy, ThroughputPolicy])
def test_paused_sequences_make_room_for_one_that_waits(sizes, policy):
    server = Server(make_scheduler(policy=policy(), **sizes))
    paused = [server.add(id, [id], 4) for id in range(2)]
    server.step()
    for seq in paused:
        server.scheduler.pause(seq)
    late = server.add(2, [2], 4)
    server.run(until=lambda server: late.finish_reason)
    assert [seq.num_preemptions for seq in paused] == [0, 1], "no more room than is needed"
    for seq in paused:
        server.scheduler.resume(seq)
    server.run()
    assert [seq.output_ids for seq in paused] == [output_alone([id], 5) for id in range(2)]


def test_while_all_are_paused_nothing_is_planned():
    server = Server(make_scheduler(max_num_seqs=2))
    sequences = [server.add(id, [id], 4) for id in range(3)]
    server.step()
    for seq in sequences * 2:  # once more changes nothing
        server.scheduler.pause(seq)
    assert server.scheduler.schedule() is None and server.scheduler.has_unfinished()
    assert server.scheduler.num_running == len(server.scheduler.waiting) == 0


def test_a_sequence_paused_in_its_last_step_ends():
    server = Server(make_scheduler())
    seq = server.add(0, [1], 2)
    server.step()
    server.step(delay=True)
    server.scheduler.pause(seq)
    server.run()
    assert seq.finish_reason == "length" and seq.output_ids == output_alone([1], 3)


def test_the_random_streams_pause_sequences_wherever_they_stand():
    seen = set()

    class Watched(WatchedScheduler):
        def state(self, seq):
            if seq.status is Status.WAITING:
                return "waiting"
            if seq in self.prefilling or self.paused.get(seq):
                return "prompt in part"
            return "in flight" if seq.num_tokens > len(seq.token_ids) else "decoding"

        def pause(self, seq):
            self.before = getattr(self, "before", {}) | {seq: self.state(seq)}
            super().pause(seq)

        def resume(self, seq):
            seen.add((self.before[seq], self.state(seq)))
            super().resume(seq)

    def look(sizes, stream, delays):
        serve(Server(Watched(**sizes)), stream, delays)

    states = ["prompt in part", "decoding", "in flight"]
    wanted = {("waiting", "waiting"), *((state, "waiting") for state in states)}
    look_until_seen(look, seen, wanted | {(state, state) for state in states})


@pytest.mark.parametrize("delay", [False, True])
def test_invalid_logits_end_a_completion_alone_and_leave_nothing_of_its_prompt_cached(delay):
    scheduler = make_scheduler()
    server = Server(scheduler)
    prompt = list(range(20))
    other, first = server.add(7, [4], 5), server.add(8, prompt, 5, completions=2)
    _, second = first.request.completions
    server.step()
    batch = scheduler.schedule()
    assert scheduler.newest_step == [other, first, second] and len(batch.prefills) == 1
    assert scheduler.blocks.match(prompt)
    if delay:
        scheduler.schedule()
    assert scheduler.commit([1, 1, INVALID_TOKEN]) == ([other, first], [second])
    assert second.finish_reason == "error" and second.token_ids == prompt
    assert scheduler.blocks.match(prompt) == []
    check_blocks(scheduler)
    assert other.output_ids[1:] == first.output_ids[1:] == [1] and first.finish_reason is None


@pytest.mark.parametrize("delay", [False, True])
def test_the_others_compute_the_prompt_again_if_the_first_completion_had_invalid_logits(delay):
    scheduler = make_scheduler()
    server = Server(scheduler)
    prompt = list(range(20))
    first = server.add(8, prompt, 5, completions=2)
    _, second = first.request.completions
    scheduler.schedule()
    if delay:
        scheduler.schedule()
    assert scheduler.commit([INVALID_TOKEN]) == ([], [first])
    if delay:
        # The step in flight read the same K and V, so its logits are invalid, too.
        assert scheduler.commit([INVALID_TOKEN] * 2) == ([], [second])
    else:
        (chunk,) = scheduler.schedule().prefills
        assert chunk.start == 0
    check_blocks(scheduler)


def test_a_prompt_goes_on_if_a_block_that_it_shares_is_discarded_where_it_leaves_a_snapshot():
    scheduler = make_scheduler(num_snapshots=4, max_num_seqs=2, max_num_batched_tokens=5)
    server = Server(scheduler)
    prompt = [0, 1, 2, 3] * 4
    failing = server.add(0, prompt, 9)
    server.run(until=lambda server: scheduler.decoding)
    sharing = server.add(1, [*prompt, 4], 3)
    server.add(2, [*prompt[:8], 5], 3)  # the second prompt leaves a snapshot for this one
    server.device.launch(scheduler.schedule())
    assert sharing.num_registered_blocks == 4 and sharing.snapshots_at == [8, 16]
    assert scheduler.commit([INVALID_TOKEN]) == ([], [failing])
    server.run()
    assert sharing.output_ids == output_alone([*prompt, 4], 20)


def test_invalid_logits_of_a_sequence_that_has_ended_are_nobodys():
    """It ran one step too far, perhaps on tokens that make no sense."""
    server = Server(make_scheduler())
    ended, other = server.add(0, [1], 5, stop_ids={3}), server.add(1, [2], 5)
    server.scheduler.schedule()
    server.scheduler.schedule()
    server.scheduler.commit([3, 4])
    sampled, _ = server.scheduler.commit([INVALID_TOKEN, 5])
    assert sampled == [other] and ended.output_ids == [3] and other.output_ids == [4, 5]


def test_a_request_starts_beside_others_only_with_room_for_all_its_completions():
    server = Server(make_scheduler(max_num_seqs=8))
    for id in range(4):
        server.add(id, [id] * 6, 5, completions=4)
    server.step()
    assert server.scheduler.first_starts == [0, 1]
    server.step()
    assert server.scheduler.num_running == 8
    server.run()
    assert server.scheduler.first_starts == [0, 1, 2, 3]
