"""Options of a compile: made once, checked, and passed whole; frozen, keyword-only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.compilation.capture.guards import GuardValues
    from core.compilation.capture.untraced import OutputDims
    from core.compilation.shared_trace import SharedTrace
    from core.device import Mode

    ModeChoice: TypeAlias = Mode | tuple[Mode, ...]
    InputSets: TypeAlias = Sequence[Mapping[str, Tensor]]
    Examples: TypeAlias = Mapping[str, InputSets]

Verify = Literal["off", "sample", "full"]
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` while buckets are captured; on the first rank only."""
MODES = ("full", "piecewise", "segmented", "compile", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """Everything `core.compile` decides by, besides model, device, inputs and buckets.

    mode: for all phases, or one per phase. A single name is taken or refused; of several, the first that the device has
    and the model allows, with a note in the report where it is not the first; None: of all that the device has, and
    "off" in the end. lowering: name of one of the device's lowerings; None takes its default. passes: names of the
    passes to run; None runs all, `()` none. disable_passes: names to leave out of these. enable_passes: names to run
    although the device finds them unprofitable. break_at: what "piecewise" cuts at: ops as "ns::op", functions and
    methods of torch as fx's generated code has them ("torch.tanh"), each in some graph of every piecewise phase; None
    takes the canonical ops that declare it. eager: modules that "segmented" runs eagerly, by path, `*` for any part;
    None finds those that can't be captured. strict: a failing pass, a broken promise of one, a call without a graph,
    and a compile while serving are errors. debug: check at each replay that nothing the graphs read has moved. verify:
    judge each pass on `examples` against an fp64 run; "sample" takes one input set and a third of the sites.

    guards: what else a phase is captured for, name -> values, for all phases or per phase: the model gets one value of
    each by name, calls name theirs. outputs: for phases that run without a trace, the dimensions of each output tensor,
    in order, as in `InputSpec.shape` and None for those that no bucket changes, for example `[("tokens", None)]`; None
    reads them off the shapes in the buckets captured, and refuses calls where these do not tell. bound: the tensors of
    inputs declared "bound". reset: called between warm-up and capture of each bucket, and after it, to undo what these
    wrote into state. examples: sets of inputs by name, per phase or for a single phase, on which `verify` judges the
    passes and on which captures without a trace are checked. shared: phases that one trace may serve, since their
    models differ in one argument of one op only. cache: keep the finished graphs on disk, and take them from there
    where nothing has changed that they depend on (docs/cache.md); `CORE_CACHE=0` overrules it; None leaves it to who
    compiles: an engine does, `core.compile` does not. progress: called before each capture and once after the last.
    """

    mode: ModeChoice | Mapping[str, ModeChoice] | None = None
    lowering: str | None = None
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    enable_passes: tuple[str, ...] = ()
    break_at: tuple[str, ...] | None = None
    eager: tuple[str, ...] | None = None
    strict: bool = False
    debug: bool = False
    verify: Verify = "off"
    guards: GuardValues | Mapping[str, GuardValues] | None = None
    outputs: Sequence[OutputDims] | None = None
    bound: Mapping[str, Tensor] | None = None
    reset: Callable[[], None] | None = None
    examples: Examples | InputSets | None = None
    shared: SharedTrace | None = None
    cache: bool | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("passes", "disable_passes", "enable_passes", "break_at", "eager"):
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

    def modes_of(self, phase: str, available: tuple[Mode, ...]) -> tuple[Mode, ...]:
        """Return the modes that may serve a phase, best first; raise `UsageError` if the device has none of them."""
        choice = self.mode.get(phase) if isinstance(self.mode, Mapping) else self.mode
        if choice is None:
            return tuple(dict.fromkeys((*available, "off")))
        wanted = (choice,) if isinstance(choice, str) else tuple(choice)
        found = tuple(mode for mode in wanted if mode == "off" or mode in available)
        if not found or not set(wanted) <= set(MODES):
            raise UsageError(
                f"mode {choice!r} for phase {phase!r}",
                found=f"this device has: {', '.join(dict.fromkeys((*available, 'off')))}",
                remedy="choose one of these, or leave the mode out to take the first",
            )
        return found
