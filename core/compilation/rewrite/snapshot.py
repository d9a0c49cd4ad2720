"""A cheap record of a graph before a pass: to see whether it changed, to undo the pass, to compare and to print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from core.common.node_meta import value_of
from core.common.passes.sites import site_name


class Snapshot:
    """A graph as it was. Taking one copies no node: arguments of fx nodes are immutable and are only referred to."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._nodes = [(n, n.op, n.name, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in module.graph.nodes]
        self._state = [dict(getattr(module, name)) for name in ("_modules", "_parameters", "_buffers")]
        self._constants = dict(vars(module))

    def is_current(self) -> bool:
        """Tell whether the graph still has the same nodes with the same targets and arguments."""
        now = self._module.graph.nodes
        if len(now) != len(self._nodes):
            return False
        for node, (kept, _, _, target, args, kwargs, _, _) in zip(now, self._nodes, strict=True):
            if node is not kept or node.target is not target or node.args is not args or node.kwargs is not kwargs:
                return False
        return True

    def nodes(self) -> Iterator[tuple[fx.Node, str, Any, tuple[Any, ...], Mapping[str, Any]]]:
        """Yield each node, some erased by now, with the name, target, args and kwargs that it had."""
        for node, _, name, target, args, kwargs, *_ in self._nodes:
            yield node, name, target, args, kwargs

    def interface(self, added: Iterable[str] = ()) -> tuple[object, ...]:
        """Return the graph's former signature: the names of its placeholders and the number of its outputs.

        added: names of placeholders that were appended since, on purpose.
        """
        *names, num_outputs = _interface((op, name, args) for _, op, name, _, args, *_ in self._nodes)
        return (*names, *added, num_outputs)

    def module(self) -> fx.GraphModule:
        """Return a module of its own with the graph as it was; tensors and submodules are shared."""
        return fx.GraphModule(self._root(), self.graph())

    def graph(self) -> fx.Graph:
        """Return a graph of its own, as it was; it belongs to no module."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node, op, name, target, args, kwargs, kind, meta in self._nodes:
            new_args, new_kwargs = fx.map_arg((args, kwargs), copied.__getitem__)
            copied[node] = graph.create_node(op, target, new_args, new_kwargs, name, kind)
            copied[node].meta = dict(meta)
        return graph

    def _root(self) -> dict[str, Any]:
        """Return what the graph's attributes were, by name."""
        names = {str(target) for _, op, _, target, *_ in self._nodes if op in ("get_attr", "call_module")}
        first = {name.partition(".")[0] for name in names}
        found = {name: value for state in self._state for name, value in state.items() if name in first}
        found |= {name: value for name, value in self._constants.items() if name in first}
        return {name: _resolve(found, name) for name in names}

    def restore(self) -> None:
        """Bring the module back to what it was, in place; its graph becomes a new object."""
        for name, state in zip(("_modules", "_parameters", "_buffers"), self._state, strict=True):
            current = getattr(self._module, name)
            current.clear()
            current.update(state)
        self._module.graph = self.graph()


def _resolve(found: dict[str, Any], path: str) -> Any:
    first, *rest = path.split(".")
    value = found[first]
    for name in rest:
        value = getattr(value, name)
    return value


def interface_of(module: fx.GraphModule) -> tuple[object, ...]:
    """Return a graph's signature: the names of its placeholders and the number of its outputs."""
    return _interface((node.op, node.name, node.args) for node in module.graph.nodes)


def _interface(nodes: Any) -> tuple[object, ...]:
    names: list[object] = []
    for op, name, args in nodes:
        if op == "placeholder":
            names.append(name)
        elif op == "output":
            names.append(_count(args))
    return tuple(names)


def _count(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_count, value))
    return sum(map(_count, value.values())) if isinstance(value, dict) else 1


def to_text(module: fx.GraphModule) -> str:
    """Return the graph as text for readers: one node a line with its value, its call and the module it came from."""
    return "".join(f"{_line(node)}\n" for node in module.graph.nodes)


def _line(node: fx.Node) -> str:
    value, name = value_of(node), str(node)
    if isinstance(value, Tensor):
        name += f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    path = site_name(node)
    where = f"  # {path}" if path != node.name and node.op != "placeholder" else ""
    if node.op in ("placeholder", "output"):
        return f"{node.op} {name if node.op == 'placeholder' else node.args[0]}"
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    dot = "." if node.op == "call_method" else ""
    return f"{name} = {dot}{target}({', '.join(arguments)}){where}"


def _target_name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else str(getattr(target, "__name__", target))
