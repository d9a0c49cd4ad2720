"""A peer as a subject of the bench: a process for each cell, or for a phase, asked in turns with the other subjects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.bench.cells import Cell, Record
from core.common.peers import Peer
from core.errors import ModelError
from core.host.workers.worker import PersistentWorker

WORKER = "core.bench.peers.worker"
_OPEN_S = 3600.0  # compiling a large model ahead of time takes long
_RUN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPeer:
    """A peer whose environment has what it requires."""

    peer: Peer
    #: The Python that runs it; "" for this one.
    python: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerModel:
    """The model that a peer runs."""

    #: As transformers saves it in `dtype`, before it was quantised by `scheme`.
    folder: Path
    dtype: torch.dtype
    vocab_size: int
    #: By which `core` quantises it; "" for none.
    scheme: str = ""
    #: Whether the folder holds the configuration alone, so that the peer draws weights itself.
    drawn: bool = False


class PeerSubject:
    """The subject of one peer. Its process measures its own steps, so the way there and back does not count."""

    def __init__(self, chosen: ChosenPeer, model: PeerModel, cells: Sequence[Cell] = ()) -> None:
        """cells: of the whole bench, for which the process of a peer that lasts prepares."""
        self.name = chosen.peer.name
        self._chosen = chosen
        self._model = model
        self._cells = tuple(cells)
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._weights = chosen.peer.formats.get(model.scheme.partition("-g")[0], "")
        self._worker: PersistentWorker | None = None
        self._phase = ""
        self._is_open = False

    def open(self, cell: Cell, record: Record) -> None:
        """Have a process that loads, compiles, and takes the first step: a new one, unless the last one lasts."""
        peer = self._chosen.peer
        if peer.dtypes and self._dtype not in peer.dtypes:
            raise ModelError(
                f"{self.name} in {self._dtype}",
                found=f"it computes in {', '.join(peer.dtypes)}",
                remedy=f"choose another --dtype, or leave {self.name} out of --subjects",
            )
        self._record = record
        if cell.phase != self._phase:
            self.free()
        if self._worker is None:
            self._worker, self._phase = PersistentWorker(WORKER, python=self._chosen.python), cell.phase
        found = self._ask(_OPEN_S, op="open", runner=peer.runner, requires=peer.requires, work=self._work(cell))
        self._is_open = True
        record.tokens = found["tokens"]
        record.start_s = float(found["start_s"])
        record.notes += found["notes"]
        record.weights_drawn = self._model.drawn
        if self._model.scheme:
            record.notes.append(f"weights as {self._weights}" if self._weights else "weights as before quantisation")
        record.details["versions"] = found["versions"]

    def ready(self) -> None:
        """Do nothing: the process prepares a round itself."""

    def run(self, count: int) -> float:
        """Run `count` steps there; return the seconds that they took there."""
        found = self._ask(_RUN_S, op="run", count=count)
        for row, new in zip(self._record.tokens, found["tokens"], strict=True):
            row += new
        return float(found["seconds"])

    def replay(self, count: int) -> bool:
        """Return False: what it captures is its own."""
        return False

    def finish(self, record: Record) -> None:
        """Do nothing: all is known when it is open."""

    def close(self) -> None:
        """End the cell, and with it the process and its memory unless it lasts."""
        if not self._chosen.peer.lasting:
            self.free()
        elif self._is_open:
            self._is_open = False
            self._ask(_RUN_S, op="end")

    def free(self) -> None:
        """End the process, and its memory with it."""
        self._is_open = False
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _work(self, cell: Cell) -> dict[str, object]:
        lasts = self._chosen.peer.lasting
        alike = [each for each in self._cells if each.phase == cell.phase] if lasts else []
        return {
            "folder": str(self._model.folder),
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "phase": cell.phase,
            "prompts": cell.prompts(self._model.vocab_size),
            "limit": cell.limit,
            "weights": self._weights,
            "sizes": [(each.batch, each.limit) for each in alike or [cell]],
        }

    def _ask(self, timeout_s: float, **payload: object) -> Mapping[str, Any]:
        assert self._worker is not None
        result = self._worker.request(payload, timeout_s=timeout_s)
        answer = result.answer
        problem = f"its process {result.problem}" if answer is None else answer.get("error")
        if answer is None or problem:
            self.free()  # whatever it holds, others need its memory now
            tail = "" if answer is not None else " ".join(result.output.split())[-300:]
            raise ModelError(
                f"{self.name} in a process of its own",
                found=f"{problem}{f' ({tail})' if tail else ''}",
                remedy=f"leave {self.name} out of --subjects, or mend this first",
            )
        return answer
