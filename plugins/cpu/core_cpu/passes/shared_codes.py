"""Join quantised linear layers that read the same codes (query, key and value; gate and up) into one call.

The codes are arranged for the processor once, and threads begin and end once. Weights stay where they are, and each
result has memory of its own: unlike layers that `merge_linears` merges, these cost nothing where there are many rows.
Sums are exact integers, so the results keep every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._ops import OpOverload

from core.common.ops.quantize import QUANTIZED_LINEAR
from core.common.passes import LIFTS, NearMiss, Pass, PassContext, Site, calls, find_op, near_miss, value_of
from core_cpu.passes.examples import layers_of_one_input

Condition = Callable[[Any], str | None]
"""Returns why a kernel can't take a call of a canonical op, None where it can."""

_SHARED = ("x_codes", "x_scale", "out_dtype")
_OWN = ("w_codes", "w_scale", "bias")


@dataclass(frozen=True, slots=True)
class Joining:
    """The ops that take several layers, by how many these are, and the condition of the kernel for one layer."""

    together: Mapping[int, OpOverload]
    why_not: Condition

    def find(self, context: PassContext, node: fx.Node) -> Site | NearMiss | None:
        """Return the site of the layers from this one on that read the same codes; None where there is no other."""
        if find_op(node.target) is not QUANTIZED_LINEAR or node in context.taken:
            return None
        codes = _given(node)["x_codes"]
        others = [each for each in _readers(codes) if each is not node and each not in context.taken]
        if not others:
            return None
        if reason := self._unfit(node):
            return near_miss(node, reason)
        alike = [each for each in others if not self._unfit(each) and _shared(each) == _shared(node)]
        if not alike:
            return near_miss(node, f"{others[0]} reads {codes} too, and {self._difference(node, others[0])}")
        group = (node, *alike[: self._size(1 + len(alike)) - 1])
        context.taken.update(group)
        return self._site(group)

    def expect(self, context: PassContext) -> int | None:
        """Count the calls that the layers of one input each become; None where layers of one input differ."""
        found = 0
        for codes in context.graph.nodes:
            layers = list(_readers(codes))
            if len(layers) > 1:
                if len({_shared(each) for each in layers}) > 1 or any(map(self._unfit, layers)):
                    return None
                found += -(-len(layers) // max(self.together))
        return found

    def _site(self, group: Sequence[fx.Node]) -> Site:
        each = [_given(node) for node in group]
        own = [given.get(name) for given in each for name in _OWN]
        return Site(
            anchor=group[0],
            target=self.together[len(group)],
            args=(each[0]["x_codes"], each[0]["x_scale"], *own),
            kwargs={"out_dtype": each[0]["out_dtype"]},
            interior=tuple(group),
            outputs=tuple(group),
        )

    def _size(self, num: int) -> int:
        """Return how many of so many layers the next call takes: none is to be left alone."""
        most = max(self.together)
        return 2 if num == most + 1 else min(num, most)

    def _unfit(self, node: fx.Node) -> str:
        """Return why a layer can be joined with no other, or ""."""
        given = _given(node)
        if zeros := [name for name in given if name.endswith("zero_point")]:
            return f"it has {zeros[0]}, which joined layers do not take"
        values = {name: value_of(value) if isinstance(value, fx.Node) else value for name, value in given.items()}
        return self.why_not(QUANTIZED_LINEAR.bind((), values)) or ""

    def _difference(self, node: fx.Node, other: fx.Node) -> str:
        if reason := self._unfit(other):
            return reason
        pairs = zip(_SHARED, _shared(node), _shared(other), strict=True)
        return next(f"has {name} {theirs}, not {own}" for name, own, theirs in pairs if own != theirs)


def _given(node: fx.Node) -> dict[str, Any]:
    return calls.arguments(node, QUANTIZED_LINEAR)


def _shared(node: fx.Node) -> tuple[Any, ...]:
    return tuple(_given(node)[name] for name in _SHARED)


def _readers(codes: Any) -> Iterator[fx.Node]:
    """Yield the quantised layers that read codes, in the graph's order of uses."""
    for user in codes.users:
        if find_op(user.target) is QUANTIZED_LINEAR and _given(user)["x_codes"] is codes:
            yield user


def join_quantized_linears(together: Mapping[int, OpOverload], why_not: Condition) -> Pass:
    """Return the pass; its arguments are those of `Joining`."""
    joining = Joining(together, why_not)
    return Pass(
        name="join_quantized_linears",
        does="Join int8 layers that read the same codes into one call, with their weights where they are.",
        find=joining.find,
        expect=joining.expect,
        owner="core_cpu",
        after=("eliminate_common_subexpressions", "merge_linears", "fuse_gate_up", *LIFTS),
        examples=layers_of_one_input,
    )
