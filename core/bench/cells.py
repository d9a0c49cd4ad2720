"""The data of a bench: cells (a phase at a size), what each subject showed in a cell, and the whole report."""

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
    """One phase at one size."""

    phase: Phase
    batch: int
    #: Decode: the context before the first step. Prefill: the prompt.
    tokens: int
    #: Decode steps, or prefills, that a subject does per round.
    steps: int
    rounds: int
    #: Seed of the prompts.
    seed: int = 0

    @property
    def name(self) -> str:
        """`decode/8` (by batch) or `prefill/1024` (by prompt), as reference figures name it."""
        return f"decode/{self.batch}" if self.phase == "decode" else f"prefill/{self.tokens}"

    @property
    def limit(self) -> int:
        """The most tokens that a sequence holds: `tokens`, two from the warm-up and, in decode, those of all rounds."""
        return self.tokens + 2 + (self.steps * self.rounds if self.phase == "decode" else 0)

    @property
    def mean_context(self) -> float:
        """Tokens that a measured step attends to on average, its own included."""
        if self.phase == "prefill":
            return self.tokens
        # The warm-up takes one step, which attends to tokens + 1. Each later step attends to one token more.
        return self.tokens + 2 + (self.steps * self.rounds - 1) / 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return a prompt per sequence, the same for every subject."""
        draw = random.Random(f"{self.seed} {self.tokens}")
        return [[draw.randrange(vocab_size) for _ in range(self.tokens)] for _ in range(self.batch)]


@dataclass(slots=True)
class Record:
    """The measurements of one subject in one cell."""

    subject: str
    #: Milliseconds per step, by round.
    rounds_ms: list[float] = field(default_factory=list)
    #: Milliseconds per replay of the captured graph alone, if there is one.
    replay_ms: list[float] = field(default_factory=list)
    #: Seconds to become warm: compiling, capturing, first calls.
    start_s: float = 0.0
    #: The tokens of each sequence, beginning with the first after the prompt.
    tokens: list[list[int]] = field(default_factory=list)
    #: (rows, vocabulary): the logits from which the last token of the warm-up was chosen; None if none are judged.
    logits: Tensor | None = None
    #: The sequences that the rows of `logits` belong to.
    logit_rows: list[int] = field(default_factory=list)
    #: Why there is no figure.
    failure: str = ""
    #: Whether it ran in turns with the other subjects.
    interleaved: bool = True
    #: Whether it ran on weights that it drew itself, so that its tokens say nothing.
    weights_drawn: bool = False
    notes: list[str] = field(default_factory=list)
    #: Further fields of its JSON.
    details: dict[str, Any] = field(default_factory=dict)
    #: The result of the comparison with eager.
    verdict: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float | None:
        """Median over the rounds; None where nothing was measured, or where it failed."""
        return statistics.median(self.rounds_ms) if self.rounds_ms and not self.failure else None

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready values; tokens and logits are judged, not written."""
        return {
            "subject": self.subject,
            "failure": self.failure,
            "ms": None if self.failure else spread(self.rounds_ms),
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
    """A measured cell."""

    cell: Cell
    floor: Floor
    records: tuple[Record, ...]
    #: The subjects in the order in which they ran, round by round.
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
    """All results of a run."""

    #: Facts about device, model, versions and settings, named as in `core.bench/1`.
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
