"""The contract of a lowering, which makes a plain function of a finished graph, and the simplest one, `inline`.

Which implementation each canonical op gets is chosen before (core/compilation/implementations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from core.common.under_way import Steps, finish
from core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import fx

FlatCallable = Callable[..., "tuple[torch.Tensor, ...]"]
"""Takes the graph's placeholders positionally (tensors and ints) and returns its outputs as a flat tuple."""


@runtime_checkable
class Bindable(Protocol):
    """A `FlatCallable` that can be prepared for arguments that stay the same tensors at each run."""

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Run on these arguments."""
        ...

    def bind(self, *args: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Check the arguments once, and return what runs on them, without autograd, each time that it is called."""
        ...


_Loaded = TypeVar("_Loaded")


class Unavailable(OSError):
    """What kept files need can't be had in this process, such as a library that can't be built: they are in order."""


class Artifacts(Protocol):
    """Where a lowering keeps files that it made of one graph, so that a later process need not make them."""

    def use(self, factors: Mapping[str, str], make: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
        """Return what `load` makes of a folder of files, which `make` writes unless an equal request wrote them before.

        factors: what else the files depend on, such as a compiler's version and options. Counted already are the graph,
        its placeholders (without their content), the versions and source of packages, torch's switches and the device.
        make: gets an empty folder and writes files there, no folders. load: gets a folder that may be gone afterwards.
        Exceptions of `make` propagate. Files kept from an earlier request are made anew if `load` fails on them, except
        by `Unavailable`, which propagates: what would be made could not be loaded either.
        """
        ...

    def begin(
        self, factors: Mapping[str, str], make: Callable[[Path], Steps[None]], load: Callable[[Path], _Loaded]
    ) -> Steps[_Loaded]:
        """Do the same in steps: it pauses where `make` does, and where it waits for an equal graph to be made."""
        ...


def in_one_step(make: Callable[[Path], None]) -> Callable[[Path], Steps[None]]:
    """Return steps that write the files without a pause."""

    def steps(folder: Path) -> Steps[None]:
        make(folder)
        yield from ()

    return steps


class _Unkept:
    """Artifacts that are made each time."""

    def use(self, factors: Mapping[str, str], make: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
        """Make the files in a temporary folder, and load them."""
        return finish(self.begin(factors, in_one_step(make), load))

    def begin(
        self, factors: Mapping[str, str], make: Callable[[Path], Steps[None]], load: Callable[[Path], _Loaded]
    ) -> Steps[_Loaded]:
        """Do the same in the steps of `make`."""
        with TemporaryDirectory(prefix="core-") as folder:
            yield from make(Path(folder))
            return load(Path(folder))


UNKEPT: Artifacts = _Unkept()
"""Used for graphs whose artifacts are not kept."""


def _say_nothing(note: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringRequest:
    """What a lowering is given."""

    #: finished; the lowering owns it and may change it
    graph: fx.GraphModule
    #: real values for the graph's placeholders, in order; symbolic sizes as ints
    example_inputs: tuple[Any, ...]
    #: keeps what the lowering compiles, where the compile cache is on
    artifacts: Artifacts = UNKEPT
    #: whether this process does other work meanwhile: what takes long runs in others, and what fails is raised
    background: bool = False
    #: takes a note for the report: that a graph is lowered otherwise than asked, and why
    note: Callable[[str], None] = _say_nothing


Lowering = Callable[[LoweringRequest], FlatCallable]
BeginLowering = Callable[[LoweringRequest], "Steps[FlatCallable]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOps:
    """How a device computes torch's own ops, of those that `core/compilation/rewrite/invariant_ops.py` lists."""

    #: ops whose kernels sum a row, or choose among equals, in an order that the number of rows decides, by the names in
    #: that file: in programs of `deterministic="batch"` they are refused
    by_batch: frozenset[str] = frozenset()
    #: whether functions, such as exp, give a number the same bits wherever in a tensor it stands. Where not, such
    #: programs call them on whole vectors
    functions_alike: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowerings:
    """The lowerings of a device."""

    #: all of them, by name
    available: Mapping[str, Lowering]
    #: the one that is used when none is asked for
    default: str
    #: lowerings whose callables run at every size that the trace allows, so that one callable serves all buckets
    any_size: frozenset[str] = frozenset()
    #: those of `available` whose compiler is a process of its own: each does the same in steps, and pauses while the
    #: compiler runs, so that the next graph can be lowered meanwhile
    begins: Mapping[str, BeginLowering] = field(default_factory=dict)
    #: the lowering that runs a graph while one of `begins` compiles it (`CompileOptions.background`); "" for none
    interim: str = ""
    #: lowerings under which the ops of torch that are listed in `core/compilation/rewrite/invariant_ops.py` compute a
    #: row the same in every bit, whatever other rows there are: programs of `deterministic="batch"` use no others
    batch_invariant: frozenset[str] = frozenset()
    #: what else of torch's own ops on this device such programs have to know
    own_ops: OwnOps = field(default_factory=OwnOps)
    #: why the default is not the lowering that the device prefers; noted by programs that use the default unasked
    instead: str = ""

    def resolve(self, name: str | None) -> tuple[str, Lowering]:
        """Return name and lowering; None means the default. Raises `UsageError` naming the known ones."""
        wanted = self.default if name is None else name
        if wanted not in self.available:
            raise UsageError(
                f"lowering {wanted!r}",
                found=f"this device has: {', '.join(sorted(self.available))}",
                remedy="choose one of these: --lowering NAME, or lowering=NAME among the options",
            )
        return wanted, self.available[wanted]

    def notes(self, name: str | None) -> tuple[str, ...]:
        """Return the note of a program that asked for this lowering; None stands for the default."""
        return (f"lowering {self.default!r}: {self.instead}",) if name is None and self.instead else ()


def inline(request: LoweringRequest) -> FlatCallable:
    """Return the graph's own generated Python: each op is one eager call, at any size the trace allows."""
    request.graph.recompile()
    return request.graph.forward  # the bound method: no nn.Module call around it


INLINE = Lowerings(available=MappingProxyType({"inline": inline}), default="inline", any_size=frozenset({"inline"}))
"""The lowerings of a device whose plugin names none: every op goes through torch's dispatcher, where any backend sees
it."""
