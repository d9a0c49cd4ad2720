"""The update tasks of a captured graph: calls whose host-side lists are renewed before each replay.

The interface for the code of ops is in core_npu/updates.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.common.graphs.weak import has_address, weak_tensor
from core.errors import CaptureError, UsageError

__all__ = ["Argument", "GraphTasks", "capturing", "check_ints", "current", "made", "read_list", "record"]

_INTS = (torch.int32, torch.int64)


class _Place(NamedTuple):
    """A range of values: entries start to stop of an input, flattened."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Argument:
    """One host-side argument of a captured op."""

    #: The ranges of its values.
    places: tuple[_Place, ...]
    #: Makes the argument from one list per range; None uses the single list as it is.
    transform: Callable[..., Any] | None

    def value(self, step: Mapping[str, Sequence[int]]) -> Any:
        """Return the op's argument for the values of a step."""
        return made([list(step[place.name][place.start : place.stop]) for place in self.places], self.transform)


@dataclass(frozen=True, slots=True)
class _Task:
    """One captured call whose host-side arguments are renewed. Tensors are held weakly: their memory is the graph's."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    host: Mapping[str, Argument]
    event: Any
    handle: Any

    def issue(self, stream: Any, values: Mapping[str, Any]) -> None:
        """Issue the call with new host-side arguments on the current stream, into the captured task group."""
        _npu().graph_task_update_begin(stream, self.handle)
        try:
            self.op(*self.args, **self.kwargs, **values)
        finally:
            _npu().graph_task_update_end(stream)
        self.event.record(stream)


@dataclass(slots=True)
class GraphTasks:
    """The update tasks of one graph, and what they are made from while it is captured."""

    #: The static inputs of the key, by name.
    inputs: Mapping[str, Tensor]
    #: Whether ops are being recorded; otherwise they run as warm-up.
    recording: bool = False
    tasks: list[_Task] = field(default_factory=list)
    _seen: dict[str, list[int]] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    @property
    def names(self) -> frozenset[str]:
        """Names of the inputs whose values the tasks take from the host."""
        return frozenset(place.name for task in self.tasks for each in task.host.values() for place in each.places)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Enter around the capture; raise `CaptureError` where a value went into the graph that no task renews."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
        frozen = self._read - self.names
        if frozen:
            raise CaptureError(
                f"capturing values of {', '.join(map(repr, sorted(frozen)))}",
                found="an op read them by host_values() and no update task renews them: the graph would keep these",
                remedy="give the op's list to updatable(), or run the op outside of the graph, as a break point",
            )

    def check(self, step: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the host-side arguments of each task for a step, made by the ops' transforms.

        Raises `UsageError` unless the step's values are ints, one for each entry of each input.
        """
        if step.keys() != self.names:
            raise UsageError(
                f"an update with {sorted(step)}",
                found=f"the graph takes from the host: {', '.join(sorted(self.names)) or 'nothing'}",
                remedy="give exactly these",
            )
        for name, values in step.items():
            wanted = self.inputs[name].numel()
            ints = isinstance(values, (list, tuple)) and all(type(value) is int for value in values)
            if not ints or len(values) != wanted:
                raise UsageError(
                    f"an update of {name!r}",
                    found=f"{len(values)} entries" if ints else f"{values!r:.80} is no list of ints",
                    remedy=f"give {wanted} ints, the padding of the bucket included",
                )
        return [{name: argument.value(step) for name, argument in task.host.items()} for task in self.tasks]

    def update(self, stream: Any, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Renew the arguments of all tasks on a stream of their own. arguments: as `check` returns them.

        The graph must not be running: its replay would meet arguments that are half new.
        """
        with _npu().stream(stream):
            for task, values in zip(self.tasks, arguments, strict=True):
                task.issue(stream, values)

    def values(self, place: _Place) -> list[int]:
        """Return the values of the last warm-up."""
        if not self.recording:
            self._seen[place.name] = read_list(self.inputs[place.name])
        elif place.name not in self._seen:
            raise CaptureError(
                f"the values of input {place.name!r} inside a capture",
                found="no warm-up read them, and a capture can't",
                remedy="let the op take the same way in a warm-up as in the capture",
            )
        return self._seen[place.name][place.start : place.stop]

    def note_read(self, place: _Place) -> None:
        """Note that values went into the graph by another way than a task."""
        self._read.add(place.name)

    def find(self, tensor: Tensor) -> _Place:
        """Return which input a tensor is, or is a contiguous part of; raise `CaptureError` where it is none."""
        check_ints(tensor)
        for name, known in self.inputs.items():
            if not has_address(known) or (known.dtype, known.device) != (tensor.dtype, tensor.device):
                continue
            start, rest = divmod(tensor.data_ptr() - known.data_ptr(), tensor.element_size())
            inside = start >= 0 and start + tensor.numel() <= known.numel() and tensor.numel()
            if inside and not rest and tensor.is_contiguous() and known.is_contiguous():
                return _Place(name, start, start + tensor.numel())
        raise CaptureError(
            f"the values of a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, as a host-side list of a graph",
            found=f"it is none of the program's inputs ({', '.join(self.inputs)}), nor a contiguous part"
            if self.inputs
            else "the graph is a part of a key, or of a program without inputs: it has none to take values of",
            remedy="hand the op the input itself, without a cast or a computation (give updatable() a transform "
            "instead), or a plain list where the values are constant",
        )


class _Current(threading.local):
    """The graph that this thread captures, from its warm-up on."""

    tasks: GraphTasks | None = None


_CURRENT = _Current()


@contextmanager
def capturing(inputs: Mapping[str, Tensor]) -> Iterator[GraphTasks]:
    """Enter around warm-up and capture of a graph; ops of this thread find their inputs in it and add their tasks."""
    before, _CURRENT.tasks = _CURRENT.tasks, GraphTasks(inputs)
    try:
        yield _CURRENT.tasks
    finally:
        _CURRENT.tasks = before


def current() -> GraphTasks | None:
    """Return the tasks of the graph that this thread warms up for or captures; None outside."""
    return _CURRENT.tasks


def record(
    tasks: GraphTasks,
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    host: dict[str, Argument],
    values: dict[str, Any],
) -> Any:
    """Run one call in a task group of the capture under way, add its task, and return what the op returns.

    args, kwargs: the call without its host-side arguments. host: the sources of these arguments. values: their present
    values.
    """
    npu = _npu()
    stream = npu.current_stream()
    event = npu.ExternalEvent()
    # An event stays set from its record until its reset. Reset right after the wait, it serves one replay.
    event.wait(stream)
    event.reset(stream)
    npu.graph_task_group_begin(stream)
    try:
        result = op(*args, **kwargs, **values)
    except BaseException:
        with suppress(RuntimeError):  # the capture is lost; the error being raised gives the cause
            npu.graph_task_group_end(stream)
        raise
    handle = npu.graph_task_group_end(stream)
    weak_args, weak_kwargs = pytree.tree_map_only(Tensor, _weak, (args, kwargs))
    tasks.tasks.append(_Task(op, weak_args, weak_kwargs, host, event, handle))
    return result


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]  # torch_npu registers it


def made(lists: Sequence[list[int]], transform: Callable[..., Any] | None) -> Any:
    """Return an op's argument, made from one list per tensor."""
    return lists[0] if transform is None else transform(*lists)


def read_list(tensor: Tensor) -> list[int]:
    """Read a tensor as a flat list, which waits for the device."""
    values: list[int] = tensor.detach().reshape(-1).tolist()
    return values


def check_ints(tensor: Tensor) -> None:
    """Raise `UsageError` unless a tensor holds ints that can become a list on the host."""
    if tensor.dtype not in _INTS:
        raise UsageError(
            f"host-side values of a tensor of {tensor.dtype}", found="no ints", remedy="give an int32 or int64 tensor"
        )


def _weak(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else weak_tensor(tensor)
