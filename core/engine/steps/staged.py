"""Steps of the paged route whose inputs are prepared on the host and moved to the device by one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.program import MAX_PLANS, Program
from core.device import Device
from core.engine.steps.sampling import Sampling
from core.engine.steps.sequence import Sequence
from core.engine.steps.step import Step, StepOutput, write_sampling, write_step

_MIRRORS = 2
"""Steps on the host at once: one that runs, and one that is prepared meanwhile."""


class StagedSteps:
    """Runs steps of a compiled program from host memory, and brings their tokens back without waiting.

    Valid as long as the program. A step may be run while the one before it is still under way, if its own inputs do not
    depend on that one's tokens, or take them on the device.
    """

    def __init__(self, program: Program, device: Device, *, block_size: int, max_rows: int, max_seqs: int) -> None:
        """Set up memory for steps of up to max_rows rows of logits and max_seqs sequences."""
        self._program = program
        self._device = device
        self._block_size = block_size
        self._staging = program.staging(mirrors=_MIRRORS)
        self._arrays: list[dict[GraphKey, dict[str, np.ndarray[Any, Any]]]] = [{} for _ in range(_MIRRORS)]
        self._max_seqs = max_seqs
        # Whose blocks each row of a phase's block tables holds, in each mirror and on the device.
        self._owners: list[dict[str, list[Sequence | None]]] = [{} for _ in range(_MIRRORS)]
        self._sent: dict[str, list[Sequence | None]] = {}
        # The search among all buckets, once per size: the key that serves it, and the dropped one it stands in for.
        self._keys: dict[tuple[Any, ...], tuple[GraphKey | None, GraphKey | None]] = {}
        pinned = device.capabilities.asynchronous
        self._tokens = [torch.empty(max_rows, dtype=torch.int64, pin_memory=pinned) for _ in range(_MIRRORS)]

    def key(self, step: Step, guards: dict[str, Sampling]) -> GraphKey | None:
        """Return the captured key that serves a step; None where none does. Call it once for each step."""
        signature = (step.phase, step.num_tokens, len(step.parts), step.num_rows, guards.get("sampling"))
        if signature not in self._keys:
            if len(self._keys) >= MAX_PLANS:
                self._keys.clear()
            sizes = {"tokens": step.num_tokens, "seqs": len(step.parts), "rows": step.num_rows}
            find, missed = self._program.bucket, self._program.stand_in
            self._keys[signature] = find(step.phase, sizes, guards), missed(step.phase, sizes, guards)
        key, wanted = self._keys[signature]
        if key is not None and wanted is not None:
            self._program.count_stand_in(wanted, key)
        return key

    def run(self, key: GraphKey, step: Step, *, sampled: bool, feed: Tensor | None = None) -> StepOutput:
        """Run a step in the graph of `key`; wait for nothing.

        sampled: the graph samples, by parameters that are written too. feed: (tokens,) int64 on the device, in place of
        the step's own tokens.
        """
        mirror = self._staging.current
        arrays = self._views(key)
        owners = self._owners[mirror].setdefault(key.phase, [None] * self._max_seqs)
        write_step(step, arrays, block_size=self._block_size, owners=owners)
        if sampled:
            write_sampling(step, arrays["sampling_params"])
        held = owners[: len(arrays["block_table"])]
        # Until the copy is queued, nobody knows what the device holds.
        kept = ("block_table",) if self._sent.pop(key.phase, None) == held else ()
        tokens, logits = self._staging.replay(key, kept=kept, feed=None if feed is None else {"input_ids": feed})
        self._sent[key.phase] = held
        tokens, logits = tokens[: step.num_rows], logits[: step.num_rows]
        return StepOutput(tokens, logits, sampled, self._bring(tokens, self._tokens[mirror]))

    def forget(self) -> None:
        """Take nothing of the static buffers for known any more: somebody else has written them."""
        self._sent.clear()

    def _views(self, key: GraphKey) -> dict[str, np.ndarray[Any, Any]]:
        views = self._arrays[self._staging.current]
        if key not in views:
            views[key] = {name: tensor.numpy() for name, tensor in self._staging.inputs(key).items()}
        return views[key]

    def _bring(self, tokens: Tensor, home: Tensor) -> Callable[[], list[int]]:
        """Begin to copy tokens to the host, where the next step can't overwrite them; return what waits for them."""
        there = home[: tokens.shape[0]]
        there.copy_(tokens, non_blocking=True)
        wait = self._device.record()

        def read() -> list[int]:
            wait()
            return there.tolist()

        return read
