"""Steps of the paged route whose inputs are prepared on the host and moved to the device by one copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.program import MAX_PLANS, Program
from core.device import Device
from core.engine.config import Sampling
from core.engine.steps.histories import STEP_OF_HISTORIES
from core.engine.steps.inputs import Written, later_places, put, table_names, write_step
from core.engine.steps.step import Flight, Step, StepOutput, rows_ahead, write_sampling

_MIRRORS = 2
"""Number of mirrors on the host where one step runs while another is prepared; one elsewhere."""


class StagedSteps:
    """Runs steps of a compiled program from host memory, and brings their tokens back without waiting.

    Valid as long as the program. A step may start while the previous one still runs, unless its inputs need the
    previous step's tokens on the host.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        *,
        block_size: int,
        max_rows: int,
        max_seqs: int,
        groups: slice,
        calls: Mapping[str, Any],
    ) -> None:
        """Set up memory for steps of up to max_rows rows of logits, max_seqs sequences and a model of these groups.

        calls: the `PagedCall` of each phase.
        """
        self._program, self._calls = program, calls
        self._device = device
        self._block_size = block_size
        #: Whether a step may run several times: what it reads is written while nothing reads it.
        self.repeats = not device.capabilities.asynchronous
        mirrors = 1 if self.repeats else _MIRRORS
        self._staging = program.staging(mirrors=mirrors)
        self._arrays: list[dict[GraphKey, dict[str, np.ndarray[Any, Any]]]] = [{} for _ in range(mirrors)]
        self._max_seqs = max_seqs
        # By phase: what each mirror holds, and the versions of the block tables that the device holds.
        self._written: list[dict[str, Written]] = [{} for _ in range(mirrors)]
        self._sent: dict[str, list[int]] = {}
        # Results of the search among all buckets, by size: the key that serves it, and the dropped bucket that this
        # replaces.
        self._keys: dict[tuple[Any, ...], tuple[GraphKey | None, GraphKey | None]] = {}
        # Host memory for tokens that are still being computed when the step returns.
        self._homes: Iterator[Tensor] | None = None
        if not self.repeats:
            homes = [torch.empty(max_rows, dtype=torch.int64, pin_memory=True) for _ in range(_MIRRORS)]
            self._homes = cycle(homes)
        self._tables = tuple(table_names(group)[0] for group in range(groups.stop - groups.start))
        self._groups = groups

    def key(self, step: Step, guards: Mapping[str, Hashable]) -> GraphKey | None:
        """Return the captured key that serves a step; None where none does. Call it once for each step."""
        key, wanted = self._find(step, guards)
        if key is not None and wanted is not None:
            self._program.count_stand_in(wanted, key)
        return key

    def holds(self, step: Step, guards: Mapping[str, Hashable]) -> bool:
        """Tell whether a captured key serves a step."""
        return self._find(step, guards)[0] is not None

    def _find(self, step: Step, guards: Mapping[str, Hashable]) -> tuple[GraphKey | None, GraphKey | None]:
        signature = (step.phase, step.num_tokens, len(step.parts), step.num_rows, *guards.items())
        if signature not in self._keys:
            if len(self._keys) >= MAX_PLANS:
                self._keys.clear()
            sizes = {"tokens": step.num_tokens, "seqs": len(step.parts), "rows": step.num_rows}
            find, missed = self._program.bucket, self._program.stand_in
            self._keys[signature] = find(step.phase, sizes, guards), missed(step.phase, sizes, guards)
        return self._keys[signature]

    def run(
        self, key: GraphKey, step: Step, *, sampling: Sampling, behind: Flight | None = None, rows: Any = None
    ) -> StepOutput:
        """Run a step in the graph of `key`; wait for nothing.

        sampling: how the graph chooses tokens; for all but "greedy" the parameters are written too, and for "shaped"
        the rows, (tokens,) int64 on the host. behind: the running step whose tokens are this step's first inputs.
        """
        mirror = self._staging.current
        arrays = self._views(key)
        written = self._written[mirror].setdefault(key.phase, Written([0] * self._max_seqs))
        write_step(step, arrays, block_size=self._block_size, groups=self._groups, written=written)
        if sampling != "greedy":
            write_sampling(step, arrays["sampling_params"])
        if sampling == "shaped":
            put(arrays["history_rows"], rows)
        held = written.versions[: len(arrays["block_table"])]
        # Until the copy is queued, the device's content is unknown.
        kept = self._tables if self._sent.pop(key.phase, None) == held else ()
        feed = None if behind is None else {"input_ids": tokens_ahead(step, behind)}
        tokens, logits = self._staging.replay(key, kept=kept, feed=feed)
        self._sent[key.phase] = held
        padding, read = len(arrays["input_ids"]) - step.num_tokens, None
        if step.times > 1:
            tokens, logits, made = self._repeat(key, step, arrays, tokens, sampling)
            read = made.copy
        if len(arrays["logit_rows"]) > step.num_rows:
            tokens, logits = tokens[: step.num_rows], logits[: step.num_rows]
        gather = self._calls[key.phase].gather(sampling)
        return StepOutput(tokens, logits, sampling, padding=padding * step.times, read=read, gather=gather)

    def _repeat(
        self, key: GraphKey, step: Step, arrays: dict[str, np.ndarray[Any, Any]], tokens: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Run the step that ran last the other times; return its outputs, and the tokens of all times on the host."""
        made = last = tokens.tolist()[: step.num_rows]
        for time, places in enumerate(later_places(step, arrays, block_size=self._block_size, groups=self._groups), 1):
            for name, values in places.items():
                arrays[name][: step.num_tokens] = values
            if sampling != "greedy":
                write_sampling(step, arrays["sampling_params"], time)
            arrays["input_ids"][: step.num_rows] = last
            tokens, logits = self._staging.replay(key, kept=self._tables)
            last = tokens.tolist()[: step.num_rows]
            made = made + last
        return tokens, logits, made

    def sent(self, key: GraphKey, step: Step) -> dict[str, Tensor]:
        """Return the inputs of the step that ran last, as they are on the device, without padding: views, valid until
        the next one runs."""
        sizes = {"logit_rows": step.num_rows}
        inputs = self._program.inputs(key)
        return {name: inputs[name][: sizes.get(name, step.num_tokens)] for name in STEP_OF_HISTORIES}

    def read_later(self, output: StepOutput) -> StepOutput:
        """Begin to copy the tokens to the host; call it before the next step is run."""
        if output.read is not None:
            return output
        if self._homes is None:  # the step is done
            found = output.tokens.tolist()
            return output._replace(read=found.copy)
        return output._replace(read=self._bring(output.tokens, next(self._homes)))

    def forget(self) -> None:
        """Assume nothing about the static buffers any more, since something else has written them."""
        self._sent.clear()

    def _views(self, key: GraphKey) -> dict[str, np.ndarray[Any, Any]]:
        views = self._arrays[self._staging.current]
        if key not in views:
            views[key] = {name: tensor.numpy() for name, tensor in self._staging.inputs(key).items()}
        return views[key]

    def _bring(self, tokens: Tensor, home: Tensor) -> Callable[[], list[int]]:
        """Begin to copy tokens to host memory that the next step does not overwrite; return a function that waits for
        them."""
        there = home[: tokens.shape[0]]
        there.copy_(tokens, non_blocking=True)
        wait = self._device.record()

        def read() -> list[int]:
            wait()
            return there.tolist()

        return read


def tokens_ahead(step: Step, behind: Flight) -> Tensor:
    """Return the tokens, (k,) int64 on the device, that the step under way computes and this step begins with."""
    rows, tokens = rows_ahead(step, behind.step), behind.output.tokens
    if rows == list(range(len(rows))):
        return tokens[: len(rows)]
    return tokens.index_select(0, torch.tensor(rows).to(tokens.device, non_blocking=True))
