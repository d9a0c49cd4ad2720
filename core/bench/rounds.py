"""Measures subjects in rounds: in each, every subject runs its steps once, and another one begins."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from core.bench.cells import Cell, Record
from core.errors import ModelError, is_out_of_memory

if TYPE_CHECKING:
    from core.device import Device

Clock = Callable[[], float]


class Subject(Protocol):
    """A way to run the model, measured in turns with others: `open` makes it warm for a cell, `close` ends the cell."""

    name: str

    def open(self, cell: Cell, record: Record) -> None:
        """Become ready for the first measured step; raise if that is impossible."""

    def ready(self) -> None:
        """Prepare a round, outside of the measured time."""

    def run(self, count: int) -> float | None:
        """Run `count` steps; the host knows the tokens of each before the next one begins.

        Returns the seconds where the subject measures them itself, as one in another process does.
        """

    def replay(self, count: int) -> bool:
        """Repeat the last step's captured graph, device time alone, waiting once at the end; False: there is none."""

    def finish(self, record: Record) -> None:
        """Add facts to the record that are known only after the rounds."""

    def close(self) -> None:
        """Free the memory of the cell; a second call does nothing."""

    def free(self) -> None:
        """Free also memory that is kept for the next cell."""


def measure(
    subjects: Sequence[Subject], cell: Cell, device: Device, *, clock: Clock = time.perf_counter
) -> tuple[list[Record], list[tuple[str, ...]]]:
    """Measure a cell; return a record of each subject, in their order, and the order of each round.

    All subjects are open at once, so that a drift of clocks, temperature or other processes meets them all. A subject
    that finds too little memory beside the others runs alone afterwards, and its record says so. A subject that fails
    keeps its reason, and the others go on.
    """
    records = {subject.name: Record(subject=subject.name) for subject in subjects}
    order: list[tuple[str, ...]] = []
    crowded: list[Subject] = []
    with _closing(subjects, device):
        opened = []
        for subject in subjects:
            error = _attempt(subject, partial(subject.open, cell, records[subject.name]), device)
            if error is None:
                opened.append(subject)
            elif lacks_memory(error[0]) and len(subjects) > 1:
                records[subject.name] = Record(subject=subject.name)
                crowded.append(subject)
            else:
                records[subject.name].failure = error[1]
        order += _rounds(opened, cell, records, device, clock)
    if crowded:
        for subject in subjects:
            subject.free()
    for subject in crowded:
        record = records[subject.name]
        record.interleaved = False
        record.notes.append("not interleaved: there was too little memory beside the other subjects")
        with _closing([subject], device):
            error = _attempt(subject, partial(subject.open, cell, records[subject.name]), device)
            if error is None:
                order += _rounds([subject], cell, records, device, clock)
            else:
                record.failure = error[1]
    return list(records.values()), order


def rotated(subjects: Sequence[Subject], index: int) -> list[Subject]:
    """Return the subjects in the order of a round: each begins in turn."""
    start = index % len(subjects) if subjects else 0
    return [*subjects[start:], *subjects[:start]]


def _rounds(
    opened: Sequence[Subject], cell: Cell, records: dict[str, Record], device: Device, clock: Clock
) -> Iterator[tuple[str, ...]]:
    alive = list(opened)
    for index in range(cell.rounds):
        ran = []
        for subject in [each for each in rotated(opened, index) if each in alive]:
            record = records[subject.name]
            error = _attempt(subject, partial(_round, subject, cell, record, device, clock), device)
            ran.append(subject.name)
            if error is not None:
                record.failure = error[1]
                alive.remove(subject)
        yield tuple(ran)
    for subject in alive:
        error = _attempt(subject, partial(subject.finish, records[subject.name]), device)
        if error is not None:
            records[subject.name].failure = error[1]


def _round(subject: Subject, cell: Cell, record: Record, device: Device, clock: Clock) -> None:
    subject.ready()
    device.synchronize()
    start = clock()
    own = subject.run(cell.steps)
    # An engine that runs ahead began one step before the clock started and has one queued now. Wait for it, so that the
    # counts agree.
    device.synchronize()
    elapsed = clock() - start if own is None else own
    record.rounds_ms.append(elapsed / cell.steps * 1e3)
    start = clock()
    if subject.replay(cell.steps):
        device.synchronize()
        record.replay_ms.append((clock() - start) / cell.steps * 1e3)


@contextmanager
def _closing(subjects: Sequence[Subject], device: Device) -> Iterator[None]:
    try:
        yield
    finally:
        for subject in subjects:
            subject.close()
        # Free the programs (and their graphs' memory) that torch.compile keeps although nobody can call them.
        torch.compiler.reset()
        gc.collect()
        device.parts.empty_cache()


def _attempt(subject: Subject, run: Callable[[], None], device: Device) -> tuple[BaseException, str] | None:
    """Run; where that fails close the subject and return the error, emptied of the frames that hold its tensors."""
    try:
        run()
    except Exception as error:
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text[:400]}"
        kept: BaseException | None = error
        while kept is not None:
            kept.__traceback__ = None
            kept = kept.__cause__ or kept.__context__
        subject.close()
        gc.collect()
        device.parts.empty_cache()
        return error, reason
    return None


def lacks_memory(error: BaseException | None) -> bool:
    """Tell whether memory was short, also where an engine says so before it allocates."""
    if is_out_of_memory(error):
        return True
    while error is not None:
        if isinstance(error, ModelError) and "key/value cache" in error.asked:
            return True
        error = error.__cause__ or error.__context__
    return False
