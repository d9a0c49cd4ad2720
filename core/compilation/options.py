"""`CompileOptions`: the options of a compile, checked when they are made and passed on whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from core.capabilities import Mode
from core.common.given import check_texts, check_types, made_of, tuples
from core.compilation.capture.turns import Threads
from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.compilation.capture.guards import GuardValues
    from core.compilation.capture.plain_call import OutputDims
    from core.compilation.rewrite.order import PassSwitches
    from core.compilation.shared_trace import SharedGuard, SharedTrace

    ModeChoice: TypeAlias = Mode | tuple[Mode, ...]
    InputSets: TypeAlias = Sequence[Mapping[str, Tensor]]
    Examples: TypeAlias = Mapping[str, InputSets]

Verify = Literal["off", "sample", "full"]
Deterministic = Literal["batch"]
Oversized = Literal["eager", "error", "split"]
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` while phases are traced and buckets captured; on the first rank only."""
MODES: tuple[Mode, ...] = get_args(Mode)
_NAMES = ("passes", "disable_passes", "enable_passes", "break_at", "eager")
_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("strict", "measure", "debug", "background"), (bool,)),
    "cache": (bool, _NONE),
    "lowering": (str, _NONE),
    "providers": (Mapping, _NONE),
    "mode": (str, tuple, list, Mapping, _NONE),
}
"""What each of these options may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """All settings of `core.compile` besides model, device, inputs and buckets."""

    #: One mode for all phases, or one per phase. A single name is used or refused. Of several names, the first that
    #: device and model allow is used; the report notes it if an earlier one was skipped. None tries all modes of the
    #: device, "off" last.
    mode: ModeChoice | Mapping[str, ModeChoice] | None = None
    #: Name of one of the device's lowerings; None takes its default.
    lowering: str | None = None
    #: Names of the passes to run; None runs all, `()` none.
    passes: tuple[str, ...] | None = None
    #: Names of passes to leave out of these.
    disable_passes: tuple[str, ...] = ()
    #: Names of passes to run although the device finds them unprofitable.
    enable_passes: tuple[str, ...] = ()
    #: The implementation that each of these canonical ops gets, `{"core::linear": "name"}`, or "reference" for none:
    #: calls that it refuses go to the others, and the report says why. Ops that are not named here get what the device
    #: prefers, or what is fastest, as `measure` says.
    providers: Mapping[str, str] | None = None
    #: Time the implementations of a call that several take, at the sizes of each bucket (docs/providers.md). False
    #: takes the one that the device prefers.
    measure: bool = True
    #: What "piecewise" cuts at: ops as "ns::op", functions and methods of torch as fx writes them ("torch.tanh"), each
    #: in some graph of every piecewise phase. None takes the canonical ops that declare it.
    break_at: tuple[str, ...] | None = None
    #: Modules that "segmented" runs eagerly, by path, `*` for any part; None finds those that can't be captured.
    eager: tuple[str, ...] | None = None
    #: "batch": a row's result is the same in every bit whatever else is in the batch (docs/batch-invariance.md). Only
    #: what is declared so runs: a model that needs anything else is refused, `strict` holds, and nothing is timed.
    deterministic: Deterministic | None = None
    #: Whether these are errors: a failing pass, a pass with a broken promise, a call without a graph, a compile while
    #: serving.
    strict: bool = False
    #: Calls while another thread's call runs: with "refuse" an error; with "serialize" they wait, and results are
    #: copies.
    threads: Threads = "refuse"
    #: A call larger than the largest bucket: "eager" runs the model as it is (strict: an error), "error" refuses,
    #: "split" makes several calls and joins their outputs. Choosing "split" states that the entries of the one bucket
    #: dimension do not depend on each other at all. Naming that dimension "batch" states it too: None splits there if
    #: the outputs can be joined, and stands for "eager" elsewhere.
    oversized: Oversized | None = None
    #: Check at each replay that nothing the graphs read has moved.
    debug: bool = False
    #: Judge each pass on `examples` against an fp64 run; "sample" takes one input set and a third of the sites.
    verify: Verify = "off"
    #: Further conditions that a phase is captured for: values by name, for all phases or per phase. The model gets one
    #: value of each by name, and each call names its values.
    guards: GuardValues | Mapping[str, GuardValues] | None = None
    #: For phases without a trace, the dimensions of each output tensor, in order: as in `InputSpec.shape`, and None for
    #: a dimension that no bucket changes, for example `[("tokens", None)]`. Without them core compares the shapes in
    #: the captured buckets, and refuses calls if these leave a doubt.
    outputs: Sequence[OutputDims] | None = None
    #: The tensors of inputs declared "bound".
    bound: Mapping[str, Tensor] | None = None
    #: Restores state that runs wrote; called between warm-up and capture of each bucket, and after the capture.
    reset: Callable[[], None] | None = None
    #: Called before the captures (again if captures start over) with the constants of the finished graphs, weights and
    #: caches among them. It may move tensors, by `tensor.data = …`; each then has to stay where it is.
    relocate: Callable[[Sequence[Tensor]], None] | None = None
    #: Sets of inputs by name, per phase or for a single phase. `verify` judges the passes on them, and captures without
    #: a trace are checked on them.
    examples: Examples | InputSets | None = None
    #: Phases that one trace may serve, since their models differ in one argument of one op only.
    shared: SharedTrace | None = None
    #: Values of a guard that one trace may serve, since they only decide what the model returns.
    shared_guard: SharedGuard | None = None
    #: Whether to keep finished graphs on disk and reuse them while nothing they depend on has changed (docs/cache.md).
    #: `CORE_CACHE=0` overrules it. None is the caller's default: an engine caches, `core.compile` does not.
    cache: bool | None = None
    #: Return before compilers are done, where the device can: a bucket runs by a lowering that is there at once until
    #: its own is compiled, in other processes. `report().interim` counts such runs, and `Program.wait_compiled` waits.
    #: Not where strict, nor on several ranks, which would change over at different steps.
    background: bool = False
    #: Called before each trace, before each capture, and once after the last capture.
    progress: Progress | None = None

    def __post_init__(self) -> None:
        tuples(self, *_NAMES)
        check_texts(self, *_NAMES)
        check_types(self, _KINDS)
        choices = {"verify": Verify, "threads": Threads, "oversized": Oversized, "deterministic": Deterministic}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in get_args(known) and not (name in ("oversized", "deterministic") and value is None):
                raise UsageError(
                    f"{name}={value!r}",
                    found="no level of that name" if name == "verify" else "no choice of that name",
                    remedy=f"choose one of: {', '.join(get_args(known))}",
                )

    @property
    def settled(self) -> CompileOptions:
        """These options with what others of them imply."""
        if self.deterministic is None:
            return self
        return replace(self, strict=True, measure=False, background=False)

    @property
    def switches(self) -> PassSwitches:
        """The options about passes."""
        from core.compilation.rewrite.order import PassSwitches

        return PassSwitches(only=self.passes, disable=self.disable_passes, enable=self.enable_passes)

    @property
    def stated(self) -> tuple[str, ...]:
        """Names of the options that differ from their defaults."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        # Compare types first: tensors among the values can't be compared by ==.
        return tuple(
            item.name for item, value in values if type(value) is not type(item.default) or value != item.default
        )

    def with_defaults(self, **defaults: Any) -> CompileOptions:
        """Return these options with other defaults for those that the caller left at their default."""
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


def options_of(options: CompileOptions | Mapping[str, Any] | None, **beside: Any) -> CompileOptions:
    """Merge the `options` of a call with options given as separate arguments; None there means not given.

    Raises `UsageError` for an option in both places, and as `made_of` does.
    """
    options = CompileOptions() if options is None else made_of(CompileOptions, options, "options")
    given = {name: value for name, value in beside.items() if value is not None}
    twice = [name for name in given if name in options.stated]
    if twice:
        raise UsageError(
            ", ".join(f"{name}={given[name]!r}" for name in twice),
            found=f"options=CompileOptions(…) says {', '.join(f'{n}={getattr(options, n)!r}' for n in twice)} as well",
            remedy="give each option in one place",
        )
    return replace(options, **given)
