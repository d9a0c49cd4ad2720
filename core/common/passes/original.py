"""The nodes that a canonical op replaced, kept so that a device without the op runs exactly these.

A lift thereby costs a device nothing at run time and changes no bit of its results where it has no implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from core.common.node_meta import describe, value_key, value_of
from core.common.ops.host_reads import reads_host
from core.common.ops.recurrent.tokens import is_stated
from core.common.passes.viewed import Step, Viewed, ends, insert

ORIGINAL = "core_original"
"""Key of `node.meta` under which the node of an op holds its `Original`."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One node as it was; its arguments refer to nodes that may be erased by now and serve as names only."""

    node: fx.Node
    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Original:
    """The nodes that an op replaced, in order. inputs: the nodes among the op's arguments, in order.

    results: the replaced node of each output, None if nothing reads it. literals: the op's other arguments at that
    time; the original is void if one has changed since.
    """

    records: tuple[_Record, ...]
    inputs: tuple[Viewed, ...]
    literals: str
    results: tuple[Viewed | None, ...]

    @classmethod
    def of(
        cls, interior: Sequence[fx.Node], op: fx.Node, inputs: Sequence[Viewed], results: tuple[Viewed | None, ...]
    ) -> Original | None:
        """Record the interior (in graph order) of a site that becomes `op`; inputs: the op's input nodes.

        Besides these, the interior may read placeholders, and sizes computed from inputs or placeholders. Returns None
        if it reads anything else, since the interior could then not be put back, and if it only states a recurrence.
        """
        if any(is_stated(node.target) for node in interior):
            return None
        sizes = missing_sizes(interior, [each.node for each in inputs])
        if sizes is None:
            return None
        return cls(tuple(map(_record, (*sizes, *interior))), tuple(inputs), _literals(op), results)


def missing_sizes(interior: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> tuple[fx.Node, ...] | None:
    """Return the sizes that an interior reads besides its inputs; None if it reads more and can't be put back."""
    known = dict.fromkeys((*inputs, *interior))
    sizes: dict[fx.Node, None] = {}
    for record in map(_record, interior):
        if not all(_is_at_hand(source, known, sizes) for source in node_arguments(record.args, record.kwargs)):
            return None
    return tuple(sizes)


def _record(node: fx.Node) -> _Record:
    target, args = node.target, node.args
    if node.op == "call_method" and target == "type_as":
        # This reads only the dtype of the other tensor, which the op does not take.
        target, args = "to", (args[0], value_of(node).dtype)
    return _Record(node, node.op, node.name, target, args, node.kwargs, dict(node.meta))


def _is_at_hand(node: fx.Node, known: dict[fx.Node, None], sizes: dict[fx.Node, None]) -> bool:
    """Tell whether a source of the interior is available when it is put back; collect the sizes to compute for it."""
    if node in known or node in sizes or node.op == "placeholder":
        return True
    if not isinstance(value_of(node), torch.SymInt):
        return False
    found = all(_is_at_hand(source, known, sizes) for source in node.all_input_nodes)
    if found:
        sizes[node] = None
    return found


def restore(node: fx.Node) -> list[fx.Node] | None:
    """Replace the op at this node by the nodes that it replaced, and return these; None if that is impossible.

    It is refused where these nodes make the host wait for an accelerator, which no captured graph can hold: references
    of canonical ops never do. The results of an op with several outputs are the `getitem` nodes that read them.
    """
    original: Original | None = node.meta.get(ORIGINAL)
    if original is None or original.literals != _literals(node) or any(map(_reads_host, original.records)):
        return None
    current = node_arguments(node.args, node.kwargs)
    outputs = _outputs(node, original.results)
    inputs = list(zip(original.inputs, current, strict=True))
    # An input that the op takes directly needs no view to be undone.
    copies = {seen.node: now for seen, now in sorted(inputs, key=lambda each: not each[0].steps)}
    if outputs is None or not _find_placeholders(original, node.graph, copies):
        return None
    made: list[fx.Node] = []

    def describe_view(new: fx.Node, value: Any) -> None:
        describe(new, node, value)
        made.append(new)

    with node.graph.inserting_before(node):
        for seen, now in inputs:
            if copies[seen.node] is now:
                copies[seen.node] = insert(Viewed(now, seen.way_back), describe_view)
        for record in original.records:
            args, kwargs = fx.map_arg((record.args, dict(record.kwargs)), copies.__getitem__)
            copies[record.node] = node.graph.create_node(record.op, record.target, args, kwargs, record.name)
            copies[record.node].meta = dict(record.meta)
            made.append(copies[record.node])
        for output, result in outputs:
            _give_back(output, Viewed(copies[result.node], result.steps), describe_view)
    for output in dict.fromkeys((*(output for output, _ in outputs), node)):
        node.graph.erase_node(output)
    for now, seen in {now: seen for seen, now in inputs}.items():
        _erase_views(now, seen.steps)
    return made


def _reads_host(record: _Record) -> bool:
    args, kwargs = fx.map_arg((record.args, dict(record.kwargs)), value_of)
    return reads_host(record.target, args, kwargs, record.meta.get(value_key(record.node)))


def _erase_views(node: fx.Node, steps: Sequence[Step]) -> None:
    """Erase the views of an input that only the op read."""
    for step in reversed(steps):
        if node.users or not step.is_made(node):
            return
        source, _ = node.args[0], node.graph.erase_node(node)
        assert isinstance(source, fx.Node)  # what the node is a view of
        node = source


def _give_back(output: fx.Node, result: Viewed, describe_view: Callable[[fx.Node, Any], None]) -> None:
    """Let the readers of an op's output read the original node again (or its view)."""
    for end in ends(output, result.way_back):
        end.replace_all_uses_with(result.node)
        while end is not output and not end.users:
            source, _ = end.args[0], end.graph.erase_node(end)
            assert isinstance(source, fx.Node)  # what the end is a view of
            end = source
    if output.users:
        output.replace_all_uses_with(insert(result, describe_view))


def _find_placeholders(original: Original, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> bool:
    """Find, by name, the placeholders that the original reads besides the op's arguments: the graph may be a copy."""
    made = {record.node for record in original.records}
    sources = (node for record in original.records for node in node_arguments(record.args, record.kwargs))
    free = {node.name: node for node in sources if node not in made and node not in copies}
    if free:
        current = {node.name: node for node in graph.find_nodes(op="placeholder")}
        copies.update({node: current[name] for name, node in free.items() if name in current})
    return all(node in copies for node in free.values())


def _outputs(node: fx.Node, results: Sequence[Viewed | None]) -> list[tuple[fx.Node, Viewed]] | None:
    """Return the nodes of the op's outputs, each with its original; None if an output is read in another way."""
    if len(results) == 1:
        return [(node, results[0])] if results[0] is not None else None
    found: list[tuple[fx.Node, Viewed]] = []
    for user in node.users:
        index = user.args[1] if getattr(user.target, "__name__", "") == "getitem" and len(user.args) == 2 else None
        result = results[index] if isinstance(index, int) and 0 <= index < len(results) else None
        if result is None:
            return None
        found.append((user, result))
    return found


def node_arguments(args: Any, kwargs: Any) -> list[fx.Node]:
    """Return the nodes among the arguments, in order, repeated ones each time."""
    found: list[fx.Node] = []
    fx.map_arg((args, dict(kwargs)), found.append)
    return found


def _literals(node: fx.Node) -> str:
    """Return the op and its arguments as text, with one placeholder word for every node."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: "<node>")
    return f"{node.target} {args} {sorted(kwargs.items())}"
