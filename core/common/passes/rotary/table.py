"""Lift the tables of rotary embedding to `core::rotary_table`: cos and sin of positions times inverse frequencies.

Seven small kernels a step, of which each does next to nothing, become one. No bit changes where the angles are written
as a product; models that write it as a matrix product over one term get the same product. The pass runs only if the
device implements the op. Positions that are no integers, frequencies computed by position, and angles put together
otherwise (sections of several positions) stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.ops.rotary import ROTARY_TABLE
from core.common.passes import (
    Guards,
    NearMiss,
    Pass,
    PassContext,
    Site,
    at_least_fp32,
    near_miss,
    same_sizes,
    value_of,
    view,
)


@dataclass(frozen=True, slots=True)
class _Angles:
    """Angles read as the product of positions (..., T) and inv_freq (F,), in the given layout."""

    positions: fx.Node
    inv_freq: fx.Node
    layout: str


@dataclass(frozen=True, slots=True)
class _Table:
    """What follows cos or sin: the end of the table, the number it is multiplied by, the dtype it is rounded to.

    unrounded: the end before that last cast.
    """

    end: fx.Node
    scaling: float
    dtype: torch.dtype | None
    unrounded: fx.Node


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return both tables at a cosine whose angles have a sine too; a near-miss for other angles."""
    if view.kind(node) != "cos" or not isinstance(node.args[0] if node.args else None, fx.Node):
        return None
    emb: Any = node.args[0]
    sines = [user for user in emb.users if view.kind(user) == "sin"]
    if len(sines) != 1 or sum(view.kind(user) == "cos" for user in emb.users) != 1:
        return None
    angles = _angles(emb)
    if isinstance(angles, str):
        return near_miss(node, angles)
    cos, sin = _table(node), _table(sines[0])
    if cos.scaling != sin.scaling:
        return near_miss(node, f"the cosine is scaled by {cos.scaling}, the sine by {sin.scaling}")
    rounds = cos.dtype == sin.dtype
    ends = (cos.end, sin.end) if rounds else (cos.unrounded, sin.unrounded)
    inputs = (angles.positions, angles.inv_freq)
    return Site(
        anchor=ends[0],
        target=ROTARY_TABLE.overload,
        args=inputs,
        kwargs={"layout": angles.layout, "scaling": cos.scaling, "out_dtype": view.dtype(ends[0])},
        interior=tuple(dict.fromkeys(each for end in ends for each in view.between(end, *inputs))),
        outputs=ends,
    )


def _table(node: fx.Node) -> _Table:
    """Match the factor and the cast after a cosine or a sine."""
    end, scaling = node, 1.0
    user = view.only_user(end)
    if user is not None and view.kind(user) == "mul" and view.is_number(view.other(user, end)):
        end, scaling = user, float(view.other(user, end))
    cast = view.only_user(end)
    dtype = view.dtype(cast)
    if cast is None or view.source_of_cast(cast) is not end or dtype is None or not dtype.is_floating_point:
        return _Table(end, scaling, None, end)
    return _Table(cast, scaling, dtype, end)


def _angles(emb: fx.Node) -> _Angles | str:
    """Return the factors of the angles, or why the angles are not such a product."""
    product, layout = _laid_out(emb)
    for at, frequencies, column in _factors(product):
        inv_freq = _frequencies(frequencies, view.shape(product) or (), column)
        positions = _positions(at, view.shape(product) or (), column)
        if inv_freq is not None and positions is not None:
            if view.dtype(product) != at_least_fp32(view.dtype(inv_freq) or torch.float64):
                return f"{product} is {view.dtype(product)}"
            return _Angles(positions, inv_freq, layout)
    return f"{product} is no product of integer positions (..., T) and frequencies (F,)"


def _laid_out(emb: fx.Node) -> tuple[fx.Node, str]:
    """Return the angles before they were repeated, and the layout of the repetition."""
    source: Any = emb.args[0] if emb.args else None
    last = (-1, len(view.shape(emb) or ()) - 1)
    kind = view.kind(emb)
    twice = kind == "cat" and isinstance(source, (tuple, list)) and len(source) == 2 and source[0] is source[1]
    if twice and view.operand(emb, 1, "dim", 0) in last and isinstance(source[0], fx.Node):
        return source[0], "half"
    doubled = kind == "repeat_interleave" and view.operand(emb, 1, "repeats") == 2
    if doubled and view.operand(emb, 2, "dim") in last and isinstance(source, fx.Node):
        return source, "interleaved"
    return emb, "pairs"


def _factors(product: fx.Node) -> Iterator[tuple[Any, Any, bool]]:
    """Yield what may be positions and frequencies, and whether these are the column of a transposed outer product."""
    if view.kind(product) == "mul":
        for one, other in view.orders(product):
            yield one, other, False
    rank = len(view.shape(product) or ())
    outer: Any = product.args[0] if product.args else None  # an input of the graph has none
    if {*(view.swapped_dims(product) or ())} == {rank - 2, rank - 1} and view.kind(outer) in ("matmul", "bmm"):
        yield outer.args[1], outer.args[0], True


def _frequencies(node: Any, sizes: tuple[Any, ...], column: bool) -> fx.Node | None:
    """Return the vector (F,) behind a factor of the angles, which holds it in its last dimension or as columns.

    In between, dimensions of size 1 are inserted, columns repeated, and values cast without loss. So unless it is
    repeated, the factor has a single dimension larger than 1, whose position tells the form.
    """
    count, own = sizes[-1], view.shape(node) or ()
    place = (count, 1) if column else (count,)
    if not isinstance(count, int) or not same_sizes(own[-len(place) :], place):
        return None
    while isinstance(node, fx.Node) and not same_sizes(view.shape(node) or (), (count,)):
        source: Any = node.args[0] if node.args else None
        known = view.shape(source) or ()
        if view.kind(node) == "expand" and column:
            passes = same_sizes(known, (*(1,) * (len(own) - 2), *place))
        elif view.source_of_cast(node) is not None:
            passes = view.is_exact(view.dtype(source), view.dtype(node))
        else:
            passes = _puts_in_ones(node)
        node = source if passes else None
    dtype = view.dtype(node)
    return node if dtype is not None and dtype.is_floating_point else None


def _positions(node: Any, sizes: tuple[Any, ...], column: bool) -> fx.Node | None:
    """Return the integers (..., T) behind a factor of the angles that holds each of them once, in order."""
    wanted = sizes[:-1]
    factor = (*wanted[:-1], 1, *wanted[-1:]) if column else (*wanted, 1)
    if not same_sizes(view.shape(node) or (), factor):
        return None
    while isinstance(node, fx.Node):
        dtype, source = view.dtype(node), view.source_of_cast(node)
        if dtype is None or dtype == torch.bool:
            return None
        if not dtype.is_floating_point and same_sizes(view.shape(node) or (), wanted):
            return node
        if source is None:
            node = node.args[0] if _puts_in_ones(node) else None
        elif view.dtype(source) != dtype and (_is_floating(source) or dtype not in (torch.float32, torch.float64)):
            return None
        else:
            node = source
    return None


def _is_floating(node: fx.Node) -> bool:
    dtype = view.dtype(node)
    return dtype is None or dtype.is_floating_point


def _puts_in_ones(node: fx.Node) -> bool:
    """Return whether a node only inserts dimensions of size 1."""
    if view.kind(node) == "unsqueeze":
        return True
    if view.kind(node) != "getitem" or not isinstance(value_of(node.args[0]), Tensor):
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is Ellipsis or each == slice(None) for each in index)


class _Example(nn.Module):
    """Tables as transformers' models compute them: by a product of matrices or of numbers, in one of the layouts."""

    inv_freq: Tensor

    def __init__(self, layout: str, *, outer: bool = False, scaling: float = 1.0) -> None:
        super().__init__()
        self.layout, self.outer, self.scaling = layout, outer, scaling
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, 8))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Take positions (B, T); give cos and sin."""
        if self.outer:
            column = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
            angles = (column @ positions[:, None, :].float()).transpose(1, 2)
        else:
            angles = positions[..., None].float() * self.inv_freq
        if self.layout == "half":
            angles = torch.cat((angles, angles), dim=-1)
        elif self.layout == "interleaved":
            angles = angles.repeat_interleave(2, dim=-1)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(torch.bfloat16), sin.to(torch.bfloat16)


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield tables of both products and of every layout, for the conformance suite."""
    positions = torch.arange(3, 13).view(2, 5)
    yield _Example("half", outer=True), (positions,)
    yield _Example("half", scaling=1.25), (positions,)
    yield _Example("interleaved"), (positions,)
    yield _Example("pairs", outer=True), (positions[:1],)


LIFT_ROTARY_TABLE = Pass(
    name="lift_rotary_table",
    find=find,
    does="Lift every pair of tables.",
    # The lift of rotations includes casts of their tables, and equal tables are joined.
    after=("lift_rotary", "eliminate_common_subexpressions", "fuse_rotary_attention"),
    guards=Guards(implements=frozenset({ROTARY_TABLE.qualified_name})),
    examples=examples,
)
