"""Running a model on transformers' own static cache, one sequence at a time: for models that can't be paged."""

from __future__ import annotations

import logging
from dataclasses import replace
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
from core.engine.inspect.indexing import checked_indices
from core.engine.inspect.probe import counts_from_zero, function_bound, probe_tokens, relative_difference
from core.engine.models.forward import cache_name
from core.engine.static.cache import cache_tensors, full_mask, static_cache
from core.engine.static.owner import CacheOwner
from core.engine.steps.runner import EngineConfig, one_or_all
from core.engine.steps.sampling import GREEDY_ROW, next_tokens, sampling_guard, sampling_params_input
from core.engine.steps.sleeper import Sleeper
from core.engine.steps.step import Flight, Step, StepOutput, sampled_by_request
from core.errors import CaptureError, ModelError, TraceError
from core.quantization.layers import continuous

if TYPE_CHECKING:
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.lora.memory import AdapterMemory

log = logging.getLogger("core.engine")
NUM_EXAMPLES = 5
"""Number of decode steps on which a captured step is checked."""


class StaticRunner:
    """A `ModelRunner` on `transformers.StaticCache`: prefill eager, a whole prompt at once; decode compiled for one
    token; no drafts, which a state could not forget."""

    route = "static"
    max_num_seqs = 1
    whole_prompts = True
    num_drafts = 0
    cache_rounding: Rounding | None = None
    adapters: AdapterMemory | None = None
    _cache: Any  # a `StaticCache`; None once closed

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
        self._model = model
        self._device = device
        self.reason = reason
        self.max_step_tokens = max_model_len
        # Logits are shaped outside the graph: shaping inside needs token histories on the device, which this route
        # lacks.
        self._sampling: tuple[Sampling, ...] = tuple(way for way in config.sampling if way != "shaped") or ("random",)
        self._sleeper = sleeper
        if config.speculative:
            log.warning("no speculative decoding on transformers' static cache: drafts can't be taken back from it")
        if config.max_step_tokens is not None:
            log.warning("no max_step_tokens on transformers' static cache: a prompt is computed at once")
        self._positions = False
        self._mask_len = 0
        self._prepare_cache(max_model_len)
        self.program = self._compile(config, progress, max_model_len)
        self._cache.reset()
        self.cache = CacheOwner(lambda: self._cache.reset())

    def _compile(self, config: EngineConfig, progress: Progress | None, max_model_len: int) -> Program:
        """Compile decode; a model that can't be traced gets a mask of full length first, and a mode without trace last.

        Some make a mask of a length that is data unless they are given one.
        """
        first, *others = config.modes_of("decode", self._device.capabilities)
        try:
            return self._compile_as(config, progress, max_model_len, (first,))
        except CaptureError as error:
            if not others or config.options.strict:
                raise error from None
        except TraceError as error:
            self._mask_len = max_model_len
            try:
                self._prepare_cache(max_model_len)
                return self._compile_as(config, progress, max_model_len, (first,))
            except (ModelError, TraceError, CaptureError):
                if not others or config.options.strict:
                    raise error from None
        self._mask_len = 0
        self._prepare_cache(max_model_len)
        program = self._compile_as(config, progress, max_model_len, (first, *others))
        if program.report().modes["decode"] == "off":
            # Make a new cache: one with Python state may refer to memory of failed captures, which is gone.
            self._prepare_cache(max_model_len)
        return program

    def _compile_as(
        self, config: EngineConfig, progress: Progress | None, max_model_len: int, modes: tuple[Mode, ...]
    ) -> Program:
        shapes = {"input_ids": InputSpec((1,), torch.int64, padding="copy")}
        if self._positions:
            shapes["position_ids"] = InputSpec((1,), torch.int64, padding="copy")
        shapes["sampling_params"] = replace(sampling_params_input(1), padding="copy")
        options = replace(config, sampling=self._sampling).compile_options(
            ("decode",),
            self._device.capabilities,
            examples=self._make_examples(shapes, max_model_len),
            reset=self._restore,
            relocate=None if self._sleeper is None else self._sleeper.placing(cache_tensors(self._cache)),
            progress=progress,
        )
        return compile(
            self._decode,
            self._device,
            inputs=shapes,
            buckets={"decode": [{}]},
            options=replace(options, mode={"decode": one_or_all(modes)}),
        )

    def _restore(self) -> None:
        """Bring the cache back to where the self-check left it: every run of decode moves it on."""
        self._cache.reset()
        self._prefill(self._probe[:-1])

    def _make_examples(self, shapes: dict[str, InputSpec], max_model_len: int) -> list[dict[str, Tensor]]:
        """Return the inputs of the decode steps that follow what `_restore` leaves in the cache.

        Several steps, since a decision by length shows only as the length grows.
        """
        first, last = len(self._probe) - 1, min(len(self._probe) - 1 + NUM_EXAMPLES, max_model_len)
        steps = [self._inputs(self._probe[-1 - i], first + i, GREEDY_ROW) for i in range(last - first)]
        return [{name: values[name] for name in shapes} for values in steps]

    def _inputs(self, token: int, position: int, sampling_row: tuple[float, ...]) -> dict[str, Any]:
        values = {"input_ids": [token], "position_ids": [position], "sampling_params": [sampling_row]}
        if not self._positions:
            del values["position_ids"]
        return {name: torch.tensor(value, device=self._device.torch_device) for name, value in values.items()}

    def run(self, step: Step, behind: Flight | None = None) -> StepOutput | None:
        """Compute the one sequence's pending tokens; tokens (1,) and logits (1, vocabulary)."""
        if behind is not None:
            return None  # this cache's inputs are made step by step
        return sampled_by_request(step, self._run(step))

    def _run(self, step: Step) -> StepOutput:
        (part,) = step.parts
        if step.phase == "prefill":
            logits = self._prefill(part.tokens)
            return StepOutput(logits.argmax(dim=-1), logits, "greedy")
        (token,) = part.tokens
        guard = sampling_guard(step.sampling, self._sampling)
        inputs = self._inputs(token, part.first_position, GREEDY_ROW)
        if guard == "random":
            inputs["sampling_params"] = step.sampling_params(self._device.torch_device)
        with self.program.serving():
            tokens, logits = self.program("decode", guards={"sampling": guard}, **inputs)
        return StepOutput(tokens, logits, guard)

    def repeats(self, step: Step) -> bool:
        """Refuse: the model's own cache counts its tokens on the host."""
        return False

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        return self.program.report()

    def close(self) -> None:
        """Free the compiled program and the cache; the second time, do nothing."""
        self.program.close()
        self._cache = None

    def _prepare_cache(self, max_model_len: int) -> None:
        try:
            self._cache = static_cache(self._model, max_model_len)
            self._cache_name = cache_name(self._model)
            # Passing them avoids a read of the cache's length, which many models can't trace.
            self._positions = counts_from_zero(self._model)
            with continuous(self._model):  # what is compared is the cache, not which side of a step a code falls to
                self._check_same_function(max_model_len)
        except Exception as error:
            raise ModelError(
                f"running {type(self._model).__name__}",
                found=f"it can't be paged ({self.reason}), and transformers' static cache fails: "
                f"{type(error).__name__}: {error}",
                remedy="this model needs an engine of its own; core.compile takes its forward as it is",
            ) from error

    @torch.no_grad()
    @checked_indices()
    def _check_same_function(self, max_model_len: int) -> None:
        """Compare a prefill and one decode step with the model's own forward; raise ValueError if they differ."""
        length = min(8, max_model_len)
        self._probe = tokens = probe_tokens(self._model, length)
        ids = torch.tensor([tokens], device=self._device.torch_device)
        expected = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -2:]
        got = [self._prefill(tokens[:-1]).clone()]  # the layers allocate here, on first use
        got.append(self._forward(ids[0, -1:], torch.tensor([length - 1], device=ids.device)))
        difference = relative_difference(torch.cat(got), expected)
        if not difference <= function_bound(self._model):
            raise ValueError(f"it differs from its forward without a cache by {difference:.2g}")

    @torch.no_grad()
    def _prefill(self, tokens: list[int]) -> Tensor:
        device = self._device.torch_device
        positions = torch.arange(len(tokens), device=device)
        return self._forward(torch.tensor(tokens, device=device), positions)

    def _decode(
        self,
        input_ids: Tensor,
        sampling_params: Tensor,
        position_ids: Tensor | None = None,
        sampling: Sampling = "greedy",
    ) -> tuple[Tensor, Tensor]:
        logits = self._forward(input_ids, position_ids)
        return next_tokens(logits, sampling_params, sampling), logits

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {self._cache_name: self._cache, "use_cache": True, "return_dict": True}
        if self._positions and position_ids is not None:
            arguments["position_ids"] = position_ids[None]
        if self._mask_len:
            arguments["attention_mask"] = full_mask(input_ids[None], self._mask_len)
        logits: Tensor = self._model(input_ids=input_ids[None], **arguments).logits
        return logits[:, -1]
