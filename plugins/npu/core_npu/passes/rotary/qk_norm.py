"""Lift the norms of query and key and their rotation, as models call them, to `core::qk_norm_rotary`.

torch_npu has no op that does both (with an NZ cache there is one, see qkv_cache.py), and what the plugin brings for the
canonical op launches the same kernels; so this runs on request, for implementations that do better. Where none takes
the op, the model's own calls are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.ops.rotary import QK_NORM_ROTARY
from core.common.passes import (
    Guards,
    NearMiss,
    Pass,
    PassContext,
    PassResult,
    PassTraits,
    Site,
    apply_sites,
    near_miss,
    view,
)
from core_npu.passes.calls import called, other_reader, read, result_of, results
from core_npu.passes.conditions import HALVES, first_reason, not_row
from core_npu.passes.norm.normed import NORM
from core_npu.passes.streams import streams

_EACH, _BOTH = "npu_rotary_mul", "npu_apply_rotary_pos_emb"
_STYLES = {"half": "half", "interleave": "interleaved"}


@dataclass(frozen=True, slots=True)
class _Side:
    """A rotated query or key. result: of the rotation; turned: what is rotated; cos, sin, mode: by what."""

    result: fx.Node
    turn: fx.Node
    turned: Any
    cos: Any
    sin: Any
    mode: str

    @property
    def norm(self) -> fx.Node | None:
        """The norm whose result is rotated, if it is one."""
        return result_of(self.turned, NORM)

    @property
    def tables(self) -> tuple[Any, Any, str]:
        """What both sides must share."""
        return self.cos, self.sin, self.mode


def _single(node: fx.Node) -> _Side | None:
    if called(node) != _EACH:
        return None
    given = read(node)
    if given["rotate"] is not None:  # the model rotates by its own matrix, which the canonical op does not take
        return None
    return _Side(node, node, given["input"], given["r1"], given["r2"], str(given["rotary_mode"]))


def _pair(node: fx.Node) -> tuple[_Side, _Side] | None:
    found = results(node) if called(node) == _BOTH else None
    if not found or set(found) != {0, 1} or any(len(nodes) != 1 for nodes in found.values()):
        return None
    given = read(node)
    tables = given["cos"], given["sin"], str(given["rotary_mode"])
    query, key = (_Side(found[i][0], node, given[name], *tables) for i, name in enumerate(("query", "key")))
    return query, key


def _pairs(graph: fx.Graph) -> Iterator[tuple[_Side, _Side]]:
    """Yield rotations of two normed values by the same tables; of more than two, neighbours."""
    waiting: dict[Any, _Side] = {}
    for node in graph.nodes:
        both = _pair(node)
        if both is not None and all(side.norm is not None for side in both):
            yield both
        side = _single(node)
        if side is None or side.norm is None:
            continue
        first = waiting.pop(side.tables, None)
        if first is None:
            waiting[side.tables] = side
        else:
            yield first, side


def _site(query: _Side, key: _Side) -> Site | NearMiss:
    norms = [side.norm for side in (query, key)]
    assert norms[0] is not None and norms[1] is not None
    given = [read(norm) for norm in norms if norm is not None]
    reason = first_reason(
        "" if query.mode in _STYLES else f"pairs are {query.mode}",
        "" if given[0]["epsilon"] == given[1]["epsilon"] else f"{norms[0]} and {norms[1]} have different eps",
        *(not_row("gamma", each["gamma"], each["input"]) for each in given),
        *(other_reader(side.turned, side.turn) for side in (query, key)),
        *(f"{user} reads {norm} too" for norm in norms if norm is not None for user in norm.users if not _is_y(user)),
        "" if view.shape(query.cos) == view.shape(query.sin) else f"{query.cos} and {query.sin} differ in shape",
    )
    if reason:
        return near_miss(query.result, reason)
    turns = (query.turn, key.turn) if query.turn is query.result else (query.turn, query.result, key.result)
    return Site(
        anchor=query.result,
        target=QK_NORM_ROTARY.overload,
        args=(
            *(each["input"] for each in given),
            *(each["gamma"] for each in given),
            *(query.cos, query.sin, given[0]["epsilon"]),
        ),
        kwargs={"style": _STYLES[query.mode]},
        interior=tuple(dict.fromkeys((*norms, query.turned, key.turned, *turns))),  # type: ignore[arg-type]
        outputs=(query.result, key.result),
    )


def _is_y(user: fx.Node) -> bool:
    return view.kind(user) == "getitem" and bool(user.args[1] == 0)


def run(context: PassContext) -> PassResult:
    """Lift every rotation of a normed query and key."""
    found = [_site(query, key) for query, key in _pairs(context.graph)]
    sites = [item for item in found if isinstance(item, Site)]
    return apply_sites(context, sites, [item for item in found if isinstance(item, NearMiss)])


class _Heads(nn.Module):
    """Norms and rotation of query and key, by two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.linspace(low, 1.6, 64)) for low in (0.4, 0.7))

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ops: Any = torch.ops.npu
        query = ops.npu_rms_norm(query, self.query, 2e-5)[0]
        key = ops.npu_rms_norm(key, self.key, 2e-5)[0]
        return ops.npu_rotary_mul(query, cos, sin).sin(), ops.npu_rotary_mul(key, cos, sin).cos()


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the two calls."""
    generator = torch.Generator().manual_seed(11)
    angles = torch.rand(6, 1, 64, generator=generator) * 6
    heads = (torch.randn(6, count, 64, generator=generator) for count in (4, 2))
    yield _Heads(), (*heads, angles.cos(), angles.sin())


LIFT_QK_NORM_ROTARY = Pass(
    name="lift_npu_qk_norm_rotary",
    does="Lift every rotation of a normed query and key.",
    run=run,
    guards=Guards(scopes=streams, dtypes=HALVES, implements=frozenset({QK_NORM_ROTARY.qualified_name})),
    after=("fuse_npu_qkv_rms_norm_rope_cache",),
    examples=examples,
    owner="npu",
    traits=PassTraits(
        on_request="torch_npu has no op of norm and rotation, and the plugin's implementation launches the same kernels"
    ),
)
