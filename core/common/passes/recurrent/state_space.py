"""Lift the selective state space of one token of each sequence, as transformers writes it out for Mamba 2's decode.

The matcher starts at `exp(dt * A)`, by which a state decays. It reads back to the step and to the state, and on to the
new state, its product with C, and the skip of D.

    decay = exp(dt * A);  state = state * decay + dt * B * x;  out = state @ C + x * D
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.recurrent import SELECTIVE_STATE_UPDATE
from core.common.passes import NearMiss, Pass, PassContext, Refused, Site, near_miss, same_size, same_sizes, view
from core.common.passes.recurrent.axes import Seen, seen
from core.common.passes.recurrent.states import interior, loaded, read_states

# Dimensions of a state: row, head, feature, number of state.
_ROW, _HEAD, _FEATURE, _STATE = range(4)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the update around `exp(dt * A)`, or None where no state decays by it."""
    if view.kind(node) != "exp" or view.kind(node.args[0]) != "mul" or len(view.shape(node) or ()) != 4:
        return None
    decayed = view.only_user(node)
    new = view.only_user(decayed) if view.kind(decayed) == "mul" and decayed is not None else None
    if decayed is None or new is None or view.kind(new) != "add":
        return None
    try:
        return _site(node, decayed, new)
    except Refused as refused:
        return near_miss(refused.node, refused.reason)


def _site(fading: fx.Node, decayed: fx.Node, new: fx.Node) -> Site:
    state = loaded(view.other(decayed, fading))
    if state is None:
        raise Refused(decayed, f"{decayed} multiplies no state")
    step, rate = _exponent(fading.args[0])
    x, keys = _added(view.other(new, decayed), step)
    states = read_states(state, new)
    out, queries = _product(new, states.writers)
    end, skip = _result(out, x)
    dt, bias, softplus = _step(step)
    rows, heads, features, size = view.shape(new) or ()
    B, C = _of_groups(keys, _STATE), _of_groups(queries, 2)
    if not same_size(B.shape[1], C.shape[1]):  # of each head, then
        B, C = keys.of(_ROW, _HEAD, _STATE), queries
    arguments = {
        "x": (x.of(_ROW, _HEAD, _FEATURE), (rows, heads, features)),
        "dt": (dt.of(_ROW, _HEAD), (rows, heads)),
        "A": (rate.of(_HEAD), (heads,)),
        "B": (B, (rows, B.shape[1], size)),
        "C": (C, (rows, B.shape[1], size)),
        "D": (None if skip is None else skip.of(len(skip.axes) - 2), (heads,)),
        "dt_bias": (None if bias is None else bias.of(len(bias.axes) - 2), (heads,)),
    }
    given = {name: part and part.as_input(name, sizes) for name, (part, sizes) in arguments.items()}
    parts = [part.node for part, _ in arguments.values() if part is not None]
    return Site(
        anchor=end,
        target=SELECTIVE_STATE_UPDATE.overload,
        args=(*(given[name] for name in ("x", "dt", "A", "B", "C")), states.tensor, given["D"], given["dt_bias"]),
        kwargs={"dt_softplus": softplus, **states.arguments},
        interior=interior((end, *states.writers), [*parts, *states.inputs]),
    )


def _seen(node: Any, *, exact: bool = True) -> Seen:
    found = seen(node, exact=exact)
    if found is None:
        raise Refused(node, f"{node} is no tensor")
    return found


def _exponent(product: Any) -> tuple[Seen, Seen]:
    """Return step and rate of `dt * A`: of each row and feature, and of each head."""
    for left, right in view.orders(product):
        step, rate = _seen(left), _seen(right, exact=False)
        if len(step.axes) != 4 or not step.repeats(_STATE):
            continue
        if len(rate.axes) == 3:  # without a dimension of rows
            rate = Seen(rate.node, (None, *rate.axes), (1, *rate.sizes))
        if len(rate.axes) == 4 and rate.repeats(_ROW, _FEATURE, _STATE):
            return step, rate
    raise Refused(product, f"{product} is not a step times one number of each head")


def _added(node: Any, step: Seen) -> tuple[Seen, Seen]:
    """Return x and B of `dt * B * x`, in whatever order."""
    factors = list(_factors(node)) if isinstance(node, fx.Node) else []
    found = [factor for factor in factors if factor != step]
    if len(factors) != 3 or len(found) != 2:
        raise Refused(node, f"{node} is not the product of step, B and x")
    keys = [factor for factor in found if factor.repeats(_FEATURE)]
    values = [factor for factor in found if factor.repeats(_STATE)]
    if len(keys) != 1 or len(values) != 1 or keys == values:
        raise Refused(node, f"{node} is not the product of a number of state and a feature")
    return values[0], keys[0]


def _factors(node: fx.Node) -> list[Seen]:
    """Return the factors of a product (S, H, P, N)."""
    part = _seen(node, exact=False)
    if view.kind(part.node) != "mul" or part.axes != (0, 1, 2, 3):
        return [_seen(node)]
    operands = [each for each in part.node.args if isinstance(each, fx.Node)]
    return [factor for operand in operands for factor in _factors(operand)]


def _product(new: fx.Node, writers: tuple[fx.Node, ...]) -> tuple[fx.Node, Seen]:
    """Return the new state's product with C, (S, H, P), and C (S, H, N): a batch of matrices times vectors."""
    flat = next((user for user in _readers(new) if view.kind(user) in ("view", "reshape", "flatten")), None)
    product = None if flat is None else view.only_user(flat)
    sizes, whole = view.shape(flat) or (), view.shape(new) or ()
    if flat is None or product is None or view.kind(product) != "bmm" or product.args[0] is not flat:
        raise Refused(new, f"the new state {new} is not multiplied with C")
    column = view.operand(product, 1, "mat2")
    queries = column.args[0] if view.kind(column) in ("view", "reshape") else None
    shape = view.shape(queries) or ()
    same = len(sizes) == 3 and same_sizes(sizes[1:], whole[2:]) and same_sizes(shape, (*whole[:2], whole[3]))
    if not same or (view.shape(column) or ())[-1] != 1:
        raise Refused(product, f"{product} is not the product of each head's state with its C")
    out = view.only_user(product)
    if out is None or view.kind(out) not in ("view", "reshape") or not same_sizes(view.shape(out) or (), whole[:3]):
        raise Refused(product, f"{product} is not brought back to rows and heads")
    return out, _seen(queries)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads a node, or a cast of it."""
    found = []
    for user in node.users:
        found += [user] if view.source_of_cast(user) is not node else [user, *user.users]
    return found


def _result(out: fx.Node, x: Seen) -> tuple[fx.Node, Seen | None]:
    """Return the node that ends the update, behind the skip and casts, and D (H, P) of `out + x * D`; None without."""
    skip: Seen | None = None
    user = view.only_user(out)
    other: Any = view.other(user, out) if user is not None and view.kind(user) == "add" else None
    for token, factor in view.orders(other) if view.kind(other) == "mul" else ():
        rates = seen(factor, exact=False)
        alike = _seen(token) == x.of(_ROW, _HEAD, _FEATURE)
        if alike and rates is not None and rates.repeats(len(rates.axes) - 1) and user is not None:
            skip, out = rates, user
            break
    end, wanted = out, view.dtype(x.node)
    following = view.only_user(end)
    while following is not None and view.source_of_cast(following) is end and view.dtype(following) == wanted:
        end, following = following, view.only_user(following)
    if view.dtype(end) != wanted:
        raise Refused(end, f"the result {end} is {view.dtype(end)}, x is {wanted}")
    return end, skip


def _step(step: Seen) -> tuple[Seen, Seen | None, bool]:
    """Return dt, the bias that is added to it, and whether the step is the softplus of that."""
    softplus = view.kind(step.node) == "softplus"
    if softplus:
        node = step.node
        if view.operand(node, 1, "beta", 1.0) != 1 or view.operand(node, 2, "threshold", 20.0) != 20:
            raise Refused(node, f"{node} is not the softplus of its input alone")
        step = _behind(step, node.args[0])
    bias: Seen | None = None
    for dt, added in view.orders(step.node) if view.kind(step.node) == "add" else ():
        found = seen(added, exact=False)
        parameter = found is not None and len(found.axes) == 2 and found.repeats(1)
        if parameter and len(view.shape(dt) or ()) == 3:
            step, bias = _behind(step, dt), found
            break
    if not step.repeats(_FEATURE):
        raise Refused(step.node, f"the step {step.node} differs between the features of a head")
    return step, bias, softplus


def _behind(part: Seen, source: Any) -> Seen:
    found = part.behind(source)
    if found is None:
        raise Refused(part.node, f"{part.node} does not keep the shape of {source}")
    return found


def _of_groups(part: Seen, state: int) -> Seen:
    """Return B or C (S, G, N) of each group where it is read for each head. state: the dimension of N."""
    found = part.of(_ROW, _HEAD, state)
    node, sizes = found.node, view.shape(found.node) or ()
    spread = view.operand(node, 0, "input") if view.kind(node) in ("view", "reshape") else None
    repeated = seen(spread) if spread is not None else None
    wide = view.shape(spread) or ()
    spreads = repeated is not None and len(wide) == 4 and len(sizes) >= 3 and repeated.repeats(2)
    # (S, G, H // G, N) becomes (S, H, …): heads of a group are neighbours.
    if (
        spreads
        and repeated is not None
        and same_sizes((wide[0], wide[3]), (sizes[0], sizes[-1]))
        and found.axes[0] == 0
    ):
        return repeated.of(0, 1, 3)
    if found.axes[1] is None:  # the same for all heads
        return Seen(node, found.axes, (found.sizes[0], 1, found.sizes[2]))
    return found


LIFT_SELECTIVE_STATE_UPDATE = Pass(
    name="lift_selective_state_update",
    find=find,
    does="Lift every selective state space of a token of each sequence, or of several one by one, with its state.",
    before=("lift_gated_activation",),
)
