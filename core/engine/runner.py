"""`ModelRunner`: what the engine needs of a loaded model, whichever cache it runs on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from core.common.report import ProgramReport
    from core.device import Mode
    from core.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs a model.

    max_num_seqs: sequences at once. max_model_len: longest context in tokens; None takes the model's own, at most 2048.
    block_size: positions per cache block. decode_buckets: batch sizes; prefill_buckets: token counts; None takes powers
    of two (decode) and of four from 32 (prefill). mode, lowering, strict: as in `core.compile`.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    block_size: int = 16
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    mode: Mode | Mapping[str, Mode] | None = None
    lowering: str | None = None
    strict: bool = False


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
