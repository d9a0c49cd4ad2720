"""The Acme recorder: puts the aten calls of a callable on a tape that can be run again into the same memory.

The rules are those of a hardware graph, so that mistakes which would corrupt results on a device show on a laptop:
recording changes nothing that existed before it, its outputs hold no usable values until the first replay, it refuses
to read values back to the host, and a replay writes every result to the address at which recording had put it.
It sees what goes through torch's dispatcher, and nothing else: compiled kernels that work on raw addresses do not.

Legend: a *fresh* storage was allocated during the capture; every other storage belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from core.common.graphs.backend import BoundCallable
from core.errors import CaptureError
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These read memory without a dispatcher call, so only the level of Python functions can see them.
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu})
_HOST_DEPENDENT_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class _Call(NamedTuple):
    """One recorded call. landings: flat index of an output and the captured tensor that a replay must fill."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    landings: tuple[tuple[int, torch.Tensor], ...]


@dataclass(slots=True)
class Tape:
    """The recorded calls, and what is needed to undo the writes of the recording itself, keyed by address."""

    calls: list[_Call] = field(default_factory=list)
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)

    def save(self, tensor: torch.Tensor) -> None:
        """Keep the content of a storage that is about to be written, unless the capture allocated it."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.fresh and address not in self.saved:
            self.saved[address] = (storage, storage.clone())  # type: ignore[no-untyped-call]  # torch's

    def undo_writes(self) -> None:
        """Give every storage that existed before the capture its content back."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        self.saved.clear()

    def poison(self) -> None:
        """Fill everything the capture allocated with values nobody can mistake for results."""
        for tensor in self.fresh.values():
            flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            if flat.dtype == torch.bool:
                flat.logical_not_()
            elif flat.is_floating_point() or flat.is_complex():
                flat.fill_(float("nan"))
            else:
                flat.fill_(torch.iinfo(flat.dtype).max)

    def replay(self) -> None:
        """Run every call again on the captured tensors; in-place results land by themselves, others are copied."""
        for call in self.calls:
            results = call.op(*call.args, **call.kwargs)
            if call.landings:
                flat = tree_leaves(results)
                for index, captured in call.landings:
                    _land(call.op, flat[index], captured)


def _land(op: Callable[..., Any], result: torch.Tensor, captured: torch.Tensor) -> None:
    """Copy a replayed result to its captured address, whole storages at a time: that is exact for any strides."""
    if _geometry(result) != _geometry(captured):
        raise _refusal(op, "it gave another shape or layout than while recording", "give it inputs of fixed shape")
    captured.untyped_storage().copy_(result.untyped_storage())


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    nbytes = tensor.untyped_storage().nbytes()
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), nbytes)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Runs each call, so that shapes and addresses become known, and puts it on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Under inference_mode composite ops arrive whole and could hide a host read; elsewhere they arrive decomposed.
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if func is torch.ops.aten.lift_fresh.default:
            # A literal such as torch.tensor([1.0]): every replay has to start from it, whatever is written in place.
            func = torch.ops.aten.clone.default
        _refuse_unrecordable(func, args, kwargs)
        written = _written(func, args, kwargs)
        for tensor in written:
            self.tape.save(tensor)
        out = func(*args, **kwargs)
        landings = self._landings(func, args, kwargs, out)
        # A call that neither writes nor allocates only makes a view, and views stay valid without being made again.
        if written or landings:
            self.tape.calls.append(_Call(func, args, kwargs, landings))
        return out

    def _landings(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[tuple[int, torch.Tensor], ...]:
        """Find the outputs in memory of their own, one per storage, and note that memory as fresh."""
        seen = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        landings = []
        for index, tensor in enumerate(tree_leaves(out)):
            if not isinstance(tensor, torch.Tensor):
                continue
            _refuse_foreign_layout(func, tensor)
            address = tensor.untyped_storage().data_ptr()
            if address not in seen:
                seen.add(address)
                self.tape.fresh[address] = tensor
                landings.append((index, tensor))
        return tuple(landings)


class _HostReadGuard(TorchFunctionMode):
    """Refuses the host reads that the recorder cannot see, except inside an opaque op: that is the op's own affair."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS:
            raise _host_read(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _refuse_unrecordable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for ops whose replay could not repeat what capture did."""
    if _HOST_DEPENDENT_TAGS.intersection(func.tags) and _depends_on_values(func, args, kwargs):
        raise _host_read(func)
    if torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default:
        raise _refusal(func, "it changes the shape or memory of a tensor in place", "use the out-of-place form")


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell the harmless uses of ops that are tagged for their worst case: integer indices, a given output size."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return True


def _refuse_foreign_layout(func: Any, tensor: torch.Tensor) -> None:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or (tensor.untyped_storage().data_ptr() == 0 and tensor.untyped_storage().nbytes() > 0):
        found = f"it returns a {type(tensor).__name__} of layout {tensor.layout}, and only memory can be replayed"
        raise _refusal(func, found, "keep such tensors out of the captured callable")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes, as the schema of its op declares them."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(_tensors(args[position] if position < len(args) else kwargs.get(argument.name)))
    return written


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _refusal(op: object, found: str, remedy: str) -> CaptureError:
    return CaptureError(f"acme: capture of {op}", found=found, remedy=remedy)


def _host_read(op: object) -> CaptureError:
    found = "it gives the host a value or a shape that depends on device data, which a replay could not renew"
    return _refusal(op, found, "move this read (.item(), .tolist(), nonzero, a boolean index) out of the captured part")


def record(fn: BoundCallable) -> tuple[Tape, tuple[torch.Tensor, ...]]:
    """Run `fn` once on tape and leave no trace of that run, be it a success or not."""
    tape = Tape()
    random_state = torch.get_rng_state()
    try:
        with _Recorder(tape), _HostReadGuard():
            outputs = fn()
    finally:
        with torch.inference_mode():
            tape.undo_writes()
        torch.set_rng_state(random_state)
    with torch.inference_mode():
        tape.poison()
    return tape, outputs
