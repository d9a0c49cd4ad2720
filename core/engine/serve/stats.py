"""Counts of an engine's work, returned as a copy by `Engine.stats`, and what else an engine tells of itself."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from core.compilation.report import ProgramReport
from core.engine.inspect.cache_codes import Rounding
from core.engine.steps.drafts import Drafter
from core.engine.steps.model_runner import ModelRunner
from core.engine.steps.step import Step


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Counts since the engine was made."""

    #: Steps by phase.
    steps: Counter[str] = field(default_factory=Counter)
    #: Tokens that steps computed.
    computed: int = 0
    #: Padding tokens that captured graphs computed, since a bucket is larger than its step.
    padded: int = 0
    #: Steps of prefill that also held generating sequences.
    mixed_steps: int = 0
    #: Sequences that were started.
    joined: int = 0
    #: Sequences that ended after they had begun, aborted ones included.
    ended: int = 0
    #: Prompts computed over several steps.
    chunked: int = 0
    #: Times that a sequence gave its cache back to others, to be computed again.
    preempted: int = 0
    #: Tokens of prompts that were not computed, since the cache already held their keys and values.
    reused: int = 0
    #: Tokens guessed by speculative decoding, by what guessed them: "ngram", "model" or "head".
    drafted: Counter[str] = field(default_factory=Counter)
    #: Guessed tokens that were kept, likewise.
    accepted: Counter[str] = field(default_factory=Counter)
    #: Steps begun before the tokens of the step before were known.
    ahead: int = 0
    #: Steps of decode that ran behind another one before the host saw its tokens.
    in_a_row: int = 0
    #: Tokens of steps ahead or in a row for sequences that had ended meanwhile.
    discarded: int = 0
    #: Tokens sampled outside of the captured graphs.
    sampled_outside: int = 0

    def count(self, step: Step, *, padding: int, preempted: int, drafted_by: str) -> None:
        """Count a step that was computed, before its tokens are handed out. preempted: so often, so far."""
        self.steps[step.phase] += step.times
        self.preempted = preempted
        self.computed += step.num_tokens * step.times
        self.padded += padding
        self.in_a_row += step.times - 1
        if step.phase == "decode":
            return  # all its sequences have begun before
        if step.phase == "prefill":
            self.mixed_steps += any(part.generates for part in step.parts)
        for part in step.parts:
            if part.drafts:
                self.drafted[drafted_by] += len(part.drafts)
            if part.joins:
                self.reused += part.first_position
            if part.joins and not part.sequence.has_begun:
                part.sequence.has_begun = True
                self.joined += 1
                self.chunked += not part.emits

    def copied(self) -> EngineStats:
        """Return the counts as they are now; later steps do not change them."""
        return replace(self, steps=Counter(self.steps), drafted=Counter(self.drafted), accepted=Counter(self.accepted))


class Described:
    """The part of `Engine` that tells what it is and what it did."""

    drafter: Drafter
    _runner: ModelRunner
    _counts: EngineStats

    @property
    def route(self) -> str:
        """ "paged" or "static": which cache the model runs on; "recompute" for none."""
        return self._runner.route

    @property
    def route_reason(self) -> str:
        """Why the model runs on that cache."""
        return self._runner.reason

    @property
    def cache_rounding(self) -> Rounding | None:
        """How the model's own forward gets a cache of the same codes; None where the cache holds no codes."""
        return self._runner.cache_rounding

    def report(self) -> ProgramReport:
        """Return the account of the compiled programs."""
        return self._runner.report()

    def wait_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait until all graphs are compiled, as `Program.wait_compiled` does, those that draft too; steps may run
        meanwhile."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        own = self._runner.program.wait_compiled(timeout_s)
        return self.drafter.wait_compiled(None if end is None else max(end - time.monotonic(), 0.0)) and own

    def stats(self) -> EngineStats:
        """Return what the engine did so far, in counts."""
        return self._counts.copied()
