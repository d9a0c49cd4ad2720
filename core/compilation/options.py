"""`CompileOptions`: the options of a compile, checked when they are made and passed on whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from core.capabilities import Mode
from core.compilation.capture.turns import Threads
from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.compilation.capture.guards import GuardValues
    from core.compilation.capture.plain_call import OutputDims
    from core.compilation.rewrite.order import PassSwitches
    from core.compilation.shared_trace import SharedTrace

    ModeChoice: TypeAlias = Mode | tuple[Mode, ...]
    InputSets: TypeAlias = Sequence[Mapping[str, Tensor]]
    Examples: TypeAlias = Mapping[str, InputSets]

Verify = Literal["off", "sample", "full"]
Oversized = Literal["eager", "error", "split"]
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` while buckets are captured; on the first rank only."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """Everything `core.compile` decides by, besides model, device, inputs and buckets."""

    #: For all phases, or one per phase. A single name is taken or refused. Of several, the first that the device has
    #: and the model allows is taken, with a note in the report where it is not the first. None tries all that the
    #: device has, and "off" in the end.
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None
    #: Name of one of the device's lowerings; None takes its default.
    lowering: str | None = None
    #: Names of the passes to run; None runs all, `()` none.
    passes: tuple[str, ...] | None = None
    #: Names of passes to leave out of these.
    disable_passes: tuple[str, ...] = ()
    #: Names of passes to run although the device finds them unprofitable.
    enable_passes: tuple[str, ...] = ()
    #: What "piecewise" cuts at: ops as "ns::op", functions and methods of torch as fx writes them ("torch.tanh"), each
    #: in some graph of every piecewise phase. None takes the canonical ops that declare it.
    break_at: tuple[str, ...] | None = None
    #: Modules that "segmented" runs eagerly, by path, `*` for any part; None finds those that can't be captured.
    eager: tuple[str, ...] | None = None
    #: A failing pass, a broken promise of one, a call without a graph, and a compile while serving are errors.
    strict: bool = False
    #: A call while another thread's call runs: "refuse" is an error; "serialize" lets it wait, and calls return copies.
    threads: Threads = "refuse"
    #: A call larger than the largest bucket: "eager" runs the model as it is (strict: an error), "error" refuses,
    #: "split" makes several calls and joins their outputs. Choosing "split" states that the entries of the one bucket
    #: dimension do not depend on each other at all.
    oversized: Oversized = "eager"
    #: Check at each replay that nothing the graphs read has moved.
    debug: bool = False
    #: Judge each pass on `examples` against an fp64 run; "sample" takes one input set and a third of the sites.
    verify: Verify = "off"
    #: What else a phase is captured for, as values by name, for all phases or per phase. The model gets one value of
    #: each by name, and calls name theirs.
    guards: GuardValues | Mapping[str, GuardValues] | None = None
    #: For phases without a trace, the dimensions of each output tensor, in order: as in `InputSpec.shape`, and None for
    #: a dimension that no bucket changes, for example `[("tokens", None)]`. Without them the shapes in the captured
    #: buckets tell, and calls where these do not tell are refused.
    outputs: Sequence[OutputDims] | None = None
    #: The tensors of inputs declared "bound".
    bound: Mapping[str, Tensor] | None = None
    #: Undoes what runs wrote into state; called between warm-up and capture of each bucket, and after it.
    reset: Callable[[], None] | None = None
    #: Called with the tensors that the finished graphs are bound to, weights and caches among them, before they are
    #: captured (again where captures are begun anew). It may move tensors, by `tensor.data = …`; each then has to stay
    #: where it is.
    relocate: Callable[[Sequence[Tensor]], None] | None = None
    #: Sets of inputs by name, per phase or for a single phase. `verify` judges the passes on them, and captures without
    #: a trace are checked on them.
    examples: Examples | InputSets | None = None
    #: Phases that one trace may serve, since their models differ in one argument of one op only.
    shared: SharedTrace | None = None
    #: Keep the finished graphs on disk, and take them from there where nothing they depend on has changed
    #: (docs/cache.md). `CORE_CACHE=0` overrules it. None leaves it to the caller: an engine does, `core.compile` does
    #: not.
    cache: bool | None = None
    #: Called before each capture and once after the last.
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("passes", "disable_passes", "enable_passes", "break_at", "eager"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(
                    f"{name}={value!r}", found="a single string", remedy=f"pass a tuple: {name}=({value!r},)"
                )
        for name, known in (("verify", Verify), ("threads", Threads), ("oversized", Oversized)):
            value = getattr(self, name)
            if value not in get_args(known):
                raise UsageError(
                    f"{name}={value!r}",
                    found="no level of that name" if name == "verify" else "no choice of that name",
                    remedy=f"choose one of: {', '.join(get_args(known))}",
                )

    @property
    def switches(self) -> PassSwitches:
        """What these options say of passes."""
        from core.compilation.rewrite.order import PassSwitches

        return PassSwitches(only=self.passes, disable=self.disable_passes, enable=self.enable_passes)

    @property
    def stated(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        # Kinds first: tensors among the values can't be compared by ==.
        return tuple(
            item.name for item, value in values if type(value) is not type(item.default) or value != item.default
        )

    def with_defaults(self, **defaults: Any) -> CompileOptions:
        """Return these options, with other defaults for those that are not stated."""
        return replace(self, **{name: value for name, value in defaults.items() if name not in self.stated})

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


def options_of(options: CompileOptions | None, **beside: Any) -> CompileOptions:
    """Return the options of a call, together with those that the call gives beside them; None there gives nothing.

    Raises `UsageError` for an option in both places.
    """
    options = CompileOptions() if options is None else options
    if not isinstance(options, CompileOptions):
        raise UsageError(
            f"options={options!r}",
            found=f"a {type(options).__name__}",
            remedy="pass them as core.CompileOptions: options=core.CompileOptions(debug=True)",
        )
    given = {name: value for name, value in beside.items() if value is not None}
    twice = [name for name in given if name in options.stated]
    if twice:
        raise UsageError(
            ", ".join(f"{name}={given[name]!r}" for name in twice),
            found=f"options=CompileOptions(…) says {', '.join(f'{n}={getattr(options, n)!r}' for n in twice)} as well",
            remedy="give each option in one place",
        )
    return replace(options, **given)
