"""Whether all ranks are about to do the same: facts are exchanged as digests, and a difference is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import distributed

from core.common.telling import RanksSilent, exchange, ranks_text
from core.errors import EngineError, UsageError

PRETENDED = "fake"
"""torch's backend for its tests: this process alone, playing one of several."""
_SHOWN = 60
_NOTHING = ("", "nothing")
_num_agreements: dict[str, int] = {}


class RanksMissing(EngineError):
    """Some ranks did not come to where the others waited for them."""


def agree(what: str, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Compare facts with those of all ranks of the default group, which wait for this; with one process, do nothing.

    - what: the point that the ranks have come to, for messages, such as "the options".
    - facts: gives name -> value, which JSON or `repr` writes the same way on each rank; of a mapping, each entry is
      compared by itself.

    Raises `UsageError` that names what differs and on which ranks, and `RanksMissing` where a rank does not come within
    the group's timeout.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    if distributed.get_backend() == PRETENDED:
        return  # there is nobody to compare with
    world: Any = distributed.group.WORLD
    number = _num_agreements[world.group_name] = _num_agreements.get(world.group_name, 0) + 1
    # Listed in no stub of torch's.
    store = distributed.PrefixStore(f"core/agreement/{number}", world.get_group_store())  # type: ignore[attr-defined]
    compare(store, world.rank(), world.size(), what, facts())


def compare(store: Any, rank: int, size: int, what: str, facts: Mapping[str, Any]) -> None:
    """Compare facts with those of the other ranks that have this store for themselves; raises as `agree` does."""
    try:
        texts = exchange(store, rank, size, json.dumps([what, described(facts)]))
    except RanksSilent as silent:
        raise RanksMissing(
            f"agreeing on {what}, as rank {rank} of {size}",
            found=str(silent),
            remedy="see what these ranks do, or give them more time",
        ) from None
    told = [json.loads(text) for text in texts]
    if len({point for point, _ in told}) > 1:
        told = [(point, {"the point they have come to": _entry(point)}) for point, _ in told]
    problem = difference([entries for _, entries in told])
    if problem:
        raise UsageError(
            f"{size} ranks that agree on {what}",
            found=problem,
            remedy="start all ranks with the same options, packages and files",
        )


def described(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return name -> digest and a short form of each fact; entries of mappings have names of their own."""
    found: dict[str, list[str]] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= {f"{name}: {key}": _entry(item) for key, item in value.items()}
        else:
            found[name] = _entry(value)
    return found


def difference(told: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """Return which facts differ, and on which ranks, in one line; "" where all are equal. told: by rank."""
    names = dict.fromkeys(name for entries in told for name in entries)
    differ = [name for name in names if len({entries.get(name, _NOTHING)[0] for entries in told}) > 1]
    if not differ:
        return ""
    lines = []
    for name in differ[:3]:
        ranks: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for rank, entries in enumerate(told):
            digest, shown_text = entries.get(name, _NOTHING)
            ranks.setdefault(digest, []).append(rank)
            shown[digest] = shown_text
        lines.append(f"{name}: " + ", ".join(f"{shown[d]} on {ranks_text(who)}" for d, who in ranks.items()))
    more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
    return "; ".join(lines) + more


def _entry(value: Any) -> list[str]:
    text = json.dumps(value, sort_keys=True, default=repr)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return [digest, text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}... ({digest})"]
