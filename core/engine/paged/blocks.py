"""The cache blocks of one group of attention layers: their holders, and the content of full blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from core.engine.steps.sequence import NULL_SLOT
from core.errors import ModelError

NULL_BLOCK = 0
DROPPED_SLOT = NULL_SLOT + 1
"""Where padding writes its states; nobody reads it."""
FIRST_SLOT = 2
"""The first slot of recurrent states that a sequence may have."""


class BlockPool:
    """Hands out cache blocks by number, to several holders where they hold the same. Block 0 is the null block: padding
    writes there, no sequence gets it.

    A full block may be published under a key that says what it holds. Then it can be found by that key, even without a
    holder, until it is handed out again. Blocks without a key are handed out first, then the least recently used ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that can still be found included."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks; raise `ModelError` if there are fewer. The caller returns them with `give_back`."""
        if count > len(self._free):
            raise ModelError(
                f"{count} more cache blocks",
                found=f"{len(self._free)} of {self.num_blocks} are free",
                remedy="run fewer or shorter sequences at once, or give the cache more memory",
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        for block in [block for block in taken if self._keys[block] is not None]:
            self._unpublish(block)
        return taken

    def hold(self, block: int) -> None:
        """Add a holder to a block that was found."""
        self._holders[block] += 1
        self._free.pop(block, None)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Release these blocks; those released first are handed out first."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """Return how many blocks would have no holder if these were given back, each as often as it is named."""
        return sum(self._holders[block] == count for block, count in Counter(blocks).items())

    def publish(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Publish full blocks by their content; the first block of a key stays the one that is found.

        Null blocks among them (where blocks were given back) are skipped.
        """
        for block, key in zip(blocks, keys, strict=True):
            if block != NULL_BLOCK and self._keys[block] is None and key not in self._blocks:
                self._keys[block], self._blocks[key] = key, block

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the block of each key, or None; the caller owns a block only after `hold`."""
        return list(map(self._blocks.get, keys))

    def is_free(self, block: int) -> bool:
        """Tell whether nobody holds a block."""
        return block in self._free

    def forget(self) -> None:
        """Forget all keys: the content was computed with weights that have been replaced."""
        self._blocks.clear()
        self._keys = [None] * self.num_blocks

    def _unpublish(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._blocks[key]
