"""What is measured: cells (a phase at a size), what each subject showed in one, and the whole report."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from core.bench.floor import Floor
from core.bench.rates import Rates

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One phase at one size. tokens: of the context before the first decode step, or of the prompt.

    steps: how many steps (prefills) a subject does per round. seed: of the prompts.
    """

    phase: Phase
    batch: int
    tokens: int
    steps: int
    rounds: int
    seed: int = 0

    @property
    def name(self) -> str:
        """`decode/8` (by batch) or `prefill/1024` (by prompt), as reference figures name it."""
        return f"decode/{self.batch}" if self.phase == "decode" else f"prefill/{self.tokens}"

    @property
    def limit(self) -> int:
        """Tokens that a sequence comes to: the context, two of the warm-up, and those of all rounds."""
        return self.tokens + 2 + (self.steps * self.rounds if self.phase == "decode" else 0)

    @property
    def mean_context(self) -> float:
        """Tokens that a measured step attends to on average, its own included."""
        if self.phase == "prefill":
            return self.tokens
        # One step of the warm-up comes first; then each step sees one token more.
        return self.tokens + 2 + (self.steps * self.rounds - 1) / 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return a prompt per sequence, the same for every subject."""
        draw = random.Random(f"{self.seed} {self.tokens}")
        return [[draw.randrange(vocab_size) for _ in range(self.tokens)] for _ in range(self.batch)]


@dataclass(slots=True)
class Record:
    """What one subject showed in one cell.

    rounds_ms: milliseconds per step, by round. replay_ms: of the captured graph alone, where there is one. start_s: to
    become warm: compiling, capturing, first calls. tokens: of each sequence, from the one after the prompt on.
    logits: (rows, vocabulary), where they are to be judged: what the last token of the warm-up was chosen from, of the
    sequences `logit_rows`. failure: why there is no figure. verdict: what the comparison says.
    """

    subject: str
    rounds_ms: list[float] = field(default_factory=list)
    replay_ms: list[float] = field(default_factory=list)
    start_s: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    logits: Tensor | None = None
    logit_rows: list[int] = field(default_factory=list)
    failure: str = ""
    interleaved: bool = True
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float | None:
        """Median over the rounds; None where nothing was measured."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else None

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready values; tokens and logits are judged, not written."""
        return {
            "subject": self.subject,
            "failure": self.failure,
            "ms": spread(self.rounds_ms),
            "replay_ms": spread(self.replay_ms),
            "rounds_ms": self.rounds_ms,
            "start_s": self.start_s,
            "interleaved": self.interleaved,
            "check": self.verdict or None,
            "notes": self.notes,
            **self.details,
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least and most; None for no values."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellReport:
    """A measured cell. order: the subjects in the order in which they ran, round by round."""

    cell: Cell
    floor: Floor
    records: tuple[Record, ...]
    order: tuple[tuple[str, ...], ...]
    kernels: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready values."""
        fields = asdict(self.cell)
        return {
            "name": self.cell.name,
            **{name: fields[name] for name in ("phase", "batch", "tokens", "steps", "rounds")},
            "mean_context": self.cell.mean_context,
            "floor": self.floor.to_json(),
            "subjects": [record.to_json() for record in self.records],
            "order": [list(names) for names in self.order],
            "kernels": self.kernels,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Everything a run found; `facts` are those of device, model and versions, as `core.bench/1` names them."""

    facts: Mapping[str, Any]
    rates: Rates
    cells: tuple[CellReport, ...]
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    start: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of core.bench/1 (docs/json.md)."""
        return {
            **self.facts,
            "rates": self.rates.to_json(),
            "cells": [cell.to_json() for cell in self.cells],
            "references": {name: dict(cells) for name, cells in self.references.items()},
            "start": self.start,
        }
