"""The result of a trace: the graph, the value of each placeholder, and how to rebuild the model's output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from core.compilation.trace.counters import Counter, Counting
from core.errors import CaptureError

if TYPE_CHECKING:
    from core.common.passes.packing import Packing
    from core.compilation.trace.reads import Reads


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


@dataclass(frozen=True, slots=True)
class CounterSlot:
    """A placeholder that receives an integer attribute of an object, as it is at each run."""

    owner: Any
    name: str


Slot = InputSlot | ConstantSlot | SizeSlot | CounterSlot


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
    #: The graph outputs that a plain tuple of such holds, in order; None for other structures.
    _tuple: tuple[int, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flat = self.spec == pytree.tree_structure((0,) * len(self.leaves))
        indexes = tuple(ref.index for ref in self.leaves)
        object.__setattr__(self, "_tuple", indexes if flat and min(indexes, default=0) >= 0 else None)

    @property
    def is_single(self) -> bool:
        """True where the output is one tensor of the graph, so that there is nothing to rebuild."""
        return self.spec.is_leaf() and self.leaves[0].index >= 0

    @property
    def indexes(self) -> tuple[int, ...]:
        """The graph outputs that the model's output holds."""
        return tuple(dict.fromkeys(ref.index for ref in self.leaves if ref.index >= 0))

    def rebuild(self, outputs: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Any:
        """Return the structure the model would have returned."""
        if self.is_single:
            return outputs[self.leaves[0].index]
        if self._tuple is not None:
            return tuple([outputs[index] for index in self._tuple])
        leaves = [
            outputs[ref.index] if ref.index >= 0 else inputs[ref.name] if ref.name else ref.value for ref in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedGraph:
    """A traced model. module: the Dynamo graph. slots: what each placeholder is bound to, in order.

    outputs: the graph's outputs as fake tensors. shapes: of the inputs that the model looks at, when traced. symbols:
    which size of which input each symbol of shape_env stands for. least: the smallest size of each that it may serve.
    code: what the trace ran through. literals: tensors that this code spells out and the graph holds. reads: what of
    Python it read; None for a graph that was not traced here. counters: integers in Python that the model moves on,
    which are symbols of the trace too.
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
    reads: Reads | None = None
    counters: tuple[Counter, ...] = ()

    def counting(self, inputs: Mapping[str, Tensor]) -> Counting:
        """Return the conditions on the counters before a run on inputs of these shapes, and their updates after it."""
        symbols = {counter.symbol for counter in self.counters}
        env = self.shape_env
        conditions = [guard.expr for guard in env.guards] + [
            _equal(symbol, other) for symbol, other in env.replacements.items() if symbol in symbols
        ]
        mine = [each for each in conditions if each.free_symbols & symbols]
        return Counting(self.counters, mine, self.sizes(inputs))

    def values(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return the placeholders' values for these inputs, in order; sizes as ints."""
        return tuple(self._value(slot, inputs) for slot in self.slots)

    @staticmethod
    def _value(slot: Slot, inputs: Mapping[str, Tensor]) -> Any:
        if isinstance(slot, ConstantSlot):
            return slot.value
        if isinstance(slot, CounterSlot):
            return getattr(slot.owner, slot.name)
        tensor = inputs[slot.name]
        return tensor if isinstance(slot, InputSlot) else tensor.shape[slot.dim]

    def why_not_for(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Return the condition of the trace that inputs of these shapes break, None where the trace serves them."""
        symbolic = {(slot.name, slot.dim) for slot in self.symbols.values()}
        for name, shape in self.shapes.items():
            for dim, (traced, actual) in enumerate(zip(shape, inputs[name].shape, strict=True)):
                if traced != actual and (name, dim) not in symbolic:
                    return f"{name} was fixed at size {traced} in dimension {dim}"
        sizes = self.sizes(inputs)
        return self._out_of_range(sizes) or self._why_way_differs(sizes)

    def _out_of_range(self, sizes: Mapping[Any, int]) -> str | None:
        for symbol, size in sizes.items():
            bounds = self.shape_env.var_to_range.get(symbol)
            if size < self.least[symbol] or (bounds is not None and size > bounds.upper):
                slot = self.symbols[symbol]
                return f"{slot.name} has size {size} in dimension {slot.dim}, traced for {self.least[symbol]} and up"
        return None

    def why_branches_differ(self, inputs: Mapping[str, Any], dims: Collection[Any] = ()) -> str | None:
        """Return a condition that makes the model take another branch at these sizes than when traced, or None.

        `why_not_for` asks whether the trace may run at these sizes. Here a run at larger (padded) sizes replaces one at
        these sizes, and must take the same branch. dims: expressions that are bucket dimensions themselves, as `s0 - 1`
        of an input declared `"seqs + 1"`. A condition that a symbol or such an expression is neither 0 nor 1 does not
        count: most conditions of this kind come from ops that ask about their strides.
        """
        return self._why_way_differs(self.sizes(inputs), (*dims, *self.symbols))

    def _why_way_differs(self, sizes: Mapping[Any, int], from_two: Collection[Any] = ()) -> str | None:
        """Return the condition of the trace that fails; from_two: dimensions of which it may ask 2 at least."""
        if self.shape_env is None:
            return None
        counted = {counter.symbol for counter in self.counters}
        for guard in self.shape_env.guards:
            if guard.expr.free_symbols & counted:
                continue  # checked before each run
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


def _equal(one: Any, other: Any) -> Any:
    """Return the condition that two expressions are equal."""
    from sympy import Eq  # type: ignore[import-untyped]

    return Eq(one, other, evaluate=False)


def _is_not_0_or_1(condition: Any, dims: Collection[Any]) -> bool:
    """Tell whether a condition says no more than that one of these sizes is neither 0 nor 1: it holds from 2 on."""
    for dim in dims:
        (symbol,) = dim.free_symbols
        beyond = symbol.func("beyond", integer=True, nonnegative=True)
        if condition.free_symbols == {symbol} and condition.xreplace({symbol: symbol - dim + 2 + beyond}) == True:  # noqa: E712
            return True
    return False
