"""The state of all sequences and KV blocks at any time of a trace, worked out from its events.

The page does the same in JavaScript. To draw a trace in your own way, begin here:

    run, *events = read_jsonl("run.jsonl")
    replay = Replay(run)
    for event in events:
        replay.apply(event)
        ...  # look at replay.tables, replay.lengths, replay.known, ...
"""

from nanovllm.features.trace.events import (
    Event,
    Evicted,
    GaveBack,
    Grew,
    Launched,
    Preempted,
    Registered,
    Released,
    Reset,
    Run,
    Started,
)


class Replay:
    """The engine's state after the events that were applied.

    ref_counts[block] is the number of sequences that hold a block. A block that no sequence holds
    is free; if it is also in `known`, the prefix cache can still find its content.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_preemptions = 0
        self.num_evictions = 0  # cached blocks that were taken for other tokens
        self._clear(dict(zip(run.cached_blocks, run.cached_hashes)))

    def _clear(self, known: dict[int, str]) -> None:
        self.ref_counts = [0] * self.run.num_blocks
        self.known = known  # cached block -> the content hash by which it is found
        # Sequence -> its block table, with None in the place of a block that it gave back.
        self.tables: dict[int, list[int | None]] = {}
        self.lengths: dict[int, int] = {}  # sequence -> tokens whose K and V its blocks hold
        self.decoding: set[int] = set()  # sequences that decode in the step launched last

    def apply(self, event: Event) -> None:
        """Apply the next event. Raises ValueError if it cannot have happened in this state."""
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Registered):
            held = all(self.ref_counts[b] for b in event.blocks)
            _check(held, event, "no sequence holds one of the blocks")
            self.known.update(zip(event.blocks, event.hashes))
        elif isinstance(event, Evicted):
            _check(self.known.keys() >= {*event.blocks}, event, "a block was not cached")
            for block in event.blocks:
                del self.known[block]
            self.num_evictions += len(event.blocks)
        elif isinstance(event, Preempted):
            self.num_preemptions += 1
        elif isinstance(event, Released):
            self._give_back(event.seq, len(self.tables[event.seq]))
            del self.tables[event.seq], self.lengths[event.seq]
        elif isinstance(event, GaveBack):
            self._give_back(event.seq, event.blocks)
        elif isinstance(event, Grew):
            for block in event.blocks:
                self._allocate(block, event)
            self.tables[event.seq] += event.blocks
        elif isinstance(event, Launched):
            self._launch(event)
        elif isinstance(event, Reset):
            self._clear({})

    def _start(self, event: Started) -> None:
        _check(event.seq not in self.tables, event, "the sequence runs already")
        for block in event.blocks[event.given_back : event.shared_blocks]:
            used = self.ref_counts[block] > 0 or block in self.known
            _check(used, event, f"block {block} is shared, but nothing was written to it")
            self.ref_counts[block] += 1
        for block in event.blocks[event.shared_blocks :]:
            self._allocate(block, event)
        held = event.blocks[event.given_back :]
        self.tables[event.seq] = [None] * event.given_back + list(held)
        self.lengths[event.seq] = event.cached_tokens

    def _launch(self, event: Launched) -> None:
        for seq, block in event.grown:
            self._allocate(block, event)
            self.tables[seq].append(block)
        for seq, start, end in event.prefills:
            _check(start <= self.lengths[seq], event, "a chunk begins after a gap")
            self.lengths[seq] = end
        self.decoding = self.decoding - set(event.left) | set(event.joined)
        count = len(self.decoding)
        _check(count == event.decode_tokens, event, f"{count} sequences decode a token each")
        for seq in self.decoding:
            self.lengths[seq] += 1
        for seq, length in self.lengths.items():
            room = len(self.tables[seq]) * self.run.block_size
            _check(length <= room, event, f"sequence {seq} has {length} tokens in {room} slots")

    def _give_back(self, seq: int, count: int) -> None:
        """Give back those of a sequence's first `count` blocks that it still holds."""
        table = self.tables[seq]
        for i, block in enumerate(table[:count]):
            if block is not None:
                self.ref_counts[block] -= 1
                table[i] = None

    def _allocate(self, block: int, event: Event) -> None:
        _check(self.ref_counts[block] == 0, event, f"block {block} is taken, but was not free")
        _check(block not in self.known, event, f"block {block} is taken, but was not evicted")
        self.ref_counts[block] = 1


def _check(holds: bool, event: Event, what: str) -> None:
    if not holds:
        raise ValueError(f"{event} cannot have happened: {what}")
