"""Options of the backend: what `torch.compile` hands over as `options=` and `mode=`, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from core.common.given import check_names, check_texts, check_types, tuples
from core.compilation.options import Verify
from core.compilation.rewrite.order import PassSwitches
from core.device import Device
from core.errors import UsageError

_NAMES = ("passes", "disable_passes", "enable_passes")
_KINDS: dict[str, tuple[type, ...]] = {
    "device": (str, Device, torch.device, type(None)),
    "strict": (bool,),
    "lowering": (str, type(None)),
    "capture": (bool, type(None)),
    "max_shapes": (int,),
}
"""What each of these options may be."""
_OF_INDUCTOR = "max-autotune"
"""How modes of `torch.compile` begin that name settings of Inductor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """What `torch.compile(model, backend="core", options={…})` may say."""

    #: A device name, a `Device` or a `torch.device`; None takes the device on which the graph's tensors are.
    device: str | Device | torch.device | None = None
    #: Names of the passes to run; None runs all, `()` none.
    passes: tuple[str, ...] | None = None
    #: Names of passes to leave out of these.
    disable_passes: tuple[str, ...] = ()
    #: Names of passes to run although the device finds them unprofitable.
    enable_passes: tuple[str, ...] = ()
    #: Whether these are errors: a failing pass, a graph that runs as Dynamo traced it.
    strict: bool = False
    #: Judge each pass on the first call's inputs against an fp64 run.
    verify: Verify = "off"
    #: Name of one of the device's lowerings; None takes its default.
    lowering: str | None = None
    #: Whether to capture each shape in a graph of the device; None does where the device has such graphs.
    capture: bool | None = None
    #: Shapes of one graph that are lowered each by itself; later ones share the callable of lowering `inline`.
    max_shapes: int = 16

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None) -> BackendOptions:
        """Check what `torch.compile` was given; raise `UsageError` for what the backend can't honour."""
        given = dict(options or {})
        remedy = "leave it out; options of Inductor go to Inductor only"
        check_names(given, [item.name for item in fields(cls)], "of torch.compile(backend='core')", remedy)
        return cls(**(given | _of_mode(mode)))

    def __post_init__(self) -> None:
        tuples(self, *_NAMES)
        check_texts(self, *_NAMES)
        check_types(self, _KINDS)
        if self.verify not in get_args(Verify):
            raise UsageError(
                f"verify={self.verify!r}",
                found="no level of that name",
                remedy=f"choose one of: {', '.join(get_args(Verify))}",
            )
        if self.max_shapes < 1:
            raise UsageError(f"max_shapes={self.max_shapes}", found="no shape at all", remedy="give at least 1")

    @property
    def switches(self) -> PassSwitches:
        """The options about passes."""
        return PassSwitches(only=self.passes, disable=self.disable_passes, enable=self.enable_passes)

    def captures(self, device: Device) -> bool:
        """Tell whether graphs of this device are to be captured; raise `UsageError` where that was asked in vain."""
        has = "full" in device.capabilities.modes
        if self.capture and not has:
            raise UsageError(
                "capturing graphs: torch.compile(mode='reduce-overhead') or options={'capture': True}",
                found=f"device {device.name!r} has no graphs; its modes are: {', '.join(device.capabilities.modes)}",
                remedy="leave the mode out: each shape is a compiled program there",
            )
        return has if self.capture is None else self.capture


def _of_mode(mode: str | None) -> dict[str, Any]:
    """Return the options that a mode of `torch.compile` stands for; it refuses a mode and options together."""
    if mode in (None, "default"):
        return {}
    if mode == "reduce-overhead":
        return {"capture": True}
    tunes = str(mode).startswith(_OF_INDUCTOR)
    raise UsageError(
        f"torch.compile(mode={mode!r}, backend='core')",
        found="this mode names settings of Inductor" if tunes else "no mode of that name",
        remedy="leave the mode out: the device's kernels and lowering are chosen anyway; options={'capture': False} "
        "captures nothing"
        if tunes
        else "choose 'default' or 'reduce-overhead'",
    )
