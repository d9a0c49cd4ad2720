"""What the matchers of both forms of a selective state space read: factors, steps, and the result with its skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from core.common.passes import Refused, view
from core.common.passes.recurrent.axes import Seen, seen


def seen_of(node: Any, *, exact: bool = True) -> Seen:
    """Return what a tensor's node shows; raise `Refused` for any other."""
    found = seen(node, exact=exact)
    if found is None:
        raise Refused(node, f"{node} is no tensor")
    return found


def added(node: Any, step: Seen, feature: int) -> tuple[Seen, Seen]:
    """Return x and B of `dt * B * x`, in whatever order. feature: the dimension of features, before that of states."""
    factors = list(_factors(node, feature + 2)) if isinstance(node, fx.Node) else []
    found = [factor for factor in factors if factor != step]
    if len(factors) != 3 or len(found) != 2:
        raise Refused(node, f"{node} is not the product of step, B and x")
    keys = [factor for factor in found if factor.repeats(feature)]
    values = [factor for factor in found if factor.repeats(feature + 1)]
    if len(keys) != 1 or len(values) != 1 or keys == values:
        raise Refused(node, f"{node} is not the product of a number of state and a feature")
    return values[0], keys[0]


def _factors(node: fx.Node, rank: int) -> list[Seen]:
    """Return the factors of a product of this rank."""
    part = seen_of(node, exact=False)
    if view.kind(part.node) != "mul" or part.axes != tuple(range(rank)):
        return [seen_of(node)]
    operands = [each for each in part.node.args if isinstance(each, fx.Node)]
    return [factor for operand in operands for factor in _factors(operand, rank)]


def readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads a node, or a cast of it."""
    found = []
    for user in node.users:
        found += [user] if view.source_of_cast(user) is not node else [user, *user.users]
    return found


def result(out: fx.Node, x: Seen, token: Seen, is_skip: Callable[[Seen], bool]) -> tuple[fx.Node, Seen | None]:
    """Return the node that ends the update, behind the skip and casts, and D of `out + x * D`; None without.

    token: x, as it is multiplied with D. is_skip: whether a factor may be D.
    """
    skip: Seen | None = None
    user = view.only_user(out)
    other: Any = view.other(user, out) if user is not None and view.kind(user) == "add" else None
    for factor, rates in view.orders(other) if view.kind(other) == "mul" else ():
        found = seen(rates, exact=False)
        if seen_of(factor) == token and found is not None and is_skip(found) and user is not None:
            skip, out = found, user
            break
    end, wanted = out, view.dtype(x.node)
    following = view.only_user(end)
    while following is not None and view.source_of_cast(following) is end and view.dtype(following) == wanted:
        end, following = following, view.only_user(following)
    if view.dtype(end) != wanted:
        raise Refused(end, f"the result {end} is {view.dtype(end)}, x is {wanted}")
    return end, skip


def before_softplus(step: Seen) -> tuple[Seen, bool]:
    """Return what the step is the softplus of, or the step, and whether it is one."""
    node = step.node
    if view.kind(node) != "softplus":
        return step, False
    if view.operand(node, 1, "beta", 1.0) != 1 or view.operand(node, 2, "threshold", 20.0) != 20:
        raise Refused(node, f"{node} is not the softplus of its input alone")
    return behind(step, node.args[0]), True


def before_bias(step: Seen, is_bias: Callable[[Seen, int], bool]) -> tuple[Seen, Seen | None]:
    """Return dt, and the bias that is added to it; None without. is_bias: takes a term, and the rank of the other."""
    for dt, term in view.orders(step.node) if view.kind(step.node) == "add" else ():
        found = seen(term, exact=False)
        if found is not None and is_bias(found, len(view.shape(dt) or ())):
            return behind(step, dt), found
    return step, None


def behind(part: Seen, source: Any) -> Seen:
    """Return what the same dimensions show of a source; raise `Refused` where it has another shape."""
    found = part.behind(source)
    if found is None:
        raise Refused(part.node, f"{part.node} does not keep the shape of {source}")
    return found
