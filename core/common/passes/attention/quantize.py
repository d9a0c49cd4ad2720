"""Fuse attention with the quantisation of its result: `core::attention_quantize`, `core::rotary_attention_quantize`.

Attention gives heads of tokens (T, H, V). The output projection quantises rows (1, T, H * V), so views stand between
the two. The fused op gives codes of rows (T, H * V), without the dimension in front. It computes the same: no bit
changes. Quantisation by groups is not fused, since the op has no groups.
"""

from __future__ import annotations

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.ops.attention import (
    ATTENTION,
    ATTENTION_QUANTIZE,
    GRANULARITIES,
    ROTARY_ATTENTION,
    ROTARY_ATTENTION_QUANTIZE,
)
from core.common.passes import calls, same_sizes, value_of, view
from core.common.passes.attention.quantize_examples import examples
from core.common.passes.quantize.chain import Chain, Link, declare_chain


def why_not(link: Link) -> str:
    """Return why one op can't do attention and quantisation, or nothing."""
    node, x = link.quantize.node, link.quantize.x
    granularity = link.quantize.options.get("granularity", "token")
    if granularity not in GRANULARITIES:
        made = f"{link.fused.qualified_name} makes one per {' or '.join(GRANULARITIES)}"
        return f"its scales are one per {granularity}, and {made}"
    if granularity == "token" and link.quantize.scale is not None:
        return f"each token has a scale given, and {link.fused.qualified_name} makes those"
    if not _is_rows(link.call, x):
        return f"what it quantises are no rows of all heads of a token, but {view.shape(x)}"
    further = [user for user in node.users if user not in calls.results(node).values()]
    return f"{further[0]} reads a result of {node} a second time" if further else ""


def _is_rows(attention: fx.Node, x: fx.Node) -> bool:
    """Tell whether x is (..., T, H * V) of a result (T, H, V), with ones in front."""
    result, sizes = value_of(attention), view.shape(x)
    if not isinstance(result, FakeTensor) or sizes is None or len(sizes) < 2:
        return False
    rows = (result.shape[0], result.shape[1] * result.shape[2])
    return same_sizes(sizes[-2:], rows) and all(type(size) is int and size == 1 for size in sizes[:-2])


FUSE_ATTENTION_QUANTIZE = declare_chain(
    "fuse_attention_quantize",
    "Fuse every attention with the quantisation of its rows.",
    Chain(
        fused={ATTENTION.name: ATTENTION_QUANTIZE, ROTARY_ATTENTION.name: ROTARY_ATTENTION_QUANTIZE},
        scale="out_scale",
        rows=True,
        why_not=why_not,
    ),
    examples=examples,
    after=("fuse_rotary_attention",),
)
