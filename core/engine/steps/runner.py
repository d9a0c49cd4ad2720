"""How an engine runs a model: `EngineConfig`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from core.common.given import check_types, made_of, tuples
from core.compilation.options import CompileOptions, Deterministic
from core.engine.config import KV_CACHE_DTYPES, Phase, Sampling
from core.errors import UsageError

if TYPE_CHECKING:
    from core.capabilities import Capabilities, Mode
    from core.compilation.options import ModeChoice
    from core.device import Device
    from core.engine.models.loading import LoadedModel

DEFAULT_MAX_LEN = 2048
MAX_DECODE_BUCKETS = 35
MAX_DRAFTS = 1024
"""Most drafts per step: each takes a row of logits, and repetitions in texts are seldom longer."""
MAX_PREFILL_TOKENS = 2048
"""Tokens of a step that holds prompts, unless buckets are given: enough to keep a large accelerator busy, and few
enough that generating sequences do not wait long."""
OF_THE_ENGINE = (
    "guards",
    "outputs",
    "bound",
    "reset",
    "relocate",
    "examples",
    "shared",
    "shared_guard",
    "progress",
    "deterministic",
)
"""Options of a compile that describe the engine's own phases; how these are compiled, the user says by the others."""
_LEAST = {"max_num_seqs": 1, "block_size": 1, "max_model_len": 2, "speculative": 0, "max_loras": 0, "max_lora_rank": 1}
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prefix_caching", "sleep_mode"), (bool,)),
    "run_ahead": (bool, type(None)),
}
_COSTLY = ("compile",)
"""Modes in which each bucket costs a compile of its own; elsewhere a bucket is a capture, some tens of milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs a model."""

    #: Sequences at once.
    max_num_seqs: int = 8
    #: Longest context in tokens; None takes the model's own, at most 2048.
    max_model_len: int | None = None
    #: Positions per cache block.
    block_size: int = 16
    #: Batch sizes of decode; None takes `decode_sizes`.
    decode_buckets: tuple[int, ...] | None = None
    #: Token counts of prefill; None takes `prefill_sizes`.
    prefill_buckets: tuple[int, ...] | None = None
    #: Tokens at most in a step that holds prompts: longer prompts are computed in chunks. None takes the largest
    #: prefill bucket. Where no buckets are given, they end here.
    max_step_tokens: int | None = None
    #: Tokens of prompts at most in a step in which other sequences generate: a larger limit lets them wait longer for a
    #: token, and prompts shorter. None sets no limit below that of the step.
    mixed_step_tokens: int | None = None
    #: Tokens that the cache has room for; None takes what `max_num_seqs` sequences of the longest context need, as far
    #: as memory goes. Where it runs out, the sequence that joined last waits, and is computed again later.
    cache_tokens: int | None = None
    #: Share of the device's memory that weights, graphs and cache fill together: the cache takes all that is left of
    #: it. None fills at most 0.9, and no more than the sequences need.
    memory_fraction: float | None = None
    #: Whether sequences that begin alike share the cache of their beginning, also when the first has ended.
    prefix_caching: bool = True
    #: "auto": that of the model's keys and values. "fp8": codes of half the size, by the scales that attention modules
    #: bring (`core.engine.inspect.cache_codes`), on the paged cache alone.
    kv_cache_dtype: str = "auto"
    #: Which ways to choose tokens are captured with decode; another is done outside of the graph. "shaped" is not
    #: among the default: it makes the engine start later for each bucket of decode, and few requests ask for it.
    sampling: tuple[Sampling, ...] = ("greedy", "random")
    #: Tokens drafted at most per sequence and step; 0 for none.
    speculative: int = 0
    #: What drafts them: the folder of a smaller model of the same tokenizer or of an EAGLE head, read in the served
    #: model's dtype; "self", the prediction layers of the served model's own folder; or a loaded model, whose attention
    #: the engine has until it is closed. None drafts from what the text said before.
    draft_model: str | Path | LoadedModel | None = None
    #: Queue a decode step before the host knows the tokens of the step before, so that the device need not wait. None
    #: does so where the device computes while the host goes on.
    run_ahead: bool | None = None
    #: Decode steps at most that run in a row before the host looks at their tokens (multi-step scheduling): they share
    #: the host's work, but the end of a text is seen late, and requests that arrive wait. None takes as many as fit
    #: into 20 ms, up to 32. Always 1 where the device computes while the host goes on, and with drafts.
    decode_steps: int | None = None
    #: Adapters (LoRA) that may be loaded at once, each with slots in memory of the engine's own; 0 for none.
    max_loras: int = 0
    #: Rank that each of them has room for.
    max_lora_rank: int = 16
    #: Whether weights and cache lie in memory that `Engine.sleep` can give back; the device must have such memory.
    sleep_mode: bool = False
    #: "batch": a sequence's logits are the same in every bit whatever else is in a batch and however its prompt is cut
    #: into chunks, so that its tokens are the same too (docs/batch-invariance.md). Checked when the engine is made.
    deterministic: Deterministic | None = None
    #: How the model is compiled, except for what the engine states itself (`OF_THE_ENGINE`); a mapping becomes a
    #: `CompileOptions`. Without a mode, prefill takes "piecewise" where the device has it and reads lengths on the
    #: host; without `cache`, finished graphs are kept. Verification runs on the sequences of the engine's own check.
    options: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        tuples(self, "decode_buckets", "prefill_buckets", "sampling")
        check_types(self, _KINDS)
        object.__setattr__(self, "options", made_of(CompileOptions, self.options, "options"))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (_is_size(value, least) or (name == "max_model_len" and value is None)):
                raise _refusal(name, value, f"it is a whole number of at least {least}")
        if self.speculative > MAX_DRAFTS:
            raise _refusal("speculative", self.speculative, f"{MAX_DRAFTS} drafts behind a token are the most")
        if self.draft_model is not None and not self.speculative:
            raise _refusal("speculative", 0, "a draft model or a head is given, which drafts nothing then")
        if self.draft_model is not None and self.sleep_mode:
            raise _refusal("sleep_mode", True, "a draft model or a head is given, which can't sleep")
        if self.draft_model is not None and self.max_loras:
            raise _refusal("max_loras", self.max_loras, "a draft model or a head is given, which takes no adapters")
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
        self._check_budgets()
        self._check_cache()
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            dtypes = ", ".join(map(repr, KV_CACHE_DTYPES))
            raise _refusal("kv_cache_dtype", self.kv_cache_dtype, f"the cache dtypes are {dtypes}")
        if self.deterministic not in (None, *get_args(Deterministic)):
            raise _refusal("deterministic", self.deterministic, 'it is "batch", or None')
        known = get_args(Sampling)
        once = isinstance(self.sampling, tuple) and len(set(self.sampling)) == len(self.sampling) > 0
        if not (once and set(self.sampling) <= set(known)):
            raise _refusal("sampling", self.sampling, f"it is a tuple of at least one of: {', '.join(known)}")
        self._check_options()

    def _check_budgets(self) -> None:
        budget = self.max_step_tokens
        if budget is not None and not _is_size(budget, self.max_num_seqs):
            found = f"a step also holds one token of each of up to {self.max_num_seqs} sequences"
            raise _refusal("max_step_tokens", budget, found)
        if budget is not None and self.prefill_buckets is not None and budget > max(self.prefill_buckets):
            raise _refusal("max_step_tokens", budget, f"the largest prefill bucket is {max(self.prefill_buckets)}")
        for name in ("mixed_step_tokens", "decode_steps"):
            value = getattr(self, name)
            if value is not None and not _is_size(value, 1):
                raise _refusal(name, value, "it is a positive whole number, or None")

    def _check_cache(self) -> None:
        tokens, share = self.cache_tokens, self.memory_fraction
        if tokens is not None and not _is_size(tokens, 1):
            raise _refusal("cache_tokens", tokens, "it is a positive whole number, or None")
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise _refusal("memory_fraction", share, "it is a number above 0 and at most 1, or None")
        if tokens is not None and share is not None:
            raise _refusal("memory_fraction", share, f"cache_tokens={tokens} says already how large the cache is")

    def _check_options(self) -> None:
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

    def check_device(self, device: Device) -> None:
        """Raise `UsageError`, before a model is loaded, for options that a compile on this device would refuse."""
        from core.compilation.arguments import check_providers
        from core.compilation.rewrite.batch_invariant import check_lowering
        from core.compilation.rewriting import device_passes

        options = self.options
        options.switches.select(device_passes(device))
        phases = [phase for phase in get_args(Phase) if phase != "verify" or self.speculative]
        first = [self.modes_of(phase, device.capabilities)[0] for phase in phases]
        device.lowerings.resolve(options.lowering)
        check_providers(options, device)
        if self.deterministic is not None:
            check_lowering(options.lowering, options.providers or {}, device, first)

    def compile_options(self, phases: Iterable[str], capabilities: Capabilities, **own: Any) -> CompileOptions:
        """Return the options by which these phases are compiled. own: the runner's values of `OF_THE_ENGINE`."""
        from core.compilation.shared_trace import SharedGuard  # a configuration is made without torch

        modes = {phase: one_or_all(self.modes_of(phase, capabilities)) for phase in phases}
        lora: dict[str, Any] = {"lora": (False, True)} if self.max_loras else {}
        guards = {phase: lora for phase in modes if lora} | {"decode": {"sampling": self.sampling, **lora}}
        if {"greedy", "random"} <= set(self.sampling):  # "shaped" also writes
            own = {"shared_guard": SharedGuard(name="sampling", values=("greedy", "random"))} | own
        options = replace(self.options, mode=modes, guards=guards, deterministic=self.deterministic, **own)
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

    def prefill_sizes(self, capabilities: Capabilities, max_model_len: int) -> tuple[int, ...]:
        """Return the token counts of prefill: those asked for, else such that little of a step is padding.

        Multiples of 64 up to 1,024 tokens, of 128 up to 2,048; where each costs a compile of its own, powers of four.
        """
        if self.prefill_buckets is not None:
            return self.prefill_buckets
        costly = self.modes_of("prefill", capabilities)[0] in _COSTLY
        last = max(max_model_len if costly else min(max_model_len, MAX_PREFILL_TOKENS), self.max_num_seqs)
        last = self.max_step_tokens or last
        if costly:
            return powers(32, last, 4)
        sizes = (32, *range(64, 1024, 64), *range(1024, last, 128))
        return (*(size for size in sizes if size < last), last)


def one_or_all(modes: tuple[Mode, ...]) -> ModeChoice:
    """Return the modes in the form of `core.compile`: a single mode is mandatory, several are a choice."""
    return modes[0] if len(modes) == 1 else modes


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
