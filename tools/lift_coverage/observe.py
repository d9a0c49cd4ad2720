"""What a model does in one eager run: module calls, calls of functions by name, and every aten op with its data flow.

Nothing here reads a traced graph, so that what is found in one can be judged by what was seen to happen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as one op left it. producer: index of the op, -1 where the run found the tensor made."""

    producer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Op:
    """One aten op at run time. name: without namespace and overload. inputs, outputs: indices of values, in order.

    numbers: the arguments that are Python numbers. call: index of the innermost module call, -1 outside of all.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[int | float, ...]
    call: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module. path: as `named_modules` has it first; input: value of the first tensor given, or -1."""

    index: int
    path: str
    class_name: str
    module_of_class: str
    parent: int
    input: int


@dataclass(slots=True)
class FunctionCall:
    """One call of a Python function by name. parent: the innermost watched call around it, or -1.

    start, stop: its ops as a range of indices. call: the innermost module call around it. tables: identities of the
    tensors given under the watched argument names. num_results: tensors returned.
    """

    index: int
    name: str
    parent: int
    call: int
    start: int
    tables: tuple[int, ...]
    stop: int = -1
    num_results: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """One run. Indices are positions in these lists."""

    calls: Sequence[ModuleCall]
    ops: Sequence[Op]
    values: Sequence[Value]
    functions: Sequence[FunctionCall]

    def producer(self, value: int) -> Op | None:
        """Return the op that made a value, or None."""
        made = self.values[value].producer if value >= 0 else -1
        return self.ops[made] if made >= 0 else None

    def own_ops(self) -> Mapping[int, list[Op]]:
        """Return the ops by the module call that ran them itself, and not in a module below."""
        found: dict[int, list[Op]] = {}
        for op in self.ops:
            found.setdefault(op.call, []).append(op)
        return found

    def ancestors(self, call: int) -> Iterator[ModuleCall]:
        """Yield a module call and those around it, innermost first."""
        while call >= 0:
            yield self.calls[call]
            call = self.calls[call].parent


def observe(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    *,
    watch: Callable[[str], bool] = lambda name: False,
    tables: Callable[[str], bool] = lambda name: False,
) -> Observation:
    """Run `function(**inputs)`, which calls the model, and return what happened.

    watch: names of Python functions whose calls to note. tables: names of their arguments to tell apart by identity.
    """
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.callback(recorder.forget)
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(recorder.enter(path, module), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        stack.enter_context(_profiled(_Watcher(recorder, watch, tables)))
        function(**inputs)
    return Observation(recorder.calls, recorder.ops, recorder.values, recorder.functions)


class _Recorder(TorchDispatchMode):
    """Sees every aten op, and through its hooks which module runs it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # left unannotated by torch
        self.calls: list[ModuleCall] = []
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.functions: list[FunctionCall] = []
        self._current: dict[int, int] = {}
        # Kept alive, so that an identity stands for one tensor all the time.
        self._alive: list[Tensor] = []
        self._stack: list[int] = []

    @property
    def call(self) -> int:
        """The innermost module call."""
        return self._stack[-1] if self._stack else -1

    def forget(self) -> None:
        """Let the tensors go."""
        self._alive.clear()
        self._current.clear()

    def enter(self, path: str, module: nn.Module) -> Callable[..., None]:
        """Return the hook that notes a call of this module."""
        kind = type(module)

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            value = self.value(given) if given is not None else -1
            index = len(self.calls)
            self.calls.append(ModuleCall(index, path, kind.__name__, kind.__module__, self.call, value))
            self._stack.append(index)

        return hook

    def leave(self, *_: Any) -> None:
        """Note that the innermost module call has ended."""
        self._stack.pop()

    def value(self, tensor: Tensor) -> int:
        """Return the index of the tensor's value as it is now."""
        known = self._current.get(id(tensor))
        return self._made(tensor, -1) if known is None else known

    def _made(self, tensor: Tensor, producer: int) -> int:
        self._alive.append(tensor)
        self._current[id(tensor)] = len(self.values)
        self.values.append(Value(producer, tuple(tensor.shape), tensor.dtype))
        return len(self.values) - 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and note it."""
        leaves = pytree.tree_leaves((args, kwargs or {}))
        inputs = tuple(self.value(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, (int, float)) and not isinstance(leaf, bool))
        result = func(*args, **(kwargs or {}))
        index = len(self.ops)
        outputs = tuple(self._made(leaf, index) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        name = func._schema.name.partition("::")[2]
        self.ops.append(Op(index, name, inputs, outputs, numbers, self.call))
        return result


class _Watcher:
    """Notes calls of functions by name; a profiler, since models import functions by value and patching misses them."""

    def __init__(self, recorder: _Recorder, watch: Callable[[str], bool], tables: Callable[[str], bool]) -> None:
        self._recorder, self._watch, self._tables = recorder, watch, tables
        self._known: dict[CodeType, bool] = {}
        self._open: dict[FrameType, FunctionCall] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Note the start or the end of a watched call."""
        if event == "call" and self._is_watched(frame.f_code):
            self._start(frame)
        elif event == "return" and frame in self._open:
            call = self._open.pop(frame)
            call.stop = len(self._recorder.ops)
            call.num_results = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))

    def _is_watched(self, code: CodeType) -> bool:
        if code not in self._known:
            self._known[code] = self._watch(code.co_name)
        return self._known[code]

    def _start(self, frame: FrameType) -> None:
        recorder = self._recorder
        given = [value for name, value in frame.f_locals.items() if self._tables(name)]
        tables = tuple(id(leaf) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        parent = next(reversed(self._open.values())).index if self._open else -1
        index = len(recorder.functions)
        call = FunctionCall(index, frame.f_code.co_name, parent, recorder.call, len(recorder.ops), tables)
        recorder.functions.append(call)
        self._open[frame] = call


@contextmanager
def _profiled(watcher: _Watcher) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(watcher)
    try:
        yield
    finally:
        sys.setprofile(before)
