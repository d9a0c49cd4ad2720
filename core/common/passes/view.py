"""A canonical view of graph nodes: what a node computes, whichever way it is spelled.

`x.pow(2)`, `x * x` and `torch.square(x)` are one thing here, as are `torch.add`, `+` and `aten.add.Tensor`, and operand
order where order means nothing. The view changes nothing in the graph; matchers ask it about nodes. Only spellings that
are equal in every bit are joined, so a rewrite may rely on them: a cast through a narrower dtype is not the identity.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from core.common.node_meta import value_of
from core.common.passes.values.sizes import same_sizes

Operand = Any
"""An operand: a node, a Python number, or another literal of the graph."""


def _spellings() -> dict[Any, str]:
    """Return target -> kind for functions; methods are looked up by name."""
    table: dict[Any, str] = {
        operator.add: "add",
        operator.sub: "sub",
        operator.mul: "mul",
        operator.truediv: "div",
        operator.pow: "pow",
        operator.neg: "neg",
        operator.gt: "gt",
        operator.getitem: "getitem",
        operator.matmul: "matmul",
        F.silu: "silu",
        F.gelu: "gelu",
        F.relu: "relu",
        F.linear: "linear",
        torch._C._nn.gelu: "gelu",
        torch._C._nn.linear: "linear",
        F.softmax: "softmax",
        F.sigmoid: "sigmoid",
        F.softplus: "softplus",
        torch._C._nn.softplus: "softplus",
        operator.floordiv: "floor_divide",
        F.scaled_dot_product_attention: "sdpa",
        torch._C._nn.scaled_dot_product_attention: "sdpa",
        torch.ops.aten.scaled_dot_product_attention.default: "sdpa",
        F.dropout: "dropout",
        torch.rms_norm: "rms_norm",
        F.rms_norm: "rms_norm",
        F.layer_norm: "layer_norm",
        F.normalize: "normalize",
    }
    for name in _NAMES:
        function = getattr(torch, name, None)
        if function is not None:
            table[function] = name
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith(("out", "_")):
                table[getattr(packet, overload)] = name
    table[torch.concat] = table[torch.concatenate] = "cat"
    table[torch.ops.aten._unsafe_view.default] = "view"
    table[torch.ops.aten._to_copy.default] = "cast"
    table[torch.ops.prims.convert_element_type.default] = "cast"
    return table


# The same name as a torch function, as a tensor method and as an aten op.
_NAMES = (
    *("add", "sub", "mul", "div", "pow", "square", "sqrt", "rsqrt", "reciprocal", "neg", "mean", "sum"),
    *("cat", "chunk", "split", "stack", "sigmoid", "relu", "tanh", "exp", "silu", "gelu", "softmax"),
    *("matmul", "bmm", "unsqueeze", "transpose", "reshape", "view", "flatten", "expand", "permute", "topk"),
    *("unflatten", "repeat_interleave", "clone", "view_as_complex", "view_as_real"),
    *("gather", "masked_fill", "clamp", "sort", "histc", "cumsum", "floor_divide", "logical_not"),
    *("clamp_max", "clamp_min", "narrow", "unbind", "select", "slice", "split_with_sizes", "squeeze", "contiguous"),
    *("layer_norm", "mm", "addmm", "baddbmm", "_grouped_mm", "norm", "linalg_vector_norm", "expand_as"),
    *("where", "einsum", "dropout", "repeat", "amax", "max", "_softmax", "swapaxes", "logsumexp", "maximum"),
    *("conv1d", "index_select", "t", "gt", "log", "cos", "sin"),
)
_METHODS = {name: name for name in _NAMES} | {
    **dict.fromkeys(("to", "type_as", "type", "float", "half", "bfloat16", "double"), "cast"),
    **dict.fromkeys(("__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("__add__", "__radd__"), "add"),
    "concat": "cat",
}
_FUNCTIONS = _spellings()


def dtype(node: Operand) -> torch.dtype | None:
    """Return the dtype of a node's tensor, or None for anything else."""
    tensor = value_of(node)
    return tensor.dtype if isinstance(tensor, Tensor) else None


def shape(node: Operand) -> tuple[Any, ...] | None:
    """Return the shape of a node's tensor, symbolic sizes included, or None for anything else."""
    tensor = value_of(node)
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else None


def same_shape(first: Operand, second: Operand) -> bool:
    """Return whether both are tensors of one shape; symbolic sizes count where they are known to be equal."""
    left, right = shape(first), shape(second)
    return left is not None and right is not None and same_sizes(left, right)


def kind(node: Operand) -> str:
    """Return what the node computes ("mul", "cast", "rsqrt", …), or "" if the view has no name for it."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_function":
        found = _FUNCTIONS.get(node.target, "")
    elif node.op == "call_method":
        found = _METHODS.get(str(node.target), "")
    else:
        return ""
    # `.to(device)` and `.to(other, copy=True)` are no casts of a dtype alone, and `.view(dtype)` makes other numbers.
    if found == "cast" and not _is_cast(node):
        return ""
    return "" if found == "view" and dtype(node) != dtype(operand(node, 0, "self")) else found


def _is_cast(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    before, after = value_of(source), value_of(node)
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.device == after.device


def operand(node: fx.Node, index: int, name: str, default: Operand = None) -> Operand:
    """Return an operand given by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def orders(node: fx.Node) -> Iterator[tuple[Operand, Operand]]:
    """Yield the two operands of a commutative node in both orders; nothing for scaled forms (`alpha`) or others."""
    if len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        yield first, second
        yield second, first


def other(node: fx.Node, known: fx.Node) -> Operand:
    """Return the operand of a commutative node that is not `known`, or None where it does not have exactly two."""
    for first, second in orders(node):
        if first is known:
            return second
    return None


_RESHAPED = frozenset({"t", "transpose", "permute", "unsqueeze", "squeeze", "view", "reshape", "getitem", "select"})


def behind_views(node: fx.Node) -> fx.Node:
    """Return the node whose numbers a node shows, in another shape or order or a part of them, or itself."""
    while kind(node) in _RESHAPED:
        node = node.all_input_nodes[0]
    return node


def source_of_cast(node: Operand) -> fx.Node | None:
    """Return what a cast reads, or None if the node is no cast."""
    return node.args[0] if kind(node) == "cast" else None


def without_exact_casts(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Strip casts that keep every value (to the same or a wider floating dtype); return source and casts stripped.

    The last cast stripped comes first. A cast through a narrower dtype rounds and is never stripped.
    """
    stripped = []
    current = node
    while (source := source_of_cast(current)) is not None and is_exact(dtype(source), dtype(current)):
        stripped.append(current)
        current = source
    return current, tuple(stripped)


def before_casts(node: fx.Node, ends: Collection[fx.Node]) -> fx.Node:
    """Return the source of a chain of casts that keep every value, looking no further back than one of `ends`.

    A cast that reads its dtype off another tensor (`type_as`) is not looked through.
    """
    while node not in ends and len(node.all_input_nodes) == 1:
        source = source_of_cast(node)
        if source is None or not is_exact(dtype(source), dtype(node)):
            break
        node = source
    return node


_WIDENS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def is_exact(before: torch.dtype | None, after: torch.dtype | None) -> bool:
    """Return whether a cast between these floating dtypes keeps every value."""
    return before is not None and (before == after or (before, after) in _WIDENS)


def square(node: Operand) -> fx.Node | None:
    """Return x if the node is x squared, however spelled."""
    found = kind(node)
    if found == "square":
        return node.args[0]  # type: ignore[no-any-return]
    if found == "pow" and operand(node, 1, "exponent") == 2:
        return node.args[0]  # type: ignore[no-any-return]
    if found == "mul" and len(node.args) == 2 and node.args[0] is node.args[1]:
        return node.args[0]  # type: ignore[no-any-return]
    return None


def inverse_root(node: Operand) -> fx.Node | None:
    """Return x if the node is 1 / sqrt(x), spelled as one node or two."""
    found = kind(node)
    if found == "rsqrt" or (found == "pow" and operand(node, 1, "exponent") == -0.5):
        return node.args[0]  # type: ignore[no-any-return]
    root: Operand = None
    if found == "reciprocal":
        root = node.args[0]
    elif found == "div" and node.args[0] in (1, 1.0):
        root = node.args[1]
    return root.args[0] if kind(root) == "sqrt" else None


def last_dim_mean(node: Operand) -> fx.Node | None:
    """Return x if the node is the mean of x over its last dimension, which is kept, taken in x's own dtype."""
    if kind(node) == "unsqueeze" and operand(node, 1, "dim") in (-1, len(shape(node) or ()) - 1):
        return _mean(node.args[0], keeps=False)
    return _mean(node, keeps=True)


def _mean(node: Operand, *, keeps: bool) -> fx.Node | None:
    if kind(node) != "mean":
        return None
    source = node.args[0]
    rank = len(shape(source) or ())
    dims = operand(node, 1, "dim")
    dims = tuple(dims) if isinstance(dims, (list, tuple)) else (dims,)
    as_wanted = operand(node, 2, "keepdim", False) is keeps and node.kwargs.get("dtype") in (None, dtype(source))
    return source if as_wanted and len(dims) == 1 and dims[0] in (-1, rank - 1) and rank else None


def plus_number(node: Operand) -> tuple[fx.Node, float] | None:
    """Return (x, number) if the node is x + number in either order."""
    return _with_number(node) if kind(node) == "add" else None


def times_number(node: Operand, known: str = "") -> tuple[fx.Node, float] | None:
    """Return (x, number) if the node is x * number in either order. known: the node's kind, if the caller knows it."""
    return _with_number(node) if (known or kind(node)) == "mul" else None


def _with_number(node: fx.Node) -> tuple[fx.Node, float] | None:
    pairs = (pair for pair in orders(node) if isinstance(pair[0], fx.Node) and is_number(pair[1]))
    return next(((x, float(number)) for x, number in pairs), None)


def swapped_dims(node: Operand) -> tuple[int, int] | None:
    """Return the two dimensions that a transposition swaps, counted from the front; None for any other node."""
    dims = (operand(node, 1, "dim0"), operand(node, 2, "dim1")) if kind(node) in ("transpose", "swapaxes") else ()
    rank = len(shape(node) or ())
    if not rank or not dims or not all(type(dim) is int for dim in dims):
        return None
    return dims[0] % rank, dims[1] % rank


def is_number(operand: Operand) -> bool:
    """Return whether an operand is a plain Python number."""
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the one node that uses this one, or None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def between(end: fx.Node, *inputs: Operand) -> tuple[fx.Node, ...]:
    """Return the nodes from which `end` is computed, `end` included, back to the inputs, which are left out.

    For matchers that have checked that every path back from `end` ends at these inputs.
    """
    found: dict[fx.Node, None] = {}
    stack = [end]
    while stack:
        node = stack.pop()
        if node not in found and node not in inputs:
            found[node] = None
            # A cast's second tensor only gives its dtype, and sizes are no part of the computed value.
            sources = node.all_input_nodes if kind(node) != "cast" else node.all_input_nodes[:1]
            stack += [source for source in sources if not isinstance(value_of(source), (torch.SymInt, int))]
    return tuple(found)
