"""A graph that was lowered in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.compilation.phases.phase import with_values

if TYPE_CHECKING:
    from core.common.graphs.backend import BoundCallable
    from core.common.lowering import FlatCallable
    from core.compilation.capture.alike import Part


class Divided:
    """A lowered beginning and the lowered end behind it, as one `Bindable`."""

    def __init__(
        self,
        first: tuple[FlatCallable, Part],
        end: tuple[FlatCallable, Part],
        outputs: Sequence[int],
        like: Sequence[Any],
    ) -> None:
        """outputs: as of `divide`. like: values of the end's placeholders as those that it was lowered for."""
        self._first, self._end, self._outputs = first, end, outputs
        self._strides = [each.stride() for each in like[: len(end[1].handed)]]

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        return self.bind(*args)()

    def bind(self, *args: Any) -> BoundCallable:
        """Return what runs on these arguments, without autograd; see `Bindable`."""
        (lowered, part), (end, behind) = self._first, self._end
        first = with_values(lowered, tuple(args[index] for index in part.takes))
        rest = tuple(args[index] for index in behind.takes)

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            handed = first()
            laid_out = tuple(map(_laid_out, handed, self._strides))
            results = (*handed, *end(*laid_out, *rest))
            for mine, copy in zip(handed, laid_out, strict=True):
                if mine is not copy:
                    mine.copy_(copy)  # the end may write into it
            return tuple([results[index] for index in self._outputs])

        return run


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides: a compiler may lay its results out otherwise than torch would."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
