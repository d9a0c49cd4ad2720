"""Lift layer norm, one call or written out, to `core::layer_norm`.

In fp32, `layer_norm` itself and the op agree in every bit. In half precision the call may sum in another order than the
op, and so does a norm that a model writes out (Cohere). The results are then equal up to rounding in the dtype of the
statistics. Such a norm is lifted only if nothing is rounded to a narrower dtype before the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from core.common.ops.norm import LAYER_NORM
from core.common.passes import NearMiss, Pass, PassContext, Site, at_least_fp32, near_miss, view


@dataclass(slots=True)
class _Norm:
    """The match so far; `end` computes the norm of x, in compute_dtype."""

    x: fx.Node
    eps: float
    compute_dtype: torch.dtype
    end: fx.Node
    weight: fx.Node | None = None
    bias: fx.Node | None = None


def find(context: PassContext, node: fx.Node) -> Site | NearMiss | None:
    """Return the layer norm of this call, or the one around this inverse root; a near-miss where it is none."""
    kind = view.kind(node)
    found: _Norm | NearMiss | None = None
    if kind == "layer_norm":
        found = _single(node)
    elif kind in ("rsqrt", "pow", "reciprocal", "div"):
        found = _rooted(node)
    if not isinstance(found, _Norm):
        return found
    if found.compute_dtype in (torch.float32, torch.float64):
        _read_casts(found, context.taken)
    context.taken.add(found.end)  # a later norm looks up its input there
    return _site(found)


def _rooted(node: fx.Node) -> _Norm | NearMiss | None:
    parts = view.plus_number(view.inverse_root(node))
    centred = view.square(view.last_dim_mean(parts[0])) if parts is not None else None
    if parts is None or centred is None or view.kind(centred) != "sub":
        return None
    wide = _centred(centred)
    if wide is None:
        return near_miss(node, f"{centred} takes something else than its own mean from {centred.args[0]}")
    return _written_out(node, wide, parts[1])


def _single(node: fx.Node) -> _Norm | NearMiss:
    sizes = view.operand(node, 1, "normalized_shape")
    weight, bias = view.operand(node, 2, "weight"), view.operand(node, 3, "bias")
    eps, source = view.operand(node, 4, "eps", 1e-5), view.operand(node, 0, "input")
    compute = view.dtype(source)
    if len(sizes) != 1:
        return near_miss(node, f"{node} normalises over {len(sizes)} dimensions")
    if compute is None or not view.is_number(eps):
        return near_miss(node, f"{node} has no known dtype or eps")
    return _Norm(source, float(eps), compute, node, weight, bias)


def _centred(node: view.Operand) -> fx.Node | None:
    """Return x if the node is x minus its mean over the last dimension."""
    if view.kind(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    x, mean = node.args
    return x if isinstance(x, fx.Node) and view.last_dim_mean(mean) is x else None


def _written_out(root: fx.Node, wide: fx.Node, eps: float) -> _Norm | NearMiss:
    """Match product, weight and bias around the inverse root. wide: the tensor that the statistics are computed
    from."""
    compute = view.dtype(wide)
    product = view.only_user(root)
    if compute not in (torch.float32, torch.float64):
        return near_miss(root, f"the statistics of {wide} are taken in {compute}")
    if product is None or view.kind(product) != "mul":
        return near_miss(root, f"the inverse root {root} is used otherwise than in one product")
    if _centred(view.other(product, root)) is not wide:
        return near_miss(root, f"{product} multiplies {view.other(product, root)}, not {wide} less its mean")
    norm = _Norm(wide, eps, compute, product)
    _read_factor(norm, "mul", "weight")
    _read_factor(norm, "add", "bias")
    return norm


def _read_factor(norm: _Norm, kind: str, name: str) -> None:
    """Match weight or bias (one number per column) in the reader of the norm."""
    user = view.only_user(norm.end)
    operand = view.other(user, norm.end) if user is not None and view.kind(user) == kind else None
    if user is None or not isinstance(operand, fx.Node) or view.dtype(user) != norm.compute_dtype:
        return
    source = view.without_exact_casts(operand)[0]
    rows = view.shape(norm.x)
    if rows and view.shape(source) == (rows[-1],):
        setattr(norm, name, source)
        norm.end = user


def _read_casts(norm: _Norm, ends: set[fx.Node]) -> None:
    """Include the cast before the norm and the cast after it, which rounds the result once."""
    norm.x = view.before_casts(norm.x, ends)
    last = view.only_user(norm.end)
    if last is not None and view.source_of_cast(last) is norm.end and view.dtype(last) == view.dtype(norm.x):
        norm.end = last


def _site(norm: _Norm) -> Site:
    # In half precision the call itself computes in fp32.
    compute = at_least_fp32(norm.compute_dtype)
    return Site(
        anchor=norm.end,
        target=LAYER_NORM.overload,
        args=(norm.x, norm.weight, norm.bias, norm.eps),
        kwargs={"compute_dtype": compute, "out_dtype": view.dtype(norm.end)},
        interior=view.between(norm.end, norm.x, norm.weight, norm.bias),
    )


LIFT_LAYER_NORM = Pass(name="lift_layer_norm", find=find, does="Lift every layer norm of the graph.")
"""Lift every layer norm; independent of the other lifts."""
