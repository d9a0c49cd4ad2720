"""The peers of one run: each given the model to read, in turns with the other subjects or before the model is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from core.bench.cells import Cell, Record
from core.bench.peers import folder as folders
from core.bench.peers.choosing import Choice
from core.bench.peers.subject import ChosenPeer, PeerModel, PeerSubject
from core.bench.rounds import Subject, measure
from core.compilation.options import Progress
from core.engine.models.hf import import_transformers
from core.errors import UsageError

if TYPE_CHECKING:
    from core.device import Device
    from core.engine.models.loading import LoadedModel

Measured = Mapping[str, Sequence[Record]]
"""By the name of a cell: records of peers that ran apart, before the model was made."""


_GIVEN_BACK_S, _SETTLED_S, _POLL_S = 30.0, 1.5, 0.1
"""How long to wait for memory at most, for how long it may stay as it is, and between two looks."""


def wait_for_memory(device: Device) -> None:
    """Wait until the memory taken from the device falls no more: a driver gives that of an ended process back late."""
    deadline = time.monotonic() + _GIVEN_BACK_S
    least, since = device.parts.memory().taken_bytes, time.monotonic()
    while (now := time.monotonic()) < min(deadline, since + _SETTLED_S):
        taken = device.parts.memory().taken_bytes
        if taken < least:
            least, since = taken, now
        time.sleep(_POLL_S)


class Peers:
    """What a run's peers read and the processes that last; leaving the context ends and removes both."""

    def __init__(self, choice: Choice, cells: Sequence[Cell], scheme: str) -> None:
        """scheme: by which `core` quantises the model; "" for none."""
        self.choice = choice
        self._cells = tuple(cells)
        self._scheme = scheme
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, whole: LoadedModel, *, random: bool) -> dict[str, Callable[[], Subject]]:
        """Return what makes each peer's subject for a cell. whole: the model before it is quantised.

        random: its weights mean nothing, so that a peer may draw its own.
        """
        if self.choice.peers and (why := folders.unreadable(whole.model)):
            self.choice = self.choice.without_peers(why)
        drawing = [each for each in self.choice.peers if random and each.peer.draws_weights]
        reading = [each for each in self.choice.peers if each not in drawing]
        found: dict[str, Callable[[], Subject]] = {}
        if reading:
            folder = self._stack.enter_context(folders.model_folder(whole.model))
            model = PeerModel(folder=folder, dtype=whole.dtype, vocab_size=whole.vocab_size, scheme=self._scheme)
            found |= {each.peer.name: self._maker(each, model) for each in reading}
        if drawing:
            model = self._drawn(whole.config, whole.dtype, whole.vocab_size)
            found |= {each.peer.name: self._maker(each, model) for each in drawing}
        return found

    def apart(self, config: Any, dtype: torch.dtype, device: Device, progress: Progress) -> dict[str, list[Record]]:
        """Measure every cell with one peer after another, while the device holds nothing else; return the records.

        config: of a model whose weights are random. Raises `UsageError` for a peer that draws no weights.
        """
        wanting = [each.peer.name for each in self.choice.peers if not each.peer.draws_weights]
        if wanting:
            raise UsageError(
                f"--apart with {', '.join(wanting)}",
                found="these read the weights that core has, so the model has to be made first",
                remedy="leave --apart out, or name other --subjects",
            )
        model = self._drawn(config, dtype, config.get_text_config().vocab_size)
        found: dict[str, list[Record]] = {cell.name: [] for cell in self._cells}
        for at, chosen in enumerate(self.choice.peers):
            subject = PeerSubject(chosen, model, self._cells)
            try:
                for index, cell in enumerate(self._cells):
                    progress(f"{subject.name} {cell.name}", index + at * len(self._cells), len(found))
                    found[cell.name] += measure([subject], cell, device)[0]
            finally:
                subject.free()
                wait_for_memory(device)
        for record in (each for records in found.values() for each in records):
            record.interleaved = False
            record.notes.append("not interleaved: measured before the model of the other subjects was made")
        names = {each.peer.name for each in self.choice.peers}
        self.choice = replace(self.choice, subjects=tuple(n for n in self.choice.subjects if n not in names), peers=())
        return found

    def _maker(self, chosen: ChosenPeer, model: PeerModel) -> Callable[[], Subject]:
        if not chosen.peer.lasting:
            return partial(PeerSubject, chosen, model)
        subject = PeerSubject(chosen, model, self._cells)
        self._stack.callback(subject.free)
        return lambda: subject

    def _drawn(self, config: Any, dtype: torch.dtype, vocab_size: int) -> PeerModel:
        known = import_transformers().AutoModelForCausalLM._model_mapping
        named = str(dtype).removeprefix("torch.")
        folder = self._stack.enter_context(folders.config_folder(config, known[type(config)].__name__, named))
        return PeerModel(folder=folder, dtype=dtype, vocab_size=vocab_size, scheme=self._scheme, drawn=True)
