"""Lift the selective state space of Mamba, whose features have a step each and decay by number of state.

    decay = exp(dt[..., None] * A);  state = state * decay + dt[..., None] * B * x[..., None];  out = state @ C + x * D

Shapes: S rows, P features, N numbers of state for each.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.recurrent import SELECTIVE_STATE_UPDATE
from core.common.passes import Index, Refused, Site, Viewed, same_size, same_sizes, view
from core.common.passes.recurrent.axes import Seen, seen
from core.common.passes.recurrent.space_parts import added, before_bias, before_softplus, readers, result, seen_of
from core.common.passes.recurrent.states import interior, loaded, read_states

# Dimensions of a state: row, feature, number of state.
_ROW, _FEATURE, _STATE = range(3)
_WHOLE = slice(None)


def of_features(fading: fx.Node, decayed: fx.Node, new: fx.Node) -> Site:
    """Return the update around `exp(dt * A)`; raise `Refused` where it is another.

    decayed: the product of state and decay. new: the sum that is the new state.
    """
    state = loaded(view.other(decayed, fading))
    if state is None:
        raise Refused(decayed, f"{decayed} multiplies no state")
    step, rate = _exponent(fading.args[0])
    x, keys = added(view.other(new, decayed), step, _FEATURE)
    states = read_states(state, new, bounds=True)
    out, queries = _product(new)
    rows, features, size = view.shape(new) or ()
    end, skip = result(out, x, x.of(_ROW, _FEATURE), lambda found: len(found.axes) == 1)
    bare, softplus = before_softplus(step)
    dt, bias = before_bias(bare, lambda found, rank: rank == 2 and len(found.axes) == 1)
    # The op's heads are one, of all features.
    arguments = {
        "x": (x.of(_ROW, _FEATURE), (rows, features), 1),
        "dt": (dt.of(_ROW, _FEATURE), (rows, features), 1),
        "A": (rate, (features, size), 0),
        "B": (keys.of(_ROW, _STATE), (rows, size), 1),
        "C": (queries, (rows, size), 1),
        "D": (skip, (features,), 0),
        "dt_bias": (bias, (features,), 0),
    }
    given = {
        name: None if part is None else _of_head(part.as_input(name, sizes), len(sizes), head)
        for name, (part, sizes, head) in arguments.items()
    }
    parts = [part.node for part, *_ in arguments.values() if part is not None]
    return Site(
        anchor=end,
        target=SELECTIVE_STATE_UPDATE.overload,
        args=(*(given[name] for name in ("x", "dt", "A", "B", "C")), states.tensor, given["D"], given["dt_bias"]),
        kwargs={"dt_softplus": softplus, **states.bounds, **states.arguments},
        interior=interior((end, *states.writers), [*parts, *states.inputs]),
        outputs=(Viewed(end, (Index((_WHOLE, None, _WHOLE)),)),),
    )


def _of_head(given: fx.Node | Viewed, rank: int, dim: int) -> Viewed:
    """Return an input with a dimension for its one head."""
    node, steps = (given.node, given.steps) if isinstance(given, Viewed) else (given, ())
    return Viewed(node, (*steps, Index((*[_WHOLE] * dim, None, *[_WHOLE] * (rank - dim)))))


def _exponent(product: Any) -> tuple[Seen, Seen]:
    """Return step (S, P, 1) and rate (P, N) of `dt * A`."""
    for left, right in view.orders(product):
        step, rate = seen_of(left), seen_of(right, exact=False)
        if len(step.axes) != 3 or not step.repeats(_STATE):
            continue
        if len(rate.axes) == 3 and rate.repeats(_ROW):
            rate = rate.of(_FEATURE, _STATE)
        if len(rate.axes) == 2 and not rate.repeats(0) and not rate.repeats(1):
            return step, rate
    raise Refused(product, f"{product} is not a step of each feature times one number of each of its states")


def _product(new: fx.Node) -> tuple[fx.Node, Seen]:
    """Return the new state's product with C, (S, P), and C (S, N)."""
    sizes = view.shape(new) or ()
    product = next((user for user in readers(new) if view.kind(user) in ("matmul", "bmm")), None)
    matrix = None if product is None else view.operand(product, 0, "input")
    same = matrix is new or view.source_of_cast(matrix) is new
    if product is None or not same:
        raise Refused(new, f"the new state {new} is not multiplied with C")
    column = seen_of(view.operand(product, 1, "other"))
    shape = column.sizes
    if len(shape) != 3 or not same_sizes(shape[:2], (sizes[0], sizes[2])) or not same_size(shape[2], 1):
        raise Refused(product, f"{product} is not the product of each feature's state with C")
    out = view.only_user(product)
    held = None if out is None else seen(out, ends=(product,))
    squeezed = held is not None and held.node is product and held.axes == (0, 1)
    squeezed |= view.kind(out) in ("view", "reshape")
    if out is None or not squeezed or not same_sizes(view.shape(out) or (), sizes[:2]):
        raise Refused(product, f"{product} is not brought back to rows and features")
    return out, column.of(0, 1)
