"""Graphs of a phase that begin alike, as those that choose tokens of the same logits in several ways: what they share
is compiled once, and apart from it what each does with it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from core.common.node_meta import value_of
from core.common.passes.writes import find_writes
from core.compilation.trace.traced import ConstantSlot, Slot, TracedGraph

_LEAST = 0.5
"""How much of the shorter of two graphs must be alike: each part is a call of its own, and nothing is fused across."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A result that one part of a graph hands on to the other: of which call, and its form, sizes by their symbols."""

    index: int
    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]

    def like(self, sizes: Mapping[Any, int], device: torch.device) -> Tensor:
        """Return a tensor of this form, whose content is open, at these values of the trace's symbols."""
        known: dict[int | str, Any] = {symbol.name: size for symbol, size in sizes.items()}
        shape, stride = (tuple(known.get(each, each) for each in dims) for dims in (self.shape, self.stride))
        return torch.empty_strided(shape, stride, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a graph is cut: behind so many of its calls; the results of these that are used behind it."""

    num_calls: int
    handed: tuple[Handed, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: Mapping[str, Any] | None) -> Cut | None:
        """Return what `to_json` wrote; None for None."""
        if text is None:
            return None
        dims = ({**each, "shape": tuple(each["shape"]), "stride": tuple(each["stride"])} for each in text["handed"])
        return cls(text["num_calls"], tuple(Handed(**each) for each in dims))


def cuts(graphs: Sequence[TracedGraph]) -> list[Cut | None]:
    """Return for each graph where it is cut if others begin as it does: the same place for all that do."""
    return [_cut(graph, [other for other in graphs if other is not graph]) for graph in graphs]


def _cut(graph: TracedGraph, others: Sequence[TracedGraph]) -> Cut | None:
    alike = [(other, _num_alike(graph, other)) for other in others]
    near = [(other, number) for other, number in alike if _handed_of_both(graph, other, number) is not None]
    if not near:
        return None
    num_calls = min(number for _, number in near)
    handed = _handed(graph, {i for each in (graph, *(other for other, _ in near)) for i in _taken(each, num_calls)})
    return None if handed is None else Cut(num_calls, handed)


def _handed_of_both(one: TracedGraph, other: TracedGraph, num_alike: int) -> tuple[Handed, ...] | None:
    """Return what two graphs hand on where they begin to differ; None where they can't be cut there."""
    if num_alike < _LEAST * min(len(_calls(each.module)) for each in (one, other)):
        return None
    taken = {*_taken(one, num_alike), *_taken(other, num_alike)}
    return None if _handed(other, taken) is None else _handed(one, taken)


def _handed(traced: TracedGraph, indices: Iterable[int]) -> tuple[Handed, ...] | None:
    """Return results as they are handed on; None unless their sizes are sizes of inputs, and their memory theirs alone.

    A compiler takes it for granted that no two inputs of the end share memory.
    """
    calls, writes = _calls(traced.module), find_writes(traced.module)
    nodes = [(index, calls[index]) for index in sorted(indices)]
    memory = [writes.of(node) for _, node in nodes]
    given = writes.of(*traced.module.graph.find_nodes(op="placeholder"))
    if sum(map(len, (given, *memory))) > len(given.union(*memory)):
        return None
    found = [_described(index, value_of(node), traced) for index, node in nodes]
    return tuple(each for each in found if each is not None) if all(found) else None


def _described(index: int, fake: Any, traced: TracedGraph) -> Handed | None:
    if not isinstance(fake, Tensor):
        return None
    names = {symbol: symbol.name for symbol in traced.symbols}

    def named(size: Any) -> Any:
        return names.get(size.node.expr) if isinstance(size, torch.SymInt) else size

    shape, stride = (tuple(map(named, dims)) for dims in (fake.shape, fake.stride()))
    known = None not in (*shape, *stride) and 0 not in stride  # one number in several places can't be written anew
    return Handed(index, str(fake.dtype).removeprefix("torch."), shape, stride) if known else None


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]


def _num_alike(one: TracedGraph, other: TracedGraph) -> int:
    """Return with how many calls two graphs begin that compute the same of the same, under the same names."""
    theirs = dict(_placed(other))
    same = {node: theirs[what] for what, node in _placed(one) if what in theirs}
    number: int = 0
    for mine, their in zip(_calls(one.module), _calls(other.module), strict=False):
        if not _is_same(one.module, other.module, mine, their, same):
            break
        same[mine] = their
        number += 1
    return number


def _placed(traced: TracedGraph) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """Yield each placeholder behind its name and what it receives."""
    for node, slot in zip(traced.module.graph.find_nodes(op="placeholder"), traced.slots, strict=True):
        yield (node.name, _received(slot)), node


def _received(slot: Slot) -> object:
    return id(slot.value) if isinstance(slot, ConstantSlot) else slot


def _is_same(
    one: fx.GraphModule, other: fx.GraphModule, mine: fx.Node, their: fx.Node, same: Mapping[fx.Node, fx.Node]
) -> bool:
    if (mine.op, mine.name, mine.target) != (their.op, their.name, their.target):
        return False
    if mine.op == "get_attr":
        return getattr(one, str(mine.target), None) is getattr(other, str(mine.target), None)
    mapped = fx.map_arg((mine.args, dict(mine.kwargs)), lambda node: same.get(node, node))
    return bool(mapped == (their.args, dict(their.kwargs)))


def _taken(traced: TracedGraph, num_calls: int) -> list[int]:
    """Return the indices of the first calls whose results the others, or the outputs, take."""
    calls = _calls(traced.module)
    later = {*calls[num_calls:], traced.module.graph.output_node()}
    return [index for index, node in enumerate(calls[:num_calls]) if not later.isdisjoint(node.users)]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a graph, and the placeholders of the whole that it takes, behind what is handed on to it."""

    graph: fx.GraphModule
    takes: tuple[int, ...]
    handed: tuple[Handed, ...] = ()

    def is_short(self, examples: Sequence[Any]) -> bool:
        """Tell whether it is one call of torch's at most, which a compiler would make no quicker."""
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in examples]
        try:
            with torch.no_grad(), mode, _Counting() as counting:  # type: ignore[no-untyped-call]
                self.graph.forward(*fakes)
        except Exception:  # it can't be told of an op without a fake kernel, and a compiler may know that op
            return False
        return int(counting.number) <= 1

    def examples(self, values: Sequence[Any], sizes: Mapping[Any, int], device: torch.device) -> tuple[Any, ...]:
        """Return values of its placeholders. values: of those of the whole. sizes: what the symbols are."""
        return (*(each.like(sizes, device) for each in self.handed), *(values[index] for index in self.takes))


class _Counting(TorchDispatchMode):
    """Counts the calls of torch's ops."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def divide(graph: fx.GraphModule, cut: Cut) -> tuple[Part, Part, tuple[int, ...]]:
    """Return the beginning, the end, and which of the results of both, in this order, are the outputs of the whole."""
    calls, output = _calls(graph), graph.graph.output_node()
    outputs: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
    handed = {calls[each.index]: each for each in cut.handed}
    results = [*handed, *dict.fromkeys(node for node in outputs if node not in handed)]
    first = _part(graph, calls[: cut.num_calls], {}, results[: len(handed)])
    end = _part(graph, calls[cut.num_calls :], handed, results[len(handed) :])
    return first, end, tuple(results.index(node) for node in outputs)


def _part(
    graph: fx.GraphModule, calls: Sequence[fx.Node], handed: Mapping[fx.Node, Handed], results: Sequence[fx.Node]
) -> Part:
    part, copies = fx.Graph(), {}
    for node in handed:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    used = set(results).union(*(node.all_input_nodes for node in calls))
    takes = [(i, node) for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node in used]
    for node in (*(node for _, node in takes), *calls):
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in results))
    return Part(_LazyGraphModule(graph, part), tuple(index for index, _ in takes), tuple(handed.values()))
