"""Options of a compile, parsed once and passed down; frozen, keyword-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from core.errors import UsageError

if TYPE_CHECKING:
    from core.device import Mode

Verify = Literal["off", "sample", "full"]
IMPLEMENTED_MODES = ("full", "compile", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """Everything `core.compile` decides by, besides model, device, inputs and buckets.

    mode: one mode for all phases, or one per phase; None takes the device's preferred mode. lowering: name of one of
    the device's lowerings; None takes its default. passes: names of the passes to run; None runs all, `()` none.
    disable_passes: names to leave out of these. enable_passes: names to run although the device finds them
    unprofitable. strict: a failing pass or a broken promise of one is an error. verify:
    judge each pass on example inputs against an fp64 run; "sample" takes one input set and a third of the sites.
    """

    mode: Mode | Mapping[str, Mode] | None = None
    lowering: str | None = None
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    enable_passes: tuple[str, ...] = ()
    strict: bool = False
    verify: Verify = "off"

    def __post_init__(self) -> None:
        for name in ("passes", "disable_passes", "enable_passes"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(
                    f"{name}={value!r}", found="a single string", remedy=f"pass a tuple: {name}=({value!r},)"
                )
        if self.verify not in get_args(Verify):
            raise UsageError(
                f"verify={self.verify!r}",
                found="no level of that name",
                remedy=f"choose one of: {', '.join(get_args(Verify))}",
            )

    def mode_of(self, phase: str, preferred: tuple[Mode, ...]) -> Mode:
        """Return the mode of one phase; raise `UsageError` if this version or the device does not have it."""
        mode = self.mode.get(phase) if isinstance(self.mode, Mapping) else self.mode
        usable = tuple(m for m in preferred if m in IMPLEMENTED_MODES)
        if mode is None:
            return usable[0] if usable else "off"
        if mode != "off" and mode not in usable:
            raise UsageError(
                f"mode {mode!r} for phase {phase!r}",
                found=f"on this device this version has: {', '.join(dict.fromkeys((*usable, 'off')))}",
                remedy="choose one of these, or leave the mode out to take the first",
            )
        return mode
