"""The constants of a graph's placeholders, for passes that prepare weights once and add the result as one more
constant."""

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
    """The constants of one graph by placeholder name, and the constants that passes have added.

    values: weights, buffers and other constants, without declared inputs. The owner of the graph passes `added`, in
    this order, after the graph's own placeholders. reads_content: whether the caller of `tensor` may read its content;
    `contents` holds the tensors whose content may have been read.
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

    @property
    def names(self) -> frozenset[str]:
        """The placeholders of all constants."""
        return frozenset((*self._values, *self._added))

    def value(self, node: object) -> Tensor | None:
        """Return the constant of a placeholder, or None for inputs, sizes and all other nodes."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        return self._given(self._added.get(node.name, self._values.get(node.name)))

    def packing(self, name: str) -> Packing | None:
        """Return the parts that an added tensor was joined from, if its pass named them."""
        return self._packings.get(name)

    @property
    def sourceless(self) -> tuple[str, ...]:
        """The added tensors whose sources are unknown."""
        return tuple(name for name in self._sourceless if name in self._added)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every constant, each once."""
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

        like: a node whose fake value has the tensor's dtype and device; the new node's fake value is made like it.
        packing: the parts that the tensor was joined from; without it the graph can't be cached. sources: the constants
        that a tensor without packing was computed from, whose values are then fixed; None if unknown, so that no weight
        of the program may be reloaded.
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
        """Forget the tensors added after the first num_kept, because the graph was restored to its earlier state."""
        self._added = dict(list(self._added.items())[:num_kept])
        self._last = None
