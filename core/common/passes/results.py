"""What every pass returns: its matches, and the places that almost matched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """A place that almost matched."""

    #: The path of its module, or the name of its node.
    site: str
    #: The condition that failed.
    reason: str
    #: The node at which it failed.
    node: str = ""
    #: The pass that made the node, where this one wanted to replace it without being ordered after that pass.
    claimant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What one pass did to one graph; `matched` is the number of rewritten sites, each named in `sites`."""

    matched: int
    sites: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
