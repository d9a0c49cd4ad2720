"""Whether a kernel takes a call of a canonical op that a pass found."""

from __future__ import annotations

from typing import Any

from torch import fx

from core.common.ops.implementation import Condition
from core.common.passes import find_op, value_of


def given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of a canonical op by name, defaults filled in."""
    op = find_op(node.target)
    assert op is not None  # the finder has seen it
    return dict(op.bind(node.args, node.kwargs).args)


def refusal(node: fx.Node, why_not: Condition) -> str:
    """Return why a kernel can't take a call of a canonical op, or ""; why_not: the kernel's condition."""
    op = find_op(node.target)
    assert op is not None
    values = {name: value_of(v) if isinstance(v, fx.Node) else v for name, v in given(node).items()}
    return why_not(op.bind((), values)) or ""
