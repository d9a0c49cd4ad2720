"""Runs token batches through a model and observes the inputs of its layers: for static scales, and to measure
errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.common.ops.quantize.symmetric import RANGES
from core.errors import CoreError, UsageError
from core.quantization.experts import HIDDEN, hidden_of
from core.quantization.parts import largest, parts_in
from core.quantization.scheme import ActivationScheme
from core.quantization.targets import is_experts

Batch = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]
"""Arguments of the model: one tensor (token ids), or all by name, or all by position (a list as loaders give it)."""

_WANTED = "pass calibration=[token ids, ...]: a list of tensors, or of mappings or tuples of the model's arguments"

Hook = Callable[[str, nn.Module, tuple[Any, ...], Any], None]
"""Called with path, module, its arguments in order and its output, after each call of a layer."""


@dataclass(slots=True)
class Range:
    """Smallest and largest value seen; layers that are given one and the same tensor share one range."""

    low: float = math.inf
    high: float = -math.inf

    def see(self, x: Tensor) -> None:
        """Widen the range by the values of x."""
        if x.numel():
            low, high = x.aminmax()
            self.merge(Range(float(low), float(high)))

    def merge(self, other: Range) -> None:
        """Widen the range by another one."""
        # Keep NaN, which the comparisons of min and max would lose.
        self.low = min(self.low, other.low) if other.low == other.low else other.low
        self.high = max(self.high, other.high) if other.high == other.high else other.high

    @classmethod
    def of(cls, scheme: ActivationScheme, scale: float, zero_point: int) -> Range:
        """Return the range that codes of this scale and zero point reach."""
        low, high = RANGES[scheme.dtype]
        if scheme.symmetric:
            return cls(-high * scale, high * scale)
        return cls((low - zero_point) * scale, (high - zero_point) * scale)

    def scale(self, scheme: ActivationScheme) -> tuple[Tensor, Tensor | None]:
        """Return scale () fp32 and zero point () int8, None for a symmetric scheme, that reach all values seen."""
        low, high = RANGES[scheme.dtype]
        tiny = torch.finfo(torch.float32).tiny
        if scheme.symmetric:
            return torch.tensor(max(abs(self.low), abs(self.high)) / high).clamp(min=tiny), None
        least, most = min(self.low, 0.0), max(self.high, 0.0)
        scale = torch.tensor((most - least) / (high - low)).clamp(min=tiny)
        return scale, (low - least / scale).round().clamp(low, high).to(torch.int8)


@dataclass(slots=True)
class RangeObserver:
    """Ranges of the inputs of layers, by path. Siblings given the very same tensor end up with one range object."""

    ranges: dict[str, Range] = field(default_factory=dict)
    _siblings: tuple[str, Any, str] = ("", None, "")

    def __call__(self, name: str, module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        """Observe one call."""
        x: Tensor = args[0]
        parent = name.rpartition(".")[0]
        if self._siblings[:1] == (parent,) and self._siblings[1] is x:
            self._join(name, self._siblings[2])
        else:
            self.ranges.setdefault(name, Range()).see(x)
        # Keep the tensor alive, so that no later one gets its id.
        self._siblings = (parent, x, name)
        if is_experts(module):
            hidden = self.ranges.setdefault(f"{name}{HIDDEN}", Range())
            for rows in hidden_of(module, x.reshape(-1, x.shape[-1]), args[1]):
                hidden.see(rows)

    def _join_parts(self, name: str, layer: nn.Module) -> None:
        group = parts_in(layer)
        if group is None:
            return
        own = self.ranges.setdefault(name, Range())  # all processes come here
        reach = torch.tensor((-own.low, own.high), dtype=torch.float32, device=next(layer.parameters()).device)
        low, high = largest(reach, group).tolist()
        own.low, own.high = -low, high

    def _join(self, name: str, other: str) -> None:
        shared, own = self.ranges[other], self.ranges.get(name)
        if own is not None and own is not shared:
            shared.merge(own)
            for each, found in self.ranges.items():
                self.ranges[each] = shared if found is own else found
        self.ranges[name] = shared

    def checked(self, layers: Mapping[str, nn.Module]) -> dict[str, Range]:
        """Return the ranges of these layers; raise `UsageError` for one that saw no input, or NaN or infinity.

        Of a layer that has some of the inputs, the range is that of all processes.
        """
        for name, layer in layers.items():
            self._join_parts(f"{name}{HIDDEN}" if is_experts(layer) else name, layer)
            found = self.ranges.get(name)
            if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
                saw = "saw no input" if found is None or found.low == math.inf else "was given NaN or infinity"
                raise UsageError(
                    f"calibrate layer {name!r}",
                    found=f"it {saw} in the calibration batches",
                    remedy="pass batches that reach every layer, leave it out with ignore, or use a dynamic scheme",
                )
        return self.ranges


def batches_of(asked: str, calibration: Iterable[Batch]) -> list[Batch]:
    """Return calibration batches as a list; raise `UsageError` (with `asked` first) for anything else.

    One tensor is refused, since its rows would be taken for batches, and so is a batch without any tensor in it.
    """
    given: Any = calibration
    if isinstance(given, Tensor):
        found = f"calibration is one tensor of shape {tuple(given.shape)}, not batches"
        raise UsageError(asked, found=found, remedy="pass calibration=[tensor]")
    if isinstance(given, Mapping):
        found = f"calibration is one mapping ({', '.join(map(str, given))}), not batches"
        raise UsageError(asked, found=found, remedy="pass calibration=[mapping]")
    if given is None:
        raise UsageError(asked, found="calibration is None", remedy=f"leave calibration out, or {_WANTED}")
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        found = f"calibration is {given!r:.60}, {_kind(given)}"
        raise UsageError(asked, found=found, remedy=_WANTED)
    batches = list(given)
    for index, batch in enumerate(batches):
        wrong = _why_no_batch(batch)
        if wrong is not None:
            raise UsageError(asked, found=f"calibration batch {index} {wrong[0]}", remedy=wrong[1])
    return batches


def _why_no_batch(batch: Any) -> tuple[str, str] | None:
    """Return why a model can't be called with a batch, and what to do; None where it can."""
    if isinstance(batch, Tensor):
        return None
    if not isinstance(batch, (Mapping, tuple, list)):
        hint = "encode text first: batches hold token ids; " if isinstance(batch, str) else ""
        return f"is {_kind(batch)}", f"{hint}{_WANTED}"
    name = next((key for key in batch if not isinstance(key, str)), None) if isinstance(batch, Mapping) else None
    if name is not None:
        return f"names its arguments by {name!r}, {_kind(name)}", "name arguments as the model's forward does"
    leaves = pytree.tree_leaves(list(batch.values()) if isinstance(batch, Mapping) else list(batch))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return f"is {_kind(batch)} without a tensor", "make tensors of the token ids, as in torch.tensor([ids])"
    return None


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@torch.no_grad()
def run_batches(
    asked: str, model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Batch], hook: Hook
) -> None:
    """Call the model with each batch, and the hook after each call of a layer.

    Raises `UsageError` (with `asked` first) for a batch that the model does not accept.
    """
    with _hooked(layers, hook):
        for index, batch in enumerate(batches):
            call_model(asked, model, batch, index)


def call_model(asked: str, model: nn.Module, batch: Batch, index: int = 0) -> Any:
    """Call the model with a batch and return its output; raise `UsageError` where it does not accept the batch.

    asked, index: what was asked for, and which batch this is, for the error.
    """
    try:
        if isinstance(batch, Tensor):
            return model(batch)
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)
    except (CoreError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code may raise anything
        text = " ".join(str(error).split())
        raise UsageError(
            asked,
            found=f"calling {type(model).__name__} with calibration batch {index} raised "
            f"{type(error).__name__}: {text[:300]}",
            remedy="pass batches that the model can be called with, on its device",
        ) from error


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], hook: Hook) -> Any:
    def after(name: str) -> Callable[..., None]:
        return lambda module, args, named, output: hook(name, module, (*args, *named.values()), output)

    handles = [module.register_forward_hook(after(name), with_kwargs=True) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
