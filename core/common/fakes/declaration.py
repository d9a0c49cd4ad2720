"""The declaration of a fake kernel for a foreign op, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.common.fakes.rules import Rule

if TYPE_CHECKING:
    from core.common.ops.declaration import Sample

ShapeRule = Callable[..., Any]
"""Takes the op's arguments as fake tensors and returns fake outputs of the right shape, dtype, stride and device.

A `Rule` made of data, which is checked against the op's schema and printed, or any function.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOp:
    """A fake kernel for one foreign op. op: qualified name, `library::name`. rule: computes output metadata; None for
    an op that brings a fake of its own, of which only `also_writes` is declared.

    samples: device -> calls, arguments by their names in the op's schema; on these the conformance suite and
    `core fakes --check` compare the fake with the real op. writes: the arguments that the op writes, which must be
    those that its schema declares; None for whatever the schema says. also_writes: arguments that the kernel is known
    to write whether its schema declares it or not; passes and verification go by it, also where the op brings a fake
    of its own. changes: the library changes the op's schema from version to version; where the rule does not fit it,
    the fake is left out with the reason, instead of refused as a mistake. unwritten: results are memory that the op
    leaves as it was (workspaces, what later calls write), so that two calls may differ in it.
    """

    op: str
    rule: ShapeRule | None
    samples: Callable[[torch.device], Iterable[Sample]] | None = None
    writes: tuple[str, ...] | None = None
    also_writes: tuple[str, ...] = ()
    changes: bool = False
    unwritten: bool = False

    def __str__(self) -> str:
        named = "its own fake" if self.rule is None else getattr(self.rule, "__name__", repr(self.rule))
        rule = str(self.rule) if isinstance(self.rule, Rule) else named
        written = ", ".join(dict.fromkeys((*(self.writes or ()), *self.also_writes)))
        return f"{self.op} -> {rule}{f'; writes {written}' if written else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeResult:
    """Whether a declared fake was registered, and the reason in one line either way."""

    applied: bool
    reason: str
