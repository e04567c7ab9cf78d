"""The throughput policy starts sequences when all end sooner for it, and finds what they share; the
others start them by one rule. A user may choose, or bring a policy.
"""

import os

import pytest
from effort import tries
from engine_helpers import PROMPTS, Checkpoint, assert_empty, greedy
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import VOCABULARY, output_alone
from test_scheduler import Server, make_request, make_scheduler, streams

from nanovllm import LLM, SamplingParams
from nanovllm.config import SCHEDULING_POLICIES
from nanovllm.engine.policy import SchedulingPolicy
from nanovllm.features.policies import POLICIES
from nanovllm.features.policies.rolling import RollingPolicy
from nanovllm.features.policies.shared_prefix import SharedPrefixPolicy, count_common_blocks
from nanovllm.features.policies.throughput import GROUP_TOKENS, ThroughputPolicy


def make_server(min_running: int = 8, group_tokens: int = GROUP_TOKENS, **sizes) -> Server:
    return Server(make_scheduler(policy=ThroughputPolicy(min_running, group_tokens), **sizes))


def test_longest_outputs_start_first_and_interactive_ones_before_all():
    server = make_server(max_num_seqs=1)
    for id, (max_tokens, interactive) in enumerate(
        [(3, False), (9, False), (2, True), (9, False), (5, True)]
    ):
        server.add(id, [id], max_tokens, interactive=interactive)
    server.run()
    assert server.scheduler.first_starts == [2, 4, 1, 3, 0]


def test_decoding_sequences_run_longest_first():
    server = make_server(num_blocks=300)
    for id, length in enumerate([3, 30, 7, 1, 50]):
        server.add(id, [id] * length, 12 - id)
    server.step()
    longest = server.scheduler.decoding[0]
    server.scheduler.pause(longest)
    server.step()
    server.scheduler.resume(longest)
    while server.scheduler.has_unfinished():
        server.step()
        lengths = [seq.num_tokens for seq in server.scheduler.decoding]
        assert lengths == sorted(lengths, reverse=True)


def test_starting_beside_running_sequences_waits_for_a_group_of_free_slots():
    server = make_server(num_blocks=200, max_num_seqs=32)
    for id in range(32):
        server.add(id, [id], 3 if id == 0 else 9, interactive=True)
    for id in range(32, 36):
        server.add(id, [id], 3, interactive=True)
    for _ in range(4):
        server.step()
    assert len(server.scheduler.decoding) == 31, "one free slot is no group"
    assert len(server.scheduler.waiting) == 4
    server.run()


def waiting_when_the_first_of_6_start(prompt_of, later_prompt_of) -> int:
    """64 sequences end one by one: how many of 6 others wait on when the first of these start."""
    server = make_server(
        group_tokens=20, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=4000
    )
    for id in range(64):
        server.add(id, prompt_of(id), 5 + id, interactive=True)
    for id in range(64, 70):
        server.add(id, later_prompt_of(id), 3, interactive=True)
    server.step()
    while len(server.scheduler.waiting) == 6:
        server.step()
    left = len(server.scheduler.waiting)
    server.run()
    return left


@pytest.mark.parametrize("length, group", [(1, 4), (10, 2), (30, 1)])
def test_a_group_is_of_fewer_sequences_where_prompts_are_long(length, group):
    left = waiting_when_the_first_of_6_start(
        lambda id: [id % VOCABULARY], lambda id: [id % VOCABULARY] * length
    )
    assert left == 6 - group


def test_a_group_counts_no_tokens_that_are_cached():
    def prompt(id):
        return [1, 2, 3, 4] * 8 + [id % VOCABULARY]

    assert waiting_when_the_first_of_6_start(prompt, prompt) == 2, "a group of 4, as of short ones"


def lengths_and_decodes(lengths: list[int], min_running: int = 8, interactive: bool = False):
    """After which step each sequence ended, and how many sequences decoded in each step."""
    server = make_server(min_running, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=256)
    sequences = [
        server.add(id, [id % VOCABULARY], length, interactive=interactive)
        for id, length in enumerate(lengths)
    ]
    ends = {}
    while server.scheduler.has_unfinished():
        server.step()
        ended = [seq.id for seq in sequences if seq.finish_reason and seq.id not in ends]
        ends.update(dict.fromkeys(ended, len(server.batches)))
    for seq in sequences:
        assert seq.output_ids == output_alone([seq.id % VOCABULARY], seq.max_len)
    return list(ends.values()), [len(batch.decode_slots) for batch in server.batches]


def test_sequences_spread_over_the_steps_of_the_longest():
    lengths = [60 * i // 32 for i in range(4, 33)]
    ends, decodes = lengths_and_decodes(lengths, interactive=True)
    assert max(ends) == 60 and max(decodes) == 29, "all start at once"
    ends, decodes = lengths_and_decodes(lengths)
    assert max(ends) <= 64, "late starters make the whole no longer than by a group's wait"
    assert max(decodes) <= 21 and min(decodes[8:52]) >= 11, "16 or 17 at a time hold all tokens"


def test_the_example_of_the_docstring():
    """At a tenth: one request of 100 tokens, and 49 others of 50 each."""
    ends, decodes = lengths_and_decodes([50] * 49 + [100])
    assert max(decodes) <= 30 and max(ends) <= 110


def test_sequences_of_one_length_all_start_at_once():
    _, decodes = lengths_and_decodes([40] * 40)
    assert max(decodes) == 40


def test_all_slots_are_taken_when_more_sequences_wait():
    _, decodes = lengths_and_decodes([10 + i % 5 for i in range(150)])
    assert decodes[1:10] == [64] * 9


def test_all_completions_of_a_request_count():
    server = make_server(num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=256)
    for id in range(24):  # as many tokens as 38 sequences hold over the longest one's steps
        server.add(id, [id % VOCABULARY], 30 - id, completions=3)
    server.run()
    assert max(len(batch.decode_slots) for batch in server.batches[:10]) >= 36
    assert len(server.batches) <= 36, "none waits until the longest has ended"


def test_a_few_sequences_do_not_wait():
    _, decodes = lengths_and_decodes([100, *[10] * 30], min_running=32)
    assert decodes[1] == 31, "so few take no longer for one more"


@pytest.mark.parametrize(
    "tables, count",
    [
        ([], 0),
        ([[1, 2], [1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2], [1, 5, 3]], 1),
        ([[1, 2], [2, 1]], 0),
    ],
)
def test_common_blocks_are_counted(tables, count):
    assert count_common_blocks(tables) == count


@tries(80)
@given(streams(), st.booleans())
def test_the_shared_prefix_is_known_in_every_step(stream, throughput):
    """Though it is counted only when other sequences decode than in the step before."""
    sizes, stream, delays = stream
    policy = ThroughputPolicy(min_running=2) if throughput else SharedPrefixPolicy()
    server = Server(make_scheduler(**sizes, policy=policy))
    for id, asked in enumerate(stream):
        server.add(id, asked.prompt, asked.max_tokens, asked.stop_ids, asked.completions)
    for step in range(1000):
        if not server.scheduler.has_unfinished():
            return
        num_batches = len(server.batches)
        server.step(delays[step % len(delays)])
        if len(server.batches) > num_batches:
            batch, states = server.batches[-1], server.device.states
            tables = [states[slot].table for slot in batch.decode_slots]
            if len(tables) > 1:
                assert batch.shared_blocks == len(os.path.commonprefix(tables))


def test_a_sequence_that_took_anothers_slot_is_not_taken_for_it():
    policy = SharedPrefixPolicy()
    first, second, third = [make_request(id, [1], 5).first for id in range(3)]
    for seq, table in ((first, [1, 2]), (second, [1, 2]), (third, [1, 3])):
        seq.block_table = table
    first.batch_slot, second.batch_slot, third.batch_slot = 0, 1, 1
    assert policy.shared_prefix_blocks([first, second]) == 2
    assert policy.shared_prefix_blocks([first, third]) == 1


def test_a_job_starts_the_longest_of_each_window_first_so_that_none_waits_for_later_ones():
    policy = RollingPolicy(window=3)
    server = Server(make_scheduler(policy=policy, max_num_seqs=1))
    for id, max_tokens in enumerate([2, 9, 5, 3, 9, 9, 8]):
        server.add(id, [id], max_tokens, interactive=True)
    server.run()
    assert server.scheduler.first_starts == [1, 2, 0, 4, 5, 3, 6]


def test_a_job_is_paced_when_its_last_request_has_come():
    for more_to_come, expected in ((True, 40), (False, 11)):
        policy = RollingPolicy(window=100)
        policy.min_running, policy.more_to_come = 8, more_to_come
        server = Server(make_scheduler(policy=policy, num_blocks=400, max_num_seqs=64))
        for id in range(40):
            server.add(id, [id % VOCABULARY], 40 if id == 0 else 10, interactive=True)
        server.step()
        assert server.scheduler.num_running == expected
        server.run()


def test_no_more_requests_of_a_job_run_than_are_enough_for_the_device():
    policy = RollingPolicy(window=100)
    server = Server(make_scheduler(policy=policy, num_blocks=400, max_num_seqs=64, enough_seqs=4))
    requests = [server.add(id, [id % VOCABULARY], 10 + id % 3) for id in range(20)]
    first_end = None
    while server.scheduler.has_unfinished():
        server.step()
        if first_end is None and any(seq.finish_reason for seq in requests):
            first_end = len(server.batches)
    running = [len(batch.decode_slots) for batch in server.batches]
    assert max(running) == 4 and sum(running) / len(running) > 3.5, "nor fewer"
    assert first_end <= len(server.batches) / 4, "the first do not wait for the last"


def test_the_last_round_of_a_job_is_as_full_as_the_others():
    policy = RollingPolicy(window=100)
    policy.more_to_come = False
    server = Server(make_scheduler(policy=policy, num_blocks=400, max_num_seqs=64, enough_seqs=4))
    for id in range(9):
        server.add(id, [id % VOCABULARY], 10)
    server.run()
    running = [len(batch.decode_slots) for batch in server.batches]
    assert max(running) == 5 and len(running) <= 22, "5 and 4 together, not 4, 4 and 1"


def test_requests_of_a_call_run_beyond_what_is_enough():
    """Their outputs come all at once: what counts is when the last one ends."""
    policy = ThroughputPolicy(min_running=64)
    server = Server(make_scheduler(policy=policy, num_blocks=400, max_num_seqs=64, enough_seqs=4))
    for id in range(20):
        server.add(id, [id % VOCABULARY], 10)
    server.step()
    assert server.scheduler.num_running == 20
    server.run()


# By name, or by an object of the user's own


TIGHT = dict(num_kvcache_blocks=8, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128)


class LongestPromptFirst(SchedulingPolicy):
    def key(self, seq):
        return -seq.num_prompt_tokens


class NoSubclass:
    """Has the methods and no base: last come, first served, two at a time."""

    def key(self, seq):
        return -seq.id

    def running_limit(self, scheduler):
        return 2

    def started(self, seq):
        pass

    def order_decodes(self, decoding):
        decoding.reverse()

    def shared_prefix_blocks(self, decoding):
        return 0


OWN = {"a subclass": LongestPromptFirst, "no subclass": NoSubclass}


def test_every_name_has_a_policy():
    assert tuple(POLICIES) == SCHEDULING_POLICIES


@pytest.mark.parametrize(
    "policy, order",
    [
        ("fcfs", [0, 1, 2, 3, 4, 5]),
        ("shortest-first", [3, 1, 5, 2, 0, 4]),
        ("longest-first", [0, 4, 2, 5, 1, 3]),
        ("priority", [0, 3, 2, 5, 1, 4]),
    ],
)
def test_a_named_policy_starts_by_its_rule(policy, order):
    """Lengths of prompt and output decide, and priorities, which go round: 0, 2, 1."""
    server = Server(make_scheduler(max_num_seqs=1, policy=POLICIES[policy]()))
    for id, (prompt, output) in enumerate([(5, 9), (3, 4), (2, 8), (1, 4), (5, 9), (4, 4)]):
        server.add(id, [id] * prompt, output)
    server.run()
    assert server.scheduler.first_starts == order


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize("policy", [*POLICIES, *OWN])
def test_tokens_do_not_depend_on_the_policy(make_llm, checkpoint: Checkpoint, policy, overlap):
    """With tight caches, several completions, shared prefixes, requests one by one and streams."""
    given_policy = OWN[policy]() if policy in OWN else policy
    llm = make_llm(scheduling_policy=given_policy, overlap=overlap, **TIGHT)
    expected = [checkpoint.expected(prompt, 20) for prompt in PROMPTS]
    priorities = range(len(PROMPTS)) if policy in ("priority", *OWN) else [0] * len(PROMPTS)
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=n, priority=-number % 3)
        for n, number in zip([1, 3, 1, 2] * 3, priorities)
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.metrics()["last_call"]["preemptions"] > 0
    for output, one, tokens in zip(outputs, params, expected):
        found = [each["token_ids"] for each in output.get("completions", [output])]
        assert found == [tokens] * one.n
    ids = [llm.add_request(prompt, greedy(20)) for prompt in PROMPTS[:4]]
    streamed = {i: [] for i in range(4, 8)}
    for i, _, token_ids, _ in llm.stream(PROMPTS[4:8], greedy(20)):
        streamed[i + 4] += token_ids
    while llm.has_unfinished():
        streamed |= {ids.index(output["id"]): output["token_ids"] for output in llm.step()}
    assert streamed == dict(enumerate(expected[:8]))
    assert_empty(llm)


def test_a_request_with_a_lower_priority_number_overtakes(make_llm):
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    ids = [
        llm.add_request(PROMPTS[0], SamplingParams(max_tokens=3, priority=priority))
        for priority in (0, 5, -1, 5, 2)
    ]
    ended = []
    while llm.has_unfinished():
        ended += [ids.index(output["id"]) for output in llm.step()]
    assert ended == [2, 0, 4, 1, 3]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "priority"])
def test_a_priority_that_would_be_ignored_is_refused(make_llm, policy):
    llm = make_llm(scheduling_policy=policy)
    message = rf"sampling_params\[1\].priority is 3, which scheduling_policy='{policy}' ignores"
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:2], [greedy(3), SamplingParams(priority=3)], use_tqdm=False)


class Lacking:
    key = running_limit = started = order_decodes = lambda self, *_: 0


@pytest.mark.parametrize(
    "policy, error, message",
    [
        ("lifo", ValueError, "'lifo': use one of 'throughput', 'fcfs', .* or an object with the"),
        (7, TypeError, "scheduling_policy is 7, which has no method key"),
        (Lacking(), TypeError, "which has no method shared_prefix_blocks: derive its class from"),
        (SchedulingPolicy, TypeError, r"the class SchedulingPolicy: .*, such as SchedulingPolicy"),
    ],
)
def test_a_wrong_policy_is_refused_before_a_model_is_looked_for(policy, error, message):
    with pytest.raises(error, match=message):
        LLM("no/such/model", scheduling_policy=policy)


def test_a_policy_that_fails_leaves_an_empty_usable_llm(make_llm, checkpoint):
    class Failing(SchedulingPolicy):
        fails = True

        def key(self, seq):
            return 1 / 0 if self.fails else seq.id

    policy = Failing()
    llm = make_llm(scheduling_policy=policy)
    with pytest.raises(ZeroDivisionError):
        llm.add_request(PROMPTS[0], greedy(3))
    assert_empty(llm)
    policy.fails = False
    id = llm.add_request(PROMPTS[0], greedy(3))
    while llm.has_unfinished():
        assert all(output["id"] == id for output in llm.step())
    assert_empty(llm)


def test_a_policy_of_ones_own_runs_several_ranks(make_llm, checkpoint):
    class Local(LongestPromptFirst):
        """Cannot be pickled: it stays in this process."""

    llm = make_llm(scheduling_policy=Local(), tensor_parallel_size=2, max_num_seqs=2)
    outputs = llm.generate(PROMPTS[:4], greedy(5), use_tqdm=False)
    expected = [checkpoint.expected(prompt, 5) for prompt in PROMPTS[:4]]
    assert [output["token_ids"] for output in outputs] == expected
