"""How many prompt tokens a model with recurrent layers finds in the prefix cache, by counting.

The measure is a model of attention alone, whose K and V can be shared from any token on.
"""

import random
from collections import deque

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.snapshots import Snapshots, StateRows
from nanovllm.engine.stateful_blocks import StatefulBlockManager, StatefulBlockTables
from nanovllm.features.policies import POLICIES
from nanovllm.sampling_params import SamplingParams

SEQS = 64


class Engine:
    """A scheduler whose steps sample tokens at random. `num_snapshots` None: attention alone."""

    def __init__(self, policy: str, num_snapshots: int | None):
        blocks, make_tables = BlockManager(4000, 256), BlockTables
        if num_snapshots is not None:
            self.snapshots = Snapshots(StateRows(SEQS, num_snapshots))
            blocks = StatefulBlockManager(4000, 256, snapshots=self.snapshots)
            make_tables = StatefulBlockTables
        self.rng = random.Random(0)
        self.requests: list[Request] = []
        self.scheduler = Scheduler(
            blocks,
            POLICIES[policy](),
            make_tables=make_tables,
            max_num_seqs=SEQS,
            max_num_batched_tokens=16384,
        )

    def run(self, prompts: list[tuple[list[int], int]]) -> list[list[int]]:
        """Run prompts, each with its number of new tokens. Returns prompts and outputs."""
        first, scheduler = len(self.requests), self.scheduler
        for prompt, count in prompts:
            params = SamplingParams(max_tokens=count)
            request = Request(len(self.requests), prompt, params, max_len=len(prompt) + count)
            self.requests.append(request)
            scheduler.add(request)
        in_flight: deque[int] = deque()
        while scheduler.has_unfinished() or in_flight:
            batch = scheduler.schedule()
            if batch is not None:
                in_flight.append(len(scheduler.newest_step))
            while len(in_flight) > (batch is not None):  # with overlap
                scheduler.commit(ids(self.rng, in_flight.popleft()))
        return [request.first.token_ids for request in self.requests[first:]]

    @property
    def num_cached(self) -> int:
        return sum(request.num_cached_tokens for request in self.requests)


def ids(rng, count):
    return [rng.randrange(150_000) for _ in range(count)]


def conversations(engine):
    """Five rounds of 40 users, who come back in any order, after one system prompt."""
    rng = random.Random(1)
    system = ids(rng, 300)
    prompts = [system + ids(rng, rng.randint(50, 400)) for _ in range(40)]
    for _ in range(5):
        rng.shuffle(prompts)
        outputs = engine.run([(prompt, rng.randint(20, 120)) for prompt in prompts])
        prompts = [output + ids(rng, rng.randint(20, 150)) for output in outputs]


def groups(engine):
    """48 groups of 8 prompts that begin alike, shuffled."""
    rng = random.Random(2)
    prompts = []
    for _ in range(48):
        common = ids(rng, 1536)
        prompts += [(common + ids(rng, rng.randint(64, 192)), 96) for _ in range(8)]
    rng.shuffle(prompts)
    engine.run(prompts)


def system_prompt(engine):
    """256 requests after one system prompt, which ends within a block."""
    rng = random.Random(3)
    system = ids(rng, 700)
    engine.run([(system + ids(rng, rng.randint(30, 200)), 16) for _ in range(256)])


def tree(engine):
    """60 trees of 9 prompts, which begin alike twice, shuffled."""
    rng = random.Random(5)
    prompts = []
    for _ in range(60):
        common = ids(rng, 300)
        for _ in range(3):
            branch = common + ids(rng, 200)
            prompts += [(branch + ids(rng, rng.randint(20, 60)), 8) for _ in range(3)]
    rng.shuffle(prompts)
    engine.run(prompts)


def one_by_one(engine):
    """Requests after one system prompt, none of which knows of the next."""
    rng = random.Random(4)
    system = ids(rng, 700)
    for _ in range(64):
        engine.run([(system + ids(rng, rng.randint(30, 200)), 4)])


@pytest.mark.parametrize("policy", ["throughput", "fcfs"])
@pytest.mark.parametrize("work", [conversations, groups, system_prompt, one_by_one])
def test_prompts_find_as_many_tokens_as_with_attention_alone(work, policy):
    attention, recurrent = Engine(policy, None), Engine(policy, 64)
    work(attention)
    work(recurrent)
    assert attention.num_cached > 0
    assert recurrent.num_cached >= 0.95 * attention.num_cached


def test_snapshots_that_prompts_waited_for_leave_room_for_those_of_later_calls():
    """Prompts may start with a longer snapshot than the one that was saved for them."""
    fresh, used = Engine("throughput", 64), Engine("throughput", 64)
    conversations(fresh)
    tree(used)
    num_cached = used.num_cached
    conversations(used)
    assert used.num_cached - num_cached == fresh.num_cached


def test_a_snapshot_is_kept_for_waiting_prompts_until_they_start_or_are_aborted():
    engine = Engine("fcfs", 4)
    rng = random.Random(6)
    common = ids(rng, 300)
    prompts = [common + ids(rng, 50) for _ in range(3)]
    params = SamplingParams(max_tokens=1)
    engine.requests = [Request(i, prompt, params, max_len=351) for i, prompt in enumerate(prompts)]
    scheduler, snapshots = engine.scheduler, engine.snapshots
    scheduler.max_num_batched_tokens = 320
    for request in engine.requests:
        scheduler.add(request)
    scheduler.schedule()  # the first prompt leaves a snapshot where the others part from it
    assert len(snapshots) == len(snapshots._needed) == 1
    scheduler.abort(engine.requests[1].first)
    assert snapshots._needed
    scheduler.abort(engine.requests[2].first)
    assert not snapshots._needed
