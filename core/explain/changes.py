"""The nodes that each pass removed from a graph and added to it, site by site; recorded while the passes run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from core.common.passes.sites import MADE_BY, Made, site_name
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.explain.nodes import NodeRecord, records


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One site of one pass. removed: nodes of the graph before the pass that are gone after it; made: new ones.

    group: equal for changes that build on each other, such as a fusion of what another pass has lifted. before, after:
    the nodes removed and made, as they stood right before and right after the pass, in the order of the graph; a later
    pass may have taken what this one made.
    """

    index: int
    pass_name: str
    site: str
    removed: tuple[str, ...]
    made: tuple[str, ...]
    group: int
    before: tuple[NodeRecord, ...] = ()
    after: tuple[NodeRecord, ...] = ()

    def to_json(self, *, nodes: bool) -> dict[str, object]:
        """Return the fields as JSON-ready values; nodes: the records of nodes too."""
        document = asdict(self)
        return document if nodes else document | {"before": None, "after": None}


class ChangeNotes:
    """The changes of one run of the passes; `note` is the `observe` of `PassManager.run`.

    labels, inputs: by placeholder, its name and what it is bound to.
    """

    def __init__(self, labels: Mapping[str, str], inputs: Mapping[str, str]) -> None:
        self._labels, self._inputs = labels, inputs
        self._drafts: list[_Draft] = []
        self._maker: dict[str, int] = {}  # node made so far -> its draft

    def note(self, report: PassReport, before: Snapshot, after: fx.GraphModule) -> None:
        """Compare the graph before and after one pass."""
        old = {name: _Old(node, target, args, kwargs) for node, name, target, args, kwargs in before.nodes()}
        new = {node.name: node for node in after.graph.nodes}
        # A pass may also change a node's target in place.
        kept = {name for name, node in old.items() if name in new and new[name].target == node.target}
        gone = {name: node for name, node in old.items() if name not in kept}
        made = {name: node for name, node in new.items() if name not in kept}
        drafts = _drafts(report.name, gone, made)
        if drafts:
            self._record(drafts, before.graph(), after.graph)
        for draft in drafts:
            group = len(self._drafts)
            for earlier in {self._maker[name] for name in draft.removed if name in self._maker}:
                self._merge(self._drafts[earlier].group, group)
            self._drafts.append(draft)
            draft.group = group
            self._maker.update(dict.fromkeys(draft.made, group))

    def _record(self, drafts: Sequence[_Draft], before: fx.Graph, after: fx.Graph) -> None:
        """Write down the nodes of the sites of a pass, of the graphs before and after it."""
        removed = {name for draft in drafts for name in draft.removed}
        made = {name for draft in drafts for name in draft.made}
        old = {node.name: (at, node) for at, node in enumerate(records(before, self._labels, self._inputs, removed))}
        new = {node.name: (at, node) for at, node in enumerate(records(after, self._labels, self._inputs, made))}
        for draft in drafts:
            draft.before = _in_order(old, draft.removed)
            draft.after = _in_order(new, draft.made)

    def _merge(self, group: int, into: int) -> None:
        for draft in self._drafts:
            if draft.group == group:
                draft.group = into

    def changes(self) -> tuple[Change, ...]:
        """Return all changes, pass by pass."""
        return tuple(
            Change(
                index=index,
                pass_name=draft.pass_name,
                site=draft.site,
                removed=tuple(draft.removed),
                made=tuple(draft.made),
                group=draft.group,
                before=draft.before,
                after=draft.after,
            )
            for index, draft in enumerate(self._drafts)
        )


def removed_by(changes: Iterable[Change]) -> dict[str, tuple[int, str]]:
    """Return for each node that went the change that took it and its pass."""
    found: dict[str, tuple[int, str]] = {}
    for change in changes:
        for name in change.removed:
            found.setdefault(name, (change.index, change.pass_name))
    return found


def made_by(changes: Iterable[Change]) -> dict[str, tuple[int, str]]:
    """Return for each node that a pass made the last such change and its pass."""
    return {name: (change.index, change.pass_name) for change in changes for name in change.made}


@dataclass(slots=True)
class _Draft:
    pass_name: str
    site: str
    removed: list[str]
    made: list[str]
    group: int = -1
    before: tuple[NodeRecord, ...] = ()
    after: tuple[NodeRecord, ...] = ()


def _in_order(known: Mapping[str, tuple[int, NodeRecord]], names: Sequence[str]) -> tuple[NodeRecord, ...]:
    """Return the records of these names by their place in the graph."""
    found = (known[name] for name in names if name in known)
    return tuple(node for _, node in sorted(found, key=lambda item: item[0]))


@dataclass(frozen=True, slots=True)
class _Old:
    """A node of the graph before a pass; `node` itself may have other arguments by now."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def inputs(self) -> list[str]:
        found: list[fx.Node] = []
        fx.map_arg((self.args, dict(self.kwargs)), found.append)
        return [node.name for node in found]


def _drafts(name: str, gone: Mapping[str, _Old], made: Mapping[str, fx.Node]) -> list[_Draft]:
    """Return the sites of one pass: by the marks on its new nodes, or by module if there are none."""
    drafts: list[_Draft] = []
    owner: dict[str, _Draft] = {}
    taken: set[str] = set()
    results = {node.name: record for node in made.values() if (record := _made(node, name)) and record.replaced}
    ends = {replaced for record in results.values() for replaced in record.replaced}
    for result, record in results.items():
        inner = _reached(
            [result], made.keys() - results.keys(), lambda key: [n.name for n in made[key].all_input_nodes]
        )
        # Several results of one op are one site.
        draft = next((owner[key] for key in inner if key in owner), None)
        if draft is None:
            draft = _Draft(name, record.site, [], [])
            drafts.append(draft)
        draft.made += [key for key in inner if key not in owner]
        owner.update(dict.fromkeys(inner, draft))
        starts = [end for end in record.replaced if end in gone]
        draft.removed += _reached(starts, gone.keys() - ends - taken, lambda key: gone[key].inputs)
        taken.update(draft.removed)
    return drafts + _by_module(
        name,
        [old.node for key, old in gone.items() if key not in taken],
        [node for key, node in made.items() if key not in owner],
    )


def _made(node: fx.Node, name: str) -> Made | None:
    record: Made | None = node.meta.get(MADE_BY)
    return record if record is not None and record.pass_name == name else None


def _reached(starts: Sequence[str], inside: Set[str], inputs: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the starts and what they are computed from, as far back as names are `inside`."""
    found = dict.fromkeys(starts)
    stack = list(starts)
    while stack:
        for source in inputs(stack.pop()):
            if source not in found and source in inside:
                found[source] = None
                stack.append(source)
    return list(found)


def _by_module(name: str, gone: Sequence[fx.Node], made: Sequence[fx.Node]) -> list[_Draft]:
    drafts: dict[str, _Draft] = {}
    for nodes, field in ((gone, "removed"), (made, "made")):
        for node in nodes:
            site = site_name(node)
            getattr(drafts.setdefault(site, _Draft(name, site, [], [])), field).append(node.name)
    return list(drafts.values())
