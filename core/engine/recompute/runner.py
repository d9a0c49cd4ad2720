"""Running a model that neither cache fits: every step computes all tokens of its sequences by the forward alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.capture.inputs import InputSpec
from core.compilation.compile import compile
from core.compilation.options import Progress
from core.compilation.program import Program
from core.compilation.report import ProgramReport
from core.device import Device, Mode
from core.engine.config import Sampling
from core.engine.inspect.probe import function_bound, probe_tokens
from core.engine.recompute.model import whole_inputs
from core.engine.recompute.opening import COST, open_whole, refuse_cached
from core.engine.recompute.self_check import Batch, Probes
from core.engine.static.slots import Slots
from core.engine.steps.runner import MAX_PREFILL_TOKENS, EngineConfig, one_or_all, powers
from core.engine.steps.sampling import (
    GREEDY_ROW,
    TokensAndLogits,
    Ways,
    sampling_guard,
    sampling_params_input,
    with_tokens,
)
from core.engine.steps.sleeper import Sleeper
from core.engine.steps.step import Flight, Step, StepOutput, sampled_by_request
from core.errors import CaptureError

if TYPE_CHECKING:
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.lora.memory import AdapterMemory

log = logging.getLogger("core.engine")
_SHORTEST = 32
"""Tokens of the smallest bucket."""


class RecomputeRunner:
    """A `ModelRunner` without a cache. Prompts and decode are the same here, and one phase, "decode"."""

    route = "recompute"
    whole_prompts = True
    num_drafts = 0
    cache_rounding: Rounding | None = None
    adapters: AdapterMemory | None = None

    def __init__(
        self,
        model: Any,
        device: Device,
        config: EngineConfig,
        *,
        max_model_len: int,
        reason: str,
        progress: Progress | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """Find how the model's sequences may be laid out, and compile its forward.

        reason: why it has no cache. Raises `ModelError` where its forward is not what it generates by, and `UsageError`
        where the configuration asks for what needs a cache.
        """
        refuse_cached(model, config, reason)
        self._device, self._config, self._max_model_len = device, config, max_model_len
        self._sampling: tuple[Sampling, ...] = tuple(way for way in config.sampling if way != "shaped") or ("random",)
        self._relocate = None if sleeper is None else sleeper.placing(())
        self._forward, manner, probes = open_whole(model, config, max_model_len=max_model_len, reason=reason)
        way = self._forward.way
        self.max_num_seqs = config.max_num_seqs if way.batched else 1
        self.max_step_tokens = max(max_model_len, self.max_num_seqs)
        self.reason = "; ".join(filter(None, (reason, COST, manner)))
        self.cache = Slots(self.max_num_seqs, keeps_states=False)
        #: Tokens of one call at most, padding included.
        self._most_tokens = max(max_model_len, config.max_step_tokens or MAX_PREFILL_TOKENS)
        self._row_sizes, self._lengths = self._bucket_sizes()
        modes = config.modes_of("decode", device.capabilities)
        if not way.padded and "off" not in modes:
            raise CaptureError("capturing whole sequences", found=manner, remedy="leave the mode out")
        if not way.traceable and "off" in modes:
            modes = ("off",)
        self.program = self._compile(modes, progress)
        if self.program.keys and (wrong := self._why_wrong(probes)):
            self.program.close()
            if "off" not in modes or config.options.strict:
                raise CaptureError("capturing whole sequences", found=wrong, remedy="leave the mode out")
            log.warning("the forward runs eagerly: in graphs, %s", wrong)
            self.reason += f"; eagerly: in graphs, {wrong}"
            self.program = self._compile(("off",), progress)

    def _bucket_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of sequences and the lengths that buckets are made for."""
        config, longest = self._config, self._max_model_len
        rows = config.decode_buckets or powers(1, self.max_num_seqs, 2)
        costly = config.modes_of("decode", self._device.capabilities)[0] == "compile"
        lengths = config.prefill_buckets or powers(_SHORTEST, longest, 4 if costly else 2)
        return (
            sorted({min(each, self.max_num_seqs) for each in rows}),
            sorted({*(each for each in lengths if each < longest), longest}),
        )

    def _most_rows(self, length: int) -> int:
        """Return how many sequences a call of this length may have, as a bucket does."""
        return max((each for each in self._row_sizes if each * length <= self._most_tokens), default=self._row_sizes[0])

    def _compile(self, modes: tuple[Mode, ...], progress: Progress | None) -> Program:
        options = replace(self._config, sampling=self._sampling).compile_options(
            ("decode",),
            self._device.capabilities,
            examples=[self._example()],
            outputs=[("rows",), ("rows", None)],
            relocate=self._relocate,
            progress=progress,
        )
        sizes = [
            {"rows": rows, "length": length}
            for length in self._lengths
            for rows in self._row_sizes
            if rows <= self._most_rows(length)
        ]
        return compile(
            self._decode,
            self._device,
            inputs={
                "input_ids": InputSpec(("rows", "length"), torch.int64),
                "lengths": InputSpec(("rows",), torch.int64, padding="sentinel", value=1),
                "sampling_params": sampling_params_input("rows"),
            },
            buckets={"decode": sizes},
            options=replace(options, mode={"decode": one_or_all(modes)}),
        )

    def _example(self) -> dict[str, Tensor]:
        """Return the inputs of one sequence, on which captures without a trace are checked."""
        tokens = [probe_tokens(self._forward.model, min(8, self._max_model_len))]
        device = self._device.torch_device
        return {**whole_inputs(tokens, device), "sampling_params": torch.tensor([GREEDY_ROW]).to(device)}

    def _why_wrong(self, probes: Probes) -> str:
        """Return how the finished graphs differ from the model; "" where they don't."""

        def run(batch: Sequence[Sequence[int]]) -> Tensor:
            return self._compute(batch, torch.tensor([GREEDY_ROW]).repeat(len(batch), 1), self._sampling[0])[1]

        # Kernels round otherwise than the model's code; that they compute another function shows far above that.
        bound = function_bound(self._forward.model)
        why = probes.why_not_alone(run, bound)
        return why if why or self.max_num_seqs == 1 else probes.why_not_together(run, bound, padded=True)

    def run(self, step: Step, behind: Flight | None = None) -> StepOutput | None:
        """Compute all tokens of the step's sequences."""
        if behind is not None:
            return None  # the host writes all tokens of a sequence, the last one too
        sequences = [part.sequence.tokens(0, part.end) for part in step.parts]
        guard = sampling_guard(step.sampling, self._sampling)
        with self.program.serving():
            tokens, logits, padding = self._compute(sequences, step.sampling_params(torch.device("cpu")), guard)
        return sampled_by_request(step, StepOutput(tokens, logits, guard, padding=padding))

    def _compute(self, sequences: Batch, params: Tensor, guard: Sampling) -> tuple[Tensor, Tensor, int]:
        """Return the next tokens, their logits and how many tokens of padding were computed.

        params: of `step.sampling_params`, on the host.
        """
        place = self._device.torch_device
        tokens, logits, order, computed = [], [], list[int](), 0
        for rows in self._calls(sequences):
            # Padded here and not by the program: a model may decide by the length, which then is that of its graph.
            width = max(len(sequences[row]) for row in rows)
            width = self._length_for(width) if self.program.keys else width
            inputs: Any = whole_inputs([sequences[row] for row in rows], place, width=width)
            inputs["sampling_params"] = params[rows].to(place, non_blocking=True)
            found = self.program("decode", guards={"sampling": guard}, **inputs)
            tokens.append(found[0].clone())  # the next call overwrites them
            logits.append(found[1].clone())
            order += rows
            computed += width * self._rows_for(len(rows))
        places = torch.tensor(order).argsort().to(place, non_blocking=True)
        return torch.cat(tokens)[places], torch.cat(logits)[places], computed - sum(map(len, sequences))

    def _calls(self, sequences: Batch) -> Iterator[list[int]]:
        """Yield which sequences share a call: of one bucket of lengths, or without padding of one length."""

        def size(row: int) -> int:
            length = len(sequences[row])
            return self._length_for(length) if self._forward.way.padded else length

        for length, alike in groupby(sorted(range(len(sequences)), key=size), key=size):
            rows, most = list(alike), self._most_rows(length)
            yield from (rows[first : first + most] for first in range(0, len(rows), most))

    def _length_for(self, length: int) -> int:
        return next(each for each in self._lengths if each >= length)

    def _rows_for(self, rows: int) -> int:
        return next(each for each in self._row_sizes if each >= rows) if self.program.keys else rows

    def repeats(self, step: Step) -> bool:
        """Refuse: steps in a row need inputs that are written on the host."""
        return False

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        return self.program.report()

    def close(self) -> None:
        """Free the compiled program; the second time, do nothing."""
        self.program.close()

    def _decode(
        self, input_ids: Tensor, lengths: Tensor, sampling_params: Tensor, sampling: Ways = "greedy"
    ) -> TokensAndLogits:
        logits = self._forward(input_ids, lengths)
        return with_tokens(logits, sampling_params, sampling)
