"""A job's replicas, simulated: whatever happens to them, each request ends once."""

import random
from itertools import count

import pytest
from job_helpers import StubEngine, as_job, read_lines, write_lines

from nanovllm import SamplingParams
from nanovllm.apps.jobs.errors import JobError, RefusedError
from nanovllm.apps.jobs.formats import Request
from nanovllm.apps.jobs.job import run_job
from nanovllm.apps.jobs.pool import CALLS, MOST_STARTS, TOGETHER, Pool, ReplicaLostError


class Life:
    """A simulated replica from a start to its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.engine = StubEngine()
        self.calls: list[int] = []  # not yet done, in order
        self.given: dict[int, list[Request]] = {}
        self.reason: str | None = None  # of its death
        self.has_started = self.is_stopped = self.is_hung = False


class Simulation:
    """A `pool.Cluster` whose replicas do calls in random order, and die when they are told to.

    dies: a function (life, requests it holds) -> whether it dies now; `hangs`: likewise.
    """

    def __init__(
        self,
        seed: int = 0,
        at_once: int = 3,
        dies=lambda life, held: False,
        hangs=lambda life, held: False,
    ) -> None:
        self.random = random.Random(seed)
        self.at_once = at_once
        self.dies, self.hangs = dies, hangs
        self.time = 0.0
        self.numbers = count()
        self.lives: list[Life] = []
        self.of_call: dict[int, Life] = {}
        self.results: dict[int, list | ReplicaLostError] = {}
        self.most_held = 0
        self.starts_that_fail: set[int] = set()
        self.said_no_more = False

    def call(self, life: Life, requests: list[Request]) -> int:
        number = next(self.numbers)
        self.of_call[number] = life
        life.calls.append(number)
        life.given[number] = requests
        assert len(life.calls) <= CALLS
        return number

    def start(self):
        life = Life(len(self.lives))
        self.lives.append(life)
        return life, self.call(life, [])

    def serve(self, life, requests, more_to_come):
        assert life.has_started and not life.is_stopped
        self.said_no_more |= not more_to_come
        return self.call(life, requests)

    def wait(self, calls, seconds):
        """Let one of the replicas do its next call, and be a while ahead of who asks."""
        assert calls and len({self.of_call[call].number for call in calls}) == len(calls)
        self.time += seconds
        for _ in range(self.random.randint(1, 3) if seconds else 0):
            if able := [life for life in self.lives if life.calls and not life.is_hung]:
                self.do_call(self.random.choice(able))
        return [call for call in calls if call in self.results][:1]

    def do_call(self, life: Life) -> None:
        number = life.calls[0]
        life.is_hung = self.hangs(life, life.engine.waiting + life.given[number])
        if life.is_hung:
            return
        life.calls.pop(0)
        life.engine.add(life.given[number])
        self.most_held = max(self.most_held, life.engine.num_unfinished)
        if life.reason is None and (
            life.number in self.starts_that_fail or self.dies(life, life.engine.waiting)
        ):
            life.reason = f"replica {life.number} died"
        if life.reason is not None:
            self.results[number] = ReplicaLostError(life.reason)
            return
        life.has_started = True
        life.engine.at_once = self.random.randint(0, self.at_once)
        self.results[number] = [(request.line, out) for request, out in life.engine.step()]

    def result(self, call):
        if isinstance(result := self.results.pop(call), ReplicaLostError):
            raise result
        return result

    def stop(self, life):
        life.is_stopped = True
        life.calls.clear()


@pytest.fixture
def clocked(monkeypatch):
    """A function: a simulation -> itself, whose time is the pool's."""

    def clock(simulation: Simulation) -> Simulation:
        monkeypatch.setattr("nanovllm.apps.jobs.pool.monotonic", lambda: simulation.time)
        return simulation

    return clock


def requests_of(num: int) -> list[Request]:
    return [Request(i, f"prompt {i}", SamplingParams(max_tokens=1 + i % 9)) for i in range(num)]


def serve_all(simulation: Simulation, requests: list[Request], **sizes) -> dict[int, dict]:
    """Outputs by line, after every request was served; each comes once."""
    pool = Pool(simulation, **({"num_replicas": 3, "num_running": 4} | sizes))
    pool.wait_for_all(60)
    todo, outputs = list(requests), {}
    while todo or pool.num_unfinished:
        if todo and pool.num_unfinished < 40:
            pool.add(todo[:8])
            del todo[:8]
            if not todo:
                pool.no_more()
        for request, output in pool.step():
            assert request.line not in outputs
            outputs[request.line] = output
    assert pool.num_prompt_tokens == 0
    return outputs


def answers(requests: list[Request]) -> dict[int, dict]:
    return {request.line: StubEngine.answer(request) for request in requests}


@pytest.mark.parametrize("seed", range(20))
def test_each_request_is_answered_once_whatever_dies(seed):
    r = random.Random(seed)
    simulation = Simulation(seed, dies=lambda life, held: life.has_started and r.random() < 0.05)
    requests = requests_of(120)
    outputs = serve_all(simulation, requests)
    assert {*outputs} == {*answers(requests)}
    right = {line: out for line, out in outputs.items() if "error" not in out}
    assert right.items() <= answers(requests).items() and len(right) > 100
    assert len(simulation.lives) > 3


@pytest.mark.parametrize("num_poisons", [1, 2, 5])
def test_requests_that_kill_replicas_become_errors_and_no_other_does(num_poisons):
    """The others have been with them, twice at first, and are not taken for what kills."""
    poisons = {7 + 40 * i for i in range(num_poisons)}
    simulation = Simulation(3, dies=lambda life, held: any(one.line in poisons for one in held))
    requests = requests_of(200)
    outputs = serve_all(simulation, requests)
    expected = answers(requests)
    assert {line for line, out in outputs.items() if out != expected[line]} == poisons
    for line in poisons:
        assert f"lost each of the {len(TOGETHER)} times" in outputs[line]["error"]
        assert "died" in outputs[line]["error"]
    assert len(simulation.lives) - 3 <= len(TOGETHER) * num_poisons


def test_what_was_on_two_lost_replicas_is_sent_in_small_groups_and_then_alone():
    seen = []

    def dies(life, held):
        if any(one.line == 50 for one in held):
            seen.append(len(held))
            return True
        return False

    outputs = serve_all(Simulation(1, dies=dies), requests_of(100), num_replicas=1, num_running=40)
    assert [line for line, out in outputs.items() if "error" in out] == [50]
    assert len(seen) == len(TOGETHER) and seen[2] <= TOGETHER[2] and seen[3] == 1
    assert seen[1] > TOGETHER[2]  # one loss is bad luck, which costs nobody speed


def test_replicas_that_hang_are_replaced_and_what_hangs_each_becomes_an_error(clocked):
    """One hangs once, by bad luck; and one request hangs whatever it is sent to."""

    def hangs(life, held):
        return (life.number == 1 and held) or any(one.line == 7 for one in held)

    simulation = clocked(Simulation(3, hangs=hangs))
    requests = requests_of(120)
    outputs = serve_all(simulation, requests, start_timeout=300, answer_timeout=100)
    expected = answers(requests)
    assert [line for line, out in outputs.items() if out != expected[line]] == [7]
    assert "it has not answered for 10" in outputs[7]["error"]
    hung = [life for life in simulation.lives if life.is_hung]
    assert len(TOGETHER) <= len(hung) == len(simulation.lives) - 3
    assert all(life.is_stopped for life in hung)


def test_replicas_that_answer_slowly_are_left_alone(clocked):
    """Each call takes 90 s, of 100; what requests wait for takes longer, and so does the while in
    which there is nothing to do.
    """
    simulation = clocked(Simulation(2))

    def wait(calls, seconds):
        if seconds:
            simulation.time += 45
            if simulation.time % 90 == 0:
                simulation.do_call(simulation.lives[0])
        return [call for call in calls if call in simulation.results]

    simulation.wait = wait
    pool = Pool(simulation, num_replicas=1, num_running=4, answer_timeout=100)
    pool.wait_for_all(100)
    requests, outputs = requests_of(40), {}
    for part in (requests[:20], requests[20:]):
        pool.add(part)
        while pool._replicas[0].calls or pool.num_unfinished:
            outputs |= {request.line: output for request, output in pool.step()}
        simulation.time += 180
    assert outputs == answers(requests) and len(simulation.lives) == 1


def test_a_job_that_was_stopped_for_a_while_takes_no_replica_for_hung(clocked):
    """Their answers came meanwhile, and nobody looked at them."""
    simulation = clocked(Simulation(5))
    pool = Pool(simulation, num_replicas=3, num_running=4, answer_timeout=100)
    pool.wait_for_all(60)
    pool.add(requests := requests_of(60))
    pool.step()
    for life in simulation.lives:
        while life.calls:
            simulation.do_call(life)
    simulation.time += 3600
    outputs = {}
    while pool.num_unfinished:
        outputs |= {request.line: output for request, output in pool.step()}
    assert {*answers(requests)} >= {*outputs} and len(simulation.lives) == 3


def test_a_job_does_not_wait_for_ever_for_a_replica_that_has_no_place_any_more(clocked):
    """Its host may be gone, and no other has room."""
    simulation = clocked(
        Simulation(
            dies=lambda life, held: life.number == 0 and bool(held),
            hangs=lambda life, held: life.number > 0,
        )
    )
    with pytest.raises(JobError, match="has not answered for 3. s. All finished results are kept"):
        serve_all(simulation, requests_of(9), num_replicas=1, start_timeout=30, answer_timeout=9)
    assert len(simulation.lives) == 1 + MOST_STARTS


def test_replicas_that_always_die_end_the_job_with_what_they_died_of():
    simulation = Simulation(dies=lambda life, held: bool(held))
    with pytest.raises(JobError, match=r"replica \d+ died\. All finished results are kept"):
        serve_all(simulation, requests_of(100))
    assert len(simulation.lives) < 20


def test_a_replica_that_does_not_start_is_given_up_and_the_others_do_its_work():
    simulation = Simulation(4)
    simulation.starts_that_fail = {1, 3, 4}
    requests = requests_of(60)
    assert serve_all(simulation, requests) == answers(requests)
    assert len(simulation.lives) == 2 + MOST_STARTS


def test_where_no_replica_starts_the_job_ends():
    simulation = Simulation()
    simulation.starts_that_fail = {*range(100)}
    with pytest.raises(JobError, match="lost"):
        serve_all(simulation, requests_of(3))
    assert len(simulation.lives) <= 3 * MOST_STARTS


def test_replicas_for_which_there_is_no_room_are_refused_after_start_timeout(monkeypatch):
    simulation = Simulation()
    monkeypatch.setattr(simulation, "wait", lambda calls, seconds: [])
    pool = Pool(simulation, num_replicas=2, num_running=4)
    with pytest.raises(RefusedError, match="0 of 2 replicas have started within start_timeout"):
        pool.wait_for_all(0.01)


def test_replicas_are_full_and_hold_no_more_than_their_part():
    """At first the work is shared out evenly, which for few requests is all there is."""
    simulation = Simulation(5, at_once=0)  # they finish nothing
    pool = Pool(simulation, num_replicas=2, num_running=4)
    pool.wait_for_all(60)
    pool.add(requests_of(20))
    pool.step()
    first, second = [sum(map(len, life.given.values())) for life in simulation.lives]
    assert first + second == 20 and abs(first - second) <= 2
    pool.add(requests_of(200)[20:])
    for _ in range(50):
        pool.step()
    assert simulation.most_held == 4 + 8 * 4  # those that run, and eight times as many that wait


def test_long_outputs_are_shared_out_evenly():
    simulation = Simulation(5, at_once=0)
    pool = Pool(simulation, num_replicas=2, num_running=8)
    pool.wait_for_all(60)
    lengths = [1000, *[100] * 10]
    pool.add([Request(i, "x", SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)])
    pool.step()
    assert sorted(len(replica.entries) for replica in pool._replicas) == [1, 10]


def test_replicas_hear_that_no_more_comes_with_the_last_requests():
    simulation = Simulation(6)
    pool = Pool(simulation, num_replicas=1, num_running=4)
    pool.wait_for_all(60)
    pool.add(requests_of(60))
    pool.no_more()
    while pool.num_unfinished:
        pool.step()
        assert simulation.said_no_more <= (not pool._waiting)
    assert simulation.said_no_more


def test_a_job_is_the_same_by_replicas_that_die(model_free_job, tmp_path):
    """Through the loop and the journal: the output's lines are in order, and each is there once."""
    job = model_free_job(300)
    r = random.Random(1)
    simulation = Simulation(2, dies=lambda life, held: life.has_started and r.random() < 0.02)

    class Context:
        def __enter__(self):
            pool = Pool(simulation, 3, 8)
            pool.wait_for_all(60)
            return pool

        def __exit__(self, *_):
            pass

    said = run_job(job, Context, lambda: None)
    assert said.startswith("300 lines done: 0 failed")
    expected = [f"answer to p{i}" for i in range(300)]
    assert [record["text"] for record in read_lines(job.output)] == expected
    assert len(simulation.lives) > 3


@pytest.fixture
def model_free_job(tmp_path):
    """A function: number of lines -> a job of three replicas that loads no model."""
    (tmp_path / "model").mkdir()

    def make(num_lines: int):
        source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(num_lines)])
        return as_job(source, tmp_path / "out.jsonl", tmp_path / "model", replicas=3)

    return make
