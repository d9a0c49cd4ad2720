"""What an engine did so far, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.engine.steps.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counts since the engine was made.

    steps: by phase. mixed_steps: those of prefill that also held generating sequences. joined: sequences that began.
    left: those that ended, aborted ones included. chunked: prompts computed over several steps. drafted, accepted:
    tokens of speculative decoding. ahead: steps begun before the tokens of the step before were known. discarded:
    tokens of such steps for sequences that had ended. sampled_outside: tokens sampled outside of the captured graphs.
    """

    steps: Mapping[str, int]
    mixed_steps: int
    joined: int
    left: int
    chunked: int
    drafted: int
    accepted: int
    ahead: int
    discarded: int
    sampled_outside: int


@dataclass(slots=True)
class StatsCounter:
    """Counts while the engine runs; the fields are those of `EngineStats`."""

    steps: Counter[str] = field(default_factory=Counter)
    mixed_steps: int = 0
    joined: int = 0
    left: int = 0
    chunked: int = 0
    drafted: int = 0
    accepted: int = 0
    ahead: int = 0
    discarded: int = 0
    sampled_outside: int = 0

    def count(self, step: Step) -> None:
        """Count a step that was computed, before its tokens are handed out."""
        self.steps[step.phase] += 1
        if step.phase == "decode":
            return  # all its sequences have begun before
        if step.phase == "prefill":
            self.mixed_steps += not all(part.sequence.in_prompt for part in step.parts)
        for part in step.parts:
            begins = part.sequence.num_computed == 0
            self.joined += begins
            self.chunked += begins and not part.emits
            self.drafted += len(part.drafts)

    def snapshot(self) -> EngineStats:
        """Return the counts as they are now."""
        return EngineStats(
            steps=dict(self.steps),
            mixed_steps=self.mixed_steps,
            joined=self.joined,
            left=self.left,
            chunked=self.chunked,
            drafted=self.drafted,
            accepted=self.accepted,
            ahead=self.ahead,
            discarded=self.discarded,
            sampled_outside=self.sampled_outside,
        )
