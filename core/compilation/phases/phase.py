"""`Phase`: turns the buckets of one phase into graphs; and the state that all phases of a compile share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from core.common.lowering import Bindable

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.graphs.backend import BoundCallable, GraphKey
    from core.common.lowering import FlatCallable
    from core.compilation.account import Account
    from core.compilation.cache.program_cache import ProgramCache
    from core.compilation.cache.reports import CachedGraph
    from core.compilation.capture.bucket_report import BucketReport
    from core.compilation.capture.buffers import StaticBuffers
    from core.compilation.capture.pieces import PieceLowering
    from core.compilation.capture.plan import Cropper
    from core.compilation.capture.runner import GraphRunner
    from core.compilation.phases.ahead import KernelsAhead
    from core.compilation.phases.tracer import Tracer
    from core.compilation.request import CompileRequest
    from core.compilation.rewriting import Rewriter
    from core.compilation.trace.traced import OutputTree
    from core.device import Mode

    Captured: TypeAlias = tuple[tuple[Tensor, ...], BucketReport]
    Record: TypeAlias = Callable[..., Captured]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """The callable that is captured under one key."""

    run: BoundCallable
    #: All tensors that it reads.
    values: tuple[Any, ...]
    #: Seconds that lowering took.
    lower_s: float
    #: Returns the structure of the output, after the callable has run.
    output: Callable[[], OutputTree]
    cropper: Cropper


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """State that the phases of one program share."""

    request: CompileRequest
    account: Account
    buffers: StaticBuffers
    runner: GraphRunner
    tracer: Tracer
    rewriter: Rewriter
    pieces: PieceLowering
    ahead: KernelsAhead
    #: None if the compile cache is off.
    cache: ProgramCache | None


class Phase(Protocol):
    """One phase in one mode: it is prepared once, then its buckets are captured and checked one by one."""

    name: str
    mode: Mode

    @property
    def graphs(self) -> Sequence[CachedGraph]:
        """The graphs that were traced for the phase."""

    def prepare(self) -> tuple[GraphKey, ...]:
        """Prepare the phase for its captures, and return the keys to capture.

        Raises `TraceError` where the phase can't run in its mode.
        """

    def begin(self, key: GraphKey) -> None:
        """Begin what `runnable` needs and other processes can do meanwhile, such as a compiler; at most once."""

    def abandon(self) -> None:
        """End what was begun and is not needed any more."""

    def runnable(self, key: GraphKey) -> Runnable:
        """Return the callable to capture under a key, with its static inputs."""

    def capture(self, key: GraphKey, record: Record) -> Captured:
        """Capture what runs under a key by `record(in_parts=…)`, and return its static outputs and what it cost.

        Raises `CaptureError` with what the phase knows of the cause.
        """

    def check(self, key: GraphKey, runnable: Runnable) -> None:
        """Raise `CaptureError` if replays of a captured key differ from the callable."""


def with_values(lowered: FlatCallable, values: tuple[Any, ...]) -> BoundCallable:
    """Return a callable that runs a lowered graph on these values, without autograd."""
    if isinstance(lowered, Bindable):
        return lowered.bind(*values)

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return lowered(*values)

    return run
