"""The tokens of a step: the captured graph's own where it sampled, else sampled here from its logits."""

from __future__ import annotations

import logging

from core.engine.serve.stats import StatsCounter
from core.engine.steps.sampling import next_tokens
from core.engine.steps.step import Step, StepOutput

log = logging.getLogger("core.engine")


class TokenReader:
    """Reads the tokens of an engine's steps; what the graphs do not sample is counted, and said once."""

    def __init__(self, counts: StatsCounter) -> None:
        self._counts = counts
        self._said_outside = False

    def read(self, step: Step, output: StepOutput) -> list[int]:
        """Return the token of each row: one wait for the device, and the graph's own tokens where it sampled."""
        if not step.is_random or output.sampled:
            return output.tokens.tolist() if output.read is None else output.read()
        if step.phase == "decode" and not self._said_outside:
            self._said_outside = True
            log.warning(
                "sampling outside of the captured graph, which is greedy; EngineConfig(sampling=('greedy', 'random')) "
                "captures both"
            )
        self._counts.sampled_outside += sum(
            part.num_rows for part in step.parts if part.emits and not part.sequence.params.greedy
        )
        params = step.sampling_params(output.logits.device)
        return next_tokens(output.logits, params, "random").tolist()
