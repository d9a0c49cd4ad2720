"""Running a model on transformers' own static cache, one sequence at a time: for models that can't be paged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.inputs import InputSpec
from core.common.report import ProgramReport
from core.compilation import Progress, compile
from core.device import Device
from core.engine.probe import counts_from_zero, function_bound, probe_tokens, relative_difference
from core.engine.runner import EngineConfig
from core.engine.sequence import Sequence as EngineSequence
from core.engine.static_cache import cache_name, full_mask, static_cache
from core.errors import ModelError, TraceError
from core.program import Program


class StaticRunner:
    """A `ModelRunner` on `transformers.StaticCache`: prefill eager at any length, decode compiled for one token."""

    route = "static"
    max_num_seqs = 1
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
    ) -> None:
        """Build the cache and compile decode; raise `ModelError` where transformers has no static cache for it."""
        self._model = model
        self._device = device
        self.reason = reason
        self.max_prefill_tokens = max_model_len
        self._owner: EngineSequence | None = None
        self._positions = False
        self._mask_len = 0
        self._prepare_cache(max_model_len)
        try:
            self._program = self._compile(config, progress)
        except TraceError as error:
            # Some models make a mask of a length that is data unless they are given one.
            self._mask_len = max_model_len
            try:
                self._prepare_cache(max_model_len)
                self._program = self._compile(config, progress)
            except (ModelError, TraceError):
                raise error from None
        self._cache.reset()

    def _compile(self, config: EngineConfig, progress: Progress | None) -> Program:
        shapes = {"input_ids": InputSpec((1,), torch.int64, padding="copy")}
        if self._positions:
            shapes["position_ids"] = InputSpec((1,), torch.int64, padding="copy")
        mode = config.mode if config.mode is None or isinstance(config.mode, str) else config.mode.get("decode")
        return compile(
            self._decode,
            self._device,
            inputs=shapes,
            buckets={"decode": [{}]},
            mode=mode,
            lowering=config.lowering,
            passes=config.passes,
            disable_passes=config.disable_passes,
            enable_passes=config.enable_passes,
            strict=config.strict,
            verify=config.verify,
            examples=[self._example(shapes)],
            progress=progress,
        )

    def _example(self, shapes: dict[str, InputSpec]) -> dict[str, Tensor]:
        """Return the inputs of the decode step that follows what the self-check left in the cache."""
        length = len(self._probe)
        values = {"input_ids": self._probe[-1:], "position_ids": [length]}
        return {name: torch.tensor(values[name], device=self._device.torch_device) for name in shapes}

    def admit(self, sequence: EngineSequence) -> bool:
        """Take the sequence if no other one holds the cache."""
        if self._owner is not None:
            return False
        self._owner = sequence
        self._cache.reset()
        return True

    def run(self, phase: str, sequences: Sequence[EngineSequence]) -> Tensor:
        """Compute the one sequence's pending tokens; logits (1, vocabulary), valid until the next call."""
        (sequence,) = sequences
        if phase == "prefill":
            logits = self._prefill(sequence.pending())
        else:
            inputs = {"input_ids": sequence.pending(), "position_ids": [sequence.num_computed]}
            kept = inputs if self._positions else {"input_ids": inputs["input_ids"]}
            device = self._device.torch_device
            logits = self._program("decode", **{k: torch.tensor(v, device=device) for k, v in kept.items()})
        sequence.num_computed = len(sequence)
        return logits

    def release(self, sequence: EngineSequence) -> None:
        """Let the next sequence have the cache, if this one holds it."""
        if self._owner is sequence:
            self._owner = None

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        return self._program.report()

    def close(self) -> None:
        """Free the compiled program and the cache; the second time, do nothing."""
        self._program.close()
        self._cache = None

    def _prepare_cache(self, max_model_len: int) -> None:
        try:
            self._cache = static_cache(self._model, max_model_len)
            self._cache_name = cache_name(self._model)
            # They spare the model a look at the cache's length, which many can't trace.
            self._positions = counts_from_zero(self._model)
            self._check_same_function(max_model_len)
        except Exception as error:
            raise ModelError(
                f"running {type(self._model).__name__}",
                found=f"it can't be paged ({self.reason}), and transformers' static cache fails: "
                f"{type(error).__name__}: {error}",
                remedy="this model needs an engine of its own; core.compile takes its forward as it is",
            ) from error

    @torch.no_grad()
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

    def _decode(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self._forward(input_ids, position_ids)

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {self._cache_name: self._cache, "use_cache": True, "return_dict": True}
        if self._positions and position_ids is not None:
            arguments["position_ids"] = position_ids[None]
        if self._mask_len:
            arguments["attention_mask"] = full_mask(input_ids[None], self._mask_len)
        logits: Tensor = self._model(input_ids=input_ids[None], **arguments).logits
        return logits[:, -1]
