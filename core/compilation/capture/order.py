"""The order in which the graphs of a program are captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.common.graphs.backend import GraphKey, Guards

__all__ = ["capture_order"]


def capture_order(keys: Mapping[str, Sequence[GraphKey]]) -> list[GraphKey]:
    """Return the keys of all phases in order of capture.

    The phase with the largest bucket first, and in each the largest first: later captures then fit into memory that the
    first one took. Before all others come the largest of each phase under each of its guards, which can serve in place
    of smaller ones where the device does not hold that many graphs.
    """
    phases = sorted(keys, key=lambda phase: -max((_size(key) for key in keys[phase]), default=0))
    order = [key for phase in phases for key in sorted(keys[phase], key=lambda key: (-_size(key), key.dims))]
    first: dict[tuple[str, Guards], GraphKey] = {}
    for key in order:
        first.setdefault((key.phase, key.guards), key)
    heads = set(first.values())
    return [*first.values(), *(key for key in order if key not in heads)]


def _size(key: GraphKey) -> int:
    return max(key.dims, default=1)
