"""For ops that take lists of the host: renew these lists in a captured graph before each replay.

Some kernels take lengths as lists of the host (`actual_seq_lengths_kv`), and a captured graph keeps the lists of its
capture. An op that has them is captured in a task group, whose arguments the host may renew on another stream:

    event.wait; event.reset; graph_task_group_begin; op.out(…); graph_task_group_end            at capture
    graph_task_update_begin; op.out(…, new lists); graph_task_update_end; event.record          before each replay

The replay waits at the event, which the reset makes good for one replay. Each op registers its own task with the graph
that is being captured: no list of arguments runs beside the graph, so nothing can get out of step with it.

    updatable(
        torch.ops.npu.npu_fused_infer_attention_score.out, query, key, value,
        host={
            "actual_seq_lengths_kv": seq_lens,
            "actual_seq_lengths": FromInputs(query_starts, transform=lambda starts: starts[1:]),
        },
        out=[out, log_sum_exp], workspace=workspace, num_heads=8, input_layout="TND", …
    )

The tensors behind the lists are declared inputs of the program, given to the op as they are (a contiguous part of one
will do, as `query_starts[1:]`); what the kernel needs of their values, the transform computes, in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from core.errors import UsageError
from core_npu.update_tasks import Argument, check_ints, current, made, read_list, record

__all__ = ["FromInputs", "host_values", "is_capturing", "updatable"]


class FromInputs:
    """A host-side argument made of the values of tensors that are declared inputs, or contiguous parts of such.

    transform: called with one list of ints per tensor, row by row; returns what the op takes. It runs at each step and
    must be pure Python that keeps no tensor alive; left out, the op takes the list of the one tensor as it is.
    """

    __slots__ = ("tensors", "transform")

    def __init__(self, *tensors: Tensor, transform: Callable[..., Any] | None = None) -> None:
        if not tensors or (transform is None and len(tensors) > 1):
            raise UsageError(
                f"FromInputs of {len(tensors)} tensors",
                found="no transform",
                remedy="give one tensor, or a transform that makes one argument of them",
            )
        self.tensors = tensors
        self.transform = transform


def is_capturing() -> bool:
    """Return whether ops of this thread are recorded into a graph now; false in the warm-up before."""
    return (tasks := current()) is not None and tasks.recording


def host_values(tensor: Tensor) -> list[int]:
    """Return the values of an integer tensor as a flat list.

    Outside of a capture this reads the tensor, and waits for the device. Inside, it gives the values that the warm-up
    saw, of a declared input only: for what is decided once (a workspace's size), never as an argument of a captured op,
    which `updatable` takes. Raises `CaptureError` for any other tensor, and at the end of a capture for an input that
    was read and that no task renews.
    """
    tasks = current()
    if tasks is None or not tensor.numel():
        check_ints(tensor)
        return read_list(tensor)
    place = tasks.find(tensor)
    if tasks.recording:
        tasks.note_read(place)
    return tasks.values(place)


def updatable(
    op: Any,
    *args: Any,
    host: Mapping[str, Tensor | FromInputs],
    out: Any,
    workspace: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run the `.out` form of an op whose `host` arguments take lists; inside a capture, as a task that is renewed.

    Returns what the op returns. Outside of a capture the tensors of `host` are read, which waits for the device;
    inside, each must be a declared input, or `CaptureError` is raised.
    host: by name of the op's argument, the tensor whose values it takes, or `FromInputs`.
    out: the op's results, allocated by the caller.
    workspace: large enough for all later values (the op's `get_max_workspace`); None for an op without that argument.
    """
    sources = {name: each if isinstance(each, FromInputs) else FromInputs(each) for name, each in host.items()}
    given = {**kwargs, "out": out} | ({} if workspace is None else {"workspace": workspace})
    tasks = current()
    if tasks is None:
        # Each read waits for the device, and arguments share tensors.
        read = {id(tensor): host_values(tensor) for each in sources.values() for tensor in each.tensors}
        values = {n: made([read[id(each)] for each in s.tensors], s.transform) for n, s in sources.items()}
        return op(*args, **given, **values)
    found = {n: Argument(tuple(tasks.find(each) for each in s.tensors), s.transform) for n, s in sources.items()}
    values = {n: made([tasks.values(place) for place in each.places], each.transform) for n, each in found.items()}
    if not tasks.recording:
        return op(*args, **given, **values)
    return record(tasks, op, args, given, found, values)
