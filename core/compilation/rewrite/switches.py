"""Which passes the caller wants, as data: parsed once from a command line or an argument, and passed down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.common.passes.declaration import Pass
from core.compilation.rewrite.order import choose

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSwitches:
    """Passes to run and to leave out. only: their names, None for all. disable: names to leave out of these.

    enable: names to run although the device finds them unprofitable; those of `only` count as such too.
    """

    only: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: CompileOptions) -> PassSwitches:
        """Return what the options of a compile say of passes."""
        return cls(only=options.passes, disable=options.disable_passes, enable=options.enable_passes)

    @property
    def asked(self) -> tuple[str, ...]:
        """Every pass that was asked for by name."""
        return (*(self.only or ()), *self.enable)

    def select(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """Return the passes that run; raises `UsageError`, with the closest name, for one that is not there."""
        return choose(passes, self.only, self.disable, self.enable)

    def __str__(self) -> str:
        if self.only == ():
            return "no passes"
        parts = ["all passes" if self.only is None else f"only {', '.join(self.only)}"]
        if self.enable:
            parts[0] += f", {', '.join(self.enable)} in any case"
        return " without ".join([*parts, ", ".join(self.disable)] if self.disable else parts)
