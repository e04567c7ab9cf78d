"""Snapshots of the state of recurrent layers: the prefix cache of models that have such layers.

K and V of a prefix can be shared from any token on. The state of recurrent layers is known only
after the tokens where a copy of it was kept. Such a copy is a snapshot. It belongs to a prefix: a
known block of the block manager, and the tokens that follow the block, fewer than a block holds. A
prompt can begin after a prefix that has both its K and V and a snapshot.

A recurrent layer keeps a tensor with a row for each state. This module says which row is copied to
which, before which step. It knows nothing of layers and tensors; engine/recurrent_state.py does.
"""

from array import array
from collections import Counter, OrderedDict
from typing import NamedTuple

from nanovllm.engine.block_manager import TOKEN, TOKEN_BYTES, Key, Prefix, make_key


class StateRows(NamedTuple):
    """The rows of a recurrent layer's state: slots, padding, zeros, and then snapshots.

    The state of a running sequence lies in the row of its batch slot. Rows of padding in a step
    write the padding row. No step writes the row of zeros, the state before the first token.
    """

    num_slots: int
    num_snapshots: int

    @property
    def padding(self) -> int:
        return self.num_slots

    @property
    def zeros(self) -> int:
        return self.num_slots + 1

    @property
    def snapshots(self) -> range:
        return range(self.num_slots + 2, self.num_slots + 2 + self.num_snapshots)

    @property
    def total(self) -> int:
        return self.snapshots.stop


class Snapshots:
    """The pool of snapshots. If it is full, the least recently used snapshot makes room.

    A snapshot that waiting prompts need stays, as long as there is another one to evict. The first
    prompt that begins with a snapshot does not count as a use: it is often the next turn of a
    conversation, which leaves a snapshot of its own and does not come back.

    num_saved, num_used, num_evicted: Counts of snapshots saved, of sequences that began with one,
        and of snapshots that made room for others.
    """

    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.num_saved = self.num_used = self.num_evicted = 0
        self._free = list(reversed(rows.snapshots))
        self._rows: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._needed: dict[Key, set[int]] = {}  # the ids of the waiting sequences that need it
        self._begun: set[Key] = set()  # snapshots that a prompt has begun with
        # The lengths of the tails, in tokens, that snapshots after a prefix id have.
        self._lengths: dict[int, Counter[int]] = {}
        self._new: set[Key] = set()  # saved after the step that is planned now
        # Copies (source, destination) of rows, in the order in which they must take effect: those
        # before the step that is planned now, and those after it.
        self._copies: list[tuple[int, int]] = []
        self._copies_after: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def summary(self) -> dict[str, int]:
        """Return the figures as `LLM.metrics` describes them."""
        return {
            "kept": len(self._rows),
            "room": self.rows.num_snapshots,
            "saved": self.num_saved,
            "used": self.num_used,
            "evicted": self.num_evicted,
        }

    def begin_step(self) -> None:
        """Let sequences use the snapshots that were saved after earlier steps."""
        self._new.clear()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies that the planned step makes before it computes anything."""
        copies = tuple(self._copies)
        self._copies, self._copies_after = self._copies_after, []
        return copies

    def find(self, prefix: Prefix, token_ids: list[int]) -> Key | None:
        """Find the snapshot after `prefix` and the most leading tokens of `token_ids`."""
        lengths = self._lengths.get(prefix.id)
        if lengths:
            tail = array(TOKEN, token_ids).tobytes()
            for length in sorted(lengths, reverse=True):
                key = prefix.id, tail[: length * TOKEN_BYTES]
                if length <= len(token_ids) and key in self._rows:
                    return key
        return None

    def is_new(self, key: Key) -> bool:
        """Tell whether a snapshot is saved after the planned step, so that none may use it yet."""
        return key in self._new

    def restore(self, key: Key | None, slot: int) -> None:
        """Start a sequence in a batch slot with a snapshot. None: with the state of no tokens."""
        row = self.rows.zeros
        if key is not None:
            assert key not in self._new, "a snapshot is used after the step that computes it"
            self.num_used += 1
            if key in self._begun:
                self._rows.move_to_end(key)
            self._begun.add(key)
            row = self._rows[key]
        self._copies.append((row, slot))

    def need(self, key: Key, seq_id: int) -> None:
        """Keep a snapshot, if possible, until a waiting sequence does not need it any more."""
        self._needed.setdefault(key, set()).add(seq_id)

    def need_no_more(self, key: Key, seq_id: int) -> None:
        """Note that a sequence does not need a snapshot any more, whether it is kept or not."""
        seq_ids = self._needed.get(key, set())
        seq_ids.discard(seq_id)
        if not seq_ids:
            self._needed.pop(key, None)

    def save(
        self, slot: int, prefix: Prefix, tail: list[int], *, after_step: bool, is_needed: bool
    ) -> Key | None:
        """Keep the state of a batch slot as the snapshot after `prefix` and the tokens `tail`.

        Args:
            after_step: the slot holds this state after the step that is planned now. False: it
                holds the state before that step.
            is_needed: whether waiting sequences need the snapshot.
        Returns the key of the snapshot; None if there is no room for it.
        """
        key = make_key(prefix, tail)
        if key in self._rows:
            self._rows.move_to_end(key)
            return key
        if not self._free and not self._evict(is_needed):
            return None
        row = self._free.pop()
        self._rows[key] = row
        self._lengths.setdefault(prefix.id, Counter())[len(tail)] += 1
        self.num_saved += 1
        if after_step:
            self._new.add(key)
            self._copies_after.append((slot, row))
        else:
            self._copies.append((slot, row))
        return key

    def is_kept(self, key: Key) -> bool:
        """Tell whether there is a snapshot of this key."""
        return key in self._rows

    def tails(self, prefix_id: int, tokens: bytes) -> list[bytes]:
        """List the tails of snapshots after a prefix id that are leading tokens of `tokens`."""
        sizes = [length * TOKEN_BYTES for length in self._lengths.get(prefix_id, ())]
        tails = [tokens[:size] for size in sizes if size <= len(tokens)]
        return [tail for tail in tails if (prefix_id, tail) in self._rows]

    def drop_prefix(self, prefix_id: int) -> None:
        """Drop all snapshots after a prefix id, which no prompt can match any more."""
        if prefix_id in self._lengths:
            for key in [key for key in self._rows if key[0] == prefix_id]:
                self.drop(key)

    def _evict(self, is_needed: bool) -> bool:
        """Evict a snapshot; one that waiting prompts need only if the new one is needed, too.

        Returns whether one was evicted.
        """
        unneeded = (key for key in self._rows if key not in self._needed)
        key = next(unneeded, next(iter(self._rows), None) if is_needed else None)
        if key is None:
            return False
        self.drop(key)
        self.num_evicted += 1
        return True

    def drop(self, key: Key) -> None:
        """Drop a snapshot."""
        row = self._rows.pop(key)
        self._free.append(row)
        # The row's next snapshot may be copied before the step, so nothing may be copied after it.
        # A copy before the step does no harm: it takes effect before that of the next snapshot.
        self._copies_after = [copy for copy in self._copies_after if copy[1] != row]
        self._new.discard(key)
        self._begun.discard(key)
        self._needed.pop(key, None)
        length, lengths = len(key[1]) // TOKEN_BYTES, self._lengths[key[0]]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[key[0]]
