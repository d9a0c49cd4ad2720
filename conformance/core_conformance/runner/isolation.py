"""Saves and restores torch's process-wide settings, so that one case or import does not disturb the next."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

_GUARDS: list[Any] = []


def _set_inference_mode(on: bool) -> None:
    # There is no plain setter: enter a guard and never exit it. Keep a reference, since it ends with its last one.
    _GUARDS.append(torch.inference_mode(on))
    _GUARDS[-1].__enter__()


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_deterministic(values: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])


def _autocast() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = dict.fromkeys(("cpu", *(() if accelerator is None else (accelerator.type,))))
    return tuple(kind for kind in kinds if torch.is_autocast_enabled(kind))


def _set_autocast(kinds: tuple[str, ...]) -> None:
    for kind in set(_autocast()).symmetric_difference(kinds):
        torch.set_autocast_enabled(kind, kind in kinds)


_STATE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the default device": (_default_device, torch.set_default_device),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "inference mode": (torch.is_inference_mode_enabled, _set_inference_mode),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "the precision of fp32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "autocast": (_autocast, _set_autocast),
}
"""Name -> how it is read and set, in the order of setting."""


@dataclass(frozen=True, slots=True)
class TorchState:
    """Values of torch's process-wide settings at one time, and the modes that were entered."""

    values: Mapping[str, Any]
    dispatch_modes: tuple[Any, ...]
    function_modes: tuple[Any, ...]

    @classmethod
    def read(cls) -> TorchState:
        """Return the present state of this thread and process."""
        return cls(
            values={name: get() for name, (get, _) in _STATE.items()},
            dispatch_modes=tuple(_python_dispatch._get_current_dispatch_mode_stack()),
            function_modes=tuple(overrides._get_current_function_mode_stack()),
        )

    def changes(self) -> tuple[str, ...]:
        """Return what differs now, one phrase each."""
        now = TorchState.read()
        phrases = [
            f"{name} from {value} to {now.values[name]}"
            for name, value in self.values.items()
            if now.values[name] != value
        ]
        for kind, before, after in (
            ("dispatch modes", self.dispatch_modes, now.dispatch_modes),
            ("function modes", self.function_modes, now.function_modes),
        ):
            if [id(mode) for mode in before] != [id(mode) for mode in after]:
                names = ", ".join(type(mode).__name__ for mode in after) or "none"
                phrases.append(f"the {kind} entered to {names}")
        return tuple(phrases)

    def restore(self) -> tuple[str, ...]:
        """Restore what differs, as far as torch allows, and return what differed."""
        phrases = self.changes()
        if phrases:
            # The default device goes first, since it is itself one of the function modes; grad mode goes after
            # inference mode, which changes it.
            for name, (get, put) in _STATE.items():
                if get() != self.values[name]:
                    put(self.values[name])
            _drop(_python_dispatch, _python_dispatch._get_current_dispatch_mode_stack, len(self.dispatch_modes))
            _drop(overrides, overrides._get_current_function_mode_stack, len(self.function_modes))
        return phrases


def _drop(module: Any, stack: Callable[[], Any], count: int) -> None:
    while len(stack()) > count:
        module._pop_mode()


def seed_all(seed: int) -> None:
    """Seed torch on every device, Python's `random` and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
