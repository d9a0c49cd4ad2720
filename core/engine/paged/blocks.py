"""The blocks of one group of attention layers: who holds them, and what the full ones among them contain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from core.errors import ModelError

NULL_BLOCK = 0


class BlockPool:
    """Hands out cache blocks by number, to several holders where they hold the same. Block 0 is the null block: padding
    writes there, no sequence gets it.

    A full block may be published under a key that says what it holds. Then it can be found by that key, also when
    nobody holds it any more, until it is handed out anew: blocks without a key first, then the one longest unused.
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
        """Become one more holder of a block that was found."""
        self._holders[block] += 1
        self._free.pop(block, None)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Hold these blocks no longer; what their last holder gave back first is handed out first."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Let full blocks be found by what they hold; the first block of a key stays the one that is found.

        The null block among them, where others had been, is passed over.
        """
        for block, key in zip(blocks, keys, strict=True):
            if block != NULL_BLOCK and self._keys[block] is None and key not in self._blocks:
                self._keys[block], self._blocks[key] = key, block

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the block that holds what each key says, or None; it is the caller's after `hold` alone."""
        return list(map(self._blocks.get, keys))

    def is_free(self, block: int) -> bool:
        """Tell whether nobody holds a block."""
        return block in self._free

    def forget(self) -> None:
        """Find no block any more: what they hold was computed by weights that are no longer the model's."""
        self._blocks.clear()
        self._keys = [None] * self.num_blocks

    def _unpublish(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._blocks[key]
