"""The block manager: which sequence holds which blocks, and which blocks can be found again.

A block is a number here. paged_cache.py has the memory of the blocks.
"""

from collections import OrderedDict


class BlockManager:
    """The owner of `num_blocks` blocks, each for the keys and values of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks  # how many sequences hold each block
        # Blocks that nobody holds, in the order in which they will be taken.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # What blocks hold (chapter 6): key -> block, and block -> key. A key is a pair: the hash
        # of the tokens before the block, and the block's own tokens.
        self.block_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with a reference count of 1. So many are free."""
        # <piece 3>
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        # </piece>
        # <piece 6: forget what these blocks held>
        for block in blocks:
            if block in self.key_of:
                del self.block_of[self.key_of.pop(block)]
        # <until then>
        # </piece>
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each block of a block table. A block at 0 is free again."""
        # <piece 3>
        for block in reversed(blocks):  # the first blocks of a prompt are taken last
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
        # </piece>

    def match(self, token_ids: list[int]) -> list[int]:
        """Find the blocks that hold the longest prefix of `token_ids`, in whole blocks."""
        # <piece 6: look the blocks up, one after the other>
        matched: list[int] = []
        for key in self.keys(token_ids):
            if key not in self.block_of:
                break
            matched.append(self.block_of[key])
        return matched
        # <until then>
        # return []
        # </piece>

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each of the blocks, which `match` found: some may be free."""
        # <piece 6: count the references, and take free blocks from the list>
        for block in blocks:
            self.free.pop(block, None)
            self.ref_counts[block] += 1
        # <until then>
        # </piece>

    def register(self, token_ids: list[int], block_table: list[int]) -> None:
        """Make the full blocks of computed tokens known, so that `match` finds them."""
        # <piece 6: remember each block by its key, unless another block has that key>
        for key, block in zip(self.keys(token_ids), block_table):
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key] = block
                self.key_of[block] = key
        # <until then>
        # </piece>

    def keys(self, token_ids: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Make the key of each full block of `token_ids`."""
        # <piece 6: chain the hashes>
        before, keys = 0, []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            keys.append((before, tuple(token_ids[end - self.block_size : end])))
            before = hash(keys[-1])
        return keys
        # <until then>
        # return []
        # </piece>
