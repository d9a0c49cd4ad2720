"""An engine between requests: sleep, wake, and new weights; and between steps: adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.errors import UsageError

if TYPE_CHECKING:
    from core.compilation.weights import NamedTensors
    from core.device import Device
    from core.engine.lora.adapters import Adapter, Adapters
    from core.engine.serve.request import Request
    from core.engine.serve.stepping import StepLoop, StepTurn
    from core.engine.steps.drafts import Drafter
    from core.engine.steps.model_runner import ModelRunner
    from core.engine.steps.runner import EngineConfig
    from core.engine.steps.sleeper import Sleeper

LEVELS = (1, 2)


class Resting:
    """The part of `Engine` that changes weights and memory; between requests only, adapters between steps."""

    device: Device
    config: EngineConfig
    drafter: Drafter
    _runner: ModelRunner
    _steps: StepLoop
    _turn: StepTurn
    _requests: dict[int, Request]
    _closed: bool
    _adapters: Adapters
    #: None where nothing is moved.
    _sleeper: Sleeper | None
    _asleep = False
    #: Why the weights are unusable; "" if they are complete.
    _spoilt = ""

    @property
    def _num_unfinished(self) -> int:
        """How many requests wait or run, or have ended in a step that was interrupted before it told of that."""
        return len({*self._requests, *self._steps.untold})

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and `wake` not yet."""
        return self._asleep

    def sleep(self, level: int = 1) -> int:
        """Give the memory of the cache back, and of the weights; graphs stay captured. Return the bytes given back.

        - level 1: the weights go to the host's memory, and `wake` brings them back. Where they are in the host's memory
          anyway they stay.
        - level 2: the weights are given up. After `wake`, `load_weights` has to bring all of them. Buffers stay.

        Nothing is kept of the cache. Raises `UsageError` while requests are unfinished, without
        `EngineConfig(sleep_mode=True)`, and where the engine sleeps already.
        """
        if level not in LEVELS or isinstance(level, bool):
            found = "level 1 keeps the weights in the host's memory, level 2 gives them up"
            raise UsageError(f"sleep(level={level!r})", found=found, remedy="choose 1 or 2")
        self._check_idle(f"sleep(level={level})")
        if self._sleeper is None or not self._sleeper.sleeps:
            found = "weights and cache lie in memory that can't be given back while graphs hold its addresses"
            remedy = "make the engine with EngineConfig(sleep_mode=True)"
            raise UsageError(f"sleep(level={level})", found=found, remedy=remedy)
        with self._turn.taken(f"sleep(level={level})"):
            self._forget_cache()
            num_bytes = self._sleeper.sleep(keep_weights=level == 1)
            self._asleep = True
            if level == 2:
                self._spoilt = "sleep(level=2) gave its weights up"
        return num_bytes

    def wake(self) -> None:
        """Take the memory again, at the same addresses; the cache begins empty.

        Raises `EngineError`, still asleep, where the device has not enough, and `UsageError` where it does not sleep.
        """
        if self._sleeper is None or not self._asleep or self._closed:
            found = "the engine is closed" if self._closed else "the engine is awake"
            raise UsageError("wake an engine", found=found, remedy="call wake() once after each sleep()")
        with self._turn.taken("wake an engine"):
            self._sleeper.wake()
            self._asleep = False
            self._runner.cache.forget()

    def load_weights(self, weights: NamedTensors, *, partial: bool = False) -> None:
        """Copy new values over the model's weights, where the graphs read them; the cache of prefixes is forgotten.

        As `Program.load_weights` says; names are those of the model's `state_dict`. Where a later tensor of an iterator
        is wrong, requests are refused until all weights have been loaded. Raises `UsageError` while requests are
        unfinished or the engine sleeps, and where a head drafts, too.
        """
        self._check_idle("load weights")
        if self.drafter.kind == "head":
            found = "a head drafts, which was trained for the model's weights and computes with some of them"
            raise UsageError("load weights", found=found, remedy="close the engine and load model and head again")
        if partial and self._spoilt:
            raise UsageError("load a part of the weights", found=self._spoilt, remedy="load all of them")
        program = self._runner.program
        try:
            with self._turn.taken("load weights"), torch.inference_mode(False):
                self._forget_cache()
                program.load_weights(weights, partial=partial)
        finally:
            spoilt = program.weights.mixed
            self._spoilt = spoilt or self._spoilt
        self._spoilt = ""

    @property
    def loras(self) -> Mapping[str, Adapter]:
        """The adapters that are loaded, by name."""
        return self._adapters.loaded

    def load_lora(self, name: str, path: str | Path) -> Adapter:
        """Load a LoRA adapter from a folder of PEFT's; requests may then ask for it by its name, others go on.

        Raises `UsageError` without `EngineConfig(max_loras=…)`, where all of them are loaded, and for a name that is
        taken; `ModelError` for a folder whose adapter is damaged, does not fit the model, or is more than LoRA.
        """
        self._check_ready(f"load_lora({name!r}, {str(path)!r})")
        with self._turn.taken(f"load_lora({name!r}, {str(path)!r})"), torch.inference_mode(False):
            self.device.synchronize()  # the step under way may hold a request that was ended, and its adapter
            return self._adapters.load(name, path)

    def unload_lora(self, name: str) -> None:
        """Remove an adapter; `UsageError` for an unknown name, and while unfinished requests use it."""
        self._check_ready(f"unload_lora({name!r})")
        with self._turn.taken(f"unload_lora({name!r})"):
            self.device.synchronize()
            self._adapters.unload(name, {each.sequence.adapter for each in self._requests.values()})

    def _check_ready(self, asked: str) -> None:
        """Raise `UsageError` where nothing can be computed at present."""
        if self._closed:
            raise UsageError(asked, found="the engine is closed", remedy="make another one")
        if self._asleep:
            raise UsageError(asked, found="the engine is asleep", remedy="call wake() first")
        if self._spoilt:
            raise UsageError(asked, found=self._spoilt, remedy="call load_weights with all of the weights first")

    def _check_idle(self, asked: str) -> None:
        if self._closed or self._asleep:
            self._check_ready(asked)
        if self._num_unfinished:
            found = f"{self._num_unfinished} requests are unfinished"
            raise UsageError(asked, found=found, remedy="finish them by step() or end them by abort() first")

    def _free(self) -> None:
        """Free programs and caches for good; sleeping weights stay asleep."""
        self.drafter.close()
        self._runner.close()
        if self._sleeper is not None:
            self._sleeper.abandon()
            self._sleeper = None

    def _forget_cache(self) -> None:
        """End the step under way, and let nothing in the cache be used again."""
        self._steps.close()
        self.device.synchronize()
        self._runner.cache.forget()
