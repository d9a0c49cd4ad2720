"""The stream and scope of each node: nodes on two sides of a boundary are not fused.

Three marks are known: Dynamo's note on the nodes of a `torch.npu.stream` block, scopes that models for torch_npu's own
compiler open (`scope_enter`, `scope_exit`: streams, core limits, determinism), and the waits and records of events.
A model puts work on a separate stream to run it beside other work, which a fusion would prevent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

__all__ = ["streams", "together"]

_EVENTS = ("tagged_event_record", "tagged_event_wait", "record_event", "wait_event", "wait_stream", "record", "wait")


def streams(graph: fx.Graph) -> Mapping[fx.Node, tuple[object, ...]]:
    """Return for each node what it runs in: its stream, the scopes around it, and how many events came before.

    Empty where the graph has no such mark at all.
    """
    found: dict[fx.Node, tuple[object, ...]] = {}
    scopes: list[object] = []
    num_events, marked = 0, False
    for node in graph.nodes:
        name = _name(node)
        if name == "scope_exit" and scopes:
            scopes.pop()
        num_events += name in _EVENTS
        found[node] = (_noted(node), *scopes, num_events)
        marked = marked or found[node] != (None, 0)
        if name.endswith("scope_enter"):
            scopes.append((str(node.args), str(dict(node.kwargs))))
    return found if marked else {}


def together(*nodes: fx.Node) -> bool:
    """Return whether nodes of one graph run in one stream and scope."""
    known = streams(nodes[0].graph)
    return len({known.get(node) for node in nodes}) == 1


def _noted(node: fx.Node) -> object:
    custom: Any = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, Mapping) else None


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    name = str(getattr(node.target, "__name__", ""))
    return name.removesuffix(".default")
