"""`ModelRunner`: what the engine needs of a loaded model, whichever cache it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, get_args

from core.compilation.options import CompileOptions
from core.engine.steps.sampling import Sampling
from core.engine.steps.step import Phase
from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.capabilities import Capabilities, Mode
    from core.compilation.options import ModeChoice
    from core.compilation.report import ProgramReport
    from core.engine.inspect.cache_codes import Rounding
    from core.engine.steps.sequence import Sequence as EngineSequence
    from core.engine.steps.step import Step, StepOutput

DEFAULT_MAX_LEN = 2048
KV_CACHE_DTYPES = ("auto", "fp8")
MAX_DECODE_BUCKETS = 35
OF_THE_ENGINE = ("guards", "outputs", "bound", "reset", "examples", "shared", "progress")
"""Options of a compile that say what the engine's own phases are, and not how they are compiled."""
_COSTLY = ("compile",)
"""Modes in which each bucket costs a compile of its own; elsewhere a bucket is a capture, some tens of milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs a model.

    max_num_seqs: sequences at once. max_model_len: longest context in tokens; None takes the model's own, at most 2048.
    block_size: positions per cache block. decode_buckets: batch sizes; None takes `decode_sizes`. prefill_buckets:
    token counts; None takes powers of four from 32. The largest is the token budget of a step that holds prompts:
    longer prompts are computed in chunks. kv_cache_dtype: "auto", that of the model's keys and values, or "fp8", codes
    of half the size, by the scales that attention modules bring (`core.engine.inspect.cache_codes`); only on the
    paged cache. sampling: which ways to choose tokens are captured with decode; what is not
    is done outside of the graph. speculative: tokens drafted at most per sequence and step, 0 for none. run_ahead:
    queue a decode step before the host knows the tokens of the one before it, so that the device need not wait for the
    host; None does so where the device computes while the host goes on. options: how the model is compiled, but for
    what the engine states itself (`OF_THE_ENGINE`). Without a mode, prefill takes "piecewise" where the device has it
    and reads lengths on the host; without `cache`, finished graphs are kept; verification runs on the sequences of the
    engine's own check.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    block_size: int = 16
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    kv_cache_dtype: str = "auto"
    sampling: tuple[Sampling, ...] = ("greedy", "random")
    speculative: int = 0
    run_ahead: bool | None = None
    options: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("block_size", 1), ("max_model_len", 2), ("speculative", 0)):
            value = getattr(self, name)
            if not (_is_size(value, least) or (name == "max_model_len" and value is None)):
                raise _refusal(name, value, f"it is a whole number of at least {least}")
        for name in ("decode_buckets", "prefill_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and not (isinstance(sizes, tuple) and sizes and all(_is_size(s, 1) for s in sizes)):
                raise _refusal(name, sizes, "buckets are a tuple of at least one positive number, or None")
        if self.decode_buckets is not None and max(self.decode_buckets) < self.max_num_seqs:
            found = f"{self.max_num_seqs} sequences at once fit in none of them"
            raise _refusal("decode_buckets", self.decode_buckets, found)
        if self.prefill_buckets is not None and max(self.prefill_buckets) < self.max_num_seqs:
            found = f"a step with prompts also holds one token of each of up to {self.max_num_seqs} sequences"
            raise _refusal("prefill_buckets", self.prefill_buckets, found)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            dtypes = ", ".join(map(repr, KV_CACHE_DTYPES))
            raise _refusal("kv_cache_dtype", self.kv_cache_dtype, f"the cache dtypes are {dtypes}")
        known = get_args(Sampling)
        once = isinstance(self.sampling, tuple) and len(set(self.sampling)) == len(self.sampling) > 0
        if not (once and set(self.sampling) <= set(known)):
            raise _refusal("sampling", self.sampling, f"it is a tuple of at least one of: {', '.join(known)}")
        self._check_options()

    def _check_options(self) -> None:
        if not isinstance(self.options, CompileOptions):
            raise _refusal("options", self.options, "how the model is compiled is a core.CompileOptions")
        mode, own = self.options.mode, [name for name in self.options.stated if name in OF_THE_ENGINE]
        if isinstance(mode, Mapping) and not mode.keys() <= set(get_args(Phase)):
            raise _refusal("options.mode", dict(mode), f"the phases are {', '.join(map(repr, get_args(Phase)))}")
        if own:
            raise _refusal(f"options.{own[0]}", getattr(self.options, own[0]), "the engine states that itself")

    def context_length(self, max_position: int | None) -> int:
        """Return the longest context in tokens; max_position: the model's own, or None; raise `UsageError` beyond."""
        wanted = self.max_model_len
        if wanted is not None and max_position is not None and wanted > max_position:
            raise UsageError(
                f"max_model_len={wanted}",
                found=f"the model has {max_position} positions",
                remedy=f"ask for at most {max_position}",
            )
        length = wanted or min(max_position or DEFAULT_MAX_LEN, DEFAULT_MAX_LEN)
        if length < 2:
            raise UsageError(
                f"a context of {length}",
                found="a prompt and what follows it take 2 positions",
                remedy="use a model with at least 2 positions",
            )
        return length

    def modes_of(self, phase: str, capabilities: Capabilities) -> tuple[Mode, ...]:
        """Return the modes that a phase may be compiled in, the preferred one first.

        Where any were asked for: of these, those that the device has; raise `UsageError` if it has none of them.
        """
        mode = self.options.mode
        if (mode.get(phase) if isinstance(mode, Mapping) else mode) is not None:
            return self.options.modes_of(phase, capabilities.modes)
        in_parts = phase == "prefill" and "piecewise" in capabilities.modes and not capabilities.device_lengths
        first = ("piecewise",) if in_parts else ()
        return tuple(dict.fromkeys((*first, *capabilities.modes, "off")))

    def compile_options(self, phases: Iterable[str], capabilities: Capabilities, **own: Any) -> CompileOptions:
        """Return the options by which these phases are compiled. own: what the runner states of `OF_THE_ENGINE`."""
        options = replace(
            self.options,
            mode={phase: one_or_all(self.modes_of(phase, capabilities)) for phase in phases},
            guards={"decode": {"sampling": self.sampling}},
            **own,
        )
        return options.with_defaults(cache=True)

    def decode_sizes(self, capabilities: Capabilities) -> tuple[int, ...]:
        """Return the batch sizes of decode: those asked for, else as many as are worth their start-up time.

        1, 2, 4 and the multiples of 8 (of more where that were over 35 sizes); where each costs a compile of its own,
        powers of two.
        """
        if self.decode_buckets is not None:
            return self.decode_buckets
        last, stride = self.max_num_seqs, 8
        if self.modes_of("decode", capabilities)[0] in _COSTLY:
            return powers(1, last, 2)
        while True:
            small = [size for size in powers(1, stride, 2)[:-1] if size < last]
            sizes = (*small, *range(stride, last, stride), last)
            if len(sizes) <= MAX_DECODE_BUCKETS:
                return sizes
            stride *= 2


def one_or_all(modes: tuple[Mode, ...]) -> ModeChoice:
    """Return the modes as `core.compile` takes them: a single one is an order, several are a choice."""
    return modes[0] if len(modes) == 1 else modes


class ModelRunner(Protocol):
    """Computes steps and owns the cache. route: "paged" or "static"; reason: why this one.

    max_step_tokens: tokens at most in a step that holds prompts. num_drafts: drafts at most behind a pending token.
    cache_rounding: how the model's own forward gets a cache of the same codes; None where the cache holds no codes.
    """

    route: str
    reason: str
    max_num_seqs: int
    max_step_tokens: int
    num_drafts: int
    cache_rounding: Rounding | None

    def admit(self, sequence: EngineSequence) -> bool:
        """Reserve cache for the whole sequence; False if there is none at present."""
        ...

    def run(self, step: Step) -> StepOutput:
        """Compute a step; it changes the cache only, and only where these tokens belong."""
        ...

    def run_ahead(self, step: Step, tokens: Tensor) -> StepOutput | None:
        """Queue a decode step behind the one under way; None where that can't be, with nothing done.

        tokens: (tokens,) int64 on the device, what the step before gives, in place of the step's own.
        """
        ...

    def release(self, sequence: EngineSequence) -> None:
        """Return the sequence's cache."""
        ...

    def report(self) -> ProgramReport:
        """Return the account of the compiled program."""
        ...

    def close(self) -> None:
        """Free graphs and cache and leave the model as it was."""
        ...


def _is_size(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refusal(name: str, value: object, found: str) -> UsageError:
    return UsageError(f"{name}={value!r}", found=found, remedy=f"make the EngineConfig with another {name}")


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return first, first * factor, … below `last`, and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
