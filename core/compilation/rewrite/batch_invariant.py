"""`deterministic="batch"`: a row's result is the same in every bit, whatever else is in the batch.

What differs between batches is the order of sums. Products of matrices and attention choose it by their sizes, so they
run by implementations that declare `batch_invariant`, one for all sizes; nothing is timed, since two buckets could get
two of them. Of torch's own ops, those pass that compute each number from its own operands, or a row from itself: they
are listed here, and a graph with any other is refused. Functions that vector code approximates are called on whole
vectors, in blocks below the size from which torch shares work out: the end of a share, and the numbers of a tensor that
fill no vector, are computed by other code than the rest.

The cause and the cure are He et al., Defeating Nondeterminism in LLM Inference (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.node_meta import value_of
from core.common.ops.declaration import declared_ops
from core.compilation.implementations import REFERENCE, OpChoice, choose_implementations
from core.errors import LoweringError, UsageError

if TYPE_CHECKING:
    from core.common.ops.implementation import OpImplementation
    from core.device import Device

BLOCK = 1 << 14
"""Numbers in a call of a function: half of what torch gives a thread at least (`at::internal::GRAIN_SIZE`)."""
VECTOR = 64
"""Calls are of multiples of so many numbers: twice the widest vector of 8-bit numbers torch's loops take at a time."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Each number from its own operands, rounded as IEEE 754 says, or moved.
_EXACT = _names("""
    add sub mul div truediv true_divide neg abs square rsub radd rmul rtruediv iadd imul isub reciprocal sqrt
    floordiv floor_divide mod remainder floor ceil round sign pos
    eq ne lt le gt ge and or xor invert not logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    where masked_fill clamp clamp_min clamp_max minimum maximum max min relu relu6 isnan isinf isfinite nan_to_num
    to type type_as float double half bfloat16 int long bool contiguous clone copy detach alias
    view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose permute t mT movedim swapaxes
    chunk split split_with_sizes unbind narrow select slice getitem setitem index index_select gather take_along_dim
    cat concat stack repeat repeat_interleave roll flip pad embedding one_hot tril triu unsafe_chunk
    size dim shape numel stride getattr item device dtype is_floating_point ndim len tuple list
    arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty tensor
    scalar_tensor linspace argmax argmin topk sort argsort searchsorted bucketize dropout
    index_copy index_put scatter fill sym_size sym_int sym_sum sym_max sym_min sym_ite sym_not _assert_async _check
""")
# A row from itself: torch sums along the last dimension in an order that only its length decides.
_ALONG_ROWS = _names("""
    mean sum amax amin var std var_mean softmax _softmax log_softmax logsumexp norm rms_norm layer_norm
    native_layer_norm group_norm cumsum any all prod
""")
# Functions of one tensor that vector code approximates.
_FUNCTIONS = _names("""
    exp exp2 expm1 log log2 log1p sin cos tan tanh sigmoid erf erfc silu gelu softplus mish elu selu celu logsigmoid
    hardswish hardsigmoid hardtanh leaky_relu quick_gelu pow rsqrt softsign
""")
_PRODUCTS = _names("matmul bmm mm addmm baddbmm einsum linear mv dot inner outer tensordot")
_BY_ROWS = frozenset({"core::argmax", "core::sample"})
"""Canonical ops whose references are made of what passes here."""


def check_lowering(lowering: str | None, providers: Mapping[str, str], device: Device, modes: Sequence[str]) -> str:
    """Return the lowering; raise `UsageError` where a program can't be batch-invariant whatever its model is.

    lowering, providers: as the user asked for them. modes: the first choice of each phase.
    """
    asked, known = 'deterministic="batch"', device.lowerings.batch_invariant
    if not known:
        found = f"device {device.name!r} declares no lowering as batch-invariant"
        raise UsageError(asked, found=found, remedy="use a device that does, such as 'cpu'")
    if lowering is not None and lowering not in known:
        found = f"lowering {lowering!r} is not declared batch-invariant on {device.name!r}"
        raise UsageError(asked, found=found, remedy=f"leave it out, or choose one of: {', '.join(sorted(known))}")
    wrong = sorted(set(modes) - {"full", "piecewise", "compile"})
    if wrong:
        found = f"mode {wrong[0]!r} runs the model's own code, whose products sum in an order that sizes decide"
        raise UsageError(asked, found=found, remedy="use a mode that traces the model")
    names = {(each.op, each.name) for each in device.ops if each.batch_invariant}
    for op, wanted in providers.items():
        if (op, wanted) not in names:
            others = ", ".join(sorted(name for of, name in names if of == op))
            raise UsageError(
                f"provider {op}={wanted} with {asked}",
                found=f"{wanted!r} is not declared batch-invariant",
                remedy=f"leave it out, or take one of: {others or 'none is declared for this op'}",
            )
    default = device.lowerings.default
    return lowering or (default if default in known else min(known))


def choose_invariant(
    graph: fx.GraphModule,
    implementations: Sequence[OpImplementation],
    *,
    mark: Collection[str] = (),
    providers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[OpChoice, ...]:
    """Do what `choose_implementations` does, among those that declare themselves batch-invariant; `settle` the rest."""
    own = tuple(replace(each, on_request=False) for each in implementations if each.batch_invariant)
    choices = choose_implementations(graph, own, mark=mark, providers=providers)
    settle(graph, choices, own)
    return choices


def settle(graph: fx.GraphModule, choices: Sequence[OpChoice], chosen: Sequence[OpImplementation]) -> None:
    """Make what is left of torch's ops in a graph batch-invariant, in place; its canonical ops have implementations.

    choices: of the graph's canonical ops. chosen: the implementations that were allowed. Raises `LoweringError` with
    the first ops that are not known to be.
    """
    wrong: dict[str, str] = {}
    for choice in choices:
        if choice.implementation == REFERENCE and choice.op not in _BY_ROWS:
            why = (
                "; ".join(f"{name}: {reason}" for name, reason in choice.refused) or "none is declared batch-invariant"
            )
            wrong.setdefault(choice.op, f"no batch-invariant implementation takes {choice.node} ({why})")
    known = declared_ops()
    targets = {each.fn for each in chosen} | {known[name].reference for name in _BY_ROWS if name in known}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            wrong.setdefault(str(node.target), "a module that was not traced")
        if node.op not in ("call_function", "call_method") or node.target in targets:
            continue
        name = _name(node)
        if name in _FUNCTIONS:
            _in_vectors(node)
        elif name not in _EXACT and name not in _ALONG_ROWS and not _is_scaling(node, name):
            wrong.setdefault(name, f"node {node.name!r} calls it" + _why(name))
    if wrong:
        raise LoweringError(
            'a graph of deterministic="batch"',
            found="; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:5]),
            remedy="run this model without it, or let the device's plugin declare a batch-invariant implementation",
        )
    graph.recompile()


def _why(name: str) -> str:
    return ", a product whose order of sums depends on its sizes" if name in _PRODUCTS else ", and it is not known"


def _name(node: fx.Node) -> str:
    """Return the name of what a node calls without its namespace: of `torch.mul`, `Tensor.mul` and `aten.mul.Tensor`
    alike."""
    target: Any = node.target
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
    else:
        name = getattr(target, "__name__", str(target))
    return name.strip("_") if name.startswith("__") or name.endswith("_") else name


def _is_scaling(node: fx.Node, name: str) -> bool:
    """Tell whether a product sums nothing, as that of frequencies and positions: its inner dimension is 1."""
    if name not in ("matmul", "bmm", "mm"):
        return False
    first = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return isinstance(first, Tensor) and first.dim() >= 2 and first.shape[-1] == 1


def _in_vectors(node: fx.Node) -> None:
    """Have a node call its function on whole vectors, in blocks."""
    name = node.target if node.op == "call_method" else _name(node)
    node.args = (str(name), *node.args)
    node.op, node.target = "call_function", in_vectors


def in_vectors(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an elementwise function by name, on multiples of `VECTOR` numbers, `BLOCK` at most.

    name: of a method of tensors, or of a function of torch or `torch.nn.functional`, whose arguments the others are.
    """
    function = _function(name)
    places = [place for place, each in enumerate(args) if isinstance(each, Tensor)]
    wide = torch.broadcast_tensors(*(args[place] for place in places))
    if not wide or wide[0].numel() == 0:
        return function(*args, **kwargs)
    size, shape = wide[0].numel(), wide[0].shape
    padded = [torch.nn.functional.pad(each.reshape(-1), (0, -size % VECTOR), value=1) for each in wide]
    given, parts = list(args), []
    for some in zip(*(each.split(BLOCK) for each in padded), strict=True):
        for place, part in zip(places, some, strict=True):
            given[place] = part
        parts.append(function(*given, **kwargs))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:size].view(shape)


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    for owner in (torch.nn.functional, torch, Tensor, torch.special):
        found = getattr(owner, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise LookupError(name)
