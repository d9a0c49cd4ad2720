"""`Phase`: how the buckets of one phase become graphs, and what all phases of a program share on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from core.compilation.report import CacheReport

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import BoundCallable, GraphKey
    from core.compilation.account import Account
    from core.compilation.cache.program_cache import ProgramCache
    from core.compilation.capture.buffers import StaticBuffers
    from core.compilation.capture.pieces import PieceLowering
    from core.compilation.capture.plan import Cropper
    from core.compilation.capture.runner import CaptureCost, GraphRunner
    from core.compilation.phases.tracer import Tracer
    from core.compilation.report import TraceReport
    from core.compilation.request import CompileRequest
    from core.compilation.rewriting import Rewriter
    from core.compilation.trace.traced import OutputTree
    from core.device import Mode

    Captured: TypeAlias = tuple[tuple[Tensor, ...], CaptureCost]
    Record: TypeAlias = Callable[..., Captured]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What is captured under one key. values: everything that it reads. output: None until it has run."""

    run: BoundCallable
    values: tuple[Any, ...]
    lower_s: float
    output: Callable[[], OutputTree]
    cropper: Cropper


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """What the phases of one program share. cache: None where it is off."""

    request: CompileRequest
    account: Account
    buffers: StaticBuffers
    runner: GraphRunner
    tracer: Tracer
    rewriter: Rewriter
    pieces: PieceLowering
    cache: ProgramCache | None

    @property
    def cache_report(self) -> CacheReport:
        """What the compile cache did."""
        return CacheReport() if self.cache is None else self.cache.report


class Phase(Protocol):
    """One phase in one mode. Its buckets are bound, captured and checked one by one, after it was prepared once.

    reports: of the graphs that were traced for it.
    """

    name: str
    mode: Mode

    @property
    def reports(self) -> Sequence[TraceReport]: ...

    def prepare(self) -> tuple[GraphKey, ...]:
        """Do what comes before any capture, and return the keys to capture.

        Raises `TraceError` where the phase can't run in its mode.
        """
        ...

    def bind(self, key: GraphKey) -> Bound:
        """Return what is to be captured under a key, bound to its static inputs."""
        ...

    def capture(self, key: GraphKey, record: Record) -> Captured:
        """Capture what is bound to a key by `record(in_parts=…)`, and return its static outputs and what it cost.

        Raises `CaptureError` with what the phase knows of the cause.
        """
        ...

    def check(self, key: GraphKey, bound: Bound) -> None:
        """Raise `CaptureError` where replays of a captured key do something else than what is bound to it."""
        ...
