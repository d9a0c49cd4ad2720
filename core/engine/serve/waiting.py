"""Sequences that wait for cache: the most urgent one joins first, and none waits for ever."""

from __future__ import annotations

from bisect import insort

from core.engine.steps.sequence import Sequence

MAX_PASSED = 8
"""How often in a row a sequence may join ahead of the one that has waited longest."""


class WaitingSequences:
    """Sequences in the order in which they join: by priority, smaller first, and among equals by arrival.

    Among `MAX_PASSED` + 1 consecutive joins, at least one is of the sequence that has waited longest: so a sequence
    with k before it joins after at most (k + 1) * (`MAX_PASSED` + 1) others, whatever their priorities.
    """

    def __init__(self) -> None:
        # By priority; each in the order of arrival, which their indexes tell.
        self._queues: dict[int, list[Sequence]] = {}
        self._num_passed = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queues.get(sequence.params.priority, ())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority and arrival; one that has been here before has its old place."""
        insort(self._queues.setdefault(sequence.params.priority, []), sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; of one that is not here, do nothing."""
        queue = self._queues.get(sequence.params.priority, [])
        if sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._queues[sequence.params.priority]

    def first(self) -> Sequence | None:
        """Return the sequence that is to join next; None where nobody waits."""
        if not self._queues:
            return None
        return self._oldest() if self._num_passed >= MAX_PASSED else self._queues[min(self._queues)][0]

    def joined(self, sequence: Sequence) -> None:
        """Take out the sequence that `first` gave."""
        self._num_passed = 0 if sequence is self._oldest() else self._num_passed + 1
        self.remove(sequence)

    def _oldest(self) -> Sequence:
        return min([queue[0] for queue in self._queues.values()], key=_arrival)


def _arrival(sequence: Sequence) -> int:
    return sequence.index
