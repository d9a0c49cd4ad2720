"""From what each rank has told, and how it ended, to the one error that names who failed, when and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.common.telling import ranks_text
from core.engine.parallel.rank import PHASES
from core.errors import CoreError, EngineError, ModelError, UsageError, error_from_json
from core.host.workers.process import ending

_GIVEN = (UsageError, ModelError)
"""Errors about what the user gave, which each rank finds by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What is known of a rank."""

    rank: int
    phase: str = "start"
    #: Its exit code, a negative one for a signal's number; None while it runs.
    code: int | None = None
    #: What it has told at its end: "code", or "error" with "waited" and "memory"; None where it told nothing.
    outcome: Mapping[str, Any] | None = None
    #: The last lines it wrote to standard error, where nobody saw them.
    last_words: str = ""

    @property
    def died(self) -> bool:
        """Whether it ended without a word."""
        return self.code is not None and self.outcome is None

    @property
    def error(self) -> Mapping[str, Any] | None:
        """Its own error, as JSON; None for none."""
        return None if self.outcome is None else self.outcome.get("error")

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        return self.died or self.error is not None

    @property
    def waited(self) -> bool:
        """Whether its error says that another rank is lost or late."""
        return self.outcome is not None and bool(self.outcome.get("waited"))


def has_culprit(states: Sequence[RankState]) -> bool:
    """Tell whether a rank is known to have failed by itself; else others may still tell what went wrong."""
    return any(state.died or (state.error is not None and not state.waited) for state in states)


def failure(asked: str, states: Sequence[RankState], timeout_s: float) -> CoreError:
    """Return the error that names the rank that failed, its phase and the reason.

    states: of all ranks, those that failed first in front. timeout_s: how long a rank waits for the others.
    """
    own = [state for state in states if state.error is not None and not state.waited]
    if len(own) == len(states) > 1 and len({str(state.error) for state in own}) == 1:
        return _same(own)
    asked = f"{asked} on {len(states)} ranks"
    dead = [state for state in states if state.died]
    if dead:
        return _dead(asked, dead)
    if own:
        return _reported(asked, own[0], alone=_is_alone(own[0], states))
    silent = [state for state in states if state.outcome is None]
    waiting = [state for state in states if state.waited]
    if silent:
        who, phases = ranks_text([state.rank for state in silent]), sorted({state.phase for state in silent})
        found = f"{who} hung in phase {' and '.join(phases)}: {ranks_text([s.rank for s in waiting])} waited in vain"
        remedy = f"see what {who} did there; --tp-timeout is the time that a rank has ({timeout_s:g} s)"
        return _with_words(EngineError(asked, found=found, remedy=remedy), silent)
    return _reported(asked, waiting[0])


def _same(own: Sequence[RankState]) -> CoreError:
    """Return the error that all ranks have: it is none of a rank."""
    error = _error_of(own[0])
    error.add_note(f"all {len(own)} ranks ended with it, in phase {own[0].phase}")
    return error


def _dead(asked: str, dead: Sequence[RankState]) -> CoreError:
    ends = [f"rank {state.rank} {ending(state.code or 0)} in phase {state.phase}" for state in dead]
    killed = any(state.code == -9 for state in dead)
    remedy = "see the system's log: the kernel kills what takes too much memory" if killed else "see what it wrote last"
    return _with_words(EngineError(asked, found="; ".join(ends), remedy=remedy), dead)


def _is_alone(first: RankState, states: Sequence[RankState]) -> bool:
    """Tell whether a rank failed at its own: its memory, or what others came past, ended well in, or told otherwise.

    Else they were ended before they could say the same.
    """
    past = [each for each in states if each.phase in PHASES[PHASES.index(first.phase) + 1 :]]
    others = [each for each in states if each.outcome is not None and each.error != first.error]
    return bool(past or others or (first.outcome or {}).get("memory"))


def _reported(asked: str, state: RankState, *, alone: bool = True) -> CoreError:
    """alone: as of `_is_alone`."""
    cause = _error_of(state)
    if not alone and isinstance(cause, _GIVEN):
        cause.add_note(f"rank {state.rank} ended with it first, in phase {state.phase}")
        return cause
    how = "ran out of memory" if state.outcome is not None and state.outcome.get("memory") else "failed"
    said = f"{cause.asked}: {cause.found}" if cause.asked else cause.found
    found = f"rank {state.rank} {how} in phase {state.phase}: {said}"
    error = EngineError(asked, found=found, remedy=cause.remedy or "run with --debug, and report it")
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error


def _error_of(state: RankState) -> CoreError:
    assert state.error is not None
    return error_from_json(state.error)


def _with_words(error: CoreError, states: Sequence[RankState]) -> CoreError:
    for state in states:
        if state.last_words:
            error.add_note(f"what rank {state.rank} wrote last:\n{state.last_words}")
    return error
