"""Join quantised linear layers that read the same codes (query, key and value; gate and up) into one call.

The codes are arranged for the processor once, and threads begin and end once. Weights stay where they are, and each
result has memory of its own: unlike layers that `merge_linears` merges, these cost nothing where there are many rows.
Sums are exact integers, so the results keep every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from core.common.ops.canonical import QUANTIZED_LINEAR
from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, calls, find_op, near_miss, value_of
from core_cpu import quantized
from core_cpu.passes.examples import layers_of_one_input

_SHARED = ("x_codes", "x_scale", "out_dtype")
_OWN = ("w_codes", "w_scale", "bias")


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the site of the layers from this one on that read the same codes; None where there is no further one."""
    if find_op(node.target) is not QUANTIZED_LINEAR or node in context.taken:
        return None
    given = calls.arguments(node, QUANTIZED_LINEAR)
    others = [each for each in _readers(given["x_codes"]) if each is not node and each not in context.taken]
    if not others:
        return None
    if reason := _unfit(node):
        return near_miss(node, reason)
    alike = [each for each in others if not _unfit(each) and _shared(each) == _shared(node)]
    if not alike:
        return near_miss(node, f"{others[0]} reads {given['x_codes']} too, and {_difference(node, others[0])}")
    group = (node, *alike[: _size(1 + len(alike)) - 1])
    context.taken.update(group)
    return _site(group)


def _site(group: Sequence[fx.Node]) -> Site:
    each = [calls.arguments(node, QUANTIZED_LINEAR) for node in group]
    own = [given.get(name) for given in each for name in _OWN]
    return Site(
        anchor=group[0],
        target=quantized.TOGETHER[len(group)],
        args=(each[0]["x_codes"], each[0]["x_scale"], *own),
        kwargs={"out_dtype": each[0]["out_dtype"]},
        interior=tuple(group),
        outputs=tuple(group),
    )


def _readers(codes: Any) -> Iterator[fx.Node]:
    """Yield the quantised layers that read codes, in the graph's order of uses."""
    for user in codes.users:
        if find_op(user.target) is QUANTIZED_LINEAR and calls.arguments(user, QUANTIZED_LINEAR)["x_codes"] is codes:
            yield user


def _size(num: int) -> int:
    """Return how many of so many layers the next call takes: none is to be left alone."""
    most = max(quantized.TOGETHER)
    return 2 if num == most + 1 else min(num, most)


def _shared(node: fx.Node) -> tuple[Any, ...]:
    given = calls.arguments(node, QUANTIZED_LINEAR)
    return tuple(given[name] for name in _SHARED)


def _unfit(node: fx.Node) -> str:
    """Return why a layer can be joined with no other, or ""."""
    given = calls.arguments(node, QUANTIZED_LINEAR)
    if zeros := [name for name in given if name.endswith("zero_point")]:
        return f"it has {zeros[0]}, which joined layers do not take"
    values = {name: value_of(value) if isinstance(value, fx.Node) else value for name, value in given.items()}
    return quantized.why_not(QUANTIZED_LINEAR.bind((), values)) or ""


def _difference(node: fx.Node, other: fx.Node) -> str:
    if reason := _unfit(other):
        return reason
    pairs = zip(_SHARED, _shared(node), _shared(other), strict=True)
    return next(f"has {name} {theirs}, not {own}" for name, own, theirs in pairs if own != theirs)


def expect(context: PassContext) -> int | None:
    """Count the codes that several layers read, where all of these are alike; None where any differ."""
    found = 0
    for codes in context.graph.nodes:
        layers = list(_readers(codes))
        if len(layers) > 1 and (len({_shared(each) for each in layers}) > 1 or any(map(_unfit, layers))):
            return None
        most = max(quantized.TOGETHER)
        found += -(-len(layers) // most) if len(layers) > 1 else 0
    return found


JOIN_QUANTIZED_LINEARS = Pass(
    name="join_quantized_linears",
    does="Join int8 layers that read the same codes into one call, with their weights where they are.",
    find=find,
    expect=expect,
    owner="core_cpu",
    after=("eliminate_common_subexpressions", "merge_linears", *LIFTS),
    examples=layers_of_one_input,
)
