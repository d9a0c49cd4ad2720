"""What every pass returns: its matches, and the places that almost matched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """A place that almost matched. site: module path or node name. reason: what failed. node: where it failed.

    claimant: the pass that made the node, where another pass wanted to replace it without being ordered after it.
    """

    site: str
    reason: str
    node: str = ""
    claimant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What one pass did to one graph; `matched` is the number of rewritten sites, each named in `sites`."""

    matched: int
    sites: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
