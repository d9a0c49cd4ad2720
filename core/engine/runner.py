"""`ModelRunner`: what the engine needs of a loaded model, whichever cache it runs on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.config import Verify
    from core.common.report import ProgramReport
    from core.device import Mode
    from core.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs a model.

    max_num_seqs: sequences at once. max_model_len: longest context in tokens; None takes the model's own, at most 2048.
    block_size: positions per cache block. decode_buckets: batch sizes; prefill_buckets: token counts; None takes powers
    of two (decode) and of four from 32 (prefill). mode, lowering, passes, disable_passes, enable_passes, strict,
    verify: as in `core.compile`; verification runs on the sequences of the engine's own check.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    block_size: int = 16
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    mode: Mode | Mapping[str, Mode] | None = None
    lowering: str | None = None
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    enable_passes: tuple[str, ...] = ()
    strict: bool = False
    verify: Verify = "off"

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("block_size", 1), ("max_model_len", 2)):
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
        if isinstance(self.mode, Mapping) and not self.mode.keys() <= {"decode", "prefill"}:
            raise _refusal("mode", dict(self.mode), "the phases are 'decode' and 'prefill'")


class ModelRunner(Protocol):
    """Computes logits for sequences and owns their cache. route: "paged" or "static"; reason: why this one."""

    route: str
    reason: str
    max_num_seqs: int
    max_prefill_tokens: int

    def admit(self, sequence: EngineSequence) -> bool:
        """Reserve cache for the whole sequence; False if there is none at present."""
        ...

    def run(self, phase: str, sequences: Sequence[EngineSequence]) -> Tensor:
        """Compute all pending tokens ("prefill" or "decode") and return logits (len(sequences), vocabulary).

        Valid until the next call.
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


def accepted_arguments(model: Any) -> frozenset[str]:
    """Return the names of the parameters that the model's forward declares itself."""
    return frozenset(inspect.signature(model.forward).parameters)


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return first, first * factor, … below `last`, and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
