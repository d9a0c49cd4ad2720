"""Kernels that are compiled ahead of the first run, several at a time, by compilers of the device that can do so.

A graph says which implementations it calls and with what tensors, in each bucket. Its ops are asked for their kernels
by stand-ins of these tensors that have no memory, so nothing runs. What is not found in this way is compiled as ever,
by the run that launches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from core.common.kernel_compilers import BeginKernels, counting_kernels
from core.common.ops.declaration import declared_ops
from core.compilation.implementations import OpChoice, asked, bound_call
from core.compilation.timed_calls import AlikeCalls, Form, in_bucket, own_tensors
from core.errors import one_line

if TYPE_CHECKING:
    from core.common.graphs.backend import GraphKey
    from core.common.ops.declaration import CanonicalOp
    from core.common.ops.implementation import OpImplementation
    from core.compilation.measuring import BucketValues
    from core.device import Device

_ALIGNED = 16
"""Bytes: the coarsest alignment that compilers of kernels ask for."""


class KernelsAhead:
    """Has the kernels of one program compiled while it is prepared."""

    def __init__(self, device: Device, note: Callable[[str], None]) -> None:
        """note: takes why kernels of an op are left to the run that launches them."""
        self._device = device
        self._note = note
        self._compilers = [each for each in device.kernel_compilers if each.ahead is not None]
        self._begin: list[BeginKernels] = []
        self._seen: set[str] = set()
        #: Kernels that were compiled while the block of `compiling` ran; those found on disk are not counted.
        self.num_kernels = 0
        #: Seconds that the end of the block waited for kernels.
        self.wait_s = 0.0

    @property
    def compiles(self) -> bool:
        """Whether `begin` works now: inside of `compiling`, on a device with such compilers."""
        return bool(self._begin)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enter around what prepares graphs: `begin` works inside, and the block ends when all kernels are there."""
        with counting_kernels(self._compilers) as count:
            with ExitStack() as stack:
                self._begin = [stack.enter_context(each.ahead()) for each in self._compilers if each.ahead is not None]
                try:
                    yield
                finally:
                    self._begin, start = [], time.perf_counter()
            self.wait_s += time.perf_counter() - start
            self.num_kernels += count()

    def begin(
        self, graph: fx.GraphModule, choices: Sequence[OpChoice], buckets: Mapping[GraphKey, BucketValues]
    ) -> None:
        """Begin the kernels of these calls in each bucket, those of implementations that are to be timed included."""
        nodes = {node.name: node for node in graph.graph.nodes}
        by_name = {(each.op, each.name): each for each in self._device.ops}
        alike: dict[object, tuple[OpChoice, fx.Node]] = {}
        for choice in choices:
            # A collective's kernel is made by all processes together.
            if (choice.op, choice.implementation) in by_name and not declared_ops()[choice.op].is_collective:
                alike.setdefault(_as_traced(choice, nodes[choice.node]), (choice, nodes[choice.node]))
        for given in buckets.values():
            for choice, node in alike.values():
                op = declared_ops()[choice.op]
                candidates = [by_name[choice.op, name] for name in (choice.implementation, *choice.others)]
                self._begin_call(op, candidates, node, given)

    def _begin_call(
        self, op: CanonicalOp, candidates: Sequence[OpImplementation], node: fx.Node, given: BucketValues
    ) -> None:
        arguments = bound_call(node, op).args
        fixed = in_bucket(arguments, given.sizes)
        if fixed is None:
            return
        own = own_tensors(node, op, given.values)
        try:
            beyond = {name: _beyond(own.get(name), value, given.sizes) for name, value in arguments.items()}
        except TypeError:  # where in its memory it begins, only a run tells
            return
        call = f"{op.qualified_name} {[each.name for each in candidates]} {fixed} {beyond}"
        if call in self._seen:
            return
        self._seen.add(call)
        described = AlikeCalls(fixed).described(op, self._device.torch_device) if len(candidates) > 1 else None
        made = {n: _stand_in(v, beyond[n]) if isinstance(v, Form) else v for n, v in fixed.items()}
        for each in candidates:
            if described is not None and each is not candidates[0] and asked(each, "timed", described):
                continue
            try:
                for begin in self._begin:
                    begin(each.fn, made)
            except Exception as error:  # of code that a plugin brings; a run of it tells what is wrong
                why = f"{type(error).__name__}: {one_line(str(error))}"
                self._note(f"kernels of {each.name} are compiled when it first runs, not ahead: {why}")


def _as_traced(choice: OpChoice, node: fx.Node) -> object:
    """Return what is equal for calls that no bucket can tell apart: implementations and arguments, sizes as symbols."""

    def size(value: Any) -> object:
        return value.node.expr if isinstance(value, torch.SymInt) else value

    def form(value: Any) -> object:
        if not isinstance(value, Tensor):
            return size(value) if isinstance(value, torch.SymInt) else repr(value)
        return value.dtype, *map(size, (*value.shape, *value.stride(), value.storage_offset()))

    arguments = bound_call(node, declared_ops()[choice.op]).args
    return choice.implementation, choice.others, *((name, form(value)) for name, value in arguments.items())


def _beyond(own: Tensor | None, traced: Any, sizes: Mapping[Any, int]) -> int:
    """Return how many bytes beyond an aligned address a tensor begins; memory that a step allocates is aligned."""
    if own is not None:
        return own.data_ptr() % _ALIGNED
    if not isinstance(traced, Tensor):
        return 0
    offset = traced.storage_offset()
    number = offset.node.expr.xreplace(dict(sizes)) if isinstance(offset, torch.SymInt) else offset
    return int(number) * traced.dtype.itemsize % _ALIGNED


def _stand_in(form: Form, beyond: int) -> Tensor:
    """Return a tensor without memory; `data_ptr()` of such tensors counts from 0."""
    offset = beyond // form.dtype.itemsize
    size = 1 + sum((n - 1) * s for n, s in zip(form.shape, form.stride, strict=True)) if all(form.shape) else 0
    return torch.empty(offset + size, dtype=form.dtype, device="meta").as_strided(form.shape, form.stride, offset)
