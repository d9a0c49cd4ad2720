"""What quantised layers cost the model as a whole: errors that pile up from layer to layer, and what one layer alone
does to the predictions.

Nothing of the model is replaced or copied: within a run, layers compute as their quantised forms would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UsageError
from core.quantization.calibrate import Batch, call_model
from core.quantization.errors import Make, SquareSums

Around = Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor]
"""Takes a layer's own forward and the arguments of a call, in order, and returns what the call is to give."""

_ROWS = 16
"""Positions whose probabilities are held at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Errors of the model as a whole. Divergences are means over positions of KL(exact || quantised), in nats."""

    #: By layer, rms of the output's error over rms of the output, where all layers are quantised.
    cumulative: Mapping[str, float]
    #: By layer, the divergence of the predictions where that layer alone is quantised.
    alone: Mapping[str, float]
    #: The divergence where all are.
    together: float


@torch.no_grad()
def measure_sensitivity(
    asked: str,
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    make: Make,
    progress: Callable[[int, int], None],
) -> Sensitivity:
    """Measure it on the batches: the model runs once for each layer, and twice more. One batch's exact outputs of all
    layers are held meanwhile, and all batches' logits.

    progress: called with layers done and their number. Raises `UsageError` (with `asked` first) where there is no
    batch, and for a model that gives no logits.
    """
    if not batches:
        found, remedy = "there is no text to measure the predictions on", "pass calibration=[token ids, ...]"
        raise UsageError(f"{asked}, with sensitivity", found=found, remedy=remedy)
    piled, together = {name: SquareSums() for name in layers}, _Divergence()
    exact = [_piled(asked, model, layers, batch, make, piled, together) for batch in batches]
    alone: dict[str, float] = {}
    for done, (name, layer) in enumerate(layers.items()):
        progress(done, len(layers))
        quantized, divergence = make(name, layer), _Divergence()
        with _computing({name: layer}, _always(quantized)):
            for batch, logits in zip(batches, exact, strict=True):
                divergence.add(logits, _logits(asked, call_model(asked, model, batch)))
        alone[name] = divergence.mean
    return Sensitivity(
        cumulative={name: sums.relative for name, sums in piled.items()}, alone=alone, together=together.mean
    )


def _piled(
    asked: str,
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batch: Batch,
    make: Make,
    piled: Mapping[str, SquareSums],
    together: _Divergence,
) -> Tensor:
    """Run a batch exactly and quantised, add up the differences, and return the exact logits."""
    outputs: dict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, _layer: nn.Module) -> Around:
        def around(own: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
            outputs[name].append(own(*args))
            return outputs[name][-1]

        return around

    def compare(name: str, layer: nn.Module) -> Around:
        def around(_own: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
            result: Tensor = make(name, layer)(*args)
            exact = outputs[name].pop(0)
            # With other choices of a router a layer may be given other rows.
            if exact.shape == result.shape:
                piled[name].add(result, exact)
            return result

        return around

    with _computing(layers, keep):
        exact = _logits(asked, call_model(asked, model, batch))
    with _computing(layers, compare):
        together.add(exact, _logits(asked, call_model(asked, model, batch)))
    return exact


def _always(quantized: nn.Module) -> Callable[[str, nn.Module], Around]:
    """Let a layer compute as its quantised form does."""
    return lambda _name, _layer: lambda _own, args: quantized(*args)


@contextmanager
def _computing(layers: Mapping[str, nn.Module], around: Callable[[str, nn.Module], Around]) -> Iterator[None]:
    """Let layers compute otherwise within the context; hooks on them go on running."""

    def replaced(own: Callable[..., Tensor], wrapped: Around) -> Callable[..., Tensor]:
        return lambda *args, **named: wrapped(own, (*args, *named.values()))

    try:
        for name, layer in layers.items():
            layer.forward = replaced(layer.forward, around(name, layer))
        yield
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


class _Divergence:
    """A mean of KL(exact || other) over positions, in nats."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, exact: Tensor, other: Tensor) -> None:
        """Add the positions of one run; both: logits (..., vocabulary)."""
        rows = zip(*(each.flatten(0, -2).split(_ROWS) for each in (exact, other)), strict=True)
        for wanted, found in rows:
            # fp64, for the terms are much larger than their sum.
            log_p, log_q = (torch.log_softmax(each.double(), -1) for each in (wanted, found))
            p = log_p.exp()
            self._sum += float(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum())
            self._count += len(wanted)

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0


def _logits(asked: str, output: Any) -> Tensor:
    """Return what a model gives as logits (..., vocabulary)."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        found = f"the model returns {type(output).__name__}, in which there are no logits"
        raise UsageError(f"{asked}, with sensitivity", found=found, remedy="leave sensitivity out")
    return logits
