"""Functionalisation: runs a graph so that its trace writes nothing except, at the very end, its inputs.

torch's own (`FunctionalTensorMode`), as AOTAutograd uses it. AOTAutograd leaves one thing to its run-time wrappers that
the graph does here: an output in the memory of a written input is returned as a view of that input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._subclasses.functional_tensor import FunctionalTensorMode

from core.common.passes.functional.memory import Area
from core.common.passes.pass_guards import Form
from core.common.passes.values.layouts import flat, memory, same_layout
from core.common.passes.values.sizes import same_size
from core.errors import TraceError


@contextmanager
def wrapping(form: Form) -> Iterator[None]:
    """Let torch wrap custom ops that write in the nodes of this form; it reads that from Inductor's configuration."""
    import torch._inductor.config as inductor_config  # brings Inductor and Dynamo: not for programs without this stage

    config: Any = inductor_config
    with config.patch(enable_auto_functionalized_v2=form == "v2"), FunctionalTensorMode():
        yield


def functionalized(run: Callable[..., Any], names: Sequence[str]) -> Callable[..., list[Any]]:
    """Return `run` with its updates made functional; to be traced within `wrapping`.

    names: of the arguments, for errors. The outputs come as a flat list.
    """

    def functional(*args: Any) -> list[Any]:
        wrapped: list[Any] = []
        for index, value in enumerate(args):
            twin = _twin(value, args[:index])
            wrapped.append(to_fun(value) if twin is None else wrapped[twin])
        outputs = flat(run(*wrapped))
        written = [index for index, value in enumerate(wrapped) if _is_written(value, wrapped[:index])]
        for index in written:
            _refuse_alias(index, args, names)
        homes = {memory(wrapped[index]): args[index] for index in written}
        given = [_home(output, homes) for output in outputs]
        values = [from_fun(output) for output in outputs]
        for index in written:
            new: Any = from_fun(wrapped[index])
            _refuse_reshaping(names[index], args[index], new)
            args[index].copy_(new)
        return [
            value if home is None else _view_of(home, output)
            for value, home, output in zip(values, given, outputs, strict=True)
        ]

    return functional


def _twin(value: Any, earlier: Sequence[Any]) -> int | None:
    """Return the earlier argument that is the same tensor: same memory and same layout."""
    if not isinstance(value, Tensor):
        return None
    for index, other in enumerate(earlier):
        shares = isinstance(other, Tensor) and memory(other) == memory(value)
        if shares and same_layout(other, value) and same_size(other.storage_offset(), value.storage_offset()):
            return index
    return None


def _is_written(value: Any, earlier: Sequence[Any]) -> bool:
    return isinstance(value, Tensor) and not any(value is other for other in earlier) and has_data_mutation(value)


def _refuse_alias(index: int, args: Sequence[Any], names: Sequence[str]) -> None:
    """Raise if another argument overlaps the written memory: a functional graph would not update it."""
    written = args[index]
    area = Area.of(written)
    for other, name in zip(args, names, strict=True):
        if not isinstance(other, Tensor) or other is written or memory(other) != memory(written):
            continue
        there = Area.of(other)
        if area is None or there is None or not (area.is_apart(there) or area.is_same(there)):
            raise TraceError(
                f"functionalising a graph that writes {names[index]}",
                found=f"{name} shares a part of its memory, and would not show the write",
                remedy="give the graph tensors that do not overlap, or disable the passes of stage functional",
            )


def _refuse_reshaping(name: str, old: Tensor, new: Tensor) -> None:
    if len(old.shape) != len(new.shape) or not all(map(same_size, old.shape, new.shape)):
        raise TraceError(
            f"functionalising a graph that writes {name}",
            found=f"it changes the shape in place, from {tuple(old.shape)} to {tuple(new.shape)}",
            remedy="write into memory of a fixed shape, or disable the passes of stage functional",
        )


def _home(output: Any, homes: dict[int, Tensor]) -> Tensor | None:
    """Return the written input in whose memory an output lies."""
    return homes.get(memory(output)) if isinstance(output, Tensor) else None


def _view_of(home: Tensor, output: Tensor) -> Tensor:
    """Return the output as a view of the input, once that holds its new value."""
    if same_layout(home, output) and same_size(home.storage_offset(), output.storage_offset()):
        return home
    return torch.as_strided(home, output.shape, output.stride(), output.storage_offset())
