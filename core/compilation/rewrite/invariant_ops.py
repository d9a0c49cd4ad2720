"""Which of torch's own ops give a row the same bits whatever other rows a call has, for `deterministic="batch"`.

Each number of a result is computed from its own operands, or a row from itself. Reductions are along the last
dimensions only: over others, torch adds up what fills its vectors in another order than the rest. A single row of so
many numbers that torch shares it out among threads is another sum too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from core.common.node_meta import value_of

SHARED_OUT = 1 << 15
"""Numbers from which torch shares the sum of a single row out among threads (`at::internal::GRAIN_SIZE`)."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Each number from its own operands, rounded as IEEE 754 says, or moved, or chosen.
_EXACT = _names("""
    add sub mul div truediv true_divide neg abs square rsub radd rmul rtruediv iadd imul isub reciprocal sqrt
    floordiv floor_divide mod remainder floor ceil round sign pos
    eq ne lt le gt ge and or xor invert not logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    where masked_fill clamp clamp_min clamp_max minimum maximum max min amax amin any all relu relu6
    isnan isinf isfinite nan_to_num
    to type type_as float double half bfloat16 int long bool contiguous clone copy detach alias
    view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose permute t mT movedim swapaxes
    chunk split split_with_sizes unbind narrow select slice getitem setitem index index_select gather take_along_dim
    cat concat stack repeat repeat_interleave roll flip pad embedding one_hot tril triu unsafe_chunk
    size dim shape numel stride getattr item device dtype is_floating_point ndim len tuple list
    arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty tensor
    scalar_tensor linspace argmax argmin topk sort argsort searchsorted bucketize dropout
    index_copy index_put scatter fill sym_size sym_int sym_sum sym_max sym_min sym_ite sym_not _assert_async _check
""")
REDUCTIONS = _names("mean sum var std var_mean softmax _softmax log_softmax _log_softmax logsumexp norm cumsum prod")
"""Take the dimensions that they reduce."""
_WHOLE = _names("mean sum var std var_mean logsumexp norm prod")
"""Reductions that torch may share out among threads where the result is a single number."""
_NORMS = _names("rms_norm layer_norm native_layer_norm group_norm")
"""Reductions whose dimensions are always the last."""
FUNCTIONS = _names("""
    exp exp2 expm1 log log2 log1p sin cos tan tanh sigmoid erf erfc silu gelu softplus mish elu selu celu logsigmoid
    hardswish hardsigmoid hardtanh leaky_relu quick_gelu pow rsqrt softsign
""")
"""Functions of one tensor that vector code approximates."""
_PRODUCTS = _names("matmul bmm mm addmm baddbmm einsum linear mv dot inner outer tensordot")


def why_not(node: fx.Node, by_batch: Collection[str] = ()) -> str:
    """Return why a call of one of torch's ops does not keep the bits of rows, as told behind "calls it"; "" if it does.

    by_batch: names of ops whose order the number of rows decides on the device, of floating-point results. Calls for
    which `is_function` holds do only as `in_vectors` has them, unless the device says otherwise (`OwnOps`).
    """
    name = name_of(node)
    if name in by_batch and not _is_of_whole_numbers(node):
        return ", and this device's kernels order what it sums or compares by the number of rows"
    if name in FUNCTIONS:
        return ", and writes its result in place" if _in_place(node) else ""
    if name in REDUCTIONS:
        return _why_not_along_rows(node, name)
    if _adds_up(node):
        return ", and adds up what goes to one place, in an order that sizes decide"
    if name in _PRODUCTS:
        return "" if _is_scaling(node, name) else ", a product whose order of sums depends on its sizes"
    return "" if name in _EXACT or name in _NORMS or _asks_the_host(node) else ", and it is not known"


def _asks_the_host(node: fx.Node) -> bool:
    """Tell whether a call neither takes nor gives a tensor, as one that asks for a device's compute capability."""
    found = value_of(node)
    values = [found, *(value_of(each) for each in node.all_input_nodes)]
    none = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))
    return none and (found is not None or not node.users)


def is_function(node: fx.Node) -> bool:
    """Tell whether a call computes each number by code that depends on where it stands: a function, or x + alpha y."""
    value = value_of(node)
    if value is not None and not isinstance(value, Tensor):
        return False  # sizes
    return name_of(node) in FUNCTIONS or bool(node.kwargs.get("alpha", 1) != 1)


def name_of(node: fx.Node) -> str:
    """Return the name of what a node calls without its namespace: of `torch.mul`, `Tensor.mul` and `aten.mul.Tensor`
    alike."""
    name = _spelled(node)
    return name.strip("_") if name.startswith("__") or name.endswith("_") else name


def _spelled(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def _in_place(node: fx.Node) -> bool:
    spelled = _spelled(node)
    written = spelled.endswith("_") and not spelled.endswith("__")
    return (
        written or bool(node.kwargs.get("inplace")) or "out" in node.kwargs or any(each is True for each in node.args)
    )


def _adds_up(node: fx.Node) -> bool:
    """Tell whether a call that moves numbers adds those that go to one place."""
    last = node.args[-1] if len(node.args) > 3 else None
    return name_of(node) in ("index_put", "scatter") and (
        bool(node.kwargs.get("accumulate")) or node.kwargs.get("reduce") is not None or last is True
    )


def _is_of_whole_numbers(node: fx.Node) -> bool:
    """Tell whether a call's result is a tensor of whole numbers, which add up alike in any order."""
    value = value_of(node)
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _why_not_along_rows(node: fx.Node, name: str) -> str:
    if _is_of_whole_numbers(node):
        return ""
    source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    given = value_of(source)
    if not isinstance(given, Tensor):
        return ", over dimensions that are not known"
    found = _dimensions(node, name, given.dim())
    if not found or found != set(range(given.dim() - len(found), given.dim())):
        return ", over other dimensions than the last"
    size = math.prod(given.shape[place] for place in found)
    if name in _WHOLE and not (isinstance(size, int) and size < SHARED_OUT):
        return f", over {size} numbers, which threads share where there is one row"
    return ""


def _dimensions(node: fx.Node, name: str, rank: int) -> set[int] | None:
    """Return the dimensions that a call reduces; None where it names none."""
    place = 2 if name == "norm" else 1
    named = node.kwargs.get("dim", node.kwargs.get("axis", node.args[place] if len(node.args) > place else None))
    many: Any = named if isinstance(named, list | tuple) else [named]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in many):
        return None
    return {each % rank for each in many} if rank else None


def _is_scaling(node: fx.Node, name: str) -> bool:
    """Tell whether a product sums nothing, as that of frequencies and positions: its inner dimension is 1."""
    if name not in ("matmul", "bmm", "mm"):
        return False
    first = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return isinstance(first, Tensor) and first.dim() >= 2 and first.shape[-1] == 1
