"""`BucketReport`: what one capture cost; the runner measures it, and the report of the compile lists it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketReport:
    """One captured bucket."""

    key: GraphKey
    #: Seconds that lowering its graph took.
    lower_s: float = 0.0
    #: Seconds that the capture took, warm-up included.
    capture_s: float
    #: Device memory that the capture took, in bytes.
    num_bytes: int
    #: Number of parts that were captured; 1 for a whole graph.
    num_graphs: int = 1
    #: Names of the eager calls between the parts, in order.
    eager: tuple[str, ...] = ()
