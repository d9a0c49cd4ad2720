"""A recorder for devices whose runtime has no graphs, or none yet: it puts torch calls on a tape that can be run again.

The rules are those of a hardware graph, so that mistakes which would corrupt results on a device show on a laptop:

- recording changes nothing that existed before it;
- what it allocates holds no usable values until the first replay;
- it refuses reads of values on the host, and every op that it cannot replay;
- a replay repeats every effect, collectives included, and writes each result to the address that recording gave it.

It sees what goes through torch's dispatcher, and nothing else: compiled kernels that work on raw addresses do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.common.graphs.tape import Call, Landing, Tape, geometry, identify, poison
from core.common.graphs.torch_modes import enter_modes, leave_modes
from core.errors import CaptureError

# These read memory without a dispatcher call, so only the level of Python functions can see them.
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu})
_HOST_DEPENDENT_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# What these allocate has no content that a replay could renew; the memory itself stays where it is.
_UNDEFINED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


class _Recorder(TorchDispatchMode):
    """Runs each call, so that shapes and addresses become known, and puts it on the tape."""

    def __init__(self, tape: Tape, recorded: Callable[[Call], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tape = tape
        self._recorded = recorded

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
        written = written_by(func, args, kwargs)
        before = [(tensor, geometry(tensor)) for tensor in written]
        for tensor in written:
            self.tape.save(tensor)
        out = func(*args, **kwargs)
        self._refuse_resizing(func, before)
        landings = self._landings(func, args, kwargs, out)
        if written or not (func in _UNDEFINED or _makes_views(func)):
            call = Call(func, list(args), dict(kwargs), landings, func.namespace == "_c10d_functional")
            self._recorded(call)
            self.tape.calls.append(call)
        return out

    def _refuse_resizing(self, func: Any, before: list[tuple[torch.Tensor, tuple[Any, ...]]]) -> None:
        """Let `out=` resize only memory from `torch.empty`: a replay never copies into that memory, so its size is
        free."""
        for tensor, (_, shape, stride, offset, nbytes) in before:
            if geometry(tensor)[1:] == (shape, stride, offset, nbytes):
                continue
            if identify(tensor) in self.tape.fresh and not self.tape.lands(tensor):
                continue
            storage = tensor.untyped_storage()
            storage.resize_(nbytes)
            tensor.set_(storage, offset, shape, stride)
            raise _refusal(func, "it resizes its `out=` tensor", "give it an output of the right shape")

    def _landings(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Landing, ...]:
        """Find the outputs in memory of their own, one per storage, and note that memory as fresh."""
        seen = {identify(tensor) for tensor in _tensors((args, kwargs))}
        landings = []
        for index, tensor in enumerate(tree_leaves(out)):
            if not isinstance(tensor, torch.Tensor):
                continue
            _refuse_foreign_layout(func, tensor)
            identity = identify(tensor)
            if identity not in seen:
                seen.add(identity)
                self.tape.fresh[identity] = tensor
                landings.append(Landing(index, tensor.untyped_storage(), geometry(tensor)))
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
    if any(isinstance(result.type, torch._C.ClassType) for result in func._schema.returns):
        raise _refusal(
            func,
            "it returns a handle to work under way, which a replay could neither renew nor wait for",
            "use torch.distributed._functional_collectives, or keep this call out of the captured part",
        )
    if torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default:
        raise _refusal(func, "it changes the shape or memory of a tensor in place", "use the out-of-place form")


def _makes_views(func: Any) -> bool:
    """Return whether all results of an op are views by its schema.

    A replay skips such ops, since a view stays valid. Any other op that seems to do nothing may wait for a collective,
    check a value or print, so a replay repeats it.
    """
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is harmless although its op is tagged for the worst case: integer indices, a given output
    size."""
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


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes, as the schema of its op declares them."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(_tensors(args[position] if position < len(args) else kwargs.get(argument.name)))
    return written


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _refusal(op: object, found: str, remedy: str) -> CaptureError:
    return CaptureError(f"capture of {op}", found=found, remedy=remedy)


def _host_read(op: object) -> CaptureError:
    found = "it gives the host a value or a shape that depends on device data, which a replay could not renew"
    return _refusal(op, found, "move this read (.item(), .tolist(), nonzero, a boolean index) out of the captured part")


class _Active(threading.local):
    """The recording under way on this thread; torch's modes are per thread too."""

    recording: Recording | None = None


_ACTIVE = _Active()


def refuse_while_recording(what: str) -> None:
    """Raise `CaptureError` where this thread is recording: a device can neither capture nor replay within a capture."""
    if _ACTIVE.recording is not None:
        raise CaptureError(what, found="this thread is recording a graph", remedy="end that recording first")


class Recording:
    """Records on the thread that made it, from its construction until `finish` or `abandon`.

    Both undo the run's writes to memory that existed before, and restore the random state of the host and of `device`.
    The caller turns gradients off: a `no_grad` of the recording would end in the middle of running code and upset the
    scopes there. Raises `CaptureError` where this thread records already.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        refuse_while_recording("a recording")
        self.tape = Tape()
        self._restore_random_state = _random_state(device)
        self._recorder, self._guard = _Recorder(self.tape, self.recorded), _HostReadGuard()
        _ACTIVE.recording = self
        enter_modes(self._recorder, self._guard)

    def recorded(self, call: Call) -> None:
        """See each call before it goes on the tape; a subclass may note places in its arguments."""

    def finish(self) -> Tape:
        """End the recording, poison what it allocated, and return the tape."""
        self._stop()
        with torch.inference_mode():
            poison(self.tape.fresh.values())
        self.tape.num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self.tape.fresh.values())
        return self.tape

    def abandon(self) -> None:
        """End the recording without a tape; harmless where it has ended already."""
        if _ACTIVE.recording is self:
            self._stop()

    def _stop(self) -> None:
        if _ACTIVE.recording is not self:
            raise CaptureError(
                "the end of a recording",
                found="it was abandoned before, or begun on another thread",
                remedy="end a recording once, on its thread and within its capture session",
            )
        _ACTIVE.recording = None
        leave_modes(self._recorder, self._guard)
        del self._recorder, self._guard  # break the cycle that would keep the tape's memory
        with torch.inference_mode():
            self.tape.undo_writes()
        self._restore_random_state()


def _random_state(device: torch.device | None) -> Callable[[], None]:
    """Read the random state of the host, and of the device if it has one; return a function that restores both."""
    host = torch.get_rng_state()
    module: Any = None if device is None else torch.get_device_module(device)
    own = module.get_rng_state(device) if hasattr(module, "get_rng_state") else None

    def restore() -> None:
        torch.set_rng_state(host)
        if own is not None:
            module.set_rng_state(own, device)

    return restore
