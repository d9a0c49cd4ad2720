"""Captures a callable in parts: graphs between the break points that it reaches, eager calls at the break points.

Nothing is traced: the callable runs, and recording ends and begins around each break point. Each graph is replayed as
soon as it is recorded, so that the eager call after it sees real values. Python outside the break points runs once, at
capture; its decisions are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from core.common.graphs.backend import BoundCallable, GraphKey, SegmentBackend
from core.common.graphs.weak import Loose, addresses, has_address
from core.compilation.capture.breaks import HeldValues, breaking, hold
from core.compilation.capture.stitch import EagerStep, GraphStep, Step, stitch
from core.errors import CaptureError


@dataclass(frozen=True, slots=True)
class CapturedParts:
    """A callable captured in parts."""

    #: Replays all parts and makes the eager calls between them.
    run: Callable[[], None]
    #: The generated Python of `run`.
    source: str
    #: Static, valid until the next replay of any key.
    outputs: tuple[Tensor, ...]
    num_graphs: int
    #: Names of the eager calls, in order.
    eager: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Meta:
    """The metadata of one tensor of a break point's result."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: Whether it lies in an argument's memory, which the graphs read.
    given: bool
    #: Its address if the function keeps the memory beyond the warm-up (a cache); else 0.
    kept: int = 0

    @classmethod
    def of(cls, tensor: Tensor, given: frozenset[int]) -> _Meta:
        shared = tensor.untyped_storage().data_ptr() in given
        return cls(tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride()), shared)

    def allocate(self) -> Tensor | None:
        if self.given:
            return None
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


_Result = tuple[str, tuple[_Meta, ...]]
"""The name of a break point, and the metadata of the tensors that it returned in the warm-up."""


class _Warmup:
    """Runs break points eagerly and records the metadata of their results."""

    def __init__(self) -> None:
        self._results: list[tuple[str, list[_Meta]]] = []
        self._memory: list[list[tuple[StorageWeakRef, int]]] = []

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = addresses(_tensors((args, kwargs)))
        with breaking(None):
            result = fn(*args, **kwargs)
        leaves = _checked_leaves(name, result, (args, kwargs))
        self._results.append((name, [_Meta.of(leaf, given) for leaf in leaves]))
        self._memory.append([(StorageWeakRef(leaf.untyped_storage()), leaf.data_ptr()) for leaf in leaves])
        return result

    def results(self) -> list[_Result]:
        """Return what the break points returned; asked when the run is over and its results are gone."""
        return [
            (name, tuple(replace(m, kept=_kept(m, *at)) for m, at in zip(metas, memory, strict=True)))
            for (name, metas), memory in zip(self._results, self._memory, strict=True)
        ]


def _kept(meta: _Meta, reference: StorageWeakRef, address: int) -> int:
    return 0 if meta.given or reference.expired() else address


class _Capture:
    """Ends the recording at each break point, runs it, and begins the next recording."""

    def __init__(self, backend: SegmentBackend, key: GraphKey, results: list[_Result], device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._key = key
        self._results = results
        self._open: AbstractContextManager[None] | None = None
        self._part = 0
        self._steps: list[Step] = []
        self._outputs: Any = ()
        self.num_breaks = 0

    def begin(self) -> None:
        """Begin to record the next part."""
        segment = self._backend.segment(self._key._replace(part=self._part))
        segment.__enter__()
        self._open = segment

    def end(self) -> None:
        """End the part and run it, since the next eager call or capture reads its results."""
        assert self._open is not None
        segment, self._open = self._open, None
        segment.__exit__(None, None, None)
        key = self._key._replace(part=self._part)
        self._backend.replay(key)
        self._steps.append(GraphStep(key))
        self._part += 1

    def finish(self, outputs: tuple[Tensor, ...]) -> None:
        """End the last part and release the outputs; the caller must hold no reference to them."""
        self.end()
        self._outputs = self._loose(outputs)

    def settled(self) -> tuple[list[Step], tuple[Tensor, ...]]:
        """Return steps and outputs with stand-ins for their tensors, weak ones for memory of the graphs' pool."""
        steps = [step if isinstance(step, GraphStep) else step.changed(_settled) for step in self._steps]
        return steps, _settled(self._outputs)

    def _loose(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: Loose.of(tensor, self._device), tree)

    def abandon(self, error: BaseException) -> None:
        """End the part that is being recorded, if any, with this error."""
        segment, self._open = self._open, None
        if segment is not None:
            segment.__exit__(type(error), error, error.__traceback__)

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found_name, expected = self._results[self.num_breaks] if self.num_breaks < len(self._results) else ("", ())
        if found_name != name:
            raise _other_way(self._key, name)
        self.num_breaks += 1
        fn = _as_now(name, fn, self._device)
        # Allocated while recording: from the graphs' own pool, which reuses it once the model's code lets go of it.
        targets = [meta.allocate() for meta in expected]
        self.end()
        # Before the call: a function may change the containers that it is given.
        arguments, memory = self._loose((args, kwargs)), addresses(_tensors((args, kwargs)))
        with breaking(None):
            result = fn(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        tensors = _checked_leaves(name, result, (args, kwargs))
        found = [_Meta.of(tensor, memory) for tensor in tensors]
        if [(m.dtype, m.shape, m.given) for m in found] != [(m.dtype, m.shape, m.given) for m in expected]:
            raise _other_way(self._key, name)
        # A result that lies in an argument, or where it lay in the warm-up (a cache of the function's own), stays
        # there: the graphs read it in place.
        kept = tuple(
            t.detach() if m.given or m.kept == t.data_ptr() else None for m, t in zip(expected, tensors, strict=True)
        )
        targets = [target if at is None else None for at, target in zip(kept, targets, strict=True)]
        given = iter(zip(targets, tensors, strict=True))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                target, tensor = next(given)
                if target is not None:
                    target.copy_(tensor)
                    leaves[index] = target
        # From now on held weakly: graphs of later layers could not reuse memory that the steps hold.
        own_args, own_kwargs = arguments
        self._steps.append(EagerStep(name, fn, own_args, own_kwargs, *self._loose((tuple(targets), kept))))
        self.begin()
        return pytree.tree_unflatten(leaves, spec)


def capture_parts(
    backend: SegmentBackend,
    key: GraphKey,
    fn: BoundCallable,
    *,
    num_warmups: int,
    after_warmup: Callable[[], None],
    device: torch.device,
) -> CapturedParts:
    """Run `fn` to warm up, call `after_warmup`, and capture `fn` in parts under `key`. Call inside `capture_session`.

    device: where the backend's graphs allocate. Capturing runs `fn` once more, for real. Raises what `fn` raises while
    it is recorded, with the device usable.
    """
    hold(())  # of a call on this thread that failed before its end
    for _ in range(num_warmups):
        warmup = _Warmup()
        with breaking(warmup):
            fn()
    after_warmup()
    results = warmup.results()
    capture = _Capture(backend, key, results, device)
    try:
        with breaking(capture):
            capture.begin()
            capture.finish(fn())
    except BaseException as error:
        capture.abandon(error)
        raise
    if capture.num_breaks != len(results):
        raise _other_way(key, results[capture.num_breaks][0])
    steps, outputs = capture.settled()
    num_graphs = sum(isinstance(step, GraphStep) for step in steps)
    eager = tuple(step.name for step in steps if isinstance(step, EagerStep))
    return CapturedParts(*stitch("replay", steps, backend.replay), outputs, num_graphs, eager)


def _settled(tree: Any) -> Any:
    return pytree.tree_map_only(Loose, Loose.settle, tree)


def _as_now(name: str, fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `fn` wrapped in the present autocast regions, and what is held: at a replay nothing else sets them."""
    kinds = {"cpu", device.type}
    regions = [(kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    held = HeldValues()
    if not regions and not held:
        return fn

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, dtype in regions:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            stack.enter_context(held.set(f"the break point {name}"))
            return fn(*args, **kwargs)

    return call


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _checked_leaves(name: str, result: Any, given: Any) -> list[Tensor]:
    """Return the tensors of a break point's result; refuse values that the code after it would freeze."""
    # Python shares one object among equal small numbers, so identity does not prove that a returned number is an
    # argument.
    handed_through = {id(leaf) for leaf in pytree.tree_leaves(given) if not isinstance(leaf, (bool, int, float, str))}
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
    other = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and id(leaf) not in handed_through]
    if other:
        raise CaptureError(
            f"the break point {name}",
            found=f"it returns a {type(other[0]).__name__}, and what the code after it makes of that would be frozen",
            remedy="take a module around it as the break point, which returns tensors only",
        )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    foreign = [tensor for tensor in tensors if not has_address(tensor)]
    if foreign:
        raise CaptureError(
            f"the break point {name}",
            found=f"it returns a {type(foreign[0]).__name__} of {foreign[0].layout}: no memory that a graph can read",
            remedy="take a module around it as the break point, which returns plain tensors",
        )
    return tensors


def _other_way(key: GraphKey, name: str) -> CaptureError:
    return CaptureError(
        f"capturing {key} in parts",
        found=f"at break point {name} it went another way, or gave other shapes, than in the run before: control flow "
        "outside the break points depends on data",
        remedy="take the module around it as the break point: options=core.CompileOptions(eager=(its path,))",
    )
