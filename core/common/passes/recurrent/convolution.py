"""Lift the short causal convolution of one token of each sequence, with the state before it and the activation after.

The spelling is that of transformers' `causal_conv1d_update`: the state and the token in a row, a depthwise convolution
of them, of which the last result is taken, and the row without its oldest input as the new state.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE
from core.common.passes import Index, NearMiss, Pass, PassContext, Refused, Site, Viewed, near_miss, same_size, view
from core.common.passes.recurrent.axes import seen
from core.common.passes.recurrent.states import interior, read_states

_WHOLE = slice(None)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the update around a convolution of a state and a token in a row, or None for any other convolution."""
    if view.kind(node) != "conv1d":
        return None
    row = view.operand(node, 0, "input")
    joined = view.without_exact_casts(row)[0] if isinstance(row, fx.Node) else None
    parts: Any = view.operand(joined, 0, "tensors") if joined is not None and view.kind(joined) == "cat" else ()
    if len(parts) != 2 or joined is None or not same_size((view.shape(parts[1]) or (0,))[-1], 1):
        return None
    try:
        return _site(node, row, joined, *parts)
    except Refused as refused:
        return near_miss(refused.node, refused.reason)


def _site(conv: fx.Node, row: fx.Node, joined: fx.Node, state: fx.Node, token: fx.Node) -> Site:
    if view.operand(joined, 1, "dim") not in (-1, 2) or len(view.shape(joined) or ()) != 3:
        raise Refused(joined, f"{joined} does not join along the last of three dimensions")
    _check_depthwise(conv, (view.shape(joined) or ())[1])
    length = (view.shape(state) or ())[-1]
    news = [user for each in dict.fromkeys((row, joined)) for user in each.users if _last(user, length)]
    if len(news) != 1:
        raise Refused(joined, f"the last {length} of {joined} are not taken as the new state")
    states = read_states(state, news[0])
    weight = seen(view.operand(conv, 1, "weight"), ends=_squeezed(view.operand(conv, 1, "weight")))
    assert weight is not None
    end, silu = _result(conv, token)
    bias, x = view.operand(conv, 2, "bias"), Viewed(token, (Index((_WHOLE, _WHOLE, 0)),))
    channels, taps = (view.shape(token) or (0, 0))[1], (view.shape(weight.node) or (0,))[-1]
    inputs = [*states.inputs, token, weight.node, *((bias,) if bias else ())]
    return Site(
        anchor=end,
        target=CAUSAL_CONV1D_UPDATE.overload,
        args=(x, states.tensor, weight.of(0, 2).as_input("the weight", (channels, taps)), bias),
        kwargs={**states.arguments, "silu": silu},
        interior=interior((end, *states.writers), inputs),
        outputs=(Viewed(end, (Index((_WHOLE, _WHOLE, 0)),)),),
    )


def _check_depthwise(conv: fx.Node, channels: Any) -> None:
    plain = {"stride": 1, "padding": 0, "dilation": 1}
    for place, (name, value) in enumerate(plain.items(), start=3):
        if view.operand(conv, place, name, value) not in (value, (value,), [value]):
            raise Refused(conv, f"{conv} has the {name} {view.operand(conv, place, name)}")
    if view.operand(conv, 6, "groups", 1) != channels:
        raise Refused(conv, f"{conv} mixes channels")


def _squeezed(node: Any) -> tuple[fx.Node, ...]:
    """Return the view (C, K) of a weight (C, 1, K) that models hand over, so that it is used as it is."""
    source = node.args[0] if view.kind(node) == "unsqueeze" else None
    return (source,) if isinstance(source, fx.Node) else ()


def _last(node: fx.Node, count: Any) -> bool:
    """Tell whether a node takes the last `count` along the last of three dimensions."""
    index: Any = node.args[1] if node.target is operator.getitem else ()
    if not isinstance(index, tuple) or len(index) not in (2, 3) or type(count) is not int:
        return False
    whole = index[0] is Ellipsis if len(index) == 2 else index[:2] == (_WHOLE, _WHOLE)
    return whole and index[-1] == slice(-count, None, None)


def _result(conv: fx.Node, token: fx.Node) -> tuple[fx.Node, bool]:
    """Return the node that ends the update, behind the last result, SiLU and a cast, and whether there is a SiLU."""
    end, silu = conv, False
    user = view.only_user(end)
    if not same_size((view.shape(conv) or (0,))[-1], 1):
        if user is None or not _last(user, 1):
            raise Refused(conv, f"not the last result of {conv} alone is used")
        end = user
    elif user is not None and _last(user, 1):
        end = user
    user = view.only_user(end)
    if user is not None and view.kind(user) == "silu" and view.operand(user, 1, "inplace", False) is False:
        end, silu = user, True
    user = view.only_user(end)
    if user is not None and view.source_of_cast(user) is end and view.dtype(user) == view.dtype(token):
        end = user
    if view.dtype(end) != view.dtype(token):
        raise Refused(end, f"the result {end} is {view.dtype(end)}, the token {view.dtype(token)}")
    return end, silu


LIFT_CAUSAL_CONV1D = Pass(
    name="lift_causal_conv1d",
    find=find,
    does="Lift every short causal convolution of tokens and the state before them, with that state.",
    before=("lift_gated_activation",),
)
