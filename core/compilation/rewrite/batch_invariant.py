"""`deterministic="batch"`: a row's result is the same in every bit, whatever else is in the batch.

What differs between batches is the order of sums. Products of matrices and attention choose it by their sizes, so they
run by implementations that declare `batch_invariant`, one for all sizes; nothing is timed, since two buckets could get
two of them. Of torch's own ops, those pass that compute each number from its own operands, or a row from itself: they
are listed in `invariant_ops.py`, less those that the device says its kernels compute otherwise (`OwnOps`), and a graph
with any other is refused. Functions that vector code approximates are called on whole vectors, in blocks below the size
from which torch shares work out: the end of a share, and the numbers of a tensor that fill no vector, are computed by
other code than the rest. Devices on which they are not say so too.

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

from core.common.lowering import OwnOps
from core.common.ops.declaration import declared_ops
from core.common.passes.constants import Constants
from core.compilation.implementations import REFERENCE, OpChoice, choose_implementations
from core.compilation.rewrite.invariant_ops import is_function, name_of, why_not
from core.errors import LoweringError, UsageError

if TYPE_CHECKING:
    from core.common.ops.implementation import OpImplementation
    from core.device import Device

BLOCK = 1 << 14
"""Numbers in a call of a function: half of what torch gives a thread at least (`at::internal::GRAIN_SIZE`)."""
VECTOR = 64
"""Calls are of multiples of so many numbers: twice the widest vector of 8-bit numbers torch's loops take at a time."""
NO_DIFFERENCE = OwnOps()
"""Of a device on which every op of torch that is listed is as listed."""
_BY_ROWS = frozenset({"core::argmax", "core::sample"})
"""Canonical ops whose references are made of what passes here."""


def check_lowering(lowering: str | None, providers: Mapping[str, str], device: Device, modes: Sequence[str]) -> str:
    """Return the lowering; raise `UsageError` where a program can't be batch-invariant whatever its model is.

    lowering, providers: as the user asked for them. modes: the first choice of each phase.
    """
    asked, known = 'deterministic="batch"', device.lowerings.batch_invariant
    if not known:
        found = f"device {device.name!r} declares no lowering as batch-invariant"
        raise UsageError(asked, found=found, remedy="use a device that does: docs/batch-invariance.md")
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


def chooser_of(device: Device, deterministic: str | None) -> Callable[..., tuple[OpChoice, ...]]:
    """Return what chooses the implementations of a graph's canonical ops: `choose_implementations` or the next one."""
    if deterministic is None:
        return choose_implementations
    return functools.partial(choose_invariant, own_ops=device.lowerings.own_ops)


def choose_invariant(
    graph: fx.GraphModule,
    implementations: Sequence[OpImplementation],
    *,
    mark: Collection[str] = (),
    providers: Mapping[str, str] = MappingProxyType({}),
    constants: Constants | None = None,
    own_ops: OwnOps = NO_DIFFERENCE,
) -> tuple[OpChoice, ...]:
    """Do what `choose_implementations` does, among those that declare themselves batch-invariant; `settle` the rest.

    own_ops: how the device computes torch's own ops.
    """
    own = tuple(replace(each, on_request=False) for each in implementations if each.batch_invariant)
    choices = choose_implementations(graph, own, mark=mark, providers=providers, constants=constants)
    settle(graph, choices, own, own_ops)
    return choices


def settle(
    graph: fx.GraphModule, choices: Sequence[OpChoice], chosen: Sequence[OpImplementation], own_ops: OwnOps
) -> None:
    """Make what is left of torch's ops in a graph batch-invariant, in place; its canonical ops have implementations.

    choices: of the graph's canonical ops. chosen: the implementations that were allowed. own_ops: as for
    `choose_invariant`. Raises `LoweringError` with the first ops that are not known to be.
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
        reason = why_not(node, own_ops.by_batch)
        if reason:
            wrong.setdefault(name_of(node), f"node {node.name!r} calls it{reason}")
        elif is_function(node) and not own_ops.functions_alike:
            _in_vectors(node)
    if wrong:
        raise LoweringError(
            'a graph of deterministic="batch"',
            found="; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:5]),
            remedy="run this model without it, or let the device's plugin declare a batch-invariant implementation",
        )
    graph.recompile()


def _in_vectors(node: fx.Node) -> None:
    """Have a node call its function on whole vectors, in blocks."""
    node.args = (name_of(node), *node.args)
    node.op, node.target = "call_function", in_vectors


def in_vectors(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an elementwise function by name, on multiples of `VECTOR` numbers, `BLOCK` at most.

    name: of a method of tensors, or of a function of torch or `torch.nn.functional`, whose arguments the others are.
    """
    function = _function(name)
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    # A tensor of no dimensions stays one: it takes part in promotion of dtypes differently.
    places = [place for place, each in given.items() if isinstance(each, Tensor) and each.dim()]
    wide = torch.broadcast_tensors(*(given[place] for place in places))
    if not wide or wide[0].numel() == 0:
        return function(*args, **kwargs)
    size, shape = wide[0].numel(), wide[0].shape
    padded = [torch.nn.functional.pad(each.reshape(-1), (0, -size % VECTOR), value=1) for each in wide]
    parts = []
    for some in zip(*(each.split(BLOCK) for each in padded), strict=True):
        given |= zip(places, some, strict=True)
        positional = [given[place] for place in range(len(args))]
        parts.append(function(*positional, **{key: given[key] for key in kwargs}))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:size].view(shape)


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    for owner in (torch.nn.functional, torch, Tensor, torch.special):
        found = getattr(owner, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise LookupError(name)
