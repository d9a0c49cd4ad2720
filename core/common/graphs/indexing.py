"""Raises `IndexError` on every device where an index is out of range, as torch does in the host's memory.

An accelerator finds it while its kernel runs, by an assertion after which nothing runs on the device any more in this
process. So a model whose code is only tried runs within `checked_indices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.graphs.torch_modes import entered


@contextmanager
def checked_indices() -> Iterator[None]:
    """Check indices before each op of the block, or decorated function, on this thread; each check waits for the
    device.

    Ops inside of `torch.compile`d functions and of kernels that are no ops of torch go unseen.
    """
    with entered(_CheckedIndices()):  # type: ignore[no-untyped-call]  # torch's constructor has no annotations
        yield


class _CheckedIndices(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` work meanwhile: other threads may compile, and torch asks for the whole process."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        check = _CHECKS.get(getattr(getattr(func, "overloadpacket", None), "__name__", ""))
        if check is not None:
            check(*args)
        return func(*args, **(kwargs or {}))


def _refuse_outside(index: Tensor, size: int, dim: int, *, negative: bool = False) -> None:
    if index.numel() == 0:
        return
    ends = [int(each) for each in torch.aminmax(index)]
    for end in ends:
        if not (-size if negative else 0) <= end < size:
            raise IndexError(f"index {end} is out of bounds for dimension {dim} with size {size}")


def _size(source: Tensor, dim: int) -> int:
    return source.shape[dim] if source.dim() else 1


def _rows(weight: Tensor, indices: Tensor, *_: Any) -> None:
    _refuse_outside(indices, weight.shape[0], 0)


def _along(source: Tensor, dim: int, index: Tensor, *_: Any) -> None:
    _refuse_outside(index, _size(source, dim), dim)


def _along_from_either_end(source: Tensor, dim: int, index: Tensor, *_: Any) -> None:
    _refuse_outside(index, _size(source, dim), dim, negative=True)


def _flat(source: Tensor, index: Tensor, *_: Any) -> None:
    _refuse_outside(index, source.numel(), 0, negative=True)


def _by_dimension(source: Tensor, indices: Sequence[Tensor | None], *_: Any) -> None:
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):  # a mask, whose shape torch checks
            dim += index.dim()
            continue
        if index is not None:
            _refuse_outside(index, source.shape[dim], dim, negative=True)
        dim += 1


def _masked(source: Tensor, mask: Tensor, values: Tensor, *_: Any) -> None:
    asked = int(mask.expand(torch.broadcast_shapes(mask.shape, source.shape)).sum())
    if asked > values.numel():
        raise IndexError(f"{asked} elements are to be replaced by {values.numel()}")


def _asserted(condition: Tensor, message: str = "", *_: Any) -> None:
    if not bool(condition):
        raise AssertionError(message or "an assertion of the model on its values fails")


_Check = Callable[..., None]
_CHECKS: Mapping[str, _Check] = MappingProxyType(
    {
        **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _rows),
        **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_"), _by_dimension),
        **dict.fromkeys(("_unsafe_index_put", "_index_put_impl_"), _by_dimension),
        **dict.fromkeys(("gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_"), _along),
        **dict.fromkeys(("index_reduce", "index_reduce_", "scatter", "scatter_"), _along),
        **dict.fromkeys(("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"), _along),
        **dict.fromkeys(("index_fill", "index_fill_"), _along_from_either_end),
        **dict.fromkeys(("take", "put", "put_"), _flat),
        **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked),
        "_assert_async": _asserted,
    }
)
"""What checks a call of an op, by the op's name in `torch.ops.aten`; it gets the positional arguments."""
