"""Give layers that quantise one input by equal static scales one shared scale, so that they share the codes.

Calibration gives query, key and value equal but separate scales, since all three saw the same values. Read from one
tensor they are one quantisation, which `eliminate_common_subexpressions` then computes once. Scales are compared when
the graph is compiled: a scale that is loaded later reaches the codes only through the tensor that is read.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from core.common.passes import Constants, Guards, NearMiss, Pass, PassContext, PassResult, Writes, near_miss, site_name
from core.common.passes.quantize.chain import Quantize, read_quantize
from core.common.passes.quantize.examples import equal_scales


def run(context: PassContext) -> PassResult:
    """Give each static quantisation the scale of an earlier one of the same input, where their scales are equal."""
    constants, writes = context.constants, context.analysis("writes")
    assert constants is not None  # the guard has seen to it
    seen: dict[tuple[fx.Node, str], list[Quantize]] = {}
    sites: list[str] = []
    misses: list[NearMiss] = []
    for node in context.graph.nodes:
        call = read_quantize(node)
        if call is None or _value(call.scale, constants, writes) is None:
            continue
        earlier = seen.setdefault((call.x, str(sorted(call.options.items()))), [])
        own = [each for each in earlier if each.scale is call.scale]
        alike = [each for each in earlier if _equal(each, call, constants)]
        if alike and not own:
            assert call.scale is not None and alike[0].scale is not None
            node.replace_input_with(call.scale, alike[0].scale)
            sites.append(site_name(node))
        elif earlier and not own:
            misses.append(near_miss(node, f"{earlier[0].node} quantises {call.x} too, by another scale"))
        if not alike:
            earlier.append(call)
    return PassResult(matched=len(sites), sites=tuple(sites), near_misses=tuple(misses))


def _value(scale: fx.Node | None, constants: Constants, writes: Writes) -> Tensor | None:
    """Return the tensor of a scale, if it is a constant that the graph does not write."""
    value = constants.value(scale)
    return None if value is None or scale is None or writes.writers(scale) else value


def _equal(one: Quantize, other: Quantize, constants: Constants) -> bool:
    left, right = constants.value(one.scale), constants.value(other.scale)
    assert left is not None and right is not None  # `_value` has seen both
    alike = (left.dtype, left.device, left.shape) == (right.dtype, right.device, right.shape)
    return alike and torch.equal(left, right)


SHARE_QUANTIZE_SCALES = Pass(
    name="share_quantize_scales",
    does="Give each static quantisation the scale of an earlier one of the same input, where their scales are equal.",
    run=run,
    before=("eliminate_common_subexpressions",),
    guards=Guards(constants=True),
    examples=equal_scales,
)
"""The sharing of equal static scales; `eliminate_common_subexpressions` joins the codes that become equal."""
