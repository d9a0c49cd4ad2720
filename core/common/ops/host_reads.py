"""Which calls of a graph make the host wait for values of an accelerator, which no captured graph can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_map_only

from core.common.ops.moe.experts import can_group, in_host_memory

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def reads_host(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Tell whether a call reads values of an accelerator's tensors on the host; in the host's memory that is free.

    args and kwargs: fake values in place of tensors. result: the fake value of the result. An op with Python code is
    run on tensors without values; what ops of other libraries do unseen counts as no read.
    """
    if all(map(in_host_memory, _device_types(args, kwargs))):
        return False
    sizes = (each for leaf in tree_leaves(result) for each in (leaf.shape if isinstance(leaf, Tensor) else (leaf,)))
    if any(type(each) is not int and isinstance(each, _SYMBOLIC) and free_unbacked_symbols(each) for each in sizes):
        return True
    if target in _GROUPED_PRODUCTS:
        return not can_group(*args[:2])
    op = _overload(target)
    if op is None:
        return False
    return not _TAGS.isdisjoint(op.tags) or _needs_values(op, args, kwargs)


_GROUPED_PRODUCTS = (
    torch._grouped_mm,
    torch.ops.aten._grouped_mm.default,
    getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm),
)
"""Read where the groups end on the host, unless there is a kernel for their operands."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _device_types(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    return [each.device.type for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]


def _overload(target: Any) -> OpOverload[..., Any] | None:
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else None
    return target if isinstance(target, OpOverload) else None


def _needs_values(op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the op's own code, where it is Python, fails on tensors that have no values."""
    definition = _maybe_get_opdef(op)
    if definition is None:
        return False
    code = definition._backend_fns.get(_device_types(args, kwargs)[0], definition._backend_fns.get(None))
    if code is None:
        return False
    # Code that asks for an address instead, such as a kernel's launch, must not get one.
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False), FakeTensorMode():
        given = tree_map_only(Tensor, _without_values, (args, dict(kwargs)))
        try:
            code(*given[0], **given[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
        except Exception:  # it does more than torch can follow
            return False
    return False


def _without_values(like: Tensor) -> Tensor:
    """Return a fake tensor of the mode that is on, each symbolic size as it was at the trace."""
    sizes, strides = map(_hints, (like.shape, like.stride()))
    return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)


def _hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [each.node.hint if isinstance(each, torch.SymInt) else each for each in sizes]
