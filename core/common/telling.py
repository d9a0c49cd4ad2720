"""Texts that the processes of a group tell each other through the group's store.

No collective is needed for it: processes may come to the same point by different ways, as one that compiles and one
that reads the compile cache do, and collectives have to be in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from core.errors import LoweringError

_num_told: Counter[tuple[str, str]] = Counter()
"""By topic and name of a group: a group that is destroyed and made again has the same name and the same store."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class RanksSilent(Exception):
    """Raised where ranks told nothing within the time."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        #: Which ranks told nothing.
        self.ranks = tuple(ranks)
        super().__init__(f"{ranks_text(ranks)} did not come within {timeout.total_seconds():g} s")


def exchange(store: Any, rank: int, size: int, own: str, *, timeout: timedelta | None = None) -> list[str]:
    """Tell all ranks that have this store for themselves a text, and return those of all, by rank.

    timeout: for which this waits for others; None for the store's. Raises `RanksSilent` after it.
    """
    timeout = store.timeout if timeout is None else timeout
    store.set(str(rank), f"!{own}")  # a store may know no empty text
    names = [str(each) for each in range(size)]
    try:
        store.wait(names, timeout)
    except RuntimeError:
        silent = [each for each in range(size) if not store.check([str(each)])]
        raise RanksSilent(silent, timeout) from None
    return [bytes(store.get(name)).decode()[1:] for name in names]


def tell(group: Any, topic: str, doing: str, own: str, *, timeout: timedelta | None = None) -> list[str]:
    """Tell all processes of a group a text, and return those of all, by rank.

    - group: a process group of torch (`shared_group`), whose processes all tell as often about the topic.
    - topic: whose talk it is, such as the name of a package.
    - doing: what the process is about to do, for errors; the name of the group follows.

    Raises `LoweringError` that names who did not come within the timeout (the store's unless given).
    """
    key = topic, group.group_name
    _num_told[key] += 1
    # Listed in no stub of torch's.
    store = distributed.PrefixStore(f"{topic}/{_num_told[key]}", group.get_group_store())  # type: ignore[attr-defined]
    try:
        return exchange(store, group.rank(), group.size(), own, timeout=timeout)
    except RanksSilent as silent:
        raise LoweringError(
            f"{doing} {group.group_name!r}, as rank {group.rank()} of {group.size()}",
            found=str(silent),
            remedy="have all processes of a group compile and run the same, and look whether they all still run",
        ) from None
