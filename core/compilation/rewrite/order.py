"""Which passes run, as the caller wants, and in which order: the declared before/after, else as registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from core.errors import PassError, UsageError

if TYPE_CHECKING:
    from core.common.passes.declaration import Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSwitches:
    """Passes to run and to leave out, by name."""

    #: The passes to run, None for all.
    only: tuple[str, ...] | None = None
    #: The passes to leave out of these.
    disable: tuple[str, ...] = ()
    #: Passes to run although the device finds them unprofitable; those of `only` count as such too.
    enable: tuple[str, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Every pass that was asked for by name."""
        return (*(self.only or ()), *self.enable)

    def select(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """Return the passes that run; raises `UsageError`, with the closest name, for one that is not there."""
        return choose(passes, self.only, self.disable, self.enable)

    def __str__(self) -> str:
        if self.only == ():
            return "no passes"
        parts = ["all passes" if self.only is None else f"only {', '.join(self.only)}"]
        if self.enable:
            parts[0] += f", {', '.join(self.enable)} in any case"
        return " without ".join([*parts, ", ".join(self.disable)] if self.disable else parts)


def choose(
    passes: Sequence[Pass], only: Sequence[str] | None, disable: Sequence[str], enable: Sequence[str] = ()
) -> tuple[Pass, ...]:
    """Return the passes named by `only` (None: all) and `enable`, less those of `disable`.

    Raises `UsageError` on unknown names.
    """
    known = [declared.name for declared in passes]
    for name in (*(only or ()), *disable, *enable):
        if name not in known:
            close = get_close_matches(name, known, 1)
            raise UsageError(
                f"choosing pass {name!r}",
                found=f"it is none of the passes: {', '.join(known) or 'there are none'}",
                remedy=f"did you mean {close[0]!r}?" if close else "name one of these",
            )
    wanted = known if only is None else (*only, *enable)
    chosen = [declared for declared in passes if declared.name in wanted or declared.traits.closes]
    chosen = [declared for declared in chosen if declared.name not in disable]
    # A pass that closes a stage runs if the stage runs; if it is the only one, it runs on request.
    stages = {
        declared.stage for declared in chosen if not declared.traits.closes or declared.name in (*(only or ()), *enable)
    }
    return tuple(declared for declared in chosen if declared.stage in stages)


def order(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes in an order that keeps every before/after, else as registered.

    Raises `PassError` where there is none, and for two passes of one name.
    """
    ordered, left_out = order_without_cycles(passes)
    for error in left_out.values():
        raise error
    return ordered


def order_without_cycles(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], Mapping[str, PassError]]:
    """Return the ordered passes, and those left out for it: of each cycle the pass registered last, with the error."""
    by_name: dict[str, Pass] = {}
    for declared in passes:
        _check(declared, by_name)
        by_name[declared.name] = declared
    left_out = dict[str, PassError]()
    while True:
        try:
            return _ordered(by_name), left_out
        except CycleError as cycle:
            names = list(cycle.args[1])
            last = max(names, key=list(by_name).index)
            left_out[last] = _contradiction([by_name[name] for name in names])
            del by_name[last]


def _contradiction(cycle: Sequence[Pass]) -> PassError:
    """Return the error for passes that contradict each other, the first of them again at the end."""
    names = " -> ".join(f"{declared.name!r} of {declared.owner}" for declared in cycle)
    return PassError(
        "ordering the passes",
        found=f"their before/after contradict each other: {names}",
        remedy="drop one of these constraints",
    )


def _ordered(by_name: Mapping[str, Pass]) -> tuple[Pass, ...]:
    sorter = TopologicalSorter(_direct(tuple(by_name.values())))
    sorter.prepare()
    # Of the passes that may come next, the one registered first: a device's passes thus follow the common ones.
    places = {name: place for place, name in enumerate(by_name)}
    ready: list[tuple[int, str]] = []
    found = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heappush(ready, (places[name], name))
        _, name = heappop(ready)
        found.append(by_name[name])
        sorter.done(name)
    return tuple(found)


def predecessors(passes: Sequence[Pass]) -> Mapping[str, frozenset[str]]:
    """Return for each pass of an ordered list all passes that it is declared to come after, directly or not."""
    direct = _direct(passes)
    known: dict[str, frozenset[str]] = {}
    for declared in passes:
        earlier = direct[declared.name]
        known[declared.name] = frozenset(earlier).union(*(known[name] for name in earlier))
    return known


def _direct(passes: Sequence[Pass]) -> dict[str, list[str]]:
    """Return for each pass those that one declaration puts right before it; names that no pass has mean nothing."""
    earlier: dict[str, list[str]] = {declared.name: [] for declared in passes}
    for last in passes:
        if last.traits.closes:
            earlier[last.name] += [each.name for each in passes if each.stage == last.stage and not each.traits.closes]
    for declared in passes:
        earlier[declared.name] += [name for name in declared.after if name in earlier]
        for later in declared.before:
            if later in earlier:
                earlier[later].append(declared.name)
    return earlier


def _check(declared: Pass, known: Mapping[str, Pass]) -> None:
    # Imported here, since it imports torch: refusing a command line for its switches should not wait for that.
    from core.common.passes.context import check_analyses

    check_analyses(declared.traits.requires | declared.traits.preserves, f"pass {declared.name!r} of {declared.owner}")
    if declared.name in known:
        raise PassError(
            f"pass {declared.name!r} of {declared.owner}",
            found=f"{known[declared.name].owner} registers a pass of the same name",
            remedy="rename one of them",
        )
