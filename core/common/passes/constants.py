"""The tensors bound to a graph's placeholders, for passes that prepare weights once and bind the result as one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from core.common.node_meta import set_value, value_of
from core.common.passes.values.fresh import fresh

if TYPE_CHECKING:
    from core.common.passes.packing import Packing


class Constants:
    """What the placeholders of one graph are bound to, by name, and what passes have added to them.

    values: weights, buffers and other constants; declared inputs are not among them. The holder of the graph binds
    `added`, in this order, after the placeholders that the graph had. reads_content: whether who asks for
    a tensor may read what it holds; `contents` has the tensors that were given to such.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)
        self._added: dict[str, Tensor] = {}
        self._packings: dict[str, Packing] = {}
        self._sourceless: list[str] = []
        self.reads_content = True
        self._contents: dict[int, Tensor] = {}
        self._last: fx.Node | None = None

    @property
    def added(self) -> tuple[tuple[str, Tensor], ...]:
        """The placeholders that passes have appended to the graph, each with its tensor, in the graph's order."""
        return tuple(self._added.items())

    def value(self, node: object) -> Tensor | None:
        """Return the tensor that a placeholder is bound to, or None for inputs, sizes and all other nodes."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        return self._given(self._added.get(node.name, self._values.get(node.name)))

    def packing(self, name: str) -> Packing | None:
        """Return what an added tensor was joined from, where its pass said so."""
        return self._packings.get(name)

    @property
    def sourceless(self) -> tuple[str, ...]:
        """The added tensors of which nobody knows from what they were made."""
        return tuple(name for name in self._sourceless if name in self._added)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor bound, each once."""
        found = {id(tensor): tensor for tensor in (*self._values.values(), *self._added.values())}
        for tensor in found.values():
            self._given(tensor)
        return tuple(found.values())

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """The tensors on whose content the graph may depend."""
        return tuple(self._contents.values())

    def _given(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and self.reads_content:
            self._contents[id(tensor)] = tensor
        return tensor

    def add(
        self,
        graph: fx.Graph,
        name: str,
        tensor: Tensor,
        like: fx.Node,
        *,
        packing: Packing | None = None,
        sources: Sequence[Tensor] | None = None,
    ) -> fx.Node:
        """Append a placeholder bound to the tensor and return it.

        like: a node whose fake value is of the tensor's dtype and device; the new one's is made like it. packing: what
        the tensor was joined from; the graph of a tensor made otherwise can't be cached. sources: of such a tensor, the
        constants that it was computed from, which then keep their values; None where nobody knows, so that no weight of
        the program may be loaded anew.
        """
        if self._last is None or self._last.graph is not graph:
            self._last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(self._last):
            self._last = node = graph.placeholder(name)
        node.target = node.name  # the graph may know that name already
        fake = value_of(like)
        if isinstance(fake, FakeTensor):
            set_value(node, fresh(fake, tensor.shape, tensor.stride()), like)
        self._added[node.name] = tensor
        if packing is not None:
            self._packings[node.name] = packing
        elif sources is None:
            self._sourceless.append(node.name)
        else:
            self._contents.update((id(source), source) for source in sources)
        return node

    def forget(self, num_kept: int) -> None:
        """Forget what was added after the first num_kept tensors: the graph was brought back to what it was then."""
        self._added = dict(list(self._added.items())[:num_kept])
        self._last = None
