"""A long life: thousands of requests of any shape, and all that can befall them, leave nothing."""

import gc
import os
import random
from contextlib import suppress
from pathlib import Path

from call_helpers import check_empty, make_folder, make_llm
from effort import EFFORT

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence

NUM_REQUESTS = 1000 * EFFORT
MOST_GROWTH = 1.05  # of the process's memory over three quarters of the requests
STRETCHES = 3  # so often as many are made: a leak goes on, what an allocator keeps once does not
UNFINISHED = 24  # about as many at a time


class Strike(RuntimeError):
    pass


class User:
    """Asks for anything at any time, and keeps some answers."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.chance = random.Random(seed)
        self.num_requests = 0
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}  # by id, unfinished
        self.paused: set[int] = set()
        self.answers: list[tuple[list[int], SamplingParams, dict]] = []
        self.done: dict[str, int] = {}
        self._families = [[self.chance.randrange(256) for _ in range(100)] for _ in range(5)]

    def request(self) -> tuple[list[int], SamplingParams]:
        r = self.chance
        self.num_requests += 1
        begin = r.choice(self._families)[: r.choice([0, 16, 40, 100])]
        prompt = begin + [r.randrange(256) for _ in range(r.randint(1, 30))]
        special = r.choice([{}, {}, {"top_k": 9}, {"stop": "th"}, {"repetition_penalty": 1.2}])
        params = SamplingParams(
            temperature=r.choice([0, 1]),
            seed=r.getrandbits(40),
            max_tokens=r.choice([1, 3, 8, 8, 30]),
            n=r.choice([1, 1, 1, 1, 3]),
            **special,
        )
        return prompt, params

    def act(self) -> None:
        kinds = {self.add: 6, self.step: 8, self.pause: 1, self.resume: 1, self.abort: 0.5}
        kinds |= {self.generate: 0.1, self.stream: 0.1, self.ask_wrongly: 0.1, self.fail: 0.05}
        if len(self.asked) >= UNFINISHED:
            kinds[self.add] = 0
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
        kind()

    def live(self, num_requests: int) -> None:
        end = self.num_requests + num_requests
        while self.num_requests < end:
            self.act()
        self.finish()

    def finish(self) -> None:
        while self.asked:
            self.resume()
            self.step()

    def keep(self, prompt: list[int], params: SamplingParams, output: dict) -> None:
        if self.chance.random() < 0.1 and len(self.answers) < 100:
            self.answers.append((prompt, params, output))

    def add(self) -> None:
        prompt, params = self.request()
        self.asked[self.llm.add_request(prompt, params)] = prompt, params

    def step(self) -> None:
        for output in self.llm.step():
            self.paused.discard(output["id"])  # its last token was in flight
            self.keep(*self.asked.pop(output["id"]), output)

    def any(self, ids) -> list[int]:
        return [self.chance.choice(sorted(ids))] if ids else []

    def pause(self) -> None:
        for one in self.any(self.asked.keys()):
            self.llm.pause(one)
            self.paused.add(one)

    def resume(self) -> None:
        for one in self.any(self.paused):
            self.llm.resume(one)
            self.paused.remove(one)

    def abort(self) -> None:
        for one in self.any(self.asked.keys()):
            self.llm.abort(one)
            self.paused.discard(one)
            del self.asked[one]

    def generate(self) -> None:
        asked = [self.request() for _ in range(self.chance.randint(1, 9))]
        outputs = self.llm.generate(*map(list, zip(*asked)), use_tqdm=False)
        for (prompt, params), output in zip(asked, outputs):
            self.keep(prompt, params, output)

    def stream(self) -> None:
        """One that is read for a while, and dropped."""
        prompt, _ = self.request()
        stream = self.llm.stream([prompt] * 2, SamplingParams(temperature=0, max_tokens=9))
        for _ in zip(range(self.chance.randint(0, 12)), stream):
            pass
        stream.close()

    def ask_wrongly(self) -> None:
        wrong = self.chance.choice([[], [1, 999], "", [3] * 400, [1, None], "\ud800"])
        prompt, params = self.request()
        with suppress(ValueError, TypeError):
            self.llm.generate([prompt, wrong], params, use_tqdm=False)
            raise AssertionError("a wrong prompt was taken")

    def fail(self) -> None:
        """A step breaks: all that was asked for is dropped."""
        runner = self.llm.engine.runner
        launch, left = runner.launch, self.chance.randint(0, 5)

        def broken(batch):
            nonlocal left
            left -= 1
            if left < 0:
                raise Strike
            return launch(batch)

        runner.launch = broken
        try:
            self.generate()
        except Strike:
            self.asked.clear()
            self.paused.clear()
            check_empty(self.llm)
        finally:
            del runner.launch


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_requests_and_failures_leave_no_block_and_no_memory(tmp_path):
    folder = make_folder(tmp_path)
    sizes = dict(num_kvcache_blocks=40, overlap=True, max_num_batched_tokens=64)
    with make_llm(folder, device="cpu", **sizes) as llm:
        user = User(llm, seed=0 if EFFORT == 1 else random.randrange(2**32))
        user.live(NUM_REQUESTS // 4)
        resident = [resident_bytes()]
        for _ in range(STRETCHES):
            user.live(NUM_REQUESTS * 3 // 4)
            check_empty(llm)
            resident.append(resident_bytes())
            if resident[-1] < MOST_GROWTH * resident[-2]:
                break
        metrics = llm.metrics()["total"]
        print(f"{user.num_requests} requests, {user.done}, {metrics}")
        print(f"resident: {[f'{size / 2**20:.1f} MiB' for size in resident]}")
        # The policy looks at those that it saw last.
        assert sum(type(thing) is Sequence for thing in gc.get_objects()) <= 8
        assert resident[-1] < MOST_GROWTH * resident[-2], "it has grown each time"
        assert metrics["preemptions"] and len(user.done) == 9, "it does not reach what it is for"
    with make_llm(folder, device="cpu") as fresh:
        for prompt, params, output in user.answers:
            (expected,) = fresh.generate([prompt], params, use_tqdm=False)
            for name in ("text", "token_ids", "finish_reason"):
                assert output[name] == expected[name]
            assert texts_of(output) == texts_of(expected)


def texts_of(output: dict) -> list[str]:
    return [one["text"] for one in output.get("completions", [])]
