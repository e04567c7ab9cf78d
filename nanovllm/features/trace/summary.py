"""The figures of a trace: how long steps took, how long requests waited, what the caches gained."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.metrics import percentiles
from nanovllm.features.trace.events import (
    Added,
    Committed,
    Event,
    Evicted,
    Finished,
    Kept,
    Launched,
    Run,
    Started,
)
from nanovllm.features.trace.replay import Replay


class Summary:
    """The figures of a trace's events.

    Times are in seconds. The time of a step is the time from the commit before it, or from its
    launch if that came later, to its own commit: a decoding sequence waits that long for a token. A
    KV slot is room for one token. It is unused while a sequence holds its block and has not written
    to the slot.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._added: dict[int, Added] = {}
        self._launched: dict[int, Launched] = {}
        self.first_tokens: dict[int, float] = {}  # request -> time to its first token
        self._cached: dict[int, int] = {}  # sequence -> tokens of its prompt that were cached
        self.step_seconds: list[float] = []
        # KV slots of the blocks in use, and those of them that are unused, summed over the steps.
        self.slots = self.unused_slots = 0
        self.most_blocks = self.output_tokens = self.evictions = self.states_kept = 0
        # The host's time to schedule and commit steps, to launch them, and to wait for tokens.
        self.schedule_seconds = self.launch_seconds = self.wait_seconds = 0.0
        self._last_commit = 0.0
        run, *rest = events
        assert isinstance(run, Run)
        self.run, self._replay = run, Replay(run)
        for event in rest:
            # A block that a sequence holds is not lost: the cache forgets it only to register it
            # again with more tokens.
            if isinstance(event, Evicted):
                self.evictions += sum(not self._replay.ref_counts[b] for b in event.blocks)
            self._replay.apply(event)
            self._read(event)

    def _read(self, event: Event) -> None:
        if isinstance(event, Added):
            self._added[event.seq] = event
        elif isinstance(event, Started):
            self._cached.setdefault(event.seq, event.cached_tokens)
        elif isinstance(event, Launched):
            self._read_launch(event)
        elif isinstance(event, Committed):
            self._read_commit(event)
        elif isinstance(event, Finished):
            self.output_tokens += event.output_tokens
        elif isinstance(event, Kept):
            self.states_kept += 1

    def _read_launch(self, event: Launched) -> None:
        self._launched[event.step] = event
        self.schedule_seconds += event.schedule_seconds
        self.launch_seconds += event.launch_seconds
        self.most_blocks = max(self.most_blocks, event.blocks_in_use)
        size, tables = self.run.block_size, self._replay.tables
        self.slots += event.blocks_in_use * size
        for seq, length in self._replay.lengths.items():
            self.unused_slots += len(tables[seq]) * size - length

    def _read_commit(self, event: Committed) -> None:
        launched = self._launched.pop(event.step)
        self.wait_seconds += event.wait_seconds
        self.schedule_seconds += event.commit_seconds
        self.step_seconds.append(event.time - max(launched.time, self._last_commit))
        self._last_commit = event.time
        for seq, _, end in launched.prefills:
            added = self._added[seq]
            # The last chunk of a prompt samples the first token of every completion.
            if added.seq == added.request and end >= added.prompt_tokens:
                self.first_tokens.setdefault(seq, event.time - added.time)

    def figures(self) -> dict[str, Any]:
        """Return the figures by name.

        Step times and times to the first token have a median and a p99, or None if there are none.
        """
        requests = [event for event in self._added.values() if event.seq == event.request]
        prompt_tokens = sum(event.prompt_tokens for event in requests)
        cached_tokens = sum(self._cached.get(event.seq, 0) for event in requests)
        return dict(
            seconds=sum(self.step_seconds),
            steps=len(self.step_seconds),
            step_seconds=percentiles(self.step_seconds),
            longest_step=max(self.step_seconds, default=0.0),
            schedule_seconds=self.schedule_seconds,
            launch_seconds=self.launch_seconds,
            wait_seconds=self.wait_seconds,
            requests=len(requests),
            prompt_tokens=prompt_tokens,
            output_tokens=self.output_tokens,
            time_to_first_token=percentiles(self.first_tokens.values()),
            prefix_cache_hit_rate=cached_tokens / max(prompt_tokens, 1),
            evictions=self.evictions,
            blocks_in_use=self.most_blocks,
            unused_slots=self.unused_slots / max(self.slots, 1),
            preemptions=self._replay.num_preemptions,
        )

    def lines(self) -> list[str]:
        """Format the figures as lines for people to read."""
        found, run = self.figures(), self.run
        return [
            f"{found['steps']:,} steps in {found['seconds']:.3f} s: "
            f"{format_times(found['step_seconds'])}, longest {found['longest_step'] * 1e3:.2f} ms",
            f"of the host: scheduler {self.schedule_seconds:.3f} s, launches "
            f"{self.launch_seconds:.3f} s, waiting {self.wait_seconds:.3f} s",
            f"{found['requests']:,} requests, {found['prompt_tokens']:,} tokens in, "
            f"{found['output_tokens']:,} out; "
            f"first token {format_times(found['time_to_first_token'])}",
            f"prefix cache: {found['prefix_cache_hit_rate']:.1%} of the prompts, "
            f"{found['evictions']:,} evictions"
            + (f", {self.states_kept:,} states kept" if self.states_kept else ""),
            f"KV cache: at most {found['blocks_in_use']:,} of {run.num_blocks:,} blocks of "
            f"{run.block_size} tokens, {found['unused_slots']:.1%} of their slots unused; "
            f"{found['preemptions']:,} preemptions",
        ]


def format_times(seconds: dict[str, float] | None) -> str:
    """Format the median and the p99 of some times, or "never" if there are none."""
    if seconds is None:
        return "never"
    return f"median {seconds['median'] * 1e3:.2f} ms, p99 {seconds['p99'] * 1e3:.2f} ms"
