"""Running a model on transformers' own static cache, for models that can't be paged: in rows, or one by one."""

from __future__ import annotations

import logging
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.compile import compile
from core.compilation.options import Progress
from core.compilation.program import Program
from core.compilation.report import ProgramReport
from core.device import Device, Mode
from core.engine.config import Sampling
from core.engine.inspect.probe import probe_tokens
from core.engine.static.inputs import decode_inputs, decode_tensors, step_tensors
from core.engine.static.model import StaticModel, open_static, prepare_static
from core.engine.static.self_check import RunRows, told_of, why_not_in_graphs
from core.engine.static.slots import Slots
from core.engine.steps.runner import EngineConfig, one_or_all
from core.engine.steps.sampling import TokensAndLogits, Ways, sampling_guard, with_tokens
from core.engine.steps.sleeper import Sleeper
from core.engine.steps.step import Flight, Step, StepOutput, sampled_by_request
from core.errors import CaptureError, ModelError, TraceError

if TYPE_CHECKING:
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.lora.memory import AdapterMemory

log = logging.getLogger("core.engine")
NUM_EXAMPLES = 5
"""Number of decode steps on which a captured step is checked."""


class StaticRunner:
    """A `ModelRunner` on `transformers.StaticCache`: prompts eager, each at once and in a row of its own; decode of all
    rows compiled; no drafts, which a state could not forget."""

    route = "static"
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
        """Build the cache and compile decode; raise `ModelError` where transformers has no static cache for it."""
        self._model, self._device, self._config = model, device, config
        self._max_model_len = max_model_len
        self.reason = reason
        # Logits are shaped outside the graph: shaping inside needs token histories on the device, which this route
        # lacks.
        self._sampling: tuple[Sampling, ...] = tuple(way for way in config.sampling if way != "shaped") or ("random",)
        self._sleeper = sleeper
        if config.speculative:
            log.warning("no speculative decoding on transformers' static cache: drafts can't be taken back from it")
        if config.max_step_tokens is not None:
            log.warning("no max_step_tokens on transformers' static cache: a prompt is computed at once")
        self._static: StaticModel | None = None
        try:
            self._static = open_static(model, device, config, max_model_len=max_model_len, reason=reason)
            self.program = self._compile(progress)
        except BaseException:
            self._drop()
            raise
        static = self._on_cache
        self.max_num_seqs = static.num_rows
        self.max_step_tokens = max(max_model_len, self.max_num_seqs)
        self.reason += f"; {static.manner}" if static.manner else ""
        if static.why_one:
            log.warning("static cache for one sequence at a time: %s", static.why_one)
        self.cache = Slots(self.max_num_seqs, keeps_states=static.keeps_states)

    @property
    def _on_cache(self) -> StaticModel:
        assert self._static is not None, "closed"
        return self._static

    def _prepare(self, *, masked: bool = False, packed: bool = False) -> None:
        """Make the cache anew. masked, packed: as of `StaticModel`."""
        self._drop()
        how: Any = {"max_model_len": self._max_model_len, "reason": self.reason, "masked": masked, "packed": packed}
        self._static = prepare_static(self._model, self._device, self._config, **how)

    def _drop(self) -> None:
        if self._static is not None:
            self._static.close()
            self._static = None

    def _compile(self, progress: Progress | None) -> Program:
        """Compile decode; of one sequence, where that of rows can't be captured."""
        many = self._on_cache.rows is not None
        try:
            program = self._compile_by_ways(progress)
            if not (wrong := self._why_wrong(program)):
                return program
            program.close()
            raise CaptureError("capturing rows of the static cache", found=wrong, remedy="take max_num_seqs=1")
        except CaptureError as error:
            if not many or self._config.options.strict:
                raise
            why = f"its rows can't be captured: {shorten(error.found, 200)}"
        self._config = replace(self._config, max_num_seqs=1)
        self._prepare()
        self._on_cache.why_one = why
        return self._compile_by_ways(progress)

    def _why_wrong(self, program: Program) -> str:
        """Return how the finished graphs of rows differ from the model; "" where they don't, or there are none."""
        static = self._on_cache
        if static.rows is None or not program.keys:
            return ""

        def decode(ids: Tensor, positions: Tensor, active: Tensor | None) -> Tensor:
            flags = None if active is None else active.tolist()
            place = self._device.torch_device
            inputs: Any = decode_tensors(self._inputs, place, ids.tolist(), positions.tolist(), active=flags)
            logits: Tensor = program("decode", guards={"sampling": self._sampling[0]}, **inputs)[1]
            return logits

        run = RunRows(self._model, static.rows, prefill=static.prefill, decode=decode)
        try:
            return why_not_in_graphs(run, max_model_len=self._max_model_len)
        except Exception as error:  # kernels may fail in any way
            return told_of(error)

    def _compile_by_ways(self, progress: Progress | None) -> Program:
        """Compile decode; a model that can't be traced gets a mask of full length first, and a mode without trace last.

        Some make a mask of a length that is data unless they are given one.
        """
        first, *others = self._config.modes_of("decode", self._device.capabilities)
        way, many = self._on_cache.way, self._on_cache.rows is not None
        try:
            return self._compile_as(progress, (first,))
        except CaptureError as error:
            if not others or self._config.options.strict:
                raise error from None
        except TraceError as error:
            try:
                if any(way.values()):
                    raise error
                self._prepare(masked=True)
                if many and self._on_cache.rows is None:
                    raise error
                return self._compile_as(progress, (first,))
            except (ModelError, TraceError, CaptureError):
                if not others or self._config.options.strict:
                    raise error from None
        self._prepare(**way)
        program = self._compile_as(progress, (first, *others))
        if program.report().modes["decode"] == "off":
            # Make a new cache: one with Python state may refer to memory of failed captures, which is gone.
            self._prepare(**way)
        return program

    def _compile_as(self, progress: Progress | None, modes: tuple[Mode, ...]) -> Program:
        static, many = self._on_cache, self._on_cache.rows is not None
        shapes = decode_inputs(static)
        self._inputs = tuple(shapes)
        self._sizes = self._decode_sizes()
        options = replace(self._config, sampling=self._sampling).compile_options(
            ("decode",),
            self._device.capabilities,
            examples=self._make_examples(),
            outputs=[("rows",), ("rows", None)] if many else None,
            reset=self._restore,
            relocate=None if self._sleeper is None else self._sleeper.placing(static.tensors),
            progress=progress,
        )
        return compile(
            self._decode,
            self._device,
            inputs=shapes,
            buckets={"decode": [{"rows": each} for each in self._sizes] if many else [{}]},
            options=replace(options, mode={"decode": one_or_all(modes)}),
        )

    def _decode_sizes(self) -> list[int]:
        most = self._on_cache.num_rows
        asked = replace(self._config, max_num_seqs=most).decode_sizes(self._device.capabilities)
        return sorted({min(each, most) for each in asked})

    def _probe(self) -> list[list[int]]:
        """Return the prompts of the sequences on which a captured step is checked."""
        length = min(8, self._max_model_len) - 1
        return [probe_tokens(self._model, length - row % length, 3 + 8 * row) for row in range(self._num_probed)]

    @property
    def _num_probed(self) -> int:
        return min(2, self._on_cache.num_rows)

    def _restore(self) -> None:
        """Bring the cache back to where the examples begin: runs of decode move it on."""
        for row, tokens in enumerate(self._probe()):
            self._on_cache.prefill(tokens, row)

    def _make_examples(self) -> list[dict[str, Tensor]]:
        """Return the inputs of the decode steps that follow what `_restore` leaves in the cache.

        Several steps, since a decision by length shows only as the length grows.
        """
        probe = self._probe()
        last = min(NUM_EXAMPLES, self._max_model_len - max(map(len, probe)))
        return [
            decode_tensors(
                self._inputs,
                self._device.torch_device,
                [tokens[-1 - i] for tokens in probe],
                [len(tokens) + i for tokens in probe],
            )
            for i in range(last)
        ]

    def run(self, step: Step, behind: Flight | None = None) -> StepOutput | None:
        """Compute a step: one token of each generating sequence in a graph, then prompts, each in its row."""
        if behind is not None:
            return None  # this cache's inputs are made step by step
        return sampled_by_request(step, self._run(step))

    def _run(self, step: Step) -> StepOutput:
        if step.phase == "decode":
            return self._run_decode(step)
        generating = tuple(part for part in step.parts if part.generates)
        found = []
        if generating:
            output = self._run_decode(Step("decode", generating), greedy=True)
            found.append(output.logits)
        for part in step.parts[len(generating) :]:
            assert not part.first_position  # prompts are never cut
            found.append(self._on_cache.prefill(part.tokens, part.sequence.slot - 1))
        logits = torch.cat(found)
        padding = output.padding if generating else 0
        return StepOutput(logits.argmax(dim=-1), logits, "greedy", padding=padding)

    def _run_decode(self, step: Step, *, greedy: bool = False) -> StepOutput:
        """Compute one token of each part. greedy: choose the likeliest, whatever the sequences ask for."""
        self._close_gaps()
        guard = sampling_guard("greedy" if greedy else step.sampling, self._sampling)
        how: Any = {"last_position": self._max_model_len - 1, "sampled": guard == "random" and not greedy}
        inputs = step_tensors(step, self.cache, self._inputs, self._device.torch_device, **how)
        with self.program.serving():
            chosen, logits = self.program("decode", guards={"sampling": guard}, **inputs)
        rows, num_rows = [part.sequence.slot - 1 for part in step.parts], self.cache.num_used
        if rows != list(range(num_rows)):
            index = torch.tensor(rows).to(logits.device, non_blocking=True)
            chosen, logits = chosen[index], logits[index]
        return StepOutput(chosen, logits, guard, padding=self._size_for(num_rows) - len(rows))

    def _close_gaps(self) -> None:
        """Move sequences to rows that others have left, where a smaller graph serves them then."""
        static, count = self._on_cache, len(self.cache.holders)
        while self._size_for(self.cache.num_used) > self._size_for(count) and (gap := self.cache.gap()) is not None:
            assert static.rows is not None
            static.rows.move(*gap)
            self.cache.moved(*gap)

    def _size_for(self, num_rows: int) -> int:
        return next((each for each in self._sizes if each >= num_rows), num_rows)

    def repeats(self, step: Step) -> bool:
        """Refuse: steps in a row need inputs that are written on the host."""
        return False

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        return self.program.report()

    def close(self) -> None:
        """Free the compiled program and the cache; the second time, do nothing."""
        self.program.close()
        self._drop()

    def _decode(
        self,
        input_ids: Tensor,
        sampling_params: Tensor,
        position_ids: Tensor | None = None,
        active: Tensor | None = None,
        sampling: Ways = "greedy",
    ) -> TokensAndLogits:
        logits = self._on_cache.decode(input_ids, position_ids, active)
        return with_tokens(logits, sampling_params, sampling)
