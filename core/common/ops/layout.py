"""Gives the results of references the strides of their ops' fakes, on devices whose own ops give other strides.

A trace believes fakes, which give what torch's elementwise ops promise: results in the memory order of their inputs.
Not every device keeps that promise; some give contiguous results for inputs in any order. A reference consists of torch
ops, so on such a device its results would not have the strides that a traced graph relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides in elements, dtype."""

_PLAIN = (Tensor, torch.nn.Parameter)


def laid_out(reference: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reference with its results copied into the layout that the fake gives, where theirs is another.

    Asks the fake only where an argument is not contiguous. Results are never moved while a graph is traced: a tracer's
    tensors have the strides that the fake gives.
    """

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = reference(*args, **kwargs)
        if torch.compiler.is_compiling() or not _may_differ((*args, *kwargs.values())):
            return results
        layouts = layouts_of(fake, args, kwargs)
        if isinstance(results, Tensor):
            return moved(results, layouts[0])
        return tuple(map(moved, results, layouts)) if isinstance(results, tuple) else results

    return run


def layouts_of(fake: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Layout]:
    """Return the layouts of a call's results, in order, according to the fake."""
    return _layouts(fake, tuple(map(_key_of, args)), tuple((name, _key_of(value)) for name, value in kwargs.items()))


def _may_differ(values: Sequence[Any]) -> bool:
    """Return whether one of the tensors is not contiguous; False where one has no memory of its own."""
    found = False
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or torch._is_functional_tensor(value):
                return False
            found = found or not value.is_contiguous()
    return found


def _key_of(value: Any) -> Any:
    """Return shape, strides and dtype in place of a tensor, a tuple for a list: the key of `_layouts`' cache."""
    if isinstance(value, list):
        return tuple(map(_key_of, value))
    return (_key_of, tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _on_meta(value: Any) -> Any:
    if not isinstance(value, tuple) or value[:1] != (_key_of,):
        return value
    _, shape, strides, dtype = value
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@functools.lru_cache(maxsize=1024)
def _layouts(
    fake: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[Layout, ...]:
    # torch documents no rule for strides of results, so it is asked, once for each form of a call. Modes that watch the
    # call itself, to record it, must not see this one.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made = fake(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs})
    results = made if isinstance(made, tuple) else (made,)
    return tuple((tuple(each.shape), each.stride(), each.dtype) for each in results)


def moved(result: Tensor, layout: Layout) -> Tensor:
    """Return a result in the strides of the layout, itself where it has them already."""
    shape, strides, _ = layout
    # A dimension of one, or an empty tensor, has no stride that anything could read.
    if tuple(result.shape) != shape or not result.numel():
        return result
    if all(have == want for have, want, size in zip(result.stride(), strides, shape, strict=True) if size > 1):
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)
