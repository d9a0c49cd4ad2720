"""Lift the selective state space of one token of each sequence, as transformers writes it out for decode.

The matcher starts at `exp(dt * A)`, by which a state decays. It reads back to the step and to the state, and on to the
new state, its product with C, and the skip of D.

    decay = exp(dt * A);  state = state * decay + dt * B * x;  out = state @ C + x * D

Here is the form of Mamba 2, whose steps are those of heads; feature_space.py has that of Mamba.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.recurrent import SELECTIVE_STATE_UPDATE
from core.common.passes import NearMiss, Pass, PassContext, Refused, Site, near_miss, same_size, same_sizes, view
from core.common.passes.recurrent.axes import Seen, seen
from core.common.passes.recurrent.feature_space import of_features
from core.common.passes.recurrent.space_parts import added, before_bias, before_softplus, readers, result, seen_of
from core.common.passes.recurrent.states import interior, loaded, read_states

# Dimensions of a state: row, head, feature, number of state.
_ROW, _HEAD, _FEATURE, _STATE = range(4)


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the update around `exp(dt * A)`, or None where no state decays by it."""
    rank = len(view.shape(node) or ())
    if view.kind(node) != "exp" or view.kind(node.args[0]) != "mul" or rank not in (3, 4):
        return None
    decayed = view.only_user(node)
    new = view.only_user(decayed) if view.kind(decayed) == "mul" and decayed is not None else None
    if decayed is None or new is None or view.kind(new) != "add":
        return None
    try:
        return _site(node, decayed, new) if rank == 4 else of_features(node, decayed, new)
    except Refused as refused:
        return near_miss(refused.node, refused.reason)


def _site(fading: fx.Node, decayed: fx.Node, new: fx.Node) -> Site:
    state = loaded(view.other(decayed, fading))
    if state is None:
        raise Refused(decayed, f"{decayed} multiplies no state")
    step, rate = _exponent(fading.args[0])
    x, keys = added(view.other(new, decayed), step, _FEATURE)
    states = read_states(state, new, bounds=True)
    out, queries = _product(new, states.writers)
    end, skip = result(out, x, x.of(_ROW, _HEAD, _FEATURE), lambda rates: rates.repeats(len(rates.axes) - 1))
    bare, softplus = before_softplus(step)
    dt, bias = before_bias(bare, lambda found, rank: rank == 3 and len(found.axes) == 2 and found.repeats(1))
    if not dt.repeats(_FEATURE):
        raise Refused(dt.node, f"the step {dt.node} differs between the features of a head")
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
        kwargs={"dt_softplus": softplus, **states.bounds, **states.arguments},
        interior=interior((end, *states.writers), [*parts, *states.inputs]),
    )


def _exponent(product: Any) -> tuple[Seen, Seen]:
    """Return step and rate of `dt * A`: of each row and feature, and of each head."""
    for left, right in view.orders(product):
        step, rate = seen_of(left), seen_of(right, exact=False)
        if len(step.axes) != 4 or not step.repeats(_STATE):
            continue
        if len(rate.axes) == 3:  # without a dimension of rows
            rate = Seen(rate.node, (None, *rate.axes), (1, *rate.sizes))
        if len(rate.axes) == 4 and rate.repeats(_ROW, _FEATURE, _STATE):
            return step, rate
    raise Refused(product, f"{product} is not a step times one number of each head")


def _product(new: fx.Node, writers: tuple[fx.Node, ...]) -> tuple[fx.Node, Seen]:
    """Return the new state's product with C, (S, H, P), and C (S, H, N): a batch of matrices times vectors."""
    flat = next((user for user in readers(new) if view.kind(user) in ("view", "reshape", "flatten")), None)
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
    return out, seen_of(queries)


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
    after=("lift_causal_conv1d",),
    before=("lift_gated_activation",),
)
