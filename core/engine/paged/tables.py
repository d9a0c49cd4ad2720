"""The blocks of each sequence: taken as it grows, shared with sequences of the same beginning, given back when unused.
Where layers keep recurrent states, a sequence has one slot for them from the start.

Attention layers that look back equally far form a group, which has a pool and a table of each sequence of its own. A
group with a window gives back the blocks that lie before it; their places in the table hold the null block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, islice

from core.engine.inspect.masks import Reach
from core.engine.paged.blocks import FIRST_SLOT, NULL_BLOCK, BlockPool
from core.engine.steps.sequence import NULL_SLOT
from core.engine.steps.sequence import Sequence as EngineSequence

_SPARE = 0.01
"""Share of a pool that stays free when a sequence joins others that may need more than there is."""


def _key(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()


class BlockTables:
    """The `SequenceCache` of the paged route.

    A sequence has blocks of groups without a window for all its tokens from the start, and of the others as it is
    computed: there, those that lie before the window come back meanwhile.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        reaches: Sequence[Reach],
        *,
        block_size: int,
        share_prefixes: bool = True,
        looks_ahead: bool = False,
        num_slots: int | None = None,
    ) -> None:
        """pools, reaches: one for each group; reach: how far back its layers see.

        looks_ahead: whether what is kept for a token depends on the next one too, as a head's keys and values do.
        num_slots: of recurrent states; None where no layer keeps any. No sequence can take over the state of another,
        so they can't share a beginning.
        """
        assert num_slots is None or not share_prefixes
        self.keeps_states = num_slots is not None
        self._slots = list(reversed(range(FIRST_SLOT, FIRST_SLOT + (num_slots or 0))))
        self.pools = tuple(pools)
        self._reaches = tuple(reaches)
        self._block_size = block_size
        self._shares = share_prefixes
        self._ahead = int(looks_ahead)
        self._trims = any(reach.window for reach in reaches)
        # Blocks that each sequence may come to have, by its index.
        self._finals: dict[int, int] = {}

    def join(self, sequence: EngineSequence) -> bool:
        """Take blocks for all that a sequence has, but those that hold its beginning already; False without room.

        A group with a window takes no more than the sequence needs at its end. Sets `num_computed` and `num_reused` to
        what the cache holds; at least one token is left to be computed.
        """
        count = -(-len(sequence) // self._block_size)
        shared = self._prefix(sequence) if self._shares else [[] for _ in self.pools]
        reused = len(shared[0])
        final = -(-(len(sequence.prompt) + sequence.params.max_new_tokens) // self._block_size)
        promised = final + sum(self._finals.values())
        for pool, (window, _), found in zip(self.pools, self._reaches, shared, strict=True):
            revived = sum(block != NULL_BLOCK and pool.is_free(block) for block in found)
            tight = not window and promised >= pool.num_blocks and pool.num_free < pool.num_blocks - 1
            spare = int(_SPARE * pool.num_blocks) if tight else 0
            more = min(count - reused, window // self._block_size + 2) if window else count - reused
            if more + revived + spare > pool.num_free:
                return False
        if self.keeps_states:
            if not self._slots:
                return False
            sequence.slot = self._slots.pop()
        for pool, found in zip(self.pools, shared, strict=True):
            for block in found:
                if block != NULL_BLOCK:
                    pool.hold(block)
        self._finals[sequence.index] = final
        sequence.tables = shared
        sequence.num_computed = sequence.num_settled = sequence.num_reused = reused * self._block_size
        sequence.num_published = reused
        sequence.table_changed()
        for pool, (window, _), table in zip(self.pools, self._reaches, sequence.tables, strict=True):
            if not window:
                table += pool.take(count - reused)
        return True

    def grow(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """See that a sequence has blocks for its first num_tokens tokens; False, and nothing done, without room."""
        count = -(-num_tokens // self._block_size)
        more = [count - len(table) for table in sequence.tables]
        if max(more) <= 0:
            return True
        if any(pool.num_free < each for pool, each in zip(self.pools, more, strict=True)):
            return False
        for pool, table, each in zip(self.pools, sequence.tables, more, strict=True):
            table += pool.take(max(each, 0))
        sequence.table_changed()
        return True

    def fits(self, wanted: Sequence[tuple[EngineSequence, int]], *, without: Sequence[EngineSequence] = ()) -> bool:
        """Tell whether there are blocks for so many first tokens of each of these sequences at once.

        without: sequences that would give all of theirs back for it.
        """
        for number, pool in enumerate(self.pools):
            more = sum(max(0, -(-count // self._block_size) - len(each.tables[number])) for each, count in wanted)
            if more > pool.num_free:
                given = (block for each in without for block in each.tables[number] if block != NULL_BLOCK)
                if more > pool.num_free + pool.num_freed_by(given):
                    return False
        return True

    def trim(self, sequence: EngineSequence) -> None:
        """Give back blocks beyond the tokens that a sequence has."""
        count = -(-len(sequence) // self._block_size)
        for pool, table in zip(self.pools, sequence.tables, strict=False):
            if len(table) > count:
                spare = table[count:]
                del table[count:]
                sequence.table_changed()
                pool.give_back(reversed(spare))

    def settle(self, sequence: EngineSequence) -> None:
        """Note that `num_settled` tokens are in the cache: publish full blocks, give back blocks before the windows."""
        if not sequence.tables:
            return
        if self._shares:
            self._publish(sequence)
        if self._trims:
            self._trim(sequence)

    def release(self, sequence: EngineSequence) -> None:
        """Give back all that a sequence holds; of nothing, do nothing."""
        # Clear what the sequence holds first, so that an interrupt in between can't hand it out twice.
        slot, sequence.slot = sequence.slot, NULL_SLOT
        if slot != NULL_SLOT:
            self._slots.append(slot)
        self._finals.pop(sequence.index, None)
        tables, sequence.tables = sequence.tables, []
        sequence.table_changed()
        for pool, table in zip(self.pools, tables, strict=False):
            # From the end: others are most likely to share the beginnings of texts.
            pool.give_back(block for block in reversed(table) if block != NULL_BLOCK)

    def forget(self) -> None:
        """Share nothing of what was computed so far."""
        for pool in self.pools:
            pool.forget()

    def _prefix(self, sequence: EngineSequence) -> list[list[int]]:
        """Return, for each group, the blocks that hold the longest beginning of a sequence that all groups have."""
        size = self._block_size
        keys = self._keys(sequence, (len(sequence) - 1) // size)
        found = [pool.find(keys) for pool in self.pools]
        whole = [each for each, (window, _) in zip(found, self._reaches, strict=True) if not window]
        most = min((each.index(None) for each in whole if None in each), default=len(keys))
        for count in range(most, 0, -1):
            if any(each[count - 1] is None for each in found):
                continue
            firsts = [reach.first_seen(count * size) // size for reach in self._reaches]
            if all(None not in each[first:count] for each, first in zip(found, firsts, strict=True)):
                return [
                    [NULL_BLOCK] * first + [block for block in each[first:count] if block is not None]
                    for each, first in zip(found, firsts, strict=True)
                ]
        return [[] for _ in self.pools]

    def _keys(self, sequence: EngineSequence, count: int) -> list[bytes]:
        """Return the keys of a sequence's first `count` blocks: each of what the block holds and all before it.

        Cryptographic, since two texts with one key would be given each other's keys and values. Where layers look
        ahead, the first token behind a block belongs to what it holds.
        """
        keys, size = sequence.block_keys, self._block_size
        if len(keys) < count:
            before, first = keys[-1] if keys else sequence.cache_salt, len(keys) * size
            if self._ahead and not keys:
                before = _key(before, array("q", sequence.tokens(0, 1)).tobytes())
            tokens = array("q", sequence.tokens(first + self._ahead, count * size - first)).tobytes()
            step = len(tokens) // (count - len(keys))
            blocks = (tokens[at : at + step] for at in range(0, len(tokens), step))
            keys += islice(accumulate(blocks, _key, initial=before), 1, None)
        return keys[:count]

    def _publish(self, sequence: EngineSequence) -> None:
        full = sequence.num_settled // self._block_size
        if full <= sequence.num_published:
            return
        keys = self._keys(sequence, full)
        new = slice(sequence.num_published, full)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.publish(table[new], keys[new])
        sequence.num_published = full

    def _trim(self, sequence: EngineSequence) -> None:
        for pool, reach, table in zip(self.pools, self._reaches, sequence.tables, strict=True):
            first = reach.first_seen(sequence.num_settled) // self._block_size  # what later tokens attend to
            last = first
            while last and table[last - 1] != NULL_BLOCK:
                last -= 1
            if last < first:
                pool.give_back(table[last:first])
                table[last:first] = [NULL_BLOCK] * (first - last)
                sequence.table_changed()
