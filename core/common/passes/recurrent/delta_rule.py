"""Lift the gated delta rule of one token of each sequence, as transformers writes it out for a step of decode.

The matcher starts at `value - (decayed * key).sum(-2)`, what the decayed state gets wrong of the token. It reads
back to the state, its decay and the key, and on to the new state, the query that reads it, and the result.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from core.common.ops.recurrent import GATED_DELTA_RULE
from core.common.passes import Index, NearMiss, Pass, PassContext, Refused, Site, Viewed, near_miss, same_size, view
from core.common.passes.recurrent.axes import Seen, seen
from core.common.passes.recurrent.states import interior, loaded, read_states

# Dimensions of a state: row, head, feature of the key, feature of the value.
_ROW, _HEAD, _KEY, _VALUE = range(4)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the update around `value - (decayed * key).sum(-2)`, or None where no decayed state is read like that."""
    if view.kind(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    memory = _read_of(node.args[1])
    if memory is None:
        return None
    for decayed, key in view.orders(memory):
        if view.kind(decayed) == "mul" and any(view.kind(user) == "add" for user in decayed.users):
            try:
                return _site(node, memory, decayed, key)
            except Refused as refused:
                return near_miss(refused.node, refused.reason)
    return None


def _read_of(node: Any) -> fx.Node | None:
    """Return the product that a node sums over the features of the key; None where it is no such sum."""
    product = node.args[0] if view.kind(node) == "sum" else None
    dims = view.operand(node, 1, "dim") if product is not None else None
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    plain = view.kind(product) == "mul" and view.operand(node, 2, "keepdim", False) is False and len(node.args) < 4
    if not plain or not set(node.kwargs) <= {"dim", "keepdim"} or len(view.shape(product) or ()) != 4:
        return None
    return product if tuple(dims) in ((-2,), (2,)) else None


def _site(missing: fx.Node, memory: fx.Node, decayed: fx.Node, key: Any) -> Site:
    source, fading, by_feature = _decay(decayed)
    correction, beta = _corrected(missing)
    key_seen = _vector(key)
    new = _new_state(decayed, correction, key_seen)
    states = read_states(source, new)
    product, query_seen = _reading(new, decayed, states.writers)
    end, places = _result(_sum_of(product))
    key_head, norm_eps, _ = _head(key_seen, scaled=False)
    query_head, query_eps, scale = _head(query_seen, scaled=True)
    if query_eps != norm_eps:
        raise Refused(product, f"eps of the norms of query and key differ: {query_eps} and {norm_eps}")
    value, sizes = _seen(missing.args[0]), view.shape(new) or ()
    keys = (sizes[_ROW], key_head.shape[_HEAD], sizes[_KEY])
    args = (
        query_head.of(_ROW, _HEAD, _KEY).as_input("the query", keys),
        key_head.of(_ROW, _HEAD, _KEY).as_input("the key", keys),
        value.as_input("the value", (sizes[_ROW], sizes[_HEAD], sizes[_VALUE])),
        fading.of(*range(2 + by_feature)).as_input("the decay", sizes[: 2 + by_feature]),
        beta.of(0, 1).as_input("beta", sizes[:2]),
    )
    nodes = [each.node for each in (query_head, key_head, value, fading, beta)]
    return Site(
        anchor=end,
        target=GATED_DELTA_RULE.overload,
        args=(*args, states.tensor),
        kwargs={"scale": scale, "norm_eps": norm_eps, **states.arguments},
        interior=interior((end, *states.writers, *places.writers), [*nodes, *states.inputs]),
        outputs=(Viewed(end, places.steps),),
    )


def _seen(node: Any) -> Seen:
    found = seen(node)
    if found is None:
        raise Refused(node, f"{node} is no tensor")
    return found


def _behind(part: Seen, source: Any) -> Seen:
    found = part.behind(source)
    if found is None:
        raise Refused(part.node, f"{part.node} does not keep the shape of {source}")
    return found


def _decay(decayed: fx.Node) -> tuple[fx.Node, Seen, bool]:
    """Return the state before its decay, the logarithm of the decay, and whether each feature of the key has its
    own."""
    for state, factor in view.orders(decayed):
        fading, source = seen(factor), loaded(state)
        if fading is None or source is None or view.kind(fading.node) != "exp":
            continue
        if not fading.repeats(_VALUE):
            raise Refused(fading.node, f"the decay {fading.node} differs between the features of a value")
        return source, _behind(fading, fading.node.args[0]), not fading.repeats(_KEY)
    raise Refused(decayed, f"{decayed} is not a state times exponentials")


def _corrected(missing: fx.Node) -> tuple[fx.Node, Seen]:
    """Return what is missing times the learning rate, and the rate: one for each head."""
    product = view.only_user(missing)
    beta = seen(view.other(product, missing)) if product is not None and view.kind(product) == "mul" else None
    if product is None or beta is None or len(beta.axes) != 3 or not beta.repeats(2):
        raise Refused(missing, f"{missing} is not multiplied by one number of each head")
    return product, beta


def _vector(node: Any) -> Seen:
    """Return what a state is multiplied by, the same for all features of the value."""
    found = _seen(node)
    if len(found.axes) != 4 or not found.repeats(_VALUE):
        raise Refused(found.node, f"{found.node} is no key of each head")
    return found


def _new_state(decayed: fx.Node, correction: fx.Node, key: Seen) -> fx.Node:
    """Return the sum of the decayed state and the outer product of key and correction."""
    new = next(user for user in decayed.users if view.kind(user) == "add")
    outer = view.other(new, decayed)
    for left, right in view.orders(outer) if view.kind(outer) == "mul" else ():
        if _seen(left) == key and seen(right, ends=(correction,)) == _outer_part(correction, key):
            return new
    raise Refused(new, f"{new} does not add the product of {key.node} and {correction}")


def _outer_part(correction: fx.Node, key: Seen) -> Seen:
    rows, heads, values = view.shape(correction) or (0, 0, 0)
    return Seen(correction, (0, 1, None, 2), (rows, heads, 1, values))


def _reading(new: fx.Node, decayed: fx.Node, writers: tuple[fx.Node, ...]) -> tuple[fx.Node, Seen]:
    """Return the product of the new state with the query, and the query."""
    products = [user for user in new.users if view.kind(user) == "mul"]
    if len(products) != 1:
        raise Refused(new, f"the new state {new} is not read by one query")
    return products[0], _vector(view.other(products[0], new))


def _sum_of(product: fx.Node) -> fx.Node:
    total = view.only_user(product)
    if total is None or _read_of(total) is not product:
        raise Refused(product, f"{product} is not summed over the features of the key")
    return total


def _head(part: Seen, *, scaled: bool) -> tuple[Seen, float, float]:
    """Return a query or key before scale, norm and repetition for the heads of values; eps of the norm, 0 for none; and
    the scale."""
    scale = 1.0
    while scaled and (factor := _factor(part.node)) is not None:
        part, scale = _behind(part, part.node.args[0 if isinstance(part.node.args[0], fx.Node) else 1]), scale * factor
    eps = 0.0
    normed = _normed(part, part.axes[_KEY])
    if normed is not None:
        part, eps = normed
    if view.kind(part.node) == "repeat_interleave" and type(view.operand(part.node, 1, "repeats")) is int:
        if view.operand(part.node, 2, "dim") != part.axes[_HEAD]:
            raise Refused(part.node, f"{part.node} does not repeat heads")
        part = _behind(part, part.node.args[0])
    return part, eps, scale


def _factor(node: fx.Node) -> float | None:
    """Return the number by which a node multiplies its tensor."""
    if view.kind(node) == "div" and len(node.args) == 2 and not node.kwargs and view.is_number(node.args[1]):
        return 1.0 / float(node.args[1])  # type: ignore[arg-type]  # a number, as was asked
    found = view.times_number(node)
    return None if found is None else found[1]


def _normed(part: Seen, axis: int | None) -> tuple[Seen, float] | None:
    """Return x and eps where the node is `x * rsqrt((x * x).sum(axis, keepdim=True) + eps)`."""
    for x, root in view.orders(part.node) if view.kind(part.node) == "mul" else ():
        parts = view.plus_number(view.inverse_root(root))
        if parts is None or view.kind(parts[0]) != "sum" or view.square(parts[0].args[0]) is not x:
            continue
        total, rank = parts[0], len(view.shape(x) or ())
        dims = view.operand(total, 1, "dim")
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        keeps = view.operand(total, 2, "keepdim", False) is True and "dtype" not in total.kwargs
        if axis is None or not keeps or [dim % rank for dim in dims] != [axis] or not math.isfinite(parts[1]):
            raise Refused(total, f"{total} is not the sum of squares of each head")
        return _behind(part, x), parts[1]
    return None


@dataclass(frozen=True, slots=True)
class _Places:
    """steps: the views of the result that the op gives. writers: nodes that put the result into a buffer."""

    steps: tuple[Index, ...] = ()
    writers: tuple[fx.Node, ...] = ()


def _result(total: fx.Node) -> tuple[fx.Node, _Places]:
    """Return the last node that holds the result (S, H, V) alone: behind a buffer for it, views and a cast."""
    user, end, index = view.only_user(total), total, (slice(None),) * 3
    writers: tuple[fx.Node, ...] = ()
    if user is not None and user.target is operator.setitem and user.args[2] is total:
        buffer: Any = user.args[0]
        index = user.args[1]  # type: ignore[assignment]  # checked next
        if not isinstance(buffer, fx.Node) or not _fills(buffer, index, total):
            raise Refused(user, f"{user} does not fill {buffer}")
        end, writers = buffer, (user,)
    start, cast = end, False
    while True:
        following = [each for each in end.users if each not in writers]
        if len(following) != 1 or cast:
            break
        after, cast = following[0], view.source_of_cast(following[0]) is end
        if not cast and (view.kind(after) in ("reshape", "view") or _seen(after).node is after):
            break
        end = after
    held = seen(end, exact=False, ends=(start,))
    if held is None or held.node is not start:
        raise Refused(end, f"{end} is read before it is whole")
    places = _dims_of(index, start)
    kept = [None if axis is None else places[axis] for axis in held.axes]
    found = [each for each in kept if each is not None]
    if found != sorted(found) or len(found) != 3:
        raise Refused(end, f"{end} holds the result in another order of dimensions")
    if len(kept) == 3:
        return end, _Places((), writers)
    return end, _Places((Index(tuple(0 if each is None else slice(None) for each in kept)),), writers)


def _fills(buffer: fx.Node, index: Any, total: fx.Node) -> bool:
    sizes = view.shape(buffer) or ()
    if not isinstance(index, tuple) or len(index) > len(sizes):
        return False
    index = (*index, *(slice(None),) * (len(sizes) - len(index)))
    one = all(
        item == slice(None) or (type(item) is int and same_size(size, 1))
        for item, size in zip(index, sizes, strict=True)
    )
    return one and sum(isinstance(item, slice) for item in index) == len(view.shape(total) or ())


def _dims_of(index: Any, start: fx.Node) -> list[int | None]:
    """Return for each dimension of what holds the result which of the result's it is; None for those of size 1."""
    rank = len(view.shape(start) or ())
    items = (*index, *(slice(None),) * (rank - len(index)))
    found: list[int | None] = []
    for item in items:
        found.append(sum(each is not None for each in found) if isinstance(item, slice) else None)
    return found


LIFT_GATED_DELTA_RULE = Pass(
    name="lift_gated_delta_rule",
    find=find,
    does="Lift every gated delta rule of a token of each sequence, or of several one by one, with its state.",
    before=("lift_gated_activation",),
)
