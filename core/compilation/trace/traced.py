"""What a trace gives: the graph, what each of its placeholders is bound to, and how to rebuild the model's output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.errors import CaptureError

if TYPE_CHECKING:
    from core.common.passes.packing import Packing


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A placeholder that receives a declared input."""

    name: str


@dataclass(frozen=True, slots=True)
class ConstantSlot:
    """A placeholder bound once: a weight, a buffer, a cache or another tensor the model closes over.

    packing: what it was joined from, where a pass has joined weights.
    """

    value: Any
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """A placeholder that receives the size of one dimension of a declared input."""

    name: str
    dim: int


Slot = InputSlot | ConstantSlot | SizeSlot


@dataclass(frozen=True, slots=True)
class OutputRef:
    """Where one leaf of the model's output comes from: graph output `index`, declared input `name`, or a constant."""

    index: int = -1
    name: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class OutputTree:
    """Rebuilds the model's own output structure from the graph's flat outputs."""

    leaves: tuple[OutputRef, ...]
    spec: pytree.TreeSpec

    @property
    def is_single(self) -> bool:
        """True where the output is one tensor of the graph, so that there is nothing to rebuild."""
        return self.spec.is_leaf() and self.leaves[0].index >= 0

    def rebuild(self, outputs: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Any:
        """Return the structure the model would have returned."""
        if self.is_single:
            return outputs[self.leaves[0].index]
        leaves = [
            outputs[ref.index] if ref.index >= 0 else inputs[ref.name] if ref.name else ref.value for ref in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedGraph:
    """A traced model. module: the Dynamo graph. slots: what each placeholder is bound to, in order.

    outputs: the graph's outputs as fake tensors. shapes: of the inputs that the model looks at, when traced. symbols:
    which size of which input each symbol of shape_env stands for. least: the smallest size of each that it may serve.
    code: what the trace ran through. literals: tensors that this code spells out and the graph holds.
    """

    module: fx.GraphModule
    slots: tuple[Slot, ...]
    output: OutputTree
    outputs: tuple[Tensor, ...]
    shapes: Mapping[str, tuple[int, ...]]
    symbols: Mapping[Any, SizeSlot]
    least: Mapping[Any, int]
    shape_env: Any
    elapsed_s: float
    code: tuple[CodeType, ...] = ()
    literals: tuple[Tensor, ...] = ()

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return the placeholders' values for these inputs, in order; sizes as ints."""
        return tuple(self._value(slot, inputs) for slot in self.slots)

    @staticmethod
    def _value(slot: Slot, inputs: Mapping[str, Tensor]) -> Any:
        if isinstance(slot, ConstantSlot):
            return slot.value
        tensor = inputs[slot.name]
        return tensor if isinstance(slot, InputSlot) else tensor.shape[slot.dim]

    def holds_for(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Return None if the trace is valid for inputs of these shapes, else the condition that fails."""
        symbolic = {(slot.name, slot.dim) for slot in self.symbols.values()}
        for name, shape in self.shapes.items():
            for dim, (traced, actual) in enumerate(zip(shape, inputs[name].shape, strict=True)):
                if traced != actual and (name, dim) not in symbolic:
                    return f"{name} was fixed at size {traced} in dimension {dim}"
        sizes = self.sizes(inputs)
        return self._out_of_range(sizes) or self._way_differs(sizes)

    def _out_of_range(self, sizes: Mapping[Any, int]) -> str | None:
        for symbol, size in sizes.items():
            bounds = self.shape_env.var_to_range.get(symbol)
            if size < self.least[symbol] or (bounds is not None and size > bounds.upper):
                slot = self.symbols[symbol]
                return f"{slot.name} has size {size} in dimension {slot.dim}, traced for {self.least[symbol]} and up"
        return None

    def branches_differ(self, inputs: Mapping[str, Any], dims: Collection[Any] = ()) -> str | None:
        """Return None if the model takes the same way for these sizes as when traced, else the condition that differs.

        Unlike `holds_for` this does not ask whether the trace may run at these sizes, but whether a run at larger ones
        stands for them: padding must not change which branch is taken. dims: expressions that are bucket dimensions
        themselves, as `s0 - 1` of an input declared `"seqs + 1"`. That such a one, or a size that is a symbol, is
        neither 0 nor 1 is not held against a call: most such questions are those of ops about their strides.
        """
        return self._way_differs(self.sizes(inputs), (*dims, *self.symbols))

    def _way_differs(self, sizes: Mapping[Any, int], from_two: Collection[Any] = ()) -> str | None:
        """Return the condition of the trace that fails; from_two: dimensions of which it may ask 2 at least."""
        if self.shape_env is None:
            return None
        for guard in self.shape_env.guards:
            if _is_not_0_or_1(guard.expr, from_two):
                continue
            if guard.expr.xreplace(sizes) != True:  # noqa: E712  # a sympy relation that stays open is not True
                return f"the model branches on a size: {guard.expr}"
        for symbol, replacement in self.shape_env.replacements.items():
            if symbol in sizes and replacement.xreplace(sizes) != sizes[symbol]:
                return f"the model ties sizes together: {symbol} = {replacement}"
        return None

    def sizes(self, inputs: Mapping[str, Any]) -> dict[Any, int]:
        """Return what each symbol is for inputs of these shapes."""
        return {symbol: inputs[slot.name].shape[slot.dim] for symbol, slot in self.symbols.items()}

    def crop(self, inputs: Mapping[str, Any], dims: Collection[Any] = ()) -> list[tuple[slice, ...]]:
        """Return the part of each graph output that belongs to inputs of these shapes, when run at larger ones.

        A dimension of an output is cut where its size is that of a symbolic dimension. Sizes computed from one (as of a
        flattened tensor) do not tell where padding lies: these raise `CaptureError`, but for `dims`, expressions that
        are bucket dimensions themselves.
        """
        sizes = self.sizes(inputs)
        sizes |= {dim: int(dim.xreplace(sizes)) for dim in dims}
        return [tuple(self._cut(size, sizes) for size in fake.shape) for fake in self.outputs]

    @staticmethod
    def _cut(size: Any, sizes: Mapping[Any, int]) -> slice:
        expression = getattr(getattr(size, "node", None), "expr", None)
        if expression is None or not expression.free_symbols:
            return slice(None)
        if expression not in sizes:
            raise CaptureError(
                "padding the inputs",
                found=f"an output has size {expression} in one dimension: where padding lies in it is unknown",
                remedy="fill a bucket exactly, or return tensors whose dimensions are those of the inputs",
            )
        return slice(sizes[expression])


def _is_not_0_or_1(condition: Any, dims: Collection[Any]) -> bool:
    """Tell whether a condition says no more than that one of these sizes is neither 0 nor 1: it holds from 2 on."""
    for dim in dims:
        (symbol,) = dim.free_symbols
        beyond = symbol.func("beyond", integer=True, nonnegative=True)
        if condition.free_symbols == {symbol} and condition.xreplace({symbol: symbol - dim + 2 + beyond}) == True:  # noqa: E712
            return True
    return False
