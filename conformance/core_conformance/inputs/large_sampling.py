"""Calls of `core::sample` and `core::argmax` with vocabularies as models have them, for the suite alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from core.common.ops.arguments import Draw
from core.common.ops.declaration import Sample

_LIMITS = ((1.0, 0.0, 1.0), (0.7, 50.0, 1.0), (1.0, 0.0, 0.9), (1.3, 200.0, 0.8), (0.0, 0.0, 1.0))


def sampled(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024 logits, peaked and nearly flat, each limit in some of them."""
    for name, scale in (("1024 wide", 3.0), ("1024 wide, nearly flat", 0.1)):
        yield Sample(name=name, kwargs={"logits": draw(9, 1024, scale=scale), "sampling_params": _params(draw, 9)})


def sampled_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield many rows, an odd vocabulary, and a large one whose logits tie in half precision."""
    for rows, vocabulary in ((129, 1000), (65, 1001), (5, 32_003)):
        logits = draw(rows, vocabulary, scale=2.5)
        kwargs = {"logits": logits, "sampling_params": _params(draw, rows)}
        yield Sample(name=f"{rows} rows of {vocabulary}", kwargs=kwargs)


def most_likely(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024 logits, and one whose largest logits are equal and far apart."""
    yield Sample(name="1024 wide", kwargs={"logits": draw(9, 1024, scale=3.0)})
    equal = draw(9, 1024)
    equal[:, 1000], equal[:, 3] = 50.0, 50.0
    yield Sample(name="1024 wide, the largest twice", kwargs={"logits": equal})


def most_likely_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield those of `sampled_sizes`, and long rows with equal logits in every part, or the last one the largest."""
    for sample in sampled_sizes(draw):
        yield Sample(name=sample.name, kwargs={"logits": sample.kwargs["logits"]})
    for name, first, step in (("equal ones apart", 1, 1000), ("the last one", 32_002, 1)):
        logits = draw(3, 32_003)
        logits[:, first::step] = 50.0
        yield Sample(name=f"3 rows of 32003, {name}", kwargs={"logits": logits})


def _params(draw: Draw, rows: int) -> Tensor:
    """Return parameters (R, 4) that take turns."""
    drawn = torch.special.ndtr(draw(rows, dtype=torch.float64).cpu()).tolist()
    values = [(*_LIMITS[row % len(_LIMITS)], uniform) for row, uniform in enumerate(drawn)]
    return torch.tensor(values, dtype=torch.float32).to(draw.device)
