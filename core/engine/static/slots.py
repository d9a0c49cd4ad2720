"""Which sequence has which row of the static cache."""

from __future__ import annotations

from collections.abc import Sequence as List

from core.engine.steps.sequence import NULL_SLOT, Sequence


class Slots:
    """The `SequenceCache` of routes where a sequence has one row, with room for the whole context, or no cache at all.

    `Sequence.slot` is the row's number counted from 1.
    """

    def __init__(self, num_rows: int, *, keeps_states: bool) -> None:
        self._holders: list[Sequence | None] = [None] * num_rows
        self.keeps_states = keeps_states

    @property
    def num_used(self) -> int:
        """Rows up to the last one that a sequence has."""
        return max((row + 1 for row, _ in self.holders), default=0)

    @property
    def holders(self) -> list[tuple[int, Sequence]]:
        """The rows that sequences have, with these."""
        # An interrupt may leave a row with a sequence that has none any more, or another one.
        return [(row, each) for row, each in enumerate(self._holders) if each is not None and each.slot == row + 1]

    def join(self, sequence: Sequence) -> bool:
        """Give a sequence the first free row; False if there is none."""
        if sequence.slot == NULL_SLOT:
            if (row := self._first_free()) is None:
                return False
            self._take(sequence, row)
        sequence.num_computed = sequence.num_settled = sequence.num_reused = 0
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Tell whether the sequence has a row, which has room for the whole context."""
        return sequence.slot != NULL_SLOT

    def fits(self, wanted: List[tuple[Sequence, int]], *, without: List[Sequence] = ()) -> bool:
        """Return True: each row has room for the whole context."""
        return True

    def trim(self, sequence: Sequence) -> None:
        """Do nothing: nobody else could use it."""

    def settle(self, sequence: Sequence) -> None:
        """Do nothing: no other sequence can use what this one has computed."""

    def forget(self) -> None:
        """Do nothing: each sequence computes all of its row."""

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's row back, if it has one."""
        slot, sequence.slot = sequence.slot, NULL_SLOT
        if slot != NULL_SLOT:
            self._holders[slot - 1] = None

    def gap(self) -> tuple[int, int] | None:
        """Return the last row that is taken and a free one before it; None where no row is free before it."""
        last, free = self.num_used - 1, self._first_free()
        return (last, free) if free is not None and free < last else None

    def moved(self, row: int, to: int) -> None:
        """Note that what the sequence of a row has is now in another one."""
        sequence = self._holders[row]
        assert sequence is not None
        self._take(sequence, to)
        self._holders[row] = None

    def _first_free(self) -> int | None:
        taken = {row for row, _ in self.holders}
        return next((row for row in range(len(self._holders)) if row not in taken), None)

    def _take(self, sequence: Sequence, row: int) -> None:
        self._holders[row] = sequence
        sequence.slot = row + 1
