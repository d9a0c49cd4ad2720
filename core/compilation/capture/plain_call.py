"""Callables that are captured without a trace: the shapes of their outputs are known from running them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import BucketTable, InputSpec
from core.compilation.capture.plan import Crop
from core.compilation.trace.traced import OutputRef, OutputTree
from core.errors import CaptureError, UsageError

OutputDims = tuple["str | int | None", ...]
"""An output's dimensions, as `InputSpec.shape` has them; None for one that no bucket dimension changes."""


class UntracedCall:
    """A callable with fixed static inputs and guards; knows the structure of its last result."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Tensor],
        guards: Mapping[str, Hashable],
        *,
        writable: Collection[str] = (),
        padded: bool = False,
        first: Callable[..., Any] | None = None,
    ) -> None:
        """Fix the callable's arguments.

        - writable: inputs that the callable may write into, since their memory is the caller's own.
        - padded: calls may have other sizes than the capture, so a plain number among the results may be wrong for
          them.
        - first: called in the callable's place the first time, to watch what a run does.
        """
        self._padded = padded
        self._first = first
        self._function = function
        self._arguments = {**inputs, **guards}
        self._inputs = {name: tensor for name, tensor in inputs.items() if name not in writable}
        self._names = {id(tensor): name for name, tensor in inputs.items()}
        self.output: OutputTree | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """Run it and return the tensors of its result, flat."""
        versions = [(name, tensor, tensor._version) for name, tensor in self._inputs.items()]
        with torch.no_grad():
            result = (self._first or self._function)(**self._arguments)
        self._first = None
        written = [name for name, tensor, version in versions if tensor._version != version]
        if written:
            raise CaptureError(
                f"capturing a callable that writes into its input {written[0]!r}",
                found="inputs are copied into static buffers, so the caller's tensor would not change",
                remedy='write into a copy, or declare InputSpec(…, padding="bound") and give the tensor: '
                f"options=core.CompileOptions(bound={{{written[0]!r}: tensor}})",
            )
        leaves, spec = pytree.tree_flatten(result)
        tensors: list[Tensor] = []
        refs = []
        for leaf in leaves:
            if id(leaf) in self._names:
                refs.append(OutputRef(name=self._names[id(leaf)]))
            elif isinstance(leaf, Tensor):
                refs.append(OutputRef(index=len(tensors)))
                tensors.append(leaf)
            elif self._padded and type(leaf) in (int, float):
                raise CaptureError(
                    f"capturing a callable that returns the number {leaf}",
                    found="it was computed at the bucket's size, and would be returned for calls of any size",
                    remedy="return tensors; or read the size off the inputs",
                )
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                refs.append(OutputRef(value=leaf))
            else:
                raise CaptureError(
                    f"capturing a callable that returns {type(leaf).__name__!r}",
                    found="it is not a tree of tensors that torch.utils._pytree knows",
                    remedy="return tensors, tuples, dicts or a registered output class",
                )
        self.output = OutputTree(tuple(refs), spec)
        return tuple(tensors)


class ObservedCropper:
    """Cuts outputs by the shapes they had in each bucket of a phase, or by their declaration.

    A dimension of an output belongs to the bucket dimension whose size it has in every bucket; two sizes are needed to
    tell.
    """

    reads: frozenset[str] | None = None

    def __init__(
        self, table: BucketTable, inputs: Mapping[str, InputSpec], outputs: Sequence[OutputDims] | None = None
    ) -> None:
        self._table = table
        self._inputs = inputs
        self._declared = outputs
        self._shapes: dict[GraphKey, list[tuple[int, ...]]] = {}

    def observe(self, key: GraphKey, outputs: Sequence[Tensor]) -> None:
        """Note the shapes of a bucket's outputs."""
        self._shapes[key] = [tuple(tensor.shape) for tensor in outputs]
        if self._declared is not None and not self._is_declared(key):
            raise UsageError(
                f"outputs={tuple(self._declared)!r}",
                found=f"{key} returns tensors of shapes {self._shapes[key]}; the bucket's sizes are "
                f"{self._table.sizes(key)}",
                remedy="declare each output tensor, in order, with one entry per dimension: a size as in "
                "`InputSpec.shape`, or None",
            )

    def _is_declared(self, key: GraphKey) -> bool:
        """Return whether the outputs of a bucket have the shapes that were declared."""
        declared, shapes, sizes = self._declared or (), self._shapes[key], self._table.sizes(key)
        if [len(dims) for dims in declared] != [len(shape) for shape in shapes]:
            return False
        for dims, shape in zip(declared, shapes, strict=True):
            spec = InputSpec(
                tuple(size if dim is None else dim for dim, size in zip(dims, shape, strict=True)), torch.bool
            )
            if not set(spec.dims()) <= sizes.keys() or spec.resolve(sizes) != shape:
                return False
        return True

    def crops(self, key: GraphKey, buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Crop]:
        """Return the part of each output that belongs to these inputs; raise `CaptureError` where that is unknown."""
        real: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._inputs[name].measure(name, tensor.shape, real)
        padded = {dim for dim, size in self._table.sizes(key).items() if real.get(dim, size) != size}
        if not padded:
            return []
        return [
            tuple(self._cut(key, index, dim, real, padded) for dim in range(len(shape)))
            for index, shape in enumerate(self._shapes[key])
        ]

    def _cut(self, key: GraphKey, index: int, dim: int, real: Mapping[str, int], padded: set[str]) -> slice:
        if self._declared is not None:
            declared = self._declared[index][dim]
            spec = InputSpec((declared,), torch.bool) if isinstance(declared, str) else None
            return slice(None) if spec is None else slice(spec.resolve(real)[0])
        # Compare all buckets of this phase and these guards whose outputs have equally many dimensions.
        form = [len(shape) for shape in self._shapes[key]]
        same = {k: s for k, s in self._shapes.items() if k.phase == key.phase and k.guards == key.guards}
        seen = {k: s[index][dim] for k, s in same.items() if [len(shape) for shape in s] == form}
        owners = [d for d in self._table.dims if all(self._table.sizes(k)[d] == size for k, size in seen.items())]
        told = [d for d in owners if len({self._table.sizes(k)[d] for k in seen}) > 1]
        if len(told) == 1:
            return slice(real[told[0]])
        varied = {d for d in padded if len({self._table.sizes(k)[d] for k in seen}) > 1}
        if not told and not owners and len(set(seen.values())) == 1 and varied == padded:
            return slice(None)  # it stayed the same while every padded dimension changed
        raise CaptureError(
            f"padding to {key}",
            found=f"dimension {dim} of output {index} has sizes {sorted(set(seen.values()))} in the buckets captured, "
            "which does not tell where padding lies in it",
            remedy="declare the outputs: options=core.CompileOptions(outputs=[('tokens', None)]); or fill a bucket "
            "exactly",
        )
