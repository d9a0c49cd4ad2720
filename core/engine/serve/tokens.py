"""Brings the tokens of a step to the host, and counts those that its program did not sample itself."""

from __future__ import annotations

import logging

from core.engine.serve.stats import EngineStats
from core.engine.steps.sampling import next_tokens, serves
from core.engine.steps.shaping import HostRows, is_shaped_here, needs_host, report, shape
from core.engine.steps.step import Step, StepOutput

log = logging.getLogger("core.engine")


class TokenReader:
    """Reads the tokens of an engine's steps; what is sampled outside of graphs is counted, and said once by reason."""

    def __init__(self, counts: EngineStats) -> None:
        self._counts = counts
        self._said: set[str] = set()

    def read(self, step: Step, output: StepOutput) -> list[int]:
        """Return the token of each row: one wait for the device.

        Sequences that want to know how probable their tokens are get that besides.
        """
        if not output.captured:
            self._count_outside(step, output)
        tokens = output.tokens.tolist() if output.read is None else output.read()
        if serves(output.sampling, step.sampling) and not needs_host(step):
            return tokens
        rows = HostRows.of(step, output)
        logits = output.all_logits() if rows.shaped or rows.reported else output.logits
        if rows.shaped:
            params = step.sampling_params(output.logits.device)[[row.number for row in rows.shaped]]
            shaped = next_tokens(shape(logits, rows.shaped), params, "random").tolist()
            for row, token in zip(rows.shaped, shaped, strict=True):
                tokens[row.number] = token
            self._counts.sampled_outside += len(shaped)
            self._say("what a sequence asks of its logits is done outside of the captured graph, by the host's account")
        if rows.reported:
            report(logits, tokens, rows.reported)
        return tokens

    def _count_outside(self, step: Step, output: StepOutput) -> None:
        if step.phase == "decode":
            self._say(
                f"sampling outside of the captured graph, which is not for {step.sampling!r}; "
                f"EngineConfig(sampling=(…, {step.sampling!r})) captures one"
            )
        self._counts.sampled_outside += sum(
            part.num_rows
            for part in step.parts
            if part.emits and (part.is_shaped or not part.sequence.params.greedy) and not is_shaped_here(part, output)
        )

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning(reason)
